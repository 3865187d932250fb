"""``enable()``: torch's own products, answered on a CPU as they are on CUDA."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import FakeBlas, FakeKernel, dispatcher, installed, tuned_with_steady_times
from tmm_blas.blas import Blas
from torch import nn

import tmm_core
from tmm_core import Problem, dispatch
from tmm_core.interop import aten, aten_answers, aten_calls, aten_report, host_bound
from tmm_core.interop.aten_report import EnabledReport, OperatorReport
from tmm_core.launch import nesting
from tmm_core.spec.device import fingerprint

Tensor = torch.Tensor

ENABLED = {"_key": "CPU"}


class Sums(FakeKernel):
    """A product by elementwise operators alone, so that it calls no operator that is answered."""

    def __init__(self, name: str = "sums", estimate: float = 1.0, **fields: Any) -> None:
        super().__init__(name, estimate=estimate, **fields)
        self.launched = 0

    def bind(self, problem: Problem, config: Any) -> Any:
        def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            self.launched += 1
            wide = torch.float64
            z = alpha * (a.to(wide)[..., :, :, None] * b.to(wide)[..., None, :, :]).sum(-2)
            y = problem.epilogue.expression(z, bias, residual).to(problem.out.dtype)
            y = self.spoil(y)
            return y if out is None else out.copy_(y)

        launch.cost = (self.name, 1)  # type: ignore[attr-defined]
        return launch


@pytest.fixture
def sums() -> Sums:
    kernel = Sums()
    installed(FakeBlas(estimate=100.0), kernel)
    return kernel


def enable(**options: Any) -> aten.Enabled:
    return tmm_core.enable(**{"on_cache_miss": "heuristic", **ENABLED, **options})


def calls(name: str) -> dict[str, int]:
    return tmm_core.enabled_report().operators[name].calls


def exact(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return function(*(t.detach().double() for t in tensors))


SHAPES: dict[str, tuple[Any, ...]] = {
    "mm": ((5, 7), (7, 3)),
    "bmm": ((2, 5, 7), (2, 7, 3)),
    "addmm": ((3,), (5, 7), (7, 3)),
    "baddbmm": ((2, 5, 3), (2, 5, 7), (2, 7, 3)),
}


def test_a_signals_handler_may_ask_for_the_report_at_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while operators are registered or removed: the lock is this thread's already."""
    read: list[bool] = []

    def interrupting(change: Callable[[aten.Enabled], None]) -> Callable[[aten.Enabled], None]:
        def interrupted(self: aten.Enabled) -> None:
            read.append(aten._lock.acquire(timeout=0.1))
            if read[-1]:
                aten._lock.release()
                assert tmm_core.enabled_report() is not None
            change(self)

        return interrupted

    for name in ("install", "uninstall"):
        monkeypatch.setattr(aten.Enabled, name, interrupting(getattr(aten.Enabled, name)))
    with enable(ops="mm"):
        pass
    assert read == [True, True]


