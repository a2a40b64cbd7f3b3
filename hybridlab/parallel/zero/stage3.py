"""ZeRO stage 3: weights, too, are held once in the data-parallel group, and borrowed just in time.

The unit of borrowing is a piece of the model (embedding, one layer, head). Before a piece runs, its weights are
gathered from the group; after it has run they are given back; before its backward they are gathered again. While a
piece computes, the next one's weights are already on their way. A micro-batch thus costs two all-gathers and one
reduce-scatter of the weights' size, half as much again as data parallelism, and a rank holds 1/n of the weights plus
two pieces.

Parameters too small to be worth the latency stay gathered (``persistence_threshold``); their optimizer states and
gradient sums are dealt out all the same, and they are gathered once after each update.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054 §5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybridlab import comm
from hybridlab.buckets import Bucket, Shard, Slot, split_tied
from hybridlab.comm import Pending
from hybridlab.parallel.zero.stage2 import TransientGradients

Run = Callable[[Tensor], Tensor]


class Stage3(TransientGradients):
    """A bucket per piece, whole only while the piece runs."""

    def __init__(
        self,
        *args: Any,
        persistence_threshold: int = 0,
        prefetch: bool = True,
        on_host: bool = False,
        master_on_host: bool = False,
        pin: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.persistence_threshold = persistence_threshold
        self.prefetch = prefetch
        self.on_host = on_host
        self.master_on_host = master_on_host
        self.pin = pin and self.device.type == "cuda"
        self._sharded: dict[int, Tensor] = {}
        self._arriving: dict[int, Pending] = {}
        self._users: dict[int, int] = {}
        self._absent: dict[int, Tensor] = {}
        self._small: set[nn.Parameter] = set()
        self.units: list[list[_Unit]] = []

    # -- laying out ------------------------------------------------------------
    def lay_out(self, chunk: nn.Module) -> list[Bucket]:
        """A bucket per piece, last piece first; then one of all small parameters; tied weights apart, as always."""
        plain, tied = split_tied(self.new_parameters(chunk))
        small = [p for p in plain if p.numel() <= self.persistence_threshold]
        aside = {id(p) for p in chunk.parameters()} - {id(p) for p in plain} | {id(p) for p in small}
        groups: list[list[nn.Parameter]] = []
        for piece in chunk.children():
            group = [p for p in piece.parameters() if id(p) not in aside]
            aside.update(id(p) for p in group)
            groups.insert(0, group)
        self._small |= set(small)
        return [Bucket.of(group, self.multiple) for group in [*groups, small[::-1], *([p] for p in tied)] if group]

    def add_chunk(self, chunk: nn.Module) -> None:
        """Also find which buckets each piece needs."""
        super().add_chunk(chunk)
        units = []
        for piece in chunk.children():
            needed = {id(b): b for b, _ in (self._home[id(p)] for p in piece.parameters()) if not self.persists(b)}
            units.append(_Unit(self, list(needed.values())))
        for unit, following in pairwise(units):
            unit.following, following.preceding = following, unit
        self.units.append(units)

    def persists(self, bucket: Bucket) -> bool:
        """Whether a bucket stays gathered."""
        return id(bucket) not in self._users

    def materialize(self, bucket: Bucket) -> Shard:
        """Only this rank's slice; a small bucket whole."""
        if bucket.slots[0].parameter in self._small:
            return self.keep_slice(bucket, self.mine(bucket, self.allocate_weights(bucket)))
        begin, end = self.my_slice(bucket)
        where: dict[str, Any] = {"device": "cpu", "pin_memory": self.pin} if self.on_host else {"device": self.device}
        weights = torch.zeros(end - begin, dtype=self.numbers.compute, **where)
        self._sharded[id(bucket)] = self.ledger.own(weights, "weights", "host" if self.on_host else "device")
        # What stands for weights that are not here: shaped like them, one element large, and loudly wrong if used.
        absent = torch.full((1,), float("nan"), dtype=self.numbers.compute, device=self.device)
        self._absent[id(bucket)] = self.ledger.own(absent, "other")
        self._users[id(bucket)] = 0
        return self.keep_slice(bucket, weights, elsewhere=self.on_host)

    def stand_in(self, bucket: Bucket, slot: Slot) -> Tensor:
        """Nothing, except for what stays gathered."""
        if self.persists(bucket):
            return super().stand_in(bucket, slot)
        return self._absent[id(bucket)].expand(slot.parameter.shape)

    # -- borrowing ------------------------------------------------------------
    def fetch(self, bucket: Bucket) -> None:
        """Start gathering a bucket unless it is here or on its way."""
        key = id(bucket)
        if bucket.weights is not None or key in self._arriving:
            return
        with self.ledger.category("buffers"):
            whole = torch.empty(bucket.numel, dtype=self.numbers.compute, device=self.device)
        shard = self.source(bucket)
        self._arriving[key] = comm.all_gather_async(shard, self.group, out=whole)

    def weights_on_host(self, shard: Shard) -> bool:
        """Parameter offload: all but the small ones, which stay gathered on the device."""
        return self.on_host and not self.persists(shard.bucket)

    def source(self, bucket: Bucket) -> Tensor:
        """This rank's slice of the weights, on the device; brought up from the host when it lives there."""
        slice_ = self._sharded[id(bucket)]
        if not self.on_host:
            return slice_
        with self.ledger.category("buffers"):
            here = torch.empty(slice_.shape, dtype=slice_.dtype, device=self.device)
        self.ledger.sent("to_device", "host", 1, slice_.nbytes, slice_.dtype)
        return here.copy_(slice_, non_blocking=self.pin)

    def hold(self, bucket: Bucket) -> None:
        """Have a bucket's weights here until `release`."""
        self.fetch(bucket)
        self._users[id(bucket)] += 1
        pending = self._arriving.pop(id(bucket), None)
        if pending is not None:
            bucket.weights = pending.wait()
            for slot in bucket.slots:
                slot.parameter.data = slot.view(bucket.weights)

    def release(self, bucket: Bucket) -> None:
        """Give a bucket's weights back once nobody holds it any more."""
        self._users[id(bucket)] -= 1
        if self._users[id(bucket)] == 0:
            bucket.weights = None
            absent = self._absent[id(bucket)]
            for slot in bucket.slots:
                slot.parameter.data = absent.expand(slot.parameter.shape)

    def wrap(self, chunk: int, piece: int, run: Run) -> Run:
        """``run`` with the piece's weights borrowed around its forward and its backward."""
        unit = self.units[chunk][piece]

        def borrowed(x: Tensor) -> Tensor:
            unit.enter()
            try:
                if not torch.is_grad_enabled():
                    return run(x)
                x = _AfterBackward.apply(x, unit) if x.is_floating_point() else x
                return _BeforeBackward.apply(run(x), unit)
            finally:  # recomputation may stop in the middle of a piece, by an exception of its own
                unit.leave()

        return borrowed

    def end_backward(self) -> None:
        """Give back what a piece without a differentiable input (the embedding) still holds."""
        for unit in self.units[self._chunk]:
            unit.end_backward()
        super().end_backward()

    def publish(self) -> None:
        """Gather what persists; the rest is gathered when it is needed."""
        with self.ledger.during("step"):
            if self.on_host and not self.master_on_host:
                for weights in self._sharded.values():
                    self.ledger.sent("to_host", "host", 1, weights.nbytes, weights.dtype)
            for bucket in self.buckets():
                if bucket.weights is not None:
                    comm.all_gather_async(self.mine(bucket, bucket.weights), self.group, out=bucket.weights).wait()


