"""Finds faults in the ``TMM_*`` variables of an environment, for ``tmm doctor``: misspelt names,
and values that are not accepted."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping

from tmm_base import UsageError
from tmm_cache.paths import absolute
from tmm_cache.size_limits import parse_size
from tmm_cache.store import NO, requires_lock

from tmm_core.errors import SettingsError, TmmError
from tmm_core.registry.registry import Registry
from tmm_core.settings import POINTWISE, VARIABLES, Settings, flag, names

#: Variables with names of plugins.
OF_PLUGINS = ("TMM_DISABLE_PLUGINS", "TMM_PLUGINS")


def _folders(text: str) -> None:
    # Whether each can be read or written is a finding about the cache.
    for part in text.split(os.pathsep):
        if os.path.expanduser(part).startswith("~"):
            raise ValueError(f"{part} is in the home folder of an unknown user, and is not used")


def _digit(text: str) -> None:
    if text not in ("1", "0", ""):
        raise ValueError("accepted is '1' or '0'")


def _switch(text: str) -> None:
    if text.lower() not in {"1", "true", "yes", "on", *NO}:
        raise ValueError("is taken for a yes; accepted is '1' or '0'")


def _lock_file(text: str) -> None:
    from tmm_cache.transport import Transport

    if text and (requires_lock() or absolute(text).exists()):
        try:
            Transport(absolute(text))
        except UsageError as error:
            raise ValueError(str(error).removeprefix(f"{absolute(text)}: ")) from error


#: Checks of the variables that are no settings, by name: each raises ValueError with the fault.
#: Readers of a variable tolerate other values, since a typo must not cost a matmul.
CHECKS: dict[str, Callable[[str], object]] = {
    "TMM_ENABLE": flag,
    "TMM_CACHE_DIR": _folders,
    "TMM_CACHE_MAX_SIZE": lambda text: text and parse_size(text),
    "TMM_CACHE_PATH": _folders,
    "TMM_CACHE_SHARED": _digit,
    "TMM_LOCK_FILE": _lock_file,
    "TMM_REQUIRE_LOCKED": _switch,
    "TMM_SHIPPED_RECORDS": _digit,
}


def faults(environ: Mapping[str, str], registry: Registry) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each variable, its fault and advice; both are empty if it has no fault."""
    of_settings = {variable for variable, _ in VARIABLES.values()}
    known = {*CHECKS, *OF_PLUGINS, *of_settings}
    for name in sorted(environ):
        if not name.startswith("TMM_"):
            continue
        text, wrong = environ[name], ""
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            yield name, f"{name} is not read by tmm", advice
            continue
        try:
            if name in of_settings:
                Settings.from_environ({name: text})
            CHECKS.get(name, str)(text)
            _installed(name, text, registry)
        except SettingsError as error:  # it names the variable
            wrong = str(error)
        except ValueError as error:
            wrong = f"{name}={text!r}: {error}"
        yield name, wrong, "correct or unset it" if wrong else ""


def _installed(name: str, text: str, registry: Registry) -> None:
    """Raise ValueError for names of kernels or plugins that this machine does not have."""
    listed, unknown = names(text), []
    if name in OF_PLUGINS:
        unknown = registry.unknown("plugin", listed)
    elif name == "TMM_DISABLE":
        unknown = registry.unknown("kernel", listed - {POINTWISE})
    elif name == "TMM_KERNEL" and (kernel := text.strip()):  # no list: one kernel is forced
        try:
            registry.kernel(kernel)
        except TmmError as error:
            raise ValueError(str(error)) from error
    if unknown:
        raise ValueError("; ".join(map(str, unknown)))
