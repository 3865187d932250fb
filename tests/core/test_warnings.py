"""A warning that a call of matmul gives points at the line that made the call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, installed
from tmm_cache import CacheStore, CacheWarning, cache_errors

import tmm_core
from tmm_core import TmmWarning, dispatch, errors
from tmm_core.nn import Linear
from tmm_core.spec.device import fingerprint
from tmm_core.tuning import stages

A, B = torch.randn(64, 16), torch.randn(16, 32)
LAYER = Linear(16, 32, bias=False)


def _raise(*arguments: Any, **more: Any) -> Any:
    raise RuntimeError("boom")


class Nonsense(FakeKernel):
    def workspace_bytes(self, problem: Any, config: Any) -> int:
        return -1


def set_aside(patch: pytest.MonkeyPatch) -> None:
    installed(FakeBlas(), Nonsense("fast"))


def wrong_at_first_use(patch: pytest.MonkeyPatch) -> None:
    right = FakeBlas(estimate=100.0)
    installed(right, FakeKernel("fast", spoil=lambda out: out + 1, estimate=1e-9))
    patch.setenv("TMM_ON_CACHE_MISS", "heuristic")


def tuning_fails(patch: pytest.MonkeyPatch) -> None:
    installed(FakeBlas(), FakeKernel("fast"))
    patch.setattr(stages.Tuning, "run", _raise)


def timing_fails(patch: pytest.MonkeyPatch) -> None:
    installed(FakeBlas(), FakeKernel("fast"))
    patch.setattr(dispatch.default_dispatcher().tuner.timer, "measure", _raise)


def a_plugin_is_broken(patch: pytest.MonkeyPatch) -> None:
    class Broken:
        name, value, dist = "broken", "no_such_module", None

        def load(self) -> Any:
            raise ImportError("no such module")

    patch.setenv("TMM_PLUGINS", "broken")
    registry = dispatch.default_dispatcher().registry
    found = [*registry._entry_points(), Broken()]
    patch.setattr(registry, "_entry_points", lambda: found)


def a_kernel_is_misnamed(patch: pytest.MonkeyPatch) -> None:
    installed(FakeBlas(), FakeKernel("fast"))
    patch.setenv("TMM_DISABLE", "fats")


def a_record_is_damaged(patch: pytest.MonkeyPatch) -> None:
    installed(FakeBlas(), FakeKernel("fast"))
    store = dispatch.default_dispatcher().store
    problem = tmm_core.problem(A, B)
    device = problem.device
    path = store.path(device.gpu, device.environment, problem.to_json())
    path.parent.mkdir(parents=True)
    path.write_text("{")


def the_root_is_a_file(patch: pytest.MonkeyPatch) -> None:
    installed(FakeBlas(), FakeKernel("fast"))
    dispatch.default_dispatcher().store.root.write_text("")


def the_root_is_anybodys(patch: pytest.MonkeyPatch) -> None:
    root = CacheStore().root
    root.mkdir()
    root.chmod(0o777)
    installed(FakeBlas(), FakeKernel("fast"))


def there_is_no_place(patch: pytest.MonkeyPatch) -> None:
    patch.delenv("TMM_CACHE_DIR")
    patch.setenv("HOME", "")
    patch.delenv("XDG_CACHE_HOME", raising=False)


CAUSES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    set_aside: "set aside: workspace_bytes",
    wrong_at_first_use: "wrong at its first use",
    tuning_fails: "tuning failed: RuntimeError: boom",
    timing_fails: "timing .* failed: boom|no candidate was timed",
    a_plugin_is_broken: "broken.* is not used",
    a_kernel_is_misnamed: "unknown kernel 'fats'; did you mean 'fast'",
    a_record_is_damaged: "passed over",
    the_root_is_a_file: "cannot be written|cannot be read",
    the_root_is_anybodys: "can be written by others",
    there_is_no_place: "HOME is ''",
}


@pytest.fixture(autouse=True)
def not_interpreting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels are interpreted nothing is tuned."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TMM_PLUGINS", "blas")  # Triton's may be loaded, to interpret
    monkeypatch.setattr(cache_errors, "_warned", set())
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


HOW = {
    "eager": lambda: tmm_core.matmul(A, B),
    "layer": lambda: LAYER(A),
    "gradient": lambda: tmm_core.matmul(A, B.clone().requires_grad_()),
}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
@pytest.mark.parametrize("how", HOW)
def test_a_warning_points_at_the_users_line(
    cause: Callable[[pytest.MonkeyPatch], None], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause(monkeypatch)
    with pytest.warns((TmmWarning, CacheWarning), match=CAUSES[cause]) as caught:
        result = HOW[how]()
    assert result.shape == (64, 32)
    lines = Path(__file__).read_text().splitlines()
    for warning in caught:
        assert warning.filename == __file__
        assert f'"{how}": lambda: ' in lines[warning.lineno - 1]


def test_texts_of_other_code_are_cut_to_a_length() -> None:
    """200 characters of a repr, 2000 of an exception, and a mark where there were more."""

    class Long:
        def __repr__(self) -> str:
            return "r" * self.length

        def __init__(self, length: int) -> None:
            self.length = length

    for length in (199, 200):
        assert errors.shown(Long(length)) == "r" * length
    assert errors.shown(Long(201)) == "r" * 200 + "…"
    assert errors.error_message(ValueError("t" * 2000)) == "t" * 2000
    assert errors.error_message(ValueError("t" * 2001)) == "t" * 2000 + "…"
    assert errors.error_text(ValueError("\x1b[1m")) == "ValueError: \\x1b[1m"


# -- texts of strangers -------------------------------------------------------------------


class Failing:
    def __repr__(self) -> str:
        raise KeyError


class Text(str):
    def __getitem__(self, key: Any) -> str:
        return "another"


def test_a_text_of_other_code_is_plain_and_short() -> None:
    for text, found in (
        ("a\nb\tc é", "a\nb\tc é"), ("\x1b[31m", "\\x1b[31m"), ("\ud800", "\\ud800"),
        ("x" * 2000, "x" * 2000), ("x" * 2001, "x" * 2000 + "…"), (Text("own"), "own"), ("", ""),
    ):  # fmt: skip
        plain = errors.plain_text(text)
        assert (plain, type(plain)) == (found, str)
    assert errors.plain_text("abc", 2) == "ab…"
    assert errors.error_text(ValueError()) == "ValueError"
    assert errors.error_text(ValueError("x")) == "ValueError: x"
    framed = (
        "too large\nin bytes\nException raised from f at x.h:79 (most recent call first):\nframe #0"
    )
    assert errors.error_text(ValueError(framed)) == "ValueError: too large\nin bytes"
    failing = type("Odd", (Exception,), {"__str__": Failing.__repr__})()
    assert errors.error_text(failing) == "Odd: (its text is unavailable)"
    assert errors.shown(Failing()) == "<Failing, whose repr failed>"
    assert errors.shown("x" * 300) == "'" + "x" * 199 + "…"


def test_an_unknown_name_is_answered_by_near_ones() -> None:
    error = tmm_core.UnknownNameError("kernel", "tritn", ["triton", "blas"])
    assert str(error) == "unknown kernel 'tritn'; did you mean 'triton'?"
    far = tmm_core.UnknownNameError("kernel", "zzz", ["triton", "blas"])
    assert str(far) == "unknown kernel 'zzz'; known: ['blas', 'triton']"
    assert str(pickle.loads(pickle.dumps(far))) == str(far)


@dataclass
class Of:
    plugin: str
    distribution: str

    def __str__(self) -> str:
        return f"plugin {self.plugin}"


def test_a_distribution_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(errors, "warn", messages.append)
    errors.warn_of_plugin(Of("one", "both"), "kernel k failed")
    errors.warn_of_plugin(Of("two", "both"), "kernel l failed")
    errors.warn_of_plugin(Of("one", "other"), "plugin one: failed", "file.py:3", more=2)
    errors.warn_of_plugin(Of("three", ""), "failed in file.py:3", "file.py:3")
    errors.warn_of_plugin(Of("three", ""), "again")
    assert messages == [
        "plugin one: kernel k failed; later faults of it are not reported: see `tmm doctor`",
        "plugin one: failed (file.py:3); 2 more faults of it: see `tmm doctor`",
        "plugin three: failed in file.py:3; later faults of it are not reported: see `tmm doctor`",
    ]


@pytest.mark.usefixtures("blas_alone")
def test_every_call_takes_a_kernel_and_its_config() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    offs = torch.tensor([4], dtype=torch.int32)
    calls: dict[str, Any] = {
        "matmul": lambda **more: tmm_core.matmul(a, b, **more),
        "linear": lambda **more: tmm_core.linear(a, b.t(), **more),
        "grouped": lambda **more: tmm_core.grouped_matmul(a, b[None], offs=offs, **more),
    }
    for call in calls.values():
        assert torch.equal(call(kernel="blas"), call())
        with pytest.raises(tmm_core.ConfigError, match="nope"):
            call(kernel="blas", config={"nope": 1})
        with pytest.raises(tmm_core.SettingsError, match="config needs kernel"):
            call(config={"nope": 1})
        with pytest.raises(tmm_core.UnknownNameError, match="nobody"):
            call(kernel="nobody")
        with pytest.raises(tmm_core.SettingsError, match="on_cache_miss"):
            call(on_cache_miss="nothing")


@pytest.mark.usefixtures("blas_alone")
def test_scales_of_a_layers_operands_count_both() -> None:
    x, w = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((4, 8), (6, 8)))
    of_x, of_w = torch.tensor(2.0), torch.tensor(3.0)
    for given, expected in (({"scale_a": of_x}, 16), ({"scale_b": of_w}, 24),
                            ({"scale_a": of_x, "scale_b": of_w}, 48)):  # fmt: skip
        y = tmm_core.linear(x, w, out_dtype=torch.float32, **given)  # type: ignore[arg-type]
        assert y.eq(expected).all()
