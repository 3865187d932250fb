"""A file system that fails at its n-th call, or whose process dies there.

Every call by which the cache changes or reads files is counted; `Faults(n)` lets the n-th fail.
Running a scenario for n = 1, 2, … until no fault is met visits every point at which it can break.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

#: The counted functions. `os.scandir` and `os.listdir` read folders; the names of the others
#: describe them.
CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "write", "read", "fsync", "replace", "rename", "link")),
    *((os, name) for name in ("mkdir", "rmdir", "unlink", "utime", "stat", "lstat", "fstat")),
    *((os, name) for name in ("scandir", "listdir")),
    (fcntl, "flock"),
]
CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE)

#: `fails`: the n-th call alone. `breaks`: it and all after it. `torn`: a write stops half-way, and
#: then it fails. `dies`: the process ends there, half-way through a write.
How = Literal["fails", "breaks", "torn", "dies"]
DEATH = 77


class Faults:
    """Counts calls on files below `root` and lets the n-th go wrong."""

    def __init__(self, root: Path, n: int, code: int, how: How) -> None:
        self.root = os.fspath(root)
        self.n = n
        self.code = code
        self.how = how
        self.calls = 0
        #: The names of the calls that went wrong.
        self.hit: list[str] = []

    def _is_ours(self, target: Any) -> bool:
        if isinstance(target, int):
            try:
                target = os.readlink(f"/proc/self/fd/{target}")
            except OSError:
                return False
        return isinstance(target, str | Path) and os.fspath(target).startswith(self.root)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted."""

        def call(*arguments: Any, **options: Any) -> Any:
            if not arguments or not self._is_ours(arguments[0]):
                return real(*arguments, **options)
            self.calls += 1
            if self.calls < self.n or (self.calls > self.n and self.how != "breaks"):
                return real(*arguments, **options)
            self.hit.append(name)
            if name == "write" and self.how in ("torn", "dies"):
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if self.how == "dies":
                os._exit(DEATH)
            raise OSError(self.code, os.strerror(self.code))

        return call


@contextmanager
def faulty(root: Path, n: int, code: int = errno.EIO, how: How = "fails") -> Iterator[Faults]:
    """Within it, the n-th call on a file below the root goes wrong."""
    faults = Faults(root, n, code, how)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, faults.wrap(name, getattr(module, name)))
        yield faults


def dying(
    root: Path, n: int, scenario: Callable[[Callable[[object], None]], None]
) -> tuple[bool, list[str]]:
    """Run a scenario in a child process that dies at its n-th call. Returns whether it died, and
    the texts by which it acknowledged its steps. Only a step that was acknowledged before the death
    counts as saved.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            write = os.write

            def acknowledge(what: object) -> None:
                write(writer, f"{what}\n".encode())

            with faulty(root, n, how="dies"):
                scenario(acknowledge)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader) as pipe:
        message = pipe.read().split()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, DEATH), f"the scenario itself failed in the child at call {n}"
    return code == DEATH, message
