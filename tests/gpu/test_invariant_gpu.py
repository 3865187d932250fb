"""Kernels that name the same reduction order give a row the same bits: in every config, at every M,
with every epilogue, bias and residual."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tmm_core
from tmm_core import dispatch
from tmm_core.dispatch.invariant import LADDER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="only Hopper's kernels share reduction orders",
    ),
]

WEIGHTS = ((512, 4096), (520, 5120), (1024, 1000), (256, 14336))
ROWS = 40


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def candidates(problem: tmm_core.Problem) -> dict[str, list[Any]]:
    """The candidates of every kernel that may serve the problem, by reduction order."""
    able = dispatch.default_dispatcher().able(problem, tmm_core.settings.current())
    found = dispatch.default_dispatcher()._invariance._offered(problem, able)
    return {name: list(members) for name, members in found.items()}


def compile_all(problem: tmm_core.Problem, members: list[Any]) -> None:
    """Compile the candidates into Triton's cache, several at a time."""

    def bind(candidate: Any) -> None:
        with contextlib.suppress(Exception):  # the call raises it again
            candidate.kernel.bind(problem, candidate.config)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bind, members))


def every_case() -> list[Any]:
    """All combinations. Each compiles for a minute or more, so all but four are marked slow. The
    four cover every weight, dtype and kind of epilogue."""
    some = {
        (WEIGHTS[0], "everything", torch.bfloat16),
        (WEIGHTS[1], "nothing", torch.bfloat16),
        (WEIGHTS[2], "gated", torch.bfloat16),
        (WEIGHTS[3], "nothing", torch.float16),
    }
    afters, dtypes = ("nothing", "everything", "gated"), (torch.bfloat16, torch.float16)
    return [
        pytest.param(*case, marks=() if case in some else pytest.mark.slow)
        for case in itertools.product(WEIGHTS, afters, dtypes)
    ]


@pytest.fixture
def invariant() -> Iterator[None]:
    """Batch-invariant mode, in which kernels are compiled without FMAs of epilogues."""
    with tmm_core.override(batch_invariant=True, on_cache_miss="heuristic"):
        yield


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize(("nk", "after", "dtype"), every_case(), ids=str)
def test_every_config_of_a_reduction_order_gives_the_same_bits(
    nk: tuple[int, int], after: str, dtype: torch.dtype
) -> None:
    n, k = nk
    whole = randn(8192, k, dtype=dtype)
    w = randn(2 * n if after == "gated" else n, k, seed=1, dtype=dtype)
    bias, residual = randn(len(w), seed=2, dtype=dtype), randn(8192, n, seed=3, dtype=dtype)
    given: dict[str, Any] = {"epilogue": "swiglu", "bias": bias} if after == "gated" else {}
    if after == "everything":
        given = {"epilogue": "gelu_tanh", "bias": bias, "alpha": 0.7}
    rows: dict[str, tuple[str, torch.Tensor]] = {}
    differ, compared = [], 0
    for m in (*LADDER, 7, 33, 70, 300):
        x = whole[:m]
        if after == "everything":
            given["residual"] = residual[:m]
        problem = tmm_core.problem(x, w.t(), **given)
        assert problem.batch_invariant
        offered = candidates(problem)
        compile_all(problem, [each for members in offered.values() for each in members])
        for name, members in offered.items():
            for candidate in members:
                kernel, config = candidate.kernel.name, candidate.config
                try:
                    y = tmm_core.matmul(x, w.t(), **given, kernel=kernel, config=config)
                except Exception as error:
                    differ.append(f"M={m} {candidate}: {error}")
                    continue
                first, bits = rows.setdefault(name, (f"M={m} {candidate}", y[:ROWS].clone()))
                common = min(len(bits), m)
                if common < min(m, ROWS):
                    rows[name] = (f"M={m} {candidate}", y[:ROWS].clone())
                compared += 1
                if not torch.equal(y[:common], bits[:common]):
                    count = int((y[:common] != bits[:common]).sum())
                    differ.append(f"{name}: M={m} {candidate} and {first} in {count} elements")
    assert not differ, "\n".join(differ[:20])
    assert compared > 100
    assert any(name.startswith("sm90-k16") for name in rows)


