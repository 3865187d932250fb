"""Sharded operands and divided tuning, on four ranks of gloo."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fakes import FakeBlas, FakeKernel, dispatcher, problem, settings
from ranks import (
    MOVED,
    RULES,
    Case,
    Lost,
    Outcome,
    World,
    gated_mlp_of_sharded_input,
    integers_split_along_k,
    placements,
    product,
    sharded_gated_mlp,
    spell,
)
from tmm_cache import CacheStore
from torch import nn

import tmm_core
import tmm_core.tools.ranks
from tmm_core import compat, dispatch
from tmm_core.launch import warm
from tmm_core.nn import convert
from tmm_core.tuning.tuner import Tuner

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


@pytest.fixture
def mortals() -> Iterator[World]:
    """Ranks that may die."""
    world = World(4)
    yield world
    world.close()


# -- sharding rules ------------------------------------------------------------------------


def double(case: Case, grad: bool) -> Outcome:
    return product(case, torch.float64, grad)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
@pytest.mark.slow(quick=6)
def test_a_rule_computes_on_shards_as_they_are_placed(world: World, case: Case, grad: bool) -> None:
    for outcome in world.run(double, case, grad):
        assert outcome.placements == case.out
        assert outcome.communications == 0
        assert outcome.repeats
        # A replicated term of a sum is divided among the ranks first.
        terms = "P" in case.out and (case.bias, case.residual) != (None, None)
        assert outcome.in_place == (not grad and not terms)
        assert outcome.error < 1e-14
        assert all(error < 1e-13 for error in outcome.gradients.values()), outcome.gradients


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", MOVED, ids=lambda case: case.name)
@pytest.mark.slow(quick=6)
def test_without_a_rule_operands_are_moved(world: World, case: Case, grad: bool) -> None:
    for outcome in world.run(double, case, grad):
        assert outcome.communications > 0
        assert outcome.repeats
        assert not outcome.in_place
        # With gradients the epilogue is torch's, and DTensor may leave a factor of it partial.
        assert grad or "P" not in outcome.placements.split()
        assert outcome.error < 1e-14
        assert all(error < 1e-13 for error in outcome.gradients.values()), outcome.gradients


def unequal_rows(rows: int, epilogue: str | None) -> float | None:
    """The largest error of the gradients of a sequence in unequal shards, in parts of the largest
    number; None if torch's own product has none."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh
    from torch.nn.functional import linear

    mesh = init_device_mesh("cpu", (4,))
    chance = torch.Generator().manual_seed(6)
    whole = [torch.randn(shape, generator=chance).double() for shape in ((3, rows, 8), (4, 8))]
    sharded = [
        distribute_tensor(t, mesh, placements(text)).requires_grad_()
        for t, text in zip(whole, ("S1", "R"), strict=True)
    ]
    for t in whole:
        t.requires_grad_()
    try:
        linear(*sharded).sum().backward()
    except RuntimeError:  # torch 2.10
        return None
    errors = []
    for t in sharded:
        t.grad = None
    tmm_core.linear(*sharded, epilogue=epilogue).square().sum().backward()
    tmm_core.linear(*whole, epilogue=epilogue).square().sum().backward()
    for t, own in zip(whole, sharded, strict=True):
        errors.append((own.grad.full_tensor() - t.grad).abs().max() / t.grad.abs().max())
    return float(max(errors))


@pytest.mark.parametrize(("rows", "epilogue"), [(5, None), (7, "relu"), (10, "silu")])
def test_unequal_shards_of_a_sequence_have_gradients(
    world: World, rows: int, epilogue: str | None
) -> None:
    for error in world.run(unequal_rows, rows, epilogue):
        if error is None:
            pytest.skip("this torch's own product has no gradients of them")
        assert error < 1e-13


#: Grouped products: shapes of a and b, then placements of a, b and the result.
GROUPED = {
    "N": (((12, 16), (3, 16, 8)), ("R", "S2", "S1"), {"bias": "S1", "residual": "S1"}),
    "K": (((12, 16), (3, 16, 8)), ("S1", "S1", "P"), {"bias": "R"}),
    "M of sums": (((8, 12), (12, 4)), ("S0", "R", "S1"), {}),
    "M of columns": (((3, 8, 16), (16, 12)), ("S1", "R", "S0"), {}),
}


