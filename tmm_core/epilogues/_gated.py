"""Makes the gated form of an activation, as in GLU Variants (arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

from tmm_core.spec.epilogue import Epilogue

#: The name of an activation's gated form, by the activation's name.
GATED_BY: dict[str, str] = {}


def gated(name: str, activation: Epilogue, device_derivative: Any = None) -> Epilogue:
    """``activation(gate) · up`` of two halves of the product; ``activation`` has a ``derivative``.

    Args:
        device_derivative: Replaces the product rule on the activation's device functions.
    """
    GATED_BY[activation.name] = name
    reference, derivative = activation.reference, activation.derivative
    function, slope = activation.device, activation.device_derivative
    assert derivative is not None

    def device(gate, up):
        return function(gate) * up

    # The compiler computes once what an activation and its derivative have in common.
    def slopes(gate, up):
        return slope(gate) * up, function(gate)

    return Epilogue(
        name,
        lambda gate, up: reference(gate) * up,
        device=device,
        derivative=lambda gate, up: (derivative(gate) * up, reference(gate)),
        device_derivative=device_derivative or slopes,
        gated=True,
        builtin=True,
    )
