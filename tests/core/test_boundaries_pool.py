"""The processes that compile and make first launches, part by part in this process: messages,
limits, repetitions, and files that stay behind."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import queue
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pebble
import pytest
import torch
from fakes import FakeKernel, plugin, problem
from pebble import ProcessExpired

from tmm_core.epilogues import parse
from tmm_core.errors import TmmWarning
from tmm_core.registry.registry import Registry
from tmm_core.spec import watch
from tmm_core.spec.kernel import Candidate
from tmm_core.tuning import compile_pool, first_launch, pool_host
from tmm_core.tuning.compile_pool import Compilers, HungError, NotCompiledError, RefusedError
from tmm_core.tuning.first_launch import FirstLaunches


class OfKind(Compilers):
    variables: ClassVar = {"OF_KIND": "1"}
    without, late, died, raised = "compiled here", "took over {}", "it {}", "raised {}"


class Importing(OfKind):
    forks = False


class Compiling(FakeKernel):
    """A kernel that notes the configs that it compiles, and fails as a test requires."""

    error: BaseException | None = None

    def compile(self, problem: Any, config: Any) -> None:
        print("compiling")
        if self.error is not None:
            raise self.error


def candidate(tile: int = 1, name: str = "k") -> Candidate:
    kernel = Compiling(name, tiles=(tile,))
    return Candidate(kernel, kernel.default_config(problem()))


# -- the host: jobs to workers, results to the parent ----------------------------------------------


class Pool:
    """Pebble's pool; a test ends its jobs."""

    def __init__(self, log: list[Any], *given: Any) -> None:
        self.log, self.given = log, given
        self.jobs: list[tuple[Any, Any, Future[Any]]] = []
        self.broken = False

    def schedule(self, function: Any, args: Any, timeout: Any = None) -> Future[Any]:
        if self.broken:
            raise RuntimeError("the pool broke")
        assert function is pool_host.perform
        future: Future[Any] = Future()
        self.jobs.append((args[0], timeout, future))
        if args[0] is None:
            future.set_result(None)
        return future

    def stop(self) -> None:
        self.log.append("stop")

    def join(self) -> None:
        self.log.append("join")

    @property
    def running(self) -> list[int]:
        return [job["id"] for job, _, future in self.jobs if not future.done()]


class Hosted:
    """A host of two workers between a pool and a parent that are this test."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.log: list[Any] = []
        #: The start method of each host's processes, and the modules that they import before
        #: they start.
        self.contexts: list[tuple[str, list[str]]] = []

    def _pool(self, *given: Any) -> Pool:
        self.pools.append(Pool(self.log, *given))
        return self.pools[-1]

    def _context(self, method: str) -> Any:
        preloaded: list[str] = []
        self.contexts.append((method, preloaded))
        return SimpleNamespace(set_forkserver_preload=preloaded.extend)

    @contextlib.contextmanager
    def serving(self, workers: int, forks: bool, folder: Path) -> Iterator[Any]:
        self.parent, theirs = Pipe()
        host = self.host = pool_host.Host(theirs, workers, forks, str(folder))
        with self.parent, theirs:
            yield self
        os.close(host._wake)
        os.close(host._waker)

    def receive(self, *numbers: int) -> None:
        for number in numbers:
            self.host._receive({"id": number, "limit": 10 + number})
        self.host._assign()

    def end(self, outcome: Any) -> None:
        """End the pool's oldest job, and process its end as ``run`` does."""
        future = next(future for _, _, future in self.pools[-1].jobs if not future.done())
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        self.conclude()

    def conclude(self) -> None:
        assert os.read(self.host._wake, 1) == b"."
        self.host._conclude(*self.host._ended.popleft())
        self.host._assign()

    def answers(self) -> list[Any]:
        found = []
        while self.parent.poll():
            found.append(json.loads(self.parent.recv_bytes()))
        return found


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosted:
    made = Hosted()
    monkeypatch.setattr(multiprocessing, "get_context", made._context)
    monkeypatch.setattr(pebble, "ProcessPool", made._pool)
    return made


@pytest.fixture
def hosted(hosts: Hosted, tmp_path: Path) -> Iterator[Hosted]:
    with hosts.serving(2, True, tmp_path):
        yield hosts


