"""Rejects bad input before any work, with torch's own messages where it has them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from tmm_core import compat, formats
from tmm_core.errors import reraise, warn
from tmm_core.formats import Format, Pair, grids
from tmm_core.launch.output_memory import check_outputs
from tmm_core.spec.arguments import (
    MOST_ALPHA,
    PART,
    PARTS,
    TENSORS,
    Arguments,
    GroupedArguments,
)
from tmm_core.spec.epilogue import Epilogue

#: Torch's code for a tensor that overlaps itself. Another code means "unknown".
_OVERLAPS = 1

#: Tensor types without overridden behaviour.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

#: Names of arguments that cannot be left out.
_OPERANDS = ("a", "b", "x", "weight")

#: The dtypes whose products take an ``alpha`` beyond the range of fp32.
_WIDE = (torch.float64, torch.complex128)
_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(call: Arguments, epilogue: Epilogue) -> torch.Size:
    """Check the arguments of one call against each other; returns the output's shape.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not match, as in ``torch.matmul``. A scale has a
            dtype that the operand's format does not allow, or its operand has no format.
        ValueError: A bias, residual, scale or gated width does not match.
        TypeError: An ``out_dtype`` that is not a floating dtype.
    """
    a, b, bias, residual = call[:4]
    # Dynamo of torch 2.10 traces no property of a NamedTuple.
    addressable(*(getattr(call, name) for name in TENSORS))
    pair = formats.pair(a.dtype, b.dtype, call.formats)
    shape = product_shape(a, b, pair.packs)
    if pair.result is None:
        if not call.formats:
            _raise_torchs_error(a, b)
        refuse_dtypes(call)
    if a.dtype is torch.bool:
        _raise_torchs_error(a, b)
    result = check_terms(call, pair, epilogue, bias=bias, residual=residual)
    width = b.shape[-1] if b.dim() > 1 else 1
    if epilogue.gated:
        shape = torch.Size([*shape[:-1], shape[-1] // 2])
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias must have shape ({width},), got {tuple(bias.shape)}")
    if residual is not None:
        check_residual(residual, shape)
    check_parts(call, pair, a=[(*a.shape[:-1], 1)], b=[(*b.shape[:-2], 1, width)])
    if pair.blocks[0] is not None and pair.blocks[0][0] > 1 and a.dim() > 2 >= b.dim():
        raise ValueError("an a of more than two dimensions has scales by row, not by several rows")
    if epilogue.outputs:
        check_outputs(call, epilogue, result)
    return shape


def refuse_dtypes(call: Arguments | GroupedArguments) -> NoReturn:
    """Raise the error of operands whose dtypes are not multiplied."""
    plain = ", ".join(map(str, formats.FLOATS))
    wanted = f"a dtype of {plain} with a quantised operand" if call.formats else "one dtype"
    raise RuntimeError(f"expected a and b to have {wanted}, got {call.a.dtype} and {call.b.dtype}")


def check_terms(
    call: Arguments | GroupedArguments, pair: Pair, epilogue: Epilogue, **terms: torch.Tensor | None
) -> torch.dtype:
    """Check a product, plain or grouped, against its epilogue. Check the dtypes of the result and
    of ``terms``, which are added to it or multiplied with it. Returns the result's dtype. Raises as
    :func:`check`."""
    b, out_dtype, own = call.b, call.out_dtype, pair.result
    assert own is not None
    if not epilogue.is_identity and not own.is_floating_point:
        raise RuntimeError(f"epilogue {epilogue.name!r} needs a floating dtype, got {call.a.dtype}")
    if epilogue.gated and (b.dim() == 1 or b.shape[-1] % 2):
        raise ValueError(
            f"gated epilogue {epilogue.name!r} needs b of width 2N (gate and up halves), "
            f"got b of shape {tuple(b.shape)}"
        )
    alpha = call.alpha  # in a graph it may be a symbol
    if type(alpha) is float and MOST_ALPHA < abs(alpha) < math.inf and own not in _WIDE:
        refuse_alpha()
    check_out_dtype(out_dtype)
    result = out_dtype or own
    if result not in _OUT_DTYPES and (pair.stored or result != own):
        raise TypeError(f"out_dtype must be a floating dtype of 16 bits or more, got {out_dtype}")
    if own.is_complex and not result.is_complex:
        raise TypeError(f"out_dtype must be {own}, as the operands, got {out_dtype}")
    allowed = {own if not pair.a or not pair.b else result, result, torch.float32}
    for name, term in terms.items():
        if term is not None and term.dtype not in allowed:
            wanted = " or ".join(sorted(map(str, allowed)))
            raise RuntimeError(f"{name} must have dtype {wanted}, got {term.dtype}")
    return result


def check_residual(residual: torch.Tensor, shape: torch.Size) -> None:
    """Check the shape of a residual against the output's.

    Raises:
        ValueError: The residual does not broadcast.
    """
    if not broadcasts(residual.shape, shape):
        raise ValueError(
            f"residual of shape {tuple(residual.shape)} does not broadcast to the output's "
            f"shape {tuple(shape)}"
        )


def strided(t: torch.Tensor) -> bool:
    """Whether ``t`` has strides and an address: not sparse, nested or in mkldnn's layout."""
    return t.layout is torch.strided and not t.is_nested


