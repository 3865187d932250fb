"""Gate and up of two weights that torch's compiler freezes, on a CPU.

``weight_prepack`` is off, since Inductor would otherwise give products of a CPU to oneDNN.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeBlas, FakeKernel, dispatcher, installed
from test_inductor import GATES
from torch import nn

import tmm_core
from tmm_core import compat, dispatch, errors
from tmm_core.interop import constants, inductor
from tmm_core.interop.inductor import Join, Rewrite

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script`:DeprecationWarning"),
]
MATMUL = torch.ops.tmm.matmul.default


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    installed(FakeBlas())
    config = compat.inductor_config()
    with config.patch({"freezing": True, "cpp.weight_prepack": False}):
        yield config
    torch._dynamo.reset()


class Gated(nn.Module):
    def __init__(self, bias: bool, name: str = "swiglu", up_first: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(24, 40, bias=bias) for _ in range(2))
        self.down = nn.Linear(40, 16, bias=bias)
        self.act, self.up_first = GATES[name], up_first

    def forward(self, x: Tensor) -> Tensor:
        if self.up_first:
            return self.down(self.up(x) * self.act(self.gate(x)))  # type: ignore[no-any-return]
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Seen:
    """A compiler that runs what :class:`Rewrite` left, without compiling it further."""

    def __init__(self, when: Any = "always", before: Any = None) -> None:
        self.when, self.before = when, before
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.copies = 0

    def __call__(self, gm: Any, example: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        join = {Join.option: Join(self.when, self.before)}
        with compat.inductor_config().patch(join):
            return compile_fx(gm, example, inner_compile=self._inner)

    def _inner(self, gm: Any, _: Any, **__: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._inductor.fx_passes.post_grad import view_to_reshape

        view_to_reshape(gm)
        Rewrite(self.when)(gm.graph)
        gm.graph.lint()
        gm.recompile()
        calls = [node for node in gm.graph.nodes if node.target is MATMUL]
        self.calls += [(call.args[5], tuple(call.args[1].meta["val"].shape)) for call in calls]
        self.copies += sum(node.target is torch.ops.aten.cat.default for node in gm.graph.nodes)
        return make_boxed_func(gm)


TOGETHER, APART = ("swiglu", (24, 80)), [("silu", (24, 40)), ("", (24, 40))]
DOWN = ("", (40, 16))


def agree(run: Any, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Assert that a compiled model's results equal the results of the same weights in fp64."""
    exact, tolerance = copy.deepcopy(model).double(), 1e-5 if dtype is torch.float32 else 2e-2
    with torch.no_grad():
        for rows in (3, 7, 7):
            x = torch.randn(rows, 5, 24, dtype=dtype)
            y, expected = run(x), exact(x.double())
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.slow(quick=8)
def test_two_frozen_weights_become_one_call(name: str, up_first: bool, dtype: torch.dtype) -> None:
    bias = dtype is torch.float32
    model, seen = Gated(bias, name, up_first).to(dtype).eval(), Seen()
    agree(torch.compile(model, backend=seen, dynamic=True), model, dtype)
    assert seen.calls == [(name, (24, 80)), DOWN]
    assert seen.copies == 0  # torch computed the joined weight once


