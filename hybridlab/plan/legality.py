"""What may be combined with what, and what must divide what: one small function per rule.

The config check raises these, the planner's search filters by them, the book prints them. A rule returns None when it
is kept, else a `Problem`: the sentence with the numbers, and the nearest values that would be legal.

Standard library only: it also runs in a browser's Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt, log2
from typing import TYPE_CHECKING, Any

from hybridlab.errors import UserError
from hybridlab.plan.layout import Layout, layouts_of

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape

TP, PP, DP = "tensor_parallel.tp_size", "pipeline_parallel.pp_size", "data_parallel.dp_size"
SCHEDULE, CHUNKS = "pipeline_parallel.schedule", "pipeline_parallel.virtual_stages"
SPLIT, PLACEMENT = "pipeline_parallel.split", "pipeline_parallel.placement"
STAGE, POLICY = "zero_optimization.stage", "zero_optimization.gradient_policy"
SEQUENCE = "hybridlab.sequence_length"
BATCH, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class Problem:
    """A rule that is broken.

    Attributes:
        keys: the config keys that take part; the first is the one to look at.
        value: the value of the first key.
        rule: the rule with the numbers in it, a full sentence.
        fix: the nearest values that keep the rule, in words.
        nearest: the same values as data, for the planner; may be empty.
    """

    keys: tuple[str, ...]
    value: Any
    rule: str
    fix: str
    nearest: tuple[Any, ...] = ()

    def error(self) -> UserError:
        return UserError(self.rule, key=self.keys[0], value=self.value, fix=self.fix)


@dataclass(frozen=True)
class ScheduleRule:
    """What a pipeline schedule asks of the layout.

    Attributes:
        chunks: the smallest and largest number of model chunks per rank (None: no upper bound).
        default_chunks: when the config does not say.
        placement: how chunks lie on ranks: "loop" (round and round) or "v" (there and back).
        per_stage: micro-batches must be a multiple of the stages.
        cost: what it costs against 1F1B, in words; "" for nothing.
    """

    chunks: tuple[int, int | None] = (1, 1)
    default_chunks: int = 1
    placement: str = "loop"
    per_stage: bool = False
    cost: str = ""


SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(cost="every stage keeps the activations of all m micro-batches"),
    "1f1b": ScheduleRule(),
    "interleaved-1f1b": ScheduleRule(
        (2, None), 2, per_stage=True, cost="v times the point-to-point messages; stage 0 keeps more activations"
    ),
    "zb-h1": ScheduleRule(cost="the inputs and output gradients of each layer wait for their weight gradient"),
    "zb-h2": ScheduleRule(cost="about twice the activations of 1F1B"),
    "zb-v": ScheduleRule((2, 2), 2, "v", cost="twice the point-to-point messages of 1F1B"),
}
GRADIENT_POLICIES: dict[int, tuple[str, ...]] = {
    0: ("accumulate_then_scatter",),
    1: ("accumulate_then_scatter",),
    2: ("scatter_every_microbatch", "accumulate_then_scatter"),
    3: ("scatter_every_microbatch",),
}
"""By ZeRO stage; the first is the default. Stage 0 has no shards: its gradients are all-reduced, once a step."""


def divisors(n: int) -> list[int]:
    """The divisors of n >= 1, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest(value: int, legal: Iterable[int]) -> tuple[int, ...]:
    """The closest legal values below and above ``value``."""
    values = sorted(set(legal))
    below = [v for v in values if v < value][-1:]
    above = [v for v in values if v > value][:1]
    return tuple(below + above)


def _or(values: Sequence[Any]) -> str:
    return " or ".join(str(value) for value in values)


# ---- the grid of ranks ----------------------------------------------------------------------------------------------


