"""Products of one input in compiled graphs, on a CPU. Streams are in tests/gpu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeBlas, FakeKernel, dispatcher, installed
from test_inductor import Seen, passed, recorded
from torch import nn

import tmm_core
from tmm_core import settings
from tmm_core.dispatch import default_dispatcher
from tmm_core.epilogues import BUILTIN
from tmm_core.interop import shared_input
from tmm_core.interop.shared_input import MOST_ROWS, arguments, concurrent
from tmm_core.launch import warm
from tmm_core.spec.arguments import Arguments

Tensor = torch.Tensor

ROWS, K = 6, 24


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_input, "STREAMED", ("cpu",))
    torch._dynamo.reset()
    installed(FakeBlas())
    yield
    torch._dynamo.reset()


class Noted(Seen):
    """The pass, and the epilogues of each call that several products became."""

    def __init__(self, when: Any = "always") -> None:
        super().__init__(when)
        self.joined: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        nodes = [node for node in graph.nodes if node.target is concurrent]
        self.joined += [node.args[5] for node in nodes]


def joined_in(function: Any, *inputs: Tensor, when: Any = "always") -> list[list[str]]:
    """The calls that products of one input became; the results are compared with torch's."""
    torch._dynamo.reset()
    seen = Noted(when)
    with torch.no_grad():
        y = passed(function, *inputs, seen=seen)
        torch.testing.assert_close(y, function(*inputs), rtol=1e-5, atol=1e-5)
    return seen.joined


def weights(*columns: int) -> list[Tensor]:
    return [torch.randn(n, K) for n in columns]


@pytest.mark.parametrize("shape", [(ROWS, K), (2, 3, K), (1, 1, K), (MOST_ROWS, K)])
def test_query_key_and_value_become_one_call(shape: tuple[int, ...]) -> None:
    """Also where some have a bias, and where others are computed between them."""
    x, (q, k, v) = torch.randn(shape), weights(32, 16, 16)
    bias = torch.randn(32)

    def model(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        query = torch.sin(F.linear(x, q, bias))
        key = F.linear(x, k) * query[..., :16]
        return torch.cat((query, key, F.linear(x, v)), -1)

    assert joined_in(model, x, q, k, v, bias) == [["", "", ""]]


def test_gate_and_up_become_one_call() -> None:
    x, (gate, up) = torch.randn(ROWS, K), weights(40, 40)
    model = lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u)  # noqa: E731
    assert [set(each) for each in joined_in(model, x, gate, up)] == [{"silu", ""}]


@torch.no_grad()
def test_under_autocast() -> None:
    """Each layer converts and reshapes the input for itself."""
    x, seen = torch.randn(2, 3, K), Noted()
    q, k = nn.Linear(K, 32), nn.Linear(K, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = passed(lambda x: torch.cat((q(x), k(x)), -1), x, seen=seen)
    assert seen.joined == [["", ""]]
    weight, bias = (torch.cat((getattr(q, each), getattr(k, each))) for each in ("weight", "bias"))
    exact = F.linear(*(t.bfloat16().double() for t in (x, weight, bias)))
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_the_graph_converts(dtype: torch.dtype) -> None:
    x, (q, k) = torch.randn(ROWS, K, dtype=dtype), weights(32, 16)
    model = lambda x, q, k: torch.cat((x @ q.to(x.dtype).t(), x @ k.to(x.dtype).t()), 1)  # noqa: E731
    seen = Noted()
    with torch.no_grad():
        passed(model, x, q, k, seen=seen)
    assert seen.joined == [["", ""]]


def test_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_dispatcher, "made", None)
    layers = [nn.Linear(64, n, bias=False).bfloat16() for n in (32, 16)]
    stored = [tmm_core.quantize(each.weight.detach(), "int4", group=32) for each in layers]
    x, seen = torch.randn(ROWS, 64).bfloat16(), Noted()

    def model(x: Tensor) -> Tensor:
        return torch.cat([tmm_core.linear(x, each) for each in stored], 1)

    with torch.no_grad():
        y = passed(model, x, seen=seen)
        expected = torch.cat([x @ each.dequantize().t() for each in stored], 1)
    assert seen.joined == [["", ""]]
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


