"""Records and child processes for the cache's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import tmm_cache
from msgspec.structs import replace
from tmm_cache import CacheWarning, CandidateResult, TuningRecord

GPU = "nvidia-h200-sm90-132sm"
ENVIRONMENT = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0"}
OLDER_ENVIRONMENT = {**ENVIRONMENT, "torch": "2.12.0"}


def problem(
    m: int = 128,
    n: int = 4096,
    k: int = 512,
    dtype: str = "bfloat16",
    epilogue: str = "silu",
    batch: int = 1,
) -> dict[str, Any]:
    return {
        "m": m,
        "n": n,
        "k": k,
        "batch": batch,
        "a": {"dtype": dtype, "layout": "row", "aligned": True},
        "b": {"dtype": dtype, "layout": "column", "aligned": True},
        "out": {"dtype": dtype, "layout": "row", "aligned": True},
        "epilogue": epilogue,
    }


BLAS = CandidateResult("blas", "b1", {}, "ok", (20.0, 22.0, 21.0))
SPLIT_K = CandidateResult(
    "triton.split_k",
    "s1",
    {"BLOCK_M": 64, "SPLIT_K": 4, "order": "row", "share": 2.5, "none": None, "tma": True},
    "ok",
    (10.0, 14.0, 12.0, 11.0),
    error=0.0009,
    tolerance=0.01,
    workspace_bytes=4096,
    batch_invariant=True,
)
SLOW = CandidateResult("triton.naive", "n1", {"BLOCK_M": 16}, "slow", (90.0,))
WRONG = CandidateResult("triton.atomic", "a1", {}, "wrong", deterministic=False, error=3.5)
FAILED = CandidateResult("triton.big", "g1", {}, "failed", reason="out of shared memory [red]")


def record(
    instance: dict[str, Any] | None = None, *, mark: str | None = FAILED.reason, **changes: Any
) -> TuningRecord:
    """A record; `mark` distinguishes it from others of the same problem."""
    plain = TuningRecord(
        problem=problem() if instance is None else instance,
        winner=1,
        candidates=(BLAS, SPLIT_K, SLOW, WRONG, replace(FAILED, reason=mark)),
        created="2026-01-31T12:00:00Z",
        tuning_seconds=3.25,
    )
    return replace(plain, **changes)


def mark_of(found: TuningRecord) -> str | None:
    """The `mark` that :func:`record` gave it."""
    return found.candidates[4].reason


def made(ago: timedelta) -> str:
    """A creation time that long ago."""
    return (datetime.now(timezone.utc) - ago).isoformat(timespec="seconds")


@contextmanager
def warned(match: str, times: int = 1) -> Iterator[pytest.WarningsRecorder]:
    """The code inside causes exactly this number of cache warnings, and one of them matches."""
    with pytest.warns(CacheWarning, match=match) as caught:
        yield caught
    assert [warning.category for warning in caught] == [CacheWarning] * times


def child(*arguments: str, cache_dir: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """A Python process that can import the package and these builders."""
    here = Path(__file__).parent
    package = Path(tmm_cache.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(here)])}
    if cache_dir is not None:
        environ["TMM_CACHE_DIR"] = str(cache_dir)
    environ.pop("PYTHONUNBUFFERED", None)  # it hides what goes wrong at the last flush
    environ.update(options.pop("environ", {}))
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environ,
        text=True,
        stdin=options.pop("stdin", subprocess.PIPE),
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        **options,
    )


#: Replaced functions of `os` are not called.
BOUND_AT_IMPORT = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="pathlib of Python 3.10 keeps the functions of its import"
)
