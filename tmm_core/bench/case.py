"""A matmul call described by sizes and names, and its tensors.

The command line, the benchmark suites and the demo start from such a description; they then
measure an ordinary call on ordinary tensors.

>>> case = Case(m=64, n=48, k=32, dtype=torch.float32, layout="nt", epilogue="silu", bias=True)
>>> case.call(torch.device("cpu")).matmul().shape
torch.Size([64, 48])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from tmm_cache.problem_fields import SHORT_DTYPES

import tmm_core
from tmm_core import dispatch, formats, settings
from tmm_core.launch import grouped_call, warm
from tmm_core.launch.plan import Plan
from tmm_core.spec.arguments import PARTS, GroupedArguments
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.groups import Groups, Ragged
from tmm_core.spec.operand import Operand, Scale, dtype_name, dtype_of
from tmm_core.spec.problem import Problem
from tmm_core.verify import compare
from tmm_core.verify.ragged_inputs import Inputs, Rows, Sizes, poison
from tmm_core.verify.random_inputs import make, seeded

Tensor = torch.Tensor

#: Common abbreviations of dtypes; torch has its own, such as ``half``.
ALIASES = {short: dtype_of(name) for name, short in SHORT_DTYPES.items()}

#: First letter a, second b: ``n`` row-major as it is, ``t`` a transposed view of a
#: row-major tensor, as in BLAS. ``nt`` is ``x @ weight.T``.
LAYOUTS = ("nn", "nt", "tn", "tt")

#: How 8-bit operands are scaled: not at all, each by one number, or by row and by column.
SCALES = ("", "tensor", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes as in :class:`Problem`: with a gated epilogue ``b`` is ``[k, 2n]``.

    ``epilogue`` is text as in ``matmul(epilogue=…)``; ``tf32`` allows TF32 for fp32;
    ``scales`` gives 8-bit operands scales per ``"tensor"`` or per ``"row"``. ``groups`` makes it a
    grouped call, ragged along ``ragged``, whose size is the total of all groups. ``routing``
    chooses the distribution of group sizes: ``"skewed"``, ``"even"``, or ``"both"`` alternately.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nn"
    epilogue: str = ""
    bias: bool = False
    residual: bool = False
    out_dtype: torch.dtype | None = None
    tf32: bool = False
    scales: str = ""
    groups: int = 0
    ragged: Ragged = "m"
    routing: str = "both"

    def call(self, device: torch.device, *, filled: bool = True) -> Call:
        """The call's tensors on ``device``, random, or uninitialised if not ``filled``.

        Raises:
            UnknownNameError, ValueError: The epilogue is invalid.
            RuntimeError: Torch cannot allocate or fill such tensors.
        """
        epilogue = dispatch.default_dispatcher().registry.epilogue(self.epilogue or None)
        scale = Scale.parse(self.scales) if self.scales else None
        a, b = (Operand(self.dtype, "row" if x == "n" else "col", scale=scale) for x in self.layout)
        plain = formats.pair(self.dtype, self.dtype).result or self.dtype
        out = Operand(self.out_dtype or plain)
        groups = Groups(self.groups, self.ragged) if self.groups else None
        problem = Problem(
            self.m, self.n, self.k, a, b, out, fingerprint(device), batch=self.batch,
            epilogue=epilogue, groups=groups, bias=plain if self.bias else None,
            residual=out if self.residual else None,
        )  # fmt: skip
        inputs = make(problem, device, allocate=partial(_packed, device), filled=filled)
        fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        call = Call(**fields, epilogue=epilogue, out_dtype=self.out_dtype)
        if groups is None:
            return call
        # All groups share one bias. All measurements of a case have the same group sizes.
        sizes: Sizes = "even" if self.routing == "even" else "skewed"
        rows = Rows.of(groups, problem.extent, device, seeded(device, 0), sizes=sizes, whole=True)
        rows = rows if self.routing == "both" else replace(rows, other_offs=())
        return replace(call, rows=rows, bias=None if inputs.bias is None else inputs.bias[0])

    def problem(self, device: torch.device) -> Problem:
        """The call's problem; raises like :meth:`call`."""
        # Only shapes, strides and dtypes matter.
        return self.call(device, filled=False).problem()

    def to_json(self) -> dict[str, Any]:
        document = asdict(self) | {"dtype": dtype_name(self.dtype)}
        if self.out_dtype is not None:
            document["out_dtype"] = dtype_name(self.out_dtype)
        # Older documents lack these fields. A case without groups or scales keeps its document.
        unused = [] if self.scales else ["scales"]
        unused += [] if self.groups else ["groups", "ragged", "routing"]
        return {name: value for name, value in document.items() if name not in unused}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Case:
        """The case that ``doc`` describes; KeyError, TypeError or ValueError if it is invalid."""
        out_dtype = dtype_of(doc["out_dtype"]) if doc["out_dtype"] else None
        return cls(**{**doc, "dtype": dtype_of(doc["dtype"]), "out_dtype": out_dtype})

    def __str__(self) -> str:
        size = f"{self.m}×{self.n}×{self.k}"
        words = [
            f"{self.batch}×{size}" if self.batch > 1 else size,
            dtype_name(self.dtype) + (f"→{dtype_name(self.out_dtype)}" if self.out_dtype else ""),
            self.layout,
            f"{self.groups} groups along {self.ragged}" if self.groups else "",
            self.routing if self.groups and self.routing != "both" else "",
            "tf32" if self.tf32 else "",
            f"scales:{self.scales}" if self.scales else "",
            "bias" if self.bias else "",
            self.epilogue,
            "residual" if self.residual else "",
        ]
        return " ".join(filter(None, words))


