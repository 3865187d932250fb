"""Projections of one input as one product: attention of Transformers' models after ``convert``."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

from tmm_core import api, settings
from tmm_core.nn import convert, projections
from tmm_core.nn.joint_storage import stacked
from tmm_core.nn.projections import JointProjections, names_of

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "Llama with biases": ("ForCausalLM", {**GROUPED, "attention_bias": True}),
    "Mistral": ("ForCausalLM", HEADS),
    "Qwen2": ("ForCausalLM", GROUPED),
    "Qwen3": ("ForCausalLM", HEADS),
    "Gemma2": ("ForCausalLM", HEADS),
    "Phi": ("ForCausalLM", SIZES),
    "Bert": ("ForMaskedLM", SIZES),
}


def model(family: str = "Llama", dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    suffix, sizes = FAMILIES[family]
    name = family.partition(" ")[0]
    kind = getattr(transformers, name + suffix)
    made = kind(getattr(transformers, f"{name}Config")(**sizes)).eval().to(dtype)
    for parameter in made.parameters():  # biases are zeros otherwise
        nn.init.normal_(parameter, std=0.2)
    return made


IDS = torch.arange(18).view(2, 9)


def logits(of: Any) -> Tensor:
    return of(IDS).logits  # type: ignore[no-any-return]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of projections of each joint product."""
    found: list[int] = []
    product = projections.JointProduct._product

    def counted(self: Any, x: Tensor) -> Any:
        columns = product(self, x)
        found.append(len(columns))
        return columns

    monkeypatch.setattr(projections.JointProduct, "_product", counted)
    return found


def attention(of: nn.Module) -> Any:
    return next(m for m in of.modules() if isinstance(m, JointProjections))


def layers(of: nn.Module) -> list[Any]:
    return attention(of)._together()  # type: ignore[no-any-return]


def storages(of: nn.Module) -> dict[int, int]:
    each = [p.untyped_storage() for p in of.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in each}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_state_and_memory_equal_the_unconverted_models(
    family: str, joined: list[int]
) -> None:
    original, converted = model(family), model(family)
    before = storages(converted)
    parameters = dict(converted.named_parameters())
    report = convert(converted)
    assert [change.kind for change in report.changes].count("joint") == 2
    assert "projections of 2 attention modules joined" in str(report)
    with torch.no_grad():
        torch.testing.assert_close(logits(converted), logits(original))
    with torch.inference_mode():
        torch.testing.assert_close(logits(converted), logits(original))
    assert joined == [3] * 4
    assert sum(storages(converted).values()) == sum(before.values())
    assert all(p is parameters[name] for name, p in converted.named_parameters())
    state, theirs = converted.state_dict(), original.state_dict()
    assert list(state) == list(theirs)
    assert all(torch.equal(state[name], t) for name, t in theirs.items())
    for layer in layers(converted):
        layer._joint_product = None  # as a compiled graph leaves it
    report.undo()
    assert [type(m) for m in converted.modules()] == [type(m) for m in original.modules()]
    assert not any("_joint_product" in vars(m) for m in converted.modules())
    assert Counter(storages(converted).values()) == Counter(before.values())
    with torch.no_grad():
        assert torch.equal(logits(converted), logits(original))
    assert joined == [3] * 4


