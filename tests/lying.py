"""Kernels that are right in most launches and wrong in some: a class for each way to be wrong.

:meth:`Lie.lie` makes a launch wrong: it gets the correct launcher and the arguments of the launch.
:attr:`Lie.problem` is a problem for which some launches are wrong. The rows of :data:`LIES`:

=====  ===================================  =====  ===========================
A1     sizes                                A7     buffers returned again
A2     alpha                                A8     magnitudes
A3     strides of bias and residual         A9     torch's modes
A4     other forms of a launcher            A10    group sizes
A5     threads                              A11    aliases and strides
A6     caches by address                    A12    state of the process
=====  ===================================  =====  ===========================
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from fakes import FakeConfig, FakeKernel, problem

from tmm_core import Groups, Problem
from tmm_core.epilogues import EPILOGUES
from tmm_core.spec.launcher import Bound
from tmm_core.spec.operand import Operand

Tensor = torch.Tensor
F16, LOOSE = Operand(torch.float16), Operand(torch.float16, aligned=False)
HALF: dict[str, Any] = {"a": F16, "b": F16, "out": F16}


def half(m: int = 64, n: int = 32, k: int = 16, **fields: Any) -> Problem:
    return problem(m, n, k, **{**HALF, **fields})


class Lie(FakeKernel):
    """A kernel that is right except for :meth:`lie`."""

    #: A problem for which some launches are wrong.
    problem: ClassVar[Problem] = half()
    #: M of the calls that are wrong, if it differs from the M that is tuned.
    at: ClassVar[int | None] = None

    def __init__(self, name: str = "") -> None:
        super().__init__(name or "test.lying", estimate=1.0)

    def lie(self, right: Any, *given: Any) -> Any:
        """Launch with a, b, bias, residual, alpha, out; subclasses make the result wrong."""
        return right(*given)

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right: Any = super().bind(problem, config) if problem.groups is None else by_groups

        def launch(*given: Any, **extras: Any) -> Any:
            if extras:
                return self.lie_of_groups(*given, **extras)
            return self.lie(right, *given)

        launch.cost = (self.name, 1)  # type: ignore[attr-defined]
        return launch

    def lie_of_groups(self, *given: Any, **extras: Any) -> Any:
        return by_groups(*given, **extras)


def by_groups(
    a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, out: Any, *,
    offs: Tensor, a_index: Tensor | None = None, out_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a grouped product with ragged rows, correctly."""
    rows = a.shape[0] if a_index is None else a_index.shape[0]
    out = a.new_zeros(rows, b.shape[-1]) if out is None else out
    start = 0
    for group, end in enumerate(offs.tolist()):
        at = slice(start, end) if a_index is None else a_index[start:end].long()
        product = a[at].float() @ b[group].float()
        if out_weights is not None:
            product = product * out_weights[start:end, None]
        out[start:end] = product.to(out.dtype)
        start = end
    return out


def spoiled(result: Tensor, out: Any) -> Tensor:
    """The result with one wrong element."""
    result[..., -1, -1] += 1
    return result


def wrong_if(condition: Callable[..., bool]) -> Callable[..., Any]:
    """A method ``lie`` whose result is wrong where a condition on (self, a, b, bias, residual,
    alpha, out) holds."""

    def lie(self: Lie, right: Any, *given: Any) -> Any:
        result = right(*given)
        return spoiled(result, given[-1]) if condition(self, *given) else result

    return lie


# -- A1: sizes -----------------------------------------------------------------------------


class LastRowsAtMultiplesOf8(Lie):
    problem, at = half(64, 8, 8), 40

    def lie(self, right: Any, *given: Any) -> Any:
        result = right(*given)
        if result.shape[0] % 8 == 0 and result.shape[0] % 16:
            result[-8:] = 0
        return result


class FirstRowAtMultiplesOf16(Lie):
    problem, at = half(64, 8, 8), 48

    def lie(self, right: Any, *given: Any) -> Any:
        result = right(*given)
        if result.shape[0] % 32 == 16:
            result[0] = 0
        return result


class EvenSizes(Lie):
    problem, at = half(64, 8, 8), 42
    lie = wrong_if(lambda self, a, *_: a.shape[0] % 4 == 2)


