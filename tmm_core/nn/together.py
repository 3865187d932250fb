"""Modules with layers whose parameters are adjacent in memory, as one weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tmm_core import api, compat
from tmm_core.interop import autograd_state
from tmm_core.interop.fallbacks import foreign
from tmm_core.nn.activation import interposed
from tmm_core.nn.classes import forget
from tmm_core.nn.joint_storage import between_processes, in_own_storage, stack, stacked, whole
from tmm_core.nn.linear import Linear
from tmm_core.quantized import Quantized

Tensor = torch.Tensor
Self = TypeVar("Self", bound="Together")

_forward_ad = compat.forward_ad
_KINDS = ("weight", "bias")


class Together(nn.Module):
    """A module that keeps parameters of some of its layers adjacent in memory.

    The parameters are the same objects under the same names. Every call that reads them as one
    weight checks that they still are adjacent. So moving, replacing or casting a parameter cannot
    make the result wrong: the layers compute a product each until :meth:`merge` has joined them
    again.
    """

    def _together(self) -> list[Any]:
        """The layers, in the order of their rows in memory."""
        raise NotImplementedError

    @property
    def merged(self) -> bool:
        """Whether the layers are one weight in memory, and can be one product."""
        layers = self._together()
        if not all(map(_registers, layers)):
            return False
        weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
        return joint_of(weights, biases) is not None

    def merge(self) -> bool:
        """Place the layers' weights one after the other in memory; returns :attr:`merged`.

        Called automatically after construction, ``.to()`` and similar, ``load_state_dict``,
        ``deepcopy`` and unpickling. The parameters remain the same objects, and only those with
        a storage to themselves are moved. Do not call it while a graph that reads them is being
        captured or waits for its backward.
        """
        layers = self._together()
        if all(map(_registers, layers)):
            for kind in _KINDS:
                parameters = [getattr(layer, kind) for layer in layers]
                if all(parameter is not None for parameter in parameters):
                    stack(parameters)
        return self.merged

    def separate(self) -> None:
        """Give each layer its own storage, as torch's layers have, unless it is shared with other
        processes."""
        if not self.merged:
            return
        for layer in self._together():
            for kind in _KINDS:
                parameter = getattr(layer, kind)
                if parameter is None or isinstance(parameter, Quantized):
                    continue
                if not between_processes(parameter):
                    with torch.inference_mode(parameter.is_inference()):
                        parameter.data = parameter.data.clone()

    def _swapped_in(self) -> None:
        """Called once the module is of this class."""
        self.register_load_state_dict_post_hook(_merge_hook)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_apart_hook)  # type: ignore[no-untyped-call]
        self.merge()

    def _swapped_out(self) -> None:
        """Called before the module's class is changed back."""
        self.separate()
        forget(self)
        for hooks in (self._load_state_dict_post_hooks, self._state_dict_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_merge_hook, _apart_hook)]:
                del hooks[key]

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        self.merge()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        if not self.merge():
            self._take_own_storages()
            self.merge()

    def _take_own_storages(self) -> None:
        """Separate parameters that pickle wrote one by one, each with a copy of the joint storage.
        ``torch.save`` and ``deepcopy`` keep one storage."""
        # Not by attribute, which evaluates a parametrization: it may draw or change its state.
        layers = [layer for layer in self._together() if isinstance(layer, nn.Linear)]
        for kind in _KINDS:
            own = [t for layer in layers if type(t := layer._parameters.get(kind)) is nn.Parameter]
            places = {t.untyped_storage().data_ptr() for t in own}
            if len(places) == len(own) and not all(map(whole, own)):
                with torch.no_grad():
                    for t in own:
                        t.data = t.data.clone()


def _registers(layer: Any) -> bool:
    """Whether a linear layer has its parameters. FullyShardedDataParallel removes them, for good or
    while it casts or moves its own."""
    return isinstance(layer, nn.Linear) and layer._parameters.keys() >= set(_KINDS)


def joint_of(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None] | None:
    """The weights as one tensor and the biases as one. None if either are not adjacent in memory,
    or if only some layers have a bias."""
    weight = stacked(weights)
    given = [bias for bias in biases if bias is not None]
    if weight is None or not given:
        return None if weight is None else (weight, None)
    bias = stacked(given) if len(given) == len(weights) else None
    return None if bias is None else (weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One layer's product. Only the operator sees tangents of a level that a graph has entered."""
    if not compat.transforms_active() and autograd_state.transformed(x, weight, bias):
        return autograd_state.by_operator(x, weight.t(), bias)
    return api.linear(x, weight, bias)


def _merge_hook(module: Together, _: Any) -> None:
    module.merge()


def _apart_hook(module: Together, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Give each parameter its own storage in a state dict. Safetensors refuses to save a part of a
    storage, and ``torch.save`` would write all of it with each parameter."""
    names = {id(layer): name for name, layer in module._modules.items()}
    for layer in module._together():
        for kind in _KINDS:
            entry = f"{prefix}{names[id(layer)]}.{kind}"
            t = state.get(entry)
            if type(t) is Tensor and not t.is_meta and t.is_contiguous() and not whole(t):
                state[entry] = in_own_storage(t)


#: Without DTensor, which ``tmm::matmul`` has sharding rules for. Export traces on fake tensors.
_PLAIN = (nn.Parameter, Tensor, compat.fake_tensor(), Quantized)


def only_multiply(layers: Sequence[Any], x: Tensor) -> bool:
    """Whether one product can replace the calls: the layers would do nothing else."""
    if Linear.replaced() or (type(x) is not Tensor and foreign(x)):
        return False
    for layer in layers:
        if type(layer) is not Linear or layer._text or interposed(layer):
            return False
        # Not through __getattr__, which would cost a microsecond here.
        weight: Any = layer._parameters.get("weight")
        if "bias" not in layer._parameters:  # a plain attribute, as under FullyShardedDataParallel
            return False
        if type(weight) not in _PLAIN or weight.dtype is not x.dtype:  # also if x is a symbol
            return False
        if not weight.dtype.is_floating_point:  # no epilogue takes other numbers
            return False
    if _forward_ad._current_level >= 0:  # tangents, which an alias of the weights would lose
        return False
    kind = x.device.type
    if not compat.autocasts_on(kind):
        return True
    return torch.get_autocast_dtype(kind) is x.dtype
