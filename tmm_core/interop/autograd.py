"""Derivatives of ``tmm::matmul``: reverse and forward mode, any order, and under vmap.

A differentiated call is split into parts with cheap derivatives: one product, fused with those
stages of the epilogue whose derivative follows from their output, then the rest of the epilogue,
then the residual. If only a gradient is needed, the rest is one kernel and its derivative another
(:mod:`tmm_core.interop.pointwise`); else torch's own operators compute it, which Inductor fuses
and transforms decompose.

Backward saves ``a`` if ``b`` needs a gradient, ``b`` if ``a`` does, and the output of the product
if an epilogue follows it. That is never more than eager saves, and if the whole epilogue is fused,
the pre-activation is never in memory. Nothing is computed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from tmm_core import compat
from tmm_core.compat import transforms_active
from tmm_core.formats import BY_STORAGE
from tmm_core.interop.pointwise import failed, kernels, takes
from tmm_core.launch.warm import epilogue_of, run, undisturbed
from tmm_core.settings import overridden, within
from tmm_core.spec.arguments import COMMON, Arguments
from tmm_core.spec.epilogue import IDENTITY, Epilogue

if TYPE_CHECKING:
    from tmm_core.triton.pointwise import Pointwise

Tensor = torch.Tensor

_levels = compat.forward_ad
_batched = compat.is_batched


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records a function of these tensors for backward."""
    if torch.is_grad_enabled():
        for t in tensors:  # a generator takes twice as long
            if t is not None and t.requires_grad:
                return True
    return False


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether derivatives of a function of these tensors may be needed."""
    return recorded(*tensors) or _levels._current_level >= 0 or transforms_active()


def matmul(*given: Any) -> Tensor:
    """The operator's kernel for the Autograd dispatch key, which passes arguments in the schema's
    order and omits trailing defaults."""
    tensors = [t for t in given if isinstance(t, Tensor)]
    if not differentiated(*tensors):
        with compat.below_autograd():
            return _operator(*given)
    if given[0].dtype in BY_STORAGE:
        return _record(_Scaled, *given)
    given = given[:COMMON]
    if undisturbed(*tensors, cast=True) and not any(map(_batched, tensors[:2])):
        return eager(*given)
    return _in_parts(_record_product, *given)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the call's arguments for :func:`by_torch`."""
    tensors = [t if isinstance(t, Tensor) else None for t in inputs]
    ctx.save_for_backward(*tensors)
    ctx.rest = [None if isinstance(t, Tensor) else t for t in inputs]


def by_torch(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The operator's derivative if this torch cannot call it below its autograd
    (:mod:`tmm_core.compat`): recomputes the expression with torch's operators."""
    # Torch omits arguments left at their defaults.
    needs = itertools.chain(ctx.needs_input_grad, itertools.repeat(False))
    given = [
        rest if t is None else t.detach().requires_grad_(wanted)
        for t, rest, wanted in zip(ctx.saved_tensors, ctx.rest, needs, strict=False)
    ]
    call = Arguments(*given)
    a, b, bias, residual, alpha, epilogue, out_dtype = call.common
    if call.extras or a.dtype in BY_STORAGE:
        raise RuntimeError("tmm::matmul of 8-bit operands has no derivative")
    with torch.enable_grad():
        z = alpha * (a @ b)
        y = epilogue_of(epilogue).expression(z, bias, residual).to(out_dtype or a.dtype)
    wanted = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, grad), strict=True))
    return tuple(found.get(id(t)) for t in given[: len(ctx.needs_input_grad)])


