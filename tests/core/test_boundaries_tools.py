"""Values at and beside the limits of what commands read and print."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import DEVICE, problem
from tmm_cache import CacheStore, Miss
from tmm_cache.console import UsageError

from tmm_core import dispatch
from tmm_core.bench.case import Case
from tmm_core.spec import toolchain
from tmm_core.spec.anatomy import Resources
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.tools.commands import (
    doctor_toolchain,
    gpus,
    misses,
    options,
    tile_order,
    tune,
    variables,
    why,
    why_text,
)
from tmm_core.tuning.untried import Left

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
        (["--scales", "row"], (1, 2, 3, 4), "--scales row is for --dtype e4m3 or e5m2"),
        (["--scales", "row", "--dtype", "fp16"], (1, 2, 3, 4), "--scales row is for"),
        (["--ragged", "m"], (1, 2, 3, 4), "--ragged m is for --groups"),
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
def test_a_batch_is_of_the_shape(
    arguments: list[str], shape: tuple[int, int, int, int], batch: int
) -> None:
    assert [case.batch for case in options.cases(parsed(*arguments), [shape])] == [batch]


@pytest.mark.parametrize("name", ["--groups"])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_a_count_is_a_whole_number_from_one_on(name: str, text: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        parsed(f"{name}={text}")


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "-inf"])
def test_what_is_not_above_zero_is_refused(text: str) -> None:
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


def test_a_device_that_is_none_is_a_mistake() -> None:
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
    asked: Any = SimpleNamespace(device=text)
    if index is None:
        with pytest.raises(UsageError, match="--device cuda:2: there are 2 GPUs"):
            options.device(asked)
        assert chosen == []
        return
    assert options.device(asked) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "x: bad"),
        (KeyError("k"), None),
        (ImportError("no"), "x: no; pip install 'tmm-core[bench]'"),
    ],
)
def test_mistakes_in_use_are_told_with_the_option(error: Exception, text: str | None) -> None:
    def use() -> None:
        with options.usage("x", ImportError):
            raise error

    with pytest.raises(UsageError if text else KeyError) as caught:
        use()
    assert text is None or str(caught.value) == text
    with pytest.raises(UsageError, match=r"^alone$"), options.usage():
        raise ValueError("alone")


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
def test_a_gpu_has_to_be_one(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"--gpu {text}: the name of {what} of these: NVIDIA A100"):
        gpus.find(CacheStore(), text)


def saved(store: CacheStore, device: DeviceFingerprint, *sizes: int) -> None:
    from test_tuner import result
    from tmm_cache import TuningRecord

    for m in sizes:
        asked = problem(m=m, device=device)
        record = TuningRecord(
            asked.to_json(), 0, (result("blas", 1.0),), "2026-01-01T00:00:00Z", 1.0
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
    """``triton.pointwise`` may be disabled, and is no kernel of a product."""
    (fault,) = wrong({"TMM_KERNEL": "triton.pointwise"}).values()
    assert "kernel 'triton.pointwise'" in fault


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
    asked = problem(m=32, n=64, k=16).to_json()
    assert misses.title(asked) == "32x64x16 float32 row x row"
    assert misses.title(asked | {"epilogue": "silu"}).endswith(" silu")
    assert misses.title({}) == "-x-x- - - x - -"


@pytest.mark.parametrize(("here", "others"), [(2, 0), (1, 3), (0, 1)])
def test_misses_of_other_devices_are_counted(
    here: int, others: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = torch.device("cpu")
    asked = problem(m=32, n=64, k=16).to_json()
    mine = [Miss(fingerprint(cpu).gpu, {}, asked | {"m": m + 1}) for m in range(here)]
    theirs = [Miss("other", {}, asked)] * others
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
def test_the_line_of_a_tuning(changes: dict[str, Any], line: str) -> None:
    outcome: dict[str, Any] = {
        "problem": "p", "status": "tuned", "kernel": "k", "config": {}, "median_us": 2.0,
        "blas_us": 6.0, "candidates": {"ok": 3}, "seconds": 1.5,
    }  # fmt: skip
    assert tune._line(outcome | changes) == line


@pytest.mark.parametrize("text", ["1", '"x"', "[1]", "[[]]", "{", "[{}, 2]"])
def test_a_file_of_no_problems_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"^{file}: "):
        tune._of_file(file, torch.device("cpu"))


def test_a_file_has_problems_or_entries_that_hold_them(tmp_path: Path) -> None:
    asked = problem(m=32, n=64, k=16).to_json()
    file = tmp_path / "file.json"
    file.write_text(json.dumps([asked, {"problem": asked | {"tf32": True}, "count": 3}]))
    found = tune._of_file(file, torch.device("cpu"))
    assert [(each.name, each.tf32) for each in found] == [
        ("32x64x16 float32 row x row", False),
        ("32x64x16 float32 row x row", True),
    ]


# -- the toolchain ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("x\nCuda tools, release 12.8, V1\ny", "ptxas, Cuda tools, release 12.8, V1"),
        ("nothing", "ptxas, of unknown version"),
    ],
)
def test_the_assembler_tells_its_release(
    output: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "ptxas", lambda: "ptxas")
    ran = subprocess.CompletedProcess([], 0, output, "")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: ran)
    assert doctor_toolchain._ptxas() == ("ok", said, "")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/absent/ptxas")
    found = doctor_toolchain._ptxas()
    assert found[0] == "problem"
    assert found[1] == "TRITON_PTXAS_PATH=/absent/ptxas is not there; Triton uses ptxas"


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
    assert found[0] == "problem"
    assert found[1].startswith("/x/ptxas does not run: ")
    monkeypatch.setattr(toolchain, "ptxas", lambda: None)
    assert doctor_toolchain._ptxas()[1].startswith("no ptxas: ")


@pytest.mark.parametrize(
    ("compiler", "lacking", "said"),
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
def test_what_builds_launchers_is_named(
    compiler: str | None,
    lacking: str | None,
    said: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "c_compiler", lambda: compiler)
    monkeypatch.setattr(toolchain, "lacking", lambda: lacking)
    monkeypatch.setattr(toolchain, "python_header", lambda: "/Python.h")
    found = doctor_toolchain._compiler()
    assert found[0] == said[0]
    assert found[1].startswith(said[1])
    assert found[2].startswith(said[2])


@pytest.mark.parametrize("state", ["full", "not writable"])
def test_folders_that_cannot_be_used_are_problems(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok = doctor_toolchain.Line("ok", "x")
    monkeypatch.setattr(doctor_toolchain, "_compiler", lambda: ok)
    monkeypatch.setattr(doctor_toolchain, "_ptxas", lambda: ok)
    monkeypatch.setattr(toolchain, "folders", lambda: {"cache": "/c", "temporary": "/t"})
    monkeypatch.setattr(toolchain, "usable", lambda f: "yes" if f == "/t" else state)
    monkeypatch.setattr(toolchain, "fingerprint", lambda: "abc")
    found = list(doctor_toolchain.parts(torch.device("cuda")))
    advice = "free some space" if state == "full" else "make it writable"
    assert found[2:] == [
        ("problem", f"cache folder /c is {state}", f"{advice}, or set another"),
        ("ok", "fingerprint abc", ""),
    ]
    assert list(doctor_toolchain.parts(torch.device("cpu"))) == []


def _notes(*kernels: dict[str, Left]) -> Any:
    notes = [
        SimpleNamespace(kernels={(n, "v"): left for n, left in each.items()}) for each in kernels
    ]
    found = SimpleNamespace(untried=SimpleNamespace(of_device=lambda device: notes))
    return SimpleNamespace(default_dispatcher=lambda: found)


def test_untried_kernels_are_told_with_the_worst_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Left("budget", "late")
    notes = _notes(
        {"a": Left("hung", "it\n hung"), "b": late},
        {"a": Left("passing", "no memory"), "c": Left("alike", "all")},
        {"b": late, "d": late},
    )
    monkeypatch.setattr(doctor_toolchain, "dispatch", notes)
    assert list(doctor_toolchain.untried(torch.device("cpu"))) == [
        (
            "problem",
            "2 kernels are untried for 2 problems: no memory",
            "free memory or space, then tmm tune",
        ),
        (
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
def test_the_cause_to_mend_first(
    causes: list[Any], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = _notes({cause: Left(cause, f"text of {cause}") for cause in causes})
    monkeypatch.setattr(doctor_toolchain, "dispatch", notes)
    (said,) = doctor_toolchain.untried(torch.device("cpu"))
    assert said.text.endswith(f"text of {first}")
    words = {"hung": "report it", "passing": "free memory"}.get(first, "repair it")
    assert said.advice.startswith(words)


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
def test_blocks_of_an_sm(
    capability: tuple[int, int], changes: dict[str, Any], blocks: int, limit: str, share: float
) -> None:
    found = why.occupancy(replace(H200, capability=capability), used(**changes))
    assert (found["blocks"], found["occupancy"]) == (blocks, share)
    assert found["limited_by"] == limit


def test_programs_run_down_a_group_of_rows_then_right() -> None:
    assert tile_order.order(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert tile_order.waves(3, 2, 2, 4) == [({0, 1}, {0, 1}), ({2}, {0, 1})]


@pytest.mark.parametrize(("l2", "read"), [(0, 430), (99, 430), (100, 330), (199, 330), (200, 230)])
def test_the_l2_keeps_what_was_used_last_and_fits(l2: int, read: int) -> None:
    """Columns of 100 bytes come after rows of 10; the second wave reads both columns again."""
    run = [({0, 1}, {0, 1}), ({2}, {0, 1})]
    assert tile_order.memory_bytes(run, 10, 100, l2) == read


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
def test_a_line_of_an_analysis(changes: dict[str, Any], line: str) -> None:
    assert line in lines(**changes)


def test_an_analysis_has_no_line_of_what_is_not_known() -> None:
    topics = [line.split()[0] for line in lines()]
    assert topics == ["kernel", "tiles"]
    assert "1 wave," in lines(layout={**analysis()["layout"], "waves": 1})[1]
    assert [line.split()[0] for line in lines(blas_us=3.0)] == topics
