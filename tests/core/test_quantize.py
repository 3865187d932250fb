"""``tmm_core.quantize``, and weights that torchao quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tmm_core
from tmm_core import Quantized, formats
from tmm_core.formats import grids
from tmm_core.nn import convert
from tmm_core.verify import compare

Tensor = torch.Tensor
BF16 = torch.bfloat16
#: The largest error of a value, relative to the largest of its group: half the distance of codes.
ERROR = {
    "int4": 0.5 / 7,
    "int4_signed": 0.5 / 7,
    "int8": 0.5 / 127,
    "fp8": 2**-4,
    "mxfp4": 0.25,
    "mxfp8": 2**-4 + 2**-3,
    "nvfp4": 0.25,
}


def close(found: Tensor, expected: Tensor) -> None:
    assert compare.error(found, expected) <= compare.TOLERANCE[found.dtype]


@pytest.mark.parametrize("name", ERROR)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_values_are_within_half_a_code_distance(
    name: str, dtype: torch.dtype, lead: tuple[int, ...]
) -> None:
    """The error is at most half the distance between two codes of the group."""
    form = formats.named(name)
    weight = torch.randn(*lead, 67, 512).to(dtype)
    weight[..., 3, :] = 0
    for block in form.grids:
        found = tmm_core.quantize(weight, name, block=block)
        assert (found.shape, found.block) == (weight.shape, block)
        # Scales of 8 bits alone, without a factor for the tensor, would lose small weights.
        wide = [d for d in (dtype, torch.float32) if d in form.scale_dtypes]
        assert found.scale.dtype is (*wide, *form.scale_dtypes)[0]
        rows, columns = block[0] or 67, block[1] or 512
        padded = torch.nn.functional.pad(weight.double(), (0, 0, 0, -67 % rows))
        apart = padded.abs().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        most = apart.amax(dim=(-3, -1)) if block[0] else padded.abs().amax()
        each = most.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :67, :] \
            if block[0] else most  # fmt: skip
        error = (found.dequantize().double() - weight.double()).abs()
        # Scales, and the values that are returned, are rounded to 16 bits.
        assert (error <= (ERROR[name] + 2.0**-7) * each + 1e-12).all()
        assert (found.dequantize()[..., 3, :] == 0).all()


def test_defaults_and_products() -> None:
    weight, x = torch.randn(24, 256, dtype=BF16), torch.randn(5, 256, dtype=BF16)
    found = tmm_core.quantize(weight)
    assert (found.format, found.block) == ("int4", (1, 128))
    assert tmm_core.quantize(weight, group=32).block == (1, 32)
    assert tmm_core.quantize(weight, "int8", group=0).block == grids.ROW
    assert tmm_core.quantize(weight, "mxfp4").block == (1, 32)
    close(tmm_core.linear(x, found), x.double() @ found.dequantize().double().T)
    parameter = torch.nn.Parameter(weight)
    assert not tmm_core.quantize(parameter).requires_grad


def test_invalid_arguments_are_refused() -> None:
    weight = torch.randn(24, 192, dtype=BF16)
    for call, error, text in (
        (lambda: tmm_core.quantize(weight), ValueError, "groups of 128 do not divide K = 192"),
        (lambda: tmm_core.quantize(weight, group=48), ValueError, "not 1x48"),
        (lambda: tmm_core.quantize(weight, group=32, block=(1, 32)), ValueError, "or the block"),
        (lambda: tmm_core.quantize(weight.int()), TypeError, "floating tensor"),
        (lambda: tmm_core.quantize(weight[0]), TypeError, "two dimensions"),
        (lambda: tmm_core.quantize(weight[:, :7], group=0), ValueError, "stores 2 values together"),
        (lambda: tmm_core.quantize(weight, "int3"), ValueError, "unknown format"),
    ):
        with pytest.raises(error, match=text):
            call()


# -- torchao ----------------------------------------------------------------------------


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization")


def _weight(torchao: Any, config: Any, n: int = 64, k: int = 256) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, dtype=BF16))
    torchao.quantize_(model, config)
    return model[0].weight


@pytest.mark.parametrize("case", ["int8", "int8 groups", "float8", "float8 tensor"])
def test_weights_that_torchao_wrote(torchao: Any, case: str) -> None:
    """They are read where they are, and multiply as torchao's values do."""
    from tmm_core import foreign

    config = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(version=2),
        "int8 groups": lambda: torchao.Int8WeightOnlyConfig(
            version=2, granularity=torchao.PerGroup(32)
        ),
        "float8": lambda: torchao.Float8WeightOnlyConfig(version=2),
        "float8 tensor": lambda: torchao.Float8WeightOnlyConfig(version=2),
    }[case]()
    weight = _weight(torchao, config)
    if case == "float8 tensor":
        kind = type(weight)
        weight = kind.from_hp(
            torch.randn(64, 256, dtype=BF16), torch.float8_e4m3fn,
            granularity=torchao.PerTensor(),
        )  # fmt: skip
    x = torch.randn(5, 256, dtype=BF16)
    expected = x.double() @ weight.dequantize().double().T
    own = foreign.read(weight)
    assert isinstance(own, Quantized)
    assert own.zero is None
    assert own.stored.data_ptr() == weight.qdata.data_ptr()
    assert own.scale.data_ptr() == weight.scale.data_ptr()
    close(tmm_core.linear(x, weight), expected)
    close(tmm_core.linear(x, weight, epilogue="silu"), torch.nn.functional.silu(expected))
    close(tmm_core.matmul(x, own.t()), expected)
    if case.startswith("float8"):
        close(tmm_core.matmul(x, weight.t()), expected)
    assert tmm_core.explain(x, own.t()).problem.b.form is formats.named(own.format)


