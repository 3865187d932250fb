"""Finds GPUs that need not be present: GPUs that have records, and others by their data sheets.
``tmm explain --gpu H200`` answers from a GPU's records and from models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tmm_base import UsageError
from tmm_cache import CacheStore, Summary

from tmm_core.spec.device import DeviceFingerprint, version_of

#: Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide,
#: technical specifications).
_SHARED = {
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10,
    (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10,
}  # fmt: skip
#: Name, capability, SMs and MB of L2, by NVIDIA's data sheets.
_SPECIFIED = (
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40),
    ("NVIDIA L40S", (8, 9), 142, 96),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 72),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 50),
    ("NVIDIA H200", (9, 0), 132, 50),
    ("NVIDIA B200", (10, 0), 148, 126),
)


def find(store: CacheStore, text: str) -> DeviceFingerprint:
    """The GPU whose name contains ``text``, ignoring case. If it has records of several
    environments, its environment is the one with the most records.

    Raises:
        UsageError: No GPU matches, or more than one.
    """
    counts = Counter(filter(None, map(_device, store.problems())))
    for name, capability, sms, l2 in _SPECIFIED:
        if not any(device.name == name for device in counts):
            # With the software that is installed here.
            device = DeviceFingerprint(
                type="cuda",
                name=name,
                capability=capability,
                sm_count=sms,
                shared_memory=_SHARED[capability],
                l2=l2 << 20,
                torch=torch.__version__,
                triton=version_of("triton"),
                cuda=torch.version.cuda or "",
            )
            counts[device] = 0
    found = {device: n for device, n in counts.items() if text.lower() in device.name.lower()}
    names = sorted({device.name for device in found})
    if len(names) != 1:
        known = ", ".join(sorted({device.name for device in counts}))
        what = "several" if names else "none"
        raise UsageError(f"--gpu {text}: the name of {what} of these: {known}")
    return max(found, key=lambda device: found[device])


def _device(summary: Summary[Any]) -> DeviceFingerprint | None:
    """The GPU that a record was measured on; None if its environment is not one of tmm's GPUs."""
    document: Any = summary.environment or {}
    known = [l2 for name, _, _, l2 in _SPECIFIED if name == document.get("name")]
    try:
        capability = tuple(document["capability"])
        found = DeviceFingerprint(
            **{**document, "capability": capability},
            shared_memory=_SHARED.get(capability, 48 << 10),
            l2=known[0] << 20 if known else 0,
        )
    except (KeyError, TypeError):
        return None
    return found if found.type == "cuda" else None
