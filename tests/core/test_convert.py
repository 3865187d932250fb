"""Converted layers keep their meaning for whoever calls, hooks, wraps or replaces them."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import tmm_core
from tmm_core.nn import GatedMLP, Linear, convert

assert_close = torch.testing.assert_close


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The epilogue of every product that a layer computes."""
    calls: list[str] = []
    linear = tmm_core.api.linear

    def spy(*args: Any, epilogue: Any = None, **kwargs: Any) -> torch.Tensor:
        calls.append(epilogue or "")
        return linear(*args, epilogue=epilogue, **kwargs)

    monkeypatch.setattr(tmm_core.api, "linear", spy)
    return calls


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class OfDepth(Pair):
    """A block whose forward depends on its place in the model."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(self.act(self.fc1(x)))
        return y if self.depth < 2 else y * 2


def test_blocks_of_one_code_are_fused_at_each_place(products: list[str]) -> None:
    """The graphs of the first two are equal, and what they were proven for is not."""
    model = nn.Sequential(*(OfDepth(depth) for depth in range(3)))
    x = randn(4, 12)
    expected = model(x)
    convert(model)
    torch.testing.assert_close(model(x), expected)
    assert products == ["gelu", ""] * 3
    model[0].depth = 2  # not what was proven
    products.clear()
    torch.testing.assert_close(model[0](x), 2 * model[0].fc2(F.gelu(model[0].fc1(x))))
    assert products == [""] * 4


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.up = nn.Linear(12, 16), nn.Linear(12, 16)
        self.act, self.fc2 = nn.SiLU(), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)) * self.up(x))


class Sequence(nn.Sequential):
    """A sequence whose layers have names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)


class Joint(nn.Module):
    """Gate and up in one weight, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(12, 32), nn.SiLU(), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(up * self.act(gate))


KINDS: tuple[Callable[[], nn.Module], ...] = (Pair, Gated, Sequence, Joint)
FUSED = {Pair: "gelu", Gated: "swiglu", Sequence: "tanh", Joint: "swiglu"}


def twins(kind: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A converted module and an original of the same parameters."""
    torch.manual_seed(0)
    original = kind()
    converted = copy.deepcopy(original)
    assert {c.kind for c in convert(converted).changes} & {"epilogue", "gated"}
    return converted, original


@pytest.mark.parametrize("kind", KINDS)
def test_the_known_caller_gets_one_product(kind: Any, products: list[str]) -> None:
    converted, original = twins(kind)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert products == [FUSED[kind], ""]
    assert isinstance(converted, kind)
    assert isinstance(converted, GatedMLP) == (kind is Gated)


# -- reached from outside ----------------------------------------------------------------


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: torch.Tensor) -> Any:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return kept


class Grandparent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Pair()

    def forward(self, x: torch.Tensor) -> Any:
        return self.mlp(x), self.mlp.fc1(x), self.mlp.act(x), self.mlp.fc2(self.mlp.fc1(x))


class ByPath(Grandparent):
    def forward(self, x: torch.Tensor) -> Any:
        first = self.get_submodule("mlp.fc1")(x)
        return first, [m(first) for m in self.mlp.children() if isinstance(m, nn.GELU)]


class Sliced(Loop):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[:1](x), self.layers[:2](x), self.layers[1:](self.layers[0](x))


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Weights(Grandparent):
    """Reads the parameters of the layers."""

    def forward(self, x: torch.Tensor) -> Any:
        return F.linear(x, self.mlp.fc1.weight, self.mlp.fc1.bias), self.mlp.fc1(x)