class MultiplesOf4(Lie):
    problem, at = half(320, 8, 8), 260
    lie = wrong_if(lambda self, a, *_: a.shape[0] % 8 == 4)


class MultiplesOf3(Lie):
    problem, at = half(320, 8, 8), 282
    lie = wrong_if(lambda self, a, *_: a.shape[0] % 6 == 0)


class ColumnTail(Lie):
    problem = half(8, 24, 8)
    lie = wrong_if(lambda self, a, b, *_: b.shape[1] % 16 == 8)


class SumTail(Lie):
    """It leaves out the last terms of each sum."""

    problem = half(8, 16, 24)

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        k = a.shape[1] // 16 * 16
        return right(a[:, :k], b[:k], *given)


# -- A2: alpha -----------------------------------------------------------------------------

SCALED = half(8, 8, 8, scaled=True)


def alpha_lie(condition: Callable[[float], bool]) -> type[Lie]:
    class Alpha(Lie):
        problem = SCALED
        lie = wrong_if(lambda self, a, b, bias, residual, alpha, out: condition(alpha))

    return Alpha


class AlphaIsBoundAtFirst(Lie):
    """It uses the first launch's alpha."""

    problem = SCALED
    first: float | None = None

    def lie(self, right: Any, a: Any, b: Any, bias: Any, res: Any, alpha: float, out: Any) -> Any:
        self.first = alpha if self.first is None else self.first
        return right(a, b, bias, res, self.first, out)


# -- A3: strides of bias and residual --------------------------------------------------------


class DenseBias(Lie):
    """It reads a bias as if its elements were adjacent."""

    problem = half(8, 16, 8, bias=torch.float16)

    def lie(self, right: Any, a: Any, b: Any, bias: Any, *given: Any) -> Any:
        if bias is not None and bias.dim() == 1:
            bias = bias.as_strided(bias.shape, (1,))
        return right(a, b, bias, *given)


class DenseBiasOfOtherDtype(DenseBias):
    problem = half(8, 16, 8, bias=torch.float32)


class NoExpandedBias(Lie):
    problem = half(8, 16, 8, bias=torch.float16)
    lie = wrong_if(lambda self, a, b, bias, *_: bias is not None and bias.stride(0) == 0)


class NoExpandedResidual(Lie):
    problem = half(8, 16, 8, residual=LOOSE)
    lie = wrong_if(lambda self, a, b, bias, residual, *_: _stride(residual, 0) == 0)


class NoStridedResidual(Lie):
    """It assumes that the strides of a residual are (2·N, 2)."""

    problem = half(8, 16, 8, residual=Operand(torch.float16, "strided", aligned=False))
    lie = wrong_if(lambda self, a, b, bias, residual, *_: _stride(residual, 1) not in (1, 2))


def _stride(t: Tensor | None, dimension: int) -> int:
    return 1 if t is None else t.stride(dimension)


class NoExpandedBatch(Lie):
    problem = half(4, 8, 8, batch=3)
    lie = wrong_if(lambda self, a, b, *_: b.stride(0) == 0)


# -- A4: other forms -------------------------------------------------------------------------


class Folded(Lie):
    """Its launcher of N-D operands is wrong where they have ``dims`` dimensions."""

    problem = half(6, 8, 8)
    dims: tuple[int, ...] = (1, 3, 4)

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right = super().bind(problem, config)

        def folded(fold: Any, a: Tensor, b: Any, residual: Any, by_views: Any) -> Any:
            if a.dim() not in self.dims:
                return None
            return lambda *given: spoiled(by_views(*given).clone(), None)

        return Bound(right, folded=folded)


class FoldedOf4Dimensions(Folded):
    dims = (4,)


class FoldedBatch(Folded):
    problem = half(6, 8, 8, batch=2)


# -- A5: threads -----------------------------------------------------------------------------


class SharedScratch(Lie):
    """All launches use one scratch buffer."""

    problem = half(32, 32, 16)
    scratch: Tensor | None = None

    def lie(self, right: Any, *given: Any) -> Any:
        result = right(*given)
        with torch.inference_mode(False), torch.no_grad():
            if self.scratch is None or self.scratch.shape != result.shape:
                self.scratch = torch.empty_like(result, dtype=torch.float32)
            self.scratch.copy_(result)
            for _ in range(20):  # as long as a kernel takes
                self.scratch.add_(0)
        return result.copy_(self.scratch)


