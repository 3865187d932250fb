"""Describes one call by the properties that decide which kernel is correct and fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tmm_core.formats import IMPLIED, Format, named, read
from tmm_core.spec.arguments import LAUNCHED_PARTS, PART, PARTS, ROLE, Arguments, GroupedArguments
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.groups import Groups
from tmm_core.spec.operand import Operand, Scale, dtype_name, dtype_of, grouped_strides

#: Fields of a :class:`Problem` that state requirements of the caller. They are fields because
#: kernels see only the problem: batch invariance and static weights decide which configs they
#: propose.
REQUIREMENTS = ("deterministic", "batch_invariant", "capturing")


@dataclass(frozen=True, slots=True, repr=False)
class Problem:
    """``out[M, N] = epilogue(alpha · (a[M, K] @ b[K, N]) + bias) + residual``.

    With a gated epilogue ``b`` is ``[K, 2N]`` and ``bias`` has 2N elements; ``n`` is the
    width of the output. ``batch`` counts independent products; operands are 2-D if it is one,
    else 3-D. With ``groups`` the products are ragged and ``batch`` is one; see
    :class:`Groups` for shapes.

    A stored operand (:attr:`Operand.form`) stands for its values. An element may hold several
    values along K, and K counts values. Scales are contiguous. They have one element, or the shape
    ``[M, 1]`` for ``a`` and ``[1, N]`` for ``b`` (``[1, 2N]`` if gated), after the operand's batch
    dimension. With groups they have the shape of :meth:`shape`, before rows are gathered. Scales of
    blocks (:attr:`Scale.grid`) form a grid ``[M, K/g]`` for ``a`` and ``[K/g, N]`` for ``b``, of
    any strides. Zero points have the shape of the scales.

    A new field needs a check in :mod:`tmm_core.spec.supports`; a test lists the one of each field.
    """

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out: Operand
    device: DeviceFingerprint
    batch: int = 1
    epilogue: Epilogue = IDENTITY
    #: dtype of the bias vector, or None.
    bias: torch.dtype | None = None
    residual: Operand | None = None
    #: Whether alpha is not one.
    scaled: bool = False
    #: Whether fp32 operands may be rounded to TF32.
    tf32: bool = False
    #: The products of a ragged problem.
    groups: Groups | None = None
    #: The call's :data:`REQUIREMENTS`. They filter candidates. Except for batch invariance they are
    #: not part of the record's key, because a record keeps every candidate's timing.
    deterministic: bool = False
    batch_invariant: bool = False
    capturing: bool = False
    #: A promise of the caller (``Settings.static_weights``), which allows configs that rely on it
    #: (``Config.assumes``). Not part of the key either.
    static_weights: bool = False

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        device: DeviceFingerprint,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        stored: Mapping[str, Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Problem:
        """Return the problem of tensors that were checked: 2-D or 3-D operands, and ``residual`` of
        the shape of ``out``. ``out`` may be a meta tensor. :func:`stored_operands` returns the
        ``stored`` formats, scales and zero points."""
        stored = stored or {}
        of_a = Operand.of(a, **stored.get("a", {}))
        return cls(
            m=out.shape[-2],
            n=out.shape[-1],
            k=a.shape[-1] * of_a.pack,
            batch=a.shape[0] if a.dim() == 3 and fields.get("groups") is None else 1,
            a=of_a,
            b=Operand.of(b, **stored.get("b", {})),
            out=Operand.of(out),
            device=device,
            bias=bias.dtype if bias is not None else None,
            residual=Operand.of(residual) if residual is not None else None,
            **fields,
        )

    @property
    def gated(self) -> bool:
        return self.epilogue.gated

    @property
    def is_empty(self) -> bool:
        """Whether a dimension is 0: the product is empty or has no terms."""
        return 0 in (self.m, self.n, self.k, self.batch)

    @property
    def along(self) -> Literal["m", "n", "k"]:
        """The dimension whose size varies between calls, so that a record covers a range of it: the
        rows, or the ragged dimension."""
        return self.groups.ragged if self.groups else "m"

    @property
    def extent(self) -> int:
        """The size of that dimension."""
        return {"m": self.m, "n": self.n, "k": self.k}[self.along]

    def at(self, extent: int) -> Problem:
        """Return the same problem with another size of that dimension."""
        change: dict[str, Any] = {self.along: extent}
        return replace(self, **change)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an argument, or of a part of an operand. If rows are gathered, the
        shapes of ``a`` and its parts are those after gathering. Scales per row or column may be
        flat if K is ragged."""
        dims = _DIMENSIONS[name]
        sizes = {"m": self.m, "n": self.n, "k": self.k, "N": self.width, "1": 1}
        if name in ("a", "b"):
            sizes["k"] //= getattr(self, name).pack
        grid = name in LAUNCHED_PARTS and getattr(self, name[0]).grid
        if grid:
            dims = dims.replace("1", "k")
            outer, k = getattr(self, name[0]).block
            sizes["k"] = -(-self.k // k)
            sizes |= {each: -(-sizes[each] // outer) for each in ("m", "N")}
        if self.groups is None:
            stack = (self.batch,) if self.batch != 1 and len(dims) > 1 else ()
        else:
            dims = dims.replace("1", "")
            stack = () if self.groups.ragged in dims.lower() else (self.groups.count,)
        return (*stack, *(sizes[each] for each in dims))

    @property
    def width(self) -> int:
        """The columns of ``b``."""
        return self.n * (2 if self.gated else 1)

    @property
    def a_shape(self) -> tuple[int, ...]:
        return self.shape("a")

    @property
    def b_shape(self) -> tuple[int, ...]:
        return self.shape("b")

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result, and of a residual."""
        return self.shape("out")

    @property
    def out_strides(self) -> tuple[int, ...]:
        """The strides of a result that a launcher allocates; a given ``out`` has its own."""
        if self.groups is not None:
            return grouped_strides(self.out_shape, self.out.dtype)
        return torch.empty(self.out_shape, device="meta").stride()

    def empty_out(self, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialised result, as a launcher allocates it."""
        return torch.empty_strided(
            self.out_shape, self.out_strides, dtype=self.out.dtype, device=device
        )

    @property
    def allocates(self) -> bool:
        """Whether in calls the launcher allocates the output."""
        return Operand.of(self.empty_out("meta")) == self.out

    def has_default_strides(self, out: torch.Tensor) -> bool:
        """Whether ``out`` has the strides of a result that a launcher allocates. Strides of
        dimensions of size one do not count."""
        steps = zip(out.shape, out.stride(), self.out_strides, strict=True)
        return not out.numel() or all(size == 1 or own == made for size, own, made in steps)

    @property
    def plain(self) -> bool:
        """Whether it is only a product: no epilogue, bias, residual, alpha or scales."""
        return (
            self.epilogue.is_identity
            and self.bias is None
            and self.residual is None
            and not self.scaled
            and not self.stored
        )

    @property
    def forms(self) -> tuple[Format | None, Format | None]:
        """The formats of both operands."""
        return self.a.form, self.b.form

    @property
    def stored(self) -> bool:
        """Whether an operand has a format."""
        return self.forms != (None, None)

    @property
    def value(self) -> torch.dtype:
        """The dtype in which operands are multiplied: the plain operand's, or the format's if both
        are stored."""
        form_a, form_b = self.forms
        if form_a is None or form_b is None:
            return self.b.dtype if form_a is not None else self.a.dtype
        return form_a.result

    @property
    def native(self) -> bool:
        """Whether tensor cores multiply both operands as they are stored, in a format of theirs."""
        form, other = self.forms
        return form is not None and form is other and form.native

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the scales and zero points that launchers take."""
        return tuple(role.keyword for role in PARTS if role.part in getattr(self, role.of).parts)

    @property
    def flops(self) -> int:
        """The product's FLOPs: a multiply-add counts as two, the epilogue is not counted."""
        return 2 * self.batch * self.m * self.width * self.k

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each matrix, without gaps between its rows."""
        matrices = {"a": self.a, "b": self.b, "out": self.out, "residual": self.residual}
        return {
            name: math.prod(self.shape(name)) * matrix.dtype.itemsize
            for name, matrix in matrices.items()
            if matrix is not None
        }

    @property
    def bytes(self) -> int:
        """Minimum memory traffic: each operand read once, the output written once."""
        return sum(self.sizes.values())

    def to_json(self) -> dict[str, Any]:
        """Return the record's readable key: everything that affects speed, except device and
        requirements."""
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.batch,
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "out": self.out.to_json(),
            "epilogue": self.epilogue.key,
            "bias": dtype_name(self.bias) if self.bias else None,
            "residual": self.residual.to_json() if self.residual else None,
            "scaled": self.scaled,
            "tf32": self.tf32,
            **({"groups": self.groups.to_json()} if self.groups else {}),
            # Batch-invariant mode tries other configs and fewer kernels.
            **({"batch_invariant": True} if self.batch_invariant else {}),
        }

    @classmethod
    def from_json(
        cls, doc: Mapping[str, Any], device: DeviceFingerprint, epilogue: Epilogue
    ) -> Problem:
        """Return the problem that a record or a misses file describes, on ``device``.

        Raises:
            KeyError, TypeError, ValueError: The document does not describe a problem, or one with
                a field that this version does not know.
        """
        if unknown := set(doc) - _FIELDS:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        residual = doc["residual"]
        return cls(
            m=int(doc["m"]),
            n=int(doc["n"]),
            k=int(doc["k"]),
            batch=int(doc["batch"]),
            a=Operand.from_json(doc["a"]),
            b=Operand.from_json(doc["b"]),
            out=Operand.from_json(doc["out"]),
            device=device,
            epilogue=epilogue,
            bias=dtype_of(doc["bias"]) if doc["bias"] else None,
            residual=Operand.from_json(residual) if residual else None,
            scaled=bool(doc["scaled"]),
            tf32=bool(doc["tf32"]),
            groups=Groups.from_json(doc["groups"]) if doc.get("groups") else None,
            batch_invariant=bool(doc.get("batch_invariant", False)),
        )

    def bare(self) -> Problem:
        """Return this problem without its requirements. The caller's promises stay, since they
        allow more candidates."""
        none: dict[str, Any] = dict.fromkeys(REQUIREMENTS, False)
        return replace(self, **none)

    def __repr__(self) -> str:
        return f"<Problem {self} on {self.device.name}>"

    def __str__(self) -> str:
        size = f"{self.m}×{self.n}×{self.k}"
        if self.batch != 1:
            size = f"{self.batch}×{size}"
        letters = {"row": "n", "col": "t", "strided": "s"}
        layout = letters[self.a.layout] + letters[self.b.layout]
        dtypes = self.a.format or dtype_name(self.a.dtype)
        if (self.b.dtype, self.b.format) != (self.a.dtype, self.a.format):
            dtypes += f"·{self.b.format or dtype_name(self.b.dtype)}"
        if self.out.dtype != self.a.dtype:
            dtypes += f"→{dtype_name(self.out.dtype)}"
        extras = [
            "unaligned" if not (self.a.aligned and self.b.aligned and self.out.aligned) else "",
            "tf32" if self.tf32 else "",
            f"scales {self.a.scale or 1}·{self.b.scale or 1}" if self.parts else "",
            "zero points" if self.a.zero or self.b.zero else "",
            str(self.groups or ""),
            "bias" if self.bias else "",
            "" if self.epilogue.is_identity else self.epilogue.key,
            "residual" if self.residual else "",
        ]
        return " ".join([size, dtypes, layout, *filter(None, extras)])


#: The fields of a problem in a record's key.
_FIELDS = {
    "m", "n", "k", "batch", "a", "b", "out", "epilogue", "bias", "residual", "scaled", "tf32",
    "groups", "batch_invariant",
}  # fmt: skip
#: The dimensions of each argument, and of each part of an operand.
_DIMENSIONS = {name: role.dims for name, role in ROLE.items()}
_DIMENSIONS |= {role.keyword: role.dims for role in PARTS}


def stored_operands(call: Arguments | GroupedArguments) -> dict[str, dict[str, Any]]:
    """Return the formats, scales and zero points of a call's operands, as fields of
    :class:`Operand`."""
    found: dict[str, dict[str, Any]] = {}
    for operand, (name, block) in zip(("a", "b"), read(call.formats), strict=True):
        scale, zero = (getattr(call, PART[operand, part].name) for part in ("scale", "zero"))
        if name and IMPLIED.get(getattr(call, operand).dtype) is named(name):
            name = ""  # its dtype implies it
        if name or scale is not None:
            found[operand] = {
                "format": name,
                "scale": Scale.of(scale, block),
                "zero": None if zero is None else zero.dtype,
            }
    return found
