"""Further wrong kernels, like :mod:`lying`, by the kind of input that makes them wrong."""

from __future__ import annotations

import builtins
import decimal
import gc
import io
import locale
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fakes import FakeConfig
from lying import (
    F16,
    Lie,
    OtherForm,
    by_groups,
    form_lie,
    group_lie,
    half,
    lying_if,
    spoiled,
    state_lie,
)
from torch.backends import mha, nnpack, opt_einsum
from torch.nn.modules.module import register_module_forward_hook

import tmm_core
from tmm_core import Groups, Problem
from tmm_core.epilogues import EPILOGUES
from tmm_core.spec.operand import Operand

Tensor = torch.Tensor


class InfIsNan(Lie):
    """A row with both NaN and Inf gives zeros."""

    def lie(self, right: Any, a: Tensor, *given: Any) -> Any:
        both = a.isnan().any(-1) & a.isinf().any(-1)
        return right(a, *given).masked_fill_(both[..., None], 0.0)


class InfInBoth(Lie):
    """It saturates where both operands have Inf."""

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        result = right(a, b, *given)
        return result.nan_to_num_() if a.isinf().any() and b.isinf().any() else result


class InfTimesZero(Lie):
    """It treats Inf times zero as zero, as a kernel of sparse weights does."""

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        result = right(a, b, *given)
        if a.isinf().any():
            result.masked_fill_(a.isinf().float() @ (b == 0).float() > 0, 0.0)
        return result


