"""Pipeline parallelism: the layers are dealt out over ranks, micro-batches flow through them.

A `Chunk` is a run of the model's pieces (embedding, layers, head) that forms one pipeline stage; a rank has one, or
several under interleaved schedules. The `Executor` works through this rank's programme (`hybridlab.exchange`),
compiled from a schedule that is plain data (`hybridlab.schedule`): it knows no schedule by name. For each action it
runs

=====  =============================================================================================================
F      the chunk's forward; the last stage goes on to the loss
B      the whole backward: gradients of input and weights
I      the gradient of the input only; linear layers put their weight gradients off
W      the weight gradients that I put off
=====  =============================================================================================================

What is kept between a micro-batch's F and its B is its input (a leaf that will receive the gradient to send back) and
the edge of the autograd graph at the output. The output's own memory goes as soon as it is sent.

Sources: GPipe, arXiv:1811.06965; PipeDream-2BW / Megatron-LM, arXiv:2104.04473 §2.2; zero bubble, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridlab import comm
from hybridlab.deferred import Deferred, Work, run
from hybridlab.exchange import Message, Step
from hybridlab.mesh import Group, Mesh


class Chunk(nn.Sequential):
    """Consecutive pieces of the model: one pipeline stage.

    ``runs`` holds what is called for each piece; recomputation and ZeRO-3 wrap the pieces there, not the modules.
    """

    def __init__(self, stage: int, pieces: Sequence[nn.Module], *, first: bool, last: bool) -> None:
        super().__init__(*pieces)
        self.stage = stage
        self.first, self.last = first, last
        self.runs: list[Callable[[Tensor], Tensor]] = list(pieces)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [b, s] on the first stage, hidden states [b, s, h] elsewhere; logits on the last."""
        for piece in self.runs:
            x = piece(x)
        return x


@dataclass
class MicroBatch:
    """One micro-batch of this data-parallel rank. ``tokens`` is None where no first stage is, ``targets`` no last."""

    index: int
    tokens: Tensor | None
    targets: Tensor | None


@dataclass
class _InFlight:
    """What a micro-batch leaves behind between forward and backward."""

    source: Tensor
    edge: GradientEdge | None


