"""Mixtures of experts: tmm's layer, and Transformers' layers where it is installed."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from fakes import forget_interned
from torch import nn

import tmm_core
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.nn import Experts, activation, convert, experts
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def by_blas() -> Iterator[None]:
    with tmm_core.override(disable="triton.ragged"):
        yield


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every grouped product that is asked for."""
    calls: list[dict[str, Any]] = []
    original = tmm_core.grouped.grouped_matmul

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(tmm_core.grouped, "grouped_matmul", spy)
    return calls


def expected(
    layer: Any, x: Tensor, index: Tensor, weights: Tensor, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token in range(len(x)):
        row = torch.zeros_like(x[token])
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            if not 0 <= expert < layer.num_experts:
                continue
            up, down = layer.gate_up_proj_bias, layer.down_proj_bias
            z = layer.gate_up_proj[expert] @ x[token] + (0 if up is None else up[expert])
            y = layer.down_proj[expert] @ gate(z) + (0 if down is None else down[expert])
            row = row + weight * y
        rows.append(row)
    return torch.stack(rows) if rows else x


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_values_and_gradients(bias: bool, elsewhere: bool, products: list[Any]) -> None:
    layer = Experts(4, 6, 5, bias=bias, dtype=torch.float64)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    index[index == 2] = 3  # one of no token
    if elsewhere:
        index[::2, 1] = 4  # another rank's
        index[1::3, 0], index[3] = -1, torch.tensor([-(2**63), 2**40])  # nobody's
    weights = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    y = layer(x, index, weights)
    assert [call.get("epilogue") for call in products] == ["swiglu", None]
    other = expected(layer, x, index, weights, swiglu)
    torch.testing.assert_close(y, other)
    grad = torch.randn_like(y)
    wanted = [x, weights, *layer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(y, wanted, grad), torch.autograd.grad(other, wanted, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, index, weights), other)


def test_a_layer_without_tokens() -> None:
    layer = Experts(3, 6, 5)
    index = torch.empty(0, 2, dtype=torch.long)
    x = torch.empty(0, 6, requires_grad=True)
    y = layer(x, index, torch.empty(0, 2))
    assert y.shape == (0, 6)
    for t, grad in zip(
        (x, *layer.parameters()),
        torch.autograd.grad(y.sum(), [x, *layer.parameters()]),
        strict=True,
    ):
        assert grad.shape == t.shape
        assert not grad.any()


def test_tokens_without_experts() -> None:
    """A token that is sent nowhere, or to other ranks alone, has a sum of nothing."""
    layer, x = Experts(3, 6, 5), torch.randn(4, 6)
    nowhere = torch.empty(4, 0, dtype=torch.long)
    assert torch.equal(layer(x, nowhere, torch.empty(4, 0)), torch.zeros(4, 6))
    elsewhere = torch.full((4, 2), 3)
    assert torch.equal(layer(x, elsewhere, torch.rand(4, 2)), torch.zeros(4, 6))


def test_every_token_has_its_experts_and_weights() -> None:
    layer, x = Experts(3, 6, 5), torch.randn(4, 6)
    index, weights = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    for given in (
        (x, index, weights[:, :1]), (x, index, torch.ones(4, 3)), (x, index, torch.ones(5, 2)),
        (x[:3], index, weights), (torch.randn(5, 6), index, weights), (x[None], index, weights),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"must have shapes \[T, H\], \[T, k\] and"):
            layer(*given)
    for dtype in (torch.float32, torch.uint8, torch.bool):
        with pytest.raises(RuntimeError, match=r"dtype torch\.int32 or torch\.int64"):
            layer(x, index.to(dtype), weights)
    torch.testing.assert_close(layer(x, index.int(), weights), layer(x, index, weights))


def test_no_value_is_cut_to_the_weights_dtype() -> None:
    layer, x = Experts(3, 6, 5), torch.randn(4, 6)
    index, weights = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(RuntimeError, match="must have a floating dtype"):
            layer(x.to(dtype), index, weights)
    with pytest.raises(RuntimeError, match="and top_k_weights a real one"):
        layer(x, index, weights.to(torch.complex64))
    torch.testing.assert_close(layer(x, index, weights.int()), layer(x, index, weights))


def test_the_layer_is_kept_and_reported() -> None:
    layer = Experts(3, 6, 5, activation="gelu_tanh", bias=True)
    assert list(layer.state_dict()) == [
        "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias",
    ]  # fmt: skip
    assert layer.gate_up_proj.shape == (3, 10, 6)
    assert layer.down_proj.shape == (3, 6, 5)
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert str(again) == str(layer)
    assert "epilogue='geglu_tanh'" in str(layer)
    x, index = torch.randn(4, 6), torch.tensor([[0], [1], [2], [0]])
    assert torch.equal(again(x, index, torch.ones(4, 1)), layer(x, index, torch.ones(4, 1)))
    with pytest.raises(ValueError, match="does not gate"):
        Experts(3, 6, 5, activation="tanh")


# -- layers as Transformers writes them ------------------------------------------------------


class Theirs(nn.Module):
    """An expert layer in the form that its interface gives to all of them."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    act_fn: nn.Module

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 4, nn.SiLU()
        for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"):
            self.__dict__[name] = getattr(type(self), name)  # as their decorator leaves them
        self.gate_up_proj = nn.Parameter(torch.randn(4, 10, 6, dtype=dtype))
        self.down_proj = nn.Parameter(torch.randn(4, 6, 5, dtype=dtype))
        self.gate_up_proj_bias = self.down_proj_bias = None

    def _apply_gate(self: Any, z: Tensor) -> Tensor:
        assert not isinstance(self, Theirs), "the epilogue does it"
        gate, up = z.chunk(2, -1)
        return cast(Tensor, self.act_fn(gate) * up)


class Clamped(Theirs):
    """The layer of gpt-oss: transposed, interleaved, with biases and another gate."""

    has_bias, is_transposed, is_concatenated = True, True, False

    def __init__(self) -> None:
        super().__init__()
        del self.act_fn
        self.alpha, self.limit = 1.7, 3.0
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(self, name)
            setattr(self, name, nn.Parameter(weight.mT.contiguous()))
            bias = nn.Parameter(torch.randn(4, weight.shape[1], dtype=weight.dtype))
            setattr(self, f"{name}_bias", bias)

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z[..., ::2], z[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class Apart(Clamped):
    """A gate that no known layer has."""

    def _apply_gate(self, z: Tensor) -> Tensor:
        return super()._apply_gate(z) + 1e-6


class Ungated(Theirs):
    has_gate = False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(self.gate_up_proj[:, :5].detach().clone())
        self.act_fn = nn.ReLU()


class Unknown(Ungated):
    """An activation that no epilogue has."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.Hardtanh(-0.5, 0.5)


class Normed(Theirs):
    has_post_expert_norm = True

    def post_expert_norm(self, y: Tensor) -> Tensor:
        return y / y.norm(dim=-1, keepdim=True)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of Transformers' interface module that are read."""
    module = types.ModuleType(experts._THEIRS)
    module.__dict__["_default_apply_gate"] = Theirs._apply_gate
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, experts._THEIRS, module)