@pytest.mark.slow
def test_torch_joins_them_the_other_way_round(frozen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch joins two frozen weights itself, up before gate, so ours comes before."""
    model = Gated(bias=False).eval()
    with frozen.patch({"cpp.enable_concat_linear": True}):
        seen = Seen()
        agree(torch.compile(model, backend=seen, dynamic=True), model)
        assert seen.calls == [TOGETHER, DOWN]
        monkeypatch.setattr(constants, "frozen", lambda graph: set())
        torch._dynamo.reset()
        seen = Seen()
        agree(torch.compile(model, backend=seen, dynamic=True), model)
        assert seen.calls == [("", (24, 80)), DOWN]


def _of_two(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up)


@pytest.mark.slow
def test_weights_that_are_not_frozen_stay_apart(frozen: Any) -> None:
    """Joining them would copy both in each call."""
    model, seen = Gated(bias=True).eval(), Seen()
    given = torch.randn(3, 24), torch.randn(24, 40), torch.randn(24, 40)
    with torch.no_grad():
        y = torch.compile(_of_two, backend=seen)(*given)
        torch.testing.assert_close(y, _of_two(*given))
        assert seen.calls == APART
        seen.calls = []
        with frozen.patch({"freezing": False}):
            agree(torch.compile(model, backend=seen, dynamic=True), model)
        assert seen.calls == [*APART, DOWN]


def test_training_keeps_two_weights() -> None:
    model, seen = Gated(bias=True), Seen()
    x = torch.randn(3, 5, 24)
    parameters = list(model.parameters())
    got = torch.autograd.grad(torch.compile(model, backend=seen)(x).square().sum(), parameters)
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    torch.testing.assert_close(got, expected)
    assert (24, 80) not in [shape for _, shape in seen.calls]


class Others(nn.Module):
    """Two products of two weights, in an expression that is not the gate of both."""

    def __init__(self, of: Any, bias: Any = (True, True)) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(24, 40, bias=each) for each in bias)
        self.of = of

    def forward(self, x: Tensor) -> Any:
        return self.of(self, x)


@pytest.mark.parametrize(
    "model",
    [
        lambda m, x: F.silu(m.one(x)) + m.two(x),
        lambda m, x: torch.tanh(m.one(x)) * m.two(x),  # no such epilogue
        lambda m, x: F.silu(m.one(x)) * m.two(x + 1),
        lambda m, x: F.silu(m.one(x)) * m.one(x),
        lambda m, x: F.silu(m.one(x)) * m.two(x).transpose(0, 1).reshape(3, 5, 40),
        lambda m, x: [F.silu(m.one(x)) * y + y for y in (m.two(x),)].pop(),
        lambda m, x: [F.silu(y) * m.two(x) + y for y in (m.one(x),)].pop(),
    ],
)
def test_a_graph_that_resembles_two_weights_keeps_its_meaning(model: Any) -> None:
    module, seen, x = Others(model).eval(), Seen(), torch.randn(3, 5, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=seen)(x), module(x))
    assert all(shape != (24, 80) for _, shape in seen.calls)


def _changes_a_weight(m: Any, x: Tensor) -> Tensor:
    y: Tensor = F.silu(m.one(x)) * m.two(x)
    m.two.weight.mul_(1.5)
    return y


def test_a_weight_that_the_graph_changes_stays_apart() -> None:
    module, seen, x = Others(_changes_a_weight).eval(), Seen(), torch.randn(3, 5, 24)
    exact = copy.deepcopy(module)
    run = torch.compile(module, backend=seen)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), exact(x))
    assert seen.calls == APART


def test_a_bias_of_one_of_them_keeps_both() -> None:
    module = Others(lambda m, x: F.silu(m.one(x)) * m.two(x), (True, False)).eval()
    seen, x = Seen(), torch.randn(3, 5, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=seen)(x), module(x))
    assert seen.calls == APART


@pytest.mark.parametrize(("fast", "calls"), [(4.0, [TOGETHER]), (20.0, [])])
def test_records_decide_about_two_weights(fast: float, calls: list[Any]) -> None:
    times = {"blas": 10.0, "fast": fast}
    dispatch.default_dispatcher.made, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times)
    model, x = Gated(bias=False).eval(), torch.randn(15, 24)
    weight = torch.cat([model.gate.weight, model.up.weight]).detach().t()
    tmm_core.tune(tmm_core.problem(x, weight, epilogue="swiglu"))
    seen = Seen("records")
    with torch.no_grad():
        y = torch.compile(model, backend=seen)(x)
    torch.testing.assert_close(y, model(x))
    assert seen.calls == calls


def test_a_fault_leaves_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise OSError("disk")

    monkeypatch.setattr(inductor, "pays", fail)
    model, seen, x = Gated(bias=True).eval(), Seen("records"), torch.randn(3, 24)
    with torch.no_grad(), pytest.warns(tmm_core.TmmWarning, match="disk"):
        y = torch.compile(model, backend=seen)(x)
    torch.testing.assert_close(y, model(x))
    assert (seen.calls, seen.copies) == ([], 0)


@pytest.mark.slow
def test_cached_graphs_contain_no_weights(frozen: Any) -> None:
    """A graph that the cache has runs with the weights of the model at hand."""
    from torch._dynamo.utils import counters

    options = tmm_core.inductor_options(when="always")
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        model = Gated(bias=True).eval()
        agree(torch.compile(model, options=options, dynamic=True), model)
        assert counters["inductor"]["fxgraph_cache_hit"] == hits


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [False, True])
def test_a_package_and_wrappers_in_cpp(wrapper: bool, tmp_path: Path) -> None:
    model, x = Gated(bias=True).eval(), torch.randn(5, 24)
    options = tmm_core.inductor_options(when="always")
    with torch.no_grad():
        if wrapper:
            run: Any = torch.compile(model, options={**options, "cpp_wrapper": True})
        else:
            exported = torch.export.export(model, (x,))
            path = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=options
            )
            run = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(run(x), model(x))
        with torch.profiler.profile() as profile:
            run(x)
    calls = sum(event.count for event in profile.key_averages() if event.key == "tmm::matmul")
    assert calls == 2


def test_passes_that_are_set_run_first() -> None:
    ran: list[str] = []

    class First(compat.graph_pass()):  # type: ignore[misc]  # a class of torch
        def __call__(self, graph: Any) -> None:
            ran.append("first")

        def uuid(self) -> str:
            return "first"

    own = tmm_core.inductor_options(**{Join.option: First()})[Join.option]
    model, seen = Gated(bias=True).eval(), Seen(before=First())
    agree(torch.compile(model, backend=seen, dynamic=True), model)
    assert seen.calls == [TOGETHER, DOWN]
    assert ran
    assert own.uuid() == Join("records", First()).uuid() != Join("records").uuid()


def test_the_key_of_a_pass_is_that_of_its_sources_in_a_zip_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = Join("always").uuid()
    for module in (inductor, constants, inductor.shared_input, inductor.tails):
        inside = f"packages.zip/tmm_core/interop/{Path(str(module.__file__)).name}"
        monkeypatch.setattr(module, "__file__", inside)
    assert Join("always").uuid() == key
    read: list[str] = []
    monkeypatch.setattr(inductor.pkgutil, "get_data", lambda _, name: read.append(name) or b"x")
    assert Join("always").uuid() != key
    assert read == [
        "epilogues/__init__.py", "interop/aten_calls.py", "interop/constants.py",
        "interop/inductor.py", "interop/shared_input.py", "interop/tails.py",
    ]  # fmt: skip


def test_constants_are_parameters_that_torch_freezes(
    frozen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch freezes parameters that the graph does not write, with freezing on and no gradients."""
    graph = torch.fx.Graph()
    one, written, x = (graph.placeholder(name) for name in ("one", "written", "x"))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, one))
    graph.call_function(constants.WRITES, (written, product))
    graph.output(product)
    monkeypatch.setattr(compat, "freezable_inputs", lambda: {0, 1})
    assert constants.frozen(graph) == set()
    with torch.no_grad():
        assert constants.frozen(graph) == {one}
        with frozen.patch({"freezing": False}):
            assert constants.frozen(graph) == set()


