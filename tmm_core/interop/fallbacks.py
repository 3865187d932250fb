"""Serves calls that no kernel can serve directly.

Torch multiplies operands without strides. A bias may have a shape other than ``[N]`` that
``torch.nn.functional.linear`` accepts. A weight of another library's type has its own product.

The warm path does not check for such calls. It raises when it reads strides or addresses, or
compares the bias with the product, and the API then calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from tmm_core import settings
from tmm_core.errors import UnsupportedProblemError
from tmm_core.formats import Pair, pair
from tmm_core.interop.declaration import cast_first
from tmm_core.launch.check import (
    broadcasts,
    check,
    check_out,
    check_tensors,
    check_terms,
    product_shape,
    strided,
)
from tmm_core.launch.warm import epilogue_of
from tmm_core.spec.arguments import EXTRAS, PARTS, Arguments
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.launcher import BASELINE

Tensor = torch.Tensor


def needs_fallback(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether :func:`answer` has to serve this call, because kernels cannot."""
    if not all(strided(t) for t in (a, b, bias, residual) if t is not None):
        return True
    if bias is None or not b.dim():
        return False
    return bias.dim() != 1 or bias.shape[0] != (b.shape[-1] if b.dim() > 1 else 1)


def answer(matmul: Callable[[Arguments], Tensor], call: Arguments) -> Tensor:
    """Return the result of a call for which :func:`needs_fallback` is true. ``matmul`` computes the
    call if kernels can serve it once its bias has another form.

    Raises:
        UnsupportedProblemError: A kernel is forced, and an operand has no strides.
        RuntimeError, ValueError, TypeError: As torch raises them.
    """
    parsed = epilogue_of(call.epilogue)
    a, b, bias, residual, out = call.a, call.b, call.bias, call.residual, call.out
    dense = all(strided(t) for t in (a, b, bias, residual) if t is not None)
    if not dense:
        _refuse_what_torch_cannot(call, "sparse, nested or mkldnn operands")
    one_row, width = _checked(call, parsed)
    if not dense:
        return copied_to(_by_torch(call, parsed), out, a, b, bias, residual)
    assert bias is not None
    if one_row:
        if hasattr(bias, "placements"):  # DTensor reshapes no shard of one element
            ones = [dim for dim, size in enumerate(bias.shape) if size == 1]
            bias = bias.sum(ones, dtype=bias.dtype)
        row = bias.reshape(-1).expand(width).contiguous()
        return matmul(call._replace(bias=row))
    if residual is None and parsed.is_identity:
        return matmul(call._replace(bias=None, residual=bias))
    z = matmul(call._replace(bias=None, residual=None, epilogue="", out=None))
    y = parsed.expression(z, bias, residual).to(z.dtype)
    return copied_to(y, out, a, b, bias, residual)


def foreign(*tensors: Any) -> bool:
    """Whether a tensor is of another library's type, such as torchao's quantised tensors."""
    kinds = {type(t) for t in tensors if isinstance(t, Tensor)} - {torch.nn.Parameter, Tensor}
    return any(kind.__module__.partition(".")[0] not in ("torch", "tmm_core") for kind in kinds)


def by_type(call: Arguments, linear: bool) -> Tensor:
    """Compute a product by torch's own function, which a tensor's type overrides, and the rest of
    the expression by torch's operators.

    Args:
        linear: ``b`` is the weight ``[N, K]`` of ``torch.nn.functional.linear``.

    Raises:
        UnsupportedProblemError: A kernel is forced.
        RuntimeError, ValueError, TypeError: As torch raises them.
    """
    kinds = {type(t).__name__ for t in call[:4] if foreign(t)}
    _refuse_what_torch_cannot(call, f"a tensor of type {' or '.join(sorted(kinds))}")
    parsed = epilogue_of(call.epilogue)
    # Only the type knows which dtypes it multiplies.
    b = _of_form(call.a, call.b.shape)
    formed = call._replace(a=_of_form(call.a, call.a.shape), b=b.t() if linear else b)
    cast_first(lambda formed: _checked(formed, parsed), formed)
    if linear:
        y = _finished(call, parsed, lambda bias: F.linear(call.a, call.b, bias))
    else:
        y = _by_torch(call, parsed)
    return copied_to(y, call.out, call.a, call.bias, call.residual)


