"""Times products, gated layers and experts of other projects, torch and tmm, back to back.

Each provider's call is captured over enough weights to fill three times the L2. The captures are
replayed interleaved. Products by tmm are tuned at their first use::

    python benchmarks/peers.py --json peers.json

* ``torch.cuda.tunable`` chooses the kernels of torch's products while it is enabled.
* FlagGems (``flag-gems``) has a product in Triton.
* Liger (``liger-kernel``) multiplies silu of the gate by the up projection in one kernel after
  torch's product; tmm does both in the product.
* flashinfer (``flashinfer-python``) does what Liger does, by ``silu_and_mul``.
  ``SegmentGEMMWrapper`` is its product of experts in bf16, and ``mm_bf16`` chooses among the
  backends that are installed, by measuring the product in ``autotune``.

A project that is not installed, or whose kernel fails here or cannot be captured, is left out, and
the reason printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quantised import copies_of, plain

import tmm_core
from tmm_core.tuning.timing import timer_for

Tensor = torch.Tensor
Call = Callable[[int], Any]
ROUNDS = 11
#: M, N and K.
PRODUCTS = ((16, 14336, 4096), (512, 5120, 5120), (3000, 4096, 4096))
GATED = ((64, 14336, 4096), (2048, 14336, 4096))
SMALL = ((8, 64, 128),)
#: The number of experts, and the rows of all, N and K.
EXPERTS = ((8, 512, 28672, 4096), (8, 4096, 28672, 4096), (128, 4096, 1536, 2048))
SMALL_EXPERTS = ((4, 32, 64, 128),)
#: Bytes of the buffer that flashinfer recommends for ``SegmentGEMMWrapper``.
SEGMENT_BUFFER = 128 * 2**20


def installed(name: str) -> Any:
    """A module, or None and a line on stderr that says why."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a project's import raises
        print(f"{name} is left out: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return None


def products(m: int, n: int, k: int, device: torch.device) -> tuple[dict[str, Call], int]:
    """``x @ weight.T`` by each provider, and the number of weights."""
    copies = copies_of(2 * n * k, device)
    weights = [plain(n, k, device=device) for _ in range(copies)]
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    calls: dict[str, Call] = {
        "torch": lambda i: F.linear(x, weights[i]),
        "tmm": lambda i: tmm_core.linear(x, weights[i]),
    }
    if device.type == "cuda":
        calls["TunableOp"] = lambda i: F.linear(x, weights[i])
        gems = installed("flag_gems.ops.mm")
        if gems is not None:
            calls["FlagGems"] = lambda i: gems.mm(x, weights[i].t())
        flashinfer = installed("flashinfer")
        if flashinfer is not None:

            def by_flashinfer(i: int) -> Any:
                with flashinfer.autotune(tuning_buckets=(m,)):  # measures in the first call
                    return flashinfer.mm_bf16(x, weights[i].t(), backend="auto")

            calls["flashinfer"] = by_flashinfer
    return calls, copies


def gated(m: int, n: int, k: int, device: torch.device) -> tuple[dict[str, Call], int]:
    """``silu(x @ gate.T) * (x @ up.T)`` by each provider; gate and up are one weight [2N, K]."""
    copies = copies_of(4 * n * k, device)
    weights = [plain(2 * n, k, device=device) for _ in range(copies)]
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)

    def by_torch(i: int) -> Tensor:
        gate, up = F.linear(x, weights[i]).chunk(2, dim=-1)
        return F.silu(gate) * up

    calls: dict[str, Call] = {
        "torch": by_torch,
        "tmm": lambda i: tmm_core.linear(x, weights[i], epilogue="swiglu"),
    }
    liger = installed("liger_kernel.ops.swiglu") if device.type == "cuda" else None
    if liger is not None:

        def by_liger(i: int) -> Any:
            gate, up = F.linear(x, weights[i]).chunk(2, dim=-1)
            return liger.LigerSiLUMulFunction.apply(gate, up)

        calls["Liger"] = by_liger
    flashinfer = installed("flashinfer") if device.type == "cuda" else None
    if flashinfer is not None:
        calls["flashinfer"] = lambda i: flashinfer.silu_and_mul(F.linear(x, weights[i]))
    return calls, copies


