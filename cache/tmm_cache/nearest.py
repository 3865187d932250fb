"""Finds the key nearest to a missing one, and the fields in which they differ.

A miss that is an error has to give the reason: another torch, another layout, a batch that was not
frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tmm_cache.fields import SIZES, is_size
from tmm_cache.keys import JSON, Document, canonical

#: GPU, environment and problem.
Key: TypeAlias = tuple[str, Document, Document]

#: The distance of a differing field, in octaves of a size: a problem of another size is nearer than
#: one of another dtype, under other versions or on another GPU.
_FIELD, _VERSION, _GPU = 8.0, 4.0, 32.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two keys differ, like `a.layout` or `environment.torch`; None: absent."""

    field: str
    asked: JSON
    there: JSON

    def __str__(self) -> str:
        return f"{self.field}: asked {_text(self.asked)}, there {_text(self.there)}"


@dataclass(frozen=True, slots=True)
class NearestKey:
    """An existing key, and its differences from the requested one."""

    gpu: str
    problem: Document
    differences: tuple[Difference, ...]


def nearest(asked: Key, keys: Iterable[Key]) -> NearestKey | None:
    """The key at the smallest distance; None if there are no keys."""
    flat = _flat(asked)
    found = [(key, tuple(_differences(flat, _flat(key)))) for key in keys]
    if not found:
        return None
    (gpu, _, problem), differences = min(found, key=lambda each: sum(map(_weight, each[1])))
    return NearestKey(gpu, problem, differences)


def _flat(key: Key) -> dict[str, JSON]:
    gpu, environment, problem = key
    return {
        **dict(_leaves(problem, "")),
        **dict(_leaves(environment, "environment.")),
        "gpu": gpu,
    }


def _leaves(mapping: Document, above: str) -> Iterator[tuple[str, JSON]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _differences(asked: Document, there: Document) -> Iterator[Difference]:
    for name in dict.fromkeys((*asked, *there)):
        if asked.get(name) != there.get(name):
            yield Difference(name, asked.get(name), there.get(name))


def _weight(difference: Difference) -> float:
    if difference.field == "gpu":
        return _GPU
    if difference.field.startswith("environment."):
        return _VERSION
    asked, there = difference.asked, difference.there
    if difference.field in SIZES and is_size(asked) and is_size(there):
        return abs(math.log2(asked / there))
    return _FIELD


def _text(value: JSON) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else canonical(value)
