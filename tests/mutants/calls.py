"""Mutants of the key of a warm call, and of plans."""

from __future__ import annotations

from mutant import Mutant

CALLS = ("tests/core/test_call_key.py::test_calls_that_differ_in_one_thing_have_a_plan_each",)
PLAN = "tests/core/test_plan.py"

#: The code that writes the key of a warm call, part by part.
_PART = '        yield f"    {part},"\n'
_ALL = "_replay(roles, arguments, launch_stored, "


def _key(name: str, old: str, new: str, why: str) -> Mutant:
    """A mutant of the writer of the key."""
    return Mutant(f"key-{name}", "launch/warm.py", old, new, why, CALLS)


def _without(name: str, field: str, why: str) -> Mutant:
    """The key of a warm call without that text in any part."""
    return _key(name, _PART, f"{_PART[:-1]}.replace({field!r}, '')\n", why)


def _ignored(argument: str, why: str, name: str = "") -> Mutant:
    """The key without that argument."""
    new = f'        if role.name != "{argument}":\n    {_PART}'
    return _key(name or argument.replace("_", "-"), _PART, new, why)


def _scaled(name: str, condition: str, why: str) -> Mutant:
    """Mutants of the key of a call that has extras only: arguments that meet the condition are left
    out."""
    new = _ALL.replace("roles", f"[role for role in roles if not ({condition})]")
    return _key(f"scaled-{name}", _ALL, new, why)


KEYS = [
    _ignored("alpha", "alpha = 2 after alpha = 1 is ignored"),
    _without("bias-dtype", "bias.dtype, ", "a kernel for one dtype reads another"),
    _without("bias-alignment", "bias.data_ptr() & 15, ", "wide loads off 16 bytes"),
    _without("bias-stride", "bias.stride(), ", "another stride is read"),
    _without("residual-dtype", "residual.dtype, ", "a kernel for one dtype reads another"),
    _without("residual-alignment", "residual.data_ptr() & 15, ", "TMA reads off 16 bytes"),
    _without("residual-device", ", residual.device", "a launcher of one GPU is given another's"),
    _ignored("out", "a plan for no output is given one of any layout", "out-presence"),
    _without("out-alignment", "out.data_ptr() & 15, ", "TMA writes off 16 bytes"),
    _without("out-stride", "out.stride(), ", "rows are written where another tensor has them"),
    _ignored("epilogue", "the first epilogue is applied for good"),
    _ignored("out_dtype", "the first dtype is returned for good"),
    _key("settings", "    overridden(), det", "    det", "override() does nothing when warm"),
    _key("deterministic", "overridden(), deterministic(),", "overridden(),",
         "the mode does nothing when warm"),
    Mutant("key-tf32", "launch/warm.py",
           '    yield "    a.dtype is float32 and a.is_cuda and _tf32(),"\n', "",
           "allowing TF32 does nothing when warm",
           ("tests/core/test_call_key.py::test_tf32_has_a_plan_of_its_own",)),
    _without("a-alignment", "a.data_ptr() & 15, ", "TMA reads a off 16 bytes"),
    _without("b-alignment", "b.data_ptr() & 15, ", "TMA reads b off 16 bytes"),
    _without("b-device", ", b.device", "operands of two GPUs pass"),
    _without("b-stride", "b.stride(), ", "a weight and its transpose share a plan"),
    _scaled("residual", 'role.name == "residual"', "the residual is dropped"),
    _scaled("out", 'role.name == "out"', "a plan for no output is given one"),
    _scaled("scales", "role.extra", "one number is read as a row of them"),
    _scaled("alpha", 'role.name == "alpha"', "alpha is ignored"),
    _without("scale-shape", "scale_b.shape, ", "one number is read as a row of them"),
]  # fmt: skip

PLANS = [
    Mutant("plan-bias-dtype", "plan.py", "            if planned != found:\n",
           '            if name == "bias" and planned and found:\n'
           "                planned, found = planned[:2] + planned[3:], found[:2] + found[3:]\n"
           "            if planned != found:\n",
           "a kernel for one dtype reads another", (PLAN,)),
    Mutant("plan-residual-alignment", "plan.py", "if ROLE[n].key == SIGNATURE}",
           'if ROLE[n].key == SIGNATURE and n != "residual"}',
           "TMA reads off 16 bytes", (PLAN,)),
    Mutant("plan-out-alignment", "plan.py", "out.is_contiguous(), start & 15,", "out.is_contiguous(), 0,",
           "TMA writes off 16 bytes", (PLAN,)),
    Mutant("plan-out-strides", "plan.py", "tuple(out.shape), out.is_contiguous(), ", "tuple(out.shape), True, ",
           "rows are written where a dense tensor has them", (PLAN,)),
    Mutant("plan-out-dtype", "plan.py", "start & 15, out.dtype, out.device",
           "start & 15, self.problem.out.dtype, out.device", "written in another dtype", (PLAN,)),
    Mutant("plan-unplanned", "plan.py",
           'absent = [f" or {name} is not None" for name in TENSORS if name not in given]',
           "absent: list[str] = []", "a bias that was not planned is dropped", (PLAN,)),
    Mutant("plan-scales", "plan.py", "            if planned != found:\n",
           "            if planned != found and name not in EXTRAS:\n",
           "one number is read as a row of them", (PLAN,)),
    Mutant("plan-alpha", "plan.py", '"alpha": call.alpha}', '"alpha": 1.0}',
           "a plan's alpha is ignored", (PLAN,)),
    Mutant("extra-strided", "plan.py", '("" if grid else ".contiguous()")', '""',
           "a scale with gaps is read as if it had none",
           ("tests/core/test_fp8.py::test_scales_of_any_stride",)),
    Mutant("capture-plan-kept", "launch/warm.py", "if plan.choice.lasting and not plan.problem.capturing:\n", "if plan.choice.lasting:\n",
           "what was chosen under capture is used ever after",
           ("tests/core/test_call_state.py::test_a_plan_made_under_capture_is_made_anew_after",)),
    Mutant("quarantined-plan-kept", "launch/warm.py",
           '    yield "    _plans.pop(key, None)"\n', "",
           "a kernel that raised is launched again without end",
           ("tests/core/test_call_state.py::test_a_kernel_that_raises_is_launched_once",)),
    Mutant("alpha-symbol", "launch/check.py",
           'return type(alpha) not in (int, bool, float) and getattr(alpha, "ndim", None) == 0',
           'return getattr(alpha, "ndim", None) == 0', "a symbol as alpha breaks a graph",
           ("tests/core/test_valid_calls.py::test_alpha_is_a_symbol_of_a_compiled_graph",)),
    Mutant("fallback-uncast", "tmm_core/api.py",
           "return cast_first(lambda call: fallbacks.answer(_computed, call), call)",
           "return fallbacks.answer(_computed, call)",
           "operands of two dtypes are refused under autocast",
           ("tests/core/test_unusual.py::test_operands_of_several_dtypes_under_autocast",)),
    Mutant("export-parts", "tmm_core/quantized.py", "            for name in t.__tensor_flatten__()[0]:\n",
           "            for name in ():\n", "torch's products of quantised weights are not exported",
           ("tests/core/test_quantized_tensor.py::test_torchs_products_are_exported",)),
]  # fmt: skip
