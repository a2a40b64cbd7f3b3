"""The layout, the pipeline's schedule and the split of the layers, from the sections that speak of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridlab.config.batch import Triple, deepspeed, settle
from hybridlab.config.draft import Draft
from hybridlab.config.read import show
from hybridlab.plan import legality
from hybridlab.plan.layout import Layout
from hybridlab.plan.legality import ACCUMULATION, BATCH, CHUNKS, DP, MICRO, PP, SCHEDULES, SEQUENCE, SPLIT, TP
from hybridlab.plan.split import choose_split, even_split

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape

AUTOTP, TP_TP, STAGES = "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "pipeline.stages"
DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True)
class Pipe:
    """How the layers are dealt out and in which order stages work."""

    schedule: str = "1f1b"
    virtual_stages: int = 1
    split: tuple[int, ...] = ()


def layout(draft: Draft) -> Layout | None:
    """dp, tp and pp; None when they do not fit the world (the draft then says why)."""
    tp = _one_value(draft, (TP, AUTOTP, TP_TP), off=0)
    pp = _one_value(draft, (PP, STAGES))
    dp = draft.config.data_parallel.dp_size if draft.given(DP) else None
    if tp is None or pp is None or DP in draft.bad or not draft.check(legality.grid(draft.world, tp, pp, dp)):
        return None
    found = Layout(draft.world // (tp * pp), tp, pp)
    if dp is None:
        draft.choose("dp", found.dp, f"world / (tp * pp) = {draft.world} / ({tp} * {pp})")
    return found


def _one_value(draft: Draft, spellings: tuple[str, ...], off: int | None = None) -> int | None:
    """The degree that one of several keys gives, 1 when none does, None when they are wrong or disagree."""
    if any(path in draft.bad for path in spellings):
        return None
    found: dict[str, int] = {path: draft.value(path) for path in spellings if draft.given(path)}
    found = {path: 1 if value == off else value for path, value in found.items()}
    if len(set(found.values())) > 1:
        (first, value), (second, other) = list(found.items())[:2]
        if value == other:
            second, other = list(found.items())[2]
        draft.refuse(
            second,
            f"{other}, but {draft.spelled(first)} says {value}: two spellings of one degree.",
            "keep one of them.",
            first,
        )
        return None
    if not found:
        return 1
    path, value = next(iter(found.items()))
    if path != spellings[0]:
        draft.alias[spellings[0]] = draft.spelled(path)
    return value


def triple(draft: Draft, grid: Layout) -> Triple | None:
    """The batch triple; None when it does not come out (the draft then says why)."""
    keys = (BATCH, MICRO, ACCUMULATION)
    if any(key in draft.bad for key in keys):
        return None
    train, micro, accumulation = (draft.value(key) if draft.given(key) else None for key in keys)
    autos = [key for key in keys if key in draft.autos]
    if train is None and micro is None and autos:
        _needs_numbers(draft, autos, accumulation, grid.dp)
        return None
    settled = settle(train, micro, accumulation, grid.dp, grid.pp)
    if not draft.check(settled.problem):
        return None
    for key, value, why in settled.chosen:
        draft.choose(key, value, why)
    if settled.deepspeed:
        draft.differs(BATCH, settled.deepspeed)
    elif autos and deepspeed(train, micro, accumulation, grid.dp)[0] is not None:
        draft.differs(draft.spelled(autos[0]), 'dies of a type error when "auto" is left at the top level')
    return settled.triple


def _needs_numbers(draft: Draft, autos: list[str], accumulation: int | None, dp: int) -> None:
    """One error for all numbers that only a trainer could have filled in."""
    waiting = [draft.spelled(key) for key in autos]
    settled = [key for key in draft.filled if "." not in key]
    rest = "".join(f" ({draft.spelled(key)} would become {show(draft.value(key))}.)" for key in settled)
    rule = f'"auto" leaves {_and(waiting)} to a trainer, and there is none: a number is needed.{rest}'
    example = 1 if accumulation is None else accumulation
    fix = f"{MICRO} 1 in the file, or --set {MICRO}=1 ({BATCH} is then 1 * {example} * dp {dp} = {dp * example})."
    first, *also = autos
    draft.refuse(first, rule, fix, *also)
    draft.differs(waiting[0], 'dies of a type error when "auto" is left at the top level')


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def sequence_length(draft: Draft) -> int:
    """Tokens per sequence: as given, else what the model takes, at most `DEFAULT_SEQUENCE`."""
    given = draft.config.hybridlab.sequence_length
    if given is not None:
        return given
    if draft.shape is None:
        draft.choose(SEQUENCE, DEFAULT_SEQUENCE, "not given, and no model is given")
        return DEFAULT_SEQUENCE
    most = min(draft.shape.max_positions, draft.shape.sliding_window or draft.shape.max_positions)
    length = min(DEFAULT_SEQUENCE, most)
    draft.choose(SEQUENCE, length, f"not given: the model's {most}, at most {DEFAULT_SEQUENCE}")
    return length


def pipe(draft: Draft, grid: Layout, accumulation: int | None) -> Pipe | None:
    """Schedule, chunks and split; None when they do not fit (the draft then says why)."""
    section = draft.config.pipeline_parallel
    if any(path in draft.bad for path in (CHUNKS, SPLIT, legality.SCHEDULE, legality.PLACEMENT, PP)):
        return None
    if grid.pp == 1:
        whole: tuple[int, ...] = (draft.shape.layers,) if draft.shape is not None else ()
        if section.split is not None and draft.shape is not None:
            draft.check(legality.split(section.split, draft.shape.layers, 1, 1))
        return Pipe(split=whole)
    name, chunks = _schedule(draft)
    found = [legality.virtual_stages(name, chunks)]
    if section.placement is not None:
        found.append(legality.placement(name, section.placement))
    if accumulation is not None:
        found.append(legality.micro_batches(name, accumulation, grid.pp))
    if not draft.check(*found):
        return None
    layers = _split(draft, grid.pp, chunks, SCHEDULES[name].placement)
    return None if layers is None else Pipe(name, chunks, layers)


def _schedule(draft: Draft) -> tuple[str, int]:
    section = draft.config.pipeline_parallel
    name = section.schedule
    if name is None:
        name = "interleaved-1f1b" if (section.virtual_stages or 1) > 1 else "1f1b"
        why = "virtual_stages asks for interleaving" if name != "1f1b" else "not given"
        draft.choose(legality.SCHEDULE, name, why)
    chunks = section.virtual_stages
    if chunks is None:
        chunks = SCHEDULES[name].default_chunks
        if chunks > 1:
            draft.choose(CHUNKS, chunks, f"not given: what {name} needs at least")
    return name, chunks


def _split(draft: Draft, pp: int, chunks: int, placement: str) -> tuple[int, ...] | None:
    given, partition = draft.config.pipeline_parallel.split, draft.config.pipeline.partition
    shape: ModelShape | None = draft.shape
    if given is not None and partition not in (None, "best", _partition_of(given, pp * chunks)):
        draft.refuse(
            SPLIT,
            f"the layers are given, but {draft.spelled('pipeline.partition')} says {partition}: two answers.",
            "keep one of them.",
            "pipeline.partition",
        )
        return None
    if given is not None:
        layer_count = shape.layers if shape is not None else None
        return tuple(given) if draft.check(legality.split(given, layer_count, pp, chunks)) else None
    if shape is None:
        draft.not_checked.append("layers >= pp*virtual_stages, and the split of the layers: needs the model")
        return ()
    if not draft.check(legality.layers(shape.layers, pp, chunks)):
        return None
    found, why = choose_split(shape, pp, chunks, placement, partition or "best")
    draft.choose(SPLIT, list(found), why)
    return found


def _partition_of(split: tuple[int, ...], stages: int) -> str | None:
    """The partition method that a given split agrees with."""
    return "uniform" if split == even_split(sum(split), stages) else None


def widths(draft: Draft, grid: Layout, length: int) -> None:
    """What tp must divide."""
    parallel = draft.config.tensor_parallel.sequence_parallel
    bad_length = SEQUENCE in draft.bad
    if not bad_length:
        draft.check(legality.sequence(length, grid.tp, parallel))
    shape = draft.shape
    if shape is None:
        draft.not_checked.append("attention heads, key/value heads and MLP width % tp: needs the model")
        draft.not_checked.append("sequence length <= learned positions: needs the model")
        return
    draft.check(
        legality.heads(shape.heads, grid.tp),
        legality.kv_heads(shape.kv_heads, grid.tp, shape.heads),
        legality.ffn(shape.ffn, grid.tp),
        None if bad_length else legality.positions(length, shape.max_positions, shape.positions),
        None if bad_length else legality.window(length, shape.sliding_window),
    )
