"""Formulas as published, for those who want to check a paper's table or another tool's estimate.

Nothing else in `hybridlab.plan` uses them: what our engine does is counted from its own parts. Where a paper prints a
number that its own formula does not give, the test that shows it says so.
"""

from __future__ import annotations

GIB, TIB = 2**30, 2**40


# ---- Megatron-LM ---------------------------------------------------------------------------------------------------


def megatron_parameters(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """12Lh²(1 + 13/(12h) + (V+s)/(12Lh)): a tied GPT without its final norm (arXiv:2104.04473, Eq. 2)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))


def megatron_step_flops(layers: int, hidden: int, vocab: int, sequence: int, batch: int) -> float:
    """96BsLh²(1 + s/6h + V/16Lh): with every layer's forward run again (arXiv:2104.04473, Eq. 3)."""
    share = 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * share


def bubble_over_ideal(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle over *ideal* time of 1F1B, (p-1)/m, or interleaved, (1/v)(p-1)/m (arXiv:2104.04473 §2.2).

    For equal stages without communication. The share of the *whole* step that is idle is x/(1+x).
    """
    return (stages - 1) / (micro_batches * chunks)


def zero_bubble_idle(stages: int, f: float, i: float, w: float) -> dict[str, float]:
    """Idle time of a stage in one step, in the units of f, i, w; without communication (arXiv:2401.10241, Table 2).

    Here i is the gradient of the input, w of the weight, and a whole backward is i + w. Texts that write B for either
    of them seem to contradict each other (deepseek-ai/DeepSeek-V3#724).
    """
    return {
        "1f1b": (stages - 1) * (f + i + w),
        "zb-h1": (stages - 1) * (f + i - w),
        "zb-h2": (stages - 1) * (f + i - 2 * w),
    }


def distributed_optimizer_bytes(dp: int) -> float:
    """Bytes per parameter of Megatron-LM's distributed optimizer, bf16 with fp32 gradients: 6 + 12/d (18 without)."""
    return 6 + 12 / dp


# ---- ZeRO and its descendants --------------------------------------------------------------------------------------


def zero_volume(stage: int) -> int:
    """Elements each rank moves per step and parameter for many ranks: 2, at stage 3 it is 3 (arXiv:1910.02054 §7).

    For n ranks the exact volume is (n-1)/n times as much.
    """
    return 3 if stage == 3 else 2


def zero_infinity_state_bytes(layers: int, hidden: int) -> int:
    """240·nl·hd² bytes of model states: 20 bytes a parameter, 12·nl·hd² parameters (arXiv:2104.07857 §3, Eq. 1, 2)."""
    return 240 * layers * hidden**2


def zero_infinity_checkpoint_bytes(layers: int, hidden: int, batch: int, sequence: int, interval: int = 1) -> float:
    """2·bsz·seq·hd·nl/ci bytes of activation checkpoints, one every ``interval`` layers (arXiv:2104.07857, Eq. 3)."""
    return 2 * batch * sequence * hidden * layers / interval


def zero_infinity_working_bytes(hidden: int) -> int:
    """4·hd·4hd bytes: weights and gradients of the largest operator, [hd, 4hd] in fp16 (arXiv:2104.07857, Eq. 4)."""
    return 4 * hidden * 4 * hidden


def zero_offload_bytes(gradients_on_host: bool, optimizer_on_host: bool) -> int:
    """Bytes per parameter left on the GPU: 2 for fp16 weights, 2 for fp16 gradients, 12 for fp32 states.

    arXiv:2101.06840, Table 1. Its last row (both on the host) prints 4M with "8x": 16/8 is 2.
    """
    return 2 + (0 if gradients_on_host else 2) + (0 if optimizer_on_host else 12)


# ---- DeepSpeed's estimators (deepspeed/runtime/zero, estimate_zero*_model_states_mem_needs) ------------------------


def deepspeed_zero2(parameters: float, gpus: int, *, offload: bool, buffer: float = 1.5) -> tuple[float, float]:
    """Bytes (per GPU, per node's host): 2Ψ + 18Ψ/n on the device, or 2Ψ with offload and max(4n, 16)Ψ on the host.

    All GPUs count as replicas, tensor and pipeline parallelism are not known to it.
    """
    host = parameters * max(4 * gpus, 16) if offload else 4 * parameters * gpus
    return (2 * parameters if offload else 2 * parameters + 18 * parameters / gpus), host * buffer


def deepspeed_zero3(
    parameters: float,
    largest_layer: float,
    gpus: int,
    nodes: int = 1,
    *,
    offload_optimizer: bool,
    offload_param: bool,
    zero_init: bool,
    buffer: float = 1.5,
) -> tuple[float, float]:
    """Bytes (per GPU, per node's host) at stage 3: 18 bytes a parameter over all GPUs, and 4 a parameter of the largest
    layer, gathered. Without ``zero_init`` every rank first builds the whole model in fp32 on the host."""
    share = 1 / nodes
    largest = 4 * largest_layer
    if offload_optimizer:
        device = largest if offload_param else largest + 2 * parameters / gpus
        states = (18 if offload_param else 16) * share * parameters
        host = states if zero_init else max(4 * gpus / nodes * parameters, states)
    else:
        device = largest + 18 * parameters / gpus
        host = 4 * largest_layer * gpus / nodes if zero_init else 4 * parameters * gpus / nodes
    return device, host * buffer


def pipedream_warmup(stages: int) -> int:
    """Micro-batches admitted before the first backward, one machine a stage (arXiv:1806.03377 §3.3)."""
    return stages
