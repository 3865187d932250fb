"""Mutants of the auxiliary outputs of epilogues."""

from __future__ import annotations

from mutant import Mutant

CALLS = "tests/core/test_outputs.py"
TILES = "tests/plugins/test_ports.py"

OUTPUTS = [
    Mutant("outputs-undeclared", "supports.py", "        if port.kind not in supports.outputs or",
           "        if", "a kernel is asked for outputs that it does not write", (CALLS,)),
    Mutant("outputs-key", "spec/epilogue.py",
           "        if self.builtin and not self.outputs:\n            return text\n",
           "        if self.builtin:\n            return text\n", "silu's plan answers for silu with outputs", (CALLS,)),
    Mutant("outputs-port-source", "spec/epilogue.py",
           "for each in (port.of, port.device)]", "for each in ()]",
           "another function of the result finds the old kernel", (CALLS,)),
    Mutant("outputs-differentiated", "spec/epilogue.py", "        y = y.detach()\n", "",
           "gradients go through an output while training, and are lost without", (CALLS,)),
    Mutant("outputs-guard", "verify/auxiliary_outputs.py", "            if apart is None and not memory.intact():\n",
           "            if False:\n", "a kernel writes beyond its outputs", (CALLS,)),
    Mutant("outputs-bits", "verify/auxiliary_outputs.py", "                if not same_bits(out, before):\n",
           "                if False:\n", "a sum by atomics passes for deterministic", (CALLS,)),
    Mutant("outputs-nan", "tmm_triton/output_ports.py",
           "        result = tl.where(tl.max(undefined.to(tl.int32), axis=AXIS) > 0, float(\"nan\"), most)\n",
           "        result = most\n", "an amax hides NaN", (TILES,)),
    Mutant("outputs-half", "tiled.py", "        part_n = SUBTILE * tile_n + part\n",
           "        part_n = SUBTILE * tile_n\n", "half of a row is not summed", (TILES,)),
    Mutant("outputs-hopper-own", "hopper/tile_epilogue.py",
           "gl.expand_dims((columns >= corner[1]) & (columns < N), 0)", "gl.expand_dims(columns < N, 0)",
           "what two tiles share is summed twice",
           ("tests/plugins/test_warp_specialized.py::test_rows_are_reduced_to_an_auxiliary_output",)),
    Mutant("outputs-arithmetic", "tmm_triton/triton_kernel.py",
           '        if any(port.reduce == "sum" for port in problem.epilogue.outputs):\n',
           "        if False:\n", "row sums of other tiles are said to be bitwise equal", (TILES,)),
]  # fmt: skip
