"""Further ways in which a launcher is used: its other forms, under autocast, in two threads at
once, and on further inputs."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tmm_core.launch.fold import Fold
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.verify.checked_launch import CheckedLauncher
from tmm_core.verify.data_sets import InputSet
from tmm_core.verify.forms import WrongError, flattened, folded_of
from tmm_core.verify.further_inputs import Mode, Round, plans_of, restoring
from tmm_core.verify.guard_bands import in_class
from tmm_core.verify.ragged_inputs import Inputs, divided
from tmm_core.verify.two_threads import LEAST_TOGETHER, MOST_TOGETHER, Pace, launch_together

Tensor = torch.Tensor

#: Rounds of free launches by two threads.
ROUNDS_TOGETHER = 4
#: Seconds that a GPU may take for the launches of both threads in a round. 128 launches of each, of
#: 4096×4096×14336, take 0.18 s. A host submits them within 25 ms.
TOGETHER_ON_GPU = 0.004


class WaysOfUse(CheckedLauncher):
    """Further ways to launch a launcher; BLAS, which is not judged, has none. Methods raise
    :class:`WrongError` with the first fault."""

    #: The checks of the launcher's other forms, once they are made.
    _forms: list[WaysOfUse] | None = None

    def forms(self, limit: int | None = None) -> Steps[None]:
        """Launch the launcher's folded form on N-D operands of up to ``limit`` shapes."""
        bound, problem, of = self._bound, self._data.problem, self._data.sets()[0]
        for form in self.every_form()[1:]:
            form._try(of)
            yield ()
        if len(self.every_form()) == 1:
            return
        for given, shape in itertools.islice(folds(problem, of.inputs), limit):
            fold = Fold.of(given.a, given.b, given.residual, torch.Size(shape))
            if fold is not None:
                wrapped = fold.wrap(bound, given.a, given.b, given.residual)
                self._folded(of, given, wrapped, shape)
                yield ()

    def _folded(
        self, of: InputSet, given: Inputs, launcher: Launcher, shape: tuple[int, ...]
    ) -> None:
        def flat() -> Tensor:
            return flattened(given.launch(launcher, None), shape, self._data.problem)

        when = f", for operands of shapes {tuple(given.a.shape)} and {tuple(given.b.shape)}"
        self._try(of, when, form=flat)

    def every_form(self) -> list[WaysOfUse]:
        """Return these checks, and those of the launcher's other form if it has one."""
        if self._forms is None:
            data, self._forms = self._data, []
            if not (self._baseline or self._outputs or data.problem.groups) and data.allocates:
                folded = folded_of(self._bound, data.problem)
                if folded is not None:
                    form = type(self)(data, folded, self._deterministic, False, self._slack)
                    form.called = ", called with N-D operands"
                    self._forms.append(form)
        return [self, *self._forms]

    def modes(self) -> Steps[None]:
        """Launch in each mode of torch, without ``out`` and into an output. Under autocast, the
        operands and the result have the dtype to which it casts, so no cast is needed."""
        problem, of = self._data.problem, self._data.sets()[0]
        if self._baseline:
            return
        given: list[Mode] = ["grad mode", "no_grad"]
        allocating: list[Mode] = ["inference mode", "no_grad"] if self.called else []
        same = problem.a.dtype == problem.b.dtype == problem.out.dtype
        if same and problem.a.dtype in (torch.float16, torch.bfloat16):
            given = ["autocast", *given]
            allocating = ["autocast", "autocast in inference mode", *allocating]
        for mode in allocating:
            self._try(of, f", under {mode}", mode=mode)
            yield ()
        for mode in given:
            self._try(of, f" of its out, under {mode}", into=self._data.out(0), mode=mode)
            yield ()

    def rounds(self, limit: int | None = None) -> Steps[None]:
        """One launch on each of the data's further inputs, or on ``limit`` of them, in each
        form."""
        if self._baseline or not (plans := plans_of(self._data)[:limit]):
            return
        self._check_inputs()  # before they are rewritten
        yield ()
        with restoring(self._data):
            for plan in plans:
                each = Round(self._data, plan)
                yield ()
                each.refer()
                forms = self.every_form()
                for form in forms[:1] if plan.of_values else forms:
                    yield ()
                    with torch.inference_mode(plan.mode == "inference mode"):
                        form._launched(each)
                yield ()
                if changed := each.changed():
                    names = " and ".join(changed)
                    raise WrongError(f"it wrote to its input {names}, or around it{each.called}")

    def _launched(self, of: Round) -> None:
        launch = functools.partial(self._try, of, mode=of.plan.mode, nonfinite=of.plan.nonfinite)
        launch()
        if (out := of.out()) is not None:
            launch(", of the out it was given", into=out)
            if not out.intact():
                raise WrongError(f"it wrote outside the out it was given{of.called}{self.called}")

    def together(self) -> Steps[None]:
        """Launch on both sets from two threads at once, on two streams of a GPU."""
        data = self._data
        if self._baseline or len(data.sets()) < 2:
            return
        paces: list[Pace] = ["free"] * ROUNDS_TOGETHER
        if data.problem.device.interpreted:
            _interpret_one_at_a_time()  # a launch has too many lines
        else:
            paces = ["lines", "lines", "launches", *paces]
        most = self._most_together() if data.device.type == "cuda" else MOST_TOGETHER
        ways = [(self, pace, not data.allocates) for pace in paces]
        if data.allocates:
            ways += [(self, paces[0], True)]
            ways += [(form, paces[0], False) for form in self.every_form()[1:]]
        for form, pace, into in ways:
            yield ()
            launcher: Any = self._outputs.apart if self._outputs else form._launcher
            for of, made in launch_together(data, launcher, pace, most, into):
                when = ", launched by two threads at once"
                result, given = made if self._outputs else (made, ())
                form._check_form(result)
                form._compare(of, result, when)
                if self._outputs is not None:
                    faults = self._outputs.faults(of.expected, result, given, once=True)
                    self._check_outputs(faults, when)

    def _most_together(self) -> int:
        """Return the number of launches of each thread that the GPU completes within
        :data:`TOGETHER_ON_GPU`. A host submits long launches faster than the GPU runs them."""
        of, device = self._data.sets()[0], self._data.device
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        self._launch(of, repeated=True)
        torch.cuda.synchronize(device)
        seconds = 2 * (time.perf_counter() - begun)
        return max(LEAST_TOGETHER, min(MOST_TOGETHER, int(TOGETHER_ON_GPU / seconds)))


