"""A user's own epilogue, as the conformance suite hands one to every kernel.

½(z + √(z² + b)), a smooth relu (arXiv:2112.11687); no installation has it built in.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squareplus(z, b: tl.constexpr):
    return 0.5 * (z + tl.sqrt(z * z + b))
