"""``triton.ragged`` compiles, without a GPU, for Ampere, Hopper, Blackwell and an MI300. Spills
stay below a limit, tiles fit shared memory, and Hopper's tiles use ``wgmma``.

The cases are the largest tile of each kind, one of decode and one of misaligned operands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_triton_compile import DEVICES, MOST_STACK
from tmm_triton.ragged import Ragged
from tmm_triton.tile_anatomy import usage

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.triton import target_of

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROW, COL, LOOSE = Operand(BF16), Operand(BF16, "col"), Operand(BF16, aligned=False)
MI300 = DeviceFingerprint(
    "cuda", "AMD Instinct MI300X", (9, 4), 304, 65536, cuda="hip-6.4", arch="gfx942"
)
TARGETS = {**{str(sm): device for sm, device in DEVICES.items()}, "gfx942": MI300}
INDEXED = Groups(128, "m", torch.int64, torch.int64, FP32, True)


def problems(device: DeviceFingerprint) -> dict[str, Problem]:
    rows = Problem(32768, 28672, 4096, ROW, COL, ROW, device, groups=Groups(8, "m"))
    row = Scale.parse("row")
    eight = replace(rows, a=Operand(FP8, scale=row), b=Operand(FP8, "col", scale=row))
    return {
        "fp8": replace(eight, epilogue=parse("silu"), bias=BF16, groups=INDEXED, residual=ROW),
        "fp8_gated": replace(eight, n=14336, epilogue=parse("swiglu"), groups=INDEXED),
        "fp8_decode": replace(eight, m=64, n=1536, k=2048, groups=Groups(128, "m")),
        "fp8_sums": replace(eight, m=4096, n=14336, k=8192, groups=Groups(8, "k")),
        "rows": replace(rows, epilogue=parse("silu"), bias=BF16, groups=INDEXED, residual=ROW),
        "gated": replace(rows, n=14336, epilogue=parse("swiglu"), groups=INDEXED),
        "alternate": replace(
            rows, b=ROW, n=2880, k=2880, epilogue=CLAMPED, bias=BF16, groups=INDEXED
        ),
        "decode": replace(rows, m=64, n=1536, k=2048, groups=Groups(128, "m")),
        "sums": replace(rows, m=4096, n=14336, k=8192, a=COL, b=ROW, groups=Groups(8, "k")),
        "columns": replace(rows, m=4096, n=8192, groups=Groups(8, "n", zeroed=True)),
        "loose": replace(rows, n=2049, k=769, a=LOOSE, b=LOOSE, out=LOOSE),
    }


#: Cases that load single elements: unaligned rows, and groups that start inside rows.
ONE_BY_ONE = ("loose", "fp8_sums")

#: The cases compiled for each target, at 1.3 s each.
COMPILED = {
    "80": ("gated", "loose"),
    "90": (
        "rows",
        "gated",
        "alternate",
        "decode",
        "sums",
        "columns",
        "fp8",
        "fp8_gated",
        "fp8_sums",
    ),
    "100": ("gated", "fp8_gated"),
    "gfx942": ("gated",),
}


def compiled(target: str) -> list[dict[str, Any]]:
    kernel, device = Ragged(), TARGETS[target]

    def lines() -> Iterator[tuple[str, Problem, Any]]:
        by_name = problems(device)
        for name in COMPILED[target]:
            configs = list(kernel.configs(by_name[name]))
            largest = max(configs, key=lambda c: (c.registers(by_name[name]), -c.SUBTILE))
            yield name, by_name[name], largest

    def tile_compiled(job: tuple[str, Problem, Any]) -> dict[str, Any]:
        name, problem, config = job
        (build,) = kernel.builds(problem, config)
        result = build.compile_for(target_of(device))
        line = {
            "target": target,
            "problem": name,
            "config": str(config),
            "shared": result.metadata.shared,
        }
        line |= {"tall": config.BLOCK_M % 64 == 0, "room": device.shared_memory}
        if target == "gfx942":
            private = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", result.asm["amdgcn"])
            return line | {"stack": max(map(int, private))}
        ptx, used = result.asm["ptx"], usage(result.asm["cubin"])
        line |= {"wgmma": ptx.count("wgmma.mma_async"), "async": ptx.count("cp.async")}
        return line | {"stack": used["STACK"] + used["LOCAL"]}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(tile_compiled, lines()))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_tiles_compile_and_fit(target: str, request: pytest.FixtureRequest) -> None:
    process = "uninterpreted_amd" if target == "gfx942" else "uninterpreted"
    lines = request.getfixturevalue(process)(compiled, target)
    assert [line["problem"] for line in lines] == list(COMPILED[target])
    assert not [line for line in lines if line["stack"] > MOST_STACK]
    assert not [line for line in lines if line["shared"] > line["room"]]
    if target != "gfx942":
        assert all(line["async"] for line in lines if line["problem"] not in ONE_BY_ONE)
    if target == "90":
        tall = [line for line in lines if line["tall"]]
        assert {line["problem"] for line in tall} >= {
            "rows",
            "gated",
            "alternate",
            "sums",
            "columns",
        }
        assert all(line["wgmma"] for line in tall)
