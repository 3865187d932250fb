"""Survivors of samples that were drawn after all others."""

from __future__ import annotations

from mutant import Mutant

INTEROP = "tests/core/test_boundaries_interop.py"
NN = "tests/core/test_boundaries_nn.py"

REDRAWN = [
    Mutant("redrawn-recorded-product", "nn/gated_product.py",
           "return follow(z, epilogue, found)", "return None",
           "training computes two products where one weight would serve",
           (f"{NN}::test_shards_are_gated_with_and_without_a_gradient",)),
    Mutant("redrawn-part-on-meta", "nn/joint_storage.py",
           "if any(t.is_meta for t in given)", "if all(t.is_meta for t in given)",
           "layers of which one is not yet in memory are never joined",
           (f"{NN}::test_a_weight_in_a_storage_with_another_tensor_is_not_joined",)),
    Mutant("redrawn-names-of-modules", "nn/reached.py",
           "if isinstance(owner, types.ModuleType) else", "if not isinstance(owner, types.ModuleType) else",
           "a model that read a module's constant cannot be pickled",
           ("tests/core/test_replaced_code.py::"
            "test_copies_of_what_was_reached_name_modules_and_classes",)),
    Mutant("redrawn-samples-of-pace", "interop/aten_answers.py",
           "self.saves_us\n        pace.calls = calls = pace.calls + 1\n        if calls >=",
           "self.saves_us\n        pace.calls = calls = pace.calls + 1\n        if calls <",
           "every call of an answered operator takes a sample",
           (f"{INTEROP}::test_samples_of_calls_become_rarer",)),
    Mutant("redrawn-event-of-another-call", "interop/host_bound.py",
           "return waits, not waits", "return waits, waits",
           "time that the GPU saves counts while the GPU waits for the host",
           (f"{INTEROP}::test_the_gpu_is_behind_if_it_has_not_reached_the_event_of_the_last_call",)),
    Mutant("redrawn-columns-overlap", "hopper/tile_shapes.py",
           "across = _overlaps(problem.n, config.BLOCK_N)",
           "across = _overlaps(config.BLOCK_N, problem.n)",
           "an element's sum depends on which tile stores last",
           ("tests/plugins/test_tails.py::"
            "test_tiles_whose_overlap_would_be_summed_differently_are_not_cut",)),
    Mutant("redrawn-tags-of-out", "interop/declaration.py",
           "library.define(out_schema, tags=TAGS)", "library.define(out_schema)",
           "a compiler that takes only compliant operators refuses out=",
           ("tests/core/test_operator.py::test_a_compiler_may_be_limited_to_tagged_operators",)),
    Mutant("redrawn-shards-without-bias", "nn/sharded.py",
           "pair[1] if len(pair) > 1 else None", "pair[1] if len(pair) > 0 else None",
           "a sharded gated MLP without biases raises",
           ("tests/core/test_distributed.py::test_a_sharded_gated_mlp_is_one_gated_product",)),
    Mutant("redrawn-row-of-a-vector", "interop/fallbacks.py",
           "width = shape[-1] if b.dim() > 1 else 1", "width = shape[-1] if b.dim() > 1 else 0",
           "a bias of one row beside a vector b is refused",
           (f"{INTEROP}::test_a_bias_of_one_row_is_a_vector",)),
    Mutant("redrawn-pass-of-before", "interop/inductor.py",
           "before[0] if len(before) == 1", "before[1] if len(before) == 1",
           "disable() raises if torch's option held another pass",
           ("tests/core/test_inductor.py::test_passes_are_taken_back",)),
    Mutant("redrawn-joint-biases", "nn/projections.py",
           "[bias for bias in biases if bias is not None]", "[bias for bias in biases if bias is None]",
           "compiled projections lose their biases",
           (f"{NN}::test_projections_have_their_own_biases",)),
    Mutant("redrawn-code-in-graphs", "nn/reached.py",
           "if self.functions and not torch.compiler.is_compiling():", "if self.functions:",
           "a compiled model reads code, which older compilers cannot",
           ("tests/core/test_replaced_code.py::"
            "test_copies_of_what_was_reached_name_modules_and_classes",)),
    Mutant("redrawn-product-of-a-graph", "nn/projections.py",
           'getattr(layer, "__dict__", {}).pop("_joint_product", None)', "pass",
           "undone layers keep an attribute that a compiled graph set",
           ("tests/core/test_projections.py::"
            "test_logits_state_and_memory_are_those_of_the_unconverted",)),
    Mutant("redrawn-experts-of-a-suite", "bench/suites.py",
           "if any(len(one) != 3 for one in", "if all(len(one) != 3 for one in",
           "experts of another number of sizes are benchmarked beside others",
           ("tests/core/test_grouped.py::test_benched_beside_torch_and_a_loop",)),
    Mutant("redrawn-groups-of-64", "tmm_triton/triton_kernel.py",
           "(16, 32, 64, 128, 256, 512)", "(16, 32, 63, 128, 256, 512)",
           "Triton kernels decline scales for groups of 64",
           ("tests/plugins/test_scaled_step.py::test_groups_are_steps",)),
]  # fmt: skip
