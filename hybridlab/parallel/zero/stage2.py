"""ZeRO stage 2: gradients, too, are held once in the data-parallel group.

With several micro-batches "held once" can mean two things, and the choice is a trade of memory against traffic:

* ``scatter_every_microbatch``: a bucket exists only while backward fills it; it is reduce-scattered at once and its
  slice added to this rank's. Gradient memory is 1/n plus the buckets in flight; the gradients travel m times a step.
* ``accumulate_then_scatter``: gradients of all micro-batches add up in whole local buffers, and are scattered once at
  the step's end. The traffic of stage 1; the memory of stage 1 until that moment, 1/n after.

DeepSpeed does the first and therefore refuses pipelines at stage 2; torch's FSDP under a pipeline does the second.
Source: Rajbhandari et al., ZeRO, arXiv:1910.02054 §5.2; DeepSpeed#4164.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from hybridlab import comm
from hybridlab.buckets import Bucket, Shard, Slot
from hybridlab.parallel.zero.partition import Partitioned


class TransientGradients(Partitioned):
    """Whole gradients exist only bucket by bucket; what stays is this rank's slice of their sum."""

    every_micro_batch = True
    _in_flight: deque[Bucket]

    def keep_slice(self, bucket: Bucket, weights: Tensor, *, elsewhere: bool = False) -> Shard:
        """A shard with its own gradient accumulator. ``elsewhere``: the weights are not where the optimizer is."""
        begin, end = self.my_slice(bucket)
        gradient = torch.zeros(end - begin, dtype=self.numbers.gradient, device=self.device)
        self.ledger.own(gradient, "gradients")
        master = self.make_master(weights, elsewhere=elsewhere)
        return Shard(bucket, begin, end, weights, master, gradient)

    def add_chunk(self, chunk: nn.Module) -> None:
        """As for any replica; shards are found by their bucket when a reduction completes."""
        super().add_chunk(chunk)
        self._in_flight = deque()
        self._shard_of = {id(shard.bucket): shard for shard in self.shards}

    def begin_step(self) -> None:
        """Zero the accumulators."""
        super().begin_step()
        for shard in self.shards:
            assert shard.gradient is not None
            shard.gradient.zero_()

    def reduces_now(self) -> bool:
        """Every backward, or a chunk's last."""
        return self.every_micro_batch or self._last

    def add(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        """Add to the bucket, which comes to life with its first gradient."""
        if bucket.pending is not None:  # still under way from the micro-batch before
            self._in_flight.remove(bucket)
            self._take_slice(bucket)
        if bucket.gradients is None:
            self._allocate(bucket)
        super().add(bucket, slot, gradient)

    def _allocate(self, bucket: Bucket) -> None:
        category = "buffers" if self.every_micro_batch else "gradients"
        if self.every_micro_batch and len(self._in_flight) > 1:
            self._take_slice(self._in_flight.popleft())  # at most one under way while another fills
        with self.ledger.category(category):
            bucket.gradients = torch.zeros(bucket.numel, dtype=self.numbers.gradient, device=self.device)

    def launch(self, bucket: Bucket) -> None:
        """Reduce-scatter in place."""
        if bucket.pending is not None:
            self._in_flight.remove(bucket)
            self._take_slice(bucket)
        if bucket.gradients is None:  # no gradient here; the other replicas may have one
            self._allocate(bucket)
        assert bucket.gradients is not None
        out = self.mine(bucket, bucket.gradients)
        bucket.pending = comm.reduce_scatter_async(bucket.gradients, self.group, out=out)
        self._in_flight.append(bucket)

    def _take_slice(self, bucket: Bucket) -> None:
        """Add the summed slice to this rank's and give the whole back."""
        assert bucket.pending is not None and bucket.gradients is not None
        bucket.pending.wait()
        gradient = self._shard_of[id(bucket)].gradient
        assert gradient is not None
        gradient.add_(self.mine(bucket, bucket.gradients) if self.group.size > 1 else bucket.gradients)
        bucket.pending = bucket.gradients = None

    def complete(self) -> None:
        """Complete what is under way."""
        while self._in_flight:
            self._take_slice(self._in_flight.popleft())


class Stage2(TransientGradients):
    """Whole weights, one slice of the gradients."""

    def __init__(self, *args: object, every_micro_batch: bool, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.every_micro_batch = every_micro_batch

    def materialize(self, bucket: Bucket) -> Shard:
        """Whole weights; the gradient accumulator as long as the slice."""
        return self.keep_slice(bucket, self.mine(bucket, self.allocate_weights(bucket)))
