"""Learning-rate schedules against the formulas restated, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridlab.config.specs import SchedulerSpec
from hybridlab.errors import UserError
from hybridlab.optim import learning_rate


class Restated:
    """DeepSpeed's behaviour told the other way round: an object that is advanced after each update."""

    def __init__(self, kind: str, base_lr: float, **params: Any) -> None:
        self.kind, self.base, self.params = kind, base_lr, params
        self.warmup = max(2, params.get("warmup_num_steps", 1000))
        self.i = -1  # the scheduler has not been advanced yet

    @property
    def rate(self) -> float:
        p, i, cosine = self.params, self.i, self.kind == "WarmupCosineLR"
        top = self.base if cosine else p.get("warmup_max_lr", self.base if self.kind == "WarmupLR" else 0.001)
        bottom = self.base * p.get("warmup_min_ratio", 0.0) if cosine else p.get("warmup_min_lr", 0.0)
        if i < 0:
            return 0.0 if cosine else bottom
        if i < self.warmup:
            linear = p.get("warmup_type", "log") == "linear"
            return bottom + (top - bottom) * (i / self.warmup if linear else math.log(1 + i, self.warmup))
        if self.kind == "WarmupLR":
            return top
        left = p["total_num_steps"] - self.warmup
        if cosine:
            floor = self.base * p.get("cos_min_ratio", 1e-4)
            angle = math.pi if left <= 0 else min(math.pi, math.pi * (i + 1 - self.warmup) / left)
            return floor + (top - floor) * math.cos(angle / 2) ** 2
        return bottom + (top - bottom) * max(0.0, (p["total_num_steps"] - i) / max(1, left))

    def advance(self) -> None:
        self.i += 1


CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 7, "warmup_type": "log"}),
    ("WarmupLR", {"warmup_num_steps": 1}),  # taken as 2: the logarithm of 1 divides by zero
    ("WarmupLR", {}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_max_lr": 0.02, "warmup_min_lr": 1e-4, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 25, "warmup_num_steps": 4, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 9}),  # shorter than its own warm-up
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 6, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 8, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 9}),
]


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_every_step_of_a_schedule(kind: str, params: dict[str, Any]) -> None:
    restated = Restated(kind, 0.05, **params)
    for step in range(45):
        assert learning_rate(SchedulerSpec(kind, params), 0.05, step) == pytest.approx(
            restated.rate, rel=1e-12, abs=1e-18
        ), step
        restated.advance()


def rates(kind: str, steps: int, base_lr: float = 1.0, **params: Any) -> list[float]:
    return [learning_rate(SchedulerSpec(kind, params), base_lr, step) for step in range(steps)]


def test_linear_warm_up_in_numbers() -> None:
    """WarmupLR from 0 to 1e-3 in 4 steps: the first two updates at the minimum, the target from the sixth on."""
    got = rates("WarmupLR", 8, warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps=4, warmup_type="linear")
    assert got == pytest.approx([0, 0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3], rel=1e-12)


def test_logarithmic_warm_up_in_numbers() -> None:
    """Of 8 steps: ln 2, ln 4 and ln 8 are a third, two thirds and the whole of ln 8."""
    got = rates("WarmupLR", 10, warmup_max_lr=3.0, warmup_num_steps=8)
    assert [got[k] for k in (0, 1, 2, 4, 8, 9)] == pytest.approx([0, 0, 1, 2, 3, 3], rel=1e-12)


def test_decay_ends_at_the_minimum_and_stays() -> None:
    got = rates("WarmupDecayLR", 16, warmup_max_lr=1.0, warmup_min_lr=0.2, warmup_num_steps=2, total_num_steps=10)
    assert got[3] == pytest.approx(1.0)  # i = 2: nothing has decayed yet
    assert got[7] == pytest.approx(0.2 + 0.8 * 4 / 8)
    assert got[11:] == pytest.approx([0.2] * 5)


def test_cosine_passes_the_middle_and_ends_at_its_floor() -> None:
    got = rates("WarmupCosineLR", 30, 2.0, warmup_num_steps=4, total_num_steps=12, cos_min_ratio=0.1)
    assert got[8] == pytest.approx(2.0 * 0.55)  # i = 7, p = 4/8
    assert got[12:] == pytest.approx([0.2] * 18)  # does not swing back up


def test_cosine_starts_at_zero_even_with_a_ratio() -> None:
    got = rates("WarmupCosineLR", 2, 2.0, warmup_num_steps=4, total_num_steps=12, warmup_min_ratio=0.25)
    assert got == [0.0, 0.5]


def test_warmup_lr_aims_at_the_optimizers_rate_and_warmup_decay_lr_does_not() -> None:
    assert rates("WarmupLR", 20, 0.07, warmup_num_steps=5)[-1] == 0.07
    assert max(rates("WarmupDecayLR", 20, 0.07, warmup_num_steps=5, total_num_steps=20)) == pytest.approx(0.001)


def test_no_schedule_is_constant() -> None:
    assert [learning_rate(None, 3e-4, step) for step in (0, 1, 10**6)] == [3e-4] * 3


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("OneCycle", {}, r"scheduler\.type: 'OneCycle'.*WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ("WarmupLR", {"warmup_steps": 3}, r"warmup_steps: WarmupLR takes no parameter.*warmup_num_steps"),
        ("WarmupLR", {"total_num_steps": 30}, r"total_num_steps: WarmupLR takes no"),
        ("WarmupDecayLR", {"warmup_num_steps": 3}, r"total_num_steps: WarmupDecayLR needs it"),
        ("WarmupCosineLR", {}, r"total_num_steps: WarmupCosineLR needs it"),
        ("WarmupLR", {"warmup_num_steps": 0}, r"warmup_num_steps: 0 is no number of steps.*1 or more"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, r"2\.5 is no number of steps"),
        ("WarmupLR", {"warmup_num_steps": True}, r"True is no number of steps"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, r"warmup_max_lr: 'auto' is no number"),
        ("WarmupLR", {"warmup_min_lr": [0.0, 0.1]}, r"warmup_min_lr: \[0\.0, 0\.1\] is no number"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"warmup_type: 'cubic'.*log or linear"),
    ],
)
def test_what_a_schedule_refuses(kind: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        learning_rate(SchedulerSpec(kind, params), 0.1, 0)


def test_a_negative_step_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="-1"):
        learning_rate(None, 0.1, -1)


# -- reports.md 128, 129, 130: one step of the schedule an update, whatever the layout ---------------------------------
def test_the_rate_depends_on_the_update_number_only() -> None:
    """Neither ranks nor micro-batches enter (accelerate#1382, #963): resuming anywhere gives the rest of the list."""
    spec = SchedulerSpec("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10})
    straight = [learning_rate(spec, 5e-4, step) for step in range(20)]
    for resumed_at in (1, 9, 13):
        assert [learning_rate(spec, 5e-4, step) for step in range(resumed_at, 20)] == straight[resumed_at:]
    assert straight[11:] == [1e-3] * 9
    assert straight[10] == pytest.approx(1e-3)  # ln 10 / ln 10: warm-up takes its ten steps, not ten over the ranks
    assert straight[9] < 1e-3
