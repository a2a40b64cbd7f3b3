"""Who sends what to whom, and when each buffer may be reused: a pipeline schedule compiled into one rank's programme.

A schedule says in which order a rank computes. From the schedules of *all* ranks follows everything about its
messages:

* what must have arrived before an action, and what leaves after it;
* when to post a receive: one action ahead of its use, so that the transfer overlaps with that action; and in the
  order in which the sender sends, since a channel delivers in order (two sends and two receives posted crosswise
  deadlock);
* when a sent buffer may go: a send is over once its receiver has posted the receive, and a rank knows that for
  certain after it has received something that the other computed later. Waiting there blocks nobody and frees memory
  at a moment that is the same in every run. Freeing a buffer earlier sends garbage (Megatron-LM PR 4047); waiting
  earlier can deadlock.

No torch: the executor runs these programmes, tests check them for every schedule.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hybridlab.schedule import Action, Schedule


@dataclass(frozen=True)
class Message:
    """``kind`` "activation": the output of ``stage``, sent to the next; "gradient": of its input, sent to the one
    before."""

    kind: str
    stage: int
    micro_batch: int
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """One action of a rank with its messages.

    Attributes:
        post: receives to post before the action, in this order.
        receive: what the action needs from another rank; None when its input is here.
        send: what leaves after the action; None when nothing does, or its consumer is on this rank.
        release: sends that are certainly received by the end of the action; wait for them and drop their buffers.
    """

    action: Action
    stage: int
    post: tuple[Message, ...]
    receive: Message | None
    send: Message | None
    release: tuple[Message, ...]


def needed(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """The message that an action waits for."""
    stage, last = schedule.stage_of(rank, action.chunk), schedule.num_stages - 1
    if action.op == "F" and stage > 0:
        source = schedule.place(stage - 1)[0]
        return None if source == rank else Message("activation", stage - 1, action.micro_batch, source, rank)
    if action.op in "BI" and stage < last:
        source = schedule.place(stage + 1)[0]
        return None if source == rank else Message("gradient", stage + 1, action.micro_batch, source, rank)
    return None


def produced(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """The message that leaves after an action."""
    stage, last = schedule.stage_of(rank, action.chunk), schedule.num_stages - 1
    if action.op == "F" and stage < last:
        target = schedule.place(stage + 1)[0]
        return None if target == rank else Message("activation", stage, action.micro_batch, rank, target)
    if action.op in "BI" and stage > 0:
        target = schedule.place(stage - 1)[0]
        return None if target == rank else Message("gradient", stage, action.micro_batch, rank, target)
    return None


def compile_programmes(schedule: Schedule) -> list[list[Step]]:
    """Every rank's programme.

    Raises:
        ValueError: the schedule deadlocks or waits for something that nobody sends.
    """
    sent_at: dict[Message, int] = {}
    used_at: dict[Message, int] = {}
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            message = produced(schedule, rank, action)
            if message is not None:
                sent_at[message] = index
                channels[rank, message.target].append(message)
            message = needed(schedule, rank, action)
            if message is not None:
                used_at[message] = index
    if sent_at.keys() != used_at.keys():
        odd = sorted(sent_at.keys() ^ used_at.keys(), key=str)
        raise ValueError(f"a message without its other end: {odd[0]}")

    posts: dict[tuple[int, int], list[Message]] = defaultdict(list)
    posted_at: dict[Message, int] = {}
    for messages in channels.values():
        soonest = len(schedule.ranks[messages[-1].target])
        for message in reversed(messages):
            soonest = min(soonest, max(0, used_at[message] - 1))
            posted_at[message] = soonest
        for message in messages:
            posts[message.target, posted_at[message]].append(message)

    releases = _release_points(schedule, sent_at, posted_at)
    return [
        [
            Step(
                action,
                schedule.stage_of(rank, action.chunk),
                tuple(posts[rank, index]),
                needed(schedule, rank, action),
                produced(schedule, rank, action),
                tuple(releases[rank, index]),
            )
            for index, action in enumerate(actions)
        ]
        for rank, actions in enumerate(schedule.ranks)
    ]


def _release_points(
    schedule: Schedule, sent_at: dict[Message, int], posted_at: dict[Message, int]
) -> dict[tuple[int, int], list[Message]]:
    """For each send, the first action of its sender by whose end the receiver is known to have posted the receive.

    Runs all ranks' programmes with vector clocks: ``known[r][q]`` is how many actions of q certainly have begun.
    """
    ranks = range(len(schedule.ranks))
    known = [[0] * len(schedule.ranks) for _ in ranks]
    carried: dict[Message, list[int]] = {}
    position = [0] * len(schedule.ranks)
    waiting: list[list[Message]] = [[] for _ in ranks]
    releases: dict[tuple[int, int], list[Message]] = defaultdict(list)
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            actions = schedule.ranks[rank]
            while position[rank] < len(actions):
                index = position[rank]
                action = actions[index]
                wanted = needed(schedule, rank, action)
                if wanted is not None:
                    if wanted not in carried:
                        break
                    known[rank] = [max(a, b) for a, b in zip(known[rank], carried.pop(wanted))]
                position[rank] = index + 1
                known[rank][rank] = index + 1
                still = []
                for message in waiting[rank]:
                    if known[rank][message.target] > posted_at[message]:
                        releases[rank, index].append(message)
                    else:
                        still.append(message)
                waiting[rank] = still
                outgoing = produced(schedule, rank, action)
                if outgoing is not None:
                    carried[outgoing] = list(known[rank])
                    waiting[rank].append(outgoing)
                progress = True
    stuck = [rank for rank in ranks if position[rank] < len(schedule.ranks[rank])]
    if stuck:
        where = ", ".join(f"rank {r} at {schedule.ranks[r][position[r]]}" for r in stuck)
        raise ValueError(f"the schedule deadlocks: {where}")
    for rank in ranks:  # the rest at the end of the step
        if waiting[rank]:
            releases[rank, len(schedule.ranks[rank]) - 1].extend(waiting[rank])
    return releases
