"""The path of a grouped call; :mod:`tmm_core.launch.warm` has the one of plain calls.

Nothing here reads the values of ``offs``: they stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tmm_core import compat, settings
from tmm_core.formats import BY_STORAGE
from tmm_core.launch import warm
from tmm_core.launch.check import PLAIN, addressable
from tmm_core.launch.plan import Plan
from tmm_core.launch.warm import _plans, _quarantine, _tf32
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.arguments import signature as signature_of
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.groups import Groups, Ragged
from tmm_core.spec.problem import Problem

Tensor = torch.Tensor

_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Keyword arguments of launches, in the operator's order.
_ROWS = ("offs", "a_index", "out_index", "out_weights")
signature = signature_of("a")
_INDEX_DTYPES = (torch.int32, torch.int64)


def ragged_along(a: Tensor, b: Tensor) -> Ragged:
    """The ragged dimension, inferred from the operands without a dimension of groups."""
    if a.dim() == 2:
        return "k" if b.dim() == 2 else "m"
    return "n"


def check(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    a_index: Tensor | None,
    out_index: Tensor | None,
    out_weights: Tensor | None,
) -> tuple[int, ...]:
    """Check the arguments of one grouped call against each other; returns the result's shape.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not match, as in
            ``torch.nn.functional.grouped_mm``.
        ValueError: A bias, residual, index, weight or gated width does not match.
        TypeError: An ``out_dtype`` that is not a floating dtype.
    """
    addressable(a, b, offs, bias, residual, a_index, out_index, out_weights)
    count = check_operands(a, b, offs)
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected a and b to have one dtype, got {a.dtype} and {b.dtype}")
    if a.dtype in BY_STORAGE or not a.dtype.is_floating_point:
        raise RuntimeError(f"grouped_matmul(): {a.dtype} operands are not multiplied")
    along, width = ragged_along(a, b), b.shape[-1]
    if epilogue.gated and along == "n":
        raise ValueError(f"gated epilogue {epilogue.name!r} pairs columns, which are ragged")
    if epilogue.gated and width % 2:
        raise ValueError(
            f"gated epilogue {epilogue.name!r} needs b of width 2N (gate and up halves), "
            f"got b of shape {tuple(b.shape)}"
        )
    m, n = a.shape[-2], width // 2 if epilogue.gated else width
    rows = (("a_index", a_index), ("out_index", out_index), ("out_weights", out_weights))
    for name, t in rows:
        if t is None:
            continue
        if along != "m":
            raise ValueError(f"{name} is for rows that are ragged: a of 2 dimensions, b of 3")
        if t.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got {tuple(t.shape)}")
        if name != "out_weights" and t.dtype not in _INDEX_DTYPES:
            raise RuntimeError(f"{name} must have dtype torch.int32 or torch.int64, got {t.dtype}")
        if name == "a_index":
            m = t.shape[0]
        elif t.shape != (m,):
            raise ValueError(f"{name} must have shape ({m},), got {tuple(t.shape)}")
    if a_index is not None and m and not a.shape[0]:
        raise ValueError("a_index gathers rows of an a that has none")
    shape = (count, m, n) if along == "k" else (m, n)
    result = out_dtype or a.dtype
    if result not in _OUT_DTYPES:
        raise TypeError(f"out_dtype must be a floating dtype, got {out_dtype}")
    allowed = {a.dtype, result, torch.float32}
    terms = (("bias", bias), ("residual", residual), ("out_weights", out_weights))
    for name, t in terms:
        if t is not None and t.dtype not in allowed:
            raise RuntimeError(
                f"{name} must have dtype {' or '.join(sorted(map(str, allowed)))}, got {t.dtype}"
            )
    if bias is not None:
        if along == "n":
            raise ValueError("a bias is along columns, which are ragged")
        if bias.shape not in ((width,), (count, width)):
            raise ValueError(
                f"bias must have shape ({width},) or ({count}, {width}), got {tuple(bias.shape)}"
            )
    if residual is not None and tuple(residual.shape) != shape:
        raise ValueError(
            f"residual must have the result's shape {shape}, got {tuple(residual.shape)}"
        )
    return shape


def check_operands(a: Tensor, b: Tensor, offs: Tensor | None) -> int:
    """The number of groups of valid operands.

    Raises:
        RuntimeError: They cannot be multiplied, with torch's message.
    """
    for name, t in (("mat_a", a), ("mat_b", b)):
        if t.dim() not in (2, 3):
            raise RuntimeError(f"{name} has to be 2 or 3d")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    flat = [t.dim() == 2 for t in (a, b)]
    if (offs is None) is any(flat):
        raise RuntimeError(
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
        )
    if offs is None:
        if a.shape[0] != b.shape[0]:
            raise RuntimeError("batched dimension has to match")
        return a.shape[0]
    if offs.dim() != 1:
        raise RuntimeError("offs has to be 1D")
    if offs.dtype != torch.int32:
        raise RuntimeError("Offsets have to be int32")
    count = offs.shape[0]
    if any(t.dim() == 3 and t.shape[0] != count for t in (a, b)):
        raise RuntimeError("matrix batch sizes have to match")
    if not count:
        raise RuntimeError("offs has to have an end for one group at least")
    return count


def run(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    a_index: Tensor | None = None,
    out_index: Tensor | None = None,
    out_weights: Tensor | None = None,
    zeroed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Look the plan up and launch it."""
    key = (
        a.shape,
        a.stride(),
        a.dtype,
        a.data_ptr() & 15,
        a.get_device(),
        b.shape,
        b.stride(),
        b.dtype,
        b.data_ptr() & 15,
        b.get_device(),
        offs.shape,
        offs.stride(),
        offs.dtype,
        offs.get_device(),
        None if bias is None else signature(bias),
        None if residual is None else signature(residual),
        None if a_index is None else signature(a_index),
        None if out_index is None else signature(out_index),
        None if out_weights is None else signature(out_weights),
        None if out is None else signature(out),
        epilogue,
        alpha == 1.0,
        out_dtype,
        zeroed,
        settings.overridden(),
        compat.deterministic(),
        a.dtype is torch.float32 and a.is_cuda and _tf32(),
    )
    rows = (offs, a_index, out_index, out_weights)
    plan = _plans.get(key)
    if plan is None:
        current, parsed = settings.current(), warm.epilogue_of(epilogue)
        plan = make_plan(a, b, bias, residual, alpha, parsed, out_dtype, out, current, rows, zeroed)
        warm.keep(key, plan)
    try:
        # A shared bias is expanded to one per group, at the same address.
        each = bias if bias is None or bias.dim() == 2 else bias.expand(offs.shape[0], -1)
        given = {
            name: t if t.is_contiguous() else t.contiguous()
            for name, t in zip(_ROWS, rows, strict=True)
            if t is not None
        }
        launcher: Callable[..., Tensor] = plan.launcher
        if compat.profiler._is_profiler_enabled:
            with compat.profiler.record_function(plan.kernel, str(plan.choice.candidate.config)):
                return launcher(a, b, each, residual, alpha, out, **given)
        return launcher(a, b, each, residual, alpha, out, **given)
    except BaseException as error:  # a kernel may call sys.exit
        if not _quarantine(plan, error):
            raise
        _plans.pop(key, None)
    return run(
        a, b, offs, bias, residual, alpha, epilogue, out_dtype,
        a_index, out_index, out_weights, zeroed, out,
    )  # fmt: skip


