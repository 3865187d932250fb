"""With any fault of a plugin, the product is right, other kernels win, and one warning names the
plugin.

Each behaviour is a plugin with one bad kernel, which would win if it were good, or with bad hooks.
It is installed together with BLAS and another distribution with a good kernel.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fakes import FakeBlas, FakeConfig, FakeKernel, FakeTimer, hookimpl, plugin
from tmm_cache import CacheStore

import tmm_core
from tmm_core import Config, Epilogue, Supports, TmmWarning, Traits, dispatch
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm
from tmm_core.registry import watched_call
from tmm_core.registry.registry import Registry
from tmm_core.spec.device import fingerprint
from tmm_core.spec.steps import Steps
from tmm_core.tuning.stages import Tuning
from tmm_core.tuning.tuner import Tuner

A, B = torch.randn(64, 16), torch.randn(16, 32)


@pytest.fixture(autouse=True)
def tunes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels are interpreted nothing is tuned."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TMM_PROGRESS", "0")
    fingerprint.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of a tiny product wait for each other
    yield
    torch.set_num_threads(threads)
    fingerprint.cache_clear()


# -- nasty values ------------------------------------------------------------------------------


class Unnamed(type):
    """The type of a class that has no name."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise SystemExit(name)
        return super().__getattribute__(name)


class Loud(Exception, metaclass=Unnamed):  # noqa: N818
    """An exception that cannot be inspected."""

    def __str__(self) -> str:
        raise SystemExit("str")

    __repr__ = __str__

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)

    @property
    def __class__(self) -> Any:
        raise SystemExit("class")

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise SystemExit("class")


class Base(BaseException):
    pass


class Text(str):
    """A text that compares, hashes and prints as it likes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise SystemExit("eq")

    def __hash__(self) -> int:
        raise SystemExit("hash")

    def __len__(self) -> int:
        return 1

    def __str__(self) -> str:
        raise SystemExit("str")

    def isprintable(self) -> bool:
        return True

    __repr__ = __str__
    __format__ = __str__  # type: ignore[assignment]


class Texting(Exception):  # noqa: N818
    """An exception whose text is no exact ``str``, is long, and clears the terminal."""

    def __str__(self) -> str:
        return Text("\x1b[2J" + "x" * 100_000)


class Number(IntEnum):
    ONE = 1


class Float(float):
    def __float__(self) -> float:
        raise SystemExit("float")

    def __eq__(self, other: object) -> bool:
        raise SystemExit("eq")

    def __lt__(self, other: object) -> bool:
        raise SystemExit("lt")

    __ge__ = __le__ = __gt__ = __lt__  # type: ignore[assignment]
    __hash__ = float.__hash__


class Nasty:
    """An object each of whose special methods raises."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)

    def __repr__(self) -> str:
        raise SystemExit("repr")

    def __iter__(self) -> Any:
        raise SystemExit("iter")

    def __bool__(self) -> bool:
        raise SystemExit("bool")

    def __eq__(self, other: object) -> bool:
        raise SystemExit("eq")

    def __hash__(self) -> int:
        raise SystemExit("hash")


def raises(error: Any) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        raise error() if isinstance(error, type) else error

    return answer


def gives(value: Any) -> Callable[..., Any]:
    return lambda *arguments: value


def midway(*arguments: Any) -> Any:
    yield FakeConfig()
    raise RuntimeError("midway")


def leaves(*arguments: Any) -> Any:
    yield FakeConfig()
    sys.exit(3)


def endless(item: Any) -> Callable[..., Any]:
    return lambda *arguments: itertools.repeat(item)


@dataclass(frozen=True, kw_only=True)
class Wide(FakeConfig):
    value: Any = 1


@dataclass(frozen=True, kw_only=True)
class Turncoat(FakeConfig):
    """A config that can be stored when it is checked, and not afterwards."""

    #: The number of reads that return its fields.
    reads: ClassVar = 3

    def to_json(self) -> dict[str, Any]:
        calls.append(1)
        return {"tile": self.tile if len(calls) <= self.reads else self.after()}

    def after(self) -> Any:
        return 2**70


