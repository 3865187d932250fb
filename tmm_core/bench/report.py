"""A run's results as tables: a summary per class, and the measurements per problem.

Ratios are torch's time over tmm's: above one, tmm was faster. ``±`` is the difference between
torch's two series in one loop (the median over problems of |ratio − 1|). Smaller differences
between any two columns are noise.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmm_core.bench.case import Case
from tmm_core.bench.results import OTHER_CLOCKS, Document, Results
from tmm_core.bench.runner import AGAIN, INDUCTOR, TMM, TORCH
from tmm_core.bench.suites import SWEEP
from tmm_core.spec.kernel import config_text

#: Below this ratio a problem counts as lost: two series of the same call differ by up to 1 %.
LOST = 0.99

SUMMARY_COLUMNS = (
    "class", "dtype", "problems", "geomean", "worst", "worst problem", "best", "< 0.99×", "±",
    "failed",
)  # fmt: skip
CLOCK_COLUMNS = ("class", "dtype", "in use", *OTHER_CLOCKS)
REGRET_COLUMNS = (
    "M", "random problems", "torch / chosen", "at least", "of", "chosen / best known", "at most",
    "of it",
)  # fmt: skip
SEARCH_COLUMNS = (
    "class", "best was", "problems", "chosen / best", "at most", "of it", "BLAS / best",
)  # fmt: skip
#: Ranges of M for the summary of random problems.
_RANGES = ((1, 16), (17, 128), (129, 1024), (1025, 8192), (1, 8192))


@dataclass(frozen=True)
class Section:
    """A part of the report: a table with a text before it, and lines after it. ``detail`` marks
    parts that only the report's files have, not the command's output."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text: str = ""
    lines: Sequence[str] = ()
    detail: bool = False

    @property
    def numbers(self) -> list[str]:
        """The columns whose cells are numbers, such as ``1.020×`` or ``3.1 ±0.2``, or empty."""
        cells = zip(*self.rows, strict=True)
        columns = zip(self.columns, cells, strict=True) if self.rows else ()
        return [name for name, column in columns if all(map(_NUMBER.fullmatch, column))]


_NUMBER = re.compile(r"([\d.]+(e[-+]\d+)?[×%]?( .*)?)?")


def sections(results: Results) -> Iterator[Section]:
    """The sections that ``results`` have data for."""
    yield Section("", SUMMARY_COLUMNS, summaries(results))
    if by_clock := clocks(results):
        yield Section("clocks, geometric mean / worst", CLOCK_COLUMNS, by_clock)
    if searched := searches(results):
        yield Section(
            "first use without records, against an exhaustive search", SEARCH_COLUMNS, searched
        )
    own = [document for document in results.problems if document["kind"] == "problem"]
    for suite in dict.fromkeys(document["suite"] for document in own):
        members = [document for document in own if document["suite"] == suite]
        measured = [document for document in members if "times" in document]
        columns, rows = problem_table(measured) if measured else ([], [])
        failed = [line(document) for document in members if "times" not in document]
        yield Section(suite, columns, rows, lines=failed, detail=suite != SWEEP)
    for suite in dict.fromkeys(document["suite"] for document in results.regrets):
        title = suite.replace("random", "random M, weight and epilogue")
        documents = [document for document in results.regrets if document["suite"] == suite]
        yield Section(title, REGRET_COLUMNS, regrets(documents))
    if results.host is not None:
        host = results.host
        chosen = ", ".join(f"{what}: `{kernel}`" for what, kernel in host["kernels"].items())
        text = f"{host['size']}×{host['size']} {host['dtype']}; {chosen}"
        costs = [(f"`{name}`", f"{us:.2f}") for name, us in host["us"].items()]
        yield Section("host cost per call", ("call", "µs"), costs, text)


def summaries(results: Results) -> list[tuple[str, ...]]:
    """A row for each class and dtype, in the order they were measured."""
    rows: list[tuple[str, ...]] = []
    own = (document for document in results.problems if document["kind"] == "problem")
    for (suite, dtype), documents in by_class(own).items():
        measured = [document for document in documents if "times" in document]
        figures = ("", "", "", "", "0", "")
        failed = sum("failed" in document for document in documents)
        if measured:
            ratios = [document["ratio"] for document in measured]
            noise = statistics.median(abs(document["noise"] - 1) for document in measured)
            lost = sum(ratio < LOST for ratio in ratios)
            summary = summarised(measured, lambda document: document["ratio"])
            figures = (*summary, times(max(ratios)), str(lost), f"{noise:.1%}")
        rows.append((suite, dtype, str(len(measured)), *figures, str(failed)))
    return rows


