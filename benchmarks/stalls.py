"""Measures the delays of calls under ``on_cache_miss="background"``, and whether a tuning in the
foreground has the same winners.

    python benchmarks/stalls.py [--share 0.5] [--seconds 85] [-o FILE.json]

Weights without records are called one after the other until their tunings end, within two and a
half minutes. The table shows milliseconds of torch's call, of the first call, and of the largest
delay of a later call. It also shows seconds until the winner, and the foreground's winner with the
ratio of both times in a race. A second table has the slowest steps of the tunings, with the
functions and lines at which they begin and end. A larger share than the default of ``tune_share``,
0.1, makes the run shorter and slices more frequent, not longer. Writes JSON to
``$OUT/stalls.json`` by default.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tmm_cache import CacheStore

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench import exhaustive
from tmm_core.bench.exhaustive import BURST_US, ROUNDS
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import current_device
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import Bound
from tmm_core.spec.problem import Problem
from tmm_core.tuning.timing import CAPTURES

#: M, N, K and the epilogue: decode, prefill and in between, some M inside their buckets.
SHAPES = [
    (1, 4096, 4096, ""), (16, 14336, 4096, "silu"), (33, 6144, 4096, ""), (64, 8192, 1024, "gelu"),
    (200, 5120, 5120, ""), (256, 28672, 4096, ""), (320, 2560, 9728, "relu"),
    (640, 12288, 1536, ""), (777, 5120, 5120, ""), (1024, 2048, 8192, ""),
    (1500, 8960, 1536, "gelu"), (2304, 2304, 2304, ""), (3000, 3584, 2560, "silu"),
    (4096, 4096, 4096, ""),
]  # fmt: skip
#: The goals: milliseconds of a first call and of a later one beyond torch's, and the share of
#: winners that are the foreground's or within :data:`CLOSE` of it.
FIRST_MS, LATER_MS, EQUAL = 50.0, 20.0, 0.95
CLOSE = 1.02
#: Steps in the second table.
SLOWEST = 12


@dataclass
class Row:
    """One weight's figures."""

    shape: str
    torch_ms: float = 0.0
    #: Milliseconds of torch's first product with this epilogue.
    epilogue_ms: float = 0.0
    first_ms: float = 0.0
    #: The largest and the 99th percentile of the milliseconds that later calls took beyond torch's,
    #: and how many were above :data:`LATER_MS`.
    worst_ms: float = 0.0
    p99_ms: float = 0.0
    late: int = 0
    calls: int = 0
    #: The largest of the milliseconds that torch's calls in between took beyond its usual ones,
    #: which the machine itself causes.
    torch_worst_ms: float = 0.0
    winner_s: float | None = None
    winner: str = ""
    foreground: str = ""
    #: Seconds of the foreground's tuning. Its kernels were compiled before.
    foreground_s: float | None = None
    #: The winner's time in the foreground's record over the best there; None if it is not there.
    ratio: float | None = None
    delays: list[float] = field(default_factory=list, repr=False)


@dataclass
class Case:
    """One weight, its activation, and its row."""

    x: torch.Tensor
    w: torch.Tensor
    epilogue: str
    row: Row

    def call(self) -> torch.Tensor:
        return tmm_core.linear(self.x, self.w, epilogue=self.epilogue or None)

    def plain(self) -> torch.Tensor:
        return torch.nn.functional.linear(self.x, self.w)

    def finished(self) -> torch.Tensor:
        """Torch's product with the epilogue."""
        return getattr(torch.nn.functional, self.epilogue)(self.plain())

    @property
    def problem(self) -> Problem:
        return tmm_core.problem(self.x, self.w.T, epilogue=self.epilogue or None)


@dataclass
class Step:
    """One step of a tuning: its milliseconds, and where it began and ended."""

    ms: float
    about: str
    begin: str
    end: str


def cases(shapes: Sequence[tuple[int, int, int, str]], device: str) -> list[Case]:
    made = []
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    for m, n, k, epilogue in shapes:
        x = torch.randn(m, k, device=device, dtype=dtype)
        w = torch.randn(n, k, device=device, dtype=dtype)
        name = f"{m}×{n}×{k}" + f" {epilogue}" * bool(epilogue)
        made.append(Case(x, w, epilogue, Row(name)))
    return made


def without_records(root: Path) -> Dispatcher:
    """A dispatcher as this process's, whose cache is empty."""
    mine = dispatch.default_dispatcher()
    return Dispatcher(mine.registry, mine.tuner, CacheStore(root, layers=[]))


def place(steps: Any) -> str:
    """The function and line at which a generator rests."""
    while frame := steps.gi_frame:
        inner = steps.gi_yieldfrom
        if steps.__name__ in ("_run", "_in_own_modes"):  # they resume their steps themselves
            inner = frame.f_locals["steps"]  # of other frames it would keep the tensors
        if not isinstance(inner, Generator):
            break
        steps = inner
    return "its end" if frame is None else f"{steps.__name__}:{frame.f_lineno}"


