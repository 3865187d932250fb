"""Plans: choices that are made once and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from tmm_base.guards import suppress

from tmm_core import formats
from tmm_core.compat import autocasts, autocasts_on, tensor_guards
from tmm_core.launch.check import (
    announce_write,
    check_tensors,
    dense,
    product_shape,
    refuse_overlap,
)
from tmm_core.launch.codegen import address, written
from tmm_core.spec.arguments import (
    EXTRAS,
    FIELDS,
    GROUPED_EXTRAS,
    LAUNCHED,
    ROLE,
    SIGNATURE,
    TENSORS,
    Arguments,
    GroupedArguments,
    keywords,
    parameters,
    signature,
)
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.problem import Problem

if TYPE_CHECKING:
    from tmm_core.spec.kernel import Candidate

Tensor = torch.Tensor

Origin = Literal["forced", "cache", "tuned", "neighbour", "heuristic", "fallback"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidate, the source of the choice, and the reason."""

    candidate: Candidate
    origin: Origin
    #: One line for ``explain()``: the record's file, the neighbour, or why tuning was forbidden.
    reason: str = ""
    #: In batch-invariant mode, the name of the arithmetic that serves all M of the weight.
    arithmetic: str | None = None
    #: Whether later calls may replay the choice. False if it only answers until a record is stored.
    lasting: bool = True

    @property
    def from_record(self) -> bool:
        """Whether a record of the problem or of its bucket decided."""
        return self.origin in ("cache", "tuned")


