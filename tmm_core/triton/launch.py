"""Compile a Triton kernel once, then launch its handle at next to no host cost.

``kernel[grid](…)`` derives device, stream, specialisation, options and metadata anew on
every call (10.6 µs on an H200's host); the compiled handle called directly takes 3. So a
kernel is compiled from an explicit signature, where *we* say what is constant, what is
divisible by what and how wide an integer is, and the launcher keeps the handle.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tmm_core.device import interpreting

Grid = tuple[int, int, int]

_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int32: "i32",
}


def pointer(dtype: torch.dtype) -> str:
    """Triton's signature for a pointer to ``dtype``, e.g. ``"*bf16"``.

    Raises:
        ValueError: Triton has no such element type.
    """
    try:
        return f"*{_DTYPES[dtype]}"
    except KeyError:
        raise ValueError(f"no Triton element type for {dtype}") from None


def supports(dtype: torch.dtype) -> bool:
    """Whether Triton kernels can address elements of ``dtype``."""
    return dtype in _DTYPES


def source(
    fn: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Mapping[str, int] | None = None,
) -> ASTSource:
    """What is to be compiled: ``fn`` with every argument either typed or constant.

    Args:
        fn: A ``@triton.jit`` (or Gluon) function.
        types: Run-time arguments: ``"*bf16"``, ``"i32"``, ``"i64"``, ``"fp32"`` or a
            ``tensordesc<…>``.
        constants: All other arguments.
        divisible: Arguments known to be multiples of a number (bytes for pointers).

    Raises:
        TypeError: An argument of ``fn`` is in neither mapping, or in both.
    """
    names = list(fn.arg_names)
    if set(types) & set(constants) or set(names) != set(types) | set(constants):
        raise TypeError(
            f"{fn.__name__}: arguments {names} must each be typed or constant; "
            f"got types {sorted(types)} and constants {sorted(constants)}"
        )
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", number]]
        for name, number in (divisible or {}).items()
        if name in types
    }
    make = ASTSource
    if fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        make = GluonASTSource
    return make(fn, signature, dict(constants), attributes)


def compile_for(target: GPUTarget, src: ASTSource, **options: Any) -> CompiledKernel:
    """Compile for a GPU that need not be there. Thread-safe; no lock is held."""
    return triton.compile(src, target=target, options=options)


@functools.cache
def _target(device: int) -> GPUTarget:
    with torch.cuda.device(device):
        return triton.runtime.driver.active.get_current_target()


class Launch:
    """A Triton kernel bound to its constants, ready to launch on the current stream.

    Call with the grid and the run-time arguments in the order of ``fn``'s signature;
    tensors are passed as tensors (Triton's C launcher asks them for their address).
    Compiled at construction for a CUDA ``device``; with ``TRITON_INTERPRET=1``, or on a
    CPU, it goes through Triton's interpreter instead.

    Args:
        fn, types, constants, divisible: See :func:`source`.
        device: Where it will run.
        options: ``num_warps``, ``num_stages``, ``launch_pdl``, ``maxnreg``.

    Raises:
        Exception: What Triton raises when it cannot compile or load the kernel.
    """

    #: Compiled kernels shared by all launches of one process: problems that differ in
    #: nothing Triton specialises on share a handle.
    _compiled: ClassVar[dict[tuple[Any, ...], CompiledKernel]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        fn: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        *,
        device: torch.device,
        divisible: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        #: ``(gx, gy, gz, *arguments)``: what calling this object comes to, for warm paths.
        self.call: Callable[..., None]
        self.compiled: CompiledKernel | None = None
        #: What each ``tensordesc`` parameter's map is encoded from, besides the tensor, where
        #: this launch takes encoded maps.
        self._maps: dict[str, Any] = {}
        if interpreting() or device.type != "cuda":
            given = [name for name in fn.arg_names if name in types]
            self.call = _interpreted(fn, given, constants)
            return
        index = device.index if device.index is not None else torch.cuda.current_device()
        key = (
            fn,
            index,
            tuple(types.items()),
            tuple(sorted(constants.items(), key=lambda item: item[0])),
            tuple(sorted((divisible or {}).items())),
            tuple(sorted(options.items())),
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            src = source(fn, types, constants, divisible)
            compiled = compile_for(_target(index), src, **options)
            with torch.cuda.device(index), self._lock:
                compiled._init_handles()
            self._compiled[key] = compiled
        self.compiled = compiled
        # Empty where Triton takes descriptors apart instead of encoding them.
        meta = getattr(compiled.metadata, "tensordesc_meta", None) or []
        low = _low_level(compiled.run, described=bool(meta))
        if low is not None and meta:
            described = [n for n in fn.arg_names if types.get(n, "").startswith("tensordesc")]
            self._maps = dict(zip(described, meta, strict=True))
        signature = {name: (name in types, self._maps.get(name)) for name in fn.arg_names}
        self.call = _direct(compiled, low, signature, index)

    def __call__(self, grid: Grid, *args: Any) -> None:
        self.call(*grid, *args)

    def tensor_map(
        self, name: str, describe: Callable[[torch.Tensor], Any]
    ) -> Callable[[torch.Tensor], Any]:
        """What to pass for the ``tensordesc`` parameter ``name``, given the tensor.

        Triton encodes a tensor map anew for every descriptor of every launch. The function
        returned keeps the maps of the tensors it saw last, so that a warm launch encodes none.

        Args:
            name: A parameter whose type is ``tensordesc<…>``.
            describe: The tensor's descriptor; it may depend on address, shape and strides.
        """
        if name not in self._maps:
            return describe
        meta = self._maps[name]
        maps: dict[tuple[Any, ...], _TensorMap] = {}

        def of(t: torch.Tensor) -> Any:
            key = (t.data_ptr(), t.shape, t.stride())
            encoded = maps.get(key)
            if encoded is None:
                if len(maps) >= _TENSOR_MAPS_KEPT:
                    maps.pop(next(iter(maps)), None)
                encoded = maps[key] = _TensorMap(_encode(describe(t), meta))
            return encoded

        return of


#: A weight has one address, activations come from a few blocks of torch's allocator.
_TENSOR_MAPS_KEPT = 64


class _TensorMap(tuple[Any, ...]):
    """An encoded descriptor, as :func:`_encode` returns it."""

    __slots__ = ()


def _interpreted(fn: Any, names: Sequence[str], constants: Mapping[str, Any]) -> Any:
    def call(gx: int, gy: int, gz: int, *args: Any) -> None:
        fn[gx, gy, gz](**dict(zip(names, args, strict=True)), **constants)

    return call


def _low_level(run: Any, *, described: bool) -> Any:
    """Triton's C launch function; None where its order of arguments, which belongs to a
    version, is not known, or the launch needs more than it."""
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return None
    if not (hasattr(run, "launch_cooperative_grid") and hasattr(run, "launch_pdl")):
        return None
    if not (hasattr(run, "kernel_signature") or triton.__version__.startswith("3.6.")):
        return None
    low = getattr(run, "launch", None)
    if described and low is not None:
        # Under the wrapper that encodes descriptors; ours come encoded.
        low = inspect.getclosurevars(low).nonlocals.get("launcher")
    return low


def _direct(
    compiled: CompiledKernel, low: Any, signature: Mapping[str, tuple[bool, Any]], device: int
) -> Callable[..., None]:
    """A function of ``(gx, gy, gz, *arguments)`` that does nothing but launch.

    Written out as source: putting constants' places between the arguments by a loop took
    1.5 µs of a 26-argument launch, a call with its places spelled out takes none.

    Args:
        low: The C function of the installed Triton; where it is not known, the launcher
            object's own call is used (0.6 µs more).
        signature: Of each parameter whether it is given at run time, and from what its
            descriptor is encoded.
    """
    run = compiled.run
    given = [name for name, (runtime, _) in signature.items() if runtime]
    places = []
    for name, (runtime, meta) in signature.items():
        if meta is not None:
            places.append(
                f"*({name} if type({name}) is TensorMap else encode({name}, {name}_meta))"
            )
        else:
            places.append(name if runtime else "None")
    arguments = ", ".join(places)
    first = "gx, gy, gz, stream_of(device), function"
    if low is None:
        call = f"run({first}, metadata, None, None, None, {arguments})"
    elif hasattr(run, "kernel_signature"):  # Triton 3.7
        hooks = "None, None, None, None, None"
        call = f"low({first}, *flags, metadata, {hooks}, *annotations, ({arguments},))"
    else:  # Triton 3.6
        call = f"low({first}, *flags, None, None, metadata, None, None, None, {arguments})"
    code = f"""
def launch(gx, gy, gz, {", ".join(given)}):
    if current_device() == device:
        {call}
    else:
        with guard(device):
            {call}
"""
    namespace = {
        "TensorMap": _TensorMap,
        "annotations": (getattr(run, "arg_annotations", 0), getattr(run, "kernel_signature", 0)),
        "current_device": torch._C._cuda_getDevice,
        "device": device,
        "encode": _encode,
        "flags": (
            getattr(run, "launch_cooperative_grid", False),
            getattr(run, "launch_pdl", False),
        ),
        "function": compiled.function,
        "guard": torch.cuda.device,
        "low": low,
        "metadata": compiled.packed_metadata,
        "run": run,
        "stream_of": torch._C._cuda_getCurrentRawStream,
        **{f"{name}_meta": meta for name, (_, meta) in signature.items() if meta is not None},
    }
    exec(code, namespace)
    return namespace["launch"]  # type: ignore[no-any-return]


def _encode(descriptor: Any, meta: Any) -> Any:
    """What the C launcher takes for a descriptor: its tensor map, shape and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, meta)
