"""Two functions are never taken for one: pairs that differ in one thing run one after the other.
Keys of functions without a closure, in modules with files, are the same in every process."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
import torch
from fakes import forget_interned
from tmm_cache import CacheStore
from torch import nn

import tmm_core
from tmm_core import Epilogue, Port
from tmm_core.epilogues import EPILOGUES
from tmm_core.spec import epilogue as spec_epilogue
from tmm_core.spec.epilogue import INTERNED
from tmm_core.spec.identity import Global, _globals_of, cells_of, lasting_text, reader_of

Function = Callable[..., torch.Tensor]


def times(c: Any) -> Function:
    return lambda z: z * c


def nested(c: float) -> Function:
    def outer(z: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return y * c

        return inner(z)

    return outer


def default(c: float) -> Function:
    def scaled(z: torch.Tensor, *, by: float = c) -> torch.Tensor:
        return z * by

    return scaled


def keyword_list(c: float) -> Function:
    def scaled(z: torch.Tensor, *, by: Any = [c]) -> torch.Tensor:  # noqa: B006  # never changed
        return z * by[0]

    return scaled


def positional(c: Any) -> Function:
    # Not a parameter of the epilogue, since it is no number.
    return lambda z, by=(c,): z * by[0]


def multiplied(z: torch.Tensor, c: float) -> torch.Tensor:
    return z * c


class Scaled:
    def __init__(self, c: float) -> None:
        self.c = c

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.c

    def method(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.c

    @classmethod
    def of_class(cls, z: torch.Tensor) -> torch.Tensor:
        return z * cls.factor

    factor = 2.0


class Slotted:
    __slots__ = ("c",)

    def __init__(self, c: float) -> None:
        self.c = c

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.c


class Listed(list):  # type: ignore[type-arg]
    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self[0]


class Partial(functools.partial):  # type: ignore[type-arg]
    pass


class Tripled(Scaled):
    factor = 3.0


def executed(source: str, **scope: Any) -> Any:
    exec(source, scope)
    return scope["f"]


def of_module(c: float) -> Function:
    settings = types.ModuleType("settings")
    settings.c = c  # type: ignore[attr-defined]
    return executed("def f(z): return z * settings.c", settings=settings)


def of_import(c: float) -> Function:
    name = "settings_for_import"
    module = sys.modules.setdefault(name, types.ModuleType(name))
    setattr(module, f"c{c:.0f}", c)
    module.c = c  # type: ignore[attr-defined]
    return executed(f"def f(z):\n    from {name} import c{c:.0f} as c\n    return z * c")


def of_class(c: float) -> Function:
    class Local:
        def apply(self, z: torch.Tensor) -> torch.Tensor:
            return z * c

    return Local().apply


def wrapped(c: float) -> Function:
    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(z: torch.Tensor) -> torch.Tensor:
            return function(z) * c

        return call

    return decorate(torch.clone)


def parameter(c: float) -> nn.Module:
    layer = nn.PReLU(init=c)
    layer.weight.requires_grad_(False)
    return layer


def recursive(c: float) -> Function:
    def f(z: torch.Tensor, depth: Any = None) -> torch.Tensor:
        return f(z * c, "once") if depth is None else z

    return f


ON_ONE_LINE = {2.0: lambda z: z * 2.0, 3.0: lambda z: z * 3.0}

#: Makes a function that multiplies by its argument, in ways that differ in nothing else.
MAKERS: dict[str, Callable[[float], Any]] = {
    "closure": times,
    "nested": nested,
    "keyword default": default,
    "list as keyword default": keyword_list,
    "default": positional,
    "closure over a list": lambda c: (lambda cs: lambda z: z * cs[0])([c]),
    "closure over a dict": lambda c: (lambda cs: lambda z: z * cs["c"])({"c": c}),
    "closure over a function": lambda c: (lambda g: lambda z: g(z))(times(c)),
    "closure over a tensor": lambda c: times(torch.tensor(c)),
    "closure over bf16": lambda c: times(torch.tensor(c, dtype=torch.bfloat16)),
    "closure over an array": lambda c: (lambda x: lambda z: z * x.item())(np.array([c])),
    "numpy scalar": lambda c: (lambda s: lambda z: z * s.item())(np.float32(c)),
    "sign of zero": lambda c: (lambda zero: lambda z: z * (2.5 + np.copysign(0.5, zero)))(
        0.0 if c == 3 else -0.0
    ),
    "int or float": lambda c: (lambda s: lambda z: z * (3.0 if type(s) is int else 2.0))(
        1 if c == 3 else 1.0
    ),
    "bound method": lambda c: Scaled(c).method,
    "class method": lambda c: Scaled.of_class if c == 2 else Tripled.of_class,
    "callable object": Scaled,
    "slots": Slotted,
    "list with a call": lambda c: Listed([c]),
    "module": parameter,
    "partial": lambda c: functools.partial(multiplied, c=c),
    "partial of a partial": lambda c: functools.partial(functools.partial(multiplied, c=c)),
    "subclass of partial": lambda c: Partial(multiplied, c=c),
    "partial of torch's": lambda c: functools.partial(torch.mul, other=c),
    "partial's function": lambda c: functools.partial(times(c)),
    "one line": ON_ONE_LINE.get,
    "no source": lambda c: executed(f"def f(z): return z * {c}"),
    "globals": lambda c: executed("def f(z): return z * c", c=c),
    "globals of a helper": lambda c: executed("def g(z): return z * c\ndef f(z): return g(z)", c=c),
    "attribute of a module": of_module,
    "attribute by name": lambda c: executed(
        "def f(z): return z * getattr(m, 'c')", m=types.SimpleNamespace(c=c)
    ),
    "import": of_import,
    "local class": of_class,
    "attribute of a function": lambda c: executed(
        f"def f(z): return z * g.c\ndef g(): pass\ng.c = {c}"
    ),
    "decorator": wrapped,
    "recursive": recursive,
    "cached": lambda c: (lambda g: lambda z: z * g())(functools.cache(lambda: c)),
    "property": lambda c: type("P", (), {"__call__": lambda s, z: z * s.c,
                                         "c": property(lambda s: c)})(),
    "pattern": lambda c: (lambda p: lambda z: z * len(p.pattern))(re.compile("x" * int(c))),
    "set": lambda c: (lambda s: lambda z: z * max(s))({1.0, c}),
    "vmapped": lambda c: torch.vmap(times(c)),
}  # fmt: skip


def z_of(epilogue: Epilogue) -> torch.Tensor:
    """The result for a product of numbers below zero, where PReLU multiplies."""
    return tmm_core.matmul(A, B, epilogue=epilogue)


A, B = -torch.rand(4, 3) - 0.1, torch.rand(3, 5) + 0.1


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.parametrize("maker", MAKERS)
def test_functions_that_differ_in_one_thing_give_their_own_answers(maker: str) -> None:
    make = MAKERS[maker]
    two, three = (Epilogue("f", make(c)) for c in (2.0, 3.0))
    assert two.key != three.key
    assert two != three
    again = Epilogue("f", make(2.0))
    for epilogue, c in ((two, 2), (three, 3), (again, 2), (two, 2)):
        torch.testing.assert_close(z_of(epilogue), c * (A @ B))


#: Functions that are equal when they are made again in this process.
AGAIN = ("closure", "keyword default", "default", "int or float", "class method", "partial",
         "one line", "nested")  # fmt: skip


@pytest.mark.parametrize("maker", AGAIN)
def test_functions_of_equal_constants_share_a_key(maker: str) -> None:
    # Numbers of one value, and not one object.
    one, other = (Epilogue("f", MAKERS[maker](float("2"))) for _ in range(2))
    assert one.key == other.key
    assert one == other
    assert one.interned() == other.interned()


def test_a_function_whose_closure_is_not_filled_yet_stands_for_itself() -> None:
    def function(z: torch.Tensor) -> torch.Tensor:
        return later(z)

    epilogue = Epilogue("f", function)
    text = epilogue.interned()
    later = torch.relu
    assert INTERNED[text].apply(A @ B).eq(later(A @ B)).all()


def test_methods_of_one_object_share_a_key() -> None:
    of = Scaled(2.0)
    assert of.method is not of.method
    assert Epilogue("f", of.method) == Epilogue("f", of.method) != Epilogue("f", Scaled(2.0).method)


def neither(z: torch.Tensor) -> torch.Tensor:
    return z


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reference": ({"reference": times(2.0)}, {"reference": times(3.0)}),
    "derivative": ({"derivative": times(2.0)}, {"derivative": times(3.0)}),
    "output_vjp": ({"output_vjp": times(2.0)}, {"output_vjp": times(3.0)}),
    "which derivative": ({"derivative": times(2.0)}, {"output_vjp": times(2.0)}),
    "device": ({"device": times(2.0)}, {"device": times(3.0)}),
    "which device": ({"device": times(2.0)}, {"device_derivative": times(2.0)}),
    "parameters": ({"parameters": (2.0,)}, {"parameters": (3.0,)}),
    "gated": ({"gated": True}, {}),
    "linear": ({"linear": True}, {}),
    "interleaved": ({"gated": True, "interleaved": True}, {"gated": True}),
    "outputs": ({"outputs": (Port("p", "tile", of=times(2.0)),)},
                {"outputs": (Port("p", "tile", of=times(3.0)),)}),
    "name of an output": ({"outputs": (Port("p", "tile"),)}, {"outputs": (Port("q", "tile"),)}),
    "dtype of an output": ({"outputs": (Port("p", "tile"),)},
                           {"outputs": (Port("p", "tile", torch.float16),)}),
    "name": ({"name": "f"}, {"name": "g"}),
}  # fmt: skip


@pytest.mark.usefixtures("blas_alone")
def test_epilogues_made_in_every_call_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spec_epilogue, "_of_process", {})
    monkeypatch.setattr(spec_epilogue, "MANY", 3)

    def called(factor: float) -> None:
        mine = Epilogue("mine", lambda z: z * factor)
        assert tmm_core.matmul(torch.ones(1, 1), torch.ones(1, 1), epilogue=mine) == factor

    for factor in (1.0, 2.0, 1.0, 2.0):
        called(factor)
    assert caplog.messages == []
    for factor in (3.0, 3.0, 4.0, 3.0):
        called(factor)
    (message,) = caplog.messages
    assert message.startswith("3 epilogues (the last is 'mine') read different objects")


@pytest.mark.usefixtures("blas_alone")
def test_a_built_in_epilogue_with_another_function_is_its_own() -> None:
    relu, x = EPILOGUES["relu"], torch.ones(2, 2)
    assert replace(relu, outputs=(), linear=False).builtin
    for factor in (2.0, 3.0):
        mine = replace(relu, reference=lambda z, by=factor: z * by, parameters=(factor,))
        assert (mine.key.partition("@")[0], mine.builtin) == (f"relu({factor})", False)
        assert tmm_core.matmul(x, x, epilogue=mine).tolist() == [[2 * factor] * 2] * 2
    assert replace(relu, gated=True).key != "relu"
    other = replace(relu, reference=torch.neg)
    assert tmm_core.matmul(x, x, epilogue=other).tolist() == [[-2.0] * 2] * 2


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_that_results_depend_on_is_in_the_key(field: str) -> None:
    one, other = (
        Epilogue(**{"name": "f", "reference": neither, **fields}) for fields in FIELDS[field]
    )
    assert one.key != other.key
    chains = [Epilogue("last", neither).then(each) for each in (one, other) if not each.gated]
    assert len({chain.key for chain in chains}) == len(chains)


@pytest.mark.usefixtures("blas_alone")
def test_derivatives_of_one_source_give_their_own_gradients() -> None:
    for c in (2.0, 3.0, 2.0):
        a = A.clone().requires_grad_()
        slope = functools.partial(torch.full_like, fill_value=c)
        tmm_core.matmul(a, B, epilogue=Epilogue("f", times(c), derivative=slope)).sum().backward()
        torch.testing.assert_close(a.grad, c * B.sum(1).expand_as(a))


@pytest.mark.usefixtures("blas_alone")
def test_outputs_of_one_source_give_their_own_values() -> None:
    for c in (2.0, 3.0, 2.0):
        port = Port("p", "tile", of=times(c))
        _, beside = tmm_core.matmul(A, B, epilogue=Epilogue("f", neither, outputs=(port,)))
        torch.testing.assert_close(beside, c * (A @ B))


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.parametrize(
    "thing", [threading.Lock, lambda: (x for x in ()), lambda: torch.empty(2**19)]
)
def test_objects_in_a_closure_are_part_of_the_identity(thing: Any) -> None:
    """A key is of this process, and of this object."""

    def having(c: float, it: Any) -> Function:
        return lambda z: z * c if it is not None else z

    lone = thing()
    two, three, other = (
        Epilogue("f", having(c, it)) for c, it in ((2.0, lone), (3.0, lone), (2.0, thing()))
    )
    assert not any(each.lasting for each in (two, three, two.then(three)))
    assert len({two.key, three.key, other.key}) == 3
    assert Epilogue("f", having(2.0, lone)).key == two.key
    for epilogue, c in ((two, 2), (three, 3), (other, 2)):
        torch.testing.assert_close(z_of(epilogue), c * (A @ B))


@pytest.mark.usefixtures("blas_alone")
def test_equal_objects_that_change_later_are_distinguished() -> None:
    """An object stands for itself, and what torch applies reads its state in every call."""
    first, second = Scaled(2.0), Scaled(2.0)
    one, other = Epilogue("f", first), Epilogue("f", second)
    assert one != other
    assert one.interned() != other.interned()
    for epilogue in (one, other):
        torch.testing.assert_close(z_of(epilogue), 2 * (A @ B))
    first.c = 3.0
    torch.testing.assert_close(z_of(other), 2 * (A @ B))
    torch.testing.assert_close(z_of(one), 3 * (A @ B))
    torch.testing.assert_close(z_of(Epilogue("f", first)), 3 * (A @ B))
    torch.testing.assert_close(z_of(Epilogue("f", Scaled(2.0))), 2 * (A @ B))


@pytest.mark.usefixtures("blas_alone")
def test_a_closure_that_changes_later_is_not_taken_for_a_new_one() -> None:
    def make(c: float) -> tuple[Function, Callable[[float], None]]:
        def set_c(value: float) -> None:
            nonlocal c
            c = value

        return lambda z: z * c, set_c

    function, set_c = make(2.0)
    changing = Epilogue("f", function)
    torch.testing.assert_close(z_of(changing), 2 * (A @ B))
    set_c(3.0)
    torch.testing.assert_close(z_of(changing), 3 * (A @ B))
    torch.testing.assert_close(z_of(Epilogue("f", make(2.0)[0])), 2 * (A @ B))
    torch.testing.assert_close(z_of(Epilogue("f", make(3.0)[0])), 3 * (A @ B))
    # One that shared its plan does not follow it.
    another = make(4.0)
    one, other = Epilogue("f", another[0]), Epilogue("f", make(4.0)[0])
    for epilogue in (one, other):
        torch.testing.assert_close(z_of(epilogue), 4 * (A @ B))
    another[1](5.0)
    torch.testing.assert_close(z_of(other), 4 * (A @ B))
    torch.testing.assert_close(z_of(one.then(other)), 20 * (A @ B))


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.parametrize("code", [lambda z: z * 9, lambda z: z * SCALE * 9])
def test_code_that_is_replaced_in_place_is_followed(
    code: types.FunctionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As IPython's autoreload does with functions of an edited module."""
    monkeypatch.setitem(globals(), "SCALE", 1.0)

    def function(z: torch.Tensor) -> torch.Tensor:
        return z * SCALE * 2  # type: ignore[name-defined, no-any-return]

    epilogue = Epilogue("f", function)
    torch.testing.assert_close(z_of(epilogue), 2 * (A @ B))
    function.__code__ = code.__code__
    torch.testing.assert_close(z_of(epilogue), 9 * (A @ B))


