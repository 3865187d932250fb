"""Mutants of problems, epilogues and settings, of kernels, modules and the cache."""

from __future__ import annotations

from mutant import Mutant

RECORDS = "tests/core/test_record_key.py"
SETTINGS = "tests/core/test_settings.py"
HOPPER = "tests/plugins/test_warp_specialized.py"
EARLY = "tests/plugins/test_dependent_launch.py"

SPEC = [
    Mutant("chain-linear", "epilogue.py", "linear=all(stage.linear for stage in stages)",
           "linear=any(stage.linear for stage in stages)", "partial sums pass through relu", (RECORDS,)),
    Mutant("epilogue-key-derivative", "epilogue.py",
           "*(self.reference, self.device, self.derivative, self.output_vjp),",
           "*(self.reference, self.device, self.output_vjp),", "wrong gradients after an edit", (RECORDS,)),
    Mutant("epilogue-key-device-derivative", "epilogue.py",
           "            self.device_derivative,\n        )\n", "        )\n",
           "wrong gradients after an edit", (RECORDS,)),
    Mutant("epilogue-key-role", "epilogue.py",
           '"" if f is None else _source(f) for f in functions)', "_source(f) for f in functions if f is not None)",
           "a derivative serves as output_vjp", (RECORDS,)),
    Mutant("epilogue-key-parameters", "epilogue.py", "        if self.parameters:\n            text +=",
           "        if False:\n            text +=", "softcap(30) is softcap(50)", (RECORDS,)),
    Mutant("gelu-tanh-exact", "activations.py", '"tanh": "gelu_tanh"}', '"tanh": "gelu"}',
           "F.gelu's tanh form is taken for the other", ("tests/core/test_activations.py",)),
    Mutant("softplus-beta", "activations.py", "text = name if usual else None", "text = name",
           "a softplus of another beta is taken for the usual", ("tests/core/test_activations.py",)),
    Mutant("aligned-batch", "problem.py",
           "((leading, count), (t.stride(0), t.shape[0] * (t.dim() == 3)))", "((leading, count),)",
           "TMA is given a batch stride off 16 bytes", (RECORDS,)),
    Mutant("aligned-base", "problem.py", "and (t.is_meta or t.data_ptr() % ALIGNMENT == 0)", "and True",
           "TMA is given an address off 16 bytes", (RECORDS,)),
    Mutant("aligned-overlap", "problem.py", "and (count <= 1 or leading >= width)", "and True",
           "TMA is given rows that overlap", (RECORDS,)),
    Mutant("wide", "problem.py", "reach > _INT32_MAX)", "reach > 2 * _INT32_MAX)",
           "offsets overflow 32 bits", (RECORDS,)),
    Mutant("record-key-residual", "problem.py",
           '"residual": self.residual.to_json() if self.residual else None,',
           '"residual": {**self.residual.to_json(), "layout": "row"} if self.residual else None,',
           "records of different problems collide", (RECORDS,)),
    Mutant("record-key-tf32", "problem.py", '            "tf32": self.tf32,\n', '            "tf32": False,\n',
           "records of different problems collide", (RECORDS,)),
    Mutant("record-read-scale", "problem.py", 'scale_b=_kind_of(doc.get("scale_b")),',
           'scale_b=_kind_of(doc.get("scale_a")),', "a record is read as another problem's", (RECORDS,)),
    Mutant("settings-budget", "settings.py",
           "key = tuple(getattr(settings, field.name) for field in dataclasses.fields(Settings))",
           "key = tuple(getattr(settings, field.name) for field in dataclasses.fields(Settings) "
           'if field.name != "tune_budget")',
           "another budget is ignored", (SETTINGS,)),
    Mutant("settings-disable", "settings.py", 'changes["disable"] = base.disable | frozenset(disable)',
           'changes["disable"] = frozenset(disable)', "a nested block enables kernels", (SETTINGS,)),
    Mutant("settings-config", "settings.py", '        changes["config"] = None\n', "",
           "a nested kernel is given the outer one's config", (SETTINGS,)),
    Mutant("fold-scale-a", "fold.py",
           "return t.reshape(-1, 1) if self.batch is None else self._stack(t).contiguous()",
           "return t.reshape(-1, 1) if self.batch is None else self._stack(t)",
           "scales of another matrix are read", ("tests/core/test_fp8.py",)),
    Mutant("fold-scale-b", "fold.py",
           "t if t is None or t.numel() == 1 or self.batch is None else self._stack(t).contiguous()",
           "t if t is None or t.numel() == 1 or self.batch is None else self._stack(t)",
           "scales of another matrix are read", ("tests/core/test_fp8.py",)),
]  # fmt: skip

_GRADIENT = ("tests/core/test_autograd.py::test_a_bias_in_fp32_is_summed_for_in_fp32",)
_HOPPER_BATCHES = (f"{HOPPER}::test_batches",)
_PROPOSED = (f"{EARLY}::test_loading_early_is_proposed_to_who_gave_the_word",)
_BUILT = (f"{EARLY}::test_dependent_launch_where_the_config_says_and_the_gpu_can",)
#: A config that loads b early no longer relies on the caller's word.
_WORD = 'return ("static_weights",) if self.early == "b" else ()', "return ()"

