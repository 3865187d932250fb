"""MXFP4 checkpoints of gpt-oss, loaded by Transformers without kernels from a hub.

Transformers' quantizer fetches kernels and swizzles the weights for them. Where a model asks for
tmm's experts, its layers become :class:`~tmm_core.nn.mxfp4_experts.Mxfp4Experts`. Their parameters
have the checkpoint's own names, so nothing has to be converted, in loading or in saving.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tmm_base.guards import suppress

from tmm_core.nn.mxfp4_experts import Mxfp4Experts

_QUANTIZER = "transformers.quantizers.quantizer_mxfp4"
_METHODS = "_process_model_before_weight_loading", "get_weight_conversions"


def install(implementation: str) -> None:
    """Let models with that ``experts_implementation`` load their experts in MXFP4.

    A second call does nothing.
    """
    kind = _quantizer()
    if kind is None or hasattr(getattr(kind, _METHODS[0]), "_tmm_theirs"):
        return
    prepare, conversions = (getattr(kind, name) for name in _METHODS)

    @functools.wraps(prepare)
    def prepared(self: Any, model: Any, **kwargs: Any) -> Any:
        wanted = getattr(model.config, "_experts_implementation", None) == implementation
        if not wanted or not self.pre_quantized or self.quantization_config.dequantize:
            return prepare(self, model, **kwargs)
        utils = importlib.import_module("transformers.quantizers.quantizers_utils")
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for name, module in list(model.named_modules()):
            if type(module).__name__ != "GptOssExperts":
                continue
            if utils.should_convert_module(name, self.modules_to_not_convert):
                model.set_submodule(name, Mxfp4Experts(module, device="meta"))
        self._tmm_experts = True
        return None

    @functools.wraps(conversions)
    def converted(self: Any) -> Any:
        return [] if getattr(self, "_tmm_experts", False) else conversions(self)

    for name, method in zip(_METHODS, (prepared, converted), strict=True):
        method._tmm_theirs = getattr(kind, name)  # type: ignore[attr-defined]
        setattr(kind, name, method)


def remove() -> None:
    """Undo :func:`install`. Models that were loaded keep their experts."""
    kind = _quantizer()
    for name in _METHODS if kind is not None else ():
        method = getattr(kind, name)
        setattr(kind, name, getattr(method, "_tmm_theirs", method))


def _quantizer() -> Any:
    """Transformers' quantizer; None in versions without it."""
    with suppress(ImportError):
        return importlib.import_module(_QUANTIZER).Mxfp4HfQuantizer
    return None
