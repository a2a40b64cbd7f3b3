"""The pipeline schedules of the field, one function each: stages and micro-batches in, each rank's actions out.

`make_schedule` makes one by name, or reads a learner's own from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from hybridlab.errors import UserError
from hybridlab.schedule.actions import Action, Schedule, actions_of, read_schedule, whole_number
from hybridlab.schedule.check import check
from hybridlab.schedule.zbv import zb_v_ranks

Ranks = tuple[tuple[Action, ...], ...]


def gpipe(stages: int, micro_batches: int) -> Ranks:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965). Every stage keeps all m activations."""
    forwards, backwards = actions_of("F", micro_batches), actions_of("B", micro_batches)
    return ((*forwards, *backwards),) * stages


def one_f_one_b(stages: int, micro_batches: int) -> Ranks:
    """1F1B: a forward, a backward, in turn, after as many forwards as there are stages to come.

    Stage r keeps min(P-r, m) activations. PipeDream-Flush (Narayanan et al., arXiv:2006.09503; Megatron-LM,
    arXiv:2104.04473 §2.2.1).
    """
    forwards, backwards = actions_of("F", micro_batches), actions_of("B", micro_batches)
    return tuple(_in_turn(forwards, backwards, n) for n in warmup_forwards("1f1b", stages, micro_batches))


def interleaved_1f1b(stages: int, micro_batches: int, chunks: int) -> Ranks:
    """Interleaved 1F1B: each rank holds v chunks; micro-batches come in rounds of P, through one chunk after another.

    The bubble is v times smaller, messages are v times as many (Megatron-LM, arXiv:2104.04473 §2.2.2). The order is
    Megatron-LM's: round by round, chunks ascending in forward and descending in backward.
    """
    forward = [actions_of("F", micro_batches, chunk) for chunk in range(chunks)]
    backward = [actions_of("B", micro_batches, chunk) for chunk in reversed(range(chunks))]
    rounds = [slice(start, start + stages) for start in range(0, micro_batches, stages)]
    forwards = [action for part in rounds for passes in forward for action in passes[part]]
    backwards = [action for part in rounds for passes in backward for action in passes[part]]
    warmup = warmup_forwards("interleaved-1f1b", stages, micro_batches, chunks)
    return tuple(_in_turn(forwards, backwards, n) for n in warmup)


def zb_h1(stages: int, micro_batches: int) -> Ranks:
    """ZB-H1: 1F1B with the weight gradients put off, in the memory of 1F1B's first stage.

    Stage r runs the W of a micro-batch r backwards later (Qi et al., arXiv:2401.10241, §2.3). Every stage keeps P
    activations.
    """
    return _zb_h("zb-h1", stages, micro_batches, 1)


def zb_h2(stages: int, micro_batches: int) -> Ranks:
    """ZB-H2: twice the warm-up of 1F1B and weight gradients put off by 2r backwards: no bubble when F = I = W.

    Every stage keeps 2P-1 activations (Qi et al., arXiv:2401.10241, §2.3).
    """
    return _zb_h("zb-h2", stages, micro_batches, 2)


def zb_v(stages: int, micro_batches: int) -> Ranks:
    """ZB-V: no bubble when F = I = W, in the memory of 1F1B (Qi et al., arXiv:2401.10241, §6). See `zbv`."""
    return zb_v_ranks(stages, micro_batches)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    steady = chain.from_iterable(zip(forwards[warmup:], backwards))
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _zb_h(name: str, stages: int, micro_batches: int, factor: int) -> Ranks:
    forwards, inputs, weights = (actions_of(op, micro_batches) for op in "FIW")
    ranks = []
    for rank, warmup in enumerate(warmup_forwards(name, stages, micro_batches)):
        delay = factor * rank
        actions = list(forwards[:warmup])
        for step in range(micro_batches):
            actions += forwards[warmup + step : warmup + step + 1]
            actions.append(inputs[step])
            if step >= delay:
                actions.append(weights[step - delay])
        actions += weights[max(0, micro_batches - delay) :]
        ranks.append(tuple(actions))
    return tuple(ranks)


@dataclass(frozen=True)
class Kind:
    """What belongs to a schedule by name.

    Attributes:
        build: (stages, micro-batches, chunks) to each rank's actions.
        chunks: the least and the most per rank; None: no bound.
        default_chunks: when nobody says.
        placement: of chunks on ranks.
        rounds: micro-batches must come in whole rounds of P.
        warmup: forwards before the steady state, in words; "" where that is no formula.
    """

    build: Callable[[int, int, int], Ranks]
    chunks: tuple[int, int | None] = (1, 1)
    default_chunks: int = 1
    placement: str = "loop"
    rounds: bool = False
    warmup: str = ""


SCHEDULES: dict[str, Kind] = {
    "gpipe": Kind(lambda p, m, v: gpipe(p, m), warmup="m"),
    "1f1b": Kind(lambda p, m, v: one_f_one_b(p, m), warmup="min(P-r-1, m)"),
    "interleaved-1f1b": Kind(interleaved_1f1b, (2, None), 2, rounds=True, warmup="min(2(P-r-1) + (v-1)P, v·m)"),
    "zb-h1": Kind(lambda p, m, v: zb_h1(p, m), warmup="min(P-r-1, m)"),
    "zb-h2": Kind(lambda p, m, v: zb_h2(p, m), warmup="min(2(P-r-1), m)"),
    "zb-v": Kind(lambda p, m, v: zb_v(p, m), (2, 2), 2, "v"),
}
"""By name, as the config and the commands spell them."""


