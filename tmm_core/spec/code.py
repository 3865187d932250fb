"""Identifies the code of a kernel that is not tmm's own, so that an edited one is measured again.

The contents of all files of its package count, whatever their type, and those of the modules it
uses; library packages count by their versions. Objects that a class or an instance holds count too.
Code without files may change unseen: its kernel is verified in every process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tmm_cache.fields import NAME_MAX

from tmm_core.spec.digest import digest
from tmm_core.spec.identity import identify
from tmm_core.spec.libraries import LIBRARIES

#: Packages whose kernels' versions are digests of the code that they reach.
OWN = frozenset(("tmm_core", "tmm_cache", "tmm_blas", "tmm_triton"))
#: More files than this are not read.
_MOST_FILES = 5_000
#: Bytes of a file whose digest other processes look up: reading this much takes 1 ms.
_LARGE = 2**20
#: Names of folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")


class Code(NamedTuple):
    """The identity of a kernel's code.

    Attributes:
        digest: Twelve hexadecimal digits: of the files, and of the objects that the kernel holds.
        files: Twelve digits of the files alone.
        certain: Every edit changes the digest.
    """

    digest: str
    files: str
    certain: bool


def is_own(kind: type) -> bool:
    """Whether a kernel's class is one of tmm's own."""
    return _top(kind.__module__) in OWN


def _top(module: str) -> str:
    return module.partition(".")[0]


def code_of(kernel: Any) -> Code:
    """The identity of the code and of the objects that ``kernel`` consists of."""
    kinds = (*type(kernel).__mro__, kernel.config_type)
    modules = {kind.__module__ for kind in kinds}
    files, versions, certain = _sources({m for m in modules if _top(m) not in LIBRARIES | OWN})
    computed = [
        name
        for kind in type(kernel).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, functools.cached_property)
    ]
    objects = identify(kernel, kernel.config_type, without=computed, libraries=OWN)
    contents = sorted(versions)
    for path, name in sorted(files.items(), key=lambda item: item[1]):
        try:
            contents.append(f"{name} {_content(path)}")
        except OSError:
            certain = False
    of_files = _short(*contents)
    found = _short(of_files, objects.digest, digest(type(kernel), kernel.config_type))
    return Code(found, of_files, certain and objects.lasting)


def version_of(kernel: Any, stated: str) -> tuple[str, bool]:
    """The version of a registered kernel that states one, and whether every edit changes it."""
    if is_own(type(kernel)):
        return stated, True
    code = code_of(kernel)
    if stated == code.digest:
        return stated, code.certain
    # Its author may forget to change it.
    both = f"{stated}+{code.files}"
    return both if len(both) <= NAME_MAX else _short(both), code.certain


def _short(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:12]


def _sources(modules: set[str]) -> tuple[dict[str, str], set[str], bool]:
    """The files of these modules' packages and of what they use, with names that do not depend on
    where they are; the versions of libraries; whether every module has files."""
    files: dict[str, str] = {}
    versions: set[str] = set()
    certain = True
    tops = {_top(module) for module in modules}
    for top in _used(modules):
        roots = _roots(top)
        if not roots:
            # A namespace that was executed rather than imported.
            certain &= top not in tops
            continue
        if (
            top not in tops
            and any(map(_is_installed, roots))
            and not _together(roots[0], top, tops)
        ):
            versions.add(f"{top} {getattr(sys.modules.get(top), '__version__', '')}")
            continue
        for root in roots:
            for path in _files_in(root):
                files[path] = f"{top}/{os.path.relpath(path, root)}"
                if len(files) > _MOST_FILES:
                    return {}, versions, False
    return files, versions, certain


def _used(modules: set[str]) -> list[str]:
    """The top-level packages of these modules and of those that they refer to, without tmm and the
    libraries that a record's environment names."""
    own = {_top(module) for module in modules}
    tops: dict[str, None] = {}
    waiting, seen = sorted(modules), set(modules)
    while waiting:
        name = waiting.pop()
        top = _top(name)
        first = top not in tops
        tops[top] = None
        if top not in own and any(map(_is_installed, _roots(top))):
            continue
        module = sys.modules.get(name)
        found = [each for each in list(sys.modules) if first and each.startswith(f"{top}.")]
        for value in list(vars(module).values()) if module is not None else ():
            if isinstance(value, types.ModuleType):
                found.append(value.__name__)
            else:
                of = getattr(value, "__module__", None)
                found.append(of if type(of) is str else type(value).__module__)
        for each in found:
            if each not in seen and _top(each) not in LIBRARIES | OWN:
                seen.add(each)
                waiting.append(each)
    return list(tops)


def _is_installed(root: str) -> bool:
    return os.path.basename(os.path.dirname(root)) in _INSTALLED


def _roots(top: str) -> list[str]:
    """The folders of a loaded package, or the file of a module or of an archive with it."""
    module = sys.modules.get(top)
    paths = list(getattr(module, "__path__", None) or ())
    if not paths:
        file = getattr(module, "__file__", None)
        paths = [file] if type(file) is str else []
    return [file for path in paths if (file := _existing(os.path.abspath(path))) is not None]


def _existing(path: str) -> str | None:
    """The path, or the archive that it is in; None if there is neither."""
    if os.path.exists(path):
        return path
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path if os.path.isfile(path) else None


def _files_in(root: str) -> Iterator[str]:
    if os.path.isfile(root):
        yield root
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__" and name[0] != "."]
        yield from (os.path.join(folder, name) for name in names if not name.endswith(".pyc"))


def _together(root: str, top: str, others: set[str]) -> bool:
    """Whether a plugin's distribution installed this package and one of the ``others``."""
    return any(top in names and names & others for names in _plugins(os.path.dirname(root)))


@functools.cache
def _plugins(folder: str) -> list[set[str]]:
    """The top-level names that each plugin's distribution in ``folder`` installed."""
    found = []
    for declared in Path(folder).glob("*.dist-info/entry_points.txt"):
        try:
            if b"[tmm_core]" in declared.read_bytes():
                record = declared.with_name("RECORD").read_text("utf-8", "replace")
                found.append({line.split("/")[0].split(".py,")[0] for line in record.splitlines()})
        except OSError:
            continue
    return found


def _content(path: str) -> str:
    """A digest of a file's content, which is read again after a change of its size or times.

    Raises:
        OSError: It cannot be read.
    """
    of = os.stat(path)
    state = [of.st_size, of.st_mtime_ns, of.st_ctime_ns]
    known = _contents.get(path)
    if known is None and of.st_size >= _LARGE:
        noted = _notes().get(path)
        known = noted if isinstance(noted, list) else None
    if known is not None and known[:-1] == state:
        return str(known[-1])
    with open(path, "rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    _contents[path] = [*state, found]
    if of.st_size >= _LARGE:
        _notes().add(path, _contents[path])
    return found


@functools.cache
def _notes() -> Any:
    from tmm_cache import Notes

    return Notes("files", ["sha256"])


#: Size, times and digest of each file that was read.
_contents: dict[str, list[Any]] = {}
