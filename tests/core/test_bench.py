"""The benchmark: its problems, its timings and its figures."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeKernel, register

import tmm_core
from tmm_core import dispatch
from tmm_core.bench import host, providers, report, results, runner, suites
from tmm_core.bench.case import Case, parse_expression, parse_shape
from tmm_core.bench.results import Results
from tmm_core.bench.suites import Task
from tmm_core.spec.bucket import bucket_edge
from tmm_core.tools.cli import main
from tmm_core.tuning.timing import HostTimer
from tmm_core.tuning.tuner import Tuner
from tmm_core.verify import compare

CPU = torch.device("cpu")
FP32 = torch.float32


pytestmark = pytest.mark.usefixtures("blas_alone")


# -- cases and suites --------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_case_has_the_layouts_it_says(layout: str, batch: int) -> None:
    call = Case(m=4, n=6, k=8, batch=batch, dtype=FP32, layout=layout).call(CPU)
    lead = (batch,) if batch > 1 else ()
    assert (call.a.shape, call.b.shape) == ((*lead, 4, 8), (*lead, 8, 6))
    for letter, t in zip(layout, (call.a, call.b), strict=True):
        assert (t if letter == "n" else t.mT).is_contiguous()
    problem = call.problem()
    assert (problem.batch, problem.m, problem.n, problem.k) == (batch, 4, 6, 8)


def test_a_residual_has_the_dtype_of_the_result_and_a_bias_that_of_the_operands() -> None:
    call = Case(m=4, n=6, k=8, dtype=torch.half, bias=True, residual=True, out_dtype=FP32).call(CPU)
    assert call.bias is not None
    assert call.residual is not None
    assert (call.bias.dtype, call.residual.dtype) == (torch.half, FP32)
    assert call.residual.shape == (4, 6)


def test_a_case_survives_json() -> None:
    case = Case(
        m=1, n=2, k=3, layout="tn", epilogue="silu", bias=True, out_dtype=FP32, dtype=torch.half
    )
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


@pytest.mark.parametrize("text", ["", "4", "4x4", "4x4x4x4x4", "4x4x", "4x4x4.0", "axbxc", "²x2x2"])
def test_an_invalid_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MxNxK or BxMxNxK"):
        parse_shape(text)


def test_expressions_take_bias_and_residual_off_the_ends() -> None:
    def parsed(text: str) -> tuple[bool, str, bool]:
        fields = parse_expression(text)
        assert list(fields) == ["bias", "epilogue", "residual"]
        return fields["bias"], fields["epilogue"], fields["residual"]

    assert parsed("bias+gelu_tanh+residual") == (True, "gelu_tanh", True)
    assert parsed("softcap(1e+3)+residual") == (False, "softcap(1e+3)", True)
    assert parsed("bias") == (True, "", False)
    assert parsed("") == (False, "", False)


def test_the_suites_are_all_combinations_of_the_files_entries() -> None:
    square = suites.select(["square"])
    assert len(square) == 62
    assert {task.case.dtype for task in square} == {torch.half, torch.bfloat16}
    assert square[0].case == Case(m=512, n=512, k=512, dtype=torch.half)
    assert len(suites.select(["layouts"])) == 4 * 3
    fused = [task.case for task in suites.select(["epilogue"]) if task.case.residual]
    assert len(fused) == 8
    assert all(case.bias and case.epilogue == "gelu_tanh" for case in fused)
    precisions = [task.case.tf32 for task in suites.select(["fp32"])]
    assert precisions == [False] * 4 + [True] * 4
    assert {task.case.epilogue for task in suites.select(["gated"])} == {"swiglu"}
    assert suites.select(["batched"])[-1].case == Case(batch=16, m=1, n=4096, k=4096)


def test_suites_are_narrowed_by_dtype_and_limit() -> None:
    tasks = suites.select(["square", "decode"], dtype=torch.bfloat16, limit=2)
    assert [(task.suite, task.case.m) for task in tasks] == [
        ("square", 512), ("square", 768), ("decode", 1), ("decode", 4),
    ]  # fmt: skip
    assert all(task.case.dtype == torch.bfloat16 for task in tasks)
    everything = suites.select(["all"])
    assert {task.suite for task in everything} == set(suites.shipped())


# -- providers ---------------------------------------------------------------------------

CASES = [
    Case(m=9, n=6, k=8, dtype=FP32),
    Case(m=9, n=6, k=8, dtype=FP32, layout="nt", bias=True),
    Case(m=9, n=6, k=8, dtype=FP32, layout="nt", epilogue="gelu_tanh", bias=True, residual=True),
    Case(m=9, n=6, k=8, dtype=FP32, layout="tt", epilogue="gelu_tanh+softcap(3)"),
    Case(m=9, n=6, k=8, dtype=FP32, layout="nt", epilogue="swiglu", bias=True, residual=True),
    Case(m=9, n=6, k=8, dtype=FP32, layout="nt", epilogue="swiglu+scale(0.5)"),
    Case(m=9, n=6, k=8, dtype=FP32, batch=3, layout="nt", epilogue="silu", bias=True),
    Case(m=9, n=6, k=8, layout="nt", epilogue="silu", out_dtype=FP32),
    Case(m=9, n=6, k=8, layout="nt", bias=True, residual=True, out_dtype=torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_code_computes_the_same_as_tmm(case: Case) -> None:
    call = case.call(CPU)
    problem, inputs = call.problem(), call.inputs()
    expected = compare.expected(problem, inputs).numbers
    limit = 4 * compare.TOLERANCE[case.dtype]  # eager rounds at every step
    for run in (providers.eager([call]), providers.tmm([call])):
        out = run(0)
        assert out.dtype == (case.out_dtype or case.dtype)
        assert compare.error(out, expected) <= limit


def test_eager_gated_is_two_products_of_halves() -> None:
    case = Case(m=4, n=6, k=8, dtype=FP32, layout="nt", epilogue="swiglu")
    call = case.call(CPU)
    gate, up = call.b[:, :6], call.b[:, 6:]
    assert torch.equal(providers.eager([call])(0), F.silu(call.a @ gate) * (call.a @ up))


# -- the runner --------------------------------------------------------------------------


class ColumnTimer:
    """Gives each column a time by its place in the loop, and calls everything once."""

    def __init__(self, *times: float) -> None:
        self.times = times
        self.rounds: list[int] = []
        self.released = 0

    def measure(self, runs: Sequence[Any], rounds: int, **chain: Any) -> list[list[float]]:
        self.rounds.append(rounds)
        for run in runs:
            run(0)
        spread = [1 + 0.01 * (i % 3 - 1) for i in range(rounds)]
        return [[us * factor for factor in spread] for us in self.times[: len(runs)]]

    def release(self) -> None:
        self.released += 1


def measure(
    monkeypatch: pytest.MonkeyPatch, *tasks: Task, times: Sequence[float], **options: Any
) -> list[dict[str, Any]]:
    monkeypatch.setattr(runner, "timer_for", lambda device: ColumnTimer(*times))
    return list(runner.run(tasks, CPU, runner.Options(**options)))


def task(**fields: Any) -> Task:
    return Task("mine", Case(**{"m": 16, "n": 16, "k": 16, "dtype": FP32, **fields}))


def test_a_problem_is_tuned_verified_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    register(FakeKernel("fake.other", tiles=(1, 2)))
    timed = task(m=20, layout="nt", epilogue="silu", bias=True)
    (document,) = measure(monkeypatch, timed, times=(30, 10, 33, 60, 5), kernels=True)
    columns = ["torch", "tmm", "torch again", "kernel blas", "kernel fake.other"]
    assert list(document["times"]) == columns
    assert document["times"]["tmm"]["median_us"] == pytest.approx(10)
    assert document["times"]["tmm"]["p75_us"] > 10 > document["times"]["tmm"]["p25_us"]
    assert document["ratio"] == pytest.approx(3)
    assert document["noise"] == pytest.approx(30 / 33)
    assert document["flops"] == 2 * 20 * 16 * 16
    assert document["origin"] == "cache"  # of the record just made, of this very M
    assert 0 < document["error"] <= document["tolerance"]
    assert document["kernel_configs"]["fake.other"]["tile"] in (1, 2)
    assert Case.from_json(document["case"]) == timed.case
    assert json.loads(json.dumps(document)) == document


def test_without_tuning_the_choice_equals_a_calls_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(FakeKernel("fake.other"))
    (document,) = measure(monkeypatch, task(), times=(1, 1, 1), tune=False)
    assert (document["kernel"], document["origin"]) == ("blas", "fallback")
    assert document["tuning_seconds"] is None
    assert dispatch.default_dispatcher().store.misses() == []


def test_a_record_answers_for_its_problem_and_without_records_none_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(FakeKernel("fake.other"))
    measured: list[bool] = []
    steps = Tuner.steps

    def watched(self: Tuner, key: Any, able: Any, settings: Any, kept: Any, **more: Any) -> Any:
        record = yield from steps(self, key, able, settings, kept, **more)
        measured.append(record is not kept)
        return record

    monkeypatch.setattr(Tuner, "steps", watched)
    monkeypatch.setattr(runner.exhaustive, "search", lambda *_: {})
    for records, anew in ((True, True), (True, False), (False, True)):
        measured.clear()
        (document,) = measure(monkeypatch, task(), times=(1, 1, 1), records=records)
        assert document["origin"] == "cache"
        assert measured == [anew]


def test_a_wrong_answer_shows_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_row_unwritten(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[-1] = 0
        return out

    register(FakeKernel("fake.liar", spoil=last_row_unwritten))
    monkeypatch.setenv("TMM_KERNEL", "fake.liar")
    monkeypatch.setenv("TMM_VERIFY", "0")  # else it is refused
    (document,) = measure(monkeypatch, task(), times=(1, 1, 1), tune=False)
    assert document["kernel"] == "fake.liar"
    assert document["error"] > 10 * document["tolerance"]


def test_a_column_that_raises_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal memory access")

    register(FakeKernel("fake.fallen", spoil=fall))
    (document,) = measure(monkeypatch, task(), times=(1, 1, 1, 1), kernels=True, tune=False)
    assert list(document["times"]) == ["torch", "tmm", "torch again", "kernel blas"]
    assert document["not_timed"] == {"fake.fallen": "RuntimeError: illegal memory access"}


def test_one_failing_problem_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = (task(epilogue="silo"), task())
    failed, measured = measure(monkeypatch, *tasks, times=(1, 1, 1))
    assert failed["failed"].startswith("UnknownNameError: unknown epilogue 'silo'")
    assert measured["ratio"] == 1


@pytest.mark.parametrize("scales", ["", "tensor", "row"])
@pytest.mark.parametrize("epilogue", ["", "gelu_tanh", "swiglu", "clamped_swiglu"])
def test_the_eager_code_of_8_bit_operands(scales: str, epilogue: str) -> None:
    case = Case(
        m=16, n=32, k=64, dtype=torch.float8_e4m3fn, layout="nt", scales=scales,
        epilogue=epilogue, bias=True, residual=True,
    )  # fmt: skip
    call = case.call(CPU)
    expected = compare.expected(call.problem(), call.inputs()).numbers
    eager = providers.eager([call])
    try:
        eager(0)
    except RuntimeError as error:
        if "only supports per-tensor scaling" not in str(error):
            raise
        pytest.skip("this torch has no scales of rows on a CPU")
    for run in (eager, providers.tmm([call])):
        result = run(0)
        assert result.dtype is torch.bfloat16
        assert compare.error(result, expected) < 4e-2  # eager rounds after every step


def test_no_problem_is_begun_past_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = runner.run([task(), task(m=32)], CPU, runner.Options(tune=False, seconds=0.01))
    assert next(begun)["case"]["m"] == 16
    past = time.monotonic() - 1
    assert measure(monkeypatch, task(), times=(1, 1, 1), deadline=past) == []


def test_the_last_problem_tunes_in_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []
    real = tmm_core.tune

    def spy(problem: Any, *, budget: float) -> Any:
        budgets.append(budget)
        return real(problem, budget=budget)

    monkeypatch.setattr(tmm_core, "tune", spy)
    soon = time.monotonic() + 3
    measure(monkeypatch, task(), times=(1, 1, 1), deadline=soon, budget=60)
    measure(monkeypatch, task(), times=(1, 1, 1), budget=7)
    assert 1 <= budgets[0] <= 3
    assert budgets[1] == 7


def test_rounds_follow_the_time_there_is() -> None:
    timer = ColumnTimer(1.0)
    runner._samples([lambda copy: time.sleep(0.002)], timer, 1, seconds=0.05)
    runner._samples([lambda copy: None], timer, 1, seconds=10.0)
    runner._samples([lambda copy: time.sleep(0.01)], timer, 1, seconds=0.001)
    first, pilot, some, _, _, most, _, _, least = timer.rounds
    assert first == pilot == 1
    # The pilot sleeps 2 ms: 25 of those fit into 50 ms.
    assert runner.LEAST_ROUNDS <= some <= 25
    assert (most, least) == (runner.MOST_ROUNDS, runner.LEAST_ROUNDS)


def test_a_large_product_is_captured_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio is the median over captures, and the report shows the captures' range."""

    class Timer(HostTimer):
        def forget_captures(self) -> None:
            forgotten.append(1)

    def samples(runs: Any, timer: Any, copies: int, seconds: float) -> list[list[float]]:
        us = [200.0, 200.0 / ratios[len(forgotten)], 200.0]
        return [[each * scale] * (20 - len(forgotten)) for each in us]

    monkeypatch.setattr(runner, "timer_for", lambda device: Timer())
    monkeypatch.setattr(runner, "GraphTimer", Timer)
    monkeypatch.setattr(runner, "_samples", samples)
    ratios, forgotten, scale = [0.9, 1.1, 1.0], list[int](), 1.0
    (document,) = runner.run([task()], CPU, runner.Options(tune=False))
    assert document["ratios"] == [0.9, 1.1, 1.0]
    assert document["ratio"] == pytest.approx(1.0)
    assert document["times"]["torch"]["samples"] == 3 * 18
    assert "1.000×, 0.900 to 1.100 by capture" in report.line(document)
    columns, rows = report.problem_table([document])
    assert rows[0][columns.index("by capture")] == "0.900 to 1.100"
    forgotten, scale = [], 0.1
    (small,) = runner.run([task()], CPU, runner.Options(tune=False))
    assert not forgotten
    assert "ratios" not in small
    assert "by capture" not in report.problem_table([small])[0]
    columns, rows = report.problem_table([small, document])
    place = columns.index("by capture")
    assert [row[place] for row in rows] == ["", "0.900 to 1.100"]


