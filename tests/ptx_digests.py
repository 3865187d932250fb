"""Digests of the PTX of every Triton kernel, which belong to the kernels' version numbers.

    python tests/ptx_digests.py

writes the digests of the present code to ``tests/plugins/ptx_digests.json``. It takes half a minute
and needs no GPU. It refuses to write another digest under an unchanged version number. With
``--same-instructions`` it does: for PTX that ptxas turns into the same instructions on as many
registers, which ``cuobjdump -sass`` shows. Records stay valid then.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "plugins" / "ptx_digests.json"
#: The problems of ``compile_for.problems``, in order.
PROBLEMS = ("decode", "large", "transposed", "gated", "finished", "batched", "long_k", "unaligned",
            "fp8", "ragged", "zeroed", "ragged_k", "scattered", "ragged_gated",
            "packed", "packed_gathered", "blocks")  # fmt: skip
#: Representative ones, by compute capability.
CHOSEN = {
    (8, 0): ("large", "ragged"),
    (9, 0): ("decode", "large", "gated", "finished", "fp8", "unaligned", "ragged", "ragged_k",
             "scattered", "packed", "packed_gathered", "blocks"),
}  # fmt: skip
#: Kernels that share most code with another kernel: fewer problems are enough.
FEW = {"triton.grouped": ("decode", "large"), "triton.persistent": ("large", "gated", "fp8")}
#: Lines that do not affect the machine code: positions in the source, comments, the PTX version.
_NEUTRAL = re.compile(r"\s*(\.loc|\.file|\.version|//|\$L__(tmp|func|info|cu)\w*:|$)")

Table = dict[str, Any]


def normalised(ptx: str, name: str) -> str:
    """PTX of the kernel called ``name`` without that name, debug sections and neutral lines."""
    code = ptx.partition("\t.section\t.debug")[0]
    lines = (line.partition("//")[0].rstrip() for line in code.splitlines())
    return "\n".join(line for line in lines if not _NEUTRAL.match(line)).replace(name, "kernel")


def computed(known: Table) -> Table:
    """The table of the present code, with the configs of ``known`` where it has any."""
    from compile_for import problems
    from tmm_triton.plugin import KERNELS, load

    from tmm_core.triton import target_of

    table: Table = {}
    for name in KERNELS:
        kernel: Any = load(name)
        cases: dict[str, Any] = {}
        before = known.get(name, {}).get("cases", {})
        for capability, chosen in CHOSEN.items():
            by_name = dict(zip(PROBLEMS, problems(capability), strict=True))
            for each in chosen:
                problem, case = by_name[each], f"{each} sm_{10 * capability[0] + capability[1]}"
                if each not in FEW.get(name, chosen) or kernel.reasons_against(problem):
                    continue
                if case in before:
                    config = kernel.config_type.from_json(before[case]["config"])
                else:
                    config = kernel.default_config(problem)
                builds = kernel.builds(problem, config)
                if "+" in kernel.version:  # what follows is another kernel's
                    builds = builds[:1]
                digest = hashlib.sha256()
                for build in builds:
                    ptx = build.compile_for(target_of(problem.device)).asm["ptx"]
                    digest.update(normalised(ptx, build.fn.__name__).encode())
                cases[case] = {"config": config.to_json(), "ptx": digest.hexdigest()[:16]}
        table[name] = {"version": kernel.version, "cases": cases}
    return table


def changed(present: Table, known: Table) -> dict[str, list[str]]:
    """The cases whose PTX has changed, of kernels whose version has not, by kernel."""
    found = {}
    for name, kernel in present.items():
        before = known.get(name, {"version": "", "cases": {}})
        cases = [case for case, now in kernel["cases"].items()
                 if before["cases"].get(case, now)["ptx"] != now["ptx"]]  # fmt: skip
        if cases and kernel["version"] == before["version"]:
            found[name] = cases
    return found


def main() -> int:
    import triton

    document = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known = document.get(triton.__version__, {})
    present = computed(known or next(iter(document.values()), {}))
    found = changed(present, known)
    if found and "--same-instructions" not in sys.argv[1:]:
        print(f"raise the `version` of these kernels' classes first: {found}", file=sys.stderr)
        return 1
    TABLE.write_text(json.dumps({triton.__version__: present}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        sys.exit(main())
