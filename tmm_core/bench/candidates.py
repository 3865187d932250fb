"""``tmm explain --plot``: the times of all candidates of a record, losers included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tmm_cache import CandidateResult, TuningRecord

from tmm_core.spec.launcher import BASELINE
from tmm_core.tuning.ranking import finalists, identity

#: Okabe and Ito's colour-blind-safe palette: BLAS, then the other kernels in turn.
_BLAS = "#0072B2"
_COLOURS = ("#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8B6B00", "#555555")
#: Opacity of a bar: for a candidate dropped early, and for one timed to the end.
_ALPHA = (0.35, 0.8)


def draw(
    record: TuningRecord,
    path: Path,
    title: str,
    chosen: tuple[str, dict[str, Any]],
    expected_us: Sequence[float | None],
) -> None:
    """Draw a row for each candidate, fastest on top: median and spread of its samples at the
    record's own M, the time that its kernel's model expected, BLAS as a line; those without a time
    come last.

    Args:
        path: PNG or SVG, by its suffix.
        chosen: The kernel and config that answer here; marked.
        expected_us: One per candidate, in the record's order.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: The file cannot be written, or has another suffix.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    pairs = sorted(
        zip(record.candidates, expected_us, strict=True),
        key=lambda pair: pair[0].median_us or float("inf"),
    )
    kernels = dict.fromkeys(c.kernel for c, _ in pairs if c.kernel != BASELINE)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(kernels)}
    colours[BASELINE] = _BLAS
    figure = Figure(figsize=(11, 1.9 + 0.34 * len(pairs)), layout="constrained")
    axes = figure.subplots()
    ended = set(map(identity, finalists(record.candidates)))
    labels = []
    for row, (result, expected) in enumerate(pairs):
        name, fields = _label(result, record.candidates)
        if (result.kernel, dict(result.config)) == chosen:
            name = f"chosen → {name}"
        labels.append(name)
        time = result.median_us
        if time is None:
            fields = (result.reason or result.status).split(";")[0]
        else:
            alpha = _ALPHA[identity(result) in ended]
            axes.barh(row, time, color=colours[result.kernel], alpha=alpha, height=0.75)
            spread = [[time - min(result.samples_us)], [max(result.samples_us) - time]]
            axes.errorbar(time, row, xerr=spread, color="black", linewidth=1, capsize=2)
            if expected is not None:
                axes.plot([expected], [row], "d", color="black", markersize=4)
        inside = axes.get_yaxis_transform()
        axes.text(0.005, row, fields, va="center", fontsize=7, transform=inside)
    blas = [c.median_us for c, _ in pairs if c.kernel == BASELINE and c.median_us]
    if blas:
        axes.axvline(min(blas), color=_BLAS, linewidth=1, linestyle="--")
    axes.set(
        yticks=range(len(pairs)),
        ylim=(len(pairs) - 0.4, -0.6),
        xlim=(0, None),
        xlabel=f"µs at M={record.problem['m']}, {record.clock}",
    )
    axes.set_yticklabels(labels, fontsize=8)
    axes.grid(alpha=0.3, axis="x")
    meaning = [
        Patch(color="#777777", alpha=_ALPHA[True], label="timed to the end"),
        Patch(color="#777777", alpha=_ALPHA[False], label="dropped early, with fewer samples"),
        Line2D([], [], marker="d", color="black", linestyle="", label="expected by the model"),
        Line2D([], [], color=_BLAS, linestyle="--", label="BLAS"),
    ]
    figure.legend(handles=meaning, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=144)


def _label(result: CandidateResult, every: Sequence[CandidateResult]) -> tuple[str, str]:
    """Kernel and tile, and the other fields that distinguish it within its kernel."""
    config = dict(result.config)
    blocks = [config.pop(f"BLOCK_{letter}", None) for letter in "MNK"]
    tile = " " + "×".join(map(str, blocks)) if None not in blocks else ""
    same = [c.config for c in every if c.kernel == result.kernel]
    telling = [
        f"{name}={value}"
        for name, value in config.items()
        if value != "" and any(other.get(name) != value for other in same)
    ]
    return f"{result.kernel}{tile}", "  ".join(telling)
