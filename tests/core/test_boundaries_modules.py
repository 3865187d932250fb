"""Small decisions of layers and of tmm's interface to torch, each at and next to its limit."""

from __future__ import annotations

import abc
import copy
import io
import pickle
import re
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import tmm_core
from tmm_core.interop import autograd_state, fallbacks
from tmm_core.nn import SwiGLU, activation, convert, packed_linear
from tmm_core.nn.convert import _unfit
from tmm_core.nn.joint_storage import whole
from tmm_core.nn.reached import Reached
from tmm_core.nn.together import joint_of

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.usefixtures("blas_alone")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


# -- layers that share memory ------------------------------------------------------------


def test_undo_removes_only_its_own_hooks() -> None:
    model = Gated()
    seen: list[str] = []
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    model.register_state_dict_post_hook(lambda module, state, *rest: seen.append("saved"))
    report = convert(model)
    assert any(change.kind == "gated" for change in report.changes)
    assert (len(model._load_state_dict_post_hooks), len(model._state_dict_hooks)) == (2, 2)
    report.undo()
    assert (len(model._load_state_dict_post_hooks), len(model._state_dict_hooks)) == (1, 1)
    model.load_state_dict(model.state_dict())
    assert seen == ["saved", "loaded"]
    assert whole(model.gate.weight)


def test_weights_are_one_again_after_each_move_of_a_model() -> None:
    model = SwiGLU(8, 16)
    assert model.merged
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    assert model.merged
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model)),
        "torch.load": torch.load(file, weights_only=False),
    }  # fmt: skip
    x = torch.randn(3, 8)
    right = model(x)
    for name, made in copies.items():
        assert made.merged, name
        torch.testing.assert_close(made(x), right)
        assert made.gate_proj.weight.untyped_storage().nbytes() == 4 * 2 * 8 * 16
        assert made.gate_proj.weight.requires_grad
    assert model.double().merged
    model.separate()
    assert not model.merged
    model.separate()
    assert model.merge()


def test_a_state_dict_has_a_storage_for_each_parameter() -> None:
    model = SwiGLU(8, 16, bias=True)
    for name, t in model.state_dict().items():
        assert t.untyped_storage().nbytes() == t.nbytes, name


@pytest.mark.parametrize("given", ["both", "none", "first", "second"])
def test_biases_are_joined_if_both_are_there(given: str) -> None:
    memory, biases = torch.randn(4, 3), torch.randn(4)
    weights = [memory[:2], memory[2:]]
    first = biases[:2] if given in ("both", "first") else None
    second = biases[2:] if given in ("both", "second") else None
    found = joint_of(weights, [first, second])
    if given in ("first", "second"):
        assert found is None
        return
    assert found is not None
    assert torch.equal(found[0], memory)
    assert (found[1] is None) == (given == "none")
    assert found[1] is None or torch.equal(found[1], biases)
    assert joint_of([memory[:2], memory[2:].clone()], [None, None]) is None
    assert joint_of(weights, [biases[:2], biases[2:].clone()]) is None


# -- activations -------------------------------------------------------------------------


