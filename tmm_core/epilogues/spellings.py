"""Maps other spellings of an epilogue to its name: names in other libraries, and torch's
activations as functions, modules or partials."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: The function's name here by its name elsewhere: swish is the name of silu in Ramachandran et al.
#: (arXiv:1710.05941), the gelus are named as in Hugging Face's configs.
ALIASES: Mapping[str, str] = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_FUNCTIONS: Mapping[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.leaky_relu: "leaky_relu",
    F.gelu: "gelu",
    F.silu: "silu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.softplus: "softplus",
}

_MODULES: Mapping[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Softplus: "softplus",
}

#: Arguments that modules store as attributes, including those of ``softplus``.
_ARGUMENTS = ("approximate", "negative_slope", "beta", "threshold")
_SOFTPLUS = {"beta": 1, "threshold": 20}


def text_of(activation: Callable[..., Any]) -> str:
    """The epilogue's text for a torch activation.

    >>> text_of(F.silu), text_of(nn.GELU(approximate="tanh")), text_of(nn.LeakyReLU(0.2))
    ('silu', 'gelu_tanh', 'leaky_relu(0.2)')

    Raises:
        TypeError: It is not an activation, or has arguments that no epilogue has; the message shows
            the :class:`~tmm_core.Epilogue` to write.
    """
    text, given = _taken_apart(activation)
    if text == "gelu":
        text = {"none": "gelu", "tanh": "gelu_tanh"}.get(given.pop("approximate", "none"))
    elif text == "leaky_relu":
        text = f"leaky_relu({float(given.pop('negative_slope', 0.01))!r})"
    elif text == "softplus":
        usual = all(given.pop(argument, value) == value for argument, value in _SOFTPLUS.items())
        text = text if usual else None
    if text is None or given:
        raise TypeError(_refusal(activation))
    return text


def _taken_apart(activation: Any) -> tuple[str | None, dict[str, Any]]:
    """Its name here and its arguments, without ``inplace``: nothing else uses the product."""
    given: dict[str, Any] = {}
    if isinstance(activation, functools.partial) and not activation.args:
        given = {k: v for k, v in activation.keywords.items() if k != "inplace"}
        activation = activation.func
    if isinstance(activation, nn.Module):
        given = {
            name: getattr(activation, name) for name in _ARGUMENTS if hasattr(activation, name)
        }
        return _MODULES.get(type(activation)), given
    try:
        return _FUNCTIONS.get(activation), given
    except TypeError:  # unhashable
        return None, given


def _refusal(activation: Any) -> str:
    if isinstance(activation, type):
        return f"epilogue: {activation.__name__} is a class; pass an instance of it"
    jitted = hasattr(activation, "fn") and hasattr(activation, "arg_names")
    name = getattr(activation, "__name__", "")
    if not isinstance(name, str) or not name.isidentifier():
        name = "my_epilogue"
    if jitted:
        return (
            f"epilogue: {name} is only a @triton.jit function, and kernels are verified "
            f"against a reference in torch: write tmm_core.Epilogue({name!r}, "
            f"reference=lambda z: …, device={name}), the same function of a tensor z"
        )
    return (
        f"epilogue: {activation!r} is not a known activation: write "
        f"tmm_core.Epilogue({name!r}, reference=…), a function of the product in torch, and give "
        "it device=…, the same function under @triton.jit, for kernels to fuse it"
    )
