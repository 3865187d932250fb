"""``Quantized`` of every format, in calls of every kind; and what its makers refuse."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tmm_core
from tmm_core import Quantized, formats
from tmm_core.formats import grids

Tensor = torch.Tensor
F = torch.nn.functional
BF16 = torch.bfloat16
FORMATS = ("int8", "int4", "int4_signed", "fp8", "mxfp4", "mxfp8", "nvfp4")
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)


def made(name: str, *shape: int, zeros: bool = True) -> tuple[Quantized, Tensor]:
    """A random weight with the last of the format's grids, and its values in fp64."""
    form = formats.named(name)
    *lead, n, k = shape
    block = form.block(form.grids[-1], n, k, math.prod(lead))
    if form.storage[0].is_floating_point:
        data = torch.randn(shape).to(form.storage[0])
    else:
        low, high = (0, 256) if form.storage[0] is torch.uint8 else (-127, 128)
        data = torch.randint(low, high, (*lead, n, k // form.pack), dtype=form.storage[0])
    size = (*lead, *grids.sizes(block, n, k))
    if form.scale_dtypes[0] is grids.EXPONENT:
        scale = torch.randint(120, 125, size, dtype=torch.uint8)
    else:
        scale = (torch.rand(size) / 64 + 1e-2).to(form.scale_dtypes[0])
    zero = torch.randint(0, 8, size).to(scale.dtype) if zeros and form.zeros else None
    if block == grids.TENSOR:
        scale, zero = scale.reshape(()), None if zero is None else zero.reshape(())
    weight = Quantized(data, scale, zero, format=name, block=None if scale.dim() == 0 else block)
    values = form.values(
        weight.stored, weight.scale, weight.zero, torch.float64, weight.block, weight.along
    )
    return weight, values


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4"])
def test_strides_are_those_of_the_values(name: str) -> None:
    weight, _ = made(name, 32, 64)
    stack, _ = made(name, 3, 32, 64)
    assert (weight.stride(), stack.stride()) == ((64, 1), (32 * 64, 64, 1))
    assert weight.is_contiguous()
    assert (weight.mT.stride(), stack.mT.stride()) == ((1, 64), (32 * 64, 1, 64))
    apart = _strided(weight.stored)  # every other stored element
    of_apart = Quantized(apart, weight.scale, weight.zero, format=name, block=_named(weight))
    assert of_apart.shape == (32, 64)
    assert of_apart.stride() == (2 * 64, 2)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    if not found.numel():
        return
    error = (found.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < 1.6e-2, float(error.max())


@pytest.fixture(params=FORMATS)
def pair(request: pytest.FixtureRequest) -> tuple[Quantized, Tensor]:
    return made(request.param, 24, 256)


X = torch.randn(5, 256, dtype=BF16)


def _plan(x: Tensor, w: Quantized) -> Tensor:
    plan = tmm_core.plan(x, w.t(), alpha=2.0)
    out = torch.empty(5, 24, dtype=BF16)
    plan(x, w.t(), out=out)
    assert torch.equal(out, plan(x, w.T))
    return out / 2


def _autocast(x: Tensor, w: Quantized) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        y = tmm_core.linear(x.float(), w)
    assert y.dtype is torch.float16
    return y


def _module(x: Tensor, w: Quantized) -> Tensor:
    layer = nn.Linear(256, 24, bias=False)
    layer.weight = nn.Parameter(w, requires_grad=False)
    torch.compiler.reset()  # torch refuses to compile a forward more than eight times
    compiled: Callable[[Tensor], Tensor] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    return compiled(x)


CALLS: dict[str, Callable[[Tensor, Quantized], Tensor]] = {
    "T": lambda x, w: x @ w.T,
    "permuted": lambda x, w: x @ w.permute(1, 0),
    "permuted twice": lambda x, w: tmm_core.linear(x, w.permute(-1, -2).permute(1, 0)),
    "transposed and copied": lambda x, w: x @ w.t().contiguous(),
    "torch's names": lambda x, w: torch.matmul(input=x, other=w.t()),
    "the method's name": lambda x, w: x.matmul(other=w.t()),
    "the layer's names": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "bytes of other strides": lambda x, w: tmm_core.linear(
        x, Quantized(_strided(w.stored), w.scale, w.zero, format=w.format, block=_named(w))
    ),
    "a bias of two dimensions": lambda x, w: (
        tmm_core.linear(x, w, torch.full((5, 24), 0.5, dtype=BF16)) - 0.5
    ),
    "a bias of one element": lambda x, w: (
        tmm_core.linear(x, w, torch.full((1,), 0.5, dtype=BF16)) - 0.5
    ),
    "a wide bias and a row": lambda x, w: tmm_core.linear(
        x, w, torch.ones(24), residual=-torch.ones(24, dtype=BF16)
    ),
    "a's side": lambda x, w: tmm_core.matmul(w, x.t()).t(),
    "a tensor as alpha": lambda x, w: tmm_core.matmul(x, w.T, alpha=torch.tensor(1.0)),
    "resized": lambda x, w: tmm_core.matmul(x, w.T, out=torch.empty(0, dtype=BF16)),
    "plan": _plan,
    "autocast": _autocast,
    "compiled": _module,
    "batches": lambda x, w: torch.vmap(lambda row: tmm_core.linear(row, w))(x),
    "fp16": lambda x, w: tmm_core.linear(x.half(), w),
    "fp32": lambda x, w: tmm_core.linear(x.float(), w),
    "forced": lambda x, w: tmm_core.matmul(x, w.T, kernel="blas"),
    "another dtype": lambda x, w: tmm_core.linear(x, w.to(torch.float16)),
    "moved": lambda x, w: F.linear(x, w.to("cpu").detach()),
}


def _strided(t: Tensor) -> Tensor:
    wide = torch.zeros(t.shape[0], 2 * t.shape[1], dtype=t.dtype)
    wide[:, ::2] = t
    return wide[:, ::2]


def _named(w: Quantized) -> grids.Block | None:
    return None if w.block == grids.TENSOR else w.block


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_every_kind(call: str, pair: tuple[Quantized, Tensor]) -> None:
    weight, values = pair
    close(CALLS[call](X, weight), X.double() @ values.T)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp4"])
@pytest.mark.slow(quick=6)
def test_calls_in_inference_mode(call: str, name: str) -> None:
    """Torch then makes other views, and passes on operators that it takes apart elsewhere."""
    weight, values = made(name, 24, 256)
    with torch.inference_mode():
        close(CALLS[call](X, weight), X.double() @ values.T)
        weight, values = made(name, 24, 256)
        close(CALLS[call](X, weight), X.double() @ values.T)
    close(CALLS[call](X, weight), X.double() @ values.T)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp4"])
def test_sizes_of_a_problem_count_values(name: str) -> None:
    """On either side of the product, also where an element has two."""
    weight, stack = made(name, 24, 256)[0], made(name, 3, 24, 256)[0]
    x = torch.randn(256, 5).to(weight.dtype)
    sizes = {
        "left": tmm_core.problem(weight, x), "right": tmm_core.problem(x.T, weight.T),
        "left stack": tmm_core.problem(stack, x.expand(3, 256, 5)),
        "groups": tmm_core.problem(x.T, stack.mT, offs=torch.tensor([1, 2, 5], dtype=torch.int32)),
    }  # fmt: skip
    assert {side: (each.m, each.n, each.k) for side, each in sizes.items()} == {
        "left": (24, 5, 256), "right": (5, 24, 256), "left stack": (24, 5, 256),
        "groups": (5, 24, 256),
    }  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
def test_the_parts_decide_about_inference_mode(inference: bool) -> None:
    """A tensor of parts that torch can view has views, whenever it was made."""
    with torch.inference_mode(inference):
        codes, scale = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    with torch.inference_mode(not inference):
        weight = Quantized(codes, scale)
    assert weight.is_inference() is inference
    assert torch.equal(weight.T.dequantize(), torch.ones(8, 4, dtype=weight.dtype))
    assert weight.T.is_inference() is inference


@pytest.mark.parametrize("quantised", ["output", "inputs", "all"])
def test_attention_of_several_heads_uses_the_values(quantised: str) -> None:
    """As WavLM calls it, with the weights of its own layers."""
    wide = {name: made("int8", 32, 32) for name in ("q", "k", "v", "out")}
    both = {name: (weight, values.float()) for name, (weight, values) in wide.items()}
    chosen = {"output": ("out",), "inputs": ("q", "k", "v"), "all": tuple(wide)}[quantised]

    def attend(stored: Sequence[str], x: Tensor) -> Tensor:
        of = {name: each[0 if name in stored else 1] for name, each in both.items()}
        y, _ = F.multi_head_attention_forward(
            x, x, x, 32, 4, torch.empty(0), torch.zeros(96), None, None, False, 0.0,
            of["out"], torch.zeros(32), need_weights=False, use_separate_proj_weight=True,
            q_proj_weight=of["q"], k_proj_weight=of["k"], v_proj_weight=of["v"],
        )  # fmt: skip
        return y

    x = torch.randn(5, 2, 32)
    torch.testing.assert_close(attend(chosen, x), attend((), x), rtol=1e-2, atol=1e-2)


COMPILED: dict[str, Callable[[Tensor, Quantized, Quantized], Tensor]] = {
    "T": lambda x, w, _: tmm_core.matmul(x, w.T),
    "mT": lambda x, w, _: x @ w.mT,
    "mH": lambda x, w, _: tmm_core.matmul(x, w.mH),
    "H": lambda x, w, _: x @ w.H,
    "a stack": lambda x, _, stack: tmm_core.matmul(x, stack.mT)[0],
    "groups": lambda x, _, stack: tmm_core.grouped_linear(x, stack, offs=OFFS),
    "transposed groups": lambda x, _, stack: tmm_core.grouped_matmul(x, stack.mT, offs=OFFS),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("call", COMPILED)
@pytest.mark.slow(quick=10)
def test_compiled_calls_that_read_a_property(call: str, whole: bool) -> None:
    """A graph that may break has its inputs' properties read again, by a frame that is compiled."""
    weight, stack = made("int4", 24, 256)[0], made("int8", 3, 24, 256)[0]
    wanted = COMPILED[call](X, weight, stack)
    for inference in (False, True):
        torch.compiler.reset()
        graph = torch.compile(COMPILED[call], backend="aot_eager", fullgraph=whole)
        with torch.inference_mode(inference):
            torch.testing.assert_close(graph(X, weight, stack), wanted)


@pytest.mark.parametrize("name", ["T", "groups"])
def test_a_graph_of_several_weights_is_compiled(name: str) -> None:
    """Torch's guards compare the addresses of a graph's inputs, which parts of ``w.T`` are not."""
    calls: dict[str, Callable[[Tensor, Quantized], Tensor]] = {
        "T": lambda x, w: tmm_core.matmul(x, w.T),
        "groups": lambda x, w: tmm_core.grouped_linear(x, w, offs=OFFS),
    }
    shape = (3, 256, 256) if name == "groups" else (256, 256)
    weights = [made("int8", *shape)[0] for _ in range(3)]

    def chain(x: Tensor, *weights: Quantized) -> Tensor:
        for weight in weights:
            x = calls[name](x, weight)
        return x

    torch.compiler.reset()
    graph = torch.compile(chain, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(X, *weights), chain(X, *weights))


def test_properties_that_transpose_raise_as_torchs() -> None:
    stack = made("int8", 3, 24, 256)[0]
    flat = Quantized(stack.stored[0, 0], torch.tensor(0.5), format="int8")
    for name, t, text in (
        ("mT", flat, "Got 1-D"),
        ("mH", flat, "Got 1-D"),
        ("H", stack, "Got 3-D"),
    ):
        with pytest.raises(RuntimeError, match=text):
            getattr(t, name)


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_and_one_row(name: str) -> None:
    weight, values = made(name, 24, 256)
    close(tmm_core.linear(X[:0], weight), X[:0].double() @ values.T)
    close(tmm_core.linear(X[0], weight), X[0].double() @ values.T)
    none = torch.vmap(lambda x: tmm_core.linear(x, weight))(X[:0, None])
    assert none.shape == (0, 1, 24)
    assert none.dtype is BF16
    for n in (0, 1):
        few, of_few = made(name, n, 256)
        close(tmm_core.linear(X, few), X.double() @ of_few.T)
    flat, of_flat = made(name, 24, 0)
    bias = torch.randn(24, dtype=BF16)
    y = tmm_core.linear(X[:, :0], flat, bias, epilogue="silu")
    close(y, F.silu(X[:, :0].double() @ of_flat.T + bias.double()))


@pytest.mark.parametrize("name", FORMATS)
def test_stacks_and_groups(name: str) -> None:
    stack, values = made(name, 3, 24, 256)
    close(tmm_core.matmul(X, stack.mT), X.double() @ values.mT)
    bounds = [0, *OFFS.tolist()]
    rows = [X[s:e].double() @ v.T for s, e, v in zip(bounds, bounds[1:], values, strict=False)]
    close(tmm_core.grouped_linear(X, stack, offs=OFFS), torch.cat(rows))
    found = tmm_core.grouped_matmul(X, stack.permute(0, 2, 1), offs=OFFS, alpha=-0.5)
    close(found, -0.5 * torch.cat(rows))
    with pytest.raises(NotImplementedError, match="permute"):
        stack.permute(1, 0, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_folded_as_their_operands(name: str) -> None:
    """Vectors with stacks, stacks of one, and no values along K."""
    form = formats.named(name)
    (a, of_a), (b, of_b) = made(name, 1, 256), made(name, 2, 24, 256)
    parts = [t if t is None or not t.dim() else t[0] for t in (a.stored, a.scale, a.zero)]
    vector = Quantized(*parts, format=name, block=_named(a))
    close(tmm_core.matmul(vector, b.mT), of_a[0] @ of_b.mT)
    close(tmm_core.matmul(vector, b.dequantize().mT), of_a[0] @ of_b.mT)
    if b.block[0] == 1:  # else refused
        close(tmm_core.matmul(b, vector), of_b @ of_a[0])
    one, of_one = made(name, 1, 24, 256)
    close(tmm_core.matmul(X[:3], one.mT), X[:3].double() @ of_one.mT)
    block = next(block for block in form.grids if block[0] == 1 and block[1])
    parts = [one.stored.new_empty((2, 3, 4, 0)), one.scale.new_empty((2, 3, 4, 0))]
    none = Quantized(*parts, format=name, block=block)
    y = tmm_core.matmul(none, torch.empty(0, 5, dtype=BF16), bias=torch.ones(5, dtype=BF16))
    close(y, torch.ones(2, 3, 4, 5).double())


@pytest.mark.parametrize("zero", [None, torch.tensor(3, dtype=torch.int8)])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_stack_of_one_weight_may_have_one_scale(zero: Tensor | None, rows: int) -> None:
    codes = torch.randint(-9, 9, (1, 24, 256), dtype=torch.int8)
    stack: Any = Quantized(codes, torch.tensor(0.5), zero)
    expected = X[:rows].double() @ (codes.double() - (0 if zero is None else 3)).mT / 2
    close(tmm_core.matmul(X[:rows], stack.mT), expected)
    close(tmm_core.matmul(stack, X[:rows].t()), expected.mT)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_mapped_products_of_two_stored_operands_under_autocast(dtype: torch.dtype) -> None:
    """Nothing is cast, and torch would not stack them in another dtype than autocast's."""
    (a, of_a), (b, of_b) = made("int8", 5, 256), made("mxfp4", 8, 256)
    bias = torch.randn(3, 8, dtype=BF16)
    with torch.autocast("cpu", dtype):
        found = torch.vmap(lambda bias: tmm_core.matmul(a, b.T, bias=bias))(bias)
    assert found.dtype is BF16
    close(found, of_a @ of_b.T + bias.double()[:, None])


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_two_formats(first: str, second: str) -> None:
    (a, of_a), (b, of_b) = made(first, 5, 256), made(second, 8, 256)
    close(tmm_core.matmul(a, b.T), of_a @ of_b.T)


def test_modules_with_quantised_weights(pair: tuple[Quantized, Tensor]) -> None:
    """They share memory with other processes, get memory after the meta device, and are read by
    torch.load as it is."""
    weight, values = pair
    layer = nn.Linear(256, 24, bias=False, dtype=BF16)
    layer.weight = nn.Parameter(copy.deepcopy(weight), requires_grad=False)
    layer.share_memory()
    own: Any = layer.weight
    assert own.stored.is_shared()
    assert own.scale.is_shared()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    empty.load_state_dict(state)
    close(empty(X), X.double() @ values.T)
    assert layer.double().weight.dtype is torch.float64
    close(layer(X), X.double() @ values.T)


def test_files_of_safetensors_hold_parts_only(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"weight": made("int4", 24, 256)[0]}
    with pytest.raises(RuntimeError, match=r"store its parts \(.stored, .scale and .zero\)"):
        safetensors.save_file(state, tmp_path / "model.safetensors")


@pytest.mark.filterwarnings("ignore:.*save in a single process:UserWarning")
@pytest.mark.filterwarnings("ignore:.*load in a single process:UserWarning")
def test_distributed_checkpoints(pair: tuple[Quantized, Tensor], tmp_path: Path) -> None:
    """Torch asks whether a tensor is pinned, and copies what it read to a tensor like it."""
    checkpoints = pytest.importorskip("torch.distributed.checkpoint")
    weight, values = pair
    checkpoints.save({"weight": weight}, checkpoint_id=tmp_path, no_dist=True)
    state: Any = {"weight": weight.new_empty(weight.shape)}
    assert isinstance(state["weight"], Quantized)
    checkpoints.load(state, checkpoint_id=tmp_path, no_dist=True)
    close(tmm_core.linear(X, state["weight"]), X.double() @ values.T)


TRANSFORMED = r"torch\.func transforms"


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("change", ["values", "rows", "dtype", "transposed", "format"])
def test_products_read_assigned_data(change: str, parameter: bool) -> None:
    """Torch's own assignment takes the shape and dtype alone."""
    taken = made("int4" if change == "format" else "int8", 24 if change == "rows" else 32, 64)[0]
    taken = taken.half() if change == "dtype" else taken.mT if change == "transposed" else taken
    weight: Any = made("int8", 32, 64)[0]
    weight = nn.Parameter(weight, requires_grad=False) if parameter else weight
    weight.data = taken
    x, product = torch.randn(5, 64, dtype=taken.dtype), tmm_core.linear
    product = tmm_core.matmul if change == "transposed" else product
    assert torch.equal(product(x, weight), product(x, taken))
    assert torch.equal(weight.dequantize(), taken.dequantize())
    assert (weight.shape, weight.stride()) == (taken.shape, taken.stride())
    assert (weight.dtype, repr(weight)) == (taken.dtype, repr(taken))
    assert isinstance(weight, nn.Parameter) == parameter
    taken.stored.zero_()  # the memory is shared, as torch's assignment shares it
    assert torch.equal(weight.stored, taken.stored)


def test_data_that_is_not_quantised_is_refused() -> None:
    weight, _ = made("int8", 32, 64)
    before = weight.dequantize()
    with pytest.raises(RuntimeError, match="have incompatible tensor type"):
        weight.data = torch.zeros(32, 64, dtype=weight.dtype)
    assert torch.equal(weight.dequantize(), before)
    plain = torch.zeros(32, 64, dtype=weight.dtype)
    with pytest.raises(NotImplementedError, match=r"aten.copy_.default of .*dequantize\(\)"):
        plain.copy_(weight)
    with pytest.raises(NotImplementedError, match=r"aten.copy_.default of .* not written"):
        weight.copy_(plain)


def test_only_numbers_of_the_same_form_are_copied() -> None:
    codes, scale = torch.ones(64, 64, dtype=torch.int8), torch.ones(64, 2)
    own = Quantized(codes.clone(), scale.clone(), group=32)
    zero = torch.ones(64, 2, dtype=torch.int8)
    others = {
        "format": Quantized(codes.to(torch.float8_e4m3fn), torch.ones(64), format="fp8"),
        "group": Quantized(codes, torch.ones(64, 1), group=64),
        "direction": Quantized(codes, scale, group=32).T,
        "zero points": Quantized(codes, scale, zero, group=32),
    }
    before = own.dequantize()
    for other in others.values():
        for to, of in ((own, other), (other, own)):
            with pytest.raises(RuntimeError, match=r"^cannot copy Quantized\(.* to Quantized\("):
                to.copy_(of)
    assert torch.equal(own.dequantize(), before)
    own.copy_(Quantized(codes * 3, scale * 2, group=32))
    assert torch.equal(own.dequantize(), before * 6)


def test_gradients_that_no_product_has(pair: tuple[Quantized, Tensor]) -> None:
    weight, values = pair
    own: Any = nn.Parameter(weight)
    for call in (
        lambda: tmm_core.linear(X, own), lambda: X @ own.T, lambda: F.linear(X, own),
        lambda: tmm_core.matmul(own, X.t()), lambda: tmm_core.plan(X, own.t()),
        lambda: tmm_core.grouped_linear(X, _stacked(weight, True), offs=OFFS[:1] * 0 + 5),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="quantised, for which a product has no gradient"):
            call()
    with torch.no_grad():
        close(tmm_core.linear(X, own), X.double() @ values.T)
    close(tmm_core.linear(X, own.detach()), X.double() @ values.T)
    if weight.scale.dtype in (BF16, torch.float32):
        scale = weight.scale.clone().requires_grad_()
        learnt = Quantized(weight.stored, scale, format=weight.format, block=_named(weight))
        learnt.dequantize().sum().backward()
        assert scale.grad is not None
        with pytest.raises(RuntimeError, match="has no gradient"):
            tmm_core.linear(X, learnt)
    if weight.zero is not None and weight.zero.is_floating_point():
        zero = weight.zero.clone().requires_grad_()
        how: dict[str, Any] = {"format": weight.format, "block": _named(weight)}
        learnt = Quantized(weight.stored, weight.scale, zero, **how)
        assert learnt.requires_grad
        with pytest.raises(RuntimeError, match="has no gradient"):
            tmm_core.linear(X, learnt)
    with pytest.raises(NotImplementedError, match=TRANSFORMED):
        torch.func.grad(lambda x: tmm_core.linear(x, weight).sum())(X)


def _stacked(w: Quantized, gradient: bool) -> Quantized:
    parts = [t if t is None or not t.dim() else t[None] for t in (w.stored, w.scale, w.zero)]
    stack: Quantized = Quantized(*parts, format=w.format, block=_named(w))
    return stack.requires_grad_(gradient)


def test_the_gradient_of_an_8_bit_scale_is_not_dropped() -> None:
    a, b = X.to(torch.float8_e4m3fn), torch.randn(256, 8).to(torch.float8_e4m3fn)
    for name in ("scale_a", "scale_b"):
        y = tmm_core.matmul(a, b, **{name: torch.ones((), requires_grad=True)})
        assert y.requires_grad
        with pytest.raises(RuntimeError, match="no derivative"):
            y.sum().backward()


def test_out_may_not_overlap_a_part_of_the_weight(pair: tuple[Quantized, Tensor]) -> None:
    weight, _ = pair
    count = 5 * 24 * 2
    for part in ("stored", "scale", "zero"):
        t = getattr(weight, part)
        if t is None or (t.numel() == 1 and t.element_size() != 2):
            continue
        raw = torch.zeros(count + t.nbytes + 16, dtype=torch.uint8)
        size = t.element_size()
        start = (count - size) // size * size
        twin = raw[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        parts = {name: getattr(weight, name) for name in ("stored", "scale", "zero")}
        parts[part] = twin
        own = Quantized(*parts.values(), format=weight.format, block=_named(weight))
        with pytest.raises(RuntimeError, match="single memory location"):
            tmm_core.matmul(X, own.T, out=raw[:count].view(BF16).view(5, 24))


BYTES = torch.randint(0, 256, (24, 128), dtype=torch.uint8)
SCALE = torch.ones(24, 2, dtype=BF16)


def _int4(scale: Any = SCALE, zero: Any = None, data: Any = BYTES, **more: Any) -> Quantized:
    return Quantized(data, scale, zero, format="int4", **more)


def _gptq(**change: Any) -> Quantized:
    given: dict[str, Any] = {
        "qweight": torch.zeros(32, 24, dtype=torch.int32),
        "qzeros": torch.zeros(2, 3, dtype=torch.int32),
        "scales": torch.ones(2, 24, dtype=torch.float16),
    }
    return Quantized.from_gptq(**given | change)


def _awq(**change: Any) -> Quantized:
    given: dict[str, Any] = {
        "qweight": torch.zeros(256, 3, dtype=torch.int32),
        "qzeros": torch.zeros(2, 3, dtype=torch.int32),
        "scales": torch.ones(2, 24, dtype=torch.float16),
    }
    return Quantized.from_awq(**given | change)


def _hqq(w_q: Tensor | None = None, **change: Any) -> Quantized:
    meta = {"nbits": 4, "axis": 1, "group_size": 64, "shape": (24, 256)}
    meta |= {"scale": torch.ones(96, 1, dtype=BF16), "zero": torch.ones(96, 1, dtype=BF16)}
    w_q = torch.zeros(48, 64, dtype=torch.uint8) if w_q is None else w_q
    return Quantized.from_hqq(w_q, meta | change)


def _compressed(**change: Any) -> Quantized:
    given: dict[str, Any] = {
        "weight_packed": torch.zeros(24, 32, dtype=torch.int32),
        "weight_scale": torch.ones(24, 2, dtype=BF16),
    }
    return Quantized.from_compressed(**given | change)


E4M3 = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a list": (lambda: _int4(data=[1]), TypeError, "'data' must be Tensor, not list"),
    "a number": (lambda: _int4(1.0), TypeError, "'scale' must be Tensor, not float"),
    "a number as zero": (lambda: _int4(zero=8), TypeError, "'zero' must be Tensor, not int"),
    "sparse": (lambda: _int4(data=BYTES.to_sparse()), RuntimeError, "dense"),
    "twice": (lambda: Quantized(_int4(), torch.ones(())), RuntimeError, "data must be a dense"),
    "a quantised scale": (lambda: _int4(_int4()), RuntimeError, "scale must be a dense"),
    "devices": (lambda: _int4(SCALE.to("meta")), RuntimeError, "same device"),
    "zero's device": (lambda: _int4(zero=SCALE.to("meta")), RuntimeError, "same device"),
    "half a group": (lambda: _int4(group=128.0), TypeError, "integers"),
    "a block's length": (lambda: _int4(block=(1, 128, 1)), ValueError, "two integers"),
    "a block's type": (lambda: _int4(block=128), TypeError, "two integers"),
    "transposed zeros": (lambda: _int4(zero=SCALE.t()), ValueError, "shape of scale"),
    "flat zeros": (lambda: _int4(zero=SCALE.flatten()), ValueError, "shape of scale"),
    "one zero": (lambda: _int4(zero=SCALE[0, 0]), ValueError, "shape of scale"),
    "no number": (lambda: Quantized(BYTES[0, 0], SCALE), ValueError, "dtype|int8|along K"),
    "integers": (lambda: _int4().to(torch.int32), NotImplementedError, "floating values"),
    "bytes": (lambda: _int4().to(torch.float8_e5m2), NotImplementedError, "floating values"),
    "addresses": (lambda: _int4().__dlpack__(), RuntimeError, "no memory of values"),
    "a bias": (
        lambda: tmm_core.matmul(X, X.t(), bias=Quantized(BYTES[:5, 0].char(), SCALE[0, 0])),
        NotImplementedError, "only the operands of a product",
    ),
    "a storage": (lambda: _int4().storage(), RuntimeError, "store its parts"),
    "a write": (lambda: _int4().zero_(), NotImplementedError, "quantise others, and copy_"),
    "a list to write": (
        lambda: torch._foreach_mul_([_int4()], 2.0), NotImplementedError, "values are not written",
    ),
    "fp64": (lambda: tmm_core.linear(X.double(), _int4()), RuntimeError, "with a quantised"),
    "complex": (
        lambda: tmm_core.linear(X.to(torch.complex64), _int4()), RuntimeError,
        "dtype of torch.float16, torch.bfloat16, torch.float32 with",
    ),
    "fp64 in groups": (
        lambda: tmm_core.grouped_linear(X.double(), made("int4", 3, 24, 256)[0], offs=OFFS),
        RuntimeError, "with a quantised",
    ),
    "vmap": (
        lambda: torch.vmap(lambda w: tmm_core.matmul(X, w.mT))(made("mxfp4", 3, 24, 256)[0]),
        NotImplementedError, "quantised tensor",
    ),
    "quantised weight": (lambda: tmm_core.quantize(_int4()), TypeError, "floating tensor"),
    "group and block": (
        lambda: tmm_core.quantize(torch.ones(4, 128), group=32, block=(1, 32)), ValueError,
        "or the block",
    ),
    "gptq's group": (lambda: _gptq(group=0), ValueError, "groups of 0 do not divide"),
    "gptq's other group": (lambda: _gptq(group=96), ValueError, "groups of 96 do not divide"),
    "gptq's version": (lambda: _gptq(version=3), ValueError, "version 1 or 2"),
    "gptq's words": (
        lambda: _gptq(qweight=torch.zeros(32, 24)), ValueError, "qweight must be int32",
    ),
    "gptq's scales": (
        lambda: _gptq(scales=torch.ones(24, 2, dtype=torch.float16)), ValueError, "scales must",
    ),
    "awq's group": (lambda: _awq(group=-2), ValueError, "groups of -2 do not divide"),
    "awq's words": (
        lambda: _awq(qzeros=torch.zeros(3, 2, dtype=torch.int32)), ValueError, "qzeros must be",
    ),
    "compressed-tensors' scales": (
        lambda: _compressed(weight_scale=torch.ones(24, 0)), ValueError, "weight_scale must be",
    ),
    "compressed-tensors' zeros": (
        lambda: _compressed(weight_zero_point=torch.zeros(24, 2, dtype=torch.int32)), ValueError,
        "weight_zero_point must be",
    ),
    "hqq's bytes": (lambda: _hqq(torch.zeros(48, 64)), ValueError, "W_q must be uint8"),
    "hqq's shape": (lambda: _hqq(shape=(24, 128)), ValueError, "W_q must be uint8 of 24 × 128"),
    "hqq's group": (lambda: _hqq(group_size=96), ValueError, "in groups of 96"),
    "hqq's scales": (lambda: _hqq(scale=torch.ones(95, 1)), ValueError, "one number per group"),
    "block-scaled fp8's scales": (
        lambda: Quantized.from_fp8(E4M3, torch.ones(2, 2).to(torch.float8_e4m3fn)), ValueError,
        "weight_scale_inv must be",
    ),
    "block-scaled fp8's integers": (
        lambda: Quantized.from_fp8(E4M3, torch.ones(2, 2).int()), ValueError, "weight_scale_inv",
    ),
    "gpt-oss's blocks": (
        lambda: Quantized.from_mxfp4(BYTES.view(24, 8, 16), torch.zeros(24, 4)), ValueError,
        "blocks must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_are_refused(case: str) -> None:
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call()


def test_zero_points_go_with_their_scales() -> None:
    """Scales of rows may lack the dimension along K. A plan takes only weights of its own
    format."""
    row = torch.rand(24, dtype=BF16)
    for scale, zero in ((row, row[:, None]), (row[:, None], row), (row, row)):
        own = _int4(scale, zero)
        assert own.zero is not None
        assert own.zero.shape == (24, 1)
    assert _int4(block=[1, 128]).block == (1, 128)
    signed = Quantized(BYTES, SCALE, format="int4_signed")
    with pytest.raises(ValueError, match="takes operands of formats ,int4/1x128"):
        tmm_core.plan(X, _int4().T)(X, signed.T)


def test_zero_points_of_rows_that_do_not_fill_a_word() -> None:
    words = torch.randint(0, 2**31 - 1, (2, 2), dtype=torch.int32)
    packed = torch.randint(0, 2**31 - 1, (12, 32), dtype=torch.int32)
    own = _compressed(weight_packed=packed, weight_scale=SCALE[:12], weight_zero_point=words)
    zero: Any = own.zero
    expected = [
        [(int(words[row // 8, g]) >> 4 * (row % 8)) & 15 for g in (0, 1)] for row in range(12)
    ]
    assert zero.tolist() == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_not_rounded_to_numbers(name: str, value: float) -> None:
    """It makes NaN of its group, and of no other."""
    weight = torch.ones(4, 256, dtype=BF16)
    weight[1, 3] = value
    group = max((g for r, g in formats.named(name).grids if r == 1 and g), default=256)
    found = tmm_core.quantize(weight, name).dequantize()
    assert found[1, :group].isnan().all()
    rest = torch.cat((found[:1], found[2:])).flatten()
    assert (rest == 1).all()
    assert (found[1, group:] == 1).all()


def test_small_weights_keep_their_digits() -> None:
    """Scales of 8 bits alone would round an ordinary layer's scales to zero."""
    weight = torch.randn(24, 256, dtype=BF16) * 2e-4
    for name in FORMATS:
        values = tmm_core.quantize(weight, name).dequantize()
        assert ((values - weight).norm() / weight.norm()) < 0.2
    assert tmm_core.quantize(weight[:, :0], group=0).shape == (24, 0)


PRODUCTS: dict[str, Callable[[Tensor, Quantized], Tensor]] = {
    "F.linear": F.linear,
    "@": lambda x, w: x @ w.t(),
    "torch.matmul": lambda x, w: torch.matmul(x, w.mT),
    "linear": tmm_core.linear,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.slow(quick=6)
def test_torchs_products_are_exported(name: str, product: str) -> None:
    """A weight is a parameter, or a constant that torch does not trace."""

    class Layer(nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return PRODUCTS[product](x, self.weight)

    weight, values = made(name, 16, 128)
    x = torch.randn(3, 128, dtype=weight.dtype)
    for held in (nn.Parameter(weight, requires_grad=False), weight):
        graph = torch.export.export(Layer(held), (x,))
        assert "dequantize" not in graph.graph_module.code
        torch.testing.assert_close(
            graph.module()(x).double(), x.double() @ values.t(), atol=0.2, rtol=5e-2
        )


CASTS: dict[str, Callable[[Quantized, Tensor], Tensor]] = {
    "to": lambda w, x: w.to(x.dtype),
    "float": lambda w, x: w.float(),
    "cpu": lambda w, x: w.cpu(),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # in torch's decompositions
@pytest.mark.parametrize("name", CASTS)
def test_programs_cast_a_parameter(name: str) -> None:
    """An exported program checks the dtype and device of what it casts."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(made("int8", 16, 128)[0], requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, CASTS[name](self.weight, x))  # type: ignore[arg-type]

    layer, x = Layer(), torch.randn(3, 128)
    if name == "cpu":
        x = x.to(layer.weight.dtype)
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.run_decompositions().module()(x), layer(x))
    program = exported.module()
    torch.testing.assert_close(program(x), layer(x))
    program.weight = nn.Parameter(layer.weight.half(), requires_grad=False)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        program(x)


def test_torchs_cache_of_graphs_knows_it_by_all_but_its_values() -> None:
    """Two tensors that differ in anything else have different graphs."""
    data = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
    scale, zero = torch.rand(32, 2), torch.ones(32, 2)

    def made(data: Tensor = data, scale: Tensor = scale, zero: Any = zero, **how: Any) -> Quantized:
        return Quantized(data, scale, zero, **{"format": "int4"} | how)

    with torch.inference_mode():
        frozen = made(data.clone())
    others = [
        made().t(), made().to(torch.float16), made().to("meta"), frozen, made(zero=None),
        made(data[:16], scale[:16], zero[:16]), made(data.t().contiguous().t()),
        made(scale=scale.t().contiguous().t()), made(scale=scale[:, :1], zero=zero[:, :1]),
        made(scale=scale.half(), zero=zero.half()), made(scale=scale.clone().requires_grad_()),
        made(data.view(torch.int8), zero=None, format="int4_signed"),
        made(data.view(torch.int8), scale[:, :1], None, format="int8"),
    ]  # fmt: skip
    texts = [each._stable_hash_for_caching() for each in (made(), *others)]
    assert len(set(texts)) == len(texts)
    assert made(data.clone(), scale + 1)._stable_hash_for_caching() == texts[0]


def test_a_compiled_graph_of_it_is_cached_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors, as here, torch's own would keep the graph from being cached."""
    from torch._dynamo.utils import counters
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler

    if not hasattr(AOTAutogradCachePickler, "_reduce_tensor_subclass"):
        pytest.skip("this torch asks no tensor for a text")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weight, values = made("int8", 32, 64)
    x = torch.randn(3, 64).to(weight.dtype)
    for found in ("miss", "hit"):
        torch.compiler.reset()
        counters.clear()
        y = torch.compile(F.linear, backend="inductor")(x, weight)
        assert counters["aot_autograd"][f"autograd_cache_{found}"] == 1
        torch.testing.assert_close(y.double(), x.double() @ values.t(), rtol=2e-2, atol=2e-1)
