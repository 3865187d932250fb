"""The step along K of Triton kernels with packed weights, scales of groups and blocks, and zero
points. Results are compared with the values' product in fp64. Some problems are declined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.naive import Naive
from tmm_triton.ragged import Ragged
from tmm_triton.scaled_step import arguments
from tmm_triton.split_k import SplitK
from tmm_triton.tiled import FusedEpilogue, Grouped
from tmm_triton.triton_kernel import unsteppable

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.formats import grids
from tmm_core.spec.device import DeviceFingerprint, fingerprint, interpreting
from tmm_core.verify import compare, random_inputs

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INT4 = Operand(torch.uint8, "col", format="int4", scale=Scale.parse("1x64 bfloat16"))
#: Operands by name: a, and b.
OPERANDS = {
    "zero points": (Operand(FP16), replace(INT4, zero=torch.uint8)),
    "zero points by row": (
        Operand(BF16), replace(INT4, scale=Scale.parse("row"), zero=torch.uint8),
    ),
    "zero points of int8": (
        Operand(FP16),
        Operand(torch.int8, "col", format="int8", scale=Scale.parse("tensor"), zero=torch.int8),
    ),
    "signed, zero points in bf16": (
        Operand(BF16), replace(INT4, dtype=torch.int8, format="int4_signed", zero=BF16),
    ),
    "exponents": (
        Operand(FP16), Operand(torch.uint8, "col", format="mxfp4", scale=Scale.parse("1x32 uint8")),
    ),
    # Where K is one group, and the matrix one column besides.
    "exponents by row": (
        Operand(BF16), Operand(torch.uint8, "col", format="mxfp4", scale=Scale.parse("row uint8")),
    ),
    "one exponent": (
        Operand(BF16), Operand(E4M3, "col", format="mxfp8", scale=Scale.parse("tensor uint8")),
    ),
    "blocks": (Operand(E4M3, scale=Scale.parse("1x128")), Operand(
        E4M3, "col", scale=Scale.parse("128x128"),
    )),
    "rows of a in groups": (
        Operand(E4M3, scale=Scale.parse("1x32")), Operand(E4M3, "col", scale=Scale.parse("row")),
    ),
    "row-major": (Operand(BF16), replace(INT4, layout="row")),
}  # fmt: skip
#: A device that the interpreter serves here, or this GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not interpreting() else "cpu")
KERNELS: dict[str, Any] = {
    kernel.name: kernel for kernel in (Naive(), SplitK(), Grouped(), FusedEpilogue(), Ragged())
}


def problem_of(of: str, **changes: Any) -> Problem:
    a, b = OPERANDS[of]
    out = Operand(BF16 if a.dtype is E4M3 else a.dtype)
    k = 300 if of == "blocks" else 256
    return replace(Problem(19, 35, k, a, b, out, fingerprint(DEVICE)), **changes)


@pytest.mark.skipif(not interpreting() and DEVICE.type == "cpu", reason="needs the interpreter")
@pytest.mark.parametrize("of", OPERANDS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.slow(quick=10)
def test_products(of: str, name: str) -> None:
    kernel, problem = KERNELS[name], problem_of(of)
    problems = [problem, replace(problem, batch=2)]
    if kernel.supports.gated:
        problems.append(replace(problem, epilogue=parse("swiglu"), bias=problem.out.dtype))
    if kernel.supports.ragged:
        groups = Groups(3, "m")
        indexed = Groups(3, "m", torch.int32, torch.int32, torch.float32, zeroed=True)
        problems = [
            replace(each, groups=g, batch=1) for each in problems for g in (groups, indexed)
        ]
        if problem.b.scale is None or problem.b.block[0] <= 1:
            problems.append(replace(problem, groups=Groups(3, "n")))
    for each in problems:
        assert not list(kernel.reasons_against(each))
        inputs = random_inputs.make(each, DEVICE, seed=3)
        expected = compare.expected(each, inputs).numbers
        for config in list(kernel.configs(each))[:2]:
            found = inputs.launch(kernel.bind(each, config), None)
            assert compare.error(found, expected) <= compare.tolerance(each), (str(each), config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"b": replace(INT4, scale=Scale.parse("1x24 bfloat16"))}, "not groups of 24 of b"),
        ({"b": replace(INT4, zero=BF16), "out": Operand(torch.float32)}, "too coarse for"),
    ],
)
def test_unsupported_problems_are_declined(change: dict[str, Any], text: str) -> None:
    problem = replace(problem_of("row-major"), **change)
    for kernel in (Naive(), Grouped()):
        assert any(text in reason for reason in kernel.reasons_against(problem))


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    ("group", "able"),
    [(8, False), (24, False), *((2**i, True) for i in range(4, 10)), (1024, False)],
)
def test_groups_are_steps(group: int, able: bool, name: str) -> None:
    scaled = replace(OPERANDS["blocks"]["ab".index(name)], scale=Scale.parse(f"1x{group}"))
    problem = problem_of("blocks", k=3072, **{name: scaled})
    found = list(unsteppable(problem))
    assert found == ([] if able else [
        f"has steps of 16 to 512 along K, not groups of {group} of {name}"
    ])  # fmt: skip


@pytest.mark.parametrize("out", [torch.float32, BF16, FP16], ids=str)
@pytest.mark.parametrize("a", [torch.float32, BF16, FP16], ids=str)
def test_zero_points_of_floats_are_too_coarse_only_where_values_are_rounded(
    a: torch.dtype, out: torch.dtype
) -> None:
    """Values have the dtype of ``a``: in 16 bits a finer result would show their rounding."""
    zeros = problem_of("row-major", a=Operand(a), out=Operand(out), b=replace(INT4, zero=BF16))
    finer = a is not torch.float32 and out not in (a, BF16)
    assert any("too coarse" in each for each in Naive().reasons_against(zeros)) is finer


@pytest.mark.parametrize(
    ("capability", "cuda", "able"),
    [
        ((8, 6), "12.8", False), ((8, 9), "12.8", True), ((9, 0), "12.8", True),
        ((12, 0), "13.0", True), ((9, 4), "hip-6.4", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("narrow", ["a", "b", "ab", ""])
def test_8_bit_floats_need_a_gpu_that_has_them(
    narrow: str, capability: tuple[int, int], cuda: str, able: bool
) -> None:
    device = DeviceFingerprint("cuda", "GPU", capability, 100, 99 * 1024, cuda=cuda)
    a, b = (Operand(E4M3 if name in narrow else BF16, scale=None) for name in "ab")
    reasons = list(Naive().declines(replace(problem_of("row-major"), a=a, b=b, device=device)))
    assert any("8-bit floats need" in each for each in reasons) is (bool(narrow) and not able)


def test_a_step_is_inside_a_group() -> None:
    for of in OPERANDS:
        problem = problem_of(of)
        groups = [spec.block[1] for spec in (problem.a, problem.b) if spec.grid]
        for kernel in KERNELS.values():
            instance = (
                replace(problem, groups=Groups(3, "m")) if kernel.supports.ragged else problem
            )
            for config in kernel.configs(instance):
                assert all(group % config.BLOCK_K == 0 for group in groups)


#: Products by name: a batch, and the products of groups.
STACKS: dict[str, dict[str, Any]] = {
    "one": {}, "a batch": {"batch": 3},
    "groups of rows": {"groups": Groups(3, "m")}, "groups of columns": {"groups": Groups(3, "n")},
}  # fmt: skip
#: The names of strides and blocks in kernels.
NAMES = {
    "a_scale": ("stride_as", "A"), "b_scale": ("stride_bs", "B"), "b_zero": ("stride_0", "ZERO"),
}  # fmt: skip


def read_by_kernels(problem: Problem, parts: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    """The scale or zero point that kernels read for each ``[z, row, k]`` of ``a`` or
    ``[z, k, column]`` of ``b``."""
    typed, known = arguments(problem)
    for name, (_, value) in typed.items():
        known[name] = parts[value[0]].stride(value[1]) if isinstance(value, tuple) else value
    stride, block = NAMES[part]
    sizes = 3, (problem.m if part[0] == "a" else problem.n), problem.k
    z, outer, k = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    at = z * known[f"{stride}z"]
    at += outer // known[f"{block}_OUTER"] * known[stride + ("m" if part[0] == "a" else "n")]
    at += k // known[f"{block}_GROUP"] * known[f"{stride}k"]
    numbers = parts[part].as_strided((int(at.max()) + 1,), (1,))[at].float()
    return numbers if part[0] == "a" else numbers.mT


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("part", NAMES)
def test_a_value_has_the_scale_and_the_zero_point_of_its_block(part: str, stack: str) -> None:
    for of in OPERANDS:
        problem = problem_of(of, **STACKS[stack])
        operand: Operand = getattr(problem, part[0])
        in_steps = operand.grid or part == "b_zero"
        if part not in problem.parts or not in_steps:
            continue
        if stack == "groups of columns" and operand.block[0] > 1:
            continue  # kernels decline columns of one block in several groups
        parts = random_inputs.make(problem, torch.device("cpu"), seed=3).parts
        numbers = parts[part]
        numbers.copy_((torch.arange(numbers.numel()) % 127).view(numbers.shape))
        found = read_by_kernels(problem, parts, part)
        if operand.block == grids.ROW:  # of groups the parts lack the dimension of K
            numbers = numbers.reshape(-1, 1, problem.n)
        expected = grids.combined(
            torch.add, torch.zeros_like(found), numbers, operand.block, -1 if part[0] == "a" else -2
        )
        assert torch.equal(found, expected.expand(found.shape)), of
