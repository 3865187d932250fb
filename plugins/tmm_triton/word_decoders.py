"""Decodes 32-bit words of packed weights to 16-bit floats by PTX instructions in registers.

A word holds 8 values of 4 bits or 4 of 8 bits, lowest bits first. They are decoded into pairs,
because a register of a tensor core operand holds two 16-bit values. No value moves between threads
and no table is read.

4-bit integers and int8 are inserted into the mantissa of a float whose unit in the last place is
one. A subtraction then removes the offset. Both steps are exact.
"""

from __future__ import annotations

import torch

#: Values in a word, by format.
PER_WORD = {"int4": 8, "int4_signed": 8, "int8": 4, "fp8": 4}
#: Formats of :func:`program`.
PAIRS = (*PER_WORD, "mxfp4", "mxfp8")


def offset(form: str, value: torch.dtype, zero: torch.dtype) -> int:
    """Return the number that is subtracted together with a zero point of dtype ``zero`` after
    :func:`program`'s decoding. An integer zero point is subtracted together with the offset
    that an int4 number has in the mantissa of a float. A fractional one is subtracted afterwards,
    because the mantissa has no bits for it."""
    if form not in ("int4", "int4_signed"):
        return 0
    origin = 8 if form == "int4_signed" else 0
    if zero.is_floating_point:
        return origin - 8
    return origin + (128 if value is torch.bfloat16 else 1024)


def program(
    form: str,
    stored: torch.dtype,
    value: torch.dtype,
    zero: torch.dtype | None = None,
    scaled: str | None = None,
    *,
    word: bool = False,
) -> str:
    """The PTX that decodes the lowest bits of ``$1``, two neighbours in memory, to a pair ``$0``.

    Args:
        form: One of :data:`PAIRS`.
        stored: The dtype of its stored numbers.
        value: ``torch.bfloat16`` or ``torch.float16``.
        zero: The dtype of zero points: ``$2`` is a pair of ``-(zero point + offset(…))``.
        scaled: The last operand multiplies the result: ``"pair"``, a pair, or, for formats that
            are decoded through fp32, ``"wide"``, one fp32 number.
        word: Decode a whole word, ``$n``, to its ``n`` pairs, ``$0`` to ``$n-1``. 8-bit values make
            two pairs of neighbours. 4-bit values make four: each value goes with the one that is
            four places higher. Zero points and scales follow as ``$n+1`` and ``$n+2``.
    """
    count = 1
    if word:
        count = 2 if form in ("int8", "fp8", "mxfp8") else 4
    brain = value is torch.bfloat16
    kind = "bf16x2" if brain else "f16x2"
    one = "0x3F803F80" if brain else "0x3C003C00"
    source, origin = f"${count}", f"${count + 1}"
    factor = origin if zero is None else f"${count + 2}"
    wide = factor if scaled == "wide" else ""
    lines = [
        ".reg .b32 t, u, s, one, offset, magic;",
        ".reg .b16 low, high, p, q;",
        ".reg .f32 x, y, scale;",
        f"mov.b32 one, {one};",
    ]
    for i in range(count):
        if form in ("int4", "int4_signed"):
            lines += _int4(source, i, count, brain, signed=form == "int4_signed")
            if zero is None or zero.is_floating_point:
                own = "0xC308C308" if brain else "0xE408E408"
                lines += [f"mov.b32 offset, {own};", f"fma.rn.{kind} t, t, one, offset;"]
        elif form == "int8":
            lines += _int8(source, i, brain, wide)
        elif form == "mxfp4":
            lines += _e2m1(source, i, count, brain)
        else:
            of = "e4m3x2" if stored is torch.float8_e4m3fn else "e5m2x2"
            lines += _fp8(source, i, of, brain, wide)
        if zero is not None:
            lines += [f"fma.rn.{kind} t, t, one, {origin};"]
        if scaled == "pair":
            lines += ["mov.b32 offset, 0x80008000;"]  # negative zero keeps the sign of zero
            lines += [f"fma.rn.{kind} t, t, {factor}, offset;"]
        lines += [f"mov.b32 ${i}, t;"]
    return "\n".join(["{", *lines, "}"])


