"""Candidates compile in other processes: a candidate that harms its process costs only itself.

The plugin below is installed for the server by an entry point, as third parties install theirs. The
``tile`` of its config selects the kernel's behaviour while it compiles.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    FakeBlas,
    FakeKernel,
    FakeTimer,
    Tuner,
    dispatcher,
    imported,
    install,
    problem,
    registered,
    settings,
)

from tmm_core.epilogues import parse
from tmm_core.errors import TmmWarning
from tmm_core.registry.registry import Source
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.kernel import Candidate
from tmm_core.tuning import compile_pool, findings, pool_host
from tmm_core.tuning.compile_pool import Compilers, NotCompiledError
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.pool_host import YIELDING

HERE = Path(__file__).parent.parent
PLUGIN = """
import errno, os, signal, subprocess, sys, time
from pathlib import Path
from fakes import FakeConfig, FakeKernel, plugin
from tmm_core import ConfigError

NOTHING, HANG, EXIT, CRASH, RAISE, SYSTEM_EXIT, SHOUT, SLOW = range(1, 9)

class Compiled(FakeKernel):
    def compile(self, problem, config):
        with open(os.environ["COMPILED"], "a") as file:
            print(os.getpid(), config.tile, problem.n, problem.epilogue.key, file=file)
        if config.tile >= 100:
            time.sleep(0.02)
        match config.tile:
            case 2: time.sleep(600)
            case 3: os._exit(3)
            case 4:
                print("so it ends", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            case 5: raise ValueError("no such layout")
            case 6: sys.exit("enough")
            case 7:
                print("to whom it may concern")
                os.system("echo from a child; echo and another >&2")
            case 8: time.sleep(0.5)
            case 9: subprocess.run([os.environ["TRITON_PTXAS_PATH"], "--version"], check=True)
            case 10: os.kill(os.getpid(), signal.SIGKILL)
            case 11: raise OSError(errno.ENOSPC, "full")  # its number tells, not its text
            case 12: raise ConfigError("tiles of 12 do not fit")

kernel = Compiled("compiled.one", tiles=range(1, 9))
two = Compiled("compiled.two", tiles=range(1, 9))
hooks = plugin(kernel, two)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported(tmp_path_factory.mktemp("site"), "compiled", PLUGIN) as found:
        yield found


@pytest.fixture(autouse=True)
def installed(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TMM_PLUGINS", "compiled")  # the server imports no other
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled.txt"))
    return module


@pytest.fixture(scope="module")
def shared(module: Any) -> Iterator[Compilers]:
    with contextlib.closing(Compilers(workers=2)) as made:
        yield made


@pytest.fixture
def server(shared: Compilers, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    monkeypatch.setattr(shared, "limit", 60.0)
    return shared


@pytest.fixture
def own(module: Any) -> Iterator[Compilers]:
    with contextlib.closing(Compilers(workers=2)) as made:
        yield made


def process(compilers: Compilers) -> subprocess.Popen[bytes]:
    assert compilers._host is not None
    return compilers._host.process


def candidate(kernel: Any, tile: int) -> Candidate:
    return Candidate(kernel, replace(kernel.default_config(problem()), tile=tile))


def reason(future: futures.Future[None]) -> str:
    error = future.exception(timeout=60)
    assert isinstance(error, NotCompiledError)
    return str(error)


def compiled() -> list[list[str]]:
    """Process, tile, N and epilogue of everything that was begun."""
    path = Path(os.environ["COMPILED"])
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def begun(count: int = 1) -> list[int]:
    """The processes that began to compile, as soon as there are ``count``."""
    while len(done := compiled()) < count:
        time.sleep(0.01)
    return [int(pid) for pid, *_ in done]


def ended(*pids: int) -> None:
    """Wait until none of them runs."""
    give_up = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether it runs. A process that has ended may still wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_fault_costs_one_candidate(
    server: Compilers, installed: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def submit(tile: int) -> futures.Future[None]:
        return server.submit(problem(n=48), candidate(installed.kernel, tile))

    submitted = {tile: submit(tile) for tile in (3, 4, 5, 6, 7, 1)}
    assert reason(submitted[3]) == "its compiler ended with exit code 3"
    assert reason(submitted[4]) == "its compiler died (signal 11, SIGSEGV): so it ends"
    assert reason(submitted[5]) == "ValueError: no such layout"
    assert reason(submitted[6]) == "SystemExit: enough"
    assert submitted[7].result(timeout=60) is None
    assert submitted[1].result(timeout=60) is None
    lines = compiled()
    assert {int(tile) for _, tile, *_ in lines} == set(submitted)
    assert str(os.getpid()) not in {pid for pid, *_ in lines}
    assert {n for *_, n, _ in lines} == {"48"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_hanging_candidates_share_their_limit(server: Compilers, installed: Any) -> None:
    server.submit(problem(), candidate(installed.kernel, 1)).result(timeout=60)
    server.limit = 1.5
    started = time.monotonic()
    hung = [server.submit(problem(), candidate(installed.kernel, 2)) for _ in range(4)]
    server.limit = 60.0
    other = server.submit(problem(), candidate(installed.two, 1))
    reasons = [reason(future) for future in hung]
    assert time.monotonic() - started < 3.5 * 1.5  # four one after another take 6 s
    assert other.result(timeout=60) is None
    assert reasons == ["did not compile within 1.5 s"] * 4
    assert server.submit(problem(), candidate(installed.kernel, 1)).result(timeout=60) is None
    ended(*(int(pid) for pid, tile, *_ in compiled() if tile == "2"))


@pytest.mark.slow
def test_a_config_that_hangs_delays_no_other_kernel(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are workers for two configs that hang, in addition to those that the cores need."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    with contextlib.closing(Compilers()) as quick:
        hung = [quick.submit(problem(), candidate(installed.kernel, 2)) for _ in range(2)]
        others = [quick.submit(problem(), candidate(installed.two, t)) for t in (1, 7, 8)]
        assert [future.result(timeout=40) for future in others] == [None] * 3
        assert not any(future.done() for future in hung)


@pytest.mark.slow
def test_an_abandoned_compilation_is_killed(server: Compilers, installed: Any) -> None:
    hung = [server.submit(problem(), candidate(installed.kernel, 2)) for _ in range(4)]
    kept = server.submit(problem(), candidate(installed.kernel, 8))
    begun(2)
    server.cancel_pending(hung)
    done, _ = futures.wait([*hung, kept], timeout=30)
    assert len(done) == 5
    assert all(future.cancelled() for future in hung)
    assert kept.result() is None
    pids = {int(pid) for pid, tile, *_ in compiled() if tile == "2"}
    assert len(pids) == 2
    ended(*pids)


@pytest.mark.slow
def test_compilers_let_the_calling_process_go_first(own: Compilers, installed: Any) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    own.submit(problem(), candidate(installed.kernel, 2))
    (pid,) = begun()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, mine + YIELDING)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


@pytest.mark.slow
def test_closing_ends_every_process_and_leaves_no_file(
    own: Compilers, installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    future = own.submit(problem(), candidate(installed.kernel, 2))
    pids = [*begun(), process(own).pid]
    assert list(folder.iterdir())
    assert all(map(alive, pids))
    own.close()
    assert future.result(timeout=10) is None  # left to whoever asked
    ended(*pids)
    assert not list(folder.iterdir())
    # Closed is not broken.
    again = own.submit(problem(), candidate(installed.kernel, 5))
    assert reason(again) == "ValueError: no such layout"


@pytest.mark.parametrize(
    "why", ["version", "kernel", "epilogue", "config", "interpreted", "nothing to compile"]
)
def test_a_kernel_that_the_server_lacks_is_left_to_bind(
    why: str, server: Compilers, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, instance = installed.kernel, problem()
    if why == "version":
        monkeypatch.setitem(kernel.__dict__, "version", "2")
    elif why == "kernel":
        kernel = installed.Compiled("of.mine")
    elif why == "epilogue":
        instance = problem(epilogue=Epilogue("mine", lambda z: z + 1))
    elif why == "interpreted":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    elif why == "nothing to compile":
        kernel = FakeKernel("compiled.one")
    given = candidate(kernel, 3)
    if why == "config":
        object.__setattr__(given.config, "tile", object())
    assert server.submit(instance, given).result(timeout=60) is None
    assert not compiled()


def test_no_server_is_started_for_nothing(
    own: Compilers, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.submit(problem(), candidate(FakeKernel("compiled.one"), 3)).result(timeout=1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    own.submit(problem(), candidate(installed.kernel, 3)).result(timeout=1)
    assert own._host is None


def test_an_epilogue_with_parameters_arrives(server: Compilers, installed: Any) -> None:
    instance = problem(epilogue=parse("gelu_tanh+softcap(1e+3)"))
    assert server.submit(instance, candidate(installed.kernel, 1)).result(timeout=60) is None
    assert compiled()[0][3] == instance.epilogue.key


def test_variables_that_changed_since_hold(
    server: Compilers, installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.submit(problem(), candidate(installed.kernel, 1)).result(timeout=60)
    with monkeypatch.context() as patch:
        patch.setenv("COMPILED", str(tmp_path / "elsewhere.txt"))
        server.submit(problem(), candidate(installed.kernel, 7)).result(timeout=60)
        assert [tile for _, tile, *_ in compiled()] == ["7"]
    server.submit(problem(), candidate(installed.kernel, 8)).result(timeout=60)
    assert [tile for _, tile, *_ in compiled()] == ["1", "8"]


@pytest.mark.slow
def test_another_plugin_path_is_another_server(
    own: Compilers, installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.submit(problem(), candidate(installed.kernel, 1)).result(timeout=60)
    install(tmp_path / "more", "later", PLUGIN.replace("compiled.", "later."))
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    monkeypatch.setenv("TMM_PLUGINS", "later")
    later = importlib.import_module("later_plugin")
    assert reason(own.submit(problem(), candidate(registered(later.kernel), 5))).startswith(
        "ValueError"
    )


@pytest.mark.parametrize("broken", ["process", "import", "death", "slow"])
def test_without_a_server_candidates_compile_in_bind(
    broken: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "import": "raise ImportError('libtriton.so: cannot open shared object file')",
        "death": "import os; os.kill(os.getpid(), 9)",
        "slow": "import time; time.sleep(60)",
    }
    expected = {
        "process": "Resource temporarily unavailable",
        "import": "libtriton.so",
        "death": "SIGKILL",
        "slow": "not ready within 1 s",
    }
    if broken == "process":

        def refuse(*args: Any, **fields: Any) -> Any:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(subprocess, "Popen", refuse)
    else:
        monkeypatch.setattr(compile_pool, "_program", lambda folder: ["-c", programs[broken]])
        monkeypatch.setattr(compile_pool, "START_LIMIT", 1.0 if broken == "slow" else 60.0)
    made = Compilers(workers=2)

    def all_are_left() -> None:
        jobs = [made.submit(problem(), candidate(installed.kernel, 3)) for _ in range(300)]
        assert [job.result(timeout=60) for job in jobs] == [None] * 300
        while not made._broken:
            time.sleep(0.01)

    with pytest.warns(TmmWarning, match=expected[broken]) as caught:
        all_are_left()
    assert len(caught) == 1
    assert made.submit(problem(), candidate(installed.kernel, 3)).result(timeout=1) is None
    made.close()


def test_no_call_waits_to_send_jobs_to_a_starting_server(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket holds few jobs. Once a model's call in background mode waited for seconds."""
    monkeypatch.setattr(
        compile_pool, "_program", lambda folder: ["-c", "import time; time.sleep(600)"]
    )
    monkeypatch.setenv("LONG", "x" * 10_000)
    made = Compilers(workers=2)
    jobs: list[futures.Future[None]] = []

    def submit() -> None:
        jobs.extend(made.submit(problem(), candidate(installed.kernel, 3)) for _ in range(300))

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    thread.join(60)
    waiting = thread.is_alive()
    made.close()
    thread.join(60)
    assert not waiting
    assert [job.result(timeout=60) for job in jobs] == [None] * 300


@pytest.mark.parametrize("program", ["", "/usr/sbin/uwsgi", "/opt/renderer"])
def test_a_program_with_python_in_it_is_not_started_again(
    program: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    made = Compilers()
    assert made.submit(problem(), candidate(installed.kernel, 3)).result(timeout=1) is None
    assert made._host is None


@pytest.mark.slow
def test_an_unused_server_ends(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = "import tmm_core.tuning.pool_host as s\n"
    patch += "s.IDLE_LIMIT = 0.2\ns._CHECK_INTERVAL = 0.1\ns.main()\n"
    monkeypatch.setattr(compile_pool, "_program", lambda folder: ["-c", patch])
    made = Compilers(workers=1)
    assert reason(made.submit(problem(), candidate(installed.kernel, 5))).startswith("ValueError")
    first = made._host
    assert first is not None
    while not first.ended:
        time.sleep(0.01)
    assert reason(made.submit(problem(), candidate(installed.kernel, 5))).startswith("ValueError")
    assert made._host is not first
    # The output of the only worker's last job is not reported with the next job.
    assert made.submit(problem(), candidate(installed.kernel, 7)).result(timeout=60) is None
    ended_with = reason(made.submit(problem(), candidate(installed.kernel, 3)))
    assert ended_with == "its compiler ended with exit code 3"
    made.close()


def test_the_tuner_binds_compiled_candidates_and_records_other_reasons(
    server: Compilers, installed: Any
) -> None:
    kernel = installed.Compiled("compiled.one", tiles=(1, 3, 4, 5, 7))
    timer = FakeTimer({"compiled.one": 5.0, "blas": 10.0})
    tuner, found = Tuner(timer, compilers=server), Findings()
    current = settings(tune_budget=60.0)
    record = tuner.tune(problem(), [FakeBlas(), kernel], current, findings=found)
    mine = {c.config["tile"]: c for c in record.candidates if c.kernel == kernel.name}
    # A crash of the compiler is no verdict.
    assert {tile: c.status for tile, c in mine.items()} == {
        1: "ok", 3: "failed", 5: "failed", 7: "ok",
    }  # fmt: skip
    left = found.left["compiled.one", kernel.version]
    assert (left.cause, left.reason[:39]) == ("hung", "its compiler died (signal 11, SIGSEGV):")
    faults = [reason for _, reason in found.faults[Source("compiled.one")]]
    assert len(faults) == 3
    raised = next(fault for fault in faults if "no such layout" in fault)
    line = PLUGIN[: PLUGIN.index("raise ValueError")].count("\n") + 1
    assert raised.endswith(f"compiled_plugin.py:{line})")  # found where it was raised
    assert mine[3].reason == "its compiler ended with exit code 3"
    assert mine[5].reason == "ValueError: no such layout"
    assert [p.m for p in kernel.bound].count(64) == 2  # and what is left at other M of the bucket


def test_a_broken_toolchain_leaves_kernels_untried_until_it_is_repaired(
    server: Compilers, installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' compiler is missing, then fails, then works: each time in a new dispatcher."""
    tool = tmp_path / "ptxas"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    kernels = [installed.Compiled(name, tiles=(9,)) for name in ("compiled.one", "compiled.two")]
    times = {"compiled.one": 5.0, "blas": 10.0}

    def answers(n: int = 32) -> tuple[str, bool]:
        """The kernel that a new process chooses, and whether anything was compiled for it."""
        findings._warned.clear()
        before = len(compiled())
        d, _ = dispatcher(FakeBlas(), *kernels, times=times, root=tmp_path / "cache")
        d.tuner.compilers = server
        name = d.choose(problem(n=n), settings(tune_budget=60.0)).candidate.kernel.name
        return name, len(compiled()) > before

    with pytest.warns(TmmWarning, match=r"compiled.one and 1 more .*FileNotFoundError.*doctor"):
        assert answers() == ("blas", True)
    with pytest.warns(TmmWarning, match="FileNotFoundError"):
        assert answers() == ("blas", False)
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    with pytest.warns(TmmWarning, match="returned non-zero exit status 3"):
        assert answers() == ("blas", True)
    tool.write_text("#!/bin/sh\nexit 0\n")
    assert answers() == ("compiled.one", True)
    assert answers() == ("compiled.one", False)


@pytest.mark.parametrize(("tile", "words"), [(10, "SIGKILL"), (11, "Errno 28"), (4, "SIGSEGV")])
def test_no_verdict_of_a_killed_compiler_or_a_full_disk(
    tile: int, words: str, server: Compilers, installed: Any
) -> None:
    kernel = installed.Compiled("compiled.one", tiles=(tile,))
    tuner, found = Tuner(FakeTimer({"blas": 10.0}), compilers=server), Findings()
    kernels = [FakeBlas(), kernel]
    record = tuner.tune(problem(), kernels, settings(tune_budget=60.0), findings=found)
    assert [c.kernel for c in record.candidates] == ["blas"]
    left = found.left["compiled.one", kernel.version]
    assert words in left.reason
    assert left.cause == ("hung" if tile == 4 else "passing")


@pytest.mark.parametrize(("tile", "faults"), [(12, 0), (5, 1)])
def test_a_refused_config_is_no_fault_of_its_kernel(
    tile: int, faults: int, server: Compilers, installed: Any
) -> None:
    """The winner of a near size may not fit this one."""
    kernel = installed.Compiled("compiled.one", tiles=(1, tile))
    times = {"compiled.one": 5.0, "blas": 10.0}
    tuner, found = Tuner(FakeTimer(times), compilers=server), Findings()
    kernels = [FakeBlas(), kernel]
    record = tuner.tune(problem(), kernels, settings(tune_budget=60.0), findings=found)
    assert record.best.kernel == "compiled.one"
    (failed,) = [c for c in record.candidates if c.status == "failed"]
    assert (
        failed.reason
        == {12: "ConfigError: tiles of 12 do not fit", 5: "ValueError: no such layout"}[tile]
    )
    assert sum(map(len, found.faults.values())) == faults


def test_prepared_candidates_are_compiled_once(server: Compilers, installed: Any) -> None:
    server.submit(problem(), candidate(installed.kernel, 1)).result(timeout=60)
    kernels = [FakeBlas(), installed.Compiled("compiled.one", tiles=(8, 1))]
    tuner = Tuner(FakeTimer({"compiled.one": 5.0, "blas": 10.0}), compilers=server)
    for n in (100, 200):
        tuner.prepare(problem(n=n), kernels)
    for n in (100, 200):
        record = tuner.tune(problem(n=n), kernels, settings(tune_budget=60.0))
        assert [c.status for c in record.candidates] == ["ok"] * 3
    # Once at the record's own M, the slow one while it was pending; others at other M.
    lines = [(tile, n) for _, tile, n, _ in compiled() if n in ("100", "200")]
    assert sorted(Counter(lines).values()) == [3] * 4
    assert not tuner.prepared


def test_the_end_of_the_budget_ends_compilations(server: Compilers, installed: Any) -> None:
    server.submit(problem(), candidate(installed.kernel, 1)).result(timeout=60)
    kernel = installed.Compiled("compiled.one", tiles=(2, 1))
    tuner = Tuner(FakeTimer({}), compilers=server)
    started = time.monotonic()
    record = tuner.tune(problem(), [FakeBlas(), kernel], settings(tune_budget=1.0))
    assert time.monotonic() - started < 20
    assert not [c for c in record.candidates if c.config.get("tile") == 2]  # it is untried
    ended(*(int(pid) for pid, tile, *_ in compiled() if tile == "2"))


@pytest.mark.slow
def test_the_start_of_the_server_costs_no_budget(own: Compilers, installed: Any) -> None:
    """Importing torch and the plugins takes seconds: the budget of the first problem would be over
    before its only kernel compiled."""
    kernel = installed.Compiled("compiled.one", tiles=(1,))
    tuner = Tuner(FakeTimer({"compiled.one": 5.0, "blas": 10.0}), compilers=own)
    record = tuner.tune(problem(), [FakeBlas(), kernel], settings(tune_budget=0.5))
    assert {c.kernel: c.status for c in record.candidates} == {"blas": "ok", "compiled.one": "ok"}
    assert not own.are_starting([futures.Future()])
    assert not Compilers().are_starting([futures.Future()])
    assert record.tuning_seconds > 0.0


# -- processes of many kinds ----------------------------------------------------------------

PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import os, time
from fakes import problem, registered
from compiled_plugin import kernel
registered(kernel)
from tmm_core.tuning import compile_pool
from tmm_core.spec.kernel import Candidate

def candidate(tile):
    return Candidate(kernel, type(kernel.default_config(problem()))(tile=tile))

def ask(tile=5):
    error = compile_pool.default().submit(problem(), candidate(tile)).exception(timeout=100)
    print(os.getpid() if tile == 7 else error, flush=True)
"""


def run(body: str, *options: str, **fields: Any) -> subprocess.Popen[str]:
    """Python with a program, on its standard input unless ``options`` say otherwise."""
    path = os.pathsep.join(sys.path)
    program = subprocess.Popen(
        [sys.executable, *(options or ("-",))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, **fields.pop("env", {})}, **fields,
    )  # fmt: skip
    assert program.stdin is not None
    program.stdin.write(PROGRAM.format(here=str(HERE)) + body)
    program.stdin.close()
    program.stdin = None
    return program


def finished(program: subprocess.Popen[str]) -> list[str]:
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert not err
    return out.splitlines()


FORKED = """
ask()
pid = os.fork()
if pid == 0:
    ask()
    os._exit(0)
os.waitpid(pid, 0)
ask()
"""
DAEMON = """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=ask, daemon=True)
process.start()
process.join()
ask()
"""


@pytest.mark.slow
def test_a_script_runs_once(installed: Any, tmp_path: Path) -> None:
    """It has no guard. Pebble's workers would run it again if the pool were in this process, so the
    pool has a process of its own."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(here=str(HERE)) + "print('here')\nask()\n")
    assert finished(run("", str(script))) == ["here", "ValueError: no such layout"]
    script.write_text(IN_THIS_PROCESS)
    out, _ = run("", str(script)).communicate(timeout=120)
    assert out.count("here") > 1


IN_THIS_PROCESS = """
import multiprocessing, os
import pebble
print("here", flush=True)
with pebble.ProcessPool(1, context=multiprocessing.get_context("forkserver")) as pool:
    pool.schedule(os.getpid, timeout=60).result()
"""


@pytest.mark.parametrize("body", ["ask()\n", FORKED, DAEMON], ids=["stdin", "forked", "daemon"])
@pytest.mark.slow
def test_any_process_can_start_compilers(body: str, installed: Any) -> None:
    lines = finished(run(body))
    assert set(lines) == {"ValueError: no such layout"}
    assert len(lines) == body.count("ask()") + body.count("target=ask")
    assert len({pid for pid, *_ in compiled()}) >= 1 + ("fork" in body)


@pytest.mark.slow
def test_a_removed_working_folder(installed: Any, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    assert finished(run("os.rmdir(os.getcwd())\nask()\n", cwd=gone)) == [
        "ValueError: no such layout"
    ]


#: Ended while it compiles. Another process may hold all its files open, such as a child that was
#: forked without Python's knowledge. The child is another program, so it inherits no locks of
#: threads that it lacks.
ENDS = """
import signal, subprocess
# Where this runs in a shell's background, SIGINT is ignored and so Python has no handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
made = compile_pool.default()
made.submit(problem(), candidate(2))
holder = 0
if {held}:
    for file in os.listdir("/proc/self/fd"):
        if int(file) > 2 and os.path.exists("/proc/self/fd/" + file):
            os.set_inheritable(int(file), True)
    apart = dict(close_fds=False, start_new_session=True)
    for name in ("stdin", "stdout", "stderr"):
        apart[name] = subprocess.DEVNULL
    holder = subprocess.Popen(["sleep", "200"], **apart).pid
print(made._host.process.pid, holder, flush=True)
time.sleep(200)
"""


@pytest.mark.parametrize(
    ("how", "held"), [(signal.SIGKILL, True), (signal.SIGTERM, False), (signal.SIGINT, False)]
)
@pytest.mark.slow
def test_no_process_outlives_its_parent(how: int, held: bool) -> None:
    program = run(ENDS.format(held=held), start_new_session=True)
    holder = 0
    try:
        assert program.stdout is not None
        server, holder = map(int, program.stdout.readline().split())
        pids = [server, *begun()]
        assert all(map(alive, pids))
        # As a terminal does: to the whole group.
        os.killpg(program.pid, how)
        ended(*pids)
        assert not held or alive(holder)
        _, err = program.communicate(timeout=30)
        assert program.returncode != 0
        # An interrupt shows the traceback of this process, and none of the others.
        assert err.count("Traceback") == (1 if how == signal.SIGINT else 0)
    finally:
        for leader in filter(None, (holder, program.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_server_is_reported(own: Compilers, installed: Any) -> None:
    future = own.submit(problem(), candidate(installed.kernel, 2))
    pids = [*begun(), process(own).pid]

    def kill() -> None:
        os.kill(pids[-1], signal.SIGKILL)
        assert future.result(timeout=10) is None
        while not own._broken:
            time.sleep(0.01)

    with pytest.warns(TmmWarning, match=r"died \(signal 9, SIGKILL\)"):
        kill()
    ended(*pids)


@pytest.mark.slow
def test_compilers_start_from_an_archive(
    own: Compilers, installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(pool_host.__file__, "archived_host.py")
    monkeypatch.syspath_prepend(tmp_path / "archive.zip")
    monkeypatch.setattr(compile_pool, "pool_host", importlib.import_module("archived_host"))
    job = own.submit(problem(), candidate(installed.kernel, 5))
    assert reason(job) == "ValueError: no such layout"


def test_many_threads_and_many_jobs(server: Compilers, installed: Any) -> None:
    submitted: list[futures.Future[None]] = []

    def ask() -> None:
        for n in range(60):
            submitted.append(server.submit(problem(n=n + 1), candidate(installed.kernel, 1)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [future.result(timeout=60) for future in submitted] == [None] * 240
    lines = compiled()
    assert len(lines) == 240
    assert 1 <= len({pid for pid, *_ in lines}) <= 2
