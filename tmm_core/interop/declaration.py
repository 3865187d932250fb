"""Declares an operator of the library ``tmm`` with all rules that torch needs for it.

The operator of each public call is declared by :func:`declare`. An operator is opaque to
torch.compile and chooses a kernel at run time (:mod:`tmm_core.dispatch`), so that thousands of M
cause no recompilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core import compat
from tmm_core.formats import FLOATS, pair
from tmm_core.interop import autograd_state, flops
from tmm_core.interop.libraries import TAGS, define
from tmm_core.launch.check import announce_write, check_out, ranges_meet, result_dtype, strided
from tmm_core.launch.codegen import written
from tmm_core.launch.warm import epilogue_of, plain
from tmm_core.settings import overridden, within
from tmm_core.spec.arguments import ROLES_OF, Arguments, GroupedArguments, Role, schema

Tensor = torch.Tensor

#: Devices for which operators have a rule of autocast.
AUTOCAST = ("cuda", "cpu")


def declare(
    name: str,
    arguments: type[Arguments | GroupedArguments],
    *,
    run: Callable[..., Any],
    allowed: Callable[..., bool],
    check: Callable[..., Any],
    empty: Callable[..., Any],
    derivative: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    flop_formula: Callable[..., int],
    returns: str = "Tensor",
) -> Any:
    """Declare ``tmm::name`` and return the operator.

    Torch passes arguments in the schema's order and omits trailing defaults. An operator that
    returns one tensor also has an overload ``out``. Torch decomposes it wherever it traces,
    transforms or counts, so that only one operator is seen there.

    Args:
        arguments: The class of its arguments, whose roles give the schema and the autocast rule.
        allowed: Whether tensors need nothing but autograd of torch's dispatcher
            (:data:`tmm_core.launch.warm.fast_path_allowed`).
        check: ``(call, epilogue) -> shape`` of the result; raises if arguments do not fit.
        empty: ``(call, shape) -> result``, uninitialised.
        derivative: The operator's kernel for torch's Autograd key.
        flop_formula: FLOPs by shapes, for torch's counter.
        returns: The type of the result in the schema.
    """

    def shaped(*given: Any, **named: Any) -> tuple[Any, torch.Size]:
        call: Any = arguments(*given, **named)
        return call, torch.Size(check(call, epilogue_of(call.epilogue)))

    def fake(*given: Any, **named: Any) -> Any:
        return empty(*shaped(*given, **named))

    def run_out(*given: Any, out: Tensor, **named: Any) -> Tensor:
        call, shape = shaped(*given, **named)
        apart = check_out(out, shape, result_dtype(call), call.given)
        if out.is_meta:
            return out
        with compat.uncast(out):
            if apart and _in_memory(out, *call.given):
                announce_write(out)
                return run(*call._replace(out=out))  # type: ignore[no-any-return]
            return out.copy_(operator(*call[:-1]))

    library = define(f"{name}({schema(arguments)}) -> {returns}", run, fake)
    packet = getattr(torch.ops.tmm, name)
    operator = packet.default
    _call_directly(operator, arguments, run, allowed)
    if returns == "Tensor":
        out_schema = f"{name}.out({schema(arguments)}, *, Tensor(a!) out) -> Tensor(a!)"
        library.define(out_schema, tags=TAGS)
        library.impl(f"{name}.out", run_out, "CompositeImplicitAutograd")
    library.impl(name, derivative, "Autograd")
    if vmap is not None:
        torch.library.register_vmap(f"tmm::{name}", vmap, lib=library)
    for device in AUTOCAST:
        rule = _autocast(device, operator, arguments)
        library.impl(name, rule, f"Autocast{device.upper()}")
    flops.count(packet, flop_formula)
    return operator


#: The Python types of arguments that are not tensors, by their types in a schema.
_TYPES = {
    "Scalar": {float},
    "str": {str},
    "bool": {bool},
    "ScalarType?": {type(None), torch.dtype},
}


def _call_directly(
    operator: Any,
    arguments: type[Arguments | GroupedArguments],
    run: Callable[..., Any],
    allowed: Callable[..., bool],
) -> None:
    """Let calls of the operator from Python skip torch's dispatcher where it has nothing to do.

    Compiled graphs call operators. The dispatcher calls the kernel of the Autograd key and then
    ``run``, both in Python, and takes longer than ``run`` itself.
    """
    dispatch = getattr(operator, "_op", None)  # what torch's object of the operator calls
    if dispatch is None:
        return
    roles = [role for role in ROLES_OF[arguments] if role.name != "out"]
    tensors = [role for role in roles if role.is_tensor]
    given = ", ".join(role.name for role in tensors)
    conditions = ["not more", "not named", f"allowed({given})", f"not differentiated({given})"]
    conditions += [f"type({r.name}) in TYPES['{r.type}']" for r in roles if not r.is_tensor]
    conditions += [f"{r.name} is not None" for r in tensors if not r.optional]
    # The dispatcher computes results on meta, by the operator's fake rule.
    conditions += ["not is_batched(a)", "not is_batched(b)", "not a.is_meta"]
    defaults = {role.name: arguments._field_defaults.get(role.name) for role in roles}
    is_direct = written(
        "is_direct",
        ", ".join(f"{name}={value!r}" for name, value in defaults.items()) + ", *more, **named",
        [f"return {' and '.join(conditions)}"],
        {
            "allowed": allowed, "differentiated": autograd_state.differentiated, "TYPES": _TYPES,
            "is_batched": compat.is_batched,
        },
    )  # fmt: skip

    def call(*given: Any, **named: Any) -> Any:
        return (run if is_direct(*given, **named) else dispatch)(*given, **named)

    operator._op = call


def rewritten(
    call: Any, allowed: Callable[..., bool], replay: Callable[..., Tensor | None]
) -> Tensor | None:
    """Compute a call with ``out`` like one before, whose plan proves that this ``out`` fits. None
    if there is no such plan, or the call needs torch's dispatcher or has to be refused."""
    if torch.compiler.is_dynamo_compiling():
        return None
    out, tensors = call.out, call.tensors
    given = [t for t in tensors if t is not None]
    if (
        not (plain(out) and allowed(*tensors) and all(map(strided, (out, *given))))
        or autograd_state.recorded(out, *given)
        or any(ranges_meet(out, t) for t in given)
    ):
        return None
    announce_write(out)
    return replay(*call)


