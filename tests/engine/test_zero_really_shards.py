"""ZeRO really shards: bytes alive per category and messages sent, read from every rank's ledger, against the paper's
table (arXiv:1910.02054, Figure 1). A stage whose optimizer is not sharded is found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine
from hybridlab.launch import Cluster
from hybridlab.parallel.zero.stage1 import Stage1
from tests.support import job, shape_of

ITEM = 8  # bytes of a float64
UNIT = 256 * 32  # the largest piece, an embedding
PADDING = 0.02  # buckets are padded to a multiple of the group


@dataclass(frozen=True)
class Seen:
    """A rank's ledger after two steps.

    Attributes:
        elements: of the whole model.
        optimizer, weights, gradients: elements alive between steps.
        accumulating: most elements of gradients alive at the end of an action.
        borrowed: most elements of gathered weights and of gradients on their way, at the peak.
        ring: elements sent in the dp group in one step, on a ring, without the three numbers that are agreed.
    """

    elements: int
    optimizer: float
    weights: float
    gradients: float
    accumulating: float
    borrowed: float
    ring: float


def look(config: Any, replicated: bool = False) -> Seen:
    """On a rank. ``replicated``: sabotage, the optimizer updates whole buckets on every rank."""
    shape = shape_of("llama")
    if replicated:
        sabotage()
    engine = Engine(config, shape)
    batches = Batches(load_corpus(None), 7, config.sequence_length, config.train_batch_size, vocab=shape.vocab)
    engine.train_batch(batches)
    with engine.ledger.watch_memory() as watch:
        engine.train_batch(batches)
    owned = {name: engine.ledger.bytes_owned(name) / ITEM for name in ("optimizer", "weights", "gradients")}
    large = [m for m in engine.ledger.messages if m.group == "dp" and m.message_bytes > 64]
    seen = Seen(
        engine.parameters,
        **owned,
        accumulating=max(sample["gradients"] for _, sample in watch.samples) / ITEM,
        borrowed=watch.at_peak["buffers"] / ITEM,
        ring=sum(m.ring_bytes for m in large) / ITEM,
    )
    engine.close()
    return seen


def sabotage() -> None:
    """ZeRO-1 that lets every rank update everything, as if it were plain data parallelism."""
    from hybridlab.parallel.data import DataParallel

    Stage1.materialize = DataParallel.materialize  # type: ignore[method-assign,assignment]


def check(zero: int, policy: str, d: int, m: int, seen: Seen) -> None:
    """The table, for one rank."""
    n = seen.elements
    share = {False: 1.0, True: 1 / d}
    assert seen.optimizer == pytest.approx(2 * n * share[zero >= 1], rel=PADDING)  # Adam's two moments
    whole = zero < 2 or (zero == 2 and policy == "accumulate_then_scatter")
    assert seen.gradients == pytest.approx(n * share[zero >= 2], rel=PADDING)
    accumulating = n * (1 / d if zero >= 2 else 0) + (n if whole else 0)  # whole ones beside the shard, or the shard
    assert seen.accumulating == pytest.approx(accumulating, rel=PADDING)
    assert seen.weights == pytest.approx(n * share[zero == 3], rel=PADDING)
    if zero == 3:  # one unit in use and one ahead, their gradients behind them
        assert seen.borrowed <= 4 * UNIT * (1 + PADDING)
    elif zero == 0:
        assert seen.borrowed == 0
    ring = (d - 1) / d
    scatters = m if zero == 2 and policy == "scatter_every_microbatch" else 1
    if zero == 0:
        assert seen.ring == pytest.approx(2 * n * ring, rel=PADDING)
    elif zero < 3:
        assert seen.ring == pytest.approx((scatters + 1) * n * ring, rel=PADDING)
    else:  # for each micro-batch a gather in forward, one in backward, a scatter; what stays gathered is not sent again
        assert n * ring < seen.ring <= 3 * m * n * ring * (1 + PADDING)


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(
    ("zero", "policy"),
    [(0, ""), (1, ""), (2, "accumulate_then_scatter"), (2, "scatter_every_microbatch"), (3, "")],
)
def test_every_stage(zero: int, policy: str, m: int, d: int, ranks: Any) -> None:
    for seen in ranks(d).run(look, job(dp=d, m=m, zero=zero, policy=policy)):
        check(zero, policy, d, m, seen)


def test_a_replicated_optimizer_is_found_out(ranks: Any) -> None:
    with Cluster(2, backend="gloo", output="quiet") as spoilt:  # its ranks keep the sabotage to themselves
        found = spoilt.run(look, job(dp=2, zero=1), True)
    for seen in found:
        with pytest.raises(AssertionError):
            check(1, "", 2, 2, seen)
