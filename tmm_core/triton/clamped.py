"""The device function of :data:`tmm_core.epilogues.clamped.CLAMPED`."""

from __future__ import annotations

import triton
import triton.language as tl

from tmm_core.triton.epilogues import sigmoid


@triton.jit
def clamped_swiglu(gate, up, alpha: tl.constexpr, limit: tl.constexpr):
    # By comparisons: NaN has to propagate, as in torch.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1) * (gate * sigmoid(gate * alpha))
