"""Guards around other people's code and texts, and warnings that point at the user's line.

tmm runs code of plugins and opens files of anybody. A failure there costs a feature, never the
matmul. An exception that interrupts the process, such as Ctrl-C, still propagates.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The packages of this distribution.
OWN_PACKAGES: Final = {"tmm_base", "tmm_cache", "tmm_core", "tmm_blas", "tmm_triton"}
#: Packages whose frames are skipped to find the user's line that led to a fault.
_BETWEEN: Final = OWN_PACKAGES | {
    *("torch", "pluggy"),
    *("contextlib", "functools", "concurrent", "threading"),
}


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning that points at the user's line that called into tmm. A fixed stack level
    would not do, since ten to thirty frames are between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


# Cached: dtypes, layouts and parameter names repeat in every line of a list.
@lru_cache(maxsize=1024)
def printable(text: str) -> str:
    """The text without control characters: records are untrusted, and terminals obey them."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def unwrapped(function: Any) -> Any:
    """The function inside its decorators; the function itself if it wraps itself."""
    with suppress(ValueError):
        return inspect.unwrap(function)
    return function


def function_of(value: object) -> FunctionType | None:
    """The Python function that a call of a method, partial, property, cache, jit function or
    callable object runs first; None if there is none."""
    for _ in range(_MOST_LAYERS):
        if isinstance(value, FunctionType):
            return value
        inner = next((name for name in _INNER if hasattr(value, name)), None)
        if inner is None:
            call = getattr(type(value), "__call__", None)  # noqa: B004  # the function, which is read
            return call if isinstance(call, FunctionType) else None
        value = getattr(value, inner)
    return None


# -- exceptions that are raised again ----------------------------------------------------


def reraise(error: BaseException) -> None:
    """Raise ``error`` again unless the guarded code itself caused it.

    Every handler that turns an exception into a fault of a plugin, file or compiler calls this
    first. These exceptions are raised again:

    - Ctrl-C;
    - an exception that a signal handler raised, wherever it interrupted the process, also if the
      guarded code raised another one from it;
    - a warning of tmm's own under ``-W error``;
    - a ``RecursionError``, if the guard's callers, not the guarded code, take more than half of the
      frames that Python allows;
    - a ``BaseException`` that no foreign frame raised, such as one set from another thread;
    - a ``BaseException``, also ``SystemExit``, of a function that belongs to the user's call
      (:func:`of_the_call`).

    Another ``SystemExit`` is raised again only from a signal handler: a plugin may call
    ``sys.exit``.
    """
    for cause in chain(error, suppressed=True):
        if _must_reraise(cause, frames_of(cause)):
            try:
                raise cause
            finally:
                # The traceback has this frame: such a cycle would keep what the interrupted frames
                # hold, a lock for example, until the cyclic GC runs.
                del cause, error


def of_the_call(function: _Function) -> _Function:
    """Decorate a function that runs code of the user's call. No guard holds back an exception that
    is no ``Exception`` and that passed through it."""
    _OF_THE_CALL.add(id(function.__code__))
    return function


def chain(error: BaseException, *, suppressed: bool = False) -> Iterator[BaseException]:
    """An exception, then its causes and the exceptions that were being handled when it was raised.

    An exception that the caller of the guarded code was handling is left out. No code of an
    exception's class runs.

    Args:
        suppressed: Include exceptions that ``raise … from None`` hides.
    """
    seen: list[BaseException] = []
    frames: list[FrameType] = []
    waiting: list[tuple[BaseException | None, bool]] = [(error, True)]
    while waiting and len(seen) < _MOST_CAUSES:
        each, explicit = waiting.pop(0)
        if each is None or any(each is other for other in seen):
            continue
        own = frames_of(each)
        outside = own[0] not in frames if own else suppressed
        if outside and not explicit:
            continue  # handled further out
        seen.append(each)
        frames += own
        yield each
        waiting.append((_CAUSE(each), not suppressed))
        if suppressed or not _SUPPRESSED(each):
            waiting.append((_CONTEXT(each), False))
        if _GROUP is not None and issubclass(type(each), _GROUP):
            waiting += [(one, True) for one in _GROUP.exceptions.__get__(each)]


def drop_frames(error: BaseException) -> None:
    """Drop the frames of an exception and its causes, before it is kept: frames refer to their
    callers, whose variables would live as long. An exception that the caller of the guarded code
    was handling is dropped whole."""
    causes = list(chain(error, suppressed=True))
    for each in causes:
        _SLOTS["__traceback__"].__set__(each, None)
        if not any(_CONTEXT(each) is other for other in causes):
            _SLOTS["__context__"].__set__(each, None)


