"""Epilogues as operators take them: by text, which a tracer keeps as a constant."""

from __future__ import annotations

from typing import Any

from tmm_core import dispatch
from tmm_core.spec.epilogue import Epilogue, EpilogueLike


def text_of(epilogue: EpilogueLike) -> str:
    """The operator's argument for this epilogue."""
    if epilogue is None:
        return ""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return epilogue if isinstance(epilogue, str) else _parsed_text(epilogue)


def interned_text(epilogue: EpilogueLike) -> str:
    """Likewise, left where a tracer finds the epilogue without tracing the registry."""
    if isinstance(epilogue, Epilogue):
        return epilogue.interned()
    return _parsed_text(epilogue or None)


def _parsed_text(epilogue: Any) -> str:
    return dispatch.dispatcher().registry.epilogue(epilogue).interned()


_parsed_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as Epilogue.interned
