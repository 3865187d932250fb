"""An exception of a signal's handler passes through every guard, and the next call works."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeConfig, FakeKernel, dispatcher, hookimpl, plugin
from filelock import UnixFileLock
from lying import half
from tmm_base import guards
from tmm_cache import files

import tmm_core
from tmm_core import api, dispatch, errors
from tmm_core.launch import warm
from tmm_core.registry.registry import Registry
from tmm_core.spec.device import fingerprint
from tmm_core.verify import two_threads
from tmm_core.verify.verifier import Verifier

A, B = torch.randn(64, 16), torch.randn(16, 32)
ROW = torch.randn(1, 32)


class Unique(Exception):  # noqa: N818
    pass


class Final(BaseException):
    pass


RAISED = (TimeoutError, RuntimeError, Unique, SystemExit, KeyboardInterrupt, Final)


@pytest.fixture(autouse=True)
def tunes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels are interpreted nothing is tuned."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    monkeypatch.setenv("TMM_PROGRESS", "0")
    fingerprint.cache_clear()
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)
    fingerprint.cache_clear()


class Bomb:
    """Sends this process a signal, whose handler raises, the first time it passes ``stage``."""

    def __init__(self, stage: str, raised: type[BaseException]) -> None:
        self.stage, self.armed = stage, True

        def handler(number: int, frame: Any) -> None:
            raise raised("from the handler")

        signal.signal(signal.SIGUSR1, handler)

    def at(self, stage: str) -> None:
        if self.armed and stage == self.stage:
            self.armed = False
            os.kill(os.getpid(), signal.SIGUSR1)
            if threading.current_thread() is threading.main_thread():
                for _ in range(1000):  # the handler runs between two of these
                    pass


class Mined(FakeKernel):
    """The fastest kernel, whose methods pass the stages of a bomb."""

    def __init__(self, bomb: Bomb) -> None:
        super().__init__("mined", estimate=1.0)
        self.bomb = bomb

    def declines(self, problem: Any) -> list[str]:
        self.bomb.at("declines")
        return []

    def configs(self, problem: Any) -> Any:
        self.bomb.at("configs")
        return [FakeConfig()]

    def default_config(self, problem: Any) -> Any:
        self.bomb.at("default_config")
        return FakeConfig()

    def estimate_us(self, problem: Any, config: Any) -> float:
        self.bomb.at("estimate_us")
        return 1.0

    def workspace_bytes(self, problem: Any, config: Any) -> int:
        self.bomb.at("workspace_bytes")
        return 0

    def bind(self, problem: Any, config: Any) -> Any:
        self.bomb.at("bind")
        launcher: Any = super().bind(problem, config)

        def launch(*arguments: Any) -> Any:
            self.bomb.at("launch")
            return launcher(*arguments)

        launch.cost = launcher.cost  # type: ignore[attr-defined]
        return launch


def install(bomb: Bomb) -> None:
    made, _ = dispatcher(FakeBlas(estimate=10.0), Mined(bomb), times={"mined": 1.0, "blas": 10.0})
    dispatch.default_dispatcher.made = made
    warm.forget_plans()


def passes(raised: type[BaseException], call: Callable[[], Any]) -> None:
    """Assert that ``call`` raises the exception of the handler, and that tmm does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(raised, match="from the handler"):
            call()
    assert not errors._faults


def works() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
    made = dispatch.default_dispatcher.made
    assert made is not None
    assert not made.quarantined
    assert tmm_core.plan(A, B).kernel == "mined"
    found = made.record(tmm_core.problem(A, B))
    assert found is not None
    assert {c.kernel: c.status for c in found[1].candidates} == {"blas": "ok", "mined": "ok"}


QUESTIONS = ["declines", "configs", "default_config", "estimate_us", "workspace_bytes"]


@pytest.mark.parametrize("stage", [*QUESTIONS, "bind", "launch"])
@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.slow(quick=6)
def test_an_exception_in_a_first_call_reaches_the_caller(
    stage: str, raised: type[BaseException]
) -> None:
    bomb = Bomb(stage, raised)
    install(bomb)
    passes(raised, lambda: tmm_core.matmul(A, B))
    assert not bomb.armed
    works()


