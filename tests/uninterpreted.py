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
        folder: Its caches'; processes may share it.
        amd: Whether its torch says that it is built for AMD's GPUs, which device functions of
            epilogues are written for.
    """

    def __init__(self, folder: Path, amd: bool = False) -> None:
        self._folder, self._amd = folder, amd
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return, or raise, what ``function(*arguments)`` does there. It is a function of a
        module."""
        if self._pool is None:
            from tmm_core.spec.epilogue import Epilogue

            ForkingPickler.register(Epilogue, _named)
            self._pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), _begin, (self._folder, self._amd)
            )
        try:
            return self._pool.submit(function, *arguments).result(timeout=900)
        except BrokenProcessPool:  # fails this test, not those that follow
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
    """How to pickle a built-in epilogue, whose functions have no name of their own."""
    return _epilogue, (str(dataclasses.replace(epilogue, outputs=())), epilogue.outputs)


def _epilogue(name: str, outputs: tuple[Any, ...]) -> Any:
    from tmm_core.epilogues import parse

    # The stage ``quantize`` changes nothing: it is its outputs.
    return dataclasses.replace(parse(name.partition("+quantize")[0]), outputs=outputs)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
