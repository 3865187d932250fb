"""Models GROUP_M: the order in which a kernel's programs compute output tiles, and the bytes that
each wave of programs reads.

Programs start in the order of their IDs, as many at a time as fit on the GPU: a wave. A wave reads
the rows of A and the columns of B of its tiles once each. Its programs walk K together, and find in
L2 what a neighbour has loaded. Take 9×9 tiles and waves of 9 programs: with IDs along rows,
a wave reads one row of A and all nine columns of B. With IDs that go down three rows of tiles at a
time, a wave reads three rows and three columns.

>>> [len(rows) + len(columns) for group in (1, 3) for rows, columns in waves(9, 9, group, 9)[:1]]
[10, 6]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Tile = tuple[int, int]
#: The rows and the columns of the tiles that are computed at one time.
Wave = tuple[set[int], set[int]]


def order(rows: int, columns: int, group: int) -> list[Tile]:
    """The tiles of a product of ``rows`` × ``columns`` tiles, in the order of program IDs: down
    ``group`` tiles, then right. The last group may have fewer rows.

    >>> order(2, 3, group=1)
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    >>> order(2, 3, group=2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    """
    return [
        (row, column)
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(rows, first + group))
    ]


def waves(rows: int, columns: int, group: int, size: int) -> list[Wave]:
    """The tiles in waves of ``size`` programs."""
    tiles = order(rows, columns, group)
    parts = (tiles[start : start + size] for start in range(0, len(tiles), size))
    return [({row for row, _ in part}, {column for _, column in part}) for part in parts]


def memory_bytes(waves: Sequence[Wave], row_bytes: int, column_bytes: int, l2: int = 0) -> int:
    """Bytes read from memory, if a row of tiles reads ``row_bytes`` of A, and a column
    ``column_bytes`` of B.

    Between waves an L2 of ``l2`` bytes keeps the most recently used whole rows and columns, none
    if 0. Within a wave each is read once in either case.
    """
    held: OrderedDict[tuple[str, int], int] = OrderedDict()
    read = 0
    for rows, columns in waves:
        used = [(("row", row), row_bytes) for row in sorted(rows)]
        used += [(("column", column), column_bytes) for column in sorted(columns)]
        read += sum(size for what, size in used if what not in held)
        for what, size in used:
            held[what] = size
            held.move_to_end(what)
        while held and sum(held.values()) > l2:
            held.popitem(last=False)
    return read
