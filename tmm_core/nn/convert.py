"""Swaps a model's own layers for tmm's, in place and reversibly.

All decisions are made before anything changes. A replacement layer holds the same dictionaries of
parameters, buffers and hooks as the original, so parameters keep their identity (ties,
optimisers) and ``state_dict`` its keys, and undoing puts the old modules back into their slots.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter

import torch
from torch import nn

from tmm_core.nn import experts, proof
from tmm_core.nn.gated import GatedMLP
from tmm_core.nn.joined import joinable, joined
from tmm_core.nn.linear import Linear
from tmm_core.nn.report import Change, Kind, LeftAlone, Report, Slot


def convert(model: nn.Module, *, inplace: bool = True, static_weights: bool = False) -> Report:
    """Swap the layers of ``model`` for tmm's and fuse what can be proven.

    >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> print(convert(mlp))
    Sequential: 0 gated MLPs fused, 1 activations fused, 1 other linears swapped, 0 left alone
      0  Linear, ReLU → Linear(epilogue='relu')
      2  Linear → Linear

    * Every ``nn.Linear`` becomes a :class:`tmm_core.nn.Linear`, if it is of exactly that type
      (not quantised, not an adapter), has plain parameters, no hooks, and its own forward.
    * If all results of a layer go through one activation, it is fused into the layer's kernel and
      replaced by ``nn.Identity``. This works in ``nn.Sequential`` and in any module whose
      forward ``torch.fx`` can trace.
    * The expert layers of Transformers' mixtures (Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V3 and
      others that its ``experts_implementation`` reaches) become two grouped products.
    * A module whose forward is exactly ``down(activation(gate(x)) * up(x))``, whatever its
      children are called, becomes a :class:`tmm_core.nn.GatedMLP` around the same children.

    :mod:`tmm_core.nn.proof` proves fusions from a trace of the forward in both modes and the
    activation's values in float64. The proof holds for the module as it is now; it does not cover
    methods other than ``forward`` that call an activation themselves, or attributes that later
    switch ``forward`` to another path.

    The report also lists what cannot be reached: torch modules that multiply by their weights
    without calling a layer, above all ``nn.MultiheadAttention`` and the fast path of
    ``nn.TransformerEncoderLayer`` in evaluation mode.

    Parameters are the same objects as before, so ties, optimisers and ``state_dict`` keys
    stay valid; gate and up weights move into one storage. Converting twice changes nothing more.
    Tracing patches ``nn.Module.__call__`` temporarily: no other thread should be running a
    model.

    Args:
        model: Its children are swapped; the module itself has no parent to hold a replacement.
        inplace: False converts a deep copy, which is the report's ``model``.
        static_weights: Set ``static_weights`` on the new layers and on layers of
            :mod:`tmm_core.nn` already in the model: no kernel that may still run when a layer
            is called writes its weight (docs/serve.md). For inference. A compiled graph uses
            the setting in force when it runs instead.

    Returns:
        A :class:`Report`, with ``undo()``.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert(): model must be a torch.nn.Module, not {type(model).__name__}")
    if not inplace:
        model = copy.deepcopy(model)
    return _Conversion(model, static_weights).run()


#: Nothing to prove: containers without a forward, and layers already fused.
_SKIP = (nn.ModuleList, nn.ModuleDict, GatedMLP)


