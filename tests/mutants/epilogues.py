"""Bugs in finding, naming and jitting epilogues."""

from __future__ import annotations

from mutant import Mutant

FILES = "tests/core/test_epilogue_files.py"
SPELLED = "tests/core/test_spellings.py::test_another_spelling_is_refused_with_advice"
RESULTS = "tests/core/test_epilogue_results.py"
JIT, PACKAGE = "triton/device_functions.py", "epilogues/__init__.py"

EPILOGUE_FILES = [
    Mutant("jitted-attribute", JIT,
           'read = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]',
           "read = code.co_names", "a function cannot have the name of Triton's that it calls",
           (f"{FILES}::TestPlainFunctions",)),
    Mutant("jitted-twice", JIT, "@functools.cache\ndef _compiled", "def _compiled",
           "each use of a helper is another function", (f"{FILES}::test_jitting_leaves_the_functions_as_they_are",)),
    Mutant("jitted-closure", JIT, "(*read, *code.co_freevars)", "read",
           "functions that a closure holds are not jitted", (f"{FILES}::test_an_epilogue_is_its_file",)),
    Mutant("polynomial-order", "epilogues/_fast_math.py", "first, *others = map(_literal, coefficients)",
           "*others, first = map(_literal, coefficients)", "on a GPU gelu and tanh are wrong",
           (f"{FILES}::test_a_polynomials_ptx_and_plain_code_compute_the_same",)),
    Mutant("frozen-device", "spec/epilogue.py", "{name: frozen(getattr(stage, name)) for name in names}",
           '{name: frozen(getattr(stage, name)) for name in names if "device" not in name}',
           "a plain function's closure variable changes in a kernel with the old key",
           (f"{FILES}::test_a_closure_variable_that_changes_is_another_epilogue",)),
    Mutant("text-device", "spec/epilogue.py",
           "if not callable(function) and (function is not None or name == \"reference\"):", "if False:",
           "a kernel fails where the epilogue was wrong",
           (f"{FILES}::test_an_invalid_device_function_is_refused",)),
    Mutant("tensor-flag", "spec/epilogue.py", "if type(flag := getattr(self, name)) is not bool:", "if False:",
           "an epilogue whose flag is a tensor sets every kernel aside",
           ("tests/core/test_boundaries_registry.py::test_an_invalid_epilogue_is_refused",)),
    Mutant("text-port", "spec/port.py", "if self.device is not None and not callable(self.device):", "if False:",
           "a kernel fails where the output was wrong",
           (f"{FILES}::test_an_invalid_device_function_is_refused",)),
    Mutant("gated-unfound", "epilogues/_gated.py", "    GATED_BY[activation.name] = name\n", "",
           "layers do not find a gated form", (f"{FILES}::test_an_epilogue_is_its_file",)),
    Mutant("gated-product-rule", "epilogues/relu.py", ", device_derivative=reglu_slopes", "",
           "zero times an infinite gradient is NaN",
           ("tests/plugins/test_limits.py::test_a_closed_gate_passes_no_infinite_gradient",)),
    Mutant("spelled-class", PACKAGE, " or isinstance(function, type)", "",
           "a class is taken for an instance of it", (SPELLED,)),
    Mutant("spelled-arguments", PACKAGE, "    elif given:\n", "    elif False:\n",
           "an argument that no epilogue has is dropped", (SPELLED,)),
    Mutant("spelled-threshold", "epilogues/softplus.py", "(beta, threshold) == (1, 20)", "beta == 1",
           "another threshold is dropped", (SPELLED,)),
    Mutant("reference-shape", "spec/port.py", "if y.shape != shape:", "if False:",
           "a residual broadcasts what an epilogue returned", (f"{RESULTS}::test_a_result_of_another_shape_is_refused",)),
    Mutant("reference-unchecked-by-blas", "spec/epilogue.py", "self.reference if self.builtin else self.apply_to", "self.reference",
           "BLAS returns what an epilogue returned", (f"{RESULTS}::test_a_result_of_another_shape_is_refused",)),
    Mutant("recorded-dtype", "interop/gradients.py", "return y.to(z.dtype)  # a", "return y  # a",
           "the result has another dtype while training", (f"{RESULTS}::test_a_reference_may_compute_in_another_dtype",)),
    Mutant("gated-by-torch-dtype", "nn/gated_product.py",
           "return in_dtype(warm.epilogue_of(text).applied(gate, up), gate.dtype)", "return warm.epilogue_of(text).applied(gate, up)",
           "down_proj gets another dtype", (f"{RESULTS}::test_a_layer_has_the_dtype_of_its_parameters",)),
]  # fmt: skip
