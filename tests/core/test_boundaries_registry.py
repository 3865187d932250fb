"""Tests what plugins register and what callers name: each refusal with its message, and its
limits."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import math
import pickle
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import FakeBlas, FakeConfig, FakeKernel, dispatcher, plugin, problem, settings
from test_registry import EntryPoint, names, registry
from tmm_cache.fields import TEXT_MAX
from torch import nn
from torch._subclasses import FakeTensorMode

from tmm_core import (
    ConfigError,
    Epilogue,
    PluginError,
    Port,
    Problem,
    Supports,
    TmmWarning,
    UnknownNameError,
    compat,
    dispatch,
    formats,
    hookimpl,
    override,
)
from tmm_core.epilogues import EPILOGUES, parse, text_of
from tmm_core.interop import flops
from tmm_core.registry import hooks, places, query, watched_call
from tmm_core.registry.registry import Fault, Registry, Source
from tmm_core.settings import current
from tmm_core.spec import epilogue as epilogues
from tmm_core.spec.anatomy import Resources
from tmm_core.spec.epilogue import IDENTITY
from tmm_core.spec.kernel import Candidate

BF16, F32 = torch.bfloat16, torch.float32
INT8 = formats.named("int8")
RESOURCES = Resources("k", 1, 1, 1, 1)


class Brings:
    """A plugin whose hooks return these."""

    def __init__(self, **brought: Any) -> None:
        self.brought = brought

    @hookimpl
    def tmm_kernels(self) -> Any:
        return self.brought.get("kernels", [])

    @hookimpl
    def tmm_epilogues(self) -> Any:
        return self.brought.get("epilogues", [])

    @hookimpl
    def tmm_formats(self) -> Any:
        return self.brought.get("formats", [])


def with_field(thing: Any, field: str, value: Any) -> Any:
    object.__setattr__(thing, field, value)
    return thing


def named(thing: Any, name: Any) -> Any:
    return with_field(thing, "name", name)


class ReturnedError(ValueError):
    """An exception that a kernel returned instead of a launcher."""

    def __call__(self, *arguments: Any) -> Any:
        return arguments[0]


# -- what a plugin brings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        ({"epilogues": [3]}, "tmm_epilogues must return Epilogue objects, got 3"),
        ({"epilogues": [Epilogue]}, "tmm_epilogues must return Epilogue objects"),
        (
            {"epilogues": [named(Epilogue("x", F.relu), "x" * 257)]},
            "an epilogue's name is .*, not a printable text of 1 to 256 letters",
        ),
        ({"epilogues": [named(Epilogue("x", F.relu), "")]}, "an epilogue's name is ''"),
        ({"epilogues": [named(Epilogue("x", F.relu), "a\nb")]}, "an epilogue's name is 'a"),
        ({"epilogues": [named(Epilogue("x", F.relu), 3)]}, "an epilogue's name is 3"),
        (
            {"epilogues": [Epilogue("silu", F.silu)]},
            r"epilogue 'silu' is already registered by plugin 'tmm_core'$",
        ),
        ({"formats": [3]}, "tmm_formats must return Format objects, got 3"),
        (
            {"formats": [named(replace(INT8), "a\nb")]},
            r"a format's name is 'a\\nb', not a printable text",
        ),
        ({"formats": [replace(INT8)]}, "two formats are named .int8.$"),
        ({"formats": [with_field(replace(INT8), "grids", 3)]}, "a format's grids is a tuple of"),
        ({"formats": [with_field(replace(INT8), "pack", 0)]}, "format 'int8' stores no codes"),
        (
            {"epilogues": [with_field(Epilogue("x", F.relu), "gated", torch.ones(2))]},
            "epilogue 'x': gated is True or False, got tensor",
        ),
        (
            {"epilogues": [with_field(Epilogue("x", F.relu), "parameters", [1.0])]},
            "epilogue 'x': parameters is a tuple of numbers",
        ),
        (
            {"epilogues": [with_field(Epilogue("x", F.relu), "parameters", (1,))]},
            "epilogue 'x': parameters is a tuple of numbers",
        ),
        ({"kernels": [3]}, "tmm_kernels must return Kernel objects, got 3"),
        ({"kernels": [FakeKernel]}, r"\(the class; return an instance\)"),
        ({"kernels": None}, "tmm_kernels must return a list, got None"),
        ({"kernels": "text"}, "tmm_kernels must return a list, got 'text'"),
        ({"kernels": {1: 2}}, "tmm_kernels must return a list"),
        ({"kernels": [FakeKernel("k")] * 10_001}, "returned more than 10000 objects"),
    ],
)
def test_objects_of_other_types_are_refused_by_the_registry(
    brought: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=f"^plugin 'p': .*{message}"):
        Registry().register(Brings(**brought), "p")


def test_ten_thousand_objects_are_accepted_from_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "MOST_BROUGHT", 3)
    r = Registry()
    r.register(Brings(kernels=[FakeKernel(f"k{i}") for i in range(3)]), "p")
    assert names(r) == ["k0", "k1", "k2"]


def test_a_refused_plugin_keeps_earlier_registrations() -> None:
    r = Registry()
    r.register(plugin(FakeKernel("one")), "one")
    with pytest.raises(PluginError, match="kernel 'one' is already registered by plugin 'one'"):
        r.register(plugin(FakeKernel("one")), "two")
    assert names(r) == ["one"]


def test_an_interrupted_load_keeps_earlier_registrations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r = registry(EntryPoint("mine", plugin(FakeKernel("mine"))))
    one = plugin(FakeKernel("one"))
    r.register(one, "one")
    faults = r.faults()

    def interrupted(plugins: Any) -> None:
        r._kernels.clear()
        r._epilogues["x"] = r._epilogues["silu"]
        r._faults.append(Fault(Source("p"), "x"))
        r.load()  # like a plugin whose import computes a product
        raise KeyboardInterrupt

    two = plugin(FakeKernel("two"))
    with monkeypatch.context() as patch:
        patch.setattr(r, "_call_hooks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.register(two, "two")
    assert (names(r), r.faults()) == (["mine", "one"], faults)
    assert "x" not in r.epilogues()
    assert not r.hooks.manager.is_registered(two)
    assert r.hooks.manager.is_registered(one)
    r.register(two, "two")
    assert names(r) == ["mine", "one", "two"]


def test_a_product_computed_by_an_import_is_answered_by_the_loaded_kernels() -> None:
    seen: list[list[str]] = []

    class Computing(EntryPoint):
        def load(self) -> Any:
            seen.append(names(r))
            return super().load()

    points = [Computing(name, plugin(FakeKernel(name))) for name in ("a", "b")]
    r = registry(*points, baseline=FakeBlas)
    assert names(r) == ["a", "b", "blas"]
    assert seen == [["blas"], ["blas"]]


def change_how_torch_computes() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    random.random()


@pytest.mark.parametrize("place", ["import", "tmm_kernels"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_import_or_a_hook_leaves_how_torch_computes(place: str, fails: bool) -> None:
    """The first product imports plugins. The program did not ask for it."""

    class Inferring(EntryPoint):
        def load(self) -> Any:
            if place == "import":
                change_how_torch_computes()
                if fails:
                    raise ImportError("not here")
            return super().load()

    brought = plugin(FakeKernel("a"))
    if place == "tmm_kernels":  # which may import the rest of the plugin

        @hookimpl
        def tmm_kernels() -> Any:
            change_how_torch_computes()
            return 1 / 0 if fails else [FakeKernel("a")]

        brought.tmm_kernels = tmm_kernels  # type: ignore[attr-defined]
    r = registry(Inferring("a", brought), baseline=FakeBlas)
    drawn = random.getstate(), torch.get_rng_state().tolist()
    with pytest.warns(TmmWarning) as caught:
        assert names(r) == (["blas"] if fails else ["a", "blas"])
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is F32
    assert torch.get_float32_matmul_precision() == "highest"
    assert drawn == (random.getstate(), torch.get_rng_state().tolist())
    (warning,) = caught
    changed = f"{place} changed the grad mode and torch's default dtype and the fp32 precision"
    assert (f"{place} failed" if fails else changed) in str(warning.message)


class LeavesGradMode(FakeKernel):
    def declines(self, problem: Problem) -> list[str]:
        torch.set_grad_enabled(False)
        return []


class OfGradMode(Supports):
    def reasons_against(self, problem: Problem) -> list[str]:
        torch.set_grad_enabled(False)
        return []


@pytest.mark.parametrize("method", ["declines", "supports"])
@pytest.mark.usefixtures("blas_alone")
def test_a_query_leaves_how_the_callers_thread_computes(method: str) -> None:
    """Otherwise the program would train nothing after a call."""
    kernel = (LeavesGradMode if method == "declines" else FakeKernel)("test.changing")
    if method == "supports":
        kernel.supports = OfGradMode()  # type: ignore[misc]
    own = dispatch._Own()().registry
    own.register(plugin(kernel), "changing")
    with pytest.warns(TmmWarning, match=f"{method} changed the grad mode, which was put back"):
        own.candidates(problem(), settings())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("place", ["import", "tmm_kernels", "declines"])
@pytest.mark.usefixtures("blas_alone")
def test_a_block_that_a_plugin_leaves_open_changes_no_settings(place: str) -> None:
    """Otherwise each later call of the program would force this kernel."""
    begun = []

    def begin() -> None:
        begun.append(override(kernel="test.open"))  # without the end of a `with` block
        begun[-1].__enter__()

    class Opening(EntryPoint):
        def load(self) -> Any:
            if place == "import":
                begin()
            return super().load()

    class Kernels(FakeKernel):
        def declines(self, problem: Problem) -> list[str]:
            if place == "declines":
                begin()
            return []

    brought = plugin(Kernels("test.open"))
    if place == "tmm_kernels":

        @hookimpl
        def tmm_kernels() -> Any:
            begin()
            return [Kernels("test.open")]

        brought.tmm_kernels = tmm_kernels  # type: ignore[attr-defined]
    r = registry(Opening("a", brought), baseline=FakeBlas)
    with override(tune_budget=3.0) as own:
        with pytest.warns(TmmWarning, match="changed tmm's settings, which was put back"):
            r.candidates(problem(), settings())
        assert current() is own
    assert begun
    assert current().kernel is None
    begun.pop().__exit__(None, None, None)  # too late to restore anything
    assert current().kernel is None
    assert current().tune_budget != 3.0


def test_an_import_is_not_part_of_the_first_call() -> None:
    """A tensor of a module that the first call imports is one for all calls."""
    made: list[torch.Tensor] = []

    class Table(EntryPoint):
        def load(self) -> Any:
            made.append(torch.ones(2, requires_grad=True) * 2)
            return super().load()

    with torch.inference_mode(), FakeTensorMode():
        assert names(registry(Table("a", plugin(FakeKernel("a"))), baseline=FakeBlas))
        assert torch.is_inference_mode_enabled()
    (made[0] * made[0]).sum().backward()  # saves it, which a tensor of inference mode refuses
    assert type(made[0]) is torch.Tensor


@pytest.mark.usefixtures("blas_alone")
def test_a_query_leaves_what_another_thread_sets_meanwhile() -> None:
    class Slow(FakeKernel):
        def declines(self, problem: Problem) -> list[str]:
            other = threading.Thread(target=torch.set_float32_matmul_precision, args=("high",))
            other.start()
            other.join()
            return []

    own = dispatch._Own()().registry
    own.register(plugin(Slow("test.slow")), "slow")
    with watched_call.putting_back(["the fp32 precision"]):
        own.candidates(problem(), settings())
        assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.parametrize("refused", [True, False])
def test_a_kernel_is_asked_about_the_problems_that_it_supports(refused: bool) -> None:
    """Its own code may expect no others."""
    asked: list[Problem] = []

    class Asked(FakeKernel):
        def declines(self, problem: Problem) -> list[str]:
            asked.append(problem)
            return []

    class Refusing(Supports):
        def reasons_against(self, problem: Problem) -> list[str]:
            return ["too small"] if refused else []

    kernel = Asked("test.asked")
    kernel.supports = Refusing()  # type: ignore[misc]
    own = dispatch._Own()().registry
    own.register(plugin(kernel), "asked")
    own.candidates(problem(), settings())
    assert bool(asked) is not refused


def test_an_import_may_register_another_plugin() -> None:
    """The rest of the load goes on as before, and calls meanwhile are answered as before."""
    seen: list[list[str]] = []

    class Registering(EntryPoint):
        def load(self) -> Any:
            r.register(plugin(FakeKernel("other")), "other")
            seen.append(names(r))
            return super().load()

    r = registry(Registering("a", plugin(FakeKernel("a"))), baseline=FakeBlas)
    assert names(r) == ["a", "blas", "other"]
    assert seen == [["blas", "other"]]
    assert r.faults() == []


@pytest.mark.parametrize("works", [False, True])
def test_a_plugin_of_which_a_part_works_is_partly_used(works: bool) -> None:
    kernels = [*([FakeKernel("fine")] if works else []), FakeKernel("")]
    r = registry(EntryPoint("mine", plugin(*kernels)), EntryPoint("other", plugin(FakeKernel("o"))))
    used = "partly" if works else "not"
    with pytest.warns(TmmWarning, match=rf"plugin 'mine' \(stranger 1.2\) is {used} used: kernel"):
        r.load()
    assert names(r) == ["fine"] * works + ["o"]


@pytest.mark.parametrize(
    ("points", "first"),
    [
        ([("a", "two"), ("z", "one")], "one z"), ([("b", "one"), ("a", "one")], "one a"),
        ([("a", "one"), ("z", "tmm_core")], "tmm_core z"),
    ],
)  # fmt: skip
def test_a_name_belongs_to_tmm_then_to_the_first_distribution_and_plugin(
    points: list[tuple[str, str]], first: str
) -> None:
    """The order of the metadata does not matter."""
    r = registry(
        *(
            EntryPoint(name, plugin(FakeKernel("k", version=f"{by} {name}")), by)
            for name, by in points
        )
    )
    with pytest.warns(TmmWarning, match="kernel 'k' is already registered by"):
        assert r.kernel("k").version == first


def test_a_fault_shows_its_place_once() -> None:
    source = Source("p")
    assert str(Fault(source, "odd")) == "plugin 'p': odd"
    assert str(Fault(source, "odd", place="a.py:3")) == "plugin 'p': odd (a.py:3)"
    assert str(Fault(source, "odd (a.py:3)", place="a.py:3")) == "plugin 'p': odd (a.py:3)"


def test_one_warning_counts_the_faults_of_a_distribution() -> None:
    points = [
        EntryPoint("a", plugin(FakeKernel(""), FakeKernel(""), FakeKernel("fine")), "one"),
        EntryPoint("b", ImportError("gone"), "two"),
        EntryPoint("c", ImportError("gone"), "one"),
    ]
    with pytest.warns(TmmWarning) as warned:
        registry(*points).load()
    first, second = (str(each.message) for each in warned)  # imports come before kernels
    assert first.startswith("plugin 'c' (one 1.2) is not used: import failed")
    assert "; 2 more faults of it: see" in first
    assert second.startswith("plugin 'b' (two 1.2) is not used: import failed")
    assert "; later faults of it are not reported: see" in second


# -- what a kernel returns -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (
            query._bytes, (0, 1, 2**40 - 1, np.int64(8)),
            (-1, 2**40, True, 1.0, "1", None, np.float64(1.0)),
        ),
        (
            query._microseconds, (None, 0, 0.0, 1.5, 10**6, np.float32(2.0)),
            (-0.5, math.inf, math.nan, True, "1", 1j),
        ),
        (
            query._arithmetic, (None, "a", "a b", "x" * TEXT_MAX),
            ("", "a\nb", "x" * (TEXT_MAX + 1), 3),
        ),
        (query._anatomy, (None,), (3, object)),
        (query._resources, ([], (), [RESOURCES]), (None, [3], [RESOURCES, None], "x", 3)),
        (query._reasons, ([], (), ["a"], ["a"] * 100), (None, "a", [3], ["a", None], ["a"] * 101)),
        (query._launcher, (len, print), (3, None, ValueError("x"), ReturnedError("x"))),
    ],
)  # fmt: skip
def test_results_at_their_limits(check: Any, good: Any, bad: Any) -> None:
    for result in good:
        found = check(result)
        assert found == (list(result) if isinstance(result, list | tuple) else result)
    for result in bad:
        with pytest.raises(query.InvalidResultError):
            check(result)


def test_reasons_are_plain_text() -> None:
    """They are shown by commands and compared later; a terminal obeys control characters."""

    class Own(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "another"

    found = query._reasons([Own("a"), "b\x1b[2J", "x" * 20000])
    assert [type(reason) for reason in found] == [str] * 3
    assert found[:2] == ["a", "b\\x1b[2J"]
    assert 100 < len(found[2]) < 20000


def test_an_endless_sequence_is_read_to_its_limit() -> None:
    given = itertools.count()
    with pytest.raises(query.InvalidResultError, match="yielded more than 3 items, not reasons"):
        query._items(given, 3, "reasons")
    assert next(given) == 4
    assert query._items(iter(range(3)), 3, "reasons") == [0, 1, 2]


class Misbehaving(FakeKernel):
    """A kernel each of whose methods does what ``does`` says."""

    does: Any = None

    def bind(self, problem: Any, config: Any) -> Any:
        return self.does()

    compile = arithmetic = estimate_us = workspace_bytes = anatomy = resources = bind


#: Methods, their result after a failure (None: it raises), and the seconds before a warning.
METHODS = {
    "bind": (None, query.COMPILE_PATIENCE), "resources": (None, query.COMPILE_PATIENCE),
    "compile": (None, query.COMPILE_PATIENCE), "arithmetic": ([None], None),
    "estimate_us": ([None], None), "workspace_bytes": ([0], None), "anatomy": ([None], None),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("raises", [False, True])
def test_the_cost_of_a_misbehaving_method(
    method: str, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of a method that compiles costs the candidate; any other costs the kernel."""
    default, patience = METHODS[method]
    waited: list[float | None] = []

    def watched(what: Any, seconds: Any = None) -> Any:
        waited.append(seconds)
        assert f"{method} of kernel 'k' of plugin 'fakes' does not return" in what()
        assert "TMM_DISABLE_PLUGINS=fakes" in what()
        return contextlib.nullcontext()

    monkeypatch.setattr(query, "watched", watched)
    kernel = Misbehaving("k")
    kernel.does = (lambda: 1 / 0) if raises else (lambda: "nonsense\n")
    d, _ = dispatcher(FakeBlas(), kernel)
    checked: Any = d.registry.kernel("k")
    call = getattr(checked, method)
    if method == "compile":
        with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
            call(problem(), FakeConfig())
    elif default is None:
        own = ZeroDivisionError if raises else query.InvalidResultError
        with pytest.raises(own if method == "resources" else PluginError):
            call(problem(), FakeConfig())
    else:
        did = "raised ZeroDivisionError: division by zero" if raises else "returned 'nonsense"
        why = f"kernel 'k' of plugin 'fakes' is set aside: {method} {did}"
        with pytest.warns(TmmWarning, match=f"{why}.* \\({re.escape(__file__)}:"):
            assert [call(problem(), FakeConfig())] == default
        assert checked.reasons_against(problem())[0].startswith(why)
        assert [call(problem(), FakeConfig())] == default  # the kernel is not called any more
    assert (checked.fault is not None) is (default is not None)
    assert waited == [patience]


