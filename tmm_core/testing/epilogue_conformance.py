"""Checks that all forms of an epilogue are the same function. Subclass it in three lines::

    from tmm_core.testing import EpilogueConformance

    class TestMine(EpilogueConformance):
        epilogue = MINE

Every form is compared with the reference in fp64, with default and other parameters, and
derivatives with torch's. Device functions run on a GPU or, with ``TRITON_INTERPRET=1``, in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tmm_base.guards import function_of, unwrapped

import tmm_core
from tmm_core.epilogues import parse
from tmm_core.registry.registry import Registry
from tmm_core.spec.device import interpreting
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.hookspecs import hookimpl
from tmm_core.testing.probe_problems import Suite
from tmm_core.verify import compare

Tensor = torch.Tensor

#: Test points for training: every decade, both signs, and none likely to be a kink.
_STEPS = (1e-3, 0.013, 0.11, 0.4, 0.9, 1.7, 3.1, 6.3, 11.7, 19.1, 37.3)


class EpilogueConformance(Suite):
    """Checks ``epilogue`` against the specification in :class:`tmm_core.Epilogue`.

    Attributes:
        epilogue: An :class:`tmm_core.Epilogue`.
        points: Where it is evaluated; by default from -37.3 to 37.3.
        slack: Factor on fp32's tolerance, for the device functions.
        device: As in :class:`tmm_core.testing.KernelConformance`.
    """

    epilogue: ClassVar[Epilogue]
    points: ClassVar[tuple[float, ...]] = (*(-step for step in reversed(_STEPS)), *_STEPS)
    slack: ClassVar[float] = 1.0

    def test_it_goes_by_its_name(self) -> None:
        """A plugin can register it; its name, its parameters and its key then all find it."""
        epilogue = self.epilogue

        class Plugin:
            @hookimpl
            def tmm_epilogues(self) -> list[Epilogue]:
                return [epilogue]

        registry = Registry()
        if not epilogue.builtin:
            registry.register(Plugin())
        known = registry.epilogues()
        numbers = ",".join(map(repr, epilogue.parameters))
        for text in (epilogue.name, f"{epilogue.name}({numbers})", epilogue.key):
            assert parse(text, known) == epilogue
        assert parse(f"{epilogue.name}+softcap(30)", known) == epilogue.then(parse("softcap(30)"))

    def test_its_key_follows_its_source(self) -> None:
        """Its key holds a digest of its package's files, and is the same in every process.
        Otherwise old records would serve a changed epilogue, or no record would serve it."""
        assert replace(self.epilogue).key == self.epilogue.key
        if not self.epilogue.lasting:
            pytest.fail(
                f"a function of {self.epilogue.name} has a closure, is an object or is in no "
                "file, so its key is another in every process: write it as a function of a module"
            )

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )
    def test_reference(self, dtype: torch.dtype) -> None:
        """It keeps the dtype, halves the width if gated, and works element by element."""
        z = self._z().to(dtype)
        for epilogue in self._variants():
            y = epilogue.apply(z)
            self._check(y.dtype == dtype, "reference", f"it returns {y.dtype} for {dtype}")
            generator = torch.Generator("cpu").manual_seed(0)
            mixed = torch.randperm(len(z), generator=generator, device="cpu")
            self._close(epilogue.apply(z[mixed]), y[mixed], "reference of other rows", 1e-12)

    def test_linear(self) -> None:
        if not self.epilogue.linear:
            pytest.skip("claims no linearity")
        x, y = self._z(), self._z().flip(0)
        whole = self.epilogue.apply(x + y)
        self._close(self.epilogue.apply(x) + self.epilogue.apply(y), whole, "reference", 1e-12)

    def test_derivative(self) -> None:
        if self.epilogue.derivative is None:
            pytest.skip("has no derivative: torch differentiates the reference")
        for epilogue in self._variants():
            halves = self.epilogue.inputs(self._z())
            slopes = epilogue.derivative(*halves, *epilogue.parameters)  # type: ignore[misc]
            for slope, exact in zip(
                slopes if epilogue.gated else (slopes,), self._gradients(epilogue), strict=True
            ):
                self._close(slope, exact, "derivative", 1e-9)

    def test_output_vjp(self) -> None:
        if self.epilogue.output_vjp is None:
            pytest.skip("has no output_vjp")
        self._check(not self.epilogue.gated, "output_vjp", "not for a gated epilogue")
        for epilogue in self._variants():
            z = self._z()
            grad = torch.linspace(-2, 2, z.numel(), dtype=z.dtype, device=z.device).reshape(z.shape)
            y = None if epilogue.linear else epilogue.apply(z)
            found = epilogue.output_vjp(grad, y, *epilogue.parameters)  # type: ignore[misc]
            (exact,) = self._gradients(epilogue)
            # Where the output is flat, it no longer determines the last bits of its derivative.
            self._close(found, grad * exact, "output_vjp", 1e-6)

    def test_device(self) -> None:
        """The device function that kernels fuse, alone and in a chain."""
        if self.epilogue.device is None:
            pytest.skip("has no device function: no kernel fuses it")
        from tmm_core.triton import device_function

        for epilogue in (*self._variants(), self.epilogue.then(parse("softcap(30)"))):
            y = self._evaluated(device_function(epilogue), self.epilogue.inputs(self._z()))
            self._close(y, epilogue.apply(self._z()), "device", None)

    def test_device_derivative(self) -> None:
        if self.epilogue.device is None or self.epilogue.device_derivative is None:
            pytest.skip("has no device_derivative: training takes torch's operators")
        z = self._side_by_side(self.epilogue.inputs(self._z()))
        from tmm_core.triton.pointwise import Pointwise

        for epilogue in self._variants():
            exact = self._gradients(epilogue)
            ones = z.new_ones(exact[0].shape)
            found = Pointwise(epilogue, z.shape[-1], z.dtype, z.device).backward(ones, z)
            for slope, right in zip(found.chunk(len(exact), -1), exact, strict=True):
                self._close(slope, right, "device_derivative", None)

    def test_outputs(self) -> None:
        """Each output's terms, element by element, and their device functions."""
        ports = [port for port in self.epilogue.outputs if port.of is not None and not port.group]
        if not ports:
            pytest.skip("has no outputs that are functions of the result")
        from tmm_core.triton import port_function

        y = torch.tensor(self.points, dtype=torch.float64, device="cpu")
        y = y.expand(2, -1).contiguous()
        for port in ports:
            exact = port.terms(y)
            if port.device is not None:
                found = self._evaluated(port_function(port), (y,))
                self._close(found, exact, f"outputs.{port.name}", None)

    def test_it_trains(self) -> None:
        """A product followed by it has the same gradients as torch's own code."""
        generator = torch.Generator("cpu").manual_seed(0)
        x, w = (
            torch.randn(
                shape, dtype=torch.float64, generator=generator, device="cpu", requires_grad=True
            )
            for shape in ((5, 3), (3, 8))
        )
        y = tmm_core.matmul(x, w, epilogue=self.epilogue.bare)
        expected = self.epilogue.apply(x @ w)
        self._close(y, expected, "reference", 1e-9)
        weights = torch.linspace(0.5, 2, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
        exact = torch.autograd.grad(expected, (x, w), weights)
        for found, right in zip(torch.autograd.grad(y, (x, w), weights), exact, strict=True):
            self._close(found, right, "derivative", 1e-9)

    # -- machinery ---------------------------------------------------------------------

    def _variants(self) -> Iterator[Epilogue]:
        """Yield the epilogue with its default parameters, then with others."""
        yield self.epilogue
        if self.epilogue.parameters:
            yield self.epilogue.with_parameters(*(1.25 * p + 0.5 for p in self.epilogue.parameters))

    def _z(self) -> Tensor:
        """Return the points; if gated, all pairs of them, the gate first."""
        points = torch.tensor(self.points, dtype=torch.float64, device="cpu")
        rows = points[:, None].expand(-1, len(points))
        if self.epilogue.interleaved:
            return torch.stack([rows, rows.T], -1).flatten(-2)
        return torch.cat([rows, rows.T], -1) if self.epilogue.gated else rows.contiguous()

    def _gradients(self, epilogue: Epilogue) -> tuple[Tensor, ...]:
        """Return the reference's derivatives by torch, with respect to each argument."""
        halves = [half.detach().requires_grad_() for half in self.epilogue.inputs(self._z())]
        y = epilogue.reference(*halves, *epilogue.parameters)
        return torch.autograd.grad(y.sum(), halves)

    def _side_by_side(self, blocks: tuple[Tensor, ...]) -> Tensor:
        """The blocks in fp32, on a device that runs kernels; skips the test if there is none."""
        device = self._device()
        if device.type != "cuda" and not interpreting():
            pytest.skip("needs a GPU, or TRITON_INTERPRET=1 before Triton is imported")
        return torch.cat(blocks, -1).float().to(device)

    def _evaluated(self, function: Any, blocks: tuple[Tensor, ...]) -> Tensor:
        """Evaluate a function from :func:`tmm_core.triton.device_function` at z, or gate and up."""
        z = self._side_by_side(blocks)
        from tmm_core.triton import pointwise
        from tmm_core.triton.launch import Launch

        rows, columns = blocks[0].shape
        high, wide = pointwise.BLOCK_M, pointwise.BLOCK_N
        launch = Launch(
            pointwise._forward,
            {"z_ptr": "*fp32", "y_ptr": "*fp32", "M": "i32", "N": "i32", "ldz": "i32"},
            {"EPILOGUE": function, "GATED": len(blocks) == 2, "BLOCK_M": high, "BLOCK_N": wide},
            device=z.device,
        )
        y = z.new_empty(rows, columns)
        grid = -(-rows // high) * -(-columns // wide), 1, 1
        launch(grid, z, y, rows, columns, z.shape[1])
        return y

    def _close(self, found: Tensor, exact: Tensor, what: str, limit: float | None) -> None:
        """Fail if the relative error exceeds ``limit``; None: fp32's tolerance of a kernel."""
        if limit is None:
            limit = compare.TOLERANCE[torch.float32] * self.slack
        found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
        off = ((found - exact).abs() / (exact.abs() + 1)).nan_to_num(float("inf"))
        off[(found == exact) | (found.isnan() & exact.isnan())] = 0
        place = divmod(int(off.argmax()), off.shape[-1])
        halves = self.epilogue.inputs(self._z())
        # Outputs and products are not evaluated at the points.
        z = [half[place].item() for half in halves] if off.shape == halves[0].shape else []
        at = f" at {', '.join(f'{value:g}' for value in z)}" if z else f" at {list(place)}"
        self._check(
            float(off.max()) <= limit,
            what,
            f"it is {found[place]:.9g}{at}, the reference has {exact[place]:.9g}; "
            f"the tolerance is {limit:.1g}",
        )

    def _check(self, holds: bool, what: str, fault: str) -> None:
        if holds:
            return
        name = what.split()[0]
        function = getattr(self.epilogue, name, None)
        for port in self.epilogue.outputs:
            if name == f"outputs.{port.name}":
                function = port.device or port.of
        code = getattr(unwrapped(function_of(function)), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        pytest.fail(f"{self.epilogue.name}: {what} is wrong: {fault}{where}", pytrace=False)
