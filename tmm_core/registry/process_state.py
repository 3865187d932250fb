"""The state of the process and of a thread that a launch may not change, such as torch's default
dtype.

A launch may change nothing but its output. A kernel that seeds torch's generator or enables TF32
would change results that have nothing to do with it.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Literal, NamedTuple

import torch
from tmm_base.guards import suppress

from tmm_core import settings
from tmm_core.compat import private

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

nn, cuda = torch.nn, torch.backends.cuda
_matmul = cuda.matmul

#: Who may change a piece of state besides a launch. ``thread``: no other thread. ``main``: the main
#: thread, since it is how torch computes. ``any``: any thread at any time. ``generator``: likewise,
#: and the state is a random generator's.
Owner = Literal["thread", "main", "any", "generator"]


class Piece(NamedTuple):
    """A piece of state: how to read it, and how to restore it (None: it cannot be restored)."""

    read: Callable[[], Any]
    write: Callable[[Any], Any] | None
    owner: Owner = "any"


def _attributes(places: Callable[[], Iterable[tuple[Any, str]]], owner: Owner = "any") -> Piece:
    """Attributes of objects: classes get no attribute of their own for one that they inherit."""

    def write(values: list[Any]) -> None:
        for (of, name), value in zip(places(), values, strict=True):
            if getattr(of, name, None) != value:
                setattr(of, name, value)

    return Piece(lambda: [getattr(of, name, None) for of, name in places()], write, owner)


def _attribute(of: Any, name: str, owner: Owner = "any") -> Piece:
    return _attributes(lambda: [(of, name)], owner)


def _items(of: Callable[[], Any]) -> Piece:
    """The items of a list."""

    def write(items: list[Any]) -> None:
        of()[:] = items

    return Piece(lambda: list(of()), write)


def _called_at_events(read: Callable[[], Any], write: Callable[[Any], None]) -> Piece:
    """A function that a debugger or profiler of any thread sets in all threads. Python shows an
    object in place of a function in C, such as cProfile's, and cannot call it."""

    def restore(function: Any) -> None:
        if function is None or callable(function):
            write(function)

    return Piece(read, restore)


def _entries(of: Callable[[], MutableMapping[str, Any]]) -> Piece:
    """The entries of a mapping, from which another thread may remove some meanwhile."""

    def read() -> dict[str, Any]:
        while True:
            with suppress(KeyError):
                return dict(of())

    def write(before: dict[str, Any]) -> None:
        for name in of().keys() - before.keys():
            of().pop(name, None)
        of().update(before)

    return Piece(read, write)


def _together(pieces: list[Piece], owner: Owner = "any") -> Piece:
    """Several pieces under one name."""

    def write(values: tuple[Any, ...]) -> None:
        for piece, value in zip(pieces, values, strict=True):
            if piece.write is not None and piece.read() != value:
                piece.write(value)

    return Piece(lambda: tuple(piece.read() for piece in pieces), write, owner)


_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD")
    if hasattr(signal, name)  # Windows has few
]


#: A denormal number: halved, it is zero where the processor flushes denormals.
_DENORMAL = 1e-310


#: A number that shows the rounding mode: 1 + x is 1 only if numbers are rounded to the nearest, or
#: towards zero.
_LITTLE = 1e-30


