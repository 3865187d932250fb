"""``tmm new-plugin``: writes a working package of one kernel and one epilogue to start from."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from tmm_base import UsageError
from tmm_base.console import DONE, print_paragraph
from tmm_base.guards import OWN_PACKAGES

import tmm_core

#: Template files that have another path in the package.
_PLACES = {"gitignore": ".gitignore", "workflow.yml": ".github/workflows/test.yml"}

#: Module names that an import would resolve elsewhere.
_TAKEN = {*sys.stdlib_module_names, *OWN_PACKAGES}
_TAKEN |= {"torch", "triton", "numpy", "pytest", "tests"}


def run(options: argparse.Namespace) -> int:
    name: str = options.name
    module = re.sub("[-.]+", "_", name).lower()
    if not re.fullmatch("[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]", name) or not module.isidentifier():
        raise UsageError(f"name: found {name!r}, accepted is a package's name, like my-kernels")
    if keyword.iskeyword(module) or module in _TAKEN:
        raise UsageError(f"name: {module!r} is a module's name already")
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already and is not an empty folder")
    words = {"distribution": name, "module": module, "tmm": tmm_core.__version__}
    for path, text in written(words).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    made = f"the kernel {module}.tiled, the epilogue {module}_elu, tests and CI"
    print_paragraph(f"{folder}: {made}. Next:")
    print(f"\n  cd {folder}")
    print("  pip install -e '.[test]'")
    print("  tmm kernels          # it is listed")
    print("  pytest               # it conforms")
    return DONE


def written(words: Mapping[str, str]) -> dict[Path, str]:
    """The contents of the package's files, by path."""
    files = {}
    for place, text in _templates():
        place = _PLACES.get(place, place).replace("package/", f"{words['module']}/")
        for name, word in words.items():
            text = text.replace(f"@{name}@", word)
        files[Path(place)] = text
    files[Path(words["module"], "py.typed")] = ""
    return files


def _templates() -> list[tuple[str, str]]:
    """The files of tmm's folder ``template``, which may be in a zip: their paths in it without the
    suffix ``.in``, and their texts.

    Raises:
        UsageError: This installation has none.
    """
    found, folders = [], [("", resources.files(tmm_core) / "tools" / "template")]
    while folders:
        lead, folder = folders.pop()
        for each in folder.iterdir() if folder.is_dir() else ():
            if each.is_dir():
                folders.append((f"{lead}{each.name}/", each))
            elif each.name.endswith(".in"):
                text = each.read_text(encoding="utf-8")
                found.append((f"{lead}{each.name.removesuffix('.in')}", text))
    if not found:
        raise UsageError("this installation of tmm lacks the files of a new plugin")
    return sorted(found)
