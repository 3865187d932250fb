"""Mutants of the benchmark: tuning at the edge of a bucket, quick runs and kernels' limits."""

from __future__ import annotations

from mutant import Mutant

BENCH = [
    Mutant("hopper-unlimited", "tmm_triton/hopper/search_space.py",
           "        if not limited:\n            return by_estimate(tiles)\n",
           "",
           "the exhaustive search leaves out tiles",
           ("tests/plugins/test_warp_specialized.py::test_an_exhaustive_search_lifts_the_limit",)),
    Mutant("regret-bucket", "bench/runner.py",
           "return bucketed(problem.bare()) if task.bucketed else problem",
           "return problem",
           "random problems are tuned at their own M",
           ("tests/core/test_bench.py::test_regret_holds_the_choice_against_torch_and_the_best_known",)),
    Mutant("quick-order", "bench/quick.py",
           "    for i, largest in enumerate(CPU_SIZES):\n        for members in classes:\n",
           "    for members in classes:\n        for i, largest in enumerate(CPU_SIZES):\n",
           "a quick run that ends early lacks rows",
           ("tests/core/test_quick.py::test_every_row_is_measured_before_any_is_measured_twice",)),
]  # fmt: skip
