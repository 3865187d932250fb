"""Groups in the Hopper kernel, without a Hopper GPU. Checks its source on a model of the block, its
compiled code, and what it proposes and declines."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from hopper_block import Descriptor, Pointer, Wrapped, run_block
from test_warp_specialized import (
    BF16,
    CONFIG,
    E4M3,
    FP32,
    H200,
    KERNEL,
    SCHEDULES,
    compiled,
    problem,
    tensor_map,
)
from tmm_triton import operands, ragged_tiles, triton_kernel
from tmm_triton.hopper import operand_layout, tile_shapes
from tmm_triton.hopper.config import Constants
from tmm_triton.hopper.hopper_kernel import warp_specialized_kernel
from tmm_triton.ragged import Ragged
from uninterpreted import Uninterpreted

from tmm_core import Groups, Operand, Problem
from tmm_core.triton import releases
from tmm_core.verify import random_inputs

#: Ends of groups, and the number of rows. Empty groups come first, in the middle and last. There
#: is one group, all are empty, or there are more groups than one pass over the table reads.
SIZES = [
    ((0, 5, 5, 6, 15, 15), 18),
    ((9,), 9),
    ((1, 3), 3),
    ((0, 0, 0), 5),
    (tuple(i // 29 for i in range(1, 291)), 11),
]


def constants(
    ragged: str, consumers: int, pingpong: bool, seed: int, stages: int, columns: int, **fields: Any
) -> Constants:
    rows = 2
    plain: dict[str, Any] = dict.fromkeys(
        ("A_COL", "B_COL", "GATED", "SCALED", "BIAS", "RESIDUAL", "FETCH", "POINTERS", "ZEROED"),
        False,
    )
    return Constants(
        BLOCK_M=rows if pingpong else rows * consumers, BLOCK_N=columns, BLOCK_K=2, GROUP_M=1,
        num_stages=stages, schedule="pingpong" if pingpong else "cooperative", consumers=consumers,
        num_warps=4, tail_splits=1, splits=1, evict_first=False, BATCHED=False, OUT_BYTES=2,
        A_ROWS=rows, PRIMED=1 + seed % stages,
        RAGGED=ragged, **{"A_SCALE": None, "B_SCALE": None, "IN_BYTES": 2, **plain, **fields},
    )  # fmt: skip


class Call:
    """A grouped product on the model.

    Args:
        seed: Of the numbers, and of the interleaving.
        ragged: Along what, ``"m"`` or ``"k"``.
        ends, total: The ends of groups, and the size of that dimension.
        extras: alpha, a bias of each group and a residual, which TMA loads with ``fetch``.
        indexed: Rows of the result are permuted, and each has a weight.
        offs: What the kernel reads instead of ``ends``.
        outer: Operands have scales of a k-step's values, which so many columns of b share.
    """

    def __init__(
        self, seed: int, ragged: str, ends: tuple[int, ...], total: int, *,
        m: int = 5, n: int = 10, k: int = 7, consumers: int = 2, pingpong: bool = False,
        stages: int = 3, subtiles: int = 2, programs: int = 3, layout: str = "",
        gated: bool = False, extras: bool = False, fetch: bool = False, pointers: bool = False,
        zeroed: bool = False, scales: str | None = None, columns: int = 4, indexed: bool = False,
        offs: tuple[int, ...] | None = None, outer: int = 0,
    ) -> None:  # fmt: skip
        layout = layout or ("nn" if ragged == "m" else "tn")
        self.ends, self.ragged, self.zeroed = ends, ragged, zeroed
        self.count, self.total = len(ends), total
        self.m, self.n, self.k = (total, n, k) if ragged == "m" else (m, n, total)
        self.c = constants(
            ragged, consumers, pingpong, seed, stages, columns, subtiles=subtiles,
            A_COL=layout[0] == "t", B_COL=layout[1] == "t", GATED=gated, SCALED=extras,
            BIAS=extras, RESIDUAL=extras and not indexed, FETCH=fetch, ZEROED=zeroed,
            POINTERS=pointers or indexed, SCATTERED=indexed, WEIGHTED=indexed,
            STORED=2 if indexed and seed % 2 else 1,
            A_SCALE=scales, B_SCALE=scales, IN_BYTES=1 if scales or outer else 2,
            A_GROUP=2 if outer else 0, B_GROUP=2 if outer else 0, B_OUTER=max(1, outer),
        )  # fmt: skip
        if outer and math.gcd(outer, n if gated else 0) % self.c.columns == 0:
            self.c = replace(self.c, ALIKE=True)
        random = np.random.default_rng(seed)
        width = 2 * n if gated else n
        stack = (self.count,) if ragged == "k" else ()
        self.a = random.standard_normal((self.m, self.k))
        self.b = random.standard_normal((self.count, self.k, width))
        self.bias = random.standard_normal((self.count, width)) if extras else None
        given = extras and not indexed
        self.residual = random.standard_normal((*stack, self.m, n)) if given else None
        self.places = random.permutation(self.m) if indexed else np.arange(self.m)
        self.weights = random.random(self.m) + 0.5 if indexed else np.ones(self.m)
        by_row = scales == "row"
        self.scale_a = random.random((self.m if by_row else 1, 1)) + 0.5
        self.scale_b = random.random((self.count, width) if by_row else (1, 1)) + 0.5
        if outer:
            self.scale_a = random.random((self.m, -(-self.k // 2))) + 0.5
            self.scale_b = random.random((self.count, -(-self.k // 2), -(-width // outer))) + 0.5
        if ragged == "m":
            # Memory beyond the last group affects nothing.
            self.a[ends[-1] :] = np.nan
            if self.residual is not None:
                self.residual[ends[-1] :] = np.nan
        else:
            self.b = self.b[0]
            self.a[:, ends[-1] :] = np.nan
            self.b[ends[-1] :] = np.nan
        # Rows apart and rows after the last, so that what is stored outside is seen.
        self.memory = np.full((*(stack or (1,)), self.m + 2, n + 3), np.nan)
        self.out = self.memory[:, : self.m, :n]
        if ragged == "k":  # the host knows how many tiles there are
            tiles = self.count * -(-m // self.c.BLOCK_M) * -(-n // columns)
            programs = min(programs, tiles)
        self.programs, self.seed = programs, seed
        self.offs = np.array(offs or ends)
        self.table = np.full(programs * self.count, -1)

    def described(self, matrix: np.ndarray, box: list[int], letter: str, kind: str) -> Descriptor:
        if letter == "t":
            matrix, box = matrix.swapaxes(-1, -2), box[::-1]
        if kind != "clipped":
            return Descriptor(matrix, [1, *box] if kind == "stack" else box, self.c.IN_BYTES)
        assert matrix.ndim == 2
        if matrix.base is not self.memory:
            matrix = np.ascontiguousarray(matrix)
            flat, stride = matrix.ravel(), matrix.shape[1]
        else:
            flat, stride = self.memory.reshape(-1), self.memory.shape[-1]
        shape, strides = operand_layout.clipped(matrix.shape[1], stride)
        return Wrapped(flat, shape, strides, [1, 1, *box])

    def arguments(self) -> dict[str, Any]:
        c = self.c
        strip = [c.rows, c.width]
        known: dict[str, Any] = dict.fromkeys(warp_specialized_kernel.arg_names)
        letters = ["t" if col else "n" for col in (c.A_COL, c.B_COL)]
        known |= {
            "a_desc": self.described(self.a, [c.A_ROWS, c.BLOCK_K], letters[0], c.a_kind),
            "b_desc": self.described(self.b, [c.BLOCK_K, c.box_columns], letters[1], c.b_kind),
            "M": self.m, "N": self.n, "K": self.k, "GROUP_M": 2, "EPILOGUE": self.epilogue,
            "C": c, "offs_ptr": Pointer(self.offs), "G": self.count, "b_stride_z": 1,
            "residual_stride_z": (self.m * self.n if self.ragged == "k" else 0),
        }  # fmt: skip
        if self.ragged == "m":
            known["table_ptr"] = Pointer(self.table)
        of_out = self.out[0] if self.ragged == "m" else self.out
        if not c.POINTERS:
            known["c_desc"] = self.described(of_out, strip, "n", c.out_kind)
        known |= {"out_ptr": Pointer(self.memory.reshape(-1)), "out_stride": self.n + 3}
        known["out_stride_z"] = self.memory[0].size
        if c.BIAS:
            known |= {"bias_ptr": Pointer(self.bias.ravel()), "bias_stride": 1, "alpha": 0.5}
            known["bias_stride_z"] = self.bias.shape[1]
        if c.SCATTERED:
            known["out_index_ptr"] = Pointer(self.places)
            known["out_weights_ptr"] = Pointer(self.weights)
        if c.A_SCALE or c.stepped:
            known["a_scale_ptr"] = Pointer(self.scale_a.ravel())
            known["b_scale_ptr"] = Pointer(self.scale_b.ravel())
        if c.stepped:
            _, of_k, of_n = self.scale_b.shape
            known |= {"stride_asz": 0, "stride_asm": of_k, "stride_ask": 1}
            known |= {"stride_bsz": of_k * of_n, "stride_bsk": of_n, "stride_bsn": 1}
        if c.FETCH:
            known["r_desc"] = self.described(self.residual, strip, "n", c.out_kind)
        elif c.RESIDUAL:
            known |= {"residual_ptr": Pointer(self.residual.ravel())}
            known |= {"residual_stride_m": self.n, "residual_stride_n": 1}
        return known

    def run(self) -> None:
        arguments = list(self.arguments().values())
        for program in range(self.programs):
            run_block(arguments, program, self.programs, self.seed)

    def epilogue(self, gate: np.ndarray, *up: np.ndarray) -> np.ndarray:
        return np.tanh(gate) * up[0] if up else np.tanh(gate)

    def product(self, group: int, a: np.ndarray, b: np.ndarray, rows: slice) -> np.ndarray:
        if self.c.stepped:
            a = a * self.scale_a[rows].repeat(2, 1)[:, : self.k]
            of_columns = self.scale_b[group].repeat(self.c.B_OUTER, 1)[:, : b.shape[1]]
            b = b * of_columns.repeat(2, 0)[: self.k]
        z = a @ b
        if self.c.A_SCALE:
            by_row = self.c.A_SCALE == "row"
            z = z * (self.scale_a[rows] if by_row else self.scale_a[0])
            z = z * (self.scale_b[group] if by_row else self.scale_b[0])
        if self.bias is not None:
            z = 0.5 * z + self.bias[group]
        n = self.n
        return self.epilogue(z[:, :n], z[:, n:]) if self.c.GATED else self.epilogue(z)

    def expected(self) -> np.ndarray:
        wanted = np.full(self.out.shape, 0.0 if self.zeroed else np.nan)
        for group, (start, end) in enumerate(zip((0, *self.ends), self.ends, strict=False)):
            part = slice(start, end)
            if self.ragged == "m":
                y = self.product(group, self.a[part], self.b[group], part)
                wanted[0, self.places[part]] = self.weights[part, None] * y
                if self.residual is not None:
                    wanted[0, part] += self.residual[part]
            else:
                every = slice(None)
                wanted[group] = self.product(group, self.a[:, part], self.b[part], every)
                if self.residual is not None:
                    wanted[group] += self.residual[group]
        return wanted

    def check(self) -> None:
        """Run, and hold all memory against one product a group."""
        self.run()
        np.testing.assert_allclose(self.out, self.expected())
        assert np.isnan(self.memory[:, self.m :]).all(), "stored past the last row"
        assert np.isnan(self.memory[:, :, self.n :]).all(), "stored past the end of a row"


@pytest.mark.parametrize("ragged", ["m", "k"])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=6)
def test_groups_of_any_size(consumers: int, pingpong: bool, ragged: str) -> None:
    """Each its rows, or its k-steps, and nothing of what is beyond: more blocks than tiles, and
    several tiles a block."""
    for seed, (ends, total) in enumerate(SIZES):
        for programs, k, stages in ((1, 7, 2), (3, 2, 3), (4, 9, 4)):
            if len(ends) > 100 and (ragged == "k" or programs != 3):
                continue  # 290 groups of four tiles each
            Call(
                seed + k, ragged, ends, total, k=k, programs=programs, stages=stages,
                consumers=consumers, pingpong=pingpong,
            ).check()  # fmt: skip


@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"pointers": True}], ids=str)
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_fused_work_of_groups(consumers: int, pingpong: bool, ways: dict[str, bool]) -> None:
    """A bias of each group, a residual, gates, both layouts of b, rows of no group zeroed."""
    ends, total = (0, 5, 5, 6, 11), 14
    for seed, (gated, subtiles, layout) in enumerate(
        [(False, 2, "nn"), (True, 4, "nt"), (True, 1, "nn"), (False, 4, "nt")]
    ):
        Call(
            seed, "m", ends, total, consumers=consumers, pingpong=pingpong, layout=layout,
            gated=gated, extras=True, subtiles=subtiles, zeroed=seed % 2 == 0, **ways,
        ).check()  # fmt: skip
        Call(
            seed, "k", ends, total, consumers=consumers, pingpong=pingpong, gated=gated,
            extras=True, subtiles=subtiles, **ways,
        ).check()  # fmt: skip


@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"pointers": True}], ids=str)
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_two_adjacent_products_of_groups(
    consumers: int, pingpong: bool, ways: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without larger views only an edit of the PTX says where the first product's boxes are.
    monkeypatch.setattr(releases, "views_end_with_boxes", lambda: False)
    ends, total = (0, 5, 5, 6, 11), 14
    kinds = [("m", False, "nn"), ("m", True, "nt"), ("m", True, "nn"), ("k", False, "")]
    for seed, (ragged, gated, layout) in enumerate([*kinds, ("k", True, "")]):
        Call(
            seed, ragged, ends, total, n=14, columns=12, subtiles=6, gated=gated,
            consumers=consumers, pingpong=pingpong, layout=layout, extras=True, **ways,
        ).check()  # fmt: skip


@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
def test_scattered_and_weighted_rows(consumers: int, pingpong: bool) -> None:
    """Each row where its index says, and zeros where it says for rows of no group."""
    for seed, (gated, zeroed) in enumerate(itertools.product((False, True), (True, False))):
        Call(
            seed, "m", (0, 5, 5, 6, 11), 14, consumers=consumers, pingpong=pingpong, gated=gated,
            extras=True, indexed=True, zeroed=zeroed,
        ).check()  # fmt: skip


@pytest.mark.parametrize("ragged", ["m", "k"])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of Inf - Inf
def test_special_values_stay_in_their_group(consumers: int, pingpong: bool, ragged: str) -> None:
    """NaN and Inf where groups begin and end, in a row of a and a column of b, go no further."""
    for seed, (ends, total) in enumerate(SIZES[:3]):
        call = Call(seed, ragged, ends, total, consumers=consumers, pingpong=pingpong)
        for group, (start, end) in enumerate(itertools.pairwise((0, *ends))):
            if start == end:
                continue
            a, b = call.a, call.b[group] if ragged == "m" else call.b
            row, inner = (start, -1) if ragged == "m" else (group % 2, end - 1)
            a[row, inner] = (np.nan, np.inf)[group % 2]
            b[0 if ragged == "m" else start, 1 + group] = (-np.inf, np.nan)[group % 2]
        call.check()


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=6)
def test_scaled_groups(consumers: int, pingpong: bool, scales: str) -> None:
    for seed, (gated, extras) in enumerate(itertools.product((False, True), (False, True))):
        Call(
            seed, "m", (3, 3, 10, 11), 12, consumers=consumers, pingpong=pingpong, layout="nt",
            gated=gated, extras=extras, scales=scales,
        ).check()  # fmt: skip


@pytest.mark.parametrize("outer", [1, 8])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow
def test_scales_of_blocks_of_groups(consumers: int, pingpong: bool, outer: int) -> None:
    """Some groups have no rows, nor does the last tile of some blocks."""
    for seed, (ends, total) in enumerate(SIZES[:4]):
        for gated, n in ((False, 10), (True, 8), (True, 10)):
            Call(
                seed, "m", ends, total, n=n, consumers=consumers, pingpong=pingpong, layout="nt",
                gated=gated, extras=True, outer=outer, programs=1 + 2 * seed,
            ).check()  # fmt: skip


@pytest.mark.parametrize("ragged", ["m", "k"])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=6)
def test_wrong_ends_give_no_invalid_address(consumers: int, pingpong: bool, ragged: str) -> None:
    for seed, offs in enumerate([(-4, 30, 2, 9), (9, 3, 2, 50), (2**31 - 1, -(2**31), 7, 7)]):
        call = Call(
            seed, ragged, (2, 4, 6, 9), 9, offs=offs, consumers=consumers, pingpong=pingpong,
            fetch=True, extras=True,
        )  # fmt: skip
        call.run()
        assert np.isnan(call.memory[:, call.m :]).all()
        assert np.isnan(call.memory[:, :, call.n :]).all()


@pytest.mark.parametrize("ends", [(0, 0), (3, 7), (2, 4)])
def test_zeros_beyond_the_last_group(ends: tuple[int, ...]) -> None:
    """Only rows beyond the last group are zeroed; they have more columns than one store."""
    Call(0, "m", ends, 7, n=1100, columns=256, subtiles=4, zeroed=True, consumers=1).check()


def test_tiles_belong_to_one_group_and_are_divided_equally_among_blocks() -> None:
    """All blocks have the same number of tiles, or one more, however rows are divided."""
    for ends in ((64,) * 8, (1, 2, 3, 4, 5, 6, 7, 64), (0, 0, 9, 9, 33, 34, 35, 64)):
        call = Call(1, "m", ends, 64, n=4, consumers=1, programs=5)
        stored: list[list[tuple[int, ...]]] = []
        known = call.arguments()
        write = known["c_desc"].write

        def seen(
            at: tuple[int, ...], box: np.ndarray, write: Any = write, stored: Any = stored
        ) -> None:
            stored[-1].append(tuple(int(x) for x in at))
            write(at, box)

        known["c_desc"].write = seen
        for program in range(5):
            stored.append([])
            run_block(list(known.values()), program, 5, 0)
        sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        tiles = sum(-(-size // 2) for size in sizes)
        strips = [len(each) for each in stored]
        assert sum(strips) == 2 * tiles  # of two strips each
        assert max(strips) - min(strips) <= 2
        assert len({each for block in stored for each in block}) == 2 * tiles


# The host's part.


def grouped(ragged: str = "m", count: int = 8, **fields: Any) -> Problem:
    layout = fields.pop("layout", "nt" if ragged == "m" else "tn")
    sizes = {"m": 4096, "n": 4096, "k": 4096} | {x: fields.pop(x) for x in "mnk" if x in fields}
    zeroed = fields.pop("zeroed", False)
    groups = Groups(count, ragged, zeroed=zeroed)  # type: ignore[arg-type]
    return problem(**sizes, layout=layout, groups=groups, **fields)


def test_a_clipped_tensor_map_ends_where_a_group_does() -> None:
    for dtype in (BF16, FP32):
        t = torch.arange(12 * 24, dtype=dtype).view(12, 24)[:, :16]
        describe = tensor_map(Operand.of(t), 4, 16, "clipped")
        described = describe(t)
        assert described.block_shape == [1, 1, 4, 16]
        # Limits of CUDA's tensor maps.
        assert all(0 < size < 2**31 for size in described.shape)
        apart = [stride * t.itemsize for stride in described.strides[:-1]]
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in apart)
        memory = t.as_strided((12 * 24,), (1,)).double().numpy()
        box = Wrapped(memory, described.shape, described.strides, [1, 1, 4, 16], t.itemsize)
        placed = ragged_tiles.box_start.fn
        for end, row in ((6, 3), (12, 9), (5, 5), (4, 6), (12, 4)):
            read = box.read(placed(None, end, row, 0, False, "clipped"))[0, 0]
            wanted = np.zeros((4, 16))
            inside = t[row : min(row + 4, end)].double().numpy()
            wanted[: len(inside)] = inside
            np.testing.assert_array_equal(read, wanted)


def test_a_single_group_has_any_stride() -> None:
    weight = torch.zeros(48, 40, dtype=BF16).as_strided((1, 48, 40), (3, 40, 1))
    assert Operand.of(weight).aligned
    described = tensor_map(Operand.of(weight), 16, 32, "stack")(weight)
    assert (described.shape, described.strides) == ([1, 48, 40], [48 * 40, 40, 1])


@pytest.mark.parametrize(
    "problem",
    [
        grouped(m=64, n=64, k=64),
        grouped(m=64, n=64, k=64, zeroed=True, epilogue="swiglu", bias=FP32, scaled=True),
        grouped(m=64, n=64, k=64, residual=Operand(BF16)),
        grouped(m=64, n=64, k=64, residual=Operand(FP32), out=Operand(BF16, aligned=False)),
        grouped(m=64, n=64, k=64, dtype=E4M3, out=BF16, scales=("row", "tensor")),
        grouped(m=64, n=64, k=256, dtype=E4M3, out=BF16, scales=("1x128", "128x128")),
        grouped("k", m=64, n=64, k=64, bias=BF16, residual=Operand(BF16, "col")),
        grouped("k", m=64, n=64, k=64, out=Operand(BF16, aligned=False)),
        grouped(count=1, m=64, n=64, k=64, bias=BF16, residual=Operand(BF16)),
    ],
    ids=str,
)
def test_a_call_passes_groups(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(operands.Build, "launch", lambda build, device: None)
    monkeypatch.setattr(
        triton_kernel, "launcher", lambda *given, **more: launches.append((given, more))
    )
    config = KERNEL.default_config(problem)
    special = KERNEL.specialize(problem, config)
    assert set(special.types) | set(special.constants) == set(warp_specialized_kernel.arg_names)
    assert set(special.divisible) <= set(special.types)
    assert ("bias_stride_z" in special.types) is (problem.bias is not None)
    assert problem.groups is not None
    groups = problem.groups.count
    assert (special.divisible.get("out_ptr") == 16) is problem.groups.zeroed
    KERNEL.bind(problem, config)
    (((step,), shape, _), more) = launches[0]
    assert shape == ((groups, 64, 64) if problem.along == "k" else (64, 64))
    assert more["extras"] == ("offs", *problem.parts)
    assert step.arguments.keys() == special.types.keys()
    assert step.arguments["G"] == groups
    blocks = step.grid[0]
    # Numbers of 4 bytes, like the table's.
    scratch = (groups * blocks, torch.float32) if problem.along == "m" else None
    assert more["workspace"] == scratch
    assert KERNEL.workspace_bytes(problem, config) == (4 * groups * blocks if scratch else 0)
    given = random_inputs.make(problem, torch.device("cpu"), seed=0)
    made = {name: getattr(given, name) for name in ("a", "b", "bias", "residual")}
    made |= given.parts
    made["out"] = random_inputs.empty(problem.out, problem.out_shape, torch.device("cpu"))
    for name, argument in step.arguments.items():
        if name.endswith("_desc"):
            described = argument.describe(made[argument.tensor])
            assert f"{described.block_shape},{described.layout!r}>" in special.types[name]
        elif isinstance(argument, tuple):
            tensor, dimension = argument
            assert -2 <= dimension < made[tensor].dim()


def test_the_grid_is_of_the_most_tiles_there_may_be() -> None:
    """Each group's last tile may have one row, and groups none."""
    config = replace(CONFIG, BLOCK_M=128, BLOCK_N=256)
    for m, count, rows in ((4096, 8, 40), (4096, 1, 33), (3, 128, 3), (1, 1, 1)):
        problem = grouped(m=m, count=count)
        assert tile_shapes.most_tiles(problem, config) == rows * 16
        assert tile_shapes.tile_count(problem, config) <= rows * 16
    assert tile_shapes.most_tiles(replace(grouped(m=1, count=1), n=257), config) == 2
    sums = grouped("k", count=8)
    assert tile_shapes.most_tiles(sums, config) == tile_shapes.tile_count(sums, config) == 8 * 512


