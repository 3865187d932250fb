"""A SwiGLU MLP, tensor-parallel, trained with tmm and without: the same loss curve.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel_swiglu.py

runs on as many GPUs through NCCL, or on a CPU through gloo where there are not as many. Two
copies of ``down(silu(gate(x)) * up(x))`` learn the same function from the same weights. Both
split the hidden dimension over the ranks, as DTensors:

* without tmm, gate and up projection are two products, each sharded by columns;
* with tmm they are one, whose epilogue pairs gate and up. Each rank holds a block of gate rows
  and the same block of up rows, one above the other, and multiplies them as local tensors: a
  plain shard of the stacked weight would hold gate rows without their up rows.

The down projection is sharded by rows. Its products are partial sums, which DTensor reduces.
On GPUs the ranks tune what they will call first, each problem once among them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

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
import tmm_core.distributed


def parameter(t: torch.Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(t, mesh, [Shard(dim)]))


class TorchMLP(nn.Module):
    """By ``F.linear`` on DTensors."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, mesh: DeviceMesh):
        super().__init__()
        self.gate = parameter(gate, mesh, 0)
        self.up = parameter(up, mesh, 0)
        self.down = parameter(down, mesh, 1)

    def forward(self, x: DTensor) -> DTensor:
        hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(hidden, self.down).redistribute(placements=[Replicate()])


class TmmMLP(nn.Module):
    """By ``tmm_core.linear``, gate and up projection in one."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, mesh: DeviceMesh):
        super().__init__()
        self.gate_up = parameter(pair(gate, up, mesh.size()), mesh, 0)
        self.down = parameter(down, mesh, 1)
        self._swiglu = local_map(
            lambda x, w: tmm_core.linear(x, w, epilogue="swiglu"),
            out_placements=[Shard(1)],
            in_placements=([Replicate()], [Shard(0)]),
            # Each rank's gradient for x is one term of it.
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


def train(model: nn.Module, x: DTensor, target: DTensor, steps: int) -> list[float]:
    """The loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = (model(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item())
    return losses


def tune(tokens: int, width: int, hidden: int, dtype: torch.dtype) -> None:
    """Measure, divided among the ranks, what one step multiplies on each of them."""
    mine = hidden // dist.get_world_size()

    def like(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    x, h = like(tokens, width), like(tokens, mine)
    gate_up, down = like(2 * mine, width), like(width, mine)
    pairs = [
        (x, gate_up.t()),
        (h, down.t()),
        # Backward: each operand's gradient, from the other and the result's.
        (like(tokens, 2 * mine), gate_up),
        (like(tokens, 2 * mine).t(), x),
        (x, down),
        (x.t(), h),
    ]
    tmm_core.distributed.tune([tmm_core.problem(a, b) for a, b in pairs], budget=10)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a tensor-parallel SwiGLU MLP twice.")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tolerance", type=float, help="how far the losses may part, of the first")
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
    # On every rank the same numbers.
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

    if on_gpu:
        tune(options.tokens, options.width, options.hidden, dtype)
    without = train(TorchMLP(*start, mesh), x, target, options.steps)
    with_tmm = train(TmmMLP(*start, mesh), x, target, options.steps)

    # Adam steps by a gradient's sign where the gradient is small, so roundings grow.
    tolerance = options.tolerance or (0.02 if on_gpu else 1e-4)
    apart = max(abs(a - b) for a, b in zip(without, with_tmm, strict=True)) / without[0]
    if dist.get_rank() == 0:
        print(f"{ranks} ranks on {device}, {str(dtype).removeprefix('torch.')}")
        print(f"{'step':>4} {'torch':>10} {'tmm':>10}")
        for step, (a, b) in enumerate(zip(without, with_tmm, strict=True)):
            if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
                print(f"{step:4} {a:10.6f} {b:10.6f}")
        print(f"at most {apart:.2g} of the first loss apart, {tolerance:g} allowed")
    dist.destroy_process_group()
    if apart > tolerance:
        raise SystemExit(f"the losses part by {apart:.2g} of the first, {tolerance:g} is allowed")


if __name__ == "__main__":
    main()
