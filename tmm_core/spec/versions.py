"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e3cddb342f03", "5b6bfa4a06ad"),
    "triton.naive": ("80c9d157137d", "ae4bc81b7105"),
    "triton.grouped": ("acb3ab3febd6", "b4321aa687df"),
    "triton.split_k": ("131c62a3fb0c", "a54fb1efb14d"),
    "triton.skinny": ("b69cf96c37d4", "162246a65894"),
    "triton.fused_epilogue": ("6f152b122f5f", "7e215d99c5a6"),
    "triton.persistent": ("3cc5ad6f0025", "a24f012506de"),
    "triton.warp_specialized": ("d851cbeb1721", "82293eba3dd6"),
    "triton.realigned": ("b977968a9193", "8b920f5f38b1"),
    "triton.ragged": ("3e3be483cab6", "eb71ceb3c0b9"),
    "triton.gathered": ("856af6083965", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
