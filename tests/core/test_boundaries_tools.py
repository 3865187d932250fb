"""Values at and next to the limits of the commands' input and output."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeConfig, FakeKernel, problem, register
from tmm_base import UsageError
from tmm_cache import CacheStore, CacheWarning, CandidateResult, Miss
from tmm_cache.transport import write_transport

from tmm_core import Operand, Traits, dispatch, settings
from tmm_core.bench import quick, report
from tmm_core.bench.case import Case
from tmm_core.bench.results import Results, identity
from tmm_core.epilogues import parse
from tmm_core.errors import PluginError, SettingsError
from tmm_core.spec import toolchain
from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.tools import cli
from tmm_core.tools.commands import (
    bench,
    doctor,
    doctor_toolchain,
    explain,
    gpus,
    misses,
    new_plugin,
    options,
    tile_order,
    tune,
    variables,
    verify,
    why,
    why_text,
)
from tmm_core.tuning.untried import Noted, Obstacle
from tmm_core.verify.compare import tolerance
from tmm_core.verify.verifier import Verdict

HALF = Operand(torch.float16)
H200 = DeviceFingerprint(
    type="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    sm_count=132,
    shared_memory=227 << 10,
    l2=50 << 20,
    torch="2",
    triton="3",
    cuda="13",
)


# -- options -------------------------------------------------------------------------------


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    options.add_problem(parser)
    return parser.parse_args(arguments)


def test_without_options_a_problem_is_a_bf16_product_of_its_sizes() -> None:
    assert options.cases(parsed(), [(1, 2, 3, 4)]) == [Case(m=2, n=3, k=4)]
    assert options.cases(parsed(), []) == []


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--dtype", "fp16"], {"dtype": "float16"}),
        (["--layout", "tn"], {"layout": "tn"}),
        (["--epilogue", "silu"], {"epilogue": "silu"}),
        (
            ["--epilogue", "bias+silu+residual"],
            {"bias": True, "epilogue": "silu", "residual": True},
        ),
        (["--epilogue", "bias"], {"bias": True}),
        (["--epilogue", "residual"], {"residual": True}),
        (["--out-dtype", "fp32"], {"out_dtype": "float32"}),
        (["--dtype", "e4m3", "--scales", "row"], {"dtype": "float8_e4m3fn", "scales": "row"}),
        (["--dtype", "e5m2", "--scales", "tensor"], {"dtype": "float8_e5m2", "scales": "tensor"}),
        (["--tf32"], {"tf32": True}),
        (["--groups", "4"], {"groups": 4}),
        (["--groups", "4", "--ragged", "k"], {"groups": 4, "ragged": "k"}),
    ],
)
def test_each_option_describes_its_part_of_a_problem(
    arguments: list[str], fields: dict[str, Any]
) -> None:
    (found,) = options.cases(parsed(*arguments), [(1, 32, 64, 128)])
    for name, value in fields.items():
        got = getattr(found, name)
        assert got == value or str(got).removeprefix("torch.") == value, name
    plain = Case(m=32, n=64, k=128).to_json()
    changed = {name for name, value in found.to_json().items() if value != plain.get(name)}
    assert changed <= fields.keys() | {"out_dtype"} | (
        {"ragged", "routing"} if found.groups else set()
    )


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        (["--scales", "row"], (1, 2, 3, 4), "--scales row needs --dtype e4m3 or e5m2"),
        (["--scales", "row", "--dtype", "fp16"], (1, 2, 3, 4), "--scales row needs"),
        (["--ragged", "m"], (1, 2, 3, 4), "--ragged m needs --groups"),
        (["--groups", "2"], (2, 2, 3, 4), "--groups takes no batch"),
    ],
)
def test_options_that_contradict_each_other_are_named(
    arguments: list[str], shape: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        options.cases(parsed(*arguments), [shape])


@pytest.mark.parametrize(
    ("arguments", "shape", "batch"),
    [
        ([], (1, 2, 3, 4), 1),
        ([], (5, 2, 3, 4), 5),
        (["--groups", "2"], (1, 2, 3, 4), 1),
    ],
)
def test_a_shape_on_the_command_line_has_a_batch(
    arguments: list[str], shape: tuple[int, int, int, int], batch: int
) -> None:
    assert [case.batch for case in options.cases(parsed(*arguments), [shape])] == [batch]


@pytest.mark.parametrize("name", ["--groups"])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_a_count_is_a_whole_number_from_one_on(name: str, text: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        parsed(f"{name}={text}")


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "-inf", "soon", ""])
def test_an_option_that_is_not_above_zero_is_refused(text: str) -> None:
    assert options.positive(float, "1e-9") == 1e-9
    assert options.positive(int, "1") == 1
    with pytest.raises(ValueError, match=f"found {text}, accepted is a number above 0"):
        options.positive(float, text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a = 1.5 ", 1.5), ("a=TRUE", True), ("a=false", False), ("a=x=y", "x=y"),
        ("a=", ""), ("a=1e3", 1000.0), ("a=-2", -2),
    ],
)  # fmt: skip
def test_a_field_has_a_value_of_the_kind_it_spells(text: str, value: Any) -> None:
    name, found = options.field(text)
    assert name == "a"
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["", "a", "=1", " = 1"])
def test_a_field_without_a_name_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted is FIELD=VALUE"):
        options.field(text)


def test_an_unknown_device_is_a_usage_error() -> None:
    assert options.device(SimpleNamespace(device="cpu")) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"^--device nonsense: "):
        options.device(SimpleNamespace(device="nonsense"))


@pytest.mark.parametrize(
    ("text", "index"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1), ("cuda:2", None), (None, 1)]
)
def test_a_gpu_is_chosen_by_its_index(
    text: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    arguments: Any = SimpleNamespace(device=text)
    if index is None:
        with pytest.raises(UsageError, match="--device cuda:2: there are 2 GPUs"):
            options.device(arguments)
        assert chosen == []
        return
    assert options.device(arguments) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "x: bad"),
        (KeyError("k"), None),
        (TypeError("no"), "x: no"),
    ],
)
def test_mistakes_in_use_are_reported_with_the_option(error: Exception, text: str | None) -> None:
    def use() -> None:
        with options.usage("x", TypeError):
            raise error

    with pytest.raises(UsageError if text else KeyError) as caught:
        use()
    assert text is None or str(caught.value) == text
    with pytest.raises(UsageError, match=r"^alone$"), options.usage():
        raise ValueError("alone")


# -- lists ---------------------------------------------------------------------------------


def test_lists_are_read_by_their_parts() -> None:
    text = (
        "bench --suite mlp,,attention, --kernel a,b --kernel c --sweep TILE=1,2 "
        "--sweep fast=true,x --config A=1,B=x --squares 512:1300:512 --budget 2"
    )
    given = cli._parser().parse_args(text.split())
    assert given.suite == ["mlp", "attention"]
    assert given.kernel == ["a", "b", "c"]
    assert given.sweep == [("TILE", [1, 2]), ("fast", [True, "x"])]
    assert given.config == {"A": 1, "B": "x"}
    assert given.squares == [512, 1024]
    assert given.budget == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1:2", "accepted is FIRST:LAST:STEP"),
        ("1:2:3:4", "accepted is FIRST:LAST:STEP"),
        ("3:2:1", "the last size is below the first"),
        ("0:2:1", "accepted is a whole number above 0"),
        ("x:2:1", "found x, accepted is a whole number above 0"),
    ],
)
def test_squares_are_three_sizes(
    capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert cli.main(["bench", "--squares", text]) == 2
    assert message in capsys.readouterr().err
    assert cli._parser().parse_args(["bench", "--squares", "2:2:1"]).squares == [2]


def test_a_command_without_arguments_takes_the_processs_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(misses, "run", lambda options: seen.append(options.argv) or 0)
    monkeypatch.setattr("sys.argv", ["tmm", "misses", "--json"])
    assert cli.main() == cli.main(["misses", "--json"]) == 0
    assert seen == [["misses", "--json"]] * 2


# -- GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "capability", "sms", "shared", "l2"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 40),
        ("L40S", "NVIDIA L40S", (8, 9), 142, 99, 96),
        ("4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 72),
        ("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 50),
        ("H200", "NVIDIA H200", (9, 0), 132, 227, 50),
        ("b200", "NVIDIA B200", (10, 0), 148, 227, 126),
    ],
)
def test_gpus_of_data_sheets(
    text: str, name: str, capability: tuple[int, int], sms: int, shared: int, l2: int
) -> None:
    found = gpus.find(CacheStore(), text)
    assert (found.type, found.name, found.capability) == ("cuda", name, capability)
    assert (found.sm_count, found.shared_memory, found.l2) == (sms, shared << 10, l2 << 20)


@pytest.mark.parametrize(
    ("text", "what"), [("nvidia", "several"), ("200", "several"), ("tpu", "none")]
)
def test_an_ambiguous_or_unknown_gpu_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"--gpu {text}: the name of {what} of these: NVIDIA A100"):
        gpus.find(CacheStore(), text)


def saved(store: CacheStore, device: DeviceFingerprint, *sizes: int) -> None:
    from test_tuner import result
    from tmm_cache import TuningRecord

    for m in sizes:
        instance = problem(m=m, device=device)
        record = TuningRecord(
            instance.to_json(), 0, (result("blas", 1.0),), "2026-01-01T00:00:00Z", 1.0
        )
        store.save(device.gpu, device.environment, record)


def test_of_several_environments_that_with_most_records_answers() -> None:
    store = CacheStore()
    older = replace(H200, torch="1")
    saved(store, older, 1, 2)
    saved(store, H200, 1)
    assert gpus.find(store, "h200").torch == "1"
    saved(store, H200, 2, 4)
    found = gpus.find(store, "h200")
    assert (found.torch, found.l2, found.shared_memory) == ("2", 50 << 20, 227 << 10)


def test_records_of_a_cpu_are_of_no_gpu() -> None:
    store = CacheStore()
    saved(store, DEVICE if DEVICE.type == "cpu" else replace(DEVICE, type="cpu"), 1)
    with pytest.raises(UsageError, match="the name of none of these"):
        gpus.find(store, "cpu")


# -- variables ---------------------------------------------------------------------------------


def wrong(environ: dict[str, str]) -> dict[str, str]:
    found = variables.faults(environ, dispatch.default_dispatcher().registry)
    return {name: fault for name, fault, _ in found}


@pytest.mark.parametrize(
    ("name", "good", "bad", "what"),
    [
        ("TMM_KERNEL", "blas", "blass", "kernel 'blass'"),
        ("TMM_DISABLE", "triton.pointwise,blas", "triton.pointwise,x,y", "kernel 'y'"),
        ("TMM_PLUGINS", "blas", "nothing", "plugin 'nothing'"),
        ("TMM_DISABLE_PLUGINS", "blas", "nothing", "plugin 'nothing'"),
    ],
)
def test_names_that_nothing_has_are_found(name: str, good: str, bad: str, what: str) -> None:
    assert wrong({name: good}) == {name: ""}
    assert f"unknown {what}; " in wrong({name: bad})[name]
    assert wrong({name: ""}) == {name: ""}


def test_a_kernel_is_forced_among_kernels_alone() -> None:
    """``triton.pointwise`` may be disabled, but it computes no product. A list names no kernel."""
    for name in ("triton.pointwise", "blas,blas"):
        (fault,) = wrong({"TMM_KERNEL": name}).values()
        assert f"kernel '{name}'" in fault


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("TMM_CACHE_DIR", ["", "/x", "~/x"], ["~nobody-of-that-name/x"]),
        ("TMM_CACHE_PATH", ["", "/x:/y"], ["/x:~nobody-of-that-name/x"]),
        ("TMM_CACHE_MAX_SIZE", ["", "0", "2G"], ["x", "-1"]),
        ("TMM_CACHE_SHARED", ["", "0", "1"], ["yes", "true", "2"]),
        ("TMM_SHIPPED_RECORDS", ["", "0", "1"], ["no", "2"]),
        (
            "TMM_REQUIRE_LOCKED",
            ["", "0", "1", "true", "YES", "on", "false", "No", "off"],
            ["2", "maybe"],
        ),
        ("TMM_LOCK_FILE", ["", "/absent/file"], [__file__]),
    ],
)
def test_variables_are_checked(name: str, accepted: list[str], refused: list[str]) -> None:
    check = variables.CHECKS[name]
    for text in accepted:
        check(text)
    for text in refused:
        with pytest.raises(ValueError):
            check(text)


@pytest.mark.parametrize(
    ("locked", "fails"), [("1", True), ("on", True), ("0", False), ("no", False)]
)
def test_an_absent_lock_file_is_a_mistake_where_it_is_required(
    locked: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", locked)
    check = variables.CHECKS["TMM_LOCK_FILE"]
    if not fails:
        check(str(tmp_path / "absent"))
        return
    with pytest.raises(ValueError, match=r"^there is no such file"):
        check(str(tmp_path / "absent"))


def test_only_variables_of_tmm_are_judged_and_each_with_advice() -> None:
    registry = dispatch.default_dispatcher().registry
    environ = {
        "PATH": "x",
        "TMM_KERNL": "x",
        "TMM_": "y",
        "TMM_ENABLE": "maybe",
        "TMM_QQQQQQQQQQQ": "1",
    }
    found = {n: (w, a) for n, w, a in variables.faults(environ, registry)}
    assert list(found) == ["TMM_", "TMM_ENABLE", "TMM_KERNL", "TMM_QQQQQQQQQQQ"]
    assert found["TMM_KERNL"] == ("TMM_KERNL is not read by tmm", "did you mean TMM_KERNEL?")
    assert found["TMM_QQQQQQQQQQQ"][1].startswith("known: TMM_")
    assert found["TMM_ENABLE"][0].startswith("TMM_ENABLE='maybe': ")
    assert found["TMM_ENABLE"][1] == "correct or unset it"


# -- misses and tune -----------------------------------------------------------------------------


def test_a_miss_in_a_line() -> None:
    instance = problem(m=32, n=64, k=16).to_json()
    assert misses.title(instance) == "32x64x16 float32 row x row"
    assert misses.title(instance | {"epilogue": "silu"}).endswith(" silu")
    assert misses.title({}) == "-x-x- - - x - -"


@pytest.mark.parametrize(("here", "others"), [(2, 0), (1, 3), (0, 1)])
def test_misses_of_other_devices_are_counted(
    here: int, others: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = torch.device("cpu")
    instance = problem(m=32, n=64, k=16).to_json()
    mine = [Miss(fingerprint(cpu).gpu, {}, instance | {"m": m + 1}) for m in range(here)]
    theirs = [Miss("other", {}, instance)] * others
    store = SimpleNamespace(misses=lambda: theirs + mine, load=lambda *_: None)
    found = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(store=store))
    monkeypatch.setattr(tune, "dispatch", found)
    assert len(tune._of_misses(cpu)) == here
    text = f"tmm: {others} of {here + others} misses belong to other devices; tune them there\n"
    assert capsys.readouterr().err == (text if others else "")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "p  k  2.0 µs, 3.00× blas  (1.5 s, 3 tried)"),
        ({"status": "on record"}, "p  k  2.0 µs, 3.00× blas  (on record, 3 tried)"),
        ({"blas_us": None}, "p  k  2.0 µs  (1.5 s, 3 tried)"),
        (
            {"candidates": {"ok": 1, "wrong": 2, "failed": 3, "slow": 4}},
            "p  k  2.0 µs, 3.00× blas  (1.5 s, 10 tried, 2 wrong, 3 failed)",
        ),
        (
            {"untried": {"x": "a\n b" + "c" * 200, "y": "d"}},
            f"p  k  2.0 µs, 3.00× blas  (1.5 s, 3 tried, 2 untried: a b{'c' * 157})",
        ),
        ({"status": "failed", "reason": "why"}, "p  failed: why"),
    ],
)
def test_a_tuning_is_reported_in_one_line(changes: dict[str, Any], line: str) -> None:
    outcome: dict[str, Any] = {
        "problem": "p", "status": "tuned", "kernel": "k", "config": {}, "median_us": 2.0,
        "blas_us": 6.0, "candidates": {"ok": 3}, "seconds": 1.5,
    }  # fmt: skip
    assert tune._line(outcome | changes) == line


# -- the toolchain ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x\nCuda tools, release 12.8, V1\ny", "ptxas, Cuda tools, release 12.8, V1"),
        ("nothing", "ptxas, of unknown version"),
    ],
)
def test_the_assembler_reports_its_release(
    output: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "ptxas", lambda: "ptxas")
    ran = subprocess.CompletedProcess([], 0, output, "")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: ran)
    assert doctor_toolchain._ptxas() == ("toolchain", "ok", message, "")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/absent/ptxas")
    found = doctor_toolchain._ptxas()
    assert found.state == "problem"
    assert found.text == "TRITON_PTXAS_PATH=/absent/ptxas is not there; Triton uses ptxas"


@pytest.mark.parametrize(
    "error",
    [
        OSError("broken"),
        ValueError("null byte"),
        subprocess.TimeoutExpired("ptxas", 20.0),
        subprocess.CalledProcessError(1, "ptxas"),
    ],
)
def test_an_assembler_that_does_not_run_is_a_problem(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **more: Any) -> Any:
        assert more["check"]
        assert more["timeout"] == 20.0
        raise error

    monkeypatch.setattr(toolchain, "ptxas", lambda: "/x/ptxas")
    monkeypatch.setattr(subprocess, "run", fails)
    found = doctor_toolchain._ptxas()
    assert found.state == "problem"
    assert found.text.startswith("/x/ptxas does not run: ")
    monkeypatch.setattr(toolchain, "ptxas", lambda: None)
    assert doctor_toolchain._ptxas().text.startswith("no ptxas: ")


@pytest.mark.parametrize(
    ("compiler", "lacking", "expected"),
    [
        ("/gcc", None, ("ok", "/gcc, /Python.h", "")),
        (
            None,
            "no C compiler",
            ("problem", "no C compiler: Triton kernels decline", "install gcc"),
        ),
        ("/gcc", "no Python.h", ("problem", "no Python.h: Triton kernels", "install python3-dev")),
    ],
)
def test_the_tools_that_build_launchers_are_named(
    compiler: str | None,
    lacking: str | None,
    expected: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "c_compiler", lambda: compiler)
    monkeypatch.setattr(toolchain, "lacking", lambda: lacking)
    monkeypatch.setattr(toolchain, "python_header", lambda: "/Python.h")
    found = doctor_toolchain._compiler()
    assert found.state == expected[0]
    assert found.text.startswith(expected[1])
    assert found.advice.startswith(expected[2])


@pytest.mark.parametrize("state", ["full", "not writable"])
def test_folders_that_cannot_be_used_are_problems(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok = doctor.Finding("toolchain", "ok", "x")
    monkeypatch.setattr(doctor_toolchain, "_compiler", lambda: ok)
    monkeypatch.setattr(doctor_toolchain, "_ptxas", lambda: ok)
    monkeypatch.setattr(toolchain, "folders", lambda: {"cache": "/c", "temporary": "/t"})
    monkeypatch.setattr(toolchain, "usable", lambda f: "yes" if f == "/t" else state)
    monkeypatch.setattr(toolchain, "fingerprint", lambda: "abc")
    found = list(doctor_toolchain.parts(torch.device("cuda")))
    advice = "free some space" if state == "full" else "make it writable"
    assert found[2:] == [
        ("toolchain", "problem", f"cache folder /c is {state}", f"{advice}, or set another"),
        ("toolchain", "ok", "fingerprint abc", ""),
    ]
    assert list(doctor_toolchain.parts(torch.device("cpu"))) == []


def _notes(*kernels: dict[str, Obstacle]) -> Any:
    notes = [
        SimpleNamespace(kernels={(n, "v"): left for n, left in each.items()}) for each in kernels
    ]
    found = SimpleNamespace(untried=SimpleNamespace(of_device=lambda device: notes))
    return SimpleNamespace(default_dispatcher=lambda: found)


def test_untried_kernels_are_reported_with_the_worst_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Obstacle("budget", "late")
    notes = _notes(
        {"a": Obstacle("hung", "it\n hung"), "b": late},
        {"a": Obstacle("passing", "no memory"), "c": Obstacle("alike", "all")},
        {"b": late, "d": late},
    )
    monkeypatch.setattr(doctor_toolchain, "dispatch", notes)
    assert list(doctor_toolchain.untried(torch.device("cpu"))) == [
        (
            "untried",
            "problem",
            "2 kernels are untried for 2 problems: no memory",
            "free memory or space, then tmm tune",
        ),
        (
            "untried",
            "note",
            "the tuning budget ended before some kernels of 1 problems",
            "tmm tune them with a larger --budget",
        ),
    ]
    monkeypatch.setattr(doctor_toolchain, "dispatch", _notes())
    assert list(doctor_toolchain.untried(torch.device("cpu"))) == []


@pytest.mark.parametrize(
    ("causes", "first"),
    [
        (["hung", "toolchain"], "toolchain"),
        (["alike", "passing"], "passing"),
        (["hung", "alike"], "alike"),
        (["hung", "hung"], "hung"),
    ],
)
def test_doctor_names_the_cause_to_repair_first(
    causes: list[Any], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = _notes({cause: Obstacle(cause, f"text of {cause}") for cause in causes})
    monkeypatch.setattr(doctor_toolchain, "dispatch", notes)
    (finding,) = doctor_toolchain.untried(torch.device("cpu"))
    assert finding.text.endswith(f"text of {first}")
    words = {"hung": "report it", "passing": "free memory"}.get(first, "repair it")
    assert finding.advice.startswith(words)


# -- analyses ---------------------------------------------------------------------------


def used(**changes: Any) -> Resources:
    given: dict[str, Any] = {
        "function": "f", "registers": 32, "stack": 0, "shared_memory": 0, "num_warps": 4,
    }  # fmt: skip
    return Resources(**given | changes)


@pytest.mark.parametrize(
    ("capability", "changes", "blocks", "limit", "share"),
    [
        ((9, 0), {}, 16, "registers", 1.0),
        ((9, 0), {"registers": 16}, 16, "warps", 1.0),
        ((9, 0), {"registers": 33}, 12, "registers", 0.75),
        ((9, 0), {"num_warps": 1, "registers": 16}, 32, "blocks", 0.5),
        ((9, 0), {"shared_memory": 113 << 10}, 2, "shared memory", 0.125),
        ((9, 0), {"shared_memory": (114 << 10) - 1024 + 1}, 1, "shared memory", 0.0625),
        ((8, 9), {"registers": 16}, 12, "warps", 1.0),
        ((8, 6), {"num_warps": 1, "registers": 16}, 16, "blocks", 16 / 48),
        ((12, 0), {"num_warps": 1, "registers": 16}, 24, "blocks", 0.5),
        ((9, 0), {"registers": 0}, 16, "warps", 1.0),
    ],
)
def test_the_blocks_that_fit_on_an_sm(
    capability: tuple[int, int], changes: dict[str, Any], blocks: int, limit: str, share: float
) -> None:
    found = why.occupancy(replace(H200, capability=capability), used(**changes))
    assert (found["blocks"], found["occupancy"]) == (blocks, share)
    assert found["limited_by"] == limit


def test_programs_run_down_a_group_of_rows_then_right() -> None:
    assert tile_order.order(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert tile_order.waves(3, 2, 2, 4) == [({0, 1}, {0, 1}), ({2}, {0, 1})]


@pytest.mark.parametrize(("l2", "read"), [(0, 430), (99, 430), (100, 330), (199, 330), (200, 230)])
def test_the_l2_keeps_the_most_recently_used_data_that_fits(l2: int, read: int) -> None:
    """Columns of 100 bytes come after rows of 10; the second wave reads both columns again."""
    run = [({0, 1}, {0, 1}), ({2}, {0, 1})]
    assert tile_order.memory_bytes(run, 10, 100, l2) == read


def test_the_l2_keeps_a_row_that_each_wave_reads() -> None:
    """It was read first, and columns that were read once since are older."""
    run = [({0}, {column}) for column in (0, 1, 2, 1)]
    assert tile_order.memory_bytes(run, 10, 100, 210) == 10 + 3 * 100


def analysis(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kernel": "k", "config": {}, "note": "", "reads": None, "model_us": {},
        "expected_us": None, "measured_us": None, "blas_us": None, "flops": 4e6, "bytes": 2e6,
        "resources": (), "changes": [],
        "layout": {
            "tiles": 6, "block_m": 16, "block_n": 32, "steps": 4, "block_k": 64, "at_once": 4,
            "waves": 2, "fill": 0.75,
        },
    }  # fmt: skip
    return found | changes


def lines(**changes: Any) -> list[str]:
    return [" ".join(line.split()) for line in why_text.text(analysis(**changes), 400).splitlines()]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "tiles 6 of 16×32, 4 steps of 64 along K each; "
            "with room for 4 at once 2 waves, 75% full",
        ),
        ({"note": "a note"}, "note a note"),
        (
            {"reads": {"rows": 2, "columns": 3, "hits": 0.5, "l2_bytes": 2e6, "memory_bytes": 1e6}},
            "reads the first wave needs rows of A: 2, columns of B: 3; L2 serves 50% of 2 MB, "
            "1 MB come from memory",
        ),
        (
            {"model_us": {"launch": 9.0, "memory": 2.0, "tensor cores": 1.0}},
            "model µs of each alone: launch 9, memory 2, tensor cores 1; memory takes longest",
        ),
        ({"expected_us": 2.0}, "time expected 2 µs; not measured"),
        ({"expected_us": 2.0, "measured_us": 4.0},
         "time expected 2 µs; measured 4, 2.00 of that"),
        ({"measured_us": 4.0}, "time measured 4 µs"),
        (
            {"expected_us": 2.0, "measured_us": 4.0},
            "rate 1 TFLOPS, 500 GB/s, each operand and the result counted once",
        ),
        (
            {"expected_us": 2.0},
            "rate 2 TFLOPS, 1000 GB/s, each operand and the result counted once",
        ),
        ({"measured_us": 4.0, "blas_us": 6.0}, "blas 6 µs: 1.50× as long as this"),
        ({"resources": None, "not_compiled": "no ptxas"}, "compiled not here: no ptxas"),
        (
            {"resources": [{"function": "f", "registers": 8, "stack": 0, "shared_memory": 4,
                            "num_warps": 2, "blocks": 3, "limited_by": "blocks",
                            "occupancy": 0.25}]},
            "compiled f: 8 registers a thread, no stack (nothing spilled), 4 bytes of shared "
            "memory, 2 warps; an SM holds 3 blocks (limit: blocks), occupancy 25%",
        ),
        (
            {"changes": [{"fields": {"a": 1}, "refused": "too much"}]},
            "with a=1: not possible: too much",
        ),
        (
            {"changes": [{"fields": {"a": 1, "b": 2}, "expected_us": None, "measured_us": None,
                          "resources": None}]},
            "with a=1, b=2: nothing known",
        ),
        (
            {"expected_us": 2.0,
             "changes": [{"fields": {"a": 1}, "expected_us": 2.0, "measured_us": 3.0,
                          "resources": ()}]},
            "with a=1: no other time expected; measured 3 µs",
        ),
        (
            {"expected_us": 2.0,
             "changes": [{"fields": {"a": 1}, "expected_us": 2.5, "measured_us": None,
                          "resources": ()}]},
            "with a=1: expected 2.5 µs",
        ),
    ],
)  # fmt: skip
def test_each_line_of_an_analysis(changes: dict[str, Any], line: str) -> None:
    assert line in lines(**changes)


def test_an_analysis_leaves_out_unknown_facts() -> None:
    topics = [line.split()[0] for line in lines()]
    assert topics == ["kernel", "tiles"]
    assert "1 wave," in lines(layout={**analysis()["layout"], "waves": 1})[1]
    assert [line.split()[0] for line in lines(blas_us=3.0)] == topics


def test_resources_of_a_change_are_shown() -> None:
    use = {
        "registers": 32, "stack": 8, "shared_memory": 64, "num_warps": 4, "blocks": 1,
        "limited_by": "warps", "occupancy": 0.5,
    }  # fmt: skip
    change = {"fields": {"a": 1}, "expected_us": None, "measured_us": None, "resources": [use]}
    (line,) = (line for line in lines(changes=[change]) if line.startswith("with"))
    assert line == (
        "with a=1: 32 registers a thread, 8 bytes of stack, 64 bytes of shared memory, 4 warps; "
        "an SM holds 1 block (limit: warps), occupancy 50%"
    )


@dataclass(frozen=True, kw_only=True)
class Warps(FakeConfig):
    num_stages: int = 2
    num_warps: int = 4

    def __post_init__(self) -> None:
        if self.num_warps == 8:
            raise ValueError("eight warps are too many")


def test_a_stage_and_warps_are_varied() -> None:
    assert why._steps(Warps(num_warps=1)) == [
        {"num_stages": 3}, {"num_stages": 1}, {"num_warps": 5},
    ]  # fmt: skip
    assert why._steps(Warps())[2:] == [{"num_warps": 12}]
    assert why._steps(FakeConfig()) == []


@pytest.mark.parametrize(("used", "refused"), [(None, False), (64, False), (65, True)])
def test_a_change_has_to_fit_into_shared_memory(used: int | None, refused: bool) -> None:
    kernel: Any = FakeKernel("fake")
    anatomy = None if used is None else SimpleNamespace(shared_memory=used)
    kernel.anatomy = lambda problem, config: anatomy
    kernel.resources = lambda problem, config: []
    instance: Any = SimpleNamespace(
        problem=problem(device=replace(DEVICE, shared_memory=64)), record=None
    )
    found = why._change(instance, Candidate(kernel, FakeConfig()), {"tile": 2})
    refusal = {"refused": "65 bytes of shared memory, of 64"}
    rest = {"expected_us": None, "measured_us": None, "resources": []}
    assert found == {"fields": {"tile": 2}, **(refusal if refused else rest)}
    assert (
        "tile must be positive"
        in why._change(instance, Candidate(kernel, FakeConfig()), {"tile": 0})["refused"]
    )


def test_a_kernel_is_offered_if_it_describes_its_anatomy() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no")

    kernel: Any = FakeKernel("fake")
    configs: list[Any] = []
    described = lambda problem, config: configs.append(config) or 1  # noqa: E731
    for anatomy, offered in ((described, True), (lambda *_: None, False), (fails, False)):
        kernel.anatomy = anatomy
        assert why._default_anatomy(kernel, problem()) is offered
    assert configs == [FakeConfig()]


# -- the doctor ----------------------------------------------------------------------------


def as_tuples(found: Iterator[doctor.Finding]) -> list[tuple[str, str, str, str]]:
    return [(each.about, each.state, each.text, each.advice) for each in found]


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("installed", "device", "line"),
    [
        ({"triton": "3.1"}, GPU, ("ok", "3.1", "")),
        ({"pytorch-triton-rocm": "3.2"}, GPU, ("ok", "3.2", "")),
        ({}, GPU, ("problem", "not installed: only BLAS answers",
                   "pip install 'tmm-core[triton]'")),
        ({}, CPU, ("note", "not installed, and not needed on a CPU", "")),
    ],
)  # fmt: skip
def test_triton_is_needed_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    device: torch.device,
    line: tuple[str, ...],
) -> None:
    monkeypatch.setattr("tmm_core.spec.device.version_of", lambda name: installed.get(name, ""))
    assert as_tuples(doctor._versions(device))[3] == ("triton", *line)


@pytest.mark.parametrize(
    ("cuda", "hip", "build"),
    [("13.0", None, "CUDA 13.0"), (None, "6.1", "CUDA 6.1"), (None, None, "CPU only")],
)
def test_the_build_of_torch_is_shown(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None, build: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert as_tuples(doctor._versions(CPU))[2] == (
        "torch",
        "ok",
        f"{torch.__version__}, {build}",
        "",
    )


@pytest.mark.parametrize(
    ("program", "cuda", "state", "text"),
    [
        (None, None, "note", "cpu: BLAS answers everything"),
        ("/x", None, "problem", "cpu, although nvidia-smi exists: torch was built without CUDA"),
        ("/x", "13", "problem", "cpu, although nvidia-smi exists: torch finds no usable GPU"),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, program: str | None, cuda: str | None, state: str, text: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: program)
    monkeypatch.setattr(doctor, "interpreting", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    first, second = as_tuples(doctor._device(CPU))
    assert first[:3] == ("device", state, text)
    assert bool(first[3]) == (state == "problem")
    assert (second[0], second[1], second[3]) == ("interpreter", "note", "")


def test_an_interpreter_on_a_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "interpreting", lambda: True)
    monkeypatch.setattr(doctor, "fingerprint", lambda device: H200)
    monkeypatch.setattr(doctor, "driver_version", lambda device: "")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    first, second = as_tuples(doctor._device(GPU))
    assert first == (
        "device", "ok",
        "NVIDIA H200, sm_90, 132 SMs, 3 of 80 GiB free, driver of unknown version (no nvidia-smi)",
        "",
    )  # fmt: skip
    assert (second[1], second[3]) == ("problem", "unset it")


def test_the_toolchain_and_its_untried_kernels_are_shown_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = doctor.Finding("toolchain", "ok", "ptxas")
    untried = doctor.Finding("untried", "problem", "two", "mend")
    monkeypatch.setattr(doctor_toolchain, "parts", lambda _: [parts])
    monkeypatch.setattr(doctor_toolchain, "untried", lambda _: [untried])
    assert list(doctor._toolchain(CPU)) == [parts, untried]


@pytest.mark.parametrize(
    ("free", "state", "text"),
    [
        (doctor.LEAST_FREE_BYTES, "ok", ", 0.1 GiB free"),
        (doctor.LEAST_FREE_BYTES - 1, "problem", ": 0.1 GiB free"),
    ],
)
def test_a_cache_with_64_mebibytes_left_is_nearly_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: str, text: str
) -> None:
    assert doctor.LEAST_FREE_BYTES == 67_108_864
    layer, absent = tmp_path / "layer", tmp_path / "absent"
    layer.mkdir()
    store = CacheStore(tmp_path / "own", [layer, absent])
    here = fingerprint(CPU)
    saved(store, here, 1, 2)
    saved(store, replace(here, torch="1"), 1)
    store.log_miss(here.gpu, here.environment, problem().to_json())
    store.log_miss("nvidia-a100", here.environment, problem().to_json())
    dispatcher = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(store=store))
    monkeypatch.setattr(doctor, "dispatch", dispatcher)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    advice = "free some space, or move TMM_CACHE_DIR" if state == "problem" else ""
    # Folders of which one can be listed but not entered, and one entered but not listed.
    listed, entered = tmp_path / "listed", tmp_path / "entered"
    store.layers += (listed, entered)
    denied = {listed: os.X_OK, entered: os.R_OK}
    access = os.access
    monkeypatch.setattr(
        os, "access",
        lambda path, mode: not mode & denied[path] if path in denied else access(path, mode),
    )  # fmt: skip
    assert as_tuples(doctor._cache(CPU)) == [
        ("cache", state, f"{store.root}{text}", advice),
        ("cache layer", "ok", str(layer), ""),
        *(
            ("cache layer", "problem", f"{each} is not a readable folder", "correct TMM_CACHE_PATH")
            for each in (absent, listed, entered)
        ),
        ("records", "ok",
         f"2 records for {here.gpu}, 1 more for other versions (for untuned choices)", ""),
        ("misses", "note", "1 problems were met while tuning was forbidden", "tmm tune --misses"),
    ]  # fmt: skip


def test_a_kernel_that_crashes_another_process_has_the_fault_of_its_first_launch() -> None:
    launched: list[Any] = []
    failures = [None, ValueError("fell")]

    def failure(problem: Any, candidate: Any, memory: int) -> Exception | None:
        launched.append((candidate.config, memory))
        return failures.pop(0)

    first: Any = SimpleNamespace(failure=failure)
    kernel = FakeKernel("fake", tiles=(3,))
    assert doctor._fault(kernel, problem(), first) is None
    assert doctor._fault(kernel, problem(), first) == "fell"
    assert launched == [(FakeConfig(tile=3), 67_108_864)] * 2


@pytest.mark.parametrize("distribution", ["", "tmm-core", "other"])
def test_kernels_of_others_are_launched_in_another_process_first(
    monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(doctor, "_fault", lambda kernel, problem, first: launches.append(first))
    monkeypatch.setattr(doctor, "_wrong", lambda name, call: None)
    registry: Any = SimpleNamespace(reasons_against=lambda *_: [])
    source = SimpleNamespace(distribution=distribution)
    kernel: Any = SimpleNamespace(name="k", fault=None, source=source)
    first: Any = object()
    found = doctor._tried(registry, kernel, CPU, first)
    assert isinstance(found, doctor.Finding)
    assert (found.state, found.text) == ("ok", "k runs and is correct")
    assert launches == ([first] * len(doctor.PROBES) if distribution == "other" else [])


def test_the_plugin_of_a_finding_is_named_once() -> None:
    assert doctor._plugin("plugin 'x' (y 1)") == "'x' (y 1)"
    assert doctor._plugin("a plugin 'x'") == "a plugin 'x'"


# -- records and misses --------------------------------------------------------------------


def test_records_of_these_versions_answer_and_the_nearest_of_each_problem(tmp_path: Path) -> None:
    below = CacheStore(tmp_path / "below", [])
    store = CacheStore(tmp_path / "own", [below.root])
    saved(store, H200, 1)
    saved(store, replace(H200, torch="1"), 2)
    saved(below, H200, 1, 4)
    found = verify.answering(store, H200)
    assert sorted((each.record.problem["m"], each.root == store.root) for each in found) == [
        (1, True),
        (4, False),
    ]


@pytest.mark.parametrize("damage", [None, "", "{}", "{"])
def test_records_answer_without_their_readable_environment(
    tmp_path: Path, damage: str | None
) -> None:
    """`tmm verify` would pass them over without a word, and a call would use them."""
    store = CacheStore(tmp_path, [])
    saved(store, H200, 1)
    [path] = tmp_path.rglob("environment.json")
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert [each.record.problem["m"] for each in verify.answering(store, H200)] == [1]


@pytest.mark.parametrize("locked", ["1", "0"])
def test_records_of_the_lock_file_are_verified_where_it_alone_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str
) -> None:
    store = CacheStore(tmp_path, [])
    saved(store, H200, 1)
    saved(store, replace(H200, torch="1"), 2)
    saved(store, replace(H200, name="another"), 4)
    write_transport(tmp_path / "tmm.lock.json", store.summaries(), pytest.fail)
    saved(store, H200, 8)
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", locked)
    deployed = CacheStore(tmp_path, [])
    found = [each.record.problem["m"] for each in verify.answering(deployed, H200)]
    assert sorted(found) == ([1] if locked == "1" else [1, 8])


def test_an_absent_lock_file_is_reported_by_the_commands_that_list_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(CacheStore(tmp_path, []), H200, 1)
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", "1")
    with pytest.warns(CacheWarning, match="there is no such file"):
        assert verify.answering(CacheStore(tmp_path, []), H200) == []


def test_a_race_of_one_launch_in_twenty_is_met() -> None:
    missed = 0.95**verify.REPEATS
    assert missed == pytest.approx(0.0021, rel=0.02)


def test_misses_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    CacheStore().log_miss("gpu", {"torch": "2"}, problem(m=3, n=5, k=7).to_json())
    assert misses.run(argparse.Namespace(json=False)) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["problem", "gpu", "environment"]
    assert row.startswith("3x5x7 float32 row x row  gpu")


def test_a_miss_of_two_versions_is_tuned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = problem(m=3).to_json()
    here = fingerprint(CPU)
    found = [
        Miss(here.gpu, {}, instance),
        Miss(here.gpu, {"x": 1}, dict(reversed(instance.items()))),
    ]
    store = SimpleNamespace(misses=lambda: found)
    dispatcher = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(store=store))
    monkeypatch.setattr(tune, "dispatch", dispatcher)
    assert len(tune._of_misses(CPU)) == 1


@pytest.mark.parametrize(
    ("arguments", "count"), [(["8x8x8"], 1), (["8x8x8", "--misses"], 3), (["--misses"], 2)]
)
def test_misses_are_tuned_on_request(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], count: int
) -> None:
    pending: Any = object()
    monkeypatch.setattr(tune, "_of_misses", lambda device: [pending] * 2)
    assert len(tune._pending(cli._parser().parse_args(["tune", *arguments]), CPU)) == count
    with pytest.raises(UsageError, match="give shapes"):
        tune._pending(cli._parser().parse_args(["tune"]), CPU)


@pytest.mark.parametrize("text", ["1", "true", "YES", "on", "0", "false", "no", "off", ""])
def test_a_switch_takes_yes_or_no(text: str) -> None:
    variables._switch(text)
    with pytest.raises(ValueError, match="is taken for a yes"):
        variables._switch(f"{text}x")


def test_verdicts_are_counted_by_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = ["ok", "ok", "blas", "stale", "failed", "wrong", "unknown"]
    documents = [
        {"problem": problem().to_json(), "kernel": "k", "config": {"a": 1}, "status": state,
         "reason": "why"}
        for state in states
    ]  # fmt: skip
    monkeypatch.setattr(verify, "verified", lambda *_: iter(documents))
    assert verify.run(argparse.Namespace(device="cpu", json=False)) == 1
    *faults, summary = capsys.readouterr().out.splitlines()
    assert [line.rpartition("  ")[2] for line in faults] == [
        "failed: why", "wrong: why", "unknown: why",
    ]  # fmt: skip
    assert summary.partition(": ")[2] == (
        "2 verified, 1 won by BLAS, 1 for kernels or epilogues that have changed since, "
        "1 wrong, 1 failed, 1 too large to verify"
    )


# -- a new plugin --------------------------------------------------------------------------


def test_files_of_a_new_plugin_are_where_tools_expect_them() -> None:
    files = new_plugin.written({"distribution": "my-kernels", "module": "mine", "tmm": "1.2"})
    names = {path.as_posix() for path in files}
    assert {".gitignore", ".github/workflows/test.yml", "mine/py.typed", "pyproject.toml"} <= names
    assert not any(name.startswith("package/") or name.endswith(".in") for name in names)
    assert files[Path("mine/py.typed")] == ""
    assert not any(f"@{word}@" in text for text in files.values() for word in ("module", "tmm"))


def test_files_of_a_new_plugin_are_read_from_a_zip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = {"distribution": "my-kernels", "module": "mine", "tmm": "1.2"}
    expected = new_plugin.written(words)
    source, archive = Path(new_plugin.__file__).parents[1] / "template", tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in source.rglob("*.in"):
            packed.write(path, f"tmm_core/tools/template/{path.relative_to(source).as_posix()}")
    for folder, lacks in (("tmm_core/", False), ("tmm_core/tools/", True)):
        inside = zipfile.Path(archive, folder)
        monkeypatch.setattr(new_plugin.resources, "files", lambda _, inside=inside: inside)
        with pytest.raises(UsageError, match="lacks") if lacks else contextlib.nullcontext():
            assert new_plugin.written(words) == expected


@pytest.mark.parametrize(
    "name",
    ["json", "tmm_core", "tmm-cache", "tmm.blas", "TMM-Triton", "torch", "triton", "numpy",
     "pytest", "tests", "class"],
)  # fmt: skip
def test_a_module_that_an_import_would_find_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a module's name already"):
        new_plugin.run(argparse.Namespace(name=name))
    assert [*tmp_path.iterdir()] == []


# -- tmm bench -----------------------------------------------------------------------------


def benched(*arguments: str) -> argparse.Namespace:
    return cli._parser().parse_args(["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {"read": None, "kernel": [], "shapes": [], "squares": [], "sweep": [], "regret": 0,
              "limit": None, "seconds": None, "max_seconds": math.inf, "output": None,
              "records": True, "tune": True}),
        ("--from a b", {"read": [Path("a"), Path("b")]}),
        ("--kernel a,b --kernel c", {"kernel": ["a", "b", "c"]}),
        ("--limit 3 --regret 4", {"limit": 3, "regret": 4}),
        ("--no-records --no-tune", {"records": False, "tune": False}),
        ("--seconds-per-problem 2 --max-seconds 5", {"seconds": 2.0, "max_seconds": 5.0}),
        ("--output x --resume", {"output": Path("x"), "resume": True, "markdown": False}),
    ],
)  # fmt: skip
def test_options_of_a_benchmark(arguments: str, found: dict[str, Any]) -> None:
    options = benched(*arguments.split())
    assert {name: getattr(options, name) for name in found} == found


def test_a_quick_run_takes_two_minutes_or_the_users_limit() -> None:
    assert bench._quick(benched(), on_gpu=True).max_seconds == quick.SECONDS
    mine = bench._quick(benched("--max-seconds", "5", "--budget", "1"), on_gpu=True)
    assert (mine.max_seconds, mine.budget, mine.seconds) == (5.0, 1.0, quick.TIMING)
    assert bench._quick(benched("--seconds-per-problem", "2"), on_gpu=False).seconds == 2.0


def test_seconds_of_a_problem_can_be_given() -> None:
    usual = bench._chosen(benched(), 9.0)
    assert (usual.seconds, usual.deadline) == (0.5, 9.0)
    assert bench._chosen(benched("--seconds-per-problem", "2"), 9.0).seconds == 2.0


def test_a_series_has_the_fields_of_the_command() -> None:
    register(FakeKernel("fake"))
    [plain] = bench._series(benched("--kernel", "fake"))
    assert plain.fields == ()
    [given] = bench._series(benched("--kernel", "fake", "--config", "tile=2"))
    assert given.fields == (("tile", 2),)
    swept = bench._series(benched("--kernel", "fake", "--sweep", "tile=2", "--sweep", "tile=3"))
    assert [each.fields for each in swept] == [(("tile", 2),), (("tile", 3),)]


def test_a_run_without_records_tunes() -> None:
    with pytest.raises(UsageError, match="--no-tune tunes none"):
        bench._tasks(benched("--no-records", "--no-tune", "--shapes", "8x8x8"))
    [task] = bench._tasks(benched("--no-records", "--shapes", "8x8x8"))
    assert task.suite.startswith("shapes")
    assert task.suite != "shapes"
    [kept] = bench._tasks(benched("--no-tune", "--shapes", "8x8x8"))
    assert kept.suite == "shapes"


def test_without_problems_a_run_is_of_all_suites() -> None:
    def names(*arguments: str) -> list[str]:
        return list(dict.fromkeys(task.suite for task in bench._tasks(benched(*arguments))))

    every = list(dict.fromkeys(task.suite for task in bench.suites.select(["all"])))
    assert names() == every
    assert [name.startswith("large") for name in names("--no-records")] == [True]
    assert names("--host") == []
    assert names("--shapes", "8x8x8") == ["shapes"]
    assert names("--host", "--suite", every[1]) == [every[1]]
    assert names("--shapes", "8x8x8", "--suite", every[1]) == ["shapes", every[1]]
    assert len(bench._tasks(benched("--suite", every[0], "--limit", "2"))) == 2


def test_a_resumed_run_skips_measured_problems(tmp_path: Path) -> None:
    done = {"kind": "problem", "suite": "s", "case": {"m": 1}}
    failed = {"kind": "problem", "suite": "s", "case": {"m": 2}, "failed": "no memory"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(done)}\n{json.dumps(failed)}\n")
    found = bench._done(benched("--resume", "--output", str(tmp_path)))
    assert found == {identity("s", {"m": 1})}
    assert bench._done(benched("--resume", "--output", str(tmp_path / "absent"))) == set()
    with pytest.raises(UsageError, match="--resume needs --output"):
        bench._done(benched("--resume"))
    assert bench._done(benched()) == set()


def test_a_table_in_a_terminal_leaves_columns_to_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ("problem", "by capture", "A/A", "ratio", "kernel", "origin", "error")
    section = SimpleNamespace(
        rows=[list("abcdefg")], detail=False, columns=columns, numbers=("ratio",)
    )
    detail = SimpleNamespace(rows=[["x"]], detail=True, columns=("y",), numbers=())
    empty = SimpleNamespace(rows=[], detail=False, columns=("z",), numbers=())
    monkeypatch.setattr(report, "sections", lambda results: [empty, section, detail])
    monkeypatch.setattr(report, "title", lambda document: f"problem {document['case']}")
    problems = [
        {"kind": "problem", "suite": suite, "times": {}, "case": suite,
         "not_timed": {"k": "declines"}}
        for suite in ("kernels", bench.suites.SWEEP)
    ]  # fmt: skip
    bench._print_tables(Results(problems=problems))
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()[::2]] == [["problem", "ratio"],
                                                                      ["a", "d"]]  # fmt: skip
    assert shown.err == f"tmm: problem {bench.suites.SWEEP}: k was not timed: declines\n"


def test_the_report_of_earlier_results_goes_to_a_folder_that_need_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some" / "report"
    for _ in range(2):
        status = bench._show(Results(), benched("--json", "--output", str(folder)))
        assert status == 0
    assert [path.name for path in folder.iterdir()] == ["report.md"]
    shown = capsys.readouterr()
    assert json.loads(shown.out.partition("}\n{")[0] + "}")["problems"] == []
    assert shown.err.splitlines() == [f"tmm: written: {folder / 'report.md'}"] * 2
    failed = Results(problems=[{"kind": "problem", "suite": "s", "case": {}, "failed": "why"}])
    assert bench._show(failed, benched("--json")) == 1


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, which a process in a shell's background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupted(*_: Any, **__: Any) -> Any:
    """A library's error on Ctrl-C."""
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        raise RuntimeError("compilation failed") from error


