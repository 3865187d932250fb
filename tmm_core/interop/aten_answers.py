"""The host path of torch's own products while :func:`tmm_core.enable` is in force.

Each entry below takes the place of one aten operator's kernel for one dispatch key. It looks the
call up by a key of a few properties, and either launches the kernel that was chosen for it or calls
torch's own kernel, which was captured before. Autograd, autocast, vmap and modes have been dealt
with by torch's dispatcher when an entry runs, although grad mode and ``requires_grad`` still look
as the caller left them: nothing here asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core import compat, dispatch, settings
from tmm_core.errors import CacheMissError, TmmError, error_text, reraise, warn
from tmm_core.interop.aten_calls import (
    call_with_summand,
    grouped_call,
    grouped_launch,
    plain_call,
    scaled_call,
    scaled_launch,
)
from tmm_core.launch import grouped_call as launch_grouped
from tmm_core.launch import warm
from tmm_core.launch.check import PLAIN, ranges_meet
from tmm_core.launch.collector import collector_off
from tmm_core.launch.nesting import ENTRIES, launching
from tmm_core.launch.plan import Choice, Plan
from tmm_core.settings import overridden
from tmm_core.spec.arguments import Arguments, GroupedArguments
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem

Tensor = torch.Tensor

deterministic, float32 = compat.deterministic, torch.float32

#: Calls of an operator that torch's kernel answers before their host cost is first compared with
#: what the others saved; then after twice as many, and so on.
FIRST_REVIEW = 1000


class Tally:
    """How many calls of an operator one kernel answered, and the µs that they saved."""

    __slots__ = ("calls", "saved_us")

    def __init__(self) -> None:
        self.calls, self.saved_us = 0, 0.0


class Answer:
    """Who answers the calls of one key.

    Attributes:
        launch: The chosen kernel's launcher; None: torch's own kernel.
        as_bias: Whether the summand of the product is a bias, else a residual.
    """

    __slots__ = ("as_bias", "choice", "kernel", "launch", "problem", "saves_us", "tally")

    kernel: str
    choice: Choice | None
    problem: Problem | None
    launch: Callable[..., Tensor] | None
    as_bias: bool
    saves_us: float
    tally: Tally | None

    def __init__(self) -> None:
        self.kernel, self.choice, self.problem, self.launch = BASELINE, None, None, None
        self.as_bias, self.saves_us, self.tally = False, 0.0, None

    def count(self) -> None:
        tally = self.tally
        assert tally is not None
        tally.calls += 1
        tally.saved_us += self.saves_us


THROUGH = Answer()

#: Answers by keys, which begin with the operator's name.
answers: dict[tuple[Any, ...], Answer] = {}
warm.TABLES.append(answers)


class Operator:
    """One aten operator that is answered.

    Args:
        name: With its overload, like ``mm.out``.
        torchs: Torch's own kernel, as ``torch.library.get_kernel`` returns it.
        only: Which problems may be answered; all if None.
        on_cache_miss: What to do without a record, where the settings in force say ``"tune"``,
            which would make a model wait.
        review: Called with the operator after so many calls that torch's kernel answered.
    """

    def __init__(
        self,
        name: str,
        torchs: Any,
        only: Callable[[Problem], bool] | None,
        on_cache_miss: settings.OnCacheMiss,
        review: Callable[[Operator], None],
    ) -> None:
        self.name, self.only, self.on_cache_miss = name, only, on_cache_miss
        self.torchs: Callable[..., Any] = torchs.call_boxed
        self.review = review
        self.review_at = FIRST_REVIEW
        #: By the kernels' names.
        self.tallies: dict[str, Tally] = {}
        self.passed = 0
        #: Whether a choice was made since the last review that another one will replace.
        self.pending = False

    def through(self, keys: Any, *arguments: Any, **named: Any) -> Any:
        """The answer of torch's own kernel."""
        current = overridden()
        if current is None or not current.nested:  # else a kernel's own product, or a verification
            self.passed = passed = self.passed + 1
            if passed == self.review_at:
                self.review(self)
        return self.torchs(keys, *arguments, **named)

    def first(
        self,
        key: tuple[Any, ...],
        call: Arguments | GroupedArguments | None,
        wrap: Callable[[Any], Callable[..., Tensor]] | None = None,
        as_bias: bool = False,
    ) -> Answer:
        """The answer of a key that has none yet, which later calls replay.

        Args:
            call: As tmm's own operators take it; None: it is for torch.
            wrap: Makes the launcher of a plan; by default the plan's own.

        Raises:
            CacheMissError: ``on_cache_miss="error"`` and no record.
            TmmError: The settings are not usable.
        """
        if call is None or settings.current().nested:
            return _keep(key, THROUGH)
        pose = warm.pose if isinstance(call, Arguments) else launch_grouped.pose
        try:
            if call.a.is_cuda and torch.cuda.is_current_stream_capturing():
                with collector_off():
                    return self._chosen(key, call, pose, wrap, as_bias)
            return self._chosen(key, call, pose, wrap, as_bias)
        except BaseException as error:
            reraise(error)
            if issubclass(type(error), (CacheMissError, settings.SettingsError)):
                raise
            # What tmm or torch refuses is torch's to answer or to refuse, in its own words.
            if not issubclass(type(error), (TmmError, RuntimeError, ValueError, TypeError)):
                warn(f"torch answers {self.name}: choosing a kernel raised {error_text(error)}")
        return _keep(key, THROUGH)

    def _chosen(self, key: Any, call: Any, pose: Any, wrap: Any, as_bias: bool) -> Answer:
        if (outer := launching()) is not None:
            warm.nest(outer)
            return THROUGH
        current = settings.current()
        if current.on_cache_miss == "tune":
            current = settings.changed(current, on_cache_miss=self.on_cache_miss)
        plan = warm.make_plan(call, warm.epilogue_of(""), current, self._posed(pose), waits=False)
        kept = plan.choice.lasting and not plan.problem.capturing
        self.pending |= not kept
        if plan.kernel == BASELINE:
            return _keep(key, THROUGH) if kept else THROUGH
        answer = Answer()
        answer.kernel, answer.choice, answer.problem = plan.kernel, plan.choice, plan.problem
        answer.launch = plan.launcher if wrap is None else wrap(plan)
        answer.as_bias = as_bias
        answer.saves_us = self._saved_us(plan)
        answer.tally = self.tallies.setdefault(plan.kernel, Tally())
        return _keep(key, answer) if kept else answer

    def _saved_us(self, plan: Plan) -> float:
        from tmm_core.dispatch.saving import saving_us  # with the dispatcher, which a plan needed

        return saving_us(dispatch.default_dispatcher(), plan.problem, plan.choice)

    def _posed(self, pose: Any) -> Any:
        """``pose`` that refuses what ``only`` leaves to torch."""
        if self.only is None:
            return pose

        def posed(call: Any, epilogue: Any, current: settings.Settings) -> Any:
            problem, fold = pose(call, epilogue, current)
            if not self.only(problem):  # type: ignore[misc]  # not None
                raise _LeftError
            return problem, fold

        return posed

    def failed(self, key: tuple[Any, ...], plan: Answer, error: BaseException) -> None:
        """Quarantine the kernel of an answer that raised, so that torch's answers in its place.

        Raises:
            BaseException: ``error``, if the caller should see it.
        """
        if not warm.quarantine(plan, error):
            raise error
        answers.pop(key, None)


