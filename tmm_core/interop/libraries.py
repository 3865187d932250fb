"""The torch libraries that hold tmm's operators, one for each operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TAGS = (torch.Tag.pt2_compliant_tag,)

#: The library of each operator.
_libraries: dict[str, torch.library.Library] = {}


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch.library.Library:
    """Define the operator ``tmm::name`` in a new library, and return the library, which takes
    further rules. The operator's former library ends.

    There is a former one if the import of the declaring module was interrupted, by Ctrl-C for
    example, and is repeated. The traceback of the interruption keeps the former library alive, and
    torch defines no operator twice.

    Args:
        schema: Begins with the name.
        run: Computes the result.
        fake: Returns the result of fake tensors, without values.
    """
    name = schema.partition("(")[0]
    former = _libraries.get(name)
    if former is not None:
        former._destroy()
    library = _libraries[name] = torch.library.Library("tmm", "FRAGMENT")
    library.define(schema, tags=TAGS)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tmm::{name}", fake, lib=library)
    return library
