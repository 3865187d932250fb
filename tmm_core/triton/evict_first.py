"""Adds the ``evict_first`` L2 hint to TMA loads, which Triton cannot express.

A line fetched by an ordinary load evicts one left by the previous kernel, which may have to be
written back first. A line with ``evict_first`` evicts another such line: a cold read of a
4096×14336 weight on an H200 takes 34.9 µs instead of 38.7. Triton has the hint for pointer loads
(``eviction_policy``), but for TMA loads only PTX has it. So the hint is inserted into the PTX
before ``ptxas``, through Triton's stage inspection hook
(``knobs.runtime.add_stages_inspection_hook``, in 3.6 and 3.7). If that fails, the kernel is
compiled without the hint, with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from triton import knobs
from triton.compiler import ASTSource

from tmm_core.errors import warn

_LOAD = re.compile(
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::c\w+\.global\S*\.mbarrier::complete_tx::bytes)(\s[^;]*);"
)
#: The result of ``createpolicy.fractional.L2::evict_first.b64`` for a fraction of 1 on sm_90; the
#: value of CUTLASS's ``TMA::CacheHintSm90::EVICT_FIRST``.
_EVICT_FIRST = "0x12F0000000000000"

_HOOK = "add_stages_inspection_hook"


def hinted(ptx: str) -> str:
    """``ptx`` with the hint added to every bulk tensor load without one."""
    return _LOAD.sub(rf"\1.L2::cache_hint\2, {_EVICT_FIRST};", ptx)


def marked(src: ASTSource) -> ASTSource:
    """The source with a separate hash, Triton's cache key, so that kernels with and without hints
    are never confused."""
    plain = src.hash()
    src.hash = lambda: hashlib.sha256(f"{plain}-evict_first".encode()).hexdigest()
    return src


@contextlib.contextmanager
def hints(name: str) -> Iterator[None]:
    """A context in which this thread compiles all bulk tensor loads with hints.

    Args:
        name: The kernel's name, for warnings.
    """
    global _users, _before
    if not hasattr(knobs.runtime, _HOOK):
        _warn(name, "this Triton has no stage inspection hook")
        yield
        return
    _looking.name = name
    with _lock:
        _users += 1
        if _users == 1:
            _before = getattr(knobs.runtime, _HOOK)
            setattr(knobs.runtime, _HOOK, _look)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            # A hook installed by others in the meantime stays.
            if _users == 0 and getattr(knobs.runtime, _HOOK) is _look:
                setattr(knobs.runtime, _HOOK, _before)
        _looking.name = None


class _Looking(threading.local):
    """The kernel that a thread compiles with hints."""

    name: str | None = None


_looking = _Looking()
_lock = threading.Lock()
#: How many threads compile with hints; the hook is installed while any does.
_users = 0
#: The hook that was installed before.
_before: Callable[..., Any] | None = None


def ordinary() -> bool:
    """Whether only this module uses Triton's stage inspection hook."""
    hook = getattr(knobs.runtime, _HOOK, None)
    return hook is None or (hook is _look and _before is None)


def _look(*arguments: Any) -> Any:
    """Triton's hook: without arguments it returns its part of a kernel's key, else it may change
    the stages. Other threads compile as without it."""
    before = _before
    if not arguments:
        return before() if before is not None else ("", "")
    if before is not None:
        before(*arguments)
    stages, name = arguments[1], _looking.name
    if name is None:
        return None
    if "ptx" not in stages:
        _warn(name, "Triton compiles it without PTX")
        return None
    make_ptx = stages["ptx"]

    def make_hinted(module: Any, metadata: Any) -> Any:
        ptx = make_ptx(module, metadata)
        changed = hinted(ptx)
        if changed == ptx:
            _warn(name, "its PTX has no bulk tensor load as Triton 3.6 and 3.7 write it")
        return changed

    stages["ptx"] = make_hinted
    return None


def _warn(name: str, why: str) -> None:
    warn(f"{name}: loads are not marked evict_first: {why}")
