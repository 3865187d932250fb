"""Models with quantised weights, after ``convert``: logits of the same models with the dequantised
weights."""

from __future__ import annotations

import copy
import importlib
import io
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tmm_core
from tmm_core import api
from tmm_core.nn import convert, fp8_linear, stored_weights
from tmm_core.nn.gated_layers import GatedMLP

Tensor = torch.Tensor
assert_close = torch.testing.assert_close
IDS = torch.arange(12).view(2, 6) % 7 + 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for name in ("kernels", "torchao", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
        yield


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weight and epilogue of every product that is asked for."""
    calls: list[Any] = []
    for name in ("linear", "matmul"):
        call = getattr(api, name)

        def spy(x: Tensor, weight: Tensor, *args: Any, call: Any = call, **kwargs: Any) -> Tensor:
            calls.append((weight, kwargs.get("epilogue")))
            return call(x, weight, *args, **kwargs)

        monkeypatch.setattr(api, name, spy)
    return calls


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(70, 96, bias), nn.Linear(70, 96, bias)
        self.act, self.down = nn.SiLU(), nn.Linear(96, 70, bias)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


def plain(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(70, 50), nn.GELU(), nn.Linear(50, 70), MLP(True), MLP(False)
    return nn.Sequential(*layers).to(dtype).requires_grad_(False)


def values(weight: Any) -> Tensor:
    """The numbers that a weight stands for, in float64."""
    if isinstance(weight, tmm_core.Quantized):
        if weight.along == -2:
            return values(weight.t()).t()
        codes = weight.stored.double()
        if weight.format == "int4":  # the lower of K in the low bits
            low, high = weight.stored & 15, weight.stored >> 4
            codes = torch.stack((low, high), -1).flatten(-2).double() - 8
        scale = weight.scale.double()
        return codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    if hasattr(weight, "qdata"):
        return weight.qdata.double() * weight.scale.double()
    return weight.double()  # type: ignore[no-any-return]


def reference(original: Any, quantised: Any) -> Any:
    """``original`` in float64, with the values of the weights of ``quantised``."""
    found = copy.deepcopy(original).double()
    given = dict(quantised.named_parameters())
    for name, parameter in found.named_parameters():
        parameter.data = values(given[name])
    return found


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    assert found.dtype is dtype
    assert_close(found.double(), expected.double(), rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_weights_are_rounded(weights: str, dtype: torch.dtype, products: list[Any]) -> None:
    original = plain(dtype)
    model = copy.deepcopy(original)
    report = convert(model, weights=weights)
    assert "8 weights rounded" in str(report)
    x = torch.randn(5, 70, dtype=dtype)
    expected = reference(original, model)(x.double())
    with torch.no_grad():
        close(model(x), expected, dtype)
    # Gate and up are one product of the joined weights.
    assert [epilogue for _, epilogue in products] == ["gelu", "", "swiglu", "", "swiglu", ""]
    assert all(isinstance(weight, tmm_core.Quantized) for weight, _ in products)
    assert products[2][0].shape == (192, 70)
    # To nearest: half a step of the largest number of the row.
    step = {"int8": 1 / 254, "fp8": 1 / 28, "int4": 1 / 14}[weights]
    for given, now in zip(original.parameters(), model.parameters(), strict=True):
        if given.dim() == 2:
            error = (values(now) - given.double()).abs().amax(-1)
            assert bool((error <= 1.01 * step * given.double().abs().amax(-1)).all())
            assert now.dtype is dtype
            groups = 3 if weights == "int4" and now.shape[1] == 96 else 1
            assert now.scale.shape == (len(now), groups)
    model.double()  # as plain weights, which follow a cast
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert all(type(p) is nn.Parameter and p.dtype is torch.double for p in model.parameters())
    close(model(x.double()).to(dtype), expected, dtype)


def test_a_row_of_zeros_and_an_unknown_format() -> None:
    layer = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(layer.weight)
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match="int3"):
        convert(model, weights="int3")
    assert type(layer) is nn.Linear
    convert(model, weights="int8")
    assert not model(torch.randn(3, 8)).any()
    odd = nn.Sequential(nn.Linear(7, 4))
    assert "stores 2 values together, K is 7" in str(convert(odd, weights="int4"))
    assert type(odd[0].weight) is nn.Parameter


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "int4_signed", "mxfp4", "mxfp8", "nvfp4"])
def test_every_format_and_layers_that_no_format_serves(name: str) -> None:
    """Layers of float64 and of complex numbers stay as they were, and the report says so."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    x = torch.randn(5, 64)
    expected = model(x)
    wide = copy.deepcopy(model).double()
    convert(model, weights=name)
    assert all(isinstance(layer.weight, tmm_core.Quantized) for layer in (model[0], model[2]))
    assert (model(x) - expected).norm() / expected.norm() < 0.3
    report = convert(wide, weights=name)
    assert str(report).count("products of torch.float64 take no quantised weight") == 2
    torch.testing.assert_close(wide(x.double()), expected.double(), rtol=1e-4, atol=1e-5)
    layer = nn.Linear(64, 8, dtype=torch.complex64)
    report = convert(nn.Sequential(layer), weights=name)
    assert "products of torch.complex64 take no quantised weight" in str(report)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_gate_and_up_that_were_quantised_before_are_one_product(
    format: str, products: list[Any]
) -> None:
    mlp: Any = nn.Sequential(MLP(True)).eval()
    for layer in (mlp[0].gate, mlp[0].up):
        quantised = stored_weights.quantised(torch.randn(96, 64), format)
        layer.weight = nn.Parameter(quantised, requires_grad=False)
    x = torch.randn(5, 64)
    with torch.no_grad():
        expected = mlp(x)
        report = convert(mlp)
        products.clear()
        assert_close(mlp(x), expected, rtol=1e-5, atol=1e-4)
        (joint, epilogue), _ = products
        assert (tuple(joint.shape), epilogue) == ((192, 64), "swiglu")
        report.undo()
        assert_close(mlp(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("learns", [True, False])
def test_a_weight_learns_again_after_undo_if_it_did_before(learns: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).requires_grad_(learns)
    report = convert(model, weights="int8")
    assert report.rounded == ["0.weight"]
    assert not model[0].weight.requires_grad
    report.undo()
    assert not report.rounded
    assert not report
    assert [p.requires_grad for p in model.parameters()] == [learns, learns]
    assert model[0].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_an_fp8_linear_whose_weight_is_stored_otherwise(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(4, 8).to(dtype), requires_grad=False)
    layer = types.SimpleNamespace(
        weight=weight, weight_scale_inv=torch.tensor(0.5), block_size=(128, 128)
    )
    assert fp8_linear.unfit(layer) == f"its weight is stored as {dtype}"
    layer.weight = weight.to(torch.float8_e4m3fn)
    assert fp8_linear.unfit(layer) is None
    layer.weight_scale_inv = torch.ones(3)  # neither of the tensor nor of its blocks
    assert str(fp8_linear.unfit(layer)).startswith("its scales are not supported (")


def test_scales_that_are_not_exponents_are_numbers() -> None:
    from tmm_core.nn import stored_weights

    numbers = torch.tensor([0.5, 2.0, 3.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert torch.equal(stored_weights.in_fp32(numbers.to(dtype)), numbers)
    exponents = torch.tensor([126, 128, 127], dtype=torch.uint8)
    powers = torch.tensor([0.5, 2.0, 1.0])
    assert torch.equal(stored_weights.in_fp32(exponents), powers)
    assert torch.equal(stored_weights.in_fp32(exponents.view(torch.float8_e8m0fnu)), powers)


def test_copies_moves_and_state_dicts() -> None:
    model = nn.Sequential(MLP(True)).requires_grad_(False)
    convert(model, weights="int8")
    x = torch.randn(5, 70)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(MLP(True)).requires_grad_(False)
    convert(other, weights="int8")
    other.load_state_dict(torch.load(file, weights_only=False))
    for each in (other, copy.deepcopy(model)):
        assert_close(each(x), expected)
        assert isinstance(each[0], GatedMLP)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(x), expected)


def test_a_gradient_is_refused() -> None:
    model = plain()
    convert(model, weights="int8")
    with pytest.raises(RuntimeError, match="no derivative"):
        model(torch.randn(5, 70, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_models_of_transformers(weights: str) -> None:
    """A tied head stays as it is; Llama's and GPT-2's layers are rounded."""
    t = library("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    for config, kind, rounded in (
        (t.LlamaConfig(**sizes, intermediate_size=48), t.LlamaForCausalLM, 15),
        (t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50), t.GPT2LMHeadModel, 8),
    ):
        torch.manual_seed(0)
        original = kind(config).eval()
        model = copy.deepcopy(original)
        report = convert(model, weights=weights)
        assert len(report.rounded) == rounded
        tied = [item.path for item in report.left if "used elsewhere" in item.reason]
        assert tied == ([] if rounded == 15 else ["lm_head"])
        expected = reference(original, model)
        with torch.no_grad():
            close(model(IDS).logits, expected(IDS).logits, torch.float32)
            tokens = model.generate(
                IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        assert tokens.shape == (2, 10)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_weights_of_torchao(config: str, dtype: torch.dtype, products: list[Any]) -> None:
    quantization = library("torchao.quantization")
    original = plain(dtype)
    model = copy.deepcopy(original)
    quantization.quantize_(model, getattr(quantization, config)())
    report = convert(model)
    assert not report.left
    x = torch.randn(5, 70, dtype=dtype)
    with torch.no_grad():
        close(model(x), reference(original, model)(x.double()), dtype)
    assert [epilogue for _, epilogue in products[:2]] == ["gelu", ""]
    layer = model[0]
    assert products[0][0].stored.data_ptr() == layer.weight.qdata.data_ptr()
    # Read again after its parts were replaced.
    layer.weight.qdata = torch.zeros_like(layer.weight.qdata)
    assert_close(layer(x), layer.bias.expand(5, -1))
    # Gradients of the input are torchao's.
    given = x.clone().requires_grad_()
    model[2](given[:, :50]).sum().backward()
    assert_close(given.grad[:, :50].double(), values(model[2].weight).sum(0).expand(5, -1),
                 rtol=2e-2, atol=2e-2)  # fmt: skip
    report.undo()
    assert type(layer) is nn.Linear
    assert type(layer.weight).__module__.startswith("torchao")


def in_blocks(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A weight in e4m3, and the scales of its blocks."""
    n, k = weight.shape
    rows, columns = -(-n // size), -(-k // size)
    scale = torch.rand(rows, columns) + 0.5
    each = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:n, :k]
    return (weight / each).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_fp8_linear_of_transformers(block: Any, dtype: torch.dtype, products: list[Any]) -> None:
    library("transformers")
    theirs = importlib.import_module("transformers.integrations.finegrained_fp8").FP8Linear
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    exact: list[nn.Module] = []
    for k, n in ((200, 130), (130, 70)):
        layer = theirs(k, n, block_size=block, has_bias=True)
        weight = torch.randn(n, k) / k**0.5
        stored, scale = in_blocks(weight, 128)
        if block is None:
            stored, scale = weight.to(torch.float8_e4m3fn), torch.tensor(0.75)
        layer.weight.data, layer.weight_scale_inv.data = stored, scale
        layer.bias.data = torch.randn(n).to(dtype)
        each = scale if block is None else scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        plain = nn.Linear(k, n, dtype=torch.float64)
        plain.weight.data = stored.double() * (each if block is None else each[:n, :k]).double()
        plain.bias.data = layer.bias.data.double()
        layers += [layer, nn.SiLU()]
        exact += [plain, nn.SiLU()]
    model = nn.Sequential(*layers)
    report = convert(model)
    assert [change.kind for change in report.changes] == ["epilogue", "epilogue"]
    x = torch.randn(5, 200, dtype=dtype)
    with torch.no_grad():
        close(model(x), nn.Sequential(*exact)(x.double()), dtype)
        close(model[0](x), exact[0](x.double()), dtype)
    assert [epilogue for _, epilogue in products] == ["silu", "silu", ""]
    report.undo()
    assert type(model[0]) is theirs
    assert fp8_linear.theirs() is theirs