def warmup_forwards(name: str, stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """For each rank r, the forwards before it takes forward and backward in turn; () for zb-v, a pattern of its own.

    Interleaving's count differs from 1F1B's since a micro-batch passes each rank v times before it comes back, and each
    of the P-r-1 ranks to come is passed going there and coming back (Megatron-LM, arXiv:2104.04473 §2.2.2).
    """
    most = micro_batches * chunks
    to_come = range(stages - 1, -1, -1)
    if name == "gpipe":
        return (most,) * stages
    if name in ("1f1b", "zb-h1"):
        return tuple(min(n, most) for n in to_come)
    if name == "zb-h2":
        return tuple(min(2 * n, most) for n in to_come)
    if name == "interleaved-1f1b":
        return tuple(min(2 * n + (chunks - 1) * stages, most) for n in to_come)
    return ()


def make_schedule(
    name: str,
    stages: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    placement: str | None = None,
) -> Schedule:
    """A schedule by name, or from a file (a name that ends in ``.json``), certain to be legal.

    Args:
        name: one of `SCHEDULES`, or a path.
        stages: P, ranks of the pipeline. A file has its own sizes: what is given here must agree with them.
        micro_batches: m.
        chunks: v per rank; by default the schedule's own.
        placement: of chunks; it belongs to the schedule, and another one is refused.

    Raises:
        UserError: with key "schedule", "stages", "micro_batches", "chunks" or "placement".
    """
    if is_file(name):
        schedule = read_schedule(name)
        require_sizes(schedule, stages, micro_batches, chunks, placement)
        problems = check(schedule)
        if problems:
            more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
            raise UserError(
                f"the schedule in {name} is not legal. {problems[0].message}{more}",
                key="schedule",
                value=name,
                fix=f"`hybridlab timeline --schedule {name}` lists all.",
            )
        return schedule
    if name not in SCHEDULES:
        near = get_close_matches(name.lower(), SCHEDULES, 1)
        guess = f"did you mean {near[0]}? " if near else ""
        fix = f"{guess}There are {', '.join(SCHEDULES)}, and .json files."
        raise UserError(f"there is no schedule {name!r}.", key="schedule", value=name, fix=fix)
    kind = SCHEDULES[name]
    p, m = whole_number("stages", stages), whole_number("micro_batches", micro_batches)
    v = kind.default_chunks if chunks is None else whole_number("chunks", chunks)
    _require_chunks(name, kind, v)
    if placement not in (None, kind.placement):
        raise UserError(
            f"schedule {name} places its chunks as {kind.placement!r}, not {placement!r}.",
            key="placement",
            value=placement,
            fix=f"{kind.placement!r}, or leave it out.",
        )
    if kind.rounds and m % p:
        legal = " or ".join(str(n) for n in (m // p * p, (m // p + 1) * p) if n)
        raise UserError(
            f"{name} takes micro-batches in rounds of one per stage: {m} is not a multiple of {p} stages.",
            key="micro_batches",
            value=m,
            fix=f"{legal} micro-batches, or schedule 1f1b.",
        )
    return Schedule(name, p, m, v, kind.placement, kind.build(p, m, v))


def is_file(name: str) -> bool:
    """Whether a schedule's name is the path of one."""
    return name not in SCHEDULES and Path(name).suffix == ".json"


def require_sizes(
    schedule: Schedule,
    stages: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    placement: str | None = None,
) -> None:
    """The sizes that are given are those of the schedule; and one that bears a known name lies as that one does.

    Raises:
        UserError: they are not.
    """
    given = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks, "placement": placement}
    for key, value in given.items():
        own = getattr(schedule, key)
        if value is not None and value != own:
            what = key.replace("_", "-")
            rule = f"the schedule in the file has {what} {own}, not {value}."
            raise UserError(rule, key=key, value=value, fix=f"{own}, or leave it out.")
    kind = SCHEDULES.get(schedule.name)
    if kind is not None and schedule.placement != kind.placement:
        raise UserError(
            f"schedule {schedule.name} places its chunks as {kind.placement!r}, not {schedule.placement!r}.",
            key="placement",
            value=schedule.placement,
            fix=f"{kind.placement!r}, or another name.",
        )


def _require_chunks(name: str, kind: Kind, chunks: int) -> None:
    low, high = kind.chunks
    if low <= chunks and (high is None or chunks <= high):
        return
    if high is None:
        text, fix = f"{low} or more chunks per rank", f"{low}, or schedule 1f1b."
    elif low == high == 1:
        text, fix = "one chunk per rank", "1, or schedule interleaved-1f1b."
    else:
        text, fix = f"exactly {low} chunks per rank", f"{low}."
    raise UserError(f"{name} has {text}, not {chunks}.", key="chunks", value=chunks, fix=fix)