def bias_of_shards(shape: tuple[int, ...], placed: str, epilogue: str | None) -> float:
    """The error of a product of shards whose bias broadcasts to it."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    chance = torch.Generator().manual_seed(7)
    whole = [torch.randn(n, generator=chance).double() for n in ((6, 5, 8), (12, 8), shape)]
    sharded = [
        distribute_tensor(t, mesh, placements(text))
        for t, text in zip(whole, ("S0", "R", placed), strict=True)
    ]
    y = tmm_core.linear(*sharded, epilogue=epilogue)
    expected = tmm_core.linear(*whole, epilogue=epilogue)
    return float((y.full_tensor() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("shape", "placed", "epilogue"),
    [
        ((), "R", None), ((5, 12), "S1", "silu"), ((6, 5, 12), "S0", None), ((1,), "S0", "silu"),
        ((1, 1), "S1", None), ((1, 12), "S0", "relu"),
    ],
)  # fmt: skip
def test_a_bias_of_shards_broadcasts(
    world: World, shape: tuple[int, ...], placed: str, epilogue: str | None
) -> None:
    assert max(world.run(bias_of_shards, shape, placed, epilogue)) < 1e-14


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def trained_under_fsdp(axes: int, reshards: bool) -> float:
    """The largest difference between a gated MLP that FSDP gathers and the same MLP alone, while
    both are trained. The second of two axes of the mesh divides the columns of gate and up.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(8)
    alone = nn.Sequential(Gated(), nn.Linear(8, 8)).double()
    model = copy.deepcopy(alone)
    x = torch.randn(3, 8).double()
    if axes == 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "columns"))
        convert(model)
        plan = {"0.gate_proj": ColwiseParallel(), "0.up_proj": ColwiseParallel()}
        parallelize_module(model, mesh["columns"], {**plan, "0.down_proj": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"], reshard_after_forward=reshards)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=reshards)
        with torch.no_grad():
            model(x)
        convert(model)
    worst = 0.0
    for _ in range(3):
        worst = max(worst, float((model(x) - alone(x)).abs().max()))
        for each in (model, alone):
            each(x).square().sum().backward()
            torch.optim.SGD(each.parameters(), lr=0.01).step()
            each.zero_grad()
    return worst


@pytest.mark.parametrize(("axes", "reshards"), [(2, True), (2, False), (1, False)])
def test_weights_that_fsdp_gathers_are_not_moved(world: World, axes: int, reshards: bool) -> None:
    assert max(world.run(trained_under_fsdp, axes, reshards)) < 1e-12


def cast_by_flat_fsdp(original: bool) -> float:
    """The error of a converted gated MLP of FullyShardedDataParallel that is cast and cast back."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(9)
    alone = nn.Sequential(Gated())
    model = copy.deepcopy(alone)
    convert(model)
    one = torch.device("cpu")
    model = FullyShardedDataParallel(model, device_id=one, use_orig_params=original)
    x = torch.randn(3, 8)
    with torch.no_grad():
        model(x)
        model.double().float()
        return float((model(x) - alone(x)).abs().max())


@pytest.mark.parametrize("original", [True, False])
def test_flat_fsdp_casts_a_gated_mlp(world: World, original: bool) -> None:
    assert max(world.run(cast_by_flat_fsdp, original)) < 1e-6


def sharded_in(mode: str) -> bool:
    """Whether a gated MLP learns after its shards were joined by a call in ``mode``."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(Gated())
    convert(model)
    plan = {"0.gate_proj": ColwiseParallel(), "0.up_proj": ColwiseParallel()}
    plan_of_all = {**plan, "0.down_proj": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (4,)), plan_of_all)
    x = torch.randn(3, 8, requires_grad=True)
    with getattr(torch, mode)():
        model(x)
    model(x).square().sum().backward()
    return all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "enable_grad"])
def test_a_sharded_gated_mlp_trains_after_inference(world: World, mode: str) -> None:
    assert all(world.run(sharded_in, mode))


def grouped(name: str) -> tuple[str, str, float]:
    """Expected and actual placements, and the largest error of the result and of both gradients."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    shapes, (of_a, of_b, of_result), terms = GROUPED[name]
    chance = torch.Generator().manual_seed(1)
    width = shapes[1][-1]
    shaped = {"a": shapes[0], "b": shapes[1], "bias": (3, width), "residual": (12, width)}
    placed = {"a": of_a, "b": of_b, **terms}
    whole = {
        name: torch.randn(shaped[name], generator=chance, dtype=torch.float64).requires_grad_()
        for name in placed
    }
    sharded = {
        name: distribute_tensor(t.detach(), mesh, placements(placed[name])).requires_grad_()
        for name, t in whole.items()
    }
    ends = torch.tensor([3, 3, 12], dtype=torch.int32)
    epilogue = "scale(0.5)" if of_result == "P" else None
    got = tmm_core.grouped_matmul(
        **sharded, offs=distribute_tensor(ends, mesh, placements("R")), epilogue=epilogue
    )
    expected = tmm_core.grouped_matmul(**whole, offs=ends, epilogue=epilogue)
    errors = [float((got.full_tensor() - expected).abs().max())]
    got.sum().backward()
    expected.sum().backward()
    for name, t in sharded.items():
        errors.append(float((t.grad.full_tensor() - whole[name].grad).abs().max()))
    return of_result, spell(got.placements), max(errors)


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_of_shards(world: World, name: str) -> None:
    for expected, found, error in world.run(grouped, name):
        assert found == expected
        assert error < 1e-12


def batch_of_groups(placed: str, epilogue: str | None) -> float:
    """The error of a product of groups without ``offs``, each with a bias."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    chance = torch.Generator().manual_seed(8)
    a, b, bias = (
        torch.randn(n, generator=chance).double() for n in ((4, 6, 8), (4, 8, 12), (4, 12))
    )
    texts = zip((a, b, bias), placed.split(), strict=True)
    sharded = [distribute_tensor(t, mesh, placements(text)) for t, text in texts]
    expected = warm.epilogue_of(epilogue or "").apply(a @ b + bias[:, None])
    errors = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            out = tmm_core.grouped_matmul(*sharded[:2], bias=sharded[2], epilogue=epilogue)
            errors.append((out.full_tensor() - expected).abs().max() / expected.abs().max())
    return float(max(errors))


