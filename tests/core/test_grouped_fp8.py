"""Grouped products of 8-bit floats: torch's shapes of scales, values, and who answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import DEVICE, with_scales
from tmm_blas import grouped_mm
from tmm_blas.blas import Blas

import tmm_core
from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.bench import runner, suites
from tmm_core.epilogues import parse
from tmm_core.interop import grouped_operator
from tmm_core.launch import warm
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.verify import compare, random_inputs
from tmm_core.verify.verifier import Verifier

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32

# torch's own, where it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")


@pytest.fixture(autouse=True)
def by_blas() -> Iterator[None]:
    """BLAS instead of Triton's interpreter, which has separate tests."""
    with tmm_core.override(disable="triton.ragged"):
        yield


def eight(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


OFFS = torch.tensor([16, 16, 48], dtype=torch.int32)
#: torch's forms, in the layout that it takes, with the shapes of their scales.
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "m": ((64, 32), (3, 16, 32), (64,), (3, 16)),
    "k": ((32, 64), (16, 64), (96,), (48,)),
    "n": ((3, 32, 16), (64, 16), (3, 32), (64,)),
    "batch": ((3, 8, 32), (3, 16, 32), (3, 8), (3, 16)),
}


def made(form: str, dtype: torch.dtype = E4M3, b_dtype: torch.dtype = E4M3) -> dict[str, Any]:
    of_a, of_b, scales_a, scales_b = FORMS[form]
    return {
        "a": eight(*of_a, dtype=dtype),
        "b": eight(*of_b, dtype=b_dtype).mT,
        "offs": None if form == "batch" else OFFS,
        "scale_a": numbers(*scales_a),
        "scale_b": numbers(*scales_b),
    }


def expression(
    a: Tensor, b: Tensor, offs: Tensor | None, scale_a: Any = None, scale_b: Any = None
) -> Tensor:
    """The product of the dequantised operands, group by group."""
    flat = a.dim() == b.dim() == 2
    count = a.shape[0] if offs is None else len(offs)
    a, b = a.double(), b.double()

    def times(t: Tensor, scale: Any, of_rows: bool, own: bool) -> Tensor:
        """Times a scale that does not depend on the group of the rows (columns)."""
        if scale is None or scale.numel() == 1:
            return t if scale is None else t * scale
        scale = scale.double().reshape(count, -1) if own else scale.double()
        return t * (scale[..., None] if of_rows else scale[..., None, :])

    if flat:
        starts = [0, *offs.tolist()]  # type: ignore[union-attr]
        z = torch.stack([a[:, i:j] @ b[i:j] for i, j in itertools.pairwise(starts)])
        return times(times(z, scale_a, True, True), scale_b, False, True)
    a = times(a, scale_a, True, a.dim() == 3)
    b = times(b, scale_b, False, b.dim() == 3)
    if offs is None:
        return a @ b
    parts = []
    for group, (i, j) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        parts.append(a[i:j] @ b[group] if a.dim() == 2 else a[group] @ b[:, i:j])
    return torch.cat(parts, 0 if a.dim() == 2 else 1)


