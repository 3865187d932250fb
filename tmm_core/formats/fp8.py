"""8-bit floats, of 4 bits of exponent and 3 of mantissa or of 5 and 2, multiplied as they are.

The result is wide by default, as that of ``torch.nn.functional.scaled_mm``: one in 8 bits would
need a scale of its own.
"""

from __future__ import annotations

import torch

from tmm_core.formats import Format

FORMAT = Format(
    name="fp8",
    storage=(torch.float8_e4m3fn, torch.float8_e5m2),
    scales=("tensor", "row"),
    result=torch.bfloat16,
    quantize=lambda numbers, dtype: numbers.to(dtype),
    # bf16 holds both exactly.
    dequantize=lambda stored: stored.to(torch.bfloat16),
    # Hopper's tensor cores keep some 14 bits of a sum of them (DeepSeek-V3, arXiv:2412.19437,
    # 3.3.2). Added up in fp32 every 128 terms, 256×256 of them were off by 4e-4 to 7e-4 on an H200
    # for K from 128 to 65536, cuBLAS's and ours alike, of which scales that differ from row to row
    # make a few times as much; summed in these bits throughout by 2e-3 at K = 1024, 5e-3 at 8192
    # and 2.6e-2 at 65536.
    tolerance=4e-3,
)