def test_sources_are_named_by_plugin_and_distribution() -> None:
    assert str(Source("p")) == "plugin 'p'"
    assert str(Source("p", "dist", "1.2")) == "plugin 'p' (dist 1.2)"
    for name, ours in (
        ("tmm-core", True), ("tmm_core", True), ("TMM.Core", True), ("tmm--core", True),
        ("tmm-core-extra", False), ("", False),
    ):  # fmt: skip
        entry_point: Any = EntryPoint("p", None, name)
        assert Source.of(entry_point).is_ours is ours


def test_a_distribution_that_is_spelt_in_two_ways_is_reported_once() -> None:
    r = registry(EntryPoint("a", None, "Some_Kernels"), EntryPoint("b", None, "some-kernels"))
    with pytest.warns(TmmWarning, match=r"\(some-kernels 1.2\).*; 1 more faults") as caught:
        assert names(r) == []
    assert len(caught) == 1


def test_the_line_of_a_class_is_found_without_parsing_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plugin may have thousands of faulty kernels."""
    (tmp_path / "of_classes.py").write_text("class A: ...\n\n\nclass  B(A):\n    class C: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("of_classes")
    kinds = module.A, module.B, module.B.C, type("D", (), {"__module__": "of_classes"})
    with monkeypatch.context() as context:
        context.setattr("ast.parse", None)
        found = [places._class_place(kind) for kind in kinds]
    assert found == [*(f"{tmp_path / 'of_classes.py'}:{line}" for line in (1, 4, 5)), ""]


def test_a_plugin_without_a_given_name_has_its_modules_or_its_classs() -> None:
    r = Registry()
    module = ModuleType("hooks_of_mine")
    module.tmm_kernels = hookimpl(lambda: [FakeKernel("m")])  # type: ignore[attr-defined]
    module.tmm_kernels.__name__ = "tmm_kernels"
    r.register(module)
    r.register(Brings(kernels=[FakeKernel("o")]))
    r.register(plugin(FakeKernel("n")), "named")
    found = {kernel.name: kernel.source for kernel in r.kernels()}
    assert found == {"m": Source("hooks_of_mine"), "n": Source("named"), "o": Source("Brings")}


def test_metadata_that_cannot_be_read_costs_its_names() -> None:
    class Broken:
        name = "p"

        @property
        def dist(self) -> Any:
            raise OSError("gone")

    found: Any = Source.of(Broken())  # type: ignore[arg-type]
    assert found == Source("p", "", "")
    bare: Any = SimpleNamespace(name=3, dist=None)
    assert Source.of(bare) == Source("3", "", "")


@pytest.mark.parametrize(
    ("allow", "deny", "used", "faults"),
    [
        (None, (), ["a.k", "b.k"], {}),
        (("a",), (), ["a.k"], {"b": "not in TMM_PLUGINS"}),
        ((), (), [], {"a": "not in TMM_PLUGINS", "b": "not in TMM_PLUGINS"}),
        (None, ("a",), ["b.k"], {"a": "disabled by TMM_DISABLE_PLUGINS"}),
        (
            ("a",), ("a",), [],
            {"a": "disabled by TMM_DISABLE_PLUGINS", "b": "not in TMM_PLUGINS"},
        ),
    ],
)  # fmt: skip
def test_which_plugins_are_used(
    allow: Any, deny: Any, used: list[str], faults: dict[str, str]
) -> None:
    points = [EntryPoint(name, plugin(FakeKernel(f"{name}.k"))) for name in ("b", "a")]
    fields = {"allow": None if allow is None else frozenset(allow), "deny": frozenset(deny)}
    r = registry(*points, **fields)
    assert names(r) == used
    assert {f.source.plugin: f.reason for f in r.faults()} == faults
    assert all(fault.intended for fault in r.faults())
    assert r.unknown("plugin", frozenset({"a", "b", "blas"})) == []
    for name in faults:
        with pytest.raises(PluginError, match=f"kernel '{name}.x': plugin '{name}'"):
            r.kernel(f"{name}.x")
    with pytest.raises(UnknownNameError, match=r"unknown kernel 'c\.x'"):
        r.kernel("c.x")


def test_unknown_names_are_reported_with_the_variable() -> None:
    points = [EntryPoint("a", plugin(FakeKernel("a.k"))), EntryPoint("off", plugin())]
    fields = {"allow": frozenset({"a", "x"}), "deny": frozenset({"y"})}
    r = registry(*points, **fields, baseline=FakeBlas)
    disabled = frozenset({"a.k", "z", "off.k", "triton.pointwise", "blas"})
    messages = r.unknown_names(settings(disable=disabled))
    assert [text.partition(":")[0] for text in messages] == [
        "TMM_PLUGINS", "TMM_DISABLE_PLUGINS", "TMM_DISABLE or override(disable=…)",
    ]  # fmt: skip
    assert ["'x'" in messages[0], "'y'" in messages[1], "kernel 'z'" in messages[2]] == [True] * 3
    assert registry(*points).unknown_names(settings()) == []


def test_an_entry_point_of_blas_is_not_registered_twice() -> None:
    point = EntryPoint("blas", plugin(FakeKernel("blas")))
    point.value = "tmm_blas.plugin"
    assert names(registry(point, baseline=FakeBlas)) == ["blas"]
    assert names(registry(point)) == ["blas"]


@pytest.mark.parametrize(
    ("fields", "traits", "disabled", "reasons"),
    [
        ({}, {}, False, []),
        ({"deterministic": True}, {"deterministic": False}, False, ["not deterministic"]),
        ({"batch_invariant": True}, {"batch_invariant": False}, False, ["not batch-invariant"]),
        (
            {"capturing": True}, {"capture_safe": False}, False,
            ["not safe under graph capture"],
        ),
        (
            {"deterministic": True, "capturing": True},
            {"deterministic": False, "capture_safe": False},
            True,
            [
                "disabled by TMM_DISABLE or override", "not deterministic",
                "not safe under graph capture",
            ],
        ),
        ({}, {"deterministic": False, "capture_safe": False}, False, []),
        (
            dict.fromkeys(("deterministic", "batch_invariant", "capturing"), True),
            {"batch_invariant": True}, False, [],
        ),
    ],
)  # fmt: skip
def test_requirements_that_traits_do_not_meet(
    fields: dict[str, bool], traits: dict[str, bool], disabled: bool, reasons: list[str]
) -> None:
    from tmm_core import Traits

    r = Registry()
    r.register(plugin(FakeKernel("k", traits=Traits(**traits))))
    current = settings(disable=frozenset({"k"} if disabled else ()))
    found = r.reasons_against(r.kernel("k"), problem(**fields), current)
    assert found == reasons
    able, rejected = r.candidates(problem(**fields), current)
    assert [kernel.name for kernel in able] == ([] if reasons else ["k"])
    assert rejected == ({"k": reasons} if reasons else {})


# -- epilogues ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": "a b"}, ValueError, "epilogue name must be an identifier, got 'a b'"),
        ({"name": ""}, ValueError, "must be an identifier"),
        ({"parameters": (math.inf,)}, ValueError, "parameters must be finite numbers"),
        ({"parameters": (0.0,), "positive": True}, ValueError, "must be above 0"),
        ({"parameters": (1e-50,), "positive": True}, ValueError, "must be above 0"),
        ({"reference": None}, TypeError, "reference: None is no function"),
        ({"derivative": 3}, TypeError, "derivative: 3 is no function"),
        ({"output_vjp": "x"}, TypeError, "output_vjp: 'x' is no function"),
        ({"outputs_of": 3}, TypeError, "outputs_of: 3 is no function"),
        ({"name": 3}, TypeError, "an epilogue's name is a text, got 3"),
        ({"gated": 1}, TypeError, "gated is True or False, got 1"),
        ({"interleaved": None}, TypeError, "interleaved is True or False, got None"),
        ({"linear": "yes"}, TypeError, "linear is True or False, got 'yes'"),
        ({"outputs": 3}, TypeError, "outputs is a tuple of Ports"),
        ({"outputs": (3,)}, TypeError, "outputs is a tuple of Ports"),
        ({"outputs": [3]}, TypeError, "outputs is a tuple of Ports"),
        ({"stages": (3,)}, TypeError, "stages is a tuple of Epilogues"),
        ({"device": 3}, TypeError, "3 is no device function"),
        ({"device_derivative": 3}, TypeError, "3 is no device function"),
        ({"interleaved": True}, ValueError, "is interleaved but not gated"),
        (
            {"interleaved": True, "gated": True, "derivative": F.relu}, ValueError,
            "takes no derivative",
        ),
        (
            {"interleaved": True, "gated": True, "device_derivative": F.relu}, ValueError,
            "takes no derivative",
        ),
        (
            {"outputs": (Port("o", "tile"), Port("o", "row", reduce="max"))}, ValueError,
            "two outputs of one name",
        ),
    ],
)  # fmt: skip
def test_an_invalid_epilogue_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"name": "mine", "reference": F.relu} | fields
    with pytest.raises(error, match=message):
        Epilogue(**given)


def test_the_defaults_of_a_reference_are_its_parameters() -> None:
    def plain(z: Any, a: float = 1, b: float = 2.5, *, c: float = 3) -> Any:
        return z

    def gated(gate: Any, up: Any, a: float = 4) -> Any:
        return gate

    def flagged(z: Any, a: float = 1, inplace: bool = False) -> Any:
        return z

    def device(z: Any, a: Any) -> Any:
        return z

    assert Epilogue("x", plain).parameters == (1.0, 2.5)
    assert Epilogue("x", gated, gated=True).parameters == (4.0,)
    assert Epilogue("x", flagged).parameters == (1.0,)
    assert Epilogue("x", plain, device=device).parameters == (1.0,)
    assert Epilogue("x", plain, parameters=()).parameters == ()
    assert Epilogue("x", torch.relu).parameters == ()
    two = Epilogue("x", plain).with_parameters(7)
    assert two.parameters == (7.0, 2.5)
    with pytest.raises(ValueError, match="takes 2 parameters, got 3"):
        two.with_parameters(1, 2, 3)


def test_two_functions_of_one_key_have_texts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two keys are equal, the second text gets a number."""
    monkeypatch.setattr(epilogues, "INTERNED", {})
    monkeypatch.setattr(Epilogue, "key", property(lambda self: "same"))
    one, other = Epilogue("x", torch.relu), Epilogue("x", torch.tanh)
    assert (one.interned(), other.interned(), one.interned()) == ("same", "same#1", "same")
    assert Epilogue("x", torch.relu).interned() == "same"
    assert epilogues.INTERNED["same#1"] is other


