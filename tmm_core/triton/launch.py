"""Launches a compiled Triton kernel at almost no host cost.

``kernel[grid](…)`` derives device, stream, specialisation, options and metadata on every call (10.6
µs on an H200's host); calling the compiled handle takes 3. So a kernel is compiled from an explicit
signature (:mod:`tmm_core.triton.compile`), and the launch keeps the handle.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
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
from tmm_core.triton.releases import CCall, c_call, called_as_known, encode, load_launchers_apart
from tmm_core.triton.residency import even_share, spread

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
        blocks: The number of blocks of each launch, if it overlaps the previous launch.
        options: ``num_warps``, ``num_stages``, ``launch_pdl``, ``maxnreg``.

    Raises:
        Exception: What Triton raises when it cannot compile or load the kernel.
    """

    #: Compiled kernels, shared by all launches of a process: problems with the same specialisation
    #: share a handle.
    _compiled: ClassVar[dict[tuple[Any, ...], CompiledKernel]] = {}
    #: Held while compiling a kernel, so that a tuner's threads compile none twice.
    _compiling: ClassVar[dict[tuple[Any, ...], threading.Lock]] = {}
    #: Held while loading a kernel, by the types of its arguments. Triton 3.6 compiles a C launcher
    #: for them, which takes up to 2 s on a busy host.
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
        blocks: int | None = None,
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
            resident = blocks and even_share(blocks, index)
            key = (
                fn,
                index,
                resident,
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
                        if resident:
                            spread(compiled, index, resident)
                        self._compiled[key] = compiled
            self.compiled = compiled
            # Empty if Triton unpacks descriptors instead of encoding them.
            meta = getattr(compiled.metadata, "tensordesc_meta", None) or []
            low = c_call(compiled.run, described=bool(meta))
            if low is not None and meta:
                described = [n for n in fn.arg_names if types.get(n, "").startswith("tensordesc")]
                self._maps = dict(zip(described, meta, strict=True))
            # Constants are passed as None in Triton's order of arguments.
            reduced = "constexpr" not in compiled.src.signature.values()
            self._parameters = self._given if reduced else list(fn.arg_names)
            self._template, self.namespace = _direct(compiled, low, index)
        #: Makes a tensor an argument of :attr:`call`: Triton's C function would take longer to read
        #: the address. The interpreter takes the tensor itself.
        self.address: Callable[[Any], Any] = (
            (lambda t: t) if self.compiled is None else torch.Tensor.data_ptr
        )
        #: The launch function, called with ``(gx, gy, gz, *arguments)``, for warm paths.
        self.call: Callable[..., None] = self._write_call()

    def _compile(
        self, src: ASTSource, index: int, edits: tuple[str, ...], options: Mapping[str, Any]
    ) -> CompiledKernel:
        compiled = compile_for(_target(index), src, edits=edits, **options)
        if compiled.metadata.target.backend == "cuda" and called_as_known(_launcher_class()):
            compiled.src = _without_constants(src)
        load_launchers_apart(_launcher_class())
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
        """Return a function from a tensor to the argument for the ``tensordesc`` parameter
        ``name``.

        Triton encodes a tensor map for every descriptor of every launch. The returned function
        caches the maps of the last tensors, so that a warm launch encodes none.

        Args:
            name: A parameter whose type is ``tensordesc<…>``.
            describe: Returns the tensor's descriptor, which may depend on address and strides, but
                on nothing else that changes between calls.
        """
        return TensorMaps(describe, self._maps[name]) if name in self._maps else describe

    def text(self, prefix: str, grid: Iterable[str], places: Mapping[str, str]) -> str:
        """Return the source of one launch, for :func:`launcher`.

        Args:
            prefix: The prefix of the names in :attr:`namespace`.
            grid, places: Expressions for the grid and the run-time arguments.
        """
        arguments = (places.get(name, "None") for name in self._parameters)
        return self._template.format(_=prefix, grid=", ".join(grid), arguments=", ".join(arguments))

    def guard(self, prefix: str, again: str) -> str:
        """Return the statement that runs ``again`` on the launch's device if that is not
        current."""
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
        namespace |= {"TensorMap": _TensorMap, "encode": encode}
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
            encoded = self.kept[key] = _TensorMap(encode(self._describe(t), self._meta))
        return encoded


class _TensorMap(tuple[Any, ...]):
    """An encoded descriptor, as the C launch function takes it."""

    __slots__ = ()


def _launcher_class() -> type:
    """Return the class of the current driver's launcher objects."""
    return triton.runtime.driver.active.launcher_cls  # type: ignore[no-any-return]


def _without_constants(src: ASTSource) -> Any:
    """``src`` for Triton's launcher, without constants. The launcher would parse a None for each,
    about 20 per kernel. Triton 3.6 compiles a launcher per signature, and more kernels share a
    signature without constants."""
    reduced = copy.copy(src)
    reduced.signature = {name: kind for name, kind in src.signature.items() if kind != "constexpr"}
    reduced.constants = {}
    return reduced


def _direct(compiled: CompiledKernel, low: CCall | None, device: int) -> tuple[str, dict[str, Any]]:
    """Return source that only launches the compiled handle, with placeholders for grid, arguments
    and the prefix of its names; and the values of these names.

    Args:
        low: The call of the C function of the installed Triton. Without it the launcher object is
            called, which takes 0.6 µs more. If a later release changes the arguments of that
            object, the handle itself is called, which is public.
    """
    values = {
        "current_device": compat.current_device,
        "device": device,
        "guard": torch.cuda.device,
    }
    if not called_as_known(type(compiled.run)):
        return "{_}compiled[({grid})]({arguments})", {"compiled": compiled, **values}
    values |= {
        "function": compiled.function,
        "metadata": compiled.packed_metadata,
        "stream_of": compat.current_stream,
    }
    if low is not None:
        return f"{{_}}low({low.arguments})", {"low": low.low, **low.values, **values}
    first = "{grid}, {_}stream_of({_}device), {_}function, {_}metadata"
    return f"{{_}}run({first}, None, None, None, {{arguments}})", {"run": compiled.run, **values}
