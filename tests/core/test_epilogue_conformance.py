"""The conformance suite of epilogues passes right epilogues. Each kind of wrong epilogue fails the
suite's test for that fault."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import tmm_core
from tmm_core import Epilogue, Port, dispatch
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.testing import EpilogueConformance
from tmm_core.testing.terms import USERS


@triton.jit
def elu_device(z, alpha: tl.constexpr):
    return tl.where(z > 0, z, alpha * (tl.exp(z) - 1))


@triton.jit
def elu_slope(z, alpha: tl.constexpr):
    return tl.where(z > 0, 1.0, alpha * tl.exp(z))


def elu(z, alpha=1.5):
    return F.elu(z, alpha)


def elu_derivative(z, alpha):
    return torch.where(z > 0, 1.0, alpha * torch.exp(z))


@triton.jit
def ignores_alpha(z, alpha: tl.constexpr):
    return tl.where(z > 0, z, 1.5 * (tl.exp(z) - 1))


ELU = Epilogue("elu", elu, elu_device, derivative=elu_derivative, device_derivative=elu_slope)
CUBE_GLU = Epilogue(
    "cubeglu",
    lambda gate, up: gate**3 * up,
    gated=True,
    derivative=lambda gate, up: (3 * gate**2 * up, gate**3),
)
DOUBLE = Epilogue("double", lambda z: 2 * z, linear=True, output_vjp=lambda grad, y: 2 * grad)


class TestElu(EpilogueConformance):
    epilogue = ELU


class TestUsers(EpilogueConformance):
    epilogue = USERS


class TestGated(EpilogueConformance):
    epilogue = CUBE_GLU


class TestDouble(EpilogueConformance):
    epilogue = DOUBLE


@triton.jit
def absolute(y):
    return tl.abs(y)


AMAX = Port("amax", "row", reduce="max", of=torch.abs, device=absolute)


class TestOutputs(EpilogueConformance):
    epilogue = replace(CUBE_GLU, name="cubeglu_amax", outputs=(AMAX,))


WRONG: dict[str, tuple[Epilogue, str]] = {
    "test_derivative": (replace(ELU, derivative=lambda z, alpha: z > 0), "derivative"),
    "test_output_vjp": (
        Epilogue(
            "tanh3", lambda z: torch.tanh(3 * z), output_vjp=lambda grad, y: grad * (1 - y * y)
        ),
        "output_vjp",
    ),
    "test_linear": (Epilogue("squared", lambda z: z * z, linear=True), "reference"),
    "test_reference": (Epilogue("centred", lambda z: z - z[:1]), "reference of other rows"),
    "test_device": (replace(ELU, device=ignores_alpha), "device"),
    "test_device_derivative": (replace(ELU, device_derivative=elu_device), "device_derivative"),
    "test_outputs": (
        replace(DOUBLE, outputs=(replace(AMAX, of=lambda y: y, device=absolute),)),
        "outputs.amax",
    ),
    "test_it_trains": (replace(CUBE_GLU, derivative=lambda gate, up: (up, gate)), "derivative"),
}


FORMS = ("test_derivative", "test_output_vjp", "test_device", "test_device_derivative")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name, epilogue in BUILTIN.items()
        for form in FORMS
        if getattr(epilogue, form.removeprefix("test_")) is not None
    ],
)
def test_the_forms_of_a_builtin_epilogue_are_one_function(name: str, form: str) -> None:
    class Conforms(EpilogueConformance):
        epilogue = BUILTIN[name]
        points = (0.0, *EpilogueConformance.points, -0.0)

    getattr(Conforms(), form)()


@pytest.mark.parametrize("test", WRONG)
def test_a_wrong_function_is_named_with_its_file_and_line(test: str) -> None:
    epilogue, what = WRONG[test]
    suite: Any = type("Suite", (EpilogueConformance,), {"epilogue": epilogue})()
    arguments = (torch.float64,) if test == "test_reference" else ()
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
        getattr(suite, test)(*arguments)
    message = str(caught.value)
    assert message.startswith(f"{epilogue.name}: {what} is wrong: ")
    assert f"({__file__}:" in message
    if test == "test_outputs":  # of the device function, not of the torch function beside it
        assert f":{absolute.fn.__code__.co_firstlineno})" in message


def test_a_reference_that_changes_the_dtype_is_reported() -> None:
    class Suite(EpilogueConformance):
        epilogue = Epilogue("wide", lambda z: 2 * z.double())

    Suite().test_reference(torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with pytest.raises(pytest.fail.Exception, match=f"returns torch.float64 for {dtype}"):
            Suite().test_reference(dtype)


def test_a_derivative_by_the_output_of_a_gated_epilogue_is_reported() -> None:
    """The output does not determine two slopes."""

    class Suite(EpilogueConformance):
        epilogue = replace(CUBE_GLU, output_vjp=lambda grad, y: grad)

    with pytest.raises(pytest.fail.Exception, match="output_vjp is wrong: not for a gated"):
        Suite().test_output_vjp()


def test_a_function_that_is_linear_for_each_sign_is_not_linear() -> None:
    class Suite(EpilogueConformance):
        epilogue = Epilogue("of_each_sign", torch.relu, linear=True)

    with pytest.raises(pytest.fail.Exception, match="of_each_sign: reference is wrong"):
        Suite().test_linear()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "exact", "limit", "fault"),
    [
        ([1.0, NAN, INF, -INF], [1.0, NAN, INF, -INF], 0.0, ""),
        ([1.0, NAN], [1.0, 2.0], 0.5, "it is nan at -2, the reference has 2"),
        ([1.0, 2.0], [1.0, NAN], 0.5, "it is 2 at -2, the reference has nan"),
        ([1.0, INF], [1.0, -INF], 0.5, "it is inf at -2, the reference has -inf"),
        ([1.0, 4.5], [1.0, 3.0], 0.375, ""),  # relative to the reference and one
        ([0.9, 4.5], [1.0, 3.0], 0.374, "it is 4.5 at -2, the reference has 3; the tol.* is 0.4"),
        ([1.0, 3.0 + 8e-5], [1.0, 3.0], None, ""),
        ([1.0, 3.0 + 3e-4], [1.0, 3.0], None, "the tolerance is 6e-05"),
    ],
)
def test_how_close_two_functions_are(
    found: list[float], exact: list[float], limit: float | None, fault: str
) -> None:
    fields = {"epilogue": DOUBLE, "points": (-1.5, -2.0), "slack": 3.0}
    suite: Any = type("Suite", (EpilogueConformance,), fields)()
    given = [torch.tensor([[value] * 2 for value in values]) for values in (found, exact)]
    if not fault:
        suite._close(*given, "reference", limit)
        return
    with pytest.raises(pytest.fail.Exception, match=f"double: reference is wrong: .*{fault}"):
        suite._close(*given, "reference", limit)


@pytest.mark.parametrize("epilogue", [ELU, DOUBLE], ids=["parameters", "none"])
def test_a_device_function_is_evaluated_with_other_parameters_and_in_a_chain(
    epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    epilogue = replace(epilogue, device=elu_device)
    suite: Any = type("Suite", (EpilogueConformance,), {"epilogue": epilogue})()
    monkeypatch.setattr("tmm_core.triton.device_function", lambda each: each)
    evaluated: list[Epilogue] = []
    suite._evaluated = lambda each, blocks: evaluated.append(each) or each.apply(*blocks)
    suite.test_device()
    others = [epilogue.with_parameters(1.25 * 1.5 + 0.5)] if epilogue.parameters else []
    assert evaluated == [epilogue, *others, epilogue.then(parse("softcap(30)"))]


@triton.jit
def slope_that_ignores_alpha(z, alpha: tl.constexpr):
    return tl.where(z > 0, 1.0, 1.5 * tl.exp(z))


def test_a_device_derivative_is_evaluated_with_other_parameters() -> None:
    class Suite(EpilogueConformance):
        epilogue = replace(ELU, device_derivative=slope_that_ignores_alpha)

    with pytest.raises(pytest.fail.Exception, match="elu: device_derivative is wrong"):
        Suite().test_device_derivative()


def test_a_name_that_is_taken_is_reported() -> None:
    class Suite(EpilogueConformance):
        epilogue = replace(ELU, name="silu")

    with pytest.raises(tmm_core.PluginError, match="'silu' is already registered"):
        Suite().test_it_goes_by_its_name()


def test_a_function_that_reads_an_object_without_a_description_is_reported() -> None:
    lock = threading.Lock()

    class Suite(EpilogueConformance):
        epilogue = Epilogue("locked", lambda z: z if lock else -z)

    with pytest.raises(pytest.fail.Exception, match="another in every process"):
        Suite().test_its_key_follows_its_source()


calls = 0


def counts_its_calls(z):
    global calls
    calls += 1
    return 2 * z


def test_a_function_that_changes_a_variable_that_it_reads_is_reported() -> None:
    """Its key depends on the calls before it was first read: a later process may have another."""

    class Suite(EpilogueConformance):
        epilogue = Epilogue("counts", counts_its_calls)

    assert Suite.epilogue.lasting
    assert Suite.epilogue.key.startswith("counts@")
    Suite().test_its_key_follows_its_source()
    Suite.epilogue.apply(torch.ones(2))
    with pytest.raises(AssertionError):
        Suite().test_its_key_follows_its_source()


# -- parameters and keys -----------------------------------------------------------------


def test_parameters_are_the_references_defaults() -> None:
    assert ELU.parameters == (1.5,)
    assert replace(ELU, name="other").parameters == (1.5,)
    known = {"elu": ELU, "two": Epilogue("two", lambda z, a=1, b=2.5: a * z + b)}
    assert parse("elu(0.5)", known).parameters == (0.5,)
    assert parse("two(3)", known).parameters == (3.0, 2.5)
    with pytest.raises(ValueError, match="takes 2 parameters, got 3"):
        parse("two(1,2,3)", known)
    # Flags, functions, and arguments that the device function lacks are no parameters.
    assert Epilogue("flag", lambda z, inplace=False: z).parameters == ()
    assert Epilogue("bound", lambda z, f=torch.sin: f(z)).parameters == ()
    assert Epilogue("fixed", elu, device=triton.jit(lambda z: z)).parameters == ()
    z = torch.linspace(-2, 2, 5)
    assert torch.equal(parse("elu(0.5)", known).apply(z), F.elu(z, 0.5))


def test_a_key_is_read_back_if_the_source_is_the_same() -> None:
    known = {**BUILTIN, "elu": ELU, "double": DOUBLE}
    chain = ELU.with_parameters(0.25).then(DOUBLE).then(parse("softcap(5)"))
    assert parse(chain.key, known) == chain
    changed = ELU.key[:-1] + ("0" if ELU.key[-1] != "0" else "1")
    with pytest.raises(ValueError, match="has other source than"):
        parse(changed, known)


def test_a_bf16_product_is_right_in_the_interpreter() -> None:
    """The interpreter stores bf16 as integers, which ``tl.dot`` must not multiply."""
    from tmm_core.triton import Launch

    launch = Launch(
        product,
        {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"},
        {"SIZE": 16},
        device=torch.device("cpu"),
    )
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.empty(16, 16)
    launch((1, 1, 1), a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float())


@triton.jit
def product(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + places, tl.dot(tl.load(a_ptr + places), tl.load(b_ptr + places)))


def test_the_dispatcher_finds_an_interned_epilogue_by_its_key() -> None:
    nobodys = Epilogue("nobodys", lambda z: z + 1)
    assert dispatch.default_dispatcher().registry.epilogue(nobodys.interned()) is nobodys
