"""The pass over compiled graphs, on a CPU with Inductor's own stages and its C++."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import (
    FakeBlas,
    FakeKernel,
    dispatcher,
    installed,
    problem,
    tuned_with_steady_times,
)
from torch import nn

import tmm_core
from tmm_core import Candidate, dispatch
from tmm_core.dispatch import saving
from tmm_core.interop import inductor
from tmm_core.interop.inductor import PASSES, Rewrite
from tmm_core.launch.plan import Choice

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Online softmax:UserWarning"),
]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


class Seen(Rewrite):
    """The pass, and the graph that it left, which is run without further compilation."""

    def __init__(self, when: Any = "always") -> None:
        super().__init__(when)
        self.calls: list[list[str]] = []
        self.epilogues: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        graph.lint()
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        self.calls.append([str(node.target) for node in nodes])
        self.epilogues += [node.args[5] for node in nodes if node.target is MATMUL]


MATMUL = torch.ops.tmm.matmul.default
OPTION = Rewrite.option


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    installed(FakeBlas())
    yield
    torch._dynamo.reset()


def passed(function: Callable[..., Any], *inputs: Tensor, seen: Seen | None = None) -> Any:
    """The result of a function whose graphs went through Inductor's stages up to the pass. They are
    run without further compilation, because compiling C++ would take seconds for each."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    seen = seen or Seen()

    def compile_graph(gm: Any, example: Any) -> Any:
        view_to_reshape(gm)
        seen(gm.graph)
        gm.recompile()
        return make_boxed_func(gm)

    backend = aot_autograd(fw_compiler=compile_graph, decompositions=select_decomp_table())
    return torch.compile(function, backend=backend, dynamic=False)(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.slow(quick=8)
def test_a_layer_becomes_one_call(
    name: str, dtype: torch.dtype, residual: bool, bias: bool
) -> None:
    layer = nn.Linear(24, 40, bias=bias).to(dtype)
    x, r = torch.randn(3, 5, 24).to(dtype), torch.randn(3, 5, 40).to(dtype)

    def model(x: Tensor, r: Tensor) -> Tensor:
        y = ACTIVATIONS[name](layer(x))
        return r + y if residual else y

    seen = Seen()
    with torch.no_grad():
        y = passed(model, x, r, seen=seen)
        assert seen.epilogues == [name]
        (calls,) = seen.calls
        assert not {c for c in calls if "reshape" not in c and "permute" not in c} - {str(MATMUL)}
        expected = model_in_double(layer, x, r, name, residual)
    assert (y.shape, y.dtype) == ((3, 5, 40), dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def model_in_double(layer: Any, x: Tensor, r: Tensor, name: str, residual: bool) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    y = ACTIVATIONS[name](F.linear(x.double(), layer.weight.double(), bias))
    return y + r.double() if residual else y


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "reglu": torch.relu,
}
#: Ways in which models cut the columns of gate and up.
CUTS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda z: z.chunk(2, dim=-1),
    "split": lambda z: z.split([z.shape[-1] // 2] * 2, dim=-1),
    "slices": lambda z: (z[..., : z.shape[-1] // 2], z[..., z.shape[-1] // 2 :]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [(3, 5), (5,)])
@pytest.mark.slow(quick=10)
def test_a_gated_layer_becomes_one_call(
    name: str, dtype: torch.dtype, cut: str, residual: bool, rows: tuple[int, ...]
) -> None:
    layer = nn.Linear(24, 80, bias=residual).to(dtype)
    x, r = torch.randn(*rows, 24).to(dtype), torch.randn(*rows, 40).to(dtype)

    def model(layer: Any, x: Tensor, r: Tensor) -> Tensor:
        gate, up = CUTS[cut](layer(x))
        y = GATES[name](gate) * up
        return r + y if residual else y

    seen = Seen()
    with torch.no_grad():
        y = passed(lambda x, r: model(layer, x, r), x, r, seen=seen)
        expected = model(copy.deepcopy(layer).double(), x.double(), r.double())
    assert seen.epilogues == [name]
    (calls,) = seen.calls
    assert not {c for c in calls if "reshape" not in c and "permute" not in c} - {str(MATMUL)}
    assert (y.shape, y.dtype) == ((*rows, 40), dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_logits_become_one_call(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 5, 24).to(dtype), (9 * torch.randn(24, 40)).to(dtype)
    seen = Seen()
    with torch.no_grad():
        y = passed(lambda a, b: torch.tanh((a @ b) / 30) * 30, a, b, seen=seen)
    assert seen.epilogues == ["softcap(30.0)"]
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    expected = torch.tanh((a.double() @ b.double()) / 30) * 30
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=20 * tolerance)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize(
    "model",
    [
        lambda z: torch.tanh(z / 30) * 20,
        lambda z: torch.tanh(z / -30) * -30,
        lambda z: z[:, :20] * F.silu(z[:, 20:]),  # the other half is the gate
        lambda z: F.silu(z[:, :10]) * z[:, 10:20],  # not all columns
        lambda z: F.silu(z[:, 0::2]) * z[:, 1::2],
        lambda z: _gated(z.chunk(2, 1)[0], z.chunk(2, 1)[0]),
        lambda z: F.silu(z.chunk(2, 1)[0]) + z.chunk(2, 1)[1],
        lambda z: torch.tanh(z.chunk(2, 1)[0]) * z.chunk(2, 1)[1],  # no such epilogue
        lambda z: F.silu(z[:3]) * z[3:],  # rows
        lambda z: _gated(*z.chunk(2, 1)) + z.chunk(2, 1)[0],
        lambda z: _gated(*z.chunk(2, 1)) + z.chunk(2, 1)[1],
        *(lambda z, n=n: (lambda half: _gated(*half) + half[n])(z.chunk(2, 1)) for n in (0, 1)),
        lambda z: _gated(*z.view(6, 4, 10).chunk(2, 2)),  # other columns
        lambda z: _gated(*z.view(3, 80)[:, :40].split(20, 1)),
        lambda z: [_gated(y[:, :20], y[:, 20:40]) for y in (z.view(3, 80),)].pop(),
    ],
)
@pytest.mark.slow(quick=6)
def test_a_graph_that_resembles_a_gate_keeps_its_meaning(model: Any) -> None:
    a, b = torch.randn(6, 7), torch.randn(7, 40)
    seen = Seen()
    with torch.no_grad():
        y = passed(lambda a, b: model(a @ b), a, b, seen=seen)
    assert seen.epilogues == [""]
    torch.testing.assert_close(y, model(a @ b))


def test_halves_of_the_rows_are_not_a_gate() -> None:
    a, b, seen = torch.randn(40, 7), torch.randn(7, 40), Seen()

    def model(a: Tensor, b: Tensor) -> Tensor:
        return _gated(*(a @ b).chunk(2, dim=0))

    with torch.no_grad():
        y = passed(model, a, b, seen=seen)
    assert seen.epilogues == [""]
    torch.testing.assert_close(y, model(a, b))


def test_batches_and_matrices() -> None:
    a, b, r = torch.randn(3, 5, 7), torch.randn(3, 7, 4), torch.randn(3, 5, 4)
    seen = Seen()
    with torch.no_grad():
        y = passed(lambda a, b, r: F.silu(torch.bmm(a, b)) + r, a, b, r, seen=seen)
        assert seen.epilogues == ["silu"]
        torch.testing.assert_close(y, F.silu(a @ b) + r)
        y = passed(lambda a, b, r: torch.addmm(r, a, b, alpha=0.5), a[0], b[0], r[0], seen=seen)
        assert seen.epilogues == ["silu", ""]
        torch.testing.assert_close(y, r[0] + 0.5 * (a[0] @ b[0]))


def test_silu_may_be_computed_from_the_sigmoid() -> None:
    """Torch 2.10 does, and so do models that define it."""
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)

    def model(x: Tensor) -> Tensor:
        z = layer(x)
        return torch.sigmoid(z) * z

    def both(x: Tensor) -> Any:
        z = layer(x)
        s = torch.sigmoid(z)
        return s * z, s

    for function, found in ((model, ["silu"]), (both, [""])):
        seen = Seen()
        with torch.no_grad():
            torch.testing.assert_close(passed(function, x, seen=seen), function(x))
        assert seen.epilogues == found
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda z: 0.5 * z * (1 + torch.erf(z / 2**0.5)), "gelu"),
        (lambda z: torch.tanh(0.5 * z) * 0.5 + 0.5, "sigmoid"),
        (lambda z: z * torch.sigmoid(2000 * z), ""),
        (lambda z: torch.tanh(z / 1e-4) * 1e-3, ""),
        (lambda z: z * 1e-20, ""),
        (lambda z: torch.tanh(z / 1e-39) * 1e-39, ""),  # a cap below fp32's normal numbers
        (lambda z: torch.tanh(z * z), ""),
    ],
)
def test_activations_are_recognised_by_their_values(model: Any, found: str) -> None:
    a, b, seen = torch.randn(5, 7), torch.randn(7, 4), Seen()
    with torch.no_grad():
        y = passed(lambda a, b: model(a @ b), a, b, seen=seen)
    assert seen.epilogues == [found]
    torch.testing.assert_close(y, model(a @ b))


def test_an_inner_value_that_is_read_elsewhere_is_kept() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 4)
    seen = Seen()

    def model(a: Tensor, b: Tensor) -> Any:
        z = a @ b
        return z, F.silu(z)

    with torch.no_grad():
        z, y = passed(model, a, b, seen=seen)
    assert seen.epilogues == [""]
    torch.testing.assert_close((z, y), model(a, b))


