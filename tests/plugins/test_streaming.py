"""Tests ``triton.streaming`` without a GPU: the problems it declines, its compilation, and its
arithmetic, addresses and masks as plain Python. There a 16-bit number is an integer, and words are
decoded by shifts; a GPU compares the PTX with fp64 in ``tests/gpu/test_streaming_gpu.py``."""

from __future__ import annotations

import itertools
import json
import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from hopper_block import Pointer
from test_skinny import COL, DEVICES, ROW
from tmm_triton import blocks, streaming
from tmm_triton.streaming import Streaming, StreamingConfig
from tmm_triton.tile_anatomy import usage
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from uninterpreted import Uninterpreted

from tmm_core import ConfigError, Operand, Problem, Scale
from tmm_core.epilogues import parse

BF16, FP16 = torch.bfloat16, torch.float16
INT4 = Operand(torch.uint8, "col", format="int4", scale=Scale((1, 128), BF16))
INT8 = Operand(torch.int8, "col", format="int8", scale=Scale((1, 0)))
FP8 = Operand(torch.float8_e4m3fn, "col", format="fp8", scale=Scale((1, 128)))
MEASURED = Path(__file__).parents[2] / "benchmarks/results/h100/streaming_configs.json"
DECODE = Problem(16, 4096, 4096, ROW, INT4, ROW, DEVICES[90])
FIELDS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 512, "num_stages": 2, "num_warps": 4}


def reasons(problem: Problem) -> list[str]:
    # A machine without a GPU has no driver to build a launcher for.
    return [r for r in Streaming().reasons_against(problem) if "driver" not in r]


def test_serves_packed_weights() -> None:
    for weight in (INT4, INT8, FP8, replace(INT4, scale=Scale((1, 0)))):
        assert not reasons(replace(DECODE, b=weight))
        assert not reasons(replace(DECODE, b=weight, m=1, batch=3, epilogue=parse("swiglu")))
    half = Operand(FP16)
    assert not reasons(replace(DECODE, a=half, out=half, n=4099, residual=half, bias=FP16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"m": 17}, "is for 16 rows at most, not 17"),
        ({"k": 4032}, "K 4032 is not a multiple of 128"),
        ({"b": replace(INT4, scale=Scale((1, 64), BF16))}, "groups of 64 are not multiples of 128"),
        ({"b": COL}, "is for packed weights"),
        ({"b": replace(INT4, layout="row")}, "b is row-major, not column-major"),
        ({"b": replace(INT4, aligned=False)}, "b is not aligned to 16 bytes"),
        ({"batch_invariant": True}, "sums in an order that no kernel for more rows has"),
    ],
)
def test_declines(change: dict[str, Any], reason: str) -> None:
    assert any(reason in given for given in reasons(replace(DECODE, **change)))


@pytest.mark.parametrize(
    "change",
    [{"BLOCK_M": 32}, {"BLOCK_K": 64}, {"num_stages": 3}, {"num_warps": 2}, {"num_warps": 16}],
)
def test_config_bounds(change: dict[str, int]) -> None:
    assert StreamingConfig.from_json(FIELDS) == StreamingConfig(**FIELDS)
    with pytest.raises(ConfigError):
        StreamingConfig.from_json(FIELDS | change)


def test_a_config_for_fewer_rows_is_refused() -> None:
    """A tuning of 16 rows may try what won with 8."""
    few = StreamingConfig(**FIELDS | {"BLOCK_M": 8})
    assert Streaming().builds(replace(DECODE, m=8), few)
    with pytest.raises(ConfigError, match="tiles of fewer rows than 9"):
        Streaming().builds(replace(DECODE, m=9), few)


