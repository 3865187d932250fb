"""``Quantized``: a tensor of stored numbers with their scales, which products take."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from tmm_core import compat, formats
from tmm_core.formats import grids
from tmm_core.formats.grids import EXPONENT, ROW, TENSOR, Block
from tmm_core.spec.arguments import PART

Tensor = torch.Tensor

#: The format, the dtype of values, the values that share a scale, and the dimension of K.
_How = tuple[str, torch.dtype, Block, int]

_aten = torch.ops.aten
#: Operators that apply to each part by itself.
_EACH = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.t.default,
    _aten.transpose.int, _aten.permute.default, _aten._pin_memory.default,
}  # fmt: skip
#: The operators among them that move dimensions.
_MOVES = {_aten.t.default, _aten.transpose.int, _aten.permute.default}
#: Torch's properties that transpose stacks of matrices, and those that transpose a matrix. A
#: compiled graph would read the property again at run time, and compile that read, endlessly.
_TURNS_STACKS: tuple[Any, ...] = (Tensor.mT.__get__, Tensor.mH.__get__)  # type: ignore[attr-defined]
_TURNS: tuple[Any, ...] = (*_TURNS_STACKS, Tensor.T.__get__, Tensor.H.__get__)  # type: ignore[attr-defined]
#: The assignment of ``data``.
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
#: Operators that may also change the dtype of the values.
_CASTS = {_aten._to_copy.default, _aten.empty_like.default}
#: The operator by which exported programs check a tensor that they cast. It reads no values.
_CHECKS = _aten._assert_tensor_metadata.default


class Quantized(torch.Tensor):
    """Stored numbers, and how to read them: ``value = (stored − zero) · scale``.

    >>> w = Quantized(codes, scale)                          # doctest: +SKIP
    >>> w = Quantized(bytes, scale, format="int4", group=128)  # doctest: +SKIP
    >>> y = tmm_core.linear(x, w)                            # doctest: +SKIP

    It stands for its values wherever :func:`tmm_core.matmul`, ``linear`` and the grouped calls take
    an operand, and in ``F.linear`` and ``@``. For other operators call :meth:`dequantize`. It has
    the shape and dtype of the values. It can be a parameter, moved, copied, saved and compiled.
    Products have no gradient for it. While gradients are recorded, a product is refused if the
    tensor or its scale requires one.

    Args:
        data: The stored numbers, ``[..., outer, K]``. A format with two numbers in a byte has
            ``[..., outer, K/2]``, with the first of two along K in the low bits.
        scale: One number; ``[..., outer]`` or ``[..., outer, 1]``; or one for each group,
            ``[..., outer, K/group]``, or block. It has any strides, and a dtype that the format
            accepts; exponents (E8M0) are uint8 or float8_e8m0fnu.
        zero: Zero points of the scale's shape, if the format has them.
        format: ``"int8"``, ``"int4"``, ``"fp8"``, ``"mxfp4"``, or another one that is installed.
        group: The number of values along K that share a scale; by default it follows from the
            scale's shape.
        block: The rows, and the values along K, that share a scale.

    Raises:
        ValueError: No such format; or a dtype, shape, group or block that it does not have.
        TypeError: A part is not a tensor, or a group or block is not of integers.
        RuntimeError: The parts are on several devices, or one is sparse or nested.
    """

    stored: Tensor
    scale: Tensor
    zero: Tensor | None
    format: str
    block: Block
    #: The dimension of K, -1 or -2.
    along: int

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
        named = grids.block_of_call(group, block)
        _check_parts(data, scale, zero)
        if data.dtype not in form.storage:
            raise ValueError(f"format {format} stores {form}, got {data.dtype}")
        if zero is not None and not form.zeros:
            raise ValueError(f"format {format} has no zero points")
        if scale.dtype in grids.EXPONENTS:
            scale = scale.view(EXPONENT)
        scale, own = _gridded(form, data, scale, named)
        if zero is not None:
            fits = zero.shape == scale.shape or zero.numel() == scale.numel() == 1
            if not fits and (own != ROW or zero.shape != scale.shape[:-1]):
                raise ValueError(
                    f"zero must have the shape of scale, {tuple(scale.shape)}, "
                    f"got {tuple(zero.shape)}"
                )
            zero = zero.reshape(scale.shape)
        for name, t, allowed in (
            ("scale", scale, form.scale_dtypes), ("zero", zero, formats.zero_dtypes(form)),
        ):  # fmt: skip
            if t is not None and t.dtype not in allowed:
                names = " or ".join(map(str, allowed))
                raise ValueError(
                    f"{name} of format {format} must have dtype {names}, got {t.dtype}"
                )
        dtype = scale.dtype if scale.dtype in (torch.float16, torch.bfloat16) else form.result
        return cls._from_parts(data, scale, zero, (format, dtype, own, -1))

    @classmethod
    def _from_parts(
        cls, stored: Tensor, scale: Tensor, zero: Tensor | None, how: _How
    ) -> Quantized:
        name, dtype, block, along = how
        shape, strides = list(stored.shape), list(stored.stride())
        if (pack := formats.named(name).pack) != 1:
            strides = [step * pack for step in strides]
            shape[along], strides[along] = shape[along] * pack, stored.stride(along)
        # If only the wrapper were made in inference mode, torch could make no view of it.
        with torch.inference_mode(stored.is_inference()):
            wrapper: Quantized = compat.wrapper_subclass(
                cls, shape, strides=strides, dtype=dtype, device=stored.device,
                requires_grad=scale.requires_grad or (zero is not None and zero.requires_grad),
            )  # fmt: skip
        wrapper.stored, wrapper.scale, wrapper.zero = stored, scale, zero
        wrapper.format, wrapper.block, wrapper.along = name, block, along
        return wrapper

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def dequantize(self) -> Tensor:
        """The values, in this tensor's dtype, computed in fp32."""
        form = formats.named(self.format)
        parts = self.stored, self.scale, self.zero
        return form.values(*parts, torch.float32, self.block, self.along).to(self.dtype)

    @property
    def is_directed(self) -> bool:
        """Whether scales or packing differ between rows and K, so that kernels need to know K."""
        return self.block != TENSOR or formats.named(self.format).pack != 1

    @property
    def _how(self) -> _How:
        return self.format, self.dtype, self.block, self.along

    @staticmethod
    def from_gptq(
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        group: int = 128,
        g_idx: Tensor | None = None,
        *,
        version: int | None = None,
    ) -> Quantized:
        """A weight of a GPTQ checkpoint; see :mod:`tmm_core.integrations.checkpoints.gptq`."""
        return _read("gptq", qweight, qzeros, scales, group, g_idx, version=version)

    @staticmethod
    def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int = 128) -> Quantized:
        """A weight of an AWQ checkpoint; see :mod:`tmm_core.integrations.checkpoints.awq`."""
        return _read("awq", qweight, qzeros, scales, group)

    @staticmethod
    def from_compressed(
        weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None = None
    ) -> Quantized:
        """A weight of a compressed-tensors checkpoint, pack-quantized in 4 bits; see
        :mod:`tmm_core.integrations.checkpoints.compressed`."""
        return _read("compressed", weight_packed, weight_scale, weight_zero_point)

    @staticmethod
    def from_hqq(w_q: Tensor, meta: Mapping[str, Any]) -> Quantized:
        """A weight of an HQQ layer; see :mod:`tmm_core.integrations.checkpoints.hqq`."""
        return _read("hqq", w_q, meta)

    @staticmethod
    def from_fp8(
        weight: Tensor, weight_scale_inv: Tensor, block: Block | None = (128, 128)
    ) -> Quantized:
        """A weight of a block-scaled checkpoint (DeepSeek-V3, Transformers' ``FP8Linear``); see
        :mod:`tmm_core.integrations.checkpoints.block_scaled`."""
        return _read("block_scaled", weight, weight_scale_inv, block)

    @staticmethod
    def from_mxfp4(blocks: Tensor, scales: Tensor) -> Quantized:
        """Weights of gpt-oss's experts; see :mod:`tmm_core.integrations.checkpoints.gpt_oss`."""
        return _read("gpt_oss", blocks, scales)

    def _each(
        self,
        function: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
        along: int | None = None,
    ) -> Quantized:
        zero = None if self.zero is None else function(self.zero)
        parts = function(self.stored), function(self.scale), zero
        how = self.format, dtype or self.dtype, self.block, along or self.along
        return type(self)._from_parts(*parts, how)

    def _set_data(self, other: Tensor) -> None:
        """Take the parts of ``other``: torch would take its shape and dtype alone."""
        if not isinstance(other, Quantized):
            raise RuntimeError(
                "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have "
                "incompatible tensor type."  # torch's words
            )
        with compat.without_torch_function():
            _SET_DATA(self, other)
        self.stored, self.scale, self.zero = other.stored, other.scale, other.zero
        self.format, self.block, self.along = other.format, other.block, other.along

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["stored", "scale"] + ([] if self.zero is None else ["zero"])
        return names, self._how

    def _stable_hash_for_caching(self) -> str:
        """The text under which torch's cache of compiled graphs finds graphs of such a tensor.
        Without it torch warns, and a program whose warnings are errors compiles in each process."""
        names, how = self.__tensor_flatten__()
        forms = [_form_for_caching(getattr(self, name)) for name in names]
        return hashlib.sha256(repr((how, self.requires_grad, forms)).encode()).hexdigest()

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], how: Any, size: Any, stride: Any
    ) -> Quantized:
        return cls._from_parts(parts["stored"], parts["scale"], parts.get("zero"), how)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind, size = grids.text_of(self.block), tuple(self.shape)
        return f"Quantized({self.format}, {size}, scale by {kind}, device='{self.device}')"

    def _along_after(self, operator: Any, rest: Sequence[Any]) -> int:
        """The dimension of K after ``operator``, one of :data:`_EACH`."""
        if self.dim() < 2 or operator not in _MOVES:
            return self.along
        order = list(range(self.dim()))
        if operator is _aten.permute.default:
            order = [dim % self.dim() for dim in rest[0]]
        else:
            one, other = rest or (-1, -2)
            order[one], order[other] = order[other], order[one]
        last = [dim - self.dim() for dim in order[-2:]]
        if set(last) != {-1, -2}:
            raise NotImplementedError(
                f"a quantised tensor has rows and K as its last two dimensions: apply "
                f"{operator.overloadpacket.__name__} to the values, .dequantize()"
            )
        return self.along if last == [-2, -1] else -3 - self.along

    #: Torch's functions that multiply, and tmm's in their place; :mod:`tmm_core.api` sets them.
    products: ClassVar[dict[Any, Callable[..., Any]]] = {}
    #: Imports the module that reads a layout of checkpoints; :mod:`tmm_core.api` sets it.
    layouts: ClassVar[Callable[[str], Any]]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in cls.products:
            return cls.products[function](*args, **kwargs)
        if function in _TURNS:
            dims = args[0].dim()
            if dims == 2 or (dims > 2 and function in _TURNS_STACKS):
                return args[0].transpose(-2, -1)
        if function == _SET_DATA:
            return args[0]._set_data(args[1])
        if function is Tensor.share_memory_:
            # Torch would read the address of the values, which have none.
            own = args[0]
            for name in own.__tensor_flatten__()[0]:
                getattr(own, name).share_memory_()
            return own
        if function in (Tensor.__dlpack__, Tensor.storage):
            raise RuntimeError(
                "a quantised tensor has no memory of values: .dequantize(), or store its parts "
                "(.stored, .scale and .zero)"
            )
        # The modes of torch.export do not pass on operators of tensors that are not traced.
        constant = args and _is_constant(args[0])
        with compat.without_torch_function(), compat.without_modes() if constant else nullcontext():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own, *rest = args
        if operator is _aten.new_empty.default and list(rest[0]) == list(own.shape):
            operator, rest = _aten.empty_like.default, []
        if operator in _EACH:
            along = own._along_after(operator, rest)
            with compat.viewing(own.stored):
                return own._each(
                    lambda t: operator(_expanded(t, own), *rest, **kwargs), along=along
                )
        if operator in _CASTS:
            dtype = kwargs.pop("dtype", None) or own.dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise NotImplementedError(f"a quantised tensor has floating values, not {dtype}")
            return own._each(lambda t: operator(t, *rest, **kwargs), dtype)
        if operator is _aten.copy_.default and all(isinstance(t, Quantized) for t in args[:2]):
            other = rest[0]
            same = own.format, own.block, own.along, own.zero is None
            if same != (other.format, other.block, other.along, other.zero is None):
                raise RuntimeError(f"cannot copy {rest[0]!r} to {own!r}")
            for name in own.__tensor_flatten__()[0]:
                _expanded(getattr(own, name), own).copy_(_expanded(getattr(other, name), other))
            return own
        # torch.distributed.checkpoint stores a tensor that answers this query as a whole. A shard
        # must not be stored as a whole.
        if operator is _aten.is_pinned.default and not isinstance(own.stored, compat.dtensor()):
            return operator(own.stored, *rest, **kwargs)
        if operator is _CHECKS:
            return super().__torch_dispatch__(operator, types, tuple(args), kwargs)
        if operator.namespace == "tmm":
            if not any(isinstance(t, Quantized) for t in args[:2]):
                raise NotImplementedError(
                    "only the operands of a product may be quantised: .dequantize() other arguments"
                )
            raise NotImplementedError(
                "a product of a quantised tensor that torch.func transforms: apply the transform "
                "to one of its values, .dequantize()"
            )
        # In inference mode torch passes operators that it otherwise decomposes first, like ``to``.
        if (y := operator.decompose(*args, **kwargs)) is not NotImplemented:
            return y
        raise NotImplementedError(f"{operator} of a quantised tensor: {_advice(operator, own)}")


