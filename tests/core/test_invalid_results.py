"""A kernel that returns invalid values costs only itself: no process, no call, and no record of
other kernels."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import (
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Tuner,
    dispatcher,
    plugin,
    problem,
    settings,
)

import tmm_core
from tmm_core import (
    Config,
    Kernel,
    Problem,
    Supports,
    TmmWarning,
    Traits,
    UnsupportedProblemError,
    dispatch,
    hookimpl,
)
from tmm_core.errors import ConfigError, PluginError
from tmm_core.launch import warm
from tmm_core.registry.query import CheckedKernel
from tmm_core.registry.registry import Registry, Source

HERE = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class WithTensor(FakeConfig):
    weights: Any = None


class Unprintable:
    def __repr__(self) -> str:
        raise SystemExit("repr")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise SystemExit("str")


def raiser(error: BaseException) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        raise error

    return answer


#: Queries, an invalid answer to each, and the warning's text.
NONSENSE: list[tuple[str, Any, str]] = [
    *((q, raiser(ZeroDivisionError("oh")), "raised ZeroDivisionError: oh") for q in (
        "declines", "configs", "default_config", "estimate_us", "workspace_bytes",
    )),
    *((q, raiser(SystemExit(3)), "raised SystemExit: 3") for q in (
        "declines", "configs", "default_config", "estimate_us", "workspace_bytes",
    )),
    ("declines", raiser(GeneratorExit()), "raised GeneratorExit"),
    ("estimate_us", raiser(UnspeakableError()), "raised UnspeakableError"),
    ("declines", lambda *_: "needs a GPU", "not a list of reasons"),
    ("declines", lambda *_: None, "returned None"),
    ("declines", lambda *_: [None], "not reasons as text"),
    ("estimate_us", lambda *_: -1, "returned -1"),
    ("estimate_us", lambda *_: math.nan, "returned nan"),
    ("estimate_us", lambda *_: "10", "returned '10', not µs"),
    ("estimate_us", lambda *_: Unprintable(), "whose repr failed"),
    ("workspace_bytes", lambda *_: -1, "returned -1"),
    ("workspace_bytes", lambda *_: None, "returned None"),
    ("workspace_bytes", lambda *_: "0", "returned '0'"),
    ("workspace_bytes", lambda *_: 0.5, "returned 0.5"),
    ("configs", lambda *_: None, "returned None, not configs"),
    ("configs", lambda *_: [None], "gave None, not a FakeConfig"),
    ("configs", lambda *_: (FakeConfig(tile=n) for n in itertools.count(1)), "more than"),
    ("configs", lambda *_: [WithTensor(weights=torch.ones(2))], "'weights': found tensor"),
    ("configs", lambda *_: [WithTensor(weights=[1])], "unhashable"),
    ("configs", lambda *_: [WithTensor(weights=math.inf)], "'weights': found inf"),
    ("default_config", lambda *_: None, "gave None"),
    ("default_config", lambda *_: Config(), "not a FakeConfig"),
]  # fmt: skip


def strange(query: str, answer: Any) -> FakeKernel:
    """The fastest kernel, with one query that ``answer`` answers."""
    kind = type("Strange", (FakeKernel,), {query: lambda self, *about: answer(*about)})
    kernel: FakeKernel = kind("strange", estimate=1.0, tiles=(1, 2, 3))
    return kernel


@pytest.mark.parametrize(("query", "answer", "message"), NONSENSE)
@pytest.mark.slow(quick=6)
def test_nonsense_costs_its_kernel_alone(
    query: str, answer: Any, message: str, tmp_path: Path
) -> None:
    bad, good = strange(query, answer), FakeKernel("good", estimate=5.0)
    times = {"strange": 4.0, "good": 5.0, "blas": 10.0}
    d, _ = dispatcher(FakeBlas(estimate=10.0), bad, good, times=times, root=tmp_path)
    with pytest.warns(TmmWarning) as caught:
        choice = d.choose(problem(), settings())
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("kernel 'strange' of plugin 'fakes' is set aside: " + query), text
    assert message in text
    raised = message.startswith("raised")
    line = inspect.getsourcelines(raiser if raised else strange)[1] + 2
    assert f"({__file__}:{line})" in text
    assert (choice.candidate.kernel.name, choice.origin) == ("good", "tuned")
    found = d.record(problem())
    assert found is not None
    statuses = {c.kernel: c.status for c in found[1].candidates}
    assert statuses.pop("strange", "failed") == "failed"
    assert statuses == {"blas": "ok", "good": "ok"}

    text = text.partition("; later faults of it are not reported")[0]

    # From here on its methods are not called, and it declines with the reason.
    assert d.choose(problem(n=64), settings()).candidate.kernel.name == "good"
    assert d.choose(problem(n=72), settings(on_cache_miss="heuristic")).candidate.kernel.name
    assert text in d.rejections(problem(), settings())["strange"]
    with pytest.raises(UnsupportedProblemError, match="set aside"):
        d.choose(problem(), settings(kernel="strange"))

    # The next process has the record: it measures nothing, but warns once more.
    again, timer = dispatcher(FakeBlas(estimate=10.0), strange(query, answer), good,
                              times=times, root=tmp_path)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TmmWarning)
        assert again.choose(problem(), settings()).candidate.kernel.name == "good"
    assert timer.measured == []


#: Values that some query does not accept; `PROPER` lists those that a query does.
ANYTHING: list[Any] = [-1, None, math.nan, math.inf, 10**400, True, "", "text", b"", [], [None]]
ANYTHING += [{}, object(), Unprintable(), int, torch.ones(2), "raises", "exits"]
PROPER: dict[str, list[Any]] = {
    "declines": [[], {}, b""],
    "configs": [[], {}, b""],
    "default_config": [],
    "estimate_us": [None],
    "workspace_bytes": [],
    "anatomy": [None],
    "bind": [int, object],
}


@pytest.mark.parametrize("query", PROPER)
@pytest.mark.slow(quick=6)
def test_an_invalid_answer_affects_no_other_kernel(query: str) -> None:
    for answer in ANYTHING:
        if any(type(answer) is type(each) and answer == each for each in PROPER[query]):
            continue
        faults = {"raises": ZeroDivisionError("oh"), "exits": SystemExit(3)}
        if isinstance(answer, str) and answer in faults:  # not the answer: the attribute itself
            value: Any = property(raiser(faults[answer]))
        else:
            value = lambda self, *about, answer=answer: answer  # noqa: E731
        bad = type("Strange", (FakeKernel,), {query: value})("strange", estimate=1.0)
        times = {"strange": 4.0, "good": 5.0, "blas": 10.0}
        good = FakeKernel("good", estimate=5.0)
        d, _ = dispatcher(FakeBlas(estimate=10.0), bad, good, times=times)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            choice = d.choose(problem(), settings())
            d.rejections(problem(), settings())
        assert len(caught) <= 1, (answer, [str(each.message) for each in caught])
        found = d.record(problem())
        assert found is not None
        statuses = {c.kernel: c.status for c in found[1].candidates}
        assert statuses.pop("strange", "failed") == "failed" or query == "anatomy", answer
        assert statuses == {"blas": "ok", "good": "ok"}
        assert choice.candidate.kernel.name == "good" or query == "anatomy"


def exiting(*arguments: Any) -> Any:
    raise SystemExit("config")


@pytest.mark.parametrize("what", ["__eq__", "__hash__", "assumes", "to_json", "from_json"])
@pytest.mark.slow(quick=4)
def test_a_config_that_would_end_the_process_costs_its_kernel_alone(
    what: str, tmp_path: Path
) -> None:
    member: Any = exiting
    if what == "from_json":
        member = classmethod(exiting)
    elif what == "assumes":
        member = property(exiting)
    kind = dataclass(frozen=True, kw_only=True, eq=False)(
        type("OddConfig", (FakeConfig,), {"__hash__": object.__hash__, what: member})
    )

    class Strange(FakeKernel):
        config_type = kind

        def configs(self, problem: Any) -> Any:
            return [kind()]

        def default_config(self, problem: Any) -> Any:
            return kind()

    times = {"strange": 4.0, "good": 5.0, "blas": 10.0}
    # A record in which it won, made while it behaved.
    before, _ = dispatcher(
        FakeBlas(), FakeKernel("strange"), FakeKernel("good"), times=times, root=tmp_path
    )
    assert before.choose(problem(), settings()).candidate.kernel.name == "strange"
    kernels = FakeBlas(estimate=10.0), Strange("strange", estimate=1.0), FakeKernel("good")
    d, _ = dispatcher(*kernels, times=times, root=tmp_path)
    with pytest.warns(TmmWarning, match="'strange' .* is set aside: .*SystemExit: config"):
        assert d.choose(problem(), settings()).candidate.kernel.name == "good"
    assert d.choose(problem(n=64), settings()).candidate.kernel.name == "good"


def test_nonsense_about_arithmetic_costs_its_kernel_alone(tmp_path: Path) -> None:
    invariant = Traits(batch_invariant=True)
    for answer in (raiser(KeyError("k")), raiser(SystemExit()), lambda *_: [1]):
        bad = strange("arithmetic", answer)
        bad.traits = invariant  # type: ignore[misc]
        good = FakeKernel("good", traits=invariant)
        blas = FakeBlas(traits=invariant)
        times = {"strange": 1.0, "good": 5.0, "blas": 10.0}
        d, _ = dispatcher(blas, bad, good, times=times)
        with pytest.warns(TmmWarning, match="'strange' .* set aside: arithmetic") as caught:
            choice = d.choose(problem(batch_invariant=True), settings(batch_invariant=True))
        assert len(caught) == 1
        assert choice.candidate.kernel.name == "good"


@pytest.mark.parametrize("name", ["name", "version", "supports", "traits", "config_type"])
@pytest.mark.parametrize("value", ["raises", "exits", "", None, 3])
def test_attributes_that_identify_a_kernel_are_read_at_registration(name: str, value: Any) -> None:
    faults = {"raises": ZeroDivisionError("oh"), "exits": SystemExit(3)}
    attribute = property(raiser(faults[value])) if value in faults else value

    class Odd(Kernel[FakeConfig]):
        declines = configs = default_config = bind = None  # type: ignore[assignment]

        def __repr__(self) -> str:
            raise SystemExit("repr")

    fields = {"name": "odd", "version": "1", "traits": Traits(), "config_type": FakeConfig}
    fields["supports"] = Supports()
    odd = type("Odd", (Odd,), {**fields, name: attribute})()

    class Plugin:
        @hookimpl
        def tmm_kernels(self) -> list[Any]:
            return [odd, FakeKernel("good")]

    r = Registry()
    with pytest.raises(PluginError, match=f"plugin 'p': kernel .*: {name} ") as caught:
        r.register(Plugin(), "p")
    if value in faults:
        assert caught.value.__cause__ is faults[value]
        assert f"{type(faults[value]).__name__}: {faults[value]}" in str(caught.value)
    assert [kernel.name for kernel in r.kernels()] == ["good"]


def test_a_kernel_of_the_first_protocol_is_refused_with_the_change_to_make() -> None:
    class First(FakeKernel):
        def reasons_against(self, problem: Problem) -> list[str]:
            return []

    r = Registry()
    with pytest.raises(PluginError) as caught:
        r.register(plugin(First("old.kernel"), FakeKernel("good")), "p")
    message = str(caught.value)
    assert "kernel 'old.kernel' is written for tmm's first protocol" in message
    assert "declare `supports = tmm_core.Supports" in message
    assert "declines(problem)" in message
    assert [kernel.name for kernel in r.kernels()] == ["good"]


def test_valid_answers_pass() -> None:
    checked = CheckedKernel(FakeKernel("k", tiles=(3, 4), estimate=2.5, workspace=64), Source("p"))
    assert checked.reasons_against(problem()) == []
    assert checked.configs(problem()) == [FakeConfig(tile=3), FakeConfig(tile=4)]
    config = checked.default_config(problem())
    assert config == FakeConfig(tile=3)
    assert (checked.estimate_us(problem(), config), checked.workspace_bytes(problem(), config)) == (
        2.5, 64,
    )  # fmt: skip
    assert checked.arithmetic(problem(), config) is None  # it promises no invariance
    assert repr(checked) == "<kernel k 1>"
    assert (checked.fault, checked.compiles) == (None, False)


def test_an_empty_search_space_is_not_a_fault() -> None:
    """A generator's first of nothing is a StopIteration."""

    class Narrow(FakeKernel):
        def configs(self, problem: Any) -> Any:
            return [FakeConfig()] if problem.m > 64 else []

        def default_config(self, problem: Any) -> FakeConfig:
            return next(iter(self.configs(problem)))

    d, _ = dispatcher(FakeBlas(), Narrow("narrow"), times={"narrow": 1.0, "blas": 10.0})
    record = d.tune(problem(m=64), settings())
    (empty,) = (c for c in record.candidates if c.kernel == "narrow")
    assert (empty.status, "search space is empty" in str(empty.reason)) == ("failed", True)
    assert d.choose(problem(m=128), settings()).candidate.kernel.name == "narrow"


