"""Rehearsal: the very engine, as any rank of any world, in one process and without memory.

Tensors are fake (torch's FakeTensorMode: shapes and dtypes, no data), the process group is torch's "fake" backend,
whose collectives return at once. Everything else is what a real run executes: the same building, the same schedule,
the same buckets. The ledger counts what would be alive and what would be sent.

Ranks that differ only in their data-parallel or tensor-parallel place hold tensors of the same shapes; one of each
pipeline place is rehearsed and speaks for them. They send as much, too, but for one message: under ZeRO the sums that
tensor parallelism owes (`hybridlab.gradients`) are paid on each rank's slice, and slices hold more or fewer norm
weights. That message is counted for each data-parallel place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridlab.config import Resolved
from hybridlab.engine import Engine
from hybridlab.gradients import owed_elements, owed_groups
from hybridlab.ledger import Ledger, MemoryWatch, rank_traffic
from hybridlab.parallel.pipeline import MicroBatch
from hybridlab.report import (
    MemoryReport,
    RankMemory,
    RankTraffic,
    StepReport,
    Traffic,
    TrafficReport,
    ring_bytes,
)
from hybridlab.schedule import Steady, in_flight, make_schedule, steady_state
from hybridlab.shapes import ModelShape


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Be ``rank`` of ``world``, alone. Must not run where a real process group is up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a rehearsal needs a process of its own: this one has joined a process group")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Rehearsed:
    """What one rank did in its step.

    Attributes:
        ledger: of what was played, which may be a shorter batch.
        owed: traffic in the tp group for sums owed, had the rank sat at each data-parallel place.
    """

    memory: RankMemory
    traffic: RankTraffic
    ledger: Ledger
    owed: tuple[Traffic, ...]

    def at(self, rank: int, coords: Mapping[str, int]) -> tuple[RankMemory, RankTraffic]:
        """The same for another rank of this pipeline place."""
        groups = dict(self.traffic.groups)
        here, there = self.owed[self.traffic.coords["dp"]], self.owed[coords["dp"]]
        if here != there:
            tp = groups.get("tp", Traffic())
            groups["tp"] = Traffic(
                tp.messages + there.messages - here.messages,
                tp.message_bytes + there.message_bytes - here.message_bytes,
                tp.ring_bytes + there.ring_bytes - here.ring_bytes,
            )
        memory = replace(self.memory, rank=rank, coords=dict(coords))
        return memory, RankTraffic(rank, dict(coords), groups)


def rehearse_rank(
    config: Resolved, shape: ModelShape, rank: int, *, real: bool = False, device_type: str = "cpu", whole: bool = False
) -> Rehearsed:
    """Train one step as one rank.

    Where the schedule has a steady state (`hybridlab.schedule.steady`) and the rank's memory and messages are seen to
    repeat with it, a shorter batch is played and its round counted as often as it occurs.

    Args:
        real: real tensors on the real device, with only the communication fake: checks one rank's share of a large
            layout on one card.
        whole: play every micro-batch all the same.

    Raises:
        RuntimeError: the process is in a process group already.
    """
    schedule = make_schedule(config.schedule, config.layout.pp, config.micro_batches, chunks=config.virtual_stages)
    for warm in () if whole else (1, 2, 4):
        steady = steady_state(schedule, warm)
        if steady is None or 2 * steady.schedule.micro_batches > config.micro_batches:  # nothing to gain
            break
        found = _play(config, shape, rank, real, device_type, steady)
        if found is not None:
            return found
    found = _play(config, shape, rank, real, device_type, None)
    assert found is not None
    return found


def _play(
    config: Resolved, shape: ModelShape, rank: int, real: bool, device_type: str, steady: Steady | None
) -> Rehearsed | None:
    """One step, or the shorter one that tells it; None when it turns out not to."""
    ledger = Ledger()
    played = replace(config, compile=False)  # fake tensors cannot be compiled for; what is compiled keeps no more
    if steady is not None:
        short = steady.schedule.micro_batches
        samples = config.layout.dp * config.micro_batch_size * short
        played = replace(played, micro_batches=short, train_batch_size=samples)
    with fake_world(rank, config.layout.world), nullcontext() if real else FakeTensorMode():
        engine = Engine(played, shape, device_type=device_type, ledger=ledger, initialised=real)
        tokens = torch.zeros((config.micro_batch_size, config.sequence_length), dtype=torch.int64, device=engine.device)
        first = any(chunk.first for chunk in engine.chunks)
        last = any(chunk.last for chunk in engine.chunks)
        micro_batches = [  # all of them: a step holds its whole batch of tokens
            MicroBatch(i, tokens.clone() if first else None, tokens.clone() if last else None)
            for i in range(config.micro_batches)
        ]
        for micro_batch in micro_batches[played.micro_batches :]:
            for ids in (micro_batch.tokens, micro_batch.targets):
                if ids is not None:
                    ledger.own(ids, "other")
        with ledger.watch_memory() as watch:
            engine.train_step(micro_batches[: played.micro_batches])
        coords = engine.mesh.coords
        owed = tuple(_owed(engine, place) for place in range(config.layout.dp))
        memory = watch.report(rank, coords, engine.parameters)
        schedule = engine.schedule
        engine.close()
    times = [1] * len(ledger.messages)
    pp = coords["pp"]
    if steady is not None:
        end, length = steady.round_end[pp], steady.round_length[pp]
        if not _repeats(ledger, watch, end, length):
            return None
        times = [1 + steady.repeats * (end - length <= m.position < end) for m in ledger.messages]
        moment = watch.peak_moment
        if moment is not None and moment.micro_batch >= 0:
            moment = replace(moment, micro_batch=steady.later(pp, watch.peak_position, moment.micro_batch))
            memory = replace(memory, moment=moment.label)
    memory = replace(memory, in_flight=in_flight(schedule).max[pp])
    return Rehearsed(memory, rank_traffic(ledger, rank, coords, times), ledger, owed)


def _repeats(ledger: Ledger, watch: MemoryWatch, end: int, length: int) -> bool:
    """Whether the round of actions that ends at ``end`` held and sent what the one before it did."""
    rounds = [range(end - 2 * length, end - length), range(end - length, end)]
    held = [[watch.samples[i][1] for i in places] for places in rounds]
    sent = [[replace(m, position=0) for m in ledger.messages if m.position in places] for places in rounds]
    return held[0] == held[1] and sent[0] == sent[1]


def _owed(engine: Engine, place: int) -> Traffic:
    """What the message for owed sums would be at a data-parallel place."""
    total = Traffic()
    item = engine.numbers.gradient.itemsize
    for copies, group in owed_groups(engine.mesh).items():
        elements = 0
        for shard in engine.shards:
            length = shard.end - shard.begin
            begin = place * length if engine.config.zero.stage > 0 else 0
            elements += owed_elements(shard.bucket.intervals(begin, begin + length), copies)
        if elements:
            size = elements * item
            total += Traffic(1, size, ring_bytes("all_reduce", group.size, size))
    return total


def rehearse(config: Resolved, shape: ModelShape, *, usable_bytes: int | None = None) -> StepReport:
    """Every rank of the layout, one of each pipeline place rehearsed.

    Args:
        usable_bytes: what a device offers; the report then says whether it fits.
    """
    layout = config.layout
    speakers = [rehearse_rank(config, shape, layout.rank(pp=pp)) for pp in range(layout.pp)]
    entries = []
    for rank in range(layout.world):
        coords = layout.coords(rank)
        entries.append(speakers[coords["pp"]].at(rank, coords))
    return StepReport(
        MemoryReport("rehearsal", tuple(memory for memory, _ in entries), usable_bytes),
        TrafficReport("rehearsal", tuple(traffic for _, traffic in entries)),
    )