def test_a_chain_is_applied_stage_by_stage() -> None:
    z = torch.tensor([-2.0, 0.5, 3.0])
    chain = parse("relu").then(parse("scale(2)"))
    assert torch.equal(chain.apply(z), 2 * z.relu())
    assert (chain.linear, chain.gated, chain.name) == (False, False, "relu+scale")
    assert parse("scale(2)").then(parse("scale(3)")).linear
    assert IDENTITY.then(chain) is chain
    assert chain.then(IDENTITY) is chain
    with pytest.raises(ValueError, match="gated epilogue 'swiglu' can only come first in a chain"):
        chain.then(parse("swiglu"))
    assert parse("swiglu").then(parse("relu")).gated
    assert chain.activation is None
    assert EPILOGUES["quantize"].activation is None  # it has outputs
    assert parse("relu").activation is not None
    assert parse("swiglu").activation is parse("scale(2)").activation is IDENTITY.activation is None


def test_the_part_of_a_chain_that_its_output_differentiates() -> None:
    tanh, gelu = parse("tanh"), parse("gelu")
    assert tanh.parts == (tanh, None)
    assert gelu.parts == (IDENTITY, gelu)
    first, rest = tanh.then(gelu).then(tanh).parts
    assert (first, rest) == (tanh, gelu.then(tanh))
    assert gelu.then(tanh).parts == (IDENTITY, gelu.then(tanh))


