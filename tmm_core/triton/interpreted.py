"""Launches in Triton's interpreter, with the products of bf16 blocks made right.

The interpreter keeps a bf16 block as 16-bit integers and multiplies these: `tl.dot` of two bf16
blocks is off by a factor of 1e6 there, with no error. Its loads, stores and casts are right.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import triton.language as tl

#: For who finds a wrong number in the interpreter.
REMEDY = (
    "Triton's interpreter keeps bf16 blocks as 16-bit integers, on which only loads, stores, casts "
    "and the tl.dot of a kernel launched by tmm_core.triton.Launch are right: convert with "
    ".to(tl.float32) before any other arithmetic, or try fp16 to see whether that is it"
)


def call_of(fn: Any, names: Sequence[str], constants: Mapping[str, Any]) -> Any:
    """What launches ``fn`` interpreted, as a compiled handle is launched."""
    import numpy as np

    _mend_dots()

    def call(gx: int, gy: int, gz: int, *args: Any) -> None:
        # A GPU overflows without a word, and where warnings are errors numpy's would be.
        with np.errstate(all="ignore"):
            fn[gx, gy, gz](**dict(zip(names, args, strict=True)), **constants)

    return call


@functools.cache
def _mend_dots() -> None:
    """Let the interpreter's ``tl.dot`` multiply bf16 blocks as the numbers they are; nothing
    where this Triton's interpreter is made otherwise."""
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
