"""Mutated records, files and command lines are either refused or understood.

Bounded here; `tests/cache/endurance.py` runs the same with many more examples.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, problem, record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tmm_base import UsageError
from tmm_cache import CacheStore, RecordError, TuningRecord, digest
from tmm_cache.cli import main
from tmm_cache.fields import parse
from tmm_cache.files import parse_stored, record_bytes, sealed
from tmm_cache.transport import import_records

EXAMPLES = int(os.environ.get("TMM_FUZZ_EXAMPLES", "100"))
bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 100,
    database=None,
    suppress_health_check=list(HealthCheck),
)

ODD = [
    *(None, True, False, 0, -1, 10**400, -0.0, 1e308, math.nan, math.inf, "", "x", "1", "ok"),
    *([], {}, [[]], {"a": 1}, [None], "2026-13-45T99:99:99Z", "0001-01-01T00:00:00Z", "\ud800"),
]
JSON = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within a document."""
    if not isinstance(value, dict | list):
        return [at]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [at, *(place for key, inner in items for place in places(inner, (*at, key)))]


PLACES = places(record().to_json())


@st.composite
def documents(draw: st.DrawFn) -> object:
    """A record's document with some values replaced, removed or added."""
    document: Any = copy.deepcopy(record().to_json())
    for place in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        if not place:
            return draw(JSON)
        inner = document
        try:
            for key in place[:-1]:
                inner = inner[key]
            match draw(st.sampled_from(["replace", "remove", "add"])):
                case "replace":
                    inner[place[-1]] = draw(JSON)
                case "remove":
                    del inner[place[-1]]
                case _:
                    inner[draw(st.text(max_size=3))] = draw(JSON)
        except (KeyError, IndexError, TypeError):  # another mutation was there before
            continue
    return document


@bounded
@given(documents())
@pytest.mark.slow
def test_a_mutated_document_is_refused_or_round_trips(document: object) -> None:
    try:
        found = TuningRecord.from_json(document)
    except RecordError:
        return
    assert parse_stored(record_bytes(found, checked=True), digest(found.problem)) == found


@bounded
@given(st.data())
def test_mutated_bytes_are_refused_or_read_back(data: st.DataObject) -> None:
    content = mutated(data, record_bytes(record()))
    try:
        found = parse_stored(content, digest(problem()))
    except ValueError:
        return
    assert found.problem == problem()
    assert parse_stored(record_bytes(found, checked=True), digest(problem())) == found


def mutated(data: st.DataObject, content: bytes) -> bytes:
    """Some bytes changed, cut out, doubled, or cut off."""
    buffer = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        if not buffer:
            break
        at = data.draw(st.integers(0, len(buffer) - 1))
        length = data.draw(st.integers(1, 40))
        match data.draw(st.sampled_from(["change", "cut", "double", "end", "flip"])):
            case "change":
                buffer[at : at + length] = data.draw(st.binary(max_size=length))
            case "cut":
                del buffer[at : at + length]
            case "double":
                buffer[at:at] = buffer[at : at + length]
            case "end":
                del buffer[at:]
            case _:
                buffer[at] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(buffer)


PACKED = sealed(
    {
        "lock": 1,
        "records": [
            {"gpu": GPU, "environment": ENVIRONMENT, "record": record(problem(m=m)).to_json()}
            for m in (1, 2)
        ],
    }
)


@bounded
@given(st.data(), st.sampled_from(["plain", "sealed", "inside", "outside"]))
def test_a_mutated_file_writes_whole_records_inside_the_root_or_nothing(
    data: st.DataObject, how: str
) -> None:
    if how == "plain":
        content = mutated(data, PACKED)
    elif how == "sealed":  # with a right checksum, which a stranger can make
        document = json.loads(PACKED)
        del document["checksum"]
        content = mutated(data, json.dumps(document).encode()[:-1])
        content += f', "checksum": "{hashlib.sha256(content + b"}").hexdigest()[:16]}"}}\n'.encode()
    elif how == "inside":
        content = gzip.compress(mutated(data, PACKED), 1)
    else:
        content = mutated(data, gzip.compress(PACKED, 1))
    with tempfile.TemporaryDirectory() as name:
        archive, root = Path(name, "archive"), Path(name, "inner", "root")
        root.parent.mkdir()
        archive.write_bytes(content)
        try:
            imported = import_records(archive, root, force=False)
        except UsageError:
            assert not root.exists()
        else:
            # Warnings are errors: all that was written is whole.
            assert len(list(CacheStore(root, []).summaries())) <= imported.written
        assert [path.name for path in Path(name).iterdir() if path != archive] == ["inner"]
        assert [path for path in root.parent.iterdir() if path != root] == []
        assert list(root.rglob("*.tmp")) == []


