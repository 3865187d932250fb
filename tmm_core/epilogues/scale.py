"""``scale(factor)``: factor · z."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl


def scale(z, factor: tl.constexpr):
    return z * factor


def scale_slope(z, factor: tl.constexpr):
    return tl.full(z.shape, factor, tl.float32)


EPILOGUES = (
    Epilogue(
        "scale",
        lambda z, factor=1.0: z * factor,
        device=scale,
        device_derivative=scale_slope,
        output_vjp=lambda grad, y, factor: grad * factor,
        linear=True,
        builtin=True,
    ),
)