def _must_reraise(error: BaseException, frames: Sequence[FrameType]) -> bool:
    """Whether :func:`reraise` raises this exception, whose traceback has these frames."""
    kind = type(error)
    if issubclass(kind, KeyboardInterrupt):
        return True
    if issubclass(kind, Warning) and any(frame.f_code is _WARNING_CODE for frame in frames):
        return True
    if issubclass(kind, RecursionError) and _is_deep():
        return True
    handlers = {id(code) for code in _handlers()} if frames else ()
    if any(id(frame.f_code) in handlers or _is_interruption(frame) for frame in frames):
        return True
    if not issubclass(kind, Exception) and any(id(f.f_code) in _OF_THE_CALL for f in frames):
        return True
    ordinary = issubclass(kind, Exception | SystemExit | GeneratorExit)
    return not ordinary and not any(map(_is_foreign, frames))


def _is_deep() -> bool:
    """Whether more than half of the frames that Python allows are in use."""
    frame: FrameType | None = sys._getframe()
    for _ in range(sys.getrecursionlimit() // 2):
        if frame is None:
            return False
        frame = frame.f_back
    return frame is not None


class suppress:  # noqa: N801  # used like contextlib.suppress
    """``contextlib.suppress`` for faults only: exceptions that :func:`reraise` raises propagate.

    ``TimeoutError`` of a SIGALRM handler is an ``OSError`` too.
    """

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not issubclass(type(error), self._kinds):
            return False
        try:
            reraise(error)
        finally:
            del error, trace  # they would form a cycle, as in `reraise`
        return True


# A third-party exception may define attributes of these names, and ``__class__``, that raise.
_SLOTS: Final[Any] = BaseException.__dict__
_TRACEBACK: Final = _SLOTS["__traceback__"].__get__
_CAUSE: Final = _SLOTS["__cause__"].__get__
_CONTEXT: Final = _SLOTS["__context__"].__get__
_SUPPRESSED: Final = _SLOTS["__suppress_context__"].__get__
#: Absent before Python 3.11.
_GROUP: Final[Any] = getattr(builtins, "BaseExceptionGroup", None)
#: Exceptions of a chain that are examined.
_MOST_CAUSES: Final = 16
#: Layers around a function, and the attributes in which they hold what they wrap.
_MOST_LAYERS: Final = 16
_INNER: Final = ("__func__", "func", "fget", "fn", "__wrapped__")
#: Without the conversion to enums, which takes most of 100 µs for all signals.
_getsignal: Final = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
#: The flag of code that takes ``*args`` (``inspect.CO_VARARGS``, whose import takes 10 ms).
_VARARGS: Final = 0x04
#: The flag of a function's code (``inspect.CO_OPTIMIZED``).
_OPTIMIZED: Final = 0x01
_WARNING_CODE: Final = warn_caller.__code__
#: The ids of the code of the functions that :func:`of_the_call` decorates.
_OF_THE_CALL: Final[set[int]] = set()


def traceback_of(error: BaseException) -> Iterator[TracebackType]:
    """The entries of an exception's traceback, outermost first. No code of its class runs."""
    trace = _TRACEBACK(error)
    while trace is not None:
        yield trace
        trace = trace.tb_next


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames of an exception's traceback, outermost first."""
    return [trace.tb_frame for trace in traceback_of(error)]


def _is_interruption(frame: FrameType) -> bool:
    """Whether a frame is a signal handler's.

    Python calls a handler with the signal's number and the interrupted frame, which is its caller.
    The handler may have been replaced since.
    """
    code, values = frame.f_code, frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _VARARGS:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        arguments += rest if type(rest) is tuple else ()
    if type(values) is dict and code.co_flags & _OPTIMIZED:
        # Before Python 3.13 the frame keeps this copy of its variables, the exception among them.
        # The cycle would keep all callers' variables until the cyclic GC runs.
        values.clear()
    return any(
        issubclass(type(number), int) and interrupted is frame.f_back is not None
        for number, interrupted in itertools.pairwise(arguments)
    )


def _handlers() -> Iterator[CodeType]:
    """Yield the code of the signal handlers that are installed now."""
    for number in range(1, signal.NSIG):
        handler: Any = _getsignal(number)
        if callable(handler) and (function := function_of(handler)) is not None:
            yield function.__code__


def _package(frame: FrameType) -> str:
    """The top package of a frame's module. Generated functions have no module: they are tmm's."""
    return (frame.f_globals.get("__name__") or "tmm_core").partition(".")[0]


def _is_foreign(frame: FrameType) -> bool:
    """Whether a frame belongs neither to tmm nor to the standard library."""
    package = _package(frame)
    return package not in OWN_PACKAGES and package not in sys.stdlib_module_names


def foreign_place(error: BaseException) -> str:
    """File and line of the innermost foreign frame of an exception; empty if there is none."""
    place = ""
    for trace in traceback_of(error):
        if _is_foreign(trace.tb_frame):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return place