class SharedArguments(Lie):
    """It keeps its arguments in attributes."""

    problem = half(32, 32, 16)

    def lie(self, right: Any, *given: Any) -> Any:
        self.given = given
        for _ in range(20):
            given[0].sum()
        return right(*self.given[:-1], given[-1])


class WrongBesideAnother(Lie):
    """It is wrong while another launch is running."""

    problem = half(32, 32, 16)
    under_way = 0

    def lie(self, right: Any, *given: Any) -> Any:
        self.under_way += 1
        try:
            result = right(*given)
            for _ in range(20):
                given[0].sum()
            return spoiled(result, None) if self.under_way > 1 else result
        finally:
            self.under_way -= 1


# -- A6: caches by address -------------------------------------------------------------------


def cache_lie(key: Callable[[Tensor], Any], of: int = 1) -> type[Lie]:
    """It caches a copy of an operand under ``key(tensor)``. Operand 0 is a, 1 is b."""

    class Cached(Lie):
        problem = half(16, 16, 16)

        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[Any, Tensor] = {}

        def lie(self, right: Any, *given: Any) -> Any:
            t = given[of]
            copy = self.kept.setdefault((key(t), t.shape, t.stride()), t.clone())
            return right(*given[:of], copy, *given[of + 1 :])

    return Cached


class CachedResult(Lie):
    """It caches results by the addresses and versions of the operands."""

    problem = half(16, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Tensor] = {}

    def lie(self, right: Any, *given: Any) -> Any:
        key = tuple((t.data_ptr(), _version(t), t.shape) for t in given[:2])
        if key not in self.kept:
            self.kept[key] = right(*given[:-1], None).clone()
        return self.kept[key].clone() if given[-1] is None else given[-1].copy_(self.kept[key])


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


# -- A7: buffers -----------------------------------------------------------------------------


def ring_lie(size: int, *, view: bool = False, own: bool = True) -> type[Lie]:
    """It reuses its ``size`` result buffers in turn: views of one tensor, tensors or, unless
    ``own``, arrays of NumPy."""

    class Ring(Lie):
        problem = half(8, 8, 8)

        def __init__(self) -> None:
            super().__init__()
            self.next, self.buffers = 0, None

        def lie(self, right: Any, *given: Any) -> Any:
            if given[-1] is not None:
                return right(*given)
            result = right(*given)
            if self.buffers is None:
                shape = (size, *result.shape)
                self.buffers = (
                    torch.empty(shape, dtype=result.dtype)
                    if view
                    else [torch.empty(shape[1:], dtype=result.dtype) for _ in range(size)]
                    if own
                    else [np.empty(shape[1:], np.float16) for _ in range(size)]
                )  # fmt: skip
            self.next = (self.next + 1) % size
            buffer = self.buffers[self.next]
            buffer = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
            return buffer.copy_(result)

    return Ring


# -- A8: magnitudes --------------------------------------------------------------------------


class FlushesSubnormalInputs(Lie):
    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        least = torch.finfo(a.dtype).smallest_normal
        a, b = (torch.where(t.abs() < least, t * 0, t) for t in (a, b))
        return right(a, b, *given)


class FlushesSubnormalResults(Lie):
    def lie(self, right: Any, *given: Any) -> Any:
        result = right(*given)
        least = torch.finfo(result.dtype).smallest_normal
        return result.copy_(torch.where(result.abs() < least, result * 0, result))


class AccumulatesInHalf(Lie):
    """Each block of the sum is added in fp16."""

    problem = half(16, 16, 64)

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
        for k in range(0, a.shape[1], 16):
            total = total + (a[:, k : k + 16].float() @ b[k : k + 16].float()).half()
        return total if given[-1] is None else given[-1].copy_(total)


class AccumulatesInBfloat16(Lie):
    problem = half(16, 16, 64, **dict.fromkeys(("a", "b", "out"), Operand(torch.bfloat16)))

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        for k in range(0, a.shape[1], 16):
            total = total + (a[:, k : k + 16].float() @ b[k : k + 16].float()).bfloat16()
        return total if given[-1] is None else given[-1].copy_(total)