def test_the_text_of_a_report() -> None:
    """Its times are in ms, a call's host time in µs; what did not happen is left out."""
    calls = {"sums": 3, "torch": 12, "other": 0}
    mm = OperatorReport("mm", calls, 1234.5, 7, 3.14159, "the host waits", "sums declined it")
    assert str(mm) == (
        "mm: sums 3, torch 12; saved 1.23 ms; 7 calls passed on cost the host 3.1 µs each; "
        "left to torch: the host waits; sums declined it"
    )
    bmm = OperatorReport("bmm", {"torch": 1}, 0.0, 0, None, "")
    assert str(bmm) == "bmm: torch 1; saved 0 ms"
    idle = OperatorReport("addmm", {"sums": 0}, 0.0, 0, None, "")
    assert str(idle) == "addmm: none; saved 0 ms"
    of_all = EnabledReport({each.name: each for each in (mm, bmm, idle)}, active=True)
    assert str(of_all).splitlines() == ["tmm_core.enable(), in force", f"  {mm}", f"  {bmm}"]
    ended = EnabledReport({"addmm": idle}, active=False)
    assert str(ended).splitlines() == ["tmm_core.enable(), ended", "  no product was called"]
    assert "no operator of this torch" in str(EnabledReport({}, active=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_faster_kernel_answers(sums: Sums, name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, name)
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES[name]]
    with enable():
        got = [function(*tensors) for _ in range(3)]
        out = torch.empty_like(got[0])
        assert function(*tensors, out=out) is out
        report = tmm_core.enabled_report()
    expected = exact(function, *tensors)
    for y in (*got, out):
        torch.testing.assert_close(
            y.double(), expected, rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5
        )
    assert report.operators[name].calls == {"sums": 3, "torch": 0}
    assert report.operators[f"{name}.out"].calls == {"sums": 1, "torch": 0}
    assert report.calls == 4
    assert report.saved_us == pytest.approx(4 * 99.0)
    assert "sums 3" in str(report)
    assert repr(report) == str(report)


class Outright(FakeKernel):
    """BLAS's launch under another name, with the further arguments of grouped and 8-bit
    products."""

    def bind(self, problem: Problem, config: Any) -> Any:
        right = Blas().bind(problem, Blas.config_type())

        def launch(*given: Any, **extras: Any) -> Tensor:
            self.launched += 1
            return right(*given, **extras)

        launch.cost = (self.name, 1)  # type: ignore[attr-defined]
        return launch

    launched = 0


def test_grouped_and_scaled_products() -> None:
    kernel = Outright("outright", estimate=1.0)
    installed(FakeBlas(estimate=100.0), kernel)
    a, b = torch.randn(20, 32).bfloat16(), torch.randn(4, 32, 16).bfloat16()
    offs = torch.tensor([3, 9, 9, 20], dtype=torch.int32)
    groups = zip(a.tensor_split([3, 9, 9]), b, strict=True)
    expected = torch.cat([rows.double() @ weight.double() for rows, weight in groups])
    a8 = torch.randn(32, 32).to(torch.float8_e4m3fn)
    b8 = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = torch.rand(32, 1) + 0.5, torch.rand(1, 16) + 0.5
    one = torch.tensor(0.5)
    with enable():
        for _ in range(3):
            y = torch._grouped_mm(a, b, offs=offs)
        assert calls("_grouped_mm")["outright"]
        by_row = torch._scaled_mm(a8, b8, scale_a, scale_b, out_dtype=torch.bfloat16)
        by_tensor = torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)
        assert calls("_scaled_mm") == {"outright": 2, "torch": 0}
        bias = torch.randn(16).bfloat16()
        shifted = torch._scaled_mm(a8, b8, one, one, bias, out_dtype=torch.bfloat16)
        assert calls("_scaled_mm") == {"outright": 3, "torch": 0}
        narrow = torch._scaled_mm(a8, b8, one, one, out_dtype=torch.float8_e4m3fn)
        assert calls("_scaled_mm") == {"outright": 3, "torch": 1}
    assert narrow.dtype is torch.float8_e4m3fn
    product = a8.double() @ b8.double()
    for got, exactly in (
        (y, expected),
        (by_row, product * scale_a.double() * scale_b.double()),
        (by_tensor, product / 4),
        (shifted, product / 4 + bias.double()),
    ):
        torch.testing.assert_close(got.double(), exactly, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("summand", [(), (1,), (3,), (1, 3), (5, 1), (5, 3)])
@pytest.mark.parametrize("alpha", [1, 1.0, -0.5, 3])
def test_addmm_takes_any_summand_and_alpha(
    sums: Sums, summand: tuple[int, ...], alpha: Any
) -> None:
    c, a, b = torch.randn(summand), torch.randn(5, 7), torch.randn(7, 3)
    with enable():
        y = torch.addmm(c, a, b, alpha=alpha)
        assert calls("addmm") == {"sums": 1, "torch": 0}
    torch.testing.assert_close(y, torch.addmm(c, a, b, alpha=alpha))


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
@pytest.mark.parametrize("alpha", [0, 0.0, -0.0, 1e-50, 1e-40, float("nan")])
def test_an_alpha_of_zero_is_torchs(sums: Sums, name: str, alpha: float) -> None:
    """BLAS then does not read the product, so that NaN and Inf in it do not count."""
    function = getattr(torch, name)
    c, a, b = torch.randn(5, 3), torch.randn(5, 7), torch.randn(7, 3)
    a[0, 0], a[1, 1] = torch.nan, torch.inf
    given = [t[None] if name == "baddbmm" else t for t in (c, a, b)]
    expected = function(*given, alpha=alpha)
    with enable():
        function(*given, alpha=0.5)
        launched = sums.launched
        for _ in range(2):
            y = function(*given, alpha=alpha)
            assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
        assert sums.launched == launched > 0


V, A57, A73 = torch.ones(7), torch.ones(5, 7), torch.ones(7, 3)
INT8, BOOL, NO_ROW = torch.int8, torch.bool, torch.ones(5, 0)
REFUSED: dict[str, Callable[[], Tensor]] = {
    "mm of a vector": lambda: torch.mm(A57, V),
    "mm of vectors": lambda: torch.mm(V, V),
    "mm of a number": lambda: torch.mm(A57, torch.ones(())),
    "mm into out": lambda: torch.mm(A57, V, out=torch.empty(5)),
    "bmm": lambda: torch.bmm(A57[None], V),
    "addmm": lambda: torch.addmm(V, A57, V),
    "addmm into out": lambda: torch.addmm(V, A57, V, out=torch.empty(5)),
    "_grouped_mm": lambda: torch._grouped_mm(
        V.bfloat16(), A73.bfloat16(), offs=torch.ones(1).int()
    ),
    "alpha beyond fp32": lambda: torch.addmm(torch.ones(3), A57, A73, alpha=1e300),
    "float beta of int8": lambda: torch.addmm(
        torch.ones((), dtype=INT8), NO_ROW.to(INT8), NO_ROW.mT.to(INT8), beta=1.0
    ),
    "complex beta": lambda: torch.addmm(torch.ones(()), NO_ROW, NO_ROW.mT, beta=1 + 0j),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_that_torch_refuses_raises_torchs_error(sums: Sums, call: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as wanted:
        REFUSED[call]()
    with enable():
        for _ in range(2):
            with pytest.raises(wanted.type) as found:
                REFUSED[call]()
            assert str(found.value).splitlines()[0] == str(wanted.value).splitlines()[0]
    assert not sums.launched


def test_a_beta_of_another_type_is_passed_on(sums: Sums) -> None:
    """Torch multiplies bools by True, and refuses to multiply them by 1."""
    given = torch.ones(1).bool(), NO_ROW.bool(), NO_ROW.mT.bool()
    with enable():
        for _ in range(2):
            assert torch.addmm(*given, beta=True, alpha=1.0).all()


def test_scaled_vectors_are_torchs() -> None:
    """Torch's own kernel runs on some CPUs only."""
    a8, scale = torch.ones(16).to(torch.float8_e4m3fn), torch.ones(1)
    rows = torch.ones(16, 1)
    given = {"out_dtype": torch.bfloat16}
    assert aten_calls.scaled_call(a8, a8, scale, scale, **given) is None
    assert aten_calls.scaled_call(a8[None], a8, rows, rows, **given) is None


def test_calls_that_tmm_cannot_express_are_left_to_torch(sums: Sums) -> None:
    a, b, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    odd = torch.randn(36)[1:].view(5, 7)  # not on 16 bytes
    cases: list[tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = [
        (torch.addmm, (c, a, b), {"beta": 0}),
        (torch.addmm, (c, a, b), {"beta": 0.5, "alpha": 2}),
        (torch.addmm, (c.double(), a.double(), b.double()), {}),
        (torch.mm, (a.double(), b.double()), {}),
        (torch.mm, (a.to(torch.complex64), b.to(torch.complex64)), {}),
        (torch.mm, (a.long(), b.long()), {}),
        (torch.mm, (odd, b), {}),
        (torch.mm, (a[:0], b), {}),
        (torch.mm, (a[:, :0], b[:0]), {}),
        (torch.baddbmm, (c[None], a[None], b[None]), {"beta": 2}),
    ]
    expected = [function(*given, **named) for function, given, named in cases]
    with enable():
        for (function, given, named), truth in zip(cases, expected, strict=True):
            torch.testing.assert_close(function(*given, **named), truth, rtol=0, atol=0)
        report = tmm_core.enabled_report()
    assert sums.launched == report.calls == 0
    assert sum(each.calls["torch"] for each in report.operators.values()) >= len(cases)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, ((2, 3), (4, 5))),
        (torch.mm, ((2, 3, 4), (4, 5))),
        (torch.bmm, ((2, 3, 4), (3, 4, 5))),
        (torch.bmm, ((1, 3, 4), (2, 4, 5))),
        (torch.baddbmm, ((2, 3, 5), (1, 3, 4), (2, 4, 5))),
        (torch.baddbmm, ((4, 5), (2, 3, 4), (1, 4, 5))),
        (torch.addmm, ((4,), (2, 3), (3, 5))),
        (torch.addmm, ((1, 2, 5), (2, 3), (3, 5))),
    ],
)
def test_errors_are_torchs(sums: Sums, function: Any, shapes: Any) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    with pytest.raises(RuntimeError) as torchs:
        function(*tensors)
    with enable(), pytest.raises(RuntimeError) as own:
        function(*tensors)
    assert str(own.value) == str(torchs.value)
    with enable(), pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(torch.randn(2, 2), torch.randn(2, 2).double())


ROWS, ENDS = torch.randn(16, 32).bfloat16(), torch.tensor([4, 4, 16], dtype=torch.int32)
WEIGHTS = torch.randn(3, 32, 16).bfloat16()


@pytest.mark.parametrize(
    ("a", "b", "more"),
    [
        (ROWS, WEIGHTS, {"bias": torch.randn(16).bfloat16()}),
        (ROWS, WEIGHTS, {"out_dtype": torch.float32}),
        (ROWS, WEIGHTS[..., :5].contiguous(), {}),
        (ROWS[:, ::2], WEIGHTS[:, ::2], {}),
        (ROWS[:1].expand(16, 32), WEIGHTS, {}),
        (torch.randn(16 * 32 + 1).bfloat16()[1:].view(16, 32), WEIGHTS, {}),
        (ROWS[:, :31], WEIGHTS, {}),
        (ROWS.float(), WEIGHTS, {}),
    ],
)
@pytest.mark.slow(quick=6)
def test_grouped_products_that_torch_refuses_are_refused(a: Tensor, b: Tensor, more: Any) -> None:
    kernel = Outright("outright", estimate=1.0)
    installed(FakeBlas(estimate=100.0), kernel)
    with enable():
        torch._grouped_mm(ROWS, WEIGHTS, offs=ENDS)
        assert kernel.launched
        launched = kernel.launched
    errors = []
    for context in (contextlib.nullcontext(), enable()):
        with context:
            try:
                torch._grouped_mm(a, b, offs=ENDS, **more)
            except RuntimeError as error:
                errors.append(str(error))
            else:
                errors.append("")
    assert errors[0] == errors[1]
    assert kernel.launched == launched


def test_out_that_overlaps_or_does_not_fit_is_torchs(sums: Sums) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    expected = a @ b
    with enable():
        wrong = torch.empty(0)
        torch.mm(a, b, out=wrong)  # resized
        strided = torch.empty(4, 4).t()
        torch.mm(a, b, out=strided)
        answered, memory = calls("mm.out")["sums"], torch.cat([a, a])
        torch.mm(memory[:4], b, out=memory[2:6])
        assert calls("mm.out") == {"sums": answered, "torch": 2}
        for c in (memory[3], memory[2:6]):  # a bias, and a summand
            torch.addmm(c, a, b, out=memory[2:6])
        assert calls("addmm.out") == {"sums": 0, "torch": 2}
        torch.addmm(memory[0], a, b, out=memory[2:6])
        assert calls("addmm.out") == {"sums": 1, "torch": 2}
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(a, b, out=torch.empty(4, 4, dtype=torch.float64))
    torch.testing.assert_close(wrong, expected)
    torch.testing.assert_close(strided, expected)


# -- as torch's own, in every way of use -----------------------------------------------------------


# Torch's own, where it first differentiates forwards.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*`torch.jit.script`:DeprecationWarning")
def test_gradients_of_both_modes_and_twice(sums: Sums) -> None:
    torch.manual_seed(0)  # some second derivatives differ by more than a default tolerance
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b.sum(0), a, b, alpha=0.5).tanh() @ b.t()

    with enable():
        before = sums.launched
        first = torch.autograd.grad(function(a, b).sum(), (a, b), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (a, b))
        _, tangent = torch.func.jvp(function, (a, b), (a.detach(), b.detach()))
        assert sums.launched > before + 8
    theirs = torch.autograd.grad(function(a, b).sum(), (a, b), create_graph=True)
    torch.testing.assert_close(first, theirs)
    torch.testing.assert_close(
        second, torch.autograd.grad(sum(g.square().sum() for g in theirs), (a, b))
    )
    torch.testing.assert_close(
        tangent, torch.func.jvp(function, (a, b), (a.detach(), b.detach()))[1]
    )
    # float64, for which a kernel has to be declared as torch's.
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with enable():
        assert torch.autograd.gradcheck(lambda x, y: torch.mm(x, y.t()), inputs)