def test_a_parameter_that_is_left_out_has_its_default() -> None:
    """Torch's for leaky_relu, gpt-oss's for clamped_swiglu; a scale without its factor is 1."""
    defaults = {each.name: each.parameters for each in EPILOGUES.values() if each.parameters}
    assert defaults.pop("clamped_swiglu") == (1.702, 7.0)
    assert defaults == {"leaky_relu": (0.01,), "scale": (1.0,), "softcap": (30.0,)}
    z = torch.linspace(-40, 40, 24)
    assert torch.equal(parse("scale").apply(z), z)
    assert torch.equal(parse("leaky_relu").apply(z), torch.nn.functional.leaky_relu(z))


@pytest.mark.parametrize(
    "text",
    ["tanh", "relu", "silu", "scale(3)", "swiglu", "tanh+scale(3)", "geglu+tanh", "softcap(2)"],
)
def test_the_gradient_of_an_epilogue_is_torchs(text: str) -> None:
    found = parse(text)
    if not all(s.derivative or s.output_vjp for s in found.stages or (found,)):
        pytest.skip("torch differentiates it")
    z = torch.linspace(-2, 3, 24, dtype=torch.float64).view(3, 8).requires_grad_()
    y = found.apply(z)
    grad = torch.randn_like(y)
    (right,) = torch.autograd.grad(y, z, grad)
    assert torch.allclose(found.vjp(grad, z), right)


