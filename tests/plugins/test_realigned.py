"""``triton.realigned`` copies misaligned operands exactly, and gives the inner kernel an aligned
problem."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pairwise import every_case
from tmm_triton.realigned import (
    Misaligned,
    Realigned,
    RealignedConfig,
    bind_copy,
    copy_build,
    inner_kernels,
    realigned,
)
from tmm_triton.tile_anatomy import usage
from triton.backends.compiler import GPUTarget
from uninterpreted import Uninterpreted

from tmm_core import ConfigError, Machine, Operand, Problem
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.testing import KernelConformance
from tmm_core.testing.probe_problems import contiguous, laid
from tmm_core.triton import compile_for, interpreted, source
from tmm_core.verify.guard_bands import (
    UNREADABLE,
    GuardedTensor,
    MemoryLayout,
    with_guard_bands,
)
from tmm_core.verify.random_inputs import fill, seeded

KERNEL = Realigned()
HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
H200 = DeviceFingerprint(
    type="cuda", name="NVIDIA H200", capability=(9, 0), sm_count=132, shared_memory=232448
)
A100 = replace(H200, name="NVIDIA A100", capability=(8, 0), sm_count=108, shared_memory=166912)


@pytest.mark.slow(quick=8)
class TestRealigned(KernelConformance):
    kernel = KERNEL
    dtypes = (FP16, BF16)
    # Odd in every dimension: rows start anywhere.
    size = (301, 205, 143) if CUDA else (45, 77, 59)
    max_configs = None if CUDA else 4

    def probes_of_dtypes(self) -> Iterator[Problem]:
        yield from super().probes_of_dtypes()
        base = replace(self._probe(dtype=FP32), tf32=True)
        yield base
        yield replace(base, b=laid(base.b, "col"), out=laid(base.out, "col"))

    def probes_of_layouts(self) -> Iterator[Problem]:
        """Adds problems with one misaligned operand, and with one odd size."""
        yield from super().probes_of_layouts()
        base = self._probe()
        for layout in ("row_unaligned", "col_unaligned", "strided"):
            a, b = laid(base.a, layout), laid(base.b, layout)
            yield replace(base, a=a, b=laid(b, "col"), out=laid(base.out, "row"))
            yield replace(base, a=laid(a, "row"), b=b, out=laid(base.out, "row"))
        m, n, k = (size // 16 * 16 for size in self._size())
        yield self._probe((m, n, k + 1))
        yield self._probe((m, n + 1, k))
        yield self._probe((m, n + 4, k + 4))
        odd = self._probe((m + 1, n, k))
        yield contiguous(replace(odd, a=laid(odd.a, "col")))

    def probes_of_batches(self) -> Iterator[Problem]:
        """Adds batches in which one or both operands are misaligned."""
        yield from super().probes_of_batches()
        base = replace(self._probe(), batch=3)
        yield replace(base, b=laid(base.b, "col_unaligned"))
        yield replace(base, a=laid(base.a, "col_unaligned"), epilogue=parse("silu"))
        m, n, k = (size // 16 * 16 for size in self._size())
        odd = self._probe((m, n, k + 1))
        yield replace(odd, batch=3, b=laid(odd.b, "col"))
        odd = self._probe((m, n + 1, k))
        yield replace(odd, batch=3, bias=odd.out.dtype, residual=odd.out)


def problem(
    m: int = 4097,
    n: int = 4097,
    k: int = 4097,
    dtype: torch.dtype = BF16,
    a: str | Operand = "row",
    b: str | Operand = "row",
    out: Operand | None = None,
    epilogue: str | None = None,
    **fields: Any,
) -> Problem:
    """A problem whose matrices are all misaligned, unless operands are given."""
    first, second = (x if isinstance(x, Operand) else Operand(dtype, x, False) for x in (a, b))
    out = out or Operand(dtype, aligned=False)
    defaults = {"a": first, "b": second, "out": out, "device": H200}
    return Problem(m=m, n=n, k=k, epilogue=parse(epilogue), **{**defaults, **fields})


ALIGNED = Operand(BF16)


# The copy.


def guarded(
    shape: tuple[int, int], layout: str, dtype: torch.dtype, seed: int = 0
) -> GuardedTensor:
    """A misaligned matrix between guard bands. Its leading dimension is odd (``unaligned``), it
    begins three elements after a multiple of 16 bytes (``sliced``), its rows overlap, or neither
    rows nor columns are contiguous (``strided``)."""
    name, _, how = layout.partition("_")
    length = shape[0] if name == "col" else shape[1]
    unit = 16 // dtype.itemsize
    leading, inner, offset = {
        "unaligned": ((length | 1) + 2, 1, 0),
        "sliced": (-(-length // unit) * unit + 2 * unit, 1, 3),
        "overlapping": (unit, 1, 0),
        "": (2 * (length + 1), 2, 0),
    }[how or ("" if name == "strided" else name)]
    strides = (inner, leading) if name == "col" else (leading, inner)
    placed = MemoryLayout(shape, dtype, strides, offset)
    matrix = with_guard_bands(placed, DEVICE, UNREADABLE)
    fill("a", matrix.tensor, 1, seeded(DEVICE, seed))
    return matrix


# Less than a tile; several tiles with tails in either direction; one row; one column. Each shape is
# copied in each layout, and each shape and layout with at least two dtypes.
SHAPES = [(5, 9), (37, 1093), (1093, 37), (1, 700), (700, 1)]
COPIED_LAYOUTS = [
    "row_unaligned", "row_sliced", "col_unaligned", "col_sliced", "strided", "overlapping",
]  # fmt: skip
COPIED_DTYPES = itertools.cycle([BF16, FP16, FP32, BF16])


@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [(*each, next(COPIED_DTYPES)) for each in itertools.product(SHAPES, COPIED_LAYOUTS)],
    ids=str,
)
@pytest.mark.slow(quick=6)
def test_copies_are_exact(shape: tuple[int, int], layout: str, dtype: torch.dtype) -> None:
    inputs = {"a": guarded(shape, layout, dtype), "b": guarded(shape[::-1], layout, dtype, seed=1)}
    before, (a, b) = [x.sums() for x in inputs.values()], (x.tensor for x in inputs.values())
    out = torch.empty(shape[0], shape[0], dtype=dtype, device="meta")
    problem = Problem.of(a, b, out, fingerprint(DEVICE), tf32=True)
    matrices = Misaligned.of(problem)
    if not matrices:
        assert 1 in shape  # a single row or column may be aligned
        return
    copies = bind_copy(problem)(a, b)
    after = realigned(problem)
    for matrix in matrices:
        original, copy = (a, b)[matrix.place], copies[matrix.place]
        assert torch.equal(copy, original)
        assert Operand.of(copy) == matrix.copied == (after.a, after.b)[matrix.place]
        rows = copy.t() if matrix.transposed else copy
        whole = rows.as_strided((rows.shape[0], matrix.pitch), (matrix.pitch, 1))
        assert not whole[:, rows.shape[1] :].any(), "the padding is not zero"
        # torch's allocations are aligned to 64 bytes on a CPU, to 512 on a GPU.
        assert rows.data_ptr() % (128 if CUDA else 64) == 0
        assert matrix.pitch * dtype.itemsize % 128 == 0
    for place, operand in enumerate((problem.a, problem.b)):
        assert (copies[place] is (a, b)[place]) == operand.aligned
    assert all(map(torch.equal, before, (x.sums() for x in inputs.values())))


@pytest.mark.parametrize("layout", ["row_unaligned", "col_sliced", "strided"])
@pytest.mark.parametrize("shared", ["", "a", "b", "ab"])
def test_matrices_of_a_batch_are_copied_once(layout: str, shared: str) -> None:
    batch, shape = 5, (37, 93)

    def stacked(name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A batch of matrices at odd distances, or one matrix that all products share."""
        matrices = [guarded(shape, layout, BF16, seed).tensor for seed in range(batch)]
        if name in shared:
            return matrices[0].expand(batch, *shape)
        strides = matrices[0].stride()
        apart = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 3
        apart += 1 - apart % 2
        storage = torch.zeros(1 + batch * apart, dtype=BF16, device=DEVICE)
        whole = storage.as_strided((batch, *shape), (apart, *strides), 1)
        for matrix, target in zip(matrices, whole, strict=True):
            target.copy_(matrix)
        return whole

    a, b = stacked("a", shape), stacked("b", shape[::-1])
    out = torch.empty(batch, shape[0], shape[0], dtype=BF16, device="meta")
    problem = Problem.of(a, b, out, fingerprint(DEVICE))
    matrices = Misaligned.of(problem)
    assert [matrix.place for matrix in matrices] == [0, 1]
    copies = bind_copy(problem)(a, b)
    served = realigned(problem)
    for matrix in matrices:
        original, copy = (a, b)[matrix.place], copies[matrix.place]
        assert torch.equal(copy, original)
        assert Operand.of(copy) == matrix.copied == (served.a, served.b)[matrix.place]
        assert (copy.stride(0) == 0) == ("ab"[matrix.place] in shared)
        rows = copy.mT if matrix.transposed else copy
        whole = rows.as_strided((*rows.shape[:2], matrix.pitch), (rows.stride(0), matrix.pitch, 1))
        assert not whole[..., rows.shape[2] :].any(), "the padding is not zero"
    # One allocation holds all copies, and nothing twice.
    held = sum(
        (1 if "ab"[matrix.place] in shared else batch) * matrix.rows * matrix.pitch
        for matrix in matrices
    )
    assert copies[0].untyped_storage().nbytes() == 2 * held


