"""Values at and next to each limit of the cache's small functions."""

from __future__ import annotations

import builtins
import errno
import gc
import gzip
import hashlib
import math
import os
import stat
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, SPLIT_K, problem, record, warned
from msgspec.structs import replace
from tmm_base import UsageError, console, guards
from tmm_base.stamps import stamp
from tmm_cache import (
    CacheStore,
    CacheWarning,
    CandidateResult,
    Notes,
    TuningRecord,
    disk,
    fields,
    files,
    locks,
    ownership,
    paths,
    problem_fields,
    scan,
    size_limits,
    slug,
    transport,
)
from tmm_cache.cache_errors import RecordError
from tmm_cache.fault_warnings import FaultWarnings, warn_of
from tmm_cache.files import Fault
from tmm_cache.keys import canonical, is_slug
from tmm_cache.locks import acquire

# -- reading files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "most", "read"),
    [(0, 10, 0), (9, 10, 9), (10, 10, 10), (11, 10, 11), (12, 10, 11), (200_000, 10, 11)],
)
def test_a_file_is_read_up_to_one_byte_beyond_the_limit(
    tmp_path: Path, size: int, most: int, read: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with disk.closing(disk.open_regular(path, os.O_RDONLY)) as handle:
        assert len(disk.read_all(handle, most)) == read


def test_a_file_that_grows_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size at the beginning is no limit."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with disk.closing(disk.open_regular(path, os.O_RDONLY)) as handle:
        status = os.fstat(handle)
        path.write_bytes(b"x" * 100_000)
        monkeypatch.setattr(os, "fstat", lambda number: status)
        assert len(disk.read_all(handle, 2**20)) == 100_000


def test_a_file_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody removes it."""
    path = tmp_path / "file"
    path.write_bytes(b"x")

    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "read", fails)
    fault = files.read_file(path)
    assert isinstance(fault, files.Fault)
    assert (fault.path, fault.reason) == (path, "cannot be read: Input/output error")
    assert (fault.damaged, fault.of_folder) == (False, False)
    monkeypatch.undo()
    large = files.read_file(path, most=0)
    assert isinstance(large, files.Fault)
    assert (large.reason, large.damaged) == ("is larger than 0 bytes", True)
    assert files.read_file(tmp_path / "absent") is None


def test_folders_are_private_up_to_the_one_that_was_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    disk.make_folder(tmp_path / "a" / "b")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "a", tmp_path / "a/b")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_file_that_could_not_be_replaced_leaves_nothing_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refused(*paths: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="no"):
        disk.write_atomically(path, b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_a_file_that_another_process_removed_is_removed(tmp_path: Path) -> None:
    disk.remove_with_lock(tmp_path / "record.json")
    (tmp_path / "record.json").touch()
    (tmp_path / "record.json.lock").touch()
    disk.remove_with_lock(tmp_path / "record.json")
    assert not [*tmp_path.iterdir()]


def test_a_stamp_distinguishes_absent_files_in_the_order_of_names(tmp_path: Path) -> None:
    there, absent = tmp_path / "b", tmp_path / "a"
    there.write_bytes(b"123")
    status = there.stat()
    assert stamp([there, absent]) == [
        [str(absent)],
        [str(there), 3, status.st_mtime_ns, status.st_ctime_ns],
    ]


def test_a_drive_that_is_absent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its top folder has no parent to be made first."""

    def absent(folder: Path, *_: Any, **__: Any) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    monkeypatch.setattr(Path, "mkdir", absent)
    with pytest.raises(FileNotFoundError):
        disk.make_folder(Path("/a/b"))


@pytest.mark.parametrize(("seconds", "touched"), [(0, False), (86400, False), (86401, True)])
def test_a_use_a_day_after_the_last_is_not_noted_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, touched: bool
) -> None:
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: 1e9 + seconds)
    disk.touch(path)
    assert (path.stat().st_mtime != 1e9) == touched


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o666), (0o027, 0o640)])
def test_a_file_that_a_user_named_is_as_readable_as_others(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        disk.write_for_all(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_file_that_a_user_named_is_in_a_folder_that_is_there(tmp_path: Path) -> None:
    disk.require_target(tmp_path / "file")
    with pytest.raises(UsageError, match="absent: there is no such folder"):
        disk.require_target(tmp_path / "absent" / "file")


def test_a_compressed_file_is_unpacked_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_BYTES", 100)
    assert transport._unpacked(gzip.compress(b"x" * 100)) == b"x" * 100
    with pytest.raises(ValueError, match="unpacks to more than 100 bytes"):
        transport._unpacked(gzip.compress(b"x" * 101))


def test_a_file_of_notes_grows_to_one_mebibyte(tmp_path: Path) -> None:
    path = Notes("x", None, tmp_path).path
    path.parent.mkdir()
    line = b'\n["a",1]'
    for size, fits in ((2**20 - len(line), True), (2**20 - len(line) + 1, False)):
        path.write_bytes(b"")
        os.truncate(path, size)
        Notes("x", None, tmp_path).write("a", 1)
        # A full file is replaced by its notes. These zeros are none.
        assert path.stat().st_size == (2**20 if fits else len(line))


@pytest.mark.parametrize(("size", "fits"), [(2**19, True), (2**19 + 1, False)])
def test_notes_that_fill_half_a_full_file_are_the_most_that_are_kept(
    tmp_path: Path, size: int, fits: bool
) -> None:
    first, last = b'\n["x","%s"]', b'\n["a",1]'
    first %= b"y" * (size - len(first) - len(last) + 2)
    path = Notes("x", None, tmp_path).path
    path.parent.mkdir()
    path.write_bytes(first + b"\n" * (2**20 - len(first)))
    notes = Notes("x", None, tmp_path)
    if fits:
        notes.write("a", 1)
    else:
        with pytest.raises(OSError, match="it is full"):
            notes.write("a", 1)
    assert path.read_bytes() == (first + last if fits else first.ljust(2**20, b"\n"))


def test_the_checksum_is_of_the_bytes_however_they_spell_a_number() -> None:
    text = b'{"a": 1.50}'
    found = hashlib.sha256(text).hexdigest()[:16]
    data = text[:-1] + f', "checksum": "{found}"}}\n'.encode()
    assert files.unsealed(data) == text
    with pytest.raises(RecordError, match="checksum"):
        files.unsealed(data.replace(b"1.50", b"1.51"))
    assert files.unsealed(b'{"a": 1}') == b'{"a": 1}'
    with pytest.raises(RecordError, match="checksum"):
        files.unsealed(b'{"a": 1}', required=True)


# -- paths and owners ---------------------------------------------------------------------


def test_a_gpu_name_of_96_letters_is_a_folder_name_as_it_is() -> None:
    assert slug("x" * 96) == "x" * 96
    assert slug("x" * 97).startswith("x" * 87 + "-")
    assert len(slug("x" * 97)) == 96
    assert is_slug("x" * 96)
    assert not is_slug("x" * 97)


def test_no_path_is_made_from_an_invalid_digest(tmp_path: Path) -> None:
    for environment in ("..", "0" * 15, "0" * 17, "0" * 15 + "G"):
        with pytest.raises(ValueError, match=r"environment: found .*, accepted is a digest"):
            paths.record_path(tmp_path, GPU, environment, "0" * 16)


def test_a_home_of_an_unknown_user_is_not_used() -> None:
    with warned("no home folder of that user"):
        assert paths.absolute("~nobody-of-that-name/tmm") == paths.NOWHERE


def test_a_file_in_place_of_the_root_is_not_an_ownership_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading reports it."""
    file = tmp_path / "file"
    file.touch()
    for path, mode in ((file, 0o666), (tmp_path, 0o777)):
        path.chmod(mode)
    assert ownership.foreign(file) is None
    assert ownership.foreign(tmp_path) == "can be written by others"
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert ownership.foreign(file) == ownership.foreign(tmp_path) == f"belongs to user {uid}"


@pytest.mark.parametrize("value", ["", "0", "false", "NO", "off", "1", "yes", "2"])
def test_a_lock_file_is_required_unless_the_variable_means_no(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", value)
    assert CacheStore().locked == (value in ("1", "yes", "2"))


# -- listings -----------------------------------------------------------------------------


def test_a_folder_that_cannot_be_listed_is_one_fault(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment is not read, and the other folders are listed."""
    store.save(GPU, ENVIRONMENT, record())
    store.save("nvidia-a100", ENVIRONMENT, record())
    lost = store.path(GPU, ENVIRONMENT, problem()).parent
    (lost / "environment.json").write_text("{")
    real = os.listdir

    def failing(path: Path) -> list[str]:
        if path == lost:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    faults: list[files.Fault] = []
    assert len([*scan.summaries(store.root, faults.append)]) == 2
    assert [fault.path for fault in faults] == [lost / "environment.json"]
    monkeypatch.setattr(os, "listdir", failing)
    faults.clear()
    [summary] = scan.summaries(store.root, faults.append)
    assert summary.gpu == "nvidia-a100"
    assert [(fault.path, fault.of_folder) for fault in faults] == [(lost, True)]


def test_a_removed_folder_is_not_a_fault(store: CacheStore) -> None:
    """Another process may remove it after it was listed; a link may name none."""
    store.save(GPU, ENVIRONMENT, record())
    gone = store.path("nvidia-a100", ENVIRONMENT, problem()).parent.parent
    gone.symlink_to(store.root / "nowhere")
    faults: list[files.Fault] = []
    assert len([*scan.summaries(store.root, faults.append)]) == 1
    assert faults == []


def test_records_of_two_gpus_have_two_keys(store: CacheStore) -> None:
    for gpu in (GPU, "nvidia-a100"):
        store.save(gpu, ENVIRONMENT, record())
    first, second = (summary.key for summary in store.summaries())
    assert (first[0], second[0]) == ("nvidia-a100", GPU)
    assert first[1:] == second[1:]


# -- the limit of size --------------------------------------------------------------------


def test_a_root_may_hold_256_mebibytes() -> None:
    assert size_limits.size_limit({}) == 268_435_456


def test_saves_of_a_tenth_of_the_limit_are_followed_by_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[bool]] = []
    saved, held, other = (tmp_path / name for name in "abc")
    monkeypatch.setenv("TMM_CACHE_MAX_SIZE", "1000")
    monkeypatch.setattr(
        size_limits, "evict", lambda _, __, keep: looks.append([*map(keep, (saved, held, other))])
    )
    limiter = size_limits.SizeLimiter(tmp_path)
    counts = []
    for _ in range(6):
        limiter.saved(saved, 60, {held})
        counts.append(len(looks))
    assert counts == [1, 1, 2, 2, 3, 3]
    assert looks[0] == [True, True, False]


# -- locks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "waits"), [(0.5, [0.5]), (1.0, [1.0]), (2.5, [1.0, "a line", 1.5])]
)
def test_a_wait_for_a_lock_ends_at_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float, waits: list[float | str]
) -> None:
    """A wait of more than a second is logged."""
    import filelock

    waited: list[float | str] = []

    class Taken:
        def __init__(self, path: Path, **_: Any) -> None: ...

        def acquire(self, timeout: float) -> None:
            waited.append(timeout)
            raise filelock.Timeout("taken")

    monkeypatch.setattr(filelock, "FileLock", Taken)
    monkeypatch.setattr(locks, "_log_wait", lambda: waited.append("a line"))
    assert acquire(tmp_path / "lock", timeout) is None
    assert waited == waits


