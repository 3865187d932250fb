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
import gc
import json
import statistics
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from whole_model_rows import ROWS, Bench, Row, Way

import tmm_core
import tmm_core.integrations.transformers
from tmm_core import settings
from tmm_core.bench.provenance import describe
from tmm_core.launch.collector import collector_off

Tensor = torch.Tensor

#: Rounds of two samples of each way, at least and at most, and the seconds that a row may take
#: between them.
ROUNDS, MOST_ROUNDS, SECONDS = 3, 11, 6.0
#: Seconds of warm calls, in which ``enable()`` notices what does not pay.
WARM = 1.0
#: Least ms of a sample.
SAMPLE_MS = 20.0
#: Seconds before the end of the budget from which on nothing is tuned.
RESERVE = 15.0


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
    tuned, limit, refused = 0, min(left_s - RESERVE, 2 * row.seconds), []
    for number in range(0, len(problems), 4):  # several, so that the next one is compiled ahead
        if time.monotonic() - started > limit:
            break
        some = problems[number : number + 4]
        try:
            tuned += len(tmm_core.tune(some, budget=tune_s))
        except tmm_core.TmmError as error:
            refused.append(str(error))
    found: dict[str, Any] = {"bar": row.bar, "tuning_s": round(time.monotonic() - began, 1)}
    found |= {"products": len(problems), "tuned": tuned, "not_tuned": refused}
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
    """ms of one call in each round; each sample begins with a call that is not timed.

    A sample depends on what ran before it: by 9 % in a small model's training. So a round is tmm,
    torch, torch, tmm, and its ms are the mean of both samples of a way.
    """
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
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for name in (*reversed(ways), *ways):
            with ways[name].inside():
                ways[name].reset()
                ways[name].run()
                samples[name].append(_timed(ways[name], device, calls[name]))
        for name, mine in samples.items():
            ms[name].append(statistics.mean(mine))
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
    """The peak of bytes during one call, in addition to those allocated before."""
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


def table(documents: list[dict[str, Any]]) -> str:
    """The measured rows of results as a table in Markdown; later documents count."""
    rows: dict[str, dict[str, Any]] = {}
    for document in documents:
        rows |= {name: found for name, found in document["rows"].items() if "ratio" in found}
    lines = [
        "| | torch, ms | tmm | ratio (quartiles) | bar | memory |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(rows, key=list(ROWS).index):
        found = rows[name]
        low, high = found["spread"]
        ms = " | ".join(f"{found['ms'][way]:.3g}" for way in ("torch", "tmm"))
        memory = f"{found['memory_ratio']:.3f}" if "memory_ratio" in found else ""
        ratio = f"{found['ratio']:.3f}× ({low:.3f} to {high:.3f})"
        lines.append(f"| {name.replace('-', ' ')} | {ms} | {ratio} | {found['bar']} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="rows whose names begin so, in this order"
    )
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--tune", type=float, default=2.5, help="seconds to tune a product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--list", action="store_true", help="print the rows and run none")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print these as one")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(path.read_text()) for path in options.table]))
        return
    rows = {n: row for named in options.rows for n, row in ROWS.items() if n.startswith(named)}
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
