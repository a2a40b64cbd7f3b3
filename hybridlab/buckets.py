"""Flat buckets of parameters and the common course of their gradients through one step.

Parameters of a model chunk lie one after the other in buckets, in reverse order of registration: about the order in
which backward finishes their gradients. A bucket whose gradients are all there is reduced over the data-parallel
group while backward goes on. Which collective that is, when, and what is kept, is what plain data parallelism and the
ZeRO stages differ in; they share everything in this file.

Buckets are launched in a fixed order. If they went as gradients arrive, two replicas whose graphs differ would sum
different buckets with each other, silently (DeepSpeed#2343).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybridlab.comm import Pending
from hybridlab.ledger import Ledger
from hybridlab.mesh import Group
from hybridlab.packing import pack, padded
from hybridlab.placement import Interval, place, placement_of


@dataclass
class Slot:
    """Where a parameter lies in its bucket: elements ``begin .. end``."""

    parameter: nn.Parameter
    begin: int
    end: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer, in its shape."""
        return flat[self.begin : self.end].view(self.parameter.shape)


@dataclass(eq=False)
class Bucket:
    """Some parameters in a row. ``numel`` counts the zeros at the end that make it divisible."""

    slots: list[Slot]
    numel: int
    weights: Tensor | None = None
    gradients: Tensor | None = None
    pending: Pending | None = None
    missing: set[int] = field(default_factory=set)

    @property
    def tied(self) -> bool:
        """Whether it holds one copy of an embedding tied across stages."""
        return is_tied(self.slots[0].parameter)

    @staticmethod
    def of(parameters: Sequence[nn.Parameter], multiple: int) -> Bucket:
        """Lay parameters one after the other, padded to a multiple."""
        slots, begin = [], 0
        for parameter in parameters:
            slots.append(Slot(parameter, begin, begin + parameter.numel()))
            begin += parameter.numel()
        return Bucket(slots, padded(begin, multiple))

    def intervals(self, begin: int, end: int) -> list[Interval]:
        """What the elements ``begin .. end`` are parts of, counted from ``begin``; padding is part of nothing."""
        found = []
        for slot in self.slots:
            placement = placement_of(slot.parameter)
            for low, high, span in placement.intervals(slot.parameter.shape):
                clipped = Interval(slot.begin + low, slot.begin + high, span, placement).clip(begin, end)
                if clipped is not None:
                    found.append(clipped)
        return found


@dataclass(eq=False)
class Shard:
    """The part of a bucket that this rank's optimizer updates.

    Attributes:
        weights: the elements ``begin .. end`` of the bucket in the compute dtype.
        master: the same in the optimizer's dtype; the very same tensor when the dtypes agree.
        gradient: the summed gradient of these elements; valid once the step's reductions are finished.
    """

    bucket: Bucket
    begin: int
    end: int
    weights: Tensor
    master: Tensor
    gradient: Tensor | None = None
    intervals: list[Interval] = field(default_factory=list)

    def begin_collect(self) -> None:
        """The gradient is final: start bringing it to where the optimizer is."""

    def collect(self) -> Tensor:
        """The gradient for the optimizer, where the optimizer is."""
        assert self.gradient is not None, "the reduction has not finished"
        return self.gradient

    def write_back(self) -> None:
        """Round the updated master weights into the compute dtype."""
        if not same_memory(self.weights, self.master):
            self.weights.copy_(self.master)


@dataclass(frozen=True)
class Numbers:
    """The dtypes of one precision: compute (weights, activations), gradient (accumulated, reduced), master."""

    compute: torch.dtype
    gradient: torch.dtype
    master: torch.dtype


