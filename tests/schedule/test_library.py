"""The schedules: legal for every size, with the in-flight counts and idle times that their papers give."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hybridlab.errors import UserError
from hybridlab.exchange import compile_programmes
from hybridlab.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    in_flight,
    make_schedule,
    read_schedule,
    simulate,
    steady_state,
    warmup_forwards,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 16)]


def all_schedules() -> list[Schedule]:
    found = []
    for name in SCHEDULES:
        for p, m in SIZES:
            if name == "interleaved-1f1b" and m % p:
                with pytest.raises(UserError):
                    make_schedule(name, p, m)
            else:
                found.append(make_schedule(name, p, m))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_legal_and_complete(name: str) -> None:
    for schedule in (s for s in all_schedules() if s.name == name):
        assert check(schedule) == []
        for actions in schedule.ranks:
            counts = Counter((a.op, a.micro_batch, a.chunk) for a in actions)
            assert set(counts.values()) == {1}
            for chunk in range(schedule.chunks):
                for i in range(schedule.micro_batches):
                    assert ("F", i, chunk) in counts
                    assert (("B", i, chunk) in counts) != (("I", i, chunk) in counts and ("W", i, chunk) in counts)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_flight(p: int, m: int) -> None:
    assert in_flight(make_schedule("gpipe", p, m)).max == (m,) * p
    one = in_flight(make_schedule("1f1b", p, m)).max
    assert one == tuple(min(p - rank, m) for rank in range(p))
    # ZB-H1 keeps no more than 1F1B's first stage on any rank, ZB-H2 up to 2p - 1 (arXiv:2401.10241 §3).
    assert max(in_flight(make_schedule("zb-h1", p, m)).max) <= min(p, m)
    assert max(in_flight(make_schedule("zb-h2", p, m)).max) <= min(2 * p - 1, m)


def test_warm_up_of_the_interleaved_schedule() -> None:
    """Megatron-LM issue 169: 2(p - r - 1) + (v - 1)p forwards of warm-up, then one and its backward at a time."""
    schedule = make_schedule("interleaved-1f1b", 4, 8, chunks=2)
    assert warmup_forwards("interleaved-1f1b", 4, 8, 2) == (10, 8, 6, 4)
    first = [next(i for i, a in enumerate(actions) if a.op == "B") for actions in schedule.ranks]
    assert first == [11, 9, 7, 5]


def test_idle_time_by_the_simulator() -> None:
    """f = b = w = 1, p = 4, m = 8: (p-1)(f+b+w) = 9 for 1F1B, (p-1)(f+b-w) = 3 for ZB-H1 (arXiv:2401.10241)."""
    assert set(simulate(make_schedule("1f1b", 4, 8), 1, 1, 1).idle) == {9.0}
    assert min(simulate(make_schedule("zb-h1", 4, 8), 1, 1, 1).idle) == 3.0
    for micro, expected in ((1, 3 / 64), (2, 3 / 32), (4, 3 / 16)):  # 64 samples, p = 4, dp = 1
        played = simulate(make_schedule("1f1b", 4, 64 // micro), 1, 1, 1)
        assert played.idle[0] / played.busy[0] == pytest.approx(expected)


def moved(schedule: Schedule, rank: int, source: int, target: int) -> Schedule:
    actions = list(schedule.ranks[rank])
    actions.insert(target, actions.pop(source))
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def test_what_is_broken_is_told() -> None:
    good = make_schedule("1f1b", 2, 2)
    first, last = good.ranks

    def kinds(ranks: tuple[tuple[Action, ...], ...]) -> set[str]:
        return {problem.kind for problem in check(replace(good, ranks=ranks))}

    assert kinds((first[:-1], last)) == {"missing"}
    assert "duplicate" in kinds(((*first, first[0]), last))
    assert "order" in kinds((first, (last[1], last[0], *last[2:])))
    assert "unknown" in kinds(((*first, Action("F", 7)), last))
    assert "unknown" in kinds(((*first, Action("F", 0, 3)), last))
    # Rank 0 wants the gradient of micro-batch 1 first, rank 1 wants to send that of 0 after F1 has come.
    crossed = (
        (Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)),
        (Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)),
    )
    (deadlock,) = (p for p in check(replace(good, ranks=crossed)) if p.kind == "deadlock")
    assert "rank 0" in deadlock.message
    assert "rank 1" in deadlock.message
    with pytest.raises(UserError, match=r"waits"):
        simulate(replace(good, ranks=crossed), 1, 1, 1)


def test_w_before_i_is_out_of_order() -> None:
    good = make_schedule("zb-h1", 2, 2)
    actions = good.ranks[0]
    i, w = actions.index(Action("I", 0)), actions.index(Action("W", 0))
    assert {p.kind for p in check(moved(good, 0, w, i))} == {"order"}


def test_random_moves_are_played_or_refused_and_never_hang() -> None:
    """A move within a rank either keeps the schedule legal, then it can be compiled and played, or is refused."""
    rng = random.Random(3)
    legal = refused = 0
    for _ in range(300):
        schedule = make_schedule(rng.choice(["1f1b", "zb-h1", "gpipe", "zb-v"]), rng.choice([2, 3]), rng.randint(2, 5))
        for _ in range(rng.randint(1, 3)):
            rank = rng.randrange(schedule.stages)
            size = len(schedule.ranks[rank])
            schedule = moved(schedule, rank, rng.randrange(size), rng.randrange(size))
        if check(schedule):
            refused += 1
            with pytest.raises((UserError, ValueError)):
                simulate(schedule, 1, 1, 1)
        else:
            legal += 1
            assert simulate(schedule, 1, 1, 1, p2p=0.5).makespan > 0
            drained(schedule)
    assert min(legal, refused) > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_programmes_run_when_a_send_waits_for_its_receive(name: str) -> None:
    for schedule in (s for s in all_schedules() if s.name == name):
        drained(schedule)


def drained(schedule: Schedule) -> None:
    """Play the compiled programmes on channels that deliver in order; a release that would wait is a failure."""
    programmes = compile_programmes(schedule)
    places = [0] * schedule.stages
    posted: dict[tuple[int, int], list[object]] = {}
    sent: dict[tuple[int, int], list[object]] = {}
    entered = [-1] * schedule.stages
    while any(place < len(programme) for place, programme in zip(places, programmes)):
        progress = False
        for rank, programme in enumerate(programmes):
            if places[rank] == len(programme):
                continue
            step = programme[places[rank]]
            if entered[rank] < places[rank]:
                entered[rank] = places[rank]
                for message in step.post:
                    posted.setdefault((message.source, message.target), []).append(message)
                progress = True
            need = step.receive
            if need is not None and need not in sent.get((need.source, rank), []):
                continue
            if step.send is not None:
                sent.setdefault((rank, step.send.target), []).append(step.send)
            for message in step.release:
                # What is still on its way after the last action is waited for there, when nobody needs this rank more.
                if places[rank] == len(programme) - 1:
                    continue
                assert message in posted[rank, message.target], "waiting for a send that nobody has begun to receive"
            places[rank] += 1
            progress = True
        assert progress, "nobody can go on"
    for channel, messages in sent.items():
        assert messages == posted[channel], "received in another order than sent"


def test_a_file_goes_there_and_back(tmp_path: Path) -> None:
    import json

    schedule = make_schedule("zb-v", 2, 3)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(schedule.to_json()))
    assert read_schedule(path).ranks == schedule.ranks
    assert make_schedule(str(path), 2, 3).ranks == schedule.ranks
    with pytest.raises(UserError):
        make_schedule(str(path), 4, 3)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_steady_state_tells_the_whole(name: str, stages: int) -> None:
    long = make_schedule(name, stages, 64)
    steady = steady_state(long)
    assert steady is not None
    assert steady.schedule.micro_batches <= 20
    for rank, short in enumerate(steady.schedule.ranks):
        end, length = steady.round_end[rank], steady.round_length[rank]
        rebuilt = list(short[:end])
        for n in range(1, steady.repeats + 1):
            rebuilt += [replace(a, micro_batch=a.micro_batch + n * steady.shift) for a in short[end - length : end]]
        rebuilt += [
            replace(a, micro_batch=steady.later(rank, end + i, a.micro_batch)) for i, a in enumerate(short[end:])
        ]
        assert tuple(rebuilt) == long.ranks[rank]
    assert in_flight(steady.schedule).max == in_flight(long).max


def test_gpipe_has_no_steady_state() -> None:
    assert steady_state(make_schedule("gpipe", 4, 64)) is None
