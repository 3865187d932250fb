"""The differences between Triton's releases, in one place.

Each difference is detected by the names that the installed Triton has, never by its version number.
So a later release is tried like the known releases. Its kernels are verified like all others, and
only kernels that do not compile or are wrong are set aside.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tmm_base.guards import suppress

# -- names in Gluon, which is experimental -------------------------------------------------------

_LANGUAGE = "triton.experimental.gluon.language"
_MEMORY = f"{_LANGUAGE}:shared_memory_descriptor"
_TMA = f"{_LANGUAGE}.nvidia.hopper.tma"
#: The module of each function of Gluon that kernels use, and its names, the latest first.
_GLUON = {
    # The barrier of all threads of a partition.
    "barrier": (_LANGUAGE, ("barrier", "thread_barrier")),
    # Bulk copies from and to global memory.
    "async_load": (_TMA, ("async_load", "async_copy_global_to_shared")),
    "async_store": (_TMA, ("async_store", "async_copy_shared_to_global")),
    # Another view of shared memory.
    "reinterpret": (_MEMORY, ("reinterpret", "_reinterpret")),
}


def __getattr__(name: str) -> Any:
    """A function of Gluon, which takes 0.2 s to import, and so is imported at its first use.

    Raises:
        ImportError: The installed Gluon has the function under none of the known names.
    """
    if name not in _GLUON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, names = _GLUON[name]
    owner = _owner(place)
    found = next((getattr(owner, each) for each in names if hasattr(owner, each)), None)
    if found is None:
        raise ImportError(f"{place.replace(':', '.')} has no {' or '.join(names)}")
    return found


def views_end_with_boxes() -> bool:
    """Whether Gluon refuses a view of shared memory that is larger than the viewed memory. Releases
    that name the function ``async_load`` do."""
    return hasattr(_owner(_TMA), "async_load")


def views_of_any_number() -> bool:
    """Whether Gluon can view a part whose number of boxes is no power of two. Releases that name
    the function ``reinterpret`` can. An older release that refuses larger views ends the process
    at such a part."""
    return hasattr(_owner(_MEMORY), "reinterpret")


def _owner(place: str) -> Any:
    module, _, inner = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, inner, None) if inner else found


# -- options of the compiler ----------------------------------------------------------------------


def options_for(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a compilation. The option that fuses a product and a sum into one
    instruction is on unless the environment sets it. Its default will be off in Triton 3.10. A
    release that does not know an option ignores it."""
    if "TRITON_DEFAULT_FP_FUSION" in os.environ:
        return given
    return {"enable_fp_fusion": True, **given}


# -- launches --------------------------------------------------------------------------------------


@functools.cache
def load_launchers_apart(launcher: type) -> None:
    """Make Triton 3.6 load each C launcher as a module with its own name.

    It compiles a launcher for each signature, and loads all of them as ``__triton_launcher``. If a
    module of this kind is loaded again, CPython returns the one object that ``sys.modules`` has
    under its name, with the contents replaced. So a thread that reads ``launch`` could get the
    launcher that another thread has just loaded. Then a kernel is launched with the argument types
    of another. Later releases have one launcher.

    Args:
        launcher: The class of launcher objects.
    """
    build = importlib.import_module("triton.runtime.build")
    load = getattr(build, "_load_module_from_path", None)
    if load is None or not hasattr(inspect.getmodule(launcher), "make_launcher"):
        return

    @functools.wraps(load)
    def load_apart(name: str, path: str) -> Any:
        # The C function that creates the module is named by what follows the last dot.
        return load(f"_{hashlib.sha256(path.encode()).hexdigest()[:16]}.{name}", path)

    build._load_module_from_path = load_apart  # type: ignore[attr-defined]


#: The parameters of a launcher object's call, which 3.6 takes as ``*args`` from the fifth on.
_CALLED_WITH = (
    "gridX", "gridY", "gridZ", "stream", "function",
    "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
)  # fmt: skip


def called_as_known(launcher: type) -> bool:
    """Whether the class of launcher objects takes the arguments that tmm passes, in its order."""
    parameters: list[inspect.Parameter] = []
    with suppress(AttributeError, TypeError, ValueError):
        parameters = list(inspect.signature(launcher.__call__).parameters.values())[1:]
    named = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    rest = [each for each in parameters if each.kind is not each.POSITIONAL_OR_KEYWORD]
    variadic = len(rest) == 1 and rest[0].kind is rest[0].VAR_POSITIONAL
    return variadic and len(named) >= 5 and named == _CALLED_WITH[: len(named)]