@dataclass(frozen=True, kw_only=True)
class Silenced(Turncoat):
    """A config that raises when it is read after the check."""

    def after(self) -> Any:
        raise ValueError("later")


calls: list[int] = []


def config_of(value: Any) -> Callable[..., Any]:
    return lambda *arguments: [Wide(value=value)]


class Named(FakeConfig):
    def to_json(self) -> dict[str, Any]:
        return {"x" * 300: 1}


class Many(FakeConfig):
    def to_json(self) -> dict[str, Any]:
        return {f"field{n}": n for n in range(200)}


class Restless(FakeConfig):
    def __hash__(self) -> int:
        calls.append(1)
        return len(calls)


class Mute(FakeConfig):
    """A good config, but for its text."""

    def __repr__(self) -> str:
        raise Base("repr")

    __str__ = __repr__


class Assuming(FakeConfig):
    @property
    def assumes(self) -> Any:
        return itertools.repeat("static_weights")


# -- bad kernels ---------------------------------------------------------------------------------

ERRORS: dict[str, Any] = {
    "Exception": RuntimeError("oh"),
    "BaseException": Base("oh"),
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit("oh"),
    "StopIteration": StopIteration("oh"),
    "Loud": Loud,
    "Texting": Texting,
    "TimeoutError": TimeoutError,
}

METHODS: dict[str, tuple[str, Callable[..., Any]]] = {}
for _method in ("declines", "configs", "default_config", "estimate_us", "workspace_bytes", "bind"):
    for _name, _error in ERRORS.items():
        METHODS[f"{_method} raises {_name}"] = _method, raises(_error)
    METHODS[f"{_method} gives an object that cannot be touched"] = _method, gives(Nasty())
for _name, _value in {
    "2**70": 2**70, "a huge integer": 10**400, "nan": math.nan, "inf": math.inf, "minus one": -1,
    "a text": "text", "a list": [1], "a hostile float": Float(1.0), "a complex": 1j, "True": True,
}.items():  # fmt: skip
    if _name not in ("2**70", "a hostile float"):
        METHODS[f"estimate_us gives {_name}"] = "estimate_us", gives(_value)
    METHODS[f"workspace_bytes gives {_name}"] = "workspace_bytes", gives(_value)
# Like faults of the environment, for which methods that compile give another warning.
for _method in ("configs", "estimate_us", "workspace_bytes"):
    for _name, _error in {
        "FileNotFoundError": FileNotFoundError(2, "No such file or directory", "table.json"),
        "CalledProcessError": subprocess.CalledProcessError(1, "nvidia-smi"),
        "OutOfMemoryError": torch.OutOfMemoryError("out of memory"),
    }.items():
        METHODS[f"{_method} raises {_name}"] = _method, raises(_error)
METHODS |= {
    "declines gives None": ("declines", gives(None)),
    "declines gives one text": ("declines", gives("no")),
    "declines never ends": ("declines", endless("no")),
    "declines gives numbers": ("declines", gives([1])),
    "configs gives None": ("configs", gives(None)),
    "configs never ends": ("configs", endless(FakeConfig())),
    "configs raises midway": ("configs", midway),
    "configs leaves midway": ("configs", leaves),
    "configs gives other objects": ("configs", gives([1, 2])),
    "configs gives plain configs": ("configs", gives([Config()])),
    "a config with 2**70": ("configs", config_of(2**70)),
    "a config with -2**63": ("configs", config_of(-(2**63))),
    "a config with nan": ("configs", config_of(math.nan)),
    "a config with a long text": ("configs", config_of("x" * 300)),
    "a config with a line feed": ("configs", config_of("a\nb")),
    "a config with a hostile text": ("configs", config_of(Text("a"))),
    "a config with an enum": ("configs", config_of(Number.ONE)),
    "a config with a numpy number": ("configs", config_of(np.float64(1.0))),
    "a config with a tensor": ("configs", config_of(torch.ones(()))),
    "a config with None": ("configs", config_of(None)),
    "a config with bytes": ("configs", config_of(b"x")),
    "a config with an object": ("configs", config_of(Nasty())),
    "a config with a long name": ("configs", gives([Named()])),
    "a config with many fields": ("configs", gives([Many()])),
    "a config that assumes without end": ("configs", gives([Assuming()])),
    "a config whose hash changes": ("configs", lambda *_: [Restless()]),
    "default_config gives None": ("default_config", gives(None)),
    "default_config gives 2**70": ("default_config", lambda *_: Wide(value=2**70)),
    "bind gives None": ("bind", gives(None)),
    "bind gives an integer": ("bind", gives(3)),
    "bind gives sys.exit": ("bind", gives(sys.exit)),
}


