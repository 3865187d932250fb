"""Prepares a public call for its operator: turns epilogues into text, which a tracer stores as a
constant, and registers the DTensor rules."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tmm_core import compat, dispatch
from tmm_core.launch.warm import epilogue_of
from tmm_core.spec.epilogue import Epilogue, EpilogueLike


def text_of(epilogue: EpilogueLike) -> str:
    """Return the text by which the operator takes an epilogue."""
    if epilogue is None:
        return ""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return epilogue if isinstance(epilogue, str) else _parsed_text(epilogue)


def interned_text(epilogue: EpilogueLike) -> str:
    """Return :func:`text_of`, and store the epilogue so that no tracer enters the registry."""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return _parsed_text(epilogue or None)


def _parsed_text(epilogue: Any) -> str:
    return dispatch.default_dispatcher().registry.epilogue(epilogue).interned()


def has_outputs(text: str) -> bool:
    """Whether the epilogue of that text has auxiliary outputs."""
    return bool(epilogue_of(text).outputs)


def prepare_for(kind: type[torch.Tensor]) -> None:
    """Register the sharding rules at the first DTensor: importing them takes 1.5 s."""
    if issubclass(kind, compat.dtensor()):
        importlib.import_module("tmm_core.interop.sharding")


# See Epilogue.interned.
_parsed_text._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_outputs._dynamo_marked_constant = True  # type: ignore[attr-defined]
prepare_for._dynamo_marked_constant = True  # type: ignore[attr-defined]
