"""Each format that comes with tmm keeps to its declaration."""

from __future__ import annotations

import pytest

from tmm_core import Scale
from tmm_core.formats import FORMATS, grids
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


def test_a_scale_that_is_read_back_with_another_dtype_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a format's dtypes of scales, one that a record's text names."""

    def parse(text: str) -> Scale:
        return Scale(grids.parse(text.partition(" ")[0]))

    monkeypatch.setattr(Scale, "parse", parse)
    with pytest.raises(AssertionError):
        TestInt8().test_its_problems_are_read_back()
