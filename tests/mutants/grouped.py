"""Mutants of grouped products."""

from __future__ import annotations

from mutant import Mutant

CORE, KERNEL = "tests/core/test_grouped.py", "tests/plugins/test_ragged.py"
EXPERTS = "tests/core/test_experts.py"
PLANS = (f"{CORE}::test_a_plan_for_each_kind_of_call",)

GROUPED = [
    Mutant(
        "grouped-key-alpha",
        "launch/grouped.py",
        "warm.replay(GROUPED_ROLES,",
        "warm.replay([role for role in GROUPED_ROLES if role.name != 'alpha'],",
        "alpha = 2 after alpha = 1 is ignored",
        PLANS,
    ),
    Mutant(
        "grouped-key-out",
        "launch/grouped.py",
        "warm.replay(GROUPED_ROLES,",
        "warm.replay(GROUPED_ROLES[:-1],",
        "a plan without out is given one",
        PLANS,
    ),
    Mutant(
        "grouped-key-weights",
        "launch/grouped.py",
        "warm.replay(GROUPED_ROLES,",
        "warm.replay([role for role in GROUPED_ROLES if role.name != 'out_weights'],",
        "weights are dropped",
        PLANS,
    ),
    Mutant(
        "ragged-slots",
        "tmm_triton/ragged.py",
        "ends // BLOCK + g + 1 <= slot",
        "ends // BLOCK + g + 1 < slot",
        "tiles of the group before",
        (f"{KERNEL}::test_values",),
    ),
    Mutant(
        "ragged-grid",
        "tmm_triton/ragged.py",
        "    slots = groups.count + groups.zeroed\n",
        "    slots = groups.count - 1 + groups.zeroed\n",
        "the last tiles have no program",
        (f"{KERNEL}::test_the_grid_has_a_program_for_every_tile_whatever_the_sizes",),
    ),
    Mutant(
        "ragged-weight-after-residual",
        "tmm_triton/ragged.py",
        "    if weights_ptr is not None:\n",
        "    if False:\n",
        "rows are not weighed",
        (f"{KERNEL}::test_values",),
    ),
    Mutant(
        "ragged-bucket",
        "bucket.py",
        "problem.at(bucket_edge(problem.extent))",
        "__import__('dataclasses').replace(problem, m=bucket_edge(problem.m))",
        "a record for every number of rows that are summed over",
        (f"{CORE}::test_buckets_are_of_the_ragged_dimension",),
    ),
    Mutant(
        "ragged-one-distribution",
        "dispatch/ragged.py",
        "turned(each) if place % 2 else each",
        "each",
        "even routing is never timed",
        (f"{CORE}::test_both_distributions_are_timed_and_verified",),
    ),
    Mutant(
        "ragged-tail-compared",
        "fixture.py",
        "        if self.within is not None:\n",
        "        if False:\n",
        "what is beyond the last group has to be something",
        (
            f"{CORE}::test_both_distributions_are_timed_and_verified",
            f"{CORE}::test_wrong_launchers_are_found",
        ),
    ),
    Mutant(
        "grouped-mm-waits",
        "grouped_mm.py",
        "device.capability[0] not in (9, 10)",
        "False",
        "torch reads offs on the host",
        (f"{CORE}::test_the_baseline_is_torchs_where_it_does_not_wait",),
    ),
    Mutant(
        "grouped-gathered-once",
        "interop/grouped.py",
        "da = zeros.index_add(0, a_index, da.to(wide)).to(da.dtype)",
        "da = zeros.index_copy(0, a_index, da.to(wide)).to(da.dtype)",
        "a row read twice learns from one",
        (f"{CORE}::test_values_and_gradients",),
    ),
    Mutant(
        "grouped-invariant-by-rows",
        "ladder.py",
        "usual = bucketed(problem.at(ROWS_EACH * problem.groups.count))",
        "usual = problem",
        "rows have other bits beside more rows",
        (f"{CORE}::test_batch_invariant_mode_has_one_config_for_any_number_of_rows",),
    ),
    Mutant(
        "experts-ends",
        "experts.py",
        "right=True, out_int32=True",
        "right=False, out_int32=True",
        "each expert has the rows of the one before",
        (EXPERTS,),
    ),
    Mutant(
        "supports-indexed",
        "supports.py",
        "if len(groups.given) > 1 and not supports.indexed:",
        "if False:",
        "a kernel that never heard of indices is given them",
        ("tests/core/test_supports.py",),
    ),
    Mutant(
        "conformance-of-ragged",
        "conformance.py",
        "            if not verdict.ok:\n",
        "            if False:\n",
        "a wrong ragged kernel passes the suite",
        ("tests/core/test_testing.py::test_a_wrong_kernel_fails",),
    ),
]
