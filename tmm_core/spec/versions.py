"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e090bc248371", "5b6bfa4a06ad"),
    "triton.naive": ("d7a78366eaa9", "ae4bc81b7105"),
    "triton.grouped": ("2654ae733dc5", "b4321aa687df"),
    "triton.split_k": ("0a9fadc7b4d1", "a54fb1efb14d"),
    "triton.skinny": ("87269e52b238", "162246a65894"),
    "triton.fused_epilogue": ("ddfeaa17b720", "7e215d99c5a6"),
    "triton.persistent": ("1796b8db96ce", "a24f012506de"),
    "triton.warp_specialized": ("b5efe1a93306", "82293eba3dd6"),
    "triton.realigned": ("dae508eaa7ea", "8b920f5f38b1"),
    "triton.ragged": ("cd7a1993b9f8", "eb71ceb3c0b9"),
    "triton.gathered": ("e72f5c2d229d", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
