"""Edits PTX before it is assembled, for what Triton cannot express.

``evict_first`` adds this L2 hint to TMA loads. A line fetched by an ordinary load evicts one left
by the previous kernel, which may have to be written back first. A line with ``evict_first`` evicts
another such line: a cold read of a 4096×14336 weight on an H200 takes 34.9 µs instead of 38.7.
Triton has the hint for pointer loads (``eviction_policy``), but for TMA loads only PTX has it.

``joined`` makes one ``wgmma`` of two that multiply the same ``a`` by neighbouring columns. Triton's
tensors have powers of two, so a tile of 144 columns is a product of 128 and one of 16. The second
reads ``a`` from shared memory again, which takes longer than its multiplication. ``wgmma`` itself
takes any multiple of 8 columns. ``joined_ahead`` is for a second product whose columns precede the
first's in memory.

Edits go through Triton's stage inspection hook (``knobs.runtime.add_stages_inspection_hook``). If
an edit cannot be made, a kernel that is correct without it is compiled without it, with a warning.
Any other kernel is not compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
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

_PRODUCT = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)(?P<types>k\d+[.\w]+) "
    r"\{(?P<sums>[^}]*)\}, (?P<a>%\w+), (?P<b>%\w+), (?P<rest>[^;]*);"
)
#: A matrix descriptor's lowest bits, which hold the address in shared memory (PTX ISA, "Matrix
#: Descriptor Format").
_ADDRESS_BITS = 14
_COMMIT = "wgmma.commit_group.sync.aligned;"
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned (\d+);")

_HOOK = "add_stages_inspection_hook"


class UnknownPTXError(ValueError):
    """PTX lacks what an edit changes."""


def evict_first(ptx: str) -> str:
    """``ptx`` with the hint added to every bulk tensor load without one.

    Raises:
        UnknownPTXError: It has no such load.
    """
    changed = _LOAD.sub(rf"\1.L2::cache_hint\2, {_EVICT_FIRST};", ptx)
    if changed == ptx:
        raise UnknownPTXError("has no bulk tensor load")
    return changed


def joined(ptx: str, ahead: bool = False) -> str:
    """``ptx`` with every two groups of ``wgmma`` joined into one.

    The kernel's source ensures that the second group's ``b`` follows the first's in shared memory,
    as rows along K follow one another.

    Args:
        ahead: The first group's ``b`` follows the second's instead.

    Raises:
        UnknownPTXError: It has other groups than pairs that multiply the same ``a``, or waits for
            half a pair.
    """
    *groups, after = ptx.split(_COMMIT)
    waits = [int(wait[1]) for wait in _WAIT.finditer(ptx)]
    if not groups or len(groups) % 2 or any(count % 2 for count in waits):
        raise UnknownPTXError("does not multiply in pairs")
    pairs = []
    for first, second in zip(groups[::2], groups[1::2], strict=True):
        products = list(_PRODUCT.finditer(first))
        others = list(_PRODUCT.finditer(second))
        if not products or list(map(_same, products)) != list(map(_same, others)):
            raise UnknownPTXError("does not multiply in pairs")
        # The joint product replaces the second, where the sums of both are in their registers.
        for product, other in zip(products, others, strict=True):
            one = _ahead(other, product) if ahead else _one(product, other, product["b"])
            second = second.replace(other[0], one, 1)
        pairs.append(_PRODUCT.sub("", first) + second)
    # One group, since ptxas turns an empty one into a small product.
    ptx = _COMMIT.join([*pairs, after])
    return _WAIT.sub(lambda wait: f"wgmma.wait_group.sync.aligned {int(wait[1]) // 2};", ptx)


def _same(product: re.Match[str]) -> tuple[str, ...]:
    """Return the fields that two products must share to be joined."""
    return product["types"], product["a"], product["rest"]


def _one(first: re.Match[str], second: re.Match[str], b: str) -> str:
    columns = int(first["columns"]) + int(second["columns"])
    return (
        f"wgmma.mma_async.sync.aligned.m64n{columns}{first['types']} "
        f"{{{first['sums']},{second['sums']}}}, {first['a']}, {b}, {first['rest']};"
    )


def _ahead(first: re.Match[str], second: re.Match[str]) -> str:
    """Return the joint product. The first's ``b`` has the address. The second's has the distance
    between boxes, which Triton leaves out of the descriptor of a single box."""
    address = f"bfi.b64 tmm_b, {first['b']}, {second['b']}, 0, {_ADDRESS_BITS};"
    return f"{{\n.reg .b64 tmm_b;\n{address}\n{_one(first, second, 'tmm_b')}\n}}"


def joined_ahead(ptx: str) -> str:
    """:func:`joined` where the second group's ``b`` precedes the first's in shared memory."""
    return joined(ptx, ahead=True)


#: The disadvantage of a kernel without an edit, for the warning. Without an edit that is not listed
#: here, a kernel is wrong.
_LACKS = {
    "evict_first": "loads are not marked evict_first",
    "joined": "neighbouring columns are multiplied separately",
}


def marked(src: ASTSource, edits: Sequence[str]) -> ASTSource:
    """The source with a separate hash, Triton's cache key, so that kernels with and without edits
    are never confused."""
    plain = src.hash()
    src.hash = lambda: hashlib.sha256("-".join((plain, *edits)).encode()).hexdigest()
    return src


@contextlib.contextmanager
def edited(name: str, edits: Sequence[str]) -> Iterator[None]:
    """A context in which the PTX that this thread compiles is edited.

    Args:
        name: The kernel's name, for warnings.
        edits: ``"evict_first"``, ``"joined"`` or ``"joined_ahead"``, applied in this order.
    """
    global _users, _before
    if not hasattr(knobs.runtime, _HOOK):
        _without(name, edits, "this Triton has no stage inspection hook")
        yield
        return
    _compiling.name, _compiling.edits = name, edits
    with _lock:
        _users += 1
        if _users == 1:
            _before = getattr(knobs.runtime, _HOOK)
            setattr(knobs.runtime, _HOOK, _triton_hook)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            # A hook installed by others in the meantime stays.
            if _users == 0 and getattr(knobs.runtime, _HOOK) is _triton_hook:
                setattr(knobs.runtime, _HOOK, _before)
        _compiling.edits = ()


class _Compiling(threading.local):
    """The kernel that a thread compiles, and the edits of its PTX."""

    name: str = ""
    edits: Sequence[str] = ()


_compiling = _Compiling()
_lock = threading.Lock()
#: How many threads compile with edits; the hook is installed while any does.
_users = 0
#: The hook that was installed before.
_before: Callable[..., Any] | None = None


def _triton_hook(*arguments: Any) -> Any:
    """Triton's hook: without arguments it returns its part of a kernel's key, else it may change
    the stages. In threads without edits it changes nothing."""
    before = _before
    if not arguments:
        return before() if before is not None else ("", "")
    if before is not None:
        before(*arguments)
    stages, name, edits = arguments[1], _compiling.name, _compiling.edits
    if not edits:
        return None
    if "ptx" not in stages:
        _without(name, edits, "Triton compiles it without PTX")
        return None
    make_ptx = stages["ptx"]

    def make_edited(module: Any, metadata: Any) -> Any:
        ptx = make_ptx(module, metadata)
        for edit in edits:
            # Not a constant: the objects that a function refers to are part of a kernel's version.
            changes = {"evict_first": evict_first, "joined": joined, "joined_ahead": joined_ahead}
            try:
                ptx = changes[edit](ptx)
            except UnknownPTXError as error:
                _without(name, [edit], f"its PTX {error} as tmm knows it")
        return ptx

    stages["ptx"] = make_edited
    return None


def _without(name: str, edits: Sequence[str], why: str) -> None:
    """Warn that a kernel lacks these edits.

    Raises:
        UnknownPTXError: It is wrong without one.
    """
    for edit in edits:
        if edit not in _LACKS:
            raise UnknownPTXError(f"{name}: {edit} cannot be made: {why}")
        warn(f"{name}: {_LACKS[edit]}: {why}")
