"""A format is one file. Without the file the format is refused and all else works. Another file
adds a format, which BLAS serves and verification checks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tmm_core import formats
from tmm_core.formats import Format, Pair, grids

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PACKAGE = Path(formats.__file__).parents[1]

WITHOUT = """
import torch, tmm_core
from tmm_core import formats
from tmm_core.testing import KernelConformance, probe_problems
from tmm_blas.blas import Blas
assert formats.FORMATS == {}
a, b = torch.randn(6, 32), torch.randn(32, 8)
torch.testing.assert_close(tmm_core.matmul(a, b, epilogue="relu"), (a @ b).relu())
assert tmm_core.plan(a, b)(a, b).shape == (6, 8)
a.requires_grad_()
tmm_core.matmul(a, b).sum().backward()
eight = [t.detach().to(torch.float8_e4m3fn) for t in (a, b)]
try:
    tmm_core.matmul(*eight)
except tmm_core.UnsupportedProblemError as error:
    assert "float8_e4m3fn operands have no installed format" in str(error), error
else:
    raise AssertionError("multiplied numbers whose format it does not know")
try:
    tmm_core.matmul(*eight, scale_a=torch.ones(()))
except RuntimeError as error:
    assert "scale_a is for no operands" in str(error), error
class Suite(KernelConformance):
    kernel = Blas()
assert not list(Suite().probes_of_scales())
assert all(Suite.kernel.reasons_against(p) is not None
           for p in probe_problems.odd_problems(tmm_core.problem(a, b).device))
"""

FNUZ = """
import torch
from tmm_core.formats import Format

FORMAT = Format(
    name="fnuz",
    storage=(torch.float8_e4m3fnuz,),
    implied=True,
    grids=((0, 0), (1, 0)),
    result=torch.float16,
    quantize=lambda numbers, dtype: numbers.to(dtype),
    dequantize=lambda stored: stored.to(torch.float32),
    tolerance=2e-3,
)
"""

WITH = """
import torch, tmm_core
from tmm_core.verify import random_inputs, compare
from tmm_blas.blas import Blas
a, b = torch.randn(6, 32).to(torch.float8_e4m3fnuz), torch.randn(32, 8).to(torch.float8_e4m3fnuz)
scale = torch.rand(6, 1) + 0.5
y = tmm_core.matmul(a, b, scale_a=scale, epilogue="relu")
assert y.dtype is torch.float16
expected = ((a.double() @ b.double()) * scale.double()).relu()
torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)
said = tmm_core.explain(a, b).rejected["triton.naive"]
assert "does not multiply fnuz operands, torch.float8_e4m3fnuz and torch.float8_e4m3fnuz" in said
described = tmm_core.problem(a, b, scale_a=scale)
inputs = random_inputs.make(described, torch.device("cpu"), seed=1)
launcher = Blas().bind(described, Blas().default_config(described))
error = compare.error(inputs.launch(launcher, None), compare.expected(described, inputs).numbers)
assert 0 < error <= compare.tolerance(described) == 2e-3, error
try:
    tmm_core.matmul(a, torch.randn(32, 8).to(torch.float8_e4m3fn))
except RuntimeError as error:
    assert "dtype" in str(error), error
else:
    raise AssertionError("multiplied two formats with one another")
