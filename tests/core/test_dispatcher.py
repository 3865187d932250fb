"""Each way in which the dispatcher chooses a kernel, with fakes and no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, problem, settings
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, CacheWarning
from tmm_cache.cli import main as tmm_cache_main

from tmm_core import (
    CacheMissError,
    Config,
    ConfigError,
    PluginError,
    Problem,
    TmmWarning,
    Traits,
    UnknownNameError,
    UnsupportedProblemError,
)
from tmm_core.dispatch.explanation import explain_problem
from tmm_core.spec.bucket import bucket_edge
from tmm_core.verify.environment_faults import BUDGET_ENDED

FAST = {"fast": 10.0, "blas": 20.0}


def test_a_forced_kernel_is_taken_even_when_slower() -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("slow"), times={"slow": 50.0, "blas": 20.0})
    choice = d.choose(problem(), settings(kernel="slow"))
    assert (choice.candidate.kernel.name, choice.origin) == ("slow", "forced")
    assert timer.measured == []


def test_a_forced_config_is_parsed_and_bounded() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast", tiles=(1, 2)))
    choice = d.choose(problem(), settings(kernel="fast", config='{"tile": 2}'))
    assert choice.candidate.config.to_json() == {"tile": 2}
    for bad, message in (
        ('{"tile": 0}', "positive"),
        ('{"tiel": 1}', "tiel"),
        ('{"tile": "1"}', "int"),
    ):
        with pytest.raises(ConfigError, match=message):
            d.choose(problem(), settings(kernel="fast", config=bad))


@dataclass(frozen=True, kw_only=True)
class TwoFields(Config):
    tile: int
    stages: int

    def __post_init__(self) -> None:
        if self.tile < 1 or self.stages < 1:
            raise ValueError(f"tile {self.tile}, stages {self.stages}")


class WithTwo(FakeKernel):
    config_type = TwoFields  # type: ignore[assignment]

    def default_config(self, problem: Any) -> Any:
        return TwoFields(tile=problem.m, stages=3)


def test_omitted_fields_of_a_forced_config_are_the_defaults() -> None:
    d, _ = dispatcher(FakeBlas(), WithTwo("two"))

    def config(text: str) -> dict[str, Any]:
        return d.choose(problem(), settings(kernel="two", config=text)).candidate.config.to_json()

    assert config('{"stages": 5}') == {"tile": 64, "stages": 5}
    assert config('{"tile": 2}') == {"tile": 2, "stages": 3}
    assert config("{}") == {"tile": 64, "stages": 3}
    assert config('{"tile": 2, "stages": 1}') == {"tile": 2, "stages": 1}
    for bad, message in (
        ('{"stages": 0}', "stages 0"),
        ('{"tile": 2, "stages": 0}', "stages 0"),
        ('{"stage": 5}', "unknown"),
        ('{"stages": "5"}', "must be int"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(bad)


def test_a_forced_kernel_that_declines_raises_with_its_reasons() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("odd", against=lambda p: ["m is even", "n too"]))
    with pytest.raises(UnsupportedProblemError, match=r"'odd'.*m is even; n too"):
        d.choose(problem(), settings(kernel="odd"))
    with pytest.raises(UnknownNameError, match="did you mean 'odd'"):
        d.choose(problem(), settings(kernel="od"))


def test_a_forced_launcher_that_does_not_take_its_arguments_is_named() -> None:
    class Refusing(FakeKernel):
        def bind(self, problem: Problem, config: Any) -> Any:
            return lambda a, b: a @ b

    d, _ = dispatcher(FakeBlas(), Refusing("refusing"))
    with pytest.raises(PluginError, match=r"kernel refusing raised TypeError: .*takes 2 p"):
        d.bound(problem(), settings(kernel="refusing"))


def test_a_forced_kernel_takes_its_best_config_on_record() -> None:
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("fast", tiles=(1, 2)), times={("fast", 1): 15, ("fast", 2): 11}
    )
    d.tune(problem(), settings())
    choice = d.choose(problem(), settings(kernel="fast"))
    assert choice.candidate.config.to_json() == {"tile": 2}


def test_a_forced_kernel_takes_a_config_that_raced_to_the_end(tmp_path: Path) -> None:
    """Times of first rounds are too low, since the GPU's clock has not settled yet."""
    times = {("fast", 1): 15.0, ("fast", 2): 14.0, "blas": 12.0}  # the winner is neither
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast", tiles=(1, 2)), times=times, root=tmp_path)
    record = d.tune(problem(), settings())
    found = [
        revised(each, samples_us=(11.0,), status="ok")
        if (each.kernel, each.config) == ("fast", {"tile": 1})
        else each
        for each in record.candidates
    ]
    d.store.save(DEVICE.gpu, DEVICE.environment, revised(record, candidates=tuple(found)))
    choice = d.choose(problem(), settings(kernel="fast"))
    assert choice.candidate.config.to_json() == {"tile": 2}


