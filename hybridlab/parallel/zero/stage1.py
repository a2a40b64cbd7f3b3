"""ZeRO stage 1: optimizer states are held once in the data-parallel group; weights and gradients stay whole.

An all-reduce is a reduce-scatter followed by an all-gather. Stage 1 puts the optimizer between the two: each rank
gets the sum of its slice only, updates it, and the *weights* are gathered. As many bytes as data parallelism, 1/n of
the states.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054 §5.1.
"""

from __future__ import annotations

from hybridlab import comm
from hybridlab.buckets import Bucket, Shard
from hybridlab.parallel.zero.partition import Partitioned


class Stage1(Partitioned):
    """Whole gradient buffers that live as long as the engine; one reduce-scatter a bucket at the step's end."""

    def materialize(self, bucket: Bucket) -> Shard:
        """Whole weights and gradients, the optimizer's part a slice of each."""
        weights = self.mine(bucket, self.allocate_weights(bucket))
        gradients = self.mine(bucket, self.allocate_gradients(bucket))
        begin, end = self.my_slice(bucket)
        return Shard(bucket, begin, end, weights, self.make_master(weights), gradients)

    def launch(self, bucket: Bucket) -> None:
        """Reduce-scatter in place: afterwards only this rank's slice of the buffer means anything."""
        assert bucket.gradients is not None
        out = self.mine(bucket, bucket.gradients)
        bucket.pending = comm.reduce_scatter_async(bucket.gradients, self.group, out=out)

    def complete(self) -> None:
        """Wait for the slices."""
        for bucket in self.buckets():
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
