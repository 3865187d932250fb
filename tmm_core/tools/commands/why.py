"""``tmm explain --why``: analyses the chosen kernel.

The sources are the kernel's own description, a model, the record and the compiler. The analysis
includes the effect of another stage or more warps.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from tmm_base import UsageError
from tmm_base.guards import suppress

from tmm_core.dispatch.explanation import Explanation
from tmm_core.errors import ConfigError, reraise
from tmm_core.registry.registry import Registry
from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tools.commands.tile_order import memory_bytes, waves
from tmm_core.tuning.ranking import fastest_first

#: 32-bit registers of an SM, and the granularity in which a warp's are allocated.
_REGISTERS, _ALLOCATED = 65536, 256
#: Warps and blocks that an SM holds, by capability, and otherwise (CUDA C++ Programming Guide).
_LIMITS = {(8, 6): (48, 16), (8, 9): (48, 24), (12, 0): (48, 24)}
_USUAL_LIMITS = (64, 32)
#: Shared memory that an SM keeps for each block.
_RESERVED = 1024


def take_apart(explanation: Explanation, registry: Registry) -> dict[str, Any]:
    """The analysis as JSON: of the choice, or of another candidate if the choice has no anatomy.

    Raises:
        UsageError: No candidate that can serve the problem has an anatomy.
    """
    problem = explanation.problem
    candidate, anatomy, note = described(explanation, registry)
    kernel, config = candidate.kernel, candidate.config
    found: dict[str, Any] = {
        "problem": problem.to_json(),
        "gpu": problem.device.name,
        "kernel": kernel.name,
        "config": config.to_json(),
        "note": note,
        "layout": asdict(anatomy) | {"waves": anatomy.waves, "fill": anatomy.fill},
        "reads": reads(problem, anatomy),
        "blas_us": _recorded_us(explanation, BASELINE),
        "flops": problem.flops,
        "bytes": problem.bytes,
    }
    del found["layout"]["model_us"]
    found["model_us"] = dict(anatomy.model_us)
    found |= _known(explanation, candidate)
    found["changes"] = [_change(explanation, candidate, fields) for fields in _steps(config)]
    return found


def reads(problem: Problem, anatomy: Anatomy) -> dict[str, Any] | None:
    """Return the reads of the waves of one product. None if its tile order is not the usual one, or
    if K is split, so that waves consist of parts."""
    rows, columns = -(-problem.m // anatomy.block_m), -(-problem.n // anatomy.block_n)
    if not anatomy.group_m or anatomy.tiles != problem.batch * rows * columns:
        return None
    run = waves(rows, columns, anatomy.group_m, anatomy.at_once)
    bytes_of_k = problem.a.dtype.itemsize * problem.k
    row_bytes = anatomy.block_m * bytes_of_k
    column_bytes = anatomy.block_n * bytes_of_k * (2 if problem.gated else 1)
    from_l2 = rows * columns * (row_bytes + column_bytes)
    from_memory = memory_bytes(run, row_bytes, column_bytes, problem.device.l2)
    return {
        "rows": len(run[0][0]),
        "columns": len(run[0][1]),
        "l2_bytes": from_l2 * problem.batch,
        "memory_bytes": from_memory * problem.batch,
        "hits": 1 - from_memory / from_l2,
    }


def occupancy(device: DeviceFingerprint, used: Resources) -> dict[str, Any]:
    """Blocks of a compiled function that an SM holds, the limiting resource, and the share of the
    SM's maximum of warps."""
    warps, blocks = _LIMITS.get(device.capability, _USUAL_LIMITS)
    per_warp = math.ceil(used.registers * 32 / _ALLOCATED) * _ALLOCATED
    rooms = {
        "shared memory": (device.shared_memory + _RESERVED) // (used.shared_memory + _RESERVED),
        "registers": _REGISTERS // max(1, per_warp * used.num_warps),
        "warps": warps // used.num_warps,
        "blocks": blocks,
    }
    limit = min(rooms, key=lambda name: rooms[name])
    held = rooms[limit]
    return {"blocks": held, "limited_by": limit, "occupancy": held * used.num_warps / warps}


