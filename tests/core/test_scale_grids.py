"""Operands with scales for groups and blocks, and with several values in a byte. Every kind of call
is compared with the product of their values in fp64. Some calls are refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tmm_core
from tmm_core import Operand, Quantized, Scale, formats
from tmm_core.formats import grids
from tmm_core.verify import compare
from tmm_core.verify.verifier import Verifier

Tensor = torch.Tensor
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
#: Formats with a block of scales each, and the dtypes of scales.
CASES: dict[str, tuple[str, grids.Block, torch.dtype]] = {
    "int4 by 32": ("int4", (1, 32), BF16),
    "int4 by 64": ("int4", (1, 64), torch.float16),
    "int4 by 128": ("int4", (1, 128), torch.float32),
    "int4 by row": ("int4", (1, 0), BF16),
    "int8 by 32": ("int8", (1, 32), BF16),
    "int8 by 128": ("int8", (1, 128), torch.float32),
    "fp8 by row": ("fp8", (1, 0), torch.float32),
    "fp8 by 128": ("fp8", (1, 128), torch.float32),
    "fp8 by block": ("fp8", (128, 128), torch.float32),
    "mxfp4": ("mxfp4", (1, 32), torch.uint8),
    "mxfp8": ("mxfp8", (1, 32), torch.uint8),
    "nvfp4": ("nvfp4", (1, 16), E4M3),
}


def quantized(
    name: str, block: grids.Block, dtype: torch.dtype, *shape: int, zeros: bool = False
) -> tuple[Quantized, Tensor]:
    """Random numbers of a format, and their values in fp64, computed another way."""
    form = formats.named(name)
    *lead, n, k = shape
    numbers = torch.randn(shape, dtype=torch.float32) * (form.limit or 4.0) / 4
    codes = form.quantize(numbers, form.storage[0])
    rows, columns = grids.sizes(block, n, k)
    factor = torch.rand(*lead, rows, columns, dtype=torch.float32) + 0.25
    factor = grids.exponents(factor) if dtype is torch.uint8 else (factor / 8).to(dtype)
    number = torch.exp2(factor.double() - 127) if dtype is torch.uint8 else factor.double()
    zero = torch.randint(0, 16, factor.shape, dtype=form.storage[0]) if zeros else None
    of_rows = (torch.arange(n) // (block[0] or n))[:, None]
    of_k = (torch.arange(k) // (block[1] or k))[None]
    values = form.dequantize(codes).double()
    if zero is not None:
        values = values + form.origin - zero.double()[..., of_rows, of_k]
    values = values * number[..., of_rows, of_k]
    if form.pack == 2:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return Quantized(codes, factor, zero, format=name, block=block), values


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert compare.error(found, expected) <= compare.TOLERANCE[found.dtype]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.slow(quick=6)
def test_a_weight(case: str, zeros: bool) -> None:
    """The call has every kind of term. M and N are odd, and N is not a multiple of a block."""
    if zeros and not formats.named(CASES[case][0]).zeros:
        pytest.skip("the format has no zero points")
    m, n, k = 5, 131, 384
    weight, values = quantized(*CASES[case], n, k, zeros=zeros)
    x = torch.randn(m, k, dtype=BF16)
    expected = x.double() @ values.T
    assert (weight.shape, weight.t().shape) == ((n, k), (k, n))
    torch.testing.assert_close(weight.dequantize().double(), values, rtol=1e-2, atol=1e-6)
    close(tmm_core.linear(x, weight), expected)
    close(tmm_core.matmul(x, weight.t()), expected)
    close(x @ weight.mT, expected)
    close(tmm_core.linear(x.half(), weight), x.half().double() @ values.T)
    close(tmm_core.linear(x.float(), weight, out_dtype=torch.float32), expected)
    close(tmm_core.linear(x.view(1, m, 1, k), weight)[0, :, 0], expected)
    close(tmm_core.linear(x[0], weight), expected[0])
    close(tmm_core.linear(x[:1], weight), expected[:1])
    close(tmm_core.linear(x, weight, out=torch.empty(m, n, dtype=BF16)), expected)
    bias, residual = torch.randn(n, dtype=BF16), torch.randn(m, n, dtype=BF16)
    full = torch.nn.functional.silu(0.5 * expected + bias.double()) + residual.double()
    close(tmm_core.linear(x, weight, bias, alpha=0.5, epilogue="silu", residual=residual), full)
    close(tmm_core.plan(x, weight.t())(x, weight.t().stored, **_parts(weight.t())), expected)
    torch.compiler.reset()  # so many weights exceed what torch compiles of one function
    close(torch.compile(tmm_core.linear, backend="eager")(x, weight), expected)
    torch.compiler.reset()
    close(torch.vmap(lambda row: tmm_core.linear(row, weight))(x), expected)
    with torch.autocast("cpu", BF16):
        close(tmm_core.linear(x.float(), weight), expected)
    found = tmm_core.matmul(weight, x.t())
    close(found, values @ x.t().double())


def _parts(b: Quantized) -> dict[str, Any]:
    return {"scale_b": b.scale} | ({} if b.zero is None else {"zero_b": b.zero})


@pytest.mark.parametrize("case", CASES)
def test_gated_weights_and_experts(case: str) -> None:
    n, k = 64, 256
    gated, values = quantized(*CASES[case], 2 * n, k)
    x = torch.randn(7, k, dtype=BF16)
    gate, up = (x.double() @ values.T).chunk(2, dim=-1)
    y = tmm_core.linear(x, gated, epilogue="swiglu")
    close(y, torch.nn.functional.silu(gate) * up)
    experts, values = quantized(*CASES[case], 3, n + 3, k)
    ends = [4, 4, 7]
    offs = torch.tensor(ends, dtype=torch.int32)
    each = [x[s:e].double() @ v.T for s, e, v in zip([0, *ends], ends, values, strict=False)]
    expected = torch.cat(each)
    close(tmm_core.grouped_linear(x, experts, offs=offs), expected)
    close(tmm_core.grouped_matmul(x, experts.mT, offs=offs), expected)
    order = torch.randperm(7, dtype=torch.int32)
    gathered = tmm_core.grouped_matmul(x, experts.mT, offs=offs, a_index=order)
    close(gathered, torch.cat([
        x[order[s:e].long()].double() @ v.T
        for s, e, v in zip([0, *ends], ends, values, strict=False)
    ]))  # fmt: skip
    stack = torch.randn(3, 5, k, dtype=BF16)
    close(tmm_core.grouped_matmul(stack, experts.mT), stack.double() @ values.mT)
    close(tmm_core.matmul(stack, experts.mT), stack.double() @ values.mT)
    each_bias = torch.randn(3, n + 3, dtype=BF16)
    close(
        tmm_core.grouped_matmul(stack, experts.mT, bias=each_bias),
        stack.double() @ values.mT + each_bias.double()[:, None],
    )
    columns = torch.randn(3, 5, k, dtype=BF16)
    if CASES[case][1][0] == 1:
        close(
            tmm_core.grouped_matmul(columns, _one(experts, 1).t(),
                                    offs=torch.tensor([9, 30, n + 3], dtype=torch.int32)),
            torch.cat([
                c.double() @ values[1].T[:, s:e]
                for c, s, e in zip(columns, [0, 9, 30], [9, 30, n + 3], strict=True)
            ], dim=1),
        )  # fmt: skip


def _one(experts: Quantized, which: int) -> Quantized:
    return Quantized(
        experts.stored[which], experts.scale[which],
        format=experts.format, block=None if experts.block == grids.ROW else experts.block,
    )  # fmt: skip


@pytest.mark.parametrize("weights", [(1, 128), (128, 128)])
@pytest.mark.parametrize("k", [256, 300])
def test_activations_in_blocks(weights: grids.Block, k: int) -> None:
    """8-bit activations with a scale for each 128 values, whose last group may be short."""
    a, of_a = quantized("fp8", (1, 128), torch.float32, 5, k)
    b, of_b = quantized("fp8", weights, torch.float32, 131, k)
    y = tmm_core.matmul(a, b.t(), epilogue="silu")
    assert y.dtype is BF16
    expected = torch.nn.functional.silu(of_a @ of_b.T)
    assert compare.error(y, expected) <= compare.TOLERANCE[BF16]
    experts, values = quantized("fp8", weights, torch.float32, 2, 131, k)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    y = tmm_core.grouped_matmul(a, experts.mT, offs=offs)
    close(y, torch.cat([of_a[:2] @ values[0].T, of_a[2:] @ values[1].T]))
    order = torch.tensor([4, 0, 0, 3, 1], dtype=torch.int32)
    stack = Quantized(a.stored.expand(2, 5, k), a.scale.expand(2, -1, -1), format="fp8")
    bias = torch.randn(2, 131, dtype=BF16)
    y = tmm_core.grouped_matmul(stack, experts.mT, bias=bias)
    close(y, of_a @ values.mT + bias.double()[:, None])
    y = tmm_core.grouped_matmul(a, experts.mT, offs=offs, a_index=order)
    picked = of_a[order.long()]
    close(y, torch.cat([picked[:2] @ values[0].T, picked[2:] @ values[1].T]))


def test_a_scale_of_any_strides_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch gets the packed bytes as [K/2, N], and scales as [K/g, N] where the caller has
    them."""
    from tmm_blas.blas import Blas

    weight, values = quantized("int4", (1, 128), BF16, 24, 512)
    scale = torch.empty(4, 24, dtype=BF16).copy_(weight.scale.t()).t()
    x, seen = torch.randn(5, 512, dtype=BF16), []
    bind = Blas.bind

    def watched(self: Blas, problem: Any, config: Any) -> Any:
        run: Any = bind(self, problem, config)

        def launch(a: Tensor, b: Tensor, *rest: Any, **parts: Tensor) -> Tensor:
            seen.append((problem, b, parts["b_scale"]))
            return run(a, b, *rest, **parts)  # type: ignore[no-any-return]

        return launch

    monkeypatch.setattr(Blas, "bind", watched)
    for grid in (weight.scale, scale):
        own = Quantized(weight.stored, grid, format="int4")
        close(tmm_core.linear(x, own, kernel="blas", alpha=0.5), 0.5 * x.double() @ values.T)
        problem, b, part = seen.pop()
        assert problem.k == 512
        assert (b.shape, b.data_ptr()) == ((256, 24), weight.stored.data_ptr())
        assert (part.shape, part.data_ptr()) == ((4, 24), grid.data_ptr())
        assert part.stride() == grid.t().stride()
        assert problem.b == Operand(torch.uint8, "col", format="int4", scale=Scale((1, 128), BF16))


