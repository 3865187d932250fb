"""Right kernels that round as GPUs do, for random problems: verification may refuse none of them.

:func:`launcher` computes the whole expression by a copy of :mod:`tmm_core.verify.compare`. Its
products round differently: sums in fp32 in steps, sums of tensor cores, operands in TF32, splits
along K. ``python tests/honest.py --count 3000`` verifies 3,000 kernels and prints the refused ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import torch
from fakes import DEVICE
from tmm_blas.blas import Blas, BlasConfig

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.launcher import Launcher
from tmm_core.verify import compare, ways_of_use
from tmm_core.verify.ragged_inputs import Inputs, Rows
from tmm_core.verify.verifier import Extent, Verdict, Verifier

Tensor = torch.Tensor
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rounding:
    """How a kernel rounds.

    Attributes:
        step: Terms that are added exactly before the sum is rounded.
        bits: Bits to which a tensor core truncates the sum after each step; 0: each step is rounded
            to the nearest fp32 number.
        promoted: Terms after which a sum of tensor cores is added to a sum in fp32.
        splits: Parts along K, each summed by itself.
        tf32: How fp32 operands become TF32: ``truncated`` or ``nearest``.
        scaled: A weight's values are multiplied by their scales and rounded to 16 bits.
        fast: The relative error of an approximated epilogue.
        flushed: Subnormal fp32 numbers become zero.
        torch: Torch's own operators compute the result, and each rounds to the result's dtype.
    """

    step: int = 32
    bits: int = 0
    promoted: int = 0
    splits: int = 1
    tf32: str = "truncated"
    scaled: bool = False
    fast: float = 0.0
    flushed: bool = False
    torch: bool = False

    def __str__(self) -> str:
        own = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{name}={value}" for name, value in own if value) or "exact"


def _truncated(t: Tensor, bits: int) -> Tensor:
    """fp64 numbers rounded towards zero to this many bits."""
    mask = ~((1 << (53 - bits)) - 1)
    return (t.view(torch.int64) & mask).view(torch.float64)


def _tf32(t: Tensor, how: str) -> Tensor:
    bits = t.float().contiguous().view(torch.int32)
    if how == "nearest":
        bits = torch.where(t.isfinite(), bits + 0x1000, bits)
    return (bits & ~0x1FFF).view(torch.float32)


class Honest:
    """The reference of a problem, computed with products that round as ``how`` says."""

    def __init__(self, problem: Problem, how: Rounding) -> None:
        # Epilogues in fp64: in fp32 torch's own gelu(inf) is NaN on a CPU.
        epilogue = problem.epilogue
        if not how.torch:
            epilogue = _In64(**{f.name: getattr(epilogue, f.name) for f in fields(epilogue)})
        self.problem, self.how = replace(problem, epilogue=epilogue), how
        self.module = _copy_of(compare)
        self.module._product = self._product  # type: ignore[attr-defined]

    def _product(self, a: Tensor, b: Tensor, precise: bool) -> Tensor:
        problem, how = self.problem, self.how
        a, b = a.double(), b.double()
        if problem.a.dtype is torch.float64:
            return a @ b
        if how.scaled and problem.b.grid and not problem.a.grid:
            b = b.to(problem.value).double()
        if problem.tf32:
            a, b = (_tf32(t, how.tf32).double() for t in (a, b))
        k = a.shape[-1]
        edges = [round(k * place / how.splits) for place in range(how.splits + 1)]
        total = a.new_zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
        for low, high in itertools.pairwise(edges):
            if high > low:
                total = total + self._sum(a[..., low:high], b[..., low:high, :])
        return self._rounded(total) if how.torch else total

    def _rounded(self, z: Tensor) -> Tensor:
        """Round a product as torch does; torch.addmm applies alpha and the bias before rounding."""
        problem = self.problem
        whole = problem.bias in (None, problem.out.dtype) and problem.batch == 1
        if problem.stored or (whole and not problem.groups and problem.bias):
            return z
        return z.to(problem.out.dtype)

    def _sum(self, a: Tensor, b: Tensor) -> Tensor:
        """A sum in fp32, in order."""
        how, k = self.how, a.shape[-1]
        step = how.step
        if k % step:
            a = torch.nn.functional.pad(a, (0, step - k % step))
            b = torch.nn.functional.pad(b, (0, 0, 0, step - k % step))
        of_a = a.unflatten(-1, (-1, step)).movedim(-2, 0)
        of_b = b.unflatten(-2, (-1, step)).movedim(-3, 0)
        wide = a.new_zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
        acc = wide.double()
        every = max(1, how.promoted // step) if how.promoted else 0
        for place, part in enumerate(torch.matmul(of_a, of_b), 1):
            acc = acc + part
            acc = _truncated(acc, how.bits) if how.bits else acc.float().double()
            if every and place % every == 0:
                wide, acc = wide + acc.float(), torch.zeros_like(acc)
        return wide + acc.float()

    def result(self, inputs: Inputs) -> Tensor:
        how, problem, module, every = self.how, self.problem, self.module, slice(None)
        y: Tensor = compare.zeros(
            problem, every, every, compare._wide(problem.out.dtype), inputs.a.device
        )
        for at, piece in module.pieces(problem, inputs, every, every, compare.ROOM):  # type: ignore[attr-defined]
            y[at] = piece.y.to(y.dtype)
        if how.fast and y.is_floating_point():
            noise = 2 * torch.frac(y.double().nan_to_num(0, 0, 0) * 1e6).abs() - 1
            y = torch.where(y.isfinite(), y * (1 + how.fast * noise).to(y.dtype), y)
        if how.flushed and y.dtype is torch.float32:
            y = torch.where(y.abs() < 2.0**-126, y * 0, y)
        return y.to(self.problem.out.dtype)


class _In64(Epilogue):
    """Computes in fp64, and rounds to the dtype of its input."""

    __hash__ = Epilogue.__hash__

    def apply_to(self, *inputs: Tensor) -> Tensor:
        return super().apply_to(*(z.double() for z in inputs)).to(inputs[0].dtype)


def _copy_of(module: ModuleType) -> ModuleType:
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules["honest_compare"] = copy  # dataclasses look their module up
    spec.loader.exec_module(copy)
    return copy


def launcher(problem: Problem, how: Rounding) -> Launcher:
    """Return a right launcher that rounds as ``how`` says."""
    if how.torch and not problem.out.dtype.is_floating_point:
        return torchs(problem)
    honest = Honest(problem, how)

    def launch(
        a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, out: Any, **extras: Any
    ) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            rows = None
            if problem.groups is not None:
                given = {name: extras.pop(name) for name in problem.groups.given}
                rows = Rows(ends=tuple(given["offs"].tolist()), read=a.shape[0], **given)
            inputs = Inputs(a, b, bias, residual, alpha, extras, rows)
            y = honest.result(inputs)
            out = problem.empty_out(CPU) if out is None else out
            defined = (..., *inputs.defined(problem))
            out[defined] = y[defined].to(out.dtype)
            return out

    return launch


def torchs(problem: Problem) -> Launcher:
    """Return a launcher of torch's own expression."""
    right: Any = Blas().bind(problem, BlasConfig())

    def launch(*given: Any, **extras: Any) -> Tensor:
        with torch.no_grad():
            return right(*given, **extras)

    return launch


