"""A record survives a round trip through JSON exactly, and no other JSON passes for a record."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
from cache_builders import BLAS, FAILED, SPLIT_K, record
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tmm_cache import SCHEMA, CandidateResult, RecordError, TuningRecord
from tmm_cache.fields import parse
from tmm_cache.files import parse_stored

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FINITE_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
#: Names may not contain control characters.
PRINTABLE = st.characters(exclude_categories=["C", "Z"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**62), max_value=2**62)
    | st.text(PRINTABLE, max_size=20)
    | st.floats(allow_nan=False, allow_infinity=False)
)
NAMES = st.text(PRINTABLE, min_size=1, max_size=20)
CONFIGS = st.dictionaries(NAMES, SCALARS, max_size=4)
SIZES = st.integers(min_value=1, max_value=2**40 - 1)
PROBLEMS = st.builds(
    lambda others, m, n, k, batch: {**others, "m": m, "n": n, "k": k, "batch": batch},
    st.dictionaries(st.text(max_size=20), FINITE_JSON, max_size=4),
    *[SIZES] * 4,
)
MEASURES = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


def candidates(statuses: st.SearchStrategy[Any]) -> st.SearchStrategy[CandidateResult]:
    return st.builds(
        CandidateResult,
        kernel=NAMES,
        version=NAMES,
        config=CONFIGS,
        status=statuses,
        samples_us=st.lists(MEASURES, max_size=4).map(tuple),
        error=st.none() | MEASURES,
        tolerance=st.none() | MEASURES,
        workspace_bytes=st.integers(min_value=0, max_value=2**63 - 1),
        deterministic=st.booleans(),
        batch_invariant=st.booleans(),
        reason=st.none() | NAMES,
        inside_us=st.dictionaries(SIZES, MEASURES, max_size=3),
    )


@st.composite
def records(draw: st.DrawFn) -> TuningRecord:
    others = draw(
        st.lists(candidates(st.sampled_from(["ok", "slow", "wrong", "failed"])), max_size=3)
    )
    winner = draw(st.integers(min_value=0, max_value=len(others)))
    others.insert(winner, draw(candidates(st.just("ok"))))
    return TuningRecord(
        problem=draw(PROBLEMS),
        winner=winner,
        candidates=tuple(others),
        created=draw(
            st.datetimes().map(lambda moment: moment.isoformat(timespec="microseconds") + "Z")
        ),
        tuning_seconds=draw(MEASURES),
    )


@settings(deadline=None)
@given(records())
@pytest.mark.slow
def test_round_trip_through_text_is_exact(original: TuningRecord) -> None:
    text = json.dumps(original.to_json(), allow_nan=False)
    assert TuningRecord.from_json(json.loads(text)) == original


@settings(deadline=None)
@given(JSON_VALUES)
@example({"schema": SCHEMA})
@example({"schema": True})
@example([[[]]])
def test_other_json_values_raise_a_record_error(value: object) -> None:
    with pytest.raises(RecordError):
        TuningRecord.from_json(value)


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a document."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [above] + [path for key, item in inside for path in paths(item, (*above, key))]


@settings(deadline=None, max_examples=300)
@given(st.data())
@pytest.mark.slow
def test_a_record_with_one_value_replaced_is_refused_or_still_round_trips(
    data: st.DataObject,
) -> None:
    document: Any = record().to_json()
    path = data.draw(st.sampled_from(paths(document)))
    replacement = data.draw(JSON_VALUES)
    if path:
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = replacement
    else:
        document = replacement
    try:
        read = TuningRecord.from_json(document)
    except RecordError:
        return
    assert read.best.status == "ok"
    assert all(math.isfinite(sample) and sample >= 0 for sample in read.best.samples_us)
    assert TuningRecord.from_json(json.loads(json.dumps(read.to_json()))) == read


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 5000)
@example(b"\xff\xfe\x00")
@example(b"")
@example(b"1e999")
def test_arbitrary_bytes_raise_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_stored(data, "0" * 16)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("schema",), 3, r"schema: Expected `int` <= 2"),
        (("schema",), True, r"schema: Expected `int`, got `bool`"),
        (("schema",), "1", r"schema: Expected `int`, got `str`"),
        (("winner",), 5, r"winner: found 5 of 5 candidates"),
        (("winner",), -1, r"winner: Expected `int` >= 0"),
        (("winner",), True, r"winner: Expected `int`, got `bool`"),
        (("winner",), 1.0, r"winner: Expected `int`, got `float`"),
        (("winner",), 2, r"candidates\[2\]\.status: it won, and is not 'ok'"),
        (("candidates",), [], r"candidates: Expected `array` of length >= 1"),
        (("candidates",), {}, r"candidates: Expected `array`, got `object`"),
        (("candidates", 0), 7, r"candidates\[0\]: Expected `object`, got `int`"),
        (
            ("candidates", 0, "status"),
            "fast",
            r"candidates\[0\]\.status: Invalid enum value 'fast'",
        ),
        (
            ("candidates", 1, "samples_us", 2),
            -1.0,
            r"candidates\[1\]\.samples_us\[2\]: Expected `float` >= 0\.0",
        ),
        (
            ("candidates", 1, "samples_us", 0),
            math.nan,
            r"candidates\[1\]\.samples_us\[0\]: Expected `float` >= 0\.0",
        ),
        (
            ("candidates", 1, "samples_us", 0),
            math.inf,
            r"candidates\[1\]\.samples_us\[0\]: Expected `float` <= 1\.79",
        ),
        (
            ("candidates", 1, "samples_us", 0),
            10**400,
            r"candidates\[1\]\.samples_us\[0\]: ",
        ),
        pytest.param(
            ("candidates", 1, "samples_us", 0),
            10**5000,
            r"candidates\[1\]\.samples_us\[0\]: ",
            id="more digits than Python prints",
        ),
        (
            ("candidates", 1, "samples_us", 0),
            "12",
            r"candidates\[1\]\.samples_us\[0\]: Expected `float`, got `str`",
        ),
        (
            ("candidates", 1, "samples_us", 0),
            True,
            r"candidates\[1\]\.samples_us\[0\]: Expected `float`, got `bool`",
        ),
        (
            ("candidates", 1, "config"),
            [],
            r"candidates\[1\]\.config: Expected `object`, got `array`",
        ),
        (
            ("candidates", 1, "config"),
            {"x": math.nan},
            r"candidates\[1\]\.config\[\.\.\.\]: Expected `float` >= \-1\.79",
        ),
        (("candidates", 1, "error"), math.nan, r"candidates\[1\]\.error: Expected `float` >= 0\.0"),
        (
            ("candidates", 1, "workspace_bytes"),
            1.5,
            r"candidates\[1\]\.workspace_bytes: Expected `int`, got `float`",
        ),
        (
            ("candidates", 1, "workspace_bytes"),
            -1,
            r"candidates\[1\]\.workspace_bytes: Expected `int` >= 0",
        ),
        (
            ("candidates", 1, "deterministic"),
            1,
            r"candidates\[1\]\.deterministic: Expected `bool`, got `int`",
        ),
        (
            ("candidates", 1, "kernel"),
            "",
            r"candidates\[1\]\.kernel: Expected `str` of length >= 1",
        ),
        (
            ("candidates", 1, "version"),
            None,
            r"candidates\[1\]\.version: Expected `str`, got `null`",
        ),
        (
            ("candidates", 1, "reason"),
            3,
            r"candidates\[1\]\.reason: Expected `str \| null`, got `int`",
        ),
        (("problem",), None, r"problem: Expected `object`, got `null`"),
        (("tuning_seconds",), -0.5, r"tuning_seconds: Expected `float` >= 0\.0"),
        (("created",), "yesterday", r"created: Invalid RFC3339 encoded datetime"),
        (("created",), "2026-02-31T12:00:00Z", r"created: Invalid RFC3339 encoded datetime"),
        (("created",), "２026-01-31T12:00:00Z", r"created: Invalid RFC3339 encoded datetime"),
        (
            ("created",),
            "2026-01-31T12:00:00",
            r"created: Expected `datetime` with a timezone component",
        ),
        (
            ("candidates", 4, "reason"),
            "",
            r"candidates\[4\]\.reason: Expected `str` of length >= 1",
        ),
        (
            ("candidates", 4, "reason"),
            "x" * 5000,
            r"candidates\[4\]\.reason: Expected `str` of length <= 4096",
        ),
        (("note",), "mine", r"Object contains unknown field `note`"),
        (("problem", "m"), None, r"problem\.m: Expected `int`, got `null`"),
        (("problem", "m"), "128", r"problem\.m: Expected `int`, got `str`"),
        (("problem", "n"), 10**400, r"problem\.n: Expected `int` <= 1099511627775"),
        (("problem", "k"), 0, r"problem\.k: Expected `int` >= 1"),
        (("problem", "k"), 2**40, r"problem\.k: Expected `int` <= 1099511627775"),
        (("problem", "batch"), True, r"problem\.batch: Expected `int`, got `bool`"),
        (("problem", "batch"), 1.0, r"problem\.batch: Expected `int`, got `float`"),
        (("problem", "a", "dtype"), 10**400, r"problem: found a number or a text that is huge"),
        (
            ("problem", "a", "dtype"),
            "x" * 70_000,
            r"problem: found a number or a text that is huge",
        ),
        (("problem", "epilogue"), math.inf, r"problem: found a value that is not JSON "),
        (
            ("candidates", 0, "kernel"),
            "x" * 300,
            r"candidates\[0\]\.kernel: Expected `str` of length <= 256",
        ),
        (("candidates", 0, "kernel"), "x\n", r"candidates\[0\]: found 'x\\n', accepted is"),
        (
            ("candidates", 0, "version"),
            "\x1b[2J",
            r"candidates\[0\]: found '\\x1b\[2J', accepted is",
        ),
        (
            ("candidates", 0, "config"),
            {"tile": "a\x7f"},
            r"candidates\[0\]: found 'a\\x7f', accepted is",
        ),
        (
            ("candidates", 0, "config"),
            {"ti\nle": 1},
            r"candidates\[0\]: found 'ti\\nle', accepted is",
        ),
        (
            ("candidates", 0, "config", "fused"),
            [1],
            r"candidates\[0\]\.config\[\.\.\.\]: Expected `bool \| int \| float \| str",
        ),
        (
            ("candidates", 0, "config", "fused"),
            {},
            r"candidates\[0\]\.config\[\.\.\.\]: Expected `bool \| int \| float \| str",
        ),
        (
            ("candidates", 0, "config", "fused"),
            10**400,
            r"candidates\[0\]\.config\[\.\.\.\]: Expected `int` <= 9223372036854775807",
        ),
        (
            ("candidates", 0, "config", "fused"),
            "x" * 300,
            r"candidates\[0\]\.config\[\.\.\.\]: Expected `str` of length <= 256",
        ),
        (
            ("candidates", 0, "config"),
            {str(i): i for i in range(200)},
            r"candidates\[0\]\.config: Expected `object` of length <= 128",
        ),
        (
            ("candidates", 1, "workspace_bytes"),
            10**400,
            r"candidates\[1\]\.workspace_bytes: Expected `int` <= 9223372036854775807",
        ),
        (
            ("candidates", 1, "samples_us"),
            [1.0] * 10_001,
            r"candidates\[1\]\.samples_us: Expected `array` of length <= 10000",
        ),
        (
            ("candidates", 1, "inside_us"),
            [],
            r"candidates\[1\]\.inside_us: Expected `object`, got `array`",
        ),
        (
            ("candidates", 1, "inside_us"),
            {"0": 1.0},
            r"key in candidates\[1\]\.inside_us: Expected `int` >= 1",
        ),
        (
            ("candidates", 1, "inside_us"),
            {"-1": 1.0},
            r"key in candidates\[1\]\.inside_us: Expected `int` >= 1",
        ),
        (
            ("candidates", 1, "inside_us"),
            {"07": 1.0},
            r"key in candidates\[1\]\.inside_us: Expected `int`, got `str`",
        ),
        (
            ("candidates", 1, "inside_us"),
            {"9" * 5000: 1.0},
            r"key in candidates\[1\]\.inside_us: Integer value out of range",
        ),
        (
            ("candidates", 1, "inside_us"),
            {"7": math.nan},
            r"candidates\[1\]\.inside_us\[\.\.\.\]: Expected `float` >= 0\.0",
        ),
        (
            ("candidates", 1, "inside_us"),
            {"7": "1"},
            r"candidates\[1\]\.inside_us\[\.\.\.\]: Expected `float`, got `str`",
        ),
        (
            ("candidates",),
            [BLAS.to_json()] * 10_001,
            r"candidates: Expected `array` of length <= 10000",
        ),
        (("clock",), 5, r"clock: Expected `str`, got `int`"),
    ],
)
def test_errors_name_the_field_and_the_expected_value(
    path: Any, value: Any, complaint: str
) -> None:
    document: Any = record().to_json()
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(RecordError, match=complaint):
        TuningRecord.from_json(document)


@pytest.mark.parametrize("name", sorted(record().to_json()))
def test_every_field_of_a_record_is_required(name: str) -> None:
    document = record().to_json()
    del document[name]
    with pytest.raises(RecordError, match=rf"^Object missing required field `{name}`$"):
        TuningRecord.from_json(document)


@pytest.mark.parametrize("name", ["config", "kernel", "status", "version"])
def test_every_field_of_a_candidate_is_required(name: str) -> None:
    document: Any = record().to_json()
    del document["candidates"][3][name]
    with pytest.raises(
        RecordError, match=rf"^candidates\[3\]: Object missing required field `{name}`"
    ):
        TuningRecord.from_json(document)


def test_unknown_fields_are_refused_by_name() -> None:
    document: Any = record().to_json()
    document["candidates"][0]["sampels_us"] = []
    with pytest.raises(RecordError, match=r"candidates\[0\]: .* unknown field `sampels_us`"):
        TuningRecord.from_json(document)


def test_times_of_other_zones_are_ordered_by_their_moment() -> None:
    moments = ["2026-01-31T12:00:00.5+02:00", "2026-01-31T11:00:00Z", "2026-01-31T07:30:00-04:00"]
    created = [
        TuningRecord.from_json(record(created=each).to_json()).created_at for each in moments
    ]
    assert created == sorted(created)
    assert created[0].timestamp() == 1769853600.5


def test_complaint_about_a_huge_text_is_short() -> None:
    document: Any = record().to_json()
    document["created"] = "x" * 100_000
    with pytest.raises(RecordError) as caught:
        TuningRecord.from_json(document)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("samples", "median"),
    [((), None), ((3.0,), 3.0), ((4.0, 1.0), 2.5), ((9.0, 1.0, 2.0), 2.0), ((1e308, 1e308), 1e308)],
)
def test_median(samples: tuple[float, ...], median: float | None) -> None:
    assert CandidateResult("k", "v", {}, "ok", samples).median_us == median


def test_best_is_the_winner_and_defaults_are_omitted_from_the_document() -> None:
    assert record().best is SPLIT_K
    assert record(winner=0).best is BLAS
    assert FAILED.to_json() == {
        "kernel": "triton.big",
        "version": "g1",
        "config": {},
        "status": "failed",
        "reason": "out of shared memory [red]",
    }


def test_mappings_and_sequences_become_plain_json_in_their_order() -> None:
    config: Any = MappingProxyType({"z": (1, 2), "a": MappingProxyType({"y": range(2)})})
    document = CandidateResult("k", "v", config, "ok").to_json()
    assert json.dumps(document["config"]) == '{"z": [1, 2], "a": {"y": [0, 1]}}'


DEEP: Any = {}
for _ in range(100_000):
    DEEP = {"x": DEEP}


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, math.nan, b"bytes", DEEP], ids=lambda value: type(value).__name__
)
def test_a_config_that_is_not_json_is_refused_when_written(value: Any) -> None:
    with pytest.raises(RecordError, match="config: found a value that is not JSON"):
        CandidateResult("k", "v", {"x": value}, "ok").to_json()
    with pytest.raises(RecordError, match="problem: found a value that is not JSON"):
        replace(record(), problem={"m": 1, "x": value}).to_json()


@pytest.mark.parametrize("changes", [{}, {"problem": {"m": 1, "n": 2, "k": 3}}])
def test_a_document_shares_nothing_with_its_record(changes: Any) -> None:
    plain = replace(SPLIT_K, config={"BLOCK_M": 64})
    one = record(candidates=(plain, SPLIT_K), winner=0, **changes)
    text = json.dumps(one.to_json())
    document: Any = one.to_json()
    document["problem"].clear()
    document["problem"]["x"] = 1
    for candidate in document["candidates"]:
        candidate["config"]["x"] = 1
    assert json.dumps(one.to_json()) == text


def test_parse_refuses_constants_that_are_not_json() -> None:
    for text in (b"NaN", b"[Infinity]", b'{"a": -Infinity}'):
        with pytest.raises(ValueError, match="JSON is malformed"):
            parse(text)


@pytest.mark.parametrize("change", [{"schema": 1}, {"schema": 3}, {"clock": "flushed"}])
def test_another_schema_or_clock_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=next(iter(change))):
        TuningRecord.from_json(record().to_json() | change)


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


def test_a_thinned_record_shows_which_candidates_were_sampled_to_the_end() -> None:
    kept = [each.samples_us for each in record().thinned().candidates]
    assert kept == [(21.0,), (10.0, 11.5, 14.0), (90.0,), (), ()]


def test_three_samples_or_fewer_are_kept_as_they_are() -> None:
    for samples in ((3.0,), (3.0, 1.0), (3.0, 1.0, 2.0)):
        few = CandidateResult("k", "1", {}, "ok", samples_us=samples)
        assert few.thinned() is few
    many = CandidateResult("k", "1", {}, "ok", samples_us=(3.0, 1.0, 2.0, 5.0))
    assert many.thinned().samples_us == (1.0, 2.5, 5.0)
    assert many.thinned(is_complete=False).samples_us == (2.5,)