def close(y: Tensor, expected: Tensor, dtype: torch.dtype = BF16) -> None:
    """Assert that the result is close in all rows and columns that belong to a group."""
    assert y.dtype is dtype
    if y.dim() == 2:
        y = y[: expected.shape[0], : expected.shape[1]]
    assert compare.error(y, expected) <= compare.TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_results_have_torchs_shapes(form: str) -> None:
    """Shapes that torch's operator takes and gives, by its rules for tensors without memory."""
    call = made(form)
    meta = {name: t.to("meta") for name, t in call.items() if t is not None}
    operands = meta.pop("a"), meta.pop("b")
    torchs = torch._scaled_grouped_mm(*operands, **meta)
    y = tmm_core.grouped_matmul(**call)
    assert (y.shape, y.dtype, y.is_contiguous()) == (torchs.shape, torchs.dtype, True)
    for name in ("scale_a", "scale_b"):
        scale = call[name]
        for wrong in (scale[..., :-1], scale[None], scale.double()):
            given = {key: t for key, t in meta.items() if key != name}
            with pytest.raises(RuntimeError):
                torch._scaled_grouped_mm(*operands, **given, **{name: wrong.to("meta")})
            text = "dtype torch.float32" if wrong.dtype != FP32 else f"{name} .* have shape"
            with pytest.raises((ValueError, RuntimeError), match=text):
                tmm_core.grouped_matmul(**{**call, name: wrong})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_values(form: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    call = made(form, *dtypes)
    close(tmm_core.grouped_matmul(**call), expression(**call))
    for change in ({"scale_b": torch.tensor(0.75)}, {"scale_a": None}, {"scale_b": None}):
        changed = {**call, **change}
        close(tmm_core.grouped_matmul(**changed, out_dtype=FP32), expression(**changed), FP32)
    loose = {"a": call["a"].mT.contiguous().mT, "b": call["b"].contiguous()}
    close(tmm_core.grouped_matmul(**{**call, **loose}), expression(**call))


def test_a_sum_takes_scales_in_a_matrix_too() -> None:
    call = made("k")
    stacked = {
        **call,
        "scale_a": call["scale_a"].view(3, 32),
        "scale_b": call["scale_b"].view(3, -1),
    }
    assert torch.equal(tmm_core.grouped_matmul(**call), tmm_core.grouped_matmul(**stacked))


@pytest.mark.parametrize("indexed", [False, True])
def test_the_whole_expression(indexed: bool) -> None:
    """Scales come before alpha and the bias, and go with the rows of a that are gathered."""
    rows = 20 if indexed else 64
    x, weight = eight(rows, 32), eight(3, 2 * 24, 32)
    scale_x, scale_w = numbers(rows), numbers(3, 48)
    bias, residual = torch.randn(3, 48), torch.randn(64, 24, dtype=BF16)
    read = torch.randint(20, (64,)) if indexed else None
    written = torch.cat([torch.randperm(48), torch.arange(48, 64)])
    weights = numbers(64)
    places = {"a_index": read, "out_index": written, "out_weights": weights} if indexed else {}
    y = tmm_core.grouped_linear(
        x, weight, bias, offs=OFFS, residual=residual, alpha=0.5, epilogue="swiglu",
        scale_a=scale_x, scale_b=scale_w, **places,
    )  # fmt: skip
    a, scale = (x, scale_x) if read is None else (x[read], scale_x[read])
    z = 0.5 * expression(a, weight.mT, OFFS, scale, scale_w)
    z[:16] += bias[0]
    z[16:48] += bias[2]
    expected = parse("swiglu").apply(z)
    if indexed:
        scattered = torch.zeros(48, 24, dtype=torch.float64)
        expected = scattered.index_copy(0, written[:48], expected * weights[:48, None])
    close(y, expected + residual[:48])
    assert not indexed or not y[48:].any()


def test_a_batch_takes_a_bias_each() -> None:
    call, bias = made("batch"), torch.randn(3, 16)
    for scale in (call["scale_a"], torch.tensor(0.75), torch.tensor([0.75]), None):
        call["scale_a"] = scale
        y = tmm_core.grouped_matmul(**call, bias=bias, epilogue="silu")
        close(y, torch.nn.functional.silu(expression(**call) + bias[:, None]))
    out = torch.empty(3, 8, 16, dtype=BF16)
    assert tmm_core.grouped_matmul(**{**call, "scale_a": torch.ones(1)}, out=out) is out


def test_scales_outside_all_groups_are_not_read() -> None:
    for form, name in (("m", "scale_a"), ("n", "scale_b")):
        call = made(form)
        expected = expression(**call)
        call[name][48:] = torch.nan
        close(tmm_core.grouped_matmul(**call), expected)


A, B = eight(64, 32), eight(3, 16, 32).mT
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"scale_a": numbers(64, 1)}, ValueError, r"scale_a .* \(64,\), got \(64, 1\)"),
    "gated": ({"epilogue": "swiglu", "scale_b": numbers(3, 8)}, ValueError, r"shape \(3, 16\)"),
    "device": ({"scale_a": numbers(64).to("meta")}, RuntimeError, "same device"),
    "plain numbers": (
        {"a": A.bfloat16(), "b": B.bfloat16(), "scale_a": numbers(64)}, RuntimeError,
        "scale_a is for float8_e4m3fn and float8_e5m2 operands, got torch.bfloat16",
    ),
    "mixed": ({"b": B.bfloat16()}, RuntimeError, "expected a and b to have one dtype"),
    "result": ({"out_dtype": E4M3}, TypeError, "floating dtype of 16 bits or more"),
    "no format": (
        {"a": A.view(torch.float8_e4m3fnuz), "b": B.mT.view(torch.float8_e4m3fnuz).mT},
        tmm_core.UnsupportedProblemError, "float8_e4m3fnuz operands have no installed format",
    ),
    "bias": ({"bias": torch.ones(16).half()}, RuntimeError, "bias must have dtype"),
    "kernel": ({"kernel": "triton.persistent"}, tmm_core.UnsupportedProblemError, "ragged along m"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    changed, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        tmm_core.grouped_matmul(**{"a": A, "b": B, "offs": OFFS, **changed})


def test_products_of_8_bit_floats_have_no_derivative() -> None:
    bias = torch.ones(16, requires_grad=True)
    scale = numbers(64).requires_grad_()
    for terms in ({"bias": bias, "epilogue": "silu"}, {"scale_a": scale}):
        y = tmm_core.grouped_matmul(A, B, offs=OFFS, **terms)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"no derivative for torch\.float8_e4m3fn"):
            y.sum().backward()


