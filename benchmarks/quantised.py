"""Compares quantised weights and experts with torch's bf16 products, back to back.

Each provider's call is captured over enough weights to fill three times the L2. The captures are
replayed interleaved. Products by tmm are tuned at their first use::

    python benchmarks/quantised.py --json quantised.json
    python benchmarks/quantised.py --formats int4 --rows 1 16 --weights 4096x14336
    python benchmarks/quantised.py --bars --minutes 5 --json bars.json

``--bars`` compares each ratio with the ratio to reach. It measures 8-bit weights with few rows. It
compares products of two operands in 8-bit floats with ``F.scaled_mm``, with scales by block, and
experts in 8-bit floats and in MXFP4 with torch's grouped product in bf16.

``--search`` tunes each product without records, and compares the choice with an exhaustive search.
It takes a product some ten seconds longer. Experts are not searched.

With ``humming-kernels`` installed its layer is timed in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tmm_core
from tmm_core.bench import exhaustive
from tmm_core.tuning.timing import timer_for

Tensor = torch.Tensor
Call = Callable[[int], Any]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

#: Weights by rows (N) and columns (K): weights of Llama-8B and larger models.
WEIGHTS = ((28672, 4096), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096), (6144, 4096))
ROWS = (1, 4, 16, 64, 256, 2048, 8192)
FORMATS = ("int4", "int8", "fp8", "mxfp4", "fp8_blocks")
#: Minimum bytes of the weights of one provider.
ROTATED = 240e6
ROUNDS = 11
GROUP = 128
BLOCK = (128, 128)

#: Weights and rows of ``--bars``, by M×N×K where both operands are in 8-bit floats.
BAR_WEIGHTS = ((28672, 4096), (8192, 8192), (4096, 14336), (4096, 4096))
BAR_ROWS = (1, 16)
BOTH_IN_8_BITS = (
    (16, 4096, 7168), (64, 7168, 2048), (64, 4096, 7168), (256, 4096, 7168), (1024, 7168, 2048),
    (4096, 4096, 7168), (4096, 7168, 16384),
)  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """A mixture's experts on one GPU; ``choices`` is how many of these a token chooses."""

    experts: int
    hidden: int
    between: int
    choices: float
    form: str
    #: Ratios to reach, by tokens.
    bars: dict[int, float] = field(default_factory=dict)


MIXTURES = {
    "Qwen3-30B": Mixture(128, 2048, 768, 8, "fp8_blocks", {64: 1.5, 512: 1.5, 8192: 1.2}),
    # One of 8 ranks.
    "DeepSeek-V3": Mixture(32, 7168, 2048, 1, "fp8_blocks", {64: 1.5, 512: 1.5, 8192: 1.2}),
    "gpt-oss-20b": Mixture(32, 2880, 2880, 4, "mxfp4", {1: 2.0, 16: 2.0, 64: 2.0}),
}
SMALL = {
    "small fp8": Mixture(4, 256, 128, 2, "fp8_blocks", {8: 1.0}),
    "small mxfp4": Mixture(4, 128, 64, 2, "mxfp4", {8: 1.0}),
}


@dataclass
class Problem:
    """Calls that compute the same product; the others are compared with the first."""

    form: str
    sizes: dict[str, Any]
    calls: dict[str, Call]
    #: Number of weights of each provider; a call takes the index of one.
    copies: int
    #: Bytes of one stored weight with its scales.
    bytes: int
    plan: Callable[[], Any] | None = None
    bar: float | None = None

    def __str__(self) -> str:
        return " ".join(
            f"{value}" if isinstance(value, str) else f"{name}={value}"
            for name, value in self.sizes.items()
        )


