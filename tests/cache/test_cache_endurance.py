"""`pytest -m endurance`: what the other tests try for seconds, for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.endurance
def test_endurance() -> None:
    """Writers killed, every fault, long fuzzing: it stops at the first loss."""
    command = [sys.executable, str(Path(__file__).with_name("endurance.py"))]
    done = subprocess.run(
        [*command, "--seconds", "30", "--examples", "2000"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "| deaths in merge |" in done.stdout
