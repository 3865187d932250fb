"""Measures problems that have no record, or an incomplete one, and stores the records."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, TuningRecord

from tmm_core.dispatch.first_use import FirstUse
from tmm_core.dispatch.lookup import Lookup
from tmm_core.errors import error_text, reraise
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps, drained
from tmm_core.tuning.findings import Findings, warn_of_environment
from tmm_core.tuning.ranking import fastest_first, identity
from tmm_core.tuning.search import CLOSE, NO_HINTS, Hints
from tmm_core.tuning.untried import KernelVersion, Obstacle
from tmm_core.verify.environment_faults import cause_of

if TYPE_CHECKING:
    from tmm_core.dispatch.neighbour import Neighbours
    from tmm_core.tuning.tuner import Tuner

#: Number of records from which a tuning starts, and of candidates of each. They are records of this
#: problem on another GPU or under other versions, or of near problems.
HINTING_RECORDS, HINTS_EACH = 3, 3

#: A record keeps results of so many kernels that its process lacks, and so many versions of each.
OTHER_KERNELS, OTHER_VERSIONS = 32, 2

#: How many tuning budgets to wait for another process that tunes the same problem.
LOCK_PATIENCE = 4.0


class Measuring(Lookup):
    """The records of a store, completed by a tuner."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        super().__init__(registry, store)
        if tuner is not None:
            self.tuner = tuner
        self.first_use = FirstUse(store)
        #: Held while something is measured or stored.
        self._lock = threading.RLock()

    # Created lazily: a process that finds its problems on record does not import these modules.

    @functools.cached_property
    def tuner(self) -> Tuner:
        from tmm_core.tuning.tuner import Tuner

        return Tuner()

    @functools.cached_property
    def _neighbours(self) -> Neighbours:
        from tmm_core.dispatch.neighbour import Neighbours

        return Neighbours(self.store)

    def prepare(self, problem: Problem, settings: Settings, force: bool = False) -> None:
        """Start compiling the first candidates for ``problem`` without waiting, unless it is on
        record. While one problem is timed, the kernels of the next one compile."""
        key = problem if problem.batch_invariant else problem.bare()
        # An incomplete record lacks few kernels.
        known = self.record_of(key) is not None and not force
        if not (key.device.interpreted or known or key in self.tuner.prepared):
            able = self._with_baseline(key, self.able(key, settings))
            self.tuner.prepare(key, able, self.hints(key))

    def _with_baseline(self, key: Problem, able: list[Kernel[Any]]) -> list[Kernel[Any]]:
        """The kernels and BLAS. It is measured for comparison even where calls may not use it: in
        batch-invariant mode, or if a setting disables it."""
        blas = self.registry.kernel(BASELINE)
        if any(k.name == BASELINE for k in able) or blas.reasons_against(key):
            return able
        return [*able, blas]

    def on_record(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        tune: bool,
        force: bool = False,
    ) -> TuningRecord | None:
        """Return the record of ``key`` for batch-invariant mode, measured now if ``tune``. It has
        the batch-invariant kernels, and BLAS for comparison."""
        record = self.record_of(key)
        complete = record is not None and not self.untried.missing(key, able, record)
        if not tune or (complete and not force):
            self.warn_untried(key, self.untried.get(key))
            return record
        try:
            with self._lock:
                return self._tune(key, able, settings, force=force)
        except Exception as error:  # tuning is a feature; the matmul must be answered
            reraise(error)
            self.warn_of_tuning(key, error, f"tuning failed: {error_text(error)}")
            return record

    def _tune(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        *,
        wait: bool = True,
        **options: Any,
    ) -> TuningRecord | None:
        """Take all steps of :meth:`_tuning` at once, with its ``options`` and a line of progress.
        If another process tunes the problem, or another one on this GPU, ``wait`` for it or return
        None."""
        from tmm_core.tuning.progress import LINE

        device, document = key.device, key.to_json()
        patience = settings.tune_budget * LOCK_PATIENCE if wait else 0.0
        with (
            self.store.lock(device.gpu, device.environment, document, patience) as held,
            self._alone_on(device) as alone,
            LINE.of(str(key), settings.progress) as tick,
        ):
            if not (wait or (held and alone)):
                return None
            return drained(self._tuning(key, able, settings, **options), tick)

    def _tuning(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        force: bool = False,
        resume: bool = False,
        spent: float = 0.0,
    ) -> Steps[TuningRecord]:
        """Measure a problem, unless its record is complete, and store the record.

        It yields between measurements (:meth:`Tuner.steps`, which also explains ``spent``). While
        it runs, its caller holds :meth:`_alone_on` for the device.
        """
        findings, able = Findings(), self._with_baseline(key, able)
        # The previous holder of the lock may have stored the record.
        kept = None if force else self.record_of(key)
        hints = self.hints(key) if kept is None else NO_HINTS
        yield ()
        new = self.untried.missing(key, able, kept, resume)
        record = yield from self.tuner.steps(
            key, able, settings, kept, new=new, hints=hints, findings=findings, spent=spent
        )
        if record is not kept:
            self._store(key, record)
            if findings.verified:
                self.stamp_winner(key, record)
            self.untried.note(key, {(k.name, k.version) for k in new}, findings.left)
        findings.report(key)
        return record

    def stamp_winner(self, key: Problem, record: TuningRecord) -> None:
        """Record that the winner of the record of ``key`` was verified in every way of use."""
        winner = self.candidate(record.best, list(self.registry.kernels()), key)
        if winner is not None:
            self.first_use.stamp(key, winner)

    def _store(self, key: Problem, record: TuningRecord) -> TuningRecord:
        """Store and return a record, with earlier results of kernels that this process lacks."""
        device = key.device
        before = self.store.load(device.gpu, device.environment, record.problem)
        if before is not None:
            record = self._with_absent(record, before)
        # Another process cannot have an epilogue that does not last.
        store = self.store.save if key.epilogue.lasting else self.store.hold
        store(device.gpu, device.environment, record)
        self._neighbours.add(device, record)
        return record

    def _with_absent(self, record: TuningRecord, before: TuningRecord) -> TuningRecord:
        """Add the results in ``before`` of kernels that this process lacks. Otherwise a process
        that has them would tune again, and drop the results of this one."""
        measured = {(each.kernel, each.version) for each in record.candidates}
        versions: dict[str, list[KernelVersion]] = {}  # the latest first
        for kernel in self.absent(before):
            if kernel[0] != BASELINE and kernel not in measured:
                versions.setdefault(kernel[0], []).append(kernel)
        latest = itertools.islice(versions.values(), OTHER_KERNELS)
        kept = {each for those in latest for each in those[:OTHER_VERSIONS]}
        others = [each for each in before.candidates if (each.kernel, each.version) in kept]
        return revised(record, candidates=(*record.candidates, *others))

    @contextlib.contextmanager
    def _alone_on(self, device: DeviceFingerprint) -> Iterator[bool]:
        """A context that holds the right to measure on the current GPU; yields False if another
        process has it. Two measurements at one time would disturb each other."""
        if device.type != "cuda":
            yield True
            return
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        place: dict[str, Any] = {"measured on": uuid}
        with self.store.lock(device.gpu, device.environment, place, 0.0) as held:
            yield held

    def hints(self, problem: Problem) -> Hints:
        """Return winners of this problem on other GPUs or versions, or of near problems. A tuning
        tries them first."""
        near = list(itertools.islice(self._neighbours.nearest(problem), HINTING_RECORDS))
        present = {kernel.name for kernel in self.registry.kernels()}
        candidates: list[tuple[str, Mapping[str, Any]]] = []
        for each in near:
            usable = [result for result in fastest_first(each.record) if result.kernel in present]
            found = {identity(result): (result.kernel, result.config) for result in usable}
            candidates += itertools.islice(found.values(), HINTS_EACH)
        return Hints(candidates, bool(near) and near[0].octaves <= CLOSE)

    def warn_of_tuning(self, problem: Problem, error: Exception, forbidden: str) -> None:
        """Warn that a tuning failed; only once per process if the environment is to blame."""
        cause = cause_of(error)
        if cause is None:
            self.warn_once(f"{problem}: {forbidden}")
            return
        warn_of_environment({(BASELINE, ""): Obstacle(cause, forbidden)}, problem, (cause,))