def check_tensors(function: str, **tensors: Any) -> None:
    """Check the types of arguments of the API.

    Raises:
        TypeError: An argument is neither a tensor nor None, or an operand is None.
    """
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) and (value is not None or name in _OPERANDS):
            kind = type(value).__name__
            raise TypeError(f"{function}(): argument '{name}' must be Tensor, not {kind}")


def check_out_dtype(out_dtype: object) -> None:
    """Refuse an ``out_dtype`` that is no dtype. Torch's operators would show their schema."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {out_dtype!r}")


def number(function: str, alpha: Any, operand: Any = None) -> Any:
    """Convert ``alpha`` to a number as torch converts a ``Scalar``. It may be a number of Python or
    numpy, or a tensor of no dimension without a gradient, whose value is read.

    Args:
        function: The function's name, for messages.
        operand: A complex operand allows a complex ``alpha``.

    Raises:
        TypeError: ``alpha`` is none of these.
        OverflowError: ``alpha`` is an integer of more than 64 bits.
        RuntimeError: ``alpha`` is complex, and the operand is not.
    """
    if isinstance(alpha, torch.Tensor) and not alpha.dim() and not alpha.requires_grad:
        alpha = alpha.item()
    elif torch.compiler.is_dynamo_compiling() and _is_numpy_number(alpha):
        # In a graph, numpy's numbers are tensors; tmm's matmul takes these too.
        alpha = torch.as_tensor(alpha, device="cpu")
        return alpha if function == "matmul" else alpha.item()
    elif not isinstance(alpha, (float, int, complex, torch.SymFloat, torch.SymInt)):
        numpy = sys.modules.get("numpy")
        numbers = () if numpy is None else (numpy.number, numpy.bool_)
        if not isinstance(alpha, numbers) or alpha.dtype.kind == "m":  # timedelta64
            kind = type(alpha).__name__
            raise TypeError(f"{function}(): argument 'alpha' must be Number, not {kind}")
        alpha = float(alpha) if alpha.dtype.kind == "f" else alpha.item()
    elif isinstance(alpha, float):
        alpha = float(alpha)  # numpy's float64 is a float, but its comparisons give numpy's bool
    if isinstance(alpha, complex):
        if not alpha.imag:
            return alpha.real
        if not (isinstance(operand, torch.Tensor) and operand.is_complex()):
            refuse_alpha()
    elif isinstance(alpha, int) and type(alpha) is not bool and not -(2**63) <= alpha < 2**64:
        raise OverflowError("int too big to convert")
    return alpha


def refuse_alpha() -> NoReturn:
    """Raise torch's error for an ``alpha`` that is complex or too large for the product's dtype."""
    raise RuntimeError("value cannot be converted to type float without overflow")


def _is_numpy_number(alpha: Any) -> bool:
    """Whether a graph's ``alpha`` is a number of numpy. Dynamo reads no attribute of a symbol."""
    return type(alpha) not in (int, bool, float) and getattr(alpha, "ndim", None) == 0


