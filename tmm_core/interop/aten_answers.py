"""Chooses who answers torch's own products while :func:`tmm_core.enable` is in force.

The choice is made at the first call of a key, and replayed by :mod:`tmm_core.interop.aten_entries`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tmm_core import dispatch, settings
from tmm_core.errors import (
    CacheMissError,
    ConfigError,
    SettingsError,
    TmmError,
    UnknownNameError,
    UnsupportedProblemError,
    error_message,
    error_text,
    reraise,
    warn,
)
from tmm_core.interop.host_bound import Pace
from tmm_core.launch import grouped_call as launch_grouped
from tmm_core.launch import warm
from tmm_core.launch.collector import garbage_kept
from tmm_core.launch.nesting import launching
from tmm_core.launch.plan import Choice, Plan
from tmm_core.spec.arguments import Arguments, GroupedArguments
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem

Tensor = torch.Tensor

#: Seconds for which the answer of a product that is being tuned in the background is replayed. Then
#: a kernel is chosen again, which in every call would cost too much host time.
RETRY = 0.02


#: Errors that are raised to the caller: invalid settings.
USER_ERRORS = (CacheMissError, ConfigError, SettingsError, UnknownNameError)


@dataclass(slots=True)
class Tally:
    """The number of an operator's calls that one kernel answered, and the µs of GPU time that they
    saved, whether or not the GPU was the limit."""

    calls: int = 0
    saved_us: float = 0.0


@dataclass(slots=True, eq=False)
class Answer:
    """The kernel that answers the calls of one key.

    Attributes:
        launch: The chosen kernel's launcher; None: torch's own kernel.
        as_bias: Whether the summand of the product is a bias; otherwise it is a residual.
        until: The time at which an answer that does not last is chosen again.
    """

    kernel: str = BASELINE
    choice: Choice | None = None
    problem: Problem | None = None
    launch: Callable[..., Tensor] | None = None
    as_bias: bool = False
    saves_us: float = 0.0
    tally: Tally | None = None
    until: float = 0.0

    def count(self, pace: Pace, operand: Tensor) -> None:
        """Count a call that the kernel answers."""
        tally = self.tally
        assert tally is not None
        tally.calls += 1
        tally.saved_us += self.saves_us
        pace.calls = calls = pace.calls + 1
        if calls >= pace.next:
            pace.look(operand)


#: The answers by torch's own kernel: to calls of the model, and to calls that a kernel or its
#: verification makes, which are not counted.
THROUGH, INSIDE = Answer(), Answer()

#: Answers by keys, which begin with the operator, or with a part that begins with it.
answers: dict[tuple[Any, ...], Answer] = {}
#: Answers that are chosen again after ``RETRY`` seconds.
passing: dict[tuple[Any, ...], Answer] = {}
#: The first parts of keys whose calls torch answers for good.
through: dict[tuple[Any, ...], Answer] = {}
warm.TABLES += answers, passing, through


class Operator:
    """One aten operator that is answered: its name with the overload, like ``mm.out``, torch's own
    kernel, and the arguments of :func:`tmm_core.enable`.

    Attributes:
        tallies: Tallies by the kernel's name.
        passed: Calls that torch's kernel answered.
        slowed: Calls among them that the host limited and that did not wait for a choice.
        saved_us: GPU time that kernels saved while the GPU was the limit.
        declined: Why the last call that a forced or recorded kernel did not answer went to torch.
        library: Holds the registration of the operator's entry; None: it is not registered.
        left: Why the operator is no longer answered; empty while it is.
    """

    def __init__(
        self,
        name: str,
        torchs: Any,
        only: Callable[[Problem], bool] | None,
        on_cache_miss: settings.OnCacheMiss,
        pace: Pace,
        renew: Callable[[], object],
    ) -> None:
        self.name, self.only, self.on_cache_miss = name, only, on_cache_miss
        self.torchs: Callable[..., Any] = torchs.call_boxed
        self.pace, self._renew = pace, renew
        self.tallies: dict[str, Tally] = {}
        self.passed, self.slowed, self.saved_us = 0, 0, 0.0
        self.declined, self.left = "", ""
        self.library: Any = None
        self._warned = False
        #: ``passed`` and the tallies' sum at the last :meth:`settle`.
        self._settled = 0, 0.0

    def leave(self, why: str) -> None:
        """Restore torch's kernel, for the reason :attr:`left`."""
        self.left = why
        if self.library is not None:
            self.library._destroy()
            self.library = None

    def renewed(self, error: RuntimeError) -> bool:
        """Whether a call failed because :attr:`torchs` belongs to a library that was removed, as
        by the end of a mode that replaces products. Then :attr:`torchs` becomes the kernel that
        the library had replaced."""
        removed = "has been invalidated" in error_message(error)  # torch's words
        if removed:
            self._renew()
        return removed

    def count(self, operand: Tensor) -> None:
        """Count a call that torch's kernel answers."""
        self.passed += 1
        pace = self.pace
        pace.calls = calls = pace.calls + 1
        if calls >= pace.next:
            pace.look(operand)

    def settle(self) -> None:
        """Count the calls since the last time by what limits them now."""
        (passed, saved), pace = self._settled, self.pace
        self._settled = now, all_saved = self.passed, sum(t.saved_us for t in self.tallies.values())
        if pace.gpu:
            self.saved_us += all_saved - saved
        if pace.host and not pace.chose:
            self.slowed += now - passed

    def first(
        self,
        key: tuple[Any, ...],
        call: Arguments | GroupedArguments | None,
        wrap: Callable[[Any], Callable[..., Tensor]] | None = None,
    ) -> Answer:
        """Choose the answer of a new key, which later calls replay.

        Args:
            call: The call of tmm's operator; None: there is none, and torch answers.
            wrap: Makes a launcher from a plan; by default the plan's own launcher is used.

        Raises:
            CacheMissError: ``on_cache_miss="error"`` and no record.
            SettingsError, UnknownNameError, ConfigError: The settings are not usable.
        """
        drops = warm.drops
        if settings.current().nested:
            return _keep(key, INSIDE, drops)
        if call is None:
            return _keep(key, THROUGH, drops)
        if (answer := passing.get(key)) is not None and time.monotonic() < answer.until:
            return answer
        try:
            capturing = call.a.is_cuda and torch.cuda.is_current_stream_capturing()
            with garbage_kept() if capturing else nullcontext():
                return self._chosen(key, call, wrap, drops)
        except BaseException as error:
            reraise(error)
            if issubclass(type(error), USER_ERRORS):
                raise
            if issubclass(type(error), (_LeftError, UnsupportedProblemError)):
                if not isinstance(error, _LeftError):
                    self.declined = str(error)
                return _keep_for_good(key, drops)
            if not self._warned:
                self._warned = True
                warn(
                    f"torch answers a call of {self.name}, and others that fail likewise: choosing "
                    f"a kernel raised {error_text(error)}"
                )
        return _keep(key, THROUGH, drops)

    def _chosen(self, key: Any, call: Any, wrap: Any, drops: int) -> Answer:
        if (outer := launching()) is not None:
            warm.nest(outer)
            return INSIDE
        self.pace.chose = True
        current = settings.current()
        if current.on_cache_miss == "tune":
            current = settings.changed(current, on_cache_miss=self.on_cache_miss)
        plan = warm.make_plan(call, warm.epilogue_of(""), current, self._problem_of, waits=False)
        lasting, capturing = plan.choice.lasting, plan.problem.capturing
        saved_us = _saved_us(plan)
        if saved_us is None:
            if plan.kernel != BASELINE:
                self.declined = f"torch answers {plan.problem}: {plan.kernel} loses in steady state"
            if capturing:
                return THROUGH
            return _keep_for_good(key, drops) if lasting else _keep_for_now(key, Answer(), drops)
        launch = plan.launcher if wrap is None else wrap(plan)
        tally = self.tallies.setdefault(plan.kernel, Tally())
        made = plan.kernel, plan.choice, plan.problem
        answer = Answer(*made, launch, plan.problem.bias is not None, saved_us, tally)
        if capturing:  # which restricts the choice
            return answer
        return (_keep if lasting else _keep_for_now)(key, answer, drops)

    def _problem_of(self, call: Any, epilogue: Any, current: settings.Settings) -> Any:
        """Return the problem of a call. Leave problems to torch that ``only`` excludes, and calls
        that tmm refuses: torch raises its own errors for these."""
        describe: Any = warm.describe if isinstance(call, Arguments) else launch_grouped.describe
        try:
            problem, fold = describe(call, epilogue, current)
        except (RuntimeError, ValueError, TypeError) as error:
            reraise(error)
            raise _LeftError from error
        if self.only is not None and not self.only(problem):
            raise _LeftError
        return problem, fold

    def failed(self, key: tuple[Any, ...], plan: Answer, error: BaseException) -> None:
        """Quarantine the kernel of an answer that raised, so that torch's kernel answers instead;
        or raise ``error``, if the caller should see it."""
        if not warm.quarantine(plan, error):
            raise error
        answers.pop(key, None)
        passing.pop(key, None)


class _LeftError(TmmError):
    """``only`` leaves a problem to torch."""


def _saved_us(plan: Plan) -> float | None:
    """Return the µs that a call of ``plan`` saves; None if BLAS is at least as fast in a model."""
    if plan.kernel == BASELINE:
        return None
    from tmm_core.dispatch import saving  # with the dispatcher, which a plan needed

    of = dispatch.default_dispatcher(), plan.problem, plan.choice
    return None if saving.loses_in_steady_state(*of) else saving.saving_us(*of)


def _keep(key: tuple[Any, ...], answer: Answer, drops: int) -> Answer:
    """Replay an answer, unless plans were dropped more than ``drops`` times by now."""
    warm.keep(answers, key, answer, drops)
    return answer


def _keep_for_good(key: tuple[Any, ...], drops: int) -> Answer:
    """Let torch answer from now on, because no kernel is faster, or none may answer."""
    if isinstance(key[0], tuple):
        warm.keep(through, key[0], THROUGH, drops)
    return _keep(key, THROUGH, drops)


def _keep_for_now(key: tuple[Any, ...], answer: Answer, drops: int) -> Answer:
    answer.until = time.monotonic() + RETRY
    warm.keep(passing, key, answer, drops)
    return answer
