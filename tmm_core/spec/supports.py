"""A kernel's declaration of the problems it serves, and the reasons against all others.

Closed by default: a kernel is not queried for problems that it does not declare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch

from tmm_core.formats import grids
from tmm_core.spec.groups import Ragged
from tmm_core.spec.operand import ALIGNMENT, Operand, dtype_name
from tmm_core.spec.port import Kind, Reduce
from tmm_core.spec.problem import Problem


class _Any(frozenset[Any]):
    """Contains everything, and lists nothing."""

    def __contains__(self, x: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "ANY"


#: Stands for a collection in :class:`Supports`: no limit.
ANY: Collection[Any] = _Any()
MATRICES = ("a", "b", "out", "residual")

Dtypes = Collection[torch.dtype]


@dataclass(frozen=True, kw_only=True)
class Supports:
    """The problems that a kernel serves. Each field admits more; defaults admit the least.

    Args:
        devices: ``"cuda"`` (NVIDIA), ``"hip"`` (AMD), ``"cpu"``, ``"interpreter"`` (Triton's, on
            the CPU), or a torch device type.
        capability: The minimum compute capability of NVIDIA GPUs.
        below: The first compute capability that is too new.
        operands: Dtypes of a and b, which share one dtype.
        formats: Formats that both operands may have (:class:`tmm_core.Format`): ``"fp8"``.
        weights: Formats that ``b`` may have if ``a`` is plain. A format that the kernel does not
            name needs a device function.
        activations: Formats that ``a`` may have if ``b`` is plain or has another format.
        scales: Kinds of scales that such operands may have: ``"tensor"``, ``"row"``, ``"group"``
            (of values along K), ``"block"`` (of several rows).
        zeros: Zero points.
        packed: Formats with several values in a stored element.
        out: Dtypes of the result.
        bias: Dtypes of a bias; none: no bias.
        residual: Dtypes of a residual; none: no residual.
        layouts: Stride classes of ``"a"``, ``"b"``, ``"out"`` and ``"residual"``; only row-major
            for those not named.
        unaligned: Which of these need not have their base and rows aligned to 16 bytes.
        wide: Offsets beyond 32 bits.
        batch: Maximum number of products in a batch; None: any number.
        empty: Dimensions of size 0.
        alpha: A factor other than 1.
        epilogues: Epilogues, by their device function.
        gated: Gated ones among them, which take two halves of the product.
        interleaved: Gated ones that take alternate columns.
        unfused: Epilogues without a device function, by their reference.
        outputs: Kinds of an epilogue's outputs (:class:`~tmm_core.Port`); ``"group"`` stands for
            tiles with groups too.
        reduces: Reductions of these outputs: ``"max"``, ``"sum"``.
        ragged: Dimensions along which groups may differ (:class:`~tmm_core.Groups`).
        indexed: Gathering, scattering or weighting rows of ragged products.
        zeroed: Zeroing everything beyond the last group.

    Raises:
        TypeError: A field has a value of another type, such as a string instead of a collection of
            names, or a dtype's name instead of the dtype.
        ValueError: A name that no problem has, as in ``scales=("rows",)``.
    """

    devices: Collection[str] = ("cuda",)
    capability: tuple[int, int] = (0, 0)
    below: tuple[int, int] | None = None
    operands: Dtypes = ()
    formats: Collection[str] = ()
    weights: Collection[str] = ()
    activations: Collection[str] = ()
    scales: Collection[str] = ()
    zeros: bool = False
    packed: bool = False
    out: Dtypes = ()
    bias: Dtypes = ()
    residual: Dtypes = ()
    layouts: Mapping[str, Collection[str]] = field(default_factory=dict)
    unaligned: Collection[str] = ()
    wide: bool = False
    batch: int | None = 1
    empty: bool = False
    alpha: bool = False
    epilogues: bool = False
    gated: bool = False
    interleaved: bool = False
    unfused: bool = False
    outputs: Collection[str] = ()
    reduces: Collection[str] = ()
    ragged: Collection[str] = frozenset()
    indexed: bool = False
    zeroed: bool = False

    def __post_init__(self) -> None:
        for name in _COLLECTIONS:
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Collection):
                raise TypeError(f"Supports.{name} is a collection, got {value!r}")
        for name, value in self.layouts.items():
            if isinstance(value, str) or not isinstance(value, Collection):
                raise TypeError(f"Supports.layouts[{name!r}] is a collection, got {value!r}")
            _check_names(f"layouts[{name!r}]", value, _LAYOUTS)
        _check_names("layouts", self.layouts, MATRICES)
        for name, known in _NAMES.items():
            _check_names(name, getattr(self, name), known)
        for name in ("operands", "out", "bias", "residual"):
            for value in getattr(self, name):
                if not isinstance(value, torch.dtype):
                    raise TypeError(f"Supports.{name} has dtypes of torch, got {value!r}")
        for name in _FLAGS:
            if type(value := getattr(self, name)) is not bool:
                raise TypeError(f"Supports.{name} is True or False, got {value!r}")
        for name, value in (("capability", self.capability), ("below", self.below)):
            if not (value is None and name == "below") and not (
                isinstance(value, tuple) and [*map(type, value)] == [int, int]
            ):
                raise TypeError(f"Supports.{name} is a pair like (9, 0), got {value!r}")
        if self.batch is not None and type(self.batch) is not int:
            raise TypeError(f"Supports.batch is a number or None, got {self.batch!r}")

    @classmethod
    def everything(cls) -> Supports:
        """Admit all problems, for a kernel whose ``declines`` gives all reasons."""
        everything: dict[str, Any] = dict.fromkeys(_COLLECTIONS, ANY)
        everything |= dict.fromkeys(_FLAGS, True)
        return cls(**everything, layouts=dict.fromkeys(MATRICES, ANY), batch=None)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Why a kernel with this declaration cannot serve ``problem``; empty if it admits it."""
        return [reason for check in _CHECKS for reason in check(self, problem)]


