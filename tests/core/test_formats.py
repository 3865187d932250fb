"""A format is one file: with it gone the format is refused and all else works, and with another
there is another, which BLAS serves and verification checks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tmm_core import formats

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
error = compare.error(inputs.launch(launcher, None), compare.reference(described, inputs))
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
def test_the_shape_of_scales_tells_their_block(form: formats.Format) -> None:
    """Or several blocks have that shape, and the caller has to name one. A group may be longer than
    K, but the last of many may be short only where the format says so."""
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


def test_a_name_spells_the_blocks_that_no_shape_tells() -> None:
    for block in ((0, 0), (1, 0), (1, 32), (1, 128), (128, 128)):
        text = formats.spelled("int4", block)
        expected = None if block in ((0, 0), (1, 0)) else block
        assert formats.read(f"{text},") == (("int4", expected), ("", None))
        assert (text == "int4") is (expected is None)