def test_which_configs_groups_are_offered() -> None:
    """Large groups get Hopper's tiles, and few rows a group get ``triton.ragged``'s. Neither splits
    K or begins early."""
    plain = Ragged()
    for instance, first in (
        (grouped(m=64, n=28672), False),
        (grouped(m=512, n=1536, k=2048, count=128), False),
        (grouped(m=4096, n=28672), True),
        (grouped(m=16384, n=14336, epilogue="swiglu"), True),
        (grouped("k", m=28672, k=32768), True),
        (grouped("k", m=1536, n=2048, k=8192, count=128), True),
    ):
        configs = list(KERNEL.configs(instance))
        assert 2 <= len(configs) <= 16
        assert len(set(configs)) == len(configs)
        for config in configs:
            assert (config.tail_splits, config.splits, config.early) == (1, 1, "")
            assert config.shared_memory(instance) <= H200.shared_memory
        best, other = (
            min(kernel.estimate_us(instance, config) for config in kernel.configs(instance))
            for kernel in (KERNEL, plain)
        )
        assert (best < other) is first, instance
        # Records of other problems may hold such configs.
        odd = replace(CONFIG, tail_splits=4, early="b")
        fitted = tile_shapes.adapted(instance, odd)
        assert (fitted.tail_splits, fitted.splits, fitted.early) == (1, 1, "")
    wide = {c.BLOCK_M * c.BLOCK_N for c in KERNEL.configs(grouped(m=16384, n=28672))}
    assert 128 * 256 in wide


