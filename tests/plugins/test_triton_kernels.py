"""The Triton kernels in the interpreter, with sizes that no tile divides. Configs are far smaller
than those proposed, so that a small matrix has every tail, split and tile order."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from tmm_triton import plugin
from tmm_triton import triton_kernel as kernel_module
from tmm_triton.naive import Naive
from tmm_triton.operands import TileConfig
from tmm_triton.persistent import Persistent, PersistentConfig
from tmm_triton.split_k import SplitK, SplitKConfig
from tmm_triton.tiled import FusedEpilogue, FusedEpilogueConfig, Grouped, GroupedConfig
from tmm_triton.triton_kernel import TritonKernel

import tmm_core
from tmm_core import Config, ConfigError, Epilogue, Operand, Problem
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint, fingerprint, interpreting
from tmm_core.triton import device_function

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
#: Relative to the fp64 reference's norm. The interpreter truncates to bf16 where a GPU rounds.
TOLERANCE = {FP16: 4e-4, BF16: 5e-3, FP32: 5e-7}

H200 = DeviceFingerprint(
    type="cuda", name="NVIDIA H200", capability=(9, 0), sm_count=132, shared_memory=232448
)
A100 = DeviceFingerprint(
    type="cuda", name="NVIDIA A100", capability=(8, 0), sm_count=108, shared_memory=166912
)
UNKNOWN = replace(
    H200, name="NVIDIA RTX 9090", capability=(13, 0), sm_count=60, shared_memory=99840
)

TILE = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16, "num_stages": 2, "num_warps": 4}
KERNELS: dict[TritonKernel[Any], TileConfig] = {
    Naive(): TileConfig(**TILE),
    Grouped(): GroupedConfig(**TILE, GROUP_M=3),
    SplitK(): SplitKConfig(**TILE, SPLIT_K=3, SWAP=True),
    FusedEpilogue(): FusedEpilogueConfig(**TILE, GROUP_M=3, SUBTILE=2),
    Persistent(): PersistentConfig(**TILE, GROUP_M=3, SUBTILE=2, FLATTEN=True),
}
GATES = [kernel for kernel in KERNELS if kernel.supports.gated]
TAKES_ANY_STRIDE = [kernel for kernel in KERNELS if not isinstance(kernel, Persistent)]

interpreted = pytest.mark.skipif(not interpreting(), reason="Triton is not interpreting")


def named(kernels: Any) -> Any:
    return pytest.mark.parametrize("kernel", list(kernels), ids=lambda kernel: kernel.name)


def ask(m: int = 4096, n: int = 4096, k: int = 4096, layout: str = "nt", **fields: Any) -> Problem:
    """A problem without tensors; ``layout`` as ``Problem`` prints it."""
    dtype = fields.pop("dtype", BF16)
    aligned = fields.pop("aligned", True)
    layouts = {"n": "row", "t": "col", "s": "strided"}
    a, b = (Operand(dtype, layouts[x], aligned and x != "s") for x in layout)
    epilogue = parse(fields.pop("epilogue", None))
    given = {"a": a, "b": b, "out": Operand(dtype, "row", aligned), "device": H200, **fields}
    return Problem(m=m, n=n, k=k, epilogue=epilogue, **given)


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def aligned(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A [rows, cols] matrix whose rows start at multiples of 16 bytes. NaN between them would be
    multiplied by a load past the end of a row."""
    vector = 16 // dtype.itemsize
    buffer = torch.full((rows, -(-cols // vector) * vector + vector), float("nan"), dtype=dtype)
    buffer[:, :cols] = random(rows, cols, dtype=dtype, seed=seed)
    return buffer[:, :cols]


def problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    epilogue: Any = None,
) -> Problem:
    return Problem.of(
        a, b, out, fingerprint(torch.device("cpu")),
        bias=bias, residual=residual, epilogue=parse(epilogue),
        scaled=alpha != 1.0, tf32=a.dtype is FP32,
    )  # fmt: skip


def run(
    kernel: TritonKernel[Any],
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    epilogue: Any = None,
) -> torch.Tensor:
    """Return the kernel's result, after comparing it with the fp64 reference."""
    function = parse(epilogue)
    if out is None:
        n = b.shape[-1] // (2 if function.gated else 1)
        out = torch.full((*a.shape[:-1], n), float("nan"), dtype=a.dtype)
    problem = problem_of(a, b, out, bias=bias, residual=residual, alpha=alpha, epilogue=function)
    assert kernel.reasons_against(problem) == []
    result = kernel.bind(problem, config)(a, b, bias, residual, alpha, out)
    assert result is out

    z = alpha * (a.double() @ b.double())
    if bias is not None:
        z = z + bias.double()
    expected = function.apply(z)
    if residual is not None:
        expected = expected + residual.double()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[out.dtype], f"{kernel.name} {config}: {error:.1e}"
    return out


# -- what they compute --------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(
    ("size", "dtype"),
    [((37, 29, 51), FP16), ((37, 29, 51), BF16), ((37, 29, 51), FP32), ((130, 70, 45), FP16)],
    ids=str,
)
@named(KERNELS)
@pytest.mark.slow(quick=6)
def test_tails(kernel: TritonKernel[Any], size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = size
    run(kernel, KERNELS[kernel], aligned(m, k, dtype), aligned(k, n, dtype, seed=1))


@interpreted
@pytest.mark.parametrize("layouts", ["nt", "tn", "tt"])
@named(KERNELS)
@pytest.mark.slow(quick=6)
def test_all_fused_terms_in_all_layouts(kernel: TritonKernel[Any], layouts: str) -> None:
    a, b = aligned(37, 51, FP16), aligned(51, 29, FP16, seed=1)
    if layouts[0] == "t":
        a = aligned(51, 37, FP16).t()
    if layouts[1] == "t":
        b = aligned(29, 51, FP16, seed=1).t()
    canvas = torch.full((40, 64), 7.0, dtype=FP32)
    out = canvas[2:39, 1:59:2]
    run(
        kernel, KERNELS[kernel], a, b,
        out=out,
        bias=random(2 * 29, dtype=BF16)[::2],
        residual=random(1, 29, dtype=FP16).expand(37, 29),
        alpha=-0.5,
        epilogue="silu+softcap(3)",
    )  # fmt: skip
    out.fill_(7.0)
    assert (canvas == 7.0).all(), "wrote outside of out"


@interpreted
@pytest.mark.parametrize("gated", [False, True])
def test_every_stage_of_a_chain_is_applied(gated: bool) -> None:
    kernel = GATES[0] if gated else Naive()
    for text in ("tanh+scale(3)", "tanh+scale(3)+softcap(2)", "tanh+scale(3)+softcap(2)+relu"):
        epilogue = f"swiglu+{text}" if gated else text
        config = KERNELS[kernel] if gated else TileConfig(**TILE)
        run(kernel, config, random(5, 16), random(16, 8), epilogue=epilogue)


@interpreted
@named(TAKES_ANY_STRIDE)
def test_strides_of_any_kind(kernel: TritonKernel[Any]) -> None:
    config = KERNELS[kernel]
    strided = random(74, 102, dtype=BF16)[::2, ::2]
    expanded = random(51, 1, dtype=BF16).expand(51, 29)
    assert (strided.stride(), expanded.stride()) == ((204, 2), (1, 0))
    run(kernel, config, strided, expanded)
    run(kernel, config, random(1, 51).expand(37, 51), random(29, 51)[:, ::1].t())
    run(kernel, config, random(1, 1).expand(37, 51), random(51, 29)[:, :29])


@interpreted
@named(KERNELS)
@pytest.mark.slow(quick=4)
def test_batch(kernel: TritonKernel[Any]) -> None:
    config = KERNELS[kernel]
    a = random(3, 48, 40, dtype=FP16).transpose(1, 2)
    residual = random(3, 1, 32, dtype=FP16).expand(3, 40, 32)
    run(kernel, config, a, random(3, 48, 32, dtype=FP16), bias=random(32), residual=residual)
    shared = random(1, 48, 32, dtype=FP16).expand(3, 48, 32)
    assert shared.stride(0) == 0
    run(kernel, config, a, shared, epilogue="relu")


#: Operands of more dimensions, and whether they are folded without a copy.
LAYOUTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    "rows": (lambda r: r(2, 3, 7, 32), (32, 16), True),
    "padded rows": (lambda r: r(2, 3, 7, 40)[..., :32], (32, 16), True),
    "the last rows": (lambda r: r(2, 3, 7, 32)[:, :, -1:], (32, 16), True),
    "one row": (lambda r: r(32), (32, 16), True),
    "batch": (lambda r: r(2, 3, 7, 32), (2, 3, 32, 16), True),
    "transposed batch": (lambda r: r(2, 3, 32, 8).mT, (2, 3, 32, 16), True),
    "shared matrix": (lambda r: r(7, 32), (2, 32, 16), True),
    "cut rows": (lambda r: r(2, 3, 9, 32)[:, :, :7], (32, 16), False),
    "exchanged": (lambda r: r(3, 2, 7, 32).transpose(0, 1), (32, 16), False),
    "expanded": (lambda r: r(1, 3, 7, 32).expand(2, 3, 7, 32), (32, 16), False),
    "repeated matrix": (lambda r: r(2, 3, 7, 32), (3, 32, 16), False),
}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory comes full of NaN. Nothing is verified before: that takes five seconds of each test,
    which compares the values itself."""
    torch.use_deterministic_algorithms(True)
    with tmm_core.override(verify=False):
        yield
    torch.use_deterministic_algorithms(False)


@interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", LAYOUTS)
@named(KERNELS)
@pytest.mark.slow(quick=8)
def test_more_dimensions(kernel: TritonKernel[Any], layout: str) -> None:
    make, shape, in_place = LAYOUTS[layout]
    a, b = make(partial(random, dtype=FP16)), random(*shape, dtype=FP16, seed=1)
    product = a.double() @ b.double()
    row, added = random(16), random(*product.shape, dtype=FP16, seed=2)
    forced: Any = {"kernel": kernel.name, "config": KERNELS[kernel]}

    def compare(y: torch.Tensor, expected: torch.Tensor) -> None:
        assert (y.shape, y.stride()) == (expected.shape, expected.stride())
        assert (y.double() - expected).norm() < TOLERANCE[FP16] * expected.norm()

    y = tmm_core.matmul(a, b, bias=row, epilogue="relu", **forced)
    compare(y, (product + row).relu())
    assert y._is_view() is not in_place
    out = torch.empty_like(y)
    assert tmm_core.matmul(a, b, bias=row, epilogue="relu", out=out, **forced) is out
    assert torch.equal(out, y)
    for residual in (added, row.half()):
        planned = tmm_core.plan(a, b, residual=residual, **forced)
        y = planned(a, b, None, residual)
        compare(y, product + residual)
        assert y._is_view() is not in_place


@interpreted
@pytest.mark.parametrize("epilogue", ["swiglu", "geglu+scale(0.5)"])
@named(GATES)
@pytest.mark.slow(quick=4)
def test_gated(kernel: TritonKernel[Any], epilogue: str) -> None:
    # 29 is no multiple of BLOCK_N: the gate half's last tile would run into the up half.
    weights = aligned(58, 51, FP16, seed=1).t()
    residual = random(37, 29, dtype=FP16)
    run(
        kernel, KERNELS[kernel], aligned(37, 51, FP16), weights,
        bias=random(58), residual=residual, alpha=0.5, epilogue=epilogue,
    )  # fmt: skip
    whole = replace(KERNELS[kernel], SUBTILE=1)
    run(
        kernel,
        whole,
        random(2, 40, 48, dtype=FP16),
        random(2, 48, 64, dtype=FP16),
        epilogue=epilogue,
    )


@interpreted
@named(KERNELS)
@pytest.mark.slow(quick=4)
def test_a_row_does_not_depend_on_the_others(kernel: TritonKernel[Any]) -> None:
    config = KERNELS[kernel]
    a, b = aligned(70, 51, FP16), aligned(51, 29, FP16, seed=1)
    together = run(kernel, config, a, b, epilogue="gelu")
    for rows in (slice(0, 1), slice(33, 34), slice(5, 47)):
        alone = run(kernel, config, a[rows], b, epilogue="gelu")
        assert torch.equal(alone, together[rows])


# -- split-K ------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 2, 5, 7, 12])
@pytest.mark.slow(quick=6)
def test_uneven_splits(split: int, swap: bool, stages: int) -> None:
    """Seven steps, the last of them short: 7 = 4+3 = 2+2+1+1+1, and 12 leaves five without."""
    tile = TILE | {"num_stages": stages}
    config = SplitKConfig(**tile, SPLIT_K=split, SWAP=swap)
    a, b = aligned(5, 6 * 16 + 3, BF16), aligned(6 * 16 + 3, 29, BF16, seed=1)
    run(SplitK(), config, a, b, bias=random(29), epilogue="relu2")


@interpreted
@pytest.mark.parametrize("split", [1, 3])
def test_whole_steps_through_registers(split: int) -> None:
    """Where only the end of a program's range of K bounds what it loads ahead."""
    tile = TILE | {"num_stages": 1}
    config = SplitKConfig(**tile, SPLIT_K=split, SWAP=True)
    a, b = aligned(33, 64, FP16), aligned(64, 40, FP16, seed=1)
    run(SplitK(), config, a, b, epilogue="silu")


def test_through_registers_is_for_few_rows_that_end_aligned() -> None:
    def proposes(problem: Problem) -> bool:
        return any(config.num_stages == 1 for config in SplitK().configs(problem))

    decode = ask(16, 4096, 14336)
    assert proposes(decode)
    assert proposes(replace(decode, m=32))
    assert not proposes(replace(decode, m=33))
    assert not proposes(replace(decode, k=14340))
    assert not proposes(replace(decode, n=4100, b=replace(decode.b, layout="row")))
    assert not proposes(replace(decode, device=A100))


def test_partial_sums_are_workspace() -> None:
    problem = ask(16, 4096, 4096)
    config = SplitKConfig(**TILE, SPLIT_K=4, SWAP=False)
    assert SplitK().workspace_bytes(problem, config) == 4 * 4 * 16 * 4096
    assert SplitK().workspace_bytes(problem, replace(config, SPLIT_K=1)) == 0


@pytest.mark.parametrize("size", [(16384, 16384, 4096), (8192, 8192, 65536)], ids=str)
def test_split_k_keeps_its_workspace_in_bounds(size: tuple[int, int, int]) -> None:
    kernel, problem = SplitK(), ask(*size)
    for config in [*kernel.configs(problem), kernel.default_config(problem)]:
        assert kernel.workspace_bytes(problem, config) <= 2**27


# -- persistent ---------------------------------------------------------------------------


@interpreted
def test_persistent_takes_a_single_row_of_any_stride() -> None:
    row = random(9, 51, dtype=FP16)[4:5]
    assert row.stride(0) * 2 % 16  # of no meaning for one row, and not what TMA accepts
    weights = aligned(51, 29, FP16)
    first = torch.empty(51 + 8, dtype=FP16)  # 16-byte aligned, as the class has it
    a = first[:51].copy_(row[0]).as_strided((1, 51), (51, 1))
    run(Persistent(), KERNELS[next(k for k in KERNELS if isinstance(k, Persistent))], a, weights)


@interpreted
@pytest.mark.parametrize("n", [1, 29, 32])
def test_persistent_writes_rows_to_their_end_and_no_further(n: int) -> None:
    config = PersistentConfig(**TILE, GROUP_M=1, SUBTILE=1, FLATTEN=False)
    canvas = torch.full((37, 48), 7.0, dtype=FP16)
    run(Persistent(), config, aligned(37, 51, FP16), aligned(51, n, FP16), out=canvas[:, :n])
    assert (canvas[:, n:] == 7.0).all()


@pytest.mark.parametrize(
    ("problem", "stored_by"),
    [
        (ask(), "descriptor"),
        (ask(out=Operand(BF16, "col")), "pointer"),
        (ask(out=Operand(BF16, "row", aligned=False)), "pointer"),
        (ask(n=4097), "pointer"),  # TMA stores whole units of 16 bytes
    ],
)
def test_persistent_stores_by_tma_where_it_may(problem: Problem, stored_by: str) -> None:
    kernel = Persistent()
    (build,) = kernel.builds(problem, kernel.default_config(problem))
    assert ("out_desc" in build.types) == (stored_by == "descriptor")
    assert ("out_ptr" in build.types) == (stored_by == "pointer")


# -- what they decline --------------------------------------------------------------------

UNFUSABLE = Epilogue("unfusable", lambda z: z)
CPU = DeviceFingerprint(type="cpu", name="cpu")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ask(dtype=torch.float64), "torch.float64 operands"),
        (ask(dtype=torch.int8), "torch.int8 operands"),
        (ask(dtype=torch.complex64), "torch.complex64 operands"),
        (ask(b=Operand(FP16)), "operands differ in dtype"),
        (ask(out=Operand(torch.float64)), "out of torch.float64"),
        (ask(bias=torch.int32), "bias of torch.int32"),
        (ask(residual=Operand(torch.float64)), "residual of torch.float64"),
        (ask(epilogue=UNFUSABLE), "'unfusable' has no device function"),
        (ask(m=0), "a dimension is 0"),
        (ask(k=0), "a dimension is 0"),
        (ask(batch=70000), "batch 70000 exceeds"),
        (ask(device=CPU), "not on cpu"),
        (ask(device=replace(H200, capability=(7, 5))), "this is 7.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@named(KERNELS)
def test_declines(kernel: TritonKernel[Any], problem: Problem, reason: str) -> None:
    assert any(reason in r for r in kernel.reasons_against(problem))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ask(device=A100), "capability 9.0"),
        (ask(layout="st"), "a has no contiguous dimension"),
        (ask(layout="nt", b=Operand(BF16, "col", aligned=False)), "b is not aligned"),
        (ask(dtype=FP32), "fp32 without TF32"),
        (ask(device=replace(H200, cuda="hip-6.4", capability=(9, 4))), "NVIDIA"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_persistent_declines(problem: Problem, reason: str) -> None:
    assert any(reason in r for r in Persistent().reasons_against(problem))
    assert Grouped().reasons_against(problem) == []


@named([k for k in KERNELS if not k.supports.gated])
def test_one_accumulator_declines_gates(kernel: TritonKernel[Any]) -> None:
    (reason,) = kernel.reasons_against(ask(epilogue="swiglu"))
    assert "'swiglu' needs two" in reason


@pytest.mark.parametrize("lacking", ["a C compiler", "Python.h"])
def test_declines_without_a_toolchain(
    lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("CC", raising=False)
    kernel_module._driver_fault.cache_clear()
    with monkeypatch.context() as missing:
        if lacking == "a C compiler":
            missing.setattr(kernel_module.toolchain.shutil, "which", lambda name: None)
        else:
            paths = {"include": str(tmp_path)}
            missing.setattr(kernel_module.toolchain.sysconfig, "get_paths", lambda scheme: paths)
        # A driver that is loaded, or cached on disk, needs neither.
        missing.setattr(kernel_module.triton.runtime, "driver", None)
        try:
            reasons = Grouped().reasons_against(ask())
        finally:
            kernel_module._driver_fault.cache_clear()
    (reason,) = reasons
    assert reason.startswith(f"Triton needs {lacking} (")
    # Once it is installed, this process finds it.
    header = tmp_path / "Python.h"
    header.write_text("")
    paths = {"include": str(tmp_path)}
    monkeypatch.setattr(kernel_module.toolchain.sysconfig, "get_paths", lambda scheme: paths)
    monkeypatch.setattr(kernel_module.toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert not kernel_module.missing_toolchain()


def test_a_signals_handler_is_not_taken_for_a_driver_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("from the handler")

    class Driver:
        """It is being built when a signal arrives."""

        @property
        def active(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            raise AssertionError("the handler raises")

    kernel_module._driver_fault.cache_clear()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as building:
            building.setattr(kernel_module.triton.runtime, "driver", Driver())
            with pytest.raises(TimeoutError, match="from the handler"):
                kernel_module._driver_fault("Triton needs a C compiler")
        loaded = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace(launch=None)))
        monkeypatch.setattr(kernel_module.triton.runtime, "driver", loaded)
        assert kernel_module._driver_fault("Triton needs a C compiler") == ()
    finally:
        signal.signal(signal.SIGUSR1, before)
        kernel_module._driver_fault.cache_clear()


@pytest.mark.slow
def test_without_triton_every_kernel_declines() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from tmm_core import Operand, Problem
from tmm_core.spec.device import fingerprint
from tmm_triton.plugin import KERNELS, tmm_kernels
operand = Operand(torch.float32)
problem = Problem(2, 2, 2, operand, operand, operand, fingerprint(torch.device("cpu")))
kernels = tmm_kernels()
assert [k.name for k in kernels] == list(KERNELS)
assert all(k.reasons_against(problem) == ["Triton is not installed"] for k in kernels)
assert all(k.version for k in kernels)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("lacks", [ImportError, AttributeError, TypeError])
def test_a_kernel_that_does_not_import_costs_itself_only(
    lacks: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking:
        def WarpSpecialized(self) -> None:  # noqa: N802  # a kernel's class
            raise lacks("no such feature")

    monkeypatch.setitem(sys.modules, "tmm_triton.hopper.warp_specialized", Lacking())  # type: ignore[arg-type]
    kernels = {kernel.name: kernel for kernel in plugin.tmm_kernels()}
    (reason,) = kernels["triton.warp_specialized"].reasons_against(ask())
    assert "does not have what it needs" in reason
    assert kernels["triton.grouped"].reasons_against(ask()) == []


# -- configs, estimates, compilations -----------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"BLOCK_M": 48},
        {"BLOCK_N": 8},
        {"BLOCK_K": 1024},
        {"num_stages": 0},
        {"num_warps": 3},
        {"GROUP_M": 0},
        {"SPLIT_K": 0},
        {"SPLIT_K": 100000},
        {"SUBTILE": 3},
    ],
    ids=str,
)
@named(KERNELS)
def test_configs_know_their_bounds(kernel: TritonKernel[Any], wrong: dict[str, Any]) -> None:
    doc = KERNELS[kernel].to_json()
    if not set(wrong) <= set(doc):
        pytest.skip(f"{kernel.name} has no {wrong}")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kernel.config_type.from_json(doc | wrong)


SHAPES = [
    (1, 1, 1), (1, 4096, 4096), (16, 16, 65536), (37, 29, 51), (128, 8192, 64),
    (4096, 4096, 4096), (8192, 14336, 4096), (65536, 16, 128),
]  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"aligned": False, "layout": "nn"},
    {"dtype": FP32},
    {"dtype": FP32, "tf32": True, "residual": Operand(FP32)},
    {"epilogue": "swiglu"},
    {"batch": 64},
]


