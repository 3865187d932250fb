"""Launches in Triton's interpreter, with correct products of bf16 blocks.

The interpreter stores a bf16 block as 16-bit integers and multiplies these: `tl.dot` of two bf16
blocks is silently off by a factor of 1e6 there. Its loads, stores and casts are right.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import triton.language as tl

#: Advice for wrong numbers in the interpreter.
REMEDY = (
    "Triton's interpreter keeps bf16 blocks as 16-bit integers, on which only loads, stores, casts "
    "and the tl.dot of a kernel launched by tmm_core.triton.Launch are right: convert with "
    ".to(tl.float32) before any other arithmetic, or try fp16 to see whether that is it"
)


def call_of(fn: Any, names: Sequence[str], constants: Mapping[str, Any]) -> Any:
    """A function that launches ``fn`` interpreted, called like a compiled handle."""
    import numpy as np

    _mend_dots()

    def call(gx: int, gy: int, gz: int, *args: Any) -> None:
        # A GPU overflows silently; numpy would warn, an error where warnings are errors.
        with np.errstate(all="ignore"):
            fn[gx, gy, gz](**dict(zip(names, args, strict=True)), **constants)

    return call


@functools.cache
def _mend_dots() -> None:
    """Make the interpreter's ``tl.dot`` multiply bf16 blocks as numbers; does nothing if this
    Triton's interpreter is built differently."""
    import numpy as np
    from triton.runtime import interpreter

    builder: Any = getattr(interpreter, "interpreter_builder", None)
    multiply: Any = getattr(builder, "create_dot", None)
    if multiply is None or not hasattr(interpreter, "TensorHandle"):
        return

    def wide(block: Any) -> Any:
        data: Any = getattr(block, "data", None)
        if getattr(block, "dtype", None) != tl.bfloat16 or data.dtype != np.uint16:
            return block
        # bf16 is the upper half of fp32.
        numbers = (data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        return multiply(wide(a), wide(b), *rest, **more)

    builder.create_dot = create_dot
