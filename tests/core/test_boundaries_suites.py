"""Each check of a conformance suite passes right values at its limits, and fails wrong ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import conformance_problems
import pytest
import torch
from _pytest.outcomes import Failed, Skipped
from fakes import FakeConfig, FakeKernel, problem

from tmm_core import Epilogue, Operand, PluginError, Port, Problem, Scale, Traits, epilogues
from tmm_core.epilogues import BUILTIN
from tmm_core.formats import Format, named
from tmm_core.spec.launcher import Bound
from tmm_core.spec.precision import precision
from tmm_core.testing import (
    EpilogueConformance,
    FormatConformance,
    KernelConformance,
    conformance,
    epilogue_conformance,
    probe_problems,
)
from tmm_core.triton.interpreted import REMEDY

F32 = torch.float32
TRAITS = Traits(deterministic=True, batch_invariant=True)
UNCLAIMED = Traits(deterministic=False, batch_invariant=False)


def run(check: Callable[..., None], *arguments: Any) -> None:
    """Run a check, and fail if it skips: its skip would skip the test here."""
    try:
        check(*arguments)
    except Skipped as skipped:
        raise LookupError("the check was skipped") from skipped


def test_the_suite_has_the_problems_of_the_table() -> None:
    """``python tests/conformance_problems.py`` writes it."""
    table = conformance_problems.FILE.read_text(encoding="utf-8").splitlines()
    assert list(conformance_problems.lines()) == table


# -- kernels ------------------------------------------------------------------------------


class Exact(FakeKernel):
    """The product in fp64, rounded once, plus an error that a test chooses by rows, tile and number
    of the run."""

    def __init__(
        self,
        more: Callable[[int, int, int], float] = lambda rows, tile, run: 0.0,
        sums: Callable[[int], str | None] = lambda tile: "fp64",
        **fields: Any,
    ) -> None:
        super().__init__("exact", **{"traits": TRAITS, **fields})
        self.more, self.sums = more, sums

    def arithmetic(self, problem: Problem, config: FakeConfig) -> str | None:
        return self.sums(config.tile)

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        runs = itertools.count()

        def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            more = self.more(a.shape[-2], config.tile, next(runs))
            y = (a.double() @ b.double() + more).to(problem.out.dtype)
            return y if out is None else out.copy_(y)

        return launch


def suite(kernel: Any, **fields: Any) -> Any:
    """The suite on problems of 35 rows."""
    small = {"size": (40, 8, 16), "dtypes": (F32,), "device": "cpu"}
    return type("Suite", (KernelConformance,), {**small, "kernel": kernel, **fields})()


def test_the_registry_accepts_a_kernel() -> None:
    suite(FakeKernel("own.kernel")).test_registers()
    with pytest.raises(PluginError, match="has no name"):
        suite(FakeKernel("")).test_registers()


@pytest.mark.parametrize(
    ("named", "gpu", "interpreted", "found"),
    [
        (None, True, False, "cuda:3"), (None, True, True, "cpu"), (None, False, False, "cpu"),
        ("cpu", True, False, "cpu"), ("cuda", False, True, "cuda:3"), ("meta", True, False, "meta"),
    ],
)  # fmt: skip
def test_a_suite_runs_on_the_device_that_it_names(
    named: str | None, gpu: bool, interpreted: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is the current GPU, unless kernels are interpreted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(probe_problems, "interpreting", lambda: interpreted)
    assert suite(FakeKernel("k"), device=named)._device() == torch.device(found)


@pytest.mark.parametrize("tf32", [False, True])
def test_a_kernel_is_launched_under_the_precision_of_its_problem(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a test launches it itself, without a verifier."""
    seen = set()

    class Reads(Exact):
        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            launch = super().bind(problem, config)

            def read(*given: Any) -> Any:
                seen.add(torch.backends.cuda.matmul.fp32_precision == "tf32")
                return launch(*given)

            return read

    checked = suite(Reads(), slack=1000.0)
    instance = replace(checked._probe(), tf32=tf32)
    monkeypatch.setattr(checked, "fine_grained", lambda: [instance])
    for check in (
        lambda: checked._check(instance), checked.test_deterministic, checked.test_batch_invariant,
    ):  # fmt: skip
        with precision(not tf32):
            check()
        assert seen == {tf32}
        seen.clear()


@pytest.mark.parametrize(
    ("test", "repeated"),
    [
        *((name, False) for name in ("sizes", "dtypes", "epilogues", "terms", "scales", "empties")),
        *((name, True) for name in ("layouts", "batches", "verification", "outputs", "ragged")),
    ],
)
def test_how_often_a_test_launches_a_kernel(test: str, repeated: bool) -> None:
    """This kernel is right in its first two launches: without ``out``, and into one."""
    checked = suite(Exact(lambda rows, tile, number: float(number > 1)))
    with pytest.raises(Failed) if repeated else contextlib.nullcontext():
        run(getattr(checked, f"test_{test}"), checked._probe())


