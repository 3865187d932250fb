"""Small plausible bugs, and the tests that must notice each."""

from __future__ import annotations

from caching import CACHE
from call import SKIPPED_ROWS, VALID_CALLS
from calls import KEYS, PLANS
from choosing import DISPATCHING, TUNING
from convert import CONVERTED
from drawn_at_random import DRAWN
from drawn_layers import DRAWN_LAYERS
from edges import EDGES
from elsewhere import CORNERS, ELSEWHERE, SPEC
from environ import ENVIRON
from epilogues import EPILOGUE_FILES
from formats import FORMATS
from fresh import FRESH
from grouped import GROUPED
from identity import IDENTITY
from inputs import INPUTS
from kernel_code import KERNELS
from lifetimes import LIFETIMES
from limits import LIMITS
from measure import BENCH
from mutant import Mutant
from outer import OUTER
from outputs import OUTPUTS
from packed import PACKED
from path import PATH
from picked import PICKED
from planted import PLANTED
from pool import POOL
from redrawn import REDRAWN
from sampled import SAMPLED
from swept import SWEPT
from systematic_core import SYSTEMATIC_CORE
from verification import VERIFICATION

MUTANTS: list[Mutant] = [
    *KEYS,
    *PLANS,
    *TUNING,
    *DISPATCHING,
    *SPEC,
    *CORNERS,
    *ELSEWHERE,
    *ENVIRON,
    *OUTPUTS,
    *GROUPED,
    *FRESH,
    *SAMPLED,
    *EDGES,
    *FORMATS,
    *PACKED,
    *KERNELS,
    *LIFETIMES,
    *LIMITS,
    *CONVERTED,
    *CACHE,
    *VALID_CALLS,
    *SKIPPED_ROWS,
    *VERIFICATION,
    *EPILOGUE_FILES,
    *IDENTITY,
    *INPUTS,
    *PATH,
    *POOL,
    *BENCH,
    *DRAWN,
    *DRAWN_LAYERS,
    *SWEPT,
    *SYSTEMATIC_CORE,
    *OUTER,
    *REDRAWN,
    *PLANTED,
    *PICKED,
]