@pytest.mark.parametrize("kind", [Loop, Grandparent, ByPath, Sliced, Reversed, Weights])
def test_code_outside_finds_the_layers_unchanged(kind: Any) -> None:
    torch.manual_seed(0)
    original = kind()
    converted = copy.deepcopy(original)
    assert convert(converted)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    for one, other in zip(converted.parameters(), original.parameters(), strict=True):
        assert_close(one, other)
    for mine, theirs in zip(
        torch.autograd.grad(torch.utils._pytree.tree_leaves(converted(x))[-1].sum(),
                            list(converted.parameters()), allow_unused=True),
        torch.autograd.grad(torch.utils._pytree.tree_leaves(original(x))[-1].sum(),
                            list(original.parameters()), allow_unused=True),
        strict=True,
    ):  # fmt: skip
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_close(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fc1", "act", "fc2"])
def test_children_called_alone_are_themselves(kind: Any, name: str) -> None:
    converted, original = twins(kind)
    x = randn(5, 16 if name == "fc2" else 12)
    assert_close(getattr(converted, name)(x), getattr(original, name)(x))


@pytest.mark.parametrize("part", [slice(0, 2), slice(1, 3), slice(0, 1), slice(None, None, 2)])
def test_slices_of_a_sequence(part: slice, products: list[str]) -> None:
    original = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh())
    converted = copy.deepcopy(original)
    convert(converted)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(converted[part](x), original[part](x))
    expected = {(0, 2): ["relu"], (1, 3): [""], (0, 1): [""], (None, None): ["", ""]}
    assert products == expected[part.start, part.stop]


def test_a_converted_class_has_the_name_and_the_documentation_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
    before = type(model)
    convert(model)
    now = type(model)
    assert now is not before
    names = "__doc__", "__name__", "__qualname__", "__module__"
    assert [getattr(now, name) for name in names] == [getattr(before, name) for name in names]


def test_an_activation_that_a_sequence_calls_twice(products: list[str]) -> None:
    """Once fused, and once after a layer without a product."""
    act = nn.ReLU()
    original = nn.Sequential(nn.Linear(12, 12), act, nn.LayerNorm(12), act, nn.Linear(12, 12), act)
    converted, x = copy.deepcopy(original), randn(5, 12)
    convert(converted)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert products == ["relu", "relu"]


def test_a_sequence_that_grows_and_shrinks(products: list[str]) -> None:
    original = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    converted, x = copy.deepcopy(original), randn(5, 12)
    convert(converted)
    with torch.no_grad():
        for model in (converted, original):
            model.append(nn.ReLU())
        products.clear()
        assert_close(converted(x), original(x))
        assert products == ["relu", "relu"]
        for model in (converted, original):
            model.insert(1, nn.Dropout(0.0))
        assert_close(converted(x), original(x))
        for model in (converted, original):
            del model[1:3]
        assert_close(converted(x), original(x))
        assert_close((converted + nn.Sequential(nn.Tanh()))(x), torch.tanh(original(x)))
        for model in (converted, original):
            model.register_module("0", None)
            with pytest.raises(TypeError, match="'NoneType' object is not callable"):
                model(x)


# -- changed afterwards ------------------------------------------------------------------


class Wrapped(nn.Module):
    """Wraps a layer as adapters do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.scale = base, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.scale


def wrap(model: Any) -> None:
    model.fc1 = Wrapped(model.fc1)


def wrap_in_place(model: Any) -> None:
    layer = model.fc1

    def forward(x: torch.Tensor) -> torch.Tensor:
        return type(layer).forward(layer, x) * 2

    layer.forward = forward


class Special(Linear):
    """A subclass of the very layer that is fused."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def special(model: Any) -> None:
    layer = Special(*reversed(model.fc1.weight.shape))
    layer.load_state_dict(model.fc1.state_dict())
    model.fc1 = layer


def replace_activation(model: Any) -> None:
    model.act = nn.ReLU()


def other_gelu(model: Any) -> None:
    model.act = nn.GELU(approximate="tanh")


def change_gelu(model: Any) -> None:
    model.act.approximate = "tanh"


def remove_activation(model: Any) -> None:
    model.act = nn.Identity()


def activation_of_ones_own(model: Any) -> None:
    model.act.forward = torch.abs


def hook(register: str) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for name in ("fc1", "act"):
            getattr(model.get_submodule(name), register)(
                lambda module, given, *out: (out[0] if out else given[0]) * 1.5
            )

    apply.__name__ = register
    return apply


def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.fc1)
    model.fc1.parametrizations.weight.original0.data *= 2


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.fc1, "weight", Doubled())


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.fc1, "weight", amount=0.5)
    prune.l1_unstructured(model.fc2, "bias", amount=0.5)


def new_weight(model: Any) -> None:
    model.fc1.weight = nn.Parameter(torch.ones_like(model.fc1.weight))


def without_bias(model: Any) -> None:
    model.fc1.bias = None


def tied(model: Any) -> None:
    model.fc1 = model.fc2 = nn.Linear(12, 12)
    if hasattr(model, "up"):
        model.up = nn.Linear(12, 12)


