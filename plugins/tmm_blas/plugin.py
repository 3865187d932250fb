"""Entry point of tmm's BLAS kernel."""

from __future__ import annotations

from typing import Any

from tmm_core import Kernel, hookimpl


@hookimpl
def tmm_kernels() -> list[Kernel[Any]]:
    from tmm_blas.blas import Blas

    return [Blas()]
