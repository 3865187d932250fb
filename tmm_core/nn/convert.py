"""Makes tmm compute the products of a model, in place and reversibly.

All decisions are made before anything changes. Layers and activations stay where they are: the
module that calls both computes them in one product (:mod:`tmm_core.nn.fused`).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tmm_core import compat
from tmm_core.errors import reraise, warn
from tmm_core.interop import autograd_state
from tmm_core.nn import (
    conv1d,
    experts,
    fp8_linear,
    fusing,
    packed_linear,
    projections,
    stored_experts,
    stored_weights,
    unreached,
)
from tmm_core.nn.classes import against_base, own, reference, referred, replaced, subclass
from tmm_core.nn.conversion_report import Change, LeftAlone, NotFused, Report
from tmm_core.nn.joint_storage import against_one_product
from tmm_core.nn.linear import Linear
from tmm_core.nn.together import Together
from tmm_core.quantized import Quantized


def convert(
    model: nn.Module,
    *,
    inplace: bool = True,
    static_weights: bool = False,
    weights: str | None = None,
    activations: str | None = None,
) -> Report:
    """Compute the products of ``model`` by tmm, and fuse what can be proven.

    >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("meta")
    >>> print(convert(mlp))
    Sequential: 0 gated MLPs fused, 1 activations fused, 1 other linears swapped, 0 left alone
      0  Linear, ReLU → linear(epilogue='relu')
      2  Linear → Linear

    * Every ``nn.Linear`` becomes a :class:`tmm_core.nn.Linear`, if it is of exactly that type
      (not quantised, not an adapter) and has plain parameters. So does every ``Conv1D`` of
      Transformers.
    * If a forward applies an activation to a layer's result, and does nothing else with it, the
      activation is computed by the layer's kernel. This works in ``nn.Sequential``, and in any
      module whose forward takes one tensor and can be proven to do just that. The gate of a product
      that holds gate and up is fused in the same way.
    * The expert layers of Transformers' mixtures (Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V3 and
      others that its ``experts_implementation`` reaches) become two grouped products.
    * Layers whose weights are quantised already multiply by the stored numbers. These are
      ``nn.Linear`` with weights of torchao (int8 or 8-bit floats, weight only), Transformers'
      ``FP8Linear`` and ``FP8Experts``, and layers of GPTQ and AWQ packages (4 bits).
    * If an attention's forward projects one input by several layers (query, key and value of
      Llama, Qwen3, BERT, ViT and others of Transformers), they are one product without gradients.
    * A module whose forward is exactly ``down(activation(gate(x)) * up(x))``, whatever its
      children are called, also becomes a :class:`tmm_core.nn.GatedMLP`.

    Modules change their class and nothing else, and stay instances of it. Hooks, adapters,
    parametrizations and quantised weights may come before or after. At each call a fused module
    checks that its children, their hooks and the attributes that its forward reads are what was
    proven (:mod:`tmm_core.nn.trace`). Otherwise it runs its own forward over its children.

    The report names every product: those that tmm computes, the activations that are not fused,
    and what torch computes, each with the reason. Products outside of layers, such as attention's,
    are found in the code of the forwards.

    Parameters are the same objects as before, so ties, optimisers and ``state_dict`` keys
    stay valid; gate and up weights move into one storage. Converting twice changes nothing more.
    Tracing patches ``nn.Module.__call__`` temporarily: no other thread should be running a
    model.

    Args:
        model: Changed in place.
        inplace: False converts a deep copy, which is the report's ``model``.
        static_weights: Set ``static_weights`` on the new layers and on layers of
            :mod:`tmm_core.nn` already in the model. It promises that no kernel that may still run
            when a layer is called writes its weight (docs/serve.md). Use it for inference. A
            compiled graph uses the setting in force when it runs instead.
        weights: Round the weights of layers and experts to ``"int8"``, ``"fp8"`` or ``"int4"``, to
            nearest. 4-bit numbers have groups of 128, 64 or 32 values, as K allows. Rounded weights
            have no gradient. A weight that is used elsewhere too, as a tied embedding,
            stays as it is. ``undo()`` gives plain weights with the rounded values.
        activations: ``"fp8"``: in Transformers' layers and experts for 8-bit floats, round
            activations to 8 bits too, as their own forward does. There is a scale for each 128
            values, or for each row, as the weights have them. Products of many rows gain, and
            products of few rows lose.

    Returns:
        A :class:`Report`, with ``undo()``.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: ``weights`` names no format, or one that weights cannot be rounded to; or
            ``activations`` is not ``"fp8"``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert(): model must be a torch.nn.Module, not {type(model).__name__}")
    if not inplace:
        model = copy.deepcopy(model)
    if weights is not None:
        one = torch.ones(1, 128, device="cpu", dtype=torch.float32)
        stored_weights.quantised(one, weights)  # refused before anything changes
    if activations not in (None, "fp8"):
        raise ValueError(f'convert(): activations are rounded to "fp8" or not, not {activations!r}')
    for module in model.modules():
        if isinstance(module, compat.fsdp_module()):
            # The weights that a forward gathered are FSDP's buffers, and look like plain weights.
            module.reshard()
    return _Conversion(model, static_weights, weights, activations is not None).run()


