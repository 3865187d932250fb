"""``tmm verify``: checks every record that would answer here against references, ahead of time.

Correct records are noted as verified, so that no first call has to verify them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from tmm_base.console import DONE, FOUND, INTERRUPTED, counted, note, print_json

from tmm_core import dispatch
from tmm_core.bench import report
from tmm_core.spec.device import fingerprint
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands import record_check
from tmm_core.tools.commands.misses import title

#: The summary's words for each status.
_SAYS = {
    "ok": "verified",
    "blas": "won by BLAS",
    "stale": "for kernels that have changed since",
    "wrong": "wrong",
    "failed": "failed",
    "unknown": "too large to verify",
}


def run(options: argparse.Namespace) -> int:
    """Print the verdicts, faults as they are found; returns the exit status."""
    device = shared.device(options)
    gpu = fingerprint(device)
    entries = record_check.answering(dispatch.default_dispatcher().store, gpu)
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        for verdict in record_check.verified(entries, device):
            document = {"title": title(verdict["problem"])} | verdict
            found.append(document)
            if document["status"] in record_check.FAULTS and not options.json:
                print(_line(document), flush=True)
    except KeyboardInterrupt:
        note(f"interrupted after {len(found)} records; correct ones are noted as verified")
        interrupted = True
    if options.json:
        print_json(found)
    else:
        counts = Counter(document["status"] for document in found)
        parts = [f"{counts[status]} {text}" for status, text in _SAYS.items() if counts[status]]
        records = f"{counted(len(found), 'record')} for {gpu.gpu}"
        print(f"{records}: {', '.join(parts)}" if parts else records)
    if interrupted:
        return INTERRUPTED
    return FOUND if any(document["status"] in record_check.FAULTS for document in found) else DONE


def _line(document: dict[str, Any]) -> str:
    chosen, status = report.chosen(document), document["status"]
    return f"{document['title']}  {chosen}  {status}: {document['reason']}"
