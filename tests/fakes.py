"""A fake kernel, timer and device, without a GPU or Triton."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace as revised
from tmm_blas.blas import Blas
from tmm_cache import CacheStore, TuningRecord

from tmm_core import Config, Kernel, Launcher, Problem, Traits, errors, hookimpl
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.epilogues import BUILTIN
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings
from tmm_core.spec.code import version_of
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.epilogue import INTERNED
from tmm_core.spec.launcher import Bound
from tmm_core.spec.operand import Operand, Scale
from tmm_core.spec.steps import drained
from tmm_core.tuning import tuner
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.search import NO_HINTS, Hints, Search
from tmm_core.tuning.untried import Untried

DEVICE = DeviceFingerprint(
    type="cpu", name="Fake H200", capability=(9, 0), sm_count=132, torch="2", triton="3"
)

#: The operations of verification on 8-bit floats, except views. A GPU lacks others.
ON_8_BIT_FLOATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_to_copy": lambda t: t.float(),
    "to": lambda t: t.to(torch.float64),
    "clone": lambda t: t.mT.clone(),
    "copy_": lambda t: torch.empty_like(t).copy_(t.mT),
    "fill_": lambda t: t.fill_(torch.nan),
    "index": lambda t: t[torch.tensor([1, 0], device=t.device)],
}


def problem(m: int = 64, n: int = 32, k: int = 16, **fields: Any) -> Problem:
    operand = Operand(torch.float32)
    fields = {"a": operand, "b": operand, "out": operand, "device": DEVICE, **fields}
    return with_scales(Problem(m=m, n=n, k=k, **without_scales(fields)), fields)


def without_scales(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "scales"}


def with_scales(problem: Problem, fields: dict[str, Any]) -> Problem:
    """The problem whose operands have scales of the kinds ``fields["scales"]``, a's and b's."""
    if "scales" not in fields:
        return problem
    of_a, of_b = (None if kind is None else Scale.parse(kind) for kind in fields["scales"])
    return replace(problem, a=replace(problem.a, scale=of_a), b=replace(problem.b, scale=of_b))


@dataclass(frozen=True, kw_only=True)
class FakeConfig(Config):
    tile: int = 1

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise ValueError(f"tile must be positive, got {self.tile}")


DEFAULT = Traits()


class FakeKernel(Kernel[FakeConfig]):
    """torch's own result, changed as a test says."""

    config_type = FakeConfig
    supports = Blas.supports

    def __init__(
        self,
        name: str,
        *,
        version: str = "1",
        traits: Traits = DEFAULT,
        tiles: Sequence[int] = (1,),
        against: Callable[[Problem], list[str]] = lambda problem: [],
        spoil: Callable[[torch.Tensor], torch.Tensor] = lambda out: out,
        bind_error: Exception | None = None,
        estimate: float | None = None,
        workspace: int = 0,
    ) -> None:
        self.name = name  # type: ignore[misc]  # a class variable on real kernels
        self.__dict__["version"] = version
        self.traits = traits  # type: ignore[misc]
        self.tiles, self.against, self.spoil = tiles, against, spoil
        self.bind_error, self.estimate, self.workspace = bind_error, estimate, workspace
        self.bound: list[Problem] = []

    def declines(self, problem: Problem) -> list[str]:
        return self.against(problem)

    def configs(self, problem: Problem) -> Iterable[FakeConfig]:
        return [FakeConfig(tile=tile) for tile in self.tiles]

    def default_config(self, problem: Problem) -> FakeConfig:
        return FakeConfig(tile=self.tiles[0])

    def bind(self, problem: Problem, config: FakeConfig) -> Launcher:
        self.bound.append(problem)
        if self.bind_error is not None:
            raise self.bind_error
        right = Blas().bind(problem, Blas.config_type())

        def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            result = self.spoil(right(a, b, bias, residual, alpha, None))
            return result if out is None else out.copy_(result)

        launch.cost = (self.name, config.to_json().get("tile", 1))  # type: ignore[attr-defined]
        return launch

    def estimate_us(self, problem: Problem, config: FakeConfig) -> float | None:
        return self.estimate

    def workspace_bytes(self, problem: Problem, config: FakeConfig) -> int:
        return self.workspace


