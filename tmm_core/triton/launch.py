"""Launches a compiled Triton kernel at almost no host cost.

``kernel[grid](…)`` derives device, stream, specialisation, options and metadata on every call (10.6
µs on an H200's host); calling the compiled handle takes 3. So a kernel is compiled from an explicit
signature (:mod:`tmm_core.triton.compile`), and the launch keeps the handle.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tmm_core import compat
from tmm_core.launch.codegen import written
from tmm_core.spec.device import interpreting
from tmm_core.triton.compile import compile_for, hash_after_callees, source
from tmm_core.triton.interpreted import call_of
from tmm_core.triton.releases import tested

Grid = tuple[int, int, int]


@functools.cache
def _target(device: int) -> GPUTarget:
    with torch.cuda.device(device):
        return triton.runtime.driver.active.get_current_target()


class Launch:
    """A Triton kernel bound to its constants, ready to launch on the current stream.

    Call it with the grid and the run-time arguments in the order of ``fn``'s signature; tensors are
    passed as tensors (Triton's C launcher reads their addresses). It compiles at construction for a
    CUDA ``device``; with ``TRITON_INTERPRET=1`` or on a CPU it uses Triton's interpreter instead.

    Args:
        fn, types, constants, divisible: See :func:`source`.
        device: The device to launch on.
        edits: Names of edits of its PTX (:mod:`tmm_core.triton.ptx`).
        options: ``num_warps``, ``num_stages``, ``launch_pdl``, ``maxnreg``.

    Raises:
        Exception: What Triton raises when it cannot compile or load the kernel.
    """

    #: Compiled kernels, shared by all launches of a process: problems with the same specialisation
    #: share a handle.
    _compiled: ClassVar[dict[tuple[Any, ...], CompiledKernel]] = {}
    #: Held while compiling a kernel, so that a tuner's threads compile none twice.
    _compiling: ClassVar[dict[tuple[Any, ...], threading.Lock]] = {}
    #: Held while loading one, by the types of its arguments, for which Triton 3.6 compiles a C
    #: launcher, in up to 2 s on a busy host.
    _loading: ClassVar[dict[tuple[str, ...], threading.Lock]] = {}

    def __init__(
        self,
        fn: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        *,
        device: torch.device,
        divisible: Mapping[str, int] | None = None,
        edits: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.compiled: CompiledKernel | None = None
        self._given = [name for name in fn.arg_names if name in types]
        #: The metadata for encoding each ``tensordesc`` parameter's map, if this launch takes
        #: encoded maps.
        self._maps: dict[str, Any] = {}
        if interpreting() or device.type != "cuda":
            self._parameters = self._given
            self._template = "{_}interpret({grid}, {arguments})"
            self.namespace = {"interpret": call_of(fn, self._given, types, constants)}
        else:
            index = device.index if device.index is not None else torch.cuda.current_device()
            hash_after_callees(fn, constants)
            key = (
                fn,
                index,
                tuple(types.items()),
                tuple(sorted(constants.items(), key=lambda item: item[0])),
                tuple(sorted((divisible or {}).items())),
                edits,
                tuple(sorted(options.items())),
            )
            compiled = self._compiled.get(key)
            if compiled is None:
                with self._compiling.setdefault(key, threading.Lock()):
                    compiled = self._compiled.get(key)
                    if compiled is None:
                        src = source(fn, types, constants, divisible)
                        compiled = self._compile(src, index, edits, options)
                        self._compiled[key] = compiled
            self.compiled = compiled
            # Empty if Triton unpacks descriptors instead of encoding them.
            meta = getattr(compiled.metadata, "tensordesc_meta", None) or []
            low = _low_level(compiled.run, described=bool(meta))
            if low is not None and meta:
                described = [n for n in fn.arg_names if types.get(n, "").startswith("tensordesc")]
                self._maps = dict(zip(described, meta, strict=True))
            # Constants are passed as None in Triton's order of arguments.
            reduced = "constexpr" not in compiled.src.signature.values()
            self._parameters = self._given if reduced else list(fn.arg_names)
            self._template, self.namespace = _direct(compiled, low, index)
        #: The launch function, called with ``(gx, gy, gz, *arguments)``, for warm paths.
        self.call: Callable[..., None] = self._write_call()

    def _compile(
        self, src: ASTSource, index: int, edits: tuple[str, ...], options: Mapping[str, Any]
    ) -> CompiledKernel:
        compiled = compile_for(_target(index), src, edits=edits, **options)
        if tested() and compiled.metadata.target.backend == "cuda":
            compiled.src = _without_constants(src)
        # Without the shapes of descriptors' boxes, on which the launcher does not depend.
        types = tuple(kind.partition("[")[0] for kind in compiled.src.signature.values())
        with torch.cuda.device(index), self._loading.setdefault(types, threading.Lock()):
            compiled._init_handles()
        return compiled

    def __call__(self, grid: Grid, *args: Any) -> None:
        self.call(*grid, *args)

    def tensor_map(
        self, name: str, describe: Callable[[torch.Tensor], Any]
    ) -> Callable[[torch.Tensor], Any]:
        """A function from a tensor to the argument for the ``tensordesc`` parameter ``name``.

        Triton encodes a tensor map for every descriptor of every launch. The returned function
        caches the maps of the last tensors, so that a warm launch encodes none.

        Args:
            name: A parameter whose type is ``tensordesc<…>``.
            describe: Returns the tensor's descriptor, which may depend on address and strides, but
                on nothing else that changes between calls.
        """
        return TensorMaps(describe, self._maps[name]) if name in self._maps else describe

    def text(self, prefix: str, grid: Iterable[str], places: Mapping[str, str]) -> str:
        """The source of one launch, for :func:`launcher`.

        Args:
            prefix: The prefix of the names in :attr:`namespace`.
            grid, places: Expressions for the grid and the run-time arguments.
        """
        arguments = (places.get(name, "None") for name in self._parameters)
        return self._template.format(_=prefix, grid=", ".join(grid), arguments=", ".join(arguments))

    def guard(self, prefix: str, again: str) -> str:
        """The statement that runs ``again`` on the launch's device if that is not current."""
        if self.compiled is None:
            return "pass"
        return (
            f"if {prefix}current_device() != {prefix}device:\n"
            f"        with {prefix}guard({prefix}device):\n"
            f"            return {again}"
        )

    def _write_call(self) -> Callable[..., None]:
        namespace = {f"_{name}": value for name, value in self.namespace.items()}
        places = {name: name for name in self._given}
        for name, meta in self._maps.items():
            namespace[f"{name}_meta"] = meta
            places[name] = (
                f"*({name} if type({name}) is TensorMap else encode({name}, {name}_meta))"
            )
        namespace |= {"TensorMap": _TensorMap, "encode": _encode}
        given = ", ".join(("gx", "gy", "gz", *self._given))
        lines = [
            self.guard("_", f"call({given})"),
            self.text("_", ("gx", "gy", "gz"), places),
        ]
        return written("call", given, lines, namespace)  # type: ignore[no-any-return]


#: A weight has one address, activations come from a few blocks of torch's allocator.
_TENSOR_MAPS_KEPT = 64


def forget_compiled() -> None:
    """Forget the compiled kernels of this process; launches that are bound keep theirs."""
    Launch._compiled.clear()


class TensorMaps:
    """Encoded descriptors of one parameter, for the most recent tensors."""

    def __init__(self, describe: Callable[[torch.Tensor], Any], meta: Any) -> None:
        self._describe = describe
        self._meta = meta
        #: Tensor maps by address and strides.
        self.kept: OrderedDict[tuple[Any, ...], _TensorMap] = OrderedDict()

    def __call__(self, t: torch.Tensor) -> _TensorMap:
        key = (t.data_ptr(), t.stride())
        encoded = self.kept.get(key)
        if encoded is None:
            if len(self.kept) >= _TENSOR_MAPS_KEPT:
                # In one step: another thread may add a map between two steps of an iterator.
                self.kept.popitem(last=False)
            encoded = self.kept[key] = _TensorMap(_encode(self._describe(t), self._meta))
        return encoded


class _TensorMap(tuple[Any, ...]):
    """An encoded descriptor, as :func:`_encode` returns it."""

    __slots__ = ()


def _without_constants(src: ASTSource) -> Any:
    """The part of ``src`` that Triton's launcher uses, without constants. Otherwise it would parse
    a None for each, about 20 per kernel; and it is compiled and cached by its signature, which more
    kernels then share."""
    typed = {name: kind for name, kind in src.signature.items() if kind != "constexpr"}
    return SimpleNamespace(fn=src.fn, name=src.name, signature=typed, constants={})


def _low_level(run: Any, *, described: bool) -> Any:
    """Triton's C launch function; None if its argument order, which varies by release, is unknown,
    or the launch needs more than it."""
    if not tested():
        return None
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return None
    if not (hasattr(run, "launch_cooperative_grid") and hasattr(run, "launch_pdl")):
        return None
    if not (hasattr(run, "kernel_signature") or triton.__version__.startswith("3.6.")):
        return None
    low = getattr(run, "launch", None)
    if described and low is not None:
        # Inside the wrapper that encodes descriptors; ours are already encoded.
        low = inspect.getclosurevars(low).nonlocals.get("launcher")
    return low


def _direct(compiled: CompiledKernel, low: Any, device: int) -> tuple[str, dict[str, Any]]:
    """Source that only launches the compiled handle, with placeholders for grid, arguments and the
    prefix of its names, and the values of these names.

    Args:
        low: The C function of the installed Triton; without it the launcher object's call is used
            (0.6 µs more). An untested release uses Triton's public ``compiled[grid]``.
    """
    if not tested():
        return "{_}compiled[({grid})]({arguments})", {
            "compiled": compiled,
            "current_device": compat.current_device,
            "device": device,
            "guard": torch.cuda.device,
        }
    run = compiled.run
    first = "{grid}, {_}stream_of({_}device), {_}function"
    flags = "{_}cooperative, {_}pdl"
    nones = ", ".join(["None"] * 5)
    if low is None:
        template = f"{{_}}run({first}, {{_}}metadata, None, None, None, {{arguments}})"
    elif hasattr(run, "kernel_signature"):  # Triton 3.7
        template = (
            f"{{_}}low({first}, {flags}, {{_}}metadata, {nones}, {{_}}annotations, "
            "{_}kernel_signature, ({arguments},))"
        )
    else:  # Triton 3.6
        template = (
            f"{{_}}low({first}, {flags}, None, None, {{_}}metadata, None, None, None, "
            "{arguments})"
        )
    return template, {
        "annotations": getattr(run, "arg_annotations", 0),
        "cooperative": getattr(run, "launch_cooperative_grid", False),
        "current_device": compat.current_device,
        "device": device,
        "function": compiled.function,
        "guard": torch.cuda.device,
        "kernel_signature": getattr(run, "kernel_signature", 0),
        "low": low,
        "metadata": compiled.packed_metadata,
        "pdl": getattr(run, "launch_pdl", False),
        "run": run,
        "stream_of": compat.current_stream,
    }


def _encode(descriptor: Any, meta: Any) -> Any:
    """The C launcher's arguments for a descriptor: its tensor map, shape and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, meta)
