"""``enable()`` and the pass over compiled graphs, on a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tmm_core
from tmm_core.interop import aten
from tmm_core.spec.precision import precision

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Online softmax:UserWarning"),
    # A warning of torch about gradients on several streams.
    pytest.mark.filterwarnings(
        "ignore:The AccumulateGrad node's stream does not match:UserWarning"
    ),
]

#: Kernels that serve the products below, so that no test depends on records. The second serves fp32
#: without TF32 too.
KERNEL, OF_FP32 = "triton.persistent", "triton.grouped"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run backward in this thread: an override does not reach a GPU's own autograd thread."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
    tmm_core.disable()


@pytest.fixture
def forced() -> Iterator[None]:
    with tmm_core.override(kernel=KERNEL):
        yield


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def calls(name: str) -> dict[str, int]:
    return {k: n for k, n in tmm_core.enabled_report().operators[name].calls.items() if n}


def answered(name: str, expected: dict[str, int]) -> None:
    """Assert which kernels answered an operator's calls; the report says why."""
    assert calls(name) == expected, str(tmm_core.enabled_report())


def close(own: Tensor, torchs: Tensor, exact: Tensor, about: str = "") -> None:
    """Assert that the error against fp64 is at most twice torch's."""
    error, torchs_error = ((t.double() - exact).abs().max() for t in (own, torchs))
    largest = exact.abs().max()
    text = f"{about} {own.dtype}: error {error:.3g}, torch's {torchs_error:.3g}, of {largest:.3g}"
    assert error <= 2 * torchs_error + 1e-3 * largest, text


CASES: dict[str, Callable[[torch.dtype], tuple[Tensor, ...]]] = {
    "mm": lambda t: (randn(200, 264, dtype=t), randn(264, 136, dtype=t)),
    "bmm": lambda t: (randn(3, 72, 264, dtype=t), randn(3, 264, 136, dtype=t)),
    "addmm": lambda t: (
        randn(136, dtype=t),
        randn(200, 264, dtype=t),
        randn(136, 264, dtype=t).t(),
    ),
    "baddbmm": lambda t: (
        randn(3, 72, 136, dtype=t),
        randn(3, 72, 264, dtype=t),
        randn(3, 264, 136, dtype=t),
    ),
}


@pytest.fixture
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    with precision(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float32, False),
        (torch.float32, True),
    ],
    indirect=["tf32"],
)
@pytest.mark.parametrize("name", CASES)
def test_products_and_their_out_forms(name: str, dtype: torch.dtype, tf32: bool) -> None:
    function, tensors = getattr(torch, name), CASES[name](dtype)
    torchs = function(*tensors)
    exact = function(*(t.double() for t in tensors))
    kernel = OF_FP32 if dtype is torch.float32 and not tf32 else KERNEL
    with tmm_core.override(kernel=kernel), tmm_core.enable():
        own = [function(*tensors) for _ in range(2)]
        out = torch.empty_like(torchs)
        function(*tensors, out=out)
        answered(name, {kernel: 2})
        answered(f"{name}.out", {kernel: 1})
    for y in (*own, out):
        assert (y.dtype, y.stride()) == (torchs.dtype, torchs.stride())
        close(y, torchs, exact, name)
    assert torch.equal(function(*tensors), torchs)


