"""``tmm kernels``: who is there."""

from __future__ import annotations

import argparse

import tmm_core
from tmm_core.spec.kernel import Traits
from tmm_core.tools.commands.console import DONE, print_json, print_table


def run(options: argparse.Namespace) -> int:
    infos = tmm_core.kernels()
    if options.json:
        print_json([info.to_json() for info in infos])
        return DONE
    print_table(
        ("kernel", "version", "plugin", "distribution", "traits", "state"),
        [
            (
                info.name,
                info.version,
                info.plugin,
                f"{info.distribution} {info.distribution_version}".strip(),
                "" if info.traits is None else _words(info.traits),
                "in use" if info.disabled is None else f"not used: {info.disabled}",
            )
            for info in infos
        ],
    )
    return DONE


def _words(traits: Traits) -> str:
    words = (
        ("deterministic", traits.deterministic),
        ("batch-invariant", traits.batch_invariant),
        ("capture-safe", traits.capture_safe),
        ("needs workspace", traits.needs_workspace),
    )
    return ", ".join(word for word, has in words if has)
