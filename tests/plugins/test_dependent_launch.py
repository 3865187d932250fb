"""Launches that begin before the previous one has ended. Checks what is done before the wait, in
the model of the block and in the PTX, and which kernels propose or decline it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

from hopper_block import DeadlockError, changed, prefetched
from test_warp_specialized import BF16, H200, SCHEDULES, computed, problem
from tmm_triton.hopper import search_space
from tmm_triton.hopper.config import Constants
from tmm_triton.hopper.hopper_kernel import warp_specialized_kernel
from tmm_triton.hopper.tile_shapes import adapted
from tmm_triton.hopper.warp_specialized import WarpSpecialized
from tmm_triton.pdl import FEW_ROWS, with_early
from tmm_triton.realigned import Realigned, RealignedConfig, _overlapping, realigned
from tmm_triton.skinny import Skinny
from tmm_triton.split_k import SplitK
from triton.backends.compiler import GPUTarget
from uninterpreted import Uninterpreted

from tmm_core import ConfigError, Operand, Problem
from tmm_core.triton import compile_for, source

KERNELS: list[Any] = [WarpSpecialized(), Skinny(), SplitK()]
DECODE = problem(16, 4096, 4096)
STATIC = dataclasses.replace(DECODE, static_weights=True)
#: The values of ``early`` that are safe if b may be written until the wait, by kernel.
SAFE = {"triton.warp_specialized": ["wait", "l2"], "triton.skinny": ["wait"]}
SAFE["triton.split_k"] = ["wait"]


# Who proposes it.


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_early_loads_are_proposed_only_under_the_promise(kernel: Any) -> None:
    assert not [c for c in kernel.configs(DECODE) if c.assumes]
    configs = list(kernel.configs(STATIC))
    early = [c for c in configs if c.early == "b"]
    assert 1 <= len(early) <= 2
    # The best guess comes first as ever, and overlaps nothing; each way to overlap follows, twice.
    assert configs[0] == kernel.default_config(STATIC) == kernel.default_config(DECODE)
    for instance, ways in ((STATIC, [*SAFE[kernel.name], "b"]), (DECODE, SAFE[kernel.name])):
        proposed = [c.early for c in kernel.configs(instance)]
        assert proposed[0] == ""
        assert sorted(proposed[1 : 1 + 2 * len(ways)]) == sorted(2 * ways)
        assert set(proposed[1 + 2 * len(ways) :]) == {""}
    for config in early:
        assert config.assumes == ("static_weights",)
        assert (config.unmet_promises(DECODE), config.unmet_promises(STATIC)) == (
            ["static_weights"],
            [],
        )
        plain = dataclasses.replace(config, early="")
        assert plain in configs
        assert (plain.assumes, plain.unmet_promises(DECODE)) == ((), [])
        assert kernel.arithmetic(STATIC, plain) == kernel.arithmetic(STATIC, config)
        assert type(config).from_json(config.to_json()) == config
        # Records that are older than the field.
        assert type(plain).from_json(
            {name: value for name, value in plain.to_json().items() if name != "early"}
        ) == plain  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"cuda": "hip-6.4"}, {"capability": (8, 9)}, {"type": "cpu", "cuda": ""}]
)
def test_other_gpus_overlap_no_launches(change: dict[str, Any]) -> None:
    """Capability 9.0 is an MI200's, too."""
    device = dataclasses.replace(STATIC.device, **change)
    configs = SplitK().configs(dataclasses.replace(STATIC, device=device))
    assert {config.early for config in configs} == {""}


def test_a_product_of_a_copy_overlaps_it_unless_it_does_so_already() -> None:
    config = WarpSpecialized().default_config(DECODE)
    for early, overlapping in (("", "wait"), ("wait", "wait"), ("b", "b")):
        given = dataclasses.replace(config, early=early)
        assert _overlapping(given) == dataclasses.replace(config, early=overlapping)
    other = Skinny().default_config(DECODE)
    assert _overlapping(other) is other


