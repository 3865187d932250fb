"""The report as one self-contained HTML page, without scripts or network access."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tmm_core.bench import charts, html_tables, report
from tmm_core.bench.results import Results

NAME = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #d8dee4; white-space: nowrap; }
"""


def save(results: Results, folder: Path) -> Path:
    """Write the page into ``folder``; returns its file."""
    path = folder / NAME
    path.write_text(html(results), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Page:
    """The page of results, for display in a notebook: ``Page(Results.read([folder]))``."""

    results: Results

    def _repr_html_(self) -> str:
        # In a frame, to keep its style sheet out of the notebook.
        frame = 'style="width:100%;height:42rem;border:0"'
        return f'<iframe {frame} srcdoc="{escape(html(self.results))}"></iframe>'


def html(results: Results) -> str:
    """The whole page."""
    run = results.runs[-1] if results.runs else None
    name = escape(run["environment"]["name"] if run else "an unknown device")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>tmm against torch on {name}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>tmm against torch on {name}</h1>\n{_body(results)}\n</body></html>\n"
    )


def _body(results: Results) -> str:
    runs = [(run["started"], f"tmm {run['tmm']}, {report.commit(run)}") for run in results.runs]
    facts = [*(report.versions(results.runs[-1]) if results.runs else []), *runs]
    parts = [html_tables.facts(facts)]
    for number, section in enumerate(report.sections(results)):
        parts += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        parts += [f"<p>{escape(section.text)}</p>"] if section.text else []
        if section.columns:
            parts.append(html_tables.table(section.columns, section.rows, section.numbers))
        parts += [f"<p>{escape(line)}</p>" for line in section.lines]
        parts += _charts(results) if number == 0 else []
    return "\n".join(parts)


def _charts(results: Results) -> Iterator[str]:
    try:
        drawn = charts.figures(results)
    except ModuleNotFoundError as error:
        yield f"<p>Without charts: {escape(str(error))}; pip install 'tmm-core[bench]'.</p>"
        return
    for figure in drawn.values():
        yield _svg(figure)


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]
