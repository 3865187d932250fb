"""Stream-K: blocks share the last tiles, cut along K, and add their parts up in the workspace.

Blocks take equal shares of these tiles' steps. The block with a tile's first steps adds the others'
partial sums in the order of K, so that every call has the same bits. Each part has a flag. The
block that stored the part sets it, and the one that adds the part resets it for the next launch.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from tmm_core.triton import releases

barrier = releases.barrier


@jit
def own_share():
    """The block's share, counted from the last block. So a block waits only for blocks that started
    before it. They finish even if not all blocks fit at once."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@jit
def start_of_share(share, total):
    """The first of ``total`` steps that belongs to a share. Shares differ by one step at most."""
    blocks = gl.num_programs(0)
    return share * (total // blocks) + gl.minimum(share, total % blocks)


@jit
def add(acc, part):
    """``acc + part`` in inline assembly: LLVM's vectorizer of straight-line code takes 0.7 s, half
    of a compilation, to find that 128 additions per thread cannot be vectorized."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [acc, part], gl.float32, is_pure=True, pack=1
    )


@jit
def _acquire(flag):
    """A flag's value; later reads see everything written before it was set."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [flag], gl.int32, is_pure=False, pack=1
    )


@jit
def set_flag(flag):
    """Announce a part that all threads have stored."""
    # All threads' stores come before the barrier, the barrier before the release.
    barrier()
    gl.atomic_xchg(flag, 1, sem="release")


@jit
def await_flag(flag):
    """Wait until a part is announced."""
    while _acquire(flag) == 0:
        pass


@jit
def reset_flag(flag):
    """Reset a flag for the next launch, once every thread has seen it set."""
    barrier()
    gl.store(flag, 0)
