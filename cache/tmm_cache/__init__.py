"""The on-disk cache of tuning results, one small JSON file per problem and GPU.

It depends on neither torch nor the kernels: problems, environments and configs are opaque JSON.

    store = CacheStore()
    with store.lock(gpu, environment, problem, timeout=60) as acquired:
        record = store.load(gpu, environment, problem)
        if record is None and acquired:
            store.save(gpu, environment, tune(problem))
"""

from tmm_base.stamps import stamp

from tmm_cache.cache_errors import CacheWarning, RecordError
from tmm_cache.keys import JSON, digest, slug
from tmm_cache.notes import Notes
from tmm_cache.paths import default_root, layer_paths, shipped_layers
from tmm_cache.record import CLOCK, SCHEMA, CandidateResult, TuningRecord
from tmm_cache.scan import Summary
from tmm_cache.store import CacheStore, Miss

__all__ = [
    "CLOCK",
    "JSON",
    "SCHEMA",
    "CacheStore",
    "CacheWarning",
    "CandidateResult",
    "Miss",
    "Notes",
    "RecordError",
    "Summary",
    "TuningRecord",
    "default_root",
    "digest",
    "layer_paths",
    "shipped_layers",
    "slug",
    "stamp",
]