def test_a_thread_may_import_the_program_after_the_main_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread's first product imports the program. At that time Python refuses to import
    modules of process pools."""
    monkeypatch.setattr(threading, "_SHUTTING_DOWN", True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pebble"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "concurrent.futures.process")
    with pytest.raises(RuntimeError, match="after shutdown"):
        importlib.import_module("concurrent.futures.process")
    program = runpy.run_path(pool_host.__file__)
    assert program["ending"](1, "why") == "ended with exit code 1: why"


@pytest.mark.parametrize(("forks", "way"), [(True, "forkserver"), (False, "spawn")])
def test_workers_are_forked_from_a_process_that_has_imported_everything(
    forks: bool, way: str, hosts: Hosted, tmp_path: Path
) -> None:
    with hosts.serving(3, forks, tmp_path):
        assert hosts.contexts == [(way, [pool_host._WORKER])]
        (pool,) = hosts.pools
        assert pool.given[:4] == (3, 0, pool_host.begin, [str(tmp_path)])


def test_no_more_jobs_run_than_there_are_workers(hosted: Hosted) -> None:
    pool = hosted.pools[0]
    hosted.receive(1, 2, 3, 4)
    assert pool.running == [1, 2]
    assert [timeout for _, timeout, _ in pool.jobs] == [11, 12]
    hosted.end({"error": None})
    assert pool.running == [2, 3]
    hosted.end({"error": "no"})
    hosted.end({"error": None})
    assert pool.running == [4]
    hosted.end({"error": None})
    assert hosted.answers() == [[1, {"error": None}], [2, {"error": "no"}], [3, {"error": None}],
                                [4, {"error": None}]]  # fmt: skip
    assert not hosted.host._running


def test_a_cancelled_job_is_answered_never_and_begun_never(hosted: Hosted) -> None:
    hosted.receive(1, 2, 3, 4, 5)
    hosted.host._receive({"cancel": [2, 4, 9]})
    hosted.conclude()  # the second job was running
    pool = hosted.pools[0]
    assert pool.running == [1, 3]
    for _ in range(3):
        hosted.end({"error": None})
    assert [number for number, _ in hosted.answers()] == [1, 3, 5]
    assert len(pool.jobs) == 4


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (TimeoutError(), {"late": 15}),
        (ProcessExpired("gone", 3, 77), {"died": "ended with exit code 3: its last words"}),
        (ProcessExpired("gone", -11, 77), {"died": "died (signal 11, SIGSEGV): its last words"}),
        ({"error": "x", "place": "f:1"}, {"error": "x", "place": "f:1"}),
    ],
)
def test_how_a_job_ended_is_reported(
    outcome: Any, message: Any, hosted: Hosted, tmp_path: Path
) -> None:
    (tmp_path / "77").write_text("its last words\n")
    hosted.receive(5)
    hosted.end(outcome)
    assert hosted.answers() == [[5, message]]


def test_a_job_whose_worker_was_worn_out_is_next_and_so_three_times(
    hosted: Hosted, tmp_path: Path
) -> None:
    (tmp_path / "77").write_text("")
    hosted.receive(1, 2, 3)
    pool = hosted.pools[0]
    worn: Callable[[], Any] = lambda: ProcessExpired("worn out", pool_host.WORN_OUT, 77)  # noqa: E731
    hosted.end(worn())
    assert pool.running == [2, 1]  # before the third job
    hosted.end({"error": None})
    for _ in range(2):
        pool.jobs.sort(key=lambda job: job[0]["id"])
        hosted.end(worn())
        assert pool.running.count(1) == 1
    assert hosted.answers() == [[2, {"error": None}]]
    pool.jobs.sort(key=lambda job: job[0]["id"])
    hosted.end(worn())
    assert hosted.answers() == [[1, {"died": f"ended with exit code {pool_host.WORN_OUT}"}]]
    assert pool.running == [3]


def test_a_pool_that_broke_is_replaced_and_the_fourth_time_the_host_ends(hosted: Hosted) -> None:
    hosted.receive(1)
    for number in range(1, 4):
        hosted.pools[-1].broken = True
        hosted.end(BrokenProcessPool())
        assert len(hosted.pools) == number + 1
        assert hosted.log == ["join"] * number
        assert hosted.pools[-1].given == hosted.pools[0].given
        ((job, timeout, _),) = hosted.pools[-1].jobs
        assert (job["id"], timeout) == (1, 11)
    with pytest.raises(BrokenProcessPool):
        hosted.end(BrokenProcessPool())
    assert hosted.answers() == []
    hosted.host.end()
    assert hosted.log[3:] == ["stop", "join"]


def looks(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, steps: list[Any], **limits: float
) -> int:
    """Serve until idle, and return the number of looks. A look takes a second; the host ends after
    three idle ones. At each look the next event happens: a function, or ``None``."""
    monkeypatch.setattr(pool_host, "_CHECK_INTERVAL", 1.0)
    monkeypatch.setattr(pool_host, "IDLE_LIMIT", 3.0)
    count = 0

    def wait(channels: list[Any], patience: float) -> list[Any]:
        nonlocal count
        assert channels == [hosted.host._channel, hosted.host._wake]
        assert patience == 1.0
        count += 1
        assert count < 50
        step = steps.pop(0) if steps else None
        return step() if step is not None else []

    monkeypatch.setattr(pool_host, "wait", wait)
    hosted.host.run()
    return count


def test_a_host_serves_until_it_is_unused(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = hosted.pools[0]

    def job() -> list[Any]:
        hosted.parent.send_bytes(json.dumps({"id": 1, "limit": 9.0}).encode())
        return [hosted.host._channel]

    def ended() -> list[Any]:
        pool.jobs[-1][2].set_result({"error": None})
        return [hosted.host._wake]

    # Two idle looks do not end the host, nor do five while a job runs; three do.
    count = looks(hosted, monkeypatch, [None, None, job, *[None] * 5, ended])
    assert count == 2 + 1 + 5 + 1 + 3
    assert hosted.answers() == [[None, {}], [1, {"error": None}]]
    assert pool.jobs[0][0] is None


def test_a_host_whose_workers_do_not_start_ends_before_it_serves(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(OSError("no worker"))
    monkeypatch.setattr(hosted.pools[0], "schedule", lambda *_: failed)
    with pytest.raises(OSError, match="no worker"):
        looks(hosted, monkeypatch, [])
    assert hosted.answers() == []


def test_a_host_ends_with_its_parent(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    assert looks(hosted, monkeypatch, []) == 2


@pytest.mark.parametrize(
    ("status", "output", "message"),
    [
        (0, "", "ended with exit code 0"),
        (1, "why", "ended with exit code 1: why"),
        (-9, "", "died (signal 9, SIGKILL)"),
        (-11, "why", "died (signal 11, SIGSEGV): why"),
        (-200, "why", "died (signal 200): why"),
    ],
)
def test_the_message_of_a_host_that_ended(status: int, output: str, message: str) -> None:
    assert pool_host.ending(status, output) == message


def test_the_end_of_an_output_is_400_bytes() -> None:
    assert pool_host.tail(b"a" * 400 + b"b" * 400) == "b" * 400
    assert pool_host.tail(b"  \xffwhy\n\n") == "\ufffdwhy"


def test_a_worker_is_selected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    worker = SimpleNamespace(begin=begun.append, perform=lambda job: {"did": job["id"]})
    monkeypatch.setitem(sys.modules, pool_host._WORKER, worker)
    assert pool_host.perform(None) is None  # before there is a job
    assert pool_host.perform({"id": 3}) == {"did": 3}
    pool_host.begin("folder")
    assert begun == ["folder"]


@pytest.mark.parametrize("error", [None, EOFError, ConnectionResetError, ValueError])
@pytest.mark.parametrize("how", ["forks", "imports"])
@pytest.mark.parametrize("long", [False, True])
def test_the_program_of_a_host(
    how: str, error: Any, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host ends its workers in any case, leaves no file, and has no standard input."""
    seen: list[Any] = []

    class Served:
        def __init__(self, channel: Any, *given: Any) -> None:
            seen.append(given)
            self.channel, self.folder = channel, given[-1]

        def run(self) -> None:
            seen.append(self.channel.recv_bytes())
            assert os.read(0, 1) == b""
            assert os.path.isdir(self.folder)
            assert tempfile.tempdir == ("/tmp" if long else self.folder)
            if error is not None:
                raise error

        def end(self) -> None:
            seen.append("end")
            self.channel.close()

    # The limit is 60 characters. A test's own folder is longer.
    place = tempfile.mkdtemp(dir="/tmp", suffix="x" * (46 + long), prefix="")
    assert len(place) == 59 + long
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.setattr(pool_host, "Host", Served)
    monkeypatch.setattr(os, "nice", lambda by: seen.append(("nice", by)))
    monkeypatch.setattr(sys, "argv", ["pool_host.py", "6", how, place])
    ours, theirs = Pipe()
    with redirected(0), ours, theirs:
        os.dup2(theirs.fileno(), 0)
        ours.send_bytes(b"a job")
        with pytest.raises(ValueError) if error is ValueError else contextlib.nullcontext():
            pool_host.main()
    nice = [("nice", pool_host.YIELDING)] if how == "forks" else []
    assert seen == [*nice, (6, how == "forks", place), b"a job", "end"]
    assert not os.path.exists(place)


