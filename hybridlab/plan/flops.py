"""Floating-point operations of a training step, and how much of the machine they use.

One multiply-add is two operations. A product [a, b]·[b, c] is 2abc. Backward costs twice forward: one product for the
input's gradient, one for the weight's. Attention is counted in full, as if no score were masked away, which is the
convention of the published tables (causal kernels do about half of it). Norms, activations and the embedding lookup are
left out: they are memory traffic, not matrix products.

*Model* FLOPs are those of the mathematics; *hardware* FLOPs also count what recomputation does again. MFU and HFU
divide them by what the cards could do at their peak in the same time (PaLM, arXiv:2204.02311, App. B; Korthikanti et
al., arXiv:2205.05198, Eq. 7 to 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape

BACKWARD_OVER_FORWARD = 2


def matrix_flops(shape: ModelShape) -> int:
    """Forward FLOPs per token of one layer's weight matrices: two for each weight."""
    width = shape.heads * shape.head_dim
    attention = shape.hidden * (width + 2 * shape.kv_heads * shape.head_dim) + width * shape.hidden
    mlp = (3 if shape.gated else 2) * shape.hidden * shape.ffn
    return 2 * (attention + mlp)


def attention_flops(shape: ModelShape, sequence: int) -> int:
    """Forward FLOPs per token of one layer's scores q·kᵀ and their product with v: 4·s·(heads·head_dim)."""
    return 4 * sequence * shape.heads * shape.head_dim


def head_flops(shape: ModelShape) -> int:
    """Forward FLOPs per token of the output head."""
    return 2 * shape.hidden * shape.vocab


def model_flops(shape: ModelShape, sequence: int, sequences: int) -> int:
    """FLOPs of one step on ``sequences`` sequences, forward and backward.

    For a GPT shape this is 72BLsh²(1 + s/6h + V/12hL) (arXiv:2205.05198, Eq. 7).
    """
    layer = matrix_flops(shape) + attention_flops(shape, sequence)
    forward = shape.layers * layer + head_flops(shape)
    return (1 + BACKWARD_OVER_FORWARD) * forward * sequence * sequences


def recompute_flops(shape: ModelShape, sequence: int, sequences: int, recompute: str) -> int:
    """FLOPs that recomputation adds: "none" nothing, "selective" attention once more, "full" every layer's forward.

    Selective gives 72BLsh²(1 + s/3h + V/12hL) in all (Eq. 8); full gives 96BLsh²(1 + s/6h + V/16hL) (arXiv:2104.04473,
    Eq. 3).
    """
    per_token = {
        "none": 0,
        "selective": attention_flops(shape, sequence),
        "full": matrix_flops(shape) + attention_flops(shape, sequence),
    }[recompute]
    return shape.layers * per_token * sequence * sequences


def paper_selective_flops(shape: ModelShape, sequence: int, sequences: int) -> int:
    """Hardware FLOPs under selective recomputation as Eq. 8 of arXiv:2205.05198 prints them.

    The equation's 1 + s/3h charges three more times the forward attention than Eq. 7, as if its backward ran again too.
    HFU figures of that paper are computed with it, so it is kept beside `recompute_flops`, which counts what runs.
    """
    extra = (1 + BACKWARD_OVER_FORWARD) * attention_flops(shape, sequence)
    return model_flops(shape, sequence, sequences) + shape.layers * extra * sequence * sequences


def flops_per_token(parameters: int, layers: int, hidden: int, sequence: int) -> int:
    """6N + 12Lhs, forward and backward: the shortcut of PaLM's appendix B, as in MosaicML's and torchtitan's tables."""
    return 6 * parameters + 12 * layers * hidden * sequence


def utilisation(flops: float, seconds: float, gpus: int, peak_flops: float) -> float:
    """Share of the cards' peak: MFU from model FLOPs, HFU from hardware FLOPs.

    Args:
        flops: of one step, all cards together.
        seconds: of one step.
        peak_flops: of one card, FLOP/s.
    """
    return flops / (seconds * gpus * peak_flops)


def training_days(flops_per_step_token: float, tokens: float, gpus: int, achieved_flops: float) -> float:
    """Days to train on ``tokens`` tokens at ``achieved_flops`` FLOP/s on each card (arXiv:2104.04473, Table 2)."""
    return flops_per_step_token * tokens / (gpus * achieved_flops) / 86400
