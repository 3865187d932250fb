"""``tmm misses``: lists the problems met while tuning was forbidden that have no record yet."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tmm_base.console import DONE, note, print_json, print_table
from tmm_cache import CacheStore, digest, problem_fields


def run(options: argparse.Namespace) -> int:
    store = CacheStore()
    found = store.misses()
    if options.json:
        print_json([miss._asdict() for miss in found])
        return DONE
    if not found:
        note(f"no misses in {store.root}")
        return DONE
    rows = [(title(miss.problem), miss.gpu, digest(miss.environment)) for miss in found]
    print_table(("problem", "gpu", "environment"), rows)
    return DONE


def title(problem: Mapping[str, Any]) -> str:
    """A problem's document in one line, even with missing or unknown fields."""
    fields = (
        problem_fields.shape(problem),
        problem_fields.dtypes(problem),
        problem_fields.layouts(problem),
        problem_fields.expression(problem),
    )
    return " ".join(fields).removesuffix(" identity")
