"""Device functions of ``mish``, on fp32 blocks, which kernels fuse."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mish(z):
    # tanh(log(1 + e)) = (e² + 2e) / (e² + 2e + 2): no cancellation for small e, and 1 in fp32
    # from z = 20 on, long before e² overflows.
    e = tl.exp(tl.minimum(z, 20.0))
    n = e * (e + 2)
    return z * (n / (n + 2))


@triton.jit
def slope(z):
    # t + z · sigmoid(z) · (1 − t²), where t is mish's tanh.
    e = tl.exp(tl.minimum(z, 20.0))
    n = e * (e + 2)
    t = n / (n + 2)
    return t + z * (e / (1 + e)) * (1 - t * t)