def test_a_miss_tunes_once_and_a_new_process_replays(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    first = d.choose(problem(), settings())
    assert (first.candidate.kernel.name, first.origin) == ("fast", "tuned")
    assert "fast" in timer.measured

    again, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    second = again.choose(problem(), settings())
    assert (second.candidate.kernel.name, second.origin) == ("fast", "cache")
    assert timer.measured == []
    assert str(tmp_path) in second.reason


def test_candidates_that_a_budget_left_out_are_timed_by_tune_alone(tmp_path: Path) -> None:
    """A call does not time them: it would wait for them in every process."""
    kernels = FakeBlas(), FakeKernel("fast", tiles=(1, 2))
    d, _ = dispatcher(*kernels, times=FAST, root=tmp_path)
    whole = d.tune(problem(), settings())
    blas, *others = whole.candidates
    left_out = [
        revised(each, status="failed", samples_us=(), inside_us={}, reason=BUDGET_ENDED)
        for each in others
    ]
    store = CacheStore(tmp_path)

    def leave(*results: Any) -> None:
        store.save(DEVICE.gpu, DEVICE.environment, revised(whole, winner=0, candidates=results))

    leave(blas, *left_out)
    d, timer = dispatcher(*kernels, times=FAST, root=tmp_path)
    assert d.choose(problem(), settings()).candidate.kernel.name == "blas"
    assert not timer.measured
    assert d.tune(problem(), settings()).best.kernel == "fast"
    assert timer.measured
    # A measurement of one config of two is enough.
    leave(blas, others[0], *left_out[1:])
    d, timer = dispatcher(*kernels, times=FAST, root=tmp_path)
    d.tune(problem(), settings())
    assert not timer.measured


def test_blas_wins_without_a_margin() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("close"), times={"close": 19.9, "blas": 20.0})
    assert d.choose(problem(), settings()).candidate.kernel.name == "blas"