def traced(steps: Any, about: str, seen: list[Step], on_gpu: bool) -> Generator[Any, Any, Any]:
    """Yield ``steps``, and note each in ``seen``."""
    rested = None
    try:
        while True:
            begin, began = place(steps), time.perf_counter()
            try:
                pending = steps.send(rested)
            except StopIteration as end:
                return end.value
            finally:
                if on_gpu:
                    torch.cuda.current_stream().synchronize()  # as its caller does
                took = 1e3 * (time.perf_counter() - began)
                seen.append(Step(took, about, begin, place(steps)))
            rested = yield pending
    finally:
        steps.close()


def milliseconds(call: Callable[[], object], on_gpu: bool) -> float:
    began = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def serve(
    all_cases: Sequence[Case], share: float, seconds: float, on_gpu: bool, seen: list[Step]
) -> None:
    """Call the weights one after the other in background mode until their tunings end, or for
    ``seconds``."""
    chooser = dispatch.default_dispatcher()
    defer = chooser.defer

    def deferred(name: Any, query: Any, steps: Any, why: str) -> None:
        defer(name, query, traced(steps, str(query.problem), seen, on_gpu), why)

    chooser.defer = deferred  # type: ignore[method-assign]
    with settings.override(on_cache_miss="background", tune_share=share, progress=False):
        for case in all_cases:
            case.plain()
            # Torch loads the epilogue's function at its first use, whoever calls it.
            if case.epilogue:
                case.row.epilogue_ms = milliseconds(case.finished, on_gpu)
            case.row.torch_ms = min(milliseconds(case.plain, on_gpu) for _ in range(5))
        began = time.perf_counter()
        for case in all_cases:
            case.row.first_ms = milliseconds(case.call, on_gpu)
        open_cases = list(all_cases)
        while open_cases and time.perf_counter() - began < seconds:
            for case in open_cases:
                for _ in range(20):
                    took = milliseconds(case.call, on_gpu)
                    case.row.delays.append(took - case.row.torch_ms)
                plain = max(milliseconds(case.plain, on_gpu) for _ in range(5))
                case.row.torch_worst_ms = max(case.row.torch_worst_ms, plain - case.row.torch_ms)
            now = time.perf_counter() - began
            for case in open_cases:
                found = chooser.record(case.problem)
                if found is not None:
                    case.row.winner_s, case.row.winner = now, str(answer(chooser, case))
            open_cases = [case for case in open_cases if case.row.winner_s is None]
        for case in all_cases:  # with the winner, which is bound and verified now
            case.row.delays += [milliseconds(case.call, on_gpu) - case.row.torch_ms]
    for row in (case.row for case in all_cases):
        row.calls, row.worst_ms = len(row.delays), max(row.delays)
        row.late = sum(delay > LATER_MS for delay in row.delays)
        row.p99_ms = sorted(row.delays)[int(0.99 * (len(row.delays) - 1))]
        row.delays = []


def compare(all_cases: Sequence[Case], root: Path, until: float) -> None:
    """Tune in the foreground, in another cache, and compare the winners."""
    chooser, other = dispatch.default_dispatcher(), without_records(root)
    with settings.override(progress=False) as current:
        for case in all_cases:
            found = chooser.record(case.problem)
            if found is None or time.perf_counter() > until:
                continue
            began = time.perf_counter()
            other.tune(bucketed(case.problem), current)
            case.row.foreground_s = time.perf_counter() - began
            mine, there = answer(chooser, case), answer(other, case)
            case.row.foreground = str(there)
            case.row.ratio = ratio(case.problem, mine, there)


def answer(chooser: Dispatcher, case: Case) -> Candidate:
    """What answers a call from the records of ``chooser``. It may differ from a record's winner: a
    record is of the upper edge of the bucket of M."""
    with settings.override(on_cache_miss="error") as current:
        return chooser.choose(case.problem, current).candidate


def ratio(problem: Problem, mine: Candidate, other: Candidate) -> float:
    """The time of a candidate relative to another one's, in use."""
    if mine == other:
        return 1.0
    launchers = {
        name: Bound.of(candidate.kernel.bind(problem, candidate.config)).run
        for name, candidate in (("mine", mine), ("other", other))
    }
    clock = {"captures": CAPTURES, "rounds": ROUNDS, "burst_us": BURST_US}
    us, _ = exhaustive.race(problem, current_device(problem.device), launchers, **clock)
    return us["mine"] / us["other"]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| M×N×K | torch, ms | with its first epilogue, ms | first, ms | worst delay, ms | p99, ms "
        "| torch's, ms | calls | winner after, s | winner | in the foreground |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        after = "not ended" if row.winner_s is None else f"{row.winner_s:.1f}"
        there = "equal" if row.foreground == row.winner else row.foreground
        if row.ratio is not None and there != "equal":
            there += f" ({row.ratio:.3f})"
        lines.append(
            f"| {row.shape} | {row.torch_ms:.2f} | {row.epilogue_ms or row.torch_ms:.2f} "
            f"| {row.first_ms:.2f} | {row.worst_ms:.1f} "
            f"| {row.p99_ms:.2f} | {row.torch_worst_ms:.1f} | {row.calls} | {after} | {row.winner} "
            f"| {there if row.winner and row.foreground else 'not measured'} |"
        )
    return "\n".join(lines)


