"""The plugin: registers the Triton kernels, or stand-ins that tell why there are none."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tmm_core import Config, Deferred, Kernel, Launcher, Problem, Supports, hookimpl

#: Module and class of each kernel.
KERNELS = {
    "triton.naive": ("naive", "Naive"),
    "triton.grouped": ("tiled", "Grouped"),
    "triton.split_k": ("split_k", "SplitK"),
    "triton.skinny": ("skinny", "Skinny"),
    "triton.fused_epilogue": ("tiled", "FusedEpilogue"),
    "triton.persistent": ("persistent", "Persistent"),
    "triton.warp_specialized": ("hopper.warp_specialized", "WarpSpecialized"),
    "triton.realigned": ("realigned", "Realigned"),
    "triton.ragged": ("ragged", "Ragged"),
    "triton.gathered": ("gathered", "Gathered"),
}


class Missing(Kernel[Config]):
    """A stand-in for a kernel that cannot be imported; declines every problem with the reason."""

    supports = Supports.everything()

    def __init__(self, name: str, reason: str) -> None:
        self.name = name  # type: ignore[misc]  # a kernel's name is its class's
        self.reason = reason

    def declines(self, problem: Problem) -> Iterable[str]:
        yield self.reason

    def configs(self, problem: Problem) -> Iterable[Config]:
        return ()

    def default_config(self, problem: Problem) -> Config:
        raise RuntimeError(self.reason)

    def bind(self, problem: Problem, config: Config) -> Launcher:
        raise RuntimeError(self.reason)


@hookimpl
def tmm_kernels() -> list[Deferred]:
    return [
        Deferred(name, functools.partial(load, name), _files, _circumstances) for name in KERNELS
    ]


@functools.cache
def _files() -> tuple[Path, ...]:
    """This package's files, since its modules share code, and a file that changes with Triton."""
    triton = importlib.util.find_spec("triton")
    found = [Path(triton.origin)] if triton is not None and triton.origin else []
    return (*found, *Path(__file__).parent.glob("*.py"))


@functools.cache
def _circumstances() -> list[Any]:
    """The state that decides whether Triton can build its launcher here, and how it runs."""
    compilers = [shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")]
    version = "python{}.{}".format(*sys.version_info)
    header = Path(sys.base_prefix, "include", version, "Python.h").exists()
    return [compilers, header, {k: v for k, v in os.environ.items() if k.startswith("TRITON_")}]


def load(name: str) -> Kernel[Any]:
    """The kernel of :data:`KERNELS` with that name, or a stand-in that tells why there is none."""
    module, class_name = KERNELS[name]
    if importlib.util.find_spec("triton") is None:
        return Missing(name, "Triton is not installed")
    try:
        kernel: Kernel[Any] = getattr(importlib.import_module(f"tmm_triton.{module}"), class_name)()
    except ImportError as error:
        # Gluon is experimental: if Triton lacks a feature, only the kernel that uses it is lost.
        return Missing(name, f"this Triton does not have what it needs: {error}")
    return kernel
