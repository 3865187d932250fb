"""The lines of ``tmm doctor`` on the toolchain: its parts, its fingerprint, and kernels that could
not be tried because some part failed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from tmm_core import dispatch
from tmm_core.spec import toolchain
from tmm_core.spec.device import fingerprint
from tmm_core.tuning.findings import CAUSES
from tmm_core.tuning.untried import Obstacle

#: Seconds that a program may take to print its version.
_PATIENCE = 20.0


class Finding(NamedTuple):
    """One line: ``ok``, a ``note`` worth knowing, or a ``problem``."""

    about: str
    state: Literal["ok", "note", "problem"]
    text: str
    #: Advice on a problem.
    advice: str = ""


def parts(device: torch.device) -> Iterator[Finding]:
    """Yield the parts that Triton needs to compile and launch on ``device``; none for a CPU."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    yield _compiler()
    if torch.version.hip is None:
        yield _ptxas()
    for name, folder in toolchain.folders().items():
        state = toolchain.usable(folder)
        if state != "yes":
            text = f"{name} folder {folder} is {state}" if folder else f"{name} folder is {state}"
            advice = {"full": "free some space, or ", "not writable": "make it writable, or "}
            yield Finding("toolchain", "problem", text, f"{advice.get(state, '')}set another")
    yield Finding("toolchain", "ok", f"fingerprint {toolchain.fingerprint()}")


def untried(device: torch.device) -> Iterator[Finding]:
    """Yield the kernels that the environment left untried on ``device``, with the first error."""
    notes = dispatch.default_dispatcher().untried.of_device(fingerprint(device))
    broken = [why for note in notes for why in note.kernels.values() if why.cause != "budget"]
    late = sum(all(why.cause == "budget" for why in n.kernels.values()) for n in notes)
    if broken:
        first = min(broken, key=lambda why: CAUSES.index(why.cause))
        names = {name for n in notes for (name, _), w in n.kernels.items() if w.cause != "budget"}
        text = (
            f"{len(names)} kernels are untried for {len(notes) - late} problems: "
            f"{' '.join(first.reason.split())}"
        )
        yield Finding("untried", "problem", text, _advice(first))
    if late:
        text = f"the tuning budget ended before some kernels of {late} problems"
        yield Finding("untried", "note", text, "tmm tune them with a larger --budget")


def _advice(first: Obstacle) -> str:
    if first.cause == "hung":
        return "report it to the kernel's author"
    again = "repair it; calls then try them again, and so does tmm tune"
    return again if first.cause != "passing" else "free memory or space, then tmm tune"


def _compiler() -> Finding:
    """The C compiler and header, with which Triton builds its launcher at the first launch."""
    compiler, lacking = toolchain.c_compiler(), toolchain.lacking()
    if lacking is None:
        return Finding("toolchain", "ok", f"{compiler}, {toolchain.python_header()}")
    text = f"{lacking}: Triton kernels decline, unless Triton's cache holds its launcher"
    advice = "install gcc, or set CC" if compiler is None else "install python3-dev"
    return Finding("toolchain", "problem", text, advice)


def _ptxas() -> Finding:
    """The assembler, which has to run."""
    path = toolchain.ptxas()
    if path is None:
        text = "no ptxas: Triton kernels do not compile, unless Triton's cache holds them"
        return Finding("toolchain", "problem", text, "reinstall triton, or set TRITON_PTXAS_PATH")
    given = os.environ.get("TRITON_PTXAS_PATH")
    try:
        ran = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        text = f"{path} does not run: {error}"
        advice = "reinstall triton, or correct TRITON_PTXAS_PATH"
        return Finding("toolchain", "problem", text, advice)
    if given and not os.path.exists(given):
        text = f"TRITON_PTXAS_PATH={given} is not there; Triton uses {path}"
        return Finding("toolchain", "problem", text, "correct or unset it")
    lines = [line for line in ran.stdout.splitlines() if "release" in line]
    version = lines[0].strip() if lines else "of unknown version"
    return Finding("toolchain", "ok", f"{path}, {version}")
