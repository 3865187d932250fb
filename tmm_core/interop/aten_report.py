"""The cost and the gain of :func:`tmm_core.enable`."""

from __future__ import annotations

import functools
import math
import threading
import time
from dataclasses import dataclass

import torch

from tmm_core import compat
from tmm_core.interop.aten_answers import Operator
from tmm_core.interop.aten_entries import entry_of
from tmm_core.interop.host_bound import Pace
from tmm_core.interop.libraries import library_of

#: The number of calls in a batch, and of batches, that :func:`overhead_us` times.
_REPEATS, _BATCHES = 40, 5

#: Two threads would define one operator.
_one_at_a_time = threading.Lock()


def overhead_us(name: str) -> float:
    """Return the host time in µs that the entry adds to a call of this operator that torch's kernel
    answers. It is measured once, on tiny products on the CPU, which takes some milliseconds.

    The entry is timed under another name, so that aten's operators on the CPU do not change.
    """
    with _one_at_a_time:
        return _measured_us("addmm.out" if name.startswith("_") else name)  # as many arguments


@functools.cache
def _measured_us(name: str) -> float:
    base, _, overload = name.partition(".")
    aten = getattr(getattr(torch.ops.aten, base), overload or "default")
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    pace = Pace(lambda: None)
    operator = Operator(name, kernel, lambda problem: False, "heuristic", pace, lambda: None)
    _, _, signature = str(aten._schema).partition("(")
    probe = f"probe_{base}{overload}"
    library = library_of("tmm", "FRAGMENT")
    try:
        with compat.without_modes(), torch.inference_mode():
            library.define(f"{probe}({signature}")
            library.impl(probe, entry_of(operator), "CPU", with_keyset=True)
            shape = (1, 8, 8) if "bmm" in base else (8, 8)
            given = [torch.ones(shape, device="cpu", dtype=torch.bfloat16) for _ in range(4)]
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
    """The kernels that answered the calls of one operator.

    Attributes:
        calls: The number of calls by kernel's name; torch's own kernel is ``"torch"``.
        saved_us: µs of GPU time that the other kernels saved, by records or estimates, while the
            GPU was the limit.
        slowed: The number of calls that torch answered while the host was the limit.
        host_us: µs of host time added to a call that torch answers; None: not measured, because
            it delayed too few calls.
        left: Why the operator was left to torch; empty if it was not.
        declined: Why a forced kernel, or one with a record, did not answer a call; empty if they
            answered all.
    """

    name: str
    calls: dict[str, int]
    saved_us: float
    slowed: int
    host_us: float | None
    left: str
    declined: str = ""

    def __str__(self) -> str:
        calls = ", ".join(f"{kernel} {n}" for kernel, n in self.calls.items() if n) or "none"
        cost = (
            ""
            if self.host_us is None
            else f"; {self.slowed} calls passed on cost the host {self.host_us:.1f} µs each"
        )
        left = f"; left to torch: {self.left}" if self.left else ""
        declined = f"; {self.declined}" if self.declined else ""
        return f"{self.name}: {calls}; saved {self.saved_us / 1e3:.3g} ms{cost}{left}{declined}"


@dataclass(frozen=True)
class EnabledReport:
    """The kernels that answered since :func:`enable` was called, by operator. ``print()`` it."""

    operators: dict[str, OperatorReport]
    active: bool

    @property
    def calls(self) -> int:
        """The number of calls that tmm's kernels answered."""
        return sum(
            n for each in self.operators.values() for k, n in each.calls.items() if k != "torch"
        )

    @property
    def saved_us(self) -> float:
        """µs of GPU time saved while the GPU was the limit, by records or estimates."""
        return sum(each.saved_us for each in self.operators.values())

    def __str__(self) -> str:
        if not self.operators:
            return "tmm_core.enable(): no operator of this torch is answered in this process"
        head = f"tmm_core.enable(), {'in force' if self.active else 'ended'}"
        lines = [str(each) for each in self.operators.values() if any(each.calls.values())]
        return "\n  ".join([head, *(lines or ["no product was called"])])

    __repr__ = __str__
