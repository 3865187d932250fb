"""Mutants of verification and of the checked calls of plugins."""

from __future__ import annotations

from mutant import Mutant

VERIFIER = "tests/core/test_verifier.py"
LYING = "tests/core/test_lying.py"
QUERIES = "tests/core/test_asking.py"

VERIFICATION = [
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
        "            self._data.poison_free_memory()\n",
        "            pass\n",
        "a kernel that writes nothing passes with the result of an earlier launch",
        (VERIFIER, LYING),
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
        "state-not-compared",
        "verify/checked_launch.py",
        "                if changed:\n",
        "                if False:\n",
        "a kernel changes torch's settings",
        (LYING,),
    ),
    Mutant(
        "set-aside-not",
        "registry/query.py",
        "            raise self.set_aside(why) from error\n",
        "            raise PluginError(why) from error\n",
        "a kernel with invalid results is called again",
        (QUERIES,),
    ),
    Mutant(
        "compile-sets-aside",
        "registry/query.py",
        "            if compiles:\n",
        "            if False:\n",
        "one config that does not compile costs the kernel",
        (QUERIES,),
    ),
]