def eager(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> Tensor:
    """:func:`matmul` for a recorded call that needs no dispatcher
    (:func:`tmm_core.launch.warm.undisturbed`): one node, without the operator.

    Args:
        transposed: ``b`` is a layer's weight, ``[N, K]``; a transposed view of it would be
            another node.
    """
    if a.dim() < 2 or b.dim() != 2:
        b = b.t() if transposed else b
        return _in_parts(_record_eager_product, a, b, bias, residual, alpha, epilogue, out_dtype)
    return _in_parts(_rows, a, b, bias, residual, alpha, epilogue, out_dtype, transposed)


def _in_parts(
    product: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    *more: Any,
) -> Tensor:
    """``product`` with the part of the epilogue that it can fuse (its head) and ``more``; then the
    rest of the epilogue, by kernels where there are any; then the residual."""
    if not epilogue:
        return product(a, b, bias, residual, alpha, IDENTITY, out_dtype, *more)
    parsed = epilogue_of(epilogue)
    if parsed.outputs:
        bare = parsed.bare.interned()
        y = _in_parts(product, a, b, bias, residual, alpha, bare, out_dtype, *more)
        return (y, *parsed.beside(y))  # type: ignore[return-value]  # as the plan's launcher
    head, rest = parsed.parts
    inner = residual if rest is None and head is IDENTITY else None
    y = product(a, b, bias, inner, alpha, head, out_dtype, *more)
    if rest is not None:
        found = kernels(rest, y.shape[-1], y.dtype, y) if product is _rows else None
        if found is not None:
            y = follow(y, rest, found)
        else:
            for stage in rest.stages or (rest,):
                y = _apply(stage, y)
    return y if residual is None or residual is inner else (y + residual).to(y.dtype)


def _text(head: Epilogue) -> str:
    return "" if head is IDENTITY else head.interned()


def _record(function: Any, *arguments: Any) -> Tensor:
    with compat.single_level():
        return function.apply(*arguments)  # type: ignore[no-any-return]


def _record_product(
    a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, head: Epilogue, out_dtype: Any
) -> Tensor:
    return _record(_Product, a, b, bias, residual, alpha, _text(head), out_dtype)


def _record_eager_product(
    a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, head: Epilogue, out_dtype: Any
) -> Tensor:
    return _EagerProduct.apply(a, b, bias, residual, alpha, _text(head), out_dtype)  # type: ignore[attr-defined, no-any-return]


def _operator(*arguments: Any) -> Tensor:
    return torch.ops.tmm.matmul.default(*arguments)  # type: ignore[no-any-return]


def _multiply(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """``alpha · (a @ b)``, through the operator if torch's dispatcher is needed."""
    if (
        not torch.compiler.is_dynamo_compiling()
        and undisturbed(a, b)
        and not (recorded(a, b) or _batched(a) or _batched(b))
    ):
        return run(a, b, None, None, alpha)
    return _operator(a, b, None, None, alpha)


def _apply(stage: Epilogue, z: Tensor) -> Tensor:
    inputs = stage.inputs(z)
    # Torch has operators for the derivatives of built-in stages.
    if stage.derivative is not None and not stage.builtin:
        return _record(_WithDerivative, stage, *inputs)
    y: Tensor = stage.reference(*inputs, *stage.parameters)
    return y


# The dispatcher has already unwrapped functorch's transforms here, which leaves one level to
# handle, as in the formulas of torch's own operators. `autograd.Function` works above the
# dispatcher and would unwrap them once more; its base class does not.


@contextmanager
def _outer_levels() -> Iterator[None]:
    """Enable derivatives in both modes, for the transforms outside of this one: custom functions
    run with them off."""
    if not transforms_active():
        yield
        return
    with torch.enable_grad(), _levels._set_fwd_grad_enabled(True):
        yield


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Call operators as the Autograd kernels of torch's own operators do."""
    with compat.below_autograd(), _outer_levels():
        yield


class OneLevel(compat.SingleLevelFunction):
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
        """The key by which compiled autograd caches a backward's graph, as in autograd.Function."""
        return (ctx._autograd_function_id,)


class _Product(OneLevel):
    """``epilogue(alpha · (a @ b) + bias) + residual`` for an epilogue with ``output_vjp``;
    the residual only where the epilogue is the identity."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with _below_autograd():
            return _operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, residual, ctx.alpha, epilogue, ctx.out_dtype = inputs
        ctx.epilogue = epilogue_of(epilogue)
        y = None if ctx.epilogue.linear else output
        wants_a, wants_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, y)
        if _levels._current_level >= 0 or transforms_active():
            ctx.save_for_forward(a, b, y)
        ctx.a, ctx.b, ctx.bias, ctx.residual = map(_like, (a, b, bias, residual))
        ctx.a_column, ctx.b_column = _is_column_major(a), _is_column_major(b)
        ctx.output = _like(output)
        ctx.settings = overridden()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return within(ctx.settings, _Product._gradients, ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, y = ctx.saved_tensors
        wants_a, wants_b, wants_bias, wants_residual, *_ = ctx.needs_input_grad
        (a_shape, dtype), (b_shape, _) = ctx.a, ctx.b
        dz = ctx.epilogue.output_vjp(grad, y, *ctx.epilogue.parameters)
        # Vectors are matrices of one row or column here; their gradients drop it again.
        dz2 = dz if len(b_shape) > 1 else dz[..., None]
        dz2 = dz2 if len(a_shape) > 1 else dz2[..., None, :]
        da = db = dbias = dresidual = None
        if wants_bias:
            shape, bias_dtype = ctx.bias
            dbias = dz2.sum(tuple(range(dz2.dim() - 1)), dtype=_wider(dz2.dtype, bias_dtype))
            dbias = _as(dbias, bias_dtype)
        if wants_residual:
            shape, residual_dtype = ctx.residual
            dresidual = _as(_summed_to(grad, shape), residual_dtype)
        dz2 = _as(dz2, dtype)
        alpha = ctx.alpha
        if wants_a:
            b2 = b if b.dim() > 1 else b[:, None]
            shape = a_shape if len(a_shape) > 1 else (1, *a_shape)
            da = _lying_as(ctx.a_column, dz2, _adjoint(b2), alpha)
            if da.shape != a_shape:
                da = da.sum_to_size(shape).reshape(a_shape)
        if wants_b:
            a2 = a if a.dim() > 1 else a[None]
            shape = b_shape if len(b_shape) > 1 else (*b_shape, 1)
            if len(b_shape) <= 2 < a2.dim():
                a2, dz2 = _flattened(a2, dz2)
            db = _lying_as(ctx.b_column, _adjoint(a2), dz2, alpha)
            if db.shape != b_shape:
                db = db.sum_to_size(shape).reshape(b_shape)
        return da, db, dbias, dresidual, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        ta: Tensor | None,
        tb: Tensor | None,
        tbias: Tensor | None,
        tresidual: Tensor | None,
        *_: None,
    ) -> Tensor:
        shape, dtype = ctx.output
        with _outer_levels():
            a, b, y = map(_primal, ctx.saved_tensors)
            # The first product adds the tangents of bias and residual, as its bias and residual.
            t = tresidual
            if ta is not None:
                t, tbias = _operator(ta, b, tbias, t, ctx.alpha, "", ctx.out_dtype), None
            if tb is not None:
                t, tbias = _operator(a, tb, tbias, t, ctx.alpha, "", ctx.out_dtype), None
            if tbias is not None:
                tbias = tbias if len(ctx.b[0]) > 1 else tbias[0]
                t = tbias if t is None else t + tbias
            assert t is not None
            t = t.expand(shape).to(dtype)
            return ctx.epilogue.output_vjp(t, y, *ctx.epilogue.parameters)  # type: ignore[no-any-return]


def _summed_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """``t.sum_to_size(shape)``, also for data-dependent sizes."""
    if all(type(n) is int for n in (*t.shape, *shape)):
        return t.sum_to_size(tuple(shape))
    lead = t.dim() - len(shape)
    ones = [lead + i for i, n in enumerate(shape) if type(n) is int and n == 1]
    t = t.sum(ones, keepdim=True) if ones else t
    return t.sum(tuple(range(lead))) if lead else t


class _EagerProduct(_Product):
    """:class:`_Product` without the operator, for calls that do not need the dispatcher."""

    forward = staticmethod(run)


class Call:
    """The non-tensor state that the backward of a product of rows needs."""

    __slots__ = (
        *("alpha", "bias", "head", "residual", "settings"),
        *("a_columns", "b_columns", "transposed"),
    )

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        alpha: float = 1.0,
        head: Epilogue = IDENTITY,
        transposed: bool = False,
    ) -> None:
        self.alpha = alpha
        self.head = head
        self.bias = None if bias is None else bias.dtype
        self.residual = _like(residual)
        self.a_columns = _is_column_major(a)
        #: Whether b is column-major, in the orientation in which it is multiplied.
        self.b_columns = _is_column_major(b) is not transposed
        self.transposed = transposed
        self.settings = overridden()


class _EagerRows(OneLevel):
    """``_EagerProduct`` of ``[…, M, K]`` with one matrix, as layers call it, with the lowest host
    cost."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        alpha: float,
        head: Epilogue,
        out_dtype: torch.dtype | None,
        transposed: bool,
    ) -> Tensor:
        y = run(a, b.t() if transposed else b, bias, residual, alpha, _text(head), out_dtype)
        wants_a, wants_b, *_ = ctx.needs_input_grad
        kept = None if head.linear else y
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, kept)
        ctx.call = Call(a, b, bias, residual, alpha, head, transposed)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, y = ctx.saved_tensors
        gradients = gradients_of_rows(ctx.call, ctx.needs_input_grad, a, b, y, grad)
        return *gradients, None, None, None, None