def test_which_columns_a_column_is_computed_from() -> None:
    columns = torch.tensor([0, 2])
    assert parse("relu").sources(columns, 4).tolist() == [0, 2]
    assert parse("swiglu").sources(columns, 4).tolist() == [0, 2, 4, 6]
    alternate = Epilogue("alt", lambda g, u: g * u, gated=True, interleaved=True)
    assert alternate.sources(columns, 4).tolist() == [0, 1, 4, 5]
    z = torch.arange(6.0)
    assert [t.tolist() for t in alternate.inputs(z)] == [[0, 2, 4], [1, 3, 5]]
    assert [t.tolist() for t in parse("swiglu").inputs(z)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": "a b"}, ValueError, "output name must be an identifier"),
        ({"kind": "cell"}, ValueError, "kind is one of .*, not 'cell'"),
        ({"dtype": torch.int8}, ValueError, "dtype is one of"),
        ({"kind": "tile", "reduce": "max"}, ValueError, "a tile is not reduced, got reduce='max'"),
        ({"kind": "row"}, ValueError, "a row is reduced by max or sum, got reduce=None"),
        ({"kind": "col", "reduce": "min"}, ValueError, "a col is reduced by max or sum"),
        ({"device": torch.abs}, ValueError, "has a device function and no reference `of`"),
        ({"device": 3, "of": torch.abs}, TypeError, "3 is no device function"),
    ],
)
def test_an_invalid_output_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Port(**{"name": "o", "kind": "tile", **fields})


