"""The Hopper kernel without a Hopper GPU. Its source runs on a model of the block, and its configs
compile for sm_90. It gives a reason for each problem that it declines."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import triton
from fakes import with_scales, without_scales
from hopper_block import (
    DeadlockError,
    Descriptor,
    Pointer,
    Rows,
    changed,
    run_block,
    workspace_order,
)
from pairwise import covering, every_case, share
from tmm_triton import operands, triton_kernel
from tmm_triton.hopper import config as hopper_config
from tmm_triton.hopper import search_space, tile_shapes
from tmm_triton.hopper.config import Constants, WarpSpecializedConfig, unfinished
from tmm_triton.hopper.hopper_kernel import warp_specialized_kernel
from tmm_triton.hopper.operand_layout import described
from tmm_triton.hopper.warp_specialized import WarpSpecialized
from tmm_triton.tile_anatomy import usage
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor
from uninterpreted import Uninterpreted

from tmm_core import ConfigError, Groups, Operand, Port, Problem, Scale
from tmm_core.epilogues import BUILTIN, EPILOGUES, parse
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.epilogue import Epilogue
from tmm_core.testing.terms import ABSOLUTE
from tmm_core.triton import compile_for, releases, source
from tmm_core.verify import random_inputs

KERNEL = WarpSpecialized()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
H200 = DeviceFingerprint(
    type="cuda", name="NVIDIA H200", capability=(9, 0), sm_count=132, shared_memory=232448
)
LAYOUTS = {"n": "row", "t": "col"}


def problem(
    m: int = 4096,
    n: int = 4096,
    k: int = 4096,
    layout: str = "nt",
    dtype: torch.dtype = BF16,
    out: torch.dtype | Operand | None = None,
    epilogue: str | None = None,
    **fields: Any,
) -> Problem:
    a, b = (Operand(dtype, LAYOUTS[letter]) for letter in layout)
    out = out if isinstance(out, Operand) else Operand(out or dtype)
    defaults = {"a": a, "b": b, "out": out, "device": H200}
    fields = {**defaults, "epilogue": parse(epilogue), **fields}
    return with_scales(Problem(m=m, n=n, k=k, **without_scales(fields)), fields)


def with_amax(problem: Problem, reduce: str = "max") -> Problem:
    port = Port("amax", "row", reduce=reduce, **ABSOLUTE)  # type: ignore[arg-type]
    return dataclasses.replace(
        problem, epilogue=dataclasses.replace(problem.epilogue, outputs=(port,))
    )


@pytest.mark.parametrize(
    "instance",
    [
        with_amax(problem(epilogue="swiglu", residual=Operand(BF16))),
        problem(layout="nn"),
        problem(n=4104, layout="nn", epilogue="swiglu"),
        problem(layout="tn", dtype=FP16),
        problem(layout="tt", out=FP32),
        problem(m=1, n=8, k=8),
        problem(epilogue="gelu_tanh+softcap(30)", bias=FP32, residual=Operand(BF16, "strided")),
        problem(epilogue="swiglu", layout="nn", bias=BF16, scaled=True),
        problem(residual=Operand(FP32, "row", aligned=False)),
        problem(out=Operand(BF16, aligned=False)),
        problem(n=4092, b=Operand(BF16, "col")),
        problem(m=1, n=1, k=1, out=Operand(FP32, aligned=False)),
        problem(deterministic=True, batch_invariant=True, capturing=True),
        problem(dtype=E4M3, out=BF16, scales=("tensor", None), epilogue="swiglu"),
        problem(dtype=E5M2, out=FP32, b=Operand(E4M3, "col"), scales=("row", "row")),
        problem(batch=64, layout="nn", epilogue="swiglu", bias=BF16, residual=Operand(BF16)),
        problem(m=127, b=Operand(BF16, "row", aligned=False)),
        problem(m=1, n=50257, b=Operand(FP16, "col", aligned=False), a=Operand(FP16)),
        problem(n=64, a=Operand(BF16, "row", aligned=False), bias=BF16, epilogue="silu"),
        problem(n=128, k=4095, a=Operand(BF16, "col", aligned=False)),
        problem(groups=Groups(8, "m", zeroed=True), epilogue="swiglu", bias=BF16),
        problem(m=2**30, groups=Groups(8, "m")),
        problem(groups=Groups(8, "m", out_index=torch.int64)),
        problem(n=4092, groups=Groups(8, "m"), layout="nt", residual=Operand(FP32, "strided")),
        problem(groups=Groups(8, "m"), dtype=E4M3, out=BF16, scales=("row", "row")),
        problem(groups=Groups(128, "k"), layout="tn", residual=Operand(BF16), scaled=True),
        problem(dtype=E4M3, out=BF16, scales=("1x128", "128x128"), epilogue="swiglu", bias=BF16),
        problem(300, 333, 1152, dtype=E4M3, out=FP32, scales=("1x128", "row")),
        problem(dtype=E4M3, out=BF16, scales=("1x128", "128x128"), groups=Groups(8, "m")),
    ],
    ids=str,
)
def test_serves(instance: Problem) -> None:
    assert KERNEL.reasons_against(instance) == []


@pytest.mark.parametrize(
    ("instance", "found"),
    [
        (problem(layout="tt"), {"A_COL": True}),
        (problem(layout="nn"), {"B_COL": False}),
        (problem(epilogue="swiglu"), {"GATED": True}),
        (problem(scaled=True), {"SCALED": True}),
        (problem(bias=BF16), {"BIAS": True}),
        (problem(residual=Operand(BF16)), {"RESIDUAL": True, "FETCH": True}),
        (problem(residual=Operand(BF16, "strided")), {"RESIDUAL": True}),
        (problem(batch=2), {"BATCHED": True}),
        (problem(out=FP32), {"OUT_BYTES": 4}),
        (problem(n=4092), {"POINTERS": True}),
        (problem(groups=Groups(8, "m")), {"RAGGED": "m"}),
        (problem(groups=Groups(8, "m", zeroed=True)), {"RAGGED": "m", "ZEROED": True}),
        (problem(groups=Groups(8, "m", out_weights=FP32)), {"RAGGED": "m", "WEIGHTED": True}),
        (
            problem(groups=Groups(8, "m", out_index=torch.int64)),
            {"RAGGED": "m", "SCATTERED": True, "POINTERS": True, "STORED": 8},
        ),
        (problem(groups=Groups(8, "k"), layout="tt"), {"RAGGED": "k", "A_COL": True}),
        (
            problem(dtype=E4M3, out=BF16, scales=("row", "tensor")),
            {"IN_BYTES": 1, "A_SCALE": "row", "B_SCALE": "tensor"},
        ),
        (
            problem(dtype=E4M3, out=BF16, scales=("1x128", "128x128")),
            {
                "IN_BYTES": 1, "A_SCALE": "group", "B_SCALE": "block", "A_GROUP": 128,
                "B_GROUP": 128, "B_OUTER": 128,
            },
        ),
        (with_amax(problem()), {"REDUCE": "max"}),
    ],
)  # fmt: skip
def test_each_property_of_a_problem_is_a_constant(instance: Problem, found: dict[str, Any]) -> None:
    usual = hopper_config._of_problem(problem())
    assert usual["RAGGED"] is usual["A_SCALE"] is None
    assert hopper_config._of_problem(instance) == usual | found


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        (
            problem(device=dataclasses.replace(H200, capability=(8, 0))),
            "9.0 to below 9.1, this is 8.0",
        ),
        (problem(device=dataclasses.replace(H200, capability=(10, 0))), "this is 10.0"),
        (problem(device=DeviceFingerprint("cpu", "cpu")), "NVIDIA GPUs, not on cpu"),
        (problem(device=DeviceFingerprint("cpu", "cpu", interpreted=True)), "interpreter"),
        (problem(dtype=FP32), "torch.float32 operands are not among float16, bfloat16, fp8"),
        (problem(b=Operand(FP16, "col")), "operands differ in dtype"),
        (problem(b=Operand(E4M3, "col")), "takes no fp8 b with an a of torch.bfloat16"),
        (problem(dtype=E4M3), "out of torch.float8_e4m3fn"),
        (problem(layout="nn", dtype=E4M3, out=BF16), "along K only"),
        (problem(layout="tt", dtype=E5M2, out=BF16), "along K only"),
        (problem(dtype=E4M3, out=BF16, scales=("1x64", "row")), "not groups of 64 of a"),
        (problem(dtype=E4M3, out=BF16, scales=("row", "1x32")), "not groups of 32 of b"),
        (problem(out=torch.float64), "out of torch.float64"),
        (problem(bias=torch.float64), "bias of torch.float64"),
        (problem(residual=Operand(torch.int8)), "residual of torch.int8"),
        (problem(groups=Groups(8, "m"), layout="tt"), "TMA at 16 bytes"),
        (problem(m=0), "nothing to multiply"),
        (problem(k=0), "nothing to multiply"),
        (problem(a=Operand(BF16, "row", aligned=False)), "a is not aligned to 16 bytes"),
        (problem(b=Operand(BF16, "col", aligned=False)), "b is not aligned to 16 bytes"),
        (problem(m=129, b=Operand(BF16, "row", aligned=False)), "b is not aligned to 16 bytes"),
        (problem(n=64, b=Operand(BF16, "row", aligned=False)), "b is not aligned to 16 bytes"),
        (
            problem(
                m=64, n=64, a=Operand(BF16, aligned=False), b=Operand(BF16, "row", aligned=False)
            ),
            "a is not aligned to 16 bytes",
        ),
        (
            problem(m=64, batch=2, b=Operand(BF16, "row", aligned=False)),
            "b is not aligned to 16 bytes",
        ),
        (
            problem(m=8, n=2**27, k=8, b=Operand(BF16, "row", aligned=False)),
            "b is not aligned to 16 bytes",
        ),
        (
            problem(m=64, b=Operand(BF16, "col", aligned=False), epilogue="swiglu"),
            "b is not aligned to 16 bytes",
        ),
        (problem(a=Operand(BF16, "strided", aligned=False)), "a has no contiguous dimension"),
        (problem(out=Operand(BF16, "col")), "out is column-major, not row-major"),
        (problem(out=Operand(BF16, "strided", aligned=False)), "out has no contiguous dimension"),
        (problem(n=4092, layout="nn", epilogue="swiglu"), "up half"),
        (problem(groups=Groups(8, "n")), "ragged along n"),
        (problem(groups=Groups(8, "m", a_index=torch.int64)), "TMA does not gather rows"),
        (
            problem(groups=Groups(8, "m", out_index=torch.int64), residual=Operand(BF16)),
            "not supported with a residual",
        ),
        (problem(groups=Groups(8, "k")), "groups along K begin and end at rows of memory"),
        (problem(m=2**30 + 1, groups=Groups(8, "m")), "more than 1073741824 rows"),
        (
            problem(m=64, groups=Groups(8, "m"), b=Operand(BF16, "col", aligned=False)),
            "b is not aligned to 16 bytes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declines_with_the_reason(instance: Problem, reason: str) -> None:
    reasons = KERNEL.reasons_against(instance)
    assert len(reasons) >= 1
    assert any(reason in text for text in reasons), reasons


def test_groups_may_have_as_many_rows_as_a_descriptor_reaches() -> None:
    assert not KERNEL.reasons_against(problem(m=2**30, groups=Groups(8, "m")))


def stored(problem: Problem) -> str:
    """The argument by which the output is stored: a pointer, or a descriptor for TMA."""
    types = KERNEL.specialize(problem, CONFIG).types
    (how,) = types.keys() & {"out_ptr", "c_desc"}
    return how


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("residual", [None, Operand(BF16)])
def test_tma_stores_whole_rows_of_16_bytes_only(batch: int, residual: Operand | None) -> None:
    """In other rows TMA would store elements beyond the end of a row."""
    for n in range(4088, 4097):
        for dtype, whole in ((BF16, 8), (FP32, 4)):
            instance = problem(n=n, out=dtype, batch=batch, residual=residual)
            assert stored(instance) == ("c_desc" if n % whole == 0 else "out_ptr")
            off = dataclasses.replace(instance, out=Operand(dtype, aligned=False))
            assert stored(off) == "out_ptr"
            types = KERNEL.specialize(instance, CONFIG).types
            fetched = residual is not None and dtype is BF16 and n % whole == 0
            assert ("r_desc" in types) is fetched
            assert ("residual_ptr" in types) is (residual is not None and not fetched)
    assert stored(problem(m=1, n=1, k=8)) == "out_ptr"


#: The values of arguments: a pair stands for a tensor's stride.
OUT_ROWS = {"out_ptr": "out", "out_stride": ("out", -2)}
RESIDUAL_ROWS = {"residual_ptr": "residual", "residual_stride_m": ("residual", -2)}
BATCH = {"BATCH": 2, "a_stride_z": ("a", 0), "b_stride_z": ("b", 0)}
GROUPS = {"offs_ptr": "offs", "G": 8}
ROW_GROUPS = GROUPS | {"table_ptr": "workspace", "b_stride_z": ("b", 0)}


@pytest.mark.parametrize(
    ("instance", "field", "found"),
    [
        (problem(scaled=True), {}, {"alpha": "alpha"}),
        (problem(bias=BF16), {}, {"bias_ptr": "bias", "bias_stride": ("bias", -1)}),
        (problem(residual=Operand(FP32)), {}, RESIDUAL_ROWS),
        (
            problem(residual=Operand(BF16, "strided")),
            {},
            RESIDUAL_ROWS | {"residual_stride_n": ("residual", -1)},
        ),
        (problem(out=Operand(BF16, aligned=False)), {}, OUT_ROWS),
        (problem(batch=2), {}, BATCH),
        (
            problem(batch=2, out=Operand(BF16, aligned=False), residual=Operand(FP32)),
            {},
            BATCH | OUT_ROWS | RESIDUAL_ROWS
            | {"out_stride_z": ("out", 0), "residual_stride_z": ("residual", 0)},
        ),
        (problem(groups=Groups(8, "k"), layout="tn"), {}, GROUPS),
        (problem(groups=Groups(8, "m")), {}, ROW_GROUPS),
        (
            problem(groups=Groups(8, "m"), bias=BF16),
            {},
            ROW_GROUPS | {
                "bias_ptr": "bias", "bias_stride": ("bias", -1),
                "bias_stride_z": ("bias", 0),
            },
        ),
        (problem(groups=Groups(8, "m", zeroed=True)), {}, ROW_GROUPS | OUT_ROWS),
        (
            problem(groups=Groups(8, "m", out_index=torch.int64, out_weights=FP32)),
            {},
            ROW_GROUPS | OUT_ROWS
            | {"out_index_ptr": "out_index", "out_weights_ptr": "out_weights"},
        ),
        (
            problem(128, b=Operand(BF16, "row", aligned=False)),
            {},
            {"words_ptr": "b", "words_stride": ("b", -2)},
        ),
        (
            problem(n=64, a=Operand(BF16, "col", aligned=False)),
            {"BLOCK_M": 64, "consumers": 1},
            {"words_ptr": "a", "words_stride": ("a", -1)},
        ),
        (problem(), {"early": "l2"}, {"ahead_ptr": "b", "ahead_stride": ("b", -1)}),
        (problem(layout="nn"), {"early": "l2"}, {"ahead_ptr": "b", "ahead_stride": ("b", -2)}),
        (problem(), {"early": "wait"}, {}),
        (
            problem(),  # 512 tiles, 116 of them in a fourth wave
            {"tail_splits": 2},
            {"parts_ptr": "workspace", "flags_ptr": operands.Zeros(2 * 132), "TAIL": 116},
        ),
        (
            with_amax(problem(300)),
            {},
            {"port_ptr": "workspace", "port_at": 0, "port_stride": 300},
        ),
    ],
)  # fmt: skip
def test_each_property_has_its_arguments(
    instance: Problem, field: dict[str, Any], found: dict[str, Any]
) -> None:
    """Descriptors aside, whose names the properties do not change."""
    usual = {"M": instance.m, "N": instance.n, "K": instance.k, "GROUP_M": CONFIG.GROUP_M}
    given = KERNEL.specialize(instance, dataclasses.replace(CONFIG, **field)).values
    numbers = {name: value for name, value in given.items() if not name.endswith("_desc")}
    assert numbers == usual | found


@pytest.mark.parametrize(
    ("m", "n", "wide", "bits"),
    [
        (2, 4092, False, (32, 32)),
        (2, 4092, True, (64, 64)),
        (1, 4092, False, (64, 64)),
        (1, 4092, True, (64, 64)),
        (2, 1, False, (32, 64)),
    ],
)
def test_strides_have_64_bits_where_32_may_not_hold_them(
    m: int, n: int, wide: bool, bits: tuple[int, int]
) -> None:
    """The only row may have any stride, although no offset is large."""
    rows = Operand(BF16, aligned=False, wide=wide)
    types = KERNEL.specialize(problem(m, n, out=rows, residual=rows), CONFIG).types
    assert (types["out_stride"], types["residual_stride_m"]) == tuple(f"i{each}" for each in bits)


def test_arguments_declared_divisible_are() -> None:
    """Then fp32 residuals are loaded 16 bytes at a time, and 16 values of 8 bits are stored at
    once."""
    amax = Port("amax", "group", group=64, **ABSOLUTE)  # type: ignore[arg-type]
    grouped = dataclasses.replace(problem().epilogue, outputs=(amax,))
    for n, batch, aligned in itertools.product(range(4080, 4097), (1, 2), (True, False)):
        instance = problem(n=n, batch=batch, residual=Operand(FP32, aligned=aligned))
        promised = {"N": 8, "residual_ptr": 16, "residual_stride_m": 4}
        promised |= {"residual_stride_z": 4} if batch > 1 else {}
        promised = promised if aligned and n % 8 == 0 else {}
        assert KERNEL.specialize(instance, CONFIG).divisible == promised
        outputs = dataclasses.replace(instance, residual=None, epilogue=grouped)
        promised = {"N": 16, "port_ptr": 16} if n % 16 == 0 else {}
        assert KERNEL.specialize(outputs, CONFIG).divisible == promised


@pytest.mark.parametrize(
    ("fields", "promised"),
    [
        ({"out_index": torch.int32}, {"out_ptr": 16, "out_stride": 8, "N": 8}),
        ({"zeroed": True}, {"out_ptr": 16, "out_stride": 8, "N": 8}),
        ({}, {}),
    ],
)
def test_rows_without_tma_are_stored_16_bytes_at_a_time(
    fields: dict[str, Any], promised: dict[str, int]
) -> None:
    """Rows that an index scatters, and zeros beyond the last group."""
    instance = problem(groups=Groups(8, "m", **fields))
    assert KERNEL.specialize(instance, CONFIG).divisible == promised
    unaligned = dataclasses.replace(instance, out=Operand(BF16, aligned=False))
    assert KERNEL.specialize(unaligned, CONFIG).divisible == {}


@pytest.mark.parametrize("scales", [("row", "row"), ("tensor", "tensor")], ids=str)
def test_partial_sums_are_scaled_once(scales: Any) -> None:
    """The kernel that adds the partial sums applies the scales."""
    instance = problem(m=299, n=208, k=1152, dtype=E4M3, out=BF16, scales=scales)
    whole, cut = (
        KERNEL.builds(instance, dataclasses.replace(CONFIG, BLOCK_N=64, splits=splits))
        for splits in (1, 3)
    )
    assert len(whole) == 1
    main, reducing = cut
    assert whole[0].values["c_desc"].tensor == "out"
    assert main.values["c_desc"].tensor == "workspace"
    for name in ("a_scale_ptr", "b_scale_ptr"):
        assert name in whole[0].types
        assert name not in main.types
        assert name in reducing.types
    assert main.constants["C"].A_SCALE is main.constants["C"].B_SCALE is None
    assert reducing.constants["A_SCALE"] == scales[0]


def test_partial_sums_with_scales_of_blocks_are_scaled_step_by_step() -> None:
    """The kernel that adds the partial sums applies only scales of whole rows."""
    for scales, left in ((("1x128", "128x128"), None), (("1x128", "row"), "row")):
        instance = problem(m=299, n=208, k=1152, dtype=E4M3, out=BF16, scales=scales)
        config = dataclasses.replace(CONFIG, BLOCK_K=128, BLOCK_N=64, splits=3)
        main, reducing = KERNEL.builds(instance, config)
        of_a, of_b = main.constants["C"].A_GROUP, main.constants["C"].B_GROUP
        assert (of_a, of_b) == (128, 0 if left else 128)
        assert "a_scale_ptr" in main.types
        assert ("b_scale_ptr" in main.types) is (left is None)
        assert (reducing.constants["B_SCALE"] == "row") is (left == "row")
        finer = dataclasses.replace(
            instance, a=dataclasses.replace(instance.a, scale=Scale((1, 64)))
        )
        with pytest.raises(ValueError, match="several groups"):
            config.shared_memory(finer)


def test_which_columns_share_a_scale() -> None:
    """The columns of a product share a scale if a block's width is a multiple of theirs, and the up
    projection begins at a block."""

    def alike(n: int, columns: int, scales: str = "128x128", epilogue: str | None = None) -> bool:
        instance = problem(n=n, dtype=E4M3, out=BF16, scales=("1x128", scales), epilogue=epilogue)
        fields = {"BLOCK_N": columns, "BLOCK_K": 128, "subtiles": 2}
        return Constants.of(instance, dataclasses.replace(CONFIG, **fields)).ALIKE

    for columns in (64, 128, 256):  # 256 are two products
        assert alike(4096, columns)
        assert alike(4000, columns)
        assert not alike(4096, columns, "1x128")
    assert alike(4096, 128, epilogue="swiglu")
    assert alike(4096 + 64, 64, epilogue="swiglu")
    assert not alike(4096 + 64, 128, epilogue="swiglu")
    assert not alike(4096, 64, "row")


def test_which_configs_sum_a_row_alike() -> None:
    """Sums of 8-bit products are promoted every BLOCK_K, so their bits depend on BLOCK_K. Bits of
    other sums do not."""

    def arithmetic(problem: Problem, **fields: Any) -> object:
        return KERNEL.arithmetic(problem, dataclasses.replace(CONFIG, **fields))

    eight = problem(dtype=E4M3, out=BF16)
    for instance in (problem(), problem(dtype=FP16), eight):
        alike = {"num_stages": 3}, {"GROUP_M": 2}, {"subtiles": 2}, {"evict_first": True}
        tiles = {"BLOCK_M": 192, "consumers": 3, "BLOCK_N": 128}, {"BLOCK_N": 64}
        for fields in (*alike, *tiles):
            assert arithmetic(instance, **fields) == arithmetic(instance), fields
            other_m = dataclasses.replace(instance, m=17)
            assert arithmetic(other_m, **fields) == arithmetic(instance), fields
        assert arithmetic(instance, tail_splits=2) is None
        assert arithmetic(instance, splits=2) != arithmetic(instance)
        # For so many rows the workspace is too small, so K would not be split.
        assert arithmetic(dataclasses.replace(instance, m=8192), splits=2) is None
    assert arithmetic(eight, splits=2) is None
    cut = {arithmetic(problem(m=m), splits=2, BLOCK_K=k) for m in (17, 4096) for k in (32, 64, 128)}
    assert len(cut) == 1
    assert None not in cut
    # A block may also sum ranges of K one after the other, for any number of rows.
    ranges = {"ranges": 2, "BLOCK_N": 128}
    assert {arithmetic(problem(m=m), **ranges) for m in (17, 8192)} == cut
    for other in (problem(epilogue="swiglu"), eight, problem(groups=Groups(8, "m"))):
        assert arithmetic(other, **ranges) is None
    # Here the ends of the ranges depend on BLOCK_K.
    assert arithmetic(problem(k=4096 + 64), splits=2) is None
    assert arithmetic(problem(k=4096 + 64), **ranges) is None
    assert len({arithmetic(eight, BLOCK_K=k) for k in (32, 64, 128)}) == 3
    assert len({arithmetic(problem(), BLOCK_K=k) for k in (32, 64, 128)}) == 1
    assert arithmetic(eight) != arithmetic(problem())
    # With scales of blocks a step is a scale's block, and the number of parts is fixed.
    scaled = problem(dtype=E4M3, out=BF16, scales=("1x128", "128x128"))
    step = {"BLOCK_K": 128}
    for fields in (*alike, *tiles):
        assert arithmetic(scaled, **step, **fields) == arithmetic(scaled, **step)
    assert arithmetic(scaled, **step) != arithmetic(eight, **step)
    two = {arithmetic(dataclasses.replace(scaled, m=m), **step, splits=2) for m in (17, 4096)}
    assert len(two) == 1
    assert two.isdisjoint({None, arithmetic(scaled, **step), arithmetic(scaled, **step, splits=3)})
    assert arithmetic(scaled, **step, tail_splits=2) is None


def test_many_rows_have_every_reduction_order_of_few_rows() -> None:
    """For few rows several blocks sum ranges of K; for many rows one block sums all ranges."""
    few, many = (
        dataclasses.replace(problem(m, 1536, 8960), batch_invariant=True) for m in (8, 8192)
    )
    assert [config for config in KERNEL.configs(few) if config.splits > 1]
    alike = {KERNEL.arithmetic(few, config) for config in KERNEL.configs(few)}
    assert alike <= {KERNEL.arithmetic(many, config) for config in KERNEL.configs(many)}
    usual = dataclasses.replace(many, batch_invariant=False)
    assert not [config for config in KERNEL.configs(usual) if config.ranges > 1]


def test_declines_an_epilogue_that_it_cannot_fuse() -> None:
    opaque = Epilogue("opaque", reference=torch.sin)
    (reason,) = KERNEL.reasons_against(dataclasses.replace(problem(), epilogue=opaque))
    assert "device function" in reason


def test_a_later_triton_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    assert not KERNEL.reasons_against(problem())


CONFIG = WarpSpecializedConfig(
    BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_stages=4,
    schedule="cooperative", consumers=2, num_warps=4, subtiles=4, tail_splits=1, splits=1,
    evict_first=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "field",
    [
        {"schedule": "turns"},
        {"schedule": "pingpong", "consumers": 3, "BLOCK_M": 64},
        {"consumers": 0},
        {"consumers": 4},
        {"consumers": 3},  # three consumers do not divide 128 rows
        {"BLOCK_M": 64},  # a consumer's wgmma has 64 rows
        {"num_warps": 2},
        {"num_warps": 8},  # eight warps for 64 rows
        {"BLOCK_N": 512},
        {"BLOCK_N": 112},
        {"BLOCK_N": 96},  # four strips of 24
        {"BLOCK_N": 96, "subtiles": 2},  # strips of 48, and a narrow product of 32
        {"BLOCK_N": 96, "subtiles": 3, "BLOCK_K": 128},
        {"BLOCK_N": 96, "subtiles": 3, "tail_splits": 2},
        {"BLOCK_K": 48},
        {"BLOCK_M": 256},  # 256 accumulators a thread
        {"num_stages": 1},
        {"num_stages": 0},
        {"GROUP_M": 0},
        {"subtiles": 3},
        {"subtiles": 32},
        {"subtiles": "4"},
        {"splits": 0},
        {"splits": 2, "tail_splits": 2},
        {"evict_first": 1},
        {"ranges": 0},
        {"ranges": 2},  # twice 128 accumulators a thread
        {"ranges": 16, "BLOCK_N": 128},
        {"ranges": 2, "BLOCK_N": 128, "splits": 2},
        {"ranges": 2, "BLOCK_N": 128, "tail_splits": 2},
        {"ranges": 2, "BLOCK_M": 192, "BLOCK_N": 160, "consumers": 3, "subtiles": 5},
        {"early": "a"},
        {"early": True},
        {"tile": 1},
    ],
    ids=str,
)
def test_a_config_out_of_bounds_does_not_parse(field: dict[str, Any]) -> None:
    assert WarpSpecializedConfig.from_json(CONFIG.to_json()) == CONFIG
    with pytest.raises(ConfigError):
        WarpSpecializedConfig.from_json({**CONFIG.to_json(), **field})


@pytest.mark.parametrize(
    "instance",
    [
        problem(dtype=E4M3, out=BF16),
        problem(127, k=4095, b=Operand(BF16, "col", aligned=False)),
    ],
    ids=str,
)
def test_which_problems_may_have_tiles_of_two_products(instance: Problem) -> None:
    """Other problems refuse a record's config with such a tile, and propose none."""
    two = dataclasses.replace(CONFIG, BLOCK_N=144, subtiles=9)
    assert two.shared_memory(problem(residual=Operand(FP32))) > 0
    with pytest.raises(ValueError, match="144 columns"):
        two.shared_memory(instance)
    assert not [config for config in KERNEL.configs(instance) if config.narrow]
    plain = [problem(384, 6144, layout=layout) for layout in ("nn", "nt", "tn", "tt")]
    # A row-major b would load gate and up in slower rows of 64 bytes, so it is not among them.
    gated = [problem(384, 6144, layout=layout, epilogue="swiglu") for layout in ("nt", "tt")]
    for served in plain + gated:
        assert [c for c in KERNEL.configs(served) if c.narrow], served