def addressable(*tensors: torch.Tensor | None) -> None:
    """Refuse tensors without an address that kernels can use, and tensors on several devices.

    Raises:
        RuntimeError: A tensor is sparse, nested or in mkldnn's layout; or the tensors are on
            several devices (torch's message).
    """
    for t in tensors:
        if t is not None and not strided(t):
            layout = "torch.strided, nested" if t.is_nested else t.layout
            raise RuntimeError(f"kernels take dense tensors, got one of layout {layout}")
    _on_one_device(*(t for t in tensors if t is not None))


def _on_one_device(*tensors: torch.Tensor) -> None:
    one, *others = dict.fromkeys(t.device for t in tensors)
    if others:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{one} and {others[0]}!"
        )


def result_dtype(call: Arguments | GroupedArguments) -> torch.dtype:
    """The dtype of the result of a checked call: ``out_dtype``, else the operands' default."""
    own = call.out_dtype or formats.pair(call.a.dtype, call.b.dtype, call.formats).result
    assert own is not None
    return own


def is_integral(call: Arguments) -> bool:
    """Whether the product of a call is of integers."""
    dtype = call.out_dtype or call.a.dtype
    return not (call.formats or dtype.is_floating_point or dtype.is_complex)


def has_format(call: Arguments | GroupedArguments) -> bool:
    """Whether an operand of a call has a format: the product then has no derivative."""
    return bool(call.formats) or call.a.dtype in formats.IMPLIED


def check_parts(
    call: Arguments | GroupedArguments, pair: Pair, **shapes: Sequence[tuple[int, ...]]
) -> None:
    """Check the scales and zero points of stored operands.

    Args:
        shapes: The shapes that the parts of ``a`` and of ``b`` may have, besides one element and
            grids.

    Raises:
        RuntimeError: A part has a dtype that its operand's format does not allow. The operand has
            no format, or its format no zero points. Or an operand with a named format has no scale.
        ValueError: A part has another shape, or blocks that the format does not allow.
    """
    for operand, form in ((call.a, pair.a), (call.b, pair.b)):
        if form is not None and operand.dtype not in form.storage:
            raise RuntimeError(f"format {form.name} stores {form}, got {operand.dtype}")
    for role in PARTS:
        t, operand = getattr(call, role.name), getattr(call, role.of)
        form, block = (pair.a, pair.blocks[0]) if role.of == "a" else (pair.b, pair.blocks[1])
        if t is None:
            if role.part == "scale" and form is not None and not form.implied:
                raise RuntimeError(f"{role.of} of format {form.name} needs a scale")
            continue
        if form is None:
            implied = " or ".join(map(str, dict.fromkeys(formats.IMPLIED.values()))) or "no"
            raise RuntimeError(f"{role.name} is for {implied} operands, got {operand.dtype}")
        if role.part == "zero" and not form.zeros:
            raise RuntimeError(f"{role.name}: format {form.name} has no zero points")
        allowed = form.scale_dtypes if role.part == "scale" else formats.zero_dtypes(form)
        if t.dtype not in allowed:
            names = " or ".join(map(str, allowed))
            raise RuntimeError(f"{role.name} must have dtype {names}, got {t.dtype}")
        if block is not None:
            wanted = _grid_shape(role.of, operand, form, block)
            if tuple(t.shape) != wanted:
                size = grids.text_of(block)
                raise ValueError(
                    f"{role.name} by {size} must have shape {wanted}, got {tuple(t.shape)}"
                )
        elif t.numel() != 1 and tuple(t.shape) not in shapes[role.of]:
            either = " or ".join(map(str, shapes[role.of]))
            raise ValueError(
                f"{role.name} must be one number or have shape {either}, got {tuple(t.shape)}"
            )
        elif role.part == "scale":
            outer, k, stack = _extents(role.of, operand, form)
            form.block(grids.TENSOR if t.numel() == 1 else grids.ROW, outer, k, stack)
        scale = getattr(call, PART[role.of, "scale"].name)
        if role.part == "zero" and (scale is None or scale.shape != t.shape):
            raise ValueError(f"{role.name} must have the shape of its operand's scale")