@pytest.mark.parametrize("device", [H200, A100, UNKNOWN], ids=lambda d: d.name)
@named(KERNELS)
@pytest.mark.slow(quick=6)
def test_configs_fit_the_device(kernel: TritonKernel[Any], device: DeviceFingerprint) -> None:
    proposed = 0
    for shape in SHAPES:
        for variant in VARIANTS:
            problem = ask(*shape, device=device, **variant)
            if kernel.reasons_against(problem):
                continue
            configs = list(kernel.configs(problem))
            assert len(configs) == len(set(configs)) <= 24
            for config in [*configs, kernel.default_config(problem)]:
                assert config.shared_memory(problem) <= device.shared_memory, (problem, config)
                assert kernel.estimate_us(problem, config) > 0
                assert kernel.config_type.from_json(config.to_json()) == config
            proposed += len(configs)
    assert proposed > 0 or (isinstance(kernel, Persistent) and device is A100)


def variants_by_m(kernel: TritonKernel[Any], sizes: range, config: Config) -> int:
    seen = []
    for m in sizes:
        compiled = kernel.builds(ask(m, 4096, 4096), config)
        key = [(b.fn, b.types, b.constants, b.divisible, b.options) for b in compiled]
        if key not in seen:
            seen.append(key)
    return len(seen)


