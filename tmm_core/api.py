"""The public calls: thin functions over the operator and the default dispatcher."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tmm_core import compat, dispatch, foreign, settings
from tmm_core.errors import reraise
from tmm_core.formats import IMPLIED
from tmm_core.interop import autograd, autograd_state, fallbacks, operator, outputs_operator
from tmm_core.interop.calls import (
    has_outputs,
    is_traced,
    prepare_for,
    text_of,
    traced,
    traced_text_of,
)
from tmm_core.interop.declaration import cast_first
from tmm_core.launch import grouped_call as launch_grouped
from tmm_core.launch import warm
from tmm_core.launch.check import (
    check,
    check_out_dtype,
    check_tensors,
    is_integral,
    number,
    refuse_alpha,
    refuse_gradients_of_out,
)
from tmm_core.launch.plan import Plan
from tmm_core.quantized import Quantized, unpacked
from tmm_core.spec.arguments import TENSORS, Arguments, GroupedArguments
from tmm_core.spec.epilogue import Epilogue, EpilogueLike
from tmm_core.spec.problem import Problem

if TYPE_CHECKING:
    from tmm_cache import TuningRecord

    from tmm_core.dispatch.explanation import Explanation, KernelInfo

Tensor = torch.Tensor


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    epilogue: EpilogueLike = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    kernel: str | None = None,
    config: settings.ConfigLike = None,
    on_cache_miss: settings.OnCacheMiss | None = None,
) -> Tensor:
    """``epilogue(alpha · (a @ b) + bias) + residual``, by the fastest verified kernel.

    >>> y = matmul(x, w, epilogue="silu")                    # doctest: +SKIP
    >>> y = matmul(x8, w8, scale_a=sx, scale_b=sw)           # doctest: +SKIP

    Args:
        a: ``[..., M, K]`` or ``[K]``, any strides; or :class:`tmm_core.Quantized`.
        b: ``[..., K, N]`` or ``[K]``, of a's dtype (float8_e4m3fn and float8_e5m2 may be
            mixed), or quantised. With a gated epilogue the width is 2N: the gate's columns, then
            the up projection's.
        bias: ``[N]`` (2N where gated), of a's dtype, the output's, or fp32; not of 8 bits.
        residual: Broadcastable to the output; added last, after the epilogue.
        alpha: Scales the product: a number that torch.addmm takes, or a 0-d tensor, which may
            require a gradient. Torch applies alpha and everything after it if alpha is complex,
            requires a gradient or is on a GPU. To read it there would make the host wait.
        epilogue: ``None``, a name such as ``"silu"``, a chain ``"gelu_tanh+softcap(30)"``, an
            :class:`Epilogue` or a sequence of these.
        out: The tensor to write to, resized as torch does. The call is then not differentiable,
            and waits for an ``alpha`` on a GPU.
        out_dtype: The result's dtype; a's by default, or bf16 if that is an 8-bit float.
            fp32 accumulators are rounded once.
        scale_a: The scale of an 8-bit ``a``; multiplies the product before the bias. fp32, on
            the operands' device: one number, or one for each row of a, ``[..., M, 1]``. Calls
            with 8-bit or quantised operands have no backward.
        scale_b: Likewise for ``b``: one number, or one for each column, ``[..., 1, N]`` (2N
            where gated).
        kernel: Force this kernel; raises if it cannot serve the call.
        config: Force this config of ``kernel``; omitted fields take the default config's values.
        on_cache_miss: ``"tune"``, ``"background"``, ``"heuristic"`` or ``"error"``, for this call.

    Returns:
        A tensor of ``torch.matmul(a, b)``'s shape, its last dimension halved where gated. With an
        epilogue that has outputs (:class:`tmm_core.Port`) the tuple ``(result, *outputs)``.

    Raises:
        RuntimeError, ValueError, TypeError: Tensors do not fit; with torch's message where
            torch has one.
        UnknownNameError, UnsupportedProblemError, ConfigError, SettingsError,
            CacheMissError: See :mod:`tmm_core.errors`.

    Differentiable in a, b, bias, residual and alpha, in both modes and any number of times.
    Backward saves ``a`` if ``b`` needs a gradient, and ``b`` if ``a`` does. The epilogue saves at
    most what eager code would. If the output determines the derivative (``relu``, ``sigmoid``,
    ``tanh``, ``softplus``, ``softcap``), only the output is saved and the epilogue stays fused.
    Otherwise the product before the epilogue is saved, and a separate kernel applies the epilogue.
    """
    if kernel is not None or config is not None or on_cache_miss is not None:
        call = Arguments(a, b, bias, residual, alpha, "", out_dtype, scale_a, scale_b, out=out)
        with settings.override(kernel=kernel, config=config, on_cache_miss=on_cache_miss):
            return _of_any_type(call, epilogue)
    if (
        not torch.compiler.is_dynamo_compiling()
        and out is None
        and (type(alpha) is float or (isinstance(alpha, (int, float)) and _are_tensors(a, b)))
        and (epilogue is None or type(epilogue) is str or type(epilogue) is Epilogue)
        and warm.fast_path_allowed(a, b, bias, residual, scale_a, scale_b)
    ):
        text = text_of(epilogue)
        alpha = alpha if type(alpha) is float else number("matmul", alpha, a)
        try:
            if not autograd_state.recorded(a, b, bias, residual, scale_a, scale_b):
                return warm.run(a, b, bias, residual, alpha, text, out_dtype, scale_a, scale_b)
            if scale_a is None and scale_b is None and a.dtype not in IMPLIED:
                return autograd.in_parts(a, b, bias, residual, alpha, text, out_dtype)
        except (RuntimeError, ValueError) as error:
            reraise(error)
            if not fallbacks.needs_fallback(a, b, bias, residual):
                raise
    call = Arguments(a, b, bias, residual, alpha, "", out_dtype, scale_a, scale_b, out=out)
    if type(a) is not Tensor and (y := _sharded(call, epilogue)) is not None:
        return y
    return _of_any_type(call, epilogue)


def _of_any_type(call: Arguments, epilogue: EpilogueLike, transposed: bool = False) -> Tensor:
    """:func:`_answer`, or torch's own product if a tensor's type lacks tmm's operators.

    Args:
        transposed: ``b`` is a layer's weight, ``[N, K]``.
    """
    # torch.export does not pass on operators of a foreign tensor's transpose.
    if not (transposed and torch.compiler.is_exporting() and fallbacks.foreign(call.b)):
        try:
            b = compat.transposed(call.b) if transposed else call.b
            return _answer(call._replace(b=b), epilogue)
        except (NotImplementedError, TypeError) as error:
            reraise(error)
            if not fallbacks.foreign(*call[:4]):
                raise
    with compat.uncast(call.out):
        return fallbacks.by_type(call._replace(epilogue=traced_text_of(epilogue)), transposed)


def _sharded(call: Arguments, epilogue: EpilogueLike, transposed: bool = False) -> Tensor | None:
    """The product of DTensors, if each rank can multiply its own shards; else None."""
    if torch.compiler.is_compiling() or not isinstance(call.a, compat.dtensor()):
        return None
    plain = type(call.alpha) is float and (epilogue is None or type(epilogue) is str)
    if not plain or call.out is not None or (call.scale_a, call.scale_b) != (None, None):
        return None
    text = text_of(epilogue)
    if text and has_outputs(text):
        return None
    from tmm_core.interop import sharding

    return sharding.in_place(call._replace(epilogue=text), transposed)


def _answer(call: Arguments, epilogue: EpilogueLike) -> Tensor:
    """:func:`matmul` without its fast path: any tensors, alpha and epilogue."""
    if not _are_tensors(*(getattr(call, name) for name in (*TENSORS, "out"))):
        tensors = {name: getattr(call, name) for name in (*TENSORS, "out")}
        more = {"alpha": call.alpha, "epilogue": epilogue, "out_dtype": call.out_dtype}
        return fallbacks.by_override(matmul, tensors, **more)
    call = _parts_of(call)
    if call.out is None and is_traced(epilogue):
        return traced(epilogue, _computed(call._replace(residual=None)), call.residual)
    return _computed(call._replace(epilogue=traced_text_of(epilogue)))


def _computed(call: Arguments) -> Tensor:
    """The result of a call that has tensors, plain or parts of quantised ones, and any alpha."""
    check_out_dtype(call.out_dtype)
    if type(call.alpha) is not float:
        alpha = call.alpha
        if not isinstance(alpha, Tensor):
            alpha = number("matmul", alpha, call.a)
        if isinstance(alpha, (Tensor, complex)):
            return _scaled(call._replace(alpha=alpha))
        call = call._replace(alpha=alpha)
    if call.epilogue and has_outputs(call.epilogue):
        return outputs_operator.matmul(call)  # type: ignore[return-value]  # as documented
    if fallbacks.needs_fallback(call.a, call.b, call.bias, call.residual):
        return _fallback(call)
    if type(call.a) is not Tensor:
        prepare_for(type(call.a))
    if call.out is not None:
        return operator.write(call)
    if compat.transforms_active():
        return cast_first(lambda call: operator.matmul(*call[:-1]), call)  # type: ignore[no-any-return]
    return operator.matmul(*call[:-1])  # type: ignore[no-any-return]


def _fallback(call: Arguments) -> Tensor:
    """The result of a call that no kernel can serve directly."""
    return cast_first(lambda call: fallbacks.answer(_computed, call), call)  # type: ignore[no-any-return]


def _are_tensors(a: Any, b: Any, *others: Any) -> bool:
    """Whether both operands are tensors, and the others are tensors or left out."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return all(t is None or isinstance(t, Tensor) for t in others)


