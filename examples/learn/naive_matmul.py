"""The textbook matmul, and the effect of a missing mask; see docs/learn.md."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr, b_ptr, out_ptr, M, N, K,
    MASK_A: tl.constexpr, MASK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    ks = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        in_a = k + ks[None, :] < K if MASK_A else rows < M
        in_b = k + ks[:, None] < K if MASK_B else cols < N
        a = tl.load(a_ptr + rows * K + k + ks[None, :], (rows < M) & in_a, other=0.0)
        b = tl.load(b_ptr + (k + ks[:, None]) * N + cols, (cols < N) & in_b, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + rows * N + cols, acc, (rows < M) & (cols < N))


def beside_nan(rows, cols):
    """Random numbers, with NaN in the memory after them."""
    memory = torch.full((rows * cols + 4096,), float("nan"))
    memory[: rows * cols] = torch.randn(rows * cols)
    return memory[: rows * cols].view(rows, cols)


torch.manual_seed(0)
M, N, K = 30, 40, 50  # not one is a multiple of 16
a, b, out = beside_nan(M, K), beside_nan(K, N), torch.empty(M, N)
masked = sys.argv[1] if len(sys.argv) > 1 else "ab"
grid = triton.cdiv(M, 16), triton.cdiv(N, 16)
matmul[grid](a, b, out, M, N, K, MASK_A="a" in masked, MASK_B="b" in masked, BLOCK=16)

bad = out.isnan()
error = (out - a @ b)[~bad].abs().max().item() if not bad.all() else float("nan")
print(f"K is masked in {masked}: {bad.sum()} of {bad.numel()} are NaN", end="; ")
print(f"the rest is right: {error < 1e-4}" if not bad.all() else "nothing is left")