@named(KERNELS)
def test_one_compilation_serves_every_m(kernel: TritonKernel[Any]) -> None:
    # The second kernel of split-K is an exception: its tile follows M up to 4.
    assert variants_by_m(kernel, range(5, 300), KERNELS[kernel]) == 1


def test_arguments_claimed_divisible_are() -> None:
    problem = ask(100, 4104, 4100, layout="nn")
    config = Grouped().default_config(problem)
    (build,) = Grouped().builds(problem, config)
    claimed = build.divisible
    assert claimed["a_ptr"] == claimed["b_ptr"] == claimed["out_ptr"] == 16  # bytes
    assert claimed["stride_am"] == claimed["stride_bk"] == 8  # elements of 2 bytes
    assert claimed["N"] == 8
    assert not {"K", "M"} & set(claimed)
    assert build.constants["stride_ak"] == build.constants["stride_bn"] == 1
    (build,) = Grouped().builds(ask(100, 4104, 4100, layout="nn", aligned=False), config)
    assert set(build.divisible) == {"N"}


def test_wide_operands_get_64_bit_strides() -> None:
    problem = ask(70000, 64, 70000, a=Operand(BF16, "row", wide=True))
    (build,) = Grouped().builds(problem, Grouped().default_config(problem))
    assert build.types["stride_am"] == "i64"
    assert build.types["stride_bn"] == "i32"


