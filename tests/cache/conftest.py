"""Every test of the cache runs on temporary folders, never on the developer's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tmm_cache import CacheStore, cache_errors


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[Path]:
    """The user's own root, which doesn't exist yet."""
    own = tmp_path / "own"
    # Not the test's own monkeypatch, whose undo() would lead to the developer's cache.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMM_CACHE_DIR", str(own))
        patch.delenv("TMM_CACHE_PATH", raising=False)
        patch.delenv("FORCE_COLOR", raising=False)
        # As in a process without warnings so far: the same variable is wrong in several tests.
        patch.setattr(cache_errors, "_warned", set())
        yield own


@pytest.fixture
def store(root: Path) -> CacheStore:
    return CacheStore()
