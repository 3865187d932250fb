"""``tmm misses``: lists the problems met while tuning was forbidden."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tmm_cache import CacheStore, Miss, digest, problem_fields
from tmm_cache.console import DONE, counted, note, print_json, print_table


def run(options: argparse.Namespace) -> int:
    store = CacheStore()
    if options.clear:
        count = store.clear_misses()
        note(f"{counted(count, 'problem')} forgotten in {store.root}")
        return DONE
    found = [(miss, tuned_since(store, miss)) for miss in store.misses()]
    if options.json:
        print_json(
            [
                {
                    "gpu": miss.gpu,
                    "environment": miss.environment,
                    "problem": miss.problem,
                    "tuned": tuned,
                }
                for miss, tuned in found
            ]
        )
        return DONE
    if not found:
        note(f"no misses in {store.root}")
        return DONE
    print_table(
        ("problem", "gpu", "environment", "tuned since"),
        [
            (
                title(miss.problem),
                miss.gpu,
                digest(miss.environment),
                "yes" if tuned else "no",
            )
            for miss, tuned in found
        ],
    )
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


def tuned_since(store: CacheStore, miss: Miss) -> bool:
    """Whether a record answers the problem by now."""
    return store.load(miss.gpu, miss.environment, miss.problem) is not None
