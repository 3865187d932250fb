"""Limits of layers: parameters that are, or are just not, one in memory; dtypes of experts."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tmm_core
from tmm_core import Quantized, settings
from tmm_core.nn import (
    Experts,
    Linear,
    SwiGLU,
    experts,
    gated_layers,
    projections,
    sharded,
    stored_weights,
)
from tmm_core.nn.gated_product import _Joint, gated_linear, joint_operands
from tmm_core.nn.joint_storage import (
    against_one_product,
    in_own_storage,
    move_together,
    stack,
    stackable,
    stacked,
)
from tmm_core.nn.together import only_multiply
from tmm_core.spec.device import interpreting

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# -- two parameters in one storage --------------------------------------------------------


def halves(rows: int = 4, columns: int = 6) -> tuple[Tensor, Tensor]:
    both = torch.randn(2 * rows, columns)
    return both[:rows], both[rows:]


def test_adjacent_weights_make_one_product() -> None:
    first, second = halves()
    both = stacked((first, second))
    assert both is not None
    assert both.data_ptr() == first.data_ptr()
    assert torch.equal(both, torch.cat((first, second)))
    vector = torch.randn(6)
    assert torch.equal(stacked((vector[:3], vector[3:])), vector)  # type: ignore[arg-type]


def test_weights_that_are_not_adjacent_make_two_products() -> None:
    first, second = halves()
    three = torch.randn(12, 6)
    storage = torch.randn(48)
    wrong: dict[str, tuple[Any, Any]] = {
        "the other way round": (second, first),
        "the other way round, with more behind": (three[4:8], three[:4]),
        "with rows between": (three[:4], three[8:]),
        "overlapping": (three[:4], three[2:6]),
        "the same": (first, first),
        "of other storages": (first, torch.randn(4, 6)),
        "of other shapes": (storage[:24].view(4, 6), storage[24:].view(6, 4)),
        "of other widths": (storage[:24].view(4, 6), storage[24:40].view(4, 4)),
        "transposed": (storage[:24].view(6, 4).T, storage[24:].view(6, 4).T),
        "the second transposed": (storage[:24].view(4, 6), storage[24:].view(6, 4).T),
        "of other dtypes": (first, second.view(torch.int32)),
    }
    assert {name for name, pair in wrong.items() if stacked(pair) is not None} == set()


@pytest.mark.parametrize("joint_codes", [False, True])
@pytest.mark.parametrize("joint_scales", [False, True])
def test_quantised_weights_are_one_if_codes_and_scales_are(
    joint_codes: bool, joint_scales: bool
) -> None:
    codes = torch.arange(64, dtype=torch.int8).view(8, 8)
    scale = torch.arange(8.0) + 1
    whole = Quantized(codes, scale)
    parts = [
        Quantized(
            codes[rows] if joint_codes else codes[rows].clone(),
            scale[rows] if joint_scales else scale[rows].clone(),
        )
        for rows in (slice(4), slice(4, 8))
    ]
    found = stacked(parts)
    assert (found is not None) is (joint_codes and joint_scales)
    if found is not None:
        assert torch.equal(found.dequantize(), whole.dequantize())  # type: ignore[attr-defined]
        assert stacked(parts[::-1]) is None


def test_parameters_are_joined_if_each_has_its_memory_to_itself() -> None:
    def parameter(*shape: int, **kw: Any) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, **kw))

    first, second = parameter(4, 6), parameter(4, 6)
    assert stackable((first, second))
    before = torch.cat((first, second)).detach()
    stack((first, second))
    assert torch.equal(stacked((first, second)), before)  # type: ignore[arg-type]
    assert not stackable((first, second))  # now each is half of a storage
    alone = parameter(4, 6)
    for other in (
        alone,  # tied
        parameter(4, 5), parameter(4, 6, dtype=torch.float64), torch.randn(4, 6),
        nn.Parameter(torch.randn(5, 6)[:4]), nn.Parameter(torch.empty(4, 6, device="meta")),
    ):  # fmt: skip
        assert not stackable((alone, other))


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_in_a_storage_with_another_tensor_is_not_joined(bias: bool) -> None:
    layers = [nn.Linear(6, 4, bias) for _ in range(2)]
    alone = {t.data_ptr(): 1 for layer in layers for t in layer.parameters()}
    assert against_one_product(layers, lambda: alone) is None
    for address in alone:
        shared = alone | {address: 2}
        reason = against_one_product(layers, lambda shared=shared: shared)  # type: ignore[misc]
        assert reason is not None
        assert reason.startswith("their weights share memory with others")
    for devices in (("meta", "meta"), ("cpu", "meta"), ("meta", "cpu")):  # not yet in memory
        layers = [nn.Linear(6, 4, bias, device) for device in devices]
        assert against_one_product(layers, lambda: alone) is None


def test_why_layers_are_no_single_product() -> None:
    def against(*layers: Any) -> str | None:
        return against_one_product(layers, lambda: defaultdict(int))

    unlike = "their weights share memory with others, or differ in dtype or device"
    first, second = nn.Linear(6, 4), nn.Linear(6, 4)
    assert against(first, second) is None
    assert against(first, nn.Linear(6, 4, bias=False)) == "some of them have no bias"
    assert against(first, first) == unlike
    assert against(first, nn.Linear(5, 4)) == unlike
    assert against(first, nn.Linear(6, 4).double()) == unlike
    second.bias = nn.Parameter(torch.randn(8)[:4])
    assert against(first, second) == unlike  # the weights alone could be joined
    halves_of = nn.Linear(6, 8)
    for layer, rows in ((first, slice(4)), (second, slice(4, 8))):
        layer.weight, layer.bias = (
            nn.Parameter(t.detach()[rows]) for t in (halves_of.weight, halves_of.bias)
        )
    shared = defaultdict(lambda: 2)
    assert against_one_product((first, second), lambda: shared) is None  # joined already
    assert against_one_product((second, first), lambda: shared) == unlike
    codes, scale = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    stored = [
        SimpleNamespace(weight=Quantized(codes.clone(), scale.clone()), bias=None) for _ in range(2)
    ]
    assert against_one_product(stored, lambda: shared) is None  # parts are counted elsewhere
    with_zeros = Quantized(codes, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int8))
    assert against(stored[0], SimpleNamespace(weight=with_zeros, bias=None)) == unlike


@pytest.mark.parametrize("dtype", [FP32, FP16, torch.float64])
def test_half_of_a_joined_weight_shares_its_memory(dtype: torch.dtype) -> None:
    first, second = (t.to(dtype) for t in halves())
    both = torch.cat((first, second))
    for part, expected in ((both[:4], first), (both[4:], second)):
        alone = in_own_storage(part)
        assert torch.equal(alone, expected)
        assert alone.data_ptr() == part.data_ptr()
        assert alone.untyped_storage().nbytes() == part.nbytes
        assert alone.storage_offset() == 0


# -- the gated product --------------------------------------------------------------------


def test_halves_of_which_one_has_a_bias_are_two_products() -> None:
    gate, up = halves()
    bias = torch.randn(8)
    for biases in ((bias[:4], None), (None, bias[4:]), (bias[4:], bias[:4])):
        assert joint_operands((gate, up), biases, "swiglu") is None
        x = torch.randn(3, 6)
        y = gated_linear(x, gate, up, *biases, "swiglu")
        expected = F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
        torch.testing.assert_close(y, expected)
    three = torch.randn(12, 6)
    assert joint_operands((three[:4], three[4:6]), (None, None), "swiglu") is None  # unequal halves
    operands = joint_operands((gate, up), (bias[:4], bias[4:]), "swiglu")
    assert operands is not None
    assert torch.equal(operands[1], bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("learning", list(itertools.product((False, True), repeat=5))[1:])
def test_each_part_of_a_joint_product_may_train_alone(learning: tuple[bool, ...]) -> None:
    mlp, x = SwiGLU(8, 12, bias=True), torch.randn(5, 8)
    gate, up = mlp.gate_proj, mlp.up_proj
    given: Any = (x, gate.weight, up.weight, gate.bias, up.bias)
    for t, learns in zip(given, learning, strict=True):
        t.requires_grad_(learns)
    of = [t for t in given if t.requires_grad]
    operands = joint_operands(given[1:3], given[3:], "swiglu")
    assert operands is not None
    z = _Joint.apply(*given, *(None if t is None else t.detach() for t in operands))  # type: ignore[attr-defined]
    expected = torch.cat([F.linear(x, gate.weight, gate.bias), F.linear(x, up.weight, up.bias)], 1)
    torch.testing.assert_close(z, expected)
    grad = torch.randn_like(z)
    for mine, other in zip(
        torch.autograd.grad(z, of, grad), torch.autograd.grad(expected, of, grad), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", ["gate_proj.bias", "up_proj.bias", "up_proj.weight"])
def test_one_half_of_a_gated_mlp_may_train_alone(name: str) -> None:
    mlp, x = SwiGLU(8, 12, bias=True), torch.randn(5, 8)
    mlp.requires_grad_(False)
    parameter = mlp.get_parameter(name).requires_grad_()
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    (got,) = torch.autograd.grad(mlp(x).square().sum(), parameter)
    between = F.silu(F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias)
    y = F.linear(between, down.weight, down.bias)
    torch.testing.assert_close(got, torch.autograd.grad(y.square().sum(), parameter)[0])


def test_second_derivatives_of_both_halves() -> None:
    """The gradient of x depends on gate and up, so it has derivatives by both."""
    mlp, x = SwiGLU(8, 12), torch.randn(5, 8, requires_grad=True)
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight

    def second(y: Tensor) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (gate, up))

    by_hand = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    for mine, other in zip(second(mlp(x)), second(by_hand), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_single_row_has_gradients() -> None:
    """A vector has the gradients of a matrix of one row."""
    mlp, x = SwiGLU(8, 12, bias=True), torch.randn(8, requires_grad=True)
    learned = (x, *mlp.parameters())
    got = torch.autograd.grad(mlp(x).square().sum(), learned)
    rows = torch.autograd.grad(mlp(x[None]).square().sum(), learned)
    for mine, other in zip(got, rows, strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(RuntimeError, match="need to be at least 1D"):
        mlp(x[0])


@pytest.mark.parametrize(
    ("gate", "up", "biases", "refused"),
    [
        ((8, 6), (8, 6), (None, None), False), ((8, 6), (8, 6), ((8,), (8,)), False),
        ((8, 6), (7, 6), (None, None), True), ((8, 5), (8, 6), (None, None), True),
        ((8, 6), (8, 5), (None, None), True), ((8, 6), (8, 6), ((8,), (7,)), True),
        ((8, 6), (8, 6), ((7,), (8,)), True), ((8, 6), (8, 6), (None, (8,)), False),
    ],
)  # fmt: skip
def test_a_graph_refuses_halves_that_do_not_match(
    gate: Any, up: Any, biases: Any, refused: bool
) -> None:
    with FakeTensorMode():
        given = [torch.empty(shape) for shape in (gate, up)]
        given += [None if shape is None else torch.empty(shape) for shape in biases]  # type: ignore[misc]
        x = torch.empty(2, 3, 6)
        if refused:
            with pytest.raises((RuntimeError, ValueError)):
                gated_linear(x, *given, "swiglu")
        else:
            assert gated_linear(x, *given, "swiglu").shape == (2, 3, 8)


def test_layers_are_called_while_tangents_are_computed() -> None:
    layers, x = [Linear(8, 8) for _ in range(2)], torch.randn(3, 8)
    assert only_multiply(layers, x)
    with torch.autograd.forward_ad.dual_level():
        assert not only_multiply(layers, x)


@pytest.mark.parametrize(("learning", "kernel"), [(False, True), (True, True), (True, False)])
def test_shards_are_gated_with_and_without_a_gradient(
    learning: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gated kernel, as on a CPU, the shards compute two products. Compilers, forward mode
    and autocast must see the layers' calls."""
    mlp, x = SwiGLU(8, 12, bias=True), torch.randn(5, 8)
    mlp.requires_grad_(learning)
    gate, up = mlp.gate_proj, mlp.up_proj

    def shards(mlp: Any, gate: Any, up: Any, x: Tensor) -> Tensor:
        return sharded._product(x, (gate.weight, up.weight), (gate.bias, up.bias), mlp.epilogue)

    monkeypatch.setattr(sharded, "gated", shards)
    if not kernel:
        monkeypatch.setattr(sharded, "recorded_product", lambda *_: None)
    y = mlp._sharded_product(gate, up, x)
    assert y is not None
    assert y.requires_grad is learning
    torch.testing.assert_close(y, F.silu(gate(x)) * up(x))
    if kernel and interpreting():
        given = (gate.weight, up.weight), (gate.bias, up.bias)
        recorded = sharded.recorded_product(x, *given, "swiglu")
        assert recorded is not None
        torch.testing.assert_close(recorded, y)
    with torch.autocast("cpu", dtype=BF16):
        assert mlp._sharded_product(gate, up, x) is None
    with torch.autograd.forward_ad.dual_level():
        assert mlp._sharded_product(gate, up, x) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert mlp._sharded_product(gate, up, x) is None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("learning", [False, True])
