"""``triton.ragged``, interpreted: groups of any sizes, in tiles that divide nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.ragged import Ragged, RaggedConfig, _spills, grid
from tmm_triton.tiled import Grouped

from tmm_core import Groups, Operand, Problem, Scale, grouped_matmul
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.spec.device import DeviceFingerprint, fingerprint, interpreting
from tmm_core.spec.epilogue import EpilogueLike

Tensor = torch.Tensor
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Relative to the fp64 reference's norm.
TOLERANCE = {FP16: 4e-4, BF16: 5e-3, FP32: 5e-7}
CONFIG = RaggedConfig(
    BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, num_stages=2, num_warps=4, GROUP_M=2, SUBTILE=1
)
HALVES = replace(CONFIG, BLOCK_N=32, SUBTILE=2, GROUP_M=3)
KERNEL = Ragged()

interpreted = pytest.mark.skipif(not interpreting(), reason="Triton is not interpreting")


@dataclass(frozen=True)
class Call:
    """One call's tensors, drawn anew from the same seed each time.

    Attributes:
        ends: The ends of groups along ``ragged``, whose size in all is ``total``.
        layouts: Of a and b: row-major, column-major or strided.
        read: Rows of a that are gathered; none: they are read in their order.
        b_dtype: None: a's dtype.
        scales: The kind for a and for b, of 8-bit operands.
    """

    ragged: Any = "m"
    ends: tuple[int, ...] = (5, 5, 30, 34)
    total: int = 37
    m: int = 21
    n: int = 19
    k: int = 23
    dtype: torch.dtype = FP32
    b_dtype: torch.dtype | None = None
    scales: tuple[str | None, str | None] = (None, None)
    out_dtype: torch.dtype | None = None
    layouts: str = "nn"
    epilogue: EpilogueLike = None
    bias: bool = False
    residual: bool = False
    alpha: float = 1.0
    read: int | None = None
    scattered: torch.dtype | None = None
    weights: torch.dtype | None = None
    zeroed: bool = False
    config: RaggedConfig = CONFIG

    def run(self) -> None:
        """Launch, and hold all of the result against a product a group in fp64."""
        chance = torch.Generator().manual_seed(0)
        epilogue = parse(self.epilogue)
        sizes = {"m": self.m, "n": self.n, "k": self.k} | {self.ragged: self.total}
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        width = 2 * n if epilogue.gated else n
        count, end, beyond = len(self.ends), self.ends[-1], torch.nan

        plain = BF16 if self.dtype in (E4M3, E5M2) else self.dtype

        def draw(layout: str, *shape: int, dtype: torch.dtype = plain) -> Tensor:
            t = (0.4 * torch.randn(shape, generator=chance)).to(dtype)
            if layout == "t":
                return t.mT.contiguous().mT
            if layout == "s":
                wide = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, dtype=dtype)
                wide[..., ::2] = t
                return wide[..., ::2]
            return t

        lead_a, lead_b = [(count,) if self.ragged == x else () for x in "nm"]
        high = m if self.read is None else self.read
        a = draw(self.layouts[0], *lead_a, high, k, dtype=self.dtype)
        b = draw(self.layouts[1], *lead_b, k, width, dtype=self.b_dtype or self.dtype)
        each_a = (high,) if self.ragged == "m" else (count, m)
        each_b = (width,) if self.ragged == "n" else (count, width)
        scales: dict[str, Any] = {
            name: torch.rand(each if kind == "row" else (), generator=chance) + 0.5
            for name, kind, each in zip(
                ("a_scale", "b_scale"), self.scales, (each_a, each_b), strict=True
            )
            if kind is not None
        }
        shape = (*((count,) if self.ragged == "k" else ()), m, n)
        bias = draw("n", count, width) if self.bias else None
        residual = draw("t", *shape) if self.residual else None
        offs = torch.tensor(self.ends, dtype=torch.int32)
        rows: dict[str, Tensor | None] = dict.fromkeys(("a_index", "out_index", "out_weights"))
        if self.read is not None:
            rows["a_index"] = torch.randint(self.read, (m,), generator=chance, dtype=torch.int32)
        if self.scattered is not None:
            inside = torch.randperm(end, generator=chance)
            rows["out_index"] = torch.cat([inside, torch.arange(end, m)]).to(self.scattered)
        if self.weights is not None:
            rows["out_weights"] = torch.rand(m, generator=chance).to(self.weights)
        # Memory beyond the last group affects nothing.
        for t, dimension in ((a, self.ragged in "k"), (b, self.ragged == "n")):
            flat = t.dim() == 2 and self.read is None
            if flat and (self.ragged != "m" or t is a):
                t.narrow(int(dimension), end, self.total - end).fill_(beyond)
        for name, along in (("a_scale", "m"), ("b_scale", "n")):
            scale = scales.get(name)
            if along == self.ragged and scale is not None and scale.dim() and self.read is None:
                scale[end:] = beyond
        if residual is not None and self.ragged in "mn":
            dimension = "mn".index(self.ragged)
            residual.narrow(dimension, end, self.total - end).fill_(beyond)
        untouched = -123.0
        out = torch.full(shape, untouched, dtype=self.out_dtype or plain)
        dtypes: list[Any] = [None if t is None else t.dtype for t in rows.values()]
        groups = Groups(count, self.ragged, *dtypes, zeroed=self.zeroed)
        problem = Problem.of(
            a, b, out, fingerprint(torch.device("cpu")), groups=groups,
            bias=bias, residual=residual, epilogue=epilogue, scaled=self.alpha != 1.0,
            stored={name: {"scale": Scale.of(scales.get(f"{name}_scale"))} for name in "ab"},
        )  # fmt: skip
        assert KERNEL.reasons_against(problem) == []
        given = {name: t for name, t in rows.items() if t is not None} | scales
        launcher: Any = KERNEL.bind(problem, self.config)
        result = launcher(a, b, bias, residual, self.alpha, out, offs=offs, **given)
        assert result is out

        expected = torch.full(shape, 0.0 if self.zeroed else untouched, dtype=torch.float64)
        for group, (start, stop) in enumerate(itertools.pairwise([0, *self.ends])):
            part = slice(start, stop)
            if self.ragged == "m":
                taken = a[part] if rows["a_index"] is None else a[rows["a_index"][part].long()]
                at: Any = part if rows["out_index"] is None else rows["out_index"][part].long()
                z, where = taken.double() @ b[group].double(), (at,)
            elif self.ragged == "n":
                z, where = a[group].double() @ b[:, part].double(), (slice(None), part)
            else:
                z, where = a[:, part].double() @ b[part].double(), (group,)
            for name, along in (("a_scale", "m"), ("b_scale", "n")):
                scale = scales.get(name, torch.ones(())).double()
                if scale.dim() and along != self.ragged:
                    scale = scale[group]
                elif scale.dim() and along == "m" and rows["a_index"] is not None:
                    scale = scale[rows["a_index"][part].long()]
                elif scale.dim():
                    scale = scale[part]
                z = z * (scale[:, None] if scale.dim() and along == "m" else scale)
            z = self.alpha * z
            y = epilogue.apply(z if bias is None else z + bias[group].double())
            if rows["out_weights"] is not None:
                y = y * rows["out_weights"][part].double()[:, None]
            expected[where] = y if residual is None else y + residual[where].double()
        inside = torch.ones(shape, dtype=torch.bool)
        if self.ragged in "mn":
            inside.narrow("mn".index(self.ragged), end, self.total - end).fill_(False)
        error = (out.double() - expected)[inside].norm()
        assert error <= TOLERANCE[out.dtype] * expected[inside].norm()
        assert torch.equal(out[~inside].double(), expected[~inside])


CALLS = {
    "rows": Call(),
    "rows_bf16_to_fp32": Call(dtype=BF16, out_dtype=FP32, layouts="nt", config=HALVES),
    "rows_strided": Call(layouts="st", dtype=FP16),
    "rows_everything": Call(
        epilogue="swiglu", bias=True, residual=True, alpha=0.5, zeroed=True, config=HALVES
    ),
    "rows_indexed": Call(
        epilogue="gelu_tanh+softcap(3)", bias=True, residual=True, read=6, scattered=torch.int64,
        weights=FP32, zeroed=True,
    ),
    "rows_scattered": Call(scattered=torch.int32, weights=BF16),
    "one_group": Call(ends=(33,), zeroed=True),
    "full": Call(ends=(0, 16, 37)),
    "many_rows_of_no_group": Call(ends=(5, 5, 10), total=70),
    "many_columns_of_no_group": Call("n", ends=(5, 5, 10), total=70),
    "no_group_has_rows": Call(ends=(0, 0, 0), bias=True, zeroed=True),
    "one_row_each": Call(ends=(*range(1, 21), 20), total=20, n=7),
    "columns": Call("n", layouts="tn", residual=True),
    "columns_zeroed": Call("n", zeroed=True, epilogue="relu", alpha=-1.0, config=HALVES),
    "sums": Call("k", layouts="tn", bias=True),
    "sums_gated": Call("k", layouts="ns", epilogue="geglu", residual=True, config=HALVES),
    "alternate_columns": Call(
        epilogue=CLAMPED.with_parameters(1.7, 0.3), bias=True, residual=True, alpha=0.5,
        layouts="ns", config=HALVES,
    ),
    "alternate_columns_of_sums": Call("k", epilogue=[CLAMPED, "tanh"], layouts="tt"),
    "e4m3_alternate_columns": Call(
        dtype=E4M3, scales=("row", "row"), layouts="nt", epilogue=CLAMPED, bias=True
    ),
    "e4m3": Call(dtype=E4M3, scales=("row", "row"), layouts="nt", out_dtype=FP32),
    "e4m3_gated": Call(
        dtype=E4M3, scales=("row", "row"), layouts="nt", epilogue="swiglu", bias=True,
        residual=True, alpha=0.5, read=50, scattered=torch.int32, weights=FP32, config=HALVES,
    ),
    "e4m3_tensor": Call(dtype=E4M3, scales=("tensor", "row"), zeroed=True, layouts="st"),
    "e5m2_columns": Call(
        "n", dtype=E5M2, b_dtype=E4M3, scales=("row", "row"), out_dtype=FP32, config=HALVES
    ),
    "e4m3_sums": Call(
        "k", dtype=E4M3, b_dtype=E5M2, scales=("row", "row"), out_dtype=FP32, epilogue="swiglu"
    ),
    "e4m3_one_scale": Call("k", dtype=E4M3, scales=(None, "tensor"), layouts="nt"),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.slow(quick=6)
def test_values(call: Call) -> None:
    call.run()


@interpreted
def test_ends_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups than are compared at a time."""
    monkeypatch.setattr("tmm_triton.ragged._MOST_GROUPS", 4)
    CALLS["one_row_each"].run()


