"""Mutants of the benchmark: tuning without records, and the report's sections."""

from __future__ import annotations

from mutant import Mutant

NO_RECORDS = "tests/core/test_no_records.py"

BENCH = [
    Mutant("no-records-layers", "bench/exhaustive.py",
           "CacheStore(Path(folder), layers=())",
           "usual.store",
           "a record answers where none should",
           (f"{NO_RECORDS}::test_no_record_answers_and_none_remains",)),
    Mutant("no-records-limited", "bench/exhaustive.py",
           "SEARCH_LIMITED.set(False)",
           "SEARCH_LIMITED.set(True)",
           "the exhaustive search tries what the tuning tried",
           (f"{NO_RECORDS}::test_a_config_that_only_the_search_has_was_never_proposed",)),
    Mutant("hopper-unlimited", "tmm_triton/hopper/search_space.py",
           "        if not limited:\n            return by_estimate(tiles)\n",
           "",
           "the exhaustive search leaves out tiles",
           (f"{NO_RECORDS}::test_the_hopper_kernel_lifts_its_limit",)),
    Mutant("no-records-wrong", "bench/exhaustive.py",
           "if verifier.verdict(launchers[name]).ok:",
           "if True:",
           "a wrong kernel is the best that a tuning could have found",
           (f"{NO_RECORDS}::test_a_wrong_or_failing_candidate_is_not_the_best",)),
    Mutant("no-records-step", "bench/exhaustive.py",
           "if samples <= SCREENING:",
           "if samples < SCREENING:",
           "the wrong step is blamed for a lost winner",
           (f"{NO_RECORDS}::test_the_step_that_lost_the_best",)),
    Mutant("no-records-margin", "bench/exhaustive.py",
           "if use[best] > blas * (1 - MARGIN):",
           "if use[best] > blas:",
           "a kernel within the noise of BLAS counts as lost",
           (f"{NO_RECORDS}::test_a_tuning_that_found_the_best_has_no_regret",)),
    Mutant("regret-bucket", "bench/runner.py",
           "return bucketed(problem.bare()) if task.bucketed else problem",
           "return problem",
           "random problems are tuned at their own M",
           ("tests/core/test_bench.py::test_regret_compares_the_choice_with_torch_and_the_best_known",)),
    Mutant("quick-order", "bench/quick.py",
           "    for i, largest in enumerate(CPU_SIZES):\n        for members in classes:\n",
           "    for members in classes:\n        for i, largest in enumerate(CPU_SIZES):\n",
           "a quick run that ends early lacks rows",
           ("tests/core/test_quick.py::test_every_row_is_measured_before_any_is_measured_twice",)),
]  # fmt: skip
