"""Operands loaded word by word: their source runs as Python over a memory that knows which of its
words may be read."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from tmm_triton import unaligned_loads

pytest.importorskip("triton.experimental.gluon")


BLOCK_K = 8


class Matrix:
    """Rows of 16-bit elements that begin at any even address."""

    def __init__(self, random: np.random.Generator, rows: int, columns: int, stride: int) -> None:
        self.elements = random.integers(0, 2**16, (rows, columns), dtype=np.uint16)
        self.address = 2 * int(random.integers(0, 4))
        first = self.address // 2
        # The memory around the matrix holds arbitrary numbers, which must be left out.
        around = first + rows * stride + 64
        self.memory = random.integers(0, 2**16, around // 4 * 4, dtype=np.uint16)
        self.owned = np.zeros(len(self.memory), dtype=bool)
        for row, elements in enumerate(self.elements):
            at = first + row * stride
            self.memory[at : at + columns] = elements
            self.owned[at : at + columns] = True

    def load(self, address: Any, mask: Any, other: int, eviction_policy: str) -> Tensor:
        address, mask = np.broadcast_arrays(np.asarray(address), np.asarray(mask))
        assert (address % 8 == 0).all()
        word = address[mask] // 8
        # A word without a byte of the matrix may lie where nothing may be read.
        assert self.owned.reshape(-1, 4)[word].any(axis=1).all()
        loaded = np.full(address.shape, other, dtype=np.uint64)
        loaded[mask] = self.memory.view(np.uint64)[word]
        return loaded.view(Tensor)


class Tensor(np.ndarray):
    """Integers in registers."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if dtype is Words:
            return np.asarray(self).view(Words)
        return np.asarray(self).astype(dtype).view(Tensor)


class Words(Tensor):
    """Addresses of words of eight bytes, which is what they go on by."""

    def __add__(self, words: int) -> Words:
        return (np.asarray(self) + 8 * words).view(Words)


def funnel(low: Any, high: Any, skew: Any) -> Tensor:
    """The same in Python as the kernel's assembly."""
    bits = low.astype(object) | (high.astype(object) << 64)
    return ((bits >> skew.astype(object)) & (2**64 - 1)).astype(np.uint64).view(Tensor)


def python(matrix: Matrix) -> types.SimpleNamespace:
    """The module's functions, over that memory."""
    language = types.SimpleNamespace(
        arange=lambda start, end, layout: np.arange(start, end).view(Tensor),
        expand_dims=np.expand_dims,
        where=lambda condition, a, b: np.where(condition, a, b).view(Tensor),
        minimum=np.minimum,
        maximum=np.maximum,
        load=matrix.load,
        BlockedLayout=lambda *fields: None,
        SliceLayout=lambda axis, parent: None,
        pointer_type=lambda of: Words,
        int32=np.int64,
        int64=np.int64,
        uint64=np.uint64,
    )
    names: dict[str, Any] = {"gl": language, "_funnel": funnel, "min": min}
    for name in ("box_rows", "box_words", "box_of"):
        names[name] = types.FunctionType(getattr(unaligned_loads, name).fn.__code__, names, name)
    return types.SimpleNamespace(**names)


@pytest.mark.parametrize("along_k", [False, True])
def test_a_box_holds_the_bytes_in_memory(along_k: bool) -> None:
    random = np.random.default_rng(along_k)
    C = types.SimpleNamespace(BLOCK_K=BLOCK_K, LOADERS=1, policy="")
    for _ in range(200):
        size, K = (int(x) for x in random.integers(1, 40, 2))
        rows, columns = (size, K) if along_k else (K, size)
        stride = columns + int(random.integers(0, 9))
        matrix = Matrix(random, rows, columns, stride)
        run = python(matrix)
        box = [16, BLOCK_K] if along_k else [BLOCK_K, 16]
        at = int(random.integers(0, -(-size // 16))) * 16
        operand = tuple(np.asarray(x).view(Tensor) for x in (matrix.address, stride))
        of = run.box_rows(operand, at, size, K, box, along_k, C)
        last = -(-K // BLOCK_K)
        for step in range(last + 2):
            loaded = run.box_words(of, step, last, K, along_k, C)
            value = np.ascontiguousarray(run.box_of(loaded, of, along_k))
            got = np.asarray(value).view(np.uint16).reshape(box)
            row, column = (at, step * BLOCK_K) if along_k else (step * BLOCK_K, at)
            wanted = matrix.elements[row : row + box[0], column : column + box[1]]
            np.testing.assert_array_equal(got[: wanted.shape[0], : wanted.shape[1]], wanted)
            # Past the end of K are zeros: what they multiply need not be numbers.
            past = got[:, wanted.shape[1] :] if along_k else got[wanted.shape[0] :]
            assert not past.any()