#: JSON that Python reads and no record holds.
NO_VALUES = ["1e999", "-1e400", "9" * 400 + ".5", "9" * 400, "[" * 900 + "]" * 900, '"\\ud800"']


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: value[:8])
@pytest.mark.parametrize(
    "place",
    ['"dtype": "bfloat16"', '"batch": 1', '"epilogue": "silu"', '"winner": 1', '"SPLIT_K": 4'],
)
def test_a_list_passes_over_a_record_that_no_store_wrote(
    place: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CacheStore(tmp_path, []).save(GPU, ENVIRONMENT, record())
    assert path is not None
    text = path.read_text()
    assert place in text
    path.write_text(text.replace(place, f"{place.partition(':')[0]}: {value}", 1))
    assert main(["--cache-dir", str(tmp_path), "show"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1e999", "-1e400", "9" * 400 + ".5", "Infinity", "-NaN"])
def test_a_number_that_no_float_holds_is_refused(number: str) -> None:
    assert parse(b"[1e308, 1e-999, -0.0]") == [1e308, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"JSON|range"):
        parse(f"[{number}]".encode())


@pytest.mark.parametrize("field", ["gpu", "environment", "problem"])
def test_a_damaged_note_of_a_miss_costs_itself(field: str, tmp_path: Path) -> None:
    store = CacheStore(tmp_path, [])
    store.log_miss(GPU, ENVIRONMENT, problem())
    [path] = tmp_path.rglob("misses-*.jsonl")
    about, miss = json.loads(path.read_text())
    values = {"gpu": ["", "../../x", "\ud800", 1], "environment": [{"a": math.inf}, [1], None]}
    for number, value in enumerate([*values.get(field, ({"m": math.nan}, "x")), None]):
        damaged = json.dumps([f"{about}{number}", miss | {field: value}])
        with path.open("a") as file:
            file.write("\n" + damaged.replace("Infinity", "1e999"))
    assert [miss.problem for miss in CacheStore(tmp_path, []).misses()] == [problem()]


WORDS = [
    *("show", "clear", "verify", "export", "import", "freeze", "-o"),
    *("--json", "-y", "--yes", "--force", "--help", "--cache-dir", "--"),
    *("--gpu", "--kernel", "--dtype", "--epilogue", "--shape", "--older-than", "--newer-than"),
    *("30d", "1e9w", "99999999999999999999d", "x", "1x2x3", "*x*x*", "9" * 30, "0", "-1"),
    *("3f", "deadbeef", "nvidia-*", "[", "[!", "", " ", "\t", ".", "..", "/dev/null"),
    *("/proc/self/mem", "/dev/zero", "a" * 300, "é", "µ", "\udcff", "{own}", "{file}"),
]


@pytest.mark.parametrize("filled", [False, True])
def test_no_command_line_ends_in_a_traceback(
    filled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, file = tmp_path / "fuzzed", tmp_path / "file.json"
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    monkeypatch.setenv("TMM_CACHE_DIR", str(own))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file.write_bytes(PACKED)

    @bounded
    @given(st.lists(st.sampled_from(WORDS), max_size=6), st.binary(max_size=6))
    def run(words: list[str], noise: bytes) -> None:
        if filled:
            CacheStore(own, []).save(GPU, ENVIRONMENT, record())
        # A shell can pass any bytes but 0. A slash could lead out of this folder.
        noise = noise.replace(b"\0", b"").replace(b"/", b"")
        words = [*words, *filter(None, [os.fsdecode(noise)])]
        words = [word.replace("{own}", str(own)).replace("{file}", str(file)) for word in words]
        assert main(words) in (0, 1, 2, 130)
        assert "Traceback" not in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))

    run()