def test_eager_compiled_captured_and_backward_calls_share_a_reduction_order() -> None:
    w = randn(1024, 2048, seed=1).requires_grad_()
    x, dy = randn(300, 2048), randn(300, 1024, seed=4)

    @torch.compile(dynamic=False)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return tmm_core.matmul(x, w.t(), epilogue="silu")

    with tmm_core.override(batch_invariant=True, tune_budget=3.0):
        y = tmm_core.matmul(x, w.t(), epilogue="silu")
        # In training silu follows the product, and the compiler's silu rounds differently.
        y_compiled = compiled(x)
        whole_fused = tmm_core.matmul(x, w.detach().t(), epilogue="silu")
        for m in (1, 16, 70, 300):
            assert torch.equal(tmm_core.matmul(x[:m], w.t(), epilogue="silu"), y[:m]), m
            assert torch.equal(compiled(x[:m]), y_compiled[:m]), m
            # Without gradients silu is fused. The captured kernel was verified before the capture.
            fused = tmm_core.matmul(x[:m], w.detach().t(), epilogue="silu")
            assert torch.equal(fused, whole_fused[:m]), m
            graph, held = torch.cuda.CUDAGraph(), x[:m].clone()
            with torch.cuda.graph(graph):
                out = tmm_core.matmul(held, w.detach().t(), epilogue="silu")
            graph.replay()
            assert torch.equal(out, fused), m
            # The gradient of the rows, alone and among others.
            rows = x.clone().requires_grad_()
            (whole,) = torch.autograd.grad(tmm_core.matmul(rows, w.t()), rows, dy)
            few = x[:m].clone().requires_grad_()
            (part,) = torch.autograd.grad(tmm_core.matmul(few, w.t()), few, dy[:m])
            assert torch.equal(part, whole[:m]), m


def test_a_capture_before_other_calls_warns_that_it_is_not_invariant() -> None:
    """No kernel is verified under capture, so BLAS answers until a call outside has chosen."""
    x, w = randn(64, 768), randn(640, 768, seed=1)
    torch.mm(x, w.t())  # cuBLAS makes its workspace outside
    with tmm_core.override(batch_invariant=True, tune_budget=3.0):
        held, graph = x[:3].clone(), torch.cuda.CUDAGraph()
        with (
            pytest.warns(tmm_core.TmmWarning, match="BLAS, which is not batch-invariant"),
            torch.cuda.graph(graph),
        ):
            out = tmm_core.matmul(held, w.t())
        graph.replay()
        exact = held.double() @ w.double().t()
        assert (out.double() - exact).abs().max() <= 8e-3 * exact.abs().max()
        whole = tmm_core.matmul(x, w.t())
        tmm_core.matmul(held, w.t())  # verified here
        again = torch.cuda.CUDAGraph()
        with torch.cuda.graph(again):
            out = tmm_core.matmul(held, w.t())
        again.replay()
        assert torch.equal(out, whole[:3])


def test_the_arithmetic_may_be_forced() -> None:
    x, w = randn(64, 4096), randn(512, 4096, seed=1)
    bits = {}
    for name in ("sm90-k16", "sm90-k16/split2", "sm90-k16/split4"):
        with tmm_core.override(arithmetic=name, on_cache_miss="heuristic"):
            bits[name] = tmm_core.matmul(x, w.t(), out_dtype=torch.float32)
            assert tmm_core.plan(x, w.t()).choice.arithmetic == name
            assert torch.equal(
                tmm_core.matmul(x[:5], w.t(), out_dtype=torch.float32), bits[name][:5]
            )
    assert len({y.cpu().numpy().tobytes() for y in bits.values()}) == 3
    with (
        tmm_core.override(arithmetic="sm80-mma"),
        pytest.raises(tmm_core.UnsupportedProblemError, match="there are: sm90-k16, "),
    ):
        tmm_core.matmul(x, w.t())
