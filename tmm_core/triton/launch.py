"""Compiles a Triton kernel once, then launches its handle at almost no host cost.

``kernel[grid](…)`` derives device, stream, specialisation, options and metadata on every call (10.6
µs on an H200's host); calling the compiled handle takes 3. So a kernel is compiled from an explicit
signature, which states constants, divisibility and integer widths, and the launcher keeps the
handle.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tmm_core import compat
from tmm_core.launch.fold import Fold
from tmm_core.launch.source import Body, address, written
from tmm_core.spec.arguments import EXTRAS, LAUNCHED, keywords, launch_parameters
from tmm_core.spec.device import DeviceFingerprint, interpreting
from tmm_core.spec.kernel import Bound, Launcher
from tmm_core.spec.problem import grouped_strides
from tmm_core.triton.evict_first import hints, marked
from tmm_core.triton.interpreted import call_of
from tmm_core.triton.kept import compile_kept
from tmm_core.triton.releases import tested

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
    torch.int64: "i64",
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
    """The source to compile: ``fn`` with every argument either typed or constant.

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


def compile_for(
    target: GPUTarget, src: ASTSource, *, evict_first: bool = False, **options: Any
) -> CompiledKernel:
    """Compile for a GPU that need not be present, or find the kernel in Triton's cache. Thread-safe
    without a lock."""
    if not evict_first:
        return compile_kept(src, target, options)
    with hints(src.name):
        return compile_kept(marked(src), target, options)


def target_of(device: DeviceFingerprint) -> GPUTarget | None:
    """Triton's target for ``device``, which need not be present; None if it is not a GPU or its
    architecture is unknown."""
    if device.type != "cuda" or device.interpreted:
        return None
    if not device.cuda.startswith("hip"):
        return GPUTarget("cuda", device.sm, 32)
    if not device.arch:
        return None
    # Waves have 64 threads on GCN and CDNA, 32 on RDNA.
    return GPUTarget("hip", device.arch, 64 if device.arch.startswith("gfx9") else 32)


@functools.cache
def _target(device: int) -> GPUTarget:
    with torch.cuda.device(device):
        return triton.runtime.driver.active.get_current_target()


@dataclass(frozen=True)
class Described:
    """A ``tensordesc`` argument: a tensor of the call and its descriptor.

    Attributes:
        tensor: ``"a"``, ``"b"``, ``"residual"``, ``"out"``, ``"workspace"``.
        describe: Returns the tensor's descriptor; it may depend on address and strides.
    """

    tensor: str
    describe: Callable[[torch.Tensor], Any]


#: The value of a run-time argument: a number fixed by the problem; ``"alpha"``; the address of a
#: tensor, by its name; a tensor's stride, as ``("a", 0)``; its descriptor; or the result of a
#: function called for every launch.
Argument = int | str | tuple[str, int] | Described | Callable[[], Any]


