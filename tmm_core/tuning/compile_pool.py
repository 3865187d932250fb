"""Compiles candidates in processes without a CUDA context, ahead of ``bind``.

Triton's front end is Python: 23 candidates compile little faster on 16 threads than on two, and one
that hangs or crashes takes its process along. A fresh process
(:mod:`tmm_core.tuning.compile_worker`) imports torch, Triton and the plugins once and forks
workers. A worker's output is in Triton's disk cache, where ``bind`` finds it. If no such process
can be started, the job counts as done and ``bind`` compiles in this process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from types import MappingProxyType
from typing import Any

from tmm_cache.errors import suppress

from tmm_core.errors import error_text, reraise, warn
from tmm_core.registry.query import Asked
from tmm_core.spec.device import interpreting
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.problem import Problem
from tmm_core.tuning.compile_job import job_of
from tmm_core.tuning.environment_faults import Cause
from tmm_core.tuning.processes import Child, circumstances, ending, startable, tail

#: Seconds that one candidate may take to compile.
COMPILE_LIMIT = 60.0
#: Seconds the server may take to import torch, Triton and the plugins.
START_LIMIT = 60.0
#: Seconds the server may take to end before it is killed.
_END_LIMIT = 2.0

_PROGRAM = ["-m", "tmm_core.tuning.compile_worker"]
#: Environment variables of the server. They keep numerical libraries from starting threads, since a
#: process with threads should not fork.
_OWN_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def _environ() -> dict[str, str]:
    """The environment of the server, and of each job, whose variables may have changed since."""
    return {**os.environ, **_OWN_VARIABLES}


def compiling_threads() -> int:
    """Kernels that are compiled at one time: the number of cores, at most 16."""
    return min(16, os.cpu_count() or 1)


class NotCompiledError(Exception):
    """A candidate that did not compile; its text is the reason.

    Args:
        cause: What of the environment made it fail, as its process found.
        place: The file and line that raised, if known.
    """

    def __init__(self, reason: str, cause: Cause | None = None, place: str = "") -> None:
        super().__init__(reason)
        self.cause_elsewhere, self.place = cause, place


class Compilers:
    """Compiles candidates in worker processes, started on first use.

    Args:
        workers: Processes that compile at one time; by default :func:`compiling_threads`.
        limit: Seconds one candidate may take.
    """

    def __init__(self, workers: int | None = None, limit: float = COMPILE_LIMIT) -> None:
        self.workers = workers or compiling_threads()
        self.limit = limit
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._process = os.getpid()
        #: Whether compiling elsewhere failed, which was reported.
        self._broken = False

    def _follow_fork(self) -> None:
        """Drop the server of the process that this one was forked from, and the lock that another
        thread may have held there."""
        if self._process != os.getpid():
            if self._server is not None:
                self._server.forget()
            self._server, self._lock, self._process = None, threading.Lock(), os.getpid()

    def submit(self, problem: Problem, candidate: Candidate) -> Future[None]:
        """Have ``candidate`` compiled for ``problem``.

        The future is done when ``bind`` may be called: with a result if the candidate was compiled
        or cannot be compiled elsewhere; with a :class:`NotCompiledError` if it does not compile,
        timed out, or crashed its compiler.
        """
        self._follow_fork()
        future: Future[None] = Future()
        with self._lock:
            server = self._running() if _compiles(candidate.kernel) else None
            job = {**job_of(problem, candidate), "limit": self.limit} if server else {}
            sent = server is not None and server.send(job, future)
        if not sent:
            _resolve(future)
        return future

    def await_start(self, futures: Iterable[Future[None]], limit: float) -> float:
        """Wait at most ``limit`` seconds for a server that is starting and has ``futures`` to
        answer; returns the seconds it took."""
        server = self._server
        if server is None or all(future.done() for future in futures):
            return 0.0
        started = time.monotonic()
        server.started.wait(max(0.0, limit))
        return time.monotonic() - started

    def cancel_pending(self, futures: Iterable[Future[None]]) -> None:
        """Cancel the pending ones of ``futures``, and kill their compilers."""
        self._follow_fork()
        server = self._server
        if server is not None:
            server.cancel(set(futures))

    def close(self) -> None:
        """End the server and its workers. A later ``submit`` starts another."""
        self._follow_fork()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _running(self) -> _Server | None:
        """The server, started if there is none or its plugins differ; None if none can be
        started."""
        if self._broken or interpreting() or not startable():
            return None
        found = circumstances()
        server = self._server
        if server is not None and (server.ended or server.circumstances != found):
            self._server = None
            if not server.ended:
                server.close()
        if self._server is None:
            try:
                self._server = _Server(self.workers, found, self._report)
            except (OSError, RuntimeError) as error:  # no descriptor, no thread
                reraise(error)
                self._report(error_text(error))
        return self._server

    def _report(self, fault: str) -> None:
        if not self._broken:
            self._broken = True
            warn(f"kernels are compiled in this process, since others failed: {fault}")


@functools.cache
def default() -> Compilers:
    """The process's own :class:`Compilers`, closed at exit."""
    compilers = Compilers()
    atexit.register(compilers.close)
    return compilers


