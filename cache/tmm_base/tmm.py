"""The start of the `tmm` command: version, help and mistyped commands, without an import of torch.

Importing `tmm_core` imports torch, which takes a second. Only a command that exists needs them;
`tmm_core.tools.cli` adds its options and runs it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Final

from tmm_base.console import DONE, Parser, guarded

#: The commands, with a line of help for each.
COMMANDS: Final = {
    "kernels": "list kernels, their origin, and why some are not used",
    "explain": "show which kernel a call would run, and why",
    "tune": "measure problems ahead of time and store the winners",
    "bench": "time the chosen kernels against torch, side by side",
    "verify": "check every record that answers here against a reference",
    "doctor": "check that this machine is set up for tmm",
    "misses": "list problems met while tuning was forbidden",
    "new-plugin": "write a package of one kernel and one epilogue to start from",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in (*COMMANDS, "--"):
        run: Callable[[Sequence[str]], int] = importlib.import_module("tmm_core.tools.cli").main
        return run(arguments)
    return guarded("tmm", lambda: _answer(arguments))


def _answer(arguments: Sequence[str]) -> int:
    parser, _ = parsers()
    parser.parse_args(arguments)
    parser.print_help()
    return DONE


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parsers of the command line and of each command, without its options."""
    parser = Parser(prog="tmm", description="Which matmul kernel runs, why, and how fast.")
    parser.add_argument("--version", action="version", version=f"tmm {version()}")
    commands = parser.add_subparsers(metavar="command", dest="command", parser_class=Parser)
    return parser, {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, text in COMMANDS.items()
    }


def version() -> str:
    """tmm's version, read from its own module without importing the package."""
    package = find_spec("tmm_core")
    spec = package and PathFinder.find_spec("version", package.submodule_search_locations)
    if not (spec and spec.loader):
        return "of unknown version: tmm_core is not installed"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


if __name__ == "__main__":
    raise SystemExit(main())
