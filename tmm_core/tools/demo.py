"""``python -m tmm_core.tools.demo``: one matmul, what ran, why, and the machinery behind it.

On a GPU: eight problems tuned and timed against torch. On a CPU BLAS answers everything, so
the Triton kernels are shown under Triton's interpreter, in a process of their own because
Triton reads ``TRITON_INTERPRET`` when it is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from tmm_cache import default_root

import tmm_core
from tmm_core import dispatch
from tmm_core.bench import report, runner, suites
from tmm_core.bench.case import Case
from tmm_core.bench.results import Document
from tmm_core.dispatch import verify
from tmm_core.spec.device import interpreting
from tmm_core.tools.commands.console import DONE, FOUND, note, print_table, warnings_as_notes

#: Every class where a choice matters once: square, unaligned, fused, gated, decode, large K.
GPU_CASES = (
    Case(m=4096, n=4096, k=4096),
    Case(m=4097, n=4097, k=4097),
    Case(m=4096, n=4096, k=4096, layout="nt", epilogue="silu"),
    Case(m=8192, n=4096, k=512, layout="nt", epilogue="gelu_tanh", bias=True, residual=True),
    Case(m=2048, n=14336, k=4096, layout="nt", epilogue="swiglu"),
    Case(m=16, n=4096, k=4096, layout="nt"),
    Case(m=256, n=256, k=65536),
    Case(m=64, n=1024, k=1024, batch=64),
)
#: Seconds of tuning per problem, and past which no problem is begun.
GPU_BUDGET, GPU_SECONDS = 4.0, 45.0

#: A tail in every dimension, and few programs: each costs the interpreter some 7 ms.
INTERPRETED_CASE = Case(m=50, n=72, k=40, layout="nt", epilogue="silu", bias=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns 1 where an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tmm_core.tools.demo")
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    # Hurried or interpreted timings have no place among the user's own records.
    folder = default_root()
    if not options.interpreted:
        folder = folder.with_name(f"{folder.name}-demo")
        os.environ["TMM_CACHE_DIR"] = str(folder)
        dispatch.dispatcher.cache_clear()
    with warnings_as_notes():
        if options.interpreted:
            return interpreted()
        print(f"tmm {tmm_core.__version__}, torch {torch.__version__}; records in {folder}\n")
        return on_gpu() if torch.cuda.is_available() else on_cpu()


def on_cpu() -> int:
    """A fused call answered by BLAS, then the kernels under the interpreter."""
    title("A matmul with its activation, on the CPU")
    x, w = torch.randn(256, 512), torch.randn(512, 384)
    y = tmm_core.matmul(x, w, epilogue="silu")
    eager = F.silu(x @ w)
    difference = float((y - eager).abs().max())
    print("y = tmm_core.matmul(x, w, epilogue='silu')      x [256, 512], w [512, 384]")
    print(f"largest difference to F.silu(x @ w): {difference:.1e}\n")
    print(tmm_core.explain(x, w, epilogue="silu"))
    right = verify.error(y, eager) <= verify.TOLERANCE[y.dtype]
    missing = [name for name in ("triton", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"\nThe Triton kernels are not shown: {' and '.join(missing)} not installed.")
        return DONE if right else FOUND
    sys.stdout.flush()
    # One thread: BLAS on matrices this small loses more to waking threads than it gains.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tmm_core.tools.demo", "--interpreted"]
    child = subprocess.run(command, env=environment, check=False)
    return DONE if right and child.returncode == DONE else FOUND


def interpreted() -> int:
    """Every kernel that can, run and checked under Triton's interpreter; then tuned."""
    if not interpreting():
        note("--interpreted needs TRITON_INTERPRET=1")
        return FOUND
    case, device = INTERPRETED_CASE, torch.device("cpu")
    title(f"The Triton kernels, interpreted: {case}")
    with torch.no_grad():
        call = case.call(device)
        limit = verify.tolerance(call.problem())
        assert call.bias is not None
        exact = F.silu(F.linear(call.a.double(), call.b.mT.double(), call.bias.double()))
        wrong = 0
        able = tmm_core.explain(call.a, call.b, **call.keywords).able
        for kernel in able:
            started = time.perf_counter()
            y = call.matmul(kernel=kernel)
            seconds = time.perf_counter() - started
            error = verify.error(y, exact)
            ok = error <= limit
            wrong += not ok
            verdict = "right" if ok else "WRONG"
            print(f"{kernel:<24}{verdict}, error {error:.1e}   {seconds * 1e3:7.1f} ms")

        title("Tuning among them (interpreted times mean nothing; the verification does)")
        [record] = tmm_core.tune(call.problem())
        done = f"{len(record.candidates)} candidates in {record.tuning_seconds:.1f} s"
        print(f"{done}, made {record.created}\n")
        print(tmm_core.explain(call.a, call.b, **call.keywords))

    title("What is on disk: tmm-cache show")
    sys.stdout.flush()
    from tmm_cache.cli import main as tmm_cache

    status = tmm_cache(["show"])
    return DONE if not wrong and status == DONE else FOUND


def on_gpu() -> int:
    """Eight problems, tuned if they are not on record and timed against torch."""
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}: torch and tmm side by side, L2-cold, medians")
    return compare(GPU_CASES, device)


def compare(cases: Sequence[Case], device: torch.device) -> int:
    """Print a table of what was chosen and how long it takes; 1 where something failed or
    was wrong."""
    tasks = [suites.Task("demo", case) for case in cases]
    options = runner.Options(
        tune_budget=GPU_BUDGET, seconds=0.2, deadline=time.monotonic() + GPU_SECONDS
    )
    documents = list(_told(runner.run(tasks, device, options)))
    measured = [document for document in documents if "times" in document]
    print_table(
        ("problem", "kernel", "config", "tmm µs", "torch µs", "torch / tmm", "error"),
        [_row(document) for document in measured],
        ("tmm µs", "torch µs", "torch / tmm", "error"),
    )
    if left := len(tasks) - len(documents):
        print(f"{left} problems were left out: {GPU_SECONDS:.0f} s are over. Run it again.")
    print("torch is eager code as users write it: torch.matmul, F.linear, then the activation.")
    failed = len(documents) - len(measured)
    wrong = sum(not document["error"] <= document["tolerance"] for document in measured)
    return FOUND if failed or wrong else DONE


def _told(documents: Iterator[Document]) -> Iterator[Document]:
    for document in documents:
        note(report.line(document))
        yield document


def _row(document: Document) -> tuple[str, ...]:
    times = document["times"]
    return (
        report.title(document),
        document["kernel"],
        " ".join(f"{name}={value}" for name, value in document["config"].items()),
        report.microseconds(times[runner.TMM]["median_us"]),
        report.microseconds(times[runner.TORCH]["median_us"]),
        report.times(document["ratio"]),
        f"{document['error']:.1e}",
    )


def title(text: str) -> None:
    """A heading."""
    print(f"\n== {text}\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
