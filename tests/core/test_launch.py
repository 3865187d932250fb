"""The host's side of a launch, with Triton's C function replaced by one that takes notes."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia import driver

import tmm_core
from tmm_core import compat
from tmm_core.launch.fold import Fold
from tmm_core.spec.arguments import Arguments
from tmm_core.triton import Described, Step, compile, launch, launcher, ptx, releases

BF16 = torch.bfloat16
STREAM, FUNCTION, METADATA = 7, 5, (4, 1, 0)


class Noted:
    """Records the arguments of the C function, launch by launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.encoded: list[Any] = []
        self.devices: list[int] = []
        self.current = 0

    def arguments(self, release: str) -> list[list[Any]]:
        """The kernel's own of each launch: the last of all since 3.7, spread out by 3.6."""
        if release != "3.6":
            return [list(args[-1]) for args in self.launches]
        return [list(args[13:]) for args in self.launches]


class Launcher36:
    """A launcher object whose call passes its arguments on as Triton 3.6's does."""

    launch_cooperative_grid, launch_pdl, scratch = 0, 1, 0

    def __init__(self, launch: Any, scratch: int = 0) -> None:
        self.launch, self.scratch = launch, scratch
        self.launch_cooperative_grid, self.launch_pdl = 0, 1

    def __call__(
        self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any, *args: Any
    ) -> None:
        memory = gridX * gridY * gridZ * self.scratch if self.scratch else None
        flags = self.launch_cooperative_grid, self.launch_pdl
        self.launch(gridX, gridY, gridZ, stream, function, *flags, memory, None, *args)