def test_the_record_of_scales() -> None:
    """Scales by tensor and row keep their texts; a weight with one group has scales by row."""
    assert [str(Scale.parse(t)) for t in ("tensor", "row bfloat16", "1x128", "128x128 uint8")] == [
        "tensor", "row bfloat16", "1x128", "128x128 uint8",
    ]  # fmt: skip
    for bad in ("1x", "x128", "0x128", "column"):
        with pytest.raises(ValueError, match="not '"):
            Scale.parse(bad)
    for shape, block, wanted in (
        ((24, 128), (1, 128), grids.ROW), ((24, 256), (1, 128), (1, 128)),
        ((1, 128), (1, 128), grids.TENSOR), ((128, 128), (128, 128), grids.TENSOR),
        ((129, 128), (128, 128), (128, 128)),
    ):  # fmt: skip
        weight, values = quantized("fp8", block, torch.float32, *shape)
        assert weight.block == wanted
        x = torch.randn(3, shape[1], dtype=BF16)
        close(tmm_core.linear(x, weight), x.double() @ values.T)
    problem = tmm_core.problem(x, weight.t())
    assert problem.b.to_json()["scale"] == "128x128"
    assert "scales 1·128x128" in str(problem)


def test_one_scale_may_have_any_shape_and_several_are_refused() -> None:
    codes = torch.randn(24, 128).to(E4M3)
    x = torch.randn(3, 128, dtype=BF16)
    for shape in ((), (1,), (1, 1)):
        weight = Quantized(codes, torch.full(shape, 0.5), format="fp8")
        assert weight.block == grids.TENSOR
        close(tmm_core.linear(x, weight), x.double() @ codes.double().T / 2)
    # One block holds the whole matrix.
    for rows, block in ((24, grids.TENSOR), (24, (24, 128)), (1, (1, 128))):
        for scales in ((2,), (1, 2), (rows, 2)):
            with pytest.raises(ValueError, match="a scale by tensor must have one number"):
                Quantized(codes[:rows], torch.rand(scales), format="fp8", block=block)
    # A matrix of as many numbers as rows is not a column of them.
    for scales in ((23,), (24, 1, 1), (1, 24)):
        with pytest.raises(ValueError, match="scale"):
            Quantized(codes, torch.rand(scales), format="fp8")