def test_a_batch_whose_stride_alone_is_misaligned_is_copied() -> None:
    storage = torch.randn(1 + 3 * (16 * 24 + 1), device=DEVICE).to(BF16)
    a = storage.as_strided((3, 16, 24), (16 * 24 + 1, 24, 1))
    b = torch.randn(3, 24, 16, device=DEVICE).to(BF16)
    problem = Problem.of(a, b, torch.empty(3, 16, 16, device="meta"), fingerprint(DEVICE))
    assert not problem.a.aligned
    copy, other = bind_copy(problem)(a, b)
    assert torch.equal(copy, a)
    assert Operand.of(copy).aligned
    assert other is b


@pytest.mark.skipif(CUDA, reason="Triton is not interpreting")
def test_no_word_outside_the_rows_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a page that cannot be read."""
    interpreted._mend()  # before its load is replaced
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    load, read = builder.create_masked_load, set[int]()

    def recorded(ptrs: Any, mask: Any, *more: Any) -> Any:
        read.update(ptrs.data[mask.data.astype(bool)].tolist())
        return load(ptrs, mask, *more)

    monkeypatch.setattr(builder, "create_masked_load", recorded)
    # Rows that begin within a word, and at a word that is not a multiple of 16 bytes.
    for offset, columns in itertools.product((1, 2, 3, 4), (13, 14, 15, 16)):
        stride = columns + 8  # so that a word between two rows may have no byte of either
        storage = torch.randn(8 + 3 * stride).to(BF16)
        a, b = storage.as_strided((3, columns), (stride, 1), offset), torch.zeros(columns, 16)
        out = torch.empty(3, 16, device="meta")
        read.clear()
        copy, _ = bind_copy(Problem.of(a, b.to(BF16), out, fingerprint(DEVICE)))(a, b)
        assert torch.equal(copy, a)
        spans = [(row.data_ptr(), row.data_ptr() + 2 * columns) for row in a]
        assert read
        assert all(any(w < end and start < w + 8 for start, end in spans) for w in read)


def test_nan_and_inf_are_copied_exactly() -> None:
    a = guarded((7, 9), "row_unaligned", BF16).tensor
    a[3, 5] = float("nan")
    a[6, 8] = float("-inf")
    problem = Problem.of(a, a.t(), torch.empty(7, 7, device="meta"), fingerprint(DEVICE))
    copy, _ = bind_copy(problem)(a, a.t())
    assert torch.equal(copy.view(torch.int16), a.view(torch.int16))


def test_offsets_past_32_bits_are_computed_in_64() -> None:
    wide = Operand(BF16, "row", False, wide=True)
    types = copy_build(problem(70_000, 64, 40_001, a=wide, b=ALIGNED)).types
    assert (types["x_stride"], types["x_pitch"]) == ("i64", "i64")
    types = copy_build(problem(batch=2)).types
    assert (types["x_apart"], types["y_apart"]) == ("i64", "i64")
    types = copy_build(problem()).types
    assert {types[f"{x}_{what}"] for x in "xy" for what in ("stride", "pitch")} == {"i32"}
    # The copy is larger than its source, which may be broadcast.
    assert realigned(problem(70_000, 64, 40_001, b=ALIGNED)).a.wide


# Problems that it serves.


@pytest.mark.parametrize(
    "instance",
    [
        problem(),
        problem(4096, 4096, 4095, b=ALIGNED, out=ALIGNED),
        problem(2048, 4001, 4096, a=ALIGNED),
        problem(a="col", b="strided"),
        problem(out=Operand(BF16, "col", False)),
        problem(out=Operand(FP32, aligned=False), bias=FP32, residual=Operand(BF16, "strided")),
        problem(epilogue="swiglu"),
        problem(dtype=FP32, tf32=True),
        problem(device=A100, dtype=FP16),
        problem(1, 1, 1),
        problem(300, 100, 300, batch=100),
        problem(1500, 1500, 1500, batch=12),
        problem(33, 65, 127, batch=4, b=Operand(BF16, "col")),
        problem(epilogue="swiglu", b="col", batch=3, bias=BF16),
        problem(device=A100, batch=3),
    ],
    ids=str,
)
def test_serves(instance: Problem) -> None:
    assert KERNEL.reasons_against(instance) == []
    configs = KERNEL.configs(instance)
    assert configs[0] == KERNEL.default_config(instance)
    assert 1 <= len(configs) <= 10
    assert len(set(configs)) == len(configs)
    served = realigned(instance)
    assert served.a.aligned
    assert served.b.aligned
    for config in configs:
        # The estimate is the inner kernel's, plus the copies.
        time = KERNEL.estimate_us(instance, config)
        inner = inner_kernels()[config.inner]
        assert time is not None
        assert time > inner.estimate_us(served, config.config)
        assert inner.reasons_against(served) == []
        copied = KERNEL.workspace_bytes(instance, config)
        assert copied >= inner.workspace_bytes(served, config.config)


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        (problem(a=ALIGNED, b=ALIGNED), "aligned already"),
        (problem(a=ALIGNED, b=ALIGNED, batch=2), "aligned already"),
        (problem(dtype=FP32), "without TF32"),
        (problem(dtype=torch.float64), "torch.float64 operands"),
        (problem(k=0), "nothing to multiply"),
        (problem(device=DeviceFingerprint("cpu", "cpu")), "not on cpu"),
        (problem(a=Operand(FP16, aligned=False)), "differ in dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declines_with_the_reason(instance: Problem, reason: str) -> None:
    assert any(reason in text for text in KERNEL.reasons_against(instance))


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any machine propose configs for an H200, even if it cannot build a launcher."""
    for name in ("triton_kernel", "hopper.warp_specialized"):
        monkeypatch.setattr(f"tmm_triton.{name}.missing_toolchain", lambda: ())


