"""Torch's BLAS on the device: the kernel that serves every problem, and that others must beat."""
