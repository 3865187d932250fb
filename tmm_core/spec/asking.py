"""Calls a plugin's kernel methods in one place, and checks the results.

Whatever a kernel returns or raises must cost only that kernel: not the process (``sys.exit`` in a
hook), not the call, and not the other kernels' times in the record. A kernel with an invalid answer
is set aside for the life of the process, with one warning that points at the faulty code. Ctrl-C
still stops at once.
"""

from __future__ import annotations

import inspect
import math
import numbers
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch

from tmm_core.errors import ConfigError, PluginError, TmmError, error_text, reraise, shown, warn
from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.kernel import Config, Kernel, Traits
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.supports import Supports

T = TypeVar("T")

#: Maximum number of configs of one kernel for one problem; more suggest an endless generator.
MOST_CONFIGS = 10_000


class NonsenseError(ValueError):
    """An answer of the wrong type or out of bounds."""


def read_config(kernel: Kernel[Any], document: Mapping[str, Any]) -> Config:
    """Parse a kernel's config from a record's or a caller's JSON.

    Raises:
        ConfigError: It is not a config of this kernel.
        PluginError: The kernel's own parsing failed, and the kernel is set aside.
    """
    try:
        config = kernel.config_type.from_json(document)
        return kernel._within(config) if isinstance(kernel, Asked) else config
    except ConfigError:
        raise
    except BaseException as error:
        reraise(error)
        if isinstance(kernel, Asked):
            raise kernel._set_aside("config_type", error) from error
        raise PluginError(f"config_type raised {error_text(error)}") from error


class Asked(Kernel[Any]):
    """A registered kernel with checked answers.

    After an answer that violates the spec, the kernel is set aside: it declines every problem with
    the reason, and raises it where an answer is needed.

    Args:
        kernel: A plugin's kernel.
        source: Its origin, which messages name.

    Raises:
        PluginError: It is not a kernel, or its identifying attributes are invalid.
    """

    name: str  # type: ignore[misc]  # per instance
    version: str
    supports: Supports  # type: ignore[misc]
    traits: Traits  # type: ignore[misc]
    config_type: type[Config]  # type: ignore[misc]

    def __init__(self, kernel: Any, source: Any) -> None:
        if not isinstance(kernel, Kernel):
            hint = " (the class; return an instance)" if isinstance(kernel, type) else ""
            raise PluginError(f"tmm_kernels must return Kernel objects, got {shown(kernel)}{hint}")
        self.kernel: Kernel[Any] = kernel
        self.source = source
        #: Why it is set aside; None if it is not.
        self.fault: str | None = None
        self._lock = threading.Lock()
        self.name = type(kernel).__qualname__  # until it is known
        if type(kernel).reasons_against is not Kernel.reasons_against:
            raise PluginError(
                f"kernel {kernel.name!r} is written for tmm's first "
                "protocol: declare `supports = tmm_core.Supports(…)` in place of "
                "reasons_against(), and yield other reasons from declines(problem)"
            )
        for question, check in _IDENTITY.items():
            try:
                setattr(self, question, check(getattr(kernel, question, None)))
            except BaseException as error:
                reraise(error)
                raise PluginError(
                    f"kernel {self.name!r}: {self._fault(question, error)}"
                ) from error

    def declines(self, problem: Problem) -> list[str]:
        try:
            return self._ask("declines", _reasons, problem)
        except PluginError as error:
            return [str(error)]

    def configs(self, problem: Problem) -> list[Config]:
        """The search space.

        Raises:
            PluginError: It is set aside.
        """
        return self._ask("configs", self._configs, problem)

    def default_config(self, problem: Problem) -> Config:
        """The kernel's default config.

        Raises:
            PluginError: It is set aside, or proposes nothing for this problem.
        """
        if self.fault is not None:
            raise PluginError(self.fault)
        try:
            return self._within(self.kernel.default_config(problem))
        except BaseException as error:
            reraise(error)
            if isinstance(error, Exception) and not self.configs(problem):
                raise PluginError("its search space is empty for this problem") from error
            raise self._set_aside("default_config", error) from error

    def bind(self, problem: Problem, config: Any) -> Launcher:
        """Compile and return the launcher.

        Raises:
            PluginError: The kernel raised, or returned something not callable; the message says
                where. This costs only the candidate; the kernel is not set aside. TmmError,
                torch.OutOfMemoryError: As raised by the kernel.
        """
        if self.fault is not None:
            raise PluginError(self.fault)
        try:
            launcher = self.kernel.bind(problem, config)
        except (TmmError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            reraise(error)
            raise PluginError(f"{self._whose}: {self._fault('bind', error)}") from error
        if not callable(launcher):
            fault = NonsenseError(f"returned {shown(launcher)}, which is not callable")
            raise PluginError(f"{self._whose}: {self._fault('bind', fault)}")
        return launcher

    def compile(self, problem: Problem, config: Any) -> None:
        self.kernel.compile(problem, config)

    @property
    def compiles(self) -> bool:
        """Whether it can compile ahead of ``bind``."""
        return self.fault is None and type(self.kernel).compile is not Kernel.compile

    def arithmetic(self, problem: Problem, config: Any) -> str | None:
        return self._or(None, "arithmetic", _arithmetic, problem, config)

    def estimate_us(self, problem: Problem, config: Any) -> float | None:
        return self._or(None, "estimate_us", _microseconds, problem, config)

    def workspace_bytes(self, problem: Problem, config: Any) -> int:
        return self._or(0, "workspace_bytes", _bytes, problem, config)

    def anatomy(self, problem: Problem, config: Any) -> Anatomy | None:
        return self._or(None, "anatomy", _anatomy, problem, config)

    def resources(self, problem: Problem, config: Any) -> list[Resources]:
        """The SM resources of the kernel's functions.

        Raises:
            Exception: Whatever the kernel raised; it is not set aside.
        """
        try:
            return _resources(self.kernel.resources(problem, config))
        except Exception:
            raise
        except BaseException as error:
            reraise(error)
            raise PluginError(f"{self._whose}: {self._fault('resources', error)}") from error

    def _or(self, default: T, question: str, check: Callable[[Any], T], *about: Any) -> T:
        try:
            return self._ask(question, check, *about)
        except PluginError:
            return default

    def _ask(self, question: str, check: Callable[[Any], T], *about: Any) -> T:
        if self.fault is not None:
            raise PluginError(self.fault)
        try:
            return check(getattr(self.kernel, question)(*about))
        except BaseException as error:
            reraise(error)
            raise self._set_aside(question, error) from error

    def _set_aside(self, question: str, error: BaseException) -> PluginError:
        with self._lock:
            first = self.fault is None
            if first:
                self.fault = f"{self._whose} is set aside: {self._fault(question, error)}"
        assert self.fault is not None
        if first:
            warn(self.fault)
        return PluginError(self.fault)

    @property
    def _whose(self) -> str:
        return f"kernel {self.name!r} of {self.source}"

    def _fault(self, question: str, error: BaseException) -> str:
        what = str(error) if isinstance(error, NonsenseError) else f"raised {error_text(error)}"
        where = _where(type(self.kernel), question, error)
        return f"{question} {what}" + (f" ({where})" if where else "")

    def _configs(self, answer: Any) -> list[Config]:
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise NonsenseError(f"returned {shown(answer)}, not configs")
        found = [self._within(config) for config in islice(answer, MOST_CONFIGS + 1)]
        if len(found) > MOST_CONFIGS:
            raise NonsenseError(f"yielded more than {MOST_CONFIGS} configs")
        return found

    def _within(self, config: Any) -> Config:
        """``config``, checked to be comparable, hashable and serializable."""
        if not isinstance(config, self.config_type):
            raise NonsenseError(f"gave {shown(config)}, not a {self.config_type.__name__}")
        hash(config)
        if not config == config:  # a plugin's __eq__, called here first
            raise NonsenseError(f"gave {shown(config)}, which is not equal to itself")
        if not all(isinstance(name, str) for name in config.assumes):
            raise NonsenseError(f"gave a config that assumes {shown(config.assumes)}, not names")
        for name, value in config.to_json().items():
            if type(value) not in (int, bool, str) and not (
                type(value) is float and math.isfinite(value)
            ):
                raise NonsenseError(
                    f"gave a config whose {name} is {shown(value)}, not an int, float, bool or str"
                )
        return config


def _such(holds: Callable[[Any], bool], fault: str) -> Callable[[Any], Any]:
    """A check that returns an answer that ``holds`` accepts, and raises ``fault`` for others."""

    def check(answer: Any) -> Any:
        if not holds(answer):
            raise NonsenseError(fault.format(shown(answer)))
        return answer

    return check


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str) and bool(answer.strip())


