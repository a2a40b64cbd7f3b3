"""The engine: a plain model, a resolved config and the ranks of a layout, put together into training steps.

`hybridlab.assembly` builds a rank's parts; this file is what happens in a step:

count the target tokens of the global batch (the one divisor of loss and gradients) · run the pipeline's programme ·
finish the reductions · pay owed sums · take the global norm · clip · update · publish the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hybridlab import comm, gradients
from hybridlab.assembly import NUMBERS, build_chunks, draw_weights, ends_apart, make_replica, place_shards, wrap_pieces
from hybridlab.comm import read
from hybridlab.config import Resolved
from hybridlab.config.specs import LossScaleSpec
from hybridlab.cuts import TensorPlan, Vocab, vocab_spans
from hybridlab.data import Batches
from hybridlab.deferred import Deferred
from hybridlab.errors import UserError
from hybridlab.exchange import compile_programmes
from hybridlab.ledger import Ledger
from hybridlab.mesh import Group, Mesh, local_device
from hybridlab.models import streams
from hybridlab.optim import (
    allocate_state,
    clip_coefficient,
    learning_rate,
    make_loss_scale,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from hybridlab.parallel.loss import IGNORE, cross_entropy_sum
from hybridlab.parallel.pipeline import Callbacks, Executor, MicroBatch
from hybridlab.parallel.tensor import TensorParallel
from hybridlab.schedule import make_schedule
from hybridlab.shapes import ModelShape


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    Attributes:
        loss: cross-entropy per target token of the global batch, before the update.
        grad_norm: global gradient norm before clipping, of the unscaled gradient.
        clip_coefficient: what gradients were multiplied by; 1.0 when the norm was within bounds.
        lr: the learning rate used.
        loss_scale: what the loss was multiplied by (1.0 except in fp16).
        skipped: the gradient had an infinity or NaN: no weight changed.
        tokens: target tokens in the global batch.
    """

    loss: float
    grad_norm: float
    clip_coefficient: float
    lr: float
    loss_scale: float
    skipped: bool
    tokens: int


