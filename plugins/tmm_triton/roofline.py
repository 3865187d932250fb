"""Estimates the time of a tiled matmul from the shape, the tile and the GPU's rates."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tmm_core import Machine, Problem
from tmm_triton.operands import TileConfig

#: Minimum BM·BN / (BM + BN) of a tile that keeps the tensor cores busy, measured on an H200: a
#: 128×128 tile reaches it. Below it, time is proportional to the bytes that each SM loads.
_FULL_INTENSITY = 128 * 128 / (128 + 128)
#: Factor on the reach for each operand that has to pass through registers. 4096³ with one odd
#: leading stride took 2.3 times as long on an H200, with two 4.7 times.
_UNALIGNED = 0.45
#: µs in which an SM scales one step's sum of a tile's element and adds it to other steps' sums.
#: On an H200 6e-5 to 2.4e-5 explain the times of tiles of 64×64 to 128×128 with blocks of 128
#: (``benchmarks/results/h200/scaled_steps.txt``).
_SCALED_STEP_US = 3.5e-5
#: µs of latency of loading a tile from memory when every SM does: 0.6–0.8 on an H200.
_LATENCY = 0.7
#: Number of concurrent programs per SM above which more of them hide no more latency.
_MOST_RESIDENT = 4

#: 32-bit registers, threads and blocks of an SM, and registers per thread for anything but operands
#: and sums.
_REGISTERS, _THREADS, _BLOCKS = 65536, 2048, 32
_OVERHEAD = 24


def times_us(
    problem: Problem, config: TileConfig, *, splits: int, reach: float
) -> dict[str, float]:
    """The µs of three components alone, after wave quantisation. A kernel is expected to take the
    longest of them and an empty launch.

    - Arithmetic at ``reach`` of peak, slower if the tile's intensity is too low, and what follows
      each step if scales differ along K.
    - Memory latency along K with ``num_stages - 1`` tiles in flight, or one if an operand passes
      through registers.
    - Moving every byte once. Split-K's partial sums count as traffic, written and read.
    """
    machine = Machine.of(problem.device)
    sms = machine.sms
    unaligned = 2 - problem.a.aligned - problem.b.aligned
    reach *= _UNALIGNED**unaligned
    ahead = 1 if unaligned else max(config.num_stages - 1, 1)

    high, width = config.BLOCK_M, config.width(problem)
    intensity = high * width / (high + width)
    programs = problem.batch * config.tiles(problem) * splits
    steps = -(-problem.k // (config.BLOCK_K * splits))

    flops = 2 * high * width * config.BLOCK_K * steps
    rate = machine.flops(problem) * reach * min(1, intensity / _FULL_INTENSITY)
    waves = -(-programs // sms)
    busy = waves * flops / rate
    if problem.a.grid or problem.b.grid:
        busy += waves * steps * high * width * _SCALED_STEP_US
    resident = problem.device.shared_memory // max(config.shared_memory(problem), 1)
    resident = max(1, min(_MOST_RESIDENT, resident))
    waiting = -(-programs // (sms * resident)) * (steps + 1) * _LATENCY / ahead
    partials = 8 * splits * problem.batch * problem.m * problem.n if splits > 1 else 0
    moving = machine.moving_us(problem.bytes + partials)
    return {"tensor cores": busy, "latency": waiting, "memory": moving}


def overlapping(times: Iterable[float], order: float) -> float:
    """Return the duration of works that overlap in part, the norm of their times: their sum if
    ``order`` is 1, about the longest if it is large."""
    return float(sum(each**order for each in times) ** (1 / order))


def waves_and_idle(problem: Problem, config: TileConfig, programs: int) -> tuple[int, float]:
    """How often SMs get new programs, and the time in which the last programs leave SMs idle,
    relative to the rest."""
    sms = Machine.of(problem.device).sms
    waves = programs / (sms * resident(problem, config))
    load = waves if waves > 1 else programs / sms
    return math.ceil(waves), math.ceil(load) / load - 1


def register_limit(problem: Problem, config: TileConfig) -> int:
    """The most registers of a thread with which an SM holds as many programs as are expected.
    ptxas would use more of them to move loads, or spill to use fewer."""
    threads = 32 * config.num_warps
    return min(255, _REGISTERS // (threads * resident(problem, config)) // 8 * 8)


def resident(problem: Problem, config: TileConfig) -> int:
    """Programs that an SM has registers and threads for at once."""
    threads = 32 * config.num_warps
    registers = (config.registers(problem) + _OVERHEAD) * threads
    return max(1, min(_REGISTERS // registers, _THREADS // threads, _BLOCKS))
