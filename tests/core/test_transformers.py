"""Models of Transformers that reach tmm by a name, through Transformers' own calls: results are the
unmodified model's, and one call restores it."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tmm_core
from tmm_core import api

assert_close = torch.testing.assert_close
IDS = torch.arange(12).view(2, 6) % 7 + 3


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture(autouse=True)
def their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for name in ("accelerate", "kernels", "torch", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
        yield


@pytest.fixture
def ours() -> Iterator[Any]:
    """Our module, registered."""
    library("transformers")
    library("kernels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("tmm_core.integrations.transformers")
    module.register()
    yield module
    module.unregister()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The epilogue of every product that is asked for."""
    calls: list[Any] = []
    for name in ("linear", "matmul"):
        call = getattr(api, name)

        def spy(*args: Any, call: Any = call, **kwargs: Any) -> torch.Tensor:
            calls.append(kwargs.get("epilogue"))
            return call(*args, **kwargs)

        monkeypatch.setattr(api, name, spy)
    return calls


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def causal(family: str = "Llama", seed: int = 0, **more: Any) -> Any:
    t = library("transformers")
    torch.manual_seed(seed)
    config = getattr(t, f"{family}Config")(**SIZES, **more)
    model = getattr(t, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # so that the logits of tokens differ
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def moe() -> Any:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return causal("Qwen3Moe", **more)


def twins(family: str = "Llama", **more: Any) -> tuple[Any, Any]:
    model = causal(family, **more)
    return model, copy.deepcopy(model)


def kernelized(model: Any) -> Any:
    model.set_use_kernels(True)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


WAYS = {
    "kernels": kernelized,
    "convert": lambda model: importlib.import_module("tmm_core.nn").convert(model) and model,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, ours: Any) -> Any:
    return WAYS[request.param]


FAMILIES = {
    "Llama": ("silu", {}), "Qwen2": ("silu", {}), "Mistral": ("silu", {"head_dim": 8}),
    "Gemma": ("gelu_tanh", {"head_dim": 8}), "Qwen3": ("silu", {"head_dim": 8}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_every_linear_layer(family: str, ours: Any, products: list[Any]) -> None:
    epilogue, more = FAMILIES[family]
    model, original = twins(family, **more)
    kernelized(model)
    assert_close(logits(model), logits(original))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(products) == len(linears) == 15
    assert products.count(epilogue) == 2
    # In training too, where set_use_kernels chooses layers again.
    grads = []
    for one in (model, original):
        one.train()
        one(input_ids=IDS, labels=IDS).loss.backward()
        grads.append([p.grad for p in one.parameters()])
    assert len(products) == 30
    assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_name_is_lent_to_a_class_for_one_call(ours: Any) -> None:
    kernelized(causal())
    modeling = library("transformers.models.llama.modeling_llama")
    for kind in (nn.Linear, modeling.LlamaMLP):
        assert not hasattr(kind, "kernel_layer_name")
    mapping = importlib.import_module("kernels.layer.globals")._KERNEL_MAPPING.get()
    assert "cpu" not in mapping["Linear"]


def test_unregister_restores_models_and_transformers(ours: Any, products: list[Any]) -> None:
    model = kernelized(causal())
    wrapped = library("transformers.modeling_utils").kernelize
    ours.register()  # a second one adds nothing
    assert library("transformers.modeling_utils").kernelize is wrapped
    ours.unregister()
    assert library("transformers.modeling_utils").kernelize is not wrapped
    assert not any("forward" in vars(m) and ours.kernel_layers.is_ours(m) for m in model.modules())
    assert_close(logits(model), logits(causal()), rtol=0, atol=0)
    assert not products
    logits(kernelized(causal()))
    assert not products
    ours.unregister()


def test_experts_by_name_and_back(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    grouped = tmm_core.grouped.grouped_matmul

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs.get("epilogue"))
        return grouped(*args, **kwargs)

    monkeypatch.setattr(tmm_core.grouped, "grouped_matmul", spy)
    model, expected = moe(), logits(moe())
    model.set_experts_implementation("tmm")
    assert_close(logits(model), expected)
    assert calls == ["swiglu", None] * 2
    ours.unregister(model)
    assert_close(logits(model), expected)
    assert len(calls) == 4
    with pytest.raises(ValueError, match="tmm"):
        model.set_experts_implementation("tmm")
    model.config._experts_implementation_internal = "tmm"
    with pytest.raises(KeyError, match="tmm"):
        logits(model)


def test_from_pretrained(ours: Any, products: list[Any], tmp_path: Path) -> None:
    t = library("transformers")
    original = moe()
    original.save_pretrained(tmp_path)
    model = t.AutoModelForCausalLM.from_pretrained(
        tmp_path, use_kernels=True, experts_implementation="tmm"
    )
    assert model.config._experts_implementation == "tmm"
    assert_close(logits(model), logits(original))
    assert len(products) == 9  # of attention and the head


def test_a_mapping_for_a_users_own_classes(ours: Any, products: list[Any]) -> None:
    kernels = library("kernels")

    class MLP(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
            self.act = act

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.act(self.first(x)) * self.second(x))

    kernels.replace_kernel_forward_from_hub(MLP, "SwiGLUMLP")
    x = torch.randn(5, 8)
    modes = kernels.Mode.INFERENCE, kernels.Mode.TRAINING
    for mode in (*modes, *(mode | kernels.Mode.TORCH_COMPILE for mode in modes)):
        for act, epilogues in ((nn.SiLU(), ["silu"]), (nn.GELU(), ["gelu"]), (nn.Mish(), [])):
            model, products[:] = MLP(act), []
            expected = model(x)
            with kernels.use_kernel_mapping(ours.kernel_mapping(), inherit_mapping=False):
                kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
            assert_close(model(x), expected)
            assert products == epilogues
    hooked: list[Any] = []
    model = MLP(nn.SiLU())
    with kernels.use_kernel_mapping(ours.kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=modes[0], device="cpu")
    products.clear()
    model.first.register_forward_hook(lambda *_: hooked.append(1))
    model(x)
    assert hooked == [1]
    assert not products
    ours.restore(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("change", ["adapter", "hook", "quantised", "activation"])
@pytest.mark.slow(quick=6)
def test_later_changes_keep_their_meaning(change: str, way: Any) -> None:
    model, original = twins()
    way(model)
    for one in (model, original):
        layer = one.model.layers[0].mlp
        if change == "adapter":
            peft = library("peft")
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
            peft.get_peft_model(one, config)
        elif change == "hook":
            layer.gate_proj.register_forward_hook(lambda _, __, y: 2 * y)
        elif change == "quantised":
            quantization = library("torchao.quantization")
            one.requires_grad_(False)
            quantization.quantize_(one, quantization.Int8WeightOnlyConfig())
        else:
            layer.act_fn = nn.Mish()
    assert not torch.allclose(logits(original), logits(causal()), rtol=1e-3, atol=1e-3)
    assert_close(logits(model), logits(original))


@pytest.mark.slow
def test_a_compiled_model(way: Any, products: list[Any]) -> None:
    model, original = twins()
    way(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(logits(compiled), logits(original))
    assert len(products) >= 5  # the first products of MLPs and attention are operators of theirs


# -- what Transformers does with a model ---------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache: str, way: Any, products: list[Any]) -> None:
    model, original = twins()
    given = {
        "max_new_tokens": 8, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True, "cache_implementation": cache,
        "attention_mask": torch.ones_like(IDS), "disable_compile": True,
    }  # fmt: skip
    way(model)
    found, expected = (one.generate(IDS, **given) for one in (model, original))
    assert len(products) >= 8 * 9
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_assisted_decoding(way: Any, products: list[Any]) -> None:
    model, original = twins()
    assistant = causal(seed=1)
    given = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones(1, 6)}
    expected = original.generate(IDS[:1], assistant_model=copy.deepcopy(assistant), **given)
    way(model)
    way(assistant)
    found = model.generate(IDS[:1], assistant_model=assistant, **given)
    assert products
    assert found.tolist() == expected.tolist()


@pytest.mark.slow
def test_continuous_batching(way: Any, products: list[Any]) -> None:
    t = library("transformers")
    outputs = []
    config = t.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=63, pad_token_id=0)
    # The default cache takes most of the machine's memory.
    small = t.ContinuousBatchingConfig(
        num_blocks=8, block_size=32, max_batch_tokens=64, use_cuda_graph=False
    )
    for change in (way, lambda model: model):
        model = causal()
        change(model)
        batch = model.generate_batch(
            [[3, 4, 5], [6, 7, 8, 9]], generation_config=config, continuous_batching_config=small,
            progress_bar=False,
        )  # fmt: skip
        outputs.append(sorted(each.generated_tokens for each in batch.values()))
    assert products
    assert outputs[0] == outputs[1]
    assert all(outputs[0])


@pytest.mark.slow
def test_a_step_of_trainer(way: Any, products: list[Any], tmp_path: Path) -> None:
    t = library("transformers")
    library("accelerate")
    model, original = twins()
    way(model)
    data = [{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)]
    for one in (model, original):
        arguments = t.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True,
            report_to=[], save_strategy="no", optim="sgd", learning_rate=0.1, disable_tqdm=True,
        )  # fmt: skip
        t.Trainer(one, arguments, train_dataset=data).train()
    assert products
    before = dict(causal().named_parameters())
    for (name, found), expected in zip(
        model.named_parameters(), original.parameters(), strict=True
    ):
        assert not torch.equal(expected, before[name])
        assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_pipeline(way: Any, products: list[Any]) -> None:
    t = library("transformers")
    config = t.BertConfig(**{k: v for k, v in SIZES.items() if "key_value" not in k})
    torch.manual_seed(0)
    original = t.BertForSequenceClassification(config).eval()
    model = copy.deepcopy(original)
    way(model)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "model"]
    tokenizer = t.BertTokenizer(vocab=dict(zip(words, range(8), strict=True)))
    found, expected = (
        t.pipeline("text-classification", model=one, tokenizer=tokenizer, device="cpu")(
            ["a small model", "model"]
        )
        for one in (model, original)
    )
    assert products
    for ours_, theirs in zip(found, expected, strict=True):
        assert ours_["label"] == theirs["label"]
        assert ours_["score"] == pytest.approx(theirs["score"], rel=1e-5)


class ReadingMLP(nn.Module):
    """A gated MLP whose forward reads an attribute, which is not proven."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down_proj, self.act_fn, self.factor = nn.Linear(16, 8), nn.SiLU(), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y * self.factor


@pytest.mark.parametrize("compiled", [False, True])
def test_a_class_that_is_not_proven_runs_its_own_forward(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tmm_core.integrations import kernel_layers

    monkeypatch.setattr(kernel_layers, "_proven", {})  # a graph is traced before any other call
    mlp, x = ReadingMLP(), torch.randn(3, 8)
    expected = mlp(x)
    mlp.forward = kernel_layers.GatedMLP.forward.__get__(mlp)  # type: ignore[method-assign]
    call: Any = torch.compile(mlp, backend="eager", fullgraph=True) if compiled else mlp
    assert_close(call(x), expected)


def test_experts_in_mxfp4_have_the_values_that_transformers_reads() -> None:
    library("transformers")
    reader = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks = torch.randint(0, 256, (3, 16, 4, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 16, 4), dtype=torch.uint8)
    weight = tmm_core.Quantized.from_mxfp4(blocks, scales)
    assert torch.equal(weight.dequantize().bfloat16(), reader(blocks, scales).mT)