def experts(
    groups: int, m: int, n: int, k: int, device: torch.device
) -> tuple[dict[str, Call], int]:
    """Each row by the weight of a random expert, sorted by expert; weights are [groups, N, K]."""
    copies = copies_of(2 * groups * n * k, device)
    weights = [plain(groups, n, k, device=device) for _ in range(copies)]
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    sizes = torch.randint(groups, (m,), device=device).bincount(minlength=groups)
    ends = sizes.cumsum(0, dtype=torch.int32)
    calls: dict[str, Call] = {
        "torch": lambda i: F.grouped_mm(x, weights[i].mT, offs=ends),
        "tmm": lambda i: tmm_core.grouped_matmul(x, weights[i].mT, offs=ends),
    }
    flashinfer = installed("flashinfer") if device.type == "cuda" else None
    if flashinfer is not None:
        buffer = torch.empty(SEGMENT_BUFFER, device=device, dtype=torch.int8)
        segments = flashinfer.SegmentGEMMWrapper(buffer)
        starts = F.pad(ends, (1, 0)).long()

        def by_flashinfer(i: int) -> Any:
            out = x.new_empty(m, n)  # without it the wrapper fills one with zeros
            return segments.run(x, weights[i], groups, True, out=out, seg_indptr=starts)

        calls["flashinfer"] = by_flashinfer
    return calls, copies


def by_tunable(call: Call) -> Call:
    """A call whose kernel TunableOp chooses, by measuring the product here."""
    chooser = torch.cuda.tunable
    chooser.tuning_enable(True)
    chooser.set_filename(str(Path(tempfile.mkdtemp()) / "tunable.csv"))

    def run(i: int) -> Any:
        chooser.enable(True)
        try:
            return call(i)
        finally:
            chooser.enable(False)

    run(0)
    torch.cuda.synchronize()
    chooser.tuning_enable(False)  # it cannot measure while calls are captured
    return run


def not_captured(timer: Any) -> list[Call]:
    """The calls that a GPU's timer had to launch one by one: their times include the host's."""
    chains = getattr(timer, "_chains", {}).values()
    return [chain.run for chain in chains if chain.graph is None]


def measure(
    what: str, sizes: tuple[int, ...], calls: dict[str, Call], copies: int,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """µs of each provider, and how many times as fast as torch it is. ``sizes`` ends in M, N and K;
    the number of experts may precede them."""
    expected = None
    for name, call in list(calls.items()):  # the first calls also tune
        try:
            if name == "TunableOp":
                call = calls[name] = by_tunable(call)
            y = call(0).float()
            expected = y if expected is None else expected
            error = float((y - expected).abs().max() / expected.abs().max())
            if not error < 2e-2:
                raise ValueError(f"differs by {error:.2g} of the largest element")
        except Exception as failure:  # a peer's kernel may raise anything
            print(f"{name} fails: {type(failure).__name__}: {failure}"[:200], file=sys.stderr)
            del calls[name]
    timer = timer_for(device)
    samples = timer.measure(list(calls.values()), ROUNDS, copies=copies)
    slow = not_captured(timer)
    timer.release()
    us = {}
    for (name, call), mine in zip(calls.items(), samples, strict=True):
        if call in slow:
            print(f"{name} cannot be captured", file=sys.stderr)
        else:
            us[name] = round(statistics.median(mine), 2)
    ratios = {name: round(us["torch"] / each, 3) for name, each in us.items()}
    shown = ", ".join(f"{name} {each:.1f} µs ({ratios[name]:.2f})" for name, each in us.items())
    print(f"{what} {'×'.join(map(str, sizes))}: {shown}", flush=True)
    *groups, m, n, k = sizes
    problem = {"what": what, "m": m, "n": n, "k": k} | ({"experts": groups[0]} if groups else {})
    return problem | {"us": us, "ratios": ratios}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", type=float, default=2.0, help="seconds to tune a product")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    small = options.small
    asked: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = []
    asked += [("swiglu", gated, sizes) for sizes in (SMALL if small else GATED)]
    asked += [("experts", experts, sizes) for sizes in (SMALL_EXPERTS if small else EXPERTS)]
    asked += [("product", products, sizes) for sizes in (SMALL if small else PRODUCTS)]
    with tmm_core.override(tune_budget=options.budget):
        for what, providers, sizes in asked:
            found.append(measure(what, sizes, *providers(*sizes, device), device))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
