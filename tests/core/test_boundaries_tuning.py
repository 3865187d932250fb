"""Values at and next to each limit of the parts of tuning: causes, notes, ranking, copies,
progress."""

from __future__ import annotations

import contextlib
import errno
import importlib.machinery
import math
import subprocess
import sys
import time
import types
import warnings
from collections import Counter
from concurrent.futures import BrokenExecutor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import (
    DEVICE,
    FakeBlas,
    FakeConfig,
    FakeKernel,
    dispatcher,
    problem,
    settings,
    unmeasured,
)
from msgspec.structs import replace as revised
from test_progress import Stream
from test_tuner import result
from tmm_cache import CacheStore, TuningRecord

from tmm_core import (
    CacheMissError,
    ConfigError,
    Groups,
    Operand,
    PluginError,
    TmmWarning,
    UnsupportedProblemError,
)
from tmm_core.dispatch.lookup import Lookup
from tmm_core.registry import query
from tmm_core.registry.places import place_of
from tmm_core.registry.query import CheckedKernel
from tmm_core.registry.registry import Registry, Source
from tmm_core.spec import toolchain
from tmm_core.spec.kernel import Candidate
from tmm_core.tuning import (
    cold_operands,
    compile_pool,
    findings,
    progress,
    ranking,
    timing,
    untried,
)
from tmm_core.tuning.candidate_launchers import CandidateLaunchers
from tmm_core.tuning.candidate_run import CandidateRun
from tmm_core.tuning.cold_operands import copies, rotated, rotating
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.search import estimate_us
from tmm_core.tuning.untried import Noted, Obstacle, Untried
from tmm_core.verify.environment_faults import (
    BUDGET_ENDED,
    alike,
    cause_of,
    cause_of_text,
    common,
    verdicts,
)
from tmm_core.verify.ragged_inputs import SIZE_SAMPLES

CPU = torch.device("cpu")
GPU = replace(DEVICE, type="cuda", l2=50 << 20, interpreted=False)


# -- what failed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("CUDA out of memory", "passing"),
        ("torch.OutOfMemoryError: x", "passing"),
        ("MemoryError", "passing"),
        ("CUBLAS_STATUS_ALLOC_FAILED", "passing"),
        ("cannot be verified within 12.5 MiB", "passing"),
        ("No space left on device", "passing"),
        ("Disk quota exceeded", "passing"),
        ("Cannot allocate memory", "passing"),
        ("Too many open files", "passing"),
        ("RuntimeError: can't start new thread", "passing"),
        ("Resource temporarily unavailable", "passing"),
        ("Input/output error", "passing"),
        ("died (signal 9, SIGKILL)", "passing"),
        ("died (signal 15, SIGTERM)", "passing"),
        ("died (signal 2, SIGINT)", "passing"),
        ("died (signal 1, SIGHUP)", "passing"),
        ("died (signal 3, SIGQUIT)", "passing"),
        ("died (signal 24, SIGXCPU)", "passing"),
        ("died (signal 11, SIGSEGV)", None),
        ("`ptxas` failed with error code -9", "passing"),
        ("`ptxas` failed with error code -11", None),
        ("BrokenProcessPool: x", "passing"),
        ("BrokenExecutor: x", "passing"),
        ("`ptxas` failed with error code 127", "toolchain"),
        ("`ptxas` failed with error code 126", "toolchain"),
        ("`ptxas` failed with error code 255", None),
        ("Cannot find ptxas", "toolchain"),
        ("Cannot find `cuobjdump", "toolchain"),
        ("Failed to find C compiler", "toolchain"),
        ("needs Python.h", "toolchain"),
        ("needs a C compiler", "toolchain"),
        ("FileNotFoundError: x", "toolchain"),
        ("PermissionError: x", "toolchain"),
        ("NotADirectoryError: x", "toolchain"),
        ("No such file or directory", "toolchain"),
        ("Permission denied", "toolchain"),
        ("Read-only file system", "toolchain"),
        ("Exec format error", "toolchain"),
        ("No usable temporary directory", "toolchain"),
        ("ModuleNotFoundError: x", "toolchain"),
        ("ImportError: x", "toolchain"),
        ("x.so: cannot open shared object file", "toolchain"),
        ("libcuda.so.1 cannot found", "toolchain"),
        ("OSError: /tmp/x.so: file too short", "toolchain"),
        ("OSError: /tmp/x.so: invalid ELF header", "toolchain"),
        ("OSError: x.so: wrong ELF class: ELFCLASS32", "toolchain"),
        ("x.so: failed to map segment from shared object: Operation not permitted", "toolchain"),
        ("x.so: cannot enable executable stack as shared object requires", "toolchain"),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found (required by x.so)", "toolchain"),
        ("OSError: x.so: undefined symbol: cublasLtMatmul", "toolchain"),
        ("AttributeError: x.so: undefined symbol: f", None),
        ("Triton only support CUDA 10.0 or higher, but got CUDA version: 9.0", "toolchain"),
        ("CalledProcessError: x", "toolchain"),
        ("0 active drivers ([])", "toolchain"),
        ("no CUDA-capable device is detected", "toolchain"),
        ("driver version is insufficient", "toolchain"),
        ("did not compile within 60 s", "hung"),
        ("did not bind within 60 s", "hung"),
        ("its compiler died (signal 11)", "hung"),
        ("`ptxas` raised SIGSEGV", "hung"),
        ("the tuning budget ended before it", "budget"),
        ("", None),
        ("wrong by 0.5", None),
        ("CompilationError: at 3:4", None),
    ],
)
def test_texts_of_faults_of_the_machine(text: str, cause: str | None) -> None:
    assert cause_of_text(text) == cause
    assert cause_of_text(f"it failed: {text} (/x.py:3)") == cause