@pytest.mark.usefixtures("toolchain")
def test_the_best_inner_kernel_is_proposed_first() -> None:
    """On Hopper the warp-specialised kernel is first, and others remain candidates. Older GPUs use
    a kernel without TMA, and gated products a kernel with two accumulators."""

    def inner(problem: Problem) -> list[str]:
        return [config.inner.removeprefix("triton.") for config in KERNEL.configs(problem)]

    assert inner(problem())[0] == "warp_specialized"
    assert "persistent" in inner(problem())
    assert "grouped" in inner(problem(device=A100))
    assert not {"warp_specialized", "persistent"} & set(inner(problem(device=A100)))
    # The up half of b does not begin at a multiple of 16 bytes.
    assert set(inner(problem(epilogue="swiglu"))) == {"fused_epilogue"}
    assert inner(problem(b="col", epilogue="swiglu"))[0] == "warp_specialized"
    # Too few tiles for the SMs: ranges of K are proposed too.
    assert "split_k" in inner(problem(127, 4093, 4096, a=ALIGNED))


@pytest.mark.usefixtures("toolchain")
def test_estimates_count_the_copies() -> None:
    """Reading and writing 33.5 MB at 4.27 TB/s takes 16 µs for each operand."""

    def estimate(instance: Problem) -> float:
        # The default config may depend on the copied operands, so one config is used for all.
        time = KERNEL.estimate_us(instance, KERNEL.default_config(problem()))
        assert time is not None
        return time

    both, one = estimate(problem()), estimate(problem(b=ALIGNED))
    assert 14 < both - one < 18
    product = inner_kernels()["triton.warp_specialized"]
    config = KERNEL.default_config(problem()).config
    alone = product.estimate_us(realigned(problem()), config)
    assert alone is not None
    assert 30 < both - alone < 38
    # 12 matrices of 1500 rows of 1536 elements, of each operand.
    instance = problem(1500, 1500, 1500, batch=12)
    time = KERNEL.estimate_us(instance, KERNEL.default_config(instance))
    inner = KERNEL.default_config(instance)
    alone = inner_kernels()[inner.inner].estimate_us(realigned(instance), inner.config)
    assert time is not None
    assert alone is not None
    assert time - alone == pytest.approx(2.0 + 12 * 4 * 1500 * 1536 * 2 / Machine.of(H200).memory)


