"""``tmm doctor``: checks that this machine is set up for tmm, and if not, says what to do.

Every line is a fact; a problem comes with advice.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tmm_base import console
from tmm_base.console import DONE, FOUND, print_json
from tmm_cache.keys import digest
from tmm_cache.ownership import foreign

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench.case import Call, Case
from tmm_core.bench.provenance import driver_version
from tmm_core.dispatch.explanation import alike
from tmm_core.errors import PluginError, SettingsError, error_text, reraise
from tmm_core.registry.query import CheckedKernel
from tmm_core.registry.registry import DISTRIBUTION, Registry
from tmm_core.spec.device import fingerprint, interpreting, triton_version
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.problem import Problem
from tmm_core.tools.commands import doctor_toolchain, variables
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.doctor_toolchain import Finding
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.verify import compare

#: Free space below which it warns that records will soon not be written. A record takes 20 kB.
LEAST_FREE_BYTES = 64 * 2**20

#: Memory for a first launch on the probes below.
LAUNCH_BYTES = 64 * 2**20

#: Problems that each kernel is tried on: sizes that are no multiple of a tile, aligned and not.
PROBES = (
    Case(m=72, n=80, k=96, layout="nt"),
    Case(m=65, n=67, k=63),
)


#: The mark of a line and its colour in a terminal, by the finding's state.
_MARKS = {"ok": (" ", ""), "note": ("-", "33"), "problem": ("!", "1;31")}
_LEGEND = "! a problem, with advice   - a note   no mark: as it should be"


def run(options: argparse.Namespace) -> int:
    device = shared.device(options)
    findings: list[Finding] = []
    if not options.json:
        console.print_paragraph(_LEGEND)
    for finding in _examine(device):
        findings.append(finding)
        if not options.json:
            # Printed at once: if a check ends the process, the findings before it remain.
            mark, colour = _MARKS[finding.state]
            advice = f"; {finding.advice}" if finding.advice else ""
            line = f"{mark} {finding.about:<18}{finding.text}{advice}"
            first, *more = console.paragraph(line, console.width(), hanging=20)
            print("\n".join([_coloured(first[:20], colour) + first[20:], *more]), flush=True)
    if options.json:
        print_json([finding._asdict() for finding in findings])
    return FOUND if any(finding.state == "problem" for finding in findings) else DONE


def _coloured(text: str, colour: str) -> str:
    """``text`` in a colour on a terminal that has some, unless NO_COLOR is set."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    plain = not (colour and terminal) or os.environ.get("NO_COLOR")
    return text if plain else f"\033[{colour}m{text}\033[0m"


def _examine(device: torch.device) -> Iterator[Finding]:
    for look in (_versions, _device, _toolchain, _plugins, _settings, _cache, _kernels):
        try:
            yield from look(device)
        except BaseException as error:  # a failing check must not stop the others
            if isinstance(error, GeneratorExit):
                raise
            reraise(error)
            yield Finding(look.__name__.strip("_"), "problem", error_text(error), "report it")


def _versions(device: torch.device) -> Iterator[Finding]:
    yield Finding("tmm", "ok", f"{tmm_core.__version__} in {Path(tmm_core.__file__).parent}")
    yield Finding("python", "ok", f"{platform.python_version()}, {sys.executable}")
    build = torch.version.cuda or torch.version.hip
    yield Finding("torch", "ok", f"{torch.__version__}, {f'CUDA {build}' if build else 'CPU only'}")
    if triton := triton_version():
        yield Finding("triton", "ok", triton)
    elif device.type == "cuda":
        advice = "pip install 'tmm-core[triton]'"
        yield Finding("triton", "problem", "not installed: only BLAS answers", advice)
    else:
        yield Finding("triton", "note", "not installed, and not needed on a CPU")


def _device(device: torch.device) -> Iterator[Finding]:
    gpu = fingerprint(device)
    if device.type == "cuda":
        driver = driver_version(device) or "of unknown version (no nvidia-smi)"
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        text = (
            f"{gpu.name}, sm_{gpu.sm}, {gpu.sm_count} SMs, {free:.0f} of {total:.0f} GiB free, "
            f"driver {driver}"
        )
        yield Finding("device", "ok", text)
    elif shutil.which("nvidia-smi") and device.type == "cpu":
        why = (
            "torch was built without CUDA"
            if torch.version.cuda is None
            else "torch finds no usable GPU"
        )
        advice = "install a CUDA build of torch, or look at nvidia-smi"
        yield Finding("device", "problem", f"cpu, although nvidia-smi exists: {why}", advice)
    else:
        yield Finding("device", "note", "cpu: BLAS answers everything")
    if interpreting():
        text = "TRITON_INTERPRET is set: Triton kernels are interpreted, thousands of times slower"
        advice = "unset it"
        state: Literal["note", "problem"] = "problem" if device.type == "cuda" else "note"
        yield Finding("interpreter", state, text, advice if state == "problem" else "")


def _toolchain(device: torch.device) -> Iterator[Finding]:
    yield from doctor_toolchain.parts(device)
    yield from doctor_toolchain.untried(device)


def _plugins(device: torch.device) -> Iterator[Finding]:
    registry = dispatch.default_dispatcher().registry
    kernels_of: dict[str, list[str]] = {}
    for kernel in registry.kernels():
        kernels_of.setdefault(_plugin(kernel.source), []).append(kernel.name)
    for source, kernels in kernels_of.items():
        yield Finding("plugin", "ok", f"{source}: {', '.join(kernels)}")
    for fault in registry.faults():
        text = f"{_plugin(fault.source)}: {fault.reason}"
        if fault.intended:
            yield Finding("plugin", "note", text)
        else:
            advice = f"fix or uninstall it, or set TMM_DISABLE_PLUGINS={fault.source.plugin}"
            yield Finding("plugin", "problem", text, advice)


