"""bf16 and fp16: a layout's loss curve stays within rounding of one rank's in the same precision; masters are fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridlab.config import LossScaleSpec, OptimizerSpec, Resolved, SchedulerSpec
from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine, StepResult
from hybridlab.launch import current
from hybridlab.optim import learning_rate
from tests.support import job, shape_of

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4 ZeRO-2": {"dp": 4, "m": 2, "micro": 2, "zero": 2},
    "dp2 ZeRO-3": {"dp": 2, "m": 4, "micro": 2, "zero": 3},
    "tp2 with sequence parallelism": {"tp": 2, "m": 8, "micro": 2, "sequence_parallel": True},
    "pp2 zero bubble": {"pp": 2, "m": 8, "micro": 2, "schedule": "zb-h1"},
    "dp2 tp2 pp2 ZeRO-2 offloaded": {"dp": 2, "tp": 2, "pp": 2, "m": 4, "micro": 2, "zero": 2, "offload": True},
}


def train(config: Resolved, family: str) -> tuple[list[StepResult], set[torch.dtype], set[torch.dtype]]:
    """On a rank: the steps, and the dtypes of the master weights and of the computing weights."""
    shape = shape_of(family)
    engine = Engine(config, shape)
    batches = Batches(
        load_corpus(None), 7, config.sequence_length, config.train_batch_size, vocab=shape.vocab, uneven=True
    )
    steps = [engine.train_batch(batches) for _ in range(STEPS)]
    masters = {shard.master.dtype for shard in engine.shards}
    weights = {p.dtype for chunk in engine.chunks for p in chunk.parameters()}
    engine.close()
    return steps, masters, weights


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_that_of_one_rank(layout: str, precision: str, ranks: Any) -> None:
    # A learning rate at which training is calm: on a steep slope a rounding grows with every step, at any layout.
    changes = {
        "precision": precision,
        "loss_scale": LossScaleSpec(initial_power=12),
        "optimizer": OptimizerSpec(lr=1e-3),
    }
    config = job(**LAYOUTS[layout], **changes)
    alone = job(m=8, micro=2, **changes)
    assert alone.train_batch_size == config.train_batch_size == 16
    (reference, _, _), *_ = ranks(1).run(train, alone, "llama")
    found = ranks(config.layout.world).run(train, config, "llama")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    step = 2.0**-8 if precision == "bf16" else 2.0**-11  # half a unit in the last place, relative
    for steps, masters, weights in found:
        assert masters == {torch.float32}
        assert weights == {dtype}
        for ours, theirs in zip(steps, reference):
            assert ours.skipped == theirs.skipped
            assert ours.loss_scale == theirs.loss_scale
            assert ours.tokens == theirs.tokens
            assert abs(ours.loss - theirs.loss) <= 2 * step * theirs.loss
        # From the second step on weights differ by roundings, which Adam divides by their own size.
        assert abs(steps[0].grad_norm - reference[0].grad_norm) <= 2 * step * reference[0].grad_norm
    assert reference[-1].loss < reference[0].loss


def test_fp32_masters_are_needed() -> None:
    """What the fp32 master is for: an update smaller than bf16's spacing would be lost without it."""
    weight = torch.ones(1, dtype=torch.bfloat16)
    assert weight + 1e-3 == weight
    assert torch.ones(1) + 1e-3 != torch.ones(1)


def train_with_an_infinity(config: Resolved, rank: int, at: int) -> list[tuple[bool, float, float, bool]]:
    """On a rank: of each step (skipped, loss scale, lr, whether a weight of this rank changed). In step ``at``, the
    gradient of one parameter overflows on one rank, before any reduction."""
    here = current()
    assert here is not None
    shape = shape_of("llama")
    engine = Engine(config, shape)
    if here.rank == rank:
        last = list(engine.chunks[-1].parameters())[-1]
        last.register_hook(lambda g: g * float("inf") if engine.step_number == at else g)
    batches = Batches(load_corpus(None), 7, config.sequence_length, config.train_batch_size, vocab=shape.vocab)
    told = []
    for _ in range(4):
        before = [shard.master.clone() for shard in engine.shards]
        step = engine.train_batch(batches)
        moved = any(not torch.equal(a, shard.master) for a, shard in zip(before, engine.shards))
        told.append((step.skipped, step.loss_scale, step.lr, moved))
    engine.close()
    return told


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_an_infinity_on_one_rank_is_skipped_by_all(rank: int, ranks: Any) -> None:
    """DeepSpeed#931, #1593: all ranks skip, no weight moves, the scale halves and the learning rate waits; the same at
    every ZeRO stage."""
    sequences = set()
    for zero in (0, 1, 2, 3):
        config = job(
            *(2, 2, 2),
            m=2,
            zero=zero,
            precision="fp16",
            loss_scale=LossScaleSpec(initial_power=8, hysteresis=1),
            scheduler=SchedulerSpec(
                "WarmupLR",
                {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
            ),
        )
        for told in ranks(8).run(train_with_an_infinity, config, rank, 1):
            sequences.add(tuple(told))
    (told,) = sequences
    skipped, scales, rates, moved = zip(*told)
    assert skipped == (False, True, False, False)
    assert scales == (256.0, 256.0, 128.0, 128.0)
    assert moved == (True, False, True, True)
    assert rates == tuple(learning_rate(config.scheduler, config.optimizer.lr, updates) for updates in (0, 1, 1, 2))
    assert rates[2] < rates[3]
