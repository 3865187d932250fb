"""``tmm verify``: checks every record that would answer here against references, ahead of time.

Correct records are noted as verified, so that no first call has to verify them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from tmm_base.console import DONE, FOUND, INTERRUPTED, counted, note, print_json, print_line
from tmm_cache import CacheStore, Summary, TuningRecord, digest

from tmm_core import dispatch, settings
from tmm_core.bench import report
from tmm_core.errors import error_text, reraise
from tmm_core.launch import warm
from tmm_core.registry.query import read_config
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.misses import title
from tmm_core.tuning.compile_pool import compiling_threads
from tmm_core.verify.verifier import Verifier

#: Launches on the same inputs. A race that is wrong once in twenty launches stays undetected with a
#: probability of 0.2 %.
REPEATS = 120

#: Statuses that count as faults. "unknown" could not be checked. Others: "ok"; "blas" needs no
#: verification; "stale" is a record that answers no call, because its kernel or epilogue has
#: changed or is not installed any more.
FAULTS = ("wrong", "failed", "unknown")
#: The summary's words for each status.
_LABELS = {
    "ok": "verified",
    "blas": "won by BLAS",
    "stale": "for kernels or epilogues that have changed since",
    "wrong": "wrong",
    "failed": "failed",
    "unknown": "too large to verify",
}


def run(options: argparse.Namespace) -> int:
    """Print the verdicts, faults as they are found; returns the exit status."""
    device = shared.device(options)
    gpu = fingerprint(device)
    entries = answering(dispatch.default_dispatcher().store, gpu)
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        for verdict in verified(entries, device):
            document = {"title": title(verdict["problem"])} | verdict
            found.append(document)
            if (status := document["status"]) in FAULTS and not options.json:
                fault = f"{status}: {document['reason']}"
                print_line(f"{document['title']}  {report.chosen(document)}  {fault}")
    except KeyboardInterrupt:
        note(f"interrupted after {len(found)} records; correct ones are noted as verified")
        interrupted = True
    if options.json:
        print_json(found)
    else:
        counts = Counter(document["status"] for document in found)
        parts = [f"{counts[status]} {text}" for status, text in _LABELS.items() if counts[status]]
        records = f"{counted(len(found), 'record')} for {gpu.gpu}"
        print_line(f"{records}: {', '.join(parts)}" if parts else records)
    if interrupted:
        return INTERRUPTED
    return FOUND if any(document["status"] in FAULTS for document in found) else DONE


@dataclass(frozen=True)
class Winner:
    """A winner on record, compiled for its problem."""

    problem: Problem
    candidate: Candidate
    launcher: Launcher


def answering(store: CacheStore, device: DeviceFingerprint) -> list[Summary[TuningRecord]]:
    """The store's records that would answer on ``device``. They are the user's own records, and
    records of lower layers that no higher layer hides; or the lock file's if it alone answers."""
    found: dict[str, Summary[TuningRecord]] = {}
    environment = digest(device.environment)
    for entry in store.summaries(device.gpu):
        # A record answers without its readable environment, which may be damaged.
        if entry.environment_digest == environment:
            found.setdefault(entry.digest, entry)
    return list(found.values())


def verified(
    entries: Sequence[Summary[TuningRecord]], device: torch.device
) -> Iterator[dict[str, Any]]:
    """A document for each record, with its ``status`` and perhaps a ``reason``. Correct winners are
    noted as verified, so that no first call has to verify them."""
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
                yield document | _judged(compiling, device)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _kernel(record: TuningRecord) -> Kernel[Any] | None:
    """The winner's kernel, if it is unchanged since it was measured."""
    best = record.best
    for kernel in dispatch.default_dispatcher().registry.kernels():
        if (kernel.name, kernel.version) == (best.kernel, best.version):
            return kernel
    return None


def _compiled(record: TuningRecord, device: torch.device) -> Winner | None:
    """The record's winner, compiled; None if its kernel or its epilogue has changed since."""
    kernel = _kernel(record)
    if kernel is None:
        return None
    try:
        dispatch.default_dispatcher().registry.epilogue(record.problem["epilogue"])
    except ValueError as error:
        reraise(error)
        return None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread starts on device 0
    problem = warm.recall(record.problem, device)
    candidate = Candidate(kernel, read_config(kernel, record.best.config))
    return Winner(problem, candidate, kernel.bind(problem, candidate.config))


def _judged(compiling: Future[Winner | None], device: torch.device) -> dict[str, Any]:
    try:
        winner = compiling.result()
        if winner is None:
            return {"status": "stale"}
        is_baseline = winner.candidate.kernel.name == BASELINE
        with precision(winner.problem.tf32):  # some kernels call BLAS, which follows it
            memory = settings.current().tune_memory
            verdict = Verifier(winner.problem, device, memory_limit=memory).verdict(
                winner.launcher,
                repeats=REPEATS,
                deterministic=winner.candidate.kernel.traits.deterministic,
                baseline=is_baseline,
                extent="brief" if is_baseline else "whole",
            )
    except Exception as error:  # from a compiler or a launch: affects this record only
        return {"status": "failed", "reason": error_text(error)}
    document: dict[str, Any] = {"title": str(winner.problem)}
    if verdict.error is not None and verdict.error == verdict.error:  # JSON has no NaN
        document["error"] = verdict.error
    if is_baseline:
        return document | {"status": "blas"}
    if not verdict.ok:
        status = "unknown" if verdict.unknown else "wrong"
        return document | {"status": status, "reason": verdict.reason}
    dispatch.default_dispatcher().first_use.stamp(winner.problem, winner.candidate)
    return document | {"status": "ok"}
