"""Single kernels with partially given configs: ``tmm bench --kernel … --sweep …``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmm_core import dispatch, settings
from tmm_core.bench.case import Call
from tmm_core.launch.plan import Plan
from tmm_core.spec.kernel import Kernel

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """A kernel with some fields of its config; the others have the default config's values. Without
    any field, its best config on record is used."""

    label: str
    kernel: str
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def column(self) -> str:
        """The column of its times in a document."""
        return f"kernel {self.label}"

    def plan(self, call: Call) -> Plan:
        """The kernel for this call.

        Raises:
            TmmError: It cannot serve the call, or not with these fields.
            Exception: It does not compile.
        """
        return call.plan(kernel=self.kernel, config=dict(self.fields) or None)


def combined(
    kernels: Sequence[Kernel[Any]], common: Fields, sweeps: Mapping[str, Sequence[Any]]
) -> list[Series]:
    """Every kernel with every combination of the swept values and the common fields. Fields that a
    kernel's config lacks are ignored.

    Raises:
        ValueError: A field that no kernel has; the message lists the valid ones.
    """
    known = {k.name: [f.name for f in dataclasses.fields(k.config_type)] for k in kernels}
    for name in (*common, *sweeps):
        if not any(name in fields for fields in known.values()):
            there = "; ".join(f"{k}: {', '.join(names)}" for k, names in known.items())
            raise ValueError(f"no kernel has a field {name!r}; there are {there}")
    found = []
    for kernel, fields in known.items():
        fixed = [(name, value) for name, value in common.items() if name in fields]
        swept = [[(name, v) for v in values] for name, values in sweeps.items() if name in fields]
        for point in itertools.product(*swept):
            text = " ".join(f"{name}={value}" for name, value in point)
            found.append(Series(f"{kernel} {text}".rstrip(), kernel, (*fixed, *point)))
    return found


def capable(call: Call) -> list[Series]:
    """Every kernel that can serve the call, with its best config on record, or without a record
    its default config."""
    registry = dispatch.default_dispatcher().registry
    able, _ = registry.candidates(call.problem(), settings.current())
    return [Series(kernel.name, kernel.name) for kernel in able]
