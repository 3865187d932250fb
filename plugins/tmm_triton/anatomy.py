"""Describes each kernel of this package for ``tmm explain``: the layout of a call's work, the terms
of its time model, and its use of SM resources. Kernels' code and versions do not depend on it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from tmm_core import Anatomy, Kernel, Machine, Problem, Resources
from tmm_core.triton import interpreting, target_of
from tmm_triton import roofline
from tmm_triton.operands import Build, TileConfig

#: Maximum threads and blocks of an SM, and shared memory reserved per block.
_THREADS, _BLOCKS, _RESERVED = 2048, 32, 1024


def of(
    kernel: Kernel[Any], problem: Problem, config: Any, builds: Sequence[Build]
) -> Anatomy | None:
    """The anatomy of a kernel of this package; None for an unknown one."""
    found = _of(kernel, problem, config)
    return found and replace(found, functions=tuple(build.fn.__name__ for build in builds))


def _of(kernel: Any, problem: Problem, config: Any) -> Anatomy | None:
    # The kernels' own modules import this one.
    own: Any = sys.modules[type(kernel).__module__]
    if kernel.name == "triton.warp_specialized":
        return of_hopper(problem, config, own.tile_shapes, own.estimate)
    if kernel.name == "triton.realigned":  # its product's; the copies have no tiles
        inner: Kernel[Any] = own.inner_kernels()[config.inner]
        return inner.anatomy(own.realigned(problem), config.config)
    if not isinstance(config, TileConfig):
        return None
    if problem.groups is not None:  # modelled as equal products of the mean size
        problem = own.each(problem)
    # Split-K numbers programs down the columns of tiles; skinny and naive along the rows.
    rows = -(-problem.m // config.BLOCK_M) if kernel.name == "triton.split_k" else 1
    stays = kernel.name == "triton.persistent"
    # A persistent program sums all parts of K itself.
    splits = 1 if stays else kernel.splits(config)
    shared = config.shared_memory(problem)
    resident = _resident(problem, shared, 32 * config.num_warps)
    tiles = problem.batch * -(-problem.m // config.BLOCK_M) * -(-problem.n // config.BLOCK_N)
    tiles *= splits
    sms = max(1, problem.device.sm_count)
    # There are no more persistent programs than tiles, if there are fewer tiles than SMs.
    at_once = max(sms, own._programs(problem, config)) if stays else sms * resident
    times = roofline.times_us(problem, config, splits=splits, reach=kernel.reach)
    return Anatomy(
        block_m=config.BLOCK_M,
        block_n=config.BLOCK_N,
        block_k=config.BLOCK_K,
        group_m=getattr(config, "GROUP_M", rows),
        tiles=tiles,
        at_once=at_once,
        steps=-(-problem.k // (config.BLOCK_K * splits)),
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        shared_memory=shared,
        resident=resident,
        model_us={**times, "launch": Machine.EMPTY_US},
    )


def of_hopper(problem: Problem, given: Any, tile_shapes: Any, estimate: Any) -> Anatomy:
    """The anatomy of ``triton.warp_specialized``, with one persistent block per SM."""
    config = tile_shapes.adapted(problem, given)
    return Anatomy(
        block_m=config.BLOCK_M,
        block_n=config.BLOCK_N,
        block_k=config.BLOCK_K,
        group_m=config.GROUP_M,
        tiles=tile_shapes.tile_count(problem, config) * config.splits,
        at_once=max(1, problem.device.sm_count),
        steps=tile_shapes.steps(problem, config),
        num_stages=config.num_stages,
        # Four warps load, in addition to the consumers.
        num_warps=config.consumers * config.num_warps + 4,
        shared_memory=config.shared_memory(problem),
        resident=1,
        model_us=estimate.times_us(problem, config),
    )


def resources(problem: Problem, builds: Sequence[Build]) -> list[Resources]:
    """The resources of each compiled function, compiled now for the problem's GPU, which need not
    be present, or found in Triton's cache.

    Raises:
        RuntimeError: The GPU is not supported, or kernels are interpreted here.
        Exception: What Triton raises when it cannot compile.
    """
    target = target_of(problem.device)
    if target is None or target.backend != "cuda":
        raise RuntimeError(f"resources on {problem.device.name} are not known")
    if interpreting():
        raise RuntimeError("kernels are interpreted here: unset TRITON_INTERPRET to compile them")
    found = []
    for build in builds:
        compiled = build.compile_for(target)
        used = _usage(compiled.asm["cubin"])
        found.append(
            Resources(
                build.fn.__name__,
                compiled.metadata.shared,
                _warps(compiled),
                used.get("REG", 0),
                used.get("STACK", 0) + used.get("LOCAL", 0),
            )
        )
    return found


def _warps(compiled: Any) -> int:
    """Warps of a block, of all partitions if warps are specialised."""
    return int(getattr(compiled.metadata, "total_num_warps", 0) or compiled.metadata.num_warps)


def _usage(cubin: bytes) -> dict[str, int]:
    """Resource usage according to ``cuobjdump``, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _resident(problem: Problem, shared: int, threads: int) -> int:
    room = problem.device.shared_memory + _RESERVED
    by_memory = room // (shared + _RESERVED) if shared else _BLOCKS
    return max(1, min(by_memory, _THREADS // threads, _BLOCKS))