# -- the worker ------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module, with a test's kernels. Restore the process state that it changes."""
    monkeypatch.setenv("TMM_PLUGINS", "none")
    monkeypatch.setattr(watch, "enabled", watch.enabled)
    module = importlib.import_module(pool_host._WORKER)
    gc.unfreeze()
    registry = Registry()
    registry.register(plugin(Compiling("k", tiles=(1, 2, 3))), "fakes")
    monkeypatch.setattr(module, "_registry", registry)
    monkeypatch.setattr(module, "_worn_out", False)
    monkeypatch.chdir(tmp_path)
    environ = dict(os.environ)
    yield module
    os.environ.clear()
    os.environ.update(environ)


@contextlib.contextmanager
def redirected(*descriptors: int) -> Iterator[None]:
    """Restore these file descriptors at the end."""
    saved = {number: os.dup(number) for number in descriptors}
    try:
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


def perform(worker: Any, job: Any) -> Any:
    """The worker's answer to a job, after an earlier job printed something."""
    with redirected(1), tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 1)
        os.write(1, b"of the job before")
        answer = worker.perform(job)
        assert os.fstat(1).st_size == 0
    return answer


def job(instance: Any = None, tile: int = 1, **more: Any) -> dict[str, Any]:
    """A job as a host receives it."""
    sent: list[bytes] = []
    host: Any = compile_pool._Host.__new__(compile_pool._Host)
    host.ended, host._pending, host._lock = False, {}, contextlib.nullcontext()
    host._numbers, host._outbox = iter([5]), SimpleNamespace(put=sent.append)
    about = {"device": None, "limit": 60.0, "environ": {"HERE": "1"}, "folder": "/", **more}
    version = {"version": about.pop("version", registered().version)}
    what = Candidate(registered(), registered().config_type(tile=tile))
    assert host.send(problem() if instance is None else instance, what, about, Future())
    return {**json.loads(sent[0]), **version}