def grid(world: int, tp: int, pp: int, dp: int | None = None) -> Problem | None:
    """dp*tp*pp is the number of ranks; dp is what tp*pp leaves."""
    keys: tuple[str, ...] = (TP, PP)
    value = tp
    if dp is not None and dp * tp * pp != world:
        keys, value = (DP, TP, PP), dp
        text = f"dp*tp*pp = {dp}*{tp}*{pp}={dp * tp * pp} != {world}, the number of ranks."
    elif tp * pp > world:
        text = f"dp*tp*pp = 1*{tp}*{pp}={tp * pp} != {world}, the number of ranks."
    elif world % (tp * pp):
        text = f"tp*pp = {tp}*{pp}={tp * pp} does not divide the {world} ranks."
    else:
        return None
    close = nearest_layouts(world, tp, pp)
    unit = (dp or 1) * tp * pp
    ranks = [n for n in (world // unit * unit, (world // unit + 1) * unit) if n] if dp is None else [unit]
    choices = ", ".join(f"tp {c.tp} · pp {c.pp} (dp {c.dp})" for c in close)
    return Problem(keys, value, text, f"run on {_or(ranks)} ranks, or on {world} choose {choices}.", tuple(close))


def nearest_layouts(world: int, tp: int, pp: int, count: int = 3) -> list[Layout]:
    """The layouts of ``world`` ranks closest to the degrees asked for, by how often one must double or halve."""
    return sorted(layouts_of(world), key=lambda c: (abs(log2(c.tp / tp)) + abs(log2(c.pp / pp)), c.tp * c.pp, c.tp))[
        :count
    ]


def batch(batch_size: int, micro: int, accumulation: int, dp: int) -> Problem | None:
    """train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp."""
    if batch_size == micro * accumulation * dp:
        return None
    product = micro * accumulation * dp
    fixes = [f"{BATCH} {product}"]
    if batch_size % (micro * dp) == 0:
        fixes.append(f"{ACCUMULATION} {batch_size // (micro * dp)}")
    if batch_size % (accumulation * dp) == 0:
        fixes.append(f"{MICRO} {batch_size // (accumulation * dp)}")
    if len(fixes) == 1:
        fixes.append(f"leave out {BATCH}")
    return Problem(
        (BATCH, MICRO, ACCUMULATION),
        batch_size,
        f"{BATCH} {batch_size} is not {MICRO} {micro} * {ACCUMULATION} {accumulation} * dp {dp} = {product}.",
        f"{_or(fixes)}.",
        (product,),
    )


# ---- what tensor parallelism must divide ----------------------------------------------------------------------------


def heads(count: int, tp: int) -> Problem | None:
    """tp divides the attention heads: each rank computes whole heads."""
    if count % tp == 0:
        return None
    near = nearest(tp, divisors(count))
    return Problem((TP,), tp, f"tp={tp} does not divide the {count} attention heads.", f"tp_size {_or(near)}.", near)


def kv_heads(count: int, tp: int, queries: int | None = None) -> Problem | None:
    """tp divides the key/value heads, or they divide tp and are repeated on neighbours.

    Args:
        queries: the attention heads, so that only values of tp legal for both are offered.
    """
    if count % tp == 0 or tp % count == 0:
        return None
    legal = [d for d in divisors(queries or count) if count % d == 0 or d % count == 0]
    near = nearest(tp, legal)
    return Problem(
        (TP,),
        tp,
        f"tp={tp} neither divides the {count} key/value heads nor is a multiple of {count}.",
        f"tp_size {_or(near)}.",
        near,
    )


def ffn(width: int, tp: int) -> Problem | None:
    """tp divides the width of the MLP."""
    if width % tp == 0:
        return None
    near = nearest(tp, divisors(width))
    return Problem((TP,), tp, f"tp={tp} does not divide the MLP width {width}.", f"tp_size {_or(near)}.", near)


def sequence(length: int, tp: int, sequence_parallel: bool) -> Problem | None:
    """Under sequence parallelism tp divides the sequence length: uneven slices would hang a collective."""
    if not sequence_parallel or length % tp == 0:
        return None
    near = tuple(n for n in (length // tp * tp, (length // tp + 1) * tp) if n)
    return Problem(
        (SEQUENCE, TP),
        length,
        f"sequence length {length} is not a multiple of tp={tp}, as sequence_parallel needs.",
        f"{SEQUENCE} {_or(near)}, or sequence_parallel false.",
        near,
    )


def positions(length: int, table: int, kind: str) -> Problem | None:
    """With learned positions a sequence is no longer than their table. (Rotary positions have no table.)"""
    if kind != "learned" or length <= table:
        return None
    return Problem(
        (SEQUENCE,),
        length,
        f"sequence length {length} is longer than the model's {table} learned positions.",
        f"{SEQUENCE} {table} or less.",
        (table,),
    )


def window(length: int, size: int | None) -> Problem | None:
    """A model with a sliding attention window takes sequences up to the window: there it is full attention."""
    if size is None or length <= size:
        return None
    return Problem(
        (SEQUENCE,),
        length,
        f"sequence length {length} is longer than the model's attention window of {size}, which is not implemented.",
        f"{SEQUENCE} {size} or less.",
        (size,),
    )


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def layers(count: int, pp: int, chunks: int = 1) -> Problem | None:
    """Every virtual stage holds at least one layer: layers >= pp * virtual_stages."""
    if count >= pp * chunks:
        return None
    near = nearest(pp, range(1, count // chunks + 1))[:1]
    fix = f"pp_size {near[0]} or less" if near else f"virtual_stages {count} or less"
    product = f"pp*virtual_stages = {pp}*{chunks}={pp * chunks}" if chunks > 1 else f"pp={pp}"
    return Problem((PP, CHUNKS), pp, f"{count} layers cannot fill {product} stages, one layer each.", f"{fix}.", near)


def split(given: Sequence[int], layer_count: int | None, pp: int, chunks: int = 1) -> Problem | None:
    """A split gives the layers of every virtual stage: pp*virtual_stages numbers, each at least 1, summing to all."""
    stages = pp * chunks
    if len(given) != stages:
        text = f"the split has {len(given)} numbers, the pipeline pp*virtual_stages = {pp}*{chunks}={stages} stages."
    elif min(given) < 1:
        text = "a stage of the split has no layer."
    elif layer_count is not None and sum(given) != layer_count:
        text = f"the split sums to {'+'.join(map(str, given))}={sum(given)}, the model has {layer_count} layers."
    else:
        return None
    fix = "leave it out: the split is then chosen"
    example: tuple[int, ...] = ()
    if layer_count is not None and layer_count >= stages:
        share, rest = divmod(layer_count, stages)
        example = tuple(share + (stage < rest) for stage in range(stages))
        fix += f", or {list(example)}"
    return Problem((SPLIT, PP, CHUNKS), list(given), text, f"{fix}.", (example,) if example else ())


def virtual_stages(name: str, chunks: int) -> Problem | None:
    """Each schedule fixes or bounds the chunks per rank: interleaving needs 2 or more, zb-v exactly 2, others 1."""
    low, high = SCHEDULES[name].chunks
    if low <= chunks and (high is None or chunks <= high):
        return None
    if high is None:
        text, fix = (
            f"{name} needs {low} or more chunks per rank, not {chunks}.",
            f"virtual_stages {low}, or schedule 1f1b",
        )
    elif low == high == 1:
        text, fix = f"{name} has one chunk per rank, not {chunks}.", "virtual_stages 1, or schedule interleaved-1f1b"
    else:
        text, fix = f"{name} has exactly {low} chunks per rank, not {chunks}.", f"virtual_stages {low}"
    return Problem((CHUNKS, SCHEDULE), chunks, text, f"{fix}.", (low,))


def placement(name: str, given: str) -> Problem | None:
    """Where the chunks lie belongs to the schedule: "v" for zb-v, "loop" for the others."""
    own = SCHEDULES[name].placement
    if given == own:
        return None
    other = "zb-v" if given == "v" else "interleaved-1f1b"
    return Problem(
        (PLACEMENT, SCHEDULE),
        given,
        f"schedule {name} places its chunks as {own!r}, not {given!r}.",
        f"placement {own!r} (or leave it out), or schedule {other}.",
        (own,),
    )


def micro_batches(name: str, count: int, pp: int) -> Problem | None:
    """Interleaving deals micro-batches in rounds of pp: gradient_accumulation_steps is a multiple of pp."""
    if pp == 1 or not SCHEDULES[name].per_stage or count % pp == 0:
        return None
    near = tuple(n for n in (count // pp * pp, (count // pp + 1) * pp) if n)
    return Problem(
        (ACCUMULATION, SCHEDULE, PP),
        count,
        f"{name} needs {ACCUMULATION} (here {count} micro-batches) to be a multiple of pp={pp}.",
        f"{ACCUMULATION} {_or(near)}, or schedule 1f1b.",
        near,
    )


# ---- ZeRO and offload -----------------------------------------------------------------------------------------------


def offload_optimizer(stage: int) -> Problem | None:
    """Optimizer offload moves a rank's *shard* of the optimizer to the host: it needs ZeRO stage 1, 2 or 3."""
    if stage >= 1:
        return None
    return Problem(
        ("zero_optimization.offload_optimizer.device", STAGE),
        "cpu",
        "offload_optimizer needs ZeRO stage 1, 2 or 3; the stage is 0, which shards nothing.",
        "stage 1, or offload_optimizer.device none.",
        (1,),
    )


def offload_param(stage: int) -> Problem | None:
    """Parameter offload moves a rank's shard of the weights to the host: only stage 3 has one."""
    if stage == 3:
        return None
    return Problem(
        ("zero_optimization.offload_param.device", STAGE),
        "cpu",
        f"offload_param needs ZeRO stage 3, which shards the parameters; the stage is {stage}.",
        "stage 3, or remove offload_param.",
        (3,),
    )


def gradient_policy(stage: int, policy: str) -> Problem | None:
    """When gradients are scattered follows from what the stage promises about memory; only stage 2 has a choice."""
    legal = GRADIENT_POLICIES[stage]
    if policy in legal:
        return None
    text = {
        0: "stage 0 keeps whole gradients and reduces them once a step",
        1: "stage 1 keeps whole gradients and scatters them once a step",
    }.get(stage, f"stage {stage} promises sharded gradients")
    return Problem(
        (POLICY, STAGE), policy, f"{text}; {policy} belongs to stage 2.", f"{legal[0]}, or stage 2.", (legal[0],)
    )


# ---- everything a model asks of a layout ----------------------------------------------------------------------------


def model_problems(
    shape: ModelShape,
    *,
    tp: int,
    pp: int,
    chunks: int = 1,
    sequence_length: int | None = None,
    sequence_parallel: bool = False,
    layer_split: Sequence[int] | None = None,
) -> list[Problem]:
    """Every rule that a model's widths break at this layout; the planner's search keeps a layout iff there is none."""
    found = [
        heads(shape.heads, tp),
        kv_heads(shape.kv_heads, tp, shape.heads),
        ffn(shape.ffn, tp),
        layers(shape.layers, pp, chunks),
    ]
    if sequence_length is not None:
        found.append(sequence(sequence_length, tp, sequence_parallel))
        found.append(positions(sequence_length, shape.max_positions, shape.positions))
        found.append(window(sequence_length, shape.sliding_window))
    if layer_split is not None:
        found.append(split(layer_split, shape.layers, pp, chunks))
    return [problem for problem in found if problem is not None]
