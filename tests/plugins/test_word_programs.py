"""The PTX that decodes weights, executed instruction by instruction, gives the format's values.
Words have equal values, random ones, and every pair of values."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.word_decoders import PAIRS, offset, program

from tmm_core import formats

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = {"bf16": BF16, "f16": FP16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MASK = 0xFFFFFFFF


def bits(t: Tensor) -> Tensor:
    """Unsigned 32-bit words of 32-bit numbers."""
    return t.view(torch.int32).to(torch.int64) & MASK


def words(t: Tensor) -> Tensor:
    """32-bit words as int32, whose bytes can be viewed."""
    return torch.where(t >= 2**31, t - 2**32, t).to(torch.int32)


def halves(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The 16-bit floats of words, the low one first, in fp64."""
    return words(t).view(dtype).unflatten(-1, (-1, 2)).double()


def pairs(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    both = torch.stack((low, high), -1).to(dtype).contiguous()
    return bits(both.view(torch.int32)[..., 0])


class Machine:
    """Executes PTX: a word per lane in each register, and a method for each instruction."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        self.registers = dict(given)
        self.lanes = len(next(iter(given.values())))

    def read(self, name: str) -> Tensor:
        if name in self.registers:
            return self.registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)  # 0f: of fp32 bits
        return torch.full((self.lanes,), number, dtype=torch.int64)

    def run(self, text: str) -> None:
        for line in text.strip("{}").split(";"):
            if not (line := line.strip()) or line.startswith(".reg"):
                continue
            name, _, rest = line.partition(" ")
            places = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
            operation = name.partition(".")[0]
            instruction = self.and_ if operation == "and" else getattr(self, operation)
            instruction(name.split(".")[1:], *places)

    def xor(self, kind: list[str], to: str, a: str, b: str) -> None:
        self.registers[to] = self.read(a) ^ self.read(b)

    def and_(self, kind: list[str], to: str, a: str, b: str) -> None:
        self.registers[to] = self.read(a) & self.read(b)

    def shr(self, kind: list[str], to: str, a: str, by: str) -> None:
        assert kind == ["u32"]
        self.registers[to] = self.read(a) >> int(by)

    def shl(self, kind: list[str], to: str, a: str, by: str) -> None:
        self.registers[to] = self.read(a) << int(by) & MASK

    def mul(self, kind: list[str], to: str, a: str, b: str) -> None:
        x, y = self.read(a), self.read(b)
        if kind == ["f32"]:
            self.registers[to] = bits(words(x).view(FP32) * words(y).view(FP32))
        else:
            assert kind == ["lo", "u32"]
            self.registers[to] = x * y & MASK

    def prmt(self, kind: list[str], to: str, a: str, b: str, chosen: str) -> None:
        both = self.read(a) | self.read(b) << 32
        found = torch.zeros_like(both)
        for place in range(4):
            byte = (int(chosen, 0) >> 4 * place) & 7
            # Shifting a negative int64 brings in ones, which the mask removes.
            found |= ((both >> 8 * byte) & 0xFF) << 8 * place
        self.registers[to] = found

    def lop3(self, kind: list[str], to: str, a: str, b: str, c: str, table: str) -> None:
        x, y, z = map(self.read, (a, b, c))
        found = torch.zeros_like(x)
        for row in range(8):
            if int(table, 0) >> row & 1:
                terms = [t if row & m else ~t & MASK for t, m in ((x, 4), (y, 2), (z, 1))]
                found |= terms[0] & terms[1] & terms[2]
        self.registers[to] = found

    def mov(self, kind: list[str], to: str, a: str) -> None:
        value = self.read(a) if a[0] != "{" else None
        if to[0] == "{":
            assert value is not None
            low, high = re.findall(r"\w+", to)
            self.registers |= {low: value & 0xFFFF, high: value >> 16}
        else:
            assert value is not None
            self.registers[to] = value

    def fma(self, kind: list[str], to: str, a: str, b: str, c: str) -> None:
        dtype = FLOATS[kind[1].removesuffix("x2")]
        x, y, z = (halves(self.read(each), dtype) for each in (a, b, c))
        both = (x * y + z).to(dtype)
        self.registers[to] = pairs(both[..., 0], both[..., 1], dtype)

    def sub(self, kind: list[str], to: str, a: str, b: str) -> None:
        x, y = (words(self.read(each)).view(FP32) for each in (a, b))
        self.registers[to] = bits(x - y)

    def cvt(self, kind: list[str], to: str, *given: str) -> None:
        target, source = kind[-2], kind[-1]
        if source == "f32":  # the first operand becomes the upper half
            high, low = (words(self.read(each)).view(FP32) for each in given)
            self.registers[to] = pairs(low, high, FLOATS[target.removesuffix("x2")])
        elif target == "f32":
            half = self.read(given[0]).to(torch.int32).view(FP16)[::2].to(FP32)
            self.registers[to] = bits(half)
        else:
            narrow = self.read(given[0]).to(torch.int32).view(FLOATS[source.removesuffix("x2")])
            low, high = narrow.unflatten(-1, (-1, 4))[:, :2].to(FP32).unbind(-1)
            self.registers[to] = pairs(low, high, FP16)


CASES = [
    (name, storage)
    for name in PAIRS
    for storage in formats.named(name).storage[: 2 if name == "fp8" else 1]
]


def stored_pairs(form: str) -> Tensor:
    """Every pair of stored values of a format, in the lowest bits of a register."""
    return torch.arange(2**8 if formats.named(form).pack == 2 else 2**16)


def twice(number: float, dtype: torch.dtype) -> int:
    """A word with the same 16-bit float twice."""
    both = torch.full((1,), number)
    return int(pairs(both, both, dtype))


@pytest.mark.parametrize("word", [False, True])
@pytest.mark.parametrize("value", [BF16, FP16])
@pytest.mark.parametrize("zero", [None, "whole", "fraction"])
@pytest.mark.parametrize("scaled", [None, "pair", "wide"])
@pytest.mark.parametrize(("name", "storage"), CASES, ids=str)
def test_every_pair(
    name: str, storage: torch.dtype, scaled: str | None, zero: str | None, value: torch.dtype,
    word: bool,
) -> None:  # fmt: skip
    """Alone, and in a word with other values. In a word an 8-bit value is paired with its
    neighbour, a 4-bit value with the value four places higher."""
    if scaled == "wide" and (zero or name not in ("int8", "fp8")):
        pytest.skip("only formats that are decoded through fp32 are scaled in fp32")
    form = formats.named(name)
    stored = stored_pairs(name)
    count, codes = 1, stored.to(torch.int16).view(storage).unflatten(-1, (-1, 2))
    if form.pack == 2:
        codes = form.unpacked(stored.to(torch.uint8).view(storage)[:, None])
    if word:
        count = 2 * form.pack
        others = torch.randint(0, 2**32, stored.shape)
        stored = stored | others & (0xFFFF0000 if form.pack == 1 else 0xFFFFFF00)
        codes = form.unpacked(words(stored).view(storage).unflatten(-1, (-1, 4)))
    # The pairs of each word, [words, pairs, 2].
    four_apart = codes.unflatten(-1, (2, -1)).mT
    both = four_apart if form.pack == 2 and word else codes.unflatten(-1, (-1, 2))
    expected = form.dequantize(both).double()
    point = None if zero is None else torch.uint8 if zero == "whole" else value
    given = {f"${count}": stored}
    if point is not None:
        number = 11.0 if zero == "whole" else 6.25
        expected = expected + (form.origin or 0) - number
        register = twice(-(number + offset(name, value, point)), value)
        given[f"${count + 1}"] = torch.full_like(stored, register)
    if scaled is not None:
        exact = 0.75 if scaled == "pair" else 0.77
        of_wide = int(bits(torch.full((1,), exact)))
        register = twice(exact, value) if scaled == "pair" else of_wide
        given[f"${count + 1 if point is None else count + 2}"] = torch.full_like(stored, register)
        rounded = expected.to(value).double() if scaled == "pair" else expected
        expected = rounded * (exact if scaled == "pair" else torch.tensor(exact).double())
        expected = expected.to(FP32).double() if scaled == "wide" else expected
    machine = Machine(given)
    machine.run(program(name, storage, value, point, scaled, word=word))
    for i in range(count):
        found, truth = halves(machine.registers[f"${i}"], value), expected[:, i].to(value).double()
        torch.testing.assert_close(found, truth, rtol=0, atol=0, equal_nan=True)