def _recorded_us(explanation: Explanation, kernel: str, config: Any = None) -> float | None:
    """Return the recorded time of a kernel with this config, or with its first one, at this M or at
    the record's own. None if there is none."""
    record = explanation.record
    if record is None:
        return None
    for result in record.candidates:
        if result.kernel == kernel and config in (None, dict(result.config)):
            return result.us_at(explanation.problem.extent, record.extent) or result.median_us
    return None


def described(explanation: Explanation, registry: Registry) -> tuple[Candidate, Anatomy, str]:
    """The choice, or the fastest candidate on record that describes its anatomy, and a note on why.

    Raises:
        UsageError: No candidate does.
    """
    problem, chosen = explanation.problem, explanation.choice.candidate
    if (anatomy := chosen.kernel.anatomy(problem, chosen.config)) is not None:
        return chosen, anatomy, ""
    kernels = {name: registry.kernel(name) for name in explanation.able}
    record = explanation.record
    for result in fastest_first(record, "slow") if record is not None else []:
        kernel = kernels.get(result.kernel)
        if kernel is None:
            continue
        try:
            candidate = Candidate(kernel, kernel.config_type.from_json(result.config))
        except ConfigError:  # from another version
            continue
        if (anatomy := kernel.anatomy(problem, candidate.config)) is not None:
            note = f"{chosen} is chosen, but describes no tiles; this is the fastest that does"
            return candidate, anatomy, note
    able = [name for name, kernel in kernels.items() if _default_anatomy(kernel, problem)]
    hint = "; --gpu NAME selects a GPU that need not be present"
    if able:
        hint = f"; --kernel accepts one that does: {', '.join(able)}"
    raise UsageError(f"--why: {chosen.kernel.name} describes no tiles{hint}")


def _default_anatomy(kernel: Any, problem: Problem) -> bool:
    with suppress(Exception):  # a third-party kernel's fault; it is not offered
        return kernel.anatomy(problem, kernel.default_config(problem)) is not None
    return False


def _known(explanation: Explanation, candidate: Candidate) -> dict[str, Any]:
    """Figures of the model, the record and the compiler for a candidate."""
    problem, kernel, config = explanation.problem, candidate.kernel, candidate.config
    found: dict[str, Any] = {
        "expected_us": kernel.estimate_us(problem, config),
        "measured_us": _recorded_us(explanation, kernel.name, config.to_json()),
    }
    try:
        used = kernel.resources(problem, config)
    except Exception as error:  # no compiler, or it failed: the rest is still useful
        reraise(error)
        reason = str(error).splitlines()[0] if str(error) else ""
        return found | {"resources": None, "not_compiled": reason}
    return found | {"resources": [asdict(each) | occupancy(problem.device, each) for each in used]}


def _steps(config: Any) -> list[dict[str, Any]]:
    """One stage more, one less, and four more warps (eight, if four are not possible)."""
    fields = config.to_json()
    found = []
    if isinstance(stages := fields.get("num_stages"), int):
        found += [{"num_stages": stages + 1}, {"num_stages": stages - 1}]
    if isinstance(warps := fields.get("num_warps"), int):
        more = [{"num_warps": warps + 4}, {"num_warps": warps + 8}]
        found.append(next((each for each in more if _config(config, each) is not None), more[0]))
    return found


def _config(config: Any, fields: dict[str, Any]) -> Any:
    try:
        return type(config).from_json({**config.to_json(), **fields})
    except ConfigError:
        return None


def _change(
    explanation: Explanation, candidate: Candidate, fields: dict[str, Any]
) -> dict[str, Any]:
    problem = explanation.problem
    found: dict[str, Any] = {"fields": fields}
    try:
        config = type(candidate.config).from_json({**candidate.fields, **fields})
    except ConfigError as error:
        return found | {"refused": str(error)}
    anatomy = candidate.kernel.anatomy(problem, config)
    room = problem.device.shared_memory
    if anatomy is not None and anatomy.shared_memory > room:
        return found | {"refused": f"{anatomy.shared_memory} bytes of shared memory, of {room}"}
    return found | _known(explanation, Candidate(candidate.kernel, config))