def test_the_record_of_a_bucket_serves_all_of_it(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    for m in range(4097, 5121, 64):
        choice = d.choose(problem(m=m), settings())
        assert choice.candidate.kernel.name == "fast"
    assert len(list(tmp_path.rglob("*.json"))) == 2  # one record, environment.json
    assert timer.measured.count("fast") == 1 + 1 + 4  # screening, the race, four M inside


def test_a_record_of_the_exact_m_has_priority_over_the_buckets(tmp_path: Path) -> None:
    times: dict[Any, float] = {"fast": 10.0, "blas": 20.0}
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    d.tune(problem(m=5120), settings())
    timer.times = {"fast": 40.0, "blas": 20.0}
    d.tune(problem(m=4500), settings())
    assert d.choose(problem(m=4500), settings()).candidate.kernel.name == "blas"
    assert d.choose(problem(m=4501), settings()).candidate.kernel.name == "fast"


EDGE = {"blas": 52.0, ("tiled", 1): 50.0, ("tiled", 2): 51.0}


def tall(m: int, **fields: Any) -> Any:
    """A problem of many rows with small N and K, which keeps verification cheap."""
    return problem(m=m, n=4, k=2, **fields)


@pytest.mark.parametrize(
    ("inside", "m", "wanted"),
    [
        ({}, 5120, ("tiled", 1)),  # at the edge
        ({}, 4700, ("tiled", 1)),  # ahead at every M that was measured
        ({("blas", 1, 4609): 40.0}, 4700, ("blas", 1)),  # behind at one of the two around
        ({("blas", 1, 4353): 40.0}, 4300, ("blas", 1)),
        ({("blas", 1, 4353): 40.0}, 4200, ("tiled", 1)),  # BLAS alone is timed at 4225, too
        ({("blas", 1, 4225): 40.0}, 4200, ("blas", 1)),
        ({("blas", 1, 4225): 40.0}, 4300, ("blas", 1)),
        ({("blas", 1, 4225): 40.0}, 4353, ("tiled", 1)),
        ({("blas", 1, 4097): 40.0}, 4700, ("tiled", 1)),  # 4097 is not next to 4700
        ({("blas", 1, 4097): 40.0}, 4097, ("blas", 1)),  # behind at exactly this M
        ({("tiled", 2, 4097): 30.0, ("tiled", 2, 4353): 30.0}, 4200, ("tiled", 2)),
        ({("tiled", 2, 4097): 51.5, ("tiled", 1, 4097): 90.0}, 4200, ("blas", 1)),
    ],
)
@pytest.mark.slow(quick=8)
def test_inside_a_bucket_the_nearest_measurements_decide(
    inside: dict[Any, float], m: int, wanted: tuple[str, int]
) -> None:
    kernels = (FakeBlas(), FakeKernel("tiled", tiles=(1, 2)))
    d, _ = dispatcher(*kernels, times={**EDGE, **inside})
    for _ in range(2):  # tuned, then from the record
        choice = d.choose(tall(m), settings())
        found = choice.candidate.kernel.name, choice.candidate.config.to_json().get("tile")
        assert found == wanted
    assert ("BLAS is not beaten" in choice.reason) is (wanted[0] == "blas")
    forced = d.choose(tall(m), settings(kernel="tiled"))
    assert forced.candidate.kernel.name == "tiled"


@pytest.mark.parametrize("tiled", [50.0, 54.0])  # a kernel wins the edge, or BLAS
@pytest.mark.parametrize(
    ("inside", "wanted"),
    [
        ({("blas", 1, 4225): 40.0}, 1),
        ({("blas", 2, 4225): 40.0}, 2),
        ({("blas", 1, 4225): 41.0, ("blas", 2, 4225): 40.0, ("blas", 2, 4097): 60.0}, 1),
    ],
)
@pytest.mark.slow(quick=6)
def test_blas_answers_inside_a_bucket_by_the_config_that_is_fastest_there(
    tiled: float, inside: dict[Any, float], wanted: int
) -> None:
    times = {"blas": 52.0, ("blas", 2): 52.1, ("tiled", 1): tiled, **inside}
    d, _ = dispatcher(FakeBlas(tiles=(1, 2)), FakeKernel("tiled"), times=times)
    for _ in range(2):  # tuned, then from the record
        choice = d.choose(tall(4200), settings())
        assert choice.candidate.kernel.name == "blas"
        assert choice.candidate.config.to_json()["tile"] == wanted


def test_blas_answers_inside_a_bucket_without_measurements() -> None:
    """A record that was edited or cut short has no times inside its bucket."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("tiled"), times=EDGE)
    record = d.tune(tall(5120), settings())
    bare = revised(record, candidates=tuple(revised(c, inside_us={}) for c in record.candidates))
    d.adopt(tall(5120), bare)
    assert d.choose(tall(5120), settings()).candidate.kernel.name == "tiled"
    assert d.choose(tall(5119), settings()).candidate.kernel.name == "blas"


def test_inside_a_bucket_a_missing_kernel_is_passed_over(tmp_path: Path) -> None:
    times = {"blas": 52.0, "tiled": 50.0, "gone": 40.0}
    kernels = FakeBlas(), FakeKernel("tiled")
    d, _ = dispatcher(*kernels, FakeKernel("gone"), times=times, root=tmp_path)
    assert d.choose(tall(4100), settings()).candidate.kernel.name == "gone"
    d, _ = dispatcher(*kernels, times=times, root=tmp_path)
    choice = d.choose(tall(4100), settings())
    assert (choice.origin, choice.candidate.kernel.name) == ("cache", "tiled")


@pytest.mark.slow
def test_a_batch_invariant_choice_does_not_depend_on_m() -> None:
    traits = Traits(batch_invariant=True)
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("tiled", traits=traits),
        times={"tiled": 50.0, "blas": 52.0},
    )  # fmt: skip
    problem = tall(4100, batch_invariant=True)
    assert d.choose(problem, settings(batch_invariant=True)).candidate.kernel.name == "tiled"


def test_a_removed_kernel_gives_way_to_the_next(tmp_path: Path) -> None:
    both = (FakeKernel("fast"), FakeKernel("second"))
    times = {"fast": 10.0, "second": 12.0, "blas": 20.0}
    d, _ = dispatcher(FakeBlas(), *both, times=times, root=tmp_path)
    d.choose(problem(), settings())
    d, timer = dispatcher(FakeBlas(), FakeKernel("second"), times=times, root=tmp_path)
    choice = d.choose(problem(), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("second", "cache")
    assert timer.measured == []


def test_processes_with_other_plugins_or_versions_share_a_record(tmp_path: Path) -> None:
    """Each would otherwise be tuned again after the other, at every start."""

    def chosen(*others: FakeKernel, **times: float) -> tuple[str, str, str]:
        d, _ = dispatcher(FakeBlas(), *others, times={"blas": 10.0, **times}, root=tmp_path)
        choice = d.choose(problem(), settings())
        kernel = choice.candidate.kernel
        return kernel.name, kernel.version[:1], choice.origin

    def versions() -> list[str]:
        record = CacheStore(tmp_path).load(DEVICE.gpu, DEVICE.environment, problem().to_json())
        assert record is not None
        return [c.version[:1] for c in record.candidates if c.kernel == "one"]

    assert chosen(FakeKernel("one"), one=5.0) == ("one", "1", "tuned")
    assert chosen(FakeKernel("two"), two=20.0) == ("blas", "1", "tuned")
    assert chosen(FakeKernel("one")) == ("one", "1", "cache")
    assert chosen(FakeKernel("two")) == ("blas", "1", "cache")
    assert chosen(FakeKernel("one", version="2"), one=20.0) == ("blas", "1", "tuned")
    assert chosen(FakeKernel("one")) == ("one", "1", "cache")
    assert chosen(FakeKernel("one", version="2"), FakeKernel("two")) == ("blas", "1", "cache")
    assert versions() == ["2", "1"]
    for version in "34":
        assert chosen(FakeKernel("one", version=version), one=5.0) == ("one", version, "tuned")
    assert versions() == ["4", "3", "2"]


def test_an_upgraded_kernel_alone_is_measured_again(tmp_path: Path) -> None:
    times = {"fast": 10.0, "other": 15.0, "blas": 20.0}
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("fast"), FakeKernel("other"), times=times, root=tmp_path
    )
    d.choose(problem(), settings())
    times["other"] = 5.0
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("fast"), FakeKernel("other", version="2"), times=times, root=tmp_path
    )
    choice = d.choose(problem(), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("other", "tuned")
    kept = d.store.load(DEVICE.gpu, DEVICE.environment, problem().to_json())
    assert kept is not None
    assert {(c.kernel, c.version) for c in kept.candidates} == {
        ("blas", "1"),
        ("fast", "1"),
        ("other", "1"),  # for processes that have it
        ("other", "2"),
    }


def test_an_out_of_bounds_config_on_record_is_passed_over(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    d.choose(problem(), settings())
    (path,) = (p for p in tmp_path.rglob("*.json") if p.name != "environment.json")
    document = json.loads(path.read_text().replace('"tile": 1', '"tile": -1'))
    document.pop("checksum")  # made by hand
    path.write_text(json.dumps(document))
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    with pytest.warns(TmmWarning, match="tile must be positive"):
        choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert choice.candidate.kernel.name == "blas"


@pytest.mark.parametrize("on_cache_miss", ["tune", "heuristic", "error"])
def test_a_config_of_blas_on_record_that_does_not_bind_costs_the_record(
    on_cache_miss: Any, tmp_path: Path
) -> None:
    class Strict(FakeBlas):
        def bind(self, problem: Any, config: Any) -> Any:
            if config.tile != 1:
                raise ValueError("fuses no such thing")
            return super().bind(problem, config)

    d, _ = dispatcher(Strict(), FakeKernel("k"), times={"k": 20.0, "blas": 10.0}, root=tmp_path)
    record = d.tune(problem(), settings())
    assert record.best.kernel == "blas"
    edited = tuple(
        revised(each, config={"tile": 2}) if each.kernel == "blas" else each
        for each in record.candidates
    )
    d.store.save(DEVICE.gpu, DEVICE.environment, revised(record, candidates=edited))
    again, _ = dispatcher(Strict(), FakeKernel("k"), root=tmp_path)
    with pytest.warns(TmmWarning, match="blas: tile=2 on record is not a config for"):
        choice, _ = again.bound(problem(), settings(on_cache_miss=on_cache_miss))
    assert choice.candidate.kernel.name == "k"  # the next on record


def test_the_error_of_a_miss_gives_advice() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    with pytest.raises(CacheMissError, match="tmm tune"):
        d.choose(problem(), settings(on_cache_miss="error"))


def test_a_neighbours_record_has_priority_over_blas(tmp_path: Path) -> None:
    fast = FakeKernel("fast", tiles=(1, 2), estimate=None)
    d, _ = dispatcher(FakeBlas(), fast, times={("fast", 2): 5.0, "blas": 20.0}, root=tmp_path)
    untuned = settings(on_cache_miss="heuristic")
    assert d.choose(problem(), untuned).origin == "fallback"
    d.tune(problem(m=128), settings())
    near = d.choose(problem(m=100), untuned)
    assert (near.origin, near.candidate.config.to_json()) == ("neighbour", {"tile": 2})
    assert "128×32×16" in near.reason
    assert d.choose(problem(m=8192), untuned).origin == "fallback"  # M is too far away
    assert d.choose(problem(m=100, tf32=True), untuned).origin == "fallback"  # another kind


def test_a_neighbours_winner_must_have_a_good_estimate_here(tmp_path: Path) -> None:
    """Tiles that fill the GPU there may leave most of it idle here."""

    class Wide(FakeKernel):
        def estimate_us(self, problem: Any, config: Any) -> float:
            return 5.0 if problem.m > 100 else 25.0

    d, _ = dispatcher(
        FakeBlas(estimate=20.0), Wide("wide"), times=FAST | {"wide": 5.0}, root=tmp_path
    )
    d.tune(problem(m=128), settings())
    untuned = settings(on_cache_miss="heuristic")
    assert d.choose(problem(m=120), untuned).candidate.kernel.name == "wide"
    choice = d.choose(problem(m=90), untuned)
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "heuristic")


def test_neighbour_from_older_versions_of_the_same_gpu(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    d.tune(problem(device=replace(DEVICE, torch="1")), settings())
    choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert (choice.origin, choice.candidate.kernel.name) == ("neighbour", "fast")
    assert "under other versions" in choice.reason


def test_heuristic_needs_a_clear_advantage() -> None:
    for estimate, expected in ((15.0, "guess"), (19.0, "blas")):
        d, _ = dispatcher(FakeBlas(estimate=20.0), FakeKernel("guess", estimate=estimate))
        choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
        assert (choice.candidate.kernel.name, choice.origin) == (expected, "heuristic")


def test_a_captured_call_is_not_tuned_and_is_noted_as_a_miss(tmp_path: Path) -> None:
    safe = FakeKernel("safe")
    unsafe = FakeKernel("unsafe", traits=Traits(capture_safe=False))
    times = {"safe": 10.0, "unsafe": 5.0, "blas": 20.0}
    d, timer = dispatcher(FakeBlas(), safe, unsafe, times=times, root=tmp_path)
    captured = d.choose(problem(capturing=True), settings())
    assert captured.candidate.kernel.name == "blas"
    assert timer.measured == []
    assert [m["m"] for m in (dict(x.problem) for x in d.store.misses())] == [64]
    assert d.choose(problem(), settings()).candidate.kernel.name == "unsafe"
    warm = d.choose(problem(capturing=True), settings())
    assert (warm.candidate.kernel.name, warm.origin) == ("safe", "cache")


def test_requirements_filter_by_trait(tmp_path: Path) -> None:
    loose = FakeKernel("loose", traits=Traits(deterministic=False))
    firm = FakeKernel("firm", traits=Traits(batch_invariant=True))
    times = {"loose": 5.0, "firm": 10.0, "blas": 20.0}
    d, _ = dispatcher(FakeBlas(), loose, firm, times=times, root=tmp_path)
    assert d.choose(problem(), settings()).candidate.kernel.name == "loose"
    choice = d.choose(problem(deterministic=True), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("firm", "cache")
    rejected = d.rejections(problem(deterministic=True), settings())
    assert rejected["loose"] == ["not deterministic"]


def test_deterministic_mode_does_not_time_anew() -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)
    choice = d.choose(problem(deterministic=True), settings())
    assert choice.candidate.kernel.name == "blas"
    assert "deterministic" in choice.reason
    assert timer.measured == []


def test_after_a_quarantine_the_next_kernel_answers() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)
    choice = d.choose(problem(), settings())
    with pytest.warns(TmmWarning, match=r"fast failed on .*boom"):
        d.quarantine(problem(), choice, RuntimeError("boom"))
    assert d.choose(problem(), settings()).candidate.kernel.name == "blas"
    assert "boom" in d.rejections(problem(), settings())["fast"][0]
    assert d.choose(problem(m=4096), settings()).candidate.kernel.name == "fast"


@pytest.mark.parametrize("culprit", ["second", "fast"])
def test_quarantine_holds_inside_the_bucket_too(culprit: str) -> None:
    """The record's best kernel inside the bucket differs from the best at its edge."""
    times: dict[Any, float] = {"fast": 10.0, "blas": 30.0, "second": 12.0}
    times |= {("second", 1, m): 5.0 for m in (33, 49)}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), FakeKernel("second"), times=times)
    assert d.choose(problem(), settings()).candidate.kernel.name == "fast"
    inside = d.choose(problem(m=40), settings())
    assert inside.candidate.kernel.name == "second"
    of = inside if culprit == "second" else d.choose(problem(), settings())
    with pytest.warns(TmmWarning, match=f"{culprit} failed on .*boom"):
        d.quarantine(problem(), of, RuntimeError("boom"))
    answer = "fast" if culprit == "second" else "second"
    assert d.choose(problem(m=40), settings()).candidate.kernel.name == answer


