"""Tests gathered rows for the Hopper kernel: the copy runs in Triton's interpreter, and so does the
kernel that stands in for the product's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from test_warp_specialized import BF16, H200, problem
from tmm_triton.gathered import Gathered, _copy, gathered
from tmm_triton.hopper.warp_specialized import WarpSpecialized
from tmm_triton.ragged import Ragged
from triton.backends.compiler import GPUTarget
from uninterpreted import Uninterpreted

from tmm_core import Groups, Operand, Problem
from tmm_core.spec.device import fingerprint

KERNEL = Gathered()
INDEX = {"a_index": torch.int32}


def gathered_problem(m: int = 4096, n: int = 512, k: int = 1024, **fields: Any) -> Problem:
    groups = Groups(8, "m", **{**INDEX, **fields.pop("groups", {})})
    return problem(m, n, k, "nt", groups=groups, **fields)


class Interpreted(Gathered):
    """Multiplies by ``triton.ragged``, which the interpreter runs."""

    inner: Any = Ragged()

    def configs(self, problem: Problem) -> Any:
        return self.inner.configs(gathered(problem))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_are_copied_and_multiplied(index: torch.dtype) -> None:
    """Only rows of groups are copied: no index beyond the last group is used, and no memory
    is read there."""
    t, rows, n, k = 45, 20, 16, 24
    a = torch.randn(rows, 2 * k)[:, :k]
    b = torch.randn(3, n, k).mT
    offs = torch.tensor([11, 11, 40], dtype=torch.int32)
    of_a = torch.randint(rows, (t,), dtype=index)
    of_a[40:] = 2**31 - 1
    places, weights = torch.randperm(t), torch.rand(t)
    groups = Groups(3, "m", a_index=index, out_index=torch.int64, out_weights=torch.float32)
    given = Problem.of(a, b, torch.empty(t, n), fingerprint(a.device), groups=groups)
    kernel = Interpreted()
    launcher: Any = kernel.bind(given, next(iter(kernel.configs(given))))
    out = torch.full((t, n), torch.nan)
    extras = {"offs": offs, "a_index": of_a, "out_index": places, "out_weights": weights}
    got = launcher(a, b, None, None, 1.0, out, **extras)
    wanted = torch.full((t, n), torch.nan)
    for row in range(40):
        group = int((offs <= row).sum())
        wanted[places[row]] = weights[row] * (a[of_a[row]] @ b[group])
    assert got is out
    torch.testing.assert_close(out, wanted, equal_nan=True)


def test_unsupported_problems_are_declined() -> None:
    def reason(given: Problem) -> str:
        return "; ".join(KERNEL.reasons_against(given))

    # Where Gluon does not run, every problem is declined for that reason.
    elsewhere = reason(gathered_problem())
    assert "an index gathers" in reason(problem(groups=Groups(8, "m")))
    assert "an index gathers" in reason(problem())
    assert "not multiples of 16 bytes" in reason(gathered_problem(k=1020))
    assert "not contiguous" in reason(gathered_problem(a=Operand(BF16, "col")))
    assert "not contiguous" in reason(gathered_problem(a=Operand(BF16, aligned=False)))
    assert "scattered" in reason(
        gathered_problem(residual=Operand(BF16), groups={"out_index": torch.int64})
    )
    assert "not contiguous" not in elsewhere
    assert "scattered" not in elsewhere


def test_the_inner_problem_and_its_time() -> None:
    given = gathered_problem(m=65536, k=40960, groups={"out_index": torch.int64})
    inner = gathered(given)
    assert inner.groups == Groups(8, "m", out_index=torch.int64)
    assert inner.a == Operand(BF16, "row", True, True)  # 65536 × 40960 elements
    config = KERNEL.default_config(given)
    assert config == WarpSpecialized().default_config(inner)
    copied = 65536 * 40960 * 2
    own = WarpSpecialized().workspace_bytes(inner, config)
    assert KERNEL.workspace_bytes(given, config) == copied + own
    more = KERNEL.estimate_us(given, config) - WarpSpecialized().estimate_us(inner, config)
    # Read and written at an H200's rate.
    assert 2 * copied / 4.8e6 < more < 2 * copied / 3e6


def test_its_version_covers_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Gathered().version
    monkeypatch.setattr(WarpSpecialized, "version", "another")
    assert Gathered().version != before


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("of", "element", "columns"), [(BF16, "*bf16", 1024), (torch.float8_e4m3fn, "*fp8e4nv", 2048)]
)
def test_the_copy_has_the_elements_of_a(
    of: torch.dtype, element: str, columns: int, index: torch.dtype
) -> None:
    build = _copy(gathered_problem(k=4096, dtype=of, out=BF16, groups={"a_index": index}))
    assert build.types["a_ptr"] == build.types["copy_ptr"] == element
    assert build.types["index_ptr"] == f"*i{8 * index.itemsize}"
    assert build.constants["COLS"] == columns  # rows of 2 KB
    assert build.divisible["K"] == build.divisible["stride"] == 16 // of.itemsize


def compiled() -> list[int]:
    ptx = _copy(gathered_problem()).compile_for(GPUTarget("cuda", 90, 32)).asm["ptx"]
    return [ptx.count(f"{access}.global.v4.b32") for access in ("ld", "st")] + [
        ptx.count("ld.global")
    ]


@pytest.mark.slow
def test_the_copy_moves_16_bytes_at_a_time(uninterpreted: Uninterpreted) -> None:
    loads, stores, all_loads = uninterpreted(compiled)
    # 128 threads copy 8 rows of 2 KB. Each row's index and the last group's end are read too.
    assert loads == stores == 8
    assert all_loads <= loads + 9


def test_few_rows_are_left_to_the_kernel_that_gathers_itself() -> None:
    def best(kernel: Any, given: Problem) -> float:
        return min(kernel.estimate_us(given, config) for config in kernel.configs(given))

    def times(m: int) -> tuple[float, float]:
        given = replace(gathered_problem(m=m, n=28672, k=4096), device=H200)
        return best(Ragged(), given), best(KERNEL, given)

    few, many = times(64), times(16384)
    assert few[0] < few[1]
    assert many[1] < many[0]
