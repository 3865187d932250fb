"""The commands of ``tmm``, which :mod:`tmm_base.tmm` starts; ``tmm-cache`` manages the records.

Exit statuses: 0 done, 1 something is wrong or was left undone, 2 a usage error.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tmm_base.console import DONE, Parser, argument, guarded, warnings_as_notes
from tmm_base.tmm import parsers
from tmm_cache import CacheWarning

from tmm_core.bench.case import parse_shape
from tmm_core.errors import TmmError, TmmWarning
from tmm_core.tools.commands import options as shared


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return guarded("tmm", lambda: _run(argv), TmmError)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return DONE
    options.argv = sys.argv[1:] if argv is None else list(argv)
    # Imported late: each command needs modules that the others do not.
    command = importlib.import_module(
        f"tmm_core.tools.commands.{options.command.replace('-', '_')}"
    )
    with warnings_as_notes(TmmWarning, CacheWarning):
        status: int = command.run(options)
    return status


def _parser() -> Parser:
    parser, commands = parsers()
    _add_explain(commands["explain"])
    _add_tune(commands["tune"])
    _add_bench(commands["bench"])
    for name in ("explain", "tune", "bench"):
        shared.add_problem(commands[name])
    for name in ("explain", "tune", "bench", "verify", "doctor"):
        shared.add_device(commands[name])
    for name in ("explain", "tune", "bench", "kernels", "verify", "doctor", "misses"):
        commands[name].add_json()
    help_text = "name of the distribution and of its folder, like my-kernels"
    commands["new-plugin"].add_argument("name", help=help_text)
    return parser


def _add_explain(parser: Parser) -> None:
    parser.add_argument("shape", type=argument(parse_shape), metavar="MxNxK", help="or BxMxNxK")
    parser.add_argument("--kernel", metavar="NAME", help="as if this kernel were forced")
    parser.add_argument(
        "--config",
        type=_fields,
        metavar="FIELD=VALUE,…",
        help="with these fields of its config, the others as in its default",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="as on this GPU, which need not be present: H200"
    )
    parser.flag("--why", text="analyse the chosen kernel (compiles it)")


def _add_tune(parser: Parser) -> None:
    parser.add_argument(
        "shapes", nargs="*", type=argument(parse_shape), metavar="MxNxK", help="or BxMxNxK"
    )
    _add_suite(parser)
    parser.flag("--misses", text="the problems of `tmm misses`")
    parser.flag(
        "--force", text="measure problems on record again, trying first what won here and elsewhere"
    )
    parser.flag(
        "--isolate",
        text="launch each candidate in a separate process first: one that hangs, exits or "
        "crashes is left out",
    )
    _add_budget(parser)


def _add_bench(parser: Parser) -> None:
    parser.flag("--quick", text="the README's table of gains, in two minutes on a GPU")
    _add_suite(parser)
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=argument(parse_shape),
        default=[],
        metavar="MxNxK",
        help="these shapes, with the problem options, instead of or in addition to suites",
    )
    parser.add_argument(
        "--squares",
        type=_squares,
        default=[],
        metavar="FIRST:LAST:STEP",
        help="square matrices of these sizes, like 512:8192:512",
    )
    parser.add_argument("--limit", type=shared.count, metavar="N", help="at most N of each suite")
    parser.add_argument(
        "--kernel",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,…",
        help="time these kernels too, on --shapes and --squares",
    )
    parser.add_argument(
        "--config",
        type=_fields,
        metavar="FIELD=VALUE,…",
        help="with these fields, for kernels that have them; others as in the default config",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        type=_sweep,
        default=[],
        metavar="FIELD=VALUE,…",
        help="a series for each value; several --sweep give all combinations",
    )
    parser.flag("--kernels", text="time every capable kernel too")
    parser.flag("--inductor", text="time torch.compile too")
    parser.flag(
        "--clocks", text="report the clocks alone and steady too, and a small kernel between calls"
    )
    parser.flag("--host", text="measure the host's cost per call")
    parser.add_argument(
        "--regret",
        type=shared.count,
        default=0,
        metavar="COUNT",
        help="this many random problems (M, weight, epilogue): torch, the choice, the best known",
    )
    parser.add_argument(
        "--no-records",
        dest="records",
        action="store_false",
        help="tune every problem without any record or compiled kernel, and compare the choice "
        "with an exhaustive search (by default for --suite large)",
    )
    parser.add_argument(
        "--no-tune",
        dest="tune",
        action="store_false",
        help="time the choice of a record, a neighbour or an estimate",
    )
    _add_budget(parser)
    parser.add_argument(
        "--seconds-per-problem",
        dest="seconds",
        type=_seconds,
        metavar="S",
        help="seconds of timing, after tuning (default: 0.5)",
    )
    parser.add_argument(
        "--max-seconds",
        type=_seconds,
        default=float("inf"),
        metavar="S",
        help="start no problem after this long",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="keep results there, and write report.md"
    )
    parser.flag("--resume", text="skip problems already in the output folder")
    parser.add_argument(
        "--from",
        dest="read",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="measure nothing; show results of these files or folders",
    )
    parser.flag("--markdown", text="print the whole report")


def _add_suite(parser: Parser) -> None:
    parser.add_argument(
        "--suite",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        metavar="NAME,…",
        help="classes of the benchmark, or all; --dtype selects among their problems",
    )


def _add_budget(parser: Parser) -> None:
    parser.add_argument(
        "--budget", type=_seconds, metavar="S", help="seconds of tuning per problem"
    )


@argument
def _seconds(text: str) -> float:
    return shared.positive(float, text)


@argument
def _sweep(text: str) -> tuple[str, list[int | float | bool | str]]:
    name, first = shared.field(text.split(",")[0])
    return name, [first, *map(shared.value_of, text.split(",")[1:])]


@argument
def _squares(text: str) -> list[int]:
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"found {text!r}, accepted is FIRST:LAST:STEP, like 512:8192:512")
    first, last, step = (shared.positive(int, part) for part in parts)
    if last < first:
        raise ValueError(f"found {text!r}: the last size is below the first")
    return list(range(first, last + 1, step))


@argument
def _fields(text: str) -> dict[str, int | float | bool | str]:
    return dict(map(shared.field, text.split(",")))
