"""Decoders in plain single-device PyTorch. Parallelism is applied to them from outside, none is written into them.

decoder    the chain of pieces (embed, layers, head), and `build_model`
llama      RMSNorm, rotary positions, SwiGLU, grouped-query attention; Mistral and Qwen2 too
gpt2       LayerNorm, learned positions, GELU, biases, dropout, tied
attention  the projections around the core attention, and two cores: torch's fused one and one written out
rotary     rotary positions
norms      which norm a shape asks for
dropout    dropout whose mask is the same at every layout
streams    what those masks are functions of
init       first values, the same at every layout, drawn slice by slice
reference  the single-process training loop that everything is compared with
"""

from __future__ import annotations

from hybridlab.models import streams
from hybridlab.models.decoder import Decoder, build_model
from hybridlab.models.dropout import Dropout
from hybridlab.models.init import init_into, initialise, initialise_model

__all__ = ["Decoder", "Dropout", "build_model", "init_into", "initialise", "initialise_model", "streams"]
