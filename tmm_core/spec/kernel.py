"""The spec an implementation meets to be dispatched, tuned, verified, cached and explained."""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch

from tmm_core.errors import ConfigError
from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.digest import digest
from tmm_core.spec.problem import Problem
from tmm_core.spec.supports import Supports

#: Name of the kernel that always can, and that every other has to beat.
BASELINE = "blas"


@dataclass(frozen=True, slots=True)
class Traits:
    """What a kernel promises; a call's requirements are held against these.

    Args:
        deterministic: Same inputs, same bits, run after run.
        batch_invariant: With one config, a row of the output has the same bits however
            many rows are computed with it.
        capture_safe: May be launched under CUDA-graph capture once bound.
        needs_workspace: Uses scratch memory besides the output.
    """

    deterministic: bool = True
    batch_invariant: bool = False
    capture_safe: bool = True
    needs_workspace: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """One point of a kernel's search space. Subclass as a frozen, keyword-only dataclass
    whose fields are ``int``, ``float``, ``bool`` or ``str``; check bounds in
    ``__post_init__`` and raise ``ValueError`` for what the kernel cannot run."""

    @property
    def assumes(self) -> tuple[str, ...]:
        """What this config relies on that only the caller can know, by the names of settings:
        where the caller has not said it, the config is not used. None by default;
        ``"static_weights"`` is the one there is."""
        return ()

    def unsaid(self, problem: Problem) -> list[str]:
        """Of :attr:`assumes` what the caller of ``problem`` has not said."""
        return [name for name in self.assumes if getattr(problem, name, False) is not True]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls: type[C], doc: Mapping[str, Any]) -> C:
        """Read a config back, trusting nothing.

        Raises:
            ConfigError: Unknown or missing fields, a wrong type, or out of bounds.
        """
        types = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := sorted(set(doc) - set(fields)):
            raise ConfigError(f"{cls.__name__}: unknown {unknown}; fields are {sorted(fields)}")
        for name, value in doc.items():
            # bool is an int to isinstance, never to a config.
            if type(value) is not types[name] and not (types[name] is float and type(value) is int):
                raise ConfigError(
                    f"{cls.__name__}: {name} must be {types[name].__name__}, got {value!r}"
                )
        try:
            return cls(**doc)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{cls.__name__}: {error}") from None

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.to_json().items())


C = TypeVar("C", bound=Config)


class Launcher(Protocol):
    """A kernel compiled for one problem and config: what the warm path calls.

    Operands are 2-D, or 3-D where the problem is batched, of the very shapes, dtypes and
    stride classes of the problem it was bound to. ``out`` is the destination (allocated by
    the launcher where ``None``) and is returned. Launches on the current stream of the
    current device, and does not synchronise.

    What a problem has besides follows by keyword, and only where it has it: ``scale_a`` and
    ``scale_b``, and ``outputs``, a tuple of what to write beside the result, contiguous: for each
    output of the epilogue ``[M]`` of rows, ``[N]`` of columns, ``[M, N]`` or a scalar. A kernel
    that does not declare such problems need not take them.
    """

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        alpha: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor: ...


