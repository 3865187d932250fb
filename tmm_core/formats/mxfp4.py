"""4-bit floats (e2m1) with a power of two for each 32 values along K, as gpt-oss stores its experts
(OCP Microscaling Formats 1.0).

Two are in a byte, the one of lower K in the low bits. The scales are exponents of 8 bits (E8M0).
"""

from __future__ import annotations

import torch

from tmm_core.formats import Format
from tmm_core.formats.e2m1 import decode, dequantize, quantize
from tmm_core.formats.grids import EXPONENT

FORMAT = Format(
    name="mxfp4",
    storage=(torch.uint8,),
    pack=2,
    grids=((1, 32),),
    scale_dtypes=(EXPONENT,),
    limit=6.0,
    quantize=quantize,
    dequantize=dequantize,
    decode=decode,
    # The products are exact in fp32: only the result is rounded.
    tolerance=0.0,
)
