"""Each call on a file fails once, one after the other. Acknowledged records read back whole, with
at most one warning."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from cache_builders import (
    BOUND_AT_IMPORT,
    ENVIRONMENT,
    GPU,
    OLDER_ENVIRONMENT,
    mark_of,
    problem,
    record,
)
from faulty_fs import CODES, Faults, How, dying, faulty
from msgspec.structs import replace
from tmm_cache import (
    CacheStore,
    CacheWarning,
    CandidateResult,
    TuningRecord,
    cache_errors,
    digest,
    files,
)
from tmm_cache.cli import main
from tmm_cache.paths import LOCK_NAME
from tmm_cache.size_limits import evict
from tmm_cache.transport import Transport

Acknowledge: TypeAlias = Callable[[object], None]
Scenario: TypeAlias = Callable[[Path, Acknowledge], None]

#: M of the problems that exist beforehand; each scenario adds, replaces or removes some of them.
BEFORE = (1, 2, 3)
#: And of those in an older environment, with the days since their last use.
OLDER = {8: 90, 9: 80}
DAY = 86400
#: A kernel that only the other cache has.
THEIRS = CandidateResult("theirs", "1", {}, "slow", (99.0,))


def prepare(folder: Path) -> Path:
    """A root with records, an older environment, a miss, a left-over file and a lock file of its
    first record; another root, and an export of it."""
    root = folder / "root"
    store = CacheStore(root, [])
    for m in BEFORE:
        store.save(GPU, ENVIRONMENT, record(problem(m=m), mark="before"))
        age(store.path(GPU, ENVIRONMENT, problem(m=m)), 10 - m)
        if m == BEFORE[0]:
            assert main(["--cache-dir", str(root), "freeze"]) == 0
    for m, days in OLDER.items():
        store.save(GPU, OLDER_ENVIRONMENT, record(problem(m=m), created="2025-01-01T00:00:00Z"))
        age(store.path(GPU, OLDER_ENVIRONMENT, problem(m=m)), days)
    store.log_miss(GPU, ENVIRONMENT, problem(m=7))
    left = store.path(GPU, ENVIRONMENT, problem()).parent / f"{'0' * 16}.json.99999999-0a0b0c0d.tmp"
    left.write_text("{")
    age(left, 2)
    other = CacheStore(folder / "other", [])
    for m in (2, 4, 5):
        new = record(problem(m=m), created="2026-02-02T00:00:00Z", mark="imported")
        other.save(GPU, ENVIRONMENT, replace(new, candidates=(*new.candidates, THEIRS)))
    assert main(["--cache-dir", str(other.root), "export", str(folder / "records.json")]) == 0
    return root


def age(path: Path, days: float) -> None:
    moment = path.stat().st_mtime - days * DAY
    os.utime(path, (moment, moment))


def save(root: Path, acknowledge: Acknowledge) -> None:
    """A problem that is new and one that is tuned again, as the dispatcher does it."""
    store = CacheStore(root, [])
    for m in (2, 6):
        with store.lock(GPU, ENVIRONMENT, problem(m=m), timeout=1) as mine:
            assert mine
            store.load(GPU, ENVIRONMENT, problem(m=m))
            new = record(problem(m=m), mark="saved")
            if store.save(GPU, ENVIRONMENT, new) is not None:
                acknowledge(f"{m}=saved")
            # This process answers with its own tuning, for any state of the disk.
            assert store.load(GPU, ENVIRONMENT, problem(m=m)) in (new, None)
    store.log_miss(GPU, ENVIRONMENT, problem(m=9))


def import_(root: Path, acknowledge: Acknowledge) -> None:
    status = main(["--cache-dir", str(root), "import", str(root.parent / "records.json")])
    assert status in (0, 1, 2)
    if status == 0:
        for m in (2, 4, 5):
            acknowledge(f"{m}=imported")


def clear(root: Path, acknowledge: Acknowledge) -> None:
    assert main(["--cache-dir", str(root), "clear", "-y", digest(problem(m=3))]) in (0, 1, 2)
    acknowledge("3=gone")


def eviction(root: Path, acknowledge: Acknowledge) -> None:
    size = len(files.record_bytes(record(problem(m=1), mark="before")))
    evict(root, int(2.9 * size), lambda path: False)  # of five, two fit, with the note of a miss
    for m in (*OLDER, 1, 2):  # in this order, the last where one of the others can't be removed
        acknowledge(f"{m}=gone")


def freeze(root: Path, acknowledge: Acknowledge) -> None:
    status = main(["--cache-dir", str(root), "freeze"])
    assert status in (0, 1, 2)
    if status == 0:
        acknowledge("lock=whole")


SCENARIOS: dict[str, Scenario] = {
    "save": save,
    "import": import_,
    "clear": clear,
    "evict": eviction,
    "freeze": freeze,
}
#: A scenario has some hundred calls; past this many it would not end.
MOST_CALLS = 1500


def stride(name: str, n: int, how: How) -> int:
    """Every call of a save fails once. In scenarios that are rarer or take longer, a sample of the
    calls fails; `endurance.py` covers all."""
    if os.environ.get("TMM_ENDURANCE") or (name, how) == ("save", "fails"):
        return 1
    return 1 + n % 3 if name in ("save", "evict") else 4 + n % 3


def check(name: str, root: Path, messages: list[str]) -> None:
    """Check that earlier and acknowledged records read back, and that every file is whole."""
    gone = {text.split("=")[0] for text in messages if text.endswith("=gone")}
    new = dict(text.split("=") for text in messages if not text.endswith("=gone"))
    cache_errors._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        fresh = CacheStore(root, [])
        for m in BEFORE:
            found = fresh.load(GPU, ENVIRONMENT, problem(m=m))
            if found is None:
                assert str(m) in gone
                continue
            assert mark_of(found) in ("before", "saved", "imported")
            assert found.problem == problem(m=m)
        frozen = new.pop("lock", None)
        for m, what in new.items():
            found = fresh.load(GPU, ENVIRONMENT, problem(m=int(m)))
            assert found is not None, f"{m} was acknowledged and is lost"
            assert mark_of(found) == what
        for entry in fresh.summaries():
            mine = record(mark=mark_of(entry.record))
            theirs = replace(mine, candidates=(*mine.candidates, THEIRS)).thinned()
            assert entry.record.candidates in (mine.candidates, theirs.candidates)
        locked = [record for _, _, record in Transport(root / LOCK_NAME).records()]
        assert all(isinstance(each, TuningRecord) for each in locked)
        assert frozen is None or len(locked) == len(BEFORE) + len(OLDER)
        for path in root.rglob("*.json"):
            assert not isinstance(files.read_file(path), files.Fault)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMM_SHIPPED_RECORDS", "0")
        prepare(folder)
    return folder


def restored(prepared: Path, folder: Path) -> Path:
    """A copy with the times of the files, which tests of age need."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder)
    return folder / "root"


