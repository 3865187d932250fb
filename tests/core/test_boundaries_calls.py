"""The outermost functions at their edges: what reaches which path, and what older torches lack."""

from __future__ import annotations

import contextlib
import pickle
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeConfig, FakeKernel, register

import tmm_core
from tmm_core import Quantized, api, compat, foreign, grouped, interop, settings
from tmm_core.errors import SettingsError, UnknownNameError
from tmm_core.interop import calls, fallbacks
from tmm_core.registry.registry import Registry
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.epilogue import Epilogue

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("blas_alone")


def operands(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# -- the package ---------------------------------------------------------------------------


def test_each_public_name_is_there_and_no_other() -> None:
    folder = Path(tmm_core.__file__).parent
    for name in tmm_core.__all__:
        module = tmm_core._MODULES.get(name)
        if module is None:
            assert getattr(tmm_core, name) is not None
        else:  # some modules take seconds to import, so their source is searched
            source = folder.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
            assert re.search(rf"^(def |class )?{name}\b", source, re.MULTILINE), name
    assert tmm_core._MODULES.keys() <= {*tmm_core.__all__}
    with pytest.raises(AttributeError, match="module 'tmm_core' has no attribute 'nothing'"):
        tmm_core.nothing  # noqa: B018


def test_an_unknown_name_survives_a_pickle() -> None:
    known: Any = {"blas": lambda: 1, "fast": lambda: 2}  # lambdas cannot be pickled
    error = UnknownNameError("kernel", "blass", known)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "did you mean 'blas'?" in str(again)


# -- calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {}, {"epilogue": "relu"}, {"epilogue": tmm_core.Epilogue("mine", F.relu)},
        {"alpha": 2}, {"alpha": 0.5, "epilogue": "silu"},
    ],
)  # fmt: skip
def test_an_ordinary_call_takes_the_shortest_path(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    def longer(*_: Any) -> Any:
        raise AssertionError("the longer path")

    a, b = operands((4, 8), (8, 6))
    expected = tmm_core.matmul(a, b, **more)
    monkeypatch.setattr(api, "_answer", longer)
    assert torch.equal(tmm_core.matmul(a, b, **more), expected)
    with pytest.raises(AssertionError, match="the longer path"):
        tmm_core.matmul(a, b, **more, kernel="blas")


class Sharded(Tensor):
    """Stands in for a DTensor."""


@pytest.mark.parametrize(
    ("changes", "epilogue", "in_place"),
    [
        ({}, None, True),
        ({}, "relu", True),
        ({"alpha": 2}, None, False),
        ({}, tmm_core.Epilogue("mine", F.relu), False),
        ({"out": torch.empty(1)}, None, False),
        ({"scale_a": torch.ones(())}, None, False),
        ({"scale_b": torch.ones(())}, None, False),
        ({}, "quantize", False),
        ({"a": torch.empty(2, 2)}, None, False),
    ],
)
def test_plain_products_of_shards_are_computed_in_place(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], epilogue: Any, in_place: bool
) -> None:
    sharding = SimpleNamespace(in_place=lambda call, transposed: (call.epilogue, transposed))
    monkeypatch.setattr(compat, "dtensor", lambda: Sharded)
    monkeypatch.setattr(interop, "sharding", sharding, raising=False)  # its import takes 2 s
    a = torch.empty(2, 2).as_subclass(Sharded)
    given = Arguments(a, torch.empty(2, 2), None, None, 1.0, "", None, None, None)
    found: Any = api._sharded(given._replace(**changes), epilogue, True)
    assert found == ((epilogue or "", True) if in_place else None)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@pytest.mark.parametrize("learns", [False, True])
