"""The peers' training loops, as a user of torch writes them, on our plain models and batches. Each runs on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hybridlab.config import Resolved
from hybridlab.data import Batches, load_corpus
from hybridlab.models import build_model, initialise_model
from hybridlab.shapes import ModelShape

STEPS = 3
Curve = tuple[list[float], dict[str, Tensor]]


def plain_model(config: Resolved, shape: ModelShape) -> nn.Module:
    """The whole model with our first values."""
    model = build_model(shape, dtype=torch.float32)
    initialise_model(model, shape, config.seed)
    return model


def batches_of(config: Resolved, shape: ModelShape) -> Batches:
    return Batches(load_corpus(None), config.seed, config.sequence_length, config.train_batch_size, vocab=shape.vocab)


def adamw(parameters: Any, config: Resolved) -> torch.optim.Optimizer:
    spec = config.optimizer
    return torch.optim.AdamW(parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shares(batches: Batches, config: Resolved, step: int, replica: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a replica; their order within the batch does not matter to the sum."""
    size, replicas = config.micro_batch_size, config.layout.dp
    starts = [(i * replicas + replica) * size for i in range(config.micro_batches)]
    return [batches.samples(step, start, start + size) for start in starts]


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's logical value; any other as it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def data_parallel(config: Resolved, shape: ModelShape, how: str) -> Curve:
    """DistributedDataParallel, also with ZeroRedundancyOptimizer, or FSDP2."""
    model = plain_model(config, shape)
    names = [name for name, _ in model.named_parameters()]
    wrapped: Any
    if how.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (config.layout.dp,))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, reshard_after_forward=how == "fsdp, resharding")
        fully_shard(model, mesh=mesh, reshard_after_forward=how == "fsdp, resharding")
        wrapped = model
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    if how == "ddp, zero-redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        spec = config.optimizer
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay
        )
    else:
        optimizer = adamw(model.parameters(), config)
    batches, losses = batches_of(config, shape), []
    for step in range(STEPS):
        total = torch.zeros(())
        optimizer.zero_grad()
        for tokens, targets in shares(batches, config, step, dist.get_rank()):
            loss = loss_of(wrapped(tokens), targets) / config.micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / config.layout.dp)
    return losses, {name: whole(p) for name, p in zip(names, model.parameters(), strict=True)}


def tensor_parallel(config: Resolved, shape: ModelShape) -> Curve:
    """DTensor's ``parallelize_module``. Its plan cuts a matrix evenly, so what we keep as one fused matrix (q|k|v,
    gate|up) stays whole there; the layers' output matrices and the vocabulary are cut."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = plain_model(config, shape)
    mesh = init_device_mesh("cpu", (config.layout.tp,))
    down = "mlp.down"
    plan: dict[str, Any] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(shape.layers):
        plan[f"layers.{index}.{down}"] = RowwiseParallel(input_layouts=Replicate())
        plan[f"layers.{index}.attention.out"] = RowwiseParallel(input_layouts=Replicate())
        if not shape.gated:
            plan[f"layers.{index}.mlp.up"] = ColwiseParallel(output_layouts=Shard(-1))
            plan[f"layers.{index}.{down}"] = RowwiseParallel(input_layouts=Shard(-1))
    parallelize_module(model, mesh, plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [adamw(cut, config), adamw(rest, config)]
    batches, losses = batches_of(config, shape), []
    for step in range(STEPS):
        total = 0.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        for tokens, targets in shares(batches, config, step, 0):
            loss = loss_of(model(tokens), targets) / config.micro_batches
            loss.backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    return losses, {name: whole(p) for name, p in model.named_parameters()}


class Stage(nn.Module):
    """Some consecutive pieces of a model, under their names in it."""

    def __init__(self, pieces: list[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = piece(x)
        return x


def pipelined(config: Resolved, shape: ModelShape, how: str) -> Curve:
    """torch.distributed.pipelining's schedules over stages cut by hand."""
    from torch.distributed import pipelining

    rank, stages = dist.get_rank(), config.layout.pp * config.virtual_stages
    model = plain_model(config, shape)
    names = {id(p): name for name, p in model.named_parameters()}
    embed, *layers, head = [piece for _, piece in model.pieces()]  # type: ignore[operator]
    mine: list[tuple[int, Stage]] = []
    for index in range(rank, stages, config.layout.pp):
        begin = sum(config.split[:index])
        pieces = layers[begin : begin + config.split[index]]
        pieces = [*([embed] if index == 0 else []), *pieces, *([head] if index == stages - 1 else [])]
        mine.append((index, Stage(pieces)))
    device = torch.device("cpu")
    built = [pipelining.PipelineStage(stage, index, stages, device) for index, stage in mine]
    make: Callable[..., Any] = getattr(pipelining, how)
    given: Any = built if how == "ScheduleInterleaved1F1B" else built[0]
    schedule = make(given, n_microbatches=config.micro_batches, loss_fn=loss_of)
    parameters = [p for _, stage in mine for p in stage.parameters()]
    optimizer = adamw(parameters, config)
    batches, losses = batches_of(config, shape), []
    for step in range(STEPS):
        tokens, targets = batches.batch(step)
        optimizer.zero_grad()
        told: list[Tensor] = []
        last = any(index == stages - 1 for index, _ in mine)
        arguments = (tokens,) if rank == 0 else ()
        schedule.step(*arguments, **({"target": targets, "losses": told} if last else {}))
        optimizer.step()
        mean = torch.stack(told).mean() if last else torch.zeros(())
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses, {names[id(p)]: whole(p) for p in parameters}
