"""``Quantized``: a tensor of stored numbers with their scale, which products take as an operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from tmm_core import compat, formats
from tmm_core.spec.arguments import PART

Tensor = torch.Tensor

_aten = torch.ops.aten
#: Operators that apply to each part by itself.
_EACH = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.t.default,
    _aten.transpose.int,
}  # fmt: skip


class Quantized(torch.Tensor):
    """Stored numbers, and how to read them: ``value = (stored − zero) · scale``.

    >>> w = Quantized(codes, scale)                          # doctest: +SKIP
    >>> y = tmm_core.linear(x, w)                            # doctest: +SKIP

    It stands for its values wherever :func:`tmm_core.matmul`, ``linear`` and the grouped calls take
    an operand, and in ``F.linear`` and ``@``. Other operators want :meth:`dequantize`. Its dtype is
    that of the values. It can be a parameter, moved, copied, saved and compiled.

    Args:
        data: The stored numbers, ``[..., outer, K]``, as the format stores them.
        scale: One number, or ``[..., outer]`` or ``[..., outer, 1]``; fp32 or another dtype that
            the format allows.
        zero: Zero points of the scale's shape, if the format has them.
        format: ``"int8"``, ``"fp8"``, or one that a plugin added.
        group, block: The numbers along K, and the blocks, that share a scale. No format of tmm has
            such scales yet.

    Raises:
        ValueError: No such format; or a dtype, shape, group or block that it has not.
    """

    stored: Tensor
    scale: Tensor
    zero: Tensor | None
    format: str

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        *,
        format: str = "int8",  # the field's word
        group: int | None = None,
        block: tuple[int, int] | None = None,
    ) -> Quantized:
        form = formats.named(format)
        if group is not None or block is not None:
            raise ValueError(f"format {format} has scales by tensor or row, not by group or block")
        if data.dtype not in form.storage:
            raise ValueError(f"format {format} stores {form}, got {data.dtype}")
        if zero is not None and not form.zeros:
            raise ValueError(f"format {format} has no zero points")
        outer = data.shape[:-1]
        for name, t in (("scale", scale), ("zero", zero)):
            if t is not None and t.numel() != 1 and t.shape not in (outer, (*outer, 1)):
                raise ValueError(
                    f"{name} must be one number or have shape {tuple(outer)} or "
                    f"{(*outer, 1)}, got {tuple(t.shape)}"
                )
        if zero is not None and zero.numel() != scale.numel():
            raise ValueError("zero must have the shape of scale")
        if scale.shape == outer:
            scale = scale[..., None]
        zero = None if zero is None else zero.reshape(scale.shape)
        dtype = scale.dtype if scale.dtype in (torch.float16, torch.bfloat16) else form.result
        return cls._of(data, scale, zero, format, dtype)

    @classmethod
    def _of(
        cls, stored: Tensor, scale: Tensor, zero: Tensor | None, name: str, dtype: torch.dtype
    ) -> Quantized:
        made: Quantized = compat.wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=dtype, device=stored.device
        )
        made.stored, made.scale, made.zero, made.format = stored, scale, zero, name
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def dequantize(self) -> Tensor:
        """The values, in this tensor's dtype, computed in fp32."""
        form = formats.named(self.format)
        return form.values(self.stored, self.scale, self.zero, torch.float32).to(self.dtype)

    def _each(
        self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> Quantized:
        zero = None if self.zero is None else function(self.zero)
        parts = function(self.stored), function(self.scale), zero
        return type(self)._of(*parts, self.format, dtype or self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["stored", "scale"] + ([] if self.zero is None else ["zero"])
        return names, (self.format, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], how: Any, size: Any, stride: Any
    ) -> Quantized:
        name, dtype = how
        return cls._of(parts["stored"], parts["scale"], parts.get("zero"), name, dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = "tensor" if self.scale.numel() == 1 else "row"
        size = tuple(self.shape)
        return f"Quantized({self.format}, {size}, scale by {kind}, device='{self.device}')"

    #: Torch's functions that multiply, and tmm's in their place; :mod:`tmm_core.api` sets them.
    products: ClassVar[dict[Any, Callable[..., Tensor]]] = {}

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in cls.products:
            return cls.products[function](*args, **kwargs)
        with compat.without_torch_function():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own, *rest = args
        if operator in _EACH:
            return own._each(lambda t: operator(_expanded(t, own), *rest, **kwargs))
        if operator is _aten._to_copy.default:
            dtype = kwargs.pop("dtype", None)
            return own._each(lambda t: operator(t, *rest, **kwargs), dtype)
        if operator is _aten.copy_.default and isinstance(rest[0], Quantized):
            if own.format != rest[0].format or (own.zero is None) != (rest[0].zero is None):
                raise RuntimeError(f"cannot copy {rest[0]!r} to {own!r}")
            for name in own.__tensor_flatten__()[0]:
                getattr(own, name).copy_(getattr(rest[0], name))
            return own
        raise NotImplementedError(
            f"{operator} of a quantised tensor: apply it to the values, .dequantize()"
        )


def _expanded(t: Tensor, of: Quantized) -> Tensor:
    """A part with as many dimensions as the stored numbers; one number may have fewer."""
    return t.reshape([1] * of.dim()) if t.dim() < of.dim() else t


def unpacked(call: Any, grouped: bool = False) -> Any:
    """The call with the parts of quantised operands as arguments of their own.

    Args:
        grouped: Scales have no dimension along K, as those of grouped products.

    Raises:
        TypeError: A scale is given besides that of a quantised operand.
    """
    names = {}
    for operand, along_k in (("a", -1), ("b", -2)):
        t = getattr(call, operand)
        if not isinstance(t, Quantized):
            continue
        parts = {"scale": t.scale, "zero": t.zero}
        for part, value in parts.items():
            role = PART[operand, part]
            if getattr(call, role.name) is not None:
                raise TypeError(f"{role.name} is given besides that of a quantised {operand}")
            if grouped and value is not None and value.numel() != 1:
                value = value.squeeze(along_k)
            call = call._replace(**{role.name: value})
        call = call._replace(**{operand: t.stored})
        names[operand] = t.format
    return call._replace(formats=f"{names.get('a', '')},{names.get('b', '')}") if names else call