def _is_exporting() -> bool:
    """Whether an export runs this code, and does not read it as torch.compile does."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _is_constant(t: Any) -> bool:
    """Whether ``t`` is a constant of a program that is exported, and not one of its parameters."""
    return _is_exporting() and isinstance(t, Quantized) and type(t.stored) is Tensor


def _form_for_caching(t: Any) -> Any:
    """Return all that a compiled graph may depend on: not a part's values and address."""
    if isinstance(t, compat.dtensor()):
        return t._stable_hash_for_caching()
    return t.dtype, t.shape, t.stride(), t.device, t.requires_grad, t.is_inference()


def _advice(operator: Any, first: Any) -> str:
    """Return the advice for an operator that quantised tensors do not have."""
    written = first[0] if isinstance(first, (list, tuple)) and first else first
    if operator._schema.is_mutable and isinstance(written, Quantized):
        text = "its values are not written; quantise others, and copy_ or assign them"
    else:
        text = "apply it to the values, .dequantize()"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        text += (
            "; DDP takes quantised parameters with init_sync=False, and FSDP among its "
            "ignored_states or ignored_params; set_model_state_dict without broadcast_from_rank0"
        )
    return text


def _check_parts(data: Any, scale: Any, zero: Any) -> None:
    """Refuse what cannot be a part of a quantised tensor."""
    given = {"data": data, "scale": scale} | ({} if zero is None else {"zero": zero})
    for name, t in given.items():
        if not isinstance(t, Tensor):
            kind = type(t).__name__
            raise TypeError(f"Quantized(): argument '{name}' must be Tensor, not {kind}")
        if t.layout is not torch.strided or t.is_nested or isinstance(t, Quantized):
            raise RuntimeError(f"{name} must be a dense tensor, got {type(t).__name__} {t.layout}")
        if t.device != data.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{data.device} and {t.device}!"
            )


