"""``blas``: torch.mm and related operators, then the epilogue by its torch reference.

It serves everything that torch does: any dtype, any stride, empty sizes. cuBLASLt's fused bias +
relu (``torch._addmm_activation``) is a separate config.

8-bit floats go to ``torch._scaled_mm`` in the layout that it supports (row-major times
column-major, K and N multiples of 16), with its default of promoted accumulation. Other stored
operands are converted to their values (:mod:`tmm_blas.dequantized`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tmm_blas import cublaslt_blocks, grouped_mm
from tmm_blas.dequantized import OptTensor, bind_scaled, rescaled, wide_range
from tmm_blas.dequantized import bind as bind_values
from tmm_core import (
    ANY,
    Bound,
    Config,
    Kernel,
    Launcher,
    Machine,
    Operand,
    Problem,
    Supports,
    Traits,
    UnsupportedProblemError,
)

Tensor = torch.Tensor

#: Shares of peak arithmetic that cuBLAS reaches on an H200, by bytes of an element (720 TFLOPS in
#: 16 bits), and with TF32.
REACH = {1: 0.63, 2: 0.72, 4: 0.88}
TF32_REACH = 0.8
#: µs of a launch by torch.
LAUNCH_US = 4.0

#: Factor on cuBLAS's time if a leading stride is not a multiple of 16 bytes. It then ran at 128–255
#: TFLOPS, and at 720 for the aligned neighbour.
UNALIGNED_PENALTY = 4.0
#: Cost of eager gating, in plain passes over the output. Torch's kernels for strided halves make
#: five slower passes (2048×14336×4096 on an H200: 214 µs in all; a plain pass takes 14).
GATED_PASSES = 15


@dataclass(frozen=True, kw_only=True)
class BlasConfig(Config):
    """One way to compute a product with torch.

    Args:
        fused: Bias and relu inside cuBLASLt.
        halves: Gate and up projection as two products, as in eager code.
        blocks: 8-bit floats with scales of groups and blocks, by cuBLASLt.
    """

    fused: bool = False
    halves: bool = False
    blocks: bool = False


class Blas(Kernel[BlasConfig]):
    name = "blas"
    version = "3"
    # cuBLAS picks kernels (and split-K) by M; torch makes no promise across M.
    traits = Traits(deterministic=True, batch_invariant=False)
    config_type = BlasConfig
    # Listed in full: BLAS declines a new feature until it is declared here.
    supports = Supports(
        devices=ANY,
        operands=ANY,
        formats=ANY,  # dequantised before multiplying
        weights=ANY,
        activations=ANY,
        scales=ANY,
        zeros=True,
        packed=True,
        out=ANY,
        bias=ANY,
        residual=ANY,
        layouts=dict.fromkeys(("a", "b", "out", "residual"), ANY),
        unaligned=ANY,
        wide=True,
        batch=None,
        empty=True,
        alpha=True,
        epilogues=True,
        gated=True,
        interleaved=True,
        unfused=True,
        outputs=ANY,
        reduces=ANY,
        ragged=("m", "n", "k"),
        indexed=True,
        zeroed=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        dtype = problem.value
        if problem.device.type == "cuda" and not (dtype.is_floating_point or dtype.is_complex):
            yield f"torch has no {dtype} matmul on CUDA"
        if problem.groups is not None:
            yield from grouped_mm.reasons_against(problem)

    def configs(self, problem: Problem) -> Iterable[BlasConfig]:
        yield BlasConfig()
        if _fusable(problem):
            yield BlasConfig(fused=True)
        if _divisible(problem):
            yield BlasConfig(halves=True)
        if cublaslt_blocks.serves(problem):
            yield BlasConfig(blocks=True)

    def default_config(self, problem: Problem) -> BlasConfig:
        return BlasConfig()

    def bind(self, problem: Problem, config: BlasConfig) -> Launcher | Bound:
        if problem.groups is not None:
            if reasons := self.reasons_against(problem):
                raise UnsupportedProblemError(
                    f"no kernel can serve {problem}; {self.name}: {'; '.join(reasons)}"
                )
            return grouped_mm.bind(problem)
        if config.fused and not _fusable(problem):
            raise ValueError(f"cuBLASLt fuses bias + relu into plain 2-D products, not {problem}")
        if config.halves and not _divisible(problem):
            raise ValueError(f"halves need a gated 2-D product of plain dtypes, not {problem}")
        if config.blocks and not cublaslt_blocks.serves(problem):
            raise ValueError(f"blocks need e4m3 in groups of 128 along K, not {problem}")
        if config.fused:
            return _bind_biased(torch._addmm_activation, problem.scaled)  # bias and relu
        if problem.epilogue.outputs:
            return _bind_outputs(problem)
        if config.halves:
            return _bind_halves(problem)
        if not problem.stored:
            launcher = _bind_by(_operator(problem), problem)
            return Bound(launcher, folded=functools.partial(_bind_folded, problem))
        if _takes_8_bit(problem):
            return _bind_scaled_mm(problem)
        if config.blocks:
            return _bind_blocks(problem)
        return _bind_dequantized(problem)

    def estimate_us(self, problem: Problem, config: BlasConfig) -> float | None:
        """Roofline of the product, plus a pass over the output for each eager step."""
        if not problem.device.sm_count:
            return None
        machine = Machine.of(problem.device)
        reach = TF32_REACH if problem.tf32 else REACH.get(problem.a.dtype.itemsize, 1.0)
        rate = machine.flops(problem) * reach
        if not (problem.a.aligned and problem.b.aligned):
            rate /= UNALIGNED_PENALTY
        widened = 0
        if problem.stored and not (_takes_8_bit(problem) or config.blocks):
            # Values are written in 16 bits and read again.
            rate = machine.tensor * REACH[2]
            widened = 4 * _stored_values(problem)
        moving = machine.moving_us(problem.bytes + widened)
        if problem.groups is not None:
            if problem.native:
                rate *= grouped_mm.REACH_8_BIT
            moving = max(moving, problem.bytes / (grouped_mm.READS * machine.sms))
        product = max(problem.flops / (rate * machine.sms), moving)
        result = problem.batch * problem.m * problem.n * problem.out.dtype.itemsize
        epilogue = GATED_PASSES if problem.gated else 2 * (not problem.epilogue.is_identity)
        steps = epilogue + 3 * (problem.residual is not None)
        # An elementwise pass over an output that fits in L2 runs at about three times HBM speed.
        cached = 3.0 if result < problem.device.l2 / 2 else 1.0
        passes = steps * result / (machine.memory * cached)
        return product + passes + LAUNCH_US * (1 + (steps > 0) + config.halves)


def _operator(problem: Problem) -> Callable[..., Tensor]:
    return torch.mm if problem.batch == 1 else torch.bmm


def _bind_by(
    mm: Callable[..., Tensor], problem: Problem, with_out: Launcher | None = None
) -> Launcher:
    """The launcher of the whole expression whose product is ``mm``, by torch's own operators and
    with its roundings. ``with_out`` serves calls with ``out``, which some products do not take."""
    out_dtype = problem.out.dtype
    same = out_dtype == problem.a.dtype
    whole = problem.scaled and not (out_dtype.is_floating_point or out_dtype.is_complex)

    if problem.plain and same:

        def plain(
            a: Tensor, b: Tensor, bias: OptTensor, residual: OptTensor, alpha: float, out: OptTensor
        ) -> Tensor:
            if out is None:
                return mm(a, b)
            return with_out(a, b, bias, residual, alpha, out) if with_out else mm(a, b, out=out)

        return plain

    add_bias = _adds_bias(problem)
    biased = _bind_biased(torch.addmm, problem.scaled)
    if add_bias and problem.epilogue.is_identity and problem.residual is None:
        # The call of a linear layer: the general path would double its time on the host.
        return biased

    def general(
        a: Tensor, b: Tensor, bias: OptTensor, residual: OptTensor, alpha: float, out: OptTensor
    ) -> Tensor:
        if out is not None and with_out:
            return with_out(a, b, bias, residual, alpha, out)
        if whole:
            alpha = whole_number(alpha, a)
        if add_bias:
            z = biased(a, b, bias, None, alpha, None)
            return finish(problem, z, None, residual, 1.0, out)
        z = mm(a, b) if same else _wide(a, b, out_dtype, mm)
        return finish(problem, z, bias, residual, alpha, out)

    activation = problem.epilogue.activation
    if not same or activation is None or problem.residual is not None:
        return general
    if problem.scaled or not (add_bias or problem.bias is None):
        return general

    def activated(
        a: Tensor, b: Tensor, bias: OptTensor, residual: OptTensor, alpha: float, out: OptTensor
    ) -> Tensor:
        if out is not None:
            return general(a, b, bias, residual, alpha, out)
        y = activation(torch.addmm(bias, a, b) if add_bias else mm(a, b))  # type: ignore[arg-type]
        return y if y.dtype is out_dtype else y.to(out_dtype)

    # On the host, the call of a layer then takes no longer than a small product.
    return activated


def _adds_bias(problem: Problem) -> bool:
    """Whether the product's operator also adds the bias. The operator also checks the range of
    alpha for integers, which the product alone does not."""
    if not (problem.a.dtype.is_floating_point or problem.a.dtype.is_complex):
        return False
    return problem.bias == problem.a.dtype == problem.out.dtype and problem.batch == 1


def _bind_folded(
    problem: Problem, fold: Any, a: Tensor, b: Tensor, residual: OptTensor, by_views: Launcher
) -> Launcher | None:
    """The launcher for N-D operands, if torch.matmul folds them into the same matrices: in C++,
    1.3 µs faster than views. None otherwise, and with a bias: F.linear, which takes b transposed
    and 3-D rows, is not faster than views."""
    if _adds_bias(problem) or problem.out.dtype != problem.a.dtype:
        return None
    if not _torch_folds(problem, a, b):
        return None
    if residual is not None and residual.shape != fold.shape:
        return None
    return _bind_by(torch.matmul, problem, by_views)


def _torch_folds(problem: Problem, a: Tensor, b: Tensor) -> bool:
    """Whether torch.matmul computes one product of the rows of ``a`` and the matrix ``b``, by the
    stride conditions of every release, or one batch of products."""
    sizes, strides = a.shape, a.stride()
    if a.dim() < 3 or 0 in sizes or 0 in b.shape:
        return False
    if b.dim() > 2:
        return problem.batch > 1
    outer = range(a.dim() - 2)
    return b.dim() == 2 and all(strides[i] == strides[i + 1] * sizes[i + 1] for i in outer)


def whole_number(alpha: float, a: Tensor) -> int:
    """Return the number by which torch.addmm multiplies integers of a's dtype.

    Raises:
        RuntimeError: The dtype does not hold it.
    """
    if a.dtype is torch.bool:
        return 1  # torch multiplies only empty matrices of bool: all of the result is False
    one = a.new_ones(1, 1)
    return int(torch.addmm(a.new_zeros(1), one, one, alpha=alpha))


def finish(
    problem: Problem, z: Tensor, bias: OptTensor, residual: OptTensor, alpha: float, out: OptTensor
) -> Tensor:
    """The result for a product ``z``: alpha, bias, epilogue and residual, by torch's own operators
    and with its roundings."""
    z = z if alpha == 1.0 else z * alpha
    return in_out_dtype(problem, problem.epilogue.expression(z, bias, residual), out)


def in_out_dtype(problem: Problem, y: Tensor, out: OptTensor) -> Tensor:
    """The result in the problem's dtype, or in ``out``: torch's operators may have promoted it."""
    return y.to(problem.out.dtype) if out is None else out.copy_(y)


def _divisible(problem: Problem) -> bool:
    """Whether the gate and up projections can be two products."""
    if not problem.gated or problem.epilogue.interleaved or problem.epilogue.outputs:
        return False
    plain = not problem.stored and problem.groups is None and problem.batch == 1
    same = problem.out.dtype == problem.a.dtype and problem.bias in (None, problem.a.dtype)
    return plain and same and not problem.scaled


def _bind_halves(problem: Problem) -> Launcher:
    def run(
        a: Tensor, b: Tensor, bias: OptTensor, residual: OptTensor, alpha: float, out: OptTensor
    ) -> Tensor:
        halves = b.chunk(2, dim=-1)
        if bias is None:
            products = [torch.mm(a, half) for half in halves]
        else:
            both = zip(bias.chunk(2), halves, strict=True)
            products = [torch.addmm(own, a, half) for own, half in both]
        y = problem.epilogue.apply_to(*products)
        return in_out_dtype(problem, y if residual is None else y + residual, out)

    return run


def _bind_outputs(problem: Problem) -> Launcher:
    """Compute the result without auxiliary outputs, and these from the result, by torch's own
    operators."""
    epilogue = problem.epilogue
    bare: Any = Blas().bind(replace(problem, epilogue=epilogue.bare), BlasConfig())

    def run(*args: Any, outputs: tuple[Tensor, ...] = (), **scales: Any) -> Tensor:
        y: Tensor = bare(*args, **scales)
        for output, value in zip(outputs, epilogue.auxiliary(y), strict=True):
            output.copy_(value)
        return y

    return run


def _wide(a: Tensor, b: Tensor, dtype: torch.dtype, mm: Callable[..., Tensor]) -> Tensor:
    """The product with another output dtype, at the accumulator's precision."""
    half = a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    if a.is_cuda and dtype == torch.float32 and half:
        return mm(a, b, out_dtype=dtype)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), dtype)
    return mm(a.to(wide), b.to(wide))