def test_what_threads_exchange_takes_shared_memory_of_its_own() -> None:
    """A bias, or the 8-bit output of a strip with groups: one after the other, in the same place.
    Compilers confirm it for some configs, in a slow test."""
    config = dataclasses.replace(CONFIG, subtiles=2, num_stages=3)
    plain = config.shared_memory(problem())
    grouped = parse("silu").then(EPILOGUES["quantize"])
    for bias, epilogue, most in (
        (BF16, parse("silu"), 2 * 128 * 2),
        (FP32, parse("silu"), 2 * 128 * 4),
        (None, grouped, 2 * 4 * 16 * 128),
        (FP32, grouped, 2 * 4 * 16 * 128),
    ):
        instance = dataclasses.replace(problem(bias=bias), epilogue=epilogue)
        assert config.shared_memory(instance) - plain == most


def test_a_residual_by_tma_needs_an_even_number_of_strips() -> None:
    fetched = problem(384, 6144, residual=Operand(BF16))
    found = [config for config in KERNEL.configs(fetched) if config.narrow]
    assert found
    assert not [config for config in found if config.subtiles % 2]
    odd = dataclasses.replace(CONFIG, BLOCK_N=144, subtiles=9)
    with pytest.raises(ValueError, match="9 strips"):
        odd.shared_memory(fetched)