@pytest.mark.parametrize("part", ["anatomy", "resources", "doctor", "tune"])
@pytest.mark.usefixtures("ctrl_c")
def test_a_faults_cause_may_be_ctrl_c(part: str) -> None:
    """Ctrl-C ends the command, even if a library raises another error for it."""
    kernel: Any = FakeKernel("k")
    kernel.anatomy = kernel.resources = _interrupted
    candidate = Candidate(kernel, FakeConfig())
    explained: Any = SimpleNamespace(problem=problem(), record=None)
    uses = {
        "anatomy": lambda: why._default_anatomy(kernel, problem()),
        "resources": lambda: why._known(explained, candidate),
        "doctor": lambda: doctor._wrong("k", SimpleNamespace(error=_interrupted)),  # type: ignore[arg-type]
        "tune": lambda: tune._tune(tune.Pending("x", False, _interrupted), benched()),
    }
    with pytest.raises(KeyboardInterrupt):
        uses[part]()
    kernel.anatomy = lambda *_: 1 / 0
    assert not why._default_anatomy(kernel, problem())


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_versions", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(doctor._examine(CPU))


def test_a_kernel_without_a_default_config_is_a_fault() -> None:
    def default_config(problem: Any) -> Any:
        raise PluginError("it has none")

    kernel: Any = FakeKernel("k")
    first: Any = SimpleNamespace(failure=lambda problem, candidate, memory: failures.get(memory))
    failures: dict[int, Any] = {}
    assert doctor._fault(kernel, problem(), first) is None
    failures[doctor.LAUNCH_BYTES] = ValueError("it crashed")
    assert doctor._fault(kernel, problem(), first) == "it crashed"
    kernel.default_config = default_config
    assert doctor._fault(kernel, problem(), first) == "it has none"


