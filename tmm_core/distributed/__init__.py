"""Many ranks: sharded operands, and plans that all ranks agree on.

Importing this registers the sharding rules of ``tmm::matmul`` with DTensor (1.5 s, which
``import tmm_core`` does without). A call of ``tmm_core.matmul`` that meets a DTensor does it
too; under ``torch.compile`` it has to be done before.

Nothing in ``matmul`` waits for another rank: what DTensor's redistribution costs is DTensor's.
"""

from __future__ import annotations

from tmm_core.distributed import sharding
from tmm_core.distributed.tuning import tune

__all__ = ["tune"]

sharding.register()
