"""Torch's default device and dtype change nothing: every tensor that tmm makes names its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tmm_core
from tmm_core.launch import warm
from tmm_core.nn import Experts

ROOT = Path(__file__).parents[2]

#: Torch's factories, and whether their dtype depends on the default if nothing tells it.
FACTORIES = {
    "arange": False, "as_tensor": False, "empty": True, "empty_strided": True, "eye": True,
    "full": False, "linspace": True, "logspace": True, "normal": True, "ones": True,
    "rand": True, "randint": False, "randn": True, "randperm": False, "scalar_tensor": True,
    "tensor": False, "zeros": True, "Generator": False, "from_numpy": False,
}  # fmt: skip


def factories(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """The calls of torch's factories in a module, each with its name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in FACTORIES:
            yield node, node.func.attr


def sources() -> list[Path]:
    """Every module of the package and of the built-in plugins."""
    return [*(ROOT / "tmm_core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]


@pytest.mark.slow
def test_every_tensor_names_its_device_and_dtype() -> None:
    silent = []
    count = 0
    for path in sources():
        for call, name in factories(path):
            count += 1
            given = {keyword.arg for keyword in call.keywords}
            if name == "from_numpy" or None in given:  # shares memory; keywords from elsewhere
                continue
            place = f"{path.relative_to(ROOT)}:{call.lineno} torch.{name}"
            if name == "Generator":
                if not call.args and "device" not in given:
                    silent.append(f"{place} without a device")
                continue
            if "device" not in given:
                silent.append(f"{place} without a device")
            meta = any(getattr(keyword.value, "value", None) == "meta" for keyword in call.keywords)
            if FACTORIES[name] and "dtype" not in given and not meta:  # made for its strides
                silent.append(f"{place} without a dtype")
    assert count > 30  # it finds them
    assert not silent, "\n".join(silent)


Tensor = torch.Tensor
A, B, W = (torch.ones(shape) for shape in ((6, 8), (8, 4), (2, 8, 4)))
OFFS, ROWS, FACTORS = torch.tensor([2, 6], dtype=torch.int32), torch.arange(6), torch.ones(6)
ROUTED = {"a_index": ROWS, "out_index": ROWS, "out_weights": FACTORS}
E4M3 = torch.float8_e4m3fn


def backward(y: Tensor) -> None:
    y.sum().backward()


def grad(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


#: Uses of every part that makes tensors.
USES: dict[str, Callable[[], Any]] = {
    "a product": lambda: tmm_core.matmul(A, B, alpha=0.5, epilogue="silu"),
    "a recorded product": lambda: backward(tmm_core.matmul(grad(A), grad(B), epilogue="gelu")),
    "eight bits": lambda: tmm_core.matmul(A.to(E4M3), B.to(E4M3), scale_a=FACTORS[0]),
    "groups": lambda: tmm_core.grouped_matmul(A, W, offs=OFFS, **ROUTED),
    "recorded groups": lambda: backward(
        tmm_core.grouped_matmul(grad(A), grad(W), offs=OFFS, epilogue="silu", **ROUTED)
    ),
    "groups of eight bits": lambda: tmm_core.grouped_matmul(A.to(E4M3), W.to(E4M3), offs=OFFS),
    "a batch with a bias each": lambda: tmm_core.grouped_matmul(
        A.view(2, 3, 8), W, bias=W[:, 0]
    ),
    "a plan": lambda: tmm_core.plan(A, B)(A, B),
    "a compiled product": lambda: torch.compile(
        lambda a: tmm_core.matmul(a, B, epilogue="silu"), backend="aot_eager"
    )(A),
    "a mapped product": lambda: torch.vmap(lambda a: tmm_core.matmul(a, B))(A.view(2, 3, 8)),
    "experts": lambda: EXPERTS(A, ROWS[:2].expand(6, 2), torch.ones_like(A[:, :2])),
}  # fmt: skip
EXPERTS = Experts(2, 8, 12)
#: As a caller may set them.
DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the context of a device": lambda: torch.device("meta"),
    "a default device": lambda: restored(torch.set_default_device, "meta", None),
    "fp64": lambda: restored(torch.set_default_dtype, torch.float64, torch.float32),
    "fp16": lambda: restored(torch.set_default_dtype, torch.float16, torch.float32),
}


@contextmanager
def restored(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.slow
def test_torchs_defaults_change_nothing(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")
    wanted = {name: use() for name, use in USES.items()}
    torch.compiler.reset()
    warm.forget_plans()
    with DEFAULTS[default]():
        found = {name: use() for name, use in USES.items()}
    for name, y in found.items():
        if isinstance(y, Tensor):
            torch.testing.assert_close(y, wanted[name], msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("default", DEFAULTS)
def test_errors_do_not_depend_on_torchs_defaults(default: str) -> None:
    with DEFAULTS[default]():
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            tmm_core.matmul(A, B[:5])
        with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
            tmm_core.matmul(A, B, out=torch.empty(6, 4, dtype=torch.bfloat16, device="cpu"))


@pytest.mark.parametrize("default", ["the context of a device", "fp64"])
@pytest.mark.slow
def test_tuning_under_defaults(default: str) -> None:
    """Kernels of the interpreter are verified, on groups too."""
    eight_bit = tmm_core.problem(A.to(E4M3), B.to(E4M3), epilogue="silu")
    for problem in (eight_bit, tmm_core.problem(A, W, offs=OFFS, **ROUTED)):
        with DEFAULTS[default]():
            (record,) = tmm_core.tune(problem, budget=1.0)
        verified = {c.kernel for c in record.candidates if c.status in ("ok", "slow")}
        assert len(verified) > 1, record