@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("name", ["has_gate", "is_transposed"])
def test_a_layer_without_the_decorators_description_is_not_an_expert_layer(name: str) -> None:
    described = {"has_gate": True, "is_transposed": False}

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    layer = Layer()
    layer.__dict__.update(described)
    assert experts.is_theirs(layer)
    del layer.__dict__[name]
    assert not experts.is_theirs(layer)


@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("kind", [Theirs, Clamped, Apart, Ungated, Unknown, Normed])
def test_layers_of_transformers_use_the_products(kind: type[Theirs], products: list[Any]) -> None:
    layer = kind()
    x = torch.randn(7, 6, dtype=torch.float64)
    index = torch.randint(5, (7, 2))  # 4: another rank's
    weights = torch.rand(7, 2, dtype=torch.float64)
    y = experts.forward(layer, x, index, weights)
    plain: Any = types.SimpleNamespace(num_experts=4)
    up = layer.up_proj if isinstance(layer, Ungated) else layer.gate_up_proj
    gates: dict[type, Any] = dict.fromkeys((Clamped, Apart), layer._apply_gate)
    gates |= {Ungated: F.relu, Unknown: nn.Hardtanh(-0.5, 0.5)}
    for name, weight in (("gate_up_proj", up), ("down_proj", layer.down_proj)):
        weight = weight.mT if layer.is_transposed else weight
        setattr(plain, name, weight)
        setattr(plain, f"{name}_bias", getattr(layer, f"{name}_bias"))
    if isinstance(layer, Normed):
        rows = []
        for token in range(7):
            row = torch.zeros(6, dtype=torch.float64)
            for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
                if expert < 4:
                    z = layer.down_proj[expert] @ swiglu(layer.gate_up_proj[expert] @ x[token])
                    row = row + weight * layer.post_expert_norm(z)
            rows.append(row)
        other = torch.stack(rows)
    else:
        other = expected(plain, x, index, weights, gates.get(kind, swiglu))
    torch.testing.assert_close(y, other)
    clamped = CLAMPED.with_parameters(1.7, 3.0).key
    epilogues = {Theirs: "swiglu", Normed: "swiglu", Clamped: clamped, Ungated: "relu"}
    assert products[0]["epilogue"] == epilogues.get(kind)
    if kind is Theirs:
        half = layer.bfloat16()
        low = experts.forward(half, x, index, weights.half())
        assert low.dtype is torch.float64


