"""The configs that each kernel proposes for some problems, and their estimates.

    python tests/proposals.py

writes the proposals of the present code to ``tests/plugins/proposals.json``. It needs no GPU. Times
are estimates: they decide what a first tuning tries, and what answers without one. Whoever changes
a model or a search space measures it, and commits the new table beside the code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from tmm_core import Operand, Problem, Scale, dispatch
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.groups import Groups
from tmm_core.spec.kernel import Kernel, config_text

TABLE = Path(__file__).parent / "plugins" / "proposals.json"

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
I64, I32 = torch.int64, torch.int32

DEVICES = {
    "H200": DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, 232448, 62914560),
    "A100": DeviceFingerprint("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 41943040),
    "B200": DeviceFingerprint("cuda", "NVIDIA B200", (10, 0), 148, 232448, 132120576),
    "CPU": DeviceFingerprint("cpu", "CPU", (0, 0), 0, 0, 0),
}
ROW, COL = Operand(BF16), Operand(BF16, "col")
LOOSE = replace(COL, aligned=False)
OUT = Operand(BF16)


def _stored(dtype: torch.dtype, scale: str, layout: Any = "row", **more: Any) -> Operand:
    return Operand(dtype, layout, scale=Scale.parse(scale), **more)


def problems() -> Iterator[tuple[str, Problem]]:
    """Problems by name, of each kind that changes what is proposed."""
    h200 = DEVICES["H200"]
    large = Problem(4096, 4096, 4096, ROW, COL, OUT, h200)
    decode = replace(large, m=16, n=4096)
    yield "large", large
    yield "row by row", replace(large, b=ROW)
    yield "prefill", replace(large, m=1500, n=1536)
    yield "two waves", replace(large, m=300, n=13824, k=5120)
    yield "short k", replace(large, m=8192, k=512)
    yield "tall", replace(large, m=100_000, n=256, k=512)
    yield "wide", replace(large, m=256, n=100_000, k=512)
    yield "gated", replace(large, epilogue=parse("swiglu"))
    yield "gated decode", replace(decode, n=14336, epilogue=parse("swiglu"))
    yield "finished", replace(large, epilogue=parse("gelu"), bias=BF16, residual=OUT, scaled=True)
    yield "batched", replace(large, m=333, n=512, k=512, batch=8)
    yield "invariant", replace(large, m=333, batch_invariant=True)
    yield "invariant decode", replace(decode, batch_invariant=True)
    yield "deep", replace(large, m=128, n=256, k=65536)
    for m in (1, 2, 4, 8, 16, 17, 33, 64, 65, 128, 129):
        yield f"decode {m}", replace(decode, m=m)
    yield "static weights", replace(decode, static_weights=True)
    yield "decode of rows", replace(decode, b=ROW)
    yield "decode with everything", replace(decode, epilogue=parse("silu"), bias=BF16, residual=OUT)
    yield "decode of a batch", replace(decode, batch=4)
    yield "long decode", replace(decode, n=2048, k=14336)
    yield "wide decode", replace(decode, n=128256)
    yield "unaligned", replace(large, b=LOOSE, n=4095)
    yield "unaligned decode", replace(decode, b=LOOSE, k=4095)
    yield "unaligned a", replace(large, a=replace(ROW, aligned=False), k=4095)
    yield "unaligned both", replace(large, a=replace(ROW, aligned=False), b=LOOSE, k=4095)
    yield "unaligned out", replace(large, out=replace(OUT, aligned=False), n=4095)
    single = Operand(F32)
    for tf32 in (False, True):
        yield f"fp32 {tf32}", replace(large, a=single, b=single, out=single, tf32=tf32)
    yield "fp64", replace(large, **dict.fromkeys(("a", "b", "out"), Operand(torch.float64)))
    yield "fp32 result", replace(large, out=single)
    for kind in ("tensor", "row"):
        a, b = _stored(E4M3, kind), _stored(E4M3, kind, "col")
        yield f"fp8 {kind}", replace(large, a=a, b=b)
        yield f"fp8 {kind} decode", replace(decode, a=a, b=b)
        yield f"fp8 {kind} gated", replace(large, a=a, b=b, epilogue=parse("swiglu"))
    for name, block in (("1x128", (1, 128)), ("128x128", (128, 128)), ("1x32", (1, 32))):
        scale = Scale(block)
        f8 = Operand(E4M3, scale=scale if block[0] == 1 else Scale((1, 128)))
        weight = Operand(E4M3, "col", scale=scale)
        yield f"blocks {name}", replace(large, a=f8, b=weight)
        yield f"weight {name}", replace(decode, b=weight)
    for name, form, zero in (("int4", "int4", False), ("int4 zero", "int4", True)):
        scale = Scale((1, 128), BF16)
        four = Operand(torch.uint8, "col", format=form, scale=scale, zero=zero)  # type: ignore[arg-type]
        yield name, replace(decode, b=four)
        yield f"{name} 128", replace(decode, m=128, b=four)
        yield f"{name} large", replace(large, b=four)
        yield f"{name} gated", replace(decode, n=14336, b=four, epilogue=parse("swiglu"))
        yield f"{name} groups", replace(large, b=four, groups=Groups(8, "m", I64))
        yield f"{name} of 32", replace(decode, b=replace(four, scale=Scale((1, 32), BF16)))
    four = Operand(torch.uint8, "col", format="mxfp4", scale=Scale((1, 32), torch.uint8))
    yield "mxfp4", replace(decode, b=four)
    yield "mxfp4 groups", replace(large, b=four, groups=Groups(32, "m", I64, I32, F32))
    eight = Operand(torch.int8, "col", format="int8", scale=Scale.parse("row"))
    yield "int8 weight", replace(decode, b=eight)
    yield "int8 weight large", replace(large, b=eight)
    groups = {
        "rows": Groups(8, "m"), "few rows": Groups(64, "m"), "columns": Groups(8, "n"),
        "sums": Groups(8, "k"), "zeroed": Groups(8, "m", zeroed=True),
        "gathered": Groups(8, "m", I64), "scattered": Groups(8, "m", I64, I32, F32),
    }  # fmt: skip
    for name, each in groups.items():
        some = replace(large, m=512) if name == "few rows" else large
        yield f"groups: {name}", replace(some, b=ROW if each.ragged != "m" else COL, groups=each)
    yield "groups: gated", replace(large, groups=groups["rows"], epilogue=parse("swiglu"))
    f8 = _stored(E4M3, "row")
    yield "groups: fp8", replace(large, a=f8, b=replace(f8, layout="col"), groups=groups["rows"])
    for name in ("A100", "B200", "CPU"):
        device = DEVICES[name]
        yield f"large, {name}", replace(large, device=device)
        yield f"decode, {name}", replace(decode, device=device)
        yield f"fp32, {name}", replace(large, a=single, b=single, out=single, device=device)


Table = dict[str, dict[str, str]]


def computed() -> Table:
    """The table of the present code: a line for each problem and kernel."""
    kernels = dispatch.default_dispatcher().registry.kernels()
    table: Table = {"": {"triton": triton.__version__}}
    for name, problem in problems():
        table[name] = {kernel.name: _line(kernel, problem) for kernel in kernels}
    return table


def _line(kernel: Kernel[Any], problem: Problem) -> str:
    """The number of configs; digests of all configs in order and of their properties; the first
    config with its time. If there is none, a digest of the reasons."""
    if against := kernel.reasons_against(problem):
        return f"declines for {len(against)} reasons {_digest(against)}"
    configs = list(kernel.configs(problem))
    if not configs:
        return "no config"
    texts = [config_text(config.to_json()) for config in configs]
    times = [kernel.estimate_us(problem, config) for config in configs]
    known = [
        f"{kernel.arithmetic(problem, c)} {kernel.workspace_bytes(problem, c)}" for c in configs
    ]
    first = "" if times[0] is None else f" {times[0]:.4g} µs"
    total = sum(time or 0.0 for time in times)
    return (
        f"{len(configs)} {_digest(texts)} {_digest(known)} {total:.4g} µs in all, first:"
        f"{first} {texts[0]}"
    )


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:6]


def main() -> None:
    lines = [
        f"{json.dumps(name)}: {json.dumps(cells, indent=1, ensure_ascii=False)}"
        for name, cells in computed().items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
