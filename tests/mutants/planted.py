"""Bugs that were planted into functions drawn at random, and that survived until a test was
added."""

from __future__ import annotations

from mutant import Mutant

PLANTED = [
    Mutant("planted-waited", "tuning/background.py",
           "task.waited |= bool", "task.waited = bool",
           "two tunings hold memory for their measurements at once",
           ("tests/core/test_background.py::"
            "test_only_the_oldest_tuning_measures_after_it_has_waited",)),
    Mutant("planted-state-after-exit", "verify/watched_call.py",
           "        except BaseException as error:\n            reraise(error)\n            errors",
           "        except Exception as error:\n            reraise(error)\n            errors",
           "what a launch changed stays changed if it calls sys.exit",
           ("tests/core/test_process_state.py::"
            "test_what_a_launch_changed_is_put_back_if_it_raises",)),
    Mutant("planted-down-projection", "nn/stored_experts.py",
           'else "up_proj", "down_proj"):', 'else "up_proj",):',
           "an unknown format of a down projection raises instead of leaving the layer alone",
           ("tests/core/test_stored_experts.py::"
            "test_the_weight_that_no_operand_describes_is_named",)),
    Mutant("planted-several-scales", "tmm_core/quantized.py",
           " or (own == TENSOR and scale.numel() != 1):", ":",
           "several scales for one block are taken, and one of them is used",
           ("tests/core/test_scale_grids.py::"
            "test_one_scale_may_have_any_shape_and_several_are_refused",)),
    Mutant("planted-scale-of-one-dimension", "tmm_core/quantized.py",
           "elif scale.numel() == 1:", "elif not scale.dim():",
           "a scale of shape (1,) is refused",
           ("tests/core/test_scale_grids.py::"
            "test_one_scale_may_have_any_shape_and_several_are_refused",)),
    Mutant("planted-implied-format", "spec/problem.py",
           '            name = ""  # its dtype implies it', "            pass",
           "a quantised tensor of 8-bit floats is tuned apart from the same floats and a scale",
           ("tests/core/test_scale_grids.py::"
            "test_8_bit_floats_with_their_scale_and_beside_it_are_one_problem",)),
]  # fmt: skip
