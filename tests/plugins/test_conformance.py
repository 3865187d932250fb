"""Our own kernels, held to what a stranger's are: on the GPU where there is one, else in
Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tmm_blas.blas import Blas
from tmm_triton.plugin import load

from tmm_core import Problem
from tmm_core.testing import KernelConformance
from tmm_core.testing.probe_problems import contiguous, laid


class TestBlas(KernelConformance):
    kernel = Blas()
    # The epilogue is applied to a product that torch has rounded already.
    slack = 4.0


# Most tests are slow: interpreted, a launch takes 50 ms, and a verification makes 30 launches.


@pytest.mark.slow(quick=12)
class TestNaive(KernelConformance):
    kernel = load("triton.naive")


@pytest.mark.slow(quick=12)
class TestGrouped(KernelConformance):
    kernel = load("triton.grouped")


@pytest.mark.slow(quick=12)
class TestSplitK(KernelConformance):
    kernel = load("triton.split_k")


@pytest.mark.slow(quick=12)
class TestFusedEpilogue(KernelConformance):
    kernel = load("triton.fused_epilogue")


@pytest.mark.slow(quick=12)
class TestPersistent(KernelConformance):
    kernel = load("triton.persistent")


@pytest.mark.slow(quick=20)
class TestRagged(KernelConformance):
    kernel = load("triton.ragged")
    size = None if torch.cuda.is_available() else (24, 32, 48)  # a program is 2 ms


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