def test_outputs_reduce_the_result() -> None:
    y = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
    for kind, reduce, right in (
        ("row", "sum", [2.0, 3.0]), ("row", "max", [3.0, 5.0]),
        ("col", "sum", [5.0, 3.0, -3.0]), ("col", "max", [4.0, 5.0, 3.0]),
        ("scalar", "sum", 5.0), ("scalar", "max", 5.0),
    ):  # fmt: skip
        port = Port("o", kind, reduce=reduce)  # type: ignore[arg-type]
        assert port.apply(y).tolist() == right
        assert port.shape((2, 3)) == tuple(torch.tensor(right).shape)
        empty = port.apply(torch.empty(0, 0))
        assert empty.numel() == 0 or empty.item() == (0.0 if reduce == "sum" else -math.inf)
        assert str(port) == f"o ({kind} {reduce})"
    squares = Port("o", "tile", dtype=BF16, of=torch.square)
    assert squares.apply(y).tolist() == y.square().tolist()
    assert (squares.apply(y).dtype, squares.fusable, str(squares)) == (BF16, False, "o (tile)")
    assert Port("o", "tile").fusable
    assert Port("o", "tile").terms(y.double()).dtype is torch.float64
    assert Port("o", "tile").terms(y.half()).dtype is F32


# -- what a caller names -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (F.silu, "silu"), (nn.SiLU(), "silu"), (nn.SiLU(inplace=True), "silu"),
        (partial(F.silu, inplace=True), "silu"), (nn.Identity(), "identity"),
        (partial(F.gelu, approximate="tanh"), "gelu_tanh"), (F.gelu, "gelu"),
        (partial(F.gelu, approximate="none"), "gelu"), (nn.LeakyReLU(0.2), "leaky_relu(0.2)"),
        (partial(F.leaky_relu, negative_slope=0.5), "leaky_relu(0.5)"),
    ],
)  # fmt: skip
def test_torchs_activations_have_texts(given: Any, text: str) -> None:
    assert text_of(given) == text


