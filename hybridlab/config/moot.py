"""Keys with an effect in general but none in this very config: stage-3 sizes at stage 1, a loss scale without fp16.

Each entry asks the resolved values, so that the account never calls a key used that nobody will read.
"""

from __future__ import annotations

from hybridlab.config.draft import Draft
from hybridlab.config.resolved import Resolved

_ZERO = "zero_optimization"
_STAGE3 = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)


def moot(draft: Draft, resolved: Resolved) -> None:
    """Mark the keys that this config leaves without effect."""
    for path, why in _reasons(draft, resolved).items():
        if path in draft.origin:
            draft.account.no_effect(draft.spelled(path), why)


def _reasons(draft: Draft, resolved: Resolved) -> dict[str, str]:
    """Key -> why nobody reads it."""
    return {**_precision(resolved), **_zero(resolved), **_parallel(draft, resolved), **_updates(draft, resolved)}


def _precision(resolved: Resolved) -> dict[str, str]:
    scale = {
        "initial_scale_power": "the scale is fixed",
        "loss_scale_window": "the scale is fixed",
        "hysteresis": "the scale is fixed",
        "consecutive_hysteresis": "the scale is fixed",
        "min_loss_scale": "the scale is fixed",
    }
    if resolved.precision != "fp16":
        return {f"fp16.{key}": f"fp16 is off ({resolved.precision} is on)" for key in ("loss_scale", *scale)}
    return {f"fp16.{key}": why for key, why in scale.items()} if resolved.loss_scale.static is not None else {}


def _zero(resolved: Resolved) -> dict[str, str]:
    zero = resolved.zero
    found: dict[str, str] = {}
    if zero.stage != 3:
        found |= {f"{_ZERO}.{key}": f"it is read at stage 3; the stage is {zero.stage}" for key in _STAGE3}
    if zero.stage not in (1, 2):
        found[f"{_ZERO}.allgather_bucket_size"] = f"it is read at stages 1 and 2; the stage is {zero.stage}"
    for part, on in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if not on:
            keys = ("pin_memory", "ratio") if part == "offload_optimizer" else ("pin_memory",)
            found |= {f"{_ZERO}.{part}.{key}": "nothing is offloaded: the device is none" for key in keys}
    if resolved.layout.dp == 1:
        alone = "dp is 1: there is nobody to exchange gradients with"
        found |= {f"{_ZERO}.{key}": alone for key in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm")}
        found[f"{_ZERO}.gradient_policy"] = alone
    return found


def _parallel(draft: Draft, resolved: Resolved) -> dict[str, str]:
    found: dict[str, str] = {}
    if resolved.layout.tp == 1:
        found["tensor_parallel.sequence_parallel"] = "tp is 1: there is nobody to share a sequence with"
    if resolved.layout.pp == 1:
        one = "pp is 1: one stage has no schedule"
        found |= {f"pipeline_parallel.{key}": one for key in ("schedule", "virtual_stages", "split", "placement")}
        found["pipeline.partition"] = one
    elif draft.given("pipeline_parallel.split"):
        found["pipeline.partition"] = "the split is given"
    if resolved.recompute != "full":
        found["activation_checkpointing.interval"] = "layers are recomputed in groups under policy full only"
    return found


def _updates(draft: Draft, resolved: Resolved) -> dict[str, str]:
    scheduler = resolved.scheduler
    if scheduler is None or scheduler.type == "WarmupCosineLR":
        return {}
    if scheduler.type == "WarmupDecayLR" or draft.given("scheduler.params.warmup_max_lr"):
        return {"optimizer.params.lr": f"{scheduler.type} sets the rate, up to warmup_max_lr"}
    return {}
