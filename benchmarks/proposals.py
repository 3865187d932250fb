"""Replays tuning at first use without a GPU, for the problems of the shipped records as if there
were none. Compares the candidates that it proposes with the times on record.

    python benchmarks/proposals.py [--least-us 100] [--gpu h100] [--markdown FILE]

For each record of a product that takes BLAS at least this long, it reports whether the winner is
among the proposed candidates. It also reports the proposal regret: the best time on record of a
proposed candidate over the best of all. It is an upper bound for the candidates on record, and says
nothing about candidates that were never timed. Those that are proposed get an estimated time, which
only affects the choice of the second batch. A record without a time of any proposed config of its
winner's kernel is unknown, and is left out of the regret. So are candidates with a single sample:
the GPU was cool, and later samples of large products take up to 14 % longer. The configs on record
were once proposed by much the same rules, which flatters the rules.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import tmm_core
from tmm_core.dispatch import default_dispatcher
from tmm_core.epilogues import parse
from tmm_core.registry.query import read_config
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import drained
from tmm_core.tuning.search import Search

RECORDS = Path(tmm_core.__file__).parent / "records"
#: Bytes of a block's shared memory, and of L2, which records do not tell.
MEMORY = {"NVIDIA H200": (232448, 62914560), "NVIDIA H100 80GB HBM3": (232448, 52428800)}
#: Factors of the best time within which a proposed candidate counts as good as the winner.
NEAR = 1.02


@dataclass(frozen=True)
class Replay:
    """The candidates proposed for one record's problem.

    Attributes:
        winner: The candidate with the best time on record.
        proposed: Whether the winner was proposed.
        regret: The best time on record of a proposed one over its time; None if unknown.
        handed: The number of proposed candidates.
    """

    gpu: str
    problem: Problem
    winner: Candidate
    blas_us: float
    proposed: bool
    regret: float | None
    handed: int


def records(least_us: float, gpu: str) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """The problems whose BLAS takes at least so long, with their records."""
    for place in sorted(p for p in RECORDS.glob("v2/*/*") if gpu in p.parent.name):
        environment = json.loads((place / "environment.json").read_text())
        shared, l2 = MEMORY[environment["name"]]
        capability = tuple(environment.pop("capability"))
        device = DeviceFingerprint(
            **environment, capability=capability, shared_memory=shared, l2=l2
        )
        for file in sorted(place.glob("*.json")):
            document = json.loads(file.read_text())
            if file.name == "environment.json" or "candidates" not in document:
                continue
            given = document["problem"]
            if given.get("groups") or given.get("batch_invariant"):
                continue
            slowest = [us_of(c) for c in document["candidates"] if c["kernel"] == BASELINE]
            if min(slowest, default=0.0) >= least_us and math.isfinite(min(slowest)):
                yield Problem.from_json(given, device, parse(given["epilogue"])), document


def us_of(candidate: dict[str, Any]) -> float:
    samples = candidate.get("samples_us") or []
    able = len(samples) > 1 and candidate["status"] in ("ok", "slow")
    return median(samples) if able else math.inf


def replayed(problem: Problem, document: dict[str, Any], kernels: list[Kernel[Any]]) -> Replay:
    able = [kernel for kernel in kernels if not kernel.reasons_against(problem)]
    named = {kernel.name: kernel for kernel in able}
    known: dict[Candidate, float] = {}
    for given in document["candidates"]:
        us = us_of(given)
        if given["kernel"] in named and math.isfinite(us):
            kernel = named[given["kernel"]]
            try:
                candidate = Candidate(kernel, read_config(kernel, given["config"]))
            except Exception:
                continue  # of another version
            known[candidate] = min(us, known.get(candidate, math.inf))
    search = Search(problem, able)
    drained(search.query(able))
    scale = dict.fromkeys(able, 1.0)
    for candidate, us in known.items():
        estimate = search._estimates.get(candidate)
        if estimate:
            scale[candidate.kernel] = min(scale[candidate.kernel], us / estimate)
    times: dict[Candidate, float] = {}
    batch = search.first()
    while batch:
        for c in batch:
            times[c] = known.get(c, (search._estimates.get(c) or 1e9) * scale[c.kernel] * 1.01)
        batch = search.next_batch(times)
    winner = min(known, key=known.__getitem__)
    both = {c: us for c, us in known.items() if c in times}
    rated = any(c.kernel is winner.kernel for c in both)
    regret = min(both.values()) / known[winner] if rated else None
    blas = min(us for c, us in known.items() if c.kernel.name == BASELINE)
    return Replay(problem.device.name, problem, winner, blas, winner in times, regret, len(times))


def summary(name: str, replays: list[Replay]) -> str:
    regrets = [r.regret for r in replays if r.regret is not None]
    near = sum(regret <= NEAR for regret in regrets)
    mean, worst = geometric_mean(regrets or [1.0]), max(regrets, default=1.0)
    handed, exact = median(r.handed for r in replays), sum(r.proposed for r in replays)
    unknown = len(replays) - len(regrets)
    return (
        f"| {name} | {len(replays)} | {unknown} | {exact} | {near} | {mean:.4f} | {worst:.3f} "
        f"| {handed:g} |"
    )


HEAD = (
    "| records | number | unknown | winner proposed | within 2 % | mean regret | worst "
    "| candidates |\n|---|---|---|---|---|---|---|---|"
)


def folded(problem: Problem) -> int:
    """One of five parts of the weights: factors fitted to four are judged on the fifth."""
    return (problem.n * 31 + problem.k * 17) // 64 % 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--least-us", type=float, default=100.0)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    kernels = list(default_dispatcher().registry.kernels())
    replays = [replayed(p, d, kernels) for p, d in records(given.least_us, given.gpu)]
    lines = [HEAD]
    groups: dict[str, list[Replay]] = defaultdict(list)
    for r in replays:
        groups["all"].append(r)
        groups[r.gpu].append(r)
        groups[f"won by {r.winner.kernel.name}"].append(r)
        groups[f"fold {folded(r.problem)}"].append(r)
    lines += [summary(name, groups[name]) for name in sorted(groups)]
    lost = [r for r in replays if r.regret is not None and r.regret > NEAR]
    lost.sort(key=lambda r: -(r.regret or 0.0))
    lines += ["", "| GPU | problem | regret | winner not proposed |", "|---|---|---|---|"]
    for r in lost:
        config = " ".join(f"{k}={v}" for k, v in r.winner.config.to_json().items())
        name = r.winner.kernel.name
        lines.append(f"| {r.gpu.split()[1]} | {r.problem} | {r.regret:.3f} | {name} {config} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.markdown:
        given.markdown.write_text(text)


if __name__ == "__main__":
    main()