class _Server(Child):
    """One server process, and the futures of its jobs.

    Args:
        workers: See :class:`Compilers`.
        circumstances: The state it is started with.
        report: Called with a fault, at most once, from a thread.
    """

    def __init__(self, workers: int, circumstances: Any, report: Any) -> None:
        super().__init__(_PROGRAM, workers, _environ())
        self.circumstances = circumstances
        self.ended = False
        self._report = report
        self._pending: dict[int, Future[None]] = {}
        self._numbers = iter(range(sys.maxsize))
        self._lock = threading.Lock()
        self._closing = False
        #: Set when it compiles, or will not.
        self.started = threading.Event()
        #: Sent by a separate thread: the server does not read while it imports, and a socket
        #: buffers only about 200 jobs.
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, name="tmm-compilers", daemon=True).start()
        except RuntimeError:  # no thread can be started
            self.end()
            raise

    def send(self, job: dict[str, Any], future: Future[None]) -> bool:
        """Whether the job will be answered."""
        try:
            number = next(self._numbers)
            text = json.dumps({**job, "id": number, "environ": _environ()})
        except (TypeError, ValueError):  # a config that is not JSON
            return False
        with self._lock:
            if self.ended:
                return False
            self._pending[number] = future
        self._outbox.put(text.encode() + b"\n")
        return True

    def cancel(self, futures: set[Future[None]]) -> None:
        """Cancel the pending ones of ``futures``."""
        with self._lock:
            mine = {n: future for n, future in self._pending.items() if future in futures}
            for number in mine:
                del self._pending[number]
        if mine:
            self._outbox.put(json.dumps({"cancel": list(mine)}).encode() + b"\n")
        for future in mine.values():
            if future.cancel():
                future.set_running_or_notify_cancel()  # else futures.wait() blocks

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self._end_process()

    def forget(self) -> None:
        """Close the inherited channel in a forked process, or the server would live as long as
        it."""
        self.channel.close()
        self.process.returncode = 0  # not this process's child

    def _run(self) -> None:
        fault: str | None
        with self.scratch:
            try:
                threading.Thread(target=self._write, name="tmm-compilers-out", daemon=True).start()
                fault = self._listen()
            except Exception as error:  # no thread, no memory, not understood
                reraise(error)
                fault = error_text(error)
            status = self._end_process()
            if fault is None and status:
                fault = f"the server {ending(status, tail(self.scratch))}"
        with self._lock:
            self.ended = True
            left, self._pending = self._pending, {}
        self.started.set()
        self._outbox.put(b"")
        self.channel.close()
        for future in left.values():
            _resolve(future)
        if fault is not None and not self._closing:
            self._report(fault)

    def _write(self) -> None:
        with suppress(OSError):  # it ended; the other thread notices
            while text := self._outbox.get():
                self.channel.sendall(text)

    def _listen(self) -> str | None:
        """Answer futures until the server ends; returns its fault, if known."""
        self.channel.settimeout(START_LIMIT)
        text = b""
        while True:
            try:
                received = self.channel.recv(1 << 16)
            except TimeoutError:
                return f"the server was not ready within {START_LIMIT:.0f} s"
            except OSError as error:  # closed, or the server died with jobs unread
                reraise(error)
                return None
            if not received:
                return None
            *lines, text = (text + received).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if "ready" in answer:
                    self.started.set()
                    self.channel.settimeout(None)
                else:
                    self._answered(answer)

    def _answered(self, answer: dict[str, Any]) -> None:
        with self._lock:
            future = self._pending.pop(answer["id"], None)
        if future is not None:
            _resolve(future, answer)

    def _end_process(self) -> int:
        """Wait for the server, which ends when the channel is closed unless it is still importing;
        returns its exit status."""
        child = self.process
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        try:
            return child.wait(_END_LIMIT if self.started.is_set() or child.poll() else 0)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _resolve(future: Future[None], answer: Mapping[str, Any] = MappingProxyType({})) -> None:
    with suppress(InvalidStateError):  # cancelled by its waiter
        if answer.get("error") is None:
            future.set_result(None)
        else:
            fault = NotCompiledError(answer["error"], answer.get("cause"), answer.get("place", ""))
            future.set_exception(fault)


def _compiles(kernel: Kernel[Any]) -> bool:
    """Whether it compiles ahead of ``bind``."""
    if isinstance(kernel, Asked):
        return kernel.compiles
    return type(kernel).compile is not Kernel.compile
