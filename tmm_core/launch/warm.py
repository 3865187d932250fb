"""The path of a warm call: one tuple, one look-up, one launch.

Parsing, checking, choosing and compiling happen when the look-up misses. The functions of a warm
call are generated from the table of arguments, by :func:`entries` and :func:`fast_path_checks`.
Tracebacks show their sources.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tmm_core import compat, settings
from tmm_core.errors import PluginError, error_text, foreign_place, reraise
from tmm_core.launch.check import PLAIN, addressable, check, result_dtype
from tmm_core.launch.codegen import written
from tmm_core.launch.collector import garbage_kept
from tmm_core.launch.fold import Fold
from tmm_core.launch.nesting import NESTING, add_entry, announced, awaited, launching
from tmm_core.launch.output_memory import allocating_outputs
from tmm_core.launch.plan import Plan
from tmm_core.spec.arguments import (
    EXTRAS,
    LAUNCHED,
    ROLES,
    TENSORS,
    Arguments,
    GroupedArguments,
    Role,
    parameters,
)
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import IDENTITY, INTERNED, Epilogue
from tmm_core.spec.launcher import BASELINE, Bound, Launcher
from tmm_core.spec.problem import Problem, stored_operands

Tensor = torch.Tensor

#: Maximum number of plans, at which the table is cleared. A plan takes about 2 kB, and binding a
#: compiled kernel again takes microseconds.
MAX_PLANS = 65536

#: Seconds between two look-ups of a record that another process is tuning.
_POLL = 0.1

_plans: dict[tuple[Any, ...], Plan] = {}
#: All tables of plans, or of objects with a plan's ``kernel``, ``choice`` and ``problem``: this
#: table and the one of :mod:`tmm_core.interop.aten_answers`.
TABLES: list[dict[tuple[Any, ...], Any]] = [_plans]


class Part(NamedTuple):
    """The part of an epilogue that the product of a differentiated call computes.

    Attributes:
        whole: The epilogue.
        text: The part's name for :func:`run`, which then takes the arguments of the whole call and
            checks them.
        head, rest: See :attr:`Epilogue.parts`.
        takes_residual: Whether the product adds the residual too.
    """

    whole: Epilogue
    text: str
    head: Epilogue
    rest: Epilogue | None
    takes_residual: bool


#: The beginning of parts' texts, which the keys of their epilogues follow.
_PART = "part of "
#: Parts by the keys of their epilogues.
_parts: dict[str, Part] = {}


def part_of(epilogue: Epilogue) -> Part:
    """Return the part of ``epilogue`` that the product of a differentiated call computes."""
    if (part := _parts.get(epilogue.key)) is None:
        head, rest = epilogue.bare.parts if epilogue.outputs else epilogue.parts
        text, whole = f"{_PART}{epilogue.key}", head.is_identity and rest is None
        part = _parts[epilogue.key] = Part(epilogue, text, head, rest, whole)
    return part


def answerer() -> Any:
    """Return the dispatcher, which answers calls without a plan; :mod:`tmm_core.dispatch` replaces
    this function."""
    raise RuntimeError("tmm_core.dispatch is not imported")


#: Checks a call; returns its problem, and the fold of its operands if they have to be folded.
Describe = Callable[[Any, Epilogue, settings.Settings], tuple[Problem, Fold | None]]


#: Called by :func:`forget_plans`.
WHEN_FORGOTTEN: list[Callable[[], object]] = []


def forget_plans() -> None:
    """Drop all plans, since records, settings or plugins changed: the next call chooses again."""
    drop_plans()
    for each in WHEN_FORGOTTEN:
        each()


def drop_plans() -> None:
    """Drop all plans, although records, settings and plugins are unchanged."""
    global drops
    drops += 1
    for table in TABLES:
        table.clear()


#: The number of times that plans were dropped.
drops = 0


def keep(table: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any, before: int) -> None:
    """Add a plan to a table, unless plans were dropped while it was made: it may follow from what
    has changed since, in another thread.

    Args:
        before: :data:`drops` before the plan was made.
    """
    if len(table) >= MAX_PLANS:
        table.clear()
    table[key] = plan
    if drops != before:  # read after the insertion: a drop is counted before it clears the tables
        table.pop(key, None)


def epilogue_of(text: str) -> Epilogue:
    """Return the epilogue named by an operator's argument.

    Raises:
        UnknownNameError, ValueError: See :func:`tmm_core.epilogues.parse`.
    """
    if not text:
        return IDENTITY
    return INTERNED.get(text) or _parsed(answerer(), text)


@functools.lru_cache(256)
def _parsed(chooser: Any, text: str) -> Epilogue:
    """Parse a text once: a call that records gradients needs it twice, at 9 µs each."""
    return chooser.registry.epilogue(text)  # type: ignore[no-any-return]


def plain(t: Any) -> bool:
    """Whether a kernel can use this tensor directly: no subclass, no lazy negation or conjugate."""
    return type(t) in PLAIN and not (t.is_neg() or t.is_conj())


def _tf32() -> bool:
    """Whether fp32 operands may be rounded. Torch's older getters raise once this is set."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# -- the slow path -----------------------------------------------------------------------