def test_only_products_of_few_rows_launch_early() -> None:
    many = dataclasses.replace(STATIC, m=4096)
    assert not [c for c in WarpSpecialized().configs(many) if c.early]
    by_words = dataclasses.replace(STATIC, b=Operand(BF16, "row", aligned=False))
    configs = list(WarpSpecialized().configs(by_words))
    assert configs
    assert {c.early for c in configs} == {"", "wait"}
    # A config of another problem, of another M of the bucket or a neighbour.
    config = dataclasses.replace(configs[0], early="b")
    assert adapted(by_words, config) == dataclasses.replace(configs[0], early="wait")
    with pytest.raises(ValueError, match="by words"):
        Constants.of(by_words, config)


@pytest.mark.parametrize("kernel", [Skinny(), SplitK()], ids=lambda kernel: kernel.name)
def test_operands_that_are_not_loaded_ahead_cannot_be_early(kernel: Any) -> None:
    ahead = 2 if kernel.name == "triton.skinny" else 1
    config = next(c for c in kernel.configs(STATIC) if c.early == "b")
    assert config.num_stages == ahead
    for wrong in ({"num_stages": 3 - ahead}, {"early": "l2"}, {"early": "a"}):
        with pytest.raises(ConfigError):
            type(config).from_json({**config.to_json(), **wrong})


def test_variants_follow_the_first_that_can() -> None:
    configs = [c for c in SplitK().configs(DECODE) if not c.early]
    able = [c for c in configs if c.num_stages == 1]
    assert with_early(configs, ()) == configs
    assert with_early(configs, ("b",)) == [
        configs[0],
        *(dataclasses.replace(c, early="b") for c in able[:2]),
        *configs[1:],
    ]
    assert [c.early for c in with_early(configs, ("b", "wait"))][:6] == [
        "", "b", "b", "wait", "wait", "",
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_only_few_rows_of_one_matrix_are_early(kernel: Any) -> None:
    few: dict[str, Any] = {"m": FEW_ROWS}
    for fields, early in ((few, True), ({"m": FEW_ROWS + 1}, False), ({"batch": 2}, False)):
        configs = list(kernel.configs(dataclasses.replace(DECODE, **fields)))
        assert configs
        assert any(c.early for c in configs) is early, fields


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.name)
def test_nothing_overlaps_where_the_gpu_cannot(kernel: Any) -> None:
    ampere = dataclasses.replace(H200, capability=(8, 0), name="A100")
    configs = list(kernel.configs(dataclasses.replace(STATIC, device=ampere)))
    assert configs
    assert not [c for c in configs if c.early]


@pytest.mark.parametrize("kernel", [Skinny(), SplitK()], ids=lambda kernel: kernel.name)
def test_kernels_that_wait_need_no_promise(kernel: Any) -> None:
    for config in kernel.configs(STATIC):
        waiting = dataclasses.replace(config, early="wait")
        assert waiting.assumes == ()
        assert type(config).from_json(waiting.to_json()) == waiting


def test_a_copied_weight_is_not_static() -> None:
    """The previous launch writes the copy, even if the weight itself is promised to be static."""
    both = dataclasses.replace(
        STATIC, m=100, k=4093, a=Operand(BF16, aligned=False), b=Operand(BF16, "col", aligned=False)
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
@pytest.mark.slow(quick=8)
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
@pytest.mark.slow(quick=6)
def test_early_launches_with_every_fused_term(
    consumers: int, pingpong: bool, ways: dict[str, Any]
) -> None:
    programs = 6 if "splits" in ways else 3
    sizes = {"m": 10, "n": 8, "k": 24} if "splits" in ways else {"k": 12}
    for seed in range(4):
        out, expected = computed(
            seed, consumers=consumers, pingpong=pingpong, early="b", **sizes, **ways,
            programs=_programs(ways, consumers, pingpong, programs),
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


def _programs(ways: dict[str, Any], consumers: int, pingpong: bool, usual: int) -> int:
    """The number of blocks; if tiles are cut, the last wave has room for their parts."""
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
        ('    if C.early == "b":\n', '    if C.early != "l2":\n'),
        ('sizes, "b", C)\n    elif', 'sizes, "ab", C)\n    elif'),
        # The next launch begins before this one has waited, or is never told.
        (
            "    if C.overlaps:\n        # The previous",
            "    gdc_launch_dependents()\n    if C.overlaps:\n        # The previous",
        ),
        ("    if C.overlaps:\n        # From", "    if False:\n        # From"),
        # Bytes are expected twice, or half of what is asked for is left out.
        ('        if PARTS != "a":\n', "        if True:\n"),
        ('0 if PARTS == "b" else OF_A', "OF_A"),
        ('"a" if C.early == "b" else "ab"', '"ab"'),
    ],
)
def test_the_model_detects_accesses_that_come_too_early(
    line: str, instead: str, tmp_path: Path
) -> None:
    module = changed(line, instead, tmp_path)
    wrong = 0
    for seed, early in itertools.product(range(6), ("wait", "b")):
        try:
            out, expected = computed(seed, early=early, module=module)
        except (DeadlockError, AssertionError):
            wrong += 1
        else:
            wrong += not np.allclose(out, expected)
    assert wrong > 0