def test_a_tuner_that_fails_costs_the_tuning_not_the_call() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)

    def explode(*_: object, **__: object) -> Any:
        raise RuntimeError("no timer")

    d.tuner.steps = explode  # type: ignore[method-assign]
    with pytest.warns(TmmWarning, match="no timer"):
        choice = d.choose(problem(), settings())
    assert choice.candidate.kernel.name == "blas"


def test_disabled_kernels_are_not_candidates() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)
    off = settings(disable=frozenset({"fast"}))
    assert d.choose(problem(), off).candidate.kernel.name == "blas"
    assert d.rejections(problem(), off)["fast"] == ["disabled by TMM_DISABLE or override"]


@pytest.mark.parametrize("times", [FAST, {"fast": 200.0}, {"fast": 20.0, "blas": 20.0}])
def test_a_disabled_baseline_is_measured_and_not_used(times: dict[Any, float]) -> None:
    """A warning of a failed tuning for each problem was the price."""
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=times)
    off = settings(disable=frozenset({"blas"}))
    for m in (64, 200):
        choice, _ = d.bound(problem(m), off)
        assert (choice.candidate.kernel.name, choice.origin) == ("fast", "tuned")
    assert set(timer.measured) == {"blas", "fast"}
    assert {r.kernel for r in d.tune(problem(48), off).candidates} == {"blas", "fast"}