def _takes_8_bit(problem: Problem) -> bool:
    """Whether ``torch._scaled_mm`` multiplies these operands: the conditions of cuBLASLt."""
    wide = torch.float8_e5m2
    return (
        cublaslt_blocks.takes_layout(problem, 16)
        and not (problem.a.grid or problem.b.grid)
        and problem.a.dtype.is_floating_point
        and hasattr(torch, "_scaled_mm")
        and problem.device.capability >= (8, 9)
        and not problem.a.dtype == problem.b.dtype == wide
    )


def _stored_values(problem: Problem) -> int:
    """The number of values that are stored in a format, of both operands."""
    packs = [(problem.a, problem.a_shape), (problem.b, problem.b_shape)]
    return sum(math.prod(shape) for spec, shape in packs if spec.form is not None)


def _bind_values(problem: Problem) -> Launcher | None:
    """The product of values already multiplied by their scales; None if scales have to multiply an
    fp32 result. On a GPU an fp32 result moves 10 bytes per element instead of 2, by estimate a
    third of the product's time at K = 4096."""
    value = problem.value
    if problem.device.type != "cuda" or problem.out.dtype != value or value.itemsize > 2:
        return None
    grids = [each.scale for each in (problem.a, problem.b) if each.grid]
    if any(wide_range(problem, grid.dtype) for grid in grids if grid is not None):
        return None
    of_a, of_b = bind_scaled(problem, "a"), bind_scaled(problem, "b")
    if of_a is None or of_b is None:
        return None
    changes: dict[str, Any] = {
        name: Operand(value, spec.layout)
        for name, spec in (("a", problem.a), ("b", problem.b))
        if spec.form is not None
    }
    multiply = _bind_by(_operator(problem), replace(problem, **changes))

    def run(a: Tensor, b: Tensor, *rest: Any, **parts: Any) -> Tensor:
        a = of_a(a, parts.get("a_scale"), parts.get("a_zero"))
        b = of_b(b, parts.get("b_scale"), parts.get("b_zero"))
        return multiply(a, b, *rest)

    return run


