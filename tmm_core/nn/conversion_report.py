"""The report of :func:`tmm_core.nn.convert`: what changed in a model, what torch still computes and
why, and how to undo it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

#: ``linear``: a layer's product is tmm's. ``epilogue``: with the activation after it in the kernel.
#: ``gated``: gate and up projection in one product. ``experts``: the experts of Transformers'
#: mixtures in grouped products.
#: ``joint``: an attention's projections of one input in one product.
Kind = Literal["linear", "epilogue", "gated", "experts", "joint"]


@dataclass(frozen=True)
class Change:
    """Something that tmm computes now."""

    kind: Kind
    path: str
    before: str
    after: str


@dataclass(frozen=True)
class LeftAlone:
    """Products that torch computes, and why."""

    path: str
    module: str
    reason: str


@dataclass(frozen=True)
class NotFused:
    """An activation or projections that are not computed in one product, and why."""

    path: str
    activation: str
    reason: str


@dataclass
class Report:
    """The result of :func:`convert`: ``print()`` it, or ``undo()`` it. True if anything changed."""

    model: nn.Module
    changes: list[Change] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)
    not_fused: list[NotFused] = field(default_factory=list)
    #: Further notes, a sentence each.
    notes: list[str] = field(default_factory=list)
    #: Paths of the weights that were rounded to a format.
    rounded: list[str] = field(default_factory=list)
    #: Functions that take back one step each, in the order of the steps.
    undos: list[Callable[[], object]] = field(default_factory=list)

    def __repr__(self) -> str:
        counts = (
            f"{len(self.changes)} changes, {len(self.left)} left, {len(self.not_fused)} not fused"
        )
        return f"<Report of {type(self.model).__name__}: {counts}>"

    def undo(self) -> None:
        """Give every module its own class again; parameters keep their current values, and rounded
        weights the values that they were rounded to.

        A module whose class other code has changed since is left as it is, with a warning. A second
        call does nothing.
        """
        while self.undos:
            self.undos.pop()()
        self.rounded.clear()
        self.changes.clear()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Yield each product: its path, and what was done."""
        yield from ((c.path, f"{c.before} → {c.after}") for c in self.changes)
        yield from ((n.path, f"{n.activation} not fused: {n.reason}") for n in self.not_fused)
        yield from ((item.path, f"{item.module} left alone: {item.reason}") for item in self.left)

    def __str__(self) -> str:
        kinds = [change.kind for change in self.changes]
        lines = [
            f"{type(self.model).__name__}: {kinds.count('gated')} gated MLPs fused, "
            f"{kinds.count('epilogue')} activations fused, "
            f"{kinds.count('linear')} other linears swapped, {len(self.left)} left alone"
        ]
        if self.rounded:
            lines[0] += f", {len(self.rounded)} weights rounded"
        if count := kinds.count("joint"):
            lines[0] += f", projections of {count} attention modules joined"
        if count := kinds.count("experts"):
            lines[0] += f", {count} mixtures of experts grouped"
        notes = (f"  {note}" for note in self.notes)
        return "\n".join([*lines, *_folded(self._entries()), *notes])


def _folded(entries: Iterable[tuple[str, str]]) -> list[str]:
    """One indented line for the same entry in every layer of a stack."""
    groups: Counter[tuple[str, str]] = Counter(
        (re.sub(r"(?<![^.])\d+(?=\.)", "*", path), text) for path, text in entries
    )
    return [f"  {path}{f' ×{n}' if n > 1 else ''}  {text}" for (path, text), n in groups.items()]
