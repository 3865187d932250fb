"""Expert layers of Transformers with quantised weights give the logits of the same models with
dequantised weights, without any kernel from a hub."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tmm_core
from tmm_core import Quantized, api, quantize
from tmm_core.nn import Experts, convert, stored_experts, stored_weights
from tmm_core.nn.mxfp4_experts import Mxfp4Experts

Tensor = torch.Tensor
BF16 = torch.bfloat16
IDS = torch.arange(14).view(2, 7) % 11 + 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 48,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 96, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "qk_nope_head_dim": 32,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 48},
}  # fmt: skip


@pytest.fixture(autouse=True)
def ignore_warnings_of_libraries() -> Iterator[None]:
    with warnings.catch_warnings():
        for name in ("accelerate", "kernels", "torch", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
        yield


@pytest.fixture
def ours() -> Iterator[Any]:
    """tmm's integration module, registered with Transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers", minversion="5.0")
        pytest.importorskip("accelerate")
        module = importlib.import_module("tmm_core.integrations.transformers")
    module.register()
    yield module
    module.unregister()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weight and epilogue of every grouped product that is called."""
    calls: list[Any] = []
    original = tmm_core.grouped.grouped_matmul

    def spy(x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        calls.append((weight, kwargs.get("epilogue")))
        return original(x, weight, **kwargs)

    monkeypatch.setattr(tmm_core.grouped, "grouped_matmul", spy)
    return calls


class Gate:
    def _apply_gate(self, joint: Tensor) -> Tensor:
        return joint[..., ::2]


@pytest.mark.parametrize(("device", "k"), [("cpu", 64), ("meta", 64), ("cpu", 80)])
def test_mxfp4_experts_have_parameters_as_checkpoints_name_them(device: str, k: int) -> None:
    layer = SimpleNamespace(
        gate_kind=Gate, config=SimpleNamespace(), num_experts=3, hidden_size=k,
        intermediate_size=32, alpha=1.7, limit=7.0,
        down_proj_bias=torch.empty(1, dtype=BF16),
    )  # fmt: skip
    if k % 32:
        with pytest.raises(ValueError, match="32 do not divide K = 80 of gate_up_proj"):
            Mxfp4Experts(layer, device)
        return
    made = dict(Mxfp4Experts(layer, device).named_parameters())
    assert {name: tuple(each.shape) for name, each in made.items()} == {
        "gate_up_proj_blocks": (3, 64, 2, 16), "gate_up_proj_scales": (3, 64, 2),
        "gate_up_proj_bias": (3, 64), "down_proj_blocks": (3, 64, 1, 16),
        "down_proj_scales": (3, 64, 1), "down_proj_bias": (3, 64),
    }  # fmt: skip
    assert {each.device.type for each in made.values()} == {device}
    assert not any(each.requires_grad for each in made.values())
    dtypes = {each.dtype for name, each in made.items() if name.endswith("bias")}
    assert dtypes == {BF16}
    assert {each.dtype for each in made.values()} - dtypes == {torch.uint8}


def tiny(name: str, dtype: torch.dtype = BF16) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]}, dtype=dtype)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation("eager")  # which takes float64
    return model


def in_blocks(weight: Tensor, block: Any, exponents: bool, parts: int) -> Any:
    """Return a weight in e4m3, the scales of its blocks or parts as checkpoints store them, and the
    weight's values in fp64."""
    *_, n, k = weight.shape
    rows, columns = (-(-n // 128), -(-k // 128)) if block else (parts, 1)
    shape = (*weight.shape[:-2], rows, columns)
    scale = torch.exp2(torch.randint(-3, 3, shape).float())
    scale = scale if exponents else scale * (torch.rand(shape) + 0.5)
    each = scale.repeat_interleave(-(-n // rows) if not block else 128, -2)
    each = each.repeat_interleave(-(-k // columns) if not block else 128, -1)[..., :n, :k]
    stored = (weight.float() / each).to(torch.float8_e4m3fn)
    values = stored.double() * each.double()
    return stored, scale.to(torch.float8_e8m0fnu) if exponents else scale, values


def in_fp8(model: Any, block: tuple[int, int] | None, exponents: bool, skipped: list[str]) -> Any:
    """Return the model with Transformers' layers for 8-bit floats, and a model in float64 with the
    same values."""
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    transformers = importlib.import_module("transformers")
    config = transformers.FineGrainedFP8Config(weight_block_size=block)
    config.scale_fmt = "ue8m0" if exponents else "float"
    stored, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fp8.replace_with_fp8_linear(
        stored, quantization_config=config, modules_to_not_convert=["lm_head", "gate", *skipped]
    )
    given = dict(model.named_parameters())
    wanted = dict(exact.named_parameters())
    for path, module in stored.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta or name.endswith("_scale_inv"):
                continue
            key = f"{path}.{name}"
            if parameter.dtype is not torch.float8_e4m3fn:
                module._parameters[name] = nn.Parameter(given[key].data)
                continue
            parts = 2 if name == "gate_up_proj" else 1  # gate and up
            codes, scale, values = in_blocks(given[key].data, block, exponents, parts)
            wanted[key].data.copy_(values)
            if isinstance(module, nn.Linear) and block is None:
                scale = scale.reshape(())
            place = f"{name}_scale_inv" if name != "weight" else "weight_scale_inv"
            expected = module._parameters[place]
            assert scale.shape == expected.shape
            assert scale.dtype is expected.dtype
            module._parameters[name] = nn.Parameter(codes, False)
            module._parameters[place] = nn.Parameter(scale, False)
    assert not any(t.is_meta for t in stored.parameters())
    return stored, exact


def close(model: Any, exact: Any, most: float = 0.06) -> None:
    device = next(model.parameters()).device
    with torch.no_grad():
        found, expected = model(IDS.to(device)).logits, exact.to(device)(IDS.to(device)).logits
    assert found.dtype is BF16
    limit = most * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "block", "exponents"),
    [
        ("Qwen3Moe", (128, 128), False), ("Qwen3Moe", (128, 128), True), ("Qwen3Moe", None, False),
        ("DeepseekV3", (128, 128), False),
    ],
)  # fmt: skip
def test_models_in_8_bit_floats(
    name: str, block: Any, exponents: bool, device: str, ours: Any, products: list[Any]
) -> None:
    layers = 1 if name == "DeepseekV3" else 2
    original = tiny(name)
    # Experts alone, by name.
    model, exact = in_fp8(original, block, exponents, ["_proj", "_mqa"])
    model.to(device).set_experts_implementation("tmm")
    close(model, exact)
    assert [epilogue for _, epilogue in products] == ["swiglu", None] * layers
    assert all(weight.format == "fp8" for weight, _ in products)
    layer = model.model.layers[-1].mlp.experts
    assert products[-2][0].stored.data_ptr() == layer.gate_up_proj.data_ptr()
    ours.unregister(model)
    assert model.config._experts_implementation == "grouped_mm"
    # All layers, by convert.
    products.clear()
    model, exact = in_fp8(original, block, exponents, [])
    report = convert(model.to(device))
    close(model, exact)
    kinds = [change.kind for change in report.changes]
    assert kinds.count("experts") == layers
    assert kinds.count("linear") >= 8
    assert [epilogue for _, epilogue in products] == ["swiglu", None] * layers
    layer = model.model.layers[-1].mlp.experts
    assert "TransformersExperts" in {base.__name__ for base in type(layer).__mro__}
    report.undo()
    assert type(layer).__mro__[1] is nn.Module


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [(128, 128), None])
def test_activations_are_rounded(
    block: Any, device: str, ours: Any, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all layers for 8-bit floats. Results differ from the float64 model by the rounding of
    activations to e4m3, which keeps 3 bits of the mantissa."""
    calls: list[Any] = []
    original = api.linear

    def spy(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((x, weight))
        return original(x, weight, *args, **kwargs)

    monkeypatch.setattr(api, "linear", spy)
    model, exact = in_fp8(tiny("Qwen3Moe"), block, False, [])
    report = convert(model.to(device), activations="fp8")
    close(model, exact, 0.2)
    blocks = (1, 128) if block else (1, 0)
    in_8_bits = [x for x, weight in calls if isinstance(weight, Quantized)]
    assert len(in_8_bits) == 8
    assert all(isinstance(x, Quantized) and x.block == blocks for x in in_8_bits)
    layer = model.model.layers[0].mlp.experts
    assert layer.rounds_activations
    x = torch.randn(9, 192, device=device, dtype=BF16)
    index = torch.randint(0, 8, (9, 2), device=device)
    weights = torch.rand(9, 2, device=device, dtype=BF16)
    rounded = layer(x, index, weights)
    # Compare with activations that are rounded by hand: rows are rounded before they are gathered.
    narrow = quantize(x, "fp8", group=128 if block else 0).dequantize()
    layer.rounds_activations = False
    assert not torch.equal(rounded, layer(x, index, weights))
    limit = 0.04 * float(rounded.abs().max())
    torch.testing.assert_close(rounded, layer(narrow, index, weights), rtol=0, atol=limit)
    layer.rounds_activations = True
    report.undo()
    assert not hasattr(layer, "rounds_activations")


def test_activations_with_a_stored_scale_and_of_plain_layers_are_not_rounded(ours: Any) -> None:
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    layer = fp8.FP8Linear(128, 128, (128, 128), activation_scheme="static")
    plain = nn.Linear(128, 128)
    convert(nn.Sequential(layer, plain), activations="fp8")
    assert not layer.rounds_activations
    with pytest.raises(ValueError, match='rounded to "fp8" or not'):
        convert(nn.Sequential(plain), activations="int8")


def through_data(scale: nn.Parameter, values: Tensor) -> None:
    scale.data.copy_(values)  # the parameter's version stays the same


def through_numpy(scale: nn.Parameter, values: Tensor) -> None:
    scale.view(torch.uint8).numpy()[:] = values.to(scale.dtype).view(torch.uint8).numpy()


def through_assigned_data(scale: nn.Parameter, values: Tensor) -> None:
    scale.data = values.to(scale.dtype)


WRITES = (nn.Parameter.copy_, through_data, through_numpy, through_assigned_data)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_scales_are_read_again_after_they_changed(write: Any, dtype: torch.dtype) -> None:
    scale = nn.Parameter(torch.full((2, 2), 2.0).to(dtype), False)
    assert torch.equal(stored_weights.in_fp32(scale), torch.full((2, 2), 2.0))
    for value in (1.0, 4.0):
        write(scale, torch.full((2, 2), value))
        assert torch.equal(stored_weights.in_fp32(scale), torch.full((2, 2), value))
    plain = nn.Parameter(torch.ones(2, 2))
    assert stored_weights.in_fp32(plain).data_ptr() == plain.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16, torch.float32], ids=str)
def test_layers_in_8_bit_floats_made_in_inference_mode(dtype: torch.dtype) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    with torch.inference_mode():
        layer = fp8.FP8Linear(64, 32, (128, 128))
        layer.weight = nn.Parameter(torch.randn(32, 64).to(torch.float8_e4m3fn), False)
        layer.weight_scale_inv = nn.Parameter(torch.full((1, 1), 0.5).to(dtype), False)
        convert(nn.Sequential(layer))
        x = torch.randn(3, 64)
        for factor in (0.5, 0.25):
            layer.weight_scale_inv.copy_(torch.full((1, 1), factor))
            expected = x.double() @ (layer.weight.double() * factor).T
            torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
TABLE = torch.cat((TABLE, -TABLE))


def in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks and scales of weights ``[E, N, K]`` as gpt-oss stores them, and the rounded
    values."""
    groups = weight.double().unflatten(-1, (-1, 32))
    power = groups.abs().amax(-1).log2().floor() - 2
    codes = (groups / torch.exp2(power)[..., None])[..., None] - TABLE
    codes = codes.abs().argmin(-1)
    values = (TABLE[codes] * torch.exp2(power)[..., None]).flatten(-2)
    low, high = codes[..., ::2], codes[..., 1::2]
    return (low | high << 4).to(torch.uint8), (power + 127).to(torch.uint8), values


def test_converted_experts_leave_training_to_transformers(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products in 8 bits may have gradients for activations; tmm's have none."""
    model, _ = in_fp8(tiny("Qwen3Moe"), (128, 128), False, [])
    convert(model)
    layer = model.model.layers[0].mlp.experts
    x, index = torch.randn(3, 192, dtype=BF16), torch.zeros(3, 2, dtype=torch.int64)
    weights = torch.rand(3, 2, dtype=BF16)
    seen: list[Any] = []
    monkeypatch.setattr(layer.config, "_experts_implementation", "spy")

    def spy(self: Any, states: Tensor, index: Tensor, top_k_weights: Tensor) -> None:
        seen.append((states, index, top_k_weights))

    monkeypatch.setitem(ours._fp8_experts()._global_mapping, "spy", spy)
    for states, scores in (
        (x.clone().requires_grad_(), weights),
        (x, weights.clone().requires_grad_()),
    ):
        layer(states, index, top_k_weights=scores)
        assert seen.pop() == (states, index, scores)
        with torch.no_grad():
            assert layer(states, index, scores).shape == x.shape
    assert not seen


@pytest.mark.parametrize("exponents", [True, False])
def test_experts_of_4_bits(exponents: bool, ours: Any) -> None:
    """As in DeepSeek-V4, whose other layers are in 8 bits."""
    # Transformers gives the class its interface where it first replaces a layer.
    in_fp8(tiny("Qwen3Moe"), (128, 128), False, [])
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    config = tiny("Qwen3Moe").config
    config.expert_dtype, config._experts_implementation = "fp4", "tmm"
    options = {"scale_fmt": "ue8m0" if exponents else "float"}
    if "expert_dtype" in inspect.signature(fp8.FP8Experts).parameters:  # before, the config had it
        options["expert_dtype"] = "fp4"
    layer = fp8.FP8Experts(config, block_size=(128, 128), **options)
    layer.is_transposed, layer.is_concatenated = False, True
    values = {}
    for name in ("gate_up_proj", "down_proj"):
        old = layer._parameters[name]
        weight = torch.randn(*old.shape[:-1], old.shape[-1] * 2) / 16
        blocks, scales, values[name] = in_mxfp4(weight)
        layer._parameters[name] = nn.Parameter(blocks.flatten(-2).view(torch.int8), False)
        if exponents:
            scales = scales.view(torch.float8_e8m0fnu)
        else:
            scales = torch.exp2(scales.float() - 127)
        assert layer._parameters[f"{name}_scale_inv"].shape == scales.shape
        layer._parameters[f"{name}_scale_inv"] = nn.Parameter(scales, False)
    x, index = torch.randn(5, 192, dtype=BF16), torch.randint(0, 8, (5, 2))
    weights = torch.rand(5, 2, dtype=BF16)
    report = convert(nn.Sequential(layer))
    if not exponents:
        assert "groups of mxfp4 have exponents as scales" in str(report)
        return
    assert not report.left
    expected = torch.zeros(5, 192, dtype=torch.float64)
    for token in range(5):
        for expert, weight in zip(index[token].tolist(), weights[token].double(), strict=True):
            gate, up = (values["gate_up_proj"][expert] @ x[token].double()).chunk(2)
            y = values["down_proj"][expert] @ (nn.functional.silu(gate) * up)
            expected[token] += weight * y
    found = layer(x, index, weights).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def checkpoint(path: Path) -> Any:
    """Write a tiny gpt-oss in MXFP4, as OpenAI's checkpoints are; return a float64 model with the
    same values, and the state dict."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = tiny("GptOss")
    exact = copy.deepcopy(model).double()
    state = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = parameter.clone()
            continue
        blocks, scales, values = in_mxfp4(parameter.mT)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact.get_parameter(name).data.copy_(values.mT)
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    safetensors.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return exact, state


@pytest.mark.parametrize("which", ["fp8", "exponents", "rounded", "mxfp4"])
@pytest.mark.slow
def test_compiled_experts(which: str, ours: Any) -> None:
    if which == "mxfp4":
        own = tiny("GptOss").model.layers[0].mlp.experts
        layer: Any = Mxfp4Experts(own)
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales, _ = in_mxfp4(getattr(own, name).data.mT)
            getattr(layer, f"{name}_blocks").data = blocks
            getattr(layer, f"{name}_scales").data = scales
            getattr(layer, f"{name}_bias").data = getattr(own, f"{name}_bias").data
    else:
        model, _ = in_fp8(tiny("Qwen3Moe"), (128, 128), which == "exponents", [])
        convert(model, activations="fp8" if which == "rounded" else None)
        layer = model.model.layers[0].mlp.experts
    x, index = torch.randn(9, 192, dtype=BF16), torch.randint(0, layer.num_experts, (9, 2))
    weights = torch.rand(9, 2, dtype=BF16)
    with torch.no_grad():
        expected = layer(x, index, weights)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, index, weights), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_gpt_oss_in_mxfp4(device: str, ours: Any, products: list[Any], tmp_path: Path) -> None:
    """Load a checkpoint and save it again, without the hub from which Transformers gets kernels."""
    pytest.importorskip("kernels")
    if not importlib.import_module("transformers.utils.import_utils").is_kernels_available():
        pytest.skip("Transformers wants another version of kernels")
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip(
            "Transformers dequantises MXFP4 where torch is built for GPUs and there is none"
        )
    transformers = importlib.import_module("transformers")
    exact, state = checkpoint(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="tmm", device_map=device
    )
    layer = model.model.layers[1].mlp.experts
    assert isinstance(layer, Mxfp4Experts)
    # Transformers' own conversions would swizzle loaded weights, and undo it for saved ones.
    assert model.hf_quantizer.get_weight_conversions() == []
    close(model, exact)
    for weight, epilogue in products[::2]:
        assert epilogue.startswith("clamped_swiglu(1.702,7.0)@")
        assert isinstance(weight, Quantized)
        assert weight.format == "mxfp4"
    assert len(products) == 4
    assert products[2][0].stored.data_ptr() == layer.gate_up_proj_blocks.data_ptr()
    model.save_pretrained(tmp_path / "again")
    again = importlib.import_module("safetensors.torch").load_file(
        tmp_path / "again" / "model.safetensors"
    )
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    products.clear()
    assert not any("experts" in item.path for item in convert(model).left)
    close(model, exact)
    assert len(products) == 4
    ours.unregister(model)
    close(model, exact)  # the layers are tmm's own


def test_mxfp4_that_is_dequantised(ours: Any, tmp_path: Path) -> None:
    """With ``Mxfp4Config(dequantize=True)`` Transformers' own layers are loaded as before."""
    transformers = importlib.import_module("transformers")
    exact, _ = checkpoint(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True),
        experts_implementation="tmm", device_map="cpu",
    )  # fmt: skip
    assert type(model.model.layers[0].mlp.experts).__name__ == "GptOssExperts"
    close(model, exact)
    ours.unregister(model)
    quantizer = importlib.import_module("transformers.quantizers.quantizer_mxfp4")
    method = quantizer.Mxfp4HfQuantizer._process_model_before_weight_loading
    assert method.__module__ == quantizer.__name__
    assert not hasattr(method, "_tmm_theirs")


@pytest.mark.parametrize(
    ("name", "weights"),
    [("Qwen3Moe", "int8"), ("DeepseekV3", "fp8"), ("GptOss", "int4"), ("GptOss", "mxfp4")],
)
def test_weights_of_experts_are_rounded(
    name: str, weights: str, ours: Any, products: list[Any]
) -> None:
    """Weights in both layouts. After ``undo`` the model has the rounded values."""
    model = tiny(name)
    exact = copy.deepcopy(model).double()
    report = convert(model, weights=weights)
    wanted = dict(exact.named_parameters())
    rounded = 0
    for path, parameter in model.named_parameters():
        if isinstance(parameter, Quantized):
            wanted[path].data.copy_(parameter.dequantize())
            error = (parameter.dequantize().double() - tiny_weight(name, path)).abs()
            step = {"int8": 1 / 254 + 2**-8, "fp8": 1 / 26, "int4": 1 / 13, "mxfp4": 1 / 3.9}[
                weights
            ]
            assert float(error.max()) <= step * float(tiny_weight(name, path).abs().max())
            rounded += path.endswith(("experts.gate_up_proj", "experts.down_proj"))
    layers = 1 if name == "DeepseekV3" else 2
    assert rounded == 2 * layers
    close(model, exact)
    assert [weight.format for weight, _ in products] == [weights] * 2 * layers
    report.undo()
    layer = model.model.layers[-1].mlp.experts
    assert type(layer.down_proj) is nn.Parameter
    assert layer.down_proj.is_contiguous()
    close(model, exact)


def tiny_weight(name: str, path: str) -> Tensor:
    return _original(name).get_parameter(path).detach().double()


@functools.cache
def _original(name: str) -> Any:
    return tiny(name)


def test_tmms_own_experts_are_rounded(products: list[Any]) -> None:
    layer = Experts(4, 64, 32, dtype=BF16).requires_grad_(False)
    x, index = torch.randn(5, 64, dtype=BF16), torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2, dtype=BF16)
    report = convert(nn.Sequential(layer), weights="int4")
    assert len(report.rounded) == 2
    exact = Experts(4, 64, 32, dtype=torch.float64)
    for name in ("gate_up_proj", "down_proj"):
        exact.get_parameter(name).data.copy_(layer.get_parameter(name).dequantize())
    with torch.no_grad():
        found, expected = layer(x, index, weights), exact(x.double(), index, weights.double())
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)
    assert products[0][0].block == (1, 0)  # all of K is a group of 64


def test_a_gate_that_other_code_put_in_a_class_is_not_the_classs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Theirs:
        def _apply_gate(self, z: torch.Tensor) -> torch.Tensor:
            return z

    assert not stored_experts.owns(Theirs._apply_gate)  # it is no class of Transformers
    monkeypatch.setattr(stored_experts, "loaded", lambda *names: Theirs)
    assert stored_experts.owns(Theirs._apply_gate)
    assert not stored_experts.owns(nn.Linear.forward)
    Theirs._apply_gate = nn.Linear.forward  # type: ignore[method-assign,assignment]
    assert not stored_experts.owns(Theirs._apply_gate)


@pytest.mark.parametrize("wrong", ["gate_up_proj", "up_proj", "down_proj"])
def test_the_weight_that_no_operand_describes_is_named(wrong: str) -> None:
    """Groups of 4-bit floats have exponents as scales."""
    parts: dict[str, Any] = {"has_gate": wrong != "up_proj"}
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        exponents = torch.ones(2, 16, 1, dtype=torch.uint8)
        parts[name] = torch.zeros(2, 16, 16, dtype=torch.int8)
        parts[f"{name}_scale_inv"] = exponents.float() if name == wrong else exponents
    layer = SimpleNamespace(**parts)
    reason = stored_experts.unfit(layer)
    assert reason is not None
    assert reason.startswith(f"its {wrong} is not supported (groups of mxfp4 have exponents")
    setattr(layer, f"{wrong}_scale_inv", exponents)
    assert stored_experts.unfit(layer) is None


def test_experts_for_a_hubs_kernels_are_named(ours: Any) -> None:
    mxfp4 = importlib.import_module("transformers.integrations.mxfp4")
    layer = mxfp4.Mxfp4GptOssExperts(tiny("GptOss").config)
    report = str(convert(nn.Sequential(layer)))
    assert 'load the model with experts_implementation="tmm"' in report


def test_the_benchmark_of_bars_computes_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("quantised")
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    device = torch.device("cpu")
    with torch.no_grad():
        found = [benchmark.measure(each, device) for each in benchmark.bars(device, small=True)]
    assert not any("failed" in each for each in found)
    assert {each["format"] for each in found} == {
        "two in fp8", "fp8_blocks", "mxfp4", "int8", "fp8",
    }  # fmt: skip
    for each in found:
        assert len(each["us"]) >= 2
        assert each["ratios"][next(iter(each["us"]))] == 1.0
