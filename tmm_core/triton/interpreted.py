"""Launches in Triton's interpreter, with correct products of bf16 and 8-bit blocks.

The interpreter stores a bf16 block as 16-bit integers and multiplies these. So there ``tl.dot`` of
two bf16 blocks is silently off by a factor of 1e6. It reads the codes of NaN and Inf of 8-bit
floats as the numbers above the largest, and rounds some numbers to 8-bit floats of half their
value. Its loads and stores of bf16 are right, and so are its casts between bf16 and fp32. An
integer cast to bf16 keeps its bits.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton.language as tl

#: Blocks that the interpreter stores as integers, and their torch dtypes.
_AS_INTEGERS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
#: The 8-bit types, whose casts lose NaN and Inf.
_EIGHT_BITS = (tl.float8e4nv, tl.float8e5)

#: Advice for wrong numbers in the interpreter.
REMEDY = (
    "Triton's interpreter keeps bf16 blocks as 16-bit integers, on which only loads, stores, casts "
    "and the tl.dot of a kernel launched by tmm_core.triton.Launch are right: convert with "
    ".to(tl.float32) before any other arithmetic, or try fp16 to see whether that is it"
)


def call_of(
    fn: Any, names: Sequence[str], types: Mapping[str, str], constants: Mapping[str, Any]
) -> Any:
    """A function that launches ``fn`` interpreted, called like a compiled handle, with integers of
    their declared types. The interpreter gives an integer the smallest type that holds it, in which
    its products with indices overflow."""
    import numpy as np
    from triton.runtime import interpreter

    _mend()
    integers = {"i32": (tl.int32, np.int32), "i64": (tl.int64, np.int64)}
    declared = [integers.get(types[name]) for name in names]

    def typed(value: Any, kind: Any) -> Any:
        if kind is None or not isinstance(value, int):
            return value
        return tl.tensor(interpreter.TensorHandle(np.array([value], kind[1]), kind[0]), kind[0])

    def call(gx: int, gy: int, gz: int, *args: Any) -> None:
        # A GPU overflows silently; numpy would warn, an error where warnings are errors.
        with np.errstate(all="ignore"):
            values = map(typed, args, declared)
            fn[gx, gy, gz](**dict(zip(names, values, strict=True)), **constants)

    return call


@functools.cache
def _mend() -> None:
    """Make the interpreter's ``tl.dot`` multiply bf16 and 8-bit blocks as numbers. Make it cast
    8-bit floats, and integers to bf16, by their values. Make it take masks that a Python bool
    turned into integers, which 3.9 refuses. Does nothing if this Triton's interpreter is built
    differently."""
    from triton.runtime import interpreter

    _quicken(interpreter)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    convert: Any = getattr(builder, "create_fp_to_fp", None)
    multiply: Any = getattr(builder, "create_dot", None)
    cast: Any = getattr(builder, "cast_impl", None)
    if multiply is None or cast is None or not hasattr(interpreter, "TensorHandle"):
        return

    def cast_impl(block: Any, kind: Any) -> Any:
        ends = block.dtype.scalar, kind.scalar
        if tl.bfloat16 in ends and ends[0] != ends[1] and tl.float32 not in ends:
            fp32 = kind.with_element_ty(tl.float32) if kind.is_block() else tl.float32
            return cast(cast(block, fp32), kind)
        return cast(block, kind)

    def wide(block: Any) -> Any:
        stored = _AS_INTEGERS.get(getattr(block, "dtype", None))
        data: Any = getattr(block, "data", None)
        if stored is None or data.dtype.kind != "u" or data.dtype.itemsize != stored.itemsize:
            return block
        numbers = torch.tensor(data, device="cpu").view(stored).float().numpy()
        return interpreter.TensorHandle(numbers, tl.float32)

    def fp_to_fp(block: Any, kind: Any, rounding: Any) -> Any:
        if kind.scalar in _EIGHT_BITS:
            return rounded(block, kind)
        numbers = wide(block) if block.dtype.scalar in _EIGHT_BITS else block
        if numbers is block:
            return convert(block, kind, rounding)
        return numbers if kind.scalar == tl.float32 else cast(numbers, kind)

    def rounded(block: Any, kind: Any) -> Any:
        stored = _AS_INTEGERS[kind.scalar]
        largest = torch.finfo(stored).max
        numbers = torch.tensor(wide(block).data, device="cpu").clamp(-largest, largest)
        return interpreter.TensorHandle(numbers.to(stored).view(torch.uint8).numpy(), kind.scalar)

    def create_dot(a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        return multiply(wide(a), wide(b), *rest, **more)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    if convert is not None:
        builder.create_fp_to_fp = fp_to_fp
    load: Any = getattr(builder, "create_masked_load", None)
    store: Any = getattr(builder, "create_masked_store", None)
    if load is None or store is None:
        return

    def boolean(mask: Any) -> Any:
        # A descriptor's load passes an array.
        bits = mask.data if isinstance(mask, interpreter.TensorHandle) else mask
        return mask if bits.dtype.kind == "b" else interpreter.TensorHandle(bits != 0, tl.int1)

    def masked_load(at: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return load(at, boolean(mask), *rest, **more)

    def masked_store(at: Any, block: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return store(at, block, boolean(mask), *rest, **more)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _quicken(interpreter: Any) -> None:
    """Leave out work of the interpreter that changes nothing, since it takes long.

    The interpreter computes whether each integer sum and product overflows 32 bits, and drops the
    answer unless its option ``debug`` is set. At each call of a device function it lists the
    language's builtins.
    """
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and getattr(options, "debug", None) is False:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if not all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr")):
        return

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        members = inspect.getmembers(package)
        return [name for name, member in members if tl.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # else it is patched already
                interpreter._patch_attr(package, name, member, builder, scope)

    # List them before any is patched.
    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(package)
    interpreter._patch_builtin = patch_builtin