def bad_kernel(method: str, answer: Callable[..., Any]) -> FakeKernel:
    """The fastest kernel, with one bad method."""
    members = {method: lambda self, *about: answer(*about)}
    kernel: FakeKernel = type("Bad", (FakeKernel,), members)("bad", estimate=1.0)
    return kernel


def launching(launch: Callable[..., Any]) -> FakeKernel:
    """The fastest kernel; a function of the test gets the right launcher and makes the launch."""

    class Launching(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            right: Any = super().bind(problem, config)

            def run(*arguments: Any, **extras: Any) -> Any:
                return launch(right, *arguments)

            run.cost = right.cost  # type: ignore[attr-defined]
            return run

    return Launching("bad", estimate=1.0)


def spoiled_input(right: Any, a: Any, b: Any, *others: Any) -> Any:
    result = right(a, b, *others)
    a.zero_()
    return result


def shuffled(right: Any, *arguments: Any) -> Any:
    random.seed(0)
    return right(*arguments) * 1.01


def resized(right: Any, *given: Any) -> Any:
    """An output that the next kernel gets, too."""
    return right(*given) if given[-1] is None else given[-1].resize_(3)


def resized_and_raising(right: Any, *given: Any) -> Any:
    if given[-1] is not None:
        given[-1].resize_(300, 300)
        raise RuntimeError("resized")
    return right(*given)


def turned(right: Any, *given: Any) -> Any:
    if given[-1] is not None:
        given[-1].t_()
    return right(*given[:-1], None)


LAUNCHES: dict[str, Callable[..., Any]] = {
    **{f"launch raises {name}": raises(error) for name, error in ERRORS.items()},
    "launch forces an unknown kernel": lambda right, a, b, *_: tmm_core.matmul(a, b, kernel="x"),
    "launch raises tmm's CacheMissError": raises(tmm_core.CacheMissError),
    "launch raises tmm's SettingsError": raises(tmm_core.SettingsError),
    "launch resizes its out": resized,
    "launch resizes its out and raises": resized_and_raising,
    "launch transposes its out": turned,
    "launch gives None": gives(None),
    "launch gives a number": gives(3.0),
    "launch gives an object that cannot be touched": gives(Nasty()),
    "launch gives another shape": lambda right, a, b, *_: a,
    "launch gives another dtype": lambda right, *given: right(*given).double(),
    "launch gives meta tensors": lambda right, *given: right(*given).to("meta"),
    "launch gives NaN": lambda right, *given: right(*given).fill_(math.nan),
    "launch gives 1 % more": shuffled,
    "launch writes its input": spoiled_input,
    "launch ignores alpha": lambda right, a, b, x, y, alpha, out: right(a, b, x, y, 1.0, out) * 2,
}


class Oddity(FakeKernel):
    """A kernel with one odd attribute."""

    def __init__(self, **odd: Any) -> None:
        super().__init__("bad", estimate=1.0)
        for name, value in odd.items():
            self.__dict__[name] = value


class Raising(Supports):
    def reasons_against(self, problem: Any) -> list[str]:
        raise Base("supports")


class Untouchable(list[Any]):
    def __contains__(self, thing: object) -> bool:
        raise SystemExit("contains")


class Promising(FakeConfig):
    def unmet_promises(self, problem: Any) -> list[str]:
        raise Base("unmet_promises")


def supporting(field: str, value: Any) -> Supports:
    """A declaration with a field that its constructor refuses."""
    supports = replace(FakeKernel.supports)
    object.__setattr__(supports, field, value)
    return supports


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "a hostile name": {"name": Text("bad")},
    "a name with a line feed": {"name": "bad\nkernel blas is wrong"},
    "a name that clears the screen": {"name": "bad\x1b[2J"},
    "a long name": {"name": "x" * 300},
    "an empty name": {"name": ""},
    "a blank name": {"name": "  "},
    "a name that is no text": {"name": 3},
    "a name in bytes": {"name": b"bad"},
    "a long version": {"version": "v" * 300},
    "a hostile version": {"version": Text("1")},
    "a version with a tab": {"version": "1\t2"},
    "no version": {"version": None},
    "traits that are no traits": {"traits": 1},
    "traits of texts": {"traits": Traits(deterministic="yes")},  # type: ignore[arg-type]
    "traits of integers": {"traits": Traits(capture_safe=1)},  # type: ignore[arg-type]
    "supports that are none": {"supports": Nasty()},
    "the class of supports": {"supports": Supports},
    "supports that raise": {"supports": Raising.everything()},
    "supports of a capability": {"supports": supporting("capability", 9)},
    "supports of layouts": {"supports": supporting("layouts", ["row"])},
    "supports of a batch": {"supports": supporting("batch", "many")},
    "supports with a collection that raises": {"supports": supporting("devices", Untouchable())},
    "supports with an object": {"supports": supporting("devices", Nasty())},
    "a config that judges promises": {
        "config_type": Promising,
        "configs": lambda _: [Promising()],
        "default_config": lambda _: Promising(),
    },
    "a config type that is an instance": {"config_type": FakeConfig()},
    "a config type that is none": {"config_type": int},
}


