"""``tmm misses``: lists the problems met while tuning was forbidden."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tmm_cache import CacheStore, Miss

from tmm_core.tools.commands.console import DONE, note, print_json, print_table


def run(options: argparse.Namespace) -> int:
    store = CacheStore()
    if options.clear:
        count = store.clear_misses()
        note(f"{count} log{'' if count == 1 else 's'} of misses cleared in {store.root}")
        return DONE
    found = [(miss, tuned_since(store, miss)) for miss in store.misses()]
    if options.json:
        print_json([{**_document(miss), "tuned": tuned} for miss, tuned in found])
        return DONE
    if not found:
        note(f"no misses in {store.root}")
        return DONE
    print_table(
        ("problem", "gpu", "environment", "times met", "tuned since"),
        [
            (
                title(miss.problem),
                miss.gpu,
                miss.environment_digest,
                str(miss.count),
                "yes" if tuned else "no",
            )
            for miss, tuned in found
        ],
        ("times met",),
    )
    return DONE


def title(problem: Mapping[str, Any]) -> str:
    """A problem's document in one line, even with missing or unknown fields."""

    def of(operand: str, part: str) -> str:
        value = problem.get(operand)
        return str(value.get(part, "?")) if isinstance(value, Mapping) else "?"

    sizes = [str(problem.get(size, "?")) for size in ("batch", "m", "n", "k")]
    words = [
        "×".join(sizes[1:] if sizes[0] == "1" else sizes),
        of("a", "dtype"),
        f"{of('a', 'layout')}·{of('b', 'layout')}",
        _groups(problem.get("groups")),
        "bias" if problem.get("bias") else "",
        str(problem.get("epilogue", "?")).removeprefix("identity"),
        "residual" if problem.get("residual") else "",
    ]
    return " ".join(filter(None, words))


def _groups(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    return f"{value.get('count', '?')} groups along {value.get('ragged', '?')}"


def tuned_since(store: CacheStore, miss: Miss) -> bool:
    """Whether a record answers the problem by now."""
    if miss.environment is None:
        return False
    return store.load(miss.gpu, miss.environment, miss.problem) is not None


def _document(miss: Miss) -> dict[str, Any]:
    return {
        "gpu": miss.gpu,
        "environment": miss.environment,
        "problem": miss.problem,
        "count": miss.count,
    }
