"""The inputs, expected results and outputs for verifying launchers of a problem."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from tmm_base.guards import suppress

from tmm_core.spec.arguments import LAUNCHED_PARTS
from tmm_core.spec.device import free_memory
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps, drained
from tmm_core.verify import compare, random_inputs
from tmm_core.verify.compare import Sample
from tmm_core.verify.guard_bands import (
    UNREADABLE,
    UNWRITTEN,
    GuardedTensor,
    footprint,
    memory_layout,
    same_bits,
    vector_layout,
    with_guard_bands,
)
from tmm_core.verify.nonfinite import AXES, NonFinite, nonfinite_inputs
from tmm_core.verify.ragged_inputs import Inputs, poison, rows_read
from tmm_core.verify.random_inputs import Recipe

#: Default limit of verification's memory, in bytes. A quarter of a GPU's free memory, or a
#: sixteenth of a CPU's memory, limits it too. One set of inputs with samples of its result may
#: exceed it.
MOST_MEMORY = 4 << 30

#: Sampled rows, and columns: one at random from each of this many equal stripes, plus the first and
#: the last. A tile at least as high or wide as a stripe is always sampled.
SAMPLES = 64

#: Floating-point operations up to which the whole result is compared. The limits are for 16-bit
#: operands on CUDA (7 ms on an H100), in fp64 there, and on a CPU (about 10 GFLOPS per core).
FULL_FLOPS, FULL_FLOPS_FP64, FULL_FLOPS_CPU = 2**42, compare.FP64_FLOPS, 2**33

#: Recipes of the two sets.
FIRST = Recipe(alpha=-0.75, reads="more")
SECOND = Recipe(alpha=1.625, sizes="even", whole=False)

#: Elements that are compared at a time, with up to five intermediates of that size.
COMPARED = 1 << 24


def default_limit(device: torch.device, most: float = MOST_MEMORY) -> int:
    """Bytes that verification may take by default, at most ``most``. One set for 32768×28672×4096
    in 8 groups takes 12.5 GiB."""
    if device.type == "cuda":
        return int(min(free_memory(device) // 4, most))
    with suppress(AttributeError, OSError, ValueError):  # not a POSIX system
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(min(has // 16, most))
    return MOST_MEMORY // 4


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected result, whole or in samples of rows and columns."""

    #: The sampled rows; None: all rows are compared.
    rows: torch.Tensor | None
    in_rows: Sample
    #: The sampled columns; None if all rows are compared.
    cols: torch.Tensor | None
    in_cols: Sample | None
    #: The rows and the columns that are defined.
    defined: tuple[slice, slice] = (slice(None), slice(None))

    def is_finite(self, dtype: torch.dtype) -> bool:
        """Whether all expected numbers are finite in this dtype: an epilogue may be undefined."""
        samples = (sample for sample in (self.in_rows, self.in_cols) if sample is not None)
        return all(bool(sample.numbers.to(dtype).isfinite().all()) for sample in samples)

    def error(self, out: torch.Tensor, at_once: int) -> torch.Tensor:
        """The largest error (:func:`compare.worst`), as a tensor on the device. It is also NaN if
        an element that is not compared is not finite, although all compared ones should be."""
        defined = (..., *self.defined)
        out = out[defined]
        if not out.numel():
            return torch.zeros((), dtype=torch.float32, device=out.device)
        if self.rows is None:
            return self.in_rows.error(out, at_once)
        compared = [out[..., self.rows, :]]
        found = self.in_rows.error(compared[0], at_once)
        if self.cols is not None and self.in_cols is not None:
            compared.append(out[..., self.cols])
            found = torch.maximum(found, self.in_cols.error(compared[1], at_once))
        # A sum is finite if all elements are; in 16 bits it might overflow.
        wide = torch.promote_types(out.dtype, torch.float32)
        sums = torch.stack([t.sum(dtype=wide) * 0 for t in (out, *compared)])
        return found + torch.where(sums[1:].isnan().any(), 0.0, sums[0]).to(found.dtype)


#: The largest result, in bytes, that malloc takes from its lists of free blocks, and the room for
#: its alignment.
_SMALL, _ROOM = 2**16, 160
#: A byte that makes floats of every dtype NaN.
_NAN = 0xFF