# -- random problems -------------------------------------------------------------------------

HALVES = (torch.float16, torch.bfloat16)
SIZES = (1, 1, 2, 3, 5, 7, 8, 16, 17, 24, 33, 40, 64)
TERMS = (1, 2, 3, 5, 7, 8, 16, 24, 33, 48, 64, 100, 128, 256, 300, 512, 1024)
LONG = (2048, 4096, 8192, 16384)
CHAINS = (
    "swiglu+softcap(5.0)", "gelu_tanh+softcap(3)", "swiglu+scale(0.5)", "silu+softcap(30)",
    "softcap(2.5)", "leaky_relu(0.25)", "tanh+scale(3)", "relu2+softcap(4)", "gelu+tanh",
    "silu+silu+silu", "softcap(5)+softcap(4)+scale(2)+leaky_relu(0.1)", "softplus+softcap(2)",
    "scale(0.000001)", "scale(1000)", "relu+scale(0.001)", "silu+scale(0.0001)+softcap(1)",
)  # fmt: skip


def _layout(chance: random.Random, dtype: torch.dtype, *, strided: bool = True) -> dict[str, Any]:
    layout = chance.choice(("row", "row", "col", "strided") if strided else ("row", "row", "col"))
    return {"layout": layout, "aligned": layout != "strided" and chance.random() < 0.6}


