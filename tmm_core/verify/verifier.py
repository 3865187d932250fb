"""Verifies that a launcher is right in every way it is used.

A kernel that is right in one launch into a given output may be wrong without one, on its second
launch, or for inputs at another address. So a :class:`Verifier` launches as calls do: with and
without ``out``, on sets of inputs that differ in values, address and strides, in torch's modes,
from two threads, with special values, and repeatedly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.verify.checked_launch import WrongError
from tmm_core.verify.data_sets import Fixture, InputSet
from tmm_core.verify.guard_bands import same_bits
from tmm_core.verify.nonfinite import planted
from tmm_core.verify.ways_of_use import Ways

#: How much is verified. ``brief``: one launch without ``out`` and one with. ``first use``: also the
#: launcher's other forms, and values that change unseen. ``repeated``: both sets of inputs, special
#: values, and repeated launches. ``whole``: every way in which a launcher is used.
Extent = Literal["brief", "first use", "repeated", "whole"]


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
        launcher: Launcher | Bound,
        *,
        repeats: int = 1,
        deterministic: bool = True,
        baseline: bool = False,
        extent: Extent = "whole",
        slack: float = 1.0,
    ) -> Verdict:
        """Launch it in every way it is used, on the current stream, and report faults.

        Args:
            repeats: Number of repeated launches compared with the first, bit for bit if the kernel
                is ``deterministic``, else by their errors. n of them miss a fault that occurs once
                in twenty launches with a probability of 0.95ⁿ: 4.6 % for 60, 0.2 % for 120.
            baseline: It is BLAS, whose error is reported but not judged.
            extent: How much to verify.
            slack: Factor on the tolerance.

        Raises:
            Exception: Whatever the launcher raises.
        """
        with torch.inference_mode(False), torch.no_grad():
            sets = self.sets()
            if not sets:
                why = f"cannot be verified within {self.most / 2**20:.0f} MiB of memory"
                return Verdict(None, why, unknown=True)
            trial = _Trial(self, launcher, deterministic, baseline, slack)
            reason, changed = None, ["not looked at"]
            try:
                try:
                    trial.run(extent, repeats)
                except WrongError as wrong:
                    reason = str(wrong)
                changed = list(dict.fromkeys(n for each in sets for n in each.checksums.changed()))
            finally:
                if changed:
                    self.release()  # overwritten inputs are of no use for the next
            if changed:
                reason = f"it wrote to its input {' and '.join(changed)}, or around it"
            return Verdict(trial.error, reason)


class _Trial(Ways):
    """One launcher, verified to some extent."""

    def run(self, extent: Extent, repeats: int) -> None:
        """Verify to this extent.

        Raises:
            WrongError: What is wrong.
        """
        if extent == "brief" or extent == "first use":
            self.once_each()
            if extent == "first use":
                self.forms(self._fixture.sets()[0], 1)
                self.rounds(1)
            return
        self.thoroughly(repeats)
        if extent == "whole":
            self.forms(self._fixture.sets()[0])
            self.autocast(self._fixture.sets()[0])
            self.together()
            self.rounds()

    def once_each(self) -> None:
        """One launch without ``out`` and one with.

        Raises:
            WrongError: What is wrong.
        """
        first = self._fixture.sets()[0]
        if self._fixture.allocates:
            self._compare(first, self._launch(first, []), "")
            self._hold_free()
        self._into(first)

    def thoroughly(self, repeats: int) -> None:
        """Launch on both sets of inputs, with and without ``out``, with special values, and repeat.

        Raises:
            WrongError: What is wrong.
        """
        sets = self._fixture.sets()
        if self._fixture.allocates:
            first = self._allocating(sets[0], sets[-1])
            self._again(sets[0], first, repeats)
            del first
            self._hold_free()
        self._into(sets[0], sets[-1])
        if not self._fixture.allocates:
            self._again(sets[0], self._launch_into(self._fixture.out(0), sets[0]), repeats)
        if not self._baseline:
            self._special(sets[-1])

    def _allocating(self, one: InputSet, other: InputSet) -> torch.Tensor:
        """Launch twice without ``out``; returns the first result."""
        first = self._launch(one, [])
        self._compare(one, first, "")
        second = self._launch(other, [first], mode="inference mode")
        self._compare(other, second, ", on the second launch, on other inputs")
        self._compare(one, first, ", after another launch, which overwrote it")
        return first

    def _again(self, of: InputSet, first: torch.Tensor, repeats: int) -> None:
        """Repeat the same launch; one synchronization for all comparisons."""
        errors, same = [], []
        by_bits = self._deterministic and not self._baseline
        # A ring of buffers shows when more results are in use than it has.
        held, room = [first], self._fixture.limit // 32
        for _ in range(repeats):
            if self._fixture.allocates:
                result = self._launch(of, held, soil=False, watched=False, mode="no_grad")
                room -= result.untyped_storage().nbytes()
                held += [result] if room > 0 else []
            else:
                result = self._launch_into(self._fixture.out(1), of, watched=False, mode="no_grad")
            if by_bits:
                same.append(same_bits(result, first))
            else:
                errors.append(of.expected.error(result, self._fixture.at_once))
            del result
        for error in torch.stack(errors).tolist() if errors else ():
            self._accept(error, f", in one of {repeats} launches on inputs it had before")
        if same and not all(torch.stack(same).tolist()):
            raise WrongError(
                f"one of {repeats} launches on inputs it had before gave other bits, although "
                "the kernel is declared deterministic"
            )

    def _into(self, *sets: InputSet) -> None:
        """Launch into a given output, one for each of the sets."""
        outs = [self._fixture.out(which) for which in range(len(sets))]
        given = [
            self._launch_into(out, of, mode="inference mode")
            for out, of in zip(outs, sets, strict=True)
        ]
        for of, result in zip(sets, given, strict=True):
            self._compare(of, result, " of the out it was given")
        if not all(out.intact() for out in outs):
            raise WrongError("it wrote outside the out it was given")

    def _special(self, of: InputSet) -> None:
        for special in self._fixture.special():
            with planted(special.changes), self._no_warnings():
                if self._fixture.allocates:
                    result = self._launch(of, [], special=True)
                else:
                    result = self._launch_into(self._fixture.out(0), of, special=True)
            if (fault := special.fault(result)) is not None:
                raise WrongError(fault)
