"""What grouped calls are timed against: torch's grouped product, a loop, and quack's."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tmm_core.bench.case import Call
from tmm_core.dispatch.timing import Run

Tensor = torch.Tensor
#: Makes the product of one call, and what follows it.
Product = Callable[[Call], Tensor]

#: Columns beside torch's and tmm's.
LOOP, QUACK = "loop", "quack"
#: Bytes that torch's grouped product wants a row to start at.
_ALIGNMENT = 16


def eager(calls: Sequence[Call]) -> Run:
    """``F.grouped_mm``, then the bias and the activation, as a model's code has it: a gated one as
    one product of both halves. Operands that it refuses are padded, which is timed too."""
    return _on(calls, _padded if _refuses(calls[0]) else _by_torch)


def peers(calls: Sequence[Call], failed: dict[str, str]) -> dict[str, Run]:
    """By column; what cannot be had is in ``failed`` with its reason."""
    found = {LOOP: loop(calls)}
    try:
        found[QUACK] = quack(calls)
    except Exception as error:  # not installed, or not for such calls
        failed[QUACK] = f"{type(error).__name__}: {error}"
    return found


def loop(calls: Sequence[Call]) -> Run:
    """A product a group of which the host knows the sizes, which it would have to wait for: here
    it knows them for nothing."""
    ends: dict[int, list[int]] = {}
    for copy, call in enumerate(calls):
        assert call.rows is not None
        ends[copy] = call.rows.offs.tolist()

    def run(copy: int) -> Tensor:
        call = calls[copy]
        return _followed(call, _looped(call, ends[copy]))

    return run


def quack(calls: Sequence[Call]) -> Run:
    """quack-kernels' product of ragged rows, by starts of groups with a leading zero.

    Raises:
        ImportError: It is not installed.
        ValueError: The call is of another kind.
    """
    call = calls[0]
    if importlib.util.find_spec("quack") is None:
        raise ImportError("quack-kernels is not installed")
    if call.rows is None or call.a.dim() != 2 or call.b.dim() != 3 or not call.a.is_cuda:
        raise ValueError("it is timed for ragged rows on a GPU")
    gemm = importlib.import_module("quack.gemm_interface").gemm

    # Made once: a model keeps them so, and torch's form of them is given as well.
    starts = {id(each): F.pad(each.rows.offs, (1, 0)) for each in calls if each.rows is not None}
    return _on(
        calls, lambda each: _followed(each, gemm(each.a, each.b, cu_seqlens_m=starts[id(each)]))
    )


def _on(calls: Sequence[Call], product: Product) -> Run:
    return lambda copy: product(calls[copy])


def _refuses(call: Call) -> bool:
    """Whether torch's grouped product wants other strides or addresses."""
    for t in (call.a, call.b):
        size = t.element_size()
        strides = [s for s, n in zip(t.stride(), t.shape, strict=True) if s != 1 and n > 1]
        if t.data_ptr() % _ALIGNMENT or any(s * size % _ALIGNMENT for s in strides):
            return True
    return False


def _by_torch(call: Call) -> Tensor:
    assert call.rows is not None
    return _followed(call, F.grouped_mm(call.a, call.b, offs=call.rows.offs))


def _padded(call: Call) -> Tensor:
    """As people do it: operands copied, with zeros up to the next multiple of 16 bytes."""
    assert call.rows is not None
    a, b = call.a, call.b
    unit = _ALIGNMENT // a.element_size()
    (m, k), n = a.shape[-2:], b.shape[-1]
    by_k = a.stride(-1) == 1, b.stride(-2) == 1
    ragged_k = a.dim() == b.dim()
    more = -k % unit if any(by_k) and not ragged_k else 0
    a = _grown(a, 0 if by_k[0] else -m % unit, more)
    b = _grown(b, more, 0 if by_k[1] else -n % unit)
    return _followed(call, F.grouped_mm(a, b, offs=call.rows.offs)[..., :m, :n])


def _grown(t: Tensor, rows: int, cols: int) -> Tensor:
    """With so many more rows and columns, lying as it did."""
    if t.stride(-1) == 1:
        return F.pad(t, (0, cols, 0, rows))
    return F.pad(t.mT, (0, rows, 0, cols)).mT


def _looped(call: Call, ends: Sequence[int]) -> Tensor:
    a, b = call.a, call.b
    parts = itertools.pairwise([0, *ends])
    if a.dim() == 2 and b.dim() == 2:
        z = a.new_empty((len(ends), a.shape[0], b.shape[1]))
        for group, (start, end) in enumerate(parts):
            torch.mm(a[:, start:end], b[start:end], out=z[group])
        return z
    z = a.new_empty((a.shape[-2], b.shape[-1]))
    for group, (start, end) in enumerate(parts):
        if start == end:
            continue
        if a.dim() == 2:
            torch.mm(a[start:end], b[group], out=z[start:end])
        else:
            z[:, start:end] = a[group] @ b[:, start:end]
    return z


def _followed(call: Call, z: Tensor) -> Tensor:
    """Bias, epilogue and residual by torch's operators."""
    y: Any = call.epilogue.expression(z, call.bias, call.residual)
    return y if call.out_dtype is None else y.to(call.out_dtype)  # type: ignore[no-any-return]
