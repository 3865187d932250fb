"""Messages of the commands, and their streams: closed and full streams, narrow terminals, paths
that cannot be written."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cache_builders import BLAS, ENVIRONMENT, GPU, SPLIT_K, child, problem, record
from msgspec.structs import replace
from tmm_base import UsageError, tmm
from tmm_cache import (
    CacheStore,
    CandidateResult,
    TuningRecord,
    disk,
    problem_fields,
)
from tmm_cache.cli import main
from tmm_cache.disk import require_target

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def filled(store: CacheStore) -> CacheStore:
    for m in (16, 2048):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    return store


# -- streams -----------------------------------------------------------------------------


def run_closed(redirect: str, *arguments: str, module: str = "tmm_cache.cli") -> tuple[int, str]:
    """The exit status of a command with redirected streams, and the output that was not
    redirected."""
    line = f'exec "$0" -m {module} "$@" {redirect}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        (["--version"], ""),
        (["--help"], ""),
        (["show"], ""),
        (["show", "--json"], ""),
        (["verify"], "tmm-cache: 2 good records, 0 faults\n"),
        (["clear", "-y"], "tmm-cache: removed 3 of 3 files\n"),
    ],
    ids=" ".join,
)
def test_a_closed_stdout_gets_no_output(
    filled: CacheStore, arguments: list[str], notes: str
) -> None:
    if arguments[0] == "clear":
        filled.log_miss(GPU, ENVIRONMENT, problem(m=1))
    assert run_closed(">&-", *arguments) == (0, notes)


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(
    filled: CacheStore, redirect: str, tmp_path: Path
) -> None:
    """Printed lines must not get into the file, nor notes into the data."""
    target = tmp_path / "records.json"
    status, text = run_closed(redirect, "export", str(target))
    assert status == 0
    assert not text.replace(f"tmm-cache: 2 records written to {target}\n", "")
    elsewhere = CacheStore(tmp_path / "elsewhere", [])
    assert main(["--cache-dir", str(elsewhere.root), "import", str(target)]) == 0
    assert len(list(elsewhere.summaries())) == 2
    assert run_closed("2>&-", "verify") == (0, "")


@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"]], ids=" ".join)
def test_a_full_disk_below_stdout_is_reported_in_one_line(
    filled: CacheStore, arguments: list[str]
) -> None:
    message = "tmm-cache: output cannot be written: No space left on device\n"
    assert run_closed(">/dev/full", *arguments) == (2, message)


@pytest.mark.parametrize(
    ("arguments", "module", "status"),
    [
        (["nonsense"], "tmm_cache.cli", 2),
        (["nonsense"], "tmm_base.tmm", 2),
        (["import", "/nonexistent"], "tmm_cache.cli", 2),
        (["--cache-dir", "/nonexistent", "show"], "tmm_cache.cli", 0),
    ],
)
def test_a_full_disk_below_stderr_changes_no_status(
    filled: CacheStore, arguments: list[str], module: str, status: int
) -> None:
    assert run_closed("2>&1", *arguments, module=module)[0] == status
    assert run_closed("2>/dev/full", *arguments, module=module)[0] == status


@pytest.mark.parametrize("run", [main, tmm.main])
@pytest.mark.parametrize("argument", ["--version", "--help"])
@pytest.mark.parametrize("buffered", [True, False])
def test_help_on_a_full_disk_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, run: Any, argument: str, buffered: bool
) -> None:
    with io.TextIOWrapper(
        open("/dev/full", "wb", buffering=-buffered), write_through=not buffered
    ) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run([argument]) == 2
    assert capsys.readouterr().err.endswith(": output cannot be written: No space left on device\n")


# -- paths of results --------------------------------------------------------------------


@pytest.mark.parametrize("command", [["export"], ["freeze", "-o"]], ids=" ".join)
def test_a_folder_that_is_missing_is_named_before_any_work(
    filled: CacheStore, tmp_path: Path, capsys: Captured, command: list[str]
) -> None:
    [path] = (each for each in filled.root.rglob("*.json") if each.name == "environment.json")
    path.write_text("{")  # read, it would be reported
    assert main([*command, str(tmp_path / "absent" / "file")]) == 2
    assert capsys.readouterr() == (
        "",
        f"tmm-cache: {tmp_path / 'absent'}: there is no such folder\n",
    )
    (tmp_path / "plain").write_text("")
    assert main([*command, str(tmp_path / "plain" / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"tmm-cache: {tmp_path / 'plain'}")
    for special in (tmp_path, Path(os.devnull)):
        assert main([*command, str(special)]) == 2
        assert capsys.readouterr().err == f"tmm-cache: {special}: is not a regular file\n"


def test_a_target_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_target(tmp_path / "new")
    (tmp_path / "old").write_text("")
    require_target(tmp_path / "old")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    # From Python 3.13 on `Path.resolve` accepts a loop.
    loop = r"loop/file: " if sys.version_info < (3, 13) else r"/loop: there is no such folder$"
    with pytest.raises(UsageError, match=loop):
        require_target(tmp_path / "loop" / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match=f"^{tmp_path}: no file can be written in this folder"):
        require_target(tmp_path / "new")


def test_a_disk_that_fills_up_is_reported_with_the_name_of_the_file(
    filled: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "write", full)
    target = tmp_path / "records.json"
    assert main(["export", str(target)]) == 2
    message = f"tmm-cache: {target}: No space left on device\n"
    assert capsys.readouterr().err == message
    assert not list(tmp_path.glob("records*"))
    monkeypatch.undo()
    assert main(["export", str(target)]) == 0
    root = tmp_path / "elsewhere"
    monkeypatch.setattr(disk.os, "write", full)
    assert main(["--cache-dir", str(root), "import", str(target)]) == 2
    assert re.search(rf"tmm-cache: {root}/v2/.*json: No space left", capsys.readouterr().err)


def test_freeze_creates_the_users_own_root(
    store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = CacheStore(tmp_path / "below", [])
    below.save(GPU, ENVIRONMENT, record())
    monkeypatch.setenv("TMM_CACHE_PATH", str(below.root))
    assert main(["freeze"]) == 0
    assert (store.root / "tmm.lock.json").is_file()


# -- tables and texts ----------------------------------------------------------------------


def test_a_record_prints_as_a_line() -> None:
    assert repr(record()) == (
        "<TuningRecord 128x4096x512 bf16 silu: triton.split_k 11.50 µs, 1.83x over blas, "
        "5 candidates>"
    )
    alone = record(candidates=(replace(SPLIT_K, samples_us=()),), winner=0)
    assert repr(alone).endswith(": triton.split_k not timed, 1 candidate>")
    assert repr(SPLIT_K) == (
        "<CandidateResult triton.split_k BLOCK_M=64 SPLIT_K=4 order=row share=2.5 none=none "
        "tma=true: ok, 11.50 µs>"
    )
    assert repr(CandidateResult("a\x1b[31m", "1", {}, "failed")) == (
        "<CandidateResult a\\x1b[31m: failed, not timed>"
    )
    sizes = {"m": 1, "n": 2, "k": 3}
    bare = TuningRecord(sizes, 0, (BLAS,), "2026-01-31T12:00:00Z", 1.0)
    assert repr(bare) == "<TuningRecord 1x2x3 - -: blas 21.00 µs, 1.00x over blas, 1 candidate>"
    strange = replace(
        bare, problem={**sizes, "m": "\x1b[31m"}, candidates=(replace(BLAS, kernel="a\nb"),)
    )
    assert repr(strange) == "<TuningRecord \\x1b[31mx2x3 - -: a\\nb 21.00 µs, 1 candidate>"


def test_fields_that_are_off_are_not_printed() -> None:
    config = {"BLOCK_M": 64, "early": "", "splits": 0, "none": None, "tma": False}
    assert problem_fields.config(config) == "BLOCK_M=64 splits=0 none=none tma=false"
    assert problem_fields.config({"a\nb": "c\x1b"}) == "a\\nb=c\\x1b"


# -- the start of `tmm` --------------------------------------------------------------------


def test_tmm_answers_without_torch() -> None:
    code = (
        "import sys; from tmm_base.tmm import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'triton', 'tmm_core'} & {*sys.modules}; "
        "sys.exit(heavy or status)"
    )
    for arguments, status in ((["--version"], 0), (["--help"], 0), ([], 0), (["bogus"], 2)):
        command = child("-c", code, *arguments)
        out, err = command.communicate()
        assert command.returncode == status, err
        assert bool(out) == (status == 0)


def test_the_version_is_read_from_the_module(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("tmm_core")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("version.py").read_text()
    assert tmm.main(["--version"]) == 0
    message = capsys.readouterr().out
    assert message.startswith("tmm ")
    assert f'= "{message.split()[1]}"' in text
    monkeypatch.setattr(tmm, "find_spec", lambda name: None)
    assert tmm.main(["--version"]) == 0
    assert capsys.readouterr().out == "tmm of unknown version: tmm_core is not installed\n"


def test_a_mistyped_command_is_reported_in_one_line(capsys: Captured) -> None:
    assert tmm.main(["tunes", "1x1x1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tmm: argument command: invalid choice: 'tunes' (choose from ")
    assert err.count("\n") == 1
    assert all(name in err for name in tmm.COMMANDS)


def test_commands_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    class Cli:
        @staticmethod
        def main(arguments: list[str]) -> int:
            calls.append(arguments)
            return 7

    imported: list[str] = []
    monkeypatch.setattr(tmm.importlib, "import_module", lambda name: imported.append(name) or Cli)
    assert tmm.main(["tune", "--help"]) == 7
    assert tmm.main(["--", "tune"]) == 7
    monkeypatch.setattr(sys, "argv", ["tmm", "doctor"])
    assert tmm.main() == 7
    assert calls == [["tune", "--help"], ["--", "tune"], ["doctor"]]
    assert imported == ["tmm_core.tools.cli"] * 3


def test_tmm_starts_at_once() -> None:
    """``tmm --version`` takes 0.06 s of a processor, and an import of torch 0.8 s more."""
    run = child("-X", "importtime", "-m", "tmm_base.tmm", "--version", stderr=subprocess.PIPE)
    _, lines = run.communicate()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines.splitlines()}
    assert "tmm_base" in imported
    assert not imported & {"torch", "triton", "numpy", "tmm_core", "tmm_cache", "msgspec"}


def test_tmm_with_a_closed_stream_is_silent_and_ends_with_its_status() -> None:
    for arguments in ("--version", "--help"):
        assert run_closed(">&-", arguments, module="tmm_base.tmm") == (0, "")
    assert run_closed("2>&-", "bogus", module="tmm_base.tmm") == (2, "")
