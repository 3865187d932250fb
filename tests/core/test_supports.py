"""A kernel is queried only for problems that it declares: every other problem gives a reason
against it. A field that no check covers fails here."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, settings

from tmm_core import (
    ANY,
    Epilogue,
    Groups,
    Operand,
    Problem,
    Scale,
    Supports,
    UnsupportedProblemError,
)
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.spec import supports
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.port import Port
from tmm_core.spec.problem import REQUIREMENTS

BF16, FP32 = torch.bfloat16, torch.float32
GPU = DeviceFingerprint("cuda", "H200", (9, 0), cuda="12.8")
PLAIN = Problem(m=8, n=16, k=32, a=Operand(BF16), b=Operand(BF16), out=Operand(BF16), device=GPU)
LEAST = Supports(operands=(BF16,), out=(BF16,))
COL, STRIDED = Operand(BF16, "col"), Operand(BF16, "strided", aligned=False)
EIGHT = Operand(torch.float8_e4m3fn)
FP8 = {"a": EIGHT, "b": EIGHT}
INT8 = Operand(torch.int8, format="int8")
INT4 = Operand(torch.uint8, format="int4")
EVERY = dict.fromkeys(("a", "b", "out", "residual"), ANY)

#: A problem, the reason against it, and the declaration that admits it.
REQUIRED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"device": replace(GPU, type="cpu")}, "runs on NVIDIA GPUs, not on cpu",
     {"devices": ("cuda", "cpu")}),
    ({"device": replace(GPU, type="cpu", interpreted=True)}, "not on cpu",
     {"devices": ("cuda", "interpreter")}),
    ({"device": replace(GPU, cuda="hip-6")}, "not on hip", {"devices": ("hip",)}),
    ({"a": Operand(FP32), "b": Operand(FP32)}, "torch.float32 operands are not among bfloat16",
     {"operands": (BF16, FP32)}),
    ({"b": Operand(FP32)}, "operands differ in dtype", {}),
    (FP8, "does not multiply fp8 operands", {"formats": ("fp8",)}),
    ({**FP8, "a": replace(EIGHT, scale=Scale.parse("row"))}, "no scale of a by row",
     {"formats": ("fp8",), "scales": ("row",)}),
    ({**FP8, "b": replace(EIGHT, scale=Scale.parse("tensor"))}, "no scale of b by tensor",
     {"formats": ("fp8",), "scales": ("tensor",)}),
    ({"a": Operand(BF16, scale=Scale.parse("row"))}, "no scale of a by row for torch.bfloat16", {}),
    ({"b": INT8}, "takes no int8 b with an a of torch.bfloat16", {"weights": ("int8",)}),
    ({"a": INT8}, "takes no int8 a with a b of torch.bfloat16", {"activations": ("int8",)}),
    ({"b": INT4}, "does not unpack b, which has 2 values", {"weights": ("int4",), "packed": True}),
    ({"a": INT4}, "does not unpack a, which has 2 values",
     {"activations": ("int4",), "packed": True}),
    ({"b": replace(INT8, scale=Scale.parse("row"), zero=True)}, "has no zero points of b",
     {"weights": ANY, "scales": ("row",), "zeros": True}),
    ({"out": Operand(FP32)}, "out of torch.float32", {"out": (FP32,)}),
    ({"bias": FP32}, "bias of torch.float32 is not among what it takes: none", {"bias": (FP32,)}),
    ({"residual": Operand(BF16)}, "residual of torch.bfloat16", {"residual": (BF16,)}),
    *(({name: matrix}, said, {"layouts": EVERY, "residual": (BF16,)})
      for name in ("a", "b", "out", "residual")
      for matrix, said in ((COL, f"{name} is column-major, not row-major"),
                           (STRIDED, f"{name} has no contiguous dimension"))),
    *(({name: Operand(BF16, aligned=False)}, f"{name} is not aligned to 16 bytes",
       {"unaligned": (name,), "residual": (BF16,)}) for name in ("a", "b", "out", "residual")),
    ({"b": Operand(BF16, wide=True)}, "b has offsets beyond 32 bits", {"wide": True}),
    ({"batch": 2}, "batch 2 exceeds 1", {"batch": None}),
    ({"batch": 9}, "batch 9 exceeds 1", {"batch": 9}),
    *(({size: 0}, "a dimension is 0", {"empty": True}) for size in ("m", "n", "k", "batch")),
    ({"scaled": True}, "does not support alpha", {"alpha": True}),
    ({"epilogue": parse("silu")}, "applies no epilogue, so not 'silu'", {"epilogues": True}),
    ({"epilogue": parse("swiglu")}, "gated 'swiglu' needs two",
     {"epilogues": True, "gated": True}),
    ({"epilogue": CLAMPED}, "halves, 'clamped_swiglu' alternate ones",
     {"epilogues": True, "gated": True, "interleaved": True}),
    ({"epilogue": Epilogue("opaque", torch.sin)}, "'opaque' has no device function",
     {"epilogues": True, "unfused": True}),
    *(({"groups": Groups(3, kind)}, f"ragged along {kind}", {"ragged": (kind,)})
      for kind in ("m", "n", "k")),
    ({"groups": Groups(3, "m", torch.int64)}, "ragged along m",
     {"ragged": ("m",), "indexed": True}),
    ({"groups": Groups(3, "n", zeroed=True)}, "ragged along n", {"ragged": ("n",), "zeroed": True}),
]  # fmt: skip


def test_the_interpreter_is_not_listed_as_a_device() -> None:
    supports = replace(LEAST, devices=("cuda", "hip", "interpreter"))
    message = "runs on NVIDIA GPUs and AMD GPUs, or under TRITON_INTERPRET=1, not on cpu"
    assert supports.reasons_against(replace(PLAIN, device=replace(GPU, type="cpu"))) == [message]


@pytest.mark.parametrize(("change", "message", "declared"), REQUIRED)
def test_undeclared_properties_are_declined(
    change: dict[str, Any], message: str, declared: dict[str, Any]
) -> None:
    problem = replace(PLAIN, **change)
    assert LEAST.reasons_against(PLAIN) == []
    reasons = LEAST.reasons_against(problem)
    assert any(message in reason for reason in reasons), reasons
    if declared:
        assert replace(LEAST, **declared).reasons_against(problem) == []
    assert Supports.everything().reasons_against(problem) == [] or not declared


@pytest.mark.parametrize(
    ("field", "given", "kind", "message"),
    [
        ("operands", ("bfloat16",), TypeError, "operands has dtypes of torch, got 'bfloat16'"),
        ("out", [BF16, "fp32"], TypeError, "out has dtypes of torch, got 'fp32'"),
        ("bias", (None,), TypeError, "bias has dtypes of torch, got None"),
        ("residual", {float}, TypeError, "residual has dtypes of torch, got <class 'float'>"),
        ("scales", ("row", "rows"), ValueError, "scales has tensor, row, group, block, got 'rows'"),
        ("unaligned", ("c",), ValueError, "unaligned has a, b, out, residual, got 'c'"),
        ("outputs", ("rows",), ValueError, "outputs has scalar, row, col, tile, group, got 'rows'"),
        ("reduces", ("min",), ValueError, "reduces has max, sum, got 'min'"),
        ("ragged", ("M",), ValueError, "ragged has m, n, k, got 'M'"),
        ("layouts", {"c": ("row",)}, ValueError, "layouts has a, b, out, residual, got 'c'"),
        (
            "layouts",
            {"b": ["column"]},
            ValueError,
            "layouts['b'] has row, col, strided, got 'column'",
        ),
    ],
)
def test_a_declaration_of_an_impossible_property_is_refused(
    field: str, given: Any, kind: type[Exception], message: str
) -> None:
    """It would admit nothing, and the kernel would never be chosen."""
    with pytest.raises(kind, match=f"^Supports.{re.escape(message)}$"):
        replace(LEAST, **{field: given})


def test_rows_that_are_gathered_or_made_zero_are_declared_too() -> None:
    ragged = replace(LEAST, ragged=("m",))
    indices = Groups(3, "m", None, torch.int32, FP32)
    assert ragged.reasons_against(replace(PLAIN, groups=indices)) == [
        "takes no out_index or out_weights"
    ]
    zeroed = replace(PLAIN, groups=Groups(3, "m", zeroed=True))
    assert ragged.reasons_against(zeroed) == ["does not zero the result beyond the last group"]


def test_capabilities_apply_to_nvidia_only() -> None:
    hopper = replace(LEAST, capability=(9, 0), below=(9, 1), devices=("cuda", "hip"))
    for capability, able in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        problem = replace(PLAIN, device=replace(GPU, capability=capability))
        assert (not hopper.reasons_against(problem)) is able
        assert not hopper.reasons_against(
            replace(problem, device=replace(problem.device, cuda="hip"))
        )


@pytest.mark.parametrize("wrong", [{"devices": "cuda"}, {"operands": BF16}, {"ragged": None},
                                   {"layouts": {"a": "row"}}, {"layouts": {"a": None}},
                                   {"capability": 9}, {"capability": (9.0, 0)}, {"below": 10},
                                   {"batch": "4"}, {"batch": True}, {"alpha": "no"}, {"empty": 1},
                                   {"capability": None}])  # fmt: skip
def test_a_declaration_of_a_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        replace(LEAST, **wrong)


#: The check that covers each field of a problem and of its parts; None: why no kernel is asked.
COVERED: dict[type, dict[str, Any]] = {
    Problem: {
        **dict.fromkeys(("m", "n", "k", "batch"), supports._sizes),
        "a": supports._numbers,
        "b": supports._matrices,
        **dict.fromkeys(("out", "bias", "residual"), supports._others),
        "device": supports._device,
        **dict.fromkeys(("epilogue", "scaled"), supports._epilogue),
        "tf32": None,  # allows rounding but does not require it
        "groups": supports._groups,
        # Checked against Traits by the registry.
        **dict.fromkeys(REQUIREMENTS),
        "static_weights": None,  # checked against Config.assumes
    },
    Operand: {
        **dict.fromkeys(("dtype", "format", "scale", "zero"), supports._numbers),
        **dict.fromkeys(("layout", "aligned", "wide"), supports._matrices),
    },
    Groups: {
        "count": None,  # any number of groups is a run-time value
        **dict.fromkeys(("ragged", "a_index", "out_index", "out_weights", "zeroed"),
                        supports._groups),
    },
    Epilogue: {
        **dict.fromkeys(("device", "gated", "interleaved", "stages", "outputs"),
                        supports._epilogue),
        # The device function computes it; derivatives belong to other calls.
        **dict.fromkeys(
            ("name", "reference", "parameters", "positive", "linear", "builtin", "derivative",
             "output_vjp", "device_derivative", "outputs_of")
        ),
    },
    Port: {
        **dict.fromkeys(("kind", "reduce", "of", "device", "group"), supports._outputs),
        **dict.fromkeys(("name", "dtype")),  # any float dtype; 8 bits only with groups
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", COVERED)
def test_a_check_covers_each_field(kind: type) -> None:
    """A kernel that ignores a new field would compute a wrong number."""
    assert set(COVERED[kind]) == {field.name for field in dataclasses.fields(kind)}
    called = {*supports._CHECKS, supports._outputs}  # which _epilogue calls
    assert {check for check in COVERED[kind].values() if check is not None} <= called


def test_a_problem_that_no_kernel_declares_is_an_error_and_not_left_to_blas(tmp_path: Path) -> None:
    problem = replace(PLAIN, device=DEVICE, groups=Groups(2, "m"))
    blas, fast = FakeBlas(), FakeKernel("fast")
    blas.supports = fast.supports = replace(blas.supports, ragged=())  # type: ignore[misc]
    d, _ = dispatcher(blas, fast, root=tmp_path)
    with pytest.raises(UnsupportedProblemError, match=r"blas: .* ragged along m"):
        d.choose(problem, settings())


def test_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        Groups(0, "m")
    with pytest.raises(ValueError, match="along m, n or k"):
        Groups(2, "batch")  # type: ignore[arg-type]


def test_ragged_problems_move_other_operands_once_per_group() -> None:
    plain = replace(PLAIN, m=10, n=20, k=30)
    extra = {"m": 3 * 30 * 20, "n": 3 * 10 * 30, "k": 3 * 10 * 20}
    for kind, elements in extra.items():
        ragged = replace(plain, groups=Groups(4, kind))  # type: ignore[arg-type]
        assert ragged.bytes == plain.bytes + 2 * elements
        assert ragged.flops == plain.flops
        assert f"4 groups along {kind}" in str(ragged)
        # A residual has the shape of the result.
        added = replace(ragged, residual=ragged.out)
        assert added.bytes == ragged.bytes + ragged.sizes["out"]


def test_a_batch_of_no_products_moves_nothing() -> None:
    none = replace(PLAIN, batch=0)
    assert (none.bytes, none.out_shape) == (0, (0, PLAIN.m, PLAIN.n))
