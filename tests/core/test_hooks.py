"""Hooks through pluggy: its features work, and a plugin's fault costs only that plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeKernel, plugin
from test_registry import EntryPoint, names, registry

from tmm_core import Epilogue, PluginError, TmmWarning, hookimpl
from tmm_core.registry.registry import Registry

DOUBLE = Epilogue("double", lambda z: z + z)


class Wrapper:
    """Drops the kernels of one name from what every plugin brings."""

    def __init__(self, dropped: str) -> None:
        self.dropped = dropped

    @hookimpl(wrapper=True)
    def tmm_kernels(self) -> Iterator[None]:
        brought = yield
        assert brought is not None
        return [[kernel for kernel in each if kernel.name != self.dropped] for each in brought]


class FailingWrapper:
    @hookimpl(wrapper=True)
    def tmm_kernels(self) -> Iterator[None]:
        yield
        raise ZeroDivisionError("around")

    @hookimpl
    def tmm_epilogues(self) -> list[Any]:
        return [DOUBLE]


class SilentWrapper:
    @hookimpl(wrapper=True)
    def tmm_kernels(self) -> Iterator[None]:
        yield


class OldWrapper:
    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl(hookwrapper=True)
    def tmm_kernels(self) -> Iterator[None]:
        outcome: Any = yield
        self.seen += [kernel.name for each in outcome.get_result() for kernel in each]


def test_a_wrapper_goes_around_every_plugin() -> None:
    """Whichever is loaded first."""
    old = OldWrapper()
    r = registry(
        EntryPoint("a", plugin(FakeKernel("keep"))),
        EntryPoint("wrap", Wrapper("drop")),
        EntryPoint("z", plugin(FakeKernel("drop"), FakeKernel("stay"))),
        EntryPoint("old", old),
    )
    assert names(r) == ["keep", "stay"]
    assert sorted(old.seen) in (["keep", "stay"], ["drop", "keep", "stay"])
    r.register(plugin(FakeKernel("drop"), FakeKernel("late")), "by hand")
    assert names(r) == ["keep", "late", "stay"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [(FailingWrapper(), "ZeroDivisionError: around"), (SilentWrapper(), "TypeError")],
)
def test_a_wrapper_that_fails_costs_itself(broken: Any, message: str) -> None:
    r = registry(
        EntryPoint("a", plugin(FakeKernel("one"))),
        EntryPoint("b", plugin(FakeKernel("two"))),
        EntryPoint("bad", broken),
        EntryPoint("good", Wrapper("two")),
    )
    match = f"plugin 'bad'.*its wrapper of tmm_kernels failed around plugin 'a'.*{message}"
    with pytest.warns(TmmWarning, match=match) as caught:
        assert names(r) == ["one"]
    assert len(caught) == 1
    assert ("double" in r.epilogues()) is isinstance(broken, FailingWrapper)


def test_a_wrapper_that_failed_is_not_called_again() -> None:
    called: list[str] = []

    class Counted:
        @hookimpl(wrapper=True)
        def tmm_kernels(self) -> Iterator[None]:
            called.append("")
            yield
            raise ZeroDivisionError("around")

    each = [EntryPoint(name, plugin(FakeKernel(name))) for name in "abcd"]
    r = registry(EntryPoint("bad", Counted()), *each)
    with pytest.warns(TmmWarning, match="its wrapper of tmm_kernels failed around plugin 'a'"):
        assert names(r) == list("abcd")
    assert len(called) == 2  # among all wrappers, and alone
    r.register(plugin(FakeKernel("e")), "by hand")
    assert len(called) == 2


def test_a_failing_wrapper_of_another_does_not_keep_a_plugin_from_registering() -> None:
    r = Registry()
    r.register(FailingWrapper(), "bad")
    with pytest.warns(TmmWarning, match="'bad'.*around plugin 'good'"):
        r.register(plugin(FakeKernel("fine")), "good")
    assert names(r) == ["fine"]


def test_a_plugin_that_fails_is_not_blamed_on_a_wrapper() -> None:
    class Raises:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            raise KeyError("mine")

    r = registry(EntryPoint("wrap", Wrapper("x")), EntryPoint("bad", Raises()))
    with pytest.warns(TmmWarning, match="plugin 'bad'.*tmm_kernels failed: KeyError") as caught:
        r.load()
    assert len(caught) == 1


def test_tryfirst_and_trylast_say_who_gets_a_name_but_tmms_own() -> None:
    def bringing(version: str, **order: bool) -> Any:
        class Plugin:
            @hookimpl(**order)  # type: ignore[call-overload]
            def tmm_kernels(self) -> list[Any]:
                return [FakeKernel(name, version=version) for name in ("ours", "theirs")]

        return Plugin()

    r = registry(
        EntryPoint("a", bringing("last", trylast=True), "aaa"),
        EntryPoint("b", bringing("plain"), "bbb"),
        EntryPoint("c", bringing("first", tryfirst=True), "ccc"),
        EntryPoint("ours", plugin(FakeKernel("ours", version="tmm")), "tmm_core"),
    )
    with pytest.warns(TmmWarning, match="already registered"):
        assert names(r) == ["ours", "theirs"]
    assert (r.kernel("ours").version, r.kernel("theirs").version) == ("tmm", "first")
    assert [f.source.plugin for f in r.faults() if "theirs" in f.reason] == ["b", "a"]


def test_calls_can_be_monitored() -> None:
    r = registry(EntryPoint("a", plugin(FakeKernel("k"))), EntryPoint("b", plugin()))
    seen: list[str] = []
    r.hooks.manager.add_hookcall_monitoring(
        lambda name, impls, arguments: seen.extend(f"{name} {i.plugin_name}" for i in impls),
        lambda outcome, name, impls, arguments: seen.append(f"{len(outcome.get_result()[0])}"),
    )
    r.load()
    assert seen == ["tmm_kernels a", "1", "tmm_kernels b", "0"] + [
        each for p in "ab" for each in (f"tmm_epilogues {p}", "0")
    ]


class Unmarked:
    def tmm_kernels(self) -> list[Any]:
        return [FakeKernel("never")]

    @hookimpl
    def tmm_epilogues(self) -> list[Any]:
        return [DOUBLE]

    @property
    def tmm_property(self) -> int:
        raise AssertionError("read")


def test_a_function_without_hookimpl_is_reported_by_name() -> None:
    r = registry(EntryPoint("forgetful", Unmarked()))
    match = r"'forgetful' \(stranger 1.2\).*its function tmm_kernels lacks @tmm_core.hookimpl"
    with pytest.warns(TmmWarning, match=match) as caught:
        assert names(r) == []
    assert len(caught) == 1
    assert "double" in r.epilogues()
    with pytest.raises(PluginError, match="tmm_kernels lacks"):
        Registry().register(Unmarked(), "p")


def test_an_object_without_hooks_is_not_a_plugin() -> None:
    class Other:
        def kernels(self) -> list[Any]:
            return []

    with pytest.raises(PluginError, match=r"it is no plugin: .* has no hooks; hooks are tmm_"):
        Registry().register(Other(), "other")


def test_a_hook_that_returns_none_is_reported() -> None:
    class Forgot:
        @hookimpl
        def tmm_kernels(self) -> Any:
            [FakeKernel("k")]

    with pytest.raises(PluginError, match="tmm_kernels must return a list, got None"):
        Registry().register(Forgot(), "p")


def test_an_implementation_may_have_another_name() -> None:
    class Named:
        @hookimpl(specname="tmm_kernels")
        def tmm_mine(self) -> list[Any]:
            return [FakeKernel("k")]

    r = Registry()
    r.register(Named(), "p")
    r.register(plugin(FakeKernel("other")), "q")
    assert names(r) == ["k", "other"]


def test_a_plugin_without_a_hash_costs_itself() -> None:
    class Unhashable(Wrapper):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return self is other

    r = registry(EntryPoint("a", Unhashable("x")), EntryPoint("b", plugin(FakeKernel("k"))))
    with pytest.warns(TmmWarning, match="plugin 'a'.*cannot be registered: TypeError"):
        assert names(r) == ["k"]


class Refused(FailingWrapper):
    """Its wrapper is one, and its other function takes an argument that the hook lacks."""

    @hookimpl
    def tmm_epilogues(self, device: Any) -> list[Any]:  # type: ignore[override]
        return [DOUBLE]


def test_nothing_stays_of_a_plugin_that_is_refused() -> None:
    """Neither its name nor a wrapper, which would go around other plugins."""
    r = Registry()
    with pytest.raises(PluginError, match="cannot be registered"):
        r.register(Refused(), "p")
    r.register(plugin(FakeKernel("k")), "p")
    assert names(r) == ["k"]
    assert [fault.source.plugin for fault in r.faults()] == ["p"]


def test_a_plugin_is_registered_once() -> None:
    """A second time under its name, or under another, leaves it as it is."""
    r, calls = Registry(), []

    class Counted:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            calls.append(1)
            return [FakeKernel("k")]

    mine = Counted()
    r.register(mine, "p")
    for name in ("p", "q"):
        with pytest.raises(PluginError, match="cannot be registered: ValueError"):
            r.register(mine, name)
    r.register(Wrapper("other"), "wrapper")
    r.register(plugin(FakeKernel("other"), FakeKernel("l")), "after")
    assert names(r) == ["k", "l"]
    assert calls == [1]
    assert r.hooks.in_order("tmm_kernels", [mine]) == [mine]


def test_a_wrapper_may_leave_a_plugin_out() -> None:
    """A wrapper may return fewer results than there are functions; neither plugin is at fault."""

    class Without:
        @hookimpl(wrapper=True)
        def tmm_kernels(self) -> Iterator[None]:
            brought: Any = yield
            return [each for each in brought if each[0].name != "drop"]

    points = (EntryPoint(name, plugin(FakeKernel(name))) for name in ("drop", "keep"))
    r = registry(*points, EntryPoint("without", Without()))
    assert names(r) == ["keep"]
    assert r.faults() == []


def test_wrappers_that_work_stay_around_where_one_of_them_fails() -> None:
    """All working wrappers stay, not only the last."""
    r = registry(
        EntryPoint("a", plugin(FakeKernel("one"), FakeKernel("two"), FakeKernel("stay"))),
        EntryPoint("bad", FailingWrapper()),
        EntryPoint("first", Wrapper("one")),
        EntryPoint("second", Wrapper("two")),
    )
    with pytest.warns(TmmWarning, match="plugin 'bad'.*failed around plugin 'a'"):
        assert names(r) == ["stay"]
    assert [fault.source.plugin for fault in r.faults()] == ["bad"]


def test_a_plugin_with_two_functions_of_a_hook_has_the_earlier_place() -> None:
    class Both:
        @hookimpl(tryfirst=True)
        def tmm_kernels(self) -> list[Any]:
            return [FakeKernel("k", version="both")]

        @hookimpl(trylast=True, specname="tmm_kernels")
        def more(self) -> list[Any]:
            return [FakeKernel("late")]

    hooks = Registry().hooks
    plain, both, last = plugin(), Both(), Both()
    for each, name in ((plain, "plain"), (both, "both"), (last, "last")):
        assert hooks.register(each, name) == []
    assert hooks.in_order("tmm_kernels", [plain, both, last]) == [both, last, plain]
    assert hooks.in_order("tmm_kernels", [last, plain]) == [last, plain]
    assert hooks.in_order("tmm_epilogues", [both]) == []
    wrapper = Wrapper("x")
    hooks.register(wrapper, "wrapper")
    assert hooks.in_order("tmm_kernels", [wrapper, plain]) == [plain]


def test_an_unmarked_function_is_the_only_fault_of_its_plugin() -> None:
    class Only:
        def tmm_kernels(self) -> list[Any]:
            return []

    (fault,) = Registry().hooks.register(Only(), "only")
    assert fault.startswith("its function tmm_kernels lacks @tmm_core.hookimpl")


def test_an_interrupted_hook_is_not_called_again() -> None:
    called: list[str] = []

    class Interrupted:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            called.append("kernels")
            if len(called) == 1:
                raise KeyboardInterrupt
            return [FakeKernel("k")]

    own = Interrupted()
    hooks = Registry().hooks
    hooks.register(own, "own")
    hooks.register(Wrapper("x"), "wrapper")
    with pytest.raises(KeyboardInterrupt):
        hooks.call("tmm_kernels", own)
    assert len(called) == 1
    things, failed = hooks.call("tmm_kernels", own)
    assert ([each.name for each in things], failed) == (["k"], [])
