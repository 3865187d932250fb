"""Plugins: how they are loaded, what they register, and the effect of a broken one."""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, plugin, problem, settings

from tmm_core import Epilogue, PluginError, TmmWarning, Traits, UnknownNameError, hookimpl
from tmm_core.dispatch.explanation import kernel_infos
from tmm_core.registry.registry import Registry


class EntryPoint:
    """An installed plugin, as importlib.metadata describes it."""

    def __init__(
        self, name: str, thing: Any, distribution: str = "stranger", group: str = "tmm_core"
    ) -> None:
        self.name, self._thing, self.group, self.value = name, thing, group, f"{name}.plugin"
        self.dist = types.SimpleNamespace(name=distribution, version="1.2")

    def load(self) -> Any:
        if isinstance(self._thing, Exception):
            raise self._thing
        return self._thing


def by_group(*points: EntryPoint) -> Callable[..., list[EntryPoint]]:
    """A replacement for ``importlib.metadata.entry_points``."""
    return lambda group: [point for point in points if point.group == group]


def registry(*entry_points: EntryPoint, **fields: Any) -> Registry:
    def found() -> Iterable[Any]:
        return entry_points

    return Registry(found, **fields)


def names(r: Registry) -> list[str]:
    return [kernel.name for kernel in r.kernels()]


@pytest.mark.parametrize("forked", [False, True])
def test_nothing_is_loaded_before_it_is_needed(forked: bool) -> None:
    loads = []

    def found() -> Iterable[Any]:
        loads.append(1)
        return [EntryPoint("p", plugin(FakeKernel("k")))]

    r = Registry(found)
    if forked:
        r.after_fork()
    assert loads == []
    thread = threading.Thread(target=r.kernels, daemon=True)  # the test fails rather than hangs
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    assert names(r) == names(r) == ["k"]
    assert loads == [1]


class Raises:
    @hookimpl
    def tmm_kernels(self) -> list[Any]:
        raise ZeroDivisionError("in the hook")


class WrongSignature:
    @hookimpl
    def tmm_kernels(self, device: str) -> list[Any]:
        return []


class UnknownHook:
    @hookimpl
    def tmm_kernel(self) -> list[Any]:
        return []


class NotAList:
    @hookimpl
    def tmm_kernels(self) -> Any:
        return FakeKernel("alone")


class AClass:
    @hookimpl
    def tmm_kernels(self) -> list[Any]:
        return [FakeKernel]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (ImportError("libcute.so not found"), "import failed: ImportError: libcute.so"),
        (Raises(), "tmm_kernels failed: ZeroDivisionError: in the hook"),
        (WrongSignature(), "cannot be registered: PluginValidationError"),
        (UnknownHook(), "unknown hooks"),
        (NotAList(), "must return a list"),
        (AClass(), "return an instance"),
        (plugin(FakeKernel("")), "has no name"),
    ],
)
def test_a_broken_plugin_is_reported_once_and_costs_itself(broken: Any, message: str) -> None:
    good = EntryPoint("good", plugin(FakeKernel("good.one")))
    r = registry(EntryPoint("bad", broken), good)
    with pytest.warns(
        TmmWarning, match=f"(?s)plugin 'bad' \\(stranger 1.2\\).*{message}"
    ) as caught:
        assert names(r) == ["good.one"]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(r) == ["good.one"]
    (info,) = [i for i in kernel_infos(r, settings()) if i.plugin == "bad"]
    assert info.disabled is not None
    assert info.distribution == "stranger"


def test_a_forced_kernel_of_a_plugin_that_failed_re_raises_its_error() -> None:
    cause = ImportError("libcute.so not found")
    r = registry(EntryPoint("cute", cause))
    with pytest.warns(TmmWarning):
        r.load()
    match = r"libcute.so not found \(.*test_registry.py:\d+\)$"
    with pytest.raises(PluginError, match=match) as caught:
        r.kernel("cute.gemm")
    assert caught.value.__cause__ is cause
    assert cause.__traceback__ is None


