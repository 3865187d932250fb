"""Mutants of code whose faults were found by new inputs of the kinds in docs/reliability.md."""

from __future__ import annotations

from mutant import Mutant

VALID = "tests/core/test_valid_calls.py"
QUANTIZED = "tests/core/test_quantized_tensor.py"
DENSE = (f"{VALID}::test_groups_refuse_what_has_no_strides",)
INFERENCE = (f"{QUANTIZED}::test_calls_in_inference_mode",)

INPUTS = [
    Mutant("alpha-float", "spec/arguments.py", '"alpha", "Scalar"', '"alpha", "float"',
           "an alpha of integers loses its last digits",
           (f"{VALID}::test_integers_take_every_alpha_of_their_dtype",)),
    Mutant("alpha-time", "launch/check.py",
           'if not isinstance(alpha, numbers) or alpha.dtype.kind == "m":',
           "if not isinstance(alpha, numbers):",
           "a time is a number", (f"{VALID}::test_alpha_is_refused_where_addmm_refuses_it",)),
    Mutant("packed-layout", "spec/arguments.py", "{0}.dtype, {0}.layout, {0}.device", "{0}.dtype, {0}.device",
           "a sparse index is launched with the plan of a dense one",
           (f"{VALID}::test_a_scale_or_out_without_strides_is_refused",)),
    Mutant("meta-sparse", "launch/warm.py", "    addressable(*call.given)  # a sparse", "    # a sparse",
           "an operator calls itself without end",
           (f"{VALID}::test_a_scale_or_out_without_strides_is_refused",)),
    Mutant("groups-sparse", "tmm_core/grouped.py", "if not all(map(strided, call.given)):", "if False:",
           "a sparse operand of groups is refused in words about storage", DENSE),
    Mutant("out-sparse", "launch/check.py", "    addressable(inputs[0], out)\n", "    _on_one_device(inputs[0], out)\n",
           "a sparse out is refused in words about storage",
           (f"{VALID}::test_a_scale_or_out_without_strides_is_refused",)),
    Mutant("gradients-unequal-shards", "interop/gradients.py",
           "if a.shape[placement.dim] % a.device_mesh.size(along) == 0:", "if True:",
           "gradients of a sequence in unequal shards raise",
           ("tests/core/test_distributed.py::test_unequal_shards_of_a_sequence_have_gradients",)),
    Mutant("gradients-flatten", "interop/gradients.py",
           "dz = dz.reshape(math.prod(dz.shape[:-1]), dz.shape[-1])", "dz = dz.flatten(0, -2)",
           "batched gradients of three dimensions raise",
           ("tests/core/test_autograd.py::test_batched_gradients_of_rows_of_several_dimensions",)),
    Mutant("quantized-inference", "tmm_core/quantized.py",
           "with torch.inference_mode(stored.is_inference()):", "with torch.inference_mode(torch.is_inference_mode_enabled()):",
           "no view of a weight is made in inference mode", INFERENCE),
    Mutant("quantized-decompose", "tmm_core/quantized.py",
           "if (y := operator.decompose(*args, **kwargs)) is not NotImplemented:",
           "if (y := NotImplemented) is not NotImplemented:",
           "a weight has no other dtype in inference mode", INFERENCE),
    Mutant("quantized-checks", "tmm_core/quantized.py", "if operator is _CHECKS:", "if False:",
           "exported programs that cast a quantised parameter raise",
           ("tests/core/test_quantized_tensor.py::test_programs_cast_a_parameter",)),
    Mutant("quantized-properties", "tmm_core/quantized.py", "if function in _TURNS:", "if False:",
           "a compiled call that reads mT recurses without end",
           (f"{QUANTIZED}::test_compiled_calls_that_read_a_property",)),
    Mutant("foreign-zero-scales", "tmm_core/foreign.py",
           "torch.where(zero == 0, 0.0, -zero.float() / scale.float()).mT",
           "(-zero.float() / scale.float()).mT",
           "a group of zeros makes the columns of its row NaN",
           ("tests/core/test_quantize.py::test_groups_of_zeros_that_torchao_wrote",)),
    Mutant("foreign-constant-group", "tmm_core/foreign.py", "torch.where(scale == 0, zero.to", "torch.where(zero != zero, zero.to",
           "a group whose values are its zero point is NaN",
           ("tests/core/test_quantize.py::test_groups_of_zeros_that_torchao_wrote",)),
    Mutant("foreign-uncounted", "tmm_core/foreign.py", 'if zero.device.type == "cpu":', "if False:",
           "zero points of torchao's weights are those of before a write through data",
           ("tests/core/test_quantize.py::test_writes_that_torch_does_not_count_change_zero_points",)),
    Mutant("experts-complex", "nn/experts.py", "or weights.is_complex():", "or False:",
           "a router's complex weights are cut to real ones",
           ("tests/core/test_experts.py::test_no_value_is_cut_to_the_weights_dtype",)),
    Mutant("experts-integers", "nn/experts.py", "if not hidden_states.is_floating_point() or", "if",
           "integer states are rounded results",
           ("tests/core/test_experts.py::test_no_value_is_cut_to_the_weights_dtype",)),
]  # fmt: skip
