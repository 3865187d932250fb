"""Packs a run's results into one file to share: measurements, environment and report, without
paths, host or user names of the machine."""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tmm_core.bench import report
from tmm_core.bench.results import SUFFIX, Results, documents, files

#: A path that leads outside this folder. A unit (µs/call) has a letter before its slash.
_PATH = re.compile(r"(?<![\w>])(?:~\w*|\.{1,2})?/[^\s'\",;:]+")
_HIDDEN = "<path>"


def pack(paths: Sequence[Path], target: Path) -> Results:
    """Write the zip file ``target`` of the results in ``paths``, files or folders.

    Returns:
        Its contents, read back.

    Raises:
        ValueError: The results have no measurements, or a file does not hold results.
        OSError: They cannot be read, or ``target`` exists already or cannot be written.
    """
    runs = [documents(file) for file in files(paths)]
    results = Results.of(itertools.chain(*runs))
    if not results.measured and results.host is None:
        raise ValueError("nothing was measured")
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as archive:
        for number, run in enumerate(runs):
            text = "".join(json.dumps(without_paths(d), ensure_ascii=False) + "\n" for d in run)
            archive.writestr(f"{number:03d}{SUFFIX}", text)
        archive.writestr("report.md", without_paths(report.markdown(results)))
    return results


def without_paths(value: Any) -> Any:
    """The JSON ``value`` with every path in its strings hidden."""
    if isinstance(value, str):
        return _PATH.sub(_HIDDEN, value)
    if isinstance(value, list):
        return [without_paths(each) for each in value]
    if isinstance(value, dict):
        return {name: without_paths(each) for name, each in value.items()}
    return value
