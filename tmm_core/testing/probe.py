"""A problem to test a kernel on: operands in given layouts, and checks for every kind of fault."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tmm_core import formats
from tmm_core.formats import Format
from tmm_core.formats.grids import ROW
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.operand import Operand, Scale
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.testing import memory
from tmm_core.verify import compare, random_inputs
from tmm_core.verify.guard_bands import GuardedTensor
from tmm_core.verify.ragged_inputs import Inputs
from tmm_core.verify.verifier import Verifier


def scales_of(form: Format) -> list[str]:
    """The scales that a format allows, as texts; each of its dtypes is among them, if there are as
    many."""
    dtypes = itertools.cycle(form.scale_dtypes)
    return [str(Scale(block, dtype)) for block, dtype in zip(form.grids, dtypes, strict=False)]


def usual_scale(form: Format) -> str:
    """The scale of a format's weights, as a text: by row, or else its first."""
    block = ROW if ROW in form.grids else form.grids[0]
    return str(Scale(block, form.scale_dtypes[0]))


def _is_implied(dtype: torch.dtype, name: str) -> bool:
    """Whether the format of that name is the one that the dtype implies."""
    form = formats.IMPLIED.get(dtype)
    return form is not None and form.name == name


def whole_k(k: int, *operands: Operand) -> int:
    """``k``, or the next number of values that has whole groups and stored elements."""
    unit = math.lcm(
        *(each.pack for each in operands), *(max(1, each.block[1]) for each in operands)
    )
    return -(-k // unit) * unit


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A problem given by sizes, dtypes and layouts (:data:`tmm_core.testing.memory.LAYOUTS`).

    Where operands have values in groups, K is rounded up to whole ones.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    #: None: a's dtype.
    b_dtype: torch.dtype | None = None
    batch: int = 1
    #: None: the operands' dtype, or bf16 if they are 8-bit floats.
    out_dtype: torch.dtype | None = None
    a: str = "row"
    b: str = "row"
    out: str = "row"
    #: How the batch's matrices of a and of b are stacked.
    stack_a: str = "packed"
    stack_b: str = "packed"
    epilogue: Epilogue = IDENTITY
    #: Layout of the bias vector (``packed``, ``strided``, ``broadcast``), or None.
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    residual: str | None = None
    stack_residual: str = "packed"
    residual_dtype: torch.dtype | None = None
    alpha: float = 1.0
    tf32: bool = False
    #: The formats that dtypes do not imply, and the text of scales: ``"tensor"``, ``"row"``,
    #: ``"1x128 bfloat16"``.
    a_format: str = ""
    b_format: str = ""
    a_scale: str | None = None
    b_scale: str | None = None
    b_zero: bool = False

    def tensors(self, device: torch.device, *, seed: int = 0) -> ProbeTensors:
        """Make the tensors. The same probe and seed make the same numbers."""
        b_dtype = self.b_dtype or self.dtype
        names = f"{self.a_format},{self.b_format}" if self.a_format or self.b_format else ""
        plain = formats.pair(self.dtype, b_dtype, names).result
        assert plain is not None
        out_dtype = self.out_dtype or plain
        a, b = (
            Operand(
                dtype, format="" if _is_implied(dtype, name) else name,
                scale=Scale.parse(text) if text else None, zero=dtype if zero else None,
            )
            for dtype, name, text, zero in (
                (self.dtype, self.a_format, self.a_scale, None),
                (b_dtype, self.b_format, self.b_scale, b_dtype if self.b_zero else None),
            )
        )  # fmt: skip
        sizes = Problem(
            self.m, self.n, whole_k(self.k, a, b), a, b, Operand(out_dtype),
            fingerprint(device), self.batch, self.epilogue,
            bias=None if self.bias is None else self.bias_dtype or plain,
            residual=None if self.residual is None else Operand(self.residual_dtype or out_dtype),
        )  # fmt: skip
        layouts = {"a": self.a, "b": self.b, "bias": self.bias, "residual": self.residual}
        operands: dict[str, GuardedTensor] = {}

        def allocate(name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
            stacking = getattr(self, f"stack_{name}", "packed")
            operands[name] = memory.operand(
                shape, layouts.get(name) or "row", spec.dtype, device, stacking=stacking
            )
            return operands[name].tensor

        seed += zlib.crc32(str(self).encode())
        inputs = random_inputs.make(sizes, device, seed=seed, allocate=allocate)
        out = memory.destination(sizes.out_shape, self.out, out_dtype, device)
        return ProbeTensors(
            self, sizes, dataclasses.replace(inputs, alpha=self.alpha), operands, out
        )

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", _word(self.dtype)]
        for field in dataclasses.fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}:{_word(value)}")
        return "-".join(words)


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class ProbeTensors:
    """A probe's tensors."""

    probe: Probe
    #: The probe's problem before its tensors had strides.
    sizes: Problem
    inputs: Inputs
    #: The memory of the inputs, by name, and of the output.
    operands: Mapping[str, GuardedTensor]
    out: GuardedTensor

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem that these tensors pose."""
        inputs = self.inputs
        return Problem.of(
            inputs.a,
            inputs.b,
            self.out.tensor,
            fingerprint(inputs.a.device),
            bias=inputs.bias,
            residual=inputs.residual,
            stored={
                name: {"format": spec.format, "scale": spec.scale, "zero": spec.zero}
                for name, spec in (("a", self.sizes.a), ("b", self.sizes.b))
            },
            epilogue=self.probe.epilogue,
            scaled=self.probe.alpha != 1.0,
            tf32=self.probe.tf32,
        )

    def launch(self, launcher: Launcher, out: torch.Tensor | None) -> torch.Tensor:
        """Call ``launcher`` with these operands, with the probe's TF32 setting."""
        with precision(self.probe.tf32):
            return self.inputs.launch(launcher, out)

    def faults(self, launcher: Launcher, slack: float) -> list[str]:
        """Launch into ``out`` and describe its faults."""
        with precision(self.probe.tf32):
            reason = self._verifier().verdict(launcher, extent="brief", slack=slack).reason
        if reason is None:
            return []
        self.launch(launcher, self.out.poison())
        return [reason, *self.differences(self.out.tensor, slack)]

    def differences(self, result: torch.Tensor, slack: float) -> Iterator[str]:
        """Describe wrong values, if any."""
        sample = self._verifier().sets()[0].expected.in_rows
        limit = compare.tolerance(self.problem) * slack
        error, expected = float(sample.error(result, result.numel())), sample.numbers
        if error <= limit:
            return
        if missing := int(result.isnan().sum()):
            yield (
                f"{missing} of {result.numel()} elements are NaN: never written, or computed from "
                "data outside an operand."
            )
        off = ((result.to(expected.dtype) - expected).abs() / (expected.abs() + 1)).nan_to_num(1e9)
        place = (off == off.max()).nonzero()[0].tolist()
        has, wanted = (t[tuple(place)].item() for t in (result, expected))
        yield (
            f"Its error is {error:.3g}, the tolerance is {limit:.3g}; at {place} it has "
            f"{has:.6g} instead of {wanted:.6g}."
        )

    def _verifier(self) -> Verifier:
        """These tensors, with the reference of their current values."""
        return Verifier.given(self.problem, self.inputs, self.operands, self.out)
