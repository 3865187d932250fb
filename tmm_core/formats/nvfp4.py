"""4-bit floats (e2m1) with a scale for each 16 values along K, as NVFP4 checkpoints store them.

Two are in a byte, the one of lower K in the low bits. The scales are e4m3. If a checkpoint also has
a factor for the whole tensor, the scales are fp32 and include it. Tensor cores multiply such
operands from Blackwell on. Here BLAS multiplies their values, and no kernel decodes them.
"""

from __future__ import annotations

import torch

from tmm_core.formats import Format
from tmm_core.formats.e2m1 import dequantize, quantize

FORMAT = Format(
    name="nvfp4",
    storage=(torch.uint8,),
    pack=2,
    grids=((1, 16),),
    scale_dtypes=(torch.float8_e4m3fn, torch.float32),
    limit=6.0,
    quantize=quantize,
    dequantize=dequantize,
    # The products are exact in fp32: only the result is rounded.
    tolerance=0.0,
)