def test_columns_that_do_not_compete_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow column lets the GPU's clock rise, for the ones after it too."""
    register(FakeKernel("fake.other"))
    apart: list[int] = []

    def samples(runs: Any, *_: Any) -> list[list[float]]:
        apart.append(len(runs))
        return [[10.0] * 12] * len(runs)

    monkeypatch.setattr(runner, "_samples", samples)
    (document,) = runner.run([task()], CPU, runner.Options(tune=False, kernels=True))
    assert list(document["times"])[3:] == ["kernel blas", "kernel fake.other"]
    assert apart == [3, 2]


@pytest.mark.parametrize(("us", "clock"), [(1.0, "between"), (1e6, "steady")])
def test_the_other_clocks_are_medians_of_torch_and_tmm(us: float, clock: str) -> None:
    calls: list[int] = []

    class Timer:
        def alone(self, runs: Sequence[Any], rounds: int) -> list[list[float]]:
            return [[us, 3 * us, 2 * us], [us]]

        def steady(self, runs: Sequence[Any], rounds: int, **chain: Any) -> list[list[float]]:
            return [*self.alone(runs, rounds), [5 * us]]

        def measure(self, runs: Sequence[Any], rounds: int, copies: int) -> list[list[float]]:
            for run in runs:
                run(0)
            return self.alone(runs, rounds)

    runs = {"torch": calls.append, "tmm": calls.append, "torch again": calls.append}
    times = {name: {"median_us": us} for name in runs}
    found = runner._other_clocks(runs, Timer(), 2, times, CPU)  # type: ignore[arg-type]
    expected: dict[str, Any] = {name: {"torch": 2 * us, "tmm": us} for name in ("alone", clock)}
    if clock == "steady":
        expected["steady"]["torch again"] = 5 * us
    assert found == expected
    assert len(calls) == (2 if clock == "between" else 0)