def moved(model: Any) -> None:
    model.double().float()


def frozen(model: Any) -> None:
    model.requires_grad_(False).eval()


def state(model: Any) -> None:
    model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()})


CHANGES = (
    wrap, wrap_in_place, special, replace_activation, other_gelu, change_gelu, remove_activation,
    activation_of_ones_own, hook("register_forward_hook"), hook("register_forward_pre_hook"),
    weight_norm, parametrized, pruned, new_weight, without_bias, tied, moved, frozen, state,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.slow(quick=6)
def test_a_later_change_has_its_usual_effect(kind: Any, change: Any) -> None:
    if kind is Joint and change is tied:
        pytest.skip("the first layer is twice as wide")
    converted, original = twins(kind)
    x = randn(5, 12)
    converted(x)
    before = original(x)
    torch.manual_seed(1)
    change(converted)
    torch.manual_seed(1)
    change(original)
    expected = original(x)
    assert_close(converted(x), expected)
    with torch.no_grad():
        assert_close(converted(x), expected)
        again = copy.deepcopy(converted)
        if change is not wrap_in_place and "hook" not in change.__name__:
            assert_close(again(x), expected)
    if change not in (moved, frozen, other_gelu, change_gelu):
        assert not torch.equal(before, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_with_other_parameters(kind: Any) -> None:
    converted, original = twins(kind)
    x = randn(5, 12)
    values = {name: 0.5 * p.detach() for name, p in original.named_parameters()}
    call = torch.func.functional_call
    assert_close(call(converted, values, (x,)), call(original, values, (x,)))
    with torch.no_grad():
        assert_close(call(converted, values, (x,)), call(original, values, (x,)))
    grads = [torch.func.grad(lambda p, m=m: call(m, p, (x,)).sum())(values)
             for m in (converted, original)]  # fmt: skip
    assert_close(*grads)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.complex64, nn.Tanh), (torch.complex64, nn.SiLU), (torch.int32, nn.ReLU)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_numbers_that_no_epilogue_takes(
    kind: Any, dtype: torch.dtype, activation: type[nn.Module]
) -> None:
    original = kind()
    original.act = activation()
    for layer in original.children():
        for name, value in layer.named_parameters():
            numbers = (9 * value.detach()).to(dtype)
            layer._parameters[name] = nn.Parameter(numbers, requires_grad=False)
    converted = copy.deepcopy(original)
    report = convert(converted)
    assert {c.kind for c in report.changes} & {"epilogue", "gated"} or activation is nn.Tanh
    x = (3 * randn(5, 12)).to(dtype)
    assert_close(converted(x), original(x))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind: Any, products: list[str]) -> None:
    converted, original = twins(kind)
    x = randn(5, 12)
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(converted),
        "copy": copy.copy(converted),
        "pickle": pickle.loads(pickle.dumps(converted)),
        "torch.save": torch.load(file, weights_only=False),
    }
    for how, again in copies.items():
        products.clear()
        with torch.no_grad():
            assert_close(again(x), original(x), msg=how)
        assert isinstance(again, kind)
        # Unpickled modules run their own forward, except sequences and gated MLPs.
        fused = how in ("deepcopy", "copy") or kind in (Sequence, Gated)
        assert (FUSED[kind] in products) == fused, how
        assert again.state_dict().keys() == original.state_dict().keys()
        replace_activation(again)
        assert_close(again(x), changed(original)(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_model_is_undone_by_the_report_that_it_holds(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(), randn(5, 12)
    expected = model(x)
    model.report = convert(model, static_weights=True)
    of_converted = [(type(m), vars(m).get("static_weights")) for m in model.modules()]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.report
        assert again.report.model is again
        again.report.undo()
        plain = {*map(type, again.modules())} - {kind}
        assert all(each.__module__.startswith("torch.nn") for each in plain)
        assert type(again) is kind
        assert not any("static_weights" in vars(m) for m in again.modules())
        assert_close(again(x), expected)
    assert [(type(m), vars(m).get("static_weights")) for m in model.modules()] == of_converted


class Drawn(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.rand(())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_evaluate_no_parametrization(kind: Any) -> None:
    converted, _ = twins(kind)
    for layer in list(converted.modules()):
        if isinstance(layer, nn.Linear):
            parametrize.register_parametrization(layer, "weight", Drawn(), unsafe=True)
            parametrize.register_parametrization(layer, "bias", Drawn(), unsafe=True)
    before = torch.get_rng_state()
    assert isinstance(copy.deepcopy(converted), kind)
    assert torch.equal(torch.get_rng_state(), before)


def changed(original: Any) -> Any:
    other = copy.deepcopy(original)
    replace_activation(other)
    return other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook"])
def test_hooks_on_all_modules(kind: Any, register: str) -> None:
    converted, original = twins(kind)
    x, seen = randn(5, 12), []
    add = getattr(torch.nn.modules.module, f"register_module_{register}")
    handle = add(lambda module, *_: seen.append(type(module).__name__))
    try:
        for model in (converted, original):
            model(x)
    finally:
        handle.remove()
    half = len(seen) // 2
    assert half >= 4
    assert seen[:half] == seen[half:]


class Counts(nn.Module):
    """A gated MLP whose forward changes its state, and a setting of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mean", torch.ones(8))
        self.losses: list[Any] = []
        self.steps = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> Any:
        self.mean.mul_(0.9)
        self.steps.add_(1)
        self.losses.append(x.sum())
        torch.set_grad_enabled(False)
        noise = torch.rand(8) + random.random()
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) + noise


#: A model that another thread runs, its input and its results.
ELSEWHERE: tuple[nn.Module, torch.Tensor] = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), randn(2, 4)
RESULTS: list[torch.Tensor] = []


class Meanwhile(nn.Module):
    """A module during whose forward another thread runs a model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> Any:
        model, given = ELSEWHERE
        thread = threading.Thread(target=lambda: RESULTS.append(model(given)))
        thread.start()
        thread.join()
        return self.act(self.linear(x))


def test_models_of_other_threads_run_during_a_conversion() -> None:
    """Torch's way to trace a module replaces ``nn.Module.__call__`` for all threads."""
    RESULTS.clear()
    convert(nn.Sequential(Meanwhile()))
    assert RESULTS
    assert all(torch.equal(result, ELSEWHERE[0](ELSEWHERE[1])) for result in RESULTS)


class Sized(nn.Module):
    """Its class makes no instance without arguments."""

    def __new__(cls, size: int) -> Any:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(size, size), nn.ReLU()

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self.linear(x))


def test_a_class_with_its_own_new_is_left_unfused() -> None:
    model = nn.Sequential(Sized(4))
    assert "0 activations fused" in str(convert(model))
    assert model(randn(2, 4)).shape == (2, 4)


def test_a_conversion_leaves_the_state_that_a_forward_changes() -> None:
    """The proof runs the forward on a symbol."""
    module = Counts()
    drawn = torch.get_rng_state(), random.getstate()
    convert(nn.Sequential(module))
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert torch.is_grad_enabled()
    assert torch.equal(module.mean, torch.ones(8))
    assert module.steps.item() == 0
    assert module.losses == []


def test_a_forward_that_is_replaced_in_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        converted, original = twins(kind)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x: self.fc1(x) + 1)
            x = randn(5, 12)
            assert_close(converted(x), original(x))
    converted, original = twins(Pair)
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x + 1)
    assert_close(converted(x), original(x))


def test_threads_that_read_layers_while_others_call_them() -> None:
    converted, original = twins(Pair)
    x = randn(5, 12)
    with torch.no_grad():
        whole, part = original(x), original.fc1(x)
    wrong: list[int] = []

    def run(own: int) -> None:
        with torch.no_grad():
            for _ in range(200):
                got, expected = (converted(x), whole) if own % 2 else (converted.fc1(x), part)
                if not torch.allclose(got, expected, atol=1e-6):
                    wrong.append(own)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_compiled_models_see_later_changes(kind: Any) -> None:
    torch._dynamo.reset()
    converted, original = twins(kind)
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(compiled(x), original(x))
        for change in (replace_activation, wrap, remove_activation):
            change(converted)
            change(original)
            assert_close(compiled(x), original(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [Pair, Gated, Joint])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_models_wrapped_for_several_ranks_are_converted(kind: Any, how: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    converted, original = twins(kind)
    x = randn(5, 12)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = []
        for model in (converted, original):
            if how == "ddp":
                models.append(nn.parallel.DistributedDataParallel(model))
            else:
                mesh = dist.init_device_mesh("cpu", (1,))
                models.append(fully_shard(model, mesh=mesh))
        for model in models:
            model(x).square().sum().backward()
        mine, theirs = ([p.grad for p in model.parameters()] for model in models)
        whole = [
            [g.full_tensor() if how == "fsdp2" else g for g in each] for each in (mine, theirs)
        ]
        assert_close(whole[0], whole[1])
        assert_close(models[0](x), models[1](x))
    finally:
        dist.destroy_process_group()


# -- what a trace does not show ----------------------------------------------------------


class Kept(Pair):
    """Its forward depends on something that a trace does not show; the name says what."""

    flag: Any = True
    config = {"fused": True}  # noqa: RUF012  # a mutable attribute, as models' configs are

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc1(x)) if self.decide(x) else self.fc1(x)

    def decide(self, x: torch.Tensor) -> Any:
        return self.flag


class OfGradients(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return torch.is_grad_enabled()


class OfAutocast(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return torch.is_autocast_enabled("cpu")


class OfChance(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return random.random() < 0.5


class OfTorchsChance(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return torch.rand(()) < 0.5


class OfConfig(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return self.config["fused"]


class OfTypes(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return isinstance(x, torch.Tensor)


class OfDtype(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return x.dtype is not torch.float16


class OfHistory(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return x.grad_fn is not None


class OfSets(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return x.dtype not in {torch.float16, torch.bfloat16}


class OfErrors(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            if x.sum() > 0:
                return self.fc1(x)
        except:  # noqa: E722  # a named exception would be refused for its name
            pass
        return self.act(self.fc1(x))


class OfChildren(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return self.fc1.in_features == 12


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(self: Any, x: torch.Tensor) -> Any:
        return function(self, x)

    return inner


class OfDecorators(Kept):
    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class OfModules(Kept):
    def decide(self, x: torch.Tensor) -> Any:
        return len(list(self.children())) == 3


class OfHandMade(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "act")(getattr(self, "fc1")(x))  # noqa: B009


NOT_SHOWN = (OfGradients, OfAutocast, OfChance, OfTorchsChance, OfConfig, OfTypes, OfDtype)
NOT_SHOWN += (OfHistory, OfSets, OfErrors, OfChildren, OfDecorators, OfModules, OfHandMade)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", NOT_SHOWN)
def test_a_forward_that_depends_on_untraced_state_is_kept(kind: Any) -> None:
    model = kind()
    report = convert(model)
    assert [change.kind for change in report.changes] == ["linear", "linear"]
    (apart,) = report.not_fused
    assert apart.path == "act"
    assert apart.reason.startswith("its forward ")
    assert type(model) is kind


class Flagged(Pair):
    """Reads constants, which may be assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.use_act, self.scale, self.norm = True, 2.0, None
        self.act_of = F.relu
        self.partial = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x: torch.Tensor, shift: Any = None) -> torch.Tensor:
        z = self.fc1(x)
        if self.use_act:
            z = self.act(z)
        if self.norm is not None:
            z = self.norm(z)
        if shift is not None:
            z = z + shift
        return self.partial(self.act_of(self.fc2(z) * self.scale))


@pytest.mark.parametrize(
    "assign",
    [
        {"use_act": False}, {"scale": 3.0}, {"norm": nn.Softmax(-1)}, {"act_of": torch.tanh},
        {"partial": functools.partial(F.gelu, approximate="none")}, {"scale": torch.tensor(2.5)},
    ],
    ids=lambda values: "".join(values),
)  # fmt: skip
def test_attributes_that_a_forward_reads_are_read_again(
    assign: dict[str, Any], products: list[str]
) -> None:
    converted, original = twins(Flagged)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(converted(x), original(x))
        assert products == ["gelu", ""]
        assert_close(converted(x, 1.0), original(x, 1.0))
        for name, value in assign.items():
            setattr(converted, name, value)
            setattr(original, name, value)
        assert_close(converted(x), original(x))
        assert_close(converted(x=x), original(x=x))


class Optional(nn.Module):
    """Has a child, a parameter and a buffer that its forward does without."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12)
        self.norm: Any = nn.LayerNorm(16)
        self.gamma: Any = nn.Parameter(torch.full((16,), 0.5))
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.act(self.fc1(x))
        if self.norm is not None:
            z = self.norm(z)
        if self.gamma is not None:
            z = z * self.gamma
        if self.shift is not None:
            z = z + self.shift
        return self.fc2(z)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["norm", "gamma", "shift"])
def test_optional_parts_of_a_forward_may_be_removed(name: str, products: list[str]) -> None:
    converted, original = twins(Optional)
    x, removed = randn(5, 12), getattr(converted, name)
    before = original(x)
    setattr(converted, name, None)
    setattr(original, name, None)
    assert_close(converted(x), original(x))
    assert products == ["", ""]  # its own forward
    setattr(converted, name, removed)
    assert_close(converted(x), before)
    assert products == ["", "", "gelu", ""]


class Residual(nn.Module):
    """More than a chain: its input changes in place, and it has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.gamma = nn.Parameter(torch.full((12,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.fc1(y)
        y.mul_(3.0)
        return x + self.gamma * self.fc2(F.gelu(z, approximate="tanh")) + y


def test_functions_are_fused_where_their_product_was(products: list[str]) -> None:
    converted, original = twins(Residual)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert products == ["gelu_tanh", ""]


class SecondHalf(Joint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(up * self.act(gate))


class ThirdUse(Joint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(up * self.act(gate) + up)


class OtherDimension(Joint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, dim=0)
        return self.fc2((up * self.act(gate))[..., :16])


class Same(Joint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, _ = self.fc1(x).chunk(2, dim=-1)
        acted = self.act(gate)
        return self.fc2(acted * acted)


@pytest.mark.parametrize("kind", [SecondHalf, ThirdUse, OtherDimension, Same])
def test_halves_that_are_not_gate_and_up_stay_apart(kind: Any, products: list[str]) -> None:
    torch.manual_seed(0)
    original = kind()
    converted, x = copy.deepcopy(original), randn(6, 12)
    report = convert(converted)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert products == ["", ""]
    reasons = {
        SecondHalf: "its gate is the second half of the product (fc1)",
        ThirdUse: "its halves are used for more than their product (fc1)",
        Same: "its halves are used for more than their product (fc1)",
    }
    found = {item.path: item.reason for item in report.not_fused}
    assert found == ({"act": reasons[kind]} if kind in reasons else {})


def _part_of_more(layer: nn.Linear) -> None:
    """A layer whose weight is the only tensor in a larger storage."""
    layer.weight = nn.Parameter(torch.randn(20, 12)[:16])


@pytest.mark.parametrize(
    "change",
    [_part_of_more, nn.Linear.double, nn.Linear.half],
    ids=["part_of_more", "double", "half"],
)
def test_a_gate_and_up_that_cannot_be_adjacent_stay_apart(change: Any) -> None:
    for name in ("fc1", "up"):
        model = Gated()
        change(getattr(model, name))
        weights = [model.fc1.weight.clone(), model.up.weight.clone()]
        found = {item.path: item.reason for item in convert(model).not_fused}
        why = "their weights share memory with others, or differ in dtype or device"
        assert why in found.values()
        assert torch.equal(model.fc1.weight, weights[0])
        assert torch.equal(model.up.weight, weights[1])


@pytest.mark.parametrize("name", ["fc1", "up"])
def test_a_gate_whose_memory_another_layer_has_too_stays_apart(name: str) -> None:
    model = nn.ModuleDict({"mlp": Gated(), "tied": nn.Linear(12, 16)})
    model["tied"].weight = nn.Parameter(getattr(model["mlp"], name).weight.data)
    found = {item.path: item.reason for item in convert(model).not_fused}
    assert "their weights share memory with others, or differ in dtype or device" in found.values()
    assert model["tied"].weight.data_ptr() == getattr(model["mlp"], name).weight.data_ptr()


def _of_an_array(numbers: Any) -> Any:
    array = numbers.numpy().copy()
    return torch.from_numpy(array), array


def _of_a_buffer(numbers: Any) -> Any:
    buffer = bytearray(numbers.numpy().tobytes())
    seen = torch.frombuffer(buffer, dtype=torch.float32).view(numbers.shape)
    return seen, torch.frombuffer(buffer, dtype=torch.float32)


def _of_a_replica(numbers: Any) -> Any:
    replica = GatedMLP(12, 16)
    replica.up_proj.weight.data.copy_(numbers)
    return replica.state_dict()["up_proj.weight"], replica.up_proj.weight.detach()


@pytest.mark.parametrize("made", [_of_an_array, _of_a_buffer, _of_a_replica])
def test_a_gate_in_memory_of_other_code_stays_there(made: Any) -> None:
    model, x = Gated(), torch.randn(3, 12)
    weight, other = made(torch.randn(16, 12))
    model.up.weight = nn.Parameter(weight)
    convert(model)
    other *= 2
    y = F.linear(F.silu(model.fc1(x)) * F.linear(x, weight, model.up.bias), model.fc2.weight)
    torch.testing.assert_close(model(x), y + model.fc2.bias)


# -- the report --------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(randn(12, 12)), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight) @ self.weight
        return self.inner(y) + helper(x, self.weight)


def helper(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("mk,kn->mn", x, w)


class TwoTensors(Pair):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.act(self.fc1(x)) + y


class Quick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(12, 12), nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x))


def test_the_report_names_every_product_and_activation() -> None:
    model = nn.ModuleDict(
        {
            "functional": Functional(),
            "two": TwoTensors(),
            "quick": Quick(),
            "sequence": nn.Sequential(
                nn.Linear(12, 12), nn.ELU(), nn.ELU(), nn.LayerNorm(12), nn.ELU()
            ),
            "bilinear": nn.Bilinear(2, 3, 4),
            "cell": nn.LSTMCell(3, 4),
        }
    )
    report = convert(model)
    left = {item.path: item.reason for item in report.left}
    assert left.keys() == {"functional", "bilinear", "cell"}
    assert "(linear, @, einsum in helper())" in left["functional"]
    apart = {item.path: item.reason for item in report.not_fused}
    assert apart == {
        "two.act": "its forward takes more than one argument",
        "quick.act": "no epilogue computes it",
        "sequence.1": "no epilogue computes it",
    }
    assert "two.act  GELU not fused: its forward takes" in str(report)
    assert max(map(len, str(report).splitlines()[:-1])) < 130


class LongError(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a long story " * 30)


def test_a_long_error_of_a_trace_is_cut() -> None:
    (apart,) = convert(LongError()).not_fused
    assert "a long story" in apart.reason
    assert len(apart.reason) < 120


class Leaves(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            sys.exit("no tensor")
        return super().forward(x)


def test_a_forward_that_ends_the_process_without_a_tensor_is_left_unfused() -> None:
    (apart,) = convert(model := Leaves()).not_fused
    assert apart.reason == "its forward cannot be traced (SystemExit: no tensor)"
    assert type(model.fc1) is Linear


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_report_says_that_a_cpu_gains_nothing(device: str) -> None:
    report = convert(Pair().to(device))
    assert bool(report.notes) == (device == "cpu")
    assert ("on a CPU" in str(report)) == (device == "cpu")


def test_a_shared_linear_is_listed_once() -> None:
    shared = nn.Linear(12, 12)
    report = convert(nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])}))
    assert [change.path for change in report.changes] == ["a"]
    assert not report.left
    assert not report.not_fused


def test_known_constants_do_not_prevent_a_proof(products: list[str]) -> None:
    class Python(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.act(self.fc1(x * math.sqrt(2.0)))
            return self.fc2(y.to(torch.float32).reshape(y.shape))

    converted, original = twins(Python)
    x = randn(5, 12)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert products == ["gelu", ""]


def test_a_layer_with_an_epilogue_of_its_own_is_not_given_another(products: list[str]) -> None:
    original = nn.Sequential(Linear(12, 12, epilogue="relu"), nn.Tanh(), nn.Linear(12, 4))
    converted, x = copy.deepcopy(original), randn(5, 12)
    convert(converted)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert products[:2] == ["relu", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epilogue_that_is_assigned_later_comes_before_the_activation(kind: Any) -> None:
    converted, original = twins(kind)
    x = randn(5, 12)
    converted.fc1.epilogue = "relu"
    original.fc1.register_forward_hook(lambda module, given, out: torch.relu(out))
    with torch.no_grad():
        assert_close(converted(x), original(x))


def test_an_activation_beside_other_uses_is_reported_by_its_path() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.activation = nn.Linear(4, 6), nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.up(x)
            return self.activation(z) + z  # type: ignore[no-any-return]

    [kept] = convert(Apart()).not_fused
    assert (kept.path, kept.activation) == ("activation", "SiLU")
    assert kept.reason == "its result is also used without the activation (up)"