def _bind_dequantized(problem: Problem) -> Launcher:
    """The product of the values, times the scales of rows."""
    if (direct := _bind_values(problem)) is not None:
        return direct
    mm = _operator(problem)
    rows = [f"{name}_scale" for name in ("a", "b") if not getattr(problem, name).grid]
    of_a, of_b = bind_values(problem, "a"), bind_values(problem, "b")

    def run(a: Tensor, b: Tensor, *rest: Any, **parts: Any) -> Tensor:
        a = of_a(a, parts.get("a_scale"), parts.get("a_zero"))
        b = of_b(b, parts.get("b_scale"), parts.get("b_zero"))
        z = _wide(a, b, torch.float32, mm)
        for name in rows:
            z = rescaled(z, parts.get(name))
        return finish(problem, z, *rest)

    return run


def _bind_blocks(problem: Problem) -> Launcher:
    product = cublaslt_blocks.bind(problem)

    def run(a: Tensor, b: Tensor, *rest: Any, **parts: Any) -> Tensor:
        return finish(problem, product(a, b, parts["a_scale"], parts["b_scale"]), *rest)

    return run


def _bind_scaled_mm(problem: Problem) -> Launcher:
    shape_a, shape_b = (problem.m, 1), (1, problem.width)
    by_row = any(t.scale is not None and t.scale.kind == "row" for t in (problem.a, problem.b))
    dtype = problem.out.dtype if problem.out.dtype != torch.float64 else torch.float32
    # With row scales torch requires a bf16 output. It adds a bias only of the output's dtype, if
    # that has 16 bits.
    after = by_row and dtype != torch.bfloat16
    add_bias = not after and problem.bias == dtype != torch.float32
    direct = not after and problem.out.layout == "row" and problem.out.dtype == dtype
    direct = direct and problem.epilogue.is_identity and problem.residual is None
    direct = direct and (add_bias or problem.bias is None)
    one = torch.ones((), dtype=torch.float32, device="cuda")
    if not torch.cuda.is_current_stream_capturing():
        # Other streams will read `one`.
        torch.cuda.current_stream().synchronize()

    def run(
        a: Tensor,
        b: Tensor,
        bias: OptTensor,
        residual: OptTensor,
        alpha: float,
        out: OptTensor,
        a_scale: OptTensor = None,
        b_scale: OptTensor = None,
    ) -> Tensor:
        if a.shape[0] == 1:
            # A single row's stride is arbitrary, but torch checks it.
            a = a.as_strided(a.shape, (a.shape[1], 1))
        if after:
            z = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32)
            for scale in (a_scale, b_scale):
                z = rescaled(z, scale)
            return finish(problem, z, bias, residual, alpha, out)
        a_scale, b_scale = one if a_scale is None else a_scale, one if b_scale is None else b_scale
        if alpha != 1.0:
            a_scale = a_scale * alpha
        if by_row:
            a_scale = a_scale.expand(shape_a).contiguous()
            b_scale = b_scale.expand(shape_b).contiguous()
        added = bias if add_bias else None
        if direct and out is not None and out.is_contiguous():
            torch._scaled_mm(a, b, a_scale, b_scale, added, out_dtype=dtype, out=out)
            return out
        z = torch._scaled_mm(a, b, a_scale, b_scale, added, out_dtype=dtype)
        return finish(problem, z, None if add_bias else bias, residual, 1.0, out)

    return run


def _fusable(problem: Problem) -> bool:
    return (
        hasattr(torch, "_addmm_activation")
        and problem.device.type == "cuda"
        and problem.epilogue.key == "relu"
        and problem.bias == problem.a.dtype == problem.out.dtype
        and problem.a.dtype.is_floating_point
        and problem.residual is None
        and not problem.scaled
        and problem.batch == 1
        and problem.groups is None
    )


def _bind_biased(addmm: Callable[..., Tensor], scaled: bool) -> Launcher:
    """The whole expression by an operator with ``addmm``'s signature."""

    def biased(
        a: Tensor, b: Tensor, bias: OptTensor, residual: OptTensor, alpha: float, out: OptTensor
    ) -> Tensor:
        assert bias is not None
        if out is not None:
            return addmm(bias, a, b, alpha=alpha, out=out)
        # Reading an alpha of one takes torch 0.5 µs.
        return addmm(bias, a, b, alpha=alpha) if scaled else addmm(bias, a, b)

    return biased
