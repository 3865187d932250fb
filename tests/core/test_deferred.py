"""Kernels that are imported when they are asked for, and the notes that spare the asking."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import FakeBlas, FakeKernel, problem, settings
from tmm_cache import CacheStore

import tmm_core
from tmm_core import Deferred, Kernel, PluginError, TmmWarning, UnknownNameError, errors
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.registry.deferred import Answers, own_files
from tmm_core.registry.registry import Registry
from tmm_core.tuning import findings
from tmm_core.tuning.tuner import Tuner

PROBLEM = problem()


class Loaded:
    """A deferred kernel, and how often it was loaded."""

    def __init__(self, kernel: Kernel[Any], file: Path, circumstances: Any = None) -> None:
        self.kernel, self.times = kernel, 0
        self.deferred = Deferred(kernel.name, self.load, lambda: [file], lambda: circumstances)

    def load(self) -> Kernel[Any]:
        self.times += 1
        return self.kernel


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text("1")
    return path


Process = Callable[..., tuple[Dispatcher, list[Loaded]]]


@pytest.fixture
def process(tmp_path: Path, file: Path) -> Process:
    """A process on the one cache: its dispatcher, over these kernels, and these kernels."""

    def start(*kernels: FakeKernel, **times: float) -> tuple[Dispatcher, list[Loaded]]:
        deferred = [Loaded(kernel, file) for kernel in kernels]
        registry = Registry()
        registry.register(fakes.plugin(FakeBlas(), *(d.deferred for d in deferred)), "fakes")  # type: ignore[arg-type]
        tuner = Tuner(fakes.FakeTimer({"blas": 5.0, **times}))
        return Dispatcher(registry, tuner, CacheStore(tmp_path / "cache", [])), deferred

    return start


def test_a_process_that_finds_blas_on_record_loads_nothing_else(process: Process) -> None:
    declines = FakeKernel("declines", against=lambda p: ["no"])
    first, kernels = process(FakeKernel("k"), declines, k=9.0)
    assert first.choose(PROBLEM, settings()).origin == "tuned"
    assert [k.times for k in kernels] == [1, 1]
    second, kernels = process(FakeKernel("k"), declines)
    choice = second.choose(PROBLEM, settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "cache")
    assert [k.times for k in kernels] == [0, 0]
    # Another problem was not asked about: all are.
    second.choose(problem(k=32), settings())
    assert [k.times for k in kernels] == [1, 1]


def test_of_deferred_kernels_the_winner_alone_is_loaded(process: Process) -> None:
    process(FakeKernel("k"), FakeKernel("other"), k=1.0)[0].choose(PROBLEM, settings())
    dispatcher, kernels = process(FakeKernel("k"), FakeKernel("other"))
    choice = dispatcher.choose(PROBLEM, settings())
    assert choice.candidate.kernel.kernel is kernels[0].kernel  # type: ignore[attr-defined]
    assert [k.times for k in kernels] == [1, 0]
    # The bucket's record answers for a size that was asked about.
    first, _ = process(FakeKernel("k"), FakeKernel("other"))
    first.choose(problem(m=63), settings())
    dispatcher, kernels = process(FakeKernel("k"), FakeKernel("other"))
    choice = dispatcher.choose(problem(m=63), settings())
    assert (choice.candidate.kernel.name, choice.evidence) == ("k", PROBLEM)
    assert [k.times for k in kernels] == [1, 0]


def test_what_nobody_else_can_serve_loads_nothing(process: Process) -> None:
    never = FakeKernel("never", against=lambda p: ["no"])
    process(never)[0].choose(PROBLEM, settings())
    dispatcher, kernels = process(never)
    assert dispatcher.choose(PROBLEM, settings()).origin == "fallback"
    assert not kernels[0].times


def test_a_kernel_that_declines_by_now_is_not_chosen(process: Process) -> None:
    process(FakeKernel("k"), k=1.0)[0].choose(PROBLEM, settings())
    dispatcher, _ = process(FakeKernel("k", against=lambda p: ["not any more"]))
    assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "blas"


def test_a_winner_that_cannot_be_loaded_any_more_costs_itself(process: Process) -> None:
    process(FakeKernel("k"), k=1.0)[0].choose(PROBLEM, settings())
    dispatcher, (winner,) = process(FakeKernel("k"))
    winner.kernel = FakeKernel("renamed")
    with pytest.warns(TmmWarning, match="turned out to be 'renamed'"):
        assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "blas"


def test_another_version_is_timed_anew(process: Process, file: Path) -> None:
    process(FakeKernel("k"), k=1.0)[0].choose(PROBLEM, settings())
    file.write_text("22")
    dispatcher, _ = process(FakeKernel("k", version="2"), k=9.0)
    choice = dispatcher.choose(PROBLEM, settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "tuned")
    # Also one whose files say nothing of it: it is looked at before it is launched.
    dispatcher, _ = process(FakeKernel("k", version="3"), k=1.0)
    assert (
        dispatcher.choose(PROBLEM, settings(disable=frozenset({"triton.pointwise"}))).origin
        == "tuned"
    )


def test_a_kernel_that_came_later_is_timed(process: Process) -> None:
    process(FakeKernel("k"), k=9.0)[0].choose(PROBLEM, settings())
    dispatcher, _ = process(FakeKernel("k"), FakeKernel("new"), k=9.0, new=1.0)
    assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "new"


def test_a_kernel_registered_by_hand_is_timed(process: Process, file: Path) -> None:
    process(FakeKernel("k"), k=9.0)[0].choose(PROBLEM, settings())
    dispatcher, kernels = process(FakeKernel("k"), k=9.0, new=1.0)
    dispatcher.choose(PROBLEM, settings())
    assert not kernels[0].times
    dispatcher.registry.register(fakes.plugin(Loaded(FakeKernel("new"), file).deferred), "new")  # type: ignore[arg-type]
    assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "new"


def test_requirements_and_disabled_kernels_are_asked_for_apart(process: Process) -> None:
    process(FakeKernel("k"), k=1.0)[0].choose(PROBLEM, settings())
    dispatcher, _ = process(FakeKernel("k"))
    choice = dispatcher.choose(PROBLEM, settings(disable=frozenset({"k"})))
    assert choice.candidate.kernel.name == "blas"
    assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "k"


def test_answers_are_of_files_and_circumstances_as_they_are(file: Path, tmp_path: Path) -> None:
    k = FakeKernel("k")

    def answers(circumstances: Any = None) -> Answers:
        return Answers({"k": Loaded(k, file, circumstances).deferred}, tmp_path)

    answers().add(PROBLEM, settings(), [k, FakeBlas()])
    assert answers().get(PROBLEM, settings()) == {("k", "1")}
    assert answers().get(problem(k=32), settings()) is None
    assert answers("no compiler").get(PROBLEM, settings()) is None
    # Times of last change tell even where the size and the other time are restored.
    before = os.stat(file)
    file.write_text("2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert answers().get(PROBLEM, settings()) is None
    file.unlink()
    assert answers().get(PROBLEM, settings()) is None
    answers(object()).add(PROBLEM, settings(), [k])  # is not JSON: nothing is noted
    assert answers(object()).get(PROBLEM, settings()) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x00\xff",
        b"[[]]\n{}\n7",
        None,
        b'["%s", [["k"]]]',
        b'["%s", [["k", 1]]]',
        b'["%s", 7]',
    ],
)
def test_damaged_notes_cost_the_asking(process: Process, tmp_path: Path, damage: Any) -> None:
    process(FakeKernel("k"), k=9.0)[0].choose(PROBLEM, settings())
    (path,) = (tmp_path / "cache" / "notes").iterdir()
    about = json.loads(path.read_text())[0].encode()
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage.replace(b"%s", about))
    dispatcher, kernels = process(FakeKernel("k"))
    assert dispatcher.choose(PROBLEM, settings()).origin == "cache"
    assert kernels[0].times == 1
    dispatcher, kernels = process(FakeKernel("k"))
    dispatcher.choose(PROBLEM, settings())
    assert kernels[0].times == 0


def test_a_folder_that_cannot_be_written_costs_the_asking(process: Process, tmp_path: Path) -> None:
    process(FakeKernel("k"), k=9.0)[0].choose(PROBLEM, settings())
    notes = tmp_path / "cache" / "notes"
    for path in notes.iterdir():
        path.unlink()
    notes.rmdir()
    notes.write_text("in the way")
    for _ in range(2):
        dispatcher, kernels = process(FakeKernel("k"))
        assert dispatcher.choose(PROBLEM, settings()).origin == "cache"
        assert kernels[0].times == 1


def test_a_kernel_that_cannot_be_loaded_costs_itself(file: Path) -> None:
    def fail() -> Kernel[Any]:
        raise ImportError("no such thing")

    bad = [Deferred("bad", fail, lambda: [file])]
    bad += [Deferred("two", lambda: FakeKernel("one"), lambda: [file])]
    registry = Registry()
    registry.register(fakes.plugin(FakeBlas(), *bad), "fakes")  # type: ignore[arg-type]
    with (
        pytest.warns(TmmWarning, match="'bad' failed to load: ImportError: no such thing"),
        pytest.raises(UnknownNameError, match="bad"),
    ):
        registry.kernel("bad")
    # The plugin has had its warning.
    assert [kernel.name for kernel in registry.kernels()] == ["blas"]
    _, fault = registry.faults()
    assert "'two' turned out to be 'one'" in fault.reason
    with pytest.raises(PluginError, match="already registered"):
        registry.register(fakes.plugin(Deferred("blas", fail, lambda: [file])), "more")  # type: ignore[arg-type]


COLD = """
import os, sys
import torch, tmm_core
from tmm_core import dispatch, errors
from tmm_cache import CandidateResult, TuningRecord

