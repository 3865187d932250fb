"""Mutants of the beginning and end of processes, blocks and tensors, and of files that end early."""

from __future__ import annotations

from mutant import Mutant

LIFETIMES = [
    Mutant("lifetimes-other-context", "tmm_core/settings.py",
           "        if _active.get() is settings:\n",
           "        if True:\n",
           "a block that ends in another context ends that context's own block",
           ("tests/core/test_settings.py::test_another_contexts_own_settings_stay",)),
    Mutant("lifetimes-copied-context", "tmm_core/settings.py",
           "_active.set(None if before is Token.MISSING else before)",
           "_active.set(None)",
           "a block that ends in a copied context ends the outer block too",
           ("tests/core/test_settings.py::test_a_block_may_end_in_another_context",)),
    Mutant("lifetimes-import-again", "interop/libraries.py",
           "        former._destroy()\n",
           "        pass\n",
           "an interrupted import cannot be repeated",
           ("tests/core/test_operator.py::test_interrupted_imports_can_be_repeated",)),
    Mutant("lifetimes-last-thread", "spec/threads.py",
           "    if sys.is_finalizing():\n",
           "    if False:\n",
           "a product in a __del__ waits without end",
           ("tests/core/test_threads.py::test_no_thread_is_started_while_the_interpreter_ends",)),
    Mutant("lifetimes-pool-imported", "tuning/pool_host.py",
           "from concurrent.futures import BrokenExecutor, Future\n",
           "from concurrent.futures import BrokenExecutor, Future\n"
           "from concurrent.futures.process import BrokenProcessPool as _\n",
           "a thread that outlives the main thread cannot make the first call",
           ("tests/core/test_boundaries_pool.py::"
            "test_a_thread_may_import_the_program_after_the_main_thread_has_ended",
            "tests/test_layout.py::test_no_call_imports_a_pool_of_processes_or_threads")),
    Mutant("lifetimes-data", "tmm_core/quantized.py",
           "        self.stored, self.scale, self.zero = other.stored, other.scale, other.zero\n",
           "",
           "a quantised tensor whose data is assigned keeps its old values",
           ("tests/core/test_quantized_tensor.py::test_assigned_data_is_what_products_read",)),
    Mutant("lifetimes-json-escapes", "tmm_base/console.py",
           "        text = json.dumps(finite, indent=2)\n",
           "        pass\n",
           "an ASCII terminal gets Python's escapes in JSON",
           ("tests/cache/test_cache_console.py::test_data_is_json_in_every_encoding",)),
    Mutant("lifetimes-torn", "bench/results.py",
           'number == len(lines) and line.startswith(b"{")',
           "number == len(lines)",
           "a file that is no result shows nothing, without a word",
           ("tests/core/test_bench.py::test_a_single_line_that_is_no_result_is_refused",)),
]  # fmt: skip
