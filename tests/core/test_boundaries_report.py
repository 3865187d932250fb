"""Tests the benchmark's tables, names and files, cell by cell."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import document, failure

from tmm_core.bench import providers, quick, report, results, suites
from tmm_core.bench.case import Case, parse_dtype, parse_expression, parse_shape
from tmm_core.bench.results import Results

CLOCKS = {
    "alone": {"torch": 3.0, "tmm": 2.0, "torch again": 3.3},
    "steady": {"torch": 10.0, "tmm": 8.0},
    "between": {"torch": 1.0, "tmm": 2.0},
}


def table(name: str, found: Results) -> list[dict[str, str]]:
    (section,) = (each for each in report.sections(found) if each.title == name)
    return [dict(zip(section.columns, row, strict=True)) for row in section.rows]


# -- cases --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "4×6×8 bfloat16 nn"),
        ({"batch": 2}, "2×4×6×8 bfloat16 nn"),
        ({"layout": "tn", "out_dtype": torch.float32}, "4×6×8 bfloat16→float32 tn"),
        ({"groups": 3}, "4×6×8 bfloat16 nn 3 groups along m"),
        ({"groups": 3, "ragged": "k", "routing": "even"},
         "4×6×8 bfloat16 nn 3 groups along k even"),
        ({"tf32": True, "dtype": torch.float32}, "4×6×8 float32 nn tf32"),
        ({"scales": "row", "dtype": torch.float8_e4m3fn}, "4×6×8 float8_e4m3fn nn scales:row"),
        ({"bias": True, "epilogue": "silu", "residual": True},
         "4×6×8 bfloat16 nn bias silu residual"),
        ({"routing": "even"}, "4×6×8 bfloat16 nn"),
    ],
)  # fmt: skip
def test_a_case_in_a_line(fields: dict[str, Any], text: str) -> None:
    case = Case(m=4, n=6, k=8, **fields)
    assert str(case) == text
    again = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert str(again) == text


def test_documents_without_newer_fields_are_the_same_case() -> None:
    plain = Case(m=4, n=6, k=8).to_json()
    assert plain.keys() & {"scales", "groups", "ragged", "routing"} == set()
    assert Case(m=4, n=6, k=8, groups=2).to_json().keys() - plain.keys() == {
        "groups", "ragged", "routing",
    }  # fmt: skip
    assert Case(m=4, n=6, k=8, scales="row").to_json().keys() - plain.keys() == {"scales"}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", (False, "", False)),
        ("bias", (True, "", False)),
        ("residual", (False, "", True)),
        ("bias+residual", (True, "", True)),
        ("silu", (False, "silu", False)),
        ("bias+silu+softcap(30)+residual", (True, "silu+softcap(30)", True)),
    ],
)
def test_a_bias_comes_first_and_a_residual_last(text: str, fields: tuple[bool, str, bool]) -> None:
    found = parse_expression(text)
    assert (found["bias"], found["epilogue"], found["residual"]) == fields


@pytest.mark.parametrize(
    "text", ["silu+bias", "residual+silu", "bias+bias", "bias+residual+silu", "residual+residual"]
)
def test_a_bias_or_a_residual_elsewhere_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bias first, residual last"):
        parse_expression(text)


def test_shapes_and_dtypes_are_read_as_people_write_them() -> None:
    assert parse_shape("8X64×64x128") == (8, 64, 64, 128)
    assert parse_shape("1x2x3") == (1, 1, 2, 3)
    names = {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
        "fp64": torch.float64, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
        "half": torch.float16, "float32": torch.float32,
    }  # fmt: skip
    assert {name: parse_dtype(name) for name in names} == names
    with pytest.raises(ValueError):
        parse_dtype("bf17")


def test_a_call_passes_only_the_arguments_that_it_has() -> None:
    cpu = torch.device("cpu")
    plain = Case(m=4, n=6, k=8).call(cpu)
    assert plain.keywords == {}
    call = Case(m=4, n=6, k=8, bias=True, residual=True, epilogue="relu", out_dtype=torch.float32)
    assert call.call(cpu).keywords.keys() == {"bias", "residual", "epilogue", "out_dtype"}
    groups = Case(m=64, n=16, k=8, groups=3, bias=True).call(cpu)
    assert groups.bias is not None
    assert groups.bias.shape == (16,)
    bias = groups.inputs().bias
    assert bias is not None
    assert bias.shape == (3, 16)
    assert groups.rows is not None
    assert len(groups.rows.other_offs) > 0
    even = Case(m=64, n=16, k=8, groups=4, routing="even").call(cpu)
    assert even.rows is not None
    assert tuple(even.rows.ends) == (0, 21, 43, 64)  # one group is empty
    assert even.rows.other_offs == ()


def test_each_call_of_a_chain_has_tensors_of_its_own() -> None:
    made = Case(m=4, n=6, k=8, dtype=torch.float32, layout="nt", bias=True, epilogue="relu")
    calls = [made.call(torch.device("cpu")) for _ in range(2)]
    for run in (providers.eager(calls), providers.tmm(calls)):
        for copy, call in enumerate(calls):
            assert call.bias is not None
            right = (call.a @ call.b + call.bias).relu()
            torch.testing.assert_close(run(copy), right, rtol=1e-5, atol=1e-5)


# -- suites -------------------------------------------------------------------------------


SUITE = {"shapes": [[4, 6, 8]], "dtypes": "fp32"}


@pytest.mark.parametrize(
    ("changes", "cases"),
    [
        ({}, [{}]),
        ({"shapes": [[2, 4, 6, 8]]}, [{"batch": 2}]),
        ({"layout": ["nt", "tn"]}, [{"layout": "nt"}, {"layout": "tn"}]),
        ({"precision": ["ieee", "tf32"]}, [{}, {"tf32": True}]),
        ({"epilogues": ["", "bias+silu"]}, [{}, {"bias": True, "epilogue": "silu"}]),
        ({"scales": "row"}, [{}]),
        ({"dtypes": "e4m3"}, [{"dtype": torch.float8_e4m3fn, "scales": "tensor"}]),
        (
            {"dtypes": "e4m3", "scales": ["", "row"]},
            [{"dtype": torch.float8_e4m3fn}, {"dtype": torch.float8_e4m3fn, "scales": "row"}],
        ),
        ({"routing": "even"}, [{}]),
        ({"experts": [[3, 6, 8]], "rows": [4]}, [{"groups": 3}]),
        (
            {"experts": [[3, 6, 4]], "rows": [8], "ragged": "k", "routing": "skewed"},
            [{"groups": 3, "ragged": "k", "routing": "skewed"}],
        ),
        ({"weights": [[6, 8]], "rows": [4, 5]}, [{}, {"m": 5}]),
    ],
)
def test_a_suite_is_every_combination(changes: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    found = suites.expand("x", SUITE | changes)
    usual: dict[str, Any] = {"m": 4, "n": 6, "k": 8, "dtype": torch.float32}
    assert [task.case for task in found] == [Case(**usual | each) for each in cases]
    assert {(task.suite, task.batch_invariant, task.bucketed) for task in found} == {
        ("x", False, False)
    }


def test_suites_by_name() -> None:
    with pytest.raises(ValueError, match="unknown suite nope, zero; there are all, "):
        suites.select(["zero", "square", "nope"])
    assert len(suites.select(["square", "square"], limit=2)) == 2
    every = suites.select(["all"], limit=1)
    assert [task.suite for task in every] == list(suites.shipped())
    assert "_doc" not in suites.shipped()


def test_a_quick_run_has_two_problems_of_each_class_and_small_ones_on_a_cpu() -> None:
    names = list(quick.ROWS)
    for on_gpu in (True, False):
        tasks = quick.tasks(on_gpu=on_gpu)
        assert [task.suite for task in tasks] == names * 2
        assert {task.case.dtype for task in tasks} == {torch.bfloat16}
    for task, most in zip(tasks, [64] * len(names) + [56] * len(names), strict=True):
        assert max(task.case.m, task.case.n, task.case.k) <= most
        assert max(task.case.groups, task.case.batch) <= 4
    chosen = [task.case for task in quick.tasks(on_gpu=True) if task.suite == "square"]
    squares = [task.case for task in suites.select(["square"], dtype=torch.bfloat16)]
    assert chosen == [squares[len(squares) // 3], squares[2 * len(squares) // 3]]


def test_gains_are_of_problems_measured_in_bf16() -> None:
    fp16 = document(64, 9.0)
    fp16["case"] = fp16["case"] | {"dtype": "float16"}
    found = quick.gains(Results.of([document(64, 1.0), document(128, 4.0), fp16, failure(512)]))
    assert found == [
        ("square, 512 to 8192", "torch.matmul", "2", "2.000×", "1.000×"),
    ]


# -- files --------------------------------------------------------------------------------


def test_files_are_read_in_the_order_given_and_folders_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).touch()
    other = tmp_path / "c.txt"
    assert results.files([other, tmp_path]) == [
        other, tmp_path / "a.jsonl", tmp_path / "b.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"kind": "run"}\n[1]\n', ":2: not a result"),
        ('{"kind": "run"}\n{"kind"\n', ":2: "),
        ('{"kind": "run"}\n\n{"kind": "host"}\n', None),
        ('{"kind": "run"}\n{"kind"', None),
        ("", None),
    ],
)
def test_only_a_last_line_may_be_torn(tmp_path: Path, text: str, error: str | None) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    if error is None:
        assert {each["kind"] for each in results.documents(file)} <= {"run", "host"}
        return
    with pytest.raises(ValueError, match=f"x.jsonl{error}"):
        results.documents(file)


def test_of_several_runs_the_latest_measurement_counts() -> None:
    first = {"kind": "regret", "case": Case(m=1, n=2, k=3).to_json(), "us": 1.0}
    other = {**first, "suite": "random without records"}
    found = Results.of([
        {"kind": "run", "n": 1}, {"kind": "host", "n": 1}, first, other, failure(8),
        {"kind": "run", "n": 2}, {"kind": "host", "n": 2}, {**first, "us": 2.0},
        {**failure(8), "failed": "later"}, document(16, 1.0), failure(16),
    ])  # fmt: skip
    assert [run["n"] for run in found.runs] == [1, 2]
    assert found.host == {"kind": "host", "n": 2}
    assert [(r["suite"], r["us"]) for r in found.regrets] == [
        ("random", 2.0), ("random without records", 1.0),
    ]  # fmt: skip
    assert [doc["case"]["m"] for doc in found.problems] == [1, 1, 8, 16]
    assert "failed" not in found.problems[3]
    assert [doc["case"]["m"] for doc in found.measured] == [16]


def test_a_writer_without_a_folder_keeps_documents_alone(tmp_path: Path) -> None:
    writer = results.Writer(None, "x")
    writer.append({"kind": "run"})
    assert (writer.path, writer.documents) == (None, [{"kind": "run"}])
    written = results.Writer(tmp_path / "deep" / "er", "µ")
    written.append({"kind": "run", "text": "µs"})
    written.append({"kind": "host"})
    assert written.path is not None
    assert written.path.name.endswith("-µ.jsonl")
    assert written.path.read_text("utf-8") == '{"kind": "run", "text": "µs"}\n{"kind": "host"}\n'


# -- the report -----------------------------------------------------------------------------


def test_a_file_of_a_run_is_new_and_there_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = results.Writer(tmp_path / "folder", "square")
    assert made.path is not None
    assert made.path.read_text() == ""
    name = made.path.name.removesuffix("-square.jsonl")
    now = datetime.datetime.strptime(name, "%Y%m%dT%H%M%S.%f")

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    monkeypatch.setattr(results.datetime, "datetime", Clock)
    with pytest.raises(FileExistsError):
        results.Writer(tmp_path / "folder", "square")


def test_a_problem_is_the_same_whatever_the_order_of_its_fields() -> None:
    assert results.identity("s", {"m": 1, "n": 2}) == results.identity("s", {"n": 2, "m": 1})
    assert results.identity("s", {"m": 1}) != results.identity("s", {"m": 2})
    assert results.identity("s", {"m": 1}) != results.identity("t", {"m": 1})


def test_a_measured_problem_is_one_line() -> None:
    one = document(64, 2.0)
    assert report.line(one).startswith(
        "square 64×64×64 bfloat16 nn: torch 100.0, tmm 50.0 µs, 2.000× (A/A "
    )
    assert report.line(one).endswith(f"triton.best BLOCK_M=64 [{one['origin']}]")
    several = report.line({**one, "ratios": [1.5, 2.5, 2.0]})
    assert ", 2.000×, 1.500 to 2.500 by capture (A/A " in several
    assert report.line(failure(8)) == "square 8×8×8 bfloat16 nn: failed: OSError: gone"


def test_the_other_clocks_have_a_column_where_one_was_used() -> None:
    name = "clocks, geometric mean / worst"
    found = Results.of([document(64, 2.0, **CLOCKS), document(128, 2.0)])
    (row,) = table(name, found)
    assert row == {
        "class": "square", "dtype": "bfloat16", "in use": "2.000 / 2.000",
        "alone": "1.500 / 1.500", "steady": "1.250 / 1.250", "between": "0.500 / 0.500",
    }  # fmt: skip
    titles = [each.title for each in report.sections(Results.of([document(64, 2.0)]))]
    assert titles == ["", "square"]
    columns, rows = report.problem_table(found.measured)
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    assert cells[0]["alone"] == "1.500× (A/A 0.909)"
    assert cells[0]["steady"] == "1.250×"
    assert cells[1]["alone"] == ""
    assert "by capture" not in columns


def test_an_exhaustive_search_names_the_step_that_lost_the_best() -> None:
    def searched(m: int, step: str, regret: float, room: float) -> dict[str, Any]:
        search = {"step": step, "regret": regret, "blas_over_best": room}
        return document(m, 1.0, search=search)

    documents = [
        searched(64, "found", 1.0, 1.0), searched(128, "found", 1.0, 4.0),
        searched(256, "not proposed", 1.21, 2.0), document(512, 1.0),
    ]  # fmt: skip
    rows = report.searches(Results.of(documents))
    assert [row[1:3] for row in rows] == [("all", "3"), ("found", "2"), ("not proposed", "1")]
    assert rows[0][4:6] == ("1.210×", "256×256×256 bfloat16 nn")
    assert (rows[1][3], rows[1][6]) == ("1.000×", "2.000×")
    assert rows[2][3:] == ("1.210×", "1.210×", "256×256×256 bfloat16 nn", "2.000×")


RUN: dict[str, Any] = {
    "kind": "run", "started": "today", "command": ["bench"], "tmm": "1",
    "environment": {"name": "GPU", "torch": "2", "triton": "", "cuda": "13", "cublas": 130},
}  # fmt: skip


def test_the_head_of_a_report() -> None:
    assert report.markdown(Results.of([document(64, 1.0)])).startswith("# tmm against torch\n")
    lines = report.markdown(Results.of([{**RUN, "commit": "0123456789abcdef"}])).splitlines()
    assert lines[0] == "# tmm against torch on GPU"
    assert lines[2] == "torch 2, triton none, CUDA 13, cuBLAS 130, driver unknown, tmm 1"
    assert lines[3] == "- today: commit 0123456789ab, `tmm bench`"
    # The last run's software is named, and each run's command.
    environment = {**RUN["environment"], "torch": "3"}
    later = {**RUN, "started": "later", "environment": environment, "tmm": "2"}
    lines = report.markdown(Results.of([RUN, later])).splitlines()
    assert lines[2] == "torch 3, triton none, CUDA 13, cuBLAS 130, driver unknown, tmm 2"
    assert [line.split(":")[0] for line in lines[3:5]] == ["- today", "- later"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "commit unknown"),
        ({"commit": "abc", "uncommitted_changes": False}, "commit abc"),
        ({"commit": "abc", "uncommitted_changes": True}, "commit abc with uncommitted changes"),
    ],
)
def test_the_commit_of_a_run(changes: dict[str, Any], text: str) -> None:
    assert report.commit(RUN | changes) == text


def test_host_costs_are_a_section() -> None:
    host = {
        "kind": "host", "size": 64, "dtype": "bfloat16", "kernels": {"plain": "blas"},
        "us": {"torch.matmul": 1.234, "tmm": 2.0},
    }  # fmt: skip
    text = report.markdown(Results.of([host]))
    assert "## host cost per call\n\n64×64 bfloat16; plain: `blas`\n" in text
    assert "| `torch.matmul` | 1.23 |\n| `tmm` | 2.00 |" in text


def test_characters_that_a_table_cannot_hold_are_escaped() -> None:
    broken = document(64, 1.0, origin="a|b")
    assert "a\\|b" in report.markdown(Results.of([broken]))


@pytest.mark.parametrize(
    ("cells", "number"),
    [
        (["1.020×", ""], True), (["3.1 ±0.2"], True), (["12%", "7"], True),
        (["1.2e-05"], True), (["blas"], False), (["1", "x"], False),
    ],
)  # fmt: skip
def test_columns_of_numbers_stand_at_the_right(cells: list[str], number: bool) -> None:
    section = report.Section("t", ("name", "value"), [("a", cell) for cell in cells])
    assert section.numbers == (["value"] if number else [])
    assert report.Section("t", ("name",)).numbers == []


def test_random_problems_have_a_section_for_each_class() -> None:
    point: dict[str, Any] = {
        "kind": "regret", "case": Case(m=8, n=64, k=64).to_json(), "us": 2.0, "best_us": 1.0,
        "torch_us": 4.0,
    }  # fmt: skip
    found = Results.of([point, {**point, "suite": "random without records"}])
    titles = [each.title for each in report.sections(found)][1:]
    first = "random M, weight and epilogue"
    assert titles == [first, f"{first} without records"]
    rows = table(first, found)
    assert [row["M"] for row in rows] == ["1…16", "1…8192"]
    assert (rows[0]["torch / chosen"], rows[0]["chosen / best known"]) == ("2.000×", "2.000×")
