"""A list reads heads of files: the same records as by reading all, and no more than that."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, SPLIT_K, problem, record, warned
from tmm_cache import CacheStore, scan
from tmm_cache.header import HEADER_BYTES, Header, read_header
from tmm_cache.record import TuningRecord


def test_summaries_say_in_brief_what_entries_say(
    store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = CacheStore(tmp_path / "below", [])
    for m in (3, 1, 2):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    below.save("nvidia-a100", ENVIRONMENT, record(problem(m=9)))
    store = CacheStore(layers=[below.root])
    store.hold(GPU, ENVIRONMENT, record(problem(m=2), mark="held", winner=0))
    entries = list(store.summaries(full=True))
    with monkeypatch.context() as patch:
        patch.setattr(scan, "read_record", lambda path, _: pytest.fail("read in full"))
        summaries = list(store.summaries())
        assert [each.path.name for each in store.summaries("nvidia-a100")] == [
            entries[-1].path.name
        ]
    assert summaries == entries
    assert [each.load() for each in summaries] == [entry.record for entry in entries]
    assert summaries[0].problem["m"] == 2
    assert summaries[0].header.kernel == "blas"


def test_the_winner_in_the_head_is_the_winner(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    head = read_header(str(path))
    assert head == Header.of(record())
    assert head is not None
    assert (head.kernel, head.config) == (SPLIT_K.kernel, SPLIT_K.config)
    assert (head.us, head.blas_us) == (11.5, 21.0)


def test_a_file_without_a_head_is_read_in_full(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    document = json.loads(path.read_text())
    del document["checksum"], document["best"]
    path.write_text(json.dumps(dict(reversed(document.items()))))
    (summary,) = store.summaries()
    assert summary.header == Header.of(record())


def test_a_record_that_is_gone_or_damaged_when_its_turn_comes_is_none(store: CacheStore) -> None:
    paths = [store.save(GPU, ENVIRONMENT, record(problem(m=m))) for m in (1, 2)]
    summaries = list(store.summaries())
    assert None not in paths
    first, second = sorted(path for path in paths if path is not None)
    first.unlink()
    second.write_text(second.read_text()[:-20])
    with warned(f"{second}: is not a valid record"):
        assert [summary.load() for summary in summaries] == [None, None]


def test_a_broken_file_is_a_fault_and_the_rest_is_listed(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record(problem(m=1)))
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    path.write_text("{")
    with warned("is not a valid record"):
        assert [summary.problem["m"] for summary in store.summaries()] == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", 3),
        ("schema", None),
        ("problem", []),
        ("problem", problem() | {"m": "64"}),
        ("problem", problem() | {"m": None}),
        ("problem", problem() | {"m": 10**400}),
        ("problem", problem() | {"x": "y" * HEADER_BYTES}),
        ("problem", [[[]]] * 400),
        ("clock", 7),
        ("best", None),
        ("best", {}),
        ("best", {"kernel": 1, "config": {}, "us": 1.0, "blas_us": None}),
        ("best", {"kernel": "k", "config": [], "us": 1.0, "blas_us": None}),
        ("best", {"kernel": "k", "config": {}, "us": "1", "blas_us": None}),
        ("best", {"kernel": "k", "config": {}, "us": -1.0, "blas_us": None}),
        ("best", {"kernel": "k", "config": {}, "us": 1.0, "blas_us": None, "more": 1}),
    ],
)
def test_nonsense_is_no_head(store: CacheStore, name: str, value: Any) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    document = json.loads(path.read_text())
    document[name] = value
    path.write_text(json.dumps(document))
    assert read_header(str(path)) is None


def test_what_is_no_file_of_a_record_is_no_head(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep").write_bytes(b"[" * 4000 + b'"candidates": [')
    (tmp_path / "start").write_bytes(b'"candidates": [')
    (tmp_path / "infinite").write_bytes(b'{"best": 1e999, "candidates": [')
    for path in [*tmp_path.iterdir(), tmp_path, tmp_path / "absent"]:
        assert read_header(str(path)) is None


def test_a_summary_of_what_was_saved_is_the_one_that_is_listed(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record())
    made = store.summary(GPU, ENVIRONMENT, record())
    assert [made] == list(store.summaries())
    assert isinstance(made.load(), TuningRecord)


@pytest.mark.parametrize(
    ("us", "blas_us", "speedup"),
    [
        (2.0, 5.0, 2.5),
        (0.0, 5.0, None),
        (None, 5.0, None),
        (2.0, None, None),
        (1e-300, 1e300, None),
    ],
)
def test_a_winner_that_was_not_timed_has_no_speedup(
    us: float | None, blas_us: float | None, speedup: float | None
) -> None:
    assert Header({}, "k", {}, us, blas_us).speedup == speedup
