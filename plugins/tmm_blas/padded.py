"""``blas.padded``: copy what is misaligned to 16-byte rows, then BLAS.

cuBLAS falls to a quarter of its rate when a leading stride is off 16 bytes (HBM-bound
copies are O(n²) against the product's O(n³)). Only the offending operand is copied, with zeros
up to the next multiple of 16 bytes of K and N: aligned strides alone left it as slow at odd sizes
(4097³ on an H200: 1371 µs, 343 with the zeros, 1029 as it is).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tmm_blas.blas import BYTES_PER_SM_US, estimate_us, finish
from tmm_core import ANY, Config, Kernel, Launcher, Operand, Problem, Supports, Traits

Tensor = torch.Tensor


class PaddedBlas(Kernel[Config]):
    name = "blas.padded"
    # cuBLAS picks kernels by M; the copies are torch's allocations, which graphs can hold.
    traits = Traits(deterministic=True, batch_invariant=False, needs_workspace=True)

    supports = Supports(
        devices=("cuda", "hip"),
        operands=(torch.float16, torch.bfloat16),
        out=(torch.float16, torch.bfloat16),
        bias=ANY,
        residual=ANY,
        layouts=dict.fromkeys(("a", "b", "out", "residual"), ANY),
        unaligned=ANY,
        wide=True,
        alpha=True,
        gated=True,
        unfused=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        if problem.a.aligned and problem.b.aligned and problem.out.aligned:
            yield "everything is aligned already"
        if problem.out.dtype != problem.a.dtype:
            yield "out_dtype differs from the operands'"

    def configs(self, problem: Problem) -> Iterable[Config]:
        yield Config()

    def default_config(self, problem: Problem) -> Config:
        return Config()

    def bind(self, problem: Problem, config: Config) -> Launcher:
        unit = 16 // problem.a.dtype.itemsize
        width = problem.n * (2 if problem.gated else 1)
        pad_a, pad_b = not problem.a.aligned, not problem.b.aligned
        k, n = -problem.k % unit, -width % unit

        def run(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            alpha: float,
            out: Tensor | None,
        ) -> Tensor:
            a = _extend(a, 0, k, unit) if pad_a or k else a
            b = _extend(b, k, n, unit) if pad_b or k or n else b
            wide = torch.mm(a, b)[:, :width]
            result = finish(problem, wide, bias, residual, alpha, out)
            return result.contiguous() if out is None else result

        return run

    def estimate_us(self, problem: Problem, config: Config) -> float | None:
        base = estimate_us(problem, aligned=True)
        if base is None:
            return None
        size = problem.a.dtype.itemsize * 2
        moved = 0
        if not problem.a.aligned:
            moved += problem.m * problem.k * size
        if not problem.b.aligned:
            moved += problem.k * problem.n * size
        if not problem.out.aligned:
            moved += problem.m * problem.n * size
        return base + moved / (BYTES_PER_SM_US * problem.device.sm_count) + 8.0

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        elements = 0
        if not problem.a.aligned:
            elements += problem.m * problem.k
        if not problem.b.aligned:
            elements += problem.k * problem.n
        return elements * problem.a.dtype.itemsize


def _extend(t: Tensor, more_rows: int, more_cols: int, unit: int) -> Tensor:
    """``t`` with zero rows and columns appended, in its own memory order."""
    if Operand.of(t).layout == "col":
        return _extend(t.t(), more_cols, more_rows, unit).t()
    rows, cols = t.shape
    wide = t.new_zeros((rows + more_rows, cols + more_cols))
    wide[:rows, :cols] = t
    return wide
