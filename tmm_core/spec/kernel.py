"""The interface of kernels that are dispatched, tuned, verified, cached and explained."""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from tmm_core.errors import ConfigError
from tmm_core.spec.anatomy import Anatomy, Resources
from tmm_core.spec.code import code_version, is_own
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.supports import Supports


@dataclass(frozen=True, slots=True)
class Traits:
    """A kernel's promises, which are matched with a call's requirements.

    Args:
        deterministic: The same inputs give the same bits in every run.
        batch_invariant: With one config, a row of the output has the same bits however
            many rows are computed with it.
        capture_safe: May be launched under CUDA-graph capture once bound.
    """

    deterministic: bool = True
    batch_invariant: bool = False
    capture_safe: bool = True


class _AsRead:
    """Keeps the fields of a config as they were first read. They are in a slot, since kernels pass
    ``vars(config)`` on."""

    __slots__ = ("as_read",)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)  # to pickle the slot, one would have to set it in a frozen dataclass


@dataclass(frozen=True, kw_only=True)
class Config(_AsRead):
    """One point of a kernel's search space. Subclass it as a frozen, keyword-only dataclass with
    fields of type ``int``, ``float``, ``bool`` or ``str``; check bounds in ``__post_init__`` and
    raise ``ValueError`` for configs that the kernel cannot run."""

    @property
    def assumes(self) -> tuple[str, ...]:
        """The caller's promises that this config relies on, by the names of settings: it is used
        only if the caller made them. Empty by default; ``"static_weights"`` is the only one."""
        return ()

    def unmet_promises(self, problem: Problem) -> list[str]:
        """The promises in :attr:`assumes` that the caller of ``problem`` has not made."""
        return [name for name in self.assumes if getattr(problem, name, False) is not True]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls: type[C], doc: Mapping[str, Any]) -> C:
        """Parse a config from untrusted JSON.

        Raises:
            ConfigError: Unknown or missing fields, a wrong type, or a value out of bounds.
        """
        types = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := sorted(set(doc) - set(fields)):
            raise ConfigError(f"{cls.__name__}: unknown {unknown}; fields are {sorted(fields)}")
        for name, value in doc.items():
            # isinstance would accept a bool for an int.
            if type(value) is not types[name] and not (types[name] is float and type(value) is int):
                raise ConfigError(
                    f"{cls.__name__}: {name} must be {types[name].__name__}, got {value!r}"
                )
        try:
            return cls(**doc)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{cls.__name__}: {error}") from None

    def __str__(self) -> str:
        return config_text(self.to_json())


def config_text(values: Mapping[str, Any]) -> str:
    """A config in a line, without the fields whose value is an empty text: they are off.

    >>> config_text({"BLOCK_M": 128, "early": "", "FLATTEN": True})
    'BLOCK_M=128 FLATTEN=True'
    """
    return " ".join(f"{name}={value}" for name, value in values.items() if value != "")


C = TypeVar("C", bound=Config)


#: Whether :meth:`Kernel.configs` leaves out configs that are unlikely to win, to save tuning time.
#: An exhaustive search sets it to false; a kernel that limits its search space then yields all
#: configs.
SEARCH_LIMITED: ContextVar[bool] = ContextVar("tmm_search_limited", default=True)