def test_a_clock_that_changes_between_rounds_is_in_no_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_us = [100.0, 102.0, 120.0, 121.0, 122.0]
    tmm_us, again = [us / 2 for us in torch_us], [100.0, 101.0, 102.0, 121.0, 122.0]
    monkeypatch.setattr(runner, "_samples", lambda *args: [torch_us, tmm_us, again])
    (document,) = runner.run([task()], CPU, runner.Options(tune=False))
    assert document["ratio"] == pytest.approx(2.0)
    assert document["noise"] == pytest.approx(1.0)


def test_the_precision_of_fp32_is_the_cases_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = providers.eager

    def spy(calls: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return real(calls)

    monkeypatch.setattr(providers, "eager", spy)
    measure(monkeypatch, task(tf32=True), task(), times=(1, 1, 1), tune=False)
    unchanged = torch.backends.cuda.matmul.fp32_precision
    assert seen == ["tf32", "tf32", unchanged, unchanged]


# -- results -----------------------------------------------------------------------------


def document(m: int, ratio: float, suite: str = "square", **more: Any) -> dict[str, Any]:
    """A measured problem on which torch takes 100 µs."""
    times = {"torch": 100.0, "tmm": 100.0 / ratio, "torch again": 101.0}
    case = Case(m=m, n=m, k=m).to_json()
    measured = {
        "kind": "problem", "suite": suite, "case": case, "problem": "…", "ratio": ratio,
        "noise": 100 / 101, "flops": 2 * m**3, "bytes": 6 * m**2, "kernel": "triton.best",
        "config": {"BLOCK_M": 64}, "origin": "cache", "error": 1e-3,
        "times": {
            name: {"median_us": us, "p25_us": us - 1, "p75_us": us + 1, "samples": 50}
            for name, us in times.items()
        },
    }  # fmt: skip
    return {**measured, **more}


def failure(m: int) -> dict[str, Any]:
    case = Case(m=m, n=m, k=m).to_json()
    return {"kind": "problem", "suite": "square", "case": case, "failed": "OSError: gone"}


def test_results_survive_a_killed_run_and_merge_with_the_next(tmp_path: Path) -> None:
    writer = results.Writer(tmp_path, "first")
    for each in (document(64, 1.0), document(128, 1.1), document(256, 1.2)):
        writer.append(each)
    assert writer.path is not None
    torn = writer.path.read_text()
    writer.path.write_text(torn[: -len(torn.splitlines()[-1]) // 2])
    later = tmp_path / "99991231T000000-second.jsonl"
    later.write_text("".join(json.dumps(d) + "\n" for d in (document(64, 2.0), failure(128))))
    merged = Results.read([tmp_path])
    # Measured again: the later counts. Failed later: the measurement still does.
    assert [(d["case"]["m"], d["ratio"]) for d in merged.problems] == [(64, 2.0), (128, 1.1)]


def test_a_last_line_may_end_within_a_character(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    whole = json.dumps(document(64, 1.0)).encode() + b"\n"
    file.write_bytes(whole + '{"kind": "×'.encode()[:-1])
    assert [d["case"]["m"] for d in Results.read([file]).problems] == [64]


@pytest.mark.parametrize(
    "text",
    ["[]", "poem", "[" * 100_000, '{"kind": "poem"}', '"{', "\x00"],
    ids=["list", "prose", "deep", "of another kind", "text", "binary"],
)
def test_a_single_line_that_is_not_a_result_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a line is not the torn last line of a killed run."""
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    assert main(["bench", "--from", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tmm: no results: ")


@pytest.mark.parametrize("what", ["an empty file", "an empty folder", "a torn line alone"])
def test_nothing_to_show_is_reported(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path if "folder" in what else tmp_path / "some.jsonl"
    if path != tmp_path:
        path.write_text("" if "empty" in what else '{"kind": ')
    assert main(["bench", "--from", str(path)]) == 2
    assert capsys.readouterr().err == f"tmm: no results in {path}\n"


def test_a_line_that_is_not_a_result_is_refused_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps(document(64, 1.0)) + '\n{"kind": "poem"}\n')
    with pytest.raises(ValueError, match=r"some\.jsonl:2: not a result"):
        Results.read([file])


# -- report and plots --------------------------------------------------------------------


def test_the_summary_is_of_ratios_by_class_and_dtype() -> None:
    documents = [document(64, 0.5), document(128, 2.0), document(256, 8.0), failure(512)]
    rows = report.summaries(Results.of([*documents, document(64, 1.0, suite="decode")]))
    summary, other = (dict(zip(report.SUMMARY_COLUMNS, row, strict=True)) for row in rows)
    assert summary == {
        "class": "square", "dtype": "bfloat16", "problems": "3", "geomean": "2.000×",
        "worst": "0.500×", "worst problem": "64×64×64 bfloat16 nn", "best": "8.000×",
        "< 0.99×": "1", "±": "1.0%", "failed": "1",
    }  # fmt: skip
    assert (other["class"], other["< 0.99×"]) == ("decode", "0")
    (nothing,) = report.summaries(Results.of([failure(512)]))
    assert nothing == ("square", "bfloat16", "0", "", "", "", "", "0", "", "1")


def test_the_report_has_a_row_per_problem_with_its_columns() -> None:
    kernels = {"kernel triton.naive": {"median_us": 400.0}, "inductor": {"median_us": 60.0}}
    one = document(4096, 2.0)
    one["times"] |= kernels
    text = report.markdown(Results.of([one, document(64, 1.0), failure(512)]))
    header, _, first, second = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index("| problem |") :].splitlines()[:4]
    )
    row = dict(zip(header, first, strict=True))
    assert row["problem"] == "4096×4096×4096 bfloat16 nn"
    assert row["torch µs"] == "100.0 ±1.0"
    assert row["tmm µs"] == "50.0 ±1.0"
    assert row["ratio"] == "2.000×"
    assert row["TFLOPS"] == f"{2 * 4096**3 / 50e-6 / 1e12:.1f}"
    assert row["GB/s"] == f"{6 * 4096**2 / 50e-6 / 1e9:.0f}"
    assert (row["inductor µs"], row["inductor / tmm"]) == ("60.0", "1.200×")
    assert row["triton.naive"] == "400.0"
    assert row["kernel"] == "triton.best BLOCK_M=64"
    # A cell without a measurement is blank, not a number.
    assert dict(zip(header, second, strict=True))["inductor µs"] == ""
    assert "- square 512×512×512 bfloat16 nn: failed: OSError: gone" in text


# -- host ---------------------------------------------------------------------------------


def test_host_cost_is_of_the_call_and_not_of_its_neighbour() -> None:
    costs = host.host_us({"slow": lambda: time.sleep(3e-4), "fast": lambda: None}, CPU, repeats=3)
    assert costs["slow"] >= 300
    assert costs["fast"] < 100
    assert gc.isenabled()


def test_host_measures_torch_and_tmm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 3)
    costs = host.measure(CPU)
    assert all(us > 0 for us in costs["us"].values())
    assert {"torch.matmul(x, w)", "tmm.matmul(x, w)", "plan(x, w)"} <= set(costs["us"])
    assert costs["kernels"] == dict.fromkeys(
        ("plain", "silu", "linear+bias"), "blas fused=False halves=False blocks=False"
    )
    # Tuned beforehand, so that a call measures no tuning.
    assert len(list(dispatch.default_dispatcher().store.summaries())) == 3


# -- the command -------------------------------------------------------------------------


def test_bench_writes_the_results_that_it_shows_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    common = ["--dtype", "fp32", "--device", "cpu", "--seconds-per-problem", "0.01"]
    common += ["--epilogue", "silu", "--output", str(out)]
    assert main(["bench", "--shapes", "24x16x32", "8x16x32", *common, "--markdown"]) == 0
    text, notes = capsys.readouterr()
    assert notes.count("A/A") == 2
    assert "| 24×16×32 float32 nn silu |" in text
    assert (out / "report.md").read_text() == text
    (file,) = out.glob("*.jsonl")
    head, *problems = [json.loads(line) for line in file.read_text().splitlines()]
    assert head["environment"]["torch"] == torch.__version__
    assert head["command"][:2] == ["bench", "--shapes"]
    assert [p["case"]["m"] for p in problems] == [24, 8]
    assert all(0 < p["error"] < p["tolerance"] for p in problems)

    more = ["bench", "--shapes", "24x16x32", "4x16x32", *common, "--resume", "--json"]
    assert main(more) == 0
    text, notes = capsys.readouterr()
    assert "1 of 2 problems are measured already" in notes
    assert notes.count("A/A") == 1
    # Everything in the folder is shown.
    assert [p["case"]["m"] for p in json.loads(text)["problems"]] == [24, 8, 4]

    assert main(["bench", "--from", str(out)]) == 0
    (row,) = (r for r in capsys.readouterr().out.splitlines() if r.startswith("shapes"))
    assert row.split()[1:3] == ["float32", "3"]


def test_bench_ends_cleanly_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--suite", "square,decode", "--device", "cpu", "--max-seconds", "1e-9"]
    assert main([*argv, "--json"]) == 0
    text, notes = capsys.readouterr()
    assert json.loads(text)["problems"] == []
    assert "--max-seconds 1e-09 are over: 0 of 92 problems measured" in notes


def test_an_interrupted_bench_reports_its_results_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = providers.eager

    def interrupt(calls: Any) -> Any:
        if calls[0].a.shape[0] == 8:
            raise KeyboardInterrupt
        return real(calls)

    monkeypatch.setattr(providers, "eager", interrupt)
    argv = ["bench", "--shapes", "4x8x8", "8x8x8", "--dtype", "fp32", "--device", "cpu"]
    argv += ["--seconds-per-problem", "0.01", "--output", str(tmp_path), "--json"]
    assert main(argv) == 130
    text, notes = capsys.readouterr()
    assert [p["case"]["m"] for p in json.loads(text)["problems"]] == [4]
    assert "interrupted: 1 of 2" in notes


def test_a_failed_problem_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--shapes", "4x8x8", "--epilogue", "silo", "--device", "cpu"]
    assert main(argv) == 1
    assert "failed: UnknownNameError" in capsys.readouterr().err


def test_no_column_always_follows_another() -> None:
    order: list[int] = []
    runs = [lambda copy, i=i: order.append(i) for i in range(4)]  # type: ignore[misc]
    samples = HostTimer().measure(runs, 60)
    assert [len(mine) for mine in samples] == [60] * 4
    rounds = [tuple(order[i : i + 4]) for i in range(0, 240, 4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(set(rounds)) > 12


def test_a_suite_may_include_others(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "few": {"dtypes": ["float32"], "shapes": [[1, 2, 3], [4, 5, 6]]},
        "one": {"dtypes": ["float32"], "shapes": [[7, 8, 9]]},
        "both": {"like": ["few", "one"], "batch_invariant": True},
    }
    monkeypatch.setattr(suites, "shipped", lambda: document)
    tasks = suites.select(["all"])
    assert [task.case for task in tasks[:3]] == [task.case for task in tasks[3:]]
    assert [task.batch_invariant for task in tasks] == [False] * 3 + [True] * 3
    assert [task.suite for task in tasks] == ["few", "few", "one"] + ["both"] * 3


def test_weights_are_multiplied_by_every_number_of_rows() -> None:
    suite = {"dtypes": ["float32"], "weights": [[2, 3], [4, 5]], "rows": [1, 7]}
    sizes = [(t.case.m, t.case.n, t.case.k) for t in suites.expand("x", suite)]
    assert sizes == [(1, 2, 3), (7, 2, 3), (1, 4, 5), (7, 4, 5)]
    tasks = suites.select(["batch_invariant"])
    assert all(task.batch_invariant for task in tasks)
    assert len({(task.case.n, task.case.k) for task in tasks}) == 12
    assert (min(t.case.m for t in tasks), max(t.case.m for t in tasks)) == (1, 8192)


def small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "LARGEST_M", 64)
    monkeypatch.setattr(suites, "WEIGHTS", ((16, 8), (8, 24)))


def test_random_problems_are_fixed_by_their_seed() -> None:
    problems = suites.random_problems(200)
    assert problems == suites.random_problems(200)
    assert all(1 <= each.case.m <= 8192 for each in problems)
    # As many in every octave.
    assert 60 < sum(each.case.m < 90 for each in problems) < 140


def test_regret_compares_the_choice_with_torch_and_the_best_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_problems(monkeypatch)
    register(FakeKernel("fake.a", tiles=(1, 2)))
    tasks = suites.random_problems(6, FP32)
    options = runner.Options(budget=1.0, seconds=0.01)
    documents = list(runner.run(tasks, CPU, options))
    assert [d["case"]["m"] for d in documents] == [each.case.m for each in tasks]
    for point in documents:
        assert "failed" not in point, point
        assert point["best_us"] <= point["us"]
    edges = {entry.record.problem["m"] for entry in dispatch.default_dispatcher().store.summaries()}
    assert edges == {bucket_edge(each.case.m) for each in tasks}
    text = report.markdown(Results.of(documents))
    assert "## random M, weight and epilogue" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| 1…8192 |"))
    assert row.split("|")[2].strip() == "6"


def test_bench_measures_regret_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_problems(monkeypatch)
    arguments = ["bench", "--regret", "3", "--device", "cpu", "--dtype", "fp32", "--budget", "1"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    assert "| 1…8192 | 3 |" in (tmp_path / "report.md").read_text()
    # Also where no file is kept of it.
    capsys.readouterr()
    assert main(arguments) == 0
    assert "1…8192" in capsys.readouterr().out
    # A later run measures those that are missing.
    arguments[2] = "4"
    assert main([*arguments, "--output", str(tmp_path), "--resume"]) == 0
    assert "| 1…8192 | 4 |" in (tmp_path / "report.md").read_text()
    lines = "".join(file.read_text() for file in tmp_path.glob("*.jsonl")).splitlines()
    found = map(json.loads, lines)
    assert sum(document["kind"] == "regret" for document in found) == 4
    assert main(["bench", "--regret", "many", "--device", "cpu"]) == 2


def test_batch_invariant_mode_is_measured_with_every_column() -> None:
    register(FakeKernel("fake.firm", traits=tmm_core.Traits(batch_invariant=True), estimate=9.0))
    task = Task("batch_invariant", Case(m=4, n=16, k=16, dtype=FP32), batch_invariant=True)
    options = runner.Options(kernels=True, budget=1.0, seconds=0.01)
    (document,) = runner.run([task], CPU, options)
    assert "failed" not in document, document
    assert document["kernel"] == "fake.firm"
    assert {"torch", "tmm", "kernel fake.firm"} <= set(document["times"])
    assert "kernel blas" not in document["times"]