@pytest.mark.parametrize(
    "model",
    [
        lambda a, b, r: torch.addmm(r, a, b, beta=0.5),
        lambda a, b, r: torch.addmm(r, a / 0, b, alpha=0),
        lambda a, b, r: (a.double() @ b.double()).float(),
        lambda a, b, r: F.silu(torch.addmm(r, a, b)),
        lambda a, b, r: a @ b + r[:1],
        lambda a, b, r: torch.add(a @ b, r, alpha=2),
        lambda a, b, r: F.leaky_relu(a @ b),
        lambda a, b, r: (a @ b) * torch.sigmoid(r),
        lambda a, b, r: (a @ b) + (a @ b),
        lambda a, b, r: torch.relu(a @ b).t() + r.t(),
        lambda a, b, r: F.silu((a @ b).to(torch.float64)),
        lambda a, b, r: a[:0] @ b,
    ],
)
def test_other_expressions_keep_their_meaning(model: Any) -> None:
    a, b, r = torch.randn(5, 7), torch.randn(7, 4), torch.randn(5, 4)
    with torch.no_grad():
        y = passed(model, a, b, r)
    torch.testing.assert_close(y, model(a, b, r), equal_nan=True)


@pytest.mark.parametrize("shape", [(1,), (), (1, 1), (1, 4), (5, 1), (4,)])
@pytest.mark.slow(quick=4)
def test_a_summand_may_broadcast(shape: tuple[int, ...]) -> None:
    """One number for each column is a bias; other summands are added as a residual, which comes
    after an activation."""
    a, b, c = torch.randn(5, 7), torch.randn(7, 4), torch.randn(shape)
    seen = Seen()
    with torch.no_grad():
        y = passed(torch.addmm, c, a, b, seen=seen)
        z = passed(lambda c, a, b: torch.relu(torch.addmm(c, a, b)), c, a, b, seen=seen)
    assert seen.epilogues == ["", "relu"][: 2 if shape == (4,) else 1]
    torch.testing.assert_close(y, torch.addmm(c, a, b))
    torch.testing.assert_close(z, torch.relu(torch.addmm(c, a, b)))


