"""Tests what convert() fuses and reports at the edges of each pattern, and the passes after a
product."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tmm_core
from tmm_core import TmmWarning, api, settings
from tmm_core.epilogues import parse
from tmm_core.nn import SwiGLU, activation, convert
from tmm_core.nn.conversion_report import Change, LeftAlone, NotFused, Report, _folded
from tmm_core.nn.unreached import activations, out_of_reach, products

Tensor = torch.Tensor
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("blas_alone")


class Two(nn.Module):
    """Two layers of 8 columns; a test gives it a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.wide = nn.Linear(8, 16)
        self.act, self.other = nn.SiLU(), nn.SiLU()
        self.missing: Any = None
        self.scaled = Scaled()
        if type(self).forward is gate_of_one_column:
            self.one = nn.Linear(8, 1)


def module(forward: Any) -> nn.Module:
    kind = type("Model", (Two,), {"forward": forward})
    made: nn.Module = kind()
    return made


def both(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.up(x))) + self.other(self.wide(x)).sum()


def used_twice(self: Any, x: Tensor) -> Tensor:
    h = self.up(x)
    return self.down(self.act(h)) + h


def halves(self: Any, x: Tensor) -> Tensor:
    gate, up = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(gate) * up)


def halves_by_function(self: Any, x: Tensor) -> Tensor:
    gate, up = torch.chunk(self.wide(x), 2, -1)
    return self.down(up * F.silu(gate))


def second_half(self: Any, x: Tensor) -> Tensor:
    up, gate = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(gate) * up)


def halves_of_rows(self: Any, x: Tensor) -> Tensor:
    gate, up = torch.cat([x, x[:1]]).chunk(2, dim=0)
    return self.down(F.silu(gate) * up)


def three_parts(self: Any, x: Tensor) -> Tensor:
    parts = self.wide(x).chunk(4, dim=-1)
    return F.silu(parts[0]) * parts[1]


def sorted_by_column(self: Any, x: Tensor) -> Tensor:
    values, order = self.up(x).sort(dim=-1)
    return self.down(F.silu(values) * order)


def half_used_again(self: Any, x: Tensor) -> Tensor:
    gate, up = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(gate) * up) + up


def gate_used_again(self: Any, x: Tensor) -> Tensor:
    gate, up = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(gate) * up) + gate


def gate_twice(self: Any, x: Tensor) -> Tensor:
    parts = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(parts[0]) * parts[0])


def parts_used_again(self: Any, x: Tensor) -> Tensor:
    parts = gate, up = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(gate) * up) + parts[1]


def unpacked_twice(self: Any, x: Tensor) -> Tensor:
    parts = gate, up = self.wide(x).chunk(2, dim=-1)
    first, second = parts
    return self.down(F.silu(gate) * up) + first * second


def added(self: Any, x: Tensor) -> Tensor:
    gate, up = self.wide(x).chunk(2, dim=-1)
    return self.down(F.silu(gate) + up)


def tanh_gate(self: Any, x: Tensor) -> Tensor:
    gate, up = self.wide(x).chunk(2, dim=-1)
    return self.down(torch.tanh(gate) * up)


def whole_used_again(self: Any, x: Tensor) -> Tensor:
    both = self.wide(x)
    gate, up = both.chunk(2, dim=-1)
    return self.down(F.silu(gate) * up) + both.sum()


def modes_differ(self: Any, x: Tensor) -> Tensor:
    h = self.up(x)
    return self.down(self.act(h)) if self.training else self.down(h)


def another_value(self: Any, x: Tensor) -> Tensor:
    h = self.act(self.up(x))
    return self.down(h * 2) if self.training else self.down(h)


def gate_and_up(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.act(self.up(x)) * self.down(x))


def gate_by_method(self: Any, x: Tensor) -> Tensor:
    return self.wide(self.act(self.up(x)).mul(self.down(x)))


def gate_by_torch(self: Any, x: Tensor) -> Tensor:
    return self.wide(torch.mul(self.down(x), self.act(self.up(x))))


def gate_of_one_column(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.up(x)) * self.one(x))


def without_a_child(self: Any, x: Tensor) -> Tensor:
    h = self.act(self.up(x))
    if self.missing is not None:
        h = self.missing(h)
    return self.down(h)


class Scaled(nn.Module):
    """An activation with an optional scale."""

    def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
        return F.relu(x) * by


def with_another_argument(self: Any, x: Tensor) -> Tensor:
    return self.down(self.scaled(self.up(x), 2.0))


def without_another_argument(self: Any, x: Tensor) -> Tensor:
    return self.down(self.scaled(self.up(x)))