def registered() -> Any:
    registry = Registry()
    registry.register(plugin(Compiling("k", tiles=(1, 2, 3))), "fakes")
    return registry.kernel("k")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"deterministic": True},
        {"capturing": True, "batch_invariant": True},
        {"epilogue": parse("leaky_relu(0.3)"), "m": 7},
    ],
)
def test_a_worker_has_the_very_problem_and_candidate(fields: dict[str, Any], worker: Any) -> None:
    instance = problem(**fields)
    sent = job(instance, tile=3)
    assert sent["id"] == 5
    got, candidate = worker.recalled(sent)
    assert got == instance
    assert (candidate.kernel.name, candidate.config.tile) == ("k", 3)
    with pytest.raises(LookupError, match="k is of version"):
        worker.recalled(job(instance, version="another"))


def test_a_worker_takes_the_environment_of_a_job(worker: Any, tmp_path: Path) -> None:
    os.environ["ELSE"] = "1"
    (tmp_path / "there").mkdir()
    assert perform(worker, job(folder=str(tmp_path / "there"))) == {"error": None}
    assert dict(os.environ) == {"HERE": "1"}
    assert Path.cwd() == tmp_path / "there"
    assert perform(worker, job(folder=str(tmp_path / "gone"))) == {"error": None}
    assert Path.cwd() == tmp_path / "there"