@pytest.mark.parametrize("test", ["use", "use_of_ragged"])
def test_tests_of_use_launch_a_kernel_from_two_threads(
    test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.get_ident()
    checked = suite(Exact(lambda rows, tile, number: float(threading.get_ident() != main)))
    monkeypatch.setattr(checked, "ragged_in_use", lambda: [checked._probe()])
    with pytest.raises(Failed, match="two threads"):
        run(getattr(checked, f"test_{test}"), *([checked._probe()] if test == "use" else []))


@pytest.mark.parametrize(
    ("test", "problems"),
    [
        ("configs", "demanding"), ("configs_of_scales", "demanding_scales"),
        ("configs_of_outputs", "probes_of_outputs"),
    ],
)  # fmt: skip
def test_each_config_is_tried_on_the_first_problem_that_is_served(
    test: str, problems: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Exact(lambda rows, tile, number: float(tile == 3), tiles=(1, 2, 3))
    wrong.against = lambda p: ["too few"] * (p.m < 4)
    checked = suite(wrong)
    sizes = ((3, 8, 16), (5, 8, 16), (6, 8, 16))
    monkeypatch.setattr(checked, problems, lambda: [checked._probe(size) for size in sizes])
    with pytest.raises(Failed, match=r"wrong on 5x8x16.*\ntile=3: error"):
        run(getattr(checked, f"test_{test}"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_dtype_that_is_not_declined_is_verified(dtype: torch.dtype) -> None:
    of_float64 = FakeKernel("k", spoil=lambda y: y + (y.dtype is torch.float64))
    wrong = dtype is torch.float64
    with pytest.raises(Failed, match="k is wrong") if wrong else contextlib.nullcontext():
        run(suite(of_float64).test_other_dtypes_are_declined_or_right, dtype)


@pytest.mark.parametrize(
    ("wrong", "fails"), [("a", True), ("h", True), ("i", False), ("default", False)]
)
def test_eight_configs_of_one_row_are_tried_on_more_rows(wrong: str, fails: bool) -> None:
    """They are the first by their texts, of those that the problem itself does not have."""

    @dataclass(frozen=True, kw_only=True)
    class Named(FakeConfig):
        name: str = ""

    class OfOneRow(Exact):
        def configs(self, problem: Problem) -> Any:
            return [Named(name=name) for name in reversed("abcdefghi")] if problem.m == 1 else []

        def default_config(self, problem: Problem) -> Any:
            return Named(name="default")

        def bind(self, problem: Problem, config: Any) -> Any:
            assert problem.m == 35
            if config.name == "b":
                raise ValueError("a refusal")
            launch = super().bind(problem, config)
            return lambda *given: launch(*given).add_(config.name == wrong)

    kernel = OfOneRow(against=lambda p: ["a bias"] if p.bias else [])
    with pytest.raises(Failed, match=f"name={wrong}:") if fails else contextlib.nullcontext():
        run(suite(kernel, max_configs=9).test_configs_of_one_row)


def test_each_tile_is_computed_in_every_form_of_a_launcher() -> None:
    class WrongInNd(Exact):
        """Only the form of N-D operands is wrong, in the last of 20 rows."""

        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            launch = super().bind(problem, config)

            def folded(fold: Any, a: Any, b: Any, residual: Any, by_views: Any) -> Any:
                def wrong(*given: Any) -> Any:
                    result = by_views(*given)
                    result[..., 19:20, :] += 1
                    return result

                return wrong

            return Bound(launch, folded)

    with pytest.raises(Failed, match=r"exact is wrong on 20x16x16.*\n.*called with N-D operands"):
        run(suite(WrongInNd()).test_every_tile)


@pytest.mark.parametrize(
    ("differs", "fault"), [(0, "run 1 "), (1, "run 1 "), (2, "run 2 "), (3, "")]
)
def test_runs_of_a_deterministic_kernel_must_agree(differs: int, fault: str) -> None:
    checked = suite(Exact(lambda rows, tile, run: float(run == differs)))
    if not fault:
        run(checked.test_deterministic)
        return
    with pytest.raises(AssertionError, match=fault):
        run(checked.test_deterministic)


@pytest.mark.parametrize("writes", ["all", "all but a row", "a sum"])
def test_outputs_hold_nan_before_a_kernel_writes_them(writes: str) -> None:
    """Zeros would agree with themselves where nothing is written, and add nothing to a sum."""

    class Partial(Exact):
        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            launch = super().bind(problem, config)

            def part(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
                y = launch(a, b, bias, residual, alpha, None)
                if writes == "a sum":
                    return out.mul_(0).add_(y)
                rows = y.shape[0] - (writes != "all")
                out[:rows] = y[:rows]
                return out

            return part

    checked = suite(Partial())
    if writes == "all":
        run(checked.test_deterministic)
        return
    for test in (checked.test_deterministic, checked.test_arithmetic):
        with pytest.raises(AssertionError, match=r"differs? "):
            run(test)


def test_undeclared_traits_are_not_tested() -> None:
    checked = suite(Exact(lambda rows, tile, run: run, traits=UNCLAIMED))
    for test in (checked.test_deterministic, checked.test_arithmetic, checked.test_batch_invariant):
        with pytest.raises(Skipped, match="claims no"):
            test()


@pytest.mark.parametrize(
    ("tiles", "names", "found"),
    [
        ((1, 2), ("x", "x"), None),
        ((1, 2, 3), ("x", "x", "x"), AssertionError),
        ((1, 2, 3), ("x", "x", "y"), None),
        ((1, 2, 3), ("x", "x", None), None),
        ((1, 3), ("x", "y"), Skipped),
        ((1, 3), ("x", None), Skipped),
        ((1,), ("x",), Skipped),
    ],
)
def test_configs_of_one_arithmetic_agree(tiles: Any, names: Any, found: Any) -> None:
    """The third tile sums in another order."""
    kernel = Exact(
        lambda rows, tile, run: float(tile == 3),
        dict(zip(tiles, names, strict=True)).get,
        tiles=tiles,
    )
    if found is None:
        run(suite(kernel).test_arithmetic)
        return
    with pytest.raises(found, match=r"one arithmetic for tile=1 and tile=3|no two configs share"):
        suite(kernel).test_arithmetic()


@pytest.mark.parametrize(
    ("rows", "passes"), [(1, False), (2, False), (17, False), (34, False), (3, True)]
)
def test_a_batch_invariant_kernel_must_not_depend_on_the_rows(rows: int, passes: bool) -> None:
    checked = suite(Exact(lambda m, tile, run: float(m == rows)))
    if passes:
        run(checked.test_batch_invariant)
        return
    with pytest.raises(
        AssertionError, match=f"rows 0 to {rows} of 35 differ in {8 * rows} elements"
    ):
        run(checked.test_batch_invariant)


def test_three_configs_must_not_depend_on_the_rows() -> None:
    """The default config is one of them, and the first of the search space."""
    for tile, passes in ((1, False), (3, False), (5, False), (7, True)):
        kernel = Exact(
            lambda m, its, run, tile=tile: float(m == 2 and its == tile), tiles=(1, 3, 5, 7)
        )
        if passes:
            run(suite(kernel).test_batch_invariant)
            continue
        with pytest.raises(AssertionError, match=f"with tile={tile} rows 0 to 2 of 35"):
            run(suite(kernel).test_batch_invariant)


def test_fewer_rows_may_be_declined() -> None:
    few = Exact(lambda m, tile, run: m, against=lambda p: ["few"] * (p.m < 35))
    with pytest.raises(Skipped, match="declines fewer rows than 35"):
        suite(few).test_batch_invariant()
    one = Exact(lambda m, tile, run: float(m == 1), against=lambda p: ["one"] * (p.m == 1))
    run(suite(one).test_batch_invariant)


@pytest.mark.parametrize("name", ["test_current_stream", "test_graph_capture"])
def test_tests_on_a_gpu_are_skipped_with_the_kernels_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declining = suite(Exact(against=lambda p: ["only on Mondays"]))
    with pytest.raises(Skipped, match="streams and graphs are CUDA's"):
        getattr(declining, name)()
    monkeypatch.setattr(declining, "_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(declining, "_probe", problem)
    with pytest.raises(Skipped, match="only on Mondays"):
        getattr(declining, name)()


@pytest.mark.parametrize(
    ("wrong", "waits", "fault"),
    [(9, False, ""), (1, False, "error .* exceeds"), (9, True, "exact waits for the GPU")],
)
def test_a_launch_behind_queued_work_is_right_and_does_not_wait(
    wrong: int, waits: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(query=lambda: waits, synchronize=lambda: None)
    stand_ins: dict[str, Any] = {
        "synchronize": lambda: None,
        "_sleep": lambda cycles: None,
        "Stream": lambda: stream,
        "stream": lambda of: contextlib.nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    checked = suite(Exact(lambda m, tile, number: float(number == wrong)))
    tensors = conformance._Tensors.of(problem(), torch.device("cpu"))
    monkeypatch.setattr(checked, "_tensors_on_gpu", lambda: tensors)
    if not fault:
        run(checked.test_current_stream)
        return
    with pytest.raises((AssertionError, Failed), match=fault):
        run(checked.test_current_stream)


@pytest.mark.parametrize(
    ("time", "bytes_", "passes"),
    [
        (None, 0, True), (1e-3, 1, True), (0.0, 0, False), (-1.0, 0, False),
        (float("inf"), 0, False), (float("nan"), 0, False), (1.0, -1, False), (1.0, 1.0, False),
        (1.0, True, False),
    ],
)  # fmt: skip
def test_estimates_are_positive_or_unknown(time: Any, bytes_: Any, passes: bool) -> None:
    checked = suite(Exact(estimate=time, workspace=bytes_))
    if passes:
        run(checked.test_estimates)
        return
    with pytest.raises(AssertionError, match="tile=1: "):
        run(checked.test_estimates)


@dataclass(frozen=True, kw_only=True)
class Lossy(FakeConfig):
    def to_json(self) -> dict[str, Any]:
        return {"tile": 1}


@dataclass(frozen=True, kw_only=True)
class Lenient(FakeConfig):
    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Any:
        return cls(tile=doc["tile"])


@dataclass(frozen=True, kw_only=True)
class HashedByIdentity(FakeConfig):
    __hash__ = object.__hash__


class Undecided(Exact):
    asked = itertools.count(1)

    def default_config(self, problem: Problem) -> FakeConfig:
        return FakeConfig(tile=next(self.asked))


def of_type(kind: type[FakeConfig], given: type[FakeConfig]) -> Exact:
    kernel: Any = Exact()
    kernel.config_type = kind
    kernel.configs = lambda problem: [given(tile=2)]
    kernel.default_config = lambda problem: given(tile=2)
    return kernel


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (Undecided(), "two default configs"),
        (of_type(Lossy, Lossy), "came back as"),
        (of_type(Lenient, Lenient), "DID NOT RAISE"),
        (of_type(FakeConfig, Lenient), "is not a"),
        (of_type(HashedByIdentity, HashedByIdentity), "hash"),
        (of_type(FakeConfig, FakeConfig), ""),
    ],
    ids=["undecided", "lossy", "lenient", "another", "identity", "right"],
)
def test_well_formed_configs_pass(kernel: Any, fault: str) -> None:
    if not fault:
        run(suite(kernel).test_configs_are_well_formed)
        return
    with pytest.raises((AssertionError, Failed), match=fault):
        run(suite(kernel).test_configs_are_well_formed)


@pytest.mark.parametrize(
    "served",
    [
        lambda p: p.groups is not None,
        lambda p: p.bias is not None,
        lambda p: p.a.layout == "strided",
        lambda p: p.k == 1030,
    ],
    ids=["groups", "terms", "layouts", "sizes"],
)
def test_a_kernel_may_serve_one_kind_of_problem(served: Any) -> None:
    kernel = FakeKernel("k", against=lambda p: [] if served(p) else ["no"])
    run(suite(kernel).test_serves_something)


def test_five_reasons_are_shown_for_a_kernel_that_serves_nothing() -> None:
    """The message lists the five reasons that most problems have."""
    asked = itertools.count()

    def against(problem: Problem) -> list[str]:
        number = next(asked)
        return [name for each, name in enumerate("abcdef", 1) if number % each == 0]

    kernel = FakeKernel("k", against=lambda p: against(p)[::-1])
    with pytest.raises(Failed, match=r"on cpu: a; b; c; d; e\. Set sizes"):
        run(suite(kernel).test_serves_something)


@pytest.mark.parametrize("reasons", [[""], ["good", ""], [3], "declined"], ids=repr)
def test_reasons_are_texts(reasons: Any) -> None:
    kernel: Any = FakeKernel("k")
    kernel.reasons_against = lambda problem: reasons
    with pytest.raises(AssertionError, match=r"for \{'m': 64"):
        run(suite(kernel).test_reasons_are_strings_and_never_raise)


@pytest.mark.parametrize(("version", "passes"), [("1", True), ("", False), (1, False)])
def test_versions_are_texts(version: Any, passes: bool) -> None:
    kernel = type("Versioned", (FakeKernel,), {"version": version})("k")
    del kernel.__dict__["version"]
    if passes:
        run(suite(kernel).test_version_is_stable)
        return
    with pytest.raises(AssertionError):
        run(suite(kernel).test_version_is_stable)


@pytest.mark.parametrize("times", [1, 2])
def test_a_version_is_computed_again(times: int) -> None:
    """One that is computed once may be of this process alone."""
    numbers = itertools.chain([1] * times, itertools.count(2))
    version = functools.cached_property(lambda kernel: str(next(numbers)))
    version.__set_name__(FakeKernel, "version")
    kernel = type("Versioned", (FakeKernel,), {"version": version})("k")
    kernel.__dict__.pop("version", None)
    assert kernel.version == "1"
    with (
        pytest.raises(AssertionError, match="changes by itself")
        if times == 1
        else (contextlib.nullcontext())
    ):
        run(suite(kernel).test_version_is_stable)


def test_a_kernel_is_checked_where_it_serves() -> None:
    """Small sizes and groups may be declined, and then a reason is shown."""
    wrong = Exact(lambda m, tile, run: float(m == 20))
    with pytest.raises(Failed, match="exact is wrong on 20x16x16"):
        run(suite(wrong).test_every_tile)
    with pytest.raises(Skipped, match=r"^small$"):
        suite(Exact(against=lambda p: ["small"] * ((p.m, p.n) != (40, 8)))).test_every_tile()
    never = suite(Exact(against=lambda p: ["never"]))
    for test in (never.test_every_tile, never.test_use_of_ragged, never.test_configs_of_ragged):
        with pytest.raises(Skipped, match=r"^never$"):
            test()


def test_a_search_space_of_groups_is_tried_along_each_dimension() -> None:
    def tried(against: Callable[[Problem], list[str]]) -> list[Problem]:
        seen: list[Problem] = []
        checked = suite(FakeKernel("k", against=against))
        checked._check_search_space = seen.append
        run(checked.test_configs_of_ragged)
        return sorted(seen, key=lambda p: p.along)

    k, m, n = tried(lambda p: [])
    assert (k.along, m.along, n.along) == ("k", "m", "n")
    assert m.bias is not None  # the problem that reveals most
    assert m.groups is not None
    assert m.groups.a_index is not None
    assert k.a.layout == "col"
    (m,) = tried(lambda p: ["bias"] * (p.bias is not None) + ["others"] * (p.along != "m"))
    assert m.bias is None


def test_a_launcher_may_not_depend_on_a_later_one() -> None:
    class Last(Exact):
        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            launch = super().bind(problem, config)
            self.last = problem

            def launch_last(*given: Any) -> Any:
                return launch(*given) if self.last == problem else launch(*given).mul_(2)

            return launch_last

    checked = suite(Last())
    instance = checked._probe()
    checked._check(instance, "brief")
    with pytest.raises(Failed, match="exact is wrong on 40x8x16"):
        checked._check(instance, "whole")
    checked.kernel.against = lambda p: ["wide"] * (p != instance)
    checked.kernel.last = None
    checked._check(instance, "repeated")


@pytest.mark.parametrize("shared", [True, False])
def test_two_launchers_of_a_problem_share_nothing(shared: bool) -> None:
    class Latest(Exact):
        """If ``shared``, only the launcher that was bound last is right."""

        bound_so_far = 0

        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            launch = super().bind(problem, config)
            self.bound_so_far += 1
            mine = self.bound_so_far

            def run(*given: Any) -> Any:
                return launch(*given) if mine == self.bound_so_far else launch(*given).mul_(2)

            return run if shared else launch

    check = suite(Latest()).test_launchers_share_nothing
    if shared:
        with pytest.raises(Failed, match="exact is wrong on 40x8x16"):
            check()
    else:
        check()


def parametrized(kernel: Any, name: str, **fields: Any) -> list[Any]:
    calls: list[Any] = []
    made = suite(kernel, **fields)
    made.pytest_generate_tests(
        SimpleNamespace(
            fixturenames=["ragged" if name == "ragged" else "probe"],
            function=getattr(made, f"test_{name}"),
            parametrize=lambda fixture, values, ids: calls.append((fixture, values)),
        )
    )
    return calls


@pytest.mark.parametrize("along", [None, "m", "n", "k"])
def test_grouped_problems_are_tested_on_kernels_that_declare_them(along: str | None) -> None:
    kernel: Any = FakeKernel("k")
    kernel.supports = replace(kernel.supports, ragged=(along,) if along else ())
    ((fixture, values),) = parametrized(kernel, "ragged")
    assert fixture == "ragged"
    if along:
        assert values == list(suite(kernel).ragged_problems())
    else:
        (left_out,) = values
        assert [mark.name for mark in left_out.marks] == ["skip"]
    ((fixture, values),) = parametrized(kernel, "empties")
    assert (fixture, values) == ("probe", list(suite(kernel).probes_of_empties()))


@pytest.mark.parametrize(("dtype", "interpreted"), [(torch.bfloat16, True), (torch.bfloat16, False),
                                                    (F32, True)])  # fmt: skip
def test_the_interpreter_is_suspected_of_bf16(
    dtype: torch.dtype, interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "interpreting", lambda: interpreted)
    with pytest.raises(Failed) as caught:
        suite(FakeKernel("k"))._fail(problem(a=Operand(dtype), b=Operand(dtype)), "off")
    assert (REMEDY in str(caught.value)) is (interpreted and dtype is torch.bfloat16)


# -- epilogues ----------------------------------------------------------------------------


def of_epilogue(epilogue: Epilogue, **fields: Any) -> Any:
    return type(
        "Suite", (EpilogueConformance,), {"epilogue": epilogue, "device": "cpu", **fields}
    )()


def glu(gate: Any, up: Any) -> Any:
    return gate * gate * up


SQUARE = Epilogue("square", lambda z, by=2.0: by * z * z)
GLU = Epilogue("square_glu", glu, gated=True)
HALVES: dict[str, Any] = {"of": lambda y: y[..., ::2]}


@pytest.mark.parametrize(
    ("test", "epilogue", "fault"),
    [
        ("reference", SQUARE, ""),
        ("reference", GLU, ""),
        ("reference", replace(SQUARE, reference=lambda z, by: z[..., ::2]), r"shape \(22, 11\)"),
        ("reference", replace(SQUARE, reference=lambda z, by: z.float()), "torch.float32 for"),
        ("reference", Epilogue("shifted", lambda z, by=2.0: by * z + (by != 2) * z[:1]),
         "of other rows"),
        ("reference", Epilogue("centred", lambda z: z - 1e-9 * z[:1]), "of other rows"),
        ("linear", Epilogue("triple", lambda z: 3 * z, linear=True), ""),
        ("linear", Epilogue("more", lambda z: 3 * z + 1, linear=True), "reference is wrong"),
        ("derivative", replace(SQUARE, derivative=lambda z, by: 2 * by * z), ""),
        ("derivative", replace(SQUARE, derivative=lambda z, by: 4 * z), "derivative is wrong"),
        ("derivative", replace(GLU, derivative=lambda g, u: (2 * g * u, g * g)), ""),
        ("derivative", replace(GLU, derivative=lambda g, u: (2 * g, g * g)), "derivative is wrong"),
        ("derivative", replace(GLU, derivative=lambda g, u: (2 * g * u, g)), "derivative is wrong"),
        ("derivative", replace(GLU, derivative=lambda g, u: (2 * g * u, g * g, g)), "shorter"),
        ("derivative", replace(SQUARE, derivative=lambda z, by: (2 + 1e-8) * by * z),
         "derivative is wrong"),
        ("it_trains", GLU, ""),
        ("it_trains", Epilogue("of_the_mode", lambda z: z * (2 + torch.is_grad_enabled()),
                               derivative=lambda z: torch.full_like(z, 3)), "reference is wrong"),
        ("it_trains", Epilogue("triple", lambda z: 3 * z, linear=True,
                               output_vjp=lambda grad, y: torch.full_like(grad, 3)),
         "derivative is wrong"),
        ("it_trains", replace(SQUARE, derivative=lambda z, by: 2 * by * z), ""),
        ("it_trains", replace(SQUARE, derivative=lambda z, by: by * z), "derivative is wrong"),
        ("it_trains", replace(GLU, outputs=(Port("most", "row", reduce="max"),)), ""),
        ("output_vjp", Epilogue("exp", lambda z, by=0.5: torch.exp(by * z),
                                output_vjp=lambda grad, y, by: by * grad * y), ""),
        ("output_vjp", Epilogue("exp", lambda z, by=0.5: torch.exp(by * z),
                                output_vjp=lambda grad, y, by: 0.5 * grad * y), "output_vjp is"),
        ("output_vjp", Epilogue("exp", lambda z, by=0.5: torch.exp(by * z),
                                output_vjp=lambda grad, y, by: by * y), "output_vjp is"),
        ("output_vjp", Epilogue("exp", lambda z, by=0.5: torch.exp(by * z),
                                output_vjp=lambda grad, y, by: (1 + 1e-5) * by * grad * y),
         "output_vjp is"),
        ("outputs", replace(SQUARE, outputs=(Port("most", "row", reduce="max", of=torch.abs),)),
         ""),
        ("output_vjp", Epilogue("triple", lambda z: 3 * z, linear=True,
                                output_vjp=lambda grad, y: 3 * grad if y is None else grad), ""),
        ("outputs", replace(SQUARE, outputs=(Port("half", "row", reduce="max", **HALVES),)),
         r"`of` returned shape \(2, 11\)"),
    ],
)  # fmt: skip
def test_forms_of_an_epilogue(test: str, epilogue: Epilogue, fault: str) -> None:
    check = getattr(of_epilogue(epilogue), f"test_{test}")
    arguments = (torch.float64,) if test == "reference" else ()
    if not fault:
        run(check, *arguments)
        return
    with pytest.raises((Failed, ValueError), match=fault):
        run(check, *arguments)


@pytest.mark.parametrize("test", ["linear", "derivative", "output_vjp", "device",
                                  "device_derivative", "outputs"])  # fmt: skip
def test_forms_that_an_epilogue_does_not_have_are_skipped(test: str) -> None:
    groups = Port("groups", "group", of=lambda y: y.amax(-1), group=4)
    for epilogue in (
        SQUARE,
        replace(SQUARE, outputs=(Port("most", "row", reduce="max"),)),
        replace(SQUARE, outputs=(groups,)),
        replace(SQUARE, device_derivative=glu),
    ):
        with pytest.raises(Skipped):
            getattr(of_epilogue(epilogue), f"test_{test}")()


@pytest.mark.parametrize("wrong", [None, "square", "square(2.0)", "square@", "square+softcap(30)"])
def test_each_text_of_an_epilogue_is_read_back(
    wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(text: str, known: Any = BUILTIN) -> Epilogue:
        found = epilogues.parse(text, known)
        is_wrong = text == wrong or (wrong == "square@" and text == SQUARE.key)
        return found.with_parameters(3.0) if is_wrong and "+" not in text else (
            epilogues.parse("tanh") if is_wrong else found
        )  # fmt: skip

    monkeypatch.setattr(epilogue_conformance, "parse", parse)
    check = of_epilogue(SQUARE).test_it_goes_by_its_name
    with pytest.raises(AssertionError) if wrong else contextlib.nullcontext():
        check()


def test_a_builtin_epilogue_goes_by_its_name() -> None:
    """It is registered already."""
    of_epilogue(BUILTIN["silu"]).test_it_goes_by_its_name()


@pytest.mark.parametrize(
    ("suite_", "test", "found"),
    [
        (EpilogueConformance, "reference", [torch.float64, F32, torch.bfloat16, torch.float16]),
        (KernelConformance, "other_dtypes_are_declined_or_right",
         [torch.float64, torch.int8, torch.int32, torch.complex64]),
        (FormatConformance, "products",
         [(5, 40, 72, None, 0), (5, 40, 72, "swiglu", 1), (1, 24, 40, "silu", 0),
          (1, 24, 40, "swiglu", 1), (19, 33, 57, None, 0), (19, 33, 57, "silu", 1)]),
    ],
)  # fmt: skip
def test_cases_of_a_test(suite_: Any, test: str, found: list[Any]) -> None:
    (mark,) = getattr(suite_, f"test_{test}").pytestmark
    assert mark.args[1] == found


def test_device_functions_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue_conformance, "interpreting", lambda: False)
    with pytest.raises(Skipped, match="needs a GPU, or TRITON_INTERPRET=1"):
        of_epilogue(SQUARE)._evaluated(None, ())


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "exact", "passes"),
    [
        (3.0, 3.0, True), (INF, INF, True), (NAN, NAN, True), (-INF, INF, False),
        (NAN, 3.0, False), (3.0, NAN, False), (INF, 3.0, False), (3.0, INF, False),
        (3.0 + 3e-6, 3.0, True), (3.0 + 5e-6, 3.0, False), (0.9e-6, 0.0, True),
        (1.1e-6, 0.0, False), (-3.0 - 3e-6, -3.0, True), (-3.0 - 5e-6, -3.0, False),
    ],
)  # fmt: skip
def test_numbers_that_are_close(found: float, exact: float, passes: bool) -> None:
    """Errors are relative to the number plus one."""
    checked = of_epilogue(SQUARE, points=(1.0, 2.0, 4.0))
    right = torch.arange(9.0, dtype=torch.float64).view(3, 3)
    values, numbers = right.clone(), right.clone()
    values[2, 1], numbers[2, 1] = found, exact
    if passes:
        checked._close(values, numbers, "reference", 1e-6)
        return
    with pytest.raises(Failed, match=r"square: reference is wrong: it is .* at 4, the reference"):
        checked._close(values, numbers, "reference", 1e-6)


def test_a_failure_at_no_test_point_is_shown_by_its_indices() -> None:
    checked = of_epilogue(SQUARE, points=(1.0, 2.0, 4.0))
    with pytest.raises(Failed, match=r"it is 2 at \[1, 0\], the reference has 0; the tolerance is"):
        checked._close(torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1), "reference", 1e-6)


@pytest.mark.parametrize(("slack", "passes"), [(1.0, False), (1.9, False), (2.1, True)])
def test_device_functions_are_right_within_the_tolerance_of_fp32(
    slack: float, passes: bool
) -> None:
    checked = of_epilogue(SQUARE, points=(1.0, 2.0), slack=slack)
    ones = torch.ones(2, 2, dtype=torch.float64)
    if passes:
        checked._close(ones + 2 * 2 * 2e-5, ones, "device", None)
        return
    with pytest.raises(Failed, match="device is wrong"):
        checked._close(ones + 2 * 2 * 2e-5, ones, "device", None)


def test_points_of_each_kind_of_epilogue() -> None:
    pairs = {(x, y) for x in (1.0, 2.0, 4.0) for y in (1.0, 2.0, 4.0)}
    for epilogue in (GLU, replace(GLU, interleaved=True)):
        checked = of_epilogue(epilogue, points=(1.0, 2.0, 4.0))
        gate, up = epilogue.inputs(checked._z())
        assert set(zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)) == pairs
        assert checked._z().shape == (3, 6)
    z = of_epilogue(SQUARE, points=(1.0, 2.0, 4.0))._z()
    assert z.dtype is torch.float64
    assert z.tolist() == [[x] * 3 for x in (1.0, 2.0, 4.0)]
    assert [e.parameters for e in of_epilogue(SQUARE)._variants()] == [(2.0,), (3.0,)]
    assert len(list(of_epilogue(GLU)._variants())) == 1


# -- formats ------------------------------------------------------------------------------


def of_format(form: Format, **fields: Any) -> Any:
    return type("Suite", (FormatConformance,), {"format": form, "device": "cpu", **fields})()


INT8, INT4 = named("int8"), named("int4")
INT8_SCALE = Scale((1, 32), torch.bfloat16)


@pytest.mark.parametrize(
    ("test", "form", "passes"),
    [
        ("stored_numbers_are_read_as_they_were_rounded", INT8, True),
        ("stored_numbers_are_read_as_they_were_rounded",
         replace(INT8, dequantize=lambda stored: stored), False),
        ("stored_numbers_are_read_as_they_were_rounded",
         replace(INT8, dequantize=lambda stored: stored.to(torch.float8_e4m3fn)), False),
        ("stored_numbers_are_read_as_they_were_rounded",
         replace(INT8, quantize=lambda numbers, dtype: numbers.clamp(-127, 127).to(dtype)), False),
        ("rounding_is_close", INT8, True),
        ("rounding_is_close",
         replace(INT8, quantize=lambda numbers, dtype: (0.81 * numbers).to(dtype)), True),
        ("rounding_is_close",
         replace(INT8, quantize=lambda numbers, dtype: (0.77 * numbers).to(dtype)), False),
        ("rounding_is_close", replace(INT8, limit=200.0), False),
        ("values_are_scaled", INT8, True),
        ("values_are_scaled", INT4, True),
        ("values_are_scaled", replace(INT4, pack=1), True),
    ],
    ids=lambda of: of.name if isinstance(of, Format) else None,
)  # fmt: skip
def test_numbers_of_a_format(test: str, form: Format, passes: bool) -> None:
    check = getattr(of_format(form), f"test_{test}")
    if passes:
        run(check)
        return
    with pytest.raises(AssertionError):
        run(check)


class Shifted(Format):
    """Scales before it subtracts the zero point: the wrong order."""

    def values(
        self, stored: Any, scale: Any = None, zero: Any = None, *rest: Any, **more: Any
    ) -> Any:
        found = super().values(stored, scale, None, *rest, **more)
        return found if zero is None else found - zero


class Backwards(Format):
    """Packs the highest bits first."""

    def packed(self, codes: Any, along: int = -1) -> Any:
        return super().packed(codes.flip(along), along).flip(along)


class Along(Format):
    """Unpacks along the last dimension alone."""

    def unpacked(self, stored: Any, along: int = -1) -> Any:
        return super().unpacked(stored, -1)


class Unscaled(Format):
    def values(self, stored: Any, scale: Any = None, *rest: Any, **more: Any) -> Any:
        return super().values(stored, None, *rest, **more)


@pytest.mark.parametrize("kind", [Shifted, Backwards, Along, Unscaled])
def test_values_of_a_format_that_is_wrong(kind: type[Format]) -> None:
    fields = {name: getattr(INT4, name) for name in INT4.__dataclass_fields__}
    with pytest.raises((AssertionError, RuntimeError)):
        run(of_format(kind(**fields)).test_values_are_scaled)


def test_a_format_is_known_while_it_is_tested() -> None:
    """A format that was known before stays known."""
    from tmm_core.formats import FORMATS

    known: Any = FormatConformance.known
    fixture = known._get_wrapped_function() if hasattr(known, "_get_wrapped_function") else (
        known.__wrapped__
    )  # fmt: skip
    for form, stays in ((replace(INT8, name="int8_of_a_test"), False), (INT8, True)):
        steps = fixture(of_format(form))
        next(steps)
        assert FORMATS[form.name] == form
        next(steps, None)
        assert (form.name in FORMATS) is stays


@pytest.mark.parametrize("half", [0, 1])
def test_a_format_of_one_kind_of_scale_is_multiplied_by_one_dtype(half: int) -> None:
    """Where there are several pairs of these, each case has half of them."""
    form = replace(INT8, grids=INT8.grids[:1], decode=None)
    of_format(form, dtypes=(torch.bfloat16,)).test_products(1, 24, 40, "silu", half)


def test_problems_of_a_format() -> None:
    made = of_format(INT8)._problem(torch.float16, INT8_SCALE, 3, 5, 7)
    assert (made.m, made.n, made.k) == (3, 5, made.k)
    assert made.k % INT8_SCALE.block[1] == 0
    assert (made.a.dtype, made.out.dtype, made.b.form) == (torch.float16, torch.float16, INT8)
    assert made.b.scale == INT8_SCALE


@pytest.mark.parametrize(("device", "bound"), [("cpu", []), ("cuda", [2, 3, 4])])
def test_probes_are_compiled_at_once_on_a_gpu(device: str, bound: list[int]) -> None:
    """Each problem of the class is compiled once, and none that the kernel declines."""
    made: list[int] = []

    class Compiled(FakeKernel):
        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            made.append(problem.m)
            return super().bind(problem, config)

    checked = suite(Compiled("k", against=lambda p: ["odd"] * (p.m == 5)))
    checked._device = lambda: torch.device(device)

    def item(cls: type, **params: Any) -> Any:
        return SimpleNamespace(cls=cls, callspec=SimpleNamespace(params=params))

    own, items = type(checked), [SimpleNamespace(cls=type(checked)), SimpleNamespace()]
    items += [item(own, probe=problem(m=m)) for m in (2, 3, 2, 5)]
    items += [item(own, ragged=problem(m=4)), item(own, ragged=None), item(own, other=problem(m=6))]
    items += [item(Compiled, probe=problem(m=7))]
    request: Any = SimpleNamespace(session=SimpleNamespace(items=items))
    ahead: Any = KernelConformance.__dict__["_compiled_ahead"]
    for _ in range(2):  # the second call compiles nothing
        ahead.__wrapped__(checked, request)
        assert sorted(made) == bound
