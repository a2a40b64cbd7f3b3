"""Loss scaling for fp16 (arXiv:1710.03740 §3.2): small gradients are lifted out of the range where fp16 rounds to zero.

The loss is multiplied by the scale before backward and the gradients are divided by it before the norm is taken. A step
in which some gradient overflows is skipped on every rank: no weight moves, the learning-rate schedule does not advance.
An overflow early in training is no harm, it is how the scale is found.

The scale lives on each rank and only ever hears the ``overflow`` that all ranks agreed on: it is the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from hybridlab.config.specs import LossScaleSpec
from hybridlab.errors import UserError

STATIC_PATIENCE = 100
"""Skipped steps in a row after which a fixed scale gives up: nothing would change if it went on."""

_FACTOR = 2.0  # a power of two: scaling then changes exponents only and rounds nothing

_LOOK = (
    "look for NaN or inf in the data and the loss, and lower the learning rate. "
    "No weight was changed by the skipped steps."
)
_ADVICE = "train in bf16, which has the range of fp32 and needs no scale; or " + _LOOK


class LossScale(Protocol):
    """A number for the loss, and what is done after each step.

    Attributes:
        scale: multiply the loss by it, divide the gradients by it.
        skipped: how many steps overflowed so far.
    """

    scale: float
    skipped: int

    def update(self, overflow: bool) -> None:
        """Say whether a gradient of *any* rank overflowed in the step just done. Raises UserError when hopeless."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""


def make_loss_scale(spec: LossScaleSpec) -> LossScale:
    """Static or dynamic, as ``spec`` says."""
    return DynamicLossScale(spec) if spec.static is None else StaticLossScale(spec.static)


class StaticLossScale:
    """A fixed scale. 1 for the precisions that need none, where it still ends a run whose gradients are inf or NaN.

    DeepSpeed skips overflowing steps of a fixed scale for ever; here `STATIC_PATIENCE` of them in a row are an error.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not (scale > 0 and math.isfinite(scale)):
            raise UserError(
                f"a loss scale is a positive number, not {scale}.",
                key="fp16.loss_scale",
                value=scale,
                fix="0 for a dynamic scale, or a power of two",
            )
        self.scale = float(scale)
        self.skipped = 0
        self._in_a_row = 0

    def update(self, overflow: bool) -> None:
        """Count the overflows in a row; after too many, raise UserError."""
        if not overflow:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= STATIC_PATIENCE and self.scale == 1.0:
            raise UserError(f"gradients were inf or NaN in {self._in_a_row} steps in a row, all skipped.", fix=_LOOK)
        if self._in_a_row >= STATIC_PATIENCE:
            raise UserError(
                f"gradients overflowed in {self._in_a_row} steps in a row at the fixed loss scale {self.scale:g}.",
                key="fp16.loss_scale",
                value=self.scale,
                fix="a smaller scale, or 0 for a dynamic one; " + _ADVICE,
            )

    def state_dict(self) -> dict[str, Any]:
        """``{scale, skipped, in_a_row}``."""
        return {"scale": self.scale, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counters up again; the scale stays what the config says."""
        self.skipped = state["skipped"]
        self._in_a_row = state["in_a_row"]


class DynamicLossScale:
    """DeepSpeed's rules: halve on overflow, double after a spell without.

    * The scale starts at ``2**initial_power``.
    * On overflow, one unit of hysteresis is used up; when a single unit is left, the scale is halved instead, on each
      overflow, though never below ``min_scale``.
    * Good steps are counted from the last overflow. The first one only ends the overflow; then each ``window`` of them
      doubles the scale.
    * Hysteresis is refilled when the scale doubles, or with ``consecutive_hysteresis`` by any good step.
    * An overflow when the scale should be halved but is at its minimum is an error. So if every step overflows,
      training stops after ``log2(start / min_scale) + hysteresis`` steps (rounded up).
    """

    def __init__(self, spec: LossScaleSpec) -> None:
        self._spec = spec
        self.scale = 2.0**spec.initial_power
        if self.scale < spec.min_scale:
            raise UserError(
                f"the scale starts at 2^{spec.initial_power} = {self.scale:g}, below {spec.min_scale:g}, its minimum.",
                key="fp16.initial_scale_power",
                value=spec.initial_power,
                fix=f"{math.ceil(math.log2(spec.min_scale))} or more",
            )
        self.skipped = 0
        self._hysteresis = spec.hysteresis
        self._good = 0

    def update(self, overflow: bool) -> None:
        """Apply the rules after a step. Raises UserError on an overflow that no smaller scale can cure."""
        if overflow:
            self.skipped += 1
            self._good = 0
            if self._hysteresis > 1:
                self._hysteresis -= 1
            else:
                self._shrink()
            return
        if self._spec.consecutive_hysteresis:
            self._hysteresis = self._spec.hysteresis
        settled, self._good = self._good, self._good + 1
        if settled > 0 and settled % self._spec.window == 0:
            self._hysteresis = self._spec.hysteresis
            self.scale *= _FACTOR

    def _shrink(self) -> None:
        if self.scale <= self._spec.min_scale:
            raise UserError(
                f"gradients still overflow at the smallest loss scale ({self.scale:g}) after {self.skipped} skipped "
                "steps, so the scale is not to blame.",
                key="fp16.min_loss_scale",
                value=self._spec.min_scale,
                fix=_ADVICE,
            )
        self.scale = max(self.scale / _FACTOR, self._spec.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """``{scale, skipped, hysteresis, good}``: the same on every rank, so one copy is enough."""
        return {"scale": self.scale, "skipped": self.skipped, "hysteresis": self._hysteresis, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; window, minimum and hysteresis stay what the config says."""
        self.scale = state["scale"]
        self.skipped = state["skipped"]
        self._hysteresis = state["hysteresis"]
        self._good = state["good"]
