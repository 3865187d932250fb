"""Verification distinguishes changes by a launch from those that other threads make meanwhile, and
does not undo theirs."""

from __future__ import annotations

import builtins
import decimal
import functools
import gc
import io
import itertools
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config  # sets a variable; torch imports it with its deterministic mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tmm_core import settings
from tmm_core.registry import process_state, watched_call

CPU = torch.device("cpu")
cuda = torch.backends.cuda


@pytest.fixture(autouse=True)
def _flags_may_be_set() -> Iterator[None]:
    """Torch's own tests, when imported, forbid to set its backends' flags."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        yield


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def among_others(change: Callable[[], Any]) -> Callable[[], None]:
    """A launch in whose first call another thread makes a change."""
    left = [change]

    def launch() -> None:
        if left:
            in_another_thread(left.pop())

    return launch


@pytest.mark.parametrize("run", [in_another_thread, lambda function: function()])
@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.manual_seed(3), lambda: torch.rand(5), random.random,
        lambda: os.environ.__setitem__("OF_THE_PROGRAM", "1"),
        lambda: warnings.simplefilter("ignore", ImportWarning),
        lambda: torch.set_default_dtype(torch.float64), lambda: sys.setswitchinterval(0.003),
        lambda: setattr(sys, "excepthook", lambda *_: None),
    ],
)  # fmt: skip
def test_changes_by_another_thread_stay(
    change: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is verified while another thread draws random numbers, or loads a model under its
    own default dtype."""
    monkeypatch.setenv("OF_THE_PROGRAM", "0")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    state = process_state.State(CPU)
    with warnings.catch_warnings():
        try:
            change()
            (name,) = state.changed()
            value = process_state.PIECES[name].read()
            state.restore([name])
            assert run(lambda: watched_call.watched(among_others(change), CPU))[1] == []
            seen = process_state.PIECES[name].read()
        finally:
            state.restore(state.changed())
        assert seen == value or name == "the hook of exceptions"


@pytest.mark.filterwarnings("ignore")
def test_a_profiler_of_another_thread_does_not_count_as_a_launchs_change() -> None:
    """It sets the profile function of all threads."""
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
    )
    with ThreadPoolExecutor(1) as pool:
        left = [profile.start]

        def launch() -> None:
            if left:
                pool.submit(left.pop()).result()

        try:
            assert watched_call.watched(launch, CPU)[1] == []
        finally:
            pool.submit(profile.stop).result()


class Clock:
    """A clock that only ``sleep`` advances. Every 20 ms "another thread" draws a random number."""

    def __init__(self) -> None:
        self.milliseconds = 0

    def monotonic(self) -> float:
        return self.milliseconds / 1000

    def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds * 1000)):
            self.milliseconds += 1
            if self.milliseconds % 20 == 0:
                random.random()


def test_a_slow_launch_is_not_blamed_for_occasional_changes_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other thread draws more often than a launch ends, and seldom enough to be missed in a
    short wait."""
    clock = Clock()
    monkeypatch.setattr(watched_call, "time", clock)
    monkeypatch.setattr(watched_call, "_IDLE", 4e-3)
    assert watched_call.watched(lambda: clock.sleep(0.1), CPU)[1] == []


def binding_during(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """The changes by another thread's bind, and the result of ``call``, which runs meanwhile."""
    began = threading.Event()

    def bind() -> None:
        torch.set_default_dtype(torch.float64)
        began.set()
        time.sleep(0.05)

    try:
        with ThreadPoolExecutor(1) as pool:
            bound = pool.submit(watched_call.watched, bind, CPU)
            began.wait()
            result = call()
            changed = bound.result()[1]
        assert torch.get_default_dtype() is torch.float32
        return changed, result
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_launch_is_not_taken_for_the_bind_of_another_thread() -> None:
    """A kernel is verified at its first use while another one is bound for a tuning in the
    background."""
    found = binding_during(lambda: watched_call.watched(lambda: time.sleep(0.06), CPU)[1])
    assert found == (["torch's default dtype"], [])