def raised_in(module: str, error: BaseException) -> BaseException:
    """Return the error with a traceback into this module."""
    scope: dict[str, Any] = {"__name__": module, "error": error}
    exec("def fail():\n    raise error\n", scope)
    try:
        scope["fail"]()
    except BaseException as raised:
        return raised
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "passing"),
        (torch.OutOfMemoryError("x"), "passing"),
        (BrokenExecutor("x"), "passing"),
        (BrokenProcessPool("x"), "passing"),
        (subprocess.TimeoutExpired("x", 1), "hung"),
        (subprocess.CalledProcessError(-9, "x"), "passing"),
        (subprocess.CalledProcessError(0, "x"), "toolchain"),
        (subprocess.CalledProcessError(1, "x"), "toolchain"),
        *(
            (OSError(getattr(errno, name), "x"), "passing")
            for name in ("ENOMEM", "ENOSPC", "EDQUOT", "EAGAIN", "EMFILE", "ENFILE", "EINTR",
                         "EBUSY", "ETXTBSY", "ESTALE", "EIO")
        ),
        (OSError(errno.ENOENT, "x"), "toolchain"),
        (OSError(errno.EACCES, "x"), "toolchain"),
        (OSError("without a number"), None),
        (ImportError("x"), "toolchain"),
        (ValueError("x"), None),
        *(
            (raised_in(module, RuntimeError("x")), "toolchain")
            for module in ("triton.knobs", "triton.runtime.build", "triton.runtime.cache",
                           "triton.runtime.driver", "triton.backends.driver",
                           "triton.backends.nvidia.driver", "triton.backends.amd.driver",
                           "subprocess", "tempfile")
        ),
        (raised_in("triton.compiler.code_generator", RuntimeError("x")), None),
        (raised_in("triton.backends.nvidia.compiler", RuntimeError("x")), None),
    ],
)  # fmt: skip
def test_errors_of_the_machine_by_their_type_and_place(
    error: BaseException, cause: str | None
) -> None:
    assert cause_of(error) == cause
    outer = ValueError("outer")
    outer.__cause__ = error
    assert cause_of(outer) == cause


def test_a_cause_found_by_another_process_counts_if_it_is_valid() -> None:
    error: Any = ValueError("x")
    error.cause_elsewhere = "hung"
    assert cause_of(error) == "hung"
    error.cause_elsewhere = "nonsense"
    assert cause_of(error) is None


class Elsewhere(FakeKernel):
    pass