@pytest.mark.parametrize("how", ["fails", "breaks", "torn"])
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.slow(quick=6)
@BOUND_AT_IMPORT
def test_a_fault_at_any_call_loses_nothing(
    name: str, how: How, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults, n = run_faults(name, how, prepared, tmp_path / "copy")
    assert n > 10
    assert sum(faults.values()) > 5
    capsys.readouterr()


def run_faults(name: str, how: How, prepared: Path, copy: Path) -> tuple[dict[str, int], int]:
    """Return how often each call failed, and the number of calls."""
    counted: dict[str, int] = {}
    n = 1
    while n < MOST_CALLS:
        root = restored(prepared, copy)
        messages: list[str] = []
        cache_errors._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with faulty(root, n, CODES[n % len(CODES)], how) as faults:
                SCENARIOS[name](root, lambda what, messages=messages: messages.append(str(what)))
        texts = [str(warning.message) for warning in caught]
        # A disk that breaks for good costs two warnings at most: for a file on it, and for the
        # root.
        assert len(texts) <= 1 + (how == "breaks"), (n, faults.hit, texts)
        assert sum(text.startswith(f"{root}: ") for text in texts) <= 1
        check(name, root, messages)
        if not faults.hit:
            assert messages
            return counted, n
        counted[faults.hit[0]] = counted.get(faults.hit[0], 0) + 1
        n += stride(name, n, how)
    raise AssertionError(f"{name} met a fault at every call")


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.slow
def test_a_death_at_any_call_loses_nothing_that_was_acknowledged(
    name: str, prepared: Path, tmp_path: Path
) -> None:
    assert run_deaths(name, prepared, tmp_path / "copy") > 5


def run_deaths(name: str, prepared: Path, copy: Path) -> int:
    """Return the number of deaths."""
    n, deaths = 1, 0
    while n < MOST_CALLS:
        root = restored(prepared, copy)
        cache_errors._warned.clear()
        died, messages = dying(
            root, n, lambda acknowledge, root=root: quiet(name, root, acknowledge)
        )
        if name in ("clear", "evict"):
            messages = [
                *messages,
                *{"clear": ["3=gone"], "evict": ["1=gone", "8=gone"]}.get(name, []),
            ]
        check(name, root, messages)
        # Neither a lock nor a half-written file blocks the next process.
        after = CacheStore(root, [])
        with after.lock(GPU, ENVIRONMENT, problem(m=2), timeout=0) as mine:
            assert mine
            assert after.save(GPU, ENVIRONMENT, record(problem(m=2), mark="after")) is not None
        if not died:
            return deaths
        deaths += 1
        n += stride(name, n, "dies")
    raise AssertionError(f"{name} died at every call")


def quiet(name: str, root: Path, acknowledge: Acknowledge) -> None:
    """Run the scenario in a child process, without its output."""
    void = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(void, stream)
    SCENARIOS[name](root, acknowledge)


def test_injected_faults_take_effect(prepared: Path, tmp_path: Path) -> None:
    """The layer of faults works: a write that should fail fails, and a torn write is torn."""
    root = restored(prepared, tmp_path / "copy")
    path = root / "file"
    with faulty(root, 2, how="torn") as faults:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError):
            os.write(handle, b"0123456789")
    os.close(handle)
    assert faults.hit == ["write"]
    assert path.read_bytes() == b"01234"
    with faulty(root, 1) as faults:
        (tmp_path / "elsewhere").write_text("counts for nothing")
    assert isinstance(faults, Faults)
    assert (faults.calls, faults.hit) == (0, [])


def test_output_of_a_process_before_its_death_is_received(tmp_path: Path) -> None:
    def scenario(acknowledge: Acknowledge) -> None:
        acknowledge("before")
        os.listdir(tmp_path)
        acknowledge("after")

    assert dying(tmp_path, 1, scenario) == (True, ["before"])
    assert dying(tmp_path, 2, scenario) == (False, ["before", "after"])
