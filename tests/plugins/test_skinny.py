"""``triton.skinny`` without a GPU: the problems it declines, its proposals, the compiled code, and
its arithmetic, addresses and masks as plain Python. Python ignores layouts, which decide the speed;
test_conformance.py compares the kernel with the reference on a GPU."""

from __future__ import annotations

import functools
import itertools
import re
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton

pytest.importorskip("triton")

from hopper_block import Block, Pointer
from tmm_triton import blocks, skinny
from tmm_triton.skinny import Skinny, SkinnyConfig
from tmm_triton.tile_anatomy import usage
from triton.backends.compiler import GPUTarget
from uninterpreted import Uninterpreted

from tmm_core import ConfigError, Operand, Problem
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint

ROW, COL = Operand(torch.bfloat16), Operand(torch.bfloat16, "col")
DEVICES = {
    80: DeviceFingerprint("cuda", "NVIDIA A100", (8, 0), 108, 166912),
    90: DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448),
    100: DeviceFingerprint("cuda", "NVIDIA B200", (10, 0), 148, 232448),
}
DECODE = Problem(16, 4096, 4096, ROW, COL, ROW, DEVICES[90])
FIELDS = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_K": 512,
    "num_stages": 2,
    "num_warps": 4,
}


def reasons(problem: Problem) -> list[str]:
    # A machine without a GPU has no driver to build a launcher for.
    return [r for r in Skinny().reasons_against(problem) if "driver" not in r]


def test_serves_decode() -> None:
    assert not reasons(DECODE)
    assert not reasons(replace(DECODE, m=1, batch=3, out=COL, epilogue=parse("gelu")))
    assert not reasons(replace(DECODE, n=4099, k=4104, residual=ROW, bias=torch.float32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"m": 17}, "is for 16 rows at most, not 17"),
        ({"b": ROW}, "b is row-major, not column-major"),
        ({"a": COL}, "a is column-major, not row-major"),
        ({"b": replace(COL, aligned=False)}, "b is not aligned to 16 bytes"),
        ({"k": 4100}, "K 4100 is not a multiple of 8"),
        ({"epilogue": parse("swiglu")}, "gated"),
        (
            {"a": Operand(torch.float32), "b": Operand(torch.float32, "col")},
            "torch.float32 operands are not among float16, bfloat16",
        ),
        (
            {"device": replace(DEVICES[90], type="cpu", interpreted=True)},
            "not on cpu in Triton's interpreter",
        ),
    ],
)
def test_declines(change: dict[str, Any], reason: str) -> None:
    assert any(reason in given for given in reasons(replace(DECODE, **change)))


def test_a_later_triton_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reasons(DECODE)
    monkeypatch.setattr(triton, "__version__", "4.1.0")
    assert reasons(DECODE) == before


@pytest.mark.parametrize(
    "change",
    [
        {"BLOCK_M": 32},
        {"BLOCK_N": 128},
        {"BLOCK_K": 128},  # 32 elements for each of 4 warps
        {"num_stages": 3},
    ],
)
def test_config_bounds(change: dict[str, int]) -> None:
    assert SkinnyConfig.from_json(FIELDS) == SkinnyConfig(**FIELDS)
    with pytest.raises(ConfigError):
        SkinnyConfig.from_json(FIELDS | change)


def test_proposals() -> None:
    kernel = Skinny()
    for m in range(1, 17):
        for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (40, 72)):
            problem = replace(DECODE, m=m, n=n, k=k)
            configs = kernel.configs(problem)
            assert configs
            assert kernel.default_config(problem) == configs[0]
            estimates = [kernel.estimate_us(problem, c) for c in configs]
            assert estimates == sorted(estimates)
            # The least number of MMA rows, and no step that is twice as long as K.
            assert {c.BLOCK_M for c in configs} == {8 if m <= 8 else 16}
            steps = {c.BLOCK_K for c in configs}
            assert steps == {step for step in steps if step < 2 * k} or len(steps) == 1


@pytest.mark.parametrize(
    ("m", "k", "rows", "step"),
    [(1, 4096, 8, 1024), (8, 1024, 8, 1024), (8, 2560, 8, 512), (9, 4096, 16, 512),
     (16, 264, 16, 512), (1, 256, 8, 256), (16, 8, 16, 256)],
)  # fmt: skip
def test_a_config_that_leaves_room(m: int, k: int, rows: int, step: int) -> None:
    kernel, problem = Skinny(), replace(DECODE, m=m, k=k)
    config = kernel.beside(problem)
    assert config is not None
    assert (config.BLOCK_M, config.BLOCK_K, config.early) == (rows, step, "")
    anatomy = kernel.anatomy(problem, config)
    assert anatomy is not None
    # An SM holds many such blocks, or few beside a block that takes most of its shared memory.
    assert anatomy.shared_memory <= 8192
    assert anatomy.at_once >= 8 * problem.device.sm_count


