"""Identifies the files of third parties' packages, so that an edited plugin is measured again.

All files of a package count, of any type, and all other files that its distribution installs. Other
packages that it imports do not count.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tmm_base.guards import OWN_PACKAGES, function_of, suppress
from tmm_base.stamps import stamp
from tmm_cache.fields import NAME_MAX

if TYPE_CHECKING:
    from tmm_core.formats import Format

#: Packages whose versions belong to a record's environment, or to Python's; and tmm's own.
LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "triton", "numpy"} | OWN_PACKAGES
#: The contents of a package's first files are read, up to this many bytes, which takes about 30 ms.
#: Later files count by size and modification time.
_MOST_BYTES = 32 * 2**20
#: A file counts as at least this many bytes: opening it takes as long as reading these.
_LEAST_BYTES = 8192
#: Hidden folders in which packages keep shared libraries.
_LIBRARY_FOLDERS = (".dylibs", ".libs")
#: Suffixes of the files and folders that an installer itself writes.
_INSTALLER_SUFFIXES = (".dist-info", ".egg-info", ".data", ".pth", "__pycache__")


def version_of(kernel: Any, stated: str, distribution: str = "") -> str:
    """Return the version under which a kernel's measurements are stored. A third party's ``stated``
    version is combined with a digest of files, since its author may forget to change it. The
    ``distribution`` that the kernel is from is empty if that is unknown."""
    if is_own(type(kernel)):
        return stated
    kinds = type(kernel), kernel.config_type
    files = code_version(*kinds, functions=vars(kernel).values())
    parts = [stated, files, *_outside(distribution, {top_level(kind.__module__) for kind in kinds})]
    text = "+".join(dict.fromkeys(parts))
    return text if len(text) <= NAME_MAX else _short(text)


def _outside(distribution: str, counted: set[str]) -> list[str]:
    """Return a digest of the files that a distribution installs outside the ``counted`` packages,
    such as a compiled module. The list is empty if there are none."""
    found = []
    with suppress(BaseException):  # damaged metadata: the plugin may still load
        installed = importlib.metadata.distribution(distribution) if distribution else None
        for file in (installed.files if installed is not None else None) or ():
            top = file.parts[0]
            module = top.partition(".")[0]
            # Scripts are above the folder. Files of an editable installation only contain a path.
            own = top.endswith(_INSTALLER_SUFFIXES)
            if module not in counted | {"", "__editable__"} and not own:
                found.append((str(file.locate()), str(file)))
    return [_contents(distribution, sorted(found))] if found else []


def format_code(form: Format) -> str:
    """Return twelve hexadecimal digits of a plugin's format: of its fields, and of the files of the
    packages that define its functions."""
    values = [getattr(form, each.name) for each in fields(form)]
    given = [getattr(value, "fn", value) for value in values if callable(value)]
    kinds = {type(each) for each in given if not isinstance(each, FunctionType)}
    numbers = [value for value in values if not callable(value)]
    return _short(repr(numbers), code_version(*kinds, functions=given))


def is_own(kind: type) -> bool:
    """Whether a kernel's class is one of tmm's own."""
    return top_level(kind.__module__) in OWN_PACKAGES


def code_version(*kinds: type, functions: Iterable[object] = ()) -> str:
    """Return twelve hexadecimal digits of the files of the packages that define these classes,
    their base classes, and the functions among their attributes and among ``functions``. If one is
    in no file, as in a notebook, the digits are valid only in this process."""
    bases = [base for kind in kinds for base in kind.__mro__]
    modules = {base.__module__ for base in bases if top_level(base.__module__) not in LIBRARIES}
    files = [package_digest(module) for module in sorted(modules)]
    # A class may be made elsewhere (types.new_class), or have another package's methods.
    given = [value for base in bases for value in vars(base).values()]
    written = list(filter(None, map(function_of, (*given, *functions))))
    names = {
        name
        for each in written
        # attrs and namedtuple write methods without a module.
        if (name := each.__globals__.get("__name__")) in sys.modules or each.__name__[:2] != "__"
    }
    packages = {_package(module) for module in modules}
    for name in sorted(str(name) for name in names):
        if top_level(name) not in LIBRARIES and _package(name) not in packages:
            packages.add(_package(name))
            files.append(package_digest(name))
    binds = filter(None, (function_of(vars(base).get("bind")) for base in bases))
    typed = any(map(is_typed, binds))
    if typed or None in files:
        return _of_process((*kinds, *written))
    return _short(*map(str, files))


def is_typed(function: FunctionType) -> bool:
    """Whether a function's code is from a prompt or ``exec``."""
    return function.__code__.co_filename.startswith("<")