"""


@pytest.mark.parametrize(("files", "code"), [({}, WITHOUT), ({"fnuz.py": FNUZ}, WITH)],
                         ids=["without-fp8", "with-another"])  # fmt: skip
@pytest.mark.slow
def test_a_format_is_its_file(files: dict[str, str], code: str, tmp_path: Path) -> None:
    copy = tmp_path / "tmm_core"
    copy.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("formats", "__pycache__"):
            (copy / path.name).symlink_to(path)
    (copy / "formats").mkdir()
    for shared in ("__init__.py", "grids.py"):
        (copy / "formats" / shared).symlink_to(PACKAGE / "formats" / shared)
    for name, text in files.items():
        (copy / "formats" / name).write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
    # Not Triton's interpreter, which has nothing to do with it and takes a second to come.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TMM_ON_CACHE_MISS": "heuristic"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_fp8_is_dequantised_exactly() -> None:
    form = formats.FORMATS["fp8"]
    for dtype in form.storage:
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        numbers = every.double()
        kept = numbers.isfinite()
        assert torch.equal(form.dequantize(every).double()[kept], numbers[kept])
        assert torch.equal(form.quantize(numbers[kept], dtype).double(), numbers[kept])
    assert formats.pair(*form.storage)[:2] == (form, form)
    assert formats.pair(form.storage[0], torch.bfloat16).result is None


def test_operands_of_two_formats_have_a_result_if_both_are_named() -> None:
    eight, five = torch.float8_e4m3fn, torch.float8_e5m2
    of = formats.IMPLIED
    if of[eight] is of[five]:
        pairs = {"int8,": (torch.int8, eight), ",int8": (eight, torch.int8)}
    else:
        pairs = {"": (eight, five), "int8,": (torch.int8, eight), ",int8": (eight, torch.int8)}
    for names, dtypes in pairs.items():
        assert formats.pair(*dtypes, names).result is None, names
    named = f"int8,{of[eight].name}"
    assert formats.pair(torch.int8, eight, named).result is formats.named("int8").result


@pytest.mark.parametrize("form", formats.FORMATS.values(), ids=lambda form: form.name)
def test_the_shape_of_scales_implies_their_block(form: formats.Format) -> None:
    """If several blocks have that shape, the caller has to name one. A group may be longer than K.
    The last of several groups may be short only if the format allows it."""
    for outer, k in itertools.product((1, 5, 64, 128, 300), (16, 32, 48, 64, 96, 128, 256, 384)):
        blocks: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for rows, width in form.grids:
            if form.short or not width or k % width == 0 or k < width:
                shape = (-(-outer // (rows or outer)), -(-k // (width or k)))
                block = formats.grids.simplest((rows, width), outer, k)
                blocks.setdefault(shape, set()).add(block)
        for shape, found in blocks.items():
            if len(found) == 1:
                assert form.block_of(shape, outer, k) == found.pop(), (shape, outer, k)
            else:
                with pytest.raises(ValueError, match="several of them"):
                    form.block_of(shape, outer, k)
        with pytest.raises(ValueError, match="none of them"):
            form.block_of((outer + 1, k + 1), outer, k)


def test_a_name_has_the_blocks_that_no_shape_implies() -> None:
    for block in ((0, 0), (1, 0), (1, 32), (1, 128), (128, 128)):
        text = formats.spelled("int4", block)
        expected = None if block in ((0, 0), (1, 0)) else block
        assert formats.read(f"{text},") == (("int4", expected), ("", None))
        assert (text == "int4") is (expected is None)


# -- what each format is ------------------------------------------------------------------

HALVES = (BF16, FP16, FP32)
FLOATS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = FLOATS + [-x for x in FLOATS]
#: Properties that checkpoints and kernels rely on.
STATED: dict[str, dict[str, Any]] = {
    "fp8": {"storage": (E4M3, E5M2), "short": True, "implied": True, "native": True,
            "grids": ((0, 0), (1, 0), (1, 32), (1, 64), (1, 128), (128, 128))},
    "int8": {"storage": (torch.int8,), "limit": 127, "zeros": True, "scale_dtypes": {*HALVES},
             "grids": ((0, 0), (1, 0), (1, 32), (1, 64), (1, 128)), "values": [*range(-128, 128)]},
    "int4": {"storage": (torch.uint8,), "pack": 2, "limit": 7, "zeros": True, "origin": 8,
             "scale_dtypes": {*HALVES}, "grids": ((1, 0), (1, 32), (1, 64), (1, 128)),
             "values": [*range(-8, 8)]},
    "int4_signed": {"storage": (torch.int8, torch.uint8), "pack": 2, "limit": 7, "zeros": True,
                    "scale_dtypes": {*HALVES},
                    "grids": ((1, 0), (1, 32), (1, 64), (1, 128), (1, 256)),
                    "values": [*range(8), *range(-8, 0)]},
    "mxfp4": {"storage": (torch.uint8,), "pack": 2, "limit": 6, "grids": ((1, 32),),
              "scale_dtypes": {torch.uint8}, "values": E2M1},
    "nvfp4": {"storage": (torch.uint8,), "pack": 2, "limit": 6, "grids": ((1, 16),),
              "scale_dtypes": {E4M3, FP32}, "values": E2M1},
    "mxfp8": {"storage": (E4M3, E5M2), "grids": ((1, 32),), "scale_dtypes": {torch.uint8}},
}  # fmt: skip
DEFAULTS = {"pack": 1, "short": False, "scale_dtypes": {FP32}, "zeros": False, "origin": 0,
            "limit": None, "result": BF16, "implied": False, "native": False}  # fmt: skip


def values_of(form: Format) -> tuple[Tensor, Tensor]:
    """All codes, in the storage dtype, and their values."""
    if form.storage[0].is_floating_point:
        codes = torch.arange(256, dtype=torch.uint8).view(form.storage[0])
        codes = codes[codes.float().isfinite()]
    else:
        least = torch.iinfo(form.storage[0]).min if form.pack == 1 else 0
        codes = torch.arange(least, least + 2**form.bits, dtype=form.storage[0])
    return codes, form.dequantize(codes).double()


@pytest.mark.parametrize("name", STATED)
def test_a_format_has_its_documented_fields(name: str) -> None:
    form, stated = formats.FORMATS[name], DEFAULTS | STATED[name]
    for field in ("storage", "grids", *DEFAULTS):
        found = getattr(form, field)
        assert (set(found) if field == "scale_dtypes" else found) == stated[field], field
    assert (form.decode is None) is (name == "nvfp4")
    # Tensor cores that multiply fp8 round; other products are exact in fp32.
    assert (form.tolerance == 0) is (name != "fp8")
    assert form.bits == (4 if form.pack == 2 else 8)
    codes, values = values_of(form)
    assert values.tolist() == stated.get("values", codes.double().tolist())
    if form.limit is not None:
        assert form.limit in values
        assert values.abs().max() <= form.limit + 1
    assert form.dequantize(codes).dtype is BF16
    assert formats.zero_dtypes(form) == (*form.storage, *form.scale_dtypes)


@pytest.mark.parametrize("name", STATED)
def test_numbers_get_the_nearest_code(name: str) -> None:
    """Halfway between two, the code that is even. Beyond the largest, the largest; fp8 has torch's
    rounding."""
    form = formats.FORMATS[name]
    _, values = values_of(form)
    largest = min(float(values.max()), 140.0)
    numbers = torch.arange(-largest * 32, largest * 32 + 1, dtype=torch.float64) / 32
    if not form.storage[0].is_floating_point:
        numbers = torch.cat([numbers, torch.tensor([1.25, -1.25]) * largest])
    found = form.quantize(numbers.float(), form.storage[0])
    assert found.dtype is form.storage[0]
    rounded = form.dequantize(found).double()
    distances = (numbers[:, None] - values[None]).abs()
    assert torch.equal((rounded - numbers).abs(), distances.min(1).values)
    halfway = (distances == distances.min(1, keepdim=True).values).sum(1) > 1
    even = found.view(torch.uint8) & 1 if found.element_size() == 1 else found & 1
    assert not even[halfway & (rounded != 0)].any()
    assert halfway.any()


# -- packed codes and their values --------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8", "int4_signed"])
@pytest.mark.parametrize("along", [-1, -2])
def test_codes_are_packed_along_k_the_lowest_bits_first(name: str, along: int) -> None:
    form = formats.FORMATS[name]
    codes = torch.randint(0, 2**form.bits - 1, (3, 4, 6)).to(form.storage[0])
    stored = form.packed(codes, along)
    size = [3, 4, 6]
    size[along] //= form.pack
    assert list(stored.shape) == size
    assert torch.equal(form.unpacked(stored, along), codes)
    if form.pack == 2:
        low = codes.narrow(along, 0, 1)
        assert torch.equal(stored.narrow(along, 0, 1) & 15, low)
        row = form.packed(codes[0, 0])
        assert torch.equal(form.unpacked(row), codes[0, 0])
        assert row[0].item() & 255 == codes[0, 0, 0] | codes[0, 0, 1] << 4


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 2), (2, 4), (3, 4), (2, 3), (5, 1), (9, 9)])
@pytest.mark.parametrize("along", [-1, -2])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_values_equal_a_simple_models(
    block: grids.Block, along: int, lead: tuple[int, ...]
) -> None:
    """The model works element by element. Blocks may be longer than a matrix, or not divide it."""
    form = formats.FORMATS["int8"]
    outer, k = 6, 8
    codes = torch.randint(-128, 127, (*lead, outer, k), dtype=torch.int8)
    grid = grids.sizes(block, outer, k)
    scale = torch.randint(1, 9, (*lead, *grid)).float() / 8
    zero = torch.randint(-5, 5, (*lead, *grid), dtype=torch.int8)
    expected = torch.empty(codes.shape)
    for index in itertools.product(*map(range, codes.shape)):
        row, column = index[-2] // (block[0] or outer), index[-1] // (block[1] or k)
        place = (*index[:-2], row, column)
        expected[index] = (codes[index].float() - zero[place].float()) * scale[place]
    given = [t if along == -1 else t.mT for t in (codes, scale, zero)]
    found = form.values(*given, dtype=FP32, block=block, along=along)
    assert torch.equal(found if along == -1 else found.mT, expected)
    plain = form.values(codes)
    assert plain.dtype is BF16
    assert torch.equal(plain.double(), codes.double())


def test_a_vector_has_its_groups_along_k() -> None:
    codes, scale = torch.arange(6, dtype=torch.int8), torch.tensor([1.0, 2.0])
    found = formats.FORMATS["int8"].values(codes, scale, dtype=FP32, block=(1, 4))
    assert found.tolist() == [0, 1, 2, 3, 8, 10]


def test_a_zero_point_counts_from_the_origin() -> None:
    codes = torch.tensor([[0x80]], dtype=torch.uint8)
    int4 = formats.FORMATS["int4"]
    assert int4.values(codes).tolist() == [[-8, 0]]
    zero = torch.tensor([[3]], dtype=torch.uint8)
    assert int4.values(codes, None, zero).tolist() == [[-3, 5]]
    assert int4.values(codes, torch.tensor([[2.0]]), zero).tolist() == [[-6, 10]]


# -- blocks -------------------------------------------------------------------------------


def cells(block: grids.Block, outer: int, k: int) -> list[tuple[int, int]]:
    return [
        (row // (block[0] or outer), column // (block[1] or k))
        for row in range(outer)
        for column in range(k)
    ]


def test_the_simplest_block_divides_a_matrix_in_the_same_way() -> None:
    for outer, k, rows, width in itertools.product(range(1, 5), range(1, 5), range(6), range(6)):
        block = rows, width
        sizes = grids.sizes(block, outer, k)
        divided = cells(block, outer, k)
        assert sizes == (divided[-1][0] + 1, divided[-1][1] + 1)
        for stack in (1, 2):
            found = grids.simplest(block, outer, k, stack)
            assert cells(found, outer, k) == divided
            if stack == 1:
                assert (found == (0, 0)) is (sizes == (1, 1))
            if rows == 1 and sizes[1] == 1 and found != (0, 0):
                assert found == (1, 0)
    # A dimension of nothing has no block.
    assert grids.simplest((1, 4), 3, 0) == (1, 4)
    assert grids.simplest((2, 0), 0, 3) == (2, 0)


@pytest.mark.parametrize(
    ("text", "block", "kind"),
    [
        ("tensor", (0, 0), "tensor"), ("row", (1, 0), "row"), ("1x128", (1, 128), "group"),
        ("128x128", (128, 128), "block"), ("2x1", (2, 1), "block"), ("1x1", (1, 1), "group"),
    ],
)  # fmt: skip
def test_blocks_are_written_and_read(text: str, block: grids.Block, kind: str) -> None:
    assert (grids.text_of(block), grids.parse(text), grids.kind_of(block)) == (text, block, kind)


@pytest.mark.parametrize(
    "text", ["", "x", "1x", "x1", "0x4", "4x0", "1x-2", "1x2x3", "axb", "1.0x2", "Row", "1 x 2"]
)
def test_invalid_texts_of_grids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="scales"):
        grids.parse(text)


def test_a_caller_names_a_group_or_a_block() -> None:
    assert grids.block_of_call(None, None) is None
    assert grids.block_of_call(64, None) == (1, 64)
    assert grids.block_of_call(None, [2, 4]) == (2, 4)
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (64, (1, 64), ValueError, "group or the block"), (None, 5, TypeError, "two integers"),
        (None, (1, 2, 3), ValueError, "two integers"), (None, (1,), ValueError, "two integers"),
        (1.5, None, TypeError, "are integers"), (None, (1, 2.5), TypeError, "are integers"),
    ]  # fmt: skip
    for group, block, error, message in wrong:
        with pytest.raises(error, match=message):
            grids.block_of_call(group, block)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3), ("storage", torch.int8), ("storage", (3,)), ("quantize", None),
        ("dequantize", "x"), ("tolerance", math.nan), ("tolerance", True), ("pack", 2.0),
        ("grids", 32), ("grids", ((1, 32, 4),)), ("grids", ((1, "x"),)), ("short", 1),
        ("scale_dtypes", ("float32",)), ("zeros", None), ("origin", torch.ones(())),
        ("limit", math.inf), ("result", "bfloat16"), ("implied", 0), ("native", torch.ones(2)),
        ("decode", 3),
    ],
)  # fmt: skip
def test_a_format_of_other_types_is_refused(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^a format's {field} is "):
        dataclasses.replace(formats.named("int8"), **{field: value})


@pytest.mark.parametrize("field", ["storage", "grids", "scale_dtypes", "pack"])
def test_a_format_stores_codes_and_has_scales(field: str) -> None:
    empty: dict[str, Any] = {field: 0 if field == "pack" else ()}
    with pytest.raises(ValueError, match="format 'int8' stores no codes, or has no scales"):
        dataclasses.replace(formats.named("int8"), **empty)


def test_a_format_has_its_blocks_and_whole_groups() -> None:
    int4, fp8 = formats.FORMATS["int4"], formats.FORMATS["fp8"]
    assert int4.block((1, 32), 4, 64) == (1, 32)
    assert int4.block((1, 32), 4, 32) == (1, 0)  # one group is a row
    assert int4.block((1, 32), 1, 32) == (0, 0)
    assert int4.block((1, 32), 1, 32, 2) == (1, 0)
    for block in ((1, 16), (2, 32)):
        with pytest.raises(ValueError, match=r"scales by row or 1x32 or .*, not"):
            int4.block(block, 4, 64)
    with pytest.raises(ValueError, match="groups of 32 do not divide K = 48"):
        int4.block((1, 32), 4, 48)
    assert fp8.block((1, 32), 4, 48) == (1, 32)


def test_exponents_are_powers_of_two() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    powers = grids.factors(bits, FP32).double()
    assert powers[:255].tolist() == [2.0 ** (x - 127) for x in range(255)]
    assert powers[255].isnan()
    assert torch.equal(grids.exponents(powers.float()), bits)
    assert grids.factors(torch.ones(2, dtype=BF16), FP32).dtype is FP32
    for towards, expected in ((0.0, bits[:254]), (math.inf, bits[1:255])):
        near = torch.nextafter(powers[1:255].float(), torch.tensor(towards))
        assert torch.equal(grids.exponents(near), expected)
    assert grids.exponents(torch.tensor([0.0, math.inf, math.nan])).tolist() == [0, 254, 255]
    assert grids.exponents(torch.tensor(1.0)).dtype is torch.uint8


# -- formats of a call --------------------------------------------------------------------


def test_results_of_two_operands() -> None:
    """Operands are plain or stored, named or implied; None: they cannot be multiplied."""
    int8, fp8 = formats.FORMATS["int8"], formats.FORMATS["fp8"]
    for a, b, names, expected in (
        (BF16, BF16, "", Pair(None, None, BF16)), (BF16, FP32, "", Pair(None, None, None)),
        (E4M3, E5M2, "", Pair(fp8, fp8, BF16)), (E4M3, BF16, "", Pair(fp8, None, None)),
        (BF16, E4M3, "", Pair(None, fp8, None)), (BF16, E4M3, ",fp8", Pair(None, fp8, BF16)),
        (E4M3, FP16, "fp8,", Pair(fp8, None, FP16)),
        (BF16, torch.int8, ",int8", Pair(None, int8, BF16)),
        (torch.float64, torch.int8, ",int8", Pair(None, int8, None)),
        (torch.int8, torch.int8, "int8,int8", Pair(int8, int8, BF16)),
        (E4M3, torch.int8, "fp8/1x32,int8/1x64", Pair(fp8, int8, BF16, ((1, 32), (1, 64)))),
        (E4M3, torch.int8, ",int8", Pair(fp8, int8, None)),
    ):  # fmt: skip
        found = formats.pair(a, b, names)
        assert found == expected, (a, b, names)
        assert found.stored is not (found[:2] == (None, None))
    int4 = formats.FORMATS["int4"]
    assert formats.pair(torch.uint8, BF16, "int4,").packs == (2, 1)
    assert formats.pair(BF16, torch.uint8, ",int4").packs == (1, 2)
    assert formats.of(torch.uint8, "int4") is int4
    assert formats.of(torch.uint8) is None
    with pytest.raises(ValueError, match="unknown format 'int3': installed are fp8, int4,"):
        formats.pair(BF16, torch.uint8, ",int3")


def test_two_formats_have_neither_one_name_nor_one_dtype() -> None:
    fp8 = formats.FORMATS["fp8"]
    formats.add(fp8)
    other = dataclasses.replace(fp8, name="other", storage=(torch.float8_e4m3fnuz,))
    with pytest.raises(ValueError, match="two formats are named 'fp8'"):
        formats.add(dataclasses.replace(fp8))
    with pytest.raises(ValueError, match="implies two formats, fp8 and taken"):
        formats.add(dataclasses.replace(fp8, name="taken", storage=(torch.float8_e4m3fnuz, E5M2)))
    assert "taken" not in formats.FORMATS
    assert formats.of(torch.float8_e4m3fnuz) is None
    formats.add(other)
    try:
        assert formats.named("other") is formats.of(torch.float8_e4m3fnuz) is other
    finally:
        formats.remove(other)
    assert formats.of(torch.float8_e4m3fnuz) is None
    assert "other" not in formats.FORMATS
    formats.add(dataclasses.replace(other, implied=False))
    formats.remove(formats.named("other"))
    assert formats.of(E4M3) is fp8


def test_a_name_that_is_not_known_loads_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(formats.FORMATS["fp8"], name="other", implied=False)
    loaded: list[str] = []

    def discover() -> None:
        loaded.append("plugins")
        formats.add(other)

    monkeypatch.setattr(formats, "discover", discover)
    try:
        assert formats.named("fp8") is formats.FORMATS["fp8"]
        assert loaded == []
        assert formats.named("other") is formats.of(torch.uint8, "other") is other
        assert loaded == ["plugins"]
    finally:
        formats.remove(other)
