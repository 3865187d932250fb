"""Each row of ``benchmarks/whole_models.py``, at tiny widths on a CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers")


import tmm_core
from tmm_core.interop import inductor

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import whole_models
    monkeypatch.setattr(whole_models, "SECONDS", 0.01)
    monkeypatch.setattr(whole_models, "ROUNDS", 2)
    monkeypatch.setattr(whole_models, "WARM", 0.1)
    monkeypatch.setattr(whole_models, "SAMPLE_MS", 0.1)
    return whole_models


def _rows() -> list[str]:
    names = ["llama-enable-prefill-2048", "llama-enable-training", "small-enable-forward"]
    names += ["small-enable-training", "gpt2-enable-training", "llama-enable-prefill-8192"]
    names += [f"{m}-experts-{n}" for m in ("qwen3-moe", "mixtral") for n in (1, 16, 512, 8192)]
    names += [f"llama-compiled-decode-{n}" for n in (1, 16, 64)]
    names += [f"llama-frozen-decode-{n}" for n in (1, 16, 64)] + ["llama-frozen-prefill-2048"]
    names += ["llama-compiled-prefill-2048", "llama-compiled-prefill-8192"]
    names += [f"{model}-compiled-training" for model in ("llama", "bert", "vit")]
    names += ["llama-int4-decode-1", "llama-int4-decode-16", "llama-converted-decode-16"]
    return [*names, "llama-int4-uncompiled-decode-1", "llama-int4-uncompiled-decode-16"]


ROWS = _rows()


def test_the_rows_equal_the_benchmarks(bench: Any) -> None:
    assert set(ROWS) == set(bench.ROWS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.slow
def test_each_row_of_the_benchmark_runs(bench: Any, name: str) -> None:
    torch.manual_seed(0)
    interpreted = [each.name for each in tmm_core.kernels() if each.name != "blas"]
    with tmm_core.override(disable=interpreted):  # which would take most of the time
        found = bench.attempt(bench.Bench(torch.device("cpu")), bench.ROWS[name], 1.0, 600.0)
    assert "error" not in found, found["error"]
    assert found["tuned"] == found["products"] > 0
    assert found["samples"] >= 2
    assert found["ratio"] > 0
    # Models whose weights are rounded differ by more than rounding.
    assert (0.01 < found["difference"] < 0.5) if "int4" in name else found["difference"] < 0.02
    if "-enable-" in name:
        assert sum(sum(calls.values()) for calls in found["calls"].values()) > 0
        assert found["products"] >= 5
    if "-compiled-" in name:
        rewritten, _, products = found["rewritten"].partition(" of ")
        assert (int(rewritten), int(products) > 0) == (0, True)  # on a CPU BLAS wins
    assert f"{found['ratio']:.3f}×" in bench.line(name, found)
    assert not tmm_core.enabled_report().active


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchs_way_stays_torchs_when_torch_compiles_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = bench.ROWS["llama-compiled-decode-1"].make(bench.Bench(torch.device("cpu")))
    pair.tune()
    asked: list[Any] = []
    monkeypatch.setattr(inductor, "pays", lambda *given: asked.append(given))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    monkeypatch.setattr("torch._functorch.config.enable_autograd_cache", False)
    for way in (pair.torch, pair.tmm):
        torch._dynamo.reset()
        with way.inside():
            way.run()
        assert bool(asked) == (way is pair.tmm)


def test_results_are_one_table(bench: Any) -> None:
    one = {
        "bar": 1.05, "ratio": 1.0612, "spread": [1.05, 1.07], "ms": {"torch": 20.5, "tmm": 19.3},
        "memory_ratio": 1.0,
    }  # fmt: skip
    first = {"rows": {"mixtral-experts-1": one, "small-enable-forward": {"error": "no memory"}}}
    second = {"rows": {"llama-enable-training": one | {"bar": 1.02}, "mixtral-experts-1": one}}
    *_, training, experts = bench.table([first, second]).splitlines()
    expected = "| 20.5 | 19.3 | 1.061× (1.050 to 1.070) |"
    assert training == f"| llama enable training {expected} 1.02 | 1.000 |"
    assert experts == f"| mixtral experts 1 {expected} 1.05 | 1.000 |"
    assert "small" not in bench.table([first, second])


@pytest.mark.slow
def test_a_row_that_fails_or_does_not_fit_says_so(bench: Any) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("no such model")

    cpu = torch.device("cpu")
    found = bench.attempt(bench.Bench(cpu), bench.Row(1.0, 10.0, fail), 1.0, 600.0)
    assert "no such model" in bench.line("row", found)
    found = bench.attempt(bench.Bench(cpu, tiny=False), bench.Row(1.0, 10.0, fail), 1.0, 5.0)
    assert bench.line("row", found).endswith("takes some 10 s, 5 s are left")
