"""Counters and flags by which the programs of one launch wait for each other."""

from __future__ import annotations

from typing import ClassVar

import torch

#: Launches of one launcher under capture whose counters are zeroed ahead.
_CAPTURES = 64


class Counters:
    """Counters or flags of one launcher: int32 zeros, which every launch leaves zero.

    Launches that may run at the same time must not share them. Eager launches on one stream
    never do, so each stream has its own. A captured launch may be replayed on any stream at
    any time, so each gets its own too, from a reserve zeroed beforehand: zeroing inside the
    graph would be one more node in every replay. Nothing tells when a graph is gone, so a
    reserve that was drawn from is kept for the life of the process (4 bytes a tile and use).

    Args:
        count: How many counters one launch needs.
    """

    _captured: ClassVar[list[torch.Tensor]] = []

    def __init__(self, count: int) -> None:
        self._count = count
        self._device = torch.cuda.current_device()
        self._by_stream: dict[int, torch.Tensor] = {}
        self._reserve: list[torch.Tensor] = []
        if not torch.cuda.is_current_stream_capturing():
            self._reserve = list(self._zeros(_CAPTURES * count).split(count))
            # The first replay need not be on this stream, nor ordered after it.
            torch.cuda.current_stream().synchronize()

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{self._device}")

    def __call__(self) -> torch.Tensor:
        """The counters for a launch on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            if not self._reserve:
                return self._zeros(self._count)
            own = self._reserve.pop()
            self._captured.append(own)
            return own
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        known = self._by_stream.get(stream)
        return (
            self._by_stream.setdefault(stream, self._zeros(self._count)) if known is None else known
        )
