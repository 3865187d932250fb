"""Explains a choice: every candidate, every rejection and the measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmm_base import console
from tmm_cache import CLOCK, TuningRecord, problem_fields

from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.dry_run import Miss, dry_run
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry, Source
from tmm_core.settings import Settings
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.kernel import Traits, config_text
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import compared_at, slower_in_steady_state
from tmm_core.tuning.untried import Obstacle


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """One line of ``tmm kernels``."""

    name: str
    version: str
    plugin: str
    distribution: str
    distribution_version: str
    traits: Traits | None
    #: Why it is not in use; None if it is.
    disabled: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def kernel_infos(registry: Registry, settings: Settings) -> list[KernelInfo]:
    """Kernels in use, then plugins and kernels that are not, with reasons."""
    infos = []
    for kernel in registry.kernels():
        off = kernel.name in settings.disable
        why = "disabled by TMM_DISABLE or override" if off else kernel.fault
        source: Source = kernel.source
        infos.append(KernelInfo(kernel.name, kernel.version, *source, kernel.traits, why))
    for fault in registry.faults():
        source = fault.source
        infos.append(KernelInfo(f"{source.plugin}.*", "", *source, None, fault.reason))
    return infos


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Why a kernel serves a problem. ``str()`` is for people, ``to_json()`` for programs."""

    problem: Problem
    #: The choice; on a miss, the untuned choice that the settings do not allow.
    choice: Choice
    #: Set if there is no record and the settings allow no untuned choice.
    miss: Miss | None
    #: The record that answers, and the problem for which it was measured.
    record: TuningRecord | None
    measured: Problem | None
    #: Kernels that are not candidates, with their reasons.
    rejected: Mapping[str, list[str]]
    #: Kernels that are candidates.
    able: tuple[str, ...]
    #: The kernels that the environment left untried, and what failed.
    untried: Mapping[str, str]
    store: str

    @property
    def kernel(self) -> str:
        """Name of the kernel that would run; on a miss, of the untuned choice."""
        return self.choice.candidate.kernel.name

    @property
    def origin(self) -> str:
        """The source of the choice; on a miss ``tune`` or ``error``."""
        return self.choice.origin if self.miss is None else self.miss.action

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": self.problem.to_json(),
            "gpu": self.problem.device.gpu,
            "kernel": self.kernel,
            "config": self.choice.candidate.fields,
            "origin": self.origin,
            "reason": self.choice.reason if self.miss is None else self.miss.reason,
            "arithmetic": self.choice.arithmetic,
            "measured": self.measured.to_json() if self.measured else None,
            "record": self.record.to_json() if self.record else None,
            "able": list(self.able),
            "untried": dict(self.untried),
            "rejected": dict(self.rejected),
            "cache": self.store,
        }

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Explanation {self.problem}: {self.choice.candidate}, {self.origin}>"

    def text(self, width: int = console.PIPED) -> str:
        """Return the text of ``str()``, in lines of at most ``width`` columns."""
        lines = []
        for name, text in self._facts():
            lines += console.paragraph(f"{name:<10}{text}", width, hanging=10)
        if self.record is not None:
            columns, rows = _measurements(self.record)
            shown: list[tuple[str, ...] | str] = []
            for *cells, config, note in rows:
                shown += [tuple(cells), "; ".join(filter(None, (config, note)))]
            lines += console.table(columns[:-2], shown, width, right=columns[1:-2])
        for name, text in self._others():
            lines += console.paragraph(f"{name:<10}{text}", width, hanging=10)
        return "\n".join(lines)

    def _facts(self) -> Iterator[tuple[str, str]]:
        choice = self.choice
        yield "problem", str(self.problem)
        yield "device", self.problem.device.gpu
        if self.miss is None:
            yield "chosen", str(choice.candidate)
        else:
            tuned = self.miss.action == "tune"
            yield "miss", f"{'would be tuned:' if tuned else 'would raise'} {self.miss.reason}"
            yield "untuned", str(choice.candidate)
        yield "because", f"{choice.origin}: {choice.reason}"
        if choice.arithmetic is not None:
            yield "sums by", f"{choice.arithmetic}, as all M of this weight"
        if self.measured is not None and self.measured.extent != self.problem.extent:
            along = self.problem.along.upper()
            own = f"{along}={self.problem.extent}"
            yield "measured", f"at {along}={self.measured.extent}, the bucket of {own}"
        if self.record is None:
            yield "record", f"none in {self.store}"
        else:
            at = ", ".join(map(str, compared_at(self.record)))
            yield "record", f"{self.record.created}, {self.record.tuning_seconds:.1f} s of tuning"
            yield "clock", f"{CLOCK}, at {self.record.along.upper()}={at}"

    def _others(self) -> Iterator[tuple[str, str]]:
        timed = {c.kernel for c in self.record.candidates} if self.record else set()
        for name in self.able:
            if name in self.untried:
                yield "untried", f"{name}: {self.untried[name]}"
        unmeasured = [name for name in self.able if name not in timed | {*self.untried}]
        if unmeasured:
            yield "able", f"{', '.join(unmeasured)} (not measured)"
        for names, reasons in alike(sorted(self.rejected.items())):
            yield "rejected", f"{', '.join(names)}: {'; '.join(reasons)}"


