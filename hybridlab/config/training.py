"""Precision, loss scale, optimizer and learning-rate schedule, from their sections."""

from __future__ import annotations

from typing import Any

from hybridlab.config.draft import Draft
from hybridlab.config.read import show
from hybridlab.config.specs import REQUIRED, SCHEDULERS, LossScaleSpec, OptimizerSpec, SchedulerSpec

ADAM_ONLY, SGD_ONLY = ("betas", "eps", "adam_w_mode"), ("momentum", "nesterov")
_PARAMS, _SCHEDULE = "optimizer.params", "scheduler.params"
TOTAL, WARMUP, MAX_LR, MIN_LR = (
    f"{_SCHEDULE}.total_num_steps",
    f"{_SCHEDULE}.warmup_num_steps",
    f"{_SCHEDULE}.warmup_max_lr",
    f"{_SCHEDULE}.warmup_min_lr",
)


def precision(draft: Draft) -> str | None:
    """ "fp32", "bf16", "fp16" or "fp64"; None when more than one is switched on."""
    on = [name for name in ("fp16", "bf16", "fp64") if draft.value(f"{name}.enabled")]
    if len(on) > 1:
        first, *others = (f"{name}.enabled" for name in on)
        draft.refuse(
            first,
            f"{' and '.join(on)} cannot be on together: weights have one dtype.",
            f"true for one of {', '.join(on)}, false for the others.",
            *others,
        )
        return None
    for name in ("fp16", "bf16", "fp64"):
        if name in draft.origin and f"{name}.enabled" not in draft.origin:
            draft.choose(f"{name}.enabled", False, "the section is there, but does not say enabled")
    if not on:
        draft.choose("precision", "fp32", "no precision section is switched on; as DeepSpeed")
    return on[0] if on else "fp32"


def loss_scale(draft: Draft) -> LossScaleSpec:
    """The fp16 loss scale. Checked also when fp16 is off: what is written should be right."""
    section = draft.config.fp16
    spec = LossScaleSpec(
        static=section.loss_scale or None,
        initial_power=section.initial_scale_power,
        window=section.loss_scale_window,
        hysteresis=section.hysteresis,
        min_scale=section.min_loss_scale,
        consecutive_hysteresis=section.consecutive_hysteresis,
    )
    if spec.static is None and spec.min_scale > 2.0**spec.initial_power and "fp16.min_loss_scale" not in draft.bad:
        draft.refuse(
            "fp16.min_loss_scale",
            f"the scale starts at 2^{spec.initial_power}, below the minimum {spec.min_scale:g}.",
            f"min_loss_scale 1, or initial_scale_power {spec.min_scale.hex().rpartition('p')[2].lstrip('+')} or more.",
            "fp16.initial_scale_power",
        )
    return spec


def optimizer(draft: Draft) -> OptimizerSpec | None:
    """The update rule; None when it is not one of ours (the draft then says why)."""
    section = draft.config.optimizer
    params = section.params
    if "optimizer.type" in draft.bad:
        return None
    kind = section.type
    if kind is None:
        given = [path for path in draft.origin if path.startswith(f"{_PARAMS}.")]
        if given:
            draft.refuse("optimizer", "the block has params but no type.", 'type "AdamW".', *given)
            return None
        spec = OptimizerSpec()
        draft.choose("optimizer", "AdamW", f"not given: lr {spec.lr:g}, betas {list(spec.betas)}, no weight decay")
        return spec
    if kind == "Adam" and params.adam_w_mode:
        kind = "AdamW"
    _foreign_params(draft, kind)
    if kind == "SGD" and params.nesterov and params.momentum == 0:
        draft.refuse(f"{_PARAMS}.nesterov", "Nesterov's momentum needs a momentum; it is 0.", "momentum 0.9.")
    if not draft.given(f"{_PARAMS}.lr") and f"{_PARAMS}.lr" not in draft.filled | draft.bad:
        draft.choose(f"{_PARAMS}.lr", params.lr, "not given: torch's and DeepSpeed's default")
    return OptimizerSpec(
        type=kind,
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
        weight_decay=params.weight_decay,
        momentum=params.momentum,
        nesterov=params.nesterov,
    )


def _foreign_params(draft: Draft, kind: str) -> None:
    """Parameters of one update rule given to another: torch and DeepSpeed raise a TypeError."""
    wrong, owners = (ADAM_ONLY, "Adam and AdamW") if kind == "SGD" else (SGD_ONLY, "SGD")
    for name in wrong:
        path = f"{_PARAMS}.{name}"
        if draft.given(path):
            draft.refuse(path, f"{name} is a parameter of {owners}, not of {kind}.", f"remove it, or type {owners}.")
    type_name = draft.config.optimizer.type
    path = f"{_PARAMS}.adam_w_mode"
    if type_name == "AdamW" and draft.given(path) and not draft.config.optimizer.params.adam_w_mode:
        draft.refuse(path, "false, but the type is AdamW.", "type Adam, or remove adam_w_mode.", "optimizer.type")


