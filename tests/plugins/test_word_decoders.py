"""The PTX that decodes pairs of packed values, run instruction by instruction on the CPU for every
stored pair; whole words are compared with fp64 on a GPU (``tests/gpu/test_streaming_gpu.py``)."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.word_decoders import PAIRS, offset, pair_program

from tmm_core import formats

BF16, FP16 = torch.bfloat16, torch.float16
Bits = torch.Tensor  # int64 registers


def _halves(register: Bits, dtype: torch.dtype) -> list[torch.Tensor]:
    """The values of both 16-bit floats of a register, in fp64."""
    parts = [register & 0xFFFF, register >> 16 & 0xFFFF]
    return [p.to(torch.int32).to(torch.int16).view(dtype).double() for p in parts]


def _bits(value: torch.Tensor, dtype: torch.dtype) -> Bits:
    return value.to(dtype).view(torch.int16).long() & 0xFFFF


def _paired(low: Bits, high: Bits) -> Bits:
    return low | high << 16


def _float32(register: Bits) -> torch.Tensor:
    return register.to(torch.int32).view(torch.float32)


def run(program: str, operands: list[Bits]) -> Bits:
    """``$0`` after the program, of which ``operands`` are ``$1`` and so on."""
    registers: dict[str, Bits] = {f"${i + 1}": each for i, each in enumerate(operands)}

    def value(name: str) -> Bits:
        if name in registers:
            return registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return torch.full_like(operands[0], number)

    for line in program.replace("\n", " ").strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        into, *given = [each.strip() for each in re.split(r",(?![^{]*})", rest)]
        kind = BF16 if "bf16" in name else FP16
        if name.startswith("mov") and into.startswith("{"):
            low, high = into.strip("{}").split(",")
            both = value(given[0])
            registers[low.strip()], registers[high.strip()] = both & 0xFFFF, both >> 16 & 0xFFFF
            continue
        x, *others = [value(each) for each in given]
        if name == "mov.b32":
            result = x
        elif name == "mul.lo.u32":
            result = x * others[0] & 0xFFFFFFFF
        elif name == "xor.b32":
            result = x ^ others[0]
        elif name == "lop3.b32":
            picked_bits = x & others[0]
            assert given[-1] in ("0x6A", "0xEA")
            either = given[-1] == "0xEA"
            result = picked_bits | others[1] if either else picked_bits ^ others[1]
        elif name == "shl.b32":
            result = x << int(given[1]) & 0xFFFFFFFF
        elif name == "and.b32":
            result = x & others[0]
        elif name == "prmt.b32":
            source = x | others[0] << 32
            picked = [int(given[2], 0) >> 4 * i & 0xF for i in range(4)]
            parts = [(source >> 8 * (p & 7) & 0xFF) << 8 * i for i, p in enumerate(picked)]
            result = sum(parts[1:], parts[0])
        elif name in ("sub.f32", "mul.f32"):
            a, b = _float32(x), _float32(others[0])
            number = a - b if name == "sub.f32" else a * b
            result = number.view(torch.int32).long() & 0xFFFFFFFF
        elif name.startswith("cvt.rn.f16x2.e"):
            stored = torch.float8_e4m3fn if "e4m3" in name else torch.float8_e5m2
            low, high = ((x >> shift & 0xFF).to(torch.uint8).view(stored) for shift in (0, 8))
            result = _paired(_bits(low.half(), FP16), _bits(high.half(), FP16))
        elif name == "cvt.f32.f16":
            wide = x.to(torch.int32).to(torch.int16).view(FP16).float()
            result = wide.view(torch.int32).long() & 0xFFFFFFFF
        elif name.startswith("cvt.rn."):
            result = _paired(_bits(_float32(others[0]), kind), _bits(_float32(x), kind))
        elif name.startswith("fma.rn."):
            a, b, c = (_halves(each, kind) for each in (x, *others))
            result = _paired(*(_bits(a[i] * b[i] + c[i], kind) for i in range(2)))
        else:
            raise AssertionError(f"the test does not know {line}")
        registers[into] = result
    return registers["$0"]


def pairs(form: str) -> tuple[Bits, torch.Tensor]:
    """Every stored pair of a format, and its two values."""
    if form.startswith("int4"):
        stored = torch.arange(256)
        low, high = stored & 15, stored >> 4
        if form == "int4":
            return stored, torch.stack((low, high)).double()
        return stored, torch.stack([(n ^ 8) - 8 for n in (low, high)]).double()
    if form == "mxfp4":
        stored = torch.arange(256)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        numbers = torch.cat((sizes, -sizes))
        return stored, torch.stack([numbers[n] for n in (stored & 15, stored >> 4)])
    stored = torch.arange(65536)
    dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn
    values = [(stored >> shift & 0xFF).to(torch.uint8).view(dtype).double() for shift in (0, 8)]
    return stored, torch.stack(values)


@pytest.mark.parametrize("value", [BF16, FP16])
@pytest.mark.parametrize("zero", [None, "whole", "fraction"])
@pytest.mark.parametrize("scaled", [None, "pair", "wide"])
@pytest.mark.parametrize("form", PAIRS)
def test_every_pair(form: str, scaled: str | None, zero: str | None, value: torch.dtype) -> None:
    if scaled == "wide" and (zero or form not in ("int8", "fp8")):
        pytest.skip("values are multiplied in fp32 where they are decoded through it")
    stored, expected = pairs(form)
    storage = {"int8": torch.int8, "int4": torch.uint8, "int4_signed": torch.uint8}
    point = None if zero is None else torch.uint8 if zero == "whole" else value
    operands = [stored]
    if point is not None:
        number = 11.0 if zero == "whole" else 6.25
        pair = _bits(torch.tensor(-(number + offset(form, value, point))), value)
        operands.append(torch.full_like(stored, int(_paired(pair, pair))))
        expected = expected - number
    elif form == "int4":
        expected = expected - formats.named(form).origin
    if scaled == "pair":
        pair = _bits(torch.tensor(0.75), value)
        operands.append(torch.full_like(stored, int(_paired(pair, pair))))
        expected = expected.to(value).double() * 0.75
    elif scaled == "wide":
        bits = torch.tensor(0.77).view(torch.int32).long()
        operands.append(torch.full_like(stored, int(bits)))
        expected = (expected.float() * 0.77).double()
    program = pair_program(form, storage.get(form, torch.float8_e4m3fn), value, point, scaled)
    found = torch.stack(_halves(run(program, operands), value))
    expected = expected.to(value).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
