"""Prepares a public call for its operator: turns epilogues into text, which a tracer stores as a
constant, and registers the DTensor rules."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch

from tmm_core import compat, dispatch
from tmm_core.epilogues import SPELLINGS
from tmm_core.launch.warm import epilogue_of
from tmm_core.spec.epilogue import IDENTITY, Epilogue, EpilogueLike


def text_of(epilogue: EpilogueLike) -> str:
    """Return the text by which the operator takes an epilogue."""
    if epilogue is None:
        return ""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return epilogue if isinstance(epilogue, str) else _parsed_text(epilogue)


def traced_text_of(epilogue: EpilogueLike) -> str:
    """Return the epilogue's text, as :func:`text_of` does. While torch.compile traces, guard the
    graph by all that the text depends on: the text itself is a constant of the graph. Also store
    the epilogue, so that the tracer does not enter the registry."""
    if not torch.compiler.is_dynamo_compiling():
        return text_of(epilogue)
    if epilogue is None or isinstance(epilogue, str):
        # A name may stand for another function in a process that finds the graph in torch's cache.
        return _parsed_text(epilogue) if epilogue else ""
    if isinstance(epilogue, Epilogue):
        if not epilogue.traced:
            return _text_outside_graphs(epilogue)
        _guard(epilogue.traced)
        for read in epilogue.readers:
            value = read()
            if isinstance(value, (int, float, str)):
                _guard(value)
        return epilogue.interned()
    if isinstance(epilogue, (list, tuple)):
        return _chained(tuple([traced_text_of(each) for each in epilogue]))
    for name in _arguments_of(epilogue):
        _guard(getattr(epilogue, name))
    return _parsed_text(epilogue)


def _text_outside_graphs(epilogue: Epilogue) -> str:
    return epilogue.interned()


def is_traced(epilogue: EpilogueLike) -> bool:
    """Whether torch.compile traces the reference itself, and guards the graph by what it reads."""
    compiling = torch.compiler.is_dynamo_compiling()
    return compiling and isinstance(epilogue, Epilogue) and epilogue.traces


def traced(epilogue: Any, z: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return a call's result from its product, in torch's operators."""
    y: torch.Tensor = epilogue.applied(*epilogue.inputs(z))
    return (y if residual is None else y + residual).to(z.dtype)


def _guard(value: float | str) -> set[float | str]:
    """Guard a graph of torch.compile by this value: tracing a set needs numbers as they are. Torch
    2.10 does not trace hash()."""
    return {value}


def _parsed_text(epilogue: Any) -> str:
    return dispatch.default_dispatcher().registry.epilogue(epilogue).interned()


def _chained(texts: tuple[str, ...]) -> str:
    return functools.reduce(Epilogue.then, map(epilogue_of, texts), IDENTITY).interned()


def _arguments_of(activation: Any) -> tuple[str, ...]:
    """The attributes of torch's module of an activation on which the epilogue's text depends."""
    spelling = SPELLINGS.get(type(activation))
    return tuple(inspect.signature(spelling).parameters) if callable(spelling) else ()


def has_outputs(text: str) -> bool:
    """Whether the epilogue of that text has auxiliary outputs."""
    return bool(epilogue_of(text).outputs)


def prepare_for(kind: type[torch.Tensor]) -> None:
    """Register the sharding rules at the first DTensor: importing them takes 1.5 s."""
    if issubclass(kind, compat.dtensor()):
        importlib.import_module("tmm_core.interop.sharding")


# The effect of torch.compiler.disable, which would import the whole compiler.
_text_outside_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
# See Epilogue.interned.
_chained._dynamo_marked_constant = True  # type: ignore[attr-defined]
_arguments_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_parsed_text._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_outputs._dynamo_marked_constant = True  # type: ignore[attr-defined]
prepare_for._dynamo_marked_constant = True  # type: ignore[attr-defined]