def test_gradients_equal_those_of_separate_layers(joined: list[int]) -> None:
    original, converted = model("Qwen2"), model("Qwen2")
    convert(converted)
    for each in (original, converted):
        each.train()
        each(IDS, labels=IDS).loss.backward()
    for mine, theirs in zip(converted.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert set(joined) == {0}
    with torch.no_grad():  # an optimizer's step writes the joint weight
        for each in (original, converted):
            for parameter in each.parameters():
                parameter -= 0.1 * parameter.grad
            each.eval()
        torch.testing.assert_close(logits(converted), logits(original))
    assert joined[-1] == 3


def test_generation_with_caches(joined: list[int]) -> None:
    original, converted = model(), model()
    convert(converted)
    for cache in ("dynamic", "static"):
        given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        given["cache_implementation"] = cache
        expected = original.generate(IDS, **given)
        assert torch.equal(converted.generate(IDS, **given), expected)
    assert joined.count(3) >= 20


def _moved(of: Any) -> Any:
    return of.to(torch.float64).to(torch.float32).to(torch.float64)


def _copied(of: Any) -> Any:
    return copy.deepcopy(of)


def _loaded(of: Any) -> Any:
    of.load_state_dict({name: t.clone() for name, t in of.state_dict().items()}, assign=True)
    return of


@pytest.mark.parametrize("how", [_moved, _copied, _loaded])
def test_moved_parameters_are_joined_again(how: Callable[[Any], Any], joined: list[int]) -> None:
    original, converted = model("Qwen2"), model("Qwen2")
    convert(converted)
    original.to(torch.float32).to(torch.float64)
    converted = how(converted.to(torch.float32).to(torch.float64))
    assert attention(converted).merged
    with torch.no_grad():
        torch.testing.assert_close(logits(converted), logits(original))
    assert joined == [3, 3]


def test_a_replaced_parameter_leaves_three_products(joined: list[int]) -> None:
    original, converted = model(), model()
    convert(converted)
    for each in (original, converted):
        projection = next(m for n, m in each.named_modules() if n.endswith("k_proj"))
        projection.weight.data = torch.ones_like(projection.weight)
    with torch.no_grad():
        torch.testing.assert_close(logits(converted), logits(original))
    assert joined == [0, 3]
    assert not attention(converted).merged
    for each in (original, converted):
        each.to(torch.float32).to(torch.float64)  # `to` gives each parameter a new storage
    with torch.no_grad():
        torch.testing.assert_close(logits(converted), logits(original))
    assert joined == [0, 3, 3, 3]


def test_hooks_see_their_layer_and_may_change_its_input(joined: list[int]) -> None:
    original, converted = model(), model()
    convert(converted)
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for number, each in enumerate((original, converted)):
        q, k, v = (
            next(m for n, m in each.named_modules() if n.endswith(name))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q.register_forward_hook(lambda m, x, y, n=number: seen[n].append((x[0].clone(), y.clone())))
        k.register_forward_pre_hook(lambda m, x: (2 * x[0],))
        v.register_forward_hook(lambda m, x, y: y + 1)
    with torch.no_grad():
        torch.testing.assert_close(logits(converted), logits(original))
    assert joined == [0, 3]
    torch.testing.assert_close(seen[1], seen[0])


def test_layers_called_alone_multiply_themselves(joined: list[int]) -> None:
    original, converted = model(), model()
    convert(converted)
    x = torch.randn(3, 32, dtype=torch.float64)
    with torch.no_grad():
        logits(converted)
        del joined[:]
        for name in ("q_proj", "k_proj", "v_proj"):
            mine = converted.model.layers[0].self_attn.get_submodule(name)
            theirs = original.model.layers[0].self_attn.get_submodule(name)
            torch.testing.assert_close(mine(x), theirs(x))
    assert joined == []
    assert not any("_joint_product" in vars(layer) for layer in layers(converted))


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_adapters(first: str, joined: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    original, converted = model(), model()
    if first == "convert":
        convert(converted)
    torch.manual_seed(1)
    original = peft.get_peft_model(original, config).eval()
    torch.manual_seed(1)
    converted = peft.get_peft_model(converted, config).eval()
    if first == "peft":
        convert(converted)
    with torch.no_grad():
        torch.testing.assert_close(logits(converted), logits(original))
        merged, theirs = converted.merge_and_unload(), original.merge_and_unload()
        torch.testing.assert_close(logits(merged), logits(theirs))
    assert not joined or joined[-1] == 3  # merged weights keep their storage


def test_tied_and_half_biased_projections_stay_apart() -> None:
    tied = model()
    attention_ = tied.model.layers[0].self_attn
    attention_.v_proj.weight = attention_.k_proj.weight
    biased = model()
    biased.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.ones(32).double())
    for each, why in ((tied, "share memory"), (biased, "have no bias")):
        expected = logits(each)
        report = convert(each)
        (apart,) = report.not_fused
        assert apart.path == "model.layers.0.self_attn"
        assert why in apart.reason
        assert "q_proj, k_proj, v_proj" in str(report)
        torch.testing.assert_close(logits(each), expected)


def test_rounded_weights_are_one_product(joined: list[int]) -> None:
    one = model("Mistral", torch.float32)
    report = convert(one, weights="int8")
    with torch.no_grad():
        together = logits(one)
        assert joined == [3, 3]
        assert stacked([layer.weight for layer in layers(one)]) is not None
        report.undo()
        torch.testing.assert_close(logits(one), together, rtol=1e-4, atol=1e-4)


def test_autocast_and_safetensors(joined: list[int], tmp_path: Path) -> None:
    original, converted = model(dtype=torch.float32), model(dtype=torch.float32)
    convert(converted)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(converted), logits(original), rtol=0.1, atol=0.1)
    assert set(joined) == {0}
    converted.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(again), logits(original))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_model() -> None:
    original, converted = model("Qwen2"), model("Qwen2")
    report = convert(converted)
    torch._dynamo.reset()
    compiled = torch.compile(converted, fullgraph=True)
    with torch.no_grad():
        compiled(IDS)
        with torch.profiler.profile() as profile:
            got = compiled(IDS).logits
        torch.testing.assert_close(got, logits(original))
        assert any("joint_linear" in event.key for event in profile.key_averages())
        converted.model.layers[0].self_attn.k_proj.weight.data = torch.ones(
            16, 32, dtype=torch.float64
        )
        original.model.layers[0].self_attn.k_proj.weight.data.fill_(1)
        torch.testing.assert_close(compiled(IDS).logits, logits(original))
    report.undo()
    names = {"_joint_product"}
    assert not any(names & set(vars(module)) for module in converted.modules())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.slow(quick=4)
