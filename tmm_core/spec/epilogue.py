"""Epilogues: functions of the fp32 accumulator before it is rounded and stored.

``out = epilogue(alpha · (a @ b) + bias) + residual``

An :class:`Epilogue` holds one function in several forms. The reference in torch is what kernels are
verified against, and what BLAS applies. Kernels fuse the device function, in Triton's language. A
derivative saves torch from differentiating the reference in training. The epilogues of every
installation are in :mod:`tmm_core.epilogues`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Union

import torch
from tmm_base.guards import suppress

from tmm_core.errors import of_the_call, shown
from tmm_core.formats import FLOATS
from tmm_core.spec.code import unique
from tmm_core.spec.identity import (
    Code,
    cells_of,
    frozen,
    identity,
    is_frozen,
    lasting_text,
    reader_of,
    reads_objects,
)
from tmm_core.spec.port import Port, returned

if TYPE_CHECKING:
    import triton.language as tl

_Function = Callable[..., torch.Tensor]
EpilogueLike = Union[None, str, "Epilogue", _Function, Sequence[Union[str, "Epilogue", _Function]]]


#: The smallest normal number of fp32.
_LEAST_POSITIVE = 2.0**-126


@dataclass(frozen=True, eq=False)
class Epilogue:
    """A function of the accumulator, element by element.

    Args:
        name: An identifier, as users write it in ``epilogue="…"``.
        reference: ``(z, *parameters) -> Tensor`` in torch; for a gated epilogue
            ``(gate, up, *parameters)``. It has to accept any floating dtype, fp64 included, and to
            return a tensor of its input's shape. The result is rounded to the call's dtype.
        device: The same function of fp32 blocks in Triton's language, its parameters annotated
            ``tl.constexpr``. It is a ``@triton.jit`` function or a plain one. A plain one is jitted
            when a kernel first fuses it, so that defining an epilogue need not import Triton. It
            may use ``tl`` without importing it, numbers, and other functions of both kinds.
            ``None``: no kernel can fuse it and BLAS applies the reference.
        derivative: ``(z, *parameters) -> Tensor``, d epilogue / d z; for a gated epilogue
            ``(gate, up, *parameters)`` to the pair ``(d/d gate, d/d up)``. Made of torch's
            operators, so that it can be differentiated again. ``None``: torch differentiates
            the reference.
        device_derivative: The derivative in Triton's language, like ``device``. With ``device``,
            ``derivative`` and this, training takes one kernel for the epilogue and one for its
            derivative.
        parameters: Default values of the extra arguments, baked into compiled kernels. ``None``:
            the numbers that ``reference`` has as defaults.
        gated: Takes two halves of the product, ``z[..., :N]`` (gate) and ``z[..., N:]``
            (up), and returns one of width N.
        interleaved: A gated epilogue that takes alternate columns instead, ``z[..., 0::2]`` and
            ``z[..., 1::2]``. It has no ``derivative``: torch differentiates its reference.
        linear: ``f(x + y) == f(x) + f(y)``: partial sums may pass through it.
        output_vjp: ``(grad, y, *parameters) -> Tensor``, made of torch's operators: ``grad`` times
            the derivative, if that follows from the output ``y = f(z)``, as tanh's does. The call
            is then one fused kernel while training too. ``y`` is None for a linear epilogue. A
            gated epilogue has none.
        outputs: Auxiliary outputs: a call returns ``(result, *outputs)``. They are not
            differentiable. In a chain each is computed from the whole chain's result.
        outputs_of: ``y -> tuple``, all outputs of a result of 16 or 32 bits at once, as BLAS
            computes them. None: each by its own reference.

    Raises:
        ValueError: The name is no identifier. A parameter is not finite, or not above 0 in a
            ``positive`` epilogue. Two outputs have one name. Or an interleaved epilogue is not
            gated, or has a derivative.
        TypeError: A function, a flag or a tuple is of another type.
    """

    name: str
    reference: Callable[..., torch.Tensor]
    device: Any = None
    derivative: Callable[..., Any] | None = None
    parameters: tuple[float, ...] = None  # type: ignore[assignment]  # set in __post_init__
    gated: bool = False
    linear: bool = False
    output_vjp: Callable[..., torch.Tensor] | None = None
    device_derivative: Any = None
    outputs: tuple[Port, ...] = ()
    outputs_of: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None
    #: Parameters have to be above 0, in fp32 too: softcap divides by its cap.
    positive: bool = field(default=False, repr=False)
    #: The stages of a chain, each an epilogue; empty for a single stage. The ``reference`` of a
    #: chain is its first stage's. ``apply`` applies all stages.
    stages: tuple[Epilogue, ...] = field(default=(), repr=False)
    interleaved: bool = False
    #: Whether it is built in. Tmm's version then determines its behaviour, so its name is its key.
    builtin: bool = field(default=False, repr=False)

    if TYPE_CHECKING:
        # Attributes that are no fields. Graphs of torch.compile, which cannot trace
        # :meth:`interned`, are guarded by them.

        @property
        def traced(self) -> str:
            """A text that differs between epilogues of this process that compute different results.
            It covers the variables that functions read when the epilogue was made. Empty if it was
            made in a graph."""

        @property
        def traces(self) -> bool:
            """Whether a graph has the reference's own operators and guards: it is the only function
            and reads objects, which may change."""

        @property
        def readers(self) -> tuple[Callable[[], Any], ...]:
            """Functions that return the variables that functions read, at present."""

    def __post_init__(self) -> None:
        self.check_types()
        if not self.stages and not self.name.isidentifier():
            raise ValueError(f"epilogue name must be an identifier, got {self.name!r}")
        more = (self.stages, self.outputs, self.device, self.derivative, self.output_vjp)
        # Torch cannot trace what identifies a function. The graph has the reference's operators.
        in_graph = torch.compiler.is_dynamo_compiling() and not any(more)
        given = self.parameters
        if given is None:
            given = () if in_graph else _defaults(self)
        object.__setattr__(self, "parameters", tuple(float(p) for p in given))
        if not all(map(math.isfinite, self.parameters)):
            raise ValueError(f"epilogue {self.name!r}: parameters must be finite numbers")
        if self.positive and min(self.parameters) < _LEAST_POSITIVE:
            raise ValueError(f"epilogue {self}: its parameters must be above 0")
        if self.interleaved and not self.gated:
            raise ValueError(f"epilogue {self.name!r} is interleaved but not gated")
        if self.interleaved and (self.derivative or self.device_derivative):
            raise ValueError(f"interleaved epilogue {self.name!r} takes no derivative")
        results = [getattr(self, name) for name in (*_FUNCTIONS, "gated", "interleaved", "linear")]
        if self.builtin and _built_in.setdefault(self.name, results) != results:
            # Made of a built-in one by dataclasses.replace: the name stands for other results.
            object.__setattr__(self, "builtin", False)
        if len({port.name for port in self.outputs}) < len(self.outputs):
            raise ValueError(f"epilogue {self.name!r} has two outputs of one name")
        if in_graph:
            for name, value in (("traced", ""), ("traces", True), ("readers", ())):
                object.__setattr__(self, name, value)
            return
        object.__setattr__(self, "traced", repr(self._identity()))
        object.__setattr__(self, "traces", not any(more) and reads_objects(self.reference))
        object.__setattr__(self, "readers", tuple(reader_of(cell) for cell, _ in self._cells()))

    def check_types(self) -> None:
        """Check the types of all fields but the parameters. A flag that is a tensor would make
        every kernel fail at the problems that it declares.

        Raises:
            TypeError: One is of another type.
        """
        if not isinstance(self.name, str):
            raise TypeError(f"an epilogue's name is a text, got {shown(self.name)}")
        about = f"epilogue {self.name!r}"
        for name in (*_FUNCTIONS, "outputs_of"):
            function = getattr(self, name)
            if not callable(function) and (function is not None or name == "reference"):
                kind = "device function" if name.startswith("device") else "function"
                raise TypeError(f"{about}: {name}: {shown(function)} is no {kind}")
        for name in ("gated", "interleaved", "linear", "positive", "builtin"):
            if type(flag := getattr(self, name)) is not bool:
                raise TypeError(f"{about}: {name} is True or False, got {shown(flag)}")
        for name, member in (("outputs", Port), ("stages", Epilogue)):
            given = getattr(self, name)
            listed = type(given) in (tuple, list)
            if not listed or not all(issubclass(type(each), member) for each in given):
                raise TypeError(f"{about}: {name} is a tuple of {member.__name__}s")

    @cached_property
    def key(self) -> str:
        """Identity on disk: the name, the parameters and, for a user's epilogue, a digest of its
        functions at its first use. If it is not :attr:`lasting`, the digest is valid only in this
        process. Once a variable that they read changes, :meth:`interned` returns another epilogue's
        text; this key does not change."""
        if self.stages:
            return "+".join(stage.key for stage in self.stages)
        text = self.name
        if self.parameters:
            text += "(" + ",".join(repr(p) for p in self.parameters) + ")"
        if self.builtin and not self.outputs:
            return text
        texts = self._lasting_texts
        if texts is None:
            new = unique(), self._frozen
            kept = _of_process.setdefault(self._identity(), new)
            texts = [kept[0]]
            if kept is new and len(_of_process) == MANY:
                logging.getLogger("tmm_core").warning(_HOLDS, MANY, self.name)
        return f"{text}@{hashlib.sha256(repr(texts).encode()).hexdigest()[:12]}"

    @property
    def lasting(self) -> bool:
        """Whether other processes can have the same key. Each function then is None, a function of
        torch's, or a function without a closure in a module with files."""
        return all(stage._lasting_texts is not None for stage in self.chain)

    @cached_property
    def _lasting_texts(self) -> list[str] | None:
        """Texts that identify the epilogue in every process; None if there are none."""
        texts = [text for each in self._functions if (text := lasting_text(each)) is not None]
        return [repr(self._fields), *texts] if len(texts) == len(self._functions) else None

    def _identity(self) -> Hashable:
        """Return the epilogue's identity in this process, with the present variables."""
        if self.stages:
            return tuple(stage._identity() for stage in self.stages)
        return self._fields, tuple(map(identity, self._functions))

    @property
    def _fields(self) -> tuple[Any, ...]:
        """The fields that results depend on, without functions."""
        ports = [
            (port.name, port.kind, str(port.dtype), port.reduce)
            # Without groups the field is left out, which keeps older keys.
            + ((port.group,) if port.group else ())
            for port in self.outputs
        ]
        flags = self.gated, self.interleaved, self.linear
        return self.name, self.parameters, *flags, *ports

    @property
    def _functions(self) -> list[Any]:
        """The functions on which results depend; none for a built-in epilogue, whose name stands
        for them."""
        names = () if self.builtin else _FUNCTIONS
        ports = [each for port in self.outputs for each in (port.of, port.device)]
        together = [] if self.outputs_of is None else [self.outputs_of]
        return [getattr(self, name) for name in names] + ports + together

    def interned(self) -> str:
        """Store this epilogue, with the present variables of its functions, and return the
        text under which the operator finds it."""
        kept, cells = self._frozen
        for cell, value in cells:
            if cell.cell_contents is not value:
                del self.__dict__["_frozen"]
                return self.interned()
        text = kept._text
        INTERNED.setdefault(text, kept)
        return text

    @cached_property
    def _frozen(self) -> tuple[Epilogue, list[tuple[Any, Any]]]:
        """Return a copy of this epilogue with its present closure variables, and all variables that
        it reads, with its code. A copy, because plans outlive calls and equal epilogues share
        plans."""
        stages, cells = self.chain, self._cells()
        if not cells:
            return self, cells
        copies = []
        for stage in stages:
            outputs = tuple(
                replace(port, of=frozen(port.of), device=frozen(port.device))
                for port in stage.outputs
            )
            names = () if stage.builtin else _FUNCTIONS
            fields = {name: frozen(getattr(stage, name)) for name in names}
            copies.append(replace(stage, outputs=outputs, **fields))
        functions = [each for stage in stages for each in stage._functions if is_frozen(each)]
        cells += [(Code(each), each.__code__) for each in functions]
        return functools.reduce(Epilogue.then, copies), cells

    def _cells(self) -> list[tuple[Any, Any]]:
        """The variables that functions read, closures' and globals, with their present values."""
        each = (function for stage in self.chain for function in stage._functions)
        return [cell for function in each for cell in cells_of(function)]

    @cached_property
    def _text(self) -> str:
        """The key; with a number if another epilogue with this key reads other objects."""
        text, number = self.key, 0
        while INTERNED.setdefault(text, self) != self:
            number += 1
            text = f"{self.key}#{number}"
        return text

    # The effect of torch.compiler.assume_constant_result, which would import the whole compiler:
    # the method runs while a graph is traced, and is not part of the graph.
    interned._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def chain(self) -> tuple[Epilogue, ...]:
        """The stages; an epilogue without stages is its own only one."""
        return self.stages or (self,)

    @property
    def is_identity(self) -> bool:
        return self.key == "identity"

    @property
    def fusable(self) -> bool:
        """Whether every stage has a device function."""
        return all(stage.device is not None for stage in self.chain)

    @cached_property
    def bare(self) -> Epilogue:
        """The same epilogue without auxiliary outputs."""
        bare: dict[str, Any] = {"outputs": (), "outputs_of": None}
        first, *rest = (replace(stage, **bare) for stage in self.chain)
        return functools.reduce(Epilogue.then, rest, first)

    @cached_property
    def parts(self) -> tuple[Epilogue, Epilogue | None]:
        """The first stage, if a differentiated product can fuse it because its output determines
        its derivative, else the identity; and the rest of the chain."""
        first, *rest = self.chain
        if first.output_vjp is None:
            return IDENTITY, self
        return first, functools.reduce(Epilogue.then, rest) if rest else None

    def vjp(self, grad: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return ``grad`` times the derivative at the product ``z``, by torch's operators. Every
        stage needs ``derivative`` or ``output_vjp``."""
        stages = self.chain
        inputs = [z]
        for stage in stages[:-1]:
            inputs.append(stage.apply(inputs[-1]))
        for stage, z in reversed(list(zip(stages, inputs, strict=True))):
            if stage.output_vjp is not None:
                y = None if stage.linear else stage.apply(z)
                grad = stage.output_vjp(grad, y, *stage.parameters)
            elif stage.derivative is not None and stage.gated:
                slopes = stage.derivative(*z.chunk(2, dim=-1), *stage.parameters)
                grad = torch.cat([grad * slope for slope in slopes], -1)
            elif stage.derivative is not None:
                grad = grad * stage.derivative(z, *stage.parameters)
        return grad

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Epilogue) or self.key != other.key:
            return False
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    def with_parameters(self, *parameters: float) -> Epilogue:
        """Return the same epilogue with other values for its first parameters.

        Raises:
            ValueError: More values than the epilogue has parameters.
        """
        if len(parameters) > len(self.parameters):
            raise ValueError(
                f"epilogue {self.name!r} takes {len(self.parameters)} parameters, "
                f"got {len(parameters)}"
            )
        return replace(self, parameters=parameters + self.parameters[len(parameters) :])

    def then(self, after: Epilogue) -> Epilogue:
        """Return the chain ``after(self(z))``.

        Raises:
            ValueError: ``after`` is gated (only the first stage sees both halves).
        """
        if after.is_identity:
            return self
        if self.is_identity:
            return after
        if after.gated:
            raise ValueError(f"gated epilogue {after.name!r} can only come first in a chain")
        stages = self.chain + after.chain
        first = stages[0]
        return Epilogue(
            name="+".join(stage.name for stage in stages),
            reference=first.reference,
            gated=first.gated,
            interleaved=first.interleaved,
            linear=all(stage.linear for stage in stages),
            outputs=tuple(port for stage in stages for port in stage.outputs),
            stages=stages,
        )

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The function that computes the result from the product alone. None for a
        chain, a gated epilogue, one with parameters and one with outputs."""
        more = self.stages or self.gated or self.parameters or self.outputs
        if more or self.is_identity:
            return None
        return self.reference if self.builtin else self.apply_to

    def expression(
        self,
        z: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the rest of a call from its product ``z``, in torch: ``epilogue(z + bias) +
        residual``."""
        y = self.apply(z if bias is None else z + bias)
        return y if residual is None else y + residual

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """Apply the reference to the whole product ``z`` (of width 2N if gated), in z's dtype."""
        return z if self.is_identity else self.apply_to(*self.inputs(z))

    @of_the_call
    def apply_to(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Apply the reference to its :meth:`inputs`."""
        first, *others = self.chain
        y = first.applied(*inputs)
        for stage in others:
            y = stage.applied(y)
        return y

    def applied(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the reference's result, without the stages after it. Raises as :func:`returned`
        if a user's reference returned something else."""
        y = self.reference(*inputs, *self.parameters)
        if self.builtin or inputs[0].is_nested:  # torch compares ragged shapes
            return y
        return returned("epilogue", "reference", self.name, y, inputs[0].shape)

    def inputs(self, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the arguments of the reference, views of the whole product ``z``: gate and up, or
        all of it."""
        if self.interleaved:
            return z[..., 0::2], z[..., 1::2]
        if not self.gated:
            return (z,)
        halves = z.chunk(2, dim=-1)
        # Torch applies functions to nested tensors only if they are contiguous.
        return tuple(half.contiguous() for half in halves) if z.is_nested else halves

    def sources(self, columns: torch.Tensor, n: int) -> torch.Tensor:
        """Return the columns of the product from which ``columns`` of an output of width ``n`` are
        computed, in the order in which :meth:`apply` takes them."""
        if self.interleaved:
            return torch.stack([2 * columns, 2 * columns + 1], -1).flatten()
        return torch.cat([columns, columns + n]) if self.gated else columns

    @of_the_call
    def auxiliary(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The auxiliary outputs of the result ``y``, by their references, without gradients."""
        y = y.detach()
        found: list[torch.Tensor] = []
        for stage in self.chain:
            if stage.outputs_of is not None and y.dtype in FLOATS:
                found += stage.outputs_of(y)
            else:
                found += [port.apply(y) for port in stage.outputs]
        return tuple(found)


#: The fields that hold functions.
_FUNCTIONS = ("reference", "derivative", "output_vjp", "device", "device_derivative")
#: Epilogue objects by key: the operator's schema can carry only a string.
INTERNED: dict[str, Epilogue] = {}
#: The functions and flags of built-in epilogues, by name.
_built_in: dict[str, list[Any]] = {}
#: The number of epilogues that a process reports: a program may make one in each call.
MANY = 256
_HOLDS = (
    "%d epilogues (the last is %r) read different objects or numbers in closures; each is kept, "
    "with its objects and a plan: make each once, and pass numbers as parameters"
)
#: Texts of epilogues that are not lasting, by identity. Each epilogue is kept alive, with what
#: its functions read, so that no other object gets an id that is part of its identity.
_of_process: dict[Hashable, tuple[str, Any]] = {}


def _defaults(epilogue: Epilogue) -> tuple[float, ...]:
    """Return the numeric defaults of the reference's arguments after its inputs, as many as the
    device function takes."""
    if epilogue.stages:
        return ()
    operands = 2 if epilogue.gated else 1
    arguments: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):  # written in C
        arguments = list(inspect.signature(epilogue.reference).parameters.values())[operands:]
    # Parameters are passed by position.
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = itertools.takewhile(lambda argument: argument.kind in by_position, arguments)
    defaults = [argument.default for argument in given]
    numbers = tuple(itertools.takewhile(lambda value: type(value) in (int, float), defaults))
    code = getattr(getattr(epilogue.device, "fn", epilogue.device), "__code__", None)
    return numbers if code is None else numbers[: max(0, code.co_argcount - operands)]


def _identity(z):  # type: ignore[no-untyped-def]
    return z


def _ones(z):  # type: ignore[no-untyped-def]
    return tl.full(z.shape, 1.0, tl.float32)


IDENTITY = Epilogue(
    "identity",
    lambda z: z,
    device=_identity,
    device_derivative=_ones,
    output_vjp=lambda grad, y: grad,
    linear=True,
    builtin=True,
)