def test_sums_of_groups_depend_on_the_others() -> None:
    """Where a range of K starts decides how it is summed; rows do not depend on other rows."""
    assert KERNEL.arithmetic(grouped("k"), CONFIG) is None
    assert KERNEL.arithmetic(grouped(), CONFIG) == KERNEL.arithmetic(problem(), CONFIG)


@pytest.mark.slow
def test_groups_compile_for_hopper(uninterpreted: Uninterpreted) -> None:
    scattered = Groups(8, "m", out_index=torch.int64, out_weights=FP32, zeroed=True)
    problems = [
        grouped(m=8192, n=14336, zeroed=True, epilogue="swiglu", bias=BF16),
        grouped(m=16384, k=14336, residual=Operand(BF16)),
        grouped("k", n=14336, k=8192),
        problem(16384, 4096, 14336, groups=scattered),
        grouped(m=65536, n=1536, k=2048, dtype=E4M3, out=BF16, scales=("1x128", "128x128")),
    ]
    results = uninterpreted(compiled, problems, "first")
    assert len(results) == 5
    for result in results:
        assert result["shared"] <= result["promised"] <= H200.shared_memory, result
        assert result["wgmma"] > 0, result
        assert result["setmaxnreg"] > 0, result
        assert result["stack"] == 0, result
