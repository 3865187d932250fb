"""``tmm explain --tiles``: draws the order of tiles, and shows the reads of each wave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tmm_cache import console

from tmm_core.bench.tile_order import Traffic, Wave, order, traffic, waves
from tmm_core.spec.problem import Problem

#: Limits of a picture in a terminal.
_MOST_ROWS, _MOST_NUMBERED, _NARROWEST = 40, 16, 4
#: Symbols of waves, if there is no room for numbers.
_GLYPHS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: Up to this many waves, reads are printed one by one.
_WAVES_TOLD = 10
#: Light background colours of waves, in turn: Okabe and Ito's, mixed with white.
_COLOURS = ("#f4c88a", "#a5d5ee", "#8fd3bd", "#f6ef9f", "#8fb8d9", "#eab08a", "#e3b6cf", "#d0d0d0")


@dataclass(frozen=True)
class Grid:
    """A product in tiles.

    ``row_bytes`` are the bytes of A that a row of tiles reads, ``column_bytes`` those of B that a
    column reads; 0 if tiles have no size.
    """

    rows: int
    columns: int
    #: Number of tiles along K.
    steps: int
    #: Tiles computed at one time.
    wave: int
    row_bytes: int = 0
    column_bytes: int = 0
    #: Bytes that L2 keeps between waves.
    l2: int = 0

    @classmethod
    def of(cls, problem: Problem, block: tuple[int, int], steps: int, wave: int) -> Grid:
        """The tiles of one product of the batch, ``block`` rows and columns each, in bytes."""
        m, n = block
        row_bytes = problem.a.dtype.itemsize * problem.k
        return cls(
            rows=-(-problem.m // m),
            columns=-(-problem.n // n),
            steps=steps,
            wave=wave,
            row_bytes=m * row_bytes,
            column_bytes=n * row_bytes * (2 if problem.gated else 1),
            l2=problem.device.l2,
        )

    def waves(self, group: int) -> list[Wave]:
        return waves(order(self.rows, self.columns, group), self.wave, self.steps)

    def traffic(self, group: int) -> Traffic:
        """Traffic in bytes; in tiles if they have no size."""
        row, column = self.row_bytes or self.steps, self.column_bytes or self.steps
        return traffic(self.waves(group), row, column, self.l2)


def to_json(grid: Grid, groups: Sequence[int]) -> list[dict[str, Any]]:
    """Per group size: the order, reads of each wave, and modelled bytes if tiles have a size."""
    found = []
    for group in groups:
        run = grid.waves(group)
        moved = grid.traffic(group)
        entry: dict[str, Any] = {
            "group": group,
            "order": [list(tile) for wave in run for tile in wave.tiles],
            "wave": grid.wave,
            "reads": [wave.reads for wave in run],
            "loads": [wave.loads for wave in run],
        }
        if grid.row_bytes:
            entry |= {"l2_bytes": moved.from_l2, "memory_bytes": moved.from_memory}
        found.append(entry)
    return found


def text(grid: Grid, groups: Sequence[int], colour: bool = False) -> str:
    """The order for each group size, as IDs of programs or waves, and the reads of each wave."""
    lines: list[str] = []
    for group in groups:
        lines += _order(grid, group, colour)
        reads = [wave.reads for wave in grid.waves(group)]
        told = " ".join(map(str, reads[:_WAVES_TOLD])) + (" …" if len(reads) > _WAVES_TOLD else "")
        lines += [f"tiles read by each wave: {told}", ""]
    return "\n".join([*lines, *_table(grid, groups)])


def _order(grid: Grid, group: int, colour: bool) -> Iterator[str]:
    cell = max(_NARROWEST, len(str(grid.rows * grid.columns - 1)) + 3)
    numbered = grid.rows <= _MOST_NUMBERED and grid.columns * cell < console.width()
    cell = cell if numbered else 2
    columns, rows = min(grid.columns, (console.width() - 2) // cell), min(grid.rows, _MOST_ROWS)
    number = {tile: program for program, tile in enumerate(order(grid.rows, grid.columns, group))}
    shown = "" if (rows, columns) == (grid.rows, grid.columns) else f", {rows}×{columns} of them"
    what = "by program, the first wave in brackets" if numbered else "by wave"
    yield f"GROUP_M={group}: {grid.rows}×{grid.columns} tiles{shown}, {what}"
    for row in range(rows):
        line = ""
        for column in range(columns):
            program = number[row, column]
            wave = program // grid.wave
            text = _GLYPHS[wave % len(_GLYPHS)]
            if numbered:
                text = f"{program:{cell - 3}}"
                text = f"[{text}]" if wave == 0 else f" {text} "
            line += f"{_on(_COLOURS[wave % len(_COLOURS)], text) if colour else text} "
        yield line.rstrip()


def _on(background: str, text: str) -> str:
    """Black text on a colour, by a terminal's escape sequence."""
    red, green, blue = bytes.fromhex(background[1:])
    return f"\x1b[30;48;2;{red};{green};{blue}m{text}\x1b[0m"