@pytest.mark.parametrize("columns", [False, True])
def test_a_sum_keeps_its_memory_layout(columns: bool) -> None:
    """A residual in columns, given first, makes torch's sum one in columns."""
    a, b, r = torch.randn(5, 7), torch.randn(7, 4), torch.randn(5, 4)
    if columns:
        r = r.T.contiguous().T

    def model(a: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return r + torch.relu(a @ b)

    seen = Seen()
    with torch.no_grad():
        y = passed(model, a, b, r, seen=seen)
    torch.testing.assert_close(y, model(a, b, r))
    assert y.stride() == model(a, b, r).stride()
    (calls,) = seen.calls
    assert ("aten.add.Tensor" in calls) is columns


@pytest.mark.parametrize("module", ["tails.tails", "shared_input.groups"])
def test_a_search_that_fails_leaves_the_rest_of_the_graph(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise ValueError("no")
        yield

    a, b = torch.randn(5, 7), torch.randn(7, 4)
    monkeypatch.setattr(f"tmm_core.interop.inductor.{module}", fail)
    with torch.no_grad(), pytest.warns(tmm_core.TmmWarning, match="keeps the rest .* no$"):
        y = passed(torch.matmul, a, b)
    torch.testing.assert_close(y, a @ b)


def test_a_call_that_fails_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise ValueError("no")

    a, b = torch.randn(5, 7), torch.randn(7, 4)
    seen = Seen()
    monkeypatch.setattr(inductor.operator, "matmul", fail)
    with torch.no_grad(), pytest.warns(tmm_core.TmmWarning, match="keeps mm: .* ValueError: no"):
        y = passed(torch.mm, a, b, seen=seen)
    assert seen.calls == [["aten.mm.default"]]
    torch.testing.assert_close(y, a @ b)


CHOSEN = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    "model",
    [
        lambda a, b, r: torch.relu(a @ b),
        lambda a, b, r: torch.relu(a @ b) + r[:1],
        lambda a, b, r: torch.relu(a @ b) + r[:1].sum(1, keepdim=True),
        lambda a, b, r: torch.addmm(r[0, :1], a[:2], b[:, CHOSEN]),
        lambda a, b, r: torch.addmm(r[0], a, b),
        lambda a, b, r: torch.addmm(r[:, CHOSEN][0], r[:, :1], r[:1, CHOSEN]) + r[:, :1],
        lambda a, b, r: F.silu(a @ b) * (a @ -b),
    ],
)
@pytest.mark.slow(quick=6)
def test_sizes_that_depend_on_data_are_kept(model: Any) -> None:
    """Such a size cannot be compared: there is neither an error nor a warning."""
    a, b, r = torch.randn(5, 7), torch.randn(7, 4), torch.randn(5, 4)

    def chosen(a: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return model(a[a[:, 0] > 0], b, r)  # type: ignore[no-any-return]

    a[::2, 0] = 1.0
    seen = Seen()
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(passed(chosen, a, b, r, seen=seen), chosen(a, b, r))
    (calls,) = seen.calls
    assert any("sym_size" in name for name in calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.slow(quick=6)
def test_training(name: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(24, 40).to(dtype)
    x = torch.randn(3, 5, 24, dtype=dtype, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        return ACTIVATIONS[name](layer(x)) + 1

    inputs = (x, *layer.parameters())
    seen = Seen()
    got = torch.autograd.grad(passed(model, x, seen=seen).square().sum(), inputs)
    expected = torch.autograd.grad(model(x).square().sum(), inputs)
    torch.testing.assert_close(got, expected)
    assert len(seen.calls) == 2
    # Forward fuses what backward does not need the product for; backward has two products.
    fused = name in ("relu", "tanh", "sigmoid")
    assert seen.epilogues == [name if fused else "", "", ""]


# -- where records say that it pays ----------------------------------------------------------------


def recorded(times: dict[str, float], *epilogues: str | None) -> tuple[Tensor, Tensor]:
    """Records of the products of two matrices with each epilogue."""
    dispatch.default_dispatcher.made, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times)
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    for epilogue in epilogues:
        tmm_core.tune(tmm_core.problem(a, b, epilogue=epilogue))
    return a, b


@pytest.mark.parametrize(("fast", "rewritten"), [(4.0, True), (20.0, False)])
def test_records_decide(fast: float, rewritten: bool) -> None:
    a, b = recorded({"blas": 10.0, "fast": fast}, "silu")
    seen = Seen("records")
    with torch.no_grad():
        passed(lambda a, b: F.silu(a @ b), a, b, seen=seen)
    assert seen.epilogues == (["silu"] if rewritten else [])


@pytest.mark.parametrize("epilogue", [None, "silu"])
def test_a_kernel_that_loses_in_steady_state_rewrites_no_graph(epilogue: str | None) -> None:
    a, b = recorded({"blas": 10.0, "fast": 4.0}, epilogue)
    instance = tmm_core.problem(a, b, epilogue=epilogue)
    for steady_us, rewritten in ((10.1, False), (9.9, True)):
        tuned_with_steady_times(instance, {"blas": 10.0, "fast": steady_us})
        seen = Seen("records")
        with torch.no_grad():
            passed(lambda a, b: F.silu(a @ b) if epilogue else a @ b, a, b, seen=seen)
        assert bool(seen.epilogues) is rewritten


# A pass that reads gate and up and writes one half takes 9.3 µs on the CPU as tmm knows it.
@pytest.mark.parametrize(
    ("fast", "alone_us", "rewritten"),
    [(30.0, 23.0, 1), (30.0, 19.0, 0), (60.0, 40.0, 0), (30.0, 20.8, 0)],
)
def test_records_decide_about_gates(
    fast: float, alone_us: float, rewritten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole is compared with BLAS's product of all columns and a pass over them."""
    a, b = recorded({"blas": 40.0, "fast": fast}, "swiglu", None)
    calls: list[tuple[int, str]] = []
    times = saving.record_times

    def record_times(host: Any, problem: Any, candidate: Any = None) -> float | None:
        calls.append((problem.n, problem.epilogue.name))
        return alone_us if candidate is None else times(host, problem, candidate)

    monkeypatch.setattr(saving, "record_times", record_times)
    seen = Seen("records")
    with torch.no_grad():
        passed(lambda a, b: _gated(*(a @ b).chunk(2, 1)), a, b, seen=seen)
    assert seen.epilogues == ["swiglu"] * rewritten
    assert inductor.alone_of(tmm_core.problem(a, b, epilogue="swiglu")) == tmm_core.problem(a, b)
    if fast < 40.0:
        assert calls == [(32, "swiglu"), (64, "identity")]


def test_without_a_record_nothing_is_rewritten() -> None:
    installed(FakeBlas(estimate=100.0), FakeKernel("fast", estimate=1.0))
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    seen = Seen("records")
    with torch.no_grad():
        passed(lambda a, b: F.silu(a @ b), a, b, seen=seen)
    assert seen.epilogues == []


# -- through torch.compile -------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_with_varying_rows_and_the_cache_of_graphs(
    tmp_path: Any, monkeypatch: Any
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first, second = nn.Linear(24, 32), nn.Linear(32, 80)

    def model(x: Tensor, r: Tensor) -> Tensor:
        gate, up = second(F.silu(first(x))).chunk(2, dim=-1)
        return r + F.gelu(gate) * up

    def check(m: int) -> None:
        x, r = torch.randn(2, m, 24), torch.randn(2, m, 40)
        torch.testing.assert_close(compiled(x, r), model(x, r))

    options = tmm_core.inductor_options(when="always")
    with torch.no_grad():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(model, dynamic=True, options=options)
            for m in (5, 7, 16):
                check(m)
            assert counters["inductor"]["fxgraph_cache_hit"] == hits
    code = "".join(p.read_text() for p in tmp_path.rglob("*.py"))
    assert "tmm" in code
    assert "'geglu'" in code


class Gated(nn.Module):
    """Gate and up of one weight, and a cap of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(40, 96), nn.Linear(48, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return torch.tanh(self.down(F.silu(gate) * up) / 3.0) * 3.0


def _mlp() -> tuple[nn.Module, Tensor]:
    layers = nn.Linear(24, 40), nn.SiLU(), Gated()
    return nn.Sequential(*layers).eval(), torch.randn(5, 24)


@pytest.mark.slow
def test_wrappers_in_cpp() -> None:
    model, x = _mlp()
    options = tmm_core.inductor_options(when="always", cpp_wrapper=True)
    compiled = torch.compile(model, options=options)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
        with torch.profiler.profile() as profile:
            compiled(x)
    assert sum(event.count for event in profile.key_averages() if event.key == "tmm::matmul") == 3


LOAD = """
import sys, torch
if sys.argv[2] == "with":
    import tmm_core
package = torch._inductor.aoti_load_package(sys.argv[1])
print(package(torch.ones(5, 24)).sum().item())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")  # torch's
def test_a_package_runs_where_tmm_is_imported(tmp_path: Path) -> None:
    model, x = _mlp()
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs=tmm_core.inductor_options(when="always"),
        )
        expected = float(model(torch.ones(5, 24)).sum())
    for way in ("with", "without"):
        command = [sys.executable, "-W", "ignore", "-c", LOAD, path, way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if way == "with":
            assert done.returncode == 0, done.stderr
            assert float(done.stdout) == pytest.approx(expected, rel=1e-4)
        else:
            assert done.returncode != 0
            assert "tmm" in done.stderr


def test_enable_sets_and_unsets_the_pass() -> None:
    config = tmm_core.compat.inductor_config()
    other = Rewrite("always")

    def set_() -> list[type]:
        return [type(getattr(config, kind.option)) for kind in PASSES]

    assert set_() == [type(None)] * 2
    with tmm_core.enable(compile=True, _key="CPU"):
        assert set_() == list(PASSES)
        with tmm_core.enable(compile=True, _key="CPU"):
            assert set_() == list(PASSES)
        assert set_() == list(PASSES)
    assert set_() == [type(None)] * 2
    assert other.uuid() is not None


def test_a_pass_that_is_set_runs_first() -> None:
    ran: list[str] = []

    class First(tmm_core.compat.graph_pass()):  # type: ignore[misc]  # a class of torch
        def __call__(self, graph: Any) -> None:
            ran.append("first")

        def uuid(self) -> str | None:
            return key

    key: str | None = "first"
    options = tmm_core.inductor_options(**{OPTION: First()}, max_autotune=False)
    own = options[OPTION]
    assert options["max_autotune"] is False
    own(torch.fx.Graph())
    assert ran == ["first"]
    assert own.uuid() == Rewrite("records", First()).uuid() != Rewrite("records").uuid()
    assert Rewrite("always").uuid() != Rewrite("records").uuid()
    key = None
    assert own.uuid() is None
    with pytest.raises(ValueError, match="when must be"):
        tmm_core.inductor_options(when="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("earlier", [0, 1, 2])
@pytest.mark.parametrize("listed", [False, True])
def test_disable_restores_torchs_passes(earlier: int, listed: bool) -> None:
    config: Any = tmm_core.compat.inductor_config()
    passes = [len, str][:earlier]  # of another library
    before: Any = passes if listed or earlier > 1 else passes[0] if passes else None
    with config.patch(dict.fromkeys((kind.option for kind in PASSES), before)):
        assert not inductor.is_installed()
        for _ in range(2):
            inductor.install()
            assert inductor.is_installed()
            for kind in PASSES:
                assert getattr(config, kind.option).before == passes
                assert kind("records", tuple(passes)).before == passes
        for _ in range(2):
            inductor.uninstall()
            assert not inductor.is_installed()
            for kind in PASSES:
                left = getattr(config, kind.option)
                assert left == (passes if earlier > 1 else passes[0] if passes else before or None)


def test_the_key_changes_with_the_records() -> None:
    recorded({"blas": 10.0, "fast": 4.0})
    before = Rewrite("records").uuid()
    assert Rewrite("records").uuid() == before
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    tmm_core.tune(tmm_core.problem(a, b))
    assert Rewrite("records").uuid() != before


@pytest.mark.parametrize("what", ["layer", "lock file", "setting", "kernel", "failing kernel"])
def test_the_key_changes_with_all_that_decides_a_choice(what: str, tmp_path: Path) -> None:
    """Another process would go on with a graph for which this one had no record, or no kernel."""
    recorded({"blas": 10.0, "fast": 4.0})
    chooser = dispatch.default_dispatcher()
    store = chooser.store
    store.layers, store.locked = (tmp_path / "layer",), what == "lock file"
    store.lock_path = tmp_path / "tmm.lock"
    before, always = (Rewrite(when).uuid() for when in ("records", "always"))
    assert Rewrite("records").uuid() == before
    if what == "layer":
        store.layers[0].mkdir()
        (store.layers[0] / "record.json").write_text("{}")
    elif what == "lock file":
        store.lock_path.write_text("{}")
    elif what == "failing kernel":
        kernel = chooser.registry.kernel("fast")
        chosen = Choice(Candidate(kernel, kernel.config_type()), "cache")
        with pytest.warns(tmm_core.TmmWarning, match="boom"):
            chooser.quarantine(problem(), chosen, RuntimeError("boom"))
    elif what == "kernel":
        chooser.registry.kernel("fast").__dict__["version"] = "2"
    with tmm_core.override(disable=["fast"] if what == "setting" else []):
        assert Rewrite("records").uuid() != before
        assert Rewrite("always").uuid() == always


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "fast"}, {"kernel": "blas", "config": {}}, {"arithmetic": "k"},
        {"deterministic": True}, {"batch_invariant": True}, {"static_weights": True},
    ],
)  # fmt: skip
def test_the_key_changes_with_each_setting_that_decides_a_choice(changes: dict[str, Any]) -> None:
    """A graph that was compiled under other settings is not found again."""
    recorded({"blas": 10.0, "fast": 4.0})
    keys = {Rewrite("records").uuid()}
    with tmm_core.override(**changes):
        keys.add(Rewrite("records").uuid())
    if "config" in changes:
        with tmm_core.override(kernel=changes["kernel"]):
            keys.add(Rewrite("records").uuid())
    assert len(keys) == 2 + ("config" in changes)


def test_a_fault_of_the_pass_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise OSError("disk")

    monkeypatch.setattr(inductor, "pays", fail)
    a, b = torch.randn(5, 7), torch.randn(7, 4)
    with torch.no_grad(), pytest.warns(tmm_core.TmmWarning, match="disk"):
        y = passed(lambda a, b: a @ b, a, b, seen=Seen("records"))
    torch.testing.assert_close(y, a @ b)
