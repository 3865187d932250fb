"""The large tiles that the Triton kernels propose compile without a GPU for Ampere, Hopper and
Blackwell. They are combined with every other property that affects the program. One small tile of
each kind compiles too. Shared memory fits, tiles stay in registers, and Hopper's tiles use
``wgmma``. A config of every tile also compiles for Ada and for AMD's MI300, where no kernel has
been timed yet.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pairwise import covering
from tmm_triton.plugin import load
from tmm_triton.tile_anatomy import usage
from uninterpreted import Uninterpreted

from tmm_core import Operand, Port, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.testing.terms import ABSOLUTE
from tmm_core.triton import target_of

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROW = Scale.parse("row")
#: Name, SMs and shared memory a block may have, by architecture.
DEVICES = {
    80: DeviceFingerprint("cuda", "NVIDIA A100", (8, 0), 108, 166912),
    90: DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448),
    100: DeviceFingerprint("cuda", "NVIDIA B200", (10, 0), 148, 232448),
}
#: Bytes of stack per thread that pass. ptxas likes to trade some addresses for another
#: resident block; a tile that does not fit its registers costs 300 and more.
MOST_STACK = 160
KERNELS = ("naive", "grouped", "split_k", "fused_epilogue", "persistent")
#: The kernels that write auxiliary outputs, and some outputs.
TILED = {"grouped", "fused_epilogue"}
OUTPUTS = (
    Port("amax", "row", reduce="max", **ABSOLUTE),
    Port("total", "scalar", reduce="sum"),
)


def problems(device: DeviceFingerprint) -> dict[str, Problem]:
    """Problems that together propose every tile."""
    row, col = Operand(BF16), Operand(BF16, "col")
    loose = Operand(BF16, aligned=False)
    large = Problem(4096, 4096, 4096, row, col, row, device, epilogue=parse("silu"), bias=BF16)
    by_name = {
        "large": large,
        "middle": replace(large, m=1024, n=1024, k=1024, a=col, b=row, residual=row),
        "gated": replace(large, m=2048, n=14336, epilogue=parse("swiglu")),
        "outputs": replace(large, epilogue=replace(parse("silu"), outputs=OUTPUTS)),
    }
    if device.sm >= 90:
        # K-major, as wgmma takes 8-bit operands.
        eight = Operand(FP8)
        fp8 = replace(
            large,
            a=replace(eight, scale=ROW),
            b=Operand(FP8, "col", scale=ROW),
        )
        by_name["fp8"] = fp8
    if device.sm == 100:  # each compilation takes 0.8 s
        return by_name
    if device.sm == 90:
        loose8 = Operand(FP8, aligned=False)
        by_name["fp8_unaligned"] = replace(fp8, m=301, n=205, k=141, a=loose8, b=loose8)
        by_name["fp8_gated"] = replace(fp8, m=2048, n=14336, epilogue=parse("swiglu"))
        by_name["fp8_decode"] = replace(fp8, m=16)
    return by_name | {
        "decode": replace(large, m=16),
        "large_k": replace(large, m=256, n=256, k=65536, b=row, epilogue=parse(None), bias=None),
        "gated_decode": replace(large, m=16, n=14336, epilogue=parse("swiglu")),
        "unaligned": replace(large, m=4097, n=4097, k=4097, a=loose, b=loose, out=loose),
        "fp32": replace(
            large, m=512, n=512, k=512, a=Operand(FP32), b=Operand(FP32), out=Operand(FP32)
        ),
        "batched": replace(large, m=512, n=512, k=512, batch=8),
        "invariant": replace(large, batch_invariant=True),
        "invariant_decode": replace(large, m=16, n=5120, k=5120, batch_invariant=True),
        "invariant_gated": replace(
            large, m=300, n=14336, epilogue=parse("swiglu"), batch_invariant=True
        ),
    }


# -- the compiled code ------------------------------------------------------------------------


def compiled(sm: int) -> list[dict[str, Any]]:
    jobs: dict[Any, Any] = {}
    for name, problem in problems(DEVICES[sm]).items():
        for module in KERNELS:
            kernel: Any = load(f"triton.{module}")
            # A machine without a GPU has no driver either; compiling needs none.
            reasons = [r for r in kernel.reasons_against(problem) if "driver" not in r]
            configs = [] if reasons else list(kernel.configs(problem))
            configs = configs[:2] if problem.epilogue.outputs else configs
            for config in configs:
                # The order of tiles and the number of parts of K do not affect the code. A config
                # that compiles for one problem compiles for others with the same operands.
                fields = config.to_json()
                split = fields.pop("SPLIT_K", 1) > 1
                fields.pop("GROUP_M", None)
                del fields["num_stages"]
                operands = (problem.a.dtype, problem.a.aligned, problem.gated, name == "outputs")
                kind = (split, operands, config.num_stages > 1)
                if config.BLOCK_M * config.BLOCK_N >= 128 * 128:
                    key = (type(kernel).__module__, *kind, *fields.items())
                else:  # only large tiles may not fit, and each takes 0.8 s
                    key = (module, *kind, config.BLOCK_M)
                # More stages take more shared memory, but no registers.
                if key not in jobs or config.num_stages > jobs[key][3].num_stages:
                    jobs[key] = (name, module, problem, config, kernel)

    def compiled_builds(job: Any) -> list[dict[str, Any]]:
        name, module, problem, config, kernel = job
        lines = []
        for build in kernel.builds(problem, config):
            line = {
                "problem": name,
                "kernel": module,
                "config": str(config),
                "function": build.fn.__name__,
                "tile": [config.BLOCK_M, config.BLOCK_N],
                "swap": getattr(config, "SWAP", False),
                "warps": config.num_warps,
                "stages": config.num_stages,
                "claimed": config.shared_memory(problem),
            }
            try:
                result = build.compile_for(target_of(problem.device))
                ptx = result.asm["ptx"]
                line |= usage(result.asm["cubin"])
                line |= {
                    "shared": result.metadata.shared,
                    "wgmma": ptx.count("wgmma.mma_async"),
                    "mma": ptx.count("mma.sync"),
                    "tma": ptx.count("cp.async.bulk.tensor"),
                    "async": ptx.count("cp.async"),
                    "once": ptx.count("ld.global.L1::evict_first"),
                    "wide": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
                }
            except Exception as error:
                while error.__cause__ is not None:
                    error = error.__cause__
                line["error"] = f"{type(error).__name__}: {error}"
            lines.append(line)
        return lines

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chosen = pool.map(compiled_builds, _chosen(list(jobs.values())))
        return [line for lines in chosen for line in lines]


def _chosen(jobs: list[Any]) -> list[Any]:
    """Each tile with warps, in pairs; for Hopper also with loads that run ahead or do not, and with
    each kernel that has it. And each kernel on each kind of problem."""

    def fields(job: Any) -> dict[str, Any]:
        _, module, problem, config, _ = job
        hopper = problem.device.sm == 90
        return {
            "kernel": module if hopper else "",
            "tile": (config.BLOCK_M, config.BLOCK_N, problem.gated, problem.a.dtype),
            "warps": config.num_warps,
            "ahead": config.num_stages > 1 if hopper else "",
        }

    chosen = covering(jobs, fields)
    served = {(name, module) for name, module, *_ in chosen}
    others = {job[:2]: job for job in jobs if job[:2] not in served}
    return [*chosen, *others.values()]


# -- the tests ----------------------------------------------------------------------------


def label(line: dict[str, Any]) -> str:
    return f"{line['problem']} {line['kernel']}.{line['function']} {line['config']}"


@pytest.mark.slow
@pytest.mark.parametrize("sm", DEVICES)
def test_tiles_compile_and_fit(sm: int, uninterpreted: Uninterpreted) -> None:
    lines = uninterpreted(compiled, sm)
    errors = {label(line): line["error"] for line in lines if "error" in line}
    assert not errors
    room = DEVICES[sm].shared_memory
    assert not {label(x): x["shared"] for x in lines if x["shared"] > room}
    most = {"outputs": 2 * MOST_STACK}  # with what is reduced beside a tile, on Ampere
    spilled = {
        label(x): x["STACK"]
        for x in lines
        if x["STACK"] + x["LOCAL"] > most.get(x["problem"], MOST_STACK)
    }
    assert not spilled

    kernels = set(KERNELS) if sm >= 90 else set(KERNELS) - {"persistent"}
    assert {line["kernel"] for line in lines} == kernels
    assert {x["kernel"] for x in lines if x["function"] == "reduce_port_kernel"} == TILED
    main = [line for line in lines if not line["function"].startswith("reduce_")]
    # Declared alignment makes loads 16 bytes wide. They are copies to shared memory ahead of use,
    # or loads to registers of operands that are read once.
    whole = [x for x in main if "unaligned" not in x["problem"]]
    assert not [label(x) for x in whole if x["stages"] > 1 and not x["async"]]
    through = [x for x in whole if x["stages"] == 1]
    assert {x["kernel"] for x in through} == ({"split_k"} if sm == 90 else set())
    assert not [label(x) for x in through if x["async"] or not 0 < x["once"] < x["wide"]]

    # The shared memory by which configs are chosen is what the compiler uses. On Blackwell it adds
    # scratch of its own, up to 8 KiB.
    if sm < 100:
        assert not [label(x) for x in main if x["shared"] > x["claimed"] + 2048]

    if sm == 90:
        tensor_cores = [x for x in main if x["problem"] != "fp32" and x["warps"] % 4 == 0]
        meant = [x for x in tensor_cores if x["tile"][0] % 64 == 0 or x["swap"]]
        assert {x["kernel"] for x in meant} == set(KERNELS)
        assert not [label(x) for x in meant if not x["wgmma"] or x["mma"]]
        assert not [label(x) for x in main if (x["kernel"] == "persistent") != (x["tma"] > 0)]


# -- GPUs that were compiled for and never timed --------------------------------------------

UNTIMED = {
    "sm_89": DeviceFingerprint("cuda", "NVIDIA L40S", (8, 9), 142, 101376),
    "gfx942": DeviceFingerprint(
        "cuda", "AMD Instinct MI300X", (9, 4), 304, 65536, cuda="hip-6.4", arch="gfx942"
    ),
}
#: How each writes a product of its matrix units.
MATRIX_UNITS = {"sm_89": "mma.sync", "gfx942": "v_mfma_"}


def tiles_compiled(name: str) -> list[dict[str, Any]]:
    """One config of every tile that is proposed, of whichever kernel proposes it first."""
    device = UNTIMED[name]
    by_name = problems(device)
    instances = [by_name[each] for each in ("gated", "large", "decode", "large_k", "unaligned")]
    if name == "sm_89":
        eight = Operand(FP8)
        instances.append(
            replace(by_name["large"], a=replace(eight, scale=ROW), b=Operand(FP8, "col"))
        )
    jobs: dict[Any, Any] = {}
    for problem in instances:
        for module in ("fused_epilogue", "split_k", "grouped", "naive"):
            kernel: Any = load(f"triton.{module}")
            if any("driver" not in reason for reason in kernel.reasons_against(problem)):
                continue
            for config in kernel.configs(problem):
                key = (problem.a.dtype, problem.gated, config.BLOCK_M, config.BLOCK_N)
                # Only large tiles may not fit, with two accumulators or 8-bit numbers. The others
                # are compiled once, at 0.8 s each.
                if (problem.gated or problem.native) and config.BLOCK_M < 128:
                    continue
                jobs.setdefault(key, (module, problem, config, kernel.builds(problem, config)[0]))

    def tile_compiled(job: Any) -> dict[str, Any]:
        module, problem, config, build = job
        line = {"problem": str(problem), "kernel": module, "config": str(config)}
        line |= {"function": build.fn.__name__, "claimed": config.shared_memory(problem)}
        line |= {"tile": [config.BLOCK_M, config.BLOCK_N]}
        result = build.compile_for(target_of(device))
        if name == "gfx942":
            text = result.asm["amdgcn"]
            (scratch,) = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text)
            line["spilled"] = int(scratch)
        else:
            text = result.asm["ptx"]
            used = usage(result.asm["cubin"])
            line["spilled"] = used["STACK"] + used["LOCAL"]
        return line | {"shared": result.metadata.shared, "mma": text.count(MATRIX_UNITS[name])}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(tile_compiled, jobs.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTIMED)
def test_a_config_of_every_tile_compiles_where_none_was_timed(
    name: str, request: pytest.FixtureRequest
) -> None:
    process = "uninterpreted_amd" if name == "gfx942" else "uninterpreted"
    lines = request.getfixturevalue(process)(tiles_compiled, name)
    tiles = {tuple(line["tile"]) for line in lines}
    assert {(128, 128), (64, 128), (64, 64), (16, 64)} <= tiles
    assert len(lines) >= 10
    assert not [label(x) for x in lines if not x["mma"]]
    room = UNTIMED[name].shared_memory
    assert not {label(x): x["shared"] for x in lines if x["shared"] > room}
    assert not {label(x): x["spilled"] for x in lines if x["spilled"] > MOST_STACK}