class Replica(ABC):
    """One data-parallel rank's weights and gradients through a step. A chunk is one pipeline stage's parameters.

    Order of calls in a step: `begin_step`; for each backward of a chunk `begin_backward`, then gradients arrive, then
    `end_backward`; `finish`; the optimizer updates the `shards`; `publish`.
    """

    def __init__(self, group: Group, numbers: Numbers, device: torch.device, bucket_size: int) -> None:
        self.group = group
        self.numbers = numbers
        self.device = device
        self.bucket_size = bucket_size
        self.ledger: Ledger = group.ledger
        self.chunks: list[list[Bucket]] = []
        self.shards: list[Shard] = []
        self._home: dict[int, tuple[Bucket, Slot]] = {}
        self._living: dict[nn.Parameter, nn.Parameter] = {}
        self._next: list[int] = []
        self._late: list[Bucket] = []
        self._chunk = 0
        self._last = False
        self._counting = True

    # -- laying out ------------------------------------------------------------
    @property
    def multiple(self) -> int:
        """What a bucket's length must divide by."""
        return self.group.size

    def add_chunk(self, chunk: nn.Module) -> None:
        """Take over a chunk. Its parameters are on the meta device and come to life here, uninitialised.

        A tied weight that an earlier chunk brought already (first and last stage on one rank) is truly shared: its
        gradients come from two chunks, so its bucket is sent only when all backwards are over.
        """
        for parameter in chunk.parameters():
            if parameter in self._living:
                self._send_late(self._home[id(self._living[parameter])][0])
        buckets = self.lay_out(chunk)
        self.chunks.append(buckets)
        self._next.append(0)
        for bucket in buckets:
            shard = self.materialize(bucket)
            for slot in bucket.slots:
                self._awaken(bucket, slot)
            shard.intervals = bucket.intervals(shard.begin, shard.end)
            self.shards.append(shard)
        for module in chunk.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, self._living[parameter])

    def _awaken(self, bucket: Bucket, slot: Slot) -> None:
        """A living parameter in place of the one on the meta device, which cannot leave it."""
        asleep = slot.parameter
        parameter = nn.Parameter(self.stand_in(bucket, slot), requires_grad=asleep.requires_grad)
        place(parameter, placement_of(asleep))
        parameter.tied = is_tied(asleep)  # type: ignore[attr-defined]
        parameter.on_gradient = self.on_gradient  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(self._autograd_hook)
        if bucket.gradients is not None and self.numbers.gradient == self.numbers.compute:
            parameter.grad = slot.view(bucket.gradients)  # autograd adds straight into the bucket
        slot.parameter = self._living[asleep] = parameter
        self._home[id(parameter)] = (bucket, slot)

    def stand_in(self, bucket: Bucket, slot: Slot) -> Tensor:
        """What a parameter shows between steps: its part of the bucket's weights."""
        assert bucket.weights is not None
        return slot.view(bucket.weights)

    def _send_late(self, bucket: Bucket) -> None:
        if bucket not in self._late:
            for buckets in self.chunks:
                buckets[:] = [b for b in buckets if b is not bucket]
            self._late.append(bucket)

    def new_parameters(self, chunk: nn.Module) -> list[nn.Parameter]:
        """The chunk's parameters that no earlier chunk brought, in order of registration."""
        return [p for p in chunk.parameters() if p not in self._living]

    def lay_out(self, chunk: nn.Module) -> list[Bucket]:
        """Reverse registration order; a tied weight in a bucket of its own, so that its copy elsewhere lies alike."""
        plain, tied = split_tied(self.new_parameters(chunk))
        plain.reverse()
        groups = [[plain[i] for i in indices] for indices in pack([p.numel() for p in plain], self.bucket_size)]
        return [Bucket.of(parameters, self.multiple) for parameters in [*groups, *([p] for p in tied)]]

    @abstractmethod
    def materialize(self, bucket: Bucket) -> Shard:
        """Allocate what this rank keeps of a bucket and say which part of it the optimizer here updates."""

    def allocate_weights(self, bucket: Bucket) -> Tensor:
        """The whole bucket in the compute dtype."""
        bucket.weights = torch.zeros(bucket.numel, dtype=self.numbers.compute, device=self.device)
        self.ledger.own(bucket.weights, "weights")
        return bucket.weights

    def allocate_gradients(self, bucket: Bucket) -> Tensor:
        """The whole bucket's gradients, kept from step to step."""
        bucket.gradients = torch.zeros(bucket.numel, dtype=self.numbers.gradient, device=self.device)
        self.ledger.own(bucket.gradients, "gradients")
        return bucket.gradients

    def make_master(self, weights: Tensor, *, elsewhere: bool = False) -> Tensor:
        """Weights for the optimizer to update: these, or a copy in its dtype (or for a device that is not theirs)."""
        if self.numbers.master == self.numbers.compute and not elsewhere:
            return weights
        master = torch.zeros(weights.shape, dtype=self.numbers.master, device=self.device)
        return self.ledger.own(master, "master_weights")

    def load(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Give a parameter its values [local shape], at the precision they come in."""
        bucket, slot = self._home[id(parameter)]
        flat = values.reshape(-1)
        if bucket.weights is not None:
            bucket.weights[slot.begin : slot.end].copy_(flat)
        for shard in self.shards:
            if shard.bucket is bucket:
                low, high = max(slot.begin, shard.begin), min(slot.end, shard.end)
                if low < high:
                    mine = flat[low - slot.begin : high - slot.begin]
                    shard.weights[low - shard.begin : high - shard.begin].copy_(mine)
                    shard.master[low - shard.begin : high - shard.begin].copy_(mine)

    # -- one step ------------------------------------------------------------
    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self._next = [0] * len(self.chunks)
        for bucket in self.buckets():
            if bucket.gradients is not None:
                bucket.gradients.zero_()

    def begin_backward(self, chunk: int, *, last: bool, whole: bool) -> None:
        """A backward of ``chunk`` starts.

        Args:
            last: it is this chunk's last of the step.
            whole: every gradient will arrive once. False when a weight's gradient comes in two parts (I, then W), so
                that only `end_backward` knows that all is there.
        """
        self._chunk, self._last, self._counting = chunk, last, whole
        self._next[chunk] = 0
        for bucket in self.chunks[chunk]:
            bucket.missing = {id(slot.parameter) for slot in bucket.slots}

    def on_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A gradient of this micro-batch: add it to its bucket, and send the buckets that are now complete."""
        bucket, slot = self._home[id(parameter)]
        self.add(bucket, slot, gradient)
        self.arrived(bucket, parameter)

    def _autograd_hook(self, parameter: nn.Parameter) -> None:
        bucket, slot = self._home[id(parameter)]
        gradient = parameter.grad
        if gradient is None:  # put off by an I action: the hook fires all the same
            return
        if bucket.gradients is None or not same_memory(gradient, slot.view(bucket.gradients)):
            watch = self.ledger.watching
            if watch is not None:
                watch.charge(gradient.untyped_storage(), "gradients", "device")
            self.add(bucket, slot, gradient)
            parameter.grad = None
        self.arrived(bucket, parameter)

    def add(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        """Accumulate into the bucket, in the gradient dtype."""
        assert bucket.gradients is not None
        slot.view(bucket.gradients).add_(gradient)

    def arrived(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Note an arrival; launch every complete bucket that is next in line."""
        if self._counting and self.reduces_now():
            bucket.missing.discard(id(parameter))
            self._launch_ready(only_complete=True)

    def end_backward(self) -> None:
        """The chunk's backward is over: what has not been sent is sent now, parameters without a gradient
        included."""
        if self.reduces_now():
            self._launch_ready(only_complete=False)

    def _launch_ready(self, *, only_complete: bool) -> None:
        buckets = self.chunks[self._chunk]
        while self._next[self._chunk] < len(buckets):
            bucket = buckets[self._next[self._chunk]]
            if only_complete and bucket.missing:
                return
            self._next[self._chunk] += 1
            with self.ledger.during("reduce"):
                self.launch(bucket)

    def reduces_now(self) -> bool:
        """Whether gradients of the running backward are to be reduced: by default only a chunk's last."""
        return self._last

    @abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """Start reducing a bucket over the group."""

    def finish(self) -> None:
        """All backwards are over: reduce what waited for that, and wait until every shard's ``gradient`` is the
        sum."""
        with self.ledger.during("reduce"):
            for bucket in self._late:
                self.launch(bucket)
        self.complete()

    @abstractmethod
    def complete(self) -> None:
        """Wait for the reductions under way."""

    def publish(self) -> None:  # noqa: B027  (for whole replicas there is nothing to do)
        """After the optimizer's update: make the new weights known to the group."""

    def weights_on_host(self, shard: Shard) -> bool:
        """Whether the weights themselves live in host memory."""
        return False

    def buckets(self) -> Iterator[Bucket]:
        """All buckets, chunk by chunk."""
        for chunk in self.chunks:
            yield from chunk
        yield from self._late


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at the same place of the same storage. Fake tensors have no addresses to compare."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def is_tied(parameter: nn.Parameter) -> bool:
    """Whether a copy of this parameter lives on another pipeline stage."""
    return getattr(parameter, "tied", False)


def split_tied(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters in registration order, those tied across stages apart."""
    return [p for p in parameters if not is_tied(p)], [p for p in parameters if is_tied(p)]
