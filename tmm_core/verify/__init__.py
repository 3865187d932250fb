"""Verifies that kernels compute the right results."""
