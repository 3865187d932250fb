"""Mutants drawn at random from covered lines of layers, integrations and the public functions,
which no test noticed."""

from __future__ import annotations

from mutant import Mutant

CALLS = "tests/core/test_boundaries_calls.py"
FUSING = "tests/core/test_boundaries_fusing.py"
INTEROP = "tests/core/test_boundaries_interop.py"
KERNELIZE = "tests/core/test_boundaries_integrations.py"
NN = "tests/core/test_boundaries_nn.py"
RANKS = "tests/core/test_boundaries_ranks.py"
SIGNALS = "tests/core/test_signals.py"

DRAWN_LAYERS = [
    Mutant("layers-interrupted", "tmm_core/api.py",
           "        reraise(error)\n        if _are_tensors(x", "        if _are_tensors(x",
           "a call that a signal interrupts goes on",
           (f"{SIGNALS}::test_a_call_that_torch_could_serve_too_is_interrupted",)),
    Mutant("layers-planned-policy", "tmm_core/api.py",
           "    with settings.override(kernel=kernel, config=config, on_cache_miss=on_cache_miss) as current:",
           "    with settings.override(kernel=kernel, config=config) as current:",
           "plan() ignores on_cache_miss",
           (f"{CALLS}::test_a_call_is_planned_and_explained_with_the_config_that_is_forced",)),
    Mutant("layers-other-widths", "nn/joint_storage.py",
           "same = t.dtype is start.dtype and t.shape[1:] == start.shape[1:]",
           "same = t.dtype is start.dtype",
           "weights of different widths are read as one",
           (f"{NN}::test_weights_that_are_not_adjacent_make_two_products",)),
    Mutant("layers-examined-in-graphs", "integrations/kernel_layers.py",
           "if kind not in _proven and not torch.compiler.is_compiling():", "if kind not in _proven:",
           "a class that was not examined before cannot be compiled as one graph",
           ("tests/core/test_transformers.py::test_a_class_that_is_not_proven_runs_its_own_forward",)),
    Mutant("layers-named-as-experts", "nn/convert.py",
           "if isinstance(module, (experts.TransformersExperts, experts.Experts)):", "if True:",
           "parameters of other code are rounded, or convert() raises",
           (f"{FUSING}::test_parameters_named_as_those_of_experts_are_not_rounded",)),
    Mutant("layers-later-rows", "interop/constants.py",
           "(*terms, first.product.args[-2], b)", "(*terms, gate.product.args[-2], b)",
           "a joint product reads rows that are computed behind it",
           (f"{INTEROP}::test_two_products_of_frozen_weights_become_one",)),
    Mutant("layers-verdict-of-others", "tools/ranks.py",
           'board.await_all(awaited, until=f"verdict/{attempt}")', "board.await_all(awaited)",
           "a rank waits on after the others have decided",
           (f"{RANKS}::test_a_verdict_of_another_rank_ends_the_wait",)),
    Mutant("layers-restored-before", "integrations/transformers.py",
           "    _kernelized.discard(model)\n", "",
           "unregister() undoes what the user did to a model after restoring it",
           (f"{KERNELIZE}::test_modules_of_named_classes_are_kernelized_and_subclasses_are_not",)),
    Mutant("layers-quantised-in-graphs", "nn/projections.py",
           "if any(type(weight) is Quantized for weight in weights):", "if False:",
           "attention with quantised weights does not compile",
           (f"{NN}::test_quantised_projections_are_one_product_outside_graphs",)),
    Mutant("layers-residual-apart", "interop/grouped_operator.py",
           "inner = residual if rest is None and head is IDENTITY and not clean else None",
           "inner = None", "a learned grouped product with a residual is rounded twice",
           (f"{INTEROP}::test_a_learned_product_of_groups_adds_its_residual_itself",)),
    Mutant("layers-residual-before-places", "interop/grouped_operator.py",
           "inner = residual if rest is None and head is IDENTITY and not clean else None",
           "inner = residual if rest is None and head is IDENTITY else None",
           "residuals are scattered with the rows of a learned grouped product",
           (f"{INTEROP}::test_a_learned_product_of_groups_adds_its_residual_itself",)),
    Mutant("layers-absent-module", "nn/fused.py",
           "if fused is not None and module is fused:", "if module is fused:",
           "a converted sequence passes over a module that is None",
           ("tests/core/test_convert.py::test_a_sequence_that_grows_and_shrinks",)),
    Mutant("layers-one-scale-of-a-batch", "tmm_core/grouped.py",
           "t.flatten(0, 1) if t.dim() > 1 else t  # a grid", "t.flatten(0, 1)  # a grid",
           "a batch with a bias per matrix takes no scale of one number",
           ("tests/core/test_grouped_fp8.py::test_a_batch_takes_a_bias_each",)),
    Mutant("layers-summands-of-rows", "interop/constants.py",
           'if any(tuple(bias.meta["val"].shape) != (half,) for bias in biases):', "if False:",
           "a graph with two learned summands of rows warns that a pass raised",
           (f"{INTEROP}::test_products_of_frozen_weights_that_stay_two",)),
    Mutant("layers-last-rank", "tools/ranks.py",
           "if rank != owner.get(index)] or crew", "if rank != owner.get(index)]",
           "the last rank fails once it has no other to repeat a measurement",
           (f"{RANKS}::test_the_last_rank_measures_its_own_failure_again",)),
]  # fmt: skip
