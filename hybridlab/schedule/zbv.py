"""ZB-V: zero bubble in the memory of 1F1B (Qi et al., arXiv:2401.10241, §6).

Two chunks a rank, placed there and back: a micro-batch runs down the ranks through their first chunks and comes back up
through their second ones, so that rank 0 holds both ends and backward starts where forward did. When F, I and W take
equally long, no rank has a gap between its first action and its last. The order is legal for any times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridlab.schedule.actions import Action, actions_of

_Pass = tuple[str, int]  # (op, chunk): the micro-batch follows, since each kind of pass takes them in order

_EAGER: tuple[_Pass, ...] = (("I", 1), ("I", 0), ("F", 1), ("F", 0), ("W", 1), ("W", 0))


def zb_v_ranks(stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Each rank's actions. At most 2P chunks in flight: as much as 1F1B's rank 0, whose chunks are twice as large.

    The order without gaps needs 2P-1 micro-batches to fill the pipeline. With fewer, it is the same with the surplus
    left out; from P down memory binds nobody, and starting whatever can start is faster.
    """
    if micro_batches <= stages:
        rows = _at_once(stages, micro_batches)
    else:
        filled = max(micro_batches, 2 * stages - 1)
        rows = [_without_gaps(stages, rank, filled) for rank in range(stages)]
    passes = {(op, chunk): actions_of(op, micro_batches, chunk) for op, chunk in _EAGER}
    return tuple(_numbered(row, passes) for row in rows)


def _without_gaps(stages: int, rank: int, micro_batches: int) -> list[_Pass]:
    """One rank's passes for 2P-1 micro-batches or more: fill, round trips of six passes, drain."""
    down, up = [("F", 0)], [("F", 1)]
    back_up, back_down = [("I", 1), ("W", 1)], [("I", 0), ("W", 0)]  # backward goes through the second chunk first
    row = down * (2 * (stages - rank) - 1)  # the first micro-batch is on its way down and back up to here
    row += (up + down) * rank  # its gradient is on its way from rank 0
    row += (up + back_up) * (stages - rank)  # 2P in flight: as much must leave as enters
    entering = micro_batches - (2 * stages - 1) + rank
    for left in range(micro_batches - stages):
        row += (down if left < entering else []) + back_down + up + back_up
    row += [("I", 0), ("I", 1)] * rank  # others wait for these; W can be late
    row += back_down * (stages - rank)
    return row + [("W", 1)] * rank + [("W", 0)] * rank


def _at_once(stages: int, micro_batches: int) -> list[list[_Pass]]:
    """All ranks' passes when every rank, step by step, starts the first of `_EAGER` that has what it needs."""
    last = 2 * stages - 1
    passed = {op: [0] * (last + 1) for op in "FIW"}  # micro-batches done, by virtual stage

    def able(op: str, stage: int) -> bool:
        if op == "F":
            there = passed["F"][stage - 1] if stage else micro_batches
        elif op == "I":
            there = passed["I"][stage + 1] if stage < last else passed["F"][stage]
        else:
            there = passed["I"][stage]
        return passed[op][stage] < there

    rows: list[list[_Pass]] = [[] for _ in range(stages)]
    while min(passed["W"]) < micro_batches:
        started = []
        for rank, row in enumerate(rows):
            here = (rank, last - rank)
            choice = next(((op, chunk) for op, chunk in _EAGER if able(op, here[chunk])), None)
            if choice is not None:
                row.append(choice)
                started.append((choice[0], here[choice[1]]))
        for op, stage in started:
            passed[op][stage] += 1
    return rows


def _numbered(row: Sequence[_Pass], passes: Mapping[_Pass, Sequence[Action]]) -> tuple[Action, ...]:
    """Passes with their micro-batches; those beyond the last are left out."""
    coming = {kind: iter(actions) for kind, actions in passes.items()}
    found = (next(coming[kind], None) for kind in row)
    return tuple(action for action in found if action is not None)
