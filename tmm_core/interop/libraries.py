"""The torch libraries that hold tmm's operators, one for each operator."""

from __future__ import annotations

import torch

#: The library of each operator.
_libraries: dict[str, torch.library.Library] = {}


def library_of(operator: str) -> torch.library.Library:
    """A new library in which to define ``tmm::operator``; the operator's former library ends.

    There is a former one if the import of the declaring module was interrupted, by Ctrl-C for
    example, and is repeated. The traceback of the interruption keeps the former library alive, and
    torch defines no operator twice.
    """
    former = _libraries.get(operator)
    if former is not None:
        former._destroy()
    library = _libraries[operator] = torch.library.Library("tmm", "FRAGMENT")
    return library
