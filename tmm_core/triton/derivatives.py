"""Derivatives of the built-in epilogues, under the same names as in
:mod:`tmm_core.triton.epilogues`, and their combination into one function for a chain.

All take fp32 blocks of the pre-activation and return the factor of the gradient: a block, or the
pair ``(d/d gate, d/d up)``. Where the choice is arbitrary (relu at zero, a NaN), they follow
torch's backward.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from tmm_core.spec.epilogue import Epilogue
from tmm_core.triton import epilogues
from tmm_core.triton.epilogues import (
    _GELU_CUBIC,
    _GELU_LINEAR,
    _exp2,
    _reciprocal,
    device_function,
    generated,
)

# 1/√2π; √(2/π), twice and with thrice GPT-2's cubic coefficient.
_NORMAL = tl.constexpr(0.3989422804014327)
_GELU_SLOPE = tl.constexpr(1.5957691216057308)
_GELU_SLOPE_CUBIC = tl.constexpr(1.5957691216057308 * 3 * 0.044715)


@triton.jit
def identity(z):
    return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def relu(z):
    return tl.where(z <= 0, 0.0, 1.0)


@triton.jit
def relu2(z):
    return 2 * epilogues.relu(z)


@triton.jit
def leaky_relu(z, slope: tl.constexpr):
    return tl.where(z > 0, 1.0, slope)


@triton.jit
def sigmoid(z):
    s = epilogues.sigmoid(z)
    return s * (1 - s)


@triton.jit
def silu(z):
    s = epilogues.sigmoid(z)
    return s + z * s * (1 - s)


@triton.jit
def tanh(z):
    y = epilogues.tanh(z)
    return 1 - y * y


@triton.jit
def gelu(z):
    # Φ(z), and the normal density times z.
    cdf, bell = epilogues.normal(z)
    return cdf + z * bell * _NORMAL


@triton.jit
def gelu_tanh(z):
    # Through sigmoid(2u), like the function.
    square = z * z
    s = _reciprocal(1 + _exp2(z * (square * _GELU_CUBIC + _GELU_LINEAR)))
    return s + z * s * (1 - s) * (square * _GELU_SLOPE_CUBIC + _GELU_SLOPE)


@triton.jit
def softplus(z):
    return epilogues.sigmoid(z)


@triton.jit
def softcap(z, cap: tl.constexpr):
    return tanh(z / cap)


@triton.jit
def scale(z, factor: tl.constexpr):
    return tl.full(z.shape, factor, tl.float32)


# The compiler computes once what an activation and its derivative have in common.


@triton.jit
def swiglu(gate, up):
    return silu(gate) * up, epilogues.silu(gate)


@triton.jit
def geglu(gate, up):
    return gelu(gate) * up, epilogues.gelu(gate)


@triton.jit
def geglu_tanh(gate, up):
    return gelu_tanh(gate) * up, epilogues.gelu_tanh(gate)


@triton.jit
def reglu(gate, up):
    return tl.where(gate <= 0, 0.0, up), epilogues.relu(gate)


@functools.lru_cache(maxsize=1024)
def device_derivative(epilogue: Epilogue) -> Any:
    """The ``@triton.jit`` derivative of ``epilogue``: with the signature of
    :func:`~tmm_core.triton.device_function`, it returns the slope (two of them if gated).

    Raises:
        ValueError: A stage lacks a device function or its derivative.
    """
    stages = epilogue.stages or (epilogue,)
    # A stage's function is an ordinary device function with parameters baked in.
    names = {
        f"slope{i}": device_function(replace(stage, device=stage.device_derivative, builtin=False))
        for i, stage in enumerate(stages)
    }
    if len(stages) == 1:
        return names["slope0"]
    # The chain rule, written out: every stage's input, then the product of their slopes.
    values, result = ("gate, up", "s, t") if epilogue.gated else ("z", "s")
    lines, argument = [f"def slopes({values}):", f"    {result} = slope0({values})"], values
    for i, stage in enumerate(stages[:-1]):
        names[f"stage{i}"] = device_function(stage)
        lines += [f"    z = stage{i}({argument})", f"    r = slope{i + 1}(z)"]
        lines += [f"    {name} = {name} * r" for name in result.split(", ")]
        argument = "z"
    lines.append(f"    return {result}")
    return generated("slopes", lines, names, f"derivative of {epilogue.key}")