class _Conversion:
    def __init__(self, model: nn.Module, static_weights: bool) -> None:
        self._static_weights = static_weights
        self._report = Report(model)
        self._slots: dict[nn.Module, list[Slot]] = {model: []}
        self._walk(model, "")
        self._linears = {m for m in self._slots if self._swappable(m)}
        self._activations = {
            m: name for m in self._slots if (name := self._activation(m)) is not None
        }

    def _walk(self, parent: nn.Module, prefix: str) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            slot = Slot(parent, name, prefix + name)
            if child in self._slots:
                self._slots[child].append(slot)
            else:
                self._slots[child] = [slot]
                self._walk(child, f"{slot.path}.")

    def run(self) -> Report:
        gatings = self._gatings()
        pairs = self._pairs(gatings)
        for module in self._slots:
            self._leave(module, _out_of_reach(module))
        # All is decided; from here on the model changes, and is restored if memory runs out.
        try:
            self._change(gatings, pairs)
        except BaseException:
            self._report.undo()
            raise
        return self._report

    # -- decide --------------------------------------------------------------------------

    def _swappable(self, layer: nn.Module) -> bool:
        if not isinstance(layer, nn.Linear):
            return False
        reason = self._fixed(layer, layer.weight, layer.bias)
        if type(layer) not in (nn.Linear, Linear):
            reason = "a subclass of Linear may do more than Linear does"
        if self._leave(layer, reason):
            return False
        return type(layer) is nn.Linear or not layer.epilogue

    def _groupable(self, layer: nn.Module) -> bool:
        if not experts.is_theirs(layer):
            return False
        reason = self._fixed(layer, *layer.parameters(recurse=False)) or _overrides(layer)
        return not self._leave(layer, reason)

    def _fixed(self, module: nn.Module, *parameters: torch.Tensor | None) -> str | None:
        """Why a module with these parameters cannot be replaced."""
        if not self._slots[module]:
            return "it is the model itself and has no parent"
        for parameter in parameters:
            if parameter is not None and not _is_plain(parameter):
                return f"its parameters are not plain ones ({type(parameter).__name__})"
        return _hooked(module)

    def _activation(self, module: nn.Module) -> str | None:
        name = proof.activation(module)
        return None if name is None or self._leave(module, _hooked(module)) else name

    def _activations_in(self, parent: nn.Module) -> dict[nn.Module, str]:
        return {m: self._activations[m] for m in parent.children() if m in self._activations}

    def _gatings(self) -> dict[nn.Module, proof.Gating]:
        found = {}
        for mlp in self._slots:
            if isinstance(mlp, GatedMLP):
                continue
            children, acts = list(mlp.children()), self._activations_in(mlp)
            layers = self._linears.intersection(children)
            if len(layers) < 2 or not 3 <= len(children) <= 3 + len(acts):
                continue
            try:
                gating = proof.gating(mlp, acts)
            except proof.NotProvenError:
                continue
            reason = self._against_gating(mlp, gating)
            if reason is None:
                found[mlp] = gating
            else:
                self._leave(mlp, f"not fused: {reason}")
        return found

    def _against_gating(self, mlp: nn.Module, gating: proof.Gating) -> str | None:
        gate, up, _ = map(mlp.get_submodule, gating.names)
        if reason := self._fixed(mlp) or _overrides(mlp):
            return reason
        if gate not in self._linears or up not in self._linears:
            return "its gate or up projection is left alone"
        for first, second in ((gate.weight, up.weight), (gate.bias, up.bias)):
            if first is None and second is None:
                continue
            if first is None or second is None or first.shape != second.shape:
                return "gate and up projection differ in shape or bias"
            assert isinstance(first, torch.Tensor)
            assert isinstance(second, torch.Tensor)
            if first.is_meta or joined(first, second) is not None:
                continue
            shared = (self._storages[t.untyped_storage().data_ptr()] > 1 for t in (first, second))
            if not joinable(first, second) or any(shared):
                return "its weights share memory with others, or differ in dtype or device"
        return None

    @functools.cached_property
    def _storages(self) -> Counter[int]:
        """How many of the model's tensors lie in each storage, tied ones counted once."""
        model = self._report.model
        tensors = {*model.parameters(), *model.buffers()}
        plain = (t for t in tensors if _is_plain(t) and not t.is_meta)
        return Counter(t.untyped_storage().data_ptr() for t in plain)

    def _pairs(self, gatings: dict[nn.Module, proof.Gating]) -> list[proof.Pair]:
        found: list[proof.Pair] = []
        for parent in self._slots:
            acts = self._activations_in(parent)
            layers = self._linears.intersection(parent.children())
            if not acts or not layers or parent in gatings or isinstance(parent, _SKIP):
                continue
            try:
                pairs = proof.pairs(parent, layers, acts)
            except proof.NotProvenError as error:
                self._leave(parent, f"not fused: {error}")
                continue
            refused = set()
            for pair in pairs:
                reason = pair.reason
                if reason is None and len(self._slots[pair.linear]) > 1:
                    reason = "it is also used elsewhere"
                if reason is not None:
                    refused.add(pair.activation)
                    self._leave(pair.linear, f"not fused with its activation: {reason}")
            found += [pair for pair in pairs if pair.activation not in refused]
        return found

    # -- apply ---------------------------------------------------------------------------

    def _change(self, gatings: dict[nn.Module, proof.Gating], pairs: list[proof.Pair]) -> None:
        absorbed = {pair.linear: pair for pair in pairs}
        for module in self._slots:
            if module in gatings:
                gating = gatings[module]
                self._swap("gated", module, GatedMLP.of(module, gating.names, gating.epilogue))
            elif module in absorbed:
                pair = absorbed[module]
                assert isinstance(module, nn.Linear)
                self._swap("epilogue", module, Linear.of(module, pair.epilogue), pair.activation)
            elif module in self._linears and type(module) is nn.Linear:
                self._swap("linear", module, Linear.of(module))
            elif self._groupable(module):
                self._swap("experts", module, experts.TransformersExperts.of(module))
        for activation, parent in dict.fromkeys((p.activation, p.parent) for p in pairs):
            for slot in self._slots[activation]:
                if slot.parent is parent:
                    self._put(slot, activation, nn.Identity())
        for module in self._report.model.modules() if self._static_weights else ():
            if isinstance(module, (Linear, GatedMLP)):
                module.static_weights = True

    def _swap(
        self,
        kind: Kind,
        original: nn.Module,
        replacement: Linear | GatedMLP | experts.TransformersExperts,
        *absorbed: nn.Module,
    ) -> None:
        before = ", ".join(type(module).__name__ for module in (original, *absorbed))
        epilogue = f"(epilogue={replacement.epilogue!r})" if replacement.epilogue else ""
        after = f"{type(replacement).__name__}{epilogue}"
        for slot in self._slots[original]:
            self._put(slot, original, replacement)
        self._report.changes.append(Change(kind, self._path(original), before, after))

    def _put(self, slot: Slot, original: nn.Module, replacement: nn.Module) -> None:
        replacement.training = original.training
        slot.parent._modules[slot.name] = replacement
        self._report.swaps.append((slot, original, replacement))

    def _leave(self, module: nn.Module, reason: str | None) -> bool:
        """Report why a module is left alone, if there is a reason; returns whether there is."""
        if reason is not None:
            self._report.left.append(LeftAlone(self._path(module), type(module).__name__, reason))
        return reason is not None

    def _path(self, module: nn.Module) -> str:
        slots = self._slots[module]
        return slots[0].path if slots else "the model"


