"""Further ways in which a launcher is used: its other forms, under autocast, in two threads at
once, and on further inputs."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tmm_core.launch.fold import Fold
from tmm_core.launch.plan import Plan
from tmm_core.spec.arguments import PART, Arguments
from tmm_core.spec.launcher import Bound
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.verify.checked_launch import CheckedLauncher, WrongError
from tmm_core.verify.data_sets import InputSet
from tmm_core.verify.further_inputs import restoring, rounds_of
from tmm_core.verify.ragged_inputs import Inputs
from tmm_core.verify.two_threads import LEAST_TOGETHER, MOST_TOGETHER, Pace, launch_together

Tensor = torch.Tensor

#: Rounds of free launches by two threads.
ROUNDS_TOGETHER = 4
#: Seconds that a GPU may take for the launches of both threads in a round: 128 of each, of
#: 4096×4096×14336, take 0.18 s, and a host submits them within 25 ms.
TOGETHER_ON_GPU = 0.004


class WaysOfUse(CheckedLauncher):
    """Further ways to launch a launcher; BLAS, which is not judged, has none. Methods raise
    :class:`WrongError` with the first fault."""

    def forms(self, limit: int | None = None) -> None:
        """Launch the launcher's source as a plan calls it, and its folded form on N-D operands of
        up to ``limit`` shapes."""
        bound, problem, of = self._bound, self._data.problem, self._data.sets()[0]
        if self._baseline or self._outputs or not self._data.allocates or problem.groups:
            return
        if bound.body is not None:
            self._form(of, of.inputs, bound, None)
        if bound.folded is not None:
            for given, shape in itertools.islice(folds(problem, of.inputs), limit):
                fold = Fold.of(given.a, given.b, given.residual, torch.Size(shape))
                if fold is not None:
                    wrapped = fold.wrap(bound, given.a, given.b, given.residual)
                    self._form(of, given, wrapped, fold)

    def _form(self, of: InputSet, given: Inputs, launcher: Any, fold: Fold | None) -> None:
        problem, bound = self._data.problem, Bound.of(launcher)
        ways: list[Callable[[], Any]] = []
        if fold is not None:
            ways.append(lambda: given.launch(bound.run, None))
        if bound.body is not None:
            parts = {PART[(name[0], name[2:])].name: t for name, t in given.extras.items()}
            names = f"{problem.a.spelled},{problem.b.spelled}"
            call = Arguments(
                given.a, given.b, given.bias, given.residual, given.alpha,
                problem.epilogue.key, **parts, formats="" if names == "," else names,  # type: ignore[arg-type]
            )  # fmt: skip
            plan = Plan.of(problem, None, bound, call).ready(call)  # type: ignore[arg-type]
            ways.append(lambda: plan(given.a, given.b, given.bias, given.residual, **parts))
        shape = problem.out_shape if fold is None else tuple(fold.shape)
        when = f", for operands of shapes {tuple(given.a.shape)} and {tuple(given.b.shape)}"
        for way in ways:
            result = self._launch(of, form=functools.partial(self._flat, way, shape))
            self._compare(of, result, when)
            del result
            self._check_released()

    def _flat(self, way: Callable[[], Any], shape: tuple[int, ...]) -> Tensor:
        result = way()
        if not isinstance(result, Tensor) or tuple(result.shape) != shape:
            found = tuple(getattr(result, "shape", ()))
            raise WrongError(f"for N-D operands it returned shape {found} and not {shape}")
        return result.view(self._data.problem.out_shape)

    def autocast(self) -> None:
        """Launch under autocast to the dtype of operands and result, which then needs no cast."""
        problem, of = self._data.problem, self._data.sets()[0]
        same = problem.a.dtype == problem.b.dtype == problem.out.dtype
        if self._baseline or not same or problem.a.dtype not in (torch.float16, torch.bfloat16):
            return
        self._compare(of, self._launch(of, mode="autocast"), ", under autocast")
        self._check_released()

    def rounds(self, limit: int | None = None) -> Steps[None]:
        """One launch on each of the data's further inputs, or on ``limit`` of them."""
        if self._baseline or not (rounds := rounds_of(self._data)[:limit]):
            return
        self._check_inputs()  # before they are rewritten
        of = self._data.sets()[-1]
        with restoring(self._data):
            for each in rounds:
                inputs = each.inputs()
                result = self._launch(of, inputs=inputs)
                error = each.error(inputs, result)
                del result
                self._accept(error, f", with {each.plan.name}", each.slack)
                self._check_released()
                yield ()

    def together(self) -> Steps[None]:
        """Launch on both sets from two threads at once, on two streams of a GPU."""
        data = self._data
        if self._baseline or self._outputs or len(data.sets()) < 2:
            return
        paces: list[Pace] = ["lines", "launches", *["free"] * ROUNDS_TOGETHER]  # type: ignore[list-item]
        if data.problem.device.interpreted:
            _interpret_one_at_a_time()
            paces = paces[2:]  # a launch has too many lines
        most = self._most_together() if data.device.type == "cuda" else MOST_TOGETHER
        for pace in paces:
            yield ()
            for of, results in launch_together(data, self._launcher, pace, most) or ():
                for result in results:
                    self._check_form(result)
                    self._compare(of, result, ", launched by two threads at once")

    def _most_together(self) -> int:
        """The number of launches of each thread that the GPU completes within
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
    if batch != 1:
        yield inputs, (batch, m, n)
        yield _divided(inputs, (1, batch), ("a", "b", "residual")), (1, batch, m, n)
        return
    part = next((d for d in range(2, math.isqrt(m) + 1) if m % d == 0), m)
    for lead in dict.fromkeys([(part, m // part), (1, m), (1, 1, m)]):
        yield _divided(inputs, lead, ("a", "residual")), (*lead, n)
    if m == 1:
        residual = None if inputs.residual is None else inputs.residual[0]
        yield replace(inputs, a=inputs.a[0], residual=residual), (n,)


def _divided(inputs: Inputs, lead: tuple[int, ...], names: Iterable[str]) -> Inputs:
    """Return the inputs with the first dimension of the tensors in ``names``, and of their parts,
    divided into ``lead``. A scale of one number is left as it is."""

    def divided(t: Tensor | None) -> Tensor | None:
        return t.unflatten(0, lead) if t is not None and t.numel() > 1 and t.dim() > 1 else t

    given: dict[str, Any] = {name: divided(getattr(inputs, name)) for name in names}
    parts: Any = {n: divided(t) if n[0] in names else t for n, t in inputs.parts.items()}
    return replace(inputs, **given, parts=parts)