@pytest.mark.parametrize(
    ("placed", "epilogue"), [("S0 S0 S0", None), ("R S2 S1", "swiglu"), ("S1 R R", "silu")]
)
def test_a_batch_of_groups_of_shards_has_a_bias_each(
    world: World, placed: str, epilogue: str | None
) -> None:
    assert max(world.run(batch_of_groups, placed, epilogue)) < 1e-14


#: 8-bit operands: shapes of a, b and the scales, then placements of these and of the result.
SCALED = {
    "N": (((12, 16), (3, 16, 8), (12,), (3, 8)), ("R", "S2", "R", "S1"), "S1"),
    "K": (((12, 16), (3, 16, 8), (12,), (1,)), ("S1", "S1", "R", "R"), "P"),
    "M of sums": (((8, 12), (12, 4), (3, 8), (12,)), ("S0", "R", "S1", "R"), "S1"),
    "M of columns": (((3, 8, 16), (16, 12), (3, 8), (12,)), ("S1", "R", "S1", "R"), "S0"),
}


def grouped_scaled(name: str) -> tuple[str, float]:
    """Placements found, and the largest error."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    shapes, placed, _ = SCALED[name]
    chance = torch.Generator().manual_seed(1)
    names = ("a", "b", "scale_a", "scale_b")
    whole, sharded = {}, {}
    for each, shape, text in zip(names, shapes, placed, strict=True):
        t = torch.rand(shape, generator=chance) + 0.5
        t = t.to(torch.float8_e4m3fn) if each in "ab" else t
        (place,) = placements(text)
        # Made from local parts: gloo moves no 8-bit floats.
        mine = (
            t.chunk(4, place.dim)[dist.get_rank()].contiguous() if isinstance(place, Shard) else t
        )
        whole[each], sharded[each] = t, DTensor.from_local(mine, mesh, [place], run_check=False)
    ends = torch.tensor([3, 3, 12], dtype=torch.int32)
    given = {"out_dtype": torch.float32}
    offs = DTensor.from_local(ends, mesh, placements("R"), run_check=False)
    got = tmm_core.grouped_matmul(**sharded, offs=offs, **given)
    expected = tmm_core.grouped_matmul(**whole, offs=ends, **given)
    return spell(got.placements), float((got.full_tensor() - expected).abs().max())


@pytest.mark.parametrize("name", SCALED)
def test_scales_go_with_the_rows_of_their_operands(world: World, name: str) -> None:
    for found, error in world.run(grouped_scaled, name):
        assert found == SCALED[name][2]
        assert error < 1e-4


@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_a_sharded_gated_mlp_is_one_gated_product(
    world: World, learns: bool, sequence: bool
) -> None:
    for outcome in world.run(sharded_gated_mlp, "cpu", torch.float64, learns, sequence):
        # On a CPU torch computes the gate of a product that needs gradients.
        assert outcome.products == (["", "", ""] if learns else ["swiglu", ""])
        # One gathers the input, one sums the down projection; gate and up projection need no other.
        assert outcome.communications == 1 + sequence
        assert outcome.error < 1e-14
        assert all(error < 1e-13 for error in outcome.gradient_errors), outcome.gradient_errors


def test_a_sharded_gated_mlp_of_a_sharded_input(world: World) -> None:
    for epilogues, error in world.run(gated_mlp_of_sharded_input):
        assert "swiglu" not in epilogues[:3]  # the last are of the layer that is not sharded
        assert error < 1e-14


def test_terms_of_integers_are_not_divided_among_ranks(world: World) -> None:
    for placed, error in world.run(integers_split_along_k):
        assert placed != "P"
        assert error == 0


def epilogues_in_turn() -> list[tuple[str, float]]:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    a, b = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).double()
    sharded = (
        distribute_tensor(a, mesh, placements("S1")),
        distribute_tensor(b.t(), mesh, placements("S0")),
    )
    turns = []
    for name in ("", "relu", "scale(2)", "silu", ""):
        got = tmm_core.matmul(*sharded, epilogue=name or None)
        expected = warm.epilogue_of(name).apply(a @ b.t())
        turns.append((spell(got.placements), float((got.full_tensor() - expected).abs().max())))
    return turns


def dtypes_in_turn() -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtype by which DTensor places operators of each result, and that of its local tensor."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    a = torch.ones(8, 16, dtype=torch.bfloat16)
    sharded = distribute_tensor(a, init_device_mesh("cpu", (4,)), placements("S0"))
    b = distribute_tensor(a.t(), sharded.device_mesh, placements("R"))
    turns = []
    for dtype in (None, torch.float32, None, torch.float32, torch.bfloat16):
        got: Any = tmm_core.matmul(sharded, b, out_dtype=dtype)
        turns.append((compat.dtensor_spec(got).tensor_meta.dtype, got.to_local().dtype))
    return turns


def outputs_of_shards() -> str:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    amax = tmm_core.Port("amax", "row", reduce="max")
    epilogue = tmm_core.Epilogue("with_amax", torch.relu, outputs=(amax,))
    a = distribute_tensor(torch.ones(4, 8), init_device_mesh("cpu", (4,)), placements("S1"))
    try:
        tmm_core.matmul(a, a.t(), epilogue=epilogue)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_outputs_of_sharded_products_are_refused(world: World) -> None:
    message = "epilogue outputs (amax) have no sharding rule for DTensor"
    assert world.run(outputs_of_shards) == [message] * 4


def test_a_decision_for_one_epilogue_is_not_taken_for_another(world: World) -> None:
    for turns in world.run(epilogues_in_turn):
        assert [placed for placed, _ in turns if placed == "P"] == ["P"] * 3
        assert [placed for placed, _ in turns][::2] == ["P"] * 3
        assert max(error for _, error in turns) < 1e-14


def test_a_decision_for_one_dtype_is_not_taken_for_another(world: World) -> None:
    narrow, wide = (torch.bfloat16,) * 2, (torch.float32,) * 2
    assert world.run(dtypes_in_turn) == [[narrow, wide, narrow, wide, narrow]] * 4


def of_two_ranks() -> list[tuple[float, tuple[int, ...]]]:
    """The error of a product of the first two ranks, and the shape that each rank sees, by call."""
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(3)
    whole = [torch.randn(6, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)]
    a = distribute_tensor(whole[0], mesh, placements("S0"))
    b = distribute_tensor(whole[1], mesh, placements("R"))
    found = []
    for _ in range(3):
        with torch.no_grad():
            y: Any = tmm_core.matmul(a, b)
        right = (whole[0] @ whole[1]).chunk(2)[dist.get_rank()] if dist.get_rank() < 2 else None
        local = y.to_local()
        error = float(local.numel() if right is None else (local - right).abs().max())
        found.append((error, tuple(y.shape)))
    return found


def test_ranks_outside_of_a_mesh_compute_nothing(world: World) -> None:
    for found in world.run(of_two_ranks):
        assert all(error < 1e-14 and shape == (6, 5) for error, shape in found)


def of_two_meshes() -> list[str]:
    """What is raised for operands of different meshes, by call."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    a = distribute_tensor(torch.ones(4, 8), flat, placements("S0"))
    b = distribute_tensor(torch.ones(8, 4), square, placements("R R"))
    raised = []
    for pair in [(a, b), (a, b), (b, a)]:
        with torch.no_grad(), pytest.raises(RuntimeError) as caught:
            tmm_core.matmul(*pair)
        raised.append(str(caught.value))
    return raised