class _LeftError(TmmError):
    """``only`` leaves a problem to torch."""


def _keep(key: tuple[Any, ...], answer: Answer) -> Answer:
    if len(answers) >= warm.MAX_PLANS:
        answers.clear()
    answers[key] = answer
    return answer


def _tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# -- the entries: what every product of a user's model passes --------------------------------------


def product(op: Operator) -> Callable[..., Any]:
    """Of ``mm`` and ``bmm``."""
    name, through, first = op.name, op.through, op.first

    def entry(keys: Any, a: Tensor, b: Tensor) -> Any:
        if type(a) not in PLAIN or type(b) not in PLAIN:
            return through(keys, a, b)
        key = (
            name, a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype,
            (a.data_ptr() | b.data_ptr()) & 15, a.get_device(), b.get_device(),
            overridden(), deterministic(), a.dtype is float32 and _tf32(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, plain_call(key[7], a, b))
        if plan.launch is not None:
            try:
                y = plan.launch(a, b, None, None, 1.0, None)
                plan.count()
                return y
            except BaseException as error:  # a kernel may call sys.exit
                op.failed(key, plan, error)
                plan = THROUGH
        return through(keys, a, b)

    return entry


def product_out(op: Operator) -> Callable[..., Any]:
    """Of ``mm.out`` and ``bmm.out``, which compiled graphs call."""
    name, through, first = op.name, op.through, op.first

    def entry(keys: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        if type(a) not in PLAIN or type(b) not in PLAIN or type(out) not in PLAIN:
            return through(keys, a, b, out=out)
        key = (
            name, a.shape, b.shape, out.shape, a.stride(), b.stride(), out.stride(), a.dtype,
            b.dtype, out.dtype, (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15,
            a.get_device(), b.get_device(), out.get_device(),
            overridden(), deterministic(), a.dtype is float32 and _tf32(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, plain_call(key[10], a, b, out=out))
        if plan.launch is not None and not (ranges_meet(out, a) or ranges_meet(out, b)):
            try:
                plan.launch(a, b, None, None, 1.0, out)
                plan.count()
                return out
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        return through(keys, a, b, out=out)

    return entry


def sum_with(op: Operator) -> Callable[..., Any]:
    """Of ``addmm`` and ``baddbmm``: ``beta · c + alpha · (a @ b)``."""
    name, through, first = op.name, op.through, op.first

    def entry(keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if type(a) not in PLAIN or type(b) not in PLAIN or type(c) not in PLAIN or beta != 1:
            return through(keys, c, a, b, beta=beta, alpha=alpha)
        key = (
            name, a.shape, b.shape, c.shape, a.stride(), b.stride(), c.stride(), a.dtype, b.dtype,
            c.dtype, (a.data_ptr() | b.data_ptr() | c.data_ptr()) & 15,
            a.get_device(), b.get_device(), c.get_device(), alpha == 1 or type(alpha),
            overridden(), deterministic(), a.dtype is float32 and _tf32(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, *call_with_summand(key[10], a, b, c, alpha))
        if plan.launch is not None:
            try:
                terms = (c, None) if plan.as_bias else (None, c)
                y = plan.launch(a, b, *terms, float(alpha), None)
                plan.count()
                return y
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        # Keyword arguments take longer to pass on.
        return through(keys, c, a, b) if alpha == 1 else through(keys, c, a, b, alpha=alpha)

    return entry


def sum_with_out(op: Operator) -> Callable[..., Any]:
    """Of ``addmm.out`` and ``baddbmm.out``."""
    name, through, first = op.name, op.through, op.first

    def entry(
        keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
    ) -> Any:
        given = c, a, b, out
        if any(type(t) not in PLAIN for t in given) or beta != 1:
            return through(keys, c, a, b, beta=beta, alpha=alpha, out=out)
        aligned = (a.data_ptr() | b.data_ptr() | c.data_ptr() | out.data_ptr()) & 15
        key = (
            name, *[(t.shape, t.stride(), t.dtype, t.get_device()) for t in given], aligned,
            alpha == 1 or type(alpha), overridden(), deterministic(),
            a.dtype is float32 and _tf32(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, *call_with_summand(aligned, a, b, c, alpha, out=out))
        if plan.launch is not None and not any(ranges_meet(out, t) for t in (a, b, c)):
            try:
                terms = (c, None) if plan.as_bias else (None, c)
                plan.launch(a, b, *terms, float(alpha), out)
                plan.count()
                return out
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        return through(keys, c, a, b, beta=beta, alpha=alpha, out=out)

    return entry


def scaled(op: Operator) -> Callable[..., Any]:
    """Of ``_scaled_mm``, with scales of 32 bits per tensor or per row."""
    return _with_parts(op, scaled_call, scaled_launch)


def grouped(op: Operator) -> Callable[..., Any]:
    """Of ``_grouped_mm`` with ``offs``."""
    return _with_parts(op, grouped_call, grouped_launch)


def _with_parts(op: Operator, call_of: Any, launch_of: Any) -> Callable[..., Any]:
    name, through, first = op.name, op.through, op.first

    def entry(keys: Any, *given: Any, **named: Any) -> Any:
        tensors = [t for t in given if isinstance(t, Tensor)]
        if any(type(t) not in PLAIN for t in tensors) or any(
            isinstance(t, Tensor) for t in named.values()
        ):
            return through(keys, *given, **named)
        key = (
            name,
            *[
                (t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device())
                if isinstance(t, Tensor)
                else t
                for t in given
            ],
            tuple(named.items()), overridden(), deterministic(),
        )  # fmt: skip
        plan = answers.get(key) or first(key, call_of(*given, **named), launch_of)
        if plan.launch is not None:
            try:
                y = plan.launch(*given)
                plan.count()
                return y
            except BaseException as error:
                op.failed(key, plan, error)
                plan = THROUGH
        return through(keys, *given, **named)

    return entry


#: The operators that can be answered, by name with overload.
ENTRY: dict[str, Callable[[Operator], Callable[..., Any]]] = {
    "mm": product,
    "mm.out": product_out,
    "bmm": product,
    "bmm.out": product_out,
    "addmm": sum_with,
    "addmm.out": sum_with_out,
    "baddbmm": sum_with,
    "baddbmm.out": sum_with_out,
    "_scaled_mm": scaled,
    "_grouped_mm": grouped,
}


def entry_of(op: Operator) -> Callable[..., Any]:
    """The function that takes the place of the operator's kernel."""
    entry = ENTRY[op.name](op)
    ENTRIES.add(entry.__code__)
    return entry
