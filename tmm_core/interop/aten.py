"""Answers torch's own products (``torch.mm`` and what is computed by it) without changing code.

:func:`enable` registers an entry (:mod:`tmm_core.interop.aten_answers`) in place of torch's kernel
for each operator, below autograd, so that torch's own derivatives call it again; :func:`disable`
removes them.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, get_args

import torch

from tmm_core import compat, settings
from tmm_core.errors import SettingsError, UnknownNameError, warn
from tmm_core.interop import aten_answers
from tmm_core.interop.aten_answers import ENTRY, Operator, entry_of
from tmm_core.launch import warm
from tmm_core.launch.nesting import NESTING
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem

#: What a miss does here, where a call must not wait: a model has hundreds of products.
ON_CACHE_MISS: settings.OnCacheMiss = "heuristic"
if "background" in get_args(settings.OnCacheMiss):
    ON_CACHE_MISS = "background"  # type: ignore[assignment,unused-ignore]

#: The names by which ``ops`` selects operators: without the overload.
NAMES = tuple(name for name in ENTRY if not name.endswith(".out"))


@dataclass
class _Answered:
    """An operator while it is answered, and what holds it in place.

    Attributes:
        library: Registers the entry; destroying it restores torch's kernel.
        left: Why it is not answered any more; empty if it is.
    """

    operator: Operator
    library: Any
    left: str = ""

    def leave(self, why: str = "") -> None:
        self.left = why
        if self.library is not None:
            self.library._destroy()
            self.library = None


@dataclass
class Enabled:
    """What :func:`enable` did. As a context manager it is undone at the end of the block; whatever
    was in force before is in force again."""

    ops: tuple[str, ...]
    only: Callable[[Problem], bool] | None
    on_cache_miss: settings.OnCacheMiss
    compile: bool
    key: str
    answered: dict[str, _Answered] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            if self in _stack:
                _change([each for each in _stack if each is not self])

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def install(self) -> None:
        names = [name for name in ENTRY if name.partition(".")[0] in self.ops]
        for name in names:
            try:
                torchs = compat.aten_kernel(f"aten::{name}", self.key)
            except RuntimeError:  # this torch has none
                continue
            operator = Operator(name, torchs, self.only, self.on_cache_miss, self.review)
            library = _registered(name, entry_of(operator), self.key)
            _recent.append(compat.aten_kernel(f"aten::{name}", self.key))
            self.answered[name] = _Answered(operator, library)
        if self.compile:
            from tmm_core.interop import inductor  # imports parts of torch's compiler

            inductor.install()

    def uninstall(self) -> None:
        for each in self.answered.values():
            each.leave(each.left)
        if self.compile:
            from tmm_core.interop import inductor

            inductor.uninstall()

    def review(self, operator: Operator) -> None:
        """Leave an operator to torch if its host cost is more than what it saved."""
        operator.review_at *= 2
        if operator.pending:  # choices that are still being measured may save more
            operator.pending = False
            return
        cost = operator.passed * overhead_us(operator.name)
        saved = sum(tally.saved_us for tally in operator.tallies.values())
        if cost > saved:
            self.answered[operator.name].leave(
                f"{operator.passed} calls that torch answered cost the host {cost / 1e3:.1f} ms, "
                f"and the others saved {saved / 1e3:.1f}"
            )


_lock = threading.RLock()
#: What was enabled, the innermost last, which alone is in force.
_stack: list[Enabled] = []
#: Entries as torch's dispatcher holds them, for some time after their libraries are destroyed: a
#: thread may be about to call one, and would find its memory freed.
_recent: deque[Any] = deque(maxlen=1024)
#: What was in force last, for a report after it ended.
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

    A product of bf16, fp16, fp32 or scaled 8-bit operands is answered by a kernel that a record (or
    without one, an estimate) says is faster; every other by torch's own kernel, as before.

    Args:
        ops: Operators to answer, by default all of ``mm``, ``addmm``, ``bmm``, ``baddbmm``,
            ``_scaled_mm`` and ``_grouped_mm``; with the first four also their forms with ``out``.
        only: Asked once for each new :class:`Problem`; false: torch answers.
        on_cache_miss: What a product without a record does, where the settings in force say
            ``"tune"``; ``"background"`` by default, so that no call waits.
        compile: Also rewrite products in graphs that ``torch.compile`` compiles from now on
            (:func:`inductor_options`).

    Returns:
        A context manager. The call is in force at once, with or without ``with``; the innermost of
        several is.

    Raises:
        UnknownNameError: An operator in ``ops`` that cannot be answered.
        SettingsError: ``on_cache_miss`` has no valid value.
        RuntimeError: This torch cannot give its own kernels (before 2.10).
    """
    selected = NAMES if ops is None else tuple([ops] if isinstance(ops, str) else ops)
    for name in selected:
        if name not in NAMES:
            raise UnknownNameError("operator", str(name), NAMES)
    mode = on_cache_miss or ON_CACHE_MISS
    if mode not in get_args(settings.OnCacheMiss):
        raise SettingsError(f"on_cache_miss must be one of tune, heuristic, error, got {mode!r}")
    if compat.aten_kernel is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch.library.get_kernel")
    enabled = Enabled(selected, only, mode, compile, _key)
    if _key == "CUDA" and not torch.backends.cuda.is_built():
        warn("enable() answers products on CUDA only, and this torch has no CUDA")
        enabled.ops = ()
    with _lock:
        _change([*_stack, enabled])
    return enabled


