"""Layers and conversion: torch's values, gradients and checkpoints, and nothing left behind."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import forget_interned
from torch import nn
from torch.nn.utils import parametrizations

import tmm_core
from tmm_core.errors import TmmWarning, UnknownNameError
from tmm_core.nn import GatedMLP, Linear, SwiGLU, convert
from tmm_core.nn.joint_storage import stacked

assert_close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """Dynamo counts recompiles per function, for as long as the process lives."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The epilogue of every product that tmm's layers compute."""
    calls: list[str] = []
    linear = tmm_core.api.linear

    def spy(*args: Any, epilogue: Any = None, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            calls.append(epilogue or "")
        return linear(*args, epilogue=epilogue, **kwargs)

    monkeypatch.setattr(tmm_core.api, "linear", spy)
    return calls


class LlamaMLP(nn.Module):
    def __init__(self, hidden: int = 12, between: int = 20, act: nn.Module | None = None) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.gate_proj = nn.Linear(hidden, between, bias=False)
        self.up_proj = nn.Linear(hidden, between, bias=False)
        self.down_proj = nn.Linear(between, hidden, bias=False)
        self.act_fn = act or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MistralFeedForward(nn.Module):
    """The same by other names, the activation a function, the factors the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(12, 20)
        self.w2 = nn.Linear(20, 12)
        self.w3 = nn.Linear(12, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w3(x) * F.gelu(self.w1(x), approximate="tanh"))


class Decoder(nn.Module):
    """A Llama in little: tied embedding, attention-like projections, gated MLPs."""

    def __init__(self, layers: int = 2, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(hidden), "o": nn.Linear(hidden, hidden), "mlp": LlamaMLP()}
            )
            for _ in range(layers)
        )
        self.lm_head = nn.Linear(hidden, 17, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["o"](layer["norm"](x))
            x = x + layer["mlp"](x)
        return self.lm_head(x)


class PythonGelu(nn.Module):
    """GELU as the code of some checkpoints writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3))))


class Intermediate(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 20)
        self.intermediate_act_fn = act

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(hidden))


class BertLayer(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.intermediate = Intermediate(act or nn.GELU())
        self.dense = nn.Linear(20, 12)
        self.norm = nn.LayerNorm(12)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dropout(self.dense(self.intermediate(x))))


