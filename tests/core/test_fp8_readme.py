"""The code for 8-bit floats in docs/models.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tmm_core

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_8_bit_floats() -> None:
    (code,) = re.findall(r"^```python\n(def to_fp8.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {"torch": torch, "tmm_core": tmm_core}
    exec(code, names)
    expected = F.silu(F.linear(names["x"], names["weight"], names["bias"]))
    # Each of 64 products is off by 2⁻⁴ at most, twice.
    assert (names["y"] - expected).abs().max() < 0.1 * expected.abs().max()
    assert names["y"].dtype is torch.bfloat16
