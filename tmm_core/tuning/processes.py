"""Starts fresh processes of this Python with this process's packages.

A forked process inherits a CUDA context that it cannot use, and held locks; one spawned by
`multiprocessing` imports ``__main__``, which a notebook lacks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from tmm_cache.errors import suppress

from tmm_core.errors import reraise

#: Variables that would keep a Python process from ending, or change its output.
_NOT_PASSED = ("PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONVERBOSE")
#: Bytes of the end of a process's output that messages show.
_TAIL = 400
_PR_SET_PDEATHSIG = 1


def startable() -> bool:
    """Whether this platform can fork and this executable is Python, not a program that embeds it
    and would be started a second time."""
    name = os.path.basename(sys.executable or "").lower()
    return hasattr(os, "fork") and "python" in name and not getattr(sys, "frozen", False)


class Child:
    """A process of this Python with this one's packages, the channel to it, which is its standard
    input, and its output. It gets ``argument`` and the working folder as JSON.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, program: list[str], argument: object, environ: Mapping[str, str] = os.environ
    ) -> None:
        given = {name: value for name, value in environ.items() if name not in _NOT_PASSED}
        given["PYTHONPATH"] = os.pathsep.join(circumstances()[0])
        options = ["-W", "ignore", *["-s"] * sys.flags.no_user_site]
        options += ["-P"] * (sys.version_info >= (3, 11))
        self.scratch = scratch_file()
        self.channel, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *options, *program, json.dumps([argument, folder()])],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self.scratch,
                    env=given,
                    cwd="/",  # python -m looks there first, before 3.11
                    start_new_session=True,  # Ctrl-C goes only to this process
                )
        except BaseException:
            self.channel.close()
            self.scratch.close()
            raise

    def end(self) -> int:
        """Kill it and its child processes; returns its exit status, its own if it was ending."""
        self.channel.close()
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.scratch.close()
        return self.process.wait()


def circumstances() -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """The state that decides which plugins and which code the server finds."""
    here = folder()
    path = tuple(str(entry) or here for entry in sys.path if isinstance(entry, str))
    variables = ("TMM_PLUGINS", "TMM_DISABLE_PLUGINS")
    return path, tuple(os.environ.get(name) for name in variables)


def folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:  # removed under this process
        reraise(error)
        return "/"


def scratch_file() -> IO[bytes]:
    """An unnamed temporary file for the server's output.

    Raises:
        OSError: None can be made.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tmm-compilers"), "w+b", 0)
    return tempfile.TemporaryFile(buffering=0)


def empty(scratch: IO[bytes]) -> None:
    """Discard what a process has printed, so that a failure shows only its own job's output."""
    scratch.seek(0)  # also where the process writes next, since they share the offset
    scratch.truncate()


def tail(scratch: IO[bytes]) -> str:
    """The end of the output."""
    end = scratch.seek(0, os.SEEK_END)
    scratch.seek(max(0, end - _TAIL))
    return scratch.read().decode(errors="replace").strip()


def ending(status: int, said: str) -> str:
    """How a process ended, by ``Popen.returncode``, and the last that it said: ``died (signal 11,
    SIGSEGV): …``."""
    after = f": {said}" if said else ""
    if status >= 0:
        return f"ended with exit code {status}{after}"
    try:
        return f"died (signal {-status}, {signal.Signals(-status).name}){after}"
    except ValueError:
        return f"died (signal {-status}){after}"


# -- in the process started ------------------------------------------------------------------------


def opened() -> tuple[Any, socket.socket]:
    """The argument of :func:`started` and the channel, which standard input no longer is; in the
    parent's working folder."""
    argument, folder = json.loads(sys.argv[1])
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    with suppress(OSError):  # removed since
        os.chdir(folder)
    return argument, channel


def end_with_parent() -> None:
    """Be killed when the parent ends, and leave no core file."""
    import resource  # POSIX

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(Exception):  # where there is no prctl, by the channel's end
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
