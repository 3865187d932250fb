"""Small plausible bugs, and the tests that must notice each.

A mutant names its file by the end of its path, so that moving a module does not put it out of date.
Where code changes, change the mutant with it: what it replaces must be there once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Folders of the tree whose files mutants change.
SOURCES = ("tmm_core", "plugins", "cache")


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Args:
        name: As ``make mutants NAMES=…`` takes it.
        file: The file's name, or the end of its path.
        old, new: Replaced, and by what.
        why: What goes wrong.
        tests: Of these at least one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


def place(mutant: Mutant, tree: Path) -> Path:
    """The file that a mutant changes.

    Raises:
        ValueError: What it replaces is not there, or more than once.
    """
    named = [
        path
        for folder in SOURCES
        for path in (tree / folder).rglob(Path(mutant.file).name)
        if path.as_posix().endswith("/" + mutant.file)
    ]
    counts = {path: path.read_text().count(mutant.old) for path in named}
    if sum(counts.values()) != 1:
        where = f"in {len(named)} files named {mutant.file}"
        raise ValueError(f"what it replaces occurs {sum(counts.values())} times {where}")
    return next(path for path, count in counts.items() if count)


CALLS = ("tests/core/test_call_key.py::test_calls_that_differ_in_one_thing_have_a_plan_each",)
RECORDS = "tests/core/test_record_key.py"
CHOICES = "tests/core/test_choices.py"
DISPATCHER = "tests/core/test_dispatcher.py"
TUNER = "tests/core/test_tuner.py"
PLAN = "tests/core/test_plan.py"
SETTINGS = "tests/core/test_settings.py"
HOPPER = "tests/plugins/test_warp_specialized.py"

_KEY = """\
        None if bias is None else signature(bias),
        None if residual is None else signature(residual),
        None if out is None else signature(out),
        epilogue,
        alpha == 1.0,
        out_dtype,
        _overridden(),
        _deterministic(),
        a.dtype is torch.float32 and a.is_cuda and _tf32(),
"""
_SCALED_KEY = """\
        *(None if t is None else signature(t) for t in (a, b, bias, residual, out)),
        scales_signature(*scales),
        epilogue,
        alpha == 1.0,
        out_dtype,
        _overridden(),
        _deterministic(),
    )