def test_operands_of_different_meshes_are_refused(world: World) -> None:
    for raised in world.run(of_two_meshes):
        assert all("does not support cross-mesh operation" in text for text in raised)


def bias_then_residual() -> float:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    a, b = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    rows = distribute_tensor(a, mesh, placements("S0"))
    whole = distribute_tensor(b, mesh, placements("R"))
    vector = distribute_tensor(b[0], mesh, placements("S0"))  # to be gathered
    with_bias = tmm_core.matmul(rows, whole, bias=vector, epilogue="relu")
    with_residual = tmm_core.matmul(rows, whole, residual=vector, epilogue="relu")
    errors = (
        with_bias.full_tensor() - torch.relu(a @ b + b[0]),
        with_residual.full_tensor() - (torch.relu(a @ b) + b[0]),
    )
    return max(float(error.abs().max()) for error in errors)


def scaled(of_a: str, of_b: str) -> tuple[str, float]:
    """The placement of the product of 8-bit operands with these placements, and its error. Scales
    of rows and columns that are sharded are sharded alike."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 32, 32, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = torch.rand(2, 32, generator=generator) + 0.5
    rows, columns = rows[:, None], columns[None, :]

    def sharded(t: torch.Tensor, spelled: str) -> DTensor:
        # Gloo moves no 8-bit floats: each rank takes its part.
        (placed,) = placements(spelled)
        rank = torch.distributed.get_rank()
        local = t.chunk(4, placed.dim)[rank] if isinstance(placed, Shard) else t
        return DTensor.from_local(local.contiguous(), mesh, [placed], run_check=False)

    y = tmm_core.matmul(
        sharded(a, of_a),
        sharded(b, of_b),
        scale_a=distribute_tensor(rows, mesh, placements("S0" if of_a == "S0" else "R")),
        scale_b=distribute_tensor(columns, mesh, placements("S1" if of_b == "S1" else "R")),
        out_dtype=torch.float32,
    )
    expected = (a.double() * rows) @ (b.double() * columns)
    return spell(y.placements), float((y.full_tensor() - expected).abs().max())


@pytest.mark.parametrize(
    ("of_a", "of_b", "of_y"), [("S0", "R", "S0"), ("R", "S1", "S1"), ("S1", "S0", "P")]
)
def test_scales_are_placed_like_their_operands(
    world: World, of_a: str, of_b: str, of_y: str
) -> None:
    for placed, error in world.run(partial(scaled, of_a, of_b)):
        assert placed == of_y
        assert error < 1e-4


class Stored(NamedTuple):
    """A product with a quantised weight ``[N, K]``, or one for each of three groups. Placements of
    ``x``, of the weight's numbers and scales, and of the result."""

    format: str
    n: int
    k: int
    block: tuple[int, int]
    x: str
    weight: str
    scale: str
    result: str
    grouped: bool = False


