"""What the data-parallel ranks shard and what the host holds, from `zero_optimization`."""

from __future__ import annotations

from hybridlab.config.draft import Draft
from hybridlab.config.resolved import Zero
from hybridlab.plan import legality
from hybridlab.plan.layout import Layout
from hybridlab.plan.legality import GRADIENT_POLICIES, POLICY, STAGE

_SECTION = "zero_optimization"
OPTIMIZER_DEVICE, PARAM_DEVICE = f"{_SECTION}.offload_optimizer.device", f"{_SECTION}.offload_param.device"
RATIO = f"{_SECTION}.offload_optimizer.ratio"
MODEL_LIMIT, PERSISTENCE = (
    f"{_SECTION}.stage3_model_persistence_threshold",
    f"{_SECTION}.stage3_param_persistence_threshold",
)
NO_LIMIT = 2**53
"""From here on a number of elements is no limit: no model is larger."""


def zero(draft: Draft, grid: Layout | None, micro_batches: int | None) -> Zero | None:
    """The ZeRO settings; None when a key that decides them is wrong (the draft then says why)."""
    section = draft.config.zero_optimization
    offload_optimizer = section.offload_optimizer.device == "cpu"
    offload_param = section.offload_param.device == "cpu"
    _ratio(draft)
    if STAGE in draft.bad:
        return None
    stage = section.stage
    policy = section.gradient_policy or GRADIENT_POLICIES[stage][0]
    sound = draft.check(
        legality.gradient_policy(stage, policy) if POLICY not in draft.bad else None,
        legality.offload_optimizer(stage) if offload_optimizer else None,
        legality.offload_param(stage) if offload_param else None,
    )
    if not sound:
        return None
    _choices(draft, stage, policy, grid, micro_batches)
    return Zero(
        stage=stage,
        gradient_policy=policy,
        reduce_bucket_size=section.reduce_bucket_size,
        allgather_bucket_size=section.allgather_bucket_size,
        prefetch_bucket_size=section.stage3_prefetch_bucket_size,
        persistence_threshold=_persistence(draft),
        max_live_parameters=section.stage3_max_live_parameters,
        max_reuse_distance=section.stage3_max_reuse_distance,
        overlap_comm=section.overlap_comm,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        pin_memory=_pin_memory(draft),
    )


def _ratio(draft: Draft) -> None:
    """Only the whole optimizer can be offloaded. The device is named too: the two are often confused."""
    ratio = draft.config.zero_optimization.offload_optimizer.ratio
    if ratio == 1:
        return
    entry = draft.account.entries.get(draft.spelled(OPTIMIZER_DEVICE))
    device = entry.value if entry is not None else "none"
    draft.refuse(
        RATIO,
        f"ratio {ratio:g} would offload a part of the optimizer, which is implemented for no device "
        f"(device is {device!r}; DeepSpeed has it for cpu at stage 3 only).",
        "ratio 1 with device cpu, or device none.",
    )


def _pin_memory(draft: Draft) -> bool:
    section = draft.config.zero_optimization
    asked = [part.pin_memory for part in (section.offload_optimizer, section.offload_param) if part.device == "cpu"]
    first, second = f"{_SECTION}.offload_optimizer.pin_memory", f"{_SECTION}.offload_param.pin_memory"
    if len(set(asked)) > 1 and draft.given(first) and draft.given(second):
        draft.refuse(
            second,
            f"{str(asked[1]).lower()}, but {draft.spelled(first)} says {str(asked[0]).lower()}: "
            "host buffers are either pinned or not.",
            "the same value for both.",
            first,
        )
    if len(asked) == 2 and draft.given(second) and not draft.given(first):
        return asked[1]
    return asked[0] if asked else True


def _persistence(draft: Draft) -> int:
    """The threshold below which parameters stay whole; a limit on their sum is known only as 0 or as none."""
    section = draft.config.zero_optimization
    limit = section.stage3_model_persistence_threshold
    if limit is None or limit >= NO_LIMIT or section.stage3_param_persistence_threshold == 0:
        return section.stage3_param_persistence_threshold
    if limit == 0:
        return 0
    draft.refuse(
        MODEL_LIMIT,
        f"a limit on the sum of unsharded parameters ({limit} elements) is not implemented.",
        f"0 shards all; or leave it out and set {PERSISTENCE}.",
    )
    return section.stage3_param_persistence_threshold


def _choices(draft: Draft, stage: int, policy: str, grid: Layout | None, micro_batches: int | None) -> None:
    section = draft.config.zero_optimization
    if stage == 2 and section.gradient_policy is None:
        m = "m" if micro_batches is None else str(micro_batches)
        draft.choose(
            POLICY,
            policy,
            f"stage 2 promises sharded gradients: they are reduce-scattered for each of {m} micro-batches; "
            "accumulate_then_scatter would do it once a step and hold whole gradients meanwhile",
        )
    if stage >= 1 and grid is not None and grid.dp == 1:
        draft.choose("zero", f"stage {stage}", "dp is 1: there is nobody to share with, ZeRO changes nothing")
    if not draft.given(f"{_SECTION}.overlap_comm") and f"{_SECTION}.overlap_comm" not in draft.filled:
        draft.choose(f"{_SECTION}.overlap_comm", True, "not given: reductions run while backward goes on")