def test_a_lock_is_released_whole_if_a_signal_interrupts_its_acquisition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the count of its holders is then."""
    import filelock

    released: list[bool] = []

    class Interrupted:
        def __init__(self, path: Path, **_: Any) -> None: ...

        def acquire(self, timeout: float) -> None:
            raise KeyboardInterrupt

        def release(self, force: bool = False) -> None:
            released.append(force)

    monkeypatch.setattr(filelock, "FileLock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        acquire(tmp_path / "lock")
    assert released == [True]


def test_any_thread_may_release_a_lock(tmp_path: Path) -> None:
    """A generator that holds one may be closed by another thread than its first."""
    lock = acquire(tmp_path / "lock")
    assert lock is not None
    assert acquire(tmp_path / "lock") is None
    other = threading.Thread(target=lock.release)
    other.start()
    other.join()
    again = acquire(tmp_path / "lock")
    assert again is not None
    again.release()


def test_a_lock_alone_makes_private_folders(store: CacheStore) -> None:
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
        assert mine
    folder = store.path(GPU, ENVIRONMENT, problem()).parent
    made = (folder, *folder.parents)[: len(folder.relative_to(store.root).parts) + 1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


# -- warnings -----------------------------------------------------------------------------


def test_a_thread_in_which_no_user_calls_warns_all_the_same() -> None:
    with ThreadPoolExecutor() as pool, pytest.warns(CacheWarning, match="text"):
        pool.submit(guards.warn_caller, "text", CacheWarning).result()


def test_a_warning_is_shown_once_for_each_line() -> None:
    call = _calls("user", partial(guards.warn_caller, "text", CacheWarning))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            call()
    assert len(caught) == 1


def test_sixteen_causes_of_an_exception_are_looked_at() -> None:
    error = ValueError(0)
    for number in range(1, 20):
        last, error = error, ValueError(number)
        error.__cause__ = last
    assert [each.args[0] for each in guards.chain(error)] == [*range(19, 3, -1)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_group_brings_its_exceptions(kind: type[BaseException], in_thread: bool) -> None:
    """Also those that another thread raised: Ctrl-C among them ends the program."""
    group: Any = vars(builtins)["BaseExceptionGroup"]

    def fail() -> None:
        raise kind("one")

    def caught() -> BaseException | None:
        try:
            fail()
        except kind as error:
            return error
        return None

    def raise_all() -> None:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(fail).exception() if in_thread else caught()
        raise group("all", [found, ValueError("two")])

    with pytest.raises(group) as raised:
        raise_all()
    chain = [str(each.args[0]) for each in guards.chain(raised.value)]
    assert chain == ["all", "one", "two"]
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            guards.reraise(raised.value)
    else:
        guards.reraise(raised.value)


@pytest.mark.parametrize("code", ["EROFS", "ENOSPC", "EDQUOT", "ENOTDIR", "ELOOP", "EIO"])
def test_a_root_that_cannot_be_written_is_distinguished_from_one_file(
    tmp_path: Path, code: str
) -> None:
    error = OSError(getattr(errno, code), code)
    message = "notes cannot be locked .*; so" if code == "EIO" else "unwritten records are lost"
    with warned(message):
        FaultWarnings(tmp_path).auxiliary(tmp_path / "notes", error, "locked", "so")


@pytest.mark.parametrize(
    ("reports", "seen"),
    [
        (("untrusted", "locked", "written"), ["untrusted", "locked", "written"]),
        (("untrusted", "unwritable"), ["untrusted", "unwritable"]),
        (("locked", "unwritable", "unwritable"), ["locked", "unwritable"]),
        (("unwritable", "locked"), ["unwritable"]),  # for the same reason
        (("locked", "locked", "untrusted", "untrusted"), ["locked", "untrusted"]),
    ],
)
def test_each_fault_of_a_root_is_reported_once(
    tmp_path: Path, reports: tuple[str, ...], seen: list[str]
) -> None:
    faults = FaultWarnings(tmp_path)
    texts = {"untrusted": "verified again", "unwritable": "records are lost"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in reports:
            if name == "untrusted":
                faults.untrusted("others may write it")
            elif name == "unwritable":
                faults.unwritable(OSError(errno.EROFS, "read-only"))
            else:
                faults.auxiliary(tmp_path / "notes", OSError(errno.EIO, "broken"), name, "so")
    assert len(caught) == len(seen)
    for each, name in zip(caught, seen, strict=True):
        assert texts.get(name, f"cannot be {name}") in str(each.message)


@pytest.mark.parametrize("damaged", [True, False])
def test_damaged_files_are_reported_each_and_unreadable_ones_by_folder(
    tmp_path: Path, damaged: bool
) -> None:
    places = [tmp_path / folder / name for folder in "ab" for name in ("x.json", "y.json")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for place in places * 2:
            warn_of(Fault(place, "is not a record", damaged=damaged))
    assert [str(each.message).partition(":")[0] for each in caught] == [
        str(place) for place in (places if damaged else places[::2])
    ]


def _calls(module: str | None, function: Any) -> Any:
    """A function of a module of this name, or of generated code, that calls ``function``."""
    scope = {"__name__": module, "function": function}
    exec(compile("def call():\n    function()\n", f"<{module}>", "exec"), scope)
    return scope["call"]


@pytest.mark.parametrize(
    ("module", "passed_over"),
    [
        (None, True),
        ("tmm_core.api", True),
        ("tmm_cache", True),
        ("tmm_blas.blas", True),
        ("tmm_triton", True),
        ("torch.nn.modules", True),
        ("functools", True),
        ("contextlib", True),
        ("concurrent.futures", True),
        ("threading", True),
        ("pluggy", True),
        ("model", False),
        ("tmm_core_extra", False),
    ],
)
def test_a_warning_points_beyond_tmm_torch_and_generated_code(
    module: str | None, passed_over: bool
) -> None:
    inner = _calls(module, partial(guards.warn_caller, "text", CacheWarning))
    with pytest.warns(CacheWarning, match="text") as caught:
        _calls("user", inner)()
    assert caught[0].filename == ("<user>" if passed_over else f"<{module}>")
    assert caught[0].lineno == 2


@pytest.mark.parametrize(
    ("modules", "place"),
    [
        (["plugin"], "<plugin>:2"),
        (["plugin", "tmm_core.api"], "<plugin>:2"),
        (["plugin", None], "<plugin>:2"),
        (["plugin", "json"], "<plugin>:2"),
        (["plugin", "other"], "<other>:2"),
        (["tmm_core.api"], ""),
    ],
)
def test_the_place_of_a_fault_is_in_the_innermost_foreign_code(
    modules: list[str | None], place: str
) -> None:
    call = partial(int, "x")  # which has no frame
    for module in reversed(modules):
        call = _calls(module, call)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        _calls("tmm_cache.test", call)()
    error = caught.value
    own = error.__traceback__
    assert own is not None
    error.__traceback__ = own.tb_next  # without this test's
    assert guards.foreign_place(error) == place


@pytest.mark.parametrize("hidden", [False, True])
def test_a_handler_that_was_replaced_is_recognised_by_its_arguments(hidden: bool) -> None:
    def handler(*given: Any) -> None:
        raise TimeoutError("alarm")

    def interrupted() -> None:
        try:
            handler(14, sys._getframe())
        except TimeoutError:
            if hidden:
                raise ValueError("from the handler") from None
            raise

    def guarded(function: Any) -> None:
        try:
            function()
        except (TimeoutError, ValueError) as error:
            guards.reraise(error)

    with pytest.raises(TimeoutError, match="alarm"):
        guarded(interrupted)
    guarded(partial(int, "x"))  # nobody's handler


def test_a_guard_keeps_no_variables_of_the_frames_that_it_looked_at() -> None:
    """A lock among them would be held until the next garbage collection."""

    class Held: ...

    held: list[weakref.ref[Held]] = []

    def guarded() -> None:
        own = Held()
        held.append(weakref.ref(own))
        try:
            int("x")
        except ValueError as error:
            guards.reraise(error)

    gc.disable()
    try:
        guarded()
        assert held[0]() is None
    finally:
        gc.enable()


# -- fields of a record -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "accepted", "refused"),
    [
        (fields.Name, ["x", "x" * 256], ["", "x" * 257, 1, None]),
        (fields.Text, ["x", "a\nb", "x" * 4096], ["", "x" * 4097, 1]),
        (fields.Size, [1, 2**40 - 1], [0, 2**40, 1.0, True]),
        (fields.Count, [0, 1, 2**63 - 1], [-1, 2**63, 1.0, True]),
        (fields.Measure, [0, 0.0, 1, 2.5], [-0.1, float("inf"), float("nan"), True, "1", 10**400]),
    ],
    ids=["name", "text", "size", "count", "measure"],
)
def test_types_accept_up_to_their_limits(
    kind: Any, accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        assert fields.converted(value, kind) == value
    for value in refused:
        with pytest.raises(RecordError):
            fields.converted(value, kind)


class Loud(str):
    """A text of a plugin, which may compare as it likes."""


CONFIGS = [
    {}, {"x": 2**63 - 1}, {"x": -(2**63) + 1}, {"x": ""}, {"x": "y" * 256}, {"x": None},
    {"x": False}, {"x": 0.5}, {f"x{i}": i for i in range(128)},
]  # fmt: skip
NO_CONFIGS: list[Any] = [
    {"x": 2**63}, {"x": -(2**63)}, {"x": "y" * 257}, {"x": "\n"}, {"x": float("inf")},
    {"x": float("nan")}, {"x": []}, {"": 1}, {"\n": 1}, {1: 1}, {"x" * 257: 1}, {"x": Loud("y")},
    {Loud("x"): 1}, {f"x{i}": i for i in range(129)}, [],
]  # fmt: skip


def test_a_config_is_a_few_printable_scalars() -> None:
    for value in CONFIGS:
        assert fields.parameters(value) == value
        assert replace(SPLIT_K, config=value).to_json()["config"] == value
    for value in NO_CONFIGS:
        with pytest.raises(RecordError):
            fields.parameters(value)
    for number in (math.nan, math.inf, -math.inf):
        fault = f"^'x': found {number}, accepted is None, a boolean, a finite number or a text"
        with pytest.raises(RecordError, match=fault):
            fields.parameters({"x": number})


@pytest.mark.parametrize("name", ["kernel", "version"])
def test_a_candidate_prints_nothing_that_a_terminal_obeys(name: str) -> None:
    document = {**SPLIT_K.to_json(), name: "a\x1b[2J"}
    with pytest.raises(RecordError, match="printable text"):
        CandidateResult.from_json(document)


@pytest.mark.parametrize("size", ["0", "01", "-1", "1.0", "x", "", str(2**40), "1" * 14])
def test_sizes_inside_a_bucket_are_whole_and_within_bounds(size: str) -> None:
    def read(times: dict[str, float]) -> Any:
        return CandidateResult.from_json({**SPLIT_K.to_json(), "inside_us": times}).inside_us

    assert read({"1": 2.0, str(2**40 - 1): 1}) == {1: 2.0, 2**40 - 1: 1.0}
    assert replace(SPLIT_K, inside_us={8: 1.5}).to_json()["inside_us"] == {"8": 1.5}
    with pytest.raises(RecordError, match="inside_us: Expected `int`"):
        read({size: 1.0})
    many = {str(m): 1.0 for m in range(1, 129)}
    assert len(read(many)) == 128
    with pytest.raises(RecordError, match="inside_us: Expected `object` of length <= 128"):
        read({**many, "129": 1.0})


def test_half_of_a_surrogate_pair_is_refused_where_it_would_not_read_back(
    store: CacheStore,
) -> None:
    whole = record(problem() | {"x": "\U0001f600"})
    assert store.save(GPU, ENVIRONMENT, whole) is not None
    assert store.load(GPU, ENVIRONMENT, whole.problem) == whole
    for half in (record(problem() | {"x": "\ud800"}), record(mark="\ud800")):
        with pytest.raises(RecordError, match="surrogate"):
            TuningRecord.from_json(half.to_json())
        with pytest.raises(RecordError, match="surrogate"):
            store.save(GPU, ENVIRONMENT, half)


@pytest.mark.parametrize("extra", [2**16 + 1, "9" * 100, 10**100, "0" * 100])
def test_a_problem_is_bounded(extra: Any) -> None:
    def of_length(length: int) -> str:
        return "x" * (length - len(canonical(problem() | {"x": ""})))

    fields.require_problem(problem() | {"x": "9" * 99})
    fields.require_problem(problem() | {"x": of_length(2**16)})
    value = of_length(extra) if extra == 2**16 + 1 else extra
    with pytest.raises(RecordError, match="huge"):
        fields.require_problem(problem() | {"x": value})


def test_a_problem_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": deep}
    with pytest.raises(RecordError, match="a value that is not JSON"):
        fields.require_problem(problem() | {"x": deep})


def test_values_of_any_depth_are_read_or_refused(tmp_path: Path) -> None:
    """Some depths can be read but not written."""
    for depth in range(850, 1050):
        deep = "[" * depth + "]" * depth
        item = f'{{"gpu": "x", "environment": {{"a": {deep}}}, "record": {{}}}}'
        (tmp_path / "file").write_text(f'{{"lock": 1, "records": [{item}], "checksum": "0"}}')
        with pytest.raises(UsageError, match="is not a file of records"):
            transport.Transport(tmp_path / "file")
        with pytest.raises(RecordError, match=r"environment: |recursion"):
            files.parse_environment(f'{{"a": {deep}}}'.encode(), "0" * 16)


def test_samples_are_at_most_10_000_and_named_by_their_index() -> None:
    def read(samples: list[Any]) -> tuple[float, ...]:
        document = {**SPLIT_K.to_json(), "samples_us": samples}
        return CandidateResult.from_json(document).samples_us

    assert [*map(repr, read([1.0, 2]))] == ["1.0", "2.0"]
    assert len(read([1.0] * 10_000)) == 10_000
    with pytest.raises(RecordError, match="samples_us: Expected `array` of length <= 10000"):
        read([1.0] * 10_001)
    with pytest.raises(RecordError, match=r"^samples_us\[1\]: Expected `float` >= 0.0"):
        read([1.0, -1, 2.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "an object"),
        ([1], "a list"),
        ("x" * 58, repr("x" * 58)),
        ("x" * 59, "'" + "x" * 59 + "…"),
    ],
)
def test_a_value_in_an_error_is_cut_to_60_letters(value: Any, text: str) -> None:
    assert fields.shown(value) == text
    assert fields.shown(10**5000) == "a huge integer"


# -- what the command reads -------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "along", "extent"),
    [
        (None, "m", 128), ({"ragged": "m"}, "m", 128), ({"ragged": "n"}, "n", 4096),
        ({"ragged": "k"}, "k", 512), ({"ragged": "z"}, "m", 128), ({}, "m", 128), ("n", "m", 128),
    ],
)  # fmt: skip
def test_the_dimension_of_buckets_is_the_ragged_one(groups: Any, along: str, extent: int) -> None:
    one = record(problem=problem() | {"groups": groups})
    assert (one.along, one.extent) == (along, extent)


# -- texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, "128x4096x512"),
        ({"batch": 8}, "8*128x4096x512"),
        ({"batch": None}, "128x4096x512"),
        ({"batch": [2, 3]}, "[2,3]*128x4096x512"),
        ({"groups": {"count": 4, "ragged": "m"}}, "128x4096x512 in 4 groups along m"),
        ({"m": None}, "-x4096x512"),
    ],
)
def test_shapes_in_a_line(changes: dict[str, Any], shape: str) -> None:
    assert problem_fields.shape(problem() | changes) == shape


@pytest.mark.parametrize(
    ("a", "b", "out", "long", "short"),
    [
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bf16"),
        ("float16", "float16", "float32", "float16 -> float32", "fp16 -> fp32"),
        ("bfloat16", "int8", "bfloat16", "bfloat16 x int8", "bf16 x int8"),
        (
            "float8_e4m3fn", "float8_e5m2", "bfloat16",
            "float8_e4m3fn x float8_e5m2 -> bfloat16", "e4m3 x e5m2 -> bf16",
        ),
        ("float32", None, None, "float32", "fp32"),
    ],
)  # fmt: skip
def test_dtypes_in_a_line(a: str, b: str | None, out: str | None, long: str, short: str) -> None:
    document: Any = {"a": {"dtype": a}}
    document |= {} if b is None else {"b": {"dtype": b}}
    document |= {} if out is None else {"out": {"dtype": out}}
    assert problem_fields.dtypes(document) == long
    assert problem_fields.dtypes(document, short=True) == short
    frozen = MappingProxyType({name: MappingProxyType(of) for name, of in document.items()})
    assert problem_fields.dtypes(frozen) == long


@pytest.mark.parametrize("value", [None, "row", ["dtype"], {}, {"layout": "row"}])
def test_operands_without_a_field(value: Any) -> None:
    assert problem_fields.operand({"a": value}, "a", "dtype") == problem_fields.ABSENT


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epilogue": "identity"}, "identity"),
        ({"epilogue": "identity", "bias": "bfloat16"}, "bias"),
        ({"epilogue": "identity", "residual": {"dtype": "bfloat16"}}, "residual"),
        ({"epilogue": "silu", "bias": "bfloat16"}, "bias+silu"),
        ({"epilogue": {"name": "gelu"}, "residual": {"x": 1}}, "gelu+residual"),
        ({"epilogue": ""}, "none"),
        ({"epilogue": None}, "none"),
        ({"epilogue": "by_name"}, "by_name"),
    ],
)
def test_expressions_in_a_line(changes: dict[str, Any], text: str) -> None:
    assert problem_fields.expression(problem() | changes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"), (None, "none"), ("torch.bfloat16", "bfloat16"), ("", "none"),
        (1.5, "1.5"), ([1, 2], "[1,2]"), ({"b": 1, "a": "x"}, '{"a":"x","b":1}'),
        ("a\x1b[2J", "a\\x1b[2J"), (12, "12"), (["\x7f", "\x1b"], '["\\u007f","\\u001b"]'),
    ],
)  # fmt: skip
def test_values_in_a_cell(value: Any, text: str) -> None:
    assert problem_fields.text_of(value) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("plain"), "plain"),
        (OSError("no number"), "no number"),
        (OSError(28, "full"), "output cannot be written: full"),
        (OSError(13, "denied", "/x"), "/x: denied"),
    ],
)
def test_an_error_is_a_line_without_its_number(
    error: Exception, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise error

    assert console.guarded("tmm-x", fails, ValueError, OSError) == console.MISTAKE
    assert capsys.readouterr().err == f"tmm-x: {text}\n"


@pytest.mark.parametrize(
    ("code", "status", "noted"),
    [(None, 0, ""), ("text", 1, "text\n"), (3, 3, ""), (0, 0, "")],
)
def test_an_exit_is_the_status(
    code: Any, status: int, noted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints an exit's text and ends with 1."""

    def leaves() -> int:
        raise SystemExit(code)

    assert console.guarded("tmm", leaves) == status
    assert capsys.readouterr().err == noted


