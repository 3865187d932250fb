"""A user-defined epilogue in two versions, one of which overflows; see docs/learn.md."""

import sys

import torch
import triton
import triton.language as tl

import tmm_core


@triton.jit
def overflowing(z):
    return tl.exp(z) / (1 + tl.exp(z))


@triton.jit
def stable(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1) / (1 + e)


device = overflowing if "--overflow" in sys.argv else stable
mine = tmm_core.Epilogue("mine", reference=torch.sigmoid, device=device)
x, w = torch.tensor([[-120.0], [0.0], [2.0], [120.0]]), torch.ones(1, 1)
try:
    epilogue = stable if "--bare" in sys.argv else mine
    y = tmm_core.matmul(x, w, epilogue=epilogue, kernel="triton.grouped")
    print("torch", torch.sigmoid(x).flatten().tolist())
    print("mine ", y.flatten().tolist())
except TypeError as error:
    print(error)