@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_that_torchao_wrote(torchao: Any, symmetric: bool) -> None:
    """Its rounding and its values are torchao's; its packing needs a package that no CPU has."""
    from tmm_core import foreign

    gptq = pytest.importorskip("torchao.prototype.gptq.api")
    n, k, group = 24, 256, 64
    numbers = torch.randn(n, k)
    apart = numbers.unflatten(-1, (-1, group))
    low, high = apart.amin(-1), apart.amax(-1)
    scale = ((high - low) / 15).to(BF16)
    zero = (low + 8 * scale.float()).to(BF16)
    if symmetric:
        scale, zero = (apart.abs().amax(-1) / 7).to(BF16), torch.zeros(n, k // group, dtype=BF16)
    scale, zero = scale.t().contiguous(), zero.t().contiguous()
    codes = gptq._int4_row_quantize_zp_precomputed_qparams(numbers, scale, zero, group)
    values = gptq._int4_row_dequantize_zp(codes, scale, zero, group)
    stored = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    weight = torchao.Int4Tensor(stored, scale, zero, [1, group], torch.Size((n, k)))
    own = foreign.read(weight)
    assert own.stored.data_ptr() == stored.data_ptr()
    assert (own.zero is None) is symmetric
    assert (own.scale.data_ptr() == scale.data_ptr()) is symmetric
    rounded = own.dequantize()  # a multiplication and an addition in bf16
    torch.testing.assert_close(rounded.double(), values.double(), rtol=2**-7, atol=2**-6)
    x = torch.randn(5, k, dtype=BF16)
    close(tmm_core.linear(x, weight), x.double() @ rounded.double().T)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("groups", [[0], [3], [0, 1, 2, 3]])
def test_groups_of_zeros_that_torchao_wrote(
    torchao: Any, groups: list[int], constant: bool
) -> None:
    """A group with a scale of zero has one value, its zero point."""
    n, k, group = 24, 256, 64
    stored = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    scale = torch.rand(k // group, n).to(BF16) + 0.1
    zero = torch.randn(k // group, n).to(BF16)
    scale[groups] = 0
    zero[groups] *= constant
    weight = torchao.Int4Tensor(stored, scale, zero, [1, group], torch.Size((n, k)))
    halves = torch.stack([stored << 4 >> 4, stored >> 4], -1).flatten(1).double()
    apart = halves.unflatten(-1, (-1, group)) * scale.t().double()[..., None]
    values = (apart + zero.t().double()[..., None]).flatten(1)
    x = torch.randn(5, k, dtype=BF16)
    close(tmm_core.linear(x, weight), x.double() @ values.T)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("parameter", [False, True])
def test_exported_products_of_torchaos_weights(torchao: Any, parameter: bool, strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight, requires_grad=False) if parameter else weight

        def forward(self, x: Tensor) -> Tensor:
            return tmm_core.linear(x, self.weight)

    weight = _weight(torchao, torchao.Int8WeightOnlyConfig(version=2)).data
    x = torch.randn(5, 256, dtype=BF16)
    program = torch.export.export(Layer(), (x,), strict=strict).module()
    torch.testing.assert_close(program(x), torch.nn.functional.linear(x, weight))


def test_a_layer_that_was_never_called_is_compiled_whole(torchao: Any) -> None:
    """No other test has this slope, whose epilogue the graph would look up."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LeakyReLU(0.137)).to(BF16)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
    x = torch.randn(5, 64, dtype=BF16)
    expected = model(x)
    assert convert(model).changes[0].kind == "epilogue"
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


def test_zero_points_are_read_again_when_they_change(torchao: Any) -> None:
    from tmm_core import foreign

    weight = _weight(torchao, torchao.Int8WeightOnlyConfig(version=2))
    assert foreign.read(weight).zero is None
    weight.zero_point.fill_(3)
    own = foreign.read(weight)
    x = torch.randn(5, 256, dtype=BF16)
    values = (weight.qdata.double() - 3) * weight.scale.double()
    close(tmm_core.linear(x, own), x.double() @ values.T)


def copy_all(weight: Any, zero: Tensor) -> None:
    other = copy.deepcopy(weight)
    other.zero_point.copy_(zero)
    weight.data.copy_(other)


UNCOUNTED: dict[str, Callable[[Any, Tensor], Any]] = {
    "its data": lambda weight, zero: weight.zero_point.data.copy_(zero),
    "the weight's data": copy_all,
    "numpy": lambda weight, zero: np.copyto(weight.zero_point.numpy(), zero.numpy()),
}


@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_that_torch_does_not_count_change_zero_points(torchao: Any, write: str) -> None:
    weight = _weight(torchao, torchao.Int8WeightOnlyConfig(version=2))
    x = torch.randn(5, 256, dtype=BF16)
    for zero in (0, 3, 0, -2):
        version = weight.zero_point._version
        UNCOUNTED[write](weight, torch.full_like(weight.zero_point, zero))
        assert weight.zero_point._version == version
        values = (weight.qdata.double() - zero) * weight.scale.double()
        close(tmm_core.linear(x, weight), x.double() @ values.T)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_weights_of_torchao_in_inference_mode(
    torchao: Any, config: str, made: bool, used: bool
) -> None:
    """Tensors made there count no changes, so that a GPU's zero points are not looked up."""
    with torch.inference_mode(made):
        weight = _weight(torchao, getattr(torchao, config)(version=2))
        x = torch.randn(5, 256, dtype=BF16)
    with torch.inference_mode(used):
        expected = x.double() @ weight.dequantize().double().T
        for _ in range(2):
            close(tmm_core.linear(x, weight), expected)
            close(tmm_core.linear(x[0], weight, epilogue="relu"), expected[0].relu())
        if config.startswith("Int8") and made is used:
            weight.zero_point.fill_(3)
            values = (weight.qdata.double() - 3) * weight.scale.double()
            close(tmm_core.linear(x, weight), x.double() @ values.T)


def test_quantised_activations_stay_torchaos(torchao: Any) -> None:
    from tmm_core import foreign

    weight = _weight(torchao, torchao.Int8DynamicActivationInt8WeightConfig(version=2))
    assert foreign.read(weight) is weight


def test_a_compiled_call_of_a_parameter() -> None:
    x, weight = torch.randn(5, 16), torch.nn.Parameter(torch.randn(12, 16))
    compiled = torch.compile(tmm_core.linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), x @ weight.T)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp4", "mxfp8", "nvfp4"])
def test_rounding_is_symmetric_and_takes_empty_weights(name: str) -> None:
    """The largest values of both signs are clamped where the scale was rounded down."""
    weight = torch.randn(64, 128).bfloat16()
    one, other = (tmm_core.quantize(each, name).dequantize() for each in (weight, -weight))
    assert not one.isnan().any()
    assert torch.equal(one, -other)
    for shape in ((0, 64), (4, 0), (0, 4, 64)):
        assert tmm_core.quantize(torch.zeros(shape), name).shape == shape
