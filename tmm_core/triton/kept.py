"""Finds kernels that Triton compiled before, without Triton's slow key computation.

Triton's cache key hashes Triton itself, the source, the output of ``ptxas --version`` and the
options. The first and the third depend only on the installation, and take each process 262 ms on an
H200's host, so they are kept as notes in tmm's cache folder, keyed by the files' sizes and times.
Triton still hashes the source and the options, which identify the kernel. A wrong note leads to an
unknown key, and Triton then compiles or finds the kernel itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Mapping
from typing import Any

import triton
from tmm_cache import Notes, stamp
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_manager, triton_key

from tmm_core.errors import reraise
from tmm_core.triton.ptx import ordinary
from tmm_core.triton.releases import tested

#: A file changed within this many seconds may change again without a new mtime.
_SETTLED = 2.0

#: Subfolders of Triton that its hash of itself covers, and that hold the programs it runs.
_FOLDERS = ("compiler", "backends", "language", "runtime", "_C")
_SUFFIXES = (".py", ".so", ".pyd")
_PROGRAMS = "bin"


def compile_kept(src: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> CompiledKernel:
    """``triton.compile``, called only if the kernel is not found without it.

    Raises:
        Exception: What Triton raises when it cannot compile the kernel.
    """
    # Even so, notes are only made after a check against the key of a kernel that Triton compiled.
    notes = _notes() if tested() and target.backend == "cuda" and _ordinary() else None
    about = f"backend {target.arch}"
    if notes is not None:
        found = _found(src, target, options, notes.get("triton_key"), notes.get(about))
        if found is not None:
            return found
    compiled = triton.compile(src, target=target, options=dict(options))
    if notes is not None:
        itself, backend = triton_key(), make_backend(target).hash()
        # Only values that lead to Triton's own key.
        if _key(src, target, options, itself, backend) == compiled.hash:
            notes.add("triton_key", itself)
            notes.add(about, backend)
    return compiled


def warm() -> None:
    """Compute Triton's hash of itself ahead of time, which every compilation needs and which takes
    0.4 s."""
    triton_key()


def _ordinary() -> bool:
    """Whether no setting changes how Triton compiles, where it looks, or whom it notifies."""
    compilation, nvidia = knobs.compilation, knobs.nvidia
    return not (
        compilation.always_compile
        or compilation.override
        or compilation.dump_ir
        or compilation.use_ir_loc
        or compilation.listener
        or knobs.cache.manager_class
        or not ordinary()
        or nvidia.mock_ptx_version
        or any(name.startswith("TRITON_PTXAS") for name in os.environ)
    )


def _notes() -> Notes | None:
    """The notes for Triton's files as they are now; None where they just changed."""
    files = _files()
    now = time.time_ns()
    if any(isinstance(s[-1], int) and now - s[-1] < _SETTLED * 1e9 for s in files):
        return None
    return Notes("triton", [triton.__version__, files])


@functools.cache
def _files() -> list[Any]:
    # Read once: the process has imported this state.
    top = os.path.dirname(os.path.abspath(triton.__file__))
    found = []
    for folder in _FOLDERS:
        for path, _, names in os.walk(os.path.join(top, folder)):
            programs = os.path.basename(path) == _PROGRAMS
            found += [os.path.join(path, n) for n in names if programs or n.endswith(_SUFFIXES)]
    return stamp(found)


def _key(
    src: ASTSource, target: GPUTarget, options: Mapping[str, Any], itself: object, backend: object
) -> str:
    """The hash under which Triton keeps the kernel, given its hashes of itself and of the backend;
    an unknown one if these are not known."""
    parsed = make_backend(target).parse_options({**options, **src.parse_options()})
    variables = str(sorted(get_cache_invalidating_env_vars().items()))
    key = f"{itself}-{src.hash()}-{backend}-{parsed.hash()}-{variables}"
    return hashlib.sha256(key.encode()).hexdigest()


def _found(
    src: ASTSource, target: GPUTarget, options: Mapping[str, Any], itself: object, backend: object
) -> CompiledKernel | None:
    try:
        key = _key(src, target, options, itself, backend)
        group = get_cache_manager(key).get_group(f"{src.name[:150]}.json")
        compiled = CompiledKernel(src, group, key) if group else None
    except Exception as error:  # Triton will meet and report it too
        reraise(error)
        return None
    if compiled is None or compiled.metadata.hash != key or compiled.metadata.target != target:
        return None
    return compiled
