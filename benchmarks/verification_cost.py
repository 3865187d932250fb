"""Measures what verification costs: its share of a tuning, and its time in a first call.

``python benchmarks/verification_cost.py`` tunes some problems on the GPU (or with ``--device cpu``)
without records and prints a table. Its columns are:

- the seconds of the tuning;
- the shares of it spent in verification and in the further ways of use;
- the seconds in each way, GPU time included: other forms, modes, two threads, further inputs;
- the number of candidates verified in these ways;
- the milliseconds of a verification at first use, and at a further size.

On a CPU a kernel that multiplies in fp32 competes with BLAS.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tmm_cache import CacheStore

from tmm_core import Config, Kernel, Launcher, Supports, dispatch, hookimpl, settings
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.spec.device import current_device, fingerprint
from tmm_core.spec.groups import Groups
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.verify.verifier import Verifier
from tmm_core.verify.ways_of_use import WaysOfUse

Tensor = torch.Tensor

#: Stages of a verification in further ways of use.
FURTHER = ("forms", "modes", "together", "rounds")
SIZES = {
    "cuda": ((16, 4096, 4096), (256, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 14336)),
    "cpu": ((16, 256, 256), (64, 512, 512), (256, 512, 512)),
}


@contextlib.contextmanager
def timed(owner: type, name: str, spent: dict[str, float], calls: dict[str, int]) -> Iterator[None]:
    """Add the time of a method and of the kernels that it launches to ``spent`` under its name, and
    count its calls."""
    method = getattr(owner, name)

    def add(begun: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun

    def steps(generator: Any) -> Any:
        """The same steps; the caller's time between them is not counted."""
        while True:
            begun = time.perf_counter()
            try:
                step = next(generator)
            except StopIteration as end:
                return end.value
            finally:
                add(begun)
            yield step

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        begun = time.perf_counter()
        try:
            result = method(*arguments, **keywords)
        finally:
            add(begun)
        return steps(result) if inspect.isgenerator(result) else result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


class InFp32(Kernel[Config]):
    """Multiplies fp16 matrices in fp32."""

    name = "benchmark.fp32"
    config_type = Config
    supports = Supports(
        devices=("cpu",),
        operands=(torch.float16,),
        out=(torch.float16,),
        layouts={"b": ("row", "col")},
        batch=None,
    )

    def configs(self, problem: Problem) -> list[Config]:
        return [Config()]

    def default_config(self, problem: Problem) -> Config:
        return Config()

    def bind(self, problem: Problem, config: Config) -> Launcher:
        def launch(
            a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, out: Tensor | None
        ) -> Tensor:
            product = a.float() @ b.float()
            return product.to(a.dtype) if out is None else out.copy_(product)

        return launch


class Plugin:
    @hookimpl
    def tmm_kernels(self) -> list[Kernel[Any]]:
        return [InFp32()]


def problems(device: torch.device) -> Iterator[Problem]:
    """Products, a layer's call, a batch and groups."""
    half, of = Operand(torch.float16), fingerprint(device)
    column = Operand(torch.float16, "col")
    sizes = SIZES[device.type]
    for m, n, k in sizes:
        yield Problem(m, n, k, half, column, half, of)
    m, n, k = sizes[1]
    if device.type == "cuda":
        terms: dict[str, Any] = {"bias": torch.float16, "residual": half, "scaled": True}
        yield Problem(m, n, k, half, column, half, of, **terms)
    yield Problem(m, n // 4, k // 4, half, half, half, of, batch=8)
    if device.type == "cuda":
        yield Problem(m, n, k, half, half, half, of, groups=Groups(8, "m", torch.int64))


def row(chooser: Dispatcher, problem: Problem) -> list[str]:
    """The figures of one problem."""
    spent: dict[str, float] = {}
    calls: dict[str, int] = {}
    current = settings.current()
    with contextlib.ExitStack() as stack:
        stack.enter_context(timed(Verifier, "steps", spent, calls))
        for name in FURTHER:
            stack.enter_context(timed(WaysOfUse, name, spent, calls))
        begun = time.perf_counter()
        record = chooser.tune(problem, current, force=True)
        whole = time.perf_counter() - begun
    verified, further = spent["steps"], sum(spent.get(name, 0.0) for name in FURTHER)
    (kernel,) = (k for k in chooser.registry.kernels() if k.name == record.best.kernel)
    launcher = kernel.bind(problem, kernel.config_type.from_json(record.best.config))
    first, later = (
        statistics.median(seconds(problem, launcher, extent) for _ in range(7))
        for extent in ("first use", "brief")
    )
    return [
        str(problem), record.best.kernel, f"{whole:.2f}", f"{verified / whole:.1%}",
        f"{further / whole:.1%}", *(f"{spent.get(name, 0.0):.3f}" for name in FURTHER),
        str(calls.get("rounds", 0)), f"{1e3 * first:.1f}", f"{1e3 * later:.1f}",
    ]  # fmt: skip


def seconds(problem: Problem, launcher: Any, extent: Any) -> float:
    """The time of one verification in a call, with its tensors."""
    begun = time.perf_counter()
    Verifier(problem, current_device(problem.device), sampled=True).verdict(launcher, extent=extent)
    return time.perf_counter() - begun


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for each in rows:
        print("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=usual, choices=("cuda", "cpu"))
    device = torch.device(parser.parse_args().device)
    head = ["problem", "kernel", "tuning s", "verifying", "further ways"]
    head += [*(f"{name} s" for name in FURTHER), "candidates", "first use ms", "size ms"]
    rows, shares = [head], []
    with tempfile.TemporaryDirectory() as folder:
        registry = dispatch.default_dispatcher().registry
        if device.type == "cpu":
            registry.register(Plugin(), "benchmark")
        for problem in problems(device):
            chooser = Dispatcher(registry, None, CacheStore(folder, []))
            rows.append(row(chooser, problem))
            shares.append(float(rows[-1][4].rstrip("%")))
    show(rows)
    print(f"further ways: {statistics.median(shares):.1f} % of a tuning (median)")


if __name__ == "__main__":
    main()