class Launcher37(Launcher36):
    """Takes the arguments of Triton 3.7, 3.8 and 3.9."""

    def __init__(self, launch: Any, scratch: int = 0) -> None:
        super().__init__(launch, scratch)
        self.kernel_signature, self.arg_annotations = b"signature", ["annotations"]

    def __call__(
        self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        memory = gridX * gridY * gridZ * self.scratch if self.scratch else None
        flags = self.launch_cooperative_grid, self.launch_pdl
        hooks = launch_metadata, launch_enter_hook, launch_exit_hook
        self.launch(gridX, gridY, gridZ, stream, function, *flags, kernel_metadata, *hooks, memory,
                    None, self.arg_annotations, self.kernel_signature, args)  # fmt: skip


class LauncherLater(Launcher37):
    """Takes more arguments in another order, as a later release might."""

    def __init__(self, launch: Any, scratch: int = 0) -> None:
        super().__init__(launch, scratch)
        self.cluster = (2, 1, 1)

    def __call__(
        self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid,
                    self.launch_pdl, self.cluster, kernel_metadata, list(args))  # fmt: skip


class LauncherCounting(Launcher37):
    """One that passes a number of each launch."""

    launches = 1000

    def __call__(
        self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        LauncherCounting.launches += 1
        self.launch(gridX, gridY, gridZ, stream, function, LauncherCounting.launches,
                    kernel_metadata, args)  # fmt: skip


LAUNCHERS = {"3.6": Launcher36, "3.7": Launcher37, "later": LauncherLater}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    notes = Noted()

    def encode(descriptor: Any, meta: Any, *more: Any) -> list[Any]:
        notes.encoded.append(descriptor)
        return ["map", 1, 2]

    @contextmanager
    def guard(device: int) -> Any:
        before, notes.current = notes.current, device
        notes.devices.append(device)
        yield
        notes.current = before

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(compat, "current_device", lambda: notes.current)
    monkeypatch.setattr(compat, "current_stream", lambda i: STREAM + i)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(
        compat,
        "empty_strided_cuda",
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
    )
    return notes


def compiled(
    notes: Noted, signature: dict[str, str], release: str, device: int = 0
) -> launch.Launch:
    """A launch whose kernel is compiled, as far as the host can tell."""
    described = [n for n, t in signature.items() if t.startswith("tensordesc")]
    wrapped = driver.wrap_handle_tensordesc(
        lambda *args: notes.launches.append(args), signature, [{}] * len(described)
    )
    run = LAUNCHERS[release](wrapped)
    low = releases.c_call(run, described=bool(described))
    assert low is not None
    handle = types.SimpleNamespace(run=run, function=FUNCTION, packed_metadata=METADATA)
    bound = launch.Launch.__new__(launch.Launch)
    bound.compiled = handle  # type: ignore[assignment]
    bound._given = [n for n, t in signature.items() if t != "constexpr"]
    bound._parameters = list(signature)
    bound._maps = {name: {} for name in described}
    bound._template, bound.namespace = launch._direct(handle, low, device)  # type: ignore[arg-type]
    bound.call = bound._write_call()
    return bound


@pytest.fixture(params=list(LAUNCHERS))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bound_to(run: Any, low: Any, handle: Any = None) -> launch.Launch:
    """A launch of a kernel of three arguments and a constant."""
    handle = handle or types.SimpleNamespace(run=run, function=FUNCTION, packed_metadata=METADATA)
    bound = launch.Launch.__new__(launch.Launch)
    bound.compiled = handle
    bound._given, bound._parameters, bound._maps = ["out", "a", "n"], ["out", "a", "C", "n"], {}
    bound._template, bound.namespace = launch._direct(handle, low, 0)
    bound.call = bound._write_call()
    return bound


def launched(bound: launch.Launch) -> tuple[Any, ...]:
    """The kernel's arguments of a call that launches it once."""
    run = launcher([Step(bound, (2, 3, 1), {"out": "out", "a": "a", "n": 9})], (4, 4), BF16)
    a, b = torch.zeros(4, 4, dtype=BF16), torch.zeros(4, 4, dtype=BF16)
    out = run(a, b, None, None, 1.0, None)
    return (out.data_ptr(), a.data_ptr(), None, 9)


def test_a_launcher_object_that_is_called_otherwise_is_left_to_triton(noted: Noted) -> None:
    class Unlike(Launcher37):
        def __call__(self, stream: Any, grid: Any, *args: Any) -> None:  # type: ignore[override]
            raise AssertionError

    run, launches = Unlike(noted.launches.append), []
    assert releases.c_call(run, described=False) is None

    class Handle:
        def __init__(self) -> None:
            self.run = run

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: launches.append((grid, args))

    arguments = launched(bound_to(run, None, Handle()))
    assert launches == [((2, 3, 1), arguments)]


@pytest.mark.parametrize("needs", ["scratch memory", "a number of its own"])
def test_a_launch_that_needs_more_goes_through_its_launcher_object(
    noted: Noted, needs: str
) -> None:
    def launch_function(*args: Any) -> None:
        noted.launches.append(args)

    counting = needs != "scratch memory"
    run = LauncherCounting(launch_function) if counting else Launcher37(launch_function, scratch=8)
    low = releases.c_call(run, described=False)
    assert low is None
    assert noted.launches == []
    arguments = launched(bound_to(run, low))
    assert noted.arguments("3.7") == [list(arguments)]
    assert noted.launches[0][:5] == (2, 3, 1, STREAM, FUNCTION)
    assert (6 * 8 in noted.launches[0]) is not counting


def test_a_launcher_object_with_work_after_a_launch_is_left_to_triton(noted: Noted) -> None:
    class Later(Launcher37):
        launches = 0

        def __call__(
            self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any,
            kernel_metadata: Any, launch_metadata: Any, launch_enter_hook: Any,
            launch_exit_hook: Any, *args: Any,
        ) -> None:  # fmt: skip
            hooks = launch_metadata, launch_enter_hook, launch_exit_hook
            Launcher37.__call__(  # ``self`` is a stand-in
                self, gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks, *args
            )
            Later.launches += 1
            if Later.launches == 2:
                raise TypeError

    assert releases.c_call(Later(noted.launches.append), described=False) is None
    assert Later.launches == 2


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1), (0, 1, 2, 0), (0, 1, None, 2)], ids=str)
def test_a_launcher_object_with_another_grid_is_left_to_triton(noted: Noted, order: Any) -> None:
    class OtherGrid(Launcher37):
        def __call__(
            self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any,
            kernel_metadata: Any, launch_metadata: Any, launch_enter_hook: Any,
            launch_exit_hook: Any, *args: Any,
        ) -> None:  # fmt: skip
            grid = gridX, gridY, gridZ
            given = (None if axis is None else grid[axis] for axis in order)
            self.launch(*given, stream, function, kernel_metadata, args)

    assert releases.c_call(OtherGrid(noted.launches.append), described=False) is None


def test_the_installed_triton_is_called_as_tmm_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    active = types.SimpleNamespace(active=types.SimpleNamespace())
    monkeypatch.setattr(driver.triton.runtime, "driver", active)
    run: Any = object.__new__(driver.CudaLauncher)
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligns = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    vars(run).update(
        **sizes, **aligns, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True,
        launch=print, arg_annotations=[], kernel_signature=b"signature", gsan_enabled=False,
    )  # fmt: skip
    found = releases.c_call(run, described=False)
    assert found is not None
    assert found.low is print
    assert {True, False} <= {each for each in found.values.values() if isinstance(each, bool)}
    assert found.arguments.startswith("{grid}, {_}stream_of({_}device), {_}function, ")
    assert found.arguments.endswith(
        "({arguments},)" if b"signature" in found.values.values() else "{arguments}"
    )
    for name in sizes:
        vars(run)[name] = 8
        assert releases.c_call(run, described=False) is None
        vars(run)[name] = 0


