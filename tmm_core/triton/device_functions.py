"""Compiles the device functions of epilogues and formats: jits plain ones, bakes parameters in, and
combines a chain into one.

Device functions of epilogues work on fp32 blocks. Parameters are ``tl.constexpr``, so every value
gives a separate kernel.
"""

from __future__ import annotations

import dis
import functools
import linecache
import types
from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core.formats import Format
from tmm_core.spec.device import interpreting
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.identity import identity
from tmm_core.spec.port import Port
from tmm_core.spec.problem import Problem


@functools.lru_cache(maxsize=1024)
def device_function(epilogue: Epilogue) -> Any:
    """The ``@triton.jit`` function of ``epilogue``: it takes the fp32 accumulator (two of them if
    gated) and returns a block of its shape. Parameters are baked in.

    A kernel takes it as a ``tl.constexpr`` argument and calls it. Triton's cache key covers the
    sources of the function and of all its callees.

    Raises:
        ValueError: A stage has no device function (``epilogue.fusable`` is False).
    """
    stages = epilogue.chain
    names = {f"stage{i}": _baked(stage.device, stage) for i, stage in enumerate(stages)}
    if len(stages) == 1:
        return names["stage0"]
    inputs = _inputs(epilogue)
    lines = [f"def chain({inputs}):", f"    z = stage0({inputs})"]
    lines += [f"    z = {name}(z)" for name in list(names)[1:]]
    return _generated([*lines, "    return z"], names, f"epilogue {epilogue.key}")


@functools.lru_cache(maxsize=1024)
def device_derivative(epilogue: Epilogue) -> Any:
    """Return the ``@triton.jit`` derivative of ``epilogue``: with the signature of
    :func:`device_function`, it returns the factor of the gradient, a block, or the pair
    ``(d/d gate, d/d up)``. Where the choice is arbitrary (relu at zero, a NaN), built-in epilogues
    follow torch's backward.

    Raises:
        ValueError: A stage lacks a device function or its derivative.
    """
    stages = epilogue.chain
    names = {f"slope{i}": _baked(stage.device_derivative, stage) for i, stage in enumerate(stages)}
    if len(stages) == 1:
        return names["slope0"]
    # The chain rule, written out: every stage's input, then the product of their slopes.
    inputs = _inputs(epilogue)
    slopes = "s, t" if epilogue.gated else "s"
    lines, argument = [f"def slopes({inputs}):", f"    {slopes} = slope0({inputs})"], inputs
    for i, stage in enumerate(stages[:-1]):
        names[f"stage{i}"] = _baked(stage.device, stage)
        lines += [f"    z = stage{i}({argument})", f"    r = slope{i + 1}(z)"]
        lines += [f"    {name} = {name} * r" for name in slopes.split(", ")]
        argument = "z"
    lines.append(f"    return {slopes}")
    return _generated(lines, names, f"derivative of {epilogue.key}")


def port_function(port: Port) -> Any:
    """Return the ``@triton.jit`` function of an epilogue's output. It takes an fp32 block of the
    result and returns a block of the same shape, which the output holds or reduces.

    Raises:
        ValueError: It has no device function (``port.fusable`` is False).
    """
    return _jitted(IDENTITY.device if port.of is None else port.device, f"output {port.name!r}")


def decode_function(form: Format) -> Any:
    """Return the ``@triton.jit`` function ``decode(codes, dtype)`` of a format.

    Raises:
        ValueError: It has none.
    """
    return _jitted(form.decode, f"format {form.name!r}")


def step_function(problem: Problem, plain: Any) -> Any:
    """The ``@triton.jit`` function of one step along K for the formats of a problem's operands.

    Args:
        plain: The step for plain operands, and for operands that tensor cores multiply as they are
            stored: ``plain(a, b, acc, PRECISION, SWAP=False)``.

    Returns:
        A function with this signature that takes ``b`` as stored, unpacks it and decodes it. A
        sixth argument, if ``b`` has zero points, is the zero points of its columns, in fp32.

    Raises:
        ValueError: The format of ``b`` has no device function, or more than two values in an
            element.
    """
    form = problem.b.form
    if form is None or problem.a.form is not None:
        return plain
    return _decoding(plain, form, problem.b.zero is not None)


