"""Records that a package ships are found, used, and verified on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeKernel
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, shipped_layers

import tmm_core
from tmm_core import dispatch
from tmm_core.registry.registry import Registry
from tmm_core.spec.device import version_of
from tmm_core.tools.cli import main
from tmm_core.tools.commands import verify
from tmm_core.verify.environment_faults import BUDGET_ENDED

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution that ships records; the folder they go to."""
    site = tmp_path / "site"
    info = site / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tmm_core.records]\nstranger = stranger_pkg\nghost = no_such_package\ndeep = json.tool\n"
    )
    records = site / "stranger_pkg" / "records"
    records.mkdir(parents=True)
    (site / "stranger_pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("TMM_SHIPPED_RECORDS")
    return records


def test_layers_of_packages_are_below_the_others(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_CACHE_PATH", "/site")
    layers = CacheStore().layers
    assert layers[:2] == (Path("/site"), package)
    # tmm's own, where it has any, come last.
    assert all("tmm_core" in str(layer) for layer in layers[2:])
    monkeypatch.setenv("TMM_SHIPPED_RECORDS", "0")
    assert shipped_layers() == ()
    assert CacheStore().layers == (Path("/site"),)


@pytest.mark.parametrize("damaged", [b"[other]\nno value\n", b"[other]\na = \xff\n", None])
def test_damaged_metadata_of_any_package_costs_no_shipped_records(
    damaged: bytes | None, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may be imported before that package is installed, or finds no backends by metadata."""
    if damaged is None:

        def unreadable(**_: Any) -> Any:
            raise OSError("stale file handle")

        monkeypatch.setattr(importlib.metadata, "entry_points", unreadable)
    else:
        info = package.parents[1] / "damaged-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
        (info / "entry_points.txt").write_bytes(damaged)
        importlib.invalidate_caches()
    assert all("tmm_core" in str(layer) for layer in CacheStore().layers)
    registry = Registry.from_environment({})
    with pytest.warns(tmm_core.TmmWarning, match="installed plugins cannot be listed"):
        assert "blas" in [kernel.name for kernel in registry.kernels()]


@pytest.mark.parametrize("metadata", ["Name: damaged\n", "", None])
def test_a_distribution_without_a_version_has_none(
    metadata: str | None, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = package.parents[1] / "damaged-1.0.dist-info"
    info.mkdir()
    if metadata is not None:
        (info / "METADATA").write_text(metadata)
    importlib.invalidate_caches()
    assert version_of("damaged") == ""


def tuned() -> tuple[tmm_core.Problem, Any]:
    a, b = torch.randn(24, 32), torch.randn(32, 16)
    problem = tmm_core.problem(a, b)
    (record,) = tmm_core.tune(problem)
    return problem, record


def test_shipped_records_are_chosen_by_and_checked(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    problem, record = tuned()
    file = str(tmp_path / "records.json.gz")
    for options in (["export", file], ["--cache-dir", str(package), "import", file]):
        command = [sys.executable, "-m", "tmm_cache.cli", *options]
        subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("TMM_CACHE_DIR", str(tmp_path / "another"))
    dispatch.default_dispatcher.cache_clear()
    found = dispatch.default_dispatcher().record(problem)
    assert found is not None
    shipped = found[1]
    assert shipped.best.median_us == pytest.approx(record.best.median_us)
    assert all(len(c.samples_us) <= 3 for c in shipped.candidates)

    assert main(["verify", "--device", "cpu", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert (document["status"], document["kernel"]) == ("blas", "blas")
    assert document["error"] < 1e-4

    # A kernel that is no longer the one that was measured.
    (path,) = package.glob("v2/*/*/*[0-9a-f].json")
    changed = json.loads(path.read_text())
    for candidate in changed["candidates"]:
        candidate["version"] = "2"
    del changed["checksum"]  # A user who edits a record has to do the same.
    path.write_text(json.dumps(changed))
    assert main(["verify", "--device", "cpu", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["status"] == "stale"


@pytest.mark.parametrize(("fault", "status"), [("wrong", "wrong"), ("raises", "failed")])
@pytest.mark.slow
def test_a_faulty_shipped_winner_fails_the_check(
    fault: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, record = tuned()

    def spoil(out: torch.Tensor) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("illegal address")
        return out.add_(1)

    bad = FakeKernel("bad", spoil=spoil)
    monkeypatch.setattr(verify, "_kernel", lambda record: bad)
    best = record.best
    config = bad.default_config(problem).to_json()
    candidates = list(record.candidates)
    candidates[record.winner] = revised(best, kernel="bad", config=config)
    worse = revised(record, candidates=tuple(candidates))
    device = problem.device
    entry = CacheStore().summary(device.gpu, device.environment, worse)
    (document,) = verify.verified([entry], CPU)
    assert document["status"] == status, document


def test_records_that_ship_with_tmm_are_whole() -> None:
    folder = ROOT / "tmm_core" / "records"
    if not folder.is_dir():
        pytest.skip("this tree ships none")
    command = [sys.executable, "-m", "tmm_cache.cli", "--cache-dir", str(folder), "verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_records_that_ship_with_tmm_are_of_its_kernels() -> None:
    """Records of a changed kernel are useless: each user measures it again."""
    store = CacheStore(ROOT / "tmm_core" / "records", layers=())
    present = {info.name: info.version for info in tmm_core.kernels()}
    records = [entry.record for entry in store.summaries()]
    if not records:
        pytest.skip("this tree ships none")
    changed = {
        candidate.kernel
        for record in records
        for candidate in record.candidates
        if present.get(candidate.kernel) != candidate.version
    }
    assert not changed, (
        f"tmm_core/records was measured with other versions of {', '.join(sorted(changed))}: "
        "measure again (benchmarks/README.md, Records that ship) or remove them"
    )


def test_no_shipped_record_was_ended_by_its_budget() -> None:
    """Where BLAS alone was timed, no kernel was left out."""
    ended = []
    for path in sorted((ROOT / "tmm_core/records").rglob("*.json")):
        results = json.loads(path.read_text()).get("candidates", ())
        timed = {result["kernel"] for result in results if result.get("samples_us")}
        if timed == {"blas"} and any(result.get("reason") == BUDGET_ENDED for result in results):
            ended.append(path.name)
    assert not ended
