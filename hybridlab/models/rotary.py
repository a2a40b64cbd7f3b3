"""Rotary positions: queries and keys are turned by an angle that grows with their position, so that their products
depend on the distance between them only.

Feature i and feature i + d/2 of a head form a plane (the pairing of Hugging Face's Llama), which turns by
position · θ^(-2i/d).

Source: Su et al., arXiv:2104.09864 §3. Scaling for longer sequences: "linear", arXiv:2306.15595; "llama3", the
technical report of Llama 3.1, by wavelength.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hybridlab.shapes import ModelShape, RopeScaling


class Rotary:
    """The angles' cosines and sines, computed once for all layers of a model and kept.

    It is no module: nothing in it is a parameter, a buffer or part of a checkpoint.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self._kept: tuple[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    @classmethod
    def of(cls, shape: ModelShape) -> Rotary | None:
        """For a shape with rotary positions, else None."""
        if shape.positions != "rotary":
            return None
        return cls(shape.head_dim, shape.rope_theta, shape.rope_scaling)

    def __call__(self, x: Tensor) -> Tensor:
        """[b, s, heads, d] to the same shape, turned; positions 0 .. s-1. Saves only the two tables for backward."""
        cos, sin = self._tables(x)
        return torch.addcmul(x * cos, x.roll(self.head_dim // 2, -1), sin)

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos [s, 1, d] and sin with the sign that each half of the features takes, in the dtype of ``x``."""
        # Fake tensors of one mode mean nothing in another.
        key = (x.shape[1], x.dtype, x.device, getattr(x, "fake_mode", None))
        if self._kept is None or self._kept[0] != key:
            with torch.no_grad():
                angles = torch.outer(
                    torch.arange(x.shape[1], device=x.device, dtype=torch.float64),
                    torch.tensor(self.frequencies(), device=x.device, dtype=torch.float64),
                )
                cos, sin = angles.cos(), angles.sin()
                tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
                self._kept = key, tuple(table.to(x.dtype).unsqueeze(1) for table in tables)  # type: ignore[assignment]
        assert self._kept is not None
        return self._kept[1]

    def frequencies(self) -> list[float]:
        """Radians per position of each of the d/2 planes."""
        plain = [self.theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)]
        if self.scaling is None:
            return plain
        if self.scaling.kind == "linear":
            return [frequency / self.scaling.factor for frequency in plain]
        return [_by_wavelength(frequency, self.scaling) for frequency in plain]


def _by_wavelength(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1: waves longer than the original context are stretched, short ones left, with a passage between."""
    turns = scaling.original_max_positions * frequency / (2.0 * math.pi)
    if turns <= scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns >= scaling.high_freq_factor:
        return frequency
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1.0 - share) * frequency / scaling.factor + share * frequency