def _build(key: tuple[Any, ...], call: Arguments | GroupedArguments, describe: Describe) -> Plan:
    capturing = call.a.is_cuda and torch.cuda.is_current_stream_capturing()
    # If the cyclic GC destroyed an earlier graph now, the capture would end.
    with garbage_kept() if capturing else nullcontext():
        return _built(key, call, describe)


def _built(key: tuple[Any, ...], call: Arguments | GroupedArguments, describe: Describe) -> Plan:
    if not settings.current().nested and (outer := launching()) is not None:
        nest(outer)
        with settings.nested():
            return _planned(call, describe)
    before = drops
    plan = _planned(call, describe)
    # Under graph capture the choice is restricted.
    if plan.choice.lasting and not plan.problem.capturing:
        keep(_plans, key, plan, before)
    return plan


def _planned(call: Arguments | GroupedArguments, describe: Describe) -> Plan:
    product = _product_of(call)
    epilogue = epilogue_of(product.epilogue)
    plan = make_plan(product, epilogue, settings.current(), describe, waits=False)
    if product.residual is not call.residual:
        plan = replace(plan, launcher=_without_residual(plan.launcher))
    return plan


def nest(kernel: str) -> None:
    """From now on, let BLAS answer products that the launch of ``kernel`` computes."""
    NESTING.add(kernel)
    for table in TABLES:
        for key, plan in list(table.items()):
            if plan.kernel == kernel:
                del table[key]


def _product_of(call: Any) -> Any:
    """Return the call itself, or the product of a call that is differentiated in parts. A call in
    parts is checked as a whole."""
    if not call.epilogue.startswith(_PART):
        return call
    part = _parts[call.epilogue.removeprefix(_PART)]
    check(call, part.whole)
    residual = call.residual if part.takes_residual else None
    return call._replace(residual=residual, epilogue=part.head.interned())


def _without_residual(launcher: Launcher) -> Launcher:
    def launch(a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, out: Any) -> Tensor:
        return launcher(a, b, bias, None, alpha, out)

    return launch


def _on_meta(call: Arguments | GroupedArguments) -> Any:
    """Return the result of a call of meta tensors, by the operator's own rule for them."""
    addressable(*call.given)  # a sparse one has no such rule: the operator would be called again
    call = _product_of(call)
    name = "matmul" if isinstance(call, Arguments) else "grouped_matmul"
    several = bool(epilogue_of(call.epilogue).outputs)
    result = getattr(torch.ops.tmm, f"{name}_outputs" if several else name).default(*call[:-1])
    if call.out is not None:
        return call.out
    return tuple(result) if several else result


def make_plan(
    call: Arguments | GroupedArguments,
    epilogue: Epilogue,
    current: settings.Settings,
    describe: Describe,
    waits: bool = True,
) -> Plan:
    """Check a call, choose and bind its kernel; all errors for bad input are raised here.

    Args:
        describe: Checks the call and returns its problem: this module's :func:`describe` for plain
            calls, or the ``describe`` of :mod:`tmm_core.launch.grouped_call`.
        waits: Wait for a lasting choice: for this process's tuning, or for another's.

    Raises:
        RuntimeError, ValueError, TypeError: See :func:`tmm_core.launch.check.check`.
        TmmError: See :meth:`tmm_core.dispatch.dispatcher.Dispatcher.choose`.
    """
    a = call.a
    if waits and current.on_cache_miss == "background":
        current = settings.changed(current, on_cache_miss="tune")
    # Capture, tuning and compilation all use the current device.
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        problem, fold = describe(call, epilogue, current)
        choice, launcher = answerer().bound(problem, current)
        while waits and not (choice.lasting or awaited()):
            time.sleep(_POLL)
            choice, launcher = answerer().bound(problem, current)
    shape: Sequence[int] = (problem.m, problem.n)
    if choice.candidate.kernel.name in NESTING:
        launcher = announced(launcher)
    if epilogue.outputs:
        launcher = Bound.of(launcher).run  # other forms of the launcher take no outputs
    if fold is not None:
        launcher, shape = fold.wrap(launcher, a, call.b, call.residual), fold.shape
    launcher = allocating_outputs(epilogue, launcher, shape)
    return Plan.of(problem, choice, launcher, call)


