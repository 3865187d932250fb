"""``torch.nn.Linear`` over the kernel registry, with the epilogue in the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from tmm_core import api, compat, dispatch
from tmm_core.interop import fallbacks
from tmm_core.nn.classes import ProductLayer, forget, replaced
from tmm_core.settings import with_static_weights
from tmm_core.spec.epilogue import EpilogueLike

#: Torch's forward; None: other code had replaced it before.
_TORCHS = None if replaced(nn.Linear) else nn.Linear.forward


class Linear(ProductLayer, nn.Linear):
    """``epilogue(x @ weight.T + bias)``: torch's layer, parameter names and initialisation.

    >>> Linear(8, 16, epilogue="silu")
    Linear(in_features=8, out_features=16, bias=True, epilogue='silu')

    Args:
        in_features, out_features, bias, device, dtype: As ``torch.nn.Linear``. With a gated
            epilogue ``out_features`` counts both halves, gate rows first, and the output is
            half as wide.
        epilogue: As for :func:`tmm_core.matmul`. An attribute too: assign to change it. The closure
            variables of its functions count as they are when it is assigned.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``; weight ``[out_features,
        in_features]``, bias ``[out_features]``.

    Raises:
        UnknownNameError, ValueError, TypeError: The epilogue is invalid; see
            :func:`tmm_core.matmul`. ValueError also if a gated one would split an odd number
            of features.
    """

    # Also on the class: convert changes the class of torch's layers, whose instances lack it.
    _epilogue: EpilogueLike = None
    #: While attention's forward runs: computes this product together with others of the same input
    #: (:mod:`tmm_core.nn.projections`).
    _joint_product: Any = None
    _library = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        epilogue: EpilogueLike = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.epilogue = epilogue

    @property
    def epilogue(self) -> EpilogueLike:
        return self._epilogue

    @epilogue.setter
    def epilogue(self, epilogue: EpilogueLike) -> None:
        text = ""
        if epilogue is not None:
            parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
            if parsed.gated and self.out_features % 2:
                raise ValueError(
                    f"gated epilogue {parsed.name!r} splits the features in two, and "
                    f"out_features={self.out_features} is odd"
                )
            text = epilogue if isinstance(epilogue, str) else parsed.interned()
        self._text, self._epilogue = text, epilogue

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "epilogue" and isinstance(value, nn.Module):  # it would become a child
            value = dispatch.default_dispatcher().registry.epilogue(value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        # The operator refers to an epilogue object by its text, which is valid in one process only.
        self.epilogue = self._epilogue

    def _swapped_out(self) -> None:
        forget(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(input) is not torch.Tensor and (node := leaf(self, input)) is not None:
            return node  # type: ignore[no-any-return]
        joint = self._joint_product
        if joint is not None and (y := joint.of(self, input)) is not None:
            return y  # type: ignore[no-any-return]
        of_tensor = isinstance(input, (torch.Tensor, fx.Proxy))
        if self.replaced() or not of_tensor:  # another type may know torch's function
            return self._by_library(input)  # type: ignore[no-any-return]
        weight = self.weight
        if type(weight) is not nn.Parameter and fallbacks.foreign(weight):
            return self._by_type(input, weight, self.bias, self._text)
        if self.static_weights and not self._state_dict_pre_hooks:
            return with_static_weights(finished_linear, input, weight, self.bias, self._text)
        return api.linear(input, weight, self.bias, epilogue=self._text)

    def product(self, input: torch.Tensor, epilogue: str) -> torch.Tensor:
        """``epilogue(input @ weight.T + bias)`` of a layer's own parameters."""
        of: Any = self._parameters  # not through __getattr__, which costs 0.3 µs each
        weight = of["weight"]
        if type(weight) is not nn.Parameter and fallbacks.foreign(weight):
            return self._by_type(input, weight, of["bias"], epilogue)
        return self._run(finished_linear, input, weight, of["bias"], epilogue)  # type: ignore[no-any-return]

    @classmethod
    def replaced(cls) -> bool:
        # It may have been replaced already when tmm was imported.
        return nn.Linear.forward is not _TORCHS and replaced(nn.Linear)

    def _by_type(self, *call: Any) -> torch.Tensor:
        """Return the product with a weight of another library's type."""
        from tmm_core.nn import stored_weights  # imports what few models need

        return self._run(stored_weights.product, *call)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}, epilogue={self._text!r}" if self._text else text


Linear.computes_product = Linear


def finished_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: str
) -> torch.Tensor:
    """:func:`tmm_core.linear` with positional arguments, which cost less to pass on."""
    return api.linear(input, weight, bias, epilogue=epilogue)


def leaf(module: nn.Module, input: Any) -> Any:
    """The node of ``torch.fx`` that calls ``module``, if ``input`` is a symbol; else None. Tracers
    treat only modules of torch's package as leaves, and would trace into tmm's.

    None also if ``module`` is the traced module itself, or the trace has run its hooks already.
    """
    tracer: Any = input.tracer if isinstance(input, fx.Proxy) else None
    if tracer is None or getattr(tracer, "root", None) is module:
        return None
    if module._forward_hooks or module._forward_pre_hooks or compat.global_hooks():
        return None
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})
