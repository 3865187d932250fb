"""`tmm tune --isolate`: a first launch that harms its process costs only that candidate.

The plugin below is installed as third parties install theirs. The ``tile`` of its config selects
the kernel's behaviour when it is launched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeTimer, Tuner, imported, problem, settings

from tmm_core import dispatch
from tmm_core.errors import TmmWarning
from tmm_core.launch import warm
from tmm_core.spec.device import fingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.tools.cli import main
from tmm_core.tuning import first_launch
from tmm_core.tuning.compile_pool import HungError
from tmm_core.tuning.first_launch import FirstLaunches

PLUGIN = """
import os, signal, sys, time
from fakes import FakeKernel, Faulty, plugin

def launched(tile):
    def launch(right, *arguments):
        with open(os.environ["LAUNCHED"], "a") as file:
            print(os.getpid(), tile, file=file)
        match tile:
            case 2: time.sleep(600)
            case 3: os._exit(3)
            case 4:
                print("so it ends", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            case 5: raise ValueError("no such layout")
            case 6: sys.exit("enough")
            case 7 if arguments[-1] is not None: raise ValueError("with an out alone")
            case 9:
                with open(os.environ["LAUNCHED"]) as file:
                    if sum(line.endswith(" 9\\n") for line in file) <= int(os.environ["WORN_OUT"]):
                        os._exit(75)
            case 8 if arguments[0].shape[-2] != 64: raise ValueError("inside the bucket alone")
        return right(*arguments)
    return launch

class Launched(FakeKernel):
    def bind(self, problem, config):
        return Faulty(launched(config.tile), self.name).bind(problem, config)

kernel = Launched("launched.one", tiles=range(1, 9), estimate=1.0)
hooks = plugin(kernel)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported(tmp_path_factory.mktemp("site"), "launched", PLUGIN) as found:
        yield found


@pytest.fixture(autouse=True)
def installed(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TMM_PLUGINS", "blas,launched")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("LAUNCHED", str(tmp_path / "launched.txt"))
    yield module
    fingerprint.cache_clear()  # later tests would find that nothing is interpreted


def launches() -> list[tuple[int, int]]:
    lines = Path(os.environ["LAUNCHED"]).read_text().splitlines()
    return [(int(pid), int(tile)) for pid, tile in (line.split() for line in lines)]


def tuned(kernel: Any, **fields: Any) -> dict[int, Any]:
    tuner = Tuner(FakeTimer({"launched.one": 5.0, "blas": 10.0}))
    with contextlib.closing(FirstLaunches(torch.device("cpu"))) as first:
        tuner.first_launches = first
        record = tuner.tune(problem(), [FakeBlas(), kernel], settings(**fields))
    assert record.best.kernel == "launched.one"
    return {c.config["tile"]: c for c in record.candidates if c.kernel == kernel.name}


@pytest.mark.slow
def test_a_faulty_first_launch_costs_its_candidate(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_launch, "LAUNCH_LIMIT", 3.0)
    found = tuned(installed.kernel)
    assert {tile: c.status for tile, c in found.items()} == {
        1: "ok", 2: "failed", 3: "failed", 4: "failed", 5: "failed", 6: "failed", 7: "failed",
        8: "ok",
    }  # fmt: skip
    reasons = {tile: c.reason for tile, c in found.items() if c.reason}
    launch = "its first launch"
    assert reasons == {
        2: f"{launch} did not end within 3 s",
        3: f"{launch}: the process ended with exit code 3",
        4: f"{launch}: the process died (signal 11, SIGSEGV): so it ends",
        5: f"{launch} raised ValueError: no such layout",
        6: f"{launch} raised SystemExit: enough",
        7: f"{launch} raised ValueError: with an out alone",
    }
    # A candidate that crashes at another M only has no time there.
    assert found[1].inside_us
    assert not found[8].inside_us
    here = {tile for pid, tile in launches() if pid == os.getpid()}
    assert here == {1, 8}
    hung = next(pid for pid, tile in launches() if tile == 2)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


def test_a_kernel_is_left_out_after_two_hangs(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FirstLaunches(torch.device("cpu"))
    late: Future[None] = Future()
    late.set_exception(HungError("its first launch did not end within 60 s"))
    monkeypatch.setattr(first, "submit", lambda *_, **more: late)
    hang = Candidate(installed.kernel, installed.kernel.default_config(None))
    messages = [str(first.failure(problem(), hang, 1 << 28)) for _ in range(4)]
    assert messages[:2] == ["its first launch did not end within 60 s"] * 2
    assert messages[2:] == ["not tried: 2 other configs of it hung in their first launch"] * 2
    assert "did not end" in str(first.failure(problem(n=48), hang, 1 << 28))


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.slow
def test_a_worn_out_worker_is_replaced_and_its_job_done_again(
    times: int, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that destroys the CUDA context wears a worker out. Replacements are limited."""
    monkeypatch.setenv("WORN_OUT", str(times))
    kernel = installed.kernel
    asked = Candidate(kernel, type(kernel.default_config(None))(tile=9))
    with contextlib.closing(FirstLaunches(torch.device("cpu"))) as first:
        failure = first.failure(problem(), asked, 1 << 28)
    pids = len({pid for pid, _ in launches()})
    if times == 1:
        assert (failure, pids) == (None, 2)
    else:
        assert str(failure) == "its first launch: the process ended with exit code 75"
        assert pids == 4


def test_where_no_process_can_be_had_this_one_launches(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    kernel = installed.Launched("launched.one", tiles=(1,), estimate=1.0)
    with pytest.warns(TmmWarning, match="first launches are made in this process") as caught:
        found = tuned(kernel)
    assert len(caught) == 1
    assert found[1].status == "ok"


@pytest.mark.slow
def test_ctrl_c_stops_at_once_and_leaves_no_process(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = installed.kernel
    hang = Candidate(kernel, type(kernel.default_config(None))(tile=2))
    first = FirstLaunches(torch.device("cpu"))
    submit = first.submit

    def submitted(*arguments: Any, **more: Any) -> Future[None]:
        launch = submit(*arguments, **more)

        def interrupted() -> None:
            while not Path(os.environ["LAUNCHED"]).exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

        monkeypatch.setattr(launch, "result", interrupted)
        return launch

    monkeypatch.setattr(first, "submit", submitted)
    with pytest.raises(KeyboardInterrupt):
        first.failure(problem(), hang, 1 << 28)
    started = time.monotonic()
    first.close()
    assert time.monotonic() - started < 5
    ((pid, _),) = launches()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_the_command_isolates(
    installed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed.kernel, "tiles", (1, 5))
    dispatch.default_dispatcher.cache_clear()
    warm.forget_plans()
    arguments = ["tune", "64x32x16", "--dtype", "fp32", "--device", "cpu", "--isolate", "--json"]
    assert main(arguments) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["status"] == "tuned"
    assert outcome["candidates"]["failed"] >= 1
    assert dispatch.default_dispatcher().tuner.first_launches is None
    assert {tile for pid, tile in launches() if pid == os.getpid()} == {1}
