"""``example.gemv``: one to four rows times a matrix, without tensor cores.

With so few rows, reading ``b`` bounds the time, and a tensor core's tile of 16 rows is mostly
padding. One program takes BLOCK_N columns and walks all of K. It accumulates a block
[ROWS, BLOCK_K, BLOCK_N] of products in registers, so that threads do not communicate before the
end, where one reduction over BLOCK_K gives the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tmm_core import ANY, Config, Kernel, Launcher, Operand, Problem, Supports, Traits
from tmm_core.triton import Launch, device_function, pointer

Tensor = torch.Tensor

MAX_ROWS = 4
#: fp32 products that a thread may hold in its 255 registers.
MAX_PER_THREAD = 64
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: (BLOCK_N, BLOCK_K, num_warps), with the longer side along b's contiguous dimension.
ALONG_K = ((16, 256, 8), (8, 256, 4), (16, 128, 4), (4, 512, 4), (8, 512, 8))
ALONG_N = ((64, 32, 4), (128, 16, 4), (32, 64, 4), (64, 64, 8), (128, 32, 8))


@triton.jit
def gemv_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha,
    EPILOGUE: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1)
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a_ptr += batch * stride_az
    b_ptr += batch * stride_bz
    out_ptr += batch * stride_oz

    products = tl.zeros((ROWS, BLOCK_K, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + rows * stride_am + ks[None, :] * stride_ak
        a = tl.load(a_ptrs, mask=(rows < M) & (ks[None, :] < K), other=0.0)
        b_ptrs = b_ptr + ks[:, None] * stride_bk + cols * stride_bn
        b = tl.load(b_ptrs, mask=(ks[:, None] < K) & (cols < N), other=0.0)
        products += a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
    z = tl.sum(products, axis=1)

    inside = (rows < M) & (cols < N)
    if alpha is not None:
        z *= alpha
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols * stride_bias, mask=cols < N, other=0.0).to(tl.float32)
    z = EPILOGUE(z)
    if residual_ptr is not None:
        residual_ptr += batch * stride_rz
        residual_ptrs = residual_ptr + rows * stride_rm + cols * stride_rn
        z += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + rows * stride_om + cols * stride_on
    tl.store(out_ptrs, z.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class GemvConfig(Config):
    """Columns of one program, its step along K, and its warps."""

    BLOCK_N: int
    BLOCK_K: int
    num_warps: int

    def __post_init__(self) -> None:
        for name, most in (("BLOCK_N", 1024), ("BLOCK_K", 1024), ("num_warps", 16)):
            value = getattr(self, name)
            if not (1 <= value <= most and value & (value - 1) == 0):
                raise ValueError(f"{name} must be a power of two up to {most}, got {value}")


class Gemv(Kernel[GemvConfig]):
    name = "example.gemv"
    # Not batch-invariant: the number of rows affects the layout of the products, and so the
    # order in which they are summed.
    traits = Traits(deterministic=True, batch_invariant=False)
    config_type = GemvConfig

    supports = Supports(
        devices=("cuda", "interpreter"),
        capability=(8, 0),
        operands=DTYPES,
        out=DTYPES,
        bias=DTYPES,
        residual=DTYPES,
        layouts=dict.fromkeys(("a", "b", "out", "residual"), ANY),
        unaligned=ANY,
        wide=True,
        batch=65535,
        alpha=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        if problem.m > MAX_ROWS:
            yield f"for 1 to {MAX_ROWS} rows, these are {problem.m}"

    def configs(self, problem: Problem) -> Iterable[GemvConfig]:
        rows = triton.next_power_of_2(problem.m)
        for block_n, block_k, warps in ALONG_K if problem.b.layout == "col" else ALONG_N:
            if rows * block_n * block_k <= MAX_PER_THREAD * 32 * warps:
                yield GemvConfig(BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps)

    def default_config(self, problem: Problem) -> GemvConfig:
        return next(iter(self.configs(problem)))

    def bind(self, problem: Problem, config: GemvConfig) -> Launcher:
        types, constants, divisible = _arguments(problem)
        launch = Launch(
            gemv_kernel,
            types,
            constants | {"BLOCK_N": config.BLOCK_N, "BLOCK_K": config.BLOCK_K},
            device=torch.device(problem.device.type),
            divisible=divisible,
            num_warps=config.num_warps,
        )
        names = list(types)
        grid = (triton.cdiv(problem.n, config.BLOCK_N), problem.batch, 1)
        shape = (problem.batch, problem.m, problem.n)[problem.batch == 1 :]
        n, k, dtype = problem.n, problem.k, problem.out.dtype

        def run(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            alpha: float,
            out: Tensor | None,
        ) -> Tensor:
            if out is None:
                out = a.new_empty(shape, dtype=dtype)
            values: dict[str, object] = {
                "a_ptr": a,
                "b_ptr": b,
                "out_ptr": out,
                "N": n,
                "K": k,
                "alpha": alpha,
            }
            values |= _strides(("stride_az", "stride_am", "stride_ak"), a)
            values |= _strides(("stride_bz", "stride_bk", "stride_bn"), b)
            values |= _strides(("stride_oz", "stride_om", "stride_on"), out)
            if bias is not None:
                values |= {"bias_ptr": bias, "stride_bias": bias.stride(0)}
            if residual is not None:
                values["residual_ptr"] = residual
                values |= _strides(("stride_rz", "stride_rm", "stride_rn"), residual)
            launch(grid, *[values[name] for name in names])
            return out

        return run


def _strides(names: tuple[str, str, str], t: Tensor) -> dict[str, int]:
    """The strides of a matrix, or of a batch of matrices."""
    return dict(zip(names[3 - t.dim() :], t.stride(), strict=True))


def _arguments(problem: Problem) -> tuple[dict[str, str], dict[str, object], dict[str, int]]:
    """Types of the run-time arguments in order, the constants, and divisors of arguments.

    Strides are 64 bits wide and read from the tensors at every launch; those known to be one
    or unused are constants.
    """
    types = {"N": "i32", "K": "i32"}
    constants: dict[str, object] = {
        "EPILOGUE": device_function(problem.epilogue),
        "M": problem.m,
        "ROWS": triton.next_power_of_2(problem.m),
    }
    # The width of masked loads is limited by the known divisor of the mask's bound.
    sizes = {"N": problem.n, "K": problem.k}
    divisible = {name: 16 for name, size in sizes.items() if size % 16 == 0}
    for name, down, across, matrix in _matrices(problem):
        batch, *strides = (f"stride_{name[0]}{dim}" for dim in ("z", down, across))
        fixed = {batch: 0} if problem.batch == 1 else {}
        if matrix is None:
            constants |= {f"{name}_ptr": None, batch: 0, **dict.fromkeys(strides, 0)}
            continue
        if matrix.layout != "strided":
            fixed[strides[matrix.layout == "row"]] = 1
        constants |= fixed
        free = {batch, *strides} - set(fixed)
        types |= {f"{name}_ptr": pointer(matrix.dtype), **dict.fromkeys(free, "i64")}
        if matrix.aligned:
            divisible[f"{name}_ptr"] = 16
            divisible |= dict.fromkeys(free, 16 // matrix.dtype.itemsize)
    if problem.bias is None:
        constants |= {"bias_ptr": None, "stride_bias": 0}
    else:
        types |= {"bias_ptr": pointer(problem.bias), "stride_bias": "i64"}
    if problem.scaled:
        types["alpha"] = "fp32"
    else:
        constants["alpha"] = None
    in_order = {name: types[name] for name in gemv_kernel.arg_names if name in types}
    return in_order, constants, divisible


def _matrices(problem: Problem) -> Iterator[tuple[str, str, str, Operand | None]]:
    yield "a", "m", "k", problem.a
    yield "b", "k", "n", problem.b
    yield "residual", "m", "n", problem.residual
    yield "out", "m", "n", problem.out
