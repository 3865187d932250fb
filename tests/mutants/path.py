"""Mutants of the path from a miss to a plan, and of tunings that are resumed."""

from __future__ import annotations

from mutant import Mutant

TUNER = "tests/core/test_tuner.py"
BACKGROUND = "tests/core/test_background.py"
EXACT = "tests/core/test_exact_m.py"
NESTED = "tests/core/test_nested.py"

PATH = [
    Mutant("steps-in-one", "tuning/stages.py", "            run.samples = samples\n        yield ()\n", "            run.samples = samples\n        yield from ()\n",
           "a tuning is not resumed between measurements", (f"{TUNER}::test_a_tuning_holds_nothing_between_its_steps",)),
    Mutant("close-keeps", "tuning/tuner.py", "tuning.release()", "pass",
           "a tuning that is closed keeps its tensors", (f"{TUNER}::test_a_closed_tuning_frees_its_memory",)),
    Mutant("close-compiles", "candidate_launchers.py", "        self.compilers.cancel_pending(self._waiting.values())\n", "",
           "a tuning that is closed goes on compiling", (f"{TUNER}::test_a_closed_tuning_frees_its_memory",)),
    Mutant("slice-unpaid", "tuning/background.py", "            self._credit -= task.left - began\n", "",
           "every call is delayed by a slice", (f"{BACKGROUND}::test_slices_are_short_and_within_their_share",)),
    Mutant("slice-saved-up", "tuning/background.py", "self._credit = min(SLICE, self._credit", "self._credit = min(1e9, self._credit",
           "after a pause one call waits for a whole tuning", (f"{BACKGROUND}::test_slices_are_short_and_within_their_share",)),
    Mutant("slice-waits", "tuning/background.py", "return not waiting or now - self.left > CHECK_INTERVAL", "return True",
           "calls go on with a tuning that waits for compilers", (f"{BACKGROUND}::test_compilers_are_not_waited_for",)),
    Mutant("slice-beside", "tuning/background.py", "(place == 0 or not task.waited)", "True",
           "two tunings hold memory at a time", (f"{BACKGROUND}::test_compilers_are_not_waited_for",)),
    Mutant("slice-not-alone", "tuning/background.py", "                if acquired:\n", "                if True:\n",
           "two processes disturb each other's measurements", (f"{BACKGROUND}::test_no_slice_while_another_process_measures",)),
    Mutant("slice-charged", "tuning/tuner.py", "free = rested or starting", "free = starting",
           "a tuning's budget ends while it rests",
           ("tests/core/test_boundaries_stages.py::test_which_times_are_charged_to_the_budget",)),
    Mutant("interrupted-kept", "tuning/background.py", "                    ended = True\n                    ended =", "                    ended =",
           "an interrupted tuning is never begun again", (f"{BACKGROUND}::test_an_interrupted_slice_ends_its_tuning",)),
    Mutant("answers-stale", "dispatch/deferring.py", "not any(name in self.background for name in names)", "False",
           "what answered first answers for good", (BACKGROUND,)),
    Mutant("ranks-differ", "dispatch/lookup.py", "if background and _ranks() > 1:", "if False:",
           "ranks choose at different times", (f"{BACKGROUND}::test_some_calls_are_never_delayed",)),
    Mutant("fork-keeps", "dispatch/dispatcher.py", "        self.abandon()\n", "",
           "a child goes on with its parent's tuning", (f"{BACKGROUND}::test_a_forked_process_begins_anew",)),
    Mutant("raced-of-short", "tuning/ranking.py", "fast <= LONG_CALL_US or ", "",
           "races cost more than they gain", (f"{EXACT}::test_no_race_where_it_is_not_worth_its_time",)),
    Mutant("raced-without-end", "tuning/ranking.py", " or len(raced) >= MOST_RACED", "",
           "a server with random M races for ever", (f"{EXACT}::test_a_record_keeps_a_limited_number_of_races",)),
    Mutant("raced-wrong-wins", "tuning/tuner.py", "            if run.status == \"wrong\":\n", "            if False:\n",
           "a kernel that is wrong at an M may answer there", (f"{EXACT}::test_a_kernel_that_is_wrong_there_does_not_win",)),
    Mutant("awaited-in-turn", "dispatch/dispatcher.py",
           "            if awaited():\n                yield False\n                return\n", "            pass\n",
           "a thread that a plugin waits for waits for the plugin's tuning",
           (f"{NESTED}::test_a_thread_that_a_plugin_waits_for_is_answered_without_waiting[bind-later]",)),
    Mutant("awaited-tmm", "launch/nesting.py", "return foreign and name.startswith(_RUNS_PLUGINS)",
           "return name.startswith(_RUNS_PLUGINS)",
           "a thread does not wait for another's tuning",
           (f"{NESTED}::test_a_plugin_waits_if_its_own_code_does",)),
    Mutant("awaited-elsewhere", "launch/nesting.py", "return foreign and name.startswith(_RUNS_PLUGINS)",
           "return foreign",
           "a layer whose own code waits for threads is served by BLAS",
           (f"{NESTED}::test_a_plugin_waits_if_its_own_code_does",)),
    Mutant("awaited-launch", "verify/checked_launch.py", "if nesting.has_waited() and not",
           "if nesting.has_waited() and not True and",
           "a kernel that waits for threads which launch it starts threads without end",
           (f"{NESTED}::test_a_kernel_whose_launch_waits_for_a_product_of_another_thread_is_refused",)),
]  # fmt: skip