def by_override(function: Callable[..., Tensor], tensors: dict[str, Any], **rest: Any) -> Tensor:
    """Call ``function`` through the ``__torch_function__`` of an argument that is not a tensor,
    which is how ``torch.fx`` records the call.

    Raises:
        TypeError: No argument has one.
    """
    if not has_torch_function(tuple(tensors.values())):
        check_tensors(function.__name__, **tensors)
    given = {name: t for name, t in tensors.items() if t is not None}
    return handle_torch_function(function, tuple(given.values()), **given, **rest)


def _checked(call: Arguments, epilogue: Epilogue) -> tuple[bool, int]:
    """Check a call like a kernel's call, except the shape of the bias, which is checked like
    torch's. Returns whether the bias is one row, and its width."""
    a, b, bias, residual = call[:4]
    if any(t is not None and t.is_nested for t in call[:4]):
        # Torch checks ragged shapes.
        check_terms(call, Pair(None, None, a.dtype), epilogue, bias=bias, residual=residual)
        return False, 0
    shape = product_shape(a, b, pair(a.dtype, b.dtype, call.formats).packs)
    width = shape[-1] if b.dim() > 1 else 1
    formed = call._replace(
        a=_of_form(a, a.shape),
        b=_of_form(b, b.shape),
        bias=None if bias is None else _of_form(bias, (width,)),
        residual=None if residual is None else _of_form(residual, residual.shape),
    )
    check(formed, epilogue)
    if bias is None:
        return False, width
    # Torch treats a vector as a row, so a bias of one row fits it.
    one_row = all(n == 1 for n in bias.shape[:-1]) and bias.dim() <= max(len(shape), 2)
    one_row = one_row and (b.dim() > 1 or bias.numel() == 1)
    if not broadcasts(bias.shape[-1:] if one_row else bias.shape, (width,) if one_row else shape):
        raise ValueError(
            f"bias must have shape ({width},) or broadcast to the product's shape "
            f"{tuple(shape)}, got {tuple(bias.shape)}"
        )
    return one_row, width


def _of_form(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense tensor of this shape, with the dtype and device of ``t``."""
    return torch.empty((), dtype=t.dtype, device=t.device).expand(shape)


def _refuse_what_torch_cannot(call: Arguments, what: str) -> None:
    # When compiling, torch 2.10 reads the fields of a NamedTuple but not its properties.
    if call.formats or any(getattr(call, name) is not None for name in EXTRAS):
        names = " and ".join(role.name for role in PARTS if role.part == "scale")
        raise RuntimeError(f"{names}, and quantised operands, are for strided operands")
    if torch.compiler.is_dynamo_compiling():
        return  # settings are not part of a graph
    forced = settings.current().kernel
    if forced is not None and forced != BASELINE:
        raise UnsupportedProblemError(f"kernel {forced!r} cannot serve {what}")


def _by_torch(call: Arguments, epilogue: Epilogue) -> Tensor:
    a, b = call.a, call.b
    if b.dim() == 2 and (a.is_nested or a.is_mkldnn or b.is_mkldnn):
        # Nested and mkldnn tensors multiply by a weight only through F.linear.
        return _finished(call, epilogue, lambda bias: F.linear(a, b.t(), bias))
    z = torch.matmul(a, b)
    return _finished(call._replace(bias=None), epilogue, lambda _: z, call.bias)


def _finished(
    call: Arguments,
    epilogue: Epilogue,
    product: Callable[[Tensor | None], Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """Apply alpha, bias, epilogue, residual and dtype to a product.

    Args:
        product: Computes the product plus the bias that it is given.
        bias: A bias to add here.
    """
    plain = not isinstance(call.alpha, Tensor) and call.alpha == 1.0
    if plain:
        z = product(call.bias)
    else:
        z, bias = product(None) * call.alpha, bias if call.bias is None else call.bias
    y = epilogue.expression(z, bias, call.residual)
    return in_dtype(y, call.out_dtype or z.dtype)


def in_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``y``, whose type may lack ``Tensor.to``, unless it has the dtype."""
    return y if y.dtype is dtype else y.to(dtype)


def copied_to(y: Tensor, out: Tensor | None, *inputs: Tensor | None) -> Tensor:
    """Return ``y``, or ``out`` with its values; raises if ``out`` does not fit or overlaps an
    input."""
    if out is None:
        return y
    apart = [t for t in inputs if t is not None and strided(t)]
    check_out(out, y.shape, y.dtype, [y, *apart])
    return out.copy_(y)
