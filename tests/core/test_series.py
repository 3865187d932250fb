"""Single kernels timed at partly given configs, and their tables and charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeKernel, register

from tmm_core.bench import charts, series
from tmm_core.bench.case import Case
from tmm_core.bench.results import Results
from tmm_core.bench.series import Series, combined
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


def test_a_sweep_is_timed_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    register(FakeKernel("fake.one"), FakeKernel("fake.two"))
    argv = ("--kernel", "fake.one,fake.two", "--sweep", "tile=1,3", "--squares", "8:16:8")
    documents = bench(capsys, *argv)
    assert [document["case"]["n"] for document in documents] == [8, 16]
    labels = [f"fake.{name} tile={tile}" for name in ("one", "two") for tile in (1, 3)]
    for document in documents:
        assert document["series"] == labels
        assert {f"kernel {label}" for label in labels} < set(document["times"])
        assert document["kernel_configs"]["fake.two tile=3"] == {"tile": 3}
    # A failure is reported, and costs its own column.
    pytest.importorskip("matplotlib")
    more = ("--sweep", "tile=0", "--output", str(tmp_path), "--plots", "--metric", "us")
    assert main(["bench", *argv, *more, *CPU]) == 0
    out, err = capsys.readouterr()
    assert "µs, float32, in use" in out
    assert "fake.one tile=0 was not timed: ConfigError" in err
    assert (tmp_path / "sweep-float32.png").read_bytes().startswith(b"\x89PNG")


def test_dtypes_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    register(FakeKernel("fake.one"))
    argv = ("--kernel", "fake.one", "--shapes", "4x6x8", "2x4x6x8", "--dtypes", "fp32,fp64")
    documents = bench(capsys, *argv, "--layout", "nt")
    assert [(d["case"]["dtype"], d["case"]["batch"]) for d in documents] == [
        ("float32", 1), ("float32", 2), ("float64", 1), ("float64", 2),
    ]  # fmt: skip
    assert {d["case"]["layout"] for d in documents} == {"nt"}


DOCUMENT = {
    "flops": 2 * 1000**3,
    "bytes": 3 * 2 * 1000**2,
    "times": {"torch": {"median_us": 20.0}, "tmm": {"median_us": 10.0}},
}


def test_metrics() -> None:
    """Computed by hand: 2e9 FLOP and 6 MB (16 bits an element) in 10 µs."""
    told = {metric: series.told(DOCUMENT, "tmm", metric) for metric in series.METRICS}
    assert told == {"tflops": 200.0, "gbs": 600.0, "us": 10.0, "ratio": 2.0}
    assert series.told(DOCUMENT, "kernel absent", "us") is None


def test_bytes_are_those_that_move() -> None:
    """Half precision moves two bytes an element, and an output of another dtype its own."""
    device = torch.device("cpu")
    half = Case(m=10, n=20, k=30, dtype=torch.half).call(device).problem()
    assert half.bytes == 2 * (10 * 30 + 30 * 20 + 10 * 20)
    wide = Case(m=10, n=20, k=30, dtype=torch.half, out_dtype=torch.float32, residual=True)
    assert wide.call(device).problem().bytes == 2 * (10 * 30 + 30 * 20) + 4 * (2 * 10 * 20)


def test_the_axis_is_what_differs() -> None:
    def sizes(*shapes: tuple[int, int, int]) -> Any:
        return series.axis([{"case": dict(zip("mnk", shape, strict=True))} for shape in shapes])

    assert sizes((8, 8, 8), (16, 16, 16)) == ("M = N = K", [8.0, 16.0])
    assert sizes((1, 8, 16), (4, 8, 16)) == ("M (N = 8, K = 16)", [1.0, 4.0])
    assert sizes((1, 8, 16), (4, 9, 16)) == ("M×N×K", ["1×8×16", "4×9×16"])
    assert sizes((1, 8, 16)) == ("M×N×K", ["1×8×16"])


def test_lines_are_drawn_in_the_order_of_sizes() -> None:
    pytest.importorskip("matplotlib")
    documents = [
        {
            "kind": "problem", "suite": "sweep", "series": ["k g=1", "k g=2"], "ratio": 1.0,
            "case": {"m": n, "n": n, "k": n, "dtype": "float16"}, "flops": 1, "bytes": n,
            "times": {
                "torch": {"median_us": 2.0}, "tmm": {"median_us": 1.0},
                "kernel k g=1": {"median_us": float(n)}, **more,
            },
        }
        for n, more in ((32, {}), (16, {"kernel k g=2": {"median_us": 4.0}}))
    ]  # fmt: skip
    [(name, drawn)] = charts.figures(Results.of(documents), "us").items()
    [axes] = drawn.axes
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }
    assert name == "sweep-float16"
    assert lines == {
        "k g=1": ([16, 32], [16, 32]), "k g=2": ([16], [4]),
        "tmm (chosen)": ([16, 32], [1, 1]), "torch": ([16, 32], [2, 2]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--sweep", "tile=1", "--shapes", "8x8x8"), "name them with --kernel"),
        (("--kernel", "blas"), "on which problems"),
        (("--kernel", "blas", "--sweep", "tile=1", "--shapes", "8x8x8"), "no kernel has a field"),
        (("--kernel", "blsa", "--shapes", "8x8x8"), "did you mean 'blas'"),
        (("--squares", "8"), "accepted is FIRST:LAST:STEP"),
        (("--squares", "16:8:8"), "the last size is below the first"),
        (("--sweep", "tile"), "accepted is FIELD=VALUE"),
        (("--dtypes", "fp32,fp31"), "unknown dtype 'fp31'"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert main(["bench", *argv, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_values_are_what_they_read_as() -> None:
    assert [options.value_of(text) for text in ("8", "0.5", "True", "false", "last", "")] == [
        8, 0.5, True, False, "last", "",
    ]  # fmt: skip
