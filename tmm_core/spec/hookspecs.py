"""The two hooks a plugin may implement. Each returns a list and does nothing else.

Both may be called more than once. ``@hookimpl(tryfirst=True)`` has a plugin asked before others, so
that names both bring are its own; tmm's kernels come before all. ``@hookimpl(wrapper=True)`` goes
around each other plugin's hook, one plugin at a time, where it is all that its plugin has of that
hook: ``yield`` returns a list of the lists that were returned, and the like of it is passed on.
"""

from __future__ import annotations

from typing import Any

import pluggy

from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.kernel import Deferred, Kernel

PROJECT = "tmm"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's implementation of a hook below.
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tmm_kernels() -> list[Kernel[Any] | Deferred]:  # type: ignore[empty-body]  # a spec has no body
    """Kernels to register: instances, each with a name no other plugin uses, or in place of one
    a :class:`~tmm_core.Deferred` that imports it when it is asked for."""


@hookspec
def tmm_epilogues() -> list[Epilogue]:  # type: ignore[empty-body]  # a spec has no body
    """Epilogues to make available by name."""
