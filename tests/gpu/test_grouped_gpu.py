"""Tests grouped products on a GPU: the host never waits, calls can be captured, and the expected
kernel answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tmm_core
from tmm_core import Groups, Kernel, Problem
from tmm_core.dispatch import default_dispatcher
from tmm_core.epilogues import parse
from tmm_core.nn import Experts
from tmm_core.spec.device import fingerprint

pytestmark = [
    pytest.mark.gpu,
    # torch warns about its debug mode, in which it raises if the host would wait
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

KERNELS = ("triton.ragged", "triton.warp_specialized", "blas")
ENDS = ((3, 3, 130, 200, 256), (256, 256, 256, 256, 256), (1, 2, 3, 4, 5))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Restore the debug mode in which torch raises if the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def skip_unserved(kernel: str, form: str, *, eight: bool = False) -> None:
    """Skip forms that the kernel does not serve on this GPU: a call would raise."""
    if kernel != "triton.warp_specialized":
        return
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    if form == "columns" or (eight and form == "sums"):
        pytest.skip("tensor maps end at rows of memory")


def offs_of(ends: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def operands(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = {
        "rows": ((256, 128), (5, 128, 192)),
        "columns": ((5, 192, 128), (128, 256)),
        "sums": ((192, 256), (256, 128)),
    }
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes[form])
    return a, b


def expected(form: str, a: torch.Tensor, b: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    parts = []
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        part = slice(start, end)
        if form == "rows":
            parts.append(a[part].double() @ b[group].double())
        elif form == "columns":
            parts.append(a[group].double() @ b[:, part].double())
        else:
            parts.append(a[:, part].double() @ b[part].double())
    if form == "sums":
        return torch.stack(parts)
    return torch.cat(parts, 0 if form == "rows" else 1)


def close(form: str, got: torch.Tensor, wanted: torch.Tensor, end: int) -> None:
    if form != "sums":  # beyond the last group the result is unspecified
        got = got.narrow(0 if form == "rows" else 1, 0, end)
    assert (got.double() - wanted).norm() <= 5e-3 * wanted.norm()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", ["rows", "columns", "sums"])
def test_a_graph_replays_other_sizes_of_groups(form: str, kernel: str, no_waiting: None) -> None:
    if kernel == "blas" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch's grouped product waits for the GPU here")
    if kernel == "blas" and form == "columns":
        pytest.skip("torch asserts on the device that groups start at multiples of 16 bytes")
    skip_unserved(kernel, form)
    a, b = operands(form)
    if form == "sums":
        a = a.mT.contiguous().mT  # as for a weight's gradient
    offs = offs_of(ENDS[0])
    tmm_core.grouped_matmul(a, b, offs=offs, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        y = tmm_core.grouped_matmul(a, b, offs=offs, kernel=kernel)
    torch.cuda.set_sync_debug_mode("default")
    for ends in ENDS:
        offs.copy_(offs_of(ends))
        y.fill_(torch.nan)
        graph.replay()
        close(form, y, expected(form, a, b, ends), ends[-1])


@pytest.mark.parametrize("form", ["rows", "sums"])
@pytest.mark.parametrize(
    ("rows", "columns", "strips"), [(64, 192, 3), (128, 160, 5), (128, 144, 9), (192, 96, 3)]
)
def test_tiles_of_two_products_of_groups(form: str, rows: int, columns: int, strips: int) -> None:
    skip_unserved("triton.warp_specialized", form)
    a, b = operands(form)
    if form == "sums":
        a = a.mT.contiguous().mT
    config = {
        "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": 64, "GROUP_M": 2, "num_stages": 3,
        "schedule": "cooperative" if rows == 192 else "pingpong", "num_warps": 4,
        "consumers": 3 if rows == 192 else 2, "subtiles": strips, "tail_splits": 1, "splits": 1,
        "evict_first": False,
    }  # fmt: skip
    for ends in ENDS:
        y = tmm_core.grouped_matmul(
            a, b, offs=offs_of(ends), kernel="triton.warp_specialized", config=config
        )
        close(form, y, expected(form, a, b, ends), ends[-1])


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", ["rows", "columns", "sums"])
def test_scaled_8_bits(form: str, kernel: str, no_waiting: None) -> None:
    """A graph is replayed with other sizes of groups."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")
    if kernel == "blas" and (form != "rows" or capability[0] != 9):
        pytest.skip("torch's scaled grouped product is of rows, on Hopper")
    skip_unserved(kernel, form, eight=True)
    a, b = (t.to(torch.float8_e4m3fn) for t in operands(form))
    b = b.mT.contiguous().mT  # as torch requires
    scales = {
        "rows": ((256,), (5, 192)), "columns": ((5, 192), (256,)), "sums": ((5, 192), (5, 128))
    }[form]  # fmt: skip
    scale_a, scale_b = (numbers(*shape) for shape in scales)
    bias = None if form == "columns" else torch.randn(b.shape[-1], device="cuda").bfloat16()
    offs = offs_of(ENDS[0])
    given = {"bias": bias, "epilogue": "silu", "scale_a": scale_a, "scale_b": scale_b}
    tmm_core.grouped_matmul(a, b, offs=offs, kernel=kernel, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        y = tmm_core.grouped_matmul(a, b, offs=offs, kernel=kernel, **given)
    torch.cuda.set_sync_debug_mode("default")
    wide_a, wide_b = a.double(), b.double()
    if form == "rows":
        wide_a, wide_b = wide_a * scale_a[:, None], wide_b * scale_b[:, None]
    elif form == "columns":
        wide_a, wide_b = wide_a * scale_a[..., None], wide_b * scale_b
    for ends in ENDS:
        offs.copy_(offs_of(ends))
        y.fill_(torch.nan)
        graph.replay()
        z = expected(form, wide_a, wide_b, ends)
        if form == "sums":
            z = z * scale_a[..., None] * scale_b[:, None]
        z = z if bias is None else z + bias
        close(form, y, torch.nn.functional.silu(z), ends[-1])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs Hopper",
)
@pytest.mark.parametrize("epilogue", ["", "swiglu"])
@pytest.mark.parametrize("form", ["rows", "sums"])
def test_every_tile_of_the_hopper_kernel_keeps_to_its_group(form: str, epilogue: str) -> None:
    """Configs for few and many rows write nothing beyond the last group or after the result. NaN
    beyond the last group does not reach the result."""
    kernel: Kernel[Any] = default_dispatcher().registry.kernel("triton.warp_specialized")
    ends = (0, 37, 37, 700, 701, 957, 1000)
    total, other, n = 1024, 328, 264
    width = 2 * n if epilogue else n
    a = (numbers(total, other) - 1).bfloat16()
    a[ends[-1] :] = torch.nan
    if form == "rows":
        groups, b = Groups(len(ends), "m"), (numbers(len(ends), width, other) - 1).bfloat16().mT
    else:
        groups, a, b = Groups(len(ends), "k"), a.mT, (numbers(total, width) - 1).bfloat16()
        b[ends[-1] :] = torch.nan
    m = a.shape[0]
    bias = numbers(len(ends), width)
    z = expected(form, a, b, ends)
    of_rows = torch.repeat_interleave(offs_of(ends).diff(prepend=offs_of((0,))))
    z = z + (bias[of_rows] if form == "rows" else bias[:, None]).double()
    wanted = torch.nn.functional.silu(z[..., :n]) * z[..., n:] if epilogue else z
    shape = (len(ends), m, n) if form == "sums" else (m, n)
    problem = Problem.of(
        a, b, torch.empty(shape, dtype=a.dtype, device="meta"), fingerprint(a.device),
        groups=groups, bias=bias, epilogue=parse(epilogue or None),
    )  # fmt: skip
    assert kernel.reasons_against(problem) == []
    configs = {*kernel.configs(problem), *kernel.configs(problem.at(64 * total))}
    used = math.prod(shape) if form == "sums" else ends[-1] * n
    for config in configs:
        launcher: Any = kernel.bind(problem, config)
        memory = torch.full((math.prod(shape) + 64 * n,), -123.0, dtype=a.dtype, device="cuda")
        out = memory[: math.prod(shape)].view(shape)
        launcher(a, b, bias, None, 1.0, out, offs=offs_of(ends))
        assert (memory[used:] == -123).all(), config
        error = (memory[:used].double() - wanted.flatten()).norm() / wanted.norm()
        assert error < 5e-3, config