a = torch.randn(16, 16)
tmm_core.settings.override  # settings are read
posed = tmm_core.problem(a, a)
assert "triton" not in sys.modules and "pluggy" in sys.modules
chooser = dispatch.default_dispatcher()
if sys.argv[1] == "record":
    able, _ = chooser.registry.candidates(posed, tmm_core.settings.current())
    assert len(able) > 3
    results = [
        CandidateResult(k.name, k.version, k.default_config(posed).to_json(), "ok", (9.0,))
        for k in able
    ]
    winner = [r.kernel for r in results].index(sys.argv[2])
    now = "2026-01-01T00:00:00Z"
    record = TuningRecord(posed.to_json(), winner, tuple(results), now, 1.0)
    chooser.store.save(posed.device.gpu, posed.device.environment, record)
choice = chooser.choose(posed, tmm_core.settings.current())
assert choice.candidate.kernel.name == sys.argv[2], choice
torch.testing.assert_close(tmm_core.matmul(a, a), a @ a)
parts = ("compil", "rotation", "special", "t", "verif")
ours = ("tmm_triton.", *(f"tmm_core.dispatch.{part}" for part in parts))
print(*sorted(name for name in sys.modules if name == "triton" or name.startswith(ours)))
"""


@pytest.mark.parametrize("winner", ["blas", "triton.naive"])
def test_a_process_that_replays_imports_what_it_replays(tmp_path: Path, winner: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TMM_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}

    def process(*arguments: str) -> set[str]:
        code = textwrap.dedent(COLD)
        command = [sys.executable, "-c", code, *arguments, winner]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert "tmm_triton.hopper.warp_specialized" in process("record")
    imported = process("replay")
    if winner == "blas":
        assert imported == {"tmm_core.dispatch.first_use", "tmm_triton.plugin"}
    else:
        kernels = {"tmm_triton.naive", "tmm_triton.triton_kernel", "tmm_triton.operands"}
        assert kernels | {"triton"} <= imported
        assert not {"tmm_triton.tiled", "tmm_triton.hopper.warp_specialized"} & imported
        assert not {"tmm_core.tuning.tuner", "tmm_core.tuning.timing"} & imported


def test_an_answer_depends_on_tmms_own_code() -> None:
    core = Path(tmm_core.__file__).parent
    own = {path.relative_to(core).as_posix() for path in own_files()}
    assert {
        "settings.py",
        "spec/problem.py",
        "launch/check.py",
        "registry/registry.py",
        "triton/launcher_codegen.py",
    } <= own
    assert not {name for name in own if name.startswith(("bench/", "nn/", "testing/", "tools/"))}


def test_folders_in_folders_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("top.py", "dispatch/one.py", "dispatch/deep/two.py", "tools/deep/three.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr("tmm_core.registry.deferred._CORE", tmp_path)
    found = {path.relative_to(tmp_path).as_posix() for path in own_files()}
    assert found == {"top.py", "dispatch/one.py", "dispatch/deep/two.py"}


def test_the_garbage_collector_is_left_as_it_was(file: Path) -> None:
    seen: list[bool] = []

    def load() -> Kernel[Any]:
        seen.append(gc.isenabled())
        raise ImportError

    for enabled in (True, False):
        errors._faults.clear()
        registry = Registry()
        registry.register(fakes.plugin(Deferred("k", load, lambda: [file])), "fakes")  # type: ignore[arg-type]
        try:
            if not enabled:
                gc.disable()
            with pytest.warns(TmmWarning, match="failed to load"):
                registry.kernels()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
    assert seen == [False, False]


def test_kernels_left_untried_are_told_of_by_a_process_that_loads_none(process: Process) -> None:
    class Untried(FakeKernel):
        def bind(self, problem: Any, config: fakes.FakeConfig) -> Any:
            raise FileNotFoundError("no ptxas here")

    first, _ = process(Untried("k"))
    with pytest.warns(TmmWarning, match="no ptxas here"):
        first.choose(PROBLEM, settings())
    findings._warned.clear()  # as in a new process
    second, kernels = process(Untried("k"))
    with pytest.warns(TmmWarning, match="no ptxas here"):
        choice = second.choose(PROBLEM, settings())
    assert (choice.candidate.kernel.name, kernels[0].times) == ("blas", 0)
