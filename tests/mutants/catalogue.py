"""Small plausible bugs, and the tests that must notice each."""

from __future__ import annotations

from caching import CACHE
from calls import KEYS, PLANS
from choosing import DISPATCHING, TUNING
from elsewhere import CORNERS, ELSEWHERE, SPEC
from fresh import FRESH
from grouped import GROUPED
from mutant import Mutant
from outputs import OUTPUTS

MUTANTS: list[Mutant] = [
    *KEYS,
    *PLANS,
    *TUNING,
    *DISPATCHING,
    *SPEC,
    *CORNERS,
    *ELSEWHERE,
    *OUTPUTS,
    *GROUPED,
    *FRESH,
    *CACHE,
]
