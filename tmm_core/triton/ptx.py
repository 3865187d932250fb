"""Edits PTX before it is assembled, for what Triton cannot express.

Edits go through Triton's stage inspection hook (``knobs.runtime.add_stages_inspection_hook``, in
3.6 and 3.7). There are two:

``evict_first`` adds this L2 hint to TMA loads. A line fetched by an ordinary load evicts one left
by the previous kernel, which may have to be written back first. A line with ``evict_first`` evicts
another such line: a cold read of a 4096×14336 weight on an H200 takes 34.9 µs instead of 38.7.
Triton has the hint for pointer loads (``eviction_policy``), but for TMA loads only PTX has it.
Without a way to add it, the kernel is compiled without, with a warning.

``cluster`` makes neighbouring blocks a cluster of two. The kernel marks, by comments in inline
assembly, loads that fill the same place of both blocks (``BOTH`` to ``OWN``) and arrivals at the
other block's barrier (``PEER``). Triton 3.6 has no clusters in Gluon, and 3.7 neither arrives at another
block's barrier, nor lets the warps of other partitions pass a barrier of the cluster. A kernel that
is made for clusters is wrong without them, so that compiling raises if this edit fails.
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

#: Comments that a kernel leaves around loads for both blocks, and before an arrival at the other's
#: barrier.
BOTH, OWN, PEER = "// tmm: both", "// tmm: own", "// tmm: peer"
_ENTRY = re.compile(r"(\.reqntid[^\n]*)(\n.*?// %bb\.0:[^\n]*\n)", re.DOTALL)
_MARKED_LOADS = re.compile(f"{BOTH}(.*?){OWN}", re.DOTALL)
_MARKED_ARRIVAL = re.compile(
    PEER + r"(.*?)(@%p\d+ )?mbarrier\.arrive\.shared::cta\.b64 _, \[([^\]]+)\](, \d+)?;", re.DOTALL
)

_UNKNOWN = "its PTX has no loads and arrivals as Triton 3.6 and 3.7 write them"

_HOOK = "add_stages_inspection_hook"


def evict_first(ptx: str, threads: int) -> str:
    """``ptx`` with the hint added to every bulk tensor load without one.

    Raises:
        ValueError: It has no such load.
    """
    changed = _LOAD.sub(rf"\1.L2::cache_hint\2, {_EVICT_FIRST};", ptx)
    if changed == ptx:
        raise ValueError("its PTX has no bulk tensor load as Triton 3.6 and 3.7 write it")
    return changed


def cluster(ptx: str, threads: int) -> str:
    """``ptx`` for clusters of two blocks.

    Args:
        threads: Threads of the first partition, which alone pass the barrier of the cluster in the
            kernel's source: all others arrive at it when they start.

    Raises:
        ValueError: A marked instruction was not found.
    """
    found = [ptx.count(mark) for mark in (BOTH, OWN, PEER)]
    ptx, clustered = _ENTRY.subn(
        r"\1\n.reqnctapercluster 2, 1, 1\2"
        "{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x;\n"
        f"setp.ge.u32 other, thread, {threads};\n"
        "@other barrier.cluster.arrive.relaxed; }\n",
        ptx,
        count=1,
    )
    # A wide box of a row-major operand takes several loads.
    ptx, loaded = _MARKED_LOADS.subn(lambda marked: _multicast(marked[1]), ptx)
    ptx, arrived = _MARKED_ARRIVAL.subn(
        r"\1{ .reg .b32 rank, there; mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1;\n"
        r"mapa.shared::cluster.u32 there, \3, rank;\n"
        r"\2mbarrier.arrive.shared::cluster.b64 _, [there]\4; }",
        ptx,
    )
    if not (clustered and loaded and arrived) or [loaded, loaded, arrived] != found:
        raise ValueError(_UNKNOWN)
    return ptx


def _multicast(loads: str) -> str:
    changed, count = _LOAD.subn(r"\1.multicast::cluster\2, 3;", loads)
    if not count:
        raise ValueError(_UNKNOWN)
    return changed.replace("shared::cta.global", "shared::cluster.global")


#: Edits by name, and whether a kernel is correct without.
_EDITS: dict[str, tuple[Callable[[str, int], str], bool]] = {
    "evict_first": (evict_first, True),
    "cluster": (cluster, False),
}


def marked(src: ASTSource, edits: tuple[str, ...]) -> ASTSource:
    """The source with a separate hash, Triton's cache key, so that kernels with and without edits
    are never confused."""
    plain = src.hash()
    src.hash = lambda: hashlib.sha256("-".join((plain, *edits)).encode()).hexdigest()
    return src


@contextlib.contextmanager
def edited(name: str, edits: tuple[str, ...]) -> Iterator[None]:
    """A context in which this thread's compilations are edited.

    Args:
        name: The kernel's name, for messages.
        edits: Names of edits, in the order in which they are applied.

    Raises:
        RuntimeError: An edit without which the kernel would be wrong cannot be made.
    """
    if not hasattr(knobs.runtime, _HOOK):
        _without(name, edits, "this Triton has no stage inspection hook")
        yield
        return
    _looking.name, _looking.edits = name, edits
    _install()
    try:
        yield
    finally:
        _uninstall()
        _looking.name = None


class _Looking(threading.local):
    """The kernel that a thread compiles with edits."""

    name: str | None = None
    edits: tuple[str, ...] = ()


_looking = _Looking()
_lock = threading.Lock()
#: How many threads compile with edits; the hook is installed while any does.
_users = 0
#: The hook that was installed before.
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
        # A hook installed by others in the meantime stays.
        if _users == 0 and getattr(knobs.runtime, _HOOK) is _look:
            setattr(knobs.runtime, _HOOK, _before)


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
    name, edits = _looking.name, _looking.edits
    if name is None:
        return None
    _, stages, options, *_ = arguments
    if "ptx" not in stages:
        _without(name, edits, "Triton compiles it without PTX")
        return None
    make_ptx, threads = stages["ptx"], 32 * options.num_warps

    def make_edited(module: Any, metadata: Any) -> Any:
        ptx = make_ptx(module, metadata)
        for edit in edits:
            try:
                ptx = _EDITS[edit][0](ptx, threads)
            except ValueError as error:
                _without(name, (edit,), str(error))
        return ptx

    stages["ptx"] = make_edited
    return None


def _without(name: str, edits: tuple[str, ...], why: str) -> None:
    """Warn that a kernel is compiled without edits, or raise if it would be wrong without them."""
    for edit in edits:
        if not _EDITS[edit][1]:
            raise RuntimeError(f"{name} cannot be compiled for {edit}: {why}")
        warn(f"{name}: loads are not marked {edit}: {why}")
