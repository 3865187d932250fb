"""BLAS answers a product inside a plugin's code at once. The product waits for no lock and tunes
nothing, and its plan serves no other call."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import math
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeConfig, FakeKernel, FakeTimer, hookimpl, plugin, problem
from tmm_cache import CacheStore

import tmm_core
from tmm_core import TmmWarning, UnsupportedProblemError, dispatch, settings
from tmm_core.dispatch import dispatcher
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import nesting, warm
from tmm_core.registry.registry import Registry
from tmm_core.spec import watch
from tmm_core.spec.device import fingerprint
from tmm_core.spec.groups import Groups
from tmm_core.spec.kernel import Traits
from tmm_core.tuning.tuner import Tuner

A, B = torch.randn(60, 16), torch.randn(16, 32)
TIMES = {"inner": 1.0, "blas": 10.0}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Kernels stay as they were first imported: later tests interpret them."""
    Registry.from_environment().kernels()


@pytest.fixture(autouse=True)
def tunes(imported: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels are interpreted nothing is tuned."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TMM_PROGRESS", "0")
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


def install(*kernels: Any) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(*kernels), "fakes")
    made = Dispatcher(registry, Tuner(FakeTimer(TIMES)), CacheStore())
    dispatch.default_dispatcher.made = made
    warm.forget_plans()
    return made


def padded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = -a.shape[0] % 16
    wide = torch.cat([a, a.new_zeros(rows, a.shape[1])])
    return tmm_core.matmul(wide, b)[: a.shape[0]]


