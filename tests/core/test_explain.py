"""``tmm explain``: the order of tiles, a choice taken apart, pictures, a profiler's command line.

Choices come from the shipped records, for GPUs that are not here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tmm_base import console

from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.tools.cli import main
from tmm_core.tools.commands import why

H200 = DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448, 50 << 20)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmm_core import dispatch

    monkeypatch.delenv("TMM_SHIPPED_RECORDS", raising=False)
    dispatch.default_dispatcher.cache_clear()


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", *argv]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", *argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "MxNxK"),
        (("8x8x8", "--config", "BLOCK_M=16"), "name it with --kernel"),
        (("8x8x8", "--config", "BLOCK_M"), "accepted is FIELD=VALUE"),
        (("8x8x8", "--gpu", "abacus"), "the name of none of these"),
        (("8x8x8", "--gpu", "nvidia"), "the name of several of these"),
        (("8x8x8", "--device", "cpu", "--why"), "--why: blas describes no tiles"),
    ],
)
def test_impossible_options_are_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert message in refused(capsys, *argv)


# -- why ---------------------------------------------------------------------------------


def test_explain_why(capsys: pytest.CaptureFixture[str], shipped: None) -> None:
    """Figures of the record, and of the model."""
    argv = ("4096x4096x4096", "--gpu", "H200", "--why")
    found = json.loads(printed(capsys, *argv, "--json"))
    config, layout = found["config"], found["layout"]
    assert found["kernel"] == "triton.warp_specialized"
    tiles = -(-4096 // config["BLOCK_M"]) * -(-4096 // config["BLOCK_N"])
    assert (layout["tiles"], layout["at_once"]) == (tiles, 132)
    assert layout["waves"] == -(-tiles // 132)
    assert layout["fill"] == pytest.approx(tiles / (132 * layout["waves"]))
    assert {"tensor cores", "L2", "memory", "launch"} == set(found["model_us"])
    assert found["flops"] == 2 * 4096**3
    assert 100 < found["measured_us"] < 300
    assert found["blas_us"] > found["measured_us"]
    more = found["changes"][0]
    assert more["fields"] == {"num_stages": config["num_stages"] + 1}
    text = printed(capsys, *argv)
    assert text.startswith("problem    4096×4096×4096 bfloat16 nn\ngpu        NVIDIA H200\n")
    assert f"measured {found['measured_us']:.4g}" in text
    assert f"num_stages={config['num_stages'] + 1}: " in text
    if found["resources"] is None:  # interpreted
        assert "compiled   not here: kernels are interpreted here" in text


@pytest.mark.parametrize("width", [80, 100])
def test_an_analysis_fits_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shipped: None
) -> None:
    monkeypatch.setattr(console, "width", lambda *_: width)
    lines = printed(capsys, "4096x4096x4096", "--gpu", "H200", "--why").splitlines()
    assert width - 20 < max(map(len, lines)) <= width


def test_why_of_a_forced_kernel_with_some_fields(
    capsys: pytest.CaptureFixture[str], shipped: None
) -> None:
    argv = ("2048x2048x2048", "--gpu", "h200", "--why", "--json", "--kernel", "triton.grouped")
    usual = json.loads(printed(capsys, *argv))
    some = json.loads(printed(capsys, *argv, "--config", "GROUP_M=1,num_stages=2"))
    assert some["config"] == {**usual["config"], "GROUP_M": 1, "num_stages": 2}
    assert some["layout"]["group_m"] == 1
    assert some["reads"]["memory_bytes"] >= usual["reads"]["memory_bytes"]
    assert "num_stages must be one of" in refused(capsys, *argv, "--config", "num_stages=99")
    assert "unknown ['GROUP']" in refused(capsys, *argv, "--config", "GROUP=1")


def test_occupancy() -> None:
    """The expected values follow CUDA's occupancy calculator for capability 9.0."""

    def held(shared: int, warps: int, registers: int) -> tuple[int, str]:
        found = why.occupancy(H200, Resources("f", shared, warps, registers, 0))
        assert found["occupancy"] == found["blocks"] * warps / 64
        return found["blocks"], found["limited_by"]

    assert held(98304, 8, 64) == (2, "shared memory")
    assert held(1024, 8, 128) == (2, "registers")
    assert held(1024, 8, 32) == (8, "registers")
    assert held(1024, 16, 16) == (4, "warps")
    assert held(0, 1, 16) == (32, "blocks")
    assert held(0, 1, 255) == (8, "registers")
    ada = DeviceFingerprint("cuda", "NVIDIA L40S", (8, 9), 142, 99 << 10)
    assert why.occupancy(ada, Resources("f", 0, 1, 16, 0))["blocks"] == 24


def test_waves_and_fill() -> None:
    about: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64, "steps": 1}
    about |= {"shared_memory": 1}
    whole = Anatomy(tiles=264, at_once=132, **about)
    more = Anatomy(tiles=265, at_once=132, **about)
    assert (whole.waves, whole.fill) == (2, 1.0)
    assert (more.waves, more.fill) == (3, 265 / 396)


def test_no_field_is_printed_empty(capsys: pytest.CaptureFixture[str], shipped: None) -> None:
    for more in ((), ("--why",)):
        out = printed(capsys, "4096x4096x4096", "--gpu", "H200", *more)
        assert "triton.warp_specialized" in out
        assert not [word for word in out.split() if word.endswith("=")]
