"""Decodes 32-bit words of packed weights to 16-bit floats by PTX instructions in registers.

A word holds 8 values of 4 bits or 4 of 8 bits, lowest bits first. Each program decodes two words at
a time into pairs, because a register of a tensor core operand holds two 16-bit values: the i-th
pair holds the i-th value of the first word and of the second. No value moves between threads and no
table is read.

4-bit integers and int8 are inserted into the mantissa of a float whose unit in the last place is
one, from which a subtraction removes the offset. Both steps are exact.
"""

from __future__ import annotations

import torch

#: Values in a word, by format.
PER_WORD = {"int4": 8, "int4_signed": 8, "int8": 4, "fp8": 4}


def program(form: str, stored: torch.dtype, value: torch.dtype) -> str:
    """The PTX that decodes two words, ``$n`` and ``$n+1``, to the ``n = PER_WORD[form]`` registers
    ``$0`` to ``$n-1``.

    Args:
        form: A format of :data:`PER_WORD`.
        stored: The dtype of its stored numbers.
        value: ``torch.bfloat16`` or ``torch.float16``.
    """
    brain = value is torch.bfloat16
    if form in ("int4", "int4_signed"):
        lines = _int4(brain, signed=form == "int4_signed")
    elif form == "int8":
        lines = _int8(brain)
    else:
        lines = _fp8("e4m3x2" if stored is torch.float8_e4m3fn else "e5m2x2", brain)
    return "\n".join(["{", *lines, "}"])


def _int4(brain: bool, signed: bool) -> list[str]:
    """``q − 8``, or ``q`` in two's complement: ``q`` (``q + 8``) becomes the lowest bits of 128 in
    bfloat16, or of 1024 in float16."""
    magic, one, offset, fma = (
        ("0x43004300", "0x3F803F80", "0xC308C308", "fma.rn.bf16x2")
        if brain
        else ("0x64006400", "0x3C003C00", "0xE408E408", "fma.rn.f16x2")
    )
    lines = [
        ".reg .b32 low, high, t, one, offset;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
        *(f"xor.b32 {half}, {half}, 0x88888888;" for half in ("low", "high") if signed),
        f"mov.b32 one, {one};",
        f"mov.b32 offset, {offset};",
    ]
    for i in range(8):
        half = "low" if i < 4 else "high"
        lines += [
            f"shr.u32 t, {half}, {4 * (i % 4)};",
            f"lop3.b32 t, t, 0x000F000F, {magic}, 0xEA;",  # (t & mask) | magic
            f"{fma} ${i}, t, one, offset;",
        ]
    return lines


def _int8(brain: bool) -> list[str]:
    """``q + 128`` becomes the lowest byte of 2²³ in float32, from which 2²³ + 128 is subtracted."""
    round_pair = "cvt.rn.bf16x2.f32" if brain else "cvt.rn.f16x2.f32"
    lines = [
        ".reg .b32 u, v, s, t, magic;",
        ".reg .f32 x, y, offset;",
        "xor.b32 u, $4, 0x80808080;",
        "xor.b32 v, $5, 0x80808080;",
        "mov.b32 magic, 0x4B000000;",
        "mov.b32 offset, 0x4B000080;",
    ]
    for i in range(4):
        lines += [
            f"prmt.b32 s, u, magic, 0x754{i};",
            f"prmt.b32 t, v, magic, 0x754{i};",
            "mov.b32 x, s;",
            "mov.b32 y, t;",
            "sub.f32 x, x, offset;",
            "sub.f32 y, y, offset;",
            f"{round_pair} ${i}, y, x;",
        ]
    return lines


def _fp8(kind: str, brain: bool) -> list[str]:
    """By way of float16, which holds every 8-bit float."""
    lines = [".reg .b32 t;", ".reg .b16 pair, rest, p, q;", ".reg .f32 x, y;"]
    for i in range(4):
        lines += [
            f"prmt.b32 t, $4, $5, 0x00{4 + i}{i};",
            "mov.b32 {pair, rest}, t;",
            f"cvt.rn.f16x2.{kind} " + ("t" if brain else f"${i}") + ", pair;",
        ]
        if brain:
            lines += [
                "mov.b32 {p, q}, t;",
                "cvt.f32.f16 x, p;",
                "cvt.f32.f16 y, q;",
                f"cvt.rn.bf16x2.f32 ${i}, y, x;",
            ]
    return lines
