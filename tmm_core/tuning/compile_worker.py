"""The process behind :mod:`tmm_core.tuning.compile_pool`, started by ``python -m``.

It imports torch, Triton and the plugins, uses no GPU, starts no thread, and forks workers, so that
a killed worker is replaced in milliseconds. Jobs and answers are lines of JSON. It and its workers
end when its parent does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import IO, Any

from tmm_core.errors import error_text
from tmm_core.registry.registry import Registry
from tmm_core.spec import watch
from tmm_core.tuning.compile_job import Job, recalled
from tmm_core.tuning.environment_faults import cause_of, place_of
from tmm_core.tuning.processes import empty, end_with_parent, ending, opened, scratch_file, tail

#: Seconds without a job after which the server ends: it holds some 300 MB.
IDLE_LIMIT = 120.0
#: Seconds after which a candidate no longer occupies a worker slot: it may hang, so that a full set
#: of workers compiles beside it.
STALLED = 10.0
#: Candidates of one kernel and problem that may hang before its others are skipped.
MOST_HUNG = 2
#: Seconds between two looks at the time limits, and whether the parent is alive: a process that it
#: forked may hold its end of the channel open.
_LOOK = 0.2


@dataclass(eq=False)
class Worker:
    """A forked process, idle or on one job."""

    pid: int
    channel: socket.socket
    #: Its output.
    scratch: IO[bytes]
    job: Job | None = None
    began: float = 0.0

    def end(self) -> int:
        """Kill it and its child processes; return its exit status, its own if it was ending."""
        self.channel.close()
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Server:
    """Passes jobs to workers and their answers to the parent.

    Args:
        channel: The channel to the parent.
        most: Workers that compile at one time.
        registry: The registry of kernels.
    """

    def __init__(self, channel: socket.socket, most: int, registry: Registry) -> None:
        self._channel = channel
        self._most = most
        self._registry = registry
        self._queue: deque[Job] = deque()
        self._workers: list[Worker] = []
        self._hung: Counter[Any] = Counter()
        self._parent = os.getppid()
        self._received = b""

    def run(self) -> None:
        """Serve until the parent is gone, or idle for too long."""
        last = time.monotonic()
        try:
            self._channel.sendall(b'{"ready": true}\n')
            while True:
                self._assign()
                if self._queue or any(worker.job for worker in self._workers):
                    last = time.monotonic()
                elif time.monotonic() - last > IDLE_LIMIT:
                    return
                channels = (worker.channel for worker in self._workers)
                readable = wait([self._channel, *channels], _LOOK)
                if self._channel in readable and not self._read():
                    return
                for worker in list(self._workers):
                    if worker.channel in readable:
                        self._hear(worker)
                self._expire()
                if os.getppid() != self._parent:
                    return
        except OSError:  # the parent is gone
            return
        finally:
            for worker in self._workers:
                worker.end()

    def _read(self) -> bool:
        """Read the parent's messages; False if it is gone."""
        received = self._channel.recv(1 << 16)
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                self._cancel(set(message["cancel"]))
            else:
                self._queue.append(message)
        return bool(received)

    def _cancel(self, numbers: set[int]) -> None:
        self._queue = deque(job for job in self._queue if job["id"] not in numbers)
        for worker in list(self._workers):
            if worker.job is not None and worker.job["id"] in numbers:
                self._drop(worker)

    def _assign(self) -> None:
        """Give jobs to idle workers, forking more as needed."""
        while self._queue:
            now = time.monotonic()
            busy = [worker for worker in self._workers if worker.job is not None]
            if sum(now - worker.began < STALLED for worker in busy) >= self._most:
                return
            worker = next((worker for worker in self._workers if worker.job is None), None)
            if worker is None:
                if len(busy) >= 2 * self._most:
                    return
                worker = self._fork()
            if worker is None:
                if busy:
                    return
                self._answer(self._queue.popleft())  # no process: left to the parent
                continue
            worker.job, worker.began = self._queue.popleft(), now
            empty(worker.scratch)
            with contextlib.suppress(OSError):  # it died idle, noticed next
                worker.channel.sendall(json.dumps(worker.job).encode() + b"\n")

    def _fork(self) -> Worker | None:
        try:
            mine, theirs = socket.socketpair()
            scratch = scratch_file()
            pid = os.fork()
        except OSError:  # too many processes or files, no memory
            return None
        if pid == 0:
            status = 1
            try:
                mine.close()
                self._become_worker(theirs, scratch)
                status = 0
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        theirs.close()
        worker = Worker(pid, mine, scratch)
        self._workers.append(worker)
        return worker

    def _become_worker(self, channel: socket.socket, scratch: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        server = os.getppid()
        end_with_parent()
        if os.getppid() != server:
            return
        os.dup2(scratch.fileno(), 1)
        os.dup2(scratch.fileno(), 2)
        self._channel.close()
        for other in self._workers:
            other.channel.close()
        for line in channel.makefile("rb"):
            job = json.loads(line)
            os.environ.clear()
            os.environ.update(job["environ"])
            answer = compile_job(self._registry, job)
            channel.sendall(json.dumps(answer).encode() + b"\n")

    def _hear(self, worker: Worker) -> None:
        line = b""
        with contextlib.suppress(OSError):
            line = worker.channel.makefile("rb").readline()
        job, worker.job = worker.job, None
        if line.endswith(b"\n"):
            if job is not None:
                self._answer(job, **json.loads(line))
            return
        status = self._drop(worker)
        if job is not None:
            self._answer(job, f"its compiler {ending(status, tail(worker.scratch))}")

    def _expire(self) -> None:
        """Kill jobs that have taken too long; after a kernel's second, skip its others."""
        now = time.monotonic()
        for worker in list(self._workers):
            job = worker.job
            if job is None or now - worker.began < job["limit"]:
                continue
            self._drop(worker)
            self._answer(job, f"did not compile within {job['limit']:g} s")
            about = _about(job)
            self._hung[about] += 1
            if self._hung[about] >= MOST_HUNG:
                reason = f"not tried: {MOST_HUNG} other configs of it did not compile within"
                for other in [other for other in self._queue if _about(other) == about]:
                    self._queue.remove(other)
                    self._answer(other, f"{reason} {job['limit']:g} s")
            active = [*self._queue, *(each.job for each in self._workers if each.job is not None)]
            if not any(_about(other) == about for other in active):
                del self._hung[about]

    def _drop(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.end()

    def _answer(self, job: Job, error: str | None = None, **more: str | None) -> None:
        text = json.dumps({"id": job["id"], "error": error, **more})
        self._channel.sendall(text.encode() + b"\n")


def _about(job: Job) -> tuple[str, str]:
    return job["kernel"], json.dumps(job["problem"], sort_keys=True)


def compile_job(registry: Registry, job: Job) -> Job:
    """Compile a job. An ``error`` of None also means that it cannot be compiled here and is left to
    ``bind``: another version, an unregistered epilogue. An error comes with its ``cause``, if the
    environment made it, and with the ``place`` that raised."""
    try:
        problem, candidate = recalled(registry, job)
    except BaseException:
        return {"error": None}
    try:
        candidate.kernel.compile(problem, candidate.config)
    except BaseException as error:
        place = place_of(candidate.kernel, error)
        return {"error": error_text(error).strip()[:2000], "cause": cause_of(error), "place": place}
    return {"error": None}


def main() -> None:
    most, channel = opened()
    watch.enabled = False  # no thread may run beside the forks
    registry = Registry.from_environment()
    registry.kernels()
    if "triton" in sys.modules:
        with contextlib.suppress(Exception):  # another Triton, which its kernels report
            importlib.import_module("tmm_core.triton.kept").warm()
    gc.collect()
    gc.freeze()  # else a worker's GC would copy every page
    # Compilers that are killed leave files behind.
    with tempfile.TemporaryDirectory(prefix="tmm-compile-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        Server(channel, most, registry).run()


if __name__ == "__main__":
    main()