def _plugin(source: object) -> str:
    return str(source).removeprefix("plugin ")


def _settings(device: torch.device) -> Iterator[Finding]:
    registry = dispatch.default_dispatcher().registry
    wrong = False
    for name, text, advice in variables.faults(os.environ, registry):
        wrong |= bool(text)
        if text:
            yield Finding("variable", "problem", text, advice)
        else:
            yield Finding("variable", "ok", f"{name}={os.environ[name]}")
    try:
        settings.current()
    except SettingsError as error:
        if not wrong:
            yield Finding("settings", "problem", str(error), "correct or unset it")


def _cache(device: torch.device) -> Iterator[Finding]:
    store, gpu = dispatch.default_dispatcher().store, fingerprint(device)
    try:
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store.root) as file:
            file.write(b"tmm")
        free = shutil.disk_usage(store.root).free
    except OSError as error:
        reraise(error)
        text = (
            f"{store.root} cannot be written ({error.strerror or error}): each process tunes again"
        )
        yield Finding("cache", "problem", text, "set TMM_CACHE_DIR to a writable folder")
    else:
        size = f"{free / 2**30:.1f} GiB free"
        if free < LEAST_FREE_BYTES:
            advice = "free some space, or move TMM_CACHE_DIR"
            yield Finding("cache", "problem", f"{store.root}: {size}", advice)
        else:
            yield Finding("cache", "ok", f"{store.root}, {size}")
    if (reason := foreign(store.root)) is not None:
        text = f"{store.root} {reason}: records are verified again in each process"
        advice = "chown or chmod it, or set TMM_CACHE_SHARED=1 if all its users are trusted"
        yield Finding("cache", "problem", text, advice)
    for layer in store.layers:
        if os.access(layer, os.R_OK | os.X_OK):
            yield Finding("cache layer", "ok", str(layer))
        else:
            advice = "correct TMM_CACHE_PATH"
            yield Finding("cache layer", "problem", f"{layer} is not a readable folder", advice)
    environment = digest(gpu.environment)
    same = [each.environment_digest == environment for each in store.summaries(gpu.gpu)]
    text = f"{sum(same)} records for {gpu.gpu}"
    if other := len(same) - sum(same):
        text += f", {other} more for other versions (for untuned choices)"
    yield Finding("records", "ok", text)
    missed = [miss for miss in store.misses() if miss.gpu == gpu.gpu]
    if missed:
        text = f"{len(missed)} problems were met while tuning was forbidden"
        yield Finding("misses", "note", text, "tmm tune --misses")


def _kernels(device: torch.device) -> Iterator[Finding]:
    """Compile and launch every kernel, and compare its result with the reference. A third-party
    kernel is first launched in another process, which it may crash."""
    try:
        settings.current()
    except SettingsError:
        yield Finding("kernel", "note", "none was tried: the settings are invalid")
        return
    registry = dispatch.default_dispatcher().registry
    with contextlib.closing(FirstLaunches(device)) as first:
        declining = []
        for kernel in registry.kernels():
            found = _tried(registry, kernel, device, first)
            if isinstance(found, Finding):
                yield found
            else:
                declining.append((kernel.name, found))
    for names, reasons in alike(declining):
        verb = "declines" if len(names) == 1 else "decline"
        yield Finding("kernel", "note", f"{', '.join(names)} {verb}: {'; '.join(reasons)}")


def _tried(
    registry: Registry, kernel: CheckedKernel, device: torch.device, first: FirstLaunches
) -> Finding | list[str]:
    """The finding about a kernel, or its reasons if it declines every probe."""
    foreign = kernel.source.distribution not in ("", DISTRIBUTION)
    advice = f"disable it with TMM_DISABLE={kernel.name}, and report it to {kernel.source}"
    refused: list[list[str]] = []
    for probe in PROBES:
        call = probe.call(device)
        if reasons := registry.reasons_against(kernel, call.problem(), settings.current()):
            refused.append(reasons)
            continue
        fault = _fault(kernel, call.problem(), first) if foreign else None
        if wrong := fault or _wrong(kernel.name, call):
            return Finding("kernel", "problem", f"{kernel.name} on {probe}: {wrong}", advice)
    if kernel.fault is not None:
        return Finding("kernel", "problem", kernel.fault, advice)
    if len(refused) < len(PROBES):
        return Finding("kernel", "ok", f"{kernel.name} runs and is correct")
    return refused[0]


def _fault(kernel: Kernel[Any], problem: Problem, first: FirstLaunches) -> str | None:
    """The fault of a kernel's first launch in another process; None if it has none."""
    try:
        candidate = Candidate(kernel, kernel.default_config(problem))
    except PluginError as error:
        return str(error)
    failure = first.failure(problem, candidate, LAUNCH_BYTES)
    return None if failure is None else str(failure)


def _wrong(kernel: str, call: Call) -> str | None:
    """The fault in the kernel's result for this call; None if it is correct."""
    try:
        # Without first-use verification, which would refuse the kernel instead of reporting the
        # error.
        with torch.no_grad(), settings.override(verify=False):
            error = call.error(kernel=kernel)
    except Exception as fault:
        reraise(fault)
        return error_text(fault)
    limit = compare.tolerance(call.problem())
    return None if error <= limit else f"wrong, error {error:.2g} exceeds {limit:.2g}"