def test_no_python_node_is_recorded(sums: Sums) -> None:
    a, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with enable():
        y = torch.mm(a, w)
        assert type(y.grad_fn).__name__ == "MmBackward0"
        y.sum().backward()
        assert calls("mm") == {"sums": 3, "torch": 0}


def test_vmap_autocast_inference_and_deterministic_mode(sums: Sums) -> None:
    a, b = torch.randn(6, 3, 4), torch.randn(4, 2)
    with enable():
        y = torch.vmap(lambda x: x @ b)(a)
        torch.testing.assert_close(y, torch.matmul(a.double(), b.double()).float())
        with torch.autocast("cpu", torch.bfloat16):
            y = a[0] @ b
            assert y.dtype is torch.bfloat16
        with torch.inference_mode():
            y = a[0] @ b
            assert y.is_inference()
            torch.testing.assert_close(y, exact(torch.mm, a[0], b).float())
        launched = sums.launched
        torch.use_deterministic_algorithms(True)
        try:
            y = a[0] @ b
        finally:
            torch.use_deterministic_algorithms(False)
        torch.testing.assert_close(y, exact(torch.mm, a[0], b).float())
        assert sums.launched > launched


def test_deterministic_mode_leaves_out_nondeterministic_kernels() -> None:
    kernel = Sums(traits=tmm_core.Traits(deterministic=False))
    installed(FakeBlas(estimate=100.0), kernel)
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with enable():
        a @ b
        assert kernel.launched
        launched = kernel.launched
        torch.use_deterministic_algorithms(True)
        try:
            y = a @ b
        finally:
            torch.use_deterministic_algorithms(False)
        assert kernel.launched == launched
    assert torch.equal(y, a @ b)


