"""Mixtures of experts: all experts of a layer in two grouped products.

A forward sorts the router's choices by expert. The product of gate and up gathers rows while
loading them and fuses the gating. The product of down weights rows and scatters them while storing.
Then the experts of each token are summed, in a fixed order, in fp32, rounded once.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch import nn

from tmm_core import compat, grouped
from tmm_core.epilogues import GATED_BY
from tmm_core.nn import stored_experts, stored_weights
from tmm_core.nn.activation import activated_by, gate_epilogue, multiplies_halves
from tmm_core.nn.gated_layers import gated_by
from tmm_core.quantized import Quantized
from tmm_core.spec.epilogue import EpilogueLike

Tensor = torch.Tensor

#: The module of Transformers that defines the forward of its expert layers.
_THEIRS = "transformers.integrations.moe"


class Experts(nn.Module):
    """The experts of a layer, called with its router's choice.

    >>> layer = Experts(num_experts=4, hidden_size=8, intermediate_size=12)
    >>> x, chosen = torch.randn(5, 8), torch.tensor([[0, 2], [1, 0], [2, 3], [3, 1], [0, 1]])
    >>> layer(x, chosen, torch.full((5, 2), 0.5)).shape
    torch.Size([5, 8])

    Parameters have Transformers' layout: ``gate_up_proj`` ``[E, 2I, H]``, gate rows before up rows,
    and ``down_proj`` ``[E, H, I]``. With ``bias`` there are ``gate_up_proj_bias`` ``[E, 2I]`` and
    ``down_proj_bias`` ``[E, H]``.

    Args:
        num_experts, hidden_size, intermediate_size: E, H and I.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"relu"``; or a gated
            epilogue, registered or as an object. If it is interleaved, as ``"clamped_swiglu"`` of
            gpt-oss, rows of gate and up alternate.
        bias: Whether both projections have a bias.
        device, dtype: As for ``torch.nn.Linear``.

    Raises:
        UnknownNameError: No such activation or epilogue.
        ValueError: The epilogue is not gated.
    """

    #: As Transformers describes the layout.
    has_gate, is_transposed = True, False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: EpilogueLike = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._gate_by(activation)
        wide, narrow = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.gate_up_proj, self.down_proj = parameter(*wide), parameter(*narrow)
        self.gate_up_proj_bias = parameter(wide[0]) if bias else None
        self.down_proj_bias = parameter(narrow[0]) if bias else None
        self.reset_parameters()

    @property
    def has_bias(self) -> bool:
        return self.down_proj_bias is not None

    def _gate_by(self, activation: EpilogueLike) -> None:
        self._activation = activation
        self.epilogue = gated_by(activation).interned()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._gate_by(self._activation)  # its text is valid in one process only

    def reset_parameters(self) -> None:
        """Initialise each expert's weights and biases as ``torch.nn.Linear`` does."""
        for weight, bias in (
            (self.gate_up_proj, self.gate_up_proj_bias),
            (self.down_proj, self.down_proj_bias),
        ):
            bound = 1 / math.sqrt(max(1, weight.shape[-1]))
            for t in (weight, bias):
                if t is not None:
                    nn.init.uniform_(t, -bound, bound)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``.

        Args:
            hidden_states: ``[T, H]``, one row per token.
            top_k_index: ``[T, k]``, the experts of each token, in int32 or int64. An index that is
                negative, or ``num_experts`` or more, means no expert, or one of another rank, and
                adds nothing.
            top_k_weights: ``[T, k]``.

        Raises:
            RuntimeError: The choice has another dtype, the states are no floats, the weights are
                complex, or shapes do not match.
        """
        return forward(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        experts, hidden, between = self.down_proj.shape
        return (
            f"num_experts={experts}, hidden_size={hidden}, intermediate_size={between}, "
            f"bias={self.has_bias}, epilogue={self.epilogue!r}"
        )


def _by_expert(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the indices ``[T·k]`` that sort a router's choices ``[T, k]`` by expert, and the end
    of each expert's rows ``[E]``, in int32. Computed on the device, without synchronising."""
    # A negative index would count as the first expert. It is treated as one of another rank.
    ids = nn.functional.threshold(index.reshape(-1), -1, experts)
    ids, places = torch.sort(ids, stable=True)
    of = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    return places, torch.searchsorted(ids, of, right=True, out_int32=True)


