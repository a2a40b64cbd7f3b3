"""Which flat buckets a rank's parameters lie in, and what that means for the sizes of messages and shards.

The same packing as the engine's (`hybridlab.packing`): parameters of a model chunk in reverse order of registration, a
bucket closed when the next parameter would overfill it; at ZeRO-3 a bucket per piece, and one for the parameters too
small to be worth gathering each time. From stage 1 on a bucket is padded so that the data-parallel ranks own equal
slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridlab.packing import pack, padded
from hybridlab.plan.job import Job
from hybridlab.plan.parameters import LocalParameter, stage_pieces


@dataclass(frozen=True)
class Bucket:
    """Parameters in a row.

    Attributes:
        parameters: in their order.
        numel: elements, padding included.
        piece: at ZeRO-3 the index of the piece within the chunk whose unit it is; -1 for other buckets.
        persistent: at ZeRO-3, holds the small parameters, which stay gathered.
        tied: holds an embedding tied across stages.
        late: its gradients come from two chunks of this rank, so it is reduced after all backwards.
    """

    parameters: tuple[LocalParameter, ...]
    numel: int
    piece: int = -1
    persistent: bool = False
    tied: bool = False
    late: bool = False

    @staticmethod
    def of(parameters: list[LocalParameter], multiple: int, **marks: int | bool) -> Bucket:
        """Lay parameters one after the other, padded to a multiple."""
        numel = padded(sum(p.numel for p in parameters), multiple)
        return Bucket(tuple(parameters), numel, tied=parameters[0].tied, **marks)  # type: ignore[arg-type]

    def partial(self, copies: int, begin: int, end: int) -> int:
        """Elements in ``begin .. end`` whose gradient is a part of a sum owed over ``copies`` ranks."""
        total, offset = 0, 0
        for parameter in self.parameters:
            for low, high, held_by in parameter.partial:
                if held_by == copies:
                    total += max(0, min(offset + high, end) - max(offset + low, begin))
            offset += parameter.numel
        return total


def lay_out(job: Job, pp: int) -> list[list[Bucket]]:
    """The buckets of each model chunk of a pipeline rank, in the order they are sent."""
    # A tied weight that both chunks bring is the first one's; it moves out of line to the end of the step.
    twice = job.shape.tied and not job.tied_apart and job.virtual_stages > 1
    chunks = [_lay_out(job, stage_pieces(job, stage)) for stage in job.stages_of(pp)]
    if twice and pp == 0:
        holder = next(i for i, b in enumerate(chunks[0]) if any(p.name == "tokens.weight" for p in b.parameters))
        bucket = chunks[0][holder]
        chunks[0][holder] = Bucket(
            bucket.parameters, bucket.numel, bucket.piece, bucket.persistent, bucket.tied, late=True
        )
    return chunks


def _lay_out(job: Job, pieces: list[list[LocalParameter]]) -> list[Bucket]:
    multiple = job.layout.dp if job.zero.stage else 1
    pieces = [[p for p in piece if not p.shared] for piece in pieces]
    flat = [p for piece in pieces for p in piece if not p.tied]
    tied = [p for piece in pieces for p in piece if p.tied]
    if job.zero.stage < 3:
        flat.reverse()
        groups = [[flat[i] for i in found] for found in pack([p.numel for p in flat], job.zero.reduce_bucket_size)]
        found = [Bucket.of(group, multiple) for group in groups]
    else:
        limit = job.zero.persistence_threshold
        found = []
        for index in reversed(range(len(pieces))):
            large = [p for p in pieces[index] if not p.tied and p.numel > limit]
            if large:
                found.append(Bucket.of(large, multiple, piece=index))
        small = [p for p in flat if p.numel <= limit][::-1]
        if small:
            found.append(Bucket.of(small, multiple, persistent=True))
    return [*found, *(Bucket.of([p], multiple) for p in tied)]


def all_buckets(job: Job, pp: int) -> Iterator[Bucket]:
    """Every bucket of a pipeline rank."""
    for chunk in lay_out(job, pp):
        yield from chunk


def share(job: Job, bucket: Bucket) -> int:
    """Elements of a bucket that one rank's optimizer updates."""
    return bucket.numel // job.layout.dp if job.zero.stage else bucket.numel
