"""The names of what kernels sum by: equal only where an H100 gave equal bits, and for every M the
same ones (``benchmarks/results/h100/invariant_bits.txt``)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fakes import with_scales, without_scales
from tmm_triton import partials, reduction_order
from tmm_triton.persistent import Persistent, PersistentConfig
from tmm_triton.plugin import KERNELS, load
from tmm_triton.realigned import Realigned, RealignedConfig
from tmm_triton.split_k import SplitK, SplitKConfig
from tmm_triton.tiled import Grouped
from triton.backends.compiler import GPUTarget
from uninterpreted import Uninterpreted

import tmm_core
from tmm_core import ConfigError, Operand, Problem
from tmm_core.dispatch.invariant import LADDER
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint, fingerprint

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
H100 = DeviceFingerprint(
    type="cuda", name="NVIDIA H100", capability=(9, 0), sm_count=132, shared_memory=232448
)
A100 = replace(H100, name="NVIDIA A100", capability=(8, 0), sm_count=108, shared_memory=166912)
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_stages": 3, "num_warps": 4}
SPLIT = SplitKConfig(**TILE, SPLIT_K=4, SWAP=False)
PERSISTENT = PersistentConfig(**TILE, GROUP_M=8, SUBTILE=1, FLATTEN=False)


@pytest.fixture(autouse=True)
def toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs for an H100 are proposed on any machine."""
    for name in ("triton_kernel", "hopper.warp_specialized"):
        monkeypatch.setattr(f"tmm_triton.{name}.missing_toolchain", lambda: ())


def problem(m: int = 256, n: int = 5120, k: int = 5120, **fields: Any) -> Problem:
    given = {"a": Operand(BF16), "b": Operand(BF16, "col"), "out": Operand(BF16), "device": H100}
    fields = {**given, **fields}
    return with_scales(Problem(m=m, n=n, k=k, **without_scales(fields)), fields)


def proposed(problem: Problem) -> list[tuple[Any, Any, str | None]]:
    found = []
    for name in KERNELS:
        kernel = load(name)
        if not kernel.reasons_against(problem):
            for config in dict.fromkeys([kernel.default_config(problem), *kernel.configs(problem)]):
                found.append((kernel, config, kernel.arithmetic(problem, config)))
    return found


def contracted(problems: list[Problem]) -> list[dict[str, int]]:
    """The FMAs of fp32 that the compiler makes for each kernel, by its name and the build's."""
    found = []
    for problem in problems:
        counts = {}
        for kernel, config in (
            (load("triton.warp_specialized"), None), (Persistent(), PERSISTENT), (SplitK(), SPLIT),
            (Grouped(), None),
        ):  # fmt: skip
            for build in kernel.builds(problem, config or kernel.default_config(problem)):
                compiled = build.compile_for(GPUTarget("cuda", 90, 32))
                name = f"{kernel.name} {build.fn.__name__}"
                counts[name] = compiled.asm["ptx"].count("fma.rn.f32")
        found.append(counts)
    return found


def longest_sums(splits: int) -> int:
    """The most fp32 additions that follow one another in the kernel that adds up ranges of K."""
    build = partials.reduction(problem(300, batch_invariant=True), splits, 300 * 5120)
    length: dict[str, int] = {}
    ptx = build.compile_for(GPUTarget("cuda", 90, 32)).asm["ptx"]
    for total, one, other in re.findall(r"add\.rn\.f32\s+(%\w+), (%\w+), ([%\w]+);", ptx):
        length[total] = 1 + max(length.get(one, 0), length.get(other, 0))
    return max(length.values())


@pytest.mark.parametrize("splits", [4, 8])
@pytest.mark.slow
def test_ranges_are_added_one_after_the_other(splits: int, uninterpreted: Uninterpreted) -> None:
    """A kernel that sums them up in registers does so; Triton's own sum adds pairs of pairs since
    3.8. The first addition is to zero."""
    assert uninterpreted(longest_sums, splits) >= splits


@pytest.mark.slow
def test_no_compiler_decides_how_often_a_result_is_rounded(uninterpreted: Uninterpreted) -> None:
    """This matters if kernels share sums: some would add a residual to a product in one step,
    others would not."""
    fused = problem(
        300, 1024, epilogue=parse("silu"), bias=BF16, residual=Operand(BF16), scaled=True
    )
    usual, alike = uninterpreted(contracted, [fused, replace(fused, batch_invariant=True)])
    assert min(usual.values()) < max(usual.values())
    assert set(alike.values()) == {0}
    single = problem(a=Operand(torch.float32), b=Operand(torch.float32), batch_invariant=True)
    assert reduction_order.options(single) == {}


