"""Verifies that a launcher is right in every way it is used.

A kernel that is right in one launch into a given output may be wrong without one. It may be wrong
on its second launch, or for inputs at another address. So a :class:`Verifier` launches as calls do,
with and without ``out``, in torch's modes, from two threads, and repeatedly. Its sets of inputs
differ in values, address and strides, and contain NaN and Inf in some launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tmm_core.errors import error_text, reraise
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.steps import Steps, drained
from tmm_core.verify.data_sets import DataSets
from tmm_core.verify.environment_faults import Cause, cause_of
from tmm_core.verify.forms import WrongError
from tmm_core.verify.guard_bands import same_bits
from tmm_core.verify.nonfinite import planted
from tmm_core.verify.ways_of_use import WaysOfUse

#: Steps of repeated launches.
STEPS_REPEATED = 16

#: How much is verified. ``brief``: one launch without ``out`` and one with. ``forms``: also one of
#: each other form of the launcher. ``first use``: also N-D operands, and values that change unseen.
#: ``repeated``: both sets of inputs, NaN and Inf, and repeated launches. ``whole``: every way in
#: which a launcher is used.
Extent = Literal["brief", "forms", "first use", "repeated", "whole"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verification."""

    #: The largest error (:func:`tmm_core.verify.compare.error`): NaN if an expected number is NaN
    #: or Inf, None if nothing was compared.
    error: float | None
    #: The fault, in one line; None: no fault.
    reason: str | None = None
    #: Verification itself failed: memory was too small, or torch lacks an operation.
    unknown: bool = False
    #: The environment's fault that ended verification.
    cause: Cause | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None


class Verifier(DataSets):
    """Compares launchers of one problem with references that are computed once, on first use.

    If the memory is too small for the whole result, samples of rows and columns are compared, and
    all other elements only have to be numbers. If it is too small for one set of inputs, verdicts
    are ``unknown``. So they are if verification itself raises, once it has tried with less memory
    where an allocation failed.
    """

    def verdict(self, launcher: Launcher | Bound, **options: Any) -> Verdict:
        """All of :meth:`steps` at once."""
        return drained(self.steps(launcher, **options))

    def steps(
        self,
        launcher: Launcher | Bound,
        *,
        repeats: int = 1,
        deterministic: bool = True,
        baseline: bool = False,
        extent: Extent = "whole",
        slack: float = 1.0,
    ) -> Steps[Verdict]:
        """Launch it in every way it is used, on the current stream, and report faults.

        Args:
            repeats: Number of repeated launches compared with the first, bit for bit if it is
                ``deterministic``, else by their errors. A fault that occurs once in twenty
                launches passes n launches with a probability of 0.95ⁿ: 4.6 % for 60, 0.2 % for 120.
            deterministic: The launcher promises the same bits for the same inputs.
            baseline: The launcher is BLAS, whose error is reported but not judged.
            extent: How much to verify.
            slack: Factor on the tolerance.

        Raises:
            Exception: The launcher's exception.
        """
        checks = functools.partial(_Checks, self, launcher, deterministic, baseline, slack)
        while True:
            try:
                return (yield from _in_own_modes(self._verifying(checks, extent, repeats)))
            except Exception as error:
                if error is self.raised or not _is_own(error):
                    self.raised = None  # its frames refer to this verifier
                    raise
                reraise(error)
                cause = cause_of(error)
                if self.is_reduced or cause != "passing":
                    why = f"cannot be verified: {error_text(error)}"
                    return Verdict(None, why, unknown=True, cause=cause or "toolchain")
            self.reduce()

    def _verifying(
        self, made: Callable[[], _Checks], extent: Extent, repeats: int
    ) -> Steps[Verdict]:
        yield from self.making()
        if not self.sets():
            why = f"cannot be verified within {self.most / 2**20:.0f} MiB of memory"
            return Verdict(None, why, unknown=True)
        checks = made()
        reason, intact = None, False
        try:
            try:
                yield from checks.run(extent, repeats)
            except WrongError as wrong:
                reason = str(wrong)
            if changed := self.changed_inputs():
                reason = f"it wrote to its input {' and '.join(changed)}, or around it"
            intact = not changed
        finally:
            if not intact:
                self.release()  # the inputs may be overwritten
        return Verdict(checks.error, reason)


