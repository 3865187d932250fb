"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e3cddb342f03", "5b6bfa4a06ad"),
    "triton.naive": ("47319320354d", "ae4bc81b7105"),
    "triton.grouped": ("fb02604c1176", "b4321aa687df"),
    "triton.split_k": ("29cfed0b317d", "a54fb1efb14d"),
    "triton.skinny": ("d1513db3d9c4", "162246a65894"),
    "triton.fused_epilogue": ("a680e489d98a", "7e215d99c5a6"),
    "triton.persistent": ("154b859689e4", "a24f012506de"),
    "triton.warp_specialized": ("35b286ff0776", "82293eba3dd6"),
    "triton.realigned": ("f9bb600a8047", "8b920f5f38b1"),
    "triton.ragged": ("6ad71afe4bbf", "eb71ceb3c0b9"),
    "triton.gathered": ("49a109faaf27", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
