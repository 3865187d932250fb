"""``make demo``: a matmul, the kernel that ran, and why.

On a GPU it is ``tmm bench --quick``. On a CPU BLAS answers everything, so the Triton kernels run
under Triton's interpreter, in a separate process because Triton reads ``TRITON_INTERPRET`` when it
is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from tmm_base.console import DONE, FOUND, print_table, warnings_as_notes
from tmm_cache import CacheWarning
from tmm_cache import cli as tmm_cache

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench.case import Case
from tmm_core.errors import TmmWarning
from tmm_core.tools import cli as tmm
from tmm_core.verify import compare

#: A tail in every dimension, and few programs: each costs the interpreter some 7 ms.
INTERPRETED_CASE = Case(m=50, n=72, k=40, layout="nt", epilogue="silu", bias=True)
#: The argument of the process under the interpreter.
INTERPRETED = "interpreted"


def main() -> int:
    """Run the demo; returns 1 if a result was wrong, or a problem failed."""
    with temporary_records(), warnings_as_notes(TmmWarning, CacheWarning):
        print(f"tmm {tmm_core.__version__}, torch {torch.__version__}")
        return on_gpu() if torch.cuda.is_available() else on_cpu()


@contextlib.contextmanager
def temporary_records() -> Iterator[None]:
    """A context with an empty cache folder: hurried and interpreted timings are kept out of the
    user's records, and nothing is left behind."""
    before = os.environ.get("TMM_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="tmm-demo-") as folder:
        os.environ["TMM_CACHE_DIR"] = folder
        dispatch.default_dispatcher.cache_clear()
        try:
            yield
        finally:
            dispatch.default_dispatcher.cache_clear()
            if before is None:
                del os.environ["TMM_CACHE_DIR"]
            else:
                os.environ["TMM_CACHE_DIR"] = before


def on_cpu() -> int:
    """Show a fused call answered by BLAS, then the kernels under the interpreter."""
    x, w = torch.randn(256, 512), torch.randn(512, 384)
    y = tmm_core.matmul(x, w, epilogue="silu")
    eager = F.silu(x @ w)
    difference = float((y - eager).abs().max())
    chosen = tmm_core.explain(x, w, epilogue="silu")
    print(
        "\ny = tmm_core.matmul(x, w, epilogue='silu')      x [256, 512], w [512, 384], on the CPU"
    )
    print(f"answered by {chosen.kernel}; largest difference to F.silu(x @ w): {difference:.1e}")
    right = compare.error(y, eager) <= compare.TOLERANCE[y.dtype]
    missing = [name for name in ("triton", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"\nThe Triton kernels are not shown: {' and '.join(missing)} not installed.")
        return DONE if right else FOUND
    sys.stdout.flush()
    # One thread: for matrices this small, waking threads costs BLAS more than it gains.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, __file__, INTERPRETED], env=environment, check=False)
    return DONE if right and child.returncode == DONE else FOUND


def interpreted() -> int:
    """Tune, run and check every capable kernel under Triton's interpreter."""
    case, device = INTERPRETED_CASE, torch.device("cpu")
    print(
        f"\nThe Triton kernels in Triton's interpreter, tuned on {case}.\n"
        "The record, as `tmm-cache show` prints it:",
        flush=True,
    )
    with warnings_as_notes(TmmWarning, CacheWarning), torch.no_grad():
        call = case.call(device)
        limit = compare.tolerance(call.problem())
        assert call.bias is not None
        exact = F.silu(F.linear(call.a.double(), call.b.mT.double(), call.bias.double()))
        [record] = tmm_core.tune(call.problem())
        status = tmm_cache.main(["show"])

        rows, wrong = [], 0
        for kernel in tmm_core.explain(call.a, call.b, **call.keywords).able:
            started = time.perf_counter()
            with settings.override(verify=False):  # it is compared below
                y = call.matmul(kernel=kernel)
            seconds = time.perf_counter() - started
            error = compare.error(y, exact)
            wrong += error > limit
            tried = [c for c in record.candidates if c.kernel == kernel]
            rows.append(
                (
                    kernel,
                    "right" if error <= limit else "WRONG",
                    f"{error:.1e}",
                    f"{seconds * 1e3:.1f}",
                    f"{sum(c.status in ('ok', 'slow') for c in tried)} of {len(tried)}",
                    "chosen" if kernel == record.best.kernel else "",
                )
            )
    spent = f"{len(record.candidates)} candidates in {record.tuning_seconds:.1f} s"
    print(f"\n{spent}. The interpreter's times say nothing about a GPU; the errors hold there.")
    numbers = ("error", "ms", "configs verified")
    print_table(("kernel", "answer", *numbers, ""), rows, numbers)
    return DONE if not wrong and status == DONE else FOUND


def on_gpu() -> int:
    """Compare tmm with torch's eager code in two minutes, tuning what has no record."""
    return tmm.main(["bench", "--quick"])


if __name__ == "__main__":
    raise SystemExit(interpreted() if INTERPRETED in sys.argv else main())