class Bfloat16ByHalf(Lie):
    """It multiplies bf16 operands in fp16."""

    problem = half(16, 16, 16, **dict.fromkeys(("a", "b", "out"), Operand(torch.bfloat16)))

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        return right(*(torch.nan_to_num(t.half()).to(t.dtype) for t in (a, b)), *given)


class ManyNans(Lie):
    def lie(self, right: Any, a: Tensor, *given: Any) -> Any:
        return right(a.nan_to_num(0.0) if int(a.isnan().sum()) > 100 else a, *given)


class ManyInfs(Lie):
    def lie(self, right: Any, a: Tensor, *given: Any) -> Any:
        many = int(a.isinf().sum()) > 5
        return right(a.nan_to_num(torch.nan, 1.0, 1.0) if many else a, *given)


# -- A9: torch's modes -----------------------------------------------------------------------


class InGradMode(Lie):
    lie = wrong_if(lambda *_: torch.is_grad_enabled())


class InNoGrad(Lie):
    lie = wrong_if(lambda *_: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled())


class InInferenceMode(Lie):
    lie = wrong_if(lambda *_: torch.is_inference_mode_enabled())


class UnderAutocast(Lie):
    lie = wrong_if(lambda *_: torch.is_autocast_enabled("cpu"))


class UnderAutocastInInferenceMode(Lie):
    """Wrong under autocast in inference mode, like a plan that a server calls."""

    lie = wrong_if(
        lambda *_: torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    )


class UnderAutocastInNoGrad(Lie):
    lie = wrong_if(lambda *_: torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled())


# -- A10: group sizes ------------------------------------------------------------------------


def group_lie(wrong: Callable[[Tensor, int], bool]) -> type[Lie]:
    """It is wrong where ``wrong(group sizes, rows)`` holds."""

    class OfGroups(Lie):
        problem = half(40, 8, 8, groups=Groups(6, "m"))

        def lie_of_groups(self, *given: Any, offs: Tensor, **extras: Any) -> Any:
            result = by_groups(*given, offs=offs, **extras)
            sizes = offs.diff(prepend=offs.new_zeros(1))
            if wrong(sizes, result.shape[0]) and int(offs[-1]):
                result[int(offs[-1]) - 1] += 1
            return result

    return OfGroups


class TakesOneIndexForZero(Lie):
    """A product of one row reads the first row of ``a``."""

    problem = half(1, 8, 8, groups=Groups(3, "m", a_index=torch.int64))

    def lie_of_groups(self, *given: Any, offs: Tensor, a_index: Tensor) -> Any:
        index = a_index * 0 if len(a_index) == 1 else a_index
        return by_groups(*given, offs=offs, a_index=index)


class ReadsRowsInTheResult(Lie):
    """It clamps an index to the rows of the result."""

    problem = half(8, 8, 8, groups=Groups(3, "m", a_index=torch.int64))

    def lie_of_groups(self, *given: Any, offs: Tensor, a_index: Tensor) -> Any:
        index = a_index.clamp(max=max(8, len(a_index)) - 1)
        return by_groups(*given, offs=offs, a_index=index)


class ReadsOneRowOfA(Lie):
    """It is wrong where ``a`` has one row."""

    problem = half(8, 8, 8, groups=Groups(1, "m", a_index=torch.int64))

    def lie_of_groups(self, *given: Any, offs: Tensor, a_index: Tensor) -> Any:
        result = by_groups(*given, offs=offs, a_index=a_index)
        return spoiled(result, None) if given[0].shape[0] == 1 else result


class MultipliesEmptyGroupsByZero(Lie):
    """It adds every group's product, masked by zeros."""

    problem = half(40, 8, 8, groups=Groups(6, "m"))

    def lie_of_groups(self, *given: Any, offs: Tensor, **extras: Any) -> Any:
        result = by_groups(*given, offs=offs, **extras)
        return result.add_(given[1].sum() * 0)


# -- A11: aliases and strides ----------------------------------------------------------------


class TheSameTensor(Lie):
    problem = half(16, 16, 16)
    lie = wrong_if(lambda self, a, b, *_: a.data_ptr() == b.data_ptr())