def _extents(name: str, operand: torch.Tensor, form: Format) -> tuple[int, int, int]:
    """Return the rows of ``a`` or columns of ``b``, K in values, and the number of matrices."""
    shape = operand.shape
    if operand.dim() == 1:
        return 1, shape[0] * form.pack, 1
    outer, k = (shape[-2], shape[-1]) if name == "a" else (shape[-1], shape[-2])
    return outer, k * form.pack, math.prod(shape[:-2])


def _grid_shape(
    name: str, operand: torch.Tensor, form: Format, block: grids.Block
) -> tuple[int, ...]:
    """Return the shape of an operand's scales, one for each block of its values.

    Raises:
        ValueError: The format has no such scales, or K is no multiple of the block's.
    """
    outer, k, stack = _extents(name, operand, form)
    form.block(block, outer, k, stack)
    rows, columns = grids.sizes(block, outer, k)
    if operand.dim() == 1:
        return (columns,)
    lead = tuple(operand.shape[:-2])
    return (*lead, rows, columns) if name == "a" else (*lead, columns, rows)


def product_shape(a: torch.Tensor, b: torch.Tensor, packs: tuple[int, int] = (1, 1)) -> torch.Size:
    """Return the shape of ``torch.matmul(a, b)``, or raise torch's own error.

    Args:
        packs: The number of values in an element of each operand, along K.

    Raises:
        RuntimeError: The shapes cannot be multiplied.
    """
    if packs != (1, 1):
        a, b = _values_like(a, packs[0], -1), _values_like(b, packs[1], max(-2, -b.dim()))
    if a.dim() == 0 or b.dim() == 0:
        raise RuntimeError(
            "both arguments to matmul need to be at least 1D, but they are "
            f"{a.dim()}D and {b.dim()}D"
        )
    k = b.shape[-2] if b.dim() > 1 else b.shape[0]
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    if a.shape[-1] != k or batch is None:
        _raise_torchs_error(a, b)
        raise RuntimeError(f"cannot multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")
    rows = [a.shape[-2]] if a.dim() > 1 else []
    cols = [b.shape[-1]] if b.dim() > 1 else []
    return torch.Size([*batch, *rows, *cols])


def _values_like(t: torch.Tensor, pack: int, along: int) -> torch.Tensor:
    """Return a tensor without memory that has the shape of the values that ``t`` packs."""
    shape = list(t.shape)
    if shape:
        shape[along] *= pack
    return torch.empty((), dtype=torch.float32, device="cpu").expand(shape)


