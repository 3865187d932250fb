"""The Triton releases whose internals tmm knows: the argument order of the C launcher, the
assembly of PTX. Other releases use Triton's own launch, which costs a few µs more per call."""

from __future__ import annotations

import triton

#: Releases with which tests of launches and edited PTX have run, also on GPUs.
TESTED = ("3.6.", "3.7.")


def tested() -> bool:
    """Whether the installed Triton is one of these releases."""
    return str(triton.__version__).startswith(TESTED)
