"""Calls a plugin's kernel methods in one place, and checks the results.

A kernel's results and exceptions may cost only that kernel. They may not cost the process
(``sys.exit`` in a hook), the call, or the other kernels' times in the record. Results are checked
against the limits of records (:mod:`tmm_cache.fields`). A kernel with an invalid result is set
aside for the life of the process, with a warning that points at the faulty code. Exceptions of
signal handlers are re-raised.
"""

from __future__ import annotations

import copy
import math
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar

import torch
from tmm_cache.cache_errors import RecordError
from tmm_cache.fields import (
    A_NAME,
    NAME_MAX,
    PARAMETERS_MAX,
    SIZE_MAX,
    TEXT_MAX,
    is_name,
    parameters,
)

from tmm_core.errors import (
    ConfigError,
    PluginError,
    TmmError,
    error_message,
    error_text,
    plain_text,
    reraise,
    shown,
    warn_of_plugin,
)
from tmm_core.registry.places import place_of
from tmm_core.registry.watched_call import OF_THE_THREAD, putting_back
from tmm_core.settings import nested
from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.code import version_of
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.groups import Groups
from tmm_core.spec.kernel import Config, Kernel, Traits
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.spec.supports import Supports
from tmm_core.spec.watch import COMPILE_PATIENCE, watched

T = TypeVar("T")

#: Maximum number of configs of one kernel for one problem, and of reasons; more suggest an endless
#: generator.
MOST_CONFIGS, MOST_REASONS = 10_000, 100


class InvalidResultError(ValueError):
    """A plugin's result has the wrong type or is out of bounds."""


def read_config(kernel: Kernel[Any], document: Mapping[str, Any]) -> Config:
    """Parse a kernel's config from a record's or a caller's JSON.

    Raises:
        ConfigError: It is not a config of this kernel.
        PluginError: The kernel's own parsing failed, and the kernel is set aside.
    """
    if not isinstance(kernel, CheckedKernel):
        return kernel.config_type.from_json(document)
    try:
        with kernel._running("config_type"):
            return kernel._config(kernel.config_type.from_json(document))
    except ConfigError:
        raise
    except BaseException as error:
        reraise(error)
        raise kernel._failed("config_type", error) from error