def _in_memory(*tensors: Tensor) -> bool:
    """Whether kernels can use these tensors, and no mode or transform has to see the call."""
    return (
        not compat.dispatch_modes()
        and not autograd_state.differentiated(*tensors)
        and all(map(plain, tensors))
    )


def _autocast(
    device: str, operator: Callable[..., Any], arguments: type[Arguments | GroupedArguments]
) -> Callable[..., Any]:
    """Return the autocast rule of ``operator`` for ``device``."""

    def rule(*given: Any) -> Any:
        with compat.without_autocast[device]():
            taken = _cast(device, arguments, given)
            if taken[1] is given[1]:
                return operator(*taken)
            # The weight was just written by the cast, so it is not static.
            return within(overridden(), operator, *taken)

    return rule


def cast_first(function: Callable[[Any], Any], call: Any) -> Any:
    """Cast the call as the operators' autocast rule does, and pass it to ``function`` without
    autocast. A call with ``out`` is not cast. Needed for calls that are checked before torch calls
    that rule: under a transform, and where torch's functions compute a part of the call."""
    if call.out is not None:
        with compat.uncast(call.out):
            return function(call)
    device = call.a.device.type
    if device not in AUTOCAST or not compat.autocasts_on(device):
        return function(call)
    taken = type(call)(*_cast(device, type(call), call[:-1]))
    with torch.autocast(device, enabled=False):  # torch.compile traces it
        if taken.b is call.b or torch.compiler.is_dynamo_compiling():
            return function(taken)
        return within(overridden(), function, taken)  # as in the rule


def _cast(
    device: str, arguments: type[Arguments | GroupedArguments], given: tuple[Any, ...]
) -> list[Any]:
    """Cast floating operands to the active dtype, as torch.matmul does. Stored operands are not
    cast; if both are stored, neither are the bias and the residual."""
    dtype = torch.get_autocast_dtype(device)
    call = arguments(*given)
    forms = pair(call.a.dtype, call.b.dtype, call.formats)
    kept = {name for name, form in (("a", forms.a), ("b", forms.b)) if form is not None}

    def to(role: Role, value: Any) -> Any:
        eligible = role.cast and value is not None and len(kept) < 2 and role.name not in kept
        eligible = eligible and value.is_floating_point() and value.dtype != torch.float64
        if role.widened and value is not None and value.dtype in FLOATS:
            return value if value.dtype is dtype else value.float()
        return value.to(dtype) if eligible else value

    return [to(role, value) for role, value in zip(ROLES_OF[arguments], given, strict=False)]
