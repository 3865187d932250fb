"""The host path of torch's own products while :func:`tmm_core.enable` is in force.

Each entry below takes the place of one aten operator's kernel for one dispatch key. It looks the
call up by a key of a few properties, and either launches the kernel that was chosen for it or calls
torch's own, which was captured before. Torch's dispatcher has dealt with autograd, autocast, vmap
and modes when an entry runs. Grad mode and ``requires_grad`` still look as the caller left them, so
nothing here reads them.

A call that is passed on to torch takes longer than it would alone, and gains nothing. So the first
part of its key decides as soon as torch answered such a call for good. Torch serves every call, so
that passing on is never wrong: calls that differ in the rest of the key would at most miss a gain.
``benchmarks/passed_on.py`` measures what is left of the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core import compat
from tmm_core.interop.aten_answers import INSIDE, THROUGH, Operator, answers, through
from tmm_core.interop.aten_calls import (
    call_with_summand,
    grouped_call,
    grouped_launch,
    plain_call,
    scaled_call,
    scaled_launch,
)
from tmm_core.launch.check import PLAIN, ranges_meet
from tmm_core.launch.nesting import ENTRIES
from tmm_core.settings import overridden

Tensor = torch.Tensor

deterministic, fp32_precision = compat.deterministic, compat.fp32_precision
float32 = torch.float32


def product(op: Operator) -> Callable[..., Any]:
    """The entry of ``mm`` and ``bmm``."""
    torchs, first = op.torchs, op.first

    def entry(keys: Any, a: Tensor, b: Tensor) -> Any:
        if type(a) not in PLAIN or type(b) not in PLAIN:
            op.count()
            return torchs(keys, a, b)
        dtype = a.dtype
        part = (
            op, a.shape, b.shape, a.stride(), b.stride(), dtype, overridden(),
            dtype is float32 and fp32_precision("cuda", "matmul"),
        )  # fmt: skip
        if part in through:
            op.count()
            return torchs(keys, a, b)
        aligned = (a.data_ptr() | b.data_ptr()) & 15
        key = part, b.dtype, aligned, a.get_device(), b.get_device(), deterministic()
        plan = answers.get(key) or first(key, plain_call(aligned, a, b))
        if plan.launch is not None:
            try:
                y = plan.launch(a, b, None, None, 1.0, None)
                plan.count()
                return y
            except BaseException as error:  # a kernel may call sys.exit
                op.failed(key, plan, error)
                plan = THROUGH
        if plan is not INSIDE:
            op.count()
        return torchs(keys, a, b)

    return entry


def product_out(op: Operator) -> Callable[..., Any]:
    """The entry of ``mm.out`` and ``bmm.out``, which compiled graphs call."""
    torchs, first = op.torchs, op.first

    def entry(keys: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        if type(a) not in PLAIN or type(b) not in PLAIN or type(out) not in PLAIN:
            op.count()
            return torchs(keys, a, b, out=out)
        dtype = a.dtype
        part = (
            op, a.shape, b.shape, a.stride(), b.stride(), dtype, overridden(),
            dtype is float32 and fp32_precision("cuda", "matmul"),
        )  # fmt: skip
        if part in through:
            op.count()
            return torchs(keys, a, b, out=out)
        aligned = (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15
        key = (
            part, b.dtype, out.dtype, out.shape, out.stride(), aligned,
            a.get_device(), b.get_device(), out.get_device(), deterministic(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, plain_call(aligned, a, b, out=out))
        if plan.launch is not None and not (ranges_meet(out, a) or ranges_meet(out, b)):
            try:
                plan.launch(a, b, None, None, 1.0, out)
                plan.count()
                return out
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        if plan is not INSIDE:
            op.count()
        return torchs(keys, a, b, out=out)

    return entry


def sum_with(op: Operator) -> Callable[..., Any]:
    """The entry of ``addmm`` and ``baddbmm``: ``beta · c + alpha · (a @ b)``."""
    torchs, first = op.torchs, op.first

    def entry(keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if type(a) not in PLAIN or type(b) not in PLAIN or type(c) not in PLAIN or beta != 1:
            op.count()
            return torchs(keys, c, a, b, beta=beta, alpha=alpha)
        dtype = a.dtype
        part = (
            op, a.shape, b.shape, a.stride(), b.stride(), dtype, overridden(),
            dtype is float32 and fp32_precision("cuda", "matmul"),
        )  # fmt: skip
        if part in through:
            op.count()
            # Keyword arguments take longer to pass on.
            return torchs(keys, c, a, b) if alpha == 1 else torchs(keys, c, a, b, alpha=alpha)
        aligned = (a.data_ptr() | b.data_ptr() | c.data_ptr()) & 15
        key = (
            part, b.dtype, c.dtype, c.shape, c.stride(), aligned, alpha == 1 or type(alpha),
            a.get_device(), b.get_device(), c.get_device(), deterministic(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, *call_with_summand(aligned, a, b, c, alpha))
        if plan.launch is not None:
            try:
                terms = (c, None) if plan.as_bias else (None, c)
                y = plan.launch(a, b, *terms, float(alpha), None)
                plan.count()
                return y
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        if plan is not INSIDE:
            op.count()
        return torchs(keys, c, a, b) if alpha == 1 else torchs(keys, c, a, b, alpha=alpha)

    return entry


def sum_with_out(op: Operator) -> Callable[..., Any]:
    """The entry of ``addmm.out`` and ``baddbmm.out``."""
    torchs, first = op.torchs, op.first

    def entry(
        keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
    ) -> Any:
        if (
            type(a) not in PLAIN or type(b) not in PLAIN or type(c) not in PLAIN
            or type(out) not in PLAIN or beta != 1
        ):  # fmt: skip
            op.count()
            return torchs(keys, c, a, b, beta=beta, alpha=alpha, out=out)
        dtype = a.dtype
        part = (
            op, a.shape, b.shape, a.stride(), b.stride(), dtype, overridden(),
            dtype is float32 and fp32_precision("cuda", "matmul"),
        )  # fmt: skip
        if part in through:
            op.count()
            if alpha == 1:
                return torchs(keys, c, a, b, out=out)
            return torchs(keys, c, a, b, alpha=alpha, out=out)
        aligned = (a.data_ptr() | b.data_ptr() | c.data_ptr() | out.data_ptr()) & 15
        key = (
            part, *[(t.shape, t.stride(), t.dtype, t.get_device()) for t in (b, c, out)], aligned,
            alpha == 1 or type(alpha), a.get_device(), deterministic(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, *call_with_summand(aligned, a, b, c, alpha, out=out))
        if plan.launch is not None and not any(ranges_meet(out, t) for t in (a, b, c)):
            try:
                terms = (c, None) if plan.as_bias else (None, c)
                plan.launch(a, b, *terms, float(alpha), out)
                plan.count()
                return out
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        if plan is not INSIDE:
            op.count()
        return torchs(keys, c, a, b, alpha=alpha, out=out)

    return entry


def scaled(op: Operator) -> Callable[..., Any]:
    """The entry of ``_scaled_mm``, with scales of 32 bits per tensor or per row."""
    return _with_parts(op, scaled_call, scaled_launch)


def grouped(op: Operator) -> Callable[..., Any]:
    """The entry of ``_grouped_mm`` with ``offs``."""
    return _with_parts(op, grouped_call, grouped_launch)


def _with_parts(op: Operator, call_of: Any, launch_of: Any) -> Callable[..., Any]:
    torchs, first = op.torchs, op.first

    def entry(keys: Any, *given: Any, **named: Any) -> Any:
        tensors = [t for t in given if isinstance(t, Tensor)]
        if any(type(t) not in PLAIN for t in tensors) or any(
            isinstance(t, Tensor) for t in named.values()
        ):
            op.count()
            return torchs(keys, *given, **named)
        key = (
            op,
            *[
                (t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device())
                if isinstance(t, Tensor)
                else t
                for t in given
            ],
            tuple(named.items()), overridden(), deterministic(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, call_of(*given, **named), launch_of)
        if plan.launch is not None:
            try:
                y = plan.launch(*given)
                plan.count()
                return y
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        if plan is not INSIDE:
            op.count()
        return torchs(keys, *given, **named)

    return entry


#: The operators that can be answered, by name with overload.
ENTRY: dict[str, Callable[[Operator], Callable[..., Any]]] = {
    "mm": product,
    "mm.out": product_out,
    "bmm": product,
    "bmm.out": product_out,
    "addmm": sum_with,
    "addmm.out": sum_with_out,
    "baddbmm": sum_with,
    "baddbmm.out": sum_with_out,
    "_scaled_mm": scaled,
    "_grouped_mm": grouped,
}


def entry_of(op: Operator) -> Callable[..., Any]:
    """The function that takes the place of the operator's kernel."""
    entry = ENTRY[op.name](op)
    ENTRIES.add(entry.__code__)
    return entry
