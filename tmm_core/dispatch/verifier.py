"""Whether a launcher is right in every way it is used.

A kernel that is right in one launch into a given output may be wrong in each call that gives
none, on its second launch, or for inputs at another address. So a :class:`Verifier` launches as
calls do: with and without ``out``, on two sets of inputs that differ in address and in strides,
with special values among them, and over again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tmm_core.dispatch.fixture import Fixture, memory_limit
from tmm_core.dispatch.trial import Trial, WrongError
from tmm_core.spec.kernel import BASELINE, Config, Kernel, Launcher
from tmm_core.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification found."""

    #: The largest met (:func:`verify.error`): NaN where what should be a number is none, None
    #: where nothing was compared.
    error: float | None
    #: What is wrong, in one line; None: nothing.
    reason: str | None = None
    #: Nothing was launched, for want of memory: that is the reason.
    unknown: bool = False

    @property
    def ok(self) -> bool:
        return self.reason is None


class Verifier:
    """Holds launchers of one problem against references that are made once, on first use.

    Args:
        device: With its index, as tensors have it.
        memory_limit: Bytes that inputs, references, outputs and intermediates may take together,
            beside what a launcher allocates for itself; by default a quarter of the memory that
            is free, at most 4 GiB. Where it does not suffice for all of the result, samples of
            rows and columns are compared and all elements have to be numbers; where it does not
            suffice for one set of inputs, verdicts are ``unknown``.
        sampled: Samples, and one set of inputs, in any case.
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        *,
        memory_limit: int | None = None,
        sampled: bool = False,
    ) -> None:
        self.problem = problem
        self._device, self._limit, self._sampled = device, memory_limit, sampled
        self._fixture: Fixture | None = None
        self._inside: dict[int, Verifier] = {}

    def verdict(
        self,
        launcher: Launcher,
        *,
        repeats: int = 1,
        deterministic: bool = True,
        baseline: bool = False,
        brief: bool = False,
        slack: float = 1.0,
    ) -> Verdict:
        """Launch it in every way it is used, on the current stream, and say what is wrong.

        Args:
            repeats: So many launches on inputs it had before are compared with the first, bit
                for bit where the kernel is ``deterministic`` and by their errors where not. n of
                them miss what is wrong once in twenty launches with a probability of 0.95ⁿ:
                4.6 % for 60, 0.2 % for 120.
            baseline: It is BLAS, whose error is reported and is no verdict.
            brief: One launch without ``out`` and one with, no more.
            slack: Factor on the tolerance.

        Raises:
            Exception: Whatever the launcher raises.
        """
        with torch.no_grad():
            fixture = self._ready()
            sets = fixture.sets()
            if not sets:
                why = f"cannot be verified within {fixture.limit / 2**20:.0f} MiB of memory"
                return Verdict(None, why, unknown=True)
            trial = Trial(fixture, launcher, deterministic, baseline, slack)
            reason, changed = None, ["not looked at"]
            try:
                try:
                    trial.once_each() if brief else trial.thoroughly(repeats)
                except WrongError as wrong:
                    reason = str(wrong)
                changed = list(dict.fromkeys(name for each in sets for name in each.changed()))
            finally:
                if changed:
                    fixture.release()  # inputs that were overwritten are none for the next
            if changed:
                reason = f"it wrote to its input {' and '.join(changed)}, or around it"
            return Verdict(trial.error, reason)

    def inside(self, m: int) -> Verifier:
        """The verifier of this problem at another M of its bucket; the same one each time."""
        if m not in self._inside:
            other = self.problem.at(m)
            limit, sampled = self._limit, self._sampled
            self._inside[m] = Verifier(other, self._device, memory_limit=limit, sampled=sampled)
        return self._inside[m]

    def release(self) -> None:
        """Let go of all tensors; the next verdict makes others."""
        self._fixture = None
        for other in self._inside.values():
            other.release()

    def _ready(self) -> Fixture:
        if self._fixture is None:
            limit = memory_limit(self._device) if self._limit is None else self._limit
            self._fixture = Fixture(self.problem, self._device, limit, self._sampled)
        return self._fixture


def verify_inside(
    kernel: Kernel[Any], config: Config, verifier: Verifier, m: int, *, repeats: int = 1
) -> Verdict:
    """Bind and verify a candidate at another M of the bucket that ``verifier`` is of.

    What ``bind`` or a launch raises is the verdict's reason.
    """
    inside = verifier.inside(m)
    try:
        return inside.verdict(
            kernel.bind(inside.problem, config),
            repeats=repeats,
            deterministic=kernel.traits.deterministic,
            baseline=kernel.name == BASELINE,
        )
    except Exception as error:
        return Verdict(None, f"at M={m} it raised {type(error).__name__}: {error}")


def sampled_verdict(
    launcher: Launcher,
    problem: Problem,
    device: torch.device,
    *,
    memory_limit: int | None = None,
) -> Verdict:
    """One launch without ``out`` and one with, held against samples of rows and columns.

    For a first use: some 5 ms and 0.5 GB for 8192³ in bf16 on an H100, most of it the launches.

    Raises:
        Exception: Whatever the launcher raises.
    """
    verifier = Verifier(problem, device, memory_limit=memory_limit, sampled=True)
    return verifier.verdict(launcher, brief=True)
