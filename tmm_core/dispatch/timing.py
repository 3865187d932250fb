"""Time candidates the way they will be used: L2-cold, side by side, medians.

Events bracket one launch each; before it the L2 is flushed, which also keeps the GPU busy
(some 70 µs) while the host queues what is measured, so a launch gap is not timed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

Run = Callable[[], object]

#: The third quartile of one kernel's samples over the first, past which something held them up: on
#: a host that was busy otherwise, 31.7 and 50.6 µs where they are 31 and 32.
HELD_UP = 1.4

#: Bytes overwritten to flush the L2: past four times the largest L2 there is (60 MB on an
#: H200, 126 MB on a B200, of which half is near).
FLUSH_BYTES = 256 * 2**20


class Timer(Protocol):
    """Measures callables against one another."""

    def measure(self, runs: Sequence[Run], rounds: int) -> list[list[float]]:
        """Time each run ``rounds`` times, in turn, in another order every round; µs per run, in
        the order given."""
        ...


class CudaTimer:
    """GPU time by events on the current stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None

    def measure(self, runs: Sequence[Run], rounds: int) -> list[list[float]]:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        flush = self._flush
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
        with torch.cuda.device(self.device):
            for order in _orders(len(runs), rounds):
                for run, mine in ((runs[i], spans[i]) for i in order):
                    start = torch.cuda.Event(enable_timing=True)
                    end = torch.cuda.Event(enable_timing=True)
                    flush.zero_()
                    start.record()
                    run()
                    end.record()
                    mine.append((start, end))
            torch.cuda.synchronize(self.device)
        return [[s.elapsed_time(e) * 1e3 for s, e in mine] for mine in spans]

    def release(self) -> None:
        """Give the flush buffer back to the allocator."""
        self._flush = None


class HostTimer:
    """Wall time, for devices whose work is done when the call returns."""

    def measure(self, runs: Sequence[Run], rounds: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in runs]
        for order in _orders(len(runs), rounds):
            for run, mine in ((runs[i], samples[i]) for i in order):
                start = time.perf_counter()
                run()
                mine.append((time.perf_counter() - start) * 1e6)
        return samples

    def release(self) -> None:
        """Nothing is held."""


def _orders(count: int, rounds: int) -> Iterator[list[int]]:
    """The order of every round, another each time: what ran just before a kernel decides whether
    its code is still cached (5 % of a 19 µs kernel on an H200 whose two columns took turns)."""
    shuffler = random.Random(0)
    order = list(range(count))
    for _ in range(rounds):
        shuffler.shuffle(order)
        yield order


def held_up(samples: Sequence[float]) -> bool:
    """Whether these tell more of the machine than of what was timed, and should be taken anew."""
    if len(samples) < 2:
        return False
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high > HELD_UP * low


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)