def describe(
    call: Arguments, epilogue: Epilogue, current: settings.Settings
) -> tuple[Problem, Fold | None]:
    """Return the problem of one call's arguments, with operands folded to 2-D or 3-D."""
    a, b, residual, out = call.a, call.b, call.residual, call.out
    shape, matrix = check(call, epilogue), b.dim() == 2
    fold = Fold.of(a, b, residual, shape)
    if fold is not None:
        a, b, residual = fold.a(a), fold.b(b), fold.residual(residual)
    flat = shape if fold is None else fold.flat
    if out is not None and out.shape == flat:
        target = out
    else:
        target = torch.empty(flat, dtype=result_dtype(call), device="meta")
    problem = Problem.of(
        a,
        b,
        target,
        fingerprint(a.device),
        bias=call.bias,
        residual=residual,
        stored=stored_operands(call),
        epilogue=epilogue,
        # A tensor with more dimensions is hardly a weight, and may be copied to fold it.
        static_weights=current.static_weights and matrix,
        **numerics(a, call.alpha, current),
    )
    return problem, fold


def numerics(a: Tensor, alpha: float, current: settings.Settings) -> dict[str, Any]:
    """Return the numeric fields of :meth:`Problem.of`: alpha, TF32, and the requirements of the
    settings and the current stream."""
    return {
        "scaled": alpha != 1.0,
        "tf32": a.dtype is torch.float32 and a.is_cuda and _tf32(),
        "deterministic": current.deterministic or torch.are_deterministic_algorithms_enabled(),
        "batch_invariant": current.batch_invariant or current.arithmetic is not None,
        "capturing": a.is_cuda and torch.cuda.is_current_stream_capturing(),
    }


def recall(document: Mapping[str, Any], device: torch.device) -> Problem:
    """Return the problem of a record or a miss, on the current ``device``.

    Raises:
        UnknownNameError, ValueError, KeyError, TypeError: The document is no problem, or names an
            epilogue that is not registered.
    """
    epilogue = answerer().registry.epilogue(document["epilogue"])
    return Problem.from_json(document, fingerprint(device), epilogue)


def quarantine(plan: Any, error: BaseException) -> bool:
    """Quarantine a kernel that raised; False if the caller should see the error.

    Args:
        plan: A :class:`Plan`, or another table's entry.

    Raises:
        PluginError: Its exception would end the process.
    """
    reraise(error)
    if issubclass(type(error), RecursionError) and plan.kernel != BASELINE:
        if launching(skipped=1) == plan.kernel:  # it computes its own problem
            nest(plan.kernel)
            return False
        kept = [each for table in TABLES for each in list(table.values())]
        if plan.kernel in NESTING and not any(each is plan for each in kept):
            return True  # the plan is from before the kernel was found to nest
    hopeless = plan.choice.origin == "forced" or plan.kernel == BASELINE
    # Not isinstance, which reads __class__ of a foreign exception.
    if hopeless or issubclass(type(error), torch.OutOfMemoryError):
        # Foreign code that BLAS runs belongs to the call: an epilogue or a mode. Torch would raise
        # its exceptions, too.
        own = plan.kernel == BASELINE and bool(foreign_place(error))
        if not (own or issubclass(type(error), Exception)):
            raise PluginError(f"kernel {plan.kernel} raised {error_text(error)}") from error
        return False
    answerer().quarantine(plan.problem, plan.choice, error)
    return True


# -- generated: what a warm call runs ------------------------------------------------------


