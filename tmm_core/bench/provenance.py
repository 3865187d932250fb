"""Describes the environment of a measurement: versions, GPU, driver, commit, command line."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tmm_core
from tmm_core.spec.device import fingerprint


def describe(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Versions, device, commit and command line, as JSON."""
    commit, dirty = _commit()
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tmm": tmm_core.__version__,
        "commit": commit,
        "uncommitted_changes": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": fingerprint(device).gpu,
        "environment": fingerprint(device).environment,
        "driver": driver_version(device),
        "command": list(command),
    }


def driver_version(device: torch.device) -> str | None:
    """The driver's version; None if nvidia-smi does not report it."""
    if device.type != "cuda":
        return None
    # torch's and nvidia-smi's indices differ under CUDA_VISIBLE_DEVICES; UUIDs do not.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    query = "--query-gpu=driver_version"
    return _output(["nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader"]) or None


def _commit() -> tuple[str | None, bool | None]:
    """The commit of tmm's checkout, and whether it has uncommitted changes."""
    root = Path(tmm_core.__file__).parent.parent
    if not (root / ".git").exists():
        return None, None
    # Forty digits, also if a tag names the commit.
    form = ("--always", "--exclude=*", "--abbrev=40", "--dirty")
    found = _output(["git", "-C", str(root), "describe", *form])
    return (None, None) if found is None else (found.removesuffix("-dirty"), "-dirty" in found)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
