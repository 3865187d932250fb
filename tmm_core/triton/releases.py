"""The releases of Triton whose insides tmm knows: the order of the C launcher's arguments, what a
compiled kernel is kept under, how PTX is assembled. With another release Triton's own launch and
look-up serve, at some µs more a call."""

from __future__ import annotations

import triton

#: What tests of launches, keys and edited PTX ran with, on GPUs too.
TESTED = ("3.6.", "3.7.")


def tested() -> bool:
    """Whether the installed Triton is of these releases."""
    return str(triton.__version__).startswith(TESTED)
