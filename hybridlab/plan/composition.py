"""Which strategies compose, as a table: allowed, allowed at a cost, or refused, each with its reasons.

The refusals are the rules of `hybridlab.plan.legality`, the very ones the config check raises. The costs are what the
planner prices in bytes and seconds; here they are said in words, for the book and for `plan --config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from hybridlab.plan import legality

OFFLOADS = ("none", "optimizer", "optimizer+param")
RECOMPUTES = ("none", "selective", "full")
VERDICTS = ("allowed", "allowed at a cost", "refused")


@dataclass(frozen=True)
class Composition:
    """One combination of strategies.

    Attributes:
        zero: ZeRO stage 0..3.
        schedule: a name from `legality.SCHEDULES`; a pipeline of one stage has none.
        offload: one of `OFFLOADS`.
        recompute: one of `RECOMPUTES`.
        virtual_stages: chunks per rank; None: the schedule's default.
        micro_batches: m; None: not known, rules about it are not checked.
        gradient_policy: None: the stage's default.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    offload: str = "none"
    recompute: str = "none"
    virtual_stages: int | None = None
    micro_batches: int | None = None
    gradient_policy: str | None = None

    @property
    def chunks(self) -> int:
        """Model chunks per rank."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return legality.SCHEDULES[self.schedule].default_chunks if self.pp > 1 else 1

    @property
    def policy(self) -> str:
        return self.gradient_policy or legality.GRADIENT_POLICIES[self.zero][0]


@dataclass(frozen=True)
class Verdict:
    """What becomes of a combination.

    Attributes:
        status: one of `VERDICTS`.
        reasons: for "refused" the rules broken with their fixes; for "allowed at a cost" the costs; for "allowed"
            remarks, mostly empty.
        problems: the broken rules as data, empty unless refused.
    """

    status: str
    reasons: tuple[str, ...]
    problems: tuple[legality.Problem, ...] = ()


def judge(c: Composition) -> Verdict:
    """Allowed, allowed at a cost, or refused, and why.

    Raises:
        KeyError: a schedule that is not in `legality.SCHEDULES`.
    """
    problems = tuple(_problems(c))
    if problems:
        return Verdict("refused", tuple(f"{p.rule} Fix: {p.fix}" for p in problems), problems)
    costs = tuple(_costs(c))
    if costs:
        return Verdict("allowed at a cost", costs)
    return Verdict("allowed", tuple(_remarks(c)))


def table(
    tps: Iterable[int] = (1, 2),
    pps: Iterable[int] = (1, 2),
    dps: Iterable[int] = (1, 2),
    zeros: Iterable[int] = (0, 1, 2, 3),
    schedules: Iterable[str] = tuple(legality.SCHEDULES),
    offloads: Iterable[str] = OFFLOADS,
    recomputes: Iterable[str] = RECOMPUTES,
) -> Iterator[tuple[Composition, Verdict]]:
    """Every combination with its verdict. At pp=1 there is no schedule to choose: only the first is listed."""
    schedules = tuple(schedules)
    for tp, pp, dp, zero in product(tps, pps, dps, zeros):
        for schedule, offload, recompute in product(schedules if pp > 1 else schedules[:1], offloads, recomputes):
            c = Composition(tp, pp, dp, zero, schedule, offload, recompute)
            yield c, judge(c)


def _problems(c: Composition) -> Iterator[legality.Problem]:
    found = [legality.gradient_policy(c.zero, c.policy)]
    if c.pp > 1:
        found.append(legality.virtual_stages(c.schedule, c.chunks))
        if c.micro_batches is not None:
            found.append(legality.micro_batches(c.schedule, c.micro_batches, c.pp))
    if c.offload != "none":
        found.append(legality.offload_optimizer(c.zero))
    if c.offload == "optimizer+param":
        found.append(legality.offload_param(c.zero))
    return (problem for problem in found if problem is not None)


def _costs(c: Composition) -> Iterator[str]:
    m = "m" if c.micro_batches is None else str(c.micro_batches)
    accumulates = c.micro_batches != 1  # pipelines live on several micro-batches
    if c.tp > 1:
        yield "TP: two all-reduces per layer and micro-batch in forward, two in backward; keep tp inside a node"
    if c.pp > 1:
        yield f"PP: a bubble, (pp-1)/(m+pp-1) of the step under 1F1B; here pp={c.pp}, m={m}"
        if legality.SCHEDULES[c.schedule].cost:
            yield f"{c.schedule}: {legality.SCHEDULES[c.schedule].cost}"
    if c.dp > 1 and c.zero == 2 and accumulates:
        if c.policy == "scatter_every_microbatch":
            yield f"ZeRO-2: gradients are reduce-scattered for every micro-batch, {m} times the volume of ZeRO-1"
        else:
            yield "ZeRO-2, accumulate_then_scatter: traffic of ZeRO-1, but whole gradients are held during the step"
    if c.dp > 1 and c.zero == 3:
        yield "ZeRO-3: weights are gathered in forward and again in backward, 1.5 times the traffic of ZeRO-0"
        if c.pp > 1:
            yield f"ZeRO-3 with PP: weights are gathered and gradients scattered again for each of {m} micro-batches"
    if c.offload != "none":
        yield "offload: gradient shards go to the host and weights come back every step; Adam runs on the CPU"
    if c.offload == "optimizer+param":
        yield "offload_param: weights come over PCIe for every forward and every backward"
    if c.recompute == "full":
        yield "full recomputation: one more forward, about a third more compute"
    elif c.recompute == "selective":
        yield "selective recomputation: attention is computed twice, a few percent more compute"


def _remarks(c: Composition) -> Iterator[str]:
    if c.zero and c.dp == 1:
        yield f"ZeRO-{c.zero} shards over dp=1: it changes nothing"
