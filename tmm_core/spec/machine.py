"""Holds the peak rates of GPUs, on which all estimates of time are based.

Estimates rank configs and replace missing measurements. A measurement always takes precedence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.problem import Problem

#: Dense bf16 tensor-core FLOP per µs of one SM at boost clock, from NVIDIA's data sheets: A100
#: 312/108, RTX 3090 71/82, RTX 4090 165/128, H100 SXM 989/132, B200 2250/148, RTX 5090
#: 210/170 TFLOPS per SM.
_TENSOR = {
    (8, 0): 2.9e6, (8, 6): 0.87e6, (8, 9): 1.3e6, (9, 0): 7.5e6, (10, 0): 15.2e6, (12, 0): 1.2e6,
}  # fmt: skip
#: FLOP per µs of one SM without tensor cores, in fp32 and in other dtypes, such as fp64. For fp32
#: it is 128 lanes × 2 × 1.7 GHz; sm_80 has only 64 lanes, at 1.4 GHz.
_FMA, _OTHER = 0.43e6, 0.04e6
#: Bytes per µs of memory: measured by a copy for the H200, as specified for the others.
_MEMORY = {"H200": 4.27e6, "H100": 3.35e6, "A100": 1.9e6, "B200": 7.7e6}
#: Rates per SM of a GPU that is not listed.
_UNKNOWN_TENSOR, _UNKNOWN_MEMORY = 1.0e6, 8e3

#: Reads first evict this many dirty bytes from the L2, and reach this share of the bandwidth.
#: cuBLAS takes 19 µs for 34 MB, 43 for 117 and 71 for 235.
_DISPLACED, _DISPLACING_SHARE = 16e6, 0.9


@dataclass(frozen=True, slots=True)
class Machine:
    """The peak rates of a GPU, per µs."""

    #: Streaming multiprocessors, at least one.
    sms: int
    #: FLOP of the tensor cores of one SM in 16 bits.
    tensor: float
    #: Bytes moved to or from memory.
    memory: float

    #: µs of an empty kernel with its launch and drain (H200); and µs until memory reaches full
    #: speed. On an H200 a read of 34 MB takes 14 µs, and of 235 MB 64.
    EMPTY_US = 3.3
    RAMP_US = 2.5

    @classmethod
    def of(cls, device: DeviceFingerprint) -> Machine:
        sms = device.sm_count or 1
        listed = (rate for name, rate in _MEMORY.items() if name in device.name)
        memory = next(listed, sms * _UNKNOWN_MEMORY)
        return cls(sms, _TENSOR.get(device.capability, _UNKNOWN_TENSOR), memory)

    def flops(self, problem: Problem) -> float:
        """FLOP per µs of one SM for the problem's operands."""
        if problem.a.dtype is torch.float32:
            return self.tensor / 2 if problem.tf32 else min(_FMA, self.tensor)
        if problem.a.dtype.itemsize > 2:
            return _OTHER
        return 2 * self.tensor if problem.native else self.tensor

    def moving_us(self, size: float) -> float:
        """µs to move ``size`` bytes that are not in the L2."""
        size = (size + min(size, _DISPLACED)) / _DISPLACING_SHARE
        return size / self.memory + self.RAMP_US
