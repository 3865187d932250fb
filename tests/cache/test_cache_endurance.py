"""`pytest -m endurance`: runs for minutes what other tests try for seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.endurance
def test_endurance() -> None:
    """Kills writers, injects every fault and fuzzes at length. It stops at the first loss."""
    command = [sys.executable, str(Path(__file__).with_name("endurance.py"))]
    done = subprocess.run(
        [*command, "--seconds", "30", "--examples", "2000"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "| deaths in merge |" in done.stdout
