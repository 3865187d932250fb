"""The host path of torch's own products while :func:`tmm_core.enable` is in force.

Each entry below replaces one aten operator's kernel for one dispatch key. It looks the call up by a
key of a few properties. Then it launches the chosen kernel, or calls torch's own kernel, which it
stored before replacing it. Torch's dispatcher has handled autograd, autocast, vmap and modes when
an entry runs. Grad mode and ``requires_grad`` still have the caller's values, so nothing here reads
them.

A call that is passed on to torch takes longer than without the entry, and gains nothing. So once
torch answers a call for good, the first part of its key is enough to pass on later calls. Calls
that differ in the rest of the key may miss a gain, but torch's answer is never wrong.
``benchmarks/passed_on.py`` measures the cost that remains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tmm_core import compat
from tmm_core.interop.aten_answers import INSIDE, THROUGH, Operator, answers, through
from tmm_core.interop.aten_calls import (
    LEAST_ALPHA,
    call_with_summand,
    grouped_call,
    grouped_launch,
    plain_call,
    scaled_call,
    scaled_launch,
)
from tmm_core.launch.check import PLAIN, ranges_meet
from tmm_core.launch.codegen import written
from tmm_core.launch.nesting import add_entry
from tmm_core.settings import overridden
from tmm_core.spec.arguments import MOST_ALPHA

Tensor = torch.Tensor

#: The names that generated entries use.
_NAMES: dict[str, Any] = {
    "PLAIN": PLAIN, "INSIDE": INSIDE, "THROUGH": THROUGH, "answers": answers, "through": through,
    "overridden": overridden, "deterministic": compat.deterministic,
    "fp32_precision": compat.fp32_precision,
    "float32": torch.float32, "ranges_meet": ranges_meet, "plain_call": plain_call,
    "call_with_summand": call_with_summand, "LEAST_ALPHA": LEAST_ALPHA,
    "MOST_ALPHA": MOST_ALPHA,
}  # fmt: skip


def product(others: tuple[str, ...], op: Operator) -> Callable[..., Any]:
    """The entry of a product ``a @ b``, or ``beta · c + alpha · (a @ b)``. Its other tensors are a
    summand ``c``, and ``out``, with which compiled graphs call it."""
    return _maker(others)(op, op.torchs, op.first, op.pace)  # type: ignore[no-any-return]


@functools.cache
def _maker(others: tuple[str, ...]) -> Callable[..., Any]:
    """The function that makes entries with these tensors. Their source is generated, so that a call
    runs only the statements that its operator needs."""
    summed, has_out = "c" in others, "out" in others
    parameters = ["keys", *["c"] * summed, "a", "b", *["*"] * (summed or has_out)]
    parameters += ["beta=1", "alpha=1"] * summed + ["out"] * has_out
    body = (f"        {line}" for line in _statements(others))
    terms = ["c", "a", "b", "beta=beta", "alpha=alpha"] if summed else ["a", "b"]
    terms += ["out=out"] * has_out
    lines = [
        f"def entry({', '.join(parameters)}):", "    try:", *body,
        "    except RuntimeError as error:",
        "        if not op.renewed(error):",
        "            raise",
        f"    return op.torchs(keys, {', '.join(terms)})", "return entry",
    ]  # fmt: skip
    return written("make", "op, torchs, first, pace", lines, dict(_NAMES))  # type: ignore[no-any-return]


def _statements(others: tuple[str, ...]) -> Iterator[str]:
    """Yield the statements of an entry that has these tensors in addition to ``a`` and ``b``."""
    summed, has_out = "c" in others, "out" in others
    tensors = ("a", "b", *others)
    out = ", out=out" if has_out else ""
    passed = f"torchs(keys, a, b{out})"
    whole, unlike, alpha, scale = passed, "", "", "1.0"
    call = f"plain_call(aligned, a, b{out})"
    terms = "None, None"
    if summed:
        whole = f"torchs(keys, c, a, b, beta=beta, alpha=alpha{out})"
        # Keyword arguments take longer to pass on. A 1 of another type may make torch refuse.
        one = f"torchs(keys, c, a, b{out})"
        passed = f"{one} if alpha == 1 and type(alpha) is type(beta) is int else {whole}"
        unlike, scale = " or beta != 1", "float(alpha)"
        alpha = "alpha == 1 or LEAST_ALPHA <= abs(alpha) <= MOST_ALPHA and type(alpha), "
        call = f"call_with_summand(aligned, a, b, c, alpha{out})"
        terms = "*((c, None) if plan.as_bias else (None, c))"
    apart = [f"not ranges_meet(out, {t})" for t in tensors if t != "out" and has_out]
    yield f"if {' or '.join(f'type({t}) not in PLAIN' for t in tensors)}{unlike}:"
    yield "    op.count(a)"
    yield f"    return {whole}"
    yield "dtype = a.dtype"
    yield "part = (op, a.shape, b.shape, a.stride(), b.stride(), dtype, overridden(),"
    yield "        dtype is float32 and fp32_precision('cuda', 'matmul'))"
    yield "if part in through:"
    yield "    op.passed += 1"  # as op.count(a), without a call
    yield "    pace.calls = calls = pace.calls + 1"
    yield "    if calls >= pace.next:"
    yield "        pace.look(a)"
    yield f"    return {passed}"
    yield f"aligned = ({' | '.join(f'{t}.data_ptr()' for t in tensors)}) & 15"
    yield "key = ("
    yield f"    part, b.dtype, aligned, {alpha}a.get_device(), b.get_device(), deterministic(),"
    for t in others:
        yield f"    {t}.dtype, {t}.shape, {t}.stride(), {t}.get_device(),"
    yield ")"
    yield f"plan = answers.get(key) or first(key, {call})"
    yield f"if {' and '.join(['plan.launch is not None', *apart])}:"
    yield "    try:"
    yield f"        y = plan.launch(a, b, {terms}, {scale}, {'out' if has_out else None})"
    yield "        plan.count(pace, a)"
    yield f"        return {'out' if has_out else 'y'}"
    yield "    except BaseException as error:  # a kernel may call sys.exit"
    yield "        op.failed(key, plan, error)"
    yield "        plan = THROUGH"
    yield "if plan is not INSIDE:"
    yield "    op.count(a)"
    yield f"return {passed}"


def with_parts(call_of: Any, launch_of: Any, op: Operator) -> Callable[..., Any]:
    """The entry of a product with scales or groups. ``call_of`` converts a call, and ``launch_of``
    the launcher of a plan (:mod:`tmm_core.interop.aten_calls`)."""
    torchs, first, deterministic = op.torchs, op.first, compat.deterministic

    def entry(keys: Any, *given: Any, **named: Any) -> Any:
        tensors = [t for t in given if isinstance(t, Tensor)]
        try:
            if any(type(t) not in PLAIN for t in tensors) or any(
                isinstance(t, Tensor) for t in named.values()
            ):
                op.count(tensors[0])
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
                    plan.count(op.pace, tensors[0])
                    return y
                except BaseException as error:
                    op.failed(key, plan, error)
                    plan = THROUGH
            if plan is not INSIDE:
                op.count(tensors[0])
            return torchs(keys, *given, **named)
        except RuntimeError as error:
            if not op.renewed(error):
                raise
        return op.torchs(keys, *given, **named)

    return entry


#: The operators that can be answered, by name with overload.
ENTRY: dict[str, Callable[[Operator], Callable[..., Any]]] = {
    name + overload: functools.partial(product, (*summand, *out))
    for name, summand in (("mm", ()), ("bmm", ()), ("addmm", ("c",)), ("baddbmm", ("c",)))
    for overload, out in (("", ()), (".out", ("out",)))
}
ENTRY |= {
    "_scaled_mm": functools.partial(with_parts, scaled_call, scaled_launch),
    "_grouped_mm": functools.partial(with_parts, grouped_call, grouped_launch),
}


def entry_of(op: Operator) -> Callable[..., Any]:
    """Return the function that replaces the operator's kernel."""
    entry = ENTRY[op.name](op)
    add_entry(entry)
    return entry