def test_a_launch_waits_once_for_a_bind_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes by the bind do not count as the launch's."""
    monkeypatch.setattr(watched_call, "TURN", 0.01)
    left = threading.Event()

    def bind() -> None:
        left.wait()
        torch.set_default_dtype(torch.float64)

    slow = watched_call._watching
    with ThreadPoolExecutor(1) as pool:
        binding = pool.submit(watched_call.watched, bind, CPU)
        try:
            while not slow.locked():
                time.sleep(1e-3)
            with watched_call._turn():
                assert slow.locked()
            assert watched_call._watching is not slow  # later launches do not wait for it
        finally:
            left.set()
        assert binding.result()[1] == ["torch's default dtype"]
    assert torch.get_default_dtype() is torch.float32
    assert not slow.locked()
    assert not watched_call._watching.locked()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch's default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("environment variables", lambda: os.environ.__setitem__("OF_THE_PROGRAM", "1")),
        ("the grad mode", lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
        ("torch's random generator", lambda: torch.rand(1)),
    ],
)
def test_changes_by_a_launch_outside_the_main_thread_are_named(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_PROGRAM", "0")
    before = process_state.State(CPU)
    assert in_another_thread(lambda: watched_call.watched(change, CPU)[1]) == [name]
    # Numbers may not be drawn twice, whoever drew them.
    assert before.changed() == ([name] if "random generator" in name else [])


def test_random_numbers_are_not_drawn_twice_while_a_launch_is_watched() -> None:
    """Another thread draws all the time."""
    drawn: list[float] = []
    ended = threading.Event()

    def launches() -> list[list[str]]:
        try:
            return [watched_call.watched(lambda: time.sleep(1e-3), CPU)[1] for _ in range(20)]
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(launches)
        while not ended.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))
        assert found.result() == [[]] * 20
    assert len(set(drawn)) == len(drawn) > 100


class AnyFunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class AnyDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def _flip(read: Any, write: Any) -> Any:
    return lambda: write(not read())


def _lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (soft - 1 if soft > 0 else min(1, hard), hard))


def _set(of: Any, name: str, value: Any) -> Any:
    return lambda: setattr(of, name, value)


def _toggle(of: Any, name: str) -> Any:
    return lambda: setattr(of, name, not getattr(of, name))


def _torch_switch(read: str, write: str) -> Any:
    return _flip(getattr(torch._C, read), getattr(torch._C, write))


_LEFT: list[Any] = []


def _leave_inference_mode() -> None:
    _LEFT.append(torch.inference_mode())
    _LEFT[-1].__enter__()


def _other_engine() -> None:
    quantized = torch.backends.quantized
    quantized.engine = next(e for e in quantized.supported_engines if e != quantized.engine)