class ResidualIsA(Lie):
    problem = half(8, 16, 16, residual=F16)
    lie = wrong_if(
        lambda self, a, b, bias, residual, *_: (
            residual is not None and residual.data_ptr() == a.data_ptr()
        )
    )


class OutInOtherMemory(Lie):
    """Whoever holds a view of ``out`` does not see the result."""

    problem = half(8, 16, 8)

    def lie(self, right: Any, *given: Any) -> Any:
        out, result = given[-1], right(*given[:-1], None)
        return result if out is None else out.set_(result)


class OutByOneStride(Lie):
    """It assumes that the strides of ``out`` are (2·N, 2)."""

    problem = half(8, 16, 8, out=Operand(torch.float16, "strided", aligned=False))

    def lie(self, right: Any, *given: Any) -> Any:
        out, result = given[-1], right(*given[:-1], None)
        if out is None:
            return result
        out.as_strided(out.shape, (2 * out.shape[1], 2)).copy_(result)
        return out


class OutWithOddStrides(Lie):
    problem = half(8, 16, 8, out=Operand(torch.float16, "strided", aligned=False))
    lie = wrong_if(lambda self, *given: given[-1] is not None and given[-1].stride(0) % 2 == 1)


class OutWithEvenStrides(Lie):
    problem = half(8, 15, 8, out=LOOSE)
    lie = wrong_if(lambda self, *given: given[-1] is not None and given[-1].stride(0) % 2 == 0)


# -- A12: state of the process ---------------------------------------------------------------


def state_lie(change: Callable[[], Any]) -> type[Lie]:
    class Changes(Lie):
        problem = half(8, 8, 8)

        def lie(self, right: Any, *given: Any) -> Any:
            result = right(*given)
            change()
            return result

    return Changes


def _flip_tf32() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee" if matmul.fp32_precision == "tf32" else "tf32"


# -- other inputs of each kind ---------------------------------------------------------------


def lying_if(condition: Callable[..., bool], problem: Problem | None = None) -> type[Lie]:
    """A kernel that is wrong where the condition on (a, b, bias, residual, alpha, out) holds."""

    class Lying(Lie):
        lie = wrong_if(lambda self, *given: condition(*given))

    Lying.problem = problem or half(16, 16, 16)
    return Lying


def _ratio(condition: Callable[[float], bool]) -> type[Lie]:
    """Results are too large by half for some alphas."""

    class Ratio(Lie):
        problem = SCALED

        def lie(self, right: Any, *given: Any) -> Any:
            result = right(*given)
            return result.mul_(1.5) if condition(given[4]) else result

    return Ratio


class OtherForm(Lie):
    """Its launcher is right; its form of N-D operands is not."""

    problem = half(6, 8, 8)
    wrong: ClassVar[Callable[..., Any]]

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right = super().bind(problem, config)

        def folded(fold: Any, a: Any, b: Any, residual: Any, by_views: Any) -> Any:
            return functools.partial(type(self).wrong, by_views)

        return Bound(right, folded=folded)


def form_lie(condition: Callable[..., bool], problem: Problem | None = None) -> type[Lie]:
    """The form of N-D operands is wrong where the condition holds."""

    class Form(OtherForm):
        @staticmethod
        def wrong(right: Any, *given: Any) -> Any:
            result = right(*given)
            return spoiled(result, None) if condition(*given) else result

    Form.problem = problem or OtherForm.problem
    return Form


class ReturnsInferenceTensors(Lie):
    def lie(self, right: Any, *given: Any) -> Any:
        with torch.inference_mode():
            return right(*given)


class ChangesInputsForAWhile(Lie):
    """Meanwhile another thread that uses the same weight reads other values."""

    problem = half(32, 32, 16)

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        out, doubled = given[-1], b.data
        doubled.mul_(2)
        result = right(a, b, *given[:-1], None) * 0.5
        doubled.mul_(0.5)
        return result if out is None else out.copy_(result)


class Saturates(Lie):
    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        result = right(a, b, *given)
        if a.dtype is torch.float16 and a.isfinite().all() and b.isfinite().all():
            result.clamp_(-65504, 65504)
        return result


class FlushesSmallBfloat16(Lie):
    problem = half(16, 16, 16, **dict.fromkeys(("a", "b", "out"), Operand(torch.bfloat16)))

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        return right(*(torch.where(t.abs() < 1e-30, t * 0, t) for t in (a, b)), *given)