_rows = _EagerRows.apply  # type: ignore[attr-defined]


def gradients_of_rows(call: Call, *arguments: Any) -> tuple[Tensor | None, ...]:
    """:func:`_gradients_of_rows` under the settings of ``call``."""
    return within(call.settings, _gradients_of_rows, call, *arguments)


def _gradients_of_rows(
    call: Call,
    wanted: Sequence[bool],
    a: Tensor | None,
    b: Tensor | None,
    y: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of a, b, bias and residual.

    Args:
        call: The forward call.
        wanted: Which gradients are needed.
        a, b: Saved if the other's gradient is needed.
        y: The output, if the head is not linear.
        grad: Its gradient.
    """
    alpha, head = call.alpha, call.head
    wants_a, wants_b, wants_bias, wants_residual, *_ = wanted
    direct = _is_direct(grad)
    dz, da, db, dbias, dresidual = grad, None, None, None, None
    if head is not IDENTITY:
        assert head.output_vjp is not None
        dz = head.output_vjp(dz, y, *head.parameters)
    many = dz.dim() != 2
    rows = dz.flatten(0, -2) if many else dz
    if wants_bias:
        dtype: Any = call.bias
        same = rows.dtype is dtype
        dbias = rows.sum(0) if same else rows.sum(0, dtype=_wider(rows.dtype, dtype))
        dbias = _as(dbias, dtype)
    if wants_residual:
        assert call.residual is not None
        shape, dtype = call.residual
        dresidual = _as(grad.sum_to_size(shape), dtype)
    multiply = run if direct else _operator
    # In the operands' layouts: autograd copies, by transposing, a gradient in another layout.
    if wants_a:
        assert b is not None
        rows = _as(rows, b.dtype)
        b = b.conj() if b.is_complex() else b
        b = b if call.transposed else b.mT
        if call.a_columns and not many:
            da = multiply(b.mT, rows.mT, None, None, alpha).mT
        else:
            da = multiply(rows, b, None, None, alpha)
            da = da.view(*dz.shape[:-1], da.shape[-1]) if many else da
    if wants_b:
        assert a is not None
        rows = _as(rows, a.dtype)
        a = a.flatten(0, -2) if a.dim() != 2 else a
        a = a.conj() if a.is_complex() else a
        if call.b_columns:
            db = multiply(rows.mT, a, None, None, alpha)
        else:
            db = multiply(a.mT, rows, None, None, alpha)
        db = db if call.transposed is call.b_columns else db.mT
    return da, db, dbias, dresidual


def _is_direct(grad: Tensor) -> bool:
    """Whether backward's products of ``grad`` need no dispatcher, and are not recorded for second
    derivatives."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_dynamo_compiling()
        and undisturbed(grad, grad)
        and not (_batched(grad) or grad.is_complex())
    )


