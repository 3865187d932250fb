"""Mutants of functions picked at random that no test noticed, and of their neighbours."""

from __future__ import annotations

from mutant import Mutant

OWN_LOCK = "tests/core/test_invariant.py::test_a_tuning_of_this_mode_takes_its_own_lock_again"

VERIFIER = "tests/core/test_verifier.py"
COPIES = "tests/core/test_boundaries_bench.py::test_each_copy_of_the_operands_is_multiplied"

PICKED = [
    Mutant("picked-lock-of-measuring", "dispatch/measuring.py",
           "threading.RLock()", "threading.Lock()",
           "a tuning of batch-invariant mode waits for itself for ever", (OWN_LOCK,)),
    Mutant("picked-lock-of-a-child", "dispatch/dispatcher.py",
           "threading.RLock()", "threading.Lock()",
           "a tuning of batch-invariant mode waits for itself in a forked child", (OWN_LOCK,)),
    Mutant("picked-lock-of-a-childs-registry", "registry/registry.py",
           "        self.loading_lock = threading.RLock()\n\n    # -- loading",
           "        self.loading_lock = threading.Lock()\n\n    # -- loading",
           "a forked child waits for itself while it loads plugins",
           ("tests/core/test_registry.py::test_nothing_is_loaded_before_it_is_needed",)),
    Mutant("picked-keys-of-autograd", "tmm_core/compat.py",
           "keys.add(key.AutogradOther).add(key.AutogradNestedTensor)", "keys.add(key.AutogradOther)",
           "without a private name, a call below autograd may be recorded again",
           ("tests/core/test_compat.py::"
            "test_guards_without_private_names_exclude_the_same_keys",)),
    Mutant("picked-inference-mode-of-the-caller", "verify/verifier.py",
           "with torch.inference_mode(False), torch.no_grad():\n            try:",
           "with torch.no_grad():\n            try:",
           "right kernels are refused where the first call is made in inference mode",
           (f"{VERIFIER}::test_a_verification_within_inference_mode_makes_ordinary_tensors",)),
    Mutant("picked-inputs-before-they-are-rewritten", "verify/ways_of_use.py",
           "        self._check_inputs()  # before they are rewritten\n", "",
           "a kernel that changes its input passes at its first use",
           (f"{VERIFIER}::"
            "test_an_input_that_a_launch_changed_before_it_is_rewritten_is_noticed",)),
    Mutant("picked-copies-of-groups", "bench/grouped_baselines.py",
           "call = calls[copy]", "call = calls[0]",
           "torch's grouped product is timed on operands in the L2 cache", (COPIES,)),
    Mutant("picked-copies", "bench/providers.py",
           "call = calls[copy]", "call = calls[0]",
           "the eager call is timed on operands in the L2 cache", (COPIES,)),
    Mutant("picked-wide-stores", "hopper/kernel_arguments.py",
           "        made._promise_wide_stores()\n", "",
           "scattered rows are stored two bytes at a time",
           ("tests/plugins/test_warp_specialized.py::"
            "test_rows_without_tma_are_stored_16_bytes_at_a_time",)),
    Mutant("picked-parsed-epilogue", "interop/calls.py",
           "    if isinstance(epilogue, Epilogue):\n        return epilogue.interned()\n    return epilogue if",
           "    return epilogue if",
           "each call through the operator parses its epilogue, which takes 0.2 ms",
           ("tests/core/test_boundaries_calls.py::"
            "test_an_epilogue_has_its_text_without_the_registry",)),
    Mutant("picked-scales-of-blocks", "tmm_blas/blas.py",
           'product(a, b, parts["a_scale"], parts["b_scale"])',
           'product(a, b, parts["b_scale"], parts["a_scale"])',
           "cuBLASLt multiplies each operand with the other's scales",
           ("tests/core/test_quantize_rows.py::"
            "test_each_operand_has_its_scales_and_terms_are_added",)),
    Mutant("picked-module-as-a-program", "spec/code.py",
           "if spec is None or not spec.parent:", "if spec is None:",
           "records of a kernel in a module that runs with python -m are valid in one process",
           ("tests/core/test_code.py::test_files_of_the_program_that_runs",)),
    Mutant("picked-layout-of-a-saved-product", "interop/gradients.py",
           "if _is_direct(grad, z) and takes(z):", "if _is_direct(grad, z):",
           "a product that a hook unpacks in another layout is read in its old one",
           ("tests/core/test_autograd.py::"
            "test_saved_products_may_be_unpacked_in_another_layout",)),
    Mutant("picked-outputs-of-a-part", "launch/warm.py",
           "epilogue.bare.parts if epilogue.outputs else epilogue.parts", "epilogue.parts",
           "a differentiated call whose first stage has outputs raises",
           ("tests/core/test_outputs.py::"
            "test_gradients_where_the_first_stage_has_the_outputs",)),
    Mutant("picked-bind-of-a-declined-problem", "testing/conformance.py",
           "            if not self.kernel.reasons_against(other):\n                self._bind(other)",
           "            self._bind(other)",
           "the suite fails a right kernel, which is bound to a problem that it declines",
           ("tests/core/test_boundaries_testing.py::"
            "test_a_launcher_is_verified_after_another_problem_that_is_served_was_bound",)),
    Mutant("picked-wide-scales-of-groups", "tmm_blas/blas.py",
           "    if any(wide_range(problem, grid.dtype) for grid in grids if grid is not None):\n"
           "        return None\n", "",
           "values times scales of groups beyond fp16 are infinite",
           ("tests/plugins/test_dequantize.py::"
            "test_scales_beyond_fp16_multiply_the_product",)),
    Mutant("picked-hooks-of-others", "nn/sharded.py",
           "if None in (before, after) or (before, after) != (before_up, after_up):",
           "if (before, after) != (before_up, after_up):",
           "hooks that another library registered on the up projection are not called",
           ("tests/core/test_boundaries_nn.py::test_two_layers_are_placed_alike_by_equal_hooks",)),
    Mutant("picked-recursion-of-blas", "launch/warm.py",
           "if issubclass(type(error), RecursionError) and plan.kernel != BASELINE:",
           "if issubclass(type(error), RecursionError):",
           "an epilogue that calls itself without end is started again",
           ("tests/core/test_boundaries_launch.py::"
            "test_the_consequences_of_a_launch_that_raises",)),
    Mutant("picked-guards-of-another-torch", "launch/plan.py",
           "return guards.check if guards.check(*given) is True else None",
           "return guards.check",
           "each call of a plan raises where torch's guards changed",
           ("tests/core/test_boundaries_launch.py::"
            "test_guards_that_do_not_accept_their_own_tensors_are_not_used",)),
    Mutant("picked-key-of-a-counter", "testing/epilogue_conformance.py",
           "        assert replace(self.epilogue).key == self.epilogue.key\n", "",
           "the suite passes an epilogue whose key depends on how often it was called",
           ("tests/core/test_epilogue_conformance.py::"
            "test_a_function_that_changes_a_variable_that_it_reads_is_reported",)),
    Mutant("picked-dtype-of-a-reference", "testing/epilogue_conformance.py",
           '            self._check(y.dtype == dtype, "reference", f"it returns {y.dtype} for {dtype}")\n',
           "", "the suite passes an epilogue whose result has another dtype",
           ("tests/core/test_epilogue_conformance.py::"
            "test_a_reference_that_changes_the_dtype_is_reported",)),
    Mutant("picked-output-vjp-of-a-gate", "testing/epilogue_conformance.py",
           '        self._check(not self.epilogue.gated, "output_vjp", "not for a gated epilogue")\n',
           "", "the suite raises a ValueError of its own for a gated epilogue with an output_vjp",
           ("tests/core/test_epilogue_conformance.py::"
            "test_a_derivative_by_the_output_of_a_gated_epilogue_is_reported",)),
    Mutant("picked-case-of-a-key", "tmm_cache/keys.py",
           'canonical(mapping).encode("ascii")', 'canonical(mapping).lower().encode("ascii")',
           "records of problems that differ by the case of a letter replace each other",
           ("tests/cache/test_cache_keys.py::"
            "test_documents_that_differ_by_case_or_type_have_different_digests",)),
    Mutant("picked-report-of-enable", "interop/aten_report.py",
           "saved {self.saved_us / 1e3:.3g} ms", "saved {self.saved_us / 1e6:.3g} ms",
           "enable()'s report shows a thousandth of the time that it saved",
           ("tests/core/test_enable.py::test_the_text_of_a_report",)),
    Mutant("picked-outputs-of-atomic-sums", "verify/auxiliary_outputs.py",
           "self._deterministic, self._slack = deterministic, slack",
           "self._deterministic, self._slack = True, slack",
           "a kernel is refused for outputs whose bits it does not promise",
           ("tests/core/test_outputs.py::"
            "test_outputs_of_a_kernel_with_atomic_sums_may_have_other_bits",)),
    Mutant("picked-reasons-that-change", "testing/conformance.py",
           "assert again == reasons, f\"two results", "assert len(again) == len(reasons), f\"two results",
           "a kernel passes that gives other reasons each time",
           ("tests/core/test_testing.py::test_a_wrong_kernel_fails[GivesAnotherReason]",)),
    Mutant("picked-place-of-an-output", "testing/epilogue_conformance.py",
           "function = port.device or port.of", "function = port.of",
           "a wrong device function of an output is sought in its torch function",
           ("tests/core/test_epilogue_conformance.py::"
            "test_a_wrong_function_is_named_with_its_file_and_line",)),
    Mutant("picked-dtypes-of-scales", "testing/format_conformance.py",
           "scale = Scale(block, self.format.scale_dtypes[-1])",
           "scale = Scale(block, self.format.scale_dtypes[0])",
           "conformance stores no scale whose dtype a record has to name",
           ("tests/core/test_format_conformance.py::"
            "test_a_scale_that_is_read_back_with_another_dtype_fails",)),
    Mutant("picked-sizes-of-groups", "testing/ragged_conformance.py",
           "return problem.at(2 * problem.extent - 3)", "return problem.at(2 * problem.extent)",
           "conformance tries groups of sizes that blocks divide only",
           ("tests/core/test_boundaries_testing.py::"
            "test_groups_have_sizes_that_no_block_divides",)),
    Mutant("picked-alpha-beside-outputs", "testing/probe_problems.py",
           "aligned = contiguous(replace(base, m=odd[\"m\"], scaled=True))",
           "aligned = contiguous(replace(base, m=odd[\"m\"]))",
           "conformance tries auxiliary outputs without alpha only",
           ("tests/core/test_boundaries_testing.py::test_the_probes_have_every_dtype_term_and_epilogue",)),
    Mutant("picked-split-last-wave", "tmm_triton/hopper/estimate.py",
           "return count // sms + 1 / config.tail_splits",
           "return -(-count // sms) + 1 / config.tail_splits",
           "splitting the tiles of the last wave is expected to cost time, and not proposed",
           ("tests/plugins/test_warp_specialized.py::"
            "test_tiles_of_the_last_wave_that_are_split_take_a_part_of_its_time",)),
    Mutant("picked-blas-of-another-thread", "registry/registry.py",
           "if self._baseline is not None and BASELINE not in self._kernels:",
           "if self._baseline is not None:",
           "two threads add two objects of BLAS, and choices hold the first",
           ("tests/core/test_registry.py::"
            "test_the_blas_that_another_thread_has_added_meanwhile_stays",)),
    Mutant("picked-tangent-dtype", "interop/gradients.py",
           "ctx.output, ctx.out_dtype = autograd_state.form_of(y), out_dtype",
           "ctx.output, ctx.out_dtype = autograd_state.form_of(y), None",
           "tangents of an fp32 result are rounded to the operands' 16 bits",
           ("tests/core/test_autograd.py::"
            "test_the_tangent_of_an_fp32_result_is_not_rounded",)),
]  # fmt: skip
