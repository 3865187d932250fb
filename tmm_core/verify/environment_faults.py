"""Distinguishes faults of the environment from faults of a kernel.

A candidate's failure is a verdict on its kernel only if the kernel caused it: by a wrong result, a
refusal, or its own exception. A missing compiler, a full disk or GPU, a killed process and the end
of the budget say nothing about the kernel. The candidate is then *untried*.

An exception of the operating system, of a memory allocator, or of the part of Triton that finds and
runs programs is the environment's fault. Compilers, and records of older versions, give only a
text; there the words of such exceptions decide.
"""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, Literal, get_args

import torch
from tmm_base.guards import chain, frames_of, suppress
from tmm_cache import CandidateResult

from tmm_core.errors import error_text
from tmm_core.spec.launcher import BASELINE

#: Why a candidate is untried.
#:
#: ``toolchain``: a part of the toolchain is missing or does not work, until it is repaired.
#: ``passing``: memory or space was too small, or a process was killed; a later process may succeed.
#: ``alike``: all kernels failed in the same way, so something that they share is broken.
#: ``hung``: the candidate was given up after a time limit, or its compiler crashed.
#: ``budget``: the tuning budget ended before the candidate was tried.
Cause = Literal["toolchain", "passing", "alike", "hung", "budget"]

#: The reason of a candidate that was not compiled when the tuning budget ended.
BUDGET_ENDED = "the tuning budget ended before it"

#: Errors of the operating system that may pass without a repair.
_PASSING_ERRNO = {
    *(errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE),
    *(errno.EINTR, errno.EBUSY, errno.ETXTBSY, errno.ESTALE, errno.EIO),
}

#: Modules that find and run programs, load drivers and write files for Triton. Their exceptions are
#: about the machine. Modules that translate a kernel are not among them.
_TOOLS = (
    "triton.knobs",
    "triton.runtime.build",
    "triton.runtime.cache",
    "triton.runtime.driver",
    "triton.backends.driver",
    "triton.backends.nvidia.driver",
    "triton.backends.amd.driver",
    "subprocess",
    "tempfile",
)

#: Words of exceptions that are about the machine.
_WORDS: tuple[tuple[Cause, str], ...] = (
    ("passing", r"\bout of memory\b"),
    ("passing", r"\bOutOfMemoryError\b|\bMemoryError\b|ALLOC_FAILED"),
    ("passing", r"cannot be verified within [\d.]+ MiB"),
    ("passing", r"\bNo space left on device\b|\bDisk quota exceeded\b"),
    ("passing", r"\ballocate memory\b|\bToo many open files\b|\bcan't start new thread\b"),
    ("passing", r"\bResource temporarily unavailable\b|\bInput/output error\b"),
    ("passing", r"\((?:signal \d+, )SIG(?:KILL|TERM|INT|HUP|QUIT|XCPU|XFSZ)\)"),
    ("passing", r"`ptxas` failed with error code -(?:1|2|9|15|24|25)\b"),
    ("passing", r"\bBrokenProcessPool\b|\bBrokenExecutor\b"),
    ("toolchain", r"`ptxas` failed with error code 12[67]\b"),
    ("toolchain", r"\bCannot find (?:`?)(?:ptxas|cuobjdump|nvdisasm|ld\.lld)"),
    ("toolchain", r"\bFailed to find C compiler\b|\bneeds (?:a C compiler|Python\.h)\b"),
    ("toolchain", r"\bFileNotFoundError\b|\bPermissionError\b|\bNotADirectoryError\b"),
    ("toolchain", r"\bNo such file or directory\b|\bPermission denied\b"),
    ("toolchain", r"\bRead-only file system\b|\bExec format error\b"),
    ("toolchain", r"\bNo usable temporary directory\b"),
    ("toolchain", r"\bModuleNotFoundError\b|\bImportError\b"),
    ("toolchain", r"cannot open shared object file|libcuda\.so(?:\.\d+)? (?:cannot|not) found"),
    # The loader's words about a library from a broken compiler, a full disk or another release.
    ("toolchain", r"\bfile too short\b|\binvalid ELF header\b|\bwrong ELF class\b"),
    ("toolchain", r"failed to map segment from shared object|cannot enable executable stack"),
    ("toolchain", r"\bversion `[^`'\n]+' not found\b|\bOSError: [^\n]*\bundefined symbol: "),
    ("toolchain", r"\bgot CUDA version: "),  # an assembler too old for Triton
    ("toolchain", r"\bCalledProcessError\b"),
    ("toolchain", r"\bactive drivers?\b|\bno CUDA-capable device\b"),
    ("toolchain", r"\bdriver version is insufficient\b"),
    ("toolchain", r"\bcannot be verified: "),
    ("hung", r"\bdid not (?:compile|bind) within\b"),
    ("hung", r"\bits compiler died \(signal"),
    ("hung", r"`ptxas` raised SIGSEGV"),
    ("budget", re.escape(BUDGET_ENDED)),
)  # fmt: skip
_PATTERNS = tuple((cause, re.compile(pattern)) for cause, pattern in _WORDS)