APART = {
    "many rows": lambda x, q, k: (x.repeat(11, 1) @ q.t())[:, :16] + x.repeat(11, 1) @ k.t(),
    "two inputs": lambda x, q, k: torch.cat((x @ q.t(), (x + 1) @ k.t()), 1),
    "two parts of an input": lambda x, q, k: torch.cat((x[:3] @ q.t(), x[3:] @ k.t()), 1),
    "a weight that is computed": lambda x, q, k: torch.cat((x @ q.t(), x @ torch.sin(k).t()), 1),
    "a weight that is a product": lambda x, q, k: x @ q[:16].t() + x @ (k @ q.t() @ q).t(),
    "a residual of the other": lambda x, q, k: x @ q[:16].t() + torch.sin(x @ k.t()),
    "one product": lambda x, q, k: (x @ q.t())[:, :16] + k[0, 0],
    "a batch": lambda x, q, k: torch.bmm(x[None], q.t()[None]) - torch.bmm(x[None], -q.t()[None]),
    "other factors": lambda x, q, k: torch.cat(
        (torch.addmm(k[0, 0].expand(6, 32), x, q.t(), alpha=2), x @ k.t()), 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_other_products_stay_apart(name: str) -> None:
    x, (q, k) = torch.randn(ROWS, K), weights(32, 16)
    assert joined_in(APART[name], x, q, k) == []


def test_a_cpu_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, (q, k) = torch.randn(ROWS, K), weights(32, 16)
    assert joined_in(lambda x, q, k: torch.cat((x @ q.t(), x @ k.t()), 1), x, q, k) == []


def test_a_weight_whose_size_is_computed_stays_apart() -> None:
    """The size may be computed after the first product, so the view cannot move before it."""
    x, (q, k) = torch.randn(ROWS, K), [torch.randn(n // 2, 2 * K) for n in (32, 16)]
    for each in (q, k):
        torch._dynamo.mark_dynamic(each, 0)

    def model(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first = x @ q.reshape(2 * q.shape[0], K).t()
        return torch.cat((first, x @ k.reshape(2 * k.shape[0], K).t()), 1)

    assert joined_in(model, x, q, k) == []


@pytest.mark.parametrize("rows", [MOST_ROWS, MOST_ROWS + 1])
def test_the_limit_of_rows(rows: int) -> None:
    x, (q, k) = torch.randn(rows, K), weights(32, 16)
    found = joined_in(lambda x, q, k: torch.cat((x @ q.t(), x @ k.t()), 1), x, q, k)
    assert found == [["", ""]] * (rows == MOST_ROWS)


# -- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("serves", [True, False])
def test_records_decide(serves: bool) -> None:
    """A product that BLAS answers is part of the call, if a kernel of ours answers another. One
    without a record would be tuned in the compiled call, unless BLAS alone serves it."""
    against = lambda p: [] if serves or p.n == 32 else ["too wide"]  # noqa: E731
    kernels = FakeBlas(), FakeKernel("fast", against=against)
    default_dispatcher.made, timer = dispatcher(*kernels, times={"blas": 10.0, "fast": 4.0})
    x, (q, k) = torch.randn(ROWS, K), weights(48, 32)
    model = lambda x, q, k: torch.cat((x @ q.t(), x @ k.t()), 1)  # noqa: E731
    tmm_core.tune(tmm_core.problem(x, k.t()))
    assert joined_in(model, x, q, k, when="records") == [["", ""]] * (not serves)
    if serves:
        timer.times["fast"] = 20.0
        tmm_core.tune(tmm_core.problem(x, q.t()))
        assert tmm_core.explain(x, q.t()).choice.candidate.kernel.name == "blas"
        assert joined_in(model, x, q, k, when="records") == [["", ""]]


def test_products_that_blas_answers_stay_torchs() -> None:
    a, b = recorded({"blas": 4.0, "fast": 10.0}, None)
    assert joined_in(lambda a, b: torch.cat((a @ b, a @ b * 2), 1), a, b, when="records") == []


# -- the operator ----------------------------------------------------------------------------------


def calls(requires_grad: bool = False) -> list[Arguments]:
    x = torch.randn(ROWS, K, requires_grad=requires_grad)
    first, second = (torch.randn(K, n, requires_grad=requires_grad) for n in (8, 12))
    bias = torch.randn(12, requires_grad=requires_grad)
    return [Arguments(x, first, epilogue="silu"), Arguments(x, second, bias)]


def test_arguments_and_their_inverse() -> None:
    given = calls()
    one, other = (Arguments(*each) for each in shared_input._calls(arguments(given)))
    assert (one.b is given[0].b, one.bias, one.epilogue) == (True, None, "silu")
    assert (other.b is given[1].b, other.bias is given[1].bias, other.epilogue) == (True, True, "")
    assert one.a is other.a is given[0].a


# opcheck in torch 2.15 issues it for tensors in a list.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_concurrent_operator_passes_torchs_checks() -> None:
    torch.library.opcheck(concurrent, arguments(calls()))
    torch.library.opcheck(concurrent, arguments(calls(requires_grad=True)))


@pytest.mark.parametrize("of_a", [True, False])
def test_concurrent_products_have_right_values_and_gradients(of_a: bool) -> None:
    given = calls(requires_grad=True)
    given[0].a.requires_grad_(of_a)
    results = concurrent(*arguments(given))
    (x, first, *_), (_, second, bias, *_) = given
    expected = F.silu(x @ first), torch.addmm(bias, x, second)
    for y, e in zip(results, expected, strict=True):
        torch.testing.assert_close(y, e)
    inputs = (x, first, second, bias)[not of_a :]
    own = torch.autograd.grad(sum(y.square().sum() for y in results), inputs)
    theirs = torch.autograd.grad(sum(e.square().sum() for e in expected), inputs)
    for mine, exact in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


def test_vmap() -> None:
    x, (q, k) = torch.randn(3, ROWS, K), weights(32, 16)

    def both(x: Tensor) -> Any:
        return concurrent(*arguments([Arguments(x, q.t()), Arguments(x, k.t())]))

    for y, w in zip(torch.vmap(both)(x), (q, k), strict=True):
        torch.testing.assert_close(y, x @ w.t())


def test_operands_that_do_not_fit() -> None:
    x, (q, k) = torch.randn(ROWS, K), weights(32, 16)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        concurrent(*arguments([Arguments(x, q.t()), Arguments(x, k)]))


class FakeStreams:
    """Notes what streams do, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"

    def stream(self, name: str) -> Any:
        streams = self

        class Stream:
            def record_event(self) -> str:
                streams.log.append(f"{name} records")
                return name

            def wait_event(self, event: str) -> None:
                streams.log.append(f"{name} waits for {event}")

        return Stream()


@pytest.mark.parametrize("fails", [None, 0, 1, 2])
def test_each_further_stream_waits_and_is_waited_for(
    fails: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a product raises: a capture with a stream that nothing waits for cannot end."""
    fake = FakeStreams()
    further = [fake.stream(f"side {i}") for i in range(3)]

    @contextmanager
    def inside(stream: Any) -> Iterator[None]:
        before, fake.current = fake.current, f"side {further.index(stream)}"
        yield
        fake.current = before

    def run(number: int) -> str:
        fake.log.append(f"{fake.current} computes {number}")
        if number == fails:
            raise RuntimeError("out of memory")
        return f"y{number}"

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(shared_input, "_streams", lambda device, thread: further)
    given: Any = [functools.partial(run, number) for number in range(3)]
    if fails is None:
        assert shared_input._at_once(given, torch.device("cuda")) == ["y0", "y1", "y2"]
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            shared_input._at_once(given, torch.device("cuda"))
    for side in ("side 0", "side 1"):
        mine = [line for line in fake.log if side in line]
        if not mine:  # an earlier product failed
            assert (fails, side) == (1, "side 1")
            continue
        waits, computes, records, joined = mine
        assert (waits, records) == (f"{side} waits for main", f"{side} records")
        assert (computes[:15], joined) == (f"{side} computes", f"main waits for {side}")
    assert fake.log[0] == "main records"
    if fails is None:  # more products than streams
        fake.log.clear()
        more: Any = [functools.partial(run, number) for number in range(6)]
        shared_input._at_once(more, torch.device("cuda"))
        computed = [line for line in fake.log if "computes" in line]
        assert computed == [
            "side 0 computes 1", "side 1 computes 2", "side 2 computes 3", "side 0 computes 4",
            "side 1 computes 5", "main computes 0",
        ]  # fmt: skip


def test_streams_of_a_thread_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    streams = functools.cache(shared_input._streams.__wrapped__)
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert streams(one, 1) is streams(one, 1)
    assert streams(other, 1) is not streams(one, 1)
    assert streams(one, 2) is not streams(one, 1)
    assert made == [one] * 3 + [other] * 3 + [one] * 3


# -- products that leave room for each other -------------------------------------------------------


@pytest.mark.parametrize(
    ("smallest", "largest", "share"),
    [(1, 1, True), (10_000_000, 30_000_000, True), (10_000_000, 30_000_001, False),
     (10_000_001, 10_000_001, False), (10_000_001, 30_000_000, False), (1, 100_000_000, False)],
)  # fmt: skip
def test_all_small_products_share_the_gpu_or_none(
    smallest: int, largest: int, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes of their weights, which have two each here."""
    found = []
    monkeypatch.setattr(
        shared_input, "run", lambda a, b: found.append(settings.current().shares_gpu) or b
    )
    a = torch.empty(1, 1, dtype=torch.bfloat16, device="meta")
    weights = [a.new_empty(1, size) for size in (largest, smallest, largest)]
    products = shared_input._beside_each_other([(a, weight) for weight in weights])
    assert found == []
    assert all(product() is weight for product, weight in zip(products, weights, strict=True))
    assert found == [share] * 3
    assert not settings.current().shares_gpu


# -- tracing ---------------------------------------------------------------------------------------


def test_built_in_epilogues_are_known_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler cannot trace the making of a registry, so a graph would break at the first
    call of a process."""
    monkeypatch.setattr(warm, "answerer", lambda: pytest.fail("asked for the dispatcher"))
    for name, epilogue in BUILTIN.items():
        assert warm.epilogue_of(name) is epilogue
