"""Runs compute-sanitizer on the Hopper kernel, and on two protocols that the tool may misjudge.

``staging.cu`` has the protocol of the staging buffers of ``triton.warp_specialized``, and
``dispatch.cu`` the protocol by which Triton starts a kernel's partitions. Each runs in its right
form, and with one part left out. If the tool reports the same for both forms, or reports the right
one, it does not understand the protocol. ``partitions.py`` is a kernel that only starts partitions,
so its reports are about code that Triton adds. ``kernel.py`` launches the kernel itself. Hazards on
the bytes of Triton's dispatch are counted separately. On a GPU of compute capability 9.0::

    python tests/gpu/racecheck/run.py --output FILE
"""

from __future__ import annotations

import argparse
import itertools
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
#: The arguments of each program.
PROGRAMS = {
    "staging": (("plain", "bulk", "tensor"), ("all", "named"), ("none", "barrier", "wait")),
    "dispatch": (
        ("sync", "aligned", "counted"),
        ("one", "two", "beside"),
        ("none", "barrier"),
    ),
}
#: Configs of the kernel that are launched.
CONFIGS = range(4)
#: Warps of the largest block; each has a byte.
WARPS = 16
Variant = tuple[str, str, str]
_SUMMARIES = (
    re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
    re.compile(r"ERROR SUMMARY: (\d+) errors?"),
)
_HAZARD = re.compile(r"hazard detected at __shared__ (0x[0-9a-f]+)")


class UnavailableError(Exception):
    """The tool, or a requirement of it, is not on this machine."""


@dataclass(frozen=True)
class Verdict:
    """One variant under one tool.

    Attributes:
        reports: Hazards or errors that the tool counts.
        right: Whether the program read the values that it had written; None if the tool ended it.
        output: The program's and the tool's output.
    """

    variant: Variant
    tool: str
    reports: int
    right: bool | None
    output: str


def variants(name: str) -> Iterator[Variant]:
    for first, second, fault in itertools.product(*PROGRAMS[name]):
        if (first, fault) != ("plain", "wait"):
            yield first, second, fault


def build(folder: Path, name: str) -> Path:
    """Compile the program of all variants.

    Raises:
        UnavailableError: There is no CUDA compiler.
    """
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise UnavailableError("nvcc is not on PATH")
    program = folder / name
    target = "-gencode=arch=compute_90a,code=sm_90a"
    source = HERE / f"{name}.cu"
    command = [compiler, "-std=c++17", target, "-lineinfo", "-o", program, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def judge(program: Path, variant: Variant, tool: str) -> Verdict:
    """Run one variant under one of compute-sanitizer's tools.

    Raises:
        UnavailableError: compute-sanitizer is missing or does not run on this machine.
    """
    reports, output = _under(tool, [program, *variant])
    wrong = re.search(r"(\d+) of \d+ wrong", output)
    return Verdict(variant, tool, reports, None if wrong is None else wrong[1] == "0", output)


def hazards(config: int) -> tuple[str, int, list[int]]:
    """Return the kernel's config of this index and racecheck's hazards: their number on the bytes
    of Triton's dispatch, and the addresses of all others.

    Raises:
        UnavailableError: compute-sanitizer is missing or does not run on this machine.
    """
    _, output = _under("racecheck", [sys.executable, HERE / "kernel.py", str(config)])
    start = re.search(r"(.*)\ndispatch bytes at (\d+)", output)
    assert start is not None, output
    addresses = [int(address, 16) for address in _HAZARD.findall(output)]
    bytes_of_dispatch = range(int(start[2]), int(start[2]) + WARPS)
    others = [address for address in addresses if address not in bytes_of_dispatch]
    return start[1], len(addresses) - len(others), others


def _under(tool: str, program: list[str | Path]) -> tuple[int, str]:
    """Run a program under a tool; return the number of reports and the output."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise UnavailableError("compute-sanitizer is not on PATH")
    command: list[str | Path] = [sanitizer, "--tool", tool, "--print-limit", "100000"]
    command += ["--racecheck-report", "all"] if tool == "racecheck" else []
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    summary = next(filter(None, (pattern.search(output) for pattern in _SUMMARIES)), None)
    if summary is None or "not supported" in output:
        raise UnavailableError(f"{tool} does not run here: {output[-500:]}")
    return int(summary[1]), output


def _table(name: str) -> Iterator[str]:
    """Yield a line for each variant of a program, then the first reports of each variant."""
    jobs = [(variant, "racecheck") for variant in variants(name)]
    for tool in ("memcheck", "synccheck"):
        jobs += [(variant, tool) for variant in variants(name) if variant[2] == "none"]
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), name)
        with ThreadPoolExecutor(4) as pool:
            verdicts = list(pool.map(lambda job: judge(program, *job), jobs))
    yield f"{name:24} {'left out':9} {'tool':10} {'reports':>8}  result"
    for verdict in verdicts:
        *of, fault = verdict.variant
        result = {True: "right", False: "WRONG", None: "ended"}[verdict.right]
        yield f"{' '.join(of):24} {fault:9} {verdict.tool:10} {verdict.reports:8}  {result}"
    for verdict in verdicts:
        if verdict.reports and verdict.tool == "racecheck":
            messages = [line for line in verdict.output.splitlines() if line.startswith("=====")]
            yield from ("", " ".join(verdict.variant), *messages[:5])


def _of_kernel() -> Iterator[str]:
    reports, output = _under("racecheck", [sys.executable, HERE / "partitions.py"])
    result = "right" if "0 of 2 wrong" in output else "WRONG"
    yield f"{reports} of a kernel that only starts partitions, {result}"
    yield ""
    yield f"{'on dispatch bytes':>17} {'elsewhere':>9}  the kernel's config"
    for index in CONFIGS:
        config, known, others = hazards(index)
        yield f"{known:17} {len(others):9}  {config}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--program", choices=PROGRAMS, help="run this program alone")
    options = parser.parse_args()
    lines: list[str] = []
    parts = map(_table, [options.program] if options.program else PROGRAMS)
    try:
        for part in parts if options.program else (_of_kernel(), *parts):
            lines.extend(part)
            lines.append("")
        failed = 0
    except UnavailableError as error:
        lines.append(str(error))
        failed = 1
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    return failed


if __name__ == "__main__":
    sys.exit(main())
