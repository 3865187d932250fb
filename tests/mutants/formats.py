"""Mutants of operand formats: which may meet, what records keep of them, what is checked, and how
their values are computed."""

from __future__ import annotations

from mutant import Mutant

QUANTIZED = "tests/core/test_quantized_parts.py"
CONFORMANCE = "tests/core/test_format_conformance.py"
RECORDS = ("tests/core/test_record_key.py",)
REFUSED = (f"{QUANTIZED}::test_what_does_not_fit",)
VALUES = (f"{QUANTIZED}::test_values_of_either_operand",)
EXPERTS = (f"{QUANTIZED}::test_values_of_experts",)
PAIRS = (f"{QUANTIZED}::test_a_named_format_allows_what_an_implied_one_does_not",)
SCALES = "tests/core/test_scale_grids.py"
TEXTS = (f"{SCALES}::test_what_a_record_says",)
EXPONENTS = (f"{SCALES}::test_exponents_have_torchs_values",)
GRIDS_REFUSED = (f"{SCALES}::test_what_is_refused",)
BINDING = "tmm_blas/dequantized.py"
ROWS = "tests/core/test_quantize_rows.py"
DEQUANTISE = "tests/plugins/test_dequantize.py"
GRIDS = "formats/grids.py"
CHECK = "launch/check.py"
OPERAND = "spec/operand.py"