def test_settings_and_deterministic_mode_hold_for_grouped_and_scaled_products() -> None:
    kernel = Outright("outright", estimate=1.0, traits=tmm_core.Traits(deterministic=False))
    installed(FakeBlas(estimate=100.0), kernel)
    a8 = torch.randn(32, 32).to(torch.float8_e4m3fn)
    one = torch.tensor(0.5)

    def both() -> None:
        torch._scaled_mm(a8, a8.t(), one, one, out_dtype=torch.bfloat16)
        torch._grouped_mm(ROWS, WEIGHTS, offs=ENDS)

    with enable():
        both()
        launched = kernel.launched
        assert launched
        torch.use_deterministic_algorithms(True)
        try:
            both()
        finally:
            torch.use_deterministic_algorithms(False)
        assert kernel.launched == launched
        with tmm_core.override(kernel="blas"):
            both()
        assert kernel.launched == launched
        both()
        assert kernel.launched == launched + 2


def test_checkpointing_and_hooks(sums: Sums) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with enable():
        y = checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False)
        (own,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(layer(layer(x)).sum(), x)
    torch.testing.assert_close(own, theirs)


def test_dispatch_modes_and_subclasses_see_the_same_calls(sums: Sums) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    class Own(Tensor):
        pass

    names: list[str] = []
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with enable():
        with Log():
            a @ b
        with FlopCounterMode(display=False) as counter:
            a @ b
        assert type(a.as_subclass(Own) @ b) is Own
    assert names == ["aten.mm.default"]
    assert counter.get_total_flops() == 2 * 3 * 4 * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_graphs_are_traced_as_before_and_answered(sums: Sums) -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    expected = torch.relu(layer(x))
    with enable(), torch.no_grad():
        torch._dynamo.reset()
        y = torch.compile(lambda x: torch.relu(layer(x)), backend="aot_eager", fullgraph=True)(x)
        assert calls("addmm") == {"sums": 1, "torch": 0}
    torch.testing.assert_close(y, expected)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "dtensor"])
def test_distributed_models(sums: Sums, one_rank: None, how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    expected = _step(model, x)
    other: Any = copy.deepcopy(model)
    if how == "ddp":
        other = nn.parallel.DistributedDataParallel(other)
    elif how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        other = fully_shard(other, mesh=mesh)
    else:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        other = parallelize_module(other, mesh, plan)
    with enable():
        got = _step(other, x)
        assert tmm_core.enabled_report().calls == 5
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in got]
    torch.testing.assert_close(whole, expected)


# -- on and off ------------------------------------------------------------------------------------


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_disable_restores_torch_bit_for_bit(sums: Sums) -> None:
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 17))
    x = torch.randn(19, 33)
    before = _step(model, x)
    enable()
    during = _step(model, x)
    tmm_core.disable()
    after = _step(model, x)
    assert all(map(torch.equal, before, after))
    assert not all(map(torch.equal, before, during))  # summed in float64
    torch.testing.assert_close(during, before)
    assert not aten_answers.answers
    assert "blas" not in nesting.NESTING
    report = tmm_core.enabled_report()
    assert (report.active, report.calls) == (False, 5)
    assert "ended" in str(report)
    tmm_core.disable()


def test_nested_blocks_restore_the_outer_state(sums: Sums) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 2), torch.randn(2)
    enable(ops=["mm"])
    a @ b
    assert sums.launched
    with enable(ops=["addmm"]):
        launched = sums.launched
        a @ b
        assert sums.launched == launched
        torch.addmm(c, a, b)
        assert sums.launched > launched
    launched = sums.launched
    torch.addmm(c, a, b)
    assert sums.launched == launched
    a @ b
    assert sums.launched > launched
    assert calls("mm") == {"sums": 2, "torch": 0}
    tmm_core.disable()
    launched = sums.launched
    a @ b
    assert sums.launched == launched


def _answers(sums: Sums) -> bool:
    before = sums.launched
    torch.randn(3, 4) @ torch.randn(4, 2)
    return sums.launched > before


def test_a_block_may_be_entered_again(sums: Sums) -> None:
    """Within itself, within another, and after its end."""
    block = enable()
    with block:
        with pytest.raises(ZeroDivisionError), block:
            raise ZeroDivisionError
        assert _answers(sums)
        with enable(ops=["bmm"]):
            assert not _answers(sums)
            with block:
                assert _answers(sums)
            assert not _answers(sums)
        assert _answers(sums)
    assert not _answers(sums)
    with block:
        assert _answers(sums)
        tmm_core.disable()
        assert not _answers(sums)
    assert not _answers(sums)


def test_a_block_entered_within_another_is_the_innermost(sums: Sums) -> None:
    outer = enable()
    with enable(ops=["bmm"]):
        with outer:
            assert _answers(sums)
        assert not _answers(sums)
    assert _answers(sums)
    tmm_core.disable()
    assert not _answers(sums)


