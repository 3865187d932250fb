"""Checks that all forms of an operand format are the same numbers. Subclass it in three lines::

from tmm_core.testing import FormatConformance

class TestMine(FormatConformance):
    format = MINE
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import tmm_core
from tmm_core import Quantized, Scale, dispatch, formats
from tmm_core.epilogues import parse
from tmm_core.formats import Format, grids
from tmm_core.spec.device import fingerprint, interpreting
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.testing.probe_problems import Suite, contiguous, stored
from tmm_core.verify import compare, random_inputs
from tmm_core.verify.guard_bands import same_bits

Tensor = torch.Tensor

#: Sizes that divide nothing, and one row.
SIZES = ((5, 40, 72), (1, 24, 40), (19, 33, 57))


class FormatConformance(Suite):
    """Checks ``format`` against the spec in :mod:`tmm_core.formats` and an fp64 reference of the
    whole product, by BLAS and by every kernel that serves it on this device.

    Attributes:
        format: The format.
        device: As in :class:`tmm_core.testing.KernelConformance`.
        dtypes: Dtypes of the other operand, which is plain.
    """

    format: ClassVar[Format]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    @pytest.fixture(autouse=True)
    def known(self) -> Iterator[None]:
        """The format is known while it is tested."""
        new = self.format.name not in formats.FORMATS
        formats.add(self.format)
        yield
        if new:
            formats.remove(self.format)

    # -- the numbers -------------------------------------------------------------------

    def test_stored_numbers_are_read_as_they_were_rounded(self) -> None:
        """A stored number's value is rounded to that number."""
        for dtype in self.format.storage:
            codes = self._codes(dtype)
            values = self.format.dequantize(codes)
            assert values.is_floating_point()
            assert values.dtype.itemsize >= 2
            again = self.format.dequantize(self.format.quantize(values.float(), dtype))
            assert torch.equal(again, values)

    def test_rounding_is_close(self) -> None:
        """Rounding moves a number by at most a fifth of the format's limit."""
        limit = self.format.limit or 1.0
        numbers = torch.linspace(-limit, limit, 201, dtype=torch.float32, device="cpu")
        for dtype in self.format.storage:
            values = self.format.dequantize(self.format.quantize(numbers, dtype)).float()
            assert ((values - numbers).abs() <= 0.2 * limit).all()

    def test_values_are_scaled(self) -> None:
        """Zero points and scales apply in this order."""
        form = self.format
        codes = self._codes(form.storage[0])[: 6 * form.pack].reshape(2, -1)
        stored = form.packed(codes)
        assert stored.shape == (2, codes.shape[1] // form.pack)
        assert same_bits(form.unpacked(stored), codes)
        assert same_bits(form.unpacked(stored.mT, -2).mT.contiguous(), codes)
        scale = torch.tensor([[0.5], [2.0]], dtype=torch.float32, device="cpu")
        values = form.values(stored, scale, dtype=torch.float32)
        assert torch.equal(values, form.dequantize(codes).float() * scale)
        if form.zeros:
            zero = torch.tensor([[1.0], [3.0]], dtype=torch.float32, device="cpu")
            shifted = (form.dequantize(codes).float() + form.origin - zero) * scale
            assert torch.equal(form.values(stored, scale, zero, torch.float32), shifted)

    # -- products ----------------------------------------------------------------------

    # Each size is tested twice. Interpreted, one case takes seconds, so the two cases of a size
    # share the pairs of a scale and a dtype.
    @pytest.mark.parametrize(
        ("m", "n", "k", "epilogue", "half"),
        [
            (*SIZES[0], None, 0),
            (*SIZES[0], "swiglu", 1),
            (*SIZES[1], "silu", 0),
            (*SIZES[1], "swiglu", 1),
            (*SIZES[2], None, 0),
            (*SIZES[2], "silu", 1),
        ],
    )
    def test_products(self, m: int, n: int, k: int, epilogue: str | None, half: int) -> None:
        """Every kernel that serves the format computes the product of the values."""
        served = []
        of_scale = self.format.scale_dtypes
        scales = zip(self.format.grids, itertools.cycle(of_scale), strict=False)
        pairs = list(itertools.product(enumerate(scales), enumerate(self.dtypes)))
        for (of_block, (block, scale)), (of_dtype, dtype) in pairs:
            if interpreting() and len(pairs) > 1 and (of_block + of_dtype) % 2 != half:
                continue
            problem = self._problem(dtype, Scale(block, scale), m, n, k)
            problem = contiguous(replace(problem, epilogue=parse(epilogue or "identity")))
            inputs = random_inputs.make(problem, self._device())
            expected = compare.expected(problem, inputs).numbers
            for kernel in dispatch.default_dispatcher().registry.kernels():
                if kernel.reasons_against(problem):
                    continue
                launcher: Any = kernel.bind(problem, kernel.default_config(problem))
                error = compare.error(inputs.launch(launcher, None), expected)
                limit = compare.tolerance(problem)
                assert error <= limit, f"{kernel.name}: {error} for {problem}"
                served.append(kernel.name)
        assert "blas" in served
        if self.format.decode is not None and (interpreting() or self._device().type == "cuda"):
            assert len(set(served)) > 1, "no kernel uses its device function"

    def test_its_problems_are_read_back(self) -> None:
        for block in self.format.grids:
            scale = Scale(block, self.format.scale_dtypes[-1])
            problem = self._problem(self.dtypes[0], scale, 4, 8, 16)
            document = json.loads(json.dumps(problem.to_json()))
            device = fingerprint(torch.device("cpu"))
            assert Problem.from_json(document, device, problem.epilogue) == problem

    # -- tensors -----------------------------------------------------------------------

    def test_a_quantised_tensor_stands_for_its_values(self) -> None:
        """In calls, copies and saved states."""
        for block in self.format.grids:
            self._stands_for_its_values(block)

    def _stands_for_its_values(self, block: grids.Block) -> None:
        form, n, k = self.format, 8, self._k(24, block)
        codes = self._codes(form.storage[0])
        codes = codes[torch.arange(n * k, device="cpu") % codes.numel()].view(n, k)
        stored = form.packed(codes)
        own = form.block(block, n, k)
        shape = grids.sizes(own, n, k)
        drawn = torch.rand(shape, dtype=torch.float32, device="cpu") + 0.5
        kind = form.scale_dtypes[0]
        scale = grids.exponents(drawn) if kind is grids.EXPONENT else drawn.to(kind)
        scale = scale.reshape(()) if own == grids.TENSOR else scale
        weight = Quantized(
            stored, scale, format=form.name, block=None if own == grids.TENSOR else own
        )
        values = form.dequantize(codes).float()
        each = grids.factors(scale, torch.float32)
        for dimension, size in enumerate(own):
            each = each.repeat_interleave(size, dimension) if size > 1 else each
        values = values * (each[:n, :k] if each.dim() else each)
        assert torch.equal(weight.dequantize(), values.to(weight.dtype))
        assert torch.equal(weight.t().dequantize(), values.to(weight.dtype).t())
        x = torch.randn(5, k, dtype=torch.bfloat16, device="cpu")
        expected = x.double() @ values.double().T
        error = compare.error(tmm_core.linear(x, weight), expected)
        assert error <= max(1.6e-2, self.format.tolerance)
        saved = io.BytesIO()
        torch.save(weight, saved)
        saved.seek(0)
        assert torch.equal(torch.load(saved).dequantize(), weight.dequantize())
        with pytest.raises(RuntimeError, match="no derivative"):
            tmm_core.linear(x.requires_grad_(), weight).sum().backward()

    # -- what the tests share ----------------------------------------------------------

    def _codes(self, dtype: torch.dtype) -> Tensor:
        """Every code of a finite number, of a dtype of 8 bits."""
        count = 1 << self.format.bits
        codes = torch.arange(count, dtype=torch.int16, device="cpu").to(torch.uint8).view(dtype)
        return codes[self.format.dequantize(codes).float().isfinite()]

    def _k(self, k: int, block: grids.Block) -> int:
        """K, raised to three groups and to whole stored elements. The last group is short if the
        format allows it."""
        form = self.format
        k = max(k, 3 * block[1] - (block[1] // 2 if form.short else 0))
        return -(-k // form.pack) * form.pack

    def _problem(self, dtype: torch.dtype, scale: Scale, m: int, n: int, k: int) -> Problem:
        operand, device = Operand(dtype), fingerprint(self._device())
        k = self._k(k, scale.block)
        plain = Problem(m, n, k, operand, operand, operand, device)
        return contiguous(stored(plain, self.format, scale))
