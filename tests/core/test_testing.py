"""The conformance suite passes a right kernel and fails each kind of wrong one, by the test
that is there for it."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tmm_core import Config, ConfigError, Groups, Kernel, Launcher, Problem, Supports, Traits
from tmm_core.formats.grids import ROW, factors
from tmm_core.spec.operand import Operand
from tmm_core.testing import KernelConformance
from tmm_core.testing.probe_problems import LAYOUTS, laid
from tmm_core.verify.guard_bands import (
    UNREADABLE,
    UNWRITTEN,
    GuardedTensor,
    MemoryLayout,
    expanded_layout,
    memory_layout,
    unusual_layout,
    with_guard_bands,
)
from tmm_core.verify.random_inputs import fill

pytest_plugins = ["pytester"]

Tensor = torch.Tensor
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Tile(Config):
    rows: int = 16


def values(
    problem: Problem, of: str, t: Tensor, scale: Tensor | None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """An operand, dequantised where stored numbers will not do, and the scale that is left."""
    spec: Operand = getattr(problem, of)
    left = None if scale is None else factors(scale, torch.float64)
    if spec.form is None or not (spec.grid or spec.zero or spec.pack != 1):
        return t, left
    along = -1 if of == "a" else -2
    own = scale if spec.grid else None
    found = spec.form.values(t, own, zero, torch.float64, spec.block, along)
    return found, None if spec.grid else left


class Right(Kernel[Tile]):
    """The whole expression in fp64, rounded once. Each wrong kernel spoils one step of it."""

    name = "test.right"
    traits = Traits(deterministic=True, batch_invariant=True)
    config_type = Tile
    supports = Supports.everything()

    def declines(self, problem: Problem) -> list[str]:
        operands = (problem.a, problem.b, problem.out)
        plain = [o for o in operands if o.form is None]
        return [f"{o.dtype} operand" for o in plain if o.dtype not in FLOATS]

    def configs(self, problem: Problem) -> Iterable[Tile]:
        return [Tile(rows=16), Tile(rows=32), Tile(rows=64)]

    def default_config(self, problem: Problem) -> Tile:
        return Tile(rows=16)

    def arithmetic(self, problem: Problem, config: Tile) -> object:
        return "fp64"

    def bind(self, problem: Problem, config: Tile) -> Launcher:
        if problem.groups is not None:
            return self.bind_ragged(problem, problem.groups)
        shape = (problem.m, problem.n)
        if problem.batch != 1:
            shape = (problem.batch, *shape)

        def launch(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            alpha: float,
            out: Tensor | None,
            a_scale: Tensor | None = None,
            b_scale: Tensor | None = None,
            b_zero: Tensor | None = None,
            outputs: tuple[Tensor, ...] = (),
        ) -> Tensor:
            a, a_scale = values(problem, "a", a, a_scale)
            b, b_scale = values(problem, "b", b, b_scale, b_zero)
            z = self.rescale(self.product(a, b), a_scale, b_scale)
            z = self.finish(problem, alpha * z, bias)
            if residual is not None:
                z = z + residual
            self.write_outputs(problem, z, outputs)
            if out is None:
                out = a.new_empty(shape, dtype=problem.out.dtype)
            self.write(z, out)
            return out

        return launch

    def write_outputs(self, problem: Problem, y: Tensor, outputs: tuple[Tensor, ...]) -> None:
        for output, value in zip(outputs, problem.epilogue.auxiliary(y), strict=True):
            output.copy_(value)

    def bind_ragged(self, problem: Problem, groups: Groups) -> Launcher:
        def launch(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            alpha: float,
            out: Tensor | None,
            offs: Tensor,
            a_index: Tensor | None = None,
            out_index: Tensor | None = None,
            out_weights: Tensor | None = None,
            a_scale: Tensor | None = None,
            b_scale: Tensor | None = None,
        ) -> Tensor:
            a, a_scale = values(problem, "a", a, a_scale)
            b, b_scale = values(problem, "b", b, b_scale)
            whole = a.new_zeros(problem.out_shape, dtype=torch.float64)
            for group, (start, end) in enumerate(self.ranges(offs)):
                part = at = slice(start, end)
                here: Any
                if groups.ragged == "m":
                    rows: Any = part if a_index is None else a_index[part].long()
                    at = part if out_index is None else out_index[part].long()
                    left, right, here = a[rows], b[group], (at, slice(None))
                elif groups.ragged == "n":
                    left, right, here = a[group], b[:, part], (slice(None), part)
                else:
                    left, right, here = a[:, part], b[part], (group,)
                of_a, of_b = a_scale, b_scale
                if problem.a.block == ROW and of_a is not None:
                    of_a = of_a[rows] if groups.ragged == "m" else of_a[group]
                    of_a = of_a[:, None]
                if problem.b.block == ROW and of_b is not None:
                    of_b = of_b[part] if groups.ragged == "n" else of_b[self.of_group(group)]
                z = alpha * self.rescale(self.product(left, right), of_a, of_b)
                z = self.finish(problem, z, None if bias is None else bias[group])
                if out_weights is not None:
                    z = z * out_weights[part, None]
                whole[here] = z if residual is None else z + residual[here]
            if out is None:
                out = problem.empty_out(a.device)
            self.write(whole, out)
            return out

        return launch

    def of_group(self, group: int) -> int:
        return group

    def ranges(self, offs: Tensor) -> Iterable[tuple[int, int]]:
        return itertools.pairwise([0, *offs.tolist()])

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a.double() @ b.double()

    def rescale(self, z: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
        z = z if a_scale is None else z * a_scale
        return z if b_scale is None else z * b_scale

    def finish(self, problem: Problem, z: Tensor, bias: Tensor | None) -> Tensor:
        return problem.epilogue.apply(z if bias is None else z + bias)

    def write(self, z: Tensor, out: Tensor) -> None:
        out.copy_(z)


class ScalesByTheFirstColumn(Right):
    def rescale(self, z: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
        return super().rescale(z, a_scale, b_scale if b_scale is None else b_scale[..., :1])


class DropsTheTailOfK(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        k = a.shape[-1] // 16 * 16
        return super().product(a[..., :k], b[..., :k, :])


class MasksOneOperandOnly(Right):
    """Reads b past the end of K and trusts zeros in a to cancel it."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        k, more = a.shape[-1], -a.shape[-1] % 16
        shape = (*b.shape[:-2], k + more, b.shape[-1])
        past = b.as_strided(shape, b.stride(), b.storage_offset())
        return super().product(torch.nn.functional.pad(a, (0, more)), past)