def _interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Let a call of a function raise KeyboardInterrupt, at its end or its start."""
    function, calls = getattr(owner, name), [0]

    def interrupted(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == -call:
            raise KeyboardInterrupt
        result = function(*given, **named)
        if calls[0] == call:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("call", [-1, 1, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(aten, "_register"), (aten, "entry_of"), (aten.Enabled, "install"),
     (aten.Enabled, "uninstall"), (aten_answers.Operator, "leave"),
     (aten.warm, "drop_plans"), (aten, "_change"), (torch.library.Library, "impl")],
    ids=("register", "entry", "install", "uninstall", "leave", "plans", "change", "impl"),
)  # fmt: skip
@pytest.mark.slow(quick=6)
def test_an_interrupted_block_is_not_in_force(
    sums: Sums, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    """Whether Ctrl-C comes while it begins or while it ends; the block around it stays in force."""
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        _interrupt(patch, owner, name, call)
        with enable():
            torch.randn(3, 4) @ torch.randn(4, 2)
    assert not aten._stack
    assert not _answers(sums)
    with enable(ops=["mm"]):
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            _interrupt(patch, owner, name, call)
            with enable(ops=["bmm"]):
                pass
        assert _answers(sums)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            _interrupt(patch, owner, name, call)
            tmm_core.disable()
    assert not aten._stack
    assert not _answers(sums)


def test_a_block_is_left_by_an_exception(sums: Sums) -> None:
    with pytest.raises(ZeroDivisionError), enable():
        raise ZeroDivisionError
    torch.randn(2, 2) @ torch.randn(2, 2)
    assert not sums.launched


def test_enable_takes_only_and_ops_and_refuses_others(sums: Sums) -> None:
    seen: list[Problem] = []

    def only(problem: Problem) -> bool:
        seen.append(problem)
        return problem.m >= 4

    with enable(only=only):
        for m in (2, 8, 2, 8):
            torch.randn(m, 4) @ torch.randn(4, 2)
        assert calls("mm") == {"sums": 2, "torch": 2}
    assert sorted(problem.m for problem in seen) == [2, 8]
    with pytest.raises(tmm_core.UnknownNameError, match="did you mean 'addmm'"):
        enable(ops=["admm"])
    with pytest.raises(tmm_core.SettingsError, match="on_cache_miss"):
        enable(on_cache_miss="never")
    assert not tmm_core.enabled_report().active


def test_settings_are_obeyed(sums: Sums) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with enable():
        with tmm_core.override(kernel="blas"):
            a @ b
        assert not sums.launched
        with tmm_core.override(disable="sums"):
            a @ b
        assert not sums.launched
        with (
            tmm_core.override(on_cache_miss="error"),
            pytest.raises(tmm_core.CacheMissError),
        ):
            a @ b


def test_a_record_decides(sums: Sums) -> None:
    slow, _ = dispatcher(FakeBlas(), sums, times={"blas": 10.0, "sums": 4.0})
    dispatch.default_dispatcher.made = slow
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    tmm_core.tune(tmm_core.problem(a, b))
    with enable():
        a @ b
        a @ b
        report = tmm_core.enabled_report()
    assert report.operators["mm"].calls == {"sums": 2, "torch": 0}
    assert report.saved_us == pytest.approx(12.0)


@pytest.mark.parametrize(("steady_us", "answers"), [(9.9, True), (10.1, False)])
def test_a_kernel_that_loses_in_steady_state_does_not_answer(
    sums: Sums, steady_us: float, answers: bool
) -> None:
    """A call of tmm uses the winner, which is faster in bursts. ``enable()`` promises more."""
    dispatch.default_dispatcher.made, _ = dispatcher(
        FakeBlas(), sums, times={"blas": 10.0, "sums": 9.0}
    )
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    tuned_with_steady_times(tmm_core.problem(a, b), {"blas": 10.0, "sums": steady_us})
    with enable():
        a @ b
        a @ b
        report = tmm_core.enabled_report()
    assert report.operators["mm"].calls == ({"sums": 2, "torch": 0} if answers else {"torch": 2})
    assert ("sums loses in steady state" in str(report)) is not answers
    assert tmm_core.explain(a, b).choice.candidate.kernel.name == "sums"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of interpreted kernels mean nothing, and calls do not tune."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fingerprint.cache_clear()
    yield
    monkeypatch.undo()
    fingerprint.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_a_miss_is_tuned_in_the_background(monkeypatch: pytest.MonkeyPatch, sums: Sums) -> None:
    monkeypatch.setattr(aten_answers, "RETRY", 0.0)
    times = {"blas": 10.0, "sums": 4.0}
    dispatch.default_dispatcher.made, _ = dispatcher(FakeBlas(), sums, times=times)
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    expected = exact(torch.mm, a, b).float()
    with enable(on_cache_miss=None), tmm_core.override(tune_share=1.0):
        torch.testing.assert_close(a @ b, expected)
        assert calls("mm") == {"torch": 1}
        deadline = time.monotonic() + 60
        while not calls("mm").get("sums") and time.monotonic() < deadline:
            torch.testing.assert_close(a @ b, expected)
            time.sleep(0.001)
        answered = calls("mm")
        assert answered["sums"] == 1
        a @ b
        assert calls("mm") == {"torch": answered["torch"], "sums": 2}


@pytest.mark.usefixtures("compiled")
def test_an_answer_that_does_not_last_is_replayed_for_a_while(
    monkeypatch: pytest.MonkeyPatch, sums: Sums
) -> None:
    monkeypatch.setattr(aten_answers, "RETRY", 1e6)
    made, _ = dispatcher(FakeBlas(), sums, times={"blas": 10.0, "sums": 4.0})
    dispatch.default_dispatcher.made = made
    seen = []
    bound = made.bound
    monkeypatch.setattr(made, "bound", lambda *given: seen.append(given) or bound(*given))
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    with enable(on_cache_miss=None):
        for _ in range(5):
            a @ b
        assert len(seen) == len(aten_answers.passing) == 1
        tmm_core.tune(tmm_core.problem(a, b))  # which forgets all answers
        a @ b
        assert calls("mm") == {"torch": 5, "sums": 1}


def test_a_tmm_call_that_blas_answers_stays_blas(sums: Sums) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with enable():
        y = tmm_core.matmul(a, b, kernel="blas", epilogue="relu")
        assert not sums.launched
    assert torch.equal(y, torch.relu(a @ b))


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_a_kernel_that_raises_is_replaced_by_torch(error: BaseException) -> None:
    launched: list[int] = []

    def spoil(y: Tensor) -> Tensor:
        launched.append(1)
        if len(launched) > broken_from[0]:
            raise error
        return y

    broken_from = [10**9]
    installed(FakeBlas(estimate=100.0), Sums(spoil=spoil))
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    expected = a @ b
    with enable():
        a @ b
        broken_from[0] = 0
        with pytest.warns(tmm_core.TmmWarning, match="sums failed"):
            y = a @ b
        assert torch.equal(y, expected)
        assert torch.equal(a @ b, expected)
        assert calls("mm") == {"sums": 1, "torch": 2}


def test_a_wrong_kernel_never_answers() -> None:
    installed(FakeBlas(estimate=100.0), Sums(spoil=lambda y: y + 1))
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    expected = a @ b
    with enable(), pytest.warns(tmm_core.TmmWarning, match="wrong"):
        assert torch.equal(a @ b, expected)


def test_a_fault_while_choosing_costs_one_warning(
    sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("disk")

    monkeypatch.setattr(dispatch.default_dispatcher.made, "bound", fail)
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    expected = a @ b
    with enable():
        with pytest.warns(tmm_core.TmmWarning, match="OSError: disk"):
            y = a @ b
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(a[:2] @ b, torch.mm(a[:2], b))
    assert torch.equal(y, expected)
    with enable(), tmm_core.override(kernel="sum"):
        monkeypatch.undo()
        with pytest.raises(tmm_core.UnknownNameError, match="did you mean 'sums'"):
            a @ b


def test_a_kernel_that_multiplies_itself_gets_torchs_product() -> None:
    """A fake computes by torch.mm, as a kernel that pads its operands does."""
    kernel = FakeKernel("padding", estimate=1.0)
    installed(FakeBlas(estimate=100.0), kernel)
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with enable():
        for _ in range(3):
            torch.testing.assert_close(a @ b, exact(torch.mm, a, b).float())
        assert calls("mm")["padding"] >= 2


def test_memory_errors_are_the_callers() -> None:
    def spoil(y: Tensor) -> Tensor:
        if broken:
            raise torch.OutOfMemoryError("full")
        return y

    broken: list[int] = []
    installed(FakeBlas(estimate=100.0), Sums(spoil=spoil))
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with enable():
        a @ b
        broken.append(1)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            a @ b


def test_threads(sums: Sums) -> None:
    a, b = torch.randn(9, 4), torch.randn(4, 2)
    expected = exact(torch.mm, a, b).float()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                torch.testing.assert_close(torch.mm(a, b), expected)
        except BaseException as error:
            failures.append(error)

    with enable():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            with enable(ops=["bmm"]):
                pass
        for thread in threads:
            thread.join()
        assert not failures
        assert calls("mm")["torch"] == 0
    assert not failures


def test_calls_left_to_torch_for_good_are_passed_on_by_a_part_of_the_key() -> None:
    sums = Sums(against=lambda p: ["transposed"] if p.a.layout == "col" else [])
    installed(FakeBlas(estimate=100.0), sums)
    a, b, c, out = (torch.randn(4, 4) for _ in range(4))
    expected = exact(torch.mm, a.t(), b).float()
    names = ("mm", "mm.out", "addmm", "addmm.out")

    def parts(name: str) -> int:
        return sum(part[0].name == name for part in aten_answers.through)

    with enable():
        for _ in range(3):
            torch.testing.assert_close(torch.mm(a.t(), b), expected)
            torch.testing.assert_close(torch.mm(a.t(), b, out=out), expected)
            torch.testing.assert_close(torch.addmm(c, a.t(), b), c + expected)
            twice = torch.addmm(c[0], a.t(), b, alpha=2, out=out)
            torch.testing.assert_close(twice, c[0] + 2 * expected)
        assert [parts(name) for name in names] == [1, 1, 1, 1]
        assert [calls(name)["torch"] for name in names] == [3, 3, 3, 3]
        # Neither another layout nor other settings are passed on by it.
        torch.mm(a, b)
        torch.mm(a.t(), b)
        torch.mm(a, b)
        assert calls("mm") == {"sums": 2, "torch": 4}
        with tmm_core.override(deterministic=True):
            torch.mm(a.t(), b)
        assert parts("mm") == 2
        tmm_core.tune(tmm_core.problem(a, b))  # which may change who answers
        assert not aten_answers.through


def test_a_forced_kernel_that_declines_is_reported() -> None:
    installed(FakeBlas(), Sums(against=lambda p: ["only small ones"] if p.m > 4 else []))
    a, b = torch.randn(8, 4), torch.randn(4, 2)
    expected = a @ b
    with enable(), tmm_core.override(kernel="sums"):
        assert torch.equal(a @ b, expected)
        assert not tmm_core.enabled_report().operators["addmm"].declined
        a[:4] @ b
        report = tmm_core.enabled_report()
    assert report.operators["mm"].calls == {"sums": 1, "torch": 1}
    assert "sums" in report.operators["mm"].declined
    assert "only small ones" in str(report)


# -- where it does not pay -------------------------------------------------------------------------


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the host or the GPU limits the process, by each sample: on this CPU both do. Each
    fourth call is a sample, and 8 calls are enough to leave an operator, at 2 µs each."""
    now = {"host": True, "gpu": True}
    monkeypatch.setattr(host_bound.Pace, "_limits", lambda pace, t: (now["host"], now["gpu"]))
    monkeypatch.setattr(host_bound, "INTERVAL", 4)
    monkeypatch.setattr(host_bound, "MORE", 0)
    monkeypatch.setattr(aten, "overhead_us", lambda name: 2.0)
    monkeypatch.setattr(aten, "ENOUGH", 8)
    return now


