"""The conformance suite's problems: sizes, layouts, dtypes and terms, fewer where kernels are
interpreted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from tmm_core.epilogues import BUILTIN, parse
from tmm_core.formats import FORMATS, Format
from tmm_core.formats.grids import ROW
from tmm_core.spec.device import DeviceFingerprint, interpreting
from tmm_core.spec.epilogue import EpilogueLike
from tmm_core.spec.groups import Groups
from tmm_core.spec.operand import Operand, Scale
from tmm_core.spec.port import Port
from tmm_core.spec.problem import Problem
from tmm_core.testing.memory import LAYOUTS, WRITABLE
from tmm_core.testing.probe import Probe, scales_of, usual_scale
from tmm_core.testing.terms import ABSOLUTE, SQUARE, UNFUSABLE, USERS

#: M×N×K, each chosen for a special property. On a GPU they exceed tiles of up to 256, and one has
#: more tiles than there are SMs; interpreted programs cost 7 ms each, so few tiles of 16 to 64.
SIZES = {
    "cuda": (
        (317, 203, 131),  # divisible by no block
        (512, 256, 256),  # multiples of every block
        (1, 520, 304),
        (301, 1, 520),
        (130, 70, 1),
        (1, 1, 1),
        (256, 256, 7),  # K shorter than a block
        (48, 80, 8200),  # long K
        (1029, 9, 64),  # tall
        (9, 1040, 64),  # wide
        (4104, 2056, 72),  # more tiles than SMs
    ),
    "cpu": (
        (37, 29, 43),
        (64, 32, 64),
        (1, 40, 33),
        (35, 1, 40),
        (33, 17, 1),
        (1, 1, 1),
        (32, 32, 5),
        (16, 24, 1030),
        (131, 5, 20),
        (5, 130, 20),
    ),
}
#: Multiples of 16, so that rows are 16-byte aligned in every dtype, but of no larger block.
SIZE = {"cuda": (304, 208, 144), "cpu": (48, 80, 112)}


class ProbeProblems:
    """The probes of a conformance suite; subclasses set the attributes.

    Attributes: See :class:`tmm_core.testing.KernelConformance`.
    """

    device: ClassVar[str | None] = None
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float16, torch.bfloat16, torch.float32)
    sizes: ClassVar[Sequence[tuple[int, int, int]] | None] = None
    size: ClassVar[tuple[int, int, int] | None] = None
    epilogues: ClassVar[Sequence[EpilogueLike]] = (
        *BUILTIN,
        "softcap(2.5)",
        "leaky_relu(0.25)",
        "gelu_tanh+softcap(3)",
        "swiglu+scale(0.5)",
        USERS,
        [USERS, "tanh"],
        UNFUSABLE,
    )

    def probes_of_sizes(self) -> Iterator[Probe]:
        sizes = self.sizes or SIZES[self._device().type]
        for dtype in self.dtypes:
            for m, n, k in sizes:
                yield Probe(m=m, n=n, k=k, dtype=dtype)

    def probes_of_layouts(self) -> Iterator[Probe]:
        base = self._probe()
        yield from (replace(base, a=layout) for layout in LAYOUTS)
        yield from (replace(base, b=layout) for layout in LAYOUTS if layout != "row")
        yield from (replace(base, out=layout) for layout in WRITABLE if layout != "row")
        for a, b, out in (
            ("col", "col", "row"),
            ("col", "col", "col"),
            ("row_unaligned", "col_unaligned", "row_sliced"),
            ("strided", "strided", "strided"),
            ("broadcast_cols", "broadcast_rows", "col_padded"),
        ):
            yield replace(base, a=a, b=b, out=out)
        # Sizes that no block divides, where a mask is most easily forgotten.
        m, n, k = (size - 3 for size in self._size())
        for a, b in (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col")):
            yield replace(base, m=max(1, m), n=max(1, n), k=max(1, k), a=a, b=b)

    def probes_of_dtypes(self) -> Iterator[Probe]:
        for dtype in self.dtypes:
            for out_dtype in (torch.float16, torch.bfloat16, torch.float32):
                if out_dtype != dtype:
                    yield replace(self._probe(), dtype=dtype, out_dtype=out_dtype)
        if torch.float32 in self.dtypes:
            yield replace(self._probe(), dtype=torch.float32, tf32=True)
            yield replace(self._probe(), dtype=torch.float32, tf32=True, b="col")

    def probes_of_epilogues(self) -> Iterator[Probe]:
        for text in self.epilogues:
            yield replace(self._probe(), epilogue=parse(text))
        m, n, k = (max(1, size - 3) for size in self._size())
        for text in ("silu", "swiglu"):
            yield replace(self._probe(), m=m, n=n, k=k, epilogue=parse(text))
            yield replace(self._probe(), b="col", epilogue=parse(text))

    def probes_of_terms(self) -> Iterator[Probe]:
        """Bias, residual and alpha: one by one, then together with an epilogue, which reveals
        their order."""
        base = self._probe()
        fp32 = torch.float32
        terms: dict[str, Any]
        for terms in (
            {"alpha": -1.75},
            {"bias": "packed"},
            {"bias": "strided"},
            {"bias": "broadcast"},
            {"bias": "packed", "bias_dtype": fp32},
            {"residual": "row"},
            {"residual": "col"},
            {"residual": "row_unaligned"},
            {"residual": "strided"},
            {"residual": "broadcast_rows"},
            {"residual": "broadcast_cols"},
            {"residual": "broadcast"},
            {"residual": "row", "residual_dtype": fp32},
        ):
            yield replace(base, **terms)
        full = replace(base, bias="packed", residual="row", alpha=0.5)
        m, n, k = (max(1, size - 3) for size in self._size())
        for text in ("silu", "swiglu"):
            yield replace(full, epilogue=parse(text))
            yield replace(full, epilogue=parse(text), m=m, n=n, k=k, out="strided")

    def probes_of_scales(self) -> Iterator[Probe]:
        """Operands of every format, same and mixed dtypes, with every kind of scale and none."""
        for form in FORMATS.values():
            yield from self._probes_of(form)

    def _probes_of(self, form: Format) -> Iterator[Probe]:
        narrow, wide = form.storage[0], form.storage[-1]
        base = replace(self._probe(), b="col")
        rows: dict[str, Any]
        kinds: list[tuple[Any, Any]]
        own, grids = usual_scale(form), [s for s in scales_of(form) if Scale.parse(s).grid]
        # A weight beside plain activations.
        weight = replace(base, dtype=self.dtypes[0], b_dtype=narrow, b_format=form.name)
        for scale in (*grids, own) if form.implied else grids:
            yield replace(weight, b_scale=scale)
        if form.implied:
            base, rows = replace(base, dtype=narrow), {"a_scale": own, "b_scale": own}
            kinds = [(None, None), ("tensor", "tensor"), (own, None), (None, own)]
            kinds += [("1x128", scale) for scale in grids if scale.endswith("x128")]
        else:
            base, rows, kinds = weight, {"b_scale": own}, [(None, s) for s in scales_of(form)[:1]]
            yield replace(base, dtype=self.dtypes[-1], **rows)
        for a_scale, b_scale in kinds:
            yield replace(base, a_scale=a_scale, b_scale=b_scale)
        if form.zeros:
            yield from (replace(weight, b_scale=scale, b_zero=True) for scale in (own, *grids))
        if wide is not narrow:
            yield replace(base, b_dtype=wide, **rows)
        if wide is not narrow and form.implied:
            yield replace(base, dtype=wide, b_dtype=narrow, **rows)
            yield replace(base, dtype=wide, a_scale="tensor")
        for a, b in (("row", "row"), ("col", "row"), ("col", "col"), ("row_unaligned", "strided")):
            yield replace(base, a=a, b=b, **rows)
        full = replace(base, bias="packed", residual="row", alpha=0.5, **rows)
        m, n, k = (max(1, size - 3) for size in self._size())
        for text in ("silu", "swiglu"):
            yield replace(full, epilogue=parse(text))
            yield replace(full, epilogue=parse(text), m=m, n=n, k=k, out="strided")
            first: dict[str, Any] = dict.fromkeys(rows, scales_of(form)[0])
            yield replace(full, epilogue=parse(text), **first)
            yield from (replace(full, epilogue=parse(text), b_scale=scale) for scale in grids[:1])
        for out_dtype in (torch.float16, torch.float32):
            yield replace(base, out_dtype=out_dtype, **rows)
        yield replace(base, k=8 * base.k, out_dtype=torch.float32, **rows)
        if ROW not in form.grids:
            # K of one group: its scales are by row.
            whole = str(Scale(ROW, form.scale_dtypes[0]))
            yield replace(weight, k=form.grids[0][1], b_scale=whole)
        yield replace(base, m=1, **rows)
        yield replace(base, k=0, bias="packed", **rows)
        batched = replace(base, batch=3, n=min(n, 48), k=min(k, 48), **rows)
        yield batched
        stacked: dict[str, Any] = rows | {"b_scale": scales_of(form)[0]}
        yield replace(batched, stack_b="broadcast", epilogue=parse("swiglu"), **stacked)
        yield from (replace(batched, b_scale=scale) for scale in grids[-1:])

    def probes_of_batches(self) -> Iterator[Probe]:
        m, n, k = self._size()
        if self._device().type == "cpu":
            n, k = min(n, 48), min(k, 48)
        base = Probe(m=m, n=n, k=k, dtype=self.dtypes[0], batch=3)
        yield base
        yield replace(base, m=max(1, m - 3), n=max(1, n - 3), k=max(1, k - 3))
        yield replace(base, a="col", b="col")
        yield replace(base, stack_a="broadcast")
        yield replace(base, stack_b="broadcast")
        yield replace(base, stack_a="interleaved", stack_b="interleaved")
        yield replace(base, a="row_unaligned", b="strided", out="row_padded")
        yield replace(base, a="broadcast", stack_a="broadcast", out="col")
        terms = replace(base, bias="packed", residual="row", alpha=0.5, epilogue=parse("silu"))
        yield terms
        yield replace(terms, stack_residual="broadcast", epilogue=parse("swiglu"))

    def probes_of_empties(self) -> Iterator[Probe]:
        base = self._probe()
        yield replace(base, m=0)
        yield replace(base, n=0)
        yield replace(base, k=0)
        yield replace(base, m=0, k=0)
        yield replace(base, batch=0)
        yield replace(base, k=0, bias="packed", epilogue=parse("sigmoid"))

    def probes_of_verification(self) -> Iterator[Probe]:
        """One of each kind of problem, with all terms of the expression; and operands of every
        kind of leading stride."""
        m, n, k = (max(1, size - 3) for size in self._size())
        plain = replace(self._probe(), m=m)
        terms: dict[str, Any] = {"bias": "packed", "residual": "row", "alpha": 0.5}
        full = replace(plain, epilogue=parse("silu"), **terms)
        yield plain
        yield full
        yield replace(full, n=n, k=k, epilogue=parse("swiglu"))
        yield replace(full, batch=3)
        for form in FORMATS.values():
            dtype = form.storage[0]
            scaled: dict[str, Any] = {"b": "col", "b_scale": usual_scale(form)}
            yield from (
                replace(plain, b_dtype=dtype, b_format=form.name, b="col", b_scale=scale)
                for scale in scales_of(form)
                if Scale.parse(scale).grid and scale not in scaled.values()
            )
            if form.implied:
                yield replace(plain, dtype=dtype, a_scale=usual_scale(form), **scaled)
            else:
                yield replace(plain, b_dtype=dtype, b_format=form.name, **scaled)
        base = self._probe()
        yield replace(base, a="col", b="col")
        yield replace(base, out_dtype=torch.float32)
        yield replace(base, batch=2, n=min(n, 48), k=min(k, 48))
        for layout in ("row_unaligned", "strided"):
            yield replace(base, a=layout, b=layout, out=layout)

    def probes_of_use(self) -> Iterator[Probe]:
        """Small problems, each verified by some thirty launches: every dtype, each kind of operand
        whose strides a problem does not fix, and operands that may be one tensor."""
        side = 16 if self._device().type == "cpu" else 128
        for dtype in self.dtypes:
            yield Probe(m=side, n=side, k=4 * side, dtype=dtype)
        base = Probe(m=side, n=side, k=side, dtype=self.dtypes[0])
        fp32: dict[str, Any] = {"bias_dtype": torch.float32, "residual_dtype": torch.float32}
        yield base
        yield replace(base, alpha=0.5)
        yield replace(base, residual="row", alpha=0.5)
        yield replace(base, bias="packed", residual="row_unaligned", alpha=0.5)
        yield replace(base, bias="packed", residual="strided", **fp32)
        yield replace(base, batch=3, bias="packed", epilogue=parse("silu"))
        yield replace(base, a="strided", b="row_unaligned", out="strided")
        yield replace(base, a="row_unaligned", b="col")
        yield replace(base, n=max(1, side - 1), out="row_unaligned")

    def sizes_of_tiles(self) -> Iterator[Probe]:
        """Sizes of every alignment and remainder of a tile: along M, then N, then K."""
        side, dtype = 16, self.dtypes[0]
        tallest = 128 if self._device().type == "cuda" else 32
        remainders = {tallest + extra for extra in (*range(1, 17), 20, 24, 28)}
        ends = {*range(1, 17), 20, 24, 28, 40, 56, 264, 282, 312} | remainders
        for m in sorted(ends):
            yield Probe(m=m, n=side, k=side, dtype=dtype)
        for size in (8, 24, 40, 56, 17, 33, 47):
            yield Probe(m=side, n=size, k=side, dtype=dtype)
            yield Probe(m=side, n=side, k=size, dtype=dtype)

    def probes_of_outputs(self) -> Iterator[Probe]:
        """Every kind and reduction, with all terms of the expression, of sizes that divide nothing;
        and of rows alone, where operands are aligned."""
        m, n, k = (max(1, size - 3) for size in self._size())
        aligned = replace(self._probe(), m=m, alpha=0.5)
        base = replace(aligned, n=n, k=k)
        terms = replace(base, bias="packed", residual="row")
        row_max = Port("row_max", "row", reduce="max", **ABSOLUTE)
        row_sum = Port("row_sum", "row", reduce="sum", **SQUARE)
        col_sum = Port("col_sum", "col", torch.float16, reduce="sum")
        col_max = Port("col_max", "col", reduce="max")
        scalar_max = Port("scalar_max", "scalar", torch.bfloat16, reduce="max", **ABSOLUTE)
        scalar_sum = Port("scalar_sum", "scalar", reduce="sum", **SQUARE)
        tile = Port("tile", "tile", torch.bfloat16)
        for probe, text, outputs in (
            (aligned, "identity", (row_max,)),
            (replace(aligned, b="col", residual="row"), "swiglu", (row_sum,)),
            (terms, "silu", (row_max, col_sum)),
            (terms, "swiglu", (scalar_sum, row_sum)),
            (terms, "gelu", (col_max, scalar_max)),
            (base, "identity", (tile, row_sum)),
        ):
            yield replace(probe, epilogue=replace(parse(text), outputs=outputs))

    def demanding(self) -> Sequence[Probe]:
        """Problems that reveal a config's faults, the most revealing first: with all terms of the
        expression, if the kernel takes them."""
        plain = self._long()
        full = replace(plain, bias="packed", residual="row", epilogue=parse("silu"))
        return [full, plain, self._probe()]

    def demanding_scales(self) -> Sequence[Probe]:
        """:meth:`demanding`, for operands with formats."""
        plain, *_ = (p for p in self.demanding() if p.bias is None)
        plain = replace(plain, b="col")
        terms: dict[str, Any] = {"bias": "packed", "residual": "row", "epilogue": parse("silu")}
        of_each = [
            replace(plain, dtype=form.storage[0], a_scale="row", b_scale="row")
            if form.implied
            else replace(
                plain, b_dtype=form.storage[0], b_format=form.name, b_scale=usual_scale(form)
            )
            for form in FORMATS.values()
        ]
        return [replace(each, **more) for each in of_each for more in (terms, {})]

    def fine_grained(self) -> Sequence[Probe]:
        """Problems whose result is not rounded to 16 bits, which would hide a difference; and
        others, in case the kernel takes none of those."""
        plain = self._long()
        wide = replace(plain, out_dtype=torch.float32)
        fp32 = replace(plain, dtype=torch.float32)
        return [wide, *[fp32] * (torch.float32 in self.dtypes), plain, self._probe()]

    def _long(self) -> Probe:
        """A probe with K long enough to be split, and M not a multiple of a block."""
        base = self._probe()
        longer = 8 if self._device().type == "cuda" else 4
        return replace(base, m=max(1, base.m - 5), k=longer * base.k)

    @classmethod
    def _device(cls) -> torch.device:
        kind = cls.device
        if kind is None:
            kind = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
        if kind == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(kind)

    @classmethod
    def _size(cls) -> tuple[int, int, int]:
        return cls.size or SIZE[cls._device().type]

    @classmethod
    def _probe(cls) -> Probe:
        m, n, k = cls._size()
        return Probe(m=m, n=n, k=k, dtype=cls.dtypes[0])


def odd_problems(device: DeviceFingerprint) -> Iterator[Problem]:
    """Problems that only ``reasons_against`` should ever see."""
    half = Operand(torch.float16)
    plain = Problem(m=64, n=64, k=64, a=half, b=half, out=half, device=device)
    yield plain
    dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    for dtype in dtypes:
        odd = Operand(dtype)
        yield replace(plain, a=odd, b=odd, out=odd)
        yield replace(plain, a=odd)
        yield replace(plain, b=odd)
        yield replace(plain, out=odd)
        yield replace(plain, bias=dtype, residual=odd)
    for size in (0, 1, 2**31 - 1, 2**31, 2**40):
        for field in ("m", "n", "k", "batch"):
            yield replace(plain, **{field: size})  # type: ignore[arg-type]
    for layout in ("row", "col", "strided"):
        for aligned in (True, False):
            for wide in (True, False):
                matrix = Operand(torch.float16, layout, aligned, wide)
                for name in ("a", "b", "out", "residual"):
                    yield replace(plain, **{name: matrix})  # type: ignore[arg-type]
    for epilogue in (*BUILTIN.values(), USERS, UNFUSABLE):
        yield replace(plain, epilogue=epilogue, bias=torch.float16, scaled=True)
    of_dtypes = [("", half.dtype, half.dtype)]
    of_dtypes += [
        ("" if form.implied else form.name, form.storage[0], form.storage[-1])
        for form in FORMATS.values()
    ]
    scales = (None, *map(Scale.parse, ("tensor", "row", "1x32", "128x128")))
    for name, first, last in of_dtypes:
        for of_a, of_b in itertools.product(scales, repeat=2):
            a, b = Operand(first, format=name), Operand(last, format=name)
            yield replace(plain, a=replace(a, scale=of_a), b=replace(b, scale=of_b))
            yield replace(plain, b=replace(b, scale=of_b, zero=None if of_b is None else last))
    for along in ("m", "n", "k"):
        for count in (1, 3, 2**20):
            for size in (0, 64, 2**31):
                yield replace(plain, groups=Groups(count, along)).at(size)
        yield replace(plain, groups=Groups(3, along, zeroed=True), epilogue=parse("swiglu"))
    indexed = Groups(3, "m", torch.int32, torch.int64, torch.bfloat16, True)
    yield replace(plain, groups=indexed, bias=torch.float16, residual=half)
    for flag in ("deterministic", "batch_invariant", "capturing", "tf32", "scaled"):
        yield replace(plain, **{flag: True})  # type: ignore[arg-type]
    gpu = DeviceFingerprint(
        type="cuda", name="GPU", capability=(9, 0), sm_count=132, shared_memory=232448, l2=2**25
    )
    for changes in (
        {"capability": (7, 5), "sm_count": 40, "shared_memory": 65536},
        {},
        {"capability": (12, 1), "sm_count": 48, "shared_memory": 101376},
        {"name": "AMD Instinct MI300X", "capability": (9, 4), "sm_count": 304, "cuda": "hip-6.2"},
        {"type": "cpu", "name": "cpu"},
        {"type": "mps", "name": "mps"},
        {"type": "meta", "name": "meta"},
    ):
        elsewhere = dataclasses.replace(gpu, **changes)
        yield replace(plain, device=elsewhere)
        yield replace(plain, device=elsewhere, a=Operand(torch.float8_e4m3fn), m=1)
