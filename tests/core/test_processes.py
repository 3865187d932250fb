"""Two processes and one problem; a process that dies in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tmm_cache import CacheStore

HERE = Path(__file__).parent.parent

TUNE = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from fakes import FakeBlas, FakeKernel, dispatcher, problem, settings

class Slow(FakeKernel):
    def bind(self, problem, config):
        time.sleep(float(sys.argv[2]))
        return super().bind(problem, config)

times = {{"slow": 5.0, "blas": 10.0}}
d, timer = dispatcher(FakeBlas(), Slow("slow"), times=times, root=Path(sys.argv[1]))
for n in range(int(sys.argv[3])):
    choice = d.choose(problem(n=32 + n), settings())
    print(choice.candidate.kernel.name, choice.origin, len(timer.measured), flush=True)
"""


def start(root: Path, delay: float = 0.5, count: int = 1) -> subprocess.Popen[str]:
    # A kernel in no file would be another one in each process.
    program = root / "program.py"
    program.write_text(TUNE.format(here=str(HERE)))
    return subprocess.Popen(
        [sys.executable, str(program), str(root), str(delay), str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_tune_a_problem_once(tmp_path: Path) -> None:
    lines = []
    for process in [start(tmp_path), start(tmp_path)]:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        lines.append(out.split())
    # One tunes. The other is answered by BLAS meanwhile, or finds the record where it starts late.
    lines.sort(key=lambda line: int(line[2]))
    assert lines[1][:2] == ["slow", "tuned"]
    assert lines[0] in (["blas", "fallback", "0"], ["slow", "cache", "0"])
    # Later, both have the record.
    process = start(tmp_path)
    out, _ = process.communicate(timeout=120)
    assert out.split() == ["slow", "cache", "0"]


@pytest.mark.slow
def test_a_killed_tune_loses_one_problem(tmp_path: Path) -> None:
    process = start(tmp_path, delay=0.05, count=200)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    store = CacheStore(tmp_path)
    records = list(store.summaries())  # a warning would be an error
    assert len(records) >= 3
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
    again = start(tmp_path, delay=0.0, count=3)
    out, _ = again.communicate(timeout=60)
    assert [line.split()[1] for line in out.splitlines()] == ["cache"] * 3


WORKERS = """
import json, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
sys.path.insert(0, {here!r})
import tmm_core
from tmm_core import dispatch
from fakes import FakeKernel, plugin

class Products(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        x = torch.full((2 + i, 3), float(i))
        return tmm_core.matmul(x, torch.ones(3, 4), epilogue="relu").sum()

def main():
    tmm_core.matmul(torch.ones(2, 3), torch.ones(3, 4))
    held, release = threading.Event(), threading.Event()

    class Stuck(FakeKernel):
        def bind(self, problem, config):
            held.set()
            assert release.wait(60)
            return super().bind(problem, config)

    # A thread that measures while the main one forks: its locks are held in the children too.
    dispatch.default_dispatcher().registry.register(plugin(Stuck("stuck")), "stuck")
    operands = torch.ones(64, 64), torch.ones(64, 64)
    thread = threading.Thread(target=lambda: tmm_core.matmul(*operands))
    thread.start()
    assert held.wait(60)
    with tmm_core.override(disable={{"stuck"}}):
        loader = DataLoader(
            Products(), batch_size=None, num_workers={workers}, multiprocessing_context={how!r},
            timeout=60
        )
        got = [float(y) for y in loader]
    release.set()
    thread.join()
    print(json.dumps(got))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("how", "workers"), [("fork", 2), ("spawn", 1)])
@pytest.mark.slow
def test_data_loader_workers(how: str, workers: int, tmp_path: Path) -> None:
    """Values come out of workers, and the process ends. A spawned worker takes seconds to import
    torch: one is enough."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS.format(here=str(HERE), how=how, workers=workers))
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [3.0 * i * 4 * (2 + i) for i in range(6)]