def _small_ones(saving: float) -> None:
    """A kernel that serves small products, and saves as many µs by each."""
    against = lambda p: ["large"] if p.m > 4 else []  # noqa: E731
    installed(FakeBlas(estimate=1.0 + saving), Sums(estimate=1.0, against=against))


SMALL, LARGE, B = torch.randn(4, 4), torch.randn(8, 4), torch.randn(4, 2)


def test_an_operator_that_costs_more_than_it_saves_is_left_to_torch(limits: Any) -> None:
    _small_ones(0.5)
    expected = LARGE @ B
    with enable():
        for _ in range(4):
            SMALL @ B
            torch.addmm(B[0], SMALL, B)
        for _ in range(40):
            assert torch.equal(LARGE @ B, expected)
        report = tmm_core.enabled_report().operators
        assert "8 calls that torch answered while the host was the limit" in report["mm"].left
        assert report["mm"].calls == {"sums": 4, "torch": 12}  # with four after a choice
        assert (report["mm"].host_us, report["mm"].slowed) == (2.0, 8)
        assert not report["addmm"].left
        text = str(tmm_core.enabled_report())
        assert "left to torch" in text
        assert "8 calls passed on cost the host 2.0 µs each" in text
        with enable(ops=["mm"]):
            SMALL @ B
        SMALL @ B
        assert calls("mm")["sums"] == 4
        torch.addmm(B[0], SMALL, B)
        assert calls("addmm")["sums"] == 5
    with enable():  # asks again
        SMALL @ B
        assert calls("mm")["sums"] == 1


