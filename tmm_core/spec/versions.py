"""Versions that kernels keep after edits that change no machine code of a problem on record."""

from __future__ import annotations

from collections.abc import Mapping

#: The version of each such kernel of tmm's by the digest of its present code. An edit without an
#: entry makes a new version, and the kernel is measured again.
SAME_MACHINE_CODE: Mapping[str, str] = {
    "aa26858f7473": "5b6bfa4a06ad",  # blas
    "c8f54b60ace9": "ae4bc81b7105",  # triton.naive
    "7880958c16a8": "b4321aa687df",  # triton.grouped
    "d8e3afc34159": "a54fb1efb14d",  # triton.split_k
    "08cc4e4b0163": "162246a65894",  # triton.skinny
    "6eb70af39019": "7e215d99c5a6",  # triton.fused_epilogue
    "259e196c78d0": "a24f012506de",  # triton.persistent
    "1812f1711fc3": "82293eba3dd6",  # triton.warp_specialized
    "0e6f448719cc": "8b920f5f38b1",  # triton.realigned
    "d48fc12c7ca6": "eb71ceb3c0b9",  # triton.ragged
    "1b6ac3c07ab8": "cab81e315da5",  # triton.gathered
}