def test_a_read_only_cache_costs_persistence_only(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("in the way")
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=root)
    with pytest.warns(CacheWarning, match="file"):
        choice = d.choose(problem(), settings())
    assert choice.candidate.kernel.name == "fast"


def test_an_unwritten_element_is_on_record(tmp_path: Path) -> None:
    def forget(out: torch.Tensor) -> torch.Tensor:
        return out.index_fill(0, torch.tensor([1]), float("nan"))

    d, _ = dispatcher(FakeBlas(), FakeKernel("holes", spoil=forget), times=FAST, root=tmp_path)
    with pytest.warns(TmmWarning, match="kernel holes failed .*error nan"):
        d.choose(problem(), settings())
    kept = d.store.load(DEVICE.gpu, DEVICE.environment, problem().to_json())
    assert kept is not None
    (evidence,) = (c for c in kept.candidates if c.kernel == "holes")
    assert (evidence.status, evidence.error) == ("wrong", None)
    assert evidence.reason == "error nan exceeds 2e-05"


def test_explain_names_every_candidate_and_rejection(tmp_path: Path) -> None:
    odd = FakeKernel("odd", against=lambda p: ["m is even"])
    wrong = FakeKernel("wrong", spoil=lambda out: out + 1)
    broken = FakeKernel("broken", bind_error=RuntimeError("no compiler"))
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), odd, wrong, broken, times=FAST, root=tmp_path)
    with pytest.warns(TmmWarning, match="kernel broken failed .*no compiler") as warned:
        d.choose(problem(), settings())
    assert len(warned) == 1
    text = str(explain_problem(d, problem(), settings(on_cache_miss="heuristic")))
    for message in (
        "chosen    fast tile=1",
        "because   cache",
        str(tmp_path),
        "2.00×",
        "rejected  odd: m is even",
        "no compiler",
    ):
        assert message in text, text
    assert "exceeds" in text


