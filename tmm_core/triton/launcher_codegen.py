"""Writes the launcher of a kernel: one function that allocates the output and makes the kernel's
launches, with everything that the problem fixes inlined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tmm_core import compat
from tmm_core.launch.codegen import address, written
from tmm_core.launch.fold import Fold
from tmm_core.spec.arguments import LAUNCHED, LAUNCHED_PARTS, keywords, launch_parameters
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.operand import grouped_strides
from tmm_core.triton.launch import Grid, Launch, TensorMaps

Tensor = torch.Tensor


@dataclass(frozen=True)
class Described:
    """A ``tensordesc`` argument: a tensor of the call and its descriptor.

    Attributes:
        tensor: ``"a"``, ``"b"``, ``"residual"``, ``"out"``, ``"workspace"``.
        describe: Returns the tensor's descriptor; it may depend on address and strides.
    """

    tensor: str
    describe: Callable[[Tensor], Any]


#: The value of a run-time argument: a number fixed by the problem, ``"alpha"``, a tensor's name for
#: its address, ``("a", 0)`` for a tensor's stride, or a tensor's descriptor. A function is called
#: for every launch.
Argument = int | str | tuple[str, int] | Described | Callable[[], Any]


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
    """The :data:`~tmm_core.Launcher` of a kernel that consists of these launches in sequence. It
    allocates the output if none is given.

    It is generated as source with every constant inlined: between the call and Triton's C function
    there is no loop, tuple or further call of tmm.

    Args:
        steps: At least one, all on one device.
        shape, dtype: The output's. An output that is allocated here is row-major; the output of a
            ragged problem is padded (:func:`grouped_strides`).
        workspace: Elements and dtype of scratch memory, if any: the tensor ``"workspace"``. Every
            call allocates its own, since two threads may launch at once.
        extras: Names of the further tensors of a ragged problem (:attr:`tmm_core.Groups.given`).
            A plain problem may have parts of stored operands instead.
        outputs: The number of auxiliary outputs: the tensors ``"output_0"`` and so on.
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

    def function(
        shape: Sequence[int], out: Iterable[str], known: Iterable[str], more: Mapping[str, Any]
    ) -> Launcher:
        """Return the launcher for an output of ``shape``, which ``out`` allocates, and tensors with
        ``known`` strides."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        if "offs" in extras:
            strides = grouped_strides(shape, dtype)
        namespace = names.namespace | {"shape": tuple(shape), "strides": strides, **more}
        given = [f"output_{i} = outputs[{i}]" for i in range(outputs)]
        more_given, handed = (", outputs=()", ", outputs=outputs") if outputs else ("", "")
        again = f"run({', '.join(LAUNCHED)}{keywords(extras or LAUNCHED_PARTS)}{handed})"
        lines = [
            first.guard(_prefix(0), again), *given, *out, *scratch, *names.preparation(known),
            *calls, "return out",
        ]  # fmt: skip
        taken = ", ".join((*LAUNCHED, *extras)) if extras else launch_parameters()
        return written("run", taken + more_given, lines, namespace)  # type: ignore[no-any-return]

    def folded(
        fold: Fold, a: Tensor, b: Tensor, residual: Tensor | None, by_views: Launcher
    ) -> Launcher | None:
        """The launcher for N-D tensors without views: kernels use only a tensor's address, which a
        view shares, and strides, which are known. A view is made only to build a descriptor, which
        is then cached."""
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
            f"    return by_views({', '.join(LAUNCHED)}{keywords(names.parts)})",
            new_out,
            "out_stride = out_flat",
        ]
        return function(fold.shape, lines, flat, more)

    lines = [
        "if out is None:",
        f"    {new_out}",
        "    out_stride = strides",
        "else:",
        "    out_stride = out.stride()",
    ]
    return Bound(function(shape, lines, (), {}), folded)


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

    @property
    def parts(self) -> list[str]:
        """The parts of stored operands that the launches take."""
        return [name for name in LAUNCHED_PARTS if name in self._addresses]

    def folds(self, fold: Fold) -> bool:
        """Whether the launches can use the caller's extras in place. Extras of a batch may have to
        be repeated. Otherwise launches must not read an extra's strides."""
        read = self._strided if fold.batch is None else self._addresses
        return read.keys().isdisjoint(LAUNCHED_PARTS)

    def preparation(self, known: Iterable[str]) -> Iterator[str]:
        """Yield the statements that come before the launches.

        Args:
            known: Tensors whose strides are not read.
        """
        for t in self._strided:
            if t in known:
                yield f"{t}_stride = {t}_flat"
            elif t != "out":
                yield f"{t}_stride = {t}.stride()"
        for t in self._addresses:
            # The interpreter takes the tensor itself.
            yield address(t) if self._compiled else f"{t}_ptr = {t}"

    def invocation(self, index: int, step: Step) -> str:
        """Return the statement that makes a launch."""
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
    """Return the prefix of names for one of several launches."""
    return f"_{index}_"