def _scaled(call: Arguments) -> Tensor:
    """The result of a call with a tensor or a complex number as ``alpha``."""
    alpha, out = call.alpha, call.out
    if isinstance(alpha, Tensor) and alpha.dim():
        shape = tuple(alpha.shape)
        raise TypeError(f"matmul(): argument 'alpha' must be Number or 0-d Tensor, not {shape}")
    a, b, bias, residual = call[:4]
    if fallbacks.needs_fallback(a, b, bias, residual):
        return _fallback(call)
    if isinstance(alpha, Tensor):
        differentiated = torch.compiler.is_compiling() or autograd_state.differentiated(alpha)
        if out is not None and differentiated:
            refuse_gradients_of_out()
        read = out is not None or (alpha.device.type == "cpu" and not differentiated)
        if alpha.is_complex() and not (read or a.is_complex()):
            refuse_alpha()
        # A product of integers has no derivative, and torch rounds its alpha to an integer.
        if read or is_integral(call):
            value = number("matmul", alpha.detach(), a)
            return _computed(call._replace(alpha=value))
    return cast_first(_scaled_by_torch, call)  # type: ignore[no-any-return]


def _scaled_by_torch(call: Arguments) -> Tensor:
    """A product to which torch applies ``alpha`` and everything after it."""
    parsed = warm.epilogue_of(call.epilogue)
    check(call, parsed)
    alone = call._replace(alpha=1.0, bias=None, residual=None, epilogue="", out=None)
    product = _computed(alone)
    y = parsed.expression(call.alpha * product, call.bias, call.residual).to(product.dtype)
    result: Any = (y, *parsed.auxiliary(y)) if parsed.outputs else y
    # When compiling, torch 2.10 reads no property of a NamedTuple.
    return result if call.out is None else fallbacks.copied_to(result, call.out, *call.given)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    epilogue: EpilogueLike = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    kernel: str | None = None,
    config: settings.ConfigLike = None,
    on_cache_miss: settings.OnCacheMiss | None = None,
) -> Tensor:
    """``epilogue(x @ weight.T + bias) + residual``, as ``torch.nn.functional.linear``.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, also quantised, or ``[K]``; with a gated epilogue ``[2N, K]``, gate rows
            before up rows.
        bias: ``[N]`` or ``[2N]``.
        scale_b: The scale of the weight's transpose: one number, or ``[1, N]``.

    For the other arguments see :func:`matmul`.

    Raises:
        RuntimeError: ``weight`` is neither 2-D nor 1-D; else as :func:`matmul`.
    """
    try:
        if not 0 < weight.dim() < 3:
            raise RuntimeError(
                f"linear(): weight must be 2-D [N, K] or 1-D [K], got {weight.dim()}D"
            )
        if (
            not torch.compiler.is_dynamo_compiling()
            and type(alpha) is float
            and (kernel is None and config is None and on_cache_miss is None)
            and (out is None and scale_a is None and scale_b is None)
            and (epilogue is None or type(epilogue) is str)
            and warm.fast_path_allowed(x, weight, bias, residual)
        ):
            text = epilogue or ""
            if not autograd_state.recorded(x, weight, bias, residual):
                return warm.run(x, weight.t(), bias, residual, alpha, text, out_dtype)
            if x.dtype not in IMPLIED:
                return autograd.in_parts(
                    x, weight, bias, residual, alpha, text, out_dtype, transposed=weight.dim() > 1
                )
    except (AttributeError, RuntimeError, ValueError) as error:
        reraise(error)
        if _are_tensors(x, weight, bias, residual, out) and (
            weight.dim() > 2 or not fallbacks.needs_fallback(x, weight.t(), bias, residual)
        ):
            raise
    if not _are_tensors(x, weight, bias, residual, out):
        tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "out": out}
        more = {"alpha": alpha, "epilogue": epilogue, "out_dtype": out_dtype}
        return fallbacks.by_override(linear, tensors, **more)
    forced: dict[str, Any] = {"kernel": kernel, "config": config, "on_cache_miss": on_cache_miss}
    weight = foreign.read(weight)
    call = Arguments(x, weight, bias, residual, alpha, "", out_dtype, scale_a, scale_b, out=out)
    if type(x) is not Tensor and not any(forced.values()):
        y = _sharded(call, epilogue, transposed=True)
        if y is not None:
            return y
    with settings.override(**forced) if any(forced.values()) else nullcontext():
        return _of_any_type(call, epilogue, transposed=True)