def quantised(form: str, *shape: int, device: torch.device) -> tmm_core.Quantized:
    """A random weight: 4-bit integers in groups of 128, 8 bits with a scale for each row or block,
    or MXFP4."""
    *lead, n, k = shape
    if form == "int4":
        codes = torch.randint(0, 256, (*lead, n, k // 2), device=device, dtype=torch.uint8)
        scale = (torch.rand(*lead, n, k // GROUP, device=device) * 0.01).bfloat16()
        return tmm_core.Quantized(codes, scale, format="int4", group=GROUP)
    if form == "mxfp4":
        codes = torch.randint(0, 256, (*lead, n, k // 2), device=device, dtype=torch.uint8)
        scale = torch.randint(117, 121, (*lead, n, k // 32), device=device, dtype=torch.uint8)
        return tmm_core.Quantized(codes, scale, format="mxfp4", group=32)
    if form == "int8":
        codes = torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
    else:
        codes = in_fp8(*shape, device=device)
    if form == "fp8_blocks":
        sizes = -(-n // BLOCK[0]), -(-k // BLOCK[1])
        scale = torch.rand(*lead, *sizes, device=device) * 0.01
        return tmm_core.Quantized(codes, scale, format="fp8", block=BLOCK)
    scale = torch.rand(*lead, n, 1, device=device) * 0.01
    return tmm_core.Quantized(codes, scale, format=form)


def in_fp8(*shape: int, device: torch.device) -> Tensor:
    """Random 8-bit floats, drawn a matrix at a time."""
    found = torch.empty(shape, dtype=E4M3, device=device)
    for matrix in found.view(-1, *shape[-2:]):
        matrix.copy_(torch.randn(shape[-2:], device=device))
    return found


def plain(*shape: int, device: torch.device) -> Tensor:
    """A random weight in bf16."""
    found = torch.empty(shape, dtype=BF16, device=device)
    return found.normal_(std=shape[-1] ** -0.5)


def copies_of(size: float, device: torch.device) -> int:
    """How many weights of that many bytes exceed a GPU's L2 three times."""
    return max(1, math.ceil(ROTATED / size)) if device.type == "cuda" else 1


def of_humming(n: int, k: int, count: int, device: torch.device) -> list[Any]:
    """Layers of humming-kernels with 4-bit integers in groups of 128."""
    from humming.layer import HummingLayer

    layers = []
    for _ in range(count):
        layer = HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config={"dtype": "int4", "group_size": GROUP},
            torch_dtype=torch.bfloat16,
        ).to(device)
        layer.load_from_unquantized(torch.randn(n, k, dtype=torch.bfloat16, device=device))
        layer.transform()
        layers.append(layer)
    return layers


def of_weights(
    form: str, n: int, k: int, rows: tuple[int, ...], device: torch.device, peers: bool,
    bar: float | None = None,
) -> Iterator[Problem]:  # fmt: skip
    """Products of bf16 rows with a quantised weight."""
    bits = 4 if form in ("int4", "mxfp4") else 8
    count = max(2, copies_of(n * k * bits / 8, device))
    weights = [quantised(form, n, k, device=device) for _ in range(count)]
    dense = [plain(n, k, device=device) for _ in range(max(2, copies_of(2 * n * k, device)))]
    layers: list[Any] = []
    if peers and form == "int4":
        try:
            layers = of_humming(n, k, count, device)
        except Exception as error:  # a build of a peer may raise anything: leave it out, and say so
            print(f"humming-kernels does not run here: {error!r}"[:300], file=sys.stderr)
    for m in rows:
        x = torch.randn(m, k, device=device, dtype=BF16)
        calls: dict[str, Call] = {
            "torch bf16": lambda i, x=x: F.linear(x, dense[i % len(dense)]),  # type: ignore[misc]
            f"tmm {form}": lambda i, x=x: tmm_core.linear(x, weights[i]),  # type: ignore[misc]
        }
        if layers:
            calls["humming int4"] = lambda i, x=x: layers[i](x)  # type: ignore[misc]
        yield Problem(
            form, {"m": m, "n": n, "k": k}, calls, count,
            weights[0].stored.nbytes + weights[0].scale.nbytes,
            lambda x=x: tmm_core.plan(x, weights[0].t()), bar,  # type: ignore[misc]
        )  # fmt: skip


def of_two_in_8_bits(m: int, n: int, k: int, device: torch.device) -> Problem:
    """Rows with a scale for each 128 values times a weight with one for each block of 128×128."""
    count = copies_of(n * k, device)
    weights = [quantised("fp8_blocks", n, k, device=device) for _ in range(count)]
    dense = [plain(n, k, device=device) for _ in range(copies_of(2 * n * k, device))]
    x = torch.randn(m, k, device=device, dtype=BF16)
    # In torch's layout: the scales of a row apart by the number of rows.
    of_rows = (torch.rand(k // GROUP, m, device=device) * 0.01).t()
    rows = tmm_core.Quantized(in_fp8(m, k, device=device), of_rows, format="fp8", group=GROUP)
    calls: dict[str, Call] = {
        "torch bf16": lambda i: F.linear(x, dense[i % len(dense)]),
        "tmm": lambda i: tmm_core.linear(rows, weights[i]),
    }
    if hasattr(tmm_core, "quantize_rows"):
        calls["tmm, rows quantised"] = lambda i: tmm_core.linear(
            tmm_core.quantize_rows(x, group=GROUP), weights[i]
        )
    if device.type == "cuda":
        scaling = F.ScalingType  # type: ignore[attr-defined]
        # Torch wants the first dimension of b's scales rounded up to 4.
        padded = [F.pad(w.scale, (0, -w.scale.shape[1] % 4)).t() for w in weights]
        calls = {
            "F.scaled_mm": lambda i: F.scaled_mm(
                rows.stored, weights[i].stored.t(), of_rows, scaling.BlockWise1x128, padded[i],
                scaling.BlockWise128x128,
            ),
            **calls,
        }  # fmt: skip
    return Problem(
        "two in fp8", {"m": m, "n": n, "k": k}, calls, count, weights[0].stored.nbytes,
        lambda: tmm_core.plan(rows, weights[0].t()), 1.15 if m <= 256 else 1.0,
    )  # fmt: skip


def of_experts(
    name: str, mixture: Mixture, tokens: tuple[int, ...], device: torch.device
) -> Iterator[Problem]:
    """Both grouped products of a mixture's experts; some experts get more tokens than others."""
    sizes = {
        "up": (2 * mixture.between, mixture.hidden), "down": (mixture.hidden, mixture.between)
    }  # fmt: skip
    for which, size in sizes.items():
        yield from _of_projection({"experts": name, "": which}, mixture, size, tokens, device)


def _of_projection(
    names: dict[str, Any], mixture: Mixture, size: tuple[int, int], tokens: tuple[int, ...],
    device: torch.device,
) -> Iterator[Problem]:  # fmt: skip
    (n, k), count, form = size, mixture.experts, mixture.form
    copies = copies_of(count * n * k * (0.5 if form == "mxfp4" else 1), device)
    weights = [quantised(form, count, n, k, device=device) for _ in range(copies)]
    dense = [plain(count, n, k, device=device) for _ in range(copies_of(2 * count * n * k, device))]

    def ours(x: Any, ends: Tensor) -> Call:
        return lambda i: tmm_core.grouped_linear(x, weights[i], offs=ends)

    def theirs(x: Tensor, ends: Tensor) -> Call:
        return lambda i: F.grouped_mm(x, dense[i % len(dense)].mT, offs=ends)

    for number in tokens:
        rows = max(1, round(number * mixture.choices))
        generator = torch.Generator(device).manual_seed(rows)
        odds = torch.linspace(1, 2, count, device=device)
        chosen = torch.multinomial(odds, rows, replacement=True, generator=generator)
        ends = torch.bincount(chosen, minlength=count).cumsum(0).int()
        x = torch.randn(rows, k, device=device, dtype=BF16)
        calls = {"grouped_mm bf16": theirs(x, ends), f"tmm {form}": ours(x, ends)}
        if form == "fp8_blocks":
            of_rows = (torch.rand(-(-k // GROUP), rows, device=device) * 0.01).t()
            narrow = in_fp8(rows, k, device=device)
            both = tmm_core.Quantized(narrow, of_rows, format="fp8", group=GROUP)
            calls["tmm, rows in fp8"] = ours(both, ends)
        yield Problem(
            form, {**names, "tokens": number, "rows": rows, "n": n, "k": k}, calls, copies,
            weights[0].stored.nbytes + weights[0].scale.nbytes, bar=mixture.bars.get(number),
        )  # fmt: skip


def medians(
    calls: dict[str, Call], rounds: int, copies: int, device: torch.device
) -> dict[str, float]:
    """The median µs of each call, interleaved; a chain has one for each of the ``copies``."""
    timer = timer_for(device)
    samples = timer.measure(list(calls.values()), rounds, copies=copies)
    timer.release()
    return {
        name: round(statistics.median(mine), 2) for name, mine in zip(calls, samples, strict=True)
    }


def measure(problem: Problem, device: torch.device, search: bool = False) -> dict[str, Any]:
    """µs of each provider, and its speed relative to the first. ``search`` adds the regret of a
    tuning's choice: its time over that of the best of all candidates."""
    failed: dict[str, str] = {}
    for name, call in list(problem.calls.items()):  # and tunes
        try:
            call(0)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            del problem.calls[name]
    us = medians(problem.calls, ROUNDS, problem.copies, device)
    base = us[next(iter(us))]
    found = {"format": problem.form, **problem.sizes, "us": us, "bytes": problem.bytes}
    found["ratios"] = {name: round(base / each, 3) for name, each in us.items()}
    found |= {"failed": failed} if failed else {}
    if problem.bar is not None:
        own = [ratio for name, ratio in found["ratios"].items() if name.startswith("tmm")]
        found |= {"bar": problem.bar, "reached": max(own, default=0.0) >= problem.bar}
    if problem.plan is not None and any(name.startswith("tmm") for name in us):
        plan = problem.plan()
        found |= {"kernel": plan.kernel, "config": plan.config}
        if search:
            (record,) = tmm_core.tune(plan.problem)
            found["search"] = exhaustive.search(plan.problem, record, device)
    shown = ", ".join(f"{name} {each:.1f} µs ({base / each:.2f})" for name, each in us.items())
    told = "".join(f"; {name} failed: {text}" for name, text in failed.items())
    bar = f"; bar {problem.bar}: {'yes' if found['reached'] else 'NO'}" if problem.bar else ""
    print(f"{problem.form} {problem}: {shown}{told}{bar}; {found.get('kernel', '')}", flush=True)
    if "search" in found:
        result = found["search"]
        print(f"    {result['regret']:.3f} of the best, {result['best']}: {result['step']}")
    return found


def bars(device: torch.device, small: bool) -> Iterator[Problem]:
    """Problems of each part of ``--bars`` alternately: at a deadline all parts have some."""
    if small:
        both: Any = [(16, 128, 256)]
        mixtures, weights, rows = SMALL, ((64, 128),), (1,)
    else:
        both, mixtures = BOTH_IN_8_BITS, MIXTURES
        weights, rows = BAR_WEIGHTS, BAR_ROWS
    parts = [
        (of_two_in_8_bits(*sizes, device) for sizes in both),
        itertools.chain.from_iterable(
            of_experts(name, each, tuple(each.bars), device) for name, each in mixtures.items()
        ),
        itertools.chain.from_iterable(
            of_weights(form, n, k, rows, device, False, 1.6)
            for n, k in weights for form in ("int8", "fp8")
        ),
    ]  # fmt: skip
    while parts:
        for part in list(parts):
            problem = next(part, None)
            if problem is None:
                parts.remove(part)
            else:
                yield problem


def two_sizes(text: str) -> tuple[int, int]:
    """Two sizes from an option such as ``4096x14336``."""
    first, _, second = text.partition("x")
    return int(first), int(second)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument(
        "--weights", nargs="+", type=two_sizes, default=list(WEIGHTS), metavar="NxK"
    )
    parser.add_argument("--no-peers", action="store_true", help="tmm and torch alone")
    parser.add_argument("--bars", action="store_true", help="8-bit weights, blocks and experts")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose line has TEXT")
    parser.add_argument("--search", action="store_true", help="also search exhaustively")
    parser.add_argument("--small", action="store_true", help="of --bars, sizes for a CPU")
    parser.add_argument("--minutes", type=float, default=30.0, help="start no problem after these")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds to tune a product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    peers = not options.no_peers and importlib.util.find_spec("humming") is not None
    problems = (
        bars(device, options.small)
        if options.bars
        else itertools.chain.from_iterable(
            of_weights(form, n, k, tuple(options.rows), device, peers)
            for form in options.formats
            for n, k in options.weights
        )
    )
    found: list[dict[str, Any]] = []
    ends = time.monotonic() + 60 * options.minutes
    with tmm_core.override(tune_budget=options.budget):
        for problem in problems:
            if time.monotonic() > ends:
                print(f"the time is over before {problem.form} {problem}")
                break
            if options.only not in f"{problem.form} {problem}":
                continue
            with exhaustive.without_records() if options.search else nullcontext():
                found.append(measure(problem, device, options.search))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [each for each in found if each.get("reached") is False]
    for each in missed:
        kept = {name: each[name] for name in ("ratios", "bar", "kernel") if name in each}
        sizes = " ".join(str(each[name]) for name in ("experts", "", "tokens", "m", "n", "k")
                         if name in each)  # fmt: skip
        print(f"below its bar: {each['format']} {sizes}: {kept}")
    if options.bars:
        print(f"{len(found) - len(missed)} of {len(found)} reach their bar")


if __name__ == "__main__":
    main()
