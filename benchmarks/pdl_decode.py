"""Decode products back to back: what launching each before the one before has ended is worth.

A CUDA graph of calls over R weights with one activation, as ``benchmarks/README.md`` measures use,
replayed in bursts, all ways by turns::

    cuBLAS     torch.matmul
    present    the fastest configs, each launched when the one before has ended
    safe       the same, launched before that; nothing of them is asked for before it has
    l2         and the weight's first stages are prefetched into L2 before it has
    early      and these are loaded before it has (for who says ``static_weights``)

A ``/last`` lets the next launch begin when a block has asked for its last loads, else when it has
asked for its first. Every way runs twice: bare, and with a small elementwise kernel, which writes
the activation, before every product. On a Hopper GPU::

    python benchmarks/pdl_decode.py --output FILE
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from tmm_triton.skinny import Skinny
from tmm_triton.split_k import SplitK
from tmm_triton.warp_specialized import WarpSpecialized

from tmm_core import Kernel, Launcher, Problem
from tmm_core.spec.device import fingerprint

ROWS = (16, 1, 64)
#: N and K of the weights.
WEIGHTS = ((4096, 4096), (5120, 5120), (28672, 4096), (14336, 4096), (4096, 14336))
#: Bytes of all weights of a chain, at least, and its calls: the gap between two replays of a
#: graph, some 5 µs, is then little of each.
ROTATED, CALLS = 240e6, 24
#: Configs of a kernel that are tried, of which so many go on.
TRIED, KEPT = 3, 2
#: Seconds that one burst takes, and how many there are of each way.
BURST, BURSTS = 3e-3, 9

#: Name, what is done early, when the next launch may begin.
WAYS = (
    ("present", "", "first"),
    ("safe", "wait", "first"),
    ("safe/last", "wait", "last"),
    ("l2", "l2", "first"),
    ("early", "b", "first"),
    ("early/last", "b", "last"),
)
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Chain:
    """A captured graph of calls over the weights, one after another."""

    def __init__(self, call: Call, x: torch.Tensor, weights: list[torch.Tensor], between: bool):
        self.calls = -(-CALLS // len(weights)) * len(weights)
        rotation = weights * (self.calls // len(weights))
        source = x.clone()
        call(x, weights[0].t())
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.outs = []
        with torch.cuda.graph(self.graph):
            for weight in rotation:
                if between:
                    torch.mul(source, 1.0, out=x)
                self.outs.append(call(x, weight.t()))

    def burst(self, replays: int) -> float:
        """µs of a call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / (replays * self.calls)


def timed(chains: dict[str, Chain]) -> dict[str, float]:
    """The median over bursts that take turns in random order."""
    replays = {}
    for name, chain in chains.items():
        chain.burst(2)
        replays[name] = max(2, round(BURST * 1e6 / (chain.burst(2) * chain.calls)))
    samples: dict[str, list[float]] = {name: [] for name in chains}
    for _ in range(BURSTS):
        for name in random.sample(list(chains), len(chains)):
            samples[name].append(chains[name].burst(replays[name]))
    return {name: statistics.median(each) for name, each in samples.items()}


def binder(
    kernel: Kernel[Any], problem: Problem, config: Any
) -> Callable[[], tuple[str, Launcher | Exception]]:
    def bind() -> tuple[str, Launcher | Exception]:
        torch.cuda.set_device(0)
        try:
            return f"{kernel.name} {config}", kernel.bind(problem, config)
        except Exception as error:  # one config's
            return f"{kernel.name} {config}", error

    return bind


def compiled(
    binders: Iterable[Callable[[], tuple[str, Launcher | Exception]]],
) -> list[tuple[str, Launcher | Exception]]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda bind: bind(), binders))


def as_call(launcher: Launcher) -> Call:
    return lambda x, weight: launcher(x, weight, None, None, 1.0, None)


def kernel_for(kernel: type[Kernel[Any]], dependents: str) -> Kernel[Any]:
    made = kernel()
    made.dependents = dependents  # type: ignore[attr-defined]
    return made


