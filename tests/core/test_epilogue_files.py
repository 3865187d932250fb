"""An epilogue is one file. Without the file it is unknown and all else works. A new epilogue needs
only a new file. Its device function is plain code, which is jitted when it is needed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tmm_core
from tmm_core import Epilogue, Port, epilogues
from tmm_core.epilogues import _fast_math
from tmm_core.epilogues._fast_math import polynomial
from tmm_core.spec.epilogue import INTERNED
from tmm_core.testing import EpilogueConformance
from tmm_core.triton.device_functions import device_derivative, device_function, port_function

PACKAGE = Path(epilogues.__file__).parents[1]
#: All that stays of the package.
FILES = ("__init__", "_fast_math", "_gated", "sigmoid", "silu")

SINE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
from tmm_core.epilogues._gated import gated
from tmm_core.spec.epilogue import Epilogue
if TYPE_CHECKING:
    import triton.language as tl

def sine(z, rate: tl.constexpr):
    return tl.sin(z * rate)

def slope(z, rate: tl.constexpr):
    return rate * tl.cos(z * rate)

def cosine(z):
    return tl.cos(z)

SINE = Epilogue("sine", lambda z, rate=2.0: torch.sin(z * rate), device=sine, builtin=True,
                derivative=lambda z, rate: rate * torch.cos(z * rate), device_derivative=slope)
COSINE = Epilogue("cosine", torch.cos, device=cosine, builtin=True,
                  derivative=lambda z: -torch.sin(z))
EPILOGUES = (SINE, COSINE, gated("cosglu", COSINE))
SPELLINGS = {"cos": "cosine", torch.cos: "cosine"}
"""

PROGRAM = """
import sys
import torch, tmm_core
from tmm_core import nn
from tmm_core.epilogues import EPILOGUES
assert "triton" not in sys.modules
assert {*EPILOGUES} == {"identity", "sigmoid", "silu", "swiglu", "sine", "cosine", "cosglu"}
for unknown in ("relu", "geglu", "clamped_swiglu", torch.relu):
    try:
        tmm_core.matmul(torch.ones(2, 2), torch.ones(2, 2), epilogue=unknown)
    except (tmm_core.UnknownNameError, TypeError):
        continue
    raise AssertionError(f"{unknown} is known")
x, w = torch.randn(5, 8), torch.randn(8, 6)
forced = {"kernel": "triton.fused_epilogue"}
with torch.no_grad():
    y = tmm_core.matmul(x, w, epilogue="sine(3)+cos", **forced)
    torch.testing.assert_close(y, torch.cos(torch.sin(3 * (x @ w))), rtol=1e-4, atol=1e-4)
    y = tmm_core.matmul(x, w, epilogue="cosglu", **forced)
    gate, up = (x @ w).chunk(2, -1)
    torch.testing.assert_close(y, torch.cos(gate) * up, rtol=1e-4, atol=1e-4)
layer = nn.GatedMLP(8, 6, activation=torch.cos)
assert layer.epilogue == "cosglu"
expected = layer.down_proj(torch.cos(layer.gate_proj(x)) * layer.up_proj(x))
torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
class Other(torch.nn.Module):
    def forward(self, z):
        return torch.sigmoid(z)
assert nn.activation.recognise(Other()).epilogue == "sigmoid"
"""


@pytest.mark.slow
def test_an_epilogue_is_its_file(tmp_path: Path) -> None:
    copy = tmp_path / "tmm_core"
    copy.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("epilogues", "__pycache__"):
            (copy / path.name).symlink_to(path)
    (copy / "epilogues").mkdir()
    for name in FILES:
        (copy / "epilogues" / f"{name}.py").symlink_to(PACKAGE / "epilogues" / f"{name}.py")
    (copy / "epilogues" / "sine.py").write_text(SINE)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1", "TMM_ON_CACHE_MISS": "heuristic"},
    )  # fmt: skip


# -- plain device functions --------------------------------------------------------------------

RATE = 0.5


# Named like the function of Triton's that it calls.
def exp(z):
    return tl.exp(z * -RATE)  # noqa: F821  # tmm gives it


def damped(power: int):
    def device(z):
        return z * exp(z * z) * power

    return device


def slope(z):
    return 2 * exp(z * z) * (1 - 2 * RATE * z * z)


def twice_damped(z):
    return z * exp(z * z) * 2


DAMPED = Epilogue(
    "damped", lambda z: 2 * z * torch.exp(-RATE * z * z), device=twice_damped,
    derivative=lambda z: 2 * torch.exp(-RATE * z * z) * (1 - 2 * RATE * z * z),
    device_derivative=slope,
)  # fmt: skip


class TestPlainFunctions(EpilogueConformance):
    epilogue = DAMPED


def test_jitting_leaves_the_functions_as_they_are() -> None:
    before = dict(globals())
    assert device_function(DAMPED) is device_function(DAMPED)
    assert device_derivative(DAMPED).__name__ == "slope"
    assert globals() == before
    assert "tl" not in globals()
    # A helper that several use is jitted once.
    other = Epilogue("other", torch.exp, device=exp)
    (helper,) = {
        function.fn.__globals__["exp"]
        for function in (device_function(DAMPED), device_derivative(DAMPED))
    }
    assert helper is device_function(other)


def test_a_closure_variable_and_a_number_alter_the_key() -> None:
    key = Epilogue("damped", DAMPED.reference, device=damped(2)).key
    assert Epilogue("damped", DAMPED.reference, device=damped(2)).key == key
    assert Epilogue("damped", DAMPED.reference, device=damped(3)).key != key


