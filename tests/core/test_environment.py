"""A fault of the environment is no verdict on a kernel. It is not recorded, one warning reports it,
and the kernel is tried again once the environment changes."""

from __future__ import annotations

import errno
import os
import subprocess
import types
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes import (
    DEVICE,
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Faulty,
    dispatcher,
    plugin,
    problem,
    settings,
)
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, CandidateResult, Notes, TuningRecord

from tmm_core import Traits, dispatch
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.explanation import explain_problem
from tmm_core.errors import ConfigError, PluginError, TmmWarning
from tmm_core.launch import warm
from tmm_core.registry.registry import Registry
from tmm_core.spec import toolchain
from tmm_core.tools.commands import doctor_toolchain, tune
from tmm_core.tuning import findings, untried
from tmm_core.tuning.compile_pool import NotCompiledError
from tmm_core.tuning.tuner import Tuner
from tmm_core.verify.environment_faults import (
    BUDGET_ENDED,
    alike,
    cause_of,
    cause_of_text,
    verdicts,
)

FAST = {"fast": 10.0, "blas": 20.0}
#: Changes the toolchain's fingerprint, as whoever repairs it does.
PTXAS = "TRITON_PTXAS_PATH"


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PTXAS, str(tmp_path / "missing"))


def raised_in(module: str, error: BaseException) -> BaseException:
    """``error``, raised by code of a module of this name."""
    space: dict[str, Any] = {"__name__": module}
    exec("def run(error):\n    raise error", space)
    try:
        space["run"](error)
    except BaseException as caught:
        return caught
    raise AssertionError


def within(outer: BaseException, inner: BaseException) -> BaseException:
    """``outer``, raised from ``inner``."""
    outer.__cause__ = inner
    return outer


class PTXASError(Exception):
    __module__ = "triton.runtime.errors"


class OutOfResources(Exception):  # noqa: N818  # Triton's name
    __module__ = "triton.runtime.errors"


class CompilationError(Exception):
    __module__ = "triton.compiler.errors"


def of_ptxas(status: int) -> PTXASError:
    return PTXASError(f"PTXAS error: `ptxas` failed with error code {status}\n`ptxas` stderr:\n")