def _expanded(t: Tensor, of: Quantized) -> Tensor:
    """A part with as many dimensions as the stored numbers; a scalar part may have fewer."""
    return t.reshape([1] * of.dim()) if t.dim() < of.dim() else t


def _gridded(
    form: formats.Format, data: Tensor, scale: Tensor, named: Block | None
) -> tuple[Tensor, Block]:
    """The scale with a dimension for rows and one for K, unless it is one number; and its block.

    Raises:
        ValueError: The format has no scales of this shape.
    """
    if not data.dim():
        raise ValueError("data must have a dimension along K")
    lead, outer, k = data.shape[:-2], 1 if data.dim() == 1 else data.shape[-2], data.shape[-1]
    k, stack = k * form.pack, math.prod(lead)
    if named is not None:
        own = form.block(named, outer, k, stack)
        shape = tuple(grids.sizes(own, outer, k))
    elif scale.numel() == 1:
        own, shape = form.block(TENSOR, outer, k, stack), ()
    elif scale.shape in (data.shape[:-1], (*data.shape[:-1], 1)):
        own, shape = form.block(ROW, outer, k, stack), (outer, 1)
    elif scale.dim() == data.dim():
        shape = tuple(scale.shape[-2:]) if data.dim() > 1 else (1, scale.shape[0])
        own = form.block_of(shape, outer, k, stack)
    else:
        raise ValueError(
            f"scale must be one number, or have shape {tuple(data.shape[:-1])} or "
            f"{(*data.shape[:-1], 1)} or one of a grid, got {tuple(scale.shape)}"
        )
    if own == TENSOR:
        shape, wanted = (), tuple(scale.shape)
    elif data.dim() == 1:
        wanted = shape[1:]
    else:
        wanted = (*lead, *shape)
    if own == ROW and scale.shape == data.shape[:-1]:
        scale = scale[..., None]
    if tuple(scale.shape) != wanted or (own == TENSOR and scale.numel() != 1):
        text = "one number" if own == TENSOR else f"shape {wanted}"
        raise ValueError(
            f"a scale by {grids.text_of(own)} must have {text}, got {tuple(scale.shape)}"
        )
    return scale, own