class Hooks:
    """A plugin with the given hooks."""

    def __init__(self, kernels: Callable[..., Any], epilogues: Any = list) -> None:
        self._kernels, self._epilogues = kernels, epilogues

    @hookimpl
    def tmm_kernels(self) -> Any:
        return self._kernels()

    @hookimpl
    def tmm_epilogues(self) -> Any:
        return self._epilogues()


class Lying:
    """An object that claims to be a kernel."""

    @property
    def __class__(self) -> Any:
        return FakeKernel

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        pass


def odd_epilogue() -> Any:
    epilogue = Epilogue("fine", lambda z: z)
    object.__setattr__(epilogue, "name", "not\nfine")
    return [epilogue]


def flagged_epilogue() -> Any:
    epilogue = Epilogue("fine", lambda z: z)
    object.__setattr__(epilogue, "interleaved", torch.ones(2))
    return [epilogue]


PLUGINS: dict[str, Callable[[], Any]] = {
    **{f"import raises {name}": raises(error) for name, error in ERRORS.items()},
    **{f"a hook raises {n}": lambda e=e: Hooks(raises(e)) for n, e in ERRORS.items()},
    **{f"epilogues raise {n}": lambda e=e: Hooks(gives([]), raises(e)) for n, e in ERRORS.items()},
    "it is an integer": gives(3),
    "it is None": gives(None),
    "it cannot be touched": gives(Nasty()),
    "a hook gives None": lambda: Hooks(gives(None)),
    "a hook gives a kernel": lambda: Hooks(lambda: FakeKernel("bad")),
    "a hook gives a generator": lambda: Hooks(lambda: (FakeKernel("bad") for _ in range(1))),
    "a hook gives classes": lambda: Hooks(gives([FakeKernel])),
    "a hook gives what cannot be touched": lambda: Hooks(gives([Nasty()])),
    "a hook gives what lies about its class": lambda: Hooks(gives([Lying()])),
    "a hook takes BLAS's name": lambda: Hooks(lambda: [FakeKernel("blas")]),
    "a hook gives one name twice": lambda: Hooks(lambda: [FakeKernel("twice")] * 2),
    "a hook gives 100 bad kernels": lambda: Hooks(lambda: [FakeKernel("")] * 100),
    "an epilogue is a text": lambda: Hooks(gives([]), gives(["relu"])),
    "an epilogue has a built-in name": lambda: Hooks(
        gives([]), lambda: [Epilogue("relu", lambda z: z)]
    ),
    "an epilogue's name is two lines": lambda: Hooks(gives([]), odd_epilogue),
    "an epilogue's flag is a tensor": lambda: Hooks(gives([]), flagged_epilogue),
}