@pytest.mark.parametrize(
    ("change", "strides"),
    [
        ({}, (0, 0, 1)),  # of any N: one compilation serves them all
        ({"batch": 3}, (4096, 0, 1)), ({"batch": 3, "epilogue": parse("swiglu")}, (8192, 0, 1)),
        ({"batch": 3, "b": replace(INT8, scale=Scale.parse("tensor"))}, (0, 0, 0)),
        ({"batch": 3, "b": INT4}, ()),
    ],
)  # fmt: skip
def test_scales_of_rows_are_next_to_one_another(change: Any, strides: tuple[int, ...]) -> None:
    found = streaming._row_scale(replace(DECODE, **{"b": INT8, **change}))
    assert tuple(found.values()) == strides


@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize("weight", [INT4, INT8])
def test_proposals(m: int, weight: Operand) -> None:
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (40, 128)):
        problem = replace(DECODE, m=m, n=n, k=k, b=weight)
        configs = Streaming().configs(problem)
        assert {c.BLOCK_M for c in configs} == {8 if m <= 8 else 16}
        estimates = [Streaming().estimate_us(problem, c) for c in configs]
        assert estimates == sorted(estimates)
        waiting = {replace(c, early="") for c in configs if c.early == "wait"}
        plain = {c for c in configs if not c.early}
        assert len(plain) == 2
        assert plain < waiting
        assert len(waiting) == 5
        alone = Streaming().configs(replace(problem, batch=2))
        assert [c.early for c in alone] == [""] * 6
        static = Streaming().configs(replace(problem, static_weights=True))
        assert [c.early for c in static].count("b") == 2


def test_proposals_are_close_to_the_best_that_was_measured() -> None:
    h100 = replace(DEVICES[90], name="NVIDIA H100 80GB HBM3")
    measured = json.loads(MEASURED.read_text())["products"]
    assert len(measured) == 32
    for each in measured:
        size = {name: each[name] for name in ("m", "n", "k")}
        weight = {"int4": INT4, "int8": INT8}[each["format"]]
        configs = Streaming().configs(replace(DECODE, **size, b=weight, device=h100))
        names = {f"{c.BLOCK_N} {c.warps_k} {c.warps_n} {c.num_stages}" for c in configs}
        assert len(names) == 5
        us = each["us"]
        mixed = [time for name, time in each["race"].items() if name.startswith("mixed")]
        best = min(us.values())
        proposed = min(us[name] for name in names & set(us))
        assert proposed < 1.035 * best or min(mixed, default=best) < best, size


# -- the kernel, run as Python ------------------------------------------------------------


class Tile(np.ndarray):
    """A block of numbers with Gluon's methods; no operation changes one in place."""

    __iadd__ = np.ndarray.__add__
    __isub__ = np.ndarray.__sub__
    __imul__ = np.ndarray.__mul__

    def permute(self, order: Any) -> Tile:
        return self.transpose(order)

    def split(self) -> tuple[Tile, Tile]:
        return self[..., 0], self[..., 1]

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        return self.astype(np.int16).astype(np.int64).view(Tile) if dtype is np.int16 else self