@dataclass(frozen=True)
class CCall:
    """A call of Triton's C launch function.

    Attributes:
        low: The function.
        arguments: Their source, with placeholders for the grid, the kernel's own arguments and the
            prefix of names.
        values: The values of the names that are the same for every launch.
    """

    low: Any
    arguments: str
    values: dict[str, Any]


def c_call(run: Any, *, described: bool) -> CCall | None:
    """How the launcher object ``run`` calls its C function. The order of that function's arguments
    varies by release, so ``run`` is called with a stand-in that records them.

    None if a launch needs more than one call, as with scratch memory, or passes an argument that is
    not recognised.

    Args:
        described: Whether the kernel takes tensor descriptors, which a function around the C
            function encodes; tmm passes them encoded.
    """
    low = getattr(run, "launch", None)
    if described and low is not None:
        low = inspect.getclosurevars(low).nonlocals.get("launcher")
    # AMD's has no launch_pdl.
    if low is None or not hasattr(run, "launch_pdl") or not called_as_known(type(run)):
        return None
    grid, own = (object(), object(), object()), (object(), object())
    places = {id(each): "{grid}" for each in grid[:1]} | {id(each): "" for each in grid[1:]}
    stream, function, metadata = object(), object(), object()
    places[id(stream)] = "{_}stream_of({_}device)"
    places[id(function)], places[id(metadata)] = "{_}function", "{_}metadata"
    places[id(None)] = "None"
    noted: list[tuple[Any, ...]] = []
    returned = 0
    with suppress(Exception):  # whatever a later release does with its arguments
        stand_in = SimpleNamespace(**{**vars(run), "launch": lambda *args: noted.append(args)})
        for _ in range(2):
            # Sizes of scratch memory are multiplied by the grid, which these objects refuse.
            type(run).__call__(stand_in, *grid, stream, function, metadata, None, None, None, *own)
            returned += 1
    ends = {_ending(arguments, own) for arguments in noted}
    if not returned == len(noted) == 2 or ends not in ({_AS_ONE}, {_SPREAD}):
        return None
    if not _holds(noted[0], grid):
        return None
    (end,) = ends
    first, again = (arguments[: -1 if end == _AS_ONE else -len(own)] for arguments in noted)
    # An argument that differs between two launches cannot be fixed.
    if not _same(first, again):
        return None
    values = {f"given{i}": each for i, each in enumerate(first) if id(each) not in places}
    texts = [places.get(id(each), f"{{_}}given{i}") for i, each in enumerate(first)]
    return CCall(low, ", ".join([*filter(None, texts), end]), values)


#: How the C function takes the kernel's own arguments: as one, or one by one.
_AS_ONE, _SPREAD = "({arguments},)", "{arguments}"


def _ending(arguments: tuple[Any, ...], own: tuple[Any, ...]) -> str:
    if arguments and isinstance(arguments[-1], (tuple, list)) and _same(arguments[-1], own):
        return _AS_ONE
    return _SPREAD if _same(arguments[-len(own) :], own) else ""


def _same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(x is y for x, y in zip(some, others, strict=True))


def _holds(arguments: tuple[Any, ...], grid: tuple[Any, ...]) -> bool:
    """Whether the grid is among the arguments, once and in one piece."""
    at = [i for i, each in enumerate(arguments) if any(each is one for one in grid)]
    return len(at) == 3 and _same(arguments[at[0] : at[0] + 3], grid)


def encode(descriptor: Any, meta: Any) -> Any:
    """The C launch function's arguments for a descriptor: its tensor map, shape and strides."""
    from triton.backends.nvidia import driver

    arguments = descriptor, meta, ()
    return driver.make_tensordesc_arg(*arguments[: _parameters(driver.make_tensordesc_arg)])


@functools.cache
def _parameters(encoder: Any) -> int:
    """The number of parameters of ``make_tensordesc_arg``: since 3.8 it also takes the launch's
    other arguments, and ignores them."""
    return len(inspect.signature(encoder).parameters)
