"""Subclasses of a model's own classes, to which ``convert`` changes modules in place.

A module keeps its identity, its attributes and hooks, and stays an instance of its own class.
The new class cannot be imported, so copies and pickles of the module refer to its recipe.
"""

from __future__ import annotations

import abc
import copyreg
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from tmm_core.launch import warm
from tmm_core.settings import with_static_weights
from tmm_core.spec.code import is_own

_made: dict[Any, type[nn.Module]] = {}


class _Unannounced(nn.Module):
    """The first base of the classes made here. A model's classes do not hear of them: these may
    keep each subclass under its name, require arguments or refuse subclasses."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def subclass(
    kind: Any, base: type | None, key: Any, origin: tuple[Any, ...], **attributes: Any
) -> Any:
    """Return a subclass of ``kind`` with the name of ``kind``.

    Args:
        base: Another base class, which comes first; None: there is none.
        key: The same key returns the same class; its ``attributes`` must be equal then.
        origin: A function and its arguments, which make the class where a pickle is read.
        attributes: The attributes of the class.
    """
    found = _made.get((kind, base, key))
    if found is not None:
        return found

    def reduce(module: Any, protocol: Any) -> Any:
        reduced = super(made, module).__reduce_ex__(protocol)
        function, args, *rest = reduced
        if function is not copyreg.__newobj__ or args[0] is not made:  # type: ignore[attr-defined]
            return reduced
        return (_new, (recipe,), *rest)

    bases = (_Unannounced, kind) if base is None else (_Unannounced, base, kind)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names |= {"__doc__": kind.__doc__, "__reduce_ex__": reduce, "_tmm_kind": kind}
    # Neither does a metaclass hear of it, which may register each class under its name.
    maker = next(each for each in type(kind).__mro__ if each in (type, abc.ABCMeta))
    made: Any = maker.__new__(type(kind), kind.__name__, bases, names | attributes)
    made._tmm_recipe = recipe = _Recipe(made, *origin)
    _made[kind, base, key] = made
    return made


def against_base(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Why a class of ``base`` cannot replace the class of ``module``; None if it can. What ``base``
    defines comes first, and may not hide what the module has under the same name."""
    theirs = {name for kind in type(module).__mro__ for name in vars(kind)} | vars(module).keys()
    hidden = sorted(theirs & _names_of(base))
    return f"it has a {hidden[0]} of its own" if hidden else None


def forget(module: nn.Module) -> None:
    """Remove the attributes that a module got while it was of a class of tmm's."""
    for name in vars(module).keys() & _names_of(type(module)):
        del vars(module)[name]


def _names_of(base: type[nn.Module]) -> set[str]:
    """Return the names that tmm's own classes among the bases of ``base`` define."""
    names = {name for kind in base.__mro__ if is_own(kind) for name in vars(kind)}
    return {name for name in names - {*dir(nn.Module)} if not name.startswith("__")}


class _Recipe:
    """Refers to a made class: a copy keeps the class, a pickle keeps how to make it again."""

    def __init__(self, made: type, function: Callable[..., Any], *arguments: Any) -> None:
        self.made = made
        self._origin = function, arguments

    def __deepcopy__(self, memo: Any) -> _Recipe:
        return self

    def __reduce__(self) -> Any:
        return _read, self._origin


def _read(function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Recipe:
    return _Recipe(function(*arguments), function, *arguments)


def reference(kind: type) -> Any:
    """Return what a pickle can hold of a class: itself, or the recipe of a made one."""
    return vars(kind).get("_tmm_recipe", kind)


def referred(reference: Any) -> Any:
    """Return the class of a :func:`reference`."""
    return reference.made if isinstance(reference, _Recipe) else reference


def _new(recipe: _Recipe) -> Any:
    made: Any = recipe.made
    return made.__new__(made)


class ProductLayer(nn.Module):
    """Base of the classes of layers whose one product tmm computes."""

    #: Run the product under the setting ``static_weights``. Assign to change it. It is ignored if
    #: the layer has hooks of its ``state_dict``. FSDP2 adds one to each layer that it shards, and
    #: writes the weights immediately before the product reads them.
    static_weights = False
    #: The class of layers whose product can take an epilogue. A subclass is not of this class.
    computes_product: ClassVar[type]
    #: The text of the layer's own epilogue.
    _text = ""
    #: The library's class, and its forward as tmm's product replaces it.
    _library: ClassVar[Any]
    _theirs: ClassVar[Any]

    @classmethod
    def replaced(cls) -> bool:
        """Whether other code has replaced the forward of the library's class since."""
        return cls._library.forward is not cls._theirs

    def _by_library(self, x: Any) -> Any:
        """Return the result of the forward that the library's class has now."""
        y = self._library.forward(self, x)
        return warm.epilogue_of(self._text).apply(y).to(y.dtype) if self._text else y

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)``, under the setting if it is set."""
        if self.static_weights and not self._state_dict_pre_hooks:
            return with_static_weights(function, *arguments)
        return function(*arguments)

    @classmethod
    def swapped(cls, kind: type[nn.Module]) -> Any:
        """Return the subclass of a library's class ``kind`` with this product."""
        facts = {"_library": kind, "_theirs": kind.forward}
        made = subclass(kind, cls, kind.forward, (cls.swapped, kind), **facts)
        made.computes_product = made
        return made


def replaced(kind: Any) -> bool:
    """Whether the forward of a library's class is not of the class's own file."""
    return not defined_by(kind.forward, kind)


def defined_by(function: Any, kind: Any) -> bool:
    """Whether a method was written in the file of the class, and not put there by other code."""
    return getattr(function, "__globals__", None) is vars(sys.modules[kind.__module__])


def loaded(module: str, name: str) -> Any:
    """A class of another library; None until it is imported: no model has an instance before."""
    return getattr(sys.modules.get(module), name, None)


def own(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a made subclass replaces; ``kind`` itself if it was not made here."""
    return getattr(kind, "_tmm_kind", kind)
