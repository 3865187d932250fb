"""The path of a call: one tuple, one look-up, one launch.

Everything else (parsing, checking, choosing, compiling) happens when the look-up misses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from tmm_core import settings
from tmm_core.errors import PluginError
from tmm_core.launch.check import PLAIN, check, result_dtype
from tmm_core.launch.fold import Fold
from tmm_core.launch.plan import Choice, Plan, scales_signature, signature
from tmm_core.spec.asking import let_through, told
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import INTERNED, Epilogue
from tmm_core.spec.kernel import BASELINE, Launcher, ScaledLauncher
from tmm_core.spec.problem import Problem, packed

Tensor = torch.Tensor
#: ``scale_a`` and ``scale_b``.
Scales = tuple[Tensor | None, Tensor | None]

#: Plans held at most; past it the table starts anew (a plan is some 2 kB and rebinding one
#: whose kernel is compiled takes microseconds).
MAX_PLANS = 65536

_plans: dict[tuple[Any, ...], Plan] = {}


class Epilogues(Protocol):
    """The epilogues that plugins registered."""

    def epilogue(self, value: str | None, /) -> Epilogue: ...

    def epilogues(self) -> Mapping[str, Epilogue]: ...


class Answerer(Hashable, Protocol):
    """Who says which kernel serves a problem, and hears of one that failed."""

    @property
    def registry(self) -> Epilogues: ...

    def bound(
        self, problem: Problem, settings: settings.Settings, /
    ) -> tuple[Choice, Launcher]: ...

    def quarantine(self, problem: Problem, choice: Choice, error: BaseException, /) -> None: ...


def answerer() -> Answerer:
    """Whom a call without a plan asks: :mod:`tmm_core.dispatch` puts its own in this place."""
    raise RuntimeError("tmm_core.dispatch is not imported")


#: Called when plans are forgotten: what else was chosen by records, settings or plugins.
also_forget: list[Callable[[], None]] = []


def forget_plans() -> None:
    """Choose anew at the next call: records, settings or plugins have changed."""
    _plans.clear()
    for forget in also_forget:
        forget()


def epilogue_of(text: str) -> Epilogue:
    """The epilogue an operator argument names.

    Raises:
        UnknownNameError, ValueError: See :func:`tmm_core.spec.epilogue.parse`.
    """
    return INTERNED.get(text) or _parsed(answerer(), text)


@functools.lru_cache(256)
def _parsed(chooser: Answerer, text: str) -> Epilogue:
    """Parsed once per text: a call that records gradients asks twice, at 9 µs each."""
    return chooser.registry.epilogue(text or None)


def undisturbed(
    a: Any,
    b: Any,
    bias: Any = None,
    residual: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    cast: bool = False,
) -> bool:
    """Whether torch's dispatcher has nothing to do for a call but to record its gradient: no
    autocast (unless it has ``cast`` already), no transform, mode, tracer, profiler or tensor
    subclass to ask. The operator is then a detour that comes to the same as :func:`run`, 2.5 µs
    later."""
    return (
        type(a) in PLAIN
        and type(b) in PLAIN
        and (cast or not _autocasts())
        and not _dispatch_modes()
        and not _function_modes()
        and not _profiles()
        and _transform() is None
        and forward_ad._current_level < 0
        and _tracer() is None
        and not (a.is_neg() or b.is_neg() or a.is_conj() or b.is_conj())
        and (bias is None or plain(bias))
        and (residual is None or plain(residual))
        and (scale_a is None or plain(scale_a))
        and (scale_b is None or plain(scale_b))
    )


def plain(t: Any) -> bool:
    """Whether a kernel can be handed this as it is: no subclass, no sign or conjugate yet to be
    applied."""
    return type(t) in PLAIN and not (t.is_neg() or t.is_conj())


# Each is one call of C, some 50 ns.
_autocasts = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiles = torch._C._autograd._profiler_enabled
_tracer = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack


def run(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if scale_a is not None or scale_b is not None:
        scales = (scale_a, scale_b)
        return _run_scaled(a, b, bias, residual, alpha, epilogue, out_dtype, out, scales)
    key = (
        a.shape,
        a.stride(),
        a.dtype,
        a.data_ptr() & 15,
        a.get_device(),
        b.shape,
        b.stride(),
        b.dtype,
        b.data_ptr() & 15,
        b.get_device(),
        None if bias is None else signature(bias),
        None if residual is None else signature(residual),
        None if out is None else signature(out),
        epilogue,
        alpha == 1.0,
        out_dtype,
        _overridden(),
        _deterministic(),
        a.dtype is torch.float32 and a.is_cuda and _tf32(),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _build(key, a, b, bias, residual, alpha, epilogue, out_dtype, out)
    try:
        if _profiler._is_profiler_enabled:
            return _recorded(plan, a, b, bias, residual, alpha, out)
        return plan.launcher(a, b, bias, residual, alpha, out)
    except BaseException as error:  # a kernel may call sys.exit
        if not _quarantine(plan, error):
            raise
        _plans.pop(key, None)
    return run(a, b, bias, residual, alpha, epilogue, out_dtype, out=out)


def _run_scaled(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: str,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    scales: Scales,
) -> Tensor:
    """As :func:`run`, with scales: apart, so that other calls do not carry them."""
    key = (
        *(None if t is None else signature(t) for t in (a, b, bias, residual, out)),
        scales_signature(*scales),
        epilogue,
        alpha == 1.0,
        out_dtype,
        _overridden(),
        _deterministic(),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _build(key, a, b, bias, residual, alpha, epilogue, out_dtype, out, scales)
    try:
        launcher = cast(ScaledLauncher, plan.launcher)
        numbers = map(packed, scales)
        if _profiler._is_profiler_enabled:
            return _recorded(plan, a, b, bias, residual, alpha, out, *numbers)
        return launcher(a, b, bias, residual, alpha, out, *numbers)
    except BaseException as error:  # a kernel may call sys.exit
        if not _quarantine(plan, error):
            raise
        _plans.pop(key, None)
    return _run_scaled(a, b, bias, residual, alpha, epilogue, out_dtype, out, scales)


def _recorded(plan: Plan, *arguments: Any) -> Tensor:
    """Launch under the kernel's name, for whoever is profiling."""
    with _profiler.record_function(plan.kernel, str(plan.choice.candidate.config)):
        return plan.launcher(*arguments)


