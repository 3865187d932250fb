"""``convert`` among other changes of a model, in any order. A twin that is not converted has equal
results, gradients and errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import bounded, long
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tmm_core.nn import convert

Tensor = torch.Tensor
Model = Any


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop = nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3)
        self.fc2 = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.act, self.down = nn.SiLU(), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Loop(nn.Module):
    """It keeps what each of its layers gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return torch.stack(kept)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pair = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.layers = nn.ModuleList([MLP(), Gated(), pair])
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def doubled(_: nn.Module, __: Any, y: Tensor) -> Tensor:
    return y * 2


def shifted(_: nn.Module, given: Any) -> Any:
    return tuple(t + 1 for t in given)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Halved:
    """A forward of an instance."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return type(self.layer).forward(self.layer, x) * 0.5  # type: ignore[operator,no-any-return]


def leaf(model: Model, place: int) -> Any:
    found = [m for m in model.modules() if not [*m.children()]]
    return found[place % len(found)]


def linear(model: Model, place: int) -> Any:
    found = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return found[place % len(found)]


def replaced(model: Model, place: int, kind: Any, make: Callable[[Any], Any]) -> Model:
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]
    if found:
        parent, name, child = found[place % len(found)]
        setattr(parent, name, make(child))
    return model


def fresh(layer: Any) -> nn.Linear:
    torch.manual_seed(3)
    bias = layer.bias is not None
    return nn.Linear(layer.in_features, layer.out_features, bias, dtype=layer.weight.dtype)


def reloaded(model: Model, place: int) -> Model:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file), strict=True, assign=bool(place % 2))
    return other


def tied(model: Model, place: int) -> Model:
    one = linear(model, place)
    for other in model.modules():
        plain = all("weight" in layer._parameters for layer in (one, other))
        if plain and other is not one and other.weight.shape == one.weight.shape:
            other.weight = one.weight
            break
    return model


def unparametrized(model: Model, place: int) -> Model:
    for layer in [*model.modules()]:
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    return model


def frozen(model: Model, place: int) -> Model:
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(bool(place >> number % 8 & 1))
    return model


def done(change: Callable[[Model, int], Any]) -> Callable[[Model, int], Model]:
    """A change in place, as a function that returns the model."""

    def changed(model: Model, place: int) -> Model:
        change(model, place)
        return model

    return changed


ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU)
CHANGES: dict[str, Callable[[Model, int], Model]] = {
    "hook": done(lambda m, i: leaf(m, i).register_forward_hook(doubled)),
    "hook before": done(lambda m, i: linear(m, i).register_forward_pre_hook(shifted)),
    "another activation": lambda m, i: replaced(m, i, ACTIVATIONS, lambda _: nn.Tanh()),
    "no activation": lambda m, i: replaced(m, i, ACTIVATIONS, lambda _: nn.Identity()),
    "another layer": lambda m, i: replaced(m, i, nn.Linear, fresh),
    "another forward": done(lambda m, i: setattr(found := linear(m, i), "forward", Halved(found))),
    "copy": lambda m, _: copy.deepcopy(m),
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m)),
    "state": reloaded,
    "tie": tied,
    "parametrize": done(
        lambda m, i: parametrize.register_parametrization(
            linear(m, i), "weight", Doubled(), unsafe=True
        )
    ),
    "weight norm": done(lambda m, i: parametrizations.weight_norm(linear(m, i))),
    "remove": unparametrized,
    "double": lambda m, _: m.double(),
    "bfloat16": lambda m, _: m.bfloat16(),
    "float": lambda m, _: m.float(),
    "freeze": frozen,
    "train": lambda m, _: m.train(),
    "eval": lambda m, _: m.eval(),
}  # fmt: skip
MODELS: tuple[Callable[[], Model], ...] = (Net, MLP, Gated, Loop)


def seen(model: Model, how: str) -> Any:
    """The result and gradients of a call, or its error."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.manual_seed(2)  # of dropout
    try:
        if how == "functional":
            given = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
            return [torch.func.functional_call(model, given, (x,)).detach()]
        if how == "inference":
            with torch.inference_mode():
                return [model(x).clone()]
        y = model(x)
        leaves = [p for p in model.parameters() if p.requires_grad]
        if not y.requires_grad:
            return [y]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)]
    except Exception as error:
        return error


def alike(model: Model, original: Model) -> None:
    for how in ("recorded", "inference", "functional"):
        found, wanted = seen(model, how), seen(original, how)
        if isinstance(wanted, Exception) or isinstance(found, Exception):
            assert type(found) is type(wanted), f"{how}: {found!r}, and torch {wanted!r}"
            continue
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine is None) == (theirs is None), how
            if theirs is not None:
                limit = {torch.float64: 1e-9, torch.float32: 1e-3}.get(theirs.dtype, 8e-2)
                size = float(theirs.abs().max())
                torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit * max(size, 1.0))


def verify(make: Callable[[], Model], changes: list[tuple[str, int]], place: int) -> None:
    torch.manual_seed(0)
    original = make().eval()
    model = copy.deepcopy(original)
    for number in range(len(changes) + 1):
        if number == min(place, len(changes)):
            convert(model)
            alike(model, original)
        if number < len(changes):
            name, where = changes[number]
            try:
                original = CHANGES[name](original, where)
            except Exception as error:  # torch cannot change a model so
                with pytest.raises(type(error)):
                    CHANGES[name](model, where)
                return
            model = CHANGES[name](model, where)
            alike(model, original)


@pytest.fixture(autouse=True)
def quick(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


GIVEN = given(
    make=st.sampled_from(MODELS),
    changes=st.lists(st.tuples(st.sampled_from([*CHANGES]), st.integers(0, 255)), max_size=4),
    place=st.integers(0, 4),
)


@settings(bounded, max_examples=60)
@GIVEN
@pytest.mark.slow
def test_changes_in_any_order(make: Any, changes: Any, place: int) -> None:
    verify(make, changes, place)


@pytest.mark.endurance
@long
@GIVEN
def test_changes_in_any_order_for_long(make: Any, changes: Any, place: int) -> None:
    verify(make, changes, place)
