"""``tmm::concurrent``: products of one matrix ``a``, on several streams in a CUDA graph.

A product of few rows reads its weight, and does not reach the bandwidth of memory while it starts
and while it ends. Products on other streams fill these gaps: query, key and value of one token take
23 µs in place of 29 µs on an H100 (``benchmarks/results/h100/concurrent.txt``). Streams cost the
host some 40 µs for each product, so they are used only while a CUDA graph is captured. Otherwise
the products run one after the other.

The pass over compiled graphs makes the calls (:mod:`tmm_core.interop.shared_input`). Where
gradients are needed, the products are separate calls.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from tmm_core.interop import operator
from tmm_core.interop.libraries import define
from tmm_core.launch.warm import run
from tmm_core.spec.arguments import ROLES, Arguments

Tensor = torch.Tensor

#: The most rows of ``a`` with which products share the GPU. With more, some take longer than one
#: after the other: 3 % of 256 rows, 13 % of 512.
MOST_ROWS = 64
#: The number of streams beside the current one.
_STREAMS = 3

#: Roles in the order of the operator's arguments.
_ROLES = tuple(role for role in ROLES if role.name != "out")
#: The arguments that each product has for itself: those with columns, and the epilogue.
OWN = tuple(r.name for r in _ROLES if "n" in r.dims.lower() or r.name == "epilogue")
#: The arguments that all products share.
SHARED = tuple(role.name for role in _ROLES if role.name not in OWN)
_IS_OWN = tuple(role.name in OWN for role in _ROLES)


@functools.cache
def _streams(device: torch.device, thread: int) -> list[torch.cuda.Stream]:
    """The further streams of a thread. Threads share none: a capture takes its streams."""
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]


def arguments(calls: list[Arguments]) -> tuple[Any, ...]:
    """Return the operator's arguments for these calls, which differ in :data:`OWN` only."""
    each = zip(*(call[:-1] for call in calls), strict=True)
    return tuple(
        list(values) if own else values[0] for own, values in zip(_IS_OWN, each, strict=True)
    )


def _calls(given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The inverse of :func:`arguments`, without ``out``."""
    count = len(given[1])  # of b
    each = [value if own else (value,) * count for own, value in zip(_IS_OWN, given, strict=True)]
    return list(zip(*each, strict=True))


def _run(*given: Any) -> list[Tensor]:
    calls = _calls(given)
    a = given[0]
    few = a.numel() <= MOST_ROWS * a.shape[-1]
    if few and a.is_cuda and torch.cuda.is_current_stream_capturing():
        return _at_once(calls, a.device)
    return [run(*call) for call in calls]


def _at_once(calls: list[tuple[Any, ...]], device: torch.device) -> list[Tensor]:
    """Compute the first product on the current stream, the others on further streams."""
    here = torch.cuda.current_stream(device)
    further = _streams(device, threading.get_ident())
    ready, ended = here.record_event(), []
    results = []
    try:
        for i, call in enumerate(calls[1:]):
            stream = further[i % _STREAMS]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                try:
                    results.append(run(*call))
                finally:
                    ended.append(stream.record_event())
        return [run(*calls[0]), *results]
    finally:
        for event in ended:
            here.wait_event(event)


def _one_by_one(*given: Any) -> list[Tensor]:
    matmul: Callable[..., Tensor] = operator.matmul
    return [matmul(*call) for call in _calls(given)]


_types = (f"{role.type}{'[]' if role.name in OWN else ''} {role.name}" for role in _ROLES)
define(f"concurrent({', '.join(_types)}) -> Tensor[]", _run, _one_by_one, _one_by_one)
concurrent = torch.ops.tmm.concurrent.default
