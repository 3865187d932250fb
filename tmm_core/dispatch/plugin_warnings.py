"""One warning per distribution and process about its kernels."""

from __future__ import annotations

from typing import Any

from tmm_core.errors import warn

_warned: set[str] = set()


def warn_of_plugin(
    source: Any, message: str, error: BaseException | None = None, more: int = 0
) -> None:
    """Issue the one warning of this process about a distribution.

    Args:
        source: The origin of the faulty kernel.
        message: The first fault: kernel, reason and place.
        more: Further faults of the same distribution.
    """
    key = str(getattr(source, "distribution", "") or getattr(source, "plugin", source))
    if key in _warned:
        return
    _warned.add(key)
    origin = "" if str(source) in message else f"{source}: "
    count = f"; {more} more faults of it" if more else "; later faults of it are not reported"
    warn(f"{origin}{message}{count}: see `tmm doctor`")