class Slope(nn.Module):
    def __init__(self, slope: float = 0.25) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class WithBuffer(nn.Tanh):
    """An activation whose range is loaded with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.range == 1 else x  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "epilogue"),
    [
        (nn.ReLU(), "relu"), (nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (nn.Tanh(), "tanh"),
        (nn.GELU("tanh"), "gelu_tanh"), (nn.Sigmoid(), "sigmoid"), (nn.Softplus(), "softplus"),
        (nn.LeakyReLU(0.5), "leaky_relu(0.5)"), (nn.ReLU6(), None), (nn.ELU(), None),
        (nn.PReLU(), None), (nn.Softmax(-1), None), (nn.Linear(2, 2), None),
        (nn.Sequential(nn.ReLU()), None), (nn.Softplus(2.0), None), (WithBuffer(), None),
    ],
)  # fmt: skip
def test_modules_that_are_recognised_as_epilogues(module: nn.Module, epilogue: str | None) -> None:
    found = activation.recognise(module)
    assert (None if found is None else found.epilogue) == epilogue
    if found is not None:
        assert found.is_(module)
        assert not found.is_(nn.Sequential(module))
        hook = module.register_forward_hook(lambda *_: None)
        assert not found.is_(module)
        assert activation.recognise(module) is None
        hook.remove()
        assert found.is_(module)


@pytest.mark.parametrize(
    ("forward", "epilogue"),
    [
        (lambda self, x: x / (1 + torch.exp(-x)), "silu"),
        (lambda self, x: x.mul(torch.sigmoid(x)), "silu"),
        (lambda self, x: x - (x - x.relu()), "relu"),
        (lambda self, x: (x**2).div(x + 1e-300) - x + torch.tanh(x), "tanh"),
        (lambda self, x: torch.pow(F.relu(x), 2), "relu2"),
        (lambda self, x: F.relu(x) ** 2, "relu2"),
        (lambda self, x: torch.square(F.relu(x)), "relu2"),
        (lambda self, x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gelu"),
        (lambda self, x: torch.tanh(x) + 0 * x, "tanh"), (lambda self, x: torch.abs(x), None),
        (lambda self, x: F.relu(x) if self.training else torch.tanh(x), None),
        (lambda self, x: F.relu(x) if self.training else torch.relu(x), "relu"),
        (lambda self, x: F.relu(x) if self.training else x, None),
        (lambda self, x: (F.relu(x), F.silu(x))[0], None), (lambda self, x: x, None),
        (lambda self, x: (F.relu(x), F.relu(x)), None),
    ],
)  # fmt: skip
def test_formulas_of_activations(forward: Any, epilogue: str | None) -> None:
    found = activation.recognise(type("Formula", (nn.Module,), {"forward": forward})())
    assert (None if found is None else found.epilogue) == epilogue


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        (1.5, float("1.5"), True), ([1], [1], True), ([1], [2], False),
        (1.0, 1, False), (1, True, False), (1.0, 2.0, False), ("a", "a", True),
        (partial(F.gelu, approximate="tanh"), partial(F.gelu, approximate="tanh"), True),
        (partial(F.gelu, approximate="tanh"), partial(F.gelu, approximate="none"), False),
        (partial(F.gelu), F.gelu, False), (partial(F.gelu), partial(F.silu), False),
    ],
)  # fmt: skip
def test_attributes_that_a_proof_read_must_be_unchanged(was: Any, now: Any, same: bool) -> None:
    module = nn.Module()
    reached = Reached(reads=(("x", was),))
    assert not reached.holds(module)
    module.x = now
    assert reached.holds(module) is same
    assert Reached().holds(module)


def test_hooks_and_a_forward_of_the_object_are_more_than_the_class() -> None:
    for name in (
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):  # fmt: skip
        module = nn.ReLU()
        assert not activation.interposed(module)
        getattr(module, name)(lambda *_: None)
        assert activation.interposed(module), name
    own, other = nn.ReLU(), nn.ReLU()
    own.forward = own.forward  # type: ignore[method-assign]  # as the package kernels does
    assert not activation.interposed(own)
    own.forward = other.forward  # type: ignore[method-assign]
    assert activation.interposed(own)
    own.forward = F.relu  # type: ignore[method-assign, assignment]
    assert activation.interposed(own)


def test_a_module_is_classed_as_an_activation_by_the_file_of_its_class() -> None:
    assert activation.is_activation(nn.ELU())
    assert not activation.is_activation(nn.PReLU())
    assert not activation.is_activation(nn.Linear(2, 2))
    assert not activation.is_activation(Slope())


@pytest.mark.parametrize(
    ("function", "epilogue"),
    [
        (lambda x: F.relu(x), "relu"), (lambda x: torch.tanh(x), "tanh"),
        (lambda x: F.leaky_relu(x), "leaky_relu(0.01)"),
        (lambda x: F.leaky_relu(x, negative_slope=0.3), "leaky_relu(0.3)"),
        (lambda x: x.relu(), "relu"), (lambda x: x.abs(), None), (lambda x: x + x, None),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"), (lambda x: x.sum(), None),
    ],
)  # fmt: skip
def test_calls_in_a_graph_that_are_epilogues(function: Any, epilogue: str | None) -> None:
    graph = fx.symbolic_trace(function).graph
    node = list(graph.nodes)[1]
    assert activation.of_node(node) == epilogue


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda z: z * torch.sigmoid(z), "silu"), (lambda z: z.relu(), "relu"),
        (lambda z: z.relu() + 1e-11, None), (lambda z: z.relu()[1:], None),
        (lambda z: z.relu().float(), None), (lambda z: None, None),
        (lambda z: z.relu()[None], None),
        (lambda z: torch.where(z.abs() > 9000, 0.0, z.relu()), None),
        (lambda z: torch.where((z > 9001) & (z < 9010), 0.0, z.relu()), None),
    ],
)  # fmt: skip
def test_a_function_is_an_epilogue_if_it_agrees_near_zero_and_far(function: Any, name: Any) -> None:
    assert activation.named(function, ("relu", "silu")) == name


# -- packages of packed layers -----------------------------------------------------------


def layer(name: str, module: str, **fields: Any) -> Any:
    kind = type(name, (nn.Module,), {"__module__": module})
    made: Any = kind()
    for word in ("qweight", "qzeros"):
        made.register_buffer(word, torch.zeros(8, 8, dtype=torch.int32))
    made.register_buffer("scales", torch.ones(1, 8, dtype=torch.float16))
    for field, value in fields.items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize(
    ("name", "module", "layout"),
    [
        ("TorchLinear", "gptqmodel.nn", "gptq"), ("TorchQuantLinear", "gptqmodel.nn", "gptq"),
        ("TritonV2Linear", "gptqmodel.nn", "gptq"), ("TritonV2QuantLinear", "gptqmodel", "gptq"),
        ("AwqTorchLinear", "gptqmodel", "awq"), ("AwqTorchQuantLinear", "gptqmodel", "awq"),
        ("AwqGEMMLinear", "gptqmodel", "awq"), ("AwqGEMMQuantLinear", "gptqmodel", "awq"),
        ("AwqGEMMTritonLinear", "gptqmodel", "awq"),
        ("AwqGEMMTritonQuantLinear", "gptqmodel", "awq"),
        ("WQLinear_GEMM", "awq.modules", "awq"), ("WQLinear_GEMV", "awq.modules", None),
        ("MarlinQuantLinear", "gptqmodel", None), ("TorchLinear", "elsewhere", None),
        ("QuantLinear", "auto_gptq.nn_modules.qlinear.qlinear_cuda", "gptq"),
        ("QuantLinear", "auto_gptq.qlinear_cuda_old", "gptq"),
        ("QuantLinear", "auto_gptq.qlinear_triton", "gptq"),
        ("QuantLinear", "auto_gptq.qlinear_tritonv2", "gptq"),
        ("QuantLinear", "auto_gptq.qlinear_exllama", None),
        ("Other", "auto_gptq.qlinear_cuda", None),
    ],
)  # fmt: skip
def test_layouts_of_packages(name: str, module: str, layout: str | None) -> None:
    made = layer(name, module)
    assert packed_linear.layout_of(type(made)) == layout
    why = packed_linear.unfit(made)
    if layout is None:
        package = module.partition(".")[0]
        assert why is not None
        assert why.startswith(f"{package}'s {name} rearranges its weights")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bits": 8}, "its weight has 8 bits in words of torch.int32, not 4 in int32"),
        ({"w_bit": 3}, "its weight has 3 bits"), ({"bits": 4, "w_bit": 8}, None),
        ({"qweight": torch.zeros(8, 8)}, "its weight has 4 bits in words of torch.float32"),
        ({"adapter": object()}, r"its input or its output goes through more .* \(adapter\)"),
        ({"online_full_had": True}, r"\(online_full_had\)"), ({"adapter": None}, None),
        ({"online_partial_had": True}, r"\(online_partial_had\)"),
        ({"qweight": torch.zeros(8, 8, dtype=torch.int32, device="meta")}, "on the meta device"),
        ({"qzeros": torch.zeros(2, 8, dtype=torch.int32)}, "its layout is not supported"),
        ({}, None),
    ],
)  # fmt: skip
def test_why_a_packed_layer_is_left_alone(fields: dict[str, Any], why: str | None) -> None:
    made = layer("TorchLinear", "gptqmodel")
    made.qzeros = torch.zeros(1, 1, dtype=torch.int32)
    for name, value in fields.items():
        setattr(made, name, value)
    found = packed_linear.unfit(made)
    if why is None:
        assert found is None
        return
    assert found is not None
    assert re.search(why, found)


# -- torch's side ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "column"),
    [
        (torch.zeros(4, 6), False), (torch.zeros(4, 6).t(), True), (torch.zeros(6), False),
        (torch.zeros(4, 1), False), (torch.zeros(4, 1).t(), False), (torch.zeros(2, 4, 6).mT, True),
        (torch.zeros(4, 4)[::2, ::2], False),
    ],
)  # fmt: skip
def test_which_tensor_is_column_major(t: Tensor, column: bool) -> None:
    assert autograd_state.is_column_major(t) is column


def test_a_gradient_has_the_dtype_of_its_tensor() -> None:
    complex_ = torch.tensor([1 + 2j])
    assert autograd_state.as_gradient(complex_, F32).tolist() == [1.0]
    assert autograd_state.as_gradient(complex_, torch.complex128).dtype is torch.complex128
    same = torch.ones(2)
    assert autograd_state.as_gradient(same, F32) is same
    assert autograd_state.as_gradient(same, BF16).dtype is BF16
    assert not autograd_state.no_view(torch.ones(4)[:2])._is_view()
    assert autograd_state.no_view(same) is same
    assert autograd_state.form_of(None) is None
    assert autograd_state.form_of(same) == (torch.Size([2]), F32)


def test_which_calls_autograd_records() -> None:
    plain, learns = torch.ones(2), torch.ones(2, requires_grad=True)
    assert not autograd_state.recorded(plain, None)
    assert autograd_state.recorded(None, plain, learns)
    assert autograd_state.differentiated(learns)
    with torch.no_grad():
        assert not autograd_state.recorded(learns)
        assert not autograd_state.differentiated(learns)
        with torch.autograd.forward_ad.dual_level():
            assert autograd_state.differentiated(plain)
    seen: list[bool] = []
    torch.func.grad(lambda t: (seen.append(autograd_state.transformed()), t.sum())[1])(plain)
    assert seen == [True]
    assert not autograd_state.transformed()


@pytest.mark.parametrize(
    ("a", "b", "bias", "needed"),
    [
        ((2, 3), (3, 4), None, False), ((2, 3), (3, 4), (4,), False), ((2, 3), (3, 4), (1,), True),
        ((2, 3), (3, 4), (1, 4), True), ((2, 3), (3, 4), (2, 4), True), ((2, 3), (3,), (1,), False),
        ((2, 3), (3,), (2,), True), ((2, 3), (3, 4), (), True), ((2, 3), (), (1,), False),
    ],
)  # fmt: skip
def test_which_bias_no_kernel_takes(a: Any, b: Any, bias: Any, needed: bool) -> None:
    given = None if bias is None else torch.ones(bias)
    assert fallbacks.needs_fallback(torch.ones(a), torch.ones(b), given, None) is needed
    sparse = torch.ones(2, 3).to_sparse()
    dense = torch.ones(3, 4)
    for each in (
        (sparse, dense, None, None), (dense, sparse, None, None), (dense, dense, sparse, None),
        (dense, dense, None, sparse),
    ):  # fmt: skip
        assert fallbacks.needs_fallback(*each)


def test_a_weight_of_another_library_is_foreign() -> None:
    kind = type("Other", (torch.Tensor,), {"__module__": "library.part"})
    own = type("Own", (torch.Tensor,), {"__module__": "tmm_core.part"})
    torchs = type("Own", (torch.Tensor,), {"__module__": "torch.part"})
    plain = torch.ones(2)
    assert fallbacks.foreign(plain.as_subclass(kind))
    for each in (plain, nn.Parameter(plain), plain.as_subclass(own), plain.as_subclass(torchs)):
        assert not fallbacks.foreign(each)


@pytest.mark.parametrize("bias", [(), (1,), (1, 6), (4, 1), (4, 6), (1, 1), (1, 1, 6)])
@pytest.mark.parametrize("terms", [{}, {"epilogue": "silu"}, {"alpha": 2.0}, {"residual": True}])
def test_any_bias_that_torch_adds_is_added(bias: Any, terms: dict[str, Any]) -> None:
    a, b, c = torch.randn(4, 5), torch.randn(5, 6), torch.randn(bias)
    if len(bias) > 2:
        with pytest.raises(ValueError, match=r"bias must have shape \(6,\) or broadcast"):
            tmm_core.matmul(a, b, bias=c)
        return
    more = dict(terms)
    residual = torch.randn(4, 6) if more.pop("residual", False) else None
    z = (a @ b) * more.get("alpha", 1.0) + c
    right = F.silu(z) if "epilogue" in more else z
    right = right if residual is None else right + residual
    for out in (None, torch.empty(4, 6)):
        found = tmm_core.matmul(a, b, bias=c, residual=residual, out=out, **more)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        assert out is None or found is out


@pytest.mark.parametrize(("more", "slope"), [({}, 0.01), ({"negative_slope": 0.3}, 0.3)])
def test_the_slope_of_a_function_in_a_forward_is_torchs_default(
    more: dict[str, float], slope: float
) -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(F.leaky_relu, (graph.placeholder("z"),), more)
    assert activation.of_node(node) == f"leaky_relu({slope})"


def test_a_subclass_of_a_quantised_tensor_is_not_read() -> None:
    """It may multiply in its own way."""
    weight: Any = tmm_core.quantize(torch.randn(8, 16))
    own = type("Own", (type(weight),), {})._from_parts(
        weight.stored, weight.scale, weight.zero, weight._how
    )
    layer = torch.nn.Linear(16, 8)
    assert _unfit(layer, weight, None) is None
    assert _unfit(layer, own) == "its parameters are not plain ones (Own)"


class Registered(nn.Module):
    """Keeps each subclass under its name."""

    known: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, *, tag: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.known[cls.__name__] = cls
        cls.tag = tag

    tag = ""


class Registers(type):
    """Keeps each class under its name."""

    known: ClassVar[dict[str, Any]] = {}

    def __new__(cls, name: str, bases: Any, names: Any, *, tag: str) -> Any:
        made = super().__new__(cls, name, bases, names)
        cls.known[name] = made
        return made

    def __init__(cls, name: str, bases: Any, names: Any, *, tag: str) -> None:
        super().__init__(name, bases, names)
        cls.tag = tag


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x))  # type: ignore[no-any-return]


class Pair(Layers, Registered, tag="pair"):
    pass


class Gate(Registered, tag="gate"):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class MadeByMeta(Layers, metaclass=Registers, tag="meta"):
    pass


class Abstract(Layers, abc.ABC):
    pass


class Slotted(nn.Sequential, Registered, tag="slots"):
    __slots__ = ("more",)

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU())


@pytest.mark.parametrize("kind", [Pair, Gate, MadeByMeta, Abstract, Slotted])
def test_a_models_classes_do_not_hear_of_those_that_convert_makes(kind: Any) -> None:
    known = {**Registered.known, **Registers.known}
    model, x = kind(), torch.randn(3, 8)
    expected = model(x)
    changes = convert(model).changes
    assert {change.kind for change in changes} & {"epilogue", "gated"}
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    assert {**Registered.known, **Registers.known} == known
    assert isinstance(model, kind)
    assert issubclass(kind, kind)  # an abstract class notes that it is
    assert not isinstance(kind(), type(model))


class Sized(nn.Module):
    """A gated MLP whose constructor, text and attributes are its own."""

    def __init__(self, width: int = 8, wide: int = 16) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, wide), nn.Linear(width, wide)
        self.down = nn.Linear(wide, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return "of two sizes"


class Merges(Sized):
    def merge(self) -> str:
        return "its own"


def test_a_converted_modules_class_is_constructed_and_printed_as_its_own() -> None:
    model = Sized()
    assert [change.kind for change in convert(model).changes].count("gated") == 1
    assert model.extra_repr() == "of two sizes, epilogue='swiglu', merged=True"
    torch.manual_seed(0)
    again = type(model)(4, 6)
    torch.manual_seed(0)
    own = Sized(4, 6)
    assert again.state_dict().keys() == own.state_dict().keys()
    x = torch.randn(3, 4)
    torch.testing.assert_close(again(x), own(x))


def test_no_name_of_a_model_is_hidden() -> None:
    model = Merges()
    kept = Sized()
    kept.epilogue = "its own"  # type: ignore[assignment]
    for each, name in ((model, "merge"), (kept, "epilogue")):
        report = convert(each)
        assert {item.reason for item in report.not_fused} == {f"it has a {name} of its own"}
        assert [change.kind for change in report.changes].count("gated") == 0
    assert model.merge() == "its own"
    assert kept.epilogue == "its own"
    layer: Any = nn.Linear(8, 8)
    layer.product = "its own"
    report = convert(nn.Sequential(layer, nn.ReLU()))
    assert [item.reason for item in report.left] == ["it has a product of its own"]
    assert type(layer) is nn.Linear
    convert(attention := Attends())
    assert attention.merge() == "its own"
    assert type(attention) is Attends


def test_a_model_can_be_converted_again_whatever_it_got_meanwhile() -> None:
    model: Any = Sized()
    before = {each: {*vars(each)} for each in model.modules()}
    report = convert(model)
    changes = [str(change) for change in report.changes]
    model.static_weights = model.down.static_weights = True
    model.down.epilogue = "relu"
    report.undo()
    assert {each: {*vars(each)} for each in model.modules()} == before
    assert [str(change) for change in convert(model).changes] == changes


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head_dim = nn.Linear(8, 8), nn.Linear(8, 4), 4

    merge = Merges.merge

    def forward(self, x: torch.Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k
