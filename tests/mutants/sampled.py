"""Mutants that a random sample of conditions, limits and constants had, and that no test noticed."""

from __future__ import annotations

from mutant import Mutant

INTEROP = "tests/core/test_boundaries_interop.py"
VERIFIER = "tests/core/test_verifier.py"
THREADS = "tests/core/test_two_threads.py"
TRUST = "tests/core/test_trust.py"

SAMPLED = [
    Mutant("sampled-filled-vector", "verify/random_inputs.py",
           "    if t.dim() < 2 or not t.numel():\n",
           "    if not t.numel():\n",
           "a vector cannot be filled",
           ("tests/core/test_random_inputs.py::test_vectors_and_empty_tensors_are_filled",)),
    Mutant("sampled-silent-failure", "tuning/environment_faults.py",
           'cause_of_text(result.reason or "") in (None, "budget")',
           'cause_of_text(result.reason) in (None, "budget")',
           "a failure without a reason stops the call",
           ("tests/core/test_environment.py::test_verdicts_on_record_stay",)),
    Mutant("sampled-old-torch", "tmm_blas/grouped_mm.py",
           'if not hasattr(torch, "_scaled_grouped_mm"):',
           "if False:",
           "an older torch is asked for a product that it does not have",
           ("tests/plugins/test_boundaries_blas.py::test_a_torch_without_a_grouped_8_bit_product",)),
    Mutant("sampled-vmap-rank", "interop/vmap.py",
           "rank = max(*ranks, 2) - ranks.count(1)",
           "rank = 2 - ranks.count(1)",
           "a mapped residual is added to the wrong dimensions",
           (f"{INTEROP}::test_mapped_residuals_meet_the_last_dimensions_of_a_result",)),
    Mutant("sampled-joinable", "nn/fusing.py",
           "if not joinable(first, second) or any(shared):",
           "if any(shared):",
           "gate and up of other dtypes become one product",
           ("tests/core/test_convert.py::"
            "test_a_gate_and_up_that_cannot_lie_side_by_side_stay_apart",)),
    Mutant("sampled-bytes", "tmm_cache/measurements.py",
           "if size < 1024:",
           "if False:",
           "every count of bytes is told in GiB",
           ("tests/cache/test_cache_summaries.py::test_counts_of_bytes_have_the_unit_that_fits",)),
    Mutant("turns-not-taken", "verify/two_threads.py",
           '            if event == "line":\n',
           '            if event == "opcode":\n',
           "threads share state by chance alone",
           (f"{THREADS}::test_state_that_launches_share_is_found_without_chance",)),
    Mutant("turns-for-ever", "verify/two_threads.py",
           "self._away.add(other)  #",
           "pass  #",
           "each line waits anew for a thread that needs this one's lock",
           (f"{THREADS}::test_turns_alternate_and_a_thread_that_is_away_is_not_waited_for",)),
    Mutant("turns-no-whole-launch", "verify/two_threads.py",
           'if self._pace == "launches" and self._place:',
           "if False:",
           "no launch is made within another",
           (f"{THREADS}::test_whole_launches_between_the_lines_of_another",)),
    Mutant("result-records", "verify/checked_launch.py",
           "        if result.requires_grad:\n",
           "        if False:\n",
           "a call without gradients returns what records one",
           (f"{VERIFIER}::test_a_result_that_is_more_than_its_values_is_wrong",)),
    Mutant("tall-tiles", "dispatch/first_use.py",
           "math.lcm(TILE, *(v for v in tall if v % _STEP == 0))",
           "TILE",
           "a size whose last tile is filled otherwise is not verified",
           (f"{TRUST}::test_sizes_of_one_class_fill_a_tall_tile_alike",)),
]  # fmt: skip
