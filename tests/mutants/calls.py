"""Mutants of the key of a warm call, and of plans."""

from __future__ import annotations

from mutant import Mutant

CALLS = ("tests/core/test_call_key.py::test_calls_that_differ_in_one_thing_have_a_plan_each",)
PLAN = "tests/core/test_plan.py"

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
    return Mutant(f"key-{name}", "launch/warm.py", whole, whole.replace(old, new), why, CALLS)


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
    Mutant("key-tf32", "launch/warm.py", "a.dtype is torch.float32 and a.is_cuda and _tf32(),\n    )\n    plan", ")\n    plan",
           "allowing TF32 does nothing when warm", ("tests/core/test_call_key.py::test_tf32_has_a_plan_of_its_own",)),
    Mutant("key-a-alignment", "launch/warm.py", "        a.dtype,\n        a.data_ptr() & 15,\n",
           "        a.dtype,\n", "TMA reads a off 16 bytes", CALLS),
    Mutant("key-b-alignment", "launch/warm.py", "        b.dtype,\n        b.data_ptr() & 15,\n",
           "        b.dtype,\n", "TMA reads b off 16 bytes", CALLS),
    Mutant("key-b-device", "launch/warm.py",
           "        b.data_ptr() & 15,\n        b.get_device(),\n", "        b.data_ptr() & 15,\n",
           "operands of two GPUs pass", CALLS),
    Mutant("key-b-stride", "launch/warm.py", "        b.stride(),\n", "",
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
    Mutant("capture-plan-kept", "launch/warm.py", "    if not plan.problem.capturing:\n", "    if True:\n",
           "what was chosen under capture is used ever after",
           ("tests/core/test_call_state.py::test_a_plan_made_under_capture_is_made_anew_after",)),
    Mutant("quarantined-plan-kept", "launch/warm.py",
           "            raise\n        _plans.pop(key, None)\n    return run(",
           "            raise\n    return run(",
           "a kernel that raised is launched again without end",
           ("tests/core/test_call_state.py::test_a_kernel_that_raises_is_launched_once",)),
]  # fmt: skip