def test_a_job_that_a_worker_cannot_do_is_left_to_the_other_process(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(Compiling, "compile", lambda self, *given: compiled.append(given))
    assert perform(worker, job(version="another")) == {"error": None}
    assert perform(worker, job() | {"kernel": "another"}) == {"error": None}
    assert compiled == []
    assert perform(worker, job(tile=2)) == {"error": None}
    ((instance, config),) = compiled
    assert (instance, config.tile) == (problem(), 2)


@pytest.mark.parametrize(
    ("error", "message", "cause"),
    [
        (ValueError("no such layout \n"), "ValueError: no such layout", None),
        (MemoryError("none left"), "MemoryError: none left", "passing"),
        (SystemExit("enough"), "SystemExit: enough", None),
        (ValueError("x" * 5000), "ValueError: " + "x" * (2000 - len("ValueError: ")), None),
    ],
)
def test_a_worker_reports_a_kernels_exception(
    error: Any, message: str, cause: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiling, "error", error)
    answer = perform(worker, job())
    assert answer["error"] == message
    assert answer["cause"] == cause
    file, _, line = answer["place"].rpartition(":")
    assert file == __file__
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == "raise self.error"


class Device:
    """Records the calls that a launch makes to the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: Any, calls: list[Any]) -> None:
        for name in ("set_device", "synchronize"):
            monkeypatch.setattr(
                torch.cuda, name, lambda device, name=name: calls.append((name, device))
            )

        def verifier(problem: Any, device: Any, memory: int) -> Any:
            calls.append(("verifier", device, memory))
            return SimpleNamespace(verdict=lambda launch, extent: calls.append(extent))

        monkeypatch.setattr(worker, "_verifier", verifier)


def test_a_worker_launches_on_its_device_and_is_worn_out_by_a_failure(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    Device(monkeypatch, worker, calls)
    gpu = torch.device("cuda:1")
    assert perform(worker, job(device="cuda:1", memory=77)) == {"error": None}
    assert calls == [("set_device", gpu), ("verifier", gpu, 77), "brief", ("synchronize", gpu)]
    assert worker._worn_out is False

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(worker.os, "_exit", ended)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: 1 / 0)
    assert perform(worker, job(device="cuda:1", memory=77))["error"].startswith("ZeroDivisionError")
    with pytest.raises(SystemExit) as exit:
        perform(worker, job())
    assert exit.value.code == pool_host.WORN_OUT


def test_failed_launches_on_a_cpu_do_not_count(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    bind = FakeKernel.bind

    def bound(self: Any, problem: Any, config: Any) -> Any:
        right: Any = bind(self, problem, config)

        def launch(*arguments: Any) -> Any:
            launched.append((arguments[-1] is not None, torch.backends.cuda.matmul.allow_tf32))
            if config.tile == 3:
                raise ValueError("no such layout")
            return right(*arguments)

        launch.cost = right.cost  # type: ignore[attr-defined]
        return launch

    monkeypatch.setattr(FakeKernel, "bind", bound)
    assert perform(worker, job(device="cpu", memory=1 << 20)) == {"error": None}
    assert {out for out, _ in launched} == {False, True}
    assert "no such layout" in perform(worker, job(tile=3, device="cpu", memory=1 << 20))["error"]
    assert perform(worker, job()) == {"error": None}
    worker._verifier.cache_clear()


def test_launches_of_a_problem_share_tensors_within_its_memory(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(worker, "Verifier", lambda *given, **more: made.append((given, more)))
    cpu = torch.device("cpu")
    for instance in (problem(), problem(), problem(m=3)):
        worker._verifier(instance, cpu, 77)
    worker._verifier.cache_clear()
    assert made == [
        ((instance, cpu), {"memory_limit": 77}) for instance in (problem(), problem(m=3))
    ]


def test_a_worker_begins_in_a_group_of_its_own_and_ends_with_its_parent(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *given: did.append((name, *given))

    monkeypatch.setattr(worker.os, "setpgid", noted("setpgid"))
    monkeypatch.setattr(worker.os, "killpg", noted("killpg"))
    monkeypatch.setattr(worker.signal, "signal", noted("signal"))
    monkeypatch.setattr(resource, "setrlimit", noted("setrlimit"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=noted("prctl")))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / str(os.getpid())).write_text("before, ")
    with redirected(1, 2):
        worker.begin(str(folder))
        os.write(1, b"one, ")
        os.write(2, b"two")
    assert (folder / str(os.getpid())).read_text() == "before, one, two"
    assert tempfile.tempdir == str(folder)
    ended = did.pop(1)
    assert ended[:2] == ("signal", signal.SIGTERM)
    assert did == [
        ("setpgid", 0, 0),
        ("setrlimit", resource.RLIMIT_CORE, (0, 0)),
        ("prctl", 1, signal.SIGKILL),
    ]
    ended[2](signal.SIGTERM, None)
    assert did[3:] == [("killpg", 0, signal.SIGKILL)]


# -- the parent ------------------------------------------------------------------------------------


class Started:
    """Stands in for a host's process. It ends with ``status`` when its channel is closed."""

    pid = 99_999_999  # no process has this id

    def __init__(self, command: list[str], *, stdin: int, stderr: Any, **options: Any) -> None:
        self.command, self.options, self.stderr = command, options, stderr
        self.channel = Connection(os.dup(stdin))
        self.waited: list[Any] = []
        self.status, self.returncode = 0, None

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        self.waited.append(timeout)
        return self.status

    def receive(self) -> Any:
        assert self.channel.poll(10)
        return json.loads(self.channel.recv_bytes())

    def answer(self, number: int | None, **answer: Any) -> None:
        self.channel.send_bytes(json.dumps([number, answer]).encode())


class Parent:
    """Records the hosts that were started, the processes that were killed, and the faults that were
    reported."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.killed: list[Any] = []
        self.faults: queue.Queue[str] = queue.Queue()

    def host(self, kind: type[Compilers] = OfKind, **environ: str) -> tuple[Any, Started]:
        host = compile_pool._Host(kind, 4, environ, self.faults.put)
        return host, self.started[-1]


@contextlib.contextmanager
def ended_hosts() -> Iterator[None]:
    """Wait for the threads of hosts that were started here: they kill processes."""
    others = {*threading.enumerate()}
    yield
    for thread in {*threading.enumerate()} - others:
        if thread.name == "tmm-pool":
            thread.join(10)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    made = Parent()

    def start(*given: Any, **more: Any) -> Started:
        made.started.append(Started(*given, **more))
        return made.started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "killpg", lambda *given: made.killed.append(given))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with ended_hosts():
        yield made
        for each in made.started:
            each.channel.close()


def sent(host: Any, tile: int = 1, limit: float = 7.0, **more: Any) -> Future[None]:
    future: Future[None] = Future()
    job = {"device": None, "limit": limit, **more}
    assert host.send(problem(), candidate(tile), job, future)
    return future


def failure(future: Future[None]) -> Any:
    return future.exception(timeout=10)


@pytest.mark.parametrize("no_user_site", [0, 1])
def test_how_a_host_is_started(
    no_user_site: int, parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["/one", "", "/two", 3])
    monkeypatch.setattr(sys, "flags", SimpleNamespace(no_user_site=no_user_site))
    for kind, word in ((OfKind, "forks"), (Importing, "imports")):
        host, process = parent.host(kind, HOME="/here")
        python, *options, program, workers, how, folder = process.command
        assert python == sys.executable
        further = [*["-s"] * no_user_site, *["-P"] * (sys.version_info >= (3, 11))]
        assert options == ["-W", "ignore", *further]
        assert (program, workers, how) == (pool_host.__file__, "4", word)
        path = os.pathsep.join(["/one", os.getcwd(), "/two"])
        assert process.options == {
            "env": {"HOME": "/here", "PYTHONPATH": path},
            "cwd": "/",
            "stdout": subprocess.DEVNULL,
            "start_new_session": True,
        }
        assert os.path.isdir(folder)
        host.close()
        assert not os.path.exists(folder)  # a host that was killed cannot remove its folder


@pytest.mark.parametrize(
    ("answer", "kind", "message", "more"),
    [
        ({"error": None}, None, "", ()),
        ({"late": 7.0}, HungError, "took over 7 s", (None, "")),
        ({"died": "ended"}, NotCompiledError, "it ended", (None, "")),
        ({"error": "x"}, NotCompiledError, "raised x", (None, "")),
        ({"error": "x", "refused": False}, NotCompiledError, "raised x", (None, "")),
        ({"error": "x", "refused": True}, RefusedError, "raised x", (None, "")),
        (
            {"error": "x", "cause": "disk", "place": "f:1"},
            NotCompiledError,
            "raised x",
            ("disk", "f:1"),
        ),
    ],
)
def test_an_answer_resolves_its_job(
    answer: Any, kind: Any, message: str, more: Any, parent: Parent
) -> None:
    host, process = parent.host()
    try:
        first, second = sent(host, 1), sent(host, 2)
        jobs = [process.receive(), process.receive()]
        assert [job["id"] for job in jobs] == [0, 1]
        assert [job["config"] for job in jobs] == [{"tile": 1}, {"tile": 2}]
        assert not host.started.is_set()
        process.answer(None)  # the host has started
        process.answer(1, **answer)
        error = failure(second)
        assert host.started.is_set()
        assert not first.done()
        if kind is None:
            assert error is None
        else:
            assert type(error) is kind
            assert (str(error), (error.cause_elsewhere, error.place)) == (message, more)
    finally:
        host.close()
    assert failure(first) is None  # this process makes the launch instead


def test_cancelled_jobs_are_named_to_the_host_and_wake_their_waiters(parent: Parent) -> None:
    host, process = parent.host()
    try:
        one, two, three = (sent(host, tile) for tile in (1, 2, 3))
        for _ in range(3):
            process.receive()
        host.cancel({one, three, Future()})
        assert process.receive() == {"cancel": [0, 2]}
        assert [future.done() for future in (one, two, three)] == [True, False, True]
        assert one.cancelled()
        assert not wait([one, three], timeout=0).not_done  # ``wait`` knows the cancelled futures
        with pytest.raises(CancelledError):
            three.result(timeout=10)
        host.cancel({one, Future()})  # nobody waits for these futures, so nothing is sent
        process.answer(0, error="too late")
        process.answer(1, error=None)
        assert failure(two) is None
        assert not process.channel.poll(0)
    finally:
        host.close()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("status", [0, 3, -9])
def test_a_host_that_ends_leaves_its_jobs_to_this_process(
    status: int, started: bool, parent: Parent
) -> None:
    host, process = parent.host()
    future = sent(host)
    if started:
        process.answer(None)
        assert host.started.wait(10)
    process.status = status
    process.stderr.write(b"out of luck\n")
    assert process.receive()["id"] == 0
    process.channel.close()
    assert failure(future) is None
    if status:
        fault = parent.faults.get(timeout=10)
        how = {3: "ended with exit code 3", -9: "died (signal 9, SIGKILL)"}[status]
        assert fault == f"their host {how}: out of luck"
    assert host.ended
    assert host.started.is_set()
    assert parent.faults.empty()
    assert parent.killed == [(process.pid, signal.SIGKILL)]
    # A host may take a while to end; one that has not started is killed at once.
    assert process.waited == [compile_pool._END_LIMIT if started else 0, None]
    late: Future[None] = Future()
    assert not host.send(problem(), candidate(), {"limit": 1.0}, late)
    assert not late.done()


def test_a_host_that_was_closed_has_no_fault(parent: Parent) -> None:
    host, process = parent.host()
    future = sent(host)
    process.answer(None)
    assert host.started.wait(10)
    process.status = -9
    host.close()
    assert failure(future) is None
    assert parent.faults.empty()
    assert set(parent.killed) == {(process.pid, signal.SIGKILL)}


def test_a_host_that_does_not_start_is_a_fault(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pool, "START_LIMIT", 0.01)
    host, process = parent.host()
    assert parent.faults.get(timeout=10) == "they were not ready within 0 s"
    assert host.ended
    assert process.waited == [0, None]


def test_an_invalid_answer_is_a_fault(parent: Parent) -> None:
    compilers = OfKind(1)
    future = compilers.submit(problem(), candidate())
    host: Any = compilers._host
    reports: queue.Queue[str] = queue.Queue()
    host._report = reports.put
    parent.started[0].channel.send_bytes(b"no json")
    fault = reports.get(timeout=10)
    assert fault.startswith("JSONDecodeError")
    assert failure(future) is None
    for _ in range(2):  # one warning; no other host is started
        with pytest.warns(TmmWarning) if not compilers._broken else contextlib.nullcontext():
            compilers._report(fault)
        assert failure(compilers.submit(problem(), candidate())) is None
    assert len(parent.started) == 1


def test_a_job_that_is_not_json_is_left_to_this_process(parent: Parent) -> None:
    host, process = parent.host()
    try:
        future: Future[None] = Future()
        job = {"limit": 1.0, "environ": object()}
        assert not host.send(problem(), candidate(), job, future)
        assert not host._pending
        sent(host)
        assert process.receive()["id"] == 1
    finally:
        host.close()


def test_a_host_that_cannot_be_started_leaves_no_file_open(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> Any:
        raise OSError("no process")

    monkeypatch.setattr(subprocess, "Popen", start)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    compilers = Compilers(workers=1)
    with pytest.warns(TmmWarning, match=r"compiled in this process.*no process"):
        assert failure(compilers.submit(problem(), candidate())) is None
    assert failure(compilers.submit(problem(), candidate())) is None  # without a warning
    assert not before or len(os.listdir("/proc/self/fd")) == before
    assert not compilers.are_starting([Future()])


@pytest.mark.parametrize("end", [Compilers.close, lambda pool: pool.cancel_pending([Future()])])
def test_the_parents_pool_is_not_touched_in_a_forked_child(end: Any) -> None:
    touched: list[Any] = []
    host = SimpleNamespace(
        process=SimpleNamespace(returncode=None),
        close=lambda: touched.append("close"),
        cancel=touched.append,
    )
    for forked in (True, False):
        pool = Compilers(workers=1)
        pool._host = host  # type: ignore[assignment]
        lock = pool._lock
        if forked:
            pool._process = -1
            lock.acquire()  # by a thread of the parent
        end(pool)
        assert len(touched) == (not forked)
    assert host.process.returncode == 0  # not waited for: it is no child of the child


def test_a_host_is_apart_from_this_process_and_its_terminal(parent: Parent) -> None:
    """A variable that starts a prompt would keep it from ending, warnings change its output."""
    left_out = dict.fromkeys(compile_pool._NOT_PASSED, "1")
    host, process = parent.host(HERE="1", PYTHONPATH="/elsewhere", **left_out)
    try:
        options, environ = process.options, process.options["env"]
        assert environ == {"HERE": "1", "PYTHONPATH": os.pathsep.join(host.circumstances[0])}
        assert (options["cwd"], options["start_new_session"]) == ("/", True)
        assert options["stdout"] is subprocess.DEVNULL
        assert process.command[:3] == [sys.executable, "-W", "ignore"]
        folder = process.command[-1]
        assert process.command[-3:] == ["4", "forks" if OfKind.forks else "imports", folder]
        assert os.path.isdir(folder)
    finally:
        host.close()


def test_the_contents_of_a_compile_job(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    monkeypatch.setenv("OF_KIND", "0")
    with contextlib.closing(OfKind(3, 5.0)) as compilers:
        compilers.submit(problem(), candidate(2))
        (process,) = parent.started
        assert process.command[-3] == "3"
        job = process.receive()
        assert job["environ"] == {**os.environ, "OF_KIND": "1"}
        assert (job["device"], job["limit"], job["folder"]) == (None, 5.0, os.getcwd())
        assert process.options["env"]["OF_KIND"] == "1"
        # One host serves until the plugins change.
        compilers.submit(problem(), candidate(), device="cuda:1", memory=9)
        job = process.receive()
        assert (job["device"], job["memory"]) == ("cuda:1", 9)
        for name in ("TMM_PLUGINS", "TMM_DISABLE_PLUGINS"):
            monkeypatch.setenv(name, "none")
            future = compilers.submit(problem(), candidate())
            assert parent.started[-1] is not process
            process = parent.started[-1]
            process.receive()
            process.answer(0, error=None)
            assert failure(future) is None
        assert len(parent.started) == 3
        assert {pid for pid, _ in parent.killed} == {Started.pid}
        # A host that ended is replaced.
        with ended_hosts():
            monkeypatch.delenv("TMM_PLUGINS")
            compilers.submit(problem(), candidate())
            parent.started[-1].channel.close()
        compilers.submit(problem(), candidate())
        assert len(parent.started) == 5


@pytest.mark.parametrize(
    ("kernel", "interpret", "more", "ahead"),
    [
        (Compiling("k"), "0", {}, True),
        (Compiling("k"), "1", {}, False),
        (FakeKernel("k"), "0", {}, False),  # this kernel compiles nothing
        (FakeKernel("k"), "1", {"device": "cpu", "memory": 1}, True),
    ],
)
def test_a_host_is_started_only_for_jobs_that_it_can_do(
    kernel: Any, interpret: str, more: Any, ahead: bool, parent: Parent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    for plain in (False, True):
        if not plain:
            registry = Registry()
            registry.register(plugin(kernel), "fakes")
        given = kernel if plain else registry.kernel("k")
        with contextlib.closing(OfKind(1)) as compilers:
            future = compilers.submit(problem(), Candidate(given, kernel.config_type()), **more)
            assert (len(parent.started) == 1 + plain) is ahead or not ahead
            assert future.done() is not ahead
    assert bool(parent.started) is ahead


def test_how_long_the_start_of_a_host_is_waited_for(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(OfKind(1)) as compilers:
        assert not compilers.are_starting([Future()])
        future = compilers.submit(problem(), candidate())
        done: Future[None] = Future()
        done.set_result(None)
        host: Any = compilers._host
        now = host.begun
        monkeypatch.setattr(time, "monotonic", lambda: now)
        assert compilers.are_starting([done, future])
        assert not compilers.are_starting([done])
        assert not compilers.are_starting([])
        now = host.begun + compile_pool.START_PATIENCE - 0.01
        assert compilers.are_starting([future])
        now = host.begun + compile_pool.START_PATIENCE
        assert not compilers.are_starting([future])
        now = host.begun
        parent.started[0].answer(None)
        assert host.started.wait(10)
        assert not compilers.are_starting([future])


def test_a_forked_child_has_a_pool_of_its_own(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(OfKind(1)) as compilers:
        compilers.submit(problem(), candidate())
        host, lock, ours = compilers._host, compilers._lock, os.getpid()
        assert host is not None
        for use in (
            lambda: compilers.cancel_pending([Future()]),
            lambda: compilers.submit(problem(), candidate()),
            compilers.close,
        ):
            compilers._host, compilers._lock, compilers._process = host, lock, ours
            host.process.returncode = None
            with monkeypatch.context() as child, lock:  # a thread of the parent holds it
                child.setattr(os, "getpid", lambda: ours + 1)
                use()
                assert compilers._process == ours + 1
                assert compilers._lock is not lock
                assert compilers._host is not host
                assert host.process.returncode == 0
                assert not host._closing
                compilers.close()
        compilers._host, compilers._lock, compilers._process = host, lock, ours


def test_a_program_is_started_again_only_if_it_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/usr/bin/python3": True, "/usr/bin/Python.exe": True, "/python/server": False,
             "/usr/bin/server": False, "": False, None: False}  # fmt: skip
    for name, startable in names.items():
        monkeypatch.setattr(sys, "executable", name)
        assert compile_pool._startable() is startable
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not compile_pool._startable()
    monkeypatch.setattr(sys, "frozen", False)
    monkeypatch.delattr(os, "fork")
    assert not compile_pool._startable()


@pytest.mark.parametrize(("cores", "threads"), [(None, 1), (1, 1), (15, 15), (17, 16)])
def test_the_number_of_concurrent_compilations(
    cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert compile_pool.compiling_threads() == threads
    assert Compilers().workers == threads + compile_pool._SPARE
    assert Compilers(workers=1).workers == 1


def test_a_process_compiles_on_the_cpus_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for may_use, threads in (({7}, 1), ({0, 5}, 2), (set(range(40)), 16)):
        of_process = {0: may_use}
        monkeypatch.setattr(os, "sched_getaffinity", of_process.__getitem__, raising=False)
        assert compile_pool.compiling_threads() == threads


def test_a_removed_folder_is_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_pool._folder() == str(tmp_path)

    def removed() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", removed)
    assert compile_pool._folder() == "/"


def test_the_pool_of_the_process_is_closed_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(atexit, "register", closed.append)
    made = compile_pool.default.__wrapped__()
    assert closed == [made.close]
    assert (made.limit, type(made)) == (compile_pool.COMPILE_LIMIT, Compilers)


# -- first launches --------------------------------------------------------------------------------


class Workers:
    """Compilers whose answers a test sets."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cancelled: list[Any] = []
        self.outcome: BaseException | None = None

    def submit(self, problem: Any, candidate: Any, **more: Any) -> Any:
        def result() -> None:
            if self.outcome is not None:
                raise self.outcome

        self.calls.append((candidate.config.tile, more))
        return SimpleNamespace(result=result)

    def cancel_pending(self, launches: Any) -> None:
        self.cancelled += launches


def test_of_a_kernel_and_a_problem_two_first_launches_may_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches, workers = FirstLaunches(torch.device("cuda:1")), Workers()
    assert (launches.workers, launches.limit) == (1, first_launch.LAUNCH_LIMIT)
    for name in ("submit", "cancel_pending"):
        monkeypatch.setattr(launches, name, getattr(workers, name))
    here, there = problem(), problem(m=3)

    def tried(tile: int, outcome: Any = None, instance: Any = here, name: str = "k") -> Any:
        workers.outcome = outcome
        return launches.failure(instance, candidate(tile, name), 99)

    hung, failed = HungError("hung"), NotCompiledError("failed")
    assert tried(1) is None
    assert [tried(tile, failed) for tile in (2, 3, 4)] == [failed] * 3
    assert tried(5, hung) is hung
    assert tried(6) is None  # one launch has hung
    assert tried(7, hung) is hung
    workers.outcome = None
    assert str(tried(8)) == "not tried: 2 other configs of it hung in their first launch"
    assert tried(9, instance=there) is None
    assert tried(10, name="another") is None
    more = {"device": "cuda:1", "memory": 99}
    assert workers.calls == [(tile, more) for tile in (1, 2, 3, 4, 5, 6, 7, 9, 10)]
    assert len(workers.cancelled) == len(workers.calls)
    with pytest.raises(KeyboardInterrupt):
        tried(11, KeyboardInterrupt(), there)
    assert len(workers.cancelled) == len(workers.calls)  # the launch continues in no process
