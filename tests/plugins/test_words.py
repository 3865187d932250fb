"""Operands loaded word by word: their source runs as Python over the bytes of a memory that says
which words may be touched."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

from tmm_triton import words

BLOCK_K = 8


class Memory:
    """Rows of 16-bit elements from any byte on, and the addresses of what is loaded."""

    def __init__(self, random: np.random.Generator, rows: int, columns: int, stride: int) -> None:
        self.elements = random.integers(0, 2**16, (rows, columns), dtype=np.uint16)
        # Aligned words around the matrix; what is no element of it is to be left out.
        self.base = 2 * int(random.integers(0, 4))
        self.memory = random.integers(
            0, 2**16, (self.base // 2 + rows * stride + 64) // 4 * 4, dtype=np.uint16
        )
        self.owned = np.zeros(len(self.memory), dtype=bool)
        for row in range(rows):
            at = self.base // 2 + row * stride
            self.memory[at : at + columns] = self.elements[row]
            self.owned[at : at + columns] = True

    def load(self, address: Any, mask: Any, other: int, eviction_policy: str) -> Any:
        address, mask = np.broadcast_arrays(np.asarray(address), np.asarray(mask))
        assert (address % 8 == 0).all()
        loaded = np.full(address.shape, other, dtype=np.uint64)
        word = address[mask] // 8
        assert (word >= 0).all()
        assert (word < len(self.memory) // 4).all()
        # A word without a byte of the matrix may lie where nothing may be read.
        assert self.owned.reshape(-1, 4)[word].any(axis=1).all()
        loaded[mask] = self.memory.view(np.uint64)[word]
        return loaded.view(Words)


class Words(np.ndarray):
    """A tensor of integers, or an address."""

    def to(self, dtype: Any, bitcast: bool = False) -> Words:
        return self if dtype is None else self.astype(dtype)

    def __add__(self, other: Any) -> Words:
        # A pointer goes on by words.
        return super().__add__(other * 8 if getattr(self, "pointer", False) else other)


class Pointer(Words):
    pointer = True


def interpreted(memory: Memory) -> dict[str, Any]:
    """``words``'s functions as Python ones."""

    class Address(int):
        def to(self, dtype: Any) -> Any:
            return np.asarray(int(self), dtype=dtype).view(Words)

    def where(condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, a, b).view(Words)

    def funnel(low: Any, high: Any, skew: Any) -> Any:
        bits = low.astype(object) | (high.astype(object) << 64)
        return ((bits >> skew.astype(object)) & (2**64 - 1)).astype(np.uint64).view(Words)

    def load(address: Any, **options: Any) -> Any:
        return memory.load(np.asarray(address), **options)

    class Kind:
        """What an address is cast to: it goes on by eight bytes."""

    gl = types.SimpleNamespace(
        arange=lambda start, end, layout: np.arange(start, end).view(Words),
        expand_dims=lambda x, axis: np.expand_dims(x, axis),
        where=where,
        minimum=np.minimum,
        maximum=np.maximum,
        load=load,
        BlockedLayout=lambda *fields: None,
        SliceLayout=lambda axis, parent: None,
        pointer_type=lambda of: Kind,
        int32=np.int64,
        int64=np.int64,
        uint64=np.uint64,
    )

    def to(self: Words, dtype: Any, bitcast: bool = False) -> Any:
        if dtype is Kind:
            return np.asarray(self).view(Pointer)
        return np.asarray(self).astype(dtype).view(Words)

    Words.to = to  # type: ignore[method-assign]
    names: dict[str, Any] = {"gl": gl, "_funnel": funnel, "min": min}
    for name in ("box_rows", "box_words", "box_of"):
        names[name] = types.FunctionType(getattr(words, name).fn.__code__, names, name)
    names["address"] = Address
    return names


@pytest.mark.parametrize("along_k", [False, True])
def test_a_box_is_what_lies_there(along_k: bool) -> None:
    random = np.random.default_rng(along_k)
    C = types.SimpleNamespace(BLOCK_K=BLOCK_K, LOADERS=1, policy="")
    for _ in range(200):
        size, K = (int(x) for x in random.integers(1, 40, 2))
        rows, columns = (size, K) if along_k else (K, size)
        stride = columns + int(random.integers(0, 9))
        memory = Memory(random, rows, columns, stride)
        run = interpreted(memory)
        box = [16, BLOCK_K] if along_k else [BLOCK_K, 16]
        # TMA's boxes, and so these, begin at multiples of 16 where memory runs along them.
        at = int(random.integers(0, -(-size // 16))) * 16
        operand = (run["address"](memory.base), np.asarray(stride).view(Words))
        of = run["box_rows"](operand, at, size, K, box, along_k, C)
        last = -(-K // BLOCK_K)
        for step in range(last + 2):
            loaded = run["box_words"](of, step, last, K, along_k, C)
            value = np.ascontiguousarray(run["box_of"](loaded, of, along_k)).view(np.uint16)
            k = step * BLOCK_K
            first = (at, k) if along_k else (k, at)
            part = memory.elements[first[0] : first[0] + box[0], first[1] : first[1] + box[1]] * (
                step < last
            )
            got = np.asarray(value).reshape(box)
            np.testing.assert_array_equal(got[: part.shape[0], : part.shape[1]], part)
            # Past the end of K are zeros: what they multiply need not be numbers.
            past = got[:, part.shape[1] :] if along_k else got[part.shape[0] :]
            assert not past.any()
