"""Each format that comes with tmm keeps to its declaration."""

from __future__ import annotations

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
