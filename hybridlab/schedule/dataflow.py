"""What an action waits for, and what happens when every rank works through its list.

An action starts when its rank has finished the one before, and the one thing it needs is there:

==========  ========================================================================================================
F of s      F of stage s-1, same micro-batch (nothing on stage 0)
B, I of s   B or I of stage s+1; on the last stage its own F
W of s      its own I
==========  ========================================================================================================

A stage's own F need not be asked for in backward: B of s+1 is there only after F of s. Sending never blocks; receiving
does. Every action is looked at once, and once more each time its rank had to stop for it: near-linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridlab.schedule.actions import Schedule


@dataclass(frozen=True)
class Wait:
    """A rank that cannot go on: at ``index`` of its list it needs something that has not been computed.

    Attributes:
        rank, index, label: where it stands.
        needs: in text form, what it needs.
        needs_stage: of which stage.
        owner: the rank that has it on its list, still to come; None when it is on no list.
    """

    rank: int
    index: int
    label: str
    needs: str
    needs_stage: int
    owner: int | None

    def __str__(self) -> str:
        if self.owner is None:
            return f"rank {self.rank} waits at {self.label} for {self.needs}, which no rank runs"
        if self.owner == self.rank:
            return f"rank {self.rank} waits at {self.label} for its own {self.needs}, which comes later"
        return f"rank {self.rank} waits at {self.label} for rank {self.owner} to run {self.needs}"


@dataclass(frozen=True)
class Run:
    """Every list as far as it could be worked through.

    Attributes:
        starts, ends: of each rank's actions.
        waits: of the ranks that got stuck; empty when all finished.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    waits: tuple[Wait, ...]


def run(schedule: Schedule, duration: Callable[[str, int], float], delay: float = 0.0) -> Run:
    """Work through all lists.

    Args:
        duration: of an op ("F", "B", "I", "W") on a virtual stage; at least 0.
        delay: from the end of an action to when its result is on another rank.
    """
    size = schedule.num_stages * schedule.micro_batches
    tables = [_table(schedule, rank, size, duration, delay) for rank in range(schedule.stages)]
    done = [-1.0] * (3 * size)  # when each result is there: forwards, backwards, weight gradients; -1: not yet
    starts: list[list[float]] = [[] for _ in tables]
    ends: list[list[float]] = [[] for _ in tables]
    stopped: dict[int, list[int]] = {}  # by what they need
    able = list(range(schedule.stages))
    while able:
        rank = able.pop()
        actions, table, begun, ended = schedule.ranks[rank], tables[rank], starts[rank], ends[rank]
        now = ended[-1] if ended else 0.0
        for index in range(len(ended), len(actions)):
            action = actions[index]
            makes, needs, wait, takes = table[action.op, action.chunk]
            micro_batch = action.micro_batch
            if needs >= 0:
                there = done[needs + micro_batch]
                if there < 0.0:
                    stopped.setdefault(needs + micro_batch, []).append(rank)
                    break
                if there + wait > now:
                    now = there + wait
            begun.append(now)
            now += takes
            ended.append(now)
            done[makes + micro_batch] = now
            if makes + micro_batch in stopped:
                able += stopped.pop(makes + micro_batch)
    stuck = {rank: need for need, ranks in stopped.items() for rank in ranks}
    waits = tuple(_wait(schedule, rank, len(ends[rank]), stuck[rank]) for rank in sorted(stuck))
    return Run(tuple(map(tuple, starts)), tuple(map(tuple, ends)), waits)


def circles(waits: tuple[Wait, ...]) -> list[list[Wait]]:
    """Who waits for whom in a circle; each circle once, from its lowest rank."""
    by_rank = {wait.rank: wait for wait in waits}
    found: list[list[Wait]] = []
    visited: set[int] = set()
    for first in waits:
        path: list[int] = []
        rank: int | None = first.rank
        while rank in by_rank and rank not in visited:
            visited.add(rank)
            path.append(rank)
            rank = by_rank[rank].owner
        if rank in path:
            circle = path[path.index(rank) :]
            lowest = circle.index(min(circle))
            found.append([by_rank[rank] for rank in circle[lowest:] + circle[:lowest]])
    return found


def _table(
    schedule: Schedule, rank: int, size: int, duration: Callable[[str, int], float], delay: float
) -> dict[tuple[str, int], tuple[int, int, float, float]]:
    """By (op, chunk): where in ``done`` its results begin, where what it needs begins (-1: nothing), how long that
    travels, how long the action takes."""
    m, last = schedule.micro_batches, schedule.num_stages - 1
    table = {}
    for chunk in range(schedule.chunks):
        stage = schedule.stage_of(rank, chunk)
        here = stage * m

        def travel(other: int) -> float:
            return 0.0 if schedule.place(other)[0] == rank else delay

        before = (here - m, travel(stage - 1)) if stage > 0 else (-1, 0.0)
        after = (size + here + m, travel(stage + 1)) if stage < last else (here, 0.0)
        table["F", chunk] = (here, *before, duration("F", stage))
        table["B", chunk] = (size + here, *after, duration("B", stage))
        table["I", chunk] = (size + here, *after, duration("I", stage))
        table["W", chunk] = (2 * size + here, size + here, 0.0, duration("W", stage))
    return table


def _wait(schedule: Schedule, rank: int, index: int, need: int) -> Wait:
    """Put into words that a rank stands at ``index`` for result number ``need``."""
    kind, rest = divmod(need, schedule.num_stages * schedule.micro_batches)
    stage, micro_batch = divmod(rest, schedule.micro_batches)
    home, chunk = schedule.place(stage)
    ops = "F" if kind == 0 else "BI"
    offered = [a for a in schedule.ranks[home] if a.chunk == chunk and a.micro_batch == micro_batch and a.op in ops]
    needs = f"{stage}{offered[0].op if offered else ops[0]}{micro_batch}"
    label = schedule.label(rank, schedule.ranks[rank][index])
    return Wait(rank, index, label, needs, stage, home if offered else None)