def test_the_operator_passes_torchs_checks() -> None:
    call = made("m")
    with torch.autocast("cpu", dtype=torch.float16):
        close(tmm_core.grouped_matmul(**call), expression(**call))
    compiled = torch.compile(
        lambda **given: tmm_core.grouped_matmul(**given, epilogue="relu"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    close(compiled(**call), expression(**call).relu())
    torch._dynamo.reset()
    rest = (None, None, 1.0, "", None, None, None, None, True)
    arguments = (call["a"], call["b"], OFFS, *rest, call["scale_a"], call["scale_b"])
    # torch's test for mutated inputs needs arithmetic that 8-bit floats do not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(grouped_operator.grouped_matmul, arguments, test_utils=tests)


def test_a_plan_for_each_kind_of_scale() -> None:
    """A plan reads the scale's values in every call."""
    call = made("m")
    scale_a, scale_b, one = call["scale_a"], call["scale_b"], torch.tensor(3.0)
    for a, b in itertools.product((scale_a, one, None), (scale_b, one, None)):
        for factor in (1.0, 2.0):
            given = {**call, "scale_a": None if a is None else a * factor, "scale_b": b}
            close(tmm_core.grouped_matmul(**given), expression(**given))
    assert len(warm._plans) == 9
    # Packed: kernels index them by the row's number.
    close(tmm_core.grouped_matmul(**{**call, "scale_a": numbers(64, 2)[:, 0].copy_(scale_a)}),
          expression(**call))  # fmt: skip


def test_records_say_which_scales() -> None:
    problem = tmm_core.problem(**made("k"))
    document = json.loads(json.dumps(problem.to_json()))
    assert (document["a"]["scale"], document["b"]["scale"]) == ("row", "row")
    assert Problem.from_json(document, problem.device, problem.epilogue) == problem
    text = str(tmm_core.explain(**made("k")))
    assert "scales row·row 3 groups along k" in text


@pytest.mark.parametrize("form", ["m", "k", "n"])
def test_inputs_to_measure_with(form: str) -> None:
    instance = tmm_core.problem(**made(form))
    scale_b: Any
    for scale_b in ("row", "tensor", None):
        index_dtype = torch.int32 if form == "m" and scale_b else None
        groups = Groups(3, form, a_index=index_dtype)  # type: ignore[arg-type]
        problem = replace(
            instance, groups=groups,
            b=replace(instance.b, scale=None if scale_b is None else Scale.parse(scale_b)),
        )  # fmt: skip
        recipe = random_inputs.Recipe(whole=False)
        inputs: Any = random_inputs.make(problem, torch.device("cpu"), seed=3, recipe=recipe)
        given = inputs.rows.given
        again = tmm_core.problem(
            inputs.a,
            inputs.b,
            scale_a=inputs.parts.get("a_scale"),
            scale_b=inputs.parts.get("b_scale"),
            **given,
        )
        assert again == problem
        a, scale_a, index = inputs.a, inputs.parts.get("a_scale"), given.get("a_index")
        if index is not None:
            a, scale_a = a[index], scale_a[index]
        expected = expression(a, inputs.b, given["offs"], scale_a, inputs.parts.get("b_scale"))
        found = compare.expected(problem, inputs).numbers
        close(found, expected, found.dtype)
        # Beyond the last group no scale may be read.
        beyond = {"m": inputs.parts.get("a_scale"), "n": inputs.parts.get("b_scale")}.get(form)
        if beyond is not None and beyond.dim() and index is None:
            assert beyond[inputs.rows.ends[-1] :].isnan().all()


@pytest.mark.parametrize("form", ["m", "n"])
def test_products_whose_scales_form_grids_are_verified(form: Any) -> None:
    of_a, of_b = (Operand(E4M3, layout, scale=Scale.parse("1x128")) for layout in ("row", "col"))
    problem = replace(
        tmm_core.problem(**made(form)), k=256, a=of_a, b=of_b, device=DEVICE
    )  # fmt: skip
    blas = Blas()
    launcher = blas.bind(problem, blas.default_config(problem))
    found = Verifier(problem, torch.device("cpu")).verdict(launcher)
    assert found.reason is None
    assert found.error is not None


# -- who answers -----------------------------------------------------------------------------

HOPPER = DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448)
EIGHT, ROW = Operand(E4M3, scale=Scale.parse("row")), Operand(BF16)
PROBLEM = Problem(
    4096, 1536, 2048, EIGHT, replace(EIGHT, layout="col"), ROW, HOPPER,
    groups=Groups(128, "m"),
)  # fmt: skip


def test_the_baseline_is_torchs_on_hopper() -> None:
    blas = Blas()
    assert blas.reasons_against(PROBLEM) == []
    other = with_scales(PROBLEM, {"scales": ("tensor", None)})
    assert blas.reasons_against(other) == []
    for changed, reason in (
        ({"device": replace(HOPPER, capability=(10, 0))}, "is for Hopper"),
        ({"a": Operand(E5M2)}, "takes e4m3 and returns bf16"),
        ({"out": Operand(FP32)}, "takes e4m3 and returns bf16"),
        ({"groups": Groups(128, "k")}, "groups start at multiples of 16 bytes"),
        ({"groups": Groups(128, "n")}, "groups start at multiples of 16 bytes"),
        ({"b": EIGHT}, "a row-major a and a column-major b"),
        ({"k": 2056}, "multiples of 16 as K and N, not 2056 and 1536"),
        ({"n": 12, "epilogue": parse("swiglu")}, "not 2048 and 24"),
        ({"a": replace(EIGHT, aligned=False)}, "aligned to 16 bytes"),
    ):
        (found,) = blas.reasons_against(replace(PROBLEM, **changed))  # type: ignore[arg-type]
        assert reason in found


@pytest.mark.parametrize("scales", [("row", "row"), ("tensor", None), (None, "row")])
def test_torchs_operator_gets_arguments_that_it_accepts(scales: tuple[Any, Any]) -> None:
    """Checked by its rules for tensors without memory: a call that read a value would fail."""
    problem = tmm_core.problem(**{**made("m"), "epilogue": "silu"})
    index = replace(problem.groups, a_index=torch.int64)
    problem = replace(with_scales(problem, {"scales": scales}), device=HOPPER, groups=index)
    assert Blas().reasons_against(problem) == []
    launcher: Any = grouped_mm.bind(problem)
    shapes = {"a_scale": (20,), "b_scale": (3, 16)}
    given: dict[str, Tensor] = {
        name: torch.empty(shape if kind == "row" else (), device="meta")
        for (name, shape), kind in zip(shapes.items(), scales, strict=True)
        if kind is not None
    }
    a, b = eight(20, 32).to("meta"), eight(3, 16, 32).to("meta").mT
    offs = OFFS.to("meta")
    rows = torch.zeros(64, dtype=torch.long, device="meta")
    y = launcher(a, b, None, None, 0.5, None, offs=offs, a_index=rows, **given)
    assert (tuple(y.shape), y.dtype) == ((64, 16), BF16)


@pytest.mark.parametrize("layouts", list(itertools.product(("row", "col"), repeat=2)), ids=str)
@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_groups_start_at_rows_of_memory(along: Any, layouts: Any) -> None:
    """Else torch asserts on the device that they start at multiples of 16 bytes, and no other call
    of the process could use the GPU."""
    of_a, of_b = (Operand(BF16, layout) for layout in layouts)
    problem = Problem(4096, 1536, 2048, of_a, of_b, ROW, HOPPER, groups=Groups(128, along))
    served = {
        "m": layouts[0] == "row", "n": False, "k": layouts == ("col", "row")
    }[along]  # fmt: skip
    assert (Blas().reasons_against(problem) == []) == served
    assert Blas().reasons_against(replace(problem, device=DEVICE)) == []


def test_not_benched_where_torch_has_no_such_product() -> None:
    listed: dict[str, Any] = {"dtypes": ["e4m3"], "scales": ["row", "tensor"], "layout": "nt"}
    document = {
        "rows": listed | {"rows": [16], "epilogues": "bias+swiglu", "experts": [[4, 24, 32]]},
        "sums": listed | {"scales": "row", "ragged": "k", "rows": [16], "experts": [[3, 17, 19]]},
    }
    tasks = [task for each in document.items() for task in suites.expand(*each)]
    options = runner.Options(tune=False, kernels=True, seconds=0.02)
    for measured in runner.run(tasks, torch.device("cpu"), options):
        assert "torch has no grouped product of these 8-bit floats" in measured["failed"]
        assert measured["error"] < 1.6e-2
    assert {task.case.scales for task in suites.select(["grouped_fp8"])} == {"row"}
