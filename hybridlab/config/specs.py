"""How the weights are updated, as plain records: which optimizer, which learning-rate schedule, which loss scale.

The config fills these in; `hybridlab.optim` reads them. They hold resolved values only, never "auto". No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPTIMIZERS = ("AdamW", "Adam", "SGD")

REQUIRED = object()
"""Stands for a parameter that has no default."""

SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,  # None: the optimizer's lr
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupDecayLR": {
        "total_num_steps": REQUIRED,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,  # not the optimizer's lr: as in DeepSpeed
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": REQUIRED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}
"""DeepSpeed 0.19's schedules that `hybridlab.optim` knows, with the defaults of their parameters."""

WARMUP_TYPES = ("log", "linear")


@dataclass(frozen=True)
class OptimizerSpec:
    """The update rule and its constants.

    Attributes:
        type: "AdamW" (decoupled weight decay, arXiv:1711.05101), "Adam" (arXiv:1412.6980, weight decay added to the
            gradient, i.e. L2) or "SGD".
        lr: the learning rate before any schedule.
        betas, eps: of Adam and AdamW; SGD ignores them.
        weight_decay: 0 is none.
        momentum, nesterov: of SGD; Adam and AdamW ignore them.
    """

    type: str = "AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class SchedulerSpec:
    """A learning-rate schedule by DeepSpeed's name, with its parameters by DeepSpeed's names.

    Attributes:
        type: one of `SCHEDULERS`.
        params: as in the config file; absent ones take the defaults in `SCHEDULERS`.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossScaleSpec:
    """By what the loss is multiplied before backward, so that small fp16 gradients do not vanish.

    Attributes:
        static: a fixed scale; None means dynamic.
        initial_power: the dynamic scale starts at 2**initial_power.
        window: every so many good steps in a row the scale doubles.
        hysteresis: the overflow that first halves the scale (1: the very first; 2: the second; ...).
        min_scale: the scale never goes below.
        consecutive_hysteresis: True: any good step restores the hysteresis; False: only growing the scale does.
    """

    static: float | None = None
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    consecutive_hysteresis: bool = False
