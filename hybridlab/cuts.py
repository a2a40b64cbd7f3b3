"""How tensor parallelism cuts the parameters of a model: rules as data, and the arithmetic of who holds which rows.

A *plan* maps patterns of module names to a cut. It is all that tensor parallelism needs to know about a model: the
model itself is written for one device. The engine applies a plan (`hybridlab.parallel.tensor`), the planner counts
with it.

    plan = {"layers.*.attention.qkv": Column(Block(rows=96, units=4), Block(rows=48, units=2), Block(rows=48, units=2)),
            "layers.*.attention.out": Row(),
            "embed.tokens": Vocab()}

Source of the scheme: Megatron-LM, arXiv:1909.08053 §3; key/value heads fewer than ranks: the heads are repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hybridlab.shapes import ModelShape


@dataclass(frozen=True)
class Span:
    """Rows (or columns) ``start .. stop`` of a logical parameter, held by ``copies`` tensor-parallel ranks.

    Attributes:
        counted: true on exactly one of those ranks, whose copy counts in norms and is written to checkpoints.
        partial: each holder computes only a part of the gradient; the parts are owed a SUM over the holders.
    """

    start: int
    stop: int
    copies: int = 1
    counted: bool = True
    partial: bool = False


@dataclass(frozen=True)
class Block:
    """Rows of a fused projection that are cut on their own: ``units`` indivisible pieces (heads) of equal height."""

    rows: int
    units: int


@dataclass(frozen=True, init=False)
class Column:
    """A linear layer whose output features are dealt out. No blocks: all rows are one block of single-row units."""

    blocks: tuple[Block, ...]

    def __init__(self, *blocks: Block) -> None:
        object.__setattr__(self, "blocks", blocks)


@dataclass(frozen=True)
class Row:
    """A linear layer whose input features are dealt out; its partial outputs are summed, its bias added after."""


@dataclass(frozen=True)
class Vocab:
    """An embedding or output layer dealt out by vocabulary, padded so that every rank holds as many rows."""

    multiple: int = 1


@dataclass(frozen=True)
class Positions:
    """A table of positions: whole on every rank; under sequence parallelism each looks up its own positions only."""


Cut = Column | Row | Vocab | Positions
TensorPlan = Mapping[str, Cut]


def cut_of(plan: TensorPlan, module_name: str) -> Cut | None:
    """The cut whose pattern matches, or None: the module's parameters are then whole on every rank."""
    return next((cut for pattern, cut in plan.items() if fnmatchcase(module_name, pattern)), None)


def tensor_plan(shape: ModelShape, vocab_multiple: int = 1) -> dict[str, Cut]:
    """The plan for the decoders of `hybridlab.models`."""
    queries = Block(shape.heads * shape.head_dim, shape.heads)
    keys_or_values = Block(shape.kv_heads * shape.head_dim, shape.kv_heads)
    plan: dict[str, Cut] = {
        "embed.tokens": Vocab(vocab_multiple),
        "embed.positions": Positions(),
        "layers.*.attention.qkv": Column(queries, keys_or_values, keys_or_values),
        "layers.*.attention.out": Row(),
        "layers.*.mlp.down": Row(),
        "head.lm_head": Vocab(vocab_multiple),
    }
    if shape.gated:
        plan["layers.*.mlp.gate_up"] = Column(Block(shape.ffn, shape.ffn), Block(shape.ffn, shape.ffn))
    else:
        plan["layers.*.mlp.up"] = Column()
    return plan


def column_spans(cut: Column, rows: int, size: int, rank: int) -> tuple[Span, ...]:
    """The rows that ``rank`` of ``size`` holds. Units fewer than ranks are held by several of them.

    Raises:
        ValueError: neither the number of units nor the number of ranks divides the other.
    """
    spans, start = [], 0
    for block in cut.blocks or (Block(rows, rows),):
        height = block.rows // block.units
        if block.units % size == 0:
            share = block.units // size * height
            spans.append(Span(start + rank * share, start + (rank + 1) * share))
        elif size % block.units == 0:
            copies = size // block.units
            unit = rank // copies
            first = rank % copies == 0
            spans.append(Span(start + unit * height, start + (unit + 1) * height, copies, first, partial=True))
        else:
            raise ValueError(f"{block.units} heads cannot be dealt to tp={size} ranks: neither divides the other")
        start += block.rows
    if start != rows:
        raise ValueError(f"the blocks of the plan cover {start} rows, the layer has {rows}")
    return tuple(spans)


def row_spans(columns: int, size: int, rank: int) -> tuple[Span, ...]:
    """The input features that ``rank`` of ``size`` holds."""
    if columns % size:
        raise ValueError(f"{columns} input features cannot be dealt to tp={size} ranks")
    share = columns // size
    return (Span(rank * share, (rank + 1) * share),)


def padded_vocab(vocab: int, size: int, multiple: int = 1) -> int:
    """Rows of the vocabulary with padding: the next multiple of ``size * multiple``."""
    step = size * multiple
    return -(-vocab // step) * step


def vocab_spans(vocab: int, size: int, rank: int, multiple: int = 1) -> tuple[tuple[Span, ...], int]:
    """The vocabulary rows that ``rank`` holds and how many rows of padding follow them."""
    share = padded_vocab(vocab, size, multiple) // size
    start, stop = min(rank * share, vocab), min((rank + 1) * share, vocab)
    return (Span(start, stop),), share - (stop - start)
