"""The update of the weights: optimizers over flat shards, learning-rate schedules, loss scale, gradient clipping.

All of it is local to a rank. Whatever ranks must agree on (the gradient norm, whether some gradient overflowed) is
agreed elsewhere and comes in as a number.
"""

from __future__ import annotations

from hybridlab.optim.clip import clip_coefficient
from hybridlab.optim.loss_scale import DynamicLossScale, LossScale, StaticLossScale, make_loss_scale
from hybridlab.optim.optimizers import (
    allocate_state,
    make_optimizer,
    set_learning_rate,
    set_steps_taken,
    state_of,
    state_tensors,
    steps_taken,
)
from hybridlab.optim.schedules import learning_rate

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "StaticLossScale",
    "allocate_state",
    "clip_coefficient",
    "learning_rate",
    "make_loss_scale",
    "make_optimizer",
    "set_learning_rate",
    "set_steps_taken",
    "state_of",
    "state_tensors",
    "steps_taken",
]
