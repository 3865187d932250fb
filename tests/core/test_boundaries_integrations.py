"""Parts of the integrations with other libraries, each on a small stand-in for the library."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.integrations import kernel_layers, mxfp4_loading, transformers
from tmm_core.nn import conv1d

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("blas_alone")


def kernelized(module: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """Replace the module's forward, as ``kernelize`` does."""
    module.forward = types.MethodType(layer.forward, module)  # type: ignore[method-assign]
    return module


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Turned(nn.Module):
    """A weight in the order of Transformers' ``Conv1D``."""

    def __init__(self, features: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, features))
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class DoubledTurned(Turned):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Gated(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16)
        self.down, self.act = nn.Linear(16, 8), act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    """A module that is no gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.act(self.gate(x)))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The epilogue of each product that tmm computes, in order."""
    seen: list[str | None] = []
    for name in ("linear", "matmul"):
        real = getattr(kernel_layers.api, name)

        def product(*given: Any, real: Any = real, **more: Any) -> Tensor:
            seen.append(more.get("epilogue"))
            result: Tensor = real(*given, **more)
            return result

        monkeypatch.setattr(kernel_layers.api, name, product)
    monkeypatch.setattr(kernel_layers, "_proven", {})
    monkeypatch.setattr(conv1d, "theirs", lambda: Turned)
    return seen


@pytest.mark.parametrize(
    ("module", "layer", "epilogues"),
    [
        (nn.Linear(8, 4), kernel_layers.Linear, [None]),
        (nn.Linear(8, 4, bias=False), kernel_layers.Linear, [None]),
        (Doubled(8, 4), kernel_layers.Linear, []),
        (Turned(4, 8), kernel_layers.Conv1D, [None]),
        (DoubledTurned(4, 8), kernel_layers.Conv1D, []),
        (Gated(), kernel_layers.GatedMLP, ["silu"]),
        (Gated(nn.GELU("tanh")), kernel_layers.GatedMLP, ["gelu_tanh"]),
        (Gated(nn.Tanh()), kernel_layers.GatedMLP, []),
        (Plain(), kernel_layers.GatedMLP, []),
    ],
)
def test_a_layer_computes_the_same_as_the_module(
    products: list[str | None],
    module: nn.Module,
    layer: type[nn.Module],
    epilogues: list[str | None],
) -> None:
    """tmm computes the products if the module has exactly the class that the layer replaces."""
    x = torch.randn(3, 8)
    expected = module(x)
    assert not kernel_layers.is_ours(module)
    kernelized(module, layer)
    assert kernel_layers.is_ours(module)
    torch.testing.assert_close(module(x), expected)
    assert products == epilogues
    del module.forward  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
