"""Put each mutant into a copy of the tree and see that its tests fail.

    python tests/mutants/run.py [names …]

A name is a mutant's, or the start of some. Ends with 1 where a mutant passed its tests or no longer
applies, and with 2 where the tests fail on the tree as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from catalogue import MUTANTS
from mutant import Mutant, place

ROOT = Path(__file__).parents[2]

#: What the tests need of the tree; the rest is measurements.
COPIED = ("tmm_core", "plugins", "cache", "tests", "examples", "pyproject.toml", "README.md")

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
        ValueError: What it replaces is not there once.
    """
    path = place(mutant, tree)
    before = path.read_text()
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(before)


def environment(tree: Path) -> dict[str, str]:
    """Of a process that imports what is in ``tree``, before what is installed."""
    paths = [str(tree / folder) for folder in (".", "plugins", "cache")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # Two edits of one second and one size would be one to Python's cache.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Pytest's exit code in ``tree``, and the last line it printed; 1 where it hangs."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment(tree),
            capture_output=True,
            text=True,
            timeout=LIMIT * len(tests),
        )
    except subprocess.TimeoutExpired:
        return 1, "did not end"
    lines = (done.stdout + done.stderr).strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or lines or [""])[-1]


def imports_from(tree: Path) -> bool:
    """Whether tests in ``tree`` would test it, and not what is installed."""
    code = "import tmm_core, tmm_cache; print(tmm_core.__file__, tmm_cache.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    return done.returncode == 0 and all(p.startswith(str(tree)) for p in done.stdout.split())


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
        if not imports_from(tree):
            print("the copy of the tree is not what its tests would import")
            return 2
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        code, last = run_tests(tree, tests)
        if code:
            print(f"the tests do not pass without any mutant: {last}")
            return 2
        for mutant in chosen:
            started = time.monotonic()
            word, said = verdict(mutant, tree)
            counts[word] += 1
            took = time.monotonic() - started
            print(f"{word:11}  {mutant.name:44}  {took:4.0f} s  {said}"[:200], flush=True)
    total = len(chosen)
    share = 100 * counts["caught"] / total
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{total} mutants: {summary}; {share:.0f} % caught")
    return 0 if counts["caught"] == total else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