class Launch:
    """A Triton kernel bound to its constants, ready to launch on the current stream.

    Call it with the grid and the run-time arguments in the order of ``fn``'s signature; tensors are
    passed as tensors (Triton's C launcher reads their addresses). It compiles at construction for a
    CUDA ``device``; with ``TRITON_INTERPRET=1`` or on a CPU it uses Triton's interpreter instead.

    Args:
        fn, types, constants, divisible: See :func:`source`.
        device: The device to launch on.
        evict_first: Add the ``evict_first`` hint to its bulk tensor loads.
        options: ``num_warps``, ``num_stages``, ``launch_pdl``, ``maxnreg``.

    Raises:
        Exception: What Triton raises when it cannot compile or load the kernel.
    """

    #: Compiled kernels, shared by all launches of a process: problems with the same specialisation
    #: share a handle.
    _compiled: ClassVar[dict[tuple[Any, ...], CompiledKernel]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    #: Held while compiling a kernel, so that a tuner's threads compile none twice.
    _compiling: ClassVar[dict[tuple[Any, ...], threading.Lock]] = {}

    def __init__(
        self,
        fn: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        *,
        device: torch.device,
        divisible: Mapping[str, int] | None = None,
        evict_first: bool = False,
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
            self.namespace = {"interpret": call_of(fn, self._given, constants)}
        else:
            index = device.index if device.index is not None else torch.cuda.current_device()
            key = (
                fn,
                index,
                tuple(types.items()),
                tuple(sorted(constants.items(), key=lambda item: item[0])),
                tuple(sorted((divisible or {}).items())),
                evict_first,
                tuple(sorted(options.items())),
            )
            compiled = self._compiled.get(key)
            if compiled is None:
                with self._compiling.setdefault(key, threading.Lock()):
                    compiled = self._compiled.get(key)
                    if compiled is None:
                        src = source(fn, types, constants, divisible)
                        compiled = self._compiled[key] = self._compile(
                            src, index, evict_first, options
                        )
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
        self, src: ASTSource, index: int, evict_first: bool, options: Mapping[str, Any]
    ) -> CompiledKernel:
        compiled = compile_for(_target(index), src, evict_first=evict_first, **options)
        if tested() and compiled.metadata.target.backend == "cuda":
            compiled.src = _without_constants(src)
        with torch.cuda.device(index), self._lock:
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


@dataclass(frozen=True)
class Step:
    """One launch of a call.

    Attributes:
        launch: The kernel.
        grid: Programs along x, y, z.
        arguments: The value of each of the kernel's run-time arguments.
    """

    launch: Launch
    grid: Grid
    arguments: Mapping[str, Argument]


def launcher(
    steps: Sequence[Step],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    workspace: tuple[int, torch.dtype] | None = None,
    extras: Sequence[str] = (),
    outputs: int = 0,
) -> Bound:
    """The :data:`~tmm_core.Launcher` of a kernel made of these launches in sequence: it allocates
    the output if none is given, and launches.

    It is generated as source with every constant inlined: between the call and Triton's C function
    there is no loop, tuple or further call of tmm.

    Args:
        steps: At least one, all on one device.
        shape, dtype: Of the output, which is row-major where it is made here, and of a ragged
            problem padded (:func:`grouped_strides`).
        workspace: Elements and dtype of scratch memory made anew for every call, if any: the
            tensor ``"workspace"``. Were it shared, the launches of two threads could mix.
        extras: Names of the tensors that a ragged problem has besides
            (:attr:`tmm_core.Groups.given`); a plain one may have scales.
        outputs: How many the problem's epilogue has: the tensors ``"output_0"`` and so on.
    """
    first = steps[0].launch
    compiled = first.compiled is not None
    names = _Names(compiled)
    calls = [names.invocation(index, step) for index, step in enumerate(steps)]
    make = "empty({0}, {1}, {2})" if compiled else "a.new_empty_strided({0}, {1}, dtype={2})"
    new_out = f"out = {make.format('shape', 'strides', 'dtype')}"
    scratch = []
    names.namespace |= {"dtype": dtype, "empty": compat.empty_strided_cuda}
    if workspace is not None:
        count, names.namespace["workspace_dtype"] = workspace
        scratch.append(f"workspace = {make.format((count,), (1,), 'workspace_dtype')}")

    def on_device(again: str) -> str:
        return first.guard(_prefix(0), again)

    def function(
        shape: Sequence[int], out: Iterable[str], known: Iterable[str], more: Mapping[str, Any]
    ) -> tuple[Launcher, Body | None]:
        """The launcher for an output of ``shape``, which ``out`` allocates, and tensors with
        ``known`` strides."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        if "offs" in extras:
            strides = grouped_strides(shape, dtype)
        namespace = names.namespace | {"shape": tuple(shape), "strides": strides, **more}
        given = [f"output_{i} = outputs[{i}]" for i in range(outputs)]
        more_given, handed = (", outputs=()", ", outputs=outputs") if outputs else ("", "")
        lines = [*given, *out, *scratch, *names.preparation(known), *calls, "return out"]
        run = written(
            "run",
            (", ".join((*LAUNCHED, *extras)) if extras else launch_parameters()) + more_given,
            [on_device(f"run({', '.join(LAUNCHED)}{keywords(extras or EXTRAS)}{handed})"), *lines],
            namespace,
        )
        return run, Body(on_device, tuple(lines), namespace) if compiled else None

    def folded(
        fold: Fold,
        a: torch.Tensor,
        b: torch.Tensor,
        residual: torch.Tensor | None,
        by_views: Launcher,
    ) -> Bound | None:
        """The launcher for N-D tensors without views: kernels use only a tensor's address, which a
        view shares, and strides, which are known. A view is made only to build a descriptor, as
        long as that is cached."""
        flat = fold.in_place(a, b, residual)
        if flat is None or not names.folds(fold):
            return None
        more: dict[str, Any] = {f"{name}_flat": t.stride() for name, t in flat.items()}
        more |= {"out_flat": torch.empty(fold.flat, device="meta").stride(), "by_views": by_views}
        for key, name in names.described.items():
            if name != "workspace":
                more[key] = _composed(names.namespace[key], fold.flattened(name))
        lines = [
            "if out is not None:",
            f"    return by_views({', '.join(LAUNCHED)}{keywords(EXTRAS)})",
            new_out,
            "out_stride = out_flat",
        ]
        return Bound(*function(fold.shape, lines, flat, more))

    lines = [
        "if out is None:",
        f"    {new_out}",
        "    out_stride = strides",
        "else:",
        "    out_stride = out.stride()",
    ]
    return Bound(*function(shape, lines, (), {}), folded)


def _composed(outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda t: outer(inner(t))


class _Names:
    """The names that a launcher's source refers to, collected as its launches need them."""

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        self._addresses: dict[str, None] = {}
        self._strided: dict[str, None] = {}
        self.namespace: dict[str, Any] = {}
        #: The tensor of each name that makes a descriptor.
        self.described: dict[str, str] = {}

    def folds(self, fold: Fold) -> bool:
        """Whether the launches can use the caller's extras in place: those of a batch may have to
        be repeated, and launches do not read their strides."""
        read = self._strided if fold.batch is None else self._addresses
        return read.keys().isdisjoint(EXTRAS)

    def preparation(self, known: Iterable[str]) -> Iterator[str]:
        """The statements that come before the launches.

        Args:
            known: Tensors whose strides are not read.
        """
        for t in self._strided:
            if t in known:
                yield f"{t}_stride = {t}_flat"
            elif t != "out":
                yield f"{t}_stride = {t}.stride()"
        for t in self._addresses:
            # The interpreter wants the tensor.
            yield address(t) if self._compiled else f"{t}_ptr = {t}"

    def invocation(self, index: int, step: Step) -> str:
        """The statement that makes a launch."""
        launch, prefix = step.launch, _prefix(index)
        for name, value in launch.namespace.items():
            self.namespace[prefix + name] = value
        places = {}
        for name, what in step.arguments.items():
            places[name] = self._place(prefix + name, launch, name, what)
        return launch.text(prefix, map(str, step.grid), places)

    def _place(self, key: str, launch: Launch, name: str, what: Argument) -> str:
        if isinstance(what, bool | int):
            return repr(int(what))
        if isinstance(what, str):
            if what == "alpha":
                return what
            self._addresses[what] = None
            return f"{what}_ptr"
        if isinstance(what, tuple):
            t, dimension = what
            self._strided[t] = None
            return f"{t}_stride[{dimension}]"
        if not isinstance(what, Described):
            self.namespace[key] = what
            return f"{key}()"
        t = self.described[key] = what.tensor
        maps = launch.tensor_map(name, what.describe)
        self.namespace[key] = maps
        if not isinstance(maps, TensorMaps):
            return f"{key}({t})"
        self.namespace[f"{key}_kept"] = maps.kept.get
        self._addresses[t] = None
        self._strided[t] = None
        return f"*({key}_kept(({t}_ptr, {t}_stride)) or {key}({t}))"


def _prefix(index: int) -> str:
    """The prefix of names for one of several launches."""
    return f"_{index}_"


#: A weight has one address, activations come from a few blocks of torch's allocator.
_TENSOR_MAPS_KEPT = 64


class TensorMaps:
    """Encoded descriptors of one parameter, for the most recent tensors."""

    def __init__(self, describe: Callable[[torch.Tensor], Any], meta: Any) -> None:
        self._describe = describe
        self._meta = meta
        #: By address and strides.
        self.kept: dict[tuple[Any, ...], _TensorMap] = {}

    def __call__(self, t: torch.Tensor) -> _TensorMap:
        key = (t.data_ptr(), t.stride())
        encoded = self.kept.get(key)
        if encoded is None:
            if len(self.kept) >= _TENSOR_MAPS_KEPT:
                self.kept.pop(next(iter(self.kept)), None)
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
