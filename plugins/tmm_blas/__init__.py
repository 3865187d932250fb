"""The BLAS torch has on the device: the kernel that always can, and what others must beat."""
