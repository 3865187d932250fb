"""Code that is replaced after a model was converted counts as in a model that was not."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.integrations import kernel_layers
from tmm_core.nn import Linear, activation, classes, convert
from tmm_core.nn.classes import ProductLayer
from tmm_core.nn.reached import Reached, body

Tensor = torch.Tensor
HERE = sys.modules[__name__]

#: Globals that forwards use.
SLOPE = 1.0
FACTOR = 2.0
# Names that the module below has, too.
training = scale = fc = forward = 2.0


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def relu(self: Any, x: Tensor) -> Tensor:
    return torch.relu(x)


class OfGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(SLOPE * x)


class OfMethod(nn.Module):
    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Derived(OfMethod):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OfDefault(nn.Module):
    def forward(self, x: Tensor, slope: float = 1.0) -> Tensor:
        return x * torch.sigmoid(slope * x)


class OfNamed(nn.Module):
    def forward(self, x: Tensor, *, slope: float = 1.0) -> Tensor:
        return x * torch.sigmoid(slope * x)


class Scaled(nn.Module):
    """Its own forward uses a global, and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)

    def finish(self, x: Tensor) -> Tensor:
        return x * FACTOR

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(F.relu(self.fc(x)))


class Namesake(Scaled):
    """Its forward uses globals with the names of what it has itself."""

    scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.fc(x)) * self.scale * scale * fc * forward
        return y if training == 2.0 else -y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def pair(kind: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), kind(), nn.Linear(16, 8))