@pytest.mark.parametrize("name", ["gate", "up"])
def test_a_layer_with_a_hook_is_called(
    products: list[str | None], register: str, name: str
) -> None:
    mlp = kernelized(Gated(), kernel_layers.GatedMLP)
    layer = getattr(mlp, name)
    called: list[object] = []
    hook = getattr(layer, register)(lambda *given: called.append(given))
    mlp(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert len(called) == 1
    assert products == []
    hook.remove()
    mlp(torch.randn(3, 8))
    assert products == ["silu"]


def test_a_layer_with_a_forward_of_its_own_is_called(products: list[str | None]) -> None:
    mlp = kernelized(Gated(), kernel_layers.GatedMLP)
    mlp.gate.forward = lambda x: torch.zeros(3, 16)  # type: ignore[method-assign,assignment]
    assert torch.equal(mlp(torch.randn(3, 8)), mlp.down(torch.zeros(3, 16)))  # type: ignore[operator]
    mlp.gate, x = Doubled(8, 16), torch.randn(3, 8)
    assert torch.equal(mlp(x), Gated.forward(mlp, x))  # type: ignore[arg-type]
    assert products == []


def test_the_code_of_a_class_is_read_once(
    products: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[nn.Module] = []
    real = kernel_layers._prove
    monkeypatch.setattr(kernel_layers, "_prove", lambda m: looked.append(m) or real(m))
    for kind, gated in ((Gated, True), (Plain, False)):
        first = kernelized(kind(), kernel_layers.GatedMLP)
        assert kernel_layers.is_gated_mlp(first) is kernel_layers.is_gated_mlp(kind()) is gated
        assert kernel_layers.is_ours(first)  # again
    assert len(looked) == 2


def test_a_module_with_a_forward_of_its_own_proves_nothing_of_its_class(
    products: list[str | None],
) -> None:
    own = Gated()
    own.forward = other = lambda x: x  # type: ignore[method-assign,assignment]
    assert not kernel_layers.is_gated_mlp(own)
    assert own.forward is other


def test_layers_by_the_names_of_mappings() -> None:
    gated = dict.fromkeys(("SwiGLUMLP", "GeGLUMLP", "GatedMLP"), kernel_layers.GatedMLP)
    plain = {"Linear": kernel_layers.Linear, "Conv1D": kernel_layers.Conv1D}
    assert {**plain, **gated} == kernel_layers.NAMES
    for layer in kernel_layers.LAYERS:
        assert (layer.can_torch_compile, layer.has_backward) == (True, True)  # type: ignore[attr-defined]
        assert kernel_layers.Repository(layer).load() is layer


# -- kernelize -----------------------------------------------------------------------------


def forward_of_the_base(module: nn.Module) -> nn.Module:
    """Give each module whose class has a layer's name, or inherits one, the layer's forward."""
    for each in module.modules():
        name = getattr(type(each), "kernel_layer_name", None)
        if name is not None:
            kernelized(each, kernel_layers.NAMES[name])
    return module


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for modules of Transformers and for ``kernels``; the mapping in use while a model
    is kernelized."""
    used: dict[str, Any] = {"available": True}

    @contextlib.contextmanager
    def use_kernel_mapping(mapping: Any) -> Iterator[None]:
        used["mapping"] = mapping
        yield

    mode = SimpleNamespace(INFERENCE=1, TRAINING=2, TORCH_COMPILE=4)
    theirs = SimpleNamespace(Mode=mode, use_kernel_mapping=use_kernel_mapping)
    hub = SimpleNamespace(is_kernels_available=lambda: used["available"])
    monkeypatch.setitem(sys.modules, "kernels", theirs)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, transformers._KERNELIZE[0], hub)  # type: ignore[arg-type]
    monkeypatch.setattr(conv1d, "theirs", lambda: Turned)
    return used


def test_modules_of_named_classes_are_kernelized_and_subclasses_are_not(
    kernels: dict[str, Any],
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8), Turned(8, 8), DoubledTurned(8, 8))
    model.append(Gated())
    model.append(Plain())
    kernelize = transformers._wrapped(forward_of_the_base)
    assert kernelize(model) is model
    ours = [kernel_layers.is_ours(each) for each in model]
    assert ours == [True, False, True, False, True, False]
    assert not any(hasattr(kind, "kernel_layer_name") for kind in (nn.Linear, Turned, Gated))
    assert {*kernels["mapping"]} == {*kernel_layers.NAMES}
    assert {*kernels["mapping"]["Linear"]["cuda"]} == {5, 6}
    for undo in (transformers.unregister, lambda: transformers.restore(model)):
        kernelize(model)
        undo()
        assert not any(kernel_layers.is_ours(each) for each in model.modules())
    kernelized(model[0], kernel_layers.Linear)  # by a mapping of the user's own
    transformers.unregister()
    assert kernel_layers.is_ours(model[0])


def test_without_the_package_a_model_stays_as_it_is(kernels: dict[str, Any]) -> None:
    kernels["available"] = False
    model = nn.Linear(8, 8)
    assert transformers._wrapped(lambda model: forward_of_the_base(model))(model) is model
    assert not kernel_layers.is_ours(model)
    assert "mapping" not in kernels


def test_restoring_leaves_a_forward_that_others_gave() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    kernelized(model[0], kernel_layers.Linear)
    theirs = F.relu, types.MethodType(Plain.forward, model[2])
    for module, forward in zip(model[1:], theirs, strict=True):
        module.forward = forward  # type: ignore[method-assign,assignment]
    transformers.restore(model)
    assert "forward" not in vars(model[0])
    assert (model[1].forward, model[2].forward) == theirs


def test_versions_without_8_bit_experts_register_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, transformers._FP8, None)  # type: ignore[arg-type]
    assert transformers._fp8_experts() is None
    monkeypatch.setitem(sys.modules, transformers._FP8, SimpleNamespace())  # type: ignore[arg-type]
    assert transformers._fp8_experts() is None
    with_it = SimpleNamespace(ALL_FP8_EXPERTS_FUNCTIONS=3)
    monkeypatch.setitem(sys.modules, transformers._FP8, with_it)  # type: ignore[arg-type]
    assert transformers._fp8_experts() == 3


def test_models_without_experts_of_tmm_keep_theirs() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.config = SimpleNamespace(_experts_implementation="eager")  # type: ignore[assignment]
    transformers.unregister(model, other)  # neither module can choose an implementation of experts


def test_an_activation_that_is_not_recognised_gates_no_kernel(
    products: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations of one class of modules differ; a graph takes those that were looked at."""
    layers = [Gated(), Gated(nn.ReLU()), Gated(nn.Tanh()), Gated(nn.Hardswish())]
    found = [kernel_layers.is_gated_mlp(mlp) for mlp in layers]
    assert found == [True] * 4
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    gatings = [kernel_layers._gating(mlp) for mlp in layers]
    assert [each[1] if each else "none" for each in gatings] == ["silu", "relu", "tanh", "none"]


# -- checkpoints of gpt-oss ----------------------------------------------------------------


class GptOssExperts(nn.Module):
    pass


class Experts(nn.Module):
    """A stand-in for tmm's experts."""

    def __init__(self, of: nn.Module, device: str) -> None:
        super().__init__()
        self.of, self.where = (of,), device


@pytest.fixture
def quantizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Quantizer:
        pre_quantized = True
        quantization_config = SimpleNamespace(dequantize=False, modules_to_not_convert=["kept"])

        def get_modules_to_not_convert(self, model: object, *more: object) -> list[object]:
            return [*more]

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            return "theirs", kwargs

        def get_weight_conversions(self) -> list[str]:
            return ["theirs"]

    utils = SimpleNamespace(should_convert_module=lambda name, kept: name not in kept[0])
    monkeypatch.setitem(sys.modules, "transformers.quantizers.quantizers_utils", utils)  # type: ignore[arg-type]
    module = SimpleNamespace(Mxfp4HfQuantizer=Quantizer)
    monkeypatch.setitem(sys.modules, mxfp4_loading._QUANTIZER, module)  # type: ignore[arg-type]
    monkeypatch.setattr(mxfp4_loading, "Mxfp4Experts", Experts)
    return Quantizer


def model_of_experts(implementation: str) -> nn.Module:
    model = nn.Module()
    model.experts, model.kept, model.other = GptOssExperts(), GptOssExperts(), nn.Linear(2, 2)
    model.config = SimpleNamespace(_experts_implementation=implementation)  # type: ignore[assignment]
    model._keep_in_fp32_modules = ["norm"]  # type: ignore[assignment]
    return model


def test_experts_are_loaded_in_mxfp4_where_a_model_requests_it(quantizer: Any) -> None:
    before = {name: getattr(quantizer, name) for name in mxfp4_loading._METHODS}
    mxfp4_loading.install("tmm")
    first = {name: getattr(quantizer, name) for name in mxfp4_loading._METHODS}
    mxfp4_loading.install("tmm")
    assert {name: getattr(quantizer, name) for name in mxfp4_loading._METHODS} == first != before
    mine, model = quantizer(), model_of_experts("tmm")
    assert mine._process_model_before_weight_loading(model, x=1) is None
    assert mine.modules_to_not_convert == [["kept"], ["norm"]]
    kinds = [type(each) for each in model.children()]
    assert kinds == [Experts, GptOssExperts, nn.Linear]
    assert (type(model.experts.of[0]), model.experts.where) == (GptOssExperts, "meta")  # type: ignore[index,union-attr]
    assert mine.get_weight_conversions() == []
    mxfp4_loading.remove()
    assert {name: getattr(quantizer, name) for name in mxfp4_loading._METHODS} == before


@pytest.mark.parametrize("why", ["another", "not quantised", "dequantised"])
def test_other_models_are_loaded_by_transformers(quantizer: Any, why: str) -> None:
    mxfp4_loading.install("tmm")
    mine = quantizer()
    mine.pre_quantized = why != "not quantised"
    mine.quantization_config = SimpleNamespace(dequantize=why == "dequantised")
    model = model_of_experts("eager" if why == "another" else "tmm")
    assert mine._process_model_before_weight_loading(model, x=1) == ("theirs", {"x": 1})
    assert type(model.experts) is GptOssExperts
    assert mine.get_weight_conversions() == ["theirs"]


def test_versions_without_mxfp4_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, mxfp4_loading._QUANTIZER, None)  # type: ignore[arg-type]
    assert mxfp4_loading._quantizer() is None
    mxfp4_loading.install("tmm")
    mxfp4_loading.remove()