def test_a_launcher_passes_each_argument_by_its_kind(noted: Noted, release: str) -> None:
    signature = {
        "out": "*bf16", "a": "*bf16", "C": "constexpr", "M": "i32", "sa": "i32", "so": "i32",
        "alpha": "fp32", "counter": "*i32", "scratch": "*fp32",
    }  # fmt: skip
    counters = itertools.count()
    step = Step(
        compiled(noted, signature, release),
        (3, 2, 1),
        {
            "out": "out", "a": "a", "M": 8, "sa": ("a", 0), "so": ("out", 0), "alpha": "alpha",
            "counter": lambda: next(counters), "scratch": "workspace",
        },
    )  # fmt: skip
    run = launcher([step, step], (8, 6), BF16, workspace=(5, torch.float32))
    a = torch.zeros(8, 16, dtype=BF16)[:, :4]
    out = run(a, a, None, None, 2.5, None)
    assert (out.shape, out.dtype, out.stride()) == ((8, 6), BF16, (6, 1))
    first, second = noted.arguments(release)
    *known, scratch = first
    assert known == [out.data_ptr(), a.data_ptr(), None, 8, 16, 6, 2.5, 0]
    # Both launches of one call share its scratch memory.
    assert second == [*known[:-1], 1, scratch]
    assert noted.launches[0][:7] == (3, 2, 1, STREAM, FUNCTION, 0, 1)
    assert METADATA in noted.launches[0]
    given = torch.zeros(8, 9, dtype=BF16)[:, :6]
    assert run(a, a, None, None, 1.0, given) is given
    assert noted.arguments(release)[2][5] == 9


def test_a_launch_on_another_device_makes_it_current(noted: Noted, release: str) -> None:
    signature = {"out": "*bf16"}
    bound = compiled(noted, signature, release, device=1)
    run = launcher([Step(bound, (1, 1, 1), {"out": "out"})], (2, 2), BF16)
    a = torch.zeros(2, 2, dtype=BF16)
    run(a, a, None, None, 1.0, None)
    bound((1, 1, 1), a)
    assert noted.devices == [1, 1]
    assert [args[3] for args in noted.launches] == [STREAM + 1] * 2
    noted.current = 1
    run(a, a, None, None, 1.0, None)
    assert len(noted.devices) == 2


def test_auxiliary_outputs_follow_a_launch_to_its_device(noted: Noted) -> None:
    bound = compiled(noted, {"out": "*bf16", "y": "*bf16"}, "3.7", device=1)
    step = Step(bound, (1, 1, 1), {"out": "out", "y": "output_0"})
    run = launcher([step], (2, 2), BF16, outputs=1)
    a, more = zeros(2, 2), zeros(2)
    out = run(a, a, None, None, 1.0, None, outputs=(more,))
    assert noted.devices == [1]
    assert noted.arguments("3.7") == [[out.data_ptr(), more.data_ptr()]]


@pytest.mark.parametrize(
    ("extras", "strides"), [((), (6, 1)), (("offs",), (8, 1)), (("a_index", "offs"), (8, 1))]
)
def test_rows_of_a_ragged_result_are_padded(
    noted: Noted, extras: tuple[str, ...], strides: tuple[int, ...]
) -> None:
    """As torch allocates the result of a grouped product: rows begin at multiples of 16 bytes."""
    step = Step(compiled(noted, {"out": "*bf16", "so": "i32"}, "3.7"), (1, 1, 1), {
        "out": "out", "so": ("out", 0),
    })  # fmt: skip
    run = launcher([step], (4, 6), BF16, extras=extras)
    a = zeros(4, 4)
    y = run(a, a, None, None, 1.0, None, **{name: zeros(2) for name in extras})
    assert (y.shape, y.stride()) == ((4, 6), strides)
    assert noted.arguments("3.7") == [[y.data_ptr(), strides[0]]]
    given = zeros(4, 6)
    assert run(a, a, None, None, 1.0, given, **{name: zeros(2) for name in extras}) is given
    assert noted.arguments("3.7")[1] == [given.data_ptr(), 6]


