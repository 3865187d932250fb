"""Compares two products of an MLP in sequence with each in a chain of its own, as tuning times it.

Gate and up are one product with SwiGLU; the product after it adds the MLP's input. If both take
longer in sequence than the sum of their chains, one slows the other down. Each call reads other
weights. Products are tuned at their first use::

    python benchmarks/pairs.py --widths 3072x8192 --rows 1 16 --formats bf16 int4
    python benchmarks/pairs.py --crowded      # also without spreading blocks over the SMs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from quantised import BF16, Call, copies_of, medians, plain, quantised, two_sizes

import tmm_core
from tmm_core.launch import warm

#: Inputs and features of MLPs of Llama-1B, Qwen3-4B, Phi-3 mini and Llama-8B.
WIDTHS = ((2048, 8192), (2560, 9728), (3072, 8192), (4096, 14336))
BITS = {"bf16": 16, "int4": 4, "int8": 8, "fp8": 8}
ROUNDS = 15


@contextmanager
def crowded() -> Iterator[None]:
    """A context: launches that are bound in it do not spread their blocks over the SMs."""
    from tmm_core.triton import launch

    def forget() -> None:
        launch.forget_compiled()
        warm.forget_plans()

    with mock.patch.object(launch, "spread", return_value=None):
        forget()
        try:
            yield
        finally:
            forget()


def measure(form: str, hidden: int, between: int, rows: int, *, before: bool, device: Any) -> Any:
    """µs of each product in its own chain and of both in sequence, by torch in bf16 and by tmm.

    Args:
        form: ``"bf16"``, or the format of tmm's weights.
        before: Also measure tmm's with :func:`crowded`.
    """
    copies = max(2, copies_of(3 * hidden * between * BITS[form] / 8, device))
    make = plain if form == "bf16" else partial(quantised, form)
    ups = [make(2 * between, hidden, device=device) for _ in range(copies)]
    downs = [make(hidden, between, device=device) for _ in range(copies)]
    dense = [
        (plain(2 * between, hidden, device=device), plain(hidden, between, device=device))
        for _ in range(max(2, copies_of(6 * hidden * between, device)))
    ]
    x = torch.randn(rows, hidden, device=device, dtype=BF16)
    y = torch.randn(rows, between, device=device, dtype=BF16)

    def theirs(i: int) -> Any:
        up, down = dense[i % len(dense)]
        gate, value = F.linear(x, up).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down) + x

    def ours() -> dict[str, Call]:
        up = tmm_core.plan(x, ups[0].t(), epilogue="swiglu")
        down = tmm_core.plan(y, downs[0].t(), residual=x)
        chosen.update(up=(up.kernel, up.config), down=(down.kernel, down.config))
        return {
            "up": lambda i: up(x, ups[i].t()),
            "down": lambda i: down(y, downs[i].t(), residual=x),
            "both": lambda i: down(up(x, ups[i].t()), downs[i].t(), residual=x),
        }

    chosen: dict[str, Any] = {}
    calls = {"torch": theirs, **ours()}
    if before:
        with crowded():
            calls["both, crowded"] = ours()["both"]
    us = medians(calls, ROUNDS, copies, device)
    of_sum = us["both"] / (us["up"] + us["down"])
    shown = ", ".join(f"{name} {each:.1f}" for name, each in us.items())
    print(f"{form} {hidden}×{between}, {rows} rows, µs: {shown}; both are {of_sum:.2f} of the sum")
    sizes = {"format": form, "hidden": hidden, "between": between, "rows": rows}
    return {**sizes, "us": us, "chosen": chosen}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--widths", nargs="+", type=two_sizes, default=list(WIDTHS), metavar="HxI")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--formats", nargs="+", choices=BITS, default=["bf16", "int4", "fp8"])
    parser.add_argument("--crowded", action="store_true", help="also without spreading blocks")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds to tune a product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found = []
    with tmm_core.override(tune_budget=options.budget):
        for form in options.formats:
            for widths in options.widths:
                for rows in options.rows:
                    each = measure(form, *widths, rows, before=options.crowded, device=device)
                    found.append(each)
                    if options.json:
                        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