def test_the_place_of_a_fault_is_in_the_kernels_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder whose name has the same beginning does not count."""
    module = types.ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    monkeypatch.setattr(Elsewhere, "__module__", "elsewhere")
    module.__file__, module.__package__ = str(tmp_path / "mine" / "kernel.py"), "elsewhere"
    kernel = Elsewhere("k")

    def fails(*path: str) -> BaseException:
        scope: dict[str, Any] = {}
        file = str(tmp_path.joinpath(*path))
        exec(compile("\n\ndef fail():\n    raise ValueError\n", file, "exec"), scope)
        try:
            scope["fail"]()
        except ValueError as error:
            return error
        raise AssertionError

    usual = place_of(kernel, None)
    assert ":" in usual
    assert place_of(kernel, fails("mine", "kernel.py")) == f"{tmp_path}/mine/kernel.py:4"
    assert place_of(kernel, fails("mine", "deep", "x.py")) == f"{tmp_path}/mine/deep/x.py:4"
    for folder in ("mine_too", "other"):
        assert not place_of(kernel, fails(folder, "x.py")).startswith(str(tmp_path))
    outer = ValueError()
    outer.__cause__ = fails("mine", "kernel.py")
    assert place_of(kernel, outer) == f"{tmp_path}/mine/kernel.py:4"
    module.__package__ = ""  # without a package, its folder may hold other modules
    assert place_of(kernel, fails("mine", "kernel.py")) == f"{tmp_path}/mine/kernel.py:4"
    assert place_of(kernel, fails("mine", "x.py")) == usual
    checked = CheckedKernel(kernel, Source("p"))
    assert checked._fault("bind", ValueError("x")) == f"bind raised ValueError: x ({usual})"
    with monkeypatch.context() as nowhere:
        nowhere.setattr(query, "place_of", lambda *_: "")
        assert checked._fault("bind", ValueError("x")) == "bind raised ValueError: x"
        ours = query.InvalidResultError("returned 1, not a text")
        assert checked._fault("device_text", ours) == "device_text returned 1, not a text"
    error: Any = ValueError()
    error.place = "/there.py:7"
    assert findings.placed(kernel, "it failed", error) == "it failed (/there.py:7)"
    error.place = 7
    assert findings.placed(kernel, "it failed", error) == f"it failed ({usual})"


@pytest.mark.parametrize(
    ("name", "fault", "status"),
    [
        ("k", None, "ok"), ("k", "bind returned 3", "failed"), ("blas", "bind returned 3", "ok"),
        ("blas", None, "ok"),
    ],
)  # fmt: skip
def test_a_candidate_of_a_kernel_that_was_set_aside_fails(
    name: str, fault: str | None, status: str
) -> None:
    """BLAS is always needed."""
    kernel = CheckedKernel(FakeKernel(name), Source("p"))
    run = CandidateRun(Candidate(kernel, FakeConfig()))
    run.status = "ok"
    kernel.fault = fault
    run.fail_if_set_aside()
    assert run.status == status
    assert run.reason == (fault if status == "failed" else None)


# -- several failures --------------------------------------------------------------------


def failed(kernel: str, reason: str | None, **fields: Any) -> Any:
    return revised(result(kernel, 1.0), status="failed", reason=reason, samples_us=(), **fields)


SAME = "'a' at /x/y.py:3 needs 0x1f of 12"


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ([failed("a", SAME), failed("b", "'b' at /z.py:4 needs 0x2 of 7")], True),
        ([failed("a", SAME), failed("a", SAME)], False),
        ([failed("a", SAME), failed("b", "another")], False),
        ([failed("a", SAME), failed("b", SAME), result("c", 1.0)], False),
        ([failed("a", SAME), failed("b", SAME), result("blas", 1.0)], True),
        ([failed("a", ""), failed("b", "")], False),
        ([failed("a", None), failed("b", None)], False),
        ([failed("a", SAME), failed("b", SAME), failed("c", "expects to take 3 µs")], True),
        ([failed("a", SAME), failed("b", SAME), failed("c", "its search space is empty")], True),
        ([failed(kernel, "PluginError: its search space is empty") for kernel in "ab"], False),
        ([failed("a", SAME), failed("b", SAME), failed("c", "not tried: x")], True),
        ([failed("a", SAME), failed("b", "not tried: x")], False),
        ([failed("a", BUDGET_ENDED), failed("b", BUDGET_ENDED)], False),
        ([failed("a", SAME), failed("b", SAME), failed("c", BUDGET_ENDED)], True),
        ([], False),
    ],
)
def test_two_kernels_that_fail_alike_are_not_at_fault(results: Any, found: bool) -> None:
    assert alike(results) is found


def test_the_common_part_of_reasons() -> None:
    assert common("PluginError: kernel a.b: bind raised X: no") == "X: no"
    assert common("PluginError: kernel a: compile raised X: no\nmore") == "X: no"
    assert common("its first launch raised X: no") == "X: no"
    assert common("X: \"a\" `b` 'c' (/d e) /f:3, 0xff 12") == "X: … … … … …:…, … …"


def test_only_failures_of_kernels_are_verdicts() -> None:
    kept = [result("a", 1.0), revised(result("b", 1.0), status="wrong"), failed("c", "its own"),
            failed("d", "the tuning budget ended before it"), failed("e", None)]  # fmt: skip
    dropped = [failed("f", "CUDA out of memory"), failed("g", "did not compile within 60 s")]
    assert verdicts([*kept, *dropped]) == kept
    blas, skipped = result("blas", 1.0), failed("c", "expects to take 3 µs")
    assert verdicts([failed("a", SAME), failed("b", SAME), blas, skipped]) == [blas, skipped]


# -- findings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ("passing", "toolchain", "toolchain"), ("toolchain", "passing", "toolchain"),
        ("alike", "passing", "passing"), ("hung", "alike", "alike"), ("budget", "hung", "hung"),
        ("hung", "budget", "hung"),
    ],
)  # fmt: skip
def test_the_most_severe_cause_of_a_kernel_is_kept(first: Any, second: Any, kept: str) -> None:
    found, kernel = Findings(), FakeKernel("k")
    found.leave(kernel, Obstacle(first, "1"))
    found.leave(kernel, Obstacle(second, "2"))
    assert found.left[("k", "1")].cause == kept
    found.leave(kernel, Obstacle(kept, "3"))  # type: ignore[arg-type]
    assert found.left[("k", "1")].reason != "3"


def warnings_of(left: dict[Any, Obstacle], **more: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        findings.warn_of_environment(left, "P", **more)
    return [str(each.message) for each in caught if issubclass(each.category, TmmWarning)]


def test_a_kernel_that_was_set_aside_is_not_warned_of_again() -> None:
    found, kernel = Findings(), CheckedKernel(FakeKernel("k"), Source("p"))
    kernel.fault = "it wrote beyond its output"
    found.leave(kernel, Obstacle("toolchain", "no ptxas"))
    found.report("P")  # warnings are errors
    assert list(found.left) == [("k", kernel.version)]
    kernel.fault = None
    found = Findings()
    found.leave(kernel, Obstacle("toolchain", "no ptxas"))
    with pytest.warns(TmmWarning, match="kept tmm from trying kernel k for P"):
        found.report("P")


def test_one_warning_of_the_environment_names_the_most_severe() -> None:
    left = {
        ("a", "1"): Obstacle("passing", "no memory"),
        ("b", "1"): Obstacle("toolchain", "no\n ptxas"),
        ("b", "2"): Obstacle("toolchain", "no ptxas"),
        ("c", "1"): Obstacle("hung", "hung"),
    }
    assert (
        warnings_of({("c", "1"): Obstacle("hung", "x"), ("d", "1"): Obstacle("budget", "x")}) == []
    )
    (text,) = warnings_of(left)
    assert text.startswith(
        "this machine kept tmm from trying kernel b and 1 more kernels for P: no ptxas. "
    )
    assert "tried again when the toolchain changes. Run `tmm doctor`" in text
    assert warnings_of(left) == []
    findings._warned.clear()
    (text,) = warnings_of({("a", "1"): Obstacle("passing", "x" * 401)})
    assert f"kernel a for P: {'x' * 400}…. " in text
    assert "tried again later" in text
    findings._warned.clear()
    (text,) = warnings_of({("a", "1"): Obstacle("alike", "y" * 400)}, causes=("alike",))
    assert f": {'y' * 400}. " in text


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConfigError("x"), True), (UnsupportedProblemError("x"), True), (PluginError("x"), False),
        (type("OutOfResources", (Exception,), {})("x"), True), (ValueError("x"), False),
    ],
)  # fmt: skip
def test_a_refusal_is_not_a_fault(error: BaseException, refused: bool) -> None:
    assert findings.refuses(error) is refused
    outer = ValueError("outer")
    outer.__cause__ = error
    assert findings.refuses(outer) is refused


def test_a_reason_has_its_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "place_of", lambda kernel, raised: "/x.py:3")
    assert findings.placed(FakeKernel("k"), "it failed", None) == "it failed (/x.py:3)"
    assert findings.placed(FakeKernel("k"), "at /x.py:3", None) == "at /x.py:3"
    monkeypatch.setattr(findings, "place_of", lambda kernel, raised: "")
    assert findings.placed(FakeKernel("k"), "it failed", None) == "it failed"


# -- notes of what is untried ------------------------------------------------------------


A, B = ("a", "1"), ("b", "1")
NOTED = Noted({A: Obstacle("toolchain", "t"), B: Obstacle("passing", "p")}, {"here": 1})


@pytest.mark.parametrize(
    ("fingerprint", "count", "here", "again"),
    [
        ("other", 1, False, {A, B}), ("other", 1, True, {A, B}), ("here", 1, False, {B}),
        ("here", 1, True, set()), ("here", 2, False, {B}), ("here", 3, False, set()),
    ],
)  # fmt: skip
def test_which_kernels_are_tried_again(
    fingerprint: str, count: int, here: bool, again: set[Any]
) -> None:
    noted = replace(NOTED, tried={"here": count})
    assert noted.again(fingerprint, here) == again


def test_notes_survive_json_and_nonsense_is_ignored() -> None:
    assert Noted.from_json(NOTED.to_json()) == NOTED
    bad = NOTED.to_json()
    assert isinstance(bad, dict)
    for document in (
        None, [], 3, {}, {**bad, "kernels": 3}, {**bad, "tried": 3}, {**bad, "tried": {"a": "x"}},
        {**bad, "tried": {"a": math.inf}}, {**bad, "tried": {"a": []}},
        {**bad, "kernels": [["toolchain", "t"]]}, {**bad, "kernels": [["toolchain", "t", [3]]]},
    ):  # fmt: skip
        assert Noted.from_json(document) is None
    unknown = {**bad, "kernels": [["novel", "t", [["a", "1"]]], ["hung", "h", [["b", "1"]]]]}
    assert Noted.from_json(unknown) == Noted({B: Obstacle("hung", "h")}, {"here": 1})


def test_a_note_holds_the_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = ["one"]
    monkeypatch.setattr(toolchain, "fingerprint", lambda: now[0])
    key = problem()
    mine = Untried(CacheStore(tmp_path))
    mine.note(key, {A}, {})
    assert mine.get(key) is None
    now[0] = "before"
    assert not mine.changed()  # the tuning left no candidate untried
    now[0] = "one"
    mine.note(key, {A, B}, {A: Obstacle("toolchain", "x" * 5000), B: Obstacle("passing", "p")})
    noted = mine.get(key)
    assert noted is not None
    assert noted.tried == {"one": 1}
    assert 100 < len(noted.kernels[A].reason) < 5000
    assert mine.left(key) == ({A, B}, frozenset())
    other = Untried(CacheStore(tmp_path))
    assert other.left(key) == ({A}, {B})
    assert not mine.changed()
    now[0] = "two"
    assert (mine.changed(), mine.changed()) == (True, False)
    assert mine.left(key) == (frozenset(), {A, B})
    mine.note(key, {A}, {})
    assert mine.get(key) == Noted({B: Obstacle("passing", "p")}, {"one": 1, "two": 1})
    assert Untried(CacheStore(tmp_path)).get(key) == mine.get(key)
    assert [each.kernels.keys() for each in other.of_device(key.device)] == [{B}]
    mine.note(key, {B}, {})
    assert other.of_device(key.device) == []
    assert other.left(problem(m=1)) == (frozenset(), frozenset())


def test_kernels_on_which_a_record_has_no_verdict() -> None:
    kernels = [FakeKernel("a"), FakeKernel("b"), FakeKernel("c")]
    ended = failed("c", untried.BUDGET_ENDED)
    record = TuningRecord(
        problem().to_json(), 0, (result("blas", 1.0), result("a", 1.0), ended),
        "2026-01-01T00:00:00Z", 1.0,
    )  # fmt: skip

    def names(**more: Any) -> list[str]:
        return [kernel.name for kernel in unmeasured(problem(), kernels, record, **more)]

    assert unmeasured(problem(), kernels, None) == kernels
    assert names() == ["b"]
    assert names(resume=True) == ["b", "c"]
    assert names(left=({B}, ())) == []
    assert names(left=((), {A})) == ["a", "b"]
    assert names(left=({B}, ()), resume=True) == ["b", "c"]
    kernels[0].__dict__["version"] = "2"
    assert names() == ["a", "b"]


# -- ranking -----------------------------------------------------------------------------


def recorded(*candidates: Any, **sizes: int) -> TuningRecord:
    return TuningRecord(
        problem(**sizes).to_json(), 0, candidates, "2026-01-01T00:00:00Z", 1.0
    )  # fmt: skip


@pytest.mark.parametrize(
    ("blas", "kernel", "steady", "wins"),
    [
        (100.0, 98.9, None, True), (100.0, 99.0, None, True), (100.0, 99.1, None, False),
        (100.0, 90.0, 102.0, True), (100.0, 90.0, 102.1, False), (100.0, 90.0, 101.0, True),
    ],
)  # fmt: skip
def test_blas_wins_unless_it_is_clearly_beaten(
    blas: float, kernel: float, steady: float | None, wins: bool
) -> None:
    more = {} if steady is None else {"steady_us": steady}
    usual = {} if steady is None else {"steady_us": 100.0}
    found = ranking.decide([result("blas", blas, **usual), result("k", kernel, **more)])
    assert found == int(wins)


def test_ties_are_broken_by_determinism_workspace_the_incumbent_and_name() -> None:
    blas = result("blas", 200.0)
    b, a = result("b", 100.0), result("a", 100.0)
    assert ranking.decide([blas, b, a]) == 2
    assert ranking.decide([blas, b, a], incumbent=b) == 1
    assert ranking.decide([blas, b, revised(a, workspace_bytes=4)]) == 1
    assert ranking.decide([blas, revised(b, workspace_bytes=4), a], incumbent=b) == 2
    assert ranking.decide([blas, b, revised(a, deterministic=False)]) == 1
    assert (
        ranking.decide([blas, revised(b, deterministic=False), revised(a, workspace_bytes=9)]) == 2
    )
    far = 100.0 * (1 + ranking.TIE)
    assert ranking.decide([blas, b, result("a", far)]) == 2
    assert ranking.decide([blas, b, result("a", far + 0.01)]) == 1
    with pytest.raises(ValueError, match="no candidate was timed"):
        ranking.decide([failed("a", "x")])


def test_the_ranking_has_finalists_then_eliminated_then_slower_candidates() -> None:
    def timed(kernel: str, us: float, rounds: int = 5, **fields: Any) -> Any:
        return revised(result(kernel, us, **fields), samples_us=(us,) * rounds)

    blas = timed("blas", 10.0, steady_us=10.0)
    early, late = timed("early", 5.0, rounds=2), timed("late", 8.0)
    slower = timed("slower", 4.0, steady_us=10.3)
    slow = revised(timed("slow", 6.0, rounds=2), status="slow")
    record = recorded(slower, early, blas, late, slow, failed("x", "y"))
    assert [c.kernel for c in ranking.fastest_first(record)] == ["late", "blas", "early", "slower"]
    also = [c.kernel for c in ranking.fastest_first(record, "slow")]
    assert also == ["late", "blas", "early", "slow", "slower"]


def race(**changes: Any) -> list[int]:
    """Which candidates race at M = 1000, between 897 and 1024; all but one are within 15 %."""
    times = {"blas": 200.0, "a": 190.0, "b": 185.0, "c": 180.0, "far": 230.0} | changes
    candidates = [
        result(name, us, inside_us={897: us, 961: us}) for name, us in times.items() if us
    ]
    return ranking.racers(recorded(*candidates, m=1024), 1000)


def test_so_many_race_at_an_m_that_was_never_measured() -> None:
    assert race() == [0, 3, 2]  # BLAS, c and b
    assert race(blas=208.0) == [0, 3, 2]  # 1.155 times the best, but the answer if all others lose
    assert race(b=208.0, a=208.0, blas=208.0) == []  # only c is near the best time
    assert race(b=208.0, a=208.0) == [0, 3]
    assert race(a=90.0, b=95.0, c=99.0, blas=101.0, far=120.0) == []  # short calls
    assert race(a=0, b=0, c=0, far=0) == []


def test_an_m_that_was_measured_needs_no_race() -> None:
    us = dict.fromkeys((897, 961), 150.0)
    candidates = [result("blas", 200.0, inside_us=us), result("k", 190.0, inside_us=us)]
    record = recorded(*candidates, m=1024)
    assert ranking.racers(record, 1000) == [0, 1]
    assert ranking.racers(record, 961) == ranking.racers(record, 1024) == []
    many = us | dict.fromkeys(range(900, 900 + ranking.MOST_RACED), 150.0)
    full = [revised(each, inside_us=many) for each in candidates]
    assert ranking.racers(recorded(*full, m=1024), 1000) == []
    del many[900]
    full = [revised(each, inside_us=many) for each in candidates]
    assert ranking.racers(recorded(*full, m=1024), 1000) == [0, 1]


def test_the_ratio_behind_the_fastest_counts_where_all_were_timed() -> None:
    a, b, c = ("a", ()), ("b", ()), ("blas", ())
    around: Any = {1: {a: 10.0, b: 20.0, c: 40.0}, 2: {a: 30.0, b: 20.0}}
    assert ranking.behind(around) == {a: 1.5, b: 2.0}
    assert ranking.behind({}) == {}
    assert ranking.ranked_around({1: {a: 10.0, b: 9.0, c: 10.05}, 2: {a: 1.0, b: 1.2, c: 2.0}}) == [
        b
    ]
    assert ranking.fastest_blas(around) is None
    fused: Any = ("blas", (("fused", True),))
    assert ranking.fastest_blas({1: {c: 1.0, fused: 2.0, a: 0.1}, 2: {c: 9.0, fused: 3.0}}) == fused


# -- copies of operands ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ("b",)), ({"batch": 2}, ("a", "b")),
        ({"a": Operand(torch.float32, "col")}, ("a", "b")),
        ({"m": 2**20}, ("a", "b")), ({"groups": Groups(2, "m")}, ("b",)),
        ({"groups": Groups(2, "k")}, ("a", "b")), ({"groups": Groups(2, "n")}, ("a", "b")),
    ],
)  # fmt: skip
def test_which_operands_rotate(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    assert rotating(problem(device=GPU, **fields)) == names


def test_an_activation_of_half_the_l2_rotates() -> None:
    half = GPU.l2 // 2 // (4 * 16)
    assert rotating(problem(m=half, device=GPU)) == ("b",)
    assert rotating(problem(m=half + 1, device=GPU)) == ("a", "b")


@pytest.mark.parametrize(
    ("device", "n", "limit", "count"),
    [
        (GPU, 2**20, 1e12, 4),  # 64 MiB each: four exceed 240 MB
        (GPU, 2**22, 1e12, 2), (GPU, 2**24, 1e12, 2), (GPU, 64, 1e12, 128),
        (replace(GPU, l2=200 << 20), 2**20, 1e12, 10),
        (GPU, 2**20, 3 * (2**26 + 2**28), 3), (GPU, 2**20, 1.0, 1),
        (replace(GPU, type="cpu"), 2**20, 1e12, 1),
    ],
)  # fmt: skip
def test_the_number_of_calls_in_a_chain(device: Any, n: int, limit: float, count: int) -> None:
    assert copies(problem(n=n, device=device), limit) == count


def test_timed_operands_take_the_smaller_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = problem()
    seen: list[float] = []

    def keep(inputs: Any, problem: Any, *, limit: float) -> list[Any]:
        seen.append(limit)
        return [inputs]

    monkeypatch.setattr(cold_operands, "rotated", keep)
    monkeypatch.setattr(cold_operands, "memory_limit", lambda device: 1e6)
    for most in (None, instance.bytes, 10**5, 10**7):
        cold_operands.Copies(instance, CPU, most)
    assert seen == [1e6, instance.bytes, 1e5, 1e6]
    with pytest.raises(MemoryError, match=r"operands and result take 0 MiB, and tune_memory"):
        cold_operands.Copies(instance, CPU, instance.bytes - 1)


def test_a_chain_of_groups_has_every_sample_of_their_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tmm_core.verify import random_inputs

    instance = problem(m=64, groups=Groups(4, "m"))
    inputs = random_inputs.make(instance, CPU)
    assert len(rotated(inputs, instance)) == 2
    on_gpu = replace(instance, device=GPU)
    monkeypatch.setattr(cold_operands, "copies", lambda problem, limit: 2)
    chain = rotated(inputs, on_gpu, limit=1e12)
    assert len(chain) == SIZE_SAMPLES
    samples = [inputs.rows.offs, *inputs.rows.other_offs]
    assert len(samples) == SIZE_SAMPLES
    assert all(each.rows.offs is offs for each, offs in zip(chain, samples, strict=True))
    assert [each.b is chain[i % 2].b for i, each in enumerate(chain)] == [True] * SIZE_SAMPLES
    least = 2 * SIZE_SAMPLES * on_gpu.sizes["out"]
    assert len(rotated(inputs, on_gpu, limit=least)) == SIZE_SAMPLES
    assert len(rotated(inputs, on_gpu, limit=least - 1)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.complex128])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 6), (6, 1)), ((4, 6), (8, 1)), ((4, 6), (1, 4)), ((3, 4), (2, 1)), ((0, 4), (4, 1)),
     ((2, 3), (0, 1)), ((1,), (1,)), ((), ())],
)  # fmt: skip
def test_a_copy_of_an_operand_has_its_memory_layout(
    dtype: torch.dtype, offset: int, shape: Any, strides: Any
) -> None:
    memory = torch.arange(64).to(dtype)
    t = memory.as_strided(shape, strides, offset)
    copied = cold_operands.duplicate(t)
    assert torch.equal(copied, t)
    assert (copied.shape, copied.stride(), copied.dtype) == (t.shape, t.stride(), t.dtype)
    assert copied.data_ptr() % 16 == t.data_ptr() % 16 or not t.numel()
    assert copied.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()


# -- clocks --------------------------------------------------------------------------------


class Gpu:
    """A GPU as a clock. A launch or replay advances it by the time of a run for each copy; a graph
    records the launches of its capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done, self.capturing = 0.0, list[Any](), None
        self.graphs: list[Any] = []
        self.pools: list[Any] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) / 1e3  # ms

        class Graph:
            def __init__(self) -> None:
                self.launches: list[Any] = []
                self.freed = False
                gpu.graphs.append(self)

            def replay(self) -> None:
                assert not self.freed
                for launch in self.launches:
                    gpu.take(*launch)

            def reset(self) -> None:
                self.freed = True

        @contextlib.contextmanager
        def capture(graph: Any, pool: Any, capture_error_mode: str) -> Any:
            assert capture_error_mode == "thread_local"
            gpu.pools.append(pool)
            gpu.capturing = graph
            try:
                yield
            finally:
                gpu.capturing = None

        def handle() -> int:
            return len(gpu.pools) + 1

        for name, value in {
            "Event": Event, "CUDAGraph": Graph, "graph": capture, "graph_pool_handle": handle,
            "synchronize": lambda device: None, "current_stream": lambda: None,
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def take(self, name: str, copy: int, us: float) -> None:
        if self.capturing is not None:
            self.capturing.launches.append((name, copy, us))
        else:
            self.now += us
            self.done.append((name, copy))

    def run(self, name: str, us: float, fails: bool = False) -> Any:
        def launch(copy: int) -> None:
            if fails and self.capturing is not None:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.take(name, copy, us)

        return launch


@pytest.mark.parametrize("fails", [False, True])
def test_a_sample_is_the_time_of_a_call_in_a_chain_of_copies(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch)
    ended: list[Any] = []
    monkeypatch.setattr(timing.compat, "end_failed_capture", ended.append)
    timer = timing.GraphTimer(torch.device("cuda", 0))
    runs = [gpu.run("a", 10.0, fails), gpu.run("b", 30.0)]
    assert timer.measure(runs, 3, copies=2, burst_us=100.0) == [[10.0] * 3, [30.0] * 3]
    assert ended == ([1] if fails else [])
    assert len(gpu.pools) == 2
    # In a sample the chain of a, 20 µs, is replayed five times, and that of b twice. Before, each
    # ran once by itself, and twice as a chain.
    assert Counter(gpu.done) == {
        ("a", 0): 1 + 2 + 3 * 5, ("a", 1): 2 + 3 * 5, ("b", 0): 1 + 2 + 3 * 2, ("b", 1): 2 + 3 * 2,
    }  # fmt: skip
    graphs = len(gpu.graphs)
    assert timer.measure(runs, 1, copies=2, burst_us=1.0) == [[10.0], [30.0]]
    assert len(gpu.graphs) == graphs  # the graphs are kept
    assert timer.measure(runs[1:], 1, copies=3, burst_us=1.0) == [[30.0]]
    assert len(gpu.graphs) == graphs + 1
    assert len(set(gpu.pools)) == (2 if fails else 1)
    timer.forget_captures()
    assert [graph.freed for graph in gpu.graphs] == [not fails, True, True]
    timer.measure(runs[1:], 1, copies=3, burst_us=1.0)
    assert len(gpu.graphs) == graphs + 2
    assert gpu.pools[-1] != gpu.pools[-2]
    timer.release()
    assert gpu.graphs[-1].freed


@pytest.mark.parametrize(("rested", "more"), [(None, 0), (True, 1)])
def test_after_a_pause_a_chain_runs_once_before_it_is_timed(
    rested: Any, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch)
    timer = timing.GraphTimer(torch.device("cuda", 0))
    run = gpu.run("a", 10.0)
    timer.measure([run], 1)
    for steps in (
        timer.measure_steps([run], 2, burst_us=10.0),
        timer.steady_steps([run], 1, copies=1, steady_us=30.0),
    ):
        next(steps)
        before = len(gpu.done)
        steps.send(rested)
        assert len(gpu.done) - before == 1 + more


def test_a_launch_alone_is_timed_after_the_cache_was_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(torch, "zeros", lambda n, **_: ("flush", n))
    monkeypatch.setattr(torch, "amax", lambda flush: gpu.take(flush, 0, 80.0))
    timer = timing.GraphTimer(torch.device("cuda", 0))
    runs = [gpu.run("a", 10.0), gpu.run("b", 30.0)]
    assert timer.alone(runs, 4) == [[10.0] * 4, [30.0] * 4]
    assert gpu.graphs == []
    flush = (("flush", 16), 0)
    assert gpu.done[::3] == gpu.done[1::3] == [flush] * 8
    assert sorted(gpu.done[2::3]) == [("a", 0)] * 4 + [("b", 0)] * 4


def test_samples_of_a_host_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    calls: list[Any] = []

    def run(name: str, seconds: float) -> Any:
        def call(copy: int) -> None:
            calls.append((name, copy))
            now[0] += seconds

        return call

    found = timing.HostTimer().measure([run("a", 1e-6), run("b", 3e-6)], 2, copies=3)
    assert found == [pytest.approx([1.0] * 2), pytest.approx([3.0] * 2)]
    assert Counter(calls) == {(name, copy): 2 for name in "ab" for copy in range(3)}


def test_samples_are_normalised_by_round() -> None:
    """A round in which the clock was slower is slower for all."""
    a, b = [10.0, 10.0, 20.0], [30.0, 31.0, 60.0]
    assert timing.normalised([a, b]) == [
        pytest.approx([10.0, 10.0 * 62 / 63, 10.0], rel=0.02),
        pytest.approx([30.5, 30.5, 30.5], rel=0.03),
    ]
    assert timing.normalised([[5.0, 5.0], [7.0, 7.0]]) == [[5.0, 5.0], [7.0, 7.0]]
    # Times stay those of a usual round, not of a round in which each has its own median.
    assert timing.normalised([[1.0, 4.0, 4.0], [4.0, 1.0, 4.0]]) == [
        [1.0, 4.0, 2.5],
        [4.0, 1.0, 2.5],
    ]


# -- the line of progress ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminal", "shown", "steps", "lines"),
    [
        (False, True, [0.9, 1.0, 5.0, 10.9, 11.0], 2), (False, None, [1.0, 20.0], 0),
        (False, False, [1.0, 20.0], 0), (True, None, [0.9, 1.0, 1.1, 1.2], 2),
        (True, False, [1.0, 20.0], 0), (True, True, [1.0], 1),
    ],
)  # fmt: skip
def test_a_line_appears_after_a_second_and_changes_now_and_then(
    terminal: bool,
    shown: bool | None,
    steps: list[float],
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    line = progress.Progress()
    with line.of("P", shown) as step:
        for at in steps:
            now[0] = 100.0 + at
            step()
    text = stream.getvalue()
    assert text.count("tuning P (1 product in") == lines
    assert text.endswith("\r") is (terminal and lines > 0)


def test_products_of_a_step_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    line, texts = progress.Progress(), []
    for pause in (0.0, 2.0, 2.1):
        now[0] += pause
        stream = Stream(False)
        monkeypatch.setattr(sys, "stderr", stream)
        with line.of("P", True) as step:
            now[0] += 20.0
            step()
        texts.append(stream.getvalue())
    assert ["(1 product in 20 s so far)" in texts[0], "(2 products in 40 s so far)" in texts[1],
            "(1 product in 20 s so far)" in texts[2]] == [True] * 3  # fmt: skip


# -- first launches in another process ---------------------------------------------------


def test_a_first_launch_that_fails_costs_its_candidate_and_no_time_of_others() -> None:
    instance, error = problem(), ValueError("crashed")
    launched: list[str] = []

    class First:
        def failure(self, problem: Any, candidate: Any, memory: int) -> Any:
            launched.append(candidate.kernel.name)
            assert memory == 7
            time.sleep(1e-4)
            return error if candidate.kernel.name == "bad" else None

    class Deadline:
        at, passed = 1e3, False

    deadline: Any = Deadline()
    broken: Future[None] = Future()
    broken.set_exception(ValueError("not compiled"))
    done: Future[None] = Future()
    done.set_result(None)
    names = {"blas": done, "good": done, "bad": done, "broken": broken}
    compilers: Any = SimpleNamespace(cancel_pending=lambda futures: None)
    first: Any = First()
    launchers = CandidateLaunchers(compilers, 1, first, CPU, 7, deadline, {})
    jobs = [(instance, Candidate(FakeKernel(name), FakeConfig())) for name in names]
    waiting = launchers._waiting
    waiting |= zip(jobs, names.values(), strict=True)
    launchers._launch_first(first)
    assert launched == ["good", "bad"]
    errors = [each.exception() for each in waiting.values()]
    assert errors == [None, None, error, broken.exception()]
    assert deadline.at > 1e3
    launchers._launch_first(first)  # each is launched once
    assert launched == ["good", "bad"]
    deadline.passed = True
    launchers._launched.clear()
    launchers._launch_first(first)
    assert launched == ["good", "bad"]


# -- records and the kernels of a call ---------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "current", "why"),
    [
        ({"capturing": True}, {}, "a CUDA graph is being captured"),
        ({}, {"on_cache_miss": "heuristic"}, "on_cache_miss='heuristic'"),
        ({}, {"on_cache_miss": "error"}, "on_cache_miss='error'"),
        ({}, {"on_cache_miss": "background"}, None),
        ({}, {"on_cache_miss": "background", "batch_invariant": True}, "batch-invariant mode"),
        ({}, {"on_cache_miss": "background", "arithmetic": "x"}, "batch-invariant mode"),
        ({}, {"batch_invariant": True}, None),
        ({"deterministic": True}, {}, "deterministic mode"),
        ({"device": replace(DEVICE, interpreted=True)}, {}, "interpreted kernels' times"),
        ({}, {}, None),
    ],
)
def test_which_conditions_forbid_tuning(
    fields: dict[str, Any], current: dict[str, Any], why: str | None
) -> None:
    usual = {"device": replace(DEVICE, interpreted=False)}
    found = Lookup(Registry(), CacheStore()).forbids_tuning(
        problem(**usual | fields), settings(**current)
    )
    assert found is None if why is None else found is not None and found.startswith(why)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_required_record_is_named_with_its_bucket(invariant: bool) -> None:
    lookup = Lookup(Registry(), CacheStore())
    instance = problem(m=50, batch_invariant=invariant)
    lookup.require_record(instance, instance.at(64), settings())
    mode = " in batch-invariant mode" if invariant else ""
    under = " under TMM_BATCH_INVARIANT=1" if invariant else ""
    with pytest.raises(CacheMissError) as caught:
        lookup.require_record(instance, instance.at(64), settings(on_cache_miss="error"))
    assert f"{mode} (bucket M=64) in " in str(caught.value)
    assert f"run `tmm tune` for it{under} or allow" in str(caught.value)