def test_the_operator(bias: bool, grad: bool) -> None:
    x = torch.randn(2, 5, 8, requires_grad=grad)
    joint = torch.randn(9, 8)
    weights = [joint[:4], joint[4:6], joint[6:]]
    biases = [torch.randn(n) for n in (4, 2, 3)] if bias else [None] * 3
    given = x, weights, biases
    expected = torch.cat(
        [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)],
        -1,
    )
    torch.testing.assert_close(projections.joint_linear(*given), expected)
    torch.library.opcheck(torch.ops.tmm.joint_linear.default, given)
    if not grad:
        many = torch.vmap(lambda x: projections.joint_linear(x, weights, biases))(x)
        torch.testing.assert_close(many, expected)


@pytest.mark.parametrize("learning", ["x", "a weight", "a bias"])
def test_the_operator_has_the_gradient_of_any_operand(learning: str) -> None:
    x, joint = torch.randn(2, 5, 8), torch.randn(9, 8)
    weights, biases = [joint[:4], joint[4:]], [torch.randn(4), torch.randn(5)]
    leaf = {"x": x, "a weight": weights[1], "a bias": biases[1]}[learning].requires_grad_()
    y = projections.joint_linear(x, weights, biases)
    expected = nn.functional.linear(x, torch.cat(weights), torch.cat(biases))
    (found,), (right,) = (torch.autograd.grad(z.square().sum(), leaf) for z in (y, expected))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("learning", ["x", "q.weight", "k.weight", "q.bias", "k.bias", ""])
