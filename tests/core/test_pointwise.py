"""The passes that follow a product compile without a GPU, for Ampere, Hopper and Blackwell, and
move 16 bytes at a time.

``test_autograd.py`` tests their values.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from uninterpreted import Uninterpreted

from tmm_core.epilogues import BUILTIN, parse
from tmm_core.spec.device import interpreting
from tmm_core.triton import pointwise
from tmm_core.triton.pointwise import Pointwise

EPILOGUES = [name for name, epilogue in BUILTIN.items() if epilogue.parts[1] is not None]
EPILOGUES += ["gelu_tanh+softcap(30)", "swiglu+tanh"]


def compiled() -> list[dict[str, Any]]:
    from triton.backends.compiler import GPUTarget

    from tmm_core.triton import compile_for, device_function, pointwise, source
    from tmm_core.triton.device_functions import device_derivative

    def both_ways(job: tuple[str, int]) -> list[dict[str, Any]]:
        name, sm = job
        epilogue = parse(name)
        tile = {"BLOCK_M": pointwise.BLOCK_M, "BLOCK_N": pointwise.BLOCK_N}
        tile["GATED"] = epilogue.gated
        sizes = {"M": "i32", "N": "i32", "ldz": "i32"}
        forward = dict.fromkeys(("z_ptr", "y_ptr"), "*bf16") | sizes
        backward = dict.fromkeys(("grad_ptr", "z_ptr", "dz_ptr"), "*bf16") | sizes
        backward["grad_row"] = "i64"
        lines = []
        for function, types, constants in (
            (pointwise._forward, forward, {"EPILOGUE": device_function(epilogue)}),
            (pointwise._backward, backward, {"SLOPE": device_derivative(epilogue), "grad_col": 1}),
        ):
            divisible = {name: 16 for name in types if name != "M"}
            src = source(function, types, constants | tile, divisible)
            result = compile_for(GPUTarget("cuda", sm, 32), src)
            ptx = result.asm["ptx"]
            line = {"epilogue": name, "sm": sm, "function": function.__name__}
            line["gated"] = epilogue.gated
            for way in ("ld", "st"):
                line[way] = len(re.findall(rf"\b{way}\.global", ptx))
                line[f"{way} wide"] = len(re.findall(rf"\b{way}\.global\S*\.v4\.b32", ptx))
            lines.append(line)
        return lines

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        asked = [(epilogue, 90) for epilogue in EPILOGUES]
        # The width of accesses depends on the tensors, not on the arithmetic between.
        asked += [(epilogue, sm) for epilogue in EPILOGUES[-2:] for sm in (80, 100)]
        return [line for lines in pool.map(both_ways, asked) for line in lines]


@pytest.mark.slow
def test_the_passes_compile_to_wide_accesses(uninterpreted: Uninterpreted) -> None:
    lines = uninterpreted(compiled)
    assert len(lines) == 2 * (len(EPILOGUES) + 4)
    assert {(line["sm"], line["gated"]) for line in lines} == {
        (sm, gated) for sm in (80, 90, 100) for gated in (False, True)
    }
    for line in lines:
        backward = line["function"] == "_backward"
        # Two accesses a thread for each of gradient, halves and halves' gradients.
        assert line["ld"] == line["ld wide"] == 2 * (1 + line["gated"] + backward), line
        assert line["st"] == line["st wide"] == 2 * (1 + (line["gated"] and backward)), line


@pytest.mark.parametrize(
    ("epilogue", "width", "m", "programs"),
    [("silu", 256, 8, 1), ("silu", 257, 9, 4), ("swiglu", 600, 17, 6), ("swiglu", 512, 16, 2)],
)
@pytest.mark.skipif(not interpreting(), reason="Triton is not interpreting")
def test_every_tile_has_a_program(epilogue: str, width: int, m: int, programs: int) -> None:
    passes = Pointwise(parse(epilogue), width, torch.bfloat16, torch.device("cpu"))
    launches: list[Any] = []
    passes._forward = lambda *given: launches.append(given[:3])
    kept: list[Any] = []

    def compiled(*key: Any) -> Any:
        kept.append(key)
        return passes._forward

    passes._compiled = compiled  # type: ignore[method-assign]
    z = torch.zeros(m, width, dtype=torch.bfloat16)
    y = passes.forward(z)
    passes.forward(z[:0])
    passes.backward(y, z)
    passes.backward(y[:0], z[:0])
    assert launches == [(programs, 1, 1)] * 2
    assert y.shape == (m, width // (2 if epilogue == "swiglu" else 1))
    kept.clear()
    rows = torch.zeros(m, 2 * y.shape[1] + 16, dtype=torch.bfloat16)
    transposed = torch.zeros(y.shape[1], m).t()
    for grad in (rows[:, : y.shape[1]], rows[:, 1 : y.shape[1] + 1], transposed):
        passes.backward(grad, z)
    own = torch.bfloat16
    aligned = rows.stride(0) % 16 == 0
    assert kept == [(own, True, aligned), (own, True, False), (torch.float32, False, False)]


def test_each_kind_of_gradient_has_its_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an aligned one is declared divisible, and only a dense one has no stride of columns."""
    made: list[tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = []

    class Noted:
        def __init__(
            self, fn: Any, types: Any, constants: Any, *, divisible: Any, **_: Any
        ) -> None:
            made.append((types, constants, divisible))
            self.call, self.address = object(), None

    monkeypatch.setattr(pointwise, "Launch", Noted)
    for text, width, wide in (
        ("silu", 48, True), ("silu", 40, False), ("swiglu", 32, True), ("swiglu", 48, False),
    ):  # fmt: skip
        made.clear()
        Pointwise(parse(text), width, torch.bfloat16, torch.device("cpu"))
        divisible = dict.fromkeys(("z_ptr", "y_ptr", *(("N", "ldz") if wide else ())), 16)
        assert made[0][2] == divisible, (text, width)
    passes = Pointwise(parse("silu"), 256, torch.bfloat16, torch.device("cpu"))
    made.clear()
    passes._backward.clear()
    calls = set()
    for dtype in (torch.bfloat16, torch.float32):
        for dense in (True, False):
            for aligned in (True, False):
                calls.add(passes._compiled(dtype, dense, aligned))
                assert passes._compiled(dtype, dense, aligned) in calls
                types, constants, divisible = made[-1]
                assert types["grad_ptr"] == ("*bf16" if dtype is torch.bfloat16 else "*fp32")
                assert (types.get("grad_col"), constants.get("grad_col")) == (
                    (None, 1) if dense else ("i64", None)
                )
                given = {name: divisible.get(name) for name in ("grad_ptr", "grad_row", "dz_ptr")}
                wide = 16 if aligned else None
                assert given == {"grad_ptr": wide, "grad_row": wide, "dz_ptr": 16}
    assert len(made) == len(calls) == 8