def test_a_recorded_time_is_of_the_config_and_of_this_m_if_it_was_timed() -> None:
    def result(kernel: str, us: float, tile: int, at: dict[int, float]) -> Any:
        return SimpleNamespace(
            kernel=kernel, config={"tile": tile}, median_us=us, us_at=lambda m, of: at.get(m)
        )

    results = [result("x", 9.0, 1, {}), result("k", 1.0, 1, {}), result("k", 2.0, 2, {64: 3.0})]
    explained: Any = SimpleNamespace(
        record=SimpleNamespace(candidates=results, extent=128), problem=problem(m=64)
    )
    assert why._recorded_us(explained, "k") == 1.0  # the first
    assert why._recorded_us(explained, "k", {"tile": 2}) == 3.0
    assert why._recorded_us(explained, "k", {"tile": 3}) is None
    assert why._recorded_us(explained, "y") is None
    explained.record = None
    assert why._recorded_us(explained, "k") is None


@pytest.mark.parametrize(
    ("capability", "shared"),
    [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99),
     ((7, 5), 48)],
)  # fmt: skip
def test_a_gpu_of_a_record_has_the_shared_memory_of_its_capability(
    capability: tuple[int, int], shared: int
) -> None:
    device = replace(H200, name="A GPU", capability=capability)
    found = gpus._device(SimpleNamespace(environment=device.environment))  # type: ignore[arg-type]
    assert found == replace(device, shared_memory=shared << 10, l2=0)
    assert gpus._device(SimpleNamespace(environment=None)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_result_at_its_tolerance_is_right(dtype: torch.dtype) -> None:
    one = Operand(dtype)
    instance = problem(a=one, b=one, out=one)
    limit = tolerance(instance)

    def wrong(error: float) -> str | None:
        call = SimpleNamespace(problem=lambda: instance, error=lambda kernel: error)
        return doctor._wrong("k", call)  # type: ignore[arg-type]

    assert wrong(limit) is None
    assert str(wrong(limit + 1e-3)).startswith("wrong, error 0.001")
    assert wrong(float("nan")) is not None


# -- runs that end early or without a result -----------------------------------------------


@pytest.mark.parametrize(
    "given",
    [("--suite", "square"), ("--shapes", "8x8x8"), ("--squares", "8:8:8"), ("--kernel", "blas"),
     ("--regret", "1")],
)  # fmt: skip
def test_a_quick_run_chooses_its_problems(given: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="--quick chooses its problems"):
        bench._quick(benched(*given), on_gpu=True)


@pytest.mark.parametrize("option", [("--sweep", "tile=1,2"), ("--config", "tile=1")])
def test_fields_are_of_a_kernel_that_is_named(option: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="name them with --kernel"):
        bench.run(benched("--shapes", "8x8x8", *option))
    with pytest.raises(UsageError, match="give --shapes or --squares"):
        bench._tasks(benched("--kernel", "blas"))
    for given in (("--shapes", "8x8x8"), ("--squares", "8:8:8")):
        [task] = bench._tasks(benched("--kernel", "blas", *given))
        assert (task.suite, task.case.m) == (bench.suites.SWEEP, 8)


def test_the_results_of_a_run_are_named_by_their_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []

    def measured(device: torch.device, **how: Any) -> dict[str, Any]:
        given.append((device, how))
        return {"kind": "host", "us": {}, "kernels": {}, "size": 1, "dtype": "x"}

    monkeypatch.setattr(bench.host, "measure", measured)
    monkeypatch.setattr(bench.runner, "run", lambda *_: iter(()))
    four = ("square", "decode", "prefill", "short_k")
    for number, suites in enumerate((four[:1], four[:3], four)):
        folder = tmp_path / str(number)
        arguments = (
            "--host",
            "--suite",
            ",".join(suites),
            "--output",
            str(folder),
            "--budget",
            "3",
        )
        options = benched(*arguments, "--no-tune", "--device", "cpu", "--json")
        options.argv = ["bench", *arguments]
        assert bench.run(options) == 0
        [file] = folder.glob("*.jsonl")
        name = "all" if number == 2 else "-".join((*suites, "host"))
        assert file.name.partition("-")[2] == f"{name}.jsonl"
        head, host = map(json.loads, file.read_text().splitlines())
        assert (head["kind"], head["command"], host["kind"]) == ("run", options.argv, "host")
        assert json.loads(capsys.readouterr().out)["host"] == host
    assert given == [(torch.device("cpu"), {"tune": False, "budget": 3.0})] * 3


def test_an_interrupted_verification_reports_its_results_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verified(entries: Any, device: Any) -> Iterator[dict[str, Any]]:
        yield {"problem": {}, "kernel": "k", "config": {}, "status": "ok"}
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verified", verified)
    for more, shown in ((["--json"], '"status": "ok"'), ([], ": 1 verified")):
        given = cli._parser().parse_args(["verify", "--device", "cpu", *more])
        assert verify.run(given) == 130
        out, err = capsys.readouterr()
        assert shown in out
        assert "interrupted after 1 records" in err


def test_a_check_that_fails_is_a_problem_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(device: Any) -> Iterator[doctor.Finding]:
        yield doctor.Finding("first", "ok", "x")
        raise OSError("gone")

    for name in ("_device", "_toolchain", "_plugins", "_settings", "_cache"):
        monkeypatch.setattr(doctor, name, lambda device: iter(()))
    fails.__name__ = "_versions"
    monkeypatch.setattr(doctor, "_versions", fails)
    monkeypatch.setattr(doctor, "_kernels", lambda device: [doctor.Finding("last", "ok", "y")])
    assert as_tuples(doctor._examine(CPU)) == [
        ("first", "ok", "x", ""), ("versions", "problem", "OSError: gone", "report it"),
        ("last", "ok", "y", ""),
    ]  # fmt: skip
    found = doctor._examine(CPU)
    next(found)
    found.close()  # closing the generator adds no finding


@pytest.mark.parametrize("wrong", [False, True])
def test_settings_that_no_variable_explains_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    def current() -> None:
        raise SettingsError("they contradict")

    monkeypatch.setattr(doctor.settings, "current", current)
    monkeypatch.setattr(doctor.variables, "faults", lambda *_: [("X", "x is wrong", "y")] * wrong)
    variable = ("variable", "problem", "x is wrong", "y")
    both = ("settings", "problem", "they contradict", "correct or unset it")
    assert as_tuples(doctor._settings(CPU)) == [variable if wrong else both]
    note = ("kernel", "note", "none was tried: the settings are invalid", "")
    assert as_tuples(doctor._kernels(CPU)) == [note]


@pytest.mark.parametrize(
    ("refusals", "fault", "wrong", "found"),
    [
        ([[], []], None, [None, None], ("ok", "k runs and is correct")),
        ([["a"], []], None, [None], ("ok", "k runs and is correct")),
        ([["a"], ["b"]], None, [], ["a"]),
        ([[], []], "it broke off", [None, None], ("problem", "it broke off")),
        ([[], []], None, ["x"], ("problem", f"k on {doctor.PROBES[0]}: x")),
        ([[], []], None, [None, "x"], ("problem", f"k on {doctor.PROBES[1]}: x")),
    ],
)  # fmt: skip
def test_a_kernel_runs_on_the_probes_that_it_accepts(
    monkeypatch: pytest.MonkeyPatch, refusals: Any, fault: Any, wrong: list[Any], found: Any
) -> None:
    monkeypatch.setattr(doctor, "_wrong", lambda name, call: wrong.pop(0))
    registry: Any = SimpleNamespace(reasons_against=lambda *_: refusals.pop(0))
    kernel: Any = SimpleNamespace(name="k", fault=fault, source=SimpleNamespace(distribution=""))
    tried = doctor._tried(registry, kernel, CPU, None)  # type: ignore[arg-type]
    if isinstance(tried, doctor.Finding):
        assert (tried.state, tried.text) == found
        assert bool(tried.advice) is (tried.state == "problem")
    else:
        assert tried == found
    assert not wrong


# -- analyses ------------------------------------------------------------------------------


def test_the_fastest_on_record_that_describes_itself_is_analysed() -> None:
    chosen, silent, told = (FakeKernel(name) for name in ("chosen", "silent", "told"))
    for kernel in (chosen, silent, told):
        kernel.anatomy = lambda *_: None  # type: ignore[method-assign]
    told.anatomy = lambda problem, config: config  # type: ignore
    results = [
        CandidateResult(name, "1", config, status, (us,))
        for name, config, status, us in (
            ("told", {"tile": 9}, "slow", 6.0), ("gone", {}, "ok", 1.0),
            ("told", {"x": 1}, "ok", 2.0), ("silent", {"tile": 1}, "ok", 3.0),
            ("told", {"tile": 8}, "slow", 4.0),
        )
    ]  # fmt: skip
    candidate = Candidate(chosen, FakeConfig())
    explained: Any = SimpleNamespace(
        problem=problem(), choice=SimpleNamespace(candidate=candidate), able=["told", "silent"],
        record=SimpleNamespace(candidates=results),
    )  # fmt: skip
    registry: Any = SimpleNamespace(kernel={"told": told, "silent": silent}.__getitem__)
    found, anatomy, note = why.described(explained, registry)
    assert (found.kernel, found.config, anatomy) == (told, FakeConfig(tile=8), FakeConfig(tile=8))
    assert note.startswith("chosen tile=1 is chosen, but describes no tiles")
    explained.record = None
    with pytest.raises(UsageError, match=r"; --kernel accepts one that does: told$"):
        why.described(explained, registry)
    explained.able = ["silent"]
    with pytest.raises(UsageError, match="; --gpu NAME selects a GPU"):
        why.described(explained, registry)
    chosen.anatomy = told.anatomy  # type: ignore[method-assign]
    assert why.described(explained, registry) == (candidate, FakeConfig(), "")


def test_the_bytes_that_waves_read() -> None:
    about: dict[str, Any] = {"block_m": 16, "block_n": 32, "block_k": 16, "steps": 1}
    about |= {"shared_memory": 0, "at_once": 3}
    instance = problem(m=40, n=64, k=10, a=HALF, b=HALF, out=HALF, device=replace(DEVICE, l2=0))

    def reads(tiles: int, group_m: int = 1, **fields: Any) -> dict[str, Any] | None:
        anatomy = Anatomy(tiles=tiles, group_m=group_m, **about)
        return why.reads(replace(instance, **fields), anatomy)

    # Waves of three of the 3 × 2 tiles: each touches two rows and both columns of tiles.
    row, column = 16 * 20, 32 * 20
    found = {"rows": 2, "columns": 2, "l2_bytes": 6 * (row + column)}
    memory = 2 * (2 * row + 2 * column)
    assert reads(6) == {**found, "memory_bytes": memory, "hits": 1 - memory / found["l2_bytes"]}
    batched = reads(12, batch=2)
    assert batched is not None
    assert (batched["l2_bytes"], batched["memory_bytes"]) == (2 * found["l2_bytes"], 2 * memory)
    gated = reads(6, epilogue=parse("swiglu"))
    assert gated is not None
    assert gated["l2_bytes"] == 6 * (row + 2 * column)
    assert gated["memory_bytes"] == 2 * (2 * row + 4 * column)
    assert reads(6, group_m=0) is reads(12) is reads(5) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no ptxas\nat all"), "no ptxas"), (RuntimeError(), "")],
)
def test_an_analysis_goes_without_a_compiler(error: Exception, reason: str) -> None:
    def fails(*_: Any) -> Any:
        raise error

    kernel: Any = FakeKernel("k", estimate=3.0)
    kernel.resources = fails
    explained: Any = SimpleNamespace(problem=problem(), record=None)
    assert why._known(explained, Candidate(kernel, FakeConfig())) == {
        "expected_us": 3.0, "measured_us": None, "resources": None, "not_compiled": reason,
    }  # fmt: skip


