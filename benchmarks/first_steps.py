"""Prints the seconds of first steps of a converted Llama with the 8B's widths and four layers: of a
training step, of a prefill, and of a prefill with another length. Then it prints the seconds of the
first call of weights in batch-invariant mode.

    python benchmarks/first_steps.py [--no-records] [--tokens 2048] [--miss tune]

Each tunes what it meets, into an empty cache. Beside a first step stands the same step later.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--no-records", action="store_true", help="without the records of the package")
parser.add_argument("--tokens", type=int, default=2048)
parser.add_argument("--miss", default="tune", help="what a product without a record does")
options = parser.parse_args()
cache = tempfile.TemporaryDirectory()
os.environ |= {"TMM_CACHE_DIR": cache.name, "TMM_PROGRESS": "0", "TMM_ON_CACHE_MISS": options.miss}
if options.no_records:
    os.environ["TMM_SHIPPED_RECORDS"] = "0"

import torch  # noqa: E402
import transformers  # noqa: E402

import tmm_core  # noqa: E402
from tmm_core.nn import convert  # noqa: E402

#: Features and inputs of weights for batch-invariant mode.
WEIGHTS = ((4096, 4096), (2560, 9728), (1024, 8192), (28672, 4096))
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def report(name: str, run: Callable[[], object]) -> None:
    first, *later = (seconds(run) for _ in range(4))
    print(f"{name:40} {first:7.2f} s first, {min(later) * 1e3:9.2f} ms later", flush=True)


def llama_steps(tokens: int) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if not on_gpu:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=4, **sizes, **heads)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    convert(model)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(config.vocab_size, (1, length), device=device)

    def step(given: torch.Tensor) -> None:
        model(given, labels=given, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def prefill(given: torch.Tensor) -> None:
        model(given, use_cache=False, logits_to_keep=1)

    given, other = ids(tokens), ids(tokens * 2 // 3 - 1)
    report(f"training step, {tokens} tokens", lambda: step(given))
    model.eval()
    report(f"prefill, {tokens} tokens", lambda: prefill(given))
    report(f"prefill, {other.shape[1]} tokens", lambda: prefill(other))


@torch.no_grad()
def invariant_calls() -> None:
    for features, inputs in WEIGHTS if on_gpu else ((48, 64),):
        x, weight = torch.randn(33, inputs, device=device), torch.randn(features, inputs).to(device)

        def call(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            with tmm_core.override(batch_invariant=True):
                tmm_core.linear(x, weight)

        report(f"batch-invariant, weight {features}×{inputs}", call)


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    llama_steps(options.tokens)
    invariant_calls()