class _Following(OneLevel):
    """The part of the epilogue after a product, by kernels. As a separate node it frees the product
    before the gradients of its operands are computed."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, epilogue: Epilogue, found: Pointwise) -> Tensor:
        ctx.save_for_backward(z)
        ctx.epilogue, ctx.found = epilogue, found
        if takes(z):
            try:
                return found.forward(z)
            except Exception as error:
                failed(epilogue, found, error)
        return epilogue.apply(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        if _is_direct(grad) and takes(z):
            try:
                return ctx.found.backward(grad, z), None, None
            except Exception as error:
                failed(ctx.epilogue, ctx.found, error)
        return ctx.epilogue.vjp(grad, z), None, None


follow = _Following.apply  # type: ignore[attr-defined]


class _Scaled(OneLevel):
    """Products of operands with a format, which have no gradients."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with _below_autograd():
            return _operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("tmm has no derivative for {} @ {}".format(*ctx.dtypes))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise RuntimeError("tmm has no derivative for {} @ {}".format(*ctx.dtypes))


class _WithDerivative(OneLevel):
    """An epilogue stage whose author supplied the derivative."""

    @staticmethod
    def forward(stage: Epilogue, *inputs: Tensor) -> Tensor:
        with _below_autograd():
            return stage.reference(*inputs, *stage.parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.stage, *z = inputs
        ctx.save_for_backward(*z)
        if _levels._current_level >= 0 or transforms_active():
            ctx.save_for_forward(*z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(grad * slope for slope in _slopes(ctx.stage, ctx.saved_tensors)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        with _outer_levels():
            slopes = _slopes(ctx.stage, map(_primal, ctx.saved_tensors))
            first, *more = (t * slope for t, slope in zip(tangents, slopes, strict=True))
            return sum(more, first)


def _slopes(stage: Epilogue, z: Iterable[Tensor]) -> tuple[Tensor, ...]:
    assert stage.derivative is not None
    slopes = stage.derivative(*z, *stage.parameters)
    return tuple(slopes) if stage.gated else (slopes,)


def _primal(t: Any) -> Any:
    """``t`` without its tangent at this level, which would be differentiated a second time."""
    return None if t is None else forward_ad.unpack_dual(t).primal


def _like(t: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if t is None else (t.shape, t.dtype)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` as the gradient of a tensor of ``dtype``: its real part, if that is real."""
    if t.dtype is dtype:
        return t
    return (t.real if t.is_complex() and not dtype.is_complex else t).to(dtype)


def _wider(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else other


def _adjoint(t: Tensor) -> Tensor:
    return t.mH if t.is_complex() else t.mT


def _is_column_major(t: Tensor) -> bool:
    strides = t.stride()
    return len(strides) > 1 and strides[-2] == 1 < strides[-1]


def _lying_as(column_major: bool, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """``alpha · (x @ y)``, the gradient of an operand, in its layout. Weights are passed
    transposed: autograd copies, by transposing, a gradient in another layout, at a tenth of the
    product's cost."""
    if column_major:
        return _multiply(y.mT, x.mT, alpha).mT
    return _multiply(x, y, alpha)


def _flattened(a: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """``[…, M, K]`` and ``[…, M, N]`` as matrices with the same number of rows. Rows are summed
    over, so their order is free: a sharded dimension becomes the first, because DTensor flattens
    without communication (torch 2.10: flattens at all) only if no other dimension is sharded."""
    for placement in getattr(a, "placements", ()):
        if placement.is_shard() and 0 < placement.dim < a.dim() - 1:
            a, dz = a.movedim(placement.dim, 0), dz.movedim(placement.dim, 0)
            break
    return a.flatten(0, -2), dz.flatten(0, -2)
