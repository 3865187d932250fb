"""Device functions of the built-in epilogues, and their combination into one function for a chain.

All work on fp32 blocks. Parameters are ``tl.constexpr``, so every value gives a separate kernel.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import math
from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core.formats import Format
from tmm_core.spec.device import interpreting
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.port import Port
from tmm_core.spec.problem import Problem

# −½ log2 e, −2√(2/π)·log2 e, GPT-2's cubic coefficient times that, as in torch.nn.functional.gelu.
# Write block × constant: the interpreter does not support constexpr × block.
_HALF_LOG2_E = tl.constexpr(-0.5 * math.log2(math.e))
_GELU_LINEAR = tl.constexpr(-1.5957691216057308 * math.log2(math.e))
_GELU_CUBIC = tl.constexpr(-1.5957691216057308 * math.log2(math.e) * 0.044715)
_LOG2_E = tl.constexpr(math.log2(math.e))
#: Whether to use inline PTX for operations with a hardware instruction: with Triton's ``tl.exp``
#: and ``/``, which handle denormals, silu takes 13 instructions instead of 5.
_PTX = tl.constexpr(torch.version.hip is None and not interpreting())


@triton.jit
def _exp2(z):
    """2^z to 2 ulp; denormal results become zero."""
    if _PTX:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(z)
    return y


@triton.jit
def _reciprocal(z):
    """1 / z to 1 ulp; denormal results become zero."""
    if _PTX:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1 / z
    return y


@triton.jit
def identity(z):
    return z


@triton.jit
def relu(z):
    # Not tl.maximum(z, 0): NaN has to propagate, as in torch.
    return tl.where(z < 0, 0.0, z)


@triton.jit
def relu2(z):
    r = relu(z)
    return r * r


@triton.jit
def leaky_relu(z, slope: tl.constexpr):
    return tl.where(z < 0, z * slope, z)


@triton.jit
def sigmoid(z):
    return _reciprocal(1 + _exp2(z * -_LOG2_E))


@triton.jit
def silu(z):
    return z * sigmoid(z)


@triton.jit
def tanh(z):
    # 1 − 2 / (e^2z + 1) has the right limits where e^2z becomes inf or 0. Near zero it cancels, so
    # the odd Taylor series to z⁷ is used, to 2 ulp; elsewhere the error is 8 ulp.
    square = z * z
    series = z * (1 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(tl.abs(z) < 0.2, series, 1 - 2 * _reciprocal(1 + _exp2(z * (2 * _LOG2_E))))


@triton.jit
def normal(z):
    """The normal distribution Φ(z), and e^(−z²/2).

    Φ(−|z|)·e^(z²/2) is approximated by t times a polynomial in t = 1 / (1 + 0.305 |z|), fitted for
    |z| up to 14.5 by weighted least squares, with a relative error of 9.7e-8. It does not cancel
    below zero, unlike ½(1 + erf), and takes 17 instructions per element instead of 32.
    """
    t = _reciprocal(tl.abs(z) * 0.305 + 1)
    bell = _exp2(z * (z * _HALF_LOG2_E))
    series = t * 0.03663934767246246 - 0.15274786949157715
    series = series * t + 0.18531760573387146
    series = series * t - 0.037622835487127304
    series = series * t + 0.120841383934021
    series = series * t + 0.10347343236207962
    series = series * t + 0.12245871871709824
    series = series * t + 0.12164024263620377
    tail = series * t * bell
    return tl.where(z < 0, tail, 1 - tail), bell


@triton.jit
def gelu(z):
    cdf, _ = normal(z)
    return z * cdf


@triton.jit
def gelu_tanh(z):
    # ½(1 + tanh u) = sigmoid(2u)
    return z * _reciprocal(1 + _exp2(z * (z * z * _GELU_CUBIC + _GELU_LINEAR)))


@triton.jit
def softplus(z):
    # log(1 + e^z) = max(z, 0) + log(1 + e^−|z|), which never overflows.
    small = tl.exp(-tl.abs(z))
    # log(1 + s) loses s below 1e-4; there s − s²/2 is exact to fp32 rounding.
    log1p = tl.where(small < 1e-4, small * (1 - 0.5 * small), tl.log(1 + small))
    return relu(z) + log1p


@triton.jit
def softcap(z, cap: tl.constexpr):
    return cap * tanh(z / cap)


@triton.jit
def scale(z, factor: tl.constexpr):
    return z * factor


@triton.jit
def swiglu(gate, up):
    return silu(gate) * up


@triton.jit
def geglu(gate, up):
    return gelu(gate) * up


@triton.jit
def geglu_tanh(gate, up):
    return gelu_tanh(gate) * up


@triton.jit
def reglu(gate, up):
    return relu(gate) * up


@functools.lru_cache(maxsize=1024)
def device_function(epilogue: Epilogue) -> Any:
    """The ``@triton.jit`` function of ``epilogue``: it takes the fp32 accumulator (two of them if
    gated) and returns a block of its shape. Parameters are baked in.

    A kernel takes it as a ``tl.constexpr`` argument and calls it; Triton's cache key covers its
    source and that of all its callees.

    Raises:
        ValueError: A stage has no device function (``epilogue.fusable`` is False).
    """
    stages = epilogue.stages or (epilogue,)
    functions = [_named(stage.device, f"epilogue {stage.name!r}") for stage in stages]
    if len(stages) == 1 and not epilogue.parameters:
        return functions[0]
    inputs = "gate, up" if epilogue.gated else "z"
    lines, argument = [f"def chain({inputs}):"], inputs
    for i, stage in enumerate(stages):
        constants = "".join(f", {p!r}" for p in stage.parameters)
        lines.append(f"    z = stage{i}({argument}{constants})")
        argument = "z"
    namespace = {f"stage{i}": f for i, f in enumerate(functions)}
    return generated("chain", [*lines, "    return z"], namespace, f"epilogue {epilogue.key}")


def generated(name: str, lines: list[str], namespace: dict[str, Any], title: str) -> Any:
    """The ``@triton.jit`` function of that name with these lines: Triton compiles from source only,
    which it reads through linecache, here under ``title``."""
    source = "\n".join([*lines, ""])
    filename = f"<tmm {title}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace |= {"tl": tl, "__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return triton.jit(namespace[name])


def step_function(problem: Problem, plain: Any) -> Any:
    """The ``@triton.jit`` function of one step along K for the formats of a problem's operands.

    Args:
        plain: That of plain operands, and of operands that tensor cores multiply as they are
            stored: ``plain(a, b, acc, PRECISION, SWAP=False)``.

    Raises:
        ValueError: The format of ``b`` has no device function.
    """
    form = problem.b.form
    if form is None or problem.a.form is not None:
        return plain
    return _decoding(plain, form)


@functools.lru_cache(maxsize=64)
def _decoding(plain: Any, form: Format) -> Any:
    device = _named(form.decode, f"format {form.name!r}")
    decode = device if isinstance(device, triton.JITFunction) else triton.jit(device)
    lines = [
        "def step(a, b, acc, PRECISION: tl.constexpr, SWAP: tl.constexpr = False):",
        "    return plain(a, decode(b, a.dtype), acc, PRECISION, SWAP)",
    ]
    names = {"plain": plain, "decode": decode}
    return generated("step", lines, names, f"step of {form.name} weights")


def port_function(port: Port) -> Any:
    """The ``@triton.jit`` function of what an output of an epilogue holds or reduces: takes an fp32
    block of the result and returns one of its shape.

    Raises:
        ValueError: It has no device function (``port.fusable`` is False).
    """
    if port.of is None:
        return identity
    return _named(port.device, f"output {port.name!r}")


def _named(device: Any, of: str) -> Any:
    """The function itself, or what ``"module:attribute"`` names."""
    if device is None:
        raise ValueError(f"{of} has no device function to fuse")
    if isinstance(device, str):
        module, _, attribute = device.partition(":")
        return getattr(importlib.import_module(module), attribute)
    return device
