"""Runs candidates in other processes, so that a crash or a hang costs only its candidate.

Compilers prepare candidates ahead of ``bind``, without a CUDA context. They are processes, because
Triton's front end is Python: 23 candidates compile little faster on 16 threads than on two. A
worker's output is in Triton's disk cache, where ``bind`` finds it. Where no process can be started,
the job counts as done, and ``bind`` compiles in this process. :mod:`tmm_core.tuning.pool_host` and
:mod:`tmm_core.tuning.pool_worker` are the programs of these processes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from tmm_base.guards import suppress

from tmm_core.errors import ConfigError, error_text, reraise, warn
from tmm_core.registry.query import CheckedKernel
from tmm_core.spec.device import interpreting
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.problem import REQUIREMENTS, Problem
from tmm_core.spec.threads import start_thread
from tmm_core.tuning import pool_host
from tmm_core.tuning.pool_host import ending, tail
from tmm_core.verify.environment_faults import Cause

#: Seconds that one candidate may take to compile.
COMPILE_LIMIT = 60.0
#: Workers in addition to one for each core, so that two candidates that hang delay no others.
_SPARE = 2
#: Seconds the pool may take to import torch, Triton and the plugins.
START_LIMIT = 60.0
#: Seconds of the pool's start that are not charged to a tuning. 3 to 6 are usual on an idle
#: machine.
START_PATIENCE = 20.0
#: Seconds the pool may take to end before it is killed.
_END_LIMIT = 2.0
#: Variables that would keep a Python process from ending, or change its output.
_NOT_PASSED = ("PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONVERBOSE")


def compiling_threads() -> int:
    """Kernels that are compiled at one time: one for each CPU that this process may use, at most
    16. ``taskset``, Slurm and ``docker --cpuset-cpus`` leave a process few of a machine's CPUs."""
    if hasattr(os, "sched_getaffinity"):  # absent on macOS and Windows
        return min(16, len(os.sched_getaffinity(0)))
    return min(16, os.cpu_count() or 1)


def _program(folder: str) -> list[str]:
    """The host's program, copied to the folder if an archive holds it: it cannot start there."""
    path = Path(pool_host.__file__)
    if not path.is_file():
        path = Path(folder, path.name)
        path.write_text(inspect.getsource(pool_host), encoding="utf-8")
    return [str(path)]


class NotCompiledError(Exception):
    """A candidate did not compile. The error has the reason and, if the compiling process found
    them, the fault of the environment and the file and line that raised."""

    def __init__(self, reason: str, cause: Cause | None = None, place: str = "") -> None:
        super().__init__(reason)
        self.cause_elsewhere, self.place = cause, place


class RefusedError(NotCompiledError, ConfigError):
    """The kernel refused the config, which is no fault."""


class HungError(NotCompiledError):
    """A candidate did not end in time."""


