"""Data parallelism: every rank holds the whole model and sees other samples; gradients are summed over the group.

The sum is an all-reduce of each bucket, started as soon as the bucket's last gradient has arrived, while backward
goes on with the layers below. Gradients of all micro-batches are added up locally first: only the last backward of a
step sends. Works for any ``nn.Module``: it knows parameters and gradients, not layers.

Per step and rank: one all-reduce of each bucket; on a ring 2(n-1)/n of the gradient bytes are sent.
Source: Li et al., PyTorch Distributed, arXiv:2006.15704 §3.2.
"""

from __future__ import annotations

from hybridlab import comm
from hybridlab.buckets import Bucket, Replica, Shard


class DataParallel(Replica):
    """ZeRO stage 0: weights, gradients and optimizer states whole on every rank."""

    @property
    def multiple(self) -> int:
        """Nothing is dealt out, so nothing is padded."""
        return 1

    def materialize(self, bucket: Bucket) -> Shard:
        """Everything whole; the optimizer here updates all of it."""
        weights = self.allocate_weights(bucket)
        gradients = self.allocate_gradients(bucket)
        return Shard(bucket, 0, bucket.numel, weights, self.make_master(weights), gradients)

    def launch(self, bucket: Bucket) -> None:
        """All-reduce the bucket."""
        assert bucket.gradients is not None
        bucket.pending = comm.all_reduce_async(bucket.gradients, self.group)

    def complete(self) -> None:
        """Wait for the sums."""
        for bucket in self.buckets():
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
