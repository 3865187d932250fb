"""8-bit floats (e4m3 and e5m2), multiplied in the tensor cores without conversion.

The result is wide by default, as in ``torch.nn.functional.scaled_mm``: an 8-bit result would need
its own scale.

Weights have scales by row, by group or by block of 128×128. Activations are plain, or have a scale
for each 128 values (DeepSeek-V3).
"""

from __future__ import annotations

import torch

from tmm_core.formats import NARROW_FLOATS, Format
from tmm_core.formats.grids import ROW, TENSOR


def decode(block, dtype):  # compiled by Triton
    """A block's values."""
    return block.to(dtype)


FORMAT = Format(
    name="fp8",
    storage=NARROW_FLOATS,
    grids=(TENSOR, ROW, (1, 32), (1, 64), (1, 128), (128, 128)),
    short=True,
    result=torch.bfloat16,
    implied=True,
    native=True,
    quantize=lambda numbers, dtype: numbers.to(dtype),
    # bf16 holds both exactly.
    dequantize=lambda stored: stored.to(torch.bfloat16),
    decode=decode,
    # Hopper's tensor cores accumulate 8-bit products with some 14 bits (DeepSeek-V3,
    # arXiv:2412.19437, 3.3.2). With promotion to fp32 every 128 terms, errors of 256×256 results
    # were 4e-4 to 7e-4 on an H200, for K from 128 to 65536, with cuBLAS and tmm's kernels alike.
    # Scales that differ between rows make them a few times larger. Without promotion the errors
    # were 2e-3 at K = 1024, 5e-3 at 8192 and 2.6e-2 at 65536.
    tolerance=4e-3,
)
