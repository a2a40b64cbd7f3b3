"""Our engine beside torch's own parallelism: same weights, same data, float32, 3 steps, 1e-5 relative.

DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2, DTensor's tensor parallelism, torch.distributed.pipelining.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridlab.config import OptimizerSpec, Resolved
from hybridlab.shapes import ModelShape
from hybridlab.verify import collect, train_rank
from tests.peers import training
from tests.support import job, shape_of

TOLERANCE = 1e-5
# An eps well above a gradient's rounding: Adam divides by the gradient's own size, and an element whose gradient is all
# rounding would get a full step in a random direction, here and there alike.
OPTIMIZER = OptimizerSpec(lr=1e-3, eps=1e-4, weight_decay=0.01)

pytestmark = pytest.mark.peer


def settled(**changes: Any) -> Resolved:
    return job(**changes, precision="fp32", gradient_clipping=0.0, optimizer=OPTIMIZER)


def compare(config: Resolved, shape: ModelShape, ranks: Any, peer: Any, *arguments: Any) -> None:
    """Train on both sides; each loss and each parameter within the tolerance."""
    cluster = ranks(config.layout.world)
    ours = collect(cluster.run(train_rank, config, shape, training.STEPS, None, False))
    theirs = cluster.run(peer, config, shape, *arguments)
    weights = {name: tensor for _, found in theirs for name, tensor in found.items()}
    assert weights.keys() == ours.weights.keys()
    for losses, _ in theirs:
        assert losses == pytest.approx([loss for loss, _ in ours.steps], rel=TOLERANCE)
    for name, tensor in weights.items():
        gap = (ours.weights[name] - tensor).abs().max() / tensor.abs().max()
        assert float(gap) <= TOLERANCE, name
    assert ours.steps[-1][0] != ours.steps[0][0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("zero", "how"),
    [
        (0, "ddp"),
        (1, "ddp, zero-redundancy"),
        (2, "fsdp, keeping"),
        (3, "fsdp, resharding"),
    ],
)
def test_data_parallel(zero: int, how: str, family: str, ranks: Any) -> None:
    compare(settled(dp=2, m=2, zero=zero), shape_of(family), ranks, training.data_parallel, how)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tensor_parallel(family: str, ranks: Any) -> None:
    compare(settled(tp=2), shape_of(family), ranks, training.tensor_parallel)


@pytest.mark.parametrize(
    ("schedule", "how"),
    [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B"), ("interleaved-1f1b", "ScheduleInterleaved1F1B")],
)
def test_pipeline(schedule: str, how: str, ranks: Any) -> None:
    compare(settled(pp=2, m=4, schedule=schedule), shape_of("llama"), ranks, training.pipelined, how)


def test_the_comparison_can_fail(ranks: Any) -> None:
    """Another learning rate on one side is far beyond the tolerance."""
    config = settled(dp=2)
    shape = shape_of("llama")
    ours = collect(ranks(2).run(train_rank, config, shape, training.STEPS, None, False))
    other = replace(config, optimizer=replace(OPTIMIZER, lr=2e-3))
    theirs = collect(ranks(2).run(train_rank, other, shape, training.STEPS, None, False))
    gaps = [(ours.weights[n] - t).abs().max() / t.abs().max() for n, t in theirs.weights.items()]
    assert float(torch.stack(gaps).max()) > 10 * TOLERANCE
