"""Detects launches that change the state of the process or thread, such as torch's default dtype.

A launch may change nothing but its output. A kernel that seeds torch's generator or enables TF32
would change results that have nothing to do with it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

_matmul = torch.backends.cuda.matmul

#: Maximum seconds for which a thread waits to see whether others draw random numbers.
_WATCHED = 0.1


class Piece(NamedTuple):
    """A piece of state: how to read it, and how to restore it (None: it cannot be restored)."""

    read: Callable[[], Any]
    write: Callable[[Any], Any] | None


def _attribute(owner: Any, name: str) -> Piece:
    return Piece(lambda: getattr(owner, name, None), lambda value: setattr(owner, name, value))


#: A denormal number: halved, it is zero where the processor flushes denormals.
_DENORMAL = 1e-310


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def _set_autocast(states: tuple[Any, ...]) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


#: Settings by name. No other thread changes them as a matter of course.
SETTINGS: dict[str, Piece] = {
    "torch's default dtype": Piece(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": Piece(
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "the number of torch's threads": Piece(torch.get_num_threads, torch.set_num_threads),
    "the grad mode": Piece(torch.is_grad_enabled, torch.set_grad_enabled),
    "the inference mode": Piece(torch.is_inference_mode_enabled, None),
    "autocast": Piece(_autocast, _set_autocast),
    "anomaly detection": Piece(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "torch's deterministic mode": Piece(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "the flushing of denormal numbers": Piece(
        lambda: _DENORMAL * 0.5 == 0, torch.set_flush_denormal
    ),
    "the fp32 precision of products": _attribute(_matmul, "fp32_precision"),
    "the fp32 precision of cuDNN": _attribute(torch.backends.cudnn, "fp32_precision"),
    "the reduced precision of fp16 sums": _attribute(
        _matmul, "allow_fp16_reduced_precision_reduction"
    ),
    "the reduced precision of bf16 sums": _attribute(
        _matmul, "allow_bf16_reduced_precision_reduction"
    ),
    "fp16 accumulation": _attribute(_matmul, "allow_fp16_accumulation"),
    "cuDNN's benchmark mode": _attribute(torch.backends.cudnn, "benchmark"),
    "cuDNN's deterministic mode": _attribute(torch.backends.cudnn, "deterministic"),
}


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, *rest = numpy.random.get_state()
    return kind, keys.tolist(), *rest


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _generator(module: Any) -> Piece:
    """The state of torch's generator of a module, as bytes, which can be compared."""

    def write(state: bytes) -> None:
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Piece(lambda: bytes(module.get_rng_state().numpy()), write)


#: States of random generators by name. Other threads may draw from them at any time.
GENERATORS: dict[str, Piece] = {
    "torch's random generator": _generator(torch),
    "Python's random generator": Piece(random.getstate, random.setstate),
    "NumPy's random generator": Piece(_numpy_state, _set_numpy_state),
}
CUDA_GENERATOR = {"torch's random generator of the GPU": _generator(torch.cuda)}
#: Further pieces where the launch is on a GPU.
ON_CUDA: dict[str, Piece] = {
    "the current CUDA device": Piece(torch.cuda.current_device, torch.cuda.set_device),
    "the current CUDA stream": Piece(torch.cuda.current_stream, torch.cuda.set_stream),
}


class State:
    """The state of this process and thread at one time."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._generators = GENERATORS | (CUDA_GENERATOR if cuda else {})
        self._pieces = SETTINGS | self._generators | (ON_CUDA if cuda else {})
        self._values = {name: piece.read() for name, piece in self._pieces.items()}

    def changed(self) -> list[str]:
        """Return the names of the pieces that differ now."""
        return [name for name, piece in self._pieces.items() if piece.read() != self._values[name]]

    def restore(self, names: list[str]) -> None:
        """Restore these pieces."""
        for name in names:
            if (write := self._pieces[name].write) is not None:
                write(self._values[name])

    def are_generators(self, names: list[str]) -> bool:
        """Whether all of these are random generators."""
        return set(names) <= self._generators.keys()


def watched(call: Callable[[], T], device: torch.device) -> tuple[T, list[str]]:
    """Make a launch, and restore the state; returns the result and the names of what it changed.

    Another thread may draw from a random generator. So a generator counts only if it also changes
    in a second launch, and does not change while this thread waits.
    """
    before = State(device)
    begun = time.perf_counter()
    result = call()
    if not (changed := before.changed()):
        return result, []
    taken = time.perf_counter() - begun
    before.restore(changed)
    if not before.are_generators(changed):
        return result, changed
    again = State(device)
    result = call()
    confirmed = again.changed()
    again.restore(confirmed)
    if not again.are_generators(confirmed):
        return result, confirmed
    idle = State(device)
    time.sleep(min(taken, _WATCHED))
    others = idle.changed()
    return result, [name for name in confirmed if name in changed and name not in others]
