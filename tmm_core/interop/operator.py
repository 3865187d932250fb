"""``tmm::matmul`` as a torch operator."""

from __future__ import annotations

import torch

from tmm_core.interop import autograd, flops, vmap
from tmm_core.interop.declaration import declare, rewritten
from tmm_core.launch.check import check, result_dtype
from tmm_core.launch.warm import fast_path_allowed, replay, run
from tmm_core.spec.arguments import Arguments


def empty(call: Arguments, shape: torch.Size) -> torch.Tensor:
    """Return an uninitialised result of this shape."""
    return call.a.new_empty(shape, dtype=result_dtype(call))


matmul = declare(
    "matmul",
    Arguments,
    run=run,
    allowed=fast_path_allowed,
    check=check,
    empty=empty,
    derivative=autograd.matmul,
    vmap=vmap.matmul,
    flop_formula=flops.matmul_flops,
)
matmul_out = torch.ops.tmm.matmul.out


def write(call: Arguments) -> torch.Tensor:
    """Write the result of a call to its ``out``."""
    y = rewritten(call, fast_path_allowed, replay)
    return matmul_out(*call[:-1], out=call.out) if y is None else y
