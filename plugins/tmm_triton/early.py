"""Configs that do something about b before the launch before has ended: their field ``early``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tmm_core import Config

C = TypeVar("C", bound=Config)

#: Configs whose variants with ``early`` are tried: which tile is best does not hang on it.
_EARLY_TRIED = 2


def check_early(early: str, *, able: bool) -> None:
    """Hold a config's ``early`` to what a kernel that loads b early, or not, knows.

    Raises:
        ValueError: It is neither empty nor ``"b"``, or ``"b"`` where the config is not ``able``.
    """
    if early not in ("", "b"):
        raise ValueError(f"early must be '' or 'b', got {early!r}")
    if early and not able:
        raise ValueError("early='b' needs b's tiles to be loaded ahead into registers")


def with_early(configs: list[C], ways: Sequence[str]) -> list[C]:
    """A kernel's configs, best guess first, and after that guess those that do one of ``ways``
    early, of the first configs that can."""
    variants: list[C] = []
    for config in configs:
        if len(variants) < _EARLY_TRIED * len(ways):
            with contextlib.suppress(ValueError):  # not with such a config
                variants += [replace(config, early=early) for early in ways]  # type: ignore[call-arg]
    return [*configs[:1], *variants, *configs[1:]]
