"""Device functions that several epilogues use: instructions of NVIDIA's special-function units."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton.language as tl

    INLINE_PTX = True  # tmm_core.triton.device_functions sets it for the compiler's target

LOG2_E = math.log2(math.e)


# Triton's ``tl.exp`` and ``/`` handle denormals: with them silu takes 13 instructions instead of 5.
def exp2(z):
    """2^z to 2 ulp; denormal results become zero."""
    if INLINE_PTX:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(z)
    return y


def reciprocal(z):
    """1 / z to 1 ulp; denormal results become zero."""
    if INLINE_PTX:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1 / z
    return y


def polynomial(*coefficients: float) -> Any:
    """A device function of one argument: a polynomial. The first of its two or more coefficients
    is the highest power's.

    On NVIDIA's GPUs it is one piece of inline assembly. Otherwise LLVM's SLP vectorizer spends a
    second on the polynomials of a tile, and vectorizes nothing.
    """
    *higher, last = coefficients
    first, *others = map(_literal, coefficients)
    steps = " ".join(f"fma.rn.f32 y, y, $1, {each};" for each in others)
    ptx = f"{{ .reg .f32 y; mov.f32 y, {first}; {steps} mov.f32 $0, y; }}"
    factor: Any = polynomial(*higher) if others[1:] else higher[0]

    def line(x):
        return x * factor + last

    def horner(x):
        if INLINE_PTX:
            y = tl.inline_asm_elementwise(ptx, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        else:
            y = factor(x) * x + last
        return y

    return horner if others[1:] else line


def _literal(value: float) -> str:
    """A number as PTX writes it: the bits of the nearest fp32."""
    return f"0f{struct.pack('>f', value).hex()}"


def logistic(x):
    """s = 1 / (1 + 2^x), and s·(1 − s) without the cancellation where s is near one."""
    e = exp2(-tl.abs(x))
    r = reciprocal(1 + e)
    return tl.where(x > 0, e * r, r), e * r * r