def test_a_fault_of_the_fast_path_is_raised_unless_torch_serves_the_operands(
    error: type[Exception], learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error("out of luck")

    monkeypatch.setattr(api.warm, "run", fails)
    monkeypatch.setattr(api.autograd, "in_parts", fails)
    a, b = operands((4, 8), (8, 6))
    a.requires_grad_(learns)
    with pytest.raises(error, match=r"^out of luck$"):
        tmm_core.matmul(a, b)
    with monkeypatch.context() as patch:
        patch.setattr(fallbacks, "needs_fallback", lambda *_: True)
        patch.setattr(api, "_of_any_type", lambda call, epilogue: (call.a, epilogue))
        found: Any = tmm_core.matmul(a, b, epilogue="relu")
    assert found == (a, "relu")


@pytest.mark.parametrize(("force", "budget"), [(False, None), (True, 7.5)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_problems_are_tuned_in_order_while_the_next_is_prepared(
    count: int, force: bool, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def prepare(problem: Any, current: Any, force: bool) -> None:
        done.append(("prepare", problem.m, current.tune_budget, force))

    def tune(problem: Any, current: Any, force: bool) -> int:
        done.append(("tune", problem.m, current.tune_budget, force))
        return int(problem.m)

    problems = [tmm_core.problem(*operands((m, 8), (8, 6))) for m in range(1, count + 1)]
    seconds = settings.current().tune_budget if budget is None else budget
    chooser = SimpleNamespace(prepare=prepare, tune=tune)
    monkeypatch.setattr(api, "dispatch", SimpleNamespace(default_dispatcher=lambda: chooser))
    monkeypatch.setattr(api.warm, "forget_plans", lambda: done.append("forget"))
    given: Any = problems[0] if count == 1 else iter(problems)
    records: Any = tmm_core.tune(given, force=force, budget=budget)
    assert records == [*range(1, count + 1)]
    steps = {0: "", 1: "t1", 3: "p2 t1 p3 t2 t3"}[count].split()
    named = {"p": "prepare", "t": "tune"}
    expected = [(named[step[0]], int(step[1]), seconds, force) for step in steps]
    assert done == [*expected, "forget"]
    with pytest.raises(TypeError, match=r"tune\(\) takes problems, .*, not str"):
        tmm_core.tune([*problems, "2x3"])  # type: ignore[list-item]
    assert len(done) == len(expected) + 1


def test_a_weight_has_two_dimensions() -> None:
    x, weight = operands((4, 8), (2, 6, 8))
    message = r"linear\(\): weight must be 2-D \[N, K\] or 1-D \[K\], got 3D"
    with pytest.raises(RuntimeError, match=message):
        tmm_core.linear(x, weight)
    for shape in ((3, 8), (4, 8, 1)):
        with pytest.raises(RuntimeError, match=r"weight 3-D \[G, N, K\], got 2D and "):
            tmm_core.grouped_linear(
                x, torch.ones(shape[:2]), offs=torch.tensor([4], dtype=torch.int32)
            )
    with pytest.raises(RuntimeError, match=r"x must be 2-D \[T, K\] .*, got 3D and 3D"):
        tmm_core.grouped_linear(weight, weight, offs=torch.tensor([4], dtype=torch.int32))


def test_rows_of_experts_go_where_the_index_says() -> None:
    x, weight = operands((4, 8), (2, 6, 8))
    offs = torch.tensor([1, 4], dtype=torch.int32)
    index = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    plain = tmm_core.grouped_linear(x, weight, offs=offs)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    placed = tmm_core.grouped_linear(x, weight, offs=offs, out_index=index)
    assert torch.equal(placed[index.long()], plain)
    weighted = tmm_core.grouped_linear(x, weight, offs=offs, out_index=index, out_weights=weights)
    torch.testing.assert_close(weighted[index.long()], plain * weights[:, None])
    given = {"offs": offs, "out_index": index}
    bare = tmm_core.problem(x, weight.mT, **given).groups
    full = tmm_core.problem(x, weight.mT, **given, out_weights=weights).groups
    assert bare is not None
    assert full is not None
    assert bare != full


def test_a_layer_of_experts_takes_every_argument_of_a_grouped_product() -> None:
    register(FakeKernel("fake"))
    x, weight, bias, residual = operands((4, 8), (2, 6, 8), (2, 6), (4, 6))
    ends = torch.tensor([1, 4], dtype=torch.int32)
    index = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    eights = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    scales = {"scale_a": torch.rand(4) + 1, "scale_b": torch.rand(2, 6) + 1}
    plain = torch.cat([x[:1] @ weight[0].t(), x[1:] @ weight[1].t()])
    each = bias[[0, 1, 1, 1]]

    def layer(x: Tensor = x, weight: Tensor = weight, **more: Any) -> Tensor:
        return tmm_core.grouped_linear(x, weight, offs=ends, **more)

    expected: dict[str, tuple[dict[str, Any], Tensor]] = {
        "bias": ({"bias": bias}, plain + each),
        "residual": ({"residual": residual}, plain + residual),
        "alpha": ({"alpha": -2.0, "bias": bias}, -2 * plain + each),
        "epilogue": ({"epilogue": "relu"}, plain.relu()),
        "dtype": ({"out_dtype": torch.float64}, plain.double()),
        "a_index": ({"x": x[[1, 3, 2, 0]], "a_index": index}, plain),
        "out_index": ({"out_index": index}, plain[[1, 3, 2, 0]]),
        "weights": ({"out_weights": residual[:, 0]}, plain * residual[:, :1]),
        "scales": (
            dict(zip(("x", "weight"), eights, strict=True)) | scales | {"out_dtype": torch.float32},
            layer(
                eights[0].float() * scales["scale_a"][:, None],
                eights[1].float() * scales["scale_b"][:, :, None],
            ),
        ),
    }  # fmt: skip
    for name, (more, right) in expected.items():
        found = layer(**more)
        assert found.dtype is right.dtype, name
        torch.testing.assert_close(found, right, msg=lambda text, name=name: f"{name}: {text}")
    out = torch.full((4, 6), torch.nan)
    assert layer(out=out) is out
    torch.testing.assert_close(out, plain)
    refuses_each_forced_argument(layer)


def refuses_each_forced_argument(call: Any) -> None:
    for more in ({"kernel": "none"}, {"config": {"tile": 2}}, {"on_cache_miss": "never"}):
        with pytest.raises((UnknownNameError, SettingsError)):
            call(**more)


@pytest.mark.parametrize("function", ["plan", "problem"])
def test_an_error_about_alpha_names_the_function(function: str) -> None:
    a, b = operands((4, 8), (8, 6))
    with pytest.raises(TypeError, match=rf"^{function}\(\): argument 'alpha' must be "):
        getattr(tmm_core, function)(a, b, alpha="1")


@pytest.mark.parametrize("function", ["plan", "explain"])
def test_a_call_is_planned_and_explained_with_the_config_that_is_forced(function: str) -> None:
    register(FakeKernel("fake"))
    call = partial(getattr(tmm_core, function), *operands((4, 8), (8, 6)))
    found = call(kernel="fake", config={"tile": 2}, on_cache_miss="heuristic")
    assert found.choice.candidate.config == FakeConfig(tile=2)
    refuses_each_forced_argument(call)


def test_a_tensor_times_a_quantised_one_from_either_side() -> None:
    x, w = operands((4, 8), (8, 6))
    q = tmm_core.quantize(w.t().contiguous(), "int8").t()
    assert isinstance(q, Quantized)
    torch.testing.assert_close(Tensor.__rmatmul__(q, x), x @ q)
    torch.testing.assert_close(x @ q, x @ q.dequantize().float(), atol=1e-2, rtol=1e-2)


def test_both_operands_of_other_libraries_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"a": "A", "b": "B", "x": "x"}
    monkeypatch.setattr(foreign, "read", lambda t: read[t])
    for a, b in (("a", "b"), ("a", "x"), ("x", "b")):
        found = foreign.read_operands(Arguments(a, b, *[None] * 7))  # type: ignore[arg-type]
        assert (found.a, found.b) == (read[a], read[b])


def test_operands_of_each_type_are_prepared_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    for module in (grouped, api):
        monkeypatch.setattr(module, "prepare_for", kinds.append)
    a, b = operands((2, 4, 8), (2, 8, 6))
    parameter, out = torch.nn.Parameter(a, requires_grad=False), torch.empty(2, 4, 6)
    for first in (a, parameter):
        tmm_core.grouped_matmul(first, b)
        tmm_core.matmul(first, b, kernel="blas")
        tmm_core.matmul(first, b, out=out)
    assert kinds == [torch.nn.Parameter] * 3
    tmm_core.grouped_matmul(a, torch.nn.Parameter(b, requires_grad=False))
    assert len(kinds) == 4


def test_batches_are_cast_under_autocast_and_not_into_a_given_result() -> None:
    a, b = operands((2, 4, 8), (2, 8, 6))
    out = torch.empty(2, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert tmm_core.grouped_matmul(a, b).dtype == torch.bfloat16
        tmm_core.grouped_matmul(a, b, out=out)
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("epilogue", [None, "relu"])
def test_alpha_is_a_tensor_or_complex(epilogue: str | None) -> None:
    a, b, residual = operands((4, 8), (8, 6), (4, 6))
    f = F.relu if epilogue else (lambda z: z)
    alpha = torch.tensor(0.5, requires_grad=True)
    y = tmm_core.matmul(a, b, alpha=alpha, residual=residual, epilogue=epilogue)
    torch.testing.assert_close(y, f(0.5 * (a @ b)) + residual)
    y.sum().backward()
    exact = torch.tensor(0.5, requires_grad=True)
    f(exact * (a @ b)).sum().backward()
    torch.testing.assert_close(alpha.grad, exact.grad)
    out = torch.empty(4, 6)
    assert tmm_core.matmul(a, b, alpha=alpha.detach(), epilogue=epilogue, out=out) is out
    torch.testing.assert_close(out, f(0.5 * (a @ b)))
    with pytest.raises(TypeError, match=r"'alpha' must be Number or 0-d Tensor, not \(1,\)"):
        tmm_core.matmul(a, b, alpha=torch.ones(1))
    c, d = a.to(torch.complex64), b.to(torch.complex64)
    if epilogue is None:
        torch.testing.assert_close(tmm_core.matmul(c, d, alpha=1j), 1j * (c @ d))
        into = torch.empty(4, 6, dtype=torch.complex64)
        assert tmm_core.matmul(c, d, alpha=1j, out=into) is into
        torch.testing.assert_close(into, 1j * (c @ d))


def test_outputs_come_with_an_alpha_that_has_a_gradient() -> None:
    a, b = operands((4, 8), (8, 128))
    alpha = torch.tensor(0.5, requires_grad=True)
    found: Any = tmm_core.matmul(a, b, alpha=alpha, epilogue="quantize")
    plain: Any = tmm_core.matmul(a, b, alpha=0.5, epilogue="quantize")
    assert [t.shape for t in found] == [t.shape for t in plain]
    torch.testing.assert_close(found[2], plain[2])


class Duck:
    """Overrides torch's functions, but is not a tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> str:
        return function.__name__  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual", "out"])
def test_an_argument_of_another_type_answers_or_is_refused(name: str) -> None:
    a, b = operands((4, 8), (8, 6))
    given: dict[str, Any] = {"a": a, "b": b}
    assert tmm_core.matmul(**given | {name: Duck()}) == "matmul"  # type: ignore[comparison-overlap]
    with pytest.raises(TypeError, match=rf"^matmul\(\): argument '{name}' must be Tensor, not int"):
        tmm_core.matmul(**given | {name: 3})


def test_a_sparse_operand_is_not_cast_on_the_way_into_a_result() -> None:
    a, b = operands((4, 8), (8, 6))
    out = torch.empty(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert tmm_core.matmul(a.to_sparse(), b, out=out) is out
    torch.testing.assert_close(out, a @ b)


# -- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("tune_share", [1, 0.01, 1.0], [0, 1.01, -0.5, "1", None]),
        ("tune_budget", [0.5, 3], [0, -1, float("inf"), float("nan"), "3"]),
        ("tune_memory", [None, 1], [0, -1, 1.5, True, "1"]),
        ("verify", [True, False], [1, 0, None, "off"]),
        ("progress", [True, False, None], [1, "on"]),
        ("kernel", ["x", None], [1, True]),
        ("arithmetic", ["x", None], [1]),
        ("on_cache_miss", ["tune", "error"], ["never", "", 1]),
    ],
)
def test_settings_take_their_own_values(name: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        assert getattr(settings.Settings(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(SettingsError, match=name):
            settings.Settings(**{name: value})


def test_settings_of_a_process_without_variables() -> None:
    usual = settings.Settings()
    assert (usual.tune_share, usual.tune_memory, usual.verify) == (0.1, None, True)
    found = settings.Settings.from_environ({"TMM_TUNE_MEMORY": "64M"})
    assert found.tune_memory == 2**26


@pytest.mark.parametrize("text", ["maybe", "2", "TRUE?"])
def test_a_value_that_neither_enables_nor_disables(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TMM_ENABLE", text)
    with pytest.raises(SettingsError, match=f"^TMM_ENABLE='{text[:4]}"):
        settings.enabled_by_environment()
    for value, enabled in (("1", True), ("on", True), ("0", False), ("", False)):
        monkeypatch.setenv("TMM_ENABLE", value)
        assert settings.enabled_by_environment() is enabled


# -- what torch may lack -------------------------------------------------------------------


def test_a_name_that_torch_lacks_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "missing", [])
    for path in ("torch.autograd.nothing", "torch.nothing.at.all", "torch._C.Nothing.attribute"):
        assert compat.private(path, 3) == compat.private(path, 4) - 1 == 3
        assert compat.missing.pop() == path
        assert compat.missing == []
    assert compat.private("torch._C.DispatchKey.CPU", 3) == torch._C.DispatchKey.CPU
    vmap = compat.private("torch._C._functorch.TransformType.Vmap", 3)
    assert vmap == torch._C._functorch.TransformType.Vmap
    assert compat.missing == []


def test_private_names_come_from_a_module_or_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "missing", [])
    path = "torch.autograd.profiler"
    assert compat._holding(path, _is_profiler_enabled=3) is torch.autograd.profiler
    assert compat._holding(path, nothing=3, _is_profiler_enabled=4) == SimpleNamespace(
        nothing=3, _is_profiler_enabled=4
    )


@pytest.mark.parametrize("lacking", ["_ExcludeDispatchKeyGuard", "DispatchKeySet", "AutocastCPU"])
def test_autocast_is_turned_off_by_the_functions_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    real = compat.private
    monkeypatch.setattr(
        compat, "private", lambda path, other: None if lacking in path else real(path, other)
    )
    factory: Any = compat._without_autocast("cpu")
    assert isinstance(factory, partial)
    assert factory.func is torch.autocast
    a, b = operands((4, 8), (8, 6))
    with torch.autocast("cpu", torch.bfloat16), factory():
        assert (a @ b).dtype == torch.float32
    monkeypatch.undo()
    assert compat._without_autocast("cpu").func is torch._C._ExcludeDispatchKeyGuard


def test_nothing_is_cast_on_the_way_into_a_result() -> None:
    a, b = operands((4, 8), (8, 6))
    with torch.autocast("cpu", torch.bfloat16):
        with compat.uncast(torch.empty(1)):
            assert (a @ b).dtype == torch.float32
        with compat.uncast(None), compat.uncast(torch.empty(1, device="meta")):
            assert (a @ b).dtype == torch.bfloat16


def test_memory_and_streams_by_torchs_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "empty_strided", lambda *place, **more: given.append((place, more)))
    compat._empty_strided_cuda((2, 3), (3, 1), torch.float16)
    assert given == [(((2, 3), (3, 1)), {"dtype": torch.float16, "device": "cuda"})]
    streams = {1: SimpleNamespace(cuda_stream=77)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    assert compat._current_stream(1) == 77


def test_a_later_capture_ends_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    @contextlib.contextmanager
    def graph(made: Any, capture_error_mode: str) -> Any:
        ended.append(capture_error_mode)
        yield

    def end(device: int, pool: object) -> None:
        ended.append((device, pool))
        raise RuntimeError("already ended")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch, "zeros", lambda *_, **more: ended.append(more["device"]))
    monkeypatch.setattr(compat, "private", lambda path, other: end)
    compat.end_failed_capture("pool")
    assert ended == [(0, "pool"), "thread_local", 0]


@pytest.mark.parametrize("lacking", [None, "params_flat_unwrap_subclasses", "fw_metadata"])
def test_inputs_that_a_graph_keeps_can_be_constants(
    monkeypatch: pytest.MonkeyPatch, lacking: str | None
) -> None:
    def kind(name: str) -> Any:
        return SimpleNamespace(mutation_type=SimpleNamespace(name=name))

    metadata = SimpleNamespace(
        output_info=[SimpleNamespace(base_idx=2), SimpleNamespace(base_idx=None)],
        input_info=[kind("NOT_MUTATED"), kind("MUTATED_IN_GRAPH"), *[kind("NOT_MUTATED")] * 3],
    )
    fields = {"params_flat_unwrap_subclasses": [1, 2, 3, 4], "fw_metadata": metadata}
    context = SimpleNamespace(**{k: v for k, v in fields.items() if k != lacking})
    monkeypatch.setattr(compat, "private", lambda path, other: lambda: context)
    assert compat.freezable_inputs() == (set() if lacking else {0, 3})


def test_a_sharded_tensor_is_made_by_its_constructor_or_from_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class New:
        def __new__(cls, local: Any, spec: Any, *, requires_grad: bool) -> Any:
            made.append((local, spec, requires_grad))
            return object.__new__(cls)

    class Old:
        def __new__(cls, local: Any) -> Any:
            raise AssertionError

        @staticmethod
        def from_local(*given: Any, **more: Any) -> str:
            made.append((given, more))
            return "old"

    spec: Any = SimpleNamespace(mesh=1, placements=2, shape=3, stride=4)
    local: Any = "local"
    monkeypatch.setattr(compat, "dtensor", lambda: New)
    assert isinstance(compat.dtensor_of(local, spec), New)
    monkeypatch.setattr(compat, "dtensor", lambda: Old)
    old: Any = compat.dtensor_of(local, spec)
    assert old == "old"
    parts = {"run_check": False, "shape": 3, "stride": 4}
    assert made == [("local", spec, False), (("local", 1, 2), parts)]


def test_no_tensor_is_of_a_class_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    assert compat.fake_tensor() is FakeTensor
    monkeypatch.setattr(compat, "private", lambda path, other: other)
    assert not isinstance(torch.ones(1), compat.fake_tensor())
    assert compat.graph_pass() is object
    assert compat.schema_info() is None


def test_an_epilogue_has_its_text_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing it would take 0.2 ms of each call through the operator."""
    doubled = Epilogue("doubled", lambda z: 2 * z)
    monkeypatch.setattr(Registry, "epilogues", lambda registry: pytest.fail("parsed"))
    assert calls.text_of(doubled) == doubled.interned()
    assert (calls.text_of("relu"), calls.text_of(None)) == ("relu", "")
