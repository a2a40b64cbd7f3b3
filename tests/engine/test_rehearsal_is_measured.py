"""What a rehearsal says is what a real run does: every byte at every rank's peak, every message of every group."""

from __future__ import annotations

from typing import Any

import pytest

from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine
from hybridlab.launch import current
from hybridlab.ledger import rank_traffic
from hybridlab.rehearse import rehearse, rehearse_rank
from hybridlab.report import RankMemory, RankTraffic
from tests.support import job, shape_of

EVERY = "scatter_every_microbatch"
# name: (family, tied, changes of the job)
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "one rank": ("llama", False, {}),
    "one rank, GPT-2 tied": ("gpt2", True, {"m": 1}),
    "dp2": ("llama", False, {"dp": 2}),
    "dp4 ZeRO-1": ("gpt2", False, {"dp": 4, "zero": 1}),
    "dp4 ZeRO-2": ("llama", False, {"dp": 4, "zero": 2, "m": 3}),
    "dp2 ZeRO-2 accumulating": ("llama", True, {"dp": 2, "zero": 2, "policy": "accumulate_then_scatter", "m": 3}),
    "dp4 ZeRO-3": ("llama", False, {"dp": 4, "zero": 3}),
    "dp2 ZeRO-3 offloaded": ("llama", False, {"dp": 2, "zero": 3, "offload": True, "offload_param": True}),
    "dp2 ZeRO-1 offloaded": ("llama", False, {"dp": 2, "zero": 1, "offload": True}),
    "tp2": ("llama", False, {"tp": 2}),
    "tp4, kv heads copied": ("llama", False, {"tp": 4}),
    "tp2 sequence parallel": ("llama", True, {"tp": 2, "sequence_parallel": True}),
    "tp2 sequence parallel, GPT-2": ("gpt2", False, {"tp": 2, "sequence_parallel": True}),
    "tp2 dp2 ZeRO-2 sequence parallel": ("llama", False, {"tp": 2, "dp": 2, "zero": 2, "sequence_parallel": True}),
    "recompute selective": ("llama", False, {"dp": 2, "recompute": "selective"}),
    "recompute full": ("llama", False, {"tp": 2, "recompute": "full"}),
    "recompute full by 2, ZeRO-3": ("llama", False, {"dp": 2, "zero": 3, "recompute": "full", "recompute_interval": 2}),
    "pp2 gpipe": ("llama", False, {"pp": 2, "schedule": "gpipe", "m": 4}),
    "pp2 1f1b": ("llama", True, {"pp": 2, "m": 4}),
    "pp4 1f1b, fewer micro-batches than stages": ("gpt2", False, {"pp": 4, "m": 2}),
    "pp2 1f1b, m 12": ("llama", False, {"pp": 2, "m": 12, "micro": 1}),
    "pp2 interleaved": ("llama", False, {"pp": 2, "schedule": "interleaved-1f1b", "m": 4}),
    "pp2 zb-h1, m 12": ("llama", False, {"pp": 2, "schedule": "zb-h1", "m": 12, "micro": 1}),
    "pp2 zb-h2": ("gpt2", True, {"pp": 2, "schedule": "zb-h2", "m": 5}),
    "pp2 zb-v": ("llama", True, {"pp": 2, "schedule": "zb-v", "m": 4}),
    "pp2 dp2 ZeRO-1": ("llama", False, {"pp": 2, "dp": 2, "zero": 1, "m": 3}),
    "pp2 dp2 ZeRO-2": ("llama", True, {"pp": 2, "dp": 2, "zero": 2, "m": 3}),
    "pp2 dp2 ZeRO-3": ("llama", False, {"pp": 2, "dp": 2, "zero": 3, "m": 3}),
    "pp2 tp2 zb-h1": ("llama", False, {"pp": 2, "tp": 2, "schedule": "zb-h1", "m": 3, "sequence_parallel": True}),
    "the chapter's": ("llama", False, {"dp": 2, "tp": 2, "pp": 2, "zero": 2, "offload": True, "m": 4}),
    "3D ZeRO-3 zb-v": ("llama", True, {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "schedule": "zb-v", "m": 4}),
    "3D ZeRO-2 interleaved, bf16": (
        "llama",
        False,
        {"dp": 2, "tp": 2, "pp": 2, "zero": 2, "schedule": "interleaved-1f1b", "m": 4, "precision": "bf16"},
    ),
    "dp2 ZeRO-1, bf16, every": ("llama", False, {"dp": 2, "zero": 2, "policy": EVERY, "precision": "bf16"}),
}


def step(config: Any, shape: Any) -> tuple[RankMemory, RankTraffic]:
    """On a rank: one real step under the ledger's eyes."""
    here = current()
    assert here is not None
    engine = Engine(config, shape)
    batches = Batches(load_corpus(None), 7, config.sequence_length, config.train_batch_size, vocab=shape.vocab)
    with engine.ledger.watch_memory() as watch:
        engine.train_batch(batches)
    coords = engine.mesh.coords
    found = watch.report(here.rank, coords, engine.parameters), rank_traffic(engine.ledger, here.rank, coords)
    engine.close()
    return found


def test_there_are_thirty() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES)
def test_rehearsal_equals_a_real_run(case: str, ranks: Any) -> None:
    family, tied, changes = CASES[case]
    config, shape = job(**changes), shape_of(family, tied=tied)
    measured = ranks(config.layout.world).run(step, config, shape)
    for (memory, traffic), (real_memory, real_traffic) in zip(rehearse(config, shape), measured, strict=True):
        assert memory.coords == real_memory.coords
        assert memory.parameters == real_memory.parameters
        assert memory.at_peak == real_memory.at_peak
        assert memory.peak_bytes == real_memory.peak_bytes
        assert memory.host_peak_bytes == real_memory.host_peak_bytes
        assert traffic.groups == real_traffic.groups


@pytest.mark.parametrize(
    "changes",
    [
        {"m": 16},
        {"pp": 2, "m": 16},
        {"pp": 2, "m": 16, "schedule": "zb-h1", "zero": 3, "dp": 2},
        {"pp": 2, "m": 20, "schedule": "interleaved-1f1b", "zero": 2, "dp": 2},
    ],
    ids=str,
)
def test_a_steady_state_told_short_is_the_whole(changes: dict[str, Any]) -> None:
    """Playing every micro-batch gives the same numbers as playing a round and counting it, with fewer actions."""
    config, shape = job(micro=1, **changes), shape_of("llama")
    for pp in range(config.layout.pp):
        rank = config.layout.rank(pp=pp)
        short, whole = rehearse_rank(config, shape, rank), rehearse_rank(config, shape, rank, whole=True)
        assert short.memory == whole.memory
        assert short.traffic == whole.traffic
        assert len(short.ledger.spans) < len(whole.ledger.spans)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_memory_does_not_grow_with_micro_batches(schedule: str) -> None:
    """Beyond the tokens of the batch: what a micro-batch leaves behind is gone when it is done (marin#6532)."""
    shape = shape_of("llama")
    peaks = []
    for m in (8, 16):
        config = job(pp=2, m=m, micro=1, schedule=schedule)
        found = [rehearse_rank(config, shape, pp, whole=True).memory for pp in range(2)]
        peaks.append([memory.peak_bytes - memory.at_peak["other"] for memory in found])
    assert peaks[0] == peaks[1]
