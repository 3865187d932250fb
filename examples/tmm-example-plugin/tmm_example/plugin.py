"""The hooks that tmm loads. Each imports its module when tmm calls it, at the first matmul. So an
installation without Triton loses only the kernel."""

from __future__ import annotations

from typing import Any

from tmm_core import Epilogue, Format, Kernel, hookimpl


@hookimpl
def tmm_kernels() -> list[Kernel[Any]]:
    from tmm_example.gemv import Gemv

    return [Gemv()]


@hookimpl
def tmm_epilogues() -> list[Epilogue]:
    from tmm_example.mish import MISH

    return [MISH]


@hookimpl
def tmm_formats() -> list[Format]:
    from tmm_example.log8 import LOG8

    return [LOG8]