class Kernel(abc.ABC, Generic[C]):
    """One implementation of matmul. Stateless: all state belongs to launchers.

    Subclasses set ``name`` (unique among all plugins, ``"package.kernel"``), ``supports``,
    ``config_type`` and ``traits`` and implement the three abstract methods below.
    """

    name: ClassVar[str]
    #: The problems that it serves; all others are declined automatically.
    supports: ClassVar[Supports]
    traits: ClassVar[Traits] = Traits()
    config_type: ClassVar[type[Config]] = Config

    @functools.cached_property
    def version(self) -> str:
        """A version that changes whenever results or speed may, so that only edited kernels are
        timed again. The default is a digest of all files of the packages that define the class, its
        base classes and its config. A version that a class states is combined with that digest. The
        version of a class in no file is valid only in this process. tmm's own kernels state
        versions; a test compares them with digests of PTX
        (``tests/plugins/ptx_digests.json``)."""
        if is_own(type(self)):
            raise TypeError(f"{type(self).__qualname__} states no version")
        return code_version(type(self), self.config_type)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Why this kernel cannot serve ``problem``; empty if it can. The reasons are the fields
        that ``supports`` does not declare, else what ``declines`` yields. Do not override this
        method."""
        return self.supports.reasons_against(problem) or list(self.declines(problem))

    def declines(self, problem: Problem) -> Iterable[str]:
        """Why this kernel cannot serve a problem that ``supports`` admits: reasons for which
        :class:`Supports` has no field. A kernel declines by yielding a reason, not by raising."""
        return ()

    @abc.abstractmethod
    def configs(self, problem: Problem) -> Iterable[C]:
        """The search space, already limited to configs that fit the device."""

    @abc.abstractmethod
    def default_config(self, problem: Problem) -> C:
        """A good config, without measuring."""

    @abc.abstractmethod
    def bind(self, problem: Problem, config: C) -> Launcher | Bound:
        """Compile for ``problem`` and return the launcher, optionally as a :class:`Bound`.

        Raises:
            Exception: Any failure; it costs this candidate, not the call.
        """

    def compile(self, problem: Problem, config: C) -> None:
        """Compile for the device that ``problem`` names, without using a GPU, and store the result
        where :meth:`bind` finds it, such as a disk cache.

        It is called before ``bind``, in another process. That process has no CUDA context, and is
        killed if it takes too long. The default does nothing, and ``bind`` compiles.

        Raises:
            Exception: Any failure; it costs this candidate, which is then not bound.
        """

    def arithmetic(self, problem: Problem, config: C) -> str | None:
        """The name of the arithmetic that, together with the data, determines the bits of a row.
        Configs with equal names, of the same or different kernels, give a row the same bits, for
        any M and on any machine.

        In batch-invariant mode one arithmetic serves every M of a weight. If several configs share
        it, each M can use the fastest of them. The default gives each config an arithmetic of its
        own, named after the kernel, its version and the architecture. ``None``: with this config
        the bits depend on M, and the mode excludes it.
        """
        if not self.traits.batch_invariant:
            return None
        device = problem.device
        architecture = f"sm{device.sm}" if device.type == "cuda" else device.type
        return f"{architecture}-{self.name}@{self.version}({config})"

    def estimate_us(self, problem: Problem, config: C) -> float | None:
        """Expected GPU time in µs. It is compared with other kernels' estimates only if nothing was
        measured. ``None``: no estimate; the kernel is then never chosen untuned."""
        return None

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        """Bytes of scratch memory of the launcher; ties go to the smallest."""
        return 0

    def anatomy(self, problem: Problem, config: C) -> Anatomy | None:
        """How the work is divided, and the expected times, for ``tmm explain --why``."""
        return None

    def resources(self, problem: Problem, config: C) -> Sequence[Resources]:
        """The SM resources of each function that :meth:`bind` compiles, for ``tmm explain --why``.
        Compiles them for the problem's device, which need not be present.

        Raises:
            Exception: They cannot be determined.
        """
        raise NotImplementedError(f"{self.name} reports no resources")

    def __repr__(self) -> str:
        return f"<kernel {self.name} {self.version}>"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with one of its configs."""

    kernel: Kernel[Any]
    config: Config

    @property
    def fields(self) -> dict[str, Any]:
        """The config's fields. They are read once, where a plugin's kernel gives the config: its
        method may raise later, or return something else."""
        found: dict[str, Any] | None = getattr(self.config, "as_read", None)
        return self.config.to_json() if found is None else dict(found)

    def __str__(self) -> str:
        # Not the config's own text: a plugin may define it.
        return f"{self.kernel.name} {config_text(self.fields)}".rstrip()
