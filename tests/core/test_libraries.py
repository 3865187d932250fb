"""Converted models, compared with the original ones, under the libraries that docs/libraries.md
lists."""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import World
from torch import nn
from torch.testing import assert_close

from tmm_core.nn import Linear, convert

ROOT = Path(__file__).parents[2]


def library(name: str) -> Any:
    """Imports a library, which may issue warnings of its own; skips the test without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(12, 20), nn.Linear(12, 20)
        self.act_fn, self.down_proj = nn.SiLU(), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.GELU(), MLP(), nn.Linear(12, 4)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return torch.randn(8, 12, **options), torch.randn(8, 4, **options)


def trained(one: nn.Module, steps: int = 3) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    x, target = data()
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(one(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# -- several ranks -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


def parallel(how: str, first: str) -> dict[str, Any]:
    """On each rank: the losses of a converted and of an original model, wrapped ``how``."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def wrapped(one: nn.Module) -> nn.Module:
        if how == "ddp":
            return nn.parallel.DistributedDataParallel(one)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in one.children():
            if list(part.parameters()):
                fully_shard(part, mesh=mesh)
        return fully_shard(one, mesh=mesh)

    converted, original = model(), model()
    if first == "convert":
        report = convert(converted)
        converted = wrapped(converted)
    else:
        converted = wrapped(converted)
        report = convert(converted)
    original = wrapped(original)
    return {
        "losses": (trained(converted), trained(original)),
        "swapped": len(report.changes),
        "layers": sum(isinstance(m, Linear) for m in converted.modules()),
        "keys": [*converted.state_dict()] == [*original.state_dict()],
        # They keep FSDP's layers from `static_weights`.
        "hooks": all(m._state_dict_pre_hooks for m in converted.modules() if isinstance(m, Linear)),
    }


@pytest.mark.parametrize("first", ["convert", "wrap"])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.slow(quick=4)
def test_ranks_train_alike(world: World, how: str, first: str) -> None:
    for found in world.run(parallel, how, first):
        converted, original = found["losses"]
        assert_close(converted, original)
        assert converted[-1] < converted[0]
        assert found["keys"]
        # A sharded weight is no plain tensor, so a model that is sharded first is left unchanged.
        sharded = (how, first) == ("fsdp2", "wrap")
        assert found["layers"] == (0 if sharded else 5)
        assert bool(found["swapped"]) != sharded
        assert found["hooks"] == (how == "fsdp2")


# -- loops of other libraries ------------------------------------------------------------


@pytest.mark.parametrize("first", ["convert", "prepare"])
def test_accelerate(first: str) -> None:
    accelerate = library("accelerate")
    converted, original = model(), model()
    losses = []
    for one in (converted, original):
        mine = one is converted
        if mine and first == "convert":
            convert(one)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        prepared, optimizer = accelerator.prepare(one, optimizer)
        if mine and first == "prepare":
            convert(prepared)
        x, target = data()
        for _ in range(3):
            loss = F.mse_loss(prepared(x), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        losses.append(float(loss.detach()))
        assert any(isinstance(m, Linear) for m in prepared.modules()) == mine
    assert_close(losses[0], losses[1])


def test_accelerate_cannot_offload_rounded_weights() -> None:
    accelerate, device = library("accelerate"), torch.device("cpu")
    plain, rounded = (nn.Sequential(nn.Linear(32, 8), nn.ReLU()) for _ in range(2))
    convert(plain)
    accelerate.cpu_offload(plain, execution_device=device)
    assert plain(torch.randn(3, 32)).shape == (3, 8)
    convert(rounded.requires_grad_(False), weights="int8")
    with pytest.raises(TypeError, match="requires_grad"):
        accelerate.cpu_offload(rounded, execution_device=device)


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    lightning = library("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, one: nn.Module) -> None:
            super().__init__()
            self.one = one
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, target = batch
            loss = F.mse_loss(self.one(x), target)
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    batches = torch.utils.data.DataLoader([tuple(data())] * 3, batch_size=None)
    tasks = [Task(model()), Task(model())]
    convert(tasks[0].one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in tasks:
            trainer = lightning.Trainer(
                max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
            )  # fmt: skip
            trainer.fit(task, batches)
    assert len(tasks[0].losses) == 6
    assert_close(tasks[0].losses, tasks[1].losses)


@pytest.mark.slow
def test_transformers_trainer(tmp_path: Path) -> None:
    library("accelerate")
    transformers = library("transformers")
    config = transformers.GemmaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        vocab_size=50, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i} for i in range(8)]
    losses = []
    for converted in (True, False):
        torch.manual_seed(0)
        one = transformers.GemmaForCausalLM(config)
        if converted:
            assert any(change.kind == "gated" for change in convert(one).changes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path / str(converted)), max_steps=4, use_cpu=True, seed=0,
                per_device_train_batch_size=2, logging_steps=1, report_to=[], save_steps=2,
                disable_tqdm=True, learning_rate=1e-3,
            )  # fmt: skip
            trainer = transformers.Trainer(model=one, args=arguments, train_dataset=rows)
            trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        saved = transformers.GemmaForCausalLM.from_pretrained(
            tmp_path / str(converted) / "checkpoint-4"
        )
        with torch.no_grad():
            ids = torch.arange(6).view(1, 6)
            assert_close(saved(ids).logits, one.eval()(ids).logits)
    assert len(losses[0]) == 4
    assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


class EngineLinear(nn.Module):
    """A layer as serving engines have it: no ``nn.Linear``, multiplied by a method object."""

    class Method:
        def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, layer.weight)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12))
        self.quant_method = self.Method()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


def test_layers_of_serving_engines_are_left_alone() -> None:
    engine = nn.Sequential(EngineLinear(), nn.SiLU(), EngineLinear())
    original, x = copy.deepcopy(engine), torch.randn(5, 12)
    report = convert(engine)
    assert not report.changes
    assert_close(engine(x), original(x), rtol=0, atol=0)


# -- the page ----------------------------------------------------------------------------


def test_every_row_of_the_page_names_a_test() -> None:
    page = (ROOT / "docs" / "libraries.md").read_text("utf-8")
    table, tests = page.split("The tests of each row, in `tests/core`:")
    named = re.findall(r"^\| (.+) \| `(\w+\.py)` \| (`test_.+`) \|$", tests, re.MULTILINE)
    rows = [line.removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 9
    for row, library in zip(rows, dict.fromkeys(name for name, _, _ in named), strict=True):
        assert row.startswith(library), row
    for library, file, names in named:
        for test in re.findall(r"test_\w+", names):
            text = (ROOT / "tests" / "core" / file).read_text("utf-8")
            assert f"def {test}(" in text, library
