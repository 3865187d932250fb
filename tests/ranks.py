"""Ranks in processes of their own, and the functions that tests run there on sharded operands."""

from __future__ import annotations

import copy
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tmm_core

#: Modules that are imported once, before ranks are forked.
PRELOAD = ["tmm_core.tools.ranks", "torch.distributed.tensor.debug"]


class Lost:
    """Stands for the result of a rank that died."""


class World:
    """A process group whose ranks wait for functions to run.

    Its store is held here, as ``torchrun``'s agent holds it, so that any rank can die.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (rank, size, self._store.port, backend, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """The results of ``function(*arguments)`` on each rank, or :class:`Lost`."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        end = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                answers.append(Lost())
        if errors := [a for a in answers if isinstance(a, _Error)]:
            raise AssertionError("\n".join(error.text for error in errors))
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@dataclass
class _Error:
    text: str


@dataclass
class ShardedMLP:
    """A gated MLP in parallel, compared with the same MLP on one rank."""

    #: The epilogue of every product that its layers computed.
    products: list[str]
    #: Collectives of the forward.
    communications: int
    error: float
    gradient_errors: list[float]


def sharded_gated_mlp(device: str, dtype: torch.dtype, learns: bool, sequence: bool) -> ShardedMLP:
    """Two calls of a GatedMLP whose gate and up are sharded by columns and whose down is by rows.

    Args:
        sequence: Input and output are sharded by rows, and not on every rank whole. Then the layers
            have no biases.
    """
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from tmm_core.nn import GatedMLP

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(0)
    alone = GatedMLP(8, 12, bias=not sequence, device=device, dtype=dtype)
    mlp = copy.deepcopy(alone)
    place = Shard(0) if sequence else Replicate()
    plan = {name: ColwiseParallel(input_layouts=place) for name in ("gate_proj", "up_proj")}
    parallelize_module(mlp, mesh, {**plan, "down_proj": RowwiseParallel(output_layouts=place)})

    def part(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(ranks)[dist.get_rank()] if sequence else t

    whole = torch.randn(2 * ranks, 3, 8, device=device, dtype=dtype, requires_grad=learns)
    given = part(whole).detach().clone().requires_grad_(learns)
    epilogues: list[str] = []
    linear = tmm_core.api.linear

    def spied(*args: Any, epilogue: Any = None, **kwargs: Any) -> torch.Tensor:
        epilogues.append(epilogue or "")
        return linear(*args, epilogue=epilogue, **kwargs)

    with torch.set_grad_enabled(learns):
        expected = alone(whole)
        mlp(given)
        tmm_core.api.linear = spied  # this rank is a process of its own
        try:
            y = mlp(given)
        finally:
            tmm_core.api.linear = linear
        # Not while training: a mode that sees every call then gets two products, gated by torch.
        with CommDebugMode() as spy:
            mlp(given)
    errors = []
    if learns:
        y.sum().backward()
        expected.sum().backward()
        for ours, its in zip(mlp.parameters(), alone.parameters(), strict=True):
            errors.append(_error(ours.grad, its.grad))
        errors.append(_error(given.grad, part(whole.grad)))
    return ShardedMLP(epilogues, spy.get_total_counts(), _error(y, part(expected)), errors)


def gated_mlp_of_sharded_input() -> tuple[list[str], float]:
    """A GatedMLP with column-sharded gate and up, whose input stays sharded by rows: the products
    that it asks for, and its error."""
    from torch.distributed.tensor import Shard, init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from tmm_core.nn import GatedMLP

    ranks = dist.get_world_size()
    torch.manual_seed(0)
    alone = GatedMLP(8, 12, dtype=torch.float64)
    mlp = copy.deepcopy(alone)
    plan: dict[str, Any] = {"down_proj": RowwiseParallel(output_layouts=Shard(0))}
    for name in ("gate_proj", "up_proj"):
        plan[name] = ColwiseParallel(input_layouts=Shard(0))
        plan[name].desired_input_layouts = (Shard(0),)
    parallelize_module(mlp, init_device_mesh("cpu", (ranks,)), plan)
    whole = torch.randn(2 * ranks, 8, dtype=torch.float64)
    epilogues: list[str] = []
    linear = tmm_core.api.linear

    def spied(*args: Any, epilogue: Any = None, **kwargs: Any) -> torch.Tensor:
        epilogues.append(epilogue or "")
        return linear(*args, epilogue=epilogue, **kwargs)

    tmm_core.api.linear = spied
    try:
        with torch.no_grad():
            y = mlp(whole.chunk(ranks)[dist.get_rank()])
            expected = alone(whole).chunk(ranks)[dist.get_rank()]
    finally:
        tmm_core.api.linear = linear
    return epilogues, _error(y, expected)


def integers_split_along_k() -> tuple[str, float]:
    """A product of integers whose operands are sharded along K, with a residual and a bias that
    every rank has. Returns the placement of the result, and its error."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    a, b, residual, bias = (
        torch.randint(-9, 9, shape, generator=generator) for shape in ((5, 8), (8, 6), (5, 6), (6,))
    )
    given: dict[str, Any] = {"a": Shard(1), "b": Shard(0), "residual": Replicate()}
    given["bias"] = Replicate()
    parts = {"a": a, "b": b, "residual": residual, "bias": bias}
    sharded = {name: distribute_tensor(parts[name], mesh, [given[name]]) for name in parts}
    y = tmm_core.matmul(**sharded)
    return spell(y.placements), _error(y, a @ b + bias + residual)


def _serve(rank: int, size: int, port: int, backend: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TMM_ON_CACHE_MISS"] = "heuristic"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = function(*arguments)
        except BaseException:
            answer = _Error(f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)


# -- sharded products ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A product of sharded operands.

    Placements have a word per mesh dimension: ``R``, ``P`` or ``S`` with the dimension.
    """

    name: str
    a: str
    b: str
    #: The result's placement; None: DTensor decides.
    out: str | None
    bias: str | None = None
    residual: str | None = None
    epilogue: str = ""
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((8, 16), (16, 12))
    residual_shape: tuple[int, ...] | None = None
    mesh: tuple[int, ...] | None = None


ROWS, GATED = ((3, 8, 16), (16, 12)), ((8, 16), (16, 24))
BATCHES = ((8, 8, 16), (8, 16, 12))

#: Placements that a rule is for: the result is as said, and nothing is communicated.
RULES = [
    Case("replicate", "R", "R", "R", "R", "R", "silu"),
    Case("rows", "S0", "R", "S0"),
    Case("rows, all", "S0", "R", "S0", "R", "S0", "silu"),
    Case("rows, a column added", "S0", "R", "S0", residual="S0", residual_shape=(8, 1)),
    Case("rows, a row added", "S0", "R", "S0", residual="R", residual_shape=(12,)),
    Case("rows, gated", "S0", "R", "S0", "R", "S0", "swiglu", shapes=GATED),
    Case("rows, uneven", "S0", "R", "S0", shapes=((10, 18), (18, 14))),
    Case("columns", "R", "S1", "S1"),
    Case("columns, all", "R", "S1", "S1", "S0", "S1", "silu"),
    Case("columns, a row added", "R", "S1", "S1", residual="S0", residual_shape=(12,)),
    Case("K", "S1", "S0", "P"),
    Case("K, linear epilogue", "S1", "S0", "P", epilogue="scale(0.3)"),
    Case("K, bias and residual", "S1", "S0", "P", "R", "R"),
    Case("K, uneven", "S1", "S0", "P", shapes=((10, 18), (18, 14))),
    Case("3-D batch", "S0", "R", "S0", "R", "S0", "silu", shapes=((8, 3, 16), (16, 12))),
    Case("3-D rows", "S1", "R", "S1", "R", "S1", "silu", shapes=ROWS),
    Case("3-D columns", "R", "S1", "S2", "S0", "S2", "silu", shapes=ROWS),
    Case("3-D K", "S2", "S0", "P", shapes=ROWS),
    Case("batches", "S0", "S0", "S0", "R", "S0", "silu", shapes=BATCHES),
    Case("batches of one a", "R", "S0", "S0", shapes=((1, 8, 16), (8, 16, 12))),
    Case("batches of one b", "S0", "R", "S0", shapes=((8, 8, 16), (1, 16, 12))),
    Case("batches, K", "S2", "S1", "P", shapes=BATCHES),
    Case("vector a", "R", "S1", "S0", shapes=((16,), (16, 12))),
    Case("vector b", "S0", "R", "S0", shapes=((8, 16), (16,))),
    Case("vectors", "S0", "S0", "P", shapes=((16,), (16,))),
    Case("rows × columns", "S0 R", "R S1", "S0 S1", "R S0", "S0 S1", "silu", mesh=(2, 2)),
    Case("rows × K", "S0 S1", "R S0", "S0 P", mesh=(2, 2)),
]

#: Placements that no rule is for, or that an epilogue forbids: still right.
MOVED = [
    Case("K, nonlinear", "S1", "S0", None, "R", epilogue="silu"),
    Case("columns, gated", "R", "S1", None, "S0", "S1", "swiglu", shapes=GATED),
    Case("K, gated", "S1", "S0", None, epilogue="swiglu", shapes=GATED),
    Case("rows against columns", "S0", "S1", None),
    Case("bias sharded by rows", "S0", "R", None, "S0"),
    Case("partial operand", "P", "R", None, epilogue="silu"),
    Case("fewer rows than ranks", "S0", "R", None, shapes=((2, 16), (16, 12))),
]


@dataclass(frozen=True)
class Outcome:
    """Errors are the largest, relative to the largest element expected."""

    placements: str
    error: float
    communications: int
    gradients: dict[str, float]
    #: Whether later calls multiply the shards without DTensor's dispatch, and whether all give this
    #: result, bit for bit.
    in_place: bool
    repeats: bool


def placements(text: str) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    simple = {"R": Replicate(), "P": Partial()}
    return [simple.get(word) or Shard(int(word[1:])) for word in text.split()]


def spell(placed: Any) -> str:
    return " ".join(
        "R" if p.is_replicate() else "P" if p.is_partial() else f"S{p.dim}" for p in placed
    )


def product(case: Case, dtype: torch.dtype, grad: bool) -> Outcome:
    """Run a case on this rank and compare it with the whole product by torch, in fp64."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(kind, case.mesh or (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(len(case.name))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    width = case.shapes[1][-1] if len(case.shapes[1]) > 1 else 1
    whole = {"a": random(*case.shapes[0]), "b": random(*case.shapes[1])}
    if case.bias:
        whole["bias"] = random(width)
    shape = _reference(whole, case.epilogue).shape
    if case.residual:
        whole["residual"] = random(*(case.residual_shape or shape))
    sharded = {
        name: distribute_tensor(t.to(kind), mesh, placements(getattr(case, name)))
        for name, t in whole.items()
    }
    whole = {name: t.double().requires_grad_() for name, t in whole.items()}
    expected = _reference(whole, case.epilogue)
    for t in sharded.values():
        t.requires_grad_(grad)
    with CommDebugMode() as spy:
        out = tmm_core.matmul(**sharded, epilogue=case.epilogue or None)
    in_place, repeats = again(sharded, case.epilogue, out)
    gradients = {}
    if grad:
        seed = random(*shape)
        (expected * seed.double()).sum().backward()
        (out * distribute_tensor(seed.to(kind), mesh)).sum().backward()
        for name, t in sharded.items():
            gradients[name] = _error(t.grad, whole[name].grad)
    error, communications = _error(out, expected), spy.get_total_counts()
    return Outcome(spell(out.placements), error, communications, gradients, in_place, repeats)


def again(operands: dict[str, Any], epilogue: str, out: Any) -> tuple[bool, bool]:
    """Whether later calls of a product of shards dispatch nothing, and give ``out`` again. Calls
    of ``linear`` are such, too."""
    from tmm_core.interop import operator, sharding

    a, b, more = operands["a"], operands["b"], {**operands, "epilogue": epilogue or None}
    calls = [lambda: tmm_core.matmul(**more)] * 3
    if b.ndim == 2:
        weight = b.t()
        rest = {name: t for name, t in more.items() if name not in ("a", "b")}
        calls += [lambda: tmm_core.linear(a, weight, **rest)] * 3
    dispatched = []
    matmul = operator.matmul

    def counted(*arguments: Any) -> Any:
        dispatched.append(len(results))
        return matmul(*arguments)

    results: list[Any] = []
    sharding.operator.matmul = tmm_core.api.operator.matmul = counted  # in a process of its own
    try:
        for call in calls:
            results.append(call())
    finally:
        sharding.operator.matmul = tmm_core.api.operator.matmul = matmul
    alike = all(
        spell(y.placements) == spell(out.placements)
        and (y.shape, y.stride(), y.dtype) == (out.shape, out.stride(), out.dtype)
        and torch.equal(y.to_local(), out.to_local())
        for y in results
    )
    return not {1, 2, 4, 5} & {*dispatched}, alike


def _reference(tensors: dict[str, torch.Tensor], epilogue: str) -> torch.Tensor:
    z = torch.matmul(tensors["a"], tensors["b"])
    if "bias" in tensors:
        z = z + tensors["bias"]
    y = tmm_core.launch.warm.epilogue_of(epilogue).apply(z)
    return y + tensors["residual"] if "residual" in tensors else y


def _error(got: Any, expected: Any) -> float:
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    got, expected = (t.detach().cpu().double() for t in (got, expected))
    return float((got - expected).abs().max() / expected.abs().max())