def _rounding() -> tuple[bool, ...]:
    return 1 + _LITTLE == 1, -1 - _LITTLE == -1, 1 - _LITTLE == 1


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(handlers: dict[int, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if handler is not None:  # else Python did not install it
                signal.signal(number, handler)


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def _set_autocast(states: tuple[Any, ...]) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


_CPU = torch.device("cpu")


def _default_device() -> torch.device:
    with suppress(Exception):  # of a mode that a launch left active
        return torch.get_default_device()
    return _CPU


def _stack(name: str) -> Piece:
    """The size of a stack of modes. It is restored by leaving the modes on top."""
    size = private(f"torch._C._len_torch_{name}_stack", lambda: 0)
    pop = private(f"torch._C._pop_torch_{name}_stack", lambda *_: None)
    given = (None,) if name == "dispatch" else ()

    def write(count: int) -> None:
        for _ in range(size() - count):
            pop(*given)

    return Piece(size, write, "thread")


_hooks = private("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: None)
_pop_hooks = private("torch._C._autograd._pop_saved_tensors_default_hooks", lambda: None)


def _set_hooks(before: Any) -> None:
    while _hooks(True) not in (before, None):
        _pop_hooks()


def _switch(name: str, read: str = "_get", owner: Owner = "main") -> Piece:
    """A setting of ``torch._C``."""
    value = private(f"torch._C.{read}_{name}", lambda: None)
    return Piece(value, private(f"torch._C._set_{name}", lambda _: None), owner)


_LIMITS = [] if resource is None else [n for n in dir(resource) if n.startswith("RLIMIT_")]


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(getattr(resource, name)) for name in _LIMITS]


def _set_limits(limits: list[tuple[int, int]]) -> None:
    for name, limit in zip(_LIMITS, limits, strict=True):
        kind = getattr(resource, name)
        if (now := resource.getrlimit(kind)) != limit:
            resource.setrlimit(kind, (limit[0], now[1]))  # a hard limit cannot be raised


class _Functions:
    """The functions, classes and properties of modules and classes. Modules may get further
    submodules and other values meanwhile."""

    def __init__(self, places: list[Any]) -> None:
        self.places = places
        self.values = [vars(of).copy() for of in places]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Functions)
        with suppress(Exception):  # strangers' values, such as tensors, may not be comparable
            if self.values == other.values:
                return True
        return not other.replaced(self.values)

    def replaced(self, now: list[dict[str, Any]]) -> list[tuple[Any, str]]:
        """Return the names whose value differs now, each after its module or class."""
        return [
            (of, name)
            for of, old, new in zip(self.places, self.values, now, strict=True)
            for name in (old.keys() | new.keys()) - {"Storage"}  # it follows the default dtype
            if old.get(name) is not (value := new.get(name))
            and any(callable(v) or isinstance(v, _DESCRIPTORS) for v in (old.get(name), value))
        ]

    def restore(self) -> None:
        for of, name in self.replaced(_Functions(self.places).values):
            values = self.values[self.places.index(of)]
            setattr(of, name, values[name]) if name in values else delattr(of, name)


_DESCRIPTORS = (classmethod, property)
#: Where a plugin may replace functions, to compute all products of the process for example.
_OF_PYTHON = [builtins, os, time, threading, threading.Thread, logging, random]
_MODULES = [torch, torch.autograd, torch.cuda, torch.fft, torch.linalg, nn.functional, nn.utils]
_OF_TORCH = [*_MODULES, torch.Tensor, torch.utils.data.DataLoader]
_OF_TORCH += [
    value
    for module in (nn, torch.optim, torch.optim.lr_scheduler)
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__.startswith(module.__name__)
]
#: Backends before their operators, which follow them unless they have a setting of their own.
_PRECISIONS = [
    *(
        (private(f"torch.backends{name}", None), "fp32_precision")
        for name in ("", ".cudnn", ".cudnn.conv", ".cudnn.rnn")
    ),
    (_matmul, "fp32_precision"),
    *(
        (private(f"torch.backends.mkldnn{name}", None), "fp32_precision")
        for name in ("", ".conv", ".rnn", ".matmul")
    ),
]


def _older(read: Callable[[], Any], write: Callable[[Any], None]) -> Piece:
    """A precision by an older function of torch. Its value is None if newer functions made another
    choice."""

    def value() -> Any:
        with suppress(RuntimeError):
            return read()
        return None

    return Piece(value, lambda value: None if value is None else write(value))


#: They come before the newer ones, whose values they also set.
_OLDER_PRECISIONS = [
    _older(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _older(
        lambda: torch.backends.cudnn.allow_tf32,
        lambda allowed: setattr(torch.backends.cudnn, "allow_tf32", allowed),
    ),
]
_LOGGERS = [(logging.root, "level"), (logging.root, "disabled"), (logging.root.manager, "disable")]
_LOGGERS += [(logging, "raiseExceptions")]
_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _numpy_state() -> Any:
    numpy = _numpy()
    if numpy is None:
        return None
    kind, keys, *rest = numpy.random.get_state()
    return kind, keys.tobytes(), *rest


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        kind, keys, *rest = state
        numpy = _numpy()
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


def _pair(of: Any, name: str) -> Piece:
    """A setting that a module has two functions for."""
    return Piece(getattr(of, f"get_{name}"), getattr(of, f"set_{name}"))


def _hooks_of_modules(name: str) -> Piece:
    """Functions that torch calls for every module, around its forward for example."""
    hooks: Any = private(f"torch.nn.modules.module._global_{name}_hooks", {})
    return _entries(lambda: hooks)


_MODULE_HOOKS = ("forward", "forward_pre", "backward", "backward_pre", "module_registration",
                 "parameter_registration", "buffer_registration")  # fmt: skip

#: The alarms that the system counts down for the process; Windows has none.
_ALARMS = [getattr(signal, n) for n in ("ITIMER_REAL", "ITIMER_VIRTUAL") if hasattr(signal, n)]


def _alarm(alarm: Any) -> Piece:
    """Whether an alarm is set. An alarm that has gone off is not set again."""
    return Piece(
        lambda: signal.getitimer(alarm)[0] > 0,
        lambda before: before or signal.setitimer(alarm, 0),
    )


def _generator(module: Any) -> Piece:
    """The state of the random generator of torch or torch.cuda, as bytes, which can be compared."""

    def write(state: bytes) -> None:
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Piece(lambda: bytes(module.get_rng_state().numpy()), write, "generator")


def _directory() -> str | None:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return None


def _set_directory(path: str | None) -> None:
    if path is not None:
        with suppress(OSError):  # another thread removed it
            os.chdir(path)


_depth = private("torch._C._functorch.get_dynamic_layer_stack_depth", lambda: 0)
_end = private("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth", lambda _: None)


_entered: list[Any] = []


def _set_inference_mode(enabled: bool) -> None:
    """The mode ends with its object, and sets the grad mode."""
    _entered.append(torch.inference_mode(enabled))
    _entered[-1].__enter__()


_printing = private("torch._tensor_str.PRINT_OPTS", types.SimpleNamespace())

#: Pieces of state by name. Modes come first: they may change what the functions below do.
PIECES: dict[str, Piece] = {
    "torch's default device": Piece(
        _default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        "thread",
    ),
    "tmm's settings": Piece(settings.innermost, settings.put_back, "thread"),
    "torch's function modes": _stack("function"),
    "torch's dispatch modes": _stack("dispatch"),
    "the hooks of saved tensors": Piece(lambda: _hooks(True), _set_hooks, "thread"),
    "torch's default dtype": Piece(torch.get_default_dtype, torch.set_default_dtype),
    "the number of torch's threads": Piece(torch.get_num_threads, torch.set_num_threads),
    "the inference mode": Piece(torch.is_inference_mode_enabled, _set_inference_mode, "thread"),
    "the grad mode": Piece(torch.is_grad_enabled, torch.set_grad_enabled, "thread"),
    "autocast": Piece(_autocast, _set_autocast, "thread"),
    "anomaly detection": Piece(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.set_anomaly_enabled(*values),
    ),
    "the forward mode of derivatives": _switch("fwd_grad_enabled", "_is", "thread"),
    "the hooks of every module": _together([_hooks_of_modules(name) for name in _MODULE_HOOKS]),
    "torch's deterministic mode": Piece(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        "main",
    ),
    "the flushing of denormal numbers": Piece(
        lambda: _DENORMAL * 0.5 == 0, torch.set_flush_denormal, "thread"
    ),
    "the fp32 precision": _together([*_OLDER_PRECISIONS, _attributes(lambda: _PRECISIONS)], "main"),
    "the reduced precision of fp16 sums": _attribute(
        _matmul, "allow_fp16_reduced_precision_reduction", "main"
    ),
    "the reduced precision of bf16 sums": _attribute(
        _matmul, "allow_bf16_reduced_precision_reduction", "main"
    ),
    "fp16 accumulation": _attribute(_matmul, "allow_fp16_accumulation", "main"),
    "cuDNN's benchmark mode": _switch("cudnn_benchmark"),
    "cuDNN's deterministic mode": _switch("cudnn_deterministic"),
    "whether torch uses cuDNN": _switch("cudnn_enabled"),
    "whether torch uses oneDNN": _switch("mkldnn_enabled"),
    "oneDNN's deterministic mode": _switch("mkldnn_deterministic"),
    "whether torch uses NNPACK": _switch("nnpack_enabled"),
    "the order of einsum": _attribute(torch.backends.opt_einsum, "enabled"),
    "the fast path of encoders": _pair(torch.backends.mha, "fastpath_enabled"),
    "how processes share tensors": _pair(torch.multiprocessing, "sharing_strategy"),
    "the backends of attention": _together(
        [
            Piece(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
            Piece(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
            Piece(cuda.math_sdp_enabled, cuda.enable_math_sdp),
            Piece(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
            _switch("math_sdp_allow_fp16_bf16_reduction"),
        ],
        "main",
    ),
    "the autocast cache": Piece(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, "thread"
    ),
    "autograd's threads": _switch("multithreading_enabled", "_is", "thread"),
    "how autograd computes views again": _switch("view_replay_enabled", "_is", "thread"),
    "the transforms of torch.func": Piece(_depth, _end, "thread"),
    "whether torch calls __torch_function__": _switch("torch_function_state", owner="thread"),
    "the filling of new memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "the rounding mode": Piece(_rounding, None, "thread"),
    "the trace function": _called_at_events(sys.gettrace, sys.settrace),
    "the profile function": _called_at_events(sys.getprofile, sys.setprofile),
    "the recursion limit": Piece(sys.getrecursionlimit, sys.setrecursionlimit),
    "the handlers of signals": Piece(_handlers, _set_handlers),
    "how often threads are switched": Piece(sys.getswitchinterval, sys.setswitchinterval),
    "the thresholds of the garbage collector": Piece(
        gc.get_threshold, lambda values: gc.set_threshold(*values)
    ),
    "the locale": Piece(
        lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)
    ),
    "the context of decimal numbers": _attributes(
        lambda: [(decimal.getcontext(), name) for name in _DECIMAL], "thread"
    ),
    "the hook of exceptions": _attribute(sys, "excepthook"),
    "how Python shows values and errors": _attributes(
        lambda: [(sys, "displayhook"), (sys, "unraisablehook"), (warnings, "showwarning")]
    ),
    "functions of Python": Piece(lambda: _Functions(_OF_PYTHON), _Functions.restore),
    "the alarms of the process": _together([_alarm(each) for each in _ALARMS]),
    "functions of torch": Piece(lambda: _Functions(_OF_TORCH), _Functions.restore),
    "how torch prints": _entries(lambda: vars(_printing)),
    "how often torch warns": Piece(torch.is_warn_always_enabled, torch.set_warn_always),
    "whether sparse tensors are checked": _switch("check_sparse_tensor_invariants", "", "any"),
    "the engine of quantized tensors": _attribute(torch.backends.quantized, "engine"),
    "how modules convert parameters": _together(
        [
            _pair(torch.__future__, f"{way}_module_params_on_conversion")
            for way in ("swap", "overwrite")
        ]
    ),
    "NumPy's handling of errors": Piece(
        lambda: _numpy() and _numpy().geterr(),
        lambda value: value and _numpy().seterr(**value),
        "thread",
    ),
    "environment variables": _entries(lambda: os.environ),
    "the working directory": Piece(_directory, _set_directory),
    "the filters of warnings": _items(lambda: warnings.filters),
    "the root logger": _attributes(lambda: _LOGGERS),
    "the handlers of the root logger": _together(
        [_items(lambda: logging.root.handlers), _items(lambda: logging.root.filters)]
    ),
    "the folders of modules": _items(lambda: sys.path),
    "the finders of modules": _together(
        [_items(lambda: sys.meta_path), _items(lambda: sys.path_hooks)]
    ),
    "the arguments of the program": _items(lambda: sys.argv),
    "the callbacks of the garbage collector": _items(lambda: gc.callbacks),
    "the garbage collector": Piece(
        gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()
    ),
    "Python's standard input": _attribute(sys, "stdin"),
    "Python's standard output": _attribute(sys, "stdout"),
    "Python's standard error": _attribute(sys, "stderr"),
    "torch's random generator": _generator(torch),
    "Python's random generator": Piece(random.getstate, random.setstate, "generator"),
    "NumPy's random generator": Piece(_numpy_state, _set_numpy_state, "generator"),
}
# Pieces that only some systems have.
if hasattr(signal, "pthread_sigmask"):
    PIECES["the signals that are blocked"] = Piece(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda signals: signal.pthread_sigmask(signal.SIG_SETMASK, signals),
        "thread",
    )
if hasattr(sys, "setdlopenflags"):
    PIECES["how libraries are loaded"] = Piece(sys.getdlopenflags, sys.setdlopenflags)
if hasattr(sys, "set_int_max_str_digits"):  # absent before Python 3.10.7
    PIECES["the limit of digits"] = _pair(sys, "int_max_str_digits")
if hasattr(os, "sched_getaffinity"):
    PIECES["the CPUs of the process"] = Piece(
        lambda: os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus)
    )
if hasattr(os, "getpriority"):
    PIECES["the priority of the process"] = Piece(lambda: os.getpriority(os.PRIO_PROCESS, 0), None)
if resource is not None:
    PIECES["the limits of resources"] = Piece(_limits, _set_limits)
#: Further pieces where the launch is on a GPU.
ON_CUDA: dict[str, Piece] = {
    "the current CUDA device": Piece(torch.cuda.current_device, torch.cuda.set_device, "thread"),
    "the current CUDA stream": Piece(torch.cuda.current_stream, torch.cuda.set_stream, "thread"),
    "torch's random generator of the GPU": _generator(torch.cuda),
}


class State:
    """The state of this process and thread at one time."""

    def __init__(self, device: torch.device, names: Iterable[str] | None = None) -> None:
        #: Whether the main thread is another thread. It draws random numbers, and decides how torch
        #: computes.
        self._beside_main = threading.current_thread() is not threading.main_thread()
        self.pieces = PIECES | ON_CUDA if device.type == "cuda" else PIECES
        if names is not None:
            self.pieces = {name: self.pieces[name] for name in names}
        self._values = {name: piece.read() for name, piece in self.pieces.items()}

    def changed(self) -> list[str]:
        """Return the names of the pieces that differ now. Pieces that belong to this thread are
        restored at once: modes may change every function of torch, or raise in it."""
        names = []
        for name, piece in self.pieces.items():
            if piece.read() != self._values[name]:
                names.append(name)
                if piece.owner == "thread":
                    self.restore([name])
        return names

    def restore(self, names: Iterable[str]) -> None:
        """Restore these pieces, but no random generator while the main thread runs in parallel:
        that thread could draw the same numbers again."""
        for name in names:
            _, write, owner = self.pieces[name]
            if write is not None and not (self._beside_main and owner == "generator"):
                write(self._values[name])

    def put_back(self) -> list[str]:
        """Restore all pieces that other threads do not change meanwhile; returns their names."""
        found = self.changed()
        if self._beside_main:
            found = [name for name in found if self.pieces[name].owner == "thread"]
        self.restore(found)
        return found

    def takes_back(self, name: str) -> bool:
        """Whether this thread alone decides about this piece: a library that a launch imports may
        change it once."""
        return self.pieces[name].owner == "main" and not self._beside_main