class ViT(nn.Module):
    """A vision transformer in little: patches, a class token, one linear for q, k and v, an MLP
    with dropout between its layers."""

    def __init__(self, layers: int = 2, hidden: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.blocks = nn.ModuleList(ViTBlock(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ViTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 20), nn.GELU(), nn.Dropout(0.0), nn.Linear(20, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def structure(model: nn.Module) -> list[tuple[str, int, type]]:
    modules = model.named_modules(remove_duplicate=False)
    return [(name, id(module), type(module)) for name, module in modules]


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    out = model(x)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    found = torch.autograd.grad((out * weight).sum(), list(model.parameters()))
    return dict(zip([n for n, _ in model.named_parameters()], found, strict=True))


def same_gradients(model: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    mine, theirs = gradients(model, x), gradients(other, x)
    assert mine.keys() == theirs.keys()
    for name, their in theirs.items():
        # Large terms that cancel leave their rounding errors. A normalised token of zeros has
        # gradients from 0.1 to 60, and torch's own differ from those in fp64 by as much.
        atol = max(1e-5, 2e-6 * float(their.abs().max()))
        assert_close(mine[name], their, rtol=1.3e-6, atol=atol, msg=name)


# -- Linear ------------------------------------------------------------------------------


@pytest.mark.parametrize("epilogue", [None, "gelu", "gelu_tanh+softcap(3)", "leaky_relu(0.2)"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs_with_an_epilogue(epilogue: str | None, bias: bool) -> None:
    layer = Linear(8, 5, bias, epilogue=epilogue)
    other = nn.Linear(8, 5, bias)
    other.load_state_dict(layer.state_dict())
    layer.load_state_dict(other.state_dict())
    apply = tmm_core.epilogues.parse(epilogue).apply
    x = randn(3, 2, 8).requires_grad_()
    with torch.no_grad():
        assert_close(layer(x), apply(other(x)))
    assert_close(layer(x), apply(other(x)))
    for mine, theirs in zip(
        torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]),
        torch.autograd.grad(apply(other(x)).sum(), [x, *other.parameters()]),
        strict=True,
    ):
        assert_close(mine, theirs)


def test_linear_has_torchs_initialisation_and_signature() -> None:
    torch.manual_seed(3)
    expected = nn.Linear(8, 5, True, "cpu", torch.float64)
    torch.manual_seed(3)
    layer = Linear(8, 5, True, "cpu", torch.float64)
    assert_close(layer.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert repr(layer) == "Linear(in_features=8, out_features=5, bias=True)"


def test_linears_epilogue_can_be_read_changed_and_seen() -> None:
    layer = Linear(8, 5, epilogue="relu")
    assert "epilogue='relu'" in repr(layer)
    layer.epilogue = "swish"  # silu
    assert layer.epilogue == "swish"
    assert "epilogue='swish'" in repr(layer)
    layer.epilogue = "tanh"
    assert layer.epilogue == "tanh"
    x = randn(3, 8)
    assert_close(layer(x), torch.tanh(F.linear(x, layer.weight, layer.bias)))


def test_an_epilogue_is_replaced_and_removed() -> None:
    """One that is refused leaves the layer as it was."""
    layer, x = Linear(8, 5, epilogue="relu"), torch.randn(3, 8)
    z = nn.functional.linear(x, layer.weight, layer.bias)
    assert_close(layer(x), z.relu())
    for epilogue, expected in ((nn.SiLU(), nn.SiLU()(z)), (None, z), ("tanh", z.tanh())):
        layer.epilogue = epilogue
        assert_close(layer(x), expected)
    for wrong in ("silo", "swiglu", "softcap(x)", 3):
        with pytest.raises((ValueError, TypeError)):
            layer.epilogue = wrong
        assert layer.epilogue == "tanh"
        assert_close(layer(x), z.tanh())


def test_a_gated_linear_is_half_as_wide() -> None:
    layer, x = Linear(8, 6, epilogue="swiglu"), randn(3, 8)
    gate, up = F.linear(x, layer.weight, layer.bias).chunk(2, -1)
    assert_close(layer(x), F.silu(gate) * up)
    with pytest.raises(ValueError, match="out_features=5 is odd"):
        Linear(8, 5, epilogue="swiglu")


def test_an_unknown_epilogue_is_reported_when_the_layer_is_made() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gelu'"):
        Linear(8, 5, epilogue="gleu")


def cubed(z: torch.Tensor) -> torch.Tensor:
    return z**3


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_a_users_epilogue_survives_copies(through: str) -> None:
    layer = Linear(8, 5, epilogue=tmm_core.Epilogue("cubed", cubed))
    if through == "pickle":
        text = pickle.dumps(layer)
        forget_interned()  # as in the process that reads it
        again = pickle.loads(text)
    else:
        again = copy.deepcopy(layer)
    x = randn(3, 8)
    expected = F.linear(x, layer.weight, layer.bias) ** 3
    with torch.no_grad():
        assert_close(again(x), expected.detach())


# -- GatedMLP ----------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
}


def by_hand(mlp: Any, x: torch.Tensor, act: Any = F.silu) -> torch.Tensor:
    def apply(layer: Any, z: torch.Tensor) -> torch.Tensor:
        return F.linear(z, layer.weight, layer.bias)

    return apply(mlp.down_proj, act(apply(mlp.gate_proj, x)) * apply(mlp.up_proj, x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 5, 12), (0, 12)])
@pytest.mark.slow(quick=6)
def test_gated_mlp(activation: str, bias: bool, shape: tuple[int, ...], products: Any) -> None:
    mlp = GatedMLP(12, 20, activation, bias)
    x = randn(*shape)
    expected = by_hand(mlp, x, ACTIVATIONS[activation])
    assert_close(mlp(x), expected)
    products.clear()
    with torch.no_grad():
        assert_close(mlp(x), expected.detach())
    assert products == [mlp.epilogue, ""]


def test_gated_mlps_gradients_are_eagers_for_parameters_listed_once() -> None:
    mlp, x = SwiGLU(12, 20, bias=True), randn(5, 12)
    names = ["gate_proj", "up_proj", "down_proj"]
    expected = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    assert [name for name, _ in mlp.named_parameters()] == expected
    assert list(mlp.state_dict()) == expected
    reference = LlamaMLP()
    for name in names:
        setattr(reference, name, nn.Linear(*mlp.get_submodule(name).weight.shape[::-1]))
    reference.load_state_dict(mlp.state_dict())
    same_gradients(mlp, reference, x)


def test_training_moves_both_halves_and_the_product_sees_it() -> None:
    mlp, x = GatedMLP(12, 20), randn(5, 12)
    reference = LlamaMLP()
    reference.load_state_dict(mlp.state_dict())
    for model in (mlp, reference):
        # Not Adam, which makes whole steps of gradients that are but rounding.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert mlp.merged
    with torch.no_grad():
        assert_close(mlp(x), reference(x))
    assert_close(mlp.state_dict(), reference.state_dict())


MOVES = {
    "deepcopy": copy.deepcopy,
    "double": lambda m: m.double(),
    "there and back": lambda m: m.bfloat16().float(),
    "to_empty": lambda m: m.to("meta").to_empty(device="cpu"),
    "load": lambda m: m.load_state_dict(detached(m)) and m,
    "assign": lambda m: m.load_state_dict(detached(m), assign=True) and m,
    "share_memory": lambda m: m.share_memory(),
    "torch.save": lambda m: through_file(m),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "as a child": lambda m: nn.Sequential(m).double()[0],
    "separate and merge": lambda m: (m.separate(), m.merge()) and m,
}


def detached(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def through_file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_layer_stays_merged_and_right(move: str, products: Any) -> None:
    mlp = MOVES[move](GatedMLP(12, 20, bias=True))
    assert mlp.merged
    x = randn(5, 12).to(mlp.gate_proj.weight.dtype)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(randn(*parameter.shape))
        products.clear()
        assert_close(mlp(x), by_hand(mlp, x))
    assert products == ["swiglu", ""]


def replace_weight(mlp: Any) -> None:
    mlp.gate_proj.weight = nn.Parameter(randn(20, 12))


def swap_halves(mlp: Any) -> None:
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def tie_halves(mlp: Any) -> None:
    mlp.up_proj.weight = mlp.gate_proj.weight


def slice_of_one_buffer(mlp: Any) -> None:
    flat = randn(480)
    mlp.gate_proj.weight.data = flat[240:].view(20, 12)
    mlp.up_proj.weight.data = flat[:240].view(20, 12)


def parametrize(mlp: Any) -> None:
    parametrizations.weight_norm(mlp.gate_proj)


def hook(mlp: Any) -> None:
    mlp.up_proj.register_forward_hook(lambda module, args, out: out * 2)


class Adapter(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def adapt(mlp: Any) -> None:
    mlp.gate_proj = Adapter(12, 20)


def transpose(mlp: Any) -> None:
    mlp.gate_proj.weight.data = randn(12, 20).t()


def neighbours_by_columns(mlp: Any) -> None:
    flat = randn(480)
    mlp.gate_proj.weight.data = flat[:240].view(12, 20).t()
    mlp.up_proj.weight.data = flat[240:].view(12, 20).t()


def one_bias(mlp: Any) -> None:
    mlp.up_proj.bias = nn.Parameter(randn(20))


def no_parameters(mlp: Any) -> None:
    """Weights and biases as FullyShardedDataParallel replaces them."""
    for layer in (mlp.gate_proj, mlp.up_proj):
        for name in ("weight", "bias"):
            t = getattr(layer, name)
            delattr(layer, name)
            setattr(layer, name, t if t is None else t.detach())


SPOILERS = (replace_weight, swap_halves, tie_halves, slice_of_one_buffer, parametrize)


OTHERS = (transpose, neighbours_by_columns, one_bias, no_parameters)


@pytest.mark.parametrize("spoil", [*SPOILERS, hook, adapt, *OTHERS])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow(quick=6)
def test_separated_halves_make_two_products_and_the_right_result(
    spoil: Any, compiled: bool, products: Any
) -> None:
    mlp, x = GatedMLP(12, 20), randn(5, 12)
    run = torch.compile(mlp, backend="eager", fullgraph=True) if compiled else mlp
    with torch.no_grad():
        run(x)
        spoil(mlp)
        if spoil is hook:
            torch._dynamo.reset()  # it does not watch for hooks that come later
        products.clear()
        got = run(x)
        assert_close(got, mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    assert "swiglu" not in products


def saved(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_of_a_state_have_storages_of_their_own_in_the_same_memory(
    dtype: torch.dtype,
) -> None:
    mlp = GatedMLP(32, 64, bias=True, dtype=dtype)
    state = nn.ModuleDict({"mlp": mlp}).state_dict()
    for name, parameter in mlp.named_parameters():
        entry = state[f"mlp.{name}"]
        assert entry.untyped_storage().nbytes() == entry.nbytes
        assert entry.data_ptr() == parameter.data_ptr()
        assert_close(entry, parameter.detach())
    state["mlp.up_proj.weight"].fill_(2.0)
    assert mlp.up_proj.weight.eq(2.0).all()
    del mlp.up_proj
    assert state["mlp.up_proj.weight"].eq(2.0).all()
    one = saved(state["mlp.gate_proj.weight"])
    assert one < saved(state["mlp.gate_proj.weight"].clone()) + 64
    kept = GatedMLP(32, 64).state_dict(keep_vars=True)
    assert all(type(t) is nn.Parameter for t in kept.values())


def test_safetensors_saves_and_loads_a_gated_mlp(tmp_path: Path, products: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model, other = (nn.Sequential(LlamaMLP(), nn.Linear(12, 4)) for _ in range(2))
    x = torch.randn(3, 12)
    convert(model)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert_close(other(x), model(x))
    convert(other)
    other[0].gate_proj.weight.data.zero_()
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        products.clear()
        assert_close(other(x), model(x))
    assert products.count("swiglu") == 2


def test_parameters_in_somebodys_buffer_are_not_moved() -> None:
    mlp = GatedMLP(12, 20)
    slice_of_one_buffer(mlp)
    before = mlp.gate_proj.weight.data_ptr()
    assert not mlp.merge()
    assert mlp.gate_proj.weight.data_ptr() == before


def test_halves_of_two_dtypes_are_not_merged() -> None:
    mlp = GatedMLP(12, 20)
    mlp.separate()
    mlp.up_proj.double()
    assert not mlp.merge()
    assert mlp.gate_proj.weight.dtype is torch.float32
    assert mlp.up_proj.weight.dtype is torch.float64


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_weights_pass_gradients_on(compiled: bool) -> None:
    mlp, x = GatedMLP(12, 20).requires_grad_(False), randn(5, 12).requires_grad_()
    run = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
    (got,) = torch.autograd.grad(run(x).sum(), x)
    (expected,) = torch.autograd.grad(by_hand(mlp, x).sum(), x)
    assert_close(got, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_gated_mlp_under_autocast(compiled: bool) -> None:
    mlp, x = GatedMLP(12, 20), randn(5, 12)
    reference = LlamaMLP()
    reference.load_state_dict(mlp.state_dict())
    run = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = run(x), reference(x)
        assert y.dtype is torch.bfloat16
        assert_close(y, expected)
    # Rounded to 16 bits on the way, and to no fewer.
    error = (y.float() - by_hand(mlp, x)).abs().max()
    assert 0 < error < 0.02
    grad = torch.randn_like(y)
    names = [name for name, _ in reference.named_parameters()]
    parameters = dict(mlp.named_parameters())
    got = torch.autograd.grad(y, [parameters[name] for name in names], grad)
    for mine, theirs in zip(
        got, torch.autograd.grad(expected, [*reference.parameters()], grad), strict=True
    ):
        assert mine.dtype is torch.float32
        assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(run(x), reference(x))
        mlp.bfloat16(), reference.bfloat16()
        assert_close(run(x.bfloat16()), reference(x.bfloat16()))


def test_gated_mlp_in_inference_mode_and_on_meta() -> None:
    x = randn(5, 12)
    with torch.inference_mode():
        mlp = GatedMLP(12, 20)
        assert mlp.double().merged
        assert_close(mlp(x.double()), by_hand(mlp, x.double()))
        mlp = GatedMLP(12, 20)
    mlp.separate()
    assert not mlp.merged
    assert all(t.is_inference() for t in mlp.parameters())
    with torch.inference_mode():
        for parameter in mlp.parameters():
            parameter.add_(1)
    plain = GatedMLP(12, 20)
    plain.separate()
    assert not any(t.is_inference() for t in plain.parameters())
    with torch.inference_mode():
        assert plain.merge()
    reference = LlamaMLP()
    reference.load_state_dict(plain.state_dict())
    same_gradients(plain, reference, x)
    meta = GatedMLP(12, 20, device="meta")
    with torch.no_grad():
        assert meta(x.to("meta")).shape == (5, 12)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_the_device_and_dtype_that_it_is_given(bias: bool) -> None:
    for layer in (
        Linear(6, 4, bias, "meta", torch.float64, epilogue="silu"),
        GatedMLP(6, 4, bias=bias, device="meta", dtype=torch.float64),
    ):
        parameters = list(layer.parameters())
        assert len(parameters) == (1 if isinstance(layer, Linear) else 3) * (1 + bias)
        assert all(p.is_meta and p.dtype is torch.float64 for p in parameters)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("later", [False, True])
def test_one_weight_of_inference_mode_stays_apart(name: str, later: bool) -> None:
    """The two weights have different modes, and neither can become the other kind of tensor."""
    mlp, x = LlamaMLP().requires_grad_(False), randn(5, 12)

    def replace() -> None:
        layer = mlp.get_submodule(name)
        with torch.inference_mode():
            layer.weight = nn.Parameter(torch.randn(20, 12), requires_grad=False)

    for step in (convert, lambda _: replace()) if later else (lambda _: replace(), convert):
        step(mlp)  # type: ignore[operator]
    if isinstance(mlp, GatedMLP):
        assert not mlp.merge()
    z = F.silu(x @ mlp.gate_proj.weight.mT) * (x @ mlp.up_proj.weight.mT)
    assert_close(mlp(x), z @ mlp.down_proj.weight.mT)
    assert {n for n, p in mlp.named_parameters() if p.is_inference()} == {f"{name}.weight"}


def test_gated_mlp_of_a_weight_per_sample() -> None:
    mlp, x = GatedMLP(12, 20), randn(5, 12)
    twice = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in mlp.named_parameters()}
    with torch.no_grad():
        one, two = (
            torch.func.functional_call(mlp, {n: p[i] for n, p in twice.items()}, (x,))
            for i in range(2)
        )
        assert_close(one, by_hand(mlp, x))
    scaled = copy.deepcopy(mlp)
    for parameter in scaled.parameters():
        parameter.data *= 2
    assert_close(two, by_hand(scaled, x).detach())


def test_a_users_gated_epilogue_gates() -> None:
    bilinear = tmm_core.Epilogue("bilinear", lambda gate, up: gate * up, gated=True)
    mlp, x = GatedMLP(12, 20, bilinear), randn(5, 12)
    expected = by_hand(mlp, x, lambda z: z)
    assert_close(mlp(x), expected)
    with torch.no_grad():
        assert_close(copy.deepcopy(mlp)(x), expected.detach())


@pytest.mark.parametrize("activation", ["tanh", None, "swiglu+softcap(3)"])
def test_an_activation_that_does_not_gate_is_refused(activation: Any) -> None:
    chained = "one function of gate and up halves"
    known = r"does not gate; known: \['gelu'"
    with pytest.raises(ValueError, match=known if activation != "swiglu+softcap(3)" else chained):
        GatedMLP(12, 20, activation)


# -- under torch.compile and export ------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "gated", "converted"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
def test_layers_compile_whole_with_and_without_gradients(
    kind: str, backend: str, products: Any
) -> None:
    made = {
        "linear": lambda: Linear(12, 20, epilogue="gelu"),
        "gated": lambda: GatedMLP(12, 20, bias=True),
        "converted": lambda: convert(nn.Sequential(LlamaMLP(), BertLayer())).model,
    }
    model = made[kind]()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(compiled(x), model(x))
    out = compiled(x)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    found = torch.autograd.grad((out * weight).sum(), list(model.parameters()))
    for got, expected in zip(found, gradients(model, x).values(), strict=True):
        assert_close(got, expected)


def test_a_compiled_gated_mlp_is_one_product_for_any_number_of_rows(products: Any) -> None:
    torch._dynamo.utils.counters.clear()
    mlp = GatedMLP(12, 20)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in range(2, 20):
            x = randn(rows, 12)
            assert_close(compiled(x), by_hand(mlp, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert products.count("swiglu") == 18


def test_vmap_of_a_gated_mlp_compiles_whole() -> None:
    mlp, x = GatedMLP(12, 20), randn(3, 5, 12)
    with torch.no_grad():
        compiled = torch.compile(torch.vmap(mlp), backend="eager", fullgraph=True)
        assert_close(compiled(x), by_hand(mlp, x))
    assert "epilogue='swiglu', merged=True" in repr(mlp)


def test_a_gated_mlp_in_a_branch_of_a_graph_is_separated_first() -> None:
    mlp, x = GatedMLP(12, 20), randn(5, 12)

    def branches(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: mlp(x), lambda x: mlp(-x), (x,))

    mlp.separate()
    with torch.no_grad():
        compiled = torch.compile(branches, backend="aot_eager", fullgraph=True)
        for each in (x, -x):
            assert_close(compiled(each), branches(each))


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_gated_product(strict: bool) -> None:
    mlp, x = GatedMLP(12, 20), randn(5, 12)
    with torch.no_grad():
        program = torch.export.export(mlp, (x,), strict=strict)
        assert "tmm.gated_linear" in str(program.graph)
        assert_close(program.module()(x), by_hand(mlp, x))


def test_the_gated_operator_is_a_sound_one() -> None:
    gate, up = randn(20, 12), randn(20, 12)
    sample = (randn(5, 12), gate, up, None, None, "swiglu")
    torch.library.opcheck(torch.ops.tmm.gated_linear.default, sample)


# -- convert -----------------------------------------------------------------------------

MODELS = {
    "llama": (Decoder, lambda: torch.arange(10).view(2, 5), {"gated": 2, "linear": 9}),
    "mistral": (
        lambda: nn.Sequential(MistralFeedForward(), MistralFeedForward()),
        lambda: randn(5, 12),
        {"gated": 2, "linear": 6},
    ),
    "bert": (
        lambda: nn.Sequential(BertLayer(), BertLayer(PythonGelu())),
        lambda: randn(5, 12),
        {"epilogue": 2, "linear": 2},
    ),
    "vit": (ViT, lambda: randn(2, 3, 8, 8), {"epilogue": 2, "linear": 7}),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Dropout(0.0), nn.Linear(20, 3)),
        lambda: randn(5, 12),
        {"epilogue": 1, "linear": 1},
    ),
}


#: Modules that multiply without a layer.
LEFT = {"vit": ["blocks.0", "blocks.1"]}


@pytest.mark.parametrize("kind", MODELS)
def test_convert_keeps_outputs_gradients_and_checkpoints(kind: str, products: Any) -> None:
    make, sample, expected = MODELS[kind]
    model, x = make(), sample()
    original = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    identities = [id(p) for p in model.parameters()]
    report = convert(model)
    kinds = [change.kind for change in report.changes]
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == expected
    assert [item.path for item in report.left] == LEFT.get(kind, [])
    assert not report.not_fused
    # Parameters are the very objects, under the names they had, in the order they had.
    assert [id(p) for p in model.parameters()] == identities
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == list(original.state_dict())
    with torch.no_grad():
        assert_close(model(x), original(x))
    assert {e for e in products if e} == fused_epilogues(report)
    same_gradients(model, original, x)
    # An old checkpoint into the converted model, and one of the converted into the old.
    other = make()
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert_close(model(x), other(x))
    original.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_close(original(x), other(x))


def fused_epilogues(report: Any) -> set[str]:
    afters = [c.after for c in report.changes if "epilogue=" in c.after]
    return {after.partition("epilogue='")[2].rstrip("')") for after in afters}


@pytest.mark.parametrize("kind", MODELS)
def test_undo_puts_the_very_modules_back_with_todays_values(kind: str) -> None:
    make, sample, _ = MODELS[kind]
    model, x = make(), sample()
    before, identities = structure(model), [id(p) for p in model.parameters()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = [len(m._state_dict_hooks) for m in model.modules()]
    report = convert(model)
    assert structure(model) != before
    model.double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    expected = copy.deepcopy(model.state_dict())
    report.undo()
    assert structure(model) == before
    assert [id(p) for p in model.parameters()] == identities
    assert not any(module.training for module in model.modules())
    assert_close(model.state_dict(), expected, rtol=0, atol=0)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert [len(m._state_dict_hooks) for m in model.modules()] == hooks
    assert not report
    report.undo()
    assert structure(model) == before
    fresh = make().double()
    fresh.load_state_dict(expected)
    x = x.double() if x.is_floating_point() else x
    assert_close(model(x), fresh.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_converting_again_changes_nothing(kind: str) -> None:
    model = MODELS[kind][0]()
    convert(model)
    before = structure(model)
    again = convert(model)
    assert not again
    assert [item.path for item in again.left] == LEFT.get(kind, [])
    assert structure(model) == before


def test_a_copy_is_converted_where_inplace_is_false() -> None:
    model = Decoder()
    before = structure(model)
    report = convert(model, inplace=False)
    assert report
    assert report.model is not model
    assert structure(model) == before
    ids = torch.arange(5)
    assert_close(report.model(ids), model(ids))


def test_tied_weights_stay_tied() -> None:
    model = Decoder()
    report = convert(model)
    assert isinstance(model.lm_head, Linear)
    assert model.lm_head.weight is model.embed.weight
    # Tying anew afterwards reaches the original too.
    weight = nn.Parameter(randn(17, 12))
    model.lm_head.weight = model.embed.weight = weight
    report.undo()
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is weight


def test_an_optimiser_made_before_trains_the_converted_model() -> None:
    model, ids = Decoder(), torch.arange(10).view(2, 5)
    twin = copy.deepcopy(model)
    # A step of 0.1 throws some of these far, and what rounding differs by with them.
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, twin)]
    convert(model)
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            m(ids).square().mean().backward()
            optimizer.step()
    assert_close(model.state_dict(), twin.state_dict())
    assert model.layers[0]["mlp"].merged


def test_a_converted_model_copies_moves_and_compiles() -> None:
    model, ids = Decoder(), torch.arange(10).view(2, 5)
    convert(model)
    again = copy.deepcopy(model).double()
    assert again.lm_head.weight is again.embed.weight
    assert again.layers[1]["mlp"].merged
    with torch.no_grad():
        assert_close(again(ids).float(), model(ids))


def test_a_shared_module_is_swapped_in_all_its_places(products: Any) -> None:
    shared = nn.Linear(12, 12)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared))
    original, x = copy.deepcopy(model), randn(5, 12)
    report = convert(model)
    assert model[0] is model[2] is model[3][0] is shared
    assert type(shared) is Linear
    assert [change.path for change in report.changes] == ["0"]
    assert not report.left
    with torch.no_grad():
        assert_close(model(x), original(x))
    assert products == ["relu", "", ""]
    report.undo()
    assert type(shared) is nn.Linear


@pytest.mark.parametrize("second", [nn.Identity, nn.Tanh, nn.ReLU])
def test_a_linear_with_two_parents_gets_the_activation_of_each(second: Any, products: Any) -> None:
    shared = nn.Linear(12, 12)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, second()))
    original, x = copy.deepcopy(model), randn(5, 12)
    report = convert(model)
    with torch.no_grad():
        assert_close(model(x), original(x))
        assert_close(shared(x), original[0][0](x))
    names = {nn.Identity: "", nn.Tanh: "tanh", nn.ReLU: "relu"}
    assert products == ["relu", names[second], ""]
    assert not report.left
    assert len(report.changes) == 1 + (second is not nn.Identity)


def test_an_activation_shared_by_several_layers_is_fused_into_each(products: Any) -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(12, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3))
    original, x = copy.deepcopy(model), randn(5, 12)
    convert(model)
    assert model[1] is model[3] is act
    with torch.no_grad():
        assert_close(model(x), original(x))
    assert products == ["relu", "relu", ""]


class Branching(nn.Module):
    """Looks like a pair; depends on the input, or on the mode, or uses the layer twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.act, self.kind = nn.Linear(12, 12), nn.ReLU(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "value" and x.sum() > 0:
            return self.fc(x)
        if self.kind == "mode" and not self.training:
            return self.fc(x)
        z = self.fc(x)
        if self.kind == "twice":
            return self.act(z) + z
        if self.kind == "again":
            return self.act(z) + self.fc(x + 1)
        if self.kind == "other input":
            return self.act(z) + self.act(x)
        return self.act(z)


@pytest.mark.parametrize("kind", ["value", "mode", "twice", "again", "other input"])
def test_a_result_that_is_also_used_without_the_activation_is_not_fused(
    kind: str, products: Any
) -> None:
    model = nn.Sequential(Branching(kind))
    original = copy.deepcopy(model)
    report = convert(model)
    # The layer may be called twice: each result is a separate product.
    fused = kind in ("again", "other input")
    assert [change.kind for change in report.changes] == ["epilogue" if fused else "linear"]
    assert [item.path for item in report.not_fused] == ["0.act"] * (not fused)
    with torch.no_grad():
        for x in (randn(5, 12).abs(), -randn(5, 12).abs()):
            for mode in (True, False):
                assert_close(model.train(mode)(x), original.train(mode)(x))
    assert ("relu" in products) == fused


class Clamped(nn.Module):
    """silu, but for large values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x).clamp(max=1e6)


class Prefixed(LlamaMLP):
    """Children named as Llama's, a forward that is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + x


class Doubled(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x * 2)) * self.up_proj(x))


class Optional(LlamaMLP):
    """May take more than x."""

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        out = super().forward(x)
        return out if scale is None else out * scale


class OwnState(LlamaMLP):
    saved = 0

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)
        self.saved += 1


class QuickGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize(
    "make",
    [
        Prefixed,
        Doubled,
        lambda: LlamaMLP(act=Clamped()),
        lambda: LlamaMLP(act=QuickGelu()),
        lambda: LlamaMLP(act=nn.Sigmoid()),
        lambda: LlamaMLP(act=nn.Softplus(beta=2)),
    ],
)
def test_a_module_that_only_resembles_a_gated_mlp_keeps_its_forward(make: Any) -> None:
    model, x = nn.Sequential(make()), randn(5, 12)
    original = copy.deepcopy(model)
    report = convert(model)
    assert isinstance(model[0], type(original[0]))
    assert not isinstance(model[0], GatedMLP)
    assert type(model[0].up_proj) is Linear
    assert "gated" not in [change.kind for change in report.changes]
    assert_close(model(x), original(x))


class OfTheMode(LlamaMLP):
    """Two gated MLPs, of which one is for training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.other = kind, nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act, gate, up = self.act_fn, self.gate_proj, self.up_proj
        if not self.training and self.kind == "activation":
            act = self.other
        if not self.training and self.kind == "order":
            gate, up = up, gate
        return self.down_proj(act(gate(x)) * up(x))


@pytest.mark.parametrize("kind", ["activation", "order"])
@pytest.mark.parametrize("converted_in_training", [False, True])
def test_a_gated_mlp_that_depends_on_the_mode_keeps_its_forward(
    kind: str, converted_in_training: bool
) -> None:
    model, x = nn.Sequential(OfTheMode(kind)).train(converted_in_training), randn(5, 12)
    original = copy.deepcopy(model)
    report = convert(model)
    assert "gated" not in [change.kind for change in report.changes]
    for mode in (True, False):
        assert_close(model.train(mode)(x), original.train(mode)(x))


def test_a_gated_mlp_called_with_more_runs_its_own_forward(products: Any) -> None:
    model, x = nn.Sequential(Optional()), randn(5, 12)
    original = copy.deepcopy(model)
    convert(model)
    with torch.no_grad():
        assert_close(model(x), original(x))
        assert products == ["swiglu", ""]
        products.clear()
        assert_close(model[0](x, 3.0), original[0](x, 3.0))
        assert_close(model[0](x, scale=2.0), original[0](x, scale=2.0))
    assert "swiglu" not in products


def test_methods_of_a_gated_mlps_class_stay_its_own() -> None:
    model = nn.Sequential(OwnState())
    convert(model)
    assert isinstance(model[0], GatedMLP)
    assert isinstance(model[0], OwnState)
    model.state_dict()
    assert model[0].saved == 1


def test_weights_that_share_memory_with_others_are_not_moved() -> None:
    mlp = LlamaMLP()
    model = nn.Sequential(mlp)
    model.alias = nn.Parameter(mlp.gate_proj.weight.data)
    report = convert(model)
    assert not isinstance(mlp, GatedMLP)
    assert "share memory" in report.not_fused[0].reason
    assert model.alias.data_ptr() == mlp.gate_proj.weight.data_ptr()


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("name", ["gate_proj", "act_fn", "down_proj", ""])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.slow(quick=6)
def test_hooks_run_before_and_after_as_in_the_model_itself(
    register: str, name: str, when: str
) -> None:
    model, x = nn.Sequential(LlamaMLP()), randn(5, 12)
    original, calls = copy.deepcopy(model), []
    if when == "after":
        convert(model)
    for one in (model, original):
        # Backward hooks see gradients only, not results.
        kept = lambda *given: calls.append(given[1:])  # noqa: E731
        getattr(one[0].get_submodule(name), register)(kept)
    if when == "before":
        assert not convert(model).left
    for one in (model, original):
        one(x.clone().requires_grad_()).sum().backward()
    assert len(calls) == 2
    assert_close(calls[0], calls[1])


def test_layers_that_are_not_exactly_linear_are_left_alone_with_the_reason() -> None:
    patched = nn.Linear(12, 12)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    marked, sparse = nn.Linear(12, 12), nn.Linear(12, 12)
    marked.bias = type("Marked", (nn.Parameter,), {})(torch.zeros(12))
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse())
    model = nn.ModuleDict(
        {
            "adapter": Adapter(12, 12),
            "marked": marked,
            "sparse": sparse,
            "attention": nn.MultiheadAttention(12, 2),
            "normed": parametrizations.weight_norm(nn.Linear(12, 12)),
            "patched": patched,
        }
    )
    before = structure(model)
    report = convert(model)
    assert not report
    assert structure(model) == before
    assert {item.path: item.reason for item in report.left} == {
        "adapter": "a subclass of Linear may do more than its base does",
        "marked": "its parameters are not plain ones (Marked)",
        "sparse": "its parameters are not plain ones (Parameter)",
        "attention": "it multiplies by in_proj_weight and out_proj.weight itself",
        "attention.out_proj": "a subclass of Linear may do more than its base does",
        "normed": "a subclass of Linear may do more than its base does",
        "patched": "its forward was replaced on the instance",
    }
    assert "normed  ParametrizedLinear left alone: a subclass" in str(report)


def test_the_model_itself_is_converted_too(products: Any) -> None:
    layer, mlp, x = nn.Linear(12, 4), LlamaMLP(), randn(5, 12)
    expected = layer(x), mlp(x)
    assert [c.kind for c in convert(layer).changes] == ["linear"]
    assert [c.kind for c in convert(mlp).changes] == ["gated", "linear", "linear", "linear"]
    with torch.no_grad():
        assert_close((layer(x), mlp(x)), expected)
    assert products == ["", "swiglu", ""]


def test_attributes_of_a_fused_mlp_remain() -> None:
    model = nn.Sequential(LlamaMLP())
    convert(model)
    assert model[0].hidden_size == 12
    assert type(model[0].act_fn) is nn.SiLU


def parts_of(model: nn.Module) -> list[torch.Tensor]:
    """The tensors with memory of a model's parameters."""
    parameters: list[Any] = [*model.parameters()]
    return [
        part
        for p in parameters
        for part in ((p.stored, p.scale) if isinstance(p, tmm_core.Quantized) else (p,))
    ]


def is_gated(report: Any) -> bool:
    return any(change.kind == "gated" for change in report.changes)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_memory_that_other_processes_share_is_not_moved(weights: str | None) -> None:
    model = nn.Sequential(LlamaMLP())
    if weights is not None:
        for name in ("gate_proj", "up_proj"):
            layer: Any = model.get_submodule(f"0.{name}")
            stored: Any = tmm_core.quantize(layer.weight, weights).to(torch.float32)
            layer.weight = nn.Parameter(stored, requires_grad=False)
    x = torch.randn(3, 12)
    with torch.no_grad():
        expected = model(x)
        places = [part.data_ptr() for part in parts_of(model.share_memory())]
        report = convert(model)
        assert not is_gated(report)
        assert_close(model(x), expected)
        report.undo()
    assert [part.data_ptr() for part in parts_of(model)] == places
    assert all(part.is_shared() for part in parts_of(model))


def test_memory_that_other_processes_share_since_the_conversion_is_not_moved_back() -> None:
    model = nn.Sequential(LlamaMLP())
    report = convert(model)
    assert is_gated(report)
    places = [part.data_ptr() for part in parts_of(model.share_memory())]
    report.undo()
    assert [part.data_ptr() for part in parts_of(model)] == places
    assert all(part.is_shared() for part in parts_of(model))


def test_undo_keeps_modules_that_other_code_inserted() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    report = convert(model)
    theirs = model[0] = Linear(3, 4)
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.warns(TmmWarning, match="1 is now a ParametrizedLinear"):
        report.undo()
    assert model[0] is theirs
    assert type(theirs) is Linear
    assert type(model[2]) is nn.Linear


def test_running_out_of_memory_half_way_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Decoder(layers=3)
    before = structure(model)
    merge, merged = GatedMLP.merge, []

    def scarce(mlp: GatedMLP) -> bool:
        if len(merged) == 2:
            raise torch.OutOfMemoryError("no memory left")
        merged.append(mlp)
        return merge(mlp)

    monkeypatch.setattr(GatedMLP, "merge", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        convert(model)
    assert len(merged) == 2
    assert structure(model) == before


def test_torchs_own_transformer_layers_keep_their_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 20, activation=nn.GELU(), batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    original, x = copy.deepcopy(model), randn(2, 5, 12)
    assert convert(model)
    for mode in (False, True):
        torch.manual_seed(0)
        expected = original.train(mode)(x)
        torch.manual_seed(0)
        assert_close(model.train(mode)(x), expected)


def test_the_report_names_products_that_no_swap_reaches() -> None:
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, src: torch.Tensor, **masks: Any) -> torch.Tensor:  # type: ignore[override]
            return self._ff_block(src)

    kinds: dict[str, nn.Module] = {
        "encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "mine": Mine(8, 2, 16),
        "rnn": nn.LSTM(8, 8),
    }
    report = convert(nn.ModuleDict(kinds))
    left = {item.path: item.reason for item in report.left}
    assert "set_fastpath_enabled(False)" in left["encoder"]
    assert "mine" not in left
    assert "in_proj_weight" in left["encoder.self_attn"]
    assert "itself" in left["rnn"]
    assert "set_fastpath_enabled" in str(report)


def test_turning_the_fast_path_off_calls_the_swapped_layers(products: Any) -> None:
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model[0](x)
        convert(model)
        assert_close(model[0](x), expected)
        assert products == []
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert_close(model[0](x), expected)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert len(products) == 2


def test_converted_layers_are_leaves_of_a_trace() -> None:
    model = nn.Sequential(LlamaMLP(), nn.Sequential(nn.Linear(12, 8), nn.GELU()), nn.Linear(8, 4))
    x = torch.randn(3, 12)
    expected = model(x)
    convert(model)
    traced = torch.fx.symbolic_trace(model)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["0", "1.0", "1.1", "2"]
    assert not [node for node in traced.graph.nodes if node.op == "call_function"]
    assert isinstance(traced.get_submodule("0"), GatedMLP)
    assert_close(traced(x), expected)
    assert_close(copy.deepcopy(traced)(x), expected)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Linear(12, 12, epilogue="silu"),
    "GatedMLP": lambda: GatedMLP(12, 20),
    "a converted Linear": lambda: convert(nn.Linear(12, 8)).model,
    "a converted gated MLP": lambda: convert(LlamaMLP()).model,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_by_itself_is_traced(layer: str) -> None:
    """A leaf is called by its name, and the root of a trace has none."""
    module, x = LAYERS[layer](), torch.randn(3, 12)
    traced = torch.fx.symbolic_trace(module)
    assert "" not in {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert_close(traced(x), module(x))


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "after": lambda layer: layer.register_forward_hook(lambda _, given, y: y + 1),
    "before": lambda layer: layer.register_forward_pre_hook(lambda _, given: (given[0] + 1,)),
    "of all modules": lambda _: nn.modules.module.register_module_forward_hook(
        lambda module, given, y: y + 1 if isinstance(module, nn.Linear) else None
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_trace_calls_a_hook_once(layer: str, hook: str) -> None:
    """It runs the hooks of every module that torch's tracer does not know as a leaf."""
    model, x = nn.Sequential(LAYERS[layer](), nn.Tanh()), torch.randn(3, 12)
    if hook == "of all modules" and layer == "GatedMLP":
        pytest.skip("traced as one module, whose layers have the hook")
    handle = HOOKS[hook](model[0])
    try:
        traced, expected = torch.fx.symbolic_trace(model), model(x)
    finally:
        if hook == "of all modules":
            handle.remove()
    assert_close(traced(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_and_quantisation_behave_as_documented() -> None:
    """docs/corners.md"""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    quantise = torch.ao.quantization.quantize_dynamic
    first = quantise(model, {nn.Linear})
    assert not convert(first)
    report = convert(model)
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(model)
    assert type(quantise(model, {nn.Linear})[0]) is Linear
    assert_close(torch.jit.trace(model, x)(x[:2]), model(x[:2]))
    report.undo()
    assert_close(torch.jit.script(model)(x), model(x))
    assert type(quantise(model, {nn.Linear})[0]) is not nn.Linear


def test_a_call_is_a_node_of_a_trace() -> None:
    w, bias = torch.randn(4, 6), torch.randn(4)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = tmm_core.linear(x, w, bias, epilogue="relu")
        return tmm_core.matmul(y, w, residual=x, alpha=2.0)

    traced = torch.fx.symbolic_trace(call)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [tmm_core.linear, tmm_core.matmul]
    x = torch.randn(3, 6)
    assert_close(traced(x), call(x))


def test_tracing_a_forward_leaves_no_mark_on_the_module() -> None:
    class Counting(Intermediate):
        calls = 0

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = super().forward(hidden)
            return self.last

    model = nn.Sequential(Counting(nn.ReLU()))
    convert(model)
    assert model[0].calls == 0
    assert not hasattr(model[0], "last")


def test_the_report_folds_the_layers_of_a_stack() -> None:
    text = str(convert(Decoder(layers=3)))
    assert "Decoder: 3 gated MLPs fused, 0 activations fused, 13 other linears swapped" in text
    assert "layers.*.mlp ×3  LlamaMLP → GatedMLP(epilogue='swiglu')" in text
    assert "lm_head  Linear → Linear" in text


def test_convert_takes_only_a_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not dict"):
        convert({})  # type: ignore[arg-type]


# -- the package -------------------------------------------------------------------------


@pytest.mark.slow
def test_import_tmm_core_does_not_import_nn() -> None:
    code = "import sys, tmm_core; assert not any(n.startswith('tmm_core.nn') for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


WITHOUT = """
import runpy, sys
sys.modules["transformers"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_example_names_the_missing_package() -> None:
    example = Path(__file__).parents[2] / "examples" / "llama_convert.py"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(example)], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "needs transformers" in run.stderr
    assert not run.stdout


# -- on a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what inductor imports warns of its own deprecations
def test_converted_on_a_gpu_within_two_roundings() -> None:
    with tmm_core.override(on_cache_miss="heuristic"):
        model = nn.Sequential(
            nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 12), LlamaMLP(), BertLayer()
        )
        model = model.cuda().bfloat16()
        reference = copy.deepcopy(model).double()
        report = convert(model)
        assert [c.kind for c in report.changes].count("epilogue") == 2
        x = randn(64, 256).cuda().bfloat16()
        with torch.no_grad():
            expected = reference(x.double())
            error = (model(x).double() - expected).abs().max() / expected.abs().max()
        assert error < 1.6e-2
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        with torch.no_grad():
            for _ in range(3):
                assert_close(compiled(x), model(x), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
def test_a_gated_mlp_moved_to_a_gpu_is_merged_there() -> None:
    mlp = GatedMLP(64, 128).cuda()
    assert mlp.merged
    assert stacked((mlp.gate_proj.weight, mlp.up_proj.weight)).is_cuda
    x = randn(8, 64).cuda()
    with torch.no_grad(), tmm_core.override(on_cache_miss="heuristic"):
        assert_close(mlp(x), by_hand(mlp, x), rtol=1e-3, atol=1e-3)
        assert not mlp.cpu().gate_proj.weight.is_cuda
        assert mlp.merged
