"""Does a kernel do what it says? One class, subclassed in five lines::

    from tmm_core.testing import KernelConformance

    class TestMine(KernelConformance):
        kernel = MyKernel()

A kernel answers for what it does not decline: a problem that it has reasons against is
skipped with those reasons, everything else has to be right, and what its traits claim is
put to the test.
"""

from __future__ import annotations

import collections
import concurrent.futures as futures
import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tmm_core.device import DeviceFingerprint, fingerprint, interpreting
from tmm_core.epilogue import BUILTIN, Epilogue, EpilogueLike, parse
from tmm_core.errors import ConfigError
from tmm_core.hookspecs import hookimpl
from tmm_core.kernel import Config, Kernel, Launcher
from tmm_core.problem import Operand, Problem
from tmm_core.registry import Registry
from tmm_core.testing.memory import LAYOUTS, WRITABLE
from tmm_core.testing.probe import Posed, Probe

#: A parametrised epilogue of somebody's own, and one that no kernel can fuse.
USERS = Epilogue(
    "squareplus",
    lambda z, b: 0.5 * (z + (z * z + b).sqrt()),
    device="tmm_core.testing.squareplus:squareplus",
    parameters=(1.5,),
)
UNFUSABLE = Epilogue("no_device_function", lambda z: z.sin())

#: M×N×K by what is special about them. On a GPU past its tiles of up to 256, and one with
#: more tiles than there are SMs; interpreted programs cost 7 ms each, so few tiles of 16 to 64.
SIZES = {
    "cuda": (
        (317, 203, 131),  # divides nothing
        (512, 256, 256),  # multiples of every block
        (1, 520, 304),
        (301, 1, 520),
        (130, 70, 1),
        (1, 1, 1),
        (256, 256, 7),  # K shorter than a block
        (48, 80, 8200),  # long K
        (1029, 9, 64),  # tall
        (9, 1040, 64),  # wide
        (4104, 2056, 72),  # more tiles than SMs
    ),
    "cpu": (
        (37, 29, 43),
        (64, 32, 64),
        (1, 40, 33),
        (35, 1, 40),
        (33, 17, 1),
        (1, 1, 1),
        (32, 32, 5),
        (16, 24, 1030),
        (131, 5, 20),
        (5, 130, 20),
    ),
}
#: Multiples of 16, so that 16-byte rows are had in every dtype, of no larger block.
SIZE = {"cuda": (304, 208, 144), "cpu": (48, 80, 112)}

#: Launches that must agree bit for bit.
REPEATS = {"cuda": 12, "cpu": 2}

#: GPU cycles to sleep, some 50 ms: long past what a host needs to launch a kernel.
LONG = 100_000_000