def test_a_note_begins_with_the_command_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def noted() -> int:
        console.note("within")
        return console.DONE

    console.guarded("tmm-x", noted)
    assert capsys.readouterr().err == "tmm-x: within\n"


def test_an_interrupted_command_ends_like_one_of_a_shell() -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    assert console.guarded("tmm", stopped) == 130


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": float("inf"), "b": float("nan"), "c": -float("inf"), "µ": 1.5})
    assert capsys.readouterr().out == '{\n  "a": null,\n  "b": null,\n  "c": null,\n  "µ": 1.5\n}\n'


def test_a_warning_becomes_one_note_and_others_stay_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def warn() -> None:
        with console.warnings_as_notes(CacheWarning):
            for _ in range(2):
                warnings.warn("own", CacheWarning, stacklevel=1)
            warnings.warn("other", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="other"):
        warn()
    assert capsys.readouterr().err == "tmm: own\n"


def test_a_paragraph_has_room_for_20_letters_after_its_indentation() -> None:
    assert console.paragraph("aaaa " * 8, 5) == ["aaaa aaaa aaaa aaaa"] * 2
    assert console.paragraph("aaaaaaaaaa bbbbbbbbbb", 20, hanging=3) == [
        "aaaaaaaaaa",
        "   bbbbbbbbbb",
    ]