#: Attributes that are read once, when a kernel is registered.
_IDENTITY: dict[str, Callable[[Any], Any]] = {
    "name": _such(_is_text, "is {}: it has no name"),
    "version": _such(_is_text, "is {}, not a non-empty text"),
    "supports": _such(lambda x: isinstance(x, Supports), "must be a Supports, got {}"),
    "traits": _such(lambda x: isinstance(x, Traits), "must be a Traits, got {}"),
    "config_type": _such(
        lambda x: isinstance(x, type) and issubclass(x, Config), "must be a Config subclass, got {}"
    ),
}
_arithmetic: Callable[[Any], str | None] = _such(
    lambda x: x is None or _is_text(x), "returned {}, which is not a name"
)
_anatomy: Callable[[Any], Anatomy | None] = _such(
    lambda x: x is None or isinstance(x, Anatomy), "returned {}, not an Anatomy"
)


def _reasons(answer: Any) -> list[str]:
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise NonsenseError(f"returned {shown(answer)}, not a list of reasons")
    reasons = list(answer)
    if not all(isinstance(reason, str) for reason in reasons):
        raise NonsenseError(f"returned {shown(reasons)}, not reasons as text")
    return reasons


def _microseconds(answer: Any) -> float | None:
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
        raise NonsenseError(f"returned {shown(answer)}, not µs")
    time = float(answer)
    if not (math.isfinite(time) and time >= 0):
        raise NonsenseError(f"returned {shown(answer)}, which is not a time")
    return time


def _bytes(answer: Any) -> int:
    if isinstance(answer, bool) or not isinstance(answer, numbers.Integral) or answer < 0:
        raise NonsenseError(f"returned {shown(answer)}, not a number of bytes")
    return int(answer)


def _resources(answer: Any) -> list[Resources]:
    if not isinstance(answer, Iterable) or not all(isinstance(r, Resources) for r in answer):
        raise NonsenseError(f"returned {shown(answer)}, not Resources")
    return list(answer)


def _where(kind: type, question: str, error: BaseException) -> str:
    """File and line where the author's function raised, or where it begins; empty if neither is
    known."""
    member = inspect.getattr_static(kind, question, None)
    function = getattr(member, "fget", None) or getattr(member, "func", None) or member
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    if code is None:
        # For an attribute, its class.
        try:
            return f"{inspect.getfile(kind)}:{inspect.getsourcelines(kind)[1]}"
        except (OSError, TypeError):
            return ""
    within = [frame for frame in frames if frame.filename == code.co_filename]
    line = within[-1].lineno if within else code.co_firstlineno
    return f"{code.co_filename}:{line}"
