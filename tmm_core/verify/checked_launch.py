"""One launcher on a fixture's inputs: launches it in one way, and checks what came of it."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.verify import compare, process_state
from tmm_core.verify.auxiliary_outputs import Outputs
from tmm_core.verify.data_sets import Fixture, InputSet
from tmm_core.verify.guard_bands import Guarded, overlap
from tmm_core.verify.ragged_inputs import Inputs

Tensor = torch.Tensor

#: torch's modes in which calls are made. Training launches without grad mode, serving in inference
#: mode, and a call with plain tensors in grad mode. Plans and calls with ``out`` also launch under
#: autocast; for others it is off below the operator that casts.
Mode = Literal["grad mode", "no_grad", "inference mode", "autocast"]


class WrongError(Exception):
    """A launch was wrong; the text says how, in one line."""


class Trial:
    """One launcher on a fixture's inputs.

    Args:
        deterministic: It promises the same bits for the same inputs.
        baseline: Its error is not judged.
        slack: Factor on the tolerance.
    """

    def __init__(
        self,
        fixture: Fixture,
        launcher: Launcher | Bound,
        deterministic: bool,
        baseline: bool,
        slack: float = 1.0,
    ) -> None:
        self._fixture, self._bound = fixture, Bound.of(launcher)
        self._launcher: Launcher = self._bound.run
        self._outputs: Outputs | None = None
        if fixture.problem.epilogue.outputs:
            self._launcher = self._outputs = Outputs(fixture, launcher, deterministic, slack)
        self._deterministic, self._baseline, self._slack = deterministic, baseline, slack
        self._limit = compare.tolerance(fixture.problem) * slack
        self._errors: list[float] = []
        #: The memory of results that this trial holds no longer.
        self._returned: list[StorageWeakRef] = []

    @property
    def error(self) -> float | None:
        """The largest error; NaN if there was one; None if nothing was compared."""
        undefined = [error for error in self._errors if error != error]
        return max(undefined or self._errors, default=None)

    def _launch(
        self,
        of: InputSet,
        held: list[Tensor],
        *,
        soil: bool = True,
        special: bool = False,
        mode: Mode = "grad mode",
        inputs: Inputs | None = None,
        form: Callable[[Inputs], Tensor] | None = None,
        watched: bool = True,
    ) -> Tensor:
        """Launch without ``out``, while the results ``held`` are in use.

        Args:
            inputs: Arguments in place of the set's own.
            form: Launches in another form than by ``run``.
            watched: Compare the process's state before and after.
        """
        if soil:
            self._fixture.soil()
        given = inputs or of.inputs
        launch = form or (lambda given: given.launch(self._launcher, None))
        result = self._called(lambda: launch(given), mode, watched)
        self._hold_to_form(result)
        if not (problem := self._fixture.problem).lies_as_made(result):
            raise WrongError(
                f"it returned strides {result.stride()}; a call returns {problem.out_strides}"
            )
        for name, guard in of.checksums.memory.items():
            if overlap(result, guard.tensor):
                raise WrongError(f"it returned memory of its input {name}")
        if any(overlap(result, other) for other in held):
            raise WrongError("it returned memory that it had returned before and that is in use")
        self._returned.append(StorageWeakRef(result.untyped_storage()))
        self._hold_outputs(of, result, special or inputs is not None)
        return result

    def _launch_into(
        self,
        memory: Guarded,
        of: InputSet,
        *,
        special: bool = False,
        mode: Mode = "grad mode",
        inputs: Inputs | None = None,
        watched: bool = True,
    ) -> Tensor:
        """Launch into one of the fixture's outputs, which is full of NaN."""
        out, given = memory.tensor, inputs or of.inputs
        result = self._called(lambda: given.launch(self._launcher, out), mode, watched)
        self._hold_to_form(result)
        if (result.data_ptr(), result.stride()) != (out.data_ptr(), out.stride()):
            raise WrongError("it returned something else than the out it was given")
        self._hold_outputs(of, out, special or inputs is not None)
        return out

    def _called(self, launch: Callable[[], Tensor], mode: Mode, watched: bool) -> Tensor:
        with _in(mode, self._fixture.device.type, self._fixture.problem.a.dtype):
            if not watched or self._baseline:
                return launch()
            result, changed = process_state.watched(launch, self._fixture.device)
        if changed:
            raise WrongError(f"it changed {' and '.join(changed)}")
        return result

    def _hold_free(self) -> None:
        """Check that nobody owns the returned results any more; the trial holds none."""
        returned, self._returned = self._returned, []
        if self._baseline:
            return
        for generation in range(4):
            if all(memory.expired() for memory in returned):
                return
            if generation < 3:  # a cycle may still hold one, usually a young one
                gc.collect(generation)
        raise WrongError("it keeps the memory of a result, which it may overwrite")

    def _hold_inputs(self) -> None:
        """Check that the inputs are as they were."""
        sets = self._fixture.sets()
        if changed := dict.fromkeys(n for each in sets for n in each.checksums.changed()):
            raise WrongError(f"it wrote to its input {' and '.join(changed)}, or around it")

    def _hold_outputs(self, of: InputSet, result: Tensor, special: bool) -> None:
        """Check the epilogue's outputs."""
        if self._outputs is None:
            return
        for error, fault in self._outputs.faults(None if special else of.expected, result):
            self._errors.append(error)
            if fault and not self._baseline:
                raise WrongError(fault)

    def _hold_to_form(self, result: object) -> None:
        """Check shape, dtype and device against the problem."""
        problem, shape = self._fixture.problem, self._fixture.problem.out_shape
        if not isinstance(result, Tensor):
            raise WrongError(f"it returned {type(result).__name__} and not a tensor")
        if tuple(result.shape) != shape:
            raise WrongError(f"it returned shape {tuple(result.shape)} and not {shape}")
        if result.dtype != problem.out.dtype:
            raise WrongError(f"it returned {result.dtype} and not {problem.out.dtype}")
        device = self._fixture.sets()[0].inputs.a.device
        if result.device != device:
            raise WrongError(f"its result is on {result.device} and not on {device}")

    def _compare(self, of: InputSet, result: Tensor, when: str) -> None:
        self._accept(of.expected.error(result, self._fixture.at_once).item(), when)

    def _accept(self, error: float, when: str, slack: float = 0.0) -> None:
        self._errors.append(error)
        # BLAS is the reference for the others; torch's own error is not judged.
        if not error <= self._limit + slack and not self._baseline:
            raise WrongError(f"error {error:.3g} exceeds {self._limit + slack:.3g}{when}")

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


@contextlib.contextmanager
def _in(mode: Mode, device: str, dtype: torch.dtype) -> Iterator[None]:
    contexts: list[AbstractContextManager[object]] = [torch.no_grad()]
    if mode == "inference mode":
        contexts = [torch.inference_mode()]
    elif mode != "no_grad":
        contexts = [torch.enable_grad()]
    if mode == "autocast":
        contexts.append(torch.autocast(device, dtype))
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
