"""Optimizer offload: master weights and optimizer states live in host memory, and the update happens there.

On the way down travels the gradient of this rank's shard, once a step, in the gradient dtype; on the way up the
updated weights in the compute dtype. On a GPU both are asynchronous copies from and to pinned memory on a stream of
their own: shard by shard, the update of one overlaps with the copies of the others. On a machine whose device *is*
the host, the same copies are made between two places of its memory, so that what is counted is what a GPU would send.

The update rule is the very same as without offload (DeepSpeed#493).
Source: Ren et al., ZeRO-Offload, arXiv:2101.06840 §4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridlab.buckets import Shard
from hybridlab.ledger import Ledger


@dataclass(eq=False)
class HostShard(Shard):
    """A shard whose ``master`` is on the host; ``gradient`` stays the device's sum, `collect` returns the host's
    copy."""

    ledger: Ledger | None = None
    host_gradient: Tensor | None = None
    weights_on_host: bool = False
    copies: torch.cuda.Stream | None = None
    arrived: torch.cuda.Event | None = None

    def begin_collect(self) -> None:
        """Start copying the gradient down."""
        assert self.gradient is not None and self.host_gradient is not None and self.ledger is not None
        self.ledger.sent("to_host", "host", 1, self.gradient.nbytes, self.gradient.dtype)
        if self.copies is None:
            self.host_gradient.copy_(self.gradient)
            return
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.host_gradient.copy_(self.gradient, non_blocking=True)
            self.arrived = self.copies.record_event()

    def collect(self) -> Tensor:
        """The gradient on the host; waits for its copy."""
        assert self.host_gradient is not None
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        return self.host_gradient

    def write_back(self) -> None:
        """Send the updated weights up, rounded to the compute dtype first: half the bytes. Weights that live on the
        host themselves (parameter offload) stay there."""
        assert self.ledger is not None
        if self.weights_on_host:
            self.weights.copy_(self.master)
            return
        self.ledger.sent("to_device", "host", 1, self.weights.nbytes, self.weights.dtype)
        rounded = self.master.to(self.weights.dtype)
        self.weights.copy_(rounded.pin_memory() if self.copies is not None else rounded, non_blocking=True)


def offload(
    shard: Shard, ledger: Ledger, *, pin: bool, copies: torch.cuda.Stream | None, weights_on_host: bool = False
) -> HostShard:
    """The same shard with its master weights on the host, in the master's dtype.

    Args:
        pin: page-locked host memory, which a GPU can copy from and to while it computes; without a GPU it means
        nothing. copies: the stream for copies; None where the device is the host.
    """
    pin = pin and copies is not None
    assert shard.gradient is not None
    master = torch.zeros(shard.master.shape, dtype=shard.master.dtype, pin_memory=pin)
    gradient = torch.zeros(shard.gradient.shape, dtype=shard.gradient.dtype, pin_memory=pin)
    ledger.own(master, "master_weights", "host")
    ledger.own(gradient, "gradients", "host")
    return HostShard(
        shard.bucket,
        shard.begin,
        shard.end,
        shard.weights,
        master,
        shard.gradient,
        shard.intervals,
        ledger=ledger,
        host_gradient=gradient,
        weights_on_host=weights_on_host,
        copies=copies,
    )