@interpreted
def test_wrong_ends_give_no_address_outside() -> None:
    """Beyond the rows, or below none: what is computed is of rows there are."""
    a, b = torch.randn(8, 16), torch.randn(3, 16, 16)
    memory = torch.full((24, 16), -1.0)
    out = memory[8:16]
    problem = Problem.of(a, b, out, fingerprint(torch.device("cpu")), groups=Groups(3, "m"))
    launcher: Any = KERNEL.bind(problem, CONFIG)
    offs = torch.tensor([-5, 4, 1000], dtype=torch.int32)
    launcher(a, b, None, None, 1.0, out, offs=offs)
    torch.testing.assert_close(out, torch.cat([a[:4] @ b[1], a[4:] @ b[2]]))
    assert (memory[:8] == -1).all()
    assert (memory[16:] == -1).all()


@interpreted
@pytest.mark.parametrize("ragged", ["m", "n", "k"])
def test_rows_of_its_own_result_start_at_16_bytes(ragged: Any) -> None:
    sizes = {"m": ((12, 16), (2, 16, 7)), "n": ((2, 5, 16), (16, 7)), "k": ((5, 12), (12, 7))}
    a, b = (torch.randn(shape) for shape in sizes[ragged])
    offs = torch.tensor([3, 7 if ragged == "n" else 12], dtype=torch.int32)
    made = [grouped_matmul(a, b, offs=offs, kernel=name) for name in (KERNEL.name, "blas")]
    torch.testing.assert_close(*made)
    assert made[0].stride() == made[1].stride() == (40, 8, 1)[-made[0].dim() :]


