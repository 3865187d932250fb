"""A plan refuses every tensor that differs from the one for which it was made."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakeBlas, installed
from tmm_blas.blas import Blas

import tmm_core

Tensor = torch.Tensor
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
M, N, K = 4, 16, 32


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def shifted(t: Tensor) -> Tensor:
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def padded(t: Tensor) -> Tensor:
    return torch.empty(*t.shape, 2, dtype=t.dtype)[..., 0].copy_(t)


def resized(t: Tensor) -> Tensor:
    return tensor(t.shape[0] + 1, *t.shape[1:], dtype=torch.float32).to(t.dtype)


def widened(t: Tensor) -> Tensor:
    return t.double()


class Second(torch.Tensor):
    """A tensor that claims to be on a second device."""

    device = torch.device("cpu", 1)


def elsewhere(t: Tensor) -> Tensor:
    return t.as_subclass(Second)


def absent(t: Tensor) -> None:
    return None


CHANGES: list[Callable[[Tensor], Any]] = [shifted, padded, resized, widened, elsewhere, absent]
EVERYTHING: dict[str, dict[str, Tensor]] = {
    "plain": {
        "a": tensor(M, K),
        "b": tensor(K, N),
        "bias": tensor(N),
        "residual": tensor(M, N),
    },
    "scaled": {
        "a": tensor(M, K).to(E4M3),
        "b": tensor(K, N).to(E4M3),
        "bias": tensor(N, dtype=FP32),
        "residual": tensor(M, N),
        "scale_a": tensor(M, 1, dtype=FP32).abs(),
        "scale_b": torch.tensor(0.5),
    },
}
#: Scales are packed before a kernel sees them; a and b are always there.
APART = {(name, change) for name in ("scale_a", "scale_b") for change in (shifted, padded)}
APART |= {("a", absent), ("b", absent)}


def planned(call: dict[str, Tensor]) -> tuple[Any, Any]:
    plan = tmm_core.plan(**call)
    return plan, plan(**call)


@pytest.fixture(params=[True, False], ids=["", "without guards"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with torch's fast comparison of tensors, and without it."""
    if not request.param:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    installed(Blas())


CASES = [
    pytest.param(kind, name, change, id=f"{kind}-{name}-{change.__name__}")
    for kind, call in EVERYTHING.items()
    for name in call
    for change in CHANGES
    if (name, change) not in APART and not (call[name].dim() == 0 and change is resized)
]


@pytest.mark.parametrize(("kind", "name", "change"), CASES)
def test_an_argument_that_differs_from_the_plan_is_refused(
    kind: str, name: str, change: Callable[[Tensor], Any]
) -> None:
    call = EVERYTHING[kind]
    plan, result = planned(call)
    with pytest.raises(ValueError, match="takes"):
        plan(**{**call, name: change(call[name])})
    # The plan still serves the tensors for which it was made.
    assert torch.equal(plan(**call), result)


@pytest.mark.parametrize("kind", EVERYTHING)
@pytest.mark.parametrize("name", ["bias", "residual", "scale_a", "scale_b"])
def test_an_argument_that_the_plan_lacks_is_refused(kind: str, name: str) -> None:
    call = {k: v for k, v in EVERYTHING[kind].items() if k != name}
    given = {**EVERYTHING["scaled"], **EVERYTHING[kind]}[name]
    if kind == "plain" and name.startswith("scale"):
        call = {k: call[k] for k in ("a", "b")}
    plan, result = planned(call)
    with pytest.raises(ValueError, match="takes"):
        plan(**call, **{name: given})
    assert torch.equal(plan(**call), result)


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
def test_an_aligned_tensor_is_refused_by_a_plan_for_a_misaligned_one(name: str) -> None:
    call = EVERYTHING["plain"]
    odd = {**call, name: shifted(call[name])}
    plan, result = planned(odd)
    with pytest.raises(ValueError, match="offset from 16 bytes"):
        plan(**call)
    assert torch.equal(plan(**odd), result)


OUT = torch.empty(M, N, dtype=BF16)


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(shifted(OUT), id="alignment"),
        pytest.param(padded(OUT), id="columns apart"),
        pytest.param(torch.empty(M, N + 8, dtype=BF16)[:, :N], id="rows apart"),
        pytest.param(torch.empty(N, M, dtype=BF16).t(), id="column-major"),
        pytest.param(torch.empty(M, N), id="dtype"),
        pytest.param(torch.empty(M, N, dtype=torch.float16), id="dtype of as many bytes"),
        pytest.param(torch.empty(M + 1, N, dtype=BF16), id="too many rows"),
        pytest.param(torch.empty(M, N - 1, dtype=BF16), id="too few columns"),
        pytest.param(elsewhere(OUT), id="device"),
    ],
)
@pytest.mark.parametrize("kind", EVERYTHING)
def test_an_out_that_a_kernel_cannot_write_is_refused(kind: str, out: Tensor) -> None:
    call = EVERYTHING[kind]
    plan, result = planned(call)
    with pytest.raises(ValueError, match="takes out of"):
        plan(**call, out=out)
    right = torch.full_like(OUT, float("nan"))
    assert plan(**call, out=right) is right
    assert torch.equal(right, result)


