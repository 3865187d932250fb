"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e3cddb342f03", "5b6bfa4a06ad"),
    "triton.naive": ("800a9f722935", "ae4bc81b7105"),
    "triton.grouped": ("77aedc1a4ada", "b4321aa687df"),
    "triton.split_k": ("7386109bb240", "a54fb1efb14d"),
    "triton.skinny": ("0406dc8c27c4", "162246a65894"),
    "triton.fused_epilogue": ("1940a9133035", "7e215d99c5a6"),
    "triton.persistent": ("46c3a7b250bf", "a24f012506de"),
    "triton.warp_specialized": ("246d5f6f79db", "82293eba3dd6"),
    "triton.realigned": ("db9cebd5fa85", "8b920f5f38b1"),
    "triton.ragged": ("b10a6e629574", "eb71ceb3c0b9"),
    "triton.gathered": ("05da6e69ce18", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