class Called:
    """What a call runs is the instance's own function, not a method: one frame less."""

    __slots__ = ("__call__",)

    if TYPE_CHECKING:

        def __call__(self, *arguments: Any, **extras: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Bound(Called):
    """A launcher, and other ways to launch the same, which ``bind`` may return in place of the
    function alone. It is called as the launcher is.

    Args:
        run: The launcher.
        body: Its statements, for a plan to write out under its own checks
            (:class:`tmm_core.launch.source.Body`).
        folded: Given how N-D operands fold (:class:`tmm_core.launch.fold.Fold`), a, b and residual
            as the caller has them, of these very shapes and strides, and the launcher that hands
            on views of them, returns a launcher of the same products that does without; or None.
            Two views are 2 µs of a call whose kernel may take 3.
    """

    run: Launcher
    body: Any = None
    folded: Callable[..., Launcher | Bound | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__call__", self.run)

    @classmethod
    def of(cls, launcher: Launcher | Bound) -> Bound:
        """What ``bind`` returned, function or not."""
        return launcher if isinstance(launcher, Bound) else cls(launcher)


class Kernel(abc.ABC, Generic[C]):
    """One implementation of matmul. Stateless: everything hangs off a launcher.

    Subclasses set ``name`` (unique among all plugins, ``"package.kernel"``), ``supports``,
    ``config_type`` and ``traits`` and implement the three abstract methods below.
    """

    name: ClassVar[str]
    #: What it serves; every other problem is declined for it.
    supports: ClassVar[Supports]
    traits: ClassVar[Traits] = Traits()
    config_type: ClassVar[type[Config]] = Config

    @functools.cached_property
    def version(self) -> str:
        """Changes when results or speed may, so that an edited kernel is timed again and others
        are not: by default a digest of the code that ``bind`` and ``compile`` reach
        (:func:`tmm_core.spec.digest.digest`)."""
        return digest(type(self), self.config_type)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Why this kernel cannot serve ``problem``; empty: it can. Not to be overridden: what it
        does not declare in ``supports`` is a reason, and then what ``declines`` says.

        Raises:
            UnsupportedProblemError: The problem has a field that no kernel can answer for.
        """
        return self.supports.reasons_against(problem) or list(self.declines(problem))

    def declines(self, problem: Problem) -> Iterable[str]:
        """Why this kernel cannot serve a problem that ``supports`` admits: what
        :class:`Supports` has no field for. Never raises to decline."""
        return ()

    @abc.abstractmethod
    def configs(self, problem: Problem) -> Iterable[C]:
        """The search space, already pruned to what fits the device."""

    @abc.abstractmethod
    def default_config(self, problem: Problem) -> C:
        """A good guess without measuring."""

    @abc.abstractmethod
    def bind(self, problem: Problem, config: C) -> Launcher | Bound:
        """Compile for ``problem`` and return the warm-path callable, or it with more.

        Raises:
            Exception: Whatever went wrong; it costs this candidate, not the call.
        """

    def compile(self, problem: Problem, config: C) -> None:
        """Compile for the device that ``problem`` names, without touching a GPU, and leave it
        where :meth:`bind` finds it, such as a cache on disk.

        Called ahead of ``bind`` in another process, that holds no CUDA context and may be killed
        when it takes too long. By default does nothing: all compiling is ``bind``'s.

        Raises:
            Exception: Whatever went wrong; it costs this candidate, which is not bound then.
        """

    def arithmetic(self, problem: Problem, config: C) -> str | None:
        """The name of what the bits of a row depend on besides its data: two configs, of one
        kernel or of two, for which it is equal give a row the same bits, whatever the M of
        either problem and on whatever machine.

        In batch-invariant mode every M of a weight is served by one arithmetic, so kernels that
        know several configs to share one let each M have the fastest of these. By default each
        config has its own, named after the kernel, its version and the architecture. ``None``:
        with this config the bits depend on M, and it is not for that mode.
        """
        if not self.traits.batch_invariant:
            return None
        device = problem.device
        architecture = f"sm{device.sm}" if device.type == "cuda" else device.type
        return f"{architecture}-{self.name}@{self.version}({config})"

    def estimate_us(self, problem: Problem, config: C) -> float | None:
        """Expected GPU time in µs, compared with the other kernels' only where nothing was
        measured. ``None``: no idea; never chosen untuned."""
        return None

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        """Scratch memory the launcher holds; ties go to the smallest."""
        return 0

    def anatomy(self, problem: Problem, config: C) -> Anatomy | None:
        """How the work is laid out and what a model expects of it, for ``tmm explain --why``."""
        return None

    def resources(self, problem: Problem, config: C) -> Sequence[Resources]:
        """What each function that :meth:`bind` compiles takes of an SM; compiles them for the
        problem's device, which need not be there. For ``tmm explain --why``.

        Raises:
            Exception: Why that cannot be told.
        """
        raise NotImplementedError(f"{self.name} does not tell")

    def __repr__(self) -> str:
        return f"<kernel {self.name} {self.version}>"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with one of its configs."""

    kernel: Kernel[Any]
    config: Config

    def __str__(self) -> str:
        return f"{self.kernel.name} {self.config}".rstrip()


def _nothing() -> Any:
    return None


@dataclass(frozen=True)
class Deferred:
    """What ``tmm_kernels`` may return in place of a kernel.

    Attributes:
        name: The kernel's.
        load: Returns the kernel; called once, when it is asked for.
        files: Returns the paths of all that the kernel is made of. Another size or time of one,
            and it is asked anew.
        circumstances: Returns what else its version and its ``declines`` go by, besides
            the problem and tmm's own files: JSON.
    """

    name: str
    load: Callable[[], Kernel[Any]]
    files: Callable[[], Iterable[Path]]
    circumstances: Callable[[], Any] = _nothing
