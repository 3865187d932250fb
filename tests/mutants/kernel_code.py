"""Mutants of epilogues' keys and of limits in kernels."""

from __future__ import annotations

from mutant import Mutant

IDENTITY = "tests/core/test_identity.py"
CODE = "tests/core/test_code.py"
LIMITS = "tests/plugins/test_limits.py"
WIDE = "tests/plugins/test_wide_strides.py"
PAIRS = f"{IDENTITY}::test_functions_that_differ_in_one_thing_give_their_own_answers"

KERNELS = [
    Mutant(
        "epilogue-keeps-cells",
        "spec/epilogue.py",
        "            if cell.cell_contents is not value:\n",
        "            if False:\n",
        "a closure that changed keeps its old plan",
        (f"{IDENTITY}::test_a_closure_that_changes_later_is_not_taken_for_a_new_one",),
    ),
    Mutant(
        "epilogue-keyword-parameters",
        "spec/epilogue.py",
        "lambda argument: argument.kind in by_position, arguments",
        "lambda argument: True, arguments",
        "a partial's keyword is passed by position too",
        (PAIRS,),
    ),
    Mutant(
        "epilogue-lasting",
        "dispatch/measuring.py",
        "self.store.save if key.epilogue.lasting else self.store.hold",
        "self.store.save",
        "records that no process can use fill the disk",
        (f"{IDENTITY}::test_no_record_of_an_epilogue_of_one_process_is_saved",),
    ),
    Mutant(
        "ragged-one-row",
        "tmm_triton/operands.py",
        "elif extent <= 1 and (i or not gathered):",
        "elif extent <= 1:",
        "one indexed row is row 0",
        (f"{WIDE}::test_few_products_of_many_rows_and_many_of_few",),
    ),
    Mutant(
        "order-of-amd",
        "tmm_triton/reduction_order.py",
        "hopper = problem.device.nvidia",
        'hopper = problem.device.type == "cuda"',
        "an MI200 is taken to sum as a Hopper GPU",
        ("tests/plugins/test_arithmetic.py::test_other_gpus_and_operands_have_no_reduction_order",),
    ),
    Mutant(
        "gathered-alignment",
        "tmm_blas/grouped_mm.py",
        "multiply = _product(side_by_side)",
        "multiply = _product(problem)",
        "torch refuses the strides of gathered rows",
        (f"{WIDE}::test_few_products_of_many_rows_and_many_of_few",),
    ),
    Mutant(
        "operand-lone-stride",
        "spec/operand.py",
        "s_row if rows == 1 else 0)",
        "0)",
        "the stride of a lone row does not fit its type",
        (f"{WIDE}::test_the_only_row_may_have_any_stride",),
    ),
    Mutant(
        "ports-least",
        "tmm_triton/output_ports.py",
        'least: tl.constexpr = float("-inf") if REDUCE == "max" else 0.0\n            terms',
        "least: tl.constexpr = 0.0\n            terms",
        "a maximum below zero is zero at edge tiles",
        (f"{LIMITS}::test_a_maximum_below_zero_at_edge_tiles",),
    ),
    Mutant(
        "derivative-at-zero",
        "epilogues/leaky_relu.py",
        "return tl.where(z > 0, 1.0, slope)",
        "return tl.where(z >= 0, 1.0, slope)",
        "leaky_relu's slope at zero is another than torch's",
        (f"{LIMITS}::test_the_slope_at_zero_is_torchs",),
    ),
    Mutant(
        "port-fp64",
        "spec/port.py",
        "y.to(torch.promote_types(y.dtype, torch.float32))",
        "y.to(torch.float32)",
        "outputs of fp64 have fp32's precision",
        (f"{LIMITS}::test_an_output_of_fp64_keeps_its_precision",),
    ),
    Mutant(
        "operand-strided-row",
        "spec/operand.py",
        "elif s_row == 1 or rows <= 1:",
        "elif s_row == 1 or rows < 1:",
        "a strided row is declined",
        (f"{LIMITS}::test_a_matrix_of_one_strided_row_or_column_has_a_layout",),
    ),
    Mutant(
        "supports-below",
        "spec/supports.py",
        "(major, minor) <= device.capability < (below",
        "(major, minor) <= device.capability <= (below",
        "a kernel is offered on the capability that it excludes",
        (f"{LIMITS}::test_capabilities_from_the_least_up_to_the_limit_are_served",),
    ),
    Mutant(
        "box-rows",
        "tmm_triton/hopper/operand_layout.py",
        "min(rows, max(8, 1 << (problem.m - 1).bit_length()))",
        "min(rows, 1 << (problem.m - 1).bit_length())",
        "a box has fewer rows than swizzling needs",
        (f"{LIMITS}::test_a_box_has_as_many_rows_as_swizzling_needs_and_no_more",),
    ),
    Mutant(
        "scaled-alpha",
        "tmm_blas/blas.py",
        "            a_scale = a_scale * alpha\n",
        "            a_scale = a_scale * 1\n",
        "8-bit products lack alpha",
        (f"{LIMITS}::test_torchs_8_bit_product_has_alpha_once",),
    ),
    Mutant(
        "skinny-tail-a",
        "tmm_triton/skinny.py",
        "A_MASKED: gl.constexpr = not (WHOLE_M and WHOLE_K)",
        "A_MASKED: gl.constexpr = not WHOLE_M",
        "a reads beyond its rows where K ends within a step",
        ("tests/plugins/test_skinny.py::test_arithmetic_addresses_masks",),
    ),
    Mutant(
        "skinny-tail-b",
        "tmm_triton/skinny.py",
        "B_MASKED: gl.constexpr = not (WHOLE_N and WHOLE_K)",
        "B_MASKED: gl.constexpr = not WHOLE_N",
        "b reads beyond its columns where K ends within a step",
        ("tests/plugins/test_skinny.py::test_arithmetic_addresses_masks",),
    ),
    Mutant(
        "early-of-amd",
        "tmm_triton/pdl.py",
        "problem.device.nvidia and problem.device.capability",
        "problem.device.capability",
        "an MI200 times configs that differ in nothing",
        ("tests/plugins/test_dependent_launch.py::test_other_gpus_overlap_no_launches",),
    ),
]