"""


def _key(name: str, old: str, new: str, why: str, whole: str = _KEY) -> Mutant:
    """A mutant of the key of a warm call."""
    assert whole.count(old) == 1
    return Mutant(f"key-{name}", "dispatch.py", whole, whole.replace(old, new), why, CALLS)


def _scaled_key(name: str, old: str, new: str, why: str) -> Mutant:
    return _key(f"scaled-{name}", old, new, why, _SCALED_KEY)


KEYS = [
    _key("alpha", "        alpha == 1.0,\n", "", "alpha = 2 after alpha = 1 is ignored"),
    _key("bias-dtype", "signature(bias)", "(bias.stride(), bias.data_ptr() & 15)",
         "a kernel for one dtype reads another"),
    _key("bias-alignment", "signature(bias)", "signature(bias)[:3]", "wide loads off 16 bytes"),
    _key("bias-stride", "signature(bias)", "signature(bias)[2:]", "another stride is read"),
    _key("residual-dtype", "signature(residual)", "(*signature(residual)[:2], residual.data_ptr() & 15)",
         "a kernel for one dtype reads another"),
    _key("residual-alignment", "signature(residual)", "signature(residual)[:3]",
         "TMA reads off 16 bytes"),
    _key("residual-device", "signature(residual)", "signature(residual)[:4]",
         "a launcher of one GPU is given another's"),
    _key("out-presence", "        None if out is None else signature(out),\n", "",
         "a plan for no output is given one of any layout"),
    _key("out-alignment", "signature(out)", "signature(out)[:3]", "TMA writes off 16 bytes"),
    _key("out-stride", "signature(out)", "(out.shape, out.data_ptr() & 15)",
         "rows are written where another tensor has them"),
    _key("epilogue", "        epilogue,\n", "", "the first epilogue is applied for good"),
    _key("out-dtype", "        out_dtype,\n", "", "the first dtype is returned for good"),
    _key("settings", "        _overridden(),\n", "", "override() does nothing when warm"),
    _key("deterministic", "        _deterministic(),\n", "", "the mode does nothing when warm"),
    Mutant("key-tf32", "dispatch.py", "a.dtype is torch.float32 and a.is_cuda and _tf32(),\n    )\n    plan", ")\n    plan",
           "allowing TF32 does nothing when warm", ("tests/core/test_call_key.py::test_tf32_has_a_plan_of_its_own",)),
    Mutant("key-a-alignment", "dispatch.py", "        a.dtype,\n        a.data_ptr() & 15,\n",
           "        a.dtype,\n", "TMA reads a off 16 bytes", CALLS),
    Mutant("key-b-alignment", "dispatch.py", "        b.dtype,\n        b.data_ptr() & 15,\n",
           "        b.dtype,\n", "TMA reads b off 16 bytes", CALLS),
    Mutant("key-b-device", "dispatch.py",
           "        b.data_ptr() & 15,\n        b.get_device(),\n", "        b.data_ptr() & 15,\n",
           "operands of two GPUs pass", CALLS),
    Mutant("key-b-stride", "dispatch.py", "        b.stride(),\n", "",
           "a weight and its transpose share a plan", CALLS),
    _scaled_key("residual", "(a, b, bias, residual, out)", "(a, b, bias, out)",
                "the residual is dropped"),
    _scaled_key("out", "(a, b, bias, residual, out)", "(a, b, bias, residual)",
                "a plan for no output is given one"),
    _scaled_key("scales", "        scales_signature(*scales),\n", "",
                "one number is read as a row of them"),
    _scaled_key("alpha", "        alpha == 1.0,\n", "", "alpha is ignored"),
    _scaled_key("settings", "        _overridden(),\n", "", "override() does nothing when warm"),
    Mutant("key-scale-shape", "plan.py",
           "(t.shape, t.dtype, t.get_device()) for t in scales)", "(t.dtype, t.get_device()) for t in scales)",
           "one number is read as a row of them", CALLS),
]  # fmt: skip

PLANS = [
    Mutant("plan-bias-dtype", "plan.py",
           "return tuple(t if t is None else signature(t) for t in (bias, residual))",
           "return tuple(t if t is None else (*signature(t)[:2], None, *signature(t)[3:]) "
           "for t in (bias, residual))",
           "a kernel for one dtype reads another", (PLAN,)),
    Mutant("plan-residual-alignment", "plan.py",
           'zip(("bias", "residual"), self.extras or (None, None), strict=True):\n            if extra',
           'zip(("bias",), self.extras or (None,), strict=False):\n            if extra',
           "TMA reads off 16 bytes", (PLAN,)),
    Mutant("plan-out-alignment", "plan.py", "            or out.data_ptr() & 15\n", "",
           "TMA writes off 16 bytes", (PLAN,)),
    Mutant("plan-out-strides", "plan.py", "            or not out.is_contiguous()\n", "",
           "rows are written where a dense tensor has them", (PLAN,)),
    Mutant("plan-out-dtype", "plan.py", "(out.dtype, out.get_device()) != planned",
           "out.get_device() != planned[1]", "written in another dtype", (PLAN,)),
    Mutant("plan-unplanned", "plan.py",
           'absent = [f" or {name} is not None" for name in _TENSORS if name not in given]',
           "absent: list[str] = []", "a bias that was not planned is dropped", (PLAN,)),
    Mutant("plan-scales", "plan.py", "        if scales != self.scales:\n", "        if False:\n",
           "one number is read as a row of them", (PLAN,)),
    Mutant("plan-alpha", "plan.py", 'namespace |= {"alpha": self.alpha,', 'namespace |= {"alpha": 1.0,',
           "a plan's alpha is ignored", (PLAN,)),
    Mutant("capture-plan-kept", "dispatch.py", "    if not plan.problem.capturing:\n", "    if True:\n",
           "what was chosen under capture is used ever after",
           ("tests/core/test_call_state.py::test_a_plan_made_under_capture_is_made_anew_after",)),
    Mutant("quarantined-plan-kept", "dispatch.py",
           "            raise\n        _plans.pop(key, None)\n    return run(",
           "            raise\n    return run(",
           "a kernel that raised is launched again without end",
           ("tests/core/test_call_state.py::test_a_kernel_that_raises_is_launched_once",)),
]  # fmt: skip

TUNING = [
    Mutant("poison", "tuner.py", "            verify.poison(inputs.out)\n", "",
           "a kernel that writes nothing wins with BLAS's answer", (TUNER,)),
    Mutant("nan-passes", "tuner.py", "if not trial.error <= limit and", "if trial.error > limit and",
           "an element that is never written passes", (TUNER,)),
    Mutant("tolerance-fp32", "verify.py", "    torch.float32: 2e-5,\n", "    torch.float32: 2e-4,\n",
           "TF32's rounding passes for fp32", (f"{TUNER}::test_how_wrong_is_wrong",)),
    Mutant("tolerance-tf32", "verify.py", "TF32_TOLERANCE = 4e-3", "TF32_TOLERANCE = 4e-2",
           "a wrong kernel passes", (f"{TUNER}::test_how_wrong_is_wrong",)),
    Mutant("tolerance-bf16", "verify.py", "    torch.bfloat16: 1.6e-2,\n", "    torch.bfloat16: 5e-2,\n",
           "a wrong kernel passes", (f"{TUNER}::test_how_wrong_is_wrong",)),
    Mutant("margin", "tuner.py", "if best > _us(blas) * (1 - MARGIN):", "if best > _us(blas):",
           "noise decides between BLAS and others", (TUNER,)),
    Mutant("ties-nondeterministic", "tuner.py", "return (not r.deterministic,", "return (r.deterministic,",
           "of equals the one that is not deterministic wins", (TUNER,)),
    Mutant("baseline-eliminated", "tuner.py", "if close or reserve or trial.is_baseline:", "if close or reserve:",
           "BLAS's time on record is of a few samples", (TUNER,)),
    Mutant("no-reserve", "tuner.py", "if close or reserve or trial.is_baseline:",
           "if close or trial.is_baseline:", "no kernel is next in line", (TUNER,)),
    Mutant("gone-kernels-kept", "tuner.py",
           "if (c.kernel, c.version) in present and (c.kernel, c.version) not in measured",
           "if (c.kernel, c.version) not in measured", "a kernel that is gone wins again", (TUNER,)),
    Mutant("upgrade-by-name", "tuner.py",
           "new = [k for k in kernels if (k.name, k.version) not in old]",
           "new = [k for k in kernels if k.name not in {name for name, _ in old}]",
           "an upgraded kernel is not timed again", (DISPATCHER,)),
    Mutant("first-configs-hopeless", "tuner.py",
           "if place < FIRST or (_expected_us", "if (_expected_us",
           "a kernel with a bad estimate is never tried", (TUNER,)),
    Mutant("not-in-turns", "tuner.py", "sorted(placed, key=lambda each: each[0])", "placed",
           "where the budget ends some kernels go untried", (TUNER,)),
    Mutant("timed-into-out", "tuner.py", "out = None if inputs.out.is_contiguous() else inputs.out",
           "out = inputs.out", "BLAS is timed with a copy that no call makes", (TUNER,)),
    Mutant("held-up-decides", "tuner.py", "if not keep and held_up(samples[_anchor(racing)]):", "if False:",
           "what held the machine up decides", (TUNER,)),
]  # fmt: skip

DISPATCHING = [
    Mutant("remembered-unchecked", "dispatcher.py",
           "return choice if choice is not None and choice.candidate.kernel in able else None",
           "return choice", "a capture-unsafe kernel is launched under capture", (CHOICES,)),
    Mutant("remembered-for-all", "dispatcher.py",
           "remembered = bucketed(replace(problem, capturing=False))", "remembered = key",
           "one deterministic call slows the bucket for good", (CHOICES,)),
    Mutant("remembered-for-all-settings", "dispatcher.py",
           "        choice = self._choices.get((key, settings))\n",
           "        choice = next((c for (k, _), c in self._choices.items() if k == key), None)\n",
           "a guess outlives on_cache_miss='heuristic'", (CHOICES,)),
    Mutant("capture-remembered", "dispatcher.py",
           "        if not problem.capturing:\n            self._choices", "        if True:\n            self._choices",
           "what was chosen under capture is used ever after", (CHOICES, DISPATCHER)),
    Mutant("quarantine-exact-m", "dispatcher.py",
           "self._quarantine[name, bucketed(_bare(problem))] =", "self._quarantine[name, _bare(problem)] =",
           "the failing kernel is chosen again inside the bucket", (CHOICES,)),
    Mutant("quarantine-by-requirements", "dispatcher.py",
           "self._quarantine[name, bucketed(_bare(problem))] =", "self._quarantine[name, bucketed(problem)] =",
           "the failing kernel is chosen again in another mode", (CHOICES,)),
    Mutant("quarantine-remembered", "dispatcher.py",
           '{error}"\n        self._choices.clear()\n', '{error}"\n',
           "notes of the failing kernel stay", (CHOICES, DISPATCHER)),
    Mutant("adopt-remembered", "dispatcher.py",
           "            self.store.hold(gpu, environment, record)\n            self._choices.clear()\n",
           "            self.store.hold(gpu, environment, record)\n", "ranks disagree", (CHOICES,)),
    Mutant("adopt-neighbours", "dispatcher.py",
           "            self._choices.clear()\n            self._neighbours.forget()\n",
           "            self._choices.clear()\n", "guesses ignore what was adopted", (CHOICES,)),
    Mutant("tune-remembered", "dispatcher.py",
           "            self._choices.clear()\n            return record\n", "            return record\n",
           "tuning changes nothing in this process", (CHOICES,)),
    Mutant("deterministic-tunes", "dispatcher.py", "        if problem.deterministic:\n", "        if False:\n",
           "a choice by timing differs from run to run", (DISPATCHER,)),
    Mutant("capture-tunes", "dispatcher.py",
           "        if problem.capturing:\n            return", "        if False:\n            return",
           "tuning under capture breaks the graph", (DISPATCHER,)),
    Mutant("exact-after-bucket", "dispatcher.py", "        if key.m != problem.m:\n", "        if False:\n",
           "what was tuned for this very size is ignored", (DISPATCHER,)),
    Mutant("any-version", "dispatcher.py",
           "if kernel.name == result.kernel and (any_version or kernel.version == result.version):",
           "if kernel.name == result.kernel:", "times of an older version decide", (CHOICES, DISPATCHER)),
    Mutant("new-kernels-untimed", "dispatcher.py",
           "if any((k.name, k.version) not in known for k in able):",
           "if any(k.name not in {name for name, _ in known} for k in able):",
           "an upgraded kernel is not timed again", (DISPATCHER,)),
    Mutant("neighbour-unfit", "dispatcher.py", "if candidate is not None and _fits(candidate, problem):",
           "if candidate is not None:", "a config outside the search space is launched", (CHOICES, DISPATCHER)),
    Mutant("bucket-64", "bucket.py", "    if m <= 64:\n", "    if m <= 32:\n",
           "records of M from 33 to 56 are orphaned", (CHOICES,)),
    Mutant("neighbour-capability", "neighbour.py",
           'environment.get("capability") == list(device.capability)',
           'environment.get("capability") == device.capability', "no other GPU is a neighbour", (CHOICES,)),
    Mutant("neighbour-sms", "neighbour.py", "return (2, abs(sms - device.sm_count))",
           "return (2, sms - device.sm_count)", "the smallest GPU is the nearest", (CHOICES,)),
    Mutant("neighbour-octaves", "neighbour.py",
           "return sum(abs(math.log2(max(1, asked[s]) / max(1, int(tuned[s])))) for s in _SIZES)",
           "return sum(math.log2(max(1, asked[s]) / max(1, int(tuned[s]))) for s in _SIZES)",
           "whatever is larger is near", (CHOICES,)),
]  # fmt: skip

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
    Mutant("settings-budget", "settings.py", "key = tuple(getattr(changed, name) for name in known)",
           'key = tuple(getattr(changed, name) for name in known if name != "tune_budget")',
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
           "and (self.after is None or record.created_at > self.after)", "and True",
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
    Mutant("given-up-continues", "distributed/tuning.py",
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
           'return ("k32", config.BLOCK_K) if problem.fp8 else "k16"', 'return "k32" if problem.fp8 else "k16"',
           "a row's bits depend on M", (f"{HOPPER}::test_which_configs_sum_a_row_alike",)),
    Mutant("hopper-arithmetic-splits", "warp_specialized.py",
           "if config.tail_splits > 1 or config.splits > 1:\n            return None",
           "if config.tail_splits > 1:\n            return None", "a row's bits depend on M",
           (f"{HOPPER}::test_which_configs_sum_a_row_alike",)),
]  # fmt: skip

MUTANTS = [*KEYS, *PLANS, *TUNING, *DISPATCHING, *SPEC, *ELSEWHERE]
