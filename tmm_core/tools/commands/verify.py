"""``tmm verify``: checks every record that would answer here against references, ahead of time.

Correct records are stamped, so that no first call has to verify them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from tmm_cache import Summary
from tmm_cache.console import counted

from tmm_core import dispatch, settings
from tmm_core.bench import report
from tmm_core.bench.recheck import Winner, compiled
from tmm_core.dispatch.compilers import compiling_threads
from tmm_core.dispatch.verifier import Verifier
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.spec.kernel import BASELINE
from tmm_core.spec.precision import precision
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.console import DONE, FOUND, INTERRUPTED, note, print_json
from tmm_core.tools.commands.misses import title

#: Statuses that count as faults. "unknown" could not be checked. Others: "blas" needs no
#: verification; "stale" is for a kernel that has changed since and is no longer chosen.
FAULTS = ("wrong", "failed", "unknown")

#: Launches on the same inputs: a race that is wrong once in twenty passes with 0.2 %.
REPEATS = 120


def run(options: argparse.Namespace) -> int:
    device = shared.device(options)
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        for document in verified(device):
            found.append(document)
            if document["status"] in FAULTS and not options.json:
                print(_line(document), flush=True)
    except KeyboardInterrupt:
        note(f"interrupted after {len(found)} records; correct ones are stamped")
        interrupted = True
    if options.json:
        print_json(found)
    else:
        print(_summary(found, fingerprint(device).gpu))
    if interrupted:
        return INTERRUPTED
    return FOUND if any(document["status"] in FAULTS for document in found) else DONE


def verified(device: torch.device) -> Iterator[dict[str, Any]]:
    """A document for each record that would answer on ``device``."""
    entries = list(_answering(fingerprint(device)))
    with ThreadPoolExecutor(compiling_threads()) as pool:
        found = [pool.submit(_winner, entry, device) for entry in entries]
        try:
            for entry, winner in zip(entries, found, strict=True):
                yield _document(entry) | _verdict(winner, device)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _answering(device: DeviceFingerprint) -> Iterator[Summary]:
    """The user's own records, and those of lower layers that no higher one hides."""
    seen: set[str] = set()
    for entry in dispatch.dispatcher().store.entries(device.gpu):
        key = json.dumps(entry.record.problem, sort_keys=True)
        if entry.environment == device.environment and key not in seen:
            seen.add(key)
            yield entry


def _winner(entry: Summary, device: torch.device) -> Winner | str:
    """The winner, or the status of a record without one to verify."""
    if entry.record.best.kernel == BASELINE:
        return "blas"
    return compiled(entry.record, device) or "stale"


def _verdict(winner: Future[Winner | str], device: torch.device) -> dict[str, Any]:
    try:
        found = winner.result()
        if isinstance(found, str):
            return {"status": found}
        kernel = found.candidate.kernel
        with precision(found.problem.tf32):  # some kernels call BLAS, which follows it
            memory = settings.current().tune_memory
            verdict = Verifier(found.problem, device, memory_limit=memory).verdict(
                found.launcher, repeats=REPEATS, deterministic=kernel.traits.deterministic
            )
    except Exception as error:  # from a compiler or a launch: affects this record only
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    document: dict[str, Any] = {"title": str(found.problem)}
    if verdict.error is not None and verdict.error == verdict.error:  # JSON has no NaN
        document["error"] = verdict.error
    if verdict.ok:
        dispatch.dispatcher().trust.stamp(found.problem, found.candidate)
        return document | {"status": "ok"}
    return document | {
        "status": "unknown" if verdict.unknown else "wrong",
        "reason": verdict.reason,
    }


def _document(entry: Summary) -> dict[str, Any]:
    best = entry.record.best
    return {
        "problem": dict(entry.record.problem),
        "title": title(entry.record.problem),
        "kernel": best.kernel,
        "config": dict(best.config),
        "path": str(entry.path),
    }


def _line(document: dict[str, Any]) -> str:
    verdict = f"{document['status']}: {document['reason']}"
    return f"{document['title']}  {report.chosen(document)}  {verdict}"


def _summary(found: list[dict[str, Any]], gpu: str) -> str:
    counts = Counter(document["status"] for document in found)
    says = {
        "ok": "verified",
        "blas": "won by BLAS",
        "stale": "for kernels that have changed since",
        "wrong": "wrong",
        "failed": "failed",
        "unknown": "too large to verify",
    }
    parts = [f"{counts[status]} {text}" for status, text in says.items() if counts[status]]
    records = f"{counted(len(found), 'record')} for {gpu}"
    return f"{records}: {', '.join(parts)}" if parts else records