#: Torch's modules that multiply by weights without calling the layers that hold them.
_OUT_OF_REACH: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: (
        "in evaluation mode torch's fast path reads the weights and calls no layer; "
        "torch.backends.mha.set_fastpath_enabled(False) turns it off"
    ),
    nn.MultiheadAttention: "it multiplies by in_proj_weight and out_proj.weight itself",
    nn.RNNBase: "it multiplies by its weights itself",
}


def _out_of_reach(module: nn.Module) -> str | None:
    """Why torch computes the products of ``module``, whatever is swapped inside it."""
    for kind, reason in _OUT_OF_REACH.items():
        if isinstance(module, kind) and (
            kind is nn.RNNBase or type(module).forward is kind.forward
        ):
            return reason
    return None


def _hooked(module: nn.Module) -> str | None:
    """Why calling ``module`` does more than its class's forward."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in kinds):
        return "hooks are registered on it"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided


def _overrides(module: nn.Module) -> str | None:
    """Which methods its class overrides that GatedMLP would replace by nn.Module's."""
    kind = type(module)
    own = {"__init__", "__doc__", "__module__", "__dict__", "__weakref__", "__annotations__"}
    own |= {"forward", "extra_repr", "_get_name", "__static_attributes__", "__firstlineno__"}
    changed = sorted(
        n for n in set(vars(nn.Module)) - own if getattr(kind, n) is not getattr(nn.Module, n)
    )
    return f"its class has its own {', '.join(changed)}" if changed else None
