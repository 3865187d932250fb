"""Mutants of the processes that compile and launch candidates."""

from __future__ import annotations

from mutant import Mutant

COMPILERS = "tests/core/test_compilers.py"
FIRST = "tests/core/test_first_launch.py"

POOL = [
    Mutant(
        "pool-one-worker",
        "tuning/pool_host.py",
        "while self._waiting and len(self._running) < self._workers:",
        "while self._waiting and not self._running:",
        "candidates that hang do so one after another",
        (f"{COMPILERS}::test_hanging_candidates_share_their_limit",),
    ),
    Mutant(
        "pool-no-spare-worker",
        "tuning/compile_pool.py",
        "compiling_threads() + _SPARE",
        "compiling_threads()",
        "kernels wait for two candidates of another that hang",
        (f"{COMPILERS}::test_what_hangs_keeps_no_other_kernel_waiting",),
    ),
    Mutant(
        "pool-other-plugins",
        "tuning/compile_pool.py",
        'environ["PYTHONPATH"] = os.pathsep.join(self.circumstances[0])',
        "pass",
        "a worker does not find the plugins that this process finds",
        (f"{COMPILERS}::test_a_fault_costs_one_candidate",),
    ),
    Mutant(
        "pool-output-of-others",
        "tuning/pool_worker.py",
        "    os.ftruncate(1, 0)",
        "    pass",
        "a failure shows what another job of the worker printed",
        (f"{COMPILERS}::test_the_server_ends_when_nobody_needs_it",),
    ),
    Mutant(
        "pool-orphans",
        "tuning/pool_host.py",
        "while os.getppid() == parent and idle < IDLE_LIMIT:",
        "while idle < IDLE_LIMIT:",
        "processes outlive a parent whose channel another process holds",
        (f"{COMPILERS}::test_no_process_outlives_its_parent",),
    ),
    Mutant(
        "launch-hung-forgotten",
        "tuning/first_launch.py",
        "self._hung[about] += isinstance(failure, HungError)",
        "pass",
        "each config of a kernel that hangs in its first launch costs a minute",
        (f"{FIRST}::test_of_one_kernel_two_may_hang",),
    ),
    Mutant(
        "launch-worn-out-worker",
        "tuning/pool_host.py",
        'error.exitcode != WORN_OUT or job["retries"] == _MOST_RETRIES',
        "True",
        "a candidate is blamed for the CUDA context that another destroyed",
        (f"{FIRST}::test_a_worn_out_worker_is_replaced_and_its_job_done_again",),
    ),
]