def fastest(problem: Problem) -> str:
    kernels = [k for k in KERNELS if not k.reasons_against(problem)]
    estimates = {k.name: k.estimate_us(problem, k.default_config(problem)) for k in kernels}
    return min(estimates, key=lambda name: estimates[name])


def test_estimates_choose_by_shape() -> None:
    assert fastest(ask(4096, 4096, 4096)) == "triton.persistent"
    assert fastest(ask(4096, 4096, 4096, device=A100)) != "triton.split_k"
    assert fastest(ask(64, 64, 65536)) == "triton.split_k"
    assert fastest(ask(512, 512, 32768, aligned=False)) == "triton.split_k"
    assert fastest(ask(4096, 4096, 4096, aligned=False)) == "triton.fused_epilogue"


@pytest.mark.parametrize(
    ("size", "measured_us"),
    [((4096, 4096, 4096), 190), ((16, 28672, 4096), 64), ((8192, 14336, 4096), 1330)],
)
def test_estimates_are_of_the_right_size(size: tuple[int, int, int], measured_us: float) -> None:
    """Against what cuBLAS, or a bare read of the operands, takes on an H200."""
    problem = ask(*size)
    kernels = [k for k in KERNELS if not k.reasons_against(problem)]
    best = min(k.estimate_us(problem, k.default_config(problem)) for k in kernels)
    assert 0.7 * measured_us < best < 1.6 * measured_us


