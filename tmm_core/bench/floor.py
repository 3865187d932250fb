"""The floor of memory-bound problems: the time of a cold read of the operands.

Bytes over the bandwidth of a large copy would be too low a floor: a read of a few megabytes ends
before the memory is at full speed. So a kernel that does nothing else reads the same bytes, in
several launch shapes, of which the best counts. On an H200 many small blocks win, because they
have the most bytes in flight.

Loads use ``evict_first``, since each byte is read once: otherwise they displace dirty lines of the
L2, which must be written back first. On an H200 this saves 3 to 4 µs of a read of 34 to 270 MB.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

import torch
import triton
import triton.language as tl

from tmm_core.bench.case import Call
from tmm_core.spec.device import fingerprint
from tmm_core.tuning.timing import Run, Timer

#: (blocks per SM, words per block and step)
LAUNCHES = tuple(itertools.product((8, 16, 32, 64), (1024, 2048)))
ROUNDS = 5


@triton.jit
def _read(a, b, out, A_WORDS, B_WORDS, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    seen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, A_WORDS, step):
        at = start + offsets
        seen ^= tl.load(a + at, mask=at < A_WORDS, other=0, eviction_policy="evict_first")
    for start in range(0, B_WORDS, step):
        at = start + offsets
        seen ^= tl.load(b + at, mask=at < B_WORDS, other=0, eviction_policy="evict_first")
    # Stored so that the compiler cannot drop a load.
    tl.store(out + tl.program_id(0), tl.xor_sum(seen))


def read_us(calls: Sequence[Call], timer: Timer) -> float:
    """Least median time, in µs, of reading the operands of a call once, in a chain of calls.

    Raises:
        ValueError: An operand is not a whole number of 32-bit words.
    """
    runs = readers([(call.a, call.b) for call in calls])
    samples = timer.measure(runs, ROUNDS, copies=len(calls))
    return min(median(mine) for mine in samples)


def readers(operands: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Run]:
    """One run per launch shape over copies of ``a`` and ``b``, row-major or transposed views of
    row-major memory; each returns the exclusive or of the words each of its blocks has read."""
    words = [(_words(a), _words(b)) for a, b in operands]
    sms = fingerprint(words[0][0].device).sm_count or 1
    return [_reader(words, blocks * sms, size) for blocks, size in LAUNCHES]


def _reader(operands: Sequence[tuple[torch.Tensor, torch.Tensor]], blocks: int, words: int) -> Run:
    out = torch.empty(blocks, dtype=torch.int32, device=operands[0][0].device)

    def run(copy: int) -> torch.Tensor:
        a, b = operands[copy]
        _read[(blocks,)](a, b, out, a.numel(), b.numel(), BLOCK=words)
        return out

    return run


def _words(t: torch.Tensor) -> torch.Tensor:
    flat = (t if t.is_contiguous() else t.mT).reshape(-1)
    if flat.numel() * flat.element_size() % 4:
        raise ValueError(f"{tuple(t.shape)} of {t.dtype} is not a whole number of 32-bit words")
    return flat.view(torch.int32)