@pytest.mark.parametrize("width", [40, 79, 120])
def test_explain_fits_a_width(tmp_path: Path, width: int) -> None:
    odd = FakeKernel("odd", against=lambda p: ["M is even, which this kernel does not serve"] * 4)
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), odd, root=tmp_path / "a")
    explained = explain_problem(d, problem(), settings(on_cache_miss="heuristic"))
    lines = explained.text(width).splitlines()
    last = lines[[line.startswith("rejected") for line in lines].index(True) :]
    assert width - 12 < max(map(len, last)) <= width
    assert all(line.startswith(" " * 10) for line in last[1:])


def test_explain_shows_the_clock_and_every_m_of_a_record(tmp_path: Path) -> None:
    times = {"blas": 20.0, "fast": 10.0, ("fast", 1, 33): 7.25, ("fast", 1, 49): 8.5}
    kernels = FakeBlas(), FakeKernel("fast"), FakeKernel("slow")
    d, _ = dispatcher(*kernels, times=times, root=tmp_path)
    d.choose(problem(m=40), settings())
    explained = explain_problem(d, problem(m=40), settings(on_cache_miss="heuristic"))
    assert explained.record is not None
    text = str(explained)
    lines = [line.split() for line in text.splitlines()]
    assert ["clock", "in", "use,", "at", "M=33,", "49,", "64"] in lines
    assert ["measured", "at", "M=64,", "the", "bucket", "of", "M=40"] in lines
    assert "kernel µs at M=64 vs blas µs at M=33 µs at M=49 error" in " ".join(text.split())
    rows = {line[0]: line[1:] for line in lines}
    assert rows["fast"][:4] == ["10.0", "2.00×", "7.2", "8.5"]
    assert rows["blas"][:4] == ["20.0", "1.00×", "20.0", "20.0"]
    # It lost at the edge, so it was never timed inside.
    assert rows["slow"][:2] == ["100.0", "0.20×"]
    assert lines[lines.index(["fast", *rows["fast"]]) + 1] == ["tile=1;", "←", "winner"]
    document = explained.to_json()["record"]
    assert document["clock"] == "in use"
    assert {"33": 7.25, "49": 8.5} in [c.get("inside_us") for c in document["candidates"]]


