"""DeepSpeed's warm-up schedules as a function of the step number alone, so that resuming needs nothing else.

``step`` counts the updates made before this one. An update skipped for an overflow does not count, a micro-batch does
not count, and the number of ranks does not enter: one optimizer step is one step of the schedule.

DeepSpeed sets the rate of the first update when it builds the scheduler and advances the scheduler *after* each update.
Update number ``step`` therefore uses the formula at ``i = step - 1``, and the first one a value of its own:

============  ============================  ========================================================================
              first update (step 0)         then, at i = step - 1 (W = max(2, warmup_num_steps), T = total_num_steps)
============  ============================  ========================================================================
warm-up       WarmupLR, WarmupDecayLR:      min + (max - min) g, with g = ln(i + 1) / ln W ("log", the default)
(i < W)       warmup_min_lr                 or g = i / W ("linear")
after         WarmupCosineLR: 0, whatever   WarmupLR: max. WarmupDecayLR: min + (max - min) (T - i) / (T - W), down to
(i >= W)      warmup_min_ratio says         min. WarmupCosineLR: lr (r + (1 - r) (1 + cos pi p) / 2), r = cos_min_ratio,
                                            p = (i - W + 1) / (T - W), at most 1
============  ============================  ========================================================================

Since g = 0 at i = 0, the first *two* updates run at the minimum: with its default of 0 they change no weight.
WarmupCosineLR's minimum and maximum are warmup_min_ratio and 1, times the optimizer's own lr. WarmupLR's maximum is the
optimizer's lr unless warmup_max_lr is given; WarmupDecayLR's is 0.001 unless given, whatever the optimizer's lr is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridlab.config.specs import REQUIRED, SCHEDULERS, WARMUP_TYPES, SchedulerSpec
from hybridlab.errors import UserError


def learning_rate(spec: SchedulerSpec | None, base_lr: float, step: int) -> float:
    """The rate of the update that follows ``step`` earlier ones. Without a schedule, ``base_lr``, the optimizer's own.

    Raises:
        UserError: an unknown schedule or parameter, or one that is missing or out of range.
        ValueError: a negative step.
    """
    if step < 0:
        raise ValueError(f"step counts the updates already made and cannot be {step}")
    if spec is None:
        return base_lr
    params = _parameters(spec)
    if spec.type == "WarmupCosineLR":
        return base_lr * _cosine_ratio(params, step)
    low = params["warmup_min_lr"]
    high = base_lr if params["warmup_max_lr"] is None else params["warmup_max_lr"]
    if step == 0:
        return low
    return low + (high - low) * _share_of_maximum(params, step - 1)


def _share_of_maximum(params: Mapping[str, Any], i: int) -> float:
    warmup = max(2, params["warmup_num_steps"])
    if i < warmup:
        return _warmup_share(params["warmup_type"], i, warmup)
    if "total_num_steps" not in params:  # WarmupLR stays at its maximum
        return 1.0
    total = params["total_num_steps"]
    return max(0.0, (total - i) / max(1, total - warmup))


def _cosine_ratio(params: Mapping[str, Any], step: int) -> float:
    if step == 0:
        return 0.0
    i = step - 1
    warmup = max(2, params["warmup_num_steps"])
    if i < warmup:
        start = params["warmup_min_ratio"]
        return start + (1 - start) * _warmup_share(params["warmup_type"], i, warmup)
    progress = min(1.0, (i - warmup + 1) / max(1, params["total_num_steps"] - warmup))
    floor = params["cos_min_ratio"]
    return max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def _warmup_share(kind: str, i: int, warmup: int) -> float:
    return math.log(i + 1) / math.log(warmup) if kind == "log" else i / warmup


def _parameters(spec: SchedulerSpec) -> dict[str, Any]:
    """The parameters with defaults filled in, checked."""
    if spec.type not in SCHEDULERS:
        raise UserError(
            f"{spec.type!r} is no learning-rate schedule this engine knows.",
            key="scheduler.type",
            value=spec.type,
            fix="one of " + ", ".join(SCHEDULERS),
        )
    defaults = SCHEDULERS[spec.type]
    params = {**defaults, **spec.params}
    for name, value in params.items():
        rule, fix = _broken_rule(spec.type, name, value)
        if rule:
            raise UserError(rule, key=f"scheduler.params.{name}", value=value, fix=fix)
    return params


def _broken_rule(kind: str, name: str, value: Any) -> tuple[str, str]:
    """The rule a parameter breaks and what would be right; two empty strings when it is fine."""
    if name not in SCHEDULERS[kind]:
        return f"{kind} takes no parameter of this name.", "one of " + ", ".join(SCHEDULERS[kind])
    if value is REQUIRED:
        return f"{kind} needs it and it has no default.", "give the number of optimizer steps"
    if name == "warmup_type":
        return ("", "") if value in WARMUP_TYPES else (f"{value!r} is no way to warm up.", " or ".join(WARMUP_TYPES))
    if name.endswith("_num_steps"):
        right = type(value) is int and value > 0
        return ("", "") if right else (f"{value!r} is no number of steps.", "a whole number, 1 or more")
    right = type(value) in (int, float) or value is SCHEDULERS[kind][name]
    return ("", "") if right else (f"{value!r} is no number.", "a number: there is one group of parameters")
