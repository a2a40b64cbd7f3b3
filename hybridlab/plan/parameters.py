"""Which parameters a rank holds, and how many elements of each: the model's pieces in the engine's order.

A model is a chain of pieces: "embed", its layers, "head". Tensor parallelism cuts some parameters of a piece by the
rules the engine uses (`hybridlab.cuts`): matrices by columns or rows, the vocabulary with padding, key/value heads
fewer than ranks held by several of them. What it does not cut (norms, biases added after a sum, position tables) every
rank holds whole: in memory it counts tp times, in the model's size once (the two published sizes of GPT-NeoX-20B differ
by exactly this: 20,556,201,984 counts norms and biases of both tp ranks, 20,554,567,680 is the model).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from hybridlab.cuts import Column, Row, Span, Vocab, column_spans, cut_of, row_spans, tensor_plan, vocab_spans
from hybridlab.shapes.shape import embed_parameters, head_parameters, layer_parameters

if TYPE_CHECKING:
    from hybridlab.plan.job import Job
    from hybridlab.shapes import ModelShape


@dataclass(frozen=True)
class LocalParameter:
    """One parameter as one rank holds it.

    Attributes:
        name: within its piece, e.g. "attention.qkv.weight".
        numel: elements held, vocabulary padding included.
        partial: stretches ``(begin, end, copies)`` of it whose gradient is a part of a sum owed over ``copies`` ranks.
        tied: an embedding that is tied across pipeline stages; it lies in a bucket of its own.
        shared: a tied output weight that is the embedding's very tensor (both ends of the model on one rank).
    """

    name: str
    numel: int
    partial: tuple[tuple[int, int, int], ...] = ()
    tied: bool = False
    shared: bool = False


def logical_parameters(shape: ModelShape, piece: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names within a piece ("embed", "layer", "head") and logical shapes, in order of registration.

    The head's output matrix is listed for tied models too: on a last stage apart from the first it is a second copy.
    """
    listed = {"embed": embed_parameters, "layer": layer_parameters, "head": head_parameters}[piece](shape)
    found = [(p.name.removeprefix(f"{piece}."), p.shape) for p in listed]
    if piece == "head" and shape.tied:
        found.append(("lm_head.weight", (shape.vocab, shape.hidden)))
    return found


def _spans(
    name: str, logical: tuple[int, ...], piece: str, shape: ModelShape, tp: int, rank: int, multiple: int
) -> tuple[tuple[Span, ...], int, int] | None:
    """What a rank holds along the cut dimension: its spans, rows of padding, elements of one row. None: all of it."""
    module, _, leaf = name.rpartition(".")
    prefix = "layers.0." if piece == "layer" else f"{piece}."
    cut = cut_of(tensor_plan(shape, multiple), prefix + module)
    rest = logical[1] if len(logical) > 1 else 1
    if isinstance(cut, Vocab):
        spans, padding = vocab_spans(logical[0], tp, rank, multiple)
        return spans, padding, rest
    if isinstance(cut, Column):
        return column_spans(cut, logical[0], tp, rank), 0, rest
    if isinstance(cut, Row) and leaf == "weight":
        return row_spans(logical[1], tp, rank), 0, logical[0]
    return None


@lru_cache(maxsize=4096)
def piece_parameters(
    shape: ModelShape, piece: str, tp: int = 1, sequence_parallel: bool = False, vocab_multiple: int = 1
) -> tuple[LocalParameter, ...]:
    """A piece's parameters as every tp rank holds them (all hold equally many elements).

    Args:
        piece: "embed", "layer" or "head".
        sequence_parallel: uncut parameters then see only a slice of the sequence: their gradients are partial.
    """
    found = []
    for name, logical in logical_parameters(shape, piece):
        held = _spans(name, logical, piece, shape, tp, 0, vocab_multiple)
        if held is None:
            numel = prod(logical)
            partial: tuple[tuple[int, int, int], ...] = ((0, numel, tp),) if sequence_parallel and tp > 1 else ()
        else:
            spans, padding, row = held
            begin, stretches = 0, []
            for span in spans:
                end = begin + (span.stop - span.start) * row
                if span.partial:
                    stretches.append((begin, end, span.copies))
                begin = end
            numel, partial = begin + padding * row, tuple(stretches)
        found.append(LocalParameter(name, numel, partial))
    return tuple(found)


def count(shape: ModelShape, tp: int = 1) -> int:
    """Elements of the whole model, the same at every tp: what is held by several ranks counts once."""
    total = 0
    for piece, times in (("embed", 1), ("layer", shape.layers), ("head", 1)):
        for name, logical in logical_parameters(shape, piece):
            if name == "lm_head.weight" and shape.tied:
                continue
            numel = 0
            for rank in range(tp):
                held = _spans(name, logical, piece, shape, tp, rank, 1)
                if held is None:
                    numel = prod(logical)
                else:
                    numel += sum((span.stop - span.start) * held[2] for span in held[0] if span.counted)
            total += times * numel
    return total


def stage_pieces(job: Job, stage: int) -> list[list[LocalParameter]]:
    """The parameters of a virtual stage, piece by piece: the embedding on the first, the head on the last."""
    shape, tp = job.shape, job.layout.tp

    def piece(name: str) -> list[LocalParameter]:
        return list(piece_parameters(shape, name, tp, job.slices_sequence, job.vocab_multiple))

    pieces = [piece("layer") for _ in job.layers_of(stage)]
    tied = shape.tied and job.layout.pp > 1
    if stage == 0:
        pieces.insert(0, _mark(piece("embed"), "tokens.weight", tied=tied))
    if stage == job.stages - 1:
        shared = shape.tied and not job.tied_apart
        pieces.append(_mark(piece("head"), "lm_head.weight", tied=tied, shared=shared))
    return pieces


def _mark(parameters: list[LocalParameter], name: str, *, tied: bool, shared: bool = False) -> list[LocalParameter]:
    return [LocalParameter(p.name, p.numel, p.partial, tied, shared) if p.name == name else p for p in parameters]


def rank_parameters(job: Job, pp: int) -> int:
    """Elements a rank computes with: its stages' parameters, vocabulary padding included, a shared tensor once."""
    return sum(
        p.numel for stage in job.stages_of(pp) for piece in stage_pieces(job, stage) for p in piece if not p.shared
    )
