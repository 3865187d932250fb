"""Says how the Hopper kernel accesses each operand of a problem: by TMA, word by word or through
pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core import Operand, Problem
from tmm_core.triton import Described, pointer, releases

#: TMA needs base and leading stride to be multiples of this many bytes.
ALIGNMENT = 16
#: Maximum rows (columns) of the other operand if one is loaded word by word. With more, every tile
#: would load it again, while ``triton.realigned`` copies it once.
_FEW = 128
#: Maximum size of the clipped dimension, see :func:`clipped`.
MOST_ROWS = 2**30
#: Size of the other two dimensions: more than any coordinate, and within 32 bits. Triton's own maps
#: of this kind have it, so it is known to work; drivers treat maps of small tensors differently.
_UNLIMITED = 2**31 - 2**16


def by_words(problem: Problem) -> str | None:
    """The operand that is loaded word by word, ``"a"`` or ``"b"``; None if there is none. TMA can
    read the other operand but not this one, which few rows or columns of the other multiply: it is
    read once or twice."""
    misaligned = [name for name in "ab" if not getattr(problem, name).aligned]
    plain = problem.batch == 1 and not problem.gated and problem.a.dtype.itemsize == 2
    plain = plain and problem.groups is None
    # Distances past a row's end are counted in bits, as 32-bit integers.
    counted = max(problem.m, problem.n, problem.k) < 2**27
    if len(misaligned) != 1 or not (plain and counted):
        return None
    other = problem.m if misaligned == ["b"] else problem.n
    return misaligned[0] if other <= _FEW else None


def stored_by_pointers(problem: Problem) -> bool:
    """Whether TMA cannot write the output: its rows are scattered, or are not whole multiples of
    its alignment."""
    return scattered(problem) or _rows_unaligned(problem)


def _rows_unaligned(problem: Problem) -> bool:
    """Whether rows of the output do not start or end at multiples of 16 bytes. TMA stores only
    whole ones: on an H200 a 1×1 output overwrote its 7 neighbours."""
    return not problem.out.aligned or problem.n * problem.out.dtype.itemsize % ALIGNMENT != 0


def stored_at_once(problem: Problem) -> int:
    if not scattered(problem) or _rows_unaligned(problem):
        return 1
    return ALIGNMENT // problem.out.dtype.itemsize


def scattered(problem: Problem) -> bool:
    """Whether an index says where rows of the result are stored."""
    return problem.groups is not None and problem.groups.out_index is not None


def side_by_side(problem: Problem) -> bool:
    """Whether a tile may consist of two products side by side."""
    if problem.native or by_words(problem):
        return False
    return releases.views_of_any_number() or not releases.views_end_with_boxes()


def residual_by_tma(problem: Problem) -> bool:
    """Whether TMA loads the residual into the staging buffers of the output."""
    residual = problem.residual
    return (
        residual is not None
        and not stored_by_pointers(problem)
        and residual.dtype == problem.out.dtype
        and residual.layout == "row"
        and residual.aligned
    )


def box_rows_of_a(problem: Problem, rows: int) -> int:
    """Rows of A in a box: a consumer's ``rows``, at most the next power of two of M. The tile's
    remaining rows multiply stale memory and are not stored. When TMA zero-filled the 60 missing
    rows of a 4×4096×14336, its time rose from about 40 µs to 70 on an H200. Swizzling needs at
    least eight."""
    if problem.a.layout != "row":
        return rows
    return min(rows, max(8, 1 << (problem.m - 1).bit_length()))


def boxed(rows: int, columns: int, col: bool, kind: str) -> list[int]:
    """The box [rows, columns] of one matrix in memory order, after the other dimensions of its
    kind of tensor map."""
    box = [columns, rows] if col else [rows, columns]
    return [1] * {"matrix": 0, "stack": 1, "clipped": 2}[kind] + box


def clipped(columns: int, stride: int) -> tuple[list[int], list[int]]:
    """Shape and strides of a clipped tensor map of rows in memory that are ``stride`` apart.

    TMA ends at the end of a tensor, but a tile must end where its group does. Elements beyond
    belong to another group's result, or may be NaN. Two more dimensions solve that. If rows are S
    elements of W bytes apart, the dimensions have these strides in elements, and these coordinates
    for row R of a group that ends at row E::

        stride      | 2**34 - S | S | S             | 1
        coordinate  | 2**30     | E | 2**30 - E + R | column

    The addresses add up to 2**64 · W, which wraps to 0, and row R. The third dimension has size
    2**30, so that row E is the first outside.
    """
    return [_UNLIMITED, _UNLIMITED, MOST_ROWS, columns], [2**34 - stride, stride, stride, 1]


def described(
    name: str,
    operand: Operand,
    rows: int,
    columns: int,
    kind: str,
    make: Callable[..., Any],
    layout: str = "",
) -> tuple[str, Described]:
    """Return the type and the value of the descriptor of a tensor's [rows, columns] tiles. Its
    blocks are along the contiguous dimension, with the other dimensions of its kind
    (:data:`tmm_triton.ragged_tiles.Kinds`).

    Args:
        make: Makes a descriptor of a tensor, its shape and strides, and a block's shape.
        layout: Further text of the type.
    """
    block = boxed(rows, columns, operand.layout != "row", kind)
    outer, inner = (-2, -1) if operand.layout == "row" else (-1, -2)
    step = ALIGNMENT // operand.dtype.itemsize

    def describe(t: torch.Tensor) -> Any:
        shape = [t.shape[outer], t.shape[inner]]
        # A single row has no meaningful leading stride; TMA needs an aligned one.
        leading = t.stride(outer) if shape[0] > 1 else -(-shape[1] // step) * step
        strides = [leading, 1]
        if kind == "stack":
            # TMA does not support a stride of zero: a shared matrix is a batch of one. So is a
            # single group, whose stride may be anything.
            apart = t.stride(0) if len(t) > 1 else 0
            strides = [apart or shape[0] * leading, *strides]
            shape = [t.shape[0] if apart else 1, *shape]
        elif kind == "clipped":
            shape, strides = clipped(shape[1], leading)
        return make(t, shape, strides, block)

    return f"tensordesc<{pointer(operand.dtype)[1:]}{block}{layout}>", Described(name, describe)