def test_every_tensor_of_a_plan_is_tried() -> None:
    """A tensor that plans take in future must also be refused where it differs from the planned."""
    plan, _ = planned(EVERYTHING["plain"])
    assert set(inspect.signature(plan.__call__).parameters) == {
        *EVERYTHING["scaled"],
        "zero_a",
        "zero_b",
        "out",
    }


def test_a_plan_keeps_its_alpha_and_its_epilogue() -> None:
    call = {name: EVERYTHING["plain"][name].float() for name in ("a", "b")}
    twice = tmm_core.plan(**call, alpha=2.0, epilogue="relu")
    once = tmm_core.plan(**call)
    product = call["a"] @ call["b"]
    for _ in range(2):
        torch.testing.assert_close(twice(**call), torch.relu(2 * product))
        torch.testing.assert_close(once(**call), product)


def test_copies_of_a_plan_and_of_a_model_that_holds_it_launch() -> None:
    call = {name: EVERYTHING["plain"][name].float() for name in ("a", "b")}
    layer: Any = torch.nn.Identity()
    layer.plan = tmm_core.plan(**call)
    for each in (copy.deepcopy(layer).plan, copy.copy(layer.plan)):
        torch.testing.assert_close(each(**call), call["a"] @ call["b"])


def test_a_plan_is_shown_in_a_line() -> None:
    made = tmm_core.plan(tensor(M, K), tensor(K, N), epilogue="silu")
    assert repr(made) == f"<Plan {made.problem}: {made.choice.candidate}, {made.origin}>"
    assert len(repr(made)) <= 100
    assert made.kernel in repr(made)
    assert made.config == made.choice.candidate.config.to_json()
    assert made.origin == made.choice.origin
    assert "silu" in repr(made)


def test_a_kernel_that_raises_in_a_plan_raises() -> None:
    """A plan is bound to its kernel: there is no other to go on with."""

    def explode(out: Tensor) -> Tensor:
        raise RuntimeError("boom")

    installed(FakeBlas(spoil=explode))
    call = {name: EVERYTHING["plain"][name] for name in ("a", "b")}
    plan = tmm_core.plan(**call)
    with pytest.raises(RuntimeError, match="boom"):
        plan(**call)


@pytest.mark.parametrize("dtype", [FP32, torch.float16])
def test_a_plan_multiplies_its_own_dtypes_under_autocast(dtype: torch.dtype) -> None:
    a, b = tensor(M, K, dtype=dtype), tensor(K, N, dtype=dtype)
    plan = tmm_core.plan(a, b, kernel="blas")
    expected = plan(a, b)
    out = torch.empty_like(expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        found, into = plan(a, b), plan(a, b, out=out)
        assert torch.is_autocast_enabled("cpu")
    for each in (found, into):
        assert each.dtype is dtype
        assert each.equal(expected)


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
def test_a_plan_refuses_lazily_negated_views(name: str) -> None:
    call = EVERYTHING["plain"]
    plan = tmm_core.plan(**call)
    negated = {**call, name: torch._neg_view(call[name])}
    with pytest.raises(ValueError, match=rf"takes {name} as it is in memory.*resolve_neg"):
        plan(**negated)
    with pytest.raises(ValueError, match=rf"takes {name} as it is in memory.*resolve_neg"):
        tmm_core.plan(**negated)
    resolved = {**call, name: negated[name].resolve_neg()}
    assert torch.equal(plan(**resolved), plan(**{**call, name: -call[name]}))


def test_a_plan_refuses_conjugates() -> None:
    a, b = torch.randn(M, K, dtype=torch.complex64), torch.randn(K, N, dtype=torch.complex64)
    plan = tmm_core.plan(a, b)
    with pytest.raises(ValueError, match=r"takes b as it is in memory.*resolve_conj"):
        plan(a, b.clone().conj())


def test_a_plan_writes_no_out_that_autograd_or_a_view_would_miss() -> None:
    a, b = tensor(M, K), tensor(K, N)
    plan = tmm_core.plan(a, b)
    out = torch.empty(M, N, dtype=BF16)
    with pytest.raises(ValueError, match="takes out as it is in memory"):
        plan(a, b, out=torch._neg_view(out))
    parameter = out.clone().requires_grad_()
    for learned in (parameter, parameter * 2):
        with pytest.raises(RuntimeError, match="out requires a gradient"):
            plan(a, b, out=learned)
    with torch.no_grad():
        assert torch.equal(plan(a, b, out=parameter), plan(a, b))
