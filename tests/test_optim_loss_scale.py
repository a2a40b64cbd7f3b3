"""Loss scaling for fp16: the sequence of scales, the end of the road, and going on from a checkpoint."""

from __future__ import annotations

import random

import pytest
import torch

from hybridlab.config.specs import LossScaleSpec, OptimizerSpec, SchedulerSpec
from hybridlab.errors import UserError
from hybridlab.optim import (
    DynamicLossScale,
    StaticLossScale,
    allocate_state,
    learning_rate,
    make_loss_scale,
    make_optimizer,
)
from hybridlab.optim.loss_scale import STATIC_PATIENCE


def scales(spec: LossScaleSpec, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is a step that overflowed."""
    scaler, seen = DynamicLossScale(spec), []
    for mark in overflows:
        scaler.update(mark == "x")
        seen.append(scaler.scale)
    return seen


def restated(spec: LossScaleSpec, history: list[bool]) -> float | None:
    """The scale after ``history``, found from the whole history at once; None when training would have stopped."""
    power: float = 2.0**spec.initial_power
    units = spec.hysteresis
    last = -1
    for now, overflow in enumerate(history):
        if overflow:
            last = now
            if units > 1:
                units -= 1
            elif power == spec.min_scale:
                return None
            else:
                power = max(power / 2, spec.min_scale)
            continue
        doubled = (now - last - 1) % spec.window == 0 and now - last > 1
        if doubled:
            power *= 2
        if doubled or spec.consecutive_hysteresis:
            units = spec.hysteresis
    return power


def test_halving_waits_for_the_hysteresis() -> None:
    assert scales(LossScaleSpec(initial_power=4, hysteresis=1), "xx") == [8, 4]
    assert scales(LossScaleSpec(initial_power=4, hysteresis=3), "xxxx") == [16, 16, 8, 4]


def test_used_hysteresis_stays_used_until_the_scale_grows() -> None:
    spec = LossScaleSpec(initial_power=4, hysteresis=2, window=3)
    assert scales(spec, "x..x") == [16, 16, 16, 8]
    # one good step ends the overflow, three more double the scale and refill the hysteresis
    assert scales(spec, "x....x.x") == [16, 16, 16, 16, 32, 32, 32, 16]


def test_consecutive_hysteresis_is_refilled_by_any_good_step() -> None:
    spec = LossScaleSpec(initial_power=4, hysteresis=2, window=100, consecutive_hysteresis=True)
    assert scales(spec, "x.x.x.") == [16] * 6
    assert scales(spec, "x.xx") == [16, 16, 16, 8]


def test_growth_once_a_window() -> None:
    spec = LossScaleSpec(initial_power=0, window=2)
    assert scales(spec, "." * 8) == [1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize("seed", range(30))
def test_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    spec = LossScaleSpec(
        initial_power=rng.randint(2, 8),
        window=rng.randint(1, 5),
        hysteresis=rng.randint(1, 4),
        min_scale=rng.choice([0.25, 1.0, 3.0, 4.0]),
        consecutive_hysteresis=rng.random() < 0.5,
    )
    share = rng.choice([0.1, 0.4, 0.8])
    scaler = DynamicLossScale(spec)
    history: list[bool] = []
    for _ in range(60):
        history.append(rng.random() < share)
        expected = restated(spec, history)
        if expected is None:
            with pytest.raises(UserError):
                scaler.update(True)
            return
        scaler.update(history[-1])
        assert scaler.scale == expected, history
    assert scaler.skipped == sum(history)


# -- reports.md 107 (DeepSpeed#697): overflow at the minimum ends training, with advice --------------------------------
@pytest.mark.parametrize(("hysteresis", "bound"), [(1, 5), (2, 6), (4, 8)])
def test_endless_overflow_ends_with_advice_and_unchanged_weights(hysteresis: int, bound: int) -> None:
    scaler = DynamicLossScale(LossScaleSpec(initial_power=4, hysteresis=hysteresis, min_scale=1.0))
    weights = torch.arange(5.0)
    optimizer = make_optimizer(OptimizerSpec("AdamW", lr=0.1, weight_decay=0.1), [weights])
    allocate_state(optimizer)
    steps = 0

    def train() -> None:
        nonlocal steps
        while True:
            steps += 1
            weights.grad = torch.full((5,), float("inf"))
            overflow = not bool(torch.isfinite(weights.grad).all())
            scaler.update(overflow)
            if not overflow:
                optimizer.step()

    with pytest.raises(UserError) as caught:
        train()
    assert steps == bound
    assert scaler.scale == 1.0
    assert torch.equal(weights, torch.arange(5.0))
    told = str(caught.value)
    assert "bf16" in told and "NaN" in told and "learning rate" in told and f"{bound} skipped" in told
    assert caught.value.key == "fp16.min_loss_scale"


def test_a_fixed_scale_does_not_skip_for_ever() -> None:
    scaler = StaticLossScale(128.0)
    for _ in range(STATIC_PATIENCE - 1):
        scaler.update(True)
    scaler.update(False)
    for _ in range(STATIC_PATIENCE - 1):
        scaler.update(True)
    assert scaler.scale == 128.0
    with pytest.raises(UserError, match=r"fp16\.loss_scale: .*128.*bf16"):
        scaler.update(True)


def test_without_a_scale_endless_nan_ends_too_and_is_not_blamed_on_fp16() -> None:
    scaler = StaticLossScale()
    for _ in range(STATIC_PATIENCE - 1):
        scaler.update(True)
    with pytest.raises(UserError, match=r"^gradients were inf or NaN in 100 steps.*learning rate") as caught:
        scaler.update(True)
    assert "fp16" not in str(caught.value) and "bf16" not in str(caught.value)


# -- reports.md 109 (DeepSpeed#931): skipped steps are counted and the schedule does not advance -----------------------
def test_a_skipped_step_leaves_the_schedule_where_it_was() -> None:
    spec = SchedulerSpec("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 10})
    scaler = DynamicLossScale(LossScaleSpec(initial_power=16, hysteresis=2))
    updates, used = 0, []
    for overflow in (True, False, True, True, False, False, False):
        scaler.update(overflow)
        if not overflow:
            used.append(learning_rate(spec, 1e-3, updates))
            updates += 1
    assert scaler.skipped == 3
    assert used == [learning_rate(spec, 1e-3, step) for step in range(4)]
    assert scaler.scale == 2.0**14


@pytest.mark.parametrize("static", [None, 64.0])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_checkpoint_continues_the_sequence(static: float | None, cut: int) -> None:
    spec = LossScaleSpec(static=static, initial_power=8, window=3, hysteresis=2)
    history = [mark == "x" for mark in "x..x.....xx....x...x"]
    straight, first, second = make_loss_scale(spec), make_loss_scale(spec), make_loss_scale(spec)
    for overflow in history[:cut]:
        straight.update(overflow)
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in history[cut:]:
        straight.update(overflow)
        second.update(overflow)
        assert second.scale == straight.scale
    assert second.state_dict() == straight.state_dict()


def test_the_spec_chooses() -> None:
    assert isinstance(make_loss_scale(LossScaleSpec(static=None)), DynamicLossScale)
    assert make_loss_scale(LossScaleSpec(static=32.0)).scale == 32.0
    assert make_loss_scale(LossScaleSpec()).scale == 65536.0


def test_scales_that_make_no_sense() -> None:
    with pytest.raises(UserError, match=r"fp16\.loss_scale: .*-1"):
        StaticLossScale(-1.0)
    with pytest.raises(UserError, match=r"initial_scale_power: .*2\^3.*16, its minimum.*4 or more"):
        DynamicLossScale(LossScaleSpec(initial_power=3, min_scale=16.0))
