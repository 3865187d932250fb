"""gpt-oss's experts with the weights of its checkpoints: 4-bit floats in groups of 32 that share an
exponent (MXFP4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tmm_core.nn import experts


class Mxfp4Experts(nn.Module):
    """Experts in MXFP4 that replace a layer of Transformers with the same names and sizes.

    Parameters have the names and shapes of gpt-oss's checkpoints. ``gate_up_proj_blocks`` ``[E, 2I,
    H/32, 16]`` and ``down_proj_blocks`` ``[E, H, I/32, 16]`` hold two numbers in a byte.
    ``gate_up_proj_scales`` and ``down_proj_scales`` lack the last dimension. Both biases are ``[E,
    N]``.

    Args:
        layer: A ``GptOssExperts`` on any device, whose gate and biases' dtype are used.
        device: The device of the new parameters, which are not initialised.
    """

    has_gate, has_bias, is_transposed, is_concatenated = True, True, False, False
    forward = experts.forward

    def __init__(self, layer: Any, device: Any = None) -> None:
        super().__init__()
        self.gate_kind = experts.gate_kind(layer)
        self.config = layer.config
        self.num_experts = count = layer.num_experts
        self.hidden_size, self.intermediate_size = layer.hidden_size, layer.intermediate_size
        self.alpha, self.limit = layer.alpha, layer.limit
        dtype = layer.down_proj_bias.dtype
        sizes = {
            "gate_up_proj": (2 * self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
        for name, (n, k) in sizes.items():
            if k % 32:
                raise ValueError(f"groups of 32 do not divide K = {k} of {name}")

            def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> nn.Parameter:
                return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), False)

            setattr(self, f"{name}_blocks", empty(count, n, k // 32, 16))
            setattr(self, f"{name}_scales", empty(count, n, k // 32))
            setattr(self, f"{name}_bias", empty(count, n, dtype=dtype))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, epilogue={experts.epilogue_of(self)!r}"