@pytest.mark.usefixtures("blas_alone")
def test_a_function_that_writes_its_closure_keeps_it() -> None:
    calls = 0

    def counted(z: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return z * 2

    epilogue = Epilogue("f", counted)
    for _ in range(3):
        before = calls
        torch.testing.assert_close(z_of(epilogue), 2 * (A @ B))
        assert calls > before


@pytest.mark.usefixtures("blas_alone")
def test_an_epilogue_made_in_every_call_keeps_one_plan() -> None:
    forget_interned()
    before = len(INTERNED)
    for _ in range(5):
        z_of(Epilogue("f", times(2.0)))
    assert len(INTERNED) == before + 1


SCALE = 2.0
OF_MODULE: Any = types.ModuleType("of_a_module")
OF_MODULE.SCALE = 2.0
#: Its functions are not followed: they may be a large library's.
exec("OWN = object()\ndef read(): return OWN and 1", vars(OF_MODULE))


def test_the_variables_of_a_package_belong_to_its_functions() -> None:
    """Also those that a function in another of its modules reads; another package's are its own."""

    def module(name: str, text: str, **scope: Any) -> dict[str, Any]:
        found = {"__name__": name, **scope}
        exec(text, found)
        return found

    near = module("pack.near", "by = 2.0\ndef helper(z): return z * by")
    far = module("other", "to = 2.0\ndef stranger(z): return z * to")
    text = "own = 1.0\ndef f(z): return helper(stranger(z)) + own"
    own = module("pack.own", text, helper=near["helper"], stranger=far["stranger"])
    found = [*_globals_of(own["f"], set())]
    assert sorted(variable.name for variable in found) == ["by", "own"]
    assert {id(variable.namespace) for variable in found} == {id(near), id(own)}


def of_helper() -> float:
    return SCALE


def directly(z: Any) -> Any:
    return z * SCALE


def by_function(z: Any) -> Any:
    return z * of_helper()


def by_recursion(z: Any, times: int = 2) -> Any:
    return by_recursion(z * SCALE, times - 1) if times else z


READING = {
    "direct": directly,
    "by a function": by_function,
    "of a module": lambda z: z * OF_MODULE.SCALE,
    "beside another package's": lambda z: z * SCALE * OF_MODULE.read(),
    "inside": lambda z: (lambda y: y * SCALE)(z),
}


@pytest.mark.parametrize(
    ("value", "lasts"), [(2.0, True), ((1, (2.0, "x")), True), ((1, [2.0]), False), ({}, False)]
)
def test_constants_are_part_of_the_text_on_disk(
    value: Any, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lasting_text(by_function)
    monkeypatch.setitem(globals(), "SCALE", value)
    text = lasting_text(by_function)
    assert (text is not None) is lasts
    assert (text == before) is (value == 2.0)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (READING["beside another package's"], ["SCALE"]), (by_recursion, ["SCALE"]),
        (lambda z: nn.functional.silu(abs(z) * math.pi), []), (textwrap.dedent, []),
        (lambda z: sqrt(nn.Identity()(z)), []),
    ],
)  # fmt: skip
def test_functions_classes_and_modules_are_not_variables(function: Any, names: list[str]) -> None:
    assert [variable.name for variable, _ in cells_of(function)] == names


