"""Inputs to measure a problem with, and what the right answer is.

A candidate is verified before it is timed: fresh random inputs, the output poisoned with
NaN, compared element by element with a reference of the whole expression computed in a
higher precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from tmm_core.kernel import Launcher, ScaledLauncher
from tmm_core.precision import precision
from tmm_core.problem import ALIGNMENT, Operand, Problem, ScaleKind

#: Products up to this many multiply-adds get an fp64 reference; beyond, fp32 would do for
#: 16-bit operands, and fp64 matmul is slow on most GPUs (1/64 of the fp32 rate).
FP64_FLOPS = 2**38

#: Largest |out − ref| / (|ref| + rms(ref)) accepted, by what limits precision: about two
#: units in the last place of the result, and for TF32 the rounding of the operands to 11
#: bits, whose errors of 2⁻¹¹ average out to 4e-4 rms and 5.5 σ over 10⁸ elements.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
TF32_TOLERANCE = 4e-3
#: Of products of 8-bit floats: Hopper's tensor cores keep some 14 bits of a sum of them
#: (DeepSeek-V3, arXiv:2412.19437, 3.3.2). Added up in fp32 every 128 terms, 256×256 of them
#: were off by 4e-4 to 7e-4 on an H200 for K from 128 to 65536, cuBLAS's and ours alike, of
#: which scales that differ from row to row make a few times as much; summed in these bits
#: throughout by 2e-3 at K = 1024, 5e-3 at 8192 and 2.6e-2 at 65536.
FP8_TOLERANCE = 4e-3


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operands of one problem, on its device."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    alpha: float
    out: torch.Tensor
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None

    def run(self, launcher: Launcher) -> torch.Tensor:
        return self.launch(launcher, self.out)

    def launch(self, launcher: Launcher, out: torch.Tensor | None) -> torch.Tensor:
        """As :meth:`run`, into ``out`` or what the launcher allocates."""
        if self.scale_a is None and self.scale_b is None:
            return launcher(self.a, self.b, self.bias, self.residual, self.alpha, out)
        return cast(ScaledLauncher, launcher)(
            self.a, self.b, self.bias, self.residual, self.alpha, out, self.scale_a, self.scale_b
        )


def make_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Random operands of the problem's sizes and stride classes.

    randn, because zeros and constants run faster on real hardware and hide wrong indexing;
    scaled by K^-¼ each, so that the product has unit variance and an epilogue is tried
    where it bends and not where it saturates or overflows fp16.
    """
    spread = max(1, problem.k) ** -0.25
    generator = torch.Generator(device=device).manual_seed(seed)
    batch = (problem.batch,) if problem.batch > 1 else ()
    width = problem.n * (2 if problem.gated else 1)

    def scale(kind: ScaleKind | None, *shape: int) -> torch.Tensor | None:
        """Around one, so that the product keeps its variance."""
        if kind is None:
            return None
        size = (*batch, *shape) if kind == "row" else ()
        return torch.rand(size, generator=generator, device=device) + 0.5

    def fill(spec: Operand, *shape: int) -> torch.Tensor:
        t = _empty(spec, (*batch, *shape), device)
        return t.copy_(torch.randn(t.shape, generator=generator, device=device) * spread)

    bias = None
    if problem.bias is not None:
        bias = torch.randn(width, generator=generator, device=device).to(problem.bias)
    inputs = Inputs(
        a=fill(problem.a, problem.m, problem.k),
        b=fill(problem.b, problem.k, width),
        bias=bias,
        residual=fill(problem.residual, problem.m, problem.n) if problem.residual else None,
        alpha=0.5 if problem.scaled else 1.0,
        out=_empty(problem.out, (*batch, problem.m, problem.n), device),
        scale_a=scale(problem.scale_a, problem.m, 1),
        scale_b=scale(problem.scale_b, 1, width),
    )
    if problem.static_weights and device.type == "cuda":
        torch.cuda.synchronize(device)  # as was said, nobody is writing b any more
    return inputs


def _empty(spec: Operand, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose last two dimensions are of the class ``spec``."""
    *batch, rows, cols = shape
    if spec.layout == "strided":
        wide = torch.empty(*batch, rows, 2 * cols, dtype=spec.dtype, device=device)
        return wide[..., ::2]
    if spec.layout == "col":
        flipped = Operand(spec.dtype, "row", spec.aligned, spec.wide)
        return _empty(flipped, (*batch, cols, rows), device).mT
    unit = max(1, ALIGNMENT // spec.dtype.itemsize)
    natural = cols % unit == 0 or rows == 1
    if spec.aligned == natural:
        return torch.empty(*batch, rows, cols, dtype=spec.dtype, device=device)
    # Natural strides would be of the other class: pad the leading stride to the next
    # multiple of 16 bytes, or off it; where there is one row only, shift the base.
    pad = -cols % unit if spec.aligned else 1
    wide = torch.empty(*batch, rows, cols + pad, dtype=spec.dtype, device=device)
    return wide[..., pad:] if rows == 1 and not spec.aligned else wide[..., :cols]


def reference(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """The whole expression in fp64, or in IEEE fp32 for large 16-bit problems."""
    precise = problem.a.dtype.itemsize > 2 or problem.flops <= FP64_FLOPS
    dtype = torch.float64 if precise else torch.float32
    with precision(tf32=False):
        z = torch.matmul(inputs.a.to(dtype), inputs.b.to(dtype))
    for factor in (inputs.scale_a, inputs.scale_b):
        if factor is not None:
            z *= factor.to(dtype)
    if problem.scaled:
        z *= inputs.alpha
    if inputs.bias is not None:
        z += inputs.bias.to(dtype)
    z = problem.epilogue.apply(z)
    return z if inputs.residual is None else z + inputs.residual.to(dtype)


def tolerance(problem: Problem) -> float:
    """The largest error accepted; see :data:`TOLERANCE`."""
    limit = TOLERANCE[problem.out.dtype]
    if problem.fp8:
        return max(limit, FP8_TOLERANCE)
    return max(limit, TF32_TOLERANCE) if problem.tf32 else limit


def poison(out: torch.Tensor) -> None:
    """Overwrite with NaN, so that an element that is never written cannot pass."""
    out.fill_(float("nan"))


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """max |out − expected| / (|expected| + rms(expected)); NaN where ``out`` has one that
    ``expected`` has not, zero where there are no elements. The rms keeps elements near zero
    from counting too much, the maximum a single wrong element from being averaged away."""
    if not expected.numel():
        return 0.0
    expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
    scale = expected.square().mean().sqrt()
    if not scale > 0:
        scale = torch.ones_like(scale)
    return float(((out.to(expected.dtype) - expected).abs() / (expected.abs() + scale)).max())