def _in_own_modes(steps: Steps[Verdict]) -> Steps[Verdict]:
    """The same steps without gradients. Between steps the caller's code runs, in its own modes."""
    while True:
        with torch.inference_mode(False), torch.no_grad():
            try:
                next(steps)
            except StopIteration as end:
                verdict: Verdict = end.value
                return verdict
        yield ()


def _is_own(error: Exception) -> bool:
    """Whether an exception that no launcher raised is verification's own. An error of the GPU may
    be an earlier launch's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, torch.AcceleratorError) and "CUDA error" not in str(error)


class _Checks(WaysOfUse):
    """The verification of one launcher; methods raise :class:`WrongError` with the first fault."""

    def run(self, extent: Extent, repeats: int) -> Steps[None]:
        """Verify to this extent."""
        sets = self._data.sets()
        if extent in ("brief", "forms", "first use"):
            if self._data.allocates:
                self._try(sets[0])
                yield ()
            self._given_outputs(1)
            if extent == "forms":
                for form in self.every_form()[1:]:
                    yield ()
                    self._data.poison_free_memory()
                    form._try(sets[0], repeated=True)
            if extent == "first use":
                yield from self.forms(1)
                yield from self.rounds(1)
            return
        yield from self._repeated(repeats)
        yield ()
        self._given_outputs(len(sets))
        if not self._baseline:
            yield from self._nonfinite()
        if extent == "whole":
            yield ()
            yield from self.forms()
            for form in self.every_form():
                yield from form.modes()
            yield from self.together()
            yield ()
            yield from self.rounds()

    def _repeated(self, repeats: int) -> Steps[None]:
        """Launch on both sets of inputs, and repeat the first launch."""
        one, other = self._data.sets()[0], self._data.sets()[-1]
        first = self._launch(one)
        self._compare(one, first)
        if self._data.allocates:
            second = self._launch(other, held=[first], mode="inference mode")
            self._compare(other, second, ", on the second launch, on other inputs")
            self._compare(one, first, ", after another launch, which overwrote it")
            del second
        yield ()
        yield from self._same_again(first, repeats)
        del first
        self._check_released()

    def _same_again(self, first: torch.Tensor, repeats: int) -> Steps[None]:
        """Repeat the same launch. All comparisons share one synchronisation."""
        of, errors, same = self._data.sets()[0], [], []
        # A launcher that returns buffers of a ring fails once more results are held than it has.
        held, room = [first], self._data.limit // 32
        for made in range(1, repeats + 1):
            into = None if self._data.allocates else self._data.out(1)
            result = self._launch(of, into=into, held=held, repeated=True, mode="no_grad")
            if into is None and (room := room - result.untyped_storage().nbytes()) > 0:
                held.append(result)
            if self._deterministic and not self._baseline:
                same.append(same_bits(result, first))
            else:
                errors.append(of.expected.error(result, self._data.at_once))
            del result
            if made % max(1, repeats // STEPS_REPEATED) == 0:
                yield ()
        for error in torch.stack(errors).tolist() if errors else ():
            self._accept(error, f", in one of {repeats} launches on inputs it had before")
        if same and not all(torch.stack(same).tolist()):
            raise WrongError(
                f"one of {repeats} launches on inputs it had before gave other bits, although "
                "the kernel is declared deterministic"
            )

    def _given_outputs(self, count: int) -> None:
        """Launch into ``count`` outputs, one for each set of inputs."""
        sets, outs = self._data.sets()[:count], [self._data.out(n) for n in range(count)]
        pairs = [*zip(sets, outs, strict=True)]
        given = [self._launch(of, into=out, mode="inference mode") for of, out in pairs]
        for of, result in zip(sets, given, strict=True):
            self._compare(of, result, " of the out it was given")
        if not all(out.intact() for out in outs):
            raise WrongError("it wrote outside the out it was given")

    def _nonfinite(self) -> Steps[None]:
        yield ()
        of = self._data.sets()[-1]
        finite = of.expected.is_finite(self._data.problem.out.dtype)
        for values in self._data.nonfinite():
            for form in self.every_form():
                yield ()
                usual = form._launch(of, repeated=True) if self._deterministic else None
                with planted(values.changes):
                    result = form._launch(of, nonfinite=True)
                if (fault := values.fault(result, finite, usual)) is not None:
                    raise WrongError(fault + form.called)
                del usual, result
            yield ()