def scheduler(draft: Draft, lr: float | None) -> SchedulerSpec | None:
    """The learning-rate schedule, None for a constant rate (or when it is wrong: the draft then says why).

    Parameters that were not given are left out: `SCHEDULERS` has their defaults.
    """
    section = draft.config.scheduler
    if "scheduler.type" in draft.bad:
        return None
    asked = [path for path in draft.origin if path.startswith(f"{_SCHEDULE}.")]
    if section.type is None:
        if asked:
            draft.refuse("scheduler", "the block has params but no type.", 'type "WarmupLR".', *asked)
        else:
            draft.choose("scheduler", None, "not given: the learning rate stays constant")
        return None
    defaults = SCHEDULERS[section.type]
    for path in asked:
        name = path.rpartition(".")[2]
        if name not in defaults and path not in draft.bad:
            draft.refuse(path, f"{name} is no parameter of {section.type}.", f"one of {', '.join(defaults)}.")
    params: dict[str, Any] = {
        name: getattr(section.params, name)
        for name in defaults
        if draft.given(f"{_SCHEDULE}.{name}") or f"{_SCHEDULE}.{name}" in draft.filled
    }
    if MAX_LR in draft.autos and "warmup_max_lr" in defaults and lr is not None:
        params["warmup_max_lr"] = lr
        draft.choose(MAX_LR, lr, '"auto": the optimizer\'s lr, as the Trainer does')
    if section.type == "WarmupDecayLR" and "warmup_max_lr" not in params and MAX_LR not in draft.bad:
        draft.choose(MAX_LR, defaults["warmup_max_lr"], f"not given: DeepSpeed's default, not the optimizer's lr {lr}")
    _total_steps(draft, section.type, params)
    _order(draft, section.type, params, lr)
    return SchedulerSpec(section.type, params)


def _total_steps(draft: Draft, kind: str, params: dict[str, Any]) -> None:
    defaults = SCHEDULERS[kind]
    if "total_num_steps" not in defaults or TOTAL in draft.bad:
        return
    warmup = params.get("warmup_num_steps", defaults["warmup_num_steps"])
    if TOTAL in draft.autos:
        if draft.steps is None:
            draft.choose(TOTAL, None, '"auto": the number of steps of the run, known when training starts')
            return
        params["total_num_steps"] = draft.steps
        late = f"; it ends within the warm-up of {warmup}" if draft.steps < warmup else ""
        draft.choose(TOTAL, draft.steps, f'"auto": the steps of this run{late}')
    elif "total_num_steps" not in params:
        if defaults["total_num_steps"] is REQUIRED:
            draft.refuse(
                "scheduler.params" if "scheduler.params" in draft.origin else "scheduler",
                f"{kind} decays until total_num_steps, which is not given.",
                'total_num_steps: the number of optimizer steps, or "auto" for those of the run.',
            )
    elif params["total_num_steps"] < warmup and WARMUP not in draft.bad:
        total = params["total_num_steps"]
        said = "warmup_num_steps" if draft.given(WARMUP) else "warmup_num_steps, by default"
        draft.refuse(
            TOTAL,
            f"training ends at total_num_steps {total}, before the warm-up does ({said} {warmup}).",
            f"warmup_num_steps {max(1, total // 10)}, or total_num_steps more than {warmup}.",
            WARMUP,
        )


def _order(draft: Draft, kind: str, params: dict[str, Any], lr: float | None) -> None:
    """A warm-up goes up."""
    if "warmup_min_lr" not in SCHEDULERS[kind] or {MIN_LR, MAX_LR} & draft.bad:
        return
    defaults = SCHEDULERS[kind]
    low = params.get("warmup_min_lr", defaults["warmup_min_lr"])
    high = params.get("warmup_max_lr", defaults["warmup_max_lr"])
    high = lr if high is None else high
    if high is not None and low > high:
        draft.refuse(
            MIN_LR,
            f"the warm-up would fall, from warmup_min_lr {show(low)} to warmup_max_lr {show(high)}.",
            f"warmup_min_lr {show(high)} or less.",
            MAX_LR,
        )


def recomputation(draft: Draft) -> tuple[str, int]:
    """(policy, layers per group), from our section and from DeepSpeed's `pipeline` block."""
    policy_key, interval_key = "activation_checkpointing.policy", "activation_checkpointing.interval"
    pipeline_key = "pipeline.activation_checkpoint_interval"
    section = draft.config.activation_checkpointing
    every = draft.config.pipeline.activation_checkpoint_interval
    if every == 0:
        if draft.given(interval_key) and section.policy != "full" and policy_key not in draft.bad:
            draft.refuse(
                interval_key,
                f"groups of layers are recomputed under policy full; the policy is {section.policy}.",
                'policy "full", or remove interval.',
            )
        return section.policy, section.interval
    if draft.given(policy_key) and section.policy != "full":
        draft.refuse(
            pipeline_key,
            f"{every} recomputes whole layers, but {policy_key} says {section.policy}.",
            f"0, or {policy_key} full.",
            policy_key,
        )
    if draft.given(interval_key) and section.interval != every:
        draft.refuse(
            pipeline_key,
            f"{every}, but {interval_key} says {section.interval}: two spellings of one key.",
            "keep one of them.",
            interval_key,
        )
    return "full", every
