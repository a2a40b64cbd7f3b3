"""A rank of a real training run raises, is killed or gets stuck, at a random place: it is named with its coordinates,
and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine
from hybridlab.launch import Cluster, RankError, current
from tests.launch.support import alive, eventually
from tests.support import job, shape_of

LAYOUT = job(2, 1, 2, m=4, zero=2, schedule="1f1b")
STEPS = 3
WHAT = ("raise", "kill", "stuck")
PLACES = ("F", "B", "reduce", "step")


class Planted(Exception):
    """The fault that was planted."""


def train_until(rank: int, what: str, step: int, place: str, nth: int) -> None:
    """Train; on one rank something happens as the ``nth`` action of a kind begins in a step."""
    here = current()
    assert here is not None
    shape = shape_of("llama")
    engine = Engine(LAYOUT, shape)
    batches = Batches(load_corpus(None), 7, LAYOUT.sequence_length, LAYOUT.train_batch_size, vocab=shape.vocab)
    if here.rank == rank:
        plant(engine, what, step, place, nth)
    for _ in range(STEPS):
        engine.train_batch(batches)
    engine.close()


def plant(engine: Engine, what: str, step: int, place: str, nth: int) -> None:
    """Make the ledger's action do it: every F, B, reduction and update passes through there."""
    original, seen = engine.ledger.action, [0]

    def action(op: str, *args: Any) -> Any:
        if engine.step_number == step and op == place:
            seen[0] += 1
            if seen[0] == nth:
                if what == "raise":
                    raise Planted(f"{op} {nth} of step {step}")
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3600)
        return original(op, *args)

    engine.ledger.action = action  # type: ignore[method-assign]


def faults() -> list[tuple[str, int, int, str, int]]:
    rng = random.Random(5)
    found = []
    for what in WHAT:
        for place in PLACES if what != "stuck" else PLACES[:2]:  # being stuck costs the timeout
            nth = rng.randint(1, 4) if place in "FB" else 1
            found.append((what, rng.randrange(4), rng.randrange(STEPS), place, nth))
    return found


@pytest.mark.parametrize(("what", "rank", "step", "place", "nth"), faults())
def test_a_fault_in_training_names_its_rank_and_leaves_nothing(
    what: str, rank: int, step: int, place: str, nth: int
) -> None:
    coords = {"pp": rank // 2, "dp": rank % 2, "tp": 0}
    with Cluster(4, backend="gloo", output="quiet", timeout=4 if what == "stuck" else 60) as cluster:
        cluster.start()
        pids = cluster.pids
        with pytest.raises(RankError) as caught:
            cluster.run(train_until, rank, what, step, place, nth)
        error = caught.value
        assert error.rank == rank
        assert error.coords == coords
        assert f"rank {rank} (pp {coords['pp']}, dp {coords['dp']}, tp 0)" in str(error)
        if what == "raise":
            assert f"Planted: {place} {nth} of step {step}" in str(error)
        if what == "kill":
            assert "SIGKILL" in str(error)
        assert eventually(lambda: not any(map(alive, pids)), 10)
