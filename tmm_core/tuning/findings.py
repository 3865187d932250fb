"""Collects the findings of a tuning that no record holds: untried kernels and plugins' faults.

They are reported once the record is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from tmm_base.guards import chain

from tmm_core.errors import ConfigError, UnsupportedProblemError, name_of, warn, warn_of_plugin
from tmm_core.registry.places import place_of
from tmm_core.registry.query import CheckedKernel
from tmm_core.registry.registry import Source
from tmm_core.spec.kernel import Kernel
from tmm_core.tuning.untried import KernelVersion, Obstacle
from tmm_core.verify.environment_faults import Cause, read

#: The order of causes in reports: the first is the one to repair.
CAUSES: tuple[Cause, ...] = get_args(Cause)
#: Exceptions of Triton that mean that a config does not fit, by name.
_DOES_NOT_FIT = ("OutOfResources",)

#: Maximum characters of a reason in a warning.
_SHOWN = 400

#: The reason in this process's warning about its environment; empty until it is issued.
_warned: set[str] = set()


@dataclass(eq=False)
class Findings:
    """The findings of one tuning."""

    #: The kernels that the environment left untried.
    left: dict[KernelVersion, Obstacle] = field(default_factory=dict)
    #: The untried kernels that were set aside, with a warning.
    reported: set[KernelVersion] = field(default_factory=set)
    #: Faults of kernels' own code by the kernels' sources: each kernel's name, and the reason, with
    #: the file and line that raised.
    faults: dict[Source, list[tuple[str, str]]] = field(default_factory=dict)
    #: Whether the record's winner was verified in every way of use.
    verified: bool = False

    def leave(self, kernel: Kernel[Any], left: Obstacle) -> None:
        """Note a kernel if the environment left some or all of its candidates untried."""
        name = kernel.name, kernel.version
        before = self.left.get(name)
        if before is None or CAUSES.index(left.cause) < CAUSES.index(before.cause):
            self.left[name] = left
        if isinstance(kernel, CheckedKernel) and kernel.fault is not None:
            self.reported.add(name)

    def blame(self, kernel: Kernel[Any], reason: str, raised: BaseException | None) -> None:
        """Note a fault of a kernel's own code."""
        source = kernel.source if isinstance(kernel, CheckedKernel) else Source(kernel.name)
        self.faults.setdefault(source, []).append((kernel.name, placed(kernel, reason, raised)))

    def report(self, about: object) -> None:
        """Issue one warning about the environment and one per distribution, once per process."""
        left = {name: why for name, why in self.left.items() if name not in self.reported}
        warn_of_environment(left, about)
        for source, faults in self.faults.items():
            kernel, reason = faults[0]
            message = f"kernel {kernel} failed in tuning {about}: {reason}"
            warn_of_plugin(source, message, more=len(faults) - 1)


def placed(kernel: Kernel[Any], reason: str, raised: BaseException | None) -> str:
    """Return a reason with the file and line in the kernel's code that raised."""
    place = None if raised is None else read(raised, "place")  # found by another process
    if not place or type(place) is not str:
        place = place_of(kernel, raised)
    return reason if not place or place in reason else f"{reason} ({place})"


def refuses(error: BaseException) -> bool:
    """Whether a kernel refuses a config by this exception, which is no fault."""
    return any(
        name_of(type(each)) in _DOES_NOT_FIT
        or issubclass(type(each), (UnsupportedProblemError, ConfigError))
        for each in chain(error)
    )


def warn_of_environment(
    left: Mapping[KernelVersion, Obstacle],
    about: object,
    causes: tuple[Cause, ...] = ("toolchain", "passing"),
) -> None:
    """Issue one warning per process about kernels that the environment left untried."""
    broken = {name: why for name, why in left.items() if why.cause in causes}
    if not broken or _warned:
        return
    first = min(broken, key=lambda name: CAUSES.index(broken[name].cause))
    _warned.add(broken[first].reason)
    names = sorted({name for name, _ in broken})
    more = f" and {len(names) - 1} more kernels" if len(names) > 1 else ""
    reason = " ".join(broken[first].reason.split())
    reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}…"
    once = "later" if broken[first].cause == "passing" else "when the toolchain changes"
    warn(
        f"this machine kept tmm from trying kernel {first[0]}{more} for {about}: "
        f"{reason}. Others answer, and it is tried again {once}. "
        f"Run `tmm doctor`, then `tmm tune`"
    )