class Compilers:
    """Compiles candidates in worker processes, which are started with the first job. ``limit`` is
    the time in seconds that one candidate may take. Pools for other jobs override the
    attributes."""

    #: Whether workers are forked from a process that has imported everything. If not, each worker
    #: imports everything itself, and may use CUDA.
    forks = True
    #: Environment variables of the workers. They keep numerical libraries from starting threads,
    #: since a process with threads should not fork.
    variables: ClassVar[Mapping[str, str]] = {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    #: The warning where no process can be started.
    without = "kernels are compiled in this process, since others failed"
    #: The reasons of candidates that took too long, whose process died, and that raised.
    late, died, raised = "did not compile within {}", "its compiler {}", "{}"

    def __init__(self, workers: int | None = None, limit: float = COMPILE_LIMIT) -> None:
        self.workers = workers or compiling_threads() + _SPARE
        self.limit = limit
        self._lock = threading.Lock()
        self._host: _Host | None = None
        self._process = os.getpid()
        #: Whether no process can be started; a warning was issued.
        self._broken = False

    def _follow_fork(self) -> None:
        """In a forked child, drop the parent's pool, and its lock, which a thread may have held."""
        if self._process != os.getpid():
            if self._host is not None:
                self._host.process.returncode = 0  # not this process's child
            self._host, self._lock, self._process = None, threading.Lock(), os.getpid()

    def submit(self, problem: Problem, candidate: Candidate, **more: Any) -> Future[None]:
        """Compile ``candidate`` for ``problem`` in a worker.

        The future is done when ``bind`` may be called. It has a result if the candidate was
        compiled, or cannot be compiled elsewhere. It raises a :class:`NotCompiledError` if the
        candidate does not compile, timed out, or crashed its compiler. ``more`` may be a
        ``device`` to launch on, and ``memory``, the bytes that tensors of the launch may take.
        """
        self._follow_fork()
        future: Future[None] = Future()
        with self._lock:
            # Interpreted kernels are not compiled.
            ahead = "device" in more or (_compiles(candidate.kernel) and not interpreting())
            host = self._running() if ahead else None
            job = {"device": None, **more, "limit": self.limit, **self._environment()}
            sent = host is not None and host.send(problem, candidate, job, future)
        if not sent:
            _resolve(future)
        return future

    def are_starting(self, futures: Iterable[Future[Any]]) -> bool:
        """Whether ``futures`` wait for a pool that began to start a short time ago."""
        host = self._host
        if host is None or host.started.is_set() or all(future.done() for future in futures):
            return False
        return time.monotonic() - host.begun < START_PATIENCE

    def cancel_pending(self, futures: Iterable[Future[None]]) -> None:
        """Cancel the pending ones of ``futures``, and kill their workers."""
        self._follow_fork()
        host = self._host
        if host is not None:
            host.cancel(set(futures))

    def close(self) -> None:
        """End the workers. A later ``submit`` starts others."""
        self._follow_fork()
        with self._lock:
            host, self._host = self._host, None
        if host is not None:
            host.close()

    def _environment(self) -> dict[str, Any]:
        """Return the environment of a job, which may have changed since the pool was started."""
        return {"environ": {**os.environ, **self.variables}, "folder": _folder()}

    def _running(self) -> _Host | None:
        """Return the host, a new one if its plugins differ; None if none can be started."""
        if self._broken or not _startable():
            return None
        found = _circumstances()
        host = self._host
        if host is not None and (host.ended or host.circumstances != found):
            self._host = None
            if not host.ended:
                host.close()
        if self._host is None:
            try:
                environ = self._environment()["environ"]
                self._host = _Host(type(self), self.workers, environ, self._report)
            except (OSError, RuntimeError) as error:  # no descriptor, no thread
                reraise(error)
                self._report(error_text(error))
        return self._host

    def _report(self, fault: str) -> None:
        if not self._broken:
            self._broken = True
            warn(f"{self.without}: {fault}")


@functools.cache
def default() -> Compilers:
    """Return the process's own :class:`Compilers`, closed at exit."""
    compilers = Compilers()
    atexit.register(compilers.close)
    return compilers


class _Host:
    """A process with a pool of workers, and the futures of its jobs. A thread calls ``report`` with
    a fault, at most once. OSError or RuntimeError if no process or thread can be started."""

    def __init__(
        self,
        kind: type[Compilers],
        workers: int,
        environ: dict[str, str],
        report: Callable[[str], None],
    ) -> None:
        self._kind, self._report = kind, report
        self.circumstances = _circumstances()
        self.begun = time.monotonic()
        #: Set when the pool works, or has failed to start.
        self.started = threading.Event()
        self.ended = self._closing = False
        self._pending: dict[int, Future[None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: Messages that a thread sends. Until the host has started it reads none, and the socket
        #: holds few, so that a caller would wait for seconds.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        environ = {name: value for name, value in environ.items() if name not in _NOT_PASSED}
        environ["PYTHONPATH"] = os.pathsep.join(self.circumstances[0])
        options = ["-W", "ignore", *["-s"] * sys.flags.no_user_site]
        options += ["-P"] * (sys.version_info >= (3, 11))
        with contextlib.ExitStack() as opened:
            # The host removes it, since it may outlive this process. `_end` does if the host was
            # killed, and the callback if it was not started.
            self._folder = tempfile.mkdtemp(prefix="tmm-compile-")
            opened.callback(shutil.rmtree, self._folder, ignore_errors=True)
            arguments = [str(workers), "forks" if kind.forks else "imports", self._folder]
            self._output = opened.enter_context(tempfile.TemporaryFile(buffering=0))
            self._socket, theirs = socket.socketpair()
            opened.enter_context(self._socket)
            self._channel = opened.enter_context(Connection(os.dup(self._socket.fileno())))
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *options, *_program(self._folder), *arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._output,
                    env=environ,
                    cwd="/",  # Python before 3.11 looks for modules there
                    start_new_session=True,  # Ctrl-C goes only to this process
                )
            start_thread(threading.Thread(target=self._run, name="tmm-pool", daemon=True))
            self._opened = opened.pop_all()

    def send(
        self, problem: Problem, candidate: Candidate, job: dict[str, Any], future: Future[None]
    ) -> bool:
        """Send a job; returns whether it will be answered."""
        number = next(self._numbers)
        request = {
            "kernel": candidate.kernel.name,
            "problem": problem.to_json(),
            "requirements": {name: getattr(problem, name) for name in REQUIREMENTS},
            "fingerprint": dataclasses.asdict(problem.device),
            "version": candidate.kernel.version,
            "config": candidate.fields,
        }
        with self._lock:
            if self.ended:
                return False
            self._pending[number] = future
        with suppress(TypeError, ValueError):  # a config that is not JSON
            self._write({**request, **job, "id": number})
            return True
        return self._pending.pop(number, None) is None

    def cancel(self, futures: set[Future[None]]) -> None:
        """Cancel the pending ones of ``futures``."""
        with self._lock:
            cancelled = {n: future for n, future in self._pending.items() if future in futures}
            for number in cancelled:
                del self._pending[number]
        if cancelled:
            self._write({"cancel": list(cancelled)})
        for future in cancelled.values():
            future.cancel()
            future.set_running_or_notify_cancel()  # else futures.wait() blocks

    def close(self) -> None:
        self._closing = True
        self._end()

    def _write(self, message: dict[str, Any]) -> None:
        self._outbox.put(json.dumps(message).encode())

    def _deliver(self) -> None:
        """Send messages until the host ends."""
        with suppress(OSError):
            while (text := self._outbox.get()) is not None:
                self._channel.send_bytes(text)

    def _run(self) -> None:
        """Answer futures until the host ends."""
        fault = None
        sender = threading.Thread(target=self._deliver, name="tmm-pool-sender", daemon=True)
        try:
            start_thread(sender)
            if not self._channel.poll(START_LIMIT):
                fault = f"they were not ready within {START_LIMIT:.0f} s"
            while fault is None:
                number, answer = json.loads(self._channel.recv_bytes())
                self.started.set()
                with self._lock:
                    future = self._pending.pop(number, None)
                if future is not None:
                    _resolve(future, self._failure(answer))
        except (EOFError, OSError):  # it ended, or was closed here
            pass
        except Exception as error:  # out of memory, or an invalid message
            reraise(error)
            fault = error_text(error)
        status = self._end()
        if fault is None and status:
            self._output.seek(0)
            fault = f"their host {ending(status, tail(self._output.read()))}"
        with self._lock:
            self.ended = True
            left, self._pending = self._pending, {}
        self.started.set()
        self._outbox.put(None)
        if sender.ident is not None:
            sender.join()  # before its file descriptor is another's
        self._opened.close()
        for future in left.values():
            _resolve(future)
        if fault is not None and not self._closing:
            self._report(fault)

    def _failure(self, answer: Mapping[str, Any]) -> NotCompiledError | None:
        if "late" in answer:
            return HungError(self._kind.late.format(f"{answer['late']:g} s"))
        if "died" in answer:
            return NotCompiledError(self._kind.died.format(answer["died"]))
        if (error := answer["error"]) is None:
            return None
        reason = self._kind.raised.format(error)
        kind = RefusedError if answer.get("refused") else NotCompiledError
        return kind(reason, answer.get("cause"), answer.get("place", ""))

    def _end(self) -> int:
        """Close the channel, wait for the host to end, and kill the rest of its processes. A host
        that still starts is killed at once. Returns the exit status."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_LIMIT if self.started.is_set() or self.process.poll() else 0)
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return status


def _resolve(future: Future[None], failure: NotCompiledError | None = None) -> None:
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


def _compiles(kernel: Kernel[Any]) -> bool:
    """Whether the kernel compiles ahead of ``bind``."""
    if isinstance(kernel, CheckedKernel):
        return kernel.compiles
    return type(kernel).compile is not Kernel.compile


def _startable() -> bool:
    """Whether this platform forks, and this executable is Python and not a program around it."""
    name = os.path.basename(sys.executable or "").lower()
    return hasattr(os, "fork") and "python" in name and not getattr(sys, "frozen", False)


def _circumstances() -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Return the state that decides which plugins and which code a worker imports."""
    here = _folder()
    path = tuple(str(entry) or here for entry in sys.path if isinstance(entry, str))
    variables = ("TMM_PLUGINS", "TMM_DISABLE_PLUGINS")
    return path, tuple(os.environ.get(name) for name in variables)


def _folder() -> str:
    with suppress(OSError):  # removed under this process
        return os.getcwd()
    return "/"
