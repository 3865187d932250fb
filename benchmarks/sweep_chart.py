"""Draws TFLOPS of single kernels over the side of a square, as in docs/figures.md.

python benchmarks/sweep_chart.py benchmarks/results/h200 OUT.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from tmm_core.bench.results import Results
from tmm_core.bench.suites import SWEEP


def main(folder: Path, out: Path) -> None:
    documents = [each for each in Results.read([folder]).measured if each["suite"] == SWEEP]
    documents.sort(key=lambda document: document["case"]["m"])
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for column in dict.fromkeys(name for each in documents for name in each["times"]):
        timed = [each for each in documents if column in each["times"]]
        axes.plot(
            [each["case"]["m"] for each in timed],
            [each["flops"] / each["times"][column]["median_us"] / 1e6 for each in timed],
            label=column.removeprefix("kernel "),
            marker="o",
        )
    axes.set(xlabel="M = N = K", ylabel="TFLOPS, in use", ylim=(0, None))
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(out, dpi=144)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the results of a GPU")
    parser.add_argument("out", type=Path, help="where the image goes")
    main(**vars(parser.parse_args()))