def test_explain_shows_candidates_slower_than_blas_in_steady_state(tmp_path: Path) -> None:
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("fast"), times={"blas": 20.0, "fast": 10.0}, root=tmp_path
    )
    d.choose(problem(), settings())
    explained = explain_problem(d, problem(), settings())
    assert explained.record is not None
    still = {"blas": 200.0, "fast": 205.0}
    candidates = [revised(c, steady_us=still[c.kernel]) for c in explained.record.candidates]
    blas = [c.kernel for c in candidates].index("blas")
    record = revised(explained.record, candidates=tuple(candidates), winner=blas)
    text = str(replace(explained, record=record))
    assert "vs blas µs in steady state" in " ".join(text.split())
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["fast"][:3] == ["10.0", "2.00×", "205.0"]
    assert "tile=1; slower than blas in steady state" in text
    assert "steady state" not in str(explained)


def test_bucket_edges_are_edges_of_their_own_bucket() -> None:
    edges = sorted({bucket_edge(m) for m in range(1, 10000)})
    assert all(bucket_edge(edge) == edge for edge in edges)
    assert all(
        m <= bucket_edge(m) <= max(m * 1.25, 2 * m if m <= 64 else 0) for m in range(1, 10000)
    )
    assert len(edges) < 45


def test_store_is_the_users_by_default() -> None:
    import os

    assert str(CacheStore().root) == os.environ["TMM_CACHE_DIR"]