def test_experts_are_printed_with_their_sizes() -> None:
    text = repr(Experts(3, 8, 16, bias=True))
    assert "num_experts=3, hidden_size=8, intermediate_size=16, bias=True" in text
    assert "epilogue='swiglu'" in text


@pytest.mark.usefixtures("interface")
def test_weights_of_ungated_experts_are_rounded() -> None:
    class Layer(Ungated):
        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            raise AssertionError("tmm's is called")

    layer = Layer().requires_grad_(False).bfloat16()
    del layer.gate_up_proj
    exact = {name: t.double() for name, t in layer.named_parameters()}
    assert sorted(convert(nn.Sequential(layer), weights="int8").rounded) == [
        "0.down_proj",
        "0.up_proj",
    ]
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, Quantized)
        torch.testing.assert_close(parameter.dequantize().double(), exact[name], rtol=0, atol=0.05)


class Gelu(Theirs):
    """A layer whose activation has an attribute that decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU()

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return self.act_fn(gate) * up


def hook_the_result(act: Any, _: pytest.MonkeyPatch) -> None:
    act.register_forward_hook(lambda *given: given[-1] * 3)


def hook_the_input(act: Any, _: pytest.MonkeyPatch) -> None:
    act.register_forward_pre_hook(lambda _, given: (given[0] * 3,))


def replace_its_forward(act: Any, _: pytest.MonkeyPatch) -> None:
    act.forward = torch.tanh


def replace_the_forward_of_its_class(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.GELU, "forward", lambda _, gate: torch.tanh(gate))


def assign_its_attribute(act: Any, _: pytest.MonkeyPatch) -> None:
    act.approximate = "tanh"


def change_its_class(act: Any, _: pytest.MonkeyPatch) -> None:
    act.__class__ = nn.Tanh


def hook_every_module(_: Any, patch: pytest.MonkeyPatch) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    patch.setitem(hooks, 7, lambda m, _, y: y * 3 if isinstance(m, nn.GELU) else y)


CHANGES = (
    hook_the_result, hook_the_input, replace_its_forward, replace_the_forward_of_its_class,
    assign_its_attribute, change_its_class, hook_every_module,
)  # fmt: skip


@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("called_before", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_activation_of_experts_may_change(
    change: Any, called_before: bool, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interface: Any = sys.modules[experts._THEIRS]
    monkeypatch.setattr(interface, "_default_apply_gate", Gelu._apply_gate)
    layer = Gelu()
    x, weights = torch.randn(7, 6, dtype=torch.float64), torch.rand(7, 2, dtype=torch.float64)
    call = x, torch.randint(4, (7, 2)), weights

    def check() -> None:
        other = expected(layer, *call, layer._apply_gate)
        torch.testing.assert_close(experts.forward(layer, *call), other)

    if called_before:
        check()
        assert products[0]["epilogue"] == "geglu"
    with monkeypatch.context() as patch:
        change(layer.act_fn, patch)
        check()
        check()
    layer.act_fn = nn.GELU()
    check()
    assert products[-2]["epilogue"] == "geglu"


@pytest.mark.usefixtures("interface")
def test_a_gate_of_the_instance_is_applied() -> None:
    layer = Theirs()
    x, index = torch.randn(3, 6, dtype=torch.float64), torch.tensor([[0], [3], [1]])
    weights = torch.ones(3, 1, dtype=torch.float64)

    def gate(z: Tensor) -> Tensor:
        return z[..., :5]

    layer.__dict__["_apply_gate"] = gate
    y = experts.forward(layer, x, index, weights)
    torch.testing.assert_close(y, expected(layer, x, index, weights, gate))


SEEN: list[Any] = []


class Looking(nn.Module):
    """An activation that notes the present ``nn.Module.__call__``, which all threads share."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(nn.Module.__call__)
        return F.silu(x)


class LookingGate(Clamped):
    def _apply_gate(self, z: Tensor) -> Tensor:
        SEEN.append(nn.Module.__call__)
        return super()._apply_gate(z)


@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("part", ["activation", "activation of experts", "gate"])
def test_watching_a_call_disturbs_no_other_thread(part: str) -> None:
    SEEN.clear()
    usual = nn.Module.__call__
    if part == "activation":
        activation.recognise(Looking())
    else:
        layer = LookingGate() if part == "gate" else Gelu()
        if part != "gate":
            layer.act_fn = Looking()
        x = torch.randn(3, 6, dtype=torch.float64)
        index = torch.tensor([[0], [3], [1]])
        experts.forward(layer, x, index, torch.ones(3, 1, dtype=torch.float64))
    assert SEEN
    assert all(each is usual for each in SEEN)