def test_projections_are_apart_while_autograd_records_any_operand(
    learning: str, joined: list[int]
) -> None:
    one = Projects()
    convert(one)
    one.requires_grad_(False)
    x = torch.randn(2, 3, 8)
    given = {"x": x, **dict(one.named_parameters())}
    if learning:
        given[learning].requires_grad_()
    y = one(x)
    assert joined == [0 if learning else 2]
    assert any(each.requires_grad for each in y) is bool(learning)
    with torch.no_grad():
        torch.testing.assert_close(one(x), y)
    assert joined[1:] == [2]


@pytest.mark.parametrize("has_bias", [(True, True), (False, False), (True, False), (False, True)])
def test_biases_of_projections_that_are_traced(
    has_bias: tuple[bool, bool], joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator of a compiled graph takes a bias for every projection, or none."""
    one, other = Projects(), Projects()
    other.load_state_dict(one.state_dict())
    convert(one)
    for each in (one, other):
        each.q.bias, each.k.bias = (
            layer.bias if present else None
            for layer, present in zip((each.q, each.k), has_bias, strict=True)
        )
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x))
    assert joined == [2 if len(set(has_bias)) == 1 else 0]


def test_projections_of_a_replaced_forward_are_apart(joined: list[int]) -> None:
    one = Projects()
    one.forward = lambda x: (one.q(x), one.k(x) + 1)  # type: ignore[method-assign]
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = one(x)
        report = convert(one)
        torch.testing.assert_close(one(x), expected)
    assert not joined
    assert "joint" not in {change.kind for change in report.changes}


def test_columns_belong_to_the_unchanged_input() -> None:
    one = Projects()
    convert(one)
    x = torch.randn(3, 8)

    def begun() -> Any:
        product = projections.JointProduct([one.q, one.k])
        torch.testing.assert_close(product.of(one.q, x), one.q(x))
        return product

    with torch.no_grad():
        product = begun()
        torch.testing.assert_close(product.of(one.k, x), one.k(x))
        assert product.of(one.k, x) is None
        assert begun().of(one.k, x.clone()) is None
        product = begun()
        x.mul_(2)
        assert product.of(one.k, x) is None


@pytest.mark.parametrize("static", [(), ("q",), ("q", "k")])
def test_a_joint_weight_is_static_if_every_layers_is(
    static: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Projects()
    convert(one)
    for name in static:
        getattr(one, name).static_weights = True
    found: list[bool] = []
    product = api.linear

    def seen(*given: Any) -> Any:
        found.append(settings.current().static_weights)
        return product(*given)

    monkeypatch.setattr(api, "linear", seen)
    with torch.no_grad():
        projections.JointProduct([one.q, one.k]).of(one.q, torch.randn(3, 8))
        one.k.register_state_dict_pre_hook(lambda *_: None)  # as FSDP2 does, which writes weights
        projections.JointProduct([one.q, one.k]).of(one.q, torch.randn(3, 8))
    assert found == [len(static) == 2, False]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("shared", [False, True], ids=["two inputs", "one input"])
def test_threads_that_begin_one_product_at_once(
    monkeypatch: pytest.MonkeyPatch, late: int, shared: bool
) -> None:
    """Both find no columns yet, and the one whose input is noted first computes them last."""
    one = Projects()
    convert(one)
    product = projections.JointProduct([one.q, one.k])
    inputs = [torch.randn(3, 8)] * 2 if shared else [torch.randn(3, 8), torch.randn(3, 8)]
    threads: list[threading.Thread] = []
    both_begun = threading.Barrier(2, timeout=60)
    late_computes, other_done = threading.Event(), threading.Event()
    version, compute = projections._version, projections.JointProduct._product
    waited: set[int] = set()

    def awaited_version(x: Tensor) -> int:
        own = threads.index(threading.current_thread())
        if own not in waited:
            waited.add(own)
            both_begun.wait()
            assert own == late or late_computes.wait(60)
        return version(x)

    def awaited_product(self: Any, x: Tensor) -> Any:
        if threading.current_thread() is threads[late]:
            late_computes.set()
            assert other_done.wait(60)
        return compute(self, x)

    columns: dict[tuple[int, Any], Tensor | None] = {}

    def run(own: int) -> None:
        with torch.no_grad():
            columns[own, one.q] = product.of(one.q, inputs[own])
            other_done.set()

    with monkeypatch.context() as patch:
        patch.setattr(projections, "_version", awaited_version)
        patch.setattr(projections.JointProduct, "_product", awaited_product)
        threads += [threading.Thread(target=run, args=(own,)) for own in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with torch.no_grad():
        columns |= {(own, one.k): product.of(one.k, inputs[own]) for own in range(2)}
        assert columns[0, one.q] is not None
        assert columns[1, one.q] is not None
        for (own, layer), found in columns.items():
            if found is not None:
                torch.testing.assert_close(found, layer(inputs[own]))


# -- the proof -------------------------------------------------------------------------------------


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head_dim = nn.Linear(8, 8), nn.Linear(8, 4), 4

    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(*heads).transpose(1, 2)
        return q, k


class Writes(Projects):
    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        x.mul_(2)
        k = self.k(x).view(heads)
        return q, k


class WritesByAnotherName(Projects):
    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        other = x
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        other += 1
        k = self.k(x).view(heads)
        return q, k


class WritesAWeight(Projects):
    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        self.k.weight.data.mul_(2)
        k = self.k(x).view(heads)
        return q, k


class WritesARow(Projects):
    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        other = x
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        other[0] = 0
        k = self.k(x).view(heads)
        return q, k


class ViewsAgain(Projects):
    """Columns of a joint product cannot be viewed as rows of all heads."""

    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q.float().view(-1, self.head_dim), k


class Replaces(Projects):
    def forward(self, x: Tensor) -> Any:
        x = x * 2
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k


class Merges(Projects):
    def forward(self, x: Tensor) -> Any:
        heads = (-1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        return q, k


class Chooses(Projects):
    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads) if self.training else None
        return q, k


class Twice(Projects):
    def forward(self, x: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.q(x).view(heads)
        return q, k


class Others(Projects):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads)
        k = self.k(y).view(heads)
        return q, k


def test_projections_of_a_forward_are_read_from_its_source() -> None:
    assert names_of(Projects) == ("q", "k")
    written = Writes, WritesByAnotherName, WritesAWeight, WritesARow
    for kind in (*written, ViewsAgain, Replaces, Merges, Chooses, Twice, Others):
        assert names_of(kind) == (), kind
    assert names_of(torch.nn.ReLU) == names_of(nn.Identity) == ()


def test_a_projection_that_stays_torchs_keeps_the_others_apart(joined: list[int]) -> None:
    class Other(nn.Linear):
        pass

    original = Projects().double()
    original.k.__class__ = Other
    converted = copy.deepcopy(original)
    report = convert(converted)
    assert [change.kind for change in report.changes] == ["linear"]
    assert [item.path for item in report.left] == ["k"]
    with torch.no_grad():
        x = torch.randn(2, 3, 8, dtype=torch.float64)
        torch.testing.assert_close(converted(x), original(x))
    assert joined == []


def test_a_users_own_attention_module(joined: list[int]) -> None:
    torch.manual_seed(0)
    original = Projects().double()
    converted = copy.deepcopy(original)
    report = convert(converted)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), original(x))
        again = pickle.loads(pickle.dumps(converted))
        torch.testing.assert_close(again(x), original(x))
        assert type(again) is type(converted)
        assert joined == [2, 2]  # the weights that pickle writes apart are joined again
        assert not convert(converted)  # a second time changes nothing
        assert isinstance(converted, Projects)
        converted.k = nn.Linear(8, 4).double()
        original.k = converted.k
        torch.testing.assert_close(converted(x), original(x))
    assert joined == [2, 2]
    report.undo()
    assert type(converted) is Projects