@pytest.mark.parametrize("nk", [(5120, 5120), (4096, 14336), (28672, 4096), (6144, 4096)], ids=str)
@pytest.mark.parametrize("epilogue", [None, "silu", "swiglu"])
@pytest.mark.slow(quick=6)
def test_every_m_has_the_arithmetics_of_every_other(
    nk: tuple[int, int], epilogue: str | None
) -> None:
    """Several kernels, with small and with tall tiles, offer one reduction order at every M. If one
    M has configs that split K, other M have them too, as far as the workspace fits in memory."""
    n, k = nk
    whole: dict[int, set[str | None]] = {}
    for m in LADDER:
        instance = problem(m, n, k, epilogue=parse(epilogue), batch_invariant=True)
        found = proposed(instance)
        alike = {kernel.name for kernel, _, name in found if name == "sm90-k16"}
        assert {"triton.warp_specialized", "triton.persistent"} <= alike
        assert None not in {name for kernel, _, name in found}, "a config that M decides"
        whole[m] = {name for _, _, name in found}
    everywhere = set.intersection(*whole.values())
    assert {"sm90-k16", "sm90-k16/split2", "sm90-k16/split4"} <= everywhere
    assert set().union(*whole.values()) <= {"sm90-k16"} | {
        f"sm90-k16/split{splits}" for splits in (2, 4, 8)
    }


def test_numbers_of_parts_do_not_depend_on_m_nor_on_the_gpu() -> None:
    assert (
        reduction_order.equal_splits(problem(1))
        == reduction_order.equal_splits(problem(8192))
        == (2, 4, 8)
    )
    half = problem(device=replace(H100, sm_count=66), k=5120)
    assert reduction_order.equal_splits(half) == (2, 4, 8)
    assert reduction_order.equal_splits(problem(k=1024)) == (2,)
    # 11008 in four are 21.5 steps of 128 each.
    assert reduction_order.equal_splits(problem(k=11008)) == (2,)
    assert reduction_order.equal_splits(problem(device=A100)) == ()


def test_parts_of_different_lengths_have_different_reduction_orders() -> None:
    kernel = SplitK()
    assert kernel.arithmetic(problem(), SPLIT) == "sm90-k16/split4"
    names = {
        kernel.arithmetic(problem(k=11008), replace(SPLIT, BLOCK_K=step)) for step in (64, 128, 256)
    }
    # 43 steps of 64; of 128 some ranges have 22 and some 21, of 256 other ones.
    assert "sm90-k16/split4" in names
    assert len(names) == 3
    assert kernel.arithmetic(problem(), replace(SPLIT, SPLIT_K=1)) == "sm90-k16"


def test_parts_summed_by_one_program_equal_those_of_several() -> None:
    kernel = Persistent()
    assert kernel.arithmetic(problem(), PERSISTENT) == "sm90-k16"
    assert kernel.arithmetic(problem(), replace(PERSISTENT, PARTS=4)) == "sm90-k16/split4"
    own = kernel.arithmetic(problem(k=1000), replace(PERSISTENT, PARTS=4))
    assert own is not None
    assert own.startswith("sm90-triton.persistent@")
    with pytest.raises(ConfigError, match="cannot merge"):
        PersistentConfig.from_json({**PERSISTENT.to_json(), "FLATTEN": True, "PARTS": 2})
    # Records that were kept before there were parts.
    document = PERSISTENT.to_json()
    del document["PARTS"]
    assert PersistentConfig.from_json(document) == PERSISTENT


def test_batch_invariant_mode_has_no_cut_that_depends_on_m() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from tmm_triton.hopper.warp_specialized import WarpSpecialized

    kernel = WarpSpecialized()
    config = kernel.default_config(problem(batch_invariant=True))
    # Tiles of two products are not cut by M.
    config = replace(config, BLOCK_N=128, subtiles=2)
    assert kernel.arithmetic(problem(), replace(config, splits=1)) == "sm90-k16"
    cut = replace(config, tail_splits=2, splits=1)
    assert kernel.arithmetic(problem(), cut) is None
    parts = replace(config, BLOCK_K=64, tail_splits=1, splits=4)
    assert kernel.arithmetic(problem(16), parts) == "sm90-k16/split4"
    # The workspace cannot hold four parts of this many rows: K would be split into fewer.
    assert kernel.arithmetic(problem(8192), parts) is None


