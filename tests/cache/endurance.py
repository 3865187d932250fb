"""Runs the tests' fault injection for minutes, and prints the counts: `docs/reliability.md`.

    python tests/cache/endurance.py --seconds 120 > benchmarks/results/reliability.md

It kills writers with SIGKILL. Every file call of every operation fails, or kills the process.
Records, archives and command lines are mutated. The script stops at the first loss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ |= {"TMM_ENDURANCE": "1", "TMM_SHIPPED_RECORDS": "0"}

from cache_builders import ENVIRONMENT, GPU, child, mark_of, problem  # noqa: E402  # found by the path
from tmm_cache import CacheStore, CacheWarning  # noqa: E402

#: Saves records and reports each acknowledged save, until it is killed.
WRITER = """
import itertools, os, sys
from cache_builders import *
from tmm_cache import CacheStore
store, number = CacheStore(), int(sys.argv[1])
for turn in itertools.count():
    m = number * 1000 + turn % 50
    if store.save(GPU, ENVIRONMENT, record(problem(m=m), mark=str(turn))) is not None:
        os.write(1, f"{m} {turn}\\n".encode())
"""
WRITERS = 4


def kill_writers(seconds: float, chance: random.Random) -> Counter[str]:
    """Kill writers at random moments; no record may be older than its last acknowledged save."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "root")
        store = CacheStore(root, [])
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            writers = [
                child("-c", WRITER, str(number), cache_dir=root, stderr=subprocess.DEVNULL)
                for number in range(WRITERS)
            ]
            # Wait until all writers have started, which takes a second or more.
            firsts = [writer.stdout.readline() for writer in writers if writer.stdout is not None]
            time.sleep(chance.uniform(0.05, 0.5))
            for writer in writers:
                writer.kill()
            for first, writer in zip(firsts, writers, strict=True):
                # `communicate` would lose the data that `readline` has buffered.
                assert writer.stdout is not None
                lines = first + writer.stdout.read()
                writer.communicate()
                newest = {m: int(turn) for m, turn in (line.split() for line in lines.splitlines())}
                counts["acknowledged saves"] += len(lines.splitlines())
                for m, turn in newest.items():
                    found = store.load(GPU, ENVIRONMENT, problem(m=int(m)))
                    assert found is not None, f"{m} is lost"
                    # The writer may have been killed between a save and its report.
                    assert int(mark_of(found) or 0) in (turn, turn + 50), (
                        f"{m} is {mark_of(found)} and not {turn}, which was acknowledged: "
                        f"{lines.splitlines()[:3]} … {lines.splitlines()[-3:]}"
                    )
                    counts["records read back"] += 1
            counts["writers killed"] += WRITERS
    return counts


def every_fault() -> Counter[str]:
    """Let each call of each operation fail, and let the process die at each call."""
    import test_cache_every_fault as faults

    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        prepared, copy = Path(name, "prepared"), Path(name, "copy")
        prepared.mkdir()
        faults.prepare(prepared)
        for scenario in faults.SCENARIOS:
            for how in ("fails", "breaks", "torn"):
                hit, _ = faults.run_faults(scenario, how, prepared, copy)
                counts[f"faults injected into {scenario}"] += sum(hit.values())
            counts[f"deaths in {scenario}"] += faults.run_deaths(scenario, prepared, copy)
    return counts


def fuzz(examples: int) -> Counter[str]:
    """Run the tests of mutations with more examples than in CI."""
    environ = {**os.environ, "TMM_FUZZ_EXAMPLES": str(examples)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / "test_cache_fuzz.py")], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    names = ("mutated documents", "mutated bytes", "mutated archives", "command lines")
    return Counter({**dict.fromkeys(names, examples), "command lines": 2 * examples})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time for killing writers")
    parser.add_argument("--examples", type=int, default=2000, help="mutations of each kind")
    parser.add_argument("--seed", type=int, default=20260131)
    options = parser.parse_args()
    start = time.monotonic()
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)  # a torn record would cause one
        counts += kill_writers(options.seconds, random.Random(options.seed))
    ignored = io.StringIO()
    with contextlib.redirect_stderr(ignored), contextlib.redirect_stdout(ignored):
        counts += every_fault()
    counts += fuzz(options.examples)
    print("# What was tried\n")
    print("`python tests/cache/endurance.py", end="")
    print(f" --seconds {options.seconds:g} --examples {options.examples} --seed {options.seed}`,")
    print(f"Python {platform.python_version()}, {platform.system()} {platform.release()},", end=" ")
    print(f"{time.monotonic() - start:.0f} s. Nothing acknowledged was lost, no record was torn,")
    print("nothing was written outside the root, no command ended in a traceback.\n")
    print("| tried | times |\n|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count:,} |")


if __name__ == "__main__":
    main()