H200 = DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448)
ROW = Operand(BF16)
LARGE = Problem(32768, 28672, 4096, ROW, Operand(BF16, "col"), ROW, H200, groups=Groups(8, "m"))


def test_the_grid_has_a_program_for_every_tile_whatever_the_sizes() -> None:
    chance = torch.Generator().manual_seed(1)
    for total, count in ((37, 4), (5, 9), (160, 3), (64, 64)):
        drawn = torch.randint(total + 1, (50, count), generator=chance).sort(1).values
        problem = replace(LARGE, m=total, n=16, groups=Groups(count, "m"))
        programs, _, _ = grid(problem, CONFIG)
        for ends in drawn.tolist():
            slots = [
                start // 16 + group + tile
                for group, (start, end) in enumerate(itertools.pairwise([0, *ends]))
                for tile in range(-(-(end - start) // 16))
            ]
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < programs for slot in slots)


def test_tiles_follow_the_rows_that_a_group_has() -> None:
    few = {c.BLOCK_M for c in KERNEL.configs(replace(LARGE, m=64, groups=Groups(128, "m")))}
    many = {c.BLOCK_M for c in KERNEL.configs(LARGE)}
    assert few == {16}
    assert max(many) == 128
    assert max(c.BLOCK_N for c in KERNEL.configs(replace(LARGE, groups=Groups(8, "n")))) == 128


@pytest.mark.parametrize(
    ("capability", "epilogue", "out_index", "subtile", "warps", "spills"),
    [
        ((9, 0), "swiglu", None, 1, 4, True), ((9, 0), "swiglu", None, 1, 8, False),
        ((9, 0), "swiglu", None, 2, 4, False), ((9, 0), "swiglu", torch.int32, 2, 4, False),
        ((8, 0), "swiglu", None, 2, 4, False), ((8, 0), "swiglu", torch.int32, 2, 4, True),
        ((8, 0), "swiglu", torch.int32, 2, 8, False), ((8, 0), "silu", torch.int32, 1, 4, False),
    ],
)  # fmt: skip
def test_tiles_that_would_spill(
    capability: Any, epilogue: str, out_index: Any, subtile: int, warps: int, spills: bool
) -> None:
    """Two accumulators of half the registers, of a whole tile or with addresses beside them."""
    gpu = replace(H200, capability=capability)
    groups = Groups(8, "m", out_index=out_index)
    problem = replace(LARGE, device=gpu, groups=groups, epilogue=parse(epilogue))
    tile = replace(CONFIG, BLOCK_M=128, BLOCK_N=64, SUBTILE=subtile, num_warps=warps)
    assert _spills(problem, tile) is spills


def test_unsupported_problems_are_declined() -> None:
    plain = replace(LARGE, groups=None)
    assert KERNEL.reasons_against(plain)[-1] == "is for ragged products"
    assert "does not serve products that are ragged along m" in Grouped().reasons_against(LARGE)
    a = Operand(E4M3, scale=Scale.parse("row"))
    fp8 = replace(LARGE, a=a, b=replace(a, layout="col"))
    declined = KERNEL.reasons_against(replace(fp8, device=replace(H200, capability=(8, 0))))
    assert "8-bit floats need an NVIDIA GPU of compute capability 8.9" in declined
    for capability in ((9, 0), (10, 0)):
        later = replace(fp8, device=replace(H200, capability=capability))
        assert not [reason for reason in KERNEL.reasons_against(later) if "8-bit" in reason]
        assert KERNEL.supports.reasons_against(later) == []
        assert min(config.BLOCK_K for config in KERNEL.configs(later)) == 128
        # Groups start inside rows of both, which are not copied asynchronously.
        sums = replace(later, groups=Groups(8, "k"))
        assert {32, 64} <= {config.BLOCK_K for config in KERNEL.configs(sums)}
    assert KERNEL.own_arithmetic(replace(LARGE, groups=Groups(8, "k")), CONFIG) is None


@pytest.mark.parametrize(
    ("along", "sizes", "tiles"),
    [("m", (128, 48, 32), 4 * 2 * 3), ("n", (48, 128, 32), 4 * 3 * 2), ("k", (32, 48, 128), 4 * 6)],
)
def test_explained_by_the_tiles_of_all_groups(
    along: Any, sizes: tuple[int, int, int], tiles: int
) -> None:
    """Tiles of four groups of 32."""
    row = Operand(FP16)
    gpu = DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448)
    problem = Problem(*sizes, row, row, row, gpu, groups=Groups(4, along))
    found = KERNEL.anatomy(problem, CONFIG)
    assert found is not None
    assert found.tiles == tiles
