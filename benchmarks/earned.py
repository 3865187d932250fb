"""Prints what each kernel gains: `python benchmarks/earned.py [FOLDER…]`.

It lists for every kernel the number of records that the kernel wins, and its gain in them. The gain
is the time of the fastest other kernel divided by the winner's, over as many rounds as both have.
It reads the records that ship with tmm, or the records of the given cache folders.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tmm_cache import CacheStore, TuningRecord


def ahead(record: TuningRecord) -> float | None:
    """The fastest other kernel's time divided by the winner's; None if no other ran."""
    best = record.best
    ratios = [
        statistics.median(each.samples_us) / statistics.median(best.samples_us[: len(rounds)])
        for each in record.candidates
        if each.kernel != best.kernel and (rounds := each.samples_us) and each.status != "wrong"
    ]
    return min(ratios, default=None)


def main(folders: list[str]) -> None:
    found: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as empty:
        stores = [CacheStore(Path(folder), layers=()) for folder in folders]
        for store in stores or [CacheStore(Path(empty))]:
            for entry in store.summaries():
                found[entry.gpu, entry.record.best.kernel].append(ahead(entry.record))
    print("| GPU | kernel | records won | without it, mean | worst | alone |")
    print("|---|---|---:|---:|---:|---:|")
    for (gpu, kernel), each in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]))):
        ratios = [ratio for ratio in each if ratio is not None]
        mean = f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}" if ratios else ""
        worst = f"{max(ratios):.2f}" if ratios else ""
        alone = len(each) - len(ratios)
        print(f"| {gpu} | `{kernel}` | {len(each)} | {mean} | {worst} | {alone or ''} |")


if __name__ == "__main__":
    main(sys.argv[1:])