def test_duplicate_names_are_refused_naming_both() -> None:
    ours = EntryPoint("ours", plugin(FakeKernel("same", version="ours")), "tmm_core")
    theirs = EntryPoint("aaa", plugin(FakeKernel("same", version="theirs")), "aaa-first")
    r = registry(theirs, ours)
    with pytest.warns(TmmWarning, match=r"'aaa'.*'same' is already registered by plugin 'ours'"):
        assert r.kernel("same").version == "ours"


def test_duplicate_epilogues_are_refused_naming_both() -> None:
    mine = Epilogue("silu", lambda z: z)
    with pytest.raises(PluginError, match=r"mine.*'silu' is already registered by .*tmm_core"):
        Registry().register(plugin(epilogues=[mine]), "mine")


def test_plugins_are_allowed_and_denied() -> None:
    points = [EntryPoint(n, plugin(FakeKernel(f"{n}.k"))) for n in ("a", "b", "c")]
    assert names(registry(*points, allow=frozenset({"a", "b"}), deny=frozenset({"b"}))) == ["a.k"]


def test_environment_variables_select_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(n, plugin(FakeKernel(f"{n}.k"))) for n in ("a", "b", "c")]
    monkeypatch.setattr(importlib.metadata, "entry_points", by_group(*points))
    assert names(Registry.from_environment({"TMM_PLUGINS": "a, c"})) == ["a.k", "blas", "c.k"]
    assert names(Registry.from_environment({"TMM_PLUGINS": ""})) == ["blas"]
    assert names(Registry.from_environment({"TMM_DISABLE_PLUGINS": "a"})) == ["b.k", "blas", "c.k"]
    every = ["a.k", "b.k", "blas", "c.k"]
    assert names(Registry.from_environment({"TMM_DISABLE_PLUGINS": ""})) == every
    assert names(Registry.from_environment({})) == every


def test_declines_that_raises_is_a_reason() -> None:
    def explode(_: Any) -> list[str]:
        raise KeyError("sm")

    r = Registry()
    r.register(plugin(FakeBlas(), FakeKernel("rude", against=explode)), "p")
    with pytest.warns(TmmWarning, match="rude"):
        able, rejected = r.candidates(problem(), settings())
    assert [k.name for k in able] == ["blas"]
    assert "KeyError" in rejected["rude"][0]
    r.candidates(problem(), settings())  # a second warning would be an error here


def test_a_registered_epilogue_is_known_by_name() -> None:
    square = Epilogue("square", lambda z: z * z)
    r = Registry()
    r.register(plugin(epilogues=[square]), "p")
    assert r.epilogue("relu+square").apply(torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]
    with pytest.raises(UnknownNameError, match="did you mean 'square'"):
        r.epilogue("sqare")


def test_built_in_plugins_have_entry_points_too() -> None:
    points = importlib.metadata.entry_points(group="tmm_core")
    assert {"blas", "triton"} <= {p.name for p in points}
    assert "tmm_blas" not in (sys.modules["tmm_core.registry.registry"].__dict__)
    assert "blas" in names(Registry.from_environment({}))


def test_kernel_infos_show_unused_kernels() -> None:
    r = Registry()
    r.register(plugin(FakeKernel("k", traits=Traits(deterministic=False))), "p")
    (info,) = kernel_infos(r, settings(disable=frozenset({"k"})))
    assert info.disabled == "disabled by TMM_DISABLE or override"
    assert info.to_json()["traits"] == {
        "deterministic": False,
        "batch_invariant": False,
        "capture_safe": True,
    }


def test_an_unknown_name_is_reported_across_processes() -> None:
    error = UnknownNameError("kernel", "bla", ["blas"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is UnknownNameError
    assert str(copy) == str(error) == "unknown kernel 'bla'; did you mean 'blas'?"


def test_the_blas_that_another_thread_has_added_meanwhile_stays() -> None:
    """Its object is part of choices that were made with it."""
    r = registry(baseline=FakeBlas)

    class TakenLater:
        """The lock, which another thread has held."""

        def __enter__(self) -> None:
            r._kernels["blas"] = other

        def __exit__(self, *_: object) -> None:
            pass

    other: Any = FakeBlas()
    r.loading_lock = TakenLater()  # type: ignore[assignment]
    r._add_baseline()
    assert r._kernels["blas"] is other
