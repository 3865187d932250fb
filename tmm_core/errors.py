"""All error classes of tmm, and how a plugin's errors are let through and told.

Errors about tensors (shapes, dtypes, devices) are not here: those are the
``RuntimeError``, ``TypeError`` and ``NotImplementedError`` that torch raises, with
torch's messages, so that code written around ``torch.matmul`` keeps working::

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
from collections.abc import Iterable


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
    from tmm_cache.errors import warn_caller  # importing tmm_core imports no cache

    warn_caller(message, category)


#: Maximum length of a ``repr`` in a message.
_SHOWN = 200


def let_through(error: BaseException) -> None:
    """Raise ``error`` again if it is the user's Ctrl-C; any other exception of a plugin's code,
    including ``SystemExit``, is a fault of that code."""
    if isinstance(error, KeyboardInterrupt):
        raise error


def told(error: BaseException) -> str:
    """An error's type and text; only its type if ``str()`` fails."""
    try:
        text = str(error)
    except BaseException as another:
        let_through(another)
        text = "(its text is unavailable)"
    return f"{type(error).__name__}: {text}"


def shown(thing: object) -> str:
    """``repr``, truncated; the type if that fails."""
    try:
        text = repr(thing)
    except BaseException as error:
        let_through(error)
        text = f"<{type(thing).__qualname__}, whose repr failed>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