class Words(Pointer):
    """A pointer to memory that is read as elements of another size."""

    def to(self, dtype: np.dtype[Any], bitcast: bool = False) -> Words:
        size = dtype.itemsize // self.memory.itemsize
        assert np.all(np.asarray(self.offset) % size == 0)
        return Words(self.memory.view(dtype), self.offset // size)

    def __add__(self, step: Any) -> Words:
        return Words(self.memory, self.offset + step)


def gather(pointer: Pointer, mask: Any = True, other: Any = None, **_: Any) -> Tile:
    index, inside = np.broadcast_arrays(pointer.offset, mask)
    # Elements outside that are loaded without a value are arbitrary.
    whole = pointer.memory.dtype.kind == "i"
    outside = (0x5A5A if whole else np.nan) if other is None else other
    values = np.full(index.shape, outside, np.int64 if whole else np.float64)
    values[inside] = pointer.memory[index[inside]]  # raises past the end
    return values.view(Tile)


def scatter(pointer: Pointer, values: np.ndarray, mask: np.ndarray) -> None:
    index, values, mask = np.broadcast_arrays(pointer.offset, values, mask)
    pointer.memory[index[mask]] = values[mask]


def decoder(form: str) -> Any:
    """Compute by shifts what a decoder's PTX does: unpack a word into pairs of 16-bit numbers."""

    def decode(program: str, constraints: str, words: list[Tile], **_: Any) -> list[Tile]:
        per = 2 * constraints.count("=r")
        bits = 32 // per
        codes = [(words[0] >> (bits * i)) & ((1 << bits) - 1) for i in range(per)]
        if form == "int4":
            pairs = [(codes[i] - 8, codes[i + 4] - 8) for i in range(4)]
        else:
            values = [code.astype(np.int8).astype(np.int64) for code in codes]
            pairs = [(values[0], values[1]), (values[2], values[3])]
        return [((low & 0xFFFF) | (high << 16)).view(Tile) for low, high in pairs]

    return decode


def run_program(arguments: dict[str, Any], form: str, program: tuple[int, int, int]) -> None:
    """One program of the kernel on :class:`Pointer` arguments."""
    nothing = {"DotOperandLayout", "SliceLayout", "BlockedLayout", "NVMMADistributedLayout"}
    gl = types.SimpleNamespace(
        program_id=lambda axis: program[axis],
        arange=lambda start, end, layout: np.arange(start, end).view(Tile),
        expand_dims=lambda x, axis: np.expand_dims(x, axis).view(Tile),
        zeros=lambda shape, dtype, layout: np.zeros(shape).view(Tile),
        zeros_like=np.zeros_like,
        minimum=np.minimum,
        join=lambda x, y: np.stack([x, y], -1).view(Tile),
        inline_asm_elementwise=decoder(form),
        convert_layout=lambda x, layout: x,
        sum=lambda x, axis: np.sum(x, axis=axis).view(Tile),
        load=gather,
        static_range=range,
        pointer_type=lambda dtype: dtype,
        float32=np.float64,
        int32=np.dtype(np.int32),
        int16=np.int16,
        uint32=np.uint32,
        **{name: lambda *_: None for name in nothing},
    )
    names: dict[str, Any] = {
        "gl": gl,
        "tl": types.SimpleNamespace(load=gather, store=scatter, float32=np.float64),
        "gdc_wait": lambda: None,
        "gdc_launch_dependents": lambda: None,
        "mma_v2": lambda a, b, acc: (np.matmul(a, b) + acc).view(Tile),
        "__builtins__": __builtins__,
    }
    for module in (blocks, streaming):
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType):
                code, given = function.__code__, function.__defaults__
                names[name] = types.FunctionType(code, names, name, given)
    names["streaming_kernel"](**arguments)


def rows_of(values: np.ndarray, gap: int) -> tuple[Words, int]:
    """The rows of a matrix in memory, with ``gap`` elements of garbage between them."""
    rows, columns = values.shape
    stride = columns + gap
    memory = np.full(rows * stride - gap, 77, values.dtype)
    memory[np.arange(rows)[:, None] * stride + np.arange(columns)] = values
    memory = np.concatenate([memory, np.zeros(-len(memory) % 4, values.dtype)])
    return Words(memory), stride


