"""A pass over the graphs of ``torch.compile``, which fuses products with what follows them.

It rewrites a product and the pointwise operators behind it as one ``tmm::matmul``, if the records
say that this is faster.

Without it Inductor calls BLAS for the product, and fuses what follows into another kernel, which
reads the product from memory and writes it again.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.fx import Node

from tmm_core import compat, dispatch, settings
from tmm_core.errors import error_text, reraise, warn
from tmm_core.interop import operator, tails
from tmm_core.interop.aten_calls import DTYPES
from tmm_core.interop.tails import Tail, terms_of
from tmm_core.launch import warm
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.device import fingerprint
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.machine import Machine
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import MARGIN

When = Literal["records", "always"]

#: The option of torch's compiler that holds the pass.
OPTION = "post_grad_custom_pre_pass"

_Pass: Any = compat.graph_pass()


class Rewrite(_Pass):  # type: ignore[misc]  # a class of torch without types
    """The pass.

    Args:
        when: ``"records"``: rewrite where records say that it is faster; ``"always"``: wherever it
            is possible.
        before: The passes that run first, as set in torch's options.
    """

    def __init__(self, when: When = "records", before: Any = None) -> None:
        self.when = when
        given = before if isinstance(before, (list, tuple)) else [before]
        self.before = [each for each in given if each is not None]

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.before:
            each(graph)
        for tail in tails.tails(graph):
            try:
                self._rewrite(graph, tail)
            except Exception as error:  # a feature; the graph is compiled as it is
                reraise(error)
                warn(f"torch.compile keeps {tail.product}: tmm's pass raised {error_text(error)}")

    def uuid(self) -> Any:
        """A key for torch's cache of compiled graphs, which changes with the records. None, which
        turns that cache off, if an earlier pass has no key."""
        others = [getattr(each, "uuid", lambda: None)() for each in self.before]
        if None in others:
            return None
        digest = hashlib.sha256()
        for module in (__file__, tails.__file__):
            digest.update(Path(module).read_bytes())
        if self.when == "records":
            digest.update(_state_of_records().encode())
        return (f"tmm {self.when} {digest.hexdigest()}", *others)

    def _rewrite(self, graph: torch.fx.Graph, tail: Tail) -> None:
        found = terms_of(tail.product)
        if found is None:
            return
        a, b, bias, residual, alpha = found
        dtype = tail.product.meta["val"].dtype
        given = [a, b, *(t for t in (bias, residual, tail.residual) if t is not None)]
        dtypes = {getattr(node.meta.get("val"), "dtype", None) for node in given}
        if dtype not in DTYPES or dtypes != {dtype}:
            return
        if residual is not None and tail.epilogue:
            return  # it is added before the activation
        if 0 in _hints(tail.product.meta["val"].shape):
            return
        if self.when == "records" and not pays(tail, found):
            return
        with graph.inserting_before(tail.last):
            added = tail.residual if tail.residual is not None else residual
            if tail.residual is not None and tail.shape is not None:
                shape = _flat(tail.result_shape)
                if shape is None:
                    return
                added = _call(graph, torch.ops.aten.reshape.default, (tail.residual, shape))
            given_ = (a, b, bias, added, alpha, tail.epilogue)
            y = _call(graph, operator.matmul, given_)
            if tail.shape is not None:
                y = _call(graph, torch.ops.aten.reshape.default, (y, tail.shape))
        tail.last.replace_all_uses_with(y)
        for node in [node for node in reversed(graph.nodes) if node in tail.nodes]:
            graph.erase_node(node)


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
    before = options.pop(OPTION, None) or getattr(compat.inductor_config(), OPTION)
    return {**options, OPTION: before if _has_pass(before) else Rewrite(when, before)}


def _has_pass(before: Any) -> bool:
    each = before if isinstance(before, (list, tuple)) else [before]
    return any(isinstance(one, Rewrite) for one in each)


def install() -> bool:
    """Set the pass for all graphs compiled from now on in this process; returns False if it was
    already set."""
    config = compat.inductor_config()
    before = getattr(config, OPTION)
    if _has_pass(before):
        return False
    setattr(config, OPTION, Rewrite("records", before))
    return True


def uninstall() -> None:
    """Undo :func:`install`. Graphs compiled before keep their calls."""
    config = compat.inductor_config()
    now = getattr(config, OPTION)
    if isinstance(now, Rewrite):
        before = now.before
        setattr(config, OPTION, before[0] if len(before) == 1 else before or None)


# -- whether it pays -------------------------------------------------------------------------


def pays(tail: Tail, terms: Any) -> bool:
    """Whether records say that one call for the whole is faster.

    The kernel's time for the whole is compared with BLAS's for the product plus a pass over the
    result. Without a record of the product alone, a kernel that wins the whole's record pays.
    """
    problem = problem_of(tail, terms)
    chooser = dispatch.default_dispatcher()
    current = settings.changed(settings.current(), on_cache_miss="heuristic")
    choice = chooser.choose(problem, current)
    if choice.candidate.kernel.name == BASELINE or choice.origin not in ("cache", "tuned"):
        return False
    if not tail.epilogue and tail.residual is None:
        return True
    from tmm_core.dispatch.saving import record_times

    whole = record_times(chooser, problem, choice.candidate)
    alone = record_times(chooser, alone_of(problem))
    if whole is None or alone is None:
        return True
    size = problem.batch * problem.m * problem.n * problem.out.dtype.itemsize
    reads = 2 + (tail.residual is not None) + tail.gated
    passed = Machine.of(problem.device).moving_us(reads * size)
    return whole < (alone + passed) * (1 - MARGIN)


def alone_of(problem: Problem) -> Problem:
    """Return the problem of the product alone, whose result a pass then reads."""
    return replace(problem, epilogue=warm.epilogue_of(""), residual=None, n=problem.width)


def problem_of(tail: Tail, terms: Any) -> Problem:
    """Return the problem of the rewritten call, with the example's value of each dynamic size."""
    a, b, bias, residual, alpha = terms
    device, fp32 = a.meta["val"].device, a.meta["val"].dtype is torch.float32
    added = residual
    with compat.without_modes():
        if tail.residual is not None:
            added = torch.empty(
                _hints(tail.result_shape),
                dtype=a.meta["val"].dtype,
                device="meta",
            )
        call = Arguments(
            _like(a),
            _like(b),
            None if bias is None else _like(bias),
            _like(added) if isinstance(added, Node) else added,
            alpha,
            tail.epilogue,
        )
        problem, _ = warm.pose(call, warm.epilogue_of(tail.epilogue), settings.current())
    tf32 = fp32 and device.type == "cuda" and warm._tf32()
    return replace(problem, device=fingerprint(device), tf32=tf32)