def _large_lie(epilogue: str, operand: Operand, wrong: Callable[[Tensor], Tensor]) -> type[Lie]:
    """Its result is NaN where ``wrong(product)`` holds, as if an exponential overflowed."""

    class Large(Lie):
        problem = half(16, 32, 32, a=operand, b=operand, out=operand, epilogue=EPILOGUES[epilogue])

        def lie(self, right: Any, *given: Any) -> Any:
            result, product = right(*given), given[0].float() @ given[1].float()
            half = product[..., : result.shape[-1]] if self.problem.gated else product
            return result.masked_fill_(wrong(half) & half.isfinite(), torch.nan)

    return Large


class ScalesByTheLargest(Lie):
    """It divides by the largest number of ``b``, as a kernel that rounds to 8 bits does."""

    def lie(self, right: Any, *given: Any) -> Any:
        result = right(*given)
        columns = given[1].isfinite().all(0)
        return result.masked_fill_(columns, 0) if given[1].isinf().any() else result


def weight_lie(wrong: Callable[[Tensor], Tensor]) -> type[Lie]:
    """Rows are wrong where ``wrong(weights)`` holds."""

    class OfWeights(Lie):
        problem = half(40, 8, 8, groups=Groups(4, "m", out_weights=torch.float32))

        def lie_of_groups(self, *given: Any, **extras: Any) -> Any:
            result, weights = by_groups(*given, **extras), extras.get("out_weights")
            if weights is not None:
                result[wrong(weights)] += 1
            return result

    return OfWeights


class AddsToTheOut(Lie):
    """It adds half of the finite numbers that ``out`` contained."""

    def lie(self, right: Any, *given: Any) -> Any:
        before = None if given[-1] is None else given[-1].nan_to_num(0.0, 0.0, 0.0)
        result = right(*given)
        return result if before is None else result.add_(before * 0.5)


def _in_one_storage(t: Tensor | None, other: Tensor) -> bool:
    return t is not None and t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class PassingMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class LeavesAMode(Lie):
    """A mode stays active."""

    mode: type[torch.overrides.TorchFunctionMode] = PassingMode

    def lie(self, right: Any, *given: Any) -> Any:
        result = right(*given)
        self.mode().__enter__()
        return result


class LeavesAModeThatRaises(LeavesAMode):
    mode = torch.overrides.TorchFunctionMode


