"""Verifies that a launcher is right in every way it is used.

A kernel that is right in one launch into a given output may be wrong without one, on its second
launch, or for inputs at another address. So a :class:`Verifier` launches as calls do: with and
without ``out``, on two sets of inputs that differ in address and strides, with special values, and
repeatedly.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tmm_core.dispatch import verify
from tmm_core.dispatch.fixture import Fixture, InputSet
from tmm_core.dispatch.guarded import Guarded, overlap, same_bits
from tmm_core.dispatch.special import planted
from tmm_core.dispatch.verify_outputs import Outputs
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
            trial = _Trial(self, launcher, deterministic, baseline, slack)
            reason, changed = None, ["not looked at"]
            try:
                try:
                    trial.once_each() if brief else trial.thoroughly(repeats)
                except _WrongError as wrong:
                    reason = str(wrong)
                changed = list(dict.fromkeys(n for each in sets for n in each.checksums.changed()))
            finally:
                if changed:
                    self.release()  # overwritten inputs are of no use for the next
            if changed:
                reason = f"it wrote to its input {' and '.join(changed)}, or around it"
            return Verdict(trial.error, reason)


class _WrongError(Exception):
    """What is wrong, in one line."""


class _Trial:
    """One launcher on a fixture's inputs.

    Args:
        deterministic: It promises the same bits for the same inputs.
        baseline: Its error is not judged.
        slack: Factor on the tolerance.
    """

    def __init__(
        self,
        fixture: Fixture,
        launcher: Launcher,
        deterministic: bool,
        baseline: bool,
        slack: float = 1.0,
    ) -> None:
        self._fixture, self._launcher = fixture, launcher
        self._outputs: Outputs | None = None
        if fixture.problem.epilogue.outputs:
            self._launcher = self._outputs = Outputs(fixture, launcher, deterministic, slack)
        self._deterministic, self._baseline = deterministic, baseline
        self._limit = verify.tolerance(fixture.problem) * slack
        self._errors: list[float] = []

    @property
    def error(self) -> float | None:
        """The largest error; NaN if there was one; None if nothing was compared."""
        undefined = [error for error in self._errors if error != error]
        return max(undefined or self._errors, default=None)

    def once_each(self) -> None:
        """One launch without ``out`` and one with.

        Raises:
            _WrongError: What is wrong.
        """
        first = self._fixture.sets()[0]
        if self._fixture.allocates:
            self._compare(first, self._launch(first, []), "")
        self._into(first)

    def thoroughly(self, repeats: int) -> None:
        """Launch on both sets of inputs, with and without ``out``, with special values, and repeat.

        Raises:
            _WrongError: What is wrong.
        """
        sets = self._fixture.sets()
        if self._fixture.allocates:
            first = self._allocating(sets[0], sets[-1])
            self._again(sets[0], first, repeats)
            del first
        self._into(sets[0], sets[-1])
        if not self._fixture.allocates:
            self._again(sets[0], self._launch_into(self._fixture.out(0), sets[0]), repeats)
        if not self._baseline:
            self._special(sets[-1])

    def _allocating(self, one: InputSet, other: InputSet) -> torch.Tensor:
        """Launch twice without ``out``; returns the first result."""
        first = self._launch(one, [])
        self._compare(one, first, "")
        second = self._launch(other, [first])
        self._compare(other, second, ", on the second launch, on other inputs")
        self._compare(one, first, ", after another launch, which overwrote it")
        return first

    def _again(self, of: InputSet, first: torch.Tensor, repeats: int) -> None:
        """Repeat the same launch; one synchronization for all comparisons."""
        errors, same = [], []
        by_bits = self._deterministic and not self._baseline
        for _ in range(repeats):
            if self._fixture.allocates:
                result = self._launch(of, [first], soil=False)
            else:
                result = self._launch_into(self._fixture.out(1), of)
            if by_bits:
                same.append(same_bits(result, first))
            else:
                errors.append(of.expected.error(result, self._fixture.at_once))
            del result
        for error in torch.stack(errors).tolist() if errors else ():
            self._accept(error, f", in one of {repeats} launches on inputs it had before")
        if same and not all(torch.stack(same).tolist()):
            raise _WrongError(
                f"one of {repeats} launches on inputs it had before gave other bits, although "
                "the kernel is declared deterministic"
            )

    def _into(self, *sets: InputSet) -> None:
        """Launch into a given output, one for each of the sets."""
        outs = [self._fixture.out(which) for which in range(len(sets))]
        given = [self._launch_into(out, of) for out, of in zip(outs, sets, strict=True)]
        for of, result in zip(sets, given, strict=True):
            self._compare(of, result, " of the out it was given")
        if not all(out.intact() for out in outs):
            raise _WrongError("it wrote outside the out it was given")

    def _special(self, of: InputSet) -> None:
        for special in self._fixture.special():
            with planted(special.changes), self._no_warnings():
                if self._fixture.allocates:
                    result = self._launch(of, [], special=True)
                else:
                    result = self._launch_into(self._fixture.out(0), of, special=True)
            if (fault := special.fault(result)) is not None:
                raise _WrongError(fault)

    @contextlib.contextmanager
    def _no_warnings(self) -> Iterator[None]:
        """Suppress warnings: Triton's interpreter uses numpy, which warns of planted NaN and
        Inf."""
        if not self._fixture.problem.device.interpreted:
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield

    def _launch(
        self, of: InputSet, held: list[torch.Tensor], soil: bool = True, special: bool = False
    ) -> torch.Tensor:
        """Without ``out``, while the results ``held`` are in use."""
        if soil:
            self._fixture.soil()
        result = of.inputs.launch(self._launcher, None)
        self._hold_to_form(result)
        if not (problem := self._fixture.problem).lies_as_made(result):
            raise _WrongError(
                f"it returned strides {result.stride()}; a call returns {problem.out_strides}"
            )
        for name, guard in of.checksums.memory.items():
            if overlap(result, guard.tensor):
                raise _WrongError(f"it returned memory of its input {name}")
        if any(overlap(result, other) for other in held):
            raise _WrongError("it returned memory that it had returned before and that is in use")
        self._hold_outputs(of, result, special)
        return result

    def _launch_into(self, memory: Guarded, of: InputSet, special: bool = False) -> torch.Tensor:
        """Into one of the fixture's outputs, full of NaN."""
        out = memory.tensor
        result = of.inputs.launch(self._launcher, out)
        self._hold_to_form(result)
        if (result.data_ptr(), result.stride()) != (out.data_ptr(), out.stride()):
            raise _WrongError("it returned something else than the out it was given")
        self._hold_outputs(of, out, special)
        return out

    def _hold_outputs(self, of: InputSet, result: torch.Tensor, special: bool) -> None:
        """What was written beside the result."""
        if self._outputs is None:
            return
        for error, fault in self._outputs.faults(None if special else of.expected, result):
            self._errors.append(error)
            if fault and not self._baseline:
                raise _WrongError(fault)

    def _hold_to_form(self, result: object) -> None:
        """Check shape, dtype and device against the problem."""
        problem, shape = self._fixture.problem, self._fixture.problem.out_shape
        if not isinstance(result, torch.Tensor):
            raise _WrongError(f"it returned {type(result).__name__} and not a tensor")
        if tuple(result.shape) != shape:
            raise _WrongError(f"it returned shape {tuple(result.shape)} and not {shape}")
        if result.dtype != problem.out.dtype:
            raise _WrongError(f"it returned {result.dtype} and not {problem.out.dtype}")
        device = self._fixture.sets()[0].inputs.a.device
        if result.device != device:
            raise _WrongError(f"its result is on {result.device} and not on {device}")

    def _compare(self, of: InputSet, result: torch.Tensor, when: str) -> None:
        self._accept(of.expected.error(result, self._fixture.at_once).item(), when)

    def _accept(self, error: float, when: str) -> None:
        self._errors.append(error)
        # BLAS is the reference for the others; torch's own error is not judged.
        if not error <= self._limit and not self._baseline:
            raise _WrongError(f"error {error:.3g} exceeds {self._limit:.3g}{when}")
