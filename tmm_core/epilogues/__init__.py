"""The epilogues that every installation has, one module per family, and how callers name them.

A family is a module with its ``EPILOGUES`` and a place in the list below.

>>> parse("silu").name
'silu'
>>> parse("gelu_tanh+softcap(30)").key
'gelu_tanh+softcap(30.0)'
"""

from __future__ import annotations

import copyreg
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tmm_core.epilogues import activations, clamped, gated
from tmm_core.epilogues.spellings import ALIASES, text_of
from tmm_core.errors import UnknownNameError
from tmm_core.spec.epilogue import IDENTITY, Epilogue, EpilogueLike
from tmm_core.spec.port import Port

#: All by name.
EPILOGUES: Mapping[str, Epilogue] = {
    epilogue.name: epilogue
    for family in (activations, gated, clamped)
    for epilogue in family.EPILOGUES
}
#: Those whose name alone is their key.
BUILTIN = {name: epilogue for name, epilogue in EPILOGUES.items() if epilogue.builtin}

_TERM = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\((?P<args>[^()]*)\))?\s*(?:@(?P<digest>[0-9a-f]{12}))?\s*"
)


def parse(text: EpilogueLike, known: Mapping[str, Epilogue] = BUILTIN) -> Epilogue:
    """Parse a caller's ``epilogue=`` into an :class:`Epilogue`.

    Accepts ``None`` (identity), an :class:`Epilogue`, a string such as ``"silu"``,
    ``"softcap(30)"`` or the chain ``"gelu_tanh+softcap(30)"``, a key as in records, a torch
    activation such as ``F.silu``, ``nn.GELU(approximate="tanh")`` or ``partial(F.gelu,
    approximate="tanh")``, and a sequence of these.

    Raises:
        UnknownNameError: A name that is not in ``known``; the message has near matches.
        ValueError: The text does not parse, a parameter is not a number, or a key belongs to other
            source than the current epilogue of that name.
        TypeError: It is not an accepted type, or a function that is not a torch activation; the
            message shows what to write.
    """
    if text is None:
        return IDENTITY
    if isinstance(text, Epilogue):
        return text
    if isinstance(text, str):
        # At plus signs, except for those inside numbers such as 1e+3.
        terms = re.split(r"\+(?![^()]*\))", text)
        parts: list[Epilogue] = [_parse_term(term, text, known) for term in terms]
    elif isinstance(text, Sequence):
        parts = [parse(part, known) for part in text]
    elif callable(text):
        parts = [_parse_term(text_of(text), "", BUILTIN)]
    else:
        raise TypeError(f"epilogue must be a str or an Epilogue, got {type(text).__name__}")
    return functools.reduce(Epilogue.then, parts, IDENTITY)


def _parse_term(term: str, whole: str, known: Mapping[str, Epilogue]) -> Epilogue:
    match = _TERM.fullmatch(term)
    if match is None:
        raise ValueError(
            f"cannot parse epilogue {whole!r}; expected name, name(number, …) or a chain a+b"
        )
    name, args = match["name"], match["args"]
    if name not in known:
        name = ALIASES.get(name, name)
    if name not in known:
        raise UnknownNameError("epilogue", name, known)
    found = known[name]
    if args is not None:
        try:
            values = [float(a) for a in args.split(",")] if args.strip() else []
        except ValueError:
            raise ValueError(f"epilogue {whole!r}: parameters must be numbers") from None
        found = found.with_parameters(*values)
    if match["digest"] and found.key != re.sub(r"\s", "", term):
        raise ValueError(f"epilogue {term.strip()!r} has other source than {found.key!r} here")
    return found


def _named(text: str, outputs: tuple[Port, ...]) -> Epilogue:
    return replace(parse(text), outputs=outputs) if outputs else parse(text)


def _reduced(epilogue: Epilogue) -> tuple[Any, ...]:
    """For pickle: a built-in one by its name, since its functions are lambdas; a chain by its
    stages; another by its fields, without what was derived from them."""
    if epilogue.stages:
        return functools.reduce, (Epilogue.then, epilogue.stages)
    if epilogue.builtin:
        return _named, (replace(epilogue, outputs=()).key, epilogue.outputs)
    state = {each.name: getattr(epilogue, each.name) for each in fields(epilogue)}
    return copyreg.__newobj__, (Epilogue,), state  # type: ignore[attr-defined]


copyreg.pickle(Epilogue, _reduced)
