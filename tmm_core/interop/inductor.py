"""A pass over the graphs of ``torch.compile``, which fuses products with what follows them.

It rewrites a product and the pointwise operators behind it as one ``tmm::matmul``, if the records
say that this is faster.

Without it Inductor calls BLAS for the product, and fuses what follows into another kernel, which
reads the product from memory and writes it again.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tmm_base.guards import suppress
from torch.fx import Node

from tmm_core import compat, dispatch, settings
from tmm_core.errors import error_text, reraise, warn
from tmm_core.formats import FLOATS
from tmm_core.interop import constants, operator, shared_input, tails
from tmm_core.interop.constants import added
from tmm_core.interop.shared_input import Product
from tmm_core.interop.tails import Tail, terms_of
from tmm_core.launch import warm
from tmm_core.launch.plan import Choice
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.device import fingerprint
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.machine import Machine
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import MARGIN
from tmm_core.version import __version__

When = Literal["records", "always"]

_Pass: Any = compat.graph_pass()
#: The modules whose code decides what a graph becomes.
_DECIDING = (
    "epilogues/__init__", "interop/aten_calls", "interop/constants", "interop/inductor",
    "interop/shared_input", "interop/tails",
)  # fmt: skip


class Pass(_Pass):  # type: ignore[misc]  # a class of torch without types
    """A pass over graphs of torch's compiler, after the passes ``before`` of torch's options.
    ``when`` is as in :func:`inductor_options`."""

    #: The option of torch's compiler that holds the pass.
    option: str

    def __init__(self, when: When = "records", before: Any = None) -> None:
        self.when = when
        passes = before if isinstance(before, (list, tuple)) else [before]
        self.before = [each for each in passes if each is not None]

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.before:
            each(graph)
        with _costs_only("the rest of a graph"):
            self._rewrite_all(graph)

    def uuid(self) -> Any:
        """A key for torch's cache of compiled graphs, which changes with the records. None, which
        turns that cache off, if an earlier pass has no key."""
        others = [getattr(each, "uuid", lambda: None)() for each in self.before]
        if None in others:
            return None
        digest = hashlib.sha256(__version__.encode())
        for module in _DECIDING:  # perhaps in a zip
            digest.update(pkgutil.get_data("tmm_core", f"{module}.py") or b"")
        if self.when == "records":
            digest.update(_state_of_choices().encode())
        return (f"tmm {self.when} {digest.hexdigest()}", *others)

    def _rewrite_all(self, graph: torch.fx.Graph) -> None:
        raise NotImplementedError


@contextmanager
def _costs_only(rewritten: object) -> Iterator[None]:
    """Keep a part of the graph as it is if rewriting it raises, with a warning."""
    try:
        yield
    except Exception as error:
        reraise(error)
        warn(f"torch.compile keeps {rewritten}: tmm's pass raised {error_text(error)}")


class Join(Pass):
    """Joins the products of gate and up if torch is about to freeze their weights
    (:mod:`tmm_core.interop.constants`) and :class:`Rewrite` then makes one call of both."""

    option = "joint_custom_post_pass"

    def _rewrite_all(self, graph: torch.fx.Graph) -> None:
        frozen = constants.frozen(graph)
        for gate, up in tails.pairs(graph) if frozen else ():
            with _costs_only(gate.product):
                self._join(graph, gate, up, frozen)

    def _join(self, graph: torch.fx.Graph, gate: Tail, up: Tail, frozen: set[Node]) -> None:
        product = constants.join(graph, gate, up, frozen)
        if product is None:
            return
        worth = False
        try:
            tail = tails.tail_of(product)
            worth = tail.gated and (self.when == "always" or pays(tail, terms_of(product)))
        finally:
            if not worth:
                constants.undo(product, gate, up)


class Rewrite(Pass):
    """Rewrites products with their tails, and then makes one call of products that share their
    input (:mod:`tmm_core.interop.shared_input`)."""

    option = "post_grad_custom_pre_pass"

    def _rewrite_all(self, graph: torch.fx.Graph) -> None:
        for tail in tails.tails(graph):
            with _costs_only(tail.product):
                self._rewrite(graph, tail)
        for products in shared_input.groups(graph):
            with _costs_only(products[0].node):
                self._share(graph, products)

    def _share(self, graph: torch.fx.Graph, products: list[Product]) -> None:
        able = [p for p in products if p.is_ours or self.when == "always" or _is_decided(p.node)]
        if len(able) > 1:
            shared_input.join(graph, able)

    def _rewrite(self, graph: torch.fx.Graph, tail: Tail) -> None:
        found = terms_of(tail.product)
        if found is None:
            return
        a, b, bias, residual, alpha = found
        dtype = tail.product.meta["val"].dtype
        operands = [a, b, *(t for t in (bias, residual, tail.residual) if t is not None)]
        dtypes = {getattr(node.meta.get("val"), "dtype", None) for node in operands}
        if dtype not in FLOATS or dtypes != {dtype}:
            return
        if residual is not None and tail.epilogue:
            return  # the summand is added before the activation
        if 0 in _hints(tail.product.meta["val"].shape):
            return
        if self.when == "records" and not pays(tail, found):
            return
        with graph.inserting_before(tail.last):
            summand = tail.residual if tail.residual is not None else residual
            if tail.residual is not None and tail.shape is not None:
                shape = _flat(tail.result_shape)
                if shape is None:
                    return
                summand = added(graph, torch.ops.aten.reshape.default, (tail.residual, shape))
            y = added(graph, operator.matmul, (a, b, bias, summand, alpha, tail.epilogue))
            if tail.shape is not None:
                y = added(graph, torch.ops.aten.reshape.default, (y, tail.shape))
        tail.last.replace_all_uses_with(y)
        for node in [node for node in reversed(graph.nodes) if node in tail.nodes]:
            graph.erase_node(node)


#: The passes. The first runs before weights are frozen, so torch's key of a compiled graph covers
#: its changes.
PASSES: tuple[type[Pass], ...] = (Join, Rewrite)


def inductor_options(*, when: When = "records", **options: Any) -> dict[str, Any]:
    """The ``options`` of ``torch.compile`` with tmm's pass, which rewrites a product and the bias,
    activation and residual behind it as one call of tmm.

    >>> model = torch.compile(model, options=tmm_core.inductor_options())  # doctest: +SKIP

    Args:
        when: ``"records"``: rewrite where records of this GPU say that it is faster; a dynamic size
            counts with its value in the first call. ``"always"``: wherever it is possible.
        options: Other options. A pass given here, or set in ``torch._inductor.config``, runs
            before tmm's.

    Raises:
        ValueError: ``when`` is neither.
    """
    if when not in get_args(When):
        raise ValueError(f"when must be 'records' or 'always', got {when!r}")
    found = dict(options)
    for kind in PASSES:
        before = options.get(kind.option) or getattr(compat.inductor_config(), kind.option)
        found[kind.option] = before if _has_pass(before) else kind(when, before)
    return found


def _has_pass(before: Any) -> bool:
    each = before if isinstance(before, (list, tuple)) else [before]
    return any(isinstance(one, Pass) for one in each)


def is_installed() -> bool:
    """Whether the passes are set for all graphs that are compiled in this process."""
    config = compat.inductor_config()
    return all(_has_pass(getattr(config, kind.option)) for kind in PASSES)


def install() -> None:
    """Set the passes for all graphs compiled from now on in this process."""
    for name, value in inductor_options().items():
        setattr(compat.inductor_config(), name, value)


def uninstall() -> None:
    """Undo :func:`install`. Graphs compiled before keep their calls."""
    config = compat.inductor_config()
    for kind in PASSES:
        now = getattr(config, kind.option)
        if isinstance(now, kind):
            before = now.before
            setattr(config, kind.option, before[0] if len(before) == 1 else before or None)


# -- whether it pays -------------------------------------------------------------------------


def pays(tail: Tail, terms: Any) -> bool:
    """Whether records say that one call for the whole is faster.

    The kernel's time for the whole is compared with BLAS's for the product plus a pass over the
    result. Without a record of the product alone, a kernel that wins the whole's record pays.
    """
    problem = problem_of(tail, terms)
    choice = _choice(problem)
    if choice.candidate.kernel.name == BASELINE or not choice.from_record:
        return False
    from tmm_core.dispatch import saving

    chooser = dispatch.default_dispatcher()
    if saving.loses_in_steady_state(chooser, problem, choice):
        return False
    if not tail.epilogue and tail.residual is None:
        return True
    whole = saving.record_times(chooser, problem, choice.candidate)
    alone = saving.record_times(chooser, alone_of(problem))
    if whole is None or alone is None:
        return True
    size = problem.batch * problem.m * problem.n * problem.out.dtype.itemsize
    reads = 2 + (tail.residual is not None) + tail.gated
    passed = Machine.of(problem.device).moving_us(reads * size)
    return whole < (alone + passed) * (1 - MARGIN)


def _choice(problem: Problem) -> Choice:
    """Return the choice for a problem, without tuning."""
    current = settings.changed(settings.current(), on_cache_miss="heuristic")
    return dispatch.default_dispatcher().choose(problem, current)


def _is_decided(product: Node) -> bool:
    """Whether a record or BLAS alone decides a call of the product: no call tunes then."""
    choice = _choice(problem_of(tails.bare(product), terms_of(product)))
    return choice.from_record or choice.origin == "fallback"


def alone_of(problem: Problem) -> Problem:
    """Return the problem of the product alone, whose result a pass then reads."""
    return replace(problem, epilogue=warm.epilogue_of(""), residual=None, n=problem.width)


def problem_of(tail: Tail, terms: Any) -> Problem:
    """Return the problem of the rewritten call, with the example's value of each dynamic size."""
    a, b, bias, residual, alpha = terms
    device, dtype = a.meta["val"].device, a.meta["val"].dtype
    with compat.without_modes():
        if tail.residual is None:
            added = _like(residual)
        else:
            added = torch.empty(_hints(tail.result_shape), dtype=dtype, device="meta")
        call = Arguments(_like(a), _like(b), _like(bias), added, alpha, tail.epilogue)
        problem, _ = warm.describe(call, warm.epilogue_of(tail.epilogue), settings.current())
    tf32 = dtype is torch.float32 and device.type == "cuda" and warm._tf32()
    return replace(problem, device=fingerprint(device), tf32=tf32)


