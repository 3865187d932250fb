"""``tmm::matmul`` and ``tmm::gated_linear`` where torch traces, exports, counts and profiles."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import tmm_core
from tmm_core import dispatch
from tmm_core.epilogues import BUILTIN
from tmm_core.interop import grouped_operator, operator, outputs_operator
from tmm_core.nn import GatedMLP
from tmm_core.nn.gated_product import gated_linear
from tmm_core.spec.epilogue import Epilogue

Tensor = torch.Tensor

# torch's own: where it first differentiates forwards, and where it compiles and exports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]

CUBE = Epilogue("cube", lambda z: z**3, derivative=lambda z: 3 * z**2)


def randn(*shape: int, **kw: Any) -> Tensor:
    return torch.randn(shape, **kw)


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "plain": (randn(4, 5), randn(5, 6)),
    "vectors": (randn(5), randn(5)),
    "batched": (randn(2, 1, 4, 5), randn(3, 5, 6)),
    "folded": (randn(2, 4, 5), randn(5, 6), randn(6)),
    "transposed": (randn(5, 4).t(), randn(6, 5).t()),
    "everything": (randn(4, 5), randn(5, 6), randn(6), randn(4, 6), 0.5, "silu", None),
    "fused while training": (randn(4, 5), randn(5, 6), randn(6), randn(6), 0.5, "relu"),
    "gated": (randn(4, 5), randn(5, 6), randn(6), randn(4, 3), 1.0, "swiglu"),
    "wide": (randn(4, 5).bfloat16(), randn(5, 6).bfloat16(), None, None, 1.0, "", torch.float32),
    "empty": (randn(0, 5), randn(5, 6)),
    "no K": (randn(4, 0), randn(0, 6), randn(6), None, 1.0, "gelu"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch reads it
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.slow(quick=6)
def test_opcheck(signature: str, learns: bool) -> None:
    arguments = tuple(
        t.detach().clone().as_strided(t.shape, t.stride()).requires_grad_(learns)
        if isinstance(t, Tensor) else t
        for t in SIGNATURES[signature]
    )  # fmt: skip
    torch.library.opcheck(operator.matmul, arguments)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.slow(quick=6)
def test_opcheck_out(signature: str) -> None:
    arguments = SIGNATURES[signature]
    out = torch.empty_like(operator.matmul(*arguments))
    torch.library.opcheck(operator.matmul_out, arguments, {"out": out})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch reads it
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.slow(quick=6)
def test_opcheck_gated_linear(bias: bool, merged: bool, learns: bool) -> None:
    both, biases = randn(12, 5), randn(12)
    weights = (both[:6], both[6:]) if merged else (randn(6, 5), randn(6, 5))
    vectors = (biases[:6], biases[6:]) if bias else (None, None)
    x = randn(2, 4, 5).requires_grad_(learns)
    torch.library.opcheck(gated_linear, (x, *weights, *vectors, "swiglu"))


def test_gated_linear_has_derivatives_and_maps() -> None:
    x, gate, up = (
        randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 5), (4, 5), (4, 5))
    )

    def call(x: Any, gate: Any, up: Any) -> Tensor:
        return gated_linear(x, gate, up, None, None, "geglu")  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(call, (x, gate, up), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (x, gate, up))
    many = randn(7, 3, 5, dtype=torch.float64)
    expected = F.gelu(many @ gate.t()) * (many @ up.t())
    torch.testing.assert_close(torch.vmap(call, (0, None, None))(many, gate, up), expected)


# -- compiled ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "epilogue", [None, "relu", "gelu_tanh", "swiglu", pytest.param(CUBE, id="cube")]
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow(quick=10)
def test_a_compiled_training_step_is_eagers(epilogue: Any, dynamic: bool) -> None:
    torch._dynamo.reset()  # other cases' graphs are of the same code
    parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
    w, bias = randn(6, 7).requires_grad_(), randn(6).requires_grad_()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        y = tmm_core.linear(x, w, bias, epilogue=epilogue)
        return (y.square() * 0.5).mean()

    for m in (3, 8):
        x = randn(m, 7).requires_grad_()
        grads = torch.autograd.grad(step(x), (x, w, bias))
        loss = (parsed.apply(F.linear(x, w, bias)).square() * 0.5).mean()
        torch.testing.assert_close(grads, torch.autograd.grad(loss, (x, w, bias)))


def graphs_of(call: Any, *arguments: Any) -> list[str]:
    """The operators in the graphs, forward and backward, that AOTAutograd makes of a call."""
    seen: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        seen.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    from functorch.compile import aot_function, make_boxed_func

    def boxed(graph: Any, arguments: Any) -> Any:
        return make_boxed_func(keep(graph, arguments))

    aot_function(call, fw_compiler=boxed, bw_compiler=boxed)(*arguments).sum().backward()
    return seen


def test_compiled_backward_multiplies_by_the_operator_and_nothing_twice() -> None:
    x, w = randn(3, 7).requires_grad_(), randn(7, 6).requires_grad_()
    for epilogue in ("relu", "silu"):
        forward, backward = graphs_of(
            lambda x, w, e=epilogue: tmm_core.matmul(x, w, epilogue=e), x, w
        )
        assert forward.count("tmm.matmul") == 1
        assert backward.count("tmm.matmul") == 2
        assert "aten.mm" not in forward + backward
        # If the output determines the derivative, the kernel computes the epilogue.
        assert ("aten.silu" in forward) is (epilogue == "silu")
        assert "aten.relu" not in forward


@pytest.mark.parametrize("shape", [(4,), (1, 4), "rows"], ids=str)
def test_sizes_known_at_run_time_broadcast(shape: Any) -> None:
    """The residual is of one row, or of as many as the mask leaves."""
    x, w = randn(6, 5).requires_grad_(), randn(5, 4)
    residual = randn(6, 4) if shape == "rows" else randn(*shape)
    residual = residual.requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True])

    def call(x: Tensor, residual: Tensor) -> Tensor:
        rows = residual[mask] if shape == "rows" else residual
        return tmm_core.matmul(x[mask], w, residual=rows)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        y, expected = compiled(x, residual), call(x, residual)
    torch.testing.assert_close(y, expected)
    for got, right in zip(
        *(torch.autograd.grad(t.square().sum(), (x, residual)) for t in (y, expected)), strict=True
    ):
        torch.testing.assert_close(got, right)


def test_a_graph_follows_the_closure_variables_of_its_epilogue() -> None:
    most = 1.0

    def clipped(z: torch.Tensor) -> torch.Tensor:
        return z.clamp(max=most)

    own = Epilogue("clipped", clipped)
    ones = torch.ones(2, 2)
    torch._dynamo.reset()  # of this code
    call = torch.compile(lambda: tmm_core.matmul(ones, ones, epilogue=own), backend="eager")
    for most in (1.0, 0.5, 1.0):
        assert torch.equal(call(), most * ones)


def test_compiled_transforms() -> None:
    a, b = randn(3, 4), randn(4, 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def gradient(a: Tensor, b: Tensor) -> Tensor:
        return torch.func.grad(lambda a: tmm_core.matmul(a, b, epilogue="tanh").sum())(a)

    expected = torch.func.grad(lambda a: torch.tanh(a @ b).sum())(a)
    torch.testing.assert_close(gradient(a, b), expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def mapped(a: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(lambda v: tmm_core.matmul(v, b, epilogue="tanh"))(a)

    torch.testing.assert_close(mapped(a, b), torch.tanh(a @ b))


def test_compiled_with_out() -> None:
    a, b, out = randn(3, 4), randn(4, 5), torch.full((3, 5), float("nan"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return tmm_core.matmul(a, b, epilogue="relu", out=out) * 2

    torch.testing.assert_close(call(a, b, out), 2 * torch.relu(a @ b))
    torch.testing.assert_close(out, torch.relu(a @ b))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(randn(8, 8))
        self.mlp = GatedMLP(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = tmm_core.matmul(x, self.w, residual=x, epilogue="gelu")
        return x + self.mlp(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.slow
def test_export_keeps_the_operators(strict: bool, learns: bool) -> None:
    block = Block().requires_grad_(learns)
    x = randn(4, 8)
    batch = torch.export.Dim("batch", min=2, max=1024)
    exported = torch.export.export(block, (x,), dynamic_shapes=({0: batch},), strict=strict)

    def operators(program: Any) -> list[str]:
        return [str(node.target) for node in program.graph.nodes]

    for program in (exported, exported.run_decompositions({})):
        kept = operators(program)
        assert "tmm.matmul.default" in kept
        assert not any("aten.matmul" in name or "aten.mm" in name for name in kept)
        with torch.no_grad():
            for rows in (4, 2, 37):
                x = randn(rows, 8)
                torch.testing.assert_close(program.module()(x), block(x))
    assert ("tmm.gated_linear.default" in operators(exported)) is not learns


# -- counted and profiled ----------------------------------------------------------------


def flops(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_flops_of_every_call() -> None:
    a, b = randn(4, 5).requires_grad_(), randn(5, 6).requires_grad_()
    once = 2 * 4 * 5 * 6
    with torch.no_grad():
        assert flops(lambda: tmm_core.matmul(a, b, epilogue="silu")) == once
        assert flops(lambda: tmm_core.matmul(a, b, out=torch.empty(4, 6))) == once
        assert flops(lambda: tmm_core.matmul(a[0], b[:, 0])) == 2 * 5
        mlp, x = GatedMLP(8, 12), randn(2, 3, 8)
        both = (mlp.gate_proj.weight, mlp.up_proj.weight)
        assert flops(lambda: gated_linear(x, *both, None, None, "swiglu")) == 2 * 6 * 8 * 24
        assert flops(lambda: mlp(x)) == 2 * 6 * 8 * (24 + 12)
    for epilogue in ("relu", "silu", "swiglu"):
        # Backward's two products, and no product computed again.
        step = lambda e=epilogue: tmm_core.matmul(a, b, epilogue=e).sum().backward()  # noqa: E731
        assert flops(step) == 3 * once
    assert flops(lambda: mlp(x).sum().backward()) > 0


def test_the_profiler_shows_the_kernel() -> None:
    a, b = randn(4, 5), randn(5, 6)
    tmm_core.matmul(a, b)
    with torch.profiler.profile(acc_events=True) as profile:
        tmm_core.matmul(a, b)
        tmm_core.matmul(a, b, epilogue="silu")
    (plain, fused) = (e for e in profile.events() if e.name == "tmm::matmul")
    for event in (plain, fused):
        assert "blas" in {child.name for child in event.cpu_children}
    with torch.profiler.profile(acc_events=True) as profile:
        pass
    assert not [e for e in profile.events() if e.name == "blas"]


DIRECT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "matmul": (operator.matmul, (randn(4, 5), randn(5, 6), None, None, 0.5, "silu")),
    "grouped": (
        grouped_operator.grouped_matmul,
        (randn(4, 5), randn(2, 5, 6), torch.tensor([1, 4], dtype=torch.int32)),
    ),
    "outputs": (
        outputs_operator._operator, (randn(4, 5), randn(5, 6), None, None, 1.0, "quantize")
    ),
}  # fmt: skip
#: The kernels of torch's Autograd key, in Python.
DISPATCHED = {("autograd.py", "matmul"), ("grouped_operator.py", "_differentiable")}
DISPATCHED |= {("libraries.py", "rule")}


@pytest.mark.parametrize("name", DIRECT)
def test_a_call_without_gradients_skips_the_dispatcher(name: str) -> None:
    op, given = DIRECT[name]

    def dispatched(*given: Any) -> bool:
        ran = set()

        def note(frame: Any, *_: Any) -> None:
            ran.add((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name))

        sys.setprofile(note)
        try:
            op(*given)
        finally:
            sys.setprofile(None)
        return not ran.isdisjoint(DISPATCHED)

    learning = given[0].clone().requires_grad_(), *given[1:]
    op(*given)
    assert not dispatched(*given)
    assert dispatched(*learning)
    with torch.no_grad():
        assert not dispatched(*learning)


TENSOR = randn(5, 5)
MISTAKEN = {
    "nothing": ((), {}),
    "one operand": ((TENSOR,), {}),
    "a list": ((TENSOR, [1.0]), {}),
    "a text for a bias": ((TENSOR, TENSOR, "bias"), {}),
    "a text for alpha": ((TENSOR, TENSOR, None, None, "1"), {}),
    "a number for the epilogue": ((TENSOR, TENSOR, None, None, 1.0, 1), {}),
    "one argument too many": ((TENSOR, TENSOR, *[None] * 2, 1.0, "", *[None] * 5, "", 1), {}),
    "an unknown name": ((TENSOR, TENSOR), {"gamma": 1.0}),
}


@pytest.mark.parametrize("mistake", MISTAKEN)
def test_mistaken_arguments_of_the_operator_get_an_error_of_torch(mistake: str) -> None:
    given, named = MISTAKEN[mistake]
    with pytest.raises(RuntimeError, match="tmm::matmul"):
        operator.matmul(*given, **named)


def test_an_operator_takes_numbers_as_torch_does() -> None:
    a, b = randn(4, 5), randn(5, 6)
    for alpha in (3, 3.0, True):
        torch.testing.assert_close(operator.matmul(a, b, None, None, alpha), float(alpha) * (a @ b))
    torch.testing.assert_close(operator.matmul(b=b, a=a, epilogue="relu"), F.relu(a @ b))


def test_deterministic_algorithms_choose_by_trait() -> None:
    from fakes import FakeKernel, plugin

    loose = FakeKernel(
        "test.loose", traits=tmm_core.Traits(deterministic=False), spoil=lambda out: out + 1
    )
    dispatch.default_dispatcher().registry.register(plugin(loose), "loose")
    a, b = randn(4, 5), randn(5, 6)
    with tmm_core.override(kernel="test.loose", verify=False):
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b + 1)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(tmm_core.UnsupportedProblemError, match="not deterministic"):
                tmm_core.matmul(a, b)
        finally:
            torch.use_deterministic_algorithms(False)
        # A plan chosen before is not taken where it may not be, nor forgotten.
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b + 1)


def test_every_builtin_epilogue_goes_through_make_fx() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    for name, epilogue in BUILTIN.items():
        b = randn(5, 6)
        call = functools.partial(tmm_core.matmul, b=b, epilogue=name)
        graph = make_fx(call)(randn(4, 5))
        assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [operator.matmul]
        a = randn(4, 5)
        torch.testing.assert_close(graph(a), epilogue.apply(a @ b))


REPEATED = {
    "interop.operator": lambda: tmm_core.matmul(randn(3, 4), randn(4, 5)),
    "interop.grouped_operator": lambda: tmm_core.grouped_matmul(
        randn(3, 4), randn(2, 4, 5), offs=torch.tensor([1, 3], dtype=torch.int32)
    ),
    "interop.outputs_operator": lambda: tmm_core.matmul(
        randn(3, 4), randn(4, 5), epilogue="quantize"
    ),
    "interop.row_quantization": lambda: torch.ops.tmm.quantize_rows(randn(3, 4), 0),
    "nn.gated_product": lambda: torch.ops.tmm.gated_linear(
        randn(3, 4), randn(5, 4), randn(5, 4), None, None, "swiglu"
    ),
}


def test_a_compiler_may_be_limited_to_tagged_operators() -> None:
    for name in REPEATED:
        importlib.import_module(f"tmm_core.{name}")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tmm::")]
    assert {"tmm::matmul", "tmm::matmul.out", "tmm::gated_linear", "tmm::joint_linear"} <= {*names}
    for name in names:
        packet, _, overload = name.removeprefix("tmm::").partition(".")
        tags = getattr(getattr(torch.ops.tmm, packet), overload or "default").tags
        assert torch.Tag.pt2_compliant_tag in tags, name


def test_interrupted_imports_can_be_repeated() -> None:
    """A traceback of the interruption may keep what the first import has registered."""
    names = [f"tmm_core.{module}" for module in REPEATED]
    kept = [importlib.import_module(name) for name in names]
    read, write = os.pipe()
    child = os.fork()  # this process keeps its operators
    if child == 0:
        found = "it ended"
        try:
            for name, first, call in zip(names, kept, REPEATED.values(), strict=True):
                found = name
                del sys.modules[name]
                assert importlib.import_module(name) is not first
                call()
            found = "works"
        finally:
            os.write(write, found.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "works"
    os.waitpid(child, 0)