#: Scales by row, by group and by block. Some shards divide blocks, others do not.
STORED = [
    Stored("int8", 32, 64, (1, 0), "R", "S0", "S0", "S1"),
    Stored("int8", 30, 96, (1, 32), "R", "S0", "S0", "S1"),
    Stored("int8", 32, 128, (1, 32), "S1", "S1", "S1", "P"),
    Stored("int8", 32, 128, (1, 32), "S1", "S1", "R", "P"),
    Stored("int8", 32, 96, (1, 32), "S1", "S1", "R", "R"),
    Stored("int4", 32, 128, (1, 32), "S1", "S1", "S1", "P"),
    Stored("int4", 32, 66, (1, 0), "S1", "S1", "R", "R"),
    Stored("mxfp4", 32, 128, (1, 32), "S1", "S1", "S1", "P"),
    Stored("blocked", 64, 128, (8, 32), "R", "S0", "S0", "S1"),
    Stored("blocked", 60, 128, (8, 32), "R", "S0", "S0", "R"),
    Stored("blocked", 8, 128, (8, 32), "R", "S0", "R", "S1"),
    Stored("blocked", 64, 128, (8, 32), "S1", "S1", "S1", "P"),
    Stored("int8", 32, 128, (1, 32), "R", "S1", "S1", "S1", grouped=True),
    Stored("int4", 32, 128, (1, 32), "S1", "S2", "S2", "P", grouped=True),
    Stored("blocked", 60, 128, (8, 32), "R", "S1", "S1", "R", grouped=True),
]


def stored_product(case: Stored) -> tuple[str, float]:
    """The placement of the result, and its largest error, in parts of the largest number."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    from tmm_core import formats

    if "blocked" not in formats.FORMATS:
        formats.add(replace(formats.named("int8"), name="blocked", grids=((8, 32),)))
    mesh = init_device_mesh("cpu", (4,))
    chance = torch.Generator().manual_seed(4)
    count = 3 if case.grouped else 1
    values = torch.randn(count, case.n, case.k, generator=chance)
    each = [tmm_core.quantize(matrix, case.format, block=case.block) for matrix in values]
    parts = [torch.stack([getattr(w, name) for w in each]) for name in ("stored", "scale")]
    stored, scale = parts if case.grouped else (part[0] for part in parts)
    how = {"format": case.format, "block": each[0].block}
    x = torch.randn(9, case.k, generator=chance).bfloat16()
    ends = torch.tensor([2, 5, 9], dtype=torch.int32)
    placed = zip((x, stored, scale, ends), (case.x, case.weight, case.scale, "R"), strict=True)
    sharded = [distribute_tensor(t, mesh, placements(text)) for t, text in placed]
    weight = tmm_core.Quantized(sharded[1], sharded[2], **how)
    dense = tmm_core.Quantized(stored, scale, **how).dequantize().double()
    if case.grouped:
        y = tmm_core.grouped_linear(sharded[0], weight, offs=sharded[3])
        expected = tmm_core.grouped_linear(x.double(), dense, offs=ends)
    else:
        y = tmm_core.linear(sharded[0], weight)
        expected = x.double() @ dense.t()
        if case.result != "R":  # torch reshapes no shards of other sizes
            whole = distribute_tensor(values[0], mesh, placements(case.weight))
            again = tmm_core.quantize(whole, case.format, block=case.block)
            for found in (weight, again):
                assert torch.equal(found.dequantize().full_tensor().double(), dense)
    error = (y.full_tensor().double() - expected).abs().max() / expected.abs().max()
    return spell(y.placements), float(error)


@pytest.mark.parametrize("case", STORED, ids=lambda case: " ".join(map(str, case)))
def test_shards_of_quantised_weights_hold_whole_blocks(world: World, case: Stored) -> None:
    for placed, error in world.run(stored_product, case):
        assert placed == case.result
        assert error < 2e-2


#: Wrappers of quantised parameters on several ranks (docs/shard.md).
WRAPPERS = (
    "DDP", "DDP that sends", "FSDP", "fully_shard", "fully_shard all", "inference mode",
    "full state_dict",
)  # fmt: skip


def wrapped(kind: str) -> float | str:
    """The error of a product by a quantised weight of a wrapped model, or why there is none."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    report = convert(model[1:], weights="int4")
    assert report.changes
    quantised, x = model[1].weight, torch.randn(5, 64)
    expected = nn.functional.linear(model[0](x), quantised.dequantize(), model[1].bias)
    parts = (distribute_tensor(t, mesh) for t in (quantised.stored, quantised.scale))
    weight = tmm_core.Quantized(*parts, format="int4", block=quantised.block)
    sends = kind == "DDP that sends"
    try:
        with torch.inference_mode(kind == "inference mode"), torch.no_grad():
            if kind.startswith("DDP"):
                model = nn.parallel.DistributedDataParallel(model, init_sync=sends)
            elif kind == "FSDP":
                model = FullyShardedDataParallel(
                    model, device_id=torch.device("cpu"), ignored_states=[quantised]
                )
            elif kind == "full state_dict":
                whole, model = model.state_dict(), copy.deepcopy(model)
                model[1].weight.stored.zero_()
                set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
            elif kind == "inference mode":  # its parts are shards
                x = distribute_tensor(model[0](x), mesh)
                y = tmm_core.linear(x, weight, distribute_tensor(model[1].bias, mesh))
                return float((y.full_tensor() - expected).abs().max())
            else:
                ignored = set() if kind.endswith("all") else {quantised}
                fully_shard(model, mesh=mesh, ignored_params=ignored)
            return float((model(x) - expected).abs().max())
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_of_quantised_parameters(world: World, kind: str) -> None:
    refused = kind in ("DDP that sends", "fully_shard all")
    for found in world.run(wrapped, kind):
        if refused:
            assert "DDP takes quantised parameters with init_sync=False, and FSDP" in str(found)
        else:
            assert isinstance(found, float), found
            assert found < 1e-2