def test_an_operator_that_saves_time_stays_enabled(limits: Any) -> None:
    _small_ones(90.0)
    with enable():
        SMALL @ B
        for _ in range(40):
            LARGE @ B
        assert not tmm_core.enabled_report().operators["mm"].left
        assert calls("mm") == {"sums": 1, "torch": 40}
        for _ in range(20):  # counted once, at whichever sample
            SMALL @ B
        assert tmm_core.enabled_report().saved_us == pytest.approx(21 * 90.0)


def test_gpu_time_is_saved_only_where_the_gpu_is_the_limit(limits: Any) -> None:
    _small_ones(90.0)
    limits["gpu"] = False
    with enable():
        for _ in range(40):
            SMALL @ B
            LARGE @ B
        report = tmm_core.enabled_report()
    # The first four calls were not known to be for nothing.
    assert report.saved_us <= 2 * 90.0
    assert report.operators["mm"].left
    assert report.operators["mm"].calls["sums"] > 8


def test_the_host_is_slowed_only_where_it_is_the_limit(limits: Any) -> None:
    _small_ones(0.0)
    limits["host"] = False
    with enable():
        for _ in range(40):
            LARGE @ B
        report = tmm_core.enabled_report().operators["mm"]
        assert (report.left, report.slowed, report.host_us) == ("", 0, None)
        limits["host"] = True
        for _ in range(40):
            LARGE @ B
        assert tmm_core.enabled_report().operators["mm"].left


def test_choosing_kernels_does_not_count_as_passing_on(limits: Any) -> None:
    _small_ones(0.0)
    with enable():
        for m in range(5, 45):
            torch.randn(m, 4) @ B
        report = tmm_core.enabled_report().operators["mm"]
    assert (report.left, report.slowed, report.calls) == ("", 0, {"torch": 40})


def test_an_operator_left_to_torch_is_answered_again_once_there_is_a_record(limits: Any) -> None:
    kernel = Sums()
    made, _ = dispatcher(FakeBlas(), kernel, times={"blas": 10.0, "sums": 4.0})
    dispatch.default_dispatcher.made = made
    with enable(only=lambda problem: problem.m < 8):
        for _ in range(40):
            LARGE @ B
        assert tmm_core.enabled_report().operators["mm"].left
        SMALL @ B
        assert not kernel.launched
        tmm_core.tune(tmm_core.problem(SMALL, B))
        report = tmm_core.enabled_report().operators["mm"]
        assert (report.left, report.slowed) == ("", 0)
        launched = kernel.launched
        SMALL @ B
        assert kernel.launched == launched + 1
        for _ in range(40):  # and left again
            LARGE @ B
        assert tmm_core.enabled_report().operators["mm"].left


class Queue:
    """Stands in for torch's functions for a GPU, whose queue is worked off when ``done`` is set."""

    device = torch.device("cuda", 1)
    is_cuda = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.done = self.capturing = self.refused = False
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def record(self, stream: Any) -> None:
        self.log.append(stream)

    def query(self) -> bool:
        self.log.append("query")
        if self.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.done


def test_a_sample_queries_whether_the_gpu_reached_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, reviews = Queue(monkeypatch), []
    pace = host_bound.Pace(lambda: reviews.append((pace.host, pace.gpu)))

    def call(times: int = 1) -> None:
        for _ in range(times):
            pace.calls += 1
            if pace.calls >= pace.next:
                pace.look(queue)  # type: ignore[arg-type]  # has what of a tensor is read
                assert pace.next > pace.calls

    assert (pace.host, pace.gpu) == (True, True)
    call(15)
    assert queue.log == []
    call(2)
    assert queue.log == ["stream of cuda:1", "query"]
    assert reviews == [(False, True)]  # work is left
    queue.done = True
    call(17)
    assert reviews == [(False, True), (True, False)]
    call(31)
    assert len(reviews) == 2  # samples get rarer
    queue.capturing = True
    del queue.log[:]
    call(500)
    assert (queue.log, len(reviews)) == ([], 2)
    queue.capturing = False
    call(500)
    assert queue.log.count("query") == len(reviews) - 2 > 1
    assert pace.next - pace.calls <= host_bound.MOST
    queue.refused, before = True, len(reviews)
    call(600)  # another thread captures
    assert len(reviews) == before
    queue.refused = False
    call(600)
    assert len(reviews) > before


