"""Profiles one launch of each kernel of torch and of tmm under NVIDIA's Nsight Compute:
`python benchmarks/launches.py SUITE:MxNxK… [--output FILE]`, with problems of `tmm bench`.

Caches are flushed before each launch, and the GPU's clocks are left as they are. Nothing is tuned:
the choice comes from a record or an estimate.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tmm_core import settings
from tmm_core.bench import providers, suites
from tmm_core.bench.case import parse_shape
from tmm_core.bench.suites import Task
from tmm_core.spec.precision import precision

#: Warm calls before the one that is profiled.
_WARM = 3
#: The marker by which a launch is found in the profile.
_LABEL = re.compile(r"\[\[(.*?)\]\]")
_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "LaunchStats")
#: The columns of the table, each with patterns of its metric's name. The first that matches is
#: used, since names differ between architectures.
_METRICS = {
    "us": (r"gpu__time_duration\.sum",),
    "DRAM": (r"(gpu|dram)__(dram_)?throughput\.avg\.pct_of_peak_sustained_elapsed",),
    "L2": (r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",),
    "tensor": (
        r"sm__pipe_tensor_cycles_active\.avg\.pct_of_peak_sustained_active",
        r"sm__inst_executed_pipe_tensor.*\.avg\.pct_of_peak_sustained_active",
    ),
    "waves": (r"launch__waves_per_multiprocessor",),
}
#: Microseconds in the units that Nsight Compute writes.
_UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def selected(problem: str) -> Task:
    """The suite's problem of that size."""
    suite, _, size = problem.partition(":")
    wanted = parse_shape(size)
    for task in suites.select([suite]):
        if (task.case.batch, task.case.m, task.case.n, task.case.k) == wanted:
            return task
    raise SystemExit(f"{suite} has no problem {size}")


def launch(problems: list[str]) -> None:
    """Make the calls, with the profiler on for the last of each."""
    profiler = torch.cuda.cudart()
    for problem in problems:
        task = selected(problem)
        mode = settings.override(batch_invariant=task.batch_invariant, on_cache_miss="heuristic")
        with torch.no_grad(), mode, precision(task.case.tf32):
            call = task.case.call(torch.device("cuda"))
            for name, run in (("torch", providers.eager([call])), ("tmm", providers.tmm([call]))):
                for _ in range(_WARM):
                    run(0)
                torch.cuda.synchronize()
                with torch.cuda.nvtx.range(f"[[{problem.replace(':', ' ')}|{name}]]"):
                    profiler.cudaProfilerStart()
                    run(0)
                    torch.cuda.synchronize()
                    profiler.cudaProfilerStop()


def table(text: str) -> Iterator[str]:
    """A line for each launch in the CSV that Nsight Compute prints."""
    start = text.index('"ID"')
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    units, launches = rows[0], rows[1:]
    columns = {
        title: next((c for p in patterns for c in units if re.fullmatch(p, c or "")), None)
        for title, patterns in _METRICS.items()
    }
    yield f"{'problem':34} {'by':6} {'kernel':44} " + " ".join(f"{c:>7}" for c in columns)
    for row in launches:
        labels = _LABEL.findall(" ".join(str(cell) for cell in row.values()))
        problem, _, by = (labels[0] if labels else "?|?").partition("|")
        cells = []
        for title, column in columns.items():
            value = row.get(column or "") or ""
            if not value:
                cells.append(f"{'':>7}")
                continue
            number = float(value.replace(",", ""))
            if title == "us":
                number *= _UNITS[units[column or ""]]
            cells.append(f"{number:7.2f}" if title == "waves" else f"{number:7.1f}")
        yield f"{problem:34} {by:6} {row['Kernel Name'][:44]:44} " + " ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="+", metavar="SUITE:MxNxK")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch(options.problems)
        return
    command = ["ncu", "--csv", "--page", "raw", "--nvtx", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "all"]
    command += [word for section in _SECTIONS for word in ("--section", section)]
    command += [sys.executable, __file__, "--launch", *options.problems]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = "\n".join(table(done.stdout)) + "\n"
    print(lines, end="")
    if options.output is not None:
        options.output.write_text(lines)


if __name__ == "__main__":
    main()
