"""Our own kernels, held to what a stranger's are: on the GPU where there is one, else in
Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from pairwise import every_case, share
from tmm_blas.blas import Blas
from tmm_triton.plugin import load

from tmm_core import Problem
from tmm_core.testing import KernelConformance
from tmm_core.testing.probe_problems import contiguous, laid

#: Without a GPU kernels are interpreted.
WHOLE = torch.cuda.is_available() or every_case()


class TestBlas(KernelConformance):
    kernel = Blas()
    # The epilogue is applied to a product that torch has rounded already.
    slack = 4.0


class Ours(KernelConformance):
    """A kernel of ours; interpreted, one launch takes 50 ms, and a verification 30 launches.

    So without a GPU two of the four kernels of tiles multiply each problem of a format, which the
    same device functions decode, and of a layout or batch, whose strides one table passes. They
    divide the dtypes of each size too.
    """

    #: Which half of these problems this kernel multiplies; None: all.
    place: ClassVar[int | None] = None

    def probes_of_use(self) -> Iterator[Problem]:
        probes = list(super().probes_of_use())
        return iter(probes if WHOLE else [probes[0], probes[5], probes[7]])

    def probes_of_sizes(self) -> Iterator[Problem]:
        of_dtypes = itertools.groupby(super().probes_of_sizes(), lambda probe: probe.a.dtype)
        for turn, (_, probes) in enumerate(of_dtypes):
            yield from self._half(probes, turn)

    def probes_of_layouts(self) -> Iterator[Problem]:
        yield from self._half(super().probes_of_layouts())

    def probes_of_batches(self) -> Iterator[Problem]:
        yield from self._half(super().probes_of_batches())

    def probes_of_scales(self) -> Iterator[Problem]:
        yield from self._half(super().probes_of_scales())

    def probes_of_verification(self) -> Iterator[Problem]:
        probes = super().probes_of_verification()
        yield from itertools.islice(probes, 4)
        yield from self._half(probes)

    def _half(self, probes: Iterable[Problem], turn: int = 0) -> list[Problem]:
        if WHOLE or self.place is None:
            return list(probes)
        return share(probes, self.place + turn, 2)


class TestNaive(Ours):
    kernel = load("triton.naive")
    place = 0


class TestGrouped(Ours):
    kernel = load("triton.grouped")
    place = 1


class TestSplitK(Ours):
    kernel = load("triton.split_k")
    place = 1


class TestFusedEpilogue(Ours):
    kernel = load("triton.fused_epilogue")
    place = 0


class TestPersistent(Ours):
    kernel = load("triton.persistent")


class TestRagged(Ours):
    kernel = load("triton.ragged")
    size = None if torch.cuda.is_available() else (24, 32, 48)  # a program is 2 ms

    def ragged_problems(self) -> Iterator[Problem]:
        """Interpreted, each takes a second: of every format a third, since test_scaled_step.py
        and test_group_steps.py multiply them too."""
        problems = list(super().ragged_problems())
        plain = [each for each in problems if each.b.dtype.itemsize > 1]
        stored = [each for each in problems if each.b.dtype.itemsize == 1]
        return iter([*plain, *(stored if WHOLE else stored[::3])])


# These two serve nothing where there is no GPU, which the class rightly calls a failure.
if torch.cuda.is_available():

    @pytest.mark.gpu
    class TestSkinny(KernelConformance):
        """Few rows, K contiguous and a multiple of 8: what is asked otherwise is declined."""

        kernel = load("triton.skinny")
        sizes = (
            (16, 256, 512),  # multiples of every block
            (1, 520, 304),
            (7, 203, 136),  # divides nothing
            (15, 1, 520),
            (1, 1, 8),  # K shorter than a block
            (3, 80, 8200),  # long K
            (16, 8200, 72),  # more programs than fit at one time
        )
        size = (13, 208, 144)

        @classmethod
        def _probe(cls, *given: Any, **named: Any) -> Problem:
            made = super()._probe(*given, **named)
            return contiguous(replace(made, b=laid(made.b, "col")))

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
    class TestWarpSpecialized(KernelConformance):
        kernel = load("triton.warp_specialized")

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
    class TestGathered(KernelConformance):
        kernel = load("triton.gathered")
