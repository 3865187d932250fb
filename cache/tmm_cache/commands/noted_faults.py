"""Notes of the files that a command passed over."""

from __future__ import annotations

from tmm_base.console import note

from tmm_cache.files import Fault


class Noted:
    """Reports faults, and remembers whether there was one."""

    def __init__(self) -> None:
        self.any = False

    def fault(self, fault: Fault) -> None:
        """Report one fault."""
        self.any = True
        note(f"passed over {fault.path}: {fault.reason}")