LIES: dict[str, dict[str, type[Lie]]] = {
    "A1": {
        cls.__name__: cls
        for cls in (
            LastRowsAtMultiplesOf8, FirstRowAtMultiplesOf16, EvenSizes, MultiplesOf4, MultiplesOf3,
            ColumnTail, SumTail,
        )
    },
    "A2": {
        "not a half": alpha_lie(lambda alpha: alpha != 0.5),
        "negative": alpha_lie(lambda alpha: alpha < 0),
        "zero": alpha_lie(lambda alpha: alpha == 0),
        "large": alpha_lie(lambda alpha: alpha > 100),
        "small": alpha_lie(lambda alpha: 0 < alpha < 0.01),
        "minus one": alpha_lie(lambda alpha: alpha == -1),
        "bound at first": AlphaIsBoundAtFirst,
        "a thousand": _ratio(lambda alpha: alpha > 1000),
        "a thousandth": _ratio(lambda alpha: 0 < abs(alpha) < 1e-3),
        "negative and large": _ratio(lambda alpha: alpha < -10),
        "negative and small": _ratio(lambda alpha: -0.1 < alpha < 0),
    },
    "A3": {
        **{
        cls.__name__: cls
        for cls in (
            DenseBias, DenseBiasOfOtherDtype, NoExpandedBias, NoExpandedResidual,
            NoStridedResidual, NoExpandedBatch,
        )
        },
        "a residual of one column": lying_if(
            lambda a, b, bias, residual, *_: _stride(residual, 0) != 0 == _stride(residual, 1),
            NoStridedResidual.problem,
        ),
        "a residual of one number": lying_if(
            lambda a, b, bias, residual, *_: residual is not None and residual.stride() == (0, 0),
            NoStridedResidual.problem,
        ),
        "misaligned bias": lying_if(
            lambda a, b, bias, *_: bias is not None and bias.data_ptr() % 16 != 0,
            half(8, 16, 8, bias=torch.float16),
        ),
        "bias apart": lying_if(
            lambda a, b, bias, *_: bias is not None and bias.stride(0) > 16,
            half(8, 16, 8, bias=torch.float16),
        ),
        "matrices apart": lying_if(
            lambda a, *_: a.dim() == 3 and a.stride(0) > a.shape[1] * a.stride(1) + 8,
            half(4, 8, 8, batch=3),
        ),
        "overlapping rows": lying_if(
            lambda a, *_: 0 < a.stride(0) < a.shape[1], half(8, 16, 24, a=LOOSE)
        ),
        "addresses modulo 16": lying_if(
            lambda a, *_: a.data_ptr() % 16 == 8, half(8, 16, 16, a=LOOSE)
        ),
        "broadcast weights": lying_if(
            lambda a, b, *_: b.stride(0) == 0 != a.stride(0), half(4, 8, 8, batch=3)
        ),
        "whole storages": lying_if(
            lambda a, *_: a.storage_offset() == 0 and a.untyped_storage().nbytes() == a.nbytes
        ),
    },
    "A4": {
        **{cls.__name__: cls for cls in (Folded, FoldedOf4Dimensions, FoldedBatch)},
        "N-D by alpha": form_lie(
            lambda a, b, bias, res, alpha, out: alpha != -0.75, half(6, 8, 8, scaled=True)
        ),
        "N-D without gradients": form_lie(lambda *_: not torch.is_grad_enabled()),
        "N-D with out": form_lie(lambda *given: given[-1] is not None),
        "of 5 dimensions": form_lie(lambda a, *_: a.dim() == 5),
        "of rows apart": form_lie(
            lambda a, *_: a.dim() == 3 and a.stride(0) != a.shape[1] * a.stride(1)
        ),
        "batches of two dimensions": form_lie(
            lambda a, *_: a.dim() == 4 and a.shape[0] > 1, half(6, 8, 8, batch=6)
        ),
    },
    "A5": {
        **{cls.__name__: cls for cls in (SharedScratch, SharedArguments, WrongBesideAnother)},
        "weights that change for a while": ChangesInputsForAWhile,
    },
    "A6": {
        "b by address and version": cache_lie(lambda t: (t.data_ptr(), _version(t))),
        "b by address": cache_lie(lambda t: t.data_ptr()),
        "b by id": cache_lie(id),
        "a by id and version": cache_lie(lambda t: (id(t), _version(t)), of=0),
        "results": CachedResult,
        "b by address and sum": cache_lie(lambda t: (t.data_ptr(), float(t.double().sum()))),
    },
    "A7": {
        "64 buffers": ring_lie(64),
        "1000 buffers": ring_lie(1000),
        "views of a buffer": ring_lie(64, view=True),
        "NumPy's buffers": ring_lie(32, own=False),
        "inference tensors": ReturnsInferenceTensors,
    },
    "A8": {
        **{
        cls.__name__: cls
        for cls in (
            FlushesSubnormalInputs, FlushesSubnormalResults, AccumulatesInHalf,
            AccumulatesInBfloat16, Bfloat16ByHalf, ManyNans, ManyInfs,
        )
        },
        **{
            cls.__name__: cls
            for cls in (Saturates, FlushesSmallBfloat16, ScalesByTheLargest)
        },
        "silu of numbers below -88": _large_lie(
            "silu", Operand(torch.float32), lambda z: z < -88
        ),
        "gates below -88": _large_lie("swiglu", F16, lambda gate: gate < -88),
        "mostly zeros": lying_if(lambda a, *_: float((a == 0).float().mean()) > 0.5),
    },
    "A9": {
        **{cls.__name__: cls for cls in (InGradMode, InNoGrad, InInferenceMode, UnderAutocast)},
        **{cls.__name__: cls for cls in (UnderAutocastInInferenceMode, UnderAutocastInNoGrad)},
        "grad mode with out": lying_if(
            lambda *given: torch.is_grad_enabled() and given[-1] is not None
        ),
        "a parameter": lying_if(lambda a, b, *_: b.requires_grad),
        "inference tensors": lying_if(lambda a, *_: a.is_inference()),
        "activations of inference mode": lying_if(
            lambda a, b, *_: a.is_inference() and not b.is_inference()
        ),
        "activations with gradients": lying_if(lambda a, *_: a.requires_grad),
    },
    "A10": {
        "a group of one row": group_lie(lambda sizes, m: bool((sizes == 1).any())),
        "a group of two rows": group_lie(lambda sizes, m: bool((sizes == 2).any())),
        "a group of three rows": group_lie(lambda sizes, m: bool((sizes == 3).any())),
        "three empty groups": group_lie(lambda sizes, m: int((sizes == 0).sum()) >= 3),
        "first and last empty": group_lie(lambda sizes, m: not sizes[0] and not sizes[-1]),
        "all in one group": group_lie(lambda sizes, m: int(sizes.max()) == int(sizes.sum())),
        "neighbours empty": group_lie(lambda sizes, m: bool((sizes[1:] + sizes[:-1] == 0).any())),
        **{
            cls.__name__: cls
            for cls in (
                TakesOneIndexForZero, ReadsRowsInTheResult, ReadsOneRowOfA,
                MultipliesEmptyGroupsByZero,
            )
        },
        "all in the first": group_lie(lambda sizes, m: int(sizes[0]) == int(sizes.sum())),
        "all in the last": group_lie(lambda sizes, m: int(sizes[-1]) == int(sizes.sum())),
        "of one size": group_lie(
            lambda sizes, m: int(sizes[0]) > 0 and bool((sizes == sizes[0]).all())
        ),
        "half of the rows": group_lie(lambda sizes, m: int(sizes.sum()) < m // 2),
        "negative weights": weight_lie(lambda weights: weights < 0),
    },
    "A11": {
        **{
        cls.__name__: cls
        for cls in (
            TheSameTensor, ResidualIsA, OutByOneStride, OutInOtherMemory, OutWithOddStrides,
            OutWithEvenStrides,
        )
        },
        "one storage": lying_if(
            lambda a, b, *_: _in_one_storage(b, a) and a.data_ptr() != b.data_ptr()
        ),
        "out in a's storage": lying_if(lambda a, *given: _in_one_storage(given[-1], a)),
        "b is a.T": lying_if(
            lambda a, b, *_: a.data_ptr() == b.data_ptr(),
            half(16, 16, 32, b=Operand(torch.float16, "col")),
        ),
        "bias is a's row": lying_if(
            lambda a, b, bias, *_: bias is not None and bias.data_ptr() == a.data_ptr(),
            half(16, 16, 16, bias=torch.float16),
        ),
        "out with rows apart": lying_if(
            lambda *given: given[-1] is not None and given[-1].stride(0) > 32
        ),
        "reads an out": AddsToTheOut,
        "residual is a, and not b": lying_if(
            lambda a, b, bias, residual, *_: (
                residual is not None and residual.data_ptr() == a.data_ptr() != b.data_ptr()
            ),
            half(16, 16, 16, residual=F16),
        ),
    },
    "A12": {
        "seeds torch": state_lie(lambda: torch.manual_seed(int.from_bytes(os.urandom(4), "big"))),
        "draws from torch": state_lie(lambda: torch.rand(1)),
        "draws from Python": state_lie(random.random),
        "draws from NumPy": state_lie(np.random.rand),
        "default dtype": state_lie(lambda: torch.set_default_dtype(torch.float64)),
        "TF32": state_lie(_flip_tf32),
        "deterministic": state_lie(lambda: torch.use_deterministic_algorithms(True)),
        "grad mode": state_lie(lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
        "threads": state_lie(lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        "default device": state_lie(lambda: torch.set_default_device("meta")),
        "denormals": state_lie(lambda: torch.set_flush_denormal(True)),
        "environment": state_lie(lambda: os.environ.update(TMM_TEST=os.urandom(4).hex())),
        "directory": state_lie(lambda: os.chdir("/" if os.getcwd() != "/" else "/tmp")),
        "recursion limit": state_lie(
            lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        ),
        "garbage collector": state_lie(lambda: gc.disable() if gc.isenabled() else gc.enable()),
        "a mode": LeavesAMode,
    },
}  # fmt: skip