@pytest.mark.parametrize("scales", [(), (24,)])
def test_8_bit_floats_with_their_scale_and_beside_it_are_one_problem(
    scales: tuple[int, ...],
) -> None:
    """They share plans and records."""
    x, codes, scale = (
        torch.randn(3, 128).to(E4M3),
        torch.randn(24, 128).to(E4M3),
        torch.rand(scales),
    )
    together = tmm_core.problem(x, Quantized(codes, scale, format="fp8").t())
    beside = scale[None] if scales else scale
    assert together == tmm_core.problem(x, codes.t(), scale_b=beside)


@pytest.mark.parametrize("case", CASES)
def test_it_behaves_as_a_parameter(case: str) -> None:
    weight, values = quantized(*CASES[case], 24, 256)
    layer = torch.nn.Linear(256, 24, bias=False, dtype=BF16)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(3, 256, dtype=BF16)
    close(layer(x), x.double() @ values.T)
    other, _ = quantized(*CASES[case], 24, 256)
    twin = torch.nn.Linear(256, 24, bias=False, dtype=BF16)
    twin.weight = torch.nn.Parameter(other, requires_grad=False)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    assert layer.to("meta").weight.shape == (24, 256)


@pytest.mark.parametrize("case", CASES)
def test_special_scales(case: str) -> None:
    """A NaN scale makes NaN of the columns that it scales, zero makes zeros, and the largest and
    the smallest powers of two are exact."""
    name, block, dtype = CASES[case]
    weight, _ = quantized(name, block, dtype, 24, 256)
    x = torch.ones(3, 256, dtype=BF16)
    exponent = dtype is torch.uint8
    scale = weight.scale.clone().view(24 if block[0] == 1 else 1, -1)
    marked = scale.clone()
    marked[0, -1] = 255 if exponent else math.nan
    y = tmm_core.linear(x, Quantized(weight.stored, marked, format=name, block=block))
    columns = 24 if block[0] > 1 else 1
    assert y[:, :columns].isnan().all()
    assert y[:, columns:].isfinite().all()
    if not exponent:
        nothing = Quantized(weight.stored, torch.zeros_like(scale), format=name, block=block)
        assert (tmm_core.linear(x, nothing) == 0).all()
    extremes = {torch.float16: (-20, 12), E4M3: (-9, 8)}
    for power in extremes.get(dtype, (-100, 100)):
        extreme = torch.full_like(scale, 127 + power if exponent else 2.0**power)
        own = Quantized(weight.stored, extreme, format=name, block=block)
        values = formats.named(name).values(weight.stored, dtype=torch.float64) * 2.0**power
        close(tmm_core.linear(x.float(), own, out_dtype=torch.float32), x.double() @ values.T)


