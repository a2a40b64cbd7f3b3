"""Activation recomputation: keep less from forward, compute it again in backward.

===========  ======================================  ================================================
policy       what is run again in backward           what is kept of a layer
===========  ======================================  ================================================
none         nothing                                 every activation
selective    the core attention (rotary, scores,     all but what lies between q, k, v and its output
             softmax, their values)
full         whole layers, in groups of `interval`   the group's input
===========  ======================================  ================================================

The non-reentrant form of torch's checkpoint: it fires each gradient hook once, also for shared weights
(pytorch#81296). Dropout masks are functions of (seed, step, sample), and the generators' state is restored besides,
so that what is run again is what was run. Collectives inside are issued again, by all ranks of their group alike.

Source: Chen et al., arXiv:1604.06174; selective: Korthikanti et al., arXiv:2205.05198 §5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Run = Callable[[Tensor], Tensor]


class Recomputed(nn.Module):
    """A module whose activations are not kept."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        """As the module; in backward it runs once more."""
        return checkpoint(self.module, *args, use_reentrant=False)


def recompute_attention(model: nn.Module) -> None:
    """Selective: wrap every core attention of ``model`` in place."""
    for module in list(model.modules()):
        core = getattr(module, "core", None)
        if isinstance(core, nn.Module) and not isinstance(core, Recomputed):
            module.core = Recomputed(core)


def recomputed(runs: Sequence[Run]) -> Run:
    """One callable that runs ``runs`` in a row, keeping only the input."""

    def together(x: Tensor) -> Tensor:
        for run in runs:
            x = run(x)
        return x

    return lambda x: checkpoint(together, x, use_reentrant=False)
