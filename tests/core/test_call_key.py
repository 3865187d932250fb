"""The key of a warm call: two calls in one process that differ in one property get a plan each, in
either order.

The kernel compares its arguments with the problem that it was bound to. So a call with another
call's plan fails even if it would give the same numbers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes import FakeConfig, FakeKernel, installed

import tmm_core
from tmm_core import Launcher, Problem, Scale, Traits
from tmm_core.epilogues import parse
from tmm_core.launch import check

Tensor = torch.Tensor
Call = dict[str, Any]
BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 16, 16, 32


class Exact(FakeKernel):
    """Computes the problem that it was bound to, and raises if it is launched with other
    tensors."""

    def bind(self, problem: Problem, config: FakeConfig) -> Launcher:
        self.bound.append(problem)

        def launch(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            alpha: float,
            out: Tensor | None,
            a_scale: Tensor | None = None,
            b_scale: Tensor | None = None,
        ) -> Tensor:
            batch = (problem.batch,) if problem.batch > 1 else ()
            shape = (*batch, problem.m, problem.n)
            current = tmm_core.settings.current()
            given = Problem.of(
                a,
                b,
                torch.empty(shape, dtype=problem.out.dtype, device="meta") if out is None else out,
                problem.device,
                bias=bias,
                residual=residual,
                stored={
                    name: {"scale": Scale.of(scale)}
                    for name, scale in (("a", a_scale), ("b", b_scale))
                },
                epilogue=problem.epilogue,
                scaled=alpha != 1.0,
                tf32=a.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32",
                deterministic=current.deterministic or torch.are_deterministic_algorithms_enabled(),
                batch_invariant=current.batch_invariant,
            )
            assert given == problem, f"launched with {given}"
            for scale in (a_scale, b_scale):
                assert scale is None or scale.is_contiguous()
            launched.append((self.name, config.tile))
            z = expression(a, b, bias, residual, alpha, problem.epilogue, a_scale, b_scale)
            return z.to(problem.out.dtype) if out is None else out.copy_(z)

        return launch


#: Kernel and tile of every launch.
launched: list[tuple[str, int]] = []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Exact, Exact]:
    """BLAS, whose errors are not caught, and another kernel that is used only if it is forced."""
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")
    # One tensor on another device tells whether its own part of the key has the device.
    monkeypatch.setattr(check, "_on_one_device", lambda *_: None)
    launched.clear()
    able = Traits(batch_invariant=True)
    return Exact("blas", traits=able), Exact("other", traits=able, tiles=(1, 2))


def expression(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: Any,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
) -> Tensor:
    """The whole expression in fp64."""
    z = alpha * (a.double() @ b.double())
    for scale in (scale_a, scale_b):
        z = z if scale is None else z * scale
    z = epilogue.apply(z if bias is None else z + bias)
    return z if residual is None else z + residual


# -- tensors -----------------------------------------------------------------------------


def tensor(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def shifted(t: Tensor) -> Tensor:
    """Equal to it, and starting one element after a multiple of 16 bytes."""
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def padded(t: Tensor) -> Tensor:
    """Equal to it, with gaps between rows, or between the elements of a vector."""
    if t.dim() == 1:
        return torch.empty(2 * len(t), dtype=t.dtype)[::2].copy_(t)
    wide = torch.empty(*t.shape[:-1], t.shape[-1] + 16, dtype=t.dtype)
    return wide[..., : t.shape[-1]].copy_(t)


def turned(t: Tensor) -> Tensor:
    """Equal to it, and column-major."""
    return t.mT.contiguous().mT


class Second(torch.Tensor):
    """A tensor that claims to be on a second device."""

    device = torch.device("cpu", 1)


class OnCuda(torch.Tensor):
    is_cuda = True


def elsewhere(t: Tensor) -> Tensor:
    return t.as_subclass(Second)


def bases() -> dict[str, Call]:
    plain = {"a": tensor(M, K), "b": tensor(K, N, seed=1)}
    fp8 = {"a": tensor(M, K, dtype=E4M3), "b": tensor(K, N, dtype=E4M3, seed=1)}
    scales = {"scale_a": torch.tensor(0.5), "scale_b": tensor(1, N, dtype=FP32).abs()}
    return {"plain": plain, "scaled": {**fp8, **scales}, "unscaled": fp8}


#: The optional tensors of a call.
OPTIONAL = {
    "bias": tensor(N, seed=2),
    "residual": tensor(M, N, seed=3),
    "out": torch.empty(M, N, dtype=BF16),
}

# -- cases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Two calls that differ in what ``name`` says: a role and its field."""

    name: tuple[str, str]
    base: str
    first: Call
    second: Call
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __str__(self) -> str:
        return f"{'-'.join(self.name)}-{self.base}"


