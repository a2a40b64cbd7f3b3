"""The batch triple: any of three numbers may be missing, and train = micro * accumulation * dp must hold.

======================  ====================================  ====================================
given                   pp = 1, as DeepSpeed                  pp > 1
======================  ====================================  ====================================
all three               checked                               the same
train, micro            accumulation = train / (micro * dp)   the same
train, accumulation     micro = train / (accumulation * dp)   the same
micro, accumulation     train = micro * accumulation * dp     the same
train                   accumulation = 1, micro = train / dp  micro = 1, accumulation = train / dp
micro                   accumulation = 1, train = micro * dp  the same
accumulation, or none   refused                               the same
======================  ====================================  ====================================

dp is the number of replicas, world / (tp * pp), never the world. Divisions must come out even: DeepSpeed divides with
truncation and lets an assertion on the product catch it.

The one difference, at pp > 1: with accumulation = 1 a single micro-batch walks through the pipeline and all stages but
one are idle, always. So the batch is cut into micro-batches of one sequence instead, which makes the bubble smallest.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridlab.plan import legality
from hybridlab.plan.legality import ACCUMULATION, BATCH, MICRO, Problem


@dataclass(frozen=True)
class Triple:
    """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class Settled:
    """The triple or why there is none.

    Attributes:
        triple: None when ``problem`` says why.
        chosen: (key, value, why) of each number that was derived.
        deepspeed: what DeepSpeed does instead, or "".
    """

    triple: Triple | None
    problem: Problem | None = None
    chosen: tuple[tuple[str, int, str], ...] = ()
    deepspeed: str = ""


def settle(train: int | None, micro: int | None, accumulation: int | None, dp: int, pp: int = 1) -> Settled:
    """Complete the triple for ``dp`` replicas and ``pp`` stages. None: not given. Given numbers are at least 1."""
    if train is not None and micro is not None and accumulation is not None:
        return _checked(Triple(train, micro, accumulation), dp)
    if train is not None and micro is not None:
        return _divided(train, MICRO, micro, ACCUMULATION, dp)
    if train is not None and accumulation is not None:
        return _divided(train, ACCUMULATION, accumulation, MICRO, dp)
    if micro is not None:
        return _multiplied(micro, accumulation, dp, pp)
    if train is not None:
        return _only_train(train, dp, pp)
    return Settled(None, _nothing(accumulation, dp))


def deepspeed(train: int | None, micro: int | None, accumulation: int | None, dp: int) -> tuple[Triple | None, str]:
    """DeepSpeed 0.19.8's own triple at ``dp`` replicas, or None and the reason it stops."""
    if train is not None and micro is not None and accumulation is None:
        accumulation = train // micro // dp
    elif train is not None and micro is None:
        accumulation = accumulation if accumulation is not None else 1
        micro = train // dp // accumulation
    elif train is None and micro is not None:
        accumulation = accumulation if accumulation is not None else 1
        train = micro * accumulation * dp
    if train is None or micro is None or accumulation is None:
        return None, "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"
    for name, number in (("Micro batch size per gpu", micro), ("Gradient accumulation steps", accumulation)):
        if number <= 0:
            return None, f"{name}: {number} has to be greater than 0"
    if train != micro * accumulation * dp:
        return None, f"{train} != {micro} * {accumulation} * {dp}"
    return Triple(train, micro, accumulation), ""


def _checked(triple: Triple, dp: int) -> Settled:
    problem = legality.batch(triple.train, triple.micro, triple.accumulation, dp)
    return Settled(None, problem) if problem else Settled(triple)


def _divided(train: int, name: str, divisor: int, missing: str, dp: int) -> Settled:
    """``missing`` = train / (divisor * dp)."""
    unit = divisor * dp
    if train % unit == 0:
        share = train // unit
        triple = Triple(train, divisor, share) if name == MICRO else Triple(train, share, divisor)
        short = "micro" if name == MICRO else "accumulation"
        return Settled(triple, chosen=((missing, share, f"train / ({short} * dp) = {train} / ({divisor} * {dp})"),))
    near = [n for n in (train // unit * unit, (train // unit + 1) * unit) if n]
    legal = legality.nearest(divisor, legality.divisors(train // dp)) if train % dp == 0 else ()
    fix = f"{BATCH} {' or '.join(map(str, near))}"
    if legal:
        fix += f", or {name} {' or '.join(map(str, legal))}"
    else:
        fix += f", or leave out {BATCH}"
    return Settled(
        None,
        Problem(
            (BATCH, name),
            train,
            f"{BATCH} {train} is not a multiple of {name} {divisor} * dp {dp} = {unit}, "
            f"so no whole {missing} completes it.",
            f"{fix}.",
            tuple(near),
        ),
    )


def _multiplied(micro: int, accumulation: int | None, dp: int, pp: int) -> Settled:
    steps = 1 if accumulation is None else accumulation
    train = micro * steps * dp
    chosen = [(BATCH, train, f"micro * accumulation * dp = {micro} * {steps} * {dp}")]
    if accumulation is None:
        why = "not given: 1, as DeepSpeed"
        if pp > 1:
            why += f"; one micro-batch leaves each of the {pp} stages idle {pp - 1}/{pp} of the time"
        chosen.append((ACCUMULATION, 1, why))
    return Settled(Triple(train, micro, steps), chosen=tuple(chosen))


def _only_train(train: int, dp: int, pp: int) -> Settled:
    if train % dp:
        near = [n for n in (train // dp * dp, (train // dp + 1) * dp) if n]
        text = f"{BATCH} {train} is not a multiple of dp {dp}: no {MICRO} * {ACCUMULATION} completes it."
        fix = f"{BATCH} {' or '.join(map(str, near))}, or {MICRO} {max(1, train // dp)} and leave out {BATCH}."
        return Settled(None, Problem((BATCH,), train, text, fix, tuple(near)))
    share = train // dp
    if pp == 1:
        why = f"only {BATCH} is given: one micro-batch, as DeepSpeed"
        return Settled(
            Triple(train, share, 1),
            chosen=((ACCUMULATION, 1, why), (MICRO, share, f"train / dp = {train} / {dp}")),
        )
    idle_one, idle_all = f"{pp - 1}/{pp}", f"{pp - 1}/{share + pp - 1}"
    why = (
        f"only {BATCH} is given and pp={pp}: micro-batches of one sequence keep the pipeline fullest "
        f"(1F1B idles {idle_all} of the time)"
    )
    return Settled(
        Triple(train, 1, share),
        chosen=((MICRO, 1, why), (ACCUMULATION, share, f"train / (micro * dp) = {train} / (1 * {dp})")),
        deepspeed=f"takes {MICRO} {share}, {ACCUMULATION} 1: one micro-batch, each stage idle {idle_one} of the time",
    )


def _nothing(accumulation: int | None, dp: int) -> Problem:
    if accumulation is None:
        text = f"neither {BATCH} nor {MICRO} is given ({ACCUMULATION} neither)."
        fix = f"{MICRO} 1, or {BATCH} {dp}."
    else:
        text = (
            f"{ACCUMULATION} {accumulation} alone does not say how large a batch is: {BATCH} and {MICRO} are missing."
        )
        fix = f"{MICRO} 1, or {BATCH} {accumulation * dp}."
    return Problem((BATCH, MICRO, ACCUMULATION), None, text, fix, ())
