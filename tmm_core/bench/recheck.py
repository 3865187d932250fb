"""Checks on this machine that the winners on record are correct, and that those shipped in packages
are still ahead of BLAS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tmm_cache import CacheStore, Summary, TuningRecord, shipped_layers

from tmm_core import dispatch, settings
from tmm_core.bench.results import Document
from tmm_core.errors import error_text
from tmm_core.launch import warm
from tmm_core.registry.query import read_config
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.tuning.cold_operands import Copies
from tmm_core.tuning.compile_pool import compiling_threads
from tmm_core.tuning.timing import GraphTimer, HostTimer, normalised, timer_for
from tmm_core.verify.verifier import Verifier

#: Launches on the same inputs: a race that is wrong once in twenty passes with 0.2 %.
REPEATS = 120

#: Below this ratio to BLAS a winner counts as slower: two series of one short kernel differ by as
#: much.
SLOWER = 0.98
ROUNDS = 11

#: Statuses that count as faults. "unknown" could not be checked. Others: "ok"; "blas" needs no
#: verification; "stale" is for a kernel that has changed since and is no longer chosen.
FAULTS = ("wrong", "failed", "unknown", "slower")


@dataclass(frozen=True)
class Winner:
    """A winner on record, compiled for its problem."""

    problem: Problem
    candidate: Candidate
    launcher: Launcher

    @property
    def is_baseline(self) -> bool:
        return self.candidate.kernel.name == BASELINE


def answering(store: CacheStore, device: DeviceFingerprint) -> list[Summary]:
    """The store's records that would answer on ``device``: the user's own, and those of lower
    layers that no higher one hides."""
    found: dict[str, Summary] = {}
    for entry in store.entries(device.gpu):
        if entry.environment == device.environment and not entry.record.is_hint:
            found.setdefault(entry.digest, entry)
    return list(found.values())


def shipped(device: DeviceFingerprint) -> list[Summary]:
    """The records in packages for this GPU and these versions."""
    layers = shipped_layers()
    return answering(CacheStore(layers[0], layers[1:]), device) if layers else []


def current(device: DeviceFingerprint) -> tuple[int, int]:
    """The number of shipped records for this GPU and these versions, and how many of them match
    the current kernels."""
    entries = shipped(device)
    return len(entries), sum(_kernel(entry.record) is not None for entry in entries)


def verified(
    entries: Sequence[Summary], device: torch.device
) -> Iterator[tuple[Document, Winner | None]]:
    """A document for each record, with its ``status`` and perhaps a ``reason``; and its winner, if
    that is right or BLAS. Correct winners are stamped, so that no first call has to verify them."""
    with ThreadPoolExecutor(compiling_threads()) as pool:
        found = [pool.submit(_compiled, entry.record, device) for entry in entries]
        try:
            for entry, compiling in zip(entries, found, strict=True):
                best = entry.record.best
                document = {
                    "problem": dict(entry.record.problem),
                    "kernel": best.kernel,
                    "config": dict(best.config),
                    "path": str(entry.path),
                }
                verdict, winner = _judged(compiling, device)
                yield document | verdict, winner
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def raced(entries: Sequence[Summary], device: torch.device) -> Iterator[Document]:
    """The documents of :func:`verified`, in which correct winners are ``"slower"`` than BLAS or
    ``"ok"``, with their times."""
    # All are compiled before any is timed: a concurrent compiler would delay launches.
    checked = list(verified(entries, device))
    timer = timer_for(device)
    for document, winner in checked:
        yield document if winner is None else document | _times(winner, device, timer)


def _kernel(record: TuningRecord) -> Kernel[Any] | None:
    """The winner's kernel, if it is unchanged since it was measured."""
    best = record.best
    for kernel in dispatch.default_dispatcher().registry.kernels():
        if (kernel.name, kernel.version) == (best.kernel, best.version):
            return kernel
    return None


def _compiled(record: TuningRecord, device: torch.device) -> Winner | None:
    """The record's winner, compiled; None if its kernel has changed since."""
    kernel = _kernel(record)
    if kernel is None:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread starts on device 0
    problem = warm.recall(record.problem, device)
    candidate = Candidate(kernel, read_config(kernel, record.best.config))
    return Winner(problem, candidate, kernel.bind(problem, candidate.config))


def _judged(
    compiling: Future[Winner | None], device: torch.device
) -> tuple[Document, Winner | None]:
    try:
        winner = compiling.result()
        if winner is None:
            return {"status": "stale"}, None
        with precision(winner.problem.tf32):  # some kernels call BLAS, which follows it
            memory = settings.current().tune_memory
            verdict = Verifier(winner.problem, device, memory_limit=memory).verdict(
                winner.launcher,
                repeats=REPEATS,
                deterministic=winner.candidate.kernel.traits.deterministic,
                baseline=winner.is_baseline,
                extent="brief" if winner.is_baseline else "whole",
            )
    except Exception as error:  # from a compiler or a launch: affects this record only
        return {"status": "failed", "reason": error_text(error)}, None
    document: Document = {"title": str(winner.problem)}
    if verdict.error is not None and verdict.error == verdict.error:  # JSON has no NaN
        document["error"] = verdict.error
    if winner.is_baseline:
        return document | {"status": "blas"}, winner
    if not verdict.ok:
        status = "unknown" if verdict.unknown else "wrong"
        return document | {"status": status, "reason": verdict.reason}, None
    dispatch.default_dispatcher().first_use.stamp(winner.problem, winner.candidate)
    return document | {"status": "ok"}, winner


def _times(winner: Winner, device: torch.device, timer: GraphTimer | HostTimer) -> Document:
    """Times of BLAS and of the winner."""
    problem = winner.problem
    try:
        with torch.no_grad(), precision(problem.tf32):
            blas = dispatch.default_dispatcher().registry.kernel(BASELINE)
            theirs = blas.bind(problem, blas.default_config(problem))
            copies = Copies(problem, device, None)
            runs = [copies.runner(theirs), copies.runner(winner.launcher)]
            many = len(runs[0].inputs)
            blas_us, us = map(median, normalised(timer.measure(runs, ROUNDS, copies=many)))
            if blas_us / us < SLOWER:  # a single measurement may be noise
                blas_us, us = map(median, normalised(timer.measure(runs, 3 * ROUNDS, copies=many)))
            timer.release()
    except Exception as error:  # affects this record only
        return {"status": "failed", "reason": error_text(error)}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "blas_us": round(blas_us, 3),
        "us": round(us, 3),
        "ratio": blas_us / us,
        "status": "ok" if winner.is_baseline or blas_us / us >= SLOWER else "slower",
    }
