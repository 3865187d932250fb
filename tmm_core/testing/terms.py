"""Defines epilogues and functions of outputs as users do; the suites pass them to kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl


def squareplus(z, b: tl.constexpr):
    return 0.5 * (z + tl.sqrt(z * z + b))


def absolute(y):
    return tl.abs(y)


def square(y):
    return y * y


#: ½(z + √(z² + b)), a smooth relu (arXiv:2112.11687) that is not built in.
USERS = Epilogue("squareplus", lambda z, b=1.5: 0.5 * (z + (z * z + b).sqrt()), device=squareplus)
#: No kernel can fuse it.
UNFUSABLE = Epilogue("no_device_function", lambda z: z.sin())
#: Fields of a :class:`~tmm_core.Port`.
ABSOLUTE: dict[str, Any] = {"of": torch.abs, "device": absolute}
SQUARE: dict[str, Any] = {"of": torch.square, "device": square}