@pytest.mark.parametrize("way", ["launcher", "call"])
def test_a_warm_launch_encodes_no_tensor_map(
    noted: Noted, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed Triton's launcher is found under the wrapper that encodes descriptors."""
    calls: list[Any] = []
    look_up = launch.TensorMaps.__call__

    def counted(self: Any, t: torch.Tensor) -> Any:
        calls.append(t)
        return look_up(self, t)

    monkeypatch.setattr(launch.TensorMaps, "__call__", counted)
    bound = compiled(
        noted, {"a": "tensordesc<bf16[64, 64],x>", "n": "i32", "C": "constexpr"}, "3.7"
    )

    def describe(t: torch.Tensor) -> Any:
        return ("descriptor of", t.data_ptr(), t.stride())

    launch_with: Callable[[torch.Tensor], Any]
    if way == "launcher":
        step = Step(bound, (2, 1, 1), {"a": Described("a", describe), "n": 9})
        run = launcher([step], (2, 2), BF16)

        def launch_with(t: torch.Tensor) -> Any:
            return run(t, t, None, None, 1.0, None)
    else:
        of = bound.tensor_map("a", describe)

        def launch_with(t: torch.Tensor) -> Any:
            return bound((2, 1, 1), of(t), 9)

    t = torch.zeros(8, 8)
    for _ in range(3):
        launch_with(t)
    assert noted.encoded == [describe(t)]
    assert noted.arguments("3.7") == [["map", 1, 2, 9, None]] * 3
    assert len(calls) == (1 if way == "launcher" else 3)  # a launcher has the map at hand
    # Another tensor, or another view of this one, has another map.
    launch_with(t.t())
    launch_with(t[1:])
    assert noted.encoded[1:] == [describe(t.t()), describe(t[1:])]
    if way == "call":
        # A raw descriptor is encoded on the spot, as Triton would.
        bound((2, 1, 1), "raw", 9)
        assert noted.encoded[-1] == "raw"


def test_the_number_of_tensor_maps_kept_is_limited(noted: Noted) -> None:
    bound = compiled(noted, {"a": "tensordesc<bf16[64, 64],x>"}, "3.7")
    of = bound.tensor_map("a", lambda t: t.data_ptr())
    held = torch.zeros(launch._TENSOR_MAPS_KEPT + 10, 8)
    for row in held:
        of(row)
    assert len(of.kept) == launch._TENSOR_MAPS_KEPT  # type: ignore[attr-defined]
    of(held[0])
    assert noted.encoded.count(held.data_ptr()) == 2


def test_the_interpreter_takes_the_same_steps() -> None:
    from tmm_triton.naive import Naive

    a, b = torch.randn(5, 7), torch.randn(7, 6)
    run = Naive().bind(tmm_core.problem(a, b), Naive().default_config(tmm_core.problem(a, b)))
    out = run(a, b, None, None, 1.0, None)
    torch.testing.assert_close(out, a @ b)
    given = torch.full((5, 6), torch.nan)
    assert run(a, b, None, None, 1.0, given) is given
    torch.testing.assert_close(given, a @ b)


def test_a_plan_launches_after_its_checks(noted: Noted, release: str) -> None:
    from tmm_core.launch.plan import Plan

    signature = {"a": "*bf16", "b": "*bf16", "bias": "*bf16", "out": "*bf16", "alpha": "fp32"}
    bound = compiled(noted, signature, release, device=-1)
    noted.current = -1
    run = launcher([Step(bound, (3, 2, 1), {n: n for n in signature})], (8, 6), BF16)
    a, b, bias = (torch.zeros(*shape, dtype=BF16) for shape in ((8, 4), (4, 6), (6,)))
    choice: Any = None
    problem = tmm_core.problem(a, b, bias=bias)
    call = Arguments(a, b, bias, alpha=0.5)
    plan = Plan.of(problem, choice, run, call).ready(call)
    out = plan(a, b, bias)
    assert (out.shape, out.dtype) == ((8, 6), BF16)
    pointers = [t.data_ptr() for t in (a, b, bias, out)]
    assert noted.arguments(release) == [[*pointers, 0.5]]
    given = torch.zeros(8, 6, dtype=BF16)
    assert plan(a, b, bias, out=given) is given
    assert noted.arguments(release)[1] == [*pointers[:3], given.data_ptr(), 0.5]
    noted.current = 0
    plan(a, b, bias)
    assert noted.devices == [-1]
    noted.current = -1
    shifted = torch.zeros(33, dtype=BF16)[1:].view(8, 4)
    for wrong in ((shifted, b, bias), (a.t(), b, bias), (a.float(), b, bias), (a, b[:3], bias),
                  (a, b, bias[:5]), (a, b), (a, b, bias, given), (a, b, None)):  # fmt: skip
        with pytest.raises(ValueError, match="takes"):
            plan(*wrong)
    with pytest.raises(ValueError, match="takes no scale_a"):
        plan(a, b, bias, scale_a=torch.ones(()))
    with pytest.raises(ValueError, match="takes out"):
        plan(a, b, bias, out=given.t())
    assert len(noted.launches) == 3


def folded(run: Any, a: Any, b: Any, residual: Any = None) -> tuple[Any, Any]:
    """The launcher for operands of more dimensions, and the one that is handed views."""
    shape = torch.Size((a @ b).shape)
    fold = Fold.of(a, b, residual, shape)
    assert fold is not None
    by_views = fold.wrap(lambda *arguments: run(*arguments), a, b, residual)
    return fold.wrap(run, a, b, residual), by_views


def pointed(notes: Noted, release: str, flat: tuple[int, ...]) -> Any:
    """A launcher that passes addresses and strides on."""
    signature = dict.fromkeys(("a", "b", "bias", "residual", "out"), "*bf16")
    strided = [(t, i) for t in ("a", "b", "residual", "out") for i in range(len(flat))]
    arguments: Any = {name: name for name in signature}
    for t, i in strided:
        signature[f"{t}_{i}"], arguments[f"{t}_{i}"] = "i32", (t, i)
    return launcher([Step(compiled(notes, signature, release), (3, 2, 1), arguments)], flat, BF16)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def test_operands_are_folded_without_views(noted: Noted, release: str) -> None:
    """The kernel gets the arguments that views would give, and no view is made."""
    bias = zeros(6)
    for a, b, residual, flat in (
        (zeros(2, 3, 4), zeros(4, 6), zeros(2, 3, 6), (6, 6)),
        (zeros(2, 3, 8)[..., :4], zeros(6, 4).t(), zeros(6), (6, 6)),
        (zeros(2, 3, 4)[:, -1:], zeros(4, 6), zeros(2, 1, 1), (2, 6)),
        (zeros(4), zeros(4, 6), zeros(6), (1, 6)),
        (zeros(2, 3, 4), zeros(4), zeros(), (6, 1)),
        (zeros(5, 2, 3, 4), zeros(5, 2, 4, 6), zeros(1, 1, 6), (10, 3, 6)),
        (zeros(3, 4), zeros(5, 4, 6), zeros(5, 3, 6), (5, 3, 6)),
    ):
        direct, by_views = folded(pointed(noted, release, flat), a, b, residual)
        given = (a, b, bias, residual, 1.0)
        noted.launches.clear()
        y, expected = direct(*given, None), by_views(*given, None)
        assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), BF16)
        assert (y._is_view(), expected._is_view()) == (False, True)
        first, second = noted.arguments(release)
        out = first.index(y.data_ptr())
        assert second[out] == expected.data_ptr()
        assert first[:out] + first[out + 1 :] == second[:out] + second[out + 1 :]
        assert direct(*given, expected) is expected
        assert noted.arguments(release)[2] == second


