"""Put each mutant into a copy of the tree and see that its tests fail.

    python tests/mutants/run.py [names …]

A name is a mutant's, or the start of some. Ends with 1 if a mutant passed its tests or no longer
applies, and with 2 if the tests fail on the unchanged tree.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch  # noqa: F401 (imported once, before processes are forked)
from catalogue import MUTANTS
from mutant import Mutant, place

ROOT = Path(__file__).parents[2]

#: Files and folders that the tests need.
COPIED = (
    "tmm_core", "plugins", "cache", "tests", "examples", "benchmarks", "pyproject.toml", "README.md",
)  # fmt: skip

#: Seconds that each of a mutant's tests may take: one that hangs is caught too.
LIMIT = 300


def copy_tree(to: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignored)
        else:
            shutil.copy2(source, to / name)


@contextlib.contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The tree with the mutant in it.

    Raises:
        ValueError: The text that it replaces does not occur exactly once.
    """
    path = place(mutant, tree)
    before, when = path.read_text(), path.stat().st_mtime
    path.write_text(before.replace(mutant.old, mutant.new))
    # Python keeps bytecode by second and size: no two edits of a file may share them.
    os.utime(path, (when, when + 2 + MUTANTS.index(mutant)))
    try:
        yield
    finally:
        path.write_text(before)
        os.utime(path, (when, when))


def _test(tree: Path, tests: Sequence[str], printed: Path) -> None:
    """In a separate process: import modules of ``tree`` before installed ones, and end with
    pytest's exit code."""
    os.chdir(tree)
    paths = [str(tree / folder) for folder in ("plugins", "cache", ".")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:0] = paths
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--slow", "0/1", *tests])
    import tmm_core

    if not str(tmm_core.__file__).startswith(str(tree)):
        print("what is installed was tested, not the copy of the tree")
        code = pytest.ExitCode.INTERNAL_ERROR
    sys.stdout.flush()
    os._exit(code)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Pytest's exit code in ``tree``, and the last line it printed; 1 where it hangs."""
    printed = tree / "printed.txt"
    # Forked, so that torch is imported once for all.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_test, args=(tree, tests, printed))
    process.start()
    process.join(LIMIT * len(tests))
    if process.exitcode is None:
        process.kill()
        process.join()
        return 1, "did not end"
    lines = printed.read_text(errors="replace").strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.exitcode, (failed or lines or [""])[-1]


def verdict(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """``caught``, ``passed`` or ``out of date``, and what says so."""
    try:
        with applied(mutant, tree):
            code, last = run_tests(tree, mutant.tests)
    except ValueError as error:
        return "out of date", str(error)
    if code in (0, 5):  # 5: nothing was collected
        return "passed", f"{mutant.why}; {last}"
    if code != 1:
        return "out of date", f"pytest ended with {code}: {last}"
    return "caught", last


def main(names: Sequence[str]) -> int:
    chosen = [m for m in MUTANTS if not names or any(m.name.startswith(n) for n in names)]
    if not chosen:
        print(f"no mutant begins with {' or '.join(names)}")
        return 2
    counts = {"caught": 0, "passed": 0, "out of date": 0}
    with tempfile.TemporaryDirectory(prefix="tmm-mutants-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        code, last = run_tests(tree, tests)
        if code:
            print(f"the tests do not pass without any mutant: {last}")
            return 2
        for mutant in chosen:
            started = time.monotonic()
            word, message = verdict(mutant, tree)
            counts[word] += 1
            took = time.monotonic() - started
            print(f"{word:11}  {mutant.name:44}  {took:4.0f} s  {message}"[:200], flush=True)
    total = len(chosen)
    share = 100 * counts["caught"] / total
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{total} mutants: {summary}; {share:.0f} % caught")
    return 0 if counts["caught"] == total else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
