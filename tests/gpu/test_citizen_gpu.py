"""Tests derivatives, transforms and compilation on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tmm_core
from tmm_core import dispatch
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.interop import epilogue_kernels
from tmm_core.launch import warm
from tmm_core.nn import SwiGLU

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.gpu,
    # torch's own: where it first differentiates forwards, and in Inductor.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Online softmax:UserWarning"),
]


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    """Measure nothing: any kernel that serves will do. Backward runs in this thread, since an
    override does not reach a GPU's own autograd thread."""
    with (
        tmm_core.override(on_cache_miss="heuristic"),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(got: Tensor, expected: Tensor, roundings: float = 2.0) -> None:
    """Assert equality within ``roundings`` of 16 bits, relative to the result's scale."""
    expected = expected.double()
    error = (got.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < roundings * 8e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", [None, *BUILTIN])
def test_gradients_are_eagers_within_rounding(epilogue: Any, dtype: torch.dtype) -> None:
    gated = epilogue is not None and BUILTIN[epilogue].gated
    n = 192
    x, w, bias, residual = (
        t.mul(scale).requires_grad_()
        for t, scale in (
            (randn(200, 256, dtype=dtype), 1.0),
            (randn(2 * n if gated else n, 256, dtype=dtype), 1 / 16),
            (randn(2 * n if gated else n, dtype=dtype), 1.0),
            (randn(200, n, dtype=dtype), 1.0),
        )
    )
    inputs = (x, w, bias, residual)
    grad = randn(200, n, dtype=dtype)
    y = tmm_core.linear(x, w, bias, residual=residual, epilogue=epilogue)
    got = torch.autograd.grad(y, inputs, grad)

    def eager(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return BUILTIN[epilogue or "identity"].apply(F.linear(x, w, bias)) + residual

    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    truth = torch.autograd.grad(eager(*exact), exact, grad.double())
    torchs = torch.autograd.grad(eager(*inputs), inputs, grad)
    for mine, theirs, exactly in zip(got, torchs, truth, strict=True):
        assert mine.dtype is dtype
        bound = 2 * (theirs.double() - exactly).abs().max() + 1e-3 * exactly.abs().max()
        assert (mine.double() - exactly).abs().max() <= bound


@pytest.mark.parametrize("kernel", ["triton.naive", "triton.persistent", "triton.split_k"])
def test_an_epilogue_stays_in_the_kernel_while_training(kernel: str) -> None:
    x, w = randn(128, 512).requires_grad_(), randn(512, 256).requires_grad_()
    warm.forget_plans()
    with tmm_core.override(kernel=kernel):
        y = tmm_core.matmul(x, w, epilogue="relu")
        (fused,) = warm._plans.values()
        assert (fused.kernel, fused.problem.epilogue.name) == (kernel, "relu")
        y.float().square().sum().backward()
    expected = torch.relu(x.detach().float() @ w.detach().float())
    close(y.detach(), expected)
    dz = 2 * y.detach().float() * (expected > 0)
    assert x.grad is not None
    assert w.grad is not None
    close(x.grad, dz @ w.detach().float().t(), roundings=4)
    close(w.grad, x.detach().float().t() @ dz, roundings=4)


@pytest.mark.parametrize("epilogue", ["relu", "silu", "swiglu"])
def test_training_takes_no_more_memory_than_eager(epilogue: str) -> None:
    x, w = randn(2048, 512).requires_grad_(), randn(512, 4096).requires_grad_()

    def peak(call: Any) -> tuple[int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call()
        kept = torch.cuda.memory_allocated() - before
        y.sum().backward()
        x.grad = w.grad = None
        return kept, torch.cuda.max_memory_allocated() - before

    def mine() -> Tensor:
        return tmm_core.matmul(x, w, epilogue=epilogue, kernel="blas")

    def eagers() -> Tensor:
        return BUILTIN[epilogue].apply(x @ w)

    for call in (mine, eagers):  # workspaces, which stay
        peak(call)
    (kept, highest), (kept_by_eager, highest_by_eager) = peak(mine), peak(eagers)
    assert kept <= kept_by_eager
    assert highest <= highest_by_eager


FOLLOWING = [e for e in BUILTIN if BUILTIN[e].parts[1] is not None]
FOLLOWING += ["gelu_tanh+softcap(30)", "swiglu+tanh"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [520, 129])
@pytest.mark.parametrize("epilogue", FOLLOWING)
def test_a_pass_each_way(epilogue: str, n: int, dtype: torch.dtype) -> None:
    parsed = parse(epilogue)
    width = 2 * n if parsed.gated else n
    kernels = epilogue_kernels.kernels(parsed, width, dtype, torch.empty(0, device="cuda"))
    assert kernels is not None
    z, grad = randn(3, 401, width, dtype=dtype), randn(3, 401, n, dtype=dtype)
    grads = [grad, grad[:1, :1].expand(grad.shape), grad.mT.contiguous().mT]
    y = kernels.forward(z)
    exact = z.double().requires_grad_()
    truth = parsed.apply(exact)
    tolerance = 2 * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(y.double(), truth.detach(), rtol=tolerance, atol=tolerance)
    for given in grads:
        (slopes,) = torch.autograd.grad(truth, exact, given.double(), retain_graph=True)
        dz = kernels.backward(given, z)
        assert dz.dtype is dtype
        torch.testing.assert_close(dz.double(), slopes, rtol=tolerance, atol=tolerance)


# Torch's, of graphs that its own streams' gradients cross.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("cold", [False, True])
def test_a_training_step_in_a_cuda_graph(cold: bool) -> None:
    x, w, bias = randn(256, 128), randn(512, 128), randn(512)
    x, w, bias = (t.mul(0.3).requires_grad_() for t in (x, w, bias))
    grad = randn(256, 256)

    def step() -> tuple[Tensor, ...]:
        y = tmm_core.linear(x, w, bias, epilogue="swiglu")
        return y.detach(), *torch.autograd.grad(y, (x, w, bias), grad)

    def eager() -> tuple[Tensor, ...]:
        gate, up = F.linear(x, w, bias).chunk(2, -1)
        y = F.silu(gate) * up
        return y.detach(), *torch.autograd.grad(y, (x, w, bias), grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        eager()
    torch.cuda.current_stream().wait_stream(stream)
    if cold:
        warm.forget_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(randn(256, 128).mul(0.3))
    graph.replay()
    for mine, theirs in zip(captured, eager(), strict=True):
        close(mine, theirs, roundings=6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp_trains_with_one_product(bias: bool) -> None:
    mlp = SwiGLU(256, 512, bias=bias, device="cuda", dtype=torch.bfloat16)
    x = randn(3, 100, 256).requires_grad_()
    wanted = [x, *mlp.parameters()]
    warm.forget_plans()
    y = mlp(x)
    assert {(p.problem.n, p.problem.k) for p in warm._plans.values()} == {
        (1024, 256),
        (256, 512),
    }
    grad = randn(3, 100, 256)
    got = torch.autograd.grad(y, wanted, grad)

    def eager(x: Tensor, *parameters: Tensor) -> Tensor:
        if bias:
            gate, gate_bias, up, up_bias, down, down_bias = parameters
        else:
            (gate, up, down), gate_bias, up_bias, down_bias = parameters, None, None, None
        between = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
        return F.linear(between, down, down_bias)

    exact = [t.detach().double().requires_grad_() for t in wanted]
    truth = torch.autograd.grad(eager(*exact), exact, grad.double())
    torchs = torch.autograd.grad(eager(*wanted), wanted, grad)
    for mine, theirs, exactly in zip(got, torchs, truth, strict=True):
        bound = 2 * (theirs.double() - exactly).abs().max() + 1e-3 * exactly.abs().max()
        assert (mine.double() - exactly).abs().max() <= bound


def test_a_step_under_autocast_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmm_core.triton.pointwise import Pointwise

    x, w = (randn(*s, dtype=torch.float32).requires_grad_() for s in ((64, 128), (96, 128)))
    passes = []
    original = Pointwise.backward
    monkeypatch.setattr(Pointwise, "backward", lambda *a: passes.append(1) or original(*a))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = tmm_core.linear(x, w, epilogue="silu")
        assert y.dtype is torch.bfloat16
        loss = y.float().square().mean()
    got = torch.autograd.grad(loss, (x, w))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.silu(F.linear(x, w)).float().square().mean()
    for mine, theirs in zip(got, torch.autograd.grad(loss, (x, w)), strict=True):
        assert mine.dtype is torch.float32
        close(mine, theirs, roundings=4)
    assert passes == [1]


def test_forward_mode_and_vmap() -> None:
    a, b, ta = (randn(*s, dtype=torch.float32) for s in ((64, 128), (128, 96), (64, 128)))
    with tmm_core.override(kernel="triton.naive"):
        y, t = torch.func.jvp(lambda a: tmm_core.matmul(a, b, epilogue="tanh"), (a,), (ta,))
        close(y, torch.tanh(a.float() @ b.float()))
        close(t, (1 - torch.tanh(a.float() @ b.float()) ** 2) * (ta.float() @ b.float()), 6)
        many = randn(5, 64, 128, dtype=torch.float32)
        got = torch.vmap(lambda a: tmm_core.matmul(a, b, epilogue="relu"))(many)
        close(got, torch.relu(many.float() @ b.float()))
        samples = torch.vmap(
            torch.func.grad(lambda a, b: tmm_core.matmul(a, b).float().sum(), 1), (0, None)
        )(many, b)
        close(samples, many.float().sum(1)[:, :, None].expand_as(samples))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x, w = randn(64, 128).requires_grad_(), randn(128, 256).requires_grad_()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return tmm_core.matmul(x, w, epilogue="silu")

    checkpoint(layer, x, w, use_reentrant=reentrant).sum().backward()
    got = (x.grad, w.grad)
    expected = torch.autograd.grad(layer(x, w).sum(), (x, w))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_alpha_on_the_gpu_is_not_read() -> None:
    a, b = randn(64, 128), randn(128, 96)
    alpha = torch.tensor(0.5, device="cuda")
    expected = torch.relu(0.5 * (a.float() @ b.float()))
    close(tmm_core.matmul(a, b, alpha=alpha, epilogue="relu"), expected)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = tmm_core.matmul(a, b, alpha=alpha, epilogue="relu")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(got, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tmm_core.matmul(a, b, alpha=alpha, epilogue="relu")
    alpha.fill_(2.0)
    graph.replay()
    close(captured, 4 * expected)


# Torch records the views before the first product as a separate graph, without a kernel.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_reduce_overhead_trains_and_serves() -> None:
    w, v = randn(256, 512).requires_grad_(), randn(512, 128).requires_grad_()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def forward(x: Tensor) -> Tensor:
        h = tmm_core.matmul(x, w, epilogue="silu")
        return tmm_core.matmul(h, v, epilogue="relu")

    def eager(x: Tensor) -> Tensor:
        return torch.relu(F.silu(x @ w) @ v)

    x = randn(64, 256).mul_(0.1)
    for _ in range(4):  # warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        y = forward(x)
        grads = torch.autograd.grad(y.float().square().mean(), (w, v))
        expected = eager(x)
        close(y.detach(), expected.detach(), 6)
        truth = torch.autograd.grad(expected.float().square().mean(), (w, v))
        for mine, theirs in zip(grads, truth, strict=True):
            close(mine, theirs, 12)
        x = randn(64, 256).mul_(0.1)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            close(forward(x), eager(x), 6)


def test_the_profiler_shows_the_kernel() -> None:
    a, b = randn(64, 128), randn(128, 96)
    with tmm_core.override(kernel="triton.grouped"):
        tmm_core.matmul(a, b)
        with torch.profiler.profile(acc_events=True) as profile:
            tmm_core.matmul(a, b)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert "tmm::matmul" in names
    assert "triton.grouped" in names


def test_deterministic_algorithms_take_no_kernel_that_is_not() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        a, b = randn(16, 8192), randn(8192, 64)
        plan = tmm_core.plan(a, b)
        kernel = dispatch.default_dispatcher().registry.kernel(plan.kernel)
        assert kernel.traits.deterministic
        assert plan.problem.deterministic
        first = tmm_core.matmul(a, b)
        assert all(torch.equal(tmm_core.matmul(a, b), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)


def test_out_among_its_inputs() -> None:
    for kernel in ("blas", "triton.naive"):
        buffer = randn(64, 384)
        a, b, out = buffer[:, :128], randn(128, 128), buffer[:, 64:192]
        expected = a.float() @ b.float()
        close(tmm_core.matmul(a, b, out=out, kernel=kernel), expected)
    with pytest.raises(RuntimeError, match="more than one element of the written-to"):
        tmm_core.matmul(a, b, out=randn(1, 128).expand(64, 128))


def test_signs_yet_to_be_applied() -> None:
    z = torch.randn(64, 64, dtype=torch.complex64, device="cuda")
    negative = z.conj().imag
    assert negative.is_neg()
    b = torch.randn(64, 48, device="cuda")
    expected = negative.double() @ b.double()
    for kernel in ("blas", "triton.naive"):
        got = tmm_core.matmul(negative, b, kernel=kernel)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
        out = torch.empty(64, 48, device="cuda")
        tmm_core.matmul(negative, b, kernel=kernel, out=out)
        torch.testing.assert_close(out, got, rtol=0, atol=0)
    torch.testing.assert_close(tmm_core.matmul(z.conj(), z.mH), z.conj() @ z.mH)


def test_tensors_on_the_cpu_while_a_gpu_is_current() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    torch.testing.assert_close(tmm_core.matmul(a, b, epilogue="relu"), torch.relu(a @ b))
    with pytest.raises(RuntimeError, match="same device"):
        tmm_core.matmul(a, b.cuda())
