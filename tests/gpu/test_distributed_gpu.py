"""Tests that need several GPUs: NCCL, and one process with two devices."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import MOVED, RULES, Case, Lost, World, product, sharded_gated_mlp

import tmm_core
import tmm_core.tools.ranks
from tmm_core import dispatch, settings
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm

GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}"),
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(GPUS, "nccl")
    yield world
    world.close()


def cases(listed: list[Case]) -> Any:
    """The cases that fit the number of ranks. A mesh of 2 × 2 needs four ranks. Cases with fewer
    rows than ranks need more than two."""
    fitting = [case for case in listed if GPUS == 4 or not case.mesh]
    fitting = [case for case in fitting if GPUS > 2 or not case.name.startswith("fewer")]
    return pytest.mark.parametrize("case", fitting, ids=lambda case: case.name)


#: Rounding of a partial sum, a reduction of four of them and a gradient through them.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@dtypes
@cases(RULES)
def test_sharding_rules(world: World, case: Case, dtype: torch.dtype) -> None:
    for grad in (False, True):
        for outcome in world.run(product, case, dtype, grad):
            assert outcome.placements == case.out
            assert outcome.communications == 0
            assert max(outcome.error, *outcome.gradients.values(), 0.0) < TOLERANCE[dtype]


@dtypes
@cases(MOVED)
def test_without_a_rule_operands_are_moved(world: World, case: Case, dtype: torch.dtype) -> None:
    for grad in (False, True):
        for outcome in world.run(product, case, dtype, grad):
            assert outcome.communications > 0
            assert max(outcome.error, *outcome.gradients.values(), 0.0) < TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_a_sharded_gated_mlp_is_one_gated_product(
    world: World, learns: bool, sequence: bool, dtype: torch.dtype
) -> None:
    for outcome in world.run(sharded_gated_mlp, "cuda", dtype, learns, sequence):
        # In training the product has no epilogue, and a separate kernel computes the gate.
        assert outcome.products == ([""] if learns else ["swiglu", ""])
        assert outcome.communications == 1 + sequence
        assert max(outcome.error, *outcome.gradient_errors, 0.0) < TOLERANCE[dtype]


# -- divided tuning ------------------------------------------------------------------------

EPILOGUES = ("identity", "silu")
SHAPES = [(4096, 4096, 4096), (16, 4096, 4096), (1025, 1027, 1029)]


def tune(root: str, fatal: int | None = None, **options: Any) -> dict[str, Any]:
    """Tune with the other ranks, then multiply. The rank ``fatal`` dies when it starts to tune."""
    rank = dist.get_rank()
    # A live communicator, as in a training program.
    dist.all_reduce(torch.ones(1, device="cuda"))
    os.environ["TMM_CACHE_DIR"] = f"{root}/{rank}"
    os.environ["TMM_ON_CACHE_MISS"] = "tune"
    settings._from_environment.cache_clear()
    dispatch.default_dispatcher.cache_clear()
    warm.forget_plans()
    measured = []

    def watched(self: Dispatcher, problem: Any, *rest: Any, **more: Any) -> Any:
        if rank == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        measured.append(str(problem))
        return original(self, problem, *rest, **more)

    pairs = [
        (torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16())
        for m, n, k in SHAPES
    ]
    problems = [tmm_core.problem(a, b.t(), epilogue=e) for a, b in pairs for e in EPILOGUES]
    original = Dispatcher.tune
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Dispatcher, "tune", watched)
        records = tmm_core.tools.ranks.tune(problems, budget=4.0, **options)
    plans, errors = [], []
    for a, b in pairs:
        for epilogue in EPILOGUES:
            plan = tmm_core.plan(a, b.t(), epilogue=epilogue, on_cache_miss="error")
            plans.append((plan.kernel, plan.config, plan.origin))
            exact = warm.epilogue_of(epilogue).apply(a.double() @ b.t().double())
            got = tmm_core.matmul(a, b.t(), epilogue=epilogue, on_cache_miss="error")
            errors.append(float((got - exact).abs().max() / exact.abs().max()))
    return {
        "records": [record.to_json() for record in records],
        "plans": plans,
        "errors": errors,
        "measured": measured,
        "warnings": [str(w.message) for w in caught if "rank" in str(w.message)],
    }


def agreed(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert len(outcome["records"]) == 2 * len(SHAPES)
        assert outcome["records"] == outcomes[0]["records"]
        assert outcome["plans"] == outcomes[0]["plans"]
        assert {origin for *_, origin in outcome["plans"]} == {"cache"}
        assert max(outcome["errors"]) < 8e-3


def test_ranks_divide_the_work_and_agree(world: World, tmp_path: Path) -> None:
    outcomes = world.run(partial(tune, str(tmp_path)), timeout=240)
    agreed(outcomes)
    shares = [len(range(rank, 2 * len(SHAPES), GPUS)) for rank in range(GPUS)]
    assert [len(outcome["measured"]) for outcome in outcomes] == shares
    assert all(outcome["warnings"] == [] for outcome in outcomes)
    # On each rank's device BLAS and at least one other kernel were verified. The budget may end
    # before another kernel is compiled for every problem.
    for rank in range(GPUS):
        candidates = [c for r in outcomes[0]["records"][rank::GPUS] for c in r["candidates"]]
        verified = {c["kernel"] for c in candidates if c.get("error") is not None}
        assert {"blas"} < verified, verified


def test_a_rank_that_dies_hangs_no_other(tmp_path: Path) -> None:
    mortals = World(GPUS, "nccl")
    try:
        outcomes = mortals.run(partial(tune, str(tmp_path), fatal=1, timeout=20.0), timeout=180)
    finally:
        mortals.close()
    assert isinstance(outcomes.pop(1), Lost)
    agreed(outcomes)
    for outcome in outcomes:
        (warning,) = outcome["warnings"]
        assert warning.startswith("rank 1 showed no sign of life for 20 s")


# -- the example ---------------------------------------------------------------------------


def test_the_example_has_the_same_losses_with_and_without_tmm(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(ROOT / "examples" / "tensor_parallel_swiglu.py")
    sizes = ["--tokens", "2048", "--width", "1024", "--hidden", "4096", "--budget", "4"]
    done = subprocess.run(
        [*run, f"--nproc-per-node={GPUS}", script, *sizes, "--steps", "40"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert f"{GPUS} ranks on cuda, bfloat16" in done.stdout
    rows = re.findall(r"^ *\d+ +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    losses = [[float(loss) for loss in row] for row in rows]
    assert losses[-1][0] < 0.7 * losses[0][0]
    assert all(max(three) - min(three) < 0.02 * losses[0][0] for three in losses)


# -- two GPUs in one process ---------------------------------------------------------------

KERNELS = ("blas", "triton.naive", "triton.grouped", "triton.split_k", "triton.persistent")


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_a_device_that_is_not_current(kernel: str | None) -> None:
    """``None`` stands for the kernel that tuning on that device chooses."""
    torch.cuda.set_device(0)
    for _ in range(2):  # choosing, then replaying
        for index in (1, 0, 1):
            a = torch.randn(96, 2048, device=f"cuda:{index}").bfloat16()
            b = torch.randn(2048, 160, device=f"cuda:{index}").bfloat16()
            got = tmm_core.matmul(a, b, epilogue="relu", kernel=kernel)
            exact = torch.relu(a.double() @ b.double())
            assert got.device == a.device
            assert float((got - exact).abs().max() / exact.abs().max()) < 8e-3
            assert torch.cuda.current_device() == 0


def test_tuning_measures_on_the_operands_device() -> None:
    torch.cuda.set_device(0)
    a = torch.randn(4096, 4096, device="cuda:1").bfloat16()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    tmm_core.matmul(a, a)
    assert tmm_core.plan(a, a).origin == "tuned"
    assert torch.cuda.max_memory_allocated(0) == before


def test_capture_on_a_device_that_is_not_zero() -> None:
    with torch.cuda.device(1):
        a = torch.randn(256, 1024, device="cuda").bfloat16()
        b = torch.randn(1024, 512, device="cuda").bfloat16()
        eager = tmm_core.matmul(a, b, epilogue="silu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tmm_core.matmul(a, b, epilogue="silu")
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
