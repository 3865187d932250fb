"""Limits of descriptions: offsets and alignment, empty sizes, the limits of a kernel's declaration,
and the state that a context restores."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeKernel, problem

import tmm_core
from tmm_core import (
    Config,
    ConfigError,
    Epilogue,
    Groups,
    Kernel,
    Machine,
    Operand,
    Port,
    Problem,
    Supports,
    Traits,
    UnsupportedProblemError,
)
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.spec import device, watch
from tmm_core.spec.anatomy import Anatomy
from tmm_core.spec.bucket import between, bucket_edge, bucketed, probes
from tmm_core.spec.bucket import inside as inside_of
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.epilogue import IDENTITY, INTERNED
from tmm_core.spec.launcher import Bound
from tmm_core.spec.operand import Scale, grouped_strides
from tmm_core.spec.precision import precision, require_precision
from tmm_core.spec.steps import drained

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100 = DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448)
WIDE = Operand(FP32, wide=True)
INT8 = Operand(torch.int8, format="int8")
INT4 = Operand(torch.uint8, format="int4", scale=Scale.parse("row"))


# -- operands -----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [False, True])
def test_the_largest_offset_that_32_bits_hold_is_not_wide(columns: bool) -> None:
    def of(stride: int) -> Operand:
        t = torch.empty_strided((2, 9), (stride, 1), dtype=torch.int8, device="meta")
        return Operand.of(t.T if columns else t)

    assert not of(2**31 - 1 - 8).wide
    assert of(2**31 - 8).wide
    # Even a single row counts its stride, since an index may multiply it.
    for stride in (2**31 - 1, 2**31):
        lone = torch.empty_strided((1, 9), (stride, 1), dtype=torch.int8, device="meta")
        assert Operand.of(lone).wide is (stride == 2**31)


def test_a_single_row_is_aligned_for_any_stride_and_overlapping_rows_are_not() -> None:
    def of(rows: int, stride: int, columns: int = 16) -> bool:
        shape, strides = (rows, columns), (stride, 1)
        return Operand.of(torch.empty_strided(shape, strides, dtype=BF16, device="meta")).aligned

    assert of(1, 3)
    assert of(1, 0)
    assert of(2, 16)
    assert not of(2, 8)  # each row begins inside the previous one, aligned to 16 bytes
    assert not of(2, 0)
    assert not of(2, 17)


def test_a_batch_of_one_has_any_stride() -> None:
    for batch, aligned in ((1, True), (2, False)):
        t = torch.empty_strided((batch, 4, 16), (3, 16, 1), dtype=BF16, device="meta")
        assert Operand.of(t).aligned is aligned


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((1, 1), (1, 1), "row"), ((5, 1), (1, 7), "col"), ((5, 1), (7, 1), "row"),
        ((1, 5), (7, 1), "row"), ((1, 5), (1, 3), "col"), ((2, 5), (9, 3), "strided"),
    ],
)  # fmt: skip
def test_a_vector_has_the_layout_in_which_it_is_contiguous(
    shape: Any, strides: Any, layout: str
) -> None:
    assert Operand.of(torch.empty_strided(shape, strides, device="meta")).layout == layout


# -- problems -----------------------------------------------------------------------------


def test_bytes_and_flops_of_a_problem_include_every_part() -> None:
    plain = problem(m=2, n=3, k=5)
    assert (plain.bytes, plain.flops) == (4 * (2 * 5 + 5 * 3 + 2 * 3), 2 * 2 * 3 * 5)
    gated = replace(plain, epilogue=parse("swiglu"), batch=7)
    assert gated.flops == 7 * 2 * 2 * 6 * 5
    assert gated.bytes == 7 * 4 * (2 * 5 + 5 * 6 + 2 * 3)
    added = replace(plain, residual=Operand(FP16))
    assert added.bytes - plain.bytes == 2 * 2 * 3


def test_strides_of_empty_and_single_dimensions_do_not_matter() -> None:
    """A result has default strides whatever the stride of a dimension of size 0 or 1."""
    one = problem(m=1, n=6)
    assert one.has_default_strides(torch.empty(1, 6))
    assert one.has_default_strides(torch.empty(1, 60)[:, :6])
    many = problem(m=2, n=6)
    assert not many.has_default_strides(torch.empty(2, 60)[:, :6])
    empty = problem(m=2, n=0)
    assert empty.has_default_strides(torch.empty(2, 60)[:, :0])


def test_shapes_of_scales_follow_from_their_blocks() -> None:
    """Blocks of 2 × 32 scale 100 rows, 60 columns (120 for a gated b) and K = 70."""
    blocks = replace(INT8, scale=Scale((2, 32)))
    rows = replace(INT8, scale=Scale.parse("row"))
    dense = problem(m=100, n=60, k=70, a=blocks, b=blocks)
    assert (dense.shape("a_scale"), dense.shape("b_scale")) == ((50, 3), (3, 30))
    assert replace(dense, epilogue=parse("swiglu")).shape("b_scale") == (3, 60)
    assert replace(dense, batch=5).shape("a_zero") == (5, 50, 3)
    assert replace(dense, groups=Groups(4, "m")).shape("b_zero") == (4, 3, 30)
    assert replace(dense, groups=Groups(4, "m")).shape("a_scale") == (50, 3)
    by_row = replace(dense, a=rows, b=rows)
    assert (by_row.shape("a_scale"), by_row.shape("b_scale")) == ((100, 1), (1, 60))
    assert replace(by_row, batch=5).shape("a_scale") == (5, 100, 1)
    assert replace(by_row, groups=Groups(4, "m")).shape("a_scale") == (100,)
    assert replace(by_row, groups=Groups(4, "m")).shape("b_scale") == (4, 60)
    assert replace(by_row, groups=Groups(4, "k")).shape("b_scale") == (4, 60)
    assert replace(by_row, groups=Groups(4, "n")).shape("out") == (100, 60)
    assert replace(dense, batch=5).shape("bias") == (60,)
    packed = replace(dense, a=Operand(torch.uint8, format="int4"))
    assert (packed.shape("a"), packed.shape("b")) == ((100, 35), (70, 60))
    packed = replace(dense, b=Operand(torch.uint8, format="int4"))
    assert (packed.shape("a"), packed.shape("b")) == ((100, 70), (35, 60))


@pytest.mark.parametrize(
    ("operand", "spelled"),
    [
        (Operand(BF16), ""),
        (INT8, "int8"),
        (replace(INT8, scale=Scale((1, 0))), "int8"),
        (Operand(torch.uint8, format="int4", scale=Scale((1, 128))), "int4/1x128"),
        (Operand(torch.float8_e4m3fn, scale=Scale((1, 0))), ""),
        (Operand(torch.float8_e4m3fn, scale=Scale((128, 128))), "fp8/128x128"),
    ],
)
def test_a_format_is_named_as_calls_pass_it(operand: Operand, spelled: str) -> None:
    assert operand.spelled == spelled


@pytest.mark.parametrize(
    ("zero", "dtype"),
    [(True, torch.uint8), (False, None), (None, None), (torch.bfloat16, torch.bfloat16)],
)
def test_a_boolean_says_whether_there_are_zero_points_of_the_storage_dtype(
    zero: Any, dtype: torch.dtype | None
) -> None:
    operand = Operand(torch.uint8, "col", format="int4", scale=Scale.parse("row"), zero=zero)
    assert operand.zero is dtype
    assert operand.parts == (("scale",) if dtype is None else ("scale", "zero"))
    assert Operand.from_json(operand.to_json()) == operand
    # As records have it since before other dtypes.
    in_key = {torch.uint8: True, torch.bfloat16: "bfloat16", None: None}[dtype]
    assert operand.to_json().get("zero") == in_key


def test_operands_are_multiplied_as_the_plain_one_or_as_the_format_says() -> None:
    plain = Operand(BF16)
    for a, b, value, stored in (
        (plain, plain, BF16, False), (plain, INT8, BF16, True), (INT8, plain, BF16, True),
        (Operand(FP16), INT8, FP16, True), (INT8, Operand(FP16), FP16, True),
        (INT8, INT8, INT8.form.result, True),  # type: ignore[union-attr]
    ):  # fmt: skip
        found = problem(a=a, b=b)
        assert (found.value, found.stored, found.plain) == (value, stored, not stored)


def test_a_problem_is_that_of_its_tensors() -> None:
    a, b, out = torch.empty(4, 8), torch.empty(8, 6), torch.empty(4, 6)
    found = Problem.of(a, b, out, DEVICE)
    assert found == problem(m=4, n=6, k=8, b=Operand(FP32, aligned=False), out=found.out)
    found = Problem.of(a, b, out, DEVICE, bias=torch.empty(6, dtype=BF16), residual=out.half())
    assert (found.bias, found.residual) == (BF16, Operand(FP16, aligned=False))
    stack = Problem.of(a.expand(3, 4, 8), b.expand(3, 8, 6), torch.empty(3, 4, 6), DEVICE)
    assert stack.batch == 3


@pytest.mark.parametrize(("dtype", "unit"), [(torch.int8, 16), (BF16, 8), (FP32, 4)])
def test_rows_of_a_grouped_result_start_at_16_bytes(
    dtype: torch.dtype, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (unit - 1, unit):
        assert grouped_strides((3, width), dtype) == (unit, 1)
    assert grouped_strides((5, 3, unit + 1), dtype) == (6 * unit, 2 * unit, 1)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert grouped_strides((5, 3, unit + 1), dtype) == (3 * (unit + 1), unit + 1, 1)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((), "tensor"), ((1,), "tensor"), ((1, 1), "tensor"), ((2, 1), "row"), ((0, 1), "row")],
)
def test_one_number_is_the_scale_of_a_tensor(shape: tuple[int, ...], kind: str) -> None:
    assert Scale.of(torch.ones(shape)) == Scale.parse(kind)  # type: ignore[arg-type]


def test_there_is_at_least_one_group() -> None:
    assert str(Groups(1, "m", zeroed=True)) == "1 groups along m zeroed"
    for count in (0, -1):
        with pytest.raises(ValueError, match="at least one group"):
            Groups(count, "m")


@pytest.mark.parametrize("name", ["a_index", "out_index", "out_weights"])
@pytest.mark.parametrize("ragged", ["n", "k"])
def test_only_rows_are_gathered_scattered_and_weighted(name: str, ragged: Any) -> None:
    with pytest.raises(ValueError, match=f"only rows have {name}, not {ragged}"):
        Groups(2, ragged, **{name: torch.int32})  # type: ignore[arg-type]


def test_the_record_of_a_grouped_problem() -> None:
    assert Groups(3, "k").to_json() == {"count": 3, "ragged": "k"}
    assert Groups(3, "m", torch.int64, zeroed=True).to_json() == {
        "count": 3, "ragged": "m", "a_index": "int64", "zeroed": True,
    }  # fmt: skip


def test_groups_are_read_as_they_were_written() -> None:
    for groups in (
        Groups(3, "k"), Groups(1, "m", zeroed=True), Groups(2, "m", torch.int32),
        Groups(2, "m", None, torch.int64, BF16, True),
    ):  # fmt: skip
        assert Groups.from_json(groups.to_json()) == groups


def test_a_problems_text_names_an_unaligned_result() -> None:
    for name in ("a", "b", "out"):
        change: dict[str, Any] = {name: Operand(FP32, aligned=False)}
        assert "unaligned" in str(replace(problem(), **change))
    assert "unaligned" not in str(problem())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "2×3×5 float32 nn"), ({"batch": 7}, "7×2×3×5 float32 nn"),
        ({"a": Operand(FP32, "col"), "b": Operand(FP32, "strided")}, "2×3×5 float32 ts"),
        ({"b": Operand(FP32, "col")}, "2×3×5 float32 nt"),
        ({"b": Operand(FP16)}, "2×3×5 float32·float16 nn"),
        ({"out": Operand(BF16)}, "2×3×5 float32→bfloat16 nn"),
        ({"b": replace(INT8, scale=Scale.parse("row"))}, "2×3×5 float32·int8 nn scales 1·row"),
        ({"b": replace(INT8, scale=Scale.parse("row"), zero=torch.int8)},
         "2×3×5 float32·int8 nn scales 1·row zero points"),
        ({"a": INT8, "b": INT8, "out": Operand(torch.int8)}, "2×3×5 int8 nn"),
        ({"a": INT4, "b": INT4}, "2×3×5 int4→float32 nn scales row·row"),
        ({"b": INT4}, "2×3×5 float32·int4 nn scales 1·row"),
        ({"a": INT4, "b": replace(INT4, format="int4_signed")},
         "2×3×5 int4·int4_signed→float32 nn scales row·row"),
        ({"groups": Groups(4, "m")}, "2×3×5 float32 nn 4 groups along m"),
        ({"groups": Groups(4, "m", torch.int32, torch.int64, BF16, True)},
         "2×3×5 float32 nn 4 groups along m a_index out_index out_weights zeroed"),
        ({"tf32": True, "bias": FP32, "residual": Operand(FP32), "epilogue": parse("relu")},
         "2×3×5 float32 nn tf32 bias relu residual"),
    ],
)  # fmt: skip
def test_a_problems_text_names_its_differences_from_a_plain_product(
    fields: dict[str, Any], text: str
) -> None:
    one = problem(m=2, n=3, k=5, **fields)
    assert str(one) == text
    assert repr(one) == f"<Problem {text} on {one.device.name}>"


def test_only_the_ragged_size_varies() -> None:
    plain = problem(m=300, n=65, k=17)
    for groups, along, extent, edge, inside in (
        (None, "m", 300, 320, (257, 289)), (Groups(4, "m"), "m", 300, 320, (257, 289)),
        (Groups(4, "n"), "n", 65, 80, (65, 73)), (Groups(4, "k"), "k", 17, 32, (17, 25)),
    ):  # fmt: skip
        found = replace(plain, groups=groups)
        assert (found.along, found.extent) == (along, extent)
        assert bucketed(found) == found.at(edge) == replace(found, **{along: edge})
        assert (inside_of(found), inside_of(found.at(edge))) == ((), inside)


def test_a_bare_problem_keeps_promises_and_loses_requirements() -> None:
    instance = problem(
        deterministic=True, batch_invariant=True, capturing=True, static_weights=True
    )
    assert instance.bare() == problem(static_weights=True)


# -- devices ------------------------------------------------------------------------------


def test_records_of_another_cublas_are_of_another_environment() -> None:
    for name in ("torch", "triton", "cuda", "cublas"):
        change: dict[str, Any] = {name: "other"}
        assert replace(H100, **change).environment != H100.environment
        assert replace(H100, **change).gpu == H100.gpu


def test_interpreted_kernels_have_a_folder_of_their_own() -> None:
    cpu = replace(DEVICE, name="cpu")
    assert replace(cpu, interpreted=True).gpu == f"{cpu.gpu}-interpreted"


@pytest.mark.parametrize(
    ("change", "folder"),
    [
        ({}, "nvidia-h100-sm90-132"), ({"sm_count": 78}, "nvidia-h100-sm90-78"),
        ({"capability": (12, 1)}, "nvidia-h100-sm121-132"),
        ({"interpreted": True}, "nvidia-h100-sm90-132-interpreted"),
        ({"type": "cpu", "name": "cpu"}, "cpu"),
    ],
)  # fmt: skip
def test_a_folder_is_named_by_the_gpu(change: dict[str, Any], folder: str) -> None:
    assert replace(H100, **change).gpu == folder


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, False), ("", False), ("0", False), ("off", False), ("2", False), ("1", True),
        ("on", True), ("True", True), ("yes", True), ("Y", True),
    ],
)  # fmt: skip
def test_triton_interprets_where_its_variable_says_so(
    text: str | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    if text is not None:
        monkeypatch.setenv("TRITON_INTERPRET", text)
    assert device.interpreting() is found
    of = device.fingerprint.__wrapped__(torch.device("cpu"))
    assert (of.type, of.name, of.interpreted) == ("cpu", "cpu", found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not device.fingerprint.__wrapped__(torch.device("cpu")).interpreted


def test_a_cpu_fingerprint_has_torch_and_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3", "pytorch-triton-rocm": "4"}
    monkeypatch.setattr(device, "version_of", lambda name: versions.get(name, ""))
    monkeypatch.setattr(torch, "__version__", "2")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for triton in ("3", "4", ""):
        of = device.fingerprint.__wrapped__(torch.device("cpu"))
        assert of == DeviceFingerprint("cpu", "cpu", torch="2", triton=triton)
        versions = dict(list(versions.items())[1:])


def test_a_gpu_fingerprint_has_torchs_properties_and_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(
        name="GPU", major=9, minor=4, multi_processor_count=7, gcnArchName="gfx942:xnack-",
        shared_memory_per_block_optin=99, L2_cache_size=88,
    )  # fmt: skip
    versions = {"triton": "3", "pytorch-triton-rocm": "4", "nvidia-cublas-cu12": "12.8"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device, "version_of", lambda name: versions.get(name, ""))
    monkeypatch.setattr(torch, "__version__", "2")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.version, "hip", None)

    def found() -> DeviceFingerprint:
        of: DeviceFingerprint = device.fingerprint.__wrapped__(torch.device("cuda", 0))
        return of

    nvidia = DeviceFingerprint(
        "cuda", "GPU", (9, 4), 7, 99, 88, torch="2", triton="3", cuda="12.9", cublas="12.8"
    )
    assert found() == replace(nvidia, interpreted=device.interpreting())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert found() == nvidia
    del properties.shared_memory_per_block_optin, properties.L2_cache_size
    assert found() == replace(nvidia, shared_memory=48 * 1024, l2=0)
    versions |= {"nvidia-cublas-cu13": "13.1", "triton": ""}
    assert (found().cublas, found().triton) == ("13.1", "4")
    versions |= {"nvidia-cublas": "13.2"}
    assert found().cublas == "13.2"
    versions.clear()
    assert found().cublas == "torch-cuda-12.9"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (found().cuda, found().arch) == ("hip-6.4", "gfx942")


def test_a_package_without_a_version_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.version_of("no such distribution") == ""
    monkeypatch.setattr("importlib.metadata.version", lambda name: None)
    assert device.version_of("torch") == ""


def test_memory_that_torch_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert device.free_memory(torch.device("cuda", 0)) == 10 + 500 - 200


def test_a_device_without_numbers_has_rates() -> None:
    """Every estimate divides by a rate, so none may be zero."""
    machine = Machine.of(DeviceFingerprint("cpu", "cpu"))
    assert machine.sms == 1
    for dtype in (FP32, BF16, torch.float64):
        assert machine.flops(problem(a=Operand(dtype), b=Operand(dtype))) > 0
    assert machine.memory > 0


def test_rates_depend_on_the_gpu_and_the_operands() -> None:
    listed, other = Machine.of(H100), Machine.of(replace(H100, name="T4", capability=(7, 5)))
    assert (listed.sms, listed.memory) == (132, 3.35e6)
    assert (other.sms, other.memory) == (132, 132 * 8e3)
    assert listed.tensor > other.tensor
    known = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert len({Machine.of(replace(H100, capability=each)).tensor for each in known}) == len(known)
    names = ["T4", "A100", "H100", "H200", "B200"]
    assert len({Machine.of(replace(H100, name=f"NVIDIA {n}")).memory for n in names}) == len(names)

    def rate(dtype: torch.dtype, **fields: Any) -> float:
        return listed.flops(problem(a=Operand(dtype), b=Operand(dtype), **fields)) / listed.tensor

    assert (rate(BF16), rate(FP16), rate(torch.float8_e4m3fn)) == (1, 1, 2)
    assert rate(FP32, tf32=True) == 1 / 2
    assert rate(torch.float64) < rate(FP32) < 1 / 10
    assert listed.flops(problem(a=Operand(BF16), b=INT8)) == listed.tensor


def test_fewer_bytes_displace_no_more_than_themselves() -> None:
    machine = Machine.of(H100)
    share = 0.9
    small, large = 1e6, 100e6
    assert machine.moving_us(small) == pytest.approx(
        2 * small / share / machine.memory + machine.RAMP_US
    )
    assert machine.moving_us(large) == pytest.approx(
        (large + 16e6) / share / machine.memory + machine.RAMP_US
    )


def test_fp32_without_tensor_cores_is_limited_by_the_gpu() -> None:
    slow = Machine(sms=1, tensor=1e5, memory=1.0)
    assert slow.flops(problem()) == 1e5
    assert slow.flops(problem(tf32=True)) == 5e4
    fast = Machine(sms=1, tensor=1e7, memory=1.0)
    assert fast.flops(problem()) < 1e7 / 2 == fast.flops(problem(tf32=True))


def test_waves_are_whole_and_the_last_may_not_be_full() -> None:
    for tiles, at_once, waves, fill in ((1, 4, 1, 1 / 4), (4, 4, 1, 1), (5, 4, 2, 5 / 8)):
        of = Anatomy(block_m=1, block_n=1, block_k=1, tiles=tiles, at_once=at_once, steps=1,
                     shared_memory=0)  # fmt: skip
        assert (of.waves, of.fill, of.model_us) == (waves, fill, {})


# -- outputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_reductions_over_empty_dimensions(reduce: Any) -> None:
    least = -torch.inf if reduce == "max" else 0.0
    for shape, kind, expected in (
        ((3, 0), "row", [least] * 3), ((0, 3), "row", []), ((3, 0), "col", []),
        ((0, 3), "col", [least] * 3), ((3, 0), "scalar", least), ((2, 0, 3), "col", [least] * 3),
    ):  # fmt: skip
        found = Port("p", kind, reduce=reduce).apply(torch.empty(shape))  # type: ignore[arg-type]
        assert found.tolist() == expected, (shape, kind)


# -- what a kernel declares ---------------------------------------------------------------

LEAST = Supports(operands=(FP32,), out=(FP32,), residual=(FP32,))
ON_GPU = problem(device=H100)


def test_a_kernel_serves_up_to_its_limits_and_with_them() -> None:
    def able(supports: Supports, **change: Any) -> bool:
        return not supports.reasons_against(replace(ON_GPU, **change))

    assert able(replace(LEAST, batch=4), batch=4)
    assert not able(replace(LEAST, batch=4), batch=5)
    assert able(replace(LEAST, capability=(9, 0)))
    assert not able(replace(LEAST, capability=(9, 1)))
    for name in ("m", "n", "k", "batch"):
        assert not able(replace(LEAST, batch=None), **{name: 0})
        assert able(replace(LEAST, batch=None, empty=True), **{name: 0})


@pytest.mark.parametrize("name", ["a", "b", "out", "residual"])
def test_offsets_beyond_32_bits_are_declared_for_every_matrix(name: str) -> None:
    problem = replace(ON_GPU, **{name: WIDE})
    assert LEAST.reasons_against(problem) == [f"{name} has offsets beyond 32 bits"]
    assert not replace(LEAST, wide=True).reasons_against(problem)


def test_operands_share_a_dtype() -> None:
    both = replace(LEAST, operands=(FP32, BF16))
    assert not both.reasons_against(replace(ON_GPU, a=Operand(BF16), b=Operand(BF16)))
    (reason,) = both.reasons_against(replace(ON_GPU, b=Operand(BF16)))
    assert "differ in dtype" in reason


def test_scales_of_an_operand_without_a_format_are_declined() -> None:
    scaled = replace(LEAST, scales=("row",))
    (reason,) = scaled.reasons_against(replace(ON_GPU, a=Operand(FP32, scale=Scale.parse("row"))))
    assert reason == "has no scale of a by row for torch.float32"


def test_a_way_to_reduce_and_a_function_to_do_it_are_declared() -> None:
    def asked(port: Port) -> Any:
        epilogue = Epilogue("relu", torch.relu, device=torch.relu, outputs=(port,))
        return replace(ON_GPU, epilogue=epilogue)

    able = replace(LEAST, epilogues=True, outputs=("row",), reduces=("max",))
    assert not able.reasons_against(asked(Port("p", "row", reduce="max")))
    (reason,) = able.reasons_against(asked(Port("p", "row", reduce="sum")))
    assert "reduces no output" in reason
    (reason,) = able.reasons_against(asked(Port("p", "row", reduce="max", of=torch.abs)))
    assert "has no device function" in reason


def test_outputs_are_of_one_product() -> None:
    able = replace(LEAST, epilogues=True, batch=4, outputs=("tile",), ragged=("m",))
    problem = replace(ON_GPU, epilogue=Epilogue("relu", torch.relu, device=torch.relu))
    with_output = replace(problem, epilogue=replace(problem.epilogue, outputs=(Port("p", "tile"),)))
    assert able.reasons_against(with_output) == []
    for change in ({"batch": 2}, {"groups": Groups(2, "m")}):
        several: dict[str, Any] = change
        assert able.reasons_against(replace(problem, **several)) == []
        (reason,) = able.reasons_against(replace(with_output, **several))
        assert "of one product" in reason


def test_every_kind_of_groups_is_declared() -> None:
    able = replace(LEAST, ragged=("m",))
    for groups, declared, message in (
        (Groups(2, "n"), {"ragged": ("n",)}, "ragged along n"),
        (Groups(2, "m", torch.int32), {"indexed": True}, "takes no a_index"),
        (Groups(2, "m", zeroed=True), {"zeroed": True}, "does not zero"),
    ):
        problem, fields = replace(ON_GPU, groups=groups), dict[str, Any](declared)
        (reason,) = able.reasons_against(problem)
        assert message in reason
        assert replace(able, **fields).reasons_against(problem) == []
    assert able.reasons_against(replace(ON_GPU, groups=Groups(2, "m"))) == []


# -- precision ----------------------------------------------------------------------------


@pytest.fixture
def matmul() -> Any:
    found = torch.backends.cuda.matmul
    before = found.fp32_precision
    yield found
    found.fp32_precision = before


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_the_precision_is_restored(before: str, matmul: Any) -> None:
    def failing(tf32: bool) -> None:
        with precision(tf32):
            assert (matmul.fp32_precision == "tf32") is tf32
            raise KeyError

    matmul.fp32_precision = before
    with precision(before == "tf32"):
        assert matmul.fp32_precision == before
    for tf32 in (True, False):
        with pytest.raises(KeyError):
            failing(tf32)
        assert matmul.fp32_precision == before


def test_a_precision_within_another_ends_with_its_block(matmul: Any) -> None:
    matmul.fp32_precision = "ieee"
    seen: list[str] = []

    def nest() -> None:
        with precision(True):
            with precision(False):
                seen.append(matmul.fp32_precision)
            seen.append(matmul.fp32_precision)

    thread = threading.Thread(target=nest, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert [*seen, matmul.fp32_precision] == ["ieee", "tf32", "ieee"]


def test_nothing_is_measured_under_another_precision_either_way(matmul: Any) -> None:
    for setting, other in (("ieee", True), ("tf32", False)):
        matmul.fp32_precision = setting
        require_precision(replace(ON_GPU, tf32=not other))
        wanted = "tf32" if other else "ieee"
        message = f"needs another precision than is set .*fp32_precision = '{wanted}'"
        with pytest.raises(UnsupportedProblemError, match=message):
            require_precision(replace(ON_GPU, tf32=other))
        # 16-bit dtypes and CPUs have no such precision.
        require_precision(replace(ON_GPU, a=Operand(BF16), b=Operand(BF16), tf32=other))
        require_precision(problem(tf32=other))


# -- autocast -----------------------------------------------------------------------------


def test_autocast_also_rounds_the_added_terms() -> None:
    a, b = torch.zeros(4, 8), torch.randn(8, 6)
    fine = torch.full((4, 6), 1 + 2.0**-12)
    with torch.autocast("cpu", dtype=BF16):
        for term in ({"residual": fine}, {"bias": fine[0]}):
            y = tmm_core.matmul(a, b, out_dtype=FP32, **term)  # type: ignore[arg-type]
            assert torch.equal(y, torch.ones(4, 6))
    assert torch.equal(tmm_core.matmul(a, b, residual=fine), fine)


# -- buckets of M -------------------------------------------------------------------------


def test_buckets_divide_all_sizes_and_are_measured_inside() -> None:
    """Powers of two, where the width of buckets changes, and size zero are included."""
    assert (bucket_edge(0), bucket_edge(1), probes(1), between(1)) == (1, 1, (), ())
    below, last = 1, 5 * 2**12
    for m in range(2, last + 1):
        edge = bucket_edge(m)
        assert m <= edge == bucket_edge(edge) <= max(64, 1.25 * m)
        if m < edge:
            continue
        width, inside = edge - below, probes(edge)
        first = below + 1 + below % 2
        assert all(below < each < edge and each % 2 for each in inside)
        assert inside[:1] == ((first,) if first < edge else ())
        if edge > 16:
            assert len(inside) == (4 if width > 256 else 2)
            gaps = [b - a for a, b in itertools.pairwise((*inside, edge))]
            assert max(gaps) - min(gaps) <= 3
        assert all(below < each < edge for each in between(edge))
        below = edge
    assert below == last


# -- configs and kernels -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tile(Config):
    BLOCK: int
    share: float = 0.5
    on: bool = False
    early: str = ""

    def __post_init__(self) -> None:
        if self.BLOCK < 1:
            raise ValueError("BLOCK is positive")


@pytest.mark.parametrize(
    "document",
    [
        {}, {"BLOCK": 0}, {"BLOCK": 2.0}, {"BLOCK": True}, {"BLOCK": "2"}, {"BLOCK": None},
        {"BLOCK": 2, "share": True}, {"BLOCK": 2, "share": "1"}, {"BLOCK": 2, "on": 1},
        {"BLOCK": 2, "early": 1}, {"BLOCK": 2, "other": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_a_config_has_values_of_its_types(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Tile"):
        Tile.from_json(document)


def test_a_config_is_read_as_it_was_written() -> None:
    for tile in (Tile(BLOCK=2), Tile(BLOCK=3, share=2.0, on=True, early="x")):
        assert Tile.from_json(tile.to_json()) == tile
    assert Tile.from_json({"BLOCK": 2, "share": 1}) == Tile(BLOCK=2, share=1.0)
    assert str(Tile(BLOCK=2)) == "BLOCK=2 share=0.5 on=False"


class Promising(Config):
    @property
    def assumes(self) -> tuple[str, ...]:
        return ("static_weights",)


def test_a_config_is_used_where_the_caller_made_its_promises() -> None:
    assert Promising().unmet_promises(problem()) == ["static_weights"]
    assert Promising().unmet_promises(problem(static_weights=True)) == []
    assert Config().unmet_promises(problem()) == []


def test_a_kernel_declines_by_its_declaration_and_then_by_itself() -> None:
    kernel = FakeKernel("k")
    kernel.supports = LEAST  # type: ignore[misc]
    kernel.declines = lambda problem: ["not today"]  # type: ignore[method-assign]
    assert kernel.reasons_against(ON_GPU) == ["not today"]
    assert kernel.reasons_against(replace(ON_GPU, batch=2)) == ["batch 2 exceeds 1"]


def test_a_kernel_promises_nothing_by_default() -> None:
    kernel = FakeKernel("k")
    assert Kernel.arithmetic(kernel, ON_GPU, Config()) is None
    kernel.traits = Traits(batch_invariant=True)  # type: ignore[misc]
    name = f"k@{kernel.version}(BLOCK=2 share=0.5 on=False)"
    assert Kernel.arithmetic(kernel, ON_GPU, Tile(BLOCK=2)) == f"sm90-{name}"
    assert Kernel.arithmetic(kernel, problem(), Tile(BLOCK=2)) == f"cpu-{name}"
    assert Kernel.workspace_bytes(kernel, ON_GPU, Config()) == 0
    assert Kernel.estimate_us(kernel, ON_GPU, Config()) is None
    assert Kernel.anatomy(kernel, ON_GPU, Config()) is None


def test_a_launcher_is_bound_once() -> None:
    bound = Bound.of(problem)  # type: ignore[arg-type]
    assert bound.run is problem
    assert Bound.of(bound) is bound


def test_work_is_resumed_when_its_futures_are_done() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    log: list[str] = []

    def work() -> Any:
        yield ()
        thread = threading.Timer(0.01, lambda: futures[1].set_result(1))
        thread.start()
        while not futures[1].done():
            log.append("wait")
            yield futures
        thread.join()
        return "result"

    assert drained(work(), lambda: log.append("tick")) == "result"
    # A wait ends when the first of two futures is done, or earlier.
    assert log[:3] == ["tick", "wait", "tick"]
    assert len(log) < 20


# -- what an epilogue may be --------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a-b"}, {"name": ""}, {"parameters": (float("nan"),)},
        {"parameters": (float("inf"), 1.0)}, {"parameters": (1.0, 0.0), "positive": True},
        {"parameters": (-1.0,), "positive": True}, {"parameters": (1e-39,), "positive": True},
        {"interleaved": True}, {"interleaved": True, "gated": True, "derivative": torch.relu},
        {"interleaved": True, "gated": True, "device_derivative": torch.relu},
        {"outputs": (Port("p", "tile"), Port("p", "row", reduce="max"))},
    ],
    ids=", ".join,
)  # fmt: skip
def test_an_epilogue_is_described_without_contradiction(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="epilogue"):
        Epilogue(**{"name": "f", "reference": torch.relu, **fields})


def test_the_least_parameter_is_the_least_normal_number() -> None:
    assert Epilogue("f", torch.relu, parameters=(2.0**-126,), positive=True).parameters
    for name in ("device", "device_derivative"):
        with pytest.raises(TypeError, match="is no device function"):
            Epilogue("f", torch.relu, **{name: 2})  # type: ignore[arg-type]


def parameters_of(function: Any, gated: bool = False, **fields: Any) -> tuple[float, ...]:
    return Epilogue("f", function, gated=gated, **fields).parameters


def test_parameters_are_the_numbers_that_follow_the_operands() -> None:
    def all_kinds(z: Any, a: float = 1, b: float = 2.5, c: Any = "x", d: float = 3) -> Any:
        return z

    assert parameters_of(all_kinds) == (1.0, 2.5)
    assert parameters_of(all_kinds, gated=True) == (2.5,)
    assert parameters_of(lambda z, flag=True: z) == ()
    assert parameters_of(lambda z, *, a=1.0: z) == ()
    assert parameters_of(lambda *z, a=1.0: z) == ()
    assert parameters_of(torch.relu) == ()  # written in C
    # A kernel takes no more than its device function does.
    assert parameters_of(all_kinds, device=lambda z, a: z) == (1.0,)
    assert parameters_of(all_kinds, device=lambda z: z) == ()
    assert parameters_of(all_kinds, device=lambda: None) == ()
    assert parameters_of(all_kinds, gated=True, device=lambda g, u, a: g) == (2.5,)


def test_a_chain_is_its_stages() -> None:
    first = Epilogue("first", torch.relu, linear=True, outputs=(Port("p", "tile"),))
    last = Epilogue("last", torch.tanh, linear=True, outputs=(Port("q", "tile"),))
    chain = first.then(last)
    assert (chain.name, chain.linear, chain.gated) == ("first+last", True, False)
    assert [port.name for port in chain.outputs] == ["p", "q"]
    assert chain.then(first.bare).name == "first+last+first"
    assert not first.then(replace(last, linear=False)).linear
    assert CLAMPED.then(last).interleaved
    assert CLAMPED.then(last).gated
    assert first.then(IDENTITY) is first
    assert IDENTITY.then(first) is first
    with pytest.raises(ValueError, match="can only come first"):
        first.then(parse("swiglu"))


def test_values_are_given_to_the_first_parameters() -> None:
    epilogue = Epilogue("f", torch.relu, parameters=(1.0, 2.0))
    for given, found in (((), (1.0, 2.0)), ((3,), (3.0, 2.0)), ((3, 4), (3.0, 4.0))):
        assert epilogue.with_parameters(*given).parameters == found
    with pytest.raises(ValueError, match="takes 2 parameters, got 3"):
        epilogue.with_parameters(1, 2, 3)


def test_one_function_of_the_product_is_an_activation() -> None:
    plain = Epilogue("f", torch.tanh)
    assert plain.activation == plain.apply_to  # which checks the result
    assert parse("relu").activation is parse("relu").reference
    others = (
        IDENTITY, plain.then(plain), replace(plain, gated=True), parse("swiglu"),
        replace(plain, parameters=(1.0,)), replace(plain, outputs=(Port("p", "tile"),)),
    )  # fmt: skip
    assert [other.activation for other in others] == [None] * len(others)


def test_all_outputs_at_once_need_narrow_results() -> None:
    port = Port("p", "tile", of=torch.neg)
    together = Epilogue(
        "f", torch.relu, outputs=(port,), outputs_of=lambda y: (torch.full_like(y, 7),)
    )
    y = torch.ones(2, 3)
    for dtype in (BF16, FP16, FP32):
        assert together.auxiliary(y.to(dtype))[0].eq(7).all()
    assert together.auxiliary(y.double())[0].eq(-1).all()
    assert together.bare.auxiliary(y) == ()
    other = Epilogue("g", torch.relu, outputs=(Port("q", "tile"),))
    assert not together.then(other).auxiliary(y.requires_grad_())[1].requires_grad


def test_an_output_keeps_the_closure_variables_of_its_call() -> None:
    factor = 2.0

    def times(z: torch.Tensor) -> torch.Tensor:
        return z * factor

    epilogue = Epilogue("f", torch.relu, outputs=(Port("p", "tile", of=times, device=times),))
    kept = INTERNED[epilogue.interned()]
    factor = 3.0
    assert kept.auxiliary(torch.ones(1, 1))[0].item() == 2
    assert kept.outputs[0].device(1.0) == 2
    assert epilogue.auxiliary(torch.ones(1, 1))[0].item() == 3
    assert epilogue.interned() != kept.interned()


# -- outputs and what they may be ---------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "1"}, {"kind": "rows"}, {"dtype": torch.float64}, {"dtype": torch.int32},
        {"dtype": torch.float8_e4m3fn}, {"reduce": None}, {"reduce": "min"}, {"group": 4},
        {"kind": "tile"}, {"kind": "tile", "reduce": None, "group": -4, "of": torch.abs},
        {"kind": "tile", "reduce": None, "group": 3, "of": torch.abs},
        {"kind": "tile", "reduce": None, "group": 4},
        {"kind": "group", "reduce": None, "of": torch.abs},
        {"kind": "group", "reduce": None, "group": 4},
        {"kind": "group", "reduce": None, "group": 4, "of": torch.abs,
         "dtype": torch.float8_e5m2},
        {"device": torch.abs},
    ],
    ids=", ".join,
)  # fmt: skip
def test_an_output_is_described_without_contradiction(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="output"):
        Port(**{"name": "p", "kind": "row", "reduce": "max", **fields})


def test_which_auxiliary_outputs_can_be_fused() -> None:
    for dtype in (BF16, FP16, FP32, torch.float8_e4m3fn, torch.float8_e5m2):
        assert Port("p", "tile", dtype, of=torch.abs, group=4).fusable is False
    assert Port("p", "tile").fusable
    assert Port("p", "group", of=torch.abs, group=1, device=torch.abs).fusable
    with pytest.raises(TypeError, match="is no device function"):
        Port("p", "tile", of=torch.abs, device=2)


def test_groups_of_an_output_are_padded_and_adjacent() -> None:
    amax = Port("p", "group", of=lambda y: y.abs().amax(-1), group=4)
    y = torch.arange(12.0).view(2, 6) - 20
    assert amax.shape((2, 6)) == (2, 2)
    assert amax.apply(y).tolist() == [[20, 16], [14, 10]]
    placed = amax.placed(torch.arange(4.0), (2, 6))
    assert placed.tolist() == [[0, 2], [1, 3]]
    assert amax.placed(torch.arange(12.0), (3, 2, 6)).shape == (3, 2, 2)
    assert Port("q", "row", reduce="max").placed(torch.arange(2.0), (2, 6)).tolist() == [0, 1]
    tile = Port("t", "tile", of=lambda y: y - y.amax(-1, keepdim=True), group=4)
    assert tile.apply(y).tolist() == [[-3, -2, -1, 0, -16, -15], [-3, -2, -1, 0, -10, -9]]


# -- queries that do not return -----------------------------------------------------------


def test_a_query_is_reported_once_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "enabled", False)  # the test calls the report itself
    threads = threading.active_count()
    now = time.monotonic()
    with watch.watched(lambda: "one"), watch.watched(lambda: "two", 60.0):
        assert threading.active_count() == threads
        for later, printed in ((9.9, ""), (10.5, "tmm: one\n"), (11, ""), (61, "tmm: two\n")):
            watch._report(now + later)
            assert capsys.readouterr().err == printed
    watch._report(now + 1000)
    with pytest.raises(KeyError), watch.watched(lambda: "three"):
        raise KeyError
    with watch.watched(lambda: str(1 / 0)):  # text that names a plugin may fail, too
        watch._report(now + 1000)
    assert capsys.readouterr().err == ""
    assert not watch._running


def test_one_thread_watches_while_there_are_queries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.04)
    reported = threading.Event()

    def what() -> str:
        reported.set()
        return "slow"

    with watch.watched(what):
        thread = watch._thread
        assert thread is not None
        assert (thread.name, thread.daemon) == ("tmm-watch", True)
        with watch.watched(lambda: "fast", 600.0):
            assert watch._thread is thread
        assert reported.wait(10)
    thread.join(10)
    assert not thread.is_alive()
    assert watch._thread is None
    assert capsys.readouterr().err == "tmm: slow\n"
    with watch.watched(lambda: "again", 600.0):
        assert watch._thread is not thread
