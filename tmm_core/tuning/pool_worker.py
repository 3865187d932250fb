"""The program of a worker process, which compiles a candidate, or binds and launches it.

Importing this module loads the plugins. The process that forks workers imports it once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import os
import resource
import signal
import sys
import tempfile
from typing import Any

import torch

from tmm_core.errors import error_text
from tmm_core.registry.places import place_of
from tmm_core.registry.query import read_config
from tmm_core.registry.registry import Registry
from tmm_core.spec import watch
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.tuning.findings import refuses
from tmm_core.tuning.pool_host import WORN_OUT, Job
from tmm_core.verify.environment_faults import cause_of
from tmm_core.verify.verifier import Verifier

_PR_SET_PDEATHSIG = 1

#: Whether later launches in this process may fail because of an earlier CUDA fault.
_worn_out = False


def begin(folder: str) -> None:
    """Prepare this process to end with its parent, and to print into a file in ``folder``."""
    os.setpgid(0, 0)
    # The handler also ends the compilers that this process started. Code that hangs in C never
    # returns to the handler; pebble then kills the process.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(Exception):  # without prctl it ends with its channel
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tempfile.tempdir = folder  # compilers that are killed leave files behind


def perform(job: Job) -> Job:
    """Do a job, and return its ``error``, None if there is none. An error comes with its ``cause``,
    if the environment is at fault, with the ``place`` that raised, and with whether the kernel has
    ``refused`` the config. The error is also None if this process has another version of the
    kernel, or lacks the epilogue: the parent then binds the candidate itself."""
    if _worn_out:
        os._exit(WORN_OUT)
    os.ftruncate(1, 0)  # a failure shows only its own job's output
    os.environ.clear()
    os.environ.update(job["environ"])
    with contextlib.suppress(OSError):  # the folder was removed
        os.chdir(job["folder"])
    try:
        problem, candidate = recalled(job)
    except BaseException:
        return {"error": None}
    try:
        if job["device"] is None:
            candidate.kernel.compile(problem, candidate.config)
        else:
            _launch(problem, candidate, torch.device(job["device"]), job["memory"])
    except BaseException as error:
        return {
            "error": error_text(error).strip()[:2000],
            "cause": cause_of(error),
            "place": place_of(candidate.kernel, error),
            "refused": refuses(error),
        }
    return {"error": None}


def recalled(job: Job) -> tuple[Problem, Candidate]:
    """Return the problem and the candidate of a job. Raises if this process lacks one."""
    kernel = _registry.kernel(job["kernel"])
    if kernel.version != job["version"]:
        raise LookupError(f"{kernel.name} is of version {kernel.version} here")
    epilogue = _registry.epilogue(job["problem"]["epilogue"])  # its key is a digest of its source
    device = {**job["fingerprint"], "capability": tuple(job["fingerprint"]["capability"])}
    problem = Problem.from_json(job["problem"], DeviceFingerprint(**device), epilogue)
    problem = dataclasses.replace(problem, **job["requirements"])
    return problem, Candidate(kernel, read_config(kernel, job["config"]))


def _launch(problem: Problem, candidate: Candidate, device: torch.device, memory: int) -> None:
    """Bind the candidate and launch it, with and without ``out``. Results may be wrong here: the
    parent verifies them."""
    global _worn_out
    _worn_out = device.type == "cuda"  # until the launches have succeeded
    if device.type == "cuda":
        torch.cuda.set_device(device)
    verifier = _verifier(problem, device, memory)
    with precision(problem.tf32):
        launcher: Any = candidate.kernel.bind(problem, candidate.config)
        verifier.verdict(launcher, extent="brief")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    _worn_out = False


@functools.lru_cache(maxsize=1)
def _verifier(problem: Problem, device: torch.device, memory: int) -> Verifier:
    """Return the verifier of a problem. The last one is kept: its tensors serve all candidates."""
    return Verifier(problem, device, memory_limit=memory)


watch.enabled = False  # no other thread may run while this process forks
_registry = Registry.from_environment()
_registry.kernels()
if "triton" in sys.modules:
    with contextlib.suppress(Exception):  # another version of Triton; its kernels report faults
        # Every compilation needs Triton's hash of itself, which takes 0.4 s.
        importlib.import_module("triton.runtime.cache").triton_key()
gc.collect()
gc.freeze()  # else a worker's GC would copy every page
