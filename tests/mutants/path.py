"""Mutants of the path from a miss to a plan, and of tunings that are resumed."""

from __future__ import annotations

from mutant import Mutant

TUNER = "tests/core/test_tuner.py"

PATH = [
    Mutant("steps-in-one", "tuning/stages.py", "            run.samples = mine\n        yield ()\n", "            run.samples = mine\n        yield from ()\n",
           "a tuning is not resumed between measurements", (f"{TUNER}::test_a_tuning_holds_nothing_between_its_steps",)),
    Mutant("close-keeps", "tuning/tuner.py", "            tuning.release()\n", "            pass\n",
           "a tuning that is closed keeps its tensors", (f"{TUNER}::test_a_tuning_that_is_closed_frees_what_it_holds",)),
    Mutant("close-compiles", "candidate_launchers.py", "            self.compilers.cancel_pending(compiling)  # interrupted, or others hung\n", "            pass\n",
           "a tuning that is closed goes on compiling", (f"{TUNER}::test_a_tuning_that_is_closed_frees_what_it_holds",)),
]  # fmt: skip
