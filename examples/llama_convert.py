"""Converts a Llama and a BERT of Hugging Face to tmm's layers; compares logits and speed.

    python examples/llama_convert.py                      # some 90 s on a GPU, once tuned
    python examples/llama_convert.py --only graph --batch 16 --prompt 128 --json result.json

Both are built from a config with random weights, so nothing is downloaded. Each is converted as a
copy. Then:

* The logits of original and copy are compared with a float64 run of the original.
* Both are timed alternately, in tokens per second: the Llama's prefill, decode and training step,
  and the BERT's forward and training step. ``--compile`` adds torch.compile. Decode is also timed
  as a CUDA graph, because without one a decoding step on a GPU measures Python.
* All results are printed, slower or faster, with the share of each time that the host took to
  queue the work. Near 100 % the time is Python's, not the GPU's.

The first run on a GPU tunes each problem (at most ``--budget`` seconds each); later runs find the
records in the cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tmm_core
from tmm_core.nn import convert

Run = Callable[[], Any]

#: Sizes on a CPU, where only the logits are meaningful.
SMALL = {"hidden": 64, "intermediate": 176, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 500}
SMALL |= {"batch": 2, "prompt": 32, "steps": 4, "rounds": 2}
SMALL |= {"bert_hidden": 64, "bert_layers": 2, "bert_batch": 2, "bert_length": 32}

#: Measurements: the Llama's prefill, its decoding, the same in a CUDA graph; training steps of each
#: model that is run; the BERT.
PARTS = ("prefill", "decode", "graph", "training", "bert")

#: A converted model's error against float64 may exceed the original's by this factor: it rounds in
#: other places, and less often.
ALLOWANCE = 1.5


def main() -> int:
    args = arguments()
    try:
        from transformers import logging
    except ImportError:
        print(
            "llama_convert.py needs transformers, which is not installed here "
            "(pip install transformers); nothing was run",
            file=sys.stderr,
        )
        return 2
    logging.set_verbosity_error()
    torch.manual_seed(0)
    started = time.monotonic()
    with tmm_core.override(tune_budget=args.budget, on_cache_miss=args.on_cache_miss):
        results = {"llama": llama(args)}
        if "bert" in args.only:
            results["bert"] = bert(args)
    document = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(args.dtype).removeprefix("torch."),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("json", "dtype")},
        "seconds": round(time.monotonic() - started, 1),
        **results,
    }
    print(f"\n{document['seconds']} s in all on {document['device']}")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(result["within_rounding"] for result in results.values()) else 1


def llama(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.prompt + max(args.steps, 3),
    )
    models, result = both(LlamaForCausalLM, config, args)
    ids = torch.randint(args.vocab, (args.batch, args.prompt), device=args.device)
    result |= logits(models, ids)

    def prefill(model: nn.Module) -> Run:
        return lambda: model(ids, logits_to_keep=1)

    def decode(model: nn.Module) -> Run:
        cache = DynamicCache(config=config)
        model(ids, past_key_values=cache, logits_to_keep=1)

        def steps() -> None:
            token = ids[:, -1:]
            for _ in range(args.steps):
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            # Attention compiles a plan for every new length, so every round uses the same ones.
            cache.crop(-args.steps)

        return steps

    def graphed(model: nn.Module) -> Run:
        cache = StaticCache(config=config, max_cache_len=config.max_position_embeddings)
        model(ids, past_key_values=cache, logits_to_keep=1)
        token = ids[:, -1:].clone()

        def step() -> None:
            token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(-1))

        step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def replay() -> None:
            token.copy_(ids[:, -1:])
            for layer in cache.layers:
                layer.cumulative_length.fill_(args.prompt)
            for _ in range(args.steps):
                graph.replay()

        return replay

    generated = args.batch * args.steps
    with torch.no_grad():
        if "prefill" in args.only:
            result["prefill"] = compare("Llama prefill", models, prefill, ids.numel(), args)
            if args.compile:
                name, run = "Llama prefill, compiled", compiled(prefill)
                result["prefill_compiled"] = compare(name, models, run, ids.numel(), args)
        if "decode" in args.only:
            result["decode"] = compare("Llama decode", models, decode, generated, args)
        if "graph" in args.only and args.device == "cuda":
            name = "Llama decode, CUDA graph"
            try:
                result["decode_graph"] = compare(name, models, graphed, generated, args)
            except RuntimeError as error:
                print(f"{name}: not captured: {error}")
                result["decode_graph"] = {"error": str(error)}
    if "training" in args.only:
        learn = training(lambda model: model(ids, labels=ids).loss)
        result["training"] = compare("Llama training step", models, learn, ids.numel(), args)
        if args.compile:
            name, learn = "Llama training step, compiled", compiled(learn)
            result["training_compiled"] = compare(name, models, learn, ids.numel(), args)
    return result


def bert(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=args.vocab,
        hidden_size=args.bert_hidden,
        intermediate_size=4 * args.bert_hidden,
        num_hidden_layers=args.bert_layers,
        num_attention_heads=max(1, args.bert_hidden // 64),
        max_position_embeddings=args.bert_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    models, result = both(BertForMaskedLM, config, args)
    ids = torch.randint(args.vocab, (args.bert_batch, args.bert_length), device=args.device)
    result |= logits(models, ids)
    with torch.no_grad():
        forward: Callable[[nn.Module], Run] = lambda model: lambda: model(ids)  # noqa: E731
        result["forward"] = compare("BERT forward", models, forward, ids.numel(), args)
        if args.compile:
            name, forward = "BERT forward, compiled", compiled(forward)
            result["forward_compiled"] = compare(name, models, forward, ids.numel(), args)
    if "training" in args.only:
        learn = training(lambda model: model(ids, labels=ids).loss)
        result["training"] = compare("BERT training step", models, learn, ids.numel(), args)
        if args.compile:
            name, learn = "BERT training step, compiled", compiled(learn)
            result["training_compiled"] = compare(name, models, learn, ids.numel(), args)
    return result


def both(
    kind: Any, config: Any, args: argparse.Namespace
) -> tuple[tuple[nn.Module, nn.Module], dict[str, Any]]:
    """The original model and a converted copy."""
    with torch.device(args.device):
        model = kind(config).to(args.dtype).eval()
    report = convert(model, inplace=False)
    print(f"\n{report}\n")
    kinds = [change.kind for change in report.changes]
    return (model, report.model), {"converted": {k: kinds.count(k) for k in sorted(set(kinds))}}


def logits(models: tuple[nn.Module, nn.Module], ids: torch.Tensor) -> dict[str, Any]:
    """RMS error of both against float64, relative to the RMS of the logits."""
    errors = []
    with torch.no_grad():
        few = ids[:2]
        reference = copy.deepcopy(models[0]).double()(few).logits
        for model in models:
            # All rows, so that the checked problems are the timed ones.
            error = model(ids).logits[:2].double() - reference
            errors.append(float(error.square().mean().sqrt() / reference.square().mean().sqrt()))
    close = errors[1] <= ALLOWANCE * errors[0] + 1e-7
    verdict = "within rounding" if close else "NOT within rounding"
    print(
        f"logits' error against float64: {errors[0]:.3e} before, {errors[1]:.3e} after: {verdict}"
    )
    return {"error_before": errors[0], "error_after": errors[1], "within_rounding": close}


def training(loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], Run]:
    def make(model: nn.Module) -> Run:
        def step() -> None:
            loss(model).backward()
            for parameter in model.parameters():
                parameter.grad = None

        return step

    return make


def compiled(make: Callable[[nn.Module], Run]) -> Callable[[nn.Module], Run]:
    """``make`` applied to the compiled model."""
    return lambda model: make(torch.compile(model))  # type: ignore[arg-type]


def compare(
    name: str,
    models: tuple[nn.Module, nn.Module],
    make: Callable[[nn.Module], Run],
    tokens: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Tokens per second of both, from the medians of alternating measurements."""
    warming = time.monotonic()
    runs = [make(model) for model in models]
    for run in runs:
        run()
    synchronize(args)
    warming = time.monotonic() - warming
    times: list[list[float]] = [[], []]
    queued: list[list[float]] = [[], []]
    for turn in range(args.rounds):
        # The second one finds a warmer chip: alternate the order too.
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            synchronize(args)
            started = time.perf_counter()
            runs[i]()
            queued[i].append(time.perf_counter() - started)
            synchronize(args)
            times[i].append(time.perf_counter() - started)
    before, after = (tokens / statistics.median(t) for t in times)
    hosts = [
        statistics.median(q) / statistics.median(t) for q, t in zip(queued, times, strict=True)
    ]
    quarters = [statistics.quantiles(t, n=4) for t in times]
    spread = max((upper - lower) / median for lower, median, upper in quarters)
    print(
        f"{name:29} {before:12,.0f} → {after:12,.0f} tokens/s  ×{after / before:.3f}"
        f"  (host {hosts[0]:.0%} → {hosts[1]:.0%}; quartiles {spread:.1%} apart; "
        f"first calls and tuning {warming:.1f} s)"
    )
    return {
        "tokens_per_second_before": before,
        "tokens_per_second_after": after,
        "milliseconds_before": 1e3 * tokens / before,
        "milliseconds_after": 1e3 * tokens / after,
        "host_share_before": hosts[0],
        "host_share_after": hosts[1],
        "spread": spread,
        "first_calls_seconds": round(warming, 2),
    }


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default=None, help="default: a GPU if there is one")
    add("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    add("--hidden", type=int, default=2048)
    add("--intermediate", type=int, default=5632)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=16)
    add("--kv-heads", type=int, default=4)
    add("--vocab", type=int, default=32000)
    add("--batch", type=int, default=8)
    add("--prompt", type=int, default=1024, help="tokens of each sequence's prompt")
    add("--steps", type=int, default=32, help="tokens decoded per round")
    add("--bert-hidden", type=int, default=768)
    add("--bert-layers", type=int, default=4)
    add("--bert-batch", type=int, default=16)
    add("--bert-length", type=int, default=512)
    add("--rounds", type=int, default=15, help="alternating timings of each")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="time only these; default: all")
    add("--compile", action="store_true", help="time both under torch.compile, too")
    add("--budget", type=float, default=20.0, help="seconds a problem's tuning may take")
    add("--on-cache-miss", choices=("tune", "heuristic"), default="tune")
    add("--json", type=Path, metavar="FILE", help="write the numbers here")
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu":
        # Explicit arguments take precedence.
        for name, value in SMALL.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    return args


if __name__ == "__main__":
    sys.exit(main())
