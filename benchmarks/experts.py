"""A layer of experts of Transformers by torch's grouped product and by tmm.

Module, weights and routing are the same; only ``experts_implementation`` differs. The whole layer
after the router is timed: sorting tokens by expert, gathering, both products, the gate, weighting
and adding. ``--training`` adds the gradients of tokens, weights and scores. ``--weights`` rounds
tmm's copy of the weights. On a GPU the layer is captured and replayed, interleaved::

    python benchmarks/experts.py --json experts.json
    python benchmarks/experts.py --weights int4 --tokens 1 16 64 512 8192

The weights of one layer exceed the L2 many times, so that every replay reads them from memory.
Needs Transformers 5.0 or later.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import tmm_core
import tmm_core.integrations.transformers
from tmm_core.nn import convert
from tmm_core.tuning.timing import timer_for

Tensor = torch.Tensor

#: Experts of Qwen3-30B-A3B and Mixtral 8x7B, by name; the small ones show that it works.
LAYERS: dict[str, tuple[Any, Any]] = {
    "Qwen3-30B": (
        Qwen3MoeExperts,
        transformers.Qwen3MoeConfig(
            hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
        ),
    ),
    "Mixtral": (
        MixtralExperts,
        transformers.MixtralConfig(
            hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2
        ),
    ),
    "small": (
        MixtralExperts,
        transformers.MixtralConfig(
            hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2
        ),
    ),
}
WAYS = ("grouped_mm", "tmm")
ROUNDS = 21
#: tmm's error against float32 may be this factor larger than ``grouped_mm``'s, since it rounds in
#: other places.
ALLOWANCE = 1.5


def layer(name: str, device: torch.device) -> Any:
    """The experts, with random weights that keep the variance of their input."""
    kind, config = LAYERS[name]
    with torch.device(device):
        experts = kind(config).to(torch.bfloat16).requires_grad_(False)
    for weight in experts.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return experts


def routed(experts: Any, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts of each, and their weights; some experts are twice as likely."""
    generator = torch.Generator(device).manual_seed(tokens)
    config = experts.config
    width, count = config.hidden_size, experts.num_experts
    x = torch.randn(tokens, width, device=device, generator=generator).bfloat16()
    scores = torch.randn(tokens, count, device=device, generator=generator)
    scores += torch.linspace(0, 0.7, count, device=device)
    weights, chosen = scores.softmax(-1).topk(config.num_experts_per_tok)
    return x, chosen, weights.bfloat16()


def exact(experts: Any, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The layer in float32, by Transformers' loop over experts."""
    wide = copy.deepcopy(experts).float()
    wide.config._experts_implementation = "eager"
    x, chosen, weights = given
    return wide(x.float(), chosen, weights.float())  # type: ignore[no-any-return]


def measure(
    name: str, tokens: int, device: torch.device, training: bool, weights: str | None
) -> dict[str, Any]:
    """Return µs of the layer by torch and by tmm, and the root mean square errors of its result.
    With ``training``, µs of the result and all gradients. tmm's weights are rounded to
    ``weights``."""
    experts = own = layer(name, device)
    if weights is not None:
        own = convert(copy.deepcopy(experts), weights=weights).model
    given = routed(experts, tokens, device)
    x, chosen, scores = given
    grad = torch.randn_like(x)
    learns = [x, scores, *experts.parameters()] if training else []

    def by(way: str) -> Callable[[int], Any]:
        def run(_: int = 0) -> Any:
            experts.config._experts_implementation = way
            y = (own if way == "tmm" else experts)(x, chosen, scores)
            return torch.autograd.grad(y, learns, grad) if torch.is_grad_enabled() else y

        return run

    errors = {}
    reference = exact(experts, given)
    for way in WAYS:  # and tunes
        error = by(way)().float() - reference
        errors[way] = float(error.square().mean().sqrt() / reference.square().mean().sqrt())
    if weights is None and not errors["tmm"] <= ALLOWANCE * errors["grouped_mm"]:
        raise SystemExit(f"{name}, {tokens} tokens: errors against float32 {errors}")
    del reference
    with torch.set_grad_enabled(training):
        for t in learns:
            t.requires_grad_()
        for way in WAYS if training else ():
            by(way)()
        timer = timer_for(device)
        samples = timer.measure([by(way) for way in WAYS], ROUNDS)
        timer.release()
    us = {way: round(statistics.median(mine), 2) for way, mine in zip(WAYS, samples, strict=True)}
    ratio = round(us["grouped_mm"] / us["tmm"], 3)
    found = {"layer": name, "tokens": tokens, "us": us, "ratio": ratio, "errors": errors}
    return found | ({"training": True} if training else {"weights": weights} if weights else {})


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["Qwen3-30B", "Mixtral"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 512, 8192])
    parser.add_argument("--training", action="store_true", help="time gradients, too")
    parser.add_argument("--weights", choices=("int8", "fp8", "int4"), help="round tmm's weights")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to tune a product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    if options.training and options.weights:
        parser.error("rounded weights have no gradients")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tmm_core.integrations.transformers.register()
    found = []
    with tmm_core.override(tune_budget=options.budget):
        for name in options.layers:
            for tokens in options.tokens:
                found.append(measure(name, tokens, device, options.training, options.weights))
                us = found[-1]["us"]
                print(
                    f"{name:10} {tokens:5} tokens: grouped_mm {us['grouped_mm']:9.1f} µs, "
                    f"tmm {us['tmm']:9.1f} µs, {found[-1]['ratio']:.3f}×",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
