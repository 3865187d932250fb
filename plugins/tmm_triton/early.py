"""Configs that begin before the launch before has ended: their field ``early``.

``""``: they do not. ``"wait"``: they wait before they touch memory. ``"l2"``: before that they have
L2 prefetch their first part of b, whoever writes it. ``"b"``: they load it, on the caller's word.

None is always best. In a chain on an H100 a wait took 0.7 µs less of 14 at 16×4096², where 128
tiles are one for nearly each SM, and 1.7 more of 20 at 1×5120², where they are 80.
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
        ValueError: It is none of ``""``, ``"wait"`` and ``"b"``, or ``"b"`` where the config is not
            ``able``.
    """
    if early not in ("", "wait", "b"):
        raise ValueError(f"early must be '', 'wait' or 'b', got {early!r}")
    if early == "b" and not able:
        raise ValueError("early='b' needs b's tiles to be loaded ahead into registers")


def with_early(configs: list[C], ways: Sequence[str]) -> list[C]:
    """A kernel's configs, best guess first, and after that guess, way by way, those of the first
    configs that can."""
    variants: list[C] = []
    for early in ways:
        able: list[C] = []
        for config in configs:
            if len(able) < _EARLY_TRIED:
                with contextlib.suppress(ValueError):  # not with such a config
                    able.append(replace(config, early=early))  # type: ignore[call-arg]
        variants += able
    return [*configs[:1], *variants, *configs[1:]]


def ways(problem: Problem) -> tuple[str, ...]:
    """What a kernel in plain Triton may do early for ``problem``: only where reading b is all there
    is to do does the end of a launch count."""
    if problem.m > FEW_ROWS or problem.batch > 1 or problem.device.capability[0] < 9:
        return ()
    return ("b", "wait") if problem.static_weights else ("wait",)