class Inner(FakeKernel):
    """A kernel that calls ``tmm_core.matmul`` in one of its methods.

    Args:
        runs: Runs a function that calls it; by default in the same thread.
    """

    def __init__(self, where: str, runs: Any = lambda function, *given: function(*given)) -> None:
        super().__init__("inner", estimate=1.0)
        self.where, self.runs = where, runs
        self.calls = 0

    def at(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            assert torch.allclose(self.runs(padded, A, B), A @ B, atol=1e-4)
            # the same problem
            assert torch.allclose(self.runs(tmm_core.matmul, A, B), A @ B, atol=1e-4)

    def declines(self, problem: Any) -> list[str]:
        self.at("declines")
        return []

    def configs(self, problem: Any) -> Any:
        self.at("configs")
        yield FakeConfig()

    def default_config(self, problem: Any) -> Any:
        self.at("default_config")
        return FakeConfig()

    def estimate_us(self, problem: Any, config: Any) -> float:
        self.at("estimate_us")
        return 1.0

    def workspace_bytes(self, problem: Any, config: Any) -> int:
        self.at("workspace_bytes")
        return 0

    def bind(self, problem: Any, config: Any) -> Any:
        self.at("bind")
        launcher: Any = super().bind(problem, config)

        def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            if self.where == "launch" and bias is None and residual is None and a.dim() == 2:
                self.calls += 1
                result = self.runs(padded, a, b) * alpha
                return result if out is None else out.copy_(result)
            return launcher(a, b, bias, residual, alpha, out)

        launch.cost = launcher.cost  # type: ignore[attr-defined]
        return launch


QUESTIONS = ["declines", "configs", "default_config", "estimate_us", "workspace_bytes"]


@pytest.mark.parametrize("where", [*QUESTIONS, "bind", "launch"])
@pytest.mark.slow(quick=6)
def test_a_first_call_is_answered_without_waiting(where: str) -> None:
    kernel = Inner(where)
    made = install(FakeBlas(estimate=10.0), kernel)
    began = time.monotonic()
    assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
    assert time.monotonic() - began < 10
    assert kernel.calls > 0
    assert tmm_core.plan(A, B).kernel == "inner"
    assert not made.quarantined


def in_a_thread(function: Any, *given: Any, later: float = 0.0) -> Any:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(function, *given)
        time.sleep(later)  # the thread has asked before this one waits for it
        return answer.result()


def asking(function: Any, *given: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: function(*given))
        while not answer.done():
            time.sleep(0.001)
        return answer.result()


THREADS = ["new", "kept", "plan", "later", "asked"]


@pytest.fixture
def runs(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """How a plugin runs a function in another thread: a ``new`` one, a ``kept`` one, one that
    begins long before the plugin waits for it, or one that it asks whether it has ended."""
    monkeypatch.setattr(nesting, "_PATIENCE", 0.1)
    with ThreadPoolExecutor(1) as kept:
        yield _ways(kept)[request.param]


def _ways(kept: ThreadPoolExecutor) -> dict[str, Any]:
    return {
        "here": lambda function, *given: function(*given),
        "asked": asking,
        "new": in_a_thread,
        "later": functools.partial(in_a_thread, later=0.02),
        "kept": lambda function, *given: kept.submit(function, *given).result(),
        "plan": lambda function, *given: in_a_thread(lambda: tmm_core.plan(*given)(*given)),
    }


@pytest.mark.parametrize("runs", THREADS, indirect=True)
@pytest.mark.parametrize("where", ["configs", "bind"])
def test_a_thread_that_a_plugin_waits_for_is_answered_without_waiting(
    where: str, runs: Any
) -> None:
    """BLAS answers it, while the caller's thread measures; a pool may keep its threads for the next
    problem."""
    kernel = Inner(where, runs)
    made = install(FakeBlas(estimate=10.0), kernel)
    for a in (A, A[:30]):
        assert torch.allclose(tmm_core.matmul(a, B), a @ B, atol=1e-4)
    assert kernel.calls > 1
    assert not made.quarantined


@pytest.mark.parametrize("runs", THREADS, indirect=True)
def test_a_kernel_whose_launch_waits_for_a_product_of_another_thread_is_refused(runs: Any) -> None:
    """That thread could launch it again, and so start another thread, without end."""
    kernel = Inner("launch", runs)
    install(FakeBlas(estimate=10.0), kernel)
    with pytest.warns(TmmWarning, match="waits for a thread that computes products"):
        assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
    for a in (A, A[:30], torch.randn(64, 16)):
        assert torch.allclose(tmm_core.matmul(a, B), a @ B, atol=1e-4)
        assert tmm_core.plan(a, B).kernel == "blas"
    assert 0 < kernel.calls < 20


def frames(*names: str) -> Any:
    """A frame of each of these modules, the innermost first."""
    found: Any = None
    for name in reversed(names):
        found = types.SimpleNamespace(f_globals={"__name__": name}, f_back=found)
    return found


def test_a_plugin_waits_if_its_own_code_does() -> None:
    for between in ([], ["concurrent.futures._base"]):
        waits = ["threading", *between, "fast_gemm"]
        for caller in ("tmm_core.verify.verifier", "tmm_core.registry.query", None):
            found = nesting._plugin(frames(*waits, "torch.nn", "pluggy", caller, "__main__"))
            assert found == {"fast_gemm", "pluggy"}
        assert not nesting._plugin(frames(*waits, "tmm_core.nn.linear", "__main__"))
        assert not nesting._plugin(frames(*waits, "tmm_triton.plugin", "tmm_core.tuning.a"))
        assert not nesting._plugin(frames("threading", *between, "tmm_core.tuning.tuner"))
        assert not nesting._plugin(frames(*waits, "__main__"))


def test_a_plugin_that_does_not_wait_may_wait_for_the_same_plugins_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After some patience: its code may ask again and again whether that thread has ended."""
    running = frames("fast_gemm", "tmm_core.verify.verifier")
    waiting = frames("threading", "fast_gemm", "tmm_core.verify.verifier")
    cases = itertools.product((running, waiting), ("fast_gemm", "users", "torch"))
    for (frame, own), likely, late in itertools.product(cases, (False, True), (False, True)):
        here = frames("tmm_core.launch.nesting", own)
        monkeypatch.setattr(sys, "_current_frames", lambda f=frame: {0: f})
        monkeypatch.setattr(sys, "_getframe", lambda f=here: f)
        theirs = own != "users"  # this thread runs no code but the plugin's
        found = theirs or not likely
        if frame is running:
            found = late and own == "fast_gemm"
        assert nesting.awaited(likely, late) is found, (own, likely, late)


@pytest.mark.parametrize("module", [__name__, "users"])
def test_a_missing_record_is_an_error_in_all_threads_but_the_plugins(module: str) -> None:
    """A thread that runs another package's code is not a thread of the plugin that waits."""

    def product(tmm_core: Any, a: Any, b: Any) -> Any:
        with tmm_core.override(on_cache_miss="error"):
            return tmm_core.matmul(a, b)

    found: list[Any] = []

    def waits(*_: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            run = types.FunctionType(product.__code__, {"__name__": module})
            found.append(pool.submit(run, tmm_core, A[:31], B).exception())
        return A @ B

    install(FakeBlas(estimate=10.0), Inner("bind", waits))
    tmm_core.matmul(A, B)
    missing = module == "users"
    assert {type(each) for each in found} == {tmm_core.CacheMissError if missing else type(None)}


def test_a_warning_says_that_blas_answers_while_a_plugin_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tmm_core.dispatch.dispatcher.awaited", lambda **_: True)
    made = install(FakeBlas(estimate=10.0), FakeKernel("inner"))
    with tmm_core.override(batch_invariant=True):
        instance = tmm_core.problem(A, B)
        with pytest.warns(TmmWarning, match="BLAS, which is not batch-invariant: a plugin's code"):
            assert made.bound(instance, settings.current())[0].candidate.kernel.name == "blas"
        with settings.nested():  # no warning
            made.bound(tmm_core.problem(A[:30], B), settings.current())


def test_a_warning_says_that_blas_answers_while_another_thread_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "turn", lambda *_: contextlib.nullcontext(False))
    kernel = FakeKernel("inner", traits=Traits(batch_invariant=True))
    made = install(FakeBlas(estimate=10.0), kernel)
    asked = problem(groups=Groups(5, "m"), batch_invariant=True)
    with pytest.warns(TmmWarning, match="not batch-invariant: another thread, which may wait"):
        assert made.choose(asked, settings.current()).candidate.kernel.name == "blas"


def test_a_thread_that_nobody_waits_for_waits_its_turn() -> None:
    """A product of another thread gets the tuned kernel, as long as no plugin's code waits."""
    begun, asked = threading.Event(), threading.Event()

    def run() -> Any:
        begun.wait(5)
        asked.set()
        return tmm_core.plan(A, B).kernel

    def slow(*_: Any) -> torch.Tensor:
        begun.set()
        while not asked.is_set():
            time.sleep(0.001)
        time.sleep(0.1)  # the other thread waits for the lock
        return A @ B

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run)
        install(FakeBlas(estimate=10.0), Inner("bind", slow))
        assert tmm_core.plan(A, B).kernel == "inner"
        assert other.result() == "inner"


def test_the_plan_of_a_nested_call_serves_no_other() -> None:
    """The same product, called by the user, is tuned like any other."""
    install(FakeBlas(estimate=10.0), Inner("bind"))
    tmm_core.matmul(A, B)
    with settings.nested():
        assert tmm_core.plan(A, B).kernel == "blas"
    assert tmm_core.plan(A, B).kernel == "inner"
    origins = {plan.choice.reason for plan in warm._plans.values()}
    assert "computed inside a plugin's code" in origins


def rounds(origin: str) -> None:
    """Calls, first and warm, of products that a kernel pads, and of one that is padded already."""
    for rows in (60, 64, 61, 60):
        a = torch.randn(rows, 16)
        for _ in range(2):
            assert torch.allclose(tmm_core.matmul(a, B), a @ B, atol=1e-4)
            assert tmm_core.plan(a, B).kernel == "inner"
            assert tmm_core.plan(a, B).choice.origin in (origin, "cache")


def test_warm_launches_that_compute_products() -> None:
    """The same kernel is chosen for the product that it computes inside."""
    made = install(FakeBlas(estimate=10.0), Inner("launch"))
    rounds("tuned")
    assert not made.quarantined


def test_forced_launches_that_compute_products() -> None:
    install(FakeBlas(), Inner("launch"))
    with tmm_core.override(kernel="inner"):
        rounds("forced")


def test_a_launch_that_recurses_without_end_is_a_fault() -> None:
    class Endless(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            def launch(*arguments: Any) -> Any:
                return launch(*arguments)

            return launch

    made = install(FakeBlas(estimate=10.0), Endless("endless", estimate=1e-9))
    with (
        tmm_core.override(on_cache_miss="heuristic"),
        pytest.warns(TmmWarning, match="endless.*RecursionError"),
    ):
        assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
    assert [name for name, _ in made.quarantined] == ["endless"]


class Deep(FakeKernel):
    """A kernel whose launch takes twenty frames."""

    def bind(self, problem: Any, config: Any) -> Any:
        right = super().bind(problem, config)

        def launch(*arguments: Any, left: int = 20) -> Any:
            return launch(*arguments, left=left - 1) if left else right(*arguments)

        return launch


@pytest.mark.parametrize("forced", [False, True])
def test_a_caller_that_recurses_without_end_is_not_a_kernels_fault(forced: bool) -> None:
    made = install(FakeBlas(estimate=10.0), Deep("inner", estimate=1e-9))

    def endless() -> None:
        tmm_core.matmul(A, B)
        endless()

    with tmm_core.override(on_cache_miss="heuristic", kernel="inner" if forced else None):
        assert tmm_core.plan(A, B).kernel == "inner"
        with pytest.raises(RecursionError):
            endless()
        assert not made.quarantined
        assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
        assert tmm_core.plan(A, B).kernel == "inner"


def test_a_plugin_that_cannot_load_in_a_deep_stack_loads_later() -> None:
    class Entry:
        name, value, dist = "deep", "deep:plugin", None

        def load(self, left: int = 100) -> Any:
            return self.load(left - 1) if left else plugin(FakeKernel("k"))

    def down(frames: int) -> None:
        registry.load() if not frames else down(frames - 1)

    registry = Registry(lambda: [Entry()])  # type: ignore[list-item]
    used = len(inspect.stack(0))
    with pytest.raises(RecursionError):
        down(sys.getrecursionlimit() - used - 80)
    assert not registry.faults()
    assert [kernel.name for kernel in registry.kernels()] == ["k"]


def test_an_epilogue_that_computes_a_product_is_the_callers_code() -> None:
    """BLAS runs it; the product in it is chosen like any other."""
    install(FakeBlas(estimate=10.0), FakeKernel("inner", estimate=1.0))
    square = torch.randn(32, 32)
    within = tmm_core.Epilogue("within", lambda z: tmm_core.matmul(z, square))
    with tmm_core.override(kernel="blas"):
        result = tmm_core.matmul(A, B, epilogue=within)
    assert torch.allclose(result, A @ B @ square, atol=1e-3)
    assert not nesting.NESTING


@pytest.mark.parametrize("where", ["declines", "bind"])
def test_a_forced_kernel_is_not_forced_inside_itself(where: str) -> None:
    install(FakeBlas(), Inner(where))
    with tmm_core.override(kernel="inner"):
        assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)


def test_a_plugins_code_cannot_tune() -> None:
    made = install(FakeBlas(), FakeKernel("k"))
    with settings.nested(), pytest.raises(UnsupportedProblemError, match="cannot tune"):
        made.tune(tmm_core.problem(A, B), settings.current())


def test_a_kernel_that_a_plugin_forces_itself_is_used() -> None:
    """Its own second kernel, for instance."""
    install(FakeBlas(), FakeKernel("second"))
    with settings.nested(), tmm_core.override(kernel="second"):
        assert tmm_core.plan(A, B).kernel == "second"


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda a: tmm_core.matmul(a, B, epilogue="silu"), (5, 16)),
        (lambda a: tmm_core.linear(a, B.t()), (6, 16)),
        (lambda a: tmm_core.grouped_matmul(a, B.expand(2, 16, 32)), (2, 7, 16)),
    ],
    ids=("matmul", "linear", "grouped"),
)
def test_code_of_a_caller_need_not_have_a_hash(function: Any, shape: tuple[int, ...]) -> None:
    """Torch.compile writes such code for what follows a break of its graph."""
    a = torch.randn(shape)
    code = function.__code__
    odd = types.FunctionType(code.replace(co_consts=(*code.co_consts, {})), function.__globals__)
    with pytest.raises(TypeError, match="unhashable"):
        hash(odd.__code__)
    torch.testing.assert_close(odd(a), function(a))