@functools.cache
def _interpret_one_at_a_time() -> None:
    """Serialise launches in Triton's interpreter, whose state is global."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    executor = getattr(interpreter, "GridExecutor", None)
    if executor is None:
        return
    call, lock = executor.__call__, threading.RLock()

    @functools.wraps(call)
    def serialised(*arguments: Any, **keywords: Any) -> Any:
        with lock:
            return call(*arguments, **keywords)

    executor.__call__ = serialised


def folds(problem: Problem, inputs: Inputs) -> Iterator[tuple[Inputs, tuple[int, ...]]]:
    """Yield the inputs in the shapes of N-D calls, with the shape of the result."""
    m, n, batch = problem.m, problem.n, problem.batch
    if not m or not n or not batch:
        return
    whole = m if batch == 1 else batch
    part = next((d for d in range(2, math.isqrt(whole) + 1) if whole % d == 0), whole)
    if batch != 1:
        yield inputs, (batch, m, n)
        for outer in ((1, batch), (part, batch // part)):
            yield divided(inputs, outer, ("a", "b", "residual")), (*outer, m, n)
        return
    for lead in dict.fromkeys([(part, m // part), (1, m), (1, 1, m), (1, part, 1, m // part)]):
        given = divided(inputs, lead, ("a", "residual"))
        yield given, (*lead, n)
        if lead == (part, m // part) and part < m:
            # Leading dimensions in another order, as after a transpose.
            swapped = inputs.a.new_empty((m // part, part, *inputs.a.shape[1:])).transpose(0, 1)
            if in_class(swapped.flatten(0, 1), problem.a):
                yield replace(given, a=swapped.copy_(given.a)), (*lead, n)
        if lead == (1, m):
            # Rows with gaps in one dimension: a kernel that flattens them itself gets copies.
            part, rest = (2, m // 2) if m % 2 == 0 else (1, m)
            apart = inputs.a.new_empty((part, rest + 1, *inputs.a.shape[1:]))[:, :rest]
            if in_class(apart.flatten(0, 1), problem.a):
                given = divided(inputs, (part, rest), ("a", "residual"))
                yield replace(given, a=apart.copy_(given.a)), (part, rest, n)
    if m == 1:
        residual = None if inputs.residual is None else inputs.residual[0]
        yield replace(inputs, a=inputs.a[0], residual=residual), (n,)