def plan(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    epilogue: EpilogueLike = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    kernel: str | None = None,
    config: settings.ConfigLike = None,
    on_cache_miss: settings.OnCacheMiss | None = None,
) -> Plan:
    """Choose and compile a kernel now. Calls of the returned :class:`Plan`, with tensors of
    the same shapes, strides and dtypes, have the lowest host cost.

    Not differentiable. For arguments and errors see :func:`matmul`.
    """
    alpha = number("plan", alpha)
    given = Arguments(a, b, bias, residual, alpha, "", out_dtype, scale_a, scale_b)
    call = _parts_of(given)
    check_tensors("plan", **dict(zip(TENSORS, call.tensors, strict=True)))
    with settings.override(kernel=kernel, config=config, on_cache_miss=on_cache_miss) as current:
        parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
        chosen = warm.make_plan(call, parsed, current, warm.describe)
    return chosen.ready(call, None if call is given else _parts_of)


def _parts_of(call: Arguments) -> Arguments:
    """The call with quantised operands, tmm's and other libraries', replaced by their parts."""
    parts: Arguments = unpacked(foreign.read_operands(call))
    return parts


def problem(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    epilogue: EpilogueLike = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    offs: Tensor | None = None,
    a_index: Tensor | None = None,
    out_index: Tensor | None = None,
    out_weights: Tensor | None = None,
) -> Problem:
    """The :class:`Problem` that describes a call of :func:`matmul` with these arguments, or with
    ``offs`` of :func:`tmm_core.grouped_matmul`.

    Raises:
        RuntimeError, ValueError, TypeError: As :func:`matmul`.
    """
    alpha = number("problem", alpha)
    a, b = foreign.read(a), foreign.read(b)
    given = Arguments(a, b, bias, residual, alpha, "", out_dtype, scale_a, scale_b)
    rows = {"a_index": a_index, "out_index": out_index, "out_weights": out_weights}
    check_tensors("problem", **dict(zip(TENSORS, given.tensors, strict=True)), **rows)
    parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
    current = settings.current()
    if offs is not None:
        grouped_call = GroupedArguments(
            a, b, offs, bias, residual, alpha, "", out_dtype, a_index, out_index, out_weights,
            zeroed=out_index is not None, scale_a=scale_a, scale_b=scale_b,
        )  # fmt: skip
        return launch_grouped.describe(unpacked(grouped_call, grouped=True), parsed, current)[0]
    if not (a_index is out_index is out_weights is None):
        raise ValueError("a_index, out_index and out_weights need ragged rows: give offs")
    return warm.describe(unpacked(given), parsed, current)[0]


