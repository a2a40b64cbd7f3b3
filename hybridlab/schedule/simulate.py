"""A schedule in time: when each action starts and ends, given how long the passes and the messages take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from hybridlab.errors import UserError
from hybridlab.report import Span, Timeline
from hybridlab.schedule.actions import Schedule
from hybridlab.schedule.dataflow import circles, run


@dataclass(frozen=True)
class Simulation:
    """A schedule that has been played. All times are in the unit of those given.

    Attributes:
        schedule: what was played.
        forward, input_grad, weight_grad: F, I and W of each virtual stage; B takes I + W.
        p2p: latency of a message between ranks.
        starts, ends: for each rank, of its actions in order.
    """

    schedule: Schedule
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    p2p: float
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    def duration(self, op: str, stage: int) -> float:
        """How long an op takes on a virtual stage."""
        return _duration(op, stage, self.forward, self.input_grad, self.weight_grad)

    @cached_property
    def makespan(self) -> float:
        """From 0, when the first stage starts, to the end of the last action anywhere."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes: m·(F+I+W) summed over its chunks."""
        total = []
        for rank, actions in enumerate(self.schedule.ranks):
            counts = Counter((action.op, action.chunk) for action in actions)
            times = (n * self.duration(op, self.schedule.stage_of(rank, c)) for (op, c), n in counts.items())
            total.append(sum(times))
        return tuple(total)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank computes nothing between 0 and the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle_fraction(self) -> float:
        """Idle over makespan, mean of the ranks."""
        return sum(self.idle) / len(self.idle) / self.makespan if self.makespan else 0.0

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For each rank, the time from the start of its own first action to the end of its last."""
        return tuple(ends[-1] - starts[0] if ends else 0.0 for starts, ends in zip(self.starts, self.ends))

    @property
    def span_max(self) -> float:
        """The longest span: the "cost" of the Zero-Bubble paper (arXiv:2401.10241, §4)."""
        return max(self.spans)

    @property
    def bubble(self) -> float:
        """The idle time inside the longest span, on the rank whose span it is (of equals, the busiest one's)."""
        span, busy = max(zip(self.spans, self.busy))
        return span - busy

    @property
    def bubble_rate(self) -> float:
        """Bubble over the longest span: the Zero-Bubble paper's measure (Table 5)."""
        return self.bubble / self.span_max if self.span_max else 0.0

    def timeline(self, unit: str = "") -> Timeline:
        """The same as a `Timeline` with source "plan"; ``unit`` is "s" when the times given were seconds."""
        ranks = []
        for rank, actions in enumerate(self.schedule.ranks):
            stage = [self.schedule.stage_of(rank, chunk) for chunk in range(self.schedule.chunks)]
            played = zip(actions, self.starts[rank], self.ends[rank])
            ranks.append(tuple(Span(a.op, a.micro_batch, stage[a.chunk], start, end) for a, start, end in played))
        return Timeline("plan", tuple(ranks), unit)


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float],
    input_grad: float | Sequence[float],
    weight_grad: float | Sequence[float],
    p2p: float = 0.0,
) -> Simulation:
    """Play a schedule.

    A message is on the other rank ``p2p`` after the action that made it has ended; it occupies neither rank. Between
    stages on the same rank there is no latency.

    Args:
        forward, input_grad, weight_grad: time of F, I and W of one virtual stage (one model chunk) for one micro-batch:
            a number for all, or one per virtual stage. B takes I + W.
        p2p: latency, in the same unit.

    Raises:
        UserError: a time is not a number of at least 0, their count is wrong, or the schedule gets stuck.
    """
    times = [
        _per_stage(key, value, schedule.num_stages)
        for key, value in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    ]
    latency = _time("p2p", p2p)
    played = run(schedule, lambda op, stage: _duration(op, stage, *times), latency)
    if played.waits:
        circle = next(iter(circles(played.waits)), [played.waits[0]])
        raise UserError(
            f"the schedule gets stuck: {'; '.join(map(str, circle))}.",
            key="schedule",
            value=schedule.name,
            fix="`hybridlab timeline --schedule FILE` lists what is wrong with a schedule.",
        )
    return Simulation(schedule, times[0], times[1], times[2], latency, played.starts, played.ends)


def _duration(
    op: str, stage: int, forward: Sequence[float], input_grad: Sequence[float], weight_grad: Sequence[float]
) -> float:
    if op == "B":
        return input_grad[stage] + weight_grad[stage]
    return {"F": forward, "I": input_grad, "W": weight_grad}[op][stage]


def _per_stage(key: str, value: float | Sequence[float], stages: int) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (_time(key, value),) * stages
    if len(value) != stages:
        rule = f"{key} has {len(value)} times for {stages} virtual stages."
        raise UserError(rule, key=key, value=list(value), fix=f"one number, or {stages}.")
    return tuple(_time(key, one) for one in value)


def _time(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise UserError(f"a time is a number of at least 0, not {value!r}.", key=key, value=value, fix="0 or more.")
    return float(value)
