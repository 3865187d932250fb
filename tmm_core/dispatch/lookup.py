"""Looks up the kernels that can serve a problem, and the candidates of a record that still can."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, CandidateResult, TuningRecord

from tmm_core.errors import (
    CacheMissError,
    ConfigError,
    PluginError,
    error_text,
    foreign_place,
    is_reported,
    warn,
    warn_of_plugin,
)
from tmm_core.launch.plan import Choice
from tmm_core.registry.query import CheckedKernel, read_config
from tmm_core.registry.registry import Registry, Source
from tmm_core.settings import Settings
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.findings import warn_of_environment
from tmm_core.tuning.ranking import (
    compared_at,
    decide,
    fastest_blas,
    fastest_first,
    finalists,
    identity,
    ranked_around,
    times_around,
)
from tmm_core.tuning.untried import KernelVersion, Noted, Untried


class Lookup:
    """The kernels of a registry and the records of a store, without kernels that failed in this
    process."""

    def __init__(self, registry: Registry, store: CacheStore) -> None:
        self.registry = registry
        self.store = store
        #: Kernels that the environment left untried.
        self.untried = Untried(store)
        #: (kernel, bucket) pairs that raised or were wrong at run time, with the message.
        self.quarantined: dict[tuple[str, Problem], str] = {}
        self._warned: set[str] = set()

    def able(self, problem: Problem, settings: Settings) -> list[Kernel[Any]]:
        """Return the kernels that can serve ``problem`` and are not quarantined."""
        able, _ = self.registry.candidates(problem, settings)
        bucket = bucketed(problem.bare())
        return [k for k in able if (k.name, bucket) not in self.quarantined]

    def rejections(self, problem: Problem, settings: Settings) -> dict[str, list[str]]:
        """Return every kernel that is no candidate, with the reasons; for ``explain()``."""
        _, rejected = self.registry.candidates(problem, settings)
        for (name, bucket), error in list(self.quarantined.items()):
            if bucket == bucketed(problem.bare()):
                rejected.setdefault(name, []).append(f"quarantined: {error}")
        return rejected

    def record(self, problem: Problem) -> tuple[Problem, TuningRecord] | None:
        """Return the record of ``problem``, else of its bucket, with the record's problem."""
        bare = problem.bare()
        own = [replace(bare, batch_invariant=True)] if problem.batch_invariant else []
        keys = [key for each in (*own, bare) for key in (each, bucketed(each))]
        for key in dict.fromkeys(keys):
            if (found := self.record_of(key)) is not None:
                return key, found
        return None

    def record_of(self, key: Problem) -> TuningRecord | None:
        """Return the record measured for exactly this problem, without the results of kernels that
        this process lacks. Its winner is the best of the others."""
        record = self.store.load(key.device.gpu, key.device.environment, key.to_json())
        if record is None or not (absent := self.absent(record)):
            return record
        here = [r for r in record.candidates if (r.kernel, r.version) not in absent]
        if not finalists(here):
            return record
        winner = decide(here, record.best)
        return revised(record, candidates=tuple(here), winner=winner)

    def absent(self, record: TuningRecord) -> list[KernelVersion]:
        """Return the kernels on record that this process lacks, or has in another version."""
        present = {(kernel.name, kernel.version) for kernel in self.registry.kernels()}
        measured = dict.fromkeys((each.kernel, each.version) for each in record.candidates)
        return [each for each in measured if each not in present]

    def best(
        self, record: TuningRecord, able: list[Kernel[Any]], problem: Problem
    ) -> Candidate | None:
        """Return the winner on record, or the next fastest candidate that may serve this call."""
        for result in (record.best, *fastest_first(record)):
            candidate = self.candidate(result, able, problem)
            if candidate is not None:
                return candidate
        return None

    def candidate(
        self,
        result: CandidateResult,
        able: list[Kernel[Any]],
        problem: Problem,
        any_version: bool = False,
    ) -> Candidate | None:
        """Return the candidate of a record's result, if it may serve ``problem``."""
        for kernel in able:
            if kernel.name == result.kernel and (any_version or kernel.version == result.version):
                try:
                    config = read_config(kernel, result.config)
                except PluginError:  # the kernel was set aside, with a warning
                    continue
                except ConfigError as error:
                    self.warn_of(kernel, error_text(error), error)
                    continue
                candidate = Candidate(kernel, config)
                if kernel.name == BASELINE and not fits(candidate, problem):
                    # If another kernel does not bind, BLAS answers. BLAS itself has no fallback.
                    if not any_version:
                        note = f"{config} on record is not a config for {problem}"
                        self.warn_once(f"kernel {kernel.name}: {note}")
                elif not config.unmet_promises(problem):
                    return candidate
        return None

    def inside(
        self, problem: Problem, edge: Problem, choice: Choice, able: list[Kernel[Any]]
    ) -> Choice:
        """Return a bucket's choice for an M inside the bucket: the best candidate that beats BLAS
        at the measured M on both sides. If there is none, BLAS with its fastest config there."""
        if (
            problem.extent == edge.extent
            or problem.batch_invariant
            or not choice.from_record
            or (found := self.record(problem)) is None
            or found[0] != edge
        ):
            return choice
        record = found[1]
        around = times_around(record.candidates, problem.extent, edge.extent)
        ahead = ranked_around(around) if len(around) == 2 or problem.extent in around else []
        results = {identity(result): result for result in record.candidates}
        kernels = (self.candidate(results[name], able, problem) for name in ahead)
        answer, along = next(filter(None, kernels), None), problem.along.upper()
        why = f"the best at {' and '.join(f'{along}={m}' for m in sorted(around))}"
        if answer is None:
            blas = next((kernel for kernel in able if kernel.name == BASELINE), None)
            if blas is None:
                return choice
            own = fastest_blas(around)
            answer = self.candidate(results[own], able, problem) if own else None
            if answer is None and choice.candidate.kernel.name == BASELINE:
                return choice
            answer = answer or Candidate(blas, blas.default_config(problem))
            measured = ", ".join(map(str, compared_at(record)))
            why = f"BLAS is not beaten around {along}={problem.extent} (measured at {measured})"
        if answer == choice.candidate:
            return choice
        return replace(choice, candidate=answer, reason=f"{choice.reason}; {why}")

    def beside(self, problem: Problem, choice: Choice, able: list[Kernel[Any]]) -> Choice:
        """Return a choice that leaves room for products that run at the same time. It is the given
        one if no kernel offers a config, or if records are locked."""
        if self.store.locked:
            return choice
        offered = [(kernel, kernel.beside(problem)) for kernel in able]
        roomy = [Candidate(kernel, config) for kernel, config in offered if config is not None]
        if not roomy:
            return choice

        def expected_us(candidate: Candidate) -> float:
            estimate = candidate.kernel.estimate_us(problem, candidate.config)
            return math.inf if estimate is None else estimate

        why = f"it leaves room for products beside it; alone: {choice.candidate}"
        return Choice(min(roomy, key=expected_us), "heuristic", why)

    def forbids_tuning(self, problem: Problem, settings: Settings) -> str | None:
        """Return why a call may not tune ``problem``; None if it may."""
        if problem.capturing:
            return "a CUDA graph is being captured"
        if self.store.locked:
            return "TMM_REQUIRE_LOCKED=1"
        background = settings.on_cache_miss == "background"
        if settings.on_cache_miss != "tune" and not background:
            return f"on_cache_miss={settings.on_cache_miss!r}"
        if background and (settings.batch_invariant or settings.arithmetic is not None):
            return "batch-invariant mode: bits may not change when a tuning ends"
        if background and _ranks() > 1:
            return "several ranks must agree: tmm_core.tools.ranks.tune measures for all"
        if problem.deterministic:
            return "deterministic mode: a choice by timing may differ from run to run"
        if problem.device.interpreted:
            return "interpreted kernels' times mean nothing"
        return None

    def log_miss(self, key: Problem) -> None:
        self.store.log_miss(key.device.gpu, key.device.environment, key.to_json())

    def warn_untried(self, problem: Problem, noted: Noted | None) -> None:
        """Warn, once per process, that kernels are not tried for this problem. The tuning in which
        all failed alike may have reported this as a fault of theirs."""
        if noted is None or not noted.kernels:
            return
        known = {k.name for k in self.registry.kernels() if is_reported(k.source)}
        left = {
            kernel: why
            for kernel, why in noted.kernels.items()
            if why.cause != "alike" or kernel[0] not in known
        }
        warn_of_environment(left, problem, ("toolchain", "passing", "alike"))

    def chosen_by(
        self,
        candidate: Candidate,
        key: Problem,
        origin: Literal["cache", "tuned"] = "cache",
        arithmetic: str | None = None,
    ) -> Choice:
        """Return the choice of a candidate by the record of ``key``."""
        path = self.store.found(key.device.gpu, key.device.environment, key.to_json())
        return Choice(candidate, origin, str(path or "not stored"), arithmetic)

    def require_record(self, problem: Problem, key: Problem, settings: Settings) -> None:
        """Refuse a problem without a record, if the store is locked or the settings require one.
        The problem of its bucket is ``key``.

        Raises:
            CacheMissError: A record is required.
        """
        bucket = f"{key.along.upper()}={key.extent}"
        if self.store.locked:
            raise CacheMissError(
                f"no locked record for {problem} (bucket {bucket}) in {self.store.lock_path} fits "
                f"this GPU, its software and the kernels that are installed; tune, and run "
                f"`tmm-cache freeze` again"
            )
        if settings.on_cache_miss == "error":
            mode, under = "", ""
            if problem.batch_invariant:
                mode, under = " in batch-invariant mode", " under TMM_BATCH_INVARIANT=1"
            raise CacheMissError(
                f"no tuned record for {problem}{mode} (bucket {bucket}) in {self.store.root} and "
                f"on_cache_miss='error'; run `tmm tune` for it{under} or allow 'tune' or "
                f"'heuristic'"
            )

    def warn_of(
        self, kernel: Kernel[Any], message: str, error: BaseException | None = None
    ) -> None:
        """Report a fault of a kernel, in the one warning about its distribution."""
        source = kernel.source if isinstance(kernel, CheckedKernel) else Source(kernel.name)
        place = "" if error is None else foreign_place(error)
        warn_of_plugin(source, f"kernel {kernel.name} {message}", place)

    def warn_once(self, note: str) -> None:
        if note not in self._warned:
            self._warned.add(note)
            warn(note)


def _ranks() -> int:
    ranks = torch.distributed
    return ranks.get_world_size() if ranks.is_available() and ranks.is_initialized() else 1


def fits(candidate: Candidate, problem: Problem) -> bool:
    """Whether a config found for another problem is in this one's search space."""
    return candidate.config in list(candidate.kernel.configs(problem))