def make_plan(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    current: settings.Settings,
    rows: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    zeroed: bool,
) -> Plan:
    """Check, choose and bind, like :func:`tmm_core.launch.warm.make_plan`."""
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        problem = pose(a, b, bias, residual, alpha, epilogue, out_dtype, out, current, rows, zeroed)
        choice, launcher = warm.answerer().bound(problem, current)
    return Plan.of(problem, choice, launcher, Arguments(a, b, bias, residual, alpha))


def pose(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    current: settings.Settings,
    rows: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    zeroed: bool,
) -> Problem:
    """The problem of one call's arguments."""
    offs, *indices = rows
    shape = check(a, b, offs, bias, residual, epilogue, out_dtype, *indices)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or a.dtype, device="meta")
    along = ragged_along(a, b)
    dtypes = {name: t.dtype for name, t in zip(_ROWS[1:], indices, strict=True) if t is not None}
    zeroed = zeroed and along != "k"
    groups = Groups(offs.shape[0], along, zeroed=zeroed, **dtypes)
    return Problem.of(
        a,
        b,
        out,
        fingerprint(a.device),
        bias=bias,
        residual=residual,
        groups=groups,
        epilogue=epilogue,
        scaled=alpha != 1.0,
        tf32=a.dtype is torch.float32 and a.is_cuda and _tf32(),
        deterministic=current.deterministic or torch.are_deterministic_algorithms_enabled(),
        batch_invariant=current.batch_invariant or current.arithmetic is not None,
        capturing=a.is_cuda and torch.cuda.is_current_stream_capturing(),
    )


def undisturbed(
    a: Any, b: Any, offs: Any, bias: Any, residual: Any, a_index: Any, out_index: Any, weights: Any
) -> bool:
    """Whether torch's dispatcher would only record the call's gradient."""
    return (
        warm.undisturbed(a, b, bias, residual, a_index, out_index)
        and type(offs) in PLAIN
        and (weights is None or warm.plain(weights))
    )
