"""Collectives, point-to-point messages, and their autograd conjugates. Nothing else in the engine talks.

Every call takes the group it runs in and leaves a line in the group's ledger. A group of one sends nothing.
Reductions are sums: dividing is left to the caller, once, because an average inside a collective and another outside
is the commonest silent error of data parallelism (and gloo does not know NCCL's PREMUL_SUM).

gloo accepts some things silently that give wrong numbers; they are stopped here:

* a strided view is reduced in its memory order, not its logical one (pytorch#24836, #192920): collectives run on a
  contiguous buffer and the *reduced* tensor is returned, never the untouched original (Megatron-LM#5337);
* two ranks that disagree on dtype, size or operation get garbage or hang: `Handshake` compares them first when the
  engine's ``check`` mode is on.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from hybridlab.ledger import MemoryWatch
from hybridlab.mesh import Group

# The names without "tensor" came with torch 2.13, where the older ones warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


_SETTLE_SECONDS = 5.0  # a busy machine may leave a thread waiting for its turn


class Pending:
    """A message under way. `wait` returns its result; the buffers it reads or writes are held until then."""

    def __init__(self, result: torch.Tensor, work: Any = None, held: tuple[torch.Tensor, ...] = ()) -> None:
        self._result = result
        self._work = work
        self._held = held
        self._watch: MemoryWatch | None = None
        self._holders: list[int] = []

    @staticmethod
    def start(group: Group, launch: Callable[[], Any], result: torch.Tensor, *held: torch.Tensor) -> Pending:
        """Launch a message. What a backend allocates for itself is not the engine's and is left out of the account."""
        watch = group.ledger.watching
        if watch is None:
            return Pending(result, launch(), held)
        holders = [tensor._use_count() for tensor in held]  # type: ignore[attr-defined]
        with watch.paused():
            pending = Pending(result, launch(), held)
        pending._watch, pending._holders = watch, holders
        return pending

    def wait(self) -> torch.Tensor:
        """Block until the message is complete (on CUDA: until the current stream may use the result)."""
        if self._work is not None:
            if self._watch is None:
                self._work.wait()
                self._work = None
            else:
                self._wait_watched(self._watch)
            self._held = ()
        return self._result

    def _wait_watched(self, watch: MemoryWatch) -> None:
        """Give the backend's thread, done but not yet gone, a moment to drop its references, so that buffers die at the
        same moment in every run."""
        with watch.paused():
            self._work.wait()
        self._work = None
        deadline = time.monotonic() + _SETTLE_SECONDS
        for tensor, before in zip(self._held, self._holders):
            while tensor._use_count() > before and time.monotonic() < deadline:  # type: ignore[attr-defined]
                time.sleep(1e-5)


class Disagreement(RuntimeError):
    """Ranks of one group were about to run collectives that do not match."""


class Handshake:
    """Compare what each rank of the group is about to do. For debugging: one extra all-gather a message."""

    enabled = os.environ.get("HYBRIDLAB_CHECK", "") == "1"

    @staticmethod
    def compare(operation: str, tensor: torch.Tensor, group: Group) -> None:
        """Raises Disagreement, on every rank of the group, when they do not mean the same operation, size and dtype."""
        if not Handshake.enabled:
            return
        said = f"{operation} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        mine = torch.tensor([zlib.crc32(said.encode())], dtype=torch.int64, device=tensor.device)
        seen = torch.empty(group.size, dtype=torch.int64, device=tensor.device)
        _all_gather(seen, mine, group=group.process_group)
        if bool((seen != mine).any()):
            everyone: list[Any] = [None] * group.size
            dist.all_gather_object(everyone, said, group=group.process_group)
            lines = ", ".join(f"rank {rank}: {what}" for rank, what in zip(group.ranks, everyone))
            raise Disagreement(f"the ranks of a {group.name} group disagree ({lines})")


# -- collectives ------------------------------------------------------------
def all_reduce(tensor: torch.Tensor, group: Group, operation: str = "sum") -> torch.Tensor:
    """The sum (or "max") over the group, in place when ``tensor`` is contiguous. Use the returned tensor."""
    return all_reduce_async(tensor, group, operation).wait()


def all_reduce_async(tensor: torch.Tensor, group: Group, operation: str = "sum") -> Pending:
    """`all_reduce` that returns at once."""
    if group.size == 1:
        return Pending(tensor)
    tensor = tensor.detach().contiguous()
    Handshake.compare(f"all_reduce {operation}", tensor, group)
    group.ledger.sent("all_reduce", group.name, group.size, tensor.nbytes, tensor.dtype)
    return Pending.start(
        group,
        lambda: dist.all_reduce(tensor, _OPERATIONS[operation], group=group.process_group, async_op=True),
        tensor,
        tensor,
    )