#: The note of a report on a model whose weights are all on a CPU.
_ON_A_CPU = (
    "note: its weights are on a CPU, where torch's products are as fast and nothing is to be "
    "gained; each call costs some µs more, which is 13-21 % of the time of a tiny model"
)


class _Conversion:
    def __init__(
        self, model: nn.Module, static_weights: bool, weights: str | None, activations: bool
    ) -> None:
        self._static_weights = static_weights
        self._weights = weights
        self._activations = activations
        self._report = Report(model)
        #: Every module, with the first of its paths.
        self._paths = {module: path for path, module in model.named_modules()}
        #: Classes of layers whose product is, or will be, tmm's.
        self._layers: dict[nn.Module, Any] = {}
        #: Classes that other modules get, each with what tmm then computes.
        self._classes: dict[nn.Module, tuple[Any, list[Change]]] = {}
        #: Layers whose product an epilogue finishes somewhere.
        self._finished: set[nn.Module] = set()

    def run(self) -> Report:
        for module in self._paths:
            if (found := self._layer(module)) is not None:
                self._layers[module] = found
        refused = {item.path for item in self._report.left}
        for module in self._paths:
            if experts.is_theirs(module):
                self._group(module)
            else:
                self._fuse(module)
                self._project(module)
            reason = unreached.out_of_reach(module) or stored_experts.out_of_reach(module)
            self._leave(module, reason)
            known = module in self._layers or self._path(module) in refused
            if not known and not experts.is_theirs(module):
                self._leave(module, unreached.products(module))
        # From here on the model changes. It is restored after an error, such as lack of memory.
        try:
            self._change()
        except BaseException:
            self._report.undo()
            raise
        devices = {t.device.type for module in self._layers for t in module.parameters()}
        if self._report and devices == {"cpu"}:
            self._report.notes.append(_ON_A_CPU)
        return self._report

    # -- decide --------------------------------------------------------------------------

    def _layer(self, layer: nn.Module) -> Any:
        """The new class of a layer with a product; None: it has no product, or stays torch's."""
        kind = type(layer)
        if getattr(kind, "computes_product", None) is kind:
            return None if layer._text else kind
        theirs = conv1d.theirs()
        if kind is fp8_linear.theirs():
            if self._leave(layer, _unfit(layer) or fp8_linear.unfit(layer)):
                return None
            return fp8_linear.FP8Product.swapped(kind)
        if packed_linear.is_packed(layer):
            if self._leave(layer, _unfit(layer) or packed_linear.unfit(layer)):
                return None
            return packed_linear.PackedProduct.swapped(kind)
        if not isinstance(layer, nn.Linear) and (theirs is None or not isinstance(layer, theirs)):
            return None
        reason = _unfit(layer, *layer._parameters.values())
        if kind is not nn.Linear and kind is not theirs:
            reason = f"a subclass of {'Linear' if isinstance(layer, nn.Linear) else 'Conv1D'} "
            reason += "may do more than its base does"
        elif reason is None and replaced(kind):
            reason = f"other code replaced the forward of {kind.__name__}"
        reason = reason or against_base(layer, Linear)
        if self._leave(layer, reason):
            return None
        return Linear if kind is nn.Linear else conv1d.Conv1DProduct.swapped(kind)

    def _group(self, layer: nn.Module) -> None:
        parameters = layer.parameters(recurse=False)
        if not self._leave(layer, _unfit(layer, *parameters) or stored_experts.unfit(layer)):
            after = f"TransformersExperts(epilogue={experts.epilogue_of(layer)!r})"
            change = Change("experts", self._paths[layer], type(layer).__name__, after)
            self._classes[layer] = _grouped(type(layer)), [change]

    def _fuse(self, module: nn.Module) -> None:
        found = fusing.decide(module, self._layers, lambda: self._storages)
        for name, reason in found.apart:
            self._apart(module, name, reason)
        if found.kind is None:
            return
        changes: list[Change] = []
        self._classes[module] = found.kind, changes
        if found.gating is not None:
            after = f"GatedMLP(epilogue={found.gating.epilogue!r})"
            changes.append(Change("gated", self._path(module), type(module).__name__, after))
        for fusion in found.fusions:
            layer: Any = module._modules[fusion.layer]
            act = module._modules[fusion.activation] if fusion.activation else None
            before = f"{fusion.epilogue}()" if act is None else type(act).__name__
            before = f"{type(layer).__name__}, {before}"
            after = f"linear(epilogue={fusion.epilogue!r})"
            self._finished.add(layer)
            path = self._within(module, fusion.layer)
            changes.append(Change("epilogue", path, before, after))

    def _project(self, module: nn.Module) -> None:
        """Compute in one product the projections that an attention's forward makes of one input."""
        kind: Any = type(module)
        if own(kind) is not kind or "forward" in vars(module):
            return
        # The forward of an attention reads its input's shape, so it has no fused activation.
        names = projections.names_of(kind)
        layers: list[Any] = [module._modules.get(name) for name in names]
        if not names or any(self._layers.get(layer) is not Linear for layer in layers):
            return
        text = ", ".join(names)
        reason = against_base(module, projections.JointProjections)
        if reason := reason or against_one_product(layers, lambda: self._storages):
            self._report.not_fused.append(
                NotFused(self._path(module), f"one product of {text}", reason)
            )
            return
        change = Change("joint", self._path(module), kind.__name__, f"one product of {text}")
        self._classes[module] = projections.joint(kind, names), [change]

    @functools.cached_property
    def _storages(self) -> Counter[int]:
        """The number of the model's tensors in each storage; tied ones count once."""
        model = self._report.model
        tensors = {*model.parameters(), *model.buffers()}
        plain = (t for t in tensors if _is_plain(t) and not t.is_meta)
        return Counter(t.untyped_storage().data_ptr() for t in plain)

    # -- apply ---------------------------------------------------------------------------

    def _change(self) -> None:
        changes = self._report.changes
        for module, path in self._paths.items():
            before, after = type(module), self._layers.get(module, type(module))
            if after is not before:
                self._swap(module, after)
                if module not in self._finished:
                    changes.append(Change("linear", path, before.__name__, after.__name__))
            if module in self._classes:
                after, made = self._classes[module]
                self._swap(module, after)
                changes += made
        if self._weights is not None:
            self._quantise(self._weights)
        for module in self._paths if self._static_weights else ():
            self._switch(module, "static_weights")
        for module in self._paths if self._activations else ():
            if stored_experts.is_fp8(module):
                self._switch(module, "rounds_activations")

    def _switch(self, module: nn.Module, name: str) -> None:
        if hasattr(type(module), name) and not getattr(module, name):
            setattr(module, name, True)
            self._report.undos.append(functools.partial(_unset, module, name))

    def _quantise(self, format: str) -> None:
        """Round the weights of the layers and experts whose products are tmm's."""
        uses = Counter(
            id(parameter)
            for module in self._paths
            for parameter in module._parameters.values()
            if parameter is not None
        )
        for layer, name, turned in self._weights_of_products():
            weight: Any = layer._parameters[name]
            if not _is_plain(weight) or weight.itemsize == 1:
                continue
            its = f"its {name}"
            if uses[id(weight)] > 1:
                self._leave(layer, f"{its} is used elsewhere too, and not rounded to {format}")
                continue
            try:
                stored = stored_weights.quantised(weight.mT if turned else weight, format)
            except ValueError as error:
                reraise(error)
                self._leave(layer, f"{its} is not rounded: {error}")
                continue
            rounded = nn.Parameter(stored.mT if turned else stored, requires_grad=False)
            layer._parameters[name] = rounded
            self._report.rounded.append(self._within(layer, name))
            given = layer, name, rounded, weight.requires_grad
            self._report.undos.append(functools.partial(_replace_rounded, *given))
        for module in self._paths:
            if isinstance(module, Together):
                module.merge()

    def _weights_of_products(self) -> Iterator[tuple[Any, str, bool]]:
        """Yield layers and experts that tmm computes, their weights' names, and whether K is
        first."""
        for layer in self._layers:
            yield layer, "weight", not isinstance(layer, nn.Linear)  # a Conv1D's is [K, N]
        for module in self._paths:
            if isinstance(module, (experts.TransformersExperts, experts.Experts)):
                for name in ("gate_up_proj", "up_proj", "down_proj"):
                    if module._parameters.get(name) is not None:
                        yield module, name, bool(module.is_transposed)

    def _swap(self, module: nn.Module, after: Any) -> None:
        before, module.__class__ = type(module), after
        classes = reference(before), reference(after)
        undo = functools.partial(_swap_back, module, self._path(module), *classes)
        self._report.undos.append(undo)
        if hasattr(after, "_swapped_in"):
            module._swapped_in()  # type: ignore[operator]

    # -- report --------------------------------------------------------------------------

    def _leave(self, module: nn.Module, reason: str | None) -> bool:
        """Report why torch computes the products of a module; returns whether there is a reason."""
        if reason is not None:
            self._report.left.append(LeftAlone(self._path(module), type(module).__name__, reason))
        return reason is not None

    def _apart(self, module: nn.Module, name: str, reason: str) -> None:
        """Report why an activation, a child or a function, is not fused."""
        child = module._modules.get(name)
        text = f"{name}()" if child is None else type(child).__name__
        path = self._path(module) if child is None else self._within(module, name)
        self._report.not_fused.append(NotFused(path, text, reason))

    def _path(self, module: nn.Module) -> str:
        return self._paths[module] or "the model"

    def _within(self, module: nn.Module, name: str) -> str:
        return f"{self._paths[module]}.{name}".lstrip(".")


