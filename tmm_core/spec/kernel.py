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
    """A kernel's promises. A kernel serves a call only if it promises what the call requires.

    Args:
        deterministic: The same inputs give the same bits in every run.
        batch_invariant: With one config, the bits of a row do not depend on the number of rows.
        capture_safe: Launches may be captured in CUDA graphs once the kernel is bound.
    """

    deterministic: bool = True
    batch_invariant: bool = False
    capture_safe: bool = True


class _AsRead:
    """Keeps the fields of a config as they were first read. The slot is not part of
    ``vars(config)``, which kernels pass on."""

    __slots__ = ("as_read",)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)  # to pickle the slot, one would have to set it in a frozen dataclass


@dataclass(frozen=True, kw_only=True)
class Config(_AsRead):
    """One point of a kernel's search space.

    A subclass is a frozen, keyword-only dataclass with fields of type ``int``, ``float``, ``bool``
    or ``str``. Its ``__post_init__`` raises ``ValueError`` for configs that the kernel cannot run.
    """

    @property
    def assumes(self) -> tuple[str, ...]:
        """The names of settings by which a caller must have promised what this config relies on.
        Empty by default. The only such setting is ``"static_weights"``."""
        return ()

    def unmet_promises(self, problem: Problem) -> list[str]:
        """Return the promises in :attr:`assumes` that the caller of ``problem`` has not made."""
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
    """Return a config as one line. A field with an empty text is off, and is left out.

    >>> config_text({"BLOCK_M": 128, "early": "", "FLATTEN": True})
    'BLOCK_M=128 FLATTEN=True'
    """
    return " ".join(f"{name}={value}" for name, value in values.items() if value != "")


C = TypeVar("C", bound=Config)


#: Whether :meth:`Kernel.configs` leaves out configs that are unlikely to win, to save tuning time.
#: An exhaustive search sets it to false. Kernels then yield all configs.
SEARCH_LIMITED: ContextVar[bool] = ContextVar("tmm_search_limited", default=True)


class Kernel(abc.ABC, Generic[C]):
    """One implementation of matmul. A kernel has no state: all state belongs to launchers.

    Subclasses set ``supports``, ``config_type``, ``traits`` and ``name``, which is unique among all
    plugins (``"package.kernel"``). They implement the three abstract methods below.
    """

    name: ClassVar[str]
    #: The problems that it serves; all others are declined automatically.
    supports: ClassVar[Supports]
    traits: ClassVar[Traits] = Traits()
    config_type: ClassVar[type[Config]] = Config

    @functools.cached_property
    def version(self) -> str:
        """A version that changes whenever results or speed may change. Only kernels with a new
        version are timed again.

        The default is a digest of all files of the packages that define the class, its base classes
        and its config. A version that a class states is combined with that digest. The version of a
        class without a file is valid only in this process. tmm's own kernels state their versions.
        A test compares these versions with digests of PTX (``tests/plugins/ptx_digests.json``).
        """
        if is_own(type(self)):
            raise TypeError(f"{type(self).__qualname__} states no version")
        return code_version(type(self), self.config_type)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return the reasons why this kernel cannot serve ``problem``; none if it can.

        The reasons are the problem's fields that ``supports`` does not declare. If it declares all
        of them, they are the reasons that ``declines`` yields. Do not override this method.
        """
        return self.supports.reasons_against(problem) or list(self.declines(problem))

    def declines(self, problem: Problem) -> Iterable[str]:
        """Yield reasons why this kernel cannot serve a problem that ``supports`` admits, if
        :class:`Supports` has no field for them. A kernel declines by yielding a reason, not by
        raising."""
        return ()

    @abc.abstractmethod
    def configs(self, problem: Problem) -> Iterable[C]:
        """Yield the search space: the configs that fit the device."""

    @abc.abstractmethod
    def default_config(self, problem: Problem) -> C:
        """Return a good config without measuring."""

    @abc.abstractmethod
    def bind(self, problem: Problem, config: C) -> Launcher | Bound:
        """Compile for ``problem`` and return the launcher, optionally as a :class:`Bound`.

        Raises:
            Exception: Any failure. The candidate is then not used; the call still succeeds.
        """

    def compile(self, problem: Problem, config: C) -> None:
        """Compile for the device that ``problem`` names, without using a GPU, and store the result
        where :meth:`bind` finds it, such as a disk cache.

        The call precedes ``bind``, in another process. The process has no CUDA context, and is
        killed if it takes too long. The default does nothing, and ``bind`` compiles.

        Raises:
            Exception: Any failure. The candidate is then not bound.
        """

    def arithmetic(self, problem: Problem, config: C) -> str | None:
        """Return the name of the arithmetic, which determines the bits of a row from its data.
        Configs with the same name give a row the same bits, for any M and on any machine. They may
        belong to different kernels.

        In batch-invariant mode one arithmetic serves every M of a weight. If several configs share
        it, each M can use the fastest of them. The default gives each config an arithmetic of its
        own, named after the kernel, its version and the architecture. ``None``: the bits depend on
        M, and the mode excludes this config.
        """
        if not self.traits.batch_invariant:
            return None
        device = problem.device
        architecture = f"sm{device.sm}" if device.type == "cuda" else device.type
        return f"{architecture}-{self.name}@{self.version}({config})"

    def estimate_us(self, problem: Problem, config: C) -> float | None:
        """Return the expected GPU time in µs. Estimates of kernels are compared only where nothing
        was measured. ``None``: no estimate, and the kernel is never chosen untuned."""
        return None

    def beside(self, problem: Problem) -> C | None:
        """Return a good config for a small product that runs beside other products, on other
        streams: each SM keeps room for their blocks. ``None``: there is none, and the fastest
        config for the product alone is used.

        A block that takes most of an SM's shared memory waits until the SM is empty. Then products
        run one after the other, on however many streams.
        """
        return None

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        """Return the bytes of the launcher's scratch memory. The candidate with the least wins
        among equally fast ones."""
        return 0

    def anatomy(self, problem: Problem, config: C) -> Anatomy | None:
        """Return how the work is divided, and expected times, for ``tmm explain --why``."""
        return None

    def resources(self, problem: Problem, config: C) -> Sequence[Resources]:
        """Return the SM resources of each function that :meth:`bind` compiles, for ``tmm explain
        --why``. Compiles the functions for the problem's device, which need not be present.

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
        """The config's fields, as read when a plugin's kernel gave the config. Its ``to_json`` may
        raise later, or return something else."""
        found: dict[str, Any] | None = getattr(self.config, "as_read", None)
        return self.config.to_json() if found is None else dict(found)

    def __str__(self) -> str:
        # Not the config's own text: a plugin may define it.
        return f"{self.kernel.name} {config_text(self.fields)}".rstrip()
