"""Launches that begin before the one before has ended: what comes before the wait, in the model of
the block and in the PTX, who proposes it, and who declines."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from hopper_block import DeadlockError, prefetched
from test_warp_specialized import BF16, H200, SCHEDULES, computed, problem
from tmm_triton import warp_specialized
from tmm_triton.hopper_tiles import Constants, adapted
from tmm_triton.operands import with_early
from tmm_triton.realigned import Realigned, RealignedConfig, realigned
from tmm_triton.skinny import Skinny
from tmm_triton.split_k import SplitK
from tmm_triton.warp_specialized import WarpSpecialized

from tmm_core import ConfigError, Operand, Problem

KERNELS: list[Any] = [WarpSpecialized(), Skinny(), SplitK()]
DECODE = problem(16, 4096, 4096)
SAID = dataclasses.replace(DECODE, static_weights=True)


# Who proposes it.


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_loading_early_is_proposed_to_who_gave_the_word(kernel: Any) -> None:
    assert not [c for c in kernel.configs(DECODE) if c.assumes]
    configs = list(kernel.configs(SAID))
    early = [c for c in configs if c.early == "b"]
    assert 1 <= len(early) <= 2
    # The best guess comes first as ever, and what goes by the word soon after.
    assert configs[0] == kernel.default_config(SAID) == kernel.default_config(DECODE)
    assert any(c.assumes for c in configs[:3])
    for config in early:
        assert config.assumes == ("static_weights",)
        assert (config.unsaid(DECODE), config.unsaid(SAID)) == (["static_weights"], [])
        plain = dataclasses.replace(config, early="")
        assert plain in configs
        assert (plain.assumes, plain.unsaid(DECODE)) == ((), [])
        assert kernel.arithmetic(SAID, plain) == kernel.arithmetic(SAID, config)
        assert type(config).from_json(config.to_json()) == config
        # What was on record before there was such a field.
        assert type(plain).from_json(
            {name: value for name, value in plain.to_json().items() if name != "early"}
        ) == plain  # fmt: skip


def test_only_few_rows_are_early() -> None:
    many = dataclasses.replace(SAID, m=4096)
    assert not [c for c in WarpSpecialized().configs(many) if c.early]
    by_words = dataclasses.replace(SAID, b=Operand(BF16, "row", aligned=False))
    configs = list(WarpSpecialized().configs(by_words))
    assert configs
    assert not [c for c in configs if c.early]
    # A config of another problem, of another M of the bucket or a neighbour.
    config = dataclasses.replace(configs[0], early="b")
    assert adapted(by_words, config) == configs[0]
    with pytest.raises(ValueError, match="by words"):
        Constants.of(by_words, config)


@pytest.mark.parametrize("kernel", [Skinny(), SplitK()], ids=lambda kernel: kernel.name)
def test_what_is_not_loaded_ahead_cannot_be_early(kernel: Any) -> None:
    ahead = 2 if kernel.name == "triton.skinny" else 1
    config = next(c for c in kernel.configs(SAID) if c.early)
    assert config.num_stages == ahead
    for wrong in ({"num_stages": 3 - ahead}, {"early": "l2"}, {"early": "a"}):
        with pytest.raises(ConfigError):
            type(config).from_json({**config.to_json(), **wrong})


def test_variants_follow_the_first_that_can() -> None:
    configs = list(SplitK().configs(DECODE))
    able = [c for c in configs if c.num_stages == 1]
    assert with_early(configs, ()) == configs
    assert with_early(configs, ("b",)) == [
        configs[0], *(dataclasses.replace(c, early="b") for c in able[:2]), *configs[1:],
    ]  # fmt: skip


def test_a_copy_of_the_weight_is_not_at_rest() -> None:
    """It is written by the launch right before, whatever was said of the weight itself."""
    both = dataclasses.replace(
        SAID, m=100, k=4093, a=Operand(BF16, aligned=False), b=Operand(BF16, "col", aligned=False)
    )
    assert not realigned(both).static_weights
    assert not [c for c in Realigned().configs(both) if c.assumes]
    weight = dataclasses.replace(both, b=Operand(BF16, "col"))
    assert realigned(weight).static_weights
    inner = next(c for c in WarpSpecialized().configs(realigned(weight)) if c.assumes)
    config = RealignedConfig(inner="triton.warp_specialized", config=inner)
    assert config.assumes == ("static_weights",)
    with pytest.raises(ConfigError, match="copied right before"):
        Realigned().bind(both, config)


# The block.


@pytest.mark.parametrize("words", [None, "a"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
def test_the_weight_comes_before_the_launch_before_has_ended(
    consumers: int, pingpong: bool, layout: str, words: str | None
) -> None:
    if words and consumers > 1 and not pingpong:
        pytest.skip("an operand loaded by words has one box")
    for seed, (k, early) in enumerate(itertools.product((1, 2, 5, 8, 16), ("b", "l2"))):
        out, expected = computed(
            seed, k=k, consumers=consumers, pingpong=pingpong, layout=layout, early=early,
            words=words, stages=2 + seed % 3,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("ways", [{"splits": 2}, {"parts": 3}, {"gated": True}, {"batch": "b"}])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
def test_early_with_all_that_follows(consumers: int, pingpong: bool, ways: dict[str, Any]) -> None:
    programs = 6 if "splits" in ways else 3
    sizes = {"m": 10, "n": 8, "k": 24} if "splits" in ways else {"k": 12}
    for seed in range(4):
        out, expected = computed(
            seed, consumers=consumers, pingpong=pingpong, early="b", **sizes, **ways,
            programs=_programs(ways, consumers, pingpong, programs),
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


def _programs(ways: dict[str, Any], consumers: int, pingpong: bool, usual: int) -> int:
    """Of tiles that are cut, blocks such that the last wave has room for their parts."""
    if "splits" not in ways:
        return usual
    rows = 2 if pingpong else 2 * consumers
    tiles = -(-10 // rows) * 2
    return next(n for n in range(2, 40) if 0 < tiles % n * 2 <= n)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        # Nobody waits; too late, after the activation was asked for; by who has given no word.
        ("        gdc_wait()\n", "        pass\n"),
        ('    if C.EARLY == "b":\n', '    if C.EARLY != "l2":\n'),
        ('sizes, "b", C)\n    elif', 'sizes, "ab", C)\n    elif'),
        # The next launch begins before this one has waited, or is never told.
        ("    if C.overlaps:\n", "    gdc_launch_dependents()\n    if C.overlaps:\n"),
        ('    if C.DEPENDENTS == "first":\n', "    if False:\n"),
        ('    if C.DEPENDENTS == "last":\n', "    if False:\n"),
        # Bytes are expected twice, or half of what is asked for is left out.
        ('        if PARTS != "a":\n', "        if True:\n"),
        ('0 if PARTS == "b" else OF_A', "OF_A"),
        ('"a" if C.EARLY == "b" else "ab"', '"ab"'),
    ],
)
def test_the_model_sees_what_comes_too_early(line: str, instead: str, tmp_path: Path) -> None:
    source = Path(warp_specialized.__file__).read_text()
    assert source.count(line) == 1
    path = tmp_path / "early_mutant.py"
    path.write_text(source.replace(line, instead))
    spec = importlib.util.spec_from_file_location("early_mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["early_mutant"] = module
    spec.loader.exec_module(module)
    wrong = 0
    for seed, early in itertools.product(range(6), ("", "b")):
        try:
            out, expected = computed(seed, early=early, module=module)
        except (DeadlockError, AssertionError):
            wrong += 1
        else:
            wrong += not np.allclose(out, expected)
    assert wrong > 0


@pytest.mark.parametrize("layout", ["n", "t"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 1000), (40, 2056), (48, 100)])
def test_what_is_prefetched_is_what_is_loaded_first(
    n: int, k: int, gated: bool, layout: str
) -> None:
    config = dataclasses.replace(next(iter(WarpSpecialized().configs(DECODE))), early="l2")
    asked = problem(16, n, k, "n" + layout, epilogue="swiglu" if gated else None)
    constants = Constants.of(asked, config)
    assert config.num_stages == constants.PRIMED
    width = 2 * n if gated else n
    rows, columns = (k, width) if layout == "n" else (width, k)
    stride = -(-columns // 8) * 8 + 8
    sizes = (16, n, k, config.GROUP_M, 1, 0)
    programs = -(-n // config.BLOCK_N)
    for program in (0, programs - 1):
        # As ``_moved`` says.
        start = min(program * config.BLOCK_N, -(-(n - config.BLOCK_N) // 16) * 16)
        steps = min(config.num_stages * config.BLOCK_K, k)
        halves = (0, n) if gated else (0,)
        wanted = set()
        for half in halves:
            ends = min(start + half + config.BLOCK_N, width)
            for outer in range(*((0, steps) if layout == "n" else (start + half, ends))):
                first, last = (start + half, ends) if layout == "n" else (0, steps)
                wanted |= {outer * stride + inner for inner in range(first, last)}
        found = set()
        for at, count in prefetched(warp_specialized, sizes, constants, stride, program, programs):
            assert count % 16 == 0
            assert at % 8 == 0, "not where a multiple of 16 bytes starts"
            assert at // stride < rows, "past the end of b"
            assert at % stride + count // 2 <= columns, "past the end of a row"
            found |= set(range(at, at + count // 2))
        assert found <= wanted
        # All but what lies off 16 bytes at the rows' ends.
        assert len(wanted) - len(found) <= 7 * (len(wanted) // 8 // 8 + steps + 64)
        assert len(found) > 0.8 * len(wanted)


# The program.

#: What touches memory that others write, or lets others begin, in the order of the program.
_EVENTS = re.compile(
    r"griddepcontrol\.\w+"
    r"|cp\.async\.bulk\.prefetch"
    r"|cp\.async\.bulk\.tensor\.\dd\.(?:shared|global)"
    r"|cp\.async\.c[ag]"
    r"|(?:ld|st|atom|red|ld\.acquire)\.(?:\w+\.)*global"
)
_CASES = {
    "plain": DECODE,
    "said": SAID,
    "fused": dataclasses.replace(
        SAID, bias=BF16, residual=Operand(BF16), epilogue=problem(epilogue="silu").epilogue
    ),
    "large": problem(2304, 2304, 2048),
    "gated": dataclasses.replace(SAID, n=14336, epilogue=problem(epilogue="swiglu").epilogue),
}


def compile_all() -> None:
    from triton.backends.compiler import GPUTarget

    from tmm_core.triton import compile_for, source

    for name, asked in _CASES.items():
        for kernel in KERNELS:
            if [r for r in kernel.reasons_against(asked) if "driver" not in r]:
                continue
            ways: dict[tuple[Any, ...], Any] = {}
            for config in kernel.configs(asked):
                fields = config.to_json()
                known = ("early", "tail_splits", "splits", "num_stages", "schedule", "REDUCE")
                way = {field: fields.get(field) for field in known}
                if kernel.name != "triton.warp_specialized":
                    way["SPLIT_K"] = fields.get("SPLIT_K", 1) > 1
                ways.setdefault(tuple(way.values()), config)
            for config in ways.values():
                if isinstance(kernel, WarpSpecialized):
                    of = kernel.specialize(asked, config)
                    src = source(warp_specialized._kernel, of.types, of.constants, of.divisible)
                    compiled = [compile_for(GPUTarget("cuda", 90, 32), src, **of.options)]
                else:
                    compiled = [build.compile_for(90) for build in kernel.builds(asked, config)]
                for one in compiled:
                    line = {"case": name, "kernel": one.name, "early": config.early}
                    line |= {"events": _EVENTS.findall(one.asm["ptx"])}
                    line |= {"config": str(config), "pdl": one.metadata.launch_pdl}
                    print(json.dumps(line), flush=True)


@pytest.mark.slow
def test_nothing_is_touched_before_the_wait() -> None:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["early"] for line in lines} == {"", "l2", "b"}
    assert {line["kernel"] for line in lines} == {
        "_kernel", "skinny_kernel", "split_k_kernel", "reduce_kernel",
    }  # fmt: skip
    for line in lines:
        events = line["events"]
        assert line["pdl"], line
        assert events.count("griddepcontrol.wait") == 1, line
        assert "griddepcontrol.launch_dependents" in events, line
        wait = events.index("griddepcontrol.wait")
        assert wait < events.index("griddepcontrol.launch_dependents"), line
        before, after = events[:wait], events[wait + 1 :]
        if line["early"] == "" or line["kernel"] == "reduce_kernel":
            assert not before, line
        elif line["early"] == "l2":
            assert set(before) == {"cp.async.bulk.prefetch"}, line
        else:
            # Loads of one operand, and as many kinds of them later.
            loads = {event for event in before if "st." not in event}
            assert loads == set(before), line
            assert len(loads) == 1, line
            assert "bulk.tensor" in before[0] or before[0].startswith("ld."), line
        assert [e for e in after if "bulk.tensor" in e or e.startswith(("ld.", "cp."))], line


def test_h200_has_dependent_launch_and_others_not() -> None:
    ampere = dataclasses.replace(H200, capability=(8, 0), name="A100")
    for kernel in KERNELS[1:]:
        for device, has in ((H200, True), (ampere, False)):
            asked: Problem = dataclasses.replace(DECODE, device=device)
            for build in kernel.builds(asked, kernel.default_config(asked)):
                overlaps = build.constants.get("OVERLAPS", build.constants.get("OVERLAP"))
                assert overlaps is has
                assert build.options.get("launch_pdl", False) is has
    assert torch.bfloat16 is BF16


if __name__ == "__main__":
    compile_all()
