"""Checks whether a kernel can be launched on given tensors.

It is for use while a kernel is being written: a launcher is then called by hand, and no dispatcher
has checked its arguments.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from tmm_core.spec.device import interpreting

Strides = Literal["any", "nonzero", "contiguous"]


def check_tensors_ready(*tensors: torch.Tensor | None, strides: Strides = "nonzero") -> None:
    """Check the arguments of a launch against the requirements of Triton kernels.

    All tensors must be on one device, which must be CUDA unless kernels are interpreted. Their
    strides must be as the kernel needs them: ``"any"``, ``"nonzero"`` (no broadcast dimension, so
    that elements can be written) or ``"contiguous"``. ``None`` stands for an omitted argument.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A tensor does not meet a requirement; the message says which tensor and why.
    """
    if strides not in get_args(Strides):
        raise ValueError(f"strides must be one of {', '.join(get_args(Strides))}; got {strides!r}")
    first: torch.Tensor | None = None
    for position, t in enumerate(tensors):
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"argument {position} is a {type(t).__name__}, not a tensor")
        who = f"tensor {position} of shape {tuple(t.shape)}, strides {t.stride()}, on {t.device}"
        first = t if first is None else first
        if t.device != first.device:
            raise ValueError(f"{who}: the tensors before it are on {first.device}")
        if t.device.type != "cuda" and not interpreting():
            raise ValueError(
                f"{who}: Triton launches on CUDA devices; TRITON_INTERPRET=1, set before Triton "
                "is imported, interprets kernels on others"
            )
        if strides == "contiguous" and not t.is_contiguous():
            raise ValueError(f"{who}: not contiguous")
        # The stride of a dimension of size one is meaningless.
        broadcast = [d for d, n in enumerate(t.shape) if n > 1 and t.stride(d) == 0]
        if strides == "nonzero" and broadcast:
            raise ValueError(
                f"{who}: stride zero in dimension {broadcast[0]}, whose elements share one "
                "address; call .contiguous() or pass strides='any'"
            )
