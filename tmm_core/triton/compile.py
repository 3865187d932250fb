"""Compiles a Triton kernel from an explicit signature, which states constants, divisibility and
integer widths. The GPU need not be present."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tmm_core.spec.device import DeviceFingerprint
from tmm_core.triton.ptx import edited, marked
from tmm_core.triton.releases import options_for

_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
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
    """Return the source to compile: ``fn`` with every argument either typed or constant.

    Args:
        fn: A ``@triton.jit`` (or Gluon) function.
        types: Run-time arguments: ``"*bf16"``, ``"i32"``, ``"i64"``, ``"fp32"`` or a
            ``tensordesc<…>``.
        constants: All other arguments.
        divisible: Arguments known to be multiples of a number (bytes for pointers).

    Raises:
        TypeError: An argument of ``fn`` is in neither mapping, or in both.
    """
    hash_after_callees(fn, constants)
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


#: Held while hashing functions: another thread would use a hash that is not complete.
_hashing = threading.Lock()


def hash_after_callees(fn: Any, constants: Mapping[str, Any]) -> None:
    """Compute Triton's hashes of ``fn`` and of the functions among ``constants``, callees first.
    Call it before anything hashes a function of Triton's, as a dict does.

    Triton's own hash depends on what the process did before. It adds the constants of a callee only
    if the callee was hashed before. It sorts constants of one name by the addresses of the dicts
    that hold them. So a process would not find the kernels that another one compiled.
    """
    with _hashing:
        for each in (fn, *constants.values()):
            _hash_after_callees(each, ())


def _hash_after_callees(fn: Any, callers: tuple[Any, ...]) -> None:
    if not isinstance(fn, JITFunction) or fn.hash is not None:
        return
    if any(fn is caller for caller in callers):
        return
    callees = _callees(fn)
    for each in callees:
        _hash_after_callees(each, (*callers, fn))
    # The hash of a callee covers its constants. Triton compares them again when it launches ``fn``.
    constants = [(each, each.used_global_vals) for each in callees if each.hash is not None]
    for each, _ in constants:
        each.used_global_vals = {}
    try:
        fn.cache_key  # noqa: B018  # a property that computes it
    finally:
        for each, values in constants:
            each.used_global_vals = values
            fn.used_global_vals = {**fn.used_global_vals, **values}


def _callees(fn: JITFunction[Any]) -> list[Any]:
    """The functions of Triton's that ``fn`` reads: globals, closure variables and attributes of
    modules."""
    code = fn.fn.__code__
    read = [fn.fn.__globals__.get(name) for name in code.co_names]
    read += [cell.cell_contents for cell in fn.fn.__closure__ or ()]
    modules = [each for each in read if isinstance(each, ModuleType)]
    read += [getattr(module, name, None) for module in modules for name in code.co_names]
    return [each for each in read if isinstance(each, JITFunction)]


def compile_for(
    target: GPUTarget, src: ASTSource, *, edits: Sequence[str] = (), **options: Any
) -> CompiledKernel:
    """Compile for a GPU that need not be present, or find the kernel in Triton's cache. Threads may
    call it without a lock.

    Args:
        edits: Names of edits of its PTX (:mod:`tmm_core.triton.ptx`).
    """
    options = options_for(options)
    if not edits:
        return triton.compile(src, target=target, options=options)
    with edited(src.name, edits):
        return triton.compile(marked(src, edits), target=target, options=options)


def target_of(device: DeviceFingerprint) -> GPUTarget | None:
    """Triton's target for ``device``, which need not be present; None if it is not a GPU or its
    architecture is unknown."""
    if device.type != "cuda" or device.interpreted:
        return None
    if device.nvidia:
        return GPUTarget("cuda", device.sm, 32)
    if not device.arch:
        return None
    # Waves have 64 threads on GCN and CDNA, 32 on RDNA.
    return GPUTarget("hip", device.arch, 64 if device.arch.startswith("gfx9") else 32)
