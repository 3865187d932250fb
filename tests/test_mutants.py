"""Each mutant still is one: what it replaces is in the tree once, and its tests exist. Whether they
notice it, `make mutants` says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from catalogue import MUTANTS, Mutant, place


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_up_to_date(mutant: Mutant) -> None:
    path = place(mutant, ROOT)
    assert mutant.old != mutant.new
    source = path.read_text().replace(mutant.old, mutant.new)
    compile(source, str(path), "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(), test


def test_names_are_not_taken_twice() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