def test_operands_that_do_not_fold_are_copied(noted: Noted, release: str) -> None:
    b, residual = zeros(4, 6), zeros(2, 3, 6)
    for x, y, added, flat in (
        (zeros(3, 2, 4).transpose(0, 1), b, residual, (6, 6)),
        (zeros(1, 3, 4).expand(2, 3, 4), b, residual, (6, 6)),
        (zeros(2, 5, 4)[:, :3], b, residual, (6, 6)),
        (zeros(2, 3, 4), b, zeros(2, 1, 1), (6, 6)),
        (zeros(5, 2, 3, 4), zeros(2, 4, 6), residual, (10, 3, 6)),
    ):
        direct, _ = folded(pointed(noted, release, flat), x, y, added)
        assert direct(x, y, zeros(6), added, 1.0, None)._is_view()


def test_a_descriptor_is_of_the_folded_tensor(noted: Noted) -> None:
    signature = dict.fromkeys(("a", "b", "out"), "tensordesc<bf16[64, 64],x>")

    def describe(t: torch.Tensor) -> Any:
        return t.data_ptr(), t.shape, t.stride()

    bound = compiled(noted, signature, "3.7")
    described: Any = {name: Described(name, describe) for name in signature}
    run = launcher([Step(bound, (1, 1, 1), described)], (6, 6), BF16)
    a, b = zeros(2, 3, 4), zeros(4, 6)
    direct, by_views = folded(run, a, b)
    ys = [direct(a, b, None, None, 1.0, None) for _ in range(3)]
    flat = [describe(t) for t in (a.view(6, 4), b, *(y.view(6, 6) for y in ys))]
    assert noted.encoded == flat
    by_views(a, b, None, None, 1.0, ys[0])
    assert noted.encoded == flat


def test_a_descriptor_of_scratch_memory_is_not_folded(noted: Noted) -> None:
    signature = dict.fromkeys(("a", "w"), "tensordesc<bf16[64, 64],x>")
    described: Any = {
        "a": Described("a", lambda t: t.shape),
        "w": Described("workspace", lambda t: (t.shape, t.dtype)),
    }
    bound = compiled(noted, signature, "3.7")
    run = launcher([Step(bound, (1, 1, 1), described)], (6, 6), BF16, workspace=(40, torch.float32))
    a, b = zeros(2, 3, 4), zeros(4, 6)
    direct, _ = folded(run, a, b)
    direct(a, b, None, None, 1.0, None)
    assert noted.encoded == [(6, 4), ((40,), torch.float32)]


