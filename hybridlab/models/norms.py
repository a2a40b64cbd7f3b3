"""Which norm a shape asks for.

RMSNorm, Zhang & Sennrich, arXiv:1910.07467: x / rms(x) · weight. LayerNorm, arXiv:1607.06450: the mean goes too, and
there is a bias. Both are torch's own; in bf16 and fp16 they reduce in fp32.
"""

from __future__ import annotations

from torch import nn

from hybridlab.shapes import ModelShape


def make_norm(shape: ModelShape) -> nn.Module:
    """[..., hidden] to the same shape."""
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
