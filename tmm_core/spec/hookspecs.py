"""The three hooks a plugin may implement. Each returns a list and does nothing else.

A hook may be called more than once. With ``@hookimpl(tryfirst=True)`` a plugin is called before
others, so that it owns names that both register; tmm's kernels come before all. With
``@hookimpl(wrapper=True)`` a plugin wraps the hooks of other plugins, one at a time, if it has no
other implementation of that hook. ``yield`` then returns a list of the returned lists, and the
wrapper returns such a list.
"""

from __future__ import annotations

from typing import Any

import pluggy

from tmm_core.formats import Format
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.kernel import Kernel

PROJECT = "tmm"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's implementation of a hook below.
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tmm_kernels() -> list[Kernel[Any]]:  # type: ignore[empty-body]  # a spec has no body
    """Kernels to register: instances with unique names."""


@hookspec
def tmm_epilogues() -> list[Epilogue]:  # type: ignore[empty-body]  # a spec has no body
    """Epilogues to register by name."""


@hookspec
def tmm_formats() -> list[Format]:  # type: ignore[empty-body]  # a spec has no body
    """Operand formats to add by name."""