def test_problem_json_round_trip() -> None:
    from tmm_core import Problem
    from tmm_core.epilogues import parse

    p = problem(m=3, epilogue=parse("softcap(5)"), bias=torch.float32, tf32=True, scaled=True)
    assert Problem.from_json(p.to_json(), DEVICE, parse(p.to_json()["epilogue"])) == p


def test_only_a_locked_store_answers_and_a_miss_gives_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    d.tune(problem(m=64), settings())
    assert tmm_cache_main(["--cache-dir", str(tmp_path), "freeze"]) == 0
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", "1")
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    choice = d.choose(problem(m=64), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("fast", "cache")
    assert choice.reason.endswith("tmm.lock.json")
    for mode in ("tune", "heuristic", "error"):
        instance = problem(m=128, tf32=True)
        with pytest.raises(CacheMissError, match=r"no locked record for 128×.*freeze` again"):
            d.choose(instance, settings(on_cache_miss=mode))
    assert timer.measured == []
    # A kernel whose version changed is not tuned without the operator's knowledge.
    d, timer = dispatcher(FakeBlas(version="2"), FakeKernel("fast", version="2"), root=tmp_path)
    with pytest.raises(CacheMissError, match="fits this GPU, its software and the kernels"):
        d.choose(problem(m=64), settings())
    assert timer.measured == []


@pytest.mark.slow
def test_a_locked_store_answers_alone_in_batch_invariant_mode_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = Traits(batch_invariant=True)
    kernels = FakeBlas(traits=traits), FakeKernel("fast", traits=traits)
    d, _ = dispatcher(*kernels, times=FAST, root=tmp_path)
    instance = problem(m=64, batch_invariant=True)
    assert d.choose(instance, settings()).origin == "cache"  # tuned at once
    assert tmm_cache_main(["--cache-dir", str(tmp_path), "freeze"]) == 0
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", "1")
    d, timer = dispatcher(*kernels, times=FAST, root=tmp_path)
    assert d.choose(instance, settings()).origin == "cache"
    with pytest.raises(CacheMissError, match="no locked record for 64×48×"):
        d.choose(problem(m=64, n=48, batch_invariant=True), settings())
    assert timer.measured == []


def test_on_a_gpu_the_interpreter_reads_no_record() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 1.0, "blas": 2.0})
    gpu = replace(DEVICE, type="cuda", name="gpu", capability=(9, 0), interpreted=True)
    d.store.save(gpu.gpu, gpu.environment, d.tune(problem(), settings()))
    asked = problem(device=gpu)
    choice = d.choose(asked, settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "fallback")
    assert "TRITON_INTERPRET" in choice.reason
    assert d.choose(asked, settings(kernel="fast")).candidate.kernel.name == "fast"


@pytest.mark.parametrize("empty", [{"m": 0}, {"n": 0}, {"k": 0}, {"batch": 0}])
@pytest.mark.parametrize("how", [{}, {"on_cache_miss": "error"}, {"batch_invariant": True}])
def test_an_empty_product_is_blas_and_no_kernel_is_measured(
    empty: dict[str, int], how: dict[str, Any]
) -> None:
    """BLAS serves it even if another kernel could: no record holds an extent of 0."""
    fast = FakeKernel("fast", traits=Traits(batch_invariant=True))
    d, timer = dispatcher(FakeBlas(), fast, times={"fast": 1.0})
    instance = problem(**empty, batch_invariant="batch_invariant" in how)
    choice, _ = d.bound(instance, settings(**how))
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "fallback")
    assert choice.reason == "nothing to multiply: a dimension is 0"
    with pytest.raises(UnsupportedProblemError, match="nothing to measure: a dimension is 0"):
        d.tune(instance, settings())
    assert timer.measured == []
    forced, _ = d.bound(instance, settings(kernel="fast"))
    assert forced.candidate.kernel.name == "fast"
