"""Describes tiled kernels for ``tmm explain``: the layout of a call's work, the terms of its time
model, and its use of SM resources. Other kernels describe themselves.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from triton import knobs

from tmm_core import Anatomy, Machine, Problem, Resources
from tmm_core.triton import interpreting, target_of
from tmm_triton import roofline
from tmm_triton.operands import Build, TileConfig

#: Maximum threads and blocks of an SM, and shared memory reserved per block.
_THREADS, _BLOCKS, _RESERVED = 2048, 32, 1024


def of_tiles(
    problem: Problem, config: TileConfig, *, reach: float, splits: int, at_once: int = 0
) -> Anatomy:
    """Return the anatomy of a kernel with one tile per program.

    Args:
        reach: As :attr:`tmm_triton.triton_kernel.TritonKernel.reach`.
        splits: Programs that share a tile's sum over K.
        at_once: Programs that run at the same time; 0: as many as SMs hold.
    """
    shared = config.shared_memory(problem)
    times = roofline.times_us(problem, config, splits=splits, reach=reach)
    return Anatomy(
        block_m=config.BLOCK_M,
        block_n=config.BLOCK_N,
        block_k=config.BLOCK_K,
        group_m=getattr(config, "GROUP_M", 1),
        tiles=problem.batch * config.tiles(problem) * splits,
        at_once=at_once or _at_once(problem, shared, 32 * config.num_warps),
        steps=-(-problem.k // (config.BLOCK_K * splits)),
        shared_memory=shared,
        model_us={**times, "launch": Machine.EMPTY_US},
    )


def resources(problem: Problem, builds: Sequence[Build]) -> list[Resources]:
    """The resources of each function, from Triton's cache or compiled now. The problem's GPU need
    not be present.

    Raises:
        RuntimeError: The GPU is not supported, or kernels are interpreted here.
        Exception: Triton's own, if it cannot compile.
    """
    target = target_of(problem.device)
    if target is None or target.backend != "cuda":
        raise RuntimeError(f"resources on {problem.device.name} are not known")
    if interpreting():
        raise RuntimeError("kernels are interpreted here: unset TRITON_INTERPRET to compile them")
    found = []
    for build in builds:
        compiled = build.compile_for(target)
        used = usage(compiled.asm["cubin"])
        found.append(
            Resources(
                build.fn.__name__,
                compiled.metadata.shared,
                _warps(compiled),
                used["REG"],
                used["STACK"] + used["LOCAL"],
            )
        )
    return found


def _warps(compiled: Any) -> int:
    """Warps of a block, of all partitions if warps are specialised."""
    return int(getattr(compiled.metadata, "total_num_warps", 0) or compiled.metadata.num_warps)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack and local memory per thread, read by Triton's ``cuobjdump``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _at_once(problem: Problem, shared: int, threads: int) -> int:
    """How many blocks all SMs hold at the same time."""
    room = problem.device.shared_memory + _RESERVED
    by_memory = room // (shared + _RESERVED) if shared else _BLOCKS
    resident = max(1, min(by_memory, _THREADS // threads, _BLOCKS))
    return max(1, problem.device.sm_count) * resident
