"""Names: the same problem has one name, and no name leads out of the root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tmm_cache
from cache_builders import ENVIRONMENT, GPU, problem
from hypothesis import given
from hypothesis import strategies as st
from tmm_cache import CacheStore, default_root, digest, layer_paths, shipped_layers, slug
from tmm_cache.keys import is_slug


def test_the_public_names_are_these() -> None:
    assert sorted(tmm_cache.__all__) == [
        "CLOCK",
        "CacheStore",
        "CacheWarning",
        "CandidateResult",
        "JSON",
        "Miss",
        "Notes",
        "RecordError",
        "SCHEMA",
        "Summary",
        "TuningRecord",
        "default_root",
        "digest",
        "layer_paths",
        "shipped_layers",
        "slug",
        "stamp",
    ]
    assert all(hasattr(tmm_cache, name) for name in tmm_cache.__all__)


def test_digest_is_pinned() -> None:
    # Were it to change, every cache in the field would be lost without a word.
    assert digest({"b": [1, 2.5, None], "a": "µ"}) == "bbc84705e88372c0"
    assert digest({}) == "44136fa355b3678a"


def test_digest_ignores_order_and_tuples_but_no_value() -> None:
    assert digest({"a": 1, "b": (1, 2)}) == digest({"b": [1, 2], "a": 1})
    variants = [problem(), problem(m=129), problem(dtype="float16"), problem(epilogue="none")]
    variants.append({**problem(), "b": {**problem()["b"], "aligned": False}})
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_documents_that_differ_by_case_or_type_have_different_digests() -> None:
    """A config may name two things that differ by the case of a letter."""
    values = ["x", "X", "x ", "1", 1, 1.5, True, None, "", [], ["x"], [["x"]], {}, {"x": "x"}]
    documents: list[dict[str, Any]] = [{"a": value} for value in values]
    documents += [{}, {"A": "x"}, {"a": "x", "A": "x"}]
    assert len({digest(document) for document in documents}) == len(documents)


def test_digest_refuses_values_that_are_not_json() -> None:
    for number in ("nan", "inf", "-inf"):
        with pytest.raises(ValueError):
            digest({"x": float(number)})
    for value in (object(), b"ab", bytearray(b"ab"), memoryview(b"ab"), {1}, 1j):
        with pytest.raises(TypeError, match=f"of type {type(value).__name__} is not JSON"):
            digest({"x": [value]})  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H200 sm90 132SM", "nvidia-h200-sm90-132sm"),
        (GPU, GPU),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "unknown"),
        ("", "unknown"),
        ("Größe", "gr-e"),
        ("NVIDIA GeForce RTX 4090 (24 GB)", "nvidia-geforce-rtx-4090-24-gb"),
    ],
)
def test_slug(text: str, name: str) -> None:
    assert slug(text) == name


@given(st.text())
@pytest.mark.slow
def test_every_text_has_a_valid_slug_that_is_its_own(text: str) -> None:
    name = slug(text)
    assert is_slug(name)
    assert slug(name) == name
    assert os.sep not in name
    assert name not in (".", "..")


def test_long_names_stay_apart() -> None:
    first, second = slug("x" * 300 + "a"), slug("x" * 300 + "b")
    assert first != second
    assert max(len(first), len(second)) <= 96


@pytest.mark.parametrize(
    "gpu", ["", "..", ".", "a/b", "../x", "A", "a\0", "a b", "/abs", "-x", "a\n"]
)
def test_a_gpu_name_that_is_not_a_slug_is_refused_everywhere(store: CacheStore, gpu: str) -> None:
    for method in (store.path, store.load, store.found, store.log_miss):
        with pytest.raises(ValueError, match="gpu: found"):
            method(gpu, ENVIRONMENT, problem())
    with pytest.raises(ValueError, match="gpu: found"), store.lock(gpu, ENVIRONMENT, problem(), 0):
        pass
    assert not store.root.exists()


def test_path_is_root_version_gpu_environment_problem(store: CacheStore, root: Path) -> None:
    expected = root / "v2" / GPU / digest(ENVIRONMENT) / f"{digest(problem())}.json"
    assert store.path(GPU, ENVIRONMENT, problem()) == expected


def test_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_root({"TMM_CACHE_DIR": "/x/y"}) == Path("/x/y")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root({"TMM_CACHE_DIR": "~/y"}) == tmp_path / "y"
    assert default_root({"TMM_CACHE_DIR": ""}) == default_root({}) == tmp_path / ".cache" / "tmm"


def test_layers_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unshipped = {"TMM_SHIPPED_RECORDS": "0"}
    assert layer_paths(unshipped) == ()
    assert layer_paths({}) == shipped_layers({})
    assert layer_paths({"TMM_CACHE_PATH": f"/a{os.pathsep}{os.pathsep}/b", **unshipped}) == (
        Path("/a"),
        Path("/b"),
    )
    monkeypatch.setenv(
        "TMM_CACHE_PATH", f"{tmp_path}/own{os.pathsep}{tmp_path}/l{os.pathsep}{tmp_path}/l"
    )
    assert CacheStore().layers == (tmp_path / "l",)  # neither the root itself nor one twice


def test_a_relative_root_does_not_move_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CacheStore(Path("here"), [Path("below")])
    monkeypatch.chdir("/")
    assert store.root == tmp_path / "here"
    assert store.layers == (tmp_path / "below",)
