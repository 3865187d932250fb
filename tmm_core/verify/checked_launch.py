"""Calls a launcher on the test data and checks each result."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from tmm_base.guards import suppress
from torch.multiprocessing.reductions import StorageWeakRef

from tmm_core.launch import nesting
from tmm_core.registry import watched_call
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.verify import compare
from tmm_core.verify.auxiliary_outputs import Outputs
from tmm_core.verify.data_sets import DataSets, InputSet
from tmm_core.verify.forms import WrongError
from tmm_core.verify.further_inputs import Mode, Round
from tmm_core.verify.guard_bands import GuardedTensor, overlap
from tmm_core.verify.ragged_inputs import Inputs

Tensor = torch.Tensor


def _properties(given: Inputs) -> dict[str, tuple[Any, ...]]:
    """Return the properties of its arguments, by name, that a launch may not change besides their
    values: memory, gradients, and the versions by which a backward pass detects writes."""
    return {
        name: (
            type(t), t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_neg(), t.requires_grad,
            id(t.grad) if t.is_leaf and t.requires_grad else None,
            None if t.is_inference() else t._version,
        )
        for name, t in (given.tensors | given.extras).items()
    }  # fmt: skip


#: Seconds to wait for a result's memory after each generation of garbage is collected. A sampling
#: profiler in another thread holds the frames of its last sample, and the results in them, until it
#: takes the next.
_HELD_ELSEWHERE = (0.0, 0.01, 0.3)


def _expire(returned: Iterable[StorageWeakRef], seconds: float) -> bool:
    """Whether nothing holds any of these memories any more, at the latest after some seconds."""
    end = time.monotonic() + seconds
    while not all(memory.expired() for memory in returned):
        if time.monotonic() >= end:
            return False
        time.sleep(1e-3)
    return True


def _new_result() -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _others_keep_results() -> bool:
    """Whether a result that no kernel made is kept, by a tracer or a mode of torch."""
    return not StorageWeakRef(_new_result().untyped_storage()).expired()


#: Types of objects in which frames hold results: lists of verification, and what inner functions
#: refer to.
_IN_FRAMES = (list, tuple, CellType, FunctionType, GeneratorType)


def _frames_alone_keep(returned: Iterable[StorageWeakRef]) -> bool:
    """Whether nothing but frames keeps these memories. A thread that watches others may hold the
    frames that it saw last for any time."""
    memories = {memory.cdata for memory in returned if not memory.expired()}
    kept: list[Any] = [t for t in gc.get_objects() if type(t) is Tensor and _address(t) in memories]
    found, seen = bool(kept), set[int]()
    while kept:
        seen |= {id(kept), *map(id, kept)}
        # From Python 3.14 on the tuple of these arguments is among them. Nothing else holds it.
        holders = [*gc.get_referrers(*kept), object()]
        counts = [sys.getrefcount(holder) for holder in holders]
        kept = [
            holder
            for holder, count in zip(holders, counts, strict=True)
            if count > counts[-1] and id(holder) not in seen and type(holder) is not FrameType
        ]
        seen.add(id(holders))
        if not all(type(holder) in _IN_FRAMES for holder in kept):
            return False
    return found


def _address(tensor: Tensor) -> int | None:
    with suppress(Exception):  # a sparse tensor has no storage
        return int(tensor.untyped_storage()._cdata)
    return None


class CheckedLauncher:
    """A launcher whose every launch is checked. :meth:`tmm_core.verify.verifier.Verifier.steps`
    explains the arguments."""

    #: Names this form of the launcher in messages.
    called = ""

    def __init__(
        self,
        data: DataSets,
        launcher: Launcher | Bound,
        deterministic: bool,
        baseline: bool,
        slack: float = 1.0,
    ) -> None:
        self._data, self._bound = data, Bound.of(launcher)
        self._launcher: Launcher = self._bound.run
        self._outputs: Outputs | None = None
        if data.problem.epilogue.outputs:
            self._launcher = self._outputs = Outputs(data, launcher, deterministic, slack)
        self._deterministic, self._baseline, self._slack = deterministic, baseline, slack
        self._limit = compare.tolerance(data.problem) * slack
        self._errors: list[float] = []
        #: The memory of returned results that this object no longer holds.
        self._returned: list[StorageWeakRef] = []

    @property
    def error(self) -> float | None:
        """The largest error; NaN if any error was NaN; None if nothing was compared."""
        undefined = [error for error in self._errors if error != error]
        return max(undefined or self._errors, default=None)

    def _launch(
        self,
        of: InputSet | Round,
        *,
        into: GuardedTensor | None = None,
        held: Iterable[Tensor] = (),
        mode: Mode = "grad mode",
        nonfinite: bool = False,
        form: Callable[[], Tensor] | None = None,
        repeated: bool = False,
    ) -> Tensor:
        """Launch, and check everything but the values.

        Args:
            into: The output to write to, with its present contents. Without it the launcher
                allocates its result, or writes to the data's first output if it never allocates.
            held: Results that are in use.
            nonfinite: The inputs contain NaN and Inf.
            form: Makes the launch; by default the launcher is called.
            repeated: The same launch was checked before. So the memory is not poisoned again, and
                the process's state is not compared.
        """
        given, launcher = of.inputs, self._launcher
        if into is None and not self._data.allocates:
            into = self._data.out(0)
        # A view: a launch may resize the tensor that it gets, and others need this output.
        tensor = None if into is None else into.tensor.detach()
        launch_form = form or (lambda: given.launch(launcher, tensor))

        def launch() -> Tensor:
            # Immediately before the launch: other allocations would take the poisoned memory.
            if into is None and not repeated:
                self._data.poison_free_memory()
            nesting.has_waited()
            try:
                result: Tensor = launch_form()
            except (GeneratorExit, StopIteration) as error:
                # They would close or end the generators of a tuning.
                kind = GeneratorExit if isinstance(error, GeneratorExit) else StopIteration
                self._data.raised = RuntimeError(f"the launch raised {kind.__name__}")
                raise self._data.raised from error
            except WrongError:
                raise
            except BaseException as error:
                self._data.raised = error
                raise
            if nesting.has_waited() and not self._baseline:
                # A warm call in that thread does not see the launch, and would launch it again.
                raise WrongError("it waits for a thread that computes products, which may use it")
            return result

        before = {} if repeated else _properties(given)
        with self._in(mode):
            if repeated or self._baseline:
                result = launch()
            else:
                result, changed = watched_call.watched(launch, self._data.device)
                if changed:
                    raise WrongError(f"it changed {' and '.join(changed)}")
        after = _properties(given) if before else before
        if after != before:
            self._data.altered |= {name for name in before if before[name] != after[name]}
            self._check_inputs()
        self._check_form(result)
        if into is None:
            if result.is_inference() and "inference mode" not in mode:
                raise WrongError("it returned a tensor of inference mode, which may not be changed")
            self._check_memory(given, result, held)
        # Not `tensor`: a launch may have given it other memory, which no view of `out` shows.
        elif (result.data_ptr(), result.stride()) != (into.tensor.data_ptr(), into.tensor.stride()):
            raise WrongError("it returned something else than the out it was given")
        if self._outputs is not None and (nonfinite or of.judges_outputs):
            expected = None if nonfinite else of.expected
            self._check_outputs(self._outputs.faults(expected, result, once=of.once), of.called)
        return result

    def _check_outputs(self, faults: Iterable[tuple[float, str]], when: str) -> None:
        for error, fault in faults:
            self._errors.append(error)
            if fault and not self._baseline:
                raise WrongError(fault + when)

    @contextlib.contextmanager
    def _in(self, mode: Mode) -> Iterator[None]:
        problem = self._data.problem
        with contextlib.ExitStack() as stack:
            if problem.device.interpreted:  # numpy warns of NaN and Inf in the interpreter
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", RuntimeWarning)
            if "inference mode" in mode:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.set_grad_enabled(mode != "no_grad"))
            if mode.startswith("autocast"):
                stack.enter_context(torch.autocast(self._data.device.type, problem.a.dtype))
            yield

    def _check_form(self, result: object) -> None:
        """Check type, shape, dtype and device, and that no gradient is recorded."""
        problem, shape = self._data.problem, self._data.problem.out_shape
        if type(result) is not Tensor:
            raise WrongError(f"it returned {type(result).__name__} and not a tensor")
        if result.requires_grad:
            raise WrongError("its result requires a gradient, although no operand does")
        if result.is_neg() or result.is_conj():
            raise WrongError("its result is a lazy negation or conjugate, not memory with values")
        if tuple(result.shape) != shape:
            raise WrongError(f"it returned shape {tuple(result.shape)} and not {shape}")
        if result.dtype != problem.out.dtype:
            raise WrongError(f"it returned {result.dtype} and not {problem.out.dtype}")
        device = self._data.sets()[0].inputs.a.device
        if result.device != device:
            raise WrongError(f"its result is on {result.device} and not on {device}")

    def _check_memory(self, given: Inputs, result: Tensor, held: Iterable[Tensor]) -> None:
        """Check the strides of an allocated result, and that its memory is new."""
        if not (problem := self._data.problem).has_default_strides(result):
            raise WrongError(
                f"it returned strides {result.stride()}; a call returns {problem.out_strides}"
            )
        for name, t in (given.tensors | given.extras).items():
            if overlap(result, t):
                raise WrongError(f"it returned memory of its input {name}")
        if any(overlap(result, other) for other in held):
            raise WrongError("it returned memory that it had returned before and that is in use")
        self._returned.append(StorageWeakRef(result.untyped_storage()))

    def _check_released(self) -> None:
        """Check that nothing holds the memory of the returned results any more."""
        returned, self._returned = self._returned, []
        if self._baseline or _expire(returned, 0.0):
            return
        for generation, seconds in enumerate(_HELD_ELSEWHERE):
            gc.collect(generation)  # a reference cycle, usually a young one, may hold a result
            if _expire(returned, seconds):
                return
        if _others_keep_results() or _frames_alone_keep(returned):
            return
        raise WrongError("it keeps the memory of a result, which it may overwrite")

    def _check_inputs(self) -> None:
        """Check that the inputs are as they were."""
        if changed := self._data.changed_inputs():
            raise WrongError(f"it wrote to its input {' and '.join(changed)}, or around it")

    def _try(self, of: InputSet | Round, when: str = "", **options: Any) -> None:
        """Launch, compare the result and let it go."""
        self._compare(of, self._launch(of, **options), when)
        self._check_released()

    def _compare(self, of: InputSet | Round, result: Tensor, when: str = "") -> None:
        self._accept(of.error(result, self._data.at_once), of.called + when + self.called, of.slack)

    def _accept(self, error: float, when: str, slack: float = 0.0) -> None:
        self._errors.append(error)
        # BLAS is the reference for the others; torch's own error is not judged.
        if not error <= self._limit + slack and not self._baseline:
            raise WrongError(f"error {error:.3g} exceeds {self._limit + slack:.3g}{when}")
