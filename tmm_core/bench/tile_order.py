"""A model of GROUP_M: the order in which a kernel's programs compute output tiles, and the data
that each wave of them reads.

Programs start in the order of their IDs, as many at a time as fit on the GPU: a wave. A wave reads
the rows of A and the columns of B of its tiles once each, since its programs walk K together and
find in L2 what a neighbour has loaded. With IDs along rows, 9 programs of a product of 9×9×9 tiles
read one row of A and all of B, 90 tiles; with IDs that go down three rows of tiles at a time they
read three rows and three columns, 54.

>>> [sum(wave.reads for wave in waves(order(9, 9, group), 9, steps=9)[:1]) for group in (1, 3)]
[90, 54]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Tile = tuple[int, int]


def place(program: int, rows: int, columns: int, group: int) -> Tile:
    """Row and column of the tile that a program computes: down ``group`` tiles, then right. The
    last group may have fewer rows."""
    band = group * columns
    first = program // band * group
    height = min(rows - first, group)
    within = program % band
    return first + within % height, within // height


def order(rows: int, columns: int, group: int) -> list[Tile]:
    """The tiles of a product of ``rows`` × ``columns`` tiles, in the order of program IDs.

    >>> order(2, 3, group=1)
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    >>> order(2, 3, group=2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]

    Raises:
        ValueError: An argument is not positive.
    """
    if min(rows, columns, group) < 1:
        raise ValueError(f"{rows}×{columns} tiles in groups of {group}: each must be at least 1")
    return [place(program, rows, columns, group) for program in range(rows * columns)]


@dataclass(frozen=True)
class Wave:
    """The tiles computed at one time."""

    tiles: tuple[Tile, ...]
    #: Tiles of A and B along K.
    steps: int = 1

    @property
    def rows(self) -> list[int]:
        return sorted({row for row, _ in self.tiles})

    @property
    def columns(self) -> list[int]:
        return sorted({column for _, column in self.tiles})

    @property
    def reads(self) -> int:
        """Tiles of A and of B that come from memory, starting with an empty L2."""
        return (len(self.rows) + len(self.columns)) * self.steps

    @property
    def loads(self) -> int:
        """Tiles of A and of B that the programs request from L2."""
        return 2 * len(self.tiles) * self.steps


def waves(tiles: Sequence[Tile], size: int, steps: int = 1) -> list[Wave]:
    """The tiles in waves of ``size`` programs."""
    return [Wave(tuple(tiles[i : i + size]), steps) for i in range(0, len(tiles), size)]


@dataclass(frozen=True)
class Traffic:
    """Modelled bytes of A and B."""

    #: Requested from L2 by the SMs.
    from_l2: int
    #: Requested from memory by L2.
    from_memory: int

    @property
    def hits(self) -> float:
        """L2's hit rate."""
        return 1 - self.from_memory / self.from_l2


def traffic(waves: Iterable[Wave], row_bytes: int, column_bytes: int, l2: int = 0) -> Traffic:
    """Bytes moved if a row of tiles reads ``row_bytes`` of A, and a column ``column_bytes`` of B.

    Between waves an L2 of ``l2`` bytes keeps the most recently used whole rows and columns, none
    if 0; within a wave each is read once in either case.
    """
    held: OrderedDict[tuple[str, int], int] = OrderedDict()
    requested = read = 0
    for wave in waves:
        requested += len(wave.tiles) * (row_bytes + column_bytes)
        used = [(("row", row), row_bytes) for row in wave.rows]
        used += [(("column", column), column_bytes) for column in wave.columns]
        read += sum(size for what, size in used if what not in held)
        for what, size in used:
            held[what] = size
            held.move_to_end(what)
        while held and sum(held.values()) > l2:
            held.popitem(last=False)
    return Traffic(requested, read)
