"""A mixture of experts with experts divided among ranks, checked against all experts on one rank.

    torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py

runs on this many GPUs through NCCL, or on a CPU through gloo if there are fewer. Every rank has its
own tokens, and ``E / ranks`` of the experts. Torch's all-to-all sends each token to the ranks of
the experts that its router chose, once for each expert. There one pair of grouped products serves
all received tokens, and the results are sent back the same way.

The number of tokens that a rank receives is unknown until the router has run, but a tensor's size
must be known on the host. So a rank allocates room for the maximum, and the unused slots belong to
no expert: the layer skips them. Then nothing waits for the GPU.

Each rank compares its result, and the gradients of its tokens, with all experts on that rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmm_core.nn import Experts

#: Largest relative difference that passes: same products of rows, summed in the same way.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Exchange(torch.autograd.Function):
    """Sends an equal share of the rows to every rank, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows.contiguous())
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchange.forward(ctx, gradient)


class ExpertParallel(torch.nn.Module):
    """This rank's share of the experts of ``whole``."""

    def __init__(self, whole: Experts, rank: int, ranks: int) -> None:
        super().__init__()
        self.ranks, self.each = ranks, whole.num_experts // ranks
        self.experts = Experts(
            self.each, whole.down_proj.shape[1], whole.down_proj.shape[2],
            device=whole.down_proj.device, dtype=whole.down_proj.dtype,
        )  # fmt: skip
        mine = slice(rank * self.each, (rank + 1) * self.each)
        with torch.no_grad():
            self.experts.gate_up_proj.copy_(whole.gate_up_proj[mine])
            self.experts.down_proj.copy_(whole.down_proj[mine])

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As :class:`tmm_core.nn.Experts`; ``chosen`` has indices into the experts of all ranks."""
        count, most = chosen.shape[-1], chosen.numel()
        expert = chosen.reshape(-1)
        owner = expert // self.each
        # Each rank receives up to ``most`` rows; its experts' rows come first.
        order = torch.argsort(owner, stable=True)
        first = torch.searchsorted(owner[order], torch.arange(self.ranks, device=x.device))
        place = torch.arange(most, device=x.device) - first[owner[order]]
        slot = owner[order] * most + place
        tokens = x.new_zeros(self.ranks * most, x.shape[-1])
        tokens = tokens.index_copy(0, slot, x[order // count])
        # An empty slot belongs to no expert.
        numbers = slot.new_full((self.ranks * most,), self.each)
        numbers = numbers.index_copy(0, slot, expert[order] % self.each)

        arrived, here = Exchange.apply(tokens), Exchange.apply(numbers)
        ones = x.new_ones(len(here), 1)
        results = Exchange.apply(self.experts(arrived, here[:, None], ones))

        rows = torch.empty_like(slot).index_copy(0, order, slot)
        weighted = results[rows].view(*chosen.shape, -1) * weights[..., None]
        return weighted.sum(1).to(x.dtype)


def difference(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
) -> float:
    """The largest relative difference on any rank between distributed experts and all experts on
    one rank, in results and in gradients of ``tokens`` tokens on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same experts on every rank
    whole = Experts(experts, hidden, intermediate, device=device, dtype=dtype)
    layer = ExpertParallel(whole, rank, ranks)
    torch.manual_seed(1 + rank)  # different tokens on every rank
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    scores = torch.randn(tokens, experts, device=device).softmax(-1)
    weights, chosen = scores.topk(top_k)

    results = []
    for module in (layer, whole):
        leaf = x.clone().requires_grad_()
        y = module(leaf, chosen, weights.to(dtype))
        (gradient,) = torch.autograd.grad(y.float().square().sum(), leaf)
        results.append((y.detach(), gradient))
    error = max(
        float((ours - alone).abs().max() / alone.abs().max())
        for ours, alone in zip(*results, strict=True)
    )
    errors: list[float] = [0.0] * ranks
    dist.all_gather_object(errors, error)
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=37, help="tokens per rank")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=96)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = vars(parser.parse_args())
    dtype = getattr(torch, options.pop("dtype"))

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if options["experts"] % ranks:
        raise SystemExit(f"{options['experts']} experts cannot be divided among {ranks} ranks")
    local = int(os.environ.get("LOCAL_RANK", rank))
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    error = difference(device, dtype, **options)
    dist.destroy_process_group()
    if rank == 0:
        print(f"{ranks} ranks on {device.type}: largest relative difference {error:.1e}")
    if not error <= TOLERANCE[dtype]:
        raise SystemExit("distributed experts give different results than all experts on one rank")
    if not on_gpu:
        # gloo's threads outlive their group; one that frees a tensor while Python ends aborts.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
