"""gpt-oss's gated epilogue, whose gate and up are alternate columns: values, verification,
proof."""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from fakes import problem
from tmm_blas.blas import Blas, BlasConfig

import tmm_core
from tmm_core import Epilogue, Groups, Operand
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.nn import Experts, GatedMLP, activation
from tmm_core.registry.registry import Registry
from tmm_core.testing import EpilogueConformance
from tmm_core.verify.verifier import Verifier

Tensor = torch.Tensor
FP32 = torch.float32


@pytest.fixture(autouse=True)
def by_blas() -> Iterator[None]:
    with tmm_core.override(disable="triton.ragged"):
        yield


def gated(z: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = z[..., ::2].clamp(max=limit), z[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class TestClamped(EpilogueConformance):
    epilogue = replace(CLAMPED, name="clamped_here")  # its name is taken


def test_it_is_called_by_its_name() -> None:
    a, b = torch.randn(2, 5, 16), 8 * torch.randn(16, 12, requires_grad=True)
    b = b.detach().requires_grad_()
    y = tmm_core.matmul(a, b, epilogue="clamped_swiglu(1.5,2)+tanh", residual=a[..., :6])
    z = (a @ b).detach().requires_grad_()
    expected = gated(z, 1.5, 2.0).tanh() + a[..., :6]
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    (dz,) = torch.autograd.grad(expected, z, grad)
    (db,) = torch.autograd.grad(y, b, grad)
    torch.testing.assert_close(db, (a.mT @ dz).sum(0), rtol=1e-4, atol=1e-4)
    registry = Registry()
    assert registry.epilogue("clamped_swiglu") == CLAMPED
    key = CLAMPED.with_parameters(1.5, 2).key
    assert key.startswith("clamped_swiglu(1.5,2.0)@")
    assert registry.epilogue(key).interleaved
    halves = replace(CLAMPED, interleaved=False)
    assert halves.key != CLAMPED.key


def test_invalid_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="interleaved but not gated"):
        Epilogue("wrong", torch.sin, interleaved=True)
    with pytest.raises(ValueError, match="takes no derivative"):
        replace(CLAMPED, derivative=lambda gate, up: (gate, up))
    with pytest.raises(ValueError, match="not one function of gate and up halves"):
        GatedMLP(8, 16, activation="clamped_swiglu")  # whose weights are two halves


@pytest.mark.parametrize("groups", [None, Groups(3, "m"), Groups(2, "k")])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.slow(quick=6)
def test_verified_on_its_columns(groups: Groups | None, sampled: bool) -> None:
    row = Operand(FP32)
    cpu = replace(problem().device, interpreted=False)
    instance = replace(
        problem(200, 96, 32, epilogue=CLAMPED, bias=FP32, groups=groups), a=row, b=row, out=row,
        device=cpu,
    )  # fmt: skip
    right: Any = Blas().bind(instance, BlasConfig())
    halves = replace(CLAMPED, interleaved=False)
    wrong: Any = Blas().bind(replace(instance, epilogue=halves), BlasConfig())
    verifier = Verifier(instance, torch.device("cpu"), sampled=sampled)
    assert verifier.verdict(right, extent="brief" if sampled else "whole").ok
    assert "exceeds" in str(verifier.verdict(wrong, extent="brief" if sampled else "whole").reason)


def test_kernels_of_halves_decline() -> None:
    explained = tmm_core.explain(torch.ones(4, 8), torch.ones(8, 6), epilogue="clamped_swiglu")
    (*_, reason) = explained.rejected["triton.fused_epilogue"]
    assert reason == "pairs columns by halves, 'clamped_swiglu' alternate ones"


def test_a_layer_with_alternate_rows() -> None:
    layer = Experts(3, 6, 5, activation="clamped_swiglu", bias=True, dtype=torch.float64)
    x, index = torch.randn(4, 6, dtype=torch.float64), torch.tensor([[0], [2], [2], [1]])
    bias, down = layer.gate_up_proj_bias, layer.down_proj_bias
    assert bias is not None
    assert down is not None
    rows = []
    for token, expert in enumerate(index[:, 0].tolist()):
        between = gated(layer.gate_up_proj[expert] @ x[token] + bias[expert])
        rows.append(layer.down_proj[expert] @ between + down[expert])
    weights = torch.ones(4, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(x, index, weights), torch.stack(rows))


# -- the proof that a layer's gate is this one -----------------------------------------------


class Layer(torch.nn.Module):
    alpha: Any = 1.702
    limit: Any = 7.0

    def gate(self, z: Tensor) -> Tensor:
        gate, up = z[..., ::2], z[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def test_a_gate_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    assert activation.gate_epilogue(layer, Layer.gate) == CLAMPED.key
    with monkeypatch.context() as patch:
        patch.setattr(activation, "_examine_pairs", None)
        assert activation.gate_epilogue(layer, Layer.gate) == CLAMPED.key
    layer.limit = 3.0
    assert activation.gate_epilogue(layer, Layer.gate) == CLAMPED.with_parameters(1.702, 3).key
    again, same = pickle.loads(pickle.dumps(layer)), activation.gate_epilogue(layer, Layer.gate)
    assert activation.gate_epilogue(again, Layer.gate) == same
    layer.limit = None
    assert activation.gate_epilogue(layer, Layer.gate) is None
    assert activation.gate_epilogue(torch.nn.Module(), Layer.gate) is None


def test_a_gate_of_its_own_numbers_is_compared_with_the_layers() -> None:
    class Fixed(Layer):
        def gate(self, z: Tensor) -> Tensor:
            gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(min=-7.0, max=7.0)
            return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    layer = Fixed()
    for alpha, limit in ((1.0, 7.0), (1.702, 7.0), (1.702, 3.0), (1.0, 7.0)):
        layer.alpha, layer.limit = alpha, limit
        found = CLAMPED.key if (alpha, limit) == (1.702, 7.0) else None
        assert activation.gate_epilogue(layer, Fixed.gate) == found


def test_a_gate_that_depends_on_the_mode_is_known_in_each() -> None:
    class Mode(Layer):
        def gate(self, z: Tensor) -> Tensor:
            gate, up = z[..., ::2], z[..., 1::2]
            if self.training:
                return gate * up
            gate = gate.clamp(min=None, max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    layer = Mode().eval()
    assert activation.gate_epilogue(layer, Mode.gate) == CLAMPED.key
    assert activation.gate_epilogue(layer.train(), Mode.gate) is None
    assert activation.gate_epilogue(layer.eval(), Mode.gate) == CLAMPED.key


def test_a_gate_is_proven_however_it_clamps() -> None:
    def gate(layer: Any, z: Tensor) -> Tensor:
        gate, up = z[..., 0::2], z[..., 1::2]
        gate, up = gate.clamp_max(layer.limit), up.clamp_min(-layer.limit).clamp_max(layer.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * layer.alpha))

    assert activation.gate_epilogue(Layer(), gate) == CLAMPED.key


GATES: dict[str, Any] = {
    "more": lambda layer, z: layer.gate(z) * 1.0001,
    "unclamped": lambda layer, z: (
        (z[..., 1::2] + 1) * z[..., ::2] * (1.702 * z[..., ::2]).sigmoid()
    ),
    "other columns": lambda layer, z: layer.gate(z.flip(-1)),
    "the first column": lambda layer, z: layer.gate(z) + 0 * z[..., :1],
    "the mean": lambda layer, z: layer.gate(z) + 0 * z.mean(),
    "a shift": lambda layer, z: layer.gate(z) + 0 * z[..., 1:].sum(),
    "its values": lambda layer, z: layer.gate(z) if z.sum() > 0 else z,
    "a random one": lambda layer, z: layer.gate(z) + 0 * torch.rand(()),
}


@pytest.mark.parametrize("case", GATES)
def test_other_gates_are_not_recognised(case: str) -> None:
    assert activation.gate_epilogue(Layer(), GATES[case]) is None


def test_a_graph_traced_before_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_of_pairs", {})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert activation.gate_epilogue(Layer(), Layer.gate) is None


class Halves(torch.nn.Module):
    cap: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = torch.nn.SiLU()

    def gate(self: Any, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        if self.cap is not None:
            gate = torch.tanh(gate.float() / self.cap).to(gate.dtype) * self.cap
        return cast(Tensor, self.act_fn(gate) * up)

    def swapped(self: Any, z: Tensor) -> Tensor:
        up, gate = z.chunk(2, -1)
        return cast(Tensor, self.act_fn(gate) * up)

    def always_silu(self: Any, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def limited(self: Any, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return cast(Tensor, self.act_fn(gate.clamp(max=self.cap or 1e29)) * up)

    def configured(self: Any, z: Tensor) -> Tensor:
        return Halves.gate(self, z) * self.config.factor


def test_a_gate_of_halves_is_known_by_its_values_and_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers' own gates may cap or limit what they multiply: then they are not fused."""
    monkeypatch.setattr(activation, "_of_halves", {})
    layer, capped = Halves(), Halves()
    capped.cap = 4.0
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not activation.multiplies_halves(layer, Halves.gate)
    assert not activation.multiplies_halves(capped, Halves.gate)
    assert activation.multiplies_halves(layer, Halves.gate)
    assert not activation.multiplies_halves(capped, Halves.gate)
    assert len(activation._of_halves[Halves]) == 2
    for gate in (Halves.swapped, Halves.always_silu, Halves.limited):
        assert not activation.multiplies_halves(layer, gate)


def test_a_gate_that_reads_objects_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_of_halves", {})
    layer: Any = Halves()
    layer.config = types.SimpleNamespace(factor=1.0)
    assert not activation.multiplies_halves(layer, Halves.configured)
    assert not activation._of_halves


def test_the_last_gates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_of_halves", {})
    monkeypatch.setattr(activation, "_MOST_GATES", 2)
    layer = Halves()
    for cap in (1.0, 2.0, 3.0):
        layer.cap = cap
        assert not activation.multiplies_halves(layer, Halves.gate)
    known = activation._of_halves[Halves]
    assert [dict(each.reached.reads)["cap"] for each in known] == [2.0, 3.0]


def test_it_is_not_a_builtin_epilogue() -> None:
    """Kernels of others need not know it."""
    with pytest.raises(tmm_core.UnknownNameError):
        parse("clamped_swiglu")
