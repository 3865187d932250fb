"""Prepares a public call for its operator: turns epilogues into text, which a tracer keeps as a
constant, and registers the DTensor rules."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from tmm_core import compat, dispatch
from tmm_core.launch.warm import epilogue_of
from tmm_core.spec.epilogue import Epilogue, EpilogueLike


def text_of(epilogue: EpilogueLike) -> str:
    """The text of an epilogue, as the operator takes it."""
    if epilogue is None:
        return ""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return epilogue if isinstance(epilogue, str) else _parsed_text(epilogue)


def interned_text(epilogue: EpilogueLike) -> str:
    """:func:`text_of`, with the epilogue stored where a tracer finds it without tracing the
    registry."""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return _parsed_text(epilogue or None)


def _parsed_text(epilogue: Any) -> str:
    return dispatch.default_dispatcher().registry.epilogue(epilogue).interned()


def has_outputs(text: str) -> bool:
    """Whether the epilogue of that text has auxiliary outputs."""
    return bool(epilogue_of(text).outputs)


# As Epilogue.interned.
_parsed_text._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_outputs._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def prepare_for(kind: type[torch.Tensor]) -> None:
    """Register the sharding rules when a DTensor is first seen: importing them takes 1.5 s."""
    if issubclass(kind, compat.dtensor()):
        importlib.import_module("tmm_core.interop.sharding")
