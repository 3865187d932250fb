"""Spreads the blocks of a launch that overlaps the previous one evenly over the SMs.

Blocks of such a launch start while the previous launch runs. If nothing is done, two things slow
them down, which no chain of equal launches shows:

* As many blocks as fit crowd on the SMs that the previous launch leaves idle.
* An SM divides one memory into shared memory and L1. If it is not told how, it keeps the division
  of the previous launch. A Hopper kernel leaves 28 of 256 KiB to L1, too few for a kernel that
  loads weights straight into registers.

With either, MLPs of one to 16 rows took up to 1.26 times as long on an H200
(``benchmarks/results/h200/crowded_launches.txt``).
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from typing import Any

import torch
from triton.compiler import CompiledKernel

#: Bytes of an SM that may be shared memory; the rest is L1 (CUDA C++ Programming Guide, compute
#: capabilities 9.0 and 10.0).
_CAPACITIES = tuple(1024 * kib for kib in (8, 16, 32, 64, 100, 132, 164, 196, 228))
#: Bytes that each block takes in addition to those that it requests.
_RESERVED = 1024
#: Shared memory is allocated in multiples of this.
_GRANULE = 128
#: The driver's ``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`` and
#: ``CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT``.
_MOST_SHARED, _CARVEOUT = 8, 9


def share(needed: int, resident: int, most: int) -> tuple[int, int] | None:
    """Return the bytes of shared memory that each block has to ask for, and the least capacity of
    an SM, with which ``resident`` blocks fit on an SM and no more. None if so many do not fit.

    Args:
        needed: Bytes that a block uses.
        most: The largest capacity of an SM.

    >>> share(4096, 3, 228 * 1024)
    (4352, 16384)
    """
    for capacity in _CAPACITIES:
        each = capacity // resident // _GRANULE * _GRANULE - _RESERVED
        if needed <= each and capacity <= most:
            return each, capacity
    return None


def even_share(blocks: int, device: int) -> int:
    """Return how many of a launch's blocks an SM holds if they are spread evenly."""
    return -(-blocks // torch.cuda.get_device_properties(device).multi_processor_count)


def spread(compiled: CompiledKernel, device: int, resident: int) -> None:
    """Let at most ``resident`` blocks of a loaded kernel be on an SM at a time, and leave to L1
    what their shared memory does not need. Nothing changes if the driver or the release of Triton
    cannot do it."""
    driver = _driver()
    packed: Any = getattr(compiled, "packed_metadata", ())
    meta = compiled.metadata
    if driver is None or packed != (meta.num_warps, meta.num_ctas, meta.shared):
        return
    function, fitting = ctypes.c_void_p(compiled.function), ctypes.c_int()
    status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(fitting), function, 32 * meta.num_warps, ctypes.c_size_t(meta.shared)
    )
    most = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    found = share(meta.shared, max(1, min(resident, fitting.value)), most)
    if status or found is None:
        return
    each, capacity = found
    # The driver takes the least capacity that is not below this share in percent.
    wanted = ((_MOST_SHARED, each), (_CARVEOUT, 100 * capacity // most))
    if not any(driver.cuFuncSetAttribute(function, *pair) for pair in wanted):
        compiled.packed_metadata = (meta.num_warps, meta.num_ctas, each)


@functools.cache
def _driver() -> Any:
    """Return CUDA's driver library; None without it."""
    with suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None
