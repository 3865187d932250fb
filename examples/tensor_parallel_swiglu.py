"""A tensor-parallel SwiGLU MLP, trained with and without tmm, with the same loss curve.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel_swiglu.py

runs on this many GPUs through NCCL, or on a CPU through gloo if there are fewer. Two copies of
``down(silu(gate(x)) * up(x))`` learn the same function from the same weights. Both split the
hidden dimension over the ranks, as DTensors:

* without tmm, gate and up projection are two products, each sharded by columns;
* with tmm they are one product, whose epilogue pairs gate and up. Each rank stacks a block of gate
  rows and the same block of up rows, and multiplies them as local tensors. A plain shard of the
  stacked weight would hold gate rows without their up rows.

The down projection is sharded by rows. Its products are partial sums, which DTensor reduces.
On GPUs the ranks first tune the problems of a step, each of them once on one rank.

A third copy is trained with torch at twice the precision. The distance of the torch copy from it
is the effect of rounding on this training. The tmm copy should be no further from either.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.experimental import local_map

import tmm_core
import tmm_core.tools.ranks


def parameter(t: torch.Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """A shard of ``t`` with its own memory."""
    return nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(dim)]))


class TorchMLP(nn.Module):
    """The MLP with ``F.linear`` on DTensors."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, mesh: DeviceMesh):
        super().__init__()
        self.gate = parameter(gate, mesh, 0)
        self.up = parameter(up, mesh, 0)
        self.down = parameter(down, mesh, 1)

    def forward(self, x: DTensor) -> DTensor:
        hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(hidden, self.down).redistribute(placements=[Replicate()])