def _int4(source: str, i: int, count: int, brain: bool, signed: bool) -> list[str]:
    """``q``, or ``q + 8`` in two's complement, becomes the lowest bits of 128 in bfloat16, or of
    1024 in float16. In a word both numbers of the i-th pair have the same place in its halves. The
    higher one of a single pair is moved to the higher half by a multiplication."""
    magic = 0x43004300 if brain else 0x64006400
    if signed:
        magic |= 0x00080008  # its sign bit is flipped
    return [
        f"mul.lo.u32 t, {source}, 0x1001;" if count == 1 else f"shr.u32 t, {source}, {4 * i};",
        f"lop3.b32 t, t, 0x000F000F, {magic:#010x}, 0x6A;",  # (t & mask) ^ magic
    ]


def _int8(source: str, i: int, brain: bool, wide: str) -> list[str]:
    """``q + 128`` becomes the lowest byte of 2²³ in float32, from which 2²³ + 128 is subtracted."""
    return [
        f"xor.b32 u, {source}, 0x80808080;",
        "mov.b32 magic, 0x4B000000;",
        f"prmt.b32 s, u, magic, 0x754{2 * i};",
        "mov.b32 x, s;",
        f"prmt.b32 s, u, magic, 0x754{2 * i + 1};",
        "mov.b32 y, s;",
        "sub.f32 x, x, 0f4B000080;",
        "sub.f32 y, y, 0f4B000080;",
        *_rounded(brain, wide),
    ]


def _e2m1(source: str, i: int, count: int, brain: bool) -> list[str]:
    """Exponent and mantissa become the lowest exponent bits and the highest mantissa bit of a
    16-bit float, which is multiplied by the ratio of both units: 2**126 or 2**14. Both numbers are
    brought to their halves as by :func:`_int4`."""
    shift, mask, ratio = (
        (6, "0x01C001C0", "0x7E807E80") if brain else (9, "0x0E000E00", "0x74007400")
    )
    kind = "bf16x2" if brain else "f16x2"
    up = shift - 4 * i
    return [
        f"mul.lo.u32 u, {source}, 0x1001;" if count == 1 else f"mov.b32 u, {source};",
        f"shl.b32 s, u, {12 - 4 * i};",
        "and.b32 s, s, 0x80008000;",
        f"shl.b32 u, u, {up};" if up >= 0 else f"shr.u32 u, u, {-up};",
        f"lop3.b32 t, u, {mask}, s, 0xEA;",  # (u & mask) | s
        f"mov.b32 u, {ratio};",
        "mov.b32 offset, 0x80008000;",
        f"fma.rn.{kind} t, t, u, offset;",
    ]


def _fp8(source: str, i: int, kind: str, brain: bool, wide: str) -> list[str]:
    """Through float16, which holds every 8-bit float."""
    lines = [
        f"mov.b32 {{low, high}}, {source};",
        f"cvt.rn.f16x2.{kind} t, {('low', 'high')[i]};",
    ]
    if brain or wide:
        lines += ["mov.b32 {p, q}, t;", "cvt.f32.f16 x, p;", "cvt.f32.f16 y, q;"]
        lines += _rounded(brain, wide)
    return lines


def _rounded(brain: bool, wide: str) -> list[str]:
    """``x`` and ``y``, multiplied by the operand ``wide`` if there is one, as a pair ``t``."""
    lines = []
    if wide:
        lines += [f"mov.b32 scale, {wide};"]
        lines += ["mul.f32 x, x, scale;", "mul.f32 y, y, scale;"]
    return [*lines, "cvt.rn.bf16x2.f32 t, y, x;" if brain else "cvt.rn.f16x2.f32 t, y, x;"]
