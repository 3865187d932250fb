"""Private names of torch, in one place, each with a fallback for torch versions that lack it.

Torch may rename or drop them in any release. A fallback is slower, never wrong: if a query of
torch's state is missing, the call goes through the operator as if torch's dispatcher were needed.
One warning lists the missing names.

This module is at the bottom of the package rather than in ``interop``, because the warm path in
``launch`` uses most of these names.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from tmm_base.guards import suppress

from tmm_core.errors import TmmWarning, reraise

#: The names requested so far that this torch lacks.
missing: list[str] = []


def private(path: str, otherwise: Any) -> Any:
    """The object at the dotted ``path`` in torch, importing its module if need be; else
    ``otherwise``, and the name is added to :data:`missing`."""
    *modules, name = path.split(".")
    owner: Any = None
    try:
        owner = importlib.import_module(".".join(modules))
    except ImportError as error:  # the last parts are attributes: torch._C.DispatchKey
        reraise(error)
        owner = torch
        for part in modules[1:]:
            owner = getattr(owner, part, None)
    found = getattr(owner, name, _ABSENT)
    if found is _ABSENT:
        if path not in missing:
            missing.append(path)
        return otherwise
    return found


_ABSENT = object()


def _always(answer: Any) -> Any:
    return lambda *_: answer


def _holding(path: str, **otherwise: Any) -> Any:
    """The module at ``path``, whose attributes change over time; a stand-in if one is missing."""
    lacking = [name for name in otherwise if private(f"{path}.{name}", _ABSENT) is _ABSENT]
    return SimpleNamespace(**otherwise) if lacking else importlib.import_module(path)


# -- whether the call needs torch's dispatcher (launch.warm) -------------------------------------
# Each query is one call of C, some 50 ns. The fallbacks answer that the call needs the dispatcher.

autocasts = private("torch._C._is_any_autocast_enabled", _always(True))
dispatch_modes = private("torch._C._len_torch_dispatch_stack", _always(1))
function_modes = private("torch._C._len_torch_function_stack", _always(1))
profiles = private("torch._C._autograd._profiler_enabled", _always(True))
tracer = private("torch._C._get_tracing_state", _always(True))
transform = private("torch._C._functorch.peek_interpreter_stack", _always(True))

#: ``_current_level``: at or above 0 within forward-mode differentiation.
forward_ad = _holding(
    "torch.autograd.forward_ad", _current_level=0, _set_fwd_grad_enabled=_always(nullcontext())
)
#: ``_is_profiler_enabled``: without it the profiler shows no kernel names.
profiler = _holding("torch.autograd.profiler", _is_profiler_enabled=False)

deterministic = private(
    "torch._C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
#: 1 if a tensor's elements share memory, 2 if unknown, which the fallback always returns.
internal_overlap = private("torch._debug_has_internal_overlap", _always(2))
_uses_of_storage = private("torch._C._storage_Use_Count", _always(3))
#: The factory of a context in which no mode sees torch's calls.
without_modes: Any = private("torch.utils._python_dispatch._disable_current_modes", nullcontext)


def holds_storage_alone(t: torch.Tensor) -> bool:
    """Whether no other tensor uses the storage of ``t``; False if this torch cannot report it."""
    storage: Any = t.untyped_storage()
    return bool(_uses_of_storage(storage._cdata) <= 2)  # t and ``storage``


# -- derivatives, transforms and autocast (interop) ----------------------------------------------


transforms_active = private(
    "torch._C._are_functorch_transforms_active", lambda: transform() is not None
)
#: Whether a tensor is a batch of gradients: ``is_grads_batched`` uses the legacy vmap, which no
#: functorch mode reveals.
is_batched = private("torch._C._functorch.is_legacy_batchedtensor", _always(True))

if TYPE_CHECKING:
    from torch.autograd.function import _SingleLevelFunction

    SingleLevelFunction = _SingleLevelFunction
else:
    #: An autograd function for one level of transforms, below torch's dispatcher.
    SingleLevelFunction = private(
        "torch.autograd.function._SingleLevelFunction", torch.autograd.Function
    )
single_level: Any = private(
    "torch._functorch.utils.enable_single_level_autograd_function", _always(nullcontext())
)


def _excluding_autograd() -> Any:
    """The fallback of :data:`below_autograd`, made of the dispatch keys that it excludes."""
    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.AutogradFunctionality)
    keys = keys.add(key.AutogradOther).add(key.AutogradNestedTensor)
    return torch._C._ExcludeDispatchKeyGuard(keys)


#: The guard under which an operator's Autograd kernel calls the operator again.
below_autograd: Any = private("torch._C._AutoDispatchBelowAutograd", _excluding_autograd)


def _without_autocast(device: str) -> Any:
    """The factory of a context in which ``device`` does not autocast."""
    exclude = private("torch._C._ExcludeDispatchKeyGuard", None)
    keys = private("torch._C.DispatchKeySet", None)
    key = private(f"torch._C.DispatchKey.Autocast{device.upper()}", None)
    if exclude is None or keys is None or key is None:
        return functools.partial(torch.autocast, device, enabled=False)
    return functools.partial(exclude, keys(key))


#: Factories of a context in which operands are not cast, by type of device.
without_autocast = {device: _without_autocast(device) for device in ("cuda", "cpu")}

#: Makes a tensor without storage, for a subclass that has other tensors as its parts.
wrapper_subclass = torch.Tensor._make_wrapper_subclass
#: The context in which functions of subclasses are called as torch's own.
without_torch_function = torch._C.DisableTorchFunctionSubclass

#: Whether hooks are registered on all modules.
global_hooks = private("torch.nn.modules.module._has_any_global_hook", _always(True))


#: Types of devices for which torch's query of autocast raises. torch.compile cannot trace
#: torch.amp.is_autocast_available before torch 2.13.
_WITHOUT_AUTOCAST = frozenset({"fpga", "lazy", "meta", "vulkan"})


def autocasts_on(device: str) -> bool:
    """Whether operands on devices of this type are cast."""
    return device not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(device)


def uncast(out: torch.Tensor | None) -> AbstractContextManager[Any]:
    """The context of a call that writes to ``out``, which has the result's dtype. As in torch.mm
    with out, autocast is off: for the operands and for the torch functions that the call uses."""
    if out is None or not autocasts_on(out.device.type):
        return nullcontext()
    return torch.autocast(out.device.type, enabled=False)  # torch.compile traces it


# -- operators of torch that tmm answers (interop.aten) ------------------------------------------


#: Called with ``"cuda", "matmul"``. It reads what torch's property reads, without its checks.
fp32_precision = private(
    "torch._C._get_fp32_precision_getter", lambda *_: torch.backends.cuda.matmul.fp32_precision
)


# -- GPUs ------------------------------------------------------------------------------------


def _empty_strided_cuda(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


#: Allocates a CUDA tensor on the current device below torch's dispatcher, as compiled graphs do,
#: in half the 1.7 µs of ``new_empty``. A torch without CUDA lacks this function and the next two.
empty_strided_cuda = _empty_strided_cuda
current_device: Any = torch.cuda.current_device
current_stream: Any = _current_stream
#: Makes the current stream wait for the given number of GPU cycles.
gpu_sleep: Any = private("torch.cuda._sleep", _always(None))
if torch.backends.cuda.is_built():
    empty_strided_cuda = private("torch._C._dynamo.guards._empty_strided_cuda", _empty_strided_cuda)
    current_device = private("torch._C._cuda_getDevice", torch.cuda.current_device)
    current_stream = private("torch._C._cuda_getCurrentRawStream", _current_stream)


def end_failed_capture(pool: Any) -> None:
    """Restore what torch 2.11 leaves behind on the current device after a capture into ``pool``
    that could not be ended.

    Its allocator goes on recording into the pool, and its random generator counts as capturing, so
    that the next ``torch.randn`` would raise. Ending another capture resets the generator.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # already ended: the failure was elsewhere
        private("torch._C._cuda_endAllocateToPool", _always(None))(device, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, dtype=torch.float32, device=device)


