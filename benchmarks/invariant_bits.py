"""Determines which kernels and instruction shapes give a row the same bits, on a Hopper GPU.

    python benchmarks/invariant_bits.py bits.json

Multiplies the same rows of ``a`` by the same weight, alone (M = 8) and among other rows (M = 200).
It uses plain dots of one instruction shape each, and tmm's kernels with their configs forced.
Results are fp32, so that rounding hides nothing. Configs that gave all rows the same bits for every
K are a group: they may share one reduction order. Takes about a minute. Jobs are divided among
processes, because most of the time goes to compiling.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

DEPTHS = (512, 4096, 5120, 14336)
ROWS, AMONG, COLUMNS = 8, 200, 512
SECONDS = 150.0


@triton.jit
def dots(
    a_ptr, b_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of a @ bᵀ, a and b row-major; with SPLITS the sums over parts of K are added in
    their order."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in range(SPLITS):
        acc = tl.zeros_like(total)
        part = K // SPLITS
        for k in tl.range(split * part, split * part + part, BLOCK_K, num_stages=STAGES):
            ks = k + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], rows[:, None] < M, 0.0)
            b = tl.load(b_ptr + cols[None, :] * K + ks[:, None], cols[None, :] < N, 0.0)
            acc = tl.dot(tl.trans(b), tl.trans(a), acc) if SWAP else tl.dot(a, b, acc)
        total += acc
    if SWAP:
        total = tl.trans(total)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], total, inside)


@triton.jit
def products(a_ptr, b_ptr, out_ptr, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One row by BLOCK_N columns without tensor cores."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + row * K + ks).to(tl.float32)
        b = tl.load(b_ptr + cols[:, None] * K + ks[None, :], cols[:, None] < N, 0.0)
        acc += tl.sum(b.to(tl.float32) * a[None, :], axis=1)
    tl.store(out_ptr + row * N + cols, acc, cols < N)


Job = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, str]]


def _dots(m: int, n: int, k: int, warps: int, swap: bool = False, splits: int = 1) -> Job:
    def run(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, str]:
        out = a.new_empty((a.shape[0], w.shape[0]), dtype=torch.float32)
        grid = (triton.cdiv(a.shape[0], m), triton.cdiv(w.shape[0], n))
        handle = dots[grid](
            a, w, out, a.shape[0], w.shape[0], a.shape[1],
            BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, SWAP=swap, SPLITS=splits,
            STAGES=3 if max(m, n) * k <= 16384 else 2, num_warps=warps,
        )  # fmt: skip
        shapes = re.findall(r"(wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+n\d+k\d+)", _ptx(handle))
        return out, "+".join(sorted({f"{kind.split('.')[0]} {shape}" for kind, shape in shapes}))

    return run


def _ptx(handle: Any) -> str:
    return str(handle.asm.get("ptx", ""))


def _products(n: int, k: int, warps: int) -> Job:
    def run(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, str]:
        out = a.new_empty((a.shape[0], w.shape[0]), dtype=torch.float32)
        grid = (a.shape[0], triton.cdiv(w.shape[0], n))
        products[grid](a, w, out, w.shape[0], a.shape[1], BLOCK_N=n, BLOCK_K=k, num_warps=warps)
        return out, "fma"

    return run


def _torch(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, str]:
    # cuBLAS rounds to bf16 here; compared with the fp32 results of the others, it is a group by
    # itself.
    return torch.mm(a, w.T).float(), ""


def _tmm(kernel: str, row_major: bool = False, **config: Any) -> Job:
    def run(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, str]:
        import tmm_core

        b = w.T.contiguous() if row_major else w.T
        kinds = {} if not config else {"config": config}
        return tmm_core.matmul(a, b, kernel=kernel, out_dtype=torch.float32, **kinds), ""

    return run


def _tile(m: int, n: int, k: int, stages: int, warps: int, **more: Any) -> dict[str, Any]:
    return dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_stages=stages, num_warps=warps, **more)


def jobs() -> Iterator[tuple[str, Job]]:
    """Every config by its label."""
    for n in (64, 8, 16, 32, 128, 256):
        if n >= 16:
            yield f"dot 64x{n}x64 w4", _dots(64, n, 64, 4)
        yield f"dot swapped {n}x64x64 w4", _dots(n, 64, 64, 4, swap=True)
    for k in (32, 128, 256):
        yield f"dot 64x64x{k} w4", _dots(64, 64, k, 4)
    yield "dot 128x128x64 w8", _dots(128, 128, 64, 8)
    yield "dot 16x64x64 w4", _dots(16, 64, 64, 4)
    yield "dot 16x64x128 w4", _dots(16, 64, 128, 4)
    yield "dot 32x32x64 w2", _dots(32, 32, 64, 2)
    yield "dot 64x64x64 w2", _dots(64, 64, 64, 2)
    for splits in (2, 4, 8):
        yield f"dot 64x64x64 w4 split {splits}", _dots(64, 64, 64, 4, splits=splits)
    yield "dot 64x128x32 w4 split 4", _dots(64, 128, 32, 4, splits=4)
    yield "dot 16x64x64 w4 split 4", _dots(16, 64, 64, 4, splits=4)
    yield "sum 16x512 w4", _products(16, 512, 4)
    yield "sum 16x256 w4", _products(16, 256, 4)
    yield "sum 64x512 w4", _products(64, 512, 4)
    yield "torch.mm (bf16 out)", _torch
    yield "blas", _tmm("blas")
    for m, n, k, s, w in ((64, 64, 64, 4, 4), (128, 128, 64, 4, 8), (64, 32, 128, 4, 4)):
        yield f"grouped {m}x{n}x{k}", _tmm("triton.grouped", **_tile(m, n, k, s, w, GROUP_M=8))
    yield "grouped 16x64x128", _tmm("triton.grouped", **_tile(16, 64, 128, 5, 4, GROUP_M=8))
    more: dict[str, Any] = {"GROUP_M": 8, "SUBTILE": 2, "FLATTEN": True}
    yield "persistent 128x256x64", _tmm("triton.persistent", **_tile(128, 256, 64, 3, 8, **more))
    more["SUBTILE"] = 1
    for m, n, k in ((64, 16, 128), (64, 64, 128), (128, 128, 32)):
        yield f"persistent {m}x{n}x{k}", _tmm("triton.persistent", **_tile(m, n, k, 3, 4, **more))
    shapes = (
        ("cooperative", 1, 64, 32, 128, 1),
        ("cooperative", 2, 128, 256, 64, 1),
        ("pingpong", 2, 128, 128, 64, 1),
        ("pingpong", 2, 64, 64, 32, 1),
        ("cooperative", 1, 64, 64, 128, 2),
        ("cooperative", 1, 64, 64, 128, 4),
        ("cooperative", 1, 64, 64, 64, 4),
        ("cooperative", 1, 64, 64, 128, 8),
        ("cooperative", 1, 64, 64, 128, 3),
        ("cooperative", 1, 64, 64, 32, 3),
    )
    for schedule, consumers, m, n, k, splits in shapes:
        config = dict(
            _tile(m, n, k, 2 if m * n > 8192 else 4, 4),
            schedule=schedule,
            consumers=consumers,
            GROUP_M=8,
            subtiles=2,
            tail_splits=1,
            splits=splits,
            evict_first=False,
        )
        label = f"{schedule} {m}x{n}x{k} split {splits}"
        yield label, _tmm("triton.warp_specialized", **config)
        if (k, splits) == (64, 1):
            yield f"{label} nn", _tmm("triton.warp_specialized", row_major=True, **config)
    for m, n, k, swap, splits in (
        (16, 64, 128, True, 1),
        (32, 64, 128, True, 1),
        (16, 64, 128, True, 4),
        (16, 64, 64, True, 4),
        (64, 64, 64, False, 4),
        (64, 64, 64, False, 2),
        (64, 64, 64, False, 8),
        (64, 64, 64, False, 3),
        (64, 64, 128, False, 3),
        (16, 64, 128, False, 4),
        (16, 128, 64, True, 16),
        (64, 64, 64, False, 16),
    ):
        config = _tile(m, n, k, 3, 4, SPLIT_K=splits, SWAP=swap)
        label = f"split_k {m}x{n}x{k} {'swapped ' * swap}split {splits}"
        yield label, _tmm("triton.split_k", **config)
    for m, n, k, warps, stages in (
        (8, 16, 64, 1, 2),
        (16, 16, 64, 1, 2),
        (8, 16, 512, 1, 2),
        (8, 32, 128, 2, 2),
        (16, 16, 512, 4, 2),
        (8, 32, 256, 4, 1),
        (8, 16, 1024, 8, 2),
    ):
        config = _tile(m, n, k, stages, warps)
        yield f"skinny {m}x{n}x{k} {warps} along K", _tmm("triton.skinny", **config)


def measure(part: int, parts: int, folder: Path) -> None:
    """Run every ``parts``-th job, and write its bits and errors to ``folder``."""
    data = {}
    for depth in DEPTHS:
        generator = torch.Generator().manual_seed(depth)
        a = torch.randn(AMONG, depth, generator=generator).bfloat16().cuda()
        data[depth] = a, torch.randn(COLUMNS, depth, generator=generator).bfloat16().cuda()
    for index, (label, job) in enumerate(jobs()):
        if index % parts != part:
            continue
        result: dict[str, Any] = {"label": label, "bits": {}, "among": {}, "faults": []}
        for depth, (a, w) in data.items():
            for rows, kept in ((ROWS, "bits"), (AMONG, "among")):
                try:
                    out, result["instruction"] = job(a[:rows], w)
                    result[kept][depth] = out[:ROWS].cpu()
                except Exception as error:
                    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                    result["faults"].append(f"M={rows} K={depth}: {text}")
        torch.save(result, folder / f"{index}.tmp")
        (folder / f"{index}.tmp").rename(folder / f"{index}.pt")


def gather(folder: Path) -> list[dict[str, Any]]:
    """Read the results of all processes and group the configs that gave the same bits for every
    K."""
    results = []
    for index, (label, _) in enumerate(jobs()):
        path = folder / f"{index}.pt"
        missing = {"label": label, "bits": {}, "among": {}, "faults": ["no result in time"]}
        results.append(torch.load(path) if path.exists() else missing)
    reference = results[0]["bits"]
    names: dict[str, str] = {}
    rows = []
    for result in results:
        alone, among = result["bits"], result["among"]
        row = {"label": result["label"], "instruction": result.get("instruction", "")}
        row |= {"faults": result["faults"], "group": "-", "by_k": {}}
        if alone and len(alone) == len(DEPTHS):
            row["group"] = names.setdefault(_digest(alone.values()), f"g{len(names)}")
        for depth, bits in alone.items():
            row["by_k"][depth] = {
                "digest": _digest([bits])[:8],
                "differ": _share(bits, reference.get(depth)),
                "error": float((bits.double() - _exact(depth)).abs().mean()),
            }
        both = [depth for depth in alone if depth in among]
        row["depends_on_m"] = [d for d in both if not torch.equal(alone[d], among[d])]
        rows.append(row)
    return rows


def _exact(depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(depth)
    a = torch.randn(AMONG, depth, generator=generator).bfloat16()[:ROWS].double()
    return a @ torch.randn(COLUMNS, depth, generator=generator).bfloat16().double().T


def _digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def _share(bits: torch.Tensor, reference: torch.Tensor | None) -> float | None:
    return None if reference is None else float((bits != reference).double().mean())


def table(rows: list[dict[str, Any]]) -> str:
    """The groups as text: label, instruction, share of elements that differ from the first
    label's by K, mean error at the largest K, M-dependence, faults."""
    lines = [f"{'group':6}{'config':44}{'instruction':30}{'differ by K':32}error     depends on M"]
    order = {row["group"]: at for at, row in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda r: order[r["group"]]):
        shares = [row["by_k"].get(d, {}).get("differ") for d in DEPTHS]
        differ = " ".join("   -   " if s is None else f"{s:7.4f}" for s in shares)
        error = row["by_k"].get(DEPTHS[-1], {}).get("error")
        shown = "-" if error is None else f"{error:.2e}"
        lines.append(
            f"{row['group']:6}{row['label']:44}{row['instruction']:30}{differ:32}{shown:10}"
            f"{row['depends_on_m'] or ''}"
        )
        lines += [f"{'':6}  {fault}" for fault in row["faults"][:2]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="where the JSON goes")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part is not None:
        measure(asked.part, asked.processes, asked.path)
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "TMM_CACHE_DIR": str(folder / "cache"), "TMM_PROGRESS": "0"}
        call = [sys.executable, __file__, name, "--processes", str(asked.processes), "--part"]
        children = [
            subprocess.Popen([*call, str(part)], env=environment) for part in range(asked.processes)
        ]
        for child in children:
            try:
                child.wait(max(1.0, SECONDS - (time.monotonic() - started)))
            except subprocess.TimeoutExpired:
                child.kill()
        rows = gather(folder)
    device = torch.cuda.get_device_name()
    document = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    seconds = time.monotonic() - started
    asked.path.write_text(json.dumps({**document, "seconds": seconds, "rows": rows}, indent=1))
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, {seconds:.0f} s")
    print(table(rows))


if __name__ == "__main__":
    main()