class Engine(Callbacks):
    """One rank of a training run. Every rank of the world builds one, with the same arguments.

    Args:
        config: from `hybridlab.config.resolve`; its layout's world is the world of the default process group.
        shape: the model.
        device_type: "cpu" or "cuda".
        ledger: to count into; a new one by default.
        model: a plain model on the meta device, with ``pieces()``, instead of the one ``shape`` describes; ``shape``
            still gives hidden and vocabulary sizes.
        plan: how tensor parallelism cuts ``model``.
        initialised: False leaves weights at zero, for those who load them.
    """

    def __init__(
        self,
        config: Resolved,
        shape: ModelShape,
        *,
        device_type: str = "cpu",
        ledger: Ledger | None = None,
        model: nn.Module | None = None,
        plan: TensorPlan | None = None,
        initialised: bool = True,
    ) -> None:
        self.config, self.shape = config, shape
        self.device = local_device(device_type)
        self.numbers = NUMBERS[config.precision]
        layout = config.layout
        self.schedule = make_schedule(config.schedule, layout.pp, config.micro_batches, chunks=config.virtual_stages)
        self.mesh = Mesh(
            layout,
            device_type=device_type,
            ledger=ledger,
            tied_stages=shape.tied and ends_apart(self.schedule),
            kv_copies=max(1, layout.tp // shape.kv_heads),
        )
        self.ledger = self.mesh.ledger
        self._vocab_group = self._logits_group(model, plan)
        self.deferred = Deferred()
        tp = TensorParallel(self.mesh.tp, config.sequence_parallel, self.deferred)
        self.chunks = build_chunks(config, shape, self.schedule, tp, self.mesh.coords["pp"], model=model, plan=plan)
        self.replica = make_replica(config, self.mesh, self.device)
        for chunk in self.chunks:
            self.replica.add_chunk(chunk)
        wrap_pieces(config, self.chunks, self.replica)
        self.shards = place_shards(config, self.replica, self.device)
        if initialised:
            draw_weights(config, shape, self.chunks, self.replica)
        self.optimizer = make_optimizer(config.optimizer, [shard.master for shard in self.shards])
        allocate_state(self.optimizer)
        for tensor in state_tensors(self.optimizer):
            self.ledger.own(tensor, "optimizer", "host" if config.zero.offload_optimizer else "device")
        scale = config.loss_scale if config.precision == "fp16" else LossScaleSpec(static=1.0)
        self.loss_scale = make_loss_scale(scale)
        self.executor = self._make_executor()
        self.step_number = 0
        self.updates = 0  # steps that were not skipped: what the learning-rate schedule counts
        self._set_streams()

    def _logits_group(self, model: nn.Module | None, plan: TensorPlan | None) -> Group:
        """The group over which logits are dealt out: tensor-parallel where the output matrix is cut by vocabulary, this
        rank alone where a plan leaves it whole.

        Raises:
            UserError: it is whole under sequence parallelism, where a rank would see only its slice of the tokens.
        """
        tp = self.mesh.tp
        outputs = (name for name, cut in (plan or {}).items() if isinstance(cut, Vocab))
        if model is None or any(isinstance(model.get_submodule(name), nn.Linear) for name in outputs):
            return tp
        if self.config.sequence_parallel and tp.size > 1:
            raise UserError(
                "with sequence parallelism the output matrix must be cut by vocabulary.",
                key="plan",
                fix="give it a Vocab cut, or switch sequence_parallel off.",
            )
        return replace(tp, ranks=(tp.ranks[tp.rank],), rank=0, process_group=None)

    def _make_executor(self) -> Executor:
        """The pipeline's interpreter and this rank's programmes: for training, and forwards only."""
        config = self.config
        positions = config.sequence_length
        if config.sequence_parallel:
            positions //= config.layout.tp
        pp = self.mesh.coords["pp"]
        forwards = replace(
            self.schedule, ranks=tuple(tuple(a for a in rank if a.op == "F") for rank in self.schedule.ranks)
        )
        self._programme = compile_programmes(self.schedule)[pp]
        self._forwards = compile_programmes(forwards)[pp]
        return Executor(
            self.chunks,
            self.mesh,
            message_shape=(config.micro_batch_size, positions, self.shape.hidden),
            dtype=self.numbers.compute,
            device=self.device,
            deferred=self.deferred,
            callbacks=self,
        )

    # -- what the executor asks ------------------------------------------------------------
    def micro_batch(self, index: int) -> None:
        """Dropout masks are functions of the sample: say which samples are next, in forward and in backward alike."""
        streams.micro_batch(self._first_sample(index))

    def loss(self, logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Cross-entropy summed over the micro-batch, divided by the *global* batch's target tokens: the only
        division. The loss scale multiplies here, on the last stage, and nowhere else."""
        assert micro_batch.targets is not None
        config, group = self.config, self._vocab_group
        spans, _ = vocab_spans(self.shape.vocab, group.size, group.rank, config.vocab_multiple)
        with self.ledger.category("logits"):
            total = cross_entropy_sum(
                logits,
                micro_batch.targets,
                group,
                vocab=self.shape.vocab,
                first=spans[0].start,
                smoothing=config.label_smoothing,
            )
        mean = total / self._tokens
        self._loss += mean.detach()
        return mean * self.loss_scale.scale

    def begin_backward(self, chunk: int, *, last: bool, whole: bool) -> None:
        """Gradients will arrive."""
        self.replica.begin_backward(chunk, last=last, whole=whole)

    def end_backward(self) -> None:
        """They have arrived."""
        self.replica.end_backward()

    # -- steps ------------------------------------------------------------
    def _first_sample(self, micro_batch: int) -> int:
        """The place in the global batch of this replica's micro-batch: micro-batch by micro-batch, replicas in
        turn."""
        replicas = self.config.layout.dp
        return (micro_batch * replicas + self.mesh.coords["dp"]) * self.config.micro_batch_size

    def micro_batches(self, batches: Batches, step: int) -> list[MicroBatch]:
        """This rank's share of step ``step``; nothing is read where neither tokens nor targets are needed."""
        first = any(chunk.first for chunk in self.chunks)
        last = any(chunk.last for chunk in self.chunks)
        found = []
        for index in range(self.config.micro_batches):
            tokens = targets = None
            if first or last:
                start = self._first_sample(index)
                tokens, targets = batches.samples(step, start, start + self.config.micro_batch_size)
            found.append(
                MicroBatch(
                    index,
                    tokens.to(self.device) if first and tokens is not None else None,
                    targets.to(self.device) if last and targets is not None else None,
                )
            )
        return found

    def train_batch(self, batches: Batches) -> StepResult:
        """Train on the batch of the current step number."""
        return self.train_step(self.micro_batches(batches, self.step_number))

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One step on this rank's micro-batches."""
        for micro_batch in micro_batches:
            for ids in (micro_batch.tokens, micro_batch.targets):
                if ids is not None:
                    self.ledger.own(ids, "other")
        self._begin(micro_batches)
        self.replica.begin_step()
        self.executor.run(self._programme, micro_batches)
        with torch.no_grad(), self.ledger.category("other"):
            with self.ledger.action("reduce"):
                self.replica.finish()
            with self.ledger.action("step"), self.ledger.during("step"):
                result = self._update()
        self.step_number += 1
        return result

    def eval_batch(self, batches: Batches, step: int) -> float:
        """The loss per target token of a batch, without learning from it; the same on every rank."""
        micro_batches = self.micro_batches(batches, step)
        training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        self._begin(micro_batches)
        self.executor.run(self._forwards, micro_batches, train=False)
        for chunk, was in zip(self.chunks, training):
            chunk.train(was)
        with torch.no_grad():
            return read(self._agree(torch.zeros((), dtype=torch.float64, device=self.device))[1])

    def _set_streams(self) -> None:
        config, group = self.config, self.mesh.tp
        length = config.sequence_length
        share = length // group.size if config.sequence_parallel else length
        start = group.rank * share if config.sequence_parallel else 0
        streams.sequence_slice(start, start + share, length)
        streams.tensor_rank(group.rank)

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Agree on the number of target tokens in the global batch. Where no target is, nobody asks."""
        self.ledger.begin_step()
        streams.set(seed=self.config.seed, step=self.step_number)
        dtype = torch.float64 if self.numbers.master == torch.float64 else torch.float32
        self._loss = torch.zeros((), dtype=dtype, device=self.device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        if any(chunk.last for chunk in self.chunks):
            for micro_batch in micro_batches:
                assert micro_batch.targets is not None
                self._tokens += (micro_batch.targets != IGNORE).sum()
            self._tokens = comm.all_reduce(self._tokens, self.mesh.dp).clamp(min=1)

    def _agree(self, squares: Tensor) -> Tensor:
        """``[Σ g², loss, tokens]`` of the whole, the same on every rank. The loss is known to the last stage's ranks:
        one of each tensor-parallel group says it."""
        speaks = any(chunk.last for chunk in self.chunks) and self.mesh.tp.rank == 0
        loss, tokens = self._loss.double(), self._tokens.double() / self.mesh.dp.size
        said = torch.stack([squares, loss if speaks else loss * 0, tokens if speaks else tokens * 0])
        for group in self.mesh.model_groups():
            said = comm.all_reduce(said, group)
        if self.config.zero.stage > 0:
            return comm.all_reduce(said, self.mesh.dp)
        said[1:] = comm.all_reduce(said[1:].clone(), self.mesh.dp)
        return said

    def _update(self) -> StepResult:
        config = self.config
        gradients.settle(self.shards, self.mesh)
        for shard in self.shards:
            shard.begin_collect()
        squares, loss, tokens = self._agree(gradients.squared_norm(self.shards, self.device))
        scale = self.loss_scale.scale
        norm = squares.sqrt() / scale
        lr = learning_rate(config.scheduler, config.optimizer.lr, self.updates)
        grad_norm = read(norm, rehearsed=1.0)
        skipped = not (grad_norm < float("inf"))
        coefficient = clip_coefficient(grad_norm, config.gradient_clipping)
        if not skipped:
            self._apply(lr, coefficient / scale)
            self.updates += 1
        self.loss_scale.update(skipped)
        return StepResult(read(loss), grad_norm, 1.0 if skipped else coefficient, lr, scale, skipped, int(read(tokens)))

    def _apply(self, lr: float, factor: float) -> None:
        """Update the shards and make the weights known."""
        for shard in self.shards:
            gradient = shard.collect()
            if factor != 1.0:
                gradient.mul_(factor)
            shard.master.grad = gradient
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        for shard in self.shards:
            shard.master.grad = None
            shard.write_back()
        self.replica.publish()

    @property
    def parameters(self) -> int:
        """Elements this rank computes with, padding included: its part of the model before ZeRO deals it out."""
        return sum(p.numel() for p in {id(p): p for chunk in self.chunks for p in chunk.parameters()}.values())

    def close(self) -> None:
        """Give the process groups back."""
        self.mesh.close()
