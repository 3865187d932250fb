"""What compute-sanitizer says of staging buffers that a bulk copy reads, right and wrong.

``staging.cu`` is the protocol of ``triton.warp_specialized``'s staging buffers alone, right and
with one thing left out. Where the tool says the same of both it does not follow bulk copies. That
is so in CUDA 13.0 on an H100: of threads that read it reports every race, of bulk copies none, also
where the copy is wrong. So a hazard that it reports in the kernel is between threads' own accesses,
and no report does not say that a bulk copy is ordered. On a GPU of compute capability 9.0::

    python tests/gpu/racecheck/run.py --output FILE
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
COPIES, BARRIERS, FAULTS = (
    ("plain", "bulk", "tensor"),
    ("all", "named"),
    ("none", "barrier", "wait"),
)
Variant = tuple[str, str, str]
_SUMMARIES = (
    re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
    re.compile(r"ERROR SUMMARY: (\d+) errors?"),
)


class UnavailableError(Exception):
    """The tool, or what it needs, is not on this machine."""


@dataclass(frozen=True)
class Verdict:
    """One variant under one tool.

    Attributes:
        reports: Hazards or errors that the tool counts.
        right: What was copied is what was written; None under a tool that ended the program.
        output: All that was printed.
    """

    variant: Variant
    tool: str
    reports: int
    right: bool | None
    output: str


def variants() -> Iterator[Variant]:
    for copy in COPIES:
        for barrier in BARRIERS:
            for fault in FAULTS:
                if (copy, fault) != ("plain", "wait"):
                    yield copy, barrier, fault


def build(folder: Path) -> Path:
    """The program of all variants.

    Raises:
        UnavailableError: There is no CUDA compiler.
    """
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise UnavailableError("nvcc is not on PATH")
    program = folder / "staging"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = [compiler, "-std=c++17", target, "-lineinfo", "-o", program, HERE / "staging.cu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def judge(program: Path, variant: Variant, tool: str) -> Verdict:
    """Run one variant under one of compute-sanitizer's tools.

    Raises:
        UnavailableError: compute-sanitizer is missing or does not run on this machine.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise UnavailableError("compute-sanitizer is not on PATH")
    command: list[str | Path] = [sanitizer, "--tool", tool]
    command += ["--racecheck-report", "all"] if tool == "racecheck" else []
    command += [program, *variant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    summary = next(filter(None, (pattern.search(output) for pattern in _SUMMARIES)), None)
    if summary is None or "not supported" in output:
        raise UnavailableError(f"{tool} does not run here: {output[-500:]}")
    wrong = re.search(r"(\d+) of \d+ wrong", output)
    return Verdict(
        variant, tool, int(summary[1]), None if wrong is None else wrong[1] == "0", output
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where the table is written besides stdout")
    options = parser.parse_args()
    jobs = [(variant, "racecheck") for variant in variants()]
    for tool in ("memcheck", "synccheck"):
        jobs += [(variant, tool) for variant in variants() if variant[2] == "none"]
    lines = [f"{'copy':8} {'barrier':8} {'left out':9} {'tool':10} {'reports':>8}  result"]
    details = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            program = build(Path(folder))
            with ThreadPoolExecutor(4) as pool:
                verdicts = list(pool.map(lambda job: judge(program, *job), jobs))
    except UnavailableError as error:
        lines.append(str(error))
        verdicts = []
    for verdict in verdicts:
        copy, barrier, fault = verdict.variant
        result = {True: "right", False: "WRONG", None: "ended"}[verdict.right]
        lines.append(
            f"{copy:8} {barrier:8} {fault:9} {verdict.tool:10} {verdict.reports:8}  {result}"
        )
        if verdict.reports and verdict.tool == "racecheck":
            said = [line for line in verdict.output.splitlines() if line.startswith("=====")]
            details += ["", " ".join(verdict.variant), *said[:8]]
    text = "\n".join(lines + details) + "\n"
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    return 0 if verdicts else 1


if __name__ == "__main__":
    sys.exit(main())