@pytest.mark.usefixtures("interface")
def test_an_activation_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[nn.Module] = []
    recognise = activation.recognise

    def spy(module: nn.Module) -> Any:
        looked_at.append(module)
        return recognise(module)

    monkeypatch.setattr(activation, "recognise", spy)
    monkeypatch.setattr(activation, "_recognised", {})
    for act, epilogue in ((nn.SiLU(), "silu"), (nn.Hardtanh(), None)):
        found = [activation.activated_by(pickle.loads(pickle.dumps(act))) for _ in range(2)]
        found += [activation.activated_by(act) for _ in range(2)]
        assert found == [epilogue] * 4
    assert [type(act) for act in looked_at] == [nn.SiLU, *[nn.Hardtanh] * 3]


class Decorated(Theirs):
    """A layer whose forward is defined in Transformers' module; here in the tests'."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("the layer was not swapped")


def halved(gate: Tensor, up: Tensor) -> Tensor:
    return gate * up / 2


def test_a_users_epilogue_survives_a_pickle() -> None:
    layer = Experts(4, 16, 12, tmm_core.Epilogue("halved", halved, gated=True))
    x, chosen = torch.randn(5, 16), torch.tensor([[0, 2], [1, 0], [2, 3], [3, 1], [0, 1]])
    expected = layer(x, chosen, torch.full((5, 2), 0.5))
    text = pickle.dumps(layer)
    forget_interned()  # as in the process that reads it
    again = pickle.loads(text)
    torch.testing.assert_close(again(x, chosen, torch.full((5, 2), 0.5)), expected)


@pytest.mark.usefixtures("interface")
def test_convert_swaps_them() -> None:
    model = nn.Sequential(nn.ModuleDict({"experts": Decorated()}))
    before = dict(model.named_parameters())
    report = convert(model)
    (change,) = report.changes
    assert (change.kind, change.path) == ("experts", "0.experts")
    assert "Decorated → TransformersExperts(epilogue='swiglu')" in str(report)
    assert "1 mixtures of experts grouped" in str(report)
    layer: Any = model[0]["experts"]  # type: ignore[index]
    assert all(p is before[name] for name, p in model.named_parameters())
    x, index = torch.randn(3, 6, dtype=torch.float64), torch.tensor([[0], [3], [1]])
    weights = torch.ones(3, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(x, index, weights), expected(layer, x, index, weights, swiglu))
    assert not convert(model).changes
    report.undo()
    assert type(model[0]["experts"]) is Decorated  # type: ignore[index]
    hooked, calls = nn.Sequential(Decorated()), []
    hooked[0].register_forward_hook(lambda *_: calls.append(1))
    assert convert(hooked)
    hooked[0](x, index, weights)
    assert calls == [1]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, experts._THEIRS, None)
    assert not experts.is_theirs(nn.Linear(2, 2))


# -- Transformers' own -----------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 50,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "Qwen3Moe": {
        "num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts": 8,
        "num_experts_per_tok": 2, "head_dim": 8,
    },
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "qk_nope_head_dim": 8,
    },
}  # fmt: skip


def tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # some are not drawn
        nn.init.normal_(parameter, std=0.2)
    model.set_experts_implementation("eager")
    return model


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    result = model(ids, labels=ids)
    result.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return result.logits.detach(), gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(quick=4)
def test_their_models_keep_logits_and_gradients(name: str, products: list[Any]) -> None:
    """They do under ``experts_implementation="tmm"`` and after ``convert``."""
    model = tiny(name)
    logits, gradients = step(model)
    assert not products
    importlib.import_module("tmm_core.integrations.transformers").register()

    def holds() -> None:
        calls = len(products)
        ours, theirs = step(model), (logits, gradients)
        layers = 1 if name == "DeepseekV3" else 2
        assert len(products) - calls == 2 * layers
        gate = "clamped_swiglu(1.702,7.0)@" if name == "GptOss" else "swiglu"
        assert products[calls]["epilogue"].startswith(gate)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    model.set_experts_implementation("tmm")
    holds()
    model.set_experts_implementation("eager")
    report = convert(model)
    holds()
    report.undo()
    calls = len(products)
    step(model)
    assert len(products) == calls


@pytest.mark.parametrize(("training", "weights"), [(False, None), (True, None), (False, "int8")])
def test_the_benchmark_of_layers_compares_both_ways(
    training: bool, weights: str | None, monkeypatch: pytest.MonkeyPatch, products: list[Any]
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("experts")
    importlib.import_module("tmm_core.integrations.transformers").register()
    with torch.no_grad():
        found = benchmark.measure("small", 8, torch.device("cpu"), training, weights)
    assert set(found["us"]) == {"grouped_mm", "tmm"}
    assert found["ratio"] > 0
    assert found.get("weights") == weights
    assert products
