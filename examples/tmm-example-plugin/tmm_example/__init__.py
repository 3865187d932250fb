"""A kernel for one to four rows, and the epilogue ``mish``, for tmm."""
