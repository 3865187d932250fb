"""The `tmm` command: its output and its stream, its files, and its exit status."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tmm_cache
import torch
from fakes import FakeKernel, plugin, register
from hypothesis import HealthCheck, given
from hypothesis import settings as fuzzed
from hypothesis import strategies as st
from tmm_base import tmm
from tmm_base.console import print_json
from tmm_cache import CacheStore

import tmm_core
from tmm_core import Epilogue, Traits, dispatch, settings
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.spec.device import fingerprint
from tmm_core.tools import cli
from tmm_core.tools.cli import main
from tmm_core.tools.commands import doctor, variables

CPU = ("--device", "cpu")


pytestmark = pytest.mark.usefixtures("blas_alone")


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def records() -> list[Any]:
    return [entry.record for entry in CacheStore().summaries()]


# -- the command itself --------------------------------------------------------------------


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.metadata.version("tmm-core") == tmm_core.__version__
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tmm {tmm_core.__version__}\n"


@pytest.mark.parametrize("argv", [None, ["doctor", "--json"]])
def test_a_command_knows_its_arguments(
    argv: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The given arguments, or else the process's: a benchmark notes them."""
    found: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["tmm", "doctor"])
    monkeypatch.setattr(doctor, "run", lambda options: found.append(options.argv) or 0)
    assert main(argv) == 0
    assert found == [argv or ["doctor"]]


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare, err = capsys.readouterr()
    assert main(["--help"]) == 0
    assert bare == capsys.readouterr().out
    assert bare.startswith("usage: tmm ")
    assert not err


def test_every_command_has_a_module_and_the_line_of_help() -> None:
    for name, text in tmm.COMMANDS.items():
        module = importlib.import_module(f"tmm_core.tools.commands.{name.replace('-', '_')}")
        assert callable(module.run)
        assert not text.endswith(".")
        assert f"\n{text[0].upper()}{text[1:]}.\n" in tmm.parsers()[1][name].format_help()


# -- kernels -----------------------------------------------------------------------------


def test_kernels_lists_used_and_unused_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {info["name"]: info for info in run_json(capsys, "kernels")}
    version = dispatch.default_dispatcher().registry.kernel("blas").version
    assert listed["blas"]["version"] == version
    assert listed["blas"]["distribution"] == "tmm-core"
    assert listed["blas"]["disabled"] is None
    assert listed["blas"]["traits"]["capture_safe"] is True
    assert listed["triton.*"]["disabled"] == "not in TMM_PLUGINS"

    assert main(["kernels"]) == 0
    rows = capsys.readouterr().out.splitlines()
    (blas,) = (row for row in rows if row.startswith("blas "))
    assert blas.split()[1:5] == [version, "blas", "tmm-core", tmm_core.__version__]
    assert " ".join(blas.split()[5:]) == "deterministic, capture-safe"
    assert not rows[rows.index(blas) + 1].startswith(" ")  # nothing against it
    (triton,) = (number for number, row in enumerate(rows) if row.startswith("triton.* "))
    assert rows[triton + 1] == "     not used: not in TMM_PLUGINS"
    assert max(map(len, rows)) <= 100


class _Broken:
    name, value = "broken", "no_such_module"
    dist = None

    def load(self) -> Any:
        raise ImportError("no module named nvcc_magic")