def test_of_8_bits_the_step_along_k_is_part_of_the_sum() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from tmm_triton.hopper.warp_specialized import WarpSpecialized

    kernel = WarpSpecialized()
    instance = problem(a=Operand(FP8), b=Operand(FP8, "col"), scales=("tensor", "tensor"))
    config = replace(kernel.default_config(instance), splits=1, tail_splits=1)
    names = {
        kernel.arithmetic(instance, replace(config, BLOCK_K=step, num_stages=2))
        for step in (64, 128)
    }
    assert len(names) == 2
    assert names.isdisjoint({None, "sm90-k16"})


def test_other_gpus_and_operands_have_no_reduction_order() -> None:
    """An H100's measurements do not cover other hardware, other operands or the interpreter."""
    grouped = Grouped()
    for instance in (
        problem(device=A100),
        problem(device=replace(H100, capability=(10, 0))),
        problem(device=replace(H100, type="cpu", interpreted=True)),
        problem(device=replace(H100, cuda="hip-6.4")),  # an MI200's capability is 9.0 too
        problem(device=replace(H100, capability=(9, 4), cuda="hip-6.4")),
        problem(a=Operand(torch.float32), b=Operand(torch.float32), tf32=True),
        problem(a=Operand(FP8), b=Operand(FP8, "col")),
    ):
        names = [grouped.arithmetic(instance, config) for config in grouped.configs(instance)]
        assert len(set(names)) == len(names)
        assert all(name is not None and "triton.grouped@" in name for name in names)
    # Nor is an A100's own sum taken for an H100's.
    config = next(iter(grouped.configs(problem(device=A100))))
    tf32 = problem(a=Operand(torch.float32), b=Operand(torch.float32), tf32=True)
    assert grouped.arithmetic(problem(device=A100), config) != grouped.arithmetic(tf32, config)


def test_a_copying_kernel_has_the_arithmetic_of_its_inner_kernel() -> None:
    kernel = Realigned()
    instance = problem(k=5119, a=Operand(BF16, aligned=False), b=Operand(BF16, "col", False))
    config = RealignedConfig(inner="triton.persistent", config=PERSISTENT)
    assert kernel.arithmetic(instance, config) == "sm90-k16"


@pytest.mark.parametrize(
    ("size", "parts", "epilogue"),
    # Parts of one step, of none, of steps that end outside; two accumulators; a batch.
    [
        ((40, 48, 256), 4, None),
        ((40, 48, 104), 8, "silu"),
        ((33, 40, 136), 2, "swiglu"),
        ((3, 33, 40, 136), 3, None),
    ],
)
def test_parts_add_up_to_the_product(
    size: tuple[int, ...], parts: int, epilogue: str | None
) -> None:
    *batch, m, n, k = size
    width = 2 * n if epilogue == "swiglu" else n
    a = torch.randn(*batch, m, k).half()
    b = torch.randn(*batch, k, width).half()
    out = torch.empty(*batch, m, n, dtype=torch.float16)
    problem = Problem.of(a, b, out, fingerprint(a.device), epilogue=parse(epilogue))
    kernel = Persistent()
    assert kernel.reasons_against(problem) == []
    config = replace(PERSISTENT, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16, PARTS=parts)
    kernel.bind(problem, config)(a, b, None, None, 1.0, out)
    z = a.double() @ b.double()
    expected = z
    if epilogue == "silu":
        expected = torch.nn.functional.silu(z)
    elif epilogue == "swiglu":
        expected = torch.nn.functional.silu(z[..., :n]) * z[..., n:]
    assert (out.double() - expected).norm() <= 6e-4 * expected.norm()


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("epilogue", [None, "silu"])
@pytest.mark.slow(quick=8)
def test_ranges_of_k_give_a_row_the_same_bits_at_every_m(splits: int, epilogue: str | None) -> None:
    """The ranges and the order of their sums depend on N and K alone, also in the interpreter."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_stages": 2, "num_warps": 4}
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 512, generator=generator), torch.randn(512, 24, generator=generator)
    bias = torch.randn(24, generator=generator)

    def product(rows: torch.Tensor, parts: int = splits) -> torch.Tensor:
        config = {**tile, "SPLIT_K": parts, "SWAP": False}
        forced: Any = {"kernel": "triton.split_k", "config": config}
        with tmm_core.override(batch_invariant=True, verify=False):
            return tmm_core.matmul(rows, b, bias=bias, epilogue=epilogue, **forced)

    whole = product(a)
    exact = (a.double() @ b.double() + bias).float()
    expected = torch.nn.functional.silu(exact) if epilogue else exact
    torch.testing.assert_close(whole, expected, atol=1e-3, rtol=1e-4)
    for m in (1, 7, 16, 33):
        assert torch.equal(product(a[:m]), whole[:m]), m
    assert splits == 1 or not torch.equal(product(a, 1), whole)  # other ranges, other sums
