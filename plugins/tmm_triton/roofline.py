"""Estimates the time of a tiled matmul from the shape, the tile and a few machine numbers.

It only ranks configs and replaces missing measurements; a measurement always takes precedence.
"""

from __future__ import annotations

import torch

from tmm_core import Problem

#: Dense bf16 tensor-core TFLOPS of one SM at boost clock, from NVIDIA's data sheets: A100
#: 312/108, RTX 3090 71/82, RTX 4090 165/128, H100 SXM 989/132, B200 2250/148, RTX 5090
#: 210/170.
_TENSOR_TFLOPS = {
    (8, 0): 2.9, (8, 6): 0.87, (8, 9): 1.3, (9, 0): 7.5, (10, 0): 15.2, (12, 0): 1.2,
}  # fmt: skip
#: fp32 FMA TFLOPS of one SM: 128 lanes × 2 × 1.7 GHz (64 lanes on 8.0, at 1.4).
_FMA_TFLOPS = 0.43
#: Memory bandwidth in TB/s: measured by a copy for the H200, as specified for the others.
_BANDWIDTH = {"H200": 4.27, "H100": 3.35, "A100": 1.9, "B200": 7.7}
#: The same for a GPU that is not listed, per SM.
_UNKNOWN_TFLOPS, _UNKNOWN_BANDWIDTH = 1.0, 0.008

#: Minimum BM·BN / (BM + BN) of a tile that keeps the tensor cores busy: that of 128×128, measured
#: on an H200. Below it, time is proportional to the bytes that each SM loads.
_FULL_INTENSITY = 128 * 128 / (128 + 128)
#: Factor on the reach for each operand that has to pass through registers: 4096³ with one odd
#: leading stride took 2.3 times as long on an H200, with two 4.7 times.
_UNALIGNED = 0.45
#: µs of latency of loading a tile from memory when every SM does: 0.6–0.8 on an H200.
_LATENCY = 0.7
#: µs of an empty kernel, its launch and drain: 3.3 on an H200. And µs until memory reaches full
#: speed: a bare read of 34 MB takes 14 there, of 235 MB 64.
EMPTY_US = 3.3
RAMP_US = 2.5
#: Reads without the ``evict_first`` hint first evict this many bytes that have to be written back,
#: and reach this share of the bandwidth: cuBLAS's 19 µs for 34 MB, 43 for 117.
DISPLACED, DISPLACING_SHARE = 16e6, 0.9
#: Number of concurrent programs per SM above which more of them hide no more latency.
_MOST_RESIDENT = 4


def bandwidth_tbs(problem: Problem) -> float:
    """Memory bandwidth of the problem's GPU in TB/s."""
    device = problem.device
    listed = (tbs for name, tbs in _BANDWIDTH.items() if name in device.name)
    return next(listed, (device.sm_count or 1) * _UNKNOWN_BANDWIDTH)


def estimate_us(
    problem: Problem,
    *,
    BLOCK_M: int,
    BLOCK_N: int,
    BLOCK_K: int,
    num_stages: int,
    shared_memory: int,
    splits: int = 1,
    reach: float = 1.0,
) -> float:
    """Expected µs: an empty launch plus the longest of :func:`times_us`."""
    times = times_us(
        problem,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_stages=num_stages,
        shared_memory=shared_memory,
        splits=splits,
        reach=reach,
    )
    return EMPTY_US + max(times.values())


def times_us(
    problem: Problem,
    *,
    BLOCK_M: int,
    BLOCK_N: int,
    BLOCK_K: int,
    num_stages: int,
    shared_memory: int,
    splits: int = 1,
    reach: float = 1.0,
) -> dict[str, float]:
    """The times of three components alone, after wave quantisation.

    Arithmetic at ``reach`` of peak (slower if the tile's intensity is too low), memory latency
    along K with ``num_stages - 1`` tiles in flight (one, if an operand passes through registers),
    and moving every byte once, with loads that may be hinted if there is one stage. Split-K's
    partial sums count as traffic, written and read.
    """
    device = problem.device
    sms = device.sm_count or 1
    bf16 = _TENSOR_TFLOPS.get(device.capability, _UNKNOWN_TFLOPS)
    if problem.fp8:
        peak = 2 * bf16
    elif problem.a.dtype is torch.float32:
        peak = bf16 / 2 if problem.tf32 else min(_FMA_TFLOPS, bf16)
    else:
        peak = bf16
    bandwidth = bandwidth_tbs(problem)
    unaligned = 2 - problem.a.aligned - problem.b.aligned
    reach *= _UNALIGNED**unaligned
    ahead = 1 if unaligned else max(num_stages - 1, 1)

    width = BLOCK_N * (2 if problem.gated else 1)
    intensity = BLOCK_M * width / (BLOCK_M + width)
    programs = problem.batch * -(-problem.m // BLOCK_M) * -(-problem.n // BLOCK_N) * splits
    steps = -(-problem.k // (BLOCK_K * splits))

    flops = 2 * BLOCK_M * width * BLOCK_K * steps
    busy = -(-programs // sms) * flops / (peak * reach * min(1, intensity / _FULL_INTENSITY) * 1e6)
    resident = max(1, min(_MOST_RESIDENT, device.shared_memory // max(shared_memory, 1)))
    waiting = -(-programs // (sms * resident)) * (steps + 1) * _LATENCY / ahead
    partials = 8 * splits * problem.batch * problem.m * problem.n if splits > 1 else 0
    moved: float = problem.bytes + partials
    if num_stages > 1:
        moved = (moved + min(moved, DISPLACED)) / DISPLACING_SHARE
    moving = moved / (bandwidth * 1e6) + RAMP_US
    return {"tensor cores": busy, "latency": waiting, "memory": moving}