def applies(kernel: Kernel[Any], config: Any, early: str, dependents: str) -> bool:
    """Whether the kernel has this way with this config."""
    if kernel.name == "triton.warp_specialized":
        return True
    ahead = config.num_stages == (2 if kernel.name == "triton.skinny" else 1)
    return dependents != "last" and (early in ("", "wait") or (early == "b" and ahead))


def measured(problem: Problem, x: torch.Tensor, weights: list[torch.Tensor]) -> Iterable[str]:
    """Lines of the table, of one problem."""
    expected = torch.matmul(x, weights[0].t())
    classes = (WarpSpecialized, Skinny, SplitK)
    trials = []
    for each in classes:
        kernel = kernel_for(each, "first")
        if not kernel.reasons_against(problem):
            configs = [c for c in kernel.configs(problem) if not c.early]
            trials += [(each, kernel, config) for config in configs[:TRIED]]
    first = compiled(binder(kernel, problem, config) for _, kernel, config in trials)
    chains = {}
    for place, (name, launcher) in enumerate(first):
        if isinstance(launcher, Exception):
            print(f"{name}: {launcher!r}", file=sys.stderr)
        else:
            chains[str(place)] = Chain(as_call(launcher), x, weights, False)
    times = timed(chains)
    kept = [trials[int(place)] for place in sorted(times, key=lambda p: times[p])[:KEPT]]
    del chains, first
    ways = [
        (way, each, replace(config, early=early), dependents)
        for each, kernel, config in kept
        for way, early, dependents in WAYS
        if applies(kernel, config, early, dependents)
    ]
    bound = compiled(
        binder(kernel_for(each, dependents), problem, config)
        for _, each, config, dependents in ways
    )
    for between in (False, True):
        chains = {"cuBLAS": Chain(torch.matmul, x, weights, between)}
        chains["cuBLAS again"] = Chain(torch.matmul, x, weights, between)
        names = {}
        for (way, *_), (name, launcher) in zip(ways, bound, strict=True):
            if isinstance(launcher, Exception):
                yield f"    {way}: {name}: {launcher!r}"
                continue
            out = launcher(x, weights[0].t(), None, None, 1.0, None)
            error = (out.double() - expected.double()).norm() / expected.double().norm()
            if not error < 1e-2:
                yield f"    WRONG by {float(error):.2g}: {way}: {name}"
            names[f"{way}|{name}"] = None
            chains[f"{way}|{name}"] = Chain(as_call(launcher), x, weights, between)
        times = timed(chains)
        blas = times["cuBLAS"]
        noise = abs(times["cuBLAS again"] / blas - 1)
        cells = []
        for way, _, _ in WAYS:
            mine = [times[name] for name in names if name.split("|")[0] == way]
            cells.append(f"{min(mine):7.2f} ({blas / min(mine):.3f})" if mine else f"{'-':>15}")
        shape = f"{problem.m}x{problem.n}x{problem.k}"
        which = "elementwise" if between else "bare"
        yield f"{shape:>15} {which:>11} {blas:7.2f} ±{noise:.3f} " + " ".join(cells)
        fastest = min(names, key=lambda name: times[name])
        yield f"    fastest: {fastest.replace('|', ': ', 1)}"
        del chains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where the table is written besides stdout")
    parser.add_argument("--seconds", type=float, default=55.0, help="last begin of a problem")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("needs a Hopper GPU")
    begun, lines = time.monotonic(), []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if options.output is not None:
            options.output.write_text("\n".join(lines) + "\n")

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    say(f"{torch.cuda.get_device_name()}, {versions}; µs of a call (cuBLAS's time over it)")
    say(f"{'M x N x K':>15} {'chain':>11} {'cuBLAS':>7} {'noise':>6} " + " ".join(
        f"{way:>15}" for way, _, _ in WAYS
    ))  # fmt: skip
    device = fingerprint(torch.device("cuda", 0))
    for m, (n, k) in itertools.product(options.rows, WEIGHTS):
        if time.monotonic() - begun > options.seconds:
            say(f"{m}x{n}x{k} is left out: {options.seconds:.0f} s are over")
            continue
        count = max(3, -(-int(ROTATED) // (2 * n * k)))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        problem = Problem.of(x, weights[0].t(), torch.matmul(x, weights[0].t()), device)
        for line in measured(problem, x, weights):
            say(line)
    say(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