@pytest.mark.parametrize(
    "given",
    [
        partial(F.leaky_relu, torch.ones(2)), partial(F.silu, torch.ones(2)),
        partial(F.silu, unknown=1), partial(F.leaky_relu, slope=1), nn.SiLU, torch.sort,
        nn.Linear(2, 2), partial(partial(F.softplus, beta=3.0), threshold=1.0),
    ],
)  # fmt: skip
def test_an_unknown_epilogue_is_refused_with_the_accepted_spelling(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^epilogue: "):
        text_of(given)


def test_a_list_is_a_chain_and_a_dict_nothing() -> None:
    r = Registry()
    assert r.epilogue(["relu", "tanh"]) == parse("relu+tanh")
    assert r.epilogue([]) is r.epilogue(None) is IDENTITY
    with pytest.raises(TypeError, match="epilogue must be a str or an Epilogue, got dict"):
        r.epilogue({"relu": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("silu(", "cannot parse epilogue 'silu\\('"), ("", "cannot parse epilogue"),
        ("a+", "unknown epilogue 'a'|cannot parse"), ("softcap(x)", "parameters must be numbers"),
        ("softcap(1,2)", "takes 1 parameters, got 2"), ("softcap(0)", "must be above 0"),
        ("silu@0123456789ab", "has other source than 'silu' here"),
        ("silu()x", "cannot parse"),
    ],
)  # fmt: skip
def test_texts_that_are_no_epilogue_are_refused(text: str, message: str) -> None:
    with pytest.raises((ValueError, UnknownNameError), match=message):
        parse(text)


def test_texts_are_read_as_people_write_them() -> None:
    assert parse(None) is IDENTITY
    assert parse(" silu ( ) ").key == "silu"
    assert parse("softcap(1e+1) + tanh").key == "softcap(10.0)+tanh"
    assert parse(["silu", F.tanh]).key == "silu+tanh"
    assert parse([]) is IDENTITY
    assert parse(parse("silu").key) == parse("silu")
    with pytest.raises(TypeError, match="epilogue must be a str or an Epilogue, got int"):
        parse(3)  # type: ignore[arg-type]


def test_every_built_in_epilogue_is_found_by_its_name() -> None:
    r = Registry()
    assert r.epilogues().keys() == EPILOGUES.keys()
    assert r.epilogue(None) is IDENTITY
    assert r.epilogue("silu") is EPILOGUES["silu"]
    with pytest.raises(UnknownNameError, match="did you mean 'silu'"):
        r.epilogue("silo")


# -- torch's private names -----------------------------------------------------------------------


def test_a_private_name_that_torch_lacks_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "missing", [])
    assert compat.private("torch._C.DispatchKey", None) is torch._C.DispatchKey
    assert compat.private("torch.nn.functional.relu", None) is F.relu
    assert compat.private("torch._C.DispatchKey.CPU", None) == torch._C.DispatchKey.CPU
    assert compat.missing == []
    for path in ("torch.nn.absent", "torch.absent.name", "torch.nn.absent", "torch._C.absent.x.y"):
        assert compat.private(path, 3) == 3
    assert compat.missing == ["torch.nn.absent", "torch.absent.name", "torch._C.absent.x.y"]


def test_a_module_that_lacks_one_of_its_names_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "missing", [])
    assert compat._holding("torch.autograd.forward_ad", _current_level=0).__name__.endswith("_ad")
    stand_in = compat._holding("torch.autograd.forward_ad", _current_level=7, absent=3)
    assert (stand_in._current_level, stand_in.absent) == (7, 3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_left_out_inside(device: str) -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=BF16):
        with compat.without_autocast[device]():
            assert (x @ x).dtype is (F32 if device == "cpu" else BF16)
        assert (x @ x).dtype is BF16
        assert compat.autocasts_on("cpu")
        assert not compat.autocasts_on("meta")
    assert not compat.autocasts_on("cpu")