def test_a_forced_kernel_that_declines_fp32_leaves_it_to_torch(forced: None) -> None:
    a, b = CASES["mm"](torch.float32)
    torchs = torch.mm(a, b)
    with tmm_core.enable():
        assert torch.equal(torch.mm(a, b), torchs)
        answered("mm", {"torch": 1})
        assert "fp32 without TF32" in str(tmm_core.enabled_report())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torchs_own_samples_with_gradients(dtype: torch.dtype) -> None:
    pytest.importorskip("expecttest", reason="torch's samples need it")
    from torch.testing._internal.common_methods_invocations import op_db

    names = ("mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear")
    rtol = 3e-2 if dtype is torch.bfloat16 else 1e-4
    served, failed = 0, []
    for info in op_db:
        if info.name not in names or info.variant_test_name:
            continue
        for number, sample in enumerate(info.sample_inputs("cuda", dtype, requires_grad=True)):
            given = (sample.input, *sample.args)

            def run(op: Any = info.op, given: Any = given, more: Any = sample.kwargs) -> Any:
                leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
                y = op(*given, **more)
                grads = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
                return y.detach(), *grads

            torchs = run()
            with tmm_core.override(kernel=OF_FP32), tmm_core.enable():
                own = run()
                served += tmm_core.enabled_report().calls
            for mine, theirs in zip(own, torchs, strict=True):
                try:
                    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)
                except AssertionError as error:
                    shapes = [tuple(t.shape) for t in given if isinstance(t, Tensor)]
                    failed.append(f"{info.name} {number} {shapes} {sample.kwargs}: {error}")
    assert not failed, "\n".join(failed)
    assert bool(served) == (dtype is not torch.float64)


@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_products_of_8_bits(by_row: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch multiplies 8-bit floats from sm_89 on")
    a = (randn(64, 256) / 4).to(torch.float8_e4m3fn)
    b = (randn(128, 256) / 4).to(torch.float8_e4m3fn).t()
    shape_a, shape_b = ((64, 1), (1, 128)) if by_row else ((), ())
    scale_a = torch.rand(shape_a, device="cuda") + 0.5
    scale_b = torch.rand(shape_b, device="cuda") + 0.5

    def run() -> Tensor:
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)

    torchs = run()
    with tmm_core.override(kernel=KERNEL), tmm_core.enable():
        own = run()
        assert calls("_scaled_mm") == {KERNEL: 1}
    close(own, torchs, (a.double() @ b.double()) * scale_a.double() * scale_b.double())


def test_grouped_products() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("torch's grouped product waits for the host")
    a, b = randn(200, 256), randn(4, 256, 128)
    offs = torch.tensor([10, 90, 90, 200], device="cuda", dtype=torch.int32)
    exact = torch.cat(
        [g.double() @ w.double() for g, w in zip(a.tensor_split([10, 90, 90]), b, strict=True)]
    )
    torchs = F.grouped_mm(a, b, offs=offs)
    with tmm_core.override(kernel="triton.ragged"), tmm_core.enable():
        own = F.grouped_mm(a, b, offs=offs)
        assert calls("_grouped_mm") == {"triton.ragged": 1}
    close(own, torchs, exact)


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    grads = torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])
    return [y.detach(), *grads]


def test_a_training_step_and_torch_bit_for_bit_after_it(forced: None) -> None:
    model, x = _model(), randn(512, 256).requires_grad_()
    before = _step(model, x)
    with tmm_core.enable():
        own = _step(model, x)
        report = tmm_core.enabled_report()
    assert report.operators["addmm"].calls[KERNEL] == 2
    assert report.operators["mm"].calls[KERNEL] == 4
    assert all(map(torch.equal, _step(model, x), before))
    exact = _step(_model().double(), x.detach().double().requires_grad_())
    for mine, theirs, truth in zip(own, before, exact, strict=True):
        close(mine, theirs, truth)


