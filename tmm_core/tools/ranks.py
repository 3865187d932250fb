"""Distributed tuning: divides problems among ranks, and gives all ranks the same records.

Ranks that tune separately may choose differently. So one rank measures each problem and every
rank uses that record. The ranks exchange records through the process group's store. Keys are
written once and polled, without blocking waits: after a timeout, the others take over the problems
of a rank that died or hangs. No collective is entered, since a collective that one rank fails to
join would hang all.

Where the ranks have to agree (which ranks are lost, which problems remain), the first proposal in
the store wins.

Importing this module also registers the sharding rules (:mod:`tmm_core.interop.sharding`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from tmm_base.guards import suppress
from tmm_cache import TuningRecord

from tmm_core import api, dispatch, settings
from tmm_core.dispatch.measuring import LOCK_PATIENCE
from tmm_core.errors import error_text, reraise, warn
from tmm_core.interop import sharding  # noqa: F401  # registers its rules
from tmm_core.launch import warm
from tmm_core.spec.problem import Problem
from tmm_core.tuning.compile_pool import COMPILE_LIMIT

#: Attempts at a problem: a second one, since the first may have killed its rank.
ATTEMPTS = 2

#: Seconds between two polls of the store per awaited rank, since one store serves all.
PAUSE = 0.02


def tune(
    problems: Problem | Iterable[Problem],
    group: dist.ProcessGroup | None = None,
    *,
    force: bool = False,
    budget: float | None = None,
    timeout: float | None = None,
) -> list[TuningRecord]:
    """Measure problems once among all ranks of a group; every rank then makes the same choices.

    Call it on every rank with the same problems in the same order, after
    ``torch.cuda.set_device``. Each rank measures its share on its current device. It adopts all
    records, in memory for the life of the process, and in its own cache if that is writable.
    Problems describe local tensors: make them from shards, not from DTensors.

    Args:
        problems: From :func:`tmm_core.problem`, one or many.
        group: The ranks; all by default.
        force: Also measure problems that have a record.
        budget: Seconds per problem (``TMM_TUNE_BUDGET``).
        timeout: Seconds without a new measurement, or without joining, after which a rank counts
            as lost; one whose call raises is lost at once. Default: the longest time of one
            problem, which is a minute and four budgets, during which another process may be
            measuring the problem.

    Returns:
        One record per problem, the same on every rank. A problem that no rank could measure is
        left out with a warning; a warning also names lost ranks.

    Raises:
        ValueError: The ranks pass different problems or have different kinds of GPU or versions,
            or this rank is not in the group.
        torch.distributed.DistError: The process that holds the store is gone.
    """
    # The ranks of the backend "fake" are one process.
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return api.tune(_listed(problems), force=force, budget=budget)
    # Before anything that may fail: all ranks must count the same number of calls.
    board = _Board.of(group)
    try:
        with nullcontext() if budget is None else settings.override(tune_budget=budget):
            current, problems = settings.current(), _listed(problems)
            alone = [each for each in problems if not each.epilogue.lasting]
            for problem in dict.fromkeys(alone):
                warn(
                    f"{problem} is not tuned: only this rank knows its epilogue, whose functions "
                    f"are in no file or have closures; ranks may choose differently for it"
                )
            problems = [each for each in problems if each.epilogue.lasting]
            if timeout is None:
                timeout = LOCK_PATIENCE * current.tune_budget + COMPILE_LIMIT
            request = _digest(problems)
            while board.missed(request):
                board = _Board.of(group)
            board = replace(board, timeout=timeout)
            board.put(f"asked/{board.me}", request)
            return _tune(board, problems, current, force)
    except BaseException as error:
        with suppress(Exception):  # the store may be gone
            board.put(f"failed/{board.me}", error_text(error))
        raise


def _listed(problems: Problem | Iterable[Problem]) -> list[Problem]:
    return [problems] if isinstance(problems, Problem) else list(problems)


def _tune(
    board: _Board, problems: Sequence[Problem], current: settings.Settings, force: bool
) -> list[TuningRecord]:
    found, lost = _measure_all(board, problems, current, force)
    records: dict[int, TuningRecord] = {}
    for index, key in sorted(found.items()):
        record = TuningRecord.from_json(board.get(key)["record"])
        dispatch.default_dispatcher().adopt(problems[index], record)
        records[index] = record
    warm.forget_plans()
    _compare(board, problems, lost)
    return list(records.values())


def _measure_all(
    board: _Board, problems: Sequence[Problem], current: settings.Settings, force: bool
) -> tuple[dict[int, str], set[int]]:
    """The key of each problem's record in the store, and the ranks that were lost."""
    found: dict[int, str] = {}
    failed: dict[int, str] = {}
    lost: set[int] = set()
    owner: dict[int, int] = {}
    for attempt in range(ATTEMPTS):
        pending = [index for index in range(len(problems)) if index not in found]
        crew = [rank for rank in board.ranks if rank not in lost]
        if not pending or not crew:
            break
        for place, index in enumerate(pending):
            others = [rank for rank in crew if rank != owner.get(index)] or crew
            owner[index] = others[place % len(others)]
        shares = {rank: [i for i in pending if owner[i] == rank] for rank in crew}
        verdict = f"verdict/{attempt}"
        for index in shares.get(board.me, ()):
            if board.has(verdict):  # this rank has been given up
                break
            board.put(f"result/{attempt}/{index}", _measure(problems[index], current, force))
        agreed = board.agree(verdict, _watch(board, attempt, shares))
        lost |= set(agreed["lost"])
        for index, error in agreed["ended"]:
            if error is None:
                found[index] = f"result/{attempt}/{index}"
            else:
                failed[index] = error
    for why in sorted({board.fate(rank) for rank in lost}):
        those = _list(rank for rank in lost if board.fate(rank) == why)
        warn(f"rank {those} {why}; the other ranks measured its problems")
    for index, problem in enumerate(problems):
        if index not in found:
            warn(
                f"{problem} could not be tuned: "
                f"{failed.get(index, 'each rank that tried was lost')}; "
                f"ranks may choose differently for it"
            )
    return found, lost


