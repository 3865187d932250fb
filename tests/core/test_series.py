"""Single kernels timed at partly given configs, and their tables."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from fakes import FakeKernel, register

import tmm_core
from tmm_core import settings
from tmm_core.bench.case import Case
from tmm_core.bench.series import Series, capable, combined
from tmm_core.tools.cli import main
from tmm_core.tools.commands import options

CPU = ("--device", "cpu", "--no-tune", "--seconds-per-problem", "0.01", "--dtype", "fp32")


pytestmark = pytest.mark.usefixtures("blas_alone")


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["bench", *argv, *CPU, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["problems"]


def test_every_combination_of_the_fields_that_a_kernel_has() -> None:
    from tmm_triton.naive import Naive
    from tmm_triton.tiled import Grouped

    found = combined(
        [Naive(), Grouped()], {"BLOCK_M": 64}, {"GROUP_M": [1, 8], "num_stages": [2, 3]}
    )
    assert [(each.label, dict(each.fields)) for each in found] == [
        ("triton.naive num_stages=2", {"BLOCK_M": 64, "num_stages": 2}),
        ("triton.naive num_stages=3", {"BLOCK_M": 64, "num_stages": 3}),
        ("triton.grouped GROUP_M=1 num_stages=2", {"BLOCK_M": 64, "GROUP_M": 1, "num_stages": 2}),
        ("triton.grouped GROUP_M=1 num_stages=3", {"BLOCK_M": 64, "GROUP_M": 1, "num_stages": 3}),
        ("triton.grouped GROUP_M=8 num_stages=2", {"BLOCK_M": 64, "GROUP_M": 8, "num_stages": 2}),
        ("triton.grouped GROUP_M=8 num_stages=3", {"BLOCK_M": 64, "GROUP_M": 8, "num_stages": 3}),
    ]
    assert combined([Naive()], {}, {}) == [Series("triton.naive", "triton.naive")]
    with pytest.raises(ValueError, match="no kernel has a field 'SPLIT_K'; there are triton"):
        combined([Naive()], {}, {"SPLIT_K": [1]})


def test_a_sweep_is_timed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    register(FakeKernel("fake.one"), FakeKernel("fake.two"))
    argv = ("--kernel", "fake.one,fake.two", "--sweep", "tile=1,3", "--squares", "8:16:8")
    documents = bench(capsys, *argv)
    assert [document["case"]["n"] for document in documents] == [8, 16]
    labels = [f"fake.{name} tile={tile}" for name in ("one", "two") for tile in (1, 3)]
    for document in documents:
        assert {f"kernel {label}" for label in labels} < set(document["times"])
        assert document["kernel_configs"]["fake.two tile=3"] == {"tile": 3}
    # A failure is reported, and costs its own column.
    argv = ("--kernel", "fake.one", "--sweep", "tile=1,0", "--squares", "8:16:8")
    assert main(["bench", *argv, *CPU]) == 0
    out, err = capsys.readouterr()
    *_, heading, _, first, second = (re.split(r"\s{2,}", row.strip()) for row in out.splitlines())
    assert (first[0], second[0]) == ("8×8×8 float32 nn", "16×16×16 float32 nn")
    assert heading[-2:] == ["GB/s", "fake.one tile=1"]
    assert "fake.one tile=0 was not timed: ConfigError" in err


def test_shapes_of_one_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    register(FakeKernel("fake.one"))
    argv = ("--kernel", "fake.one", "--shapes", "4x6x8", "2x4x6x8")
    documents = bench(capsys, *argv, "--layout", "nt")
    assert [(d["case"]["dtype"], d["case"]["batch"]) for d in documents] == [
        ("float32", 1), ("float32", 2),
    ]  # fmt: skip
    assert {d["case"]["layout"] for d in documents} == {"nt"}


def test_bytes_count_all_transfers() -> None:
    """Half precision moves two bytes an element, and an output of another dtype its own."""
    device = torch.device("cpu")
    half = Case(m=10, n=20, k=30, dtype=torch.half).call(device).problem()
    assert half.bytes == 2 * (10 * 30 + 30 * 20 + 10 * 20)
    wide = Case(m=10, n=20, k=30, dtype=torch.half, out_dtype=torch.float32, residual=True)
    assert wide.call(device).problem().bytes == 2 * (10 * 30 + 30 * 20) + 4 * (2 * 10 * 20)


def test_kernels_are_timed_with_their_best_config_on_record() -> None:
    register(FakeKernel("fake.right", tiles=(1, 2)), FakeKernel("fake.slow", tiles=(3,)))
    call = Case(m=16, n=16, k=16, dtype=torch.float32).call(torch.device("cpu"))
    [record] = tmm_core.tune(call.problem())
    plans = {each.label: each.plan(call) for each in capable(call)}
    assert {*plans} == {"blas", "fake.right", "fake.slow"}
    tiles = {c.config["tile"]: c for c in record.candidates if c.kernel == "fake.right"}
    most = max(len(c.samples_us) for c in tiles.values())
    timed = [c for c in tiles.values() if c.median_us]
    best = min(timed, key=lambda c: (len(c.samples_us) < most, c.median_us or 0))
    assert plans["fake.right"].config == best.config


def test_without_a_record_kernels_are_timed_with_their_defaults() -> None:
    register(FakeKernel("fake.other", tiles=(7, 8)), FakeKernel("fake.lame", bind_error=OSError()))
    with settings.override(on_cache_miss="heuristic"):
        call = Case(m=16, n=16, k=16, dtype=torch.float32).call(torch.device("cpu"))
        found = {each.label: each for each in capable(call)}
        assert found["fake.other"].plan(call).config == {"tile": 7}
        reason = "kernel 'fake.lame' of plugin 'fakes': bind raised OSError "
        with pytest.raises(tmm_core.TmmError, match=reason):
            found["fake.lame"].plan(call)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--sweep", "tile=1", "--shapes", "8x8x8"), "name them with --kernel"),
        (("--kernel", "blas"), "on which problems"),
        (("--kernel", "blas", "--sweep", "tile=1", "--shapes", "8x8x8"), "no kernel has a field"),
        (("--kernel", "blsa", "--shapes", "8x8x8"), "did you mean 'blas'"),
        (("--squares", "8"), "accepted is FIRST:LAST:STEP"),
        (("--squares", "16:8:8"), "the last size is below the first"),
        (("--sweep", "tile"), "accepted is FIELD=VALUE"),
    ],
)
def test_impossible_options_are_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert main(["bench", *argv, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_option_values_are_parsed_by_their_form() -> None:
    assert [options.value_of(text) for text in ("8", "0.5", "True", "false", "last", "")] == [
        8, 0.5, True, False, "last", "",
    ]  # fmt: skip
