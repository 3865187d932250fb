"""The benchmark problems, by class, from ``suite.json``."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
import math
import random
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tmm_core.bench.case import Case, parse_dtype, parse_expression
from tmm_core.bench.results import RANDOM
from tmm_core.formats import IMPLIED
from tmm_core.spec.operand import dtype_name

#: The class of problems on which single kernels are timed (``tmm bench --kernel``).
SWEEP = "sweep"


@dataclass(frozen=True, slots=True)
class Task:
    """A case and its class."""

    suite: str
    case: Case
    #: Measured in batch-invariant mode.
    batch_invariant: bool = False
    #: Tuned at the edge of its bucket of M, as a serving loop tunes, instead of at its own M.
    bucketed: bool = False


#: Suffix of the names of classes whose problems were tuned without any record.
UNRECORDED = " without records"

#: Random problems: the largest M; weights N×K of models (projections of Llama 3 8B, Qwen 2.5 14B
#: and 32B, Llama 3 70B on eight GPUs, Mistral 7B and GPT-2 XL); epilogues.
LARGEST_M = 8192
WEIGHTS = (
    (6144, 4096), (4096, 4096), (4096, 14336), (7168, 5120), (5120, 5120), (5120, 13824),
    (27648, 5120), (13824, 5120), (1280, 8192), (8192, 3584), (4096, 7168), (6400, 1600),
)  # fmt: skip
EXPRESSIONS = ("", "", "silu", "gelu_tanh", "bias", "bias+gelu_tanh+residual", "residual", "swiglu")


@functools.cache
def shipped() -> dict[str, Any]:
    """The suites in ``suite.json``, by name."""
    text = importlib.resources.files(__package__).joinpath("suite.json").read_text("utf-8")
    return {name: suite for name, suite in json.loads(text).items() if name != "_doc"}


def random_problems(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Task]:
    """The same random problems in each process, with M log-uniform in 1 … :data:`LARGEST_M`."""
    generator = random.Random(0)
    found = []
    for _ in range(count):
        m = round(math.exp(generator.uniform(0, math.log(LARGEST_M))))
        n, k = generator.choice(WEIGHTS)
        expression = parse_expression(generator.choice(EXPRESSIONS))
        case = Case(m=m, n=n, k=k, dtype=dtype, layout="nt", **expression)
        found.append(Task(RANDOM, case, bucketed=True))
    return found


def select(
    names: Sequence[str], *, dtype: torch.dtype | None = None, limit: int | None = None
) -> list[Task]:
    """The tasks of the named suites (``["all"]``: every suite).

    Args:
        dtype: Only tasks of this dtype.
        limit: At most this many of each suite.

    Raises:
        ValueError: A suite that does not exist, or none of their problems has this dtype.
    """
    suites = shipped()
    if unknown := sorted(set(names) - set(suites) - {"all"}):
        raise ValueError(f"unknown suite {', '.join(unknown)}; there are all, {', '.join(suites)}")
    wanted = list(suites) if "all" in names else list(dict.fromkeys(names))
    tasks: list[Task] = []
    for name in wanted:
        members = (t for t in expand(name, suites[name]) if dtype in (None, t.case.dtype))
        tasks += itertools.islice(members, limit)
    if wanted and not tasks and dtype is not None:
        raise ValueError(f"no problem of {', '.join(wanted)} has dtype {dtype_name(dtype)}")
    return tasks


def expand(name: str, suite: Mapping[str, Any]) -> list[Task]:
    """Every combination of a suite's dtypes, layouts, epilogues, precisions, scales and
    shapes. 8-bit operands have tensor-wise scales unless the suite says otherwise."""
    invariant = bool(suite.get("batch_invariant", False))
    if "like" in suite:
        like = [(other, shipped()[other]) for other in _listed(suite["like"])]
        return [Task(name, task.case, invariant) for other in like for task in expand(*other)]
    layouts, shapes = _listed(suite.get("layout", "nn")), _shapes(suite)
    dtypes = [parse_dtype(text) for text in _listed(suite["dtypes"])]
    expressions = [parse_expression(text) for text in _listed(suite.get("epilogues", ""))]
    precisions = _listed(suite.get("precision", "ieee"))
    scales = _listed(suite.get("scales", "tensor"))
    groups = {"ragged": suite.get("ragged", "m"), "routing": suite.get("routing", "both")}
    experts = "experts" in suite
    sizes = ("groups" if experts else "batch", "m", "n", "k")
    fields: Iterable[Sequence[dict[str, Any]]] = itertools.product(
        [
            {"dtype": dtype, "scales": kind}
            for dtype in dtypes
            for kind in (scales if dtype in IMPLIED else [""])
        ],
        [{"tf32": precision == "tf32"} for precision in precisions],
        [{"layout": layout} for layout in layouts],
        expressions,
        [dict(zip(sizes[-len(shape) :], shape, strict=True)) for shape in shapes],
    )
    common = groups if experts else {}
    return [Task(name, Case(**common, **ChainMap(*each)), invariant) for each in fields]


def _shapes(suite: Mapping[str, Any]) -> list[Sequence[int]]:
    """The listed shapes, or every weight ``[N, K]`` with every number of rows, or all experts
    ``[groups, N, K]`` with every total number of rows. If K is ragged, the rows are K and experts
    are ``[groups, N, M]``."""
    if "experts" in suite:
        listed = suite["experts"]
        if suite.get("ragged") == "k":
            return [(g, m, n, rows) for g, n, m in listed for rows in suite["rows"]]
        return [(g, rows, n, k) for g, n, k in listed for rows in suite["rows"]]
    if "weights" not in suite:
        return list(suite["shapes"])
    return [(m, n, k) for n, k in suite["weights"] for m in suite["rows"]]


def _listed(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