@pytest.mark.parametrize("case", ["int4 by 64", "int8 by 32", "fp8 by block", "mxfp4"])
@pytest.mark.parametrize("form", ["plain", "gated", "experts"])
@pytest.mark.slow(quick=6)
def test_verification_knows_the_values(case: str, form: str) -> None:
    """The launcher of BLAS passes all of it, with scales of both layouts, and one that reads the
    scales of another group does not."""
    from tmm_blas.blas import Blas

    name, block, dtype = CASES[case]
    n, k = 48, 256
    weight, _ = quantized(name, block, dtype, *([3] if form == "experts" else []), n, k)
    x = torch.randn(9, k, dtype=BF16)
    more: dict[str, Any] = {"epilogue": "swiglu"} if form == "gated" else {}
    if form == "experts":
        more["offs"] = torch.tensor([3, 3, 9], dtype=torch.int32)
    problem = tmm_core.problem(x, weight.mT, **more)
    launcher: Any = Blas().bind(problem, Blas().default_config(problem))
    verifier = Verifier(problem, torch.device("cpu"))
    assert verifier.verdict(launcher).reason is None

    def wrong(*given: Any, **parts: Any) -> Tensor:
        parts["b_scale"] = parts["b_scale"].roll(1, dims=-2)
        return launcher(*given, **parts)  # type: ignore[no-any-return]

    assert "error" in str(verifier.verdict(wrong).reason)


