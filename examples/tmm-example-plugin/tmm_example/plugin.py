"""The hooks that tmm loads. They import Triton when tmm calls them, at the first matmul, so that
an installation without Triton keeps the epilogue."""

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
