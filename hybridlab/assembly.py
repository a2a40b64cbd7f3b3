"""From a plain model to one rank's working parts.

The order of application, each step on what the one before left:

1. the plain model is built on the meta device: shapes without memory;
2. tensor parallelism cuts its layers (`parallel.tensor`), so shapes become this rank's;
3. its pieces are dealt to pipeline stages, this rank keeps its chunks (`parallel.pipeline`);
4. compilation, recomputation and ZeRO-3's borrowing wrap the pieces (`compiled`, `parallel.recompute`,
   `parallel.zero.stage3`);
5. the data-parallel strategy, plain or ZeRO, packs parameters in buckets with memory (`parallel.data`, `.zero`);
6. values are drawn parameter by parameter from (seed, name), the same at every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridlab.buckets import Numbers, Replica, Shard
from hybridlab.compiled import compiled
from hybridlab.config import Resolved
from hybridlab.cuts import TensorPlan, tensor_plan
from hybridlab.mesh import Mesh
from hybridlab.models import build_model, initialise, streams
from hybridlab.parallel import tensor as tensor_parallel
from hybridlab.parallel.data import DataParallel
from hybridlab.parallel.offload import offload
from hybridlab.parallel.pipeline import Chunk
from hybridlab.parallel.recompute import recompute_attention, recomputed
from hybridlab.parallel.tensor import TensorParallel
from hybridlab.parallel.zero.stage1 import Stage1
from hybridlab.parallel.zero.stage2 import Stage2
from hybridlab.parallel.zero.stage3 import Stage3
from hybridlab.placement import as_tied_copy, place, placement_of
from hybridlab.schedule import Schedule
from hybridlab.shapes import ModelShape

NUMBERS = {
    "fp32": Numbers(torch.float32, torch.float32, torch.float32),
    "fp64": Numbers(torch.float64, torch.float64, torch.float64),
    "bf16": Numbers(torch.bfloat16, torch.float32, torch.float32),
    "fp16": Numbers(torch.float16, torch.float32, torch.float32),
}

Run = Callable[[Tensor], Tensor]


def ends_apart(schedule: Schedule) -> bool:
    """Whether the first and the last stage lie on different pipeline ranks; in a V placement they share one."""
    return schedule.place(0)[0] != schedule.place(schedule.num_stages - 1)[0]


def build_chunks(
    config: Resolved,
    shape: ModelShape,
    schedule: Schedule,
    tp: TensorParallel,
    pp_rank: int,
    *,
    model: nn.Module | None = None,
    plan: TensorPlan | None = None,
) -> list[Chunk]:
    """This rank's pipeline stages, cut by tensor parallelism, on the meta device."""
    if model is None:
        with torch.device("meta"):
            model = build_model(shape, attention=config.attention)
        plan = tensor_plan(shape, config.vocab_multiple)
    tensor_parallel.apply(model, plan or {}, tp)
    streams.assign_names(model)
    if config.recompute == "selective":
        recompute_attention(model)
    embed, *layers, head = [piece for _, piece in model.pieces()]  # type: ignore[operator]
    if shape.tied:
        _tie(embed.tokens, head.lm_head, pipelined=schedule.stages > 1, apart=ends_apart(schedule))
    chunks = []
    for index in range(schedule.chunks):
        stage = schedule.stage_of(pp_rank, index)
        begin = sum(config.split[:stage])
        mine = layers[begin : begin + config.split[stage]]
        first, last = stage == 0, stage == schedule.num_stages - 1
        pieces = [*([embed] if first else []), *mine, *([head] if last else [])]
        chunks.append(Chunk(stage, pieces, first=first, last=last))
    return chunks


def _tie(embedding: nn.Module, head: nn.Module, *, pipelined: bool, apart: bool) -> None:
    """One weight for both where they are on one rank, else two that are kept alike."""
    weight = embedding.weight
    assert isinstance(weight, nn.Parameter) and isinstance(head.weight, nn.Parameter)
    if pipelined:
        weight.tied = True  # type: ignore[attr-defined]
    if not (pipelined and apart):
        head.weight = weight
        return
    head.weight.tied = True  # type: ignore[attr-defined]
    place(head.weight, as_tied_copy(placement_of(weight)))


def make_replica(config: Resolved, mesh: Mesh, device: torch.device) -> Replica:
    """The data-parallel strategy of the config's ZeRO stage."""
    zero = config.zero
    common: tuple[Any, ...] = (mesh.dp, NUMBERS[config.precision], device, zero.reduce_bucket_size)
    if zero.stage == 0:
        return DataParallel(*common)
    if zero.stage == 1:
        return Stage1(*common)
    if zero.stage == 2:
        return Stage2(*common, every_micro_batch=zero.gradient_policy == "scatter_every_microbatch")
    return Stage3(
        *common,
        persistence_threshold=zero.persistence_threshold,
        prefetch=zero.prefetch_bucket_size > 0,
        on_host=zero.offload_param,
        master_on_host=zero.offload_optimizer,
        pin=zero.pin_memory,
    )


def wrap_pieces(config: Resolved, chunks: Sequence[Chunk], replica: Replica) -> None:
    """Compilation, recomputation and ZeRO-3 around the pieces.

    Weights are borrowed outside of a single recomputed layer, so that they are gathered once for both recomputation
    and backward; inside of a longer group, one layer at a time.
    """
    full, interval = config.recompute == "full", config.recompute_interval
    for index, chunk in enumerate(chunks):
        runs: list[Run] = list(chunk.runs)
        layers = range(1 if chunk.first else 0, len(runs) - (1 if chunk.last else 0))
        if config.compile:
            runs = [compiled(chunk[i], replica.device) if i in layers else run for i, run in enumerate(runs)]
        if full and interval == 1:
            runs = [recomputed([run]) if i in layers else run for i, run in enumerate(runs)]
        if isinstance(replica, Stage3):
            runs = [replica.wrap(index, i, run) for i, run in enumerate(runs)]
        if full and interval > 1:
            groups = [runs[i : min(i + interval, layers.stop)] for i in range(layers.start, layers.stop, interval)]
            runs = [*runs[: layers.start], *(recomputed(group) for group in groups), *runs[layers.stop :]]
        chunk.runs = runs


def place_shards(config: Resolved, replica: Replica, device: torch.device) -> list[Shard]:
    """The shards for the optimizer: as the replica made them, or with their masters on the host."""
    if config.zero.offload_optimizer:
        copies = torch.cuda.Stream() if device.type == "cuda" else None
        replica.shards = [
            offload(
                shard,
                replica.ledger,
                pin=config.zero.pin_memory,
                copies=copies,
                weights_on_host=replica.weights_on_host(shard),
            )
            for shard in replica.shards
        ]
    return replica.shards


@torch.no_grad()
def draw_weights(config: Resolved, shape: ModelShape, chunks: Sequence[Chunk], replica: Replica) -> None:
    """Draw every weight from (seed, name): a rank draws the rows it holds, one parameter at a time."""
    dtype = NUMBERS[config.precision].master
    for parameter in {id(p): p for chunk in chunks for p in chunk.parameters()}.values():
        values = torch.zeros(parameter.shape, dtype=dtype, device=replica.device)
        initialise(values, placement_of(parameter), shape, config.seed)
        replica.load(parameter, values)
    replica.publish()
