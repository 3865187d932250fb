"""Checks that a kernel does what it declares. Subclass it in five lines::

    from tmm_core.testing import KernelConformance

    class TestMine(KernelConformance):
        kernel = MyKernel()

A kernel must be correct on every problem that it does not decline. Declined problems are skipped
with the kernel's reasons. The claims of its traits are tested.
"""

from __future__ import annotations

import collections
import concurrent.futures as futures
import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from tmm_core import compat
from tmm_core.errors import ConfigError
from tmm_core.registry.registry import Registry
from tmm_core.spec.device import fingerprint, interpreting
from tmm_core.spec.hookspecs import hookimpl
from tmm_core.spec.kernel import Config, Kernel
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.testing.probe_problems import odd_problems, problem_id
from tmm_core.testing.ragged_conformance import RaggedProblems
from tmm_core.triton.interpreted import REMEDY
from tmm_core.verify import compare, random_inputs
from tmm_core.verify.data_sets import DataSets
from tmm_core.verify.ragged_inputs import Inputs
from tmm_core.verify.verifier import Extent, Verifier

#: Launches that must agree bit for bit.
REPEATS = {"cuda": 12, "cpu": 2}

#: Configs of one row that are tried on another problem: each is compiled.
OF_ONE_ROW = 8

#: GPU cycles to sleep, some 50 ms: much longer than a host takes to launch a kernel.
LONG = 100_000_000


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a problem."""

    problem: Problem
    inputs: Inputs
    out: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> _Tensors:
        inputs = random_inputs.make(problem, device)
        return cls(problem, inputs, problem.empty_out(device).fill_(math.nan))

    def launch(self, launcher: Launcher, out: torch.Tensor | None) -> torch.Tensor:
        with precision(self.problem.tf32):
            return self.inputs.launch(launcher, out)


class KernelConformance(RaggedProblems):
    """Checks ``kernel`` against the spec in :mod:`tmm_core.spec.kernel` and an fp64 reference.

    ``test_NAME(probe)`` is run with each probe of ``probes_of_NAME()``, and ``test_ragged(ragged)``
    with each problem of ``ragged_problems()``; a subclass may add to them.

    Attributes:
        kernel: The kernel, an instance.
        device: ``"cuda"`` or ``"cpu"``; by default a GPU if there is one and Triton's interpreter
            is not enabled.
        dtypes: Operand dtypes to try. Tests of other properties use the first.
        sizes: ``(M, N, K)`` to try in every dtype; by default some ten, depending on the device.
        size: ``(M, N, K)`` for tests of other properties; by default (304, 208, 144) on a GPU and
            (48, 80, 112) elsewhere. Multiples of 16 keep operands aligned, if the kernel needs
            that.
        epilogues: As ``matmul(epilogue=…)`` takes them.
        max_configs: Configs to try of one problem's search space; by default 64 on a GPU
            and 8 elsewhere, spread evenly over it.
        slack: Factor on the tolerance of :mod:`tmm_core.verify.compare`, for a kernel that rounds
            more than once.
    """

    kernel: ClassVar[Kernel[Any]]
    max_configs: ClassVar[int | None] = None
    slack: ClassVar[float] = 1.0

    # -- the kernel as a plugin --------------------------------------------------------

    def test_registers(self) -> None:
        """The registry accepts the kernel."""
        kernel = self.kernel

        class Plugin:
            @hookimpl
            def tmm_kernels(self) -> list[Kernel[Any]]:
                return [kernel]

        Registry().register(Plugin())

    def test_version_is_stable(self) -> None:
        """Two computations of the version agree: one rank's record has to serve another."""
        again = copy.copy(self.kernel)
        again.__dict__.pop("version", None)
        assert isinstance(self.kernel.version, str)
        assert self.kernel.version
        assert again.version == self.kernel.version, "its version changes by itself"

    def test_serves_something(self) -> None:
        """The kernel serves at least one problem; otherwise nothing would be tested."""
        reasons: collections.Counter[str] = collections.Counter()
        for probe in (*self.probes_of_sizes(), *self.probes_of_layouts(), *self.probes_of_terms()):
            against = self.kernel.reasons_against(probe)
            if not against:
                return
            reasons.update(against)
        if not all(map(self.kernel.reasons_against, self.ragged_problems())):
            return
        found = "; ".join(reason for reason, _ in reasons.most_common(5))
        pytest.fail(
            f"{self.kernel.name} declines every problem of the suite on {self._device()}: {found}. "
            "Set sizes, size and dtypes to problems that it serves."
        )

    def test_reasons_are_strings_and_never_raise(self) -> None:
        """Even for unrealistic problems: any dtype, size, device and epilogue."""
        for problem in odd_problems(fingerprint(self._device())):
            try:
                reasons = self.kernel.reasons_against(problem)
                again = self.kernel.reasons_against(problem)
            except Exception as error:
                pytest.fail(f"reasons_against raised {error!r} for {problem.to_json()}")
            assert isinstance(reasons, list), f"{reasons!r} is not a list, for {problem.to_json()}"
            valid = all(isinstance(r, str) and r for r in reasons)
            assert valid, f"{reasons!r} for {problem.to_json()}"
            found = f"{reasons}, then {again}"
            assert again == reasons, f"two results for {problem.to_json()}: {found}"

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.int8, torch.int32, torch.complex64],
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )
    def test_other_dtypes_are_declined_or_right(self, dtype: torch.dtype) -> None:
        self._check(self._probe(dtype=dtype))

    # -- the numbers -------------------------------------------------------------------

    def test_sizes(self, probe: Problem) -> None:
        self._check(probe)

    def test_layouts(self, probe: Problem) -> None:
        """Every class of strides of operands and output, dense and with gaps between rows."""
        self._check(probe, "repeated")

    def test_dtypes(self, probe: Problem) -> None:
        """Outputs wider and narrower than the operands, and TF32."""
        self._check(probe)

    def test_epilogues(self, probe: Problem) -> None:
        self._check(probe)

    def test_terms(self, probe: Problem) -> None:
        self._check(probe)

    def test_scales(self, probe: Problem) -> None:
        """8-bit floats with and without scales, for kernels that accept them."""
        self._check(probe)

    def test_batches(self, probe: Problem) -> None:
        self._check(probe, "repeated")

    def test_empties(self, probe: Problem) -> None:
        """Empty results and empty sums: zero goes through bias and epilogue."""
        self._check(probe)

    def test_verification(self, probe: Problem) -> None:
        """The result is right in the ways that tuning verifies first: without ``out=``, on other
        inputs with other addresses and leading strides, and repeated. NaN and Inf reach exactly the
        elements that they reach in the reference."""
        self._check(probe, "repeated")

    def test_use(self, probe: Problem) -> None:
        """The result is right in all further ways of use: N-D operands and plans, torch's modes,
        two threads at once, values that change at the same address, and strides of zero. One tensor
        may be two arguments, and numbers are small and large. It changes no state of the process
        and keeps no result."""
        self._check(probe, "whole")

    def test_every_tile(self) -> None:
        """Sizes of every alignment, and with every remainder in a tile."""
        for probe in self._served(self.sizes_of_tiles()):
            self._check(probe, "forms")

    def test_use_of_ragged(self) -> None:
        """The result is right in all further ways of use, for kernels that accept groups. There are
        groups of one row, all rows in one group, and mostly empty groups. Rows are gathered from
        more rows or from one."""
        for problem in self._served(self.ragged_in_use()):
            self._check(problem, "whole")

    def test_outputs(self, probe: Problem) -> None:
        """An epilogue's auxiliary outputs, for kernels that declare them."""
        self._check(probe, "repeated")

    def test_configs_of_outputs(self) -> None:
        """The auxiliary outputs of every config are correct."""
        self._check_search_space(self._served(self.probes_of_outputs())[0])

    def test_ragged(self, ragged: Problem) -> None:
        """Groups along a dimension, for kernels that accept them: of equal and different sizes,
        with and without ``out``, and repeatedly."""
        self._check(ragged, "repeated")

    # -- its configs -------------------------------------------------------------------

    def test_configs(self) -> None:
        """Every config of the search space is correct."""
        self._check_search_space(self._served(self.demanding())[0])

    def test_configs_of_scales(self) -> None:
        """Every config for 8-bit operands is correct, for kernels that accept them."""
        self._check_search_space(self._served(self.demanding_scales())[0])

    def test_configs_of_ragged(self) -> None:
        """Every config for ragged products is correct, along each dimension."""
        served = self._served(self.demanding_ragged())
        for problem in {problem.along: problem for problem in reversed(served)}.values():
            self._check_search_space(problem)

    def test_configs_of_one_row(self) -> None:
        """A config for a single row is right for more rows, or refused. Tunings try winners of near
        products, and ``override`` takes any config."""
        problem = self._served(self.demanding())[0]
        row = replace(problem, m=1)
        if self.kernel.reasons_against(row):
            pytest.skip("declines a single row")
        others = set(self._configs(row)) - set(self._configs(problem))
        verifier = Verifier(problem, self._device())
        for config in sorted(others, key=str)[:OF_ONE_ROW]:
            try:
                launcher = self.kernel.bind(problem, config)
            except Exception:  # a refusal, as a tuning takes it
                continue
            self._verify(verifier, launcher, "brief", f"{config}: ")

    def test_configs_are_well_formed(self) -> None:
        """Configs are hashable, equal after a round trip through JSON, which is how records store
        them, and reject unknown fields."""
        problem = self._served(self.demanding())[0]
        kernel = self.kernel
        default = kernel.default_config(problem)
        assert default == kernel.default_config(problem), "two calls, two default configs"
        for config in self._configs(problem):
            assert type(config) is kernel.config_type, f"{config!r} is not a {kernel.config_type}"
            same = hash(config) == hash(copy.copy(config))
            assert same, f"a copy of {config!r} has another hash"
            document = config.to_json()
            read = kernel.config_type.from_json(json.loads(json.dumps(document)))
            assert read == config, f"{config!r} came back as {read!r}"
            with pytest.raises(ConfigError):
                kernel.config_type.from_json({**document, "no_such_field": 1})

    def test_estimates(self) -> None:
        """Time is a positive number or unknown; scratch memory is not negative."""
        problem = self._served(self.demanding())[0]
        for config in self._configs(problem):
            time = self.kernel.estimate_us(problem, config)
            assert time is None or (math.isfinite(time) and time > 0), f"{config}: {time} µs"
            scratch = self.kernel.workspace_bytes(problem, config)
            assert type(scratch) is int, f"{config}: {scratch!r} is not a whole number of bytes"
            assert scratch >= 0, f"{config}: {scratch} bytes"

    # -- what its traits claim ---------------------------------------------------------

    def test_deterministic(self) -> None:
        """Every config gives the same bits, run after run."""
        if not self.kernel.traits.deterministic:
            pytest.skip("claims no determinism")
        problem = self._served(self.fine_grained())[0]
        tensors = _Tensors.of(problem, self._device())
        for config, launcher in self._bound(problem, self._configs(problem)):
            first = tensors.launch(launcher, tensors.out).clone()
            for run in range(1, REPEATS[self._device().type] + 1):
                again = tensors.launch(launcher, tensors.out)
                differ = int((first != again).sum())
                assert not differ, (
                    f"{self.kernel.name} claims determinism; run {run} of {config} differs from "
                    f"the first in {differ} of {first.numel()} elements, for {problem}"
                )

    def test_arithmetic(self) -> None:
        """Configs that declare the same arithmetic give the same bits."""
        if not self.kernel.traits.batch_invariant:
            pytest.skip("claims no batch invariance")
        problem = self._served(self.fine_grained())[0]
        tensors = _Tensors.of(problem, self._device())
        seen: dict[object, tuple[Config, torch.Tensor]] = {}
        compared = False
        for config, launcher in self._bound(problem, self._invariant_configs(problem)):
            bits = tensors.launch(launcher, tensors.out).clone()
            first, expected = seen.setdefault(
                self.kernel.arithmetic(problem, config), (config, bits)
            )
            compared |= first != config
            differ = int((bits != expected).sum())
            assert not differ, (
                f"{self.kernel.name} claims one arithmetic for {first} and {config}, which differ "
                f"in {differ} of {bits.numel()} elements, for {problem}"
            )
        if not compared:
            pytest.skip("no two configs share an arithmetic")

    def _invariant_configs(self, problem: Problem) -> list[Config]:
        """Return the configs to try that may serve batch-invariant mode."""
        configs = self._configs(problem)
        return [c for c in configs if self.kernel.arithmetic(problem, c) is not None]

    def test_batch_invariant(self) -> None:
        """With one config, the bits of a row do not depend on the number of rows."""
        if not self.kernel.traits.batch_invariant:
            pytest.skip("claims no batch invariance")
        whole = self._served(self.fine_grained())[0]
        tensors, m = _Tensors.of(whole, self._device()), whole.m
        rows = [(0, 1), (0, 2), (0, 17), (0, m - 1)]
        if self._device().type == "cuda":
            # On a CPU, interpreted tl.dot rounds a row depending on its position in the tile.
            rows += [(m - 1, m), (m // 2, m)]
        configs = self._invariant_configs(whole)[:3]
        compared = False
        for config, whole_launcher in self._bound(whole, configs):
            full = tensors.launch(whole_launcher, tensors.out).clone()
            for first, last in rows:
                some = slice(first, min(last, m))
                a, b, out = tensors.inputs.a[some], tensors.inputs.b, tensors.out[some]
                part = Problem.of(a, b, out, whole.device)
                if not out.shape[0] or self.kernel.reasons_against(part):
                    continue
                compared = True
                launcher = self.kernel.bind(part, config)
                with precision(whole.tf32):
                    result = launcher(a, b, None, None, 1.0, out)
                differ = int((result != full[some]).sum())
                assert not differ, (
                    f"{self.kernel.name} claims batch invariance; with {config} rows {first} to "
                    f"{last} of {m} differ in {differ} elements when computed by themselves"
                )
        if not compared:
            pytest.skip(f"declines fewer rows than {m}")

    # -- launchers ---------------------------------------------------------------------

    def test_launchers_share_nothing(self) -> None:
        """Two launchers of one problem, called alternately, do not disturb each other."""
        problem, device = self._probe(), self._device()
        self._decline(problem)
        first, second = Verifier(problem, device), Verifier(problem, device)
        one, two = self._bind(problem), self._bind(problem)
        for verifier, launcher in ((first, one), (second, two), (second, one), (first, two)):
            self._verify(verifier, launcher, "brief")

    def test_current_stream(self) -> None:
        """It launches on the current stream, behind its queued work, and does not synchronise."""
        tensors = self._tensors_on_gpu()
        launcher = self._bind(tensors.problem)
        a, out = tensors.inputs.a, tensors.out
        tensors.launch(launcher, out)  # the first launch loads modules
        values = a.clone()
        a.fill_(math.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            a.copy_(values)
            tensors.launch(launcher, out)
            waited = stream.query()
        stream.synchronize()
        assert not waited, f"{self.kernel.name} waits for the GPU when launched"
        self._check_result(tensors, out)

    def test_graph_capture(self) -> None:
        """Once bound, it can be captured without a prior launch, and the graph replays on the
        operands' current values."""
        if not self.kernel.traits.capture_safe:
            pytest.skip("claims no safety under graph capture")
        tensors = self._tensors_on_gpu()
        launcher = self._bind(tensors.problem)
        torch.cuda.synchronize()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        unchanged = torch.cuda.stream(torch.cuda.current_stream())
        try:
            with unchanged, torch.cuda.graph(graph, pool=pool):
                tensors.launch(launcher, tensors.out)
                made = tensors.launch(launcher, None)
        except Exception:  # or torch's random generator would fail the tests that follow
            torch.cuda.synchronize()
            compat.end_failed_capture(pool)
            raise
        for factor in (1.0, -0.5):
            tensors.inputs.a.mul_(factor)
            tensors.out.fill_(math.nan)
            graph.replay()
            for result in (tensors.out, made):
                self._check_result(tensors, result)

    # -- machinery ---------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise each test with its probes, which depend on the subclass's attributes."""
        if "probe" in metafunc.fixturenames:
            name = metafunc.function.__name__.removeprefix("test_")
            probes = list(getattr(self, f"probes_of_{name}")())
            metafunc.parametrize("probe", probes, ids=problem_id)
        if "ragged" in metafunc.fixturenames:
            declared = any(along in self.kernel.supports.ragged for along in "mnk")
            none = pytest.param(None, marks=pytest.mark.skip(reason="declares no ragged products"))
            problems = list(self.ragged_problems()) if declared else [none]
            metafunc.parametrize("ragged", problems, ids=problem_id)

    @pytest.fixture(autouse=True)
    def _compiled_ahead(self, request: pytest.FixtureRequest) -> None:
        """On a GPU, compile for all of this class's probes at once, on all cores: one by one,
        a hundred kernels take minutes. Failures are raised again by the tests themselves."""
        cls = type(self)
        if "_compiled" in vars(cls) or self._device().type != "cuda":
            return
        cls._compiled = True  # type: ignore[attr-defined]
        compiled: list[Problem] = []
        for item in request.session.items:
            if getattr(item, "cls", None) is cls and hasattr(item, "callspec"):
                given = item.callspec.params
                compiled += [given[name] for name in ("probe", "ragged") if given.get(name)]

        def compile_one(problem: Problem) -> None:
            if not self.kernel.reasons_against(problem):
                self._bind(problem)

        with futures.ThreadPoolExecutor() as pool:
            futures.wait([pool.submit(compile_one, each) for each in dict.fromkeys(compiled)])

    def _decline(self, problem: Problem) -> None:
        if reasons := self.kernel.reasons_against(problem):
            pytest.skip("; ".join(reasons))

    def _tensors_on_gpu(self) -> _Tensors:
        if self._device().type != "cuda":
            pytest.skip("streams and graphs are CUDA's")
        problem = self._probe()
        self._decline(problem)
        return _Tensors.of(problem, self._device())

    def _bind(self, problem: Problem) -> Launcher:
        return self.kernel.bind(problem, self.kernel.default_config(problem))

    def _bound(self, problem: Problem, configs: Sequence[Config]) -> list[tuple[Config, Launcher]]:
        """Launchers of the configs, compiled in parallel on all cores."""
        with futures.ThreadPoolExecutor() as pool:
            launchers = pool.map(lambda config: self.kernel.bind(problem, config), configs)
            return list(zip(configs, launchers, strict=True))

    def _check(self, problem: Problem, extent: Extent = "brief") -> None:
        """Verify the default config, if the kernel serves the problem."""
        self._decline(problem)
        self._check_configs(problem, [self.kernel.default_config(problem)], extent)

    def _check_configs(
        self, problem: Problem, configs: Sequence[Config], extent: Extent = "brief"
    ) -> None:
        verifier = Verifier(problem, self._device())
        bound = self._bound(problem, configs)
        if extent == "whole":
            # A launcher may not depend on state that a later bind leaves in the kernel.
            other = replace(problem, m=max(1, problem.m // 2), n=2 * problem.n)
            if not self.kernel.reasons_against(other):
                self._bind(other)
        for config, launcher in bound:
            self._verify(verifier, launcher, extent, f"{config}: ")

    def _check_search_space(self, problem: Problem) -> None:
        self._check_configs(problem, self._configs(problem))

    def _verify(self, verifier: Verifier, launcher: Launcher, extent: Extent, by: str = "") -> None:
        deterministic = self.kernel.traits.deterministic
        with precision(verifier.problem.tf32):
            verdict = verifier.verdict(
                launcher, deterministic=deterministic, extent=extent, slack=self.slack
            )
        if not verdict.ok:
            self._fail(verifier.problem, f"{by}{verdict.reason}")

    def _check_result(self, tensors: _Tensors, result: torch.Tensor) -> None:
        problem = tensors.problem
        expected = DataSets(problem, self._device()).expect(tensors.inputs, whole=True)
        error = float(expected.error(result, result.numel()))
        limit = compare.tolerance(problem) * self.slack
        if not error <= limit:
            self._fail(problem, f"error {error:.2g} exceeds {limit:.2g}")

    def _fail(self, problem: Problem, fault: str) -> None:
        hint = f"\n{REMEDY}." if interpreting() and "bfloat16" in str(problem.to_json()) else ""
        text = f"{self.kernel.name} is wrong on {problem_id(problem)}:\n{fault}{hint}"
        pytest.fail(text, pytrace=False)

    def _served(self, probes: Iterable[Problem]) -> list[Problem]:
        """Return the probes that the kernel does not decline; skips the test if there is none."""
        against = {probe: self.kernel.reasons_against(probe) for probe in probes}
        served = [probe for probe, reasons in against.items() if not reasons]
        return served or pytest.skip("; ".join(list(against.values())[-1]))

    def _configs(self, problem: Problem) -> list[Config]:
        """Return the default config, one for a product beside others, and :attr:`max_configs` of
        the search space."""
        configs = list(self.kernel.configs(problem))
        limit = self.max_configs or (64 if problem.device.type == "cuda" else 8)
        step = max(1, -(-len(configs) // limit))
        beside = self.kernel.beside(problem)
        chosen = [self.kernel.default_config(problem), *([beside] if beside is not None else [])]
        return list(dict.fromkeys([*chosen, *configs[::step]]))
