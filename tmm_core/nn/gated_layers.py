"""Gated MLPs that compute their first two products as one, of a weight ``[2N, K]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tmm_core import compat, dispatch
from tmm_core.epilogues import GATED_BY
from tmm_core.interop import autograd_state
from tmm_core.nn.gated_product import gated, gated_linear, recorded_product, run
from tmm_core.nn.linear import Linear, leaf
from tmm_core.nn.together import Together, only_multiply
from tmm_core.quantized import Quantized
from tmm_core.settings import with_static_weights
from tmm_core.spec.epilogue import Epilogue, EpilogueLike

Tensor = torch.Tensor
_forward_ad = compat.forward_ad

NAMES = ("gate_proj", "up_proj", "down_proj")


def gated_by(activation: EpilogueLike) -> Epilogue:
    """Return the gated epilogue of an activation, or the gated epilogue that ``activation`` is.

    Raises:
        UnknownNameError: There is no such activation or epilogue.
        ValueError: It does not gate.
    """
    registry = dispatch.default_dispatcher().registry
    parsed = registry.epilogue(activation)
    parsed = registry.epilogue(GATED_BY.get(parsed.key, parsed))
    if not parsed.gated:
        raise ValueError(
            f"activation {activation!r} does not gate; known: {sorted(GATED_BY)}, or a gated "
            "epilogue such as 'swiglu'"
        )
    return parsed


class GatedMLP(Together):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))`` in two products.

    >>> GatedMLP(64, 172).state_dict().keys()
    odict_keys(['gate_proj.weight', 'up_proj.weight', 'down_proj.weight'])

    Without gradients, gate and up are one product with the gating in the kernel. With
    gradients they are one product too, and a separate kernel gates: backward needs both
    pre-activations, and saves only them and ``x``. The gradients of the two weights are then
    halves of one allocation. Without such a kernel (a CPU, fp64, a user's epilogue without
    derivatives; :class:`tmm_core.Epilogue`), they are two products, gated by torch.

    Args:
        hidden_size: K, the width of input and output.
        intermediate_size: N, the width between.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"relu"``; or a gated
            epilogue, registered or as an object.
        bias: Whether the three layers have a bias.
        device, dtype: As for ``torch.nn.Linear``.

    Shapes:
        ``[..., hidden_size]`` to ``[..., hidden_size]``.

    Raises:
        UnknownNameError: No such activation or epilogue.
        ValueError: The epilogue is not gated.

    In these cases the layer computes two products instead of one, with the same result:

    * The pair is not :attr:`merged`: a parameter was moved or replaced on its own, or by FSDP.
    * ``gate_proj`` or ``up_proj`` has a hook, a parametrization or an adapter.
    * An autocast casts the weights. In training, under any autocast.
    * In training, in a compiled graph or under ``torch.func``.

    If ``ColwiseParallel`` sharded gate and up, they are one product of each rank's shards, except
    under FSDP and autocast and in compiled graphs. ``torch.save`` of one of the two parameters
    writes the storage of both; of its ``state_dict`` entry, only its own.
    """

    #: Addresses of the shards when they were last joined.
    _shards_seen: Sequence[int] = ()
    #: Run the first product under the setting ``static_weights``, with the exception of
    #: :attr:`ProductLayer.static_weights`; ``down_proj`` has its own.
    static_weights = False

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: EpilogueLike = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._names: Sequence[str] = NAMES
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, device, dtype)
        self._gate_by(activation)
        self._swapped_in()

    def _gate_by(self, epilogue: EpilogueLike) -> None:
        parsed = gated_by(epilogue)
        if parsed.interleaved or parsed.stages:
            raise ValueError(f"epilogue {str(parsed)!r} is not one function of gate and up halves")
        self._epilogue = epilogue
        self._text = parsed.interned()

    @property
    def epilogue(self) -> str:
        """The gated epilogue's key."""
        return self._text

    def _together(self) -> list[Any]:
        return self._layers()[:2]

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor and (node := leaf(self, x)) is not None:
            return node  # type: ignore[no-any-return]
        gate, up, down = self._layers()
        between = None
        if only_multiply((gate, up), x):
            of_gate, of_up = gate._parameters, up._parameters
            weights: Any = of_gate["weight"], of_up["weight"]
            biases: Any = of_gate["bias"], of_up["bias"]
            operands = weights, biases, self._text
            stored = type(weights[0]) is Quantized  # no gradient, and no operator in a graph
            if autograd_state.recorded(x, *weights, *biases):
                between = None if stored else recorded_product(x, *operands)
            elif stored and torch.compiler.is_compiling():
                between = None
            elif torch.compiler.is_compiling():
                between = gated_linear(x, *weights, *biases, self._text)
            elif not self.static_weights or gate._state_dict_pre_hooks or up._state_dict_pre_hooks:
                between = run(x, *operands)
            else:
                between = with_static_weights(run, x, *operands)
        elif _sharded(gate):
            between = self._sharded_product(gate, up, x)
        if between is None:
            between = gated(gate(x), up(x), self._text)
        return down(between)  # type: ignore[no-any-return]

    def _sharded_product(self, gate: Any, up: Any, x: Tensor) -> Tensor | None:
        """Return the result of :mod:`tmm_core.nn.sharded`; None if it does not apply to these
        layers, or a mode or transform needs to see their calls."""
        if torch.compiler.is_compiling() or _forward_ad._current_level >= 0:
            return None
        if compat.autocasts_on(x.device.type):
            return None
        from tmm_core.nn import sharded

        return sharded.gated(self, gate, up, x)

    def _layers(self) -> list[Any]:
        return [self._modules[name] for name in self._names]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gate_by(self._epilogue)

    def extra_repr(self) -> str:
        # Torch's vmap prints its function, also in a graph, which knows no addresses.
        merged = "" if torch.compiler.is_compiling() else f", merged={self.merged}"
        own = super().extra_repr()
        return f"{own}{', ' if own else ''}epilogue={self._text!r}{merged}"


SwiGLU = GatedMLP


def _sharded(layer: Any) -> bool:
    weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
    return isinstance(weight, compat.dtensor())
