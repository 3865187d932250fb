"""A choice made once, ready to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tmm_core.compat import tensor_guards
from tmm_core.launch.check import check_tensors
from tmm_core.launch.source import Body, address, written
from tmm_core.spec.kernel import Candidate, Launcher
from tmm_core.spec.problem import Problem, packed

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


def signature(t: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on of a tensor, besides its values."""
    return (t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device())


def scales_signature(*scales: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Likewise of scales, whose strides and address no kernel sees; None without any."""
    if all(t is None for t in scales):
        return None
    return tuple(None if t is None else (t.shape, t.dtype, t.get_device()) for t in scales)


class _Callable:
    """What a call of a plan runs is the plan's own function, not a method: one frame less."""

    __slots__ = ("__call__",)

    if TYPE_CHECKING:

        def __call__(
            self,
            a: Tensor,
            b: Tensor,
            bias: Tensor | None = None,
            residual: Tensor | None = None,
            out: Tensor | None = None,
            *,
            scale_a: Tensor | None = None,
            scale_b: Tensor | None = None,
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
    #: :func:`signature` of a and of b, one after the other.
    operands: tuple[Any, ...]
    #: Of bias and residual, where the plan has either.
    extras: tuple[Any, ...] | None
    #: :func:`scales_signature` of the scales.
    scales: tuple[Any, ...] | None

    @classmethod
    def of(
        cls,
        problem: Problem,
        choice: Choice,
        launcher: Launcher,
        alpha: float,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> Plan:
        """The plan for ``tensors``: a, b, bias and residual."""
        a, b, bias, residual = tensors
        operands, extras = signature(a) + signature(b), _extras(bias, residual)
        return cls(problem, choice, launcher, alpha, operands, extras, scales_signature(*scales))

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

    def ready(self, *tensors: Tensor | None) -> Plan:
        """This plan, made callable, given what it is of: a, b, bias, residual and scales."""
        object.__setattr__(self, "__call__", self._written(tensors))
        return self

    def _written(self, tensors: Sequence[Tensor | None]) -> Callable[..., Tensor]:
        """The function that a call runs: the launcher's own source, where it has one, under
        checks that read each tensor once."""
        given = [name for name, t in zip(_TENSORS, tensors, strict=True) if t is not None]
        body: Body | None = getattr(self.launcher, "body", None)
        planned = self._misalignments()
        pointers = [address(name) for name in planned]
        absent = [f" or {name} is not None" for name in _TENSORS if name not in given]
        everything = ", ".join(_TENSORS)
        again = "call(a, b, bias, residual, out, scale_a=scale_a, scale_b=scale_b)"
        namespace = {**(body.namespace if body else {}), "plan_launcher": self.launcher}
        namespace |= {"alpha": self.alpha, "plan_packed": packed}
        renewed = False

        def check(a: Tensor, b: Tensor, *others: Tensor | None) -> None:
            nonlocal renewed
            self._check(a, b, *others)
            # They differ in what is no matter here, such as inference mode. Looked at once
            # more and not again and again, for who alternates.
            if not renewed and (guards := _guards((a, b, *others))) is not None:
                namespace["plan_same"], renewed = guards, True

        namespace["plan_check"] = check
        namespace["plan_check_out"] = self._check_out
        namespace["plan_same"] = _guards(tensors) or _differs
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
        if self.scales is not None:
            lines.append("scale_a, scale_b = plan_packed(scale_a), plan_packed(scale_b)")
        if body is not None:
            lines += [line for line in body.lines if line not in pointers]
        else:
            scales = "" if self.scales is None else ", scale_a, scale_b"
            lines.append(f"return plan_launcher(a, b, bias, residual, alpha, out{scales})")
        parameters = "a, b, bias=None, residual=None, out=None, *, scale_a=None, scale_b=None"
        return written("call", parameters, lines, namespace)  # type: ignore[no-any-return]

    def _misalignments(self) -> dict[str, int]:
        """How far from a multiple of 16 the tensors that kernels address were planned to start."""
        planned = {"a": self.operands[3], "b": self.operands[8]}
        for name, extra in zip(("bias", "residual"), self.extras or (None, None), strict=True):
            if extra is not None:
                planned[name] = extra[3]
        return planned

    def _check(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
    ) -> None:
        """Hold what a call is given against what was planned.

        Raises:
            ValueError: As :class:`Plan` says.
        """
        check_tensors("plan", a=a, b=b, bias=bias, residual=residual)
        planned = (self.operands[:5], self.operands[5:], *(self.extras or (None, None)))
        given = (signature(a), signature(b), *(_extras(bias, residual) or (None, None)))
        for name, expected, found in zip(_TENSORS, planned, given, strict=False):
            if expected != found:
                raise ValueError(self._mismatch(name, _FIELDS, expected, found))
        scales = scales_signature(scale_a, scale_b)
        if scales != self.scales:
            none = (None, None)
            for name, *pair in zip(_TENSORS[4:], self.scales or none, scales or none, strict=True):
                if pair[0] != pair[1]:
                    raise ValueError(self._mismatch(name, _SCALE_FIELDS, *pair))

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


_TENSORS = ("a", "b", "bias", "residual", "scale_a", "scale_b")
#: What messages call the fields of :func:`signature`, of :func:`scales_signature` and of an output.
_FIELDS = ("shape", "strides", "dtype", "offset from 16 bytes", "device index")
_SCALE_FIELDS = ("shape", "dtype", "device index")
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


def _extras(bias: torch.Tensor | None, residual: torch.Tensor | None) -> tuple[Any, ...] | None:
    if bias is None and residual is None:
        return None
    return tuple(t if t is None else signature(t) for t in (bias, residual))