def _like(node: Node | None) -> Any:
    """Return a meta tensor with the shape, strides and dtype of the node's value."""
    if node is None:
        return None
    val = node.meta["val"]
    shape, strides = _hints(val.shape), _hints(val.stride())
    return torch.empty_strided(shape, strides, dtype=val.dtype, device="meta")


def _hints(sizes: Any) -> list[int]:
    """Return sizes, with the example's value of each dynamic size."""
    return [int(size.node.hint) if isinstance(size, torch.SymInt) else int(size) for size in sizes]


def _flat(shape: Any) -> list[int] | None:
    """Return a shape for a reshape, -1 for a dynamic size; None if several are dynamic."""
    sizes = [-1 if isinstance(size, torch.SymInt) else int(size) for size in shape]
    return sizes if sizes.count(-1) <= 1 else None


def _state_of_choices() -> str:
    """Return a text that changes with all that decides a choice: settings, kernels and records."""
    chooser, current = dispatch.default_dispatcher(), settings.current()
    forced = current.kernel, current.config, current.arithmetic, sorted(current.disable)
    required = current.deterministic, current.batch_invariant, current.static_weights
    found = [str((*forced, *required))]
    found += [f"{each.name} {each.version}" for each in chooser.registry.kernels()]
    found += sorted(f"{name} fails {bucket}" for name, bucket in list(chooser.quarantined))
    store = chooser.store
    if store.locked:
        return "\n".join([*found, _stamp(store.lock_path)])
    for place in (store.root, *store.layers):
        found += sorted(map(_stamp, place.rglob("*.json")))
    return "\n".join(found)


def _stamp(path: Path) -> str:
    with suppress(OSError):  # removed meanwhile
        stat = path.stat()
        return f"{path.name} {stat.st_mtime_ns} {stat.st_size}"
    return ""
