"""Defaults of the caller (device, dtype) change nothing: every tensor that tmm makes names its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Torch's factories, and whether their dtype depends on the default if nothing tells it.
FACTORIES = {
    "arange": False, "as_tensor": False, "empty": True, "empty_strided": True, "eye": True,
    "full": False, "linspace": True, "logspace": True, "normal": True, "ones": True,
    "rand": True, "randint": False, "randn": True, "randperm": False, "scalar_tensor": True,
    "tensor": False, "zeros": True, "Generator": False, "from_numpy": False,
}  # fmt: skip
#: Modules that run as programs of their own, where defaults are torch's.
PROGRAMS = ("tools/demo.py",)


def factories(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """The calls of torch's factories in a module, each with its name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in FACTORIES:
            yield node, node.func.attr


def sources() -> list[Path]:
    """Every module of the package and of the built-in plugins."""
    found = [*(ROOT / "tmm_core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    return [path for path in found if not path.as_posix().endswith(PROGRAMS)]


def test_every_tensor_names_its_device_and_dtype() -> None:
    silent = []
    count = 0
    for path in sources():
        for call, name in factories(path):
            count += 1
            given = {keyword.arg for keyword in call.keywords}
            if name == "from_numpy" or None in given:  # shares memory; keywords from elsewhere
                continue
            place = f"{path.relative_to(ROOT)}:{call.lineno} torch.{name}"
            if name == "Generator":
                if not call.args and "device" not in given:
                    silent.append(f"{place} without a device")
                continue
            if "device" not in given:
                silent.append(f"{place} without a device")
            meta = any(getattr(keyword.value, "value", None) == "meta" for keyword in call.keywords)
            if FACTORIES[name] and "dtype" not in given and not meta:  # made for its strides
                silent.append(f"{place} without a dtype")
    assert count > 30  # it finds them
    assert not silent, "\n".join(silent)