def _like(node: Node) -> torch.Tensor:
    """Return a meta tensor with the shape, strides and dtype of the node's value."""
    val = node.meta["val"]
    shape, strides = _hints(val.shape), _hints(val.stride())
    return torch.empty_strided(shape, strides, dtype=val.dtype, device="meta")


def _hints(sizes: Any) -> list[int]:
    """Return sizes, with the example's value of each dynamic size."""
    return [int(size.node.hint) if isinstance(size, torch.SymInt) else int(size) for size in sizes]


def _flat(shape: Any) -> list[int] | None:
    """Return a shape as an argument of a reshape, with -1 for a dynamic size; None if several are
    dynamic."""
    sizes = [-1 if isinstance(size, torch.SymInt) else int(size) for size in shape]
    return sizes if sizes.count(-1) <= 1 else None


def _call(graph: torch.fx.Graph, target: Any, arguments: tuple[Any, ...]) -> Node:
    """A new node, with its value as the compiler's other passes expect it."""
    node = graph.call_function(target, arguments)
    values = torch.fx.map_arg(arguments, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)
    return node


def _state_of_records() -> str:
    """Return a text that changes when this user's records change."""
    root = dispatch.default_dispatcher().store.root
    found = []
    for path in Path(root).rglob("*.json"):
        try:
            stat = path.stat()
        except OSError:  # removed meanwhile
            continue
        found.append(f"{path.name} {stat.st_mtime_ns} {stat.st_size}")
    return "\n".join(sorted(found))
