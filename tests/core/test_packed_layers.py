"""Layers of GPTQ and AWQ packages after ``convert``. The classes here have the names, buffers and
arithmetic of the packages (gptqmodel 7.7, autoawq 0.2.9), and pack numbers one by one. They also
hold what the packages wrote. Where a package is installed, its class is tested as well."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from written_by_packages import written

import tmm_core
from tmm_core import Quantized, api
from tmm_core.nn import convert
from tmm_core.verify import compare

Tensor = torch.Tensor
K, N, GROUP = 128, 48, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WRITTEN = written()


def words(rows: Tensor, order: Any = range(8)) -> Tensor:
    """``[R, C]`` numbers below 16 in ``[R, C/8]`` words; bits 4i of a word hold number order[i]."""
    found = torch.zeros(rows.shape[0], rows.shape[1] // 8, dtype=torch.int64)
    for row in range(rows.shape[0]):
        for word in range(rows.shape[1] // 8):
            value = sum(int(rows[row, 8 * word + which]) << 4 * i for i, which in enumerate(order))
            found[row, word] = value - (1 << 32) if value >= 1 << 31 else value
    return found.to(torch.int32)


def numbers(packed: Tensor, order: Any = range(8)) -> Tensor:
    found = torch.empty(*packed.shape, 8, dtype=torch.int64, device=packed.device)
    for i, which in enumerate(order):
        found[..., which] = (packed.to(torch.int64) >> 4 * i) & 15
    return found.flatten(-2)


class _Packed(nn.Module):
    def __init__(self, k: int, n: int, symmetric: bool, bias: bool, bits: int = 4) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size, self.bits = k, n, GROUP, bits
        self.adapter = None
        self.codes = torch.randint(0, 16, (k, n))
        count = k // GROUP
        self.zeros = torch.full((count, n), 8) if symmetric else torch.randint(1, 16, (count, n))
        self.register_buffer("scales", (torch.rand(count, n) * 0.1 + 0.01).half())
        if bias:
            self.register_buffer("bias", torch.randn(n).half())
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        y = (x.double() @ self.values()).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def values(self) -> Tensor:
        raise NotImplementedError


class TorchLinear(_Packed):
    """gptqmodel's; before version 6 TorchQuantLinear."""

    def __init__(
        self, k: int = K, n: int = N, symmetric: bool = True, bias: bool = True,
        shuffled: bool = False, version: int = 2, bits: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(k, n, symmetric, bias, bits)
        g_idx = torch.arange(k) // GROUP
        self.register_buffer("g_idx", (g_idx[torch.randperm(k)] if shuffled else g_idx).int())
        self.register_buffer("qweight", words(self.codes.T).T.contiguous())
        self._qzeros_format = version
        self.register_buffer("qzeros", words((self.zeros - int(version == 1)) & 15))

    @property
    def weight(self) -> Any:
        return "what describes a weight"

    def qzero_format(self) -> int:
        return self._qzeros_format

    def values(self) -> Tensor:
        zeros = (numbers(self.qzeros) + int(self._qzeros_format == 1)) & 15
        codes = numbers(self.qweight.T).T
        rows = self.g_idx.long()
        return self.scales.double()[rows] * (codes - zeros[rows]).double()


class WQLinear_GEMM(_Packed):  # noqa: N801 (autoawq's name)
    def __init__(
        self, k: int = K, n: int = N, symmetric: bool = True, bias: bool = True, bits: int = 4
    ) -> None:
        super().__init__(k, n, symmetric, bias, bits)
        self.w_bit = bits
        self.register_buffer("qweight", words(self.codes, AWQ_ORDER))
        self.register_buffer("qzeros", words(self.zeros, AWQ_ORDER))

    def values(self) -> Tensor:
        codes, zeros = numbers(self.qweight, AWQ_ORDER), numbers(self.qzeros, AWQ_ORDER)
        each = (codes - zeros.repeat_interleave(GROUP, 0)).double()
        return each * self.scales.double().repeat_interleave(GROUP, 0)


class QuantLinear(TorchLinear):
    """auto_gptq's, whose zero points are of version 1."""

    qzero_format = None  # type: ignore[assignment]


class MarlinLinear(TorchLinear):
    """gptqmodel's, which rearranges its weights."""


TorchLinear.__module__ = MarlinLinear.__module__ = "gptqmodel.nn_modules.qlinear.torch"
WQLinear_GEMM.__module__ = "awq.modules.linear.gemm"
QuantLinear.__module__ = "auto_gptq.nn_modules.qlinear.qlinear_cuda_old"
KINDS: dict[str, Any] = {
    "gptq": lambda **more: TorchLinear(**more),
    "gptq, version 1": lambda **more: TorchLinear(version=1, **more),
    "gptq, activation order": lambda **more: TorchLinear(shuffled=True, **more),
    "auto_gptq": lambda **more: QuantLinear(version=1, **more),
    "awq": lambda **more: WQLinear_GEMM(**more),
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weight and epilogue of every product that is asked for."""
    calls: list[Any] = []
    call = api.linear

    def spy(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((weight, kwargs.get("epilogue")))
        return call(x, weight, *args, **kwargs)

    monkeypatch.setattr(api, "linear", spy)
    return calls


def close(found: Tensor, expected: Tensor) -> None:
    assert compare.error(found, expected.double()) <= 2 * compare.TOLERANCE[found.dtype]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name, t in one.items():
        assert t.dtype is other[name].dtype
        assert torch.equal(t, other[name]), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(quick=6)
def test_layers(
    kind: str, symmetric: bool, dtype: torch.dtype, device: str, products: list[Any]
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        KINDS[kind](symmetric=symmetric), nn.SiLU(), nn.Linear(N, 64, dtype=dtype),
        KINDS[kind](k=64, n=24, symmetric=symmetric, bias=False),
    )  # fmt: skip
    model.requires_grad_(False).to(device)
    original = copy.deepcopy(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    report = convert(model)
    assert not report.left
    layer = model[0]
    assert isinstance(layer.weight, Quantized)
    assert (layer.weight.zero is None) is symmetric
    assert "qweight" not in layer._buffers
    x = torch.randn(3, 5, K, dtype=dtype, device=device)
    close(model(x), original(x))
    close(layer(x), original[0](x))
    assert [epilogue for _, epilogue in products] == ["silu", "", "", ""]
    assert products[0][0] is layer._parameters["weight"]
    same(model.state_dict(), before)
    assert torch.equal(layer.qzeros, before["0.qzeros"])
    # load_state_dict reads other words; copies and pickles keep theirs.
    other = nn.Sequential(
        KINDS[kind](symmetric=False), nn.SiLU(), nn.Linear(N, 64, dtype=dtype),
        KINDS[kind](k=64, n=24, bias=False),
    ).requires_grad_(False).to(device)  # fmt: skip
    model.load_state_dict(other.state_dict())
    close(model(x), other(x))
    same(model.state_dict(), other.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    same(torch.load(file), other.state_dict())
    again = copy.deepcopy(model)
    close(again(x), other(x))
    report.undo()
    assert type(layer).__mro__[1] is not nn.Module
    assert type(layer) is type(original[0])
    assert set(layer._buffers) == set(original[0]._buffers)
    assert not layer._parameters
    same(model.state_dict(), other.state_dict())
    close(model(x), other(x))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptqmodel", TorchLinear), ("gptqmodel, activation order", TorchLinear),
        ("auto_gptq", QuantLinear), ("auto_gptq, symmetric", QuantLinear),
        ("autoawq", WQLinear_GEMM),
    ],
)  # fmt: skip
def test_layers_with_what_packages_wrote(name: str, kind: Any) -> None:
    stored = WRITTEN[name]
    values = stored["values"]
    layer = kind(k=values.shape[1], n=values.shape[0], bias=False)
    layer.group_size = 64
    for tensor in ("qweight", "qzeros", "scales", "g_idx"):
        if tensor in stored:
            layer.register_buffer(tensor, stored[tensor].clone())
    layer._qzeros_format = 2 if name.startswith("gptqmodel") else 1
    before = {tensor: t.clone() for tensor, t in layer.state_dict().items()}
    report = convert(nn.Sequential(layer))
    assert not report.left
    x = torch.randn(5, values.shape[1], dtype=torch.float16)
    close(layer(x), x.double() @ values.double().T)
    same(layer.state_dict(), before)


def test_gradients_are_refused() -> None:
    layer = TorchLinear()
    convert(nn.Sequential(layer))
    with pytest.raises(RuntimeError, match="no derivative"):
        layer(torch.randn(2, K, dtype=torch.float16, requires_grad=True)).sum().backward()


def test_a_load_that_fails_leaves_the_layer_as_it_was() -> None:
    layer = TorchLinear()
    convert(nn.Sequential(layer))
    x = torch.randn(2, K, dtype=torch.float16)
    expected, state = layer(x), layer.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({**state, "qweight": state["qweight"][:4]})
    assert torch.equal(layer(x), expected)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = layer.register_load_state_dict_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        layer.load_state_dict(state)
    assert torch.equal(layer(x), expected)
    hook.remove()
    layer.load_state_dict(state)
    assert torch.equal(layer(x), expected)


def test_other_layers_are_named_with_the_reason() -> None:
    uneven = TorchLinear()
    uneven.g_idx[0] = 3
    adapted = TorchLinear()
    adapted.adapter = "LoRA"
    rotated, in_part = TorchLinear(), TorchLinear()
    rotated.online_full_had = in_part.online_partial_had = True
    layers = {
        "rearranges its weights": MarlinLinear(),
        "groups of other sizes": uneven,
        r"more than a product \(adapter\)": adapted,
        r"more than a product \(online_full_had\)": rotated,
        r"more than a product \(online_partial_had\)": in_part,
        "8 bits": TorchLinear(bits=8),
        "meta device": TorchLinear().to("meta"),
        "scales must have shape": TorchLinear(),
    }
    layers["scales must have shape"].scales = torch.rand(K // GROUP, N + 8).half()
    for reason, layer in layers.items():
        kind = type(layer)
        report = convert(nn.Sequential(layer))
        assert len(report.left) == 1
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(report.left[0].reason)
        assert type(layer) is kind
        assert "qweight" in layer._buffers


@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales"])
def test_a_layer_with_only_some_buffers_is_not_recognised(missing: str) -> None:
    """Codebooks and rotations have scales too."""
    layer = TorchLinear()
    del layer._buffers[missing]
    (left,) = convert(nn.Sequential(layer)).left
    assert left.reason == "its code multiplies tensors itself (@)"


def test_the_order_of_k_of_a_small_example() -> None:
    gptq = Quantized.layouts("gptq")
    assert gptq.order(torch.tensor([0, 0, 1, 1]), 2) is None
    assert gptq.order(None, 2) is None
    assert gptq.order(torch.tensor([1, 0, 0, 1]), 2).tolist() == [1, 2, 0, 3]


def test_the_class_of_autoawq() -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm", exc_type=ImportError)
    plain = nn.Linear(K, 64).half()  # it packs multiples of 32, and does not clamp
    scales = (torch.rand(K // GROUP, 64) * 0.01 + 0.03).half()
    zeros = torch.randint(4, 12, scales.shape).half()
    layer = gemm.WQLinear_GEMM.from_linear(plain, 4, GROUP, scales=scales, zeros=zeros)
    expected = gemm.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    convert(nn.Sequential(layer))
    x = torch.randn(5, K, dtype=torch.float16)
    close(layer(x), x.double() @ expected.double() + layer.bias.double())
    same(layer.state_dict(), before)


def test_the_class_of_gptqmodel() -> None:
    torch_linear = pytest.importorskip(
        "gptqmodel.nn_modules.qlinear.torch", exc_type=ImportError
    ).TorchLinear
    for shuffled in (False, True):
        layer = torch_linear(4, GROUP, False, shuffled, K, N, bias=True)
        scale, zero = torch.rand(N, K // GROUP) * 0.01 + 0.01, torch.randint(4, 12, (N, K // GROUP))
        g_idx = (torch.arange(K) // GROUP).int()
        layer.pack_original(
            nn.Linear(K, N), scale, zero.float(), g_idx[torch.randperm(K)] if shuffled else g_idx
        )
        layer.qzero_format(2)
        expected = layer.dequantize_weight().double()
        before = {name: t.clone() for name, t in layer.state_dict().items()}
        assert not convert(nn.Sequential(layer)).left
        x = torch.randn(5, K, dtype=torch.float16)
        close(layer(x), x.double() @ expected + layer.bias.double())
        same(layer.state_dict(), before)


def test_a_weight_with_this_order_is_still_refused_as_it_is() -> None:
    layer = TorchLinear(shuffled=True)
    with pytest.raises(ValueError, match="convert"):
        tmm_core.Quantized.from_gptq(layer.qweight, layer.qzeros, layer.scales, GROUP, layer.g_idx)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("kind", KINDS)
def test_words_that_are_assigned_are_used(kind: str, name: str) -> None:
    layer, other = KINDS[kind](symmetric=False), KINDS[kind](symmetric=False)
    if name not in layer._buffers:
        pytest.skip("AWQ has no order of activation")
    original = copy.deepcopy(layer)
    x = torch.randn(5, K)
    report = convert(nn.Sequential(layer))
    layer(x)
    for each in (layer, original):
        setattr(each, name, other._buffers[name].clone())
    torch.testing.assert_close(layer(x), original(x), rtol=1e-3, atol=1e-2)
    same(layer.state_dict(), original.state_dict())
    report.undo()
    same(layer.state_dict(), original.state_dict())


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_assignment_that_fails_leaves_the_layer_as_it_was(kind: str, name: str) -> None:
    layer = KINDS[kind](symmetric=False)
    report = convert(nn.Sequential(layer))
    x = torch.randn(5, K)
    expected, kept = layer(x), {k: t.clone() for k, t in layer.state_dict().items()}
    given = kept[name]
    for wrong, error in ((5, TypeError), (given[:3], ValueError), (None, ValueError)):
        with pytest.raises(error):
            setattr(layer, name, wrong)
        assert torch.equal(layer(x), expected)
        same(layer.state_dict(), kept)
    setattr(layer, name, given)
    assert torch.equal(layer(x), expected)
    report.undo()
    same(layer.state_dict(), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_written_are_used(kind: str) -> None:
    layer = KINDS[kind]()
    original = copy.deepcopy(layer)
    x = torch.randn(5, K)
    convert(nn.Sequential(layer))
    for write in (lambda scales: scales.mul_(2), lambda scales: scales.data[1].fill_(0.25)):
        write(layer.scales)
        write(original.scales)
        torch.testing.assert_close(layer(x), original(x), rtol=1e-3, atol=1e-2)