X = torch.randn(5, 256, dtype=BF16)
BYTES = torch.randint(0, 256, (24, 128), dtype=torch.uint8)


def _int4(scale: Tensor, zero: Tensor | None = None, **more: Any) -> Quantized:
    return Quantized(BYTES, scale, zero, format="int4", **more)


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "both": (lambda: _int4(ones(24, 2), group=128, block=(1, 128)), ValueError, "or the block"),
    "tensor": (lambda: _int4(ones()), ValueError, "row or 1x32 or 1x64 or 1x128, not tensor"),
    "group": (lambda: _int4(ones(24, 16), group=16), ValueError, "not 1x16"),
    "shape": (lambda: _int4(ones(24, 2), group=64), ValueError, r"have shape \(24, 4\), got"),
    "turned": (lambda: _int4(ones(2, 24)), ValueError, r"none of them of shape \(2, 24\)"),
    "dimensions": (lambda: _int4(ones(3, 24, 2)), ValueError, "one of a grid"),
    "dtype": (lambda: _int4(ones(24, 2).double()), ValueError, "scale of format int4 must have"),
    "zero's dtype": (
        lambda: _int4(ones(24, 2), ones(24, 2).int()), ValueError, "zero of format int4 must",
    ),
    "zero's shape": (lambda: _int4(ones(24, 2), ones(24, 4)), ValueError, "the shape of scale"),
    "divides": (
        lambda: Quantized(BYTES[:, :72], ones(24, 2), format="int4", group=128), ValueError,
        "groups of 128 do not divide K = 144",
    ),
    "divides, by shape": (
        lambda: Quantized(BYTES[:, :72], ones(24, 2), format="int4"), ValueError, "none of them",
    ),
    "exponents": (
        lambda: Quantized(BYTES, ones(24, 8), format="mxfp4"), ValueError, "dtype torch.uint8",
    ),
    "K": (
        lambda: tmm_core.linear(X[:, :128], _int4(ones(24, 2))), RuntimeError,
        r"cannot be multiplied \(5x128 and 256x24\)",
    ),
    "direction": (
        lambda: tmm_core.matmul(ones(5, 24), _int4(ones(24, 2))), ValueError,
        "b is quantised along its other dimension: transpose it",
    ),
    "direction of two codes in a byte": (  # whose scale alone would serve both
        lambda: tmm_core.matmul(
            ones(5, 1), Quantized(BYTES[:1, :64], ones(1, 1), format="int4")
        ), ValueError,
        "b is quantised along its other dimension: transpose it",
    ),
    "transposed": (
        lambda: Quantized(BYTES[None], ones(1, 24, 2), format="int4").transpose(0, 1),
        NotImplementedError, "last two dimensions",
    ),
    "sums": (
        lambda: tmm_core.grouped_matmul(
            X.t().contiguous().t(), _int4(ones(24, 2)).t(),
            offs=torch.tensor([100, 256], dtype=torch.int32),
        ), ValueError, "would split packed values",
    ),
    "columns": (
        lambda: tmm_core.grouped_matmul(
            torch.ones(2, 5, 256, dtype=BF16),
            quantized("fp8", (128, 128), torch.float32, 256, 256)[0].t(),
            offs=torch.tensor([100, 256], dtype=torch.int32),
        ), ValueError, "groups along N would split blocks of scales of b",
    ),
    "rows": (
        lambda: tmm_core.matmul(
            Quantized(
                torch.ones(2, 256, 256).to(E4M3), ones(2, 2, 2, dtype=torch.float32),
                format="fp8", block=(128, 128),
            ), X.t(),
        ), ValueError, "scales by row, not by several rows",
    ),
    "operator": (
        lambda: torch.ops.tmm.matmul(
            X, BYTES.t(), scale_b=ones(4, 24), formats=",int4/1x128",
        ), ValueError, r"scale_b by 1x128 must have shape \(2, 24\), got \(4, 24\)",
    ),
    "operator's row": (
        lambda: torch.ops.tmm.matmul(X, BYTES.t(), scale_b=ones(1, 1), formats=",int4"),
        ValueError, "format int4 has scales by",
    ),
    "derivative": (
        lambda: tmm_core.linear(X.clone().requires_grad_(), _int4(ones(24, 2))).sum().backward(),
        RuntimeError, "no derivative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_vector_has_no_other_dimension(name: str) -> None:
    """It multiplies from both sides, although it is quantised along its only dimension."""
    storage = BYTES[0] if name == "int4" else torch.randint(-99, 99, (256,), dtype=torch.int8)
    vector = Quantized(storage, torch.rand(2) + 0.5, format=name, group=128)
    expected = X.double() @ vector.dequantize().double()
    for y in (
        tmm_core.matmul(X, vector), tmm_core.matmul(vector, X.t()), tmm_core.linear(X, vector)
    ):  # fmt: skip
        assert compare.error(y, expected) <= compare.TOLERANCE[BF16]


@pytest.mark.parametrize(
    ("data", "scale", "group", "stored", "block"),
    [
        ((256,), (2,), None, (2,), (1, 128)), ((256,), (2,), 128, (2,), (1, 128)),
        ((256,), (1,), None, (1,), (0, 0)), ((256,), (1, 2), None, None, None),
        ((256,), (1, 2), 128, None, None),
        ((2, 3, 4, 256), (2, 3, 4, 2), None, (2, 3, 4, 2), (1, 128)),
        ((2, 3, 4, 256), (2, 3, 4, 2), 128, (2, 3, 4, 2), (1, 128)),
        ((2, 3, 4, 256), (2, 4, 2), 128, None, None),
        ((2, 3, 4, 256), (2, 1, 4, 2), 128, None, None),
        ((2, 3, 4, 256), (2, 3, 4), None, (2, 3, 4, 1), (1, 0)),
        ((2, 3, 4, 256), (2, 3, 4, 1), None, (2, 3, 4, 1), (1, 0)),
    ],
)  # fmt: skip
def test_grids_of_a_row_and_of_a_stack_of_stacks(
    data: tuple[int, ...], scale: tuple[int, ...], group: int | None,
    stored: tuple[int, ...] | None, block: tuple[int, int] | None,
) -> None:  # fmt: skip
    values, scales = torch.zeros(data, dtype=torch.int8), torch.ones(scale)
    if stored is None:
        with pytest.raises(ValueError, match="have shape"):
            Quantized(values, scales, group=group)
        return
    weight = Quantized(values, scales, group=group)
    assert (weight.scale.shape, weight.block) == (stored, block)


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_are_refused(case: str) -> None:
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call()


def test_a_group_of_all_rows_of_a_wide_matrix_is_inferred() -> None:
    """The block that a scale's shape tells, for every format and number of groups."""
    for name, k in itertools.product(("int4", "int8", "fp8"), (64, 128, 256, 384)):
        form = formats.named(name)
        for block in form.grids:
            if block[1] and k % block[1]:
                continue
            weight, values = quantized(name, block, form.scale_dtypes[0], 131, k)
            again = Quantized(weight.stored, weight.scale, format=name)
            assert again.block == weight.block
            torch.testing.assert_close(again.dequantize(), weight.dequantize(), rtol=0, atol=0)
            assert values.shape == again.shape


def test_exponents_have_torchs_values() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    found = grids.factors(every, torch.float32)
    assert found[255].isnan()
    assert torch.equal(found[:255].double(), torch.exp2(every[:255].double() - 127))
    if (e8m0 := getattr(torch, "float8_e8m0fnu", None)) is not None:
        kept = every[1:255]
        assert torch.equal(found[1:255], kept.view(e8m0).float())
        scale = torch.full((24, 8), 127, dtype=torch.uint8).view(e8m0)
        weight = Quantized(BYTES, scale, format="mxfp4")
        assert weight.scale.dtype is torch.uint8
        assert weight.scale.data_ptr() == scale.data_ptr()
    assert grids.exponents(found[:255]).tolist() == every[:255].tolist()
