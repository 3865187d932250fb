"""Values at and beside each limit of the cache's small functions."""

from __future__ import annotations

import errno
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cache_builders import problem
from tmm_cache import (
    CacheWarning,
    cache_errors,
    console,
    disk,
    fields,
    files,
    problem_fields,
)
from tmm_cache.cache_errors import RecordError
from tmm_cache.notes import stamp

# -- reading files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "most", "read"),
    [(0, 10, 0), (9, 10, 9), (10, 10, 10), (11, 10, 11), (12, 10, 11), (200_000, 10, 11)],
)
def test_a_file_is_read_up_to_one_byte_beyond_the_limit(
    tmp_path: Path, size: int, most: int, read: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with disk.closing(disk.open_regular(path, os.O_RDONLY)) as handle:
        assert len(disk.read_all(handle, most)) == read


def test_a_file_that_grows_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size at the beginning is no limit."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with disk.closing(disk.open_regular(path, os.O_RDONLY)) as handle:
        status = os.fstat(handle)
        path.write_bytes(b"x" * 100_000)
        monkeypatch.setattr(os, "fstat", lambda number: status)
        assert len(disk.read_all(handle, 2**20)) == 100_000


def test_a_file_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody removes it."""
    path = tmp_path / "file"
    path.write_bytes(b"x")

    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "read", fails)
    fault = files.read_file(path)
    assert isinstance(fault, files.Fault)
    assert (fault.path, fault.reason) == (path, "cannot be read: Input/output error")
    assert (fault.damaged, fault.place) == (False, False)
    monkeypatch.undo()
    large = files.read_file(path, most=0)
    assert isinstance(large, files.Fault)
    assert (large.reason, large.damaged) == ("is larger than 0 bytes", True)
    assert files.read_file(tmp_path / "absent") is None


def test_folders_are_private_up_to_the_one_that_was_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    disk.make_folder(tmp_path / "a" / "b")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "a", tmp_path / "a/b")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_file_that_could_not_be_replaced_leaves_nothing_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refused(*paths: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="no"):
        disk.write_atomically(path, b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("names", "left"), [([], []), (["environment.json"], []), (["environment.json", "x"], None)]
)
def test_an_empty_folder_goes_with_its_environment_and_the_root_stays(
    tmp_path: Path, names: list[str], left: list[str] | None
) -> None:
    folder = tmp_path / "v2" / "gpu" / "digest"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    disk.remove_if_empty(folder, tmp_path)
    assert tmp_path.is_dir()
    assert os.listdir(tmp_path) == ([] if left == [] else ["v2"])
    if left is None:
        assert sorted(os.listdir(folder)) == names


def test_a_stamp_tells_absent_files_from_present_ones_in_the_order_of_names(tmp_path: Path) -> None:
    there, absent = tmp_path / "b", tmp_path / "a"
    there.write_bytes(b"123")
    status = there.stat()
    assert stamp([there, absent]) == [
        [str(absent)],
        [str(there), 3, status.st_mtime_ns, status.st_ctime_ns],
    ]


# -- warnings -----------------------------------------------------------------------------


def _calls(module: str | None, function: Any) -> Any:
    """A function of a module of this name, or of generated code, that calls ``function``."""
    scope = {"__name__": module, "function": function}
    exec(compile("def call():\n    function()\n", f"<{module}>", "exec"), scope)
    return scope["call"]


@pytest.mark.parametrize(
    ("module", "passed_over"),
    [
        (None, True),
        ("tmm_core.api", True),
        ("tmm_cache", True),
        ("tmm_blas.blas", True),
        ("tmm_triton", True),
        ("torch.nn.modules", True),
        ("functools", True),
        ("contextlib", True),
        ("concurrent.futures", True),
        ("threading", True),
        ("pluggy", True),
        ("model", False),
        ("tmm_core_extra", False),
    ],
)
def test_a_warning_points_beyond_tmm_torch_and_generated_code(
    module: str | None, passed_over: bool
) -> None:
    inner = _calls(module, partial(cache_errors.warn_caller, "text", CacheWarning))
    with pytest.warns(CacheWarning, match="text") as caught:
        _calls("user", inner)()
    assert caught[0].filename == ("<user>" if passed_over else f"<{module}>")
    assert caught[0].lineno == 2


# -- fields of a record -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "accepted", "refused"),
    [
        (fields.name, ["x", "x" * 256], ["", "x" * 257, "a\n", 1, None]),
        (fields.text, ["x", "a\nb", "x" * 4096], ["", "x" * 4097, 1]),
        (fields.count, [0, 1, 2**63 - 1], [-1, 2**63, 1.0, True]),
        (fields.flag, [True, False], [0, 1, None, "true"]),
        (fields.measure, [0, 0.0, 1, 2.5], [-0.1, float("inf"), float("nan"), True, "1", 10**400]),
        (
            fields.parameters,
            [{}, {"x": 2**63 - 1}, {"x": -(2**63) + 1}, {"x": ""}, {"x": "y" * 256}, {"x": None},
             {"x": False}, {"x": 0.5}, {f"x{i}": i for i in range(128)}],
            [{"x": 2**63}, {"x": -(2**63)}, {"x": "y" * 257}, {"x": "\n"}, {"x": float("inf")},
             {"x": []}, {"": 1}, {"x" * 257: 1}, {f"x{i}": i for i in range(129)}, []],
        ),
    ],
    ids=["name", "text", "count", "flag", "measure", "parameters"],
)  # fmt: skip
def test_readers_accept_up_to_their_limits(
    read: fields.Reader, accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        assert read(value) == value
    for value in refused:
        with pytest.raises(RecordError, match=r"found .*, accepted is "):
            read(value)


@pytest.mark.parametrize("size", ["0", "01", "-1", "1.0", "x", "", str(2**40), "1" * 14])
def test_sizes_inside_a_bucket_are_whole_and_within_bounds(size: str) -> None:
    assert fields.times_by_size({"1": 2.0, str(2**40 - 1): 1}) == {1: 2.0, 2**40 - 1: 1.0}
    with pytest.raises(RecordError, match="this size"):
        fields.times_by_size({size: 1.0})


def test_a_bucket_has_at_most_128_sizes() -> None:
    many = {str(m): 1.0 for m in range(1, 130)}
    with pytest.raises(RecordError, match=r"^'129': found this size"):
        fields.times_by_size(many)
    del many["129"]
    assert len(fields.times_by_size(many)) == 128


@pytest.mark.parametrize("extra", [2**16, "9" * 100, 10**100, "0" * 100])
def test_a_problem_is_bounded(extra: Any) -> None:
    assert fields.problem(problem() | {"x": "9" * 99}) == problem() | {"x": "9" * 99}
    value = "x" * extra if extra == 2**16 else extra
    with pytest.raises(RecordError, match="huge"):
        fields.problem(problem() | {"x": value})


def test_a_problem_without_end_is_no_json() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": deep}
    with pytest.raises(RecordError, match=r"found what is not JSON .*, accepted is an object"):
        fields.problem(problem() | {"x": deep})


def test_a_list_has_at_most_10_000_items() -> None:
    read = fields.items(fields.count)
    assert len(read([1] * 10_000)) == len(fields.measures([1.0] * 10_000)) == 10_000
    for reader in (read, fields.measures):
        with pytest.raises(RecordError, match="at most 10000"):
            reader([1] * 10_001)


def test_a_measure_among_samples_is_named_by_its_index() -> None:
    assert fields.measures([1.0, 2]) == (1.0, 2.0)
    with pytest.raises(RecordError, match=r"\[1\]: found -1"):
        fields.measures([1.0, -1, 2.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "an object"),
        ([1], "a list"),
        ("x" * 58, repr("x" * 58)),
        ("x" * 59, "'" + "x" * 59 + "…"),
    ],
)
def test_a_found_value_is_shown_in_60_letters(value: Any, text: str) -> None:
    assert fields.shown(value) == text
    assert fields.shown(10**5000) == "a huge integer"


# -- what the command reads -------------------------------------------------------


# -- texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, "128x4096x512"),
        ({"batch": 8}, "8*128x4096x512"),
        ({"batch": None}, "128x4096x512"),
        ({"batch": [2, 3]}, "[2,3]*128x4096x512"),
        ({"groups": {"count": 4, "ragged": "m"}}, "128x4096x512 in 4 groups along m"),
        ({"m": None}, "-x4096x512"),
    ],
)
def test_shapes_in_a_line(changes: dict[str, Any], shape: str) -> None:
    assert problem_fields.shape(problem() | changes) == shape


@pytest.mark.parametrize(
    ("a", "b", "out", "long", "short"),
    [
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bf16"),
        ("float16", "float16", "float32", "float16 -> float32", "fp16 -> fp32"),
        ("bfloat16", "int8", "bfloat16", "bfloat16 x int8", "bf16 x int8"),
        (
            "float8_e4m3fn", "float8_e5m2", "bfloat16",
            "float8_e4m3fn x float8_e5m2 -> bfloat16", "e4m3 x e5m2 -> bf16",
        ),
        ("float32", None, None, "float32", "fp32"),
    ],
)  # fmt: skip
def test_dtypes_in_a_line(a: str, b: str | None, out: str | None, long: str, short: str) -> None:
    asked: Any = {"a": {"dtype": a}}
    asked |= {} if b is None else {"b": {"dtype": b}}
    asked |= {} if out is None else {"out": {"dtype": out}}
    assert problem_fields.dtypes(asked) == long
    assert problem_fields.dtypes(asked, short=True) == short


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epilogue": "identity"}, "identity"),
        ({"epilogue": "identity", "bias": "bfloat16"}, "bias"),
        ({"epilogue": "identity", "residual": {"dtype": "bfloat16"}}, "residual"),
        ({"epilogue": "silu", "bias": "bfloat16"}, "bias+silu"),
        ({"epilogue": {"name": "gelu"}, "residual": {"x": 1}}, "gelu+residual"),
        ({"epilogue": ""}, "none"),
    ],
)
def test_expressions_in_a_line(changes: dict[str, Any], text: str) -> None:
    assert problem_fields.expression(problem() | changes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"), (None, "none"), ("torch.bfloat16", "bfloat16"), ("", "none"),
        (1.5, "1.5"), ([1, 2], "[1,2]"), ({"b": 1, "a": "x"}, '{"a":"x","b":1}'),
        ("a\x1b[2J", "a\\x1b[2J"), (12, "12"),
    ],
)  # fmt: skip
def test_values_in_a_cell(value: Any, text: str) -> None:
    assert problem_fields.text_of(value) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("plain"), "plain"),
        (OSError("no number"), "no number"),
        (OSError(28, "full"), "output cannot be written: full"),
        (OSError(13, "denied", "/x"), "/x: denied"),
    ],
)
def test_an_error_is_a_line_without_its_number(
    error: Exception, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise error

    assert console.guarded("tmm-x", fails, ValueError, OSError) == console.MISTAKE
    assert capsys.readouterr().err == f"tmm-x: {text}\n"


@pytest.mark.parametrize(("code", "status"), [(None, 0), ("text", 0), (3, 3), (0, 0)])
def test_an_exit_of_argparse_is_the_status(code: Any, status: int) -> None:
    def leaves() -> int:
        raise SystemExit(code)

    assert console.guarded("tmm", leaves) == status


def test_an_interrupted_command_ends_like_one_of_a_shell() -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    assert console.guarded("tmm", stopped) == 130


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": float("inf"), "b": float("nan"), "c": -float("inf"), "µ": 1.5})
    assert capsys.readouterr().out == '{\n  "a": null,\n  "b": null,\n  "c": null,\n  "µ": 1.5\n}\n'


def test_a_warning_becomes_one_note_and_others_stay_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def warn() -> None:
        with console.warnings_as_notes(CacheWarning):
            for _ in range(2):
                warnings.warn("own", CacheWarning, stacklevel=1)
            warnings.warn("other", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="other"):
        warn()
    assert capsys.readouterr().err == "tmm: own\n"


def test_names_with_the_same_texts_are_told_together() -> None:
    pairs = [("a", ["1"]), ("b", ["2"]), ("c", ["1"])]
    assert console.alike(pairs) == [(["a", "c"], ("1",)), (["b"], ("2",))]


def test_a_paragraph_has_20_letters_beside_its_indentation() -> None:
    assert console.paragraph("aaaa " * 8, 5) == ["aaaa aaaa aaaa aaaa"] * 2
    assert console.paragraph("aaaaaaaaaa bbbbbbbbbb", 20, hanging=3) == [
        "aaaaaaaaaa",
        "   bbbbbbbbbb",
    ]