BEHAVIOURS: dict[str, Callable[[], Any]] = {
    **{name: lambda m=m: plugin(bad_kernel(*m)) for name, m in METHODS.items()},
    **{name: lambda f=f: plugin(launching(f)) for name, f in LAUNCHES.items()},
    **{name: lambda odd=odd: plugin(Oddity(**odd)) for name, odd in ATTRIBUTES.items()},
    **PLUGINS,
}
assert len(BEHAVIOURS) > 150


class Entry:
    """An installed plugin, as importlib.metadata describes it."""

    group = "tmm_core"

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name = self.value = name
        self.load = load
        self.dist = types.SimpleNamespace(name=f"{name}-kernels", version="1.2")


def install(load: Callable[[], Any]) -> Dispatcher:
    """A new process with BLAS, a hostile plugin and a good one."""
    calls.clear()
    entries: list[Any] = [
        Entry("blas", lambda: plugin(FakeBlas(estimate=10.0))),
        Entry("hostile", load),
        Entry("kind", lambda: plugin(FakeKernel("good", estimate=5.0))),
    ]
    entries[0].dist.name = "tmm-core"
    times = {"bad": 1.0, "good": 5.0, "blas": 10.0}
    made = Dispatcher(Registry(lambda: entries), Tuner(FakeTimer(times)), CacheStore())
    dispatch.default_dispatcher.made = made
    warm.forget_plans()
    return made


def is_right() -> bool:
    for alpha in (1.0, 0.5):
        wanted = alpha * (A @ B)
        if not torch.allclose(tmm_core.matmul(A, B, alpha=alpha), wanted, atol=1e-4):
            return False
    return True


def names_it(message: str) -> bool:
    return "plugin 'hostile' (hostile-kernels 1.2)" in message and message.isprintable()


@pytest.fixture
def only_hostile_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hostile plugin's kernels are verified, which is most of the time. After each third
    behaviour, a test below verifies BLAS and the good kernel, too."""
    whole = Tuning._verify

    def verify(self: Tuning, run: Any, *arguments: Any) -> Steps[None]:
        if run.candidate.kernel.source.plugin == "hostile":
            yield from whole(self, run, *arguments)
        else:
            run.error = 0.0

    monkeypatch.setattr(Tuning, "_verify", verify)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.slow(quick=4)
def test_it_costs_itself_and_one_warning(behaviour: str, only_hostile_is_verified: None) -> None:
    before = os.getcwd(), torch.get_default_dtype(), A.clone(), torch.is_grad_enabled()
    made = install(BEHAVIOURS[behaviour])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert is_right()
    messages = [str(each.message) for each in caught]
    assert len(messages) == 1, messages
    assert names_it(messages[0]), messages
    assert len(messages[0]) < 5000
    assert tmm_core.plan(A, B).kernel == "good"
    found = made.record(tmm_core.problem(A, B))
    assert found is not None
    statuses = {result.kernel: result.status for result in found[1].candidates}
    assert statuses["good"] == statuses["blas"] == "ok"
    # Silently from here on, for other problems too.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(tmm_core.matmul(A[:7], B), A[:7] @ B, atol=1e-4)
        assert tmm_core.explain(A, B).kernel == "good"
    after = os.getcwd(), torch.get_default_dtype(), A, torch.is_grad_enabled()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("reads", range(1, 12))
@pytest.mark.parametrize("kind", [Turncoat, Silenced])
def test_a_config_that_changes_costs_its_kernel_at_most(
    kind: type[FakeConfig],
    reads: int,
    only_hostile_is_verified: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fields are read where the kernel gives it. Other kernels' times are stored."""
    monkeypatch.setattr(kind, "reads", reads)
    made = install(lambda: plugin(bad_kernel("configs", lambda *_: [kind()])))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert is_right()
    assert all(names_it(str(each.message)) for each in caught)
    found = made.record(tmm_core.problem(A, B))
    assert found is not None
    timed = {result.kernel for result in found[1].candidates if result.samples_us}
    assert timed >= {"good", "blas"}