def all_gather_async(shard: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Every rank's ``shard`` [k, ...] one after the other: [n·k, ...], written into ``out`` when given.

    ``shard`` may be this rank's slice of ``out`` (gathering in place).
    """
    if group.size == 1 and out is None:
        return Pending(shard)
    shard = shard.detach().contiguous()
    if out is None:
        out = shard.new_empty((group.size * shard.shape[0], *shard.shape[1:]))
    if group.size == 1:
        if out.untyped_storage()._cdata != shard.untyped_storage()._cdata:
            out.copy_(shard)
        return Pending(out)
    Handshake.compare("all_gather", shard, group)
    group.ledger.sent("all_gather", group.name, group.size, out.nbytes, out.dtype)
    return Pending.start(
        group, lambda: _all_gather(out, shard, group=group.process_group, async_op=True), out, out, shard
    )


def reduce_scatter_async(full: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """This rank's slice [k, ...] of the sum over the group of ``full`` [n·k, ...].

    ``out`` may be this rank's slice of ``full`` (scattering in place); the other slices are then left undefined.
    """
    if group.size == 1:
        return Pending(full if out is None else out)
    full = full.detach().contiguous()
    if out is None:
        out = full.new_empty((full.shape[0] // group.size, *full.shape[1:]))
    Handshake.compare("reduce_scatter", full, group)
    group.ledger.sent("reduce_scatter", group.name, group.size, full.nbytes, full.dtype)
    return Pending.start(
        group, lambda: _reduce_scatter(out, full, group=group.process_group, async_op=True), out, out, full
    )


def send_async(tensor: torch.Tensor, to: int, group: Group) -> Pending:
    """Start sending to global rank ``to``. The buffer must not be written or freed before `wait`: gloo does not
    copy."""
    tensor = tensor.detach().contiguous()
    group.ledger.sent("send", group.name, 2, tensor.nbytes, tensor.dtype)
    return Pending.start(group, lambda: dist.isend(tensor, to, group=group.process_group), tensor, tensor)


def receive_async(buffer: torch.Tensor, source: int, group: Group) -> Pending:
    """Start receiving from global rank ``source`` into ``buffer``, whose shape and dtype must be the sender's."""
    return Pending.start(group, lambda: dist.irecv(buffer, source, group=group.process_group), buffer, buffer)


# -- autograd conjugates (Megatron-LM, arXiv:1909.08053 §3, their f and g; with sequence parallelism arXiv:2205.05198
# §4.2)
class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad.clone(), ctx.group), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return gather_sequence_async(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_sequence_async(grad, ctx.group)(), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return scatter_sequence_async(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_sequence_async(grad, ctx.group)(), None


def gather_sequence_async(x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Start gathering [b, s/n, h] to [b, s, h]; calling the result waits. No gradient flows through it."""
    # Collectives join along the first dimension, so the sequence is brought there; free of copies when b = 1.
    pending = all_gather_async(x.transpose(0, 1), group)
    return lambda: pending.wait().transpose(0, 1)


def scatter_sequence_async(x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Start summing [b, s, h] over the group, keeping this rank's [b, s/n, h]; calling the result waits."""
    pending = reduce_scatter_async(x.transpose(0, 1), group)
    return lambda: pending.wait().transpose(0, 1)


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: sum the ranks' partial results. Backward: identity, since each rank gets the same gradient."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: identity. Backward: sum the ranks' partial gradients."""
    return x if group.size == 1 else _Copy.apply(x, group)


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: all-gather the sequence, [b, s/n, h] to [b, s, h]. Backward: reduce-scatter, for what follows is
    cut."""
    return x if group.size == 1 else _GatherSequence.apply(x, group)


def scatter_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: reduce-scatter partial sums over the sequence, [b, s, h] to [b, s/n, h]. Backward: all-gather."""
    return x if group.size == 1 else _ScatterSequence.apply(x, group)


# -- reading a number ------------------------------------------------------------
def read(scalar: torch.Tensor, rehearsed: float = 0.0) -> float:
    """The value of a one-element tensor. A fake tensor has none: a rehearsal goes on with ``rehearsed``."""
    return rehearsed if isinstance(scalar, FakeTensor) else float(scalar.item())
