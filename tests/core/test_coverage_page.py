"""docs/coverage.md is up to date with the script that writes it."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        module = importlib.import_module("coverage_page")
    text = module.PAGE.read_text(encoding="utf-8")
    version = ".".join(transformers.__version__.split(".")[:2])
    if f"Transformers {version} " not in text:
        pytest.skip(f"the page was not written with Transformers {version}")
    return module


@pytest.mark.parametrize("family", ["Mixtral", "Bert", "Phi3"])
def test_a_row_equals_the_effect_of_convert(family: str, script: Any) -> None:
    row = script.row(family)
    assert str(row) in script.PAGE.read_text(encoding="utf-8").splitlines()
    assert row.tmm > row.torch > 0


def test_every_family_has_a_row(script: Any) -> None:
    lines = script.PAGE.read_text(encoding="utf-8").splitlines()
    models = [line.split(" | ")[0].lstrip("| ") for line in lines if line.startswith("| ")][1:]
    assert models == [f"{family}{suffix}" for family, (suffix, *_) in script.FAMILIES.items()]
    assert len(models) >= 30
