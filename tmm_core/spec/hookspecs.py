"""The two hooks a plugin may implement. Each returns a list and does nothing else."""

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