def _table(grid: Grid, groups: Sequence[int]) -> list[str]:
    headings = ["GROUP_M", "waves", "of", "read by first", "by all", "asked of L2"]
    headings += [*(["L2, MB", "memory, MB"] if grid.row_bytes else []), "L2 serves"]
    rows = []
    for group in groups:
        run, moved = grid.waves(group), grid.traffic(group)
        cells = [group, len(run), grid.wave, run[0].reads]
        cells += [sum(wave.reads for wave in run), sum(wave.loads for wave in run)]
        if grid.row_bytes:
            cells += [round(moved.from_l2 / 1e6), round(moved.from_memory / 1e6)]
        rows.append([*map(str, cells), f"{moved.hits:.0%}"])
    return console.table(headings, rows, console.width(), right=headings)


def draw(grid: Grid, groups: Sequence[int], path: Path, title: str) -> None:
    """Draw the orders side by side into ``path``, PNG or SVG by its suffix.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: The file cannot be written, or has another suffix.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    numbered = grid.rows * grid.columns <= 200
    width = max(3.2, min(9.0, 0.55 * grid.columns if numbered else 5.0))
    height = max(2.2, min(9.0, width * grid.rows / grid.columns))
    figure = Figure(figsize=(width * len(groups) + 0.4, height + 1.1), layout="constrained")
    for place, group in enumerate(groups, start=1):
        axes = figure.add_subplot(1, len(groups), place)
        tiles = order(grid.rows, grid.columns, group)
        number = {tile: program for program, tile in enumerate(tiles)}
        cells = [
            [number[row, column] // grid.wave % len(_COLOURS) for column in range(grid.columns)]
            for row in range(grid.rows)
        ]
        axes.imshow(cells, cmap=ListedColormap(_COLOURS), vmin=0, vmax=len(_COLOURS) - 1)
        ys, xs = zip(*tiles, strict=True)
        axes.plot(xs, ys, color="black", linewidth=0.7, alpha=0.35)
        if numbered:
            for (row, column), program in number.items():
                axes.text(column, row, str(program), ha="center", va="center", fontsize=9)
        first, moved = grid.waves(group)[0], grid.traffic(group)
        # The first wave's reads: its rows of A at the left, its columns of B on top.
        for row in first.rows:
            axes.plot([-0.75, -0.75], [row - 0.4, row + 0.4], color="#d55e00", linewidth=3)
        for column in first.columns:
            axes.plot([column - 0.4, column + 0.4], [-0.75, -0.75], color="#0072b2", linewidth=3)
        axes.set(
            xlim=(-1, grid.columns - 0.45),
            ylim=(grid.rows - 0.45, -1),
            xticks=[],
            yticks=[],
            title=f"GROUP_M={group}: the first wave reads {first.reads} tiles",
            xlabel=f"{len(grid.waves(group))} waves of {grid.wave}; "
            f"L2 serves {moved.hits:.0%} of loads",
        )
        axes.title.set_fontsize(10)
        axes.set_frame_on(False)
    figure.suptitle(f"{title}  (bars: the first wave's rows of A, columns of B)", fontsize=10)
    figure.savefig(path, dpi=144)
