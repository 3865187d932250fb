"""Configs whose launch overlaps the one before it (programmatic dependent launch): their field
``early`` says what is done before that one has ended.

Where tiles fill the SMs this spares 0.7 of 14 µs (16×4096×4096 on an H100, in use); where they do
not, blocks of two launches crowd on some SMs and it costs 0.5 of 20 (5120×5120). So it is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tmm_core import Config, Problem

C = TypeVar("C", bound=Config)

#: Rows up to which it is tried.
FEW_ROWS = 128
#: Configs whose variants with ``early`` are tried: which tile is best does not hang on it.
_EARLY_TRIED = 2


def check_early(early: str, *, able: bool) -> None:
    """Hold a config's ``early`` to what a kernel that loads b early, or not, knows.

    Raises:
        ValueError: It is neither empty nor ``"b"``, or ``"b"`` where the config is not ``able``.
    """
    if early not in ("", "wait", "b"):
        raise ValueError(f"early must be '', 'wait' or 'b', got {early!r}")
    if early == "b" and not able:
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


def ways(problem: Problem) -> tuple[str, ...]:
    """What a kernel in plain Triton may do early for ``problem``: only where reading b is all there
    is to do does the end of a launch count."""
    if problem.m > FEW_ROWS or problem.batch > 1 or problem.device.capability[0] < 9:
        return ()
    return ("wait", "b") if problem.static_weights else ("wait",)