FORMATS = [
    Mutant("format-pair-plain", "formats/__init__.py",
           "plain if told and plain in BESIDE else None", "plain if plain in BESIDE else None",
           "8-bit floats that nobody named are multiplied with bf16", PAIRS),
    Mutant("format-pair-beside", "formats/__init__.py",
           "plain if told and plain in BESIDE else None", "plain if told else None",
           "fp64 is multiplied with int8 in fp32", PAIRS),
    Mutant("format-pair-mixed", "formats/__init__.py",
           "mixed = stored[0] is not stored[1] and not (of_a and of_b)", "mixed = False",
           "two formats are multiplied that nobody named", PAIRS),
    Mutant("operand-json-format", OPERAND, "        if self.format:\n", "        if False:\n",
           "int8 weights and integers share a record", RECORDS),
    Mutant("operand-json-scale", OPERAND, "str(self.scale)", "self.scale.kind",
           "scales in bf16 and fp32 share a record", RECORDS),
    Mutant("operand-json-zero", OPERAND, "if self.zero is not None:\n            document",
           "if False:\n            document",
           "operands with and without zero points share a record", RECORDS),
    Mutant("operand-read-format", OPERAND,
           'formats.named(doc["format"]).name if doc.get("format") else ""',
           'doc.get("format", "")', "a record of a format that is gone is read", RECORDS),
    Mutant("operand-read-scale", GRIDS, "if not (outer.isdecimal() and k.isdecimal()):",
           "if False:", "a record of scales of no kind is read",
           ("tests/core/test_fp8.py::test_other_problems_keep_their_keys",)),
    Mutant("grid-simplest", GRIDS, "return ROW if (rows, width) == ROW else block", "return block",
           "a weight with one group has another record than one with scales by row", TEXTS),
    Mutant("grid-exponent-nan", GRIDS, "torch.where(bits == 255, 0x7FC00000, power)", "power",
           "a scale that is NaN is infinite", EXPONENTS),
    Mutant("grid-exponent-zero", GRIDS, "torch.where(bits == 0, 0x400000, bits << 23)",
           "bits << 23", "the smallest scale is zero", EXPONENTS),
    Mutant("format-groups", "formats/__init__.py",
           "if own[1] and k % own[1] and not self.short:", "if False:",
           "a last group is short in a format that has none", GRIDS_REFUSED),
    Mutant("format-pack", "formats/__init__.py", "stored |= part << (self.bits * place)",
           "stored |= part << (self.bits * (place - 1))",
           "packed numbers lose some of their bits", (f"{CONFORMANCE}::TestInt4",)),
    Mutant("format-origin", "formats/__init__.py", "zero = zero.to(numbers.dtype) - self.origin",
           "zero = zero.to(numbers.dtype)", "zero points of int4 are 8 too large",
           (f"{CONFORMANCE}::TestInt4",)),
    Mutant("parted-groups", "launch/grouped_call.py",
           'if along == "k" and (pair.packs', 'if False and (pair.packs',
           "groups start inside a byte", GRIDS_REFUSED),
    Mutant("quantized-direction", "tmm_core/quantized.py",
           "if t.dim() > 1 and t.along != along_k and t.is_directed:", "if False:",
           "rows of packed numbers are read as columns", GRIDS_REFUSED),
    Mutant("reference-rows", "verify/compare.py", "parts[name] = t[..., wide // of_b]",
           "parts[name] = t[..., wide]", "columns have the scales of other blocks",
           (f"{SCALES}::test_verification_knows_the_values",)),
    Mutant("parts-no-scale", CHECK,
           'if role.part == "scale" and form is not None and not form.implied:', "if False:",
           "int8 weights are multiplied without their scale", REFUSED),
    Mutant("parts-no-zeros", CHECK, 'if role.part == "zero" and not form.zeros:', "if False:",
           "kernels of fp8 are given zero points", REFUSED),
    Mutant("parts-dtype", CHECK, "        if t.dtype not in allowed:\n", "        if False:\n",
           "kernels read a scale in fp64 as fp32", REFUSED),
    Mutant("parts-zero-shape", CHECK,
           'if role.part == "zero" and (scale is None or scale.shape != t.shape):',
           'if role.part == "zero" and scale is None:',
           "a zero point of each row is read where the scale is one number", REFUSED),
    Mutant("parts-storage", CHECK,
           "if form is not None and operand.dtype not in form.storage:", "if False:",
           "unsigned numbers are read as signed ones", REFUSED),
    Mutant("unpacked-twice", "tmm_core/quantized.py",
           "if getattr(call, role.name) is not None:", "if False:",
           "a scale that a caller gives is dropped",
           (f"{QUANTIZED}::test_a_scale_is_not_given_twice",)),
    Mutant("unpacked-along-k", "tmm_core/quantized.py",
           "if grouped and value is not None and t.block == ROW:", "if False:",
           "experts' weights are refused for the shape of their scales", EXPERTS),
    Mutant("unpacked-zero", "tmm_core/quantized.py",
           '{"scale": t.scale, "zero": t.zero}', '{"scale": t.scale}',
           "zero points are dropped", VALUES),
    Mutant("step-stored", "triton/device_functions.py",
           "    if form is None or problem.a.form is not None:\n        return plain\n",
           "    return plain\n", "the bits of weights are multiplied", (f"{CONFORMANCE}::TestInt8",)),
    Mutant("rows-invalid", "triton/quantize_rows.py",
           'largest = tl.where(invalid, float("nan"), largest)', "largest = largest",
           "a group with a NaN gets the scale of the others", (f"{ROWS}::test_the_kernel",)),
    Mutant("rows-tail", "triton/quantize_rows.py",
           "tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))", "scaled + 0.5",
           "numbers are rounded up", (f"{ROWS}::test_the_kernel",)),
    Mutant("blocks-padding", "tmm_blas/cublaslt_blocks.py",
           "    beyond = -rows % _UNIT\n", "    beyond = 0\n",
           "cuBLASLt reads the scales of other blocks", (f"{ROWS}::test_scales_lie_as_cublaslt_reads_them",)),
    Mutant("blocks-order", "tmm_blas/cublaslt_blocks.py",
           "    return scale.t().contiguous().t()\n", "    return scale.contiguous()\n",
           "cuBLASLt reads the scales of other rows", (f"{ROWS}::test_scales_lie_as_cublaslt_reads_them",)),
    Mutant("dequantise-outer", "triton/dequantize.py",
           "at = z * scale_z + (row // OUTER)", "at = z * scale_z + row",
           "each row of a block is given another scale", (f"{DEQUANTISE}::test_values",)),
    Mutant("dequantise-origin", "triton/dequantize.py",
           "(zero.to(tl.float32) - ORIGIN)", "zero.to(tl.float32)",
           "zero points of 8 are not those of symmetric weights", (f"{DEQUANTISE}::test_values",)),
    Mutant("dequantise-layout", "triton/dequantize.py",
           'if operand.layout != ("row" if of == "a" else "col"):', 'if operand.layout == "strided":',
           "values are read along the other dimension", (f"{DEQUANTISE}::test_what_it_leaves_to_torch",)),
    Mutant("blas-zero", BINDING, "form.values(t, scale, zero, ", "form.values(t, scale, None, ",
           "zero points are ignored", VALUES),
    Mutant("blas-grid", BINDING, "form.values(t, scale, zero, ", "form.values(t, None, zero, ",
           "the scales of groups are ignored", (f"{SCALES}::test_a_weight",)),
    Mutant("blas-scale", "tmm_blas/blas.py", "z = rescaled(z, parts.get(name))", "pass",
           "the scales of weights are ignored", VALUES),
    Mutant("experts-zero", "grouped_mm.py", "zero[:, :, None] if name == \"a\" else zero[:, None]",
           "zero[:, :1, None] if name == \"a\" else zero[:, None, :1]",
           "all columns of an expert have the zero point of the first", EXPERTS),
    Mutant("int8-clamp", "formats/int8.py", ".round().clamp(-128, 127)", ".round()",
           "large numbers change their sign", (f"{QUANTIZED}::test_int8_saturates",)),
]  # fmt: skip
