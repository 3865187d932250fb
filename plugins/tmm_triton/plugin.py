"""Registers the Triton kernels, and a placeholder with the reason for each that cannot be
imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from tmm_core import Config, Kernel, Launcher, Problem, Supports, hookimpl, reraise

#: Module and class of each kernel.
KERNELS = {
    "triton.naive": ("naive", "Naive"),
    "triton.grouped": ("tiled", "Grouped"),
    "triton.split_k": ("split_k", "SplitK"),
    "triton.skinny": ("skinny", "Skinny"),
    "triton.streaming": ("streaming", "Streaming"),
    "triton.mixed_input": ("packed.mixed_input", "MixedInput"),
    "triton.fused_epilogue": ("tiled", "FusedEpilogue"),
    "triton.persistent": ("persistent", "Persistent"),
    "triton.warp_specialized": ("hopper.warp_specialized", "WarpSpecialized"),
    "triton.realigned": ("realigned", "Realigned"),
    "triton.ragged": ("ragged", "Ragged"),
    "triton.gathered": ("gathered", "Gathered"),
    "triton.gathered_mixed_input": ("gathered", "GatheredMixedInput"),
}


class Missing(Kernel[Config]):
    """A placeholder for a kernel that cannot be imported. It declines every problem with the
    reason."""

    version = "0"
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
def tmm_kernels() -> list[Kernel[Any]]:
    return [load(name) for name in KERNELS]


def load(name: str) -> Kernel[Any]:
    """Return the kernel of :data:`KERNELS` with that name, or a placeholder that says why it is
    missing."""
    module, class_name = KERNELS[name]
    if importlib.util.find_spec("triton") is None:
        return Missing(name, "Triton is not installed")
    try:
        kernel: Kernel[Any] = getattr(importlib.import_module(f"tmm_triton.{module}"), class_name)()
    except (ImportError, AttributeError, TypeError) as error:
        # Gluon is experimental: if Triton lacks a feature, only the kernel that uses it is lost.
        reraise(error)
        return Missing(name, f"this Triton does not have what it needs: {error}")
    return kernel
