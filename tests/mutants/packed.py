"""Mutants of ``triton.mixed_input``, ``triton.streaming``, of the programs that decode pairs, and of
what sends jobs."""

from __future__ import annotations

from mutant import Mutant

DEVICE = "tmm_triton/mixed_input_device.py"
MIXED = "tests/plugins/test_mixed_input.py"
PROGRAMS = "tests/plugins/test_word_programs.py::test_every_pair"
SHARED = (f"{MIXED}::test_consumers_share_columns_and_steps",)
SCALES = (f"{MIXED}::test_scales_and_zero_points",)
STREAMING = "tmm_triton/streaming.py"
STREAMED = ("tests/plugins/test_streaming.py::test_arithmetic_addresses_masks",)
ARRANGED = (f"{MIXED}::test_values_along_k_in_the_order_of_the_stored_pairs",)
GROUPS = (f"{MIXED}::test_groups_of_rows",)

PACKED = [
    Mutant(
        "mixed-rounds",
        DEVICE,
        "return gl.cdiv(last - first, C.k_ways)",
        "return (last - first) // C.k_ways",
        "the last steps of a tile are left out",
        SHARED,
    ),
    Mutant(
        "mixed-own-stage",
        DEVICE,
        "start += _rounds(first, last, C) * C.k_ways",
        "start += last - first",
        "a consumer waits for a phase that has not begun",
        SHARED,
    ),
    Mutant(
        "mixed-empty-stage",
        DEVICE,
        "        if position + C.k_ways < start:",
        "        if False:",
        "nobody releases a stage without a step",
        SHARED,
    ),
    Mutant(
        "mixed-turn",
        DEVICE,
        "            turn ^= 1\n",
        "            turn = 0\n",
        "sums of the tile before are added",
        SHARED,
    ),
    Mutant(
        "mixed-taken",
        DEVICE,
        "mbarrier.wait(taken.index(NTH), turn ^ 1)",
        "mbarrier.wait(taken.index(NTH), 1)",
        "sums are overwritten before they are read",
        SHARED,
    ),
    Mutant(
        "mixed-next-scale",
        DEVICE,
        "scale, scale_1, zero_1 = scale_1,",
        "scale, scale_1, zero_1 = scale,",
        "every step has the scale of the first",
        SCALES,
    ),
    Mutant(
        "mixed-small-groups",
        DEVICE,
        "        column = step * C.parts + part\n",
        "        column = step + part\n",
        "groups of 32 have other groups' scales",
        SCALES,
    ),
    Mutant(
        "mixed-group-end",
        DEVICE,
        "group, row, end = find_tile(",
        "group, row, _ = find_tile(",
        "rows of the next group are overwritten",
        GROUPS,
    ),
    Mutant(
        "mixed-group-scale",
        DEVICE,
        "        pointer += group * stride_z\n",
        "        pointer += 0\n",
        "every group has the scales of the first",
        GROUPS,
    ),
    Mutant(
        "mixed-stages",
        "tmm_triton/mixed_input.py",
        "if self.num_stages % self.k_ways or self.num_stages == self.k_ways:",
        "if self.num_stages == self.k_ways:",
        "consumers share a stage",
        (f"{MIXED}::test_config_bounds",),
    ),
    Mutant(
        "mixed-offset",
        "tmm_triton/mixed_input.py",
        "OFFSET=0 if b.zero is None else word_decoders.offset(form.name, value, b.zero),",
        "OFFSET=0,",
        "a zero point is subtracted without the offset of the decoded values",
        (f"{MIXED}::test_the_program_decodes_pairs_less_their_zero_points",),
    ),
    Mutant(
        "mixed-pair",
        "tmm_triton/mixed_input.py",
        "PAIR=2 * b.dtype.itemsize // b.pack,",
        "PAIR=2 * b.dtype.itemsize,",
        "the kernel reads two bytes for a pair of 4-bit values",
        (f"{MIXED}::test_the_program_decodes_pairs_less_their_zero_points",),
    ),
    Mutant(
        "mixed-order",
        "tmm_triton/mixed_input.py",
        'how = ("promoted" if c.PROMOTED else "rounded")',
        'how = ""',
        "rows of large tiles are rounded, and count as the same sums",
        (f"{MIXED}::test_tiles_that_round_values_have_another_order_of_sums",),
    ),
    Mutant(
        "mixed-arranger",
        DEVICE,
        "            if stage % 3 == WHO:",
        "            if position % 3 == WHO:",
        "a warp that arranges waits for a phase that has not begun",
        ARRANGED,
    ),
    Mutant(
        "mixed-arranged-words",
        DEVICE,
        "a = a.reshape(FOURS).permute((0, 2, 4, 1, 3))",
        "a = a.reshape(FOURS).permute((0, 2, 4, 3, 1))",
        "rows meet other values of the weight",
        ARRANGED,
    ),
    Mutant(
        "mixed-landed",
        DEVICE,
        "                mbarrier.wait(landed.index(stage), phase)\n",
        "",
        "rows are arranged before they arrive",
        ARRANGED,
    ),
    Mutant(
        "streaming-whole",
        STREAMING,
        "problem.k % (config.BLOCK_K * config.num_stages) == 0",
        "problem.k % config.BLOCK_K == 0",
        "steps behind the last one are read without masks",
        STREAMED,
    ),
    Mutant(
        "streaming-rest",
        STREAMING,
        "for i in gl.static_range(STAGES):\n            after = steps",
        "for i in gl.static_range(STAGES - 1):\n            after = steps",
        "the last step is left out",
        STREAMED,
    ),
    Mutant(
        "streaming-row",
        STREAMING,
        "m = gl.minimum(gl.expand_dims(gl.expand_dims(m, 0), 1), M - 1)",
        "m = gl.expand_dims(gl.expand_dims(m, 0), 1)",
        "rows behind the last one are read",
        STREAMED,
    ),
    Mutant(
        "streaming-gate",
        STREAMING,
        "row = gl.minimum(first + row % BLOCK_N, N - 1) + row // BLOCK_N * N\n\n    a_part",
        "row = gl.minimum(first + row % BLOCK_N, N - 1)\n\n    a_part",
        "the up projection is the gate",
        STREAMED,
    ),
    Mutant(
        "word-place",
        "tmm_triton/word_decoders.py",
        "    up = shift - 4 * i\n",
        "    up = shift\n",
        "every pair of a word of e2m1 has the numbers of the first",
        (PROGRAMS,),
    ),
    Mutant(
        "pair-signed",
        "tmm_triton/word_decoders.py",
        "        magic |= 0x00080008",
        "        magic |= 0x00080000",
        "one of two signed numbers is wrong",
        (PROGRAMS,),
    ),
    Mutant(
        "pair-subnormal",
        "tmm_triton/word_decoders.py",
        '(6, "0x01C001C0", "0x7E807E80")',
        '(6, "0x01800180", "0x7E807E80")',
        "halves of e2m1 are lost",
        (PROGRAMS,),
    ),
    Mutant(
        "pair-wide-zero",
        "tmm_triton/mixed_input.py",
        'in ("int8", "fp8") and b.zero is None',
        'in ("int8", "fp8")',
        "scaled numbers lose an unscaled zero point",
        (f"{MIXED}::test_zero_points_are_not_multiplied_in_fp32",),
    ),
    Mutant(
        "pool-sender",
        "tuning/compile_pool.py",
        "        self._outbox.put(json.dumps(message).encode())\n",
        "        with suppress(OSError):\n"
        "            self._channel.send_bytes(json.dumps(message).encode())\n",
        "a call waits for compilers that start",
        (
            "tests/core/test_compilers.py::test_nobody_waits_to_send_jobs_to_a_server_that_still_starts",
        ),
    ),
    Mutant(
        "blocks-rows",
        "tmm_blas/cublaslt_blocks.py",
        "if beyond := -rows % _UNIT:",
        "if beyond := 0:",
        "cuBLASLt refuses 33 rows",
        ("tests/core/test_quantize_rows.py::test_scales_lie_as_cublaslt_reads_them",),
    ),
    Mutant(
        "mixed-rounded-for-fp32",
        "tmm_triton/mixed_input.py",
        "if problem.out.dtype is torch.float32 and not powers:",
        "if False:",
        "values are rounded to 16 bits for an fp32 result, and verification refuses the kernel",
        (
            f"{MIXED}::test_no_value_is_rounded_to_16_bits_for_an_fp32_result",
            f"{MIXED}::test_declines",
        ),
    ),
]