def test_memory_for_the_copies_is_counted() -> None:
    config = KERNEL.default_config(problem())
    config = replace(config, config=replace(config.config, BLOCK_N=128, subtiles=4, tail_splits=1))
    # 4097 elements in rows of 4160, the next multiple of 128 bytes.
    assert KERNEL.workspace_bytes(problem(), config) == 2 * 4097 * 4160 * 2
    assert KERNEL.workspace_bytes(problem(b=ALIGNED), config) == 4097 * 4160 * 2
    # Each matrix of a batch is copied; a matrix that all share is copied once.
    instance = problem(300, 100, 300, batch=100, b=ALIGNED)
    batched = KERNEL.default_config(instance)
    held = inner_kernels()[batched.inner].workspace_bytes(realigned(instance), batched.config)
    assert KERNEL.workspace_bytes(instance, batched) == 100 * 300 * 320 * 2 + held
    # Tiles cut along K leave a partial sum for each SM in the workspace.
    config = replace(config, config=replace(config.config, tail_splits=4))
    tile = config.config.BLOCK_M * config.config.BLOCK_N
    assert KERNEL.workspace_bytes(problem(), config) == 2 * 4097 * 4160 * 2 + 132 * tile * 4


# Its configs.


def test_a_config_is_one_flat_object() -> None:
    for instance in (problem(), problem(127, 4093, 4096, a=ALIGNED), problem(device=A100)):
        for config in KERNEL.configs(instance):
            document = config.to_json()
            assert document == {"inner": config.inner, **config.config.to_json()}
            assert all(type(value) in (int, float, bool, str) for value in document.values())
            stored = json.loads(json.dumps(document))
            assert RealignedConfig.from_json(stored) == config
            assert stored == document  # a record's own fields
            assert str(config).startswith(f"inner={config.inner} BLOCK_M=")


