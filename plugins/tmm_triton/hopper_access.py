"""Says how the Hopper kernel accesses each operand of a problem: by TMA, word by word or through
pointers.
"""

from __future__ import annotations

from tmm_core import Problem

#: TMA needs base and leading stride to be multiples of this many bytes.
ALIGNMENT = 16
#: Maximum rows (columns) of the other operand if one is loaded word by word: for more it would be
#: loaded again, while ``triton.realigned`` copies it once.
_FEW = 128


def by_words(problem: Problem) -> str | None:
    """The operand that TMA cannot read, ``"a"`` or ``"b"``, if there is only one, and so few rows
    or columns of the other multiply it that it is read once or twice."""
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
    """Whether rows of the output do not start or end at multiples of 16 bytes, which TMA stores
    whole (on an H200 a 1×1 output overwrote its 7 neighbours)."""
    return not problem.out.aligned or problem.n * problem.out.dtype.itemsize % ALIGNMENT != 0


def stored_at_once(problem: Problem) -> int:
    if not scattered(problem) or _rows_unaligned(problem):
        return 1
    return ALIGNMENT // problem.out.dtype.itemsize


def scattered(problem: Problem) -> bool:
    """Whether an index says where rows of the result are stored."""
    return problem.groups is not None and problem.groups.out_index is not None


def beside(problem: Problem) -> bool:
    """Whether a tile may be two products beside each other."""
    return not (problem.fp8 or by_words(problem))


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


def rows_brought(problem: Problem, rows: int) -> int:
    """Rows of A in a box: a consumer's ``rows``, at most the next power of two of M. The tile's
    remaining rows multiply stale memory and are not stored: zero-filling the 60 missing rows of a
    4×4096×14336 by TMA raised its time from about 40 µs to 70 on an H200. Swizzling needs at least
    eight."""
    if problem.a.layout != "row":
        return rows
    return min(rows, max(8, 1 << (problem.m - 1).bit_length()))


def boxed(rows: int, columns: int, col: bool, kind: str) -> list[int]:
    """The box [rows, columns] of one matrix in memory order, after the other dimensions of its
    kind of tensor map."""
    box = [columns, rows] if col else [rows, columns]
    return [1] * {"matrix": 0, "stack": 1, "clipped": 2}[kind] + box
