"""Each mutant can be applied: the text that it replaces occurs once, and its tests exist. `make
mutants` runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from catalogue import MUTANTS
from mutant import Mutant, place

ROOT = Path(__file__).parents[2]


def fault(mutant: Mutant) -> str | None:
    """Why a mutant cannot be applied, or its tests cannot be run; None if both can."""
    try:
        place(mutant, ROOT)
    except ValueError as error:
        return str(error)
    if mutant.old == mutant.new:
        return "changes nothing"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        name, _, _ = name.partition("[")
        text = (ROOT / file).read_text() if (ROOT / file).exists() else None
        if text is None or (f"def {name}" not in text and f"class {name}" not in text):
            return f"{test} does not exist"
    return None if mutant.tests else "names no test"


def test_mutants_are_up_to_date() -> None:
    faults = {mutant.name: found for mutant in MUTANTS if (found := fault(mutant)) is not None}
    assert not faults


@pytest.mark.slow
def test_mutants_are_python() -> None:
    for mutant in MUTANTS:
        source = place(mutant, ROOT).read_text()
        compile(source.replace(mutant.old, mutant.new), mutant.name, "exec")


def test_names_are_not_taken_twice() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