class Faulty(FakeKernel):
    """A correct kernel with a ``fault``, a function of the correct launcher and the arguments of a
    call: a, b, bias, residual, alpha, out."""

    def __init__(self, fault: Callable[..., Any], name: str = "faulty", **fields: Any) -> None:
        super().__init__(name, **fields)
        self.fault = fault

    def bind(self, problem: Problem, config: FakeConfig) -> Launcher:
        right = super().bind(problem, config)

        def launch(*arguments: Any) -> Any:
            return self.fault(right, *arguments)

        launch.cost = right.cost  # type: ignore[attr-defined]
        return launch


class Idle(FakeKernel):
    """The fastest of all: it leaves the first ``rows`` rows of ``out`` as they were, and by default
    all of them."""

    rows: int | None = None

    def bind(self, problem: Problem, config: FakeConfig) -> Launcher:
        right: Any = super().bind(problem, config)

        def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            if out is None:
                return right(a, b, bias, residual, alpha, None)
            if self.rows is not None:
                out[self.rows :] = right(a, b, bias, residual, alpha, None)[self.rows :]
            return out

        launch.cost = right.cost  # type: ignore[attr-defined]
        return launch


class FakeBlas(FakeKernel):
    """Stands in for BLAS, the baseline that serves every problem."""

    def __init__(self, **fields: Any) -> None:
        super().__init__("blas", **fields)


class FakeTimer:
    """Returns a given time for each (kernel, tile), at one M or at all, and counts its calls."""

    def __init__(self, times: dict[Any, float]) -> None:
        self.times = times
        self.measured: list[str] = []

    def measure(self, runs: Sequence[Any], rounds: int, **chain: Any) -> list[list[float]]:
        samples = []
        for run in runs:
            name, tile = Bound.of(run.launcher).run.cost  # type: ignore[attr-defined]
            m = run.inputs[0].a.shape[-2]
            self.measured.append(name)
            known = [key for key in ((name, tile, m), (name, tile), name) if key in self.times]
            samples.append([self.times[known[0]] if known else 100.0] * rounds)
        return samples

    def measure_steps(self, runs: Sequence[Any], rounds: int, **chain: Any) -> Any:
        yield from ()
        return self.measure(runs, rounds, **chain)

    def release(self) -> None:
        """Nothing is held."""


def searched(
    problem: Problem,
    kernels: Sequence[Any],
    new: Sequence[Any],
    before: TuningRecord | None = None,
    hints: Hints = NO_HINTS,
    **options: Any,
) -> Search:
    """A search whose kernels were queried."""
    search = Search(problem, new, hints)
    drained(search.query(kernels, before, **options))
    return search


class _Notes(Untried):
    """Notes that no store has: the kernels to leave untried, and those to try again."""

    def __init__(self, left: Any) -> None:
        self._left = left

    def left(self, key: Problem) -> Any:
        return self._left


def unmeasured(
    problem: Problem,
    kernels: Sequence[Any],
    record: TuningRecord | None,
    left: Any = ((), ()),
    **options: Any,
) -> list[Any]:
    """The kernels that a tuning would time, if these were left untried."""
    return _Notes(left).missing(problem, kernels, record, **options)


class Tuner(tuner.Tuner):
    """A tuner whose steps may be taken at once, and that times the kernels that a record lacks."""

    def steps(
        self,
        problem: Problem,
        kernels: Sequence[Any],
        settings: Any,
        before: TuningRecord | None = None,
        *,
        new: Sequence[Any] | None = None,
        findings: Findings | None = None,
        **options: Any,
    ) -> Any:
        new = unmeasured(problem, kernels, before) if new is None else new
        given = {**options, "new": new, "findings": findings or Findings()}
        return super().steps(problem, kernels, settings, before, **given)

    def tune(self, *arguments: Any, **options: Any) -> TuningRecord:
        return drained(self.steps(*arguments, **options))


