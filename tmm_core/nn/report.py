"""What :func:`tmm_core.nn.convert` changed in a model, what it left alone and why, and the way
back."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import nn

from tmm_core.errors import warn
from tmm_core.nn.gated import GatedMLP

#: ``linear``: swapped. ``epilogue``: swapped, with the activation after it in its kernel.
#: ``gated``: gate and up projection in one product. ``experts``: the experts of Transformers'
#: mixtures in grouped products.
Kind = Literal["linear", "epilogue", "gated", "experts"]


@dataclass(frozen=True)
class Change:
    """A module that was replaced."""

    kind: Kind
    path: str
    before: str
    after: str


@dataclass(frozen=True)
class LeftAlone:
    """A module that stays as it was, or is not fused, and why."""

    path: str
    module: str
    reason: str


class Slot(NamedTuple):
    """A place in the model's tree; a shared module has several."""

    parent: nn.Module
    name: str
    path: str


@dataclass
class Report:
    """What :func:`convert` did, for ``print()`` and ``undo()``; true if anything changed."""

    model: nn.Module
    changes: list[Change] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)
    swaps: list[tuple[Slot, nn.Module, nn.Module]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the original modules back, with the current values of their parameters.

        A slot that holds a third module by now is left as it is, with a warning. A second call
        does nothing.
        """
        for slot, original, replacement in reversed(self.swaps):
            if slot.parent._modules.get(slot.name) is not replacement:
                warn(f"{slot.path} no longer holds convert()'s module; left as it is")
                continue
            if isinstance(replacement, GatedMLP):
                replacement.separate()
            original.training = replacement.training
            slot.parent._modules[slot.name] = original
        self.swaps.clear()
        self.changes.clear()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def _repr_html_(self) -> str:
        from tmm_cache import markup

        rows = [(change.path, f"{change.before} → {change.after}", "") for change in self.changes]
        rows += [(item.path, f"{item.module} left alone", item.reason) for item in self.left]
        return markup.table(("path", "what was done", "because"), rows)

    def __str__(self) -> str:
        kinds = [change.kind for change in self.changes]
        lines = [
            f"{type(self.model).__name__}: {kinds.count('gated')} gated MLPs fused, "
            f"{kinds.count('epilogue')} activations fused, "
            f"{kinds.count('linear')} other linears swapped, {len(self.left)} left alone"
        ]
        if count := kinds.count("experts"):
            lines[0] += f", {count} mixtures of experts grouped"
        done = [(c.path, f"{c.before} → {c.after}") for c in self.changes]
        left = [(item.path, f"{item.module} left alone: {item.reason}") for item in self.left]
        return "\n".join(lines + _folded([*done, *left]))


def _folded(entries: list[tuple[str, str]]) -> list[str]:
    """One indented line for the same entry in every layer of a stack."""
    groups: Counter[tuple[str, str]] = Counter(
        (re.sub(r"(?<![^.])\d+(?=\.)", "*", path), text) for path, text in entries
    )
    return [f"  {path}{f' ×{n}' if n > 1 else ''}  {text}" for (path, text), n in groups.items()]
