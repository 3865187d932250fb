"""What a kernel can tell of one of its configs besides how to launch it: for ``tmm explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """How the work of one call is laid out on the GPU, and what a model expects of it."""

    #: The tile of one program and its step along K.
    block_m: int
    block_n: int
    block_k: int
    #: Rows of tiles that are visited together (1: row after row); 0: another order.
    group_m: int = 0
    #: Tiles to compute, counting each part of K that is summed apart.
    tiles: int
    #: Tiles that the SMs have room for at one time.
    at_once: int
    #: Steps along K of each.
    steps: int
    num_stages: int
    num_warps: int
    #: Bytes of a block, by the kernel's own count.
    shared_memory: int
    #: Blocks that an SM has room for, by that count alone.
    resident: int
    #: Names of the functions that are launched, as a profiler shows them.
    functions: tuple[str, ...] = ()
    #: What the model adds up or takes the longest of, in µs by name.
    model_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.at_once)

    @property
    def fill(self) -> float:
        """Share of the places of all waves that tiles take."""
        return self.tiles / (self.waves * self.at_once)


@dataclass(frozen=True)
class Resources:
    """What a compiled function takes of an SM."""

    function: str
    #: Bytes of a block, as compiled.
    shared_memory: int
    num_warps: int
    #: Of a thread: registers, and bytes of stack, which spilled registers lie in.
    registers: int
    stack: int
