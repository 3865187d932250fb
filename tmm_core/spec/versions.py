"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e3cddb342f03", "5b6bfa4a06ad"),
    "triton.naive": ("c8d08d82081b", "ae4bc81b7105"),
    "triton.grouped": ("df77509136f4", "b4321aa687df"),
    "triton.split_k": ("e1f37b3f356f", "a54fb1efb14d"),
    "triton.skinny": ("1495a934b808", "162246a65894"),
    "triton.fused_epilogue": ("fef999bb0b3a", "7e215d99c5a6"),
    "triton.persistent": ("072c509943af", "a24f012506de"),
    "triton.warp_specialized": ("9e6df23bc66f", "82293eba3dd6"),
    "triton.realigned": ("37304319578c", "8b920f5f38b1"),
    "triton.ragged": ("2ef102d4b844", "eb71ceb3c0b9"),
    "triton.gathered": ("88a3106254af", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