def test_the_cost_of_passing_is_that_of_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that takes 100 µs, and passes on."""
    made = aten_report.entry_of

    def entry_of(op: Any) -> Any:
        entry = made(op)

        def slow(keys: Any, *given: Any, **named: Any) -> Any:
            end = time.perf_counter() + 1e-4
            while time.perf_counter() < end:
                pass
            return entry(keys, *given, **named)

        return slow

    monkeypatch.setattr(aten_report, "entry_of", entry_of)
    monkeypatch.setattr(aten_report, "_BATCHES", 3)
    aten_report._measured_us.cache_clear()
    for name in ("mm", "baddbmm.out"):
        assert 80 < aten_report.overhead_us(name) < 10_000
    aten_report._measured_us.cache_clear()


@pytest.mark.parametrize(
    ("usual", "probed", "cost"),
    [([5, 2, 3, 4, 9], [7, 8, 4, 6, 6], 2.0), ([5, 4], [3, 9], 0.0), ([3, 4], [3, 4], 0.0)],
)
def test_the_cost_of_passing_is_the_difference_of_the_least_times(
    usual: list[int], probed: list[int], cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of 40 calls, interleaved; 0 if the entry only seems to be faster."""
    took = (1e-6 * 40 * us for pair in zip(usual, probed, strict=True) for us in pair)
    times = (each for us in took for each in (0.0, us))
    monkeypatch.setattr(aten_report, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(aten_report, "_BATCHES", len(usual))
    aten_report._measured_us.cache_clear()
    assert aten_report.overhead_us("mm") == pytest.approx(cost)
    aten_report._measured_us.cache_clear()


def test_two_threads_measure_the_cost_of_passing_once() -> None:
    aten_report._measured_us.cache_clear()
    costs: list[float] = []

    def measure() -> None:
        costs.append(aten_report.overhead_us("mm"))

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(costs) == 4
    assert len(set(costs)) == 1


@pytest.mark.parametrize("name", aten.ENTRY)
def test_the_cost_of_passing_is_measured_without_touching_aten(name: str) -> None:
    aten_report._measured_us.cache_clear()
    assert 0.0 <= aten_report.overhead_us(name) < 1000.0
    probe = f"tmm::probe_{name.replace('.', '')}"
    assert not torch._C._dispatch_has_kernel(probe)
    after = str(torch.library.get_kernel(f"aten::{name}", "CPU"))
    assert "RegisterC" in after  # torch's own


# -- by the environment ----------------------------------------------------------------------------

PROGRAM = """
import os, sys, warnings
os.environ["TMM_ENABLE"] = {value!r}
import tmm_core
print(tmm_core.enabled_report().active, "tmm_core.interop.inductor" in sys.modules)
"""


def _run(value: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(value=value)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)


@pytest.mark.slow
def test_the_environment_enables() -> None:
    assert _run("1").stdout == "True False\n"
    assert _run("0").stdout == "False False\n"
    assert "TMM_ENABLE='maybe'" in _run("maybe").stderr


def test_operators_are_named_alone_or_together() -> None:
    for ops, found in (("mm", ("mm",)), (["mm", "bmm"], ("mm", "bmm")), (None, aten.NAMES)):
        with tmm_core.enable(ops=ops, _key="CPU") as enabled:
            assert tuple(enabled.ops) == tuple(found)
    with pytest.raises(tmm_core.UnknownNameError, match="operator"):
        tmm_core.enable(ops="mmm")


def test_without_cuda_nothing_is_answered() -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    with tmm_core.enable() as enabled:
        assert not enabled.answered
        assert "no operator of this torch" in str(tmm_core.enabled_report())


def test_calls_of_a_review_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement calls operators that are answered here, as on a CPU. Each of its calls would
    wait for the review that it is part of."""
    monkeypatch.setattr(host_bound.Pace, "_limits", lambda pace, t: (True, True))
    monkeypatch.setattr(host_bound, "INTERVAL", 4)
    monkeypatch.setattr(host_bound, "MORE", 0)
    monkeypatch.setattr(aten, "ENOUGH", 8)
    aten_report._measured_us.cache_clear()
    _small_ones(0.5)
    with enable():

        def work() -> None:
            for _ in range(40):
                LARGE @ B

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert tmm_core.enabled_report().operators["mm"].host_us is not None


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's, of overridden kernels
@pytest.mark.parametrize("name", [*SHAPES, "mm.out", "addmm.out", "_scaled_mm"])
def test_a_kernel_that_another_library_removes_is_not_called(sums: Sums, name: str) -> None:
    """As a mode does that replaces torch's products for a time."""
    base, _, overload = name.partition(".")
    one = torch.ones(())
    a8, b8 = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in "ab")
    tensors = [torch.ones(shape) for shape in SHAPES.get(base, ())] or [a8, b8.t(), one, one]
    more: dict[str, Any] = {"out": torch.empty(5, 3)} if overload else {}
    more |= {"out_dtype": torch.bfloat16} if base == "_scaled_mm" else {}
    expected = getattr(torch, base)(*tensors, **more).clone()
    theirs = expected * 0 - 1
    other = torch.library.Library("aten", "IMPL")

    def their(*_: Any, out: Tensor | None = None, **__: Any) -> Tensor:
        return theirs if out is None else out.copy_(theirs)

    other.impl(f"aten::{name}", their, "CPU", allow_override=True)
    with enable(only=lambda problem: False):
        for _ in range(2):
            assert (getattr(torch, base)(*tensors, **more) == theirs).all()
        other._destroy()
        for _ in range(2):
            assert (getattr(torch, base)(*tensors, **more) == expected).all()
        assert name in aten._stack[-1].answered
        assert aten._stack[-1].answered[name].library is not None
    assert (getattr(torch, base)(*tensors, **more) == expected).all()
