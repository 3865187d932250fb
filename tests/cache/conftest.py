"""Every test of the cache runs on temporary folders, never on the developer's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from tmm_cache import CacheStore, cache_errors


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own root, which doesn't exist yet."""
    own = tmp_path / "own"
    monkeypatch.setenv("TMM_CACHE_DIR", str(own))
    monkeypatch.delenv("TMM_CACHE_PATH", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    # As in a process without warnings so far: the same variable is wrong in several tests.
    monkeypatch.setattr(cache_errors, "_warned", set())
    return own


@pytest.fixture
def store(root: Path) -> CacheStore:
    return CacheStore()