def disable() -> None:
    """Undo every :func:`enable`: torch's own kernels answer, and its graphs are compiled as
    before."""
    with _lock:
        _change([])


def _change(stack: list[Enabled]) -> None:
    """Put the last of ``stack`` in force."""
    global _last
    if _stack:
        _last = _stack[-1]
        _last.uninstall()
    NESTING.discard(BASELINE)
    _stack[:] = stack
    if stack:
        # BLAS computes by torch.mm, which then is torch's own.
        NESTING.add(BASELINE)
        stack[-1].install()
        _last = stack[-1]
    warm.forget_plans()


def _registered(name: str, entry: Callable[..., Any], key: str) -> Any:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # Torch says once per process that a kernel is overridden, which is the purpose.
        warnings.filterwarnings("ignore", ".*previously registered kernel", UserWarning)
        warnings.filterwarnings("ignore", ".*Warning only once", UserWarning)
        library.impl(name, entry, key, with_keyset=True)
    return library


# -- what it costs and saves ---------------------------------------------------------------------

#: The repetitions of a batch, and batches, that :func:`overhead_us` times.
_REPEATS, _BATCHES = 40, 5


@functools.cache
def overhead_us(name: str) -> float:
    """Microseconds of the host by which a call of this operator takes longer if torch's kernel
    answers it after all; measured once, on tiny products on the CPU, in some milliseconds.

    The entry is timed under another name, so that aten's operators on the CPU stay as they are.
    """
    if name.startswith("_"):
        return overhead_us("addmm.out")  # which has as many arguments
    base, _, overload = name.partition(".")
    aten = getattr(getattr(torch.ops.aten, base), overload or "default")
    kernel = compat.aten_kernel(f"aten::{name}", "CPU")
    operator = Operator(name, kernel, lambda problem: False, "heuristic", lambda operator: None)
    _, _, signature = str(aten._schema).partition("(")
    probe = f"probe_{base}{overload}"
    library = torch.library.Library("tmm", "FRAGMENT")
    try:
        with compat.without_modes(), torch.inference_mode():
            library.define(f"{probe}({signature}")
            library.impl(probe, entry_of(operator), "CPU", with_keyset=True)
            shape = (1, 8, 8) if "bmm" in base else (8, 8)
            given = [torch.ones(shape, device="cpu", dtype=torch.float32) for _ in range(4)]
            tensors = given[: 3 if base in ("addmm", "baddbmm") else 2]
            named = {"out": given[3]} if overload else {}
            functions = aten, getattr(torch.ops.tmm, probe).default
            best = [math.inf, math.inf]
            for _ in range(_BATCHES):
                for number, function in enumerate(functions):
                    start = time.perf_counter()
                    for _ in range(_REPEATS):
                        function(*tensors, **named)
                    best[number] = min(best[number], time.perf_counter() - start)
            usual, probed = best
            return max(0.0, probed - usual) * 1e6 / _REPEATS
    finally:
        library._destroy()


@dataclass(frozen=True)
class OperatorReport:
    """Who answered the calls of one operator.

    Attributes:
        calls: By kernel's name; torch's own kernel is ``"torch"``.
        saved_us: µs of GPU time that the others saved, by records or estimates.
        host_us: µs by which a call that torch answers takes the host longer; None: not measured,
            as it answered too few.
        left: Why the operator was left to torch; empty if it was not.
    """

    name: str
    calls: dict[str, int]
    saved_us: float
    host_us: float | None
    left: str

    def __str__(self) -> str:
        calls = ", ".join(f"{kernel} {n}" for kernel, n in self.calls.items() if n) or "none"
        cost = (
            "" if self.host_us is None else f"; {self.host_us:.1f} µs of the host per call passed"
        )
        left = f"; left to torch: {self.left}" if self.left else ""
        return f"{self.name}: {calls}; saved {self.saved_us / 1e3:.3g} ms{cost}{left}"


@dataclass(frozen=True)
class EnabledReport:
    """What :func:`enable` answered since it was called, by operator. ``print()`` it."""

    operators: dict[str, OperatorReport]
    active: bool

    @property
    def calls(self) -> int:
        """Calls that tmm's kernels answered."""
        return sum(
            n for each in self.operators.values() for k, n in each.calls.items() if k != "torch"
        )

    @property
    def saved_us(self) -> float:
        """µs of GPU time saved, by records or estimates."""
        return sum(each.saved_us for each in self.operators.values())

    def __str__(self) -> str:
        if not self.operators:
            return "tmm_core.enable() answers nothing in this process"
        head = f"tmm_core.enable(), {'in force' if self.active else 'ended'}"
        lines = [str(each) for each in self.operators.values() if any(each.calls.values())]
        return "\n  ".join([head, *(lines or ["no product was called"])])

    __repr__ = __str__


def enabled_report() -> EnabledReport:
    """How often each operator was answered by whom, and what that saved: since the :func:`enable`
    in force, or the last one."""
    with _lock:
        enabled, active = (_stack[-1], True) if _stack else (_last, False)
        answered = dict(enabled.answered) if enabled is not None else {}
    found = {}
    for name, each in answered.items():
        operator = each.operator
        calls = {kernel: tally.calls for kernel, tally in operator.tallies.items()}
        measured = operator.review_at > aten_answers.FIRST_REVIEW and not operator.pending
        found[name] = OperatorReport(
            name,
            {**calls, "torch": operator.passed},
            sum(tally.saved_us for tally in operator.tallies.values()),
            overhead_us(name) if measured else None,
            each.left,
        )
    return EnabledReport(found, active)