@contextmanager
def deterministic() -> Iterator[None]:
    # The flag of torch.use_deterministic_algorithms, which would also import the compiler.
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def tensor_cases() -> Iterator[Case]:
    for base, call in bases().items():
        for role in ("a", "b"):
            t = call[role]
            shape = tensor(8, K, dtype=t.dtype) if role == "a" else tensor(K, 8, dtype=t.dtype)
            deeper = {role: torch.stack([t, t])}
            if base == "scaled":
                deeper["scale_b"] = call["scale_b"][None].expand(2, 1, N)
                deeper = {} if role == "a" else deeper
            for field, second in {
                "shape": {role: shape},
                "dimensions": deeper,
                "alignment": {role: shifted(t)},
                "stride": {role: padded(t)},
                "layout": {role: turned(t)},
                "device": {role: elsewhere(t)},
            }.items():
                if field == "shape" and role == "b" and base == "scaled":
                    second = {**second, "scale_b": call["scale_b"][:, :8]}
                if second:
                    yield Case((role, field), base, {}, second)
        for role, t in OPTIONAL.items():
            for field, second in {
                "absence": None,
                "alignment": shifted(t),
                "stride": padded(t),
                "device": elsewhere(t),
            }.items():
                yield Case((role, field), base, {role: t}, {role: second})
            if role != "out":
                yield Case((role, "dtype"), base, {role: t}, {role: t.float()})
            if t.dim() == 2:
                yield Case((role, "layout"), base, {role: t}, {role: turned(t)})
        residual = OPTIONAL["residual"]
        yield Case(("residual", "shape"), base, {"residual": residual}, {"residual": residual[:1]})
        # Another residual, or out, than the one that a plan of both was made for.
        both = {"bias": OPTIONAL["bias"], "residual": residual}
        yield Case(("bias", "absence beside another"), base, both, {"residual": residual})
        yield Case(("residual", "absence beside another"), base, both, {"bias": both["bias"]})
    halves = {"a": tensor(M, K, dtype=FP32), "b": tensor(K, N, dtype=FP32)}
    yield Case(("a", "dtype of both"), "plain", {}, halves)
    for role, base in itertools.product("ab", ("scaled", "unscaled")):
        yield Case((role, "dtype"), base, {}, {role: bases()[base][role].to(E5M2)})
    number, rows = torch.tensor(0.5), tensor(M, 1, dtype=FP32).abs()
    columns = bases()["scaled"]["scale_b"]
    yield Case(("scale_a", "shape"), "scaled", {"scale_a": number}, {"scale_a": rows})
    yield Case(("scale_b", "shape"), "scaled", {"scale_b": number}, {"scale_b": columns})
    for role, scale in (("scale_a", number), ("scale_b", columns)):
        yield Case((role, "absence"), "scaled", {role: scale}, {role: None})
        yield Case((role, "absence beside no other"), "unscaled", {role: scale}, {})
        yield Case((role, "device"), "scaled", {role: scale}, {role: elsewhere(scale)})
    yield Case(("scale_a", "for scale_b"), "unscaled", {"scale_a": number}, {"scale_b": number})
    yield Case(("out", "dtype"), "plain", {"out_dtype": FP32}, {})


def value_cases() -> Iterator[Case]:
    extras = {"bias": OPTIONAL["bias"], "residual": OPTIONAL["residual"]}
    for base in ("plain", "scaled"):
        yield Case(("alpha", "one or not"), base, {"alpha": 1.0}, {"alpha": 2.0})
        yield Case(("epilogue", "absence"), base, {}, {"epilogue": "relu"})
        yield Case(("epilogue", "name"), base, {"epilogue": "silu"}, {"epilogue": "tanh"})
        first, second = ({"epilogue": f"softcap({cap})"} for cap in (1, 2))
        yield Case(("epilogue", "parameter"), base, first, second)
        yield Case(("epilogue", "place"), base, {"epilogue": "scale(2)+relu2"},
                   {"epilogue": "relu2+scale(2)"})  # fmt: skip
        yield Case(("out_dtype", "dtype"), base, {}, {"out_dtype": FP32})
        yield Case(("alpha", "among all"), base, extras, {**extras, "alpha": 0.25})
        yield Case(("kernel", "name"), base, {}, {"kernel": "other"})
        one, two = ({"kernel": "other", "config": {"tile": tile}} for tile in (1, 2))
        yield Case(("config", "value"), base, one, two)
        yield Case(("on_cache_miss", "value"), base, {}, {"on_cache_miss": "heuristic"})
        yield Case(("mode", "deterministic"), base, {}, {}, deterministic)
        for setting, value in {
            "deterministic": True,
            "batch_invariant": True,
            "disable": {"other"},
            "tune_budget": 3.0,
        }.items():
            around = functools.partial(tmm_core.override, **{setting: value})
            yield Case(("setting", setting), base, {}, {}, around)


CASES = [*tensor_cases(), *value_cases()]