def _measure(problem: Problem, current: settings.Settings, force: bool) -> dict[str, Any]:
    try:
        return {
            "record": dispatch.default_dispatcher().tune(problem, current, force=force).to_json()
        }
    except Exception as error:  # the other ranks wait for a result, even a failure
        reraise(error)
        return {"error": error_text(error)}


def _watch(board: _Board, attempt: int, shares: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The results of an attempt, once all ranks have finished their shares or are overdue."""
    awaited = {
        rank: [f"asked/{rank}", *(f"result/{attempt}/{index}" for index in share)]
        for rank, share in shares.items()
    }
    lost = board.await_all(awaited, until=f"verdict/{attempt}")
    ended = [
        (index, board.get(key).get("error"))
        for share in shares.values()
        for index in share
        if board.has(key := f"result/{attempt}/{index}")
    ]
    return {"lost": lost, "ended": ended}


def _compare(board: _Board, problems: Sequence[Problem], lost: set[int]) -> None:
    """Compare the choices of the ranks with each other."""
    chooser = dispatch.default_dispatcher()
    with settings.override(on_cache_miss="heuristic") as current:
        chosen = [chooser.choose(problem, current).candidate for problem in problems]
    mine: dict[str, Any] = {
        "kernels": [f"{kernel.name} {kernel.version}" for kernel in chooser.registry.kernels()],
        "choices": [[c.kernel.name, c.kernel.version, c.fields] for c in chosen],
        "gpu": _gpu(problems),
    }
    board.put(f"chose/{board.me}", mine)
    others = [rank for rank in board.ranks if rank != board.me and rank not in lost]
    silent = board.await_all({rank: [f"chose/{rank}"] for rank in others})
    for rank in others:
        theirs = None if rank in silent else board.get(f"chose/{rank}")
        if theirs is None:
            note = f"rank {rank} did not report its choices: it {board.fate(rank)}"
        elif mine["gpu"] is not None and theirs["gpu"] == mine["gpu"]:
            note = (
                f"ranks {board.me} and {rank} measured on the same GPU, which distorts their "
                f"times; call torch.cuda.set_device() first"
            )
        elif theirs["kernels"] == mine["kernels"] and theirs["choices"] == mine["choices"]:
            continue
        elif theirs["kernels"] != mine["kernels"]:
            unlike = set(theirs["kernels"]) ^ set(mine["kernels"])
            note = f"ranks {board.me} and {rank} have different kernels: {_list(unlike)}"
        else:
            pairs = zip(problems, mine["choices"], theirs["choices"], strict=True)
            unlike = {str(problem) for problem, ours, other in pairs if ours != other}
            note = f"ranks {board.me} and {rank} choose differently for {_list(unlike)}"
        warn(note)
    # The first rank may hold the store, so it leaves last.
    board.put(f"left/{board.me}", True)
    if board.me == board.ranks[0]:
        board.await_all({rank: [f"left/{rank}"] for rank in others if rank not in silent})


@dataclass(frozen=True, slots=True)
class _Board:
    """The group's store as a board of JSON documents, each written once."""

    store: Any
    #: Global ranks of the group, and this process's.
    ranks: list[int]
    me: int
    timeout: float = 0.0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> _Board:
        """A clean board for the group's next tuning.

        Raises:
            ValueError: This process is not in the group.
        """
        me = dist.get_rank()
        # If this process is not in the group, torch passes a placeholder that is not a group.
        member = dist.get_rank(group) >= 0
        ranks = dist.get_process_group_ranks(group) if member else []
        if me not in ranks:
            raise ValueError(f"rank {me} is not in the group that tunes")
        everything = dist.distributed_c10d._get_default_store()
        name = "tmm/tune/" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        # Counted in the store, so that restarted ranks continue the others' count.
        turn = everything.add(f"{name}/{me}", 1)
        store = dist.PrefixStore(f"{name}/{turn}", everything)  # type: ignore[attr-defined]
        return cls(store, ranks, me)

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def get(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def put(self, key: str, document: Any) -> None:
        self.store.set(key, json.dumps(document))

    def agree(self, key: str, proposal: Any) -> Any:
        """The document under ``key``: the first proposal by any rank."""
        return json.loads(self.store.compare_set(key, "", json.dumps(proposal)))

    def missed(self, request: Any) -> bool:
        """Whether the other ranks tuned something else here, and gave this rank up."""
        if not self.has("verdict/0") or self.me not in self.get("verdict/0")["lost"]:
            return False
        joined = [key for rank in self.ranks if self.has(key := f"asked/{rank}")]
        return request not in map(self.get, joined)

    def fate(self, rank: int) -> str:
        """Return what became of a rank that did not finish."""
        if self.has(key := f"failed/{rank}"):
            return f"ended its tuning with {self.get(key)}"
        return f"showed no sign of life for {self.timeout:g} s"

    def await_all(
        self, awaited: Mapping[int, Sequence[str]], until: str | None = None
    ) -> list[int]:
        """Poll for each rank's keys, in order, until all exist. Stop if a rank that lacks some has
        failed, or has added none for ``timeout`` seconds. Return these ranks. Stop once ``until``
        exists.

        Raises:
            ValueError: Another rank tunes something else.
        """
        missing = {rank: list(keys) for rank, keys in awaited.items() if keys}
        seen = dict.fromkeys(missing, time.monotonic())
        while missing:
            for rank, keys in list(missing.items()):
                failed = self.has(f"failed/{rank}")  # read first: a failed rank adds no key later
                while keys and self.has(keys[0]):
                    self._check_same_request(keys.pop(0))
                    seen[rank] = time.monotonic()
                if failed:
                    seen[rank] = -math.inf
                if not keys:
                    del missing[rank]
            overdue = time.monotonic() - self.timeout
            if all(seen[rank] < overdue for rank in missing):
                break
            if until is not None and self.has(until):
                break
            time.sleep(PAUSE * len(missing))
        return sorted(missing)

    def _check_same_request(self, key: str) -> None:
        kind, _, rank = key.partition("/")
        if kind != "asked":
            return
        mine, theirs = self.get(f"asked/{self.me}"), self.get(key)
        if mine != theirs:
            unlike = ", ".join(part for part in mine if mine[part] != theirs[part])
            raise ValueError(
                f"ranks {self.me} and {rank} tune different things: they differ in {unlike}"
            )


def _digest(problems: Sequence[Problem]) -> dict[str, Any]:
    """The data that must be the same on every rank."""
    text = json.dumps([problem.to_json() for problem in problems])
    devices = {json.dumps(problem.device.environment) for problem in problems}
    return {
        "problems": f"{len(problems)} {hashlib.sha256(text.encode()).hexdigest()[:16]}",
        "devices": sorted(devices),
    }


def _gpu(problems: Sequence[Problem]) -> str | None:
    """The GPU that this rank measures on, if any."""
    if not any(problem.device.type == "cuda" for problem in problems):
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _list(items: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(items)))
