"""Verifies that a launcher is right in every way it is used.

A kernel that is right in one launch into a given output may be wrong without one, on its second
launch, or for inputs at another address. So a :class:`Verifier` launches as calls do: with and
without ``out``, on two sets of inputs that differ in address and strides, with special values, and
repeatedly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tmm_core.dispatch.fixture import Fixture
from tmm_core.dispatch.trial import Trial, WrongError
from tmm_core.spec.launcher import Launcher


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verification."""

    #: The largest error (:func:`verify.error`): NaN if an expected number is NaN or Inf, None if
    #: nothing was compared.
    error: float | None
    #: The fault, in one line; None: no fault.
    reason: str | None = None
    #: Nothing was launched for lack of memory, which is the reason.
    unknown: bool = False

    @property
    def ok(self) -> bool:
        return self.reason is None


class Verifier(Fixture):
    """Compares launchers of one problem with references that are computed once, on first use.

    If the memory is too small for the whole result, samples of rows and columns are compared and
    all other elements only have to be numbers; if it is too small for one set of inputs, verdicts
    are ``unknown``.
    """

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
        """Launch it in every way it is used, on the current stream, and report faults.

        Args:
            repeats: Number of repeated launches compared with the first, bit for bit if the kernel
                is ``deterministic``, else by their errors. n of them miss a fault that occurs once
                in twenty launches with a probability of 0.95ⁿ: 4.6 % for 60, 0.2 % for 120.
            baseline: It is BLAS, whose error is reported but not judged.
            brief: Only one launch without ``out`` and one with.
            slack: Factor on the tolerance.

        Raises:
            Exception: Whatever the launcher raises.
        """
        with torch.no_grad():
            sets = self.sets()
            if not sets:
                why = f"cannot be verified within {self.most / 2**20:.0f} MiB of memory"
                return Verdict(None, why, unknown=True)
            trial = Trial(self, launcher, deterministic, baseline, slack)
            reason, changed = None, ["not looked at"]
            try:
                try:
                    trial.once_each() if brief else trial.thoroughly(repeats)
                except WrongError as wrong:
                    reason = str(wrong)
                changed = list(dict.fromkeys(n for each in sets for n in each.checksums.changed()))
            finally:
                if changed:
                    self.release()  # overwritten inputs are of no use for the next
            if changed:
                reason = f"it wrote to its input {' and '.join(changed)}, or around it"
            return Verdict(trial.error, reason)