@pytest.mark.parametrize("layout", ["n", "t"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "two"),
    [(4096, 4096, False), (1000, 1000, False), (40, 2056, False), (48, 100, False),
     (1000, 1000, True), (96, 2056, True)],
)  # fmt: skip
def test_the_prefetched_part_is_loaded_first(
    n: int, k: int, two: bool, gated: bool, layout: str
) -> None:
    """This includes tiles of two adjacent products."""
    instance = problem(16, n, k, "n" + layout, epilogue="swiglu" if gated else None)
    config = next(iter(WarpSpecialized().configs(DECODE)))
    if two:
        tile = ("pingpong", 2, 4, 64, 192 if gated else 96, 64)
        config = search_space._fitted(instance, tile)[0]
    config = dataclasses.replace(config, early="l2")
    constants = Constants.of(instance, config)
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
        for at, count in prefetched(sizes, constants, stride, program, programs):
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

#: Instructions that touch memory that others write, or let others begin, in the order of the
#: program.
_EVENTS = re.compile(
    r"griddepcontrol\.\w+"
    r"|cp\.async\.bulk\.prefetch"
    r"|cp\.async\.bulk\.tensor\.\dd\.(?:shared|global)"
    r"|cp\.async\.c[ag]"
    r"|(?:ld|st|atom|red|ld\.acquire)\.(?:\w+\.)*global"
)
_CASES = {
    "plain": DECODE,
    "said": STATIC,
    "fused": dataclasses.replace(
        STATIC, bias=BF16, residual=Operand(BF16), epilogue=problem(epilogue="silu").epilogue
    ),
    "large": problem(2304, 2304, 2048),
    "gated": dataclasses.replace(STATIC, n=14336, epilogue=problem(epilogue="swiglu").epilogue),
}


def _worth_compiling(kernel: Any, problem: Problem) -> list[Any]:
    """One config of each structure of a program, waiting, and the first of every other way."""
    found: dict[tuple[Any, ...], Any] = {}
    for config in kernel.configs(problem):
        cuts = [getattr(config, cut, 1) > 1 for cut in ("tail_splits", "splits", "SPLIT_K")]
        schedule = getattr(config, "schedule", None)
        ahead = kernel.name != "triton.warp_specialized" and config.num_stages == 1
        found.setdefault((*cuts, schedule, ahead), dataclasses.replace(config, early="wait"))
        if config.early != "wait":
            found.setdefault((config.early,), config)
    return list(found.values())


