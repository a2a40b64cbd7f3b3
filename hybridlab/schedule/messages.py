"""Which messages a schedule sends from rank to rank, in the order in which they leave."""

from __future__ import annotations

from dataclasses import dataclass

from hybridlab.schedule.actions import Schedule


@dataclass(frozen=True, order=True)
class Message:
    """What one stage hands to a neighbouring one on another rank.

    Attributes:
        kind: "activation", the output of ``stage``'s forward, for the next stage; or "gradient", of the input of
            ``stage``, for the one before.
        stage: the virtual stage that computed it.
        micro_batch: for which.
    """

    kind: str
    stage: int
    micro_batch: int


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """For each (sender, receiver), the messages in the order the sender produces them.

    A channel delivers in order, so the receiver must post its receives in this order too, whatever order it uses them
    in. Neighbouring stages on one rank send nothing. Channels without a message are left out.
    """
    found: dict[tuple[int, int], list[Message]] = {}
    last = schedule.num_stages - 1
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage = schedule.stage_of(rank, action.chunk)
            if action.op == "W":
                continue
            kind, target = ("activation", stage + 1) if action.op == "F" else ("gradient", stage - 1)
            if not 0 <= target <= last:
                continue
            receiver = schedule.place(target)[0]
            if receiver != rank:
                found.setdefault((rank, receiver), []).append(Message(kind, stage, action.micro_batch))
    return found