@functools.cache
def _of_process(code: tuple[object, ...]) -> str:
    return unique()


def unique() -> str:
    """Return twelve hexadecimal digits that no other call returns, in any process: children that a
    process forks would count alike."""
    return os.urandom(6).hex()


def package_digest(module: str) -> str | None:
    """Return a digest of all files of a module's top-level package; None if the module is in no
    file. Files that changed are read again."""
    if module == "__main__" and hasattr(sys, "ps1"):
        return None  # an interactive session may run an edited part of a script
    files = _files(module)
    return _contents(_package(module), files) if files else None


def top_level(module: object) -> str:
    """Return the name of a module's outermost package. ``__module__`` may be no text."""
    return str(module).partition(".")[0]


def _short(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:12]


def _package(module: str) -> str:
    """Return the top-level package of a module. Several distributions may share a namespace; within
    one, it is the first package that has a file."""
    if module == "__main__":
        spec: ModuleSpec | None = getattr(sys.modules[module], "__spec__", None)
        if spec is None or not spec.parent:  # a script
            return module
        module = spec.parent  # python -m
    names = list(itertools.accumulate(module.split("."), "{}.{}".format))
    return next((name for name in names if _file(name) is not None), names[0])


def _file(module: str) -> str | None:
    """Return the file of a module, or the archive that it is in."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if type(path) is not str:
        return None
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path if os.path.isfile(path) else None


def _files(module: str) -> list[tuple[str, str]]:
    """Return the files of a module's package, with their names within the package."""
    package = _package(module)
    folders = list(getattr(sys.modules.get(package), "__path__", None) or ())
    alone = _file(package)
    if alone is not None and "." in package and not folders:
        folders = [os.path.dirname(alone)]  # a folder without __init__.py
    found = [(path, os.path.relpath(path, folder)) for folder in folders for path in _walk(folder)]
    return sorted(found) or ([(alone, "")] if alone is not None else [])


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below a folder, also below links to folders; each folder once."""
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [
            name
            for name in sorted(folders)
            if name != "__pycache__"
            and (name[0] != "." or name in _LIBRARY_FOLDERS)
            and os.path.realpath(os.path.join(place, name)) not in seen
        ]
        # A .pyc file counts only if its source is missing.
        sources = {f"{name}c" for name in names if name.endswith(".py")}
        yield from (os.path.join(place, name) for name in names if name not in sources)


def _contents(package: str, files: Sequence[tuple[str, str]]) -> str:
    """Return a digest of files, which are sorted, with their names. The digest of files that did
    not change is kept."""
    stamps = tuple(map(tuple, stamp(path for path, _ in files)))
    return _digest(package, tuple(name for _, name in files), stamps)


@functools.lru_cache(256)
def _digest(package: str, names: tuple[str, ...], stamps: tuple[tuple[Any, ...], ...]) -> str:
    found, room = [package], _MOST_BYTES
    for name, (path, *status) in zip(names, stamps, strict=True):
        size, modified = status[:2] or (0, 0)  # just removed
        room -= max(size, _LEAST_BYTES)
        content = f"{size} {modified}"
        if room >= 0:
            with suppress(OSError):  # the package cannot read it either
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        found.append(f"{name} {content}")
    return _short(*found)
