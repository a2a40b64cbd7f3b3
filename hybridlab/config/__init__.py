"""DeepSpeed-style JSON in, one checked and settled `Resolved` out. Every key is used, refused, or named without effect.

Read in this order: `schema` (the keys with an effect), `keys` (the keys without one, and why), `sift` (the first pass
over a file), `batch` (the triple), `parallel`, `zero`, `training` (the rules), `resolve` (all of it, in order),
`explain` (the account). What may be combined with what stands in `hybridlab.plan.legality`.
"""

from __future__ import annotations

from hybridlab.config.explain import explain
from hybridlab.config.json_schema import json_schema
from hybridlab.config.resolve import resolve
from hybridlab.config.resolved import Resolved, Zero
from hybridlab.config.specs import LossScaleSpec, OptimizerSpec, SchedulerSpec

__all__ = [
    "LossScaleSpec",
    "OptimizerSpec",
    "Resolved",
    "SchedulerSpec",
    "Zero",
    "explain",
    "json_schema",
    "resolve",
]