def test_a_bias_is_not_taken_for_a_residual(world: World) -> None:
    assert max(world.run(bias_then_residual)) < 1e-13


def compiled() -> list[float]:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    whole = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(3)).double()
    torch.nn.functional.silu(whole.requires_grad_()[0] @ whole[1]).sum().backward()
    assert whole.grad is not None
    sharded = [
        distribute_tensor(t.detach(), mesh, placements(place)).requires_grad_()
        for t, place in zip(whole, ("R", "S1"), strict=True)
    ]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def silu(a: Any, b: Any) -> torch.Tensor:
        return tmm_core.matmul(a, b, epilogue="silu")

    silu(*sharded).sum().backward()
    grads = [t.grad.full_tensor() for t in sharded]  # type: ignore[union-attr]
    return [float((x - y).abs().max()) for x, y in zip(grads, whole.grad, strict=True)]


@pytest.mark.slow
def test_compiled(world: World) -> None:
    for errors in world.run(compiled):
        assert max(errors) < 1e-13


FIRST_CALLS = """
import os, sys
import torch, tmm_core
assert "torch.distributed.tensor" not in sys.modules
a = torch.randn(4, 4)
tmm_core.matmul(torch.nn.Parameter(a), a)
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.tensor import DTensor, init_device_mesh
sharded = DTensor.from_local(a, init_device_mesh("cpu", (1,)))
# A process knows the rules after its first such call.
firsts = {
    "plain": lambda: tmm_core.matmul(sharded, sharded),
    "not in place": lambda: tmm_core.matmul(sharded, sharded, alpha=1),
    "out": lambda: tmm_core.matmul(sharded, sharded, out=torch.empty_like(sharded)),
    "batched": lambda: tmm_core.grouped_matmul(sharded[None], sharded[None])[0],
    "compiled": lambda: torch.compile(backend="eager", fullgraph=True)(tmm_core.matmul)(
        sharded, sharded
    ),
}
for name, first in firsts.items():
    if not os.fork():
        try:
            print(name, torch.equal(first().to_local(), a @ a), flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_the_first_dtensor_brings_its_rules() -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    run = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(run, check=True, capture_output=True, text=True, env=environ)
    calls = "plain", "not in place", "out", "batched", "compiled"
    assert done.stdout.splitlines() == [f"{call} True" for call in calls]


# -- divided tuning ------------------------------------------------------------------------

COUNT = 6
#: M of the problems; others in its bucket are measured with it.
EDGE = 64


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning on one rank."""

    records: list[dict[str, Any]]
    #: (kernel, origin) of the choice for each problem.
    choices: list[tuple[str, str]]
    #: N of the problems that this rank measured, less 32.
    measured: list[int]
    warnings: list[str]
    seconds: float


