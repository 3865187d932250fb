"""The environment of a measurement: versions, GPU, clocks, source."""

from __future__ import annotations

import datetime
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tmm_core
from tmm_core.spec.device import fingerprint

#: Fields queried from nvidia-smi if torch cannot query NVML (torch does not require its Python
#: binding).
_QUERY = {"sm_mhz": "clocks.sm", "power_w": "power.draw", "celsius": "temperature.gpu"}


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


class Clocks:
    """SM clock (MHz), power (W) and temperature (°C) of a device; read only, never set."""

    #: Readings stop after one that takes more seconds than this: there is one per problem.
    PATIENCE = 1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._given_up = device.type != "cuda"

    def read(self) -> dict[str, float] | None:
        """The current values; None if they are unavailable or too slow to read."""
        if self._given_up:
            return None
        started = time.monotonic()
        values = self._read()
        self._given_up = values is None or time.monotonic() - started > self.PATIENCE
        return values

    def _read(self) -> dict[str, float] | None:
        try:
            return {
                "sm_mhz": float(torch.cuda.clock_rate(self._device)),
                "power_w": torch.cuda.power_draw(self._device) / 1e3,
                "celsius": float(torch.cuda.temperature(self._device)),
            }
        except Exception:  # no binding, no permission, another vendor: use nvidia-smi instead
            values = _nvidia_smi(self._device, tuple(_QUERY.values()))
        try:
            return dict(zip(_QUERY, map(float, values or ()), strict=True))
        except ValueError:  # nothing, or "[N/A]"
            return None


def driver_version(device: torch.device) -> str | None:
    """The driver's version; None if nvidia-smi does not report it."""
    values = _nvidia_smi(device, ("driver_version",)) if device.type == "cuda" else None
    return values[0] if values else None


def _nvidia_smi(device: torch.device, fields: tuple[str, ...]) -> list[str] | None:
    # By UUID: torch's and nvidia-smi's indices differ under CUDA_VISIBLE_DEVICES.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    query = f"--query-gpu={','.join(fields)}"
    command = ["nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits"]
    text = _output(command)
    return [value.strip() for value in text.split(",")] if text else None


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
