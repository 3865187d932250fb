"""The store that the dispatcher asks before it tunes and tells after it has.

It stands between a matmul and a file system that may be read-only, full, shared by many ranks or
damaged: nothing that a file system does makes these methods raise.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tmm_cache.ages import touch
from tmm_cache.errors import has_warned, warn_once
from tmm_cache.files import (
    Fault,
    make_folder,
    read_environment,
    read_record,
    record_bytes,
    write_environment,
    write_record,
)
from tmm_cache.keys import JSON, canonical, digest
from tmm_cache.layout import (
    LOCK_SUFFIX,
    MISSES,
    VERSION,
    environment_folder,
    layer_paths,
    record_path,
)
from tmm_cache.locks import Lock
from tmm_cache.misses import Miss, append_miss, read_misses
from tmm_cache.places import absolute, default_root, is_nowhere, root_of
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Entry, Folder, folders, scan

if TYPE_CHECKING:
    from tmm_cache.upkeep import Upkeep

# Of the whole root, as against one file of it: whatever is tried next fails alike.
_UNWRITABLE = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ELOOP}


class CacheStore:
    """Tuning records on disk: the user's own root, and read-only layers below it.

    `root` and `layers` left out are `default_root()` and `layer_paths()`. No folder is made before
    the first save. A file that can't be used costs a miss and one `CacheWarning` per
    process. Methods that take a GPU raise ValueError where it is no slug (see `slug`), and what
    `digest` raises where an environment or a problem is not JSON.
    """

    __slots__ = ("_held", "_logged", "_upkeep", "layers", "root")

    def __init__(self, root: Path | None = None, layers: Sequence[Path] | None = None) -> None:
        #: The user's own records; `NOWHERE` on a machine that has no place for them.
        self.root = default_root() if root is None else absolute(root)
        below = layer_paths() if layers is None else layers
        # `Path.resolve` raises on a loop of links.
        seen = {os.path.realpath(self.root)}
        kept = []
        for layer in below:
            place = absolute(layer)
            if not is_nowhere(place) and os.path.realpath(place) not in seen:
                seen.add(os.path.realpath(place))
                kept.append(place)
        #: The layers below, nearest first, without those that are the root itself.
        self.layers = tuple(kept)
        self._logged: set[Path] = set()
        self._upkeep: Upkeep | None = None
        #: Records that this process answers with whatever the disk says, by their path.
        self._held: dict[Path, Entry] = {}

    def path(self, gpu: str, environment: Mapping[str, JSON], problem: Mapping[str, JSON]) -> Path:
        """The file in the user's own root where the problem's record is or would be."""
        return record_path(self.root, gpu, environment, problem)

    def load(
        self, gpu: str, environment: Mapping[str, JSON], problem: Mapping[str, JSON]
    ) -> TuningRecord | None:
        """The problem's record, held, of the root or of the first layer with it; None is a miss.

        Takes no lock. A file that is damaged, of a foreign schema or about another problem is
        passed over with a `CacheWarning`.
        """
        located = self._locate(gpu, environment, problem)
        if located is None:
            return None
        path, record = located
        if path is not None and self.root in path.parents:
            touch(path)
        return record

    def found(
        self, gpu: str, environment: Mapping[str, JSON], problem: Mapping[str, JSON]
    ) -> Path | None:
        """The file that `load` would answer from, or that a held record was written to."""
        located = self._locate(gpu, environment, problem)
        return None if located is None else located[0]

    def save(self, gpu: str, environment: Mapping[str, JSON], record: TuningRecord) -> Path | None:
        """Write a record into the user's own root; None where that failed, with a `CacheWarning`.

        A record that could not be written is held. Raises RecordError for a record that would not
        read back, never OSError.
        """
        data = record_bytes(record)
        path = self.path(gpu, environment, record.problem)
        try:
            write_record(path, data, environment)
        except OSError as error:
            self._warn_unwritable(error)
            self.hold(gpu, environment, record)
            return None
        if path in self._held:
            self.hold(gpu, environment, record)
        if self._upkeep is None:
            from tmm_cache.upkeep import Upkeep  # those who replay do not need it

            self._upkeep = Upkeep(self.root)
        self._upkeep.saved(path, len(data), self._held)
        return path

    def hold(self, gpu: str, environment: Mapping[str, JSON], record: TuningRecord) -> None:
        """Answer with this record as long as the store lives, whatever the disk says."""
        path = self.path(gpu, environment, record.problem)
        self._held[path] = Entry(path, self.root, gpu, digest(environment), environment, record)

    def entries(self, gpu: str | None = None) -> Iterator[Entry]:
        """Every readable record: those held, then the root's, then each layer's, by their paths.

        What a layer hides from the next is not left out. Faults are passed over with a warning.
        """
        held = {path: self._held[path] for path in sorted(self._held)}
        yield from (entry for entry in held.values() if gpu in (None, entry.gpu))
        for root in (self.root, *self.layers):
            for item in scan(root, gpu):
                if isinstance(item, Fault):
                    _warn(item)
                elif item.path not in held:
                    yield item

    def remove(self, entries: Iterable[Entry]) -> int:
        """Remove records of the user's own root, and the folders that leaves empty.

        Returns how many are gone; each that stays costs a `CacheWarning`. Raises ValueError for
        an entry of a layer: layers are read-only.
        """
        from tmm_cache import removal  # those who replay do not need it

        removals = []
        for entry in entries:
            if entry.root != self.root:
                raise ValueError(f"{entry.path} is of the layer {entry.root}, not of {self.root}")
            removals.append(removal.Removal(entry.path, "record", "asked for"))
        for asked in removals:
            self._held.pop(asked.path, None)
        faults = removal.remove(self.root, removals)
        for fault in faults:
            _warn(fault)
        return len(removals) - len(faults)

    @contextlib.contextmanager
    def lock(
        self,
        gpu: str,
        environment: Mapping[str, JSON],
        problem: Mapping[str, JSON],
        timeout: float,
    ) -> Iterator[bool]:
        """Hold the right to tune a problem, among all threads and processes on this root.

        Yields False if another still holds it after `timeout` seconds. Where no lock can be had,
        because the root can't be written or its file system can't lock, it warns and yields True:
        tuning twice is better than not at all. Raises ValueError for a timeout below zero.
        """
        if not timeout >= 0:
            raise ValueError(f"timeout: found {timeout}, accepted is a number of seconds >= 0")
        path = self.path(gpu, environment, problem)
        lock = Lock(path.with_name(path.name + LOCK_SUFFIX))
        held, fault = True, None
        try:
            make_folder(path.parent)
            held = lock.acquire(timeout)
        except OSError as error:
            fault = error
        try:
            yield held
        finally:
            with contextlib.suppress(OSError):  # the descriptor is closed even so
                lock.release()
            if fault is not None:
                # Now, for a save under the lock knows better what became of the record.
                self._warn_beside(
                    lock.path, fault, "locked", "two processes may tune the same problem"
                )

    def log_miss(
        self, gpu: str, environment: Mapping[str, JSON], problem: Mapping[str, JSON]
    ) -> None:
        """Note a problem that was met where tuning is forbidden, once per store. Never OSError."""
        path = self.path(gpu, environment, problem)
        if path in self._logged:
            return
        self._logged.add(path)
        try:
            make_folder(path.parent)
            write_environment(path.parent, environment)
            append_miss(path.parent, problem)
        except OSError as error:
            log = path.with_name(MISSES)
            self._warn_beside(log, error, "written", "problems that are not tuned are not noted")

    def misses(self) -> list[Miss]:
        """The problems noted in the user's own root, each once per GPU and environment."""
        found = []
        for folder in self._folders():
            problems, fault = read_misses(folder.path)
            if fault is not None:
                _warn(fault)
            if not problems:
                continue
            environment = read_environment(folder.path)
            if isinstance(environment, Fault):
                _warn(environment)
                environment = None
            found += [
                Miss(folder.gpu, folder.environment_digest, environment, problem, count)
                for problem, count in problems
            ]
        return found

    def clear_misses(self) -> int:
        """Forget the noted problems; returns how many logs are gone."""
        from tmm_cache import removal

        removals = [
            removal.Removal(folder.path / MISSES, "misses", "asked for")
            for folder in self._folders()
            if os.path.isfile(folder.path / MISSES)
        ]
        faults = removal.remove(self.root, removals)
        for fault in faults:
            _warn(fault)
        self._logged.clear()
        return len(removals) - len(faults)

    def _folders(self) -> Iterator[Folder]:
        for folder in folders(self.root):
            if isinstance(folder, Fault):
                _warn(folder)
            else:
                yield folder

    def _locate(
        self, gpu: str, environment: Mapping[str, JSON], problem: Mapping[str, JSON]
    ) -> tuple[Path | None, TuningRecord] | None:
        held = self._held.get(path := self.path(gpu, environment, problem))
        if held is not None:
            return (path if os.path.isfile(path) else None), held.record
        asked, environment_digest = canonical(problem), digest(environment)
        name = f"{digest(problem)}.json"
        for root in (self.root, *self.layers):
            path = environment_folder(root, gpu, environment_digest) / name
            record = read_record(path)
            if isinstance(record, Fault):
                _warn(record)
            elif record is not None:
                if canonical(record.problem) == asked:
                    return path, record
                _warn(Fault(path, "records another problem of the same digest", damaged=False))
        return None

    def _warn_unwritable(self, error: OSError) -> None:
        if is_nowhere(self.root):
            return
        reason = error.strerror or error
        warn_once(
            self.root,
            f"cannot be written ({reason}); what is not written is lost when the process ends",
            about="place",
        )

    def _warn_beside(self, path: Path, error: OSError, done: str, consequence: str) -> None:
        """Tell of a file without which records are kept all the same, unless of the whole root."""
        if error.errno in _UNWRITABLE:
            self._warn_unwritable(error)
        elif not (is_nowhere(self.root) or has_warned(self.root, about="place")):
            reason = error.strerror or error
            # One of a thousand files: the others most likely fail alike.
            warn_once(
                self.root,
                f"{path.relative_to(self.root)} cannot be {done} ({reason}); {consequence}",
                about=done,
            )


def _warn(fault: Fault) -> None:
    if is_nowhere(fault.path):
        return
    if fault.place:
        root = root_of(fault.path, VERSION)
        text = f"{fault.reason}; passed over, and what lies only there is tuned anew"
        warn_once(root, text, about="place")
    else:
        warn_once(fault.path, f"{fault.reason}; passed over")
