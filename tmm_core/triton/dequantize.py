"""Writes the values of stored numbers in one pass over memory, for a product by BLAS.

Torch needs a pass for each step: unpacking, converting, subtracting zero points, scaling, rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core.errors import error_text, reraise, warn
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.triton.compile import pointer
from tmm_core.triton.device_functions import decode_function
from tmm_core.triton.launch import Launch
from tmm_core.triton.scales import factors

Tensor = torch.Tensor

#: Values along K of one piece of a row, which is inside one group, and values of a program.
CHUNK, TILE = 128, 8192
#: A group longer than any K.
_WHOLE = 1 << 30


@triton.jit
def dequantize_kernel(
    stored_ptr, scale_ptr, zero_ptr, out_ptr,
    N, K, CHUNKS, stride_z, stride_n, scale_z, scale_n, scale_k, zero_z, zero_n, zero_k,
    DECODE: tl.constexpr, ORIGIN: tl.constexpr, PACK: tl.constexpr, BITS: tl.constexpr,
    OUTER: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Write ``ROWS`` pieces of ``CHUNK`` values along K, of rows of matrix z."""
    z = tl.program_id(1).to(tl.int64)
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, piece = pieces // CHUNKS, pieces % CHUNKS
    inside = row < N
    starts = stored_ptr + z * stride_z + row.to(tl.int64) * stride_n + piece * (CHUNK // PACK)
    js = tl.arange(0, CHUNK // PACK)
    mask = inside[:, None]
    if not EVEN:
        mask = mask & ((piece * (CHUNK // PACK))[:, None] + js[None, :] < K // PACK)
    codes = tl.load(starts[:, None] + js[None, :], mask=mask, other=0.0)
    if PACK == 2:
        low = DECODE(codes & ((1 << BITS) - 1), tl.float32)
        high = DECODE((codes >> BITS) & ((1 << BITS) - 1), tl.float32)
        values = tl.interleave(low, high)
    else:
        values = DECODE(codes, tl.float32)
    k = piece * CHUNK
    if zero_ptr is not None:
        at = z * zero_z + (row // OUTER).to(tl.int64) * zero_n + (k // GROUP) * zero_k
        zero = tl.load(zero_ptr + at, mask=inside, other=0.0)
        values -= (zero.to(tl.float32) - ORIGIN)[:, None]
    if scale_ptr is not None:
        at = z * scale_z + (row // OUTER).to(tl.int64) * scale_n + (k // GROUP) * scale_k
        values *= factors(tl.load(scale_ptr + at, mask=inside, other=0.0))[:, None]
    ks = tl.arange(0, CHUNK)
    ends = out_ptr + (z * N + row) * K + k
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (k[:, None] + ks[None, :] < K)
    tl.store(ends[:, None] + ks[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)


class Dequantize:
    """Converts stored matrices, contiguous along K, to their values.

    Args:
        operand: Dtype and format of the stored numbers, whether rows are aligned, and the dtype and
            block of scales and zero points.
        k: The number of values in a row.
        dtype: The values' dtype.
        device: The device of the stored numbers.
        scaled, zeros: Whether grids of scales and of zero points are applied.

    Raises:
        ValueError: The format has no device function or packs more than two numbers. Or pieces of a
            row of 16 to 128 values do not divide its groups.
        Exception: What Triton raises when it cannot compile or load the kernel.
    """

    def __init__(
        self, operand: Operand, k: int, dtype: torch.dtype, device: torch.device,
        scaled: bool, zeros: bool,
    ) -> None:  # fmt: skip
        build = arguments(operand, k, dtype, scaled, zeros)
        self._dtype = dtype
        self._chunk, self._rows = build["constants"]["CHUNK"], build["constants"]["ROWS"]
        self._pack = build["constants"]["PACK"]
        self.launch = Launch(dequantize_kernel, device=device, **build)

    def __call__(self, stored: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        """Return the values, ``[…, N, K]``, row-major.

        Args:
            stored: ``[N, K/pack]`` or ``[Z, N, K/pack]``, with adjacent elements along K.
            scale, zero: Grids with as many dimensions, of any strides.
        """
        *lead, n, k = stored.shape
        k *= self._pack
        out = torch.empty((*lead, n, k), dtype=self._dtype, device=stored.device)
        if not out.numel():
            return out
        chunks, count = -(-k // self._chunk), lead[0] if lead else 1
        address = self.launch.address
        given = [address(stored)]
        given += [address(t) for t in (scale, zero) if t is not None]
        strides = [stored.stride(0) if lead else 0, stored.stride(-2)]
        for t in (scale, zero):
            if t is not None:
                strides += [t.stride(0) if lead else 0, *t.stride()[-2:]]
        programs = -(-n * chunks // self._rows)
        self.launch.call(programs, count, 1, *given, address(out), n, k, chunks, *strides)
        return out


def arguments(
    operand: Operand, k: int, dtype: torch.dtype, scaled: bool, zeros: bool
) -> dict[str, Any]:
    """Return the types, constants, divisibility and options of the kernel.

    Raises:
        ValueError: As for :class:`Dequantize`.
    """
    form = operand.form
    if form is None or form.pack > 2:
        raise ValueError("the kernel reads formats with one or two numbers in an element")
    outer, group = operand.block if scaled or zeros else (0, 0)
    chunk = min(group, CHUNK) if group else CHUNK
    if chunk not in (16, 32, 64, 128) or (group and group % chunk):
        raise ValueError(f"pieces of 16 to 128 values do not divide groups of {group}")
    types = {"stored_ptr": pointer(operand.dtype)}
    constants: dict[str, Any] = {
        "DECODE": decode_function(form), "ORIGIN": form.origin, "PACK": form.pack,
        "BITS": form.bits, "OUTER": outer or _WHOLE, "GROUP": group or _WHOLE, "CHUNK": chunk,
        "ROWS": TILE // chunk, "EVEN": k % chunk == 0,
    }  # fmt: skip
    strided = []
    for name, given, kind in (
        ("scale", scaled, operand.scale and operand.scale.dtype), ("zero", zeros, operand.zero),
    ):  # fmt: skip
        names = [f"{name}_{dim}" for dim in "znk"]
        if given:
            assert kind is not None
            types[f"{name}_ptr"] = pointer(kind)
            strided += names
        else:
            constants |= dict.fromkeys((f"{name}_ptr", *names), None)
    types |= {"out_ptr": pointer(dtype), "N": "i32", "K": "i32", "CHUNKS": "i32"}
    types |= dict.fromkeys(("stride_z", "stride_n", *strided), "i64")
    divisible = {"out_ptr": 16}
    if operand.aligned:
        step = 16 // operand.dtype.itemsize
        divisible |= {"stored_ptr": 16, "stride_z": step, "stride_n": step}
    if k % 16 == 0:
        divisible["K"] = 16
    return {
        "types": types, "constants": constants, "divisible": divisible, "num_warps": 4,
        "num_stages": 1,
    }  # fmt: skip


#: The text of the first fault, once it was reported.
_reported: list[str] = []


def dequantizer(
    problem: Problem, of: str, dtype: torch.dtype, folds: bool = False
) -> Dequantize | None:
    """Return the pass for operand ``"a"`` or ``"b"`` of a problem, with its grids of scales and
    zero points. None if torch's operators have to convert the operand: if it is not on a GPU or not
    contiguous along K, or has a format that the kernel cannot read. Also None, with one warning, if
    a compiler failed.

    Args:
        folds: Also apply scales of rows and of whole tensors, which are given as grids.
    """
    operand: Operand = getattr(problem, of)
    device, form = problem.device, operand.form
    if device.type != "cuda" or form is None or form.decode is None:
        return None
    if operand.layout != ("row" if of == "a" else "col"):
        return None
    if operand.zero is not None and not operand.grid:
        return None
    if problem.groups is not None and problem.along == "k":
        return None
    floats = operand.dtype.itemsize == 1 and operand.dtype.is_floating_point
    if floats and not (device.nvidia and device.capability >= (8, 9)):
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None  # loading a kernel would end the capture
    zeros = operand.zero is not None
    try:
        scaled = operand.grid or (folds and operand.scale is not None)
        return Dequantize(operand, problem.k, dtype, torch.device(device.type), scaled, zeros)
    except ValueError as error:  # groups or packing that the kernel cannot read
        reraise(error)
        return None
    except Exception as error:
        reraise(error)
        if not _reported:
            _reported.append(error_text(error))
            warn(
                "the kernel that dequantises for BLAS failed; torch's operators do it from now on: "
                f"{error_text(error)}"
            )
        return None
