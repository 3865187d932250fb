"""Quantised weights beside torch's bf16 product, in use: products of 1 to 8192 rows.

Each provider's call is captured over so many weights that they exceed the L2 three times, and
replayed in turn with the others. Products by tmm are tuned at their first use::

    python benchmarks/quantised.py --json quantised.json
    python benchmarks/quantised.py --formats int4 --rows 1 16 --weights 4096x14336

With ``humming-kernels`` installed its layer is timed in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tmm_core
from tmm_core.tuning.timing import timer_for

Tensor = torch.Tensor
Call = Callable[[int], Any]

#: Weights by rows (N) and columns (K): those of Llama-8B and larger.
WEIGHTS = ((28672, 4096), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096), (6144, 4096))
ROWS = (1, 4, 16, 64, 256, 2048, 8192)
FORMATS = ("int4", "int8", "fp8")
#: Bytes that the weights of one provider have at least.
ROTATED = 240e6
ROUNDS = 11
GROUP = 128


def quantised(form: str, n: int, k: int, device: torch.device) -> tmm_core.Quantized:
    """A random weight: 4-bit integers in groups of 128, or 8 bits with a scale for each row."""
    if form == "int4":
        codes = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
        scale = (torch.rand(n, k // GROUP, device=device) * 0.01).bfloat16()
        return tmm_core.Quantized(codes, scale, format="int4", group=GROUP)
    if form == "int8":
        codes = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
    else:
        codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    return tmm_core.Quantized(codes, torch.rand(n, 1, device=device) * 0.01, format=form)


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


def measure(
    form: str, n: int, k: int, rows: tuple[int, ...], device: torch.device, peers: bool
) -> list[dict[str, Any]]:
    """µs of each provider for each number of rows."""
    bits = 4 if form == "int4" else 8
    count = max(2, math.ceil(ROTATED / (n * k * bits / 8)))
    weights = [quantised(form, n, k, device) for _ in range(count)]
    plain = [
        torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5
        for _ in range(max(2, math.ceil(ROTATED / (2 * n * k))))
    ]
    layers: list[Any] = []
    if peers and form == "int4":
        try:
            layers = of_humming(n, k, count, device)
        except Exception as error:  # whatever a peer's build raises: it is left out, and said
            print(f"humming-kernels does not run here: {error!r}"[:300], file=sys.stderr)
    found = []
    for m in rows:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        calls: dict[str, Call] = {
            "torch bf16": lambda i: torch.nn.functional.linear(x, plain[i % len(plain)]),  # noqa: B023
            f"tmm {form}": lambda i: tmm_core.linear(x, weights[i]),  # noqa: B023
        }
        if layers:
            calls["humming int4"] = lambda i: layers[i](x)  # noqa: B023
        for call in calls.values():  # and tunes
            call(0)
        timer = timer_for(device)
        samples = timer.measure(list(calls.values()), ROUNDS, copies=count)
        timer.release()
        us = {
            name: round(statistics.median(mine), 2)
            for name, mine in zip(calls, samples, strict=True)
        }
        plan = tmm_core.plan(x, weights[0].t())
        base = us["torch bf16"]
        floor = weights[0].stored.nbytes + weights[0].scale.nbytes
        found.append({
            "format": form, "m": m, "n": n, "k": k, "us": us, "kernel": plan.kernel,
            "config": plan.config, "bytes": floor,
            "ratios": {name: round(base / each, 3) for name, each in us.items()},
        })  # fmt: skip
        print(
            f"{form} {m}×{n}×{k}: "
            + ", ".join(f"{name} {each:.1f} µs ({base / each:.2f})" for name, each in us.items())
            + f"; {plan.kernel}, {floor / us[f'tmm {form}'] / 1e6:.2f} TB/s",
            flush=True,
        )
    return found


def _weight(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--weights", nargs="+", type=_weight, default=list(WEIGHTS), metavar="NxK")
    parser.add_argument("--no-peers", action="store_true", help="tmm and torch alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = not options.no_peers and importlib.util.find_spec("humming") is not None
    found: list[dict[str, Any]] = []
    for form in options.formats:
        for n, k in options.weights:
            found += measure(form, n, k, tuple(options.rows), device, peers)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
