"""The epilogues that every installation has, and how callers name them.

Each other module of this package defines an epilogue and its relatives as ``EPILOGUES``, and other
ways to name them as ``SPELLINGS``. Modules are discovered automatically: a new epilogue is one
file, and removing the file removes the epilogue.

>>> parse("silu").name
'silu'
>>> parse("gelu_tanh+softcap(30)").key
'gelu_tanh+softcap(30.0)'
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from tmm_base.guards import suppress
from torch import nn

from tmm_core.epilogues._gated import GATED_BY
from tmm_core.errors import UnknownNameError
from tmm_core.spec.epilogue import IDENTITY, INTERNED, Epilogue, EpilogueLike
from tmm_core.spec.port import Port

__all__ = ["BUILTIN", "EPILOGUES", "GATED_BY", "SPELLINGS", "parse", "text_of"]

#: All epilogues by name.
EPILOGUES: dict[str, Epilogue] = {IDENTITY.name: IDENTITY}
#: Names of epilogues by other names, torch's functions and classes of modules. A function of the
#: activation's arguments returns the name, or None if no epilogue has these arguments.
SPELLINGS: dict[Any, str | Callable[..., str | None]] = {nn.Identity: IDENTITY.name}
for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):  # functions that several epilogues share
        _family = importlib.import_module(f"{__name__}.{_module.name}")
        EPILOGUES.update({epilogue.name: epilogue for epilogue in _family.EPILOGUES})
        SPELLINGS.update(getattr(_family, "SPELLINGS", {}))
#: Epilogues whose name alone is their key.
BUILTIN = {name: epilogue for name, epilogue in EPILOGUES.items() if epilogue.builtin}
#: Names of the elementwise epilogues without parameters.
ACTIVATIONS = tuple(name for name, epilogue in EPILOGUES.items() if epilogue.activation)
#: In float64, equivalent formulas differ by some 1e-15; the two gelus by 1e-4.
TOLERANCE = 1e-12
#: Factors on numbers from −40 to 40: some functions differ only near zero, or only far from it.
_RANGES = (250.0, 2.0**-10, 2.0**-20, 2.0**-30)
# So the operator finds them without the registry, which torch.compile cannot trace.
INTERNED.update(BUILTIN)

_TERM = re.compile(
    r"\s*(?P<name>[^\W\d]\w*)\s*(?:\((?P<args>[^()]*)\))?\s*(?:@(?P<digest>[0-9a-f]{12}))?\s*"
)


def parse(text: EpilogueLike, known: Mapping[str, Epilogue] = BUILTIN) -> Epilogue:
    """Parse a caller's ``epilogue=`` into an :class:`Epilogue`.

    Accepted are:

    - ``None`` (identity), or an :class:`Epilogue`;
    - a string such as ``"silu"``, ``"softcap(30)"`` or the chain ``"gelu_tanh+softcap(30)"``, or a
      key as in records;
    - a torch activation such as ``F.silu``, ``nn.GELU(approximate="tanh")`` or ``partial(F.gelu,
      approximate="tanh")``;
    - a sequence of these.

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
        name = str(SPELLINGS.get(name, name))
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


def text_of(activation: Callable[..., Any]) -> str:
    """The epilogue's text for a torch activation: a function, a module or a partial.

    >>> text_of(nn.SiLU()), text_of(nn.GELU(approximate="tanh")), text_of(nn.LeakyReLU(0.2))
    ('silu', 'gelu_tanh', 'leaky_relu(0.2)')

    Raises:
        TypeError: It is not an activation, or has arguments that no epilogue has; the message shows
            the :class:`~tmm_core.Epilogue` to write.
    """
    given: dict[str, Any] = {}
    function: Any = activation
    if isinstance(function, functools.partial) and not function.args:
        # Without ``inplace``: nothing else uses the product.
        given = {k: v for k, v in function.keywords.items() if k != "inplace"}
        function = function.func
    text = None
    with suppress(TypeError):  # unhashable
        text = SPELLINGS.get(type(function) if isinstance(function, nn.Module) else function)
    if callable(text):
        arguments = inspect.signature(text).parameters
        if isinstance(function, nn.Module):
            given = {name: getattr(function, name) for name in arguments}
        text = None if given.keys() - arguments.keys() else text(**given)
    elif given:
        text = None
    if text is None or isinstance(function, type):
        raise TypeError(_refusal(activation))
    return text


def named(
    function: Callable[[torch.Tensor], Any], candidates: Iterable[str] = ACTIVATIONS
) -> str | None:
    """Return the candidate whose values equal ``function``'s near zero and far from it; None if
    there is none."""
    usual = torch.linspace(-40.0, 40.0, 4001, dtype=torch.float64, device="cpu")
    grid = torch.cat([usual, *(usual * factor for factor in _RANGES)])
    with torch.no_grad():
        got = function(grid.clone())
        if not isinstance(got, torch.Tensor) or got.shape != grid.shape or got.dtype != grid.dtype:
            return None
        for name in candidates:
            expected = parse(name).apply(grid)
            # A softcap may be small.
            atol = TOLERANCE * min(1.0, float(expected.abs().max()))
            if torch.allclose(got, expected, rtol=TOLERANCE, atol=atol):
                return name
    return None


def _refusal(activation: Any) -> str:
    if isinstance(activation, type):
        return f"epilogue: {activation.__name__} is a class; pass an instance of it"
    jitted = hasattr(activation, "fn") and hasattr(activation, "arg_names")
    name = getattr(activation, "__name__", "")
    if not isinstance(name, str) or not name.isidentifier():
        name = "my_epilogue"
    if jitted:
        return (
            f"epilogue: {name} is only a @triton.jit function, and kernels are verified "
            f"against a reference in torch: write tmm_core.Epilogue({name!r}, "
            f"reference=lambda z: …, device={name}), the same function of a tensor z"
        )
    return (
        f"epilogue: {activation!r} is not a known activation: write "
        f"tmm_core.Epilogue({name!r}, reference=…), a function of the product in torch, and give "
        "it device=…, the same function in Triton's language, for kernels to fuse it"
    )


def _named(text: str, outputs: tuple[Port, ...]) -> Epilogue:
    return replace(parse(text), outputs=outputs) if outputs else parse(text)


def _of_fields(given: dict[str, Any]) -> Epilogue:
    return Epilogue(**given)


def _reduced(epilogue: Epilogue) -> tuple[Any, ...]:
    """Return what pickle stores. A built-in epilogue is stored by its name, since its functions are
    lambdas. A chain is stored by its stages, others by their fields, except derived ones."""
    if epilogue.stages:
        return functools.reduce, (Epilogue.then, epilogue.stages)
    if epilogue.builtin:
        return _named, (replace(epilogue, outputs=()).key, epilogue.outputs)
    given = {each.name: getattr(epilogue, each.name) for each in fields(epilogue)}
    return _of_fields, (given,)


copyreg.pickle(Epilogue, _reduced)
