"""Group sizes and indices for launches of a ragged problem, to verify and to time them.

Group sizes are sampled on the host, so that a reference can compute one product per group. Timing
uses two distributions (:data:`Sizes`), since the fastest kernel for one need not be the fastest for
the other. In a *skewed* one few groups have most of the rows, as from a router; the other is
*even*. Both have empty groups. Verification also uses the extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tmm_core.spec.arguments import ROWS
from tmm_core.spec.groups import Groups
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem

#: One group in this many is empty.
EMPTY_ONE_IN = 5
#: Samples of group sizes over which a chain of calls cycles. Each fills the groups' last tiles
#: differently: torch's product of 4096 rows in 8 groups took 718 to 851 µs.
SIZE_SAMPLES = 6
#: How often each gathered row is read: ``a`` has fewer rows by this factor.
READS = 2
#: Least rows of ``a`` where rows are gathered: with one row, every index would be zero.
LEAST_READ = 8
#: Most rows that ``a`` has in excess of the result.
MOST_MORE = 1024

#: Distributions of group sizes: ``skewed`` and ``even`` have some empty groups. ``small``: groups
#: of one, two and three rows, and the rest in one. ``one``: all rows are in one group. ``sparse``:
#: most groups are empty, the first and the last too. ``first``, ``last``: all rows are in that
#: group. ``equal``: all groups are of one size, with no empty one. ``none``: all groups are empty.
#: ``few``: groups have a third of the rows. ``rising``, ``falling``: sizes from zero, in order.
Sizes = Literal[
    "skewed", "even", "small", "one", "sparse", "first", "last", "equal", "none", "few",
    "rising", "falling",
]  # fmt: skip
#: Rows of ``a`` that are gathered. ``fewer``, ``more``: ``a`` has fewer or more rows than the
#: result. ``one``: only one row. ``twice``: half as many rows, each twice. ``same``: all rows in
#: order; the result's rows are then in order, too.
Reads = Literal["fewer", "more", "one", "twice", "same"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The arguments of a ragged problem's launches besides operands, and their values on the
    host."""

    offs: torch.Tensor
    #: The ends of groups, as in ``offs``.
    ends: tuple[int, ...]
    #: The number of rows of ``a``, if rows are ragged.
    read: int
    a_index: torch.Tensor | None = None
    out_index: torch.Tensor | None = None
    out_weights: torch.Tensor | None = None
    #: The ``offs`` of other samples, alternately from the two distributions.
    other_offs: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(
        cls,
        groups: Groups,
        total: int,
        device: torch.device,
        generator: torch.Generator,
        *,
        sizes: Sizes,
        whole: bool,
        reads: Reads = "fewer",
        any_weights: bool = False,
    ) -> Rows:
        """Random groups with ``total`` rows (or columns, or terms of sums) in all; see
        :class:`tmm_core.verify.random_inputs.Recipe`."""
        seed = int(torch.randint(2**31, (), generator=generator, device=device))
        chance = torch.Generator("cpu").manual_seed(seed)
        used = total if whole else total - min(3, total // 4)
        ends = ends_of(groups.count, used, chance, sizes)
        used = min(used, ends[-1])

        def place(numbers: Any, dtype: torch.dtype | None) -> torch.Tensor:
            return torch.as_tensor(numbers, device="cpu").to(device, dtype)

        read, a_index, out_index, out_weights = total, None, None, None
        if groups.a_index is not None:
            read = rows_read(total, reads)
            drawn = torch.randint(read, (total,), generator=chance, device="cpu")
            if reads == "same":
                drawn = torch.arange(total, device="cpu")
            elif reads == "twice":
                drawn = torch.randperm(total, generator=chance, device="cpu") % read
            elif total:  # the last row is read, so that not every index is zero
                drawn[int(torch.randint(total, (), generator=chance, device="cpu"))] = read - 1
            a_index = place(drawn, groups.a_index)
        if groups.out_index is not None:
            # Rows in no group stay in their places.
            there = [
                torch.arange(used, device="cpu")
                if reads == "same"
                else torch.randperm(used, generator=chance, device="cpu"),
                torch.arange(used, total, device="cpu"),
            ]
            out_index = place(torch.cat(there), groups.out_index)
        if groups.out_weights is not None:
            drawn = torch.rand(total, generator=chance, dtype=torch.float32, device="cpu") + 0.5
            if any_weights:
                drawn = torch.randn(total, generator=chance, dtype=torch.float32, device="cpu")
                drawn *= 10 ** drawn.roll(1).clamp(-2, 2)
                drawn[::4], drawn[1::4] = 0, 1
            drawn[used:] = torch.nan
            out_weights = place(drawn, groups.out_weights)
        pair: tuple[Sizes, Sizes] = ("skewed", "even") if sizes == "skewed" else ("even", "skewed")
        samples = [
            ends_of(groups.count, used, chance, pair[place % 2]) for place in range(1, SIZE_SAMPLES)
        ]
        offs, *others = (place(each, torch.int32) for each in (ends, *samples))
        return cls(offs, tuple(ends), read, a_index, out_index, out_weights, tuple(others))

    def of_call(self, call: int) -> Rows:
        """Return the rows of one call of a chain; calls cycle over the samples."""
        samples = (self.offs, *self.other_offs)
        return replace(self, offs=samples[call % len(samples)])

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """The keyword tensors of a launch, scales left out."""
        return {name: t for name in ROWS if (t := getattr(self, name)) is not None}

    def poison_beyond(self, problem: Problem, given: Inputs) -> None:
        """Put NaN beyond the last group, where nothing may be read."""
        end, residual = self.ends[-1], given.residual
        a = given.a if self.a_index is None else None
        of_a = given.by_row(problem, "a").values() if a is not None else ()
        of_b = given.by_row(problem, "b").values()
        rows, cols = (max(1, spec.block[0]) for spec in (problem.a, problem.b))
        # Each tensor, the dimension of its groups, and the number of its elements that share one.
        beyond: dict[str, list[tuple[torch.Tensor | None, int, int]]] = {
            "m": [(a, 0, 1), *((t, 0, rows) for t in of_a), (residual, 0, 1)],
            "n": [(given.b, 1, 1), *((t, -1, cols) for t in of_b), (residual, 1, 1)],
            "k": [(a, 1, 1), (given.b, 0, 1)],
        }
        for t, dimension, block in beyond[problem.along]:
            if t is not None:
                read = -(-end // block)
                poison(t.narrow(dimension, read, t.shape[dimension] - read))

    def poison_unread(self, problem: Problem, given: Inputs) -> None:
        """Put NaN into rows of ``a`` that no group reads, and into operands of empty groups."""
        end = self.ends[-1]
        if self.a_index is not None:
            unread = torch.ones(self.read, dtype=torch.bool, device=given.a.device)
            unread[self.a_index[:end].long()] = False
            _poison_at(given.a, unread)
            for part in given.by_row(problem, "a").values():
                _poison_at(part, unread)
        starts = (0, *self.ends[:-1])
        empty = [start == end for start, end in zip(starts, self.ends, strict=True)]
        if not any(empty) or problem.along == "k":
            return
        at = torch.tensor(empty, device=given.a.device)
        _poison_at(given.b if problem.along == "m" else given.a, at)
        if given.bias is not None:
            _poison_at(given.bias, at)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a launch, of a ragged problem with its ``rows``."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    #: Scales and zero points of stored operands, by their names in launches.
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Rows | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The operands, the bias and the residual, by name."""
        named = {"a": self.a, "b": self.b, "bias": self.bias, "residual": self.residual}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def extras(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of a launch."""
        return dict(self.parts) | (self.rows.given if self.rows else {})

    def by_row(self, problem: Problem, operand: str) -> dict[str, torch.Tensor]:
        """The scales and zero points of ``a`` by row, or of ``b`` by column, by name; empty if the
        operand has one scale in all."""
        spec: Operand = getattr(problem, operand)
        if spec.scale is None or spec.scale.kind == "tensor":
            return {}
        return {name: t for name, t in self.parts.items() if name.startswith(f"{operand}_")}

    def defined(self, problem: Problem) -> tuple[slice, slice]:
        """Return the rows and the columns of the result that are defined. The result may end with
        the last group."""
        ends = {"m": problem.m, "n": problem.n}
        if self.rows is not None and not (problem.groups and problem.groups.zeroed):
            ends[problem.along] = self.rows.ends[-1]
        return slice(ends["m"]), slice(ends["n"])

    def launch(self, launcher: Callable[..., torch.Tensor], out: Any) -> torch.Tensor:
        """Call a launcher, which writes to ``out`` or allocates."""
        given = self.extras
        return launcher(self.a, self.b, self.bias, self.residual, self.alpha, out, **given)


def divided(inputs: Inputs, lead: tuple[int, ...], names: Iterable[str]) -> Inputs:
    """Return the inputs with the first dimension of the tensors in ``names``, and of their parts,
    divided into ``lead``. A part without rows, such as a scale of one number, stays as it is."""

    def part(t: torch.Tensor | None) -> torch.Tensor | None:
        return t.unflatten(0, lead) if t is not None and t.dim() > 1 else t

    given: dict[str, Any] = {name: part(getattr(inputs, name)) for name in names}
    parts: Any = {n: part(t) if n[0] in names else t for n, t in inputs.parts.items()}
    return replace(inputs, **given, parts=parts)


def ends_of(count: int, total: int, chance: torch.Generator, sizes: Sizes) -> list[int]:
    """Return the ends of ``count`` groups with ``total`` rows in all."""
    order = torch.randperm(count, generator=chance, device="cpu")
    if sizes == "small":
        small = torch.arange(count, device="cpu") % 3 + 1
        if small.sum() > total:
            small = (torch.arange(count, device="cpu") < total).long()
        small[0] += total - small.sum()
        ends: list[int] = small[order].cumsum(0).tolist()
        return ends
    if sizes in ("equal", "none"):
        return [total // count * (place + 1) * (sizes == "equal") for place in range(count)]
    total = total // 3 if sizes == "few" else total
    shares = torch.ones(count, dtype=torch.float64, device="cpu")
    if sizes in ("first", "last"):
        shares[slice(1, None) if sizes == "first" else slice(count - 1)] = 0
    elif sizes in ("rising", "falling"):
        rising = torch.arange(count, dtype=torch.float64, device="cpu")
        shares = shares if count == 1 else rising if sizes == "rising" else rising.flip(0)
    elif sizes == "one":
        shares[order[1:]] = 0
    elif sizes == "sparse":
        shares[order[: count // 2]] = 0
        if count > 2:
            shares[0] = shares[-1] = 0
            shares[1 + order[0] % (count - 2)] = 1
    else:
        if sizes == "skewed":
            shares /= torch.arange(1, count + 1, device="cpu")
        shares = shares[order]
        empty = -(-count // EMPTY_ONE_IN) if count > 1 else 0
        shares[torch.randperm(count, generator=chance, device="cpu")[:empty]] = 0
    found: list[int] = (shares.cumsum(0) / shares.sum() * total).round().long().tolist()
    return found


def rows_read(total: int, reads: Reads) -> int:
    """Return the number of rows of ``a`` that ``total`` rows are gathered from."""
    if reads in ("one", "same"):
        return 1 if reads == "one" else total
    if reads == "twice":
        return max(1, total // 2)
    if reads == "more":
        return total + min(3 * total, MOST_MORE) + LEAST_READ
    return max(LEAST_READ, total // READS)


def poison(out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` with NaN, or with the largest integer. Elements that a kernel never writes, or
    must not read, then give wrong results."""
    floating = out.is_floating_point() or out.is_complex()
    return out.fill_(torch.nan if floating else torch.iinfo(out.dtype).max)


def _poison_at(t: torch.Tensor, at: torch.Tensor) -> None:
    """Poison ``t`` where ``at`` is true along the first dimension."""
    if not t.is_floating_point():
        t[at] = torch.iinfo(t.dtype).max
        return
    wide = t.float() if t.dtype.itemsize == 1 else t  # torch indexes no 8-bit floats
    nan = torch.full((), torch.nan, dtype=wide.dtype, device=t.device)
    t.copy_(torch.where(at.view(-1, *[1] * (t.dim() - 1)), nan, wide).to(t.dtype))