def test_where_no_kernel_serves_blas_does_unless_its_declaration_excludes_it() -> None:
    """A BLAS that declines for another reason is asked nevertheless: torch's own error follows."""
    d, _ = dispatcher(FakeBlas(against=lambda problem: ["not today"]))
    choice = d._fallback(problem(), "it always can")
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "fallback")
    assert choice.reason == "it always can"
    from tmm_core import Supports

    excluded = FakeBlas()
    excluded.supports = Supports(devices=("cpu",), operands=())  # type: ignore[misc]
    d, _ = dispatcher(excluded)
    with pytest.raises(UnsupportedProblemError, match=r"no kernel serves .*; blas: .*operands"):
        d._fallback(problem(), "it always can")


def test_variables_that_would_keep_a_python_process_are_not_passed_to_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With PYTHONINSPECT a process reads its standard input after its program has ended."""
    passed: dict[str, str] = {}

    def start(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        passed.update(env)
        raise OSError("enough")

    monkeypatch.setattr(compile_pool.subprocess, "Popen", start)
    kept = {"HOME": "/here", "PYTHONHASHSEED": "3", "TRITON_CACHE_DIR": "/there"}
    left = dict.fromkeys(("PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONVERBOSE"), "1")
    with pytest.raises(OSError, match="enough"):
        compile_pool._Host(compile_pool.Compilers, 1, kept | left, lambda fault: None)
    assert {name: passed.get(name) for name in kept} == kept
    assert not passed.keys() & left.keys()


def test_an_estimate_is_of_the_given_config() -> None:
    class Estimating(FakeKernel):
        def estimate_us(self, problem: Any, config: FakeConfig) -> float:
            return 10.0 * config.tile

    kernel = Estimating("k", tiles=(2, 1, 3))
    estimates = [estimate_us(problem(), kernel, c) for c in (None, *kernel.configs(problem()))]
    assert estimates == [20.0, 20.0, 10.0, 30.0]


@pytest.mark.parametrize("reason", ["No space left on device", "it returned NaN"])
def test_a_wrong_answer_is_a_verdict_whatever_its_reason_says(reason: str) -> None:
    """Only for failures does the reason decide whether the environment is the cause."""
    kernel = FakeKernel("k")
    for status in ("wrong", "failed"):
        run = CandidateRun(Candidate(kernel, kernel.default_config(problem())))
        run.fail(reason, status)
        excused = status == "failed" and cause_of_text(reason) is not None
        assert (run.status, run.cause is not None) == (status, excused)
    run.fail("x" * 501)
    assert run.reason == "x" * 500


# -- the toolchain ------------------------------------------------------------------------


def test_the_assembler_is_the_given_one_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, top = tmp_path / "given", tmp_path / "triton"
    own = top / "backends" / "nvidia" / "bin" / "ptxas"
    monkeypatch.setattr(toolchain, "_triton", lambda: top)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(given))
    assert toolchain.ptxas() is None
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert toolchain.ptxas() == own
    given.write_text("")
    assert toolchain.ptxas() == given
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    assert toolchain.ptxas() == own


def test_a_module_in_the_place_of_triton_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests and libraries replace Triton by such modules."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    for spec in (None, importlib.machinery.ModuleSpec("triton", None)):
        module = types.ModuleType("triton")
        module.__spec__ = spec
        monkeypatch.setitem(sys.modules, "triton", module)
        assert toolchain.ptxas() is None
        assert toolchain._triton_files() == []


@pytest.mark.parametrize("name", ["site-packages", "dist-packages", "lib"])
def test_packages_are_installed_into_folders_of_either_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's is dist-packages."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / name)])
    assert (str(tmp_path / name) in toolchain._site_packages()) is (name != "lib")


def test_a_record_has_each_candidate_once_after_a_kernel_was_added(tmp_path: Path) -> None:
    """BLAS and the winner are measured again together with the new kernel."""
    before, _ = dispatcher(FakeBlas(), FakeKernel("a"), times={"a": 5.0}, root=tmp_path)
    before.tune(problem(), settings())
    kernels = FakeBlas(), FakeKernel("a"), FakeKernel("b")
    after, timer = dispatcher(*kernels, times={"a": 5.0, "b": 4.0}, root=tmp_path)
    after.tune(problem(), settings())
    record = after.record_of(problem())
    assert record is not None
    assert {"blas", "b"} <= set(timer.measured)
    assert sorted(each.kernel for each in record.candidates) == ["a", "b", "blas"]
