"""Layers of GPTQ and AWQ packages, whose weights are words of eight numbers of 4 bits.

A layer is recognised by its class's name and its buffers; its package is not imported. ``convert``
repacks its words once, along K, and keeps no other copy: ``state_dict`` and ``undo`` write the
words again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tmm_core.errors import reraise
from tmm_core.nn.classes import ProductLayer, own
from tmm_core.nn.linear import finished_linear
from tmm_core.quantized import Quantized

Tensor = torch.Tensor

#: The layout of each class whose buffers are as in a checkpoint, by package and name. Other classes
#: rearrange them for their kernels.
LAYOUTS: dict[tuple[str, str], str] = {
    **{
        ("gptqmodel", f"{name}{kind}"): layout
        for kind in ("Linear", "QuantLinear")  # since version 6, and before
        for name, layout in (
            ("Torch", "gptq"), ("TritonV2", "gptq"),
            ("AwqTorch", "awq"), ("AwqGEMM", "awq"), ("AwqGEMMTriton", "awq"),
        )
    },
    ("awq", "WQLinear_GEMM"): "awq",
}  # fmt: skip
#: Modules of auto_gptq whose buffers are as in a checkpoint; all of its classes are named
#: QuantLinear.
_AUTO_GPTQ = ("qlinear_cuda", "qlinear_cuda_old", "qlinear_triton", "qlinear_tritonv2")
#: Buffers that a layer's operand replaces.
_WORDS = ("qweight", "qzeros", "scales")


def layout_of(kind: Any) -> str | None:
    """The layout of a class's buffers, ``"gptq"`` or ``"awq"``; None if the class is unknown."""
    package, _, rest = kind.__module__.partition(".")
    if package == "auto_gptq" and kind.__name__ == "QuantLinear":
        return "gptq" if rest.rpartition(".")[2] in _AUTO_GPTQ else None
    return LAYOUTS.get((package, kind.__name__))


def is_packed(layer: nn.Module) -> bool:
    """Whether ``layer`` has the buffers of a GPTQ or AWQ layer."""
    return all(isinstance(layer._buffers.get(name), Tensor) for name in _WORDS)


def unfit(layer: Any) -> str | None:
    """Why tmm cannot compute the product of a packed layer."""
    kind = type(layer)
    if layout_of(kind) is None:
        return (
            f"{kind.__module__.partition('.')[0]}'s {kind.__name__} rearranges its weights for "
            "its own kernels; load the model with the package's backend in torch or Triton"
        )
    bits = getattr(layer, "bits", getattr(layer, "w_bit", 4))
    if bits != 4 or layer.qweight.dtype is not torch.int32:
        return f"its weight has {bits} bits in words of {layer.qweight.dtype}, not 4 in int32"
    for name in ("adapter", "online_full_had", "online_partial_had"):
        if getattr(layer, name, None):
            return f"its input or its output goes through more than a product ({name})"
    if layer.qweight.is_meta:
        return "its weight is on the meta device"
    try:
        _read(layer)
    except ValueError as error:
        reraise(error)
        return f"its layout is not supported ({error})"
    return None


def _read(layer: Any) -> tuple[Quantized, Tensor | None]:
    """The weight of a layer, and the order of its K if it differs from the activations' order.

    Raises:
        ValueError: A tensor is missing or has another dtype or shape, or groups differ in size.
    """
    words = [layer._buffers[name] for name in _WORDS]
    if any(each is None for each in words):
        raise ValueError(f"{', '.join(_WORDS)} must be tensors")
    layout = layout_of(own(type(layer)))
    k = layer._buffers["qweight"].shape[0] * (8 if layout == "gptq" else 1)
    group = -(-k // layer._buffers["scales"].shape[0])
    if layout == "awq":
        return Quantized.layouts("awq").read(*words, group), None
    order = Quantized.layouts("gptq").order(layer._buffers.get("g_idx"), group)
    return Quantized.layouts("gptq").read(
        *words, group, version=_version(layer), order=order
    ), order


def _version(layer: Any) -> int:
    """Return the version of a GPTQ layer's zero points: version 1 stores z − 1."""
    version = getattr(layer, "qzero_format", None)
    return int(version()) if callable(version) else 1


class PackedProduct(ProductLayer):
    """Multiplies activations of any dtype by the weight's values."""

    @property
    def weight(self) -> Any:
        return self._parameters["weight"]

    def _swapped_in(self) -> None:
        """Replace the words by the operand."""
        weight, order = _read(self)
        bias = self._buffers.pop("bias", None)
        for name in _WORDS:
            del self._buffers[name]
        self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        self._parameters["bias"] = None if bias is None else nn.Parameter(bias, False)
        self._buffers["_tmm_order"] = order
        self._non_persistent_buffers_set.add("_tmm_order")

    def _swapped_out(self) -> None:
        """Replace the operand by the words."""
        self._buffers.update(self._words())
        bias = self._parameters.pop("bias")
        if bias is not None:
            self._buffers["bias"] = bias.data
        del self._parameters["weight"], self._buffers["_tmm_order"]
        self._non_persistent_buffers_set.discard("_tmm_order")

    @contextmanager
    def _as_words(self) -> Iterator[None]:
        """Hold the words in place of the operand, which the layer gets back if it fails."""
        parameters, buffers = self._parameters.copy(), self._buffers.copy()
        self._swapped_out()
        try:
            yield
            self._swapped_in()
        except BaseException:
            self._parameters.clear()
            self._parameters.update(parameters)
            self._buffers.clear()
            self._buffers.update(buffers)
            self._non_persistent_buffers_set.add("_tmm_order")
            raise

    def _words(self) -> dict[str, Tensor]:
        weight, order = self._parameters["weight"], self._buffers["_tmm_order"]
        if layout_of(own(type(self))) == "awq":
            written = Quantized.layouts("awq").written(weight)
        else:
            written = Quantized.layouts("gptq").written(weight, _version(self), order)
        return dict(zip(_WORDS, written, strict=True))

    def __getattr__(self, name: str) -> Any:
        if name in _WORDS and "weight" in self._parameters:
            return self._words()[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (*_WORDS, "g_idx") or "weight" not in self._parameters:
            super().__setattr__(name, value)
            return
        with self._as_words():
            super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]
        destination.update({f"{prefix}{name}": t for name, t in self._words().items()})

    def _load_from_state_dict(self, *given: Any, **more: Any) -> None:
        with self._as_words():
            super()._load_from_state_dict(*given, **more)

    def product(self, x: Tensor, epilogue: str) -> Tensor:
        of: Any = self._parameters
        bias, order = of["bias"], self._buffers["_tmm_order"]
        if order is not None:
            x = x.index_select(-1, order)
        if bias is not None and bias.dtype is not x.dtype:
            bias = bias.to(x.dtype)
        return self._run(finished_linear, x, of["weight"], bias, epilogue)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return self._by_library(x) if self.replaced() else self.product(x, "")
