"""``tmm kernels``: lists kernels and plugins."""

from __future__ import annotations

import argparse

from tmm_base.console import DONE, print_json, print_table

import tmm_core
from tmm_core.spec.kernel import Traits


def run(options: argparse.Namespace) -> int:
    infos = tmm_core.kernels()
    if options.json:
        print_json([info.to_json() for info in infos])
        return DONE
    rows: list[tuple[str, ...] | str] = []
    for info in infos:
        rows.append(
            (
                info.name,
                info.version,
                info.plugin,
                f"{info.distribution} {info.distribution_version}".strip(),
                "" if info.traits is None else _words(info.traits),
            )
        )
        if info.disabled is not None:
            rows.append(f"not used: {info.disabled}")
    print_table(("kernel", "version", "plugin", "distribution", "traits"), rows)
    return DONE


def _words(traits: Traits) -> str:
    words = (
        ("deterministic", traits.deterministic),
        ("batch-invariant", traits.batch_invariant),
        ("capture-safe", traits.capture_safe),
    )
    return ", ".join(word for word, has in words if has)
