"""Checks that all forms of an operand format are the same numbers. Subclass it in three lines::

from tmm_core.testing import FormatConformance

class TestMine(FormatConformance):
    format = MINE
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import tmm_core
from tmm_core import Quantized, dispatch, formats
from tmm_core.epilogues import parse
from tmm_core.formats import Format
from tmm_core.spec.device import fingerprint, interpreting
from tmm_core.spec.epilogue import IDENTITY
from tmm_core.spec.problem import Problem
from tmm_core.testing.probe import Probe
from tmm_core.verify import compare

Tensor = torch.Tensor

#: Sizes that divide nothing, and one row.
SIZES = ((5, 40, 72), (1, 24, 40), (19, 33, 57))


class FormatConformance:
    """Checks ``format`` against the spec in :mod:`tmm_core.formats` and an fp64 reference of the
    whole product, by BLAS and by every kernel that serves it on this device.

    Attributes:
        format: The format.
        device: ``"cuda"`` or ``"cpu"``; by default a GPU if there is one and Triton's interpreter
            is not enabled.
        dtypes: Dtypes of the plain operand beside it.
    """

    format: ClassVar[Format]
    device: ClassVar[str | None] = None
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
        """Random numbers are nearer to what they are rounded to than to zero."""
        limit = self.format.limit or 1.0
        numbers = torch.linspace(-limit, limit, 201, dtype=torch.float32, device="cpu")
        for dtype in self.format.storage:
            values = self.format.dequantize(self.format.quantize(numbers, dtype)).float()
            assert ((values - numbers).abs() <= 0.2 * limit).all()

    def test_values_are_scaled(self) -> None:
        """Zero points and scales apply in this order."""
        codes = self._codes(self.format.storage[0])[:6].reshape(2, 3)
        scale = torch.tensor([[0.5], [2.0]], dtype=torch.float32, device="cpu")
        values = self.format.values(codes, scale, dtype=torch.float32)
        assert torch.equal(values, self.format.dequantize(codes).float() * scale)
        if self.format.zeros:
            zero = torch.tensor([[1.0], [3.0]], dtype=torch.float32, device="cpu")
            shifted = (self.format.dequantize(codes).float() - zero) * scale
            assert torch.equal(self.format.values(codes, scale, zero, torch.float32), shifted)

    # -- products ----------------------------------------------------------------------

    @pytest.mark.parametrize("scale", ["tensor", "row"])
    @pytest.mark.parametrize(("m", "n", "k"), SIZES)
    @pytest.mark.parametrize("epilogue", [None, "silu", "swiglu"])
    def test_products(self, m: int, n: int, k: int, scale: Any, epilogue: str | None) -> None:
        """Every kernel that serves the format gives the values' product."""
        served = []
        for dtype in self.dtypes:
            probe = self._probe(dtype, m=m, n=n, k=k, b="col", b_scale=scale)
            probe = replace(probe, epilogue=parse(epilogue) if epilogue else IDENTITY)
            tensors = probe.tensors(torch.device(self._device()))
            expected = compare.reference(tensors.problem, tensors.inputs)
            for kernel in dispatch.default_dispatcher().registry.kernels():
                if kernel.reasons_against(tensors.problem):
                    continue
                launcher = kernel.bind(tensors.problem, kernel.default_config(tensors.problem))
                found = tensors.launch(launcher, None)
                error = compare.error(found, expected)
                assert error <= compare.tolerance(tensors.problem), f"{kernel.name}: {error}"
                served.append(kernel.name)
        assert "blas" in served
        if self.format.decode is not None and (interpreting() or self._device() == "cuda"):
            assert len(set(served)) > 1, "no kernel uses its device function"

    def test_its_problems_are_read_back(self) -> None:
        problem = self._probe(self.dtypes[0], m=4, n=8, k=16, b_scale="row").tensors(
            torch.device("cpu")
        ).problem  # fmt: skip
        document = json.loads(json.dumps(problem.to_json()))
        device = fingerprint(torch.device("cpu"))
        assert Problem.from_json(document, device, problem.epilogue) == problem
        assert self.format.name in str(problem) or self.format.implied

    # -- tensors -----------------------------------------------------------------------

    def test_a_quantised_tensor_stands_for_its_values(self) -> None:
        """In calls, copies and saved states."""
        codes = self._codes(self.format.storage[0])
        codes = codes[torch.arange(8 * 24, device="cpu") % codes.numel()].view(8, 24)
        scale = torch.rand(8, 1, dtype=torch.float32, device="cpu") + 0.5
        weight = Quantized(codes, scale, format=self.format.name)
        values = self.format.values(codes, scale, dtype=torch.float32)
        assert torch.equal(weight.dequantize(), values.to(weight.dtype))
        x = torch.randn(5, 24, dtype=torch.bfloat16, device="cpu")
        expected = x.double() @ values.double().T
        for found in (tmm_core.linear(x, weight), x @ weight.t()):
            assert compare.error(found, expected) <= max(1.6e-2, self.format.tolerance)
        saved = io.BytesIO()
        torch.save(weight, saved)
        saved.seek(0)
        assert torch.equal(torch.load(saved, weights_only=False).dequantize(), weight.dequantize())
        with pytest.raises(RuntimeError, match="no derivative"):
            tmm_core.linear(x.requires_grad_(), weight).sum().backward()

    # -- what the tests share ----------------------------------------------------------

    def _device(self) -> str:
        usual = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
        return self.device or usual

    def _codes(self, dtype: torch.dtype) -> Tensor:
        """Every finite stored number of a dtype of 8 bits."""
        codes = torch.arange(256, dtype=torch.int16, device="cpu").to(torch.uint8).view(dtype)
        return codes[self.format.dequantize(codes).float().isfinite()]

    def _probe(self, dtype: torch.dtype, **more: Any) -> Probe:
        stored = self.format.storage[0]
        if self.format.implied:
            kind = more.get("b_scale")
            return Probe(dtype=stored, a_scale=kind, **more)
        return Probe(dtype=dtype, b_dtype=stored, b_format=self.format.name, **more)
