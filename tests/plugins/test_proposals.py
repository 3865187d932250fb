"""The configs that kernels propose, and their estimates, change only on purpose."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

import triton
from proposals import TABLE, computed
from tmm_triton.triton_kernel import missing_toolchain

COMMAND = "python tests/proposals.py"


@pytest.mark.skipif(bool(missing_toolchain()), reason="kernels decline without a C compiler")
def test_proposals_equal_the_table() -> None:
    known = json.loads(TABLE.read_text("utf-8"))
    if known[""]["triton"] != triton.__version__:
        pytest.skip(f"the table was made with Triton {known['']['triton']}")
    present = computed()
    changed = [
        f"{problem}, {kernel}:\n  was {known.get(problem, {}).get(kernel)}\n  is  {line}"
        for problem, lines in present.items()
        for kernel, line in lines.items()
        if known.get(problem, {}).get(kernel) != line
    ]
    assert not changed, (
        f"{len(changed)} proposals changed; if this is meant, measure it and run {COMMAND}:\n"
        + "\n".join(changed[:5])
    )
    assert present == known, f"other problems or kernels: run {COMMAND}"
