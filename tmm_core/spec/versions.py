"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e3cddb342f03", "5b6bfa4a06ad"),
    "triton.naive": ("98d791d0e7bd", "ae4bc81b7105"),
    "triton.grouped": ("e59daf37c85e", "b4321aa687df"),
    "triton.split_k": ("d0cc9296b38c", "a54fb1efb14d"),
    "triton.skinny": ("060b3e13cb23", "162246a65894"),
    "triton.fused_epilogue": ("856b54fa4e4e", "7e215d99c5a6"),
    "triton.persistent": ("b980bee6cf08", "a24f012506de"),
    "triton.warp_specialized": ("8a8fead7336a", "82293eba3dd6"),
    "triton.realigned": ("db9cebd5fa85", "8b920f5f38b1"),
    "triton.ragged": ("8671ebb70ad3", "eb71ceb3c0b9"),
    "triton.gathered": ("85ab37ad1fa0", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
