"""Tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tmm_core
from tmm_core import dispatch
from tmm_core.tuning.timing import GraphTimer

pytestmark = pytest.mark.gpu

TRITON = ("naive", "grouped", "split_k", "fused_epilogue", "persistent", "warp_specialized")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two roundings of 16 bits, relative to the result's scale."""
    expected = expected.float()
    error = (got.float() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < 1.6e-2


CHOOSE = """
import torch, tmm_core
from tmm_core.tuning import tuner
a = torch.randn(256, 512, device="cuda").bfloat16()
b = torch.randn(1024, 512, device="cuda").bfloat16().t()
measured = []
original = tuner.Tuner.steps
def steps(self, *rest, **named):
    measured.append(1)
    return original(self, *rest, **named)
tuner.Tuner.steps = steps
tmm_core.matmul(a, b, epilogue="silu")
plan = tmm_core.plan(a, b, epilogue="silu")
print(len(measured), plan.kernel, plan.config)
"""


def test_a_fresh_process_tunes_nothing_and_chooses_the_same() -> None:
    lines = []
    for _ in range(3):
        run = [sys.executable, "-c", CHOOSE]
        lines.append(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert [line.split()[0] for line in lines] == ["1", "0", "0"]
    assert len({line.split(maxsplit=1)[1] for line in lines}) == 1


def test_a_miss_tunes_and_the_answer_is_right() -> None:
    x, w = randn(300, 512), randn(1024, 512)
    close(tmm_core.linear(x, w, epilogue="silu"), F.silu(x.float() @ w.float().t()))
    explained = tmm_core.explain(x, w.t(), epilogue="silu")
    assert explained.origin == "tuned"
    assert explained.record is not None
    assert all(c.error is not None for c in explained.record.candidates if c.status == "ok")


def test_a_kernel_that_cannot_be_captured_is_timed_and_leaves_torch_as_it_was() -> None:
    x = torch.zeros(8, device="cuda")
    timer, stream = GraphTimer(x.device), torch.cuda.current_stream()
    runs = [lambda i: x.add_(i), lambda i: x.sum().item(), lambda i: x.sub_(i)]
    samples = timer.measure(runs, 2, copies=3, burst_us=50.0)
    assert all(us > 0 for mine in samples for us in mine)
    captured = [chain.graph is not None for chain in timer._chains.values()]
    assert captured == [True, False, True]
    assert torch.cuda.current_stream() == stream
    torch.randn(4, device="cuda")
    timer.release()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("warm", [True, False])
def test_graph_capture(warm: bool) -> None:
    a, b = randn(256, 1024), randn(1024, 512)
    if warm:
        tmm_core.matmul(a, b, epilogue="relu")
    torch.matmul(a, b)  # cuBLAS makes its workspace outside
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tmm_core.matmul(a, b, epilogue="relu")
    a.copy_(randn(256, 1024))
    graph.replay()
    first = out.clone()
    close(first, torch.relu(a.float() @ b.float()))
    graph.replay()
    assert torch.equal(out, first)
    misses = list(dispatch.default_dispatcher().store.misses())
    assert len(misses) == (0 if warm else 1)


@pytest.mark.parametrize("kernel", TRITON)
def test_capture_of_every_kernel_replays_the_same_bits(kernel: str) -> None:
    a, b = randn(64, 4096), randn(512, 4096).t()
    eager = tmm_core.matmul(a, b, kernel=f"triton.{kernel}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tmm_core.matmul(a, b, kernel=f"triton.{kernel}")
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.parametrize("kernel", TRITON)
def test_offsets_past_32_bits(kernel: str) -> None:
    m, k, n = 2**17 + 64, 2**14 + 64, 128
    assert m * k > 2**31
    a = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    a.normal_()
    b = randn(k, n)
    got = tmm_core.matmul(a, b, kernel=f"triton.{kernel}")
    for rows in (slice(0, 64), slice(m - 200, m)):
        close(got[rows], a[rows].float() @ b.float())


@pytest.mark.parametrize("kernel", TRITON)
@pytest.mark.parametrize("tail", [1, 3, 7])
def test_padding_is_neither_read_nor_written(kernel: str, tail: int) -> None:
    """Rows that start on 16 bytes but end off them: TMA moves 16 bytes at a time."""
    m, n, k = 200, 256 + tail, 128 + tail
    nan = float("nan")
    a_all = torch.full((m, 144), nan, device="cuda", dtype=torch.bfloat16)
    b_all = torch.full((k, 272), nan, device="cuda", dtype=torch.bfloat16)
    out_all = torch.full((m, 272), 7.0, device="cuda", dtype=torch.bfloat16)
    a, b, out = a_all[:, :k], b_all[:, :n], out_all[:, :n]
    a.normal_()
    b.normal_()
    try:
        tmm_core.matmul(a, b, out=out, kernel=f"triton.{kernel}")
    except tmm_core.UnsupportedProblemError as declined:
        pytest.skip(str(declined))
    close(out, a.float() @ b.float())
    assert (out_all[:, n:] == 7.0).all()


def test_tf32_only_where_torch_allows_it() -> None:
    a, b = randn(256, 512, dtype=torch.float32), randn(512, 256, dtype=torch.float32)
    exact = a.double() @ b.double()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        errors = {}
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            got = tmm_core.matmul(a, b, kernel="triton.grouped")
            errors[precision] = (got - exact).abs().max().item()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert errors["ieee"] < 1e-3 < errors["tf32"]


def test_two_streams_share_no_scratch() -> None:
    a, b = randn(16, 16384), randn(16384, 256)
    expected = tmm_core.matmul(a, b, kernel="triton.split_k")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs: list[torch.Tensor] = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 4]):
            outs.append(tmm_core.matmul(a, b, kernel="triton.split_k"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_threads_racing_the_first_call() -> None:
    a, b = randn(128, 256), randn(256, 192)
    expected = torch.relu(a.float() @ b.float())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                close(tmm_core.matmul(a, b, epilogue="relu"), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_batch_invariance_bit_for_bit() -> None:
    x, w = randn(700, 4096), randn(1024, 4096).t()
    with tmm_core.override(batch_invariant=True, tune_budget=3.0):
        whole = tmm_core.matmul(x, w)
        served = set()
        for m in (*range(1, 513), 513, 600, 699):
            assert torch.equal(tmm_core.matmul(x[:m], w), whole[:m]), m
            served.add(str(tmm_core.plan(x[:m], w).choice.candidate))
    # Bits that stay the same because the config does would prove little.
    assert len(served) > 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, in Inductor
def test_compiled_and_with_gradients() -> None:
    x = randn(64, 256).requires_grad_()
    w = randn(256, 128).requires_grad_()

    @torch.compile(fullgraph=True)
    def step(x: Any, w: Any) -> torch.Tensor:
        return tmm_core.matmul(x, w, epilogue="gelu_tanh").float().square().mean()

    step(x, w).backward()
    mine = (x.grad, w.grad)
    x.grad = w.grad = None
    F.gelu(x @ w, approximate="tanh").float().square().mean().backward()
    for got, expected in zip(mine, (x.grad, w.grad), strict=True):
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got.float(), expected.float(), rtol=5e-2, atol=5e-4)


def test_another_kernel_than_blas_serves_the_unaligned() -> None:
    a, b = randn(1025, 1027), randn(1027, 1029)
    close(tmm_core.matmul(a, b), a.float() @ b.float())
    assert tmm_core.plan(a, b).kernel != "blas"