def tuned(
    root: str,
    *,
    before: Callable[[int], None] = lambda index: None,
    alone: bool = False,
    versions: str = "1111",
    **options: Any,
) -> Tuned:
    """Tune :data:`COUNT` problems with the others. Left alone, ranks would choose differently:
    the even ones find ``x`` faster, the odd ones ``y``.

    Args:
        root: Of a rank's cache; ``{rank}`` stands for it.
        before: Called with a problem's index as it is measured.
        alone: Have each rank tune all problems for itself first.
        versions: Of kernel ``y`` on each rank.
    """
    rank = dist.get_rank()

    class Watched(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            if problem.m == EDGE:
                before(problem.n - 32)
            return super().bind(problem, config)

    x = Watched("x")
    times = {"blas": 10.0, "x": 5.0 + rank % 2, "y": 6.0 - rank % 2}
    kernels = (FakeBlas(), x, FakeKernel("y", version=versions[rank]))
    chooser, _ = dispatcher(*kernels, times=times, root=Path(root.format(rank=rank)))
    dispatch.default_dispatcher = lambda: chooser  # type: ignore[assignment]
    problems = [problem(m=EDGE, n=32 + index) for index in range(COUNT)]
    if alone:
        for one in problems:
            chooser.choose(one, settings())
        x.bound.clear()
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = tmm_core.tools.ranks.tune(problems, budget=2.0, **options)
    seconds = time.monotonic() - start
    # These would tune a problem that is not on record: `measured` would show it.
    choices = [chooser.choose(one, settings()) for one in problems if len(records) == COUNT]
    return Tuned(
        [record.to_json() for record in records],
        [(choice.candidate.kernel.name, choice.origin) for choice in choices],
        sorted(bound.n - 32 for bound in x.bound if bound.m == EDGE),
        [str(w.message) for w in caught if issubclass(w.category, tmm_core.TmmWarning)],
        seconds,
    )


def agree(outcomes: list[Tuned], winners: str) -> None:
    """Assert that every rank has the same records, and chooses these winners from them."""
    for outcome in outcomes:
        assert outcome.records == outcomes[0].records
        assert outcome.choices == [(name, "cache") for name in winners]


def test_one_rank_measures_and_all_use_its_record(world: World, tmp_path: Path) -> None:
    outcomes = world.run(partial(tuned, f"{tmp_path}/{{rank}}"))
    agree(outcomes, "xyxyxy")
    assert [outcome.measured for outcome in outcomes] == [[0, 4], [1, 5], [2], [3]]
    assert all(outcome.warnings == [] for outcome in outcomes)
    for rank in range(4):
        stored = [entry.record for entry in CacheStore(tmp_path / str(rank)).summaries()]
        by_width = sorted(stored, key=lambda record: record.problem["n"])  # type: ignore[arg-type, return-value]
        assert [record.to_json() for record in by_width] == outcomes[0].records


def test_ranks_of_one_host_share_a_cache(world: World, tmp_path: Path) -> None:
    outcomes = world.run(partial(tuned, str(tmp_path)))
    agree(outcomes, "xyxyxy")
    assert len(list(CacheStore(tmp_path).summaries())) == COUNT


def test_a_cache_that_cannot_be_written_costs_no_agreement(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    agree(world.run(partial(tuned, f"{tmp_path}/file/{{rank}}")), "xyxyxy")


@pytest.mark.slow
def test_ranks_that_chose_differently_come_to_agree(world: World, tmp_path: Path) -> None:
    outcomes = world.run(partial(tuned, f"{tmp_path}/{{rank}}", alone=True))
    agree(outcomes, "xyxyxy")
    assert all(outcome.measured == [] for outcome in outcomes)
    again = world.run(partial(tuned, f"{tmp_path}/{{rank}}", force=True))
    assert [outcome.measured for outcome in again] == [[0, 4], [1, 5], [2], [3]]


def kill_rank_0(index: int) -> None:
    if dist.get_rank() == 0 and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_rank_is_missed_and_replaced(mortals: World, tmp_path: Path) -> None:
    first, *rest = mortals.run(
        partial(tuned, f"{tmp_path}/{{rank}}", before=kill_rank_0, timeout=2.0)
    )
    assert isinstance(first, Lost)
    # The records that rank 0 had measured stand; rank 1 took over the problem that killed it.
    agree(rest, "xyxyyy")
    assert [outcome.measured for outcome in rest] == [[1, 4, 5], [2], [3]]
    for outcome in rest:
        assert outcome.seconds < 10.0
        (warning,) = outcome.warnings
        assert warning.startswith("rank 0 showed no sign of life for 2 s")


def kill_all(index: int) -> None:
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_problem_that_kills_is_given_up(mortals: World, tmp_path: Path) -> None:
    outcomes = mortals.run(partial(tuned, f"{tmp_path}/{{rank}}", before=kill_all, timeout=2.0))
    assert [isinstance(outcome, Lost) for outcome in outcomes] == [True, False, False, True]
    for outcome in outcomes[1:3]:
        assert outcome.records == outcomes[1].records
        assert [record["problem"]["n"] - 32 for record in outcome.records] == [0, 1, 2, 4, 5]
        lost, given_up = outcome.warnings
        assert lost.startswith("rank 0, 3 showed no sign of life")
        assert "64×35×16" in given_up
        assert "each rank that tried was lost" in given_up


def hang_rank_1(index: int) -> None:
    if dist.get_rank() == 1:
        time.sleep(6)


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_and_adopts_later(world: World, tmp_path: Path) -> None:
    outcomes = world.run(partial(tuned, f"{tmp_path}/{{rank}}", before=hang_rank_1, timeout=2.0))
    agree(outcomes, "xxxyxx")
    # It leaves its other problems to the ranks that took them over.
    assert [outcome.measured for outcome in outcomes] == [[0, 1, 4], [1], [2, 5], [3]]
    for rank, outcome in enumerate(outcomes):
        assert (outcome.seconds > 6.0) is (rank == 1)
        assert outcome.warnings[0].startswith("rank 1 showed no sign of life")


def fail_on_rank_1(root: str) -> Tuned:
    def steps(*arguments: Any, **named: Any) -> Any:
        raise MemoryError("no room")

    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tuner, "steps", steps)
            return tuned(root)
    return tuned(root)


@pytest.mark.slow
def test_a_problem_that_one_rank_cannot_measure_is_measured_by_another(
    world: World, tmp_path: Path
) -> None:
    outcomes = world.run(fail_on_rank_1, f"{tmp_path}/{{rank}}")
    agree(outcomes, "xxxyxx")
    assert [outcome.measured for outcome in outcomes] == [[0, 1, 4], [], [2, 5], [3]]


@pytest.mark.slow
def test_different_kernels_are_reported(world: World, tmp_path: Path) -> None:
    outcomes = world.run(partial(tuned, f"{tmp_path}/{{rank}}", versions="1121"))
    for rank, outcome in enumerate(outcomes[:2]):
        (warning,) = outcome.warnings
        message = rf"ranks {rank} and 2 have different kernels: y 1\+(\w+), y 2\+\1"
        assert re.fullmatch(message, warning)
    assert len(outcomes[2].warnings) == 3


def different_problems() -> str:
    chooser, _ = dispatcher(FakeBlas())
    dispatch.default_dispatcher = lambda: chooser  # type: ignore[assignment]
    problems = [problem(n=32 + (dist.get_rank() == 3))]
    with pytest.raises(ValueError, match="tune different things: they differ in problems") as error:
        tmm_core.tools.ranks.tune(problems)
    return str(error.value)


def test_different_problems_are_an_error_on_every_rank(world: World) -> None:
    messages = world.run(different_problems)
    for rank, message in enumerate(messages[:3]):
        assert message.startswith(f"ranks {rank} and 3 ")
    assert messages[3].startswith("ranks 3 and ")


def in_a_group(root: str) -> Tuned | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        return tuned(root, group=group)
    with pytest.raises(ValueError, match="is not in the group"):
        tmm_core.tools.ranks.tune([problem()], group)
    return None


def test_a_group_tunes_by_itself(world: World, tmp_path: Path) -> None:
    outcomes = world.run(in_a_group, f"{tmp_path}/{{rank}}")
    agree([outcome for outcome in outcomes if outcome], "yyyyyy")
    assert [outcome and outcome.measured for outcome in outcomes] == [
        None,
        [0, 2, 4],
        None,
        [1, 3, 5],
    ]


def test_without_ranks_it_is_the_plain_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    x = FakeKernel("x")
    chooser, _ = dispatcher(FakeBlas(), x, times={"x": 5.0, "blas": 10.0})
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "default_dispatcher", lambda: chooser)
        (record,) = tmm_core.tools.ranks.tune(problem())
    assert record.best.kernel == "x"


