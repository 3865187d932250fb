"""The key of a record. Each field of a problem that affects speed alters it, and no other field
does. A problem that is written is read back unchanged."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, settings
from tmm_cache import digest

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.spec.epilogue import Epilogue

SILU, SWIGLU = parse("silu"), parse("swiglu+softcap(5)")

#: A problem in which no field has its default, and another value of each field.
ODD = Operand(torch.int8, "col", aligned=False, wide=True, format="int8", scale=Scale.parse("row"),
              zero=True)  # fmt: skip
FULL = Problem(
    m=3, n=5, k=7, a=ODD, b=ODD, out=ODD, device=DEVICE, batch=2, epilogue=SWIGLU,
    bias=torch.float32, residual=ODD, scaled=True, tf32=True,
    groups=Groups(4, "m"), batch_invariant=True,
)  # fmt: skip
OTHER: dict[str, list[Any]] = {
    "m": [4],
    "n": [4],
    "k": [4],
    "batch": [1],
    "epilogue": [SILU, parse("swiglu+softcap(6)"), parse("swiglu")],
    "bias": [None, torch.float16],
    "residual": [None],
    "scaled": [False],
    "tf32": [False],
    "groups": [None, Groups(5, "m"), Groups(4, "n")],
    "batch_invariant": [False],
}
OTHER_OPERAND: dict[str, list[Any]] = {
    "dtype": [torch.uint8],
    "layout": ["row", "strided"],
    "aligned": [True],
    "wide": [False],
    "format": [""],
    "scale": [None, Scale.parse("tensor"), Scale.parse("row bfloat16")],
    "zero": [False],
}
OPERANDS = ("a", "b", "out", "residual")
#: Fields by which records are filtered or looked up, and which are not part of a record's key.
APART = {"device": dataclasses.replace(DEVICE, torch="3"), "deterministic": True,
         "static_weights": True, "capturing": True}  # fmt: skip


def others() -> list[tuple[str, Problem]]:
    """Problems that differ from FULL in one field each."""
    found = []
    for name, values in OTHER.items():
        for value in values:
            found.append((name, dataclasses.replace(FULL, **{name: value})))
    for name in OPERANDS:
        for field, values in OTHER_OPERAND.items():
            for value in values:
                operand = dataclasses.replace(ODD, **{field: value})
                found.append((f"{name}.{field}", dataclasses.replace(FULL, **{name: operand})))
    return found


def test_every_field_is_in_these_tables() -> None:
    fields = {f.name for f in dataclasses.fields(Problem)}
    assert fields == OTHER.keys() | APART.keys() | set(OPERANDS)
    assert {f.name for f in dataclasses.fields(Operand)} == OTHER_OPERAND.keys()


def test_each_field_alters_the_key() -> None:
    problems = [("", FULL), *others()]
    keys: dict[str, str] = {}
    for name, problem in problems:
        key = digest(problem.to_json())
        assert key not in keys, f"one key for {name} and {keys[key]}"
        keys[key] = name


@pytest.mark.parametrize("name", APART)
def test_requirements_and_device_do_not(name: str) -> None:
    other = dataclasses.replace(FULL, **{name: APART[name]})
    assert other != FULL
    assert other.to_json() == FULL.to_json()


@pytest.mark.parametrize(("name", "problem"), [("all", FULL), *others()])
def test_a_problem_is_read_back_unchanged(name: str, problem: Problem) -> None:
    document = json.loads(json.dumps(problem.to_json()))
    assert Problem.from_json(document, DEVICE, problem.epilogue) == problem


@pytest.mark.parametrize("name", ["a", "bias", "scale_a", "residual"])
def test_an_invalid_problem_is_refused(name: str) -> None:
    document = FULL.to_json() | {name: "something"}
    with pytest.raises((ValueError, TypeError)):
        Problem.from_json(document, DEVICE, SWIGLU)


@pytest.mark.parametrize("name", ["dtype", "format", "scale"])
def test_an_invalid_operand_is_refused(name: str) -> None:
    document = FULL.to_json()
    document["b"] |= {name: "something"}
    with pytest.raises(ValueError, match="something"):
        Problem.from_json(document, DEVICE, SWIGLU)


def test_each_problem_has_a_record_of_its_own() -> None:
    """Records are separate files. Otherwise the winner of one problem would answer another."""
    kernels = FakeBlas(), FakeKernel("fast")
    d, timer = dispatcher(*kernels, times={"fast": 10.0, "blas": 20.0})
    instance = dataclasses.replace(FULL, a=Operand(torch.float16), b=Operand(torch.float16))
    instance = dataclasses.replace(instance, out=Operand(torch.float16), tf32=False, residual=None)
    instance = dataclasses.replace(instance, groups=None, batch_invariant=False)
    residual = Operand(torch.float16)
    layouts = [dataclasses.replace(residual, layout=layout) for layout in ("row", "col")]
    problems = [instance, *(dataclasses.replace(instance, residual=r) for r in layouts)]
    for problem in problems:
        timer.measured.clear()
        d.tune(problem, settings())
        assert timer.measured


# -- what a tensor is taken for ----------------------------------------------------------


def flat(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("t", "layout", "aligned"),
    [
        (flat(8 * 16).view(8, 16), "row", True),
        (flat(8 * 16).view(8, 16).t(), "col", True),
        (flat(8 * 16 + 1)[1:].view(8, 16), "row", False),  # its base
        (flat(8 * 17).view(8, 17)[:, :16], "row", False),  # its rows
        (flat(8 * 17).view(8, 17)[:, :16].t(), "col", False),
        (flat(8 * 32).view(8, 32)[:, ::2], "strided", False),
        (flat(3 * 8 * 16).view(3, 8, 16), "row", True),
        (flat(3 * 130).as_strided((3, 8, 16), (130, 16, 1)), "row", False),  # its matrices
        (flat(3 * 130).as_strided((3, 16, 8), (130, 1, 16)), "col", False),
        (flat(3 * 136).as_strided((3, 8, 16), (136, 16, 1)), "row", True),
        (flat(130).as_strided((1, 8, 16), (130, 16, 1)), "row", True),  # one has no stride
        (flat(8 * 16).view(8, 16).expand(3, 8, 16), "row", True),
        (flat(16).expand(8, 16), "row", False),  # rows that overlap
        (flat(64).as_strided((4, 16), (8, 1)), "row", False),
        (flat(16).as_strided((1, 16), (3, 1)), "row", True),
    ],
)
def test_a_claim_to_be_aligned_holds_for_all_strides(
    t: torch.Tensor, layout: str, aligned: bool
) -> None:
    found = Operand.of(t)
    assert (found.layout, found.aligned, found.wide) == (layout, aligned, False)


def test_an_offset_past_32_bits_is_wide() -> None:
    def at(stride: int) -> Operand:
        return Operand.of(torch.empty_strided((2, 2), (stride, 1), device="meta"))

    assert not at(2**31 - 2).wide
    assert at(2**31 - 1).wide


# -- an epilogue's part of both keys -----------------------------------------------------


def slope(z: torch.Tensor) -> torch.Tensor:
    return z


def another_slope(z: torch.Tensor) -> torch.Tensor:
    return z + 0


#: Each function that an epilogue carries, and another.
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "reference": (torch.sin, another_slope),
    "device": (slope, another_slope),
    "derivative": (slope, another_slope),
    "device_derivative": (slope, another_slope),
    "output_vjp": (slope, another_slope),
    "outputs_of": (slope, another_slope),
}


def test_every_function_of_an_epilogue_alters_its_key() -> None:
    values = dict.fromkeys(f.name for f in dataclasses.fields(Epilogue))
    rest = {"name", "parameters", "gated", "linear", "positive", "stages", "builtin", "outputs"}
    rest.add("interleaved")  # for gated ones: tests/core/test_clamped.py
    functions = values.keys() - rest
    assert functions == FUNCTIONS.keys()
    first = {name: pair[0] for name, pair in FUNCTIONS.items()}
    keys = {Epilogue("mine", **first).key}
    for name, (_, second) in FUNCTIONS.items():
        keys.add(Epilogue("mine", **{**first, name: second}).key)
        if name != "reference":
            keys.add(Epilogue("mine", **{**first, name: None}).key)
    keys.add(Epilogue("mine", **first, parameters=(1.0,)).key)
    keys.add(Epilogue("mine", **first, parameters=(2.0,)).key)
    assert len(keys) == 1 + 6 + 5 + 2


def test_an_edited_function_alters_it_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    monkeypatch.syspath_prepend(tmp_path)
    for turn, body in enumerate(("z", "z * 1")):
        (tmp_path / f"edited{turn}.py").write_text(f"def slope(z):\n    return {body}\n")
        module = __import__(f"edited{turn}")
        keys.add(Epilogue("mine", reference=torch.sin, derivative=module.slope).key)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("text", "linear"),
    [
        ("identity", True),
        ("scale(2)", True),
        ("scale(2)+scale(3)", True),
        ("relu", False),
        ("scale(2)+relu", False),
        ("relu+scale(2)", False),
        ("scale(2)+relu+scale(2)", False),
        ("swiglu+scale(2)", False),
    ],
)
def test_a_chain_is_linear_where_all_of_it_is(text: str, linear: bool) -> None:
    epilogue = parse(text)
    assert epilogue.linear is linear
    if not epilogue.gated:
        x, y = torch.tensor([-2.0, 1.0, 3.0]), torch.tensor([1.0, -2.0, 0.5])
        adds = torch.allclose(epilogue.apply(x + y), epilogue.apply(x) + epilogue.apply(y))
        assert adds is linear
