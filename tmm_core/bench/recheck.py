"""Checks on this machine that records shipped in packages are correct and still ahead of BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tmm_cache import CacheStore, TuningRecord, shipped_layers

from tmm_core import dispatch
from tmm_core.bench.results import Document
from tmm_core.dispatch import ragged_reference, random_inputs, rotation, verify
from tmm_core.dispatch.compilers import compiling_threads
from tmm_core.dispatch.timing import GraphTimer, HostTimer, Run, timer_for
from tmm_core.launch import warm
from tmm_core.launch.beside import delivering
from tmm_core.spec.asking import read_config
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.spec.kernel import BASELINE, Candidate, Kernel, Launcher
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem

#: Below this ratio to BLAS a winner counts as slower: two series of one short kernel differ by as
#: much.
SLOWER = 0.98
ROUNDS = 11

#: Statuses that fail the check. The dispatcher ignores stale records, and measures them again.
FAULTS = ("wrong", "slower", "failed")


def shipped(device: torch.device) -> Iterator[Document]:
    """A document for each shipped record of this GPU and these versions: ``status`` is ``"ok"``,
    ``"slower"`` (than BLAS), ``"wrong"``, ``"failed"``, or ``"stale"`` if the winner's kernel has
    changed since."""
    timer = timer_for(device)
    records = list(_records(fingerprint(device)))
    # All are compiled before any is timed: a concurrent compiler would delay launches.
    with ThreadPoolExecutor(compiling_threads()) as pool:
        found = [pool.submit(compiled, record, device) for record in records]
    for record, winner in zip(records, found, strict=True):
        yield _checked(record, winner, device, timer)


def current(device: DeviceFingerprint) -> tuple[int, int]:
    """The number of shipped records for this GPU and these versions, and how many of them match
    the current kernels."""
    records = list(_records(device))
    return len(records), sum(_kernel(record) is not None for record in records)


def _records(device: DeviceFingerprint) -> Iterator[TuningRecord]:
    if layers := shipped_layers():
        for entry in CacheStore(layers[0], layers[1:]).entries(device.gpu):
            if entry.environment == device.environment and not entry.record.is_hint:
                yield entry.record


def _kernel(record: TuningRecord) -> Kernel[Any] | None:
    """The winner's kernel, if it is unchanged since it was measured."""
    best = record.best
    for registered in dispatch.dispatcher().registry.kernels():
        kernel = registered.kernel
        if (kernel.name, kernel.version) == (best.kernel, best.version):
            return kernel
    return None


@dataclass(frozen=True)
class Winner:
    """A winner on record, compiled for its problem."""

    problem: Problem
    candidate: Candidate
    launcher: Launcher

    @property
    def is_baseline(self) -> bool:
        return self.candidate.kernel.name == BASELINE


def compiled(record: TuningRecord, device: torch.device) -> Winner | None:
    """The record's winner, compiled; None if its kernel has changed since."""
    kernel = _kernel(record)
    if kernel is None:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread starts on device 0
    problem = warm.recall(record.problem, device)
    candidate = Candidate(kernel, read_config(kernel, record.best.config))
    return Winner(problem, candidate, kernel.bind(problem, candidate.config))


def _checked(
    record: TuningRecord,
    winner: Future[Winner | None],
    device: torch.device,
    timer: GraphTimer | HostTimer,
) -> Document:
    best = record.best
    document: Document = {
        "problem": dict(record.problem),
        "kernel": best.kernel,
        "config": dict(best.config),
    }
    try:
        found = winner.result()
        if found is None:
            return document | {"status": "stale"}
        with torch.no_grad(), precision(found.problem.tf32):
            return document | _measured(found, device, timer)
    except Exception as error:  # from a compiler or a launch: affects this record only
        return document | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(found: Winner, device: torch.device, timer: GraphTimer | HostTimer) -> Document:
    problem, launcher = found.problem, found.launcher
    inputs = random_inputs.make(problem, device)
    blas = dispatch.dispatcher().registry.kernel(BASELINE)
    epilogue, shape = problem.epilogue, inputs.out.shape
    baseline = delivering(epilogue, blas.bind(problem, blas.default_config(problem)), shape)
    launcher = delivering(epilogue, launcher, shape)
    verify.poison(inputs.out)
    inputs.launch(launcher, inputs.out)
    error = verify.error(inputs.out, ragged_reference.whole(problem, inputs))
    document: Document = {"title": str(problem), "error": error}
    # BLAS's own error is not a fault: others are compared with it.
    if not error <= verify.tolerance(problem) and not found.is_baseline:
        return document | {"status": "wrong"}
    calls = rotation.rotated(inputs, problem)
    runs: list[Run] = [
        lambda copy: calls[copy].launch(baseline, None),
        lambda copy: calls[copy].launch(launcher, None),
    ]
    theirs, mine = map(median, timer.measure(runs, ROUNDS, copies=len(calls)))
    if theirs / mine < SLOWER:  # a single measurement may be noise
        theirs, mine = map(median, timer.measure(runs, 3 * ROUNDS, copies=len(calls)))
    timer.release()
    return document | {
        "blas_us": round(theirs, 3),
        "us": round(mine, 3),
        "ratio": theirs / mine,
        "status": "ok" if found.is_baseline or theirs / mine >= SLOWER else "slower",
    }