@pytest.mark.parametrize(
    "change",
    [
        {"inner": "triton.naive"},
        {"inner": "triton.grouped"},
        {"inner": ["triton.persistent"]},
        {"inner": None},
        {"BLOCK_M": 48},
        {"BLOCK_M": "128"},
        {"config": {}},
    ],
    ids=str,
)
def test_a_config_out_of_bounds_does_not_parse(change: dict[str, Any]) -> None:
    document = KERNEL.default_config(problem()).to_json()
    with pytest.raises(ConfigError):
        RealignedConfig.from_json({**document, **change})
    without = {name: value for name, value in document.items() if name not in change}
    if len(without) < len(document):
        with pytest.raises(ConfigError):
            RealignedConfig.from_json(without)


def test_a_config_names_its_own_kernel() -> None:
    config = KERNEL.default_config(problem())
    with pytest.raises(ValueError, match="takes no"):
        RealignedConfig(inner="triton.grouped", config=config.config)
    with pytest.raises(ValueError, match="must be one of"):
        RealignedConfig(inner="triton.realigned", config=config)


def test_its_version_changes_with_any_inner_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Realigned().version
    assert Realigned().version == before
    kernels = dict(inner_kernels())
    for name, kernel in kernels.items():
        with monkeypatch.context() as patch:
            edited = type("Edited", (type(kernel),), {"version": "edited"})()
            patch.setitem(inner_kernels(), name, edited)
            assert Realigned().version != before