@pytest.mark.parametrize("raised", RAISED)
def test_an_exception_in_a_warm_call_reaches_the_caller(raised: type[BaseException]) -> None:
    bomb = Bomb("launch", raised)
    bomb.armed = False
    install(bomb)
    works()
    bomb.armed = True
    passes(raised, lambda: tmm_core.matmul(A, B))
    works()


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("origin", ["forced", "heuristic"])
def test_an_exception_in_an_untuned_choice_reaches_the_caller(
    raised: type[BaseException], origin: str
) -> None:
    for stage in ("bind", "launch"):
        bomb = Bomb(stage, raised)
        install(bomb)
        options: Any = {"kernel": "mined"} if origin == "forced" else {"on_cache_miss": origin}
        with tmm_core.override(**options):
            passes(raised, lambda: tmm_core.matmul(A, B))
            assert torch.allclose(tmm_core.matmul(A, B), A @ B, atol=1e-4)
            assert tmm_core.plan(A, B).kernel == "mined"


# The cache tolerates an absent file, and a file that is not a record.
@pytest.mark.parametrize("raised", [*RAISED, FileNotFoundError, ValueError])
@pytest.mark.parametrize(
    ("where", "module", "name"),
    [
        ("a record is read", files, "read_all"),
        ("a record is parsed", files, "parse_stored"),
        ("its lock is taken", UnixFileLock, "_acquire"),
        ("it is written", files, "write_atomically"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.slow(quick=6)
def test_an_exception_in_the_cache_reaches_the_caller(
    raised: type[BaseException],
    where: str,
    module: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``TimeoutError`` is an ``OSError``, which the cache tolerates."""
    bomb = Bomb("cache", raised)
    install(bomb)
    if where.startswith("a record"):
        bomb.armed = False
        works()
        bomb.armed = True
        install(bomb)
    usual = getattr(module, name)

    def interrupted(*arguments: Any) -> Any:
        bomb.at("cache")
        return usual(*arguments)

    monkeypatch.setattr(module, name, interrupted)
    passes(raised, lambda: tmm_core.matmul(A, B))
    assert not bomb.armed
    works()


@pytest.mark.parametrize("pace", ["free", "lines"])
@pytest.mark.parametrize("raised", [RuntimeError, Unique, KeyboardInterrupt])
def test_an_exception_while_two_threads_start_reaches_the_caller(
    pace: Any, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has started ends: it neither waits for the other nor goes on."""
    data = Verifier(half(), torch.device("cpu"))
    launcher: Any = FakeKernel("any").bind(half(), FakeConfig())
    start = two_threads.Launches.start
    started = []

    def interrupted(thread: Any) -> None:
        if started:
            kill()
        started.append(thread)
        start(thread)

    def handler(number: int, frame: Any) -> None:
        raise raised("from the handler")

    signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(two_threads.Launches, "start", interrupted)
    before = time.monotonic()
    passes(raised, lambda: two_threads.launch_together(data, launcher, pace, 10**6))
    assert time.monotonic() - before < two_threads._TURNS_SECONDS
    assert not started[0].is_alive()


class Entry:
    """An installed plugin, as importlib.metadata describes it."""

    group, value = "tmm_core", "stranger.plugin"
    dist = types.SimpleNamespace(name="stranger", version="1.2")

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self.load = name, load


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("stage", ["import", "hook", "name", "listing"])
def test_an_exception_while_loading_reaches_the_caller_and_loading_starts_again(
    raised: type[BaseException], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = Bomb(stage, raised)

    class Named(FakeKernel):
        @property
        def name(self) -> str:  # type: ignore[override]
            bomb.at("name")
            return "second"

        @name.setter
        def name(self, name: str) -> None:
            pass

    class Hooks:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            bomb.at("hook")
            return [Named("second")]

    def load() -> Any:
        bomb.at("import")
        return Hooks()

    def listed(group: str) -> list[Any]:
        bomb.at("listing")
        points = [Entry("one", lambda: plugin(FakeKernel("first"))), Entry("two", load)]
        return points if group == "tmm_core" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", listed)
    registry = Registry.from_environment({})
    passes(raised, registry.load)
    assert [kernel.name for kernel in registry.kernels()] == ["blas", "first", "second"]
    assert registry.faults() == []
    assert len(registry.hooks.manager.get_plugins()) == 2


@pytest.mark.parametrize("raised", RAISED)
def test_a_plugin_registered_by_hand_can_be_registered_again(raised: type[BaseException]) -> None:
    bomb = Bomb("hook", raised)

    class Hooks:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            bomb.at("hook")
            return [FakeKernel("mine")]

    registry, mine = Registry(), Hooks()
    passes(raised, lambda: registry.register(mine, "mine"))
    registry.register(mine, "mine")
    assert [kernel.name for kernel in registry.kernels()] == ["mine"]


class Foreign(torch.Tensor):
    """A tensor of a type that is neither torch's nor tmm's."""


@pytest.mark.parametrize(
    ("call", "place", "raised"),
    [
        (lambda: tmm_core.matmul(A, B, bias=ROW), (warm, "run"), ValueError),
        (lambda: tmm_core.linear(A, B.t(), ROW), (warm, "run"), ValueError),
        (lambda: tmm_core.linear(A, B.t().as_subclass(Foreign), ROW), (api, "_answer"), TypeError),
    ],
)
def test_a_call_that_torch_could_serve_too_is_interrupted(
    call: Any, place: Any, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb, real = Bomb("call", raised), getattr(*place)

    def interrupted(*given: Any) -> Any:
        bomb.at("call")
        return real(*given)

    monkeypatch.setattr(*place, interrupted)
    passes(raised, call)
    assert torch.allclose(call(), torch.addmm(ROW, A, B), atol=1e-4)


def raised_by(handler: Any, guarded: Callable[[], Any]) -> BaseException:
    signal.signal(signal.SIGUSR1, handler)
    try:
        guarded()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(1000):
        pass


def wraps(kill: Callable[[], Any]) -> Any:
    try:
        kill()
    except Exception as error:
        raise ValueError("compilation failed") from error


def hides(kill: Callable[[], Any]) -> Any:
    try:
        kill()
    except Exception:
        raise ValueError("compilation failed")  # noqa: B904


def handler(number: int, frame: Any) -> None:
    raise TimeoutError("from the handler")


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        raise TimeoutError("from the handler")

    def method(self, *arguments: Any) -> None:
        raise TimeoutError("from the handler")

    def forgets(self, number: int, frame: Any) -> None:
        del frame
        raise TimeoutError("from the handler")


def resets(number: int, frame: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise TimeoutError("from the handler")


def forgets(number: int, frame: Any) -> None:
    del frame
    raise TimeoutError("from the handler")


class Forgetful:
    __call__ = Handler.forgets


def names(more: int, number: int, frame: Any) -> None:
    number = signal.Signals(number)
    raise TimeoutError("from the handler")


def resets_and_names(number: int, frame: Any) -> None:
    number = signal.Signals(number)
    resets(0, None)


HANDLERS: dict[str, Any] = {
    "function": handler,
    "callable object": Handler(),
    "bound method": Handler().method,
    "partial": functools.partial(lambda more, number, frame: handler(number, frame), 1),
    "lambda": lambda *_: (_ for _ in ()).throw(TimeoutError("from the handler")),
    "resets": resets,
    "forgets its frame": forgets,
    "method that forgets its frame": Handler().forgets,
    "object that forgets its frame": Forgetful(),
    "partial that forgets its frame": functools.partial(Forgetful()),
    "cached function that forgets its frame": functools.lru_cache(forgets),
    "method of a partial": types.MethodType(functools.partial(names), 1),
    "resets and names the signal": resets_and_names,
}


@pytest.mark.parametrize("how", ["bare", wraps, hides])
@pytest.mark.parametrize("name", HANDLERS)
def test_each_kind_of_handler_is_recognised(name: str, how: Any) -> None:
    error = raised_by(HANDLERS[name], kill if how == "bare" else lambda: how(kill))
    with pytest.raises(TimeoutError, match="from the handler"):
        errors.reraise(error)
    with pytest.raises(TimeoutError), guards.suppress(Exception):
        raise error


def faulty(*arguments: Any) -> None:
    raise ValueError("its own")


def test_an_exception_that_a_caller_handles_is_not_a_cause() -> None:
    """A user may call tmm while handling a timeout; a kernel that fails then is still at fault."""
    signal.signal(signal.SIGUSR1, handler)
    handled: list[BaseException | None] = []

    def guarded() -> None:
        try:
            faulty()
        except ValueError as error:
            handled.append(error.__context__)
            errors.reraise(error)

    try:
        kill()
    except TimeoutError:
        guarded()
    assert isinstance(handled[0], TimeoutError)


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, Final, TimeoutError])
def test_a_plugins_own_exceptions_do_not_pass(error: type[BaseException]) -> None:
    namespace: dict[str, Any] = {"__name__": "stranger", "error": error}
    exec("def launch(number, frame): raise error", namespace)
    signal.signal(signal.SIGUSR1, handler)
    # Calls that only look like one of a handler, which has an int and its caller's frame.
    for number, frame in ((15, None), (15, sys._getframe(1)), ("15", sys._getframe())):
        try:
            namespace["launch"](number, frame)
        except BaseException as found:
            errors.reraise(found)
        with guards.suppress(BaseException):
            namespace["launch"](number, frame)


@pytest.mark.parametrize("guard", ["reraise", "suppress"])
@pytest.mark.slow
def test_an_exception_that_passes_keeps_nothing_alive(guard: str) -> None:
    """A cycle would keep the interrupted frames' variables, a lock among them."""

    class Lock:
        pass

    def interrupted(held: Any) -> None:
        if guard == "suppress":
            with guards.suppress(OSError):
                kill()
        try:
            kill()
        except OSError as error:
            errors.reraise(error)

    signal.signal(signal.SIGUSR1, handler)
    gc.collect()
    gc.disable()
    try:
        held = Lock()
        alive = weakref.ref(held)
        with pytest.raises(TimeoutError) as caught:
            interrupted(held)
        del held, caught
        assert alive() is None
    finally:
        gc.enable()


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    errors.reraise(first)


def test_an_exception_that_no_frame_raised_passes() -> None:
    """Another thread may set an exception, which no frame of a plugin raised."""
    with pytest.raises(Final):
        errors.reraise(Final())
    errors.reraise(SystemExit())  # sys.exit as a launcher leaves no frame
    errors.reraise(Unique())
    errors.reraise(tmm_core.TmmWarning("raised by a plugin, not issued by tmm"))


EXIT = """
import os, signal, sys
import torch, tmm_core
from tmm_core import dispatch

def leave(number, frame):
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
signal.setitimer(signal.ITIMER_REAL, 20)
x = torch.randn(8, 8)
tmm_core.matmul(x, x)
print("ready", flush=True)
while True:
    try:
        tmm_core.matmul(x, x)
    except Exception:
        pass
"""


@pytest.mark.slow
def test_sigterm_ends_a_loop_that_catches_exceptions() -> None:
    command = [sys.executable, "-c", EXIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.terminate()
        assert child.wait(timeout=20) == 143


@pytest.mark.parametrize("kind", [ImportError, AttributeError, TypeError])
def test_an_exception_of_a_handler_costs_no_kernel_of_triton(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin expects these types where a release of Triton lacks something."""
    from tmm_triton import plugin

    def handler(*_: Any) -> None:
        raise kind("from a handler")

    def interrupted(name: str) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(plugin.importlib, "import_module", interrupted)
        with pytest.raises(kind, match="from a handler"):
            plugin.load(next(iter(plugin.KERNELS)))
    finally:
        signal.signal(signal.SIGUSR1, before)