def slowest(seen: Sequence[Step]) -> str:
    """The slowest kinds of steps: how often, the longest, and their seconds in all."""
    kinds: dict[tuple[str, str], list[Step]] = {}
    for step in seen:
        kinds.setdefault((step.begin, step.end), []).append(step)
    ranked = sorted(kinds.items(), key=lambda kind: -max(step.ms for step in kind[1]))[:SLOWEST]
    lines = [
        "| from | to | steps | longest, ms | of | in all, s |",
        "|---|---|---|---|---|---|",
    ]
    for (begin, end), steps in ranked:
        longest = max(steps, key=lambda step: step.ms)
        total = sum(step.ms for step in steps) / 1e3
        lines.append(
            f"| {begin} | {end} | {len(steps)} | {longest.ms:.1f} | {longest.about} | {total:.2f} |"
        )
    return "\n".join(lines)


def goals(rows: Sequence[Row], preload_s: float) -> list[str]:
    """A line for each goal: whether it was met, and by how much."""
    beyond = [row.first_ms - row.torch_ms for row in rows]
    calls, late = sum(row.calls for row in rows), sum(row.late for row in rows)
    worst, machine = max(row.worst_ms for row in rows), max(row.torch_worst_ms for row in rows)
    compared = [row for row in rows if row.foreground]
    equal = sum(row.foreground == row.winner for row in compared)
    close = sum(row.ratio is not None and row.ratio <= CLOSE for row in compared)
    ended = sum(row.winner_s is not None for row in rows)
    lines = [
        f"{_met(max(beyond) <= FIRST_MS)}: first calls: {max(beyond):.1f} ms beyond torch's at "
        f"most, goal {FIRST_MS:g}; {statistics.median(beyond):.1f} ms in the median, and "
        f"{beyond[0]:.1f} ms for the process's first. `tmm_core.preload()` took {preload_s:.2f} s "
        f"before.",
        f"{_met(worst <= LATER_MS)}: later calls: {worst:.1f} ms of delay at most, goal "
        f"{LATER_MS:g}; {late} of {calls} were above it. Torch's own calls in between: "
        f"{machine:.1f} ms at most.",
        f"{_met(bool(compared) and close >= EQUAL * len(compared))}: Of {len(compared)} winners "
        f"{equal} are the foreground's, {close} within 2 % of it, goal {EQUAL:.0%}. {ended} of "
        f"{len(rows)} tunings ended.",
    ]
    spent = [row.foreground_s for row in compared if row.foreground_s is not None]
    if spent:
        lines.append(
            f"Tuning in the foreground, kernels compiled before: {statistics.median(spent):.1f} s "
            f"(median), {max(spent):.1f} s at most."
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main(arguments: Sequence[str] | None = None, shapes: Any = SHAPES) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=85.0, help="for the background")
    parser.add_argument("--most", type=float, default=140.0, help="seconds in all")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    until = time.perf_counter() + options.most
    on_gpu = options.device.startswith("cuda")
    seen: list[Step] = []
    collections, since = [0.0], [0.0]

    def collecting(phase: str, _: Any) -> None:
        if phase == "start":
            since[0] = time.perf_counter()
        else:
            collections.append(1e3 * (time.perf_counter() - since[0]))

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        dispatch.default_dispatcher.made = without_records(root / "background")
        warm.forget_plans()
        began = time.perf_counter()
        tmm_core.preload()
        preload_s = time.perf_counter() - began
        made = cases(shapes, options.device)
        gc.callbacks.append(collecting)
        serve(made, options.share, options.seconds, on_gpu, seen)
        gc.callbacks.remove(collecting)
        compare(made, root / "foreground", until)
    rows = [case.row for case in made]
    longest = f"Python's longest garbage collection took {max(collections):.1f} ms."
    text = "\n\n".join([table(rows), slowest(seen), "\n".join(goals(rows, preload_s)), longest])
    print(text)
    output = options.output
    if output is None and (out := os.environ.get("OUT")):
        output = Path(out) / "stalls.json"
    if output is not None:
        about = torch.cuda.get_device_name() if on_gpu else "CPU"
        document = {"device": about, "torch": torch.__version__, "share": options.share}
        rows_out = [{k: v for k, v in asdict(row).items() if k != "delays"} for row in rows]
        slow = sorted(map(asdict, seen), key=lambda step: -step["ms"])[:200]
        document |= {"rows": rows_out, "slowest_steps": slow}
        output.write_text(json.dumps(document, indent=1) + "\n")
        output.with_suffix(".md").write_text(text + "\n")
    return rows


if __name__ == "__main__":
    main()
