"""Compares the epilogue ``quantize`` with a separate launch that rounds, back to back.

    python benchmarks/quantize_epilogue.py --rows 1 16 256 2048 8192 --weight 14336x4096

For each number of rows it prints three times in µs, and the choice for the first. It times
``linear(x, w, epilogue="silu+quantize")``, ``quantize_rows(linear(x, w, epilogue="silu"),
group=128)`` and the product with silu alone. Each product is tuned at its first use. The weights
are three times as large as the L2, as in ``quantised``.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from quantised import ROUNDS, copies_of, plain

import tmm_core
from tmm_core.tuning.timing import timer_for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 2048, 8192])
    parser.add_argument("--weight", default="14336x4096", help="N and K")
    options = parser.parse_args()
    n, k = map(int, options.weight.split("x"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = [plain(n, k, device=device) for _ in range(max(2, copies_of(2 * n * k, device)))]
    print(f"{device}, bf16, {len(weights)} weights of {options.weight}, interleaved")
    for rows in options.rows:
        x = plain(rows, k, device=device)

        def fused(i: int, x: torch.Tensor = x) -> Any:
            return tmm_core.linear(x, weights[i], epilogue="silu+quantize")

        def alone(i: int, x: torch.Tensor = x) -> Any:
            return tmm_core.linear(x, weights[i], epilogue="silu")

        def apart(i: int) -> Any:
            return tmm_core.quantize_rows(alone(i), group=128)

        calls = [fused, apart, alone]
        for call in calls:  # the first call tunes
            call(0)
        timer = timer_for(device)
        samples = timer.measure(calls, ROUNDS, copies=len(weights))
        timer.release()
        one, two, without = (statistics.median(mine) for mine in samples)
        chosen = tmm_core.explain(x, weights[0].t(), epilogue="silu+quantize")
        print(
            f"{rows} rows: fused {one:.2f} µs, rounded apart {two:.2f} ({two / one:.3f} of fused), "
            f"silu alone {without:.2f}; {chosen!r}",
            flush=True,
        )


if __name__ == "__main__":
    main()