class _Unit:
    """The buckets one piece needs, and its neighbours in order of use."""

    def __init__(self, stage: Stage3, buckets: list[Bucket]) -> None:
        self.stage = stage
        self.buckets = buckets
        self.following: _Unit | None = None
        self.preceding: _Unit | None = None
        self._in_backward = False

    def _hold(self, next_unit: _Unit | None) -> None:
        with self.stage.ledger.during("gather"):
            for bucket in self.buckets:
                self.stage.hold(bucket)
            if self.stage.prefetch and next_unit is not None:
                for bucket in next_unit.buckets:
                    self.stage.fetch(bucket)

    def _release(self) -> None:
        for bucket in self.buckets:
            self.stage.release(bucket)

    def enter(self) -> None:
        """Before forward. One that is run again for its activations, in backward, fetches nothing ahead."""
        recomputing = torch._C._current_graph_task_id() != -1
        self._hold(None if recomputing else self.following)

    def leave(self) -> None:
        """After forward."""
        self._release()

    def begin_backward(self) -> None:
        """Before backward; once, even when the piece has several outputs or is run again by recomputation."""
        if not self._in_backward:
            self._in_backward = True
            self._hold(self.preceding)

    def end_backward(self) -> None:
        """After backward."""
        if self._in_backward:
            self._in_backward = False
            self._release()


class _BeforeBackward(torch.autograd.Function):
    """Identity on a piece's output: its backward runs before the piece's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, unit: _Unit) -> Tensor:
        ctx.unit = unit
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.unit.begin_backward()
        return grad, None


class _AfterBackward(torch.autograd.Function):
    """Identity on a piece's input: its backward runs when the piece's is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: _Unit) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.unit.end_backward()
        return grad, None