# Functions of the module and not of its dictionary: a copied report undoes the copied model.
def _unset(module: nn.Module, name: str) -> None:
    vars(module).pop(name, None)


def _swap_back(module: Any, path: str, before: Any, after: Any) -> None:
    if type(module) is not referred(after):
        warn(f"{path} is now a {type(module).__name__}, not convert()'s; left as it is")
        return
    if hasattr(module, "_swapped_out"):
        module._swapped_out()
    module.__class__ = referred(before)


def _replace_rounded(
    layer: nn.Module, name: str, rounded: nn.Parameter, requires_grad: bool
) -> None:
    """Replace a rounded weight by its values, unless other code has replaced it."""
    if layer._parameters.get(name) is rounded:
        values = rounded.dequantize().contiguous()
        layer._parameters[name] = nn.Parameter(values, requires_grad)


def _grouped(kind: Any) -> Any:
    """Return the class of an expert layer of Transformers with grouped products."""
    base, theirs = experts.TransformersExperts, kind.forward

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Products of quantised weights have no gradients; those of Transformers may have some.
        trains = autograd_state.recorded(*args, *kwargs.values())
        if kind.forward is not theirs or (trains and stored_experts.quantised(self)):
            return kind.forward(self, *args, **kwargs)
        return experts.forward(self, *args, **kwargs)

    return subclass(kind, base, theirs, (_grouped, kind), forward=forward)


def _unfit(layer: nn.Module, *parameters: torch.Tensor | None) -> str | None:
    """Why tmm cannot compute the products of a layer."""
    if "forward" in vars(layer):
        return "its forward was replaced on the instance"
    for parameter in parameters:
        if parameter is None or _is_plain(parameter):
            continue
        if type(parameter) is not Quantized and stored_weights.read(parameter) is None:
            return f"its parameters are not plain ones ({type(parameter).__name__})"
    return None


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
