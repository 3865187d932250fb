"""A third party's plugin is built, installed, used and uninstalled.

Runs in an environment of its own. It has wheels of tmm and of the example, this environment's
torch, Triton and pytest, and no editable tmm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tmm-example-plugin"

#: Says what is installed, dispatches to the plugin, and leaves a record that it won.
WITH = """
import tmm_example
from tmm_cache import CacheStore, CandidateResult, TuningRecord

info = {kernel.name: kernel for kernel in tmm_core.kernels()}["example.gemv"]
assert (info.plugin, info.distribution, info.distribution_version) == (
    "example", "tmm-example-plugin", "0.3.1",
), info
assert info.disabled is None

expected = F.mish(x.double() @ w.double())
for arguments in ({}, {"kernel": "example.gemv"}, {"kernel": "triton.naive"}, {"kernel": "blas"}):
    y = tmm_core.matmul(x, w, epilogue="mish", **arguments)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
assert tmm_core.plan(x, w, kernel="example.gemv", epilogue="mish").kernel == "example.gemv"

from tmm_example.gemv import Gemv

gemv = Gemv()
assert gemv.version == info.version
document = problem.to_json()
won = CandidateResult(
    kernel=gemv.name,
    version=gemv.version,
    config=gemv.default_config(problem).to_json(),
    status="ok",
    samples_us=(1.0, 1.0, 1.0),
)
blas = {kernel.name: kernel for kernel in tmm_core.kernels()}["blas"]
second = CandidateResult("blas", blas.version, {"fused": False}, "ok", samples_us=(2.0, 2.0))
record = TuningRecord(document, 0, (won, second), "2026-01-31T12:00:00Z", 1.0)
device = problem.device
assert CacheStore().save(device.gpu, device.environment, record) is not None

chosen = tmm_core.explain(x, w)
assert (chosen.kernel, chosen.origin) == ("example.gemv", "cache"), str(chosen)
torch.testing.assert_close(tmm_core.matmul(x, w), x @ w)
"""

#: The same record; the best of the other kernels answers.
WITHOUT = """
import importlib.util
from tmm_core import UnknownNameError

assert importlib.util.find_spec("tmm_example") is None
names = [kernel.name for kernel in tmm_core.kernels()]
assert "example.gemv" not in names and "blas" in names, names
assert all(kernel.disabled is None for kernel in tmm_core.kernels())

chosen = tmm_core.explain(x, w)
assert chosen.record is not None and chosen.record.best.kernel == "blas"  # of those that are here
assert (chosen.kernel, chosen.origin) == ("blas", "cache"), str(chosen)
torch.testing.assert_close(tmm_core.matmul(x, w), x @ w)

for arguments in ({"kernel": "example.gemv"}, {"epilogue": "mish"}):
    try:
        tmm_core.matmul(x, w, **arguments)
    except UnknownNameError:
        continue
    raise AssertionError(f"{arguments} was accepted")
"""

COMMON = """
import sys, warnings
import torch, torch.nn.functional as F
import tmm_core

warnings.simplefilter("error")
assert tmm_core.__file__.startswith(sys.prefix), tmm_core.__file__
x = torch.linspace(-1, 1, 3 * 40).reshape(3, 40)
w = torch.linspace(2, -2, 40 * 33).reshape(40, 33)
problem = tmm_core.problem(x, w)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,  # not the repository, whose tmm_core python -c would find first
        env={**inherited, "TRITON_INTERPRET": "1", **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wheel(project: Path, folder: Path) -> Path:
    folder.mkdir()
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    run(*build, "--outdir", folder, project, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: Path) -> Path:
    """A fresh environment that sees what this one has installed, but for tmm."""
    venv.create(folder, symlinks=os.name != "nt")
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    libraries = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    # This environment may itself borrow torch from another one.
    libraries.append(Path(torch.__file__).parents[1])
    for library in dict.fromkeys(libraries):
        for entry in library.iterdir():
            ours = entry.name.startswith(("tmm", "_editable_impl_tmm"))
            if not ours and entry.suffix != ".pth" and not (borrowed / entry.name).exists():
                (borrowed / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = run(python, "-c", script, cwd=folder).strip()
    Path(site, "borrowed.pth").write_text(f"{borrowed}\n")
    return python


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="tmm's kernels run on Linux")
def test_a_plugin_is_installed_used_and_uninstalled(tmp_path: Path) -> None:
    for needed in ("build", "hatchling"):
        pytest.importorskip(needed)
    python = environment(tmp_path / "environment")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    wheels = [wheel(p, tmp_path / p.name) for p in (ROOT, EXAMPLE)]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels, cwd=tmp_path)

    run(python, "-c", COMMON + WITH, cwd=tmp_path)
    suite = run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "-c", os.devnull,
        "--rootdir", EXAMPLE, EXAMPLE / "tests",
        cwd=tmp_path, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
    )  # fmt: skip
    assert " passed" in suite

    run(*pip, "uninstall", "--quiet", "--yes", "tmm-example-plugin", cwd=tmp_path)
    run(python, "-c", COMMON + WITHOUT, cwd=tmp_path)
