"""Answers torch's own products, such as ``torch.mm``, without changing code.

:func:`enable` registers an entry (:mod:`tmm_core.interop.aten_entries`) in place of torch's kernel
for each operator. It works below autograd, so torch's own derivatives call it too. :func:`disable`
removes the entries.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, get_args

import torch

from tmm_core import settings
from tmm_core.errors import SettingsError, UnknownNameError, reraise
from tmm_core.interop.aten_answers import Operator
from tmm_core.interop.aten_entries import ENTRY, entry_of
from tmm_core.interop.aten_report import EnabledReport, OperatorReport, overhead_us
from tmm_core.interop.host_bound import Pace
from tmm_core.interop.libraries import library_of
from tmm_core.launch import warm
from tmm_core.launch.nesting import NESTING
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem

#: The default on a miss: no call waits, since a model has hundreds of products.
ON_CACHE_MISS: settings.OnCacheMiss = "background"

#: The number of an operator's calls, answered by torch while the host was the limit, after which
#: the operator is reviewed. The host time that these calls cost is compared with the GPU time that
#: other kernels saved while the GPU was the limit.
ENOUGH = 256

#: The names by which ``ops`` selects operators: without the overload.
NAMES = tuple(name for name in ENTRY if not name.endswith(".out"))


@dataclass(eq=False)
class Enabled:
    """The effect of :func:`enable`. As a context manager it ends with the block, which restores the
    state before it. It may be entered again, also within its own block."""

    ops: tuple[str, ...]
    only: Callable[[Problem], bool] | None
    on_cache_miss: settings.OnCacheMiss
    compile: bool
    key: str
    answered: dict[str, Operator] = field(default_factory=dict, repr=False)
    _set_pass: bool = field(default=False, repr=False)
    _pace: Pace = field(init=False, repr=False)
    #: Whether it was entered. The first block is the one that :func:`enable` itself began.
    _entered: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self._pace = Pace(self.review)

    def __enter__(self) -> Enabled:
        with _lock:
            first = not self._entered and _stack[-1:] == [self]
            with _if_interrupted(_stack[:-1] if first else _stack[:]):
                if not first:
                    _change([*_stack, self])
                self._entered = True
                return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            others = _stack[::-1]
            if self in others:  # not after disable()
                others.remove(self)
                with _if_interrupted(others[::-1]):
                    _change(others[::-1])

    def install(self) -> None:
        for name in ENTRY:
            if name.partition(".")[0] not in self.ops:
                continue
            try:
                torchs = torch.library.get_kernel(f"aten::{name}", self.key)
            except RuntimeError as error:  # this torch lacks the operator
                reraise(error)
                continue
            operator = self.answered.get(name)
            if operator is None:
                operator = Operator(
                    name, torchs, self.only, self.on_cache_miss, self._pace, _register_again
                )
                self.answered[name] = operator
            elif operator.library is None:  # another block was inside this one
                operator.torchs = torchs.call_boxed
            if operator.library is None and not operator.left:
                _register(operator, self.key)
                _recent.append(torch.library.get_kernel(f"aten::{name}", self.key))
        if self.compile:
            from tmm_core.interop import inductor  # imports parts of torch's compiler

            self._set_pass = not inductor.is_installed()
            inductor.install()

    def uninstall(self) -> None:
        for each in self.answered.values():
            each.leave(each.left)
        if self._set_pass:
            from tmm_core.interop import inductor

            inductor.uninstall()
            self._set_pass = False

    def review(self) -> None:
        """Leave an operator to torch if its host cost exceeds the GPU time that it saved."""
        for operator in [*self.answered.values()]:  # a copy: another thread's call may add one
            operator.settle()
            if operator.left or operator.slowed < ENOUGH:
                continue
            cost = operator.slowed * overhead_us(operator.name)
            if cost > operator.saved_us:
                operator.leave(
                    f"{operator.slowed} calls that torch answered while the host was the limit "
                    f"cost the host {cost / 1e3:.1f} ms, and calls that other kernels answered "
                    f"while the GPU was the limit saved {operator.saved_us / 1e3:.1f} ms"
                )


_lock = threading.RLock()
#: All enabled blocks, also one within itself. Only the last, the innermost, is in force.
_stack: list[Enabled] = []
#: Entries as torch's dispatcher holds them. They are kept for some time after their libraries are
#: destroyed: a thread may be about to call one.
_recent: deque[Any] = deque(maxlen=1024)
#: The last block that was in force, for a report after its end.
_last: Enabled | None = None


def enable(
    *,
    ops: Iterable[str] | None = None,
    only: Callable[[Problem], bool] | None = None,
    on_cache_miss: settings.OnCacheMiss | None = None,
    compile: bool = False,
    _key: str = "CUDA",
) -> Enabled:
    """Answer torch's own products on CUDA by tmm's kernels, in this process, until
    :func:`disable`; or in a ``with`` block.

    >>> tmm_core.enable()                                     # doctest: +SKIP
    >>> with tmm_core.enable(ops=["mm", "addmm"]):            # doctest: +SKIP
    ...     model(x).sum().backward()

    A kernel answers a product of bf16, fp16, fp32 or scaled 8-bit operands if a record says that it
    is faster. Without a record an estimate decides. Torch's own kernel answers all others. On a
    torch without CUDA nothing changes.

    Args:
        ops: Operators to answer, by default all of ``mm``, ``addmm``, ``bmm``, ``baddbmm``,
            ``_scaled_mm`` and ``_grouped_mm``; with the first four also their forms with ``out``.
        only: Called once for each new :class:`Problem`; if it returns false, torch answers.
        on_cache_miss: What a product without a record does if the settings in force say ``"tune"``;
            ``"background"`` by default, so that no call waits.
        compile: Also rewrite products in graphs that ``torch.compile`` compiles from now on
            (:func:`inductor_options`).

    Returns:
        A context manager. The call is in force at once, also without ``with``. If it is called
        several times, the innermost call is in force.

    Raises:
        UnknownNameError: ``ops`` names an operator that cannot be answered.
        SettingsError: ``on_cache_miss`` has no valid value.
    """
    selected = NAMES if ops is None else tuple([ops] if isinstance(ops, str) else ops)
    for name in selected:
        if name not in NAMES:
            raise UnknownNameError("operator", str(name), NAMES)
    mode = on_cache_miss or ON_CACHE_MISS
    if mode not in get_args(settings.OnCacheMiss):
        known = ", ".join(get_args(settings.OnCacheMiss))
        raise SettingsError(f"on_cache_miss must be one of {known}, got {mode!r}")
    enabled = Enabled(selected, only, mode, compile, _key)
    if _key == "CUDA" and not torch.backends.cuda.is_built():
        enabled.ops = ()  # the report says so
    with _lock, _if_interrupted(_stack[:]):
        _change([*_stack, enabled])
        return enabled


def disable() -> None:
    """Undo every :func:`enable`: torch's own kernels answer, and its graphs are compiled as
    before."""
    with _lock, _if_interrupted([]):
        _change([])


@contextmanager
def _if_interrupted(stack: list[Enabled]) -> Iterator[None]:
    """If the block raises, as by Ctrl-C or a signal's handler, put ``stack`` in force."""
    try:
        yield
    except BaseException:
        _change(stack)
        raise


