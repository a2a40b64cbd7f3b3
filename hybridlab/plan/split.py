"""Which stage holds how many layers: the even split, and the balanced one when layers do not divide.

The embedding rides on the first stage and the output head on the last. They weigh as much as some layers, so the end
stages get fewer layers than the middle ones when there is a choice. Every stage keeps at least one layer: a stage
without parameters breaks the collectives of a step (DeepSpeed#1522, nanotron#108).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape

PARTITIONS = ("best", "uniform", "parameters")


def rank_of_stage(stage: int, pp: int, placement: str) -> int:
    """The pipeline rank that holds virtual stage ``stage``: round and round ("loop"), or there and back ("v")."""
    if placement == "v":
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as equal as they can be; the first stages take the remainder."""
    share, rest = divmod(layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages))


def balanced_split(
    layers: int, pp: int, chunks: int = 1, placement: str = "loop", ends: tuple[float, float] = (0.0, 0.0)
) -> tuple[int, ...]:
    """Layers per virtual stage such that the heaviest rank is as light as possible.

    Each further layer goes to the lightest rank, there to the lightest of its stages; of equals the earliest. All
    layers weigh the same, so this greedy order is also the optimum for the heaviest rank.

    Args:
        layers: at least ``pp * chunks``.
        pp: ranks along the pipeline.
        chunks: virtual stages per rank.
        placement: see `rank_of_stage`.
        ends: the weight of the embedding and of the head, in layers.
    """
    stages = pp * chunks
    weight = [1.0] * stages
    weight[0] += ends[0]
    weight[-1] += ends[1]
    rank = [rank_of_stage(stage, pp, placement) for stage in range(stages)]
    load = [0.0] * pp
    for stage in range(stages):
        load[rank[stage]] += weight[stage]
    split = [1] * stages
    for _ in range(layers - stages):
        stage = min(range(stages), key=lambda s: (load[rank[s]], weight[s], s))
        split[stage] += 1
        weight[stage] += 1.0
        load[rank[stage]] += 1.0
    return tuple(split)


def end_weights(shape: ModelShape) -> tuple[float, float]:
    """The embedding and the output head in units of one layer, by parameters. Norms and biases are left out.

    Parameters stand for cost: they decide memory exactly, and the time of the head's matrix product. (Looking up an
    embedding takes almost no time; its table, gradient and optimizer state still fill the first stage.)
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = (3 if shape.gated else 2) * shape.hidden * shape.ffn
    table = shape.vocab * shape.hidden
    layer = attention + mlp
    return (table + shape.position_rows * shape.hidden) / layer, table / layer


def choose_split(
    shape: ModelShape, pp: int, chunks: int, placement: str, partition: str = "best"
) -> tuple[tuple[int, ...], str]:
    """The split for a model and the reason for it.

    Args:
        partition: "uniform" (equal counts), "parameters" (balanced, also where layers divide), or "best": equal counts
            where layers divide, as everyone expects, and balanced where they do not.
    """
    stages = pp * chunks
    if stages == 1:
        return (shape.layers,), "one stage holds every layer"
    if partition == "uniform" or (partition == "best" and shape.layers % stages == 0):
        return even_split(shape.layers, stages), f"{shape.layers} layers over {stages} stages, equal counts"
    ends = end_weights(shape)
    return (
        balanced_split(shape.layers, pp, chunks, placement, ends),
        f"{shape.layers} layers over {stages} stages, balanced by parameters: the embedding weighs as much as "
        f"{ends[0]:.2g} layers, the head {ends[1]:.2g}",
    )
