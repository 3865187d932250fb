"""What two blocks of a cluster do for each other in ``triton.warp_specialized``, as marks for
:func:`tmm_core.triton.ptx.cluster`: Gluon cannot address the other block."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared


@jit
def meet():
    """Wait until both blocks have set up their barriers."""
    _mark(
        """fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;"""
    )


@jit
def load_for_both(descriptor, where, ready, slot):
    """Load a box into the same place of both blocks, and arrive at the same barrier of both."""
    _mark("mov.b32 $0, $1; // tmm: both")
    async_copy_global_to_shared(descriptor, where, ready, slot)
    _mark("mov.b32 $0, $1; // tmm: own")


@jit
def _mark(ASSEMBLY: gl.constexpr):
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1)


@jit
def release(empty, C: gl.constexpr):
    """A consumer has read a stage; one that is loaded for both blocks is empty when all consumers
    of both have."""
    mbarrier.arrive(empty)
    if C.CLUSTER > 1:
        _mark("mov.b32 $0, $1; // tmm: peer")
        mbarrier.arrive(empty)
