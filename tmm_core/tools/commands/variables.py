"""Finds what is wrong with the ``TMM_*`` variables of an environment, for ``tmm doctor``: misspelt
names, and values that are not accepted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping

from tmm_cache.environment_variables import CHECKS

from tmm_core.errors import SettingsError
from tmm_core.registry.registry import Registry
from tmm_core.settings import POINTWISE, VARIABLES, Settings, flag, names

#: Variables with names of plugins.
OF_PLUGINS = ("TMM_DISABLE_PLUGINS", "TMM_PLUGINS")

#: Checks of the variables that are no settings, by name.
_CHECKS: dict[str, Callable[[str], object]] = {**CHECKS, "TMM_ENABLE": flag}


def faults(environ: Mapping[str, str], registry: Registry) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each variable, its fault and advice; both are empty if it has no fault."""
    of_settings = {variable for variable, _ in VARIABLES.values()}
    known = {*_CHECKS, *OF_PLUGINS, *of_settings}
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
            _CHECKS.get(name, str)(text)
            wrong = _unknown(name, text, registry)
        except SettingsError as error:  # it names the variable
            wrong = str(error)
        except ValueError as error:
            wrong = f"{name}={text!r}: {error}"
        yield name, wrong, "correct or unset it" if wrong else ""


def _unknown(name: str, text: str, registry: Registry) -> str:
    """The names of kernels or plugins that this machine does not have."""
    if name in ("TMM_KERNEL", "TMM_DISABLE"):
        known = {kernel.name for kernel in registry.kernels()}
        if name == "TMM_DISABLE":
            known.add(POINTWISE)
        asked, what = set(names(text)), "kernel"
    elif name in OF_PLUGINS:
        asked, what, known = set(names(text)), "plugin", registry.plugins()
    else:
        return ""
    missing = sorted(asked - known)
    if not missing:
        return ""
    listed = ", ".join(sorted(known))
    return f"{name}={text!r}: no {what} {', '.join(map(repr, missing))} here; known: {listed}"