class _Callable:
    """Calls run a function of the instance instead of a method, which saves a frame."""

    __slots__ = ("__call__",)

    if TYPE_CHECKING:

        def __call__(
            self,
            a: Tensor,
            b: Tensor,
            bias: Tensor | None = None,
            residual: Tensor | None = None,
            out: Tensor | None = None,
            **extras: Tensor | None,
        ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Plan(_Callable):
    """A compiled candidate that is bound to a problem. Its tensors must have exactly the shapes,
    strides, dtypes, devices and alignment for which it was made.

    >>> p = tmm_core.plan(x, weight.T, epilogue="silu")      # doctest: +SKIP
    >>> y = p(x, weight.T)                                   # doctest: +SKIP

    It takes ``(a, b, bias=None, residual=None, out=None)`` and, by keyword, the call's scales,
    except for those of a :class:`tmm_core.Quantized`. It launches on the current stream, without a
    look-up. ``out`` is row-major, has the result's shape and dtype, and is aligned to 16 bytes.

    Raises, when called:
        ValueError: Shapes, strides, dtypes, devices or alignment of tensors differ from the plan's.
            A bias, residual or scale is missing, or is given although the plan has none. Or a
            tensor is a negative or conjugate view.
        RuntimeError: ``out`` requires a gradient while gradients are recorded.
    """

    problem: Problem
    choice: Choice
    launcher: Launcher
    #: The launcher with all extras as positional arguments. It passes on the plan's extras.
    with_extras: Callable[..., Tensor]

    @classmethod
    def of(
        cls,
        problem: Problem,
        choice: Choice,
        launcher: Launcher | Bound,
        call: Arguments | GroupedArguments,
    ) -> Plan:
        """Return the plan for the tensors of ``call``."""
        run = Bound.of(launcher).run
        extras = EXTRAS if isinstance(call, Arguments) else GROUPED_EXTRAS
        given = [name for name in extras if getattr(call, name) is not None]
        with_extras = _with_extras(problem, run, extras, given) if given else run
        return cls(problem, choice, run, with_extras)

    def __deepcopy__(self, memo: Any = None) -> Plan:
        """The plan itself, which never changes: a model that holds a plan can be copied."""
        return self

    __copy__ = __deepcopy__

    @property
    def kernel(self) -> str:
        """Name of the kernel this plan launches."""
        return self.choice.candidate.kernel.name

    @property
    def config(self) -> dict[str, Any]:
        """The kernel's config, as JSON."""
        return self.choice.candidate.fields

    @property
    def origin(self) -> Origin:
        """Where the choice came from."""
        return self.choice.origin

    def __repr__(self) -> str:
        return f"<Plan {self.problem}: {self.choice.candidate}, {self.origin}>"

    def ready(self, call: Arguments, read: Callable[[Arguments], Arguments] | None = None) -> Plan:
        """Make this plan callable for the arguments it was made of, and return it.

        Args:
            read: Replaces quantised operands by their parts, if the plan was made of such operands.
        """
        self._refuse_lazy(zip(TENSORS, call.tensors, strict=True))
        run = self._written(call)
        object.__setattr__(
            self, "__call__", run if read is None else self._reading(run, call, read)
        )
        return self

    def _reading(
        self, run: Callable[..., Tensor], made_of: Arguments, read: Callable[[Arguments], Arguments]
    ) -> Callable[..., Tensor]:
        """Return ``run`` for operands that may be quantised tensors."""

        def call(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None = None,
            residual: Tensor | None = None,
            out: Tensor | None = None,
            **extras: Tensor | None,
        ) -> Tensor:
            given = read(Arguments(a, b, **extras))  # type: ignore[arg-type]
            if given.formats not in ("", made_of.formats):
                raise ValueError(
                    f"plan for {self.problem} takes operands of formats {made_of.formats}, "
                    f"got {given.formats}"
                )
            parts = {name: getattr(given, name) for name in EXTRAS}
            return run(given.a, given.b, bias, residual, out, **parts)

        return call

    def _written(self, call: Arguments) -> Callable[..., Tensor]:
        """Return the function that a call runs: checks that read each tensor once, then the
        launcher."""
        named = zip(TENSORS, call.tensors, strict=True)
        signatures = {name: signature(name)(t) for name, t in named if t is not None}
        given, extras = list(signatures), [name for name in EXTRAS if name in signatures]
        # The address modulo 16 of each tensor that kernels address.
        planned = {n: seen[3] for n, seen in signatures.items() if ROLE[n].key == SIGNATURE}
        absent = [f" or {name} is not None" for name in TENSORS if name not in given]
        everything = ", ".join(TENSORS)
        again = f"call(a, b, bias, residual, out{keywords(EXTRAS)})"
        namespace: dict[str, Any] = {"plan_launcher": self.launcher, "alpha": call.alpha}
        renewed = False

        def check(*tensors: Tensor | None) -> None:
            nonlocal renewed
            self._check(signatures, tensors)
            # The tensors differ from the guards in an irrelevant property, such as inference mode.
            # The guards are renewed only once, in case calls alternate.
            if not renewed and (guards := _guards(tensors)) is not None:
                namespace["plan_same"], renewed = guards, True

        namespace["plan_check"] = check
        tensors = [getattr(call, name) for name in given]
        # Computed once: calls then compare only addresses.
        packed = [t.nbytes if dense(t) else 0 for t in tensors]
        namespace["plan_check_out"] = functools.partial(self._check_out, self._shape(call), packed)
        namespace["plan_same"] = _guards(call.tensors) or (lambda *_: False)
        device = call.a.device.type
        namespace["plan_autocasts"] = functools.partial(autocasts_on, device)
        namespace["plan_as_it_is"] = functools.partial(torch.autocast, device, enabled=False)
        namespace["any_autocasts"] = autocasts
        lines = [
            # A launcher that calls torch's functions would multiply operands that autocast casts.
            "if any_autocasts() and plan_autocasts():",
            "    with plan_as_it_is():",
            f"        return {again}",
            f"if not plan_same({', '.join(given)}){''.join(absent)}:",
            f"    plan_check({everything})",
            *map(address, planned),
            f"if {_misaligned(planned)}:",
            f"    plan_check({everything})",
            "if out is not None:",
            f"    plan_check_out(out, {', '.join(given)})",
        ]
        lines += [_pack(self.problem, name) for name in extras]
        launched = keywords(ROLE[name].keyword for name in extras)
        lines.append(f"return plan_launcher({', '.join(LAUNCHED)}{launched})")
        common = [name for name in TENSORS if name not in EXTRAS]
        taken = [*common, "out", "*", *EXTRAS]
        return written("call", parameters(taken), lines, namespace)  # type: ignore[no-any-return]

    def _check(
        self, signatures: Mapping[str, tuple[Any, ...]], tensors: Sequence[Tensor | None]
    ) -> None:
        """Check a call's tensors, in the order of ``TENSORS``, against the plan's ``signatures``:
        the properties on which the plan depends, by tensor name.

        Raises:
            ValueError: See :class:`Plan`.
        """
        named = dict(zip(TENSORS, tensors, strict=True))
        check_tensors("plan", **named)
        self._refuse_lazy(named.items())
        for name, t in named.items():
            planned, found = signatures.get(name), None if t is None else signature(name)(t)
            if planned != found:
                raise ValueError(self._mismatch(name, FIELDS[ROLE[name].key], planned, found))

    def _refuse_lazy(self, named: Iterable[tuple[str, Tensor | None]]) -> None:
        """Refuse views that negate or conjugate what is in memory, which kernels read."""
        for name, t in named:
            if t is not None and (t.is_neg() or t.is_conj()):
                raise ValueError(
                    f"plan for {self.problem} takes {name} as it is in memory, got a negative or "
                    f"conjugate view: call {name}.resolve_neg() or resolve_conj()"
                )

    def _shape(self, call: Arguments) -> tuple[int, ...]:
        """Return the shape of the call's result."""
        pair = formats.pair(call.a.dtype, call.b.dtype, call.formats)
        shape = tuple(product_shape(call.a, call.b, pair.packs))
        return (*shape[:-1], self.problem.n) if self.problem.gated else shape

    def _check_out(
        self, shape: tuple[int, ...], packed: list[int], out: torch.Tensor, *given: torch.Tensor
    ) -> None:
        """Check the output of a call, and announce that it is written.

        Args:
            packed: Bytes of each of the ``given`` tensors; 0 for one with gaps.
        """
        a, start = given[0], out.data_ptr()
        expected = shape, True, 0, self.problem.out.dtype, a.device
        found = tuple(out.shape), out.is_contiguous(), start & 15, out.dtype, out.device
        if found != expected:
            raise ValueError(self._mismatch("out", _OUT_FIELDS, expected, found))
        self._refuse_lazy([("out", out)])
        if out.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a plan is not differentiable, but out requires a gradient")
        for t, size in zip(given, packed, strict=True):
            if t.data_ptr() < start + out.nbytes and start < t.data_ptr() + size:
                refuse_overlap()
        announce_write(out)

    def _mismatch(self, name: str, fields: tuple[str, ...], planned: Any, given: Any) -> str:
        """Return a message with only the fields that differ."""
        if planned is None:
            return f"plan for {self.problem} takes no {name}, got one"
        if given is None:
            return f"plan for {self.problem} takes {name}, got none"
        pairs = zip(fields, planned, given, strict=True)
        differ = [(field, p, g) for field, p, g in pairs if p != g]
        if differ[0][0] == "shape":  # strides then differ too
            differ = [each for each in differ if each[0] != "strides"]
        expected = ", ".join(f"{field} {_shown(p)}" for field, p, _ in differ)
        found = ", ".join(f"{field} {_shown(g)}" for field, _, g in differ)
        return f"plan for {self.problem} takes {name} of {expected}, got {found}"

    def __str__(self) -> str:
        return f"{self.problem} → {self.choice.candidate} ({self.choice.origin})"


#: Names of the fields of an output in messages.
_OUT_FIELDS = ("shape", "contiguity", "offset from 16 bytes", "dtype", "device")


def _shown(value: Any) -> str:
    return str(tuple(value) if isinstance(value, tuple) else value)


def _misaligned(planned: dict[str, int]) -> str:
    """Return an expression that is true if an address modulo 16 differs from the planned one."""
    if not any(planned.values()):
        return f"({' | '.join(f'{name}_ptr' for name in planned)}) & 15"
    return " or ".join(f"{name}_ptr & 15 != {offset}" for name, offset in planned.items())


def _guards(tensors: Sequence[Tensor | None]) -> Callable[..., bool] | None:
    """Return a guard that is true for tensors with exactly the types, dtypes, devices, shapes and
    strides of these. It is one C call instead of ten (0.35 µs instead of 0.9), and may also fail
    for irrelevant differences. None if this torch has no guard for these tensors."""
    given = [t for t in tensors if t is not None]
    sizes: list[Any] = [list(t.shape) for t in given]
    strides: list[Any] = [list(t.stride()) for t in given]
    with suppress(Exception):  # an internal API of torch.compile, which may change
        guards = tensor_guards()(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards.check if guards.check(*given) is True else None
    return None


def _with_extras(
    problem: Problem, launcher: Launcher, extras: Sequence[str], given: Sequence[str]
) -> Callable[..., Tensor]:
    launched = keywords(ROLE[name].keyword for name in given)
    packed = [_pack(problem, name) for name in given]
    lines = [*packed, f"return launcher({', '.join(LAUNCHED)}{launched})"]
    parameters = ", ".join((*LAUNCHED, *extras))
    return written("launch", parameters, lines, {"launcher": launcher})  # type: ignore[no-any-return]


def _pack(problem: Problem, name: str) -> str:
    """Return the statement that assigns an extra to its name in launches. Kernels index an extra by
    row or column alone, so it is made contiguous; they use the strides of a grid of scales."""
    role = ROLE[name]
    grid = role.of and getattr(problem, role.of).grid
    return f"{role.keyword} = {name}" + ("" if grid else ".contiguous()")