class TmmMLP(nn.Module):
    """The MLP with ``tmm_core.linear``, gate and up projection in one product."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, mesh: DeviceMesh):
        super().__init__()
        self.gate_up = parameter(pair(gate, up, mesh.size()), mesh, 0)
        self.down = parameter(down, mesh, 1)
        self._swiglu = local_map(
            lambda x, w: tmm_core.linear(x, w, epilogue="swiglu"),
            out_placements=[Shard(1)],
            in_placements=([Replicate()], [Shard(0)]),
            # Each rank's gradient for x is a term of the sum.
            in_grad_placements=([Partial()], [Shard(0)]),
            device_mesh=mesh,
        )

    def forward(self, x: DTensor) -> DTensor:
        hidden = self._swiglu(x, self.gate_up)
        return tmm_core.linear(hidden, self.down).redistribute(placements=[Replicate()])


def pair(gate: torch.Tensor, up: torch.Tensor, ranks: int) -> torch.Tensor:
    """``[2·hidden, width]`` in blocks: rank 0's gate rows, its up rows, rank 1's gate rows, …"""
    blocks = zip(gate.chunk(ranks), up.chunk(ranks), strict=True)
    return torch.cat([rows for both in blocks for rows in both])


class Training:
    """A model, its optimiser, and the results of its steps."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        #: The loss before each step.
        self.losses: list[float] = []
        #: Seconds of each step, and seconds until all of the step's work was queued.
        self.seconds: list[float] = []
        self.queued: list[float] = []

    def step(self, x: DTensor, target: DTensor) -> None:
        started = time.perf_counter()
        loss = (self.model(x).float() - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.queued.append(time.perf_counter() - started)
        self.losses.append(loss.full_tensor().item())
        if x.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)

    def milliseconds(self) -> dict[str, float]:
        """Medians over the second half of the steps: the first ones tune, compile and allocate."""
        late = slice(len(self.seconds) // 2, None)
        return {
            "step": round(1e3 * statistics.median(self.seconds[late]), 3),
            "queued": round(1e3 * statistics.median(self.queued[late]), 3),
        }


def products(
    tokens: int, width: int, mine: int, device: str, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The products of one training step of :class:`TmmMLP` on a rank with ``mine`` columns."""

    def like(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    x, gate_up, both = like(tokens, width), like(2 * mine, width), like(tokens, 2 * mine)
    hidden, down, y = like(tokens, mine), like(width, mine), like(tokens, width)
    return [
        (x, gate_up.t()),
        (hidden, down.t()),
        # Backward: the gradients of hidden, down and gate_up. x needs none.
        (y, down),
        (y.t(), hidden),
        (both.t(), x),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, help="AdamW's; by default lower for wider layers")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to tune a problem")
    parser.add_argument("--tolerance", type=float, help="limit on |difference| / first loss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args(arguments)

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= local_ranks
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks = dist.get_world_size()
    if options.hidden % ranks:
        parser.error(f"--hidden must be a multiple of the {ranks} ranks, got {options.hidden}")
    mesh = init_device_mesh(device, (ranks,))
    # The same numbers on every rank.
    random = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=random)

    def weights() -> list[torch.Tensor]:
        width, hidden = options.width, options.hidden
        scaled = [
            randn(hidden, width) / width**0.5,
            randn(hidden, width) / width**0.5,
            randn(width, hidden) / hidden**0.5,
        ]
        return [w.to(dtype) for w in scaled]

    teacher, start = weights(), weights()
    inputs = randn(options.tokens, options.width).to(dtype)
    gate, up, down = (w.float() for w in teacher)
    taught = (F.silu(inputs.float() @ gate.t()) * (inputs.float() @ up.t())) @ down.t()
    x, target = distribute_tensor(inputs, mesh), distribute_tensor(taught, mesh)

    tuning = time.perf_counter()
    records = []
    if on_gpu:
        pairs = products(options.tokens, options.width, options.hidden // ranks, device, dtype)
        problems = [tmm_core.problem(a, b) for a, b in pairs]
        records = tmm_core.tools.ranks.tune(problems, budget=options.budget)
    tuning = time.perf_counter() - tuning

    lr = options.lr or min(2e-3, 0.5 / options.width)
    wider = torch.float32 if on_gpu else torch.float64
    runs = {
        "torch": Training(TorchMLP(*start, mesh), lr),
        "tmm": Training(TmmMLP(*start, mesh), lr),
        "wider": Training(TorchMLP(*(w.to(wider) for w in start), mesh), lr),
    }
    inputs_of = {"torch": x, "tmm": x, "wider": x.to(wider)}
    for step in range(options.steps):
        for name in list(runs) if step % 2 else reversed(runs):  # the order affects times
            runs[name].step(inputs_of[name], target)

    # Adam's step is the sign of small gradients, which amplifies rounding.
    tolerance = options.tolerance or (0.02 if on_gpu else 1e-4)
    apart, rounding, further = (
        max(abs(a - b) for a, b in zip(runs[one].losses, runs[other].losses, strict=True))
        / runs["torch"].losses[0]
        for one, other in (("torch", "tmm"), ("torch", "wider"), ("tmm", "wider"))
    )
    if dist.get_rank() == 0:
        print(f"{ranks} ranks on {device}, {str(dtype).removeprefix('torch.')}")
        print(f"{'step':>4} {'torch':>10} {'tmm':>10} {'wider':>10}")
        for step, losses in enumerate(zip(*(run.losses for run in runs.values()), strict=True)):
            if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
                print(f"{step:4} " + " ".join(f"{loss:10.6f}" for loss in losses))
        print(f"losses differ by at most {apart:.2g} of the first loss, {tolerance:g} allowed;")
        print(f"from {str(wider).removeprefix('torch.')}: torch {rounding:.2g}, tmm {further:.2g}")
        times = {name: runs[name].milliseconds() for name in ("torch", "tmm")}
        for name, ms in times.items():
            print(f"{name:5} {ms['step']:9.3f} ms per step, queued after {ms['queued']:.3f} ms")
        if options.json:
            document: dict[str, Any] = {
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "ranks": ranks,
                "backend": dist.get_backend(),
                "torch": torch.__version__,
                "dtype": str(dtype).removeprefix("torch."),
                "arguments": {k: v for k, v in vars(options).items() if k != "json"} | {"lr": lr},
                "tuning_seconds": round(tuning, 2),
                "chosen": [chosen(record) for record in records],
                "milliseconds": times,
                "apart": {"torch-tmm": apart, "torch-wider": rounding, "tmm-wider": further},
                "losses": {name: run.losses for name, run in runs.items()},
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()
    if apart > tolerance:
        raise SystemExit(f"the losses differ by {apart:.2g} of the first, {tolerance:g} is allowed")
    if not on_gpu:
        # gloo's threads outlive their group; one that frees a tensor while Python ends aborts.
        sys.stdout.flush()
        os._exit(0)


def chosen(record: Any) -> dict[str, Any]:
    """The winner and BLAS of a tuning record, in µs."""
    sizes = "×".join(str(record.problem[size]) for size in "mnk")
    layouts = "·".join(record.problem[operand]["layout"] for operand in "ab")
    blas = [c.median_us for c in record.candidates if c.kernel == "blas" and c.status == "ok"]
    return {
        "problem": f"{sizes} {layouts}",
        "kernel": record.best.kernel,
        "us": record.best.median_us,
        "blas_us": min(blas),
    }


if __name__ == "__main__":
    main()
