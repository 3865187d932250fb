"""The state of autograd, and autograd functions that work below torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from tmm_core import compat
from tmm_core.compat import transforms_active
from tmm_core.spec.epilogue import IDENTITY, Epilogue

Tensor = torch.Tensor


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records a function of these tensors for backward."""
    if torch.is_grad_enabled():
        for t in tensors:  # a generator takes twice as long
            if t is not None and t.requires_grad:
                return True
    return False


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether derivatives of a function of these tensors may be needed."""
    return transformed(*tensors) or recorded(*tensors)


def transformed(*tensors: Tensor | None) -> bool:
    """Whether forward mode or a functorch transform is active for these tensors.

    A graph that was traced with a level of forward mode enters it without changing the level that
    Python knows. Where this process has traced one, a tensor's tangent shows it.
    """
    global _levels_were_traced
    if compat.forward_ad._current_level >= 0:
        # Torch 2.10 does not say that it compiles while it calls operators with fake tensors.
        traced = torch.compiler.is_compiling() or compat.dispatch_modes()
        _levels_were_traced = _levels_were_traced or bool(traced)
        return True
    return transforms_active() or (_levels_were_traced and any(map(has_tangent, tensors)))


#: Each query for a tangent takes 2.5 µs, and few processes trace levels.
_levels_were_traced = False


def may_be_differentiated() -> bool:
    """Whether derivatives of some tensors may be needed. It costs less than a query of tensors."""
    return torch.is_grad_enabled() or transformed() or _levels_were_traced


def has_tangent(t: Tensor | None) -> bool:
    if t is None or compat.is_batched(t):  # torch has no rule that unpacks a batch of gradients
        return False
    return forward_ad.unpack_dual(t, level=0).tangent is not None


def record(function: Any, *arguments: Any) -> Tensor:
    with compat.single_level():
        return function.apply(*arguments)  # type: ignore[no-any-return]


def apply_stage(stage: Epilogue, z: Tensor) -> Tensor:
    inputs = stage.inputs(z)
    # Torch has operators for the derivatives of built-in stages.
    if stage.derivative is not None and not stage.builtin:
        return record(_WithDerivative, stage, *inputs)
    return stage.applied(*inputs)


@contextmanager
def outer_levels() -> Iterator[None]:
    """Enable both modes for outer transforms: custom functions run with both off."""
    if not transforms_active():
        yield
        return
    with torch.enable_grad(), compat.forward_ad._set_fwd_grad_enabled(True):
        yield


@contextmanager
def below_autograd() -> Iterator[None]:
    """Call operators as the Autograd kernels of torch's own operators do."""
    with compat.below_autograd(), outer_levels():
        yield


class OneLevel(compat.SingleLevelFunction):
    """An autograd function for a single level of transforms, as in the formulas of torch's own
    operators: the dispatcher has unwrapped the other levels already. ``autograd.Function`` works
    above the dispatcher, and would unwrap them once more."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
        """The key by which compiled autograd caches a backward's graph, as in autograd.Function."""
        return (ctx._autograd_function_id,)


class Underivable(OneLevel):
    """An operator's product of operands with a format, which has no gradients."""

    @staticmethod
    def forward(ctx: Any, operator: Any, a: Tensor, b: Tensor, *more: Any) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype
        with below_autograd():
            return operator(a, b, *more)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        a, b = ctx.dtypes
        raise RuntimeError(
            f"tmm has no derivative for {a} @ {b}: multiply the values of stored numbers "
            "(Quantized.dequantize()), or call it under torch.no_grad()"
        )

    jvp = backward


class _WithDerivative(OneLevel):
    """An epilogue stage whose author supplied the derivative."""

    @staticmethod
    def forward(ctx: Any, stage: Epilogue, *z: Tensor) -> Tensor:
        ctx.stage = stage
        ctx.save_for_backward(*z)
        ctx.save_for_forward(*z)
        with below_autograd():
            return stage.applied(*z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(grad * slope for slope in _slopes(ctx.stage, ctx.saved_tensors)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        with outer_levels():
            slopes = _slopes(ctx.stage, map(primal, ctx.saved_tensors))
            first, *more = (t * slope for t, slope in zip(tangents, slopes, strict=True))
            return sum(more, first)


def _slopes(stage: Epilogue, z: Iterable[Tensor]) -> tuple[Tensor, ...]:
    assert stage.derivative is not None
    slopes = stage.derivative(*z, *stage.parameters)
    return tuple(slopes) if stage.gated else (slopes,)


def primal(t: Any) -> Any:
    """Return ``t`` without its tangent at this level, so that it is not differentiated twice."""
    return None if t is None else forward_ad.unpack_dual(t, level=0).primal  # torch has one level


def form_of(t: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if t is None else (t.shape, t.dtype)


def as_gradient(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``t`` to the gradient of a tensor of ``dtype``: for a real dtype, its real part."""
    if t.dtype is dtype:
        return t
    return (t.real if t.is_complex() and not dtype.is_complex else t).to(dtype)


def no_view(y: Tensor) -> Tensor:
    """Return ``y`` as a tensor that is no view. Torch refuses in-place changes of a view made
    inside an autograd function, and models make them: ``F.relu(layer(x), inplace=True)``."""
    return y.detach() if y._is_view() else y


def is_column_major(t: Tensor) -> bool:
    strides = t.stride()
    # The stride of one row is any number.
    return len(strides) > 1 and strides[-2] == 1 < strides[-1] and t.shape[-2] > 1


def are_columns(t: Tensor) -> bool:
    """Whether the rows of all matrices of ``t`` are one column-major matrix. Torch multiplies that
    matrix, and returns a gradient in its layout."""
    *strides, last = t.stride()
    rows = 1
    for size, stride in zip(reversed(t.shape[:-1]), reversed(strides), strict=True):
        if last == 1 or (size != 1 and stride != rows):
            return False
        rows *= size
    return last == rows


def head_text(head: Epilogue) -> str:
    return "" if head is IDENTITY else head.interned()


def by_operator(*arguments: Any) -> Tensor:
    return torch.ops.tmm.matmul.default(*arguments)  # type: ignore[no-any-return]


def multiply_in_layout(
    column_major: bool, multiply: Callable[..., Tensor], x: Tensor, y: Tensor, *more: Any
) -> Tensor:
    """Return ``multiply(x, y, *more)``, the gradient of an operand, in the operand's layout.
    Weights are passed transposed, and autograd would transpose a gradient in another layout by a
    copy, at a tenth of the product's cost."""
    if column_major:
        return multiply(y.mT, x.mT, *more).mT
    return multiply(x, y, *more)
