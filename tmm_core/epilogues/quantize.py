"""``quantize``: z, and as auxiliary outputs z in 8-bit floats (e4m3) with the scales of groups of
128 columns.

The next product takes both outputs as its ``a``, so that rounding z takes no separate launch. The
outputs are the results of ``quantize_rows(z, group=128)``. A group lies in one tile. A scale for a
whole row would take another pass: its largest value is known only after all tiles of the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.port import Port

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

GROUP = 128
#: The largest number of e4m3.
LARGEST = torch.finfo(torch.float8_e4m3fn).max
#: The bits of Inf in fp32.
INFINITE = 0x7F800000
#: Scales below it are multiplied by its reciprocal.
SMALL = 2.0**-64


def same(z):
    return z


def ones(z):
    return tl.full(z.shape, 1.0, tl.float32)


def itself(z: Tensor) -> Tensor:
    return z


def unchanged(grad: Tensor, y: Tensor) -> Tensor:
    return grad


def scale_of(groups: Tensor) -> Tensor:
    """The largest magnitude of each group, divided by the largest number of e4m3."""
    largest = groups.abs().amax(-1)
    # On a GPU torch multiplies by the reciprocal of a number, which can differ in the last bit.
    scale = largest / largest.new_full((), LARGEST)
    return scale.where(scale.isfinite(), torch.nan)


def device_scale_of(groups):
    # As integers NaN and Inf are the largest magnitudes: one reduction instead of two.
    bits = tl.max(tl.abs(groups).to(tl.int32, bitcast=True), axis=2)
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), LARGEST)
    return tl.where(bits < INFINITE, scale, float("nan"))


def scaled(groups: Tensor) -> Tensor:
    """Groups divided by their scales."""
    scale = scale_of(groups)[..., None]
    return groups / torch.where(scale == 0, 1.0, scale)


def device_scaled(groups):
    scale = device_scale_of(groups)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    # The reciprocal of a small number would be Inf.
    power = tl.where(divisor < SMALL, 1.0 / SMALL, 1.0)
    divisor = (divisor * power)[:, :, None]
    inverse = tl.div_rn(1.0, divisor)
    # A product with the reciprocal and one Newton step round as division does (P. Markstein, IBM
    # J. Res. Dev. 34, 1990). div.rn for each element took 60 more registers per thread.
    numbers = groups * power[:, :, None]
    found = numbers * inverse
    return tl.fma(tl.fma(-found, divisor, numbers), inverse, found)


def rounded(y: Tensor) -> tuple[Tensor, ...]:
    """Both outputs, on a GPU by one kernel."""
    return tuple(torch.ops.tmm.quantize_rows(y, GROUP))


EPILOGUES = (
    Epilogue(
        "quantize",
        itself,
        device=same,
        device_derivative=ones,
        output_vjp=unchanged,
        linear=True,
        outputs=(
            Port(
                "stored", "tile", torch.float8_e4m3fn, of=scaled, device=device_scaled, group=GROUP
            ),
            Port("scale", "group", of=scale_of, device=device_scale_of, group=GROUP),
        ),
        outputs_of=rounded,
    ),
)