#: Each a model, and what is replaced: the owner, the name and the new value.
REPLACED: dict[str, tuple[Any, Any, str, Any]] = {
    "a global of an activation": (lambda: pair(OfGlobal), HERE, "SLOPE", 3.0),
    "a method of an activation": (lambda: pair(OfMethod), OfMethod, "act", relu),
    "a base's method": (lambda: pair(Derived), OfMethod, "act", relu),
    "a base's forward": (lambda: pair(Derived), OfMethod, "forward", relu),
    "an activation's call": (lambda: pair(OfMethod), OfMethod, "__call__", relu),
    "code": (lambda: pair(OfMethod), OfMethod.forward, "__code__", relu.__code__),
    "a method's code": (lambda: pair(OfMethod), OfMethod.act, "__code__", relu.__code__),
    "defaults": (lambda: pair(OfDefault), OfDefault.forward, "__defaults__", (3.0,)),
    "defaults by name": (
        lambda: pair(OfNamed), OfNamed.forward, "__kwdefaults__", {"slope": 3.0}
    ),
    "a global of a forward": (Scaled, HERE, "FACTOR", 5.0),
    **{
        f"a global {name} beside the module's": (Namesake, HERE, name, 5.0)
        for name in ("training", "scale", "fc", "forward")
    },
    "a method of a forward": (Scaled, Scaled, "finish", relu),
    "a method of a gated MLP": (Gated, Gated, "act", relu),
    "the forward of linear layers": (
        Scaled, nn.Linear, "forward", lambda self, x: F.linear(2 * x, self.weight, self.bias)
    ),
    "the forward of a gated MLP's layers": (
        Gated, nn.Linear, "forward", lambda self, x: F.linear(2 * x, self.weight, self.bias)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLACED)
def test_code_that_is_replaced_later_counts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, owner, name, value = REPLACED[case]
    original = make()
    converted = copy.deepcopy(original)
    assert convert(converted).changes
    x = randn(3, 8)
    before = original(x)
    torch.testing.assert_close(converted(x), before)
    again = pickle.loads(pickle.dumps(converted))
    with monkeypatch.context() as replacing:
        replacing.setattr(owner, name, value)
        expected = original(x)
        assert not torch.allclose(before, expected)
        for model in (converted, again):
            torch.testing.assert_close(model(x), expected)
            with torch.no_grad():
                torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(converted(x), before)


class Partial(nn.Module):
    """Its forward calls a partial function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()
        self.skip = functools.partial(F.leaky_relu, negative_slope=0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) + self.skip(x)  # type: ignore[no-any-return]


def test_what_changes_in_place_counts() -> None:
    of_class: Any = OfNamed.forward.__kwdefaults__
    for original in (pair(OfNamed), Partial()):
        converted: Any = copy.deepcopy(original)
        assert "epilogue" in [change.kind for change in convert(converted).changes]
        x, before = randn(3, 8), converted(randn(3, 8))
        of_class["slope"] = 3.0
        for model in (original, converted):
            if isinstance(model, Partial):
                model.skip.keywords["negative_slope"] = 3.0
        torch.testing.assert_close(converted(x), original(x))
        assert not torch.allclose(before, converted(x))
        of_class["slope"] = 1.0


def test_an_attribute_of_the_instance_hides_a_child() -> None:
    model: Any = Scaled()
    convert(model)
    model.__dict__["fc"] = torch.neg
    torch.testing.assert_close(model(randn(3, 8)), F.relu(-randn(3, 8)) * FACTOR)


def test_a_method_of_the_instance_counts() -> None:
    for part in ("activation", "module"):
        model: Any = pair(OfMethod) if part == "activation" else Scaled()
        convert(model)
        if part == "activation":
            model[1].act = torch.relu
            expected = model[2](torch.relu(model[0](randn(3, 8))))
        else:
            model.finish = torch.neg
            expected = -F.relu(model.fc(randn(3, 8)))
        torch.testing.assert_close(model(randn(3, 8)), expected)


def test_products_are_fused_while_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[str] = []
    product = Linear.product

    def spy(self: Any, x: Tensor, epilogue: str) -> Tensor:
        fused.append(epilogue)
        return product(self, x, epilogue)

    monkeypatch.setattr(Linear, "product", spy)
    for kind in (OfGlobal, OfMethod, Derived, OfDefault, OfNamed):
        model = pair(kind)
        convert(model)
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            fused.clear()
            each(randn(3, 8))
            assert len(fused) == 1, kind


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@pytest.mark.parametrize("owner", [nn.Module, nn.Linear, nn.ReLU])
def test_what_torch_calls_around_forwards_may_be_replaced(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = nn.Linear if owner is nn.Module else owner
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def doubled(self: Any, *given: Any) -> Any:
        y = theirs(self, *given)
        return 2 * y if isinstance(self, kind) else y

    original, gated = pair(nn.ReLU), Gated()
    for model in (original, gated) if kind is nn.Linear else (original,):
        converted = copy.deepcopy(model)
        convert(converted)
        x = randn(3, 8)
        for grad in (False, True):
            with torch.set_grad_enabled(grad), monkeypatch.context() as replacing:
                before = converted(x)
                replacing.setattr(owner, name, doubled)
                expected = model(x)
                assert not torch.allclose(before, expected)
                torch.testing.assert_close(converted(x), expected)


def test_layers_whose_forward_was_replaced_before_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: theirs(self, x) + 1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    expected = model(randn(3, 8))
    report = convert(model)
    assert not report.changes
    assert report.left[0].reason == "other code replaced the forward of Linear"
    assert torch.equal(model(randn(3, 8)), expected)


def test_an_epilogue_follows_a_replaced_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(8, 16, epilogue="relu")
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: -F.linear(x, self.weight, self.bias))
    expected = F.relu(-F.linear(randn(3, 8), layer.weight, layer.bias))
    torch.testing.assert_close(layer(randn(3, 8)), expected)


def test_a_librarys_layer_runs_its_own_forward_once_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Product(ProductLayer):
        def forward(self, x: Tensor) -> Any:
            return self._by_library(x) if self.replaced() else 2 * x

    layer = Product.swapped(Library)()
    assert torch.equal(layer(randn(3)), 2 * randn(3))
    monkeypatch.setattr(Library, "forward", lambda self, x: 5 * x)
    assert torch.equal(layer(randn(3)), 5 * randn(3))
    assert Product.swapped(Library) is not type(layer)
    assert not Product.swapped(Library).replaced()
    assert layer.replaced()


def test_a_kernelized_layer_runs_a_replaced_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = nn.Linear(8, 16)
    layer.forward = kernel_layers.Linear.forward.__get__(layer)
    torch.testing.assert_close(layer(randn(3, 8)), F.linear(randn(3, 8), layer.weight, layer.bias))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x + 1)
    assert torch.equal(layer(randn(3, 8)), randn(3, 8) + 1)


def test_a_kernelized_mlp_runs_a_replaced_method(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.silu = nn.SiLU()

        def act(self, x: Tensor) -> Tensor:
            return self.silu(x)  # type: ignore[no-any-return]

    mlp: Any = Named()
    expected = mlp(randn(3, 8))
    assert kernel_layers.is_gated_mlp(mlp)
    mlp.forward = kernel_layers.GatedMLP.forward.__get__(mlp)
    torch.testing.assert_close(mlp(randn(3, 8)), expected)
    hook = nn.modules.module.register_module_forward_hook(lambda module, x, y: y + 1)
    torch.testing.assert_close(mlp(randn(3, 8)), Named.forward(mlp, randn(3, 8)) + 1)
    hook.remove()
    with monkeypatch.context() as patch:
        patch.setattr(Named, "forward", lambda self, x: x + 1)
        assert torch.equal(mlp(randn(3, 8)), randn(3, 8) + 1)
    monkeypatch.setattr(Named, "act", relu)
    torch.testing.assert_close(mlp(randn(3, 8)), Named.forward(mlp, randn(3, 8)))


class Layer(nn.Module):
    """A layer of experts with the gate of gpt-oss, as far as it is looked at."""

    alpha, limit, scale = 1.702, 7.0, 1.0

    def gate(self, z: Tensor) -> Tensor:
        gate, up = z[..., ::2], z[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha) * self.scale

    def other(self, z: Tensor) -> Tensor:
        return z[..., ::2] * z[..., 1::2]


def test_a_gate_is_looked_at_again_once_it_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = Layer()
    found = activation.gate_epilogue(layer, Layer.gate)
    assert str(found).startswith("clamped_swiglu(1.702,7.0)")
    assert activation.gate_epilogue(layer, Layer.other) is None
    assert activation.gate_epilogue(layer, Layer.gate) == found
    for attribute in ("scale", "alpha", "limit"):
        before = getattr(layer, attribute)
        setattr(layer, attribute, 2.0)
        assert activation.gate_epilogue(layer, Layer.gate) != found
        setattr(layer, attribute, before)
        assert activation.gate_epilogue(layer, Layer.gate) == found
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    assert [activation.gate_epilogue(each, Layer.gate) for each in copies] == [found, found]
    monkeypatch.setattr(Layer.gate, "__code__", Layer.other.__code__)
    assert activation.gate_epilogue(layer, Layer.gate) is None


def test_copies_of_examined_state_refer_to_modules_and_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = types.ModuleType("settings_of_the_model")
    settings.SLOPE = 0.5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    names = (settings, "SLOPE", 0.5), (Layer, "alpha", 1.702)
    found = Reached((body(relu),), ((Layer, "gate", Layer.gate),), names)
    pickled = pickle.dumps(found)
    for each in (found, pickle.loads(pickled), copy.deepcopy(found)):
        assert each == found
        assert each.holds(Layer())
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, settings.__name__)  # as in a process that does not import it
        assert not pickle.loads(pickled).holds(Layer())
    with monkeypatch.context() as patch:
        patch.setattr(relu, "__code__", randn.__code__)
        assert not found.holds(Layer())
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert found.holds(Layer())  # a graph cannot read code, which the compiler guards
    monkeypatch.setattr(Layer, "alpha", 2.0)
    assert not pickle.loads(pickled).holds(Layer())


def test_a_method_that_other_code_put_in_a_class_is_not_the_classs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert classes.defined_by(nn.Linear.forward, nn.Linear)
    assert classes.defined_by(Layer.gate, Layer)
    monkeypatch.setattr(nn.Linear, "forward", relu)
    assert not classes.defined_by(nn.Linear.forward, nn.Linear)
    assert not classes.defined_by(torch.relu, nn.Linear)