ENVIRONMENT: list[tuple[str, Callable[[], BaseException]]] = [
    ("passing", MemoryError),
    ("passing", lambda: DeprecationWarning("raised by the filters of the program")),
    ("passing", lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    ("passing", lambda: RuntimeError("CUDA error: out of memory")),
    ("passing", lambda: RuntimeError("Triton Error [CUDA]: out of memory")),
    ("passing", lambda: RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")),
    ("passing", lambda: OSError(errno.ENOSPC, "No space left on device")),
    ("passing", lambda: within(ValueError("no kernel"), OSError(errno.EDQUOT, "Quota"))),
    ("passing", lambda: within(PluginError("bind"), within(ValueError(), MemoryError()))),
    ("passing", lambda: BrokenProcessPool("A process in the process pool was terminated")),
    ("passing", lambda: subprocess.CalledProcessError(-9, ["gcc"])),
    ("passing", lambda: NotCompiledError("its compiler died (signal 9, SIGKILL)")),
    ("passing", lambda: of_ptxas(-9)),
    ("passing", lambda: NotCompiledError("ValueError: x", "passing")),
    ("toolchain", lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "gcc")),
    ("toolchain", lambda: PermissionError(errno.EACCES, "Permission denied", "/root/.triton")),
    ("toolchain", lambda: OSError(errno.EROFS, "Read-only file system")),
    ("toolchain", lambda: subprocess.CalledProcessError(1, ["gcc", "main.c"])),
    ("toolchain", lambda: ImportError("libcuda.so.1: cannot open shared object file")),
    ("toolchain", lambda: ModuleNotFoundError("No module named 'cutlass'")),
    ("toolchain", lambda: OSError("/tmp/launcher.so: file too short")),  # the loader sets no errno
    ("toolchain", lambda: raised_in("triton.knobs", RuntimeError("Cannot find ptxas"))),
    ("toolchain", lambda: raised_in("triton.backends.nvidia.driver", AssertionError("libcuda"))),
    ("toolchain", lambda: raised_in("triton.runtime.build", RuntimeError("any words"))),
    ("toolchain", lambda: of_ptxas(127)),
    ("toolchain", lambda: NotCompiledError("RuntimeError: Cannot find ptxas")),
    ("toolchain", lambda: PluginError("kernel 'k': bind raised FileNotFoundError: gcc (a.py:3)")),
    ("hung", lambda: TimeoutError("did not bind within 60 s")),
    ("hung", lambda: NotCompiledError("did not compile within 60 s")),
    ("hung", lambda: NotCompiledError("its compiler died (signal 11, SIGSEGV)")),
    ("budget", lambda: TimeoutError(BUDGET_ENDED)),
]
OWN: list[Callable[[], BaseException]] = [
    lambda: ValueError("no such layout"),
    lambda: RuntimeError("boom"),
    lambda: RuntimeError("out of resource: shared memory, Required: 300000"),
    lambda: raised_in("triton.compiler.compiler", OutOfResources("out of resource: registers")),
    lambda: raised_in("triton.compiler.code_generator", CompilationError("at 3:4: no such name")),
    lambda: of_ptxas(255),
    lambda: NotImplementedError("sm_75"),
    lambda: KeyError("BLOCK_M"),
    lambda: AssertionError("M is odd"),
    lambda: SystemExit(3),
    lambda: OSError("in words of its own"),
    lambda: NotCompiledError("its compiler ended with exit code 3"),
    lambda: NotCompiledError("its first launch: the process died (signal 11, SIGSEGV)"),
    lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize(("cause", "made"), ENVIRONMENT)
def test_faults_of_the_environment_are_distinguished_from_the_kernels(
    cause: str, made: Callable[[], BaseException]
) -> None:
    assert cause_of(made()) == cause
    assert cause_of(within(PluginError("kernel 'k': bind raised it"), made())) == cause


@pytest.mark.parametrize("made", OWN)
def test_faults_of_the_kernel_are_distinguished_from_the_environments(
    made: Callable[[], BaseException],
) -> None:
    assert cause_of(made()) is None
    assert cause_of(within(PluginError("kernel 'k': bind raised it"), made())) is None


def test_an_exception_that_the_caller_handles_is_not_the_kernels_cause() -> None:
    """A caller may compute in an ``except`` block; the handled exception has nothing to do with the
    kernel's."""

    def guarded() -> BaseException:
        try:
            raise ValueError("no such layout")
        except ValueError as error:
            return error

    try:
        raise FileNotFoundError(errno.ENOENT, "the caller's")
    except FileNotFoundError as handled:
        error, outer = guarded(), handled
    assert error.__context__ is outer
    assert cause_of(error) is None


def test_an_exception_that_a_kernel_handles_is_its_cause_and_loops_end() -> None:
    def kernel() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise ValueError("no scratch file")  # noqa: B904

    with pytest.raises(ValueError, match="scratch") as caught:
        kernel()
    assert cause_of(caught.value) == "passing"
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert cause_of(one) is None

    class Hostile(RuntimeError):  # noqa: N818
        def __getattribute__(self, name: str) -> Any:
            raise ZeroDivisionError

        def __str__(self) -> str:
            raise ZeroDivisionError

    assert cause_of(Hostile()) is None


# -- records and notes ---------------------------------------------------------------------


class Broken(FakeKernel):
    """It binds only where ``works`` is set, and raises what ``made`` makes elsewhere."""

    def __init__(self, name: str, made: Callable[[], BaseException], **fields: Any) -> None:
        super().__init__(name, **fields)
        self.made, self.works = made, False

    def bind(self, problem: Any, config: FakeConfig) -> Any:
        launch = super().bind(problem, config)
        if not self.works:
            raise self.made()
        return launch


def no_ptxas() -> BaseException:
    return raised_in("triton.knobs", RuntimeError("Cannot find ptxas"))


def no_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory")


def process(root: Path, *kernels: FakeKernel) -> tuple[Any, Any]:
    """A dispatcher as a new process has, and its timer."""
    findings._warned.clear()
    return dispatcher(FakeBlas(), *kernels, times=FAST, root=root)


def chosen(d: Any, **fields: Any) -> str:
    return str(d.choose(problem(**fields), settings()).candidate.kernel.name)


def on_record(root: Path) -> dict[str, str]:
    record = CacheStore(root).load(DEVICE.gpu, DEVICE.environment, problem().to_json())
    assert record is not None
    return {c.kernel: c.status for c in record.candidates}


@pytest.mark.parametrize(("cause", "made"), ENVIRONMENT)
@pytest.mark.slow(quick=6)
def test_faults_of_the_environment_are_not_recorded(
    cause: str, made: Callable[[], BaseException], tmp_path: Path
) -> None:
    d, _ = process(tmp_path, Broken("fast", made), FakeKernel("other"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert chosen(d) == "blas"
    assert len(caught) == (0 if cause == "budget" else 1)
    assert not caught or "fast" in str(caught[0].message)
    assert not caught or "tmm doctor" in str(caught[0].message)
    assert on_record(tmp_path) == {"blas": "ok", "other": "slow"}
    left = d.untried.get(problem()).kernels["fast", "1"]
    assert left.cause == cause


@pytest.mark.parametrize("made", OWN)
def test_a_kernels_own_fault_is_on_record(
    made: Callable[[], BaseException], tmp_path: Path
) -> None:
    d, _ = process(tmp_path, Broken("fast", made), FakeKernel("other"))
    refuses = type(made()).__name__ == "OutOfResources"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert chosen(d) == "blas"
    assert len(caught) == (0 if refuses else 1)
    assert on_record(tmp_path) == {"blas": "ok", "other": "slow", "fast": "failed"}
    assert d.untried.get(problem()) is None
    again, timer = process(tmp_path, Broken("fast", made), FakeKernel("other"))
    assert chosen(again) == "blas"
    assert not timer.measured


def test_a_repaired_toolchain_is_tried_again_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes: ptxas is missing in two and repaired for the third."""
    fast, two = Broken("fast", no_ptxas, traits=Traits()), Broken("two", no_ptxas)
    first, _ = process(tmp_path, fast, two)
    with pytest.warns(TmmWarning, match=r"kernel fast and 1 more .*Cannot find ptxas.*doctor") as w:
        assert [chosen(first, n=n) for n in (32, 48)] == ["blas"] * 2
    assert len(w) == 1
    assert fast.bound
    # Still broken: nothing is tuned, and this process warns too.
    count = len(fast.bound)
    second, timer = process(tmp_path, fast, two)
    with pytest.warns(TmmWarning, match="Cannot find ptxas") as w:
        assert [chosen(second, n=n) for n in (32, 48)] == ["blas"] * 2
    assert len(w) == 1
    assert (len(fast.bound), timer.measured) == (count, [])
    message = str(explain_problem(second, problem(), settings()))
    assert "untried   fast: " in message
    assert "would be tuned" not in message
    # Repaired.
    monkeypatch.delenv(PTXAS)
    fast.works = two.works = True
    third, timer = process(tmp_path, fast, two)
    assert "would be tuned" in str(explain_problem(third, problem(), settings()))
    assert chosen(third) == "fast"
    assert "fast" in timer.measured
    assert third.untried.get(problem()).kernels == {}
    fourth, timer = process(tmp_path, fast, two)
    assert (chosen(fourth), timer.measured) == ("fast", [])


def test_this_process_too_tries_again_once_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Broken("fast", no_ptxas)
    d, _ = process(tmp_path, fast)
    forgotten: list[bool] = []
    monkeypatch.setattr(warm, "forget_plans", lambda: forgotten.append(True))
    with pytest.warns(TmmWarning, match="Cannot find ptxas"):
        assert chosen(d) == "blas"
    assert chosen(d) == "blas"
    assert not forgotten
    monkeypatch.delenv(PTXAS)
    fast.works = True
    assert chosen(d) == "fast"
    assert forgotten  # calls that have a plan choose again, too
    assert chosen(d) == "fast"
    assert len(forgotten) == 1


def test_an_explicit_tuning_tries_kernels_that_a_call_does_not(tmp_path: Path) -> None:
    fast = Broken("fast", no_ptxas)
    d, _ = process(tmp_path, fast)
    with pytest.warns(TmmWarning, match="Cannot find ptxas"):
        assert chosen(d) == "blas"
    fast.works = True
    assert chosen(d) == "blas"
    assert d.tune(problem(), settings()).best.kernel == "fast"
    assert chosen(d) == "fast"


def test_a_lack_of_memory_is_tried_again(tmp_path: Path) -> None:
    """Later processes try again, a limited number of times, since each waits for it."""
    fast = Broken("fast", no_memory)
    bound = []
    for _ in range(untried.PROCESSES + 2):
        d, _ = process(tmp_path, fast)
        with pytest.warns(TmmWarning, match="out of memory"):
            assert chosen(d) == "blas"
        assert chosen(d) == "blas"
        bound.append(len(fast.bound))
        fast.bound.clear()
    assert [bool(count) for count in bound] == [True] * untried.PROCESSES + [False] * 2


def test_after_a_lack_of_memory_the_kernel_is_tuned(tmp_path: Path) -> None:
    fast = Broken("fast", no_memory)
    d, _ = process(tmp_path, fast)
    with pytest.warns(TmmWarning, match="out of memory"):
        assert chosen(d) == "blas"
    fast.works = True
    d, _ = process(tmp_path, fast)
    assert chosen(d) == "fast"


def test_some_configs_out_of_memory_are_tried_again(tmp_path: Path) -> None:
    """These configs are tried again although others of the kernel are on record."""

    class Large(FakeKernel):
        full = True

        def bind(self, problem: Any, config: FakeConfig) -> Any:
            if config.tile == 2 and self.full:
                raise MemoryError
            return super().bind(problem, config)

    fast = Large("fast", tiles=(1, 2))
    times = {("fast", 1): 15.0, ("fast", 2): 5.0, "blas": 20.0}
    d, _ = dispatcher(FakeBlas(), fast, times=times, root=tmp_path)
    with pytest.warns(TmmWarning, match="MemoryError"):
        assert d.choose(problem(), settings()).candidate.config.tile == 1
    fast.full = False
    d, _ = dispatcher(FakeBlas(), fast, times=times, root=tmp_path)
    assert d.choose(problem(), settings()).candidate.config.tile == 2


def test_a_tuning_where_blas_lacks_memory_stores_no_record(tmp_path: Path) -> None:
    """Otherwise kernels would win for good because BLAS once had no memory."""
    blas = FakeBlas(bind_error=MemoryError("no memory"))
    d, _ = dispatcher(blas, FakeKernel("fast"), times=FAST, root=tmp_path)
    with pytest.warns(TmmWarning, match="no memory") as caught:
        assert len([d.choose(problem(n=n), settings()) for n in (32, 48)]) == 2
    assert len(caught) == 1
    assert not list(CacheStore(tmp_path).summaries())


def test_outside_of_tuning_one_warning_names_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner on record does not bind, nor does the next, nor the ones of another problem."""
    kernels = [Broken(name, no_ptxas) for name in ("fast", "next")]
    times = {"fast": 5.0, "next": 6.0, "blas": 20.0}
    for kernel in kernels:
        kernel.works = True
    d, _ = dispatcher(FakeBlas(), *kernels, times=times, root=tmp_path)
    for n in (32, 48):
        assert d.bound(problem(n=n), settings())[0].candidate.kernel.name == "fast"
    for kernel in kernels:
        kernel.works = False
    d, _ = dispatcher(FakeBlas(), *kernels, times=times, root=tmp_path)
    with pytest.warns(TmmWarning, match=r"Cannot find ptxas.*tmm doctor") as caught:
        bound = [d.bound(problem(n=n), settings())[0] for n in (32, 48)]
    assert [choice.candidate.kernel.name for choice in bound] == ["blas"] * 2
    assert len(caught) == 1
    monkeypatch.delenv(PTXAS)
    for kernel in kernels:
        kernel.works = True
    assert d.bound(problem(), settings())[0].candidate.kernel.name == "fast"


def test_kernels_that_all_fail_alike_are_untried(tmp_path: Path) -> None:
    """The kernels share a cause, whatever their messages. One warning names one of them."""

    def failing(name: str) -> Callable[[], BaseException]:
        return lambda: RuntimeError(f"cannot assemble '{name}' in /tmp/{name}.ptx at {id(name)}")

    kernels = [Broken(name, failing(name)) for name in ("one", "two", "three")]
    d, _ = process(tmp_path, *kernels)
    with pytest.warns(TmmWarning, match=r"kernel one .*cannot assemble.*py:\d+") as caught:
        assert chosen(d) == "blas"
    assert len(caught) == 1
    assert on_record(tmp_path) == {"blas": "ok"}
    again, timer = process(tmp_path, *kernels)
    with pytest.warns(TmmWarning, match="cannot assemble"):
        assert chosen(again) == "blas"
    assert not timer.measured
    # Where warnings are errors, the next call finds the kernels untried, as a call with other
    # settings does.
    strict, _ = process(tmp_path / "strict", *kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TmmWarning, match=r"kernel one .*cannot assemble"):
            chosen(strict)
        assert chosen(strict) == "blas"
        assert strict.bound(problem(), settings(tune_budget=9.0))[0].candidate.kernel.name == "blas"
    # One that works shows that the others are at fault.
    other, _ = process(tmp_path / "other", *kernels[:2], FakeKernel("fast"))
    with pytest.warns(TmmWarning, match="cannot assemble"):
        assert chosen(other) == "fast"
    assert on_record(tmp_path / "other") == {
        "blas": "ok", "one": "failed", "two": "failed", "fast": "ok"
    }  # fmt: skip


def failed(kernel: str, reason: str, **fields: Any) -> CandidateResult:
    return CandidateResult(kernel, "1", {"tile": 1}, "failed", reason=reason, **fields)


BLAS = CandidateResult("blas", "1", {"tile": 1}, "ok", samples_us=(20.0,) * 3)
OLD = [
    [failed(k, f"PluginError: kernel '{k}' of plugin 'triton' (tmm-core 2): bind raised "
               f"RuntimeError: Cannot find ptxas (/x/{k}.py:{n})")
     for n, k in enumerate(("fast", "two"))],
    [failed("fast", "RuntimeError: Cannot find ptxas")],
    [failed("fast", "torch.OutOfMemoryError: CUDA out of memory"),
     CandidateResult("two", "1", {"tile": 1}, "slow", samples_us=(50.0,))],
    [failed("fast", "OddError: of 12 (/a/b.py:3)"), failed("two", "OddError: of 17 (/c/d.py:9)")],
    [failed("fast", "OddError: it"), failed("two", "OddError: it"),
     failed("three", "expects to take 67 µs, hopeless against BLAS")],
]  # fmt: skip


@pytest.mark.parametrize("results", OLD)
@pytest.mark.parametrize("works", [True, False])
@pytest.mark.slow(quick=6)
def test_old_records_of_a_broken_toolchain_are_tuned_again_once(
    results: list[CandidateResult], works: bool, tmp_path: Path
) -> None:
    record = TuningRecord(
        problem().to_json(), 0, (BLAS, *results), "2026-01-01T00:00:00+00:00", 1.0
    )
    CacheStore(tmp_path).save(DEVICE.gpu, DEVICE.environment, record)
    kernels = [Broken(name, no_ptxas) for name in ("fast", "two", "three")]
    for kernel in kernels:
        kernel.works = works
    d, timer = process(tmp_path, *kernels)
    if works:
        assert chosen(d) == "fast"
        assert on_record(tmp_path)["fast"] == "ok"
    else:
        with pytest.warns(TmmWarning, match="Cannot find ptxas"):
            assert chosen(d) == "blas"
        assert "fast" not in on_record(tmp_path)
    assert timer.measured
    d, timer = process(tmp_path, *kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert chosen(d) == ("fast" if works else "blas")
    assert not timer.measured


def test_verdicts_on_record_stay() -> None:
    wrong = revised(failed("fast", "error 0.1 exceeds 2e-05"), status="wrong")
    assert verdicts([BLAS, wrong]) == [BLAS, wrong]
    own = [BLAS, failed("fast", "ValueError: no such layout")]
    assert verdicts(own) == own
    late = [BLAS, failed("fast", BUDGET_ENDED)]
    assert verdicts(late) == late  # a call does not wait for it again
    silent = [BLAS, revised(failed("fast", ""), reason=None)]
    assert verdicts(silent) == silent
    assert not alike([BLAS])
    assert not alike([BLAS, failed("one", "x")])
    assert not alike([failed("one", "x"), failed("two", "y")])
    assert not alike([failed("one", "x"), failed("two", "x"), revised(BLAS, kernel="three")])
    rejected = revised(failed("three", "x"), status="wrong")
    assert not alike([failed("one", "x"), failed("two", "x"), rejected])
    assert alike([BLAS, failed("one", "x 1"), failed("two", "x 2")])


def test_a_note_survives_other_lines_in_its_file(tmp_path: Path) -> None:
    """Any JSON may stand in the file; it costs the note."""
    d, _ = process(tmp_path)
    notes = Notes("untried", [DEVICE.gpu, DEVICE.environment], tmp_path)
    for number, odd in enumerate([1, [], {"kernels": 3}, {"kernels": [[1]], "tried": {}}, {}]):
        key = problem(n=8 * (number + 1))
        notes.add(untried.digest(key.to_json()), odd)
        assert d.untried.get(key) is None
    assert d.untried.of_device(DEVICE) == []


def test_toolchains_are_distinguished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs, libraries, headers, variables, packages and full folders tell them apart."""
    seen = {toolchain.fingerprint()}
    assert toolchain.fingerprint() in seen

    def differs() -> None:
        found = toolchain.fingerprint()
        assert found not in seen
        seen.add(found)

    tool = tmp_path / "ptxas"
    monkeypatch.setenv(PTXAS, str(tool))
    differs()
    tool.write_text("#!/bin/sh\n")
    differs()
    tool.chmod(0o755)
    differs()
    tool.write_text("#!/bin/sh\nexit 1\n")
    differs()
    monkeypatch.setenv("CC", "no-such-compiler")
    differs()
    assert toolchain.c_compiler() is None
    monkeypatch.setenv("CC", "")  # Triton runs it
    assert "CC, which is empty, not found" in str(toolchain.lacking())
    monkeypatch.setenv("TRITON_HOME", "")
    assert toolchain.folders()["triton cache"] == Path(".triton", "cache")
    monkeypatch.setenv("PTXAS_OPTIONS", "--no-such-option")
    differs()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda")
    differs()
    monkeypatch.setattr(toolchain, "python_header", lambda: tmp_path / "Python.h")
    differs()
    monkeypatch.setattr(toolchain, "_site_packages", lambda: [str(tmp_path)])
    differs()
    (tmp_path / "installed").mkdir()
    differs()
    monkeypatch.setattr(toolchain, "_C_HEADER", tmp_path / "stdlib.h")  # gcc without libc6-dev
    differs()
    (tmp_path / "stdlib.h").write_text("")
    differs()
    monkeypatch.setattr(toolchain.shutil, "which", lambda _: None)  # nor an assembler
    differs()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "installed" / "missing"))
    assert toolchain.fingerprint() in seen
    usable = toolchain.usable
    monkeypatch.setattr(
        toolchain, "usable", lambda path: "full" if path == tmp_path / "t" else usable(path)
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))  # the compiler's; Python uses another
    differs()
    monkeypatch.delenv("TMPDIR")
    assert toolchain.fingerprint() in seen
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    differs()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(toolchain, "usable", lambda _: "full")
    differs()
    # Each process of a job may write elsewhere.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert toolchain.fingerprint() in seen


def test_folders_that_triton_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.usable(tmp_path / "not" / "there") == "yes"
    assert toolchain.usable(Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))) == "not named in UTF-8"
    assert toolchain.usable(None).startswith("unnamed")
    assert toolchain.usable(tmp_path / ("x" * 300) / "below") == "File name too long"

    def stat(path: Path) -> None:
        if path != tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as scope:  # another user's home, which may not be entered
        scope.setattr(toolchain.os, "stat", stat)
        scope.setattr(toolchain.os, "access", lambda path, _: path != tmp_path)
        assert toolchain.usable(tmp_path / ".triton" / "cache") == "not writable"
    file = tmp_path / "file"
    file.write_text("")
    assert toolchain.usable(file / "below") == "not writable"
    usage = types.SimpleNamespace(free=toolchain.LEAST_FREE_BYTES - 1)
    monkeypatch.setattr(toolchain.shutil, "disk_usage", lambda _: usage)
    assert toolchain.usable(tmp_path) == "full"
    usage.free += 1
    assert toolchain.usable(tmp_path) == "yes"
    for error, why in ((OSError(5, "no disk"), "no disk"), (OSError(), "unreadable")):
        monkeypatch.setattr(toolchain.shutil, "disk_usage", Mock(side_effect=error))
        assert toolchain.usable(tmp_path) == why


@pytest.mark.parametrize(
    ("inner", "cause"), [(MemoryError(), "passing"), (ValueError("bad"), "toolchain")]
)
def test_the_type_of_a_cause_precedes_the_words_of_what_it_led_to(
    inner: Exception, cause: str
) -> None:
    outer = RuntimeError("Permission denied")
    outer.__cause__ = inner
    assert cause_of(outer) == cause


def test_a_program_of_triton_that_changes_changes_the_toolchain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_triton", lambda: tmp_path)
    for name in ("backends/nvidia/bin/ptxas", "backends/amd/bin/lld", "backends/nvidia/driver.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("first")
        assert path in toolchain._triton_files()
        before = toolchain.fingerprint()
        path.write_text("another")
        assert toolchain.fingerprint() != before


@pytest.mark.parametrize("found", [None, types.SimpleNamespace(origin=None), ValueError()])
def test_without_triton_it_has_no_files(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor if it is a namespace, or half removed from the process."""
    monkeypatch.setattr("importlib.util.find_spec", Mock(side_effect=[found] * 2))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert (toolchain._triton_files(), toolchain.ptxas()) == ([], None)


def test_programs_are_looked_for_again() -> None:
    knobs = pytest.importorskip("triton.knobs")
    found = knobs.NvidiaTool.from_path
    assert found("/no/such/ptxas") is None
    assert found.cache_info().currsize
    toolchain.forget_programs()
    assert not found.cache_info().currsize


@pytest.mark.parametrize("lacks", ["compiler", "header", "nothing"])
def test_kernels_that_decline_without_a_toolchain_are_reported_at_the_first_call(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that decline are not candidates, so no tuning reports them."""

    declining = FakeKernel("triton.one", against=lambda _: ["needs a C compiler"])
    registry = Registry()
    registry.register(plugin(FakeBlas(), declining), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer({})), CacheStore(tmp_path))
    if lacks == "compiler":
        monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    else:
        monkeypatch.setattr(toolchain, "c_compiler", lambda: tmp_path)
        header = Path(__file__) if lacks == "nothing" else tmp_path / "Python.h"
        monkeypatch.setattr(toolchain, "python_header", lambda: header)
    gpu = replace(DEVICE, type="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in (DEVICE, gpu, gpu):
            assert d.choose(problem(device=device), settings()).origin == "fallback"
            assert explain_problem(d, problem(device=device), settings()).kernel == "blas"
    texts = [str(each.message) for each in caught]
    if lacks == "nothing":
        assert texts == []
    else:
        (text,) = texts
        assert ("C compiler" if lacks == "compiler" else "Python.h") in text
        assert "tmm doctor" in text


def test_the_doctor_shows_untried_kernels_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(doctor_toolchain, "fingerprint", lambda _: DEVICE)
    d, _ = process(tmp_path, Broken("fast", no_memory), Broken("two", no_ptxas))
    dispatch.default_dispatcher.made = d
    assert list(doctor_toolchain.untried(cpu)) == []
    with pytest.warns(TmmWarning, match="Cannot find ptxas"):
        assert [chosen(d, n=n) for n in (32, 48)] == ["blas"] * 2
    (finding,) = doctor_toolchain.untried(cpu)
    assert finding.state == "problem"
    assert finding.text.startswith("2 kernels are untried for 2 problems: PluginError")
    assert "Cannot find ptxas" in finding.text  # rather than what may pass
    assert "repair" in finding.advice
    late, _ = process(tmp_path, Broken("fast", lambda: TimeoutError(BUDGET_ENDED)))
    assert chosen(late, n=64) == "blas"
    finding, budget = doctor_toolchain.untried(cpu)
    assert finding.text.startswith("2 kernels are untried for 2 problems")
    assert (budget.state, "of 1 problems" in budget.text) == ("note", True)


def test_the_doctor_shows_the_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    gpu = torch.device("cuda")
    assert list(doctor_toolchain.parts(torch.device("cpu"))) == []

    def part(about: str) -> Any:
        return next(each for each in doctor_toolchain.parts(gpu) if about in each.text)

    assert part("fingerprint").text.endswith(toolchain.fingerprint())
    assert part("missing").state == "problem"  # Triton then uses its own
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\nexit 127\n")
    tool.chmod(0o755)
    monkeypatch.setenv(PTXAS, str(tool))
    assert part("does not run").state == "problem"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    assert part("release 12.9").state == "ok"
    monkeypatch.setattr(toolchain, "ptxas", lambda: None)
    assert part("no ptxas").state == "problem"
    monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    assert "install gcc" in part("C compiler").advice
    monkeypatch.setattr(toolchain, "c_compiler", lambda: tool)
    monkeypatch.setattr(toolchain, "python_header", lambda: tmp_path / "Python.h")
    assert "python3-dev" in part("Python.h").advice
    monkeypatch.setattr(toolchain, "usable", lambda _: "full")
    assert "free some space" in part("temporary folder").advice


def test_the_tune_command_counts_untried_kernels() -> None:
    outcome = {
        "problem": "p", "status": "tuned", "kernel": "blas", "config": {}, "median_us": 10.0,
        "blas_us": 10.0, "candidates": {"ok": 1}, "seconds": 1.0,
        "untried": {"fast": "RuntimeError: Cannot\nfind ptxas", "two": "RuntimeError"},
    }  # fmt: skip
    assert "2 untried: RuntimeError: Cannot find ptxas" in tune._line(outcome)
    del outcome["untried"]
    assert "untried" not in tune._line(outcome)


# -- faults of plugins ----------------------------------------------------------------------


def boom(right: Any, *arguments: Any) -> Any:
    raise ZeroDivisionError("in the launch")


def wrong(right: Any, *arguments: Any) -> Any:
    return right(*arguments) * 2


def narrow(right: Any, *arguments: Any) -> Any:
    return right(*arguments)[:, 1:]


def exits(right: Any, *arguments: Any) -> Any:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(boom, "in the launch"), (wrong, "exceeds"), (narrow, "shape"), (exits, "SystemExit")],
)
def test_a_plugins_fault_in_tuning_is_one_warning(fault: Any, words: str, tmp_path: Path) -> None:
    """The warning names kernel, reason, file and line. Further faults add no warning."""
    d, _ = process(tmp_path, Faulty(fault, "fast"), Faulty(fault, "second"))
    with pytest.warns(TmmWarning) as caught:
        assert [chosen(d, n=n) for n in (32, 48)] == ["blas"] * 2
    (message,) = [str(each.message) for each in caught]
    assert "kernel fast" in message
    assert words in message
    assert ".py:" in message
    assert "tmm doctor" in message


def test_a_refusal_is_not_a_fault(tmp_path: Path) -> None:
    """A kernel may find out in ``bind`` that a config does not fit."""
    d, _ = process(tmp_path, Broken("fast", lambda: ConfigError("BLOCK_M is too large")))
    assert chosen(d) == "blas"
    assert on_record(tmp_path)["fast"] == "failed"


def test_under_w_error_the_record_is_saved_first(tmp_path: Path) -> None:
    d, _ = process(tmp_path, Faulty(boom, "bad"), FakeKernel("fast"))
    with pytest.raises(TmmWarning, match="in the launch"):
        chosen(d)
    assert chosen(d) == "fast"
    assert on_record(tmp_path)["bad"] == "failed"
    broken, _ = process(tmp_path / "other", Broken("bad", no_ptxas), FakeKernel("fast"))
    with pytest.raises(TmmWarning, match="Cannot find ptxas"):
        chosen(broken)
    assert chosen(broken) == "fast"


def test_causes_in_old_records_are_recognised() -> None:
    assert cause_of_text("ValueError: no such layout") is None
    assert cause_of_text("error nan exceeds 2e-05") is None
    assert cause_of_text("cannot be verified within 12 MiB of memory") == "passing"
