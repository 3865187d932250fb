"""Single kernels with partially given configs, which ``tmm bench --kernel … --sweep …`` times, and
the metrics reported for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmm_core.bench.case import Call
from tmm_core.bench.results import Document
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


#: The usual batch-invariant product: a persistent kernel with one config for every M, as libraries
#: use it that replace torch's 16-bit products by invariant ones.
ONE_CONFIG = Series(
    "one persistent config",
    "triton.persistent",
    (
        ("BLOCK_M", 128), ("BLOCK_N", 128), ("BLOCK_K", 64), ("num_stages", 3), ("num_warps", 8),
        ("GROUP_M", 8), ("SUBTILE", 1), ("FLATTEN", True),
    ),
)  # fmt: skip


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
            said = " ".join(f"{name}={value}" for name, value in point)
            found.append(Series(f"{kernel} {said}".rstrip(), kernel, (*fixed, *point)))
    return found


#: A metric's label, and its value from a document and a time in µs. GB/s count the bytes that
#: must move: each operand and the result once, with the size of its dtype.
METRICS: Mapping[str, tuple[str, Callable[[Document, float], float]]] = {
    "tflops": ("TFLOPS", lambda document, us: document["flops"] / us / 1e6),
    "gbs": ("GB/s", lambda document, us: document["bytes"] / us / 1e3),
    "us": ("µs", lambda document, us: us),
    "ratio": ("× torch", lambda document, us: document["times"]["torch"]["median_us"] / us),
}


def told(document: Document, column: str, metric: str) -> float | None:
    """A column's median in that metric; None if it was not timed."""
    times = document["times"].get(column)
    return None if times is None else METRICS[metric][1](document, times["median_us"])


def columns(documents: Iterable[Document]) -> list[str]:
    """The columns of all series in these documents, then tmm's and torch's."""
    named = dict.fromkeys(f"kernel {label}" for d in documents for label in d.get("series", ()))
    return [*named, "tmm", "torch"]


def axis(documents: Sequence[Document]) -> tuple[str, Sequence[float | str]]:
    """The axis on which the problems differ: a label, and a number for each if they differ in one
    number, including the side of a square; else names."""
    sizes = [tuple(document["case"][letter] for letter in "mnk") for document in documents]
    if all(m == n == k for m, n, k in sizes):
        return "M = N = K", [float(m) for m, _, _ in sizes]
    varying = [i for i in range(3) if len({size[i] for size in sizes}) > 1]
    if len(varying) == 1:
        (which,) = varying
        others = ", ".join(
            f"{letter} = {sizes[0][i]}" for i, letter in enumerate("MNK") if i != which
        )
        return f"{'MNK'[which]} ({others})", [float(size[which]) for size in sizes]
    return "M×N×K", ["×".join(map(str, size)) for size in sizes]
