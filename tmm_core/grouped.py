"""The public calls for grouped products: a mixture of experts in one call."""

from __future__ import annotations

import torch

from tmm_core import compat, foreign, settings
from tmm_core.errors import reraise
from tmm_core.interop import autograd_state, fallbacks, grouped_operator, operator
from tmm_core.interop.calls import is_traced, prepare_for, traced, traced_text_of
from tmm_core.interop.declaration import cast_first
from tmm_core.launch.check import addressable, check_out_dtype, check_tensors, number, strided
from tmm_core.launch.grouped_call import check, fast_path_allowed, run
from tmm_core.launch.warm import epilogue_of
from tmm_core.quantized import unpacked
from tmm_core.spec.arguments import GROUPED_TENSORS, PARTS, Arguments, GroupedArguments
from tmm_core.spec.epilogue import EpilogueLike

Tensor = torch.Tensor


def grouped_matmul(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    epilogue: EpilogueLike = None,
    out_dtype: torch.dtype | None = None,
    a_index: Tensor | None = None,
    out_index: Tensor | None = None,
    out_weights: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: settings.ConfigLike = None,
    on_cache_miss: settings.OnCacheMiss | None = None,
) -> Tensor:
    """``epilogue(alpha · (a @ b) + bias) + residual`` for many groups in one launch, in the forms
    of ``torch.nn.functional.grouped_mm``.

    >>> y = grouped_matmul(rows, weights.mT, offs=ends, epilogue="swiglu")     # doctest: +SKIP

    | ``a`` | ``b`` | result | group g |
    |---|---|---|---|
    | ``[T, K]`` | ``[G, K, N]`` | ``[T, N]`` | rows ``offs[g-1]:offs[g]`` |
    | ``[M, T]`` | ``[T, N]`` | ``[G, M, N]`` | a part of the sum over T |
    | ``[G, M, K]`` | ``[K, T]`` | ``[M, T]`` | columns of b and the result |
    | ``[G, M, K]`` | ``[G, K, N]`` | ``[G, M, N]`` | one product each; no offs |

    ``offs`` is never read on the host, so nothing waits for the GPU. Its values may change from one
    replay of a CUDA graph to the next. Groups may be empty. Data beyond ``offs[-1]`` is not read
    and may be NaN; there the result is unspecified, and gradients are zero. Operands may have any
    strides and alignment.

    Args:
        offs: int32 ``[G]``: where each group ends, non-decreasing, at most T.
        bias: ``[N]``, or ``[G, N]`` with one for each group (2N where gated); not with ragged
            columns.
        residual: Has the result's shape; added last.
        alpha: A number; a 0-d tensor without a gradient is read, which waits for a GPU.
        epilogue: As for :func:`tmm_core.matmul`. With a gated one ``b`` is 2N wide.
        out_dtype: The result's dtype; by default ``a``'s, and bf16 for 8-bit floats.
        a_index: int32 or int64 ``[T]``: row t of the product reads ``a[a_index[t]]``, gathered
            while it is loaded. ``a`` has any number of rows; all indices must be in range. Like
            ``out_index`` and ``out_weights``, it is for ragged rows.
        out_index: int32 or int64 ``[T]``: row t becomes ``result[out_index[t]]``. Indices must be
            distinct. With it, rows beyond ``offs[-1]`` are zero.
        out_weights: ``[T]``: row t is multiplied by it after the epilogue, before the residual.
        scale_a, scale_b: fp32 scales of 8-bit operands, in the shapes of
            ``torch.nn.functional.scaled_grouped_mm``: one for each row of ``a`` and each column
            of ``b`` (2N where gated), or one number. The shape is ``[T]`` for an operand whose rows
            (columns) are ragged, else ``[G, M]`` and ``[G, N]``. The latter may be flattened if the
            sum is ragged. With ``a_index`` a scale belongs to a row of ``a`` and is gathered with
            it.
        out: The tensor to write to. Not differentiable; data beyond the last group may be
            overwritten.
        kernel, config, on_cache_miss: As for :func:`tmm_core.matmul`.

    Raises:
        RuntimeError, ValueError, TypeError: Tensors do not fit; with torch's message where torch
            has one.
        UnknownNameError, UnsupportedProblemError, ConfigError, SettingsError,
            CacheMissError: See :mod:`tmm_core.errors`.

    Differentiable in a, b, bias, residual and out_weights. Gradients are grouped products as well.
    """
    if kernel is not None or config is not None or on_cache_miss is not None:
        with settings.override(kernel=kernel, config=config, on_cache_miss=on_cache_miss):
            return grouped_matmul(
                a, b, offs=offs, bias=bias, residual=residual, alpha=alpha, epilogue=epilogue,
                out_dtype=out_dtype, a_index=a_index, out_index=out_index,
                out_weights=out_weights, scale_a=scale_a, scale_b=scale_b, out=out,
            )  # fmt: skip
    if type(alpha) is not float:
        alpha = number("grouped_matmul", alpha)
    if out is None and out_index is None and out_weights is None and is_traced(epilogue):
        z = grouped_matmul(
            a, b, offs=offs, bias=bias, alpha=alpha, out_dtype=out_dtype, a_index=a_index,
            scale_a=scale_a, scale_b=scale_b,
        )  # fmt: skip
        return traced(epilogue, z, residual)
    call = GroupedArguments(
        a, b, offs,  # type: ignore[arg-type]  # None only for a batch
        bias, residual, alpha, traced_text_of(epilogue), out_dtype, a_index, out_index, out_weights,
        out_index is not None, scale_a, scale_b, out=out,
    )  # fmt: skip
    if offs is None:  # a batch of products, or ragged rows if each group has a bias
        call = _checked(call)
        return cast_first(_batch, call)  # type: ignore[no-any-return]
    try:
        if (
            out is None
            and not torch.compiler.is_dynamo_compiling()
            and fast_path_allowed(
                a, b, offs, bias, residual, a_index, out_index, out_weights, scale_a, scale_b
            )
            and not autograd_state.recorded(a, b, bias, residual, out_weights, scale_a, scale_b)
        ):
            return run(*call)
        checked = _checked(call)
        if out is not None:
            return grouped_operator.write(checked)
        return grouped_operator.grouped_matmul(*checked[:-1])  # type: ignore[no-any-return]
    except RuntimeError as error:
        reraise(error)
        # Torch refuses a tensor without strides in various places, with other messages.
        if not all(map(strided, call.given)):
            addressable(*call.given)
        raise