def test_joint_projections_in_a_graph_equal_separate_ones(
    biased: bool, joint: bool, learning: bool
) -> None:
    weight, bias, x = torch.randn(7, 6), torch.randn(7), torch.randn(2, 3, 6)
    parts = weight[:4], weight[4:] if joint else weight[4:].clone()
    biases = [bias[:4], bias[4:]] if biased else [None, None]
    right = F.linear(x, weight, bias if biased else None)
    x.requires_grad_(learning)
    y = projections.joint_linear(x, list(parts), biases)
    torch.testing.assert_close(y.detach(), right)
    if learning:
        y.sum().backward()
        torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3, 6))


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("static", [(), (0,), (0, 1)])
@pytest.mark.parametrize("biased", [(), (0,), (1,), (0, 1)])
def test_projections_have_their_own_biases(
    biased: tuple[int, ...], static: tuple[int, ...], compiling: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layers: list[Any] = [Linear(6, n, bias=i in biased) for i, n in enumerate((4, 3))]
    seen: list[bool] = []
    linear = projections.api.linear

    def spied(*given: Any, **options: Any) -> Tensor:
        seen.append(settings.current().static_weights)
        return linear(*given, **options)

    for i, layer in enumerate(layers):
        layer.static_weights = i in static
    move_together(*(layer.weight for layer in layers))
    if len(biased) == 2:
        move_together(*(layer.bias for layer in layers))
    monkeypatch.setattr(projections.api, "linear", spied)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x = torch.randn(2, 3, 6)
    with torch.no_grad():
        found = projections.JointProduct(layers)._product(x)
        assert [*found] == ([] if len(biased) == 1 else [0, 1])
        for i, columns in found.items():
            right = F.linear(x, layers[i].weight, layers[i].bias)
            torch.testing.assert_close(columns, right)
    if not compiling:
        assert seen == ([] if len(biased) == 1 else [len(static) == 2])
    assert projections.JointProduct(layers)._product(x) == {}  # each records its own gradient


@pytest.mark.parametrize("rounded", [(), (0,), (0, 1)])
def test_quantised_projections_are_one_product_outside_graphs(
    rounded: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[Any] = [Linear(64, n, bias=False).requires_grad_(False) for n in (4, 3)]
    for i in rounded:
        quantised = stored_weights.quantised(layers[i].weight, "int8")
        layers[i].weight = nn.Parameter(quantised, requires_grad=False)
    stack([layer.weight for layer in layers])
    x = torch.randn(5, 64)
    for compiling, joined in ((False, len(rounded) != 1), (True, not rounded)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=compiling: value)
        found = projections.JointProduct(layers)._product(x)
        assert [*found] == ([0, 1] if joined else [])
        for i, columns in found.items():
            torch.testing.assert_close(columns, layers[i](x))


class Projects:
    """Forwards that project one tensor into heads, or just do not."""

    q: Any
    k: Any
    v: Any

    def plain(self, x: Any) -> Any:
        before = x + 1
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        k = self.k(x).view(*heads).transpose(1, 2)
        return before, q, k, x + 1

    def in_one_step(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q, k = self.q(x).view(heads), self.k(x).view(heads)
        return q, k

    def of_the_second_tensor(self, x: Any, y: Any) -> Any:
        leading = y.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x)
        k = self.k(y).view(heads)
        v = self.v(y).view(heads)
        return q, k, v

    def one(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        return self.q(x).view(heads)

    def twice(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        k = self.q(x).view(heads)
        return q, k

    def used_between(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        x.add_(1)
        k = self.k(x).view(heads)
        return q, k

    def of_fewer_dimensions(self, x: Any) -> Any:
        leading = x.shape[:-2]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k

    def with_another_shape(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8, 1)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k

    def with_two_shapes(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        heads = (*leading, -1, 4)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k

    def of_another_x(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        x = x[0]
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k

    def into_the_heads_of_another(self, x: Any, y: Any) -> Any:
        leading = y.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k

    def on_a_condition(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads) if self.k else q
        return q, k

    def returned(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).view(heads)
        return q, self.k(x).view(heads)

    def reshaped(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x).reshape(heads)
        k = self.k(x).reshape(heads)
        return q, k

    def with_another_argument(self, x: Any) -> Any:
        leading = x.shape[:-1]
        heads = (*leading, -1, 8)
        q = self.q(x, out=None).view(heads)
        k = self.k(x).view(heads)
        return q, k

    no_function = len
    without_a_name = lambda self, x: x  # noqa: E731


@pytest.mark.parametrize(
    ("forward", "names"),
    [
        ("plain", ("q", "k")), ("in_one_step", ("q", "k")), ("of_the_second_tensor", ("k", "v")),
        *((name, ()) for name in (
            "one", "twice", "used_between", "of_fewer_dimensions", "with_another_shape",
            "with_two_shapes", "of_another_x", "into_the_heads_of_another", "on_a_condition",
            "returned", "reshaped", "with_another_argument", "no_function", "without_a_name",
        )),
    ],
)  # fmt: skip
def test_projections_of_one_tensor_are_read_from_a_source(
    forward: str, names: tuple[str, ...]
) -> None:
    kind = type("Attention", (nn.Module,), {"forward": vars(Projects)[forward]})
    assert projections.names_of(kind) == names


@pytest.mark.parametrize(
    ("formats", "joined"),
    [
        (("int8", "int8"), True), (("fp8", "fp8"), True), (("int8", "fp8"), False),
        (("int4", "int4"), True), (("int4", "int8"), False),
    ],
)  # fmt: skip
def test_quantised_weights_of_one_format_are_joined(formats: tuple[str, str], joined: bool) -> None:
    parts: Any = [stored_weights.quantised(torch.randn(4, 64), name) for name in formats]
    before = [part.dequantize() for part in parts]
    assert stackable(parts) is joined
    stack(parts)
    both = stacked(parts)
    assert (both is not None) is joined
    for part, values in zip(parts, before, strict=True):
        assert torch.equal(part.dequantize(), values)
    if both is not None:
        assert torch.equal(both.dequantize(), torch.cat(before))  # type: ignore[operator]
        address = both.stored.data_ptr()  # type: ignore[attr-defined]
        stack(parts)  # a second call moves nothing
        assert stacked(parts).stored.data_ptr() == address  # type: ignore[union-attr]
        assert stacked(parts[::-1]) is None
    assert stacked([parts[0], torch.randn(4, 64)]) is None
    assert not stackable([parts[0], torch.randn(4, 64)])
    elsewhere: Any = stored_weights.quantised(torch.randn(4, 64, device="meta"), formats[0])
    assert not stackable([parts[0], elsewhere])


# -- experts ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def by_blas() -> Iterator[None]:
    with tmm_core.override(disable="triton.ragged"):
        yield


def test_weights_are_as_wide_as_the_inputs_of_their_own_projection() -> None:
    torch.manual_seed(0)
    layer = Experts(4, hidden_size=100, intermediate_size=9, bias=True)
    for name, inputs in (("gate_up_proj", 100), ("down_proj", 9)):
        bound = 1 / math.sqrt(inputs)
        for t in (layer.get_parameter(name), layer.get_parameter(f"{name}_bias")):
            assert 0.8 * bound < t.abs().max() <= bound
    Experts(2, 6, 0)  # a width of zero has a bound, too


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_where_they_are_said_to_be(bias: bool) -> None:
    layer = Experts(2, 8, 4, bias=bias, device="meta", dtype=BF16)
    found = {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in layer.named_parameters()}
    shapes = {"gate_up_proj": (2, 8, 8), "down_proj": (2, 8, 4)}
    if bias:
        shapes |= {"gate_up_proj_bias": (2, 8), "down_proj_bias": (2, 8)}
    assert found == {name: (shape, BF16, "meta") for name, shape in shapes.items()}
    assert layer.has_bias is bias


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("rounds", [False, True])
def test_which_activations_meet_the_weights_of_experts(
    dtype: torch.dtype, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations are cast to the dtype of a plain weight, and not for a quantised one. If they
    are quantised to 8 bits, the result has their original dtype."""
    met: list[Any] = []
    matmul = experts.grouped.grouped_matmul

    def seen(x: Any, weight: Any, **more: Any) -> Any:
        met.append((type(x), x.dtype, more.get("out_dtype")))
        return matmul(x, weight, **more)

    monkeypatch.setattr(experts.grouped, "grouped_matmul", seen)
    layer = Experts(2, 256, 128)
    index, weights = torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    x = torch.randn(3, 256).to(dtype)
    expected = layer(x, index, weights)
    assert met == [(Tensor, FP32, None)] * 2
    met.clear()
    for name in ("gate_up_proj", "down_proj"):
        weight = stored_weights.quantised(layer.get_parameter(name).detach(), "fp8")
        layer.register_parameter(name, nn.Parameter(weight, False))
    layer.rounds_activations = rounds
    y = layer(x, index, weights)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.3, atol=0.2)
    assert [(kind is Quantized, out) for kind, _, out in met] == [
        (rounds, dtype if rounds else None)
    ] * 2
    if not rounds:
        assert [found for _, found, _ in met] == [dtype] * 2


def test_the_choices_of_an_expert_stay_in_order() -> None:
    """Choices follow the order of tokens, so that sums do not depend on how a sort breaks ties."""
    index = torch.randint(5, (300, 2))
    places, ends = experts._by_expert(index, 4)
    flat = index.flatten()
    start = 0
    for expert, end in enumerate(ends.tolist()):
        mine = places[start:end]
        assert torch.equal(mine, (flat == expert).nonzero()[:, 0])
        start = end
    assert start == (flat < 4).sum()  # expert 4 is on another rank


@pytest.mark.parametrize("router", [FP32, FP16, torch.float64])
def test_the_weights_of_a_router_are_not_rounded_to_16_bits(router: torch.dtype) -> None:
    """Only a router that computes in 16 bits rounds its weights. 1 + 2⁻¹⁰ is 1 in bf16."""
    layer = Experts(1, 8, 8, dtype=BF16)
    with torch.no_grad():
        layer.gate_up_proj.fill_(1.0)
        layer.down_proj.fill_(2.0**-20)
    x, index = torch.ones(4, 8, dtype=BF16), torch.zeros(4, 2, dtype=torch.long)
    weights = torch.tensor([1 + 2.0**-8, -1.0], dtype=router).expand(4, 2)
    y = layer(x, index, weights)
    assert y.dtype is BF16
    one = layer(x, index[:, :1], torch.ones(4, 1))
    torch.testing.assert_close(y, (one.float() * 2.0**-8).to(BF16), rtol=0.3, atol=0)


def test_the_result_of_experts_has_the_dtype_of_its_input() -> None:
    layer = Experts(2, 8, 4)
    for dtype in (BF16, FP32, torch.float64):
        x = torch.randn(3, 8, dtype=dtype)
        index, weights = torch.tensor([[0, 1]]).expand(3, 2), torch.ones(3, 2)
        y = layer(x, index, weights)
        assert y.dtype is dtype
        expected = layer(x.float(), index, weights)
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


def test_experts_of_two_dtypes_under_autocast_are_rounded_once() -> None:
    layer, x = Experts(2, 8, 4), torch.randn(3, 8)
    index, weights = torch.tensor([[0, 1]]).expand(3, 2), torch.rand(3, 2)
    expected = layer(x, index, weights)
    with torch.autocast("cpu", dtype=BF16):
        y = layer(x, index, weights)
    assert y.dtype is FP32
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
    assert not torch.equal(y, expected)


HOOKS = (
    "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_forward_hook", "register_forward_pre_hook",
)  # fmt: skip


# -- layers side by side -------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_layers_that_do_more_than_multiply_are_called(hook: str) -> None:
    layer, x = Linear(6, 4), torch.randn(2, 6)
    assert only_multiply([Linear(6, 4), layer], x)
    handle = getattr(layer, hook)(lambda *_: None)
    assert not only_multiply([Linear(6, 4), layer], x)
    handle.remove()
    assert only_multiply([layer], x)
    # Under FullyShardedDataParallel parameters are plain attributes.
    layer.__dict__["bias"] = layer._parameters.pop("bias")
    assert not only_multiply([layer], x)
    assert only_multiply([Linear(6, 4, bias=False)], x)
    assert not only_multiply([Linear(6, 4, dtype=BF16)], x)


# -- sharded layers -----------------------------------------------------------------------


class Sharded(nn.Parameter):
    """A stand-in with the attributes of a parameter that is sharded by columns."""

    placements = (Shard(0),)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_sharded_layer_with_hooks_that_a_joint_product_skips_is_left(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "DTensor", Sharded)
    layer = Linear(6, 4)
    layer.weight, layer.bias = Sharded(torch.randn(4, 6)), Sharded(torch.randn(4))
    assert sharded._column_sharded(layer)
    more = {"with_kwargs": True} if "forward" in hook else {}
    handle = getattr(layer, hook)(lambda *_: None, **more)
    assert not sharded._column_sharded(layer)
    handle.remove()
    assert sharded._column_sharded(layer)
    layer.bias = nn.Parameter(torch.randn(4))
    assert not sharded._column_sharded(layer)


def placing_hook(layout: str) -> Any:
    """A hook as ``distribute_module`` makes it, of a style that places in this layout."""
    place: Any = functools.partial(print, layout)

    def hook(module: Any, *given: Any) -> Any:
        return place(*given)

    hook.__module__ = "torch.distributed.tensor._api"
    hook.__qualname__ = "distribute_module.<locals>.<lambda>"
    return hook


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize(
    ("of_gate", "of_up", "alike"),
    [("rows", "rows", True), ("rows", "columns", False), ("rows", None, False)],
)
def test_two_layers_are_placed_alike_by_equal_hooks(
    register: str, of_gate: str, of_up: str | None, alike: bool
) -> None:
    gate, up = Linear(6, 4), Linear(6, 4)
    assert sharded._placed_alike(gate, up)
    getattr(gate, register)(placing_hook(of_gate))
    if of_up is not None:
        getattr(up, register)(placing_hook(of_up))
    for _ in range(2):  # the second answer is kept
        assert sharded._placed_alike(gate, up) is alike
    getattr(up, register)(print)
    assert not sharded._placed_alike(gate, up)
    # Another library's hook may compute anything, and the gate's alone would be called.
    getattr(gate, register)(print)
    assert not sharded._placed_alike(gate, up)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize(
    ("of_gate", "of_up", "joint"),
    [(Replicate(), Replicate(), True), (Shard(1), Shard(1), True), (Replicate(), Shard(1), False)],
)  # fmt: skip
def test_shards_are_gated_and_placed_as_their_layers_are(
    of_gate: Any, of_up: Any, joint: bool, learning: bool, mesh: Any
) -> None:
    mlp, x = SwiGLU(8, 12, bias=True).requires_grad_(learning), torch.randn(5, 8)
    expected = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    for name, place in (("gate_proj", of_gate), ("up_proj", of_up)):
        style = ColwiseParallel(output_layouts=place, use_local_output=False)
        parallelize_module(mlp, mesh, {name: style})
    for _ in range(2):  # the second reads what the first kept
        y: Any = sharded.gated(mlp, mlp.gate_proj, mlp.up_proj, x)
        assert (y is not None) is joint
        if joint:
            assert (y.placements, y.requires_grad) == ((of_gate,), learning)
            torch.testing.assert_close(y.full_tensor(), expected)


def test_a_gated_layer_with_a_view_or_without_a_parameter_is_stored_and_moved() -> None:
    """FSDP takes parameters away, and a user may assign columns of a larger matrix."""
    mlp = gated_layers.GatedMLP(8, 6)
    columns = torch.randn(6, 16)[:, :8]
    mlp.gate_proj.weight = nn.Parameter(columns)
    torch.testing.assert_close(mlp.state_dict()["gate_proj.weight"], columns)
    del mlp.up_proj.weight
    mlp.to(torch.float64)
    assert mlp.gate_proj.weight.dtype is torch.float64


def test_weights_that_share_a_storage_are_not_moved_again() -> None:
    """CUDA graphs and optimizers hold their addresses."""
    weights = [Linear(6, n).weight for n in (4, 3)]
    move_together(*weights)
    values = [t.detach().clone() for t in weights]
    places = [t.data_ptr() for t in weights]
    move_together(*weights)
    assert [t.data_ptr() for t in weights] == places
    assert all(map(torch.equal, weights, values))
