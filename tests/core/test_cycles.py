"""A call leaves no reference cycle that holds its caller's variables.

One would keep a user's tensors until Python's cyclic garbage collector runs. If it kept a CUDA
graph, the collector would end a capture during which it runs.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, FakeTimer, plugin
from tmm_cache import CacheStore

import tmm_core
from tmm_core import dispatch
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm
from tmm_core.registry.registry import Registry
from tmm_core.spec.device import fingerprint
from tmm_core.tuning.tuner import Tuner

Tensor = torch.Tensor

A, B = torch.randn(60, 16), torch.randn(16, 32)


def _root() -> Path:
    return CacheStore().root


class Held:
    """Stands for a CUDA graph."""


@pytest.fixture(autouse=True)
def tunes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels are interpreted nothing is tuned."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TMM_PROGRESS", "0")
    fingerprint.cache_clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    fingerprint.cache_clear()


def install(*kernels: Any) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(FakeBlas(), *kernels), "fakes")
    made = Dispatcher(registry, Tuner(FakeTimer({"fast": 1.0, "blas": 10.0})), CacheStore())
    dispatch.default_dispatcher.made = made
    warm.forget_plans()
    return made


def _raises(error: Exception) -> Callable[[Tensor], Tensor]:
    def spoil(out: Tensor) -> Tensor:
        raise type(error)(*error.args)  # another one, since this one outlives the call

    return spoil


def _absent() -> None:
    install(FakeKernel("fast"))
    assert not _root().exists()


def _bind_raises() -> None:
    install(FakeKernel("fast", bind_error=ValueError("no such tile")))


def _launch_raises() -> None:
    install(FakeKernel("fast", spoil=_raises(ValueError("no such tile"))))


def _wrong() -> None:
    install(FakeKernel("fast", spoil=lambda out: out + 1))


def _declining_raises() -> None:
    def against(_: Any) -> list[str]:
        raise ValueError("no idea")

    install(FakeKernel("fast", against=against))


def _no_memory() -> None:
    install(FakeKernel("fast", spoil=_raises(torch.cuda.OutOfMemoryError("no memory"))))


def _root_is_a_file() -> None:
    _root().parent.mkdir(parents=True, exist_ok=True)
    _root().write_text("")
    install(FakeKernel("fast"))


def _damaged() -> None:
    install(FakeKernel("fast"))
    tmm_core.matmul(A, B)
    for path in _root().rglob("*.json"):
        path.write_text("{")
    install(FakeKernel("fast"))


def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmm_cache import store

    def acquire(path: Path, timeout: float) -> Any:
        raise OSError(37, "no locks available")

    monkeypatch.setattr(store, "acquire", acquire)
    install(FakeKernel("fast"))


def _full(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(*names: Any, **more: Any) -> None:
        if str(names[-1]).endswith(".json"):
            raise OSError(28, "no space left on device")
        real(*names, **more)

    monkeypatch.setattr(os, "replace", replace)
    install(FakeKernel("fast"))


class _Broken:
    name, group, value, dist = "broken", "tmm_core", "broken.plugin", None

    def load(self) -> Any:
        raise ValueError("no such library") from KeyError("its cause")


def _a_plugin_fails() -> None:
    registry = Registry(lambda: [_Broken()], baseline=FakeBlas)  # type: ignore[list-item]
    timer = FakeTimer({"blas": 1.0})
    dispatch.default_dispatcher.made = Dispatcher(registry, Tuner(timer), CacheStore())
    warm.forget_plans()


SITUATIONS: dict[str, Callable[..., None]] = {
    "a plugin fails": _a_plugin_fails,
    "no folder yet": _absent,
    "a bind raises": _bind_raises,
    "a launch raises": _launch_raises,
    "a wrong kernel": _wrong,
    "a query raises": _declining_raises,
    "no memory": _no_memory,
    "no folder possible": _root_is_a_file,
    "a damaged record": _damaged,
    "no locks": _no_locks,
    "a full disk": _full,
}


def _first_call(call: Callable[[], Any]) -> weakref.ref[Held]:
    held = Held()
    call()
    return weakref.ref(held)


@pytest.mark.filterwarnings("ignore::tmm_core.TmmWarning")
@pytest.mark.filterwarnings("ignore::tmm_cache.CacheWarning")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.slow(quick=10)
def test_a_first_call_leaves_its_caller_alone(
    situation: str, request: pytest.FixtureRequest
) -> None:
    set_up = SITUATIONS[situation]
    wants = set_up.__code__.co_varnames[: set_up.__code__.co_argcount]
    set_up(*map(request.getfixturevalue, wants))
    for call in (lambda: tmm_core.matmul(A, B), lambda: tmm_core.matmul(A, B, alpha=2.0)):
        held = _first_call(call)
        assert held() is None


def test_a_kept_fault_does_not_hold_the_exception_that_the_caller_handles() -> None:
    def call() -> None:
        try:
            raise OSError("the caller's own")
        except OSError:
            tmm_core.matmul(A, B)

    _a_plugin_fails()
    with pytest.warns(tmm_core.TmmWarning, match="no such library"):
        held = _first_call(call)
    gc.collect()
    assert held() is None
    (fault,) = dispatch.default_dispatcher().registry.faults()
    assert isinstance(fault.error, ValueError)
    assert isinstance(fault.error.__cause__, KeyError)
    assert fault.error.__context__ is fault.error.__cause__ or fault.error.__context__ is None


def _recorded() -> None:
    x = A.clone().requires_grad_()
    tmm_core.matmul(x, B, epilogue="silu").sum().backward()


def _converted() -> None:
    from tmm_core.nn import convert

    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.SiLU())
    convert(model)
    model(A)


CALLS: dict[str, Callable[[], Any]] = {
    "plain": lambda: tmm_core.matmul(A, B),
    "recorded": _recorded,
    "grouped": lambda: tmm_core.grouped_matmul(
        A, B.expand(2, 16, 32), offs=torch.tensor([20, 60], dtype=torch.int32)
    ),
    "a sparse operand": lambda: tmm_core.matmul(A.to_sparse(), B),
    "quantised": lambda: tmm_core.linear(A, tmm_core.quantize(B.t().contiguous(), "int8")),
    "planned": lambda: tmm_core.plan(A, B)(A, B),
    "explained": lambda: str(tmm_core.explain(A, B)),
    "tuned": lambda: tmm_core.tune(tmm_core.problem(A, B)),
    "vmapped": lambda: torch.vmap(tmm_core.matmul)(A[:, None], B.expand(60, 16, 32)),
    "converted": _converted,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow(quick=10)
def test_a_first_call_of_another_kind_leaves_no_cycle(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    held = _first_call(CALLS[call])
    assert held() is None
