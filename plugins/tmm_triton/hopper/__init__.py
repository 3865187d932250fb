"""The warp-specialised kernel for Hopper."""
