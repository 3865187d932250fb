"""Finds what first-use tuning loses: `python benchmarks/first_use.py OUT.json SECONDS [MxNxK …]`.

Each product, by default random large ones, is tuned as at its first use, without any record and
with nothing compiled. It is then searched exhaustively: every tile of the Hopper kernel, and BLAS.
The tuning's choice and the best of the search race in use, in fresh captures. The output names the
step of the tuning that lost the best candidate, and the regret: the time of the tuning's choice
over the best time.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import geometric_mean, median
from typing import Any

import torch
from tmm_triton.hopper import search_space

import tmm_core
from tmm_core import settings
from tmm_core.spec.device import current_device
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE
from tmm_core.triton.launch import Launch
from tmm_core.tuning import stages
from tmm_core.tuning.cold_operands import Copies
from tmm_core.tuning.ranking import CLOSE, MARGIN
from tmm_core.tuning.search import NO_HINTS
from tmm_core.tuning.timing import levelled, timer_for

COLUMNS = (3072, 3584, 4096, 5120, 6144, 8192, 11008, 13824, 14336)
DEPTHS = (2048, 2560, 3584, 4096, 5120, 6912, 8192)
#: Candidates that race against BLAS and the tuning's choice after the screening.
FINALISTS, CAPTURES, ROUNDS, BURST_US, STEADY_US = 6, 3, 7, 5000.0, 0.15e6
#: Limits of the Hopper kernel's search, lifted.
LIFTED = {
    "_TILES_TRIED": 99, "_CONFIGS_TRIED": 999, "_BESIDE_TRIED": 99, "_BESIDE_NEAR": 9.0
}  # fmt: skip


def name_of(candidate: Candidate) -> str:
    return f"{candidate.kernel.name} {json.dumps(candidate.config.to_json(), sort_keys=True)}"


def everything(problem: Any, able: list[Any]) -> list[Candidate]:
    """All candidates of the exhaustive search."""
    before = {name: getattr(search_space, name) for name in LIFTED}
    for name, value in LIFTED.items():
        setattr(search_space, name, value)
    try:
        found = [
            Candidate(kernel, config)
            for kernel in able
            for config in [kernel.default_config(problem), *kernel.configs(problem)]
            if not config.unsaid(problem) and (kernel.name in (BASELINE, "triton.warp_specialized"))
        ]
    finally:
        for name, value in before.items():
            setattr(search_space, name, value)
    return list(dict.fromkeys(found))


def bound(problem: Any, candidates: list[Candidate], compilers: Any) -> dict[str, Any]:
    """Launchers by name, compiled in parallel."""
    futures = [compilers.submit(problem, candidate) for candidate in candidates]
    launchers = {}
    for candidate, future in zip(candidates, futures, strict=True):
        try:
            future.result(timeout=60)
            launchers[name_of(candidate)] = candidate.kernel.bind(problem, candidate.config)
        except Exception as error:
            print("left out", name_of(candidate), str(error)[:100])
    return launchers


def raced(
    problem: Any,
    launchers: dict[str, Any],
    captures: int,
    rounds: int,
    burst: float,
    steady: bool = False,
) -> tuple[dict[str, float], dict[str, float]]:
    """µs of each launcher in use, and in steady state: medians over fresh captures, because the
    same product in two graphs differs by up to 4 %."""
    device = current_device(problem.device)
    use: dict[str, list[float]] = {name: [] for name in launchers}
    slow: dict[str, list[float]] = {name: [] for name in launchers}
    for _ in range(captures):
        timer, copies = timer_for(device), Copies(problem, device, int(12e9))
        runs = [copies.runner(launcher) for launcher in launchers.values()]
        count = len(runs[0].inputs)
        times = levelled(timer.measure(runs, rounds, copies=count, burst_us=burst))
        for name, samples in zip(launchers, times, strict=True):
            use[name].append(median(samples))
        if steady:
            found = timer.steady(runs, 1, copies=count, steady_us=STEADY_US)  # type: ignore[union-attr]
            for name, us in zip(launchers, found, strict=True):
                slow[name] += us
        timer.release()
        del timer, copies, runs
        torch.cuda.empty_cache()
    return {n: median(v) for n, v in use.items()}, {n: median(v) for n, v in slow.items() if v}


def step_of(best: str, results: dict[str, Any], proposed: set[str], chosen: str) -> str:
    """The step of the tuning that lost the best candidate."""
    if best == chosen:
        return "found"
    if best not in proposed:
        return "never proposed"
    if best not in results:
        return "not tried"
    result = results[best]
    if not result.samples_us:
        return f"failed: {result.reason}"[:80]
    if len(result.samples_us) <= stages.LOOK:
        return "screening round"
    if len(result.samples_us) <= stages.CLOSER:
        return "second round"
    return "steady-state round" if result.steady_us is not None else "deciding round"


def random_products(seed: int = 1) -> Iterator[tuple[int, int, int]]:
    chance = random.Random(seed)
    while True:
        m = round(math.exp(chance.uniform(math.log(1000), math.log(9000))))
        yield m, chance.choice(COLUMNS), chance.choice(DEPTHS)


def main(out: str, seconds: float, products: Iterable[tuple[int, int, int]]) -> None:
    end = time.monotonic() + seconds
    dispatcher = tmm_core.dispatch.default_dispatcher()
    current = settings.current()
    rows: list[dict[str, Any]] = []
    for m, n, k in products:
        if time.monotonic() > end:
            break
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
        problem = tmm_core.problem(a, b).bare()
        del a, b
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
        Launch._compiled.clear()
        able = dispatcher.able(problem, current)
        started = time.monotonic()
        record = dispatcher.tuner.tune(problem, able, current, None, NO_HINTS)
        took = time.monotonic() - started
        torch.cuda.empty_cache()
        kernels = {kernel.name: kernel for kernel in able}
        results = {
            f"{c.kernel} {json.dumps(dict(c.config), sort_keys=True)}": c for c in record.candidates
        }
        hopper = kernels["triton.warp_specialized"]
        proposed = {
            name_of(Candidate(kernel, config)) for kernel in (hopper, kernels[BASELINE])
            for config in [kernel.default_config(problem), *kernel.configs(problem)]
        }  # fmt: skip
        best_on_record = record.best
        chosen = Candidate(
            kernels[best_on_record.kernel],
            kernels[best_on_record.kernel].config_type.from_json(dict(best_on_record.config)),
        )
        candidates = list(dict.fromkeys([chosen, *everything(problem, able)]))
        launchers = bound(problem, candidates, dispatcher.tuner.compilers)
        screened, _ = raced(problem, launchers, 1, 3, 2000.0)
        ranked = sorted(screened, key=screened.__getitem__)
        baseline = [x for x in launchers if x.startswith(BASELINE)]
        kept = dict.fromkeys([*ranked[:FINALISTS], name_of(chosen), *baseline])
        use, slow = raced(
            problem, {x: launchers[x] for x in kept}, CAPTURES, ROUNDS, BURST_US, steady=True
        )
        blas, blas_slow = min(use[x] for x in baseline), min(slow[x] for x in baseline)
        fair = [x for x in use if x in baseline or slow[x] <= blas_slow * (1 + CLOSE)]
        best = min(fair, key=use.__getitem__)
        if use[best] > blas * (1 - MARGIN):
            best = min(baseline, key=use.__getitem__)
        row = {
            "mnk": (m, n, k), "chosen": name_of(chosen), "best": best,
            "regret": use[name_of(chosen)] / use[best], "blas over best": blas / use[best],
            "blas over fastest in use": blas / min(use.values()),
            "step": step_of(best, results, proposed, name_of(chosen)),
            "tuning_s": round(took, 2), "tried": len(results),
            "use": {x: round(us, 1) for x, us in use.items()},
            "steady": {x: round(us, 1) for x, us in slow.items()},
            "record": {x: {"us": c.median_us, "n": len(c.samples_us), "steady": c.steady_us,
                           "status": c.status, "reason": (c.reason or "")[:120]}
                       for x, c in results.items()},
        }  # fmt: skip
        rows.append(row)
        print(m, n, k, f"regret {row['regret']:.3f} blas/best {row['blas over best']:.3f} "
              f"blas/fastest {row['blas over fastest in use']:.3f}", row["step"],
              f"{took:.1f}s", chosen.kernel.name, "best", best[:40], flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    with open(out, "w") as file:
        json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file)
    regret = geometric_mean([row["regret"] for row in rows])
    room = geometric_mean([row["blas over best"] for row in rows])
    print(
        f"{torch.cuda.get_device_name()}: {len(rows)} products; regret {regret:.4f}, "
        f"worst {max(row['regret'] for row in rows):.3f}; BLAS over best {room:.4f}"
    )
    for step, count in Counter(r["step"] for r in rows).most_common():
        mine = [r["regret"] for r in rows if r["step"] == step]
        print(f"{count:3} {step}: regret {geometric_mean(mine):.4f}")


if __name__ == "__main__":
    given = [tuple(map(int, each.split("x"))) for each in sys.argv[3:]]
    main(sys.argv[1], float(sys.argv[2]), given or random_products())  # type: ignore[arg-type]