def by_class(documents: Iterable[Document]) -> dict[tuple[str, str], list[Document]]:
    """The documents by class and dtype, in the order they were measured."""
    groups: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        groups.setdefault((document["suite"], document["case"]["dtype"]), []).append(document)
    return groups


def summarised(
    documents: Sequence[Document],
    ratio: Callable[[Document], float],
    worst: Callable[..., Document] = min,
) -> tuple[str, str, str]:
    """The geometric mean of a ratio, its worst value, and the problem that has it."""
    extreme = worst(documents, key=ratio)
    mean = statistics.geometric_mean(map(ratio, documents))
    return times(mean), times(ratio(extreme)), title(extreme)


def clock_ratio(document: Document, clock: str) -> float | None:
    """torch's time over tmm's by another clock; None if it was not used."""
    found = document.get(clock)
    return found[TORCH] / found[TMM] if found else None


def _noise(found: Document | None) -> str:
    """The ratio of torch's two series by another clock; empty if it was not used."""
    return f" (A/A {found[TORCH] / found[AGAIN]:.3f})" if found and AGAIN in found else ""


def clocks(results: Results) -> list[tuple[str, ...]]:
    """Geometric mean and worst of each class by every clock. Empty if *in use* is the only
    clock."""
    rows: list[tuple[str, ...]] = []
    for (suite, dtype), documents in by_class(results.measured).items():
        ratios = [[document["ratio"] for document in documents]]
        for clock in OTHER_CLOCKS:
            found = (clock_ratio(document, clock) for document in documents)
            ratios.append([ratio for ratio in found if ratio is not None])
        if any(ratios[1:]):
            cells = (
                f"{statistics.geometric_mean(r):.3f} / {min(r):.3f}" if r else "" for r in ratios
            )
            rows.append((suite, dtype, *cells))
    return rows


def line(document: Document) -> str:
    """One measured problem in one line."""
    name = f"{document['suite']} {title(document)}"
    if "times" not in document:
        return f"{name}: failed: {document['failed']}"
    us = {name: summary["median_us"] for name, summary in document["times"].items()}
    each = f", {by_capture(document)} by capture" if "ratios" in document else ""
    return (
        f"{name}: torch {microseconds(us[TORCH])}, tmm {microseconds(us[TMM])} µs, "
        f"{times(document['ratio'])}{each} (A/A {document['noise']:.3f}) {chosen(document)} "
        f"[{document['origin']}]"
    )


def searches(results: Results) -> list[tuple[str, ...]]:
    """The regret of first-use tuning without records, by class and by the step of the tuning that
    lost the best candidate of an exhaustive search."""
    rows: list[tuple[str, ...]] = []
    by_suite: dict[str, list[Document]] = {}
    for document in results.measured:
        if "search" in document:
            by_suite.setdefault(document["suite"], []).append(document)
    for suite, documents in by_suite.items():
        steps: dict[str, list[Document]] = {"all": documents}
        for document in documents:
            steps.setdefault(document["search"]["step"], []).append(document)
        for step, of_step in steps.items():
            lost = summarised(of_step, lambda document: document["search"]["regret"], max)
            room, *_ = summarised(of_step, lambda document: document["search"]["blas_over_best"])
            rows.append((suite, step, str(len(of_step)), *lost, room))
    return rows


def markdown(results: Results) -> str:
    """The whole report."""
    parts = [_header(results)]
    for section in sections(results):
        parts += [f"## {section.title}"] if section.title else []
        parts += [section.text] if section.text else []
        if section.columns:
            lines = [section.columns, ["---"] * len(section.columns), *section.rows]
            cells = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in lines)
            parts.append("\n".join(f"| {row} |" for row in cells))
        parts += [f"- {each}" for each in section.lines]
    return "\n\n".join(parts) + "\n"