def random_problem(chance: random.Random) -> Problem:
    """A random problem. No call has some of these problems, see :func:`is_call`."""
    m, n = chance.choice(SIZES), chance.choice(SIZES)
    k = chance.choice(LONG if chance.random() < 0.05 else TERMS)
    if k >= 2048:
        m, n = min(m, 17), min(n, 17)
    kind = chance.choice(
        ("half",) * 8 + ("fp32", "fp32", "tf32", "tf32", "tf32", "fp64", "fp8", "fp8", "fp8")
        + ("weight",) * 6 + ("wide", "wide", "whole", "complex")
    )  # fmt: skip
    dtype, out = torch.float32, None
    if kind in ("half", "wide"):
        dtype = chance.choice(HALVES)
        out = torch.float32 if kind == "wide" else dtype
    elif kind == "fp64":
        dtype = torch.float64
    elif kind == "whole":
        dtype = chance.choice((torch.int8, torch.int32, torch.int64, torch.uint8))
    elif kind == "complex":
        dtype = chance.choice((torch.complex64, torch.complex128))
    elif kind == "weight":
        dtype = chance.choice((*HALVES, torch.bfloat16))
    a, b = (Operand(dtype, **_layout(chance, dtype)) for _ in "ab")
    out = out or dtype
    if kind == "fp8":
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        both = chance.choice(((e4m3, e4m3), (e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)))
        text = chance.choice(("tensor", "row", "1x128", "1x32", "none"))
        scale = None if text == "none" else Scale.parse(text)
        a, b = (replace(t, dtype=d, scale=scale) for t, d in zip((a, b), both, strict=True))
        if text == "1x128" and chance.random() < 0.5:
            b = replace(b, scale=Scale.parse("128x128"))
        out = chance.choice((*HALVES, torch.bfloat16, torch.float32))
    elif kind == "weight":
        k = -(-k // 128) * 128
        name, texts, store = chance.choice((
            ("int8", ("tensor", "row", "1x128"), torch.int8),
            ("int4", ("row", "1x32", "1x128 bfloat16"), torch.uint8),
            ("int4", ("1x64", "1x128"), torch.uint8),
            ("mxfp4", ("1x32 uint8",), torch.uint8),
            ("nvfp4", ("1x16 float8_e4m3fn",), torch.uint8),
            ("mxfp8", ("1x32 uint8",), torch.float8_e4m3fn),
        ))  # fmt: skip
        layout = chance.choice(("col", "col", "row"))
        zero = name == "int4" and chance.random() < 0.4
        b = Operand(
            store, layout, chance.random() < 0.7, format=name,
            scale=Scale.parse(chance.choice(texts)), zero=zero,  # type: ignore[arg-type]
        )  # fmt: skip
        out = chance.choice((dtype, dtype, dtype, torch.float32))
    features: dict[str, Any] = {}
    numbers = out.is_floating_point
    if numbers and chance.random() < 0.6:
        features["epilogue"] = parse(chance.choice((*BUILTIN, *CHAINS)))
    if chance.random() < 0.4:
        features["bias"] = chance.choice((out, out, torch.float32)) if numbers else out
    if chance.random() < 0.3:
        of = chance.choice((out, out, torch.float32)) if numbers else out
        features["residual"] = Operand(of, **_layout(chance, of))
    features["scaled"] = chance.random() < 0.3
    features["tf32"] = kind == "tf32"
    placed = Operand(out)
    if chance.random() < 0.25 and out.is_floating_point:
        along: Any = chance.choice(("m", "m", "m", "n", "k"))
        extra: dict[str, Any] = {}
        if along == "m":
            extra["a_index"] = chance.choice((None, torch.int64, torch.int32))
            extra["out_index"] = chance.choice((None, None, torch.int32))
            extra["out_weights"] = chance.choice((None, None, torch.float32))
        extra["zeroed"] = chance.random() < 0.3
        features["groups"] = Groups(chance.choice((1, 2, 3, 5, 8)), along, **extra)
        if "residual" in features:
            features["residual"] = replace(features["residual"], layout="row")
    else:
        features["batch"] = chance.choice((1, 1, 1, 2, 3))
        placed = Operand(out, **_layout(chance, out)) if chance.random() < 0.3 else placed
    return Problem(m, n, k, a, b, placed, DEVICE, **features)


def roundings(chance: random.Random, problem: Problem) -> Rounding:
    """A random way in which a kernel may round this problem."""
    if not problem.out.dtype.is_floating_point or problem.a.dtype is torch.float64:
        return Rounding(torch=True)
    same = problem.out.dtype is problem.value
    if chance.random() < (0.25 if problem.a.dtype.itemsize == 2 else 0.1):
        return Rounding(torch=True)
    rest: dict[str, Any] = {
        "splits": chance.choice((1, 1, 2, 5)),
        "fast": chance.choice((0.0, 2.0**-21)),
        "flushed": chance.random() < 0.5,
        "tf32": chance.choice(("truncated", "nearest")),
    }
    if problem.native:
        if problem.a.grid or problem.b.grid or chance.random() < 0.8:
            step = 32
            promoted = chance.choice((32, 64, 128))
            return Rounding(step, 14, promoted, **rest)
        return Rounding(chance.choice((32, 64)), **rest)  # operands converted to 16 bits
    if chance.random() < 0.6:
        step = 8 if problem.tf32 else 16
        if problem.a.dtype is not torch.float32 or problem.tf32:
            return Rounding(step, 24, **rest, scaled=same and chance.random() < 0.5)
    return Rounding(chance.choice((1, 8, 32, 64)), **rest)


def cases(seed: int, count: int) -> Iterator[tuple[int, Problem, Rounding]]:
    """Yield seeds, each with its random problem and rounding."""
    for each in range(seed, seed + count):
        chance = random.Random(each)
        while True:
            problem = random_problem(chance)
            if is_call(problem):
                break
        yield each, problem, roundings(chance, problem)


def is_call(problem: Problem) -> bool:
    """Whether BLAS serves the problem and its operands can be made."""
    try:
        if Blas().reasons_against(problem):
            return False
        for spec, outer, stack in ((problem.a, problem.m, 1), (problem.b, problem.width, 1)):
            if spec.form is not None and spec.scale is not None:
                own = spec.form.block(spec.scale.block, outer, problem.k, stack)
                if own != spec.scale.block:
                    return False
        if problem.along == "n" and (problem.bias or problem.gated):
            return False
        if (
            problem.groups is not None
            and problem.along == "k"
            and (problem.a.grid or problem.b.grid)
        ):
            return False
        if problem.along == "k" and max(problem.a.pack, problem.b.pack) > 1:
            return False
    except (ValueError, NotImplementedError, KeyError):
        return False
    return True


def verified(problem: Problem, how: Rounding, extent: Extent = "whole") -> Verdict:
    """The verdict on an honest kernel, without launches from two threads."""
    together = ways_of_use.WaysOfUse.together
    ways_of_use.WaysOfUse.together = lambda self: iter(())  # type: ignore[assignment,method-assign]
    try:
        return Verifier(problem, CPU).verdict(launcher(problem, how), extent=extent, repeats=2)
    finally:
        ways_of_use.WaysOfUse.together = together  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    refused, raised, begun = 0, 0, time.monotonic()
    done = 0
    for place, (seed, problem, how) in enumerate(cases(options.seed, options.count)):
        if place % 100 == 0:
            print(f"{place} in {time.monotonic() - begun:.0f} s", flush=True)
        try:
            verdict = verified(problem, how)
        except Exception as error:
            if options.trace:
                raise
            raised += 1
            print(f"{seed}: {problem} ({how}) raised {type(error).__name__}: {error}", flush=True)
            continue
        done += 1
        if not verdict.ok:
            refused += 1
            print(f"{seed}: {problem} ({how}): {verdict.reason}", flush=True)
    took = time.monotonic() - begun
    print(f"{done} verified in {took:.0f} s, {refused} refused, {raised} raised")
    return 1 if refused or raised else 0


if __name__ == "__main__":
    sys.exit(main())
