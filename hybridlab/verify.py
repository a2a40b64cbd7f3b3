"""Is a layout the same program as one rank? Train both and compare the numbers.

The layout runs on ranks; the reference (`hybridlab.models.reference`) is a plain loop in this process, which shares the
model, its first values and the data, and none of what is judged. Both in float64, so that a difference larger than
rounding is a mistake: a sum over the wrong group, a divisor too many, a shard that was not updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridlab import launch
from hybridlab.config import Resolved
from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine, StepResult
from hybridlab.launch import Cluster
from hybridlab.logical import Part, assemble, parts
from hybridlab.models.reference import Reference
from hybridlab.optim import learning_rate
from hybridlab.shapes import ModelShape

TOLERANCE = 1e-9
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trained:
    """Some steps of training, as logical numbers.

    Attributes:
        steps: of each step ``(loss, gradient norm before clipping)``.
        gradients: the last step's, after clipping, by parameter name.
        weights: master weights after the last step, by parameter name.
    """

    steps: tuple[tuple[float, float], ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """The largest relative differences between a layout and one rank.

    A tensor's difference is the largest absolute one over the largest absolute value; the worst parameter counts.
    """

    layout: str
    loss: float
    grad_norm: float
    gradients: float
    weights: float
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return max(self.loss, self.grad_norm, self.gradients, self.weights) <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """``{layout, max_rel_diff {loss, grad_norm, gradients, weights}, tolerance, passed}``."""
        found = {"loss": self.loss, "grad_norm": self.grad_norm, "gradients": self.gradients, "weights": self.weights}
        return {
            "layout": self.layout,
            "max_rel_diff": found,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class RankRun:
    """What a rank brings back."""

    results: list[StepResult]
    gradients: list[Part]
    masters: list[Part]
    weights: list[Part]


def batches_for(config: Resolved, shape: ModelShape, data: str | None = None, *, uneven: bool = False) -> Batches:
    """The batches that a config trains on."""
    return Batches(
        load_corpus(data),
        seed=config.seed,
        sequence_length=config.sequence_length,
        train_batch_size=config.train_batch_size,
        vocab=shape.vocab,
        uneven=uneven,
    )


def train_rank(config: Resolved, shape: ModelShape, steps: int, data: str | None, uneven: bool) -> RankRun:
    """The worker: train and bring back this rank's parts of gradients and weights."""
    engine = Engine(config, shape, device_type=launch.device().type)
    try:
        batches = batches_for(config, shape, data, uneven=uneven)
        results = [engine.train_batch(batches) for _ in range(steps)]
        tp = engine.mesh.tp.rank
        return RankRun(
            results,
            parts(engine.shards, "gradient", tp),
            parts(engine.shards, "master", tp),
            parts(engine.shards, "weights", tp),
        )
    finally:
        engine.close()


def collect(runs: Sequence[RankRun]) -> Trained:
    """Put the ranks' parts together.

    Raises:
        Incomplete: an element is held by nobody, or its copies differ.
        AssertionError: ranks disagree on loss or norm.
    """
    reported = {tuple((r.loss, r.grad_norm) for r in run.results) for run in runs}
    assert len(reported) == 1, f"ranks report different losses or norms: {sorted(reported)}"
    assemble(part for run in runs for part in run.weights)  # copies of the computing weights must agree, too
    return Trained(
        reported.pop(),
        assemble(part for run in runs for part in run.gradients),
        assemble(part for run in runs for part in run.masters),
    )


def train_reference(
    config: Resolved, shape: ModelShape, steps: int, data: str | None = None, *, uneven: bool = False
) -> Trained:
    """The same steps on one rank, by the plain loop."""
    spec = config.optimizer
    arguments: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.type == "SGD":
        arguments |= {"momentum": spec.momentum, "nesterov": spec.nesterov}
    else:
        arguments |= {"betas": spec.betas, "eps": spec.eps}
    reference = Reference(
        shape,
        seed=config.seed,
        dtype=DTYPES[config.precision],
        optimizer=(spec.type, arguments),
        clip=config.gradient_clipping,
        label_smoothing=config.label_smoothing,
        micro_batch_size=config.micro_batch_size,
        attention=config.attention,
    )
    batches = batches_for(config, shape, data, uneven=uneven)
    done = []
    step = None
    for number in range(steps):
        step = reference.step(*batches.batch(number), lr=learning_rate(config.scheduler, spec.lr, number))
        done.append((step.loss, step.grad_norm))
    assert step is not None
    clipped = {name: gradient * step.clip_coefficient for name, gradient in step.grads.items()}
    return Trained(tuple(done), clipped, reference.weights())


def difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference over the largest absolute value of ``b``; 0 when both are all zeros."""
    gap, size = float((a.double() - b.double()).abs().max()), float(b.double().abs().max())
    if gap == 0.0:
        return 0.0
    return gap / size if size else float("inf")


def compare(layout: str, trained: Trained, reference: Trained, tolerance: float = TOLERANCE) -> Verdict:
    """The verdict on two runs of the same job.

    Raises:
        AssertionError: they are not of the same parameters.
    """
    assert trained.weights.keys() == reference.weights.keys(), "not the same parameters"
    losses, norms = (max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(trained.steps, reference.steps)) for i in (0, 1))
    return Verdict(
        layout,
        losses,
        norms,
        max(difference(trained.gradients[name], b) for name, b in reference.gradients.items()),
        max(difference(trained.weights[name], b) for name, b in reference.weights.items()),
        tolerance,
    )


def verify(
    config: Resolved,
    shape: ModelShape,
    *,
    steps: int = 3,
    data: str | None = None,
    uneven: bool = True,
    cluster: Cluster | None = None,
) -> Verdict:
    """Train ``steps`` steps at the config's layout and on one rank, in float64, and compare.

    Args:
        uneven: mask a different number of targets in each sample, so that a mean of means shows.
        cluster: ranks to use; new ones by default.
    """
    config = replace(config, precision="fp64")
    world = config.layout.world
    if cluster is not None:
        runs = cluster.run(train_rank, config, shape, steps, data, uneven)
    else:
        with Cluster(world, output="quiet") as own:
            runs = own.run(train_rank, config, shape, steps, data, uneven)
    return compare(str(config.layout), collect(runs), train_reference(config, shape, steps, data, uneven=uneven))