def programs_compiled() -> list[dict[str, Any]]:
    lines = []
    for name, instance in _CASES.items():
        for kernel in KERNELS:
            if [r for r in kernel.reasons_against(instance) if "driver" not in r]:
                continue
            for config in _worth_compiling(kernel, instance):
                if isinstance(kernel, WarpSpecialized):
                    of = kernel.specialize(instance, config)
                    src = source(
                        warp_specialized_kernel,
                        of.types,
                        of.constants,
                        of.divisible,
                    )
                    compiled = [compile_for(GPUTarget("cuda", 90, 32), src, **of.options)]
                else:
                    hopper = GPUTarget("cuda", 90, 32)
                    builds = kernel.builds(instance, config)
                    compiled = [build.compile_for(hopper) for build in builds]
                for one in compiled:
                    line = {"case": name, "kernel": one.name, "early": config.early}
                    line |= {"events": _EVENTS.findall(one.asm["ptx"])}
                    line |= {"config": str(config), "pdl": one.metadata.launch_pdl}
                    lines.append(line)
    return lines


@pytest.mark.slow
def test_no_memory_is_accessed_before_the_wait(uninterpreted: Uninterpreted) -> None:
    lines = uninterpreted(programs_compiled)
    assert {line["early"] for line in lines} == {"", "wait", "l2", "b"}
    assert {line["kernel"] for line in lines} == {
        "warp_specialized_kernel", "skinny_kernel", "split_k_kernel", "reduce_kernel",
    }  # fmt: skip
    for line in lines:
        events = line["events"]
        if line["early"] == "" and line["kernel"] != "reduce_kernel":
            assert not line["pdl"], line
            assert not [event for event in events if "griddep" in event], line
            continue
        assert line["pdl"], line
        assert events.count("griddepcontrol.wait") == 1, line
        assert "griddepcontrol.launch_dependents" in events, line
        wait = events.index("griddepcontrol.wait")
        assert wait < events.index("griddepcontrol.launch_dependents"), line
        before, after = events[:wait], events[wait + 1 :]
        if line["early"] == "wait" or line["kernel"] == "reduce_kernel":
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


@pytest.mark.parametrize("early", ["", "wait", "b"])
@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.name)
def test_dependent_launch_where_the_config_says_and_the_gpu_can(kernel: Any, early: str) -> None:
    """The config may come from another GPU's record."""
    config = next(c for c in kernel.configs(STATIC) if c.early == early)
    ampere = dataclasses.replace(H200, capability=(8, 0), name="A100")
    for device, able in ((H200, True), (ampere, False)):
        problem: Problem = dataclasses.replace(STATIC, device=device)
        first, *reducing = kernel.builds(problem, config)
        overlaps = able and early != ""
        assert first.constants["OVERLAPS"] is overlaps
        assert first.constants["EARLY"] is (able and early == "b")
        assert first.options.get("launch_pdl", False) is overlaps
        # The one before it is its own kernel's first, whatever comes before that.
        for second in reducing:
            assert second.constants["OVERLAP"] is able
            assert second.options.get("launch_pdl", False) is able


@pytest.mark.parametrize("early", ["", "wait", "l2", "b"])
def test_the_hopper_kernel_overlaps_where_the_config_says(early: str) -> None:
    kernel = WarpSpecialized()
    config = next(c for c in kernel.configs(STATIC) if c.early == early)
    of = kernel.specialize(STATIC, config)
    constants = of.constants["C"]
    assert of.options["launch_pdl"] is constants.overlaps is (early != "")
    # All stages are asked for before the roles part where b's part of them comes early.
    primes_all = config.num_stages == constants.PRIMED
    assert (constants.early, primes_all) == (early, early in ("l2", "b"))


def test_h200_has_dependent_launch_and_others_not() -> None:
    ampere = dataclasses.replace(H200, capability=(8, 0), name="A100")
    for kernel in KERNELS[1:]:
        for early, device in itertools.product(("", "wait"), (H200, ampere)):
            problem: Problem = dataclasses.replace(DECODE, device=device)
            config = dataclasses.replace(kernel.default_config(problem), early=early)
            build = kernel.builds(problem, config)[0]
            has = early == "wait" and device is H200
            assert build.constants["OVERLAPS"] is has
            assert build.options.get("launch_pdl", False) is has
    default = KERNELS[0].default_config(DECODE)
    special = [
        KERNELS[0].specialize(DECODE, dataclasses.replace(default, early=early))
        for early in ("", "wait", "l2", "b")
    ]
    assert [of.options["launch_pdl"] for of in special] == [False, True, True, True]
