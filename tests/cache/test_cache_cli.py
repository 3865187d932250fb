"""The output of `tmm-cache`, its streams and its exit statuses."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pty
import re
import resource
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cache_builders import (
    BLAS,
    ENVIRONMENT,
    GPU,
    OLDER_ENVIRONMENT,
    SLOW,
    SPLIT_K,
    child,
    made,
    problem,
    record,
)
from msgspec.structs import replace
from tmm_base.console import print_json
from tmm_cache import CacheStore, CandidateResult, digest
from tmm_cache.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def filled(store: CacheStore) -> CacheStore:
    """Four records: two of bfloat16, one of float16 won by BLAS, one on another GPU."""
    store.save(GPU, ENVIRONMENT, record(problem(m=16), created=made(timedelta(hours=2))))
    store.save(GPU, ENVIRONMENT, record(problem(m=2048), created=made(timedelta(days=3))))
    store.save(
        GPU,
        ENVIRONMENT,
        record(
            problem(m=32, n=64, k=128, dtype="float16", epilogue="none", batch=8),
            candidates=(BLAS, SLOW),
            winner=0,
            created=made(timedelta(days=40)),
        ),
    )
    store.save(
        "nvidia-a100",
        OLDER_ENVIRONMENT,
        record(problem(m=1), created=made(timedelta(minutes=5))),
    )
    return store


def shown(capsys: Captured, *options: str) -> list[dict[str, Any]]:
    status = main(["show", "--json", *options])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert status == (0 if found else 1)
    return found


def sizes(capsys: Captured, *options: str) -> list[int]:
    return sorted(item["record"]["problem"]["m"] for item in shown(capsys, *options))


def cells(line: str) -> list[str]:
    return re.split("  +", line.strip())


def test_show_has_a_row_for_each_record(filled: CacheStore, capsys: Captured) -> None:
    assert main(["show"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert [line for line in lines if line.startswith("own records of ")] == [
        f"own records of nvidia-a100, environment {digest(OLDER_ENVIRONMENT)}",
        f"own records of {GPU}, environment {digest(ENVIRONMENT)}",
    ]
    rows = [cells(line) for line in lines if " silu " in line or " none " in line]
    assert [row[0] for row in rows] == [
        *("1x4096x512", "8*32x64x128", "16x4096x512", "2048x4096x512"),
    ]
    assert rows[1][1:3] == ["fp16 row x column none", "blas"]
    assert rows[3] == [
        *("2048x4096x512", "bf16 row x column silu", "triton.split_k"),
        *("11.50", "1.83x", digest(problem(m=2048))[:6]),
    ]


def test_bias_and_residual_are_shown_around_the_epilogue(
    store: CacheStore, capsys: Captured
) -> None:
    instance = problem() | {"bias": {"kind": "row"}, "residual": {"kind": "tile"}}
    store.save(GPU, ENVIRONMENT, record(instance))
    assert main(["show"]) == 0
    words = capsys.readouterr().out.split()
    assert words[words.index("bias") :][:4] == ["bias", "+", "silu", "+"]
    assert "residual" in words


def test_show_lists_own_records_and_with_all_also_records_of_layers(
    filled: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    below = CacheStore(tmp_path / "below", [])
    below.save(GPU, ENVIRONMENT, record(problem(m=16), mark="below"))
    below.save(GPU, ENVIRONMENT, record(problem(m=64)))
    monkeypatch.setenv("TMM_CACHE_PATH", str(below.root))
    assert main(["show", "--all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"own records of {GPU}" in text
    assert f"{below.root} records of {GPU}" in text
    assert {item["layer"] for item in shown(capsys)} == {str(filled.root)}
    # A named record is looked up in all layers. An empty list says which folders were listed.
    both = shown(capsys, digest(problem(m=16)))
    assert [item["layer"] for item in both] == [str(filled.root), str(below.root)]
    assert shown(capsys, digest(problem(m=64)))[0]["layer"] == str(below.root)
    assert main(["clear", "-y"]) == 0
    capsys.readouterr()
    assert main(["show"]) == 0
    assert capsys.readouterr().err == (
        f"tmm-cache: no records in {filled.root}\ntmm-cache: not listed: {below.root}; --all does\n"
    )


def test_show_json_holds_the_whole_record(filled: CacheStore, capsys: Captured) -> None:
    [item] = shown(capsys, digest(problem(m=16)))
    found = filled.load(GPU, ENVIRONMENT, problem(m=16))
    assert found is not None
    assert item == {
        "digest": digest(problem(m=16)),
        "path": str(filled.path(GPU, ENVIRONMENT, problem(m=16))),
        "layer": str(filled.root),
        "gpu": GPU,
        "environment_digest": digest(ENVIRONMENT),
        "environment": ENVIRONMENT,
        "median_us": 11.5,
        "blas_us": 21.0,
        "speedup": 21.0 / 11.5,
        "record": found.to_json(),
    }


def test_show_one_record_in_full(filled: CacheStore, capsys: Captured) -> None:
    path = filled.path(GPU, ENVIRONMENT, problem(m=2048))
    assert main(["show", path.stem[:6]]) == 0
    text = capsys.readouterr().out
    for part in (
        path.stem,
        str(path),
        "torch=2.13.0",
        'a={"aligned":true,"dtype":"bfloat16","layout":"row"}',
        "3.2 s",
        "1.83x over blas",
        "9.0e-04",
    ):
        assert part in text, part
    table = text[text.index("\n\n") :].splitlines()
    kernels = ["triton.split_k", "blas", "triton.naive", "triton.atomic", "triton.big"]
    body = [row for row in table if any(f" {kernel} " in row for kernel in kernels)]
    assert max(len(row) for row in table) <= 100
    assert [row.replace("*", "").split()[0] for row in body] == kernels  # the fastest first
    assert [row.startswith("*") for row in body] == [True, False, False, False, False]
    assert cells(body[0])[-4:-1] == ["ok", "11.50", "4"]
    [full] = shown(capsys, path.stem)
    assert full["path"] == str(path)
    path.with_name("environment.json").unlink()
    assert main(["show", path.stem]) == 0
    assert "torch=2.13.0" not in capsys.readouterr().out


def test_the_star_marks_the_winner_not_the_fastest(store: CacheStore, capsys: Captured) -> None:
    """The winner is the fastest in steady state, which is not always the first of the table."""
    store.save(GPU, ENVIRONMENT, record(candidates=(BLAS, SPLIT_K, SLOW), winner=0))
    assert main(["show", digest(problem())]) == 0
    rows = [cells(line) for line in capsys.readouterr().out.splitlines() if " ok " in line]
    assert [row[0].split()[0] for row in rows] == ["triton.split_k", "*"]
    assert rows[1][1] == "blas"


def test_show_of_an_unknown_or_invalid_digest(filled: CacheStore, capsys: Captured) -> None:
    assert main(["show", "0000000000000000"]) == 1
    assert "no records match" in capsys.readouterr().err
    for text in ("xyz", "../x", "0" * 17, ""):
        assert main(["show", text]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == (
            f"tmm-cache: record: found {text!r}, accepted is the beginning of a digest, like 3f9a\n"
        )


def test_json_output_has_no_nan_or_infinity(store: CacheStore, capsys: Captured) -> None:
    instant = CandidateResult("triton.fast", "v", {}, "ok", (5e-324,))
    blas = CandidateResult("blas", "v", {}, "ok", (1e308,))
    store.save(GPU, ENVIRONMENT, record(candidates=(instant, blas), winner=0))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert main(["show", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["speedup"] is None
    assert main(["show"]) == 0
    assert "inf" not in capsys.readouterr().out
    print_json(float("inf"))
    assert capsys.readouterr().out == "null\n"


def test_an_empty_cache_is_a_note_and_no_error(root: Path, capsys: Captured) -> None:
    assert main(["show"]) == 0
    assert capsys.readouterr() == ("", f"tmm-cache: no records in {root}\n")
    assert main(["show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["verify"]) == 0
    assert not root.exists()


def test_problems_with_unknown_fields_are_listed_too(store: CacheStore, capsys: Captured) -> None:
    odd = CandidateResult("odd[red].kernel", "v", {"a": None}, "ok")
    sizes = {"m": 1, "n": 2, "k": 3, "batch": 1}
    path = store.save(GPU, ENVIRONMENT, record(sizes, candidates=(odd,), winner=0))
    assert path is not None
    strange = {"batch": 7, "a": 7, "b": [], "epilogue": {"name": "silu", "x": 1}}
    store.save(GPU, ENVIRONMENT, record(sizes | strange))
    integers = {"a": {"dtype": "torch.int8"}, "out": {"dtype": "int32"}}
    store.save(GPU, ENVIRONMENT, record(sizes | integers))
    store.save(GPU, ENVIRONMENT, record(sizes | {"groups": {"count": 4, "ragged": "m"}}))
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    words = text.split()
    assert {"groups", "along", "odd[red].kernel", "7*1x2x3"} <= {*words}
    assert " silu " in text
    assert "int8 -> int32" in text
    for entry in store.summaries():
        assert main(["show", entry.digest]) == 0
    # Lists check a part of a record, so escape sequences of a record must not reach the terminal.
    capsys.readouterr()
    document = json.loads(path.read_text().replace("odd[red]", "odd\\u001b[31m"))
    del document["checksum"]
    path.write_text(json.dumps(document))
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert "odd\\x1b[31m.kernel" in text
    assert "\x1b" not in text
    assert main(["show", path.stem]) == 0
    assert "candidates[0]: found 'odd\\x1b[31m.kernel'" in capsys.readouterr().err


def test_faults_are_noted_on_stderr_and_the_rest_is_shown(
    filled: CacheStore, capsys: Captured
) -> None:
    broken = filled.path(GPU, ENVIRONMENT, problem(m=16))
    broken.write_text("{")
    assert main(["show", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 3
    [line] = captured.err.splitlines()
    assert line.startswith(f"tmm-cache: passed over {broken}: is not a valid record: ")


def test_the_root_may_be_named_before_or_after_the_command(
    tmp_path: Path, capsys: Captured
) -> None:
    other = str(tmp_path / "other")
    for command in (["--cache-dir", other, "show"], ["show", "--cache-dir", other]):
        assert main(command) == 0
        assert capsys.readouterr().err == f"tmm-cache: no records in {other}\n"


def test_verify(filled: CacheStore, capsys: Captured) -> None:
    assert main(["verify"]) == 0
    assert capsys.readouterr() == ("", "tmm-cache: 4 good records, 0 faults\n")
    broken = filled.path(GPU, ENVIRONMENT, problem(m=16))
    copied = filled.path(GPU, ENVIRONMENT, problem(m=77))
    copied.write_bytes(filled.path(GPU, ENVIRONMENT, problem(m=2048)).read_bytes())
    broken.write_text("{")
    environment = broken.with_name("environment.json")
    environment.write_text("{}")
    assert main(["verify"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tmm-cache: 3 good records, 3 faults\n"
    lines = captured.out.splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == sorted(
        map(str, (broken, copied, environment))
    )
    assert main(["verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["records"] == 3
    assert {fault["path"]: fault["damaged"] for fault in found["faults"]} == {
        str(broken): True,
        str(copied): True,
        str(environment): True,
    }


def test_verify_reads_layers(
    filled: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    below = CacheStore(tmp_path / "below", [])
    path = below.save(GPU, ENVIRONMENT, record())
    assert path is not None
    path.write_text("{")
    monkeypatch.setenv("TMM_CACHE_PATH", str(below.root))
    assert main(["verify"]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["shwo"], "tmm-cache: argument command: invalid choice: 'shwo'"),
        (["clear", "-y", ""], "record: found '', accepted is the beginning of a digest"),
        (["clear", "-y", "*"], "record: found '*'"),
        (["show", "--cache-dir", ""], "argument --cache-dir: found nothing"),
        (["export"], "the following arguments are required: FILE"),
        (["verify", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_status_two(
    capsys: Captured, arguments: list[str], complaint: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err
    assert len(captured.err.splitlines()) == 1


def test_help_names_every_command(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("show", "clear", "verify", "export", "import", "freeze"):
        assert f"\n    {name} " in text
        assert main([name, "--help"]) == 0
    capsys.readouterr()
    assert main(["verify", "--help"]) == 0
    assert "\nRead every file and print each fault.\n" in capsys.readouterr().out


def test_without_a_command_there_is_help(capsys: Captured) -> None:
    assert main([]) == 0
    bare = capsys.readouterr()
    assert main(["--help"]) == 0
    assert bare == capsys.readouterr()


def test_the_version_is_that_of_the_distribution(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tmm-cache {importlib.metadata.version('tmm-core')}\n"


def test_an_ascii_terminal_gets_escapes_and_no_error(filled: CacheStore) -> None:
    command = child("-m", "tmm_cache.cli", "show", environ={"PYTHONIOENCODING": "ascii"})
    out, complaint = command.communicate()
    assert (command.returncode, complaint) == (0, "")
    assert "\\xb5s" in out


@pytest.mark.parametrize("options", [["show"], ["show", "--json"], ["--help"]])
def test_a_closed_pipe_is_not_reported(filled: CacheStore, options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = child("-m", "tmm_cache.cli", *options, stdout=writer)
    os.close(writer)
    _, complaint = command.communicate()
    assert (command.returncode, complaint) == (0, "")


def on_a_terminal(columns: int, *options: str) -> tuple[list[str], str]:
    """Run the command on a terminal of that width; return its lines and its notes."""
    ours, theirs = pty.openpty()
    environ = {"COLUMNS": str(columns), "TERM": "xterm"}
    command = child("-m", "tmm_cache.cli", *options, stdout=theirs, environ=environ)
    os.close(theirs)
    chunks = []
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # Linux's end
        while chunk := terminal.read(65536):
            chunks.append(chunk)
    _, notes = command.communicate()
    assert command.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", b"".join(chunks).decode()).splitlines(), notes


@pytest.mark.parametrize("columns", [40, 80, 100, 120, 240])
def test_show_fits_the_terminal(filled: CacheStore, columns: int) -> None:
    long = problem(epilogue="gelu_tanh+softcap(30)+scale(0.0125)") | {
        "bias": "bfloat16",
        "residual": "bfloat16",
    }
    winner = replace(SPLIT_K, kernel="triton.warp_specialized")
    filled.save(GPU, ENVIRONMENT, record(long, candidates=(winner, BLAS), winner=0))
    lines, notes = on_a_terminal(columns, "show")
    assert notes == ""
    assert max(len(line) for line in lines) <= columns
    text = "\n".join(lines)
    digests = [digest(instance)[:6] for instance in (long, problem(m=2048))]
    for word in ("triton.split_k", "triton.warp_specialized", "1.83x"):
        assert columns < 80 or word in text
    assert columns < 100 or all(word in text for word in digests)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_record_in_full_fits_the_terminal(filled: CacheStore, columns: int) -> None:
    lines, _ = on_a_terminal(columns, "show", digest(problem(m=2048)))
    path = str(filled.path(GPU, ENVIRONMENT, problem(m=2048)))
    assert path in "\n".join(lines)  # a long path is not cut, so that it can be copied
    assert max(len(line) for line in lines if path not in line) <= columns
    assert "out of shared memory [red]" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["show", "--json"], ["verify"]]
)
def test_listing_imports_no_large_package(filled: CacheStore, arguments: list[str]) -> None:
    code = (
        "import sys; from tmm_cache.cli import main; main(sys.argv[1:]); heavy = {'torch', "
        "'platformdirs', 'tarfile', 'tmm_core'}; sys.exit(repr(heavy & {*sys.modules}))"
    )
    command = child("-c", code, *arguments)
    assert command.communicate()[1].splitlines()[-1] == "set()"


def test_the_command_answers_at_once(filled: CacheStore) -> None:
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    costs = []
    for _ in range(5):
        before = spent()
        child("-m", "tmm_cache.cli", "show", stdout=subprocess.DEVNULL).communicate()
        costs.append(spent() - before)
    # 0.09 s on an idle machine; an import of torch costs at least 0.8 s. The least processor time
    # of several runs, since the machine may be busy.
    assert min(costs) < 0.4


def test_a_record_without_blas_has_no_speedup(store: CacheStore, capsys: Captured) -> None:
    store.save(GPU, ENVIRONMENT, record(candidates=(SPLIT_K,), winner=0))
    [item] = shown(capsys)
    assert (item["median_us"], item["blas_us"], item["speedup"]) == (11.5, None, None)
    assert main(["show"]) == 0
    [line] = [row for row in capsys.readouterr().out.splitlines() if "128x4096x" in row]
    assert line.split()[-3:-1] == ["11.50", "-"]