def explain(a: Tensor, b: Tensor, **arguments: Any) -> Explanation:
    """Explain which kernel :func:`matmul` would choose for these arguments under the current
    settings, and why. Also say whether the call would tune or raise CacheMissError.

    Nothing is tuned or launched. ``print()`` the result, or read its fields.

    Args:
        a, b, arguments: As for :func:`matmul`, or with ``offs`` for
            :func:`tmm_core.grouped_matmul`; ``out`` left out.

    Raises:
        RuntimeError, ValueError, TypeError: As :func:`matmul`.
    """
    from tmm_core.dispatch.explanation import explain_problem

    names = ("kernel", "config", "on_cache_miss")
    forced = {name: arguments.pop(name, None) for name in names}
    with settings.override(**forced) as current:
        return explain_problem(dispatch.default_dispatcher(), problem(a, b, **arguments), current)


def tune(
    problems: Problem | Iterable[Problem], *, force: bool = False, budget: float | None = None
) -> list[TuningRecord]:
    """Measure problems now, at their own sizes, and store each record as soon as it exists.

    Args:
        problems: From :func:`problem`, one or many.
        force: Also measure problems that have a record.
        budget: Seconds per problem (``TMM_TUNE_BUDGET``).

    Returns:
        One record per problem.

    Raises:
        TypeError: ``problems`` contains an object that is not a problem.
        UnsupportedProblemError: A dimension of a problem is 0.
    """
    given = list(problems) if isinstance(problems, Iterable) else [problems]
    if others := [type(p).__name__ for p in given if not isinstance(p, Problem)]:
        raise TypeError(f"tune() takes problems, made by tmm_core.problem(…), not {others[0]}")
    changes: dict[str, Any] = {} if budget is None else {"tune_budget": budget}
    with settings.override(**changes) as current:
        chooser = dispatch.default_dispatcher()
        records = []
        for problem, following in itertools.zip_longest(given, given[1:]):
            if following is not None:
                chooser.prepare(following, current, force)
            records.append(chooser.tune(problem, current, force=force))
    warm.forget_plans()
    return records


