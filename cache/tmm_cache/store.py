"""The store that the dispatcher reads before tuning and writes after it.

It stands between a matmul and a file system that may be read-only, full, shared by many ranks or
damaged. No fault of the file system makes these methods raise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tmm_base import UsageError
from tmm_base.guards import reraise, suppress

from tmm_cache.cache_errors import warn_once
from tmm_cache.disk import make_folder, touch
from tmm_cache.fault_warnings import FaultWarnings, warn_of
from tmm_cache.files import Fault, read_record, record_bytes, write_record
from tmm_cache.keys import Document, canonical, digest
from tmm_cache.locks import acquire
from tmm_cache.notes import Notes
from tmm_cache.paths import (
    LOCK_SUFFIX,
    absolute,
    default_root,
    is_nowhere,
    layer_paths,
    lock_path,
    record_path,
)
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Summary, problems, summaries

if TYPE_CHECKING:
    from tmm_cache.size_limits import SizeLimiter
    from tmm_cache.transport import Transport

R = TypeVar("R")

#: Values of TMM_REQUIRE_LOCKED that mean no. Any other means yes: setting it shows the intent.
NO = {"", "0", "false", "no", "off"}


def requires_lock() -> bool:
    """Whether only a lock file may answer (`TMM_REQUIRE_LOCKED`)."""
    return os.environ.get("TMM_REQUIRE_LOCKED", "0").lower() not in NO


class Miss(NamedTuple):
    """A problem without a record, with the GPU and environment that it was met on."""

    gpu: str
    environment: dict[str, Any]
    problem: dict[str, Any]


class CacheStore:
    """Tuning records on disk: the user's own root, and read-only layers below it.

    `root` and `layers` default to `default_root()` and `layer_paths()`. A root that is not the
    user's own (see `ownership.foreign`) is read as one more layer; records saved then are held in
    memory. Under `TMM_REQUIRE_LOCKED=1` only the lock file answers. No folder is made before the
    first save. A file that can't be used costs a miss and one `CacheWarning` per process. Methods
    that take a GPU raise ValueError if it is not a slug (see `slug`), and like `digest` if an
    environment or a problem is not JSON.
    """

    def __init__(self, root: Path | None = None, layers: Sequence[Path] | None = None) -> None:
        #: The user's own records; `NOWHERE` on a machine without a folder for them.
        self.root = default_root() if root is None else absolute(root)
        below = map(absolute, layer_paths() if layers is None else layers)
        places = dict.fromkeys([self.root, *(layer for layer in below if not is_nowhere(layer))])
        #: The layers below, nearest first, without the root itself.
        self.layers = tuple(places)[1:]
        #: Whether only a lock file answers, and which.
        self.locked = requires_lock()
        self.lock_path = lock_path(os.environ, self.root)
        self._lock_file: Transport | None = None
        self._warnings = FaultWarnings(self.root)
        self._miss_notes: Notes | None = None
        self._verified: dict[tuple[str, str], Notes] = {}
        self._limiter: SizeLimiter | None = None
        #: Records that this process answers with regardless of the disk, by path.
        self._held: dict[Path, Summary[TuningRecord]] = {}
        #: Records that this process answers with until they can be written, by path.
        self._unwritten: dict[Path, Summary[TuningRecord]] = {}

    def path(self, gpu: str, environment: Document, problem: Document) -> Path:
        """Return the file in the user's own root where the problem's record is or would be."""
        return record_path(self.root, gpu, digest(environment), digest(problem))

    def load(self, gpu: str, environment: Document, problem: Document) -> TuningRecord | None:
        """The problem's record: held, from the root, or from the first layer with it; None: a
        miss. Records that could not be written are tried again first."""
        self._write_again()
        record, path = self._locate(gpu, environment, problem)
        own = path is not None and self.root in path.parents and not self.locked
        if path is not None and own and self._warnings.may_write():
            touch(path)
        return record

    def found(self, gpu: str, environment: Document, problem: Document) -> Path | None:
        """Return the file that `load` would answer from, or that a held record was written to."""
        return self._locate(gpu, environment, problem)[1]

    def _locate(
        self, gpu: str, environment: Document, problem: Document
    ) -> tuple[TuningRecord | None, Path | None]:
        """Return the problem's record, and its file if it has one.

        Takes no lock. A file that is damaged, of a foreign schema or about another problem is
        skipped with a `CacheWarning`.
        """
        if self.locked:
            return self._locate_locked(gpu, environment, problem)
        path = self.path(gpu, environment, problem)
        if (kept := self._kept(path)) is not None:
            return kept.record, path if os.path.isfile(path) else None
        text, key = canonical(problem), (gpu, digest(environment), digest(problem))
        for root in (self.root, *self.layers):
            path = record_path(root, *key)
            stored = read_record(path, warn_of)
            if stored is not None and canonical(stored.problem) == text:
                return stored, path
            if stored is not None:
                warn_of(Fault(path, "records another problem of the same digest"))
        return None, None

    def is_verified(self, gpu: str, environment: Document, key: str) -> bool:
        """Whether `mark_verified` was called with this key under this root. Never raises
        OSError."""
        return self._stamps(gpu, environment).get(key) is True

    def mark_verified(self, gpu: str, environment: Document, key: str) -> None:
        """Remember that the key was verified, for every process of this user if the root is
        writable, otherwise for this process. Never raises OSError."""
        self._stamps(gpu, environment).add(key, True)

    def save(self, gpu: str, environment: Document, record: TuningRecord) -> Path | None:
        """Write a record into the user's own root; None if that failed, with a `CacheWarning`.

        A record that could not be written answers from memory until a later call of `load` writes
        it. Raises RecordError for a record that would not read back, never OSError.
        """
        data = record_bytes(record)
        saved = self.summary(gpu, environment, record)
        if saved.path in self._held:
            self._held[saved.path] = saved
        if not self._written(saved.path, data, environment):
            self._unwritten[saved.path] = saved
            return None
        self._unwritten.pop(saved.path, None)
        if self._limiter is None:
            from tmm_cache.size_limits import SizeLimiter  # not needed for replay

            self._limiter = SizeLimiter(self.root)
        self._limiter.saved(saved.path, len(data), self._held)
        return saved.path

    def _written(self, path: Path, data: bytes, environment: Document) -> bool:
        """Write a record's bytes; False if that failed, with a `CacheWarning`."""
        if not self._warnings.may_write():
            return False
        try:
            write_record(path, data, environment)
        except OSError as error:
            reraise(error)
            self._warnings.unwritable(error)
            return False
        return True

    def _write_again(self) -> None:
        """Write the records that could not be written, up to the first that still cannot. One that
        another process measured later replaces it."""
        for path, each in [*self._unwritten.items()]:
            assert each.environment is not None  # only a file's may be missing
            # Under a root that others may write, no stored record replaces it.
            present = read_record(path, warn_of) if self._warnings.may_write() else None
            if present is not None and present.created_at > each.record.created_at:
                self._unwritten.pop(path, None)
            elif self.save(each.gpu, each.environment, each.record) is None:
                return

    def hold(self, gpu: str, environment: Document, record: TuningRecord) -> None:
        """Answer with this record as long as the store lives, regardless of the disk."""
        held = self.summary(gpu, environment, record)
        self._held[held.path] = held

    def summary(
        self, gpu: str, environment: Document, record: TuningRecord
    ) -> Summary[TuningRecord]:
        """Return the summary of a record that was saved or held, as in `summaries`."""
        return Summary(self.path(gpu, environment, record.problem), self.root, environment, record)

    def read(self, path: Path) -> TuningRecord | None:
        """Return the record of a summary's path; None if its file is gone, or damaged, with a
        `CacheWarning`."""
        kept = self._kept(path)
        return kept.record if kept is not None else read_record(path, warn_of)

    def summaries(self, gpu: str | None = None) -> Iterator[Summary[TuningRecord]]:
        """Yield every record: those in memory, then the root's, then each layer's, by path.

        Records hidden by a nearer layer are included. Faults are skipped with a warning. Under
        `TMM_REQUIRE_LOCKED=1` they are the lock file's, with paths as if it were a folder.
        """
        if self.locked:
            yield from self._in_lock_file(gpu)
            return
        kept = self._all_kept()
        yield from (each for each in kept.values() if gpu in (None, each.gpu))
        yield from self._on_disk(partial(summaries, report=warn_of, gpu=gpu), kept)

    def _in_lock_file(self, gpu: str | None) -> Iterator[Summary[TuningRecord]]:
        lock = self._locked_file()
        for key, environment, record in () if lock is None else lock.records():
            if isinstance(record, Fault):
                warn_of(record)
            elif gpu in (None, key[0]):
                yield Summary(
                    record_path(self.lock_path, *key), self.lock_path, environment, record
                )

    def problems(self) -> Iterator[Summary[Document]]:
        """Like `summaries`, with the problem of each record."""
        kept = self._all_kept()
        for each in kept.values():
            yield replace(each, record=each.record.problem)  # type: ignore[arg-type, misc]
        yield from self._on_disk(partial(problems, report=warn_of), kept)

    def _on_disk(
        self, walk: Callable[[Path], Iterator[Summary[R]]], kept: Container[Path]
    ) -> Iterator[Summary[R]]:
        for root in (self.root, *self.layers):
            yield from (each for each in walk(root) if each.path not in kept)

    def _kept(self, path: Path) -> Summary[TuningRecord] | None:
        """Return the record that this process keeps in memory for a path."""
        return self._held.get(path) or self._unwritten.get(path)

    def _all_kept(self) -> dict[Path, Summary[TuningRecord]]:
        """Return the records that this process keeps in memory, by path."""
        return dict(sorted((self._unwritten | self._held).items()))

    @contextlib.contextmanager
    def lock(
        self, gpu: str, environment: Document, problem: Document, timeout: float
    ) -> Iterator[bool]:
        """Hold the right to tune a problem, among all threads and processes on this root.

        Yields False if another still holds it after `timeout` seconds. If the root can't be written
        or its file system can't lock, it warns and yields True: tuning twice is better than not at
        all. Raises ValueError for a negative timeout.
        """
        if not timeout >= 0:
            raise ValueError(f"timeout: found {timeout}, accepted is a number of seconds >= 0")
        if not self._warnings.may_write():
            yield True
            return
        path = self.path(gpu, environment, problem)
        path = path.with_name(path.name + LOCK_SUFFIX)
        lock, fault = None, None
        try:
            make_folder(path.parent)
            lock = acquire(path, timeout)
        except OSError as error:
            reraise(error)
            fault = error
        try:
            yield lock is not None or fault is not None
        finally:
            if lock is not None:
                with suppress(OSError):  # an unlock that fails ends with the process
                    lock.release()
            if fault is not None:
                # Only now: a save under the lock reports more precisely what became of the record.
                consequence = "two processes may tune the same problem"
                self._warnings.auxiliary(path, fault, "locked", consequence)
            del fault  # its traceback has this frame

    def log_miss(self, gpu: str, environment: Document, problem: Document) -> None:
        """Note a problem met where tuning is forbidden. Never raises OSError."""
        about = self.path(gpu, environment, problem).relative_to(self.root).as_posix()
        if not self._warnings.may_write():
            return
        if self._miss_notes is None:
            self._miss_notes = Notes("misses", None, self.root)
        notes = self._miss_notes
        try:
            notes.write(about, {"gpu": gpu, "environment": environment, "problem": problem})
        except OSError as error:
            reraise(error)
            consequence = "problems that are not tuned are not noted"
            self._warnings.auxiliary(notes.path, error, "written", consequence)

    def misses(self) -> list[Miss]:
        """The problems noted under the user's own root that have no record yet, each once per GPU
        and environment."""
        found: list[Any] = Notes("misses", None, self.root).values()
        kinds = {"gpu": str, "environment": dict, "problem": dict}
        misses = []
        for each in found:
            if isinstance(each, dict) and {name: type(of) for name, of in each.items()} == kinds:
                with suppress(ValueError, RecursionError):  # a damaged note
                    if self._locate(**each)[0] is None:
                        misses.append(Miss(**each))
        return misses

    def _locate_locked(
        self, gpu: str, environment: Document, problem: Document
    ) -> tuple[TuningRecord | None, Path | None]:
        lock = self._locked_file()
        key = gpu, digest(environment), digest(problem)
        record = None if lock is None else lock.record(key)
        if isinstance(record, Fault):
            warn_of(record)
        if not isinstance(record, TuningRecord) or canonical(record.problem) != canonical(problem):
            return None, None
        return record, self.lock_path

    def _locked_file(self) -> Transport | None:
        """Return the lock file that alone answers; None, with a warning, if there is none."""
        if self._lock_file is None:
            from tmm_cache.transport import Transport  # not needed for replay

            try:
                self._lock_file = Transport(self.lock_path)
            except UsageError as error:
                reason = str(error).removeprefix(f"{self.lock_path}: ")
                note = f"{reason}; and TMM_REQUIRE_LOCKED=1 lets nothing else answer"
                warn_once(self.lock_path, note, about="lock file")
        return self._lock_file

    def _stamps(self, gpu: str, environment: Document) -> Notes:
        # Not keyed by host name: a container gets a new one at each start. Verification is about a
        # kernel's code on this GPU under this software.
        key = gpu, digest(environment)
        if (found := self._verified.get(key)) is None:
            # If two threads make notes, both use the first ones.
            found = self._verified.setdefault(key, Notes("verified", list(key), self.root))
            if found.foreign and self._warnings.may_write():
                self._warnings.untrusted(found.foreign)
        return found