def test_scales_of_rows_are_used_in_place_and_scales_of_a_batch_are_not(noted: Noted) -> None:
    signature = {"a_scale": "*fp32", "out": "*bf16"}
    step = Step(compiled(noted, signature, "3.7"), (1, 1, 1), {n: n for n in signature})
    a, b = zeros(2, 3, 4), zeros(4, 6)
    scale = torch.ones(2, 3, 1)
    for other, flat, in_place in ((b, (6, 6), True), (b.expand(2, 4, 6), (2, 3, 6), False)):
        direct, _ = folded(launcher([step], flat, BF16), a, other)
        y = direct(a, other, None, None, 1.0, None, a_scale=scale)
        assert y._is_view() is not in_place
        assert noted.arguments("3.7")[-1] == [scale.data_ptr(), y.data_ptr()]


def test_a_plan_of_more_dimensions_launches_without_views(noted: Noted, release: str) -> None:
    from tmm_core.launch.plan import Plan

    a, b, residual = zeros(2, 3, 4), zeros(4, 6), zeros(2, 3, 6)
    direct, _ = folded(pointed(noted, release, (6, 6)), a, b, residual)
    bias = zeros(6)
    choice: Any = None
    problem = tmm_core.problem(a, b, bias=bias, residual=residual)
    call = Arguments(a, b, bias, residual)
    plan = Plan.of(problem, choice, direct, call).ready(call)
    noted.launches.clear()
    y = plan(a, b, bias, residual)
    expected = direct(a, b, bias, residual, 1.0, y)
    assert (y.shape, y._is_view()) == ((2, 3, 6), False)
    assert plan(a, b, bias, residual, expected) is expected
    first, *others = noted.arguments(release)
    assert others == [first, first]
    with pytest.raises(ValueError, match="takes a of strides"):
        plan(zeros(2, 5, 4)[:, :3], b, bias, residual)
    noted.current = 1
    assert plan(a, b, bias, residual).shape == (2, 3, 6)
    assert noted.devices == [0]


def test_a_plan_ignores_properties_that_no_kernel_sees() -> None:
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    plan = tmm_core.plan(a, b)
    for left, right in ((a, b), (a, a[:, :4]), (torch.nn.Parameter(a), b)):
        if right is b:
            torch.testing.assert_close(plan(left, right).detach(), a @ b)
        else:
            with pytest.raises(ValueError, match=r"takes b of shape \(5, 6\), got shape \(4, 4\)$"):
                plan(left, right)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(plan(a.clone(), b), a @ b)
    torch.testing.assert_close(plan(a, b), a @ b)
    square = torch.randn(4, 4)
    torch.testing.assert_close(tmm_core.plan(square, square)(square, square), square @ square)


def test_a_plan_checks_its_tensors_without_torchs_guards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    plan = tmm_core.plan(a, b)
    torch.testing.assert_close(plan(a, b), a @ b)
    with pytest.raises(ValueError, match="takes a of strides"):
        plan(a.t().contiguous().t(), b)


