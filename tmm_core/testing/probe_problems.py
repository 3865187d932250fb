"""The conformance suite's problems: sizes, layouts, dtypes and terms, fewer where kernels are
interpreted. Verification (:class:`tmm_core.verify.verifier.Verifier`) makes their tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import torch

from tmm_core.epilogues import BUILTIN, parse
from tmm_core.formats import FLOATS, FORMATS, Format
from tmm_core.formats.grids import ROW
from tmm_core.spec.device import DeviceFingerprint, fingerprint, interpreting
from tmm_core.spec.epilogue import EpilogueLike
from tmm_core.spec.groups import Groups
from tmm_core.spec.operand import Layout, Operand, Scale
from tmm_core.spec.port import Port
from tmm_core.spec.problem import Problem
from tmm_core.testing.terms import ABSOLUTE, SQUARE, UNFUSABLE, USERS

#: M×N×K, each chosen for a special property. On a GPU they exceed tiles of up to 256, and one has
#: more tiles than there are SMs. Interpreted programs cost 7 ms each, so there they are few tiles
#: of 16 to 64.
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

#: The classes of a matrix's strides: the layout, and whether rows (columns) start anywhere.
LAYOUTS = ("row", "col", "row_unaligned", "col_unaligned", "strided")


def laid(operand: Operand, layout: str) -> Operand:
    """``operand`` in one of :data:`LAYOUTS`."""
    name, _, unaligned = layout.partition("_")
    aligned = not unaligned and name != "strided"
    return replace(operand, layout=name, aligned=aligned)  # type: ignore[arg-type]


def contiguous(problem: Problem) -> Problem:
    """Return the problem with contiguous matrices, which are aligned if their sizes are."""

    def packed(name: str) -> Operand | None:
        operand: Operand | None = getattr(problem, name)
        if operand is None or operand.layout == "strided":
            return operand
        *batch, rows, cols = problem.shape(name)
        flipped = operand.layout == "col"
        shape = (*batch, cols, rows) if flipped else (*batch, rows, cols)
        t = torch.empty(shape, dtype=operand.dtype, device="meta")
        seen = Operand.of(t.mT if flipped else t)
        return replace(operand, layout=seen.layout, aligned=seen.aligned and operand.aligned)

    changes: Any = {name: packed(name) for name in ("a", "b", "out", "residual")}
    return replace(problem, **changes)


def problem_id(problem: Problem | None) -> str:
    """Return the test ID of a problem: its text, and special properties of its operands."""
    if problem is None:
        return "none"
    operands = {"a": problem.a, "b": problem.b, "out": problem.out, "residual": problem.residual}
    words = [str(problem), *["alpha"] * problem.scaled]
    for name, operand in operands.items():
        if operand is not None and (operand.layout != "row" or not operand.aligned):
            words.append(f"{name}:{operand.layout}{'' if operand.aligned else '_unaligned'}")
    if problem.out.dtype != problem.a.dtype:
        words.append(f"out:{problem.out.dtype}")
    text = " ".join(words).replace("×", "x").replace("→", "_to_").replace("torch.", "")
    return "-".join(text.split())


def scales_of(form: Format) -> list[Scale]:
    """The scales that a format allows; each of its dtypes is among them, if there are as many."""
    dtypes = itertools.cycle(form.scale_dtypes)
    return [Scale(block, dtype) for block, dtype in zip(form.grids, dtypes, strict=False)]


def usual_scale(form: Format) -> Scale:
    """Return the scale of a format's weights: by row, or else its first."""
    return Scale(ROW if ROW in form.grids else form.grids[0], form.scale_dtypes[0])


