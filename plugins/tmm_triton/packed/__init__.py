"""Kernels for Hopper that multiply by packed weights."""
