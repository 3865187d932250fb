"""The `tmm-cache` command: its options and exit statuses.

It maintains the cache on machines without a GPU and in images without torch, so it imports neither
torch nor kernels and starts fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from tmm_base.console import DONE, MISTAKE, Parser, argument, guarded, warnings_as_notes
from tmm_base.tmm import version

from tmm_cache.cache_errors import CacheWarning
from tmm_cache.commands import clear, show, transfer
from tmm_cache.paths import is_nowhere
from tmm_cache.store import CacheStore

_PROGRAM: Final = "tmm-cache"

Command: TypeAlias = Callable[[CacheStore, argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if done, 1 if faults were found or left undone, 2 for bad
    usage."""
    return guarded(_PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.run is None:
        parser.print_help()
        return DONE
    run: Command = options.run
    with warnings_as_notes(CacheWarning):
        store = CacheStore(options.cache_dir)
        if is_nowhere(store.root):  # already reported
            return MISTAKE
        return run(store, options)


def _parser() -> Parser:
    parser = Parser(
        prog=_PROGRAM,
        description="Manage tmm's tuning records.",
        epilog="The root is TMM_CACHE_DIR or the platform's cache folder; below it are the "
        "read-only layers that TMM_CACHE_PATH lists and those that packages ship.",
    )
    _add_cache_dir(parser)
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {version()}")
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

    text = "list own records, or print one in full"
    listing = add("show", show.show, text, Parser.add_json, _add_record)
    listing.flag("--all", text="list the records of the layers too")

    removal = add("clear", clear.clear, "remove own records, all or one", _add_record)
    removal.flag("-y", "--yes", text="remove them; without it they are listed")

    add("verify", show.verify, "read every file and print each fault", Parser.add_json)

    text = "write own records to one file, without most of their samples"
    export = add("export", transfer.export, text)
    export.add_argument("file", type=Path, metavar="FILE", help="compressed if it ends in .gz")

    import_ = add("import", transfer.import_, "add the records of such a file to your own")
    import_.add_argument("file", type=Path, metavar="FILE", help="a file that export wrote")
    import_.flag("--force", text="overwrite newer records too")

    text = "write the records of the root and its layers to the lock file, which alone answers "
    freeze = add("freeze", transfer.freeze, f"{text}under TMM_REQUIRE_LOCKED=1")
    freeze.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="instead of TMM_LOCK_FILE or tmm.lock.json in the root",
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


def _add_record(parser: Parser) -> None:
    parser.add_argument("record", nargs="?", help="beginning of a record's digest")


def _folder(text: str) -> Path:
    if not text:
        raise ValueError("found nothing, accepted is a folder")
    return Path(text)


if __name__ == "__main__":
    raise SystemExit(main())
