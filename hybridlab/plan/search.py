"""Every legal layout of a cluster, priced and ranked: the fastest first, none that does not fit.

The search goes through all degrees whose product is the number of cards, all ZeRO stages, schedules, micro-batch sizes
and recomputation, asks the same rules as the config check (`legality`), drops what does not fit, and sorts by the
step's time in closed form. The event simulator then plays the best few. Left out because something listed is always
at least as good: tensor parallelism across nodes, and tensor without sequence parallelism where the sequence divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybridlab.plan import legality
from hybridlab.plan.cluster import Cluster
from hybridlab.plan.job import Job, Zero
from hybridlab.plan.layout import Layout, layouts_of
from hybridlab.plan.option import Option, price
from hybridlab.plan.split import choose_split
from hybridlab.shapes import ModelShape

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
MICRO_BATCH_SIZES = (1, 2, 4, 8)
ZERO_CHOICES = (Zero(0), Zero(1), Zero(2), Zero(2, "accumulate_then_scatter"), Zero(3))


@dataclass(frozen=True)
class Request:
    """What is to be trained.

    Attributes:
        batch: sequences per step, over all replicas.
        sequence: tokens of a sequence.
        offload: also consider keeping the optimizer in host memory.
    """

    shape: ModelShape
    batch: int
    sequence: int
    precision: str = "bf16"
    attention: str = "sdpa"
    recomputes: tuple[str, ...] = ("none", "full")
    offload: bool = False


def jobs(request: Request, cluster: Cluster, layouts: Iterable[Layout] | None = None) -> Iterator[Job]:
    """Every legal job, priced or not, whether it fits or not."""
    shape = request.shape
    for layout in layouts if layouts is not None else layouts_of(cluster.gpus):
        if layout.tp > cluster.gpus_per_node or request.batch % layout.dp:
            continue
        sliced = layout.tp > 1 and request.sequence % layout.tp == 0
        for schedule, chunks in _schedules(layout, shape):
            if legality.model_problems(
                shape,
                tp=layout.tp,
                pp=layout.pp,
                chunks=chunks,
                sequence_length=request.sequence,
                sequence_parallel=sliced,
            ):
                continue
            placement = legality.SCHEDULES[schedule].placement
            split, _ = choose_split(shape, layout.pp, chunks, placement)
            for size in MICRO_BATCH_SIZES:
                count, rest = divmod(request.batch, layout.dp * size)
                if rest or not count or legality.micro_batches(schedule, count, layout.pp):
                    continue
                for zero in _zeros(request, layout, count):
                    for recompute in request.recomputes:
                        yield Job(
                            shape=shape,
                            layout=layout,
                            micro_batch_size=size,
                            micro_batches=count,
                            sequence_length=request.sequence,
                            precision=request.precision,
                            zero=zero,
                            schedule=schedule,
                            virtual_stages=chunks,
                            split=split,
                            sequence_parallel=sliced,
                            recompute=recompute,
                            attention=request.attention,
                        )


def _schedules(layout: Layout, shape: ModelShape) -> Iterator[tuple[str, int]]:
    if layout.pp == 1:
        yield "1f1b", 1
        return
    for name in SCHEDULES:
        low, high = legality.SCHEDULES[name].chunks
        for chunks in (low, 2 * low) if high is None else (low,):
            if chunks == 1 or shape.layers % (layout.pp * chunks) == 0:
                yield name, chunks


def _zeros(request: Request, layout: Layout, micro_batches: int) -> Iterator[Zero]:
    offloads = (False, True) if request.offload else (False,)
    for zero in ZERO_CHOICES if layout.dp > 1 else ZERO_CHOICES[:1]:
        if zero.stage == 2 and not zero.every_micro_batch and micro_batches == 1:
            continue  # both policies are the same
        for offload in offloads:
            if offload and zero.stage == 0:
                if layout.dp > 1:
                    continue
                zero = Zero(1)  # a shard of one: all of it
            yield Zero(zero.stage, zero.gradient_policy, offload_optimizer=offload)


def search(request: Request, cluster: Cluster, *, top: int | None = None, simulate: int = 0) -> list[Option]:
    """Options that fit, fastest first.

    Args:
        top: how many to return; None: all.
        simulate: how many of the best the event simulator plays; they are then sorted among themselves.
    """
    from hybridlab.plan.quick import Quick

    quick = Quick(cluster)
    found = [option for job in jobs(request, cluster) if (option := quick.price(job)) is not None]
    found.sort(key=lambda option: (option.time.step, option.peak.total))
    best = [price(option.job, cluster) for option in found[:simulate]]
    best.sort(key=lambda option: (option.time.step, option.peak.total))
    return (best + found[simulate:])[:top]


def pareto(options: Iterable[Option]) -> list[Option]:
    """Options that no other beats in both memory and time, fastest first."""
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o.time.step, o.peak.total)):
        if not front or option.peak.total < front[-1].peak.total:
            front.append(option)
    return front
