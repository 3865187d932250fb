"""Samples whether the host or the GPU limits a process, for :func:`tmm_core.enable`.

GPU time that a kernel saves is worth nothing while the GPU waits for the host. Host time costs
nothing while the GPU is behind. A sample is an event that one call records and the next one
queries. If the GPU has not reached it by then, the GPU is behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tmm_base.guards import suppress

#: Calls between two samples at first, their increase after each sample, and their maximum.
INTERVAL, MORE, MOST = 16, 16, 256


class Pace:
    """The limit, host or GPU, of the calls of all operators of one :func:`enable`.

    Each call adds one to :attr:`calls`, and calls :meth:`look` once they reach :attr:`next`. After
    each sample ``review`` is called.

    Attributes:
        host, gpu: Whether host time and GPU time count. Both do before the first sample, and on a
            device that works while the host waits.
        chose: Whether a kernel was chosen, once and slowly, since the last sample.
    """

    __slots__ = ("_event", "_interval", "_review", "calls", "chose", "gpu", "host", "next")

    def __init__(self, review: Callable[[], object]) -> None:
        self.calls, self.chose = 0, False
        self.next: float = INTERVAL
        self.host = self.gpu = True
        self._review, self._interval = review, INTERVAL
        self._event: Any = None

    def look(self, operand: torch.Tensor) -> None:
        """Begin a sample, or end the one that the last call began."""
        if (limits := self._limits(operand)) is None:
            return
        self.host, self.gpu = limits
        self.next = math.inf  # calls that a review makes must not begin a sample
        try:
            self._review()
        finally:
            self.next = self.calls + self._interval
            self._interval = min(self._interval + MORE, MOST)
        self.chose = False

    def _limits(self, operand: torch.Tensor) -> tuple[bool, bool] | None:
        """Return :attr:`host` and :attr:`gpu`; None if they are known at a later call."""
        if not operand.is_cuda:
            return True, True
        event, self._event = self._event, None
        self.next = self.calls + self._interval
        if torch.cuda.is_current_stream_capturing():  # events cannot be queried then
            return None
        with suppress(RuntimeError):  # another thread captures, or the launch will raise too
            if event is not None:
                waits = bool(event.query())
                return waits, not waits
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(operand.device))
            self._event, self.next = event, self.calls + 1
        return None