def test_tensor_maps_are_kept_by_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tensors than maps are kept, in four threads that alternate at every step."""
    pytest.importorskip("triton")
    from tmm_core.triton import launch

    monkeypatch.setattr(launch, "encode", lambda described, meta: (described,))

    class Shared(OrderedDict[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("another thread may add a map meanwhile")

    maps = launch.TensorMaps(lambda t: t.data_ptr(), None)
    maps.kept = Shared()
    tensors = [torch.empty(1) for _ in range(3 * launch._TENSOR_MAPS_KEPT)]

    def use(start: int) -> bool:
        mine = [*tensors[start:], *tensors[:start]] * 20
        return all(maps(t) == (t.data_ptr(),) for t in mine)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(use, (0, 50, 100, 150)))
    finally:
        sys.setswitchinterval(interval)
    assert len(maps.kept) <= launch._TENSOR_MAPS_KEPT + 4


# -- compiling, as far as the host goes ----------------------------------------------------------


@pytest.fixture
def compilations(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each compilation; compiled kernels only take notes."""
    found: list[tuple[Any, ...]] = []

    def compiled(self: Any, src: Any, *more: Any) -> Any:
        found.append((src, *more))
        run = Launcher37(lambda *args: noted.launches.append(args))
        return types.SimpleNamespace(
            run=run, function=FUNCTION, packed_metadata=METADATA, src=src, metadata=None
        )

    def source(fn: Any, given: Any, constants: Any, divisible: Any) -> Any:
        kinds = {name: given.get(name, "constexpr") for name in fn.arg_names}
        return types.SimpleNamespace(signature=kinds, constants=constants, divisible=divisible)

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "source", source)
    monkeypatch.setattr(launch.Launch, "_compile", compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    launch.forget_compiled()
    return found


class OfThree:
    """A kernel of three arguments and a constant."""

    arg_names: ClassVar = ["out", "a", "C", "n"]


def of_three(
    *, device: str = "cuda:0", kinds: Any = (), constants: Any = (), **more: Any
) -> launch.Launch:
    given = {"out": "*bf16", "a": "*bf16", "n": "i32", **dict(kinds)}
    known = {"C": 1, **dict(constants)}
    more = {"num_warps": 4, "num_stages": 3, **more}
    return launch.Launch(OfThree, given, known, device=torch.device(device), **more)


def test_a_kernel_is_compiled_once_for_each_specialisation(
    compilations: list[tuple[Any, ...]],
) -> None:
    first = of_three(divisible={"a": 16, "n": 4})
    same = of_three(divisible={"n": 4, "a": 16}, num_stages=3, num_warps=4)
    assert first.compiled is same.compiled
    ((src, index, edits, options),) = compilations
    assert src.divisible == {"a": 16, "n": 4}
    assert (index, edits, options) == (0, (), {"num_warps": 4, "num_stages": 3})
    for other in (
        {}, {"divisible": {"a": 16}}, {"num_warps": 8}, {"edits": ("evict_first",)},
        {"device": "cuda:1"}, {"device": "cuda"}, {"kinds": {"n": "i64"}}, {"constants": {"C": 2}},
    ):  # fmt: skip
        given = {"divisible": {"a": 16, "n": 4}, **other} if other else {}
        count = len(compilations)
        of_three(**given)  # type: ignore[arg-type]
        of_three(**given)  # type: ignore[arg-type]
        assert len(compilations) == count + 1
    assert [index for _, index, *_ in compilations[-4:]] == [1, 2, 0, 0]
    launch.forget_compiled()
    of_three(divisible={"a": 16, "n": 4})
    assert len(compilations) == count + 2


@pytest.mark.parametrize(
    ("metas", "known", "maps"),
    [
        ([{"box": 1}, {"box": 2}], True, {"out": {"box": 1}, "n": {"box": 2}}),
        ([], True, {}),  # Triton unpacks them
        ([{"box": 1}, {"box": 2}], False, {}),
    ],
)
def test_each_descriptor_is_encoded_by_its_own_metadata(
    metas: list[Any], known: bool, maps: Any, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"out": "tensordesc<bf16[64, 64],x>", "a": "*bf16", "n": "tensordesc<bf16[8, 64],x>"}

    def compiled(self: Any, src: Any, *more: Any) -> Any:
        handle = driver.wrap_handle_tensordesc(noted.launches.append, kinds, metas)
        run = (Launcher37 if known else LauncherCounting)(handle)
        return types.SimpleNamespace(
            run=run, function=FUNCTION, packed_metadata=METADATA,
            src=types.SimpleNamespace(signature=kinds),
            metadata=types.SimpleNamespace(tensordesc_meta=metas),
        )  # fmt: skip

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "source", lambda *given: given)
    monkeypatch.setattr(launch.Launch, "_compile", compiled)
    launch.forget_compiled()
    bound = of_three(kinds=kinds)
    assert bound._maps == maps
    launch.forget_compiled()


