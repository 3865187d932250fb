"""Writes the problems of the conformance suites to ``tests/core/conformance_problems.txt``.

A suite that loses a problem is weaker for every kernel, and no other test fails. Run ``python
tests/conformance_problems.py`` after a change of the problems, and commit the difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fakes import DEVICE

from tmm_core import Problem
from tmm_core.testing import KernelConformance, probe_problems, ragged_conformance
from tmm_core.testing.probe_problems import problem_id

FILE = Path(__file__).parent / "core" / "conformance_problems.txt"
#: Methods whose problems on a GPU differ from a CPU's by more than their sizes, or are few.
ON_A_GPU = (
    "_numbers_of_groups", "demanding", "fine_grained", "probes_of_batches", "probes_of_empties",
    "probes_of_use", "sizes_of_tiles",
)  # fmt: skip
ON_A_CPU = (
    *(name for name in sorted(dir(KernelConformance)) if name.startswith("probes_of_")),
    "demanding", "demanding_ragged", "demanding_scales", "fine_grained", "ragged_in_use",
    "ragged_problems", "sizes_of_tiles",
)  # fmt: skip


def described(problem: Problem) -> str:
    """The name of a problem, and the dtypes and outputs that the name leaves out."""
    groups, words = problem.groups, [problem_id(problem)]
    given = {
        "bias": problem.bias,
        "residual": problem.residual and problem.residual.dtype,
        **{name: getattr(groups, name, None) for name in ("a_index", "out_index", "out_weights")},
    }
    words += [f"{name}={dtype}" for name, dtype in given.items() if dtype is not None]
    for port in problem.epilogue.outputs:
        of = "" if port.of is None else f" of {port.of.__name__} by {port.device.__name__}"
        words.append(f"{port.name}: {port.kind} {port.reduce} {port.dtype}{of}")
    # Digests change with the source of an epilogue.
    return re.sub(r"@\w+", "", " ".join(words)).replace("torch.", "")


def lines() -> Iterator[str]:
    for kind, names in (("cpu", ON_A_CPU), ("cuda", ON_A_GPU)):
        device, found = torch.device(kind), replace(DEVICE, type=kind)
        suite: Any = type("Suite", (KernelConformance,), {})
        suite._device = classmethod(lambda cls, device=device: device)
        with (
            patch.object(probe_problems, "fingerprint", lambda _, found=found: found),
            patch.object(ragged_conformance, "fingerprint", lambda _, found=found: found),
        ):
            for name in names:
                yield f"{name}, {kind}"
                for problem in getattr(suite(), name)():
                    yield f"  {described(problem)}"


if __name__ == "__main__":
    FILE.write_text("\n".join([*lines(), ""]), encoding="utf-8")