PROBLEMS = [
    problem(),
    problem(8192, 8192, 8192, dtype=FP16),
    problem(8192, 4096, 512),
    problem(1024, 1024, 1024, "nn"),
    problem(512, 512, 512, "nn"),
    problem(1, 8, 8),
    problem(16, 28672, 4096),
    problem(out=FP32),
    problem(8192, 14336, 4096, epilogue="swiglu"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_search_space_fits_the_device(problem: Problem) -> None:
    configs = list(KERNEL.configs(problem))
    assert 5 <= len(configs) <= 16
    assert len(set(configs)) == len(configs)
    assert configs[0] == KERNEL.default_config(problem)
    for config in configs:
        assert config.shared_memory(problem) <= H200.shared_memory
        # One more stage would not fit, or would be more than enough.
        more = dataclasses.replace(config, num_stages=config.num_stages + 1)
        products = 2 if problem.gated else 1
        stage = (config.BLOCK_M + products * config.BLOCK_N) * config.BLOCK_K * 2
        enough = config.num_stages >= 8 and more.num_stages * stage > 192 * 1024
        assert enough or more.shared_memory(problem) > H200.shared_memory
        wide = config.narrow and config.consumers == 2
        assert products * config.accumulators <= (192 if wide else 128)


@pytest.mark.parametrize("unaligned", [False, True])
def test_consumers_share_the_registers_that_other_roles_leave(unaligned: bool) -> None:
    """setmaxnreg takes multiples of 8 from 24 to 256. A producer's warp counts as a warpgroup."""
    instances = PROBLEMS
    if unaligned:
        b = Operand(BF16, "col", aligned=False)
        instances = [dataclasses.replace(problem(64, 4096, 4100), b=b)]
    for instance in instances:
        for config in KERNEL.configs(instance):
            c = hopper_config.Constants.of(instance, config)
            workers, warps = c.worker_registers, c.worker_warps
            assert len(workers) == len(warps) == c.consumers + unaligned
            assert all(24 <= each <= 240 and each % 8 == 0 for each in workers)
            assert workers[c.consumers - 1] == 24
            whole = c.groups * (65536 // (128 * c.groups) // 8 * 8)
            used = sum(r * -(-w // 4) for r, w in zip(workers, warps, strict=True))
            each = workers[0] if c.consumers > 1 else min(240, whole - used)
            rest = whole - used - each * c.num_warps // 4  # the first consumer gets it too
            assert rest >= 0
            assert each == 240 or rest < 8 * c.consumers * c.num_warps // 4


def tiles(problem: Problem, config: WarpSpecializedConfig) -> int:
    return -(-problem.m // config.BLOCK_M) * -(-problem.n // config.BLOCK_N)


def test_k_is_split_only_where_the_partial_sums_can_be_added() -> None:
    config = dataclasses.replace(CONFIG, splits=200, tail_splits=1)
    for instance, splits in (
        (problem(64, 64, 65536), 200),
        (problem(64, 64, 640), 10),  # k-steps
        (problem(4096, 4096, 4096), 2),  # workspace
        (problem(64, 64, 65536, epilogue="swiglu"), 1),
        (problem(64, 64, 65536, batch=2), 1),
        (problem(64, 66, 65536), 1),  # rows that TMA cannot write
    ):
        assert tile_shapes.adapted(instance, config).splits == splits
        scratch = KERNEL.workspace_bytes(instance, config)
        assert scratch == (0 if splits == 1 else splits * 4 * max(instance.m, 128) * instance.n)


@pytest.mark.parametrize(("m", "rows", "tail"), [(640, 5, 118), (600, 5, 120), (100, 1, 50)])
def test_split_tiles_are_whole_columns_where_rows_of_tiles_overlap(
    m: int, rows: int, tail: int
) -> None:
    """Two blocks would add their parts to the rows that both tiles have."""
    config = dataclasses.replace(CONFIG, BLOCK_M=128, BLOCK_N=128, subtiles=1, tail_splits=2)
    instance = problem(m, 50 * 128, 2304)
    assert tile_shapes.tile_rows(instance, config) == rows
    assert tile_shapes.tail_tiles(instance, config) == tail


@pytest.mark.parametrize(
    ("m", "n", "whole", "splits"),
    [
        (512, 320, 8, 2), (512, 384, 8, 2),  # one whole wave of two columns
        (640, 192, 8, 1), (640, 256, 8, 4),  # two tiles of the last column of five are split
        (640, 448, 16, 2),
    ],
)  # fmt: skip
def test_columns_that_overlap_are_both_whole_or_both_split(
    m: int, n: int, whole: int, splits: int
) -> None:
    """On eight SMs. Otherwise an element would depend on which tile stores last."""
    config = dataclasses.replace(CONFIG, BLOCK_M=128, BLOCK_N=128, subtiles=1, GROUP_M=8)
    instance = problem(m, n, 8192)
    instance = dataclasses.replace(
        instance, device=dataclasses.replace(instance.device, sm_count=8)
    )
    count = tile_shapes.tile_count(instance, config)
    assert count - tile_shapes.tail_tiles(instance, config) == whole
    assert tile_shapes.room_for_splits(instance, config) == splits


def test_the_default_config_suits_the_shape() -> None:
    # For short K the epilogue must overlap the product: measured 1.13 instead of 1.02 of cuBLAS.
    assert KERNEL.default_config(problem(8192, 4096, 512)).schedule == "pingpong"
    # 324 tiles of 128×128 are two waves and 60 more tiles, which are cut into 120 halves. Measured:
    # 39 µs, uncut 41.
    config = KERNEL.default_config(problem(2304, 2304, 2304))
    assert (config.BLOCK_M, config.BLOCK_N, config.tail_splits) == (128, 128, 2)
    assert KERNEL.default_config(problem(2304, 2304, 2304, batch_invariant=True)).tail_splits == 1
    # Below one wave, tiles that leave few SMs idle.
    for size in (768, 1024):
        instance = problem(size, size, size, "nn")
        assert tiles(instance, KERNEL.default_config(instance)) > 66
    large = KERNEL.estimate_us(problem(8192, 8192, 8192), CONFIG)
    assert 1300 < large < 1700  # cuBLAS: 1567
    assert KERNEL.estimate_us(problem(1, 8, 8), CONFIG) < 10


# The kernel's source, on a model of the block.


def computed(
    seed: int,
    *,
    m: int = 9,
    n: int = 10,
    k: int = 7,
    consumers: int = 2,
    pingpong: bool = False,
    stages: int = 3,
    subtiles: int = 2,
    programs: int = 3,
    layout: str = "nn",
    gated: bool = False,
    extras: bool = False,
    fetch: bool = False,
    pointers: bool = False,
    scales: str | None = None,
    blocks_of: tuple[int, int, int] | None = None,
    batch: str = "",
    columns: int = 4,
    splits: int = 1,
    parts: int = 1,
    ranges: int = 1,
    brought: int = 2,
    words: str | None = None,
    early: str | None = None,
    reduce: str | None = None,
    grouped: tuple[str, ...] = (),
    module: types.ModuleType | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of all blocks and the expected output. A tile has 2 rows for each consumer
    and ``columns`` columns; a step has 2 values along K.

    Args:
        seed: Seed of the numbers and of the interleaving.
        extras: There are alpha, a bias and a residual.
        fetch: TMA loads the residual.
        pointers: The result is stored by pointers.
        scales: Operands have 8 bits, with scales of this kind.
        blocks_of: Operands have 8 bits, with scales for blocks: values along K of ``a``, rows of
            the weight, values along K of the weight. 0: that operand has scales by row.
        batch: If not empty, three products, which share the operands of these letters (a, b, r).
        splits: Parts along K of the last wave's tiles.
        parts: Parts along K of every tile, which are added up here.
        ranges: Ranges of K that a block sums one after the other.
        words: The operand that is loaded word by word.
        early: As in a config. By default the blocks of two seeds in three begin before the previous
            launch has ended.
        reduce: How the absolute values of each row are reduced to an auxiliary output.
        grouped: The kinds of auxiliary outputs with groups of a strip's columns.
    """
    rows, depth = 2, 2
    if early is None:
        early = "wait" if seed % 3 < 2 and words != "b" else ""
    constants = Constants(
        BLOCK_M=rows if pingpong else rows * consumers, BLOCK_N=columns, BLOCK_K=depth, GROUP_M=1,
        num_stages=stages, schedule="pingpong" if pingpong else "cooperative", consumers=consumers,
        num_warps=4, subtiles=subtiles, tail_splits=splits, splits=parts, ranges=ranges,
        evict_first=False, early=early, A_COL=layout[0] == "t", B_COL=layout[1] == "t",
        GATED=gated, SCALED=extras, BIAS=extras, RESIDUAL=extras, POINTERS=pointers,
        A_SCALE=scales, B_SCALE=scales, IN_BYTES=1 if scales else 2, BATCHED=bool(batch),
        FETCH=fetch, OUT_BYTES=2, A_ROWS=brought, PRIMED=1 + seed % stages, WORDS=words,
        REDUCE=reduce, GROUP=columns // subtiles if grouped else 0,
        **dict(zip(("PORT", "PORT_2"), grouped, strict=False)),
    )  # fmt: skip
    if blocks_of is not None:
        of_a, outer, of_b = blocks_of
        constants = dataclasses.replace(
            constants, IN_BYTES=1, A_GROUP=of_a, B_GROUP=of_b, B_OUTER=outer,
            A_SCALE=None if of_a else "row", B_SCALE=None if of_b else "row",
        )  # fmt: skip
        alike = bool(of_b) and math.gcd(outer, n if gated else 0) % constants.columns == 0
        constants = dataclasses.replace(constants, ALIKE=alike)
    random = np.random.default_rng(seed)
    width = 2 * n if gated else n
    count = 3 if batch else 1
    of = {letter: 1 if letter in batch else count for letter in "abr"}
    a, b = random.standard_normal((of["a"], m, k)), random.standard_normal((of["b"], k, width))
    bias = random.standard_normal(width)
    # Gaps between matrices, as between rows of `out`: no stride is a product of sizes.
    residuals = random.standard_normal((of["r"], m + 1, n + 2))
    residual = residuals[:, :m, :n]
    rows_of, columns_of = (m, width) if scales == "row" else (1, 1)
    scale_a = random.standard_normal((count if scales == "row" else 1, rows_of, 1))
    scale_b = random.standard_normal((count if scales == "row" else 1, 1, columns_of))
    step_a, step_b, strides_of = np.ones((1, m, k)), np.ones((1, k, width)), {}
    if blocks_of is not None:
        of_a, outer, of_b = blocks_of
        scale_a = random.standard_normal((count, m, -(-k // of_a) if of_a else 1))
        scale_b = random.standard_normal((count, -(-k // of_b) if of_b else 1, -(-width // outer)))
        step_a = scale_a.repeat(of_a or k, -1)[..., :k]
        step_b = scale_b.repeat(of_b or k, 1).repeat(outer, 2)[:, :k, :width]
        for letter, grid, names in (("a", scale_a, "zmk"), ("b", scale_b, "zkn")):
            steps = (stride // grid.itemsize for stride in grid.strides)
            strides_of |= {f"stride_{letter}s{d}": s for d, s in zip(names, steps, strict=True)}
    # Gaps between rows show stores beyond the end of a row.
    padded = -(-m // constants.BLOCK_M) * constants.BLOCK_M
    stored = m if parts == 1 else parts * padded
    memory = np.full((3 if batch else 1, stored + 2, n + 3), np.nan)
    out = memory[:, :stored, :n]

    def descriptor(
        matrices: np.ndarray, box: list[int], letter: str = "n", itemsize: int = 2
    ) -> Descriptor:
        if letter == "t":
            matrices, box = matrices.swapaxes(-1, -2), box[::-1]
        if batch:
            return Descriptor(matrices, [1, *box], itemsize)
        return Descriptor(matrices[0], box, itemsize)

    def epilogue(gate: np.ndarray, *up: np.ndarray) -> np.ndarray:
        if parts > 1:
            return gate
        y = np.tanh(gate) * up[0] if up else np.tanh(gate)
        # Columns beyond the last are not zero in groups of columns.
        return y + 1.0 if grouped else y

    strip = [rows, columns // subtiles]
    strides = {letter: 0 if of[letter] == 1 else (m + 1) * (n + 2) for letter in "abr"}
    arguments: dict[str, Any] = dict.fromkeys(warp_specialized_kernel.arg_names)
    arguments |= {
        "a_desc": descriptor(a, [brought, depth], layout[0], constants.IN_BYTES),
        "b_desc": descriptor(b, [depth, constants.box_columns], layout[1], constants.IN_BYTES),
        "M": m, "N": n, "K": k, "GROUP_M": 2, "EPILOGUE": epilogue, "C": constants,
    }  # fmt: skip
    if words:
        matrix, letter = (a[0], layout[0]) if words == "a" else (b[0], layout[1])
        del arguments[f"{words}_desc"]
        arguments = dict.fromkeys(warp_specialized_kernel.arg_names) | arguments
        arguments |= {"words_ptr": Rows(matrix.T if letter == "t" else matrix)}
    if batch:
        arguments |= {"BATCH": 3, "a_stride_z": strides["a"], "b_stride_z": strides["b"]}
        arguments |= {"residual_stride_z": strides["r"], "out_stride_z": memory[0].size}
    if pointers:
        arguments |= {"out_ptr": Pointer(memory.ravel()), "out_stride": n + 3}
    else:
        arguments |= {"c_desc": descriptor(out, strip)}
    if extras:
        arguments |= {"bias_ptr": Pointer(bias), "bias_stride": 1, "alpha": 0.5}
    if scales or blocks_of:
        arguments |= {"a_scale_ptr": Pointer(scale_a.ravel())}
        arguments |= {"b_scale_ptr": Pointer(scale_b.ravel())} | strides_of
    if fetch:
        arguments |= {"r_desc": descriptor(residual, strip)}
    elif extras:
        arguments |= {"residual_ptr": Pointer(residuals.ravel())}
        arguments |= {"residual_stride_m": n + 2, "residual_stride_n": 1}
    strips = -(-n // columns) * subtiles
    left = np.full(5 + strips * m, np.nan)
    if reduce:
        arguments |= {"port_ptr": Pointer(left), "port_at": 5, "port_stride": m, "OF": np.abs}
    group = columns // subtiles
    groups = -(-n // group)
    ports = {kind: np.full((m, n) if kind == "tile" else (groups, m), np.nan) for kind in grouped}
    for name, function, kind in zip(
        ("port_ptr", "port_2_ptr"), ("OF", "OF_2"), grouped, strict=False
    ):
        arguments |= {name: Pointer(ports[kind].ravel()), function: OF_GROUPS[kind]}
    tiles = len(out) * parts * -(-m // constants.BLOCK_M) * -(-n // columns)
    blocks = programs if splits > 1 else min(programs, tiles)
    flags = np.zeros(blocks * constants.a_boxes)
    if splits > 1:
        size = constants.BLOCK_M * constants.b_boxes * constants.columns
        arguments |= {"parts_ptr": Pointer(np.full(blocks * size, np.nan))}
        arguments |= {"flags_ptr": Pointer(flags), "TAIL": tiles % blocks}
        assert tiles % blocks * splits <= blocks
    for program in range(blocks):
        run_block(
            list(arguments.values()), program, blocks, seed, overlaps=constants.overlaps,
            at_rest=[arguments["b_desc"]] if early == "b" else [], module=module,
        )  # fmt: skip
    assert np.isnan(memory[:, :, n:]).all(), "stored past the end of a row"
    assert np.isnan(memory[:, stored:]).all(), "stored past the last row"
    assert not flags.any(), "the next launch would not wait"
    z = (a * step_a) @ (b * step_b) * (scale_a * scale_b if scales else 1.0)
    z = 0.5 * z + bias if extras else z
    expected = epilogue(z[..., :n], z[..., n:]) if gated else epilogue(z)
    expected = expected + residual if extras else expected
    if reduce:
        combined = getattr(np, reduce)
        found = combined(left[5:].reshape(strips, m), 0)
        np.testing.assert_allclose(found, combined(np.abs(expected[0]), 1), err_msg=reduce)
        assert np.isnan(left[:5]).all()
    if grouped:
        filled = np.zeros((m, groups * group))
        filled[:, :n] = expected[0]
        for kind, found in ports.items():
            right = OF_GROUPS[kind](filled.reshape(m, groups, group))
            right = right.reshape(m, -1)[:, :n] if kind == "tile" else right.T
            np.testing.assert_allclose(found, right, err_msg=kind)
    if parts > 1:
        out = out.reshape(1, parts, padded, n)[:, :, :m].sum(1)
    return out, np.broadcast_to(expected, out.shape)


#: The functions of outputs with groups of columns, by kind.
OF_GROUPS: dict[str, Any] = {
    "tile": lambda groups: groups - 2 * np.abs(groups).max(-1)[..., None],
    "group": lambda groups: np.abs(groups).max(-1),
}
SCHEDULES = [(1, False), (2, False), (3, False), (2, True)]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=10)
def test_every_interleaving_multiplies(consumers: int, pingpong: bool, stages: int) -> None:
    # One k-step; fewer steps than stages, as many, and more; a K tail; one to three tiles a block,
    # and blocks with one tile less than others.
    for seed, k in enumerate([1, 2, 3, 4, 6, 7, 8, 11, 16, 17]):
        for m, n, programs in [(1, 1, 1), (9, 10, 3), (13, 8, 4), (4, 4, 5)]:
            out, expected = computed(
                seed, m=m, n=n, k=k, programs=programs,
                consumers=consumers, pingpong=pingpong, stages=stages,
            )  # fmt: skip
            np.testing.assert_allclose(out, expected, err_msg=f"{m}×{n}×{k} on {programs}")


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"pointers": True}], ids=str)
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_layouts_and_epilogues(
    consumers: int, pingpong: bool, ways: dict[str, bool], gated: bool, layout: str
) -> None:
    for seed, subtiles in enumerate([1, 2, 4]):
        out, expected = computed(
            seed, consumers=consumers, pingpong=pingpong, layout=layout, gated=gated,
            extras=True, subtiles=subtiles, **ways,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("blocks_of", [(2, 8, 2), (2, 1, 2), (4, 8, 2), (0, 8, 4), (2, 1, 0)])
@pytest.mark.parametrize(
    "ways",
    [
        {}, {"pointers": True}, {"fetch": True, "gated": True}, {"batch": " "}, {"batch": "b"},
        {"gated": True, "n": 12}, {"gated": True, "n": 8, "pointers": True}, {"brought": 1, "m": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_scales_of_blocks(
    consumers: int, pingpong: bool, ways: dict[str, Any], blocks_of: tuple[int, int, int]
) -> None:
    """Any number of columns may share a scale, and a block may begin at any step."""
    for seed, k in enumerate([1, 2, 3, 8, 11]):
        out, expected = computed(
            seed, k=k, consumers=consumers, pingpong=pingpong, layout="nt", extras=True,
            blocks_of=blocks_of, **ways,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected, err_msg=f"K {k}")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("blocks_of", [(2, 4, 2), (4, 1, 2), (0, 8, 2)])
@pytest.mark.parametrize(("splits", "parts"), [(2, 1), (1, 3)])
@pytest.mark.slow(quick=6)
def test_scales_of_blocks_and_parts_of_k(
    splits: int, parts: int, blocks_of: tuple[int, int, int], gated: bool
) -> None:
    if parts > 1 and (gated or not blocks_of[0]):
        pytest.skip(
            "the other kernel applies scales of rows, and there are no parts of gate and up"
        )
    for seed, k in enumerate([6, 11, 16]):
        sizes = {"m": 8, "n": 8} if splits > 1 else {}
        out, expected = computed(
            seed, k=k, layout="nt", blocks_of=blocks_of, splits=splits, parts=parts, gated=gated,
            **sizes,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected, err_msg=f"K {k}")


@pytest.mark.parametrize("batch", [" ", "a", "b", "r", "abr"])
@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"pointers": True}], ids=str)
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_batches(consumers: int, pingpong: bool, ways: dict[str, bool], batch: str) -> None:
    for seed, (layout, gated, k) in enumerate([("nn", False, 7), ("tt", True, 2)]):
        out, expected = computed(
            seed, k=k, consumers=consumers, pingpong=pingpong, layout=layout, gated=gated,
            extras=True, batch=batch, **ways,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("subtiles", [1, 2, 4])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=6)
def test_a_residual_by_tma_is_added_to_its_strip(
    consumers: int, pingpong: bool, subtiles: int
) -> None:
    # The last consumers of some tiles have no rows, and a block has one to several tiles.
    for seed, (m, n, k, programs) in enumerate(
        [(1, 4, 1, 1), (9, 10, 7, 1), (13, 8, 2, 4), (5, 16, 9, 2), (7, 12, 3, 3)]
    ):
        out, expected = computed(
            seed, m=m, n=n, k=k, programs=programs, consumers=consumers, pingpong=pingpong,
            subtiles=subtiles, extras=True, fetch=True,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("grouped", [("tile", "group"), ("group", "tile"), ("group",)])
@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"gated": True}], ids=str)
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_outputs_with_groups_of_columns(
    consumers: int, pingpong: bool, ways: dict[str, bool], grouped: tuple[str, ...]
) -> None:
    """The last tiles of rows and columns may be partial."""
    sizes = [(1, 2, 1), (9, 10, 7), (13, 8, 2), (4, 14, 9)]
    for seed, ((m, n, k), subtiles) in enumerate(itertools.product(sizes, (1, 2))):
        out, expected = computed(
            seed, m=m, n=n, k=k, consumers=consumers, pingpong=pingpong, subtiles=subtiles,
            extras=True, grouped=grouped, **ways,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected, err_msg=f"{m}×{n}×{k}")
    # A tile whose columns are no multiple of 16 would be moved to begin at one.
    out, expected = computed(
        0, n=48, columns=32, subtiles=1, consumers=consumers, pingpong=pingpong, extras=True,
        grouped=grouped, **ways,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_sums_of_8_bits_are_promoted(
    consumers: int, pingpong: bool, gated: bool, scales: str
) -> None:
    for seed, (k, extras, stages) in enumerate(itertools.product((1, 4, 7), (False, True), (2, 3))):
        out, expected = computed(
            seed, k=k, stages=stages, consumers=consumers, pingpong=pingpong,
            layout="nt", gated=gated, extras=extras, scales=scales, batch="a" * (k == 4),
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=6)
def test_halves_of_a_wide_tile_are_summed_one_after_the_other(
    consumers: int, pingpong: bool, extras: bool
) -> None:
    for seed, (n, stages) in enumerate([(256, 2), (300, 3), (520, 2), (100, 3)]):
        out, expected = computed(
            seed, n=n, stages=stages, consumers=consumers, pingpong=pingpong, columns=256,
            subtiles=4, layout="nt", extras=extras, scales="row",
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize(("columns", "strip"), [(6, 2), (6, 1), (9, 1), (12, 4), (12, 2), (10, 2)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=6)
def test_a_tile_of_two_products(
    consumers: int, pingpong: bool, gated: bool, columns: int, strip: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The first product of a gated tile has the gate's columns and some of the up projection's."""
    # Without larger views only an edit of the PTX says where the first product's boxes are.
    monkeypatch.setattr(releases, "views_end_with_boxes", lambda: False)
    for seed, (layout, n, k, parts) in enumerate(
        [
            ("nt", 24, 7, 1), ("tt", 13, 8, 1), ("nn", 36, 1, 1), ("nt", 30, 7, 2), ("tn", 3, 5, 1),
            ("nn", 26, 9, 1), ("nt", 17, 6, 1),
        ]
    ):  # fmt: skip
        if gated:
            if parts > 1:
                continue
            n += n % 2  # the up projection begins at 16 bytes too
        strips = columns // strip
        fetched = seed > 4 and strips % 2 == 0
        out, expected = computed(
            seed, n=n, k=k, layout=layout, consumers=consumers, pingpong=pingpong, parts=parts,
            columns=columns, subtiles=strips, gated=gated,
            extras=parts == 1, fetch=fetched, pointers=seed == 1, batch="a" * (seed == 2),
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("columns", [4, 6])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow
def test_ranges_are_summed_as_parts(consumers: int, pingpong: bool, columns: int) -> None:
    """A block that sums ranges of K one after the other gives the bits of several blocks that sum
    one range each. Ranges may differ in length, or be a single step."""
    for seed, (k, ranges, stages, programs) in enumerate(
        [(8, 2, 2, 3), (24, 2, 4, 1), (16, 4, 3, 2), (17, 2, 3, 3), (8, 4, 2, 5)]
    ):
        alike: dict[str, Any] = {
            "m": 13, "n": 22, "k": k, "stages": stages, "consumers": consumers, "layout": "nt",
            "pingpong": pingpong, "columns": columns,
            "subtiles": columns // 2,
        }  # fmt: skip
        out, expected = computed(seed, **alike, programs=programs, ranges=ranges)
        np.testing.assert_allclose(out, expected)
        parts, _ = computed(seed, **alike, programs=programs, parts=ranges)
        if k % (2 * ranges) == 0:
            np.testing.assert_array_equal(out, np.tanh(parts))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("consumers", "pingpong"), [(1, False), (2, False), (2, True)])
@pytest.mark.slow(quick=6)
def test_an_operand_comes_word_by_word(consumers: int, pingpong: bool, layout: str) -> None:
    # One to many k-steps, fewer and more than stages; several tiles a block, some of them cut.
    for seed, (k, stages, programs) in enumerate([(1, 2, 1), (2, 3, 3), (7, 2, 1), (11, 4, 2)]):
        # A tile has one box of a if consumers alternate.
        for words in "ab" if pingpong or consumers == 1 else "b":
            out, expected = computed(
                seed, m=5, k=k, stages=stages, programs=programs, consumers=consumers,
                pingpong=pingpong, layout=layout, words=words,
            )  # fmt: skip
            np.testing.assert_allclose(out, expected)
    out, expected = computed(
        0, m=2 if pingpong else 2 * consumers, n=28, k=17, programs=5, splits=2,
        consumers=consumers, pingpong=pingpong, layout=layout, words="b",
    )  # fmt: skip
    np.testing.assert_allclose(out, expected)


def test_tritons_cache_key_changes_with_the_code_of_properties() -> None:
    constants = KERNEL.specialize(problem(), CONFIG).constants["C"]
    assert repr(constants) != repr(dataclasses.replace(constants, SOURCE="another"))
    folder = Path(hopper_config.__file__).parent
    files = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    assert hashlib.sha256(files).hexdigest()[:12] == constants.SOURCE


def test_an_operand_loaded_by_words_has_one_box() -> None:
    with pytest.raises(ValueError, match="loaded by words"):
        computed(0, consumers=2, words="a")
    with pytest.raises(ValueError, match="loaded by words"):
        computed(0, consumers=3, words="b")


@pytest.mark.parametrize("batch", ["", "b"])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
def test_boxes_of_few_rows(consumers: int, pingpong: bool, batch: str) -> None:
    for seed in range(3):
        out, expected = computed(
            seed, m=1, brought=1, batch=batch, consumers=consumers, pingpong=pingpong
        )
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
def test_tiles_cut_along_k(consumers: int, pingpong: bool) -> None:
    # Only cut tiles; whole tiles after them; and blocks that have whole tiles only.
    rows = 2 if pingpong else 2 * consumers
    for seed, (tiles, programs, splits, k) in enumerate(
        [(1, 2, 2, 4), (1, 4, 4, 30), (2, 5, 2, 9), (6, 5, 5, 11), (7, 5, 2, 17), (12, 5, 2, 8)]
    ):
        out, expected = computed(
            seed, m=rows - 1, n=4 * tiles, k=k, programs=programs, stages=2 + seed % 3,
            consumers=consumers, pingpong=pingpong, splits=splits,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected, err_msg=f"{tiles} on {programs}")


@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow
def test_every_tile_cut_along_k(consumers: int, pingpong: bool) -> None:
    # Parts of equal numbers of k-steps, and of one more; a K tail; fewer blocks than parts.
    for seed, (k, parts) in enumerate([(7, 2), (7, 4), (8, 3), (17, 5)]):
        for m, n, programs in [(1, 4, 3), (9, 8, 4), (13, 12, 90)]:
            for layout in ("nn", "tt"):
                out, expected = computed(
                    seed, m=m, n=n, k=k, consumers=consumers, pingpong=pingpong, layout=layout,
                    programs=programs, parts=parts,
                )  # fmt: skip
                np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"pointers": True}], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_tiles_cut_along_k_with_fused_work(
    consumers: int, pingpong: bool, gated: bool, ways: dict[str, bool]
) -> None:
    for seed, (subtiles, batch, scales) in enumerate(
        [(1, "", None), (4, "", None), (4, "a", None), (2, "", "row")]
    ):
        tiles = -(-5 // (2 if pingpong else 2 * consumers)) * 3 * (3 if batch else 1)
        programs = next(p for p in range(4, 99) if 0 < tiles % p <= p // 2)
        out, expected = computed(
            seed, m=5, n=10, k=23, programs=programs, splits=2, layout="nt",
            consumers=consumers, pingpong=pingpong, gated=gated, extras=True,
            subtiles=subtiles, batch=batch, scales=scales, **ways,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("ways", [{}, {"fetch": True}, {"pointers": True}], ids=str)
@pytest.mark.parametrize(("consumers", "pingpong"), SCHEDULES)
@pytest.mark.slow(quick=8)
def test_rows_are_reduced_to_an_auxiliary_output(
    consumers: int, pingpong: bool, ways: dict[str, bool], reduce: str
) -> None:
    """Each element counts once, also in tiles that are moved inside and in tiles cut along K."""
    for seed, (m, n) in enumerate([(9, 10), (1, 3), (13, 8)]):
        for more in ({}, {"gated": True}, {"splits": 2, "programs": 4, "k": 9}):
            tall = 2 if pingpong else 2 * consumers
            if "splits" in more and -(-m // tall) * -(-n // 4) % 4 > 2:
                continue  # too few blocks for both halves of the last wave's tiles
            out, expected = computed(
                seed, m=m, n=n, consumers=consumers, pingpong=pingpong, extras=True,
                reduce=reduce, layout="nt", **{**ways, **more},
            )  # fmt: skip
            np.testing.assert_allclose(out, expected)


def test_parts_of_a_tile_do_not_overlap() -> None:
    """The order of a part in the workspace uses each place once, for any tile."""
    shapes = [(64, 128, 4), (128, 128, 4), (128, 256, 8), (64, 32, 4), (256, 64, 4)]
    for rows, columns, warps in shapes:
        C = types.SimpleNamespace(
            pingpong=False, rows=rows, columns=columns, num_warps=warps, a_boxes=2, b_boxes=1
        )
        places = workspace_order(3, 0, WHO=1, C=C)
        start = (3 * 2 + 1) * rows * columns
        assert sorted(places.ravel()) == list(range(start, start + rows * columns))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("            mbarrier.wait(turn.index(WHO), turn_phase)\n", ""),
        ("mbarrier.wait(empty.index(stage), phase ^ 1)\n        ready", "pass\n        ready"),
        ("mbarrier.wait(empty.index(stage), phase ^ 1)\n    reinterpret", "reinterpret"),
        ("count=C.arrivals", "count=1"),
        ("        first += gl.where(unit == 0, primed, 0)\n", ""),
        ("acc = warpgroup_mma_wait(1, deps=(acc,))", "acc = warpgroup_mma_wait(2, deps=(acc,))"),
        ("count=C.a_boxes", "count=1"),
        ("else BUFFERS - 1)", "else BUFFERS)"),
        ("\n    store_wait(0)\n", "\n"),
        ("                store_wait(0)\n                for", "                for"),
        ("                    store_wait(0)\n", ""),
        ("mbarrier.wait(loaded.index(slot), phase ^ (i // BUFFERS & 1))", "pass"),
        ("strip_phase ^= 1", "pass"),
        ("position // C.num_stages & 1", "0"),
    ],
)
@pytest.mark.slow(quick=10)
def test_the_model_detects_a_missing_wait(line: str, instead: str, tmp_path: Path) -> None:
    """Each barrier of the kernel is needed: without it, some interleaving gives wrong results."""
    module = changed(line, instead, tmp_path)
    wrong = 0
    for seed, k, (consumers, pingpong) in itertools.product(range(6), (1, 5, 8), SCHEDULES):
        fetch = seed % 2 == 1
        words = "b" if seed > 3 and consumers < 3 else None
        try:
            out, expected = computed(
                seed, k=k, stages=2, consumers=consumers, pingpong=pingpong, module=module,
                extras=fetch, fetch=fetch, subtiles=4 if seed % 4 == 1 else 2, words=words,
            )  # fmt: skip
        except (DeadlockError, AssertionError):
            wrong += 1
        else:
            wrong += not np.allclose(out, expected)
    assert wrong > 0


# The compiled kernel.


def compiled(problems: Sequence[Problem], which: str) -> list[dict[str, Any]]:
    """Compile configs of each problem (``configs_of``), in a process that does not interpret."""
    found = []
    for problem, config in [(p, c) for p in problems for c in configs_of(p, which)]:
        special = KERNEL.specialize(problem, config)
        result = compile_for(
            GPUTarget("cuda", 90, 32),
            source(
                warp_specialized_kernel,
                special.types,
                special.constants,
                special.divisible,
            ),
            **special.options,
        )
        ptx = result.asm["ptx"]
        found.append({
            "problem": str(problem),
            "config": str(config),
            "shared": result.metadata.shared,
            "promised": config.shared_memory(problem),
            "wgmma": ptx.count("wgmma.mma_async"),
            "tma": len(re.findall(r"cp.async.bulk.tensor.[23]d.shared", ptx)),
            "setmaxnreg": ptx.count("setmaxnreg"),
            "stack": usage(result.asm["cubin"])["STACK"],
        })  # fmt: skip
    return found


# A compilation takes 1 s, so tiles × layouts × dtypes × fused work are covered in pairs.
# - Each tile of one product is compiled plainly. Large tiles are compiled once more in the form
#   that spills first: storing fp32 by pointers.
# - Three problems divide the tiles of two products.
# - Each layout, dtype and fused work is compiled with two pairs of schedule and consumers.
# - Loads by words, 8-bit floats and stores by pointers: pairs of sizes, schedules and consumers.
# - Cut and split tiles are compiled for one problem: the code after the main loop does not depend
#   on the operands.
def configs_of(problem: Problem, which: str) -> list[WarpSpecializedConfig]:
    """Choose configs of a problem, where a kind is a schedule with a number of consumers.

    ``"all"``: every tile of one product, and for each kind one config that cuts its tail and one
    that splits K. ``"pairs"``: pairs of these fields. ``"tiles"``: large tiles, which may not fit
    the registers. ``"narrow 0"`` to ``"narrow 2"``: a third of the tiles of two products.
    ``"largest"``: the largest tile of each kind. ``"some"``: the best estimate of each kind,
    ``"some 0"`` and ``"some 1"`` half of them. ``"first"``: the best estimate.
    """
    which, _, place = which.partition(" ")
    tiles = search_space._tiles(problem)
    fitted = [c for t in tiles for c in search_space._fitted(problem, t)]
    if which == "first":
        return [KERNEL.default_config(problem)]
    if which == "tiles":
        large = [config for config in fitted if config.BLOCK_M * config.BLOCK_N >= 128 * 128]
        return covering(large, _structure)
    if which == "narrow":
        return share([config for config in fitted if config.narrow], int(place), 3)
    if which == "largest":
        return _of_each(sorted(fitted, key=lambda c: (c.BLOCK_M * c.BLOCK_N, c.BLOCK_N)))
    if which in ("all", "pairs"):
        whole = [c for c in fitted if c.consumers < 3 and not c.narrow]
        cut = [dataclasses.replace(c, tail_splits=2) for c in whole]
        part = unfinished(problem)
        sums = [c for t in search_space._tiles(part) for c in search_space._fitted(part, t)]
        more = _of_each(cut) + _of_each([dataclasses.replace(c, splits=2) for c in sums])
        if which == "pairs":
            return covering(fitted + more, _structure)
        return [c for c in fitted if every_case() or not c.narrow] + more
    of_each = _of_each(reversed(list(KERNEL.configs(problem))))
    return share(of_each, int(place), 2) if place else of_each


def _of_each(configs: Iterable[WarpSpecializedConfig]) -> list[WarpSpecializedConfig]:
    return list({(c.schedule, c.consumers): c for c in configs}.values())


def _structure(config: WarpSpecializedConfig) -> dict[str, Any]:
    """The fields that determine the program's structure and the registers of a thread."""
    names = "BLOCK_M", "BLOCK_N", "schedule", "consumers", "tail_splits", "splits"
    return {name: getattr(config, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance", "which"),
    [
        (problem(layout="nn"), "all"),
        (problem(layout="nt", dtype=FP16), "some 0"),
        (problem(layout="tn"), "some 1"),
        (problem(layout="tt"), "some 0"),
        (problem(300, 6144, batch=4, epilogue="silu", bias=BF16), "narrow 0"),
        (problem(300, 6144, layout="nt", residual=Operand(BF16)), "narrow 1"),
        (problem(dtype=E4M3, out=BF16, scales=("row", "row")), "pairs"),
        (problem(dtype=E4M3, out=BF16, scales=("1x128", "128x128")), "pairs"),
        (problem(dtype=E4M3, out=BF16, scales=("1x128", "1x128")), "largest"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_config_compiles_for_hopper(
    instance: Problem, which: str, uninterpreted: Uninterpreted
) -> None:
    for result in uninterpreted(compiled, [instance], which):
        assert result["shared"] <= result["promised"] <= H200.shared_memory, result
        assert result["promised"] - result["shared"] < 1024, result
        assert result["wgmma"] > 0, result
        assert result["tma"] > 0, result
        assert result["setmaxnreg"] > 0, result
        assert result["stack"] == 0, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layout", "which", "stack"),
    [(BF16, "nn", "largest", 0), (FP32, "nn", "tiles", 8), (FP32, "nt", "narrow 2", 0)],
    ids=str,
)
def test_storing_by_pointers_takes_no_more_resources(
    dtype: torch.dtype, layout: str, which: str, stack: int, uninterpreted: Uninterpreted
) -> None:
    """Neither shared memory nor registers; one config that stores fp32 spills two registers."""
    instance = problem(4097, 4097, 4097, layout, out=Operand(dtype, aligned=False))
    for result in uninterpreted(compiled, [instance], which):
        assert result["shared"] <= result["promised"] <= H200.shared_memory, result
        assert result["wgmma"] > 0, result
        assert result["stack"] <= stack, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance", "which"),
    [
        (
            problem(
                127, 4093, b=Operand(BF16, "row", aligned=False), out=Operand(BF16, aligned=False)
            ),
            "pairs",
        ),
        (problem(127, k=4095, b=Operand(BF16, "col", aligned=False)), "largest"),
        (problem(4093, 64, 4095, "nn", a=Operand(BF16, aligned=False)), "largest"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_loading_by_words_compiles_for_hopper(
    instance: Problem, which: str, uninterpreted: Uninterpreted
) -> None:
    results = uninterpreted(compiled, [instance], which)
    assert len(results) > 1
    for result in results:
        assert result["shared"] <= result["promised"] <= H200.shared_memory, result
        assert result["wgmma"] > 0, result
        # In one config four registers for the code after the main loop are spilled.
        assert result["stack"] <= 16, result


FUSED = [
    problem(layout="tn", out=FP32),
    problem(8192, 4096, 512, epilogue="gelu_tanh", bias=BF16, residual=Operand(BF16)),
    problem(epilogue="swiglu", bias=FP32, scaled=True),
    problem(batch=8, layout="nn", epilogue="silu", bias=BF16, residual=Operand(BF16)),
    problem(
        dtype=E4M3, b=Operand(E5M2, "col"), out=BF16, epilogue="silu", bias=FP32,
        residual=Operand(BF16), scales=("row", "row"), scaled=True,
    ),
    problem(dtype=E4M3, out=BF16, epilogue="swiglu", scales=("row", "row")),
    problem(dtype=E4M3, out=BF16, epilogue="swiglu", scales=("1x128", "128x128")),
    problem(
        dtype=E4M3, out=BF16, epilogue="silu", bias=FP32, residual=Operand(BF16),
        scales=("1x128", "128x128"), scaled=True,
    ),
    problem(residual=Operand(BF16, "strided", aligned=False)),
    problem(4097, 4097, 4097, epilogue="silu", bias=BF16, out=Operand(BF16, aligned=False)),
    with_amax(problem(epilogue="silu", residual=Operand(BF16))),
    dataclasses.replace(
        problem(residual=Operand(BF16)), epilogue=parse("silu").then(EPILOGUES["quantize"])
    ),
]  # fmt: skip


@pytest.mark.parametrize("problem", FUSED, ids=str)
@pytest.mark.slow(quick=6)
def test_fused_work_compiles_for_hopper(problem: Problem, uninterpreted: Uninterpreted) -> None:
    for result in uninterpreted(compiled, [problem], f"some {FUSED.index(problem) % 2}"):
        assert result["shared"] <= result["promised"] <= H200.shared_memory, result
        assert result["wgmma"] > 0, result
        # Some registers of the epilogue may spill; accumulators would take 512 bytes.
        assert result["stack"] <= 256, result


# The code on the host.


def tensor_map(operand: Operand, rows: int, columns: int, kind: str) -> Any:
    """The function that makes the tensor map of a tile of an operand."""
    return described("a", operand, rows, columns, kind, TensorDescriptor)[1].describe


def test_operands_are_described_along_their_contiguous_dimension() -> None:
    a = torch.zeros(48, 40, dtype=BF16)[:, :32]
    described = tensor_map(Operand.of(a), 64, 32, "matrix")(a)
    assert (described.shape, described.strides) == ([48, 32], [40, 1])
    assert described.block_shape == [64, 32]
    described = tensor_map(Operand.of(a.t()), 32, 64, "matrix")(a.t())
    assert (described.shape, described.strides) == ([48, 32], [40, 1])
    assert described.block_shape == [64, 32]
    # The leading stride of a single row has no meaning, and may be one that TMA cannot use.
    row = torch.zeros(1, 9, dtype=BF16)[:, :8].as_strided((1, 8), (3, 1))
    described = tensor_map(Operand.of(row), 64, 32, "matrix")(row)
    assert (described.shape, described.strides) == ([1, 8], [8, 1])


def test_a_batch_is_described_matrix_by_matrix() -> None:
    batch = torch.zeros(3, 48, 40, dtype=BF16)[:, :, :32]
    described = tensor_map(Operand.of(batch), 64, 32, "stack")(batch)
    assert (described.shape, described.strides) == ([3, 48, 32], [48 * 40, 40, 1])
    assert described.block_shape == [1, 64, 32]
    described = tensor_map(Operand.of(batch.mT), 32, 64, "stack")(batch.mT)
    assert (described.shape, described.strides) == ([3, 48, 32], [48 * 40, 40, 1])
    # Gaps between matrices.
    apart = torch.zeros(3, 50, 40, dtype=BF16)[:, :48, :32]
    for t, rows, columns in ((apart, 64, 32), (apart.mT, 32, 64)):
        described = tensor_map(Operand.of(t), rows, columns, "stack")(t)
        assert (described.shape, described.strides) == ([3, 48, 32], [50 * 40, 40, 1])
    # A matrix that all products share has stride 0, which TMA cannot use: it is described once.
    shared = batch[:1].expand(3, 48, 32)
    described = tensor_map(Operand.of(shared), 64, 32, "stack")(shared)
    assert (described.shape, described.strides) == ([1, 48, 32], [48 * 40, 40, 1])


@pytest.mark.parametrize(
    "instance",
    [
        problem(64, 64, 64),
        problem(64, 64, 64, bias=FP32, residual=Operand(BF16), scaled=True),
        problem(64, 64, 64, residual=Operand(FP32), out=Operand(BF16, aligned=False)),
        problem(64, 64, 64, batch=3, residual=Operand(BF16)),
        problem(64, 64, 64, batch=3, bias=BF16, residual=Operand(BF16, "col")),
        problem(64, 64, 64, batch=3, out=Operand(BF16, aligned=False), epilogue="swiglu"),
        problem(64, 64, 64, dtype=E4M3, out=BF16, scales=("row", "tensor")),
        problem(64, 64, 256, dtype=E4M3, out=BF16, scales=("1x128", "128x128")),
        problem(64, 64, 256, batch=3, dtype=E4M3, out=BF16, scales=("1x128", "128x128")),
        problem(64, 64, 64, b=Operand(BF16, "col", aligned=False)),
        problem(64, 64, 64, a=Operand(BF16, aligned=False)),
    ],
    ids=str,
)
def test_a_call_passes_all_arguments_of_the_kernel(
    instance: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(operands.Build, "launch", lambda build, device: None)
    monkeypatch.setattr(triton_kernel, "launcher", lambda *given, **_: launches.append(given))
    config = KERNEL.default_config(instance)
    special = KERNEL.specialize(instance, config)
    KERNEL.bind(instance, config)
    (((step,), shape, dtype),) = launches
    assert shape == ((3, 64, 64) if instance.batch == 3 else (64, 64))
    assert dtype == instance.out.dtype
    assert step.arguments.keys() == special.types.keys()
    given = random_inputs.make(instance, torch.device("cpu"), seed=0)
    out = random_inputs.empty(instance.out, instance.out_shape, torch.device("cpu"))
    given = types.SimpleNamespace(
        out=out, **{name: getattr(given, name) for name in given.__slots__}, **given.parts
    )
    for name, argument in step.arguments.items():
        if name.endswith("_desc"):
            described = argument.describe(getattr(given, argument.tensor))
            assert f"{described.block_shape},{described.layout!r}>" in special.types[name]
        elif name.endswith("_ptr"):
            assert getattr(given, argument) is not None
        elif isinstance(argument, tuple):
            tensor, dimension = argument
            assert getattr(given, tensor).dim() > dimension


def test_an_output_is_finished_by_a_second_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(operands.Build, "launch", lambda build, device: None)
    monkeypatch.setattr(operands, "Counters", lambda count: count)  # on a GPU
    monkeypatch.setattr(
        triton_kernel, "launcher", lambda *given, **more: launches.append((given, more))
    )
    instance = with_amax(problem(2304, 2304, 2304))
    # K is not split: the kernel that adds partial sums writes no auxiliary outputs.
    assert tile_shapes.adapted(instance, dataclasses.replace(CONFIG, splits=4)).splits == 1
    config = KERNEL.default_config(instance)
    assert (config.BLOCK_N, config.tail_splits) == (128, 2)
    KERNEL.bind(instance, config)
    (((main, second), _, _), more) = launches[0]
    special = KERNEL.specialize(instance, config)
    assert main.arguments.keys() == special.types.keys()
    cut, parts = 132 * 128 * 128, 2304 // 128 * config.subtiles
    assert (main.arguments["port_at"], main.arguments["port_stride"]) == (cut, 2304)
    assert second.arguments == {
        "parts_ptr": "workspace", "port_at": cut, "parts": parts, "length": 2304,
        "out_ptr": "output_0",
    }  # fmt: skip
    assert more == {"workspace": (cut + parts * 2304, FP32), "extras": (), "outputs": 1}
    assert KERNEL.workspace_bytes(instance, config) == 4 * (cut + parts * 2304)
    two = dataclasses.replace(
        instance.epilogue, outputs=(*instance.epilogue.outputs, Port("more", "row", reduce="sum"))
    )
    reasons = KERNEL.reasons_against(dataclasses.replace(instance, epilogue=two))
    assert "writes one auxiliary output, or two with groups of columns" in reasons
    # The sum of a row adds strips, whose width depends on the config. A maximum does not.
    alike = [KERNEL.arithmetic(with_amax(problem(), how), CONFIG) for how in ("max", "sum")]
    assert alike[0] == KERNEL.arithmetic(problem(), CONFIG) != alike[1]


def test_builtin_epilogues_are_served() -> None:
    for epilogue in BUILTIN.values():
        instance = dataclasses.replace(problem(), epilogue=epilogue)
        special = KERNEL.specialize(instance, KERNEL.default_config(instance))
        assert set(special.types) | set(special.constants) == set(warp_specialized_kernel.arg_names)


@pytest.mark.parametrize("sms", [132, 114, 78])
def test_blocks_need_no_further_wave_and_come_in_fours(sms: int) -> None:
    """The number of blocks is a multiple of four, or the number of SMs. A single wave has one block
    per tile."""
    for m in (1, 64, 65, 1000, 4864, 5000, 6000, 8191, 16384):
        instance = problem(m=m, n=8192, k=512, device=dataclasses.replace(H200, sm_count=sms))
        for config in list(WarpSpecialized().configs(instance))[:6]:
            if config.tail_splits > 1:
                continue
            (blocks, _, _) = WarpSpecialized().specialize(instance, config).grid
            tiles = tile_shapes.most_tiles(instance, config) * config.splits
            assert -(-tiles // blocks) == -(-tiles // sms)
            assert blocks == tiles if tiles <= sms else blocks in (sms, blocks // 4 * 4)


@pytest.mark.parametrize(("across", "whole"), [(14, 1), (28, 2)])
def test_tiles_of_the_last_wave_that_are_split_take_a_part_of_its_time(
    across: int, whole: int
) -> None:
    """140 and 280 tiles on 132 SMs: one and two whole waves, and a few tiles."""
    instance = problem(1280, 128 * across, 4096)
    config = dataclasses.replace(CONFIG, BLOCK_M=128, BLOCK_N=128, subtiles=1)
    kernel = WarpSpecialized()
    times = []
    for splits in (1, 2, 4):
        anatomy = kernel.anatomy(instance, dataclasses.replace(config, tail_splits=splits))
        assert anatomy is not None
        times.append(anatomy.model_us["tensor cores"])
    ratios = [time / times[0] * (whole + 1) for time in times]
    assert ratios == pytest.approx([whole + 1, whole + 1 / 2, whole + 1 / 4])