#: Changes by the name of the piece of state.
CHANGES: list[tuple[str, Any]] = [
    ("tmm's settings", functools.partial(settings.put_back, (settings.Settings(), None))),
    ("torch's function modes", lambda: AnyFunctionMode().__enter__()),
    ("torch's dispatch modes", lambda: AnyDispatchMode().__enter__()),
    (
        "the hooks of saved tensors",
        lambda: torch.autograd.graph.saved_tensors_hooks(id, id).__enter__(),
    ),
    ("the number of torch's threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    ("autocast", lambda: torch.set_autocast_enabled("cuda", True)),
    ("the flushing of denormal numbers", lambda: torch.set_flush_denormal(True)),
    *(
        ("the fp32 precision", _set(of, "fp32_precision", "ieee"))
        for of in (
            torch.backends,
            torch.backends.cudnn,
            torch.backends.cudnn.conv,
            cuda.matmul,
            torch.backends.mkldnn,
            torch.backends.mkldnn.matmul,
        )
    ),
    ("the fp32 precision", lambda: torch.set_float32_matmul_precision("medium")),
    ("the fp32 precision", _set(cuda.matmul, "allow_tf32", True)),
    ("the fp32 precision", _set(torch.backends.cudnn, "allow_tf32", False)),
    (
        "how autograd computes views again",
        _torch_switch("_is_view_replay_enabled", "_set_view_replay_enabled"),
    ),
    ("the inference mode", _leave_inference_mode),
    ("the transforms of torch.func", lambda: torch._C._functorch._grad_increment_nesting()),
    (
        "the transforms of torch.func",
        lambda: torch._C._functorch._vmap_increment_nesting(3, "error"),
    ),
    (
        "whether torch calls __torch_function__",
        lambda: torch._C.DisableTorchFunctionSubclass().__enter__(),
    ),
    (
        "the reduced precision of fp16 sums",
        _toggle(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    ),
    (
        "the reduced precision of bf16 sums",
        _toggle(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    ),
    ("fp16 accumulation", _toggle(cuda.matmul, "allow_fp16_accumulation")),
    ("torch's deterministic mode", lambda: torch.use_deterministic_algorithms(True)),
    ("cuDNN's benchmark mode", _torch_switch("_get_cudnn_benchmark", "_set_cudnn_benchmark")),
    (
        "cuDNN's deterministic mode",
        _torch_switch("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ),
    ("whether torch uses NNPACK", _torch_switch("_get_nnpack_enabled", "_set_nnpack_enabled")),
    ("whether torch uses cuDNN", _torch_switch("_get_cudnn_enabled", "_set_cudnn_enabled")),
    (
        "whether torch uses oneDNN",
        _torch_switch("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ),
    (
        "oneDNN's deterministic mode",
        _torch_switch("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ),
    *(
        (
            "the backends of attention",
            _flip(getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp")),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
    (
        "the backends of attention",
        _flip(cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
    ),
    (
        "the autocast cache",
        _flip(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ),
    (
        "autograd's threads",
        _torch_switch("_is_multithreading_enabled", "_set_multithreading_enabled"),
    ),
    (
        "the filling of new memory",
        _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    (
        "the forward mode of derivatives",
        _torch_switch("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
    ),
    (
        "the hooks of every module",
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    ),
    *(
        ("the hooks of every module", functools.partial(register, lambda *_: None))
        for register in (
            torch.nn.modules.module.register_module_full_backward_pre_hook,
            torch.nn.modules.module.register_module_parameter_registration_hook,
            torch.nn.modules.module.register_module_buffer_registration_hook,
            torch.nn.modules.module.register_module_module_registration_hook,
        )
    ),
    ("the order of einsum", _toggle(torch.backends.opt_einsum, "enabled")),
    (
        "the fast path of encoders",
        _flip(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    ),
    (
        "how processes share tensors",
        lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
    ),
    ("the engine of quantized tensors", _other_engine),
    ("the trace function", lambda: sys.settrace(lambda *_: None)),
    ("the profile function", lambda: sys.setprofile(lambda *_: None)),
    ("the recursion limit", lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1)),
    ("the handlers of signals", lambda: signal.signal(signal.SIGUSR1, lambda *_: None)),
    ("the handlers of signals", lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)),
    (
        "the signals that are blocked",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
    ),
    ("the limits of resources", _lower_limit),
    ("the locale", lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")),
    ("the limit of digits", lambda: sys.set_int_max_str_digits(5000)),
    ("how libraries are loaded", lambda: sys.setdlopenflags(sys.getdlopenflags() ^ os.RTLD_GLOBAL)),
    ("the alarms of the process", lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000)),
    ("how often threads are switched", lambda: sys.setswitchinterval(0.003)),
    (
        "the thresholds of the garbage collector",
        lambda: gc.set_threshold(1 + gc.get_threshold()[0], *gc.get_threshold()[1:]),
    ),
    ("the context of decimal numbers", lambda: setattr(decimal.getcontext(), "prec", 7)),
    ("the context of decimal numbers", lambda: setattr(decimal.getcontext(), "clamp", 1)),
    ("the hook of exceptions", _set(sys, "excepthook", lambda *_: None)),
    ("how Python shows values and errors", _set(sys, "displayhook", lambda *_: None)),
    ("functions of Python", _set(builtins, "open", lambda *_: None)),
    ("functions of torch", _set(torch, "baddbmm", lambda *_: None)),
    *(
        ("functions of torch", _set(of, name, lambda *_: None))
        for of, name in (
            (torch.nn.Linear, "forward"),
            (torch.nn.Module, "__call__"),
            (torch, "add"),
            (torch.nn.Linear, "__call__"),
            (torch.optim.Optimizer, "zero_grad"),
            (torch.optim.Adam, "step"),
            (torch.Tensor, "backward"),
            (torch.Tensor, "sum"),
            (torch.autograd, "grad"),
            (torch.optim.lr_scheduler.LRScheduler, "step"),
        )
    ),
    ("functions of torch", _set(torch.Tensor, "T", property(lambda x: x))),
    ("functions of Python", _set(threading, "excepthook", lambda *_: None)),
    ("functions of Python", _set(random, "random", lambda: 0.5)),
    ("functions of Python", lambda: logging.setLogRecordFactory(lambda *_: None)),
    ("how torch prints", _set(torch._tensor_str.PRINT_OPTS, "precision", 3)),
    ("how often torch warns", _flip(torch.is_warn_always_enabled, torch.set_warn_always)),
    (
        "whether sparse tensors are checked",
        _flip(
            torch._C._check_sparse_tensor_invariants, torch._C._set_check_sparse_tensor_invariants
        ),
    ),
    *(
        (
            "how modules convert parameters",
            _flip(getattr(torch.__future__, f"get_{way}"), getattr(torch.__future__, f"set_{way}")),
        )
        for way in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion")
    ),
    ("environment variables", lambda: os.environ.__setitem__("OF_A_KERNEL", "1")),
    ("environment variables", lambda: os.environ.pop("OF_THE_PROGRAM", None)),
    ("the working directory", lambda: os.chdir("/")),
    ("the filters of warnings", lambda: warnings.filters.insert(0, ("x",))),
    ("the root logger", _set(logging.getLogger(), "level", 3)),
    ("the root logger", _set(logging.getLogger(), "disabled", True)),
    (
        "the handlers of the root logger",
        lambda: logging.getLogger().handlers.insert(0, logging.NullHandler()),
    ),
    ("the root logger", lambda: logging.disable(7)),
    ("the root logger", _set(logging, "raiseExceptions", False)),
    ("the handlers of the root logger", lambda: logging.root.addFilter(lambda _: False)),
    ("the folders of modules", lambda: sys.path.insert(0, "/nowhere")),
    ("the finders of modules", lambda: sys.meta_path.append(sys.meta_path[0])),
    ("the finders of modules", lambda: sys.path_hooks.append(lambda *_: None)),
    ("the arguments of the program", lambda: sys.argv.append("--further")),
    ("the callbacks of the garbage collector", lambda: gc.callbacks.append(lambda *_: None)),
    ("the garbage collector", gc.disable),
    ("Python's standard input", _set(sys, "stdin", io.StringIO())),
    ("Python's standard output", _set(sys, "stdout", io.StringIO())),
    ("Python's standard error", _set(sys, "stderr", io.StringIO())),
    ("torch's random generator", lambda: torch.rand(3)),
    ("Python's random generator", lambda: random.seed(3)),
    ("NumPy's random generator", lambda: np.random.rand()),
    ("NumPy's handling of errors", lambda: np.seterr(over="raise")),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_each_piece_of_state_is_put_back(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever a launch changes in its own thread is restored there, also if it raises then."""

    def fails() -> None:
        change()
        raise ArithmeticError

    def precisions() -> Any:
        older = cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return *older, torch.get_float32_matmul_precision()

    monkeypatch.setattr(watched_call, "_IDLE", 4e-3)
    monkeypatch.setenv("OF_THE_PROGRAM", "0")
    monkeypatch.chdir(tmp_path)
    assert gc.isenabled()
    before = process_state.State(CPU)
    tracer, by_older_functions = sys.gettrace(), precisions()
    left = []
    try:
        _, changed = watched_call.watched(change, CPU)
        left = before.changed()
        with pytest.raises(ArithmeticError):
            watched_call.watched(fails, CPU)
    finally:
        left += before.changed()
        before.restore(left)
    assert changed == [name]
    assert left == []
    assert precisions() == by_older_functions
    assert sys.gettrace() is tracer
    assert torch.ones(1).requires_grad_().requires_grad  # which torch refuses inside of a transform


#: Pieces that other threads see otherwise than their owner says, and why.
UNDETECTED = {
    "the handlers of signals": "only the main thread installs any",
    "the number of torch's threads": "each thread has its own, new threads take over the last",
    "the trace function": "each thread has its own, tools set that of all threads",
    "the profile function": "each thread has its own, tools set that of all threads",
}
ELSEWHERE = [(name, change) for name, change in CHANGES if name not in UNDETECTED] + [
    ("torch's default device", lambda: torch.set_default_device("meta")),
    ("torch's default dtype", lambda: torch.set_default_dtype(torch.float64)),
    ("the grad mode", lambda: torch.set_grad_enabled(False)),
    ("anomaly detection", lambda: torch.set_anomaly_enabled(True)),
]


#: Pieces that no test here changes, and why.
UNCHANGED = {
    "the rounding mode": "cannot be restored",
    "the priority of the process": "cannot be restored",
    "the CPUs of the process": "a machine may have one; test_lying.py changes them",
}


def test_every_piece_is_changed_by_some_test() -> None:
    changed = {name for name, _ in CHANGES + ELSEWHERE}
    assert process_state.PIECES.keys() - changed <= UNCHANGED.keys()


@pytest.mark.parametrize(("name", "change"), ELSEWHERE, ids=[name for name, _ in ELSEWHERE])
def test_a_piece_is_of_one_thread_if_no_other_thread_can_change_it(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OF_THE_PROGRAM", "0")
    monkeypatch.chdir(tmp_path)
    piece, changed = process_state.PIECES[name], threading.Event()
    seen = threading.Event()

    def other() -> list[str]:
        state = process_state.State(CPU)
        change()
        changed.set()
        seen.wait(30)
        names = state.changed()
        for each in names:  # restore() restores no generator beside the main thread
            _, write, _ = process_state.PIECES[each]
            assert write is not None
            write(state._values[each])
        return names

    before = piece.read()
    with ThreadPoolExecutor(1) as pool:
        names = pool.submit(other)
        assert changed.wait(30)
        after = piece.read()
        seen.set()
        assert names.result() == [name]
    assert (after == before) == (piece.owner == "thread")
    assert piece.read() == before


@pytest.mark.parametrize(("changes", "calls"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_launch_is_repeated_until_its_change_is_its_own(
    changes: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is, if two further calls repeat it."""
    monkeypatch.setattr(watched_call, "_IDLE", 4e-3)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made: list[int] = []

    def launch() -> int:
        made.append(len(made) + 1)
        sys.path.extend(["/nowhere"] * (made[-1] <= changes))
        return made[-1]

    result, changed = watched_call.watched(launch, CPU)
    assert len(made) == result == calls
    assert bool(changed) is (changes > 2)


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
def test_what_a_launch_changed_is_put_back_if_it_raises(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_call, "_IDLE", 4e-3)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)

    def launch() -> None:
        sys.path.append("/nowhere")
        raise error

    with pytest.raises(error):
        watched_call.watched(launch, CPU)
    assert sys.path == before


def test_a_change_that_a_launch_makes_once_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may have made it, so it stays."""
    monkeypatch.setattr(watched_call, "_IDLE", 4e-3)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folders = ["/nowhere"]

    def launch() -> None:
        if folders:
            sys.path.append(folders.pop())

    assert watched_call.watched(launch, CPU)[1] == []
    assert sys.path[-1] == "/nowhere"


@pytest.mark.parametrize("beside_main", [False, True])
def test_how_torch_computes_is_taken_back_if_it_changes_once(beside_main: bool) -> None:
    """A library that a first launch imports may allow TF32 for the whole process."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    left = ["tf32"]

    def launch() -> None:
        if left:
            matmul.fp32_precision = left.pop()

    def watch() -> Any:
        return watched_call.watched(launch, CPU)

    try:
        found = in_another_thread(watch) if beside_main else watch()
        seen = matmul.fp32_precision
    finally:
        matmul.fp32_precision = before
    assert found == (None, [])
    assert seen == ("tf32" if beside_main else before)


def test_the_backends_of_attention_are_put_back_one_by_one() -> None:
    piece = process_state.PIECES["the backends of attention"]
    assert piece.write is not None
    before = piece.read()
    try:
        for values in itertools.product((False, True), repeat=len(before)):
            piece.write(values)
            assert piece.read() == values
            found = (
                cuda.flash_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
                cuda.math_sdp_enabled(),
                cuda.cudnn_sdp_enabled(),
                cuda.fp16_bf16_reduction_math_sdp_allowed(),
            )
            assert found == values
    finally:
        piece.write(before)


def test_on_a_gpu_its_device_stream_and_generator_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"device": 0, "generator": 0}

    def piece(name: str, of: str) -> process_state.Piece:
        own = process_state.ON_CUDA[of].owner
        write = lambda v: values.__setitem__(name, v)  # noqa: E731
        return process_state.Piece(lambda: values[name], write, own)

    pieces = {
        "device": piece("device", "the current CUDA device"),
        "generator": piece("generator", "torch's random generator of the GPU"),
    }
    monkeypatch.setattr(process_state, "ON_CUDA", pieces)
    for device, found in ((CPU, []), (torch.device("cuda", 0), ["device", "generator"])):
        state = process_state.State(device)
        values.update(device=1, generator=2)
        assert state.changed() == found
        state.restore(found)
        assert not found or values == {"device": 0, "generator": 0}
        values.update(device=0, generator=0)
    assert (state.pieces["device"].owner, state.pieces["generator"].owner) == (
        "thread", "generator",
    )  # fmt: skip


def test_handlers_that_python_did_not_install_stay() -> None:
    """Python cannot install them again, and only the main thread can install any."""
    before = signal.getsignal(signal.SIGUSR1)
    process_state._set_handlers({signal.SIGUSR1: None})
    in_another_thread(lambda: process_state._set_handlers({signal.SIGUSR1: signal.SIG_IGN}))
    assert signal.getsignal(signal.SIGUSR1) is before
    try:
        process_state._set_handlers({signal.SIGUSR1: signal.SIG_IGN})
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_lowered_hard_limit_stays_and_the_soft_limit_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, written = {"a": (5, 10), "b": (1, 2)}, list[Any]()
    system = SimpleNamespace(
        RLIMIT_A="a", RLIMIT_B="b", getrlimit=now.__getitem__,
        setrlimit=lambda kind, limit: written.append((kind, limit)),
    )  # fmt: skip
    monkeypatch.setattr(process_state, "resource", system)
    monkeypatch.setattr(process_state, "_LIMITS", ["RLIMIT_A", "RLIMIT_B"])
    before = process_state._limits()
    assert before == [(5, 10), (1, 2)]
    now["a"] = (3, 7)
    process_state._set_limits(before)
    assert written == [("a", (5, 7))]


def test_modes_that_a_launch_left_are_left_before_torch_is_used_again() -> None:
    """Such a mode may raise in every function of torch."""

    class Raises(TorchFunctionMode):
        def __torch_function__(self, *_: Any) -> Any:
            raise RuntimeError("a mode that a launch left")

    before = process_state.State(CPU)

    def launch() -> None:
        for _ in range(2):
            Raises().__enter__()
        torch._C._set_cudnn_benchmark(not torch._C._get_cudnn_benchmark())

    _, changed = watched_call.watched(launch, CPU)
    assert changed == ["torch's function modes", "cuDNN's benchmark mode"]
    assert before.changed() == []


def test_values_without_a_truth_value_are_no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may leave tensors in torch's modules."""
    monkeypatch.setattr(torch, "of_the_program", torch.zeros(3), raising=False)
    piece = process_state.PIECES["functions of torch"]
    before = piece.read()
    monkeypatch.setattr(torch, "of_the_program", torch.zeros(3))
    assert before == piece.read()
    monkeypatch.setattr(torch, "add", lambda *_: None)
    assert before != piece.read()