def make(call: Call) -> None:
    """Make one call and compare its result with the expression."""
    out = call.get("out")
    given = {name: value for name, value in call.items() if value is not None}
    if out is not None:
        out.fill_(float("nan"))
    y = tmm_core.matmul(given.pop("a"), given.pop("b"), **given)
    assert out is None or y is out
    expected = expression(
        *(None if (t := call.get(name)) is None else t.as_subclass(torch.Tensor) for name in
          ("a", "b", "bias", "residual")),
        call.get("alpha", 1.0),
        parse(call.get("epilogue")),
        call.get("scale_a"),
        call.get("scale_b"),
    )  # fmt: skip
    assert y.dtype is call.get("out_dtype", y.dtype)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2, check_device=False)
    if "kernel" in call:
        assert launched[-1] == ("other", call.get("config", {}).get("tile", 1))
    else:
        assert launched[-1] == ("blas", 1)


def run_both(case: Case, backwards: bool) -> None:
    base = bases()[case.base]
    pair = [
        ({**base, **case.first}, nullcontext),
        ({**base, **case.second}, case.around),
    ]
    for call, around in (pair[::-1] if backwards else pair) * 2:
        with around():
            make(call)


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_that_differ_in_one_thing_have_a_plan_each(
    case: Case, backwards: bool, kernels: tuple[Exact, Exact]
) -> None:
    installed(*kernels)
    run_both(case, backwards)
    assert sum(len(kernel.bound) for kernel in kernels) == 2


def test_a_plan_of_an_untuned_choice_does_not_answer_where_none_is_allowed(
    kernels: tuple[Exact, Exact],
) -> None:
    installed(*kernels)
    plain = bases()["plain"]
    make(plain)
    with pytest.raises(tmm_core.CacheMissError):
        tmm_core.matmul(**plain, on_cache_miss="error")
    make(plain)
    weight = {"x": plain["a"], "weight": plain["b"].t()}
    tmm_core.linear(**weight)
    for setting, error in (
        ({"on_cache_miss": "error"}, tmm_core.CacheMissError),
        ({"kernel": "none"}, tmm_core.UnknownNameError),
        ({"kernel": "blas", "config": {"none": 1}}, tmm_core.ConfigError),
    ):
        with pytest.raises(error):
            tmm_core.linear(**weight, **setting)


def test_properties_that_no_kernel_sees_make_no_new_plan(kernels: tuple[Exact, Exact]) -> None:
    installed(*kernels)
    base, rows = bases()["scaled"], tensor(M, 1, dtype=FP32).abs()
    apart = torch.empty(M, 2)[:, :1].copy_(rows)
    for scale in (rows, shifted(rows), apart):
        make({**base, "scale_a": scale})
    plain = bases()["plain"]
    for alpha in (2.0, 3.0, -1.0):
        make({**plain, "alpha": alpha})
    for a in (plain["a"], 2 * plain["a"]):
        make({**plain, "a": a})
    assert len(kernels[0].bound) == 3


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
def test_tf32_has_a_plan_of_its_own(
    backwards: bool, kernels: tuple[Exact, Exact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, which these tensors say that they are on."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    installed(*kernels)
    a, b = (tensor(*shape, dtype=FP32).as_subclass(OnCuda) for shape in ((M, K), (K, N)))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32")[:: -1 if backwards else 1] * 2:
            torch.backends.cuda.matmul.fp32_precision = precision
            make({"a": a, "b": b})
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [p.tf32 for p in kernels[0].bound] == [backwards, not backwards]


# -- nothing is left out -----------------------------------------------------------------


def parameters() -> dict[str, bool]:
    """Every parameter of a call, and whether it is a tensor."""
    schema = torch.ops.tmm.matmul.out._schema
    known = {argument.name: "Tensor" in str(argument.type) for argument in schema.arguments}
    more = inspect.signature(tmm_core.matmul).parameters
    return dict.fromkeys(more, False) | known


#: Arguments that callers give as parts of a quantised tensor; see test_quantized.py.
OF_QUANTIZED = ("zero_a", "zero_b", "formats")


def test_every_parameter_has_its_cases() -> None:
    """A parameter that is new must be tried before it may pass."""
    tried: dict[str, set[str]] = {}
    for case in CASES:
        tried.setdefault(case.name[0], set()).add(case.name[1])
    for name, is_tensor in parameters().items():
        if name in OF_QUANTIZED:
            continue
        assert name in tried, f"no two calls differ in {name}"
        if not is_tensor:
            continue
        fields = {"shape", "stride", "dtype", "alignment", "device", "absence"}
        fields -= {"absence"} if name in ("a", "b") else set()
        # A bias has the output's width; scales are fp32 and packed; `out` is resized.
        fields -= {"shape"} if name in ("bias", "out") else set()
        fields -= {"stride", "dtype", "alignment"} if name.startswith("scale") else set()
        assert fields <= tried[name], f"{name}: no two calls differ in {fields - tried[name]}"
