"""Identifies a user's function or object by everything that its results depend on.

A function is its bytecode, constants, defaults and the values that it reads: closure variables,
globals, attributes of modules, and the state of the objects among them. Two functions with equal
identities compute the same. The digest is the same in every process, whatever its hash seed, unless
a part has no such description (a lock, a generator, an object written in C): that part stands for
itself alone, and the digest is used by no other process.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from tmm_core.errors import reraise
from tmm_core.spec import closures
from tmm_core.spec.libraries import (
    CODE,
    LIBRARIES,
    hides,
    is_followed,
    is_jitted,
    library_name,
)

#: Attributes of a class that do not affect results, or that Python derives from others.
_DERIVED = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__",
     "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
     "__static_attributes__", "__orig_bases__", "__parameters__", "__dataclass_params__",
     "__dataclass_fields__", "__match_args__", "__slots__", "__classcell__", "_abc_impl",
     "__abstractmethods__", "__slotnames__")
)  # fmt: skip
#: Globals that say where a module is.
_PLACES = frozenset(("__file__", "__path__", "__cached__", "__loader__", "__spec__"))
#: More parts than this are not followed: whoever has them reaches half of a library.
_MOST_PARTS = 20_000
#: Bytes of a tensor whose values are read.
_MOST_BYTES = 2**20
#: Differs in every process.
_PROCESS = os.urandom(16).hex()
#: Objects that stand for themselves, by id: kept, so that no other object gets the id.
_kept: dict[int, Any] = {}


@dataclass(frozen=True, eq=False)
class Identity:
    """The identity of an object.

    Attributes:
        digest: 64 hexadecimal digits.
        lasting: The digest is the same in every process.
        state: The objects reached whose contents may change later: instances, containers, tensors
            and the globals that a function reads numbers from.
    """

    digest: str
    lasting: bool
    state: tuple[Any, ...]

    def same(self, other: Identity) -> bool:
        """Whether both are equal now and read the same objects, so that they stay equal."""
        return self.digest == other.digest and [*map(id, self.state)] == [*map(id, other.state)]


def identify(*values: Any, without: Iterable[str] = (), libraries: Iterable[str] = ()) -> Identity:
    """The identity of ``values`` together.

    Args:
        without: Names of attributes of instances and classes that are left out.
        libraries: More packages whose functions and classes are identified by name.
    """
    walk = _Walk(frozenset(without), LIBRARIES.union(libraries))
    for value in values:
        walk.add(value)
    return Identity(walk.hash.hexdigest(), walk.lasting, tuple(walk.state.values()))


class _TooManyError(Exception):
    """The object reaches too much to be followed."""


class _Walk:
    """Writes a description of objects into a hash. Each part begins with its kind, and texts with
    their length, so that no two objects have one description."""

    def __init__(self, without: frozenset[str], libraries: frozenset[str]) -> None:
        self.hash = hashlib.sha256()
        self.lasting = True
        #: By id.
        self.state: dict[int, Any] = {}
        #: The place of each object that may contain itself, by id. The objects are kept for their
        #: ids.
        self._seen: dict[int, int] = {}
        self._holding: list[Any] = []
        self._parts = 0
        self._without, self._libraries = without, libraries

    def text(self, kind: str, *texts: str) -> None:
        self.hash.update(
            "".join(f"{len(t)}:{t}" for t in (kind, *texts)).encode("utf-8", "replace")
        )

    def add(self, value: Any) -> None:
        try:
            self._add(value)
        except Exception as error:  # a stranger's descriptor, or too deep
            reraise(error)
            self._itself(value)

    def _itself(self, value: Any) -> None:
        """An object without a description."""
        self.lasting = False
        _kept[id(value)] = value
        self.text("itself", _PROCESS, str(id(value)))

    def _add(self, value: Any) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _TooManyError
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes, type(...)):
            self.text(kind.__name__, repr(value))
        elif kind in (tuple, torch.Size):
            self._sequence("tuple", value)
        elif kind is frozenset:
            self._unordered(value)
        elif kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
            self.text("torch", repr(value))
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.ModuleType):
            self.text("module", value.__name__)
        elif (name := library_name(value, self._libraries)) is not None:
            self.text("library", name)
        elif isinstance(value, types.CellType):
            self._cell(value)
        elif id(value) in self._seen:
            self.text("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._holding.append(value)
            self._compound(value, kind)

    def _compound(self, value: Any, kind: type) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.text("method")
            self._all(value.__func__, value.__self__)
        elif isinstance(value, types.BuiltinMethodType):
            self.text("builtin", value.__name__, str(value.__module__))
            self._add(value.__self__)
        elif isinstance(value, (types.MethodWrapperType, types.MethodDescriptorType)):
            self.text("slot", value.__name__)
            self._add(getattr(value, "__self__", value.__objclass__))
        elif isinstance(value, functools.partial):
            self.text("partial")
            self._all(kind, value.func, value.args, tuple(value.keywords.items()), vars(value))
        elif kind in (staticmethod, classmethod):
            self.text(kind.__name__)
            self._add(value.__func__)
        elif kind is property:
            self.text("property")
            self._all(value.fget, value.fset, value.fdel)
        elif kind is functools.cached_property:
            self.text("cached_property")
            self._add(value.func)
        elif kind is functools._lru_cache_wrapper:
            self.text("cached")
            self._add(value.__wrapped__)
        elif kind is types.MappingProxyType:
            self._items("mapping", value)
        elif is_jitted(value):
            self._jitted(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self.state[id(value)] = value
            self._instance(value, kind)

    def _all(self, *values: Any) -> None:
        for value in values:
            self.add(value)

    def _sequence(self, kind: str, values: Iterable[Any]) -> None:
        values = list(values)
        self.text(kind, str(len(values)))
        self._all(*values)

    def _items(self, kind: str, mapping: Any) -> None:
        """In the mapping's order, which results may depend on."""
        self._sequence(kind, chain.from_iterable(dict.items(mapping) if isinstance(mapping, dict)
                                                 else mapping.items()))  # fmt: skip

    def _unordered(self, values: Iterable[Any]) -> None:
        """A set, whose order depends on the process's hash seed."""
        digests = []
        for value in values:
            apart = _Walk(self._without, self._libraries)
            apart._seen, apart._holding = dict(self._seen), self._holding
            apart._parts = self._parts
            apart.add(value)
            self._parts = apart._parts
            self.lasting &= apart.lasting
            self.state |= apart.state
            digests.append(apart.hash.hexdigest())
        self.text("set", *sorted(digests))

    def _cell(self, cell: types.CellType) -> None:
        try:
            self.add(cell.cell_contents)
        except ValueError:
            self.text("empty cell")

    def _code(self, code: types.CodeType) -> None:
        self.text("code", code.co_code.hex(), getattr(code, "co_exceptiontable", b"").hex())
        self._all(
            *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
            *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            code.co_consts,
        )

    def _function(self, function: types.FunctionType) -> None:
        self.text("function")
        self._code(function.__code__)
        self._all(function.__defaults__, function.__kwdefaults__, function.__closure__)
        read_only = {*map(id, closures.read_only(function))}
        written = [cell for cell in function.__closure__ or () if id(cell) not in read_only]
        self.state |= {id(cell): cell for cell in written}
        # functools.wraps leaves the wrapped function here; it runs through the closure.
        own = {k: v for k, v in vars(function).items() if k != "__wrapped__"}
        self._items("attributes", own)
        self._read(function)

    def _read(self, function: types.FunctionType) -> None:
        """The globals that a function reads, and attributes of the modules among what it reads."""
        scope = function.__globals__
        read = dict.fromkeys(closures.names(function.__code__))
        names = [name for name in read if name not in _PLACES]
        # Whoever looks an attribute up by a text has the text among the constants.
        texts = [
            c for c in closures.constants(function.__code__) if type(c) is str and c.isidentifier()
        ]
        cells = [closures.contents(cell) for cell in function.__closure__ or ()]
        reads = [(name, scope[name]) for name in names if name in scope]
        modules = [
            value
            for value in [*(v for _, v in reads), *cells]
            if is_followed(value, self._libraries)
        ]
        modules += self._imported(function)
        operator = "ops" in names and any(value is torch for _, value in reads)
        if operator and not {"aten", "prims"} & set(names):
            self._itself(function)  # whoever registered the operator may change it
        for name, value in reads:
            self.text("global", name)
            self.add(value)
            if not isinstance(value, CODE):
                # Another function of the same code may read other globals, later.
                self.state[id(scope)] = scope
        followed: set[int] = set()
        while modules:
            module = modules.pop(0)
            if id(module) in followed:
                continue
            followed.add(id(module))
            for name in dict.fromkeys((*names, *texts)):
                if name in vars(module):
                    value = vars(module)[name]
                    self.text("attribute", module.__name__, name)
                    self.add(value)
                    if is_followed(value, self._libraries):
                        modules.append(value)

    def _imported(self, function: types.FunctionType) -> Iterator[types.ModuleType]:
        """The modules that a function imports when it runs."""
        for code in closures.codes(function.__code__):
            level = 0
            for step in (
                dis.get_instructions(code) if "IMPORT_NAME" in closures.operations(code) else ()
            ):
                if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(step.argval) is int:
                    level = step.argval
                if step.opname != "IMPORT_NAME":
                    continue
                name = step.argval
                if level:
                    package = function.__globals__.get("__package__") or ""
                    parent = package.rsplit(".", level - 1)[0] if level > 1 else package
                    name = f"{parent}.{name}".rstrip(".")
                if name.partition(".")[0] in self._libraries:
                    continue
                module = sys.modules.get(name)
                if module is None:  # its code is not known yet
                    self._itself(function)
                else:
                    yield sys.modules[name.partition(".")[0]]
                    yield module

    def _jitted(self, value: Any) -> None:
        """A ``@triton.jit`` function, compiled or interpreted."""
        self.text("jitted", str(getattr(value, "src", "")))
        self._add(value.fn)

    def _class(self, kind: type) -> None:
        self.text("class")
        self._sequence("bases", kind.__bases__)
        self.add(type(kind))
        self._attributes(vars(kind))

    def _attributes(self, attributes: Any) -> None:
        names = [name for name in attributes if name not in _DERIVED and name not in self._without]
        for name in sorted(names, key=str):
            value = attributes[name]
            if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue  # of a slot, whose value is an instance's
            self.text("attribute", str(name))
            self.add(value)

    def _instance(self, value: Any, kind: type) -> None:
        self.text("instance")
        self.add(kind)
        if kind is object:
            return  # a sentinel: only which object it is counts, as "again" tells
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, dict):
            self._items("dict", value)
        elif isinstance(value, (list, tuple)):
            self._sequence("list", value)
        elif isinstance(value, (set, frozenset)):
            self._unordered(value)
        elif base := next((each for each in _SCALARS if isinstance(value, each)), None):
            self.text("value", base.__repr__(value))
        elif any(map(hides, kind.__mro__[:-1])):
            self._reduced(value)
        self._attributes({**getattr(value, "__dict__", {}), **dict(_slots(value, kind))})

    def _tensor(self, t: torch.Tensor) -> None:
        if t.device.type != "cpu" or t.numel() * t.element_size() > _MOST_BYTES or t.is_sparse:
            raise TypeError("its values are not read")
        flat = t.detach().as_subclass(torch.Tensor).reshape(-1).contiguous()
        self.text("tensor", str(t.dtype), str(tuple(t.shape)), str(t.requires_grad))
        self.hash.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")

    def _reduced(self, value: Any) -> None:
        """An object whose state no attribute shows, as pickle takes it apart."""
        taken_apart = copyreg.dispatch_table.get(type(value))
        reduced = taken_apart(value) if taken_apart is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            module = type(value).__module__
            if getattr(sys.modules.get(module), reduced, None) is not value:
                raise TypeError("pickle does not find it either")
            self.text("reduced", module, reduced)
            return
        made, *parts = reduced
        plain = made is copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed lacks it
        if plain and not any(parts[1:]) and len(tuple(parts[0] or ())) == 1:
            raise TypeError("its state is not told")
        for part in (made, *parts):
            self.add(list(part) if isinstance(part, Iterator) else part)


#: Classes of one value, which their own representation tells.
_SCALARS = (int, float, complex, str, bytes, bytearray)


def _slots(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    for each in kind.__mro__:
        for name, member in vars(each).items():
            if isinstance(member, types.MemberDescriptorType) and name not in _DERIVED:
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # not set
                    continue