_overridden = settings.overridden
_deterministic = torch._C._get_deterministic_algorithms


def _tf32() -> bool:
    """Whether fp32 operands may be rounded. The older getters raise once this is set."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# -- the slow path -----------------------------------------------------------------------


def _build(
    key: tuple[Any, ...],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: str,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    scales: Scales = (None, None),
) -> Plan:
    parsed, current = epilogue_of(epilogue), settings.current()
    plan = make_plan(a, b, bias, residual, alpha, parsed, out_dtype, out, current, scales)
    keep(key, plan)
    return plan


def keep(key: tuple[Any, ...], plan: Plan) -> None:
    """Answer by ``plan`` from now on, unless it was chosen with its hands tied, under capture."""
    if not plan.problem.capturing:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan


def make_plan(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    current: settings.Settings,
    scales: Scales = (None, None),
) -> Plan:
    """Check, choose and bind; everything raised for bad input is raised here.

    Raises:
        RuntimeError, ValueError, TypeError: See :func:`tmm_core.launch.check.check`.
        TmmError: See :meth:`tmm_core.dispatch.ladder.Dispatcher.choose`.
    """
    # Capture, tuning and compilation all go by the current device.
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        problem, fold = pose(a, b, bias, residual, alpha, epilogue, out_dtype, out, current, scales)
        choice, launcher = answerer().bound(problem, current)
    if fold is not None:
        launcher = fold.wrap(launcher, a, b, residual)
    return Plan.of(problem, choice, launcher, alpha, (a, b, bias, residual), scales)


def pose(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    current: settings.Settings,
    scales: Scales = (None, None),
) -> tuple[Problem, Fold | None]:
    """The problem that one call's arguments pose, with operands folded to 2-D or 3-D."""
    shape, matrix = check(a, b, bias, residual, epilogue, out_dtype, *scales), b.dim() == 2
    fold = Fold.of(a, b, residual, shape)
    if fold is not None:
        a, b, residual = fold.operand_a(a), fold.operand_b(b), fold.residual(residual)
    flat = shape if fold is None else fold.flat
    if out is not None and out.shape == flat:
        target = out
    else:
        target = torch.empty(flat, dtype=result_dtype(a, out_dtype), device="meta")
    problem = Problem.of(
        a,
        b,
        target,
        fingerprint(a.device),
        bias=bias,
        residual=residual,
        scale_a=scales[0],
        scale_b=scales[1],
        epilogue=epilogue,
        scaled=alpha != 1.0,
        tf32=a.dtype is torch.float32 and a.is_cuda and _tf32(),
        deterministic=current.deterministic or torch.are_deterministic_algorithms_enabled(),
        batch_invariant=current.batch_invariant or current.arithmetic is not None,
        # What has more dimensions, or is copied to fold them, is hardly a weight.
        static_weights=current.static_weights and matrix,
        capturing=a.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
    return problem, fold


def recall(document: Mapping[str, Any], device: torch.device) -> Problem:
    """The problem that a record or a miss is about, as of ``device`` now.

    Raises:
        UnknownNameError, ValueError, KeyError, TypeError: It is none, or names an epilogue that
            is not registered.
    """
    registry = answerer().registry
    # Of a user's epilogue the document has the key, which is no name to parse.
    by_key = {epilogue.key: epilogue for epilogue in registry.epilogues().values()}
    key = document["epilogue"]
    epilogue = by_key.get(key) or registry.epilogue(key)
    return Problem.from_json(document, fingerprint(device), epilogue)


def _quarantine(plan: Plan, error: BaseException) -> bool:
    """Put a kernel that raised out of use; False where the error is the caller's to see.

    Raises:
        PluginError: What it raised would end the process.
    """
    let_through(error)
    hopeless = plan.choice.origin == "forced" or plan.kernel == BASELINE
    if hopeless or isinstance(error, torch.OutOfMemoryError):
        if not isinstance(error, Exception):
            raise PluginError(f"kernel {plan.kernel} raised {told(error)}") from error
        return False
    answerer().quarantine(plan.problem, plan.choice, error)
    return True
