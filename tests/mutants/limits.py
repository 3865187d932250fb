"""Mutants of limits: of proposals, of objects from plugins, and of writes by a step."""

from __future__ import annotations

from mutant import Mutant

BLAS = "tests/plugins/test_boundaries_blas.py"
KERNELS = "tests/plugins/test_boundaries_kernels.py"
INTEROP = "tests/core/test_boundaries_interop.py"
DISPATCH = "tests/core/test_boundaries_dispatch.py"
BENCH = "tests/core/test_boundaries_bench.py"
VALID = "tests/core/test_valid_calls.py"
EXPERTS = "tests/core/test_experts.py"
HOPPER = "tests/plugins/test_warp_specialized.py"

LIMITS = [
    Mutant("limit-jvp-bias-vector", "interop/gradients.py",
           "tbias = tbias if len(call.b) > 1 else tbias[0]", "pass",
           "the tangent of a dot product's bias has a dimension too many",
           (f"{INTEROP}::test_tangents_of_every_argument_at_once",)),
    Mutant("limit-jvp-dtype", "interop/gradients.py",
           "t = t.expand(shape).to(dtype)", "t = t.expand(shape)",
           "a tangent has a residual's dtype",
           (f"{INTEROP}::test_a_tangent_has_the_dtype_of_its_result",)),
    Mutant("limit-inside-small", "hopper/scheduler.py",
           "return gl.maximum(gl.minimum(start, latest), 0)", "return gl.minimum(start, latest)",
           "a tile begins before a matrix that is smaller than it",
           (f"{HOPPER}::test_boxes_of_few_rows",)),
    Mutant("limit-estimate-filling", "hopper/estimate.py",
           "return _LAUNCH_US + adding + filling +", "return _LAUNCH_US + adding +",
           "tiles of rows that are not there are guessed",
           (f"{KERNELS}::test_rows_of_a_box_that_are_not_there_take_time",)),
    Mutant("limit-grouped-cleared", "tmm_blas/grouped_mm.py",
           "cleared = Tensor.masked_fill_ if own else Tensor.masked_fill", "cleared = Tensor.masked_fill_",
           "zeros are written to what an epilogue returns",
           (f"{BLAS}::test_zeros_beyond_the_last_group_are_not_written_to_an_epilogues_result",)),
    Mutant("limit-copy-lone-row", "tmm_triton/realigned.py",
           "        if matrix.rows > 1:\n", "        if True:\n",
           "a lone row's stride is passed in 32 bits",
           (f"{KERNELS}::test_a_single_row_of_any_stride_is_copied",)),
    Mutant("limit-configs", "hopper/search_space.py",
           "with_early(list(chosen), _early(problem))[:most]",
           "with_early(list(chosen), _early(problem))",
           "more configs are tuned than the limit says",
           (f"{KERNELS}::test_the_number_of_proposed_configs_is_limited",)),
    Mutant("limit-no-expert", "nn/experts.py",
           "nn.functional.threshold(index.reshape(-1), -1, experts)", "index.reshape(-1)",
           "index -1 is the first expert", (f"{EXPERTS}::test_values_and_gradients",)),
    Mutant("limit-choice", "nn/experts.py",
           "    _check(hidden_states, top_k_index, top_k_weights)\n", "",
           "weights beyond the choice are ignored", (f"{EXPERTS}::test_every_token_has_its_experts_and_weights",)),
    Mutant("limit-own-size", "tmm_cache/record.py",
           'return along if along in ("n", "k") else "m"', 'return "m"',
           "a record of ragged columns is said to be measured at its M",
           (f"{DISPATCH}::test_a_record_is_of_sizes_of_the_ragged_dimension",)),
    Mutant("limit-compared", "tuning/ranking.py",
           "timed = {record.extent, *(m for", 'timed = {record.problem["m"], *(m for',
           "a kernel is said to be compared at M where columns are ragged",
           (f"{DISPATCH}::test_a_record_is_of_sizes_of_the_ragged_dimension",)),
    Mutant("limit-valid-form", "interop/grouped_operator.py",
           "(t.shape, t.dtype, t.device, t.layout, t.is_nested)", "(t.shape, t.device, t.layout, t.is_nested)",
           "a call of another dtype is taken for one that was checked",
           (f"{VALID}::test_a_refusal_is_not_forgotten_by_a_warm_call",)),
    Mutant("limit-valid-epilogue", "interop/grouped_operator.py",
           "for t in (*call[:5], *call[6:])", "for t in call[:5]",
           "a call of another epilogue is taken for one that was checked",
           (f"{VALID}::test_a_refusal_is_not_forgotten_by_a_warm_call",)),
    Mutant("limit-host-per-call", "bench/host.py", "* 1e6 / CALLS)", "* 1e6)",
           "the time of a batch is taken for one call's",
           (f"{BENCH}::test_the_cost_is_of_one_call_of_a_batch",)),
    Mutant("limit-guess-advantage", "dispatch/heuristic.py",
           "least[0] >= baseline[0] * ADVANTAGE", "least[0] > baseline[0] * ADVANTAGE",
           "a guess is taken at the limit", (f"{DISPATCH}::test_an_untuned_choice_has_to_be_a_tenth_faster_than_blas",)),
    Mutant("limit-gated-flops", "nn/gated_product.py", "(x[-1], gate[0] + up[0])", "(x[-1], gate[0])",
           "half of a gated product is counted",
           (f"{INTEROP}::test_flops_of_a_gated_product_are_of_both_halves",)),
]  # fmt: skip