def test_nesting_ends_with_its_context() -> None:
    before = settings.overridden()
    with settings.nested():
        inner = settings.overridden()
        assert inner is not None
        assert inner.nested
        with settings.nested():
            assert settings.overridden() is inner
    assert settings.overridden() is before
    with tmm_core.override(deterministic=True) as outer, settings.nested():
        inner = settings.current()
        assert (inner.deterministic, inner.nested) == (True, True)
        assert inner is not outer


def test_callers_cannot_set_nested() -> None:
    with (
        pytest.raises(tmm_core.SettingsError, match="unknown setting nested"),
        tmm_core.override(nested=True),
    ):
        pass


@pytest.mark.parametrize("runs", ["here", "new", "asked"], indirect=True)
def test_a_product_at_a_plugins_import(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is not re-entrant: BLAS answers, and no plugin is reported."""
    seen: list[Any] = []

    class Hooks:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            seen.append(runs(lambda: tmm_core.matmul(A, B, epilogue="relu")))
            return [FakeKernel("late.k")]

    def load() -> Any:
        seen.append(runs(lambda: tmm_core.matmul(A, B)))
        seen.append(runs(lambda: tmm_core.explain(A, B)))
        return Hooks()

    entry = types.SimpleNamespace(name="late", value="late", group="tmm_core", load=load)
    entry.dist = types.SimpleNamespace(name="late", version="1")
    found = importlib.metadata.entry_points(group="tmm_core")
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [*found, entry] if group == "tmm_core" else [],
    )
    monkeypatch.setenv("TMM_PLUGINS", "late")
    assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
    product, explanation, rectified = seen
    assert torch.allclose(product, A @ B, atol=1e-4)
    assert torch.allclose(rectified, torch.relu(A @ B), atol=1e-4)
    assert explanation.kernel == "blas"
    registry = dispatch.default_dispatcher().registry
    assert [kernel.name for kernel in registry.kernels()] == ["blas", "late.k"]
    assert [fault for fault in registry.faults() if not fault.intended] == []


# -- code that does not return -------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [("declines", "declines"), ("configs", "configs"), ("estimate_us", "estimate_us")],
)
def test_code_that_does_not_return_is_named_on_stderr(
    method: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    ended: list[str] = []

    def slow(self: Any, *about: Any) -> Any:
        while not ended:
            if text := capsys.readouterr().err:
                ended.append(text)
            time.sleep(0.01)
        return getattr(FakeKernel, method)(self, *about)

    kernel: Any = type("Slow", (FakeKernel,), {method: slow})("slow", estimate=1.0)
    install(FakeBlas(estimate=10.0), kernel)
    tmm_core.matmul(A, B)
    (text,) = ended
    assert text.startswith(f"tmm: {message} of kernel 'slow' of plugin 'fakes' does not return")
    assert "TMM_DISABLE_PLUGINS=fakes" in text


def test_an_import_that_does_not_return_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    ended: list[str] = []

    def load() -> Any:
        while not ended:
            if text := capsys.readouterr().err:
                ended.append(text)
            time.sleep(0.01)
        return plugin()

    entry: Any = types.SimpleNamespace(name="slow", value="slow", load=load)
    entry.dist = types.SimpleNamespace(name="slow-kernels", version="1")
    Registry(lambda: [entry]).load()
    assert ended[0].startswith("tmm: the import of plugin 'slow' (slow-kernels 1) does not return")


def test_a_call_that_returns_in_time_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    with watch.watched(lambda: "too slow", patience=60.0):
        with watch.watched(lambda: "too slow"):
            pass
        time.sleep(0.5)
    assert capsys.readouterr().err == ""
    assert not watch._running


def test_a_query_that_is_interrupted_while_it_is_left_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(weakref.WeakValueDictionary[int, Any]):
        def pop(self, *arguments: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "_running", Interrupted())
    with pytest.raises(KeyboardInterrupt), watch.watched(lambda: "too slow", patience=0.1):
        pass
    watch._report(math.inf)
    assert capsys.readouterr().err == ""
    assert not watch._running


def test_its_thread_ends_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    with watch.watched(str):
        thread = watch._thread
    assert thread is not None
    thread.join(5.0)
    assert not thread.is_alive()
    with watch.watched(str):
        assert watch._thread is not None
        assert watch._thread is not thread
    monkeypatch.setattr(watch, "enabled", False)
    monkeypatch.setattr(watch, "_thread", None)
    with watch.watched(str):
        assert watch._thread is None
