"""A choice made once, ready to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tmm_core.compat import tensor_guards
from tmm_core.launch.check import check_tensors
from tmm_core.launch.source import Body, address, written
from tmm_core.spec.arguments import (
    EXTRAS,
    FIELDS,
    LAUNCHED,
    ROLE,
    SIGNATURE,
    TENSORS,
    Arguments,
    keywords,
    parameters,
    signature,
)
from tmm_core.spec.kernel import Bound, Called, Candidate, Launcher
from tmm_core.spec.problem import Problem

Tensor = torch.Tensor

Origin = Literal["forced", "cache", "tuned", "neighbour", "heuristic", "fallback"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which candidate, why, and on what evidence."""

    candidate: Candidate
    origin: Origin
    #: One line for ``explain()``: the record's file, the neighbour, what forbade tuning.
    reason: str = ""
    #: The problem the evidence is about, where it is not the one asked (bucket, neighbour).
    evidence: Problem | None = None
    #: In batch-invariant mode the name of what all M of the weight are summed by.
    arithmetic: str | None = None


class _Callable(Called):
    __slots__ = ()

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
    """A candidate bound to a problem: compiled, and callable with tensors of the very
    shapes, strides, dtypes, devices and alignment it was made for.

    >>> p = tmm_core.plan(x, weight.T, epilogue="silu")      # doctest: +SKIP
    >>> y = p(x, weight.T)                                   # doctest: +SKIP

    It takes ``(a, b, bias=None, residual=None, out=None, *, scale_a=None, scale_b=None)``,
    looks nothing up and launches on the current stream. ``out`` is row-major, of the result's
    shape and dtype, and starts on 16 bytes.

    Raises, when called:
        ValueError: Tensors of other shapes, strides, dtypes, devices or alignment than planned
            for, or bias, residual and scales given or left out otherwise than planned.
    """

    problem: Problem
    choice: Choice
    launcher: Launcher
    alpha: float
    #: What the plan depends on of each tensor that it was made for, by name.
    signatures: Mapping[str, tuple[Any, ...]]
    #: The launcher, given all extras by position: it hands on those that the plan has.
    with_extras: Callable[..., Tensor]
    #: The launcher's own source, where it has one.
    body: Body | None

    @classmethod
    def of(
        cls, problem: Problem, choice: Choice, launcher: Launcher | Bound, call: Arguments
    ) -> Plan:
        """The plan for the tensors of ``call``."""
        named = zip(TENSORS, call.tensors, strict=True)
        signatures = {name: signature(name)(t) for name, t in named if t is not None}
        bound = Bound.of(launcher)
        with_extras = _with_extras(bound.run, call) if call.extras else bound.run
        return cls(problem, choice, bound.run, call.alpha, signatures, with_extras, bound.body)

    @property
    def kernel(self) -> str:
        """Name of the kernel this plan launches."""
        return self.choice.candidate.kernel.name

    @property
    def config(self) -> dict[str, Any]:
        """The kernel's config, as JSON."""
        return self.choice.candidate.config.to_json()

    @property
    def origin(self) -> Origin:
        """Where the choice came from."""
        return self.choice.origin

    def ready(self, call: Arguments) -> Plan:
        """This plan, made callable, given what it is of."""
        object.__setattr__(self, "__call__", self._written(call))
        return self

    def _written(self, call: Arguments) -> Callable[..., Tensor]:
        """The function that a call runs: the launcher's own source, where it has one, under
        checks that read each tensor once."""
        given, extras = list(self.signatures), [n for n in EXTRAS if n in self.signatures]
        body = self.body
        planned = self._misalignments()
        pointers = [address(name) for name in planned]
        absent = [f" or {name} is not None" for name in TENSORS if name not in given]
        everything = ", ".join(TENSORS)
        again = f"call(a, b, bias, residual, out{keywords(EXTRAS)})"
        namespace = {**(body.namespace if body else {}), "plan_launcher": self.launcher}
        namespace |= {"alpha": self.alpha}
        renewed = False

        def check(*tensors: Tensor | None) -> None:
            nonlocal renewed
            self._check(tensors)
            # They differ in what is no matter here, such as inference mode. Looked at once
            # more and not again and again, for who alternates.
            if not renewed and (guards := _guards(tensors)) is not None:
                namespace["plan_same"], renewed = guards, True

        namespace["plan_check"] = check
        namespace["plan_check_out"] = self._check_out
        namespace["plan_same"] = _guards(call.tensors) or _differs
        lines = [
            body.on_device(again) if body else "pass",
            f"if not plan_same({', '.join(given)}){''.join(absent)}:",
            f"    plan_check({everything})",
            *pointers,
            f"if {_misaligned(planned)}:",
            f"    plan_check({everything})",
            "if out is not None:",
            "    plan_check_out(a, out)",
        ]
        lines += map(_pack, extras)
        if body is not None:
            lines += [line for line in body.lines if line not in pointers]
        else:
            lines.append(f"return plan_launcher({', '.join(LAUNCHED)}{keywords(extras)})")
        common = [name for name in TENSORS if name not in EXTRAS]
        taken = [*common, "out", "*", *EXTRAS]
        return written("call", parameters(taken), lines, namespace)  # type: ignore[no-any-return]

    def _misalignments(self) -> dict[str, int]:
        """How far from a multiple of 16 the tensors that kernels address were planned to start."""
        return {
            name: planned[3]
            for name, planned in self.signatures.items()
            if ROLE[name].key == SIGNATURE
        }

    def _check(self, tensors: Sequence[Tensor | None]) -> None:
        """Hold what a call is given, in the order of ``TENSORS``, against what was planned.

        Raises:
            ValueError: As :class:`Plan` says.
        """
        named = dict(zip(TENSORS, tensors, strict=True))
        check_tensors("plan", **named)
        for name, t in named.items():
            planned, found = self.signatures.get(name), None if t is None else signature(name)(t)
            if planned != found:
                raise ValueError(self._mismatch(name, FIELDS[ROLE[name].key], planned, found))

    def _check_out(self, a: torch.Tensor, out: torch.Tensor) -> None:
        problem = self.problem
        planned = problem.out.dtype, a.get_device()
        count = problem.batch * problem.m * problem.n
        if (
            (out.dtype, out.get_device()) != planned
            or out.numel() != count
            or out.data_ptr() & 15
            or not out.is_contiguous()
        ):
            expected = (count, True, 0, *planned)
            offset = out.data_ptr() & 15
            found = (out.numel(), out.is_contiguous(), offset, out.dtype, out.get_device())
            raise ValueError(self._mismatch("out", _OUT_FIELDS, expected, found))

    def _mismatch(self, name: str, fields: tuple[str, ...], planned: Any, given: Any) -> str:
        """What differs, and nothing that does not."""
        if planned is None:
            return f"plan for {self.problem} takes no {name}, got one"
        if given is None:
            return f"plan for {self.problem} takes {name}, got none"
        pairs = zip(fields, planned, given, strict=True)
        differ = [(field, p, g) for field, p, g in pairs if p != g]
        if differ[0][0] == "shape":  # other strides go with it
            differ = [each for each in differ if each[0] != "strides"]
        expected = ", ".join(f"{field} {_shown(p)}" for field, p, _ in differ)
        found = ", ".join(f"{field} {_shown(g)}" for field, _, g in differ)
        return f"plan for {self.problem} takes {name} of {expected}, got {found}"

    def __str__(self) -> str:
        return f"{self.problem} → {self.choice.candidate} ({self.choice.origin})"


