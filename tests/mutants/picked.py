"""Mutants of functions picked at random that no test noticed, and of their neighbours."""

from __future__ import annotations

from mutant import Mutant

OWN_LOCK = "tests/core/test_invariant.py::test_a_tuning_of_this_mode_takes_its_own_lock_again"

PICKED = [
    Mutant("picked-lock-of-measuring", "dispatch/measuring.py",
           "threading.RLock()", "threading.Lock()",
           "a tuning of batch-invariant mode waits for itself for ever", (OWN_LOCK,)),
    Mutant("picked-lock-of-a-child", "dispatch/dispatcher.py",
           "threading.RLock()", "threading.Lock()",
           "a tuning of batch-invariant mode waits for itself in a forked child", (OWN_LOCK,)),
    Mutant("picked-lock-of-a-childs-registry", "registry/registry.py",
           "        self.loading_lock = threading.RLock()\n\n    # -- loading",
           "        self.loading_lock = threading.Lock()\n\n    # -- loading",
           "a forked child waits for itself while it loads plugins",
           ("tests/core/test_registry.py::test_nothing_is_loaded_before_it_is_needed",)),
    Mutant("picked-keys-of-autograd", "tmm_core/compat.py",
           "keys.add(key.AutogradOther).add(key.AutogradNestedTensor)", "keys.add(key.AutogradOther)",
           "without a private name, a call below autograd may be recorded again",
           ("tests/core/test_compat.py::"
            "test_guards_without_private_names_exclude_the_same_keys",)),
]  # fmt: skip
