"""What tests of the engine share: small jobs, and how to run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridlab.config import OptimizerSpec, Resolved, Zero
from hybridlab.plan.layout import Layout
from hybridlab.shapes import PRESETS, ModelShape

LLAMA = replace(PRESETS["tiny-llama"], hidden=32, head_dim=8, ffn=44, max_positions=64)
GPT2 = replace(PRESETS["tiny-gpt2"], hidden=32, head_dim=8, ffn=64, max_positions=64, position_rows=64)


def shape_of(family: str, *, tied: bool = False, **changes: Any) -> ModelShape:
    """A model of 4 layers and 4 heads, small enough for 150 layouts in a minute; dropout off unless asked for."""
    base = LLAMA if family == "llama" else GPT2
    still = {"dropout_embedding": 0.0, "dropout_attention": 0.0, "dropout_residual": 0.0}
    return replace(base, tied=tied, **(still | changes))


def split_of(layers: int, stages: int) -> tuple[int, ...]:
    """Layers dealt out evenly, the first stages one more."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def job(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    *,
    m: int = 2,
    micro: int = 2,
    zero: int = 0,
    policy: str = "",
    schedule: str = "1f1b",
    offload: bool = False,
    offload_param: bool = False,
    bucket: int = 3000,
    persist: int = 40,
    layers: int = 4,
    **changes: Any,
) -> Resolved:
    """A resolved config in fp64 with small buckets, so that several are in play."""
    chunks = changes.pop("virtual_stages", {"interleaved-1f1b": 2, "zb-v": 2}.get(schedule, 1))
    settings: dict[str, Any] = {
        "layout": Layout(dp=dp, tp=tp, pp=pp),
        "train_batch_size": dp * micro * m,
        "micro_batch_size": micro,
        "micro_batches": m,
        "sequence_length": 16,
        "seed": 7,
        "precision": "fp64",
        "zero": Zero(
            stage=zero,
            gradient_policy=policy or {2: "scatter_every_microbatch"}.get(zero, "accumulate_then_scatter"),
            reduce_bucket_size=bucket,
            persistence_threshold=persist,
            offload_optimizer=offload,
            offload_param=offload_param,
        ),
        "schedule": schedule,
        "virtual_stages": chunks,
        "split": split_of(layers, pp * chunks),
        "optimizer": OptimizerSpec(lr=1e-2, weight_decay=0.01),
        "gradient_clipping": 0.5,
    }
    return Resolved(**(settings | changes))
