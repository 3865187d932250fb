"""Subclasses of a model's own classes, to which ``convert`` changes modules in place.

A module keeps its identity, its attributes and hooks, and stays an instance of its own class.
Copies and pickles of it refer to what its class was made of, since the class itself cannot be
imported.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn

_made: dict[Any, type[nn.Module]] = {}


def subclass(
    kind: Any, base: type | None, key: Any, origin: tuple[Any, ...], **attributes: Any
) -> Any:
    """A subclass of ``kind`` of the same name; the same one for the same key.

    Args:
        base: Inherited before ``kind``; None: nothing is.
        key: What ``attributes`` follow from.
        origin: A function and its arguments, which give the class where it is read from a pickle.
    """
    found = _made.get((kind, base, key))
    if found is not None:
        return found

    def reduce(module: Any, protocol: Any) -> Any:
        reduced = super(made, module).__reduce_ex__(protocol)
        function, given, *rest = reduced
        if function is not copyreg.__newobj__ or given[0] is not made:  # type: ignore[attr-defined]
            return reduced
        return (_new, (recipe,), *rest)

    bases = (kind,) if base is None else (base, kind)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names |= {"__doc__": kind.__doc__, "__reduce_ex__": reduce, "_tmm_kind": kind}
    made: Any = type(kind)(kind.__name__, bases, names | attributes)
    recipe = _Recipe(made, *origin)
    _made[kind, base, key] = made
    return made


class _Recipe:
    """A class: in a copy itself, in a pickle how to make it again."""

    def __init__(self, made: type, function: Callable[..., Any], *arguments: Any) -> None:
        self.made = made
        self._origin = function, arguments

    def __deepcopy__(self, memo: Any) -> _Recipe:
        return self

    def __reduce__(self) -> Any:
        return _read, self._origin


def _read(function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Recipe:
    return _Recipe(function(*arguments), function, *arguments)


def _new(recipe: _Recipe) -> Any:
    made: Any = recipe.made
    return made.__new__(made)


def own(kind: type[nn.Module]) -> type[nn.Module]:
    """``kind`` itself, or what it was made a subclass of."""
    return getattr(kind, "_tmm_kind", kind)


def itself(kind: type[nn.Module]) -> type[nn.Module]:
    return kind
