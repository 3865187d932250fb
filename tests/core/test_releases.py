"""Differences between Triton's releases, as far as the installed one shows them."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from tmm_core.triton import releases


@pytest.mark.parametrize("name", list(releases._GLUON))
def test_the_installed_gluon_has_each_name(name: str) -> None:
    place, names = releases._GLUON[name]
    found = getattr(releases, name)
    assert any(found is getattr(releases._owner(place), each, None) for each in names)


def test_the_latest_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    place, (latest, earlier) = releases._GLUON["async_load"]
    gluon: Any = types.ModuleType(place)
    monkeypatch.setitem(sys.modules, place, gluon)
    monkeypatch.setattr(importlib, "import_module", lambda name: sys.modules[name])
    setattr(gluon, earlier, "before")
    assert releases.async_load == "before"
    assert not releases.views_end_with_boxes()
    setattr(gluon, latest, "now")
    assert releases.async_load == "now"
    assert releases.views_end_with_boxes()


def test_a_gluon_without_a_name_loses_only_the_kernels_that_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tmm_triton.hopper.warp_specialized
    from tmm_triton import plugin

    place, _ = releases._GLUON["reinterpret"]
    monkeypatch.setitem(releases._GLUON, "reinterpret", (place, ("view_of_another_kind",)))
    # The import below sets this attribute of the package, too.
    monkeypatch.setattr(tmm_triton, "hopper", tmm_triton.hopper)
    for name in [name for name in sys.modules if name.startswith("tmm_triton.hopper")]:
        monkeypatch.delitem(sys.modules, name)
    lost = plugin.load("triton.warp_specialized")
    assert isinstance(lost, plugin.Missing)
    assert "has no view_of_another_kind" in lost.reason
    assert not isinstance(plugin.load("triton.persistent"), plugin.Missing)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gather'"):
        releases.gather  # noqa: B018  # looking it up is the test


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("set_to", "fused"), [(None, True), ("1", True), ("0", False)])
def test_products_and_sums_are_fused_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, fused: bool
) -> None:
    """Without a warning about what a later release will do."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if set_to is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", set_to)
    options = releases.options_for({"num_warps": 8})
    parsed = CUDABackend(GPUTarget("cuda", 90, 32)).parse_options(options)
    assert (parsed.num_warps, parsed.enable_fp_fusion) == (8, fused)


def test_an_option_given_for_a_kernel_is_kept() -> None:
    assert releases.options_for({"enable_fp_fusion": False}) == {"enable_fp_fusion": False}