_FLAGS = [each.name for each in fields(Supports) if each.default is False]
_COLLECTIONS = ("devices", "operands", "formats", "weights", "activations", "scales", "out",
                "bias", "residual", "unaligned", "outputs", "reduces", "ragged")  # fmt: skip
_DEVICES = {
    "cuda": "NVIDIA GPUs",
    "hip": "AMD GPUs",
    "cpu": "CPUs",
}
_LAYOUTS = {"row": "row-major", "col": "column-major", "strided": "of any stride"}
#: The names that these collections may contain. Formats and devices are open sets.
_NAMES = {
    "scales": get_args(grids.Kind),
    "unaligned": MATRICES,
    "outputs": get_args(Kind),
    "reduces": get_args(Reduce),
    "ragged": get_args(Ragged),
}


def _check_names(field_name: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise for a name that no problem has: it would admit nothing, without a word."""
    for name in given:
        if name not in known:
            raise ValueError(f"Supports.{field_name} has {', '.join(known)}, got {name!r}")


def _device(supports: Supports, problem: Problem) -> Iterator[str]:
    device = problem.device
    kind = "hip" if device.cuda.startswith("hip") else device.type
    (major, minor), below = supports.capability, supports.below
    if kind not in supports.devices and not (
        device.interpreted and "interpreter" in supports.devices
    ):
        places = [_DEVICES.get(d, d) for d in supports.devices if d != "interpreter"]
        where = " and ".join(places) or "no device"
        where += ", or under TRITON_INTERPRET=1" if "interpreter" in supports.devices else ""
        within = " in Triton's interpreter" if device.interpreted else ""
        yield f"runs on {where}, not on {kind}{within}"
    elif kind == "cuda" and not (major, minor) <= device.capability < (below or (math.inf,)):
        most = f" to below {below[0]}.{below[1]}" if below else ""
        yield f"needs compute capability {major}.{minor}{most}, this is {device.sm / 10}"


def _numbers(supports: Supports, problem: Problem) -> Iterator[str]:
    """Yield reasons against the dtypes of a and b, their formats and scales."""
    a, b = problem.a.dtype, problem.b.dtype
    of_a, of_b = problem.forms
    if problem.stored:
        yield from _formats(supports, problem)
    elif a.itemsize == 1 and a.is_floating_point:
        yield f"{a} and {b} operands have no installed format"
    elif a not in supports.operands:
        names = [_named(supports.operands), *supports.formats]
        yield f"{a} operands are not among {', '.join(names)}"
    elif a != b:
        yield f"operands differ in dtype: {a} and {b}"
    for name, operand, form in (("a", problem.a, of_a), ("b", problem.b, of_b)):
        if operand.scale and not (form and operand.scale.kind in supports.scales):
            size = grids.text_of(operand.block)
            yield f"has no scale of {name} by {size} for {operand.dtype}"
        if operand.pack != 1 and not supports.packed:
            yield f"does not unpack {name}, which has {operand.pack} values in an element"
        if operand.zero and not supports.zeros:
            yield f"has no zero points of {name}"


def _formats(supports: Supports, problem: Problem) -> Iterator[str]:
    """Yield reasons against the formats of both operands."""
    of_a, of_b = problem.forms
    a, b = problem.a.dtype, problem.b.dtype
    if of_a is not None and of_a is of_b:
        if of_a.name not in supports.formats:
            yield f"does not multiply {of_a.name} operands, {a} and {b}"
    elif of_a is not None:
        if of_a.name not in supports.activations:
            yield f"takes no {of_a.name} a with a b of {of_b.name if of_b else b}"
    elif of_b is not None:
        if of_b.name not in supports.weights:
            yield f"takes no {of_b.name} b with an a of {a}"
        elif of_b.decode is None and not supports.unfused and supports.weights is ANY:
            yield f"format {of_b.name} has no device function"
        if a not in supports.operands:
            yield f"{a} operands are not among {_named(supports.operands)}"


def _others(supports: Supports, problem: Problem) -> Iterator[str]:
    """Yield reasons against the dtypes of the result, the bias and the residual."""
    residual = problem.residual.dtype if problem.residual is not None else None
    for name, dtype in (("out", problem.out.dtype), ("bias", problem.bias), ("residual", residual)):
        allowed: Dtypes = getattr(supports, name)
        if dtype is not None and dtype not in allowed:
            yield f"{name} of {dtype} is not among {_named(allowed) or 'what it takes: none'}"


def _matrices(supports: Supports, problem: Problem) -> Iterator[str]:
    """Yield reasons against the layout, alignment and offset range of each matrix."""
    for name in MATRICES:
        matrix: Operand | None = getattr(problem, name)
        if matrix is None:
            continue
        allowed = supports.layouts.get(name, ("row",))
        if matrix.layout not in allowed:
            if matrix.layout == "strided":
                yield f"{name} has no contiguous dimension"
            else:
                wanted = " or ".join(_LAYOUTS[layout] for layout in allowed)
                yield f"{name} is {_LAYOUTS[matrix.layout]}, not {wanted}"
        elif not matrix.aligned and matrix.layout != "strided" and name not in supports.unaligned:
            yield f"{name} is not aligned to {ALIGNMENT} bytes (base and strides)"
        if matrix.wide and not supports.wide:
            yield f"{name} has offsets beyond 32 bits"


def _sizes(supports: Supports, problem: Problem) -> Iterator[str]:
    if problem.is_empty and not supports.empty:
        yield "nothing to multiply: a dimension is 0"
    if supports.batch is not None and problem.batch > supports.batch:
        yield f"batch {problem.batch} exceeds {supports.batch}"


def _epilogue(supports: Supports, problem: Problem) -> Iterator[str]:
    """Yield reasons against alpha, the epilogue and its outputs."""
    epilogue = problem.epilogue
    if problem.scaled and not supports.alpha:
        yield "does not support alpha"
    if not epilogue.is_identity and not supports.epilogues:
        yield f"applies no epilogue, so not {epilogue.name!r}"
    if epilogue.gated and not supports.gated:
        yield f"has one accumulator, gated {epilogue.name!r} needs two"
    if epilogue.interleaved and not supports.interleaved:
        yield f"pairs columns by halves, {epilogue.name!r} alternate ones"
    if not epilogue.fusable and not supports.unfused:
        yield f"epilogue {epilogue.name!r} has no device function"
    yield from _outputs(supports, problem)


def _outputs(supports: Supports, problem: Problem) -> Iterator[str]:
    for port in problem.epilogue.outputs:
        if port.kind not in supports.outputs or (port.group and "group" not in supports.outputs):
            yield f"writes no output {port}"
        elif port.reduce is not None and port.reduce not in supports.reduces:
            yield f"reduces no output {port}"
        elif not port.fusable and not supports.unfused:
            yield f"output {port.name!r} has no device function"
    if problem.epilogue.outputs and (problem.batch != 1 or problem.groups is not None):
        yield "outputs are of one product, not of a batch or of groups"


def _groups(supports: Supports, problem: Problem) -> Iterator[str]:
    groups = problem.groups
    if groups is not None and groups.ragged not in supports.ragged:
        yield f"does not serve products that are ragged along {groups.ragged}"
    elif groups is not None:
        if len(groups.given) > 1 and not supports.indexed:
            yield f"takes no {' or '.join(groups.given[1:])}"
        if groups.zeroed and not supports.zeroed:
            yield "does not zero the result beyond the last group"


def _named(dtypes: Dtypes) -> str:
    return ", ".join(map(dtype_name, dtypes))


#: Every check of a problem against a declaration. A test lists which of them covers each field of a
#: problem and of its parts (``tests/core/test_supports.py``).
_CHECKS: tuple[Callable[[Supports, Problem], Iterator[str]], ...] = (
    _sizes,
    _numbers,
    _matrices,
    _others,
    _device,
    _epilogue,
    _groups,
)
