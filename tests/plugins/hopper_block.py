"""A Hopper thread block on the CPU: enough of Gluon to run a warp-specialised kernel's source.

The kernel's functions run as plain Python. Every partition has a thread, and one thread runs at a
time. The next one is drawn at random at every step, so that each seed is an interleaving. The model
takes every liberty that the hardware has:

* A bulk load or store happens at any later time, in any order.
* A ``wgmma`` reads its operands when it is waited for, not when it is issued, so that a
  stage that was released too early is overwritten first.
* An mbarrier shows no more than the parity of its phase.
* The previous launch runs until ``gdc_wait``. A load, a store or a read of a flag before that
  raises :class:`OrderError`, except in memory that the caller says nobody writes.

When no thread can run and no copy is left, :class:`DeadlockError` names where each one waits.
"""

from __future__ import annotations

import importlib.util
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tmm_triton import ragged_tiles, stream_k
from tmm_triton.hopper import (
    consumer,
    hopper_kernel,
    producer,
    scheduler,
    step_scales,
    tile_epilogue,
)

#: Modules that define the kernel's functions.
MODULES = (
    ragged_tiles, stream_k, scheduler, producer, tile_epilogue, step_scales, consumer,
    hopper_kernel,
)  # fmt: skip


class DeadlockError(Exception):
    """No partition can go on."""


class OrderError(AssertionError):
    """Memory is read or written, or the next launch is started, while the previous launch may still
    run. Or the block ends before a load has."""


