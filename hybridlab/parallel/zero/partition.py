"""What the ZeRO stages share: each bucket is dealt out evenly over the data-parallel group.

Rank r's optimizer owns the r-th slice of every bucket. Slices cut through parameters; that is no harm to optimizers
that work element by element, and whatever must know which elements are what (norms, checkpoints) asks the bucket.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054 §5.
"""

from __future__ import annotations

from torch import Tensor

from hybridlab import comm
from hybridlab.buckets import Bucket, Replica


class Partitioned(Replica):
    """Optimizer states (stage 1), gradients too (stage 2), weights too (stage 3) are held once in the group."""

    def my_slice(self, bucket: Bucket) -> tuple[int, int]:
        """The elements of ``bucket`` that this rank owns."""
        share = bucket.numel // self.group.size
        return self.group.rank * share, (self.group.rank + 1) * share

    def mine(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """This rank's slice of a buffer as long as the bucket."""
        begin, end = self.my_slice(bucket)
        return flat[begin:end]

    def publish(self) -> None:
        """All-gather the updated weights, in place: each slice already lies where it belongs."""
        with self.ledger.during("step"):
            gathers = []
            for bucket in self.buckets():
                assert bucket.weights is not None
                gathers.append(comm.all_gather_async(self.mine(bucket, bucket.weights), self.group, out=bucket.weights))
            for gather in gathers:
                gather.wait()