def closing_over(model: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.act(self.up(x)) + model

    return forward


def gate_of_another(self: Any, x: Tensor) -> Tensor:
    return self.wide(self.act(self.up(x)) * self.down(x + 1))


def gate_of_itself(self: Any, x: Tensor) -> Tensor:
    return self.wide(self.act(self.up(x)) * self.up(x))


@pytest.mark.parametrize(
    ("forward", "kinds", "reason"),
    [
        (gate_by_method, ["gated", "linear", "linear", "linear"], None),
        (gate_by_torch, ["gated", "linear", "linear", "linear"], None),
        (gate_of_one_column, ["epilogue", "linear", "linear", "linear"], "they differ in shape"),
        (with_another_argument, ["linear"] * 3, None),
        (without_another_argument, ["epilogue", "linear", "linear"], None),
        (without_a_child, ["epilogue", "linear", "linear"], None),
        (closing_over(1.0), ["linear"] * 3, "its forward is decorated or closes over variables"),
        (another_value, ["epilogue", "linear", "linear"], None),
        (gate_and_up, ["epilogue", "linear", "linear"], None),
        (gate_of_another, ["epilogue", "linear", "linear"], None),
        (gate_of_itself, ["epilogue", "linear", "linear"], None),
        (both, ["epilogue", "epilogue", "linear"], None),
        (used_twice, ["linear"] * 3, "its result is also used without the activation"),
        (halves, ["epilogue", "linear", "linear"], None),
        (halves_by_function, ["epilogue", "linear", "linear"], None),
        (second_half, ["linear"] * 3, "its gate is the second half of the product"),
        (halves_of_rows, ["linear"] * 3, None),
        (three_parts, ["linear"] * 3, None),
        (sorted_by_column, ["linear"] * 3, None),
        (half_used_again, ["linear"] * 3, "its halves are used for more than their product"),
        (gate_used_again, ["linear"] * 3, "its halves are used for more than their product"),
        (gate_twice, ["linear"] * 3, "its halves are also used otherwise"),
        (parts_used_again, ["linear"] * 3, "its halves are also used otherwise"),
        (unpacked_twice, ["linear"] * 3, "its halves are also used otherwise"),
        (added, ["linear"] * 3, "its halves are used for more than their product"),
        (tanh_gate, ["linear"] * 3, "no gated epilogue computes tanh"),
        (whole_used_again, ["linear"] * 3, "its halves are also used otherwise"),
        (modes_differ, ["linear"] * 3, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_pattern_at_its_edge(forward: Any, kinds: list[str], reason: str | None) -> None:
    """The converted model computes the same values, whatever was fused."""
    model = module(forward)
    expected = [model.train(mode)(X) for mode in (True, False)]
    report = convert(model)
    assert sorted(change.kind for change in report.changes) == sorted(kinds)
    if reason is not None:
        assert {each.reason.partition(" (")[0] for each in report.not_fused} == {reason}
    for mode, right in zip((True, False), expected, strict=True):
        torch.testing.assert_close(model.train(mode)(X), right, rtol=1e-5, atol=1e-5)
    report.undo()
    torch.testing.assert_close(model(X), expected[1])
    assert {type(each).__module__ for each in model.children()} <= {
        "torch.nn.modules.linear", "torch.nn.modules.activation", __name__,
    }  # fmt: skip


class Named(nn.Module):
    """Children that have the names of a tensor's methods."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.exp, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.sigmoid = nn.SiLU()


def method_named_as_a_layer(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.up(x).exp())


def method_named_as_an_activation(self: Any, x: Tensor) -> Tensor:
    return self.up(x).sigmoid()  # type: ignore[no-any-return]


def method_as_a_gate(self: Any, x: Tensor) -> Tensor:
    return self.down(self.up(x).sigmoid() * self.exp(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "fused"),
    [
        (method_named_as_a_layer, []),
        (method_named_as_an_activation, ["linear(epilogue='sigmoid')"]),
        (method_as_a_gate, ["linear(epilogue='sigmoid')"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_tensor_method_is_not_taken_for_a_child_of_the_same_name(
    forward: Any, fused: list[str]
) -> None:
    model = type("Model", (Named,), {"forward": forward})()
    right = model(X)
    report = convert(model)
    assert [change.after for change in report.changes if change.kind == "epilogue"] == fused
    torch.testing.assert_close(model(X), right, rtol=1e-5, atol=1e-5)


SCALES = [2.0]


class OfATable(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x)) * SCALES[0]


class OfNoTable(OfATable):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x)) * 2.0


class Inherits(OfATable):
    pass


class Calls(OfATable):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class CallsTwice(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Plain(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


class CallsNoTable(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


@pytest.mark.parametrize(
    ("kind", "proven"),
    [
        (OfATable, False), (Inherits, False), (Calls, False), (CallsTwice, False),
        (OfNoTable, True), (CallsNoTable, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_proof_reads_the_forwards_that_are_called(kind: Any, proven: bool) -> None:
    model = kind()
    right = model(X)
    report = convert(model)
    reason = "its forward uses SCALES, which its trace does not show"
    assert {each.reason for each in report.not_fused} == (set() if proven else {reason})
    assert ("epilogue" in [change.kind for change in report.changes]) is proven
    torch.testing.assert_close(model(X), right, rtol=1e-5, atol=1e-5)


class Called:
    """A forward that is a callable object, not a function."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Many(Two):
    """Has children that a forward may read without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList([nn.SiLU()])
        self.table = [1.0]

    def changed(self, x: Tensor) -> Tensor:
        return x

    def activated(self, x: Tensor) -> Tensor:
        return self.act(x)  # type: ignore[no-any-return]

    @property
    def first_scale(self) -> float:
        return SCALES[0]

    def is_wide(self, x: Tensor) -> bool:
        return x.dtype is not torch.half


def any_number(self: Any, *x: Tensor) -> Tensor:
    return self.act(self.up(x[0]))


def two_tensors(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.act(self.up(x)) + y


def looped(self: Any, x: Tensor) -> Tensor:
    x = self.up(x)
    for act in self.acts:
        x = act(x)
    return x


def indexed(self: Any, x: Tensor) -> Tensor:
    return self.acts[0](self.up(x))


def counted(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) * len(self.acts)


def named(self: Any, x: Tensor) -> Tensor:
    h = self.act(self.up(x))
    return h if self.other is not None else -h


def in_mode_of_a_child(self: Any, x: Tensor) -> Tensor:
    h = self.up(x)
    return self.act(h) if self.up.training else h


def of_base(self: Any, x: Tensor) -> Tensor:
    self.named_children()
    return self.act(self.up(x))


def of_method(self: Any, x: Tensor) -> Tensor:
    return self.act(self.changed(self.up(x)))


def of_list(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) * self.table[0]


def assigning(self: Any, x: Tensor) -> Tensor:
    self.last = x
    return self.act(self.up(x))


def by_value(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if x.sum() > 0 else x


def by_dtype(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if x.dtype is not torch.half else x


def by_dtype_and_a_method(self: Any, x: Tensor) -> Tensor:
    return self.activated(self.up(x)) if x.dtype is not torch.half else x


def by_a_method(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if self.is_wide(x) else x


def by_handler(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.act(self.up(x))


def by_isinstance(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if isinstance(x, Tensor) else x


def by_a_function(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if chosen(x) else x


def by_a_function_far_inside(self: Any, x: Tensor) -> Tensor:
    def outside() -> bool:
        def inside() -> bool:
            return chosen(x)

        return inside()

    return self.act(self.up(x)) if outside() else x


def chosen(x: Tensor) -> bool:
    return WIDE


WIDE = True


def other_layer_in_training(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if self.training else self.act(self.down(x))


def activated_in_evaluation(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.up(x)
    return y if self.training else self.act(y) + y


def by_a_global(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) * TWICE


TWICE = 2.0


def relu(x: Tensor) -> Tensor:
    return F.relu(x) * SCALES[0]


gelu = nn.GELU()


def by_a_function_named_as_torchs(self: Any, x: Tensor) -> Tensor:
    return relu(self.act(self.up(x)))


def by_a_module_named_as_a_function(self: Any, x: Tensor) -> Tensor:
    return gelu(self.act(self.up(x)))  # type: ignore[no-any-return]


def adding_in_place(self: Any, x: Tensor) -> Tensor:
    y = kept = self.other(x)
    y += 1
    return self.act(self.up(x)) + kept


def scaling_an_attribute_in_place(self: Any, x: Tensor) -> Tensor:
    transposed = x.T
    transposed *= 2
    return self.act(self.up(x))


def assigning_data(self: Any, x: Tensor) -> Tensor:
    x.data = x.data * 2
    return self.act(self.up(x))


def assigning_a_global(self: Any, x: Tensor) -> Tensor:
    global TWICE
    TWICE = 2.0
    return self.act(self.up(x))


def by_the_name_of_a_type(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if type(x).__name__ == "Tensor" else x


def by_the_name_of_a_class(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if x.__class__.__name__ == "Tensor" else x


def by_a_text(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if f"{x.dtype}" == "torch.float32" else x


def by_an_old_text(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) if "%s" % x.dtype == "torch.float32" else x  # noqa: UP031


def by_a_table(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) * {torch.float32: 2.0}[x.dtype]


def by_identity(self: Any, x: Tensor) -> Tensor:
    h, y = self.act(self.up(x)), x.contiguous()
    return h if y is x else -h


def of_one_random_number(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) + torch.randn(x.shape) * torch.randn(1).sum().item()


def by_a_default_list(self: Any, x: Tensor, scales: Any = SCALES) -> Tensor:
    return self.act(self.up(x)) * scales[0]


def storing_in_a_default(self: Any, x: Tensor, *, seen: Any = {}) -> Tensor:  # noqa: B006
    seen["last"] = x
    return self.act(self.up(x))


def by_a_property(self: Any, x: Tensor) -> Tensor:
    return self.act(self.up(x)) * self.first_scale


#: Its module cannot be found: other code may change the global without being noticed.
of_no_module = types.FunctionType(by_a_global.__code__, {"TWICE": 2.0}, "of_no_module")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (of_no_module, "its forward uses TWICE of a module that cannot be found"),
        (any_number, "its forward does not take one tensor"),
        (two_tensors, "its forward takes more than one argument"),
        (Called(), "its forward is not a plain function"),
        (looped, "its forward calls the children of acts"),
        (indexed, "its forward calls the children of acts"),
        (counted, "its forward calls the children of acts"),
        (named, "its forward uses other without calling it"),
        (in_mode_of_a_child, "its forward reads up.training"),
        (of_base, "its forward calls nn.Module.named_children"),
        (of_method, "its method changed was replaced on the instance"),
        (of_list, "its forward reads table, which may change unnoticed"),
        (assigning, "its forward assigns attributes"),
        (by_value, "its forward depends on the values or the shape of its input"),
        (by_dtype, "its forward may depend on its input's dtype"),
        (by_dtype_and_a_method, "its forward may depend on its input's dtype"),
        (by_a_method, "its forward may depend on its input's dtype"),
        (by_handler, "its forward handles exceptions or enters contexts"),
        (by_isinstance, "its forward uses isinstance, which its trace does not show"),
        (by_a_function, "its forward uses chosen, which its trace does not show"),
        (by_a_function_far_inside, "its forward uses chosen, which its trace does not show"),
        (by_a_function_named_as_torchs, "its forward uses relu, which its trace does not show"),
        (by_a_module_named_as_a_function, "its forward uses gelu, which its trace does not show"),
        (adding_in_place, "its forward changes a tensor in place"),
        (scaling_an_attribute_in_place, "its forward changes a tensor in place"),
        (assigning_data, "its forward assigns attributes or globals"),
        (assigning_a_global, "its forward assigns attributes or globals"),
        (by_the_name_of_a_type, "its forward uses type, which its trace does not show"),
        (by_the_name_of_a_class, "its forward reads __class__, which may change unnoticed"),
        (by_a_text, "its forward makes a text of a tensor"),
        (by_an_old_text, "its forward makes a text of a tensor"),
        (by_a_table, "its forward looks a tensor up in a table"),
        (by_identity, "its forward asks whether two values are one object"),
        (of_one_random_number, "its forward computes without its input"),
        (by_a_default_list, "its forward reads a default value, which may change unnoticed"),
        (storing_in_a_default, "its forward reads a default value, which may change unnoticed"),
        (by_a_property, "its forward uses SCALES, which its trace does not show"),
        (other_layer_in_training, "it depends on the mode"),
        (activated_in_evaluation, "its result is also used without the activation"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_why_a_forward_is_not_fused(forward: Any, reason: str) -> None:
    model: Any = type("Model", (Many,), {"forward": forward})()
    model.__dict__["changed"] = F.relu
    report = convert(model)
    assert {each.reason.partition(" (")[0] for each in report.not_fused} == {reason}
    assert [change.kind for change in report.changes] == ["linear"] * 3


class OfThree(Two):
    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        return self.act(self.up(x)).reshape(batch * rows, -1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (1, 2, 5, 8)])
def test_a_fused_forward_unpacks_as_many_values_as_its_own(shape: tuple[int, ...]) -> None:
    model, x = OfThree(), torch.randn(shape)
    converted = copy.deepcopy(model)
    assert "epilogue" in [change.kind for change in convert(converted).changes]
    results = []
    for each in (model, converted):
        try:
            results.append(each(x))
        except ValueError as error:
            results.append(str(error))
    expected, found = results
    assert type(found) is type(expected)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


class TwiceOnCall(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2  # type: ignore[no-any-return]


class PlusOneOnCall(nn.SiLU):
    def __call__(self, *given: Any) -> Any:
        return super().__call__(*given) + 1


class WithinTorch(nn.ReLU):
    def _call_impl(self, *given: Any) -> Any:
        return super()._call_impl(*given) * 3  # type: ignore[no-untyped-call]

    __call__ = _call_impl


class WithinTracing(nn.GELU):
    def _slow_forward(self, *given: Any) -> Any:
        return super()._slow_forward(*given) * 3  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [TwiceOnCall, PlusOneOnCall, WithinTorch, WithinTracing])
def test_a_class_whose_call_does_more_than_its_forward_is_not_an_activation(kind: Any) -> None:
    assert activation.recognise(kind()) is None
    for model in (nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8)), module(straight)):
        if not isinstance(model, nn.Sequential):
            model.act = kind()
        expected = model(X)
        assert {change.kind for change in convert(model).changes} == {"linear"}
        torch.testing.assert_close(model(X), expected)


def straight(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.up(x)))


class ReadsAttributes(Two):
    flipped = False
    forward = straight

    def __getattr__(self, name: str) -> Any:
        return nn.Tanh() if name == "act" and self.flipped else super().__getattr__(name)


class ReadsEveryAttribute(Two):
    flipped = False
    forward = straight

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        return nn.Tanh() if name == "act" and get("flipped") else get(name)


class HasProperty(Two):
    flipped = False
    forward = straight

    @property
    def down(self) -> Any:
        return self._modules["wide" if self.flipped else "down"]

    @down.setter
    def down(self, layer: nn.Module) -> None:
        raise AssertionError("torch registers a module before it looks for a property")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ReadsAttributes, "its class has its own way to read attributes"),
        (ReadsEveryAttribute, "its class has its own way to read attributes"),
        (HasProperty, "its class has an attribute down, which hides the child"),
    ],
)
def test_a_class_that_computes_its_attributes_is_not_fused(kind: Any, reason: str) -> None:
    model = kind()
    report = convert(model)
    assert {each.reason for each in report.not_fused} == {reason}
    torch.testing.assert_close(model(X), straight(model, X))
    model.flipped = True
    torch.testing.assert_close(model(X), straight(model, X))


def sum_of_gate_and_up(self: Any, x: Tensor) -> Tensor:
    return self.wide(self.act(self.up(x)) + self.down(x))


def product_of_three(self: Any, x: Tensor) -> Tensor:
    return self.scaled(self.act(self.up(x)) * self.down(x), 2.0)


def product_unused(self: Any, x: Tensor) -> Tensor:
    self.act(self.up(x)) * self.down(x)
    return self.wide(1.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [sum_of_gate_and_up, product_of_three, product_unused])
def test_forwards_that_are_not_gated_mlps(forward: Any) -> None:
    kinds = sorted(change.kind for change in convert(module(forward)).changes)
    assert kinds == ["epilogue", "linear", "linear"]


def _of_another_class(mlp: Mlp) -> None:
    mlp.gate = type("Own", (nn.Linear,), {})(8, 16)


def _without_a_bias(mlp: Mlp) -> None:
    mlp.gate.register_parameter("bias", None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_of_another_class, "one of them is left alone"),
        (_without_a_bias, "some of them have no bias"),
    ],
)
def test_why_gate_and_up_are_two_products(change: Any, reason: str) -> None:
    model = Mlp(nn.SiLU(), bias=True)
    change(model)
    found = [each.reason for each in convert(model).not_fused]
    assert reason in found


def test_a_weight_that_is_used_twice_is_not_rounded() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[2].weight = model[0].weight
    report = convert(model, weights="int8")
    reason = "its weight is used elsewhere too, and not rounded to int8"
    assert [(each.path, each.reason) for each in report.left] == [("0", reason), ("2", reason)]
    assert report.rounded == ["1.weight"]
    assert "1 weights rounded" in str(report)
    report.undo()
    assert "rounded" not in str(report).splitlines()[0]


def test_every_activation_of_a_forward_is_fused() -> None:
    report = convert(module(both))
    fused = {change.path for change in report.changes if change.kind == "epilogue"}
    assert fused == {"up", "wide"}


class Mlp(nn.Module):
    def __init__(self, act: Any, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=bias), nn.Linear(8, 16, bias=bias)
        self.down, self.act = nn.Linear(16, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(
    ("act", "gated"),
    [(nn.SiLU(), True), (nn.GELU(), True), (nn.GELU("tanh"), True), (nn.Tanh(), False)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp_is_one_product_where_an_epilogue_computes_its_gate(
    act: nn.Module, gated: bool, bias: bool
) -> None:
    model = Mlp(act, bias)
    right = model(X)
    report = convert(model)
    assert [change.kind for change in report.changes].count("gated") == int(gated)
    torch.testing.assert_close(model(X), right, rtol=1e-5, atol=1e-5)


# -- the report ----------------------------------------------------------------------------


def test_a_report_in_a_text() -> None:
    model = nn.Sequential()
    report = Report(model)
    assert not report
    assert repr(report) == "<Report of Sequential: 0 changes, 0 left, 0 not fused>"
    assert str(report) == (
        "Sequential: 0 gated MLPs fused, 0 activations fused, 0 other linears swapped, 0 left alone"
    )
    report.changes += [
        Change("linear", "h.0.a", "Linear", "tmm"), Change("linear", "h.1.a", "Linear", "tmm"),
        Change("epilogue", "b", "SiLU", "tmm"), Change("gated", "c", "MLP", "tmm"),
        Change("joint", "d", "q", "tmm"), Change("experts", "e", "E", "tmm"),
    ]  # fmt: skip
    report.left.append(LeftAlone("f", "Conv", "because"))
    report.not_fused.append(NotFused("g", "silu", "why"))
    report.notes.append("a note.")
    report.rounded.append("a.weight")
    assert report
    assert repr(report) == "<Report of Sequential: 6 changes, 1 left, 1 not fused>"
    assert str(report).splitlines() == [
        "Sequential: 1 gated MLPs fused, 1 activations fused, 2 other linears swapped, 1 left "
        "alone, 1 weights rounded, projections of 1 attention modules joined, "
        "1 mixtures of experts grouped",
        "  h.*.a ×2  Linear → tmm",
        "  b  SiLU → tmm",
        "  c  MLP → tmm",
        "  d  q → tmm",
        "  e  E → tmm",
        "  g  silu not fused: why",
        "  f  Conv left alone: because",
        "  a note.",
    ]


@pytest.mark.parametrize(
    ("paths", "lines"),
    [
        (["h.0.a", "h.1.a"], ["  h.*.a ×2  t"]), (["0.a", "1.a"], ["  *.a ×2  t"]),
        (["h.0", "h.1"], ["  h.0  t", "  h.1  t"]), (["h1.a", "h2.a"], ["  h1.a  t", "  h2.a  t"]),
        (["a.0.b.1.c", "a.2.b.1.c"], ["  a.*.b.*.c ×2  t"]),
    ],
)  # fmt: skip
def test_equal_layers_are_one_line(paths: list[str], lines: list[str]) -> None:
    assert _folded([(path, "t") for path in paths]) == lines


def test_a_second_undo_keeps_later_changes() -> None:
    model = nn.Sequential(SwiGLU(8, 16))
    report = convert(model, static_weights=True)
    assert [layer.static_weights for layer in (model[0], model[0].down_proj)] == [True, True]
    report.undo()
    assert [layer.static_weights for layer in (model[0], model[0].down_proj)] == [False, False]
    model[0].static_weights = True
    report.undo()
    assert model[0].static_weights


def test_converted_modules_are_not_reported_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), Mlp(nn.SiLU()))
    first = convert(model)
    assert len(first.notes) == 1
    second = convert(model)
    assert not second
    assert (second.left, second.not_fused, second.notes) == ([], [], [])


def test_a_fused_function_is_named_by_its_epilogue_and_a_module_by_its_class() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.gelu(self.up(x)) + self.act(self.down(x))

    report = convert(module(forward))
    assert {change.path: change.before for change in report.changes} == {
        "up": "Linear, gelu()", "down": "Linear, SiLU", "wide": "Linear",
    }  # fmt: skip


class Reduced(nn.Module):
    """A model that defines ``__reduce__``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(width, width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))

    def __reduce__(self) -> Any:
        return Reduced, (self.layer.in_features,)


def test_a_models_own_way_into_a_pickle_is_kept() -> None:
    model = Reduced(6)
    report = convert(model)
    assert type(model) is not Reduced
    assert [change.kind for change in report.changes] == ["epilogue"]
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(made) is Reduced
        assert made.layer.in_features == 6


def test_an_activation_that_follows_no_layer_is_not_reported() -> None:
    model = nn.Sequential(nn.ELU(), nn.Sequential(nn.SiLU()), nn.Linear(8, 8))
    report = convert(model)
    assert [change.kind for change in report.changes] == ["linear"]
    assert report.not_fused == []


def test_parameters_named_as_those_of_experts_are_not_rounded() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.ParameterDict({"down_proj": torch.randn(2, 32, 32)}))
    report = convert(model, weights="int8")
    assert report.rounded == ["0.weight"]
    assert report.left == []
    assert type(model[1].down_proj) is nn.Parameter


def test_weights_that_are_rounded_already_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    report = convert(model, weights="int8")
    assert report.rounded == ["0.weight"]
    weight = model[0].weight
    for format in ("int8", "fp8"):
        again = convert(model, weights=format)
        assert again.rounded == []
        assert again.left == []
        assert model[0].weight is weight
    report.undo()
    assert model[0].weight.dtype is torch.float32
    assert model[1].weight.dtype is torch.int8


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_every_layer_computes_under_static_weights_where_it_is_set(
    static: bool, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is called alone and with a fused epilogue. FSDP2 shards none or each of them, and
    of a gated pair only the second."""
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8").FP8Linear(8, 8)
    fp8.weight.data = torch.ones(8, 8).to(torch.float8_e4m3fn)
    fp8.weight_scale_inv.data = torch.ones(1, 1)
    model = nn.Sequential(
        *(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), conv(8, 8), nn.SiLU(), conv(8, 8)),
        *(fp8, nn.SiLU(), copy.deepcopy(fp8), SwiGLU(8, 8)),
    ).requires_grad_(False)
    report = convert(model, static_weights=static)
    assert [change.kind for change in report.changes].count("epilogue") == 3
    for name, layer in model.named_modules() if sharded else ():
        if not name.endswith("gate_proj"):
            layer.register_state_dict_pre_hook(lambda *_: None)
    found: list[Any] = []
    for name in ("linear", "matmul"):
        product = getattr(api, name)

        def seen(*given: Any, product: Any = product, **more: Any) -> Any:
            found.append((more.get("epilogue", ""), settings.current().static_weights))
            return product(*given, **more)

        monkeypatch.setattr(api, name, seen)
    model(X)
    assert found == [
        (epilogue, static and not sharded)
        for epilogue in ("silu", "", "silu", "", "silu", "", "swiglu", "")
    ]
    assert not settings.current().static_weights


class Unlike(torch.Tensor):
    """A tensor of another library, which notes the functions that it overrides."""

    called: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), more: Any = None
    ) -> Any:
        cls.called.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, given, more or {})


def test_another_librarys_weight_is_multiplied_by_conv1ds_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv(8, 8)).requires_grad_(False)
    convert(model)
    model[0].weight = nn.Parameter(model[0].weight.data.as_subclass(Unlike), False)
    monkeypatch.setattr(Unlike, "called", [])
    y = model(X)
    assert "addmm" in Unlike.called
    weight, bias = (t.as_subclass(torch.Tensor) for t in (model[0].weight, model[0].bias))
    torch.testing.assert_close(y.as_subclass(torch.Tensor), X @ weight + bias)


def test_undo_keeps_later_changes_by_other_code() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    report = convert(model)

    class Mine(nn.Linear):
        pass

    model[0].__class__ = Mine
    with pytest.warns(TmmWarning, match=r"^0 is now a Mine, not convert\(\)'s; left as it is"):
        report.undo()
    assert (type(model[0]), type(model[1])) == (Mine, nn.Linear)
    assert not report
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.undo()


# -- forwards that convert() cannot replace -----------------------------------------------------


def by_operator(self: Any, x: Tensor) -> Tensor:
    return x @ self.up.weight


def in_place(self: Any, x: Tensor) -> Tensor:
    x @= self.up.weight
    return x


def by_function(self: Any, x: Tensor) -> Tensor:
    return torch.matmul(x, x.T) + F.linear(x, self.up.weight)


def _helper(x: Tensor) -> Tensor:
    return torch.einsum("ij,kj->ik", x, x)


def by_helper(self: Any, x: Tensor) -> Tensor:
    return _helper(x)


def also_by_helper(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("ij,jk->ik", _helper(x), x)


def _fourth(x: Tensor) -> Tensor:
    return x.bmm(x)


def _third(x: Tensor) -> Tensor:
    return _fourth(x.mv(x))


def _second(x: Tensor) -> Tensor:
    return _third(x)


def _first(x: Tensor) -> Tensor:
    return _second(x)


def by_the_third(self: Any, x: Tensor) -> Tensor:
    return _first(x)


def by_lambda(self: Any, x: Tensor) -> Tensor:
    return (lambda y: y.mm(y.T))(x)


def by_method(self: Any, x: Tensor) -> Tensor:
    return self.score(x)


def by_attribute(self: Any, x: Tensor) -> Tensor:
    return self.mv(x, x)


def own_attribute(self: Any, x: Tensor) -> Tensor:
    return self.linear(x)


def own_function(self: Any, x: Tensor) -> Tensor:
    return self.mm(x)  # type: ignore[no-any-return]


def _again(x: Tensor) -> Tensor:
    return _again(x.bmm(x))


def by_a_tensors_method(self: Any, x: Tensor) -> Tensor:
    return x.double()  # also the name of a method of modules


def by_recursion(self: Any, x: Tensor) -> Tensor:
    return _again(x)


def by_torchs_code(self: Any, x: Tensor) -> Tensor:
    return linalg_calls(x)  # type: ignore[no-any-return]


def linalg_calls(x: Tensor) -> Any:
    return x.matmul(x)


linalg_calls.__module__ = "elsewhere.code"


def none(self: Any, x: Tensor) -> Tensor:
    return F.silu(self.up(x)) + F.gelu(x)


def wrapped(self: Any, x: Tensor) -> Tensor:
    return torch.no_grad()(none)(self, x)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (by_operator, "@"), (in_place, "@"), (by_function, "matmul, linear"),
        (by_helper, "einsum in _helper()"), (also_by_helper, "einsum"),
        (by_the_third, "mv in _third()"),
        (by_lambda, "mm"), (by_method, "bmm in score()"),
        (own_attribute, None), (own_function, None), (none, None), (by_attribute, "mv"),
        (by_a_tensors_method, None), (by_recursion, "bmm in _again()"), (by_torchs_code, None),
        (torch.no_grad()(by_operator), "@ in by_operator()"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_products_in_the_code_of_a_forward(forward: Any, found: str | None) -> None:
    model = module(forward)
    type(model).score = lambda self, x: x.bmm(x)  # type: ignore[assignment]
    type(model).score.__name__ = "score"
    type(model).double = lambda self: self.bmm(self)  # type: ignore[assignment,method-assign]
    if forward is own_attribute:
        model.linear = nn.Linear(8, 8)
    if forward is own_function:
        model.mm = torch.abs
    type(model).mv = torch.mv  # type: ignore[assignment]
    if found is None:
        assert products(model) is None
        return
    parts = [p if " in " in p else f"{p} in {forward.__name__}()" for p in found.split(", ")]
    assert products(model) == f"its code multiplies tensors itself ({', '.join(parts)})"


def multiplying(self: Any, x: Tensor) -> Tensor:
    return x.product(x)  # type: ignore[operator]


def test_every_product_of_torch_is_found() -> None:
    for name in (
        "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "bilinear",
        "einsum", "tensordot", "multi_dot", "scaled_dot_product_attention", "grouped_mm",
        "_grouped_mm", "scaled_mm", "_scaled_mm",
    ):  # fmt: skip
        code = multiplying.__code__.replace(co_names=(name,))
        model = module(types.FunctionType(code, {}, "forward"))
        assert products(model) == f"its code multiplies tensors itself ({name})"


def test_activations_in_the_code_of_a_forward() -> None:
    assert activations(module(none)) == ["gelu", "silu"]
    assert activations(module(by_operator)) == []


@pytest.mark.parametrize(
    ("made", "reached"),
    [
        (nn.LSTM(4, 4), False), (nn.GRU(4, 4), False), (nn.LSTMCell(4, 4), False),
        (nn.Bilinear(4, 4, 4), False), (nn.MultiheadAttention(4, 1), False),
        (nn.TransformerEncoderLayer(4, 1, 4), False), (nn.Linear(4, 4), True),
        (nn.Sequential(), True),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_modules_of_torch_that_multiply_themselves(made: nn.Module, reached: bool) -> None:
    assert (out_of_reach(made) is None) is reached
    assert products(made) is None  # torch's own code computes it


def test_a_users_own_forward_is_called() -> None:
    class Attention(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Lstm(nn.LSTM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert out_of_reach(Attention(4, 1)) is None
    assert out_of_reach(Lstm(4, 4)) is not None


# -- the passes after a product -------------------------------------------------------------------


TEXTS = [
    "softcap(1.2345678)", "leaky_relu(0.12345678)", "scale(1.0000049)", "swiglu", "tanh+scale(3)",
    "softcap(0.98765432)+tanh",
]  # fmt: skip


@pytest.mark.parametrize("width", [2, 256, 514])
@pytest.mark.parametrize("text", TEXTS)
def test_the_passes_compute_an_epilogue_and_its_derivative(text: str, width: int) -> None:
    """Parameters keep all their digits. Widths are whole tiles, or one column more or less."""
    pytest.importorskip("triton")
    from tmm_core.triton.pointwise import Pointwise

    epilogue = parse(text)
    passes = Pointwise(epilogue, width, torch.float32, torch.device("cpu"))
    for m in (0, 1, 9):
        z = torch.randn(m, width)
        wide = z.double().requires_grad_()
        y = epilogue.apply(wide)
        torch.testing.assert_close(passes.forward(z).double(), y, rtol=2e-6, atol=2e-6)
        grad = torch.randn(y.shape)
        if not all(s.derivative or s.output_vjp for s in epilogue.stages or (epilogue,)):
            continue
        (right,) = torch.autograd.grad(y, wide, grad.double())
        found = passes.backward(grad, z)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_any_strides_promises_only_its_own_alignment() -> None:
    """A kernel may load 16 elements at once only if strides and addresses keep them aligned."""
    pytest.importorskip("triton")
    from tmm_core.triton.pointwise import Pointwise

    passes = Pointwise(parse("silu"), 32, torch.float32, torch.device("cpu"))
    passes._backward.clear()
    z = torch.randn(4, 32)
    right = parse("silu")
    memory = torch.randn(4 * 64 + 1)

    def strided(row: int, column: int, offset: int) -> Tensor:
        return memory.as_strided((4, 32), (row, column), offset)

    for grad, promised in (
        (strided(32, 1, 0), (True, True)), (strided(48, 1, 0), (True, True)),
        (strided(40, 1, 0), (True, False)), (strided(33, 1, 0), (True, False)),
        (strided(32, 1, 1), (True, False)), (strided(0, 1, 0), (True, True)),
        (strided(1, 4, 0), (False, False)), (strided(16, 2, 0), (False, True)),
    ):  # fmt: skip
        passes._backward.clear()
        wide = z.double().requires_grad_()
        (expected,) = torch.autograd.grad(right.apply(wide), wide, grad.double())
        torch.testing.assert_close(
            passes.backward(grad, z).double(), expected, rtol=1e-5, atol=1e-5
        )
        assert set(passes._backward) == {(torch.float32, *promised)}
    three = memory[:128].view(2, 2, 32)
    found = passes.backward(three, z)
    torch.testing.assert_close(found, passes.backward(three.reshape(4, 32), z))


def test_functions_without_a_device_part_are_refused_by_name() -> None:
    pytest.importorskip("triton")
    from tmm_core import Epilogue, Port
    from tmm_core.triton.device_functions import device_function, port_function

    plain = Epilogue("mine", torch.relu)
    with pytest.raises(ValueError, match="epilogue 'mine' has no device function to fuse"):
        device_function(plain)
    with pytest.raises(ValueError, match="output 'o' has no device function to fuse"):
        port_function(Port("o", "tile", of=torch.abs))
    assert port_function(Port("o", "tile")) is not None
    with pytest.raises(ValueError, match="epilogue 'mine' has no device function to fuse"):
        device_function(parse("tanh").then(plain))


def test_a_converted_layer_multiplies_by_tmm() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    right = model(X)
    assert convert(model).changes[0].kind == "linear"
    with tmm_core.override(kernel="blas"):
        torch.testing.assert_close(model(X), right)


def test_an_activation_is_reported_by_its_module_or_its_function() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = nn.Linear(4, 4), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1 if x.sum() > 0 else x
            return F.gelu(self.up(self.act(self.up(x))))

    for model, act, own in ((Model(), "act", "the model"), (nn.Sequential(Model()), "0.act", "0")):
        found = convert(model).not_fused
        assert [(each.path, each.activation) for each in found] == [(act, "SiLU"), (own, "gelu()")]


class Attention(nn.Module):
    """Projects one input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leading = x.shape[:-1]
        shape = (*leading, -1, 4)
        q = self.q(x).view(shape)
        k = self.k(x).view(shape)
        v = self.v(x).view(shape)
        return self.o((q * k + v).flatten(-2))  # type: ignore[no-any-return]


class Activated(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leading = x.shape[:-1]
        shape = (*leading, -1, 4)
        q = self.q(x).view(shape)
        k = self.k(x).view(shape)
        v = self.v(x).view(shape)
        return torch.relu(self.o((q * k + v).flatten(-2)))


@pytest.mark.parametrize(("kind", "apart"), [(Activated, ["relu()"]), (Attention, [])])
def test_a_forward_whose_projections_are_joined_has_no_fused_activation(
    kind: type[nn.Module], apart: list[str]
) -> None:
    """It reads the shape of its input to split the heads, so it is not traced."""
    model, x = kind(), torch.randn(2, 4, 8)
    right = model(x)
    report = convert(model)
    assert [change.kind for change in report.changes if change.kind != "linear"] == ["joint"]
    assert [each.activation for each in report.not_fused] == apart
    torch.testing.assert_close(model(x), right)


def test_a_forward_that_wraps_itself_is_read_as_it_is() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) @ self.weight

    Wrapped.forward.__wrapped__ = Wrapped.forward  # type: ignore[attr-defined]
    report = convert(Wrapped())
    assert [change.path for change in report.changes] == ["a"]
    assert [item.path for item in report.left] == ["the model"]