def test_explaining_another_gpu_needs_none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    given = cli._parser().parse_args(["explain", "8x8x8", "--gpu", "H200", "--device", "cuda"])
    monkeypatch.setattr(options, "device", None)
    explained = explain._explanation(Case(m=8, n=8, k=8), given)
    assert explained.problem.device.name == "NVIDIA H200"


# -- tmm tune ------------------------------------------------------------------------------


class Launches:
    """Stands in for first launches in another process."""

    def __init__(self, device: torch.device) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("isolated", [False, True])
def test_first_launches_are_in_another_process_on_request(
    isolated: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    tuner = dispatch.default_dispatcher().tuner

    def tuned(item: tune.Pending, options: argparse.Namespace) -> dict[str, Any]:
        seen.append(tuner.first_launches)
        assert tuner.first_launches is None or not tuner.first_launches.closed
        return {"problem": item.name, "status": "failed" if len(seen) == 2 else "tuned"}

    monkeypatch.setattr(tune, "FirstLaunches", Launches)
    monkeypatch.setattr(tune, "_tune", tuned)
    monkeypatch.setattr(tune, "_line", lambda outcome: outcome["status"])
    prepared: list[Any] = []
    monkeypatch.setattr(tune.runner, "prepare", lambda *given: prepared.append(given[1:]))
    shapes = [f"{size}x8x8" for size in range(8, 18)]
    more = ["--isolate", "--force"] if isolated else []
    given = cli._parser().parse_args(["tune", *shapes, "--device", "cpu", *more])
    assert tune.run(given) == 1  # one failed
    assert len(seen) == len(shapes)
    assert len({id(each) for each in seen}) == 1
    assert all(isinstance(each, Launches) and each.closed for each in seen) is isolated
    assert tuner.first_launches is None
    assert prepared == [(False, isolated)] * 9  # the next problem is prepared while one is tuned
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["[ 1/10] tuned", "[ 2/10] failed"]
    seen.clear()
    one = cli._parser().parse_args(["tune", "8x8x8", "--device", "cpu", "--json"])
    assert tune.run(one) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == [{"problem": "8×8×8 bfloat16 nn", "status": "tuned"}]
    assert err == "[1/1] tuned\n"


def test_kernels_that_a_tuning_left_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Case(m=8, n=8, k=8, dtype=torch.float32).problem(CPU)
    given = cli._parser().parse_args(["tune", "8x8x8", "--budget", "1"])
    item = tune.Pending("x", False, lambda: instance)
    first, again = tune._tune(item, given), tune._tune(item, given)
    assert (first["status"], again["status"]) == ("tuned", "on record")
    assert "untried" not in first
    store = dispatch.default_dispatcher().store
    noted = {instance.bare(): Noted({("k", "1"): Obstacle("toolchain", "why")})}
    stub = SimpleNamespace(store=store, untried=noted)
    monkeypatch.setattr(tune, "dispatch", SimpleNamespace(default_dispatcher=lambda: stub))
    assert tune._tune(item, given)["untried"] == {"k": "why"}


# -- records, plugins and choices ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "verdict", "found"),
    [
        ("k", Verdict(0.5), {"status": "ok", "error": 0.5}),
        ("k", Verdict(float("nan")), {"status": "ok"}),
        ("k", Verdict(None), {"status": "ok"}),
        ("k", Verdict(0.5, "why"), {"status": "wrong", "reason": "why", "error": 0.5}),
        ("k", Verdict(None, "why", unknown=True), {"status": "unknown", "reason": "why"}),
        ("blas", Verdict(0.5, "why"), {"status": "blas", "error": 0.5}),
        ("k", RuntimeError("fell"), {"status": "failed", "reason": "RuntimeError: fell"}),
        (None, None, {"status": "stale"}),
    ],
)
def test_the_verdict_on_a_record(
    kernel: str | None, verdict: Any, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Stub:
        def __init__(self, problem: Any, device: Any, memory_limit: int) -> None:
            assert memory_limit == 1 << 20

        def verdict(self, launcher: Any, **how: Any) -> Any:
            asked.append({"launcher": launcher, **how})
            if isinstance(verdict, Exception):
                raise verdict
            return verdict

    stamped: list[Any] = []
    first_use = SimpleNamespace(stamp=lambda *given: stamped.append(given))
    chooser = SimpleNamespace(first_use=first_use)
    monkeypatch.setattr(verify, "Verifier", Stub)
    stub = SimpleNamespace(default_dispatcher=lambda: chooser)
    monkeypatch.setattr(verify, "dispatch", stub)
    compiling: Future[Any] = Future()
    winner = None
    if kernel is not None:
        made = FakeKernel(kernel, traits=Traits(deterministic=False))
        candidate = Candidate(made, FakeConfig())
        winner = verify.Winner(problem(), candidate, "launcher")  # type: ignore[arg-type]
    compiling.set_result(winner)
    with settings.override(tune_memory=1 << 20):
        judged = verify._judged(compiling, CPU)
    named = {} if found["status"] in ("failed", "stale") else {"title": str(problem())}
    assert judged == named | found
    assert bool(stamped) is (found["status"] == "ok")
    how = {"repeats": verify.REPEATS, "deterministic": False}
    blas = kernel == "blas"
    how |= {"baseline": blas, "extent": "brief" if blas else "whole"}
    assert asked == ([] if winner is None else [{"launcher": "launcher", **how}])


def test_plugins_are_listed_with_their_kernels_and_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(text: str) -> Any:
        class Source:
            plugin = text

            def __str__(self) -> str:
                return f"plugin {text!r}"

        return Source()

    one, two, three = source("one"), source("two"), source("three")
    kernels = [
        SimpleNamespace(name=name, source=where)
        for name, where in (("a", one), ("b", two), ("c", one))
    ]
    faults = [
        SimpleNamespace(source=two, reason="disabled", intended=True),
        SimpleNamespace(source=three, reason="broken", intended=False),
    ]
    registry = SimpleNamespace(kernels=lambda: kernels, faults=lambda: faults)
    stub = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(registry=registry))
    monkeypatch.setattr(doctor, "dispatch", stub)
    assert as_tuples(doctor._plugins(CPU)) == [
        ("plugin", "ok", "'one': a, c", ""), ("plugin", "ok", "'two': b", ""),
        ("plugin", "note", "'two': disabled", ""),
        ("plugin", "problem", "'three': broken",
         "fix or uninstall it, or set TMM_DISABLE_PLUGINS=three"),
    ]  # fmt: skip


def test_a_cache_need_not_be_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CacheStore(tmp_path / "not" / "there", [])
    stub = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(store=store))
    monkeypatch.setattr(doctor, "dispatch", stub)
    for _ in range(2):
        about, state, *_ = as_tuples(doctor._cache(CPU))[0]
        assert (about, state) == ("cache", "ok")
        assert store.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "given",
    [("--scales", "column"), ("--layout", "nx"), ("--ragged", "x"),
     ("--dtype", "bf17")],
)  # fmt: skip
def test_options_refuse_values_outside_their_list(given: tuple[str, str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(*given)
