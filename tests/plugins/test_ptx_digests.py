"""A Triton kernel whose machine code changed has another version number."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

import ptx_digests
import triton
from ptx_digests import TABLE, changed, computed, normalised
from uninterpreted import Uninterpreted

COMMAND = "python tests/ptx_digests.py"


@pytest.mark.slow
def test_changed_machine_code_has_another_version(uninterpreted: Uninterpreted) -> None:
    document = json.loads(TABLE.read_text())
    if triton.__version__ not in document:
        made = ", ".join(document)
        pytest.skip(f"the digests were made with Triton {made}; {COMMAND} makes this one's")
    known = document[triton.__version__]
    present = uninterpreted(computed, known)
    found = changed(present, known)
    assert not found, (
        "the PTX of these kernels has changed, so their records are out of date: raise `version` "
        f"in their classes, then run {COMMAND}: {found}"
    )
    assert present == known, f"{TABLE.name} is of other versions or cases: run {COMMAND}"
    assert all(kernel["cases"] for kernel in known.values())


def test_only_another_version_excuses_another_digest() -> None:
    def table(version: str, ptx: str) -> ptx_digests.Table:
        return {"k": {"version": version, "cases": {"large": {"config": {}, "ptx": ptx}}}}

    assert changed(table("3", "b"), table("3", "a")) == {"k": ["large"]}
    assert changed(table("4", "b"), table("3", "a")) == {}
    assert changed(table("3", "a"), table("3", "a")) == {}
    assert changed(table("3", "a"), {}) == {}


def test_positions_and_names_are_not_machine_code() -> None:
    ptx = (
        "//\n.version 8.7\n.target sm_90a\n.visible .entry one_kernel(\n.loc 1 2 3\n"
        "$L__tmp1:\nadd.f32 %f1, %f2; // k.py:7\n\t}\n\t.section\t.debug_str\n{ k.py }\n"
    )
    other = ptx.replace("one_", "my_").replace("8.7", "8.8").replace("1 2 3", "4 5 6")
    other = other.replace("k.py", "/there/k.py").replace("tmp1", "tmp2")
    assert normalised(ptx, "one_kernel") == normalised(other, "my_kernel")
    assert normalised(ptx, "one_kernel") != normalised(ptx.replace("add", "sub"), "one_kernel")
