"""Limits of the Triton kernels: addresses at the ends of operands, and estimates of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_skinny import DECODE
from test_triton_kernels import KERNELS, TILE, TOLERANCE, ask, interpreted, problem_of, run
from tmm_triton import flags, operands, plugin, reduction_order, tile_anatomy
from tmm_triton.flags import Counters
from tmm_triton.gathered import Gathered, gathered
from tmm_triton.hopper.config import Constants
from tmm_triton.hopper.operand_layout import described
from tmm_triton.hopper.search_space import configs as hopper_configs
from tmm_triton.hopper.warp_specialized import WarpSpecialized
from tmm_triton.operands import Convention, TileConfig, Zeros
from tmm_triton.partials import MOST_WORKSPACE, reduction
from tmm_triton.persistent import Persistent, PersistentConfig
from tmm_triton.ragged import each
from tmm_triton.realigned import Misaligned, Realigned, bind_copy, copy_build
from tmm_triton.roofline import resident, times_us
from tmm_triton.skinny import Skinny, SkinnyConfig
from tmm_triton.split_k import SplitK, SplitKConfig
from tmm_triton.triton_kernel import _with_fewer_stages, proposed
from triton import language as tl
from triton.runtime import interpreter

import tmm_core
from tmm_core import Groups, Machine, Operand, Port, Problem, Resources, Scale
from tmm_core.epilogues import parse
from tmm_core.triton.interpreted import _mend, _quicken

FP16 = torch.float16
EIGHT = {"a": Operand(torch.float8_e4m3fn), "b": Operand(torch.float8_e4m3fn, "col")}
#: The number of elements before and after an operand that no kernel may access.
MARGIN = 4096


class Fences:
    """Records the interpreter's accesses outside of the operands."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.memory: list[torch.Tensor] = []
        self.stray: list[str] = []

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = FP16) -> torch.Tensor:
        """A matrix whose rows start at multiples of 16 bytes, with no memory after its last row."""
        vector = 16 // dtype.itemsize
        stride = -(-columns // vector) * vector
        count = (rows - 1) * stride + columns
        memory = torch.full((MARGIN + count + MARGIN,), float("nan"), dtype=dtype)
        self.memory.append(memory)
        view = memory[MARGIN:].as_strided((rows, columns), (stride, 1))
        view.normal_(generator=torch.Generator().manual_seed(rows + columns))
        self.ranges.append((view.data_ptr(), view.data_ptr() + count * dtype.itemsize))
        return view

    def check(self, kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses, inside = np.broadcast_arrays(pointers.data, mask)
        touched = addresses[inside.astype(bool)].astype(np.int64)
        for start, end in self.ranges:
            far = MARGIN * 2
            near = (touched > start - far) & (touched < end + far)
            if (near & ((touched < start) | (touched + size > end))).any():
                self.stray.append(kind)


@pytest.mark.parametrize("batch", [1, 3])
def test_no_kernel_has_more_programs_than_tiles(batch: int) -> None:
    """A persistent kernel has fewer."""
    instance, seen = ask(300, 2664, 640, batch=batch), set()
    for kernel in map(plugin.load, plugin.KERNELS):
        reasons = [each for each in kernel.reasons_against(instance) if "driver" not in each]
        for config in [] if reasons else [*kernel.configs(instance)][:4]:
            programs = math.prod(kernel.builds(instance, config)[0].grid)
            tiles = kernel.anatomy(instance, config).tiles
            persistent = kernel.name in ("triton.persistent", "triton.warp_specialized")
            assert programs <= tiles if persistent else programs == tiles, (kernel.name, config)
            seen.add(kernel.name)
    assert {"triton.naive", "triton.grouped", "triton.split_k", "triton.persistent"} <= seen


def test_two_small_programs_share_an_sm() -> None:
    instance = ask(3000, 2664, 640)
    config = PersistentConfig(**TILE, GROUP_M=4, SUBTILE=1, FLATTEN=False)
    taken = config.shared_memory(instance)
    for warps, memory, programs in ((4, 2 * taken, 2), (4, 2 * taken - 1, 1), (8, 2 * taken, 1)):
        device = replace(instance.device, sm_count=7, shared_memory=memory, interpreted=False)
        [build] = Persistent().builds(
            replace(instance, device=device), replace(config, num_warps=warps)
        )
        assert build.grid == (7 * programs, 1, 1)


@interpreted
def test_the_interpreter_does_no_work_whose_result_it_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overflow checks and listing members took half of a launch."""
    _mend()
    options = interpreter.interpreter_builder.options
    assert (options.sanitize_overflow, options.debug) == (False, False)
    listed: list[Any] = []
    monkeypatch.setattr(interpreter.inspect, "getmembers", lambda *of: listed.append(of) or [])
    kernel = next(iter(KERNELS))
    run(kernel, KERNELS[kernel], torch.randn(5, 7), torch.randn(7, 6), epilogue="silu")
    assert not listed


@dataclass(frozen=True)
class InterpreterOptions:
    sanitize_overflow: bool
    debug: bool


@pytest.mark.parametrize(("debug", "kept"), [(True, True), (False, False)])
def test_overflow_checks_that_were_asked_for_stay(debug: bool, kept: bool) -> None:
    builder = SimpleNamespace(options=InterpreterOptions(True, debug))
    _quicken(SimpleNamespace(interpreter_builder=builder))
    assert builder.options == InterpreterOptions(kept, debug)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fences]:
    _mend()  # wraps load and store, once in a process
    made, builder = Fences(), interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store

    def loading(ptrs: Any, mask: Any, *rest: Any, **hints: Any) -> Any:
        made.check("load", ptrs, mask.data)
        return load(ptrs, mask, *rest, **hints)

    def storing(ptrs: Any, value: Any, mask: Any, *rest: Any, **hints: Any) -> Any:
        made.check("store", ptrs, mask.data)
        return store(ptrs, value, mask, *rest, **hints)

    monkeypatch.setattr(builder, "create_masked_load", loading)
    monkeypatch.setattr(builder, "create_masked_store", storing)
    yield made
    assert not made.stray, f"{made.stray[0]} outside an operand"


AHEAD = SplitKConfig(**TILE | {"num_stages": 1}, SPLIT_K=3, SWAP=True)
CONFIGS = [*KERNELS.items(), (SplitK(), AHEAD), (SplitK(), replace(AHEAD, SPLIT_K=1))]


@interpreted
@pytest.mark.parametrize("size", [(37, 29, 51), (33, 16, 48), (1, 40, 16)], ids=str)
@pytest.mark.parametrize(("kernel", "config"), CONFIGS, ids=lambda of: getattr(of, "name", ""))
@pytest.mark.slow(quick=6)
def test_nothing_is_accessed_outside_an_operand(
    kernel: Any, config: Any, size: tuple[int, int, int], fences: Fences
) -> None:
    """Even unused loads must stay inside: the next page may not be mapped."""
    m, n, k = size
    a, b = fences.matrix(m, k), fences.matrix(k, n)
    out, residual = fences.matrix(m, n), fences.matrix(m, n)
    problem = problem_of(a, b, out, residual=residual)
    kernel.bind(problem, config)(a, b, None, residual, 1.0, out)
    expected = a.double() @ b.double() + residual.double()
    assert (out.double() - expected).norm() < TOLERANCE[FP16] * expected.norm()


@interpreted
def test_a_read_past_the_fence_is_detected(fences: Fences) -> None:
    """A kernel that is given one row too many reads it."""
    a, b, out = fences.matrix(4, 16), fences.matrix(16, 16), fences.matrix(4, 16)
    kernel, config = next(iter(KERNELS.items()))
    problem = replace(problem_of(a, b, out), m=5)
    kernel.bind(problem, config)(a, b, None, None, 1.0, out)
    assert {*fences.stray} == {"load", "store"}
    fences.stray.clear()


# -- estimates ----------------------------------------------------------------------------


def test_a_batch_fills_a_gpu_as_one_product_does() -> None:
    """Eight products of 512 columns read as much as one of 4096, with as many programs."""
    config = Skinny().configs(DECODE)[0]
    one = Skinny().estimate_us(DECODE, config)
    eight = Skinny().estimate_us(replace(DECODE, n=512, batch=8), config)
    assert one <= eight < 1.1 * one


def test_partial_sums_are_traffic_from_two_splits_on() -> None:
    """Each is written and read in fp32."""
    problem = ask(4096, 4096, 4096)
    moving = {n: times_us(problem, AHEAD, splits=n, reach=0.8)["memory"] for n in (1, 2, 3)}
    assert moving[1] == pytest.approx(Machine.of(problem.device).moving_us(problem.bytes))
    sums = Machine.of(problem.device).moving_us(problem.bytes + 8 * 2 * problem.m * problem.n)
    assert moving[2] == pytest.approx(sums)
    assert moving[3] > moving[2] > moving[1]


@pytest.mark.parametrize("scaled", ["a", "b", "ab"])
def test_scales_along_k_take_time_in_each_step(scaled: str) -> None:
    """Steps of half the length take twice as much of it; scales of whole rows take none."""
    eight = ask(dtype=torch.float8_e4m3fn, out=Operand(torch.bfloat16))

    def busy(group: int, step: int) -> float:
        scale = Scale((1, group))
        problem = replace(eight, **{x: replace(getattr(eight, x), scale=scale) for x in scaled})
        config = replace(AHEAD, BLOCK_K=step)
        return times_us(problem, config, splits=1, reach=0.8)["tensor cores"]

    row, long, short = busy(0, 64), busy(128, 64), busy(128, 32)
    assert row < long < short
    assert short - row == pytest.approx(2 * (long - row))


def test_registers_hold_parts_from_two_parts_on() -> None:
    """With several parts, registers also hold addresses of parts and the sum of earlier parts."""
    problem, tile = ask(), TILE | {"BLOCK_N": 64}
    plain = TileConfig(**tile).registers(problem)
    split = [SplitKConfig(**tile, SPLIT_K=n, SWAP=False).registers(problem) for n in (1, 2, 3)]
    assert plain == split[0] < split[1] == split[2]
    more: dict[str, Any] = {**tile, "GROUP_M": 1, "SUBTILE": 1, "FLATTEN": False}
    summed = [PersistentConfig(**more, PARTS=n).registers(problem) for n in (1, 2, 3)]
    assert plain == summed[0] < summed[1] == summed[2]
    # A subtile's part of the residual is in registers, not the whole tile's.
    halves = [PersistentConfig(**more | {"PARTS": 1, "SUBTILE": n}) for n in (1, 2)]
    residual = replace(problem, residual=problem.out)
    whole, half = (each.registers(residual) - each.registers(problem) for each in halves)
    assert whole == 2 * half > 0


def test_rows_of_a_box_that_are_not_there_take_time() -> None:
    """A box with fewer valid rows takes longer, although fewer are read and stored."""
    config = WarpSpecialized().default_config(ask(64, 4096, 4096))
    times = [WarpSpecialized().estimate_us(ask(m, 4096, 4096), config) for m in (36, 50, 64)]
    assert times[0] > times[1] + 0.5 > times[2] + 1


def test_a_residual_and_an_activation_prolong_the_end_of_a_tile_alike() -> None:
    """By half of its time; both together take no longer than one."""
    plain, kernel = ask(8192, 8192, 16384), WarpSpecialized()
    residual = replace(plain, residual=plain.out)
    config = kernel.default_config(residual)
    ends = [
        kernel.estimate_us(each, config)
        for each in (plain, residual, replace(plain, epilogue=parse("silu")),
                     replace(residual, epilogue=parse("silu")))
    ]  # fmt: skip
    longer = ends[2] - ends[0]
    assert longer > 0.2
    assert ends[1] - ends[0] == pytest.approx(longer, rel=0.1)
    assert ends[3] == ends[1]


def test_warps_that_sum_other_parts_have_another_arithmetic() -> None:
    def arithmetic(warps: int, step: int) -> str | None:
        config = SkinnyConfig(BLOCK_M=16, BLOCK_N=16, BLOCK_K=step, num_stages=2, num_warps=warps)
        return Skinny().arithmetic(DECODE, config)

    assert arithmetic(4, 512) != arithmetic(4, 1024)  # each warp sums 128 values at a time, or 256
    assert arithmetic(2, 512) != arithmetic(4, 512)
    assert arithmetic(1, 256) == arithmetic(1, 512)  # one warp sums all values, in the same order


# -- split-K ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [64, 200, 1000])
def test_every_range_of_k_has_a_step(k: int) -> None:
    kernel = SplitK()
    for problem in (ask(16, 512, k), ask(16, 512, k, batch_invariant=True)):
        for config in kernel.configs(problem):
            assert -(-k // config.BLOCK_K) >= config.SPLIT_K


def test_partial_sums_of_every_config_fit_the_workspace() -> None:
    """In batch-invariant mode the number of parts does not fall as M grows."""
    kernel = SplitK()
    problem = ask(8192, 8192, 65536, batch_invariant=True)
    for config in kernel.configs(problem):
        assert kernel.workspace_bytes(problem, config) <= MOST_WORKSPACE
    assert kernel.workspace_bytes(replace(problem, batch=3), replace(AHEAD, SPLIT_K=2)) == (
        3 * kernel.workspace_bytes(problem, replace(AHEAD, SPLIT_K=2))
    )


def test_an_operand_leaves_the_l2_first_where_no_other_program_reads_it() -> None:
    """Rows of b are read by every row of tiles, columns of a by every column."""

    def once(m: int, n: int) -> tuple[bool, bool]:
        main, *_ = SplitK().builds(ask(m, n, 4096), replace(AHEAD, BLOCK_N=64))
        return main.constants["A_ONCE"], main.constants["B_ONCE"]

    assert once(32, 64) == (True, True)
    assert once(33, 64) == (True, False)
    assert once(32, 65) == (False, True)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_scales_are_applied_to_a_whole_sum_and_to_one_in_parts(splits: int) -> None:
    a, b = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((5, 64), (64, 32)))
    b = b.T.contiguous().T
    scale_a, scale_b = torch.rand(5, 1) + 0.5, torch.rand(1, 32) + 0.5
    config = SplitKConfig(**TILE, SPLIT_K=splits, SWAP=False).to_json()
    y = tmm_core.matmul(
        a, b, scale_a=scale_a, scale_b=scale_b, kernel="triton.split_k", config=config,
        out_dtype=torch.float32,
    )  # fmt: skip
    expected = (a.float() * scale_a) @ (b.float() * scale_b)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


# -- copies of misaligned operands --------------------------------------------------------


def misaligned(rows: int, columns: int, **fields: Any) -> Misaligned:
    operand = Operand(torch.bfloat16, aligned=False, **fields)
    (found,) = Misaligned.of(replace(ask(rows, 64, columns), a=operand))
    return found


def test_rows_of_a_copy_have_the_shortest_aligned_length() -> None:
    assert [misaligned(8, k).pitch for k in (1, 63, 64, 65, 128)] == [64, 64, 64, 128, 128]


@pytest.mark.parametrize("k", [1, 40, 256, 4097, 70000])
def test_the_tiles_of_a_copy_cover_it(k: int) -> None:
    matrix = misaligned(37, k)
    rows, columns = matrix.tile
    assert rows >= 1
    assert rows * columns * 2 <= 8192
    assert matrix.tiles == -(-37 // rows) * -(-matrix.pitch // columns)


def test_a_copy_is_wide_by_its_own_rows() -> None:
    """Rows of the copy are longer than rows of the operand."""
    rows = 2**25 + 1
    assert not misaligned(rows - 1, 63).copied.wide
    assert misaligned(rows, 63).copied.wide


@interpreted
def test_a_single_row_of_any_stride_is_copied() -> None:
    a = torch.randn(64).to(FP16)[1:52].as_strided((1, 51), (2**40, 1), 1)
    b = torch.randn(51, 16, dtype=FP16)
    problem = problem_of(a, b, torch.empty(1, 16, dtype=FP16))
    copied, same = bind_copy(problem)(a, b)
    assert torch.equal(copied, a)
    assert same is b
    assert Operand.of(copied).aligned
    # Compiled, a stride of 32 bits could not take this one.
    assert copy_build(problem).constants["x_stride"] == 0


def test_a_copied_weight_is_not_read_before_it_is_copied() -> None:
    """A weight that is not copied may be read early; the kernel waits for the copy of a."""
    whole = Operand(torch.bfloat16)
    odd = replace(whole, aligned=False)
    problem = ask(16, 4096, 4096)
    for a, b, early in ((odd, problem.b, True), (whole, replace(problem.b, aligned=False), False)):
        found = Realigned().configs(replace(problem, a=a, b=b))
        assert any(getattr(each.config, "early", "") for each in found) is early


# -- the search of the Hopper kernel ------------------------------------------------------


@pytest.mark.parametrize("n", [4096, 14336])
@pytest.mark.parametrize("m", [1, 64, 128, 129, 4096])
def test_the_number_of_proposed_configs_is_limited(m: int, n: int) -> None:
    for promised in (False, True):
        problem = replace(ask(m, n, 4096), static_weights=promised)
        found = list(hopper_configs(problem))
        assert 1 <= len(found) <= 16
        assert len(set(found)) == len(found)
        # If reading the weight takes most of the time, it may begin before the last launch ends.
        assert any(config.early for config in found) is (m <= 128)
        assert len(list(hopper_configs(replace(problem, batch_invariant=True)))) <= 16 + 8


def test_a_band_of_tiles_does_not_exceed_the_result() -> None:
    for m in (1, 200, 1000):
        for config in hopper_configs(ask(m, 8192, 8192)):
            assert max(1, -(-m // config.BLOCK_M)) >= config.GROUP_M


@pytest.mark.parametrize("count", [1, 3, 130])
def test_each_block_of_the_hopper_kernel_has_a_table_of_all_groups(count: int) -> None:
    plain = ask(4096, 4096)
    for along, bytes_each in (("m", 4), ("k", 0)):
        layout = {"a": "col", "b": "row"} if along == "k" else {"a": "row", "b": "col"}
        operands = {name: replace(getattr(plain, name), layout=layout[name]) for name in layout}
        grouped = replace(plain, groups=Groups(count, along), **operands)
        for config in hopper_configs(grouped):
            blocks = WarpSpecialized().builds(grouped, config)[0].grid[0]
            assert WarpSpecialized().workspace_bytes(grouped, config) == bytes_each * blocks * count


@pytest.mark.parametrize("n", [1000, 1024, 1032])
def test_every_strip_of_a_row_has_a_place_in_the_workspace(n: int) -> None:
    """The last tile, half beyond the result, has its place too; no other place exists."""
    plain = ask(4096, n, 4096)
    row = Port("most", "row", reduce="max", of=torch.abs)
    reduced = replace(plain, epilogue=replace(plain.epilogue, outputs=(row,)))
    for config in hopper_configs(reduced):
        before, after = (WarpSpecialized().workspace_bytes(p, config) for p in (plain, reduced))
        strips, rest = divmod(after - before, 4 * plain.m)
        assert rest == 0
        assert 0 <= strips * (config.BLOCK_N // config.subtiles) - n < config.BLOCK_N


def test_all_registers_of_a_block_fit_an_sm() -> None:
    """Triton gives a block's threads equal shares in whole warpgroups, which then exchange them.
    ptxas refuses a wgmma of more than 128 columns if the shares are 128 registers."""
    problems = [ask(4096, 4096), ask(333, 4096), ask(16, 4096), ask(4096, 4096, epilogue="swiglu")]
    problems += [ask(4096, 4095, aligned=False), ask(16, 4096, 4095, aligned=False)]
    seen = set()
    for problem in problems:
        for config in hopper_configs(problem):
            constants = Constants.of(problem, config)
            warps = [constants.num_warps, *constants.worker_warps]
            threads = -(-32 * sum(warps) // 128) * 128
            share = 65536 // threads // 8 * 8
            roles = zip(constants.worker_warps, constants.worker_registers, strict=True)
            spent = sum(32 * count * registers for count, registers in roles)
            assert spent + 32 * constants.num_warps * 24 <= share * threads <= 65536
            assert constants.mma_n <= (128 if share <= 128 else 256)
            seen.add((len(warps), share))
    assert len(seen) > 2


@pytest.mark.parametrize(("m", "tiles"), [(1, 1), (64, 1), (65, 2), (256, 4)])
def test_programs_of_split_k_go_down_all_tiles_of_m(m: int, tiles: int) -> None:
    a, b, out = torch.empty(m, 64), torch.empty(64, 32), torch.empty(m, 32)
    problem = problem_of(a.half(), b.half(), out.half())
    config = replace(SplitK().default_config(problem), BLOCK_M=64)
    found = SplitK().anatomy(problem, config)
    assert found is not None
    assert found.group_m == tiles


# -- what a tile takes ---------------------------------------------------------------------

WIDE = TileConfig(BLOCK_M=64, BLOCK_N=128, BLOCK_K=32, num_stages=3, num_warps=4)
LOOSE = Operand(torch.bfloat16, aligned=False)
INT4 = Operand(torch.uint8, "col", format="int4", scale=Scale.parse("row"))
GROUPED = replace(INT4, scale=Scale((1, 32)))
E4M3 = torch.float8_e4m3fn


def on(capability: tuple[int, int], **fields: Any) -> Problem:
    """A problem for a GPU of this capability."""
    return ask(device=replace(ask().device, capability=capability), **fields)


@pytest.mark.parametrize(
    ("problem", "memory", "registers"),
    [
        (ask(), 3 * (4096 + 8192), 64),
        (ask(epilogue="swiglu"), 3 * (4096 + 16384), 128),
        (ask(residual=Operand(torch.bfloat16)), 3 * (4096 + 8192), 64 + 64),
        (ask(a=LOOSE), 3 * (4096 + 8192), 64 + 32),
        (ask(b=LOOSE), 3 * (4096 + 8192), 64 + 64),
        (ask(a=LOOSE, b=LOOSE, epilogue="swiglu"), 3 * (4096 + 16384), 128 + 32 + 128),
        (ask(dtype=torch.float32), 3 * (8192 + 16384), 64),
        # Two values per byte; the unpacked 16-bit values need memory in addition to the stages.
        (ask(b=INT4), 3 * (4096 + 2048) + 8192, 64),
        (ask(b=INT4, epilogue="swiglu"), 3 * (4096 + 4096) + 16384, 128),
        (ask(b=GROUPED), 3 * (4096 + 2048) + 8192, 128),
        (on((9, 0), dtype=E4M3), 3 * (2048 + 4096), 128),
        (on((8, 9), dtype=E4M3), 3 * (2048 + 4096), 64),
        (on((10, 0), dtype=E4M3), 3 * (2048 + 4096), 64),
        (on((12, 0), dtype=E4M3), 3 * (2048 + 4096), 64),
        (on((9, 0), b=INT4), 3 * (4096 + 2048) + 8192, 64),
        (on((10, 0), b=INT4), 3 * (4096 + 2048) + 8192, 128),
        (on((12, 0), b=INT4), 3 * (4096 + 2048) + 8192, 128),
    ],
)
def test_memory_and_registers_of_a_tile(problem: Problem, memory: int, registers: int) -> None:
    assert WIDE.shared_memory(problem) == memory
    assert WIDE.registers(problem) == registers


def test_sums_over_k_that_other_kernels_share() -> None:
    """Kernels share an order if they use Hopper's 16-bit tensor cores and equal ranges of steps."""

    def names(problem: Problem) -> list[str | None]:
        return [reduction_order.summed(problem, splits, 32) for splits in (1, 2, 3)]

    order = "sm90-k16"
    assert names(ask(k=192)) == [order, f"{order}/split2", f"{order}/split3"]
    assert names(ask(k=64)) == [order, f"{order}/split2", None]
    assert names(ask(k=65)) == [order, None, None]
    others = [on((8, 0)), on((10, 0)), ask(dtype=torch.float32), ask(dtype=E4M3)]
    cpu = replace(ask().device, type="cpu")
    for other in (*others, ask(device=cpu)):
        assert names(other) == [None] * 3
    splits = {k: reduction_order.equal_splits(ask(k=k)) for k in (1023, 1024, 1040, 2048, 4096)}
    assert splits == {1023: (), 1024: (2,), 1040: (), 2048: (2, 4), 4096: (2, 4, 8)}
    assert reduction_order.equal_splits(on((8, 0))) == ()
    assert reduction_order.options(ask()) == {}
    assert reduction_order.options(ask(batch_invariant=True)) == {"enable_fp_fusion": False}
    assert reduction_order.options(ask(batch_invariant=True, dtype=torch.float32)) == {}


@pytest.mark.parametrize(
    ("n", "splits", "tile", "in_order"),
    [
        (4096, 2, (1, 1024, 2), True),
        (4096, 3, (1, 512, 4), True),
        (4096, 64, (1, 32, 64), True),
        (4096, 65, (1, 32, 64), False),
        (40, 3, (1, 64, 4), True),
        (41, 2, (1, 64, 2), True),
    ],
)
def test_partial_sums_are_added_in_tiles_of_a_row(
    n: int, splits: int, tile: tuple[int, int, int], in_order: bool
) -> None:
    """The order of partial sums does not change with M. Up to 64 are added at a time."""
    for invariant in (False, True):
        problem = ask(7, n, 4096, batch=3, batch_invariant=invariant)
        found = reduction(problem, splits, 7 * n * 3)
        constants = found.constants
        assert tuple(constants[x] for x in ("BLOCK_M", "BLOCK_N", "AHEAD")) == tile
        assert constants["IN_ORDER"] is (invariant and in_order)
        assert constants["OVERLAP"] is found.options["launch_pdl"] is True
        assert found.grid == (7, -(-n // tile[1]), 3)
        # The distance between two parts is a multiple of the row's width.
        assert found.divisible.get("apart") == (8 if n % 8 == 0 else None)
    older = reduction(on((8, 0)), 2, 4096 * 4096)
    assert older.constants["OVERLAP"] is older.options["launch_pdl"] is False


def test_rows_that_an_index_gathers_are_copied() -> None:
    """The kernel copies whole multiples of 16 bytes into memory of its own."""
    kernel, groups = Gathered(), Groups(4, "m", torch.int64)
    rows = ask(4096, 4096, 4096, groups=groups)
    assert not kernel.reasons_against(rows)
    for change, reason in (
        ({"groups": None}, "is for rows that an index gathers"),
        ({"groups": Groups(4, "m")}, "is for rows that an index gathers"),
        ({"a": Operand(torch.bfloat16, "col")}, "not contiguous or not aligned to 16 bytes"),
        ({"a": LOOSE}, "not contiguous or not aligned to 16 bytes"),
        ({"k": 4100}, "are not multiples of 16 bytes"),
    ):
        changed: Any = change
        assert reason in "; ".join(kernel.declines(replace(rows, **changed)))
    assert not any("16 bytes" in why for why in kernel.declines(replace(rows, k=4104)))
    inner, config = WarpSpecialized(), kernel.default_config(rows)
    product = gathered(rows)
    own = kernel.workspace_bytes(rows, config) - inner.workspace_bytes(product, config)
    assert own == 4096 * 4096 * 2
    more = kernel.estimate_us(rows, config) - (inner.estimate_us(product, config) or 0)
    assert more > 2 * own / Machine.of(rows.device).memory
    assert product.groups == Groups(4, "m")
    for m, wide in ((2**19 - 1, False), (2**19, True)):
        assert gathered(replace(rows, m=m)).a == Operand(torch.bfloat16, "row", True, wide)
    copy, *_ = kernel.builds(replace(rows, k=24), config)
    assert (copy.constants["COLS"], copy.divisible["K"]) == (32, 8)


@pytest.mark.parametrize(
    ("kind", "value", "bits"),
    [("int32", 1.5, 1), ("float64", 1.5, 1.5), ("float16", -2.5, -2.5), ("bfloat16", 1.5, 0x3FC0)],
)
@interpreted
def test_the_interpreter_casts_bf16_by_its_value(kind: str, value: float, bits: float) -> None:
    _mend()
    data = torch.tensor([value], dtype=torch.bfloat16).view(torch.int16).numpy().view("uint16")
    block = interpreter.TensorHandle(data, tl.bfloat16)
    found = interpreter.interpreter_builder.cast_impl(block, getattr(tl, kind))
    assert found.data.tolist() == [bits]


@pytest.mark.parametrize(("kind", "largest"), [("float8e4nv", 448.0), ("float8e5", 57344.0)])
@interpreted
def test_the_interpreter_rounds_to_8_bits_as_a_gpu_does(kind: str, largest: float) -> None:
    """Values out of range become the largest number of their sign. NaN stays NaN."""
    _mend()
    inf = float("inf")
    values = torch.tensor([1e30, -1e30, inf, -inf, 1.0625, -1.1875, float("nan")])
    block = interpreter.TensorHandle(values.numpy(), tl.float32)
    builder = interpreter.interpreter_builder
    stored = builder.create_fp_to_fp(block, getattr(tl, kind), None)
    for wide, dtype in ((tl.float32, np.float32), (tl.float16, np.float16)):
        numbers = builder.create_fp_to_fp(stored, wide, None)
        assert numbers.data.dtype == dtype
        assert numbers.dtype == wide
        found = numbers.data.tolist()
        assert found[:6] == [largest, -largest, largest, -largest, 1.0, -1.25]
        assert found[6] != found[6]


@pytest.mark.parametrize(
    ("registers", "warps", "programs"),
    [
        (1, 1, 32), (40, 1, 32), (41, 1, 31), (1, 4, 16), (8, 4, 16), (9, 4, 15), (231, 8, 1),
        (232, 16, 1), (104, 16, 1), (40, 8, 4),
    ],
)  # fmt: skip
def test_programs_that_an_sm_holds_by_registers_and_threads(
    registers: int, warps: int, programs: int
) -> None:
    """An SM has 65,536 registers, 2,048 threads and 32 blocks; a thread has 24 registers more."""
    config: Any = SimpleNamespace(num_warps=warps, registers=lambda problem: registers)
    assert resident(DECODE, config) == programs


# -- arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 16, 17, 100])
def test_a_single_row_has_a_stride_that_tma_reads(dtype: torch.dtype, columns: int) -> None:
    """The least multiple of 16 bytes."""
    made: Any = lambda t, shape, strides, block: strides  # noqa: E731
    _, value = described("a", Operand(dtype), 64, 64, "matrix", made)
    leading, one = value.describe(torch.empty(1, columns, dtype=dtype))
    assert one == 1
    assert leading * dtype.itemsize % 16 == 0
    assert columns <= leading < columns + 16 // dtype.itemsize
    assert value.describe(torch.empty(2, 512, dtype=dtype)) == [512, 1]


def test_a_stride_of_a_single_row_is_read_only_if_rows_are_gathered() -> None:
    """The kernel reads any row of ``a`` by an index, however few it computes."""
    one = replace(DECODE, m=1)
    groups = Groups(2, "m", a_index=torch.int64)
    shared = Convention(replace(one, groups=groups))
    assert shared.given["stride_am"][1] == ("a", 0)
    assert shared.constants["stride_om"] == 0
    for plain in (one, replace(one, groups=Groups(2, "m"))):
        shared = Convention(plain)
        assert shared.constants["stride_am"] == 0
        assert "stride_am" not in shared.given


def test_m_is_divisible_where_rows_are_along_it() -> None:
    row, col = Operand(torch.bfloat16), Operand(torch.bfloat16, "col")
    for a, out, vectors in ((row, row, False), (col, row, True), (row, col, True)):
        for m in (64, 65):
            problem = replace(DECODE, m=m, a=a, out=out)
            assert ("M" in Convention(problem).divisible) is (vectors and m == 64)


# -- what reports say of kernels -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "threads", "blocks"),
    [
        (0, 32, 32), (0, 64, 32), (0, 128, 16), (0, 1024, 2), (0, 2048, 1), (0, 4096, 1),
        (232448, 128, 1), (115712, 128, 2), (115713, 128, 1), (76000, 128, 3), (7000, 64, 29),
    ],
)  # fmt: skip
def test_blocks_that_an_sm_holds_at_once(shared: int, threads: int, blocks: int) -> None:
    assert tile_anatomy._at_once(DECODE, shared, threads) == 132 * blocks
    without = replace(DECODE, device=replace(DECODE.device, sm_count=0))
    assert tile_anatomy._at_once(without, shared, threads) == blocks


def test_the_anatomy_of_a_tile() -> None:
    problem = replace(DECODE, m=129, n=300, k=1000, batch=2)
    sizes = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 3, "num_warps": 4}
    config = SplitKConfig(**sizes, SPLIT_K=4, SWAP=False)
    found = SplitK().anatomy(problem, config)
    assert found is not None
    assert (found.block_m, found.block_n, found.block_k, found.group_m) == (64, 128, 64, 3)
    assert (found.tiles, found.steps) == (2 * 3 * 3 * 4, 4)
    assert found.shared_memory == config.shared_memory(problem) == 3 * 2 * 64 * (64 + 128)
    assert found.at_once == 132 * 3
    many = SplitK().anatomy(problem, replace(config, num_stages=1, num_warps=16))
    assert many is not None
    assert (many.shared_memory, many.at_once) == (found.shared_memory // 3, 132 * 2048 // 512)
    whole = PersistentConfig(**sizes, GROUP_M=4, SUBTILE=1, FLATTEN=False, PARTS=2)
    found = Persistent().anatomy(problem, whole)
    assert found is not None
    assert (found.group_m, found.tiles, found.steps, found.at_once) == (4, 18, 16, 132)


def test_resources_of_every_launch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str, **metadata: int) -> Any:
        compiled = SimpleNamespace(
            asm={"cubin": name.encode()}, metadata=SimpleNamespace(shared=7, **metadata)
        )
        fn = SimpleNamespace(__name__=name)
        return SimpleNamespace(fn=fn, compile_for=lambda target: compiled)

    monkeypatch.setattr(tile_anatomy, "interpreting", lambda: False)
    monkeypatch.setattr(
        tile_anatomy, "usage", lambda cubin: {"REG": len(cubin), "STACK": 8, "LOCAL": 16}
    )
    builds = [build("one", num_warps=4, total_num_warps=0), build("three", num_warps=8)]
    builds.append(build("warps", num_warps=4, total_num_warps=12))
    assert tile_anatomy.resources(DECODE, builds) == [
        Resources("one", 7, 4, 3, 24), Resources("three", 7, 8, 5, 24),
        Resources("warps", 7, 12, 5, 24),
    ]  # fmt: skip
    for device in (replace(DECODE.device, type="cpu"), replace(DECODE.device, cuda="hip 6.4")):
        with pytest.raises(RuntimeError, match="are not known"):
            tile_anatomy.resources(replace(DECODE, device=device), builds)
    monkeypatch.setattr(tile_anatomy, "interpreting", lambda: True)
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        tile_anatomy.resources(DECODE, builds)


def test_usage_is_read_from_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA 12 prints it. Spilled registers are local memory."""
    given = []

    def run(command: list[str], **how: Any) -> Any:
        given.append((command[:-1], Path(command[-1]).read_bytes()))
        assert how["check"]
        return SimpleNamespace(
            stdout="Resource usage:\n Common:\n  GLOBAL:0\n Function kernel:\n"
            "  REG:255 STACK:24 SHARED:1024 LOCAL:40 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0"
        )

    knobs = SimpleNamespace(nvidia=SimpleNamespace(cuobjdump=SimpleNamespace(path="/cuobjdump")))
    monkeypatch.setattr(tile_anatomy, "knobs", knobs)
    monkeypatch.setattr(tile_anatomy.subprocess, "run", run)
    assert tile_anatomy.usage(b"code") == {"REG": 255, "STACK": 24, "LOCAL": 40}
    assert given == [(["/cuobjdump", "--dump-resource-usage"], b"code")]


def test_each_stream_and_each_capture_has_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(capturing=False, stream=1, waits=0)
    zeros = torch.zeros

    def waited() -> Any:
        state.waits += 1
        return SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: zeros(count, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", waited)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(flags, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(Counters, "_captured", [])
    counters = Counters(5)
    assert state.waits == 1
    first = counters()
    assert (first.shape, first.dtype) == ((5,), torch.int32)
    assert counters() is first
    state.stream = 2
    second = counters()
    assert second is not first
    assert counters() is second
    state.capturing = True
    captured = [counters() for _ in range(66)]
    assert len({t.data_ptr() for t in (first, second, *captured)}) == 68
    assert all(t.shape == (5,) for t in captured)
    # Memory that is allocated during a capture belongs to the graph.
    assert [t.data_ptr() for t in Counters._captured] == [t.data_ptr() for t in captured[:64]]
    assert Counters(3)().shape == (3,)
    assert state.waits == 1


def test_counters_are_as_many_as_the_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "Counters", lambda count: ("counters", count))
    monkeypatch.setattr(operands.Build, "launch", lambda build, device: ("launch", device))
    build = operands.Build(None, {}, {}, values={"flags": Zeros(132), "M": 64}, grid=(3, 2, 1))
    step = build.step("cuda")
    assert (step.launch, step.grid) == (("launch", "cuda"), (3, 2, 1))
    assert step.arguments == {"flags": ("counters", 132), "M": 64}
    assert build.values["flags"] == Zeros(132)  # the build may be bound again


@pytest.mark.parametrize(
    ("m", "times", "batch", "rows"),
    [(3, 1, 3, 1), (0, 1, 1, 1), (8, 1, 8, 1), (9, 1, 8, 2), (64, 2, 8, 16), (9, 8, 8, 9)],
)
def test_the_mean_group_of_few_rows_has_one(m: int, times: int, batch: int, rows: int) -> None:
    """With fewer rows than groups, each row is a group."""
    mean = each(replace(DECODE, m=m, groups=Groups(8, "m")), times)
    assert (mean.batch, mean.m, mean.groups) == (batch, rows, None)


LEAST, MOST = (64, 32, 16, 3, 4), (128, 256, 512, 2, 8)


@pytest.mark.parametrize(
    ("fields", "along_k"),
    [
        ({}, (16, 512)), ({"a": Operand(FP16, aligned=False)}, (16, 512)),
        (EIGHT, (32, 512)),
        (EIGHT | {"a": replace(EIGHT["a"], aligned=False)}, (16, 512)),
        (EIGHT | {"b": replace(EIGHT["b"], aligned=False)}, (16, 512)),
        (dict.fromkeys("ab", Operand(torch.float32)) | {"tf32": True}, (16, 256)),
        (dict.fromkeys("ab", Operand(torch.float64)), (16, 512)),
    ],
)  # fmt: skip
def test_tiles_of_wider_and_narrower_elements(
    fields: dict[str, Any], along_k: tuple[int, int]
) -> None:
    problem = replace(DECODE, **fields)
    tiles = zip((LEAST, MOST), along_k, strict=True)
    assert proposed(problem, [LEAST, MOST]) == [(*t[:2], k, *t[3:]) for t, k in tiles]


def test_sums_without_tensor_cores_have_their_own_tiles() -> None:
    for device in (DECODE.device, replace(DECODE.device, interpreted=True)):
        problem = replace(DECODE, **dict.fromkeys("ab", Operand(torch.float32)), device=device)
        assert proposed(problem, [LEAST]) == proposed(problem, [MOST]) != [MOST]


def test_every_launch_of_a_call_is_compiled() -> None:
    """Otherwise a first call would compile the others, in a process that measures."""
    seen: list[Any] = []

    class Several(SplitK):
        def builds(self, problem: Problem, config: Any) -> Any:
            return [
                SimpleNamespace(compile_for=lambda target, i=i: seen.append((i, target.arch)))
                for i in range(3)
            ]

    config = SplitKConfig(**TILE, SPLIT_K=2, SWAP=False)
    Several().compile(ask(), config)
    assert seen == [(0, 90), (1, 90), (2, 90)]
    Several().compile(problem_of(*torch.ones(3, 16, 16)), config)  # interpreted
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("stages", "room", "left"), [(4, 0, 4), (4, -1, 3), (1, -1, 1), (2, -(10**9), 1)]
)
def test_stages_are_left_out_until_a_tile_fits(stages: int, room: int, left: int) -> None:
    """A block may use all of the shared memory; one stage is tried in any case."""
    config = SplitKConfig(**TILE | {"num_stages": stages}, SPLIT_K=2, SWAP=False)
    instance = ask()
    memory = config.shared_memory(instance) + room
    small = replace(instance, device=replace(instance.device, shared_memory=memory))
    assert _with_fewer_stages(small, config) == replace(config, num_stages=left)


def test_a_launch_is_compiled_ahead_with_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other options would be another function, and the first call would compile its own."""
    seen: list[Any] = []
    monkeypatch.setattr(
        operands, "compile_for", lambda target, src, **options: seen.append((src, options))
    )
    monkeypatch.setattr(operands, "source", lambda *given: given)  # is not of interpreted ones
    config = SplitKConfig(**TILE | {"num_warps": 8}, SPLIT_K=2, SWAP=False)
    for made in SplitK().builds(ask(), config):
        made.compile_for("target")  # type: ignore[arg-type]
        given = made.fn, made.types, made.constants, made.divisible
        assert seen.pop() == (given, made.options)
    assert SplitK().builds(ask(), config)[0].options["num_warps"] == 8
