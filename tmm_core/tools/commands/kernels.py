"""``tmm kernels``: lists kernels and plugins."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tmm_base.console import DONE, print_json, print_table

import tmm_core


def run(options: argparse.Namespace) -> int:
    infos = tmm_core.kernels()
    if options.json:
        print_json([info.to_json() for info in infos])
        return DONE
    rows: list[tuple[str, ...] | str] = []
    for info in infos:
        traits = {} if info.traits is None else asdict(info.traits)
        rows.append(
            (
                info.name,
                info.version,
                info.plugin,
                f"{info.distribution} {info.distribution_version}".strip(),
                ", ".join(name.replace("_", "-") for name, has in traits.items() if has),
            )
        )
        if info.disabled is not None:
            rows.append(f"not used: {info.disabled}")
    print_table(("kernel", "version", "plugin", "distribution", "traits"), rows)
    return DONE