def whole_k(problem: Problem) -> Problem:
    """Return the problem with K rounded up to whole groups and stored elements."""
    a, b = problem.a, problem.b
    unit = math.lcm(a.pack, b.pack, max(1, a.block[1]), max(1, b.block[1]))
    return replace(problem, k=-(-problem.k // unit) * unit)


def stored(plain: Problem, form: Format, scale: Scale | None = None) -> Problem:
    """The problem with a weight of this format. If a dtype implies the format, ``a`` has it too;
    otherwise ``a`` stays plain."""
    weight = Operand(
        form.storage[0], "col",
        format="" if form.implied else form.name, scale=scale or usual_scale(form),
    )  # fmt: skip
    if form.implied:
        plain = replace(plain, a=replace(weight, layout="row"), out=Operand(form.result))
    return whole_k(replace(plain, b=weight))


class Suite:
    """A conformance suite.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``; by default a GPU if there is one and Triton's interpreter
            is not enabled.
    """

    device: ClassVar[str | None] = None

    @classmethod
    def _device(cls) -> torch.device:
        kind = cls.device
        if kind is None:
            kind = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
        if kind == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(kind)


class ProbeProblems(Suite):
    """The problems of a conformance suite; subclasses set the attributes.

    Attributes: See :class:`tmm_core.testing.KernelConformance`.
    """

    dtypes: ClassVar[Sequence[torch.dtype]] = FLOATS
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

    def probes_of_sizes(self) -> Iterator[Problem]:
        sizes = self.sizes or SIZES[self._device().type]
        for dtype in self.dtypes:
            for size in sizes:
                yield self._probe(size, dtype)

    def probes_of_layouts(self) -> Iterator[Problem]:
        base = self._probe()
        for layout in LAYOUTS:
            yield replace(base, a=laid(base.a, layout))
        for layout in LAYOUTS[1:]:
            yield replace(base, b=laid(base.b, layout))
            yield replace(base, out=laid(base.out, layout))
        for a, b, out in (
            ("col", "col", "row"),
            ("col", "col", "col"),
            ("row_unaligned", "col_unaligned", "row_unaligned"),
            ("strided", "strided", "strided"),
        ):
            yield replace(base, a=laid(base.a, a), b=laid(base.b, b), out=laid(base.out, out))
        # Sizes that no block divides, where a mask is most easily forgotten.
        odd = replace(base, **self._odd())
        for a, b in itertools.product(("row", "col"), repeat=2):
            yield replace(odd, a=laid(odd.a, a), b=laid(odd.b, b))
            yield contiguous(replace(odd, a=laid(odd.a, a), b=laid(odd.b, b)))

    def probes_of_dtypes(self) -> Iterator[Problem]:
        for dtype in self.dtypes:
            for out_dtype in FLOATS:
                if out_dtype != dtype:
                    yield replace(self._probe(dtype=dtype), out=Operand(out_dtype))
        if torch.float32 in self.dtypes:
            base = replace(self._probe(dtype=torch.float32), tf32=True)
            yield base
            yield replace(base, b=laid(base.b, "col"))

    def probes_of_epilogues(self) -> Iterator[Problem]:
        base = self._probe()
        for text in self.epilogues:
            yield replace(base, epilogue=parse(text))
        for text in ("silu", "swiglu"):
            yield contiguous(replace(base, **self._odd(), epilogue=parse(text)))
            yield replace(base, b=laid(base.b, "col"), epilogue=parse(text))

    def probes_of_terms(self) -> Iterator[Problem]:
        """Bias, residual and alpha: one by one, then together with an epilogue, which reveals
        their order."""
        base, fp32 = self._probe(), torch.float32
        yield replace(base, scaled=True)
        yield replace(base, bias=base.out.dtype)
        yield replace(base, bias=fp32)
        for layout in LAYOUTS:
            yield replace(base, residual=laid(base.out, layout))
        yield replace(base, residual=Operand(fp32))
        yield from self._followed_by_epilogues(base)

    def _followed_by_epilogues(self, base: Problem) -> Iterator[Problem]:
        """All terms of the expression, also with sizes that no block divides."""
        full = replace(base, bias=base.out.dtype, residual=base.out, scaled=True)
        for text in ("silu", "swiglu"):
            yield replace(full, epilogue=parse(text))
            small = replace(full, **self._odd(), epilogue=parse(text))
            yield contiguous(replace(whole_k(small), out=laid(full.out, "strided")))

    def probes_of_scales(self) -> Iterator[Problem]:
        """Operands of every format, same and mixed dtypes, with every kind of scale and none."""
        probes = itertools.chain.from_iterable(map(self._probes_of, FORMATS.values()))
        yield from dict.fromkeys(map(whole_k, probes))

    def _probes_of(self, form: Format) -> Iterator[Problem]:
        own, grids = usual_scale(form), [each for each in scales_of(form) if each.grid]
        first, wide = scales_of(form)[0], form.storage[-1]
        base = stored(self._probe(), form)
        a, b = base.a, base.b
        # A weight that plain activations are multiplied by.
        plain = self._probe()
        mixed = replace(plain, b=replace(b, format=form.name))
        for scale in (*grids, own) if form.implied else grids:
            yield replace(mixed, b=replace(mixed.b, scale=scale))
        kinds: list[tuple[Any, Any]] = [(None, first)]
        if form.implied:
            kinds = [(None, None), (Scale.parse("tensor"),) * 2, (own, None), (None, own)]
            kinds += [(Scale((1, 128)), each) for each in grids if each.block[1] == 128]
        else:
            yield replace(self._probe(dtype=self.dtypes[-1]), b=b)
        for of_a, of_b in kinds:
            yield replace(base, a=replace(a, scale=of_a), b=replace(b, scale=of_b))
        if form.zeros:
            for scale in (own, *grids):
                yield replace(mixed, b=replace(mixed.b, scale=scale, zero=b.dtype))
        if wide is not b.dtype:
            yield replace(base, b=replace(b, dtype=wide))
            if form.implied:
                yield replace(base, a=replace(a, dtype=wide))
                yield replace(base, a=replace(a, dtype=wide, scale=Scale.parse("tensor")))
        layouts = ("row", "row"), ("col", "row"), ("col", "col"), ("row_unaligned", "strided")
        for of_a, of_b in layouts:
            yield replace(base, a=laid(a, of_a), b=laid(b, of_b))
        yield from self._followed_by_epilogues(base)
        full = replace(base, bias=base.out.dtype, residual=base.out, scaled=True)
        for text, scale in itertools.product(("silu", "swiglu"), (first, *grids[:1])):
            of_a = replace(a, scale=first) if form.implied and scale is first else a
            yield replace(full, epilogue=parse(text), a=of_a, b=replace(b, scale=scale))
        for out_dtype in (torch.float16, torch.float32):
            yield replace(base, out=Operand(out_dtype))
        yield replace(base, k=8 * base.k, out=Operand(torch.float32))
        if ROW not in form.grids:
            # K of one group: its scales are by row.
            by_row = replace(mixed.b, scale=Scale(ROW, form.scale_dtypes[0]))
            yield replace(mixed, k=form.grids[0][1], b=by_row)
        yield replace(base, m=1)
        yield replace(base, k=0, bias=base.out.dtype)
        batched = replace(base, batch=3, n=min(base.n, 48), k=min(base.k, 48))
        yield batched
        yield replace(batched, epilogue=parse("swiglu"), b=replace(b, scale=first))
        for scale in grids[-1:]:
            yield replace(batched, b=replace(b, scale=scale))

    def probes_of_batches(self) -> Iterator[Problem]:
        base = replace(self._probe(), batch=3)
        if self._device().type == "cpu":
            base = replace(base, n=min(base.n, 48), k=min(base.k, 48))
        yield base
        yield contiguous(replace(base, **{x: max(1, getattr(base, x) - 3) for x in "mnk"}))
        yield replace(base, a=laid(base.a, "col"), b=laid(base.b, "col"))
        a, b = laid(base.a, "row_unaligned"), laid(base.b, "strided")
        yield replace(base, a=a, b=b)
        yield replace(base, out=laid(base.out, "col"))
        terms = replace(base, bias=base.a.dtype, residual=base.out, scaled=True)
        yield replace(terms, epilogue=parse("silu"))
        yield replace(terms, epilogue=parse("swiglu"))

    def probes_of_empties(self) -> Iterator[Problem]:
        base = self._probe()
        yield replace(base, m=0)
        yield replace(base, n=0)
        yield replace(base, k=0)
        yield replace(base, m=0, k=0)
        yield replace(base, batch=0)
        yield replace(base, k=0, bias=base.out.dtype, epilogue=parse("sigmoid"))

    def probes_of_verification(self) -> Iterator[Problem]:
        """One of each kind of problem, with all terms of the expression."""
        base, odd = self._probe(), self._odd()
        plain = contiguous(replace(base, m=odd["m"]))
        terms: dict[str, Any] = {"bias": base.out.dtype, "residual": base.out, "scaled": True}
        yield plain
        yield replace(plain, **terms, epilogue=parse("silu"))
        yield contiguous(replace(plain, **odd, **terms, epilogue=parse("swiglu")))
        yield replace(plain, **terms, epilogue=parse("silu"), batch=3)
        for form in FORMATS.values():
            yield stored(plain, form)
            for scale in scales_of(form):
                if scale.grid and scale != usual_scale(form):
                    weight = Operand(form.storage[0], "col", format=form.name, scale=scale)
                    yield whole_k(replace(plain, b=weight))
        yield replace(base, out=Operand(torch.float32))

    def probes_of_use(self) -> Iterator[Problem]:
        """Small problems, each verified by some thirty launches. They have every dtype, each kind
        of operand whose strides a problem does not fix, and operands that may be one tensor."""
        side = 16 if self._device().type == "cpu" else 128
        for dtype in self.dtypes:
            yield self._probe((side, side, 4 * side), dtype)
        base = self._probe((side, side, side))
        a, b, out = base.a, base.b, base.out
        loose, strided = laid(out, "row_unaligned"), laid(out, "strided")
        fp32 = replace(strided, dtype=torch.float32)
        yield base
        yield replace(base, scaled=True)
        yield replace(base, residual=out, scaled=True)
        yield replace(base, bias=out.dtype, residual=loose, scaled=True)
        yield replace(base, bias=torch.float32, residual=fp32)
        yield replace(base, batch=3, bias=out.dtype, epilogue=parse("silu"))
        yield replace(base, a=laid(a, "strided"), b=laid(b, "row_unaligned"), out=strided)
        yield replace(base, a=laid(a, "row_unaligned"), b=laid(b, "col"))
        yield replace(base, a=laid(a, "col_unaligned"), b=laid(b, "col_unaligned"))
        yield replace(base, batch=3, a=laid(a, "col"), b=laid(b, "row_unaligned"))
        yield contiguous(replace(base, n=max(1, side - 1)))

    def sizes_of_tiles(self) -> Iterator[Problem]:
        """Sizes of every alignment and remainder of a tile: along M, then N, then K."""
        side = 16
        tallest = 128 if self._device().type == "cuda" else 32
        remainders = {tallest + extra for extra in (*range(1, 17), 20, 24, 28)}
        ends = {*range(1, 17), 20, 24, 28, 40, 56, 264, 282, 312} | remainders
        for m in sorted(ends):
            yield self._probe((m, side, side))
        for size in (8, 24, 40, 56, 17, 33, 47):
            yield self._probe((side, size, side))
            yield self._probe((side, side, size))

    def probes_of_outputs(self) -> Iterator[Problem]:
        """Every kind and reduction, with all terms of the expression and sizes that no block
        divides; and outputs per row alone, with aligned operands."""
        base, odd = self._probe(), self._odd()
        aligned = contiguous(replace(base, m=odd["m"], scaled=True))
        base = contiguous(replace(aligned, **odd))
        terms = replace(base, bias=base.out.dtype, residual=base.out)
        col = replace(aligned, b=laid(aligned.b, "col"), residual=aligned.out)
        row_max = Port("row_max", "row", reduce="max", **ABSOLUTE)
        row_sum = Port("row_sum", "row", reduce="sum", **SQUARE)
        col_sum = Port("col_sum", "col", torch.float16, reduce="sum")
        col_max = Port("col_max", "col", reduce="max")
        scalar_max = Port("scalar_max", "scalar", torch.bfloat16, reduce="max", **ABSOLUTE)
        scalar_sum = Port("scalar_sum", "scalar", reduce="sum", **SQUARE)
        tile = Port("tile", "tile", torch.bfloat16)
        for probe, text, outputs in (
            (aligned, "identity", (row_max,)),
            (col, "swiglu", (row_sum,)),
            (terms, "silu", (row_max, col_sum)),
            (terms, "swiglu", (scalar_sum, row_sum)),
            (terms, "gelu", (col_max, scalar_max)),
            (base, "identity", (tile, row_sum)),
        ):
            yield replace(probe, epilogue=replace(parse(text), outputs=outputs))

    def demanding(self) -> Sequence[Problem]:
        """Problems that reveal a config's faults, the most revealing first: with all terms of the
        expression, if the kernel takes them."""
        plain = self._long()
        return [_with_terms(plain), plain, self._probe()]

    def demanding_scales(self) -> Sequence[Problem]:
        """:meth:`demanding`, for operands with formats."""
        of_each = [stored(self._long(), form) for form in FORMATS.values()]
        return [each for plain in of_each for each in (_with_terms(plain), plain)]

    def fine_grained(self) -> Sequence[Problem]:
        """Problems whose result is not rounded to 16 bits, which would hide a difference; then
        others, in case the kernel declines all of these."""
        plain, fp32 = self._long(), torch.float32
        wide = replace(plain, out=Operand(fp32))
        more = [self._long(fp32)] * (fp32 in self.dtypes)
        return [wide, *more, plain, self._probe()]

    def _long(self, dtype: torch.dtype | None = None) -> Problem:
        """K long enough to be split, and M not a multiple of a block."""
        m, n, k = self._size()
        times = 8 if self._device().type == "cuda" else 4
        return self._probe((max(1, m - 5), n, times * k), dtype)

    def _odd(self) -> dict[str, Any]:
        """Sizes that no block divides."""
        return {name: max(1, size - 3) for name, size in zip("mnk", self._size(), strict=True)}

    @classmethod
    def _size(cls) -> tuple[int, int, int]:
        return cls.size or SIZE[cls._device().type]

    @classmethod
    def _probe(
        cls, size: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Problem:
        """Return the product of contiguous matrices."""
        m, n, k = size or cls._size()
        operand = Operand(dtype or cls.dtypes[0])
        device = fingerprint(cls._device())
        return contiguous(Problem(m, n, k, operand, operand, operand, device))


def _with_terms(plain: Problem) -> Problem:
    return replace(plain, bias=plain.out.dtype, residual=plain.out, epilogue=parse("silu"))


def odd_problems(device: DeviceFingerprint) -> Iterator[Problem]:
    """Yield problems that only ``reasons_against`` should ever see."""
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
    layouts: tuple[Layout, ...] = get_args(Layout)
    for layout, aligned, wide in itertools.product(layouts, (True, False), (True, False)):
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
        elsewhere = replace(gpu, **changes)
        yield replace(plain, device=elsewhere)
        yield replace(plain, device=elsewhere, a=Operand(torch.float8_e4m3fn), m=1)
