"""Configs whose launch overlaps the end of the previous one: their field ``early``.

``""``: no overlap. ``"wait"``: wait for the previous launch before touching memory. ``"l2"``:
before the wait, prefetch the first part of b into L2, which is safe even if b is being written.
``"b"``: before the wait, load that part, relying on the caller's promise.

No value is always best. In a chain on an H100, ``"wait"`` saved 0.7 of 14 µs at 16×4096², where 128
tiles are about one per SM. It cost 1.7 µs on top of 20 at 1×5120², where there are 80 tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tmm_core import Config, Problem
from tmm_core.triton import SEARCH_LIMITED, reraise

C = TypeVar("C", bound=Config)


class Overlapping(Config):
    """A config with a field ``early``."""

    early: str

    @property
    def assumes(self) -> tuple[str, ...]:
        return ("static_weights",) if self.early == "b" else ()


def hopper_or_later(problem: Problem) -> bool:
    """Whether the GPU has Hopper's features: ``wgmma`` (or its successor), bulk tensor copies,
    programmatic dependent launch."""
    return problem.device.nvidia and problem.device.capability >= (9, 0)


#: Maximum number of rows for which overlap is tried.
FEW_ROWS = 128
#: Number of configs whose ``early`` variants are tried: the best tile does not depend on it.
_EARLY_TRIED = 2


def check_early(early: str, *, able: bool) -> None:
    """Check a config's ``early`` for a kernel in plain Triton.

    Raises:
        ValueError: It is not ``""``, ``"wait"`` or ``"b"``, or it is ``"b"`` and the config is not
            ``able`` to load b early.
    """
    if early not in ("", "wait", "b"):
        raise ValueError(f"early must be '', 'wait' or 'b', got {early!r}")
    if early == "b" and not able:
        raise ValueError("early='b' needs b's tiles to be loaded ahead into registers")


def with_early(configs: list[C], ways: Sequence[str]) -> list[C]:
    """A kernel's configs, the default config first. After it come the ``early`` variants of the
    first configs that support them, grouped by kind. An exhaustive search gets every variant."""
    most = _EARLY_TRIED if SEARCH_LIMITED.get() else len(configs)
    variants: list[C] = []
    for early in ways:
        able: list[C] = []
        for config in configs:
            if len(able) < most:
                try:
                    able.append(replace(config, early=early))  # type: ignore[call-arg]
                except ValueError as error:  # unsupported by this config
                    reraise(error)
        variants += able
    return [*configs[:1], *variants, *configs[1:]]


def ways(problem: Problem) -> tuple[str, ...]:
    """The ``early`` values to try for a kernel in plain Triton: the end of a launch matters only if
    reading b dominates."""
    if problem.m > FEW_ROWS or problem.batch > 1 or not hopper_or_later(problem):
        return ()
    return ("b", "wait") if problem.static_weights else ("wait",)