def alike(pairs: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[list[str], Sequence[str]]]:
    """Group names by their texts, in the order in which each text first appears."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, texts in pairs:
        groups.setdefault(tuple(texts), []).append(name)
    return [(names, texts) for texts, names in groups.items()]


def explain_problem(dispatcher: Dispatcher, problem: Problem, settings: Settings) -> Explanation:
    """Explain what ``dispatcher`` does with ``problem``, without measuring or launching."""
    choice, miss = dry_run(dispatcher, problem, settings)
    found = dispatcher.record(problem)
    rejected = dispatcher.rejections(problem, settings)
    able = [k.name for k in dispatcher.registry.kernels() if k.name not in rejected]
    key = dataclasses.replace(problem.bare(), batch_invariant=problem.batch_invariant)
    noted = dispatcher.untried.get(found[0] if found else bucketed(key))
    left = {} if noted is None else {name: why for (name, _), why in noted.kernels.items()}
    return Explanation(
        problem=problem,
        choice=choice,
        miss=miss,
        record=found[1] if found else None,
        measured=found[0] if found else None,
        rejected=rejected,
        able=tuple(able),
        untried={name: _reason_untried(left[name]) for name in able if name in left},
        store=str(dispatcher.store.root),
    )


def _reason_untried(left: Obstacle) -> str:
    """Return the reason why a kernel is untried, and when it is tried again, in one line."""
    when = {
        "passing": "by later processes, and by `tmm tune`",
        "budget": "by `tmm tune`, or when the toolchain changes",
    }
    usual = "when the toolchain changes (`tmm doctor` shows it), and by `tmm tune`"
    reason = " ".join(left.reason.split())
    return f"{reason}; tried again {when.get(left.cause, usual)}"


def _measurements(record: TuningRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns and rows of a record's candidates: timed ones, fastest first; then eliminated,
    wrong and failed ones. The last two columns are text."""
    own, along = record.extent, record.along.upper()
    inside = [m for m in compared_at(record) if m != own]
    baseline, slower = record.blas_us, slower_in_steady_state(record.candidates)
    steady = any(c.steady_us is not None for c in record.candidates)
    columns = ["kernel", f"µs at {along}={own}", "vs blas"]
    columns += ["µs in steady state"] if steady else []
    columns += [f"µs at {along}={m}" for m in inside]
    order = ("ok", "slow", "wrong", "failed")
    rows = []
    for result in sorted(
        record.candidates, key=lambda c: (order.index(c.status), c.median_us or float("inf"))
    ):
        time_us = result.median_us
        ratio = f"{baseline / time_us:.2f}×" if baseline and time_us else problem_fields.ABSENT
        others = ([result.steady_us] if steady else []) + [result.inside_us.get(m) for m in inside]
        error = f"{result.error:.1e}" if result.error is not None else problem_fields.ABSENT
        config = config_text(result.config)
        if result is record.best:
            note = "← winner"
        elif result in slower:
            note = "slower than blas in steady state"
        else:
            words = {"ok": "", "slow": "eliminated early"}
            note = result.reason or words.get(result.status, result.status)
        times = map(_shown_us, others)
        rows.append((result.kernel, _shown_us(time_us), ratio, *times, error, config, note))
    return (*columns, "error", "config", ""), rows


def _shown_us(time_us: float | None) -> str:
    return f"{time_us:.1f}" if time_us else problem_fields.ABSENT
