"""Whole models by torch and by each way to use tmm without changing their code.

Models have the widths of well-known ones, few layers and random weights, made on the GPU. Both ways
run in one process, interleaved::

    python benchmarks/whole_models.py --json whole_models.json --budget 480
    python benchmarks/whole_models.py --rows llama-enable small

A row first tunes the products that it computes, and says how long that took. A training step is
forward, backward and dropping the gradients, without an optimizer. Decoding and experts are
captured in CUDA graphs. On a CPU the sizes are tiny, to show that each row runs. Needs Transformers
5.0 or later.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import tmm_core
import tmm_core.integrations.transformers
from tmm_core import dispatch, settings
from tmm_core.bench.provenance import describe
from tmm_core.interop import inductor
from tmm_core.launch import warm
from tmm_core.launch.collector import collector_off
from tmm_core.nn import convert
from tmm_core.spec.launcher import BASELINE

Tensor = torch.Tensor
Run = Callable[[], Tensor]

#: Samples of each way, at least and at most, and the seconds that a row may take between them.
ROUNDS, MOST_ROUNDS, SECONDS = 5, 21, 6.0
#: Seconds of warm calls, in which ``enable()`` notices what does not pay.
WARM = 1.0
#: Least ms of a sample.
SAMPLE_MS = 20.0
#: Tokens of the prompt and places of the cache in decoding.
PROMPT, CACHE = 128, 512
#: Seconds before the end of the budget from which on nothing is tuned.
RESERVE = 15.0


@dataclass
class Way:
    """A way to run a model.

    Attributes:
        run: Runs it once and returns the logits or the loss.
        weights: The model whose weights it reads.
        inside: What is in force around its calls.
        reset: Called before each sample.
        graph: Whether it is captured on a GPU.
        most: Calls between two resets.
    """

    run: Run
    weights: nn.Module
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    reset: Callable[[], object] = lambda: None
    graph: bool = False
    most: int = 10_000


@dataclass
class Pair:
    """What a row compares.

    Attributes:
        tune: Finds the products to tune by one run.
        ready: Called after tuning, before tmm's way runs.
    """

    torch: Way
    tmm: Way
    tune: Callable[[], object]
    ready: Callable[[], object] = lambda: None
    notes: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Models and sizes on one device: tiny ones on a CPU, or as ``tiny`` says."""

    def __init__(self, device: torch.device, tiny: bool | None = None) -> None:
        self.device = device
        self.tiny = device.type == "cpu" if tiny is None else tiny
        self.key = "CUDA" if device.type == "cuda" else "CPU"
        self.problems: dict[Any, None] = {}
        self._models: dict[str, nn.Module] = {}

    def model(self, name: str) -> Any:
        """The model, which is kept until another name is asked for."""
        if name not in self._models:
            self._models.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            kind, config = self._config(name)
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                with self.device:
                    self._models[name] = kind(config).eval()
            finally:
                torch.set_default_dtype(before)
        return self._models[name]

    def _config(self, name: str) -> tuple[Any, Any]:
        t, tiny = transformers, self.tiny
        vocab, layers = (96, 1) if tiny else (32000, 6)
        decoder: dict[str, Any] = {"vocab_size": vocab, "max_position_embeddings": 8192}
        heads = {"num_attention_heads": 4 if tiny else 32}
        kv = {"num_key_value_heads": 2 if tiny else 8}
        few = {"num_hidden_layers": 1 if tiny else 2}
        if name == "llama":
            sizes = (32, 48) if tiny else (4096, 14336)
            config: Any = t.LlamaConfig(
                hidden_size=sizes[0], intermediate_size=sizes[1], num_hidden_layers=layers,
                **decoder, **heads, **kv,
            )  # fmt: skip
            return t.LlamaForCausalLM, config
        if name == "small":
            config = t.LlamaConfig(
                hidden_size=32 if tiny else 256, intermediate_size=48 if tiny else 688,
                num_hidden_layers=1 if tiny else 4, num_attention_heads=4, num_key_value_heads=2,
                **decoder,
            )  # fmt: skip
            return t.LlamaForCausalLM, config
        if name == "qwen3-moe":
            sizes = (32, 16, 4, 2) if tiny else (2048, 768, 128, 8)
            config = t.Qwen3MoeConfig(
                hidden_size=sizes[0], moe_intermediate_size=sizes[1], num_experts=sizes[2],
                num_experts_per_tok=sizes[3], head_dim=8 if tiny else 128, mlp_only_layers=[],
                num_key_value_heads=2 if tiny else 4, **few, **decoder, **heads,
            )  # fmt: skip
            return t.Qwen3MoeForCausalLM, config
        if name == "mixtral":
            sizes = (32, 48) if tiny else (4096, 14336)
            config = t.MixtralConfig(
                hidden_size=sizes[0], intermediate_size=sizes[1], num_experts_per_tok=2,
                num_local_experts=4 if tiny else 8, sliding_window=None,
                **few, **decoder, **heads, **kv,
            )  # fmt: skip
            return t.MixtralForCausalLM, config
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        small |= {"num_attention_heads": 2}
        if name == "bert":
            still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            given = {"vocab_size": 90, **small} if tiny else {}
            return t.BertForMaskedLM, t.BertConfig(**still, **given)
        if name == "vit":
            given = {"image_size": 32, "patch_size": 8, **small} if tiny else {}
            return t.ViTForImageClassification, t.ViTConfig(num_labels=1000, **given)
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        given = {"vocab_size": 90, "n_embd": 32, "n_layer": 1, "n_head": 2} if tiny else {}
        return t.GPT2LMHeadModel, t.GPT2Config(**still, **given)

    def ids(self, batch: int, length: int, vocab: int) -> Tensor:
        """Random tokens; few and short sequences where sizes are tiny."""
        if self.tiny:
            batch, length = min(batch, 2), min(length, 8)
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(vocab, (batch, length), device=self.device, generator=generator)

    # -- ways ------------------------------------------------------------------------------------

    def enabled(self, run: Run, model: nn.Module) -> Pair:
        """``enable()`` as it is by default, with its products tuned."""
        on: list[Any] = []
        notes: dict[str, Any] = {}

        @contextmanager
        def inside() -> Iterator[None]:
            if not on:
                on.append(tmm_core.enable(_key=self.key))
            with on[0]:  # whatever it has left to torch stays so
                yield
            reports = tmm_core.enabled_report().operators.values()
            notes["calls"] = {each.name: each.calls for each in reports if any(each.calls.values())}
            notes["left"] = {each.name: each.left for each in reports if each.left}

        def tune() -> None:
            with tmm_core.enable(_key=self.key), self.noting():
                run()

        return Pair(Way(run, model), Way(run, model, inside), tune, notes=notes)

    def compiled(self, model: Any, make: Callable[[Any], Way]) -> Pair:
        """``torch.compile`` with and without tmm's pass."""
        torch._dynamo.reset()
        usual = make(torch.compile(model, dynamic=False, options=tmm_core.inductor_options()))
        options = tmm_core.inductor_options()
        own = make(torch.compile(model, dynamic=False, options=options))
        notes: dict[str, Any] = {}

        def noted(tail: Any, terms: Any) -> bool:
            problem = inductor.problem_of(tail, terms)
            bare = replace(problem, epilogue=warm.epilogue_of(""), residual=None)
            self.problems.update({problem: None, bare: None})
            return False

        def tune() -> None:
            # The pass meets every product and rewrites none: torch's own graph.
            with mock.patch.object(inductor, "pays", noted):
                notes["compile_s"] = _seconds(usual.run)

        def ready() -> None:
            rewritten: list[bool] = []
            pays = inductor.pays

            def counted(*given: Any) -> bool:
                rewritten.append(pays(*given))
                return rewritten[-1]

            with mock.patch.object(inductor, "pays", counted):
                notes["compile_tmm_s"] = _seconds(own.run)
            notes["rewritten"] = f"{sum(rewritten)} of {len(rewritten)}"

        return Pair(usual, own, tune, ready, notes)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the problems of tmm's calls in this block, which BLAS answers."""
        chooser: Any = dispatch.default_dispatcher()
        kind = type(chooser)

        def bound(problem: Any, current: Any) -> Any:
            self.problems[problem.bare()] = None
            return kind.bound(chooser, problem, current)

        blas = settings.override(kernel=BASELINE)
        here = torch.autograd.set_multithreading_enabled(False)
        with mock.patch.object(chooser, "bound", bound), blas, here:
            yield
        warm.forget_plans()

    # -- what is run -----------------------------------------------------------------------------

    def prefill(self, model: Any, of: Any, tokens: int, batch: int = 1) -> Run:
        ids = self.ids(batch, tokens // batch, of.config.vocab_size)

        @torch.no_grad()
        def run() -> Tensor:
            return model(ids, use_cache=False, logits_to_keep=1).logits  # type: ignore[no-any-return]

        return run

    def step(self, model: Any, of: nn.Module, given: dict[str, Tensor]) -> Run:
        """A training step."""

        def run() -> Tensor:
            loss = model(**given).loss
            loss.backward()
            for parameter in of.parameters():
                parameter.grad = None
            return loss.detach()  # type: ignore[no-any-return]

        return run

    def language(self, of: Any, batch: int, length: int) -> dict[str, Tensor]:
        ids = self.ids(batch, length, of.config.vocab_size)
        return {"input_ids": ids, "labels": ids}

    @torch.no_grad()
    def decode(self, model: Any, of: Any, batch: int) -> Way:
        """One token for each sequence behind a prompt."""
        prompt, places = (8, 32) if self.tiny else (PROMPT, CACHE)
        ids = self.ids(batch, prompt, of.config.vocab_size)
        cache = transformers.StaticCache(config=of.config, max_cache_len=places)
        of(ids, past_key_values=cache, logits_to_keep=1)
        token = ids[:, -1:].clone()

        @torch.no_grad()
        def run() -> Tensor:
            return model(token, past_key_values=cache).logits  # type: ignore[no-any-return]

        def reset() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(prompt)

        return Way(run, of, reset=reset, graph=True, most=places - prompt - 4)


# -- rows ------------------------------------------------------------------------------------------


def enabled_prefill(bench: Bench, model: str, tokens: int, batch: int = 1) -> Pair:
    of = bench.model(model)
    return bench.enabled(bench.prefill(of, of, tokens, batch), of)


def enabled_training(bench: Bench, model: str, batch: int, length: int) -> Pair:
    of = bench.model(model)
    return bench.enabled(bench.step(of, of, bench.language(of, batch, length)), of)


def compiled_prefill(bench: Bench, tokens: int) -> Pair:
    of = bench.model("llama")
    return bench.compiled(of, lambda model: Way(bench.prefill(model, of, tokens), of))


def compiled_training(bench: Bench, model: str, batch: int, length: int) -> Pair:
    of = bench.model(model)
    if model == "vit":
        size = of.config.image_size
        images = torch.randn(2 if bench.tiny else batch, 3, size, size, device=bench.device)
        given = {"pixel_values": images.bfloat16(), "labels": bench.ids(1, batch, 1000)[0][:batch]}
        given["labels"] = given["labels"][: len(images)]
    else:
        given = bench.language(of, batch, length)
    return bench.compiled(of, lambda model: Way(bench.step(model, of, given), of))


def compiled_decode(bench: Bench, batch: int) -> Pair:
    of = bench.model("llama")
    return bench.compiled(of, lambda model: bench.decode(model, of, batch))


def converted_decode(bench: Bench, batch: int, weights: str | None) -> Pair:
    """A converted copy, compiled, beside ``torch.compile`` of the model."""
    of = bench.model("llama")
    own = convert(of, inplace=False, weights=weights).model
    torch._dynamo.reset()
    usual = bench.decode(torch.compile(of, dynamic=False), of, batch)
    mine = bench.decode(torch.compile(own, dynamic=False), own, batch)
    eager = bench.decode(own, own, batch)

    def tune() -> None:
        with bench.noting():
            eager.run()

    return Pair(usual, mine, tune)


def experts(bench: Bench, model: str, tokens: int) -> Pair:
    """``experts_implementation="tmm"`` beside ``"grouped_mm"``."""
    of = bench.model(model)
    few = tokens <= 16
    run = bench.prefill(of, of, tokens, batch=tokens if few else 1)

    def way(implementation: str) -> Way:
        @contextmanager
        def inside() -> Iterator[None]:
            of.set_experts_implementation(implementation)
            yield

        return Way(run, of, inside, graph=True)

    def tune() -> None:
        with own.inside(), bench.noting():
            run()

    own = way("tmm")
    return Pair(way("grouped_mm"), own, tune)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        bar: The ratio that is aimed at.
        seconds: What it takes on an H100, by estimate.
    """

    bar: float
    seconds: float
    make: Callable[[Bench], Pair]


def _row(bar: float, seconds: float, make: Callable[..., Pair], *given: Any) -> Row:
    return Row(bar, seconds, functools.partial(_make, make, given))


def _make(make: Callable[..., Pair], given: tuple[Any, ...], bench: Bench) -> Pair:
    return make(bench, *given)


#: In the order of importance.
ROWS: dict[str, Row] = {
    "llama-enable-prefill-2048": _row(1.05, 25, enabled_prefill, "llama", 2048),
    "llama-enable-training": _row(1.02, 50, enabled_training, "llama", 1, 2048),
    "small-enable-forward": _row(0.97, 25, enabled_prefill, "small", 1024, 8),
    "small-enable-training": _row(0.97, 40, enabled_training, "small", 8, 128),
    "gpt2-enable-training": _row(1.0, 50, enabled_training, "gpt2", 8, 1024),
    "llama-compiled-decode-1": _row(1.07, 40, compiled_decode, 1),
    "llama-compiled-decode-16": _row(1.07, 30, compiled_decode, 16),
    "llama-compiled-prefill-2048": _row(1.04, 35, compiled_prefill, 2048),
    "llama-int4-decode-1": _row(1.5, 30, converted_decode, 1, "int4"),
    "llama-enable-prefill-8192": _row(1.05, 35, enabled_prefill, "llama", 8192),
    "llama-compiled-training": _row(1.02, 75, compiled_training, "llama", 1, 2048),
    **{
        f"{model}-experts-{tokens}": _row(bar, 15, experts, model, tokens)
        for model in ("qwen3-moe", "mixtral")
        for tokens, bar in ((1, 1.15), (16, 1.15), (512, 1.22), (8192, 1.30))
    },
    "bert-compiled-training": _row(1.02, 90, compiled_training, "bert", 16, 512),
    "llama-int4-decode-16": _row(1.5, 30, converted_decode, 16, "int4"),
    "llama-compiled-decode-64": _row(1.07, 30, compiled_decode, 64),
    "llama-compiled-prefill-8192": _row(1.04, 35, compiled_prefill, 8192),
    "vit-compiled-training": _row(1.02, 90, compiled_training, "vit", 64, 197),
    "llama-converted-decode-16": _row(1.06, 30, converted_decode, 16, None),
}


# -- measuring -------------------------------------------------------------------------------------


def measure(bench: Bench, row: Row, tune_s: float, left_s: float) -> dict[str, Any]:
    """A row's medians in ms, ratio, spread, memory and difference.

    Args:
        tune_s: Seconds for the tuning of one product.
        left_s: Seconds that are left for the row.
    """
    started = time.monotonic()
    bench.problems.clear()
    pair = row.make(bench)
    pair.tune()
    problems, began = list(bench.problems), time.monotonic()
    tuned, limit = 0, min(left_s - RESERVE, 2 * row.seconds)
    while tuned < len(problems) and time.monotonic() - started < limit:
        tmm_core.tune(problems[tuned : tuned + 4], budget=tune_s)
        tuned += len(problems[tuned : tuned + 4])
    found: dict[str, Any] = {"bar": row.bar, "tuning_s": round(time.monotonic() - began, 1)}
    found |= {"products": len(problems), "tuned": tuned}
    pair.ready()
    ways = {"torch": pair.torch, "tmm": pair.tmm}
    results, bytes_ = {}, {}
    for name, way in ways.items():
        with way.inside():
            for _ in range(3):  # what is done once is done
                way.reset()
                results[name] = way.run().float()
            settled = time.monotonic() + WARM
            while way.inside is not nullcontext and not way.graph and time.monotonic() < settled:
                way.run()
                _wait(bench.device)
            bytes_[name] = _held(way.weights) + _working_bytes(way, bench.device)
            if way.graph and bench.device.type == "cuda":
                ways[name] = _captured(way)
    if not results["tmm"].isfinite().all():
        raise ArithmeticError("tmm's result is not finite")
    apart = (results["tmm"] - results["torch"]).square().mean().sqrt()
    found["difference"] = round(float(apart / results["torch"].square().mean().sqrt()), 5)
    if bench.device.type == "cuda":
        found["memory_ratio"] = round(bytes_["tmm"] / bytes_["torch"], 4)
        found["memory_bytes"] = bytes_
    seconds = max(1.0, min(SECONDS, left_s - (time.monotonic() - started)))
    ms = _interleaved(ways, bench.device, seconds)
    medians = {name: statistics.median(mine) for name, mine in ms.items()}
    ratios = [torchs / own for torchs, own in zip(ms["torch"], ms["tmm"], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    found["ms"] = {name: round(median, 4) for name, median in medians.items()}
    found["ratio"] = round(medians["torch"] / medians["tmm"], 4)
    found["spread"] = [round(quarters[0], 4), round(quarters[2], 4)]
    found["samples"] = len(ratios)
    found |= pair.notes
    found["row_s"] = round(time.monotonic() - started, 1)
    return found


def _interleaved(
    ways: dict[str, Way], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """ms of one call, interleaved; each sample begins with a call that is not timed."""
    ms: dict[str, list[float]] = {name: [] for name in ways}
    calls = {}
    for name, way in ways.items():
        with way.inside():
            way.reset()
            way.run()
            once = _timed(way, device, 1)
        calls[name] = max(1, min(way.most - 2, round(SAMPLE_MS / max(once, 1e-3))))
    end = time.monotonic() + seconds
    for turn in range(MOST_ROUNDS):
        if turn >= ROUNDS and time.monotonic() > end:
            break
        # The second one finds a warmer GPU: the order alternates.
        for name in ways if turn % 2 else reversed(ways):
            with ways[name].inside():
                ways[name].reset()
                ways[name].run()
                ms[name].append(_timed(ways[name], device, calls[name]))
    return ms


def _timed(way: Way, device: torch.device, calls: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        way.run()
    _wait(device)
    return (time.perf_counter() - start) * 1e3 / calls


def _captured(way: Way) -> Way:
    way.reset()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    with collector_off(), torch.cuda.graph(graph):  # which may destroy an earlier graph
        result = way.run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return Way(replay, way.weights, reset=way.reset, most=way.most)


def _working_bytes(way: Way, device: torch.device) -> int:
    """Bytes beyond what was allocated before, at the most, during one call."""
    if device.type != "cuda":
        return 0
    way.reset()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _held(model: nn.Module) -> int:
    """Bytes of a model's weights, each storage once."""
    tensors = []
    for each in [*model.parameters(), *model.buffers()]:
        parts = each.__tensor_flatten__()[0] if hasattr(each, "__tensor_flatten__") else ()
        tensors += [getattr(each, part) for part in parts] or [each]
    storages = [t.untyped_storage() for t in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _seconds(run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    return round(time.monotonic() - start, 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def line(name: str, found: dict[str, Any]) -> str:
    """A row's result on one line."""
    if "ratio" not in found:
        return f"{name:28} {found.get('skipped') or found['error'].strip().splitlines()[-1][:90]}"
    low, high = found["spread"]
    memory = f", memory {found['memory_ratio']:.3f}" if "memory_ratio" in found else ""
    more = f", rewritten {found['rewritten']}" if "rewritten" in found else ""
    if "calls" in found:
        torchs = sum(calls["torch"] for calls in found["calls"].values())
        total = sum(sum(calls.values()) for calls in found["calls"].values())
        more = f", torch answered {torchs} of {total}"
        more += f", left {' '.join(found['left'])}" if found["left"] else ""
    return (
        f"{name:28} {found['ms']['torch']:9.3f} → {found['ms']['tmm']:9.3f} ms "
        f"{found['ratio']:.3f}× ({low:.3f}-{high:.3f}; bar {found['bar']}){memory}, "
        f"{found['tuned']}/{found['products']} products tuned in {found['tuning_s']} s{more}, "
        f"apart {found['difference']:.4f}, {found['row_s']} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names begin so")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--tune", type=float, default=2.5, help="seconds to tune a product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--list", action="store_true", help="print the rows and run none")
    options = parser.parse_args()
    rows = {n: row for n, row in ROWS.items() if n.startswith(tuple(options.rows))}
    if options.list:
        print("\n".join(f"{name:28} bar {row.bar}, {row.seconds} s" for name, row in rows.items()))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.monotonic() + options.budget
    document: dict[str, Any] = {"environment": describe(device, []), "rows": {}}
    document["environment"]["transformers"] = transformers.__version__
    bench = Bench(device)
    for name, row in rows.items():
        document["rows"][name] = found = attempt(bench, row, options.tune, end - time.monotonic())
        print(line(name, found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\nsummary: torch's time / tmm's (quartiles of the ratio)")
    for name, found in document["rows"].items():
        print(line(name, found))


def attempt(bench: Bench, row: Row, tune_s: float, left_s: float) -> dict[str, Any]:
    """:func:`measure`, or why there is no measurement. Everything is as before afterwards."""
    if row.seconds > left_s and not bench.tiny:
        return {"skipped": f"skipped: takes some {row.seconds:.0f} s, {left_s:.0f} s are left"}
    tmm_core.integrations.transformers.register()
    cached = mock.patch("torch._inductor.config.fx_graph_cache", False)
    traced = mock.patch("torch._functorch.config.enable_autograd_cache", False)
    try:
        with cached, traced, settings.override(progress=False):
            return measure(bench, row, tune_s, left_s)
    except Exception:
        return {"error": traceback.format_exc(limit=8)}
    finally:
        tmm_core.disable()
        torch._dynamo.reset()
        gc.collect()


if __name__ == "__main__":
    main()