class KernelConformance:
    """Holds ``kernel`` to the spec of :mod:`tmm_core.kernel`, against an fp64 reference.

    Attributes:
        kernel: The kernel, an instance.
        device: ``"cuda"`` or ``"cpu"``; by default a GPU where there is one and Triton is
            not asked to interpret.
        dtypes: Operand dtypes to try. The first is used where the dtype is not the point.
        sizes: ``(M, N, K)`` to try in every dtype; by default :data:`SIZES` of the device.
        size: Used where the size is not the point; by default :data:`SIZE` of the device.
            Multiples of 16 keep operands aligned, should the kernel need it.
        epilogues: As ``matmul(epilogue=…)`` takes them.
        max_configs: Configs to try of one problem's search space; by default 64 on a GPU
            and 8 elsewhere, spread evenly over it.
        slack: Factor on the tolerance of :mod:`tmm_core.verify`, for a kernel that rounds
            more than once.
    """

    kernel: ClassVar[Kernel[Any]]
    device: ClassVar[str | None] = None
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float16, torch.bfloat16, torch.float32)
    sizes: ClassVar[Sequence[tuple[int, int, int]] | None] = None
    size: ClassVar[tuple[int, int, int] | None] = None
    epilogues: ClassVar[Sequence[EpilogueLike]] = (
        *BUILTIN,
        "softcap(2.5)",
        "leaky_relu(0.25)",
        "gelu_tanh+softcap(3)",
        "swiglu+scale(0.5)",
        USERS,
        [USERS, "tanh"],
        UNFUSABLE,
    )
    max_configs: ClassVar[int | None] = None
    slack: ClassVar[float] = 1.0

    # -- what is asked: probes for test_NAME come from probes_of_NAME ------------------

    def probes_of_sizes(self) -> Iterator[Probe]:
        sizes = self.sizes or SIZES[self._device().type]
        for dtype in self.dtypes:
            for m, n, k in sizes:
                yield Probe(m=m, n=n, k=k, dtype=dtype)

    def probes_of_layouts(self) -> Iterator[Probe]:
        base = self._probe()
        yield from (replace(base, a=layout) for layout in LAYOUTS)
        yield from (replace(base, b=layout) for layout in LAYOUTS if layout != "row")
        yield from (replace(base, out=layout) for layout in WRITABLE if layout != "row")
        for a, b, out in (
            ("col", "col", "row"),
            ("col", "col", "col"),
            ("row_unaligned", "col_unaligned", "row_sliced"),
            ("strided", "strided", "strided"),
            ("broadcast_cols", "broadcast_rows", "col_padded"),
        ):
            yield replace(base, a=a, b=b, out=out)
        # Sizes that divide nothing, where a mask is most easily left out.
        m, n, k = (size - 3 for size in self._size())
        for a, b in (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col")):
            yield replace(base, m=max(1, m), n=max(1, n), k=max(1, k), a=a, b=b)

    def probes_of_dtypes(self) -> Iterator[Probe]:
        for dtype in self.dtypes:
            for out_dtype in (torch.float16, torch.bfloat16, torch.float32):
                if out_dtype != dtype:
                    yield replace(self._probe(), dtype=dtype, out_dtype=out_dtype)
        if torch.float32 in self.dtypes:
            yield replace(self._probe(), dtype=torch.float32, tf32=True)
            yield replace(self._probe(), dtype=torch.float32, tf32=True, b="col")

    def probes_of_epilogues(self) -> Iterator[Probe]:
        for text in self.epilogues:
            yield replace(self._probe(), epilogue=_known(text))
        m, n, k = (max(1, size - 3) for size in self._size())
        for text in ("silu", "swiglu"):
            yield replace(self._probe(), m=m, n=n, k=k, epilogue=_known(text))
            yield replace(self._probe(), b="col", epilogue=_known(text))

    def probes_of_terms(self) -> Iterator[Probe]:
        """Bias, residual and alpha: one by one, then together with an epilogue, where their
        order shows."""
        base = self._probe()
        fp32 = torch.float32
        terms: dict[str, Any]
        for terms in (
            {"alpha": -1.75},
            {"bias": "packed"},
            {"bias": "strided"},
            {"bias": "broadcast"},
            {"bias": "packed", "bias_dtype": fp32},
            {"residual": "row"},
            {"residual": "col"},
            {"residual": "row_unaligned"},
            {"residual": "strided"},
            {"residual": "broadcast_rows"},
            {"residual": "broadcast_cols"},
            {"residual": "broadcast"},
            {"residual": "row", "residual_dtype": fp32},
        ):
            yield replace(base, **terms)
        full = replace(base, bias="packed", residual="row", alpha=0.5)
        m, n, k = (max(1, size - 3) for size in self._size())
        for text in ("silu", "swiglu"):
            yield replace(full, epilogue=_known(text))
            yield replace(full, epilogue=_known(text), m=m, n=n, k=k, out="strided")

    def probes_of_batches(self) -> Iterator[Probe]:
        m, n, k = self._size()
        if self._device().type == "cpu":
            n, k = min(n, 48), min(k, 48)
        base = Probe(m=m, n=n, k=k, dtype=self.dtypes[0], batch=3)
        yield base
        yield replace(base, m=max(1, m - 3), n=max(1, n - 3), k=max(1, k - 3))
        yield replace(base, a="col", b="col")
        yield replace(base, stack_a="broadcast")
        yield replace(base, stack_b="broadcast")
        yield replace(base, stack_a="interleaved", stack_b="interleaved")
        yield replace(base, a="row_unaligned", b="strided", out="row_padded")
        yield replace(base, a="broadcast", stack_a="broadcast", out="col")
        terms = replace(base, bias="packed", residual="row", alpha=0.5, epilogue=_known("silu"))
        yield terms
        yield replace(terms, stack_residual="broadcast", epilogue=_known("swiglu"))

    def probes_of_empties(self) -> Iterator[Probe]:
        base = self._probe()
        yield replace(base, m=0)
        yield replace(base, n=0)
        yield replace(base, k=0)
        yield replace(base, m=0, k=0)
        yield replace(base, batch=0)
        yield replace(base, k=0, bias="packed", epilogue=_known("sigmoid"))

    def probes_of_allocation(self) -> Iterator[Probe]:
        base = self._probe()
        yield base
        yield replace(base, a="col", b="col")
        yield replace(base, out_dtype=torch.float32)
        yield replace(base, n=max(1, base.n - 3), epilogue=_known("swiglu"))
        yield replace(base, batch=2, n=min(base.n, 48), k=min(base.k, 48))

    def probes_of_other_operands(self) -> Iterator[Probe]:
        base = self._probe()
        for layout in ("row_padded", "row_unaligned", "strided"):
            yield replace(base, a=layout, b=layout, out=layout)
        yield replace(base, a="col_padded", b="col_padded", bias="strided", residual="row_padded")
        yield replace(base, batch=2, k=min(base.k, 48), a="row_padded", b="row_padded")

    # -- the kernel as a plugin --------------------------------------------------------

    def test_registers(self) -> None:
        """The registry takes it, under its name."""
        kernel = self.kernel

        class Plugin:
            @hookimpl
            def tmm_kernels(self) -> list[Kernel[Any]]:
                return [kernel]

        registry = Registry()
        registry.register(Plugin())
        assert registry.kernel(kernel.name) is kernel

    def test_version_is_stable(self) -> None:
        """Two computations of it agree: a record made by one rank has to serve another."""
        again = copy.copy(self.kernel)
        again.__dict__.pop("version", None)
        assert isinstance(self.kernel.version, str)
        assert self.kernel.version
        assert again.version == self.kernel.version, "its version changes by itself"

    def test_serves_something(self) -> None:
        """Declining is allowed; declining everything tests nothing."""
        reasons: collections.Counter[str] = collections.Counter()
        for probe in (*self.probes_of_sizes(), *self.probes_of_layouts(), *self.probes_of_terms()):
            against = self.kernel.reasons_against(probe.pose(self._device()).problem)
            if not against:
                return
            reasons.update(against)
        said = "; ".join(reason for reason, _ in reasons.most_common(5))
        pytest.fail(
            f"{self.kernel.name} declines every problem of the suite on {self._device()}: {said}. "
            "Set sizes, size and dtypes to what it is for."
        )

    def test_reasons_are_strings_and_never_raise(self) -> None:
        """Also for what nobody would ask: any dtype, size, device and epilogue."""
        for problem in _odd_problems(fingerprint(self._device())):
            try:
                reasons = self.kernel.reasons_against(problem)
                again = self.kernel.reasons_against(problem)
            except Exception as error:
                pytest.fail(f"reasons_against raised {error!r} for {problem!r}")
            assert isinstance(reasons, list), f"{reasons!r} is no list, for {problem!r}"
            assert all(isinstance(r, str) and r for r in reasons), f"{reasons!r} for {problem!r}"
            assert again == reasons, f"two answers for {problem!r}: {reasons}, then {again}"

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.int8, torch.int32, torch.complex64],
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )
    def test_other_dtypes_are_declined_or_right(self, dtype: torch.dtype) -> None:
        self._hold(replace(self._probe(), dtype=dtype))

    # -- the numbers -------------------------------------------------------------------

    def test_sizes(self, probe: Probe) -> None:
        self._hold(probe)

    def test_layouts(self, probe: Probe) -> None:
        """Any strides of operands and output, unaligned, broadcast and overlapping too."""
        self._hold(probe)

    def test_dtypes(self, probe: Probe) -> None:
        """Outputs wider and narrower than the operands, and TF32."""
        self._hold(probe)

    def test_epilogues(self, probe: Probe) -> None:
        self._hold(probe)

    def test_terms(self, probe: Probe) -> None:
        self._hold(probe)

    def test_batches(self, probe: Probe) -> None:
        self._hold(probe)

    def test_empties(self, probe: Probe) -> None:
        """Nothing to compute, or nothing to sum: zero goes through bias and epilogue."""
        self._hold(probe)

    def test_allocation(self, probe: Probe) -> None:
        """Without ``out=`` the launcher makes a contiguous tensor, another one each time."""
        posed = self._posed(probe, allocating=True)
        launcher = self._bind(posed.allocating)
        one, two = posed.launch(launcher, None), posed.launch(launcher, None)
        expected = posed.out.tensor
        assert (one.shape, one.dtype, one.device) == (
            expected.shape,
            expected.dtype,
            expected.device,
        )
        assert one.is_contiguous(), f"it made a tensor of strides {one.stride()}"
        assert one.data_ptr() != two.data_ptr(), "two calls returned the same memory"
        for result in (one, two):
            self._blame(posed, posed.allocating, list(posed.differences(result, self.slack)))

    # -- its configs -------------------------------------------------------------------

    def test_configs(self) -> None:
        """Each of the search space is right."""
        posed = self._demanding()
        problem = posed.problem
        wrong = []
        for config, launcher in self._bound(problem, self._configs(problem)):
            wrong += [f"{config}: {fault}" for fault in posed.faults(launcher, self.slack)]
        self._blame(posed, problem, wrong)

    def test_configs_are_well_formed(self) -> None:
        """Hashable, equal to what they were before a trip through JSON, which is how a record
        keeps them, and closed to fields they do not have."""
        problem = self._demanding().problem
        kernel = self.kernel
        default = kernel.default_config(problem)
        assert default == kernel.default_config(problem), "two calls, two default configs"
        for config in (default, *self._configs(problem)):
            assert type(config) is kernel.config_type, f"{config!r} is no {kernel.config_type}"
            assert hash(config) == hash(copy.copy(config))
            document = config.to_json()
            read = kernel.config_type.from_json(json.loads(json.dumps(document)))
            assert read == config, f"{config!r} came back as {read!r}"
            with pytest.raises(ConfigError):
                kernel.config_type.from_json({**document, "no_such_field": 1})

    def test_estimates(self) -> None:
        """Time and scratch memory are positive numbers, or not known and none."""
        problem = self._demanding().problem
        for config in (self.kernel.default_config(problem), *self._configs(problem)):
            time = self.kernel.estimate_us(problem, config)
            assert time is None or (math.isfinite(time) and time > 0), f"{config}: {time} µs"
            scratch = self.kernel.workspace_bytes(problem, config)
            assert type(scratch) is int, f"{config}: {scratch!r} is no whole number of bytes"
            assert scratch >= 0, f"{config}: {scratch} bytes"
            assert scratch == 0 or self.kernel.traits.needs_workspace, (
                f"{config} has {scratch} bytes of workspace, its traits say needs_workspace=False"
            )

    # -- what its traits claim ---------------------------------------------------------

    def test_deterministic(self) -> None:
        """The same bits, run after run, of each config."""
        if not self.kernel.traits.deterministic:
            pytest.skip("claims no determinism")
        posed = self._fine_grained()
        problem = posed.problem
        configs = [self.kernel.default_config(problem), *self._configs(problem)]
        for config, launcher in self._bound(problem, configs):
            first = posed.launch(launcher, posed.out.tensor).clone()
            for run in range(1, REPEATS[self._device().type] + 1):
                again = posed.launch(launcher, posed.out.tensor)
                differ = int((first != again).sum())
                assert not differ, (
                    f"{self.kernel.name} claims determinism; run {run} of {config} differs from "
                    f"the first in {differ} of {first.numel()} elements, for {problem}"
                )

    def test_batch_invariant(self) -> None:
        """Of one config, the bits of a row do not depend on how many rows there are."""
        if not self.kernel.traits.batch_invariant:
            pytest.skip("claims no batch invariance")
        posed = self._fine_grained()
        whole, m = posed.problem, posed.probe.m
        rows = [(0, 1), (0, 2), (0, 17), (0, m - 1)]
        if self._device().type == "cuda":
            # What interprets tl.dot on a CPU rounds a row by where in the tile it is.
            rows += [(m - 1, m), (m // 2, m)]
        configs = [self.kernel.default_config(whole), *self._configs(whole)[:2]]
        for config, whole_launcher in self._bound(whole, configs):
            full = posed.launch(whole_launcher, posed.out.tensor).clone()
            for first, last in rows:
                some = slice(first, min(last, m))
                a, b, out = posed.inputs.a[some], posed.inputs.b, posed.out.tensor[some]
                part = Problem.of(a, b, out, whole.device)
                if not out.shape[0] or self.kernel.reasons_against(part):
                    continue
                launcher = self.kernel.bind(part, config)
                differ = int((launcher(a, b, None, None, 1.0, out) != full[some]).sum())
                assert not differ, (
                    f"{self.kernel.name} claims batch invariance; with {config} rows {first} to "
                    f"{last} of {m} differ in {differ} elements when computed by themselves"
                )

    # -- launchers ---------------------------------------------------------------------

    def test_other_operands(self, probe: Probe) -> None:
        """One launcher serves all operands of its problem, whose addresses and leading
        strides differ."""
        first, second = (replace(probe, spread=spread).pose(self._device()) for spread in (1, 2))
        assert first.problem == second.problem
        self._decline(first.problem)
        launcher = self._bind(first.problem)
        for posed in (first, second, first):
            self._blame(posed, posed.problem, posed.faults(launcher, self.slack))

    def test_alpha_is_read_at_every_call(self) -> None:
        probe = replace(self._probe(), alpha=0.5)
        first, second = (replace(probe, alpha=alpha).pose(self._device()) for alpha in (0.5, -3.0))
        assert first.problem == second.problem
        self._decline(first.problem)
        launcher = self._bind(first.problem)
        for posed in (first, second):
            self._blame(posed, posed.problem, posed.faults(launcher, self.slack))

    def test_launchers_share_nothing(self) -> None:
        """Two launchers of one problem, called in turn."""
        first = self._posed(self._probe())
        second = replace(self._probe(), spread=2).pose(self._device())
        one, two = self._bind(first.problem), self._bind(first.problem)
        for posed, launcher in ((first, one), (second, two), (second, one), (first, two)):
            self._blame(posed, posed.problem, posed.faults(launcher, self.slack))

    def test_current_stream(self) -> None:
        """It launches behind what the current stream has queued, and waits for nothing."""
        posed = self._posed_on_gpu()
        launcher = self._bind(posed.problem)
        a, out = posed.inputs.a, posed.out.tensor
        posed.launch(launcher, out)  # loads what is loaded at the first launch
        values = a.clone()
        a.fill_(math.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            a.copy_(values)
            posed.launch(launcher, out)
            waited = stream.query()
        stream.synchronize()
        assert not waited, f"{self.kernel.name} waits for the GPU when launched"
        self._blame(posed, posed.problem, list(posed.differences(out, self.slack)))

    def test_graph_capture(self) -> None:
        """Bound, it can be captured without a launch before, and the graph replays on what
        its operands then hold."""
        if not self.kernel.traits.capture_safe:
            pytest.skip("claims no safety under graph capture")
        posed = self._posed_on_gpu()
        launcher, allocating = self._bind(posed.problem), self._bind(posed.allocating)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            posed.launch(launcher, posed.out.tensor)
            made = posed.launch(allocating, None)
        for factor in (1.0, -0.5):
            posed.inputs.a.mul_(factor)
            posed.out.tensor.fill_(math.nan)
            graph.replay()
            for result in (posed.out.tensor, made):
                self._blame(posed, posed.problem, list(posed.differences(result, self.slack)))

    # -- how it is asked ---------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Hand each test its probes; they depend on the subclass's attributes."""
        if "probe" in metafunc.fixturenames:
            name = metafunc.function.__name__.removeprefix("test_")
            probes = list(getattr(self, f"probes_of_{name}")())
            metafunc.parametrize("probe", probes, ids=str)

    @pytest.fixture(autouse=True)
    def _compiled_ahead(self, request: pytest.FixtureRequest) -> None:
        """On a GPU, compile for all of this class's probes at once, on all cores: one by one
        a hundred kernels take minutes. What fails will fail again where it is asked."""
        cls = type(self)
        if "_compiled" in vars(cls) or self._device().type != "cuda":
            return
        cls._compiled = True  # type: ignore[attr-defined]
        calls = [getattr(i, "callspec", None) for i in request.session.items if _is_of(i, cls)]
        probes = [call.params["probe"] for call in calls if call and "probe" in call.params]

        def attempt(probe: Probe) -> None:
            problem = probe.pose(self._device()).problem
            if not self.kernel.reasons_against(problem):
                self._bind(problem)

        with futures.ThreadPoolExecutor() as pool:
            futures.wait([pool.submit(attempt, probe) for probe in dict.fromkeys(probes)])

    @classmethod
    def _device(cls) -> torch.device:
        kind = cls.device
        if kind is None:
            kind = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
        if kind == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(kind)

    @classmethod
    def _size(cls) -> tuple[int, int, int]:
        return cls.size or SIZE[cls._device().type]

    @classmethod
    def _probe(cls) -> Probe:
        m, n, k = cls._size()
        return Probe(m=m, n=n, k=k, dtype=cls.dtypes[0])

    def _decline(self, problem: Problem) -> None:
        if reasons := self.kernel.reasons_against(problem):
            pytest.skip("; ".join(reasons))

    def _posed(self, probe: Probe, allocating: bool = False) -> Posed:
        """The probe's tensors; skips where the kernel declines the problem."""
        posed = probe.pose(self._device())
        self._decline(posed.allocating if allocating else posed.problem)
        return posed

    def _posed_on_gpu(self) -> Posed:
        if self._device().type != "cuda":
            pytest.skip("streams and graphs are CUDA's")
        return self._posed(self._probe())

    def _bind(self, problem: Problem) -> Launcher:
        return self.kernel.bind(problem, self.kernel.default_config(problem))

    def _bound(self, problem: Problem, configs: Sequence[Config]) -> list[tuple[Config, Launcher]]:
        """Launchers of different configs, compiled at once on all cores."""
        configs = list(dict.fromkeys(configs))
        with futures.ThreadPoolExecutor() as pool:
            launchers = pool.map(lambda config: self.kernel.bind(problem, config), configs)
            return list(zip(configs, launchers, strict=True))

    def _hold(self, probe: Probe) -> None:
        posed = self._posed(probe)
        self._blame(posed, posed.problem, posed.faults(self._bind(posed.problem), self.slack))

    def _blame(self, posed: Posed, problem: Problem, faults: Sequence[str]) -> None:
        if faults:
            what = f"{self.kernel.name} is wrong on {problem} ({posed.probe}):"
            pytest.fail("\n".join([what, *faults]), pytrace=False)

    def _first_served(self, probes: Sequence[Probe]) -> Posed:
        """The first of these that the kernel does not decline."""
        reasons: list[str] = []
        for probe in probes:
            posed = probe.pose(self._device())
            if not (reasons := self.kernel.reasons_against(posed.problem)):
                return posed
        pytest.skip("; ".join(reasons))

    def _long(self) -> Probe:
        """K long enough to be split, M off its blocks."""
        base = self._probe()
        longer = 8 if self._device().type == "cuda" else 4
        return replace(base, m=max(1, base.m - 5), k=longer * base.k)

    def _demanding(self) -> Posed:
        """A problem that shows a config's mistakes: with all terms, where it takes them."""
        plain = self._long()
        full = replace(plain, bias="packed", residual="row", epilogue=_known("silu"))
        return self._first_served([full, plain, self._probe()])

    def _fine_grained(self) -> Posed:
        """One whose result is not rounded to 16 bits, which would hide a difference."""
        plain = self._long()
        wide = replace(plain, out_dtype=torch.float32)
        fp32 = replace(plain, dtype=torch.float32)
        probes = [wide, fp32] if torch.float32 in self.dtypes else [wide]
        return self._first_served([*probes, plain, self._probe()])

    def _configs(self, problem: Problem) -> list[Config]:
        configs = list(self.kernel.configs(problem))
        limit = self.max_configs or (64 if problem.device.type == "cuda" else 8)
        step = max(1, -(-len(configs) // limit))
        return configs[::step]


def _known(text: EpilogueLike) -> Epilogue:
    return parse(text)


def _is_of(item: Any, cls: type) -> bool:
    return getattr(item, "cls", None) is cls


def _odd_problems(device: DeviceFingerprint) -> Iterator[Problem]:
    """Problems that nothing but ``reasons_against`` should ever see."""
    half = Operand(torch.float16)
    plain = Problem(m=64, n=64, k=64, a=half, b=half, out=half, device=device)
    yield plain
    dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    for dtype in dtypes:
        odd = Operand(dtype)
        yield replace(plain, a=odd, b=odd, out=odd)
        yield replace(plain, a=odd)
        yield replace(plain, b=odd)
        yield replace(plain, out=odd)
        yield replace(plain, bias=dtype, residual=odd)
    for size in (0, 1, 2**31 - 1, 2**31, 2**40):
        for field in ("m", "n", "k", "batch"):
            yield replace(plain, **{field: size})  # type: ignore[arg-type]
    for layout in ("row", "col", "strided"):
        for aligned in (True, False):
            for wide in (True, False):
                matrix = Operand(torch.float16, layout, aligned, wide)
                for name in ("a", "b", "out", "residual"):
                    yield replace(plain, **{name: matrix})  # type: ignore[arg-type]
    for epilogue in (*BUILTIN.values(), USERS, UNFUSABLE):
        yield replace(plain, epilogue=epilogue, bias=torch.float16, scaled=True)
    for flag in ("deterministic", "batch_invariant", "capturing", "tf32", "scaled"):
        yield replace(plain, **{flag: True})  # type: ignore[arg-type]
    gpu = DeviceFingerprint(
        type="cuda", name="GPU", capability=(9, 0), sm_count=132, shared_memory=232448, l2=2**25
    )
    for changes in (
        {"capability": (7, 5), "sm_count": 40, "shared_memory": 65536},
        {},
        {"capability": (12, 1), "sm_count": 48, "shared_memory": 101376},
        {"name": "AMD Instinct MI300X", "capability": (9, 4), "sm_count": 304, "cuda": "hip-6.2"},
        {"type": "cpu", "name": "cpu"},
        {"type": "mps", "name": "mps"},
        {"type": "meta", "name": "meta"},
    ):
        elsewhere = dataclasses.replace(gpu, **changes)
        yield replace(plain, device=elsewhere)
        yield replace(plain, device=elsewhere, a=Operand(torch.float8_e4m3fn), m=1)