def test_a_closure_variable_that_changes_is_another_epilogue() -> None:
    rate = 2.0

    def device(z):
        return z * rate

    def reset(value: float) -> None:
        nonlocal rate
        rate = value

    epilogue = Epilogue("times", lambda z: 2 * z, device=device)
    text = epilogue.interned()
    kept = INTERNED[text]
    reset(3.0)
    assert epilogue.interned() != text
    # The kept one computes what its key says, however late it is compiled.
    assert device_function(kept).fn.__globals__["rate"].value == 2.0


def test_an_invalid_device_function_is_refused() -> None:
    with pytest.raises(TypeError, match="'module:f' is no device function"):
        Epilogue("mine", torch.sin, device="module:f")
    with pytest.raises(TypeError, match="3 is no device function"):
        Epilogue("mine", torch.sin, device=torch.sin, device_derivative=3)
    with pytest.raises(TypeError, match="output 'amax': 'module:f' is no device function"):
        Port("amax", "row", reduce="max", of=torch.abs, device="module:f")
    with pytest.raises(ValueError, match="output 'amax' has no device function"):
        port_function(Port("amax", "row", reduce="max", of=torch.abs))
    with pytest.raises(ValueError, match="epilogue 'mine' has no device function"):
        device_function(Epilogue("mine", torch.sin))


#: Instructions for 32-bit floats, without their flags.
INSTRUCTIONS: dict[str, Callable[..., float]] = {
    "mov": lambda x: x,
    "fma": lambda x, y, z: x * y + z,
    "ex2": lambda x: 2.0**x,
    "rcp": lambda x: 1 / x,
}


def evaluated(ptx: str, x: float) -> float:
    """The result of PTX without branches, for its operand ``$1``."""
    values = {"$1": x}

    def value(name: str) -> float:
        if name.startswith("0f"):
            return struct.unpack(">f", bytes.fromhex(name[2:]))[0]  # type: ignore[no-any-return]
        return values[name]

    for line in ptx.strip("{} ").split("; "):
        operation, to, *of = line.rstrip(";").replace(",", "").split()
        if operation != ".reg":
            values[to] = INSTRUCTIONS[operation.partition(".")[0]](*map(value, of))
    return values["$0"]


@pytest.mark.parametrize("coefficients", [(0.5, -2.0), (3.0, 0.5, -0.25), (1.0, 2.0, -4.0, 8.0)])
def test_a_polynomials_ptx_and_plain_code_compute_the_same(coefficients: tuple[float, ...]) -> None:
    def powers(x: Any) -> Any:
        return sum(c * x**power for power, c in enumerate(reversed(coefficients)))

    device = polynomial(*coefficients)
    z = torch.tensor([[-1.5, 0.0], [0.75, 2.0]])
    series = Epilogue("series", powers, device=device)
    # Verification compares the kernel, which is interpreted here, with `powers`.
    result = tmm_core.matmul(z, torch.eye(2), epilogue=series, kernel="triton.naive")
    torch.testing.assert_close(result, powers(z))
    closure = dict(zip(device.__code__.co_freevars, device.__closure__, strict=True))
    for x in (-1.5, 0.75, 2.0) if "ptx" in closure else ():
        assert evaluated(closure["ptx"].cell_contents, x) == powers(x)


def on_numbers(function: Any, inline: bool, called: list[str]) -> Callable[[float], Any]:
    """A device function that computes with Python's numbers, by inline PTX or by Triton's language.
    The PTX that it executes is added to ``called``."""

    def inlined(ptx: str, names: str, of: list[float], **more: Any) -> float:
        assert (names, more) == ("=f,f", {"dtype": "fp32", "is_pure": True, "pack": 1})
        called.append(ptx)
        return evaluated(ptx, *of)

    language = SimpleNamespace(
        inline_asm_elementwise=inlined, float32="fp32", exp2=lambda x: 2.0**x, abs=abs,
        where=lambda condition, x, y: x if condition else y,
    )  # fmt: skip
    names = {**function.__globals__, "tl": language, "INLINE_PTX": inline}
    for name in ("exp2", "reciprocal"):
        names[name] = FunctionType(getattr(_fast_math, name).__code__, names)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    factor = cells["factor"].cell_contents if "factor" in cells else None
    if isinstance(factor, FunctionType):
        cells["factor"] = CellType(on_numbers(factor, inline, called))
    return FunctionType(function.__code__, names, closure=tuple(cells.values()) or None)


@pytest.mark.parametrize("x", [-3.0, -0.5, 0.25, 4.0])
@pytest.mark.parametrize(
    ("function", "expected", "instructions"),
    [
        pytest.param(_fast_math.exp2, lambda x: 2.0**x, 1, id="exp2"),
        pytest.param(_fast_math.reciprocal, lambda x: 1 / x, 1, id="reciprocal"),
        pytest.param(
            _fast_math.logistic,
            lambda x: (1 / (1 + 2.0**x), 2.0**x / (1 + 2.0**x) ** 2), 2, id="logistic",
        ),
        pytest.param(polynomial(0.5, -2.0), lambda x: 0.5 * x - 2, 0, id="line"),
        pytest.param(polynomial(2.0, 0.5, -2.0), lambda x: (2 * x + 0.5) * x - 2, 1, id="parabola"),
        pytest.param(
            polynomial(-1.0, 2.0, 0.5, -2.0), lambda x: ((2 - x) * x + 0.5) * x - 2, 1, id="cubic",
        ),
    ],
)  # fmt: skip
def test_ptx_is_one_instruction_each_and_plain_code_computes_the_same(
    function: Any, expected: Callable[[float], Any], instructions: int, x: float
) -> None:
    for inline in (True, False):
        called: list[str] = []
        assert on_numbers(function, inline, called)(x) == pytest.approx(expected(x), rel=1e-12)
        assert len(called) == instructions * inline