def test_estimates_count_waves() -> None:
    tile = TileConfig(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_stages=4, num_warps=8)
    one_wave = Naive().estimate_us(ask(128 * 11, 128 * 12, 8192), tile)
    more = Naive().estimate_us(ask(128 * 7, 128 * 19, 8192), tile)
    assert more > 1.8 * one_wave


GELU = device_function(parse("gelu"))


@triton.jit
def _gelu_kernel(z_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, GELU(tl.load(z_ptr + at)))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_gelu_is_as_exact_below_zero_as_above() -> None:
    z = torch.cat([torch.linspace(-13, 8, 8000), torch.logspace(-6, 0, 192) * -1])
    out = torch.full_like(z, float("nan"))
    _gelu_kernel[(1,)](z, out, SIZE=8192)
    # The cumulative distribution from its complement, which cancels nowhere.
    expected = 0.5 * z.double() * torch.special.erfc(-z.double() / math.sqrt(2))
    error = ((out.double() - expected) / expected).abs()
    assert error[z > -6].max() < 3e-6
    assert error.max() < 2e-5  # of e^−z²/2, where z² is rounded
    special = torch.tensor(
        [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-40]
    )
    out = torch.empty_like(special)
    _gelu_kernel[(1,)](special, out, SIZE=8)
    wanted = torch.tensor([0.0, -0.0, float("inf"), float("nan"), float("nan"), 3e38, -0.0, 5e-41])
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_interpreted_kernels_overflow_silently(value: float) -> None:
    """As on a GPU: numpy would warn, also of a difference of infinities."""
    # Each single term overflows, so the order in which terms are added decides nothing.
    signs = torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    a, b = torch.full((3, 16), value), signs * (2 + torch.rand(16, 5))
    for kernel in ("triton.naive", "triton.split_k"):
        y = tmm_core.matmul(a, b, kernel=kernel, epilogue="silu")
        assert torch.equal(y.isfinite(), torch.nn.functional.silu(a @ b).isfinite())