def test_configs_with_few_bytes_in_flight_have_longer_estimates() -> None:
    """The times are measured on an H200 with 16 rows, in µs."""
    estimate = functools.partial(Skinny().estimate_us, DECODE)
    base = SkinnyConfig(**FIELDS)
    assert estimate(base) < estimate(replace(base, BLOCK_K=256))  # 16.5, 19.3
    assert estimate(base) < estimate(replace(base, BLOCK_K=128, num_warps=2, num_stages=1))


# -- the kernel, run as Python ------------------------------------------------------------


def gather(pointer: Pointer, mask: Any = True, other: float = 0.0, **_: Any) -> Block:
    index, inside = np.broadcast_arrays(pointer.offset, mask)
    values = np.full(index.shape, other)
    values[inside] = pointer.memory[index[inside]]  # raises past the end
    return values.view(Block)


def scatter(pointer: Pointer, values: np.ndarray, mask: np.ndarray) -> None:
    index, values, mask = np.broadcast_arrays(pointer.offset, values, mask)
    pointer.memory[index[mask]] = values[mask]


def run_program(arguments: dict[str, Any], program: tuple[int, int, int]) -> None:
    """Run one program of the kernel as Python, on :class:`Pointer` arguments."""
    nothing = {"DotOperandLayout", "SliceLayout", "BlockedLayout", "NVMMADistributedLayout"}
    gl = types.SimpleNamespace(
        program_id=lambda axis: program[axis],
        arange=lambda start, end, layout: np.arange(start, end),
        expand_dims=np.expand_dims,
        zeros=lambda shape, dtype, layout: np.zeros(shape).view(Block),
        convert_layout=lambda x, layout: x,
        sum=lambda x, axis: np.sum(x, axis=axis).view(Block),
        load=gather,
        float32=np.float64,
        **{name: lambda *_: None for name in nothing},
    )
    names: dict[str, Any] = {
        "gl": gl,
        "tl": types.SimpleNamespace(load=gather, store=scatter, float32=np.float64),
        "gdc_wait": lambda: None,
        "gdc_launch_dependents": lambda: None,
        "mma_v2": lambda a, b, acc: (np.matmul(a, b) + acc).view(Block),
        "__builtins__": __builtins__,
    }
    for module in (blocks, skinny):
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType):
                names[name] = types.FunctionType(function.__code__, names, name)
    names["skinny_kernel"](**arguments)


def padded(rows: int, columns: int, seed: int) -> tuple[Pointer, np.ndarray, int]:
    """A matrix whose rows are followed by NaN, except the last: a read outside gives NaN or raises.
    Returns the pointer, the values and the row stride."""
    stride = columns + 8
    memory = np.full(rows * stride - 8, np.nan)
    index = np.arange(rows)[:, None] * stride + np.arange(columns)
    memory[index] = np.random.default_rng(seed).standard_normal(index.shape)
    return Pointer(memory), memory[index], stride


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("warps", [2, 4])
@pytest.mark.parametrize(
    ("z", "m", "n", "k"),
    [
        (1, 16, 64, 1024), (1, 13, 50, 520), (1, 1, 33, 72), (1, 8, 32, 512), (1, 20, 40, 264),
        (1, 5, 40, 512), (3, 7, 33, 264), (1, 16, 64, 264), (1, 16, 40, 264),
    ],
)  # fmt: skip
def test_arithmetic_addresses_masks(
    z: int, m: int, n: int, k: int, warps: int, stages: int
) -> None:
    config = SkinnyConfig(
        BLOCK_M=8 if m <= 8 else 16,
        BLOCK_N=32,
        BLOCK_K=256,
        num_stages=stages,
        num_warps=warps,
    )
    size = {"batch": z, "m": m, "n": n, "k": k}
    problem = replace(DECODE, **size, bias=torch.bfloat16, residual=ROW, scaled=True)
    (build,) = Skinny().builds(problem, config)
    a_ptr, a, a_stride = padded(z * m, k, 0)
    b_ptr, b, b_stride = padded(z * n, k, 1)
    residual_ptr, residual, r_stride = padded(z * m, n, 2)
    bias = np.random.default_rng(3).standard_normal(n)
    out = np.full(z * m * (n + 8), np.nan)
    given = {
        "a_ptr": a_ptr, "b_ptr": b_ptr, "bias_ptr": Pointer(bias), "residual_ptr": residual_ptr,
        "out_ptr": Pointer(out), "M": m, "N": n, "K": k, "stride_am": a_stride,
        "stride_bn": b_stride, "stride_rm": r_stride, "stride_om": n + 8, "stride_bias": 1,
        "stride_az": m * a_stride, "stride_bz": n * b_stride, "stride_rz": m * r_stride,
        "stride_oz": m * (n + 8), "alpha": -0.5,
    }  # fmt: skip
    constants = {**build.constants, "EPILOGUE": np.tanh}
    arguments = {
        name: constants.get(name, given.get(name)) for name in skinny.skinny_kernel.arg_names
    }
    for program in itertools.product(*map(range, build.grid)):
        run_program(arguments, program)
    out = out.reshape(z, m, n + 8)
    products = a.reshape(z, m, k) @ b.reshape(z, n, k).swapaxes(1, 2)
    expected = np.tanh(-0.5 * products + bias) + residual.reshape(z, m, n)
    np.testing.assert_allclose(out[:, :, :n], expected)
    assert np.isnan(out[:, :, n:]).all()


