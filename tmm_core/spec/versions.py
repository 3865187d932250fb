"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e3cddb342f03", "5b6bfa4a06ad"),
    "triton.naive": ("720aa065076c", "ae4bc81b7105"),
    "triton.grouped": ("ec62b0abe462", "b4321aa687df"),
    "triton.split_k": ("292e018433ae", "a54fb1efb14d"),
    "triton.skinny": ("8edd5344b1a2", "162246a65894"),
    "triton.fused_epilogue": ("6a3e7b6ba721", "7e215d99c5a6"),
    "triton.persistent": ("e06f76cba615", "a24f012506de"),
    "triton.warp_specialized": ("cce9a7fd5a06", "82293eba3dd6"),
    "triton.realigned": ("cd6fbd64ceab", "8b920f5f38b1"),
    "triton.ragged": ("f1163061eeb6", "eb71ceb3c0b9"),
    "triton.gathered": ("4031593aea6f", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
