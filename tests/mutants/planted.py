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
    Mutant("planted-state-after-exit", "registry/watched_call.py",
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
    Mutant("planted-bytes", "tmm_cache/keys.py",
           "bytes | bytearray | memoryview", "bytes | bytearray",
           "a view of memory is stored as a list of its bytes",
           ("tests/cache/test_cache_keys.py::test_digest_refuses_values_that_are_not_json",)),
    Mutant("planted-fastest-inside", "dispatch/invariant.py",
           "{name: min(us, there.times.get(name, math.inf))}", "{name: us}",
           "an arithmetic counts as slow as its slowest config inside a bucket",
           ("tests/core/test_invariant.py::"
            "test_inside_a_bucket_an_arithmetic_is_as_fast_as_its_fastest_config",)),
    Mutant("planted-last-columns", "verify/data_sets.py",
           "_sample(rows.stop, self.device), _sample(cols.stop, self.device)",
           "_sample(rows.stop, self.device), _sample(min(rows.stop, cols.stop), self.device)",
           "columns beyond the number of rows are compared in few rows",
           ("tests/core/test_boundaries_verify.py::"
            "test_samples_are_of_results_with_more_rows_than_samples",)),
    Mutant("planted-result-with-gaps", "tmm_blas/blas.py",
           "if direct and out is not None and out.is_contiguous():",
           "if direct and out is not None:",
           "an 8-bit product into every second column of a matrix is wrong",
           ("tests/plugins/test_boundaries_blas.py::"
            "test_all_terms_of_an_8_bit_product_are_applied",)),
    Mutant("planted-call-in-handler", "dispatch/__init__.py",
           "self._lock = threading.RLock()  # a signal's handler may call\n        #: None",
           "self._lock = threading.Lock()\n        #: None",
           "a signal's handler that computes during the first call waits for ever",
           ("tests/core/test_threads.py::"
            "test_a_signals_handler_may_call_while_the_dispatcher_is_made",)),
    Mutant("planted-third-stage", "triton/device_functions.py",
           "for name in list(names)[1:]]", "for name in list(names)[1:2]]",
           "Triton kernels leave out the third stage of an epilogue",
           ("tests/plugins/test_triton_kernels.py::test_every_stage_of_a_chain_is_applied",)),
    Mutant("planted-uncancelled", "commands/verify.py",
           "pool.shutdown(wait=False, cancel_futures=True)", "pool.shutdown(wait=False)",
           "after Ctrl-C tmm verify compiles all remaining records",
           ("tests/core/test_verify_command.py::"
            "test_records_that_nobody_waits_for_are_not_compiled",)),
    Mutant("planted-gradients-of-lists", "interop/libraries.py",
           "(each if isinstance(each, list) else [each] for each in given)",
           "([each] for each in given)",
           "weights of compiled projections learn nothing if their input needs no gradient",
           ("tests/core/test_projections.py::"
            "test_the_operator_has_the_gradient_of_any_operand",)),
    Mutant("planted-memory-of-groups", "hopper/config.py",
           "max(bias, scales, grouped)", "max(bias, scales)",
           "configs for quantised outputs are proposed that the GPU's memory cannot hold",
           ("tests/plugins/test_warp_specialized.py::"
            "test_what_threads_exchange_takes_shared_memory_of_its_own",)),
    Mutant("planted-signal-in-driver", "tmm_triton/triton_kernel.py",
           "    except Exception as error:  # any failed build means the same\n        reraise(error)\n",
           "    except Exception:  # any failed build means the same\n",
           "a timeout while Triton's driver is built takes the process's Triton kernels away",
           ("tests/plugins/test_triton_kernels.py::"
            "test_a_signals_handler_is_not_taken_for_a_driver_that_does_not_load",)),
    Mutant("planted-group-of-threads", "tmm_base/guards.py",
           "waiting += [(one, True) for one", "waiting += [(one, False) for one",
           "Ctrl-C in a thread, raised again in a group, counts as a kernel's fault",
           ("tests/cache/test_cache_boundaries.py::test_a_group_brings_its_exceptions",)),
    Mutant("planted-report-in-handler", "interop/aten.py",
           "_lock = threading.RLock()", "_lock = threading.Lock()",
           "a signal's handler that reads the report waits for ever if it interrupts enable()",
           ("tests/core/test_enable.py::"
            "test_a_signals_handler_may_ask_for_the_report_at_any_time",)),
    Mutant("planted-nested-precision", "spec/precision.py",
           "_changing = threading.RLock()", "_changing = threading.Lock()",
           "a command that changes the precision twice waits for ever",
           ("tests/core/test_boundaries_spec.py::"
            "test_a_precision_within_another_ends_with_its_block",)),
]  # fmt: skip
