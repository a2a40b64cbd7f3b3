"""Clipping by the global norm (arXiv:1211.5063): all gradients are shortened by one factor, so that none turns."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

_EPSILON = 1e-6  # as torch, Megatron-LM and DeepSpeed: keeps a zero norm from dividing by zero


@overload
def clip_coefficient(norm: float, max_norm: float) -> float: ...
@overload
def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor: ...
def clip_coefficient(norm: float | Tensor, max_norm: float) -> float | Tensor:
    """The factor for every gradient: ``min(1, max_norm / (norm + 1e-6))``. A tensor for a tensor, so nothing syncs.

    Args:
        norm: the norm over all ranks of the unscaled, averaged gradients.
        max_norm: 0 switches clipping off: the factor is 1, whatever the norm.

    A norm that is infinite or not a number has no meaningful factor: it gives nan, never 0, for 0 would quietly replace
    a broken step by one that moves no weight. Look at the norm before applying the factor.

    Raises:
        ValueError: a negative ``max_norm``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 (off) or positive, not {max_norm}")
    if isinstance(norm, Tensor):
        if max_norm == 0:
            return torch.ones_like(norm)
        coefficient = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
        return torch.where(torch.isfinite(norm), coefficient, torch.full_like(norm, math.nan))
    if max_norm == 0:
        return 1.0
    return min(1.0, max_norm / (norm + _EPSILON)) if math.isfinite(norm) else math.nan