@pytest.mark.parametrize("method", ["configs", "bind"])
def test_a_method_that_wraps_itself_is_reported(
    method: str, only_hostile_is_verified: None
) -> None:
    """The warning gives the place of the method's code."""

    def boom(self: Any, *about: Any) -> Any:
        raise ValueError("boom")

    boom.__wrapped__ = boom  # type: ignore[attr-defined]
    install(lambda: plugin(type("Bad", (FakeKernel,), {method: boom})("bad", estimate=1.0)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert is_right()
    (message,) = [str(each.message) for each in caught]
    assert names_it(message)
    assert "boom" in message
    assert tmm_core.plan(A, B).kernel == "good"


@pytest.mark.parametrize("method", ["declines", "configs", "default_config", "bind"])
@pytest.mark.parametrize(("of", "field"), [("", "m"), ("", "device"), ("a", "dtype")])
def test_a_problem_that_a_plugin_changes_is_its_own(
    method: str, of: str, field: str, only_hostile_is_verified: None
) -> None:
    """Others get the problem of the call."""

    def changes(problem: Any, *config: Any) -> Any:
        object.__setattr__(getattr(problem, of) if of else problem, field, None)
        return getattr(FakeKernel("bad", estimate=1.0), method)(problem, *config)

    install(lambda: plugin(bad_kernel(method, changes)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert is_right()
    assert all(names_it(str(each.message)) for each in caught)


#: Changes of the process that a plugin's ``bind`` may make, and what they change.
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "sets the default dtype": (
        lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype,
    ),
    "sets a variable of the environment": (
        lambda: os.environ.update(SET_BY_BIND="1"), lambda: os.environ.get("SET_BY_BIND"),
    ),
    "ignores warnings": (
        lambda: warnings.filters.insert(0, ("ignore", None, Warning, None, 7)),  # type: ignore[attr-defined]
        lambda: ("ignore", None, Warning, None, 7) in warnings.filters,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_bind_changes_nothing_else(name: str, only_hostile_is_verified: None) -> None:
    change, state = CHANGES[name]

    class Binding(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            change()
            return super().bind(problem, config)

    install(lambda: plugin(Binding("bad", estimate=1.0)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = state()
        assert is_right()
        assert state() == before
    (message,) = [str(each.message) for each in caught]
    assert names_it(message)
    assert "bind changed" in message
    assert tmm_core.plan(A, B).kernel == "good"


@pytest.mark.parametrize(("turn", "together"), [(60.0, False), (0.01, True)])
def test_binds_of_plugins_exclude_each_other_unless_one_is_slow(
    turn: float, together: bool, only_hostile_is_verified: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that were watched at one time restored each other's changes: a default dtype stayed."""
    monkeypatch.setattr(watched_call, "TURN", turn)
    inside: list[object] = []
    counts: list[int] = []

    class Binding(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            inside.append(self)
            time.sleep(0.1)
            counts.append(len(inside))
            inside.remove(self)
            return super().bind(problem, config)

    names = ("bad", "worse", "worst")
    made = install(lambda: plugin(*(Binding(name, estimate=1.0) for name in names)))
    made.tuner.workers = 3
    assert is_right()
    assert (max(counts) > 1) is together


def test_a_config_without_a_text_is_explained() -> None:
    members = {"config_type": Mute, "configs": lambda *_: [Mute(tile=3)]}
    kernel: Any = type("Bad", (FakeKernel,), {**members, "default_config": lambda *_: Mute(tile=3)})
    install(lambda: plugin(kernel("bad", estimate=1.0)))
    assert is_right()
    assert "bad tile=3" in str(tmm_core.explain(A, B))


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.slow(quick=10)
def test_where_warnings_are_errors_it_raises_once(behaviour: str) -> None:
    install(BEHAVIOURS[behaviour])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TmmWarning) as caught:
            is_right()
        assert names_it(str(caught.value))
        assert is_right()
        assert tmm_core.plan(A, B).kernel == "good"
