"""Converted models of Transformers give the original's results, with peft's adapters and torchao's
weights too, whether these come before or after ``convert``."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tmm_core
from tmm_core.nn import Linear, convert

assert_close = torch.testing.assert_close

IDS = torch.arange(12).view(2, 6)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24}


def library(name: str) -> Any:
    """Import a library without its own warnings; skip the test if it is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture(autouse=True)
def their_warnings() -> Any:
    with warnings.catch_warnings():
        for name in ("peft", "torchao", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
        yield


def gpt2(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = t.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return t.GPT2LMHeadModel(config), {"input_ids": IDS}


def phi3(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = t.Phi3Config(**SIZES, vocab_size=50, num_key_value_heads=1, pad_token_id=0)
    return t.Phi3ForCausalLM(config), {"input_ids": IDS}


def gemma(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = t.GemmaConfig(**SIZES, vocab_size=50, num_key_value_heads=1, head_dim=8)
    return t.GemmaForCausalLM(config), {"input_ids": IDS}


def qwen_moe(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = t.Qwen2MoeConfig(
        **SIZES, vocab_size=50, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12, shared_expert_intermediate_size=20,
    )  # fmt: skip
    return t.Qwen2MoeForCausalLM(config), {"input_ids": IDS}


def vit(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = t.ViTConfig(**SIZES, image_size=8, patch_size=4)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return t.ViTForImageClassification(config), {"pixel_values": pixels}


def t5(t: Any, forward: str = "gated-gelu") -> tuple[nn.Module, dict[str, Any]]:
    config = t.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        feed_forward_proj=forward, decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    return t.T5ForConditionalGeneration(config), inputs


def t5_relu(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    return t5(t, "relu")


def whisper(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    config = t.WhisperConfig(
        vocab_size=50, num_mel_bins=8, d_model=16, max_source_positions=16, pad_token_id=0,
        max_target_positions=16, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, **layers,
    )  # fmt: skip
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": features, "decoder_input_ids": IDS}
    return t.WhisperForConditionalGeneration(config), inputs


def bert(t: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = t.BertConfig(**SIZES, vocab_size=50, max_position_embeddings=16)
    return t.BertForMaskedLM(config), {"input_ids": IDS}


Make = Callable[[Any], tuple[nn.Module, dict[str, Any]]]
MODELS: tuple[Make, ...] = (gpt2, phi3, gemma, qwen_moe, vit, t5, t5_relu, whisper, bert)
#: Kinds of changes of each, but linears.
FUSED = {
    gpt2: {"epilogue": 2}, phi3: {"epilogue": 2}, gemma: {"gated": 2, "joint": 2},
    vit: {"epilogue": 2, "joint": 2}, bert: {"epilogue": 3, "joint": 2},
    qwen_moe: {"gated": 2, "epilogue": 2, "experts": 2, "joint": 2},
    t5: {}, t5_relu: {}, whisper: {},
}  # fmt: skip


@pytest.fixture
def twins(request: pytest.FixtureRequest) -> tuple[Any, Any, dict[str, Any]]:
    """Two models of the same parameters, and their inputs."""
    torch.manual_seed(0)
    original, inputs = request.param(library("transformers"))
    original.eval()
    return copy.deepcopy(original), original, inputs


def same(model: Any, original: Any, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        assert_close(model(**inputs).logits, original(**inputs).logits)


def adapted(model: Any, targets: Any = "all-linear") -> Any:
    peft = library("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("twins", MODELS, indirect=True, ids=lambda make: make.__name__)
@pytest.mark.slow(quick=6)
def test_logits_gradients_and_the_report(twins: Any, request: pytest.FixtureRequest) -> None:
    model, original, inputs = twins
    report = convert(model)
    same(model, original, inputs)
    grads = []
    for one in (model, original):
        one(**inputs).logits.square().sum().backward()
        grads.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[1].items():
        atol = max(1e-5, 2e-5 * float(expected.abs().max()))
        assert_close(grads[0][name], expected, rtol=1e-4, atol=atol, msg=name)

    make = request.node.callspec.params["twins"]
    kinds = [change.kind for change in report.changes if change.kind != "linear"]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == FUSED[make]
    # Every layer is tmm's, listed once, and none of them is listed as left alone.
    layers = {name for name, m in model.named_modules() if hasattr(type(m), "computes_product")}
    originals = {name for name, m in original.named_modules()
                 if type(m).__name__ in ("Linear", "Conv1D")}  # fmt: skip
    assert layers == originals
    listed = [c.path for c in report.changes if c.kind in ("linear", "epilogue")]
    assert sorted(listed) == sorted(layers)
    assert not layers.intersection(item.path for item in report.left)
    # Every activation is fused, or has a reason.
    assert bool(report.not_fused) == (make in (t5, t5_relu, whisper))
    assert all(item.reason.startswith("its forward ") for item in report.not_fused)
    # Attention's products have no layer.
    assert any("matmul in eager_attention_forward()" in item.reason for item in report.left)
    assert max(map(len, str(report).splitlines()[:-1])) < 180
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]


@pytest.mark.parametrize("twins", MODELS, indirect=True, ids=lambda make: make.__name__)
@pytest.mark.parametrize("first", ["convert", "adapt"])
@pytest.mark.slow(quick=6)
def test_adapters(twins: Any, first: str, request: pytest.FixtureRequest) -> None:
    model, original, inputs = twins
    before = original(**inputs).logits.detach()
    if first == "convert":
        convert(model)
    model, original = adapted(model), adapted(original)
    if first == "adapt":
        convert(model)
    assert not torch.allclose(original(**inputs).logits, before, atol=1e-4)
    same(model, original, inputs)
    for one in (model, original):
        one(**inputs).logits.square().sum().backward()
    for (name, mine), their in zip(model.named_parameters(), original.parameters(), strict=True):
        if their.grad is not None:
            atol = max(1e-5, 2e-5 * float(their.grad.abs().max()))
            assert_close(mine.grad, their.grad, rtol=1e-4, atol=atol, msg=name)
    with model.disable_adapter(), original.disable_adapter():
        same(model, original, inputs)
    for one in (model, original):
        one.merge_adapter()
    same(model, original, inputs)
    for one in (model, original):
        one.unmerge_adapter()
    same(model, original, inputs)
    model, original = model.merge_and_unload(), original.merge_and_unload()
    same(model, original, inputs)
    report = convert(model)
    assert len(report.changes) <= sum(FUSED[request.node.callspec.params["twins"]].values())
    same(model, original, inputs)


@pytest.mark.parametrize("twins", [vit], indirect=True)
def test_a_second_adapter_and_an_undo_below_the_first(twins: Any) -> None:
    peft = library("peft")
    model, original, inputs = twins
    report = convert(model)
    model, original = adapted(model, ["fc1"]), adapted(original, ["fc1"])
    for one in (model, original):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=["fc2"], init_lora_weights=False)
        one.add_adapter("second", config)
        one.set_adapter("second")
    same(model, original, inputs)
    for one in (model, original):
        one.set_adapter("default")
    same(model, original, inputs)
    report.undo()
    same(model, original, inputs)
    assert not any(isinstance(module, Linear) for module in model.modules())


@pytest.mark.parametrize("twins", [gpt2, gemma, vit, bert], indirect=True,
                         ids=lambda make: make.__name__)  # fmt: skip
def test_hooks_and_replaced_activations(twins: Any) -> None:
    model, original, inputs = twins
    convert(model)
    seen: list[list[torch.Tensor]] = [[], []]
    for one, kept in zip((model, original), seen, strict=True):
        for name, module in one.named_modules():
            if name.endswith(("c_fc", "gate_proj", "fc1", "dense")):
                module.register_forward_hook(
                    lambda _, __, out, kept=kept: kept.append(out.detach())
                )
    same(model, original, inputs)
    assert len(seen[0]) >= 2
    assert_close(*seen)
    for one in (model, original):
        for module in list(one.modules()):
            for name in ("act", "act_fn", "activation_fn", "intermediate_act_fn"):
                if isinstance(getattr(module, name, None), nn.Module):
                    setattr(module, name, nn.ReLU())
    same(model, original, inputs)


def test_a_pair_in_a_sequence_with_adapters() -> None:
    torch.manual_seed(0)
    original: Any = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    model, x = copy.deepcopy(original), torch.randn(5, 12)
    convert(model)
    model, original = adapted(model, ["0", "2"]), adapted(original, ["0", "2"])
    assert_close(model(x), original(x))
    model, original = model.merge_and_unload(), original.merge_and_unload()
    assert_close(model(x), original(x))


def test_a_conv1d_is_a_product_and_remains_a_conv1d() -> None:
    theirs = library("transformers.pytorch_utils").Conv1D
    original = nn.Sequential(theirs(16, 12), nn.Tanh(), theirs(4, 16))
    nn.init.normal_(original[0].bias)
    model, x = copy.deepcopy(original), torch.randn(2, 5, 12)
    report = convert(model, static_weights=True)
    assert isinstance(model[0], theirs)
    assert [change.kind for change in report.changes] == ["epilogue", "linear"]
    assert model[0].static_weights
    for given in (x, x[0], x[0, 0], x.transpose(0, 1)):
        expected = torch.tanh(given @ original[0].weight + original[0].bias)
        assert_close(model[0](given), given @ original[0].weight + original[0].bias)
        assert_close(model(given), original[2](expected.contiguous()))
    with torch.no_grad():
        assert_close(model(x), original(x))
        assert_close(copy.deepcopy(model)(x), original(x))
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes if node.op.startswith("call_")] == [
        "call_module"
    ] * 3
    assert_close(traced(x), original(x))
    again = convert(model)
    assert not again
    assert again.left == []
    report.undo()
    assert type(model[0]) is theirs
    assert "static_weights" not in vars(model[0])


CONFIGS = (
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights(config: str, dtype: torch.dtype) -> None:
    quantization = library("torchao.quantization")
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    original = original.to(dtype).requires_grad_(False)
    after, before = copy.deepcopy(original), copy.deepcopy(original)
    convert(after)
    for model in (original, after, before):
        quantization.quantize_(model, getattr(quantization, config)())
    report = convert(before)
    x = torch.randn(5, 64, dtype=dtype)
    dynamic = "Dynamic" in config  # it quantises the activations too, and multiplies itself

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        limit = 0.02 if dtype is torch.bfloat16 else 1e-5
        limit = 0.0 if dynamic else limit * float(expected.abs().max())
        assert_close(found, expected, rtol=0, atol=limit)

    assert [item.path for item in report.left] == (["0", "2"] if dynamic else [])
    assert all("not plain ones" in item.reason for item in report.left)
    expected = original(x)
    close(after(x), expected)
    close(before(x), expected)
    weight, bias = original[0].weight, original[0].bias
    z = original[0](x)
    close(tmm_core.linear(x, weight, bias), z)
    close(tmm_core.linear(x, weight, bias, epilogue="gelu"), original[1](z))
    residual = torch.randn_like(z)
    got = tmm_core.linear(x, weight, bias, alpha=2.0, residual=residual, epilogue="relu")
    plain = torch.nn.functional.linear(x, weight)
    whole = torch.relu(2.0 * plain + bias) + residual
    assert_close(got, whole) if dynamic else close(got, whole)
    out = torch.empty_like(z)
    assert tmm_core.linear(x, weight, out=out) is out
    close(out, plain)
    got = tmm_core.linear(x, weight, bias, out_dtype=torch.float64)
    close(got, z.double())
    layer = Linear(64, 128, epilogue="gelu", dtype=dtype)
    layer.weight, layer.bias = weight, bias
    close(layer(x), original[1](z))
    if dynamic:
        with pytest.raises(tmm_core.UnsupportedProblemError, match="cannot serve a tensor of"):
            tmm_core.linear(x, weight, kernel="triton.naive")


def test_a_quantised_gated_mlp() -> None:
    quantization = library("torchao.quantization")

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
            self.act, self.down = nn.SiLU(), nn.Linear(96, 64, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.down(self.act(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    original = nn.Sequential(MLP()).requires_grad_(False)
    model, x = copy.deepcopy(original), torch.randn(5, 64)
    assert [change.kind for change in convert(model).changes].count("gated") == 1
    for one in (model, original):
        quantization.quantize_(one, quantization.Int8WeightOnlyConfig())
    assert_close(model(x), original(x))