@pytest.fixture
def broken(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin is installed that cannot be imported."""
    monkeypatch.setenv("TMM_PLUGINS", "blas,broken")
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [*real(group=group), *([_Broken()] if group == "tmm_core" else [])],
    )


@pytest.mark.usefixtures("broken")
def test_a_broken_plugin_is_listed_and_noted_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    out, err = capsys.readouterr()
    assert "not used: import failed: ImportError: no module named nvcc_magic" in out
    assert err.count("nvcc_magic") == 1
    assert err.startswith("tmm: plugin 'broken' is not used")


# -- explain -----------------------------------------------------------------------------


def test_explain_uses_the_problem_that_the_options_describe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    register(FakeKernel("fake.shy", against=lambda problem: ["not today"]))
    options = ("--dtype", "fp16", "--layout", "nt", "--epilogue", "bias+silu+residual")
    doc = run_json(capsys, "explain", "24x40x16", *options, "--out-dtype", "fp32", *CPU)
    x, w = torch.empty(24, 16, dtype=torch.half), torch.empty(40, 16, dtype=torch.half)
    bias, residual = torch.empty(40, dtype=torch.half), torch.empty(24, 40)
    instance = tmm_core.problem(
        x, w.t(), bias=bias, residual=residual, epilogue="silu", out_dtype=torch.float32
    )
    assert doc["problem"] == instance.to_json()
    assert doc["kernel"] == "blas"
    assert doc["rejected"]["fake.shy"] == ["not today"]


def test_explain_takes_batches_and_gated_widths(capsys: pytest.CaptureFixture[str]) -> None:
    doc = run_json(capsys, "explain", "3x8x16x32", "--layout", "tn", *CPU)
    sizes = {name: doc["problem"][name] for name in ("batch", "m", "n", "k")}
    assert sizes == {"batch": 3, "m": 8, "n": 16, "k": 32}
    assert (doc["problem"]["a"]["layout"], doc["problem"]["b"]["layout"]) == ("col", "row")
    doc = run_json(capsys, "explain", "8x16x32", "--epilogue", "swiglu", *CPU)
    assert (doc["problem"]["n"], doc["problem"]["epilogue"]) == (16, "swiglu")


def test_explain_prints_the_choice_and_the_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    register(FakeKernel("fake.picky", against=lambda problem: ["only on Sundays"]))
    assert main(["explain", "64x64x64", *CPU]) == 0
    out = capsys.readouterr().out
    assert "problem   64×64×64 bfloat16 nn" in out
    assert "chosen    blas fused=False halves=False" in out
    assert "rejected  fake.picky: only on Sundays" in out


#: A plugin's, with a parameter.
SHIFT = Epilogue("shift", lambda z, by=2: z + by)


@pytest.mark.parametrize("text", ["shift", "shift(3)", "gelu_tanh+shift", "bias+shift+residual"])
def test_a_plugins_epilogue_works_in_every_command(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch.default_dispatcher().registry.register(plugin(epilogues=[SHIFT]), "fakes")
    asked = ("8x16x32", "--dtype", "fp32", "--epilogue", text, *CPU)
    key = run_json(capsys, "explain", *asked)["problem"]["epilogue"]
    assert SHIFT.with_parameters(*([3] if "3" in text else [])).key in key
    (tuned,) = run_json(capsys, "tune", *asked)
    assert (tuned["status"], tuned["key"]["epilogue"]) == ("tuned", key)
    bench = ("bench", "--seconds-per-problem", "0.01", "--shapes", *asked)
    (measured,) = run_json(capsys, *bench)["problems"]
    assert "times" in measured, measured
    (verified,) = run_json(capsys, "verify", *CPU)
    assert verified["problem"]["epilogue"] == key
    # And as the documents of records and misses have it.
    with settings.override(on_cache_miss="heuristic", deterministic=True):
        x, w = torch.randn(5, 32), torch.randn(32, 16)
        tmm_core.matmul(x, w, epilogue=text.replace("bias+", "").replace("+residual", ""))
    assert main(["tune", "--misses", *CPU]) == 0
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["explain", "64x64"], "accepted is MxNxK or BxMxNxK"),
        (["explain", "64x64x-1"], "accepted is MxNxK or BxMxNxK"),
        (["tune", "8x8x8", "64x-1x64", *CPU], "accepted is MxNxK or BxMxNxK"),
        (["bench", "--shapes", "8x8x8", "64xx64", *CPU], "accepted is MxNxK or BxMxNxK"),
        (["bench", "--squares", "8:4:2", *CPU], "the last size is below the first"),
        (["bench", "--sweep", "GROUP_M", *CPU], "accepted is FIELD=VALUE"),
        (["bench", "--seconds-per-problem", "0", *CPU], "found 0, accepted is a number above 0"),
        (["bench", "--max-seconds", "nan", *CPU], "found nan, accepted is a number above 0"),
        (["explain", "8x8x8", "--groups", "0", *CPU], "found 0, accepted is a whole number"),
        (["explain", "8x8x8", "--out-dtype", "bf17", *CPU], "unknown dtype 'bf17'; known: "),
        (["explain", "8x8x8", "--epilogue", "silo", *CPU], "did you mean 'silu'"),
        (["explain", "8x8x8", "--dtype", "bf17"], "unknown dtype 'bf17'; known: "),
        (["explain", "8x8x8", "--epilogue", "silu+residual+bias"], "bias first, residual last"),
        (["explain", "8x8x8", "--device", "abacus"], "--device abacus"),
        (["explain", "8x8x8", "--device", "meta"], "--device meta: kernels run on cpu and cuda"),
        (["tune", "8x8x8", "--device", "mps"], "--device mps: kernels run on cpu and cuda"),
        (["verify", "--device", "xpu:0"], "--device xpu:0: kernels run on cpu and cuda"),
        (["tune", *CPU], "give shapes"),
        (["tune", "--suite", "round", *CPU], "unknown suite round"),
        (["tune", "--suite", "decode", "--dtype", "fp16", *CPU], "no problem of decode has dtype"),
        (["tune", "--misses", "--layout", "nt", *CPU], "--layout: on which problems?"),
        (["tune", "--suite", "decode", "--epilogue", "silu", *CPU], "--epilogue: on which"),
        (["tune", "8x8x8", "--budget", "soon", *CPU], "found soon, accepted is a number above 0"),
        (["bench", "--tf32", "--groups", "2", "--suite", "decode", *CPU], "--tf32, --groups: on"),
        (["bench", "--quick", "--scales", "row", *CPU], "--scales: on which problems?"),
        (["bench", "--quick", "--dtype", "fp16", *CPU], "--quick chooses its problems"),
        (["bench", "--regret", "0", *CPU], "accepted is a whole number above 0"),
        (["bench", "--resume", *CPU], "--resume needs --output"),
        (["bench", "--limit", "0", *CPU], "found 0, accepted is a whole number above 0"),
        (["bench", "--from", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["dance"], "invalid choice"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "8x8x8", "--device", "cuda"]) == 2
    assert "sees no GPU" in capsys.readouterr().err


# -- tune --------------------------------------------------------------------------------


def unfolded(printed: str) -> list[str]:
    """The lines of `tmm tune`, one for each problem; long ones are folded and indented."""
    return printed.replace("\n      ", " ").splitlines()


def test_tune_saves_a_record_of_the_very_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "48x32x16", "100x32x16", "--dtype", "fp32", *CPU]) == 0
    printed = capsys.readouterr().out
    first, second = unfolded(printed)
    config = "fused=False halves=False blocks=False"
    assert first.startswith(f"[1/2] 48×32×16 float32 nn  blas {config}  ")
    assert "1.00× blas" in second
    assert max(map(len, printed.splitlines())) <= 100
    # 100 is no bucket's edge: the requested size itself is on record.
    assert sorted(record.problem["m"] for record in records()) == [48, 100]
    assert all(record.best.error is not None for record in records())


def test_tune_keeps_existing_records_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("tune", "32x32x32", "--dtype", "fp32", *CPU)
    assert run_json(capsys, *argv)[0]["status"] == "tuned"
    (first,) = records()
    (again,) = run_json(capsys, *argv)
    assert again["status"] == "on record"
    assert again["median_us"] == first.best.median_us
    assert again["key"] == first.problem
    assert records() == [first]
    assert run_json(capsys, *argv, "--force")[0]["status"] == "tuned"
    assert records() != [first]


def test_tune_compiles_for_the_next_problem_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    before = torch.backends.cuda.matmul.fp32_precision

    def prepare(self: Any, problem: Any, settings: Any, force: bool) -> None:
        order.append(f"prepare {problem.m} {torch.backends.cuda.matmul.fp32_precision} {force}")
        raise RuntimeError("costs nothing")

    monkeypatch.setattr(Dispatcher, "prepare", prepare)
    monkeypatch.setattr(tmm_core, "tune", lambda problem, **_: order.append(f"tune {problem.m}"))
    shapes = ["16x16x16", "24x16x16"]
    main(["tune", *shapes, "--dtype", "fp32", "--tf32", *CPU])
    assert order == ["prepare 24 tf32 False", "tune 16", "tune 24"]
    order.clear()
    main(["tune", *shapes, "--dtype", "fp32", "--force", *CPU])
    assert order == [f"prepare 24 {before} True", "tune 16", "tune 24"]


def test_one_failing_problem_costs_the_status_and_no_other_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = tmm_core.problem(torch.empty(16, 16), torch.empty(16, 16)).to_json()
    store, here = dispatch.default_dispatcher().store, fingerprint(torch.device("cpu"))
    for changes in ({"epilogue": "silo"}, {"m": 24}):
        store.log_miss(here.gpu, here.environment, {**good, **changes})
    assert main(["tune", "--misses", *CPU]) == 1
    first, second = unfolded(capsys.readouterr().out)
    assert first.startswith("[1/2] 16x16x16 float32 row x row silo  failed: UnknownNameError")
    assert second.startswith("[2/2] 24×16×16 float32 nn  blas")
    assert [record.problem["m"] for record in records()] == [24]


def test_tune_measures_problems_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "8x16x32", "2x8x8x8", "--dtype", "fp32", "--layout", "nt", *CPU]) == 0
    scaled = ("--dtype", "e4m3", "--layout", "nt", "--scales", "row")
    assert main(["tune", "16x16x16", *scaled, *CPU]) == 0
    out = capsys.readouterr().out
    assert "8×16×32 float32 nt" in out
    assert "2×8×8×8 float32 nt" in out
    assert "16×16×16 float8_e4m3fn→bfloat16 nt scales row·row" in out
    assert len(records()) == 3
    kept = [r.problem for r in records() if "scale" in r.problem["a"]]
    assert [(doc["m"], doc["a"]["scale"], doc["b"]["scale"]) for doc in kept] == [
        (16, "row", "row")
    ]


def test_scales_are_for_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "16x16x16", "--scales", "row", *CPU]) == 2
    assert "--scales row needs --dtype e4m3 or e5m2" in capsys.readouterr().err
    assert main(["explain", "16x16x32", "--dtype", "e5m2", "--scales", "tensor", *CPU]) == 0
    shown = capsys.readouterr().out
    assert "16×16×32 float8_e5m2→bfloat16 nn scales tensor·tensor" in shown


def test_an_interrupted_tune_keeps_its_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tmm_core.tune

    def interrupted(problem: Any, **options: Any) -> Any:
        if problem.m == 24:
            raise KeyboardInterrupt
        return real(problem, **options)

    monkeypatch.setattr(tmm_core, "tune", interrupted)
    argv = ["tune", "16x16x16", "24x16x16", "32x16x16", "--dtype", "fp32", *CPU]
    assert main(argv) == 130
    out, err = capsys.readouterr()
    assert len(unfolded(out)) == 1
    assert "interrupted; 1 of 3 are done" in err
    assert [record.problem["m"] for record in records()] == [16]


def test_tune_allows_tf32_where_the_problem_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        tmm_core, "tune", lambda *_, **__: seen.append(torch.backends.cuda.matmul.fp32_precision)
    )
    before = torch.backends.cuda.matmul.fp32_precision
    main(["tune", "16x16x16", "--dtype", "fp32", "--tf32", *CPU])
    main(["tune", "16x16x16", "--dtype", "fp32", *CPU])
    assert seen == ["tf32", before]
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_tune_counts_tried_and_wrong_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = FakeKernel("fake.wrong", tiles=(1, 2), spoil=lambda out: out + 1)
    lame = FakeKernel("fake.lame", bind_error=OSError("no"))
    register(wrong, lame, FakeKernel("fake.without", tiles=()))
    assert main(["tune", "16x16x16", "--dtype", "fp32", *CPU]) == 0
    [line] = unfolded(capsys.readouterr().out)
    assert line.endswith("4 tried, 2 wrong, 1 failed)")


def test_options_describe_grouped_products(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--groups", "3", "--dtype", "fp32", *CPU)
    for ragged, *shapes in (("m", (24, 16), (3, 16, 8)), ("k", (24, 16), (16, 8)),
                            ("n", (3, 24, 16), (16, 8))):  # fmt: skip
        a, b = map(torch.empty, shapes)
        problem = tmm_core.problem(a, b, offs=torch.zeros(3, dtype=torch.int32))
        doc = run_json(capsys, "explain", "24x8x16", "--ragged", ragged, *options)
        assert doc["problem"] == problem.to_json()
        assert doc["problem"]["groups"] == {"count": 3, "ragged": ragged}
        scales = {"m": ((24,), (3, 8)), "k": ((3, 24), (3, 8)), "n": ((3, 24), (8,))}[ragged]
        of_a, of_b = map(torch.ones, scales)
        a, b = (t.to(torch.float8_e4m3fn) for t in (a, b))
        problem = tmm_core.problem(
            a, b, offs=torch.zeros(3, dtype=torch.int32), scale_a=of_a, scale_b=of_b
        )
        eight = ("--dtype", "e4m3", "--scales", "row")
        doc = run_json(capsys, "explain", "24x8x16", "--ragged", ragged, *options, *eight)
        assert doc["problem"] == problem.to_json()
    assert main(["explain", "24x8x16", "--ragged", "n", *CPU]) == 2
    assert main(["explain", "2x24x8x16", *options]) == 2
    err = capsys.readouterr().err
    assert "--ragged n needs --groups" in err
    assert "--groups takes no batch" in err


# -- misses ------------------------------------------------------------------------------


def test_a_miss_of_a_grouped_product(capsys: pytest.CaptureFixture[str]) -> None:
    ends = torch.tensor([3, 60], dtype=torch.int32)
    with settings.override(deterministic=True, disable="triton.*"):
        register(FakeKernel("fake.other", traits=Traits(deterministic=True)))
        tmm_core.grouped_matmul(torch.randn(60, 16), torch.randn(2, 16, 8), offs=ends)
    assert main(["misses"]) == 0
    assert "64x8x16 in 2 groups along m float32" in capsys.readouterr().out
    assert main(["tune", "--misses", *CPU]) == 0
    assert "2 groups along m" in capsys.readouterr().out
    (record,) = records()
    assert record.problem["groups"] == {"count": 2, "ragged": "m"}
    assert main(["tune", "--misses", *CPU]) == 0
    assert "nothing to tune" in capsys.readouterr().err


def test_a_miss_is_listed_until_it_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    register(FakeKernel("fake.other", traits=Traits(deterministic=True)))
    with settings.override(deterministic=True):  # a timing must not decide
        tmm_core.matmul(torch.randn(60, 16), torch.randn(16, 8))
    (miss,) = run_json(capsys, "misses")
    # The bucket's problem is logged, because its record serves the next call.
    assert miss["problem"]["m"] == 64
    assert miss["gpu"] == fingerprint(torch.device("cpu")).gpu

    assert main(["tune", "--misses", *CPU]) == 0
    assert "64×8×16 float32 nn" in capsys.readouterr().out
    assert [record.problem["m"] for record in records()] == [64]

    assert main(["misses"]) == 0
    assert "no misses in" in capsys.readouterr().err
    assert run_json(capsys, "misses") == []
    assert main(["tune", "--misses", *CPU]) == 0
    assert "nothing to tune" in capsys.readouterr().err


def test_squares_may_be_a_single_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._squares("8:8:4") == [8]
    assert cli._squares("8:15:4") == [8, 12]
    assert cli._squares("8:16:4") == [8, 12, 16]
    assert main(["bench", "--squares", "8:7:1"]) == 2
    assert "the last size is below the first" in capsys.readouterr().err


# -- doctor ------------------------------------------------------------------------------


def findings(capsys: pytest.CaptureFixture[str], status: int) -> list[dict[str, str]]:
    assert main(["doctor", "--json", *CPU]) == status
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    return found


def problems(found: list[dict[str, str]]) -> list[dict[str, str]]:
    return [finding for finding in found if finding["state"] == "problem"]


@pytest.fixture(autouse=True)
def no_stray_gpu_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch on a GPU machine is a problem, and not the one under test."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def test_doctor_is_content_with_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(FakeKernel("fake.shy", against=lambda problem: ["not today"]))
    found = findings(capsys, 0)
    texts = {finding["about"]: finding["text"] for finding in found}
    assert torch.__version__ in texts["torch"]
    assert texts["cache"].startswith(str(CacheStore().root))
    assert texts["records"].startswith("0 records for cpu")
    messages = [f["text"] for f in found if f["about"] == "kernel"]
    assert "blas runs and is correct" in messages
    assert any(text.startswith("fake.shy declines: not today") for text in messages)
    assert main(["doctor", *CPU]) == 0
    assert f"  torch             {torch.__version__}" in capsys.readouterr().out


def test_doctor_names_a_misspelt_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_KERNL", "blas")
    (finding,) = problems(findings(capsys, 1))
    assert finding["text"] == "TMM_KERNL is not read by tmm"
    assert finding["advice"] == "did you mean TMM_KERNEL?"


def test_doctor_names_a_bad_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_TUNE_BUDGET", "soon")
    found = findings(capsys, 1)
    (finding,) = problems(found)
    assert finding["text"].startswith("TMM_TUNE_BUDGET='soon'")
    assert {"kernel", "cache"} <= {f["about"] for f in found}  # it went on


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TMM_CACHE_MAX_SIZE", "lots", "accepted is a size like 64M"),
        ("TMM_CACHE_MAX_SIZE", "-1", "accepted is a size like 64M"),
        ("TMM_CACHE_SHARED", "yes", "accepted is '1' or '0'"),
        ("TMM_SHIPPED_RECORDS", "no", "accepted is '1' or '0'"),
        ("TMM_CACHE_PATH", "~nobody-here/records", "unknown user"),
        ("TMM_LOCK_FILE", __file__, "is not a file of records"),
        ("TMM_ON_CACHE_MISS", "never", "on_cache_miss must be"),
        ("TMM_KERNEL", "triton.nave", "'triton.nave': plugin 'triton' (tmm-core"),
        (
            "TMM_DISABLE",
            "blass,fp8",
            "unknown kernel 'blass'; did you mean 'blas'?; unknown",
        ),
        ("TMM_BATCH_INVARIANT", "maybe", "expected 1 or 0"),
        ("TMM_STATIC_WEIGHTS", "2", "expected 1 or 0"),
        ("TMM_TUNE_BUDGET", "inf", "positive seconds"),
        ("TMM_TUNE_MEMORY", "much", "accepted is a size like 64M"),
        ("TMM_PROGRESS", "full", "expected 1 or 0"),
    ],
)
def test_doctor_names_a_variable_with_a_bad_value(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    text: str,
) -> None:
    monkeypatch.setattr(doctor, "_kernels", lambda device: iter(()))  # takes the time
    monkeypatch.setenv(name, value)
    (finding,) = problems(findings(capsys, 1))
    assert finding["about"] == "variable"
    assert finding["text"].startswith(f"{name}={value!r}: ")
    assert text in finding["text"]


def test_doctor_names_every_bad_variable_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TMM_ARITHMETIC", "TMM_CACHE_SHARED", "TMM_PROGRESS", "TMM_REQUIRE_LOCKED")
    for name in (*names, "TMM_UNHEARD_OF", "TMM_TUNE_BUDGET"):
        monkeypatch.setenv(name, "bogus")
    monkeypatch.setenv("TMM_CACHE_MAX_SIZE", "2G")
    monkeypatch.setattr(doctor, "_kernels", lambda device: iter(()))
    named = [f["text"].partition("=")[0] for f in problems(findings(capsys, 1))]
    # Calls refuse an arithmetic that no kernel has, and list the others.
    assert named == sorted([*names[1:], "TMM_TUNE_BUDGET", "TMM_UNHEARD_OF is not read by tmm"])


def test_every_variable_that_the_sources_read_is_known_to_doctor() -> None:
    packages = (Path(tmm_core.__file__).parent, Path(tmm_cache.__file__).parent)
    texts = [path.read_text() for package in packages for path in package.rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"""["'](TMM_[A-Z_]+)["']""", text)}
    assert len(used) >= 19
    registry = dispatch.default_dispatcher().registry
    faults = list(variables.faults(dict.fromkeys(used, ""), registry))
    assert len(faults) == len(used)
    assert not [text for _, text, _ in faults if "not read" in text]


def test_doctor_names_a_cache_that_others_can_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_kernels", lambda device: iter(()))
    root = CacheStore().root
    assert not problems(findings(capsys, 0))
    root.chmod(0o777)
    (finding,) = problems(findings(capsys, 1))
    text = f"{root} can be written by others: records are verified again in each process"
    assert finding["text"] == text
    assert "TMM_CACHE_SHARED=1" in finding["advice"]


def test_doctor_keeps_to_the_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_kernels", lambda device: iter(()))
    monkeypatch.setenv("TMM_DISABLE", "triton.naive," * 20 + "x")
    assert main(["doctor", *CPU]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(" " * 20)]
    assert not [line for line in lines if len(line) > 100 and " " in line[20:]]


def test_doctor_finds_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TMM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TMM_CACHE_PATH", str(tmp_path / "baked"))
    cache, layer = problems(findings(capsys, 1))
    assert "cannot be written" in cache["text"]
    assert "TMM_CACHE_DIR" in cache["advice"]
    assert layer["text"] == f"{tmp_path / 'baked'} is not a readable folder"


def test_doctor_finds_kernels_that_are_wrong_or_fail(capsys: pytest.CaptureFixture[str]) -> None:
    def unwritten(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[-1, -1] = float("nan")
        return out

    register(
        FakeKernel("fake.liar", spoil=unwritten),
        FakeKernel("fake.lame", bind_error=RuntimeError("out of registers")),
        FakeKernel("fake.fine"),
    )
    lame, liar = problems(findings(capsys, 1))
    assert "fake.lame" in lame["text"]
    assert "RuntimeError: out of registers" in lame["text"]
    assert lame["advice"].startswith("disable it with TMM_DISABLE=fake.lame")
    assert "fake.liar" in liar["text"]
    assert "wrong, error nan" in liar["text"]


@pytest.mark.usefixtures("broken")
def test_doctor_finds_a_broken_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = problems(findings(capsys, 1))
    assert "nvcc_magic" in finding["text"]
    assert "TMM_DISABLE_PLUGINS=broken" in finding["advice"]


def test_json_has_neither_nan_nor_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    inf = float("inf")
    print_json({"us": [1.5, inf, float("nan")], "all": {"best": -inf, "text": "Infinity"}})
    out = capsys.readouterr().out
    expected = {"us": [1.5, None, None], "all": {"best": None, "text": "Infinity"}}
    assert json.loads(out, parse_constant=pytest.fail) == expected
    short = ("--seconds-per-problem", "0.01")
    assert main(["bench", "--shapes", "8x8x8", "--dtype", "fp32", "--json", *short, *CPU]) in (0, 1)
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


#: Nothing takes long: measurements are stubbed, since only arguments are under test.
WORDS = [
    *("kernels", "explain", "tune", "bench", "verify", "doctor", "misses", "why", "8x8x8"),
    *("--json", "--device", "cpu", "cuda:9", "--dtype", "fp32", "e4m3", "int8", "--layout", "nt"),
    *("--epilogue", "silu", "softcap(0)", "softcap(nan)", "bias++", "("),
    *("--scales", "row", "--tf32", "--force", "--isolate", "--misses"),
    *("--suite", "decode", "nope", "/dev/null", "/nonexistent", "--budget", "--limit"),
    *("0", "-1", "1e9", "nan", "inf", "9" * 30, "0x0x0", "1x2x3", "1x2x3x4x5", "x", "--", "--help"),
    *("", " ", "\t", "é", "\udcff", "--shapes", "--regret", "--output", "--from", "--version"),
]


@pytest.mark.slow
def test_no_command_line_ends_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tmm_core.tools.commands import bench, doctor, tune

    monkeypatch.chdir(tmp_path)
    for module in (bench, doctor):
        monkeypatch.setattr(module, "run", lambda options: 0)
    monkeypatch.setattr(tune, "_tune", lambda item, options: {"status": "failed", "problem": "",
                                                              "reason": ""})  # fmt: skip

    @fuzzed(max_examples=int(os.environ.get("TMM_FUZZ_EXAMPLES", "60")), deadline=None,
            derandomize=True, database=None, suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.sampled_from(WORDS[:8]), st.lists(st.sampled_from(WORDS), max_size=5))
    def run(command: str, words: list[str]) -> None:
        assert main([command, *words]) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err

    run()


@pytest.mark.parametrize("shape", [f"{2**64}x8x8", f"8x{10**20}x8", f"8x8x{2**70}"])
def test_torchs_message_is_shown_without_its_frames(
    shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", shape, *CPU]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "frame #" not in line
    assert len(line) < 200
    assert main(["tune", shape, *CPU]) == 1
    text = capsys.readouterr().out
    assert "failed: " in text
    assert "frame #" not in text