def test_functions_and_constants_of_triton_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "of_triton_a.py").write_text(
        "import triton\n"
        "import triton.language as tl\n"
        "C = tl.constexpr(2.0)\n"
        "@triton.jit\n"
        "def constant():\n"
        "    return C\n"
        "@triton.jit\n"
        "def device(z):\n"
        "    return z * constant()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("of_triton_a")
    monkeypatch.setitem(sys.modules, "of_triton_a", module)  # until the test ends
    two = lasting_text(module.device)
    monkeypatch.setattr(module, "C", type(module.C)(3.0))
    assert None is not two != lasting_text(module.device) is not None


def set_scale(monkeypatch: pytest.MonkeyPatch, c: float) -> None:
    monkeypatch.setattr(OF_MODULE, "SCALE", c)
    monkeypatch.setitem(globals(), "SCALE", c)


@pytest.mark.parametrize("reading", READING)
def test_a_graph_is_compiled_again_for_a_global_variable(
    reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setitem(sys.modules, "of_a_module", OF_MODULE)
    epilogue = Epilogue("f", READING[reading])
    call = functools.partial(tmm_core.matmul, epilogue=epilogue)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    texts = []
    for c in (2.0, 3.0, 2.0):
        set_scale(monkeypatch, c)
        a = A.clone().requires_grad_()
        y = compiled(a, B)
        y.sum().backward()
        torch.testing.assert_close(y, c * (A @ B))
        torch.testing.assert_close(a.grad, c * torch.ones_like(y) @ B.t())
        texts.append(epilogue.interned())
    assert texts[0] != texts[1] != texts[2] == texts[0]


class Cap:
    by = 2.0

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.by


def of_an_attribute() -> tuple[Any, Any]:
    cap = Cap()
    return cap, lambda: setattr(cap, "by", 3.0)


def of_a_list() -> tuple[Any, Any]:
    kept = [2.0]
    return lambda z: z * kept[0], lambda: kept.__setitem__(0, 3.0)


def of_arguments() -> tuple[Any, Any]:
    kept = {"by": 2.0}
    return functools.partial(lambda z, kept: z * kept["by"], kept=kept), lambda: kept.update(by=3.0)


def of_a_parameter() -> tuple[Any, Any]:
    by = torch.nn.Parameter(torch.tensor([2.0]))  # wider than a product of bf16
    return lambda z: z * by, lambda: by.data.fill_(3.0)


@pytest.mark.parametrize(
    "reading", [of_an_attribute, of_arguments, of_a_parameter], ids=lambda reading: reading.__name__
)
def test_a_graph_follows_objects_that_an_epilogue_reads(reading: Any) -> None:
    torch._dynamo.reset()
    function, change = reading()
    call = functools.partial(tmm_core.matmul, epilogue=Epilogue("f", function))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for by in (2.0, 3.0):
        a = A.clone().requires_grad_()
        y = compiled(a, B)
        torch.testing.assert_close(y, by * (A @ B))
        y.sum().backward()
        torch.testing.assert_close(a.grad, by * torch.ones_like(y) @ B.t())
        change()
    assert compiled(A.bfloat16(), B.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["linear", "grouped", "weighted", "scattered", "gated"])
def test_a_graph_follows_a_list_in_every_kind_of_call(kind: str) -> None:
    torch._dynamo.reset()
    function, change = of_a_list()
    epilogue, residual = Epilogue("f", function), torch.ones(A.shape[0], B.shape[1])
    if kind == "gated":
        epilogue = Epilogue("g", lambda gate, up: function(gate) + up, gated=True)
    ends = torch.tensor([len(A)], dtype=torch.int32)
    weights, places = torch.rand(len(A)), torch.arange(len(A)).flip(0)
    more: Any = {"alpha": 2.0}
    if kind != "grouped":
        more |= {"out_weights": weights} if kind == "weighted" else {"out_index": places}

    def call(a: torch.Tensor, b: torch.Tensor) -> Any:
        how: Any = {"residual": residual, "epilogue": epilogue}
        if kind in ("grouped", "weighted", "scattered"):
            return tmm_core.grouped_matmul(a, b[None], offs=ends, **how, **more)
        b = torch.cat([b, b], 1) if kind == "gated" else b
        return tmm_core.linear(a, b.t(), **how)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    a = A.clone().requires_grad_()
    for by in (2.0, 3.0):
        factors: dict[str, Any] = {
            "linear": by, "gated": by + 1, "grouped": 2 * by,
            # The graph keeps what it read first.
            "weighted": 4 * weights[:, None], "scattered": 4,
        }  # fmt: skip
        product = (A @ B).flip(0) if kind == "scattered" else A @ B
        torch.testing.assert_close(compiled(a, B), factors[kind] * product + 1)
        change()


def test_a_graph_has_an_epilogue_without_state_in_the_operator() -> None:
    twice = functools.partial(torch.mul, other=2.0)
    by = 2.0
    for function in (lambda z: z * by, torch.tanh, twice, torch.nn.functional.silu):
        assert not Epilogue("f", function).traces
    for other in ("device", "derivative", "output_vjp"):
        assert not Epilogue("f", Cap(), **{other: lambda z, *_: z * 2}).traces


def test_a_graph_takes_a_copy_of_a_users_epilogue() -> None:
    torch._dynamo.reset()
    again = copy.deepcopy(Epilogue("cubed", lambda z: z**3))
    call = torch.compile(
        lambda: tmm_core.matmul(A, B, epilogue=again), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(call(), (A @ B) ** 3)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
def test_an_epilogue_is_made_in_a_graph() -> None:
    """Of what it computes there, in a call of its own; and elsewhere it is like any other."""
    torch._dynamo.reset()
    factor = torch.tensor(2.0)

    def scaled(by: Any) -> Epilogue:
        return Epilogue("scaled", lambda z: z * by)

    call = torch.compile(
        lambda: (
            tmm_core.linear(A, B.t(), epilogue=scaled(factor)),
            tmm_core.matmul(A, B, epilogue=Epilogue("f", torch.tanh), residual=A @ B),
        ),
        backend="eager",
        fullgraph=True,
    )
    for by in (2.0, 3.0):
        factor.fill_(by)
        torch.testing.assert_close(call(), (A @ B * by, (A @ B).tanh() + A @ B))
    make = torch.compile(scaled, backend="eager")
    chained = torch.compile(lambda e: tmm_core.matmul(A, B, epilogue=[e, "relu"]), backend="eager")
    for by in (2.0, -3.0):
        epilogue = make(by)
        torch.testing.assert_close(chained(epilogue), (A @ B * by).relu())
        torch.testing.assert_close(tmm_core.matmul(A, B, epilogue=epilogue), A @ B * by)


def test_which_variables_a_reader_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of a cell or a module, as it is now; not one of a namespace that is no module,
    whatever name it has."""
    cell, module = types.CellType(1), types.ModuleType("of_variables")
    monkeypatch.setitem(sys.modules, "of_variables", module)
    vars(module)["x"] = 1
    own = reader_of(Global(vars(module), "x"))
    others = [{"x": 1}, {"x": 1, "__name__": "of_variables"}, {"x": 1, "__name__": "gone"}]
    assert [reader_of(cell)(), own()] == [1, 1]
    assert [reader_of(Global(other, "x"))() for other in others] == [None] * 3
    in_cell = reader_of(cell)
    cell.cell_contents = vars(module)["x"] = 2
    assert [in_cell(), own()] == [2, 2]


@pytest.mark.parametrize("module", [None, "math"])
def test_globals_outside_a_module_do_not_end_a_compilation(module: Any) -> None:
    torch._dynamo.reset()
    function = executed("def f(z): return z * c", c=2.0, __name__=module)
    call = functools.partial(tmm_core.matmul, epilogue=Epilogue("f", function))
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(A, B), 2 * (A @ B))


@pytest.mark.parametrize("function", [directly, by_function])
def test_a_kernel_is_compiled_again_for_a_global_variable(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    epilogue = Epilogue("f", function, device=function)
    for c in (2.0, 3.0, 2.0):
        set_scale(monkeypatch, c)
        y = tmm_core.matmul(A, B, epilogue=epilogue, kernel="triton.grouped")
        torch.testing.assert_close(y, c * (A @ B))


SHARED = """
import torch, triton
from tmm_core import Epilogue, Port

ON_ONE_LINE = lambda z: z * 2, lambda z: z * 3
def constant(z, kind="x", *, by=2.0): return z if kind in {"x", "y", "zz"} else z * by
@triton.jit
def device(z): return z

F = [Epilogue("f", each) for each in (*ON_ONE_LINE, constant, torch.relu, torch.nn.functional.silu)]
F += [Epilogue("f", constant, device=device)]
F += [Epilogue("f", constant, derivative=constant), Epilogue("g", constant)]
F += [Epilogue("f", constant, outputs=(Port("p", "tile", of=constant),))]
F += [F[0].then(F[2])]
exec("def executed(z): return z * 2")
"""
PROGRAM = """
from shared import *

lock = object()
def typed(c): return lambda z: z * c
print([each.key for each in F], all(each.lasting for each in F))
print([Epilogue("f", each).key for each in (typed(2.0), typed(lock), executed, lambda z: z)])
"""


@pytest.mark.slow
def test_keys_of_functions_with_files_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)

    path = os.pathsep.join([str(tmp_path), *sys.path])

    def keys(seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    (one, typed_one), (other, typed_other) = keys("1"), keys("2")
    assert one == other
    assert one.endswith("True")
    assert len(set(re.findall("[fg]@[0-9a-f]{12}", one))) == 9
    ours, theirs = (re.findall("@[0-9a-f]{12}", each) for each in (typed_one, typed_other))
    assert len(ours) == 4
    assert not set(ours) & set(theirs)
    # An edit of the file makes other keys.
    (tmp_path / "shared.py").write_text(SHARED + "\nMORE = 1\n")
    edited = set(re.findall("@[0-9a-f]{12}", keys("1")[0]))
    assert len(edited & set(re.findall("@[0-9a-f]{12}", one))) == 2  # torch's functions


def test_texts_of_functions_with_files_distinguish_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test compares texts in one process; the test above compares processes."""
    (tmp_path / "lasting_a.py").write_text(
        "def f(z, by=2.0, *, c=1): return z * by\n"
        "def other_default(z, by=3.0, *, c=1): return z * by\n"
        "def other_keyword(z, by=2.0, *, c=2): return z * by\n"
        "def other_code(z, by=2.0, *, c=1): return z - by\n"
        "def other_name(z, by=2.0, *, c=1): return z.abs * by\n"
        "def other_set(z, by=2.0, *, c=1): return z in {4, 5}\n"
        "def object_default(z, by=[2.0]): return z\n"
        "def over(c): return lambda z: z * c\n"
        "closure = over(2)\n"
        "executed = type(f)(f.__code__, {'__name__': __name__}, 'f')\n"
        "SCALE, OTHERS = 2.0, [3.0]\n"
        "def of_global(z): return z * SCALE\n"
        "def of_object(z): return z * OTHERS[0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("lasting_a")
    named = ("f", "other_default", "other_keyword", "other_code", "other_name", "other_set")
    functions = [getattr(module, name) for name in named]
    try:
        for each in functions:
            each.__qualname__ = "f"
        texts = [lasting_text(each) for each in functions]
        assert None not in texts
        assert len(set(texts)) == len(texts)
        assert [lasting_text(each) for each in functions] == texts
        for name in ("object_default", "closure", "executed", "of_object"):
            assert lasting_text(getattr(module, name)) is None
        two = lasting_text(module.of_global)
        monkeypatch.setattr(module, "SCALE", 3.0)  # as if an environment variable were another one
        assert None is not two != lasting_text(module.of_global) is not None
        (tmp_path / "lasting_a.py").write_text("")
        assert not {lasting_text(each) for each in functions} & set(texts)
    finally:
        del sys.modules["lasting_a"]
    assert lasting_text(functions[0]) is None
    assert lasting_text(None) == ""
    assert lasting_text(torch.relu) == "torch.relu"
    assert lasting_text(len) is None
    # A library's version is of the environment: no file of it is read.
    assert str(lasting_text(nn.functional.silu)).startswith("torch.nn.functional.silu  (")


def test_no_record_of_an_epilogue_of_one_process_is_saved(tmp_path: Path) -> None:
    lock = threading.Lock()
    kernels = fakes.FakeBlas(), fakes.FakeKernel("fast")
    d, _ = fakes.dispatcher(*kernels, times={"blas": 2.0, "fast": 1.0}, root=tmp_path)
    given = fakes.problem(epilogue=Epilogue("f", lambda z: z if lock else -z))
    assert d.choose(given, fakes.settings()).candidate.kernel.name == "fast"
    assert d.record(given) is not None
    assert not [*CacheStore(tmp_path).summaries()]
    d.choose(fakes.problem(epilogue=Epilogue("f", neither)), fakes.settings())
    assert len([*CacheStore(tmp_path).summaries()]) == 1