def install(site: Path, name: str, source: str) -> None:
    """A plugin as a distribution in ``site``, by an entry point to its ``hooks``."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tmm_core]\n{name} = {name}_plugin:hooks\n")
    (site / f"{name}_plugin.py").write_text(source)


@contextlib.contextmanager
def imported(site: Path, name: str, source: str) -> Iterator[Any]:
    """The module of a plugin that is installed in ``site``, while it can be imported."""
    install(site, name, source)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(f"{name}_plugin")
        for thing in list(vars(module).values()):
            if isinstance(thing, type) and thing.__module__ == module.__name__:
                _register(thing)
            elif isinstance(thing, FakeKernel):
                registered(thing)
        yield module
    finally:
        sys.path.remove(str(site))
        del sys.modules[f"{name}_plugin"]


def registered(kernel: Any) -> Any:
    """A kernel, with the version that it has where it is registered."""
    kernel.__dict__["version"] = version_of(kernel, kernel.version)
    return kernel


def _register(kind: Any) -> None:
    """Give the kernels of a class the version that they have if they are registered, as in a
    process that finds them by entry point."""
    if not issubclass(kind, FakeKernel):
        return
    made = kind.__init__

    def make(self: Any, *arguments: Any, **fields: Any) -> None:
        made(self, *arguments, **fields)
        registered(self)

    kind.__init__ = make  # type: ignore[method-assign]


def plugin(*kernels: Kernel[Any], epilogues: Sequence[Any] = ()) -> object:
    class Plugin:
        @hookimpl
        def tmm_kernels(self) -> list[Kernel[Any]]:
            return list(kernels)

        @hookimpl
        def tmm_epilogues(self) -> list[Any]:
            return list(epilogues)

    return Plugin()


def dispatcher(
    *kernels: Kernel[Any], times: dict[Any, float] | None = None, root: Any = None
) -> tuple[Dispatcher, FakeTimer]:
    """A dispatcher over these kernels and a fake timer, as in a new process."""
    errors._faults.clear()
    registry = Registry()
    registry.register(plugin(*kernels), "fakes")
    timer = FakeTimer(times or {})
    return Dispatcher(registry, Tuner(timer), CacheStore(root)), timer


def settings(**fields: Any) -> Settings:
    return replace(Settings(progress=False), **fields)


def register(*kernels: Kernel[Any]) -> None:
    """Add kernels to those that the process's own calls choose from."""
    from tmm_core import dispatch

    dispatch.default_dispatcher().registry.register(plugin(*kernels), "fakes")


def installed(*kernels: Kernel[Any]) -> None:
    """Make these the kernels that the process's own calls choose from."""
    from tmm_core import dispatch
    from tmm_core.launch import warm

    dispatch.default_dispatcher.made, _ = dispatcher(*kernels)
    warm.forget_plans()


def tuned_with_steady_times(problem: Problem, steady_us: dict[str, float]) -> None:
    """Tune a problem, and give the kernels on its record these times in steady state."""
    import tmm_core

    tmm_core.tune(problem)
    host = tmm_core.dispatch.default_dispatcher()
    key, record = host.record(problem)  # type: ignore[misc]
    timed = [revised(each, steady_us=steady_us[each.kernel]) for each in record.candidates]
    changed = revised(record, candidates=tuple(timed))
    host.store.save(key.device.gpu, key.device.environment, changed)


def forget_interned() -> None:
    """Forget the epilogues that this process has interned, as a new process does not know them."""
    for text in INTERNED.keys() - BUILTIN.keys():
        del INTERNED[text]
