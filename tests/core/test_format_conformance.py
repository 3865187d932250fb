"""Each format that comes with tmm keeps to its declaration."""

from __future__ import annotations

import pytest

from tmm_core import Scale
from tmm_core.formats import FORMATS
from tmm_core.testing import FormatConformance


class TestInt8(FormatConformance):
    format = FORMATS["int8"]


class TestFp8(FormatConformance):
    format = FORMATS["fp8"]


class TestInt4(FormatConformance):
    format = FORMATS["int4"]


class TestMxfp4(FormatConformance):
    format = FORMATS["mxfp4"]


class TestInt4Signed(FormatConformance):
    format = FORMATS["int4_signed"]


class TestNvfp4(FormatConformance):
    format = FORMATS["nvfp4"]


class TestMxfp8(FormatConformance):
    format = FORMATS["mxfp8"]


@pytest.mark.parametrize("wrong", ["dtype", "last block"])
def test_a_scale_that_is_read_back_differently_fails(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record's text names the dtype, unless it is fp32, and the block."""
    read = Scale.parse

    def parse(text: str) -> Scale:
        scale = read(text)
        if wrong == "dtype":
            return Scale(scale.block)
        last = scale.block == FORMATS["int8"].grids[-1]
        return Scale((1, 16) if last else scale.block, scale.dtype)

    monkeypatch.setattr(Scale, "parse", parse)
    with pytest.raises(AssertionError):
        TestInt8().test_its_problems_are_read_back()
