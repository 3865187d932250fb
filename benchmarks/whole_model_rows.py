"""The rows of :mod:`whole_models`: each makes two ways to run a model, by torch and by tmm."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import tmm_core
import tmm_core.integrations.transformers
from tmm_core import dispatch, settings
from tmm_core.interop import aten_answers, inductor
from tmm_core.launch import warm
from tmm_core.nn import convert
from tmm_core.spec.launcher import BASELINE

Tensor = torch.Tensor
Run = Callable[[], Tensor]

#: Tokens of the prompt and places of the cache in decoding.
PROMPT, CACHE = 128, 512


@dataclass
class Way:
    """A way to run a model.

    Attributes:
        run: Runs it once and returns the logits or the loss.
        weights: The model whose weights it reads.
        inside: The context of its calls.
        reset: Called before each sample.
        graph: Whether a GPU captures it in a CUDA graph.
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
    """The two ways that a row compares.

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
        """The model, which is kept until another name is requested."""
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
            # Without `problem_type` the first step sets it, and torch compiles the model again.
            kind = {"num_labels": 1000, "problem_type": "single_label_classification"}
            return t.ViTForImageClassification, t.ViTConfig(**kind, **given)
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
        """``enable()`` with its defaults, with its products tuned."""
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
            notes["saved_ms"] = round(tmm_core.enabled_report().saved_us / 1e3, 2)
            notes["still_tuned"] = [str(each.problem) for each in aten_answers.passing.values()]

        def tune() -> None:
            with tmm_core.enable(_key=self.key), self.noting():
                run()

        return Pair(Way(run, model), Way(run, model, inside), tune, notes=notes)

    def compiled(self, model: Any, make: Callable[[Any], Way], frozen: bool = False) -> Pair:
        """``torch.compile`` with and without tmm's pass, perhaps of frozen weights."""
        torch._dynamo.reset()
        frozen_or_not: Callable[[], AbstractContextManager[Any]] = nullcontext
        if frozen:  # an option of `torch.compile` has no effect: torch reads this while it traces
            frozen_or_not = functools.partial(torch._inductor.config.patch, freezing=True)
        notes: dict[str, Any] = {}

        def way(inside: Callable[[], AbstractContextManager[Any]]) -> Way:
            options = tmm_core.inductor_options()
            compiled = torch.compile(model, dynamic=False, options=options)
            return replace(make(compiled), inside=inside)

        def noted(tail: Any, terms: Any) -> bool:
            problem = inductor.problem_of(tail, terms)
            self.problems.update({problem: None, inductor.alone_of(problem): None})
            return False

        @contextmanager
        def torchs() -> Iterator[None]:
            """The pass meets every product and rewrites none, also when torch compiles again."""
            with frozen_or_not(), mock.patch.object(inductor, "pays", noted):
                yield

        usual, own = way(torchs), way(frozen_or_not)

        def tune() -> None:
            with torchs():
                notes["compile_s"] = _seconds(usual.run)

        def ready() -> None:
            rewritten: list[bool] = []
            pays = inductor.pays

            def counted(*given: Any) -> bool:
                rewritten.append(pays(*given))
                return rewritten[-1]

            with mock.patch.object(inductor, "pays", counted), frozen_or_not():
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


def compiled_prefill(bench: Bench, tokens: int, frozen: bool = False) -> Pair:
    of = bench.model("llama")
    return bench.compiled(of, lambda model: Way(bench.prefill(model, of, tokens), of), frozen)


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


def compiled_decode(bench: Bench, batch: int, frozen: bool = False) -> Pair:
    of = bench.model("llama")
    return bench.compiled(of, lambda model: bench.decode(model, of, batch), frozen)


#: With frozen weights. Torch too joins weights that multiply one input. The graphs' copies of
#: weights are not counted as memory.
frozen_decode = functools.partial(compiled_decode, frozen=True)
frozen_prefill = functools.partial(compiled_prefill, frozen=True)


def converted_decode(bench: Bench, batch: int, weights: str | None, compiled: bool = True) -> Pair:
    """A converted copy, compiled or not, compared with ``torch.compile`` of the model. In a copy
    that is not compiled, quantised weights of one input are one product, but norms and rotations
    are kernels of torch. In a compiled one, products of one input run at the same time."""
    of = bench.model("llama")
    own = convert(of, inplace=False, weights=weights).model
    torch._dynamo.reset()
    usual = bench.decode(torch.compile(of, dynamic=False), of, batch)
    eager = bench.decode(own, own, batch)
    options = tmm_core.inductor_options()
    joined = torch.compile(own, dynamic=False, options=options)
    mine = bench.decode(joined, own, batch) if compiled else eager

    def tune() -> None:
        with bench.noting():
            eager.run()

    return Pair(usual, mine, tune)


def experts(bench: Bench, model: str, tokens: int) -> Pair:
    """``experts_implementation="tmm"`` compared with ``"grouped_mm"``."""
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
        seconds: The estimated seconds that it takes on an H100.
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
    "llama-int4-decode-1": _row(2.2, 30, converted_decode, 1, "int4"),
    "llama-enable-prefill-8192": _row(1.05, 35, enabled_prefill, "llama", 8192),
    "llama-compiled-training": _row(1.02, 75, compiled_training, "llama", 1, 2048),
    **{
        f"{model}-experts-{tokens}": _row(bar, 15, experts, model, tokens)
        for model in ("qwen3-moe", "mixtral")
        for tokens, bar in ((1, 1.15), (16, 1.15), (512, 1.22), (8192, 1.30))
    },
    "bert-compiled-training": _row(1.02, 80, compiled_training, "bert", 16, 512),
    "llama-int4-decode-16": _row(1.9, 30, converted_decode, 16, "int4"),
    "llama-compiled-decode-64": _row(1.07, 30, compiled_decode, 64),
    "llama-compiled-prefill-8192": _row(1.04, 35, compiled_prefill, 8192),
    "vit-compiled-training": _row(1.02, 80, compiled_training, "vit", 64, 197),
    "llama-int4-uncompiled-decode-1": _row(2.2, 25, converted_decode, 1, "int4", False),
    "llama-int4-uncompiled-decode-16": _row(1.9, 25, converted_decode, 16, "int4", False),
    "llama-converted-decode-16": _row(1.06, 30, converted_decode, 16, None),
    "llama-frozen-decode-1": _row(1.07, 40, frozen_decode, 1),
    "llama-frozen-decode-16": _row(1.07, 40, frozen_decode, 16),
    "llama-frozen-decode-64": _row(1.07, 40, frozen_decode, 64),
    "llama-frozen-prefill-2048": _row(1.04, 40, frozen_prefill, 2048),
}


def _seconds(run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    return round(time.monotonic() - start, 1)
