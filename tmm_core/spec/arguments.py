"""The arguments of a call, and their role in every part that handles calls.

The table :data:`ROLES` gives the operator's schema, the key of a warm call, its checks, autocast,
sharding, plans and the generated launch. It is read when code is generated, not in warm calls.

A launch takes ``(a, b, bias, residual, alpha, out)`` as positional arguments, and the call's
:data:`EXTRAS` as keyword arguments. A kernel gets an extra only for a problem that has it, and
declares such problems in :class:`~tmm_core.Supports`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

#: The properties of a tensor, besides its values, on which a plan depends. The first are of a
#: tensor whose strides and address kernels use, the second of one that is made contiguous. The
#: device's index alone would not do: it is -1 for a CPU and for meta tensors.
SIGNATURE = "{0}.shape, {0}.stride(), {0}.dtype, {0}.data_ptr() & 15, {0}.device"
PACKED = "{0}.shape, {0}.dtype, {0}.layout, {0}.device"


class Arguments(NamedTuple):
    """The arguments of one call, in the operator's order; ``out`` comes last."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    alpha: Any = 1.0
    epilogue: str = ""
    out_dtype: torch.dtype | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    zero_a: Tensor | None = None
    zero_b: Tensor | None = None
    #: The names of formats that dtypes do not imply: ``"of a,of b"``, or empty.
    formats: str = ""
    out: Any = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that a call reads, in the order of :data:`TENSORS`."""
        return tuple(getattr(self, name) for name in TENSORS)

    @property
    def given(self) -> list[Tensor]:
        """The tensors that are there to be read."""
        return [t for t in self.tensors if t is not None]


class GroupedArguments(NamedTuple):
    """The arguments of one grouped call, in its operator's order; ``out`` comes last."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    alpha: Any = 1.0
    epilogue: str = ""
    out_dtype: torch.dtype | None = None
    a_index: Tensor | None = None
    out_index: Tensor | None = None
    out_weights: Tensor | None = None
    zeroed: bool = False
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    zero_a: Tensor | None = None
    zero_b: Tensor | None = None
    #: The names of formats that dtypes do not imply: ``"of a,of b"``, or empty.
    formats: str = ""
    out: Any = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that a call reads, in the order of :data:`GROUPED_TENSORS`."""
        return tuple(getattr(self, name) for name in GROUPED_TENSORS)

    @property
    def given(self) -> list[Tensor]:
        """The tensors that are there to be read."""
        return [t for t in self.tensors if t is not None]


#: The largest magnitude of an alpha that is neither infinite nor of a product in fp64.
MOST_ALPHA = torch.finfo(torch.float32).max


class Role(NamedTuple):
    """The role of one argument in the handling of calls.

    Attributes:
        name: The name in :class:`Arguments`.
        type: The type in the operator's schema.
        key: Source of the argument's part of a warm call's key.
        dims: The dimensions of a tensor, without a batch or groups: ``m``, ``n``, ``k``, ``1``, and
            ``N`` for the columns of b (twice ``n`` if gated).
        cast: Whether autocast casts it.
        widened: Whether autocast makes it fp32 if it has the other 16-bit dtype.
        extra: Whether launches take it by keyword, if a call has it.
        of: The operand to which a scale or zero point belongs.
        part: Its kind: ``"scale"``, ``"zero"``.
    """

    name: str
    type: str
    key: str
    dims: str = ""
    cast: bool = False
    widened: bool = False
    extra: bool = False
    of: str = ""
    part: str = ""

    @property
    def keyword(self) -> str:
        """Its name in launches."""
        return f"{self.of}_{self.part}" if self.of else self.name

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")

    @property
    def optional(self) -> bool:
        return self.type.endswith("?")


#: The role of each argument of plain and of grouped calls.
ROLE = {
    role.name: role
    for role in (
        Role("a", "Tensor", SIGNATURE, "mk", cast=True),
        Role("b", "Tensor", SIGNATURE, "kN", cast=True),
        Role("bias", "Tensor?", SIGNATURE, "N", cast=True),
        Role("residual", "Tensor?", SIGNATURE, "mn", cast=True),
        # Torch refuses a number beyond fp32 for most dtypes: it must not use another number's plan.
        Role("alpha", "Scalar", f"{{0}} == 1.0 or 2 + ({MOST_ALPHA} < abs({{0}}) < 1e999)"),
        Role("epilogue", "str", "{0}"),
        Role("out_dtype", "ScalarType?", "{0}"),
        # Kernels index a scale only by row or column, so it is made contiguous.
        Role("scale_a", "Tensor?", PACKED, "m1", extra=True, of="a", part="scale"),
        Role("scale_b", "Tensor?", PACKED, "1N", extra=True, of="b", part="scale"),
        Role("zero_a", "Tensor?", PACKED, "m1", extra=True, of="a", part="zero"),
        Role("zero_b", "Tensor?", PACKED, "1N", extra=True, of="b", part="zero"),
        Role("formats", "str", "{0}"),
        Role("out", "Tensor?", SIGNATURE, "mn"),
        Role("offs", "Tensor", PACKED, extra=True),
        Role("a_index", "Tensor?", PACKED, extra=True),
        Role("out_index", "Tensor?", PACKED, extra=True),
        # Not cast, to keep the precision of a router's softmax: fp32 has all 16-bit floats.
        Role("out_weights", "Tensor?", PACKED, widened=True, extra=True),
        Role("zeroed", "bool", "{0}"),
    )
}
#: Roles in the order of a call's arguments, also by the class of arguments.
ROLES = tuple(ROLE[name] for name in Arguments._fields)
GROUPED_ROLES = tuple(ROLE[name] for name in GroupedArguments._fields)
ROLES_OF: dict[type, tuple[Role, ...]] = {Arguments: ROLES, GroupedArguments: GROUPED_ROLES}
GROUPED_TENSORS = tuple(
    role.name for role in GROUPED_ROLES if role.is_tensor and role.name != "out"
)
#: The keyword arguments of a grouped launch: ``offs`` and tensors by row, then scales.
GROUPED_EXTRAS = tuple(role.name for role in GROUPED_ROLES if role.extra)
#: The tensors that a call reads, and the ones that a launch takes by keyword.
TENSORS = tuple(role.name for role in ROLES if role.is_tensor and role.name != "out")
EXTRAS = tuple(role.name for role in ROLES if role.extra)
#: The parts of stored operands, in the order of a call's arguments; and by operand and part.
PARTS = tuple(role for role in ROLES if role.of)
PART = {(role.of, role.part): role for role in PARTS}
#: Their names in launches.
LAUNCHED_PARTS = tuple(role.keyword for role in PARTS)
ROWS = tuple(name for name in GROUPED_EXTRAS if name not in EXTRAS)
#: Positional arguments of a launch.
LAUNCHED = ("a", "b", "bias", "residual", "alpha", "out")


def signature(name: str) -> Callable[[Tensor], tuple[Any, ...]]:
    """Return the function that reads the properties on which a plan depends, for the tensor of this
    name."""
    return _SIGNATURES[ROLE[name].key]


#: By source.
_SIGNATURES: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    source: eval(f"lambda t: ({source.format('t')})") for source in (SIGNATURE, PACKED)
}
#: Names of the fields of a signature in messages.
FIELDS = {
    SIGNATURE: ("shape", "strides", "dtype", "offset from 16 bytes", "device"),
    PACKED: ("shape", "dtype", "layout", "device"),
}


def extras(call: Any) -> dict[str, Tensor]:
    """Return the scales and zero points of a call, by their names in launches."""
    return {role.keyword: t for role in PARTS if (t := getattr(call, role.name)) is not None}


def schema(arguments: type[Arguments | GroupedArguments] = Arguments) -> str:
    """Return the parameters of the operator that takes these arguments, without ``out``."""
    default = arguments._field_defaults
    parts = [
        f"{role.type} {role.name}" + (f"={default[role.name]!r}" if role.name in default else "")
        for role in ROLES_OF[arguments]
        if role.name != "out"
    ]
    return ", ".join(parts)


def parameters(
    names: Iterable[str], arguments: type[Arguments | GroupedArguments] = Arguments
) -> str:
    """Return the parameters of a generated function, with the defaults of these arguments."""
    default = arguments._field_defaults
    return ", ".join(f"{n}={default[n]!r}" if n in default else n for n in names)


def launch_parameters() -> str:
    """Return the parameters of a generated launcher, which accepts any extra."""
    return ", ".join(LAUNCHED) + "".join(f", {name}=None" for name in LAUNCHED_PARTS)


def keywords(names: Iterable[str]) -> str:
    """Return these names as keyword arguments of a call, each after a comma."""
    return "".join(f", {name}={name}" for name in names)
