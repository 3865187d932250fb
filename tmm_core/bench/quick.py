"""``tmm bench --quick``: the README's table of gains in two minutes. It times two problems per
class, those a third and two thirds of the way through the class's list."""

from __future__ import annotations

from dataclasses import replace

import torch

from tmm_core.bench import report, suites
from tmm_core.bench.results import Results

#: Seconds of a whole run, and of tuning and of timing per problem.
SECONDS, BUDGET, TIMING = 120.0, 3.0, 0.2
#: The largest sizes on a CPU, where the run only shows that the command works.
CPU_SIZES = (64, 56)

#: The README's rows: by class, what is computed, and the torch code that it is compared with.
ROWS = {
    "epilogue": ("linear, activation, residual", "F.linear, then torch's operators"),
    "gated": ("SwiGLU", "two products, F.silu, multiply"),
    "decode": ("few rows (decode, M ≤ 128)", "torch.matmul"),
    "prefill": ("many rows (prefill)", "torch.matmul"),
    "square": ("square, 512 to 8192", "torch.matmul"),
    "short_k": ("short K", "torch.matmul"),
    "large_k": ("large K, small output", "torch.matmul"),
    "batched": ("batches", "torch.matmul"),
    "unaligned": ("odd sizes", "torch.matmul"),
    "grouped": ("experts", "F.grouped_mm"),
    "grouped_gated": ("experts with SwiGLU", "F.grouped_mm, F.silu, multiply"),
}
COLUMNS = ("product", "compared with", "problems", "geometric mean", "lowest")


def tasks(*, on_gpu: bool) -> list[suites.Task]:
    """Two bf16 problems of each class. The first of every class precedes the second of any, so that
    a run that ends early has all rows. On a CPU no size exceeds
    :data:`CPU_SIZES`."""
    classes = [suites.select([name], dtype=torch.bfloat16) for name in ROWS]
    chosen: list[suites.Task] = []
    for i, largest in enumerate(CPU_SIZES):
        for members in classes:
            task = members[len(members) * (i + 1) // (len(CPU_SIZES) + 1)]
            chosen.append(task if on_gpu else _small(task, largest))
    return chosen


def _small(task: suites.Task, largest: int) -> suites.Task:
    case = task.case
    sizes = {name: min(getattr(case, name), largest) for name in ("m", "n", "k")}
    groups, batch = min(case.groups, 4), min(case.batch, 4)
    return replace(task, case=replace(case, **sizes, groups=groups, batch=batch))


def gains(results: Results) -> list[tuple[str, ...]]:
    """A row for each class of :data:`ROWS` that was measured in bfloat16."""
    classes = report.by_class(results.measured)
    rows: list[tuple[str, ...]] = []
    for name, row in ROWS.items():
        if measured := classes.get((name, "bfloat16")):
            mean, lowest, _ = report.summarised(measured, lambda document: document["ratio"])
            rows.append((*row, str(len(measured)), mean, lowest))
    return rows
