"""Is a schedule legal? Everything that is wrong with it, in sentences.

Four things can be: an action is missing or there twice; a backward stands before its forward; ranks wait for each
other in a circle; a rank holds more in flight than it may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridlab.errors import UserError
from hybridlab.schedule.actions import OPS, Schedule
from hybridlab.schedule.dataflow import circles, run
from hybridlab.schedule.memory import in_flight


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: "unknown" (an op, micro-batch or chunk that does not exist), "missing", "duplicate", "order" (within a
            stage), "deadlock" or "memory".
        message: what is wrong, a full sentence with ranks and actions in it.
        rank: where.
        index: which action of that rank, from 0; None where the trouble is that it is not there.
    """

    kind: str
    message: str
    rank: int
    index: int | None = None

    @property
    def where(self) -> str:
        """The place in words."""
        return f"rank {self.rank}" if self.index is None else f"rank {self.rank}, action {self.index}"

    def to_json(self) -> dict[str, Any]:
        """``{kind, message, where, rank, index}``."""
        data = {"kind": self.kind, "message": self.message, "where": self.where}
        return {**data, "rank": self.rank, "index": self.index}


def check(schedule: Schedule, limit: int | Sequence[int] | None = None) -> list[Problem]:
    """Everything that is wrong with a schedule; an empty list means that it runs.

    * Every virtual stage has, for every micro-batch, one F and either one B or one I and one W.
    * On its rank, F stands before B or I, and I before W.
    * All ranks reach the end of their lists, when an action waits for what it needs (`hybridlab.schedule.dataflow`).
    * No rank holds more (micro-batch, chunk) in flight than ``limit``, one number or one per rank.

    Raises:
        UserError: ``limit`` does not fit the ranks.
    """
    problems = list(_unknown(schedule))
    if problems:  # the rest would be about actions that mean nothing
        return problems
    places = _places(schedule, problems)
    problems += _incomplete_or_disordered(schedule, places)
    problems += _deadlocks(schedule)
    if limit is not None:
        problems += _over(schedule, _limits(schedule, limit))
    return problems


def _unknown(schedule: Schedule) -> Iterator[Problem]:
    m, v = schedule.micro_batches, schedule.chunks
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            if action.op in OPS and 0 <= action.micro_batch < m and 0 <= action.chunk < v:
                continue
            if action.op not in OPS:
                text = f"op {action.op!r} is none of {', '.join(OPS)}"
            elif not 0 <= action.micro_batch < m:
                text = (
                    f"{schedule.label(rank, action)} is of micro-batch {action.micro_batch}, they run from 0 to {m - 1}"
                )
            else:
                text = f"{action.op}{action.micro_batch} is of chunk {action.chunk}, this rank's run from 0 to {v - 1}"
            yield Problem("unknown", f"Rank {rank}: {text}.", rank, index)


def _places(schedule: Schedule, problems: list[Problem]) -> dict[str, list[int]]:
    """By op, for stage·m + micro-batch, the index of the action on its rank, or -1. Notes what is there twice."""
    m = schedule.micro_batches
    places = {op: [-1] * (schedule.num_stages * m) for op in OPS}
    for rank, actions in enumerate(schedule.ranks):
        first = [schedule.stage_of(rank, chunk) * m for chunk in range(schedule.chunks)]
        for index, action in enumerate(actions):
            row, key = places[action.op], first[action.chunk] + action.micro_batch
            if row[key] < 0:
                row[key] = index
                continue
            label = schedule.label(rank, action)
            text = f"Rank {rank} runs {label} twice, as actions {row[key]} and {index}."
            problems.append(Problem("duplicate", text, rank, index))
    return places


def _incomplete_or_disordered(schedule: Schedule, places: dict[str, list[int]]) -> Iterator[Problem]:
    m = schedule.micro_batches
    for stage in range(schedule.num_stages):
        rank, _ = schedule.place(stage)
        for micro_batch in range(m):
            f, b, i, w = (places[op][stage * m + micro_batch] for op in OPS)

            def name(op: str, stage: int = stage, micro_batch: int = micro_batch) -> str:
                return f"{stage}{op}{micro_batch}"

            if f < 0:
                yield Problem("missing", f"Rank {rank} never runs {name('F')}.", rank)
            if b >= 0 and (i >= 0 or w >= 0):
                half = name("I" if i >= 0 else "W")
                text = f"Rank {rank} runs {name('B')}, the whole backward, and {half}, a half of it."
                yield Problem("duplicate", text, rank, max(b, i, w))
            elif b < 0 and i < 0 and w < 0:
                text = f"Rank {rank} never runs the backward of stage {stage}, micro-batch {micro_batch}"
                yield Problem("missing", f"{text} ({name('B')}, or {name('I')} and {name('W')}).", rank)
            elif b < 0 and (i < 0 or w < 0):
                has, lacks = ("W", "I") if i < 0 else ("I", "W")
                yield Problem("missing", f"Rank {rank} runs {name(has)} but never {name(lacks)}.", rank)
            for early, late, before, after in (("F", "B", f, b), ("F", "I", f, i), ("I", "W", i, w)):
                if 0 <= after < before:
                    text = f"Rank {rank} runs {name(late)} (action {after}) before {name(early)} (action {before})."
                    yield Problem("order", text, rank, after)


def _deadlocks(schedule: Schedule) -> Iterator[Problem]:
    waits = run(schedule, lambda op, stage: 0.0).waits
    for circle in circles(waits):
        first = circle[0]
        stage = schedule.stage_of(first.rank, schedule.ranks[first.rank][first.index].chunk)
        if len(circle) == 1 and first.needs_stage == stage:
            continue  # within one stage: said as "order"
        text = "; ".join(map(str, circle))
        yield Problem("deadlock", f"Deadlock: {text}.", first.rank, first.index)


def _over(schedule: Schedule, limits: Sequence[int]) -> Iterator[Problem]:
    for rank, counts in enumerate(in_flight(schedule).alive):
        most = max(counts, default=0)
        if most > limits[rank]:
            index = counts.index(most)
            label = schedule.label(rank, schedule.ranks[rank][index])
            text = f"Rank {rank} holds {most} micro-batches in flight after {label}; its limit is {limits[rank]}."
            yield Problem("memory", text, rank, index)


def _limits(schedule: Schedule, limit: int | Sequence[int]) -> Sequence[int]:
    if isinstance(limit, int):
        return (limit,) * schedule.stages
    if len(limit) != schedule.stages:
        rule = f"{len(limit)} limits for {schedule.stages} ranks."
        raise UserError(rule, key="limit", value=list(limit), fix=f"one number, or {schedule.stages}.")
    return limit