# -- rarely used ---------------------------------------------------------------------------------


def graph_pass() -> Any:
    """The class of passes over compiled graphs; ``object`` if absent."""
    return private("torch._inductor.custom_graph_pass.CustomGraphPass", object)


def freezable_inputs() -> set[int]:
    """Indices of the inputs that torch's freezing turns into constants in the graph being compiled:
    parameters and buffers that the graph neither changes nor returns. Empty if unknown."""
    context: Any = private("torch._guards.TracingContext.try_get", _always(None))()
    parameters = getattr(context, "params_flat_unwrap_subclasses", None)
    metadata = getattr(context, "fw_metadata", None)
    if parameters is None or metadata is None:
        return set()
    returned = {each.base_idx for each in metadata.output_info}
    unchanged = [each.mutation_type.name == "NOT_MUTATED" for each in metadata.input_info]
    return {i for i in range(len(parameters)) if unchanged[i] and i not in returned}


def inductor_config() -> Any:
    """The settings of torch's compiler."""
    return importlib.import_module("torch._inductor.config")


def tensor_guards() -> Any:
    """Dynamo's class of guards, which compare tensors with example tensors; None if absent."""
    return getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


def fake_tensor() -> Any:
    """The class of tensors that an export traces with. If torch lacks it, ``()``: no tensor is an
    instance."""
    return private("torch._subclasses.fake_tensor.FakeTensor", ())


def dtensor() -> Any:
    """The class of sharded tensors. If this process has not imported it, ``()``: no tensor is an
    instance. The import takes 1.5 s."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def fsdp_module() -> Any:
    """The class of modules that FSDP2 sharded; ``()``, as :func:`dtensor`, if not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def schema_info() -> Any:
    """The class that lists the arguments in the key of DTensor's cache; None if absent."""
    return private("torch.distributed.tensor._op_schema.RuntimeSchemaInfo", None)


def local_tensor(t: Any) -> torch.Tensor | None:
    """The tensor that a DTensor holds on this rank, itself and not a view."""
    return getattr(t, "_local_tensor", None)


def dtensor_spec(t: Any) -> Any:
    """The mesh, placements, shape, strides and dtype of a DTensor; None if this torch hides it."""
    return getattr(t, "_spec", None)


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def viewing(t: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which torch makes views of ``t``. In inference mode torch (2.13) makes
    none of a DTensor."""
    leave = not torch.compiler.is_compiling() and isinstance(t, dtensor())
    leave = leave and torch.is_inference_mode_enabled() and not t.is_inference()
    return _outside_inference() if leave else nullcontext()


def transposed(t: torch.Tensor) -> torch.Tensor:
    """``t.t()``, also of a DTensor in inference mode."""
    with viewing(t):
        return t.t()


def dtensor_of(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor without gradient that holds ``local`` on this rank. ``from_local`` would derive the
    spec and record an autograd function, which takes 50 µs."""
    kind: Any = dtensor()
    sharded: torch.Tensor
    try:
        sharded = kind.__new__(kind, local, spec, requires_grad=False)
    except TypeError as error:  # the constructor of another torch version
        reraise(error)
        more = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
        sharded = kind.from_local(local, spec.mesh, spec.placements, **more)
    return sharded


if missing:
    warnings.warn(
        f"this torch ({torch.__version__}) lacks {', '.join(missing)}: results are the same, but "
        "calls may cost some µs more on the host",
        TmmWarning,
        stacklevel=2,
    )
