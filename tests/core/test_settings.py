"""Settings compare by identity: equal settings are one object, different ones are two."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import tmm_core
from tmm_core import SettingsError
from tmm_core.settings import (
    VARIABLES,
    Settings,
    current,
    enabled_by_environment,
    flag,
    nested,
    overridden,
    with_static_weights,
    within,
)

#: Two values of each field: the argument of ``override``, and the value of the setting.
VALUES: dict[str, list[tuple[Any, Any]]] = {
    "on_cache_miss": [("heuristic", "heuristic"), ("error", "error")],
    "kernel": [("blas", "blas"), ("other", "other")],
    "config": [({"tile": 1}, '{"tile": 1}'), ({"tile": 2}, '{"tile": 2}')],
    "disable": [("one", {"one"}), (["one", "two"], {"one", "two"})],
    "deterministic": [(True, True), (False, False)],
    "batch_invariant": [(True, True), (False, False)],
    "static_weights": [(True, True), (False, False)],
    "verify": [(False, False), (True, True)],
    "arithmetic": [("sm90-k16", "sm90-k16"), ("other", "other")],
    "tune_budget": [(3.25, 3.25), (3.5, 3.5)],
    "tune_memory": [(1 << 20, 1 << 20), (1 << 30, 1 << 30)],
    "tune_share": [(0.25, 0.25), (1, 1)],
    "progress": [(True, True), (False, False)],
}
#: A text of each environment variable, and the value of the setting.
TEXTS = {
    "on_cache_miss": ("error", "error"),
    "kernel": (" blas ", "blas"),
    "disable": ("one, two,", {"one", "two"}),
    "batch_invariant": ("yes", True),
    "static_weights": ("1", True),
    "verify": ("0", False),
    "arithmetic": (" sm90-k16 ", "sm90-k16"),
    "tune_budget": ("7.5", 7.5),
    "tune_memory": ("1.5GiB", 3 << 29),
    "tune_share": ("0.25", 0.25),
    "progress": ("0", False),
}


def test_all_fields_and_variables_have_values() -> None:
    # Callers do not set these two: test_nested.py, test_beside.py.
    assert {f.name for f in dataclasses.fields(Settings)} == VALUES.keys() | {
        "nested",
        "shares_gpu",
    }
    assert VARIABLES.keys() == TEXTS.keys()


@pytest.mark.parametrize("name", VALUES)
def test_settings_that_differ_in_one_field_are_two_objects(name: str) -> None:
    with_it = {"kernel": "blas"} if name == "config" else {}
    seen = []
    for given, value in [*VALUES[name], *VALUES[name]]:
        with tmm_core.override(**with_it, **{name: given}) as current:
            assert getattr(current, name) == value
            seen.append(current)
    first, second, *again = seen
    assert first is not second
    assert again[0] is first
    assert again[1] is second


@pytest.mark.parametrize("name", VALUES)
def test_an_override_keeps_the_other_settings(name: str) -> None:
    with_it = {"kernel": "blas"} if name == "config" else {}
    given, value = VALUES[name][0]
    other = "tune_budget" if name != "tune_budget" else "progress"
    more, there = VALUES[other][0]
    with tmm_core.override(**with_it, **{name: given}) as outer:
        with tmm_core.override(**{other: more}) as inner:
            assert getattr(inner, name) == value
            assert getattr(inner, other) == there
        assert tmm_core.settings.current() is outer


def test_disabled_kernels_add_up() -> None:
    with tmm_core.override(disable={"one"}):
        with tmm_core.override(disable="two, three") as inner:
            assert inner.disable == {"one", "two", "three"}
        with tmm_core.override(tune_budget=3.0) as inner:
            assert inner.disable == {"one"}


def test_a_forced_config_belongs_to_a_forced_kernel() -> None:
    with tmm_core.override(kernel="one", config={"tile": 1}):
        with tmm_core.override(config={"tile": 2}) as inner:
            assert (inner.kernel, inner.config) == ("one", '{"tile": 2}')
        with tmm_core.override(kernel="two") as inner:
            assert (inner.kernel, inner.config) == ("two", None)
        with tmm_core.override(kernel="two", config={"tile": 3}) as inner:
            assert (inner.kernel, inner.config) == ("two", '{"tile": 3}')
    with pytest.raises(SettingsError, match="config needs kernel"), tmm_core.override(config={}):
        pass


@pytest.mark.parametrize("name", TEXTS)
def test_each_setting_is_read_from_its_variable(name: str) -> None:
    variable, _ = VARIABLES[name]
    text, value = TEXTS[name]
    settings = Settings.from_environ({variable: text})
    assert getattr(settings, name) == value
    for field in dataclasses.fields(Settings):
        if field.name != name:
            assert getattr(settings, field.name) == getattr(Settings(), field.name)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("tune_budget", "-1", "tune_budget must be positive seconds, got -1"),
        ("tune_budget", "long", "found 'long', accepted is a number"),
        ("tune_share", "1.5", "tune_share must be a share, above 0, at most 1, got 1.5"),
        ("tune_memory", "0", "found '0', accepted is a size like 64M or 2G, above 0"),
        ("on_cache_miss", "warn", "on_cache_miss must be one of"),
        ("verify", "maybe", "expected 1 or 0"),
    ],
)
def test_a_wrong_value_is_reported_with_its_variable(name: str, text: str, fault: str) -> None:
    variable, _ = VARIABLES[name]
    with pytest.raises(SettingsError, match=f"^{variable}='{text}': {fault}"):
        Settings.from_environ({"TMM_KERNEL": "blas", variable: text})


@pytest.mark.parametrize(
    "given",
    [
        *({name: 1} for name in ("deterministic", "batch_invariant", "static_weights", "progress")),
        *({name: "off"} for name in ("deterministic", "batch_invariant", "progress")),
        *({name: 5} for name in ("kernel", "config", "disable", "arithmetic", "on_cache_miss")),
        {"config": {"tile": {1, 2}}, "kernel": "blas"},
        {"disable": [1]},
        {"tune_budget": "1"},
        {"tune_memory": 1.5},
        {"tune_memory": True},
        *({name: 0} for name in ("tune_budget", "tune_memory", "tune_share")),
        {"tune_budget": math.inf},
        {"tune_budget": math.nan},
        {"tune_share": 1.001},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_reported_with_its_name(given: dict[str, Any]) -> None:
    # 1 equals True, so settings with 1 would be interned and stand in for those with True.
    refused = pytest.raises(SettingsError, match=f"{next(iter(given))} must be")
    with refused, tmm_core.override(**given):
        pass


@pytest.mark.parametrize(
    ("text", "found"),
    [("1", True), (" TRUE ", True), ("on", True), ("yes", True), ("0", False), ("false", False),
     ("Off", False), ("no", False), ("", False), ("2", None), ("maybe", None)],
)  # fmt: skip
def test_a_flag_is_on_or_off(
    text: str, found: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_ENABLE", text)
    if found is None:
        with pytest.raises(SettingsError, match=f"TMM_ENABLE='{text}': expected 1 or 0"):
            enabled_by_environment()
    else:
        assert flag(text) is enabled_by_environment() is found


def test_a_name_of_spaces_counts_as_absent() -> None:
    for name in ("kernel", "arithmetic"):
        assert getattr(Settings.from_environ({VARIABLES[name][0]: " "}), name) is None


def test_work_of_another_thread_has_the_settings_of_its_call() -> None:
    """The promise of static weights is left out: the work may just have written the weight."""
    with tmm_core.override(kernel="one", tune_budget=3.0) as outer:
        assert within(outer, current) is outer
        with tmm_core.override(static_weights=True) as promised:
            found = within(promised, current)
            assert current() is promised
        assert (found.static_weights, found.kernel, found.tune_budget) == (False, "one", 3.0)
        assert found is outer
        promised = with_static_weights(current)
        assert (promised.static_weights, promised.kernel) == (True, "one")
        assert current() is outer
        assert within(None, current) is not outer
        with pytest.raises(KeyError):
            within(promised, {}.__getitem__, 1)
        assert current() is outer


class Elsewhere:
    """Ways to leave a block in another context than the one in which it began."""

    @staticmethod
    def copied(leave: Callable[[], None]) -> Settings | None:
        def left() -> Settings | None:
            leave()
            return overridden()

        return contextvars.copy_context().run(left)

    @staticmethod
    def thread(leave: Callable[[], None]) -> Settings | None:
        found: list[Any] = []

        def left() -> None:
            try:
                leave()
                found.append(overridden())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=left)
        thread.start()
        thread.join()
        return found[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("elsewhere", [Elsewhere.copied, Elsewhere.thread], ids=["copy", "thread"])
@pytest.mark.parametrize("block", ["override", "nested"])
def test_a_block_may_end_in_another_context(elsewhere: Any, block: str) -> None:
    made = tmm_core.override(kernel="one") if block == "override" else nested()
    with tmm_core.override(tune_budget=3.0) as outer:
        context = contextvars.copy_context()
        context.run(made.__enter__)
        assert context.run(current) is not outer
        found = context.run(elsewhere, lambda: made.__exit__(None, None, None))
        assert found is (outer if elsewhere is Elsewhere.copied else None)
        assert current() is outer
    assert overridden() is None


def block_of(name: str) -> Iterator[None]:
    with tmm_core.override(disable=[name]):
        yield


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_blocks_may_end_in_any_order(order: tuple[str, ...]) -> None:
    with tmm_core.override(tune_budget=3.0) as outer:
        blocks = {name: block_of(name) for name in "abc"}
        for block in blocks.values():
            next(block)
        assert current().disable == {"a", "b", "c"}
        for name in order:
            # An inner block has the settings that were in force when it began.
            innermost = max(blocks)
            assert innermost in current().disable
            blocks.pop(name).close()  # type: ignore[attr-defined]
        assert current() is outer
    assert overridden() is None


def test_a_block_that_ends_inside_another_leaves_its_settings() -> None:
    outer, inner = block_of("a"), block_of("b")
    next(outer)
    next(inner)
    outer.close()  # type: ignore[attr-defined]
    with nested() as plugins:
        assert plugins.nested
        inner.close()  # type: ignore[attr-defined]
        assert current() is plugins
    assert overridden() is None


def test_a_block_that_ended_elsewhere_does_not_count_in_the_next() -> None:
    block = block_of("a")
    next(block)
    thread = threading.Thread(target=block.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    with tmm_core.override(tune_budget=3.0):
        assert current().disable == frozenset()
    assert overridden() is None


def test_another_contexts_own_settings_stay() -> None:
    made = tmm_core.override(kernel="one")
    contextvars.copy_context().run(made.__enter__)
    with tmm_core.override(kernel="two") as own:
        made.__exit__(None, None, None)
        assert current() is own


def test_an_asynchronous_generator_may_be_finished_by_another_task() -> None:
    """The exception of the generator's user passes, and no other."""
    found = []

    async def settings_of_a_request() -> AsyncIterator[None]:
        with tmm_core.override(kernel="one"):
            yield
        found.append(overridden())

    async def main() -> None:
        for error in (None, KeyError("its user's")):
            generator = settings_of_a_request()
            await anext(generator)

            async def finish(generator: Any = generator, error: Any = error) -> None:
                if error is None:
                    async for _ in generator:
                        pass
                else:
                    await generator.athrow(error)

            task = asyncio.create_task(finish())
            if error is not None:
                with pytest.raises(KeyError, match="its user's"):
                    await task
            else:
                await task

    asyncio.run(main())
    assert found == [None]


def test_static_weights_of_the_environment_do_not_hold_for_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMM_STATIC_WEIGHTS", "1")
    tmm_core.settings._from_environment.cache_clear()
    assert current().static_weights
    assert not within(None, current).static_weights


def test_a_plugins_code_forces_no_kernel() -> None:
    with tmm_core.override(kernel="one", config={"tile": 1}, tune_budget=3.0) as outer:
        with nested():
            inner = current()
            assert (inner.nested, inner.kernel, inner.config) == (True, None, None)
            assert inner.tune_budget == 3.0
            with nested():
                assert current() is inner
        assert current() is outer
    with pytest.raises(SettingsError, match="unknown setting nested; known: arithmetic,"):
        tmm_core.override(nested=True).__enter__()


@pytest.mark.parametrize("problems", [None, 5, "x", object, ["x"]])
def test_tune_refuses_arguments_that_are_not_problems(problems: Any) -> None:
    with pytest.raises(TypeError, match=r"tune\(\) takes problems"):
        tmm_core.tune(problems)
