"""A learner's own model, cut by a learner's own plan: nothing in the engine knows our decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridlab.config import Resolved
from hybridlab.cuts import Column, Row, Vocab
from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine
from hybridlab.errors import UserError
from hybridlab.logical import assemble, parts
from hybridlab.models import initialise_model
from tests.support import job, shape_of

SHAPE = shape_of("llama")
STEPS = 3
PLAN = {f"blocks.{i}.{name}": cut for i in range(4) for name, cut in (("wide", Column()), ("narrow", Row()))}


class Block(nn.Module):
    """Not ours: a GELU layer that also looks at the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 48)
        self.narrow = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.narrow(F.gelu(self.wide(x + before)))


class Mine(nn.Module):
    """Bytes in, logits out; ``pieces()`` is all the engine asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(32, 256)

    def pieces(self) -> list[tuple[str, nn.Module]]:
        named = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("table", self.table), *named, ("out", self.out)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for _, piece in self.pieces():
            x = piece(x)
        return x


def batches_of(config: Resolved) -> Batches:
    return Batches(load_corpus(None), 7, config.sequence_length, config.train_batch_size)


VOCAB_CUT = PLAN | {"table": Vocab(1), "out": Vocab(1)}


def train(config: Resolved, plan: Any = PLAN) -> tuple[list[float], list[Any]]:
    """On a rank."""
    with torch.device("meta"):
        model = Mine()
    engine = Engine(config, SHAPE, model=model, plan=plan)
    losses = [engine.train_batch(batches_of(config)).loss for _ in range(STEPS)]
    found = parts(engine.shards, "master", engine.mesh.tp.rank)
    engine.close()
    return losses, found


def alone(config: Resolved) -> tuple[list[float], dict[str, Tensor]]:
    """A plain loop of torch's parts."""
    model = Mine().double()
    initialise_model(model, SHAPE, config.seed)
    spec = config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay)
    losses = []
    for step in range(STEPS):
        tokens, targets = batches_of(config).batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        {"dp": 2},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2},
        {"dp": 4, "zero": 3},
        {"tp": 2},
        {"pp": 2, "schedule": "zb-h1"},
        {"dp": 2, "tp": 2, "pp": 2, "zero": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", [PLAN, VOCAB_CUT], ids=["output whole", "output cut"])
def test_it_is_the_same_program(changes: dict[str, Any], plan: Any, ranks: Any) -> None:
    config = job(**changes)
    found = ranks(config.layout.world).run(train, config, plan)
    losses, weights = alone(config)
    ours = assemble(part for _, some in found for part in some)
    assert ours.keys() == weights.keys()
    for told, _ in found:
        assert told == pytest.approx(losses, rel=1e-9)
    for name, tensor in weights.items():
        # clip_grad_norm_ adds 1e-6 to the norm as we do; what is left is rounding.
        assert float((ours[name] - tensor).abs().max() / tensor.abs().max()) <= 1e-9, name


def test_a_whole_output_and_sliced_sequences_are_refused(ranks: Any) -> None:
    with pytest.raises(UserError, match="cut by vocabulary"):
        ranks(2).run(train, job(tp=2, sequence_parallel=True))
