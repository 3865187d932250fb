"""A problem to test a kernel on: operands in given layouts, and checks for every kind of fault."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tmm_core.dispatch import verify
from tmm_core.dispatch.guarded import Guarded
from tmm_core.dispatch.random_inputs import fill
from tmm_core.dispatch.verifier import Verifier
from tmm_core.formats import wide
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.kernel import Launcher
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.testing import memory


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A problem given by sizes, dtypes and layouts (:data:`tmm_core.testing.memory.LAYOUTS`)."""

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
    #: ``"tensor"``, ``"row"`` or None.
    scale_a: str | None = None
    scale_b: str | None = None

    def pose(self, device: torch.device, *, seed: int = 0) -> Posed:
        """Make the tensors. The same probe and seed make the same numbers."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()) + seed)
        batch = (self.batch,) if self.batch != 1 else ()
        width = self.n * (2 if self.epilogue.gated else 1)
        plain = wide(self.dtype)
        out_dtype = self.out_dtype or plain
        operands = {
            "a": memory.operand(
                (*batch, self.m, self.k), self.a, self.dtype, device, stacking=self.stack_a
            ),
            "b": memory.operand(
                (*batch, self.k, width), self.b, self.b_dtype or self.dtype, device,
                stacking=self.stack_b,
            ),
        }  # fmt: skip
        if self.bias is not None:
            operands["bias"] = memory.vector(width, self.bias, self.bias_dtype or plain, device)
        if self.residual is not None:
            operands["residual"] = memory.operand(
                (*batch, self.m, self.n), self.residual, self.residual_dtype or out_dtype, device,
                stacking=self.stack_residual,
            )  # fmt: skip
        shapes = {"scale_a": (*batch, self.m, 1), "scale_b": (*batch, 1, width)}
        for name, shape in shapes.items():
            kind = getattr(self, name)
            if kind is not None:
                shape = shape if kind == "row" else ()
                packed = memory.vector(math.prod(shape), "packed", torch.float32, device)
                operands[name] = replace(packed, tensor=packed.tensor.view(shape))
        for name, operand in operands.items():
            fill(name, operand.tensor, self.k, generator)
        out = memory.destination((*batch, self.m, self.n), self.out, out_dtype, device)
        return Posed(self, operands, out)

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
class Posed:
    """A probe's tensors."""

    probe: Probe
    operands: Mapping[str, Guarded]
    out: Guarded

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
            **inputs.extras,
            epilogue=self.probe.epilogue,
            scaled=self.probe.alpha != 1.0,
            tf32=self.probe.tf32,
        )

    @functools.cached_property
    def inputs(self) -> Arguments:
        tensors: dict[str, Any] = {name: made.tensor for name, made in self.operands.items()}
        return Arguments(**tensors, alpha=self.probe.alpha, out=self.out.tensor)

    def launch(self, launcher: Launcher, out: torch.Tensor | None) -> torch.Tensor:
        """Call ``launcher`` with these operands, with the probe's TF32 setting."""
        with precision(self.probe.tf32):
            return self.inputs.launch(launcher, out)

    def faults(self, launcher: Launcher, slack: float) -> list[str]:
        """Launch into ``out`` and describe its faults."""
        with precision(self.probe.tf32):
            reason = self._verifier().verdict(launcher, brief=True, slack=slack).reason
        if reason is None:
            return []
        self.launch(launcher, self.out.poison())
        return [reason, *self.differences(self.out.tensor, slack)]

    def differences(self, result: torch.Tensor, slack: float) -> Iterator[str]:
        """Describe wrong values, if any."""
        expected = self._verifier().sets()[0].expected.in_rows
        limit = verify.tolerance(self.problem) * slack
        error = verify.error(result, expected)
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
