from __future__ import annotations

import torch
import torch.nn.functional as F

import tmm_core


def test_the_kernel_fuses_it() -> None:
    # From numbers whose mish is zero to numbers that are their own mish; at both ends e^z leaves
    # the range of fp32.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    z = torch.linspace(-100, 100, 256, device=device)
    one = torch.ones(1, 1, device=device)
    fused = tmm_core.matmul(one, z[None], epilogue="mish", kernel="example.gemv")
    torch.testing.assert_close(fused, F.mish(z.double())[None].float(), rtol=2e-5, atol=1e-30)


def test_it_is_found_by_name_and_trains() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(tmm_core.matmul(x, w, epilogue="mish"), F.mish(x @ w))
    assert torch.autograd.gradcheck(lambda x, w: tmm_core.matmul(x, w, epilogue="mish"), (x, w))