class Scheduler:
    """Runs threads one at a time, the next one drawn at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ready: dict[threading.Thread, Callable[[], bool]] = {}
        self.turns: dict[threading.Thread, threading.Semaphore] = {}
        #: Bulk copies under way, each as a function that completes it.
        self.copies: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def run(self, partitions: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> None:
        threads = [threading.Thread(target=self._partition, args=p) for p in partitions]
        for thread in threads:
            self.turns[thread] = threading.Semaphore(0)
            self.ready[thread] = lambda: True
            thread.start()
        self._pass_on()
        self.done.wait()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """A step of the calling partition: others may run, and go on until it may."""
        me = threading.current_thread()
        if me not in self.turns:  # before the partitions start
            assert condition()
            return
        self.ready[me] = condition
        self._pass_on()
        self.turns[me].acquire()
        if self.failure is not None:
            raise self.failure

    def _partition(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        me = threading.current_thread()
        self.turns[me].acquire()
        try:
            if self.failure is None:
                function(*arguments)
        except BaseException as error:
            self.failure = self.failure or error
        del self.ready[me]
        self._pass_on()

    def _pass_on(self) -> None:
        while True:
            if not self.ready:
                self.done.set()
                return
            able = [t for t, condition in self.ready.items() if self.failure or condition()]
            if self.copies and (not able or self.random.random() < 0.5):
                self.copies.pop(self.random.randrange(len(self.copies)))()
                continue
            if not able:
                self.failure = DeadlockError(f"{len(self.ready)} partitions wait for each other")
                continue
            self.turns[self.random.choice(able)].release()
            return


class Barrier:
    """An mbarrier: flips its phase when all arrivals and all bytes are there."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending -= 1
        self._flip()

    def land(self, count: int) -> None:
        self.bytes -= count
        self._flip()

    def _flip(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class Block(np.ndarray):
    """A tensor in registers."""

    type = types.SimpleNamespace(layout=None)

    def permute(self, order: Sequence[int]) -> Block:
        return self.transpose(order)

    def split(self) -> tuple[Block, Block]:
        return self[..., 0], self[..., 1]

    def to(self, dtype: Any) -> Block:
        return self.astype(dtype)


class Shared:
    """A view of shared memory."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data[(*[slice(None)] * dim, slice(start, start + length))])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.transpose(order))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.reshape(shape, copy=False))

    #: The kernel passes them on.
    dtype = layout = None

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        """The boxes that begin here as one: each below the other, or to its right if they are as
        high as it. Words are elements here."""
        if dtype is not None:
            return self
        high, wide = self.data.shape[-2:]
        down, along = self.data.strides[-2:]
        if high != shape[0]:
            view = np.lib.stride_tricks.as_strided(self.data, tuple(shape), (down, along))
            return Shared(view)
        boxes = high, shape[1] // wide, wide
        return Boxes(np.lib.stride_tricks.as_strided(self.data, boxes, (down, high * down, along)))

    def load(self, layout: Any) -> Block:
        return self.data.copy().view(Block)

    def store(self, value: np.ndarray) -> None:
        self.data[...] = value


class Boxes(Shared):
    """Boxes [rows, box, column] that are read as one [rows, columns]. In swizzled shared memory
    boxes follow one another, each with rows of its own length."""

    @property
    def data(self) -> np.ndarray:
        return self._boxes.reshape(len(self._boxes), -1)

    @data.setter
    def data(self, boxes: np.ndarray) -> None:
        self._boxes = boxes


class Descriptor:
    """A tensor map: boxes of ``block_shape`` in a row-major matrix, or a stack of them."""

    layout = None
    dtype = np.float64

    def __init__(self, matrix: np.ndarray, block_shape: list[int], itemsize: int = 2) -> None:
        self.matrix, self.block_shape, self.itemsize = matrix, block_shape, itemsize

    def begins(self, at: Sequence[int]) -> None:
        """TMA's condition on where a box begins, without which a GPU stops with an illegal
        instruction: at 16 bytes. As boxes are small here, two elements stand for these."""
        if at[-1] % min(2, self.block_shape[-1]):
            raise OrderError(f"a box begins at column {at[-1]}")

    def read(self, at: Sequence[int]) -> np.ndarray:
        box = np.zeros(self.block_shape)
        part = self.matrix[
            tuple(slice(o, o + s) for o, s in zip(at, self.block_shape, strict=True))
        ]
        box[tuple(slice(s) for s in part.shape)] = part
        return box

    def write(self, at: Sequence[int], box: np.ndarray) -> None:
        part = self.matrix[
            tuple(slice(o, o + s) for o, s in zip(at, self.block_shape, strict=True))
        ]
        part[...] = box[tuple(slice(s) for s in part.shape)]


class Wrapped(Descriptor):
    """A tensor map of any shape and strides over all of a flat memory, whose addresses wrap at
    2**64 bytes."""

    def __init__(
        self, memory: np.ndarray, shape: Sequence[int], strides: Sequence[int], box: list[int],
        itemsize: int = 2,
    ) -> None:  # fmt: skip
        super().__init__(memory, box, itemsize)
        self.shape, self.strides = shape, strides

    def _inside(self, at: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Which elements of a box are inside, and where these are in memory."""
        inside = np.ones(self.block_shape, dtype=bool)
        address = np.zeros(self.block_shape, dtype=np.uint64)
        for axis, index in enumerate(np.indices(self.block_shape)):
            place = index + int(at[axis])
            inside &= (place >= 0) & (place < self.shape[axis])
            apart = self.strides[axis] * self.itemsize % 2**64
            address += place.astype(np.uint64) * np.uint64(apart)
        elements = address[inside] // np.uint64(self.itemsize)
        assert (elements < self.matrix.size).all(), "outside of memory"
        return inside, elements.astype(np.int64)

    def read(self, at: Sequence[int]) -> np.ndarray:
        inside, elements = self._inside(at)
        box = np.zeros(self.block_shape)
        box[inside] = self.matrix[elements]
        return box

    def write(self, at: Sequence[int], box: np.ndarray) -> None:
        inside, elements = self._inside(at)
        self.matrix[elements] = box[inside]


class Pointer:
    """An address into a flat array, or a block of them."""

    dtype = types.SimpleNamespace(element_ty=np.float64)

    def __init__(self, memory: np.ndarray, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


class Rows:
    """An operand that is loaded word by word."""

    dtype = types.SimpleNamespace(element_ty=np.float64)

    def __init__(self, matrix: np.ndarray) -> None:
        #: In its memory layout.
        self.matrix = matrix


class Sum:
    """An accumulator with a product still to be added."""

    def __init__(self, a: Shared, b: Shared, before: Any) -> None:
        self.a, self.b, self.before = a, b, before
        self.value: Block | None = None

    def finish(self) -> None:
        before = self.before.value if isinstance(self.before, Sum) else self.before
        self.value = (self.a.data @ self.b.data + before).view(Block)


class _Layout:
    """A layout of shared memory, which has no effect here."""

    def __init__(self, *fields: Any) -> None:
        pass

    @staticmethod
    def get_default_for(shape: Sequence[int], dtype: Any) -> None:
        return None


class _Local(threading.local):
    def __init__(self) -> None:
        self.sums: list[Sum] = []
        self.stores: list[list[bool]] = []


def shaped(*values: Any) -> bool:
    return any(isinstance(value, np.ndarray) and value.ndim for value in values)


def run_block(
    arguments: Sequence[Any],
    program: int,
    programs: int,
    seed: int,
    overlaps: bool = False,
    at_rest: Sequence[Descriptor] = (),
    module: types.ModuleType | None = None,
    kernel: tuple[str, Sequence[types.ModuleType]] = ("warp_specialized_kernel", MODULES),
    instead: Mapping[str, Any] | None = None,
) -> None:
    """Run one block of the kernel to its end.

    Args:
        arguments: The kernel's, with :class:`Descriptor` and :class:`Pointer` for theirs.
        program, programs: The block's place in a one-dimensional grid.
        seed: Chooses the interleaving.
        overlaps: The launch before still runs when the block begins; the block is to wait for it
            and to let the next one begin.
        at_rest: What nobody writes meanwhile.
        module: Its functions take the place of the functions of :data:`MODULES`.

    Raises:
        OrderError: It does not wait, or too late.
        DeadlockError: The partitions wait for each other.
    """
    scheduler, local = Scheduler(seed), _Local()
    loading: list[Callable[[], None]] = []
    memory: list[np.ndarray] = []
    ended = {"the launch before": not overlaps, "this one, for the next": False}

    def touch(what: Any = None) -> None:
        if not ended["the launch before"] and not any(what is each for each in at_rest):
            raise OrderError("touches memory before the launch before has ended")

    def wait_for_the_launch_before() -> None:
        ended["the launch before"] = True

    def let_the_next_begin() -> None:
        if not ended["the launch before"]:
            raise OrderError("lets the next launch begin before the launch before has ended")
        ended["this one, for the next"] = True

    def load(descriptor: Descriptor, at: Sequence[int], barrier: Barrier, slot: Shared) -> None:
        touch(descriptor)
        descriptor.begins(at)

        def copy() -> None:
            slot.data[...] = descriptor.read(at)
            barrier.land(descriptor.itemsize * slot.data.size)
            loading.remove(copy)

        loading.append(copy)
        scheduler.copies.append(copy)
        # Until it lands, nothing may be read from there.
        slot.data[...] = np.nan

    def store(descriptor: Descriptor, at: Sequence[int], buffer: Shared) -> None:
        read: list[bool] = []
        touch()
        descriptor.begins(at)

        def copy() -> None:
            descriptor.write(at, buffer.data)
            read.append(True)

        scheduler.copies.append(copy)
        local.stores.append(read)

    def store_wait(pending: int) -> None:
        older = local.stores[: len(local.stores) - pending]
        scheduler.wait_until(lambda: all(older))

    def warpgroup_mma(a: Shared, b: Shared, acc: Any, *, use_acc: bool, is_async: bool) -> Sum:
        local.sums.append(Sum(a, b, acc if use_acc else 0.0))
        return local.sums[-1]

    def warpgroup_mma_wait(pending: int, deps: tuple[Any, ...]) -> Any:
        scheduler.wait_until(lambda: True)
        while len(local.sums) > pending:
            local.sums.pop(0).finish()
        values = tuple(d.value if isinstance(d, Sum) and d.value is not None else d for d in deps)
        return values if len(values) > 1 else values[0]

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
        if dtype is not np.int64:
            memory.append(np.full(shape, np.nan))
            return Shared(memory[-1])
        barriers = np.empty(shape[0], dtype=object)
        barriers[:] = [Barrier() for _ in range(shape[0])]
        return Shared(barriers)

    def init(view: Shared, count: int) -> None:
        view.data.count = view.data.pending = count

    def wait(view: Shared, parity: int) -> None:
        scheduler.wait_until(lambda: view.data.phase & 1 != parity)

    def expect(view: Shared, count: int) -> None:
        view.data.bytes += count
        view.data.arrive()

    def gather(
        pointer: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = ""
    ) -> Any:
        touch()
        index, mask = np.broadcast_arrays(pointer.offset, mask)
        values = np.full(index.shape, other, pointer.memory.dtype)
        values[mask] = pointer.memory[index[mask]]
        # A number, not an array of one: += would change that for everybody who has it.
        return values.view(Block) if values.ndim else values.item()

    def scatter(pointer: Pointer, values: Any, mask: Any = True) -> None:
        touch()
        scheduler.wait_until(lambda: True)
        index, values, mask = np.broadcast_arrays(pointer.offset, values, mask)
        pointer.memory[index[mask]] = values[mask]

    def choose(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, np.ndarray):
            return np.where(condition, a, b).view(Block)
        return a if condition else b

    def acquire(flag: Pointer) -> int:
        # Blocks run one after another: what none before has set, none will.
        value = int(gather(flag))
        if value == 0:
            raise DeadlockError("waits for a block that starts after it")
        return value

    def place(
        parts: Sequence[Any], share: int, product: int, WHO: int, C: Any, LAYOUT: Any
    ) -> Pointer:
        size = C.rows * C.columns
        part = (share * C.a_boxes + WHO % C.a_boxes) * C.b_boxes + product
        elements: Pointer = parts[0]
        return elements + part * size + np.arange(size).reshape(C.rows, C.columns)

    def box_rows(
        operand: tuple[Rows, int], at: int, size: int, K: int, BOX: list[int], ALONG_K: bool, C: Any
    ) -> Any:
        def box(step: int) -> np.ndarray:
            where = (at, step * C.BLOCK_K) if ALONG_K else (step * C.BLOCK_K, at)
            return Descriptor(operand[0].matrix, BOX).read(where)

        return box

    def box_words(rows: Any, step: int, last: int, K: int, ALONG_K: bool, C: Any) -> Any:
        touch()
        scheduler.wait_until(lambda: True)
        return rows(step) if step < last else np.nan

    language = types.SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        cdiv=lambda a, b: -(-a // b),
        minimum=lambda a, b: np.minimum(a, b) if shaped(a, b) else min(a, b),
        maximum=lambda a, b: np.maximum(a, b) if shaped(a, b) else max(a, b),
        associative_scan=lambda x, axis, combine: np.cumsum(x, axis).view(Block),
        atomic_xchg=lambda pointer, value, sem: scatter(pointer, value),
        where=choose,
        max=lambda x, axis: np.max(x, axis).view(Block),
        sum=lambda x, axis: np.sum(x, axis).view(Block) if x.ndim > 1 else np.sum(x).item(),
        zeros=lambda shape, dtype, layout: np.zeros(shape).view(Block),
        full=lambda shape, value, dtype, layout: np.full(shape, value).view(Block),
        arange=lambda start, end, layout: np.arange(start, end).view(Block),
        expand_dims=np.expand_dims,
        convert_layout=lambda x, layout, **checks: x,
        load=gather,
        store=scatter,
        static_range=range,
        allocate_shared_memory=allocate,
        warp_specialize=lambda partitions, warps, registers: scheduler.run(partitions),
        NVMMADistributedLayout=lambda **fields: None,
        DotOperandLayout=lambda index, parent, width: None,
        NVMMASharedLayout=_Layout,
        BlockedLayout=lambda *fields: None,
        SliceLayout=lambda axis, parent: None,
        SwizzledSharedLayout=_Layout,
        int64=np.int64,
        uint64=np.uint64,
        float32=np.float64,
        int32=np.int32,
    )
    names: dict[str, Any] = {
        "gl": language,
        "tl": language,
        "mbarrier": types.SimpleNamespace(
            init=init,
            wait=wait,
            expect=expect,
            arrive=lambda view: view.data.arrive(),
            MBarrierLayout=lambda: None,
        ),
        "fence_async_shared": lambda: None,
        "gdc_wait": wait_for_the_launch_before,
        "gdc_launch_dependents": let_the_next_begin,
        "async_load": lambda d, at, view, slot: load(d, at, view.data, slot),
        "async_store": store,
        "reinterpret": lambda view, *to: view._reinterpret(*to),
        "store_wait": store_wait,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "__builtins__": __builtins__,
    }
    for each in kernel[1] if module is None else (*kernel[1], module):
        for name, value in vars(each).items():
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType):
                names[name] = types.FunctionType(function.__code__, names, name)
    # The workspace's order is made for whole warps, and needs them.
    names |= {"_acquire": acquire, "add": operator.add, "barrier": lambda: None, "part_at": place}
    names |= {"_fused": lambda part, scale, acc: part * scale + acc}
    # Addresses and shifts, which have a separate test.
    names |= {"box_rows": box_rows, "box_words": box_words, "box_of": lambda words, *_: words}
    # It has addresses, and a separate test.
    names |= {"prefetch": lambda *_: None}
    names |= instead or {}
    names[kernel[0]](*arguments)
    if overlaps and not all(ended.values()):
        raise OrderError(f"never waits for the end of {[w for w, e in ended.items() if not e]}")
    if loading:
        raise OrderError("ends before what it loads has arrived")
    # The next block reuses the memory; a copy that was not waited for reads its data.
    for array in memory:
        array[...] = np.nan
    for copy in scheduler.copies:
        copy()


def changed(line: str, instead: str, folder: Path) -> types.ModuleType:
    """A copy of the one module that has ``line``, with ``instead`` in its place."""
    sources = [Path(str(each.__file__)).read_text() for each in MODULES]
    (source,) = [each for each in sources if line in each]
    assert source.count(line) == 1
    path = folder / "changed.py"
    path.write_text(source.replace(line, instead))
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["changed"] = module
    spec.loader.exec_module(module)
    return module


def workspace_order(share: int, product: int, WHO: int, C: Any) -> np.ndarray:
    """The places of a part's elements, by row and column, in the kernel's workspace."""
    language = types.SimpleNamespace(
        arange=lambda start, end, layout: np.arange(start, end),
        expand_dims=np.expand_dims,
        SliceLayout=lambda axis, parent: None,
    )
    function = consumer.part_at.fn
    place = types.FunctionType(function.__code__, {"gl": language, "__builtins__": __builtins__})
    return np.asarray(place((0, 0), share, product, WHO, C, None))


def prefetched(
    sizes: Sequence[int], C: Any, stride: int, program: int, programs: int
) -> list[tuple[int, int]]:
    """First element, and bytes, of every prefetch by one block, where b is one matrix whose rows of
    memory are ``stride`` elements apart."""
    asked: list[tuple[int, int]] = []

    def inline(asm: str, constraints: str, args: Sequence[Any], *rest: Any, **more: Any) -> None:
        address, count = np.broadcast_arrays(args[0].offset, args[1])
        asked.extend(zip(address.ravel().tolist(), count.ravel().tolist(), strict=True))

    language = types.SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        cdiv=lambda a, b: -(-a // b),
        minimum=np.minimum,
        maximum=np.maximum,
        where=np.where,
        arange=lambda start, end, layout: np.arange(start, end).view(Block),
        expand_dims=np.expand_dims,
        static_range=range,
        inline_asm_elementwise=inline,
        BlockedLayout=lambda *fields: None,
        SliceLayout=lambda axis, parent: None,
        int64=np.int64,
        int32=np.int32,
        constexpr=Any,
    )
    names: dict[str, Any] = {"gl": language, "__builtins__": __builtins__}
    for each in MODULES:
        for name, value in vars(each).items():
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType):
                names[name] = types.FunctionType(function.__code__, names, name)
    names["prefetch"](Pointer(np.empty(0)), stride, (0, 0), sizes, C)
    return [(start, count) for start, count in asked if count > 0]
