"""Bulk tensor loads that say what they read is read once, which Triton has no way to write.

A line brought by an ordinary load takes the place of one that the kernel before left behind, which
may first have to be written back. One said to be read once (``evict_first``) takes the place of
another such line: a cold read of a 4096×14336 weight on an H200 takes 34.9 µs for 38.7. A load
from a pointer can say so in Triton (``eviction_policy``), a load by TMA only in PTX. So the PTX is
given the hint on its way to ``ptxas``, by the hook that Triton has for looking into its stages
(``knobs.runtime.add_stages_inspection_hook``, in 3.6 and 3.7). Where that fails the kernel is
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
#: What ``createpolicy.fractional.L2::evict_first.b64`` makes of a fraction of 1 on sm_90; the value
#: of CUTLASS's ``TMA::CacheHintSm90::EVICT_FIRST``.
_EVICT_FIRST = "0x12F0000000000000"

_HOOK = "add_stages_inspection_hook"


def hinted(ptx: str) -> str:
    """``ptx`` with the hint at every bulk tensor load that has none."""
    return _LOAD.sub(rf"\1.L2::cache_hint\2, {_EVICT_FIRST};", ptx)


def marked(src: ASTSource) -> ASTSource:
    """The source under a hash of its own, by which Triton keeps what it makes of it: nothing else
    is ever taken for the kernel with hints, nor it for the one without."""
    plain = src.hash()
    src.hash = lambda: hashlib.sha256(f"{plain}-evict_first".encode()).hexdigest()
    return src


@contextlib.contextmanager
def hints(name: str) -> Iterator[None]:
    """Have all bulk tensor loads hinted of what this thread compiles meanwhile.

    Args:
        name: The kernel's, for a warning.
    """
    if not hasattr(knobs.runtime, _HOOK):
        _warn(name, "this Triton lets nobody look into its stages")
        yield
        return
    _looking.name = name
    _install()
    try:
        yield
    finally:
        _uninstall()
        _looking.name = None


class _Looking(threading.local):
    """The kernel that a thread compiles with hints."""

    name: str | None = None


_looking = _Looking()
_lock = threading.Lock()
#: How many threads compile with hints; the hook is there while any does.
_users = 0
#: Whose hook was there before.
_before: Callable[..., Any] | None = None


def _install() -> None:
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = getattr(knobs.runtime, _HOOK)
            setattr(knobs.runtime, _HOOK, _look)


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        # Whoever has put another in its place meanwhile keeps it.
        if _users == 0 and getattr(knobs.runtime, _HOOK) is _look:
            setattr(knobs.runtime, _HOOK, _before)


def ordinary() -> bool:
    """Whether nobody but this module looks into Triton's stages."""
    hook = getattr(knobs.runtime, _HOOK, None)
    return hook is None or (hook is _look and _before is None)


def _look(*arguments: Any) -> Any:
    """Triton's hook: without arguments what it adds to the key of a kernel, else it may change the
    stages. Other threads compile as they would without it."""
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
