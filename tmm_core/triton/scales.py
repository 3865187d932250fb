"""Device functions of scales, which kernels and passes over memory share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factors(t):
    """Scales in fp32: powers of two of exponents (uint8), NaN for 255."""
    if t.dtype == tl.uint8:
        bits = t.to(tl.int32)
        power = tl.where(bits == 0, 0x400000, bits << 23)
        return tl.where(bits == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return t.to(tl.float32)
