"""Writes ``tests/core/written_by_packages.pt``: small 4-bit weights as other packages store them.

The packages need releases of Transformers that cannot be installed beside each other, so tests read
what they wrote. ``WRITERS`` has the release of each. Unpack its source, and give the folder with
the package::

    python tests/written_by_packages.py hqq FOLDER
    python tests/written_by_packages.py autoawq FOLDER

An entry has the stored tensors, the values that the package itself reads from them, [N, K], and
the release.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).parent / "core" / "written_by_packages.pt"
N, K, GROUP = 32, 128, 64

Tensor = torch.Tensor
Entry = dict[str, Any]


def written() -> dict[str, Entry]:
    """What the packages wrote, by name."""
    return torch.load(FILE)  # type: ignore[no-any-return]


def rounded(symmetric: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer of random weights on the grid of its scales and zero points, [N, K / GROUP]."""
    torch.manual_seed(0)
    weight = torch.randn(N, K).unflatten(-1, (-1, GROUP))
    low, high = weight.amin(-1), weight.amax(-1)
    if symmetric:
        high = weight.abs().amax(-1)
        low = -high
    scale = ((high - low) / 15).half().float()
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(1, 15)
    codes = ((weight / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    layer = nn.Linear(K, N, bias=False)
    layer.weight.data = ((codes - zero[..., None]) * scale[..., None]).flatten(-2)
    return layer, scale, zero


def hqq() -> dict[str, Entry]:
    from hqq.core.quantize import Quantizer

    torch.manual_seed(0)
    weight = torch.randn(N, K)
    given: Any = {"nbits": 4, "group_size": GROUP, "axis": 1, "device": "cpu"}
    stored, meta = Quantizer.quantize(weight, compute_dtype=torch.float16, **given)
    values = Quantizer.dequantize(stored, meta)
    kept = ("nbits", "group_size", "shape", "axis", "packing", "scale", "zero")
    meta = {name: meta[name] for name in kept} | {"shape": tuple(meta["shape"])}
    return {"hqq": {"W_q": stored, "meta": meta, "values": values}}


def autoawq() -> dict[str, Entry]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer, scale, zero = rounded(False)
    found = WQLinear_GEMM.from_linear(
        layer.half(), 4, GROUP, scales=scale.t().contiguous().half(), zeros=zero.t().contiguous()
    )
    stored = found.qweight, found.qzeros, found.scales
    values = dequantize_gemm(*stored, 4, GROUP).t()
    names = "qweight", "qzeros", "scales"
    return {"autoawq": dict(zip(names, stored, strict=True)) | {"values": values}}


def auto_gptq() -> dict[str, Entry]:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear

    found = {}
    for symmetric in (False, True):
        layer, scale, zero = rounded(symmetric)
        packed = QuantLinear(4, GROUP, K, N, bias=False)
        packed.pack(layer, scale, zero, None)
        name = "auto_gptq" + ", symmetric" * symmetric
        found[name] = _gptq(packed, packed.float()(torch.eye(K)).t())
    return found


def gptqmodel() -> dict[str, Entry]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    found = {}
    for order in (False, True):
        layer, scale, zero = rounded(False)
        packed = TorchLinear(4, GROUP, sym=False, desc_act=order, in_features=K, out_features=N)
        groups = torch.arange(K, dtype=torch.int32) // GROUP
        if order:
            places = torch.randperm(K)
            groups = groups[places]
            layer.weight.data = layer.weight.data[:, places]
        packed.pack(layer, scale, zero, groups)
        packed.post_init()
        name = "gptqmodel" + ", activation order" * order
        found[name] = _gptq(packed, packed.dequantize_weight().t())
    return found


def torchao() -> dict[str, Entry]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    torch.manual_seed(0)
    weight = MXTensor.to_mx(torch.randn(N, K), torch.float4_e2m1fn_x2, 32)
    blocks = weight.qdata.view(torch.uint8).view(N, K // 32, 16)
    scales = weight.scale.view(torch.uint8)
    return {
        "torchao": {"blocks": blocks, "scales": scales, "values": weight.dequantize(torch.float32)}
    }


def compressed_tensors() -> dict[str, Entry]:
    from compressed_tensors.compressors.pack_quantized import helpers

    layer, scale, zero = rounded(False)
    each = (layer.weight.detach().unflatten(-1, (-1, GROUP)) / scale[..., None]).round()
    codes = (each + (zero - 8)[..., None]).flatten(-2).to(torch.int8)
    packed = helpers.pack_to_int32(codes, 4)
    zeros = helpers.pack_to_int32((zero - 8).to(torch.int8), 4, packed_dim=0)
    back = helpers.unpack_from_int32(packed, 4, torch.Size((N, K))).unflatten(-1, (-1, GROUP))
    origin = helpers.unpack_from_int32(zeros, 4, torch.Size(zero.shape), packed_dim=0)
    values = ((back.float() - origin.float()[..., None]) * scale[..., None]).flatten(-2)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_zero_point": zeros}
    return {"compressed_tensors": {**stored, "values": values}}


def _gptq(packed: Any, values: Tensor) -> Entry:
    names = "qweight", "qzeros", "scales", "g_idx"
    return {name: getattr(packed, name) for name in names} | {"values": values}


#: The writers by package, and the releases that wrote the file.
WRITERS: dict[str, tuple[str, Callable[[], dict[str, Entry]]]] = {
    "hqq": ("hqq 0.2.8.post1", hqq),
    "autoawq": ("autoawq 0.2.9", autoawq),
    "auto_gptq": ("auto_gptq 0.7.1", auto_gptq),
    "gptqmodel": ("gptqmodel 7.7.0", gptqmodel),
    "torchao": ("torchao 0.18.0", torchao),
    "compressed_tensors": ("compressed-tensors 0.20.0", compressed_tensors),
}


def main(package: str, folder: str) -> None:
    sys.path.insert(0, folder)
    if package == "autoawq":  # its __init__ imports all model classes
        sys.modules["awq"] = types.ModuleType("awq")
        sys.modules["awq"].__path__ = [f"{folder}/awq"]
    release, writer = WRITERS[package]
    kept = written() if FILE.exists() else {}
    for name, entry in writer().items():
        kept[name] = {"release": release, **entry}
        print(name, {k: tuple(v.shape) for k, v in entry.items() if isinstance(v, Tensor)})
    torch.save(kept, FILE)


if __name__ == "__main__":
    main(*sys.argv[1:])