def _checked(call: GroupedArguments) -> GroupedArguments:
    """Check the types of a call's tensors; returns it with quantised operands replaced by their
    parts, whose classes have sharding rules from then on."""
    named = {name: getattr(call, name) for name in (*GROUPED_TENSORS, "out")}
    check_tensors("grouped_matmul", **named)
    check_out_dtype(call.out_dtype)
    call = unpacked(foreign.read_operands(call), grouped=True)
    for kind in {type(call.a), type(call.b)} - {Tensor}:
        prepare_for(kind)
    return call


def _batch(call: GroupedArguments) -> Tensor:
    a, b, bias, residual, out = call.a, call.b, call.bias, call.residual, call.out
    shape = torch.Size(check(call, epilogue_of(call.epilogue)))
    count = shape[0]
    # DTensor cannot flatten sharded rows, and ragged rows have no rule for shards of groups.
    sharded = isinstance(a, compat.dtensor())
    if bias is None or bias.dim() == 1 or not count or sharded:
        parts = {
            role.name: t.unsqueeze(-1 if role.of == "a" else -2)
            if (t := getattr(call, role.name)) is not None and t.numel() != 1 and t.dim() < 3
            else t
            for role in PARTS
        }
        shared = bias if bias is None or bias.dim() == 1 else None
        plain = Arguments(
            a, b, shared, residual, call.alpha, call.epilogue, call.out_dtype,
            **parts, formats=call.formats,
        )  # fmt: skip
        if bias is not None and bias is not shared and sharded:
            with compat.viewing(bias):
                bias = bias.unsqueeze(1)
            return fallbacks.answer(_product, plain._replace(bias=bias, out=out))
        return _product(plain._replace(out=out))
    (m, k), n = a.shape[1:], shape[-1]
    if residual is not None:
        residual = residual.expand(shape).reshape(count * m, n)
    flat = {
        role.name: t.flatten(0, 1) if t.dim() > 1 else t  # a grid keeps K
        for role in PARTS
        if role.of == "a" and (t := getattr(call, role.name)) is not None
    }
    ragged = call._replace(
        a=a.reshape(count * m, k), residual=residual, out=None,
        offs=torch.arange(1, count + 1, dtype=torch.int32, device=a.device) * m,
        **flat,
    )  # fmt: skip
    y: Tensor = grouped_operator.grouped_matmul(*ragged[:-1]).view(shape)
    return y if out is None else fallbacks.copied_to(y, out, *call.given)


def _product(call: Arguments) -> Tensor:
    return operator.matmul(*call[:-1]) if call.out is None else operator.write(call)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    offs: Tensor,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: EpilogueLike = None,
    out_dtype: torch.dtype | None = None,
    a_index: Tensor | None = None,
    out_index: Tensor | None = None,
    out_weights: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: settings.ConfigLike = None,
    on_cache_miss: settings.OnCacheMiss | None = None,
) -> Tensor:
    """``epilogue(x @ weight[g].T + bias[g]) + residual`` for the rows of each group g: a layer of
    experts.

    Args:
        x: ``[T, K]``, rows in the order of their groups; with ``a_index`` in any order.
        weight: ``[G, N, K]``; with a gated epilogue ``[G, 2N, K]``, gate rows before up rows.
        bias: ``[N]`` or ``[G, N]`` (2N where gated).
        scale_a, scale_b: Scales of 8-bit ``x`` and ``weight``, per row of each: ``[rows of x]`` and
            ``[G, N]``; or one number.

    For the other arguments see :func:`grouped_matmul`.

    Raises:
        RuntimeError: ``x`` is not 2-D or ``weight`` not 3-D; else as :func:`grouped_matmul`.
    """
    check_tensors("grouped_linear", x=x, weight=weight)
    weight = foreign.read(weight)
    if x.dim() != 2 or weight.dim() != 3:
        raise RuntimeError(
            "grouped_linear(): x must be 2-D [T, K] and weight 3-D [G, N, K], got "
            f"{x.dim()}D and {weight.dim()}D"
        )
    return grouped_matmul(
        x, weight.mT, offs=offs, bias=bias, residual=residual, alpha=alpha, epilogue=epilogue,
        out_dtype=out_dtype, a_index=a_index, out_index=out_index, out_weights=out_weights,
        scale_a=scale_a, scale_b=scale_b, out=out, kernel=kernel, config=config,
        on_cache_miss=on_cache_miss,
    )  # fmt: skip
