"""Mutants of verification and of the checked calls of plugins."""

from __future__ import annotations

from mutant import Mutant

VERIFIER = "tests/core/test_verifier.py"
LYING = "tests/core/test_lying.py"
QUERIES = "tests/core/test_invalid_results.py"

VERIFICATION = [
    Mutant(
        "argument-versions",
        "verify/checked_launch.py",
        "None if t.is_inference() else t._version,",
        "None,",
        "a kernel that writes an argument's own values back is believed",
        (f"{LYING}::test_a_lying_kernel_never_answers[arguments adds nothing to b]",),
    ),
    Mutant(
        "rows-written",
        "verify/data_sets.py",
        "rows = {name: self.inputs.extras[name] for name in self.rows}",
        "rows = dict(self.rows)",
        "a kernel that writes indices beyond the groups is believed",
        (
            f"{LYING}::test_a_lying_kernel_never_answers"
            "[arguments writes indices beyond the groups]",
        ),
    ),
    Mutant(
        "together-unbounded",
        "verify/ways_of_use.py",
        "int(TOGETHER_ON_GPU / seconds)",
        "MOST_TOGETHER",
        "two threads occupy a GPU for a second for each candidate",
        (f"{VERIFIER}::test_long_launches_of_two_threads_are_few",),
    ),
    Mutant(
        "memory-not-poisoned",
        "verify/checked_launch.py",
        "                self._data.poison_free_memory()\n",
        "                pass\n",
        "a kernel that writes nothing passes with the result of an earlier launch",
        (f"{VERIFIER}::test_free_memory_is_poisoned_just_before_a_launcher_allocates_its_result",),
    ),
    Mutant(
        "returned-memory-in-use",
        "verify/checked_launch.py",
        "if any(overlap(result, other) for other in held):",
        "if False:",
        "a result is overwritten by the next launch",
        (VERIFIER, LYING),
    ),
    Mutant(
        "result-kept",
        "verify/checked_launch.py",
        '        raise WrongError("it keeps the memory of a result',
        '        return\n        raise WrongError("it keeps the memory of a result',
        "a kernel returns a buffer again that is in use",
        (VERIFIER, LYING),
    ),
    Mutant(
        "profilers-frames-counted",
        "verify/checked_launch.py",
        "_HELD_ELSEWHERE = (0.0, 0.01, 0.3)",
        "_HELD_ELSEWHERE = (0.0, 0.01, 0.0)",
        "a sampling profiler sets every kernel aside",
        ("tests/core/test_boundaries_verify.py",),
    ),
    Mutant(
        "warnings-are-verdicts",
        "verify/environment_faults.py",
        "torch.OutOfMemoryError | BrokenExecutor | Warning):",
        "torch.OutOfMemoryError | BrokenExecutor):",
        "a kernel that warns is out for good if one process turns warnings into errors",
        ("tests/core/test_environment.py",),
    ),
    Mutant(
        "modes-keep-results",
        "verify/checked_launch.py",
        "if _others_keep_results() or _frames_alone_keep(returned):",
        "if _frames_alone_keep(returned):",
        "a mode of torch that keeps tensors sets every kernel aside",
        ("tests/core/test_boundaries_verify.py",),
    ),
    Mutant(
        "watchdogs-frames-counted",
        "verify/checked_launch.py",
        "if _others_keep_results() or _frames_alone_keep(returned):",
        "if _others_keep_results():",
        "a thread that holds the frames that it saw last sets kernels aside",
        ("tests/core/test_boundaries_verify.py",),
    ),
    Mutant(
        "frames-and-kernels-keep",
        "verify/checked_launch.py",
        "if not all(type(holder) in _IN_FRAMES for holder in kept):",
        "if False:",
        "a kernel returns a buffer again that is in use while a watchdog holds frames",
        ("tests/core/test_boundaries_verify.py",),
    ),
    Mutant(
        "state-not-compared",
        "verify/checked_launch.py",
        "                if changed:\n",
        "                if False:\n",
        "a kernel changes torch's settings",
        (LYING,),
    ),
    Mutant(
        "outputs-in-one-way-only",
        "verify/checked_launch.py",
        "(nonfinite or of.judges_outputs):",
        "(nonfinite or not of.once):",
        "auxiliary outputs that are wrong for an alpha or a stride pass",
        ("tests/core/test_outputs.py",),
    ),
    Mutant(
        "outputs-of-one-thread",
        "verify/ways_of_use.py",
        "if self._baseline or len(data.sets()) < 2:",
        "if self._baseline or self._outputs or len(data.sets()) < 2:",
        "auxiliary outputs of two threads are mixed up",
        ("tests/core/test_outputs.py",),
    ),
    Mutant(
        "no-large-products",
        "verify/further_inputs.py",
        "if plain and not (cancels and linear):",
        "if False:",
        "an epilogue whose exponential overflows passes",
        (LYING,),
    ),
    Mutant(
        "values-beside-inf",
        "verify/nonfinite.py",
        "if not same_bits(usual, out):",
        "if False:",
        "one Inf makes all other results zero",
        (
            "tests/core/test_boundaries_verify.py::test_other_lines_have_the_bits_of_a_launch_without_nan",
        ),
    ),
    Mutant(
        "activations-without-gradients",
        "verify/further_inputs.py",
        "t.detach().requires_grad_()",
        "t",
        "a kernel that is wrong in training passes",
        (LYING,),
    ),
    Mutant(
        "files-beside-a-package",
        "registry/query.py",
        "kernel, self.version, source.distribution",
        "kernel, self.version",
        "a compiled module that was replaced is trusted on an old record",
        ("tests/core/test_code.py",),
    ),
    Mutant(
        "methods-of-others",
        "spec/code.py",
        "            files.append(package_digest(name))\n",
        "            pass\n",
        "a kernel whose method was edited is trusted on an old record",
        ("tests/core/test_code.py",),
    ),
    Mutant(
        "set-aside-not",
        "registry/query.py",
        "if compiles else self.set_aside(why)",
        "if compiles else PluginError(why)",
        "a kernel with invalid results is called again",
        (QUERIES,),
    ),
    Mutant(
        "few-terms",
        "verify/compare.py",
        "max(problem.k * SUMMED, math.sqrt(problem.k) * ROUNDED)",
        "problem.k * SUMMED",
        "a right kernel whose sums have few terms is refused",
        ("tests/core/test_boundaries_verify.py::test_sums_in_fp32_round_no_more_than_is_expected",),
    ),
    Mutant(
        "compile-sets-aside",
        "registry/query.py",
        "if compiles else self.set_aside(why)",
        "if False else self.set_aside(why)",
        "one config that does not compile costs the kernel",
        (QUERIES,),
    ),
    Mutant(
        "state-settings",
        "tmm_core/settings.py",
        "    _active.set(before[0])\n",
        "",
        "a plugin that leaves a block open forces its kernel in each later call",
        (
            "tests/core/test_boundaries_registry.py"
            "::test_a_block_that_a_plugin_leaves_open_changes_no_settings",
        ),
    ),
    Mutant(
        "state-alarms",
        "registry/process_state.py",
        "lambda before: before or signal.setitimer(alarm, 0)",
        "lambda _: None",
        "an alarm of a refused kernel ends the process later",
        ("tests/core/test_boundaries_verify.py::test_an_alarm_and_a_hook_are_taken_back",),
    ),
    Mutant(
        "state-module-hooks",
        "registry/process_state.py",
        "of().update(before)",
        "of().clear()",
        "the user's hooks of all modules go with those of a refused kernel",
        ("tests/core/test_boundaries_verify.py::test_an_alarm_and_a_hook_are_taken_back",),
    ),
    Mutant(
        "rounds-write-inputs",
        "verify/ways_of_use.py",
        "if changed := each.changed():",
        "if False and (changed := each.changed()):",
        "a kernel that overwrites an input beside a large alpha is believed",
        (
            f"{LYING}::test_a_lying_kernel_never_answers"
            "[arguments overwrites a beside a large alpha]",
        ),
    ),
    Mutant(
        "moved-out-in-old-bands",
        "verify/guard_bands.py",
        "GuardedTensor(moved, words[start : start + lines], each.filler)",
        "GuardedTensor(moved, each.words, each.filler)",
        "a kernel that writes behind an out with gaps is believed",
        (
            f"{LYING}::test_a_lying_kernel_never_answers"
            "[addresses writes behind an out with rows apart]",
        ),
    ),
    Mutant(
        "restrided-as-before",
        "verify/further_inputs.py",
        "return _restrided(name, t, spec) if restrided else t",
        "return t",
        "a kernel that keeps the strides of an address is believed",
        (f"{LYING}::test_a_lying_kernel_never_answers[addresses strides of b by address]",),
    ),
    Mutant(
        "nan-in-one-half",
        "verify/nonfinite.py",
        "    return line % n + (0 if first >= n else n)\n",
        "    return line\n",
        "a kernel that takes NaN in gates for zeros is believed by chance",
        ("tests/core/test_boundaries_rounds.py::test_nan_is_in_both_halves_of_gated_columns",),
    ),
    Mutant(
        "restrided-gaps",
        "verify/further_inputs.py",
        """        if not data.altered:  # else the set is released
            for each in of.memory.values():
                each.refill()
""",
        "        if not data.altered:  # else the set is released\n",
        "right kernels are said to write to their inputs",
        (f"{LYING}::test_a_right_kernel_answers",),
    ),
]