def test_launches_whose_blocks_overlap_share_a_handle_if_an_sm_holds_as_many(
    compilations: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spread: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "spread", lambda *given: spread.append(given))
    monkeypatch.setattr(launch, "even_share", lambda blocks, device: blocks // 100)
    made = [of_three(blocks=blocks).compiled for blocks in (None, 250, 250, 299, 300)]
    assert made[1] is made[2] is made[3]
    assert len({id(each) for each in made}) == len(compilations) == 3
    assert spread == [(made[1], 0, 2), (made[4], 0, 3)]


def test_a_compiled_kernel_takes_its_arguments_in_tritons_order(
    compilations: list[tuple[Any, ...]], noted: Noted
) -> None:
    bound = of_three()
    bound((2, 3, 1), "out", "a", 9)
    assert noted.launches[-1][:5] == (2, 3, 1, STREAM, FUNCTION)
    assert noted.launches[-1][-1] == ("out", "a", None, 9)
    noted.current = 1
    bound((1, 1, 1), "out", "a", 9)
    assert (noted.devices, noted.current) == ([0], 1)


def test_a_launcher_without_constants_gets_none(
    compilations: list[tuple[Any, ...]], noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launch.source
    monkeypatch.setattr(launch, "source", lambda *given: launch._without_constants(real(*given)))
    bound = of_three()
    bound((2, 3, 1), "out", "a", 9)
    assert noted.launches[-1][-1] == ("out", "a", 9)
    ((src, *_),) = compilations
    assert (src.signature, src.constants) == ({"out": "*bf16", "a": "*bf16", "n": "i32"}, {})


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "ASTSource", lambda *given: ("triton", *given))
    theirs = importlib.import_module("triton.experimental.gluon._runtime")
    monkeypatch.setattr(theirs, "GluonASTSource", lambda *given: ("gluon", *given))


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_every_argument_is_typed_or_constant(sources: None, language: str) -> None:
    fn = types.SimpleNamespace(
        __name__="kernel", arg_names=["a", "C", "n"], is_gluon=lambda: language == "gluon"
    )
    kinds, constants = {"a": "*bf16", "n": "i32"}, {"C": 2}
    found = compile.source(fn, kinds, constants, {"n": 8, "a": 16, "b": 4})
    signature = {"a": "*bf16", "C": "constexpr", "n": "i32"}
    attributes = {(2,): [["tt.divisibility", 8]], (0,): [["tt.divisibility", 16]]}
    assert found == (language, fn, signature, constants, attributes)
    assert compile.source(fn, kinds, constants)[-1] == {}
    for wrong in (({"a": "*bf16"}, constants), (kinds, {}), (kinds, {"C": 2, "n": 1})):
        with pytest.raises(TypeError, match=r"kernel: arguments .* typed or constant"):
            compile.source(fn, *wrong)
    with pytest.raises(TypeError, match="typed or constant"):
        compile.source(fn, {**kinds, "b": "i32"}, constants)


def test_callees_are_hashed_before_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    constants: list[Any] = []  # of a callee, which its caller sees

    class Function:
        def __init__(self, fn: Any, hash: str | None = None) -> None:
            self.fn, self.hash = fn, hash
            self.used_global_vals = {("SCALE", id(self)): (fn.__name__, {})} if hash else {}

        @property
        def cache_key(self) -> str:
            hashed.append(self.fn.__name__)
            self.hash = self.fn.__name__
            if self.fn.__name__ == "top":
                constants.extend(scope["known"].used_global_vals)
            self.used_global_vals[("OWN", id(self))] = (1, {})
            return self.hash

    monkeypatch.setattr(compile, "JITFunction", Function)
    scope: dict[str, Any] = {}
    exec("def leaf(): pass\ndef top(): middle(), known\ndef known(): pass\n", scope)
    exec("def middle(): leaf(), helpers.of_module(), top\n", scope)
    inner = Function(scope["leaf"])

    def closed() -> None:
        inner  # noqa: B018

    for name in ("leaf", "middle", "top"):
        scope[name] = Function(scope[name])
    scope["known"] = Function(scope["known"], "hash")
    scope["helpers"] = types.ModuleType("helpers")
    scope["helpers"].of_module = Function(lambda: None)
    compile.hash_after_callees(scope["top"], {"f": Function(closed), "C": 3})
    assert hashed == ["leaf", "<lambda>", "middle", "top", "leaf", "closed"]
    assert constants == []  # they are in the callee's hash
    kept = scope["known"].used_global_vals
    assert [name for name, _ in kept] == ["SCALE"]
    # Triton compares what the callees read when it launches the caller.
    assert kept.items() <= scope["top"].used_global_vals.items()
    assert [name for name, _ in scope["top"].used_global_vals].count("OWN") == 4
    compile.hash_after_callees(scope["top"], {})
    assert len(hashed) == 6


def test_a_compilation_has_its_edits_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    monkeypatch.setattr(
        compile.triton, "compile", lambda src, target, options: (src.hash(), target, options)
    )
    runtime = types.SimpleNamespace(add_stages_inspection_hook=None)
    monkeypatch.setattr(ptx, "knobs", types.SimpleNamespace(runtime=runtime))

    def source() -> Any:
        return types.SimpleNamespace(name="kernel", hash=lambda: "key")

    options = {"num_warps": 4, "enable_fp_fusion": True}
    assert compile.compile_for("target", source(), num_warps=4) == ("key", "target", options)  # type: ignore[arg-type]
    key, *rest = compile.compile_for("target", source(), edits=("joined",), num_warps=4)  # type: ignore[arg-type]
    assert key != "key"
    assert rest == ["target", options]
    given = {**options, "enable_fp_fusion": False}
    assert compile.compile_for("target", source(), **given)[2] == given  # type: ignore[arg-type,index]
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert compile.compile_for("target", source(), num_warps=4)[2] == {"num_warps": 4}  # type: ignore[arg-type,index]


def test_element_types_of_triton() -> None:
    assert compile.pointer(torch.bfloat16) == "*bf16"
    assert compile.supports(torch.float64)
    assert not compile.supports(torch.complex64)
    with pytest.raises(ValueError, match="no Triton element type"):
        compile.pointer(torch.complex64)