def _packed(device: torch.device, name: str, spec: Operand, shape: tuple[int, ...]) -> Tensor:
    """Memory without gaps, even if its rows are then misaligned."""
    if spec.layout == "row":
        return torch.empty(shape, dtype=spec.dtype, device=device)
    *batch, rows, columns = shape
    return torch.empty((*batch, columns, rows), dtype=spec.dtype, device=device).mT


@dataclass(frozen=True, slots=True)
class Call(Inputs):
    """The arguments of one ``tmm_core.matmul``, or of a ``grouped_matmul``."""

    epilogue: Epilogue = IDENTITY
    out_dtype: torch.dtype | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that the call has."""
        given = {name: getattr(self, name) for name in ("bias", "residual", "out_dtype")}
        given["epilogue"] = None if self.epilogue.is_identity else self.epilogue.interned()
        extras = dict(self.rows.given) if self.rows else {}
        extras |= {
            role.name: self.parts[role.keyword] for role in PARTS if role.keyword in self.parts
        }
        return {name: value for name, value in given.items() if value is not None} | extras

    def problem(self) -> Problem:
        """The call's problem."""
        return tmm_core.problem(self.a, self.b, **self.keywords)

    def inputs(self) -> Inputs:
        """The arguments of a launch, which takes a bias for each group."""
        if self.rows is None or self.bias is None:
            return self
        return replace(self, bias=self.bias.expand(len(self.rows.ends), -1))

    def matmul(self, **more: Any) -> Tensor:
        """Make the call; ``more`` as in :func:`tmm_core.matmul`."""
        function: Any = tmm_core.matmul if self.rows is None else tmm_core.grouped_matmul
        return function(self.a, self.b, **self.keywords, **more)  # type: ignore[no-any-return]

    def error(self, **forced: Any) -> float:
        """Largest error of the call's result, written over NaN."""
        problem = self.problem()
        out = poison(problem.empty_out(self.a.device))
        self.matmul(**forced, out=out)
        return compare.error(out, compare.expected(problem, self.inputs()).numbers)

    def plan(self, **forced: Any) -> Plan:
        """The plan of the kernel chosen for the call; ``forced``: ``kernel`` and ``config``."""
        if self.rows is None:
            return tmm_core.plan(self.a, self.b, **self.keywords, **forced)
        call = GroupedArguments(self.a, self.b, **self.keywords)
        with settings.override(**forced) as current:
            return warm.make_plan(call, self.epilogue, current, grouped_call.describe)


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """``(batch, m, n, k)`` of ``"MxNxK"`` or ``"BxMxNxK"``.

    >>> parse_shape("8x64x64x128"), parse_shape("16x4096x512")
    ((8, 64, 64, 128), (1, 16, 4096, 512))

    Raises:
        ValueError: The text is not three or four whole numbers.
    """
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) not in (3, 4) or not all(p.isascii() and p.isdigit() for p in parts):
        raise ValueError(f"found {text!r}, accepted is MxNxK or BxMxNxK, like 4096x4096x512")
    batch, m, n, k = [1] * (4 - len(parts)) + [int(p) for p in parts]
    return batch, m, n, k


def parse_dtype(text: str) -> torch.dtype:
    """``torch.bfloat16`` for ``"bf16"`` or ``"bfloat16"``.

    Raises:
        ValueError: No such dtype.
    """
    try:
        return ALIASES.get(text) or dtype_of(text)
    except ValueError as error:
        raise ValueError(f"{error}; known: {', '.join(ALIASES)} and torch's names") from None


def parse_expression(text: str) -> dict[str, Any]:
    """The fields of a :class:`Case` for a text like ``"bias+gelu_tanh+residual"``. Each part may be
    left out.

    >>> parse_expression("bias+gelu_tanh+softcap(30)")
    {'bias': True, 'epilogue': 'gelu_tanh+softcap(30)', 'residual': False}

    Raises:
        ValueError: The bias is not first, or the residual not last.
    """
    stages = text.split("+") if text else []
    bias = stages[:1] == ["bias"]
    stages = stages[bias:]
    residual = stages[-1:] == ["residual"]
    stages = stages[: len(stages) - residual]
    if {"bias", "residual"} & set(stages):
        raise ValueError(f"found {text!r}, accepted is bias+…+residual: bias first, residual last")
    return {"bias": bias, "epilogue": "+".join(stages), "residual": residual}
