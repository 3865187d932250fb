"""``tmm explain --ncu``: the command line that profiles one call of the chosen kernel with NVIDIA's
Nsight Compute."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from tmm_core.bench.case import Case
from tmm_core.spec.kernel import Candidate

#: Warm calls before the one that is profiled.
_WARM = 3


def line(case: Case, candidate: Candidate, functions: Sequence[str]) -> str:
    """The command. It makes the call a few times, with the profiler on for the last."""
    size = f"{case.m}x{case.n}x{case.k}"
    size = f"{case.batch}x{size}" if case.batch > 1 else size
    command = ["ncu", "--set", "full", "--import-source", "yes", "--profile-from-start", "off"]
    if functions:
        command += ["--kernel-name", f"regex:^({'|'.join(functions)})$"]
    name = f"{candidate.kernel.name}-{size}"
    command += ["--force-overwrite", "--export", name, "python", "-c", program(case, candidate)]
    return " ".join(shlex.quote(word) for word in command)


def program(case: Case, candidate: Candidate) -> str:
    """The Python program that makes the calls, without apostrophes, which a shell would require to
    be escaped."""
    usual = Case(m=0, n=0, k=0).to_json()
    posed = {k: v for k, v in case.to_json().items() if k == "out_dtype" or v != usual.get(k)}
    posed.setdefault("dtype", usual["dtype"])
    forced = {"kernel": candidate.kernel.name, "config": candidate.config.to_json()}
    profiler = "torch.cuda.cudart().cudaProfiler"
    return "; ".join(
        [
            "import torch",
            "from tmm_core.bench.case import Case",
            f'call = Case.from_json({_quoted(posed)}).call(torch.device("cuda"))',
            f"forced = {_quoted(forced)}",
            *(["torch.backends.cuda.matmul.allow_tf32 = True"] if case.tf32 else []),
            f"[call.matmul(**forced) for _ in range({_WARM})]",
            "torch.cuda.synchronize()",
            f"{profiler}Start()",
            "call.matmul(**forced)",
            "torch.cuda.synchronize()",
            f"{profiler}Stop()",
        ]
    )


def _quoted(value: Any) -> str:
    return repr(value).replace("'", '"')
