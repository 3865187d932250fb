"""Output of ``tmm``, by the conventions of :mod:`tmm_cache.console`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from tmm_cache import CacheWarning, console
from tmm_cache.console import DONE as DONE
from tmm_cache.console import FOUND as FOUND
from tmm_cache.console import INTERRUPTED as INTERRUPTED
from tmm_cache.errors import UsageError as UsageError
from tmm_cache.tables import print_table as print_table
from tmm_cache.tmm import note as note

from tmm_core.errors import TmmWarning


def print_json(value: Any) -> None:
    """Print data for a program; NaN and infinite times, which JSON lacks, become null."""
    # json writes them by the names that `parse_constant` reads.
    finite = json.loads(json.dumps(value, default=dict), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=2, ensure_ascii=False))


def warnings_as_notes() -> AbstractContextManager[None]:
    """A context in which tmm's warnings (a broken plugin, a damaged record) become notes, once
    each."""
    return console.warnings_as_notes(note, TmmWarning, CacheWarning)
