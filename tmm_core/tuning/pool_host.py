"""The process between the user's process and the workers, which runs a pebble pool.

It ends with the user's process.

Pebble kills a worker that hangs, and replaces one that died. Its pool cannot run in the user's
process: workers would run the user's script again, and a daemonic process may have no children.
This file is run as a script. It imports nothing of tmm, so that it starts without importing torch.
The user's process imports it too, for its messages. So pebble is imported where it is used: the
import takes 30 ms, and raises once the main thread has ended.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from concurrent.futures import BrokenExecutor, Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pebble import ProcessPool

#: Seconds without a job after which the pool ends: it holds some 300 MB.
IDLE_LIMIT = 120.0
#: Seconds between two checks whether the parent is alive: a fork of the parent may hold its end of
#: the channel open.
_CHECK_INTERVAL = 0.2
#: The exit code of a worker that should not run another job; a fresh one runs it.
WORN_OUT = 75
#: How often a job is repeated if its worker was worn out or its pool broke.
_MOST_RETRIES = 3
#: Maximum bytes of a temporary folder's path: with a socket's name the system allows 108.
_SHORT = 60
_WORKER = "tmm_core.tuning.pool_worker"
#: The number that compilers add to their nice value. They use every core, and the parent may be
#: serving: on a core that both want, the parent gets three quarters of the time.
YIELDING = 5

Job = dict[str, Any]


class Host:
    """Passes jobs to workers, and their results through a channel to the parent. Temporary files
    and the workers' output are in the ``folder``. Workers that are not forked (``forks``) import
    everything themselves, and may use CUDA."""

    def __init__(self, channel: Connection, workers: int, forks: bool, folder: str) -> None:
        self._channel, self._workers, self._folder = channel, workers, folder
        self._context = multiprocessing.get_context("forkserver" if forks else "spawn")
        self._context.set_forkserver_preload([_WORKER])
        self._pool = self._new_pool()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, tuple[Job, Future[Any]]] = {}
        #: Jobs that ended, added by pebble's threads; the pipe holds a byte for each.
        self._ended: deque[tuple[Job, Future[Any]]] = deque()
        self._wake, self._waker = os.pipe()

    def run(self) -> None:
        """Serve until the parent has ended, or sends no job for :data:`IDLE_LIMIT`."""
        parent, idle = os.getppid(), 0.0
        self._pool.schedule(perform, [None]).result()  # raises if no worker starts
        self._send(None, {})
        while os.getppid() == parent and idle < IDLE_LIMIT:
            readable = wait([self._channel, self._wake], _CHECK_INTERVAL)
            if self._channel in readable:
                self._receive(json.loads(self._channel.recv_bytes()))
            if self._wake in readable:
                os.read(self._wake, 1)
                self._conclude(*self._ended.popleft())
            self._assign()
            idle = 0.0 if self._running or readable else idle + _CHECK_INTERVAL

    def end(self) -> None:
        """Kill the workers."""
        self._pool.stop()
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        from pebble import ProcessPool

        return ProcessPool(self._workers, 0, begin, [self._folder], self._context)

    def _receive(self, message: Job) -> None:
        if "cancel" not in message:
            self._waiting.append({**message, "retries": 0})
            return
        numbers = set(message["cancel"])
        self._waiting = deque(job for job in self._waiting if job["id"] not in numbers)
        for number in numbers & self._running.keys():
            self._running[number][1].cancel()  # kills its worker

    def _assign(self) -> None:
        """Give waiting jobs to idle workers. Jobs do not wait in pebble, which would start a job
        that was cancelled while it waited, and kill its worker."""
        while self._waiting and len(self._running) < self._workers:
            self._schedule(self._waiting.popleft())

    def _schedule(self, job: Job) -> None:
        try:
            future = self._pool.schedule(perform, [job], timeout=job["limit"])
        except RuntimeError:  # the pool broke
            self._pool.join()
            self._pool = self._new_pool()
            future = self._pool.schedule(perform, [job], timeout=job["limit"])
        self._running[job["id"]] = job, future
        future.add_done_callback(functools.partial(self._on_end, job))

    def _on_end(self, job: Job, future: Future[Any]) -> None:
        self._ended.append((job, future))
        os.write(self._waker, b".")

    def _conclude(self, job: Job, future: Future[Any]) -> None:
        """Report a job that has ended, or repeat it if its worker could not run it."""
        from pebble import ProcessExpired

        del self._running[job["id"]]
        error = None if future.cancelled() else future.exception()
        if isinstance(error, TimeoutError):
            self._send(job, {"late": job["limit"]})
        elif isinstance(error, ProcessExpired) and (
            error.exitcode != WORN_OUT or job["retries"] == _MOST_RETRIES
        ):
            output = Path(self._folder, str(error.pid)).read_bytes()
            self._send(job, {"died": ending(error.exitcode, tail(output))})
        elif isinstance(error, ProcessExpired | BrokenExecutor):
            # A pebble pool breaks if a worker dies before it has acknowledged a job.
            if job["retries"] == _MOST_RETRIES:
                raise error
            job["retries"] += 1
            self._waiting.appendleft(job)
        elif not future.cancelled():
            self._send(job, future.result())

    def _send(self, job: Job | None, answer: Job) -> None:
        self._channel.send_bytes(json.dumps([job and job["id"], answer]).encode())


def tail(output: bytes) -> str:
    """Return the end of a process's output, as messages show it."""
    return output[-400:].decode(errors="replace").strip()


def ending(status: int, output: str) -> str:
    """Describe how a process ended, from ``Popen.returncode`` and the end of its output: ``died
    (signal 11, SIGSEGV): …``."""
    after = f": {output}" if output else ""
    if status >= 0:
        return f"ended with exit code {status}{after}"
    try:
        return f"died (signal {-status}, {signal.Signals(-status).name}){after}"
    except ValueError:
        return f"died (signal {-status}){after}"


# Pebble calls these two functions in a worker, by name. The host does not import the worker module.


def begin(folder: str) -> None:
    importlib.import_module(_WORKER).begin(folder)


def perform(job: Job | None) -> Any:
    return job and importlib.import_module(_WORKER).perform(job)


def main() -> None:
    """Serve the parent, whose channel is standard input. The arguments are the number of workers,
    ``forks`` if they are forked, and a folder for temporary files, which is removed at the end."""
    channel = Connection(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    folder = sys.argv[3]
    # The system limits the path of a socket.
    tempfile.tempdir = folder if len(folder) < _SHORT else "/tmp"
    forks = sys.argv[2] == "forks"
    if forks:  # other workers launch kernels
        os.nice(YIELDING)
    host = Host(channel, int(sys.argv[1]), forks, folder)
    try:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
            host.run()
    finally:
        host.end()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # newer Pythons are started with -P
        del sys.path[0]  # this file's folder
    main()
