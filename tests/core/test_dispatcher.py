"""Every rung of the ladder, with fakes and no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, problem, settings
from tmm_cache import CacheStore, CacheWarning
from tmm_cache.cli import main as tmm_cache_main

from tmm_core import (
    CacheMissError,
    ConfigError,
    TmmWarning,
    Traits,
    UnknownNameError,
    UnsupportedProblemError,
)
from tmm_core.bucket import bucket_edge
from tmm_core.explanation import explain_problem

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
    for bad, said in (
        ('{"tile": 0}', "positive"),
        ('{"tiel": 1}', "tiel"),
        ('{"tile": "1"}', "int"),
    ):
        with pytest.raises(ConfigError, match=said):
            d.choose(problem(), settings(kernel="fast", config=bad))


def test_a_forced_kernel_that_cannot_raises_with_its_reasons() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("odd", against=lambda p: ["m is even", "n too"]))
    with pytest.raises(UnsupportedProblemError, match=r"'odd'.*m is even; n too"):
        d.choose(problem(), settings(kernel="odd"))
    with pytest.raises(UnknownNameError, match="did you mean 'odd'"):
        d.choose(problem(), settings(kernel="od"))


def test_forced_takes_its_best_config_on_record() -> None:
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("fast", tiles=(1, 2)), times={("fast", 1): 15, ("fast", 2): 11}
    )
    d.tune(problem(), settings())
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


def test_blas_wins_without_a_margin() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("close"), times={"close": 19.9, "blas": 20.0})
    assert d.choose(problem(), settings()).candidate.kernel.name == "blas"


def test_the_record_of_a_bucket_serves_all_of_it(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    for m in range(4097, 5121, 64):
        choice = d.choose(problem(m=m), settings())
        assert choice.candidate.kernel.name == "fast"
        assert choice.evidence is None or choice.evidence.m == 5120
    assert len(list(tmp_path.rglob("*.json"))) == 2  # one record, environment.json
    assert timer.measured.count("fast") == 1 + 1 + 1 + 1  # warm-up and three stages


def test_an_exact_record_goes_before_the_buckets(tmp_path: Path) -> None:
    times: dict[Any, float] = {"fast": 10.0, "blas": 20.0}
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    d.tune(problem(m=5120), settings())
    timer.times = {"fast": 40.0, "blas": 20.0}
    d.tune(problem(m=4500), settings())
    assert d.choose(problem(m=4500), settings()).candidate.kernel.name == "blas"
    assert d.choose(problem(m=4501), settings()).candidate.kernel.name == "fast"


class Tiled(FakeKernel):
    """Expects whole tiles of ``tile`` rows to take what they take."""

    def estimate_us(self, problem: Any, config: Any) -> float | None:
        if self.estimate is None:
            return None
        return self.estimate * -(-problem.m // config.tile) * config.tile


class Smooth(FakeBlas):
    def estimate_us(self, problem: Any, config: Any) -> float:
        return float(problem.m)


@pytest.mark.parametrize(
    ("m", "wanted", "tile"),
    [
        (5120, "tiled", 1024),  # where it was measured
        (5000, "tiled", 1024),  # 2 % less for BLAS, no tile less
        (4500, "blas", 1),  # 12 % less for BLAS
        (4100, "blas", 1),
        (4096, "blas", 1),  # another bucket, which BLAS wins
    ],
)
def test_inside_a_bucket_times_are_carried_over(m: int, wanted: str, tile: int) -> None:
    times: dict[Any, float] = {("tiled", 1024): 50.0, "blas": 52.0, ("tiled", 2048): 60.0}
    kernels = (Smooth(), Tiled("tiled", tiles=(1024, 2048), estimate=1.0))
    d, timer = dispatcher(*kernels, times=times)
    assert d.choose(problem(m=5120), settings()).candidate.kernel.name == "tiled"
    timer.times = {"tiled": 60.0, "blas": 40.0}
    for _ in range(2):  # the bucket's choice stays what it was
        choice = d.choose(problem(m=m), settings())
        assert choice.candidate.kernel.name == wanted
        assert getattr(choice.candidate.config, "tile", 1) == tile
        carried = wanted == "blas" and m > 4096
        assert (f"at M={m}" in choice.reason) is carried
    forced = d.choose(problem(m=m), settings(kernel="tiled"))
    assert forced.candidate.kernel.name == "tiled"


def test_another_config_of_the_winner_may_suit_an_m_better() -> None:
    # 4480 rows are seven tiles of 640, and no fewer of 1024 than 5120 are.
    times: dict[Any, float] = {("tiled", 1024): 50.0, ("tiled", 640): 50.5, "blas": 90.0}
    d, _ = dispatcher(Smooth(), Tiled("tiled", tiles=(1024, 640), estimate=1.0), times=times)
    tiles = {}
    for m in (5120, 4608, 4480):
        tiles[m] = d.choose(problem(m=m), settings()).candidate.config.to_json()["tile"]
    assert tiles == {5120: 1024, 4608: 1024, 4480: 640}


def test_without_an_estimate_the_buckets_choice_stands() -> None:
    d, _ = dispatcher(
        FakeBlas(), Tiled("tiled", tiles=(1024,)), times={"tiled": 50.0, "blas": 52.0}
    )
    assert d.choose(problem(m=4100), settings()).candidate.kernel.name == "tiled"


def test_what_must_not_depend_on_m_is_not_carried_over() -> None:
    traits = Traits(batch_invariant=True)
    d, _ = dispatcher(
        Smooth(), Tiled("tiled", tiles=(1024,), estimate=1.0, traits=traits),
        times={"tiled": 50.0, "blas": 52.0},
    )  # fmt: skip
    asked = problem(m=4100, batch_invariant=True)
    assert d.choose(asked, settings(batch_invariant=True)).candidate.kernel.name == "tiled"


def test_a_removed_kernel_gives_way_to_the_next(tmp_path: Path) -> None:
    both = (FakeKernel("fast"), FakeKernel("second"))
    times = {"fast": 10.0, "second": 12.0, "blas": 20.0}
    d, _ = dispatcher(FakeBlas(), *both, times=times, root=tmp_path)
    d.choose(problem(), settings())
    d, timer = dispatcher(FakeBlas(), FakeKernel("second"), times=times, root=tmp_path)
    choice = d.choose(problem(), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("second", "cache")
    assert timer.measured == []


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
        ("other", "2"),
    }


def test_an_out_of_bounds_config_on_record_is_passed_over(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    d.choose(problem(), settings())
    (path,) = (p for p in tmp_path.rglob("*.json") if p.name != "environment.json")
    document = json.loads(path.read_text().replace('"tile": 1', '"tile": -1'))
    del document["checksum"]  # as whoever edits by hand has to
    path.write_text(json.dumps(document))
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    with pytest.warns(TmmWarning, match="tile must be positive"):
        choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert choice.candidate.kernel.name == "blas"


def test_error_on_a_miss_says_what_to_do() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    with pytest.raises(CacheMissError, match="tmm tune"):
        d.choose(problem(), settings(on_cache_miss="error"))


def test_neighbour_before_heuristic_before_fallback(tmp_path: Path) -> None:
    fast = FakeKernel("fast", tiles=(1, 2), estimate=None)
    d, _ = dispatcher(FakeBlas(), fast, times={("fast", 2): 5.0, "blas": 20.0}, root=tmp_path)
    untuned = settings(on_cache_miss="heuristic")
    assert d.choose(problem(), untuned).origin == "fallback"
    d.tune(problem(m=128), settings())
    near = d.choose(problem(m=100), untuned)
    assert (near.origin, near.candidate.config.to_json()) == ("neighbour", {"tile": 2})
    assert "128×32×16" in near.reason
    assert d.choose(problem(m=8192), untuned).origin == "fallback"  # too far to say anything
    assert d.choose(problem(m=100, tf32=True), untuned).origin == "fallback"  # another kind


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


def test_capture_neither_tunes_nor_sticks_and_is_remembered(tmp_path: Path) -> None:
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


def test_batch_invariant_mode_chooses_one_candidate_for_all_m() -> None:
    firm = FakeKernel("firm", tiles=(1, 2), traits=Traits(batch_invariant=True))
    blas = FakeBlas(traits=Traits(batch_invariant=True))
    d, _ = dispatcher(blas, firm, times={("firm", 2): 5.0, "blas": 20.0})
    chosen = {
        str(d.choose(problem(m=m, batch_invariant=True), settings()).candidate)
        for m in (1, 2, 17, 64, 300, 512, 4096)
    }
    assert chosen == {"firm tile=2"}


def test_batch_invariant_mode_may_change_configs_within_one_arithmetic() -> None:
    class Even(FakeKernel):
        """Even tiles share an arithmetic, odd ones do not."""

        def arithmetic(self, problem: Any, config: Any) -> object:
            return "even" if config.tile % 2 == 0 else config

    kernel = Even("even", tiles=(1, 2, 4, 6), traits=Traits(batch_invariant=True))
    times: dict[Any, float] = {
        ("even", t): us for t, us in ((1, 5.0), (2, 5.8), (4, 7.0), (6, 9.0))
    }
    d, timer = dispatcher(FakeBlas(), kernel, times=times)

    def chosen(m: int) -> tuple[str, Any]:
        choice = d.choose(problem(m=m, batch_invariant=True), settings())
        return choice.candidate.kernel.name, choice.candidate.config.to_json()

    # Within a fifth of the fastest, and three configs share it.
    assert chosen(256) == ("even", {"tile": 2})
    timer.times |= {("even", 1): 1.0, ("even", 2): 6.0, ("even", 4): 3.0}
    assert chosen(16) == ("even", {"tile": 4})
    assert chosen(256) == ("even", {"tile": 2})
    # Where nothing may be measured, the config of all M is as good as any.
    heuristic = d.choose(problem(m=64, batch_invariant=True), settings(on_cache_miss="heuristic"))
    assert heuristic.candidate.config.to_json() == {"tile": 2}


def test_batch_invariant_mode_leaves_out_configs_that_depend_on_m() -> None:
    class Odd(FakeKernel):
        def arithmetic(self, problem: Any, config: Any) -> object:
            return None if config.tile % 2 else "even"

    kernel = Odd("odd", tiles=(1, 2, 3), traits=Traits(batch_invariant=True))
    times: dict[Any, float] = {("odd", 1): 1.0, ("odd", 2): 9.0, ("odd", 3): 2.0}
    d, _ = dispatcher(FakeBlas(), kernel, times=times)
    for m in (16, 256, 300):
        choice = d.choose(problem(m=m, batch_invariant=True), settings())
        assert choice.candidate.config.to_json() == {"tile": 2}
    assert d.choose(problem(m=300), settings()).candidate.config.to_json() == {"tile": 1}


def test_untuned_batch_invariance_is_no_reason_to_fall_back_on_blas() -> None:
    firm = FakeKernel("firm", traits=Traits(batch_invariant=True), estimate=50.0)
    faster = FakeKernel("faster", traits=Traits(batch_invariant=True), estimate=40.0)
    d, _ = dispatcher(FakeBlas(estimate=1.0), firm, faster)
    for m in (1, 300):
        asked = problem(m=m, batch_invariant=True)
        choice = d.choose(asked, settings(on_cache_miss="heuristic"))
        assert (choice.candidate.kernel.name, choice.origin) == ("faster", "heuristic")


def test_untuned_batch_invariance_guesses_among_what_sums_alike() -> None:
    class Graded(FakeKernel):
        """Expects a tile to be the better the closer it is to M; even ones sum alike, and what
        the sum of tile 9 is depends on M."""

        def arithmetic(self, problem: Any, config: Any) -> object:
            return {0: "even", 1: config}[config.tile % 2] if config.tile != 9 else None

        def estimate_us(self, problem: Any, config: Any) -> float | None:
            assert self.estimate is not None
            return self.estimate + abs(problem.m - config.tile) / 100

    invariant = Traits(batch_invariant=True)
    wide = Graded("wide", tiles=(256, 255, 64, 16, 15), traits=invariant, estimate=44.0)
    narrow = FakeKernel("narrow", tiles=(256, 16), traits=invariant, estimate=40.0)
    unsteady = Graded("unsteady", tiles=(9, 256), traits=invariant, estimate=1.0)
    d, _ = dispatcher(FakeBlas(estimate=1.0), wide, narrow, unsteady)

    def chosen(m: int) -> tuple[str, Any]:
        asked = problem(m=m, batch_invariant=True)
        choice = d.choose(asked, settings(on_cache_miss="heuristic"))
        assert choice.origin == "heuristic"
        return choice.candidate.kernel.name, choice.candidate.config.to_json()

    # Within a fifth of the best guess, and others sum alike.
    assert chosen(256) == ("wide", {"tile": 256})
    assert chosen(64) == ("wide", {"tile": 64})
    assert chosen(1) == ("wide", {"tile": 16})


def test_batch_invariance_that_cannot_be_had_is_said_once() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("loose"), times=FAST)
    with pytest.warns(TmmWarning, match="blas: is not batch-invariant"):
        choice = d.choose(problem(m=8, batch_invariant=True), settings())
    assert choice.candidate.kernel.name == "blas"


def test_deterministic_mode_does_not_time_anew() -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)
    choice = d.choose(problem(deterministic=True), settings())
    assert choice.candidate.kernel.name == "blas"
    assert "deterministic" in choice.reason
    assert timer.measured == []


def test_quarantine_answers_with_the_next() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)
    choice = d.choose(problem(), settings())
    with pytest.warns(TmmWarning, match=r"fast failed on .*boom"):
        d.quarantine(problem(), choice, RuntimeError("boom"))
    assert d.choose(problem(), settings()).candidate.kernel.name == "blas"
    assert "boom" in d.rejections(problem(), settings())["fast"][0]
    assert d.choose(problem(m=4096), settings()).candidate.kernel.name == "fast"


def test_a_tuner_that_fails_costs_the_tuning_not_the_call() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)

    def explode(*_: object) -> Any:
        raise RuntimeError("no timer")

    d.tuner.tune = explode  # type: ignore[method-assign]
    with pytest.warns(TmmWarning, match="no timer"):
        choice = d.choose(problem(), settings())
    assert choice.candidate.kernel.name == "blas"


def test_disabled_kernels_are_not_candidates() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST)
    off = settings(disable=frozenset({"fast"}))
    assert d.choose(problem(), off).candidate.kernel.name == "blas"
    assert d.rejections(problem(), off)["fast"] == ["disabled by TMM_DISABLE or override"]


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
    d.choose(problem(), settings())
    text = str(explain_problem(d, problem(), settings(on_cache_miss="heuristic")))
    for said in (
        "chosen    fast tile=1",
        "because   cache",
        str(tmp_path),
        "2.00×",
        "rejected  odd: m is even",
        "no compiler",
    ):
        assert said in text, text
    assert "exceeds" in text


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
    from tmm_core.epilogue import parse

    p = problem(m=3, epilogue=parse("softcap(5)"), bias=torch.float32, tf32=True, scaled=True)
    assert Problem.from_json(p.to_json(), DEVICE, parse(p.to_json()["epilogue"])) == p


def test_a_locked_store_answers_alone_and_a_miss_shows_the_nearest_key(
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
        asked = problem(m=128, tf32=True)
        with pytest.raises(CacheMissError, match=r"no locked record.*differs in") as caught:
            d.choose(asked, settings(on_cache_miss=mode))
        assert str(caught.value).splitlines()[1:] == [
            "  m: asked 128, there 64",
            "  tf32: asked true, there false",
        ]
    assert timer.measured == []
    # A kernel that has changed since is not tuned behind the operator's back.
    d, timer = dispatcher(FakeBlas(version="2"), FakeKernel("fast", version="2"), root=tmp_path)
    with pytest.raises(CacheMissError, match="kernels as they are here"):
        d.choose(problem(m=64), settings())
    assert timer.measured == []
