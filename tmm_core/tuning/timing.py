"""Times candidates the way they are used: as a chain of calls over many weights, in a CUDA graph.

The deciding clock is *in use*: R calls over R copies of the operands that change from layer to
layer. They are captured once, and replayed in bursts of a few milliseconds, interleaved among
candidates. This clock includes a kernel's effect on the next one. It reads weights from memory, and
activations from where a layer finds them. It includes no host time. Single launches after a flush
that writes would rank kernels by how they cope with dirty L2 lines, which no model leaves there.
docs/notes/tuning.md has the measurements behind the limits.

Large products are also timed in steady state (clock ``steady``: replays back to back). A kernel
that loses to BLAS there does not win. At the limit of power, the GPU clock follows a kernel's own
power in steady state, and the mean power of all candidates in interleaved bursts
(docs/notes/power.md). The clock ``alone`` is reported, and decides nothing.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tmm_core import compat
from tmm_core.errors import reraise
from tmm_core.spec.steps import Steps, drained

#: Makes the call on the i-th copy of its operands.
Run = Callable[[int], object]

#: Samples of one kernel were disturbed if the ratio of their third to their first quartile is above
#: this.
DISTURBED = 1.4

#: Length of one candidate's burst, µs. Ratios of kernels in bursts of 3 ms are within 2 % of those
#: in bursts of a second.
BURST_US = 3000.0

#: Bytes read to evict a call's operands from the L2, for the clock "alone": more than twice the
#: largest L2 (126 MB on a B200).
FLUSH_BYTES = 256 * 2**20

#: Products that take at least this many µs are also timed by the clock "steady".
LONG_US = 150.0

#: Captures of a large product, each with outputs elsewhere, since its times in two graphs differ.
CAPTURES = 3

#: Maximum µs of one step of a measurement, unless a single chain takes longer.
STEP_US = 10e3

#: µs per call of each run, one list each.
Samples = list[list[float]]


@dataclass
class _Chain:
    """One run over all copies, ready to be replayed."""

    run: Run
    replay: Callable[[], object]
    #: Keeps the graph's tensors alive.
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

    A run that cannot be captured is launched call by call between two events. Chains are kept until
    :meth:`release`, so that a later stage does not capture them again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chains: dict[tuple[int, int], _Chain] = {}
        self._pool: Any = None
        self._flush: torch.Tensor | None = None

    def measure(self, runs: Sequence[Run], rounds: int, **options: Any) -> Samples:
        """Take all :meth:`measure_steps` at once."""
        with torch.cuda.device(self.device):
            return drained(self.measure_steps(runs, rounds, **options))

    def measure_steps(
        self, runs: Sequence[Run], rounds: int, *, copies: int = 1, burst_us: float = BURST_US
    ) -> Steps[Samples]:
        """Time each run ``rounds`` times, interleaved, in a different order every round. A step is
        one sample, on the current device. After a pause the next chain is replayed once first,
        since other work has used the caches.

        Args:
            runs: Each takes the index of a copy, from 0 up to ``copies``.
            copies: Calls in a chain.
            burst_us: Minimum length of one sample.

        Returns:
            µs of one call: for each run, in the given order, a list of samples.
        """
        chains = yield from self._chains_of(runs, copies)
        replays = [math.ceil(burst_us / max(chain.takes_us, 1.0)) for chain in chains]
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
        rested: bool | None = None
        for i in _interleaved(len(runs), rounds):
            if rested:
                chains[i].replay()
            spans[i].append(chains[i].timed(replays[i]))
            rested = yield ()
        torch.cuda.synchronize(self.device)
        calls = [count * copies for count in replays]
        return [
            [start.elapsed_time(end) * 1e3 / count for start, end in pairs]
            for pairs, count in zip(spans, calls, strict=True)
        ]

    def alone(self, runs: Sequence[Run], rounds: int) -> list[list[float]]:
        """µs of one launch after an L2 flush by reading, which leaves no dirty lines.

        The flush buffer is read twice, about 80 µs each, while the host queues the call.
        """
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        flush = self._flush
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
        with torch.cuda.device(self.device):
            calls = [self._launched(run, 1) for run in runs]
            for i in _interleaved(len(runs), rounds):
                torch.amax(flush)
                torch.amax(flush)
                spans[i].append(calls[i].timed(1))
            torch.cuda.synchronize(self.device)
        return [[s.elapsed_time(e) * 1e3 for s, e in pairs] for pairs in spans]

    def steady(self, runs: Sequence[Run], rounds: int, **options: Any) -> Samples:
        """µs of one call in chains replayed back to back for ``steady_us`` each, in a different
        order every round. A warm-up before the first chain does not count. Nor does the first third
        of each chain's time, in which the clock of a power-limited kernel settles."""
        with torch.cuda.device(self.device):
            return drained(self.steady_steps(runs, rounds, **options))

    def steady_steps(
        self, runs: Sequence[Run], rounds: int, *, copies: int, steady_us: float
    ) -> Steps[Samples]:
        """Do :meth:`steady` in steps of :data:`STEP_US`. After a pause between two steps, the GPU's
        state depends on other work."""
        samples: Samples = [[] for _ in runs]
        chains = yield from self._chains_of(runs, copies)
        thirds = [math.ceil(steady_us / 3 / max(chain.takes_us, 1.0)) for chain in chains]
        yield from self._replayed(chains[0], thirds[0])
        timed = []
        for i in _interleaved(len(runs), rounds):
            yield from self._replayed(chains[i], thirds[i])
            spans = yield from self._replayed(chains[i], 2 * thirds[i])
            timed.append((i, spans))
        torch.cuda.synchronize(self.device)
        for i, spans in timed:
            us = sum(float(start.elapsed_time(end)) for start, end in spans) * 1e3
            samples[i].append(us / (2 * thirds[i] * copies))
        return samples

    def _replayed(
        self, chain: _Chain, replays: int
    ) -> Steps[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
        """Replay a chain; returns the spans of time between events."""
        at_once = max(1, int(STEP_US / max(chain.takes_us, 1.0)))
        spans = []
        for done in range(0, replays, at_once):
            spans.append(chain.timed(min(at_once, replays - done)))
            if (yield ()):
                chain.replay()
        return spans

    def release(self) -> None:
        """Free graphs and buffers now. The cyclic GC might destroy a graph during a capture, which
        would end the capture."""
        self.forget_captures()
        self._flush = None

    def forget_captures(self) -> None:
        """Free graphs. Runs are captured anew, with outputs in other memory."""
        for chain in self._chains.values():
            if chain.graph is not None:
                chain.graph.reset()
        self._chains.clear()
        self._pool = None

    def _chains_of(self, runs: Sequence[Run], copies: int) -> Steps[list[_Chain]]:
        chains = []
        for run in runs:
            # A chain keeps its run alive, so that no other run gets the same id.
            chain = self._chains.get((id(run), copies))
            if chain is None:
                chain = self._captured(run, copies) or self._launched(run, copies)
                torch.cuda.synchronize(self.device)
                for _ in range(2):  # the first replay of a graph also uploads it
                    yield ()
                    start, end = chain.timed(1)
                end.synchronize()
                chain.takes_us = start.elapsed_time(end) * 1e3
                self._chains[id(run), copies] = chain
            chains.append(chain)
        return chains

    def _captured(self, run: Run, copies: int) -> _Chain | None:
        run(0)  # first-call work cannot be captured
        torch.cuda.synchronize(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Torch's context does not restore the stream if the capture cannot be ended.
        unchanged = torch.cuda.stream(torch.cuda.current_stream())
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            with unchanged, capture:
                # Outputs are held until the end, so that every call has its own.
                outputs = [run(i) for i in range(copies)]
        except Exception as error:  # a kernel that synchronises or allocates outside torch
            reraise(error)
            torch.cuda.synchronize(self.device)
            compat.end_failed_capture(self._pool)
            self._pool = None  # torch refuses to capture into it again
            return None
        del outputs
        return _Chain(run, graph.replay, graph)

    def _launched(self, run: Run, copies: int) -> _Chain:
        def replay() -> None:
            for i in range(copies):
                run(i)

        return _Chain(run, replay)


class HostTimer:
    """Wall time of calls, for synchronous devices."""

    def measure(self, runs: Sequence[Run], rounds: int, **options: Any) -> Samples:
        return drained(self.measure_steps(runs, rounds, **options))

    def measure_steps(
        self, runs: Sequence[Run], rounds: int, *, copies: int = 1, burst_us: float = BURST_US
    ) -> Steps[Samples]:
        samples: Samples = [[] for _ in runs]
        for i in _interleaved(len(runs), rounds):
            start = time.perf_counter()
            for copy in range(copies):
                runs[i](copy)
            us = (time.perf_counter() - start) * 1e6 / copies
            if not 0 < us < math.inf:
                raise RuntimeError(f"time.perf_counter() is no clock: a launch took {us:g} µs")
            samples[i].append(us)
            yield ()
        return samples

    def release(self) -> None:
        """Do nothing: nothing is held."""


def timer_for(device: torch.device) -> GraphTimer | HostTimer:
    """Return the clock *in use* on a device."""
    return GraphTimer(device) if device.type == "cuda" else HostTimer()


def _interleaved(count: int, rounds: int) -> Iterator[int]:
    """Yield an interleaved order, different in every round. The preceding kernel decides whether a
    kernel's code is still cached: 5 % of a 19 µs kernel on an H200 when two kernels alternated."""
    shuffler = random.Random(0)
    order = list(range(count))
    for _ in range(rounds):
        shuffler.shuffle(order)
        yield from order


def normalised(series: Sequence[Sequence[float]]) -> list[list[float]]:
    """Normalise interleaved samples per round: the GPU's clock may change between rounds."""
    middles = [statistics.median(samples) for samples in series]
    pace = [
        statistics.median(us / middle for us, middle in zip(each, middles, strict=True))
        for each in zip(*series, strict=True)
    ]
    usual = statistics.median(pace)
    return [[us * usual / now for us, now in zip(samples, pace, strict=True)] for samples in series]


def is_disturbed(samples: Sequence[float]) -> bool:
    """Whether the machine disturbed these samples, so that they should be measured again."""
    if len(samples) < 2:
        return False
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high > DISTURBED * low
