"""Versions that tmm's kernels keep after edits that change no machine code of a problem on record.

After such an edit, ``python tests/versions.py`` writes the digests of the present code here.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The digest of a kernel's present code, and the version that it has. Any other code has its own
#: digest as its version, and the kernel is measured again.
KEPT: Mapping[str, tuple[str, str]] = {
    "blas": ("e090bc248371", "5b6bfa4a06ad"),
    "triton.naive": ("d670c704c8d2", "ae4bc81b7105"),
    "triton.grouped": ("211c828a7eb6", "b4321aa687df"),
    "triton.split_k": ("b8bd146e4bff", "a54fb1efb14d"),
    "triton.skinny": ("8fbc974de883", "162246a65894"),
    "triton.fused_epilogue": ("e2c52b5cde63", "7e215d99c5a6"),
    "triton.persistent": ("e091d545bf81", "a24f012506de"),
    "triton.warp_specialized": ("8f2a3722fa10", "82293eba3dd6"),
    "triton.realigned": ("d12e1435e746", "8b920f5f38b1"),
    "triton.ragged": ("590b57e21ff0", "eb71ceb3c0b9"),
    "triton.gathered": ("0e5187c877ba", "cab81e315da5"),
}


def kept(kernel: str, digest: str) -> str:
    """The version of tmm's kernel of that name, whose code has this digest."""
    present, version = KEPT.get(kernel, ("", ""))
    return version if digest == present else digest
