"""A user-defined epilogue, which the conformance suite passes to every kernel.

½(z + √(z² + b)), a smooth relu (arXiv:2112.11687), is not built in anywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squareplus(z, b: tl.constexpr):
    return 0.5 * (z + tl.sqrt(z * z + b))
