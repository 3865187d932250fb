"""What is asked and what can answer it: problems, epilogues, devices, kernels and their hooks."""
