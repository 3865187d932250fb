"""All error classes of tmm, and the guards around other people's code.

Errors about tensors (shapes, dtypes, devices) are not here. As for ``torch.matmul`` they are
``RuntimeError``, ``TypeError`` and ``NotImplementedError`` with torch's messages, so that code
written for it keeps working::

    TmmError
    ├── UnknownNameError (ValueError)      a kernel or epilogue that is not registered
    ├── UnsupportedProblemError (RuntimeError)  a forced kernel cannot serve the problem
    ├── ConfigError (ValueError)           a kernel config does not parse or is out of bounds
    ├── SettingsError (ValueError)         a ``TMM_*`` variable or override has no valid value
    ├── CacheMissError (LookupError)       no tuned record, and ``on_cache_miss="error"``
    └── PluginError (RuntimeError)         a plugin registered something unusable
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from tmm_base.guards import foreign_place as foreign_place
from tmm_base.guards import of_the_call as of_the_call
from tmm_base.guards import reraise as reraise
from tmm_base.guards import suppress, warn_caller


class TmmError(Exception):
    """Base class of tmm's errors."""


class UnknownNameError(TmmError, ValueError):
    """A kernel or epilogue name that is not registered.

    The message names the closest registered names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(kind, name, sorted(known))  # what unpickling passes again

    def __str__(self) -> str:
        kind, name, names = self.args
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {names}"
        return f"unknown {kind} {name!r}; {hint}"


class UnsupportedProblemError(TmmError, RuntimeError):
    """A kernel or an arithmetic requested by name cannot serve the problem."""


class ConfigError(TmmError, ValueError):
    """A kernel config that does not parse or is out of its bounds."""


class SettingsError(TmmError, ValueError):
    """A ``TMM_*`` variable or an override whose value is not accepted."""


class CacheMissError(TmmError, LookupError):
    """No tuned record exists, and ``on_cache_miss="error"`` requires one."""


class PluginError(TmmError, RuntimeError):
    """A plugin registered something that tmm cannot use."""


class TmmWarning(UserWarning):
    """A fault that cost a feature (a plugin, a record, a kernel), never the matmul."""


def warn(message: str, category: type[Warning] = TmmWarning) -> None:
    """Issue a warning that points at the line that called into tmm."""
    warn_caller(message, category)


# -- other people's code -------------------------------------------------------------------

#: Maximum length of a ``repr``, and of a text by other people's code, in a message.
_SHOWN, _TEXT = 200, 2000


def plain_text(text: str, most: int = _TEXT) -> str:
    """A foreign text as an exact ``str`` of at most ``most`` characters. Control characters, which
    a terminal would obey, and lone surrogates, which no file can hold, are escaped."""
    cut = str.__getitem__(text, slice(most))
    if str.__len__(text) > most:
        cut += "…"
    if str.isprintable(cut):
        return cut
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in cut)


def error_text(error: BaseException) -> str:
    """An exception's type and text, even if its class raises while they are read."""
    name, message = name_of(type(error)), error_message(error)
    return f"{name}: {message}" if message else name


def error_message(error: BaseException) -> str:
    """An exception's text without its type and without the frames of C++ code that torch may add;
    see :func:`error_text`."""
    return _guarded(_without_frames, error, "(its text is unavailable)")


def _without_frames(error: object) -> str:
    return str.partition(str(error), "\nException raised from ")[0]


def shown(thing: object) -> str:
    """``repr``, truncated; the type if that fails."""
    failed = f"<{name_of(type(thing))}, whose repr failed>"
    return _guarded(repr, thing, failed, _SHOWN)


def name_of(kind: type) -> str:
    """A class's name, even if its metaclass raises while it is read."""
    return plain_text(type.__dict__["__name__"].__get__(kind), _SHOWN)


def _guarded(function: Callable[[Any], str], thing: object, failed: str, most: int = _TEXT) -> str:
    with suppress(BaseException):
        return plain_text(function(thing), most)
    return failed


#: The distributions, and the plugins without one, whose fault this process has reported.
_faults: set[str] = set()


def is_reported(source: Any) -> bool:
    """Whether :func:`warn_of_plugin` has reported a fault of this source's distribution."""
    return (source.distribution or source.plugin) in _faults


def warn_of_plugin(source: Any, message: str, place: str = "", more: int = 0) -> None:
    """Issue the one warning of this process about a distribution; its later faults are not
    reported.

    Change all state before calling: under ``-W error`` this raises, once per distribution.

    Args:
        source: The origin of the faulty kernel, epilogue or plugin
            (:class:`tmm_core.registry.registry.Source`).
        message: The first fault: kernel and reason.
        place: File and line of its exception.
        more: Further faults of the same distribution, known already.
    """
    if is_reported(source):
        return
    _faults.add(source.distribution or source.plugin)
    place = f" ({place})" if place and place not in message else ""
    origin = "" if str(source) in message else f"{source}: "
    count = f"; {more} more faults of it" if more else "; later faults of it are not reported"
    warn(f"{origin}{message}{place}{count}: see `tmm doctor`")