class CheckedKernel(Kernel[Any]):
    """A registered kernel whose results are checked.

    After a result that violates the spec, the kernel is set aside. It then declines every problem
    with the reason, and raises it where a result is needed.

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
        if not issubclass(type(kernel), Kernel):  # isinstance would believe its __class__
            hint = " (the class; return an instance)" if isinstance(kernel, type) else ""
            raise PluginError(f"tmm_kernels must return Kernel objects, got {shown(kernel)}{hint}")
        self.kernel: Kernel[Any] = kernel
        self.source = source
        #: Why it is set aside; None if it is not.
        self.fault: str | None = None
        self._lock = threading.Lock()
        #: The last problem, and the copy that the kernel got.
        self._problems: tuple[Problem, Problem] | None = None
        self.name = plain_text(type(kernel).__qualname__, NAME_MAX)  # until it is known
        for attribute, check in _IDENTITY.items():
            try:
                setattr(self, attribute, check(getattr(kernel, attribute, None)))
                if attribute == "version":
                    self.version = version_of(kernel, self.version, source.distribution)
            except BaseException as error:
                reraise(error)
                why = self._fault(attribute, error)
                raise PluginError(f"kernel {self.name!r}: {why}") from error
            if type(kernel).reasons_against is not Kernel.reasons_against:
                raise PluginError(
                    f"kernel {self.name!r} is written for tmm's first "
                    "protocol: declare `supports = tmm_core.Supports(…)` in place of "
                    "reasons_against(), and yield other reasons from declines(problem)"
                )

    def reasons_against(self, problem: Problem) -> list[str]:
        if self.fault is not None:
            return [self.fault]
        try:
            # They may be of a plugin's class, or hold collections that raise.
            with nullcontext() if self.source.is_ours else self._running("supports"):
                reasons = _reasons(self.supports.reasons_against(self._own(problem)))
        except BaseException as error:
            reraise(error)
            return [str(self._failed("supports", error))]
        return reasons or self.declines(problem)

    def declines(self, problem: Problem) -> list[str]:
        try:
            return self._call("declines", _reasons, problem)
        except PluginError as error:
            return [str(error)]

    def configs(self, problem: Problem) -> list[Config]:
        return self._call("configs", self._configs, problem)

    def default_config(self, problem: Problem) -> Config:
        if self.fault is not None:
            raise PluginError(self.fault)
        try:
            with self._running("default_config"):
                return self._config(self.kernel.default_config(self._own(problem)))
        except BaseException as error:
            reraise(error)
            if issubclass(type(error), Exception) and not self.configs(problem):
                raise PluginError("its search space is empty for this problem") from error
            raise self._failed("default_config", error) from error

    def bind(self, problem: Problem, config: Any) -> Launcher:
        """Compile and return the launcher.

        Raises:
            PluginError: The kernel raised, or returned something not callable; the message says
                where. This costs only the candidate; the kernel is not set aside.
            TmmError, torch.OutOfMemoryError: As raised by the kernel.
        """
        passing = (TmmError, torch.OutOfMemoryError)
        with torch.inference_mode(False):  # calls outside of it may write to what a launcher holds
            return self._call("bind", _launcher, problem, config, compiles=True, passing=passing)

    def compile(self, problem: Problem, config: Any) -> None:
        with self._running("compile", COMPILE_PATIENCE):
            self.kernel.compile(self._own(problem), config)

    @property
    def compiles(self) -> bool:
        """Whether the kernel can compile ahead of ``bind``."""
        return self.fault is None and type(self.kernel).compile is not Kernel.compile

    def arithmetic(self, problem: Problem, config: Any) -> str | None:
        return self._or(None, "arithmetic", _arithmetic, problem, config)

    def estimate_us(self, problem: Problem, config: Any) -> float | None:
        return self._or(None, "estimate_us", _microseconds, problem, config)

    def beside(self, problem: Problem) -> Config | None:
        return self._or(None, "beside", self._config_or_none, problem)

    def workspace_bytes(self, problem: Problem, config: Any) -> int:
        return self._or(0, "workspace_bytes", _bytes, problem, config)

    def anatomy(self, problem: Problem, config: Any) -> Anatomy | None:
        return self._or(None, "anatomy", _anatomy, problem, config)

    def resources(self, problem: Problem, config: Any) -> list[Resources]:
        """The SM resources of the kernel's functions.

        Raises:
            Exception: The kernel's exception. The kernel is not set aside.
        """
        passing = (Exception,)
        return self._call("resources", _resources, problem, config, compiles=True, passing=passing)

    def _call(
        self,
        method: str,
        check: Callable[[Any], T],
        problem: Problem,
        *config: Any,
        compiles: bool = False,
        passing: tuple[type[BaseException], ...] = (),
    ) -> T:
        """The checked result of one of the kernel's methods.

        Args:
            compiles: The method may take long, and a failure costs only the candidate.
            passing: Types of exceptions that are re-raised.

        Raises:
            PluginError: The kernel is set aside, now or before, or the candidate fails.
        """
        if self.fault is not None:
            raise PluginError(self.fault)
        try:
            with self._running(method, COMPILE_PATIENCE if compiles else None):
                return check(getattr(self.kernel, method)(self._own(problem), *config))
        except passing:
            raise
        except BaseException as error:
            reraise(error)
            raise self._failed(method, error, compiles) from error

    def _own(self, problem: Problem) -> Problem:
        """The problem for the kernel's code. A plugin may change what it gets, frozen or not: it
        gets a copy of its own."""
        if self.source.is_ours:
            return problem
        if (last := self._problems) is None or last[0] is not problem:
            values = {each: getattr(problem, each) for each in Problem.__slots__}
            copied = (DeviceFingerprint, Groups, Operand)
            of = {each: copy.copy(x) if type(x) in copied else x for each, x in values.items()}
            self._problems = last = problem, Problem(**of)
        return last[1]

    def _or(self, default: T, method: str, check: Callable[[Any], T], *arguments: Any) -> T:
        try:
            return self._call(method, check, *arguments)
        except PluginError:
            return default

    def _failed(self, method: str, error: BaseException, compiles: bool = False) -> PluginError:
        """Set the kernel aside for an exception, unless it costs only the candidate."""
        why = self._fault(method, error)
        return PluginError(f"{self._title}: {why}") if compiles else self.set_aside(why)

    def set_aside(self, why: str) -> PluginError:
        """Decline every problem from now on; the first reason is kept and reported."""
        with self._lock:
            if self.fault is None:
                self.fault = f"{self._title} is set aside: {why}"
        warn_of_plugin(self.source, self.fault)
        return PluginError(self.fault)

    @contextmanager
    def _running(self, method: str, patience: float | None = None) -> Iterator[None]:
        """A context for the kernel's own code. BLAS serves the products that this code computes,
        code that does not return is reported, and how this thread computes is restored."""

        def what() -> str:
            return (
                f"{method} of {self._title} does not return; to do without this kernel, set "
                f"TMM_DISABLE_PLUGINS={self.source.plugin}"
            )

        around = nullcontext(list[str]()) if self.source.is_ours else putting_back(OF_THE_THREAD)
        with nested(), watched(what, patience), around as changed:
            yield
        if changed:
            raise InvalidResultError(f"changed {' and '.join(changed)}, which was put back")

    @property
    def _title(self) -> str:
        return f"kernel {self.name!r} of {self.source}"

    def _fault(self, method: str, error: BaseException) -> str:
        ours = type(error) is InvalidResultError
        what = error_message(error) if ours else f"raised {error_text(error)}"
        where = place_of(self, error, method)
        return f"{method} {what}" + (f" ({where})" if where else "")

    def _configs(self, result: Any) -> list[Config]:
        return [self._config(config) for config in _items(result, MOST_CONFIGS, "configs")]

    def _config_or_none(self, config: Any) -> Config | None:
        return None if config is None else self._config(config)

    def _config(self, config: Any) -> Config:
        """``config``, checked to be comparable, hashable and storable in a record."""
        if not issubclass(type(config), self.config_type):
            raise InvalidResultError(f"gave {shown(config)}, not a {self.config_type.__name__}")
        if hash(config) != hash(config):
            raise InvalidResultError(f"gave {shown(config)}, whose hash changes")
        if not config == config:  # a plugin's __eq__, called here first
            raise InvalidResultError(f"gave {shown(config)}, which is not equal to itself")
        for name in _items(config.assumes, PARAMETERS_MAX, "names that a config assumes"):
            if not is_name(name):
                raise InvalidResultError(f"gave a config that assumes {shown(name)}, not {A_NAME}")
        try:
            fields = parameters(config.to_json())
            if fields != parameters(config.to_json()):
                raise InvalidResultError(f"gave {shown(config)}, whose fields change")
        except RecordError as error:
            raise InvalidResultError(f"gave a config with {error}") from None
        if None in fields.values():
            raise InvalidResultError(f"gave a config with a field that is None: {shown(fields)}")
        checked: Config = config
        object.__setattr__(checked, "as_read", fields)
        return checked


def _items(result: Any, most: int, what: str) -> list[Any]:
    """The items of a result, which may be a generator without an end."""
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise InvalidResultError(f"returned {shown(result)}, not {what}")
    found = list(islice(result, most + 1))
    if len(found) > most:
        raise InvalidResultError(f"yielded more than {most} items, not {what}")
    return found


def _check(accepts: Callable[[Any], bool], fault: str) -> Callable[[Any], Any]:
    """A function that returns results that ``accepts`` accepts, and raises ``fault`` for others."""

    def check(result: Any) -> Any:
        if not accepts(result):
            raise InvalidResultError(fault.format(shown(result)))
        return result

    return check


def _is_traits(result: Any) -> bool:
    names = [field.name for field in fields(Traits)]
    return type(result) is Traits and all(type(getattr(result, name)) is bool for name in names)


def _is_config_type(result: Any) -> bool:
    return (
        issubclass(type(result), type)
        and issubclass(result, Config)
        and result.unmet_promises is Config.unmet_promises  # or a call would run a plugin's code
    )


#: Attributes that are read once, when a kernel is registered.
_IDENTITY: dict[str, Callable[[Any], Any]] = {
    "name": _check(lambda x: is_name(x) and bool(x.strip()), f"is {{}}: it has no name, {A_NAME}"),
    "supports": _check(lambda x: issubclass(type(x), Supports), "must be a Supports, got {}"),
    "traits": _check(_is_traits, "must be a Traits of True and False, got {}"),
    "config_type": _check(
        _is_config_type, "must be a Config subclass without an unmet_promises of its own, got {}"
    ),
    "version": _check(lambda x: is_name(x) and bool(x.strip()), f"is {{}}, not {A_NAME}"),
}
_arithmetic: Callable[[Any], str | None] = _check(
    lambda x: x is None or (type(x) is str and x.isprintable() and 0 < len(x) <= TEXT_MAX),
    f"returned {{}}, not a printable text of 1 to {TEXT_MAX} letters",
)
_anatomy: Callable[[Any], Anatomy | None] = _check(
    lambda x: x is None or issubclass(type(x), Anatomy), "returned {}, not an Anatomy"
)


_launcher: Callable[[Any], Launcher] = _check(
    # Callers distinguish launchers from exceptions by isinstance, which runs the code of a hostile
    # `__class__`. Here its exception is caught.
    lambda x: callable(x) and not isinstance(x, BaseException),
    "returned {}, which is not callable",
)


def _reasons(result: Any) -> list[str]:
    reasons = _items(result, MOST_REASONS, "a list of reasons")
    if not all(issubclass(type(reason), str) for reason in reasons):
        raise InvalidResultError(f"returned {shown(reasons)}, not reasons as text")
    return [plain_text(reason) for reason in reasons]


def _microseconds(result: Any) -> float | None:
    if result is None:
        return None
    if isinstance(result, bool) or not isinstance(result, numbers.Real):
        raise InvalidResultError(f"returned {shown(result)}, not µs")
    time = float(result)
    if not (type(time) is float and math.isfinite(time) and time >= 0):
        raise InvalidResultError(f"returned {shown(result)}, which is not a time")
    return time


def _bytes(result: Any) -> int:
    if isinstance(result, bool) or not isinstance(result, numbers.Integral):
        raise InvalidResultError(f"returned {shown(result)}, not a number of bytes")
    size = int(result)
    if not 0 <= size < SIZE_MAX:
        raise InvalidResultError(f"returned {shown(result)}, not a number of bytes below 2**40")
    return size


def _resources(result: Any) -> list[Resources]:
    found = _items(result, MOST_REASONS, "Resources")
    if not all(issubclass(type(each), Resources) for each in found):
        raise InvalidResultError(f"returned {shown(result)}, not Resources")
    return found
