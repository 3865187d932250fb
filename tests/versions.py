"""Writes the digests of the kernels' present code into ``tmm_core/spec/versions.py``.

Run it after an edit that changes no machine code of any problem on record, to keep the records."""

from __future__ import annotations

import re
from pathlib import Path

from tmm_core import dispatch
from tmm_core.spec.digest import digest
from tmm_core.spec.versions import KEPT

FILE = Path(__file__).parents[1] / "tmm_core" / "spec" / "versions.py"


def present() -> dict[str, str]:
    """The digest of each kernel's code, by name."""
    registry = dispatch.default_dispatcher().registry
    kernels = [getattr(registry.kernel(name), "kernel") for name in KEPT]  # noqa: B009  # of Asked
    return {kernel.name: digest(type(kernel), kernel.config_type) for kernel in kernels}


if __name__ == "__main__":
    text = FILE.read_text()
    for name, found in present().items():
        text = re.sub(rf'("{re.escape(name)}": \(")[0-9a-f]*', rf"\g<1>{found}", text)
    FILE.write_text(text)