ELSEWHERE = [
    Mutant("bias-gradient", "autograd.py",
           "dbias = rows.sum(0) if same else rows.sum(0, dtype=_wider(rows.dtype, dtype))",
           "dbias = rows.sum(0)", "a sum over all rows is rounded to bf16", _GRADIENT),
    Mutant("bias-gradient-operator", "autograd.py",
           "dbias = dz2.sum(tuple(range(dz2.dim() - 1)), dtype=_wider(dz2.dtype, bias_dtype))",
           "dbias = dz2.sum(tuple(range(dz2.dim() - 1)))", "a sum over all rows is rounded to bf16",
           _GRADIENT),
    Mutant("convert-hooks", "convert.py", ', "_backward_hooks", "_backward_pre_hooks")', ', "_backward_hooks")',
           "a hooked layer is swapped and its hook lost",
           ("tests/core/test_nn.py::test_hooked_modules_are_left_alone_and_their_hooks_run",)),
    Mutant("clear-ages", "filters.py", "return self == Filter()",
           "return (self.gpu, self.kernel, self.dtype, self.shape, self.epilogue) == (None,) * 5",
           "clear --older-than 30d deletes everything", ("tests/cache/test_cache_filters.py",)),
    Mutant("clear-newer", "filters.py",
           "and (self.after is None or head.created_at > self.after)", "and True",
           "clear --newer-than 1h deletes everything", ("tests/cache/test_cache_filters.py",)),
    Mutant("record-before-environment", "tmm_cache/files.py",
           "            if environment is not None:\n"
           "                write_environment(path.parent, environment)\n"
           "            write_atomically(path, data)\n",
           "            write_atomically(path, data)\n"
           "            if environment is not None:\n"
           "                write_environment(path.parent, environment)\n",
           "a crash leaves a record of nobody knows what",
           ("tests/cache/test_cache_faults.py::test_a_record_never_lies_without_its_environment",)),
    Mutant("given-up-continues", "tools/ranks.py",
           "            if board.has(verdict):  # this rank has been given up\n                break\n", "",
           "a rank measures what others have taken over",
           ("tests/core/test_distributed.py::test_a_rank_that_hangs_is_given_up_and_adopts_later",)),
    Mutant("split-k-counter", "split_k.py", "                tl.store(counter, 0)\n", "                pass\n",
           "the second launch adds too early",
           ("tests/plugins/test_triton_kernels.py"
            "::test_the_last_program_of_a_tile_adds_and_leaves_its_counter",)),
    Mutant("hopper-batch-described", "warp_specialized.py", "            apart = t.stride(0)\n",
           "            apart = t.stride(0) and shape[0] * leading\n", "TMA reads other matrices",
           (f"{HOPPER}::test_a_batch_is_described_matrix_by_matrix",)),
    Mutant("hopper-batch-stored", "warp_specialized.py",
           "        pointer += matrix * stride_z\n    ACROSS", "        pointer += matrix * M * stride\n    ACROSS",
           "other matrices are overwritten", _HOPPER_BATCHES),
    Mutant("hopper-batch-residual", "warp_specialized.py",
           "        pointer += matrix * stride_z\n    rows = row", "        pointer += matrix * M * stride_m\n    rows = row",
           "another matrix's residual is added", _HOPPER_BATCHES),
    Mutant("hopper-row-end", "hopper_tiles.py",
           "return not problem.out.aligned or problem.n * problem.out.dtype.itemsize % ALIGNMENT != 0",
           "return not problem.out.aligned", "neighbours are overwritten",
           (f"{HOPPER}::test_tma_stores_whole_rows_of_16_bytes_only",)),
    Mutant("hopper-last-row", "warp_specialized.py",
           "own_rows = (rows >= corner[0]) & (rows < M)", "own_rows = rows >= corner[0]",
           "memory after the output is overwritten", (f"{HOPPER}::test_layouts_and_epilogues",)),
    Mutant("hopper-last-column", "warp_specialized.py",
           "own_columns = (columns >= corner[1]) & (columns < N)", "own_columns = columns >= corner[1]",
           "the next rows are overwritten", (f"{HOPPER}::test_layouts_and_epilogues",)),
    Mutant("hopper-arithmetic", "warp_specialized.py",
           'return f"sm90-k32/promoted{config.BLOCK_K}" if', 'return "sm90-k32/promoted" if',
           "a row's bits depend on M", (f"{HOPPER}::test_which_configs_sum_a_row_alike",)),
    Mutant("hopper-arithmetic-splits", "warp_specialized.py",
           "if hopper_tiles.adapted(problem, config).splits != config.splits:", "if False:",
           "a row's bits depend on M",
           (f"{HOPPER}::test_which_configs_sum_a_row_alike",)),
    Mutant("hopper-arithmetic-tail", "warp_specialized.py",
           "        if config.tail_splits > 1:\n            return None", "        if False:\n            return None",
           "a row's bits depend on M", (f"{HOPPER}::test_which_configs_sum_a_row_alike",)),
    Mutant("hopper-overlaps-always", "warp_specialized.py", '"launch_pdl": ', '"launch_pdl": True or ',
           "the launch begins before the one before has ended, and never waits",
           (f"{EARLY}::test_the_hopper_kernel_overlaps_where_the_config_says",)),
    Mutant("hopper-word", "hopper_tiles.py", *_WORD, "an old weight is read", _PROPOSED),
    Mutant("skinny-word", "skinny.py", *_WORD, "an old weight is read", _PROPOSED),
    Mutant("split-k-word", "split_k.py", *_WORD, "an old weight is read", _PROPOSED),
    Mutant("skinny-wait-is-early", "skinny.py", '"EARLY": overlaps and config.early == "b",',
           '"EARLY": overlaps,', "a weight is read before the wait without the word", _BUILT),
    Mutant("split-k-wait-is-early", "split_k.py",
           'constants["EARLY"] = overlaps and config.early == "b"', 'constants["EARLY"] = overlaps',
           "a weight is read before the wait without the word", _BUILT),
]  # fmt: skip
