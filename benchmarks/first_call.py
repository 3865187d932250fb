"""Prints the seconds that a fresh process's first recorded call takes beyond ``import torch``: the
median of five processes. A process before them tunes the problem.

    python benchmarks/first_call.py [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median

import torch

PROGRAM = """
import sys, time
import torch
a = torch.ones(512, 512, device=sys.argv[1], dtype=torch.bfloat16)
(a + a).sum().item()  # the device's context
begun = time.perf_counter()
import tmm_core
tmm_core.matmul(a, a, epilogue="silu").sum().item()
print(time.perf_counter() - begun)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TMM_CACHE_DIR": folder, "TMM_ON_CACHE_MISS": "tune"}
        command = [sys.executable, "-c", PROGRAM, device]
        runs = [
            subprocess.run(command, env=environ, check=True, capture_output=True) for _ in range(6)
        ]
    first, *recorded = (float(run.stdout) for run in runs)
    times = ", ".join(f"{seconds:.3f}" for seconds in recorded)
    print(f"{median(recorded):.3f} s ({times}); with tuning {first:.1f} s")


if __name__ == "__main__":
    main()
