"""Identifies the GPU and the software, which determine the folder of a tuning record."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tmm_base.guards import suppress

if TYPE_CHECKING:
    from tmm_cache import JSON


@dataclass(frozen=True, slots=True)
class DeviceFingerprint:
    """A device as kernels and the cache see it.

    ``shared_memory`` and ``l2`` are in bytes; ``shared_memory`` is the opt-in maximum per block.
    Software versions are included because they change which kernel wins.
    """

    type: str
    name: str
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 0
    shared_memory: int = 0
    l2: int = 0
    torch: str = ""
    triton: str = ""
    cuda: str = ""
    cublas: str = ""
    #: Triton kernels run in its interpreter (``TRITON_INTERPRET=1``), on the CPU.
    interpreted: bool = False
    #: The compiler's name of an AMD GPU, e.g. ``gfx942``; empty for others.
    arch: str = ""

    @property
    def sm(self) -> int:
        """Compute capability as a number, 90 for ``sm_90``."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def nvidia(self) -> bool:
        """Whether it is a GPU by NVIDIA. Torch calls AMD's GPUs "cuda" too, and their capabilities
        mean something else."""
        return self.type == "cuda" and not self.cuda.startswith("hip")

    @property
    def gpu(self) -> str:
        """The folder name of this GPU, e.g. ``nvidia-h200-sm90-132``."""
        from tmm_cache import slug  # not needed for importing tmm_core

        parts = [self.name]
        if self.type == "cuda":
            parts += [f"sm{self.sm}", str(self.sm_count)]
        if self.interpreted:
            parts.append("interpreted")
        return slug("-".join(parts))

    @property
    def environment(self) -> dict[str, JSON]:
        """The document whose hash names the environment folder."""
        return {name: getattr(self, name) for name in _ENVIRONMENT} | {
            "capability": list(self.capability)
        }


_ENVIRONMENT = ("type", "name", "capability", "sm_count", "torch", "triton", "cuda", "cublas",
                "interpreted")  # fmt: skip


def interpreting() -> bool:
    """Whether Triton interprets kernels (parsed like Triton does)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed, or if its
    metadata states none or is damaged."""
    with suppress(Exception):
        return importlib.metadata.version(distribution) or ""
    return ""


def triton_version() -> str:
    """Return the version of Triton; empty if it is not installed."""
    return version_of("triton") or version_of("pytorch-triton-rocm")


def _cublas_version() -> str:
    """Return the cuBLAS wheel's version, or torch's CUDA version for a system cuBLAS."""
    for distribution in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        if version := version_of(distribution):
            return version
    return f"torch-cuda-{torch.version.cuda}"


@functools.cache
def fingerprint(device: torch.device) -> DeviceFingerprint:
    """Return the fingerprint of ``device`` (one with an index, or a CPU); cached per device."""
    triton = triton_version()
    interpreted = interpreting() and importlib.util.find_spec("triton") is not None
    if device.type != "cuda":
        return DeviceFingerprint(
            type=device.type,
            name=device.type,
            torch=torch.__version__,
            triton=triton,
            interpreted=interpreted,
        )
    properties = torch.cuda.get_device_properties(device)
    return DeviceFingerprint(
        type="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 49152),
        l2=getattr(properties, "L2_cache_size", 0),
        torch=torch.__version__,
        triton=triton,
        cuda=torch.version.cuda or f"hip-{torch.version.hip}",
        cublas=_cublas_version(),
        interpreted=interpreted,
        arch=properties.gcnArchName.partition(":")[0] if torch.version.hip else "",
    )


def current_device(of: DeviceFingerprint) -> torch.device:
    """Return the current torch device of a fingerprint's type; fingerprints have no index."""
    if of.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(of.type)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that can be allocated, including unused memory that torch's
    allocator caches."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
