"""The host's cost of calls under ``enable()``: least µs per call.

Each operator is timed on tiny operands by itself, under ``enable()`` when torch answers, and under
``enable()`` after the operator was left to torch, interleaved. ``plain`` is an override that passes
each call on and does nothing else: no override in Python can cost less. On a GPU there is also
``answered``: a Triton kernel serves the call::

    python benchmarks/passed_on.py
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import tmm_core
from tmm_core.launch.collector import collector_off

SIZE, CALLS, ROUNDS = 16, 200, 60
#: The kernel of answered calls.
KERNEL = "triton.grouped"


def products(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A call of each operator, without its dispatch in Python."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device, dtype=torch.bfloat16)

    a, b, c, out = (ones(SIZE, SIZE) for _ in range(4))
    stack, stacked = ones(2, SIZE, SIZE), ones(2, SIZE, SIZE)
    mm, addmm, baddbmm = torch.mm, torch.addmm, torch.baddbmm
    return {
        "mm": lambda: mm(a, b),
        "mm.out": lambda: mm(a, b, out=out),
        "addmm": lambda: addmm(c, a, b),
        "addmm.out": lambda: addmm(c, a, b, out=out),
        "bmm": lambda: torch.bmm(stack, stack),
        "baddbmm": lambda: baddbmm(stacked, stack, stack),
    }


def _pass_on(torchs: Any, name: str) -> Callable[..., Any]:
    """An entry of the operator's own signature."""
    if "add" not in name:
        if name.endswith("out"):
            return lambda keys, a, b, *, out: torchs(keys, a, b, out=out)
        return lambda keys, a, b: torchs(keys, a, b)
    if name.endswith("out"):
        return lambda keys, c, a, b, *, out: torchs(keys, c, a, b, out=out)
    return lambda keys, c, a, b: torchs(keys, c, a, b)


class Plain:
    """An override of one operator that passes each call on."""

    def __init__(self, name: str, key: str) -> None:
        self.name, self.key = name, key

    def __enter__(self) -> None:
        torchs = torch.library.get_kernel(f"aten::{self.name}", self.key).call_boxed
        entry = _pass_on(torchs, self.name)
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is overridden
            self.library.impl(self.name, entry, self.key, with_keyset=True, allow_override=True)

    def __exit__(self, *_: object) -> None:
        self.library._destroy()


def passing(name: str, key: str, left: bool) -> Any:
    """:func:`tmm_core.enable` that answers no call. ``left``: the operator was left to torch."""
    block = tmm_core.enable(only=lambda problem: False, _key=key)
    if left:
        block.answered[name].leave("for the comparison")
    return block


@contextmanager
def answered(name: str) -> Iterator[None]:
    """:func:`tmm_core.enable` that answers each call by one Triton kernel."""
    with tmm_core.enable(), tmm_core.override(kernel=KERNEL):
        yield
    (kernel, *others) = [k for k, n in tmm_core.enabled_report().operators[name].calls.items() if n]
    if others or kernel != KERNEL:
        raise RuntimeError(str(tmm_core.enabled_report()))


def measure(name: str, call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Least µs of a call in each state, over batches: other programs only add to it."""
    key = "CUDA" if device.type == "cuda" else "CPU"
    states: dict[str, Callable[[], Any]] = {
        "torch": nullcontext,
        "plain": lambda: Plain(name, key),
        "passed on": lambda: passing(name, key, False),
        "left": lambda: passing(name, key, True),
    }
    if device.type == "cuda":
        states["answered"] = lambda: answered(name)
    samples: dict[str, list[float]] = {state: [] for state in states}
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    with torch.no_grad(), collector_off():
        for _ in range(ROUNDS):
            for state, block in states.items():
                with block():
                    for _ in range(20):
                        call()
                    wait()
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    samples[state].append((time.perf_counter() - start) * 1e6 / CALLS)
                    wait()
    return {state: round(min(mine), 2) for state, mine in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    found = {}
    for name, call in products(device).items():
        found[name] = us = measure(name, call, device)
        more = ", ".join(f"{s} +{us[s] - us['torch']:.2f}" for s in us if s != "torch")
        print(f"{name:10} torch {us['torch']:5.2f} µs; {more}", flush=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{SIZE}×{SIZE}×{SIZE} bf16, torch {torch.__version__}, {where}")
    if options.json:
        options.json.write_text(json.dumps({"device": where, "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
