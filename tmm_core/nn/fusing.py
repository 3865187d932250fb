"""Decides what a module computes in one product, and which class makes it do so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tmm_core.nn import activation, fused, fusion_match, unreached
from tmm_core.nn.activation import Activation
from tmm_core.nn.classes import against_base, own
from tmm_core.nn.gated_layers import GatedMLP
from tmm_core.nn.joint_storage import Counts, against_one_product
from tmm_core.nn.linear import Linear
from tmm_core.nn.symbols import NotProvenError
from tmm_core.nn.trace import Trace, trace

#: Each layer whose product is tmm's, with the class it has or gets.
Layers = Mapping[nn.Module, Any]
Storages = Callable[[], Counts]

_UNKNOWN = "no epilogue computes it"


@dataclass
class Decision:
    """The class that a module gets, and the reasons for what stays apart."""

    #: The class it gets; None: it keeps its own.
    kind: Any = None
    fusions: list[fusion_match.Fusion] = field(default_factory=list)
    gating: fusion_match.Gating | None = None
    #: Activations that stay apart, children or functions, and why.
    apart: list[tuple[str, str]] = field(default_factory=list)


def decide(module: nn.Module, layers: Layers, storages: Storages) -> Decision:
    """Find what the forward of ``module`` can compute in one product."""
    decision = Decision()
    names = {name for name, child in module._modules.items() if child in layers}
    converted = own(type(module)) is not type(module) or isinstance(module, GatedMLP)
    if not names or converted or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return decision
    known, others = {}, []
    for name, child in module._modules.items():
        if child is not None and (found := activation.recognise(child)) is not None:
            known[name] = found
        elif child is not None and activation.is_activation(child):
            others.append(name)
    if type(module).forward is nn.Sequential.forward:
        _sequence(module, names, known, others, decision)
        return decision
    functions = unreached.activations(module)
    if not known and not functions and not others:
        return decision
    try:
        traced = trace(module)
    except NotProvenError as error:
        decision.apart += [(name, str(error)) for name in (*known, *functions, *others)]
        return decision
    if not _gate(module, traced, layers, storages, known, decision):
        _pairs(module, traced, names, known, decision)
    decision.apart += [(name, _UNKNOWN) for name in others]
    return decision


def _sequence(
    module: nn.Module,
    layers: set[str],
    known: Mapping[str, Activation],
    others: list[str],
    decision: Decision,
) -> None:
    """Find the fusions of an ``nn.Sequential``. Its whole forward is known, so the converted class
    finds its pairs again at each call."""
    for name, after in itertools.pairwise(module._modules):
        if name in layers and after in known:
            decision.fusions.append(fusion_match.Fusion(name, after, known[after].epilogue))
        elif name in layers and after in others:
            decision.apart.append((after, _UNKNOWN))
    if decision.fusions:
        found = tuple(dict.fromkeys(known.values()))
        decision.kind = fused.sequential(type(module), found)


def _pairs(
    module: nn.Module,
    traced: Trace,
    layers: set[str],
    known: Mapping[str, Activation],
    decision: Decision,
) -> None:
    program = fusion_match.program(traced, layers, known)
    decision.apart += [(name, f"{reason} ({layer})") for layer, name, reason in program.apart]
    if program.fusions:
        finished = tuple(dict.fromkeys(fusion.layer for fusion in program.fusions))
        assumed = _assumed(module, traced, finished, known)
        decision.kind = fused.programmed(assumed, program.graphs)
        decision.fusions += program.fusions


def _gate(
    module: nn.Module,
    traced: Trace,
    layers: Layers,
    storages: Storages,
    known: Mapping[str, Activation],
    decision: Decision,
) -> bool:
    """Whether ``module`` is a gated MLP."""
    try:
        gating = fusion_match.gating(traced, known)
    except NotProvenError:
        return False
    gate, up, _ = (getattr(module, name) for name in gating.names)
    if not all(layers.get(layer) is Linear for layer in (gate, up)):
        reason: str | None = "one of them is left alone"
    elif gate.weight.shape != up.weight.shape:
        reason = "they differ in shape"
    else:
        reason = against_base(module, GatedMLP) or against_one_product((gate, up), storages)
    if reason is not None:
        decision.apart.append((f"{gating.epilogue} of gate and up projection", reason))
        return False
    decision.gating = gating
    assumed = _assumed(module, traced, (), known)
    decision.kind = fused.gated(assumed, gating.names, gating.epilogue)
    return True


def _assumed(
    module: nn.Module, traced: Trace, layers: tuple[str, ...], known: Mapping[str, Activation]
) -> fused.Assumed:
    kind: Any = type(module)
    used = tuple((name, found) for name, found in known.items() if name in traced.present)
    return fused.Assumed(kind, traced.reached, traced.present, traced.tensors, layers, used)
