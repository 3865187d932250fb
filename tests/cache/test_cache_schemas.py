"""Records of the first schema are hints: listed, never an answer, gone once measured anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_builders import BLAS, ENVIRONMENT, GPU, SPLIT_K, problem, record
from tmm_cache import CLOCK, OLD_CLOCK, CacheStore, CandidateResult, TuningRecord
from tmm_cache.cli import main


def old_document(asked: TuningRecord) -> dict[str, Any]:
    """As the first version wrote it: every field spelled out, without a clock or a checksum."""
    return {
        "schema": 1,
        "problem": asked.problem,
        "winner": asked.winner,
        "candidates": [
            {
                "kernel": each.kernel,
                "version": each.version,
                "config": each.config,
                "status": each.status,
                "samples_us": list(each.samples_us),
                "error": each.error,
                "tolerance": each.tolerance,
                "workspace_bytes": each.workspace_bytes,
                "deterministic": each.deterministic,
                "batch_invariant": each.batch_invariant,
                "reason": each.reason,
            }
            for each in asked.candidates
        ],
        "created": asked.created,
        "tuning_seconds": asked.tuning_seconds,
        "note": asked.note,
    }


def write_old(store: CacheStore, asked: TuningRecord) -> Path:
    """Put an old record where the first version had it."""
    path = store.path(GPU, ENVIRONMENT, asked.problem)
    old = store.root / "v1" / path.relative_to(store.root / "v2")
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text(json.dumps(old_document(asked)))
    old.with_name("environment.json").write_text(json.dumps(ENVIRONMENT))
    return old


def test_an_old_record_is_listed_by_its_clock_and_answers_nothing(store: CacheStore) -> None:
    path = write_old(store, record())
    (entry,) = store.entries(GPU)
    assert (entry.path, entry.environment) == (path, ENVIRONMENT)
    assert entry.record == record(clock=OLD_CLOCK)
    assert entry.record.is_hint
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert store.found(GPU, ENVIRONMENT, problem()) is None
    assert store.locate(GPU, ENVIRONMENT, problem()) is None


def test_a_record_of_another_clock_in_the_new_folder_is_a_hint_too(
    store: CacheStore, tmp_path: Path
) -> None:
    store.save(GPU, ENVIRONMENT, record(clock="alone"))
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert [entry.record.clock for entry in store.entries()] == ["alone"]
    below = CacheStore(tmp_path / "below", [])
    below.save(GPU, ENVIRONMENT, record())
    assert CacheStore(layers=[below.root]).load(GPU, ENVIRONMENT, problem()) == record()


def test_both_schemas_are_listed_the_new_one_first(
    store: CacheStore, capsys: pytest.CaptureFixture[str]
) -> None:
    write_old(store, record())
    store.save(GPU, ENVIRONMENT, record())
    assert [entry.record.clock for entry in store.entries()] == [CLOCK, OLD_CLOCK]
    assert main(["verify"]) == 0
    assert "2 good records, 0 faults" in capsys.readouterr().err


@pytest.mark.parametrize("schema", [1, 2])
def test_the_clock_is_of_the_second_schema_alone(schema: int) -> None:
    document = old_document(record()) | {"schema": schema}
    if schema == 1:
        document["clock"] = CLOCK
    with pytest.raises(ValueError, match="clock"):
        TuningRecord.from_json(document)


def test_times_inside_the_bucket_are_kept_and_found() -> None:
    blas = replace(BLAS, inside_us={100: 18.5})
    split = replace(SPLIT_K, inside_us={100: 9.0, 77: 8.0})
    measured = record(candidates=(blas, split))
    document = json.loads(json.dumps(measured.to_json()))
    assert document["candidates"][1]["inside_us"] == {"77": 8.0, "100": 9.0}
    assert "inside_us" not in record().to_json()["candidates"][1]  # type: ignore[index,operator,call-overload]
    assert TuningRecord.from_json(document) == measured
    assert measured.measured_at == (77, 100, 128)
    assert record().measured_at == (128,)
    assert [split.us_at(m, 128) for m in (77, 100, 128, 99)] == [8.0, 9.0, 11.5, None]
    assert CandidateResult("k", "v", {}, "failed").us_at(128, 128) is None