#: What messages call the fields of an output.
_OUT_FIELDS = (
    "number of elements",
    "contiguity",
    "offset from 16 bytes",
    "dtype",
    "device index",
)


def _shown(value: Any) -> str:
    return str(tuple(value) if isinstance(value, tuple) else value)


def _misaligned(planned: dict[str, int]) -> str:
    """The expression that is true where an address is not as far from a multiple of 16 as it
    was planned to be."""
    if not any(planned.values()):
        return f"({' | '.join(f'{name}_ptr' for name in planned)}) & 15"
    return " or ".join(f"{name}_ptr & 15 != {offset}" for name, offset in planned.items())


def _guards(tensors: Sequence[Tensor | None]) -> Callable[..., bool] | None:
    """What says whether it is given tensors of the very types, dtypes, devices, shapes and
    strides of these: one call of C for what reading and comparing them takes ten (0.35 µs for
    0.9). It may also say no for what is no matter here. None where this torch has no such thing,
    or has none for these."""
    given = [t for t in tensors if t is not None]
    sizes: list[Any] = [list(t.shape) for t in given]
    strides: list[Any] = [list(t.stride()) for t in given]
    try:
        guards = tensor_guards()(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards.check if guards.check(*given) is True else None
    except Exception:  # it belongs to the compiler, whose business may change
        return None


def _differs(*tensors: Tensor) -> bool:
    return False


def _with_extras(launcher: Launcher, call: Arguments) -> Callable[..., Tensor]:
    given = call.extras
    lines = [*map(_pack, given), f"return launcher({', '.join(LAUNCHED)}{keywords(given)})"]
    parameters = ", ".join((*LAUNCHED, *EXTRAS))
    return written("launch", parameters, lines, {"launcher": launcher})  # type: ignore[no-any-return]


def _pack(name: str) -> str:
    """The statement that makes an extra what kernels index by row or column alone."""
    return f"{name} = {name}.contiguous()"