# -- FLOPs --------------------------------------------------------------------------------


def test_formulas_are_registered_when_the_counter_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pending formula is registered once; imports of other modules are not affected."""
    import torch.utils.flop_counter as counter

    registered: list[Any] = []

    def register(operator: Any) -> Any:
        return lambda formula: registered.append((operator, formula))

    monkeypatch.setattr(counter, "register_flop_formula", register)
    flops.count("now", len)  # type: ignore[arg-type]
    assert registered == [("now", len)]
    monkeypatch.setattr(flops, "_waiting", {})
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    before = list(sys.meta_path)
    flops.count("one", min)
    flops.count("two", max)
    (hook,) = [each for each in sys.meta_path if each not in before]
    assert hook.find_spec("torch.utils.other", None) is None
    assert hook in sys.meta_path
    run: list[Any] = []
    spec: Any = SimpleNamespace(loader=SimpleNamespace(exec_module=run.append))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert hook.find_spec("torch.utils.flop_counter", None) is spec
    assert hook not in sys.meta_path
    registered.clear()
    module = SimpleNamespace(register_flop_formula=register)
    spec.loader.exec_module(module)
    assert run == [module]
    assert registered == [("one", min), ("two", max)]


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ((4,), (4,), 8), ((2, 4), (4,), 16), ((4,), (4, 3), 24), ((2, 4), (4, 3), 48),
        ((5, 2, 4), (4, 3), 240), ((5, 1, 2, 4), (6, 4, 3), 48 * 30), ((2, 4), (2, 3), 48),
    ],
)  # fmt: skip
def test_flops_are_two_for_each_term(a: Any, b: Any, found: int) -> None:
    assert flops.matmul_flops(a, b) == found


def test_a_registered_kernels_config_is_checked_when_it_is_read() -> None:
    """Parsing is plugin code: products inside it are marked as nested."""
    inside: list[bool] = []

    class Parsing(FakeConfig):
        @classmethod
        def from_json(cls, document: Any) -> Any:
            inside.append(current().nested)
            return FakeConfig(tile=document["tile"]) if document["tile"] == 2 else cls(tile=1)

    kernel = FakeKernel("k")
    kernel.config_type = Parsing
    d, _ = dispatcher(FakeBlas(), kernel, FakeKernel("plain"))
    checked: Any = d.registry.kernel("k")
    assert query.read_config(checked, {"tile": 1}) == Parsing(tile=1)
    assert inside == [True]
    with pytest.raises(ConfigError):
        query.read_config(d.registry.kernel("plain"), {"tiles": 3})
    assert d.registry.kernel("plain").fault is None  # type: ignore[attr-defined]
    message = "config_type gave FakeConfig.*, not a Parsing"
    with (
        pytest.warns(TmmWarning, match=message),
        pytest.raises(PluginError, match=f"is set aside: {message}"),
    ):
        query.read_config(checked, {"tile": 2})
    assert checked.fault is not None


class Restless(FakeConfig):
    """A config that never gives the same fields twice."""

    def to_json(self) -> Any:
        return {"tile": next(COUNT)}


COUNT = itertools.count(1)


class Unequal(FakeConfig):
    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = FakeConfig.__hash__


class Rehashed(FakeConfig):
    def __hash__(self) -> int:
        return next(COUNT)


class Lacking(FakeConfig):
    def to_json(self) -> Any:
        return {"tile": None}


class Assuming(FakeConfig):
    assumes = ("static_weights", "a\nb")


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (Restless(), "whose fields change"), (Unequal(), "which is not equal to itself"),
        (Rehashed(), "whose hash changes"), (Lacking(), "a field that is None"),
        (Assuming(), "a config that assumes 'a"), ("text", "'text', not a FakeConfig"),
    ],
)  # fmt: skip
def test_an_object_that_is_not_a_config_is_refused(config: Any, fault: str) -> None:
    kernel = FakeKernel("k")
    kernel.__dict__["configs"] = lambda problem: [FakeConfig(), config]
    d, _ = dispatcher(FakeBlas(), kernel)
    checked = d.registry.kernel("k")
    with (
        pytest.warns(TmmWarning, match=fault),
        pytest.raises(PluginError, match=f"is set aside: configs gave .*{fault}"),
    ):
        checked.configs(problem())


def test_a_config_comes_back_as_its_kernel_made_it() -> None:
    """A kernel's next methods may pass on all attributes that it has."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("k"))
    checked = d.registry.kernel("k")
    (config,) = checked.configs(problem())
    assert vars(config) == {"tile": 1}
    assert type(config)(**vars(config)) == config
    assert Candidate(checked, config).fields == {"tile": 1}
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), replace(config)):
        assert again == config
        assert vars(again) == vars(config)
        assert Candidate(checked, again).fields == {"tile": 1}


def test_no_epilogue_is_none_or_an_empty_chain() -> None:
    r = Registry()
    assert r.epilogue(None) is IDENTITY
    assert r.epilogue([]).is_identity
    with pytest.raises(ValueError, match="cannot parse epilogue ''"):
        r.epilogue("")
    with pytest.raises(TypeError, match="must be a str or an Epilogue, got dict"):
        r.epilogue({})  # type: ignore[arg-type]


@pytest.mark.parametrize(("distribution", "watched"), [("tmm-core", False), ("other", True)])
def test_the_state_around_queries_of_tmms_own_kernels_is_not_compared(
    distribution: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a millisecond, in each first call."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def around(names: Any) -> Iterator[list[str]]:
        entered.append(names)
        yield []

    monkeypatch.setattr(query, "putting_back", around)
    source = Source("p", distribution)
    checked: Any = query.CheckedKernel(FakeKernel("k", tiles=(3,)), source)
    assert [config.tile for config in checked.configs(problem())] == [3]
    assert bool(entered) is watched
