"""The expected time of ``triton.mixed_input``."""

from __future__ import annotations

from tmm_core import Machine, Problem
from tmm_triton import roofline
from tmm_triton.packed.mixed_input_config import Constants, MixedInputConfig, work_units

#: Constants of the estimate, in µs: of a launch, of a step, and per element to store. Then per
#: value to decode and per product, each for one consumer alone and for an SM. ``_BROUGHT`` is the
#: bytes per µs that an SM receives. All are fitted to two sets of times, both in
#: ``benchmarks/results``. ``h200/few_rows_configs.txt`` has 3,147 configs of 24 products by 4-bit
#: and 8-bit weights. ``h100/mixed_input_configs.txt`` has 239 configs of 17 products by 4-bit
#: weights.
_LAUNCH_US, _STEP_US, _STORE_US = 2.44, 0.203, 1.44e-4
_DECODE_US, _MULTIPLY_US = (4.02e-6, 2.11e-5), (4.39e-8, 2.36e-7)
_BROUGHT = 2.15e5
#: Where ``a`` is arranged: the factor on the cost of decoding, and the additional µs of a launch.
_DECODE_ARRANGED, _ARRANGE_US = 0.805, 1.01
#: µs of the reducing kernel, and for each partial sum.
_REDUCE_US, _PARTIAL_US = 2.0, 1.07e-6
#: µs to hand a part of a tile to another block, and for each of its elements
#: (``h200/stream_k.txt``).
_HAND_US, _PART_US = 0.5, 2.5e-4
#: Four activities of a tile overlap in part. The tile takes the norm of their times of this order:
#: more than the longest of them, and less than their sum.
_OVERLAP = 2.5


def estimate_us(problem: Problem, config: MixedInputConfig) -> float:
    """Waves of tiles. A tile takes the norm of four times. They are the steps of one consumer
    in sequence, the work of all consumers, reading the weight from memory, and filling shared
    memory."""
    machine, c = Machine.of(problem.device), Constants.of(problem, config)
    units = work_units(problem, c)
    steps = -(-problem.k // (c.BLOCK_K * c.splits))
    decoded, multiplied = float(c.rows * c.BLOCK_K), c.rows * c.BLOCK_K * c.BLOCK_M
    of_weight = c.n_ways * decoded * c.PAIR / 2
    launch = _LAUNCH_US
    if c.arranged:
        launch += _ARRANGE_US
        decoded *= _DECODE_ARRANGED
    latency = _STEP_US + decoded * _DECODE_US[0] + multiplied * _MULTIPLY_US[0]
    work = c.n_ways * (decoded * _DECODE_US[1] + multiplied * _MULTIPLY_US[1])
    reading = of_weight * min(units, machine.sms) / machine.memory
    filling = c.stage_bytes / _BROUGHT
    times = (-(-steps // c.k_ways) * latency, steps * work, steps * reading, steps * filling)
    tile = roofline.overlapping(times, _OVERLAP) + c.rows * c.BLOCK_M * _STORE_US
    time = -(-units // machine.sms) * tile
    if c.stream_k:
        time = units / machine.sms * tile + _HAND_US
        time += c.n_ways * c.rows * c.BLOCK_M * _PART_US
    if c.splits > 1:
        time += _REDUCE_US + c.splits * problem.m * problem.n * _PARTIAL_US
    return launch + time