def test_the_memory_of_a_launcher_is_for_calls_in_every_mode() -> None:
    """Torch refuses to write to a tensor of inference mode outside of it."""

    class Scratch(FakeKernel):
        def bind(self, problem: Any, config: FakeConfig) -> Any:
            scratch = torch.empty(problem.m, problem.n)
            return lambda a, b, *_: torch.mm(a, b, out=scratch)

    with torch.inference_mode():
        launch: Any = CheckedKernel(Scratch("k"), Source("p")).bind(problem(8, 4, 6), FakeConfig())
    a, b = torch.randn(8, 6), torch.randn(6, 4)
    torch.testing.assert_close(launch(a, b), a @ b)


def test_a_bind_that_fails_names_the_kernel_and_the_line_of_its_author() -> None:
    class Lame(FakeKernel):
        def bind(self, problem: Any, config: FakeConfig) -> Any:
            tiles: dict[str, int] = {}
            return tiles["BLOCK_M"]

    line = inspect.getsourcelines(Lame.bind)[1] + 2
    with pytest.raises(PluginError) as caught:
        CheckedKernel(Lame("lame"), Source("mine")).bind(problem(), FakeConfig())
    assert str(caught.value) == (
        f"kernel 'lame' of plugin 'mine': bind raised KeyError: 'BLOCK_M' ({__file__}:{line})"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    for error in (torch.OutOfMemoryError("no room"), ConfigError("no such tile")):
        with pytest.raises(type(error), match=r"^no "):
            CheckedKernel(FakeKernel("k", bind_error=error), Source("mine")).bind(
                problem(), FakeConfig()
            )


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("where", ["bind", "verified", "timed"])
def test_an_exception_that_would_end_the_process_costs_one_candidate(
    error: BaseException, where: str
) -> None:
    launches = itertools.count(1)

    class Leaves(FakeKernel):
        def bind(self, problem: Any, config: FakeConfig) -> Any:
            if where == "bind" and config.tile == 2:
                raise error
            launch = super().bind(problem, config)

            def leaving(*arguments: Any) -> Any:
                if config.tile == 2 and where == "verified":
                    raise error
                if config.tile == 2 and where == "timed" and next(launches) == 3:
                    raise error
                return launch(*arguments)

            leaving.cost = launch.cost  # type: ignore[attr-defined]
            return leaving

    class Launching(FakeTimer):
        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            for run in runs:
                run(0)
            return super().measure(runs, rounds, **chain)

    timer = Launching({"blas": 10.0, "leaves": 5.0})
    leaves = CheckedKernel(Leaves("leaves", tiles=(1, 2)), Source("p"))
    record = Tuner(timer).tune(problem(), [FakeBlas(), leaves], settings())
    mine = {c.config["tile"]: c for c in record.candidates if c.kernel == "leaves"}
    assert leaves.fault is None
    assert (mine[1].status, mine[2].status) == ("ok", "failed")
    assert type(error).__name__ in str(mine[2].reason)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_a_launch_that_would_end_the_process_is_quarantined(error: BaseException) -> None:
    def leave(out: torch.Tensor) -> torch.Tensor:
        raise error

    registry = dispatch.default_dispatcher().registry
    registry.register(plugin(FakeKernel("test.bad", spoil=leave, estimate=1e-9)), "bad")
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    with (
        tmm_core.override(kernel="test.bad"),
        pytest.raises(PluginError, match=r"test\.bad raised"),
    ):
        tmm_core.matmul(a, b)
    registry.register(plugin(FakeKernel("test.worse", spoil=leave)), "worse")
    with tmm_core.override(verify=False):  # else its verification raises
        chosen = tmm_core.plan(a, b, kernel="test.worse")
    object.__setattr__(chosen.choice, "origin", "heuristic")
    with pytest.warns(TmmWarning, match=f"test.worse failed .*{type(error).__name__}"):
        assert warm.quarantine(chosen, error)


@pytest.mark.parametrize(
    "query",
    ["declines", "configs", "default_config", "estimate_us", "workspace_bytes", "bind"],
)
def test_ctrl_c_stops_at_once(query: str) -> None:
    bad = strange(query, raiser(KeyboardInterrupt()))
    d, _ = dispatcher(FakeBlas(), bad, times={"strange": 1.0, "blas": 10.0})
    with pytest.raises(KeyboardInterrupt):
        d.choose(problem(), settings())


def test_many_threads_get_one_warning() -> None:
    checked = CheckedKernel(strange("estimate_us", lambda *_: -1), Source("p"))
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        assert checked.estimate_us(problem(), FakeConfig()) is None

    threads = [threading.Thread(target=ask) for _ in range(8)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.warns(TmmWarning) as caught:
        run()
    assert len(caught) == 1


def test_the_first_reason_is_the_one_that_stays() -> None:
    checked = CheckedKernel(FakeKernel("fake.checked"), Source("p"))
    with pytest.warns(TmmWarning, match="set aside: first") as caught:
        raised = [str(checked.set_aside(why)) for why in ("first", "second")]
    assert len(caught) == 1
    assert {checked.fault, *raised} == {raised[0]}
    assert "second" not in raised[0]


# -- as installed -------------------------------------------------------------------------

PLUGINS = {
    "in_launch": """
import os, sys
sys.path.insert(0, {here!r})
from fakes import FakeKernel, plugin
hooks = plugin(FakeKernel("in_launch.one", spoil=lambda out: os._exit(9)))
""",
    "at_import": "import sys\nsys.exit('at import')\n",
    "in_hook": """
import sys
from tmm_core import hookimpl
@hookimpl
def tmm_kernels(): sys.exit("in hook")
""",
    "in_dir": """
class Plugin:
    def __dir__(self): raise SystemExit("in dir")
hooks = Plugin()
""",
    "in_kernel": """
import sys
sys.path.insert(0, {here!r})
from fakes import FakeKernel, plugin
class Kernel(FakeKernel):
    def declines(self, problem): sys.exit("in declines")
hooks = plugin(Kernel("in_kernel.one"))
""",
}


@pytest.mark.slow
def test_the_commands_speak_of_plugins_that_would_end_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in PLUGINS.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        hooks = ":hooks" if "hooks =" in source else ""
        (info / "entry_points.txt").write_text(f"[tmm_core]\n{name} = {name}_plugin{hooks}\n")
        (tmp_path / f"{name}_plugin.py").write_text(source.replace("{here!r}", repr(str(HERE))))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TMM_PLUGINS": ",".join(["blas", *PLUGINS]),
    }  # fmt: skip

    def command(*arguments: str) -> Any:
        run = [sys.executable, "-W", "ignore", "-m", "tmm_base.tmm", *arguments, "--json"]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
        return json.loads(done.stdout)

    reasons = {line["plugin"]: line["disabled"] for line in command("kernels")}
    assert reasons.pop("blas") is None
    assert reasons.pop("triton") == "not in TMM_PLUGINS"
    assert reasons.pop("in_kernel") is None  # it was not queried yet
    assert reasons.pop("in_launch") is None
    assert reasons == {
        "at_import": "import failed: SystemExit: at import",
        "in_hook": "tmm_kernels failed: SystemExit: in hook",
        "in_dir": "cannot be registered: SystemExit: in dir",
    }
    findings = command("doctor", "--device", "cpu")
    problems = " ".join(each["text"] for each in findings if each["state"] == "problem")
    for name in PLUGINS:
        distribution = name.replace("_", "-")
        assert f"'{name}' ({distribution} 1.0)" in problems or name == "in_launch", problems
    assert "its first launch: the process ended with exit code 9" in problems
    assert f"in_kernel_plugin.py:{6}" in problems
    assert any(each["text"] == "blas runs and is correct" for each in findings)