@pytest.mark.parametrize("epilogue", ["", "swiglu"])
@pytest.mark.parametrize("kernel", ["triton.ragged", "triton.gathered"])
def test_gathered_scattered_and_weighted_rows(kernel: str, epilogue: str) -> None:
    """Every config of the search space is tried, and a graph whose indices change."""
    if kernel == "triton.gathered" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    t, k, n, ends = 1024, 328, 264, (0, 37, 37, 700, 701, 957, 1000)
    width = 2 * n if epilogue else n
    a = torch.randn(300, k, device="cuda").bfloat16()
    b = torch.randn(len(ends), width, k, device="cuda").bfloat16().mT
    offs, weights = offs_of(ends), torch.rand(t, device="cuda")
    index, places = torch.randint(300, (t,), device="cuda"), torch.randperm(t, device="cuda")
    extras = {"offs": offs, "a_index": index, "out_index": places, "out_weights": weights}

    def wanted() -> torch.Tensor:
        z = expected("rows", a[index], b, ends)[: ends[-1]]
        y = torch.nn.functional.silu(z[:, :n]) * z[:, n:] if epilogue else z
        y = y * weights[: ends[-1], None].double()
        return y.new_zeros(t, n).index_copy(0, places[: ends[-1]], y)

    def right(got: torch.Tensor) -> bool:
        exact = wanted()
        beyond = got[places[ends[-1] :]]
        error = (got.double() - exact).norm() / exact.norm()
        return bool((beyond == 0).all() and error < 5e-3)

    problem = Problem.of(
        a, b, torch.empty(t, n, dtype=a.dtype, device="meta"), fingerprint(a.device),
        epilogue=parse(epilogue or None),
        groups=Groups(
            len(ends), "m", a_index=index.dtype, out_index=places.dtype,
            out_weights=weights.dtype, zeroed=True,
        ),
    )  # fmt: skip
    candidate: Kernel[Any] = default_dispatcher().registry.kernel(kernel)
    assert candidate.reasons_against(problem) == []
    for config in {*candidate.configs(problem), *candidate.configs(problem.at(64 * t))}:
        launcher: Any = candidate.bind(problem, config)
        assert right(launcher(a, b, None, None, 1.0, None, **extras)), config
        out = torch.full((t, n + 8), torch.nan, dtype=a.dtype, device="cuda")[:, :n]
        assert right(launcher(a, b, None, None, 1.0, out, **extras)), config
    call: Any = lambda: tmm_core.grouped_matmul(  # noqa: E731
        a, b, **extras, epilogue=epilogue or None, kernel=kernel
    )
    assert right(call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    index.copy_(torch.randint(300, (t,), device="cuda"))
    places.copy_(torch.randperm(t, device="cuda"))
    graph.replay()
    assert right(out)


def test_alternate_columns() -> None:
    """gpt-oss's gate in the epilogue equals a plain product that is gated afterwards."""
    a, b = operands("rows")
    offs, bias = offs_of(ENDS[0]), torch.randn(5, 192, device="cuda").bfloat16()
    y = tmm_core.grouped_matmul(
        a, b, offs=offs, bias=bias, epilogue="clamped_swiglu(1.702,7)", kernel="triton.ragged"
    )
    of_rows = torch.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)))
    z = expected("rows", a, b, ENDS[0]) + bias[of_rows].double()
    gate, up = z[:, ::2].clamp(max=7), z[:, 1::2].clamp(-7, 7)
    close("rows", y, (up + 1) * gate * torch.sigmoid(1.702 * gate), ENDS[0][-1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_torchs_scaled_grouped_product(kernel: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch has it on Hopper")
    skip_unserved(kernel, "rows")
    a, b = (t.to(torch.float8_e4m3fn) for t in operands("rows"))
    b, offs = b.mT.contiguous().mT, offs_of(ENDS[0])
    scale_a, scale_b = numbers(256), numbers(5, 192)
    by_row = torch.nn.functional.ScalingType.RowWise
    torchs = torch.nn.functional.scaled_grouped_mm(
        a, b, scale_a, by_row, scale_b, by_row, offs=offs
    )
    y = tmm_core.grouped_matmul(
        a, b, offs=offs, scale_a=scale_a, scale_b=scale_b, kernel=kernel
    )  # fmt: skip
    assert (y.shape, y.dtype) == (torchs.shape, torchs.dtype)
    close("rows", y, torchs.double(), ENDS[0][-1])


def test_a_layer_of_experts_waits_for_nothing(no_waiting: None) -> None:
    layer = Experts(16, 128, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(40, 128, device="cuda").bfloat16().requires_grad_()
    weights, chosen = torch.randn(40, 16, device="cuda").softmax(-1).topk(2)

    def step() -> torch.Tensor:
        y = layer(x, chosen, weights.bfloat16())
        y.float().square().sum().backward()
        return y

    with tmm_core.override(tune_budget=2.0):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    y = step()
    torch.cuda.set_sync_debug_mode("default")
    alone = Experts(16, 128, 64)
    alone.load_state_dict({name: t.float().cpu() for name, t in layer.state_dict().items()})
    wanted = alone(x.detach().float().cpu(), chosen.cpu(), weights.cpu())
    assert (y.float().cpu() - wanted).norm() <= 2e-2 * wanted.norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_odd_rows_have_torchs_strides_without_a_copy(kernel: str) -> None:
    """Compiled code asserts the strides of the operator's result."""
    if kernel == "blas" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch's grouped product waits for the GPU here")
    a, _ = operands("rows")
    b, offs = torch.randn(5, 4097, 128, device="cuda").bfloat16().mT, offs_of(ENDS[0])
    torchs = torch.nn.functional.grouped_mm(a, b, offs=offs)

    def product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return tmm_core.grouped_matmul(a, b, offs=offs)

    with tmm_core.override(kernel=kernel):
        product(a, b, offs)
        torch.cuda.reset_peak_memory_stats()
        y = product(a, b, offs)
        # Requested bytes: a cached block may be up to 1 MiB larger.
        bytes_of = torch.cuda.memory_stats()
        taken = bytes_of["requested_bytes.all.peak"] - bytes_of["requested_bytes.all.current"]
        assert taken < 0.5 * y.untyped_storage().nbytes()
        compiled = torch.compile(product, fullgraph=True)(a, b, offs)
    for result in (y, compiled):
        assert result.stride() == torchs.stride()
        close("rows", result, torchs.double(), ENDS[0][-1])
