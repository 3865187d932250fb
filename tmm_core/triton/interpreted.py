"""Launches in Triton's interpreter, with correct products of bf16 and 8-bit blocks.

The interpreter stores a bf16 block as 16-bit integers and multiplies these: `tl.dot` of two bf16
blocks is silently off by a factor of 1e6 there. Of 8-bit floats, it multiplies NaN and Inf as the
numbers next to the largest. Its loads, stores and casts of bf16 are right.
"""

from __future__ import annotations

import functools
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

    _mend_dots()
    integers = {"i32": (tl.int32, np.int32), "i64": (tl.int64, np.int64)}
    declared = [integers.get(types[name]) for name in names]

    def typed(value: Any, kind: Any) -> Any:
        if kind is None or not isinstance(value, int):
            return value
        return tl.tensor(_handle(np.array([value], kind[1]), kind[0]), kind[0])

    def call(gx: int, gy: int, gz: int, *args: Any) -> None:
        # A GPU overflows silently; numpy would warn, an error where warnings are errors.
        with np.errstate(all="ignore"):
            values = map(typed, args, declared)
            fn[gx, gy, gz](**dict(zip(names, values, strict=True)), **constants)

    return call


def _handle(data: Any, kind: tl.dtype) -> Any:
    from triton.runtime import interpreter

    return interpreter.TensorHandle(data, kind)


@functools.cache
def _mend_dots() -> None:
    """Make the interpreter's ``tl.dot`` multiply bf16 and 8-bit blocks as numbers; does nothing if
    this Triton's interpreter is built differently."""
    from triton.runtime import interpreter

    builder: Any = getattr(interpreter, "interpreter_builder", None)
    multiply: Any = getattr(builder, "create_dot", None)
    if multiply is None or not hasattr(interpreter, "TensorHandle"):
        return

    def wide(block: Any) -> Any:
        stored = _AS_INTEGERS.get(getattr(block, "dtype", None))
        data: Any = getattr(block, "data", None)
        if stored is None or data.dtype.kind != "u" or data.dtype.itemsize != stored.itemsize:
            return block
        numbers = torch.tensor(data, device="cpu").view(stored).float().numpy()
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        return multiply(wide(a), wide(b), *rest, **more)

    builder.create_dot = create_dot