@pytest.mark.parametrize("stages", [1, 2])
def test_two_stages_load_a_step_ahead_in_a_limited_number_of_registers(stages: int) -> None:
    config = SkinnyConfig(**FIELDS | {"num_stages": stages})
    (build,) = Skinny().builds(DECODE, config)
    (widest,) = Skinny().builds(DECODE, replace(config, BLOCK_N=32, num_warps=2))
    assert build.constants["AHEAD"] is widest.constants["AHEAD"] is (stages == 2)
    limits = [each.options.get("maxnreg") for each in (build, widest)]
    assert limits == ([None, None] if stages == 1 else [184, 255])


# The compiled kernel.


def compiled(sm: int) -> list[dict[str, Any]]:
    kernel, lines = Skinny(), []
    tail = replace(DECODE, m=13, n=4099, k=4104, epilogue=parse("silu"), bias=torch.bfloat16)
    # Only Hopper overlaps launches, which is decided when a kernel is built.
    problems = {
        name: replace(problem, device=DEVICES[sm])
        for name, problem in (("whole", DECODE), ("one", replace(DECODE, m=1)), ("tail", tail))
    }
    # Fused terms and masks do not change the counts, and a compilation takes 0.7 s. So each of the
    # two problems compiles half of the tiles that both propose.
    tiles = {
        name: list(dict.fromkeys(replace(c, early="") for c in kernel.configs(problem)))
        for name, problem in problems.items()
    }
    both = [tile for tile in tiles["whole"] if tile in tiles["tail"]]
    left_out = {"whole": both[1::2], "one": [], "tail": both[::2]}
    for name, problem in problems.items():
        for config in kernel.configs(problem):
            if replace(config, early="") in left_out[name]:
                continue
            (build,) = kernel.builds(problem, config)
            result = build.compile_for(GPUTarget("cuda", sm, 32))
            ptx = result.asm["ptx"]
            line = {"name": name, "config": config.to_json(), "shared": result.metadata.shared}
            line |= usage(result.asm["cubin"])
            line |= {"claimed": config.shared_memory(problem), "mma": ptx.count("mma.sync")}
            loads = re.findall(r"ld\.global\S*", ptx)
            line |= {
                "wide": sum(".v4.b32" in load for load in loads),
                "streamed": sum("evict_first" in load for load in loads),
                "through": len(re.findall(r"ldmatrix|cp\.async", ptx)),
            }
            lines.append(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("sm", DEVICES)
def test_operands_go_from_memory_to_the_tensor_cores(sm: int, uninterpreted: Uninterpreted) -> None:
    lines = uninterpreted(compiled, sm)
    assert {line["name"] for line in lines} == {"whole", "one", "tail"}
    for line in lines:
        config = SkinnyConfig(**line["config"])
        # A lane loads 8 elements at once. The code of a step appears once per stage.
        b = config.BLOCK_N * config.part // (32 * 8)
        a = config.BLOCK_M * config.part // (32 * 8)
        assert line["wide"] == (a + b) * config.num_stages, line
        assert line["streamed"] == b * config.num_stages, line
        products = config.BLOCK_N // 16 * (config.BLOCK_M // 8) * (config.part // 16)
        assert line["mma"] == products * config.num_stages, line
        assert line["through"] == 0, line
        assert line["STACK"] + line["LOCAL"] == 0, line
        assert line["shared"] <= line["claimed"], line