def _change(stack: list[Enabled]) -> None:
    """Put the last of ``stack`` in force. If this is interrupted, call it again, with any stack."""
    global _last
    if _stack:
        _last = _stack[-1]
        _last.uninstall()
    NESTING.discard(BASELINE)
    _stack[:] = stack
    if stack:
        # BLAS calls torch.mm, which torch's own kernel then has to answer.
        NESTING.add(BASELINE)
        stack[-1].install()
    warm.drop_plans()


def _register_again() -> None:
    """Replace the kernels that torch's dispatcher has now: another library removed its own, which
    were there when the entries were registered."""
    with _lock, _if_interrupted([*_stack]):
        _change([*_stack])


def _answer_anew() -> None:
    """Answer operators left to torch again: records, settings or plugins changed."""
    with _lock:
        for operator in [each for enabled in _stack for each in enabled.answered.values()]:
            if operator.left:
                operator.left, operator.slowed = "", 0
        if _stack:
            _stack[-1].install()


warm.WHEN_FORGOTTEN.append(_answer_anew)


def _register(operator: Operator, key: str) -> None:
    """Replace torch's kernel by the operator's entry."""
    entry = entry_of(operator)
    # Kept before it replaces anything, so that an interrupted registration can be undone.
    operator.library = library_of("aten", "IMPL")
    with warnings.catch_warnings():
        # Torch warns once per process that a kernel is overridden, which is intended here.
        warnings.filterwarnings("ignore", ".*previously registered kernel", UserWarning)
        warnings.filterwarnings("ignore", ".*Warning only once", UserWarning)
        operator.library.impl(operator.name, entry, key, with_keyset=True, allow_override=True)


def enabled_report() -> EnabledReport:
    """Report how many calls of each operator each kernel answered, and the time that this saved.
    They belong to the :func:`enable` in force, else to the last one."""
    with _lock:
        enabled, active = (_stack[-1], True) if _stack else (_last, False)
        answered = dict(enabled.answered) if enabled is not None else {}
    found = {}
    for name, operator in answered.items():
        operator.settle()
        calls = {kernel: tally.calls for kernel, tally in operator.tallies.items()}
        found[name] = OperatorReport(
            name,
            {**calls, "torch": operator.passed},
            operator.saved_us,
            operator.slowed,
            overhead_us(name) if operator.slowed >= ENOUGH else None,
            operator.left,
            operator.declined,
        )
    return EnabledReport(found, active)
