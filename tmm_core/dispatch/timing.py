"""Time candidates the way they are used: as a chain of calls over many weights, in a CUDA graph.

The clock that decides is *in use*: R calls over R copies of what changes from layer to layer,
captured once and replayed in bursts of a few milliseconds, the candidates by turns. A kernel is
charged for what it does to its successor, weights come from memory, activations from where a layer
finds them, and no host time is in it. A single launch after a flush that writes, the clock of tmm
0.1, ranked kernels by how they cope with 50 MB of dirty lines in the L2, which no model leaves
there: it chose one of 852 µs where cuBLAS takes 670 (2048×28672×4096 on an H100).

``Alone`` and ``steady`` are reported beside it and decide nothing.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: Makes the call on the i-th copy of its operands.
Run = Callable[[int], object]

#: The third quartile of one kernel's samples over the first, past which something held them up: on
#: a host that was busy otherwise, 31.7 and 50.6 µs where they are 31 and 32.
HELD_UP = 1.4

#: A burst of one candidate, µs. Six kernels on three large problems (H100) rank in bursts of 3 ms
#: within 2 % as they do in bursts of a second, although the clock falls by a third meanwhile.
BURST_US = 3000.0

#: Bytes read to evict what a call's operands left in the L2, for the clock "alone": past twice the
#: largest L2 there is (126 MB on a B200).
FLUSH_BYTES = 256 * 2**20

#: How long a chain is replayed in one turn of the clock "steady", and half of it before the first.
#: Clocks settle within 0.3 s (six kernels on an H100 rank alike in bursts of 15 ms and of 1 s).
STEADY_US = 0.3e6


class Timer(Protocol):
    """Measures callables against one another."""

    def measure(
        self, runs: Sequence[Run], rounds: int, *, copies: int = 1, burst_us: float = BURST_US
    ) -> list[list[float]]:
        """Time each run ``rounds`` times, by turns, in another order every round.

        Args:
            runs: Each takes the number of a copy, 0 up to ``copies``.
            rounds: Samples of each.
            copies: Calls in a chain.
            burst_us: How long one sample lasts at least, where that can be chosen.

        Returns:
            µs of one call, per sample and run, in the order given.
        """
        ...


@dataclass
class _Chain:
    """One run over all copies, ready to be replayed."""

    run: Run
    replay: Callable[[], object]
    #: What keeps the graph's tensors alive.
    graph: Any = None
    #: µs of one replay, as last measured.
    takes_us: float = 0.0

    def timed(self, replays: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            self.replay()
        end.record()
        return start, end


class GraphTimer:
    """GPU time per call of chains in CUDA graphs, on the current stream of ``device``.

    What cannot be captured is launched call by call between two events. Chains are kept until
    :meth:`release`, so that a later stage does not capture them again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chains: dict[tuple[int, int], _Chain] = {}
        self._pool: Any = None
        self._flush: torch.Tensor | None = None

    def measure(
        self, runs: Sequence[Run], rounds: int, *, copies: int = 1, burst_us: float = BURST_US
    ) -> list[list[float]]:
        with torch.cuda.device(self.device):
            chains = [self._chain(run, copies) for run in runs]
            replays = [math.ceil(burst_us / max(chain.takes_us, 1.0)) for chain in chains]
            spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
            for order in _orders(len(runs), rounds):
                for i in order:
                    spans[i].append(chains[i].timed(replays[i]))
            torch.cuda.synchronize(self.device)
        calls = [count * copies for count in replays]
        return [
            [start.elapsed_time(end) * 1e3 / count for start, end in mine]
            for mine, count in zip(spans, calls, strict=True)
        ]

    def alone(self, runs: Sequence[Run], rounds: int) -> list[list[float]]:
        """µs of one launch after a flush of the L2 that reads, so that no dirty line is left.

        The flush takes some 80 µs each time and is read twice, in which the host queues the call.
        """
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        flush = self._flush
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
        with torch.cuda.device(self.device):
            for order in _orders(len(runs), rounds):
                for i in order:
                    start = torch.cuda.Event(enable_timing=True)
                    end = torch.cuda.Event(enable_timing=True)
                    torch.amax(flush)
                    torch.amax(flush)
                    start.record()
                    runs[i](0)
                    end.record()
                    spans[i].append((start, end))
            torch.cuda.synchronize(self.device)
        return [[s.elapsed_time(e) * 1e3 for s, e in mine] for mine in spans]

    def steady(
        self, runs: Sequence[Run], *, copies: int = 1, steady_us: float = STEADY_US
    ) -> list[list[float]]:
        """µs of one call in chains replayed without a pause, two for each of the runs: by turns,
        there and back, so that none is always the one before whom the GPU was cool. What comes
        first, and a quarter of each turn, is not counted: where power limits a kernel its clock
        has settled by then."""
        spans: list[list[float]] = [[] for _ in runs]
        with torch.cuda.device(self.device):
            chains = [self._chain(run, copies) for run in runs]
            quarters = [math.ceil(steady_us / 4 / max(chain.takes_us, 1.0)) for chain in chains]
            chains[0].timed(2 * quarters[0])
            turns = []
            for order in (range(len(runs)), reversed(range(len(runs)))):
                for i in order:
                    chains[i].timed(quarters[i])
                    turns.append((i, chains[i].timed(3 * quarters[i])))
            torch.cuda.synchronize(self.device)
        for i, (start, end) in turns:
            spans[i].append(float(start.elapsed_time(end)) * 1e3 / (3 * quarters[i] * copies))
        return spans

    def release(self) -> None:
        """Give graphs and buffers back to the allocator."""
        self._chains.clear()
        self._pool = None
        self._flush = None

    def _chain(self, run: Run, copies: int) -> _Chain:
        # Kept beside its run: an id alone may be used again.
        chain = self._chains.get((id(run), copies))
        if chain is None:
            chain = self._captured(run, copies) or self._launched(run, copies)
            torch.cuda.synchronize(self.device)
            for _ in range(2):  # the first replay of a graph also uploads it
                start, end = chain.timed(1)
            end.synchronize()
            chain.takes_us = start.elapsed_time(end) * 1e3
            self._chains[id(run), copies] = chain
        return chain

    def _captured(self, run: Run, copies: int) -> _Chain | None:
        run(0)  # what is made at a first call cannot be captured
        torch.cuda.synchronize(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                # Held until the end: every call has an output of its own.
                outputs = [run(i) for i in range(copies)]
        except Exception:  # a kernel that synchronises or allocates behind torch's back
            torch.cuda.synchronize(self.device)
            return None
        del outputs
        return _Chain(run, graph.replay, graph)

    def _launched(self, run: Run, copies: int) -> _Chain:
        def replay() -> None:
            for i in range(copies):
                run(i)

        return _Chain(run, replay)


class HostTimer:
    """Wall time of calls, for devices whose work is done when the call returns."""

    def measure(
        self, runs: Sequence[Run], rounds: int, *, copies: int = 1, burst_us: float = BURST_US
    ) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in runs]
        for order in _orders(len(runs), rounds):
            for run, mine in ((runs[i], samples[i]) for i in order):
                start = time.perf_counter()
                for copy in range(copies):
                    run(copy)
                mine.append((time.perf_counter() - start) * 1e6 / copies)
        return samples

    def release(self) -> None:
        """Nothing is held."""


def timer_for(device: torch.device) -> GraphTimer | HostTimer:
    """The clock *in use* on a device."""
    return GraphTimer(device) if device.type == "cuda" else HostTimer()


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
