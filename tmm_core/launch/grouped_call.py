"""The path of a grouped call; :mod:`tmm_core.launch.warm` is the path of plain calls.

Nothing here reads the values of ``offs``: they stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tmm_core import formats, settings
from tmm_core.launch import warm
from tmm_core.launch.check import (
    addressable,
    check_parts,
    check_residual,
    check_terms,
    refuse_dtypes,
    result_dtype,
)
from tmm_core.launch.codegen import written
from tmm_core.spec.arguments import (
    GROUPED_EXTRAS,
    GROUPED_ROLES,
    GROUPED_TENSORS,
    ROWS,
    GroupedArguments,
    parameters,
)
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.groups import Groups, Ragged
from tmm_core.spec.operand import grouped_strides
from tmm_core.spec.problem import Problem, stored_operands

Tensor = torch.Tensor

_INDEX_DTYPES = (torch.int32, torch.int64)


def ragged_along(a: Tensor, b: Tensor) -> Ragged:
    """Return the ragged dimension, by the number of dimensions of the operands."""
    if a.ndim == 2:
        return "k" if b.ndim == 2 else "m"
    return "n"


def check(call: GroupedArguments, epilogue: Epilogue) -> tuple[int, ...]:
    """Check the arguments of one grouped call against each other; returns the result's shape.

    Without ``offs`` the call is a batch, whose residual may broadcast.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not match, as in
            ``torch.nn.functional.grouped_mm``. A scale has a dtype that the operand's format does
            not allow, or its operand has no format.
        ValueError: A bias, residual, index, weight, scale or gated width does not match.
        TypeError: An ``out_dtype`` that is not a floating dtype.
    """
    a, b, offs, bias, residual, _, _, _, a_index, out_index, out_weights, *_ = call
    # Torch 2.10 compiles no property of a named tuple.
    addressable(*[getattr(call, name) for name in GROUPED_TENSORS])
    pair = formats.pair(a.dtype, b.dtype, call.formats)
    count = check_operands(a, b, offs, pair.packs)
    if pair.result is None:
        refuse_dtypes(call)
    along = None if offs is None else ragged_along(a, b)
    _refuse_split_blocks(pair, along)
    if along is not None and not pair.result.is_floating_point:
        raise RuntimeError(f"grouped_matmul(): {a.dtype} operands are not multiplied")
    width = b.shape[-1]
    if epilogue.outputs:
        names = ", ".join(port.name for port in epilogue.outputs)
        raise ValueError(f"epilogue outputs ({names}) are of one product, not of groups")
    if epilogue.gated and along == "n":
        raise ValueError(f"gated epilogue {epilogue.name!r} pairs columns, which are ragged")
    terms = {"bias": bias, "residual": residual, "out_weights": out_weights}
    check_terms(call, pair, epilogue, **terms)
    m, n = a.shape[-2], width // 2 if epilogue.gated else width
    rows = (("a_index", a_index), ("out_index", out_index), ("out_weights", out_weights))
    for name, t in rows:
        if t is None:
            continue
        if along is None:
            raise ValueError("a_index, out_index and out_weights need ragged rows: give offs")
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

    def numbers(t: Tensor, size: int) -> list[tuple[int, ...]]:
        """Return the shapes that torch accepts for one number per row of a or column of b. Each
        group has its own numbers, unless a row (column) belongs to one group only."""
        if t.dim() == 3:
            return [(count, size)]
        return [(count * size,), (count, size)] if along == "k" else [(size,)]

    check_parts(call, pair, a=numbers(a, a.shape[-2]), b=numbers(b, width))
    shape = (m, n) if along in ("m", "n") else (count, m, n)
    if bias is not None:
        if along == "n":
            raise ValueError("a bias is along columns, which are ragged")
        if bias.shape not in ((width,), (count, width)):
            raise ValueError(
                f"bias must have shape ({width},) or ({count}, {width}), got {tuple(bias.shape)}"
            )
    if residual is not None and along is None:
        check_residual(residual, torch.Size(shape))
    elif residual is not None and tuple(residual.shape) != shape:
        raise ValueError(
            f"residual must have the result's shape {shape}, got {tuple(residual.shape)}"
        )
    return shape


def _refuse_split_blocks(pair: formats.Pair, along: Ragged | None) -> None:
    """Raise ValueError if groups could start within a stored element, or within a block of one
    scale."""
    if along == "k" and (pair.packs != (1, 1) or pair.blocks != (None, None)):
        raise ValueError("groups along K would split packed values, or values of one scale")
    for name, of, block in (("a", "m", pair.blocks[0]), ("b", "n", pair.blocks[1])):
        if along == of and block is not None and block[0] > 1:
            raise ValueError(f"groups along {of.upper()} would split blocks of scales of {name}")


def check_operands(a: Tensor, b: Tensor, offs: Tensor | None, packs: tuple[int, int]) -> int:
    """Check operands; returns the number of groups.

    Args:
        packs: The number of values in an element of each operand, along K.

    Raises:
        RuntimeError: They cannot be multiplied (torch's message).
    """
    for name, t in (("mat_a", a), ("mat_b", b)):
        if t.dim() not in (2, 3):
            raise RuntimeError(f"{name} has to be 2 or 3d")
    if a.shape[-1] * packs[0] != b.shape[-2] * packs[1]:
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


def each_bias(bias: Tensor | None, offs: Tensor) -> Tensor | None:
    """Return one bias per group. A bias that all groups share is expanded without a copy."""
    return bias if bias is None or bias.dim() == 2 else bias.expand(offs.shape[0], -1)


def describe(
    call: GroupedArguments, epilogue: Epilogue, current: settings.Settings
) -> tuple[Problem, None]:
    """Return the problem of one call's arguments, which are not folded."""
    shape = check(call, epilogue)
    a, b, offs, out = call.a, call.b, call.offs, call.out
    if out is None:
        dtype = result_dtype(call)
        strides = grouped_strides(shape, dtype)
        out = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    along = ragged_along(a, b)
    dtypes = {name: t.dtype for name in ROWS[1:] if (t := getattr(call, name)) is not None}
    groups = Groups(offs.shape[0], along, zeroed=call.zeroed and along != "k", **dtypes)
    problem = Problem.of(
        a,
        b,
        out,
        fingerprint(a.device),
        bias=call.bias,
        residual=call.residual,
        stored=stored_operands(call),
        groups=groups,
        epilogue=epilogue,
        **warm.numerics(a, call.alpha, current),
    )
    return problem, None


#: :data:`tmm_core.launch.warm.fast_path_allowed` for the tensors of grouped calls.
fast_path_allowed: Callable[..., bool] = written(
    "fast_path_allowed_groups",
    parameters(GROUPED_TENSORS, GroupedArguments) + ", cast=False, shown=False",
    warm.fast_path_checks(GROUPED_TENSORS),
    warm.NAMES,
)
_LAUNCH = (
    "plan.with_extras(a, b, each_bias(bias, offs), residual, alpha, out, "
    f"{', '.join(GROUPED_EXTRAS)})"
)
run, replay = warm.entries(
    GROUPED_ROLES, GroupedArguments, _LAUNCH, _LAUNCH, warm.NAMES | globals()
)