def _header(results: Results) -> str:
    if not results.runs:
        return "# tmm against torch"
    last = results.runs[-1]
    lines = [
        f"# tmm against torch on {last['environment']['name']}",
        "",
        ", ".join(f"{name} {version}" for name, version in (*versions(last), ("tmm", last["tmm"]))),
        *(f"- {r['started']}: {commit(r)}, `tmm {' '.join(r['command'])}`" for r in results.runs),
    ]
    lines += ["", "Ratios are torch's time over tmm's: above 1×, tmm is faster."]
    return "\n".join(lines)


def problem_table(documents: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """A column for each quantity that any of these problems has, and a row for each problem."""

    def us(column: str) -> Callable[[Document], str]:
        return lambda document: microseconds(median_us(document, column))

    def by(clock: str) -> Callable[[Document], str]:
        return lambda document: times(clock_ratio(document, clock)) + _noise(document.get(clock))

    columns: dict[str, Callable[[Document], str]] = {
        "problem": title,
        "torch µs": lambda d: _spread(d["times"][TORCH]),
        "tmm µs": lambda d: _spread(d["times"][TMM]),
        "ratio": lambda d: times(d["ratio"]),
        "by capture": by_capture,
        "A/A": lambda d: f"{d['noise']:.3f}",
        "TFLOPS": lambda d: f"{d['flops'] / d['times'][TMM]['median_us'] / 1e6:.1f}",
        "GB/s": lambda d: f"{d['bytes'] / d['times'][TMM]['median_us'] / 1e3:.0f}",
    }
    if not any("ratios" in document for document in documents):
        del columns["by capture"]
    timed = {column for document in documents for column in document["times"]}
    if INDUCTOR in timed:
        columns["inductor µs"] = us(INDUCTOR)
        columns["inductor / tmm"] = _over_inductor
    for clock in OTHER_CLOCKS:
        if any(clock in document for document in documents):
            columns[clock] = by(clock)
    columns["kernel"] = chosen
    columns["origin"] = lambda d: d["origin"]
    columns["error"] = lambda d: f"{d['error']:.1e}"
    for column in sorted(timed):
        if column.startswith("kernel "):
            columns[column.removeprefix("kernel ")] = us(column)
    return [*columns], [[cell(document) for cell in columns.values()] for document in documents]


def _over_inductor(document: Document) -> str:
    us = median_us(document, INDUCTOR)
    return "" if us is None else times(us / document["times"][TMM]["median_us"])


def versions(run: Document) -> list[tuple[str, str]]:
    """Names and versions of the software that a run was measured with."""
    known = run["environment"]
    named = ("torch", "torch"), ("triton", "triton"), ("CUDA", "cuda"), ("cuBLAS", "cublas")
    found = [(name, str(known.get(field) or "none")) for name, field in named]
    return [*found, ("driver", str(run.get("driver") or "unknown"))]


def commit(run: Document) -> str:
    """The commit that a run measured."""
    dirty = " with uncommitted changes" if run.get("uncommitted_changes") else ""
    return f"commit {(run.get('commit') or 'unknown')[:12]}{dirty}"


def regrets(documents: Sequence[Document]) -> list[tuple[str, ...]]:
    """The cost of choosing once per bucket of M for random problems, by ranges of M."""
    rows: list[tuple[str, ...]] = []
    for least, most in _RANGES:
        if inside := [d for d in documents if "us" in d and least <= d["case"]["m"] <= most]:
            ahead = summarised(inside, lambda p: p["torch_us"] / p["us"])
            lost = summarised(inside, lambda p: p["us"] / p["best_us"], max)
            rows.append((f"{least}…{most}", str(len(inside)), *ahead, *lost))
    return rows


def title(document: Document) -> str:
    """The problem, without its class."""
    return str(Case.from_json(document["case"]))


def chosen(document: Mapping[str, Any]) -> str:
    """Kernel and config that tmm chose."""
    return f"{document['kernel']} {config_text(document['config'])}".rstrip()


def by_capture(document: Mapping[str, Any]) -> str:
    """The range of a large product's ratio over its captures."""
    ratios = document.get("ratios")
    return f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""


def median_us(document: Document, column: str) -> float | None:
    """A column's median; None if it was not timed."""
    return document["times"].get(column, {}).get("median_us")  # type: ignore[no-any-return]


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}×"


def microseconds(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _spread(summary: dict[str, Any]) -> str:
    """A median ± half the interquartile range."""
    half = (summary["p75_us"] - summary["p25_us"]) / 2
    return f"{summary['median_us']:.1f} ±{half:.1f}"