class Callbacks:
    """What the engine does around the executor's actions; the defaults do nothing."""

    def micro_batch(self, index: int) -> None:
        """Forward or backward of a micro-batch starts."""

    def loss(self, logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The scalar whose gradient is wanted, on the last stage."""
        raise NotImplementedError

    def begin_backward(self, chunk: int, *, last: bool, whole: bool) -> None:
        """Gradients of a chunk will arrive."""

    def end_backward(self) -> None:
        """They have arrived."""


class Executor:
    """Runs one rank's programme.

    Args:
        chunks: this rank's, in the order the schedule numbers them.
        mesh: gives the channels up and down the pipeline.
        message_shape: of activations and their gradients, [b, s, h] (s/tp under sequence parallelism).
        dtype: of messages.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        mesh: Mesh,
        *,
        message_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        deferred: Deferred,
        callbacks: Callbacks,
    ) -> None:
        self.chunks = chunks
        self.mesh = mesh
        self.message_shape = message_shape
        self.dtype, self.device = dtype, device
        self.deferred = deferred
        self.callbacks = callbacks

    def run(self, programme: Sequence[Step], micro_batches: Sequence[MicroBatch], *, train: bool = True) -> None:
        """Work through this rank's programme (`hybridlab.exchange`) once. Without ``train`` it must hold forwards
        only; no graph is built."""
        final = _last_backwards(programme)
        self._micro_batches = micro_batches
        self._receiving: dict[Message, comm.Pending] = {}
        self._sending: dict[Message, comm.Pending] = {}
        self._local: dict[tuple[str, int, int], Tensor] = {}
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._put_off: dict[tuple[int, int], list[Work]] = {}
        ledger = self.mesh.ledger
        for position, step in enumerate(programme):
            for message in step.post:
                self._post(message)
            action = step.action
            with ledger.action(action.op, action.micro_batch, step.stage):
                outgoing = self._perform(step, final=position in final, train=train)
            if outgoing is not None:
                self._hand_on(step, outgoing)
            del outgoing
            for message in step.release:
                pending = self._sending.pop(message, None)
                if pending is not None:
                    pending.wait()
        for pending in self._sending.values():
            pending.wait()
        self._sending.clear()
        self._micro_batches = ()

    # -- actions ------------------------------------------------------------
    def _perform(self, step: Step, *, final: bool, train: bool) -> Tensor | None:
        """Compute; returns what the neighbouring stage needs."""
        action, chunk = step.action, self.chunks[step.action.chunk]
        key = (action.chunk, action.micro_batch)
        self.callbacks.micro_batch(action.micro_batch)
        if action.op == "F":
            with self.mesh.ledger.during("forward"), torch.set_grad_enabled(train):
                return self._forward(step, chunk, key, train=train)
        with self.mesh.ledger.during("backward"):
            self.callbacks.begin_backward(action.chunk, last=final, whole=action.op == "B")
            if action.op == "W":
                with torch.no_grad():  # autograd would keep a history of every micro-batch's weight gradients
                    run(self._put_off.pop(key))
                self.callbacks.end_backward()
                return None
            if action.op == "I":
                with self.deferred.collect() as work:
                    source = self._backward(step, chunk, key)
                self._put_off[key] = work
            else:
                source = self._backward(step, chunk, key)
                self.callbacks.end_backward()
        if chunk.first:
            return None
        # A stage whose output the loss never used has no gradient for its input; the stage before waits all the same.
        return source.grad if source.grad is not None else torch.zeros_like(source)

    def _forward(self, step: Step, chunk: Chunk, key: tuple[int, int], *, train: bool) -> Tensor | None:
        micro_batch = self._micro_batches[step.action.micro_batch]
        if chunk.first:
            assert micro_batch.tokens is not None
            source = micro_batch.tokens
        else:
            source = self._take("activation", step.stage - 1, step)
            source.requires_grad_(train)
        output = chunk(source)
        if chunk.last:
            output = self.callbacks.loss(output, micro_batch)
        if train:
            self._in_flight[key] = _InFlight(source, get_gradient_edge(output) if output.requires_grad else None)
        return None if chunk.last else output.detach()

    def _backward(self, step: Step, chunk: Chunk, key: tuple[int, int]) -> Tensor:
        """Run autograd from the output's edge; returns the input, whose ``.grad`` is then set."""
        gradient = None if chunk.last else self._take("gradient", step.stage + 1, step)
        saved = self._in_flight.pop(key)
        if saved.edge is not None:
            seed = torch.ones((), dtype=self._loss_dtype, device=self.device) if gradient is None else gradient
            del gradient
            torch.autograd.backward([saved.edge], [seed])
        return saved.source

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    # -- messages ------------------------------------------------------------
    def _post(self, message: Message) -> None:
        buffer = torch.empty(self.message_shape, dtype=self.dtype, device=self.device)
        self._receiving[message] = comm.receive_async(buffer, self._global(message.source), self._channel(message))

    def _take(self, kind: str, stage: int, step: Step) -> Tensor:
        """The input of an action: from another rank, or handed on within this one."""
        if step.receive is not None:
            return self._receiving.pop(step.receive).wait()
        return self._local.pop((kind, stage, step.action.micro_batch))

    def _hand_on(self, step: Step, tensor: Tensor) -> None:
        kind = "activation" if step.action.op == "F" else "gradient"
        if step.send is None:
            self._local[kind, step.stage, step.action.micro_batch] = tensor
            return
        message = step.send
        with self.mesh.ledger.during("forward" if kind == "activation" else "backward"):
            self._sending[message] = comm.send_async(tensor, self._global(message.target), self._channel(message))

    def _channel(self, message: Message) -> Group:
        return self.mesh.pp_up if message.source < message.target else self.mesh.pp_down

    def _global(self, pp_rank: int) -> int:
        return self.mesh.pp.ranks[pp_rank]


def _last_backwards(programme: Sequence[Step]) -> set[int]:
    """Positions of each chunk's last action that completes weight gradients."""
    last: dict[int, int] = {}
    for position, step in enumerate(programme):
        if step.action.op in "BW":
            last[step.action.chunk] = position
    return set(last.values())
