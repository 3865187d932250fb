"""Tells PyInstaller what an application with tmm needs (entry point ``pyinstaller40``)."""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """Return the folder of the hooks, which PyInstaller runs when it finds their packages."""
    return [str(Path(__file__).parent)]