def fast_path_checks(tensors: Sequence[str]) -> Iterator[str]:
    """Yield the body of a function that is true if nothing but autograd needs torch's dispatcher.
    The operator would then do the same as ``run``, 2.5 µs later.

    There is no transform, mode, tracer or tensor subclass. There is no autocast, unless operands
    are ``cast`` already, and no profiler, unless it was ``shown`` the operator."""
    yield "return ("
    yield "    type(a) in PLAIN and type(b) in PLAIN and (cast or not autocasts())"
    yield "    and (shown or not profiles()) and not dispatch_modes() and not function_modes()"
    yield "    and transform() is None and forward_ad._current_level < 0 and tracer() is None"
    yield "    and not (a.is_neg() or b.is_neg() or a.is_conj() or b.is_conj())"
    for name in tensors[2:]:
        yield f"    and ({name} is None or plain({name}))"
    yield ")"


def entries(
    roles: Sequence[Role],
    arguments: type[Arguments | GroupedArguments],
    launch: str,
    launch_stored: str,
    names: dict[str, Any],
) -> tuple[Callable[..., Tensor], Callable[..., Tensor | None]]:
    """Return two functions. ``run`` computes any call. ``replay`` computes a call like an earlier
    one, and returns None if there was none. One branch of each is for plain operands, with a
    shorter key; one is for stored operands. Each branch has the source of its launch."""
    plain = [role for role in roles if role.name not in (*EXTRAS, "formats")]
    absent = [f"{name} is None" for name in EXTRAS]
    call = ", ".join(arguments._fields)
    functions = []
    for name, ends in (("run", f"return run({call})"), ("replay", "return None")):
        of_plain = _replay(plain, arguments, launch, replays=name == "replay")
        of_stored = _replay(roles, arguments, launch_stored, replays=name == "replay")
        body = [
            f"if {' and '.join(absent)} and not formats:",
            *(f"    {line}" for line in of_plain),
            "else:",
            *(f"    {line}" for line in of_stored),
            ends,
        ]
        functions.append(written(name, parameters(arguments._fields, arguments), body, names))
        add_entry(functions[-1])
    return functions[0], functions[1]


def _replay(
    roles: Iterable[Role], arguments: type[Arguments | GroupedArguments], launch: str, replays: bool
) -> Iterator[str]:
    """Yield statements that look the plan up by the keys of ``roles``, and launch it with the
    source ``launch``. They fall through if the kernel was quarantined."""
    yield "key = ("
    for role in roles:
        part = role.key.format(role.name)
        if role.is_tensor and role.optional:
            part = f"None if {role.name} is None else ({part})"
        yield f"    {part},"
    yield "    overridden(), deterministic(),"
    yield "    a.dtype is float32 and a.is_cuda and _tf32(),"
    yield ")"
    yield "plan = _plans.get(key)"
    yield "if plan is None:"
    if replays:
        yield "    return None"
    else:
        call = f"{arguments.__name__}({', '.join(arguments._fields)})"
        yield "    if a.is_meta:"
        yield f"        return _on_meta({call})"
        yield f"    plan = _build(key, {call}, describe)"
    yield "try:"
    yield "    if profiler._is_profiler_enabled:"
    yield "        # Under the kernel's name, for whoever is profiling."
    yield "        with profiler.record_function(plan.kernel, str(plan.choice.candidate.config)):"
    yield f"            return {launch}"
    yield f"    return {launch}"
    yield "except BaseException as error:  # a kernel may call sys.exit"
    yield "    if not quarantine(plan, error):"
    yield "        raise"
    yield "    _plans.pop(key, None)"
    yield "    plan = None  # its launch has ended"


#: The names that the functions use: this module's, and queries of torch's state and of the
#: settings. Each query is one C call of about 50 ns.
NAMES = vars(compat) | globals()
NAMES |= {"overridden": settings.overridden, "float32": torch.float32}

fast_path_allowed: Callable[..., bool] = written(
    "fast_path_allowed",
    parameters(TENSORS) + ", cast=False, shown=False",
    fast_path_checks(TENSORS),
    NAMES,
)


run, replay = entries(
    ROLES,
    Arguments,
    f"plan.launcher({', '.join(LAUNCHED)})",
    f"plan.with_extras({', '.join((*LAUNCHED, *EXTRAS))})",
    NAMES,
)