@functools.lru_cache(maxsize=64)
def _decoding(plain: Any, form: Format, zeros: bool) -> Any:
    if form.pack > 2:
        raise ValueError(f"format {form.name!r} has {form.pack} values in an element, not two")
    title = f"step of {form.name} weights" + (" with zero points" if zeros else "")
    sixth = ", zero=None" if zeros else ""
    lines = [f"def step(a, b, acc, PRECISION: tl.constexpr, SWAP: tl.constexpr = False{sixth}):"]
    if form.pack == 2:
        mask = (1 << form.bits) - 1
        lines += [
            f"    pair = tl.join(b & {mask}, (b >> {form.bits}) & {mask}).permute(0, 2, 1)",
            "    b = pair.reshape(2 * b.shape[0], b.shape[1])",
        ]
    if zeros:
        lines += [
            f"    b = decode(b, tl.float32) - (zero - {form.origin})[None, :]",
            "    return plain(a, b.to(a.dtype), acc, PRECISION, SWAP)",
        ]
    else:
        lines.append("    return plain(a, decode(b, a.dtype), acc, PRECISION, SWAP)")
    names = {"plain": plain, "decode": decode_function(form)}
    return _generated(lines, names, title)


def _inputs(epilogue: Epilogue) -> str:
    return "gate, up" if epilogue.gated else "z"


def _baked(device: Any, stage: Epilogue) -> Any:
    """Return a function of a single stage, with its parameters as constants."""
    function = _jitted(device, f"epilogue {stage.name!r}")
    if not stage.parameters:
        return function
    inputs = _inputs(stage)
    arguments = ", ".join([inputs, *map(repr, stage.parameters)])
    lines = [f"def stage({inputs}):", f"    return function({arguments})"]
    return _generated(lines, {"function": function}, f"stage {stage}")


def _generated(lines: list[str], names: dict[str, Any], title: str) -> Any:
    """Return the ``@triton.jit`` function with these lines, which use these names. Triton compiles
    only from source, and reads it through linecache, here under ``title``."""
    source = "\n".join([*lines, ""])
    filename = f"<tmm {title}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace = {"tl": tl, "__name__": __name__, **names}
    exec(compile(source, filename, "exec"), namespace)
    return triton.jit(namespace[lines[0][len("def ") : lines[0].index("(")]])


def _jitted(device: Any, of: str) -> Any:
    """Return the ``@triton.jit`` function that ``device`` is or becomes."""
    if device is None:
        raise ValueError(f"{of} has no device function to fuse")
    return _compiled(device, identity(device)) if isinstance(device, types.FunctionType) else device


@functools.cache
def _compiled(function: types.FunctionType, _identity: Hashable) -> Any:
    """Return a copy of a plain function under ``@triton.jit``, whose globals and closure variables
    are what Triton accepts: plain functions are jitted, numbers and texts are constants.
    ``_identity`` changes with them."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    names = {
        "tl": tl,
        # Inline PTX serves instructions that Triton's language lacks.
        "INLINE_PTX": torch.version.hip is None and not interpreting(),
        **function.__globals__,
        **{name: cell.cell_contents for name, cell in cells},
    }
    read = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    for name in (*read, *code.co_freevars):
        value = names.get(name)
        if isinstance(value, types.FunctionType):
            names[name] = _compiled(value, identity(value))
        elif type(value) in (bool, int, float, str):
            names[name] = tl.constexpr(value)
    closure = tuple(types.CellType(names[name]) for name in code.co_freevars)
    copy = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    copy.__annotations__, copy.__qualname__ = function.__annotations__, function.__qualname__
    return triton.jit(copy)