@dataclass(frozen=True, slots=True)
class InputSet:
    """Inputs between guard bands, and the expected results.

    Attributes:
        called: Names these inputs in messages.
        slack: Added to the tolerance.
        once: Whether later launches have other inputs.
        judges_outputs: Whether auxiliary outputs are compared.
    """

    called: ClassVar = ""
    slack: ClassVar = 0.0
    once: ClassVar = False
    judges_outputs: ClassVar = True

    inputs: Inputs
    #: The memory of operands, terms and their parts, and its checksums at first.
    memory: Mapping[str, GuardedTensor]
    sums: Mapping[str, torch.Tensor]
    expected: Expected
    #: How the values were drawn, and the seed.
    recipe: Recipe
    seed: int
    #: Copies of group sizes, indices and weights of rows.
    rows: Mapping[str, torch.Tensor]

    def error(self, out: torch.Tensor, at_once: int) -> float:
        """Return the error of a result; see :meth:`Expected.error`."""
        return self.expected.error(out, at_once).item()

    def changed(self) -> list[str]:
        """Return the names of arguments that changed, or whose gaps or guard bands did."""
        sums = {name: each.sums() for name, each in self.memory.items()}
        rows = {name: self.inputs.extras[name] for name in self.rows}
        return differing(sums | rows, {**self.sums, **self.rows})


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that do not have the expected bits."""
    same = torch.stack([same_bits(t, expected[name]) for name, t in found.items()]).tolist()
    return [name for name, is_same in zip(found, same, strict=True) if not is_same]


class DataSets:
    """Inputs and outputs of one problem, made on first use.

    Two sets of inputs differ in values, address, and strides as far as their class allows: the
    first is dense, the second has gaps. The two outputs differ likewise.

    Args:
        device: The device, with its index.
        memory_limit: Bytes that inputs, references, outputs and intermediates may take together,
            without a launcher's own allocations. The default is :func:`default_limit`, which one
            set with samples of its result may exceed.
        sampled: Always use one set, and samples of its result.
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        memory_limit: int | None = None,
        sampled: bool = False,
    ) -> None:
        self.problem, self.device = problem, device
        #: Whether there are launches in which the launcher allocates the output.
        self.allocates = problem.allocates
        self._sampled = sampled
        self.limit = default_limit(device) if memory_limit is None else memory_limit
        #: Bytes that one set with samples of its result may take where ``limit`` is too small.
        self.most = default_limit(device, math.inf) if memory_limit is None else memory_limit
        self._sets: list[InputSet] | None = None
        self._outs: list[GuardedTensor] = []
        #: The last exception that a launcher raised.
        self.raised: BaseException | None = None
        #: Blocks that stay allocated between the blocks that were freed for a launcher's result.
        self._kept: list[torch.Tensor] = []
        #: The names of inputs that a launch changed in more than their values.
        self.altered: set[str] = set()
        #: Whether :meth:`reduce` was called.
        self.is_reduced = False

    @property
    def at_once(self) -> int:
        """The number of elements to compare at a time."""
        return max(1 << 12, min(COMPARED, self.limit // 160))

    def sets(self) -> list[InputSet]:
        """Both sets of inputs, or as many as there is memory for: one or none."""
        drained(self.making())
        assert self._sets is not None
        return self._sets

    def making(self) -> Steps[None]:
        """Make the sets, unless they are made."""
        if self._sets is None:
            (count, whole), made = self._affordable(), []
            for place in range(count):
                made.append(self._set(padded=place == 1, whole=whole))
                yield ()
            self._sets = made

    def nonfinite(self) -> list[NonFinite]:
        """Non-finite values for the last set of inputs, in rows and in columns."""
        inputs, room = self.sets()[-1].inputs, self.limit // 8
        made = (nonfinite_inputs(self.problem, inputs, axis, room) for axis in AXES)
        return [each for each in made if each is not None]

    def out(self, which: int) -> GuardedTensor:
        """One of two outputs between guard bands, filled with NaN."""
        while len(self._outs) <= which:
            padded = len(self._outs) == 1
            placed = memory_layout(self.problem.out, self.problem.out_shape, padded=padded)
            self._outs.append(with_guard_bands(placed, self.device, UNWRITTEN))
        self._outs[which].poison()
        return self._outs[which]

    def changed_inputs(self) -> list[str]:
        """Return the names of inputs that changed, or whose gaps or guard bands did."""
        found = [name for each in self.sets() for name in each.changed()]
        return list(dict.fromkeys([*sorted(self.altered), *found]))

    def poison_free_memory(self) -> None:
        """Fill the memory that a launcher is likely to allocate next with NaN. Otherwise correct
        results of an earlier launch could remain where this launch writes nothing."""
        made = [self.problem.empty_out(self.device) for _ in range(2)]
        for each in made:
            poison(each)
        size = made[0].untyped_storage().nbytes()
        if self.device.type == "cpu" and size <= _SMALL:
            # malloc joins free neighbours, so every other block is kept. It takes an aligned block
            # out of a larger free one, so the blocks have room.
            size += _ROOM
            blocks = [torch.full((size,), _NAN, dtype=torch.uint8, device="cpu") for _ in range(8)]
            self._kept = blocks[1::2]

    def release(self) -> None:
        """Release all tensors. The next use makes them again, with other values."""
        self._sets, self._outs, self._kept = None, [], []
        self.altered.clear()

    def reduce(self) -> None:
        """Use one set with samples of its result from now on, and a quarter of the memory."""
        self.release()
        self._sampled = self.is_reduced = True
        self.limit //= 4

    def _affordable(self) -> tuple[int, bool]:
        """How many sets of inputs fit, and whether their whole results do."""
        p = self.problem
        a_shape = p.a_shape
        if p.groups is not None and p.groups.a_index is not None:
            a_shape = rows_read(p.m, "more"), a_shape[-1]
        inputs = footprint(p.a, a_shape) + footprint(p.b, p.b_shape)
        inputs += footprint(p.residual, p.out_shape) if p.residual else 0
        if p.bias is not None:  # the second set's has every other element of its memory
            vectors, columns = (1, *p.shape("bias"))[-2:]
            inputs += footprint(Operand(p.bias), (vectors, 2 * columns + 1))
        for port in p.epilogue.outputs:
            inputs += footprint(Operand(port.dtype), (1, math.prod(port.shape(p.out_shape))))
        size, count = math.prod(p.out_shape), math.prod(p.out_shape[:-2])
        out, given = size * p.out.dtype.itemsize, footprint(p.out, p.out_shape)
        element = 2 * max(4, p.out.dtype.itemsize)  # a number, and the size of its error
        whole = size * element
        rows, cols = min(p.m, SAMPLES + 2), min(p.n, SAMPLES + 2)
        some = count * (rows * p.n + (cols * p.m if rows < p.m else 0)) * element
        # Three eighths are for intermediates. Given outputs stay allocated. One result is held
        # while two more are made.
        limit, most = self.limit * 5 // 8, self.most * 5 // 8
        if not self._sampled:
            few = p.flops <= self._most_flops()
            if few and 2 * (inputs + whole + given) + 3 * out <= limit:
                return 2, True
            if 2 * (inputs + some + given) + 3 * out <= limit:
                return 2, False
        return (1, False) if inputs + some + given + 2 * out <= most else (0, False)

    def _most_flops(self) -> int:
        if self.device.type != "cuda":
            return FULL_FLOPS_CPU
        narrow = self.problem.a.dtype.itemsize <= 2
        return FULL_FLOPS if narrow else FULL_FLOPS_FP64

    def _set(self, padded: bool, whole: bool) -> InputSet:
        memory: dict[str, GuardedTensor] = {}

        def allocate(name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
            if padded and name in LAUNCHED_PARTS and spec.layout == "col":
                spec = replace(spec, layout="row")  # a grid of scales may have any strides
            placed = memory_layout(spec, shape, padded=padded)
            if name == "bias" and padded:  # a call's bias may have any stride
                placed = vector_layout(spec, shape, 2)
            memory[name] = with_guard_bands(placed, self.device, UNREADABLE)
            return memory[name].tensor

        # One set of ragged products is skewed, the other even and does not fill its rows.
        recipe = SECOND if padded else FIRST
        seed = random_inputs.new_seed()
        inputs = random_inputs.make(
            self.problem, self.device, seed=seed, allocate=allocate, recipe=recipe
        )
        expected = self.expect(inputs, whole)
        rows = {name: t.clone() for name, t in inputs.rows.given.items()} if inputs.rows else {}
        sums = {name: each.sums() for name, each in memory.items()}
        if padded:  # as a layer calls: a kernel may keep something beside a weight
            inputs = replace(inputs, b=torch.nn.Parameter(inputs.b, requires_grad=False))
        return InputSet(inputs, memory, sums, expected, recipe, seed, rows)

    def sampled(self, inputs: Inputs) -> tuple[torch.Tensor, slice]:
        """Rows to compare, samples if there are many, and the columns that are defined."""
        rows, cols = inputs.defined(self.problem)
        return _sample(rows.stop, self.device), cols

    def expect(self, inputs: Inputs, whole: bool) -> Expected:
        """Return the expected result, whole or in samples."""
        rows, cols = defined = inputs.defined(self.problem)
        if whole or rows.stop <= SAMPLES + 2:
            return Expected(None, self._reference(inputs, rows, cols), None, None, defined)
        some_rows, some_cols = _sample(rows.stop, self.device), _sample(cols.stop, self.device)
        in_rows = self._reference(inputs, some_rows, cols)
        in_cols = self._reference(inputs, rows, some_cols)
        return Expected(some_rows, in_rows, some_cols, in_cols, defined)

    def _reference(self, inputs: Inputs, rows: compare.Places, cols: compare.Places) -> Sample:
        """Return the reference of these rows and columns, in pieces whose intermediates fit."""
        return compare.expected(self.problem, inputs, rows, cols, self.limit // 16)


def _sample(size: int, device: torch.device) -> torch.Tensor:
    """Indices in ``range(size)``: one per stripe, the first and the last; all if they are few."""
    if size <= SAMPLES + 2:
        return torch.arange(size, device=device)
    host = torch.device("cpu")
    edges = torch.linspace(0, size, SAMPLES + 1, dtype=torch.float64, device=host).long()
    generator = random_inputs.seeded(host)
    chance = torch.rand(SAMPLES, dtype=torch.float32, generator=generator, device=host)
    inside = edges[:-1] + (chance * (edges[1:] - edges[:-1])).long()
    ends = torch.tensor([0, size - 1], device=host)
    places: torch.Tensor = torch.cat([inside, ends]).unique()
    return places.to(device)