def preload() -> None:
    """Import all kernels, list the records, and verify a small product on the current GPU now.
    Otherwise the first calls without records do so, which takes about a second. Then exclude all
    existing Python objects from garbage collection (:func:`gc.freeze`), since a collection of them
    would delay a call by 0.1 s. A server that tunes in the background calls this after it has
    loaded its model, before its first request."""
    dispatch.default_dispatcher().preload()


def kernels() -> list[KernelInfo]:
    """All registered kernels, with version, distribution, traits, and why they are disabled."""
    from tmm_core.dispatch.explanation import kernel_infos

    return kernel_infos(dispatch.default_dispatcher().registry, settings.current())


def _layout(name: str) -> Any:
    """The module that reads checkpoints of this layout."""
    return importlib.import_module(f"tmm_core.integrations.checkpoints.{name}")


def _matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """:func:`matmul` with the names of ``torch.matmul``."""
    return matmul(input, other, out=out)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` with the names of ``torch.nn.functional.linear``."""
    return linear(input, weight, bias)


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's attention of several heads, which splits and adds its weights: with their values."""

    def values(t: Any) -> Any:
        return t.to(query.dtype).dequantize() if isinstance(t, Quantized) else t

    named = {name: values(t) for name, t in kwargs.items()}
    return torch.nn.functional.multi_head_attention_forward(query, *map(values, args), **named)


Quantized.layouts = staticmethod(_layout)
Quantized.products |= {
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: lambda b, a: matmul(a, b),
    torch.nn.functional.linear: _linear,
    torch.nn.functional.multi_head_attention_forward: _attention,
}
