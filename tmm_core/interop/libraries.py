"""The torch libraries that hold tmm's operators, one for each operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core import compat
from tmm_core.interop import autograd_state
from tmm_core.launch.codegen import written

TAGS = (torch.Tag.pt2_compliant_tag,)

#: Makes a library. Torch takes the file of the caller as text, so this code has a file name that
#: UTF-8 can encode.
library_of: Callable[[str, str], torch.library.Library] = written(
    "library_of",
    "namespace, kind",
    ["return Library(namespace, kind)"],
    {"Library": torch.library.Library},
)

#: The library of each operator.
_libraries: dict[str, torch.library.Library] = {}


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    apart: Callable[..., Any] | None = None,
) -> torch.library.Library:
    """Define the operator ``tmm::name`` in a new library, and return the library, which takes
    further rules. The operator's former library ends.

    There is a former one if the import of the declaring module was interrupted, by Ctrl-C for
    example, and is repeated. The traceback of the interruption keeps the former library alive, and
    torch defines no operator twice.

    Args:
        fake: Returns the result of fake tensors, without values.
        apart: Computes the result by other operators, where derivatives or a mapping are needed.
    """
    name = schema.partition("(")[0]
    former = _libraries.get(name)
    if former is not None:
        former._destroy()
    library = _libraries[name] = library_of("tmm", "FRAGMENT")
    library.define(schema, tags=TAGS)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tmm::{name}", fake, lib=library)
    if apart is not None:
        library.impl(name, differentiated(getattr(torch.ops.tmm, name).default, apart), "Autograd")
        library.impl(name, apart, "FuncTorchBatched")
    return library


def differentiated(operator: Callable[..., Any], apart: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of an operator for torch's Autograd key, which calls ``apart`` instead where
    derivatives are needed."""

    def rule(*given: Any) -> Any:
        if autograd_state.may_be_differentiated():
            listed = (each if isinstance(each, list) else [each] for each in given)
            tensors = [t for each in listed for t in each if isinstance(t, torch.Tensor)]
            if autograd_state.differentiated(*tensors):
                return apart(*given)
        with compat.below_autograd():
            return operator(*given)

    return rule