class LeavesAnEdgeUnwritten(Right):
    def write(self, z: Tensor, out: Tensor) -> None:
        n = max(1, out.shape[-1] // 16 * 16)
        out[..., :n] = z[..., :n]


class WritesARowTooMany(Right):
    def write(self, z: Tensor, out: Tensor) -> None:
        super().write(z, out)
        n, (step, inner) = out.shape[-1], out.stride()[-2:]
        first = out.storage_offset() + out.shape[-2] * step
        if (first + n * inner) * out.element_size() <= out.untyped_storage().nbytes():
            out.as_strided((n,), (inner,), first).fill_(1)


class WritesToAnOperand(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        z = super().product(a, b)
        a[..., -1:, -1:] = 0
        return z


class ReturnsAnotherTensor(Right):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)
        return lambda a, b, bias, residual, alpha, out: launch(a, b, bias, residual, alpha, None)


class IgnoresStrides(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        rows, cols = a.shape[-2:]
        packed = a.as_strided(a.shape, (rows * cols, cols, 1)[-a.dim() :], a.storage_offset())
        return super().product(packed, b)


class SumsIn16Bits(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return super().product(a, b).to(a.dtype).double()


class SwapsGateAndUp(Right):
    def finish(self, problem: Problem, z: Tensor, bias: Tensor | None) -> Tensor:
        if problem.gated:
            z = z.roll(problem.n, -1)
        return super().finish(problem, z, bias)


class AddsBiasLast(Right):
    def finish(self, problem: Problem, z: Tensor, bias: Tensor | None) -> Tensor:
        z = problem.epilogue.apply(z)
        return z if bias is None else z + bias[..., : problem.n]


class MultipliesTheFirstMatrixOnly(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return super().product(a[:1] if a.dim() == 3 else a, b)


class ForgetsEmptySums(Right):
    def write(self, z: Tensor, out: Tensor) -> None:
        if z.abs().sum() > 0:
            super().write(z, out)


class ReturnsOneBuffer(Right):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)
        kept: list[Tensor] = []

        def launch_into(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            if out is None and kept:
                out = kept[0]
            kept.append(launch(a, b, bias, residual, alpha, out))
            return kept[-1]

        return launch_into


class MakesAColumnMajorOutput(Right):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)

        def launch_flipped(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            made = launch(a, b, bias, residual, alpha, out)
            return made if out is not None else made.mT.contiguous().mT

        return launch_flipped


class SharesRowsEvenly(Right):
    def ranges(self, offs: Tensor) -> Iterable[tuple[int, int]]:
        # As if rows were shared out evenly.
        ends = torch.linspace(0, int(offs[-1]), len(offs) + 1).long().tolist()
        return itertools.pairwise(ends)


class SharesScalesAmongGroups(Right):
    def of_group(self, group: int) -> int:
        return 0


class PassesOverNan(Right):
    def write_outputs(self, problem: Problem, y: Tensor, outputs: tuple[Tensor, ...]) -> None:
        super().write_outputs(problem, y.nan_to_num(nan=0.0), outputs)


class TurnsNanToZero(Right):
    def write(self, z: Tensor, out: Tensor) -> None:
        super().write(z.nan_to_num(0.0), out)


class LeaksIntoTheGroupBefore(Right):
    """Sums over K of one term too many, times zero, as a tile that is masked on one side."""

    def bind_ragged(self, problem: Problem, groups: Groups) -> Launcher:
        launch = super().bind_ragged(problem, groups)

        def launch_leaking(a: Tensor, b: Tensor, *rest: Any, offs: Tensor, **extras: Any) -> Tensor:
            result = launch(a, b, *rest, offs=offs, **extras)
            for group, (_, end) in enumerate(self.ranges(offs)):
                if groups.ragged == "k" and end < int(offs[-1]):
                    result[group] += 0 * a[:, end, None]
            return result

        return launch_leaking


class OneConfigIsWrong(Right):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)

        def launch_off(*arguments: Any, **extras: Any) -> Any:
            out: Any = launch(*arguments, **extras)
            return out.mul_(1.1) if config.rows == 64 else out

        return launch_off


class BesideOthersIsWrong(OneConfigIsWrong):
    """Only the config for a product that runs beside others."""

    def configs(self, problem: Problem) -> Iterable[Tile]:
        return [Tile(rows=16)]

    def beside(self, problem: Problem) -> Tile:
        return Tile(rows=64)


class OneTileOfRows(Right):
    """Its config for a single row writes no more than one tile of rows."""

    def configs(self, problem: Problem) -> Iterable[Tile]:
        return [self.default_config(problem)]

    def default_config(self, problem: Problem) -> Tile:
        return Tile(rows=16 if problem.m == 1 else 64)

    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)

        def launch_one(*arguments: Any, **extras: Any) -> Any:
            out: Any = launch(*arguments, **extras)
            return out.index_fill_(-2, torch.arange(config.rows, out.shape[-2]), torch.nan)

        return launch_one


class RefusesManyRows(OneTileOfRows):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        if config.rows < problem.m:
            raise ConfigError(f"{config} has fewer rows than {problem.m}")
        return super().bind(problem, config)


class DeclinesOneRow(OneTileOfRows):
    def declines(self, problem: Problem) -> list[str]:
        return [*super().declines(problem), *["is for more rows"] * (problem.m == 1)]


@dataclass(frozen=True, kw_only=True)
class TupleTile(Tile):
    shape: tuple[int, ...] = (16, 16)


class ConfigIsNoJson(Right):
    config_type = TupleTile

    def configs(self, problem: Problem) -> Iterable[Tile]:
        return [TupleTile()]

    def default_config(self, problem: Problem) -> Tile:
        return TupleTile()


class DefaultConfigIsOfAnotherType(Right):
    def default_config(self, problem: Problem) -> Tile:
        return TupleTile()


class OwesMemory(Right):
    def workspace_bytes(self, problem: Problem, config: Tile) -> int:
        return -1


class EstimatesNothing(Right):
    def estimate_us(self, problem: Problem, config: Tile) -> float | None:
        return 0.0


class IsNotDeterministic(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        z = super().product(a, b)
        return z + 1e-6 * torch.rand_like(z)


class DependsOnM(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        # As a kernel does that splits K where there are few rows.
        if a.shape[-2] > 8 or a.dim() == 3:
            return super().product(a, b)
        half = a.shape[-1] // 2
        return (a[:, :half].float() @ b[:half].float()).double() + (
            a[:, half:].float() @ b[half:].float()
        )


class KeepsItsFirstOperand(Right):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)
        first: list[Tensor] = []

        def launch_stale(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            first.append(a)
            return launch(first[0], b, bias, residual, alpha, out)

        return launch_stale


class KeepsItsFirstAlpha(Right):
    def bind(self, problem: Problem, config: Tile) -> Launcher:
        launch = super().bind(problem, config)
        first: list[float] = []

        def launch_stale(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            first.append(alpha)
            return launch(a, b, bias, residual, first[0], out)

        return launch_stale


class SharesAnOperandAmongLaunchers(Right):
    """Right as long as one launcher is used at a time: binding forgets the kept operand."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def bind(self, problem: Problem, config: Tile) -> Launcher:
        self.kept.clear()
        launch = super().bind(problem, config)

        def launch_stale(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            self.kept.append(b)
            return launch(a, self.kept[0], bias, residual, alpha, out)

        return launch_stale


class RaisesToDecline(Right):
    def declines(self, problem: Problem) -> list[str]:
        if problem.a.dtype.is_complex:
            raise NotImplementedError("complex operands")
        return super().declines(problem)


class ChangesItsMind(Right):
    asked = itertools.count()

    def declines(self, problem: Problem) -> list[str]:
        return super().declines(problem) or ["busy"] * (next(self.asked) % 2)


class GivesAnotherReason(Right):
    asked = itertools.count()

    def declines(self, problem: Problem) -> list[str]:
        return super().declines(problem) or [f"busy since {next(self.asked)}"]


class GivesNoneForNoReasons(Right):
    def declines(self, problem: Problem) -> list[str]:
        return super().declines(problem) or None  # type: ignore[return-value]


class TakesComplexForReal(Right):
    def declines(self, problem: Problem) -> list[str]:
        return [] if problem.a.dtype.is_complex else super().declines(problem)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        if not a.is_complex():
            return super().product(a, b)
        return super().product(a.real, b.real).to(torch.complex128)


class DeclinesEverything(Right):
    def declines(self, problem: Problem) -> list[str]:
        return ["not today"]


class VersionIsTheTime(Right):
    @property
    def version(self) -> str:  # type: ignore[override]
        return str(time.perf_counter_ns())


class VersionIsDrawnOnce(Right):
    """An instance keeps it, as a default version is kept."""

    @functools.cached_property
    def version(self) -> str:  # type: ignore[override]
        return os.urandom(8).hex()


class HasNoName(Right):
    name = ""


class LaunchesOnTheDefaultStream(Right):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return super().product(a, b)


class WaitsForTheGpu(Right):
    def write(self, z: Tensor, out: Tensor) -> None:
        super().write(z, out)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


class WaitsUnderCaptureToo(Right):
    def write(self, z: Tensor, out: Tensor) -> None:
        super().write(z, out)
        torch.cuda.synchronize()


WRONG_ON_GPU = [
    (LaunchesOnTheDefaultStream, "current_stream", "*error nan exceeds *"),
    (WaitsForTheGpu, "current_stream", "*waits for the GPU when launched*"),
    (WaitsUnderCaptureToo, "graph_capture", "*captur*"),
]
WRONG = [
    (DropsTheTailOfK, "sizes", "*error * exceeds *"),
    (MasksOneOperandOnly, "sizes", "*error nan exceeds *"),
    (LeavesAnEdgeUnwritten, "sizes", "*error nan exceeds *"),
    (WritesARowTooMany, "sizes", "*it wrote outside the out it was given*"),
    (WritesToAnOperand, "sizes", "*it wrote to its input a, or around it*"),
    (ReturnsAnotherTensor, "sizes", "*it returned something else than the out it was given*"),
    (IgnoresStrides, "layouts", "*error * exceeds *"),
    (SumsIn16Bits, "dtypes", "*error * exceeds *"),
    (SwapsGateAndUp, "epilogues", "*error * exceeds *"),
    (AddsBiasLast, "terms", "*error * exceeds *"),
    (ScalesByTheFirstColumn, "scales", "*error * exceeds *"),
    (MultipliesTheFirstMatrixOnly, "batches", "*error * exceeds *"),
    (ForgetsEmptySums, "empties", "*error nan exceeds *"),
    (ReturnsOneBuffer, "verification", "*it returned memory that it had returned before and *"),
    (MakesAColumnMajorOutput, "verification", "*it returned strides *"),
    (OneConfigIsWrong, "configs", "rows=64: error * exceeds *"),
    (OneConfigIsWrong, "configs_of_scales", "rows=64: error * exceeds *"),
    (OneTileOfRows, "configs_of_one_row", "rows=16: error nan exceeds *"),
    (PassesOverNan, "outputs", "*output row_max * is not NaN or Inf where the result makes it"),
    (TurnsNanToZero, "verification", "*with NaN and Inf in rows * are wrong: one is * and not nan"),
    (TurnsNanToZero, "ragged", "*with NaN and Inf in rows * are wrong: one is * and not nan"),
    (LeaksIntoTheGroupBefore, "ragged", "*with NaN and Inf in rows * are wrong: one is nan and *"),
    (OneConfigIsWrong, "configs_of_outputs", "rows=64: error * exceeds *"),
    (OneConfigIsWrong, "configs_of_ragged", "rows=64: error * exceeds *"),
    (SharesRowsEvenly, "ragged", "rows=16: error * exceeds *"),
    (SharesScalesAmongGroups, "ragged", "rows=16: error * exceeds *"),
    (OneConfigIsWrong, "arithmetic", "*one arithmetic for rows=16 and rows=64*"),
    (BesideOthersIsWrong, "configs", "rows=64: error * exceeds *"),
    (ConfigIsNoJson, "configs_are_well_formed", "*ConfigError: TupleTile: shape must be tuple*"),
    (DefaultConfigIsOfAnotherType, "configs_are_well_formed", "*TupleTile* is not a *Tile*"),
    (OwesMemory, "estimates", "*rows=16: -1 bytes*"),
    (EstimatesNothing, "estimates", "*rows=16: 0.0 µs*"),
    (IsNotDeterministic, "deterministic", "*claims determinism; run 1 of rows=16 differs *"),
    (DependsOnM, "batch_invariant", "*claims batch invariance; with rows=16 rows 0 to *"),
    (KeepsItsFirstOperand, "verification", "*error * on the second launch, on other inputs"),
    (KeepsItsFirstAlpha, "verification", "*error * on the second launch, on other inputs"),
    (SharesAnOperandAmongLaunchers, "launchers_share_nothing", "*error * exceeds *"),
    (RaisesToDecline, "reasons_are_strings_and_never_raise", "*raised NotImplementedError*"),
    (ChangesItsMind, "reasons_are_strings_and_never_raise", "*two results for *'busy'*"),
    (GivesAnotherReason, "reasons_are_strings_and_never_raise", "*two results for *'busy since*"),
    (GivesNoneForNoReasons, "reasons_are_strings_and_never_raise", "*object is not iterable*"),
    (TakesComplexForReal, "other_dtypes_are_declined_or_right", "*error * exceeds *"),
    (DeclinesEverything, "serves_something", "*declines every problem*: not today.*"),
    (VersionIsTheTime, "version_is_stable", "*its version changes by itself*"),
    (VersionIsDrawnOnce, "version_is_stable", "*its version changes by itself*"),
    (HasNoName, "registers", "*HasNoName*has no name*"),
]


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no part in this, and one of them takes two seconds a run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(
    pytester: pytest.Pytester,
    kernel: type[Kernel[Any]],
    test: str = "",
    device: str = "cpu",
    *options: str,
) -> Any:
    """The suite on ``kernel``, as its author would run it; all tests or one."""
    pytester.makepyfile(
        test_it=f"""
        from {__name__} import {kernel.__name__}
        from tmm_core.testing import KernelConformance

        class TestIt(KernelConformance):
            kernel = {kernel.__name__}()
            device = {device!r}
        """
    )
    name = f"test_it.py::TestIt::test_{test}" if test else "test_it.py"
    options = ("-W", "error", "-p", "no:cacheprovider", "-rs", *options)
    return pytester.runpytest_inprocess(name, *options)


@pytest.mark.slow
def test_a_right_kernel_passes(pytester: pytest.Pytester) -> None:
    outcomes = run(pytester, Right).parseoutcomes()
    assert not {"failed", "errors", "warnings"} & set(outcomes), outcomes
    assert outcomes["passed"] > 140
    # Four other dtypes, and two tests that need a GPU.
    assert outcomes["skipped"] == 6


@pytest.mark.parametrize(
    ("kernel", "outcome"),
    [
        (Right, "passed"), (RefusesManyRows, "passed"), (DeclinesOneRow, "skipped"),
    ],
)  # fmt: skip
def test_configs_of_one_row_are_right_or_refused(
    pytester: pytest.Pytester, kernel: type[Kernel[Any]], outcome: str
) -> None:
    assert run(pytester, kernel, "configs_of_one_row").parseoutcomes() == {outcome: 1}


@pytest.mark.parametrize(
    ("kernel", "test", "message"), WRONG, ids=[kernel.__name__ for kernel, *_ in WRONG]
)
@pytest.mark.slow(quick=8)
def test_a_wrong_kernel_fails(
    pytester: pytest.Pytester, kernel: type[Kernel[Any]], test: str, message: str
) -> None:
    result = run(pytester, kernel, test, "cpu", "-x")
    assert result.parseoutcomes().get("failed", 0) >= 1
    result.stdout.fnmatch_lines([message])


@pytest.mark.gpu
def test_a_right_kernel_passes_on_a_gpu(pytester: pytest.Pytester) -> None:
    outcomes = run(pytester, Right, device="cuda").parseoutcomes()
    assert not {"failed", "errors", "warnings"} & set(outcomes), outcomes
    assert outcomes["skipped"] == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "test", "message"),
    WRONG_ON_GPU,
    ids=[kernel.__name__ for kernel, *_ in WRONG_ON_GPU],
)
def test_a_wrong_kernel_fails_on_a_gpu(
    pytester: pytest.Pytester, kernel: type[Kernel[Any]], test: str, message: str
) -> None:
    result = run(pytester, kernel, test, "cuda")
    assert result.parseoutcomes().get("failed", 0) >= 1
    result.stdout.fnmatch_lines([message])
    torch.randn(4, device="cuda")  # torch is as it was after a capture that failed


def test_declined_problems_are_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    result = run(pytester, Right, "other_dtypes_are_declined_or_right")
    assert result.parseoutcomes() == {"skipped": 4}
    result.stdout.fnmatch_lines(["SKIPPED*torch.int8 operand; torch.int8 operand*"])


def test_every_test_has_a_kernel_that_fails_it() -> None:
    tests = {name[5:] for name in dir(KernelConformance) if name.startswith("test_")}
    # Each of these fails for many of the kernels in lying.py: see test_lying.py.
    lied_to = {"use", "every_tile", "use_of_ragged"}
    assert tests == {test for _, test, _ in (*WRONG, *WRONG_ON_GPU)} | lied_to


#: The memory layouts in which verification places a matrix of a class.
PLACES: dict[str, Callable[[Operand, tuple[int, ...]], MemoryLayout]] = {
    "dense": memory_layout,
    "padded": functools.partial(memory_layout, padded=True),
    "expanded": expanded_layout,
    "apart": unusual_layout,
    "near": functools.partial(unusual_layout, near=True),
    "overlapping": functools.partial(unusual_layout, near=True, overlapping=True),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 7), (1, 6), (16, 1), (0, 3), (3, 5, 8)])
def test_operands_are_surrounded_by_nan(layout: str, shape: tuple[int, ...], place: str) -> None:
    placed = PLACES[place](laid(Operand(torch.float32), layout), shape)
    made = with_guard_bands(placed, torch.device("cpu"), UNREADABLE)
    t = fill("a", made.tensor, 1, torch.Generator().manual_seed(0))
    memory, inside = whole(made)
    assert t.shape == shape
    assert not t.isnan().any()
    assert memory[~inside].isnan().all()
    assert inside.sum() <= t.numel()
    before = made.sums()
    assert torch.equal(made.sums(), before)
    if t.numel():
        memory[inside.nonzero()[0]] += 1
        assert not torch.equal(made.sums(), before)


def whole(made: GuardedTensor) -> tuple[Tensor, Tensor]:
    """All memory of a tensor and its surroundings, and the mask of its elements."""
    t, memory = made.tensor, made.words.view(made.tensor.dtype).flatten()
    inside = torch.zeros_like(memory, dtype=torch.bool)
    places = torch.arange(len(memory)).as_strided(t.shape, t.stride(), t.storage_offset())
    inside[places.reshape(-1)] = True
    return memory, inside


@pytest.mark.parametrize("place", ["dense", "padded", "apart", "near"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_around_an_output_is_seen(layout: str, place: str) -> None:
    placed = PLACES[place](laid(Operand(torch.bfloat16), layout), (5, 7))
    made = with_guard_bands(placed, torch.device("cpu"), UNWRITTEN)
    made.poison()
    assert made.tensor.isnan().all()
    memory, inside = whole(made)
    assert inside.sum() == 35
    made.tensor.fill_(2)
    assert made.intact()
    for store in (inside.nonzero()[0] - 1, inside.nonzero()[-1] + 1):
        made.poison()
        assert made.tensor.isnan().all()
        memory[store] = float("nan")
        assert not made.intact()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_match_their_names(layout: str) -> None:
    """A layout's tensors belong to its class; the suite's default probe is contiguous."""
    base = laid(Operand(torch.float16), layout)
    for shape in ((48, 80), (5, 7)):
        t = torch.empty(200_000, dtype=torch.float16)
        placed = memory_layout(base, shape)
        assert Operand.of(t.as_strided(shape, placed.strides, placed.offset)) == base
    suite = KernelConformance()
    suite.device = "cpu"  # type: ignore[misc]
    for size in ((48, 80, 112), (5, 7, 9), (1, 1, 1), (1, 40, 33), (33, 1, 40)):
        problem = suite._probe(size)
        m, n, k = size
        a, b = torch.empty(m, k, dtype=torch.float16), torch.empty(k, n, dtype=torch.float16)
        found = Problem.of(a, b, a.new_empty(m, n), problem.device)
        assert problem == found
