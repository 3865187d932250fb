"""Time estimates of all kernels, from one machine model, compared with the shipped records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tmm_cache import CacheStore

import tmm_core
from tmm_core import Machine, Operand, Problem, dispatch, settings
from tmm_core.dispatch import heuristic
from tmm_core.dispatch.neighbour import Neighbours
from tmm_core.spec import machine
from tmm_core.spec.device import DeviceFingerprint

RECORDS = Path(tmm_core.__file__).parent / "records"
H200 = DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448, 62914560)
H100 = DeviceFingerprint("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 52428800)
DECODE = Problem(
    16, 28672, 4096, Operand(torch.bfloat16), Operand(torch.bfloat16, "col"),
    Operand(torch.bfloat16), H200,
)  # fmt: skip


def estimates(problem: Problem) -> dict[str, float]:
    kernels = dispatch.default_dispatcher().registry.kernels()
    able = [kernel for kernel in kernels if not kernel.reasons_against(problem)]
    return {k.name: k.estimate_us(problem, k.default_config(problem)) or math.nan for k in able}


def test_all_estimates_start_from_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half the bandwidth everything bound by memory takes about twice as long."""
    before = estimates(DECODE)
    unaligned = replace(DECODE, b=Operand(torch.bfloat16, "col", aligned=False))
    copied = estimates(unaligned)["triton.realigned"]
    monkeypatch.setitem(machine._MEMORY, "H200", machine._MEMORY["H200"] / 2)
    after = estimates(DECODE) | {"triton.realigned": estimates(unaligned)["triton.realigned"]}
    before["triton.realigned"] = copied
    assert {"blas", "triton.warp_specialized", "triton.skinny", "triton.split_k"} < before.keys()
    for name, time in before.items():
        assert 1.5 * time < after[name] <= 2 * time, name


@pytest.mark.parametrize("capability", [(8, 0), (9, 4)])
def test_a_gpu_without_data_gets_estimated_rates(capability: tuple[int, int]) -> None:
    device = replace(H200, name="Some GPU", capability=capability, sm_count=100)
    assert Machine.of(device).memory == 8e5
    assert Machine.of(replace(device, sm_count=200)).memory == 1.6e6
    assert Machine.of(replace(device, sm_count=0)).sms == 1


@pytest.mark.parametrize(("size", "us"), [(34e6, 19), (117e6, 43), (235e6, 71)])
def test_reads_take_the_time_that_was_measured(size: float, us: float) -> None:
    machine = Machine.of(H200)
    assert machine.EMPTY_US + machine.moving_us(size) == pytest.approx(us, rel=0.07)
    # A read evicts no more bytes than it reads.
    one, two = (machine.moving_us(size) - machine.RAMP_US for size in (1e6, 2e6))
    assert two == pytest.approx(2 * one)


def test_rates_by_dtype() -> None:
    def rate(dtype: torch.dtype, **fields: Any) -> float:
        operand = Operand(dtype)
        problem = replace(DECODE, a=operand, b=operand, **fields)
        return Machine.of(H200).flops(problem) / Machine.of(H200).tensor

    assert rate(torch.bfloat16) == rate(torch.float16) == 1
    assert rate(torch.float8_e4m3fn) == 2
    assert rate(torch.float32, tf32=True) == 0.5
    assert rate(torch.float64) < rate(torch.float32) < 0.1


@pytest.mark.parametrize(
    ("folder", "device"),
    [("nvidia-h200-sm90-132", H200), ("nvidia-h100-80gb-hbm3-sm90-132", H100)],
)
@pytest.mark.slow
def test_untuned_choices_are_good_where_times_are_known(
    folder: str, device: DeviceFingerprint, tmp_path: Path
) -> None:
    """In the shipped records, untuned choices take less than 10 % longer than the best in geometric
    mean. Few take longer than BLAS. A config that is not on record counts as the kernel's best."""
    dispatcher = dispatch.default_dispatcher()
    registry = dispatcher.registry
    nothing_near = Neighbours(CacheStore(tmp_path, []))
    to_best: list[float] = []
    to_blas: list[float] = []
    for path in sorted((RECORDS / "v2" / folder).glob("*/*.json")):
        document = json.loads(path.read_text())
        if "problem" not in document:
            continue
        epilogue = registry.epilogue(document["problem"]["epilogue"])
        problem = Problem.from_json(document["problem"], device, epilogue)
        if problem.batch_invariant:  # answered by an arithmetic for all M, not by BLAS
            continue
        times: dict[str, dict[str, float]] = {}
        for result in document["candidates"]:
            if samples := result.get("samples_us"):
                config = json.dumps(result["config"], sort_keys=True)
                times.setdefault(result["kernel"], {})[config] = median(samples)
        able, _ = registry.candidates(problem, settings.current())
        guess = heuristic.choose(dispatcher, nothing_near, problem, able, "")
        assert guess is not None
        chosen, config = guess.candidate.kernel.name, guess.candidate.config.to_json()
        known = times.get(chosen, {})
        time = known.get(json.dumps(config, sort_keys=True)) or min(known.values(), default=None)
        if time and "blas" in times:
            to_blas.append(time / min(times["blas"].values()))
            to_best.append(time / min(min(by_config.values()) for by_config in times.values()))
    assert len(to_best) > 100
    assert math.exp(sum(map(math.log, to_best)) / len(to_best)) < 1.1
    assert sum(ratio > 1.005 for ratio in to_blas) < 0.15 * len(to_blas)