@pytest.mark.parametrize("cold", [False, True])
def test_capture(forced: None, cold: bool) -> None:
    a, b = randn(64, 256), randn(256, 128)
    torch.mm(a, b)
    with tmm_core.override(verify=False), tmm_core.enable():
        if not cold:
            torch.mm(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.mm(a, b)
        a.copy_(randn(64, 256))
        graph.replay()
        close(y, a @ b, a.double() @ b.double())


def test_streams(forced: None) -> None:
    a, b = randn(2048, 2048), randn(2048, 2048)
    exact = a.double() @ a.double() @ b.double()
    torchs = a @ a @ b
    with tmm_core.enable():
        a @ b
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            z = a @ a
            y = z @ b
        torch.cuda.current_stream().wait_stream(stream)
    close(y, torchs, exact)


def test_modes(forced: None) -> None:
    a, b = randn(3, 64, 256), randn(256, 128)
    exact = a.double() @ b.double()
    with tmm_core.enable():
        close(torch.vmap(lambda x: x @ b)(a), a @ b, exact)
        with torch.inference_mode():
            y = a[0] @ b
            assert y.is_inference()
        close(y, a[0] @ b, exact[0])
        with torch.autocast("cuda", torch.bfloat16):
            y = a[0].float() @ b.float()
        assert y.dtype is torch.bfloat16
        close(y, a[0] @ b, exact[0])


def test_untuned_products_are_answered_and_never_wrong() -> None:
    a, b = randn(300, 520), randn(520, 264)
    with tmm_core.enable():
        for _ in range(3):
            y = a @ b
        assert sum(calls("mm").values()) == 3
    close(y, a @ b, a.double() @ b.double())


def test_host_cost(forced: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints times, and asserts nothing about them."""
    a, b, bias = randn(64, 64), randn(64, 64), randn(64)
    functions = {"mm": lambda: torch.mm(a, b), "addmm": lambda: torch.addmm(bias, a, b)}

    def host_us(function: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                function()
            best = min(best, time.perf_counter() - start)
        return best * 1e6 / 50

    lines = []
    for name, function in functions.items():
        torchs = host_us(function)
        with tmm_core.enable():
            answered = host_us(function)
        with tmm_core.enable(only=lambda problem: False):
            passed = host_us(function)
            assert set(calls(name)) == {"torch"}
        lines.append(
            f"{name} 64×64×64: torch {torchs:.1f} µs of the host, answered {answered:.1f}, "
            f"passed on {passed:.1f} (measured on the CPU: +{aten.overhead_us(name):.1f})"
        )
    assert set(lines)
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_the_report_names_operators_that_are_left_to_torch() -> None:
    a, b = randn(64, 64), randn(64, 64)
    torchs = a @ b
    with tmm_core.enable(only=lambda problem: False):
        for _ in range(aten.ENOUGH * 3):
            assert torch.equal(a @ b, torchs)
        report = tmm_core.enabled_report()
    mm = report.operators["mm"]
    assert aten.ENOUGH <= mm.slowed <= mm.calls["torch"] < aten.ENOUGH * 3
    assert "left to torch" in str(report)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes use the GPU")
@pytest.mark.parametrize("size", [64, 4096])
def test_gpu_time_is_saved_only_where_the_gpu_is_the_limit(forced: None, size: int) -> None:
    a, b, out = randn(size, size), randn(size, size), randn(size, size)
    with tmm_core.enable():
        for _ in range(200):
            torch.mm(a, b)
            torch.addmm(out, a, b, beta=0.5)  # passed on to torch
        torch.cuda.synchronize()
        report = tmm_core.enabled_report().operators["addmm"]
    # A product of 4096³ takes the GPU 0.2 ms, ten times the host's time for a call.
    assert report.calls["torch"] == 200
    assert (report.slowed > 100) if size == 64 else (report.slowed < 50), str(report)


def test_samples_are_not_taken_of_captured_calls(forced: None) -> None:
    a, b = randn(64, 64), randn(64, 64)
    with tmm_core.enable():
        for _ in range(15):  # the next one would be a sample
            a @ b
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(40):
                y = a @ b
        graph.replay()
        for _ in range(40):
            a @ b
    torch.testing.assert_close(y, a @ b, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model(dynamic: bool) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(256, 512).to("cuda", torch.bfloat16)

    def model(x: Tensor, r: Tensor) -> Tensor:
        return r + F.silu(layer(x))

    options = tmm_core.inductor_options(when="always")
    compiled = torch.compile(model, dynamic=dynamic, options=options)
    with torch.no_grad(), torch.profiler.profile() as profile:
        for m in (33, 64, 100):
            x, r = randn(2, m, 256), randn(2, m, 512)
            weight, bias = layer.weight.double(), layer.bias.double()
            exact = F.silu(F.linear(x.double(), weight, bias)) + r.double()
            close(compiled(x, r), model(x, r), exact)
    assert any("tmm::matmul" in event.key for event in profile.key_averages())
