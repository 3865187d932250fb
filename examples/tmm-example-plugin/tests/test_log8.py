from __future__ import annotations

from tmm_example.log8 import LOG8

from tmm_core.testing import FormatConformance


class TestLog8(FormatConformance):
    format = LOG8
