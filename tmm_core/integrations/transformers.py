"""tmm in Hugging Face Transformers without a change of the model's code.

>>> import tmm_core.integrations.transformers as tmm        # doctest: +SKIP
>>> tmm.register()                                          # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(           # doctest: +SKIP
...     name, experts_implementation="tmm", use_kernels=True
... )
>>> tmm.unregister(model)                                   # doctest: +SKIP

``kernelize`` replaces the forward of modules whose class has a layer name. Transformers names no
linear layer and no MLP, so :func:`register` wraps its ``kernelize``. While a model is kernelized,
its classes of linear layers and gated MLPs have the names of :func:`kernel_mapping`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from tmm_base.guards import suppress
from torch import nn

from tmm_core.integrations import kernel_layers, mxfp4_loading
from tmm_core.nn import conv1d, experts

#: Value of ``experts_implementation``.
NAME = "tmm"
_MOE = "transformers.integrations.moe"
_FP8 = "transformers.integrations.finegrained_fp8"
#: The modules of Transformers that hold its ``kernelize``.
_KERNELIZE = ("transformers.integrations.hub_kernels", "transformers.modeling_utils")

_kernelized: WeakSet[nn.Module] = WeakSet()


def register() -> None:
    """Add ``experts_implementation="tmm"``, and let ``use_kernels=True`` choose tmm's layers.

    ``use_kernels=True`` needs the package ``kernels`` in a version that Transformers accepts. Call
    this function before a model is kernelized. A second call does nothing.

    Raises:
        ImportError: No Transformers with expert implementations (5.0 or later) is installed.
    """
    importlib.import_module(_MOE).ALL_EXPERTS_FUNCTIONS.register(NAME, experts.forward)
    if (of_fp8 := _fp8_experts()) is not None:
        of_fp8.register(NAME, experts.forward)
    mxfp4_loading.install(NAME)
    for name in _KERNELIZE:
        module: Any = importlib.import_module(name)
        theirs = getattr(module, "kernelize", None)
        if theirs is not None and not hasattr(theirs, "_tmm_theirs"):
            module.kernelize = _wrapped(theirs)


def unregister(*models: nn.Module) -> None:
    """Undo :func:`register`, and restore every model that was kernelized since.

    Args:
        models: Models with ``experts_implementation="tmm"``. They get Transformers' own choice:
            a name that is not registered raises a KeyError at the next call.
    """
    for model in models:
        restore(model)
        if getattr(getattr(model, "config", None), "_experts_implementation", None) == NAME:
            own: Any = model
            own.set_experts_implementation(own.get_correct_experts_implementation(None))
    for model in list(_kernelized):
        restore(model)
    if (moe := sys.modules.get(_MOE)) is not None:
        moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop(NAME, None)
        if (of_fp8 := _fp8_experts()) is not None:
            of_fp8._global_mapping.pop(NAME, None)
        mxfp4_loading.remove()
    for name in _KERNELIZE:
        module: Any = sys.modules.get(name)
        if hasattr(getattr(module, "kernelize", None), "_tmm_theirs"):
            module.kernelize = module.kernelize._tmm_theirs


def _fp8_experts() -> Any:
    """Transformers' registry of implementations of experts in 8-bit floats; None in
    versions without it."""
    with suppress(ImportError, AttributeError):
        return importlib.import_module(_FP8).ALL_FP8_EXPERTS_FUNCTIONS
    return None


def restore(model: nn.Module) -> None:
    """Restore the forward of its own class to each module of a kernelized model."""
    for module in model.modules():
        if kernel_layers.is_ours(module):
            del module.forward
    _kernelized.discard(model)


def kernel_mapping() -> dict[str, dict[str, dict[Any, Any]]]:
    """A mapping for ``kernels.use_kernel_mapping`` and ``kernels.register_kernel_mapping``.

    Its names are ``Linear``, ``Conv1D``, ``SwiGLUMLP``, ``GeGLUMLP`` and ``GatedMLP``, on ``"cpu"``
    and ``"cuda"``, for inference and training, with and without ``torch.compile``. A class takes
    part if ``kernels.replace_kernel_forward_from_hub`` gave it one of these names.

    Raises:
        ImportError: The package ``kernels`` is not installed.
    """
    mode = importlib.import_module("kernels").Mode
    modes = mode.INFERENCE | mode.TORCH_COMPILE, mode.TRAINING | mode.TORCH_COMPILE
    return {
        name: {
            device: dict.fromkeys(modes, kernel_layers.Repository(layer))
            for device in ("cpu", "cuda")
        }
        for name, layer in kernel_layers.NAMES.items()
    }


def _wrapped(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' ``kernelize`` with tmm's mapping and the names that the mapping uses."""

    @functools.wraps(theirs)
    def kernelize(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not importlib.import_module(_KERNELIZE[0]).is_kernels_available():
            return theirs(model, *args, **kwargs)
        restore(model)
        kernels = importlib.import_module("kernels")
        with _named(model) as named, kernels.use_kernel_mapping(kernel_mapping()):
            result = theirs(model, *args, **kwargs)
        for module in model.modules():  # a subclass inherits the name
            if kernel_layers.is_ours(module) and type(module) not in named:
                del module.forward
        _kernelized.add(model)
        return result

    kernelize._tmm_theirs = theirs  # type: ignore[attr-defined]
    return kernelize


@contextmanager
def _named(model: nn.Module) -> Iterator[set[type[nn.Module]]]:
    """Give the model's classes of layers their names, for the time of one ``kernelize``."""
    classes: dict[type[nn.Module], str] = {}
    for module in model.modules():
        kind = type(module)
        if kind is nn.Linear:
            classes[kind] = "Linear"
        elif kind is conv1d.theirs():
            classes[kind] = "Conv1D"
        elif not hasattr(kind, "kernel_layer_name") and kernel_layers.is_gated_mlp(module):
            classes[kind] = "GatedMLP"
    unnamed = {k: name for k, name in classes.items() if "kernel_layer_name" not in vars(k)}
    for kind, name in unnamed.items():
        kind.kernel_layer_name = name  # type: ignore[attr-defined]
    try:
        yield set(classes)
    finally:
        for kind in unnamed:
            del kind.kernel_layer_name  # type: ignore[attr-defined]
