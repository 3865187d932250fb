"""``tmm verify``: checks every record that would answer here against references, ahead of time.

Correct records are stamped, so that no first call has to verify them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from tmm_cache.console import counted

from tmm_core import dispatch
from tmm_core.bench import recheck, report
from tmm_core.spec.device import fingerprint
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.console import DONE, FOUND, INTERRUPTED, note, print_json
from tmm_core.tools.commands.misses import title


def run(options: argparse.Namespace) -> int:
    device = shared.device(options)
    mine = fingerprint(device)
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        entries = recheck.answering(dispatch.dispatcher().store, mine)
        for verdict, _ in recheck.verified(entries, device):
            document = {"title": title(verdict["problem"])} | verdict
            found.append(document)
            if document["status"] in recheck.FAULTS and not options.json:
                print(_line(document), flush=True)
    except KeyboardInterrupt:
        note(f"interrupted after {len(found)} records; correct ones are stamped")
        interrupted = True
    if options.json:
        print_json(found)
    else:
        print(_summary(found, mine.gpu))
    if interrupted:
        return INTERRUPTED
    return FOUND if any(document["status"] in recheck.FAULTS for document in found) else DONE


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