@pytest.mark.parametrize(
    ("z", "m", "n", "k", "warps_n", "stages"),
    [
        (1, 16, 64, 1024, 1, 2), (1, 13, 50, 640, 2, 4), (1, 1, 33, 128, 1, 2),
        (3, 7, 40, 384, 2, 2), (1, 9, 33, 1024, 1, 4), (1, 8, 40, 2048, 2, 4),
        (1, 5, 33, 768, 1, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_arithmetic_addresses_masks(
    form: str, z: int, m: int, n: int, k: int, warps_n: int, stages: int, gated: bool
) -> None:
    config = StreamingConfig(
        BLOCK_M=8 if m <= 8 else 16, BLOCK_N=32, BLOCK_K=256, num_stages=stages,
        num_warps=2 * warps_n,
    )  # fmt: skip
    weight = {"int4": INT4, "int8": INT8}[form]
    size = {"batch": z, "m": m, "n": n, "k": k, "b": weight}
    problem = replace(DECODE, **size, bias=BF16, residual=ROW, scaled=True)
    problem = replace(problem, epilogue=parse("swiglu")) if gated else problem
    (build,) = Streaming().builds(problem, config)
    random = np.random.default_rng(n)
    width, groups = problem.width, k // 128 if form == "int4" else 1
    a = random.integers(-40, 40, (z * m, k)).astype(np.int16)
    if form == "int4":
        codes = random.integers(0, 256, (z * width, k // 2)).astype(np.uint8).view(np.int8)
        nibbles = np.stack([codes & 15, (codes >> 4) & 15], -1).reshape(z * width, k)
        values = nibbles.astype(np.float64) - 8
    else:
        codes = random.integers(-128, 128, (z * width, k)).astype(np.int8)
        values = codes.astype(np.float64)
    scale = random.standard_normal((z * width, groups))
    values *= scale.repeat(k // groups, axis=1)
    a_ptr, a_stride = rows_of(a, 8)
    b_ptr, b_stride = rows_of(codes, 16)
    bias, residual = random.standard_normal(width), random.standard_normal((z * m, n))
    out = np.full(z * m * (n + 8), np.nan)
    given = {
        "a_ptr": a_ptr, "b_ptr": b_ptr, "bias_ptr": Pointer(bias),
        "residual_ptr": Pointer(residual.ravel()), "out_ptr": Pointer(out), "M": m, "N": n, "K": k,
        "stride_am": a_stride, "stride_bn": b_stride, "stride_rm": n, "stride_om": n + 8,
        "stride_az": m * a_stride, "stride_bz": width * b_stride, "stride_rz": m * n,
        "stride_oz": m * (n + 8), "stride_bias": 1, "alpha": -0.5,
        "b_scale_ptr": Pointer(scale.ravel()), "stride_bsz": width * groups, "stride_bsk": 1,
        "stride_bsn": groups,
    }  # fmt: skip
    epilogue = (lambda gate, up: gate * up) if gated else np.abs
    constants = {**build.constants, "EPILOGUE": epilogue}
    arguments = {
        name: constants.get(name, given.get(name)) for name in streaming.streaming_kernel.arg_names
    }
    for program in itertools.product(*map(range, build.grid)):
        run_program(arguments, form, program)
    out = out.reshape(z, m, n + 8)
    products = a.reshape(z, m, k) @ values.reshape(z, width, k).swapaxes(1, 2)
    finished = -0.5 * products + bias
    expected = epilogue(finished[..., :n], finished[..., n:]) if gated else np.abs(finished)
    np.testing.assert_allclose(out[:, :, :n], expected + residual.reshape(z, m, n))
    assert np.isnan(out[:, :, n:]).all()


# -- which lane holds what ----------------------------------------------------------------


def held(layout: gl.DistributedLinearLayout) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """The places in a tensor that each lane of each warp holds, by ``(warp, lane)``."""

    def sums(bases: list[list[int]]) -> list[np.ndarray]:
        found = [np.zeros(len(layout.shape), int)]
        for base in bases:
            found += [each ^ np.array(base) for each in found]
        return found

    warps, lanes, registers = map(sums, (layout.warp_bases, layout.lane_bases, layout.reg_bases))
    return {
        (w, lane): [tuple(map(int, warps[w] ^ lanes[lane] ^ each)) for each in registers]
        for w, lane in itertools.product(range(len(warps)), range(len(lanes)))
    }


@pytest.mark.parametrize("weight", [INT4, INT8, FP8], ids=["int4", "int8", "fp8"])
@pytest.mark.parametrize("m", [1, 16])
def test_lanes_hold_the_values_that_they_multiply(weight: Operand, m: int) -> None:
    problem = replace(DECODE, m=m, b=weight)
    for config in Streaming().configs(problem):
        (build,) = Streaming().builds(problem, config)
        words, pairs = build.constants["WORDS"], build.constants["PAIRS"]
        of_words, of_pairs = held(words), held(pairs)
        everything = set(np.ndindex(*words.shape))
        assert sorted(itertools.chain(*of_words.values())) == sorted(everything)
        assert list(of_words) == list(of_pairs)
        for w in range(config.num_warps):
            part = w // config.warps_n  # of K
            assert sorted(itertools.chain(*(of_pairs[w, lane] for lane in range(32)))) == [
                (part, *place) for place in np.ndindex(*pairs.shape[1:])
            ]
            for lane in range(32):  # as mma.m16n8k16 has it: four lanes share a row
                assert {(k, row % 8) for k, row, _ in of_words[w, lane]} == {(part, lane // 4)}
                assert {(k, row % 8) for k, _, row in of_pairs[w, lane]} == {(part, lane // 4)}


@pytest.mark.parametrize(
    ("weight", "rows", "pieces"),
    [(INT4, 8, 1), (INT4, 16, 2), (INT8, 8, 1), (INT8, 16, 1), (FP8, 16, 1)],
)
def test_lanes_of_16_rows_read_4_bits_in_both_halves_of_a_step(
    weight: Operand, rows: int, pieces: int
) -> None:
    problem = replace(DECODE, m=rows, b=weight)
    configs = [each for each in Streaming().configs(problem) if rows == each.BLOCK_M]
    assert configs
    for config in configs:
        (build,) = Streaming().builds(problem, config)
        assert build.constants["PIECES"] == pieces


# -- what the compiler makes of it --------------------------------------------------------


def compiled(sm: int) -> list[dict[str, Any]]:
    kernel, lines = Streaming(), []
    half = Operand(FP16)
    problems = {
        "int4": DECODE,
        "one row": replace(DECODE, m=1, k=14336),
        "int8": replace(DECODE, b=INT8, a=half, out=half, n=4099),
        "gated": replace(DECODE, epilogue=parse("swiglu"), bias=BF16),
    }
    if sm >= 90:
        problems["fp8"] = replace(DECODE, b=FP8)
    for name, problem in problems.items():
        problem = replace(problem, device=DEVICES[sm])
        for config in kernel.configs(problem)[:: 4 if sm == 90 else 9]:
            (build,) = kernel.builds(problem, config)
            result = build.compile_for(GPUTarget("cuda", sm, 32))
            ptx = result.asm["ptx"]
            loads = re.findall(r"ld\.global\S*", ptx)
            line = {"name": name, "config": config.to_json(), "shared": result.metadata.shared}
            line |= usage(result.asm["cubin"])
            line |= {
                "claimed": config.shared_memory(problem),
                "streamed": [load for load in loads if "evict_first" in load],
                "through": len(re.findall(r"ldmatrix|cp\.async", ptx)),
            }
            lines.append(line)
    return lines


@pytest.mark.parametrize("sm", DEVICES)
@pytest.mark.slow
def test_words_go_from_memory_to_the_tensor_cores(sm: int, uninterpreted: Uninterpreted) -> None:
    lines = uninterpreted(compiled, sm)
    assert {line["name"] for line in lines} >= {"int4", "one row", "int8", "gated"}
    for line in lines:
        assert line["streamed"]
        halves = line["name"] in ("int4", "gated")  # a lane has words of both halves of a step
        width = ".v2.b32" if halves else ".v4.b32"
        assert all(width in load for load in line["streamed"]), line
        assert line["through"] == 0, line
        assert line["STACK"] + line["LOCAL"] == 0, line
        assert line["shared"] <= line["claimed"], line