def _check(hidden_states: Tensor, index: Tensor, weights: Tensor) -> None:
    """Refuse shapes that do not fit the tokens: surplus rows would be ignored. Refuse dtypes whose
    values the weights' dtype would cut."""
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"top_k_index must have dtype torch.int32 or torch.int64, got {index.dtype}"
        )
    if not hidden_states.is_floating_point() or weights.is_complex():
        raise RuntimeError(
            "hidden_states must have a floating dtype and top_k_weights a real one, got "
            f"{hidden_states.dtype} and {weights.dtype}"
        )
    rows = hidden_states.shape[:1]
    if hidden_states.dim() != 2 or index.shape[:1] != rows or index.shape != weights.shape:
        found = ", ".join(str(tuple(t.shape)) for t in (hidden_states, index, weights))
        raise RuntimeError(
            "hidden_states, top_k_index and top_k_weights must have shapes [T, H], [T, k] and "
            f"[T, k], got {found}"
        )


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of :class:`Experts` and of Transformers' expert layers (its
    ``experts_implementation`` interface).

    A gate with a known activation is fused with its product, and so is gpt-oss's; any other is
    applied by the layer's own ``_apply_gate`` or ``act_fn``.
    """
    _check(hidden_states, top_k_index, top_k_weights)
    places, offs = _by_expert(top_k_index, self.num_experts)
    # The token of each row, and its weight.
    tokens = places // max(1, top_k_index.shape[-1])
    weights = top_k_weights.reshape(-1).gather(0, places)
    epilogue, follow = _gate_of(self)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    between = _product(self, up, hidden_states, offs, a_index=tokens, epilogue=epilogue)
    # Rows of experts of other ranks are undefined: parameters' gradients would sum over them.
    if follow is not None:
        between = follow(_in_groups(between, offs) if between.requires_grad else between)
    if getattr(self, "has_post_expert_norm", False):
        # The norm comes between the product and the weight.
        product = _in_groups(_product(self, "down_proj", between, offs), offs)
        normed = self.post_expert_norm(product) * _in_groups(weights[:, None], offs)
        normed = _in_groups(normed, offs)
        down = torch.zeros_like(normed).index_copy(0, places, normed)
    else:
        rows = {"out_index": places, "out_weights": weights}
        down = _product(self, "down_proj", between, offs, **rows)
    # Rows are in the order of tokens again.
    return down.view(*top_k_index.shape, down.shape[-1]).sum(1).to(hidden_states.dtype)


def _in_groups(t: Tensor, offs: Tensor) -> Tensor:
    """Return ``t`` with rows of zero beyond the last group."""
    known = torch.arange(len(t), device=t.device) < offs[-1]
    return torch.where(known[:, None], t, 0)


def _product(layer: Any, name: str, x: Tensor, offs: Tensor, **arguments: Any) -> Tensor:
    """Return the grouped product of ``x`` and the layer's weight ``name``."""
    weight = stored_experts.of(layer, name)
    bias = getattr(layer, f"{name}_bias") if layer.has_bias else None
    # A quantised weight multiplies activations of any dtype.
    dtype = x.dtype if isinstance(weight, Quantized) else weight.dtype
    weights = arguments.get("out_weights")
    if weights is not None and weights.dtype not in (dtype, torch.float32):
        arguments["out_weights"] = weights.float()
    if not compat.autocasts_on(x.device.type):  # which casts both
        x = x.to(dtype)
    if isinstance(weight, Quantized) and getattr(layer, "rounds_activations", False):
        arguments["out_dtype"] = x.dtype
        x = stored_weights.rounded_rows(x, weight)
    return grouped.grouped_matmul(x, weight.mT, offs=offs, bias=bias, **arguments)


def _gate_of(layer: Any) -> tuple[str | None, Any]:
    """Return the epilogue of a layer's product of gate and up, and the function left to apply after
    it."""
    if isinstance(layer, Experts):
        return layer.epilogue, None
    name = activated_by(getattr(layer, "act_fn", None))
    if not layer.has_gate:
        return (name, None) if name is not None else (None, layer.act_fn)
    if "_apply_gate" in vars(layer):
        return None, layer._apply_gate
    gate = gate_kind(layer)._apply_gate
    default = getattr(sys.modules.get(_THEIRS), "_default_apply_gate", None)
    known = (gate is default and layer.is_concatenated) or stored_experts.owns(gate)
    if known and name in GATED_BY and multiplies_halves(layer, gate):
        return GATED_BY[name], None
    if not layer.is_concatenated and (found := gate_epilogue(layer, gate)) is not None:
        return found, None
    return None, functools.partial(gate, layer)


def gate_kind(layer: Any) -> Any:
    """Return the class whose ``_apply_gate`` a layer of Transformers uses."""
    return getattr(layer, "gate_kind", type(layer))


def epilogue_of(layer: Any) -> str:
    """Return the epilogue that is fused into a layer's first product; empty: none."""
    return _gate_of(layer)[0] or ""


class TransformersExperts(nn.Module):
    """A Transformers expert layer with :func:`forward`; both share all attributes."""

    #: Round activations to 8-bit floats if the weights are 8-bit floats.
    rounds_activations = False
    forward = forward

    @property
    def epilogue(self) -> str:
        return epilogue_of(self)

    def extra_repr(self) -> str:
        return f"{type(self).__name__}, epilogue={self.epilogue!r}"


def is_theirs(layer: nn.Module) -> bool:
    """Whether ``layer`` is an expert layer with a forward of Transformers' interface."""
    module = sys.modules.get(_THEIRS)
    code = getattr(type(layer).forward, "__code__", None)
    return (
        module is not None
        and code is not None
        and code.co_filename == module.__file__
        and hasattr(layer, "is_transposed")
        and hasattr(layer, "has_gate")
    )