# -- the example ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_trains_equally_with_and_without_tmm(tmp_path: Path) -> None:
    """docs/shard.md shows this command."""
    page = (ROOT / "docs" / "shard.md").read_text("utf-8").replace("\\\n", "")
    (command,) = re.findall(r"^torchrun (.* examples/tensor_parallel_swiglu\.py .*)$", page, re.M)
    run = [sys.executable, "-m", "torch.distributed.run", *command.split()]
    numbers = tmp_path / "numbers.json"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, "--json", str(numbers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [words for words in lines if len(words) == 4 and words[0].isdigit()]
    losses = [[float(word) for word in row[1:]] for row in rows]
    assert [row[0] for row in rows] == [str(step) for step in range(12)]
    assert losses[-1][0] < 0.95 * losses[0][0]
    assert all(max(three) - min(three) < 1e-4 for three in losses)
    document = json.loads(numbers.read_text())
    assert document["ranks"] == 2
    assert document["losses"]["torch"][-1] == pytest.approx(losses[-1][0], abs=1e-6)
    assert document["apart"]["torch-tmm"] < 1e-5
    assert min(ms["step"] for ms in document["milliseconds"].values()) > 0


def multiplied_and_listed() -> tuple[set[str], set[str]]:
    """The problems of a training step of the example, and those that the example tunes."""
    sys.path.insert(0, str(ROOT / "examples"))
    import tensor_parallel_swiglu as example
    from torch.distributed.tensor import init_device_mesh

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    tokens, width, hidden = 24, 16, 8 * ranks
    weights = [torch.randn(hidden, width), torch.randn(hidden, width), torch.randn(width, hidden)]
    run = example.Training(example.TmmMLP(*weights, mesh), lr=1e-3)
    x, target = (
        example.distribute_tensor(torch.randn(tokens, width), mesh),
        example.distribute_tensor(torch.randn(tokens, width), mesh),
    )
    warm.forget_plans()
    run.step(x, target)
    multiplied = {str(plan.problem) for plan in warm._plans.values()}
    pairs = example.products(tokens, width, hidden // ranks, "cpu", torch.float32)
    return multiplied, {str(tmm_core.problem(a, b)) for a, b in pairs}


@pytest.mark.slow
def test_the_example_tunes_its_own_products(mortals: World) -> None:
    # Not on the ranks that tuned: their dispatchers are fakes.
    for multiplied, listed in mortals.run(multiplied_and_listed):
        assert multiplied == listed
        assert len(listed) == 5


def experts_apart() -> float:
    """The example's largest difference between experts on all ranks and on one."""
    sys.path.insert(0, str(ROOT / "examples"))
    import expert_parallel as example

    sizes = {"tokens": 37, "experts": 8, "hidden": 64, "intermediate": 96, "top_k": 2}
    return example.difference(torch.device("cpu"), torch.float32, **sizes)


@pytest.mark.slow
def test_experts_divided_among_ranks_equal_one_ranks(mortals: World) -> None:
    assert max(mortals.run(experts_apart)) < 1e-5
