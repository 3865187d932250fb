"""Functions of test modules called in a process in which Triton compiles.

Without a GPU the tests' own process interprets. Another process takes seconds to import torch and
Triton. So each worker of pytest-xdist starts one for all its tests, and a kernel that several tests
need is compiled once in a run.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any


class Uninterpreted:
    """Calls functions in a process of its own, which starts with the first call.

    Args:
        folder: The folder of the process's caches. Processes may share it.
        amd: Whether torch there reports a build for AMD's GPUs, so that device functions of
            epilogues are the ones for AMD.
    """

    def __init__(self, folder: Path, amd: bool = False) -> None:
        self._folder, self._amd = folder, amd
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``function(*arguments)`` there, or raise its exception. The function
        must be defined at the top of a module."""
        if self._pool is None:
            from tmm_core.spec.epilogue import Epilogue

            ForkingPickler.register(Epilogue, _named)
            self._pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), _begin, (self._folder, self._amd)
            )
        try:
            return self._pool.submit(function, *arguments).result(timeout=900)
        except BrokenProcessPool:  # fails this test, not the following ones
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _begin(folder: Path, amd: bool) -> None:
    """Before torch and Triton are imported."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in [name for name in os.environ if name.startswith(("TMM_", "TRITON_"))]:
        del os.environ[name]
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TMM_CACHE_DIR"] = str(folder / "tmm")
    if amd:
        import torch

        torch.version.hip = "6.4"  # type: ignore[misc]


def _named(epilogue: Any) -> tuple[Any, ...]:
    """Pickle a built-in epilogue by its name: its functions are not attributes of a module."""
    return _epilogue, (str(dataclasses.replace(epilogue, outputs=())), epilogue.outputs)


def _epilogue(name: str, outputs: tuple[Any, ...]) -> Any:
    from tmm_core.epilogues import parse

    # The stage ``quantize`` leaves the result as it is, and consists of its outputs only.
    return dataclasses.replace(parse(name.partition("+quantize")[0]), outputs=outputs)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
