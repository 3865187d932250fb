"""Our own kernels, held to what a stranger's are: on the GPU where there is one, else in
Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tmm_blas.blas import Blas
from tmm_blas.padded import PaddedBlas
from tmm_triton.plugin import KERNELS, _load

from tmm_core.testing import KernelConformance


class TestBlas(KernelConformance):
    kernel = Blas()
    # The epilogue is applied to a product that torch has rounded already.
    slack = 4.0


class TestNaive(KernelConformance):
    kernel = _load("naive", KERNELS["naive"])


class TestGrouped(KernelConformance):
    kernel = _load("grouped", KERNELS["grouped"])


class TestSplitK(KernelConformance):
    kernel = _load("split_k", KERNELS["split_k"])


class TestFusedEpilogue(KernelConformance):
    kernel = _load("fused_epilogue", KERNELS["fused_epilogue"])


class TestPersistent(KernelConformance):
    kernel = _load("persistent", KERNELS["persistent"])


# These two serve nothing where there is no GPU, which the class rightly calls a failure.
if torch.cuda.is_available():

    @pytest.mark.gpu
    class TestPaddedBlas(KernelConformance):
        kernel = PaddedBlas()
        slack = 4.0

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
    class TestWarpSpecialized(KernelConformance):
        kernel = _load("warp_specialized", KERNELS["warp_specialized"])