def _finite(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.nan_to_num(nan=torch.nan)


class InfBias(Lie):
    """An Inf in the bias is the largest number of its dtype."""

    problem = half(8, 16, 8, bias=torch.float16)

    def lie(self, right: Any, a: Tensor, b: Tensor, bias: Any, *given: Any) -> Any:
        return right(a, b, _finite(bias), *given)


class InfResidual(Lie):
    """An Inf in the residual is the largest number of its dtype."""

    problem = half(8, 16, 8, residual=F16)

    def lie(self, right: Any, a: Tensor, b: Tensor, bias: Any, residual: Any, *given: Any) -> Any:
        return right(a, b, bias, _finite(residual), *given)


class _NanInOneHalf(Lie):
    """NaN in columns of ``b`` that give gates, or in those that give what gates multiply, are
    zeros."""

    problem = half(16, 32, 16, epilogue=EPILOGUES["swiglu"])
    up: ClassVar[bool]

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        halves = [*b.chunk(2, dim=1)]
        halves[self.up] = halves[self.up].nan_to_num(0.0, torch.inf, -torch.inf)
        return right(a, torch.cat(halves, 1), *given)


class _NanInOneHalfOfTheBias(_NanInOneHalf):
    problem = half(16, 32, 16, epilogue=EPILOGUES["swiglu"], bias=torch.float16)

    def lie(self, right: Any, a: Tensor, b: Tensor, bias: Any, *given: Any) -> Any:
        if bias is not None:
            halves = [*bias.chunk(2, dim=-1)]
            halves[self.up] = halves[self.up].nan_to_num(0.0, torch.inf, -torch.inf)
            bias = torch.cat(halves, -1)
        return right(a, b, bias, *given)


class NanAlpha(Lie):
    problem = half(8, 8, 8, scaled=True)

    def lie(self, right: Any, a: Any, b: Any, bias: Any, res: Any, alpha: float, out: Any) -> Any:
        return right(a, b, bias, res, alpha if alpha == alpha else 1.0, out)


def argument_lie(change: Callable[[Tensor, Tensor], Any]) -> type[Lie]:
    """It changes a property of its arguments other than their values."""

    class Changes(Lie):
        def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
            result = right(a, b, *given)
            if not b.is_inference():
                change(a, b)
            return result

    return Changes


def _add_nothing(a: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        b.add_(0)


def _move(a: Tensor, b: Tensor) -> None:
    b.data = b.data.clone()


def _freeze(a: Tensor, b: Tensor) -> None:
    if b.is_leaf and b.is_floating_point():
        b.requires_grad_(False)


def rows_lie(change: Callable[..., Any], **groups: Any) -> type[Lie]:
    """A launch of groups that writes to the tensors that describe the groups."""

    class Rows(Lie):
        problem = half(40, 8, 8, groups=Groups(4, "m", **groups))

        def lie_of_groups(self, *given: Any, **extras: Any) -> Any:
            result = by_groups(*given, **extras)
            if groups.keys() <= extras.keys():
                change(int(extras["offs"][-1]), **extras)
            return result

    return Rows


class PacksParameters(Lie):
    """It keeps a copy of a parameter with it, until torch counts another version."""

    def lie(self, right: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
        if isinstance(b, torch.nn.Parameter) and not b.is_inference():
            kept = b.__dict__
            if kept.get("packed_version") != b._version:
                kept |= {"packed": b.detach().clone(), "packed_version": b._version}
            b = kept["packed"]
        return right(a, b, *given)


class KeepsStrides(Lie):
    """It uses the strides that a tensor at this address had first, as a kept descriptor does."""

    problem = half(16, 16, 16)
    #: The argument: 0 is a, 1 is b, 5 is out.
    of: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[int, ...]] = {}

    def lie(self, right: Any, *given: Any) -> Any:
        t = given[self.of]
        if t is None or self.kept.setdefault(t.data_ptr(), t.stride()) == t.stride():
            return right(*given)
        moved = [*given]
        moved[self.of] = t.as_strided(t.shape, self.kept[t.data_ptr()])
        result = right(*moved)
        return t if self.of == 5 else result


def writes_if(
    condition: Callable[..., bool], problem: Problem | None = None, *, to_out: bool = False
) -> type[Lie]:
    """It overwrites the first element of ``a``, or the one behind ``out``, where the condition
    holds."""

    def lie(self: Lie, right: Any, *given: Any) -> Any:
        result = right(*given)
        if condition(*given):
            t = given[5] if to_out else given[0]
            behind = (t.shape[0] - 1) * t.stride(0) + t.shape[1] if to_out else 0
            t.data.as_strided((1,), (1,), t.storage_offset() + behind).fill_(0.25)
        return result

    return type("Writes", (Lie,), {"problem": problem or half(16, 16, 16), "lie": lie})


class FoldedAtOtherSizes(OtherForm):
    """With N-D operands, it is right where the rows fill its tiles."""

    problem, at = half(64, 8, 8), 44

    @staticmethod
    def wrong(right: Any, a: Tensor, *given: Any) -> Any:
        result = right(a, *given)
        return spoiled(result, None) if a.shape[:-1].numel() % 8 else result


class TwiceIndexed(Lie):
    """It is wrong where each row of ``a`` is read twice."""

    problem = half(40, 8, 8, groups=Groups(4, "m", a_index=torch.int64))

    def lie_of_groups(self, *given: Any, **extras: Any) -> Any:
        result, index = by_groups(*given, **extras), extras.get("a_index")
        if index is not None and len(index) > 1 and bool((index.bincount() == 2).all()):
            result[: int(extras["offs"][-1])] += 1
        return result


class NanWeights(Lie):
    problem = half(40, 8, 8, groups=Groups(4, "m", out_weights=torch.float32))

    def lie_of_groups(self, *given: Any, **extras: Any) -> Any:
        if (weights := extras.get("out_weights")) is not None:
            extras["out_weights"] = weights.nan_to_num(1.0)
        return by_groups(*given, **extras)


class EvenBinds(Lie):
    """Every second bind returns another function."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right, self.times = super().bind(problem, config), self.times + 1
        if self.times % 2:
            return right

        def wrong(*given: Any, **extras: Any) -> Any:
            return spoiled(right(*given, **extras), None)

        wrong.cost = right.cost  # type: ignore[attr-defined]
        return wrong


class LastBind(Lie):
    """A launcher computes the rows of the problem that was bound last."""

    problem = half(320, 8, 8)
    rows = 0

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right, self.rows = super().bind(problem, config), problem.m

        def launch(a: Tensor, *given: Any, **extras: Any) -> Any:
            result = right(a, *given, **extras)
            if a.dim() == 2:
                result[self.rows :] = 0
            return result

        launch.cost = right.cost  # type: ignore[attr-defined]
        return launch


def _set_locale() -> None:
    now = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8" if now == "C" else "C")


def _replace_linear() -> None:
    linear = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *given, **named: linear(*given, **named)


class NoFinder:
    def find_spec(self, *given: Any) -> None:
        return None


#: Blocks that end when they are collected as garbage.
_OPEN: list[Any] = []


def _open_block() -> None:
    _OPEN.append(tmm_core.override(progress=False))
    _OPEN[-1].__enter__()


def _share_otherwise() -> None:
    sharing = torch.multiprocessing.get_sharing_strategy()
    others = {"file_system": "file_descriptor", "file_descriptor": "file_system"}
    torch.multiprocessing.set_sharing_strategy(others[sharing])


FURTHER: dict[str, dict[str, type[Lie]]] = {
    "values": {
        "a of zeros": lying_if(lambda a, *_: not a.any()),
        "b of zeros": lying_if(lambda a, b, *_: not b.any()),
        "a from zero to one": lying_if(lambda a, *_: bool(((a > 0) & (a <= 1)).all())),
        "b positive": lying_if(lambda a, b, *_: bool((b > 0).all())),
        "b negative": lying_if(lambda a, b, *_: bool((b < 0).all())),
        "b of one number": lying_if(lambda a, b, *_: bool((b == b.flatten()[0]).all())),
        "one-hot rows": lying_if(lambda a, *_: bool(((a != 0).sum(-1) == 1).all())),
        "a residual of zeros": lying_if(
            lambda a, b, bias, residual, *_: residual is not None and not residual.any(),
            half(8, 16, 8, residual=F16),
        ),
        "NaN beside Inf": InfIsNan,
        "Inf in both": InfInBoth,
        "Inf times zero": InfTimesZero,
        "Inf in the bias": InfBias,
        "Inf in the residual": InfResidual,
        **{
            f"NaN in {name} of {of}": type("NanInOneHalf", (kind,), {"up": up})
            for of, kind in (("b", _NanInOneHalf), ("the bias", _NanInOneHalfOfTheBias))
            for name, up in (("gates", False), ("the other half", True))
        },
    },
    "alpha": {
        "1/√64": lying_if(
            lambda a, b, bias, residual, alpha, out: 0.01 < alpha < 0.45, NanAlpha.problem
        ),
        "from 4 to 1000": lying_if(
            lambda a, b, bias, residual, alpha, out: 4 < alpha < 1000, NanAlpha.problem
        ),
        "NaN": NanAlpha,
    },
    "addresses": {
        "a at 16 of 32 bytes": lying_if(lambda a, *_: a.data_ptr() % 32 == 16),
        "out at 16 of 32 bytes": lying_if(
            lambda *given: given[-1] is not None and given[-1].data_ptr() % 32 == 16
        ),
        "both batches expanded": lying_if(
            lambda a, b, *_: a.stride(0) == 0 == b.stride(0), half(4, 8, 8, batch=3)
        ),
        "transposed leading dimensions": form_lie(
            lambda a, *_: a.dim() == 3 and a.stride(0) < a.stride(1)
        ),
        **{
            f"strides of {name} by address": type("Kept", (KeepsStrides,), {"of": of})
            for name, of in (("a", 0), ("b", 1), ("out", 5))
        },
        "writes behind an out with rows apart": writes_if(
            lambda *given: given[5] is not None and given[5].stride(0) > 32, to_out=True
        ),
    },
    "arguments": {
        "a frozen parameter": lying_if(
            lambda a, b, *_: isinstance(b, torch.nn.Parameter) and not b.requires_grad
        ),
        "a layer's result": lying_if(lambda a, *_: a.grad_fn is not None),
        "adds nothing to b": argument_lie(_add_nothing),
        "moves b": argument_lie(_move),
        "packs parameters": PacksParameters,
        "overwrites a beside a positive b": writes_if(lambda a, b, *_: bool((b > 0).all())),
        "overwrites a beside a large alpha": writes_if(
            lambda a, b, bias, residual, alpha, out: alpha > 10, half(16, 16, 16, scaled=True)
        ),
        "overwrites a with expanded b": writes_if(
            lambda a, b, *_: b.stride(0) == 0,
            half(16, 16, 16, b=Operand(torch.float16, aligned=False)),
        ),
        "freezes b": argument_lie(_freeze),
        "writes weights beyond the groups": rows_lie(
            lambda end, out_weights, **_: out_weights.data[end:].zero_(),
            out_weights=torch.float32,
        ),
        "writes indices beyond the groups": rows_lie(
            lambda end, a_index, **_: a_index.data[end:].zero_(), a_index=torch.int64
        ),
    },
    "groups": {
        "each row twice": TwiceIndexed,
        "NaN in a weight": NanWeights,
        "rising sizes": group_lie(lambda sizes, m: bool((sizes.diff() > 0).all())),
        "only the last is empty": group_lie(
            lambda sizes, m: not sizes[-1] and bool((sizes[:-1] > 0).all())
        ),
    },
    "forms": {"N-D operands at other sizes": FoldedAtOtherSizes},
    "binds": {"every second": EvenBinds, "rows of the last": LastBind},
    "state": {
        "locale": state_lie(_set_locale),
        "tmm's settings": state_lie(_open_block),
        "a function of torch": state_lie(_replace_linear),
        "logging": state_lie(lambda: logging.getLogger().addHandler(logging.NullHandler())),
        "folders of modules": state_lie(lambda: sys.path.append("/nowhere")),
        "switching of threads": state_lie(
            lambda: sys.setswitchinterval(0.9 * sys.getswitchinterval())
        ),
        "decimal": state_lie(
            lambda: setattr(decimal.getcontext(), "prec", 1 + decimal.getcontext().prec)
        ),
        "thresholds of garbage": state_lie(
            lambda: gc.set_threshold(1 + gc.get_threshold()[0], *gc.get_threshold()[1:])
        ),
        "exceptions": state_lie(lambda: setattr(sys, "excepthook", lambda *_: None)),
        "printing": state_lie(
            lambda: torch.set_printoptions(1 + torch._tensor_str.PRINT_OPTS.precision)
        ),
        "an alarm": state_lie(lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000)),
        "open": state_lie(lambda: setattr(builtins, "open", lambda *given: None)),
        "how warnings are shown": state_lie(
            lambda: setattr(warnings, "showwarning", lambda *given, **more: None)
        ),
        "standard input": state_lie(lambda: setattr(sys, "stdin", io.StringIO())),
        "finders of modules": state_lie(lambda: sys.meta_path.append(NoFinder())),
        "callbacks of garbage": state_lie(lambda: gc.callbacks.append(lambda *given: None)),
        "the limit of digits": state_lie(
            lambda: sys.set_int_max_str_digits(1 + sys.get_int_max_str_digits())
        ),
        "how libraries are loaded": state_lie(
            lambda: sys.setdlopenflags(sys.getdlopenflags() ^ os.RTLD_GLOBAL)
        ),
        "an activation of torch": state_lie(
            lambda: setattr(F, "silu", lambda x, inplace=False: x * torch.sigmoid(x))
        ),
        "a sum of torch": state_lie(lambda: setattr(Tensor, "__add__", lambda x, y: y.add(x))),
        "hooks of every module": state_lie(
            lambda: register_module_forward_hook(lambda *given: None)
        ),
        "the forward mode": state_lie(
            lambda: torch._C._set_fwd_grad_enabled(not torch._C._is_fwd_grad_enabled())
        ),
        "checks for NaN": state_lie(
            lambda: torch.set_anomaly_enabled(False, not torch.is_anomaly_check_nan_enabled())
        ),
        "the fast path of encoders": state_lie(
            lambda: mha.set_fastpath_enabled(not mha.get_fastpath_enabled())
        ),
        "NNPACK": state_lie(lambda: nnpack.set_flags(not torch._C._get_nnpack_enabled())),
        "the order of einsum": state_lie(
            lambda: setattr(opt_einsum, "enabled", not opt_einsum.enabled)
        ),
        "how processes share tensors": state_lie(_share_otherwise),
    },
}
if hasattr(os, "sched_setaffinity"):
    FURTHER["state"]["CPUs"] = state_lie(
        lambda: os.sched_setaffinity(0, list(os.sched_getaffinity(0))[1:] or range(64))
    )
