"""Conformance problems for kernels that declare ``ragged``: groups along each dimension, gathered,
scattered and weighted rows, and data beyond the last group.

Verification (:class:`tmm_core.verify.verifier.Verifier`) makes the tensors. Each problem runs on
two sets of inputs. One has groups of very different sizes. The other has equal groups that end
before the rows do, with NaN behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tmm_core.epilogues import parse
from tmm_core.formats import FORMATS, Format
from tmm_core.spec.device import fingerprint
from tmm_core.spec.groups import Groups, Ragged
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.testing.probe_problems import ProbeProblems, scales_of, stored, whole_k

#: Default number of groups of a problem; one in five is empty.
GROUPS = 6


class RaggedProblems(ProbeProblems):
    """The ragged problems of a conformance suite."""

    def ragged_problems(self) -> Iterator[Problem]:
        """Yield all problems on which a kernel is tested."""
        for dtype in self.dtypes:
            for along in ("m", "n", "k"):
                yield self._ragged(along, dtype)
        yield replace(self._ragged("m"), out=Operand(torch.float32))
        yield from self._numbers_of_groups()
        yield from self._layouts()
        yield from self._indexed()
        yield from self._followed()
        for form in FORMATS.values():
            yield from self._stored(form)

    def _stored(self, form: Format) -> Iterator[Problem]:
        """Operands of a format along each dimension, with scales of every kind, and all terms of
        the expression."""
        out, first = Operand(form.result), scales_of(form)[0]
        base = stored(replace(self._ragged("m"), a=out), form)
        a, b = base.a, base.b
        for along in ("m", "n", "k"):
            if along == "k" and (b.grid or b.pack != 1):
                continue  # a group could end inside a stored element or a block
            problem = whole_k(replace(self._ragged(along), a=a, b=b, out=out))
            yield problem
            for scale in scales_of(form) if along != "k" else ():
                if scale.grid and scale != b.scale and not (along == "n" and scale.block[0] > 1):
                    yield whole_k(replace(problem, a=out, b=replace(b, scale=scale)))
            if form.implied:
                wide = replace(a, dtype=form.storage[-1])
                # Scaled activations and a row-major weight without scales.
                yield replace(problem, a=wide, b=replace(b, layout="row", scale=None))
                yield replace(problem, a=replace(a, scale=first), b=replace(b, layout="row"))
            else:
                yield replace(problem, b=replace(b, layout="row", scale=first))
            if along == "m":
                full = replace(
                    problem, bias=out.dtype, residual=out, scaled=True, groups=_indexed(zeroed=True)
                )  # fmt: skip
                yield replace(full, epilogue=parse("silu"), out=Operand(torch.float32))
                yield replace(full, epilogue=parse("swiglu"))

    def ragged_in_use(self) -> Iterator[Problem]:
        """Small problems, each verified in every way of use. One gathers rows, one has a single
        row, one a single group, one has rows in order, and one weights of rows."""
        plain = replace(self._ragged("m"), m=24, n=16, k=16)
        gathered = replace(plain, groups=Groups(GROUPS, "m", torch.int64))
        yield gathered
        yield replace(gathered, m=1)
        yield replace(gathered, m=8, groups=Groups(1, "m", torch.int64))
        yield plain
        yield replace(plain, groups=Groups(GROUPS, "m", out_weights=torch.float32))

    def demanding_ragged(self) -> list[Problem]:
        """Problems that reveal a config's faults, the most revealing first."""
        rows = self._ragged("m")
        full = replace(
            rows, bias=rows.a.dtype, residual=rows.out, epilogue=parse("silu"),
            groups=_indexed(zeroed=True),
        )  # fmt: skip
        in_order = replace(full, groups=Groups(GROUPS, "m", zeroed=True))
        return [full, in_order, rows, self._gradient(), self._ragged("k"), self._ragged("n")]

    def _ragged(self, along: Ragged, dtype: torch.dtype | None = None) -> Problem:
        """A problem with sizes that no block divides; rows are aligned if the kernel needs it."""
        m, n, k = self._size()
        operand = Operand(dtype or self.dtypes[0])
        problem = Problem(
            m, n, k, operand, operand, operand,
            device=fingerprint(self._device()), groups=Groups(GROUPS, along),
        )  # fmt: skip
        return problem.at(2 * problem.extent - 3)

    def _gradient(self) -> Problem:
        """A ragged sum with the layouts of a weight's gradient: groups start at rows of memory."""
        sums = self._ragged("k")
        return replace(sums, a=replace(sums.a, layout="col"))

    def _numbers_of_groups(self) -> Iterator[Problem]:
        """One group, more groups than rows, and no rows."""
        for along in ("m", "n", "k"):
            each = self._ragged(along)
            yield replace(each, groups=Groups(1, along))
            yield replace(each.at(7), groups=Groups(19, along))
            yield each.at(0)
        rows = self._ragged("m")
        yield replace(rows, k=0, bias=rows.a.dtype, epilogue=parse("sigmoid"))
        if self._device().type == "cuda":  # 1,500 programs of 2 ms in the interpreter
            yield replace(rows, groups=Groups(300, "m"))  # more than one block of offs

    def _layouts(self) -> Iterator[Problem]:
        for along in ("m", "n", "k"):
            each = self._ragged(along)
            col, loose = replace(each.a, layout="col"), replace(each.a, aligned=False)
            strided = replace(loose, layout="strided")
            yield replace(each, b=col)
            yield replace(each, a=col, b=col)
            yield replace(each, a=strided, b=strided, out=strided)
            odd = replace(each, m=max(1, each.m - 3), n=max(1, each.n - 3), k=max(1, each.k - 3))
            yield replace(odd, a=loose, b=loose, out=loose)
        yield replace(self._ragged("m"), out=col)
        yield self._gradient()

    def _indexed(self) -> Iterator[Problem]:
        rows = self._ragged("m")
        wide, narrow, weights = torch.int64, torch.int32, torch.float32
        for groups in (
            {"a_index": wide},
            {"a_index": narrow},
            {"out_index": wide},
            {"out_index": narrow, "zeroed": True},
            {"out_weights": weights},
            {"out_weights": rows.a.dtype},
            {"zeroed": True},
        ):
            given: dict[str, Any] = groups
            yield replace(rows, groups=Groups(GROUPS, "m", **given))
        yield replace(rows, groups=_indexed(zeroed=False))
        yield replace(self._ragged("n"), groups=Groups(GROUPS, "n", zeroed=True))

    def _followed(self) -> Iterator[Problem]:
        """Bias, residual, alpha and epilogues, with a bias per group."""
        full = self.demanding_ragged()[0]
        rows, columns, sums = self._ragged("m"), self._ragged("n"), self._ragged("k")
        dtype = rows.a.dtype
        yield replace(rows, bias=dtype)
        yield replace(rows, bias=torch.float32, scaled=True)
        yield replace(rows, residual=rows.out)
        yield replace(rows, epilogue=parse("swiglu"), groups=_indexed(zeroed=False))
        yield full
        yield replace(full, epilogue=parse("swiglu"), scaled=True)
        yield replace(columns, residual=columns.out, epilogue=parse("gelu_tanh"), scaled=True)
        yield replace(sums, bias=dtype, residual=sums.out, epilogue=parse("swiglu"), scaled=True)


def _indexed(*, zeroed: bool) -> Groups:
    """Groups with gathered, scattered and weighted rows."""
    return Groups(GROUPS, "m", torch.int64, torch.int64, torch.float32, zeroed)
