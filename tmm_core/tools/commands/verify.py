"""``tmm verify``: checks every record that would answer here against references, ahead of time.

Correct records are stamped, so that no first call has to verify them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable

from tmm_cache.console import DONE, FOUND, INTERRUPTED, counted, note, print_json

from tmm_core import dispatch
from tmm_core.bench import recheck, report
from tmm_core.bench.results import Document
from tmm_core.spec.device import fingerprint
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.misses import title


def run(options: argparse.Namespace) -> int:
    device = shared.device(options)
    gpu = fingerprint(device)
    entries = recheck.answering(dispatch.default_dispatcher().store, gpu)
    verdicts = (verdict for verdict, _ in recheck.verified(entries, device))
    return show(verdicts, f"for {gpu.gpu}", options.json)


def show(verdicts: Iterable[Document], which: str, as_json: bool) -> int:
    """Print the verdicts of :mod:`tmm_core.bench.recheck`, faults as they are found; returns the
    exit status. ``which`` names the records."""
    found: list[Document] = []
    interrupted = False
    try:
        for verdict in verdicts:
            document = {"title": title(verdict["problem"])} | verdict
            found.append(document)
            if document["status"] in recheck.FAULTS and not as_json:
                print(_line(document), flush=True)
    except KeyboardInterrupt:
        note(f"interrupted after {len(found)} records; correct ones are stamped")
        interrupted = True
    if as_json:
        print_json(found)
    else:
        print(_summary(found, which))
    if interrupted:
        return INTERRUPTED
    return FOUND if any(document["status"] in recheck.FAULTS for document in found) else DONE


def _line(document: Document) -> str:
    reason = document.get("reason") or f"{document['ratio']:.3f}× blas"
    verdict = f"{document['status']}: {reason}"
    return f"{document['title']}  {report.chosen(document)}  {verdict}"


def _summary(found: list[Document], which: str) -> str:
    counts = Counter(document["status"] for document in found)
    says = {
        "ok": "verified",
        "blas": "won by BLAS",
        "stale": "for kernels that have changed since",
        "slower": "slower than BLAS",
        "wrong": "wrong",
        "failed": "failed",
        "unknown": "too large to verify",
    }
    parts = [f"{counts[status]} {text}" for status, text in says.items() if counts[status]]
    if ratios := [document["ratio"] for document in found if "ratio" in document]:
        # Both ends: noise that makes some slower makes others faster.
        parts.append(f"{min(ratios):.3f} to {max(ratios):.3f}× blas")
    records = f"{counted(len(found), 'record')} {which}"
    return f"{records}: {', '.join(parts)}" if parts else records