def _raise_torchs_error(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise torch's own error for operands that cannot be multiplied. Only CUDA tensors are passed
    to torch, whose error names their device. Others are replaced by empty tensors of their shapes,
    strides and dtypes. Nothing is computed or read before torch raises."""
    if all(t.is_cuda and type(t) in PLAIN for t in (a, b)):
        with torch.no_grad():
            torch.matmul(a, b)
        return
    fixed = all(type(n) is int for t in (a, b) for n in (*t.shape, *t.stride()))
    # A mode, such as the one of fake tensors, would handle the call instead.
    with compat.without_modes() if fixed else nullcontext():
        torch.matmul(
            *(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu") for t in (a, b))
        )


def check_out(
    out: torch.Tensor, shape: torch.Size, dtype: torch.dtype, inputs: Sequence[torch.Tensor]
) -> bool:
    """Check ``out=`` against the result, and resize it as torch does.

    Returns:
        Whether the result can be written to ``out`` while inputs are read. It cannot if their
        memory ranges overlap. Torch does not check tensors with gaps for that.

    Raises:
        RuntimeError: A wrong dtype, device or layout, or ``out`` overlaps an input or itself.
    """
    if out.dtype != dtype:
        one = torch.empty(1, 1, dtype=dtype, device="cpu")
        other = torch.empty(1, 1, dtype=out.dtype, device="cpu")
        torch.mm(one, one, out=other)  # raises, in torch's words
        raise RuntimeError(f"Expected out tensor to have dtype {dtype}, but got {out.dtype}")
    addressable(inputs[0], out)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (out, *inputs)):
        refuse_gradients_of_out()
    near = [t for t in inputs if ranges_meet(out, t)]
    if any(t is out or (dense(out) and dense(t)) for t in near):
        refuse_overlap()
    if out.shape != shape:
        if out.numel():
            warn(
                "An output with one or more elements was resized since it had shape "
                f"{list(out.shape)}, which does not match the required output shape {list(shape)}.",
                UserWarning,
            )
        out.resize_(shape)
    if compat.internal_overlap(out) == _OVERLAPS:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location. Please clone() the tensor before performing the operation."
        )
    return not near


def announce_write(out: torch.Tensor) -> None:
    """Tell autograd that ``out`` is about to be written, as torch's operators do: a backward that
    needs its present values then raises.

    Raises:
        RuntimeError: ``out`` was made in inference mode, which is off (torch's message).
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        out.as_strided((0,), (1,)).zero_()  # raises, in torch's words
    torch.autograd.graph.increment_version(out)


def refuse_overlap() -> NoReturn:
    """Raise torch's error for an ``out`` in the memory of an input."""
    raise RuntimeError(
        "unsupported operation: some elements of the input tensor and the written-to "
        "tensor refer to a single memory location. Please clone() the tensor before "
        "performing the operation."
    )


def refuse_gradients_of_out() -> NoReturn:
    """Raise torch's error for ``out=`` with a gradient."""
    raise RuntimeError(
        "matmul(): functions with out=... arguments don't support automatic "
        "differentiation, but one of the arguments requires grad."
    )


def ranges_meet(out: torch.Tensor, t: torch.Tensor) -> bool:
    """Whether the memory ranges from first to last element overlap."""
    if not out.numel() or not t.numel():
        return False
    if out.is_meta or type(out) not in PLAIN or type(t) not in PLAIN:
        return False  # there is no address to compare
    start, t_start = out.data_ptr(), t.data_ptr()
    return start < t_start + _span(t) and t_start < start + _span(out)


def dense(t: torch.Tensor) -> bool:
    """Whether a tensor has no gaps between its elements."""
    return _span(t) == t.nbytes


def _span(t: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (reach + 1) * t.element_size()


def _broadcast(x: Sequence[int], y: Sequence[int]) -> tuple[int, ...] | None:
    """Return the broadcast shape, or None (``torch.broadcast_shapes`` takes 8 µs)."""
    if not all(type(n) is int for n in (*x, *y)):
        # Unbacked sizes of a graph cannot be compared here.
        try:
            return tuple(torch.broadcast_shapes(x, y))
        except RuntimeError as error:
            reraise(error)
            return None
    if x == y:
        return tuple(x)
    longer, shorter = (x, y) if len(x) >= len(y) else (y, x)
    padded = (1,) * (len(longer) - len(shorter)) + tuple(shorter)
    pairs = list(zip(longer, padded, strict=True))
    if any(p != q and p != 1 and q != 1 for p, q in pairs):
        return None
    return tuple(q if p == 1 else p for p, q in pairs)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` can be added to one of shape ``to`` in place."""
    return _broadcast(shape, to) == tuple(to)