def _read(layout: str, *tensors: Any, **more: Any) -> Quantized:
    """A weight of a checkpoint of this layout."""
    weight: Quantized = Quantized.layouts(layout).read(*tensors, **more)
    return weight


def unpacked(call: Any, grouped: bool = False) -> Any:
    """The call with quantised operands replaced by their parts, each an argument.

    Args:
        grouped: Scales by row have no dimension along K, as in grouped products.

    Raises:
        TypeError: A scale is given for an operand that is quantised, and has its own.
        ValueError: An operand is packed, or has scales by row, along another dimension than K.
        RuntimeError: A quantised operand requires a gradient.
    """
    names = {}
    for operand, along_k in (("a", -1), ("b", -2)):
        t = getattr(call, operand)
        if not isinstance(t, Quantized):
            continue
        if t.dim() > 1 and t.along != along_k and t.is_directed:
            raise ValueError(f"{operand} is quantised along its other dimension: transpose it")
        if t.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{operand} is quantised, for which a product has no gradient, but requires one: "
                "use requires_grad_(False) or torch.no_grad()"
            )
        if torch.compiler.is_dynamo_compiling():
            # Else the parts of ``w.T`` become inputs of the graph, and their addresses its guards.
            t = t.detach()
        if _is_exporting() and not _is_constant(t):
            # The graph needs nodes of the parts. Torch makes them where parts are read, but not
            # inside of ``__torch_function__``.
            for name in t.__tensor_flatten__()[0]:
                torch.ops.export.access_subclass_inner_tensor.default(t, name)
        parts = {"scale": t.scale, "zero": t.zero}
        for part, value in parts.items():
            role = PART[operand, part]
            if getattr(call, role.name) is not None:
                raise TypeError(f"{role.name} is given, but a quantised {operand} has its own")
            if grouped and value is not None and t.block == ROW:
                value = value.squeeze(along_k)
            call = call._replace(**{role.name: value})
        call = call._replace(**{operand: t.stored})
        names[operand] = formats.spelled(t.format, t.block)
    return call._replace(formats=f"{names.get('a', '')},{names.get('b', '')}") if names else call


# So that torch.load reads what torch.save wrote, without `weights_only=False`.
torch.serialization.add_safe_globals([Quantized])
