"""Problems, epilogues, devices, and the protocol of kernels and plugin hooks."""
