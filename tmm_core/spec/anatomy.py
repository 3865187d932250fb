"""A kernel's description of one of its configs, for ``tmm explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """How a kernel divides one call's work on the GPU, and the times that its model expects."""

    #: The tile of one program and its step along K.
    block_m: int
    block_n: int
    block_k: int
    #: Rows of tiles that are visited as a group (1: row after row); 0: another order.
    group_m: int = 0
    #: Tiles to compute, counting each split of K.
    tiles: int
    #: Tiles that fit on the SMs at one time.
    at_once: int
    #: Steps along K per tile.
    steps: int
    #: Bytes per block, as computed by the kernel.
    shared_memory: int
    #: The model's terms in µs, by name. The model adds them up, or takes their maximum.
    model_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.at_once)

    @property
    def fill(self) -> float:
        """Fraction of the slots of all waves that tiles fill."""
        return self.tiles / (self.waves * self.at_once)


@dataclass(frozen=True)
class Resources:
    """The resources of an SM that a compiled function uses."""

    function: str
    #: Bytes per block, as compiled.
    shared_memory: int
    num_warps: int
    #: Per thread: registers, and bytes of stack, which holds spilled registers.
    registers: int
    stack: int
