"""The `tmm-cache` command: its options and exit statuses.

It maintains the cache on machines without a GPU and in images without torch, so it imports neither
torch nor kernels and starts fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tmm_cache import changes, deployment, filters, reports
from tmm_cache.console import DONE, MISTAKE, Parser, argument, guarded, note, warnings_as_notes
from tmm_cache.errors import CacheWarning, UsageError
from tmm_cache.places import is_nowhere
from tmm_cache.store import CacheStore

DISTRIBUTION = "tmm-core"

Command: TypeAlias = Callable[[CacheStore, argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if done, 1 if faults were found or left undone, 2 for bad
    usage."""
    return guarded(lambda: _run(argv), note, (UsageError, OSError))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.version:
        print(f"{parser.prog} {_version()}")
        return DONE
    if options.run is None:
        parser.print_help()
        return DONE
    run: Command = options.run
    with warnings_as_notes(note, CacheWarning):
        store = CacheStore(options.cache_dir)
        if is_nowhere(store.root):  # already reported
            return MISTAKE
        return run(store, options)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 35 ms

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return f"of unknown version: no {DISTRIBUTION} is installed"


def _parser() -> Parser:
    parser = Parser(
        prog="tmm-cache",
        description="Look after tmm's tuning records.",
        epilog="The root is TMM_CACHE_DIR or the platform's cache folder; below it are the "
        "read-only layers that TMM_CACHE_PATH lists and those that packages ship.",
    )
    _add_cache_dir(parser)
    parser.flag("--version", text="print the version and exit")
    parser.set_defaults(run=None, cache_dir=None)
    subparsers = parser.add_subparsers(metavar="command", parser_class=Parser)

    def add(name: str, run: Command, text: str, *more: Callable[[Parser], None]) -> Parser:
        command = subparsers.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + "."
        )
        for add_options in (_add_cache_dir, *more):
            add_options(command)
        command.set_defaults(run=run)
        return command

    show = add(
        "show",
        reports.show,
        "list own records, a line for each weight, dtype and epilogue, or print one in full",
    )
    show.add_argument("record", nargs="?", help="beginning of a record's digest")
    show.flag("--all", text="list the records of the layers too")
    show.flag("--each", text="a line for each record")
    show.add_json()
    _add_filters(show)

    text = "remove own records, all or those that pass the filters"
    add("clear", changes.clear, text, Parser.add_json, _add_removal, _add_filters)
    add("dir", reports.directory, "print where own records lie", Parser.add_json)
    text = "count records and winners per GPU and environment"
    add("stats", reports.stats, text, Parser.add_json)
    add("verify", reports.verify, "read every file and print each fault", Parser.add_json)

    text = "remove damaged and left-over files, and records of all environments but a GPU's newest"
    prune = add("prune", changes.prune, text, Parser.add_json, _add_removal)
    text = "instead of old environments, remove records older than this"
    _add_age(prune, "--older-than", "before", text)

    export = add("export", changes.export, "write own records to an archive")
    export.add_argument("file", type=Path, metavar="FILE.tar.gz")
    export.flag("--thin", text="keep of each candidate's samples the median and the extremes")
    _add_filters(export)

    import_ = add("import", changes.import_, "add the records of an archive to one's own")
    import_.add_argument("file", type=Path, metavar="FILE")
    import_.flag("--force", text="overwrite newer records too")

    freeze = add(
        "freeze",
        deployment.freeze,
        "write the records of the root and its layers to one lock file, which alone answers under "
        "TMM_REQUIRE_LOCKED=1",
    )
    freeze.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="instead of TMM_LOCK_FILE or tmm.lock.json in the root",
    )
    freeze.add_argument("--gpu", metavar="GLOB", help="the GPU's folder, like nvidia-h200*")

    diff = add("diff", deployment.diff, "count how two caches would answer differently")
    diff.add_argument("a", type=Path, metavar="A", help="a root, or a lock file")
    diff.add_argument("b", type=Path, metavar="B")
    diff.flag("--each", text="a line for each difference")
    diff.add_json()

    merge = add(
        "merge", deployment.merge, "take from other caches what is better evidence than one's own"
    )
    merge.add_argument(
        "sources", type=Path, nargs="+", metavar="FROM", help="a root, or a lock file"
    )
    return parser


def _add_cache_dir(parser: Parser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=argument(_folder),
        default=argparse.SUPPRESS,  # or a command's default would override one given before it
        metavar="DIR",
        help="the root to use instead of TMM_CACHE_DIR",
    )


def _add_removal(parser: Parser) -> None:
    parser.flag("-y", "--yes", text="remove without asking")
    parser.flag("--dry-run", text="list, and remove nothing")


def _add_filters(parser: Parser) -> None:
    group = parser.add_argument_group("filters", "GLOB is a name in which * and ? stand for any")
    group.add_argument("--gpu", metavar="GLOB", help="the GPU's folder, like nvidia-h200*")
    group.add_argument("--kernel", metavar="GLOB", help="the winning kernel")
    group.add_argument("--dtype", metavar="GLOB", help="dtype of the first operand")
    group.add_argument("--epilogue", metavar="GLOB")
    group.add_argument(
        "--shape",
        type=argument(filters.parse_shape),
        metavar="MxNxK",
        help="the sizes, each a number or *",
    )
    _add_age(group, "--older-than", "before", "made longer ago than this")
    _add_age(group, "--newer-than", "after", "made since this long ago")


def _add_age(parser: argparse._ActionsContainer, name: str, dest: str, text: str) -> None:
    text += ": 90m, 12h, 30d, 2w"
    parser.add_argument(name, dest=dest, type=argument(filters.parse_ago), metavar="AGE", help=text)


def _folder(text: str) -> Path:
    if not text:
        raise ValueError("found nothing, accepted is a folder")
    return Path(text)


if __name__ == "__main__":
    raise SystemExit(main())