def test_changed_or_returned_parameters_are_not_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch may also change such a parameter after the graph."""
    kinds = ("NOT_MUTATED", "MUTATED_IN_GRAPH", "MUTATED_OUT_GRAPH", "NOT_MUTATED", "NOT_MUTATED")
    inputs = [SimpleNamespace(mutation_type=SimpleNamespace(name=kind)) for kind in kinds]
    outputs = [SimpleNamespace(base_idx=None), SimpleNamespace(base_idx=3)]
    context = SimpleNamespace(
        params_flat_unwrap_subclasses=[None] * 4,  # the last input is no parameter
        fw_metadata=SimpleNamespace(input_info=inputs, output_info=outputs),
    )
    monkeypatch.setattr(compat, "private", lambda *_: lambda: context)
    assert compat.freezable_inputs() == {0}
    context.fw_metadata = None
    assert compat.freezable_inputs() == set()


def test_the_key_of_a_pass_changes_with_the_records_that_it_follows(tmp_path: Path) -> None:
    store = dispatch.default_dispatcher().store
    assert store.root.is_relative_to(tmp_path)
    before = [Join(when).uuid() for when in ("records", "always")]
    assert before[0] != before[1]
    store.root.mkdir(parents=True)
    (store.root / "other.json").write_text("{}")
    after = [Join(when).uuid() for when in ("records", "always")]
    assert after[0] != before[0]
    assert after[1] == before[1]
    (store.root / "other.txt").write_text("no record")
    assert [Join(when).uuid() for when in ("records", "always")] == after


@pytest.mark.parametrize("passes", [False, True])
def test_a_rewrite_that_fails_costs_itself_and_a_warning_under_w_error_passes(
    passes: bool,
) -> None:
    done: list[str] = []

    def fails() -> None:
        if passes:
            errors.warn("odd")
        raise RuntimeError("boom")

    class Rewriting(inductor.Pass):
        option = ""

        def _rewrite_all(self, graph: Any) -> None:
            with inductor._costs_only("mm"):
                fails()
            with inductor._costs_only("bmm"):
                done.append("bmm")

    graph = torch.fx.Graph()
    if passes:
        with pytest.raises(tmm_core.TmmWarning, match=r"^odd"):
            Rewriting()(graph)
        assert done == []
        return
    with pytest.warns(tmm_core.TmmWarning, match="keeps mm: .* raised RuntimeError: boom"):
        Rewriting()(graph)
    assert done == ["bmm"]
