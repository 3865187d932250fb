"""Limits of what is described: offsets and alignment, empty sizes, what a kernel just may, and the
state that a context puts back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import DEVICE, problem

import tmm_core
from tmm_core import Epilogue, Groups, Machine, Operand, Port, Supports, UnsupportedProblemError
from tmm_core.epilogues import parse
from tmm_core.spec.bucket import between, bucket_edge, probes
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.operand import Scale
from tmm_core.spec.precision import precision, require_precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100 = DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448)
WIDE = Operand(FP32, wide=True)


# -- operands -----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [False, True])
def test_the_largest_offset_that_32_bits_hold_is_not_wide(columns: bool) -> None:
    def of(stride: int) -> Operand:
        t = torch.empty_strided((2, 9), (stride, 1), dtype=torch.int8, device="meta")
        return Operand.of(t.T if columns else t)

    assert not of(2**31 - 1 - 8).wide
    assert of(2**31 - 8).wide


def test_a_lone_row_is_aligned_whatever_its_stride_and_overlapping_rows_are_not() -> None:
    def of(rows: int, stride: int, columns: int = 16) -> bool:
        shape, strides = (rows, columns), (stride, 1)
        return Operand.of(torch.empty_strided(shape, strides, dtype=BF16, device="meta")).aligned

    assert of(1, 3)
    assert of(1, 0)
    assert of(2, 16)
    assert not of(2, 8)  # each begins inside the one before, on 16 bytes
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


def test_what_moves_and_what_is_multiplied_counts_every_part() -> None:
    plain = problem(m=2, n=3, k=5)
    assert (plain.bytes, plain.flops) == (4 * (2 * 5 + 5 * 3 + 2 * 3), 2 * 2 * 3 * 5)
    gated = replace(plain, epilogue=parse("swiglu"), batch=7)
    assert gated.flops == 7 * 2 * 2 * 6 * 5
    assert gated.bytes == 7 * 4 * (2 * 5 + 5 * 6 + 2 * 3)
    added = replace(plain, residual=Operand(FP16))
    assert added.bytes - plain.bytes == 2 * 2 * 3


def test_strides_of_nothing_and_of_one_mean_nothing() -> None:
    """Whether a result lies as one that a launcher makes."""
    one = problem(m=1, n=6)
    assert one.has_default_strides(torch.empty(1, 6))
    assert one.has_default_strides(torch.empty(1, 60)[:, :6])
    many = problem(m=2, n=6)
    assert not many.has_default_strides(torch.empty(2, 60)[:, :6])
    empty = problem(m=2, n=0)
    assert empty.has_default_strides(torch.empty(2, 60)[:, :0])


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


def test_groups_are_read_as_they_were_written() -> None:
    for groups in (
        Groups(3, "k"), Groups(1, "m", zeroed=True), Groups(2, "m", torch.int32),
        Groups(2, "m", None, torch.int64, BF16, True),
    ):  # fmt: skip
        assert Groups.from_json(groups.to_json()) == groups


def test_an_unaligned_result_is_part_of_what_a_problem_says() -> None:
    for name in ("a", "b", "out"):
        change: dict[str, Any] = {name: Operand(FP32, aligned=False)}
        assert "unaligned" in str(replace(problem(), **change))
    assert "unaligned" not in str(problem())


# -- devices ------------------------------------------------------------------------------


def test_records_of_another_cublas_are_of_another_environment() -> None:
    for name in ("torch", "triton", "cuda", "cublas"):
        change: dict[str, Any] = {name: "other"}
        assert replace(H100, **change).environment != H100.environment
        assert replace(H100, **change).gpu == H100.gpu


def test_interpreted_kernels_have_a_folder_of_their_own() -> None:
    cpu = replace(DEVICE, name="cpu")
    assert replace(cpu, interpreted=True).gpu == f"{cpu.gpu}-interpreted"


def test_a_device_without_numbers_has_rates() -> None:
    """Every estimate divides by them."""
    machine = Machine.of(DeviceFingerprint("cpu", "cpu"))
    assert machine.sms == 1
    for dtype in (FP32, BF16, torch.float64):
        assert machine.flops(problem(a=Operand(dtype), b=Operand(dtype))) > 0
    assert machine.memory > 0


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


def test_fp32_without_tensor_cores_is_no_faster_than_a_gpu_has_any() -> None:
    slow = Machine(sms=1, tensor=1e5, memory=1.0)
    assert slow.flops(problem()) == 1e5
    assert slow.flops(problem(tf32=True)) == 5e4
    fast = Machine(sms=1, tensor=1e7, memory=1.0)
    assert fast.flops(problem()) < 1e7 / 2 == fast.flops(problem(tf32=True))


# -- outputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_a_reduction_of_nothing_and_one_that_there_is_none_of(reduce: Any) -> None:
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
    asked = replace(ON_GPU, **{name: WIDE})
    assert LEAST.reasons_against(asked) == [f"{name} has offsets beyond 32 bits"]
    assert not replace(LEAST, wide=True).reasons_against(asked)


def test_operands_share_a_dtype() -> None:
    both = replace(LEAST, operands=(FP32, BF16))
    assert not both.reasons_against(replace(ON_GPU, a=Operand(BF16), b=Operand(BF16)))
    (reason,) = both.reasons_against(replace(ON_GPU, b=Operand(BF16)))
    assert "differ in dtype" in reason


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


# -- precision ----------------------------------------------------------------------------


@pytest.fixture
def matmul() -> Any:
    found = torch.backends.cuda.matmul
    before = found.fp32_precision
    yield found
    found.fp32_precision = before


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_the_precision_is_afterwards_what_it_was(before: str, matmul: Any) -> None:
    def failing(tf32: bool) -> None:
        with precision(tf32):
            assert (matmul.fp32_precision == "tf32") is tf32
            raise KeyError

    matmul.fp32_precision = before
    for tf32 in (True, False):
        with pytest.raises(KeyError):
            failing(tf32)
        assert matmul.fp32_precision == before


def test_nothing_is_measured_under_another_precision_either_way(matmul: Any) -> None:
    for setting, other in (("ieee", True), ("tf32", False)):
        matmul.fp32_precision = setting
        require_precision(replace(ON_GPU, tf32=not other))
        with pytest.raises(UnsupportedProblemError, match="needs another precision than is set"):
            require_precision(replace(ON_GPU, tf32=other))
        # 16 bits have none, nor has a CPU.
        require_precision(replace(ON_GPU, a=Operand(BF16), b=Operand(BF16), tf32=other))
        require_precision(problem(tf32=other))


# -- autocast -----------------------------------------------------------------------------


def test_autocast_rounds_what_is_added_too() -> None:
    a, b = torch.zeros(4, 8), torch.randn(8, 6)
    fine = torch.full((4, 6), 1 + 2.0**-12)
    with torch.autocast("cpu", dtype=BF16):
        for term in ({"residual": fine}, {"bias": fine[0]}):
            y = tmm_core.matmul(a, b, out_dtype=FP32, **term)  # type: ignore[arg-type]
            assert torch.equal(y, torch.ones(4, 6))
    assert torch.equal(tmm_core.matmul(a, b, residual=fine), fine)


# -- buckets of M -------------------------------------------------------------------------


def test_buckets_divide_all_sizes_and_are_measured_inside() -> None:
    """Also at powers of two, where the width of buckets changes, and at nothing."""
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
