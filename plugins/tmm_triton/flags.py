"""Flags by which the programs of one launch wait for each other."""

from __future__ import annotations

from typing import ClassVar

import torch

from tmm_core.triton import current_stream

#: The number of captured launches of one launcher whose flags are zeroed in advance.
_CAPTURES = 64


class Counters:
    """Flags of one launcher: int32 zeros, which every launch leaves at zero.

    Launches that may run concurrently must not share them. Eager launches on one stream do not run
    concurrently, so there is one set per stream. A captured launch may be replayed on any stream at
    any time, so each gets its own set. The sets come from a reserve that was zeroed in advance,
    since zeroing inside the graph would add a node to every replay. The end of a graph's life is
    unknown, so a used set is kept for the life of the process (4 bytes per tile and use).

    Args:
        count: How many flags one launch needs.
    """

    _captured: ClassVar[list[torch.Tensor]] = []

    def __init__(self, count: int) -> None:
        self._count = count
        self._device = torch.cuda.current_device()
        self._by_stream: dict[int, torch.Tensor] = {}
        self._reserve: list[torch.Tensor] = []
        if not torch.cuda.is_current_stream_capturing():
            self._reserve = list(self._zeros(_CAPTURES * count).split(count))
            # The first replay may be on another stream, not ordered after this one.
            torch.cuda.current_stream().synchronize()

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{self._device}")

    def __call__(self) -> torch.Tensor:
        """Return the flags for a launch on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            if not self._reserve:
                return self._zeros(self._count)
            own = self._reserve.pop()
            self._captured.append(own)
            return own
        stream = current_stream(self._device)
        if (known := self._by_stream.get(stream)) is None:
            known = self._by_stream.setdefault(stream, self._zeros(self._count))
        return known