def cause_of(error: BaseException) -> Cause | None:
    """Return the environment's cause of ``error``; None if the kernel's code is to blame."""
    raised = list(chain(error))
    for each in raised:
        elsewhere: Cause | None = read(each, "cause_elsewhere")  # found by another process
        if elsewhere in get_args(Cause):
            return elsewhere
        if (found := _by_type(each)) is not None:
            return found
    for each in raised:
        if (found := cause_of_text(error_text(each))) is not None:
            return found
        if _raiser(each).startswith(_TOOLS):
            return "toolchain"
    return None


def cause_of_text(reason: str) -> Cause | None:
    """Return the environment's cause that a reason's words show; None if they show none."""
    return next((cause for cause, pattern in _PATTERNS if pattern.search(reason)), None)


def read(error: BaseException, name: str) -> Any:
    """Return an attribute of an exception; None if there is none, or if reading it fails."""
    with suppress(BaseException):
        return getattr(error, name, None)
    return None


def _by_type(error: BaseException) -> Cause | None:
    kind = type(error)
    # A warning is raised only if the program's filters turn it into an error.
    if issubclass(kind, MemoryError | torch.OutOfMemoryError | BrokenExecutor | Warning):
        return "passing"
    if issubclass(kind, subprocess.TimeoutExpired):
        return "hung"
    if issubclass(kind, subprocess.CalledProcessError):
        status = read(error, "returncode")
        return "passing" if type(status) is int and status < 0 else "toolchain"
    if issubclass(kind, OSError) and type(number := read(error, "errno")) is int:
        return "passing" if number in _PASSING_ERRNO else "toolchain"
    return "toolchain" if issubclass(kind, ImportError) else None


def _raiser(error: BaseException) -> str:
    """Return the module whose code raised."""
    frames = frames_of(error)
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


# -- many failures at once -----------------------------------------------------------------

#: The parts of a reason that differ between kernels and calls: names, paths, numbers, addresses.
_OWN = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`|\(/[^)\n]*\)|/[^\s:,]+|0x[0-9a-f]+|\d+")
#: Prefixes that name the kernel or the step that failed.
_WHOSE = re.compile(r"^PluginError: kernel .*?: (?:bind|compile) raised |^its first launch raised ")
#: The number of kernels that have to fail alike before the machine is suspected.
LEAST_ALIKE = 2
#: Reasons of candidates that were never compiled, because others were expected to be faster.
_NOT_TRIED = re.compile(r"(PluginError: )?its search space is empty|expects to take |not tried: ")


def alike(results: Iterable[CandidateResult]) -> bool:
    """Whether at least :data:`LEAST_ALIKE` kernels were tried, and all failed before their first
    launch for the same reason. Something that they share is then broken."""
    kernels, reasons = set(), set()
    for result in results:
        reason = result.reason or ""
        if result.kernel == BASELINE or not is_tried(reason):
            continue
        if result.status != "failed":
            return False
        kernels.add(result.kernel)
        reasons.add(common(reason))
    return len(kernels) >= LEAST_ALIKE and len(reasons) == 1 and "" not in reasons


def is_tried(reason: str) -> bool:
    """Whether a candidate with this reason was compiled: others were not expected to be faster, and
    the budget had not ended."""
    return not _NOT_TRIED.match(reason) and cause_of_text(reason) != "budget"


def common(reason: str) -> str:
    """Return a reason's first line without the parts that differ from kernel to kernel."""
    first = _WHOSE.sub("", reason).partition("\n")[0]
    return _OWN.sub("…", first)


def verdicts(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Return the results that are verdicts on their kernels. Older versions also recorded faults
    of the environment. The end of a budget counts as a verdict: calls do not tune again for it."""
    if alike(results):
        return [r for r in results if r.kernel == BASELINE or not is_tried(r.reason or "")]

    def counts(result: CandidateResult) -> bool:
        return result.status != "failed" or cause_of_text(result.reason or "") in (None, "budget")

    return list(filter(counts, results))