def test_without_gluon_the_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmm_triton.plugin import Missing

    absent = Missing("triton.warp_specialized", "no Gluon")
    monkeypatch.setitem(inner_kernels(), absent.name, absent)
    assert KERNEL.reasons_against(problem()) == []
    assert KERNEL.default_config(problem()).inner == "triton.persistent"


# The compiled kernel.


def compiled(problem: Problem, count: int) -> list[dict[str, Any]]:
    """The copy of the operands, or the products of the first ``count`` configs."""
    if count == 0:
        results = [copy_build(problem).compile_for(HOPPER)]
    else:
        results = [
            result
            for config in list(KERNEL.configs(problem))[:count]
            for result in _products(problem, config)
        ]
    found = []
    for result in results:
        ptx = result.asm["ptx"]
        found.append({
            "shared": result.metadata.shared,
            "stack": usage(result.asm["cubin"])["STACK"],
            "loads": sorted(set(re.findall(r"ld\.global\.(\S*)", ptx))),
            "stores": sorted(set(re.findall(r"st\.global\.(\S*)", ptx))),
            "wgmma": ptx.count("wgmma.mma_async"),
            "wide": ptx.count("mul.lo.s64") + ptx.count("mad.lo.s64"),
        })  # fmt: skip
    return found


def _products(problem: Problem, config: RealignedConfig) -> list[Any]:
    kernel: Any = inner_kernels()[config.inner]
    served = realigned(problem)
    if config.inner != "triton.warp_specialized":
        return [build.compile_for(HOPPER) for build in kernel.builds(served, config.config)]
    of = kernel.specialize(served, config.config)
    fn = importlib.import_module(kernel.__module__).warp_specialized_kernel
    src = source(fn, of.types, of.constants, of.divisible)
    return [compile_for(HOPPER, src, **of.options)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance", "loads", "stores"),
    [
        (problem(), ["b64"], ["b64"]),
        # A strided matrix is loaded element by element, and stored in vectors.
        (problem(dtype=FP16, a="col", b="strided"), ["b16", "b64"], ["b64", "v4.b32"]),
        (problem(dtype=FP32, tf32=True, b=Operand(FP32)), ["b64"], ["b64"]),
        (
            problem(70_000, 4096, 40_001, a=Operand(BF16, "row", False, True), b=ALIGNED),
            ["b64"],
            ["b64"],
        ),
        (problem(300, 100, 300, batch=100), ["b64"], ["b64"]),
    ],
    ids=str,
)
def test_the_copy_compiles_for_hopper(
    instance: Problem, loads: list[str], stores: list[str], uninterpreted: Uninterpreted
) -> None:
    (result,) = uninterpreted(compiled, instance, 0)
    assert result["stack"] == 0
    # Eight programs to an SM.
    assert result["shared"] <= H200.shared_memory // 8
    assert (result["loads"], result["stores"]) == (loads, stores)
    assert (result["wide"] > 0) == (instance.m == 70_000 or instance.batch > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance", "count", "stack"),
    [
        (problem(), 8, 0),
        (problem(8192, 50257, 768, a=ALIGNED), 2, 0),
        (problem(1500, 1500, 1500, batch=12), 2, 0),
        (problem(127, 4093, 4096, dtype=FP16, a=Operand(FP16)), 2, 0),
        # A few registers of the epilogue may go to local memory.
        (problem(epilogue="silu", bias=BF16), 2, 128),
    ],
    ids=str,
)
@pytest.mark.slow
def test_configs_compile_for_hopper(
    instance: Problem, count: int, stack: int, uninterpreted: Uninterpreted
) -> None:
    """Several configs of one problem, and the first configs of other problems.
    test_warp_specialized.py compiles the inner kernel with all tiles."""
    least, count = count, 16 if every_case() else count
    results = uninterpreted(compiled, instance, count)
    assert len(results) >= least
    for result in results:
        assert result["shared"] <= H200.shared_memory, result
        assert result["stack"] <= stack, result
    # The kernels that add partial sums have no wgmma.
    assert sum(result["wgmma"] > 0 for result in results) >= least
