"""Unusable cache folders cost one warning; records stay in memory, without exceptions or waits."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import filelock
import pytest
import tmm_cache
from cache_builders import ENVIRONMENT, GPU, child, problem, record, warned
from tmm_cache import CacheStore, Notes, default_root, disk, files, layer_paths
from tmm_cache.cli import main
from tmm_cache.paths import NOWHERE

Captured = pytest.CaptureFixture[str]


def without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a uid that no account has, as in a container that is started with one."""

    def unknown(uid: object) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "TMM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def with_home(text: str) -> Callable[[pytest.MonkeyPatch], None]:
    def setup(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("XDG_CACHE_HOME", "TMM_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", text)

    return setup


def with_a_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_CACHE_DIR", "~nobody-of-that-name/tmm")


def in_a_removed_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ["TMM_CACHE_DIR"]).with_name("removed")
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setenv("TMM_CACHE_DIR", "relative")


PLACES = {
    "unknown uid": (without_account, "no home folder"),
    "empty HOME": (with_home(""), "HOME is ''"),
    "relative HOME": (with_home("home"), "HOME is 'home'"),
    "unknown user": (with_a_home_of_nobody, "no home folder of that user"),
    "removed folder": (in_a_removed_folder, "the working directory is gone"),
}


@pytest.fixture(params=PLACES)
def nowhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A process without a usable cache folder, and the warning that it should get."""
    monkeypatch.chdir(tmp_path)
    setup, complaint = PLACES[request.param]
    setup(monkeypatch)
    return complaint


def test_without_a_place_everything_is_kept_in_memory(nowhere: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    below = CacheStore(tmp_path / "below", [])
    below.save(GPU, ENVIRONMENT, record(problem(m=9)))
    with warned(nowhere) as caught:
        store = CacheStore(layers=[below.root])
        assert store.root == NOWHERE
        assert store.load(GPU, ENVIRONMENT, problem()) is None
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=1) as mine:
            assert mine is True
            assert store.save(GPU, ENVIRONMENT, record()) is None
        store.log_miss(GPU, ENVIRONMENT, problem(m=5))
        Notes("able", None).add("x", 1)
        assert store.misses() == []
        assert CacheStore(layers=[]).root == default_root() == NOWHERE
    assert "set TMM_CACHE_DIR" in str(caught[0].message)
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    assert store.load(GPU, ENVIRONMENT, problem(m=9)) == record(problem(m=9))
    assert sorted(entry.record.problem["m"] for entry in store.summaries()) == [9, 128]
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == sorted(
        [below.root, *below.root.rglob("*")]
    )


@pytest.mark.parametrize("command", [["show"], ["verify"], ["clear", "-y"], ["import", "x.json"]])
def test_the_command_reports_that_no_folder_is_usable(
    nowhere: str, command: list[str], capsys: Captured
) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [nowhere in line for line in captured.err.splitlines()] == [True]
    assert captured.err.startswith("tmm-cache: ")


def test_an_absolute_cache_folder_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    without_account(monkeypatch)
    assert default_root({"TMM_CACHE_DIR": "/x"}) == Path("/x")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/y")
    assert default_root() == Path("/y/tmm")


def test_a_relative_layer_of_a_removed_folder_is_passed_over(
    store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    root = store.root
    in_a_removed_folder(monkeypatch)
    with warned("the working directory is gone"):
        layered = CacheStore(root, [Path("relative"), tmp_path])
    assert layered.layers == (tmp_path,)
    assert layered.load(GPU, ENVIRONMENT, problem()) == record()


def denied(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> None:
    """Nothing below the folder can be read, like `/proc/1/root` of another user's process."""
    for name in ("stat", "open", "listdir", "scandir", "readlink", *more):
        real = getattr(os, name)

        def refuse(path: Any = ".", *arguments: Any, real: Any = real, **options: Any) -> Any:
            if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_layer_that_cannot_be_read_costs_one_warning(
    what: str, store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    layer = tmp_path / "layer"
    below = CacheStore(layer, [])
    below.save(GPU, ENVIRONMENT, record(problem(m=1)))
    below.save("nvidia-a100", ENVIRONMENT, record(problem(m=1)))
    monkeypatch.setenv("TMM_CACHE_PATH", str(layer))
    monkeypatch.setenv("TMM_SHIPPED_RECORDS", "0")
    if what == "link":  # its existence can be seen, as of `/proc/1/root`, but not its target
        layer.rename(tmp_path / "there")
        layer.symlink_to("there")
        denied(monkeypatch, layer)
    else:
        denied(monkeypatch, layer, "lstat")
    assert layer_paths() == (layer,)
    with warned(f"{layer}: cannot be read: .*Permission denied"):
        layered = CacheStore()
        for gpu in (GPU, "nvidia-a100"):
            assert layered.load(gpu, ENVIRONMENT, problem(m=1)) is None
        assert layered.load(GPU, ENVIRONMENT, problem()) == record()
        assert [entry.record for entry in layered.summaries()] == [record()]


def test_a_read_only_root_costs_one_warning(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.save(GPU, ENVIRONMENT, record()) is not None

    def read_only(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    real = os.open

    def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        return (read_only if flags & (os.O_WRONLY | os.O_RDWR) else real)(
            path, flags, *arguments, **options
        )

    monkeypatch.setattr(os, "open", opened)
    for name in ("mkdir", "replace", "unlink", "utime"):
        monkeypatch.setattr(os, name, read_only)
    with warned("cannot be written .Read-only file system"):
        store.log_miss(GPU, ENVIRONMENT, problem(m=5))
        with store.lock(GPU, ENVIRONMENT, problem(m=2), timeout=0) as mine:
            assert mine is True
            assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is None
        assert store.load(GPU, ENVIRONMENT, problem()) == record()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    # Its address is limited to some hundred bytes.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


STRANGE = [a_fifo, a_socket, a_device, a_folder]


@pytest.mark.parametrize("make", STRANGE)
def test_misses_and_notes_that_are_not_regular_files_do_not_hang(
    store: CacheStore, make: Callable[[Path], None]
) -> None:
    log = Notes("misses", None, store.root).path
    log.parent.mkdir(parents=True)
    make(log)
    with warned("notes/misses-.* cannot be written"):
        store.log_miss(GPU, ENVIRONMENT, problem())
        store.log_miss(GPU, ENVIRONMENT, problem(m=5))
    assert store.misses() == []
    log.rmdir() if log.is_dir() else log.unlink()
    assert store.save(GPU, ENVIRONMENT, record()) is not None
    notes = Notes("able", None, store.root)
    notes.add("x", 1)
    (path,) = (store.root / "notes").iterdir()
    path.unlink()
    make(path)
    again = Notes("able", None, store.root)
    assert again.get("x") is None
    again.add("x", 2)
    assert again.get("x") == 2


@pytest.mark.parametrize("make", STRANGE)
def test_records_environments_and_locks_that_are_not_regular_files_do_not_hang(
    store: CacheStore, make: Callable[[Path], None]
) -> None:
    path = store.path(GPU, ENVIRONMENT, problem())
    path.parent.mkdir(parents=True)
    for name in (path.name, "environment.json", f"{path.name}.lock"):
        make(path.with_name(name))
    with warned("is not a regular file"):
        assert store.load(GPU, ENVIRONMENT, problem()) is None
    # filelock 4.2 can lock a FIFO.
    lockable = make is a_fifo and not filelock.__version__.startswith("4.1.")
    faults = nullcontext() if lockable else warned("", times=2 if make is a_folder else 1)
    with faults:
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=1) as mine:
            assert mine is True
        assert (store.save(GPU, ENVIRONMENT, record()) is None) is (make is a_folder)
    assert store.load(GPU, ENVIRONMENT, problem()) == record()


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.slow(quick=4)
def test_the_command_does_not_hang_on_something_else_than_a_file(
    store: CacheStore, make: Callable[[Path], None], tmp_path: Path
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    folder = store.path(GPU, ENVIRONMENT, problem()).parent
    (folder / "environment.json").unlink()
    for name in (f"{'0' * 16}.json", f"{'1' * 16}.json.lock", "environment.json"):
        make(folder / name)
    make(tmp_path / "records.json")
    for command, status in (
        (["show"], 0),
        (["verify"], 1),
        (["import", str(tmp_path / "records.json")], 2),
        (["clear", "-y"], 0),
    ):
        process = child("-m", "tmm_cache.cli", *command)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == status, (command, complaints)
        assert "Traceback" not in complaints


def test_a_fifo_that_replaces_a_file_after_the_check_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "misses.jsonl"
    path.write_text("")
    real = os.open

    def swapped(target: Any, *arguments: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(target, *arguments)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(OSError):
        disk.append_line(path, b"{}", 100)
    path.unlink()
    path.write_text("")
    assert isinstance(files.read_file(path), files.Fault)


def test_a_link_is_read_and_never_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("text")
    link.symlink_to(target)
    assert files.read_file(link) == b"text"
    with pytest.raises(OSError, match="symbolic links"):
        disk.append_line(link, b"{}", 100)
    assert target.read_text() == "text"


FIRST_MATMUL = """
import os, pwd, sys, tempfile, warnings
import torch, tmm_core
def unknown(uid):
    raise KeyError(uid)
place = sys.argv[1]
for name in ("TMM_CACHE_DIR", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
if place == "unknown uid":
    os.environ.pop("HOME", None)
    pwd.getpwuid = unknown
elif place == "removed folder":
    os.environ["TMM_CACHE_DIR"] = "relative"
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
else:
    os.environ["HOME"] = {"empty HOME": "", "relative HOME": "home"}[place]
a, b = torch.randn(8, 16), torch.randn(16, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b)
print(*[each.category.__name__ for each in caught])
"""


@pytest.mark.parametrize("place", ["unknown uid", "empty HOME", "relative HOME", "removed folder"])
@pytest.mark.slow
def test_the_first_matmul_needs_no_place(place: str, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FIRST_MATMUL, place], cwd=tmp_path, capture_output=True, text=True
    )
    assert (process.stdout, process.returncode) == ("CacheWarning\n", 0), process.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_healthy_place_is_not_reported(store: CacheStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.save(GPU, ENVIRONMENT, record()) is not None
        assert tmm_cache.default_root() == store.root
