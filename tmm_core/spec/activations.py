"""What people pass for an epilogue besides its name: names that other libraries use for the same
function, and torch's own activations, as functions, modules or partials of functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: The function's name here, by the name elsewhere: swish is what Ramachandran et al. called silu
#: (arXiv:1710.05941), the gelus are so named in Hugging Face's configs.
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

#: What a module holds of the function's arguments, and those that ``softplus`` stands for here.
_ARGUMENTS = ("approximate", "negative_slope", "beta", "threshold")
_SOFTPLUS = {"beta": 1, "threshold": 20}


def text_of(activation: Callable[..., Any]) -> str:
    """The epilogue's text for an activation of torch.

    >>> text_of(F.silu), text_of(nn.GELU(approximate="tanh")), text_of(nn.LeakyReLU(0.2))
    ('silu', 'gelu_tanh', 'leaky_relu(0.2)')

    Raises:
        TypeError: It is none, or has arguments that no epilogue has; the message shows the
            :class:`~tmm_core.Epilogue` to write.
    """
    name, given = _taken_apart(activation)
    text = None
    if name == "gelu":
        text = {"none": "gelu", "tanh": "gelu_tanh"}.get(given.pop("approximate", "none"))
    elif name == "leaky_relu":
        text = f"leaky_relu({float(given.pop('negative_slope', 0.01))!r})"
    elif name == "softplus":
        usual = all(given.pop(argument, value) == value for argument, value in _SOFTPLUS.items())
        text = name if usual else None
    else:
        text = name
    if text is None or given:
        raise TypeError(_refusal(activation))
    return text


def _taken_apart(activation: Any) -> tuple[str | None, dict[str, Any]]:
    """Its name here, and its arguments but ``inplace``: the product is nobody else's."""
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
    except TypeError:  # it cannot be hashed
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
            f"epilogue: {name} is a @triton.jit function alone, and what kernels compute is held "
            f"against a reference in torch: write tmm_core.Epilogue({name!r}, "
            f"reference=lambda z: …, device={name}), the same function of a tensor z"
        )
    return (
        f"epilogue: {activation!r} is no activation that has a name here: write "
        f"tmm_core.Epilogue({name!r}, reference=…), a function of the product in torch, and give "
        "it device=…, the same function under @triton.jit, for kernels to fuse it"
    )
