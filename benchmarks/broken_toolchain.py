"""Shows that a broken toolchain leaves no verdict: `python benchmarks/broken_toolchain.py`.

One product is computed in four processes that share an empty cache: twice with a `ptxas` that
fails, then twice with a working one. Each process prints the kernel that answered, its warnings,
and the candidates on record. Exits with 1 if something is not as it should be. Takes about a minute
on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

M, K, N = 7, 2880, 4096

#: The program of each process. It prints one JSON object.
CHILD = """
import json, sys, time, warnings
import torch
import tmm_core
from tmm_core import dispatch
m, k, n = map(int, sys.argv[1:])
x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
torch.cuda.synchronize()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    began = time.monotonic()
    y = tmm_core.matmul(x, w)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    tmm_core.matmul(x, w)
why = tmm_core.explain(x, w)
record = dispatch.default_dispatcher().record(why.problem)[1]
print(json.dumps({
    "seconds": seconds,
    "error": ((y - x @ w).float().norm() / (x @ w).float().norm()).item(),
    "warnings": [str(each.message) for each in caught if "tmm" in type(each.message).__module__],
    "kernel": why.kernel,
    "origin": why.origin,
    "candidates": sorted({(c.kernel, c.status) for c in record.candidates}),
    "verdicts": [
        f"{c.kernel}: {c.reason}" for c in record.candidates
        # A kernel that expects to lose is not compiled.
        if c.status in ("failed", "wrong") and not (c.reason or "").startswith("expects to take")
    ],
    "times": {c.kernel: c.median_us for c in reversed(record.candidates) if c.median_us},
    "untried": dict(why.untried),
    "created": record.created,
    "text": str(why),
}))
"""

#: Reports its version, which Triton queries first, and then fails to load a library.
BROKEN = """#!/bin/sh
if [ "$1" = --version ]; then exec "{ptxas}" --version; fi
echo "ptxas: error while loading shared libraries: libfoo.so: cannot open shared object file" >&2
exit 127
"""


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="broken-toolchain-") as folder:
        failures = run(Path(folder))
    print(f"\n{time.monotonic() - started:.0f} s")
    for failure in failures:
        print(f"NOT AS EXPECTED: {failure}")
    print("all as expected" if not failures else f"{len(failures)} not as expected")
    return 1 if failures else 0


def run(folder: Path) -> list[str]:
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    tool = folder / "ptxas"
    tool.write_text(BROKEN.format(ptxas=ptxas))
    tool.chmod(0o755)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TMM_")},
        "TMM_CACHE_DIR": str(folder / "tmm"),
        "TMM_SHIPPED_RECORDS": "0",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    broken = {
        **environ,
        "TRITON_PTXAS_PATH": str(tool),
        "TRITON_PTXAS_BLACKWELL_PATH": str(tool),
    }
    failures: list[str] = []

    def expect(holds: bool, what: str) -> None:
        if not holds:
            failures.append(what)

    print(f"{M}x{K}x{N} bfloat16, ptxas {ptxas}\n")
    first = show("ptxas fails", broken)
    expect(first["kernel"] == "blas", "BLAS answers")
    expect(len(first["warnings"]) == 1, "exactly one warning")
    expect("tmm doctor" in "".join(first["warnings"]), "the warning names tmm doctor")
    expect(not first["verdicts"], f"no verdict on a kernel is on record: {first['verdicts']}")
    expect(bool(first["untried"]), "explain names the untried kernels")

    doctor = subprocess.run(
        [sys.executable, "-m", "tmm_base.tmm", "doctor"],
        env=broken, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print("tmm doctor:")
    for line in doctor.stdout.splitlines():
        if line[2:].startswith(("toolchain", "untried")):
            print(f"    {line[:150]}")
    expect("untried" in doctor.stdout, "tmm doctor reports the untried kernels")

    second = show("a second process, ptxas still fails", broken)
    expect(second["kernel"] == "blas", "BLAS answers again")
    expect(second["created"] == first["created"], "nothing is tuned again")
    expect(second["seconds"] < 5.0, "the second process does not wait")
    expect(len(second["warnings"]) == 1, "one warning in the second process")

    third = show("ptxas is repaired", environ)
    tried = {name for name, status in third["candidates"] if name.startswith("triton.")}
    expect(bool(tried), "Triton kernels are tried again")
    expect(any(name in third["times"] for name in tried), "Triton kernels are timed")
    expect(not third["untried"], "nothing is untried")
    expect(not third["warnings"], "no warning")

    fourth = show("the next process", environ)
    expect(fourth["created"] == third["created"], "nothing is tuned once more")
    expect(fourth["kernel"] == third["kernel"], "the same kernel answers")
    print("explain:")
    print("\n".join(f"    {line}" for line in fourth["text"].splitlines()[:24]))
    for each in (first, second, third, fourth):
        expect(each["error"] < 1e-2, f"the result is right (error {each['error']:.1e})")
    return failures


def show(title: str, environ: dict[str, str]) -> dict[str, Any]:
    """Run a process, print its findings, and return them."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, (M, K, N))],
        env=environ, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{title}: the process failed\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"== {title}")
    print(
        f"    answer     {found['kernel']} ({found['origin']}), first call {found['seconds']:.1f} s"
    )
    for message in found["warnings"]:
        print(f"    warning    {message}")
    for kernel, us in sorted(found["times"].items(), key=lambda item: item[1]):
        print(f"    timed      {kernel} {us:.2f} us")
    names = ", ".join(sorted(f"{name} {status}" for name, status in found["candidates"]))
    print(f"    on record  {names}")
    if found["untried"]:
        print(f"    untried    {', '.join(found['untried'])}")
    return found


if __name__ == "__main__":
    sys.exit(main())
